"""Hosts of all scenarios, the real one and one of plain files, with their agents and the final table."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import pytest
from kubelet_files import checkpoint
from machine import hugepages, kubepods_tree
from netns import Injector, netns

from agent.config.config import CHECKPOINT
from host_scenarios.declarations import device
from host_scenarios.figures import EMULATED, Figures
from host_scenarios.hosts import PAGES, Paper, PoolUser, RealHost
from host_scenarios.paper_host import CARD, NIC, PaperHost
from host_scenarios.stage import Cause, Stage

REAL_CONFIG: Final = '[cgroups]\nsweep = "200ms"\n'
PAPER_CONFIG: Final = '[gpu]\nprobation = "1s"\nslow-period = "200ms"\n'
"""Without events, the PCI bus is read every 1.2 s."""


@pytest.fixture(scope="package")
def figures() -> Iterator[Figures]:
    """Measured times, printed at the end."""
    measured = Figures()
    yield measured
    measured.print_table()


@pytest.fixture(scope="package")
def directory() -> Iterator[Path]:
    """Directory with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture(scope="package")
def real(directory: Path, figures: Figures) -> Iterator[RealHost]:
    """Real host, for these scenarios alone until the last one is over."""
    if Path("/sys/devices/system/node/node1").exists():
        pytest.skip("more than one NUMA node: on which of them pages go is the kernel's choice")
    with ExitStack() as stack:
        pool = stack.enter_context(hugepages(2048, PAGES))
        pods = stack.enter_context(kubepods_tree("cpu", "memory", "cpuset", hugetlb=True))
        flags = ["--kubelet-cgroup-root", pods.cgroup_root, "--nvml-library", "/nonexistent"]
        kubelet = directory / "kubelet"
        kubelet.mkdir()
        (kubelet / CHECKPOINT).write_bytes(checkpoint([]))
        flags += ["--kubelet-dir", str(kubelet)]
        stage = stack.enter_context(Stage(directory / "real", figures, *flags, config=REAL_CONFIG))
        yield RealHost(stage, pool, pods, kubelet)


@pytest.fixture(scope="package")
def pool_user(real: RealHost) -> Iterator[PoolUser]:
    """Process that can use all pages of the real host and one surplus page."""
    with closing(PoolUser(real)) as user:
        yield user


@pytest.fixture
def full_pool(pool_user: PoolUser) -> Cause:
    """Use all pages, perhaps since an earlier test, which saves a wait."""
    return pool_user.hold()


@pytest.fixture
def just_filled_pool(pool_user: PoolUser) -> Cause:
    """Use all pages from now on."""
    pool_user.release()
    return pool_user.hold()


@pytest.fixture
def free_pool(pool_user: PoolUser) -> None:
    """Use no page any more."""
    pool_user.release()


@pytest.fixture(scope="package")
def paper(directory: Path, figures: Figures) -> Iterator[Paper]:
    """Host of plain files, of which OWNER declares the NICs."""
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
def poisoned_page(paper: Paper) -> Cause:
    """Cause a hardware error in a page of the host of plain files; it is read every five seconds."""
    signal = "a page with a hardware error (memory_failure); read every 5 s"
    cause = paper.stage.cause(signal, EMULATED)
    paper.host.sysfs.write("devices/system/node/node0/memory_failure/total", "1")
    return cause
