"""What ``drahealth explain`` was told by whom, and what it makes of that. Words only."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.cli.prepares.text import Claim
from agent.devices.consumers.reservations import Refusal
from agent.model.claim import DeviceRef
from agent.model.claim_sources import Belief, PodRef, Reservation, SourceAnswers
from agent.model.consumers import Affected, ClaimView, Conflict, PodView
from agent.model.health import DeviceHealth, Health, Note, Severity
from agent.model.prepare import DriverFault
from agent.model.reading import Absence
from agent.model.report import Report
from agent.model.taint import Taint
from agent.model.time import Instant
from agent.model.uses import DeviceUsage

AGENT: Final = "agent"
DRIVER_SOCKET: Final = "driver socket"
PREPARES: Final = "prepares"
TAINTS: Final = "taints"
HISTORY: Final = "history"

COSTS: Final[Mapping[str, str]] = {
    AGENT: "no evidence, no advice, since when",
    DRIVER_SOCKET: "not known what the kubelet is told there",
    "checkpoint": "not known what is prepared for whom; no UIDs, requests and CDI ids",
    "health-state": "not known what the kubelet believes",
    "podresources": "not known which containers the kubelet gave devices to",
    "pods-api": "no owners, pod groups, phases; no names for UIDs",
    "cgroups": "not known which pods and containers run",
    PREPARES: "not known how prepares ended",
    TAINTS: "not known what is tainted",
    HISTORY: "not known who used devices before",
    "claims-file": "no reservations: neither pod groups nor who would be refused",
}
"""What goes unknown without each source."""


_DENIED: Final = tuple(os.strerror(number) for number in (errno.EACCES, errno.EPERM))
"""Reasons have in them what the kernel said, whichever way it was asked."""


class Account(NamedTuple):
    """What became of one source."""

    source: str
    """A key of :data:`COSTS`, or ``pods-file``."""
    place: str
    """Its file, directory or socket; empty: it was not asked for."""
    read: Instant
    written_s: float | None = None
    """When the file was written, or the agent's picture made [s since 1970]."""
    found: str = ""
    """``12 claims``."""
    absence: Absence | None = None
    why: str = ""
    wrong: tuple[str, ...] = ()
    """What of it could not be used."""

    @property
    def denied(self) -> bool:
        """Whether it is there and this user may not read it: then another may know more."""
        return self.absence is Absence.UNREADABLE and any(text in self.why for text in _DENIED)


class Stream(NamedTuple):
    """What a socket tells of the devices of one driver, to the kubelet or to whoever forwards it."""

    socket: str
    of_agent: bool
    """The agent serves it, for a driver beside it."""
    report: Report


@dataclass(frozen=True, slots=True, repr=False)  # asyncio.run() asks for that of its result: half a second
class Gathered:
    """All that the sources gave."""

    now: Instant
    report: Report | None = None
    """Of the agent."""
    streams: Mapping[str, Stream] = field(default_factory=dict)
    """By driver."""
    heard: SourceAnswers = field(default_factory=SourceAnswers)
    beliefs: tuple[Belief, ...] = ()
    records: tuple[Claim, ...] = ()
    """How the last prepare of each claim ended."""
    broken: tuple[DriverFault, ...] = ()
    """Devices that drivers found broken and have not prepared since."""
    taints: Mapping[str, Mapping[DeviceRef, tuple[Taint, ...]]] = field(default_factory=dict)
    """By driver: what it is told to publish; of tainted devices alone."""
    recorded: tuple[DeviceUsage, ...] = ()
    """Uses of devices: those that went on when the agent last wrote, then those that ended last first."""
    accounts: tuple[Account, ...] = ()


# --- what follows ------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """How a device is."""

    health: DeviceHealth
    by: str
    """:data:`AGENT`, or the path of a driver's socket: that one tells neither causes nor since when."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device and what was said of it."""

    ref: DeviceRef
    """Of the host's own devices the driver is empty."""
    verdict: Verdict | None = None
    told: Verdict | None = None
    """What its driver's socket tells."""
    belief: Belief | None = None
    taints: tuple[Taint, ...] | None = None
    """None: nobody says."""
    broken: tuple[DriverFault, ...] = ()
    notes: tuple[Note, ...] = ()
    """What the agent has to say of the cgroups of pods that use it."""

    @property
    def severity(self) -> Severity:
        """How bad it is. Where nobody judges it, what the kubelet believes counts for the worse alone: that
        it was healthy once is no knowledge of now."""
        if self.verdict is not None:
            return self.verdict.health.severity
        if self.belief is not None and self.belief.health is Health.UNHEALTHY:
            return Severity.UNHEALTHY
        return Severity.UNKNOWN

    @property
    def disbelieved(self) -> bool:
        """Whether the kubelet believes something else than is so."""
        return bool(self.verdict and self.belief and self.verdict.health.health is not self.belief.health)


@dataclass(frozen=True, slots=True)
class ClaimFacts:
    """A claim likewise."""

    view: ClaimView
    records: tuple[Claim, ...] = ()
    orphans: tuple[Reservation, ...] | None = None
    """Reservations behind which none of the pods stands that were given as files; None: none were."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """A pod likewise."""

    view: PodView
    maybe: tuple[PodRef, ...] = ()
    """Pods that may be this one: of one of the two there is only a name, of the other only the UID."""
    notes: tuple[Note, ...] = ()
    """What the agent has to say of its cgroups."""


class Hurt(NamedTuple):
    """Somebody who uses a device, or may."""

    device: DeviceRef
    affected: Affected


@dataclass(frozen=True, slots=True)
class Explained:
    """The whole answer."""

    kind: str
    """``device``, ``pod`` or ``claim``: what was asked for."""
    now: Instant
    devices: tuple[DeviceFacts, ...]
    claims: tuple[ClaimFacts, ...]
    pods: tuple[PodFacts, ...]
    hurt: tuple[Hurt, ...] = ()
    """Of the devices; those that surely are come first."""
    risks: tuple[Refusal, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    ended: tuple[DeviceUsage, ...] = ()
    """The last uses of it that ended; if nobody knows it any more, all that is recorded."""
    accounts: tuple[Account, ...] = ()
