"""Commands of custom checks as real processes: ends, limits, rights and cgroups; and an agent with them."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import trio
import trio.testing
from agents import Agent, run_command, short_tmp
from machine import unified_root
from no_threads import no_threads
from other_user import skip_unless_user_can_change
from patience import PATIENCE_S
from wire.serving import at, eventually
from wire.serving import report as report_of

from agent.model.health import DeviceHealth, Health, Severity
from agent.model.report import Report
from agent.model.settings import CustomCheck, CustomCheckResult
from agent.node.custom_check_runner import NO_OUTPUT, RUNS_MAX, CustomCheckRunner
from agent.sources import check_command
from agent.sources.check_command import (
    FLOOD_BYTES,
    OUTPUT_BYTES,
    UNPRIVILEGED,
    CheckCgroup,
    CheckCgroups,
    CheckCommand,
    CommandResult,
)

__all__ = ["short_tmp"]
REPOSITORY = Path(__file__).parent.parent


def run(script: str, *, timeout_s: float = PATIENCE_S, user: str = "", cgroup: CheckCgroup | None = None,
        **environ: str) -> CommandResult:  # fmt: skip
    """Run a shell script as a check's command."""
    command = ["/bin/sh", "-c", script]
    return CheckCommand(command, environ, timeout_s=timeout_s, user=user, cgroup=cgroup).run()


@pytest.fixture(autouse=True)
def _root_can_change_its_user() -> None:
    """A check of root's agent is never run with the rights of the agent instead."""
    if os.geteuid() == 0:
        skip_unless_user_can_change()


def own_user() -> str:
    """Return this process's user, for tests in which the command must read its files."""
    return str(os.geteuid())


def run_until_timeout(script: str, cgroup: CheckCgroup | None = None) -> tuple[CommandResult, int]:
    """Run a script that prints ``began`` and waits; return its result, and a timeout in which it began."""
    for timeout_s in (1, 5, 20, 60):  # the start takes seconds on a busy machine
        result = run(script, timeout_s=timeout_s, user=own_user(), cgroup=cgroup)
        if result.output == "began":
            break
    return result, timeout_s


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- one run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 2, 77])
def test_command_ends_with_its_exit_code_and_output(code: int) -> None:
    assert run(f"echo some; echo text; exit {code}") == CommandResult(code, "some\ntext")


def test_standard_error_counts_without_output() -> None:
    assert run("echo reason >&2; exit 1") == CommandResult(1, "reason")
    assert run("echo text; echo reason >&2; exit 1") == CommandResult(1, "text")


def test_missing_command_names_the_program() -> None:
    missing = CheckCommand(["/nowhere/check"], {}, timeout_s=PATIENCE_S, user="", cgroup=None).run()
    assert missing == CommandResult(None, "", "/nowhere/check: execution failed: No such file or directory")


def test_file_without_permission_names_the_user(tmp_path: Path) -> None:
    file = tmp_path / "check"
    file.write_text("#!/bin/sh\n")
    denied = CheckCommand([str(file)], {}, timeout_s=PATIENCE_S, user="", cgroup=None).run()
    assert denied.problem.startswith(f"{file}: execution failed: Permission denied for user ")


@pytest.mark.parametrize("call", ["pipe2", "pidfd_open"])
def test_lack_of_descriptors_is_no_result(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, call, refuse)
    command = CheckCommand(["/bin/sleep", "1000"], {}, timeout_s=PATIENCE_S, user="", cgroup=None)
    assert command.run() == CommandResult(None, "", "/bin/sleep: not started: Too many open files")
    eventually(command.is_ended, "the end of the command")


class SlowPoller:
    """Poller of a simulated command. Each wait takes the next of some times; a further one sees the end."""

    def __init__(self, times_s: Iterable[float]) -> None:
        self.now_s = 100.0
        self._times_s = iter(times_s)

    def register(self, *_: object) -> None: ...

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        time_s = next(self._times_s, None)
        self.now_s += timeout_ms / 1000 if time_s is None else time_s
        return [(-1, 1)] if time_s is None else []


@pytest.mark.parametrize(
    ("times_s", "ends"),
    [([1, 1, 300], True), ([60, 60, 60, 60], True), ([300] * 11, False), ([1.4] * 8, False)],
)
def test_time_in_which_the_agent_is_stopped_is_not_the_commands(
    times_s: list[float], ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    poller = SlowPoller(times_s)
    monkeypatch.setattr(check_command, "select", SimpleNamespace(poll=lambda: poller, POLLIN=1))
    monkeypatch.setattr(check_command, "time", SimpleNamespace(monotonic=lambda: poller.now_s))
    command = CheckCommand(["/bin/true"], {}, timeout_s=10, user="", cgroup=None)
    assert command._wait((), 110.0) == ("" if ends else "no answer within 10 s")


def test_killed_command_names_the_signal() -> None:
    assert run("kill -SEGV $$").problem == "the command was killed by SIGSEGV"


def test_command_and_its_children_are_killed_at_the_timeout(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 1000 & echo $! >{pids}; (sleep 1000 & echo $! >>{pids}; wait) & echo began; wait"
    result, timeout_s = run_until_timeout(script)
    assert result == CommandResult(None, "began", f"no answer within {timeout_s} s")
    for pid in map(int, pids.read_text().split()):
        eventually(lambda pid=pid: not is_alive(pid), f"the end of process {pid}")


def test_children_that_outlive_the_command_are_killed(tmp_path: Path) -> None:
    result = run(f"sleep 1000 & echo $! >{tmp_path}/pid; echo done", user=own_user())
    assert result == CommandResult(0, "done")
    pid = int((tmp_path / "pid").read_text())
    eventually(lambda: not is_alive(pid), f"the end of process {pid}")


def test_output_is_cut_and_the_command_goes_on() -> None:
    result = run("head -c 200000 /dev/zero | tr '\\0' x; exit 1")
    assert result == CommandResult(1, "x" * OUTPUT_BYTES)


def test_flood_of_output_ends_the_command() -> None:
    result = run("yes")
    assert (result.exit_code, result.problem) == (None, f"more than {FLOOD_BYTES >> 20} MiB of output")


LIBC_SIGNALS = 0b11 << 31
"""Signals 32 and 33 in a mask of procfs: the C library keeps them, so no program can change them."""


def test_command_has_no_descriptors_rights_or_environment_of_the_agent(tmp_path: Path) -> None:
    inheritable = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(inheritable, True)
    try:
        result = run(
            "ls -l /proc/self/fd | wc -l; pwd; env; cut -d' ' -f6 /proc/$$/stat; echo $$; umask; ulimit -c;"
            "grep -E '^(NoNewPrivs|SigIgn|SigBlk)' /proc/self/status",
            GREETING="hello",
        )
    finally:
        os.close(inheritable)
    lines = result.output.splitlines()
    assert lines[0] == "5", "a headline, three standard descriptors, and the directory that ls reads"
    assert lines[1] == "/"
    environ = dict(line.split("=", 1) for line in lines if "=" in line)
    assert environ.keys() == {"PATH", "LANG", "GREETING", "PWD"}
    rest = [line for line in lines[2:] if "=" not in line]
    assert rest[0] == rest[1], "it leads a session"
    (blocked, ignored) = (int(line.split()[1], 16) for line in rest[4:6])
    assert [blocked, ignored & ~LIBC_SIGNALS] == [0, 0]
    assert [*rest[2:4], *rest[6:]] == ["0022", "0", "NoNewPrivs:\t1"]


def test_command_of_root_runs_without_rights_by_default() -> None:
    skip_unless_user_can_change()
    result = run("id -u; id -g; id -G; grep CapEff /proc/self/status")
    uid, gid = UNPRIVILEGED
    assert result.output.split("\n") == [f"{uid}", f"{gid}", f"{gid}", f"CapEff:\t{'0' * 16}"]


def test_user_of_the_command_is_a_name_or_a_number() -> None:
    skip_unless_user_can_change()
    assert run("id -u; id -g", user="61234").output.split() == ["61234", "61234"]
    assert run("id -un", user="daemon").output == "daemon"


def test_unknown_user_starts_nothing() -> None:
    assert run("true", user="no-such-user").problem.startswith("user no-such-user: there is no such user")


_AS_OTHER = """
import os, sys
from agent.sources.check_command import CheckCommand
os.setresgid(65533, 65533, 65533), os.setresuid(65533, 65533, 65533)
for user in ("", "61234"):
    print(CheckCommand(["/bin/sh", "-c", "id -u"], {}, timeout_s=60, user=user, cgroup=None).run())
"""


def test_agent_without_rights_runs_commands_as_itself_only() -> None:
    skip_unless_user_can_change()
    done = subprocess.run(
        [sys.executable, "-c", _AS_OTHER], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    own, other = done.stdout.splitlines()
    assert own == repr(CommandResult(0, "65533"))
    assert "change of user failed: Operation not permitted; the agent may not run it as user 61234" in other


def test_killed_run_returns_at_once() -> None:
    command = CheckCommand(["/bin/sleep", "1000"], {}, timeout_s=1000, user="", cgroup=None)
    results: list[CommandResult] = []
    thread = threading.Thread(target=lambda: results.append(command.run()))
    thread.start()
    while thread.is_alive():
        command.kill()
        thread.join(0.05)
    assert results[0].problem == "the command was killed by SIGKILL"


class LateCgroup(CheckCgroup):
    """Cgroup that the process of the command has not entered yet when it is killed."""

    def create(self) -> int:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def test_run_that_is_killed_before_its_process_is_in_the_cgroup_ends(tmp_path: Path) -> None:
    cgroup = LateCgroup(tmp_path, {})
    command = CheckCommand(["/bin/sleep", "1000"], {}, timeout_s=PATIENCE_S, user="", cgroup=cgroup)
    command.kill()
    assert command.run().problem == "the command was killed by SIGKILL"


class PolledCommand(CheckCommand):
    """Command whose end is polled between the end of its process and the read of the exit code."""

    def kill(self) -> None:
        super().kill()
        self.is_ended()


FORK_HANDLER: Final = """
import ctypes, os
from agent.sources.check_command import CheckCommand
abort = ctypes.CFUNCTYPE(None)(os.abort)
assert ctypes.CDLL(None).__register_atfork(abort, abort, abort, None) == 0
print(CheckCommand(["/bin/sh", "-c", "exit 3"], {}, timeout_s=60, user="", cgroup=None).run().exit_code)
"""
"""Program whose fork handler aborts, as that of gRPC does if two threads fork at once."""


def test_command_starts_without_the_fork_handlers_of_libraries() -> None:
    done = subprocess.run([sys.executable, "-c", FORK_HANDLER], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


def test_poll_of_a_running_command_takes_no_exit_code() -> None:
    other = subprocess.Popen(["/bin/sh", "-c", "exit 9"])
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    command = PolledCommand(["/bin/sh", "-c", "exit 3"], {}, timeout_s=PATIENCE_S, user="", cgroup=None)
    assert command.run() == CommandResult(3, "")
    assert command.is_ended()
    assert other.wait() == 9, "the exit code of another child was taken"


def test_command_before_its_start_has_not_ended() -> None:
    command = CheckCommand(["/bin/true"], {}, timeout_s=PATIENCE_S, user="", cgroup=None)
    assert not command.is_ended()
    command.run()
    assert command.is_ended()


class UnkillableCommand(CheckCommand):
    """Command whose processes survive SIGKILL, as in a hung system call."""

    survives = True

    def kill(self) -> None:
        if not self.survives:
            super().kill()


def test_run_has_not_ended_while_a_process_of_its_group_survives() -> None:
    command = UnkillableCommand(
        ["/bin/sh", "-c", "sleep 1000 & echo done"], {}, timeout_s=PATIENCE_S, user=own_user(), cgroup=None
    )
    assert command.run() == CommandResult(0, "done")
    assert not command.is_ended()
    command.survives = False
    command.kill()
    eventually(command.is_ended, "the end of the child")


# --- cgroups ------------------------------------------------------------------------------------------------


@contextmanager
def own_cgroup() -> Iterator[Path]:
    """Yield a cgroup of the test, removed with its children at the end."""
    root = unified_root()
    if root is None:
        pytest.skip("no cgroup v2 on this machine")
    path = root / f"drahealth-check-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"may not make a cgroup: {error.strerror}")
    try:
        if not (path / "cgroup.kill").exists():
            pytest.skip("the kernel is older than 5.14: no cgroup.kill")
        yield path
    finally:
        for child in sorted(path.rglob("*/"), reverse=True):
            with suppress(OSError):
                child.rmdir()
        eventually(lambda: remove(path), f"the removal of {path}")


def remove(path: Path) -> bool:
    with suppress(OSError):
        path.rmdir()
    return not path.exists()


def test_command_runs_in_its_cgroup_which_is_removed() -> None:
    with own_cgroup() as base:
        cgroup = CheckCgroups(base, ()).cgroup("fabric-1", 64 << 20, 8)
        result = run("grep ^0:: /proc/self/cgroup", cgroup=cgroup)
        assert result.output.endswith(f"/{base.name}/check-fabric-1")
        assert list(base.glob("check-*")) == []


def test_processes_that_leave_the_session_end_with_the_cgroup(tmp_path: Path) -> None:
    with own_cgroup() as base:
        cgroup = CheckCgroups(base, ()).cgroup("fabric-1", 64 << 20, 8)
        script = f"setsid sleep 1000 & echo $! >{tmp_path}/pid; echo began; wait"
        result, timeout_s = run_until_timeout(script, cgroup)
        assert result.problem == f"no answer within {timeout_s} s"
        pid = int((tmp_path / "pid").read_text())
        eventually(lambda: not is_alive(pid), f"the end of process {pid}")


def test_limits_of_memory_and_processes_are_those_of_the_check() -> None:
    with own_cgroup() as base:
        controllers = (base / "cgroup.controllers").read_text().split()
        if not {"memory", "pids"} <= set(controllers):
            pytest.skip("cgroup v2 has no memory and pids controller here: cgroup v1 has them")
        (base / "cgroup.subtree_control").write_text("+memory +pids")
        cgroups = CheckCgroups(base, ("memory", "pids"))
        result = run("tail /dev/zero", cgroup=cgroups.cgroup("a", 16 << 20, 8))
        assert result.problem == "the command exceeded its memory limit of 16 MiB"
        result = run(
            "for i in 1 2 3 4 5; do sleep 9 & done; echo all", cgroup=cgroups.cgroup("b", 16 << 20, 3)
        )
        assert "all" not in result.output


_OPEN = """
import sys
from pathlib import Path
from agent.sources.check_command import open_check_cgroups
(Path(sys.argv[1]) / "cgroup.procs").write_text("0")
cgroups, problem = open_check_cgroups()
print(cgroups is not None, problem)
"""


@pytest.mark.parametrize("is_delegated", [True, False])
def test_only_a_delegated_cgroup_gets_children(is_delegated: bool) -> None:
    with own_cgroup() as base:
        left = base / "check-left"
        left.mkdir()
        sleeper = subprocess.Popen(["sleep", "1000"])
        try:
            (left / "cgroup.procs").write_text(f"{sleeper.pid}")
            if is_delegated:
                try:
                    os.setxattr(base, "user.delegate", b"1")
                except OSError as error:
                    pytest.skip(f"no extended attributes in cgroups: {error.strerror}")
            done = subprocess.run(
                [sys.executable, "-c", _OPEN, str(base)],
                cwd=REPOSITORY, capture_output=True, text=True, check=True,
            )  # fmt: skip
            if is_delegated:
                assert done.stdout.startswith("True "), done.stdout
                assert sleeper.wait(PATIENCE_S) == -signal.SIGKILL, "left by an earlier agent"
                assert not left.exists()
            else:
                assert done.stdout.startswith("False the agent's cgroup is not delegated to it (")
                assert left.exists()
        finally:
            sleeper.kill()
            sleeper.wait()


# --- the runner ---------------------------------------------------------------------------------------------


class Results:
    """Newest results of a runner, and a way to wait for one."""

    def __init__(self) -> None:
        self.newest: dict[tuple[str, str], CustomCheckResult] = {}
        self._changed = trio.Event()

    def set(self, results: Any, _wake: bool) -> None:
        self.newest = {result[:2]: result for result in results}
        self._changed.set()

    async def wait(self, name: str, passes: int = 1, text: str = "", device: str = "") -> CustomCheckResult:
        """Wait until a check has ended a number of runs, and has no result for a reason with a text."""
        with trio.fail_after(PATIENCE_S):
            while (
                (result := self.newest.get((name, device))) is None
                or result.passes < passes
                or text not in result.no_result_reason
            ):
                self._changed = trio.Event()
                await self._changed.wait()
        return result


def shell(name: str, script: str, **settings: Any) -> CustomCheck:
    limits = {"period_s": 1, "timeout_s": PATIENCE_S}
    return CustomCheck(name, ("/bin/sh", "-c", script), **{**limits, **settings})


@pytest.mark.parametrize(
    ("script", "finding", "reason"),
    [
        ("echo fine", None, ""),
        ("printf 'a\\nb\\007'; exit 1", "a b", ""),
        ("exit 1", NO_OUTPUT, ""),
        ("echo text; exit 3", None, "exit code 3: text"),
        ("echo text; sleep 100", None, "no answer within 1 s: text"),
    ],
)
async def test_end_of_a_command_is_a_result(script: str, finding: str | None, reason: str) -> None:
    results, hangs = Results(), script.endswith("sleep 100")
    check = shell("fabric", script, advice="restart it", timeout_s=1 if hangs else PATIENCE_S)
    runner = CustomCheckRunner([check], "node-a", results.set, lambda: (None, "no cgroups in this test"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runner.run)
        result = await results.wait("fabric", text=reason)  # a start may take longer than a second
        nursery.cancel_scope.cancel()
    evidence = result.finding.evidence if result.finding else None
    assert (evidence, result.no_result_reason) == (finding, reason)
    if result.finding:
        assert (result.finding.code, result.finding.advice) == ("custom.fabric", "restart it")


@pytest.mark.parametrize("exit_code", [0, 1, 3])
async def test_results_of_a_check_count_its_equal_runs(exit_code: int) -> None:
    results, check = Results(), shell("fabric", f"exit {exit_code}")
    runner = CustomCheckRunner([check], "node-a", results.set, lambda: (None, ""))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runner.run)
        result = await results.wait("fabric", 2)
        nursery.cancel_scope.cancel()
    assert result.equal_passes == result.passes


async def test_hung_check_delays_no_other() -> None:
    results = Results()
    checks = [shell("hung", "sleep 1000", period_s=100, timeout_s=100), shell("fast", "exit 0")]
    runner = CustomCheckRunner(checks, "node-a", results.set, lambda: (None, ""))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runner.run)
        await results.wait("fast", 2)
        assert ("hung", "") not in results.newest
        nursery.cancel_scope.cancel()


async def test_check_does_not_run_again_while_a_child_of_its_command_survives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results, runs = Results(), tmp_path / "runs"
    check = shell("fabric", f"echo $$ >>{runs}; sleep 1000 & exit 0", user=own_user())
    monkeypatch.setattr("agent.node.custom_check_runner.CheckCommand", UnkillableCommand)
    monkeypatch.setattr("agent.node.custom_check_runner.KILL_S", 0.1)
    runner = CustomCheckRunner([check], "node-a", results.set, lambda: (None, ""))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runner.run)
        reason = "not started: a process of its last run survives SIGKILL"
        result = await results.wait("fabric", text=reason)
        assert result.no_result_reason == reason
        [group] = runs.read_text().split()
        os.killpg(int(group), signal.SIGKILL)
        with trio.move_on_after(PATIENCE_S):
            while len(runs.read_text().split()) == 1:  # noqa: ASYNC110 - the command writes a file
                await trio.sleep(0.01)
        assert len(runs.read_text().split()) > 1
        nursery.cancel_scope.cancel()
    for group in runs.read_text().split():
        with suppress(ProcessLookupError):
            os.killpg(int(group), signal.SIGKILL)


async def test_check_without_a_thread_runs_again_in_its_next_period() -> None:
    results = Results()
    runner = CustomCheckRunner([shell("fabric", "exit 0")], "node-a", results.set, lambda: (None, ""))
    async with trio.open_nursery() as nursery:
        with no_threads():
            nursery.start_soon(runner.run)
            result = await results.wait("fabric")
        assert "thread" in result.no_result_reason
        assert runner.running == 0
        result = await results.wait("fabric", result.passes + 1)
        assert (result.finding, result.no_result_reason) == (None, "")
        nursery.cancel_scope.cancel()


async def test_changed_checks_keep_the_results_of_others() -> None:
    results = Results()
    kept, removed = shell("kept", "exit 1", period_s=1000), shell("removed", "exit 1", period_s=1000)
    runner = CustomCheckRunner([kept, removed], "node-a", results.set, lambda: (None, ""))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runner.run)
        await results.wait("kept")
        await results.wait("removed")
        runner.reconfigure([kept, shell("new", "exit 0")])
        await results.wait("new")
        assert results.newest.keys() == {("kept", ""), ("new", "")}
        assert results.newest["kept", ""].passes == 1
        runner.reconfigure([kept._replace(command=("/bin/true",))])
        result = await results.wait("kept", 2)
        assert result.finding is None
        nursery.cancel_scope.cancel()


def gpu_report(*attributes: tuple[str, str]) -> Report:
    """Return a report of one GPU with these attributes."""
    health = DeviceHealth("node-a", "gpu-0", "gpu", Health.HEALTHY, Severity.OK, "", at(1), at(1), 30)
    return report_of([health._replace(attributes=attributes)])


async def test_check_of_a_replaced_device_runs_again_at_once() -> None:
    results = Results()
    check = shell("fabric", "exit 1 # {device}", devices="gpu-*", period_s=1000)
    runner = CustomCheckRunner([check], "node-a", results.set, lambda: (None, ""))
    uuid, bus, other_bus = ("uuid", "GPU-1"), ("pciBusId", "0000:3b:00.0"), ("pciBusId", "0000:5e:00.0")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runner.run)
        runner.handle_report(gpu_report(bus))
        first = await results.wait("fabric", device="gpu-0")
        for same in (gpu_report(uuid, bus), gpu_report(uuid, other_bus), gpu_report(), gpu_report(uuid, bus)):
            runner.handle_report(same)
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert results.newest["fabric", "gpu-0"] is first
        runner.handle_report(gpu_report(("uuid", "GPU-2"), bus))
        await trio.testing.wait_all_tasks_blocked()
        assert results.newest.get(("fabric", "gpu-0")) is not first
        second = await results.wait("fabric", device="gpu-0")
        assert (second.passes, second.beat_ns > first.beat_ns) == (1, True)
        nursery.cancel_scope.cancel()


async def test_check_changed_during_its_run_runs_again_at_once() -> None:
    results = Results()
    hung = shell("changed", "sleep 1000", period_s=1000, timeout_s=1000)
    others = [shell(f"hung-{number}", "sleep 1000", period_s=1000, timeout_s=1000) for number in range(3)]
    runner = CustomCheckRunner([hung, *others], "node-a", results.set, lambda: (None, ""))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runner.run)
        for _ in range(int(PATIENCE_S / 0.01)):
            if runner.running == RUNS_MAX:
                break
            await trio.sleep(0.01)
        assert runner.running == RUNS_MAX
        runner.reconfigure([hung._replace(command=("/bin/false",)), *others])
        result = await results.wait("changed")
        assert result.finding is not None
        nursery.cancel_scope.cancel()


# --- the agent ----------------------------------------------------------------------------------------------


def report(agent: Agent) -> Any:
    """Return the agent's newest report as JSON."""
    directory = str(agent.directory / "run")
    done = run_command("watch", "--once", "-o", "json", "--runtime-dir", directory, cwd=REPOSITORY)
    return json.loads(done.stdout)


def codes(agent: Agent) -> set[str]:
    """Return the codes of all devices' custom checks, and those of notes."""
    newest = report(agent)
    causes = [cause for device in newest["devices"] for cause in device["causes"]] + newest["notes"]
    return {cause["code"] for cause in causes if cause["code"].startswith("custom.")}


FAILING = '[[check]]\nname = "fabric"\ndevices = "cpu-*"\nperiod = "1s"\ncommand = ["/bin/false"]\n'
HUNG = '[[check]]\nname = "hung"\nperiod = "1s"\ncommand = ["/bin/sleep", "1000"]\n'


def test_reload_adds_changes_and_removes_checks(short_tmp: Path) -> None:
    with Agent(short_tmp, config=FAILING) as agent:
        eventually(lambda: codes(agent) == {"custom.fabric"}, "the fault of the check")
        file = short_tmp / "config.toml"
        file.write_text(FAILING + HUNG)
        os.kill(agent.pid, signal.SIGHUP)
        eventually(lambda: codes(agent) == {"custom.fabric", "custom.hung.unknown"}, "the hung check")
        file.write_text(HUNG.replace("sleep", "true"))
        os.kill(agent.pid, signal.SIGHUP)
        eventually(lambda: codes(agent) == set(), "a node without faults")
        assert "custom checks: cgroups for their commands cannot be used: " in agent.log
        assert agent.end() == 0


def test_stop_of_the_agent_ends_running_commands(short_tmp: Path) -> None:
    pid_file = short_tmp / "pid"
    pid_file.touch()
    pid_file.chmod(0o666)
    short_tmp.chmod(0o755)
    script = f"echo $$ >{pid_file}; sleep 1000 & wait"
    check = {"name": "hung", "period": "10m", "timeout": "10m", "command": ["/bin/sh", "-c", script]}
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in check.items())
    with Agent(short_tmp, config=f"[[check]]\n{lines}") as agent:
        eventually(lambda: pid_file.read_text().strip() != "", "the command")
        group = int(pid_file.read_text())
        assert agent.end() == 0
    eventually(lambda: not any_process_of_group(group), "the end of the command and its child")


def any_process_of_group(group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state != "Z":
                return True
    return False
