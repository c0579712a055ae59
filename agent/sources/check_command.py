"""One run of a custom check's command, with limits of time and output; all its processes are ended
afterwards.

The exit codes are those of custom plugins of node-problem-detector: 0 is OK, 1 is a fault, every other one is
no result. The first output is the text.
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
from typing import Final, NamedTuple

from agent.native.spawn import UserIds, spawn, spawn_failure
from agent.sources.check_cgroups import CheckCgroup
from agent.system.output import describe_exit

OUTPUT_BYTES: Final = 2048
"""Length of a command's output that is kept [bytes]; further output is read and dropped."""
FLOOD_BYTES: Final = 1 << 20
"""Length of a command's output above which it is killed [bytes]: reading it costs the agent CPU time."""
READ_BYTES: Final = 65_536
KILL_S: Final = 2.0
"""Longest wait for the end of a killed command [s]; a command in a hung system call ends later."""
UNPRIVILEGED: Final = UserIds(65_534, 65_534)
"""User and group without rights, the kernel's overflow ids (65534)."""
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USER_ADVICE: Final = "see 'User' in the documentation of custom checks"


class CommandResult(NamedTuple):
    """End of one run of a custom check's command: exit code and output, or the reason for neither."""

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
        self._pidfd = -1
        self._is_killed = False
        self._has_run = False

    def run(self) -> CommandResult:
        """Run the command, and return its exit code and output. Blocks up to the timeout and 2 s."""
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
                self._pid = child.pid
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
        """Read the command's outputs until it has ended; return the text of the limit that it exceeds.

        Empty: the command ended within its limits.

        Args:
            outputs: Pipes from the command.
            end_s: Time at which the command must have ended, on the monotonic clock [s].
        """
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        by_fd = {output.read_fd: output for output in outputs}
        for descriptor in by_fd:
            poller.register(descriptor, select.POLLIN)
        while (left_s := end_s - time.monotonic()) > 0:
            for descriptor, _ in poller.poll(left_s * 1000 + 1):
                if descriptor == self._pidfd:
                    return ""
                if not by_fd[descriptor].read_available():
                    poller.unregister(descriptor)
                elif by_fd[descriptor].total > FLOOD_BYTES:
                    return f"more than {FLOOD_BYTES >> 20} MiB of output"
        return f"no answer within {self._timeout_s:g} s"

    def kill(self) -> None:
        """Kill all processes of the command: those of its cgroup, or else those of its process group."""
        self._is_killed = True
        if self._cgroup is not None and self._cgroup.kill():
            return
        with self._lock:
            if self._pid:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid, signal.SIGKILL)
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(self._pid, signal.SIGKILL)  # it may have just begun, in the agent's own group

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
        """Return whether :meth:`run` has returned and the command's first process has ended.

        A process that exceeded its time is removed from the process table; before, its exit code is for the
        thread of :meth:`run`.
        """
        if not self._has_run:
            return False
        self._collect()
        return not self._pid

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
            limit = self._cgroup.exceeded_memory() if self._cgroup else ""
            return CommandResult(None, text, limit or f"the command {describe_exit(status)}")
        return CommandResult(os.waitstatus_to_exitcode(status), text)


class _Output:
    """Pipe that receives a command's output, of which the first part is kept."""

    def __init__(self, at_end: ExitStack, read_fd: int = -1) -> None:
        """Create a pipe, or use the reading end of one.

        Args:
            at_end: Closes the pipe at its end.
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
        return UserIds(int(name), int(name))
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise LookupError(f"user {name}: there is no such user on this machine; {USER_ADVICE}") from None
    return UserIds(entry.pw_uid, entry.pw_gid)
