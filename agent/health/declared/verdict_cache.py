"""Cache of verdicts on declared devices whose inputs have not changed.

Up to 4,096 devices can be declared, and most evaluations concern few of them. The cache keeps the results of
an evaluation while its inputs are equal; only verification time and lease are updated. Devices with a
changing condition or with checks are always evaluated, as is a kind with a stalled or starting source, and
all devices after a source restarts.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.devices.inventory import Device, DeviceKind
from agent.health.declared.state import DeclaredState
from agent.health.evaluation import Evaluation, Subject, row_with_code
from agent.health.host.catalog import DECLARED_RULES
from agent.health.host.invalidation import ALL_DEVICES, KindInputs, affected_cpus, cpus_affecting, kind_inputs
from agent.health.host.state import HostRuleState, Pools
from agent.health.host.verdicts import sources_starting, verifying_sources
from agent.health.rules import Growth
from agent.health.verdict import PreviousVerdicts, lease_seconds, verified_at
from agent.model.cpuset import CpuSet
from agent.model.declared import Declared
from agent.model.health import Cause, DeviceHealth, NotApplicable
from agent.model.snapshot import Snapshot
from agent.model.time import Instant


class CachedVerdict(NamedTuple):
    """Cached results of the evaluation of one device."""

    declared: Declared
    kind: DeviceKind
    cpus: CpuSet
    """CPUs whose changes require a new evaluation of the device."""
    throttled: tuple[Growth, Growth] | None
    """Throttle events of the device's CPU cores and of their packages; None: not counted."""
    causes: tuple[Cause, ...]
    raised: tuple[tuple[str, str], ...]
    """Conditions that the evaluation left raised, as (code, source)."""
    not_applicable: tuple[NotApplicable, ...]
    not_evaluated: tuple[NotApplicable, ...]
    due_in_ns: tuple[int, ...]
    """Times at which the device must be evaluated again, relative to the cached evaluation [ns]."""


@dataclass(frozen=True, slots=True)
class VerdictCache:
    """Cached verdicts of the last evaluation; at most one per declared device."""

    passes: Mapping[str, int] = field(default_factory=dict)
    """Number of passes of each source, by source name; rules run only if their source exists."""
    inputs: Mapping[DeviceKind, KindInputs] = field(default_factory=dict)
    """Inputs of the rules by kind of device."""
    declared: Mapping[Subject, Declared] = field(default_factory=dict)
    """Declared devices at the time of the last evaluation."""
    devices: Mapping[Subject, CachedVerdict] = field(default_factory=dict)


class _KindState(NamedTuple):
    """State that all devices of one kind share in one evaluation."""

    inputs: KindInputs
    affected_cpus: CpuSet
    """CPUs whose devices must be evaluated again."""
    verified: Instant
    timeout_s: int


class CachedEvaluation:
    """Evaluation of declared devices that uses cached verdicts where possible.

    Args:
        cache: Cache from the last evaluation.
        state: Current declarations.
        checked: Devices for which their driver runs health checks.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        before: PreviousVerdicts,
        cache: VerdictCache,
        state: DeclaredState,
        memory: HostRuleState,
        snapshot: Snapshot,
        pools: Pools,
        checked: Collection[Subject],
    ) -> None:
        self._evaluation = evaluation
        self._before = before
        self._state = state
        self._watched = memory.cpus.declared_throttle
        self._checked = checked
        self._kinds = dict(_kind_states(evaluation, before, cache, state, memory, snapshot, pools))
        self._valid = self._valid_entries(cache)
        self._entries: dict[Subject, CachedVerdict] = {}

    def verdicts(self) -> Iterator[tuple[Subject, Device, DeviceHealth | None]]:
        """Yield all reported devices in report order, each with its cached verdict.

        A verdict of None means that the caller must evaluate the device before it takes the next one.
        """
        evaluation, kinds, entries, previous = (
            self._evaluation,
            self._kinds,
            self._valid,
            self._before.devices,
        )
        for subject, device in self._state.known.items():
            entry, verdict = entries.get(subject), previous.get(subject)
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
            yield subject, device, verdict.again(verified, timeout_s)

    def _valid_entries(self, cache: VerdictCache) -> Mapping[Subject, CachedVerdict]:
        """Return the cached verdicts that are still valid after all changes; usually all verdicts."""
        known, declared, kinds = cache.devices, self._state.devices, self._kinds
        if declared is not cache.declared:
            known = {subject: one for subject, one in known.items() if one.declared == declared.get(subject)}
        if any(kind not in kinds or kinds[kind].affected_cpus for kind in cache.inputs):
            known = {
                subject: one
                for subject, one in known.items()
                if one.kind in kinds and not one.cpus & kinds[one.kind].affected_cpus
            }
        if self._checked:
            known = {subject: one for subject, one in known.items() if subject not in self._checked}
        if self._watched:
            known = {
                subject: one for subject, one in known.items() if one.throttled == self._throttled(subject)
            }
        return known

    def store(
        self, subject: Subject, kind: DeviceKind, found: DeviceHealth, begin: tuple[int, int, int]
    ) -> None:
        """Store the results of the evaluation of a device in the cache, if they are cacheable.

        Args:
            begin: :meth:`Evaluation.mark` before the device was evaluated.
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

    def cache(self) -> VerdictCache:
        """Return the cached verdicts for the next evaluation."""
        inputs = {kind: of.inputs for kind, of in self._kinds.items()}
        passes = {source.name: source.passes for source in self._evaluation.sources.values()}
        return VerdictCache(passes, inputs, self._state.devices, self._entries)

    def _throttled(self, subject: Subject) -> tuple[Growth, Growth] | None:
        if (watched := self._watched.get(subject)) is None:
            return None
        return watched.throttled.core.growth, watched.throttled.package.growth


def with_lease(timeout_s: int, declared: Declared, before: PreviousVerdicts) -> int:
    """Return the lease that the driver declares, or a longer lease if passes are too rare for it [s]."""
    return max(declared.lease_s + before.lease_salt_s, timeout_s) if declared.lease_s else timeout_s


def _kind_states(
    evaluation: Evaluation,
    before: PreviousVerdicts,
    cache: VerdictCache,
    state: DeclaredState,
    memory: HostRuleState,
    snapshot: Snapshot,
    pools: Pools,
) -> Iterator[tuple[DeviceKind, _KindState]]:
    """Yield the state of each kind of device that has rules and whose sources all run."""
    is_continued = cache.passes.keys() == evaluation.sources.keys() and all(
        evaluation.sources[name].passes >= passes for name, passes in cache.passes.items()
    )
    for kind, device in state.kinds.items():
        rules = DECLARED_RULES.get(kind, ())
        if not rules or sources_starting(evaluation, device):
            continue
        sources = verifying_sources(evaluation, device)
        reading = {rule.source for rule in rules} | {source.name for source in sources}
        if reading & before.stalled.keys():
            continue
        inputs = kind_inputs(kind, memory, snapshot, pools, evaluation.settings, evaluation.now)
        yield (
            kind,
            _KindState(
                inputs,
                affected_cpus(cache.inputs.get(kind), inputs) if is_continued else ALL_DEVICES,
                verified_at(sources, evaluation.now),
                lease_seconds(evaluation, sources) + before.lease_salt_s,
            ),
        )
