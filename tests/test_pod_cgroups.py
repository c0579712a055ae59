"""Pods found in a snapshot's cgroups. An absent pod is known to be gone only if the answer is complete."""

from dataclasses import replace

import pytest
from paper import ABSENT, cpus_sample, group_sample

from agent.model.claim_sources import ContainerCgroup, Origin, PodCgroup, Provenance
from agent.model.reading import Absence, SourceSample, SourceState
from agent.model.snapshot import CgroupSample, NativeCoreStats, Snapshot
from agent.model.time import Instant
from agent.sources.pod_cgroups import SOURCE, live_pods_in_snapshot

NOW = Instant(5_000_000_000, 1_700_000_000.0)


def snapshot_of(*groups: CgroupSample, state: SourceState = SourceState.OK, dropped: int = 0) -> Snapshot:
    source = SourceSample(SOURCE, state, 1, 1, 0, "in words")
    return Snapshot(
        1, cpus_sample(), groups=groups, sources=(source,), core=NativeCoreStats(groups_dropped=dropped)
    )


def test_pod_lists_its_containers_with_running_state() -> None:
    answer = live_pods_in_snapshot(
        snapshot_of(
            group_sample(1, pod="p-2", container=""),
            group_sample(2, pod="p-1", container="b")._replace(populated=0),
            group_sample(3, pod="p-1", container="a"),
            group_sample(4, pod="p-1", container="")._replace(populated=1),
        ),
        NOW,
    )
    assert answer.provenance == Provenance(Origin.CGROUPS, NOW)
    assert answer.is_complete
    assert answer.items == (
        PodCgroup("p-1", True, (ContainerCgroup("a", True), ContainerCgroup("b", False))),
        PodCgroup("p-2", True),
    )


def test_unreadable_cgroup_has_unknown_state() -> None:
    answer = live_pods_in_snapshot(snapshot_of(group_sample(1, container="")._replace(populated=ABSENT)), NOW)
    assert answer.items == (PodCgroup("pod-a", None),)


def test_container_without_pod_cgroup_still_has_a_pod() -> None:
    answer = live_pods_in_snapshot(snapshot_of(group_sample(1, container="a")), NOW)
    assert answer.items == (PodCgroup("pod-a", None, (ContainerCgroup("a", True),)),)


@pytest.mark.parametrize(
    ("state", "absence"),
    [
        (SourceState.ABSENT, Absence.ABSENT),
        (SourceState.STARTING, Absence.UNREADABLE),
        (SourceState.STALLED, Absence.UNREADABLE),
    ],
)
def test_starting_source_is_unreadable(state: SourceState, absence: Absence) -> None:
    answer = live_pods_in_snapshot(snapshot_of(group_sample(1), state=state), NOW)
    assert (answer.absence, answer.items) == (absence, ())
    assert answer.reason


def test_snapshot_without_the_source_is_absent() -> None:
    answer = live_pods_in_snapshot(replace(snapshot_of(), sources=()), NOW)
    assert (answer.absence, answer.reason) == (Absence.ABSENT, "cgroups are not watched")


def test_dropped_cgroups_mark_answer_incomplete() -> None:
    answer = live_pods_in_snapshot(snapshot_of(group_sample(1), state=SourceState.FAILING, dropped=7), NOW)
    assert not answer.is_complete
    assert answer.invalid == (
        "some cgroups cannot be read: in words",
        "7 cgroups exceed the limit cgroups.max-groups",
    )
