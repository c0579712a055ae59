"""One run of a custom check's command, with limits of time and output, in a cgroup of its own.

The exit codes are those of custom plugins of node-problem-detector: 0 is OK, 1 is a fault, every other one
is no result. The text is the standard output; if that is empty, the standard error output. All processes of
the command are ended afterwards, and the cgroup is removed.

Cgroups are made in the agent's own cgroup, where the service manager has delegated it (``Delegate=yes``),
and in cgroup v2 only. Elsewhere a cgroup that another process manages would get children that the other
process does not know.
"""

import errno
import os
import pwd
import select
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, NamedTuple

from agent.native.process import UserIds, spawn, spawn_failure
from agent.system.files import ReadError, read_bounded
from agent.system.process_stat import describe_exit

MOUNTS: Final = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
"""Mount points of cgroup v2, alone or next to v1."""
FILE_BYTES: Final = 65_536
CONTROLLERS: Final = ("memory", "pids")
OWN: Final = "agent"
"""Name of the child cgroup to which the agent's processes move.

A cgroup whose children have limits cannot have processes itself.
"""
PREFIX: Final = "check-"
DELEGATED: Final = ("user.delegate", "trusted.delegate")
"""Extended attributes of a cgroup's directory with which systemd marks it as delegated."""
ENABLE_TRIES: Final = 10
"""Number of attempts to move all processes of the agent's cgroup; meanwhile the agent may start one."""
REMOVE_S: Final = 0.5
"""Longest wait for the end of a killed cgroup's processes before the cgroup is left [s]."""


class CheckCgroups:
    """Factory of the cgroups in which custom checks run. Thread-safe after :func:`open_check_cgroups`."""

    def __init__(self, base: Path, controllers: tuple[str, ...]) -> None:
        self._base = base
        self.controllers = controllers
        """Cgroup controllers whose limits apply to checks: ``memory`` and ``pids``, or fewer."""

    def cgroup(self, name: str, memory: int, processes: int) -> "CheckCgroup":
        """Return the cgroup of one run of a check; it is created later, by :meth:`CheckCgroup.create`.

        Args:
            name: Name of the run, unique among those that run now.
            memory: Limit of memory [bytes].
            processes: Limit of processes and threads.
        """
        limits: dict[str, str] = {}
        if "memory" in self.controllers:
            limits |= {"memory.max": str(memory), "memory.swap.max": "0", "memory.oom.group": "1"}
        if "pids" in self.controllers:
            limits["pids.max"] = str(processes)
        return CheckCgroup(self._base / f"{PREFIX}{name}", limits)


class CheckCgroup:
    """Cgroup of one run of a custom check's command."""

    def __init__(self, path: Path, limits: dict[str, str]) -> None:
        self._path = path
        self._limits = limits

    def create(self) -> int:
        """Create the cgroup with its limits; return a descriptor of ``cgroup.procs``. Raises OSError."""
        self._path.mkdir(exist_ok=True)
        for name, value in self._limits.items():
            with suppress(FileNotFoundError):  # a kernel without swap has no limit of swap
                (self._path / name).write_text(value)
        return os.open(self._path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)

    def kill(self) -> None:
        """Kill all processes of the cgroup. Kernels before 5.14 cannot."""
        with suppress(OSError):
            (self._path / "cgroup.kill").write_text("1")

    def memory_limit_error(self) -> str:
        """Return an error text if the kernel killed the command at its memory limit; empty: it did not."""
        try:
            events = (self._path / "memory.events").read_text()
        except OSError:
            return ""
        kills = dict(line.split() for line in events.splitlines()).get("oom_kill", "0")
        limit = int(self._limits.get("memory.max", "0"))
        return "" if kills == "0" else f"the command exceeded its memory limit of {limit >> 20} MiB"

    def remove(self) -> None:
        """Remove the cgroup. Blocks up to 0.5 s while killed processes end.

        If they do not end in time, :meth:`is_removed` or a later start of the agent removes the cgroup.
        """
        end_s = time.monotonic() + REMOVE_S
        while not self.is_removed() and time.monotonic() <= end_s:
            time.sleep(0.01)

    def is_removed(self) -> bool:
        """Remove the cgroup, and return whether it has no processes any more. Never blocks."""
        try:
            self._path.rmdir()
        except OSError as error:
            return error.errno != errno.EBUSY
        return True


def open_check_cgroups() -> tuple[CheckCgroups | None, str]:
    """Prepare the agent's cgroup, so that checks can run in child cgroups with limits.

    Child cgroups that an earlier agent left are removed.

    Returns:
        The factory of cgroups, or None; and the reason why there is none, or why some limits do not apply.
    """
    base = _delegated_cgroup()
    if base is None:
        return None, "the agent's cgroup is not delegated to it (Delegate=yes in its systemd unit)"
    try:
        for left in base.glob(f"{PREFIX}*"):
            rest = CheckCgroup(left, {})
            rest.kill()
            rest.remove()
        available = (base / "cgroup.controllers").read_text().split()
        wanted = tuple(name for name in CONTROLLERS if name in available)
        _enable(base, wanted)
        probe = CheckCgroup(base / f"{PREFIX}probe", {})
        os.close(probe.create())
        probe.remove()
    except OSError as error:
        return None, f"cgroup {base}: {error.strerror}"
    missing = [name for name in CONTROLLERS if name not in wanted]
    return CheckCgroups(base, wanted), f"no controller {' and '.join(missing)}" if missing else ""


def _delegated_cgroup() -> Path | None:
    """Return the directory of the cgroup that systemd has delegated to the agent; None: there is none.

    It is the agent's cgroup, or the one above it (``DelegateSubgroup=``).
    """
    try:
        lines = read_bounded(Path("/proc/self/cgroup"), FILE_BYTES).data.decode().splitlines()
    except ReadError:
        return None
    path = next((line.partition("::")[2] for line in lines if line.startswith("0::")), None)
    mount = next((mount for mount in MOUNTS if (mount / "cgroup.controllers").exists()), None)
    if path is None or mount is None:
        return None
    own = mount / path.lstrip("/")
    return next((place for place in (own, own.parent) if _is_delegated(place)), None)


def _is_delegated(cgroup: Path) -> bool:
    for name in DELEGATED:
        with suppress(OSError):
            if os.getxattr(cgroup, name) == b"1":
                return True
    return False


def _enable(base: Path, controllers: tuple[str, ...]) -> None:
    """Enable controllers for the children of a cgroup, after moving the cgroup's own processes to a child."""
    enabled = (base / "cgroup.subtree_control").read_text().split()
    missing = [name for name in controllers if name not in enabled]
    if not missing:
        return
    own = base / OWN
    own.mkdir(exist_ok=True)
    for attempt in range(1, ENABLE_TRIES + 1):
        for pid in (base / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                (own / "cgroup.procs").write_text(pid)
        try:
            (base / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in missing))
        except OSError as error:  # a process that was just started is still there
            if error.errno != errno.EBUSY or attempt == ENABLE_TRIES:
                raise
        else:
            return


# --- the command -------------------------------------------------------------------------------------------

OUTPUT_BYTES: Final = 2048
"""Length of a command's output that is kept [bytes]; further output is read and dropped."""
FLOOD_BYTES: Final = 1 << 20
"""Length of a command's output above which it is killed [bytes]: reading it costs the agent CPU time."""
READ_BYTES: Final = 65_536
SLICE_S: Final = 1.0
"""Longest single wait for a command [s]."""
LATE_S: Final = 0.5
"""Delay at the end of a wait above which the agent was stopped, and the command probably too [s]."""
KILL_S: Final = 2.0
"""Longest wait for the end of a killed command [s]; a command in a hung system call ends later."""
UNPRIVILEGED: Final = UserIds(65_534, 65_534)
"""User and group without rights, the kernel's overflow ids (65534)."""
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USER_ADVICE: Final = "see 'User' in the documentation of custom checks"


class CommandResult(NamedTuple):
    """Result of one run of a custom check's command: exit code and output, or why there is none."""

    exit_code: int | None
    """Exit code of the command; None: it gave no result, see ``problem``."""
    output: str
    """First part of the command's standard output, or of its standard error if that is empty."""
    problem: str = ""
    """Reason why there is no exit code: not started, killed, or not ended in time."""


class CheckCommand:
    """One run of a custom check's command. :meth:`run` blocks; the other methods are thread-safe."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        timeout_s: float,
        user: str,
        cgroup: CheckCgroup | None,
    ) -> None:
        """Create the run; nothing is started.

        Args:
            command: Absolute path of the program, and its arguments.
            environ: Environment of the command, to which PATH and LANG are added.
            timeout_s: Time after which all processes of the command are killed [s].
            user: Name or number of the user; empty: 65534 if this process is root, else its own user.
            cgroup: Cgroup of the command, removed at the end; None: the cgroup of this process.
        """
        self._command = command
        self._environ = {"PATH": PATH, "LANG": "C.UTF-8", **environ}
        self._timeout_s = timeout_s
        self._user = user
        self._cgroup = cgroup
        self._lock = threading.Lock()
        self._pid = 0
        """First process of the command; 0: none was started, or it has ended."""
        self._group = 0
        """Process group of the command, which may outlive its first process; 0: it has ended."""
        self._pidfd = -1
        self._is_killed = False
        self._has_run = False

    def run(self) -> CommandResult:
        """Run the command, and return its exit code and output. Blocks up to the timeout and 2 s; longer only
        while this process is stopped."""
        try:
            return self._run()
        finally:
            self._has_run = True

    def _run(self) -> CommandResult:
        with ExitStack() as at_end:
            try:
                output = _Output(at_end)
                error_output = _Output(at_end)
                user = find_user(self._user)
                cgroup_fd = self._open_cgroup(at_end)
                child = spawn(
                    self._command,
                    self._environ,
                    output_fd=output.write_fd,
                    error_output_fd=error_output.write_fd,
                    user=user,
                    cgroup_fd=cgroup_fd,
                )
                self._pid = self._group = child.pid
                start = _Output(at_end, child.error_fd)
                self._pidfd = os.pidfd_open(child.pid)
            except OSError as error:
                self.kill()  # a child without a pidfd; is_ended() collects it
                return CommandResult(None, "", f"{self._command[0]}: not started: {error.strerror}")
            except LookupError as error:
                return CommandResult(None, "", str(error.args[0]))
            at_end.callback(os.close, self._pidfd)
            if self._is_killed:
                self.kill()
            output.close_write()
            error_output.close_write()
            broken_limit = self._wait((start, output, error_output), time.monotonic() + self._timeout_s)
            self.kill()  # what the command has left behind, too
            status = self._reap()
            for pipe in (start, output, error_output):
                pipe.read_available()
            return self._result(start, output, error_output, broken_limit, status)

    def _open_cgroup(self, at_end: ExitStack) -> int:
        if self._cgroup is None:
            return -1
        at_end.callback(self._cgroup.remove)
        descriptor = self._cgroup.create()
        at_end.callback(os.close, descriptor)
        return descriptor

    def _wait(self, outputs: Sequence["_Output"], end_s: float) -> str:
        """Read the command's outputs until it has ended; return the text of a limit that it exceeded.

        Empty: the command ended within its limits.

        Args:
            outputs: Pipes from the command.
            end_s: Time at which the command must have ended, on the monotonic clock [s]. It is later by the
                time in which this process was stopped.
        """
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        by_fd = {output.read_fd: output for output in outputs}
        for descriptor in by_fd:
            poller.register(descriptor, select.POLLIN)
        while (left_s := end_s - (now_s := time.monotonic())) > 0:
            slice_s = min(left_s, SLICE_S)
            events = poller.poll(slice_s * 1000 + 1)
            if (late_s := time.monotonic() - now_s - slice_s) > LATE_S:
                end_s += late_s
            for descriptor, _ in events:
                if descriptor == self._pidfd:
                    return ""
                if not by_fd[descriptor].read_available():
                    poller.unregister(descriptor)
                elif by_fd[descriptor].total > FLOOD_BYTES:
                    return f"more than {FLOOD_BYTES >> 20} MiB of output"
        return f"no answer within {self._timeout_s:g} s"

    def kill(self) -> None:
        """Kill all processes of the command: those of its cgroup, and those of its process group."""
        self._is_killed = True
        if self._cgroup is not None:
            self._cgroup.kill()
        with self._lock:
            if self._group:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._group, signal.SIGKILL)
            if self._pid:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(self._pid, signal.SIGKILL)  # it may have just begun, in the agent's own groups

    def _reap(self) -> int | None:
        """Wait for the end of the command's first process (waitpid); return its status.

        None if it did not end within KILL_S.
        """
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        poller.poll(KILL_S * 1000)
        return self._collect()

    def _collect(self) -> int | None:
        with self._lock:
            if not self._pid:  # waitpid(0) takes the exit code of any other child
                return None
            try:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            except ChildProcessError:  # this program ignores SIGCHLD, or waits for all its children elsewhere
                self._pid = 0
                return None
            if not pid:
                return None
            self._pid = 0
            return status

    def is_ended(self) -> bool:
        """Return whether :meth:`run` has returned and all processes of the command have ended.

        A program that the command has called can survive SIGKILL in a hung system call. This call removes
        ended processes from the process table. Before :meth:`run` has returned, this call does not collect
        the exit code, because :meth:`run` needs it.
        """
        if not self._has_run:
            return False
        self._collect()
        if self._pid or (self._cgroup is not None and not self._cgroup.is_removed()):
            return False
        with self._lock:  # kill() must not read 0, which stands for the agent's own group
            if self._group and not self._has_group():
                self._group = 0  # for good: the kernel may use the number again
            return not self._group

    def _has_group(self) -> bool:
        """Return whether the command's process group has a process that has not ended.

        The caller holds the lock.
        """
        with suppress(ChildProcessError):  # children of ended processes, if this process is pid 1
            while os.waitpid(-self._group, os.WNOHANG)[0]:
                pass
        try:
            os.killpg(self._group, 0)
        except OSError as error:
            return not isinstance(error, ProcessLookupError)
        return True

    def _result(
        self,
        start: "_Output",
        output: "_Output",
        error_output: "_Output",
        broken_limit: str,
        status: int | None,
    ) -> CommandResult:
        text = output.text() or error_output.text()
        failure = spawn_failure(start.data)
        if failure is not None:
            reason, user = os.strerror(failure.errno), self._user or os.geteuid() or UNPRIVILEGED.uid
            if failure.is_execution:
                reason += f" for user {user}" if failure.errno == errno.EACCES else ""
            elif failure.errno == errno.EPERM:
                reason += f"; the agent may not run it as user {user}: {USER_ADVICE}"
            return CommandResult(None, "", f"{self._command[0]}: {failure.step} failed: {reason}")
        if broken_limit:
            stuck = f"; process {self._pid} survives SIGKILL" if self._pid else ""
            return CommandResult(None, text, f"{broken_limit}{stuck}")
        if status is None:
            return CommandResult(None, text, "its exit code is not known")
        if os.WIFSIGNALED(status):
            limit = self._cgroup.memory_limit_error() if self._cgroup else ""
            return CommandResult(None, text, limit or f"the command {describe_exit(status)}")
        return CommandResult(os.waitstatus_to_exitcode(status), text)


class _Output:
    """Pipe that receives a command's output, of which the first part is kept."""

    def __init__(self, at_end: ExitStack, read_fd: int = -1) -> None:
        """Create a pipe, or use the reading end of one.

        Args:
            at_end: Stack of exit functions, to which the closing of the pipe is added.
            read_fd: Descriptor of the reading end; -1: a pipe is created.
        """
        self.write_fd = -1
        if read_fd < 0:
            read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        self.read_fd = read_fd
        self.data = b""
        self.total = 0
        at_end.callback(os.close, read_fd)
        at_end.callback(self.close_write)
        os.set_blocking(read_fd, False)

    def close_write(self) -> None:
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def read_available(self) -> bool:
        """Read the pipe's present content once; return False if the pipe has ended."""
        try:
            data = os.read(self.read_fd, READ_BYTES)
        except BlockingIOError:
            return True
        self.total += len(data)
        self.data += data[: OUTPUT_BYTES - len(self.data)]
        return bool(data)

    def text(self) -> str:
        return self.data.decode(errors="replace").strip()


def find_user(name: str) -> UserIds | None:
    """Return the ids of the user and group that run a command; None: those of this process.

    Raises:
        LookupError: The user does not exist.
    """
    if not name:
        return UNPRIVILEGED if os.geteuid() == 0 else None
    if name.isdecimal():
        ids = UserIds(int(name), int(name))
    else:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            raise LookupError(f"user {name}: there is no such user on this machine; {USER_ADVICE}") from None
        ids = UserIds(entry.pw_uid, entry.pw_gid)
    # only root may change its user, even to the same one
    return None if ids.uid == os.geteuid() != 0 else ids
