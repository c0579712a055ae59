"""Which devices a pod uses, as far as they are judged here: what its claims were prepared with.

A device is meant by driver, pool and name. A driver that declares its devices has those. To one that does not
the agent tells of the host's own, and a name in the node's pool is the host's device of that name. Devices of
other drivers are named, and that is all.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from agent.devices.inventory import Device
from agent.model.claim import DeviceRef
from agent.model.pods import PodsSample
from agent.model.settings import Settings


class Used(NamedTuple):
    """A device that a pod uses."""

    subject: str
    device: Device | None
    """None: nobody judges it here."""


@dataclass(frozen=True, slots=True)
class PodDevices:
    """Who uses what."""

    known: PodsSample | None
    """None: nobody knows."""
    devices: Mapping[str, Device]
    """All that are judged, by subject."""
    declaring: Collection[str]
    """Drivers that declare their devices."""
    settings: Settings

    def used(self, pod_uid: str) -> tuple[Used, ...]:
        """The devices that were prepared for a pod, each once."""
        refs = self.known.uses.get(pod_uid, ()) if self.known else ()
        return tuple(dict.fromkeys(map(self._used, refs)))

    def subject(self, pod_uid: str, container: str) -> str:
        """Whom a note is about: a pod by its UID, and by its name if that is known, and a container."""
        name = self.known.names.get(pod_uid) if self.known else None
        return _with(container, f"pod {pod_uid} ({name})" if name else f"pod {pod_uid}")

    def who(self, pod_uid: str, container: str) -> str:
        """The same for a device's message: by its name, or else its UID."""
        name = self.known.names.get(pod_uid) if self.known else None
        return _with(container, f"pod {name or pod_uid}")

    def _used(self, ref: DeviceRef) -> Used:
        subject = str(ref)
        if subject not in self.devices and self._is_hosts(ref):
            subject = ref.device
        return Used(subject, self.devices.get(subject))

    def _is_hosts(self, ref: DeviceRef) -> bool:
        is_told = ref.driver in self.settings.drivers and ref.driver not in self.declaring
        return is_told and ref.pool == self.settings.node and ref.device in self.devices


def _with(container: str, pod: str) -> str:
    return f"{pod} container {container}" if container else pod
