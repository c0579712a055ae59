"""Which uses of devices began, changed and ended, from one look to the next."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from claims_paper import NAMESPACE, at, device, heard, known_pod, listed, listed_claim, prepared, use
from claims_paper import known_claim as claim_object
from hypothesis import given
from hypothesis import strategies as st
from uses_paper import GONE, GOOD, LOST, NOT_ASKED, SLOW, TRAIN, UNREADABLE, Looks, a_use, known

from agent.devices.consumers.consumer_map import consumer_map
from agent.devices.consumers.driver_names import mirrored, states
from agent.devices.consumers.usage import Uses, follow, resume
from agent.model.claim import DeviceRef
from agent.model.claim_sources import Origin, Owner, PodRef
from agent.model.consumers import ConsumerMap
from agent.model.health import Blame, Cause, DeviceHealth, Health, Severity
from agent.model.report import Report
from agent.model.use_limits import RUNNING_MAX
from agent.model.uses import NOT_KNOWN, DeviceState, Ending, Kept, UsageEnd

NOBODY = known()


def for_pods(*pods: str) -> ConsumerMap:
    return known(prepared("c-1", use("gpu-0", "gpus"), pods=pods, name="gpus"))


# --- what is a use -----------------------------------------------------------------------------------------


def test_a_prepared_device_is_a_use_with_all_that_is_known_of_it() -> None:
    owner = Owner("batch/v1", "Job", "train", "j-1", controller=True)
    looks = Looks()
    looks.look(NOBODY)
    pod = known_pod("p-1", "gpus", name="train-0", owners=(owner,))
    found = looks.only(known(TRAIN, pods=[pod]), SLOW)
    assert found == replace(
        found,
        pod=PodRef(NAMESPACE, "train-0", "p-1"),
        claim=TRAIN.ref,
        device=device("gpu-0"),
        began=at(11),
        before=False,
        state=SLOW,
        worst=SLOW,
        told_by=(Origin.CHECKPOINT,),
        requests=("gpus",),
        containers=("main",),
        owner="Job train",
        ended=None,
    )


def test_a_reservation_is_no_use() -> None:
    claims = [claim_object("c-1", use("gpu-0"), name="gpus")]
    pods = [known_pod("p-1", "gpus")]
    assert Looks().look(consumer_map(heard(claims_file=claims, pods_api=pods))) == ()


def test_a_claim_that_waits_for_its_driver_is_none_yet() -> None:
    assert Looks().look(known(prepared("c-1", pods=["p-1"], waiting=("gpu.example.com",)))) == ()


def test_a_device_that_two_pods_share_is_two_uses() -> None:
    assert {one.pod.uid for one in Looks().look(for_pods("p-1", "p-2"))} == {"p-1", "p-2"}


def test_what_was_there_at_the_first_look_began_before() -> None:
    looks = Looks()
    assert looks.only(for_pods("p-1")).before
    (second,) = looks.look(for_pods("p-1", "p-2"))
    assert not second.before


def test_what_is_new_after_a_gap_may_have_begun_in_it() -> None:
    looks = Looks()
    looks.look(NOBODY)
    looks.look(UNREADABLE)
    assert looks.only(known(TRAIN)).before


def test_what_is_new_of_one_who_was_not_heard_may_have_begun_before_whoever_else_was_heard() -> None:
    web = listed("web-0", listed_claim("more", use("gpu-1")))
    train = listed("train-0", listed_claim("gpus", use("gpu-0")))
    looks = Looks()
    looks.look(consumer_map(heard(podresources=[web])))
    assert looks.look(known(TRAIN))[-1].before
    looks = Looks()
    looks.look(consumer_map(heard(podresources=[web])))
    assert not looks.only(consumer_map(heard(podresources=[web, train]))).before


def test_nothing_is_told_of_a_look_that_found_nothing_new() -> None:
    looks = Looks()
    looks.look(known(TRAIN))
    before = looks.uses.running
    assert looks.look(known(TRAIN)) == ()
    assert [one.use for one in looks.uses.running.values()] == [one.use for one in before.values()]


def test_more_uses_than_a_node_can_have_are_counted_and_left_out() -> None:
    uses = [use(f"gpu-{number}") for number in range(RUNNING_MAX + 2)]
    looks = Looks()
    assert len(looks.look(known(prepared("c-1", *uses, pods=["p-1"])))) == RUNNING_MAX
    assert looks.uses.left_out == 2
    looks.look(known(TRAIN))
    assert looks.uses.left_out == 0


# --- how the device is -------------------------------------------------------------------------------------


def test_the_worst_state_stays_and_the_last_is_the_last() -> None:
    looks = Looks()
    looks.look(known(TRAIN), GOOD)
    assert looks.only(known(TRAIN), LOST).worst == LOST
    better = looks.only(known(TRAIN), SLOW)
    assert (better.state, better.worst) == (SLOW, LOST)


def test_of_two_that_are_equally_bad_the_first_is_the_worst() -> None:
    looks = Looks()
    other = LOST._replace(code="gpu.lost")
    looks.look(known(TRAIN), LOST)
    changed = looks.only(known(TRAIN), other)
    assert (changed.state, changed.worst) == (other, LOST)


def test_a_fault_that_came_with_the_end_is_the_state_at_the_end() -> None:
    looks = Looks()
    looks.look(known(TRAIN), GOOD)
    ended = looks.only(NOBODY, LOST)
    assert (ended.state, ended.worst) == (LOST, LOST)


def report(*devices: DeviceHealth, declaring: Sequence[str] = ()) -> Report:
    return Report("node-1", at(1), devices, declaring=tuple(declaring))


def judged(name: str, driver: str = "", *causes: Cause, message: str = "") -> DeviceHealth:
    severity = max((one.severity for one in causes), default=Severity.OK)
    health = Health.UNHEALTHY if severity is Severity.UNHEALTHY else Health.HEALTHY
    return DeviceHealth(
        "node-1", name, "gpu", health, severity, message, at(5), at(6), 30, causes, driver=driver
    )


def test_a_device_that_no_report_has_is_unknown_and_never_healthy() -> None:
    assert states(report(judged("gpu-1")), ())(device("gpu-0")) == NOT_KNOWN
    assert NOT_KNOWN.health is Health.UNKNOWN


def test_the_leading_cause_is_the_state() -> None:
    causes = [
        Cause(code, Severity.UNHEALTHY, Blame.HARDWARE, f"{code} it is", "", at(2)) for code in ("a.b", "c.d")
    ]
    found = states(report(judged("gpu-0", "gpu.example.com", *causes)), ())(device("gpu-0"))
    assert found == DeviceState(Health.UNHEALTHY, Severity.UNHEALTHY, "a.b", "a.b it is", at(2).wall_s)


def test_a_driver_that_declared_nothing_means_the_hosts_own_devices() -> None:
    told = report(judged("gpu-0", message="as the host's"))
    assert states(told, ["gpu.example.com"])(device("gpu-0")).evidence == "as the host's"


@pytest.mark.parametrize(
    ("declaring", "served"),
    [([], []), (["gpu.example.com"], ["gpu.example.com"]), ([], ["net.example.com"])],
)
def test_any_other_driver_means_its_own(declaring: list[str], served: list[str]) -> None:
    told = report(judged("gpu-0"), declaring=declaring)
    assert states(told, served)(device("gpu-0")) == NOT_KNOWN


def test_the_hosts_own_are_nobodys_mirrors() -> None:
    own = DeviceRef("", "node-1", "gpu-0")
    assert mirrored(own, known={own}, declaring=(), served=("",)) is None


# --- the end -----------------------------------------------------------------------------------------------


def test_what_a_whole_checkpoint_no_longer_has_was_released() -> None:
    looks = Looks()
    looks.look(NOBODY)
    looks.look(known(TRAIN))
    looks.look(known(TRAIN))
    assert looks.only(NOBODY).ended == UsageEnd(Ending.RELEASED, at(12).wall_s, at(13).wall_s, 2.0)
    assert not looks.uses.running


@pytest.mark.parametrize("gap", [UNREADABLE, GONE, NOT_ASKED, known(torn=True)])
def test_where_somebody_could_not_be_heard_nothing_ends(gap: ConsumerMap) -> None:
    looks = Looks()
    looks.look(known(TRAIN))
    assert looks.look(gap) == ()
    assert looks.look(known(TRAIN)) == ()


@pytest.mark.parametrize(
    ("phase", "ending"), [("Succeeded", Ending.SUCCEEDED), ("Failed", Ending.FAILED), ("Running", None)]
)
def test_a_pod_that_has_ended_uses_nothing_though_its_claim_is_still_prepared(
    phase: str, ending: Ending | None
) -> None:
    looks = Looks()
    looks.look(known(TRAIN))
    over = known(TRAIN, pods=[known_pod("p-1", "gpus", phase=phase)])
    (ended,) = looks.look(over)
    assert (ended.ended and ended.ended.ending) == ending
    assert looks.look(over) == ()


def test_a_pod_that_has_ended_does_not_begin_again_when_nobody_tells_its_phase() -> None:
    looks = Looks()
    looks.look(known(TRAIN, pods=[known_pod("p-1", "gpus", phase="Failed")]))
    assert len(looks.ended) == 1
    assert looks.look(known(TRAIN)) == ()
    assert looks.look(UNREADABLE) == ()
    assert looks.look(known(TRAIN)) == ()
    looks.look(NOBODY)
    assert looks.uses.over == frozenset()


def test_a_pod_that_failed_between_two_looks_is_recorded_all_the_same() -> None:
    looks = Looks()
    looks.look(NOBODY)
    ended = looks.only(known(TRAIN, pods=[known_pod("p-1", "gpus", phase="Failed")]), LOST)
    assert ended.ended
    assert ended.ended.ending is Ending.FAILED
    assert ended.state == LOST


def test_a_claim_made_anew_ends_the_use_of_the_old_one_even_in_a_gap() -> None:
    looks = Looks()
    looks.look(known(TRAIN))
    anew = prepared("c-2", use("gpu-0", "gpus"), pods=["p-2"], name="gpus")
    old, new = looks.look(known(anew, torn=True))
    assert old.ended
    assert (old.claim.uid, old.ended.ending) == ("c-1", Ending.REPLACED)
    assert (new.claim.uid, new.ended) == ("c-2", None)


def test_a_pod_of_the_same_name_and_another_uid_is_another_use() -> None:
    looks = Looks()
    looks.look(known(TRAIN, pods=[known_pod("p-1", "gpus", name="web-0")]))
    next_ = prepared("c-1", use("gpu-0", "gpus"), pods=["p-2"], name="gpus")
    old, new = looks.look(known(next_, pods=[known_pod("p-2", "gpus", name="web-0")]))
    assert old.ended
    assert (old.pod.name, new.pod.name) == ("web-0", "web-0")
    assert old.id != new.id


def test_the_wall_clock_does_not_change_how_long_a_use_lasted() -> None:
    looks = Looks()
    looks.look(known(TRAIN))
    looks.second += 100
    stepped = replace(looks.now, wall_s=5.0)
    (ended,) = follow(looks.uses, NOBODY, lambda _: GOOD, stepped).changed
    assert ended.ended
    assert ended.ended.lasted_s == 100.0


# --- what is known late ------------------------------------------------------------------------------------


def test_a_name_that_comes_late_is_filled_in_and_stays() -> None:
    looks = Looks()
    assert looks.only(known(TRAIN)).pod == PodRef("", "", "p-1")
    named = looks.only(known(TRAIN, pods=[known_pod("p-1", "gpus", name="train-0")]))
    assert named.pod == PodRef(NAMESPACE, "train-0", "p-1")
    assert looks.look(known(TRAIN)) == ()
    assert looks.only(NOBODY).pod == named.pod


def test_a_name_that_nobody_ties_to_the_uid_is_one_that_it_may_have() -> None:
    looks = Looks()
    pods = [listed("train-0", listed_claim("gpus", use("gpu-0")))]
    found = looks.only(known(TRAIN, listed=pods))
    assert (found.pod, found.maybe) == (PodRef("", "", "p-1"), (f"{NAMESPACE}/train-0",))
    assert looks.look(known(TRAIN)) == ()
    named = looks.only(known(TRAIN, listed=pods, pods=[known_pod("p-1", "gpus", name="train-0")]))
    assert (named.pod.name, named.maybe) == ("train-0", ())


LISTED = consumer_map(heard(podresources=[listed("train-0", listed_claim("gpus", use("gpu-0")))]))
NAMED = known(TRAIN, pods=[known_pod("p-1", "gpus", name="train-0")])


def test_a_use_known_by_names_alone_gets_its_uids_and_is_the_same() -> None:
    looks = Looks()
    first = looks.only(LISTED)
    assert (first.pod.uid, first.claim.uid, first.told_by) == ("", "", (Origin.PODRESOURCES,))
    known_better = looks.only(NAMED)
    assert known_better.id == first.id
    assert (known_better.pod.uid, known_better.claim.uid) == ("p-1", "c-1")
    assert known_better.told_by == (Origin.CHECKPOINT,)
    assert len(looks.uses.running) == 1


def test_a_name_is_no_new_use_of_a_pod_that_is_known_by_its_uid() -> None:
    looks = Looks()
    looks.look(NAMED)
    assert looks.look(LISTED) == ()
    assert len(looks.uses.running) == 1


def test_a_name_is_no_new_use_while_nobody_tells_the_uid_that_it_may_belong_to() -> None:
    """Without the pods API, when the checkpoint cannot be read for a moment."""
    looks = Looks()
    looks.look(known(TRAIN))
    assert looks.look(LISTED) == ()
    assert len(looks.uses.running) == 1
    other = heard(podresources=[listed("train-1", listed_claim("more", use("gpu-0")))])
    assert [one.pod.name for one in looks.look(consumer_map(other))] == ["train-1"]


def test_two_that_turn_out_to_be_one_are_one_from_the_first_beginning() -> None:
    looks = Looks()
    by_name = looks.only(LISTED, LOST)
    pods = [listed("train-0", listed_claim("gpus", use("gpu-0")))]
    by_uid = looks.look(known(TRAIN, listed=pods))[-1]
    assert by_uid.id != by_name.id
    merged = looks.only(known(TRAIN, listed=pods, pods=[known_pod("p-1", "gpus", name="train-0")]))
    assert looks.step.merged == (by_uid.id,)
    assert (merged.id, merged.began, merged.worst) == (by_name.id, by_name.began, LOST)
    assert looks.ended == []


# --- after an agent that was away --------------------------------------------------------------------------

LEFT = a_use(goes_on=True, resumed=True, began=replace(at(0), mono_ns=0), worst=SLOW)
OF_LEFT = known(prepared("c-1", use("gpu-1", "gpus"), pods=["p-1"], name="gpus"))


def resumed(*over: Any, running: Any = (LEFT,)) -> Looks:
    kept = Kept(running, over, left_s=at(100).wall_s)
    return Looks(resume(Uses("next"), kept), first=1000)


def test_a_use_that_is_still_there_goes_on_as_the_same() -> None:
    looks = resumed()
    gone_on = looks.only(OF_LEFT, LOST)
    assert (gone_on.id, gone_on.began.wall_s, gone_on.worst) == (LEFT.id, LEFT.began.wall_s, LOST)
    ended = looks.only(NOBODY).ended
    assert ended == UsageEnd(Ending.RELEASED, at(1000).wall_s, at(1001).wall_s, 1001.0)


def test_after_a_reboot_a_use_that_went_on_has_lasted_as_long_as_the_wall_clock_says() -> None:
    looks = resumed()
    looks.look(OF_LEFT)
    booted = replace(at(1001), mono_ns=5)
    (ended,) = follow(looks.uses, NOBODY, lambda _: GOOD, booted).changed
    assert ended.ended
    assert ended.ended.lasted_s == 1001.0


def test_a_use_that_is_gone_ended_while_the_agent_was_away_in_the_last_known_state() -> None:
    ended = resumed().only(NOBODY, LOST)
    assert ended.ended == UsageEnd(Ending.AWAY, at(100).wall_s, at(1000).wall_s, 100.0)
    assert (ended.state, ended.worst) == (GOOD, SLOW)


def test_nothing_ended_while_the_agent_was_away_before_the_kubelet_was_heard() -> None:
    looks = resumed()
    assert not [one for one in looks.look(UNREADABLE, GOOD) if one.ended]
    assert looks.only(NOBODY).ended
    assert len(looks.ended) == 1


def test_what_had_ended_before_does_not_begin_again() -> None:
    ended = a_use(2)
    looks = resumed(ended, running=())
    assert looks.look(known(prepared("c-2", use("gpu-2"), pods=["p-2"], name="gpus"))) == ()


def test_a_file_that_is_read_late_goes_on_with_what_was_seen_meanwhile() -> None:
    looks = Looks(Uses("next"), first=1000)
    seen = looks.only(OF_LEFT, LOST)
    uses = resume(looks.uses, Kept((LEFT,), (), at(100).wall_s))
    (running,) = uses.running.values()
    assert (running.use.id, running.use.began, running.use.state) == (LEFT.id, LEFT.began, seen.state)
    assert running.use.worst == LOST
    assert running.seen == at(1000)


# --- whatever is told --------------------------------------------------------------------------------------

PODS = st.sampled_from(["p-1", "p-2"])
CLAIMS = st.builds(
    lambda uid, name, devices, pods: prepared(uid, *map(use, devices), name=name, pods=pods),
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
    lambda name, claim, gpu: listed(name, listed_claim(claim, use(gpu))),
    st.sampled_from(["web-0", "web-1"]),
    st.sampled_from(["gpus", "nics"]),
    st.sampled_from(["gpu-0", "gpu-1"]),
)
MAPS = st.one_of(
    st.sampled_from([UNREADABLE, GONE, NOT_ASKED]),
    st.builds(
        lambda claims, pods, listings, torn: known(*claims, pods=pods, listed=listings, torn=torn),
        st.lists(CLAIMS, max_size=3),
        st.lists(POD_OBJECTS, max_size=2),
        st.lists(LISTINGS, max_size=2),
        st.booleans(),
    ),
)
LOOKS = st.lists(st.tuples(MAPS, st.sampled_from([GOOD, SLOW, LOST])), max_size=8)


@given(LOOKS)
def test_every_use_that_began_ends_at_most_once_and_never_changes_after(
    story: list[tuple[ConsumerMap, DeviceState]],
) -> None:
    looks = Looks()
    over: set[str] = set()
    merged: set[str] = set()
    for map_, state in story:
        changed = looks.look(map_, state)
        assert not over & {one.id for one in changed}
        assert max(Counter(one.id for one in changed).values(), default=0) <= 1
        over |= {one.id for one in changed if one.ended}
        merged |= set(looks.step.merged)
        assert not over & merged
        running = {one.use.id for one in looks.uses.running.values()}
        assert not running & (over | merged)
        assert all(one.use.ended is None for one in looks.uses.running.values())


@given(LOOKS)
def test_the_file_follows_from_what_changed_alone(story: list[tuple[ConsumerMap, DeviceState]]) -> None:
    looks = Looks()
    kept: dict[str, Any] = {}
    for map_, state in story:
        kept |= {one.id: one for one in looks.look(map_, state)}
        for id_ in looks.step.merged:
            kept.pop(id_, None)
        running = {id_: one for id_, one in kept.items() if not one.ended}
        assert running == {one.use.id: one.use for one in looks.uses.running.values()}


@given(LOOKS)
def test_a_use_is_as_bad_as_its_device_ever_was(story: list[tuple[ConsumerMap, DeviceState]]) -> None:
    looks = Looks()
    worst: dict[str, Severity] = {}
    for map_, state in story:
        looks.look(map_, state)
        for one in looks.uses.running.values():
            told = max(state.severity, worst.get(one.use.id, Severity.OK))
            assert one.use.state == state
            assert one.use.worst.severity >= told
            worst[one.use.id] = one.use.worst.severity


@given(LOOKS, st.sampled_from([UNREADABLE, GONE, NOT_ASKED]))
def test_a_gap_ends_nothing(story: list[tuple[ConsumerMap, DeviceState]], gap: ConsumerMap) -> None:
    looks = Looks()
    for map_, state in story:
        looks.look(map_, state)
    before = looks.uses.running.keys()
    looks.look(gap)
    assert looks.uses.running.keys() == before
