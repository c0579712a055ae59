"""The kubelet's own DRA manager without plugins: a test gives it claims, lists of health, and passes time."""

import base64
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kubelet import Pod, ResourceHealth
from kubelet.claims import ClaimInfo
from kubelet.health import DeviceHealth

from kubelet_real.kubelet import claim_info, pod_object, resources_of
from kubelet_real.program import Program

FULL: Final = "DRA health update channel is full, discarding pod update notification"
_numbers = itertools.count(1)


class ManagerProgram(Program):
    """The Go program, for managers without plugins. Its API server does not exist."""

    def __init__(self, binary: Path, root: Path) -> None:
        self._dropped: list[frozenset[str]] = []
        nowhere = ("--node", "node-1", "--server", "http://127.0.0.1:9")
        super().__init__(binary, root, *nowhere, on_event=self._on_report)

    def _on_report(self, report: Mapping[str, Any]) -> None:
        if report["event"] == "log" and report["message"] == FULL:
            self._dropped.append(frozenset(report["values"]["pods"]))

    def dropped_notifications(self) -> list[frozenset[str]]:
        """Return the pods of each dropped notification since the last call."""
        found, self._dropped = self._dropped, []
        return found


class RealManager:
    """One manager. A restart reads the files that the last one left."""

    def __init__(
        self, program: ManagerProgram, directory: Path, encode: Callable[[Sequence[Any]], bytes]
    ) -> None:
        """Args:
        program: The Go program.
        directory: Where the manager keeps its files.
        encode: Encodes a list of health with these entries.
        """
        self._program = program
        self._number = next(_numbers)
        self._root = directory
        self._encode = encode
        self.saves = 0
        """The number of times the file with the health was written by :meth:`update`."""
        self._call("open", Root=str(directory))

    def restart(self, *claims: ClaimInfo) -> None:
        """Replace the manager, with these prepared claims if there are any."""
        given = {"Claims": [_claim_state(claim) for claim in claims]} if claims else {}
        self._call("open", Root=str(self._root), **given)

    def pass_time(self, seconds: float) -> None:
        """Make all entries older."""
        self._call("pass", Seconds=seconds)

    def update(self, driver: str, entries: Sequence[Any]) -> list[tuple[str, str]]:
        """Store a list of health. Returns name and health of the changed devices."""
        found = self._call("update", Driver=driver, Wire=self._wire(entries))
        self.saves += found["saved"]
        return [(device["DeviceName"], device["Health"]) for device in found["changed"]]

    def get(self, driver: str, pool: str, device: str) -> DeviceHealth:
        """Return the current health of a device."""
        found = self._call("health", Driver=driver, Pool=pool, Device=device)
        return DeviceHealth(pool, device, found["Health"], 0, found["HealthCheckTimeout"], found["Message"])

    def clear(self, driver: str) -> None:
        """Forget the health of a driver's devices."""
        self._call("clear", Driver=driver)

    def receive(self, driver: str, entries: Sequence[Any]) -> None:
        """Give a message to the driver's health stream, which the first message opens."""
        self._call("message", Driver=driver, Wire=self._wire(entries))

    def end_stream(self, driver: str) -> None:
        """End the driver's health stream in order."""
        self._call("end", Driver=driver)

    def notified_pods(self) -> list[frozenset[str]]:
        """Return the pods of each notification since the last call."""
        return [frozenset(pods) for pods in self._call("notified")]

    def dropped_notifications(self) -> list[frozenset[str]]:
        """Return the pods of each dropped notification since the last call."""
        return self._program.dropped_notifications()

    def status(self, pod: Pod) -> dict[str, tuple[ResourceHealth, ...]]:
        """Return the entries of the pod's only container in its status."""
        statuses = self._call("status", Pod=pod_object(pod.uid, pod.namespace, pod.claims, pod.containers))
        (found,) = resources_of(statuses).values()
        return found

    def claim(self, name: str) -> ClaimInfo:
        """Return the stored state of a claim."""
        given = pod_object("", "default", {name: name}, {"main": (name,)})
        (found,) = self._call("claims", Pod=given)
        return claim_info(found)

    def _wire(self, entries: Sequence[Any]) -> str:
        return base64.b64encode(self._encode(entries)).decode()

    def _call(self, verb: str, **arguments: Any) -> Any:
        return self._program.call(verb, Manager=self._number, **arguments)


def _claim_state(claim: ClaimInfo) -> dict[str, Any]:
    """Return a claim as the kubelet's checkpoint has it."""
    return {
        "ClaimUID": claim.uid,
        "ClaimName": claim.name,
        "Namespace": claim.namespace,
        "PodUIDs": {pod: {} for pod in claim.pods},
        "DriverState": {
            driver: {
                "Devices": [
                    {
                        "PoolName": device.pool,
                        "DeviceName": device.device,
                        "ShareID": device.share_id or None,
                        "RequestNames": device.requests,
                        "CDIDeviceIDs": device.cdi_ids,
                    }
                    for device in devices
                ]
            }
            for driver, devices in claim.drivers.items()
        },
    }
