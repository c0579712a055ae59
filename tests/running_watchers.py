"""A watcher of the node that runs in a nursery, with a count of its wakes."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
from patience import PATIENCE_S


class RunningWatcher:
    """Watcher `watch` with a count of its wakes."""

    watch: Any
    wakes = 0

    def wake(self) -> None:
        self.wakes += 1

    @asynccontextmanager
    async def run_watch(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.watch.run, self.wake)
            yield
            nursery.cancel_scope.cancel()


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)
