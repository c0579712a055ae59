"""One round after the other: everybody is asked, a map is made, cgroups are audited, a change is told.

Everything that is loaded for it is loaded with this module, which is only where a kubelet knows claims.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

from agent.config.config import Config
from agent.devices.consumers.consumer_map import consumer_map
from agent.devices.consumers.exclusive_cpus import own_cpus
from agent.devices.consumers.kube_objects import pods_from
from agent.model.claim import DeviceRef
from agent.model.claim_sources import KnownPod, SourceAnswer, SourceAnswers
from agent.model.consumers import ConsumerMap
from agent.model.pods import PodFinding
from agent.model.reading import Absence
from agent.model.report import Report
from agent.model.snapshot import Snapshot
from agent.model.source import SourceState
from agent.model.time import NS, Instant
from agent.node.cgroup_audit import Places
from agent.node.pods.auditing import Audited, audit_pods_once
from agent.node.pods.impact_log import Told as Healths
from agent.node.pods.impact_log import health_of, names_of, prepared_for, tell
from agent.node.pods.pod_list import PodList
from agent.node.pods.queries import Kubelet, ask_drivers, ask_kubelet
from agent.sources.pod_cgroups import live_pods
from agent.system.threads.with_timeout import HungGuard, late

QUIET_S: Final = 35.0
"""After a container's start its cgroups are not judged for 30 s; then they are, not at the next turn [s]."""
AUDIT_S: Final = 60.0
"""How long one audit may take [s]."""
TROUBLES_MAX: Final = 3

Known = tuple[Mapping[str, tuple[DeviceRef, ...]], Mapping[str, str], tuple[PodFinding, ...]]
"""Uses, names and findings, as of agent.model.pods."""
Seen = tuple[Snapshot, Instant]
"""What the core has looked at last, and when."""

log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """What is known now."""

    state: SourceState
    detail: str
    known: Known | None = None
    """None: there is nobody who knows."""


class PodPoller:
    """Remembers from round to round what a source said that does not answer now."""

    def __init__(
        self, config: Config, clock: Callable[[], Instant], patience: HungGuard, listing: PodList
    ) -> None:
        self._config = config
        self._clock = clock
        self._patience = patience
        self._listing = listing
        self._places = Places(
            config.sysfs_root, config.cgroupfs_root, config.kubelet_cgroup_root, config.kubelet_dir
        )
        self._kubelet: Kubelet | None = None
        self._newest: ConsumerMap | None = None
        self._known: ConsumerMap | None = None
        self._uses: Mapping[str, tuple[DeviceRef, ...]] = {}
        self._names: Mapping[str, str] = {}
        self._there: frozenset[str] = frozenset()
        """UIDs of the pods that had not ended when the pods API last told of them."""
        self._with_claims: frozenset[str] = frozenset()
        """Of these, the pods with claims."""
        self._audited = Audited()
        self._audit_ns = clock().mono_ns
        self._told: Healths = {}

    @property
    def newest(self) -> ConsumerMap | None:
        """The newest map, with all its gaps."""
        return self._newest

    @property
    def size(self) -> int:
        """How many claims and pods the newest map has."""
        return len(self._newest.claims) + len(self._newest.pods) if self._newest else 0

    async def hear(self, seen: Seen | None) -> Outcome:
        """Asks everybody. Returns what is known now."""
        kubelet, drivers = await asyncio.gather(
            ask_kubelet(self._config.kubelet_dir, self._patience, self._listing.ask),
            ask_drivers(self._config.kubelet_dir, self._config.state_dir, self._patience),
        )
        pods = pods_from(kubelet.pods)
        live = (live_pods(*seen),) if seen else ()
        heard = SourceAnswers((kubelet.prepared, *drivers), (kubelet.listed,), (pods,), (), live)
        self._kubelet = kubelet
        self._newest = consumer_map(heard)
        if self._known is None or kubelet.prepared.absence is not Absence.UNREADABLE:
            self._known = self._newest
            self._uses = prepared_for(self._known)
            known_before = {uid: name for uid, name in self._names.items() if uid in self._uses}
            self._names = {**known_before, **names_of(self._known)}
        self._note_pods(pods)
        return self._outcome()

    async def audit(self, seen: Seen | None) -> Outcome | None:
        """Looks at the cgroups. Returns what is known then; None: it is not time, or pods are not known."""
        kubelet = self._kubelet
        if kubelet is None or kubelet.pods.absence or not self._audit_is_due():
            return None
        declared = seen[0].declared if seen else ()
        by_drivers = own_cpus(self._known, declared) if self._known else {}
        work = partial(audit_pods_once, self._places, kubelet.pods.items, by_drivers, self._clock().wall_s)
        try:
            found = await self._patience.in_time("audit", work, AUDIT_S)
        except TimeoutError:
            found = Audited(trouble=late("the audit of cgroups", AUDIT_S))
        if found.trouble:  # what was found stays until somebody has looked again
            found = found._replace(findings=self._audited.findings)
        self._audited = found
        every_s = self._config.pods_audit_ns / NS
        self._audit_ns = self._audit_at(min(QUIET_S, every_s) if found.quiet else every_s)
        return self._outcome()

    def wait_s(self) -> float:
        """How long there is nothing to be done, unless something changes."""
        period_s = self._config.pods_period_ns / NS
        if self._audit_is_due() or not self._config.pods_audit_ns or not self._with_claims:
            return period_s  # one that is overdue has to wait for the pods API
        return min(period_s, (self._audit_ns - self._clock().mono_ns) / NS)

    def tell(self, report: Report) -> None:
        """Logs whom it hurts that devices' health is another than when this was last called."""
        if self._known is None:
            return
        found = tell(self._known, health_of(self._known, report, self._config.drivers), self._told)
        self._told = found.told
        for line in found.bad:
            log.warning("%s", line)
        for line in found.good:
            log.info("%s", line)

    def _note_pods(self, pods: SourceAnswer[KnownPod]) -> None:
        if pods.absence is Absence.UNREADABLE:
            return
        if pods.absence and not self._audit_is_due():  # a kubelet that starts anew has no socket for a while
            return
        there = [pod for pod in pods.items if not pod.has_ended]
        with_claims = frozenset(pod.ref.uid for pod in there if pod.claims)
        if with_claims - self._with_claims:
            self._audit_ns = min(self._audit_ns, self._audit_at(QUIET_S))
        self._there, self._with_claims = frozenset(pod.ref.uid for pod in there), with_claims

    def _audit_at(self, in_s: float) -> int:
        return self._clock().mono_ns + int(in_s * NS)

    def _audit_is_due(self) -> bool:
        return bool(self._config.pods_audit_ns) and self._clock().mono_ns >= self._audit_ns

    def _outcome(self) -> Outcome:
        kubelet = self._kubelet
        assert kubelet is not None, "hear() comes first"
        if kubelet.prepared.absence is kubelet.pods.absence is Absence.ABSENT:
            return Outcome(SourceState.ABSENT, f"{self._config.kubelet_dir}: no kubelet that knows claims")
        unread = (kubelet.prepared, kubelet.pods)
        troubles = [one.why for one in unread if one.absence is Absence.UNREADABLE]
        troubles += [self._audited.trouble] if self._audited.trouble else []
        detail = "; ".join(troubles or self._audited.unread[:TROUBLES_MAX])
        if not troubles and kubelet.pods.absence and self._config.pods_audit_ns:
            detail = f"cgroups are not audited: {kubelet.pods.why}"
        state = SourceState.FAILING if troubles else SourceState.OK
        findings = tuple(one for one in self._audited.findings if one.pod_uid in self._there)
        return Outcome(state, detail, (self._uses, self._names, findings))
