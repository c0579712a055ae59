"""A thread of the C core with its eventfd, as tests read it."""

import os
import select
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from patience import PATIENCE_S

from agent.native.published_tables import CoreThread

T = TypeVar("T")


def eventfd_descriptors(eventfd: int) -> int:
    """Return how many descriptors this process has of an eventfd."""
    count, own = 0, _eventfd_id(str(eventfd))
    for name in os.listdir("/proc/self/fdinfo"):
        with suppress(FileNotFoundError):  # another thread closed it
            count += _eventfd_id(name) == own
    return count


def _eventfd_id(descriptor: str) -> str:
    """Return the line with the number of an eventfd; empty for another kind of file."""
    lines = Path("/proc/self/fdinfo", descriptor).read_text().splitlines()
    return next((line for line in lines if line.startswith("eventfd-id:")), "")


class ThreadReader(Generic[T]):
    """Reader of one thread, which is woken by the eventfd `fd`."""

    thread: CoreThread[T]

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def read(self) -> T:
        sample = self.thread.read()
        assert sample is not None
        return sample

    def until(self, what: Callable[[T], bool]) -> T:
        """Return the first sample that fulfils the condition; waits on the eventfd only."""
        deadline = time.monotonic() + PATIENCE_S
        while not what(sample := self.read()):
            assert time.monotonic() < deadline, sample
            if select.select([self.fd], [], [], deadline - time.monotonic())[0]:
                os.eventfd_read(self.fd)
        return sample
