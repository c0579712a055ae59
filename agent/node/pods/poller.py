"""Poller of pods that use devices: queries kubelet and drivers, and audits the pods' cgroups.

The result is the consumer map: a map of claims, devices and pods. The module is imported only
where a kubelet that supports ResourceClaims runs, to save memory elsewhere.

The module also has the log lines that name the pods affected by a change of a device's health. The
functions for these lines do no I/O.
"""

import asyncio
import gc
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple

from agent.cgroup_audit.audit import audit_findings
from agent.cgroup_audit.audit_verdicts import AuditVerdict
from agent.cgroup_audit.pod_parser import parse_pod
from agent.config.config import Config
from agent.devices.consumers.consumer_map import build_consumer_map
from agent.devices.consumers.consumer_queries import (
    affected_pods,
    exclusive_cpus,
    health_lookup,
    with_embedding_drivers,
)
from agent.devices.consumers.kube_objects import parse_pods
from agent.devices.consumers.usage import current_uses
from agent.errors import PermissionDeniedError, ProbeError
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import PodObject, PodRef, SourceAnswer, SourceAnswers
from agent.model.consumers import AffectedPod, ConsumerMap
from agent.model.health import DeviceHealth, Health
from agent.model.json_values import JsonObject
from agent.model.pod_findings import PodFinding
from agent.model.reading import Absence, SourceState
from agent.model.report import Report
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant
from agent.native.process import trim_heap
from agent.node.cgroup_audit import AuditPaths, ExclusiveCpusByPod, audit_cgroups
from agent.node.pods.kubelet_watch import PodList
from agent.node.pods.queries import (
    DriverStateDirectory,
    KubeletAnswers,
    query_drivers,
    query_embedded_health,
    query_kubelet,
)
from agent.sources.pod_cgroups import live_pods_in_snapshot
from agent.system.output import get_logger
from agent.system.threads.worker_threads import HungGuard, timeout_text

PODS_MAX: Final = 4
"""Largest number of pods that one log line names as affected, and again as possibly affected."""
LINES_MAX: Final = 16
"""Largest number of log lines that one call of :func:`impact_lines` returns."""
_TEXT_MAX: Final = 253
"""Length to which names are cut, the limit of names in Kubernetes [characters]."""
_URGENCY: Final = (Health.UNHEALTHY, Health.UNKNOWN, Health.HEALTHY)

HealthByDevice = Mapping[DeviceRef, Health]
"""Last logged health of each device in use that is not Healthy."""


class ImpactLines(NamedTuple):
    """Log lines about changed health of devices in use, and the last logged health of each device."""

    not_healthy: tuple[str, ...]
    """Log lines about devices that are Unhealthy or Unknown; a last line counts devices without a line."""
    recovered: tuple[str, ...]
    """Log lines about devices that are Healthy again."""
    reported: HealthByDevice


def health_of_claimed_devices(
    consumers: ConsumerMap, report: Report, served: Container[str]
) -> Mapping[DeviceRef, DeviceHealth]:
    """Return the health of each device that a claim has allocated.

    Args:
        consumers: Map of claims, devices and pods.
        report: Newest health report.
        served: Drivers whose devices' health the agent serves to the kubelet.
    """
    health_of = health_lookup(report, served)
    return {ref: health for ref in consumers.devices if (health := health_of(ref)) is not None}


def prepared_devices_by_pod(consumers: ConsumerMap) -> Mapping[str, tuple[DeviceRef, ...]]:
    """Return the devices that are prepared for each pod, by pod UID."""
    found: dict[str, set[DeviceRef]] = {}
    for use in current_uses(consumers).values():
        if use.pod.uid:
            found.setdefault(use.pod.uid, set()).add(use.device)
    return {uid: tuple(sorted(devices)) for uid, devices in sorted(found.items())}


def impact_lines(
    consumers: ConsumerMap, devices: Mapping[DeviceRef, DeviceHealth], reported: HealthByDevice
) -> ImpactLines:
    """Return one log line about each device in use whose health differs from `reported`, up to LINES_MAX.

    Args:
        consumers: Map of claims, devices and pods.
        devices: Result of :func:`health_of_claimed_devices`.
        reported: Health of each device at the last call, from :attr:`ImpactLines.reported`. A device that no
            pod used then is missing, and gets a line once a pod uses it.
    """
    now = {ref: device.health for ref, device in devices.items()}
    changed = [ref for ref, health in now.items() if health is not reported.get(ref, Health.HEALTHY)]
    changed.sort(key=lambda ref: (_URGENCY.index(now[ref]), ref))
    lines: dict[bool, list[str]] = {True: [], False: []}
    unused, left_out = set(), 0
    for ref in changed:
        if sum(map(len, lines.values())) >= LINES_MAX:
            left_out += any(consumers.claims[claim].consumers for claim in consumers.devices[ref])
        elif users := [use for use in affected_pods(consumers, ref) if not use.pod.has_ended]:
            lines[now[ref] is Health.HEALTHY].append(_impact_line(ref, devices[ref], users))
        else:
            unused.add(ref)
    if left_out:
        lines[False].append(
            f"{left_out} more devices in use have changed their health; run drahealth explain to see them"
        )
    now_reported: dict[DeviceRef, Health] = {
        ref: health for ref, health in now.items() if health is not Health.HEALTHY and ref not in unused
    }
    # of an embedding driver that does not answer, the last health counts
    now_reported |= {
        ref: last for ref, last in reported.items() if ref in consumers.devices and ref not in now
    }
    return ImpactLines(
        tuple(map(_printable, lines[False])), tuple(map(_printable, lines[True])), now_reported
    )


def _impact_line(ref: DeviceRef, health: DeviceHealth, users: Sequence[AffectedPod]) -> str:
    sure = [use for use in users if use.is_certain]
    maybe = [use for use in users if not use.is_certain]
    if health.health is Health.HEALTHY:
        return f"{ref} is Healthy again; used by {_pods_text(sure or maybe)}"
    code = f" ({health.causes[0].code})" if health.causes else ""
    parts = [f"affects {_pods_text(sure)}"] if sure else []
    parts += [f"may affect {_pods_text(maybe)}"] if maybe else []
    return f"{ref} is {health.health.name.capitalize()}{code}: {'; '.join(parts)}"


def _pods_text(users: Sequence[AffectedPod]) -> str:
    by_pod: dict[PodRef, list[AffectedPod]] = {}
    for use in users:
        by_pod.setdefault(use.pod.ref, []).append(use)
    texts = [_pod_text(ref, uses) for ref, uses in list(by_pod.items())[:PODS_MAX]]
    more = len(by_pod) - len(texts)
    return ", ".join([*texts, f"and {more} more"] if more else texts)


def _pod_text(ref: PodRef, uses: Sequence[AffectedPod]) -> str:
    pod = uses[0].pod.known
    owner = f"{pod.controller}, " if pod and pod.controller else ""
    claims = dict.fromkeys(_claim_text(use.claim, use) for use in uses)
    return f"{_truncate(str(ref))} ({_truncate(owner)}{'; '.join(claims)})"


def _claim_text(claim: ClaimRef, use: AffectedPod) -> str:
    names = ", ".join(_truncate(container.name) for container in use.containers[:PODS_MAX])
    noun = "container" if len(use.containers) == 1 else "containers"
    group = f" of pod group {_truncate(use.group)}" if use.group else ""
    return f"claim {_truncate(str(claim))}{group}" + (f": {noun} {names}" if names else "")


def _truncate(text: str) -> str:
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}..."


def _printable(text: str) -> str:
    """Replace unprintable characters in a text, such as a pod's name, which would break the log line."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


# --- the poller --------------------------------------------------------------------------------------------

AUDIT_DELAY_S: Final = 35.0
"""Delay of the audit after a container's start [s]: cgroups are not audited in its first 30 s."""
AUDIT_S: Final = 60.0
"""Time limit of one audit of the pods' cgroups [s]."""
PROBLEMS_MAX: Final = 3
"""Largest number of unreadable pods named in the source's detail text."""
GC_FREEZE_SIZE: Final = 1_000
"""Number of claims and pods from which a poll's objects are exempt from garbage collection (gc.freeze).

A collection of so many objects would take 10 ms.
"""
GC_FREEZES_MAX: Final = 256
"""Number of large polls between two full garbage collections: each leaves some hundred garbage objects."""

PodUses = tuple[Mapping[str, tuple[DeviceRef, ...]], Mapping[str, str], tuple[PodFinding, ...]]
"""Devices that pods use, names of pods, and audit findings, as in PodsSample."""
TimedSnapshot = tuple[Snapshot, Instant]
"""Snapshot of the machine, and the time when the poller received it."""

log = get_logger(__name__)


class ClaimPodsAuditResult(NamedTuple):
    """Result of one audit of the cgroups of pods with claims."""

    findings: tuple[PodFinding, ...] = ()
    is_quiet: bool = False
    """Whether a difference is not reported yet because a container has just started or was resized."""
    problem: str = ""
    """Reason why the audit of cgroups failed; empty: it succeeded."""
    unreadable: tuple[str, ...] = ()
    """Pods that could not be audited, each with the reason."""


def audit_pods_with_claims(
    paths: AuditPaths,
    objects: Sequence[JsonObject],
    claim_users: Container[str],
    driver_cpus: ExclusiveCpusByPod,
    now_wall_s: float,
) -> ClaimPodsAuditResult:
    """Audit the cgroups of active pods with claims. Blocks on the kernel.

    Args:
        paths: Root directories and kubelet version.
        objects: All pods of the Kubernetes node as v1.Pod objects of the kubelet's pods API.
        claim_users: UIDs of the pods with prepared claims. Their objects do not name claims for extended
            resources.
        driver_cpus: CPUs that DRA drivers gave to single containers.
        now_wall_s: Current time [s since 1970].
    """
    pods, unreadable = [], []
    for obj in objects:
        try:
            pods.append(parse_pod(obj, from_kubelet=True, claim_users=claim_users))
        except ProbeError as error:
            unreadable.append(str(error))
    chosen = [pod for pod in pods if pod.is_active and (pod.claims or pod.claim_resources)]
    if not chosen:
        return ClaimPodsAuditResult(unreadable=tuple(unreadable))
    try:
        found = audit_cgroups(
            paths, pods, chosen, now_wall_s, with_qos_classes=False, driver_cpus=driver_cpus
        )
    except (ProbeError, PermissionDeniedError) as error:
        return ClaimPodsAuditResult(problem=str(error))
    if found.facts is None:
        return ClaimPodsAuditResult(problem="; ".join(found.gaps))
    return ClaimPodsAuditResult(
        tuple(finding for judged in found.pods for finding in audit_findings(judged)),
        any(
            comparison.verdict is AuditVerdict.QUIET
            for judged in found.pods
            for comparison in judged.comparisons
        ),
        unreadable=(*unreadable, *found.unreadable),
    )


class PodsSourceState(NamedTuple):
    """State of the source ``pods``, and the known uses of devices."""

    state: SourceState
    detail: str
    uses: PodUses | None = None
    """Known uses of devices; None: the kubelet offers no source of pods."""


class PodPoller:
    """Poller that asks the kubelet and the drivers which pods and claims use which devices. Event loop only.

    If the kubelet's checkpoint of prepared claims is unreadable, the last known uses of devices stay.
    """

    def __init__(
        self, config: Config, clock: Callable[[], Instant], guard: HungGuard, pod_list: PodList
    ) -> None:
        self._config = config
        self._clock = clock
        self._guard = guard
        self._pod_list = pod_list
        self._paths = AuditPaths(
            config.sysfs_root,
            config.cgroupfs_root,
            config.kubelet_cgroup_root,
            config.kubelet_dir,
            procfs_root=config.procfs_root,
        )
        self._kubelet: KubeletAnswers | None = None
        self._drivers: tuple[DriverStateDirectory, ...] = ()
        self._drivers_in_use: frozenset[str] = frozenset()
        """Drivers with a claimed device at the last call of :meth:`with_embedding_drivers`."""
        self._newest: ConsumerMap | None = None
        self._reliable: ConsumerMap | None = None
        """Newest consumer map that was built with a readable claims checkpoint; None: none yet."""
        self._uses: Mapping[str, tuple[DeviceRef, ...]] = {}
        self._names: Mapping[str, str] = {}
        self._active_uids: frozenset[str] = frozenset()
        """UIDs of pods that had not ended in the last answer of the pods API."""
        self._with_claims: frozenset[str] = frozenset()
        """UIDs of the pods in ``_active_uids`` that have claims."""
        self._running: frozenset[str] = frozenset()
        """IDs of the running containers of the pods in ``_with_claims``."""
        self._last_audit = ClaimPodsAuditResult()
        self._audit_ns = clock().mono_ns
        self._reported: HealthByDevice = {}

    def reconfigure(self, config: Config) -> None:
        """Apply the intervals of a reloaded configuration from the next poll on."""
        if config.pods_audit_ns != self._config.pods_audit_ns:
            self._audit_ns = min(self._audit_ns, self._clock().mono_ns + config.pods_audit_ns)
            if not config.pods_audit_ns:  # no later audit would end these findings
                self._last_audit = ClaimPodsAuditResult()
        self._config = config

    @property
    def newest_map(self) -> ConsumerMap | None:
        """Newest map of claims, devices and pods, even if a source was unreadable; None: no map yet."""
        return self._newest

    @property
    def size(self) -> int:
        """Number of claims and pods in the newest map of claims, devices and pods."""
        return len(self._newest.claims) + len(self._newest.pods) if self._newest else 0

    async def poll(self, core: TimedSnapshot | None) -> PodsSourceState:
        """Query kubelet and drivers, build the map of claims, devices and pods; return the new state.

        ``core``: newest snapshot, for its cgroups; None: there is none yet.
        """
        kubelet, drivers = await asyncio.gather(
            query_kubelet(self._config.kubelet_dir, self._guard, self._pod_list.get),
            query_drivers(self._config.kubelet_dir, self._config.state_dir, self._guard),
        )
        pods = parse_pods(kubelet.pods)
        live = (live_pods_in_snapshot(*core),) if core else ()
        answers = SourceAnswers((kubelet.prepared, *drivers.prepared), (kubelet.listed,), (pods,), (), live)
        self._kubelet, self._drivers = kubelet, drivers.drivers
        self._newest = build_consumer_map(answers)
        if self._reliable is None or kubelet.prepared.absence is not Absence.UNREADABLE:
            self._reliable = self._newest
            self._uses = prepared_devices_by_pod(self._reliable)
            lists_all = kubelet.pods.absence is None  # else a pod without a name need not be gone
            kept = {uid: name for uid, name in self._names.items() if not lists_all or uid in self._uses}
            names = {ref.uid: str(ref) for ref in self._reliable.pods if ref.uid and ref.name}
            self._names = kept | names
        self._track_pods(pods)
        return self._state()

    async def with_embedding_drivers(self, report: Report) -> Report:
        """Return a report of the agent, extended by the devices of drivers that embed drahealth.

        Their health is read from the drivers' sockets. Only drivers whose devices are in use, or were at the
        last call, are queried.
        """
        claimed = self._newest.devices if self._newest else ()
        before, self._drivers_in_use = self._drivers_in_use, frozenset(ref.driver for ref in claimed)
        sent = await query_embedded_health(self._drivers, self._drivers_in_use | before)
        return with_embedding_drivers(report, sent)

    async def audit_if_due(self, core: TimedSnapshot | None) -> PodsSourceState | None:
        """Audit the cgroups of pods with claims if that is due; return the new state of the source.

        None: the audit is not due, or the pods are not known.
        """
        kubelet = self._kubelet
        if kubelet is None or kubelet.pods.absence or not self._audit_is_due():
            return None
        declared = core[0].declared if core else ()
        by_drivers = exclusive_cpus(self._reliable, declared) if self._reliable else {}
        objects, now_s = kubelet.pods.items, self._clock().wall_s
        work = partial(audit_pods_with_claims, self._paths, objects, self._uses, by_drivers, now_s)
        try:
            found = await self._guard.run("audit", work, AUDIT_S)
        except TimeoutError:
            found = ClaimPodsAuditResult(problem=timeout_text("audit of cgroups", AUDIT_S))
        if found.problem:  # findings stay until the next successful audit
            found = found._replace(findings=self._last_audit.findings)
        self._last_audit = found
        every_s = self._config.pods_audit_ns / NS
        self._audit_ns = self._mono_ns_after(min(AUDIT_DELAY_S, every_s) if found.is_quiet else every_s)
        return self._state()

    def next_due_in_s(self) -> float:
        """Return the time until the next poll or audit is due [s]."""
        period_s = self._config.pods_period_ns / NS
        if self._audit_is_due() or not self._config.pods_audit_ns or not self._with_claims:
            return period_s  # an overdue audit waits for the pods API
        return min(period_s, (self._audit_ns - self._clock().mono_ns) / NS)

    def log_impact(self, report: Report) -> None:
        """Log which pods use the devices whose health has changed since the last call."""
        if self._reliable is None:
            return
        healths = health_of_claimed_devices(self._reliable, report, self._config.drivers)
        lines = impact_lines(self._reliable, healths, self._reported)
        self._reported = lines.reported
        for line in lines.not_healthy:
            log.warning("%s", line)
        for line in lines.recovered:
            log.info("%s", line)

    def _track_pods(self, pods: SourceAnswer[PodObject]) -> None:
        if pods.absence is Absence.UNREADABLE:
            return
        if pods.absence and not self._audit_is_due():  # a kubelet that restarts has no socket for a while
            return
        active = [pod for pod in pods.items if not pod.has_ended]
        with_claims = frozenset(pod.ref.uid for pod in active if pod.claims or pod.ref.uid in self._uses)
        of_claims = (use for pod in active if pod.ref.uid in with_claims for use in pod.containers)
        running = frozenset(container.id for container in of_claims if container.running)
        if running - self._running:
            self._audit_ns = min(self._audit_ns, self._mono_ns_after(AUDIT_DELAY_S))
        self._running = running
        self._active_uids, self._with_claims = frozenset(pod.ref.uid for pod in active), with_claims

    def _mono_ns_after(self, in_s: float) -> int:
        return self._clock().mono_ns + int(in_s * NS)

    def _audit_is_due(self) -> bool:
        return bool(self._config.pods_audit_ns) and self._clock().mono_ns >= self._audit_ns

    def _state(self) -> PodsSourceState:
        kubelet = self._kubelet
        assert kubelet is not None, "poll() comes first"
        if kubelet.prepared.absence is kubelet.pods.absence is Absence.ABSENT:
            return PodsSourceState(
                SourceState.ABSENT, f"{self._config.kubelet_dir}: no kubelet that knows claims"
            )
        answers = (kubelet.prepared, kubelet.pods)
        problems = [answer.reason for answer in answers if answer.absence is Absence.UNREADABLE]
        problems += kubelet.prepared.invalid
        problems += [self._last_audit.problem] if self._last_audit.problem else []
        detail = "; ".join(problems or self._last_audit.unreadable[:PROBLEMS_MAX])
        if not problems and kubelet.pods.absence and self._config.pods_audit_ns:
            detail = f"cgroups are not audited: {kubelet.pods.reason}"
        state = SourceState.FAILING if problems else SourceState.OK
        findings = tuple(
            finding for finding in self._last_audit.findings if finding.pod_uid in self._active_uids
        )
        return PodsSourceState(state, detail, (self._uses, self._names, findings))


class GcControl:
    """Control of Python's garbage collector during a poll of pods; a process has at most one instance.

    A large poll creates half a million objects without cycles. The collector would traverse them several
    times with the GIL held, and stall the engine loop for a quarter of a second each time.
    """

    def __init__(self, trim: Callable[[], None] = trim_heap) -> None:
        """Create the control of the garbage collector.

        Args:
            trim: Gives free memory back to the kernel.
        """
        self._large_rounds = 0
        self._trim = trim
        self._peak = 0
        """Size of the largest poll (claims and pods), halved by each poll of less than half of it."""

    @contextmanager
    def paused_during(self, size: Callable[[], int]) -> Iterator[None]:
        """Disable the garbage collector while the context is open.

        Afterwards exempt the objects of a large poll from collection (``gc.freeze``), and give memory that
        smaller polls no longer need back to the kernel.

        ``size``: returns the number of claims and pods.
        """
        gc.disable()
        try:
            yield
        finally:
            if size() >= GC_FREEZE_SIZE:
                self._freeze()
            gc.enable()
            if size() >= self._peak // 2:
                self._peak = max(self._peak, size())
            elif self._peak >= GC_FREEZE_SIZE:  # several times: the last large map may still be in use
                self._peak //= 2
                self._trim()

    def _freeze(self) -> None:
        self._large_rounds += 1
        if self._large_rounds % GC_FREEZES_MAX == 0:
            gc.unfreeze()
            gc.collect()
        gc.freeze()
