"""The two hosts that are made sick."""

from typing import Final, NamedTuple

from machine import HugepagePool, Kubepods
from netns import Injector

from host_scenarios.paper_host import PaperHost
from host_scenarios.stage import Stage

PAGES: Final = 4
SURPLUS: Final = 1


class RealHost(NamedTuple):
    """The machine that this runs on, under its lock."""

    stage: Stage
    pool: HugepagePool
    """Of PAGES pages of 2 MiB."""
    pods: Kubepods


class Paper(NamedTuple):
    """A host of plain files, with device events of the real kernel."""

    stage: Stage
    host: PaperHost
    events: Injector
