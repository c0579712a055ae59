"""A ResourceClaim as a driver prepares it: what the scheduler allocated, and what the user asked for."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class ClaimRef(NamedTuple):
    """Which claim: all that the kubelet sends."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class DeviceRef(NamedTuple):
    """Which device, by the names of its ResourceSlice."""

    driver: str
    pool: str
    device: str

    def __str__(self) -> str:
        return f"{self.driver}/{self.pool}/{self.device}"


class ClaimDevice(NamedTuple):
    """One device that a claim was given. Source: ``status.allocation.devices.results[]``."""

    request: str
    """Of the claim; ``<request>/<subrequest>`` where the claim named alternatives."""
    driver: str
    pool: str
    device: str
    share_id: str = ""
    """Of a device that several claims consume a part of."""
    admin: bool = False
    """For administration: it may be in use."""
    consumed: tuple[tuple[str, str], ...] = ()
    """Capacity that the claim was given of it, by name, as Kubernetes writes quantities."""

    @property
    def ref(self) -> DeviceRef:
        """Which device."""
        return DeviceRef(self.driver, self.pool, self.device)


class ClaimConfig(NamedTuple):
    """Parameters for a driver. Source: ``status.allocation.devices.config[]``, the opaque ones."""

    source: str
    """``FromClass`` or ``FromClaim``; what the claim says comes after what its class says."""
    requests: tuple[str, ...]
    """Those that it is meant for; empty: all."""
    parameters: Mapping[str, object]
    """As the user wrote them: nobody has looked into them yet."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim with its allocation, as far as it is one driver's."""

    namespace: str
    name: str
    uid: str
    devices: tuple[ClaimDevice, ...] = ()
    """Of this driver alone, in the order of the allocation."""
    configs: tuple[ClaimConfig, ...] = ()
    """Likewise; the later outranks the earlier."""

    @property
    def ref(self) -> ClaimRef:
        """Which claim."""
        return ClaimRef(self.namespace, self.name, self.uid)

    @property
    def fingerprint(self) -> str:
        """Of allocation and parameters: what was said of a claim holds as long as this is the same."""
        said = [self.devices, [(one.source, one.requests, one.parameters) for one in self.configs]]
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=repr).encode()).hexdigest()[:16]
