"""The thread that watches machine state that changes rarely: on trees of files, on the real /sys, and on an
overlay that gives the real /sys memory controllers.
"""

import errno
import json
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from core_threads import ThreadReader, eventfd_descriptors
from patience import PATIENCE_S
from private_mounts import within_mounts

from agent.errors import ConfigError, ProbeError
from agent.model.machine_samples import MachineSample
from agent.model.reading import Absence, Missing, SourceSample, SourceState
from agent.model.time import NS
from agent.native.machine_watch import MachineWatch

ABSENT = Missing(Absence.ABSENT, 2)
GONE = Missing(Absence.UNREADABLE, 2)
NODES = Path("/sys/devices/system/node")


class Watch(ThreadReader[MachineSample]):
    """Watch with an eventfd."""

    def __init__(self, sysfs_root: Path, procfs_root: Path, *times_ns: int) -> None:
        super().__init__()
        self.thread = self.machine = MachineWatch(sysfs_root, procfs_root, self.fd, *times_ns)

    def next(self) -> MachineSample:
        """Run a pass in this thread, and return its publication."""
        self.machine.run_pass()
        return self.read()

    def poke(self) -> None:
        os.eventfd_write(self.machine.rescan_fileno(), 1)


@contextmanager
def watch(sysfs_root: Path, procfs_root: Path, *times_ns: int) -> Iterator[Watch]:
    """Yield a watch that is not started, and stop it afterwards."""
    machine_watch = Watch(sysfs_root, procfs_root, *times_ns)
    try:
        yield machine_watch
    finally:
        assert machine_watch.thread.stop(PATIENCE_S)
        os.close(machine_watch.fd)


def test_watch_without_memory_for_its_copy_keeps_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", refuse)
    wake_fd = os.eventfd(0)
    with pytest.raises(ProbeError, match="machine thread cannot be started: Cannot allocate memory"):
        MachineWatch(tmp_path, tmp_path, wake_fd)
    assert eventfd_descriptors(wake_fd) == 1
    os.close(wake_fd)


def source(sample: MachineSample, name: str) -> SourceSample:
    return next(source for source in sample.sources if source.name == name)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def controller(number: int, *, correctable: int = 0, modules: int = 2) -> dict[str, str]:
    """Write the files of a memory controller; its first module has its correctable errors."""
    top = f"devices/system/edac/mc/mc{number}"
    files = {f"{top}/mc_name": "i10nm\n", f"{top}/ce_count": f"{correctable}\n", f"{top}/ue_count": "0\n"}
    for i in range(modules):
        files |= {
            f"{top}/dimm{i}/dimm_label": f"CPU_SrcID#0_MC#{number}_Chan#0_DIMM#{i}\n",
            f"{top}/dimm{i}/dimm_location": f"channel 0 slot {i} \n",
            f"{top}/dimm{i}/dimm_ce_count": f"{0 if i else correctable}\n",
            f"{top}/dimm{i}/dimm_ue_count": "0\n",
        }
    return files


def node(number: int, *, total_kib: int = 32_000_000, blocks: int = 4, offline: int = 0) -> dict[str, str]:
    """Write the files of a NUMA node."""
    top = f"devices/system/node/node{number}"
    states = {f"{top}/memory{i}/state": "offline\n" if i < offline else "online\n" for i in range(blocks)}
    meminfo = f"Node {number} MemTotal:       {total_kib} kB\n"
    return {f"{top}/meminfo": meminfo, f"{top}/memory_failure/total": "2\n"} | states


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    root = tmp_path / "sys"
    write(root, controller(0, correctable=7) | controller(10) | controller(2))
    write(root, {"devices/system/node/online": "0-1\n", "devices/system/node/has_memory": "0\n"})
    write(root, node(1, offline=1) | node(0))
    return root


@pytest.fixture
def procfs(tmp_path: Path) -> Path:
    root = tmp_path / "proc"
    write(root, {"meminfo": "HardwareCorrupted:   8 kB\n", "vmstat": "htlb_buddy_alloc_fail 5\n"})
    return root


def test_modules_are_sorted_after_their_controller(sysfs: Path, procfs: Path) -> None:
    with watch(sysfs, procfs) as machine_watch:
        sample = machine_watch.next()
    places = [(dimm.controller, dimm.dimm) for dimm in sample.dimms]
    assert places == [(mc, dimm) for mc in (0, 2, 10) for dimm in (None, 0, 1)]
    first, second, third = sample.dimms[:3]
    assert first == (0, None, "i10nm", "", 7, 0)
    assert second == (0, 0, "CPU_SrcID#0_MC#0_Chan#0_DIMM#0", "channel 0 slot 0", 7, 0)
    assert third.correctable == 0
    assert source(sample, "edac").state is SourceState.OK


def test_memory_is_reported_by_node(sysfs: Path, procfs: Path) -> None:
    with watch(sysfs, procfs) as machine_watch:
        sample = machine_watch.next()
    assert sample.numa == ((0, 32_000_000, 2, 4, 0), (1, 32_000_000, 2, 4, 1))
    assert (sample.nodes_online, sample.nodes_memory) == (0b11, 0b01)
    assert (sample.corrupted_kib, sample.surplus_failed) == (8, 5)
    assert sample.smt_active == ABSENT


def test_no_machine_source_is_vital(sysfs: Path, procfs: Path) -> None:
    with watch(sysfs, procfs, NS, 2 * NS, 3 * NS) as machine_watch:
        sources = machine_watch.next().sources
    assert [source.name for source in sources] == ["edac", "memory", "cores", "pressure"]
    assert [source.period_ns for source in sources] == [NS, 2 * NS, 3 * NS, 2 * NS]
    assert [(source.vital, source.limit_ns, source.passes) for source in sources] == [(False, 0, 1)] * 4


def test_read_before_start_is_none_then_all_starting(tmp_path: Path, procfs: Path) -> None:
    counts = tmp_path / "sys/devices/system/edac/mc/mc0/ce_count"
    counts.parent.mkdir(parents=True)
    os.mkfifo(counts)  # the first pass hangs in the FIFO
    with watch(tmp_path / "sys", procfs, 3600 * NS, 3600 * NS, 3600 * NS) as machine_watch:
        assert machine_watch.thread.read() is None
        machine_watch.thread.start()
        assert {it.state for it in machine_watch.read().sources} == {SourceState.STARTING}
        with pytest.raises(ProbeError, match="own thread reads them"):
            machine_watch.machine.run_pass()
        counts.write_text("3\n")
        assert machine_watch.until(lambda s: bool(s.dimms)).dimms[0].controller == 0


def test_removed_file_is_unreadable_not_zero(sysfs: Path, procfs: Path) -> None:
    with watch(sysfs, procfs) as machine_watch:
        machine_watch.next()
        for file in (sysfs / "devices/system/edac/mc/mc0").glob("*_count"):
            file.unlink()
        sample = machine_watch.next()
    assert sample.dimms[0][4:] == (GONE, GONE)
    edac = source(sample, "edac")
    assert edac.state is SourceState.FAILING
    assert edac.detail == "ue_count: No such file or directory"
    assert edac.failures == 2


def test_missing_root_is_the_detail_of_an_absent_source(tmp_path: Path, procfs: Path) -> None:
    root = tmp_path / "nowhere"
    with watch(root, procfs) as machine_watch:
        edac = source(machine_watch.next(), "edac")
    assert (edac.state, edac.detail) == (SourceState.ABSENT, f"sysfs root {root}: No such file or directory")


def test_unchanged_tables_are_not_decoded_again(sysfs: Path, procfs: Path) -> None:
    with watch(sysfs, procfs) as machine_watch:
        before = machine_watch.next()
        write(sysfs, controller(2, correctable=1))
        after = machine_watch.next()
    assert after.numa is before.numa
    assert after.cores is before.cores
    assert after.dimms[3].correctable == 1
    changed = [now is not was for now, was in zip(after.dimms, before.dimms, strict=True)]
    assert changed == [False] * 3 + [True, True, False] + [False] * 3  # the controller and its first module


def test_big_machine_is_read_completely(tmp_path: Path, procfs: Path) -> None:
    root = tmp_path / "sys"
    for i in range(24):
        write(root, controller(i, correctable=i, modules=8))
    with watch(root, procfs) as machine_watch:
        sample = machine_watch.next()
    assert len(sample.dimms) == 24 * 9
    assert [dimm.correctable for dimm in sample.dimms if dimm.dimm is None] == list(range(24))


def test_thread_wakes_for_fields_with_a_wake(sysfs: Path, procfs: Path) -> None:
    with watch(sysfs, procfs, NS // 100, NS // 100, NS // 100) as machine_watch:
        machine_watch.thread.start()
        machine_watch.until(lambda s: source(s, "pressure").passes > 0)
        write(sysfs, {"devices/system/edac/mc/mc2/ue_count": "1\n"})
        machine_watch.until(lambda s: s.dimms[3].uncorrectable == 1)
        write(sysfs, {"devices/system/node/node1/memory_failure/total": "3\n"})
        machine_watch.until(lambda s: s.numa[1].poisoned == 3)


def test_rescan_request_causes_a_pass_at_once(sysfs: Path, procfs: Path) -> None:
    with watch(sysfs, procfs, 3600 * NS, 3600 * NS, 3600 * NS) as machine_watch:
        machine_watch.thread.start()
        machine_watch.until(lambda s: source(s, "pressure").passes == 1)
        write(sysfs, node(0, offline=2))
        machine_watch.poke()
        machine_watch.until(lambda s: s.numa[0].blocks_offline == 2)


@pytest.mark.parametrize("times_ns", [(NS // 100 - 1, NS, NS), (2 * NS, NS, NS), (NS, 2 * NS, NS)])
def test_invalid_periods_are_config_errors(times_ns: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="machine watch: periods"):
        Watch(Path("/sys"), Path("/proc"), *times_ns)


def test_root_too_long_is_named_with_its_length() -> None:
    with pytest.raises(ConfigError, match=re.escape(f"root path '/{'x' * 200}' is 201 bytes, limit 200")):
        Watch(Path("/sys"), Path("/" + "x" * 200))


# --- the real machine ---------------------------------------------------------------------------------------


def test_real_machine_is_read() -> None:
    with watch(Path("/sys"), Path("/proc")) as machine_watch:
        sample = machine_watch.next()
    if not NODES.exists():
        pytest.skip("a kernel without NUMA")
    assert source(sample, "memory").state is SourceState.OK
    assert isinstance(sample.nodes_online, int)
    assert [numa.numa_node for numa in sample.numa] == [
        i for i in range(64) if sample.nodes_online >> i & 1 and (NODES / f"node{i}").is_dir()
    ]
    for numa in sample.numa:
        states = [file.read_text() for file in (NODES / f"node{numa.numa_node}").glob("memory[0-9]*/state")]
        assert numa.blocks == (len(states) or ABSENT)
        assert numa.blocks_offline == (states.count("offline\n") if states else ABSENT)
        assert isinstance(numa.total_kib, int)
        assert numa.total_kib > 0
    has_edac = any(Path("/sys/devices/system/edac/mc").glob("mc[0-9]*/ce_count"))
    assert (source(sample, "edac").state is SourceState.ABSENT) == (not has_edac)
    assert bool(sample.dimms) == has_edac


READ_ONCE = """
import json, os, sys
from pathlib import Path
from agent.native.machine_watch import MachineWatch
machine = MachineWatch(Path("/sys"), Path("/proc"), os.eventfd(0))
machine.run_pass()
sample = machine.read()
print(json.dumps([[list(dimm) for dimm in sample.dimms], len(sample.numa)]))
"""


def test_controllers_in_an_overlay_of_sysfs_are_read(tmp_path: Path) -> None:
    write(tmp_path, controller(0, correctable=7, modules=1))
    mounted = within_mounts('mount -t overlay -o "lowerdir=$1:/sys" overlay /sys', tmp_path)
    command = [*mounted, sys.executable, "-c", READ_ONCE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    dimms, nodes = json.loads(done.stdout)
    assert dimms == [
        [0, None, "i10nm", "", 7, 0],
        [0, 0, "CPU_SrcID#0_MC#0_Chan#0_DIMM#0", "channel 0 slot 0", 7, 0],
    ]
    assert nodes > 0
