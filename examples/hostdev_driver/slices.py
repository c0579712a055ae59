"""ResourceSlices of the driver: its devices for the scheduler, with the taints of drahealth.

The kubelet deletes the slices when the driver is away for long, and when the kubelet starts, so they are
compared periodically. Up-to-date slices are not written.
"""

import logging
import threading
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode

import drahealth
from hostdev_driver.api import ApiServer, path_of
from hostdev_driver.host import Found, Host, format_size, parse_cpus, parse_size_kib

DEVICES_MAX: Final = 64
"""Most devices in a slice. The API server accepts 128 untainted ones, but a device that gets a taint should
not have to move to another slice."""
SLICES: Final = path_of("apis", "resource.k8s.io", "v1", "resourceslices")
NAME_BYTES: Final = 253

log = logging.getLogger(__name__)


class Publisher:
    """Publisher of one node's slices. Thread-safe."""

    def __init__(self, api: ApiServer, driver: str, host: Host) -> None:
        self._api = api
        self._driver = driver
        self._host = host
        self._lock = threading.Lock()
        self._taints: drahealth.Taints | None = None

    def publish(self, taints: drahealth.Taints) -> None:
        """Publish the slices with these taints; ``Monitor.on_taints`` retries after an exception.

        Raises:
            ApiError, OSError: As :meth:`ApiServer.call`; some slices may have been published.
        """
        with self._lock:
            self._taints = taints
            self._publish(taints)

    def refresh(self) -> None:
        """Publish the last state again, if slices differ. Raises nothing: the next call comes soon."""
        with self._lock:
            if self._taints is None:
                return
            try:
                self._publish(self._taints)
            except Exception as error:  # e.g. the API server is unreachable; the driver goes on
                log.warning("ResourceSlices could not be refreshed: %s", error)

    def _publish(self, taints: drahealth.Taints) -> None:
        existing = self._existing()
        wanted = self._wanted(devices_of(self._host, taints, self._driver), existing)
        for name, spec in wanted.items():
            found = existing.get(name)
            if found is None:
                self._api.call("POST", SLICES, self._slice(name, spec))
            elif not _is_up_to_date(found["spec"], spec):
                version = {"resourceVersion": found["metadata"]["resourceVersion"]}
                self._api.call("PUT", SLICES + path_of(name), self._slice(name, spec, version))
        for name in existing.keys() - wanted.keys():
            self._api.call("DELETE", SLICES + path_of(name))

    def _existing(self) -> dict[str, Any]:
        chosen = urlencode({"fieldSelector": f"spec.driver={self._driver},spec.nodeName={self._host.pool}"})
        return {one["metadata"]["name"]: one for one in self._api.call("GET", f"{SLICES}?{chosen}")["items"]}

    def _wanted(
        self, devices: list[dict[str, Any]], existing: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Return the wanted specs by name.

        The scheduler ignores slices of a lower generation, so it never sees a partial change. A change of
        taints needs no new generation.
        """
        starts = range(0, max(len(devices), 1), DEVICES_MAX)
        parts = {self._name(start // DEVICES_MAX): devices[start : start + DEVICES_MAX] for start in starts}
        generation = max((int(one["spec"]["pool"]["generation"]) for one in existing.values()), default=0)
        published = {name: _untainted(one["spec"].get("devices") or []) for name, one in existing.items()}
        if published != {name: _untainted(part) for name, part in parts.items()}:
            generation += 1
        pool = {"name": self._host.pool, "generation": generation, "resourceSliceCount": len(parts)}
        common = {"driver": self._driver, "nodeName": self._host.pool, "pool": pool}
        return {name: {**common, "devices": part} for name, part in parts.items()}

    def _name(self, number: int) -> str:
        name = f"{self._host.pool}-{self._driver}-{number}"
        if len(name) > NAME_BYTES:
            raise drahealth.ConfigError(
                f"{name!r} is {len(name)} bytes, limit {NAME_BYTES} for a ResourceSlice"
            )
        return name

    def _slice(
        self, name: str, spec: Mapping[str, object], more: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        """Return a slice that is deleted with its node."""
        node = self._api.call("GET", path_of("api", "v1", "nodes", self._host.pool))["metadata"]
        owner = {
            "apiVersion": "v1",
            "kind": "Node",
            "name": node["name"],
            "uid": node["uid"],
            "controller": True,
        }
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": name, "ownerReferences": [owner], **(more or {})},
            "spec": spec,
        }


def devices_of(host: Host, taints: drahealth.Taints, driver: str) -> list[dict[str, Any]]:
    """Return all devices in the format of a ResourceSlice."""
    found = []
    for name, one in host.found.items():
        device = {"name": name, **_facts(one)}
        if tainted := taints.devices.get(drahealth.DeviceRef(driver, host.pool, name)):
            device["taints"] = drahealth.taint_objects(tainted)
        found.append(device)
    return found


def _facts(found: Found) -> dict[str, Any]:
    """Return the attributes and the capacity of a device, for selectors of claims."""
    part = found.device.part
    if isinstance(part, drahealth.Hugepages):
        size = {"value": format_size(part.pages * parse_size_kib(part.size))}
        return {
            "attributes": {
                "kind": {"string": "hugepages"},
                "pageSize": {"string": part.size},
                "numaNode": {"int": part.numa},
            },
            "capacity": {"pages": {"value": str(part.pages)}, "memory": size},
        }
    if isinstance(part, drahealth.Cpus):
        node = {} if part.numa is None else {"numaNode": {"int": part.numa}}
        return {
            "attributes": {"kind": {"string": "cpu"}, **node},
            "capacity": {"cpus": {"value": str(len(parse_cpus(part.cpus)))}},
        }
    assert isinstance(part, drahealth.Gpu)
    return {"attributes": {"kind": {"string": "gpu"}, "pciAddress": {"string": part.pci}}}


def _untainted(devices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in device.items() if key != "taints"} for device in devices]


def _is_up_to_date(spec: Mapping[str, object], wanted: Mapping[str, object]) -> bool:
    """Return whether a slice is up to date; the API server may have added default fields."""
    return all(spec.get(key) == value for key, value in wanted.items())
