"""Health checks that a driver defines for its devices: settings, results and scheduler.

The scheduler runs one task for each health check of each device in the core thread, so a device that hangs
delays only its own health checks. While a call hangs there is no second call, and every period counts as a
run without a result. After an exception, an invalid answer or a timeout a health check has no result.
"""

import inspect
import re
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final, NamedTuple

import trio

from agent.config.values import number_within, parse_count, seconds_within
from agent.driver.check_results import validated_finding
from agent.driver.merged_snapshot_source import DriverCheckKey, HostAndDriverSource
from agent.embed.devices import Device
from agent.errors import ConfigError, suggestion, unwrap_error
from agent.model.declared_devices import DriverCheckSample, DriverDevice, EqualRuns
from agent.model.health import Finding, Repair, Severity
from agent.model.time import NS
from agent.prepare.kubelet_message import exception_text, normalize, shorten
from agent.system.output import get_logger
from agent.system.threads.thread_start import ThreadStartError
from agent.system.threads.trio_calls import call_in_thread, cancellation
from agent.system.timing import random_fraction

EVERY_MIN_S: Final = 0.1
EVERY_MAX_S: Final = 3600.0
TIMEOUT_MIN_S: Final = 0.01
TIMEOUT_MAX_S: Final = 3600.0
COUNT_MAX: Final = 1000
NAME_BYTES: Final = 63
_NAME: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_REPORTED: Final = (Severity.DEGRADED, Severity.UNKNOWN, Severity.UNHEALTHY)

HealthCheckAnswer = Finding | bool | None
"""Answer of a health check. None or True: no fault. A finding: the fault. False is invalid."""
HealthCheckFunction = Callable[[Device], HealthCheckAnswer | Awaitable[HealthCheckAnswer]]
"""Driver's function that checks the health of one device."""


def unhealthy(code: str, evidence: str, advice: str = "", *, repair: Repair | None = None) -> Finding:
    """Return the finding of a device that cannot be used.

    Args:
        code: Stable dotted code of the driver, for example ``fpga.bank_locked``.
        evidence: One line with the compared numbers, but no times or counters, because each change of the
            text causes a new report. Cut to 500 bytes; line breaks and control characters become spaces.
        advice: What the operator should do, in one line; cut to 300 bytes.
        repair: Repair that ends the fault, for programs that act on reports; None: reported as NONE.

    Raises:
        ValueError: The code is not dotted, or is longer than 100 bytes.
        TypeError: A text is not a string, or the repair is not a Repair.
    """
    return validated_finding(Finding(code, Severity.UNHEALTHY, evidence, advice, repair=repair))


def degraded(code: str, evidence: str, advice: str = "", *, repair: Repair | None = None) -> Finding:
    """Return the finding of a device that works worse than it should: it stays Healthy, with a message.

    Arguments and errors are those of :func:`unhealthy`.
    """
    return validated_finding(Finding(code, Severity.DEGRADED, evidence, advice, repair=repair))


def unknown(code: str, evidence: str, advice: str = "", *, repair: Repair | None = None) -> Finding:
    """Return the finding of a device whose health cannot be determined.

    Arguments and errors are those of :func:`unhealthy`.
    """
    return validated_finding(Finding(code, Severity.UNKNOWN, evidence, advice, repair=repair))


# --- a check -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HealthCheck:
    """Health check of a driver, for all devices that match its patterns. Validated when it is created.

    Raises:
        ConfigError: A setting is invalid.
    """

    name: str
    """Name of the health check: a DNS label."""
    function: HealthCheckFunction
    """Function of the driver: plain (called in a worker thread) or async (in the core thread's loop)."""
    every_s: float
    """Period of the health check's calls [s]."""
    timeout_s: float
    """Longest duration of a call of the health check [s]."""
    devices: tuple[str, ...]
    """Shell patterns of the names of devices that the health check applies to."""
    raise_after: int
    """Number of failing calls in a row before the health check's fault is reported."""
    clear_after: int
    """Number of passing calls in a row before the health check's fault is cleared."""

    def __post_init__(self) -> None:
        name: object = self.name
        if not (isinstance(name, str) and len(name) <= NAME_BYTES and _NAME.fullmatch(name)):
            rule = f"not a DNS label of at most {NAME_BYTES} bytes, such as link-up; set one with name="
            raise ConfigError(f"health check {str(name)[:NAME_BYTES]!r}: the name is {rule}")
        if not callable(self.function):
            raise ConfigError(
                f"health check {self.name!r}: {self.function!r} is not callable; pass a function"
            )
        patterns: tuple[object, ...] = self.devices
        if not (patterns and all(isinstance(pattern, str) and pattern for pattern in patterns)):
            raise ConfigError(
                f"health check {self.name!r}: devices: {patterns!r} is not a pattern of device names"
            )
        count = number_within(1, COUNT_MAX)
        self._check_setting("every_s", self.every_s, _read_seconds, seconds_within(EVERY_MIN_S, EVERY_MAX_S))
        self._check_setting(
            "timeout_s", self.timeout_s, _read_seconds, seconds_within(TIMEOUT_MIN_S, TIMEOUT_MAX_S)
        )
        self._check_setting("raise_after", self.raise_after, parse_count, count)
        self._check_setting("clear_after", self.clear_after, parse_count, count)

    def _check_setting(
        self, label: str, value: object, read: Callable[[object], object], check: Callable[[Any], None]
    ) -> None:
        try:
            check(read(value))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"health check {self.name!r}: {label}: {error}") from None

    @property
    def is_async(self) -> bool:
        """Whether the health check's function is async."""
        function: object = self.function
        while isinstance(function, partial):
            function = function.func
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  # an object of a class
        )

    def applies_to(self, device: Device) -> bool:
        """Return True if one of the patterns matches the device's name."""
        return any(fnmatchcase(device.name, pattern) for pattern in self.devices)


def default_check_name(function: object) -> str:
    """Return the name of a health check without ``name=``: its function ``link_up`` gives ``link-up``."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__)).strip("_").replace("_", "-").lower()


def as_patterns(devices: str | Sequence[str]) -> tuple[str, ...]:
    return (devices,) if isinstance(devices, str) else tuple(devices)


def _read_seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number of seconds; pass an int or a float")
    return value


# --- answers -----------------------------------------------------------------------------------------------


class HealthCheckResult(NamedTuple):
    """Result of one call of a health check: no fault, a finding, or no result."""

    finding: Finding | None = None
    """Fault of the device that the call found; None: no fault, or no result."""
    unread: str = ""
    """Reason why the call has no result; empty: it has a result."""
    error: BaseException | None = None
    """Exception that the health check's function raised; None: it raised none."""


def result_from_answer(answer: object) -> HealthCheckResult:
    """Convert the answer of a health check to its result."""
    if answer is None or answer is True:
        return HealthCheckResult()
    if isinstance(answer, Finding) and answer.severity in _REPORTED:
        try:
            return HealthCheckResult(validated_finding(answer))
        except (ValueError, TypeError) as error:
            return result_from_error(error)
    if inspect.iscoroutine(answer):
        answer.close()
    given = "False" if answer is False else f"a {type(answer).__name__}"
    expected = "None, True or a result of unhealthy(), degraded() or unknown()"
    return HealthCheckResult(unread=f"answered {given}, not {expected}")


def result_from_error(error: BaseException) -> HealthCheckResult:
    """Return the result of a health check that raised an exception: no result, with the exception's text."""
    root = unwrap_error(error)
    name, text = type(root).__name__, normalize(exception_text(root))
    return HealthCheckResult(unread=shorten(f"{name}: {text}" if text else name), error=error)


# --- scheduler ---------------------------------------------------------------------------------------------

MAX_THREADS: Final = 16
"""Largest number of health checks without ``async`` that run at once; hung ones count until their timeout."""
DEVICES_MAX: Final = 4096
"""Largest number of devices of a driver, as in a declaration file."""
MIN_FIRST_PERIOD: Final = 0.5
"""Shortest first period of a health check, as a share of its period; random between this and 1."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledCheck:
    """One health check of one device, with the device as the driver declared it."""

    check: HealthCheck
    device: Device
    declared: DriverDevice

    @property
    def key(self) -> DriverCheckKey:
        """Key of the check's samples in the snapshot source: the device's subject and the check's name."""
        return self.declared.subject, self.check.name

    def initial_sample(self) -> DriverCheckSample:
        """Return the sample that is used for the health check until its first call has returned."""
        check = self.check
        return DriverCheckSample(
            check.name,
            self.declared.subject,
            finding=None,
            no_result_reason="",
            passes=0,
            beat_ns=time.monotonic_ns(),
            # a check within its deadline is not stalled
            period_ns=int(max(check.every_s, check.timeout_s) * NS),
            raise_after=check.raise_after,
            clear_after=check.clear_after,
        )


class DriverCheckScheduler:
    """Scheduler that runs each health check of one driver on each device that it applies to."""

    def __init__(
        self,
        driver: str,
        node: str,
        source: HostAndDriverSource,
        jitter: Callable[[], float] = random_fraction,
    ) -> None:
        """Create a scheduler without devices and health checks.

        Args:
            driver: Name of the driver.
            node: Name of the Kubernetes node, which is the pool of devices that name no pool.
            source: Receives the devices, and a sample after each run of a health check.
            jitter: Returns a random number from 0 to 1.
        """
        self._driver = driver
        self._node = node
        self._source = source
        self._jitter = jitter
        self._lock = threading.Lock()
        self._declared: dict[str, DriverDevice] = {}
        self._devices: dict[str, Device] = {}
        self._checks: dict[str, HealthCheck] = {}
        self._scheduled: dict[DriverCheckKey, ScheduledCheck] = {}
        self._token: trio.lowlevel.TrioToken | None = None
        # core thread only:
        self._changed = trio.Event()
        self._tasks: dict[ScheduledCheck, trio.CancelScope] = {}
        self._requests: dict[ScheduledCheck, trio.Event] = {}
        self._calls: dict[tuple[HealthCheck, Device], _CheckCall] = {}
        self._slots = trio.CapacityLimiter(MAX_THREADS)

    # --- thread-safe ---------------------------------------------------------------------------------------

    def add_devices(self, *devices: Device) -> None:
        """Add devices, all of them or none. Raises ConfigError if a device cannot be added."""
        with self._lock:
            known = dict(self._devices)
            for device in devices:
                if not isinstance(device, Device):
                    raise ConfigError(f"{device!r} is not a device; add objects of drahealth.Device")
                if device.name in known:
                    raise ConfigError(f"device {device.name!r} exists already (in any pool); remove it first")
                known[device.name] = device
            if len(known) > DEVICES_MAX:
                text = f"driver {self._driver}: {len(known)} devices, limit {DEVICES_MAX}; remove some first"
                raise ConfigError(text)
            new = {device.name: device.declare(self._driver, self._node) for device in devices}
            self._devices, self._declared = known, self._declared | new
            self._update_schedule(begun=self._schedule(devices, self._checks.values()))

    def remove_devices(self, *names: str) -> None:
        """Remove devices, all of them or none. Raises ConfigError if a device does not exist."""
        with self._lock:
            known = dict(self._devices)
            for name in names:
                if name not in known:
                    raise ConfigError(f"device {name!r} does not exist{suggestion(name, known)}")
                del known[name]
            self._devices = known
            self._declared = {name: declared for name, declared in self._declared.items() if name in known}
            ended = [check for check in self._scheduled.values() if check.device.name not in known]
            self._update_schedule(ended=ended)

    def add_check(self, check: HealthCheck) -> None:
        """Add a health check, for present and later devices. Raises ConfigError if its name is taken."""
        with self._lock:
            if check.name in self._checks:
                raise ConfigError(
                    f"health check {check.name!r}: the name is taken; set another one with name="
                )
            self._checks[check.name] = check
            self._update_schedule(begun=self._schedule(self._devices.values(), [check]))

    def run_now(self, name: str = "") -> None:
        """Run one health check now on all its devices; empty name: all checks.

        Raises ConfigError if no check has the name.
        """
        with self._lock:
            if name and name not in self._checks:
                raise ConfigError(f"health check {name!r} does not exist{suggestion(name, self._checks)}")
            self._run_in_core(lambda: self._request_run_for(lambda run: name in ("", run.check.name)))

    def run_for_devices(self, subjects: Collection[str]) -> None:
        """Run all health checks of these devices now, in addition to their periodic runs."""
        with self._lock:
            self._run_in_core(lambda: self._request_run_for(lambda run: run.declared.subject in subjects))

    def run_again(self, keys: Collection[DriverCheckKey]) -> None:
        """Run the health checks with these keys now, in addition to their periodic runs."""
        with self._lock:
            self._run_in_core(lambda: self._request_run_for(lambda run: run.key in keys))

    @property
    def declared_devices(self) -> Mapping[str, DriverDevice]:
        """Devices by name, in the health engine's format. The mapping never changes in place."""
        return self._declared

    def hung_calls(self, timeout_s: float) -> Sequence[str]:
        """Wait for running calls up to ``timeout_s``; return the names of those that still run then."""
        end_s = time.monotonic() + timeout_s
        calls = list(self._calls.values())
        return [str(call) for call in calls if not call.returned.wait(max(0.0, end_s - time.monotonic()))]

    def _schedule(self, devices: Iterable[Device], checks: Iterable[HealthCheck]) -> list[ScheduledCheck]:
        checks = list(checks)
        return [
            ScheduledCheck(check, device, self._declared[device.name])
            for device in devices
            for check in checks
            if check.applies_to(device)
        ]

    def _update_schedule(
        self, begun: Sequence[ScheduledCheck] = (), ended: Sequence[ScheduledCheck] = ()
    ) -> None:
        """Add and remove scheduled checks, and give the devices to the snapshot source.

        The caller holds the lock.
        """
        for scheduled in ended:
            del self._scheduled[scheduled.key]
        self._scheduled.update({scheduled.key: scheduled for scheduled in begun})
        samples = [scheduled.initial_sample() for scheduled in begun]
        self._source.declare(self._declared.values(), samples, [scheduled.key for scheduled in ended])
        self._run_in_core(lambda: self._changed.set())

    def _run_in_core(self, act: Callable[[], None]) -> None:
        """Call `act` in the core thread; do nothing if the thread does not run."""
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(act)

    # --- core thread only ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run all health checks periodically until cancelled."""
        async with trio.open_nursery() as nursery:
            self._token = trio.lowlevel.current_trio_token()
            while True:
                self._changed = trio.Event()
                self._update_tasks(nursery)
                await self._changed.wait()

    def _update_tasks(self, nursery: trio.Nursery) -> None:
        """Start the tasks of new scheduled checks and cancel those of removed ones."""
        with self._lock:
            scheduled = set(self._scheduled.values())
        for removed in self._tasks.keys() - scheduled:
            self._tasks.pop(removed).cancel()
        self._calls = {key: call for key, call in self._calls.items() if not call.returned.is_set()}
        for added in scheduled - self._tasks.keys():
            self._tasks[added] = scope = trio.CancelScope()
            nursery.start_soon(self._run_periodically, added, scope, nursery)

    def _request_run_for(self, is_requested: Callable[[ScheduledCheck], bool]) -> None:
        for scheduled, requested in self._requests.items():
            if is_requested(scheduled):
                requested.set()

    async def _run_periodically(
        self, scheduled: ScheduledCheck, scope: trio.CancelScope, nursery: trio.Nursery
    ) -> None:
        """Run one health check of one device periodically until cancelled."""
        check, sample, same_results, is_requested = scheduled.check, scheduled.initial_sample(), 0, True
        equal_runs = EqualRuns()
        period_s = check.every_s * (MIN_FIRST_PERIOD + (1 - MIN_FIRST_PERIOD) * self._jitter())
        due_s = trio.current_time()
        with scope, ExitStack() as at_end:
            at_end.callback(self._requests.pop, scheduled, None)
            while True:
                self._requests[scheduled] = requested = trio.Event()
                result = await self._call_check(scheduled, nursery)
                before = sample.finding, sample.no_result_reason
                has_changed = not sample.passes or (result.finding, result.unread) != before
                same_results = 1 if has_changed else same_results + 1
                equal_runs = equal_runs.next(result.finding, result.unread)
                _log_change(scheduled, sample, result)
                sample = sample._replace(
                    finding=result.finding,
                    no_result_reason=result.unread,
                    passes=sample.passes + 1,
                    beat_ns=time.monotonic_ns(),
                    equal_passes=equal_runs.equal_passes,
                )
                # while results still count the core must see each one; later ones can wait for its heartbeat
                wake = is_requested or same_results <= max(check.raise_after, check.clear_after)
                self._add_sample(scheduled, sample, wake=wake)
                due_s, period_s = _next_due_s(due_s + period_s, check.every_s), check.every_s
                with trio.move_on_at(due_s):
                    await requested.wait()
                is_requested = requested.is_set()
                due_s = min(due_s, trio.current_time())

    def _add_sample(self, scheduled: ScheduledCheck, sample: DriverCheckSample, *, wake: bool) -> None:
        with self._lock:  # drop samples of a device that was replaced under the same name
            if self._scheduled.get(scheduled.key) is scheduled:
                self._source.update_check_sample(sample, wake=wake)

    async def _call_check(self, scheduled: ScheduledCheck, nursery: trio.Nursery) -> HealthCheckResult:
        """Call a health check once on its device; return its result, or the reason why it has none."""
        check, key = scheduled.check, (scheduled.check, scheduled.device)
        no_answer = HealthCheckResult(unread=f"no answer within {check.timeout_s:g} s")
        last = self._calls.get(key)
        if last is not None and not last.returned.is_set():
            return no_answer
        call = _CheckCall(check, scheduled.device)
        if not check.is_async:
            with trio.move_on_after(check.every_s) as waiting:
                await self._slots.acquire_on_behalf_of(call)
            if waiting.cancelled_caught:
                busy = f"{MAX_THREADS} health checks are running"
                return HealthCheckResult(unread=f"no free thread within {check.every_s:g} s: {busy}")
        try:
            self._calls[key] = call
            nursery.start_soon(call.run)
            with trio.move_on_after(check.timeout_s):
                await call.ended.wait()
        finally:
            call.scope.cancel()
            if not check.is_async:
                self._slots.release_on_behalf_of(call)
            if call.returned.is_set():
                self._calls.pop(key, None)
        return call.result or no_answer


class _CheckCall:
    """One call of a health check for one device."""

    def __init__(self, check: HealthCheck, device: Device) -> None:
        self.returned = threading.Event()
        """Event that is set when the check's function has returned, or was never called."""
        self.result: HealthCheckResult | None = None
        self.ended = trio.Event()
        self.scope = trio.CancelScope()
        self._check = check
        self._device = device

    def __str__(self) -> str:
        return f"health check {self._check.name} of device {self._device.name}"

    async def run(self) -> None:
        """Call the health check and store its result.

        The only exception that it raises is the cancellation of this call's Trio scope.
        """
        try:
            with self.scope:
                if self._check.is_async:
                    self.result = await self._call_async()
                else:
                    self.result = await call_in_thread(self._call_plain, "dh-driver-check")
        except ThreadStartError as error:
            self.returned.set()
            self.result = HealthCheckResult(unread=str(error))
        finally:
            self.ended.set()

    async def _call_async(self) -> HealthCheckResult:
        try:
            answer = self._check.function(self._device)
            if inspect.isawaitable(answer):
                answer = await answer
            return result_from_answer(answer)
        except BaseException as error:  # a SystemExit of a check must not end the driver
            if (cancelled := cancellation(error)) is not None:
                raise cancelled from None
            return result_from_error(error)
        finally:
            self.returned.set()

    def _call_plain(self) -> HealthCheckResult:
        try:
            return result_from_answer(self._check.function(self._device))
        except BaseException as error:  # a SystemExit of a check must not end the driver
            return result_from_error(error)
        finally:
            self.returned.set()


def _next_due_s(due_s: float, every_s: float) -> float:
    """Return the time of the next run on Trio's clock [s]: `due_s`, or later if that time has passed."""
    late_s = trio.current_time() - due_s
    return due_s if late_s < 0 else due_s + every_s * (late_s // every_s + 1)


def _log_change(scheduled: ScheduledCheck, before: DriverCheckSample, result: HealthCheckResult) -> None:
    """Log the reason why a health check has no result, once per change of the reason."""
    if result.unread == before.no_result_reason:
        return
    check, device = scheduled.check.name, scheduled.device.name
    if result.unread:
        log.warning(
            "health check %s of device %s: no result: %s; it runs again after its period",
            check, device, result.unread,
        )  # fmt: skip
        log.debug(
            "health check %s of device %s: no result; the exception follows",
            check, device, exc_info=result.error,
        )  # fmt: skip
    else:
        log.info("health check %s of device %s: has a result again, after runs without one", check, device)
