"""The words of a failed prepare: of what kind it is, what shows that, and what follows."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.health import Health
from agent.model.taint import Effect


class ErrorClass(StrEnum):
    """What kind of failure it is: whether waiting helps, and who can mend it."""

    UNKNOWN = "unknown"
    """Nothing shows what it is. Handled like transient."""
    TRANSIENT = "transient"
    """Trying again can help."""
    BAD_CONFIG = "bad-config"
    """What the user asked for can never be had: the claim must change."""
    FAILED_DEVICE = "failed-device"
    """A device of the claim is broken: it is Unhealthy, and offered to be tainted."""
    PERMANENT = "permanent"
    """Neither: the node or the driver must change."""


class Scope(StrEnum):
    """How far it reaches."""

    CLAIM = "claim"
    DEVICE = "device"
    DRIVER = "driver"
    NODE = "node"


class Operation(StrEnum):
    """What a driver was doing when it failed: the same errno means something else in each."""

    DEVICE = "device"
    """Opening, reading or setting up the device itself."""
    CDI = "cdi"
    """Writing a CDI file."""
    STATE = "state"
    """Its own checkpoint."""
    CONFIG = "config"
    """Reading what the user asked for: a ValueError in here is the user's."""
    API = "api"
    """Asking the API server."""
    LOCK = "lock"
    """Waiting for its own lock."""
    CGROUP = "cgroup"
    """Writing a cgroup's file."""


class Remediation(NamedTuple):
    """The taint that is offered for a device: its key is made of the code."""

    effect: Effect
    value: str = ""


@dataclass(frozen=True, slots=True)
class PrepareVerdict:
    """What is said of one claim that could not be prepared."""

    error_class: ErrorClass
    code: str
    """Stable dotted code, ``gpu.xid.79``, ``config.decode``."""
    scope: Scope
    claim: ClaimRef
    summary: str
    """One line of at most 200 characters, with the numbers that were compared. Stable while the facts are."""
    requests: tuple[str, ...] = ()
    """Of the claim, those that failed."""
    devices: tuple[DeviceRef, ...] = ()
    """Those to blame; with a class that blames no device, those that were to be prepared."""
    detail: str = ""
    """More, likewise stable."""
    evidence: tuple[str, ...] = ()
    """What showed it, the strongest first: ``errno ENOSPC while cdi``, ``NVML 15 (GPU_IS_LOST)``."""
    confidence: float = 0.0
    """From 0, a guess, to 1, proof."""
    advice: str = ""
    retry_after_s: float | None = None
    """When trying again can help at the earliest; None: nobody knows, or it cannot."""
    sticky_s: int = 0
    """For how long the same question may get the same answer without trying [s]."""
    health: Health | None = None
    """What follows for the devices; None: nothing."""
    taint: Remediation | None = None
    first_wall_s: float = 0.0
    last_wall_s: float = 0.0
    count: int = 1
    """How often it was so, one after the other."""


class Outcome(NamedTuple):
    """How the last prepare of a claim ended."""

    claim: ClaimRef
    fingerprint: str
    """Of the claim's allocation and parameters."""
    generation: str
    """Of what was known of its devices then."""
    devices: tuple[DeviceRef, ...]
    at_wall_s: float
    verdict: PrepareVerdict | None
    """None: it was prepared."""


class DriverFault(NamedTuple):
    """A device that its driver found broken, or could not hand out, while preparing a claim."""

    number: int
    """Unique in the driver's records, growing."""
    device: DeviceRef
    code: str
    evidence: str
    advice: str
    told_wall_s: float
    claim: ClaimRef
    excused_wall_s: float = 0.0
    """Since when the driver prepares the device again, or the time limit is over; 0: not yet."""
    health: Health = Health.UNHEALTHY
    """UNKNOWN: the driver or the node is at fault, and nobody can tell how the device is."""
    keep_away: bool = True
    """It is offered to be tainted."""

    @property
    def subject(self) -> str:
        """What the device is tracked by."""
        return str(self.device)
