"""The two hosts of most scenarios."""

from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from machine import HugepagePool, Kubepods, held_hugepages
from netns import Injector

from host_scenarios.figures import REAL
from host_scenarios.paper_host import PaperHost
from host_scenarios.stage import Cause, Stage
from host_scenarios.subscribers import Document, device_of

POOL: Final = "hugepages-2mi-node0"
PAGES: Final = 4
SURPLUS: Final = 1


class RealHost(NamedTuple):
    """Machine on which the tests run, under its lock."""

    stage: Stage
    pool: HugepagePool
    """Pool of PAGES pages of 2 MiB."""
    pods: Kubepods
    kubelet: Path
    """The kubelet's directory, with an empty checkpoint of claims."""


class PoolUser:
    """Process that uses all pages of the real host's pool and SURPLUS pages beyond it."""

    def __init__(self, real: RealHost) -> None:
        self._real = real
        self._held = ExitStack()
        self._cause: Cause | None = None

    def hold(self) -> Cause:
        """Use the pages, unless they are in use already; return the event."""
        if self._cause is None:
            self._held.enter_context(held_hugepages(self._real.pool, SURPLUS))
            signal = f"all {PAGES} hugepages in use for 60 s, and {SURPLUS} surplus page"
            self._cause = self._real.stage.cause(signal, REAL)
        return self._cause

    def release(self) -> None:
        """Release the pages, and wait until the agent reports nothing about the pool."""
        if self._cause is not None:
            self.close()
            self._real.stage.follower.wait_for(_is_pool_quiet, "no cause of the pool")

    def close(self) -> None:
        """Release the pages."""
        self._cause = None
        self._held.close()


def _is_pool_quiet(document: Document) -> bool:
    pool = device_of(document, POOL)
    return pool is not None and not pool["causes"]


class Paper(NamedTuple):
    """Host of plain files, with device events of the real kernel."""

    stage: Stage
    host: PaperHost
    events: Injector
