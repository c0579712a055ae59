"""ResourceClaims as a DRA driver prepares them: the allocation and the user's parameters."""

import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple


class ClaimRef(NamedTuple):
    """Identity of a ResourceClaim, as the kubelet sends it to DRA drivers."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class DeviceRef(NamedTuple):
    """Identity of a device: its driver, pool and name, as in the ResourceSlice."""

    driver: str
    pool: str
    device: str

    def __str__(self) -> str:
        return f"{self.driver}/{self.pool}/{self.device}"


class ClaimDevice(NamedTuple):
    """One allocated device of a claim. Source: ``status.allocation.devices.results[]``."""

    request: str
    """Name of the claim's request that the device serves; ``<request>/<subrequest>`` for one of
    alternatives."""
    driver: str
    pool: str
    device: str
    share_id: str = ""
    """Id of the claim's share of a device that several claims consume; empty: the whole device."""
    admin: bool = False
    """True: admin access, other claims may use the device at the same time. False: normal access."""
    consumed: tuple[tuple[str, str], ...] = ()
    """Capacity that the claim consumes, as (name, Kubernetes quantity)."""
    tolerates: bool = False
    """True: the claim tolerates a taint of the device that keeps pods off, whatever its key."""

    @property
    def accepts_faults(self) -> bool:
        """Whether the claim is prepared whatever the health of the device, for a pod that examines it."""
        return self.admin or self.tolerates

    @property
    def ref(self) -> DeviceRef:
        """Identity of the allocated device: driver, pool and name."""
        return DeviceRef(self.driver, self.pool, self.device)


class ClaimConfig(NamedTuple):
    """Opaque parameters for a driver. Source: ``status.allocation.devices.config[]``."""

    source: str
    """Origin of the parameters: ``FromClass`` or ``FromClaim``.

    Parameters from the class precede those from the claim.
    """
    requests: tuple[str, ...]
    """Names of the requests that the parameters apply to; empty: all requests."""
    parameters: Mapping[str, object]
    """Parameters as the user wrote them, not validated."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A ResourceClaim with the part of its allocation that belongs to one driver."""

    namespace: str
    name: str
    uid: str
    _: KW_ONLY
    devices: tuple[ClaimDevice, ...] = ()
    """Allocated devices of this driver, in the order of the allocation."""
    configs: tuple[ClaimConfig, ...] = ()
    """Opaque parameters for this driver; later ones override earlier ones."""

    @property
    def ref(self) -> ClaimRef:
        """Identity of the claim: namespace, name and UID."""
        return ClaimRef(self.namespace, self.name, self.uid)

    @property
    def fingerprint(self) -> str:
        """Hash of the claim's allocation and parameters.

        While the hash is unchanged, the result of an earlier prepare of the claim is still valid.
        """
        content = [
            [device[:7] for device in self.devices],  # without tolerations, which change no prepare
            [(config.source, config.requests, config.parameters) for config in self.configs],
        ]
        import hashlib  # loads OpenSSL: 3.7 MiB that the process of NVML saves

        return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()[:16]
