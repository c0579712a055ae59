"""The sampler on the real kernel, and the decoding of its records."""

import mmap
import os
import select
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from errno import EIO
from pathlib import Path
from shutil import rmtree

import pytest
from agents import threads_in_fifos
from machine import Kubepods, hotplug, hugepages, hugetlb_hit, kubepods_tree
from patience import PATIENCE_S
from wire.serving import eventually

from agent.errors import ConfigError, ProbeError
from agent.model.gpu import SamplerField, WakeCondition
from agent.model.reading import Absence, Missing, SourceState
from agent.model.snapshot import CgroupKind, CgroupSample, CpuThrottleSample, HugepagePoolSample, Snapshot
from agent.model.time import NS
from agent.native.sampler import Sampler, SamplerOptions

MIB2 = 2048
POD = "11111111-2222-3333-4444-555555555555"
CONTAINER = "0123456789abcdef" * 4
UNINTELLIGIBLE = -4097
WAKES = tuple(
    WakeCondition(f)
    for f in (
        SamplerField.CPU_ONLINE,
        SamplerField.POOL_NR,
        SamplerField.GROUP_SET,
        SamplerField.GROUP_HT_EVENTS,
    )
)
NO_PODS = f"/drahealth-test-{os.getpid()}"  # a private root, so that no other pods are seen
FAST = SamplerOptions(kubelet_cgroup_root=NO_PODS, period_ns=NS // 20, sweep_ns=NS // 5, wakes=WAKES)


@contextmanager
def open_sampler(options: SamplerOptions) -> Iterator[Sampler]:
    sampler = Sampler(options)
    try:
        yield sampler
    finally:
        assert sampler.stop(PATIENCE_S)


@contextmanager
def start_sampler(options: SamplerOptions) -> Iterator[tuple[Sampler, Snapshot]]:
    """Yield a sampler with a running thread, and its first snapshot."""
    with open_sampler(options) as sampler:
        sampler.start()
        yield sampler, until(sampler, lambda _: True)


def until(sampler: Sampler, is_there: Callable[[Snapshot], bool], *, woken: bool = True) -> Snapshot:
    """Return the first snapshot that fulfils the condition, after a wake or, without one, by polling."""
    poll = select.poll()
    poll.register(sampler.fileno(), select.POLLIN)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if poll.poll(1000 if woken else 5) or not woken:
            sampler.clear()
            snapshot = sampler.read()
            if snapshot is not None and is_there(snapshot):
                return snapshot
    pytest.fail("the sampler never woke the reader" if woken else "the sampler never read it")


def is_woken(sampler: Sampler) -> bool:
    poll = select.poll()
    poll.register(sampler.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def read(sampler: Sampler) -> Snapshot:
    snapshot = sampler.read()
    assert snapshot is not None
    return snapshot


def pool_of(snapshot: Snapshot, size_kib: int, node: int | None) -> HugepagePoolSample:
    return next(pool for pool in snapshot.pools if (pool.size_kib, pool.numa_node) == (size_kib, node))


def group_of(snapshot: Snapshot, container: str = "", pod: str = POD) -> CgroupSample:
    return next(g for g in snapshot.groups if (g.pod_uid, g.container) == (pod, container))


# --- hugepages and CPUs ---------------------------------------------------------------------------------


def test_next_pass_sees_a_pool_shrink_and_recover() -> None:
    with hugepages(MIB2, 8) as pool, open_sampler(FAST) as sampler:
        sampler.run_pass()
        assert pool_of(read(sampler), MIB2, None).nr == 8
        for pages in (7, 8):
            sampler.clear()
            pool.resize(pages)
            sampler.run_pass()
            assert is_woken(sampler)
            seen = read(sampler)
            assert pool_of(seen, MIB2, None).nr == pages
            on_nodes = (p.nr for p in seen.pools if p.size_kib == MIB2 and p.numa_node is not None)
            assert sum(nr for nr in on_nodes if isinstance(nr, int)) == pages


def test_thread_wakes_when_a_pool_shrinks() -> None:
    with hugepages(MIB2, 8) as pool, start_sampler(FAST) as (sampler, first):
        pool.resize(7)
        assert until(sampler, lambda s: pool_of(s, MIB2, None).nr == 7).seq > first.seq


def test_offline_cpu_wakes_and_stays_with_its_node() -> None:
    with hotplug(1) as cpu, start_sampler(FAST) as (sampler, first):
        assert isinstance(first.cpus.online, int)
        assert first.cpus.online & 0b10
        cpu.set_online(False)
        seen = until(sampler, lambda s: s.cpus.online == first.cpus.online & ~0b10)  # type: ignore[operator]
        assert [node.cpus for node in seen.nodes] == [node.cpus for node in first.nodes]
        cpu.set_online(True)
        seen = until(sampler, lambda s: s.cpus.online == first.cpus.online)
        assert all(source.state is not SourceState.FAILING for source in seen.sources)


def test_rescan_request_causes_a_pass_at_once() -> None:
    never = replace(FAST, period_ns=3600 * NS, sweep_ns=3600 * NS, resync_ns=3600 * NS)
    with hotplug(1) as cpu, start_sampler(never) as (sampler, first):
        assert isinstance(first.cpus.online, int)
        for online, expected in ((False, first.cpus.online & ~0b10), (True, first.cpus.online)):
            cpu.set_online(online)
            os.eventfd_write(sampler.rescan_fileno(), 1)
            until(sampler, lambda s, expected=expected: s.cpus.online == expected)  # type: ignore[misc]


def test_pool_usage_change_wakes_no_reader() -> None:
    with hugepages(MIB2, 4), start_sampler(replace(FAST, period_ns=NS // 100)) as (sampler, first):
        free = pool_of(first, MIB2, None).free
        size = MIB2 * 1024
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000  # MAP_HUGETLB
        with mmap.mmap(-1, size, flags=anonymous) as area:
            area[0] = 1
            until(sampler, lambda s: pool_of(s, MIB2, None).free != free, woken=False)
        quiet = until(sampler, lambda s: pool_of(s, MIB2, None).free == free, woken=False)
        assert quiet.seq == first.seq


# --- cgroups --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("systemd", [False, True], ids=["cgroupfs", "systemd"])
def test_hugetlb_limit_hit_wakes_with_its_evidence(systemd: bool) -> None:
    with hugepages(MIB2, 16), kubepods_tree(hugetlb=True, systemd=systemd) as tree:
        options = replace(FAST, kubelet_cgroup_root=tree.cgroup_root, sweep_ns=60 * NS)
        with start_sampler(options) as (sampler, first):
            assert first.groups == ()
            group = tree.make("burstable", POD, CONTAINER)
            born = until(sampler, lambda s: len(s.groups) == 2)
            assert {g.kind for g in born.groups} == {CgroupKind.POD, CgroupKind.CONTAINER}
            assert group_of(born, CONTAINER).hugetlb[0].max == 2**64 - 1
            (group / "hugetlb.2MB.max").write_text("8M")
            assert hugetlb_hit(group, 10).pages == 4
            hit = until(sampler, lambda s: group_of(s, CONTAINER).hugetlb[0].events_max == 1)
            assert group_of(hit, CONTAINER).hugetlb[0].max == 8 << 20
            # the pod is read before its container, and may have been read before the hit
            hit = until(sampler, lambda s: group_of(s).hugetlb[0].events_max == 1, woken=False)
            assert group_of(hit).hugetlb[0].max == 2**64 - 1
            tree.remove("burstable", POD, CONTAINER)
            until(sampler, lambda s: len(s.groups) == 1)
            # the pod may change once more with its container
            eventually(lambda: group_of(read(sampler)) is group_of(read(sampler)), "a sample that is kept")
            tree.remove("burstable", POD)
            assert until(sampler, lambda s: not s.groups).core.unwatched == 0


def test_controller_disabled_and_enabled_is_watched_again() -> None:
    with hugepages(MIB2, 16), kubepods_tree(hugetlb=True) as tree:
        pod = tree.make("burstable", POD)
        options = replace(FAST, kubelet_cgroup_root=tree.cgroup_root, resync_ns=NS // 2)
        with start_sampler(options) as (sampler, _):
            (pod / "cgroup.subtree_control").write_text("-hugetlb")
            (pod.parent / "cgroup.subtree_control").write_text("-hugetlb")
            lost = until(sampler, lambda s: isinstance(group_of(s).hugetlb[0].events_max, Missing))
            assert group_of(lost).hugetlb[0].events_max == Missing(Absence.UNREADABLE, 2)
            assert lost.sources[-1].state is SourceState.FAILING
            (pod.parent / "cgroup.subtree_control").write_text("+hugetlb")
            back = until(sampler, lambda s: s.sources[-1].state is SourceState.OK)
            assert group_of(back).hugetlb[0].events_max == 0
            assert group_of(back).id == group_of(lost).id
            (pod / "hugetlb.2MB.max").write_text("2M")
            hugetlb_hit(pod, 3)
            until(sampler, lambda s: group_of(s).hugetlb[0].events_max == 1)


def test_container_recreated_under_its_name_gets_a_new_id() -> None:
    with kubepods_tree() as tree:
        tree.make("", POD, CONTAINER)
        with start_sampler(replace(FAST, kubelet_cgroup_root=tree.cgroup_root)) as (sampler, first):
            before = group_of(first, CONTAINER).id
            tree.remove("", POD, CONTAINER)
            tree.make("", POD, CONTAINER)
            until(sampler, lambda s: any(g.container and g.id != before for g in s.groups))


_FILL = "import sys; open(sys.argv[1], 'wb').write(bytes(32 << 20))"
_SPIN = "import time\nend = time.process_time() + 0.05\nwhile time.process_time() < end: pass"


def run_inside(cgroups: list[Path], code: str, *args: str) -> int:
    """Run Python code in a process that is in all of these cgroups; return its exit code."""
    join = "import os, sys\nfor p in sys.argv.pop(1).split(':'): open(p, 'w').write(str(os.getpid()))\n"
    procs = ":".join(str(cgroup / "cgroup.procs") for cgroup in cgroups)
    command = [sys.executable, "-c", join + code, procs, *args]
    return subprocess.run(command, check=False, timeout=PATIENCE_S).returncode


def read_key_values(path: Path) -> dict[str, int]:
    return {key: int(value) for key, value in (line.split() for line in path.read_text().splitlines())}


def test_v1_counters_equal_the_files(tmp_path: Path) -> None:
    with kubepods_tree("memory", "cpu", unified=False) as tree:
        tree.make("besteffort", POD, CONTAINER)
        memory, cpu = (root / tree.directory("besteffort", POD, CONTAINER) for root in tree.roots)
        (memory / "memory.limit_in_bytes").write_text(f"{16 << 20}")
        (cpu / "cpu.cfs_period_us").write_text("20000")
        (cpu / "cpu.cfs_quota_us").write_text("2000")
        with open_sampler(replace(FAST, kubelet_cgroup_root=tree.cgroup_root)) as sampler:
            sampler.run_pass()
            assert group_of(read(sampler), CONTAINER).mem_failcnt == 0
            # the kernel reclaims the pages of a file on a disk, and kills the process for those of a tmpfs
            assert run_inside([memory], _FILL, str(tmp_path / "file")) in (0, -signal.SIGKILL)
            assert run_inside([cpu], _SPIN) == 0
            stat: dict[str, int] = {}
            fails = 0
            # the last period counts when the process has ended, and the file's pages are written later
            while (stat, fails) != (
                read_key_values(cpu / "cpu.stat"),
                int((memory / "memory.failcnt").read_text()),
            ):
                stat, fails = read_key_values(cpu / "cpu.stat"), int((memory / "memory.failcnt").read_text())
                assert sampler.run_sweep() == 2
            group = group_of(read(sampler), CONTAINER)
            assert group.mem_failcnt == fails > 0
            assert group.cpu_throttled == stat["nr_throttled"] > 0
            assert group.cpu_periods == stat["nr_periods"]
            assert group.mem_oom == Missing(Absence.ABSENT, 2)  # of v2


def make_many(tree: Kubepods, pods: int, containers: int) -> None:
    for pod in range(pods):
        for container in range(containers):
            tree.make("burstable", f"{pod:08}-2222-3333-4444-555555555555", f"{container:064}")


def test_thousand_groups_appear_and_vanish() -> None:
    with kubepods_tree() as tree:
        tree.make("burstable")
        with start_sampler(replace(FAST, kubelet_cgroup_root=tree.cgroup_root)) as (sampler, _):
            make_many(tree, 250, 3)
            there = until(sampler, lambda s: len(s.groups) == 1000)
            assert len({group.id for group in there.groups}) == 1000
            assert there.core.groups_dropped == 0
            tree.remove("burstable")
            gone = until(sampler, lambda s: not s.groups)
            assert gone.core.watches < there.core.watches - 500
            assert gone.core.descriptors < 40  # no descriptor of a group stays open
            assert gone.sources[-1].failures == 0  # removal is no failure
            assert gone.sources[-1].state is SourceState.OK


# --- decoding in Python ---------------------------------------------------------------------------------


CPU_STAT = "usage_usec 0\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n"
MORE_CPU_STAT = "usage_usec 9\nnr_periods 1\nnr_throttled 0\nthrottled_usec 0\n"


def pods_on_disk(root: Path, number: int) -> None:
    (root / "cgroup.controllers").write_text("cpu hugetlb\n")
    for i in range(number):
        pod = root / f"kubepods/pod{i:08}-2222-3333-4444-555555555555"
        pod.mkdir(parents=True)
        (pod / "cgroup.events").write_text("populated 1\nfrozen 0\n")
        (pod / "cpu.stat").write_text(CPU_STAT)


@pytest.fixture
def fixture(tmp_path: Path) -> SamplerOptions:
    """Write a small machine: one CPU, one pool of 2 MiB pages, three pods."""
    cpu, pool = tmp_path / "sys/devices/system/cpu", tmp_path / "sys/kernel/mm/hugepages/hugepages-2048kB"
    for directory in (cpu, pool, tmp_path / "cg"):
        directory.mkdir(parents=True)
    (cpu / "online").write_text("0\n")
    (pool / "nr_hugepages").write_text("64\n")
    pods_on_disk(tmp_path / "cg", 3)
    return SamplerOptions(tmp_path / "sys", tmp_path / "cg", wakes=WAKES)


def pod_uid(number: int) -> str:
    return f"{number:08}-2222-3333-4444-555555555555"


def test_snapshot_before_the_first_pass_is_none(fixture: SamplerOptions) -> None:
    with open_sampler(fixture) as sampler:
        assert sampler.read() is None
        sampler.clear()  # returns at once with nothing to clear
        sampler.run_pass()
        assert is_woken(sampler)
        sampler.clear()
        assert not is_woken(sampler)
        assert read(sampler).seq == 1


def test_unreadable_differs_from_zero_and_absent(fixture: SamplerOptions) -> None:
    with open_sampler(fixture) as sampler:
        sampler.run_pass()
        pool = pool_of(read(sampler), MIB2, None)
        assert pool.nr == 64
        assert pool.free == pool.overcommit == Missing(Absence.ABSENT, 2)
        assert read(sampler).cpus.isolated == Missing(Absence.ABSENT, 2)

        (fixture.sysfs_root / "kernel/mm/hugepages/hugepages-2048kB/nr_hugepages").write_text("many\n")
        (fixture.sysfs_root / "devices/system/cpu/online").write_text("all\n")
        sampler.run_pass()
        snapshot = read(sampler)
        assert pool_of(snapshot, MIB2, None).nr == Missing(Absence.UNREADABLE, UNINTELLIGIBLE)
        assert snapshot.cpus.online == Missing(Absence.UNREADABLE, UNINTELLIGIBLE)
        states = {source.name: (source.state, source.detail) for source in snapshot.sources}
        assert states["cpus"] == (SourceState.FAILING, "cpu/online: text cannot be parsed")
        assert states["hugepages"] == (SourceState.FAILING, "nr_hugepages: text cannot be parsed")
        assert states["throttle"] == (SourceState.ABSENT, "")


def test_file_unreadable_from_the_start_is_not_absent(fixture: SamplerOptions) -> None:
    pool = fixture.sysfs_root / "kernel/mm/hugepages/hugepages-2048kB"
    (pool / "free_hugepages").symlink_to("/proc/self/mem")
    cpulist = fixture.sysfs_root / "devices/system/node/node0/cpulist"
    cpulist.parent.mkdir(parents=True)
    cpulist.write_text("some\n")
    with open_sampler(fixture) as sampler:
        sampler.run_pass()
        snapshot = read(sampler)
        assert pool_of(snapshot, MIB2, None).free == Missing(Absence.UNREADABLE, EIO)
        assert pool_of(snapshot, MIB2, None).surplus == Missing(Absence.ABSENT, 2)
        assert snapshot.nodes[0].cpus == Missing(Absence.UNREADABLE, UNINTELLIGIBLE)
        states = {source.name: (source.state, source.detail) for source in snapshot.sources}
        assert states["hugepages"] == (SourceState.FAILING, "free_hugepages: Input/output error")
        assert states["cpus"] == (SourceState.FAILING, "cpulist: text cannot be parsed")
        cpulist.write_text("0\n")
        sampler.run_pass()
        assert read(sampler).nodes[0].cpus == 1


@pytest.mark.parametrize(
    ("is_file", "state", "why"),
    [
        (False, SourceState.ABSENT, "No such file or directory"),
        (True, SourceState.FAILING, "Not a directory"),
    ],
)
def test_source_without_its_root_names_the_cause(
    tmp_path: Path, is_file: bool, state: SourceState, why: str
) -> None:
    root = tmp_path / "root"
    if is_file:
        root.write_text("")
    with open_sampler(SamplerOptions(root, root)) as sampler:
        sampler.run_pass()
        sources = read(sampler).sources
    assert {source.state for source in sources} == {state}
    assert {source.detail for source in sources} == {
        f"sysfs root {root}: {why}", f"cgroupfs root {root}: {why}"
    }  # fmt: skip


def test_unreadable_group_names_the_cause(fixture: SamplerOptions) -> None:
    with open_sampler(fixture) as sampler:
        sampler.run_pass()
        assert group_of(read(sampler), pod=pod_uid(1)).cpu_periods == 0
        stat = fixture.cgroupfs_root / f"kubepods/pod{pod_uid(1)}/cpu.stat"
        stat.unlink()
        stat.symlink_to("/proc/self/mem")  # opens, but its first page cannot be read
        sampler.run_sweep()
        sampler.run_pass()
        snapshot = read(sampler)
        group = group_of(snapshot, pod=pod_uid(1))
        assert group.cpu_periods == Missing(Absence.UNREADABLE, EIO)
        assert group.hugetlb[0].events_max == Missing(Absence.ABSENT, 2)
        assert group.populated == 1
        assert group_of(snapshot, pod=pod_uid(2)).cpu_periods == 0
        assert snapshot.sources[-1].state is SourceState.FAILING
        assert snapshot.sources[-1].detail == "cpu.stat nr_periods: Input/output error"


def test_throttling_is_reported_per_cpu(fixture: SamplerOptions) -> None:
    cpus = fixture.sysfs_root / "devices/system/cpu"
    (cpus / "online").write_text("0-2\n")
    for cpu in (0, 2):
        counters = cpus / f"cpu{cpu}/thermal_throttle"
        counters.mkdir(parents=True)
        (counters / "core_throttle_count").write_text("100\n")
    (cpus / "cpu2/thermal_throttle/package_throttle_count").write_text("7\n")
    (fixture.sysfs_root / "devices/system/node/node0").mkdir(parents=True)
    (fixture.sysfs_root / "devices/system/node/node0/cpulist").write_text("0-2\n")
    absent = Missing(Absence.ABSENT, 2)
    with open_sampler(replace(fixture, period_ns=NS)) as sampler:
        sampler.run_pass()
        assert read(sampler).throttle == (CpuThrottleSample(0, 0, absent), CpuThrottleSample(2, 0, 0))
        assert len(read(sampler).pools) == 1  # the records behind them are in place
        assert len(read(sampler).groups) == 3


def test_unchanged_group_keeps_its_sample(fixture: SamplerOptions) -> None:
    with open_sampler(fixture) as sampler:
        sampler.run_pass()
        before = read(sampler)
        (fixture.cgroupfs_root / f"kubepods/pod{pod_uid(1)}/cpu.stat").write_text(MORE_CPU_STAT)
        sampler.run_sweep()
        after = read(sampler)
        for pod in (0, 2):
            assert group_of(after, pod=pod_uid(pod)) is group_of(before, pod=pod_uid(pod))
        assert group_of(after, pod=pod_uid(1)).cpu_periods == 1
        assert group_of(before, pod=pod_uid(1)).cpu_periods == 0  # a snapshot is a copy


def test_unchanged_table_is_the_same_object(fixture: SamplerOptions) -> None:
    with open_sampler(fixture) as sampler:
        sampler.run_pass()
        first = read(sampler)
        sampler.run_pass()
        quiet = read(sampler)
        assert quiet.core.passes == 2
        assert (quiet.groups, quiet.pools, quiet.nodes) == (first.groups, first.pools, first.nodes)
        assert quiet.groups is first.groups
        assert quiet.pools is first.pools
        assert quiet.nodes is first.nodes
        assert quiet.cpus is first.cpus


def test_one_change_among_700_groups_is_one_new_sample(fixture: SamplerOptions) -> None:
    more = fixture.cgroupfs_root / "more"
    more.mkdir()
    pods_on_disk(more, 700)
    with open_sampler(replace(fixture, kubelet_cgroup_root="/more")) as sampler:
        sampler.run_pass()
        before = read(sampler).groups
        (more / f"kubepods/pod{pod_uid(333)}/cpu.stat").write_text(MORE_CPU_STAT)
        sampler.run_sweep()
        after = read(sampler).groups
        new = [now for was, now in zip(before, after, strict=True) if now is not was]
        assert [group.pod_uid for group in new] == [pod_uid(333)]


def test_many_groups_are_copied_completely_every_time(fixture: SamplerOptions) -> None:
    (fixture.cgroupfs_root / "more").mkdir()
    pods_on_disk(fixture.cgroupfs_root / "more", 700)  # about 600 KiB of records
    with open_sampler(replace(fixture, kubelet_cgroup_root="/more")) as sampler:
        sampler.run_pass()
        groups = read(sampler).groups
        assert {group.pod_uid for group in groups} == {pod_uid(i) for i in range(700)}
        assert all(now is was for now, was in zip(read(sampler).groups, groups, strict=True))
        assert len({id(group.hugetlb) for group in groups}) == 1  # with equal values


def test_removed_groups_take_no_memory(fixture: SamplerOptions) -> None:
    more = fixture.cgroupfs_root / "more"
    more.mkdir()
    pods_on_disk(more, 700)
    tracemalloc.start()
    try:
        with open_sampler(replace(fixture, kubelet_cgroup_root="/more")) as sampler:
            without = tracemalloc.get_traced_memory()[0]
            sampler.run_pass()
            assert len(read(sampler).groups) == 700
            most = tracemalloc.get_traced_memory()[0]
            rmtree(more / "kubepods")
            sampler.run_sweep()
            assert read(sampler).groups == ()
            assert tracemalloc.get_traced_memory()[0] - without < (most - without) / 4
    finally:
        tracemalloc.stop()


def test_full_table_counts_dropped_groups(fixture: SamplerOptions) -> None:
    with open_sampler(replace(fixture, group_max=2)) as sampler:
        sampler.run_pass()
        snapshot = read(sampler)
        assert len(snapshot.groups) == 2
        assert snapshot.core.groups_dropped == 1


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({"period_ns": 9_000_000}, "period 9 ms is not in 10 ms to 1 h"),
        ({"period_ns": 3601 * NS}, "period 3.601e[+]06 ms is not in"),
        ({"group_max": 0}, "cgroup limit 0 is not in 1 to 65536"),
        ({"group_max": 65537}, "cgroup limit 65537 is not in 1 to 65536"),
        ({"kubelet_cgroup_root": "/" + "r" * 200}, "is 201 bytes, limit 200"),
        ({"sysfs_root": Path("/" + "é" * 100)}, "is 201 bytes, limit 200"),
    ],
)
def test_invalid_option_is_named_with_its_value(change: dict[str, object], culprit: str) -> None:
    with pytest.raises(ConfigError, match=culprit):
        Sampler(replace(SamplerOptions(), **change))  # type: ignore[arg-type]


def test_pass_is_refused_while_the_thread_runs(fixture: SamplerOptions) -> None:
    with start_sampler(fixture) as (sampler, _):
        with pytest.raises(ProbeError, match="own thread reads them"):
            sampler.run_pass()
        with pytest.raises(ProbeError, match="sampler thread"):
            sampler.start()


def test_first_pass_that_never_ends_is_visible(fixture: SamplerOptions) -> None:
    fifo = fixture.sysfs_root / "devices/system/cpu/online"
    fifo.unlink()
    os.mkfifo(fifo)
    with open_sampler(fixture) as sampler:
        begun = time.monotonic_ns()
        sampler.start()
        snapshot = read(sampler)
        assert not is_woken(sampler)
        assert (snapshot.seq, snapshot.core.passes) == (0, 0)
        assert snapshot.cpus.online == Missing(Absence.ABSENT, 2)
        for source in snapshot.sources:
            assert (source.state, source.passes, source.failures) == (SourceState.STARTING, 0, 0)
            assert begun <= source.beat_ns <= time.monotonic_ns()
        writer = os.open(fifo, os.O_WRONLY)  # blocks until the thread has opened it
        fifo.rename(fifo.with_name("aside"))
        os.close(writer)  # now the thread ends
        assert until(sampler, lambda s: s.core.passes == 1).sources[1].state is SourceState.ABSENT


def test_source_that_never_returns_is_abandoned(fixture: SamplerOptions) -> None:
    fifo = fixture.sysfs_root / "devices/system/cpu/online"
    fifo.unlink()
    os.mkfifo(fifo)  # open(2) blocks without a writer
    sampler, before = Sampler(fixture), threads_in_fifos()
    sampler.start()
    eventually(lambda: threads_in_fifos() > before, "its thread is inside")
    [thread] = threads_in_fifos() - before
    assert not sampler.stop(0.05)
    assert sampler.stop(0.05)  # nothing more to stop
    writer = os.open(fifo, os.O_WRONLY)  # blocks until the thread has opened it
    fifo.rename(fifo.with_name("aside"))
    os.close(writer)  # now the thread may end
    eventually(lambda: str(thread) not in os.listdir("/proc/self/task"), "it ends")
