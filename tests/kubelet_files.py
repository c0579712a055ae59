"""Checkpoints of claims in the kubelet's format, built without code of the agent."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

DRIVER = "gpu.example.com"


def crc32(data: bytes) -> int:
    """Return the checksum of a checkpoint: CRC-32 of IEEE 802.3, bit by bit."""
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
    """Return a device entry of a checkpoint."""
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
    """Return a claim entry of a checkpoint; its default name comes from its UID."""
    return {
        "ClaimUID": uid,
        "ClaimName": name or f"claim-{uid}",
        "Namespace": namespace,
        "PodUIDs": {pod: {} for pod in pods} if pods is not None else None,
        "DriverState": drivers,
    }


def devices(*found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the driver state of a claim with one driver and these devices."""
    return {DRIVER: {"Devices": list(found)}}


def checkpoint(claims: Sequence[Mapping[str, Any]] | None, **more: Any) -> bytes:
    """Return the file with a valid checksum."""
    data = {
        "kind": "DRACheckpoint",
        "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1",
        "ClaimInfoStateList": claims,
        **more,
    }
    return with_checksum(json.dumps(data, separators=(",", ":")))


def with_checksum(text: str) -> bytes:
    """Return a file with this text and a checksum."""
    return json.dumps({"Data": text, "Checksum": crc32(text.encode())}, separators=(",", ":")).encode()
