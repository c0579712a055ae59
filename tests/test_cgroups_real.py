"""Pods in real cgroups of version 1 that the kernel throttles, kills, freezes and pins to CPUs.

In tests of kernel notifications the next sweep is an hour away.
"""

import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from agents import Agent, short_tmp, wait_for_message
from machine import Kubepods, cpu_load, kubepods_tree, machine_lock, oom_kill
from patience import PATIENCE_S
from wire.google import Watcher
from wire.serving import descriptors

from agent.health.host.catalog import sampler_wakes
from agent.model.snapshot import CgroupSample, Snapshot
from agent.model.source_state import SourceState
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
__all__ = ["short_tmp"]
pytestmark = pytest.mark.usefixtures("locked")


@pytest.fixture
def locked() -> Iterator[None]:
    with machine_lock():
        yield


@contextmanager
def watched(tree: Kubepods, sweep_ns: int = HOUR_NS) -> Iterator[Sampler]:
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


def until(sampler: Sampler, claim: Callable[[Snapshot], bool], *, woken: bool = True) -> Snapshot:
    """Return the first snapshot for which the condition holds, after a wake or by polling."""
    poll = select.poll()
    poll.register(sampler.fileno(), select.POLLIN)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if poll.poll(1000 if woken else 5) or not woken:
            sampler.clear()
            snapshot = sampler.read()
            if snapshot is not None and claim(snapshot):
                return snapshot
    raise AssertionError("the condition never held")


def group_of(snapshot: Snapshot, container: str = CONTAINER) -> CgroupSample | None:
    return next((group for group in snapshot.groups if group.container == container), None)


def says(container: str = CONTAINER, **members: Any) -> Callable[[Snapshot], bool]:
    """Return a condition: the group exists and has these readings."""

    def claim(snapshot: Snapshot) -> bool:
        group = group_of(snapshot, container)
        return group is not None and all(getattr(group, name) == value for name, value in members.items())

    return claim


def limited(tree: Kubepods, sampler: Sampler, container: str = CONTAINER) -> Path:
    """Create a container with a memory limit, or a pod, that is not read again before the sweep."""
    group = tree.make(QOS, POD, container)
    (group / "memory.limit_in_bytes").write_text(f"{LIMIT}\n")
    passes = until(sampler, says(container, mem_limit=LIMIT), woken=False).core.passes
    until(sampler, lambda one: one.core.passes >= passes + SETTLED, woken=False)
    return group


def test_kill_is_noticed_long_before_the_sweep() -> None:
    with kubepods_tree("memory", unified=False) as tree, watched(tree) as sampler:
        group = limited(tree, sampler)
        assert until(sampler, says(), woken=False).core.unwatched == 0
        (group / "memory.limit_in_bytes").write_text(f"{2 * LIMIT}\n")
        oom_kill(group)
        found = group_of(until(sampler, says(mem_oom_kill=1)))
        assert found is not None
        assert found.mem_limit == 2 * LIMIT, "it is read with the kill, and else in an hour"


def test_pod_memory_limit_kills_are_counted_in_the_container() -> None:
    with kubepods_tree("memory", unified=False) as tree, watched(tree) as sampler:
        limited(tree, sampler, "")
        oom_kill(tree.make(QOS, POD, CONTAINER))
        until(sampler, says(mem_oom_kill=1), woken=False)


def test_every_kill_of_many_is_counted() -> None:
    with kubepods_tree("memory", unified=False) as tree, watched(tree) as sampler:
        group = limited(tree, sampler)
        for _ in range(5):
            oom_kill(group)
        until(sampler, says(mem_oom_kill=5), woken=False)


def test_kill_wakes_the_core() -> None:
    with kubepods_tree("memory", unified=False) as tree, watched(tree) as sampler:
        oom_kill(limited(tree, sampler))
        until(sampler, says(mem_oom_kill=1))


def test_removed_group_removes_its_descendants_without_failure() -> None:
    before = descriptors()
    with kubepods_tree("memory", unified=False) as tree, watched(tree) as sampler:
        held = until(sampler, lambda _: True).core.descriptors
        for _ in range(3):
            tree.make(QOS, POD, CONTAINER)
            until(sampler, says(mem_oom_kill=0), woken=False)
            tree.remove(QOS, POD)  # the kernel writes to the eventfds of what is removed
            snapshot = until(sampler, lambda one: not one.groups, woken=False)
            assert snapshot.core.unwatched == 0
            assert all(source.state is not SourceState.FAILING for source in snapshot.sources)
        assert snapshot.core.descriptors == held + 2, "the epoll in which the eventfds were, and its timer"
    assert descriptors() <= before


def test_container_frozen_by_v1_is_noticed_by_the_sweep() -> None:
    with kubepods_tree("freezer", unified=False) as tree, watched(tree, NS // 5) as sampler:
        group = tree.make(QOS, POD, CONTAINER)
        until(sampler, says(frozen=0), woken=False)
        (group / "freezer.state").write_text("FROZEN\n")
        until(sampler, says(frozen=1))
        (group / "freezer.state").write_text("THAWED\n")
        until(sampler, says(frozen=0))


def test_cpus_of_container_are_read_once_settled() -> None:
    with kubepods_tree("cpuset", unified=False) as tree, watched(tree) as sampler:
        group = tree.make(QOS, POD, CONTAINER)
        top = tree.roots[0]
        for level in [*reversed(group.relative_to(top).parents), group.relative_to(top)][1:]:
            (top / level / "cpuset.cpus").write_text("0\n")
        until(sampler, says(cpus=0b1), woken=False)


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


def noted(onlooker: Watcher, code: str) -> Any:
    """Return the next note of this code."""

    def with_code(picture: Any) -> list[Any]:
        return [note for note in picture.notes if note.cause.code == code]

    return with_code(wait_for_message(onlooker, lambda picture: bool(with_code(picture)), code))[0]


def test_container_throttled_by_kernel_is_a_note(short_tmp: Path) -> None:
    with kubepods_tree("cpu", unified=False) as tree:
        flags = [*FAST, "--kubelet-cgroup-root", tree.cgroup_root]
        with Agent(short_tmp, *flags, config=SWEEPS) as agent, agent.watch_reports() as onlooker:
            with cpu_load(slow_down(tree)):
                note = noted(onlooker, "cgroup.cpu.throttled")
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
            note = noted(onlooker, "cgroup.memory.oom_kill")
            assert note.subject == f"pod {POD} container {CONTAINER}"
            assert note.cause.evidence == "processes were killed: out of memory (limit 16 MiB)"
            tree.remove(QOS, POD)
            gone = wait_for_message(onlooker, lambda picture: picture.groups == 0, "no group any more")
            assert note.cause.code in [one.cause.code for one in gone.notes if one.subject == note.subject]
