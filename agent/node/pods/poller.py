"""Poller of pods that use devices: queries the sources, builds the consumer map, audits cgroups.

Imported, with its dependencies, only where a kubelet with claims runs, to save memory elsewhere.
"""

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple

from agent.allocatable.evaluate import findings_of
from agent.allocatable.pod_object import parse_pod
from agent.allocatable.verdicts import AuditVerdict
from agent.config.config import Config
from agent.devices.consumers.consumer_map import consumer_map
from agent.devices.consumers.exclusive_cpus import exclusive_cpus
from agent.devices.consumers.kube_objects import pods_from
from agent.errors import PermissionDenied, ProbeError
from agent.model.claim import DeviceRef
from agent.model.claim_sources import KnownPod, SourceAnswer, SourceAnswers
from agent.model.consumers import ConsumerMap
from agent.model.objects import Object
from agent.model.pods import PodFinding
from agent.model.reading import Absence
from agent.model.report import Report
from agent.model.snapshot import Snapshot
from agent.model.source import SourceState
from agent.model.time import NS, Instant
from agent.node.cgroup_audit import ExclusiveByPod, NodePaths, audit
from agent.node.pods.impact_log import (
    HealthByDevice,
    healths_of_claimed,
    impact_lines,
    names_of,
    prepared_for,
)
from agent.node.pods.kubelet_watch import PodList
from agent.node.pods.queries import KubeletAnswers, query_drivers, query_kubelet
from agent.sources.pod_cgroups import live_pods
from agent.system.threads.with_timeout import HungGuard, timeout_reason

AUDIT_DELAY_S: Final = 35.0
"""Delay of the audit of a new pod: cgroups are not audited in the first 30 s of a container [s]."""
AUDIT_S: Final = 60.0
"""Time limit of one audit [s]."""
PROBLEMS_MAX: Final = 3
"""Largest number of unreadable pods named in the source's detail text."""
GC_FREEZE_SIZE: Final = 1_000
"""Number of claims and pods from which objects are frozen: a collection would take 10 ms."""
GC_FREEZES_MAX: Final = 256
"""Number of large polls between two full collections: each poll leaves some hundred garbage objects."""

KnownPods = tuple[Mapping[str, tuple[DeviceRef, ...]], Mapping[str, str], tuple[PodFinding, ...]]
"""Uses, names and findings, as in :class:`agent.model.pods.PodsSample`."""
CoreSnapshot = tuple[Snapshot, Instant]
"""Last snapshot of the core, and its time."""

log = logging.getLogger(__name__)


class CgroupAuditResult(NamedTuple):
    """Result of one audit of the pods with claims."""

    findings: tuple[PodFinding, ...] = ()
    is_quiet: bool = False
    """Whether a difference is not reported yet, because a container has just started or was resized."""
    problem: str = ""
    """Reason why the audit failed; then no findings does not mean that all is well."""
    unreadable: tuple[str, ...] = ()
    """Pods that could not be audited, each with the reason."""


def audit_pods_once(
    paths: NodePaths, objects: Sequence[Object], by_drivers: ExclusiveByPod, now_wall_s: float
) -> CgroupAuditResult:
    """Audit the cgroups of active pods with claims. Blocks on the kernel.

    Args:
        paths: Paths of the node.
        objects: All pods of the node as v1.Pod objects.
        by_drivers: CPUs that drivers allocated to containers.
        now_wall_s: Current time [s since 1970].
    """
    pods, unreadable = [], []
    for obj in objects:
        try:
            pods.append(parse_pod(obj))
        except ProbeError as error:
            unreadable.append(str(error))
    chosen = [pod for pod in pods if pod.active and (pod.claims or pod.grants)]
    if not chosen:
        return CgroupAuditResult(unreadable=tuple(unreadable))
    try:
        found = audit(paths, pods, chosen, now_wall_s, classes=False, by_drivers=by_drivers)
    except (ProbeError, PermissionDenied) as error:
        return CgroupAuditResult(problem=str(error))
    if found.facts is None:
        return CgroupAuditResult(problem="; ".join(found.gaps))
    return CgroupAuditResult(
        tuple(finding for judged in found.pods for finding in findings_of(judged)),
        any(
            comparison.verdict is AuditVerdict.QUIET
            for judged in found.pods
            for comparison in judged.compared
        ),
        unreadable=(*unreadable, *found.unreadable),
    )


class PodsState(NamedTuple):
    """State of the pods source, and the device uses that it knows."""

    state: SourceState
    detail: str
    known: KnownPods | None = None
    """Known uses of devices by pods; None: no source of pods exists."""


class PodPoller:
    """Poller of the sources of pods; keeps the last answer of a source that does not answer now. Event loop
    only."""

    def __init__(
        self, config: Config, clock: Callable[[], Instant], guard: HungGuard, pod_list: PodList
    ) -> None:
        self._config = config
        self._clock = clock
        self._guard = guard
        self._pod_list = pod_list
        self._paths = NodePaths(
            config.sysfs_root, config.cgroupfs_root, config.kubelet_cgroup_root, config.kubelet_dir
        )
        self._kubelet: KubeletAnswers | None = None
        self._newest: ConsumerMap | None = None
        self._reliable: ConsumerMap | None = None
        """Newest consumer map that was built with a readable kubelet checkpoint; None: none yet."""
        self._uses: Mapping[str, tuple[DeviceRef, ...]] = {}
        self._names: Mapping[str, str] = {}
        self._active_uids: frozenset[str] = frozenset()
        """UIDs of pods that had not ended in the last answer of the pods API."""
        self._with_claims: frozenset[str] = frozenset()
        """UIDs of the active pods that have claims."""
        self._last_audit = CgroupAuditResult()
        self._audit_ns = clock().mono_ns
        self._reported: HealthByDevice = {}

    @property
    def newest(self) -> ConsumerMap | None:
        """Newest consumer map, even if a source was unreadable; None: none was built yet."""
        return self._newest

    @property
    def size(self) -> int:
        """Number of claims and pods in the newest consumer map."""
        return len(self._newest.claims) + len(self._newest.pods) if self._newest else 0

    async def poll(self, core: CoreSnapshot | None) -> PodsState:
        """Query all sources and build the consumer map. Returns the new state."""
        kubelet, drivers = await asyncio.gather(
            query_kubelet(self._config.kubelet_dir, self._guard, self._pod_list.get),
            query_drivers(self._config.kubelet_dir, self._config.state_dir, self._guard),
        )
        pods = pods_from(kubelet.pods)
        live = (live_pods(*core),) if core else ()
        answers = SourceAnswers((kubelet.prepared, *drivers), (kubelet.listed,), (pods,), (), live)
        self._kubelet = kubelet
        self._newest = consumer_map(answers)
        if self._reliable is None or kubelet.prepared.absence is not Absence.UNREADABLE:
            self._reliable = self._newest
            self._uses = prepared_for(self._reliable)
            known_before = {uid: name for uid, name in self._names.items() if uid in self._uses}
            self._names = {**known_before, **names_of(self._reliable)}
        self._track_pods(pods)
        return self._state()

    async def audit(self, core: CoreSnapshot | None) -> PodsState | None:
        """Audit the cgroups of pods with claims. Returns the new state; None: no audit is due, or the pods
        are unknown."""
        kubelet = self._kubelet
        if kubelet is None or kubelet.pods.absence or not self._audit_is_due():
            return None
        declared = core[0].declared if core else ()
        by_drivers = exclusive_cpus(self._reliable, declared) if self._reliable else {}
        work = partial(audit_pods_once, self._paths, kubelet.pods.items, by_drivers, self._clock().wall_s)
        try:
            found = await self._guard.run("audit", work, AUDIT_S)
        except TimeoutError:
            found = CgroupAuditResult(problem=timeout_reason("audit of cgroups", AUDIT_S))
        if found.problem:  # findings stay until the next successful audit
            found = found._replace(findings=self._last_audit.findings)
        self._last_audit = found
        every_s = self._config.pods_audit_ns / NS
        self._audit_ns = self._in_ns(min(AUDIT_DELAY_S, every_s) if found.is_quiet else every_s)
        return self._state()

    def wait_s(self) -> float:
        """Return the time until the next poll or audit is due."""
        period_s = self._config.pods_period_ns / NS
        if self._audit_is_due() or not self._config.pods_audit_ns or not self._with_claims:
            return period_s  # an overdue audit waits for the pods API
        return min(period_s, (self._audit_ns - self._clock().mono_ns) / NS)

    def log_impact(self, report: Report) -> None:
        """Log which pods are affected by devices whose health changed since the last call."""
        if self._reliable is None:
            return
        healths = healths_of_claimed(self._reliable, report, self._config.drivers)
        lines = impact_lines(self._reliable, healths, self._reported)
        self._reported = lines.reported
        for line in lines.bad:
            log.warning("%s", line)
        for line in lines.good:
            log.info("%s", line)

    def _track_pods(self, pods: SourceAnswer[KnownPod]) -> None:
        if pods.absence is Absence.UNREADABLE:
            return
        if pods.absence and not self._audit_is_due():  # a kubelet that restarts has no socket for a while
            return
        active = [pod for pod in pods.items if not pod.has_ended]
        with_claims = frozenset(pod.ref.uid for pod in active if pod.claims)
        if with_claims - self._with_claims:
            self._audit_ns = min(self._audit_ns, self._in_ns(AUDIT_DELAY_S))
        self._active_uids, self._with_claims = frozenset(pod.ref.uid for pod in active), with_claims

    def _in_ns(self, in_s: float) -> int:
        return self._clock().mono_ns + int(in_s * NS)

    def _audit_is_due(self) -> bool:
        return bool(self._config.pods_audit_ns) and self._clock().mono_ns >= self._audit_ns

    def _state(self) -> PodsState:
        kubelet = self._kubelet
        assert kubelet is not None, "poll() comes first"
        if kubelet.prepared.absence is kubelet.pods.absence is Absence.ABSENT:
            return PodsState(SourceState.ABSENT, f"{self._config.kubelet_dir}: no kubelet that knows claims")
        answers = (kubelet.prepared, kubelet.pods)
        problems = [answer.reason for answer in answers if answer.absence is Absence.UNREADABLE]
        problems += [self._last_audit.problem] if self._last_audit.problem else []
        detail = "; ".join(problems or self._last_audit.unreadable[:PROBLEMS_MAX])
        if not problems and kubelet.pods.absence and self._config.pods_audit_ns:
            detail = f"cgroups are not audited: {kubelet.pods.reason}"
        state = SourceState.FAILING if problems else SourceState.OK
        findings = tuple(
            finding for finding in self._last_audit.findings if finding.pod_uid in self._active_uids
        )
        return PodsState(state, detail, (self._uses, self._names, findings))


class GcControl:
    """Control of Python's garbage collector during a poll; at most one per process.

    A poll of a large node creates half a million objects without cycles. The collector would traverse them
    several times with the GIL held, and stall the core for a quarter of a second each time.
    """

    def __init__(self) -> None:
        self._large_rounds = 0

    @contextmanager
    def paused(self, size: Callable[[], int]) -> Iterator[None]:
        """Disable the collector, and freeze all objects afterwards if `size` returns a large number."""
        gc.disable()
        try:
            yield
        finally:
            if size() >= GC_FREEZE_SIZE:
                self._freeze()
            gc.enable()

    def _freeze(self) -> None:
        self._large_rounds += 1
        if self._large_rounds % GC_FREEZES_MAX == 0:
            gc.unfreeze()
            gc.collect()
        gc.freeze()
