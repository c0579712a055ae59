"""Verdict on a failed prepare: class, evidence and consequences."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.health import Health
from agent.model.taint import Effect


class ErrorClass(StrEnum):
    """Class of a prepare error: whether a retry can help, and what must change."""

    UNKNOWN = "unknown"
    """No evidence shows the cause. Handled like transient."""
    TRANSIENT = "transient"
    """A retry can succeed."""
    BAD_CONFIG = "bad-config"
    """The claim cannot be satisfied as the user wrote it: the claim must change."""
    FAILED_DEVICE = "failed-device"
    """A device of the claim is faulty: it becomes Unhealthy and gets a taint."""
    PERMANENT = "permanent"
    """Retries fail until the node or the driver changes."""


class Scope(StrEnum):
    """Concerned part of a failed prepare: the claim, a device, the driver or the Kubernetes node."""

    CLAIM = "claim"
    DEVICE = "device"
    DRIVER = "driver"
    NODE = "node"


class Operation(StrEnum):
    """Operation during which a driver failed; the meaning of an errno depends on it."""

    DEVICE = "device"
    """Opening, reading or configuring the device."""
    CDI = "cdi"
    """Writing a CDI file."""
    STATE = "state"
    """Reading or writing the driver's checkpoint."""
    CONFIG = "config"
    """Reading the claim's parameters: a ValueError here is an error in the claim."""
    API = "api"
    """Calling the API server."""
    LOCK = "lock"
    """Waiting for the driver's lock."""
    CGROUP = "cgroup"
    """Writing a cgroup file."""


class Remediation(NamedTuple):
    """Taint that a failed prepare puts on a device; the taint's key is derived from the verdict's code."""

    effect: Effect
    value: str = ""


@dataclass(frozen=True, slots=True)
class PrepareVerdict:
    """Verdict on one claim whose prepare failed."""

    error_class: ErrorClass
    code: str
    """Stable dotted code, ``gpu.xid.79``, ``config.decode``."""
    scope: Scope
    claim: ClaimRef
    summary: str
    """One line of at most 200 characters with the compared numbers. It changes only when the facts change."""
    requests: tuple[str, ...] = ()
    """Requests of the claim that failed."""
    devices: tuple[DeviceRef, ...] = ()
    """Devices to blame; for a class that blames no device, the devices to be prepared."""
    detail: str = ""
    """Further text. It changes only when the facts change."""
    evidence: tuple[str, ...] = ()
    """Evidence, the strongest first: ``errno ENOSPC while cdi``, ``NVML 15 (GPU_IS_LOST)``."""
    confidence: float = 0.0
    """Confidence from 0 (guess) to 1 (proof)."""
    advice: str = ""
    retry_after_s: float | None = None
    """Earliest useful retry [s]; None: unknown, or a retry cannot help."""
    sticky_s: int = 0
    """Time for which this verdict may answer the same prepare without a new attempt [s]."""
    health: Health | None = None
    """Health that the devices get; None: no change."""
    taint: Remediation | None = None
    first_wall_s: float = 0.0
    last_wall_s: float = 0.0
    count: int = 1
    """Number of consecutive failures with this verdict."""


class Outcome(NamedTuple):
    """Result of a claim's last prepare."""

    claim: ClaimRef
    fingerprint: str
    """Hash of the claim's allocation and parameters."""
    generation: str
    """Hash of the known health of the claim's devices at that time."""
    devices: tuple[DeviceRef, ...]
    at_wall_s: float
    verdict: PrepareVerdict | None
    """Verdict of the failure; None: the prepare succeeded."""


class DriverFault(NamedTuple):
    """Fault of a device that its driver reported while preparing a claim."""

    number: int
    """Increasing number, unique within the driver's ledger."""
    device: DeviceRef
    code: str
    evidence: str
    advice: str
    reported_wall_s: float
    claim: ClaimRef
    expired_wall_s: float = 0.0
    """Time when the driver prepared the device again or the time limit passed [s since 1970]; 0: not yet."""
    health: Health = Health.UNHEALTHY
    """Health of the device. UNKNOWN: the driver or the node is at fault, the device's state is unknown."""
    keep_away: bool = True
    """True: the device gets a taint. False: it gets none."""

    @property
    def subject(self) -> str:
        """Key of the device in the engine's state."""
        return str(self.device)
