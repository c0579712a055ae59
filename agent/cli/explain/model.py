"""Data types of ``drahealth explain``: the answers of all sources, and the explanation derived from them.

The module also finds a device, claim or pod by the name that an operator gives. Pure.

If several objects have the name, an error lists their full names.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from agent.cli.prepares.text import PrepareRecord
from agent.devices.consumers.consumer_queries import claims_by_name, pods_by_name
from agent.devices.consumers.kube_objects import PredictedPodRefusal
from agent.errors import UsageError, suggestion
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import KubeletHealthRecord, PodRef, Reservation, SourceAnswers, WorkloadRef
from agent.model.cleared_faults import ClearedFault
from agent.model.consumers import AffectedPod, ClaimView, Conflict, ConsumerMap, PodView
from agent.model.device_usage import PodDeviceUsage
from agent.model.health import DeviceHealth, Health, NonDeviceCause, Severity, Taint
from agent.model.prepare import DriverFault
from agent.model.reading import Absence
from agent.model.report import Report
from agent.model.time import Instant

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
"""What ``explain`` cannot show if a source does not answer, by source."""

_DENIED: Final = tuple(os.strerror(number) for number in (errno.EACCES, errno.EPERM))
"""Error texts of the kernel that mean that this user may not read a file or socket."""


class SourcePaths(NamedTuple):
    """Paths of the directories and files to query. A path that is None is not queried."""

    runtime_dir: Path | None = None
    kubelet_dir: Path | None = None
    state_dir: Path | None = None
    pods: Path | None = None
    claims: Path | None = None
    cgroupfs_root: Path | None = None
    kubelet_cgroup_root: str = "/"
    node: str = ""
    """Name of this Kubernetes node."""


# --- answers -----------------------------------------------------------------------------------------------


class SourceResult(NamedTuple):
    """Outcome of querying one source: where and when it was read, or why it gave no answer."""

    source: str
    """Name of the source: a key of :data:`CONSEQUENCES`, or ``pods-file``."""
    place: str
    """Path of the file, directory or socket; empty: the source was not queried."""
    read: Instant
    written_s: float | None = None
    """Time at which the file or the agent's report was written [s since 1970]; None: not known."""
    found: str = ""
    """Summary of the source's content, such as ``12 claims``; empty: it gave no answer."""
    absence: Absence | None = None
    reason: str = ""
    """Reason why the source gave no answer; empty: it answered."""
    invalid: tuple[str, ...] = ()
    """Parts of the source's answer that could not be used, each with the reason."""

    @property
    def is_denied(self) -> bool:
        """Whether the source gave no answer because this user may not read it."""
        return self.absence is Absence.UNREADABLE and any(text in self.reason for text in _DENIED)


class DriverSocketReport(NamedTuple):
    """Health report read from one driver's socket."""

    socket: str
    is_agents: bool
    """True: the agent serves the socket for the driver; False: the driver does."""
    report: Report


@dataclass(frozen=True, slots=True, repr=False)  # asyncio.run() formats its result, which takes half a second
class NodeAnswers:
    """Answers of all sources on the Kubernetes node."""

    now: Instant
    report: Report | None = None
    """Health report of the agent; None: the agent did not answer."""
    driver_reports: Mapping[str, DriverSocketReport] = field(default_factory=dict)
    """Health reports from the drivers' sockets, by driver."""
    consumers: SourceAnswers = field(default_factory=SourceAnswers)
    """Claims and pods, as the kubelet, the drivers, cgroups and the operator's files list them."""
    workloads: tuple[WorkloadRef, ...] = ()
    """Objects other than pods in the file of ``--pods``."""
    kubelet_health: tuple[KubeletHealthRecord, ...] = ()
    """Health of each device as the kubelet last stored it."""
    prepares: tuple[PrepareRecord, ...] = ()
    driver_faults: tuple[DriverFault, ...] = ()
    """Faults of devices that drivers reported and that have not expired."""
    taints: Mapping[str, Mapping[DeviceRef, tuple[Taint, ...]]] = field(default_factory=dict)
    """Taints that drivers publish, by driver and device; devices without taints are left out."""
    usage: tuple[PodDeviceUsage, ...] = ()
    """Uses of devices by pods in the agent's history: running ones, then ended ones, newest first."""
    sources: tuple[SourceResult, ...] = ()
    node: str = ""
    """Name of this Kubernetes node; empty: unknown."""


# --- explanation -------------------------------------------------------------------------------------------


class ReportedHealth(NamedTuple):
    """Health of a device, and the source that reports it."""

    health: DeviceHealth
    source: str
    """:data:`AGENT`, or the path of a driver's socket; such a socket sends no causes and times."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Everything that sources report about one device."""

    ref: DeviceRef
    """Identity of the device; the driver is empty for the host's own devices."""
    reported: ReportedHealth | None = None
    """Health from the agent or, if it does not report the device, from the driver's socket; None: neither."""
    driver_reported: ReportedHealth | None = None
    """Health from the driver's socket; None: not reported there."""
    kubelet_health: KubeletHealthRecord | None = None
    """Health that the kubelet last stored; None: it stored none."""
    taints: tuple[Taint, ...] | None = None
    """Taints that the driver publishes for the device; None: not known."""
    driver_faults: tuple[DriverFault, ...] = ()
    notes: tuple[NonDeviceCause, ...] = ()
    """Findings of the agent about the cgroups of pods that use the device."""
    cleared: tuple[ClearedFault, ...] = ()
    """Remembered faults of the device that operators cleared within a day."""

    @property
    def severity(self) -> Severity:
        """Severity of the device that the agent or its driver reports.

        If neither reports the device: UNHEALTHY if the kubelet stored Unhealthy, else UNKNOWN.
        """
        if self.reported is not None:
            return self.reported.health.severity
        if self.kubelet_health is not None and self.kubelet_health.health is Health.UNHEALTHY:
            return Severity.UNHEALTHY
        return Severity.UNKNOWN

    @property
    def kubelet_differs(self) -> bool:
        """Whether the kubelet stored another health of the device than the reported health.

        False also if the stored or the reported health is not known.
        """
        return bool(
            self.reported
            and self.kubelet_health
            and self.reported.health.health is not self.kubelet_health.health
        )


@dataclass(frozen=True, slots=True)
class ClaimFacts:
    """Everything that sources report about one claim."""

    view: ClaimView
    prepares: tuple[PrepareRecord, ...] = ()
    unmatched_reservations: tuple[Reservation, ...] | None = None
    """Reservations for objects that the file ``--pods`` does not contain; None: no such file is given."""

    @property
    def devices_of_failed_prepares(self) -> tuple[DeviceRef, ...]:
        """Devices that failed prepares of the claim name, and that no other source lists for the claim."""
        known = {edge.use.device for edge in self.view.devices}
        failed = (record.outcome.devices for record in self.prepares if record.state == "failing")
        return tuple(sorted({device for devices in failed for device in devices} - known))


@dataclass(frozen=True, slots=True)
class PodFacts:
    """Everything that sources report about one pod."""

    view: PodView
    possibly_same: tuple[PodRef, ...] = ()
    """Pods that may be this pod: the name of one is known, and the UID of the other."""
    notes: tuple[NonDeviceCause, ...] = ()
    """Findings of the agent about the pod's cgroups."""


class DeviceConsumer(NamedTuple):
    """Device, with a pod that uses it or may use it."""

    device: DeviceRef
    affected: AffectedPod


@dataclass(frozen=True, slots=True)
class Explanation:
    """Result of ``drahealth explain`` for one device, pod or claim, or for all claims on the node."""

    kind: str
    """Kind of the explained object: ``device``, ``pod`` or ``claim``; ``all`` for all claims."""
    now: Instant
    devices: tuple[DeviceFacts, ...]
    claims: tuple[ClaimFacts, ...]
    pods: tuple[PodFacts, ...]
    affected: tuple[DeviceConsumer, ...] = ()
    """Pods that use the devices; certain uses first."""
    risks: tuple[PredictedPodRefusal, ...] = ()
    """Pods that the kubelet would refuse if it created their sandbox again."""
    conflicts: tuple[Conflict, ...] = ()
    """Contradictions between the sources about the explained objects."""
    ended: tuple[PodDeviceUsage, ...] = ()
    """Last ended uses of devices; all recorded uses if no source knows the explained object any more."""
    claims_elsewhere: int = 0
    """Number of claims that only the operator's files contain; ``all`` leaves them out."""
    sources: tuple[SourceResult, ...] = ()


# --- lookup by name ----------------------------------------------------------------------------------------

T = TypeVar("T")


class UnknownName(UsageError):
    """No source lists an object with the name that the operator gave."""


MAX_NAMED: Final = 8
"""Largest number of objects that the error for an ambiguous name lists."""


def full_device_name(device: DeviceRef) -> str:
    """Return ``driver/pool/name`` of a device; ``pool/name`` for a host device, which has no driver."""
    return "/".join(filter(None, device))


def find_devices(
    name: str,
    devices: Iterable[DeviceRef],
    cdi: Iterable[tuple[str, DeviceRef]],
    host_aliases: Mapping[DeviceRef, DeviceRef],
) -> tuple[DeviceRef, ...]:
    """Return the device with the name `name`, under all names that the device has.

    A device of the host has several names if a driver publishes it, too.

    Args:
        name: ``driver/pool/name``, ``pool/name``, a name, or a CDI id.
        devices: All known devices, without names of host devices that no pod uses.
        cdi: CDI ids with their devices.
        host_aliases: Drivers' devices that are host devices under another name, mapped to the host device.

    Raises:
        UnknownName: No device has the name.
        UsageError: Several devices have the name.
    """
    known = sorted(set(devices))
    if exact := [ref for ref in {*known, *host_aliases} if ref.driver and full_device_name(ref) == name]:
        return (exact[0],)
    found = [ref for ref in known if full_device_name(ref) == name]
    found = found or [ref for ref in known if f"{ref.pool}/{ref.device}" == name]
    found = found or [ref for ref in known if ref.device == name]
    ids: dict[str, set[DeviceRef]] = defaultdict(set)
    for id_, device in cdi:
        ids[id_].add(device)
    found = found or sorted(ids.get(name, ()))
    if not found:
        names = [*map(full_device_name, known), *(ref.device for ref in known), *ids]
        raise UnknownName(f"no device {name!r} is known{suggestion(name, names)}")
    only = _require_one(name, "devices", {host_aliases.get(ref, ref): full_device_name(ref) for ref in found})
    return tuple(ref for ref in known if host_aliases.get(ref) == only) or (only,)


def find_pods(name: str, known: ConsumerMap) -> tuple[PodRef, ...]:
    """Return the pod with this name; several if sources disagree on its UID.

    Args:
        name: ``namespace/name``, a UID, or a name that exists in only one namespace.
        known: All known pods and claims.

    Raises:
        UnknownName: No pod has the name.
        UsageError: Pods of several namespaces have the name.
    """
    uids = {ref.uid: ref for ref in known.pods if ref.uid}
    uids |= {
        obj.mirror_uid: ref for ref, view in known.pods.items() for obj, _ in view.objects if obj.mirror_uid
    }
    if name in uids:
        return (uids[name],)
    full_name = _find_name(name, "pod", [(ref.namespace, ref.name) for ref in known.pods if ref.name], uids)
    return tuple(view.ref for view in pods_by_name(known, *full_name))


def find_claims(name: str, known: ConsumerMap) -> tuple[ClaimRef, ...]:
    """Return the claim with this name, UID or ``namespace/name``; several if sources disagree on its UID."""
    uids = {ref.uid: ref for ref in known.claims if ref.uid}
    if name in uids:
        return (uids[name],)
    full_name = _find_name(name, "claim", [(ref.namespace, ref.name) for ref in known.claims], uids)
    return tuple(view.ref for view in claims_by_name(known, *full_name))


def _find_name(
    name: str, kind: str, known: Iterable[tuple[str, str]], uids: Iterable[str]
) -> tuple[str, str]:
    texts = {full_name: "/".join(full_name) for full_name in sorted(set(known))}
    found = {full_name: text for full_name, text in texts.items() if name in (text, full_name[1])}
    if not found:
        near = suggestion(name, [*texts.values(), *(short for _, short in texts), *uids])
        raise UnknownName(f"no {kind} {name!r} is known{near}")
    return _require_one(name, f"{kind}s", found)


def _require_one(name: str, kind: str, found: Mapping[T, str]) -> T:
    if len(found) > 1:
        texts = list(found.values())
        more = f" and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else ""
        listed = ", ".join(texts[:MAX_NAMED])
        raise UsageError(f"{name!r} matches {len(texts)} {kind}: {listed}{more}; use a full name")
    return next(iter(found))
