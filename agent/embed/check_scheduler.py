"""The rounds of a driver's checks over its devices: a task for each check of each device.

So a device that hangs delays nobody but itself. While a call hangs there is no second one, and each period
counts as a look in which nobody could look. Which devices and checks there are any thread may say; the tasks
are the core thread's.
"""

import inspect
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import trio

from agent.embed.checks import Check, Seen, read_answer, read_error
from agent.embed.devices import Device
from agent.embed.source import CheckKey, DriverSource
from agent.errors import ConfigError, suggestion
from agent.model.check import CheckSample
from agent.model.declared import Declared
from agent.model.time import NS
from agent.system import jitter as dice

PLACES: Final = 16
"""Plain checks that run at once; one that hangs gives its place back at its deadline."""
DEVICES_MAX: Final = 4096
"""As many as a file in devices.d can declare."""
PHASE_MIN: Final = 0.5
"""What a check waits at least for its second look, of its period: more is chance, and spreads the load."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledCheck:
    """One check of one device."""

    check: Check
    device: Device
    declared: Declared

    @property
    def key(self) -> CheckKey:
        """What its samples are known by."""
        return self.declared.subject, self.check.name

    def sample(self) -> CheckSample:
        """What is said of it until its first look is over."""
        check = self.check
        return CheckSample(
            check.name,
            self.declared.subject,
            finding=None,
            unread="",
            passes=0,
            beat_ns=time.monotonic_ns(),
            # nobody stands still who is within a deadline
            period_ns=int(max(check.every_s, check.timeout_s) * NS),
            raise_after=check.raise_after,
            clear_after=check.clear_after,
        )

    def __str__(self) -> str:
        return f"check {self.check.name} of {self.device.name}"


class CheckScheduler:
    """A driver's devices and checks, and what the checks find."""

    def __init__(
        self,
        driver: str,
        node: str,
        source: DriverSource,
        jitter: Callable[[], float] = dice.random_fraction,
    ) -> None:
        """
        Args:
            driver: Whose devices they are.
            node: The pool of devices that name none.
            source: Is told the devices, and what the checks find.
            jitter: A number from 0 to 1.
        """
        self._driver = driver
        self._node = node
        self._source = source
        self._jitter = jitter
        self._lock = threading.Lock()
        self._declared: dict[str, Declared] = {}
        self._devices: dict[str, Device] = {}
        self._checks: dict[str, Check] = {}
        self._watches: dict[CheckKey, ScheduledCheck] = {}
        self._token: trio.lowlevel.TrioToken | None = None
        # of the core thread alone:
        self._changed = trio.Event()
        self._tasks: dict[ScheduledCheck, trio.CancelScope] = {}
        self._asked: dict[ScheduledCheck, trio.Event] = {}
        self._calls: dict[tuple[Check, Device], _Call] = {}
        self._places = trio.CapacityLimiter(PLACES)
        self._unlimited = trio.CapacityLimiter(math.inf)

    # --- from any thread -----------------------------------------------------------------------------------

    def add(self, *devices: Device) -> None:
        """More devices: all of them, or none. Raises ConfigError."""
        with self._lock:
            known = dict(self._devices)
            for device in devices:
                if not isinstance(device, Device):
                    raise ConfigError(f"{device!r} is no Device")
                if device.name in known:
                    raise ConfigError(f"device {device.name!r} is there already")
                known[device.name] = device
            if len(known) > DEVICES_MAX:
                raise ConfigError(f"{len(known)} devices, limit {DEVICES_MAX}")
            new = {device.name: device.declare(self._driver, self._node) for device in devices}
            self._devices, self._declared = known, self._declared | new
            self._arrange(begun=self._watches_of(devices, self._checks.values()))

    def remove(self, *names: str) -> None:
        """Some devices are there no longer: all of them, or none. Raises ConfigError."""
        with self._lock:
            known = dict(self._devices)
            for name in names:
                if name not in known:
                    raise ConfigError(f"device {name!r} is not there{suggestion(str(name), known)}")
                del known[name]
            self._devices = known
            self._declared = {name: declared for name, declared in self._declared.items() if name in known}
            self._arrange(ended=[one for one in self._watches.values() if one.device.name not in known])

    def check(self, check: Check) -> None:
        """One more check. Raises ConfigError."""
        with self._lock:
            if check.name in self._checks:
                raise ConfigError(f"check {check.name!r}: there is one of that name; say another, name=")
            self._checks[check.name] = check
            self._arrange(begun=self._watches_of(self._devices.values(), [check]))

    def recheck(self, name: str = "") -> None:
        """One check is due now, of all its devices; or all are. Raises ConfigError."""
        with self._lock:
            if name and name not in self._checks:
                raise ConfigError(f"check {name!r}: no such check{suggestion(name, self._checks)}")
            self._post(lambda: self._ask(name))

    @property
    def declared(self) -> Mapping[str, Declared]:
        """The devices by name, as the decision core knows them. Never changed in place."""
        return self._declared

    def unfinished(self, timeout_s: float) -> Sequence[str]:
        """The calls that do not return within that time, in words. After :meth:`run`."""
        end_s = time.monotonic() + timeout_s
        calls = list(self._calls.values())
        return [str(call) for call in calls if not call.over.wait(max(0.0, end_s - time.monotonic()))]

    def _watches_of(self, devices: Iterable[Device], checks: Iterable[Check]) -> list[ScheduledCheck]:
        checks = list(checks)
        return [
            ScheduledCheck(check, device, self._declared[device.name])
            for device in devices
            for check in checks
            if check.concerns(device)
        ]

    def _arrange(self, begun: Sequence[ScheduledCheck] = (), ended: Sequence[ScheduledCheck] = ()) -> None:
        """Who is there, and who is looked at by whom from now on. With the lock."""
        for watch in ended:
            del self._watches[watch.key]
        self._watches.update({watch.key: watch for watch in begun})
        self._source.declare(
            self._declared.values(), [watch.sample() for watch in begun], [watch.key for watch in ended]
        )
        self._post(lambda: self._changed.set())

    def _post(self, act: Callable[[], None]) -> None:
        """Does something in the core thread, if it runs; before it runs there is nothing to be done."""
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(act)

    # --- in the core thread --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Looks until cancelled."""
        async with trio.open_nursery() as nursery:
            self._token = trio.lowlevel.current_trio_token()
            while True:
                self._changed = trio.Event()
                self._assign(nursery)
                await self._changed.wait()

    def _assign(self, nursery: trio.Nursery) -> None:
        """A task for each check of each device that is there, and for no other."""
        with self._lock:
            watches = set(self._watches.values())
        for watch in self._tasks.keys() - watches:
            self._tasks.pop(watch).cancel()
        for watch in watches - self._tasks.keys():
            self._tasks[watch] = scope = trio.CancelScope()
            nursery.start_soon(self._follow, watch, scope, nursery)

    def _ask(self, name: str) -> None:
        for watch, asked in self._asked.items():
            if name in ("", watch.check.name):
                asked.set()

    @contextmanager
    def _hearing(self, watch: ScheduledCheck) -> Iterator[None]:
        """Until the end its task can be asked to look."""
        try:
            yield
        finally:
            self._asked.pop(watch, None)

    async def _follow(self, watch: ScheduledCheck, scope: trio.CancelScope, nursery: trio.Nursery) -> None:
        """One check of one device, until it is cancelled."""
        check, sample, alike, wanted = watch.check, watch.sample(), 0, True
        rest_s = check.every_s * (PHASE_MIN + (1 - PHASE_MIN) * self._jitter())
        due_s = trio.current_time()
        with scope, self._hearing(watch):
            while True:
                self._asked[watch] = asked = trio.Event()
                seen = await self._look(watch, nursery)
                is_news = not sample.passes or (seen.finding, seen.unread) != (sample.finding, sample.unread)
                alike = 1 if is_news else alike + 1
                _tell(watch, sample, seen)
                sample = sample._replace(
                    finding=seen.finding,
                    unread=seen.unread,
                    passes=sample.passes + 1,
                    beat_ns=time.monotonic_ns(),
                )
                # as long as it is counted the core sees each look; later ones it finds when it looks
                wake = wanted or alike <= max(check.raise_after, check.clear_after)
                self._note(watch, sample, wake=wake)
                due_s, rest_s = _next(due_s + rest_s, check.every_s), check.every_s
                with trio.move_on_at(due_s):
                    await asked.wait()
                wanted = asked.is_set()
                due_s = min(due_s, trio.current_time())

    def _note(self, watch: ScheduledCheck, sample: CheckSample, *, wake: bool) -> None:
        with self._lock:  # what is another device by now must not be said to be as this one was
            if self._watches.get(watch.key) is watch:
                self._source.note(sample, wake=wake)

    async def _look(self, watch: ScheduledCheck, nursery: trio.Nursery) -> Seen:
        """One look: what the check answers, or why it does not."""
        check, asked = watch.check, (watch.check, watch.device)
        silent = Seen(unread=f"no answer within {check.timeout_s:g} s")
        before = self._calls.get(asked)
        if before is not None and not before.over.is_set():
            return silent
        call = _Call(check, watch.device, self._unlimited)
        if not check.is_async:
            with trio.move_on_after(check.every_s) as waiting:
                await self._places.acquire_on_behalf_of(call)
            if waiting.cancelled_caught:
                return Seen(unread=f"no thread within {check.every_s:g} s: {PLACES} checks are running")
        try:
            self._calls[asked] = call
            nursery.start_soon(call.run)
            with trio.move_on_after(check.timeout_s):
                await call.ended.wait()
        finally:
            call.scope.cancel()
            if not check.is_async:
                self._places.release_on_behalf_of(call)
            if call.over.is_set():
                self._calls.pop(asked, None)
        return call.seen or silent


class _Call:
    """One call of a check."""

    def __init__(self, check: Check, device: Device, limiter: trio.CapacityLimiter) -> None:
        self.over = threading.Event()
        """It has returned, or was never made."""
        self.seen: Seen | None = None
        self.ended = trio.Event()
        self.scope = trio.CancelScope()
        self._check = check
        self._device = device
        self._limiter = limiter
        self._begun = False

    def __str__(self) -> str:
        return f"check {self._check.name} of {self._device.name}"

    async def run(self) -> None:
        """Asks. Whatever the check does, nothing is raised but what cancels us."""
        try:
            with self.scope:
                if self._check.is_async:
                    self.seen = await self._ask()
                else:
                    self.seen = await trio.to_thread.run_sync(
                        self._ask_in_thread,
                        thread_name="dh-check",
                        abandon_on_cancel=True,
                        limiter=self._limiter,
                    )
        finally:
            if not self._begun:
                self.over.set()
            self.ended.set()

    async def _ask(self) -> Seen:
        self._begun = True
        try:
            answer = self._check.function(self._device)
            if inspect.isawaitable(answer):
                answer = await answer
            return read_answer(answer)
        except BaseException as error:  # SystemExit, too: the driver lives on
            if (cancelled := _cancellation(error)) is not None:
                raise cancelled from None
            return read_error(error)
        finally:
            self.over.set()

    def _ask_in_thread(self) -> Seen:
        self._begun = True
        try:
            return read_answer(self._check.function(self._device))
        except BaseException as error:  # likewise
            return read_error(error)
        finally:
            self.over.set()


def _next(due_s: float, every_s: float) -> float:
    """When it is due after ``due_s``, or then; looks that were missed are not made up for."""
    late_s = trio.current_time() - due_s
    return due_s if late_s < 0 else due_s + every_s * (late_s // every_s + 1)


def _cancellation(error: BaseException) -> BaseException | None:
    """What of an exception is Trio's."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(trio.Cancelled)
    return error if isinstance(error, trio.Cancelled) else None


def _tell(watch: ScheduledCheck, before: CheckSample, seen: Seen) -> None:
    """Once per change, why nobody could look."""
    if seen.unread == before.unread:
        return
    if seen.unread:
        log.warning("%s: %s", watch, seen.unread)
        log.debug("%s", watch, exc_info=seen.error)
    else:
        log.info("%s: answers again", watch)
