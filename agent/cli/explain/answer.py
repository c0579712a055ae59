"""Values of ``drahealth explain``: the answers of all sources, and the explanation derived from them."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from agent.cli.prepares.text import PrepareRecord
from agent.devices.consumers.reservations import RefusedPod
from agent.model.claim import DeviceRef
from agent.model.claim_sources import KubeletHealthRecord, PodRef, Reservation, SourceAnswers
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
"""Facts that ``explain`` cannot know without a source, by source."""

_DENIED: Final = tuple(os.strerror(number) for number in (errno.EACCES, errno.EPERM))
"""Kernel error texts that show that this user may not read a source."""


class SourcePaths(NamedTuple):
    """Paths of the sources; None: the source is not queried."""

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
    """Summary of the content, such as ``12 claims``; empty: none."""
    absence: Absence | None = None
    reason: str = ""
    """Reason why there is no answer."""
    invalid: tuple[str, ...] = ()
    """Parts of the answer that could not be used, each with the reason."""

    @property
    def is_denied(self) -> bool:
        """Whether the source exists but this user may not read it, so that another user may get more."""
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
    """Report of the agent; None: the agent did not answer."""
    driver_reports: Mapping[str, DriverReport] = field(default_factory=dict)
    """Reports on the drivers' health sockets, by driver."""
    consumers: SourceAnswers = field(default_factory=SourceAnswers)
    beliefs: tuple[KubeletHealthRecord, ...] = ()
    """Health of each device as the kubelet last stored it."""
    prepares: tuple[PrepareRecord, ...] = ()
    driver_faults: tuple[DriverFault, ...] = ()
    """Faults of devices that drivers reported and that have not expired."""
    taints: Mapping[str, Mapping[DeviceRef, tuple[Taint, ...]]] = field(default_factory=dict)
    """Taints that drivers offer, by driver; devices without taints are left out."""
    usage: tuple[DeviceUsage, ...] = ()
    """Recorded uses of devices: those running at the last write, then ended ones, newest first."""
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
    """Identity of the device; the driver is empty for the host's own devices."""
    reported: ReportedHealth | None = None
    driver_reported: ReportedHealth | None = None
    """Health on the driver's socket; None: not on it."""
    belief: KubeletHealthRecord | None = None
    """Health that the kubelet last stored; None: the kubelet has none."""
    taints: tuple[Taint, ...] | None = None
    """Taints that the driver offers; None: unknown."""
    driver_faults: tuple[DriverFault, ...] = ()
    notes: tuple[Note, ...] = ()
    """Notes of the agent on the cgroups of pods that use the device."""

    @property
    def severity(self) -> Severity:
        """Severity of the device.

        If no source reports the device, the kubelet's Unhealthy counts; its Healthy may be outdated: UNKNOWN.
        """
        if self.reported is not None:
            return self.reported.health.severity
        if self.belief is not None and self.belief.health is Health.UNHEALTHY:
            return Severity.UNHEALTHY
        return Severity.UNKNOWN

    @property
    def kubelet_differs(self) -> bool:
        """Whether the kubelet's health of the device is not the reported one; False: same or unknown."""
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
    """Pods that may be this pod: of one only the name is known, of the other only the UID."""
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
    """Kind of the explained object: ``device``, ``pod`` or ``claim``."""
    now: Instant
    devices: tuple[DeviceFacts, ...]
    claims: tuple[ClaimFacts, ...]
    pods: tuple[PodFacts, ...]
    affected: tuple[AffectedUse, ...] = ()
    """Pods that use the devices, certain uses first."""
    risks: tuple[RefusedPod, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    ended: tuple[DeviceUsage, ...] = ()
    """Last ended uses of devices; all recorded ones if no source knows the explained object any more."""
    sources: tuple[SourceResult, ...] = ()
