"""All sources of a node together: their first snapshot and their shutdown. On plain files."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import trio
from agents import PlainSysfs, threads_in_fifos
from nic_samples import NIC, NicFiles, nic_sample
from paper_gpus import GpuNode
from patience import PATIENCE_S
from wire.serving import eventually

from agent.app import scan
from agent.config.config import Config
from agent.engine.step import EngineState, initial_state, step
from agent.health.verdict import STALL_MIN_NS
from agent.model.machine_samples import NicSample
from agent.model.reading import SourceState, sources_in_state
from agent.model.report import Report
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant
from agent.node.node_source import NodeSource, engine_settings, open_node_source
from agent.system.timing import PassTimer, read_clocks

DECLARED = "devices.d"
HANGING = (
    "devices/system/cpu/online",
    "devices/system/node/online",
    "bus/pci/devices/0000:5e:00.0/vendor",
)


@pytest.fixture
def sysfs(tmp_path: Path) -> PlainSysfs:
    return PlainSysfs(tmp_path / "sys")


@pytest.fixture
def config(tmp_path: Path, sysfs: PlainSysfs) -> Config:
    for name in ("proc", "cgroup", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "kmsg").touch()
    return Config(
        node_name="n",
        sysfs_root=sysfs.root,
        procfs_root=tmp_path / "proc",
        cgroupfs_root=tmp_path / "cgroup",
        kmsg=tmp_path / "kmsg",
        nvml_library=str(tmp_path / "libnvidia-ml.so.1"),
        runtime_dir=tmp_path / "run",
    )


def open_node(config: Config) -> NodeSource:
    return open_node_source(config, engine_settings(config), NS, reads_declarations=True)


@pytest.fixture
def node(config: Config) -> Iterator[NodeSource]:
    node = open_node(config)
    node.start()
    yield node
    node.stop(PATIENCE_S)


def states(node: NodeSource) -> dict[str, SourceState]:
    snapshot = node.read()
    return {source.name: source.state for source in snapshot.sources} if snapshot else {}


def starting_sources(node: NodeSource) -> set[str]:
    return {name for name, state in states(node).items() if state is SourceState.STARTING}


def test_snapshot_before_first_directory_read_has_no_declarations(node: NodeSource, config: Config) -> None:
    eventually(lambda: starting_sources(node) == {DECLARED}, "all others have looked")
    snapshot = node.read()
    assert snapshot is not None
    assert step(initial_state(engine_settings(config)), snapshot, read_clocks())[1].starting


async def test_snapshot_after_read_of_empty_directory_has_zero_declarations(node: NodeSource) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.run_watchers)
        with trio.fail_after(PATIENCE_S):
            while starting_sources(node):
                await trio.lowlevel.wait_readable(node.fileno())
                node.clear()
        nursery.cancel_scope.cancel()
    assert states(node)[DECLARED] is SourceState.OK


def test_pass_durations_exclude_sources_that_wait_for_events(node: NodeSource) -> None:
    def timed_sources() -> set[str]:
        return {name for name, durations in node.pass_durations().items() if any(durations.counts)}

    eventually(lambda: timed_sources() >= {"cpus", "hugepages", "memory"}, "the C core has read")
    assert timed_sources() <= set(states(node))
    node.stop(PATIENCE_S)
    assert node.pass_durations().keys() == {"pci", "nic", DECLARED}  # the memory of the C core is freed


def test_single_scan_does_not_read_declarations(config: Config) -> None:
    node = open_node_source(config, engine_settings(config), NS, reads_declarations=False)
    node.start()
    eventually(lambda: states(node) != {} and not starting_sources(node), "all have looked")
    assert DECLARED not in states(node)
    assert node.stop(PATIENCE_S) == []


def test_scan_in_a_late_process_reports_no_stalled_source(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = [1]

    def step_late(state: EngineState, snapshot: Snapshot, now: Instant) -> tuple[EngineState, Report]:
        if late and snapshot.core.passes >= 2:
            time.sleep(late.pop() + STALL_MIN_NS / NS)  # the snapshot is old then, though no source hangs
            now = read_clocks()
        return step(state, snapshot, now)

    monkeypatch.setattr(scan, "step", step_late)
    monkeypatch.setattr(scan, "LIMIT_S", PATIENCE_S)
    report = scan.scan_once(config)
    assert not late
    assert not list(sources_in_state(report.sources, SourceState.STALLED))


def test_scan_waits_for_the_readings_that_confirm_a_fault() -> None:
    node = GpuNode()

    def awaits(report: Report) -> bool:
        return scan._awaits_confirmation(node.state, report)

    assert not awaits(node.evaluate())
    node.set_readings(0, margin=0)
    found = [awaits(node.next()) for _ in range(3)]
    assert (found, node.codes()) == ([True, True, False], ["gpu.thermal.over_limit"])
    node.set_readings(1, margin=0)
    assert awaits(node.next())
    node.wait(scan.CONFIRM_S)
    assert not awaits(node.evaluate()), "a GPU that is not read again"


async def test_declared_nic_is_read_with_its_pci_function(sysfs: PlainSysfs, config: Config) -> None:
    """A NIC that is declared by its RDMA name has its PCI function in the next snapshots, also when gone."""
    device = NicFiles(sysfs.root).add()
    (config.runtime_dir / DECLARED).mkdir(mode=0o755)
    declared = 'version = 1\n[[device]]\nname = "hca"\nkind = "nic"\nrdma = "mlx5_0"\n'
    (config.runtime_dir / DECLARED / "nic.example.com.toml").write_text(declared)
    node = open_node(msgspec.structs.replace(config, gpu_slow_ns=NS))
    node.start()

    async def wait_for_nics(nics: tuple[NicSample, ...]) -> None:
        """Wait for a snapshot with these NICs and the PCI function."""
        while True:
            snapshot = node.read()
            if snapshot and snapshot.nics == nics and isinstance(snapshot.pci, tuple):
                assert [function.address for function in snapshot.pci] == [NIC]
                assert {"nic", "pci"} <= {source.name for source in snapshot.sources}
                return
            await trio.lowlevel.wait_readable(node.fileno())
            node.clear()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.run_watchers)
        with trio.fail_after(PATIENCE_S):
            await wait_for_nics((nic_sample(),))
            os.rename(sysfs.root / device, sysfs.root / "gone")
            await wait_for_nics(())
        nursery.cancel_scope.cancel()
    assert node.stop(PATIENCE_S) == []


def test_stop_with_hung_threads_returns_in_time_and_names_each(sysfs: PlainSysfs, config: Config) -> None:
    node, before = open_node(config), threads_in_fifos()
    hung = [sysfs.hang(path).rename(sysfs.root / path.replace("/", "-")) for path in HANGING]
    node.start()
    node.start_single_read()
    eventually(lambda: len(threads_in_fifos() - before) > len(hung), "all are inside")
    left = node.stop(3)
    for fifo in hung:
        os.close(os.open(fifo, os.O_RDWR | os.O_NONBLOCK))  # releases the hung readers
    assert left == ["NVML process", "machine thread", "sampler thread", "read of GPU processes"]


class HungPods:
    """Pods source that hangs when it is stopped, until the threads of the C core have ended."""

    sample = None
    timer = PassTimer("pods")

    def __init__(self) -> None:
        self.others: set[int] = set()

    def handle_snapshot(self, snapshot: object) -> None:
        """Ignore the snapshot."""

    def start(self, wake: object) -> None:
        """Start no thread."""

    def request_stop(self) -> None:
        """Hang."""

    def stop(self, timeout_s: float) -> bool:
        """Wait until the other threads have ended."""
        eventually(lambda: not self.others & thread_ids(), "all others have ended")
        return False


def thread_ids() -> set[int]:
    """Return the ids of this process's threads of the C core."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            if (task / "comm").read_text().startswith("dh-"):
                found.add(int(task.name))
    return found


def test_threads_of_the_core_end_while_the_stop_waits_for_another(config: Config) -> None:
    pods, before = HungPods(), thread_ids()
    node = open_node_source(
        msgspec.structs.replace(config, gpu_process=False),
        engine_settings(config),
        NS,
        reads_declarations=False,
        pods=pods,
    )
    node.start()
    pods.others = thread_ids() - before
    assert len(pods.others) > 4, "sampler, machine, kernel log, uevents, and those for GPUs"
    assert node.stop(PATIENCE_S) == ["pod tracker"]
