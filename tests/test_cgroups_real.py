"""Pods in real cgroups of version 1 that the kernel throttles, kills, freezes and pins to CPUs.

In tests of kernel notifications the next sweep is an hour away.
"""

import select
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from agents import Agent, short_tmp, wait_for_message
from machine import Kubepods, cpu_load, kubepods_tree, machine_lock, oom_kill
from own_process import run_in_own_process
from patience import PATIENCE_S
from wire.google import Watcher
from wire.serving import descriptors, eventually

from agent.health.host.verdicts import sampler_wakes
from agent.model.reading import SourceState
from agent.model.snapshot import CgroupSample, Snapshot
from agent.model.time import NS
from agent.native.sampler import Sampler, SamplerOptions

POD: Final = "5a3c1d2e-4b5a-6978-8796-a5b4c3d2e1f0"
CONTAINER: Final = "e" * 64
QOS: Final = "burstable"
MIB: Final = 1 << 20
LIMIT: Final = 16 * MIB
HOUR_NS: Final = 3600 * NS
PERIOD_US: Final = 10_000
SETTLED: Final = 30  # passes, at least 50 ms apart: a new group is read completely until it is a second old
PROMPT_S: Final = 0.5
__all__ = ["short_tmp"]
pytestmark = pytest.mark.usefixtures("hold_machine_lock")


@pytest.fixture
def hold_machine_lock() -> Iterator[None]:
    with machine_lock():
        yield


@contextmanager
def watch_tree(tree: Kubepods, sweep_ns: int = HOUR_NS) -> Iterator[Sampler]:
    """Sampler with the rules' wake conditions."""
    sampler = Sampler(
        SamplerOptions(
            kubelet_cgroup_root=tree.cgroup_root,
            period_ns=NS // 20,
            sweep_ns=sweep_ns,
            resync_ns=HOUR_NS,
            wakes=sampler_wakes(10, 60),
        )
    )
    try:
        sampler.start()
        yield sampler
    finally:
        assert sampler.stop(PATIENCE_S)


def until(sampler: Sampler, condition: Callable[[Snapshot], bool], *, woken: bool = True) -> Snapshot:
    """Return the first snapshot for which the condition holds, after a wake or by polling."""
    poll = select.poll()
    poll.register(sampler.fileno(), select.POLLIN)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if poll.poll(1000 if woken else 5) or not woken:
            sampler.clear()
            snapshot = sampler.read()
            if snapshot is not None and condition(snapshot):
                return snapshot
    raise AssertionError("the condition never held")


def group_of(snapshot: Snapshot, container: str = CONTAINER) -> CgroupSample | None:
    return next((group for group in snapshot.groups if group.container == container), None)


def has_readings(container: str = CONTAINER, **members: Any) -> Callable[[Snapshot], bool]:
    """Return a condition: the group exists and has these readings."""

    def claim(snapshot: Snapshot) -> bool:
        group = group_of(snapshot, container)
        return group is not None and all(getattr(group, name) == value for name, value in members.items())

    return claim


def make_promptly(tree: Kubepods, container: str, write: Callable[[Path], object]) -> Path:
    """Create a container, or a pod, and its settings while it is new: it is made again if that took long."""
    while True:
        began_s = time.monotonic()
        group = tree.make(QOS, POD, container)
        write(group)
        if time.monotonic() - began_s < PROMPT_S:
            return group
        tree.remove(QOS, POD)


def create_limited_group(tree: Kubepods, sampler: Sampler, container: str = CONTAINER) -> Path:
    """Create a container with a memory limit, or a pod, that is not read again before the sweep."""
    group = make_promptly(
        tree, container, lambda group: (group / "memory.limit_in_bytes").write_text(f"{LIMIT}\n")
    )
    passes = until(sampler, has_readings(container, mem_limit=LIMIT), woken=False).core.passes
    until(sampler, lambda newest: newest.core.passes >= passes + SETTLED, woken=False)
    return group


def test_kill_is_noticed_long_before_the_sweep() -> None:
    with kubepods_tree("memory", unified=False) as tree, watch_tree(tree) as sampler:
        group = create_limited_group(tree, sampler)
        assert until(sampler, has_readings(), woken=False).core.unwatched == 0
        (group / "memory.limit_in_bytes").write_text(f"{2 * LIMIT}\n")
        oom_kill(group)
        found = group_of(until(sampler, has_readings(mem_oom_kill=1)))
        assert found is not None
        assert found.mem_limit == 2 * LIMIT, "it is read with the kill, and else in an hour"


def test_pod_memory_limit_kills_are_counted_in_the_container() -> None:
    with kubepods_tree("memory", unified=False) as tree, watch_tree(tree) as sampler:
        create_limited_group(tree, sampler, "")
        oom_kill(tree.make(QOS, POD, CONTAINER))
        until(sampler, has_readings(mem_oom_kill=1), woken=False)


def test_every_kill_of_many_is_counted() -> None:
    with kubepods_tree("memory", unified=False) as tree, watch_tree(tree) as sampler:
        group = create_limited_group(tree, sampler)
        for _ in range(5):
            oom_kill(group)
        until(sampler, has_readings(mem_oom_kill=5), woken=False)


def test_kill_wakes_the_core() -> None:
    with kubepods_tree("memory", unified=False) as tree, watch_tree(tree) as sampler:
        oom_kill(create_limited_group(tree, sampler))
        until(sampler, has_readings(mem_oom_kill=1))


def test_removed_group_removes_its_descendants_without_failure() -> None:
    before = descriptors()
    with kubepods_tree("memory", unified=False) as tree, watch_tree(tree) as sampler:
        held = until(sampler, lambda _: True).core.descriptors
        for _ in range(3):
            tree.make(QOS, POD, CONTAINER)
            until(sampler, has_readings(mem_oom_kill=0), woken=False)
            tree.remove(QOS, POD)  # the kernel writes to the eventfds of what is removed
            snapshot = until(sampler, lambda newest: not newest.groups, woken=False)
            assert snapshot.core.unwatched == 0
            assert all(source.state is not SourceState.FAILING for source in snapshot.sources)
        assert snapshot.core.descriptors == held + 2, "the epoll in which the eventfds were, and its timer"
    eventually(lambda: descriptors() <= before, "no descriptor is left; other threads open some for a while")


def test_container_frozen_by_v1_is_noticed_by_the_sweep() -> None:
    with kubepods_tree("freezer", unified=False) as tree, watch_tree(tree, NS // 5) as sampler:
        group = tree.make(QOS, POD, CONTAINER)
        until(sampler, has_readings(frozen=0), woken=False)
        (group / "freezer.state").write_text("FROZEN\n")
        until(sampler, has_readings(frozen=1))
        (group / "freezer.state").write_text("THAWED\n")
        until(sampler, has_readings(frozen=0))


def test_cpus_of_container_are_read_once_settled() -> None:
    with kubepods_tree("cpuset", unified=False) as tree, watch_tree(tree) as sampler:
        top = tree.roots[0]

        def pin_to_cpus(group: Path) -> None:
            for level in [*reversed(group.relative_to(top).parents), group.relative_to(top)][1:]:
                (top / level / "cpuset.cpus").write_text("0\n")

        make_promptly(tree, CONTAINER, pin_to_cpus)
        until(sampler, has_readings(cpus=0b1), woken=False)


def slow_down(tree: Kubepods) -> Path:
    """Create a container limited to a tenth of a CPU, which is throttled even on a busy machine."""
    group = tree.make(QOS, POD, CONTAINER)
    (group / "cpu.cfs_period_us").write_text(f"{PERIOD_US}\n")
    (group / "cpu.cfs_quota_us").write_text(f"{PERIOD_US // 10}\n")
    return group


# --- the whole agent ----------------------------------------------------------------------------------------

FAST: Final = ("--period", "100ms", "--node-name", "real")
SWEEPS: Final = '[stream]\nheartbeat = "500ms"\n[cgroups]\nsweep = "200ms"\n'
SWEEPS_NEVER: Final = '[stream]\nheartbeat = "500ms"\n[cgroups]\nsweep = "1h"\nresync = "1h"\n'


def wait_for_note(onlooker: Watcher, code: str) -> Any:
    """Return the next note of this code."""

    def with_code(picture: Any) -> list[Any]:
        return [note for note in picture.notes if note.cause.code == code]

    return with_code(wait_for_message(onlooker, lambda picture: bool(with_code(picture)), code))[0]


def test_container_throttled_by_kernel_is_a_note(short_tmp: Path) -> None:
    with kubepods_tree("cpu", unified=False) as tree:
        flags = [*FAST, "--kubelet-cgroup-root", tree.cgroup_root]
        with Agent(short_tmp, *flags, config=SWEEPS) as agent, agent.watch_reports() as onlooker:
            with cpu_load(slow_down(tree)):
                note = wait_for_note(onlooker, "cgroup.cpu.throttled")
            assert note.subject == f"pod {POD} container {CONTAINER}"
            assert note.cause.evidence == "throttled in more than 25 % of its CPU periods in 60 s"


def test_memory_kill_is_a_note_without_a_sweep(short_tmp: Path) -> None:
    with kubepods_tree("memory", unified=False) as tree:
        flags = [*FAST, "--kubelet-cgroup-root", tree.cgroup_root]
        with Agent(short_tmp, *flags, config=SWEEPS_NEVER) as agent, agent.watch_reports() as onlooker:
            group = tree.make(QOS, POD, CONTAINER)
            (group / "memory.limit_in_bytes").write_text(f"{LIMIT}\n")
            passes = wait_for_message(
                onlooker, lambda picture: picture.groups == 2, "a pod and its container"
            ).core.passes
            wait_for_message(
                onlooker, lambda picture: picture.core.passes >= passes + SETTLED, "they have settled"
            )
            oom_kill(group)
            note = wait_for_note(onlooker, "cgroup.memory.oom_kill")
            assert note.subject == f"pod {POD} container {CONTAINER}"
            assert note.cause.evidence == "processes were killed: out of memory (limit 16 MiB)"
            tree.remove(QOS, POD)
            gone = wait_for_message(onlooker, lambda picture: picture.groups == 0, "no group any more")
            assert note.cause.code in [
                newest.cause.code for newest in gone.notes if newest.subject == note.subject
            ]


# --- descriptors that stay open between two reads ---------------------------------------------------------


@contextmanager
def swept(tree: Kubepods, **options: Any) -> Iterator[Sampler]:
    """Sampler that only passes and sweeps of the test read."""
    sampler = Sampler(
        SamplerOptions(kubelet_cgroup_root=tree.cgroup_root, sweep_ns=HOUR_NS, resync_ns=HOUR_NS, **options)
    )
    try:
        sampler.run_pass()
        sampler.run_sweep()
        yield sampler
    finally:
        assert sampler.stop(PATIENCE_S)


def sweep_once(sampler: Sampler) -> tuple[Snapshot, int]:
    """Sweep all groups; return the snapshot and the number of opened files and directories."""
    before = sampler.read()
    sampler.run_sweep()
    after = sampler.read()
    assert before is not None
    assert after is not None
    return after, after.core.opens - before.core.opens


def test_held_descriptor_reads_the_kernels_current_value() -> None:
    with kubepods_tree("memory", "freezer", unified=False) as tree:
        memory = tree.make(QOS, POD, CONTAINER)
        freezer = tree.roots[1] / tree.directory(QOS, POD, CONTAINER)
        (memory / "memory.limit_in_bytes").write_text(f"{LIMIT}\n")
        with swept(tree) as sampler:
            for kills, state in enumerate(("FROZEN", "THAWED", "FROZEN"), start=1):
                oom_kill(memory)
                (freezer / "freezer.state").write_text(f"{state}\n")
                snapshot, opens = sweep_once(sampler)
                assert has_readings(mem_oom_kill=kills, frozen=int(state == "FROZEN"))(snapshot)
                assert opens == 0
            (freezer / "freezer.state").write_text("THAWED\n")


def test_group_recreated_under_its_name_is_opened_again() -> None:
    with kubepods_tree("memory", "freezer", unified=False) as tree:
        tree.make(QOS, POD, CONTAINER)
        with swept(tree) as sampler:  # no thread reads the events of the two directories
            assert sweep_once(sampler)[1] == 0
            tree.remove(QOS, POD, CONTAINER)
            memory = tree.make(QOS, POD, CONTAINER)
            (memory / "memory.limit_in_bytes").write_text(f"{LIMIT}\n")
            oom_kill(memory)
            snapshot, opens = sweep_once(sampler)
            assert opens > 0
            assert has_readings(mem_oom_kill=1, frozen=0)(snapshot)
            assert snapshot.sources[-1].failures == 0
            assert sweep_once(sampler)[1] == 0


def test_held_descriptors_of_removed_groups_are_closed() -> None:
    with kubepods_tree("memory", unified=False) as tree, watch_tree(tree, NS // 5) as sampler:
        empty = until(sampler, lambda _: True).core.descriptors
        tree.make(QOS, POD, CONTAINER)
        eventfds = 3  # of the pod, and their epoll with its timer
        until(sampler, lambda newest: newest.core.descriptors == empty + eventfds + 4, woken=False)
        tree.remove(QOS, POD)
        until(sampler, lambda newest: newest.core.descriptors == empty + eventfds - 1, woken=False)


def test_kernel_notifies_about_a_file_whose_descriptor_is_held() -> None:
    with kubepods_tree() as tree, watch_tree(tree) as sampler:
        group = tree.make(QOS, POD, CONTAINER)
        before = until(sampler, has_readings(populated=0), woken=False).core.descriptors
        with subprocess.Popen(["sleep", "600"]) as member:
            for populated, procs in ((1, group), (0, tree.roots[0])) * 4:
                (procs / "cgroup.procs").write_text(f"{member.pid}\n")
                snapshot = until(sampler, has_readings(populated=populated), woken=False)
            member.kill()
        assert snapshot.core.descriptors > before


GROUPS: Final = 100


def check_kernel_memory(own_group: str, cgroup_root: str) -> None:
    """Compare, in a process of its own, the kernel's account of its cgroup with the agent's estimate."""
    account = Path(own_group, "memory.kmem.usage_in_bytes")
    Path(own_group, "cgroup.procs").write_text("0\n")
    sampler = Sampler(SamplerOptions(kubelet_cgroup_root=cgroup_root, sweep_ns=HOUR_NS, resync_ns=HOUR_NS))
    sampler.run_pass()
    sampler.run_lower_bound(sweep=True, opens=True)
    before, charged = sampler.read(), int(account.read_text())
    sampler.run_sweep()
    after = sampler.read()
    charged = int(account.read_text()) - charged
    assert before is not None
    assert after is not None
    held = after.core.descriptors - before.core.descriptors
    assert held == 2 * GROUPS, held
    estimate = after.core.kernel_bytes - before.core.kernel_bytes
    assert 0.85 < estimate / charged < 1.15, (estimate, charged)


def test_estimated_memory_of_held_descriptors_equals_the_kernels_charge() -> None:
    with kubepods_tree("memory", unified=False) as tree:
        for number in range(GROUPS - 1):
            tree.make(QOS, POD, f"{number:064}")
        own = tree.roots[0] / tree.cgroup_root.strip("/") / "own"
        own.mkdir()
        if not (own / "memory.kmem.usage_in_bytes").exists():
            pytest.skip("the kernel does not account its memory by cgroup")
        run_in_own_process(check_kernel_memory, own, tree.cgroup_root)
