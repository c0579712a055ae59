"""Calls of the C core: start of a command in a child process, and control of this process's heap.

A command gets its own user, cgroup and descriptors. ``subprocess`` cannot put a child into a cgroup before it
runs, except through Python code between fork and exec, which can deadlock in a process with threads.
"""

import os
import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from agent.native._core import ffi, lib


def use_one_heap_arena() -> None:
    """Make all threads share one arena of the C library's heap. Call it before the process starts threads.

    Free memory in a thread's own arena would stay with the process.
    """
    lib.dh_heap_one_arena()


def trim_heap() -> None:
    """Give free pages of the heap back to the kernel. Thread-safe. Blocks for milliseconds."""
    lib.dh_heap_trim()


# --- start of a command ------------------------------------------------------------------------------------

_ERROR: Final = struct.Struct("=ii")
_STEPS: Final = {
    lib.DH_SPAWN_SESSION: "new session",
    lib.DH_SPAWN_CGROUP: "change of cgroup",
    lib.DH_SPAWN_DESCRIPTORS: "descriptors",
    lib.DH_SPAWN_USER: "change of user",
    lib.DH_SPAWN_RIGHTS: "loss of privileges",
    lib.DH_SPAWN_EXEC: "execution",
}


class UserIds(NamedTuple):
    """User id and group id with which a child process runs."""

    uid: int
    gid: int


class SpawnedProcess(NamedTuple):
    """Child process that was started. The caller waits for its end, and closes ``error_fd``."""

    pid: int
    error_fd: int
    """Pipe that is closed without data when the command runs; else it has the message for
    :func:`spawn_failure`."""


def spawn(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    output_fd: int,
    error_output_fd: int,
    user: UserIds | None = None,
    cgroup_fd: int = -1,
) -> SpawnedProcess:
    """Start a command in a process session of its own. The kernel kills it when the calling thread ends.

    Args:
        command: Absolute path of the program, and its arguments.
        environ: Whole environment of the command.
        output_fd: Standard output of the command.
        error_output_fd: Standard error of the command.
        user: User of the command, without further groups; None: the user and the groups of this process.
        cgroup_fd: Open file ``cgroup.procs`` of the command's cgroup; -1: the cgroup of this process.

    Raises:
        OSError: The kernel refused a process or a descriptor.
    """
    options = ffi.new(
        "struct dh_spawn *",
        {
            "size": ffi.sizeof("struct dh_spawn"),
            "version": lib.DH_VERSION,
            "uid": user.uid if user else -1,
            "gid": user.gid if user else -1,
            "cgroup_fd": cgroup_fd,
            "out_fd": output_fd,
            "err_fd": error_output_fd,
        },
    )
    texts = [ffi.new("char[]", os.fsencode(text)) for text in command]
    variables = [ffi.new("char[]", os.fsencode(f"{name}={value}")) for name, value in environ.items()]
    argv = ffi.new("char *[]", [*texts, ffi.NULL])
    envp = ffi.new("char *[]", [*variables, ffi.NULL])
    error_fd = ffi.new("int *")
    pid = lib.dh_spawn(options, ffi.cast("char const **", argv), ffi.cast("char const **", envp), error_fd)
    if pid < 0:
        raise OSError(-pid, os.strerror(-pid))
    return SpawnedProcess(pid, error_fd[0])


class SpawnFailure(NamedTuple):
    """Step that failed between the start of a child process and the start of its command."""

    step: str
    """Failed step in words, such as ``change of user``."""
    errno: int
    is_execution: bool
    """True: the command itself could not be executed. False: an earlier step failed."""


def spawn_failure(message: bytes) -> SpawnFailure | None:
    """Return the step that failed before a command ran, from the data in its error pipe; None: no data."""
    if len(message) < _ERROR.size:
        return None
    step, errno = _ERROR.unpack_from(message)
    return SpawnFailure(_STEPS.get(step, "start"), errno, step == lib.DH_SPAWN_EXEC)
