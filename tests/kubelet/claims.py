"""ResourceClaims in the API server, and the kubelet's stored state of the claims that it prepares.

The stored state follows kubelet ``cm/dra/claiminfo.go`` and ``state/``. The file format differs from the
kubelet's: what survives a restart is the same, and no plugin reads the file.
"""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


def allocated_claim(
    name: str,
    uid: str,
    *devices: tuple[str, str, str, str],
    pods: Sequence[str],
    namespace: str = "default",
    config: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return a ResourceClaim object of resource.k8s.io/v1.

    Args:
        name: The claim's name.
        uid: The claim's uid.
        devices: The allocated devices: request, driver, pool and device of each.
        pods: The uids of the pods that may use the claim, ``status.reservedFor``.
        namespace: The namespace of the claim and of the pods.
        config: ``status.allocation.devices.config``.
    """
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": namespace, "name": name, "uid": uid},
        "spec": {"devices": {"requests": [{"name": device[0].partition("/")[0]} for device in devices]}},
        "status": {
            "allocation": {
                "devices": {
                    "results": [
                        dict(zip(("request", "driver", "pool", "device"), device, strict=True))
                        for device in devices
                    ],
                    "config": [dict(item) for item in config],
                }
            },
            "reservedFor": [{"resource": "pods", "name": f"pod-{pod}", "uid": pod} for pod in pods],
        },
    }


class PreparedDevice(NamedTuple):
    """A device that the driver returned for a claim."""

    pool: str
    device: str
    requests: tuple[str, ...]
    cdi_ids: tuple[str, ...]
    share_id: str = ""


@dataclass(slots=True)
class ClaimInfo:
    """The kubelet's state of a claim, from its first prepare until it is unprepared."""

    namespace: str
    name: str
    uid: str
    pods: set[str] = field(default_factory=set)
    """The uids of the pods that use the claim."""
    drivers: dict[str, list[PreparedDevice]] = field(default_factory=dict)
    """The devices that each driver returned, in order."""
    prepared: bool = False
    """Does not survive a restart of the kubelet."""
    unpreparing: bool = False
    """Whether the unprepare for its last pod has begun. Does not survive a restart either."""


def new_claim_info(claim: Mapping[str, Any]) -> ClaimInfo:
    """Return the state of a claim that was not prepared here before.

    Raises:
        ValueError: the claim is not allocated. The kubelet's text is assumed.
    """
    allocation = claim["status"].get("allocation")
    if allocation is None:
        raise ValueError("not allocated")
    meta = claim["metadata"]
    drivers = {result["driver"]: [] for result in allocation["devices"]["results"]}
    return ClaimInfo(meta["namespace"], meta["name"], meta["uid"], drivers=drivers)


class ClaimInfos:
    """The state of all claims. Use :meth:`locked` to read or change it."""

    def __init__(self, file: Path) -> None:
        """Args:
        file: Keeps the state when the kubelet stops or crashes. An existing file is loaded.
        """
        self._file = file
        self._lock = threading.Lock()
        self._infos: dict[tuple[str, str], ClaimInfo] = {}
        if file.exists():
            for kept in json.loads(file.read_text()):
                drivers = {
                    driver: [
                        PreparedDevice(pool, device, tuple(requests), tuple(ids), share)
                        for pool, device, requests, ids, share in devices
                    ]
                    for driver, devices in kept["drivers"].items()
                }
                info = ClaimInfo(
                    kept["namespace"], kept["name"], kept["uid"], set(kept["pods"]), drivers, prepared=False
                )
                self._infos[info.namespace, info.name] = info

    @contextmanager
    def lock_infos(self) -> Iterator[dict[tuple[str, str], ClaimInfo]]:
        """Yield all claims by namespace and name, and hold the lock meanwhile."""
        with self._lock:
            yield self._infos

    def save(self) -> None:
        """Write the file. The caller holds the lock."""
        kept = [
            {
                "namespace": info.namespace,
                "name": info.name,
                "uid": info.uid,
                "pods": sorted(info.pods),
                "drivers": info.drivers,
            }
            for info in self._infos.values()
        ]
        new = self._file.with_name(f"{self._file.name}.tmp")
        new.write_text(json.dumps(kept))
        new.rename(self._file)
