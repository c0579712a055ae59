"""ResourceClaims: as the API server has them, and what the kubelet has noted of those that it prepares.

Source of the second: kubelet ``cm/dra/claiminfo.go`` and ``state/``. Its file has another form here: what is
kept over a restart is the same, and no plugin reads it.
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
    """A ResourceClaim object of resource.k8s.io/v1.

    Args:
        name: Of the claim.
        uid: Of the claim.
        devices: What the scheduler gave it: request, driver, pool and device of each.
        pods: The uids of those that may use it, ``status.reservedFor``.
        namespace: Of the claim and of the pods.
        config: ``status.allocation.devices.config``.
    """
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": namespace, "name": name, "uid": uid},
        "spec": {"devices": {"requests": [{"name": one[0].partition("/")[0]} for one in devices]}},
        "status": {
            "allocation": {
                "devices": {
                    "results": [
                        dict(zip(("request", "driver", "pool", "device"), one, strict=True))
                        for one in devices
                    ],
                    "config": [dict(one) for one in config],
                }
            },
            "reservedFor": [{"resource": "pods", "name": f"pod-{pod}", "uid": pod} for pod in pods],
        },
    }


class PreparedDevice(NamedTuple):
    """A device as the driver returned it."""

    pool: str
    device: str
    requests: tuple[str, ...]
    cdi_ids: tuple[str, ...]
    share_id: str = ""


@dataclass(slots=True)
class ClaimInfo:
    """What is noted of a claim from its first prepare on until it is unprepared."""

    namespace: str
    name: str
    uid: str
    pods: set[str] = field(default_factory=set)
    """The uids of those that use it."""
    drivers: dict[str, list[PreparedDevice]] = field(default_factory=dict)
    """What each driver of the claim returned, in that order; again with every prepare that got so far."""
    prepared: bool = False
    """Not kept over a restart of the kubelet."""


def new_claim_info(claim: Mapping[str, Any]) -> ClaimInfo:
    """Of a claim that was never prepared here.

    Raises:
        ValueError: it is not allocated. The words are inferred.
    """
    allocation = claim["status"].get("allocation")
    if allocation is None:
        raise ValueError("not allocated")
    meta = claim["metadata"]
    drivers = {result["driver"]: [] for result in allocation["devices"]["results"]}
    return ClaimInfo(meta["namespace"], meta["name"], meta["uid"], drivers=drivers)


class ClaimInfos:
    """Of all claims. Held with :meth:`locked` while it is read or changed."""

    def __init__(self, file: Path) -> None:
        """
        Args:
            file: Where it is kept over the end of the kubelet, of whatever kind; read now, if it is there.
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
    def locked(self) -> Iterator[dict[tuple[str, str], ClaimInfo]]:
        """All of them, by namespace and name, for as long as nobody else may have them."""
        with self._lock:
            yield self._infos

    def save(self) -> None:
        """Writes the file; while it is :meth:`locked`."""
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
