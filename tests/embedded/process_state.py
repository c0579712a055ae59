"""Everything that belongs to a process, and not to a library in it."""

import asyncio
import atexit
import faulthandler
import gc
import locale
import logging
import os
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any


def event_loop_policy() -> object:
    """Return asyncio's policy, which Python 3.14 deprecates. Main thread only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return asyncio.get_event_loop_policy()


def process_state() -> dict[str, Any]:
    """Return the process state for a comparison, by name. Main thread only."""
    root, ours = logging.getLogger(), logging.getLogger("agent")
    wakeup_fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup_fd)
    return {
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "signal wakeup": wakeup_fd,
        "logging": (root.level, tuple(root.handlers), root.manager.disable, logging.getLoggerClass()),
        "our logger": (ours.level, tuple(ours.handlers), ours.propagate, ours.disabled),
        "event-loop policy": event_loop_policy(),
        "asyncgen hooks": sys.get_asyncgen_hooks(),
        "switch interval": sys.getswitchinterval(),
        "recursion limit": sys.getrecursionlimit(),
        "stack size": threading.stack_size(),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook),
        "tracing": (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
        "warnings": (tuple(warnings.filters), warnings.showwarning),
        "gc": (gc.isenabled(), gc.get_threshold(), tuple(gc.callbacks)),
        "faulthandler": faulthandler.is_enabled(),
        "at exit": atexit._ncallbacks(),
        "locale": locale.setlocale(locale.LC_ALL),
        "directory": os.getcwd(),
        "umask": [line for line in Path("/proc/self/status").read_text().splitlines() if "Umask" in line],
        "environment": dict(os.environ),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS},
        "scheduling": (os.nice(0), os.sched_getscheduler(0), os.sched_getaffinity(0)),
        "name": Path("/proc/self/comm").read_text(),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "import path": tuple(sys.path),
    }


_LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]
