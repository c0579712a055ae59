"""Keeps the fault memory's file up to date, without letting the file system delay a verdict.

What changed in substance is written at once, mere counts once a minute: a flood is no reason to write a
thousand times. A disk that is full or gone is told of once, and asked again every minute.
"""

import logging
import threading
from pathlib import Path
from typing import Final

import trio

from agent.model.faults import FaultMemory
from agent.store.faults import WriteError, save

SOON_S: Final = 0.2
"""What changes together is written together [s]."""
COUNTS_S: Final = 60.0

log = logging.getLogger(__name__)


class FaultCheckpointWriter:
    """The newest memory on its way to the disk."""

    def __init__(self, path: Path, saved: FaultMemory) -> None:
        """
        Args:
            path: Of the file; its directory is made when there is something to be kept.
            saved: What is in it.
        """
        self._path = path
        self._saved = saved
        self._newest = saved
        self._news = trio.Event()
        self._urgent = trio.Event()
        self._writing = threading.Lock()
        self._told: int | None = None

    def update(self, memory: FaultMemory) -> None:
        """From the Trio thread; returns at once."""
        self._newest = memory
        self._news.set()
        if _substance(memory) != _substance(self._saved):
            self._urgent.set()

    async def run(self) -> None:
        """Writes until cancelled. A write that hangs is waited for; there is never more than one."""
        while True:
            await self._news.wait()
            with trio.move_on_after(COUNTS_S):
                await self._urgent.wait()
            await trio.sleep(SOON_S)
            self._news, self._urgent = trio.Event(), trio.Event()
            if not await trio.to_thread.run_sync(self._write, abandon_on_cancel=True):
                await trio.sleep(COUNTS_S)
                self._news.set()
                self._urgent.set()

    def close(self, timeout_s: float) -> bool:
        """Write what is not yet written. False if a disk hangs for longer than that, and it was not."""
        thread = threading.Thread(target=self._write, name="keeper", daemon=True)
        thread.start()
        thread.join(timeout_s)
        return not thread.is_alive()

    def _write(self) -> bool:
        """In a thread. An earlier one that was left behind may still be at it."""
        with self._writing:
            memory = self._newest
            if memory == self._saved:
                return True
            try:
                save(self._path, memory)
            except WriteError as error:
                if error.errno != self._told:
                    log.warning("%s; faults are forgotten when the agent ends (--state-dir)", error)
                self._told = error.errno
                return False
            self._saved = memory
            self._told = None
            return True


def _substance(memory: FaultMemory) -> object:
    """All of it but what merely counts on."""
    return memory.gpus, [
        fault._replace(times=0, last_wall_s=0, log_us=0, texts=(), counters=()) for fault in memory.faults
    ]
