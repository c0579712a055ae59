"""Threads that cannot be started, in this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_threads() -> Iterator[None]:
    """Make the start of threads fail for lack of stack memory."""
    before = threading.stack_size(1 << 50)
    try:
        yield
    finally:
        threading.stack_size(before)
