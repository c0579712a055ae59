"""Runner of the checks that operators configure as commands (``[[check]]``): when each runs, and its results.

Each run has a thread, which starts the command and waits for it. A command that does not end is killed. While
a killed command still exists, its check does not run again, and each period counts as a run without a result.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import trio

from agent.health.verdict import truncate_utf8
from agent.model.declared_devices import EqualRuns
from agent.model.health import Finding
from agent.model.report import Report
from agent.model.settings import DEVICE_ARGUMENT, CustomCheck, CustomCheckResult
from agent.sources.check_command import KILL_S, CheckCgroups, CheckCommand, CommandResult, open_check_cgroups
from agent.system.output import get_logger
from agent.system.threads.thread_start import ThreadStartError
from agent.system.threads.trio_calls import call_in_thread
from agent.system.timing import random_fraction

RUNS_MAX: Final = 4
"""Largest number of checks' commands that run at once."""
EVIDENCE_BYTES: Final = 500
NO_OUTPUT: Final = "the command reports a fault, without text"
OK_CODE, FAULT_CODE = 0, 1
POLL_S: Final = 0.05
"""Interval of checks whether a killed command has ended [s]."""
MIN_FIRST_PERIOD: Final = 0.5
"""Shortest first period of a check, as a share of its normal period; the rest is random."""

log = get_logger(__name__)

_Key = tuple[str, str]
"""Identity of a periodic run: name of the check and its device; without a device, the node or all devices."""


class _Task(NamedTuple):
    """Task that runs one check periodically, and the cancel scope that ends the task."""

    check: CustomCheck
    scope: trio.CancelScope


class CustomCheckRunner:
    """Runner of the checks that operators configure (``[[check]]``).

    All methods except :meth:`close` run in the core thread, which runs the engine loop.
    """

    def __init__(
        self,
        checks: Sequence[CustomCheck],
        node: str,
        on_results: Callable[[Sequence[CustomCheckResult], bool], None],
        open_cgroups: Callable[[], tuple[CheckCgroups | None, str]] = open_check_cgroups,
    ) -> None:
        """Create the runner; nothing runs before :meth:`run`.

        Args:
            checks: Configured checks.
            node: Name of the Kubernetes node, for the environment of the commands.
            on_results: Called with all newest results, and whether the engine loop must read them at once.
            open_cgroups: Prepares the cgroups of the checks; called in a thread before the first run.
        """
        self._checks = tuple(checks)
        self._node = node
        self._on_results = on_results
        self._open_cgroups = open_cgroups
        self._cgroups: CheckCgroups | None = None
        self._has_cgroups = False
        self._devices: dict[str, tuple[str, str]] = {}
        """Devices of the newest report by name, each with its last known UUID and PCI address."""
        self._replaced: set[str] = set()
        """Devices whose hardware was replaced, and whose results are to be dropped."""
        self._results: dict[_Key, CustomCheckResult] = {}
        self._equal_runs: dict[_Key, EqualRuns] = {}
        self._tasks: dict[_Key, _Task] = {}
        self._commands: dict[_Key, CheckCommand] = {}
        """Commands that were started and have not ended, by check and device."""
        self._numbers = itertools.count(1)
        self._slots = trio.CapacityLimiter(RUNS_MAX)
        self._changed = trio.Event()

    def reconfigure(self, checks: Sequence[CustomCheck]) -> None:
        """Replace the configured checks. Unchanged checks go on; results of removed checks are dropped."""
        self._checks = tuple(checks)
        self._changed.set()

    def handle_report(self, report: Report) -> None:
        """Store the devices of the newest health report, for checks that run once for each device."""
        if not any(check.is_per_device for check in self._checks):
            return
        devices: dict[str, tuple[str, str]] = {}
        for device in report.devices:
            name = "/".join(filter(None, device.key)) if device.driver else device.device
            before = self._devices.get(name, ("", ""))
            known = dict(device.attributes)
            devices[name] = known.get("uuid") or before[0], known.get("pciBusId") or before[1]
            if _is_other_hardware(before, devices[name]):
                self._replaced.add(name)
        if devices != self._devices:
            self._devices = devices
            self._changed.set()

    @property
    def running(self) -> int:
        """Number of commands that run, or that were killed and have not ended."""
        return len(self._commands)

    def close(self) -> None:
        """Kill the commands of all checks that run. Never blocks."""
        for command in list(self._commands.values()):
            command.kill()

    async def run(self) -> None:
        """Run all checks periodically until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                self._changed = trio.Event()
                if self._checks and not self._has_cgroups:
                    await self._prepare_cgroups()
                self._update_tasks(nursery)
                await self._changed.wait()

    async def _prepare_cgroups(self) -> None:
        self._has_cgroups = True
        try:
            self._cgroups, problem = await call_in_thread(self._open_cgroups, "dh-check")
        except ThreadStartError as error:
            problem = str(error)
        if self._cgroups is None:
            log.warning(
                "custom checks: cgroups for their commands cannot be used: %s; memory and processes of the "
                "commands are not limited, and processes that leave a command's session survive it",
                problem,
            )
        elif problem:
            log.warning(
                "custom checks: some cgroup limits cannot be set for their commands: %s; these resources are "
                "not limited",
                problem,
            )

    def _update_tasks(self, nursery: trio.Nursery) -> None:
        wanted = {key: check for check in self._checks for key in self._keys(check)}
        for key, task in list(self._tasks.items()):
            if wanted.get(key) != task.check or key[1] in self._replaced:
                del self._tasks[key]
                task.scope.cancel()
        self._commands = {key: run for key, run in self._commands.items() if not run.is_ended()}
        gone = {key for key in self._results if key not in wanted or key[1] in self._replaced}
        self._replaced.clear()
        for key in gone:
            del self._results[key]
            self._equal_runs.pop(key, None)
        if gone:
            self._on_results(tuple(self._results.values()), True)
        for key, check in wanted.items():
            if key not in self._tasks:
                task = self._tasks[key] = _Task(check, trio.CancelScope())
                nursery.start_soon(self._run_periodically, key, task)

    def _keys(self, check: CustomCheck) -> list[_Key]:
        if not check.is_per_device:
            return [(check.name, "")]
        return [(check.name, device) for device in sorted(self._devices) if check.matches(device)]

    async def _run_periodically(self, key: _Key, task: _Task) -> None:
        check = task.check
        with task.scope:
            due_s = trio.current_time()
            period_s = check.period_s * (MIN_FIRST_PERIOD + (1 - MIN_FIRST_PERIOD) * random_fraction())
            while True:
                result = await self._run_once(key, check)
                self._add_result(key, check, result)
                due_s = max(due_s + period_s, trio.current_time())
                period_s = check.period_s
                await trio.sleep_until(due_s)

    async def _run_once(self, key: _Key, check: CustomCheck) -> CommandResult:
        """Run a check's command once; return its exit code and output, or the reason why it did not run.

        Args:
            key: Name of the check, and the device.
        """
        last = self._commands.get(key)
        if last is not None and not await _wait_for_end(last):
            return CommandResult(None, "", "not started: a process of its last run survives SIGKILL")
        borrower = object()  # not the key: the last run of a check that was just changed may have a slot
        with trio.move_on_after(check.period_s) as waiting:
            await self._slots.acquire_on_behalf_of(borrower)
        if waiting.cancelled_caught:
            return CommandResult(None, "", f"not started within {check.period_s:g} s: {RUNS_MAX} checks run")
        command = self._commands[key] = self._command(key, check)
        try:
            return await call_in_thread(command.run, "dh-check")
        except ThreadStartError as error:
            del self._commands[key]  # it never runs, so it never ends
            return CommandResult(None, "", str(error))
        except trio.Cancelled:
            command.kill()
            raise
        finally:
            self._slots.release_on_behalf_of(borrower)
            if command.is_ended() and self._commands.get(key) is command:
                del self._commands[key]

    def _command(self, key: _Key, check: CustomCheck) -> CheckCommand:
        device = key[1]
        environ = {"DRAHEALTH_CHECK": check.name, "DRAHEALTH_NODE": self._node}
        cgroup = None
        if self._cgroups is not None:
            cgroup = self._cgroups.cgroup(
                f"{check.name}-{next(self._numbers)}", check.memory, check.processes
            )
        return CheckCommand(
            [argument.replace(DEVICE_ARGUMENT, device) for argument in check.command],
            environ | ({"DRAHEALTH_DEVICE": device} if device else {}),
            timeout_s=check.timeout_s,
            user=check.user,
            cgroup=cgroup,
        )

    def _add_result(self, key: _Key, check: CustomCheck, ended: CommandResult) -> None:
        before = self._results.get(key)
        result = _result(key, check, ended, before.passes + 1 if before else 1)
        runs = self._equal_runs.get(key, EqualRuns()).next(result.finding, result.no_result_reason)
        self._equal_runs[key] = runs
        has_changed = before is None or result[2:4] != before[2:4]
        _log_change(key, before.no_result_reason if before else "", result.no_result_reason)
        self._results[key] = result._replace(equal_passes=runs.equal_passes)
        # while results still count the core must see each one; later ones can wait for its heartbeat
        wake = has_changed or runs.equal_passes <= max(check.raise_after, check.clear_after)
        self._on_results(tuple(self._results.values()), wake)


def _is_other_hardware(before: tuple[str, str], now: tuple[str, str]) -> bool:
    """Compare a device's UUID and PCI address, empty if unknown; the address only without an earlier UUID."""
    if before[0]:
        return before[0] != now[0]
    return bool(before[1]) and before[1] != now[1]


async def _wait_for_end(command: CheckCommand) -> bool:
    """Kill the command of a check's last run; return whether it has ended within KILL_S seconds."""
    command.kill()
    for _ in range(round(KILL_S / POLL_S)):
        if command.is_ended():
            return True
        await trio.sleep(POLL_S)
    return False


def _result(key: _Key, check: CustomCheck, ended: CommandResult, passes: int) -> CustomCheckResult:
    from agent.prepare.kubelet_message import sanitize  # a start without custom checks saves it

    text = truncate_utf8(sanitize(ended.output), EVIDENCE_BYTES)
    finding, reason = None, ""
    if ended.exit_code == FAULT_CODE:
        evidence = text or NO_OUTPUT
        finding = Finding(check.code, check.severity, evidence, check.advice, repair=check.repair)
    elif ended.exit_code != OK_CODE:
        problem = ended.problem or f"exit code {ended.exit_code}"
        reason = truncate_utf8(f"{sanitize(problem)}{': ' if text else ''}{text}", EVIDENCE_BYTES)
    return CustomCheckResult(*key, finding, reason, passes, time.monotonic_ns())


def _log_change(key: _Key, before: str, reason: str) -> None:
    """Log why a check has no result, once for each change of the reason, and when it has a result again."""
    name, device = key
    label = f"{name}{f' of device {device}' if device else ''}"
    if reason and reason != before:
        log.warning("custom check %s: no result: %s; it runs again after its period", label, reason)
    elif before and not reason:
        log.info("custom check %s: has a result again, after runs without one", label)
