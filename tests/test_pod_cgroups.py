"""Who has a cgroup is there; who has none is not there only if all cgroups are known."""

from dataclasses import replace

import pytest
from paper import ABSENT, cpus_sample, group_sample

from agent.model.claim_sources import LiveContainer, LivePod, Origin, Provenance
from agent.model.reading import Absence
from agent.model.snapshot import CoreStats, GroupSample, Snapshot
from agent.model.source import SourceSample, SourceState
from agent.model.time import Instant
from agent.sources.pod_cgroups import SOURCE, live_pods

NOW = Instant(5_000_000_000, 1_700_000_000.0)


def seen(*groups: GroupSample, state: SourceState = SourceState.OK, dropped: int = 0) -> Snapshot:
    source = SourceSample(SOURCE, state, 1, 1, 0, "in words")
    return Snapshot(
        1, cpus_sample(), groups=groups, sources=(source,), core=CoreStats(groups_dropped=dropped)
    )


def test_a_pod_has_its_containers_and_each_says_whether_it_runs() -> None:
    told = live_pods(
        seen(
            group_sample(1, pod="p-2", container=""),
            group_sample(2, pod="p-1", container="b")._replace(populated=0),
            group_sample(3, pod="p-1", container="a"),
            group_sample(4, pod="p-1", container="")._replace(populated=1),
        ),
        NOW,
    )
    assert told.witness == Provenance(Origin.CGROUPS, NOW)
    assert told.is_whole
    assert told.items == (
        LivePod("p-1", True, (LiveContainer("a", True), LiveContainer("b", False))),
        LivePod("p-2", True),
    )


def test_what_cannot_be_read_is_neither_running_nor_gone() -> None:
    told = live_pods(seen(group_sample(1, container="")._replace(populated=ABSENT)), NOW)
    assert told.items == (LivePod("pod-a", None),)


def test_a_container_whose_pod_was_not_seen_still_has_one() -> None:
    told = live_pods(seen(group_sample(1, container="a")), NOW)
    assert told.items == (LivePod("pod-a", None, (LiveContainer("a", True),)),)


@pytest.mark.parametrize(
    ("state", "absence"),
    [
        (SourceState.ABSENT, Absence.ABSENT),
        (SourceState.STARTING, Absence.UNREADABLE),
        (SourceState.STALLED, Absence.UNREADABLE),
    ],
)
def test_a_source_that_has_not_looked_says_nothing(state: SourceState, absence: Absence) -> None:
    told = live_pods(seen(group_sample(1), state=state), NOW)
    assert (told.absence, told.items) == (absence, ())
    assert told.why


def test_a_snapshot_without_the_source_says_so() -> None:
    told = live_pods(replace(seen(), sources=()), NOW)
    assert (told.absence, told.why) == (Absence.ABSENT, "nobody reads cgroups")


def test_those_that_were_not_seen_are_counted_so_that_nobody_is_taken_for_gone() -> None:
    told = live_pods(seen(group_sample(1), state=SourceState.FAILING, dropped=7), NOW)
    assert not told.is_whole
    assert told.wrong == ("some cgroups cannot be read: in words", "7 cgroups find no room in the table")
