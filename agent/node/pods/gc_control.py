"""Keeps Python's collector of cycles away from what a round makes.

Of a large node that is half a million objects. They are walked with the interpreter's lock held, several
times while they come into being, and the core would stand still for a quarter of a second each time. They
have no cycles: what is replaced goes without the collector.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

LARGE: Final = 1_000
"""Claims and pods from which on the collector is spared afterwards, too: it would walk for 10 ms."""
ROUNDS: Final = 256
"""After so many large rounds it walks everything once: of each some hundred objects are left to it."""


class GcControl:
    """Of the process; whoever has one is alone with it."""

    def __init__(self) -> None:
        self._rounds = 0

    @contextmanager
    def spared(self, size: Callable[[], int]) -> Iterator[None]:
        """Nothing is walked meanwhile; nor later, if there are many claims and pods then."""
        gc.disable()
        try:
            yield
        finally:
            if size() >= LARGE:
                self._set_apart()
            gc.enable()

    def _set_apart(self) -> None:
        self._rounds += 1
        if self._rounds % ROUNDS == 0:
            gc.unfreeze()
            gc.collect()
        gc.freeze()
