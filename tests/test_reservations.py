"""Reservations of claims in all forms, and pods that the kubelet would refuse a claim."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.devices.consumers.kube_objects import (
    RESERVED_MAX,
    KubeletsRefusingPod,
    existing_reservation_targets,
    find_refusal,
    find_refusal_by_uid,
    parse_claim_object,
    parse_reservations,
    reservations_by_kind,
    unmatched_reservations,
)
from agent.model.claim import ClaimRef
from agent.model.claim_sources import (
    ClaimObject,
    ConsumerKind,
    OwnerReference,
    PodClaim,
    PodObject,
    PodRef,
    Reservation,
)

GROUP = {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "workers", "uid": "g"}
JOB = {"apiGroup": "batch", "resource": "jobs", "name": "train", "uid": "j"}
REF = ClaimRef("team-a", "train", "c")


def pod_entry(number: int = 0) -> dict[str, str]:
    return {"resource": "pods", "name": f"train-{number}", "uid": f"p-{number}"}


def reserved_claim(*entries: Any) -> ClaimObject:
    return ClaimObject(REF, allocated=True, reserved=parse_reservations(list(entries), "here"))


def pod(number: int = 0, **changes: Any) -> PodObject:
    return PodObject(PodRef("team-a", f"train-{number}", f"p-{number}"), **{"phase": "Running", **changes})


NAMED = PodClaim("gpus", "train")
MADE = PodClaim("gpus", "train", template=True)


# --- forms -------------------------------------------------------------------------------------------------


def test_entry_kind_follows_from_api_group_and_resource() -> None:
    found = reservations_by_kind(reserved_claim(pod_entry(), GROUP, JOB).reserved)
    assert found.pods == (Reservation(ConsumerKind.POD, "", "pods", "train-0", "p-0"),)
    assert found.groups == (
        Reservation(ConsumerKind.POD_GROUP, "scheduling.k8s.io", "podgroups", "workers", "g"),
    )
    assert found.others == (Reservation(ConsumerKind.OTHER, "batch", "jobs", "train", "j"),)


@pytest.mark.parametrize(
    "entry",
    [
        {**pod_entry(), "apiGroup": "metrics.k8s.io"},  # pods of another API group
        {**GROUP, "apiGroup": "scheduling.volcano.sh"},
        {**GROUP, "apiGroup": ""},
        {"uid": "p-0"},  # the API server refuses an entry without a resource
        {},
    ],
)
def test_entry_of_another_group_or_resource_is_other(entry: dict[str, str]) -> None:
    (reservation,) = reserved_claim(entry).reserved
    assert reservation.kind is ConsumerKind.OTHER


def test_entries_above_the_api_servers_limit_are_all_parsed() -> None:
    claim = reserved_claim(*map(pod_entry, range(RESERVED_MAX)))
    assert not reservations_by_kind(claim.reserved).exceeds_limit
    more = reservations_by_kind(reserved_claim(*map(pod_entry, range(1000)), GROUP).reserved)
    assert more.exceeds_limit
    assert (len(more.pods), len(more.groups)) == (1000, 1)


@pytest.mark.parametrize("value", [None, []])
def test_missing_or_empty_list_has_no_reservations(value: Any) -> None:
    assert parse_reservations(value, "here") == ()


@pytest.mark.parametrize(
    ("entries", "place"),
    [
        ([7], r"here\[0\]: is a number, not an object"),
        ([{}, {"uid": 7}], r"here\[1\].uid: is a number, not text"),
    ],
)
def test_invalid_entry_is_refused_with_its_path(entries: Any, place: str) -> None:
    with pytest.raises(ValueError, match=place):
        parse_reservations(entries, "here")


def test_fields_of_kep_5194_are_parsed_and_prevent_no_refusal() -> None:
    claim = parse_claim_object(
        {
            "metadata": {"namespace": "team-a", "name": "train", "uid": "c"},
            "spec": {"reservedFor": JOB},
            "status": {"allocation": {"reservedForAnyPod": True}, "reservedFor": [JOB]},
        }
    )
    assert claim.spec_reserved == claim.reserved == parse_reservations(JOB, "")
    assert claim.any_pod
    found = find_refusal(pod(), NAMED, claim)  # no Kubernetes release has these fields
    assert found is not None
    assert found.kubelets is KubeletsRefusingPod.ALL


# --- orphans -----------------------------------------------------------------------------------------------


def test_reservations_without_a_pod_or_group_are_unmatched() -> None:
    claim = reserved_claim(pod_entry(0), pod_entry(1), GROUP, {**GROUP, "name": "gone"}, JOB)
    orphans = unmatched_reservations(claim, existing_reservation_targets([pod(0), pod(7, group="workers")]))
    assert [orphan.name for orphan in orphans] == ["train-1", "gone"]


def test_pod_of_another_namespace_matches_no_reservation() -> None:
    other_namespace = PodObject(PodRef("team-b", "x", "p-0"), group="workers")
    orphans = unmatched_reservations(
        reserved_claim(GROUP, pod_entry()), existing_reservation_targets([other_namespace])
    )
    assert [orphan.name for orphan in orphans] == ["workers", "train-0"]


def test_mirror_pod_matches_the_reservation_for_its_uid() -> None:
    """The scheduler reserves for the API server's object; the kubelet knows the pod by its config hash."""
    mirror = PodObject(PodRef("team-a", "train-0", "0badcafe"), mirror_uid="p-0")
    assert unmatched_reservations(reserved_claim(pod_entry(0)), existing_reservation_targets([mirror])) == ()


def test_reservation_for_a_group_with_a_pods_uid_is_unmatched() -> None:
    claim = reserved_claim({**GROUP, "uid": "p-0"})
    assert [
        reservation.name
        for reservation in unmatched_reservations(claim, existing_reservation_targets([pod(0)]))
    ] == ["workers"]


# --- refusals of the kubelet -------------------------------------------------------------------------------


def test_pod_with_a_reservation_is_not_refused() -> None:
    assert find_refusal(pod(), NAMED, reserved_claim(pod_entry(1), pod_entry(0))) is None


def test_pod_without_a_reservation_is_refused_by_all_kubelets() -> None:
    found = find_refusal(pod(), NAMED, reserved_claim(pod_entry(1), pod_entry(2), JOB))
    assert found is not None
    assert found.kubelets is KubeletsRefusingPod.ALL
    assert found.reason == "the claim is not reserved for the pod, but for 2 pods and 1 other"
    unreserved = find_refusal(pod(), NAMED, reserved_claim())
    assert unreserved is not None
    assert unreserved.reason.endswith("but for no consumer")


def test_group_reservation_is_refused_by_kubelets_without_groups() -> None:
    found = find_refusal(pod(group="workers"), NAMED, reserved_claim(GROUP))
    assert found is not None
    assert found.kubelets is KubeletsRefusingPod.WITHOUT_GROUPS


def test_pod_reserved_itself_and_by_group_is_not_refused() -> None:
    assert find_refusal(pod(group="workers"), NAMED, reserved_claim(GROUP, pod_entry())) is None


def test_reservation_for_another_group_does_not_count() -> None:
    found = find_refusal(pod(group="others"), NAMED, reserved_claim(GROUP))
    assert found is not None
    assert found.kubelets is KubeletsRefusingPod.ALL


def test_kubelet_matches_the_uid_of_any_kind_of_entry() -> None:
    assert (
        find_refusal(pod(), NAMED, reserved_claim({"uid": "p-0"})) is None
    )  # same case as in kubelet manager_test.go


def test_claim_from_a_template_must_be_owned_by_the_pod() -> None:
    claim = reserved_claim(pod_entry())
    mine = ClaimObject(
        REF, True, reserved=claim.reserved, owner=OwnerReference("v1", "Pod", "train-0", "p-0", True)
    )
    old = ClaimObject(
        REF, True, reserved=claim.reserved, owner=OwnerReference("v1", "Pod", "train-0", "p-old", True)
    )
    assert find_refusal(pod(), MADE, mine) is None
    assert find_refusal(pod(), NAMED, old) is None  # not made from a template
    for other in (old, claim):
        found = find_refusal(pod(), MADE, other)
        assert found is not None
        assert found.kubelets is KubeletsRefusingPod.ALL


@pytest.mark.parametrize(
    ("owner", "kubelets"),
    [
        (
            OwnerReference("scheduling.k8s.io/v1alpha2", "PodGroup", "workers", "g", True),
            KubeletsRefusingPod.WITHOUT_GROUPS,
        ),
        (
            OwnerReference("scheduling.k8s.io/v1alpha2", "PodGroup", "others", "g", True),
            KubeletsRefusingPod.ALL,
        ),
        (
            OwnerReference("scheduling.volcano.sh/v1", "PodGroup", "workers", "g", True),
            KubeletsRefusingPod.ALL,
        ),
        (
            OwnerReference("scheduling.k8s.io/v1alpha2", "Workload", "workers", "g", True),
            KubeletsRefusingPod.ALL,
        ),
    ],
)
def test_claim_owned_by_the_pod_group_needs_kubelet_with_groups(
    owner: OwnerReference, kubelets: KubeletsRefusingPod
) -> None:
    claim = ClaimObject(REF, True, reserved=reserved_claim(pod_entry()).reserved, owner=owner)
    found = find_refusal(pod(group="workers"), MADE, claim)
    assert found is not None
    assert found.kubelets is kubelets


def test_claim_without_allocation_is_refused() -> None:
    found = find_refusal(pod(), NAMED, ClaimObject(REF, reserved=reserved_claim(pod_entry()).reserved))
    assert found is not None
    assert found.reason == "the claim is not allocated"


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_ended_pod_is_not_refused(phase: str) -> None:
    assert find_refusal(pod(phase=phase), NAMED, reserved_claim()) is None


def test_pod_without_an_object_is_refused_only_if_certain() -> None:
    assert find_refusal_by_uid("p-0", reserved_claim(pod_entry())) is None
    assert (
        find_refusal_by_uid("p-0", reserved_claim(pod_entry(1), GROUP)) is None
    )  # the pod may belong to the group
    found = find_refusal_by_uid("p-0", reserved_claim(pod_entry(1)))
    assert found is not None
    assert (found.pod, found.kubelets) == (PodRef(uid="p-0"), KubeletsRefusingPod.ALL)


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
    """Return the result of the kubelet's IsReservedForPod."""
    for entry in entries:
        if entry["uid"] == uid:
            return True
        kind = (entry["apiGroup"], entry["resource"])
        if gate and group and kind == ("scheduling.k8s.io", "podgroups") and entry["name"] == group:
            return True
    return False


@given(ENTRIES, st.sampled_from(["", "workers"]))
def test_refusals_equal_those_of_the_kubelet(entries: list[dict[str, str]], group: str) -> None:
    found = find_refusal(pod(group=group), NAMED, reserved_claim(*entries))
    kubelets = None if found is None else found.kubelets
    old = kubelet_accepts(entries, "p-0", group, gate=False)
    new = kubelet_accepts(entries, "p-0", group, gate=True)
    assert (kubelets is None) is old
    assert (kubelets is KubeletsRefusingPod.WITHOUT_GROUPS) is (new and not old)
    assert (kubelets is KubeletsRefusingPod.ALL) is (not new)


@given(ENTRIES)
def test_every_entry_has_exactly_one_kind(entries: list[dict[str, str]]) -> None:
    claim = reserved_claim(*entries)
    kinds = reservations_by_kind(claim.reserved)
    assert sorted(reservation for of in kinds for reservation in of) == sorted(claim.reserved)
    assert all(pod.api_group == "" and pod.resource == "pods" for pod in kinds.pods)
