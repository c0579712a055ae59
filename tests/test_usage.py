"""Device usages that begin, change and end between two consumer maps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from claim_samples import (
    NAMESPACE,
    at,
    device,
    known_pod,
    listed_claim,
    listed_pod,
    listed_prepared,
    source_answers,
    use,
)
from claim_samples import known_claim as claim_object
from hypothesis import given
from hypothesis import strategies as st
from usage_samples import (
    GOOD,
    LOST,
    NO_CHECKPOINT,
    NO_SOURCES,
    SLOW,
    TRAIN,
    UNREADABLE,
    UsageObserver,
    checkpoint_map,
    device_usage,
)

from agent.bench.idle_counts import count_opcodes
from agent.devices.consumers.consumer_map import build_consumer_map
from agent.devices.consumers.consumer_queries import host_device, state_lookup
from agent.devices.consumers.usage import UsageState, resume_usages, update_usages
from agent.model.claim import DeviceRef
from agent.model.claim_sources import Origin, OwnerReference, PodRef
from agent.model.consumers import ConsumerMap
from agent.model.device_usage import STATE_NOT_KNOWN, DeviceState, StoredUsages, UsageEnd, UsageEndKind
from agent.model.health import Blame, Cause, DeviceHealth, Health, Severity
from agent.model.report import Report
from agent.model.settings import TRACKED_USAGES_MAX

NO_CLAIMS = checkpoint_map()


def shared_claim_map(*pods: str) -> ConsumerMap:
    return checkpoint_map(listed_prepared("c-1", use("gpu-0", "gpus"), pods=pods, name="gpus"))


# --- begin of a use ----------------------------------------------------------------------------------------


def test_prepared_device_is_a_use_with_all_known_fields() -> None:
    owner = OwnerReference("batch/v1", "Job", "train", "j-1", controller=True)
    observer = UsageObserver()
    observer.observe(NO_CLAIMS)
    pod = known_pod("p-1", "gpus", name="train-0", owners=(owner,))
    found = observer.observe_one(checkpoint_map(TRAIN, pods=[pod]), SLOW)
    assert found == replace(
        found,
        pod=PodRef(NAMESPACE, "train-0", "p-1"),
        claim=TRAIN.ref,
        device=device("gpu-0"),
        began=at(11),
        before=False,
        state=SLOW,
        worst=SLOW,
        sources=(Origin.CHECKPOINT,),
        requests=("gpus",),
        containers=("main",),
        owner="Job train",
        ended=None,
    )


def test_reservation_alone_is_no_use() -> None:
    claims = [claim_object("c-1", use("gpu-0"), name="gpus")]
    pods = [known_pod("p-1", "gpus")]
    assert (
        UsageObserver().observe(build_consumer_map(source_answers(claims_file=claims, pods_api=pods))) == ()
    )


def test_claim_that_waits_for_its_driver_is_no_use() -> None:
    assert (
        UsageObserver().observe(
            checkpoint_map(listed_prepared("c-1", pods=["p-1"], waiting=("gpu.example.com",)))
        )
        == ()
    )


def test_device_shared_by_two_pods_is_two_uses() -> None:
    assert {usage.pod.uid for usage in UsageObserver().observe(shared_claim_map("p-1", "p-2"))} == {
        "p-1",
        "p-2",
    }


def test_use_in_the_first_observation_began_before() -> None:
    observer = UsageObserver()
    assert observer.observe_one(shared_claim_map("p-1")).before
    (second,) = observer.observe(shared_claim_map("p-1", "p-2"))
    assert not second.before


def test_new_use_after_an_unreadable_source_began_before() -> None:
    observer = UsageObserver()
    observer.observe(NO_CLAIMS)
    observer.observe(UNREADABLE)
    assert observer.observe_one(checkpoint_map(TRAIN)).before


def test_new_use_of_a_source_read_first_time_began_before() -> None:
    web = listed_pod("web-0", listed_claim("more", use("gpu-1")))
    train = listed_pod("train-0", listed_claim("gpus", use("gpu-0")))
    observer = UsageObserver()
    observer.observe(build_consumer_map(source_answers(podresources=[web])))
    assert observer.observe(checkpoint_map(TRAIN))[-1].before
    observer = UsageObserver()
    observer.observe(build_consumer_map(source_answers(podresources=[web])))
    assert not observer.observe_one(build_consumer_map(source_answers(podresources=[web, train]))).before


def test_unchanged_map_changes_no_use() -> None:
    observer = UsageObserver()
    observer.observe(checkpoint_map(TRAIN))
    before = observer.uses.running
    assert observer.observe(checkpoint_map(TRAIN)) == ()
    assert [entry.use for entry in observer.uses.running.values()] == [entry.use for entry in before.values()]


def test_uses_above_the_limit_are_dropped_and_counted() -> None:
    uses = [use(f"gpu-{number}") for number in range(TRACKED_USAGES_MAX + 2)]
    observer = UsageObserver()
    assert (
        len(observer.observe(checkpoint_map(listed_prepared("c-1", *uses, pods=["p-1"]))))
        == TRACKED_USAGES_MAX
    )
    assert observer.uses.dropped == 2
    observer.observe(checkpoint_map(TRAIN))
    assert observer.uses.dropped == 0


def test_cost_of_a_claim_grows_with_the_number_of_its_devices() -> None:
    def opcodes(devices: int) -> int:
        known = checkpoint_map(
            listed_prepared("c-1", *(use(f"gpu-{n}") for n in range(devices)), pods=["p-1"])
        )
        return count_opcodes(lambda: UsageObserver().observe(known))

    assert opcodes(400) < 2.5 * opcodes(200)


# --- state of the device -----------------------------------------------------------------------------------


def test_use_keeps_the_worst_and_the_last_state() -> None:
    observer = UsageObserver()
    observer.observe(checkpoint_map(TRAIN), GOOD)
    assert observer.observe_one(checkpoint_map(TRAIN), LOST).worst == LOST
    better = observer.observe_one(checkpoint_map(TRAIN), SLOW)
    assert (better.state, better.worst) == (SLOW, LOST)


def test_first_of_two_equally_bad_states_is_the_worst() -> None:
    observer = UsageObserver()
    other = LOST._replace(code="gpu.lost")
    observer.observe(checkpoint_map(TRAIN), LOST)
    changed = observer.observe_one(checkpoint_map(TRAIN), other)
    assert (changed.state, changed.worst) == (other, LOST)


def test_fault_found_at_the_end_is_the_last_state() -> None:
    observer = UsageObserver()
    observer.observe(checkpoint_map(TRAIN), GOOD)
    ended = observer.observe_one(NO_CLAIMS, LOST)
    assert (ended.state, ended.worst) == (LOST, LOST)


def report(*devices: DeviceHealth, declaring: Sequence[str] = ()) -> Report:
    return Report("node-1", at(1), devices, declaring=tuple(declaring))


def device_health(name: str, driver: str = "", *causes: Cause, message: str = "") -> DeviceHealth:
    severity = max((cause.severity for cause in causes), default=Severity.OK)
    health = Health.UNHEALTHY if severity is Severity.UNHEALTHY else Health.HEALTHY
    return DeviceHealth(
        "node-1", name, "gpu", health, severity, message, at(5), at(6), 30, causes, driver=driver
    )


def test_device_not_in_the_report_is_unknown() -> None:
    assert state_lookup(report(device_health("gpu-1")), ())(device("gpu-0")) == STATE_NOT_KNOWN
    assert STATE_NOT_KNOWN.health is Health.UNKNOWN


def test_state_is_the_first_cause() -> None:
    causes = [
        Cause(code, Severity.UNHEALTHY, Blame.HARDWARE, f"{code} it is", "", at(2)) for code in ("a.b", "c.d")
    ]
    found = state_lookup(report(device_health("gpu-0", "gpu.example.com", *causes)), ())(device("gpu-0"))
    assert found == DeviceState(Health.UNHEALTHY, Severity.UNHEALTHY, "a.b", "a.b it is", at(2).wall_s)


def test_linked_driver_without_declaration_means_host_devices() -> None:
    current_report = report(device_health("gpu-0", message="as the host's"))
    assert state_lookup(current_report, ["gpu.example.com"])(device("gpu-0")).evidence == "as the host's"


@pytest.mark.parametrize(
    ("declaring", "served"),
    [([], []), (["gpu.example.com"], ["gpu.example.com"]), ([], ["net.example.com"])],
)
def test_device_of_any_other_driver_is_not_the_host_device(declaring: list[str], served: list[str]) -> None:
    current_report = report(device_health("gpu-0"), declaring=declaring)
    assert state_lookup(current_report, served)(device("gpu-0")) == STATE_NOT_KNOWN


def test_host_device_has_no_other_host_device() -> None:
    own = DeviceRef("", "node-1", "gpu-0")
    assert host_device(own, known={own}, declaring=(), served=("",)) is None


# --- the end -----------------------------------------------------------------------------------------------


def test_use_missing_from_a_complete_checkpoint_was_released() -> None:
    observer = UsageObserver()
    observer.observe(NO_CLAIMS)
    observer.observe(checkpoint_map(TRAIN))
    observer.observe(checkpoint_map(TRAIN))
    assert observer.observe_one(NO_CLAIMS).ended == UsageEnd(
        UsageEndKind.RELEASED, at(12).wall_s, at(13).wall_s, 2.0
    )
    assert not observer.uses.running


@pytest.mark.parametrize("gap", [UNREADABLE, NO_CHECKPOINT, NO_SOURCES, checkpoint_map(truncated=True)])
def test_unreadable_or_incomplete_source_ends_no_use(gap: ConsumerMap) -> None:
    observer = UsageObserver()
    observer.observe(checkpoint_map(TRAIN))
    assert observer.observe(gap) == ()
    assert observer.observe(checkpoint_map(TRAIN)) == ()


@pytest.mark.parametrize(
    ("phase", "ending"),
    [("Succeeded", UsageEndKind.SUCCEEDED), ("Failed", UsageEndKind.FAILED), ("Running", None)],
)
def test_ended_pod_ends_its_use_while_its_claim_is_prepared(phase: str, ending: UsageEndKind | None) -> None:
    observer = UsageObserver()
    observer.observe(checkpoint_map(TRAIN))
    after_end = checkpoint_map(TRAIN, pods=[known_pod("p-1", "gpus", phase=phase)])
    (ended,) = observer.observe(after_end)
    assert (ended.ended and ended.ended.ending) == ending
    assert observer.observe(after_end) == ()


def test_ended_use_does_not_restart_if_the_phase_is_unknown() -> None:
    observer = UsageObserver()
    observer.observe(checkpoint_map(TRAIN, pods=[known_pod("p-1", "gpus", phase="Failed")]))
    assert len(observer.ended) == 1
    assert observer.observe(checkpoint_map(TRAIN)) == ()
    assert observer.observe(UNREADABLE) == ()
    assert observer.observe(checkpoint_map(TRAIN)) == ()
    observer.observe(NO_CLAIMS)
    assert observer.uses.ended == frozenset()


def test_pod_that_failed_between_two_observations_is_recorded() -> None:
    observer = UsageObserver()
    observer.observe(NO_CLAIMS)
    ended = observer.observe_one(checkpoint_map(TRAIN, pods=[known_pod("p-1", "gpus", phase="Failed")]), LOST)
    assert ended.ended
    assert ended.ended.ending is UsageEndKind.FAILED
    assert ended.state == LOST


def test_recreated_claim_ends_the_old_use_though_incomplete() -> None:
    observer = UsageObserver()
    observer.observe(checkpoint_map(TRAIN))
    recreated = listed_prepared("c-2", use("gpu-0", "gpus"), pods=["p-2"], name="gpus")
    old, new = observer.observe(checkpoint_map(recreated, truncated=True))
    assert old.ended
    assert (old.claim.uid, old.ended.ending) == ("c-1", UsageEndKind.REPLACED)
    assert (new.claim.uid, new.ended) == ("c-2", None)


def test_pod_with_same_name_and_another_uid_is_another_use() -> None:
    observer = UsageObserver()
    observer.observe(checkpoint_map(TRAIN, pods=[known_pod("p-1", "gpus", name="web-0")]))
    next_ = listed_prepared("c-1", use("gpu-0", "gpus"), pods=["p-2"], name="gpus")
    old, new = observer.observe(checkpoint_map(next_, pods=[known_pod("p-2", "gpus", name="web-0")]))
    assert old.ended
    assert (old.pod.name, new.pod.name) == ("web-0", "web-0")
    assert old.id != new.id


STORY = ((1, "Running"), (2, "Pending"))
"""UID and phase of a pod before and after it is created again."""


def test_pod_of_a_recreated_claim_never_uses_the_old_device() -> None:
    """Case: a pod is deleted by force and created again with its claim; the kubelet first unprepares the old
    claim, and meanwhile lists it in podresources for the new pod."""
    observer = UsageObserver()
    old_pod, new_pod = (
        known_pod(f"p-{phase_pair}", "gpus", name="web-0", phase=phase) for phase_pair, phase in STORY
    )
    listing = [listed_pod("web-0", listed_claim("gpus", use("gpu-0")))]
    observer.observe(checkpoint_map(TRAIN, pods=[old_pod], listed=listing))
    assert observer.observe(checkpoint_map(TRAIN, pods=[new_pod], listed=listing)) == ()
    unreadable = source_answers(pods_api=[new_pod], podresources=listing)
    assert observer.observe(build_consumer_map(unreadable)) == ()
    new_claim = listed_prepared("c-2", use("gpu-1", "gpus"), pods=["p-2"], name="gpus")
    new_listing = [listed_pod("web-0", listed_claim("gpus", use("gpu-1")))]
    changed = observer.observe(checkpoint_map(new_claim, pods=[new_pod], listed=new_listing))
    assert {
        (usage.pod.uid, usage.claim.uid, usage.device.device, bool(usage.ended)) for usage in changed
    } == {
        ("p-1", "c-1", "gpu-0", True),
        ("p-2", "c-2", "gpu-1", False),
    }
    assert {usage.pod.name for usage in changed} == {"web-0"}


def test_wall_clock_step_does_not_change_the_duration() -> None:
    observer = UsageObserver()
    observer.observe(checkpoint_map(TRAIN))
    observer.second += 100
    stepped = replace(observer.now, wall_s=5.0)
    (ended,) = update_usages(observer.uses, NO_CLAIMS, lambda _: GOOD, stepped).changed
    assert ended.ended
    assert ended.ended.lasted_s == 100.0


# --- names known later -------------------------------------------------------------------------------------


def test_pod_name_known_later_is_filled_in_and_kept() -> None:
    observer = UsageObserver()
    assert observer.observe_one(checkpoint_map(TRAIN)).pod == PodRef("", "", "p-1")
    named = observer.observe_one(checkpoint_map(TRAIN, pods=[known_pod("p-1", "gpus", name="train-0")]))
    assert named.pod == PodRef(NAMESPACE, "train-0", "p-1")
    assert observer.observe(checkpoint_map(TRAIN)) == ()
    assert observer.observe_one(NO_CLAIMS).pod == named.pod


def test_pod_name_not_tied_to_the_uid_is_a_possible_name() -> None:
    observer = UsageObserver()
    pods = [listed_pod("train-0", listed_claim("gpus", use("gpu-0")))]
    found = observer.observe_one(checkpoint_map(TRAIN, listed=pods))
    assert (found.pod, found.maybe) == (PodRef("", "", "p-1"), (f"{NAMESPACE}/train-0",))
    assert observer.observe(checkpoint_map(TRAIN)) == ()
    named = observer.observe_one(
        checkpoint_map(TRAIN, listed=pods, pods=[known_pod("p-1", "gpus", name="train-0")])
    )
    assert (named.pod.name, named.maybe) == ("train-0", ())


LISTED = build_consumer_map(
    source_answers(podresources=[listed_pod("train-0", listed_claim("gpus", use("gpu-0")))])
)
NAMED = checkpoint_map(TRAIN, pods=[known_pod("p-1", "gpus", name="train-0")])


def test_use_known_by_names_gets_its_uids_and_keeps_its_id() -> None:
    observer = UsageObserver()
    first = observer.observe_one(LISTED)
    assert (first.pod.uid, first.claim.uid, first.sources) == ("", "", (Origin.PODRESOURCES,))
    known_better = observer.observe_one(NAMED)
    assert known_better.id == first.id
    assert (known_better.pod.uid, known_better.claim.uid) == ("p-1", "c-1")
    assert known_better.sources == (Origin.CHECKPOINT,)
    assert len(observer.uses.running) == 1


def test_name_of_a_pod_known_by_uid_is_no_new_use() -> None:
    observer = UsageObserver()
    observer.observe(NAMED)
    assert observer.observe(LISTED) == ()
    assert len(observer.uses.running) == 1


def test_name_that_may_belong_to_a_known_uid_is_no_new_use() -> None:
    """Case: no pods API, and the checkpoint is unreadable for one observation."""
    observer = UsageObserver()
    observer.observe(checkpoint_map(TRAIN))
    assert observer.observe(LISTED) == ()
    assert len(observer.uses.running) == 1
    other = source_answers(podresources=[listed_pod("train-1", listed_claim("more", use("gpu-0")))])
    assert [usage.pod.name for usage in observer.observe(build_consumer_map(other))] == ["train-1"]


def test_merged_uses_keep_the_first_id_begin_and_worst_state() -> None:
    observer = UsageObserver()
    by_name = observer.observe_one(LISTED, LOST)
    pods = [listed_pod("train-0", listed_claim("gpus", use("gpu-0")))]
    by_uid = observer.observe(checkpoint_map(TRAIN, listed=pods))[-1]
    assert by_uid.id != by_name.id
    merged = observer.observe_one(
        checkpoint_map(TRAIN, listed=pods, pods=[known_pod("p-1", "gpus", name="train-0")])
    )
    assert observer.step.merged == (by_uid.id,)
    assert (merged.id, merged.began, merged.worst) == (by_name.id, by_name.began, LOST)
    assert observer.ended == []


# --- after an agent restart --------------------------------------------------------------------------------

STORED = device_usage(active=True, resumed=True, began=replace(at(0), mono_ns=0), worst=SLOW)
STORED_CLAIM = checkpoint_map(listed_prepared("c-1", use("gpu-1", "gpus"), pods=["p-1"], name="gpus"))


def resume_observer(*ended: Any, running: Any = (STORED,)) -> UsageObserver:
    kept = StoredUsages(running, ended, last_written_s=at(100).wall_s)
    return UsageObserver(resume_usages(UsageState("next"), kept), first=1000)


def test_stored_use_that_still_runs_continues_with_its_id() -> None:
    observer = resume_observer()
    continued = observer.observe_one(STORED_CLAIM, LOST)
    assert (continued.id, continued.began.wall_s, continued.worst) == (STORED.id, STORED.began.wall_s, LOST)
    ended = observer.observe_one(NO_CLAIMS).ended
    assert ended == UsageEnd(UsageEndKind.RELEASED, at(1000).wall_s, at(1001).wall_s, 1001.0)


def test_duration_over_a_reboot_is_that_of_the_wall_clock() -> None:
    observer = resume_observer()
    observer.observe(STORED_CLAIM)
    booted = replace(at(1001), mono_ns=5)
    (ended,) = update_usages(observer.uses, NO_CLAIMS, lambda _: GOOD, booted).changed
    assert ended.ended
    assert ended.ended.lasted_s == 1001.0


def test_stored_use_that_is_gone_ended_while_agent_was_away() -> None:
    ended = resume_observer().observe_one(NO_CLAIMS, LOST)
    assert ended.ended == UsageEnd(UsageEndKind.AWAY, at(100).wall_s, at(1000).wall_s, 100.0)
    assert (ended.state, ended.worst) == (GOOD, SLOW)


def test_stored_uses_end_only_after_the_checkpoint_was_read() -> None:
    observer = resume_observer()
    assert not [usage for usage in observer.observe(UNREADABLE, GOOD) if usage.ended]
    assert observer.observe_one(NO_CLAIMS).ended
    assert len(observer.ended) == 1


def test_stored_ended_use_does_not_begin_again() -> None:
    ended = device_usage(2)
    observer = resume_observer(ended, running=())
    assert (
        observer.observe(checkpoint_map(listed_prepared("c-2", use("gpu-2"), pods=["p-2"], name="gpus")))
        == ()
    )


def test_stored_uses_read_late_are_merged_with_observed_uses() -> None:
    observer = UsageObserver(UsageState("next"), first=1000)
    seen = observer.observe_one(STORED_CLAIM, LOST)
    uses = resume_usages(observer.uses, StoredUsages((STORED,), (), at(100).wall_s))
    (running,) = uses.running.values()
    assert (running.use.id, running.use.began, running.use.state) == (STORED.id, STORED.began, seen.state)
    assert running.use.worst == LOST
    assert running.seen == at(1000)


# --- random maps --------------------------------------------------------------------------------------------

PODS = st.sampled_from(["p-1", "p-2"])
CLAIMS = st.builds(
    lambda uid, name, devices, pods: listed_prepared(uid, *map(use, devices), name=name, pods=pods),
    st.sampled_from(["c-1", "c-2"]),
    st.sampled_from(["gpus", "nics"]),
    st.lists(st.sampled_from(["gpu-0", "gpu-1"]), unique=True),
    st.lists(PODS, unique=True),
)
POD_OBJECTS = st.builds(
    lambda uid, name, phase: known_pod(uid, "gpus", name=name, phase=phase),
    PODS,
    st.sampled_from(["web-0", "web-1"]),
    st.sampled_from(["Running", "Succeeded", "Failed"]),
)
LISTINGS = st.builds(
    lambda name, claim, gpu: listed_pod(name, listed_claim(claim, use(gpu))),
    st.sampled_from(["web-0", "web-1"]),
    st.sampled_from(["gpus", "nics"]),
    st.sampled_from(["gpu-0", "gpu-1"]),
)
MAPS = st.one_of(
    st.sampled_from([UNREADABLE, NO_CHECKPOINT, NO_SOURCES]),
    st.builds(
        lambda claims, pods, listings, truncated: checkpoint_map(
            *claims, pods=pods, listed=listings, truncated=truncated
        ),
        st.lists(CLAIMS, max_size=3),
        st.lists(POD_OBJECTS, max_size=2),
        st.lists(LISTINGS, max_size=2),
        st.booleans(),
    ),
)
STEPS = st.lists(st.tuples(MAPS, st.sampled_from([GOOD, SLOW, LOST])), max_size=8)


@given(STEPS)
def test_use_ends_at_most_once_and_does_not_change_after(
    story: list[tuple[ConsumerMap, DeviceState]],
) -> None:
    observer = UsageObserver()
    ended_ids: set[str] = set()
    merged: set[str] = set()
    for map_, state in story:
        changed = observer.observe(map_, state)
        assert not ended_ids & {usage.id for usage in changed}
        assert max(Counter(usage.id for usage in changed).values(), default=0) <= 1
        ended_ids |= {usage.id for usage in changed if usage.ended}
        merged |= set(observer.step.merged)
        assert not ended_ids & merged
        running = {entry.use.id for entry in observer.uses.running.values()}
        assert not running & (ended_ids | merged)
        assert all(entry.use.ended is None for entry in observer.uses.running.values())


@given(STEPS)
def test_running_uses_follow_from_the_changes_alone(story: list[tuple[ConsumerMap, DeviceState]]) -> None:
    observer = UsageObserver()
    kept: dict[str, Any] = {}
    for map_, state in story:
        kept |= {usage.id: usage for usage in observer.observe(map_, state)}
        for id_ in observer.step.merged:
            kept.pop(id_, None)
        running = {id_: usage for id_, usage in kept.items() if not usage.ended}
        assert running == {entry.use.id: entry.use for entry in observer.uses.running.values()}


@given(STEPS)
def test_worst_state_is_at_least_every_state_of_the_device(
    story: list[tuple[ConsumerMap, DeviceState]],
) -> None:
    observer = UsageObserver()
    worst: dict[str, Severity] = {}
    for map_, state in story:
        observer.observe(map_, state)
        for entry in observer.uses.running.values():
            worst_seen = max(state.severity, worst.get(entry.use.id, Severity.OK))
            assert entry.use.state == state
            assert entry.use.worst.severity >= worst_seen
            worst[entry.use.id] = entry.use.worst.severity


@given(STEPS, st.sampled_from([UNREADABLE, NO_CHECKPOINT, NO_SOURCES]))
def test_missing_source_ends_no_use(story: list[tuple[ConsumerMap, DeviceState]], gap: ConsumerMap) -> None:
    observer = UsageObserver()
    for map_, state in story:
        observer.observe(map_, state)
    before = observer.uses.running.keys()
    observer.observe(gap)
    assert observer.uses.running.keys() == before
