"""Values of ``drahealth explain``: the answers of all sources, and the explanation derived from them."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from agent.cli.prepares.text import PrepareRecord
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

CONSEQUENCES: Final[Mapping[str, str]] = {
    AGENT: "no evidence, advice and times",
    DRIVER_SOCKET: "health sent to the kubelet not known",
    "checkpoint": "prepared claims not known; no UIDs, requests and CDI ids",
    "health-state": "health in the kubelet not known",
    "podresources": "containers with devices not known",
    "pods-api": "no owners, pod groups, phases; no names for UIDs",
    "cgroups": "running pods and containers not known",
    PREPARES: "results of prepares not known",
    TAINTS: "taints not known",
    HISTORY: "earlier use of devices not known",
    "claims-file": "no reservations, pod groups and refused pods",
}
"""Facts that are not known without each source."""

_DENIED: Final = tuple(os.strerror(number) for number in (errno.EACCES, errno.EPERM))
"""Texts of the kernel in the reason of a source that this user may not read."""


class SourcePaths(NamedTuple):
    """Places of the sources; None: the source is not queried."""

    runtime_dir: Path | None = None
    kubelet_dir: Path | None = None
    state_dir: Path | None = None
    pods: Path | None = None
    claims: Path | None = None
    cgroupfs_root: Path | None = None
    kubelet_cgroup_root: str = "/"


# --- answers -----------------------------------------------------------------------------------------------


class SourceResult(NamedTuple):
    """Result of querying one source, without its content."""

    source: str
    """A key of :data:`CONSEQUENCES`, or ``pods-file``."""
    place: str
    """File, directory or socket; empty: the source was not queried."""
    read: Instant
    written_s: float | None = None
    """Time of the file or of the agent's report [s since 1970]."""
    found: str = ""
    """``12 claims``."""
    absence: Absence | None = None
    reason: str = ""
    """Reason why there is no answer."""
    invalid: tuple[str, ...] = ()
    """Parts of the answer that could not be used, each with the reason."""

    @property
    def is_denied(self) -> bool:
        """Whether the source exists and this user may not read it, so that another user may know more."""
        return self.absence is Absence.UNREADABLE and any(text in self.reason for text in _DENIED)


class DriverReport(NamedTuple):
    """Report of one driver's health socket, which the kubelet or the driver reads."""

    socket: str
    is_agents: bool
    """Whether the agent serves the socket on behalf of the driver."""
    report: Report


@dataclass(frozen=True, slots=True, repr=False)  # asyncio.run() formats its result, which takes half a second
class NodeAnswers:
    """Answers of all sources of the node."""

    now: Instant
    report: Report | None = None
    """Report of the agent."""
    driver_reports: Mapping[str, DriverReport] = field(default_factory=dict)
    """Reports by driver."""
    consumers: SourceAnswers = field(default_factory=SourceAnswers)
    beliefs: tuple[Belief, ...] = ()
    """Device health in the kubelet."""
    prepares: tuple[PrepareRecord, ...] = ()
    driver_faults: tuple[DriverFault, ...] = ()
    """Faults of devices that drivers reported and that have not expired."""
    taints: Mapping[str, Mapping[DeviceRef, tuple[Taint, ...]]] = field(default_factory=dict)
    """Offered taints by driver; devices without taints are left out."""
    usage: tuple[DeviceUsage, ...] = ()
    """Recorded device usage: first what continued at the last write, then what ended, newest first."""
    sources: tuple[SourceResult, ...] = ()


# --- explanation -------------------------------------------------------------------------------------------


class ReportedHealth(NamedTuple):
    """Health of a device, and its source."""

    health: DeviceHealth
    source: str
    """:data:`AGENT`, or the path of a driver's socket, which sends neither causes nor times."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device with everything that sources report about it."""

    ref: DeviceRef
    """Identity; the driver of the host's own devices is empty."""
    reported: ReportedHealth | None = None
    driver_reported: ReportedHealth | None = None
    """Health on the driver's socket."""
    belief: Belief | None = None
    """Health in the kubelet."""
    taints: tuple[Taint, ...] | None = None
    """Offered taints; None: unknown."""
    driver_faults: tuple[DriverFault, ...] = ()
    notes: tuple[Note, ...] = ()
    """Notes of the agent on the cgroups of pods that use the device."""

    @property
    def severity(self) -> Severity:
        """Severity of the device.

        If no source reports it, Unhealthy in the kubelet counts; Healthy does not: it may be outdated.
        """
        if self.reported is not None:
            return self.reported.health.severity
        if self.belief is not None and self.belief.health is Health.UNHEALTHY:
            return Severity.UNHEALTHY
        return Severity.UNKNOWN

    @property
    def kubelet_differs(self) -> bool:
        """Whether the kubelet has another health than the one reported."""
        return bool(self.reported and self.belief and self.reported.health.health is not self.belief.health)


@dataclass(frozen=True, slots=True)
class ClaimFacts:
    """A claim with everything that sources report about it."""

    view: ClaimView
    prepares: tuple[PrepareRecord, ...] = ()
    orphans: tuple[Reservation, ...] | None = None
    """Reservations that match none of the pods in ``--pods``; None: no such file is given."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """A pod with everything that sources report about it."""

    view: PodView
    maybe: tuple[PodRef, ...] = ()
    """Pods that may be the same: of one only the name is known, of the other only the UID."""
    notes: tuple[Note, ...] = ()
    """Notes of the agent on the pod's cgroups."""


class AffectedUse(NamedTuple):
    """A pod that uses a device, or may use it."""

    device: DeviceRef
    affected: Affected


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything that concerns one device, pod or claim."""

    kind: str
    """Kind of the subject: ``device``, ``pod`` or ``claim``."""
    now: Instant
    devices: tuple[DeviceFacts, ...]
    claims: tuple[ClaimFacts, ...]
    pods: tuple[PodFacts, ...]
    affected: tuple[AffectedUse, ...] = ()
    """Pods that use the devices; those that certainly do come first."""
    risks: tuple[Refusal, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    ended: tuple[DeviceUsage, ...] = ()
    """Last usages that ended; all recorded ones if no source knows the subject any more."""
    sources: tuple[SourceResult, ...] = ()
