"""The words of a verdict: severities, findings, causes, and what is said of a device."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple

from agent.model.time import Instant

_new: Final = tuple.__new__  # what a NamedTuple calls itself with takes each field by its name, in Python


class Severity(IntEnum):
    """How bad a finding is. Ordered: the greater one leads, and never hides behind a lesser.

    A proven fault outranks a lack of knowledge, and a lack of knowledge outranks a fault that
    leaves the device usable.
    """

    OK = 0
    INFO = 1
    """Worth knowing; never on the kubelet's wire."""
    DEGRADED = 2
    """Works, but not as it should: HEALTHY on the wire, with a message."""
    UNKNOWN = 3
    UNHEALTHY = 4


class Health(IntEnum):
    """The wire's three states; the numbers are the DRA health API's (KEP-4680)."""

    UNKNOWN = 0
    HEALTHY = 1
    UNHEALTHY = 2


class Blame(StrEnum):
    """Who can mend it."""

    HARDWARE = "hardware"
    DRIVER = "driver"
    WORKLOAD = "workload"
    CONFIGURATION = "configuration"
    AGENT = "agent"
    """The agent itself or what it reads from: nothing is known to be wrong with the device."""


class XidOverride(StrEnum):
    """What an operator may make of an XID, whatever its row in the table says."""

    IGNORE = "ignore"
    INFO = "info"
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"


class Finding(NamedTuple):
    """A rule's answer about one subject in one snapshot."""

    code: str
    """Stable dotted code, e.g. ``mem.hugepages.pool_shrunk``."""
    severity: Severity
    evidence: str = ""
    """One line with the numbers that were compared. Stable while the facts are."""
    advice: str = ""
    """What to do, where it depends on what was found; else the rule's own advice counts."""
    blame: Blame | None = None
    """Likewise."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A finding that has held: why a device is not simply Healthy."""

    code: str
    severity: Severity
    blame: Blame
    evidence: str
    advice: str
    since: Instant
    told: bool = False
    """By its driver, of a prepare that failed, and by nobody else: it proves nothing beyond that."""
    keep_away: bool = False
    """Whoever says so asks for a taint, though nothing is known to be wrong with the device."""


class DeviceHealth(NamedTuple):
    """The verdict on one device, ready to be sent. A tuple: in each look, all of them are made anew."""

    pool: str
    device: str
    kind: str
    health: Health
    severity: Severity
    message: str
    """At most 1,024 bytes of UTF-8, worst cause first, code first, no moving numbers."""
    since: Instant
    """When health, severity or message last changed."""
    verified: Instant
    """When its sources were last read to the end; a report alone does not move it."""
    timeout_s: int
    """The lease: how long the kubelet may believe this [s]."""
    causes: tuple[Cause, ...] = ()
    """Worst first."""
    attributes: tuple[tuple[str, str], ...] = ()
    """What the device is, by name: ``uuid``, ``pciBusId``, ``product``, ... What nobody knows is left out."""
    driver: str = ""
    """The driver that declared it; empty: it is the host's own."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Driver, pool and name: no two devices of a report have the same."""
        return (self.driver, self.pool, self.device)

    def again(self, verified: Instant, timeout_s: int) -> "DeviceHealth":
        """The same, verified anew."""
        pool, name, kind, health, severity, text, since, _, _, causes, attrs, driver = self
        said = (pool, name, kind, health, severity, text, since, verified, timeout_s, causes, attrs, driver)
        return _new(DeviceHealth, said)


@dataclass(frozen=True, slots=True)
class Note:
    """A cause that belongs to no device: a pod's cgroup, the node. Never on the wire."""

    subject: str
    """What it is about: ``node``, or ``pod 0f3c... (team-a/train-0) container main``. The pod's name is there
    if it is known; a container's may be its id."""
    cause: Cause
    devices: tuple[str, ...] = ()
    """Devices that the pod uses: ``<driver>/<pool>/<name>``, the host's own by their names alone."""


@dataclass(frozen=True, slots=True)
class NotApplicable:
    """A rule that this machine gives nothing to judge."""

    device: str
    code: str
    reason: str
