"""Verdicts and their parts: severities, findings, causes, and the health of a device."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple

from agent.model.time import Instant

_new: Final = tuple.__new__  # a NamedTuple's own __new__ parses keywords in Python, which costs time


class Severity(IntEnum):
    """Severity of a finding. Ordered: the greater one determines the verdict.

    A proven fault outranks a lack of knowledge, and a lack of knowledge outranks a fault that
    leaves the device usable.
    """

    OK = 0
    INFO = 1
    """Information for operators; never sent to the kubelet."""
    DEGRADED = 2
    """The device works with limitations: HEALTHY for the kubelet, with a message."""
    UNKNOWN = 3
    UNHEALTHY = 4


class Health(IntEnum):
    """Health as the kubelet receives it; the numbers are those of the DRA health API (KEP-4680)."""

    UNKNOWN = 0
    HEALTHY = 1
    UNHEALTHY = 2


class Blame(StrEnum):
    """Area in which a fault must be fixed."""

    HARDWARE = "hardware"
    DRIVER = "driver"
    WORKLOAD = "workload"
    CONFIGURATION = "configuration"
    AGENT = "agent"
    """The agent or one of its sources; the device itself has no known fault."""


class XidOverride(StrEnum):
    """Severity that an operator sets for an XID instead of the table's severity."""

    IGNORE = "ignore"
    INFO = "info"
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"


class Finding(NamedTuple):
    """Fault that a rule finds in one snapshot for one device, pod or the node."""

    code: str
    """Stable dotted code, ``mem.hugepages.pool_shrunk``."""
    severity: Severity
    evidence: str = ""
    """One line with the compared numbers. It changes only when the facts change."""
    advice: str = ""
    """Action for the operator; empty: the rule's advice applies."""
    blame: Blame | None = None
    """Area in which the fault must be fixed; None: the rule's area applies."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A raised finding: a reason why a device is not simply Healthy."""

    code: str
    severity: Severity
    blame: Blame
    evidence: str
    advice: str
    since: Instant
    driver_reported: bool = False
    """True: only the device's driver reported the fault, after a failed prepare. False: a rule found it."""
    keep_away: bool = False
    """True: the reporter requests a taint although no fault of the device is known."""


class DeviceHealth(NamedTuple):
    """Verdict on one device, ready to be sent. A tuple, since each evaluation creates all of them."""

    pool: str
    device: str
    kind: str
    health: Health
    severity: Severity
    message: str
    """Text, at most 1,024 bytes of UTF-8: worst cause first, each after its code, no changing numbers."""
    since: Instant
    """Time of the last change of health, severity or message."""
    verified: Instant
    """Time at which the device's sources last finished a pass. Sending a report does not change it."""
    timeout_s: int
    """Lease: how long the kubelet may use this verdict [s]."""
    causes: tuple[Cause, ...] = ()
    """Causes, worst first."""
    attributes: tuple[tuple[str, str], ...] = ()
    """Attributes as (name, value): ``uuid``, ``pciBusId``, ``product``, ...; unknown ones are left out."""
    driver: str = ""
    """Driver that declared the device; empty: a host device."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Driver, pool and name of the device; unique within a report."""
        return (self.driver, self.pool, self.device)

    def again(self, verified: Instant, timeout_s: int) -> "DeviceHealth":
        """Return the same verdict with a new verification time and lease."""
        pool, name, kind, health, severity, text, since, _, _, causes, attrs, driver = self
        fields = (pool, name, kind, health, severity, text, since, verified, timeout_s, causes, attrs, driver)
        return _new(DeviceHealth, fields)


@dataclass(frozen=True, slots=True)
class Note:
    """Cause that concerns a pod or the Kubernetes node instead of a device. Never sent to the kubelet."""

    subject: str
    """Concerned object: ``node``, or ``pod 0f3c... (team-a/train-0) container main``. The pod's name is
    present if known; a container is given by name or id."""
    cause: Cause
    devices: tuple[str, ...] = ()
    """Devices that the pod uses: ``<driver>/<pool>/<name>``, host devices by name."""


@dataclass(frozen=True, slots=True)
class NotApplicable:
    """A rule that does not apply to this machine, with the reason."""

    device: str
    code: str
    reason: str
