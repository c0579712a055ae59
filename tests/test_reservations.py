"""For whom a claim is reserved, in all shapes, and which pods a kubelet would refuse it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.devices.consumers.kube_objects import parse_claim_object
from agent.devices.consumers.reservations import (
    RESERVED_MAX,
    Kubelets,
    by_kind,
    parse_reservations,
    refusal,
    refusal_of_uid,
    standing,
    unmatched,
)
from agent.model.claim import ClaimRef
from agent.model.claim_sources import ConsumerKind, KnownClaim, KnownPod, Owner, PodClaim, PodRef, Reservation

GROUP = {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "workers", "uid": "g"}
JOB = {"apiGroup": "batch", "resource": "jobs", "name": "train", "uid": "j"}
REF = ClaimRef("team-a", "train", "c")


def pod_entry(number: int = 0) -> dict[str, str]:
    return {"resource": "pods", "name": f"train-{number}", "uid": f"p-{number}"}


def reserved(*entries: Any) -> KnownClaim:
    return KnownClaim(REF, allocated=True, reserved=parse_reservations(list(entries), "here"))


def pod(number: int = 0, **changes: Any) -> KnownPod:
    return KnownPod(PodRef("team-a", f"train-{number}", f"p-{number}"), **{"phase": "Running", **changes})


NAMED = PodClaim("gpus", "train")
MADE = PodClaim("gpus", "train", template=True)


# --- shapes ------------------------------------------------------------------------------------------------


def test_each_entry_is_what_its_group_and_resource_say() -> None:
    found = by_kind(reserved(pod_entry(), GROUP, JOB).reserved)
    assert found.pods == (Reservation(ConsumerKind.POD, "", "pods", "train-0", "p-0"),)
    assert found.groups == (
        Reservation(ConsumerKind.POD_GROUP, "scheduling.k8s.io", "podgroups", "workers", "g"),
    )
    assert found.others == (Reservation(ConsumerKind.OTHER, "batch", "jobs", "train", "j"),)


@pytest.mark.parametrize(
    "entry",
    [
        {**pod_entry(), "apiGroup": "metrics.k8s.io"},  # pods, but not those
        {**GROUP, "apiGroup": "scheduling.volcano.sh"},
        {**GROUP, "apiGroup": ""},
        {"uid": "p-0"},  # of which the API server would say that it lacks a resource
        {},
    ],
)
def test_what_only_looks_like_a_pod_or_a_group_is_opaque(entry: dict[str, str]) -> None:
    (one,) = reserved(entry).reserved
    assert one.kind is ConsumerKind.OTHER


def test_more_than_the_api_server_takes_are_all_read() -> None:
    claim = reserved(*map(pod_entry, range(RESERVED_MAX)))
    assert not by_kind(claim.reserved).is_over
    more = by_kind(reserved(*map(pod_entry, range(1000)), GROUP).reserved)
    assert more.is_over
    assert (len(more.pods), len(more.groups)) == (1000, 1)


@pytest.mark.parametrize("value", [None, []])
def test_nobody_is_nobody(value: Any) -> None:
    assert parse_reservations(value, "here") == ()


@pytest.mark.parametrize(
    ("entries", "place"),
    [([7], r"here\[0\]: is a number, no object"), ([{}, {"uid": 7}], r"here\[1\].uid: is a number, no text")],
)
def test_what_is_no_reference_is_refused_with_its_place(entries: Any, place: str) -> None:
    with pytest.raises(ValueError, match=place):
        parse_reservations(entries, "here")


def test_the_fields_of_kep_5194_are_read_and_prove_nothing() -> None:
    claim = parse_claim_object(
        {
            "metadata": {"namespace": "team-a", "name": "train", "uid": "c"},
            "spec": {"reservedFor": JOB},
            "status": {"allocation": {"reservedForAnyPod": True}, "reservedFor": [JOB]},
        }
    )
    assert claim.meant_for == claim.reserved == parse_reservations(JOB, "")
    assert claim.any_pod
    found = refusal(pod(), NAMED, claim)  # no release has them
    assert found is not None
    assert found.kubelets is Kubelets.ALL


# --- orphans -----------------------------------------------------------------------------------------------


def test_those_behind_whom_nobody_stands_are_named() -> None:
    claim = reserved(pod_entry(0), pod_entry(1), GROUP, {**GROUP, "name": "gone"}, JOB)
    orphans = unmatched(claim, standing([pod(0), pod(7, group="workers")]))
    assert [one.name for one in orphans] == ["train-1", "gone"]


def test_a_group_of_another_namespace_stands_behind_nothing() -> None:
    stranger = KnownPod(PodRef("team-b", "x", "p-0"), group="workers")
    orphans = unmatched(reserved(GROUP, pod_entry()), standing([stranger]))
    assert [one.name for one in orphans] == ["workers", "train-0"]


def test_a_mirror_pod_stands_behind_its_own_reservation() -> None:
    """Whoever reserves for it knows the object of the API server, and not the hash that the kubelet has."""
    mirror = KnownPod(PodRef("team-a", "train-0", "0badcafe"), mirror_uid="p-0")
    assert unmatched(reserved(pod_entry(0)), standing([mirror])) == ()


def test_a_groups_uid_that_a_pod_has_makes_no_member_of_it() -> None:
    claim = reserved({**GROUP, "uid": "p-0"})
    assert [one.name for one in unmatched(claim, standing([pod(0)]))] == ["workers"]


# --- whom the kubelet would refuse -------------------------------------------------------------------------


def test_a_pod_that_is_listed_gets_its_claim() -> None:
    assert refusal(pod(), NAMED, reserved(pod_entry(1), pod_entry(0))) is None


def test_a_reservation_that_is_gone_is_a_risk_with_every_kubelet() -> None:
    found = refusal(pod(), NAMED, reserved(pod_entry(1), pod_entry(2), JOB))
    assert found is not None
    assert found.kubelets is Kubelets.ALL
    assert found.why == "the claim is not reserved for it, but for 2 pods and 1 other"
    nobody = refusal(pod(), NAMED, reserved())
    assert nobody is not None
    assert nobody.why.endswith("but for nobody")


def test_a_reservation_for_the_pods_group_is_a_risk_with_kubelets_that_know_no_groups() -> None:
    found = refusal(pod(group="workers"), NAMED, reserved(GROUP))
    assert found is not None
    assert found.kubelets is Kubelets.WITHOUT_GROUPS


def test_a_mixed_list_that_has_the_pod_itself_is_no_risk() -> None:
    assert refusal(pod(group="workers"), NAMED, reserved(GROUP, pod_entry())) is None


def test_another_group_is_no_help() -> None:
    found = refusal(pod(group="others"), NAMED, reserved(GROUP))
    assert found is not None
    assert found.kubelets is Kubelets.ALL


def test_a_kubelet_looks_at_the_uid_and_not_at_what_has_it() -> None:
    assert refusal(pod(), NAMED, reserved({"uid": "p-0"})) is None  # as in kubelet manager_test.go


def test_a_claim_that_was_made_for_the_pod_must_be_its_own() -> None:
    claim = reserved(pod_entry())
    mine = KnownClaim(REF, True, reserved=claim.reserved, owner=Owner("v1", "Pod", "train-0", "p-0", True))
    old = KnownClaim(REF, True, reserved=claim.reserved, owner=Owner("v1", "Pod", "train-0", "p-old", True))
    assert refusal(pod(), MADE, mine) is None
    assert refusal(pod(), NAMED, old) is None  # it is not made from a template
    for other in (old, claim):
        found = refusal(pod(), MADE, other)
        assert found is not None
        assert found.kubelets is Kubelets.ALL


@pytest.mark.parametrize(
    ("owner", "kubelets"),
    [
        (Owner("scheduling.k8s.io/v1alpha2", "PodGroup", "workers", "g", True), Kubelets.WITHOUT_GROUPS),
        (Owner("scheduling.k8s.io/v1alpha2", "PodGroup", "others", "g", True), Kubelets.ALL),
        (Owner("scheduling.volcano.sh/v1", "PodGroup", "workers", "g", True), Kubelets.ALL),
        (Owner("scheduling.k8s.io/v1alpha2", "Workload", "workers", "g", True), Kubelets.ALL),
    ],
)
def test_a_claim_that_was_made_for_the_pods_group_needs_a_kubelet_that_knows_groups(
    owner: Owner, kubelets: Kubelets
) -> None:
    claim = KnownClaim(REF, True, reserved=reserved(pod_entry()).reserved, owner=owner)
    found = refusal(pod(group="workers"), MADE, claim)
    assert found is not None
    assert found.kubelets is kubelets


def test_a_claim_that_lost_its_allocation_is_refused() -> None:
    found = refusal(pod(), NAMED, KnownClaim(REF, reserved=reserved(pod_entry()).reserved))
    assert found is not None
    assert found.why == "the claim is not allocated"


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_is_not_refused_anything(phase: str) -> None:
    assert refusal(pod(phase=phase), NAMED, reserved()) is None


def test_of_a_pod_without_an_object_only_what_is_certain_is_said() -> None:
    assert refusal_of_uid("p-0", reserved(pod_entry())) is None
    assert refusal_of_uid("p-0", reserved(pod_entry(1), GROUP)) is None  # it may be of the group
    found = refusal_of_uid("p-0", reserved(pod_entry(1)))
    assert found is not None
    assert (found.pod, found.kubelets) == (PodRef(uid="p-0"), Kubelets.ALL)


ENTRIES = st.lists(
    st.fixed_dictionaries(
        {
            "apiGroup": st.sampled_from(["", "scheduling.k8s.io", "batch"]),
            "resource": st.sampled_from(["pods", "podgroups", "jobs", ""]),
            "name": st.sampled_from(["workers", "train-0"]),
            "uid": st.sampled_from(["p-0", "p-1", "g", ""]),
        }
    ),
    max_size=6,
)


def kubelet_accepts(entries: list[dict[str, str]], uid: str, group: str, *, gate: bool) -> bool:
    """What IsReservedForPod comes to."""
    for entry in entries:
        if entry["uid"] == uid:
            return True
        kind = (entry["apiGroup"], entry["resource"])
        if gate and group and kind == ("scheduling.k8s.io", "podgroups") and entry["name"] == group:
            return True
    return False


@given(ENTRIES, st.sampled_from(["", "workers"]))
def test_whom_we_call_refused_the_kubelet_refuses_and_nobody_else(
    entries: list[dict[str, str]], group: str
) -> None:
    found = refusal(pod(group=group), NAMED, reserved(*entries))
    kubelets = None if found is None else found.kubelets
    old = kubelet_accepts(entries, "p-0", group, gate=False)
    new = kubelet_accepts(entries, "p-0", group, gate=True)
    assert (kubelets is None) is old
    assert (kubelets is Kubelets.WITHOUT_GROUPS) is (new and not old)
    assert (kubelets is Kubelets.ALL) is (not new)


@given(ENTRIES)
def test_every_entry_is_of_one_kind_and_none_is_lost(entries: list[dict[str, str]]) -> None:
    claim = reserved(*entries)
    kinds = by_kind(claim.reserved)
    assert sorted(one for of in kinds for one in of) == sorted(claim.reserved)
    assert all(one.api_group == "" and one.resource == "pods" for one in kinds.pods)
