"""The two hosts of most scenarios."""

from typing import Final, NamedTuple

from machine import HugepagePool, Kubepods
from netns import Injector

from host_scenarios.paper_host import PaperHost
from host_scenarios.stage import Stage

PAGES: Final = 4
SURPLUS: Final = 1


class RealHost(NamedTuple):
    """Machine on which the tests run, under its lock."""

    stage: Stage
    pool: HugepagePool
    """Pool of PAGES pages of 2 MiB."""
    pods: Kubepods


class Paper(NamedTuple):
    """Host of plain files, with device events of the real kernel."""

    stage: Stage
    host: PaperHost
    events: Injector
