"""How ``drahealth explain`` asks: where, for how long, and that nobody who hangs holds anybody up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from agent.model.time import Instant

T = TypeVar("T")

SOCKET_S: Final = 2.0
"""How long whoever serves a socket may take [s]."""
DISK_S: Final = 5.0
"""How long a file may take [s]."""


class Places(NamedTuple):
    """Where to look; None: it is not asked for."""

    runtime_dir: Path | None = None
    kubelet_dir: Path | None = None
    state_dir: Path | None = None
    pods: Path | None = None
    claims: Path | None = None


def now() -> Instant:
    """Now, on both clocks."""
    return Instant(time.monotonic_ns(), time.time())


async def in_time(work: Callable[[], T], limit_s: float) -> T:
    """What a function returns that blocks on a disk. One that hangs is left behind: its thread keeps nobody.

    Raises:
        TimeoutError: It did not return in time.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # it is raised again where it is waited for
            failure = error
        with suppress(RuntimeError):  # nobody waits any more, the loop is closed
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="dh-explain-file", daemon=True).start()
    async with asyncio.timeout(limit_s):
        return await done


def late(place: object, limit_s: float) -> str:
    """Why there is nothing: it took too long."""
    return f"{place}: no answer within {limit_s:g} s"
