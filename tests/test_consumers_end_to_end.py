"""Consumer map from a kubelet's files and sockets: 100 pods with four devices each and a shared one."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from kubelet_files import DRIVER, checkpoint, claim, device
from patience import PATIENCE_S
from wire.kubelet_apis import (
    ListingApi,
    listed_claim,
    listed_container,
    listed_pod,
    listed_pods,
    message_class,
    pod,
)

from agent.devices.consumers.consumer_map import build_consumer_map
from agent.devices.consumers.consumer_queries import affected_pods, pods_by_name, refused_pods
from agent.devices.consumers.kube_objects import KubeletsRefusingPod, parse_claims, parse_pods
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import Origin, PodRef, SourceAnswer, SourceAnswers
from agent.model.consumers import ConsumerMap, ContainerUse
from agent.model.reading import Absence
from agent.model.time import Instant
from agent.serve.kubelet import client, pods_api
from agent.sources import kubectl_files, kubelet_files

PODS = range(100)
DEVICES = range(4)
SHARED = "shared"
NOW = Instant(5_000_000_000, 1_700_000_000.0)


def gpu(number: int, part: int) -> str:
    return f"gpu-{number}-{part}"


def write_files(directory: Path) -> None:
    """Write the checkpoint and the saved claims: one claim for each pod, and one that all pods share."""
    claims = [
        claim(
            f"c-{number}",
            name=f"claim-{number}",
            pods=[f"u-{number}"],
            drivers={
                DRIVER: {"Devices": [device(gpu(number, part), requests=[f"r-{part}"]) for part in DEVICES]}
            },
        )
        for number in PODS
    ]
    claims.append(
        claim(
            "c-shared",
            name=SHARED,
            pods=[f"u-{number}" for number in PODS],
            drivers={DRIVER: {"Devices": [device("switch")]}},
        )
    )
    (directory / kubelet_files.CLAIMS_FILE).write_bytes(checkpoint(claims))
    results = [{"request": "gpus", "driver": DRIVER, "pool": "node-1", "device": "switch"}]
    group = {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "workers", "uid": "g"}
    reserved = [{"resource": "pods", "name": f"pod-u-{number}", "uid": f"u-{number}"} for number in PODS[1:]]
    shared = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": "team-a", "name": SHARED, "uid": "c-shared"},
        "status": {"allocation": {"devices": {"results": results}}, "reservedFor": [group, *reserved]},
    }
    (directory / "claims.json").write_text(json.dumps({"kind": "List", "items": [shared]}))


def podresources_answer() -> Any:
    return listed_pods(
        *(
            listed_pod(
                f"pod-u-{number}",
                listed_container(
                    "main",
                    listed_claim(f"claim-{number}", *(gpu(number, part) for part in DEVICES)),
                    listed_claim(SHARED, "switch"),
                ),
            )
            for number in PODS
        )
    )


def pods_answer() -> Any:
    return message_class("v1alpha1", "ListPodsResponse")(
        pods=[pod(f"u-{number}", claims=[f"claim-{number}", SHARED]) for number in PODS]
    )


def map_of_node(directory: Path) -> ConsumerMap:
    """Return the map from the files and sockets in the directory."""

    async def query_sockets() -> tuple[SourceAnswer[Any], SourceAnswer[Any]]:
        return (
            await client.list_podresources(directory / "kubelet.sock", lambda: NOW),
            await pods_api.list_pods(directory / "pods-api.sock", lambda: NOW),
        )

    listing, pods = asyncio.run(query_sockets())
    claims = kubectl_files.read_objects(directory / "claims.json", kubectl_files.CLAIM, NOW)
    return build_consumer_map(
        SourceAnswers(
            prepared=(kubelet_files.read_claims_checkpoint(directory / kubelet_files.CLAIMS_FILE, NOW),),
            listed=(listing,),
            pods=(parse_pods(pods),),
            claims=(parse_claims(claims),),
        )
    )


@pytest.fixture
def known_consumers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConsumerMap:
    monkeypatch.setattr(client, "CALL_S", PATIENCE_S)
    write_files(tmp_path)
    with (
        ListingApi(tmp_path / "kubelet.sock", client.PODRESOURCES_LIST, podresources_answer),
        ListingApi(tmp_path / "pods-api.sock", pods_api.LIST, pods_answer),
    ):
        return map_of_node(tmp_path)


def test_own_device_affects_one_pod_and_shared_device_all(known_consumers: ConsumerMap) -> None:
    assert (len(known_consumers.claims), len(known_consumers.pods), len(known_consumers.devices)) == (
        101,
        100,
        401,
    )
    assert (known_consumers.conflicts, known_consumers.missing_sources) == ((), ())
    for number in PODS:
        for part in DEVICES:
            (found_pod,) = affected_pods(known_consumers, DeviceRef(DRIVER, "node-1", gpu(number, part)))
            assert (found_pod.pod.ref, found_pod.is_certain) == (
                PodRef("team-a", f"pod-u-{number}", f"u-{number}"),
                True,
            )
            assert found_pod.claim == ClaimRef("team-a", f"claim-{number}", f"c-{number}")
            assert found_pod.containers == (ContainerUse("main", is_certain=True),)
    found = affected_pods(known_consumers, DeviceRef(DRIVER, "node-1", "switch"))
    assert len(found) == 100
    assert all(found_pod.is_certain for found_pod in found)


def test_every_edge_has_its_origin_and_time(known_consumers: ConsumerMap) -> None:
    (found_pod,) = affected_pods(known_consumers, DeviceRef(DRIVER, "node-1", gpu(7, 0)))
    provenances = {edge.provenance.origin: edge.provenance for edge in found_pod.edges}
    assert set(provenances) == {Origin.CHECKPOINT, Origin.PODRESOURCES, Origin.PODS_API}
    assert all(provenance.read_at == NOW for provenance in provenances.values())
    assert provenances[Origin.CHECKPOINT].written_s is not None
    assert provenances[Origin.PODS_API].written_s is None


def test_only_the_pod_without_a_reservation_would_be_refused(known_consumers: ConsumerMap) -> None:
    (risk,) = refused_pods(known_consumers)
    assert (risk.pod.uid, risk.claim.name, risk.kubelets) == ("u-0", SHARED, KubeletsRefusingPod.ALL)


def test_node_without_sockets_gives_uids_and_missing_sources(tmp_path: Path) -> None:
    write_files(tmp_path)
    known = map_of_node(tmp_path)
    assert [(gap.provenance.origin, gap.absence) for gap in known.missing_sources] == [
        (Origin.PODRESOURCES, Absence.ABSENT),
        (Origin.PODS_API, Absence.ABSENT),
    ]
    (found_pod,) = affected_pods(known, DeviceRef(DRIVER, "node-1", gpu(0, 0)))
    assert (found_pod.pod.ref, found_pod.is_certain, found_pod.containers) == (PodRef(uid="u-0"), True, ())
    (named,) = pods_by_name(known, "team-a", "pod-u-1")  # named by its reservation
    assert named.ref.uid == "u-1"
