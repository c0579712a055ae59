"""Entry point of ``drahealth`` and ``python -m agent``.

The process exits with the exit code of the command line and skips the interpreter's cleanup: Ctrl-C could
interrupt the cleanup, and a thread that hangs in a library could block it forever.
"""

import os
import sys

INTERRUPTED = 130
"""Exit code of a shell for a command that SIGINT ended."""

LIBRARY_FILES = {"pthread": "libpthread.so.0", "udev": "libudev.so.1"}
"""File names of shared libraries by name; a file name is part of the library's binary interface."""


def process() -> None:
    """Run the command line, then end the process with its exit code."""
    try:
        delay_reload_of_start()
        # imported inside the try: imports take half the time of most commands, and Ctrl-C may come meanwhile
        from agent.system.deferred_modules import defer_modules

        defer_modules()
        find_libraries_by_name()
        from agent.cli.main import main
        from agent.system.output import unbuffer_outputs

        unbuffer_outputs()
        code = main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception:  # an error outside main's own handling
        import traceback

        traceback.print_exc()
        code = os.EX_SOFTWARE
    os._exit(code)


def delay_reload_of_start() -> None:
    """Block SIGHUP until the agent handles it: a reload during the start follows the start.

    The configuration may have been read before the signal. Applies only to ``run`` without a terminal, whose
    closing sends SIGHUP to end the agent.
    """
    if sys.argv[1:2] == ["run"] and not any(map(os.isatty, (1, 2))):
        import signal

        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def find_libraries_by_name() -> None:
    """Replace ``ctypes.util.find_library`` in this process, so that it starts no program.

    The original runs ldconfig, or else gcc with a temporary file. Trio and pyudev call it at their import:
    each command would start a program, and fail where gcc is, but neither ldconfig nor a writable temporary
    directory. The dynamic linker then searches the libraries in LIBRARY_FILES. Only for a process of
    drahealth itself, before it imports Trio. Without glibc, nothing is replaced.
    """
    import ctypes.util

    try:
        os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        return
    search = ctypes.util.find_library

    def find_library(name: str) -> str | None:
        if name not in LIBRARY_FILES:
            return search(name)
        try:
            ctypes.CDLL(LIBRARY_FILES[name])
        except OSError:
            return None
        return LIBRARY_FILES[name]

    ctypes.util.find_library = find_library


if __name__ == "__main__":
    process()
