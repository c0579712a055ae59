"""Classification of failed prepare calls of a DRA driver: error class, evidence and consequences."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.health import Effect, Health, Repair


class ErrorClass(StrEnum):
    """Class of a prepare failure: whether a retry can help, and what must change first."""

    UNKNOWN = "unknown"
    """No evidence shows the cause. Treated like TRANSIENT."""
    TRANSIENT = "transient"
    """The cause is expected to pass: a retry can succeed."""
    BAD_CONFIG = "bad-config"
    """The user's claim is invalid: the claim must change."""
    FAILED_DEVICE = "failed-device"
    """A device of the claim is faulty: it becomes Unhealthy and gets a taint."""
    PERMANENT = "permanent"
    """Retries fail until the machine or the driver changes."""


class Scope(StrEnum):
    """Object that a prepare failure concerns: the claim, a device, the driver or the Kubernetes node."""

    CLAIM = "claim"
    DEVICE = "device"
    DRIVER = "driver"
    NODE = "node"


class Operation(StrEnum):
    """Operation of a driver during which the prepare of a claim failed.

    The meaning of an errno depends on the operation.
    """

    DEVICE = "device"
    """The driver was opening, reading or configuring the device."""
    CDI = "cdi"
    """The driver was writing a CDI file."""
    STATE = "state"
    """The driver was reading or writing its checkpoint."""
    CONFIG = "config"
    """The driver was reading the claim's parameters: a ValueError here is an error in the claim."""
    API = "api"
    """The driver was calling the API server."""
    LOCK = "lock"
    """The driver was waiting for its lock."""
    CGROUP = "cgroup"
    """The driver was writing a cgroup file."""


class FaultTaint(NamedTuple):
    """Taint that a failed prepare puts on a device.

    The key of the taint is derived from a code such as ``gpu.xid.79``.
    """

    effect: Effect
    value: str = ""


@dataclass(frozen=True, slots=True)
class PrepareVerdict:
    """Classification of the failed prepare of one claim."""

    error_class: ErrorClass
    code: str
    """Stable dotted code of the failure's cause, ``gpu.xid.79``, ``config.decode``."""
    scope: Scope
    claim: ClaimRef
    summary: str
    """Description of the failure in one line of at most 200 characters; equal failures give the same line."""
    requests: tuple[str, ...] = ()
    """Names of the claim's requests that could not be prepared."""
    devices: tuple[DeviceRef, ...] = ()
    """Devices to blame; for a class that blames no device, the devices of ``requests``."""
    detail: str = ""
    """Further lines that describe the failure; equal failures give the same text."""
    evidence: tuple[str, ...] = ()
    """Evidence, the strongest first: ``errno ENOSPC while cdi``, ``NVML 15 (GPU_IS_LOST)``."""
    confidence: float = 0.0
    """Confidence in the error class, from 0 (guess) to 1 (proof)."""
    advice: str = ""
    retry_after_s: float | None = None
    """Time after which a retry can succeed [s]; None: unknown, or a retry cannot help."""
    sticky_s: int = 0
    """Time for which this verdict answers the same prepare without a new attempt [s]; 0: always attempt."""
    health: Health | None = None
    """Health that ``devices`` get; None: their health does not change."""
    taint: FaultTaint | None = None
    """Taint that ``devices`` get; None: no taint."""
    first_wall_s: float = 0.0
    last_wall_s: float = 0.0
    count: int = 1
    """Number of consecutive failures of this claim's prepare with the same verdict."""
    repair: Repair = Repair.NONE
    """Repair of the devices that failed, the worst of several; NONE: none is needed or known."""
    request_devices: int = 0
    """Number of devices of ``requests``, if several of them are broken; else 0."""


class OtherDriverFailure(NamedTuple):
    """Failure of another DRA driver to prepare a claim of the same pod."""

    driver: str
    verdict: PrepareVerdict


class LastPrepareResult(NamedTuple):
    """Result of the last prepare of one claim."""

    claim: ClaimRef
    fingerprint: str
    """Hash of the claim's allocation and parameters."""
    generation: str
    """Hash of the health of the claim's devices at that time; if it changes, the result is outdated."""
    devices: tuple[DeviceRef, ...]
    at_wall_s: float
    verdict: PrepareVerdict | None
    """Verdict on the failed prepare; None: the prepare succeeded."""


class DriverFault(NamedTuple):
    """Fault of a device that its DRA driver reported when the prepare of a claim failed."""

    number: int
    """Number of the fault, unique among the driver's faults; later faults have greater numbers."""
    device: DeviceRef
    code: str
    evidence: str
    advice: str
    reported_wall_s: float
    claim: ClaimRef
    expired_wall_s: float = 0.0
    """Time when the fault ended: the driver prepared the device again, or a time limit passed [s since 1970];
    0: active."""
    health: Health = Health.UNHEALTHY
    """Health of the device. UNKNOWN: the driver or the machine is at fault, not the device."""
    keep_away: bool = True
    """True: the device gets a taint. False: it gets none."""
    repair: Repair = Repair.NONE
    """Repair of the device; NONE: none is needed or known."""

    @property
    def subject(self) -> str:
        """Key of the faulty device in the health engine: ``<driver>/<pool>/<device>``."""
        return str(self.device)
