"""Cache of verdicts on declared devices: devices whose readings have not changed are not evaluated again.

Up to 4,096 devices can be declared, and most changes concern few of them. A cached verdict only gets a new
verification time and lease (how long the kubelet trusts it). Not cached are devices with health checks or
with a fault that is about to be raised or cleared, and all devices of a kind while a source of that kind is
stalled or starting.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.devices.inventory import DeviceKind, InventoryDevice
from agent.health.declared.state import DeclaredState
from agent.health.evaluation import Evaluation, Subject, row_with_code
from agent.health.host.cache_invalidation import (
    ALL_DEVICES,
    SharedRuleInput,
    changed_cpus,
    cpus_affecting,
    shared_rule_input,
)
from agent.health.host.catalog import DECLARED_RULES
from agent.health.host.state import HostRuleState, PoolsByDevice
from agent.health.host.verdicts import main_sources, starting_sources
from agent.health.rules import CounterGrowth
from agent.health.verdict import VerdictContext, lease_seconds, oldest_pass_time
from agent.model.cpuset import CpuSet
from agent.model.declared_devices import DriverDevice
from agent.model.health import Cause, DeviceHealth, NotApplicable
from agent.model.snapshot import Snapshot
from agent.model.time import Instant


class CachedVerdict(NamedTuple):
    """Rule results of one device from the last evaluation, which are valid while its readings are equal."""

    declared: DriverDevice
    kind: DeviceKind
    cpus: CpuSet
    """CPUs whose changed readings make the results invalid."""
    throttled: tuple[CounterGrowth, CounterGrowth] | None
    """Throttle events of the device's CPU cores, and of their packages; None: not counted for the device."""
    causes: tuple[Cause, ...]
    raised: tuple[tuple[str, str], ...]
    """Raised faults of the device, as (finding code, source)."""
    not_applicable: tuple[NotApplicable, ...]
    not_evaluated: tuple[NotApplicable, ...]
    due_in_ns: tuple[int, ...]
    """Times from the cached evaluation until the device must be evaluated again [ns]."""


@dataclass(frozen=True, slots=True)
class VerdictCache:
    """Cached verdicts of the last evaluation, and the inputs that they depend on."""

    passes: Mapping[str, int] = field(default_factory=dict)
    """Number of passes by source.

    If it decreases or the sources change, all cached verdicts are invalid.
    """
    inputs: Mapping[DeviceKind, SharedRuleInput] = field(default_factory=dict)
    """Inputs of the rules in the last evaluation, by kind of device."""
    declared: Mapping[Subject, DriverDevice] = field(default_factory=dict)
    """Declared devices at the time of the last evaluation."""
    devices: Mapping[Subject, CachedVerdict] = field(default_factory=dict)


class _KindState(NamedTuple):
    """Values that all declared devices of one kind, such as CPUs, share in one evaluation."""

    inputs: SharedRuleInput
    affected_cpus: CpuSet
    """CPUs with changed readings: their devices must be evaluated again."""
    verified: Instant
    timeout_s: int


class CachingEvaluation:
    """One evaluation of declared devices, which reuses cached verdicts and collects those for the next one.

    Args:
        cache: Cached verdicts of the last evaluation.
        state: Current declarations.
        checked: Devices for which their driver runs health checks, which are not cached.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        before: VerdictContext,
        cache: VerdictCache,
        state: DeclaredState,
        host_state: HostRuleState,
        snapshot: Snapshot,
        pools: PoolsByDevice,
        checked: Collection[Subject],
    ) -> None:
        self._evaluation = evaluation
        self._before = before
        self._state = state
        self._watched = host_state.cpus.declared_throttle
        self._checked = checked
        self._kinds = dict(_kind_states(evaluation, before, cache, state, host_state, snapshot, pools))
        self._valid = self._valid_entries(cache)
        self._entries: dict[Subject, CachedVerdict] = {}

    def verdicts(self) -> Iterator[tuple[Subject, InventoryDevice, DeviceHealth | None]]:
        """Yield all reported devices in report order, each with its cached verdict.

        A verdict of None means that the caller must evaluate the device before it takes the next one.
        """
        evaluation, kinds, previous = self._evaluation, self._kinds, self._before.devices
        for subject, device in self._state.known.items():
            entry, verdict = self._valid.get(subject), previous.get(subject)
            if entry is None or verdict is None or verdict.causes != entry.causes:
                yield subject, device, None
                continue
            declared, kind, _, _, _, raised, not_applicable, not_evaluated, due_in_ns = entry
            evaluation.not_applicable += not_applicable
            if not_evaluated:
                evaluation.not_evaluated += not_evaluated
            if due_in_ns:
                evaluation.due_ns += [evaluation.now.mono_ns + in_ns for in_ns in due_in_ns]
            for code, source in raised:
                evaluation.repeat_finding(subject, code, evaluation.sources[source].passes)
            self._entries[subject] = entry
            _, _, verified, timeout_s = kinds[kind]
            if declared.lease_s:
                timeout_s = with_lease(timeout_s, declared, self._before)
            yield subject, device, verdict.with_verification(verified, timeout_s)

    def _valid_entries(self, cache: VerdictCache) -> Mapping[Subject, CachedVerdict]:
        """Return the verdicts of the last evaluation that are still valid, by device."""
        known, declared, kinds = cache.devices, self._state.devices, self._kinds
        if declared is not cache.declared:
            known = {
                subject: entry for subject, entry in known.items() if entry.declared == declared.get(subject)
            }
        if any(kind not in kinds or kinds[kind].affected_cpus for kind in cache.inputs):
            known = {
                subject: entry
                for subject, entry in known.items()
                if entry.kind in kinds and not entry.cpus & kinds[entry.kind].affected_cpus
            }
        if self._checked:
            known = {subject: entry for subject, entry in known.items() if subject not in self._checked}
        if self._watched:
            known = {
                subject: entry
                for subject, entry in known.items()
                if entry.throttled == self._throttled(subject)
            }
        return known

    def store(
        self, subject: Subject, kind: DeviceKind, found: DeviceHealth, begin: tuple[int, int, int]
    ) -> None:
        """Store a device's rule results for the next evaluation, unless they may change by themselves.

        Args:
            begin: Result of the evaluation's ``list_lengths()`` before the device was evaluated.
        """
        evaluation = self._evaluation
        raised = evaluation.stable_codes(subject)
        if kind not in self._kinds or raised is None or subject in self._checked:
            return
        not_applicable, not_evaluated, due_ns = begin
        declared = self._state.devices[subject]
        rules = DECLARED_RULES[kind]
        self._entries[subject] = CachedVerdict(
            declared,
            kind,
            cpus_affecting(declared),
            self._throttled(subject),
            found.causes,
            tuple((code, row_with_code(rules, code).source) for code in raised),
            tuple(evaluation.not_applicable[not_applicable:]),
            tuple(evaluation.not_evaluated[not_evaluated:]),
            tuple(at_ns - evaluation.now.mono_ns for at_ns in evaluation.due_ns[due_ns:]),
        )

    def next_cache(self) -> VerdictCache:
        """Return the verdicts of this evaluation that the next evaluation may reuse."""
        inputs = {kind: state.inputs for kind, state in self._kinds.items()}
        passes = {source.name: source.passes for source in self._evaluation.sources.values()}
        return VerdictCache(passes, inputs, self._state.devices, self._entries)

    def _throttled(self, subject: Subject) -> tuple[CounterGrowth, CounterGrowth] | None:
        if (watched := self._watched.get(subject)) is None:
            return None
        return watched.throttled.core.growth, watched.throttled.package.growth


def with_lease(timeout_s: int, declared: DriverDevice, before: VerdictContext) -> int:
    """Return how long the kubelet trusts a verdict [s]: the declared lease, or ``timeout_s`` if longer."""
    return max(declared.lease_s + before.lease_salt_s, timeout_s) if declared.lease_s else timeout_s


def _kind_states(
    evaluation: Evaluation,
    before: VerdictContext,
    cache: VerdictCache,
    state: DeclaredState,
    host_state: HostRuleState,
    snapshot: Snapshot,
    pools: PoolsByDevice,
) -> Iterator[tuple[DeviceKind, _KindState]]:
    """Yield the values that declared devices share, for each kind that has rules.

    Kinds are left out while one of their sources is stalled or starting.
    """
    is_continued = cache.passes.keys() == evaluation.sources.keys() and all(
        evaluation.sources[name].passes >= passes for name, passes in cache.passes.items()
    )
    for kind, device in state.kinds.items():
        rules = DECLARED_RULES.get(kind, ())
        if not rules or starting_sources(evaluation, device):
            continue
        sources = main_sources(evaluation, device)
        reading = {rule.source for rule in rules} | {source.name for source in sources}
        if reading & before.stalls.keys():
            continue
        inputs = shared_rule_input(kind, host_state, snapshot, pools, evaluation.settings, evaluation.now)
        yield (
            kind,
            _KindState(
                inputs,
                changed_cpus(cache.inputs.get(kind), inputs) if is_continued else ALL_DEVICES,
                oldest_pass_time(sources, evaluation.now),
                lease_seconds(evaluation, sources) + before.lease_salt_s,
            ),
        )
