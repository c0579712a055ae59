"""Files of a Kubernetes node with thousands of pods and claims.

They are the kubelet's checkpoint, and lists of objects as saved by kubectl.

The files are consistent: each claim is allocated, reserved and prepared for one pod, which references it. So
the agent reports neither conflicts nor risks for them.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.sources import kubelet_state

DRIVER: Final = "gpu.example.com"
POOL: Final = "node-1"
NAMESPACE: Final = "bench"


class NodePaths(NamedTuple):
    """Paths of the files that describe pods and claims of a Kubernetes node."""

    kubelet_dir: Path
    """Kubelet directory with the checkpoint and without sockets."""
    pods: Path
    """List of pods, as saved by kubectl."""
    claims: Path
    """List of claims, as saved by kubectl."""


def write_node_files(directory: Path, pods: int, claims: int) -> NodePaths:
    """Write the checkpoint, ``pods.json`` and ``claims.json`` of a Kubernetes node.

    Args:
        directory: Existing directory; also the kubelet directory.
        pods: Number of pods; pod ``n`` is ``bench/pod-<n>``.
        claims: Number of claims; claim ``n`` is ``bench/claim-<n>``, device ``gpu-<n>`` for pod ``n % pods``.
    """
    claims_by_pod: list[list[int]] = [[] for _ in range(pods)]
    for number in range(claims):
        claims_by_pod[number % pods].append(number)
    infos = [_claim_info(number, number % pods) for number in range(claims)]
    data = {
        "kind": kubelet_state.CLAIMS_CHECKPOINT_KIND,
        "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1",
        "ClaimInfoStateList": infos,
    }
    text = json.dumps(data, separators=(",", ":"))
    checkpoint = {"Data": text, "Checksum": zlib.crc32(text.encode())}
    (directory / kubelet_state.CLAIMS_FILE).write_text(json.dumps(checkpoint))
    files = NodePaths(directory, directory / "pods.json", directory / "claims.json")
    _write_list(files.pods, [_pod_object(number, claims) for number, claims in enumerate(claims_by_pod)])
    _write_list(files.claims, [_claim_object(number, number % pods) for number in range(claims)])
    return files


def pod_uid(number: int) -> str:
    """Return the UID of the made-up pod with this number."""
    return f"{number:08x}-0000-4000-8000-00000000beac"


def claim_uid(number: int) -> str:
    """Return the UID of the made-up claim with this number."""
    return f"{number:08x}-0000-4000-8000-000000000c1a"


def _write_list(path: Path, items: Sequence[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=4))


def _claim_info(number: int, pod: int) -> dict[str, Any]:
    device = {
        "PoolName": POOL,
        "DeviceName": f"gpu-{number}",
        "ShareID": None,
        "RequestNames": ["gpus"],
        "CDIDeviceIDs": [f"{DRIVER}/gpu={claim_uid(number)}"],
    }
    return {
        "ClaimUID": claim_uid(number),
        "ClaimName": f"claim-{number}",
        "Namespace": NAMESPACE,
        "PodUIDs": {pod_uid(pod): {}},
        "DriverState": {DRIVER: {"Devices": [device]}},
    }


def _pod_object(number: int, claims: Sequence[int]) -> dict[str, Any]:
    resources = {"claims": [{"name": f"c-{claim}"} for claim in claims]}
    pod = pod_object(f"pod-{number}", pod_uid(number), f"{number:064x}", resources)
    pod["spec"]["resourceClaims"] = [
        {"name": f"c-{claim}", "resourceClaimName": f"claim-{claim}"} for claim in claims
    ]
    return pod


def pod_object(name: str, uid: str, container_id: str, resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return a running pod with one container as an object of the Kubernetes API."""
    status = {
        "name": "main",
        "containerID": f"containerd://{container_id}",
        "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": NAMESPACE, "name": name, "uid": uid},
        "spec": {"nodeName": POOL, "containers": [{"name": "main", "resources": resources}]},
        "status": {"phase": "Running", "containerStatuses": [status]},
    }


def _claim_object(number: int, pod: int) -> dict[str, Any]:
    result = {"request": "gpus", "driver": DRIVER, "pool": POOL, "device": f"gpu-{number}"}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": NAMESPACE, "name": f"claim-{number}", "uid": claim_uid(number)},
        "spec": {"devices": {"requests": [{"name": "gpus"}]}},
        "status": {
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": f"pod-{pod}", "uid": pod_uid(pod)}],
        },
    }
