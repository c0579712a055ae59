"""Checkpoints of claims, made as the kubelet makes them but by nothing that the agent has."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

DRIVER = "gpu.example.com"


def crc32(data: bytes) -> int:
    """The checksum of a checkpoint: CRC-32 of IEEE 802.3, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xEDB88320 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def device(
    name: str = "gpu-0",
    *,
    pool: str = "node-1",
    share: str | None = None,
    requests: Sequence[str] | None = ("gpus",),
) -> dict[str, Any]:
    """A device of a driver, as it stands in a checkpoint."""
    return {
        "PoolName": pool,
        "DeviceName": name,
        "ShareID": share,
        "RequestNames": list(requests) if requests is not None else None,
        "CDIDeviceIDs": [f"example.com/gpu={name}"],
    }


def claim(
    uid: str,
    *,
    name: str = "",
    namespace: str = "team-a",
    pods: Iterable[str] | None = (),
    drivers: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A claim, as it stands in a checkpoint; named after its UID unless it is said otherwise."""
    return {
        "ClaimUID": uid,
        "ClaimName": name or f"claim-{uid}",
        "Namespace": namespace,
        "PodUIDs": {pod: {} for pod in pods} if pods is not None else None,
        "DriverState": drivers,
    }


def devices(*found: Mapping[str, Any]) -> dict[str, Any]:
    """A claim's drivers, of which there is one, with these devices."""
    return {DRIVER: {"Devices": list(found)}}


def checkpoint(claims: Sequence[Mapping[str, Any]] | None, **more: Any) -> bytes:
    """The file, its sum right."""
    data = {
        "kind": "DRACheckpoint",
        "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1",
        "ClaimInfoStateList": claims,
        **more,
    }
    return sealed(json.dumps(data, separators=(",", ":")))


def sealed(text: str) -> bytes:
    """A file with that text in it, and its sum."""
    return json.dumps({"Data": text, "Checksum": crc32(text.encode())}, separators=(",", ":")).encode()
