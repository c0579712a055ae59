"""Pod and claim objects become who uses what, in every form that the API ever had for it."""

import copy
from typing import Any

import pytest
from kubernetes_wrote import POD, pod_json

from agent.devices.consumers.kube_objects import claims_from, parse_claim_object, parse_pod, pods_from
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import (
    Container,
    ContainerClaim,
    DeviceUse,
    KnownPod,
    Origin,
    Owner,
    PodClaim,
    PodRef,
    Provenance,
    SourceAnswer,
)
from agent.model.time import Instant
from agent.serve.kubelet.pod_message import read_pod

WITNESS = Provenance(Origin.PODS_FILE, Instant(1, 1.0), 1.0)


def pod(**changes: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "team-a", "name": "p", "uid": "u"}, **changes}


def claim(status: Any = None, **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "team-a", "name": "c", "uid": "u", **metadata}, "status": status}


def allocated(*results: Any, **more: Any) -> dict[str, Any]:
    return {"allocation": {"devices": {"results": list(results)}, **more}}


def result(device: str, request: str = "gpus", **more: Any) -> dict[str, Any]:
    return {"request": request, "driver": "gpu.example.com", "pool": "node-1", "device": device, **more}


# --- pods --------------------------------------------------------------------------------------------------


def test_a_pod_as_kubernetes_wrote_it_is_understood_whole() -> None:
    assert parse_pod(pod_json()) == KnownPod(
        ref=PodRef("team-a", "train-0", "6f0c3f4e-0001-4aaa-8bbb-000000000001"),
        node="node-1",
        phase="Running",
        owners=(Owner("batch/v1", "Job", "train", "job-1", True),),
        group="workers",
        claims=(
            PodClaim("gpus", "train-0-gpus-x7k2p", template=True),
            PodClaim("shared", "nics"),
            PodClaim("", "train-0-extended-resources-q9w"),
        ),
        containers=(
            Container("side", (ContainerClaim("gpus", "small"),), "bb22"),
            Container(
                "main",
                (
                    ContainerClaim("gpus"),
                    ContainerClaim("shared", "nic"),
                    ContainerClaim("", "container-0-request-0"),
                ),
                "aa11",
                running=True,
            ),
            Container("idle"),
        ),
    )


def test_the_pods_api_and_kubectl_say_the_same() -> None:
    assert parse_pod(read_pod(POD)) == parse_pod(pod_json())


def test_a_claim_that_was_not_made_yet_has_no_name() -> None:
    obj = pod_json()
    del obj["status"]["resourceClaimStatuses"]
    assert parse_pod(obj).claims[0] == PodClaim("gpus", "", template=True)


def test_a_claim_that_is_not_needed_has_none_either() -> None:
    obj = pod_json()
    obj["status"]["resourceClaimStatuses"] = [{"name": "gpus"}]
    assert parse_pod(obj).claims[0] == PodClaim("gpus", "", template=True)


def test_a_mirror_pod_has_the_uid_of_what_it_stands_for() -> None:
    obj = pod()
    obj["metadata"]["annotations"] = {
        "kubernetes.io/config.hash": "0badcafe",
        "kubernetes.io/config.mirror": "0badcafe",
        "kubernetes.io/config.source": "file",
    }
    found = parse_pod(obj)
    assert (found.ref.uid, found.mirror_uid) == ("0badcafe", "u")


def test_a_pod_that_asks_for_nothing_has_nothing() -> None:
    assert parse_pod(pod()) == KnownPod(PodRef("team-a", "p", "u"))


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"metadata": []}, "metadata: is a list, no object"),
        ({"metadata": {"namespace": "a", "name": "b"}}, "metadata.uid: is not there"),
        ({"metadata": {"namespace": "a", "name": "", "uid": "u"}}, "metadata.name: is not there"),
        ({"spec": {"resourceClaims": {}}}, "spec.resourceClaims: is no list of objects"),
        ({"spec": {"resourceClaims": [{}]}}, r"spec.resourceClaims\[0\].name: is not there"),
        ({"spec": {"containers": [{"name": 7}]}}, r"spec.containers\[0\].name: is a number, no text"),
        ({"status": {"phase": True}}, "status.phase: is a truth value, no text"),
    ],
)
def test_what_is_no_pod_is_refused_with_the_place(changes: Any, place: str) -> None:
    with pytest.raises(ValueError, match=place):
        parse_pod(pod(**changes))


def test_one_bad_object_does_not_hide_the_others() -> None:
    bad = {"metadata": {"name": "bad"}}
    told = pods_from(SourceAnswer(WITNESS, (bad, pod()), wrong=("before",)))
    assert [one.ref.name for one in told.items] == ["p"]
    assert told.wrong == ("before", "item 0 ('bad'): metadata.namespace: is not there")
    assert not told.is_whole


def test_a_thousand_bad_objects_fit_on_a_page() -> None:
    told = claims_from(SourceAnswer(WITNESS, ({},) * 1000))
    assert len(told.wrong) == 17
    assert told.wrong[-1] == "984 more"


# --- claims ------------------------------------------------------------------------------------------------


def test_an_allocation_gives_the_devices_of_all_drivers() -> None:
    results = [result("gpu-0", "gpus/large"), result("nic-0", "nic", driver="nic.example.com", shareID="s")]
    found = parse_claim_object(claim(allocated(*results)))
    assert found.allocated
    assert found.ref == ClaimRef("team-a", "c", "u")
    assert found.devices == (
        DeviceUse(DeviceRef("gpu.example.com", "node-1", "gpu-0"), ("gpus",)),
        DeviceUse(DeviceRef("nic.example.com", "node-1", "nic-0"), ("nic",), "s"),
    )


@pytest.mark.parametrize("status", [None, {}, {"allocation": None}, {"reservedFor": []}])
def test_a_claim_without_an_allocation_says_so(status: Any) -> None:
    assert not parse_claim_object(claim(status)).allocated


def test_an_allocation_without_devices_is_one() -> None:
    found = parse_claim_object(claim({"allocation": {}}))
    assert (found.allocated, found.devices) == (True, ())


def test_the_controller_is_the_owner_whoever_else_is() -> None:
    owners = [
        {"apiVersion": "v1", "kind": "Pod", "name": "other", "uid": "1"},
        {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "2", "controller": True},
    ]
    assert parse_claim_object(claim(ownerReferences=owners)).owner == Owner("v1", "Pod", "p", "2", True)
    assert parse_claim_object(claim(ownerReferences=owners[:1])).owner is None


def test_a_pod_is_managed_by_one_and_may_belong_to_more() -> None:
    owners = [{"apiVersion": "v1", "kind": kind, "name": "n", "uid": kind} for kind in ("Node", "Job")]
    owners[1]["controller"] = True  # type: ignore[assignment]
    obj = pod()
    obj["metadata"]["ownerReferences"] = owners
    found = parse_pod(obj)
    assert [str(owner) for owner in found.owners] == ["Node n", "Job n"]
    assert found.controller == found.owners[1]
    assert parse_pod(pod()).controller is None


def test_objects_are_read_and_not_changed() -> None:
    for obj, parse in ((pod_json(), parse_pod), (claim(allocated(result("gpu-0"))), parse_claim_object)):
        before = copy.deepcopy(obj)
        parse(obj)  # type: ignore[operator]
        assert obj == before
