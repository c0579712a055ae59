"""The hosts of all scenarios, the real one and one on paper, with their agents; and the table at the end."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import pytest
from machine import held_hugepages, hugepages, kubepods_tree
from netns import Injector, netns

from host_scenarios.declarations import device
from host_scenarios.figures import EMULATED, REAL, Figures
from host_scenarios.hosts import PAGES, SURPLUS, Paper, RealHost
from host_scenarios.paper_host import CARD, NIC, PaperHost
from host_scenarios.stage import Cause, Stage

REAL_CONFIG: Final = '[cgroups]\nsweep = "200ms"\n'
PAPER_CONFIG: Final = '[gpu]\nprobation = "1s"\nslow-period = "200ms"\n'
"""Without an event, the PCI bus is looked at every 1.2 s."""


@pytest.fixture(scope="package")
def figures() -> Iterator[Figures]:
    """What was measured, told at the end."""
    measured = Figures()
    yield measured
    measured.tell()


@pytest.fixture(scope="package")
def directory() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture(scope="package")
def real(directory: Path, figures: Figures) -> Iterator[RealHost]:
    """The real host. Nobody else touches it until the last scenario is over."""
    if Path("/sys/devices/system/node/node1").exists():
        pytest.skip("more than one NUMA node: on which of them pages go is the kernel's choice")
    with ExitStack() as stack:
        pool = stack.enter_context(hugepages(2048, PAGES))
        pods = stack.enter_context(kubepods_tree("cpu", "memory", "cpuset", hugetlb=True))
        flags = ["--kubelet-cgroup-root", pods.cgroup_root, "--nvml-library", "/nonexistent"]
        stage = stack.enter_context(Stage(directory / "real", figures, *flags, config=REAL_CONFIG))
        yield RealHost(stage, pool, pods)


@pytest.fixture(scope="package")
def full_pool(real: RealHost) -> Iterator[Cause]:
    """All pages of the real host are in use, and one that the kernel has lent."""
    with held_hugepages(real.pool, SURPLUS):
        yield real.stage.cause(f"all {PAGES} hugepages in use for 60 s, and {SURPLUS} surplus page", REAL)


@pytest.fixture(scope="package")
def paper(directory: Path, figures: Figures) -> Iterator[Paper]:
    """The host on paper: OWNER has declared its NICs."""
    with ExitStack() as stack:
        (directory / "paper").mkdir()
        host = stack.enter_context(closing(PaperHost(directory / "paper")))
        nics = device("nic-0", "pci", address=NIC) + device("nic-1", "pci", address=CARD)
        with netns():
            events = stack.enter_context(Injector())
            stage = Stage(
                directory / "paper",
                figures,
                *host.flags,
                config=PAPER_CONFIG,
                environ=host.environ,
                declared=nics,
            )
        stack.enter_context(stage)
        yield Paper(stage, host, events)


@pytest.fixture(scope="package")
def poisoned(paper: Paper) -> Cause:
    """A page of the host on paper had a hardware error. It is looked for every five seconds."""
    signal = "a page with a hardware error (memory_failure); looked for every 5 s"
    cause = paper.stage.cause(signal, EMULATED)
    paper.host.sysfs.write("devices/system/node/node0/memory_failure/total", "1")
    return cause
