"""Blocking calls of Trio tasks. Each call runs in its own thread, which a cancelled task abandons.

``trio.to_thread`` waits without end in the event loop if a new thread has no memory for its first call.
"""

from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Final, TypeVar

import trio

from agent.system.output import LogRateLimiter, get_logger
from agent.system.threads.thread_start import DaemonThread, ThreadStartError

T = TypeVar("T")

RETRY_FIRST_S: Final = 0.1
"""Pause before the second attempt to start a thread [s], doubled after each further failure."""
RETRY_MAX_S: Final = 10.0
"""Longest pause between two attempts to start a thread [s]."""

log = get_logger(__name__)
_complaints: Final = LogRateLimiter()


async def call_in_thread(function: Callable[[], T], name: str) -> T:
    """Call a function in a new daemon thread and return its result, or raise its exception.

    If the task is cancelled, the thread continues and its result is dropped.

    Raises:
        ThreadStartError: The thread could not be started.
    """
    token, ended, context = trio.lowlevel.current_trio_token(), trio.Event(), copy_context()
    result: Any = None
    failure: BaseException | None = None

    def run() -> None:
        nonlocal result, failure
        try:
            result = context.run(function)
        except BaseException as error:
            failure = error
        with suppress(trio.RunFinishedError):  # there is no waiter left
            token.run_sync_soon(ended.set)

    DaemonThread(run, name).start()
    await ended.wait()
    if failure is not None:
        try:
            raise failure
        finally:
            failure = None  # no reference cycle with its traceback
    returned: T = result
    return returned


async def call_in_thread_when_possible(function: Callable[[], T], name: str) -> T:
    """Call a function in a new daemon thread, and wait until one can be started. For periodic work.

    All else is as in :func:`call_in_thread`.
    """
    pause_s = RETRY_FIRST_S
    while True:
        try:
            return await call_in_thread(function, name)
        except ThreadStartError as error:
            if times := _complaints.tick():
                log.warning("thread %s: not started, attempt %d: %s; will retry", name, times, error)
        await trio.sleep(pause_s)
        pause_s = min(2 * pause_s, RETRY_MAX_S)


def cancellation(error: BaseException) -> BaseException | None:
    """Return Trio's Cancelled exception from an exception or exception group; None: it contains none."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(trio.Cancelled)
    return error if isinstance(error, trio.Cancelled) else None
