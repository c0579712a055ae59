"""Uses of devices in pod and claim objects, in every form that the API has had."""

import copy
from typing import Any

import pytest
from kubernetes_samples import POD, pod_json

from agent.devices.consumers.kube_objects import parse_claim_object, parse_claims, parse_pod, parse_pods
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import (
    AllocatedDevice,
    ContainerClaim,
    ContainerObject,
    Origin,
    OwnerReference,
    PodClaim,
    PodObject,
    PodRef,
    Provenance,
    SourceAnswer,
)
from agent.model.time import Instant
from agent.serve.kubelet.pods_api import decode_pod

PROVENANCE = Provenance(Origin.PODS_FILE, Instant(1, 1.0), 1.0)


def pod(**changes: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "team-a", "name": "p", "uid": "u"}, **changes}


def claim(status: Any = None, **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "team-a", "name": "c", "uid": "u", **metadata}, "status": status}


def allocation_status(*results: Any, **more: Any) -> dict[str, Any]:
    return {"allocation": {"devices": {"results": list(results)}, **more}}


def result(device: str, request: str = "gpus", **more: Any) -> dict[str, Any]:
    return {"request": request, "driver": "gpu.example.com", "pool": "node-1", "device": device, **more}


# --- pods --------------------------------------------------------------------------------------------------


def test_pod_written_by_kubernetes_parses_completely() -> None:
    assert parse_pod(pod_json()) == PodObject(
        ref=PodRef("team-a", "train-0", "6f0c3f4e-0001-4aaa-8bbb-000000000001"),
        node="node-1",
        phase="Running",
        owners=(OwnerReference("batch/v1", "Job", "train", "job-1", True),),
        group="workers",
        claims=(
            PodClaim("gpus", "train-0-gpus-x7k2p", template=True),
            PodClaim("shared", "nics"),
            PodClaim("", "train-0-extended-resources-q9w"),
        ),
        containers=(
            ContainerObject("side", (ContainerClaim("gpus", "small"),), "bb22"),
            ContainerObject(
                "main",
                (
                    ContainerClaim("gpus"),
                    ContainerClaim("shared", "nic"),
                    ContainerClaim("", "container-0-request-0"),
                ),
                "aa11",
                running=True,
            ),
            ContainerObject("idle"),
        ),
    )


def test_pods_api_and_kubectl_give_the_same_pods() -> None:
    assert parse_pod(decode_pod(POD)) == parse_pod(pod_json())


def test_claim_not_yet_created_has_no_name() -> None:
    obj = pod_json()
    del obj["status"]["resourceClaimStatuses"]
    assert parse_pod(obj).claims[0] == PodClaim("gpus", "", template=True)


def test_unneeded_claim_has_no_name() -> None:
    obj = pod_json()
    obj["status"]["resourceClaimStatuses"] = [{"name": "gpus"}]
    assert parse_pod(obj).claims[0] == PodClaim("gpus", "", template=True)


def test_mirror_pod_has_uid_of_its_static_pod() -> None:
    obj = pod()
    obj["metadata"]["annotations"] = {
        "kubernetes.io/config.hash": "0badcafe",
        "kubernetes.io/config.mirror": "0badcafe",
        "kubernetes.io/config.source": "file",
    }
    found = parse_pod(obj)
    assert (found.ref.uid, found.mirror_uid) == ("0badcafe", "u")


def test_pod_without_claims_has_no_claims() -> None:
    assert parse_pod(pod()) == PodObject(PodRef("team-a", "p", "u"))


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"metadata": []}, "metadata: is a list, not an object"),
        ({"metadata": {"namespace": "a", "name": "b"}}, "metadata.uid: is missing"),
        ({"metadata": {"namespace": "a", "name": "", "uid": "u"}}, "metadata.name: is missing"),
        ({"spec": {"resourceClaims": {}}}, "spec.resourceClaims: is not a list of objects"),
        ({"spec": {"resourceClaims": [{}]}}, r"spec.resourceClaims\[0\].name: is missing"),
        ({"spec": {"containers": [{"name": 7}]}}, r"spec.containers\[0\].name: is a number, not text"),
        ({"status": {"phase": True}}, "status.phase: is a boolean, not text"),
    ],
)
def test_invalid_pod_is_refused_with_place(changes: Any, place: str) -> None:
    with pytest.raises(ValueError, match=place):
        parse_pod(pod(**changes))


def test_invalid_object_does_not_hide_others() -> None:
    bad = {"metadata": {"name": "bad"}}
    answer = parse_pods(SourceAnswer(PROVENANCE, (bad, pod()), invalid=("before",)))
    assert [item.ref.name for item in answer.items] == ["p"]
    assert answer.invalid == ("before", "item 0 ('bad'): metadata.namespace: is missing")
    assert not answer.is_complete


def test_errors_of_a_thousand_objects_are_limited() -> None:
    answer = parse_claims(SourceAnswer(PROVENANCE, ({},) * 1000))
    assert len(answer.invalid) == 17
    assert answer.invalid[-1] == "984 more"


# --- claims ------------------------------------------------------------------------------------------------


def test_allocation_gives_devices_of_all_drivers() -> None:
    results = [result("gpu-0", "gpus/large"), result("nic-0", "nic", driver="nic.example.com", shareID="s")]
    found = parse_claim_object(claim(allocation_status(*results)))
    assert found.allocated
    assert found.ref == ClaimRef("team-a", "c", "u")
    assert found.devices == (
        AllocatedDevice(DeviceRef("gpu.example.com", "node-1", "gpu-0"), ("gpus",)),
        AllocatedDevice(DeviceRef("nic.example.com", "node-1", "nic-0"), ("nic",), "s"),
    )


@pytest.mark.parametrize("status", [None, {}, {"allocation": None}, {"reservedFor": []}])
def test_claim_without_allocation_is_not_allocated(status: Any) -> None:
    assert not parse_claim_object(claim(status)).allocated


def test_allocation_without_devices_is_allocated() -> None:
    found = parse_claim_object(claim({"allocation": {}}))
    assert (found.allocated, found.devices) == (True, ())


def test_controller_of_a_pod_is_the_owner_with_the_flag_controller() -> None:
    owners = [
        {"apiVersion": "v1", "kind": "Pod", "name": "other", "uid": "1"},
        {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "2", "controller": True},
    ]
    assert parse_claim_object(claim(ownerReferences=owners)).owner == OwnerReference(
        "v1", "Pod", "p", "2", True
    )
    assert parse_claim_object(claim(ownerReferences=owners[:1])).owner is None


def test_pod_has_one_controller_among_several_owners() -> None:
    owners = [{"apiVersion": "v1", "kind": kind, "name": "n", "uid": kind} for kind in ("Node", "Job")]
    owners[1]["controller"] = True  # type: ignore[assignment]
    obj = pod()
    obj["metadata"]["ownerReferences"] = owners
    found = parse_pod(obj)
    assert [str(owner) for owner in found.owners] == ["Node n", "Job n"]
    assert found.controller == found.owners[1]
    assert parse_pod(pod()).controller is None


def test_parsing_does_not_modify_objects() -> None:
    for obj, parse in (
        (pod_json(), parse_pod),
        (claim(allocation_status(result("gpu-0"))), parse_claim_object),
    ):
        before = copy.deepcopy(obj)
        parse(obj)  # type: ignore[operator]
        assert obj == before
