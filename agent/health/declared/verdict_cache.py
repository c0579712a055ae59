"""Declared devices that need not be judged again: nothing that concerns them has changed since they were.

A thousand devices may be declared, and most looks are for one of them or for none. What a look at a device
leaves behind is kept. While what it was judged by is the same, another look would leave the same: only when
it was verified, and for how long that holds, is new. What has a cause that comes or goes, or a check of its
driver's, is judged in every look; so is a whole kind if a source of its rules stands still or is yet to be
read, and all of them when one begins anew.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.devices.inventory import Device, Kind
from agent.health.declared.state import DeclaredPast
from agent.health.evaluation import Evaluation, Subject, row_among
from agent.health.host.catalog import DECLARED_RULES
from agent.health.host.invalidation import EVERYONE, Ground, concerned, cpus_near, ground_of
from agent.health.host.state import HostRuleState, Pools
from agent.health.host.verdicts import sources_of, unread
from agent.health.rules import Growth
from agent.health.verdict import PreviousVerdicts, lease_of, verified_by
from agent.model.cpuset import CpuSet
from agent.model.declared import Declared
from agent.model.health import Cause, DeviceHealth, NotApplicable
from agent.model.snapshot import Snapshot
from agent.model.time import Instant


class Still(NamedTuple):
    """A device of which another look would find the same, and what the last one left behind."""

    declared: Declared
    kind: Kind
    cpus: CpuSet
    """Those of which any change concerns it."""
    throttled: tuple[Growth, Growth] | None
    """Events of its cores, and of its packages; None: nobody counts them."""
    causes: tuple[Cause, ...]
    raised: tuple[tuple[str, str], ...]
    """What is wrong with it: by code, the source that tells."""
    not_applicable: tuple[NotApplicable, ...]
    not_evaluated: tuple[NotApplicable, ...]
    due_in_ns: tuple[int, ...]
    """When to look again, from that look on."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What the last look settled. No more than is declared."""

    passes: Mapping[str, int] = field(default_factory=dict)
    """Of all sources that there were: a rule whose source nobody reads is not judged."""
    grounds: Mapping[Kind, Ground] = field(default_factory=dict)
    """What the devices of each kind were judged by."""
    declared: Mapping[Subject, Declared] = field(default_factory=dict)
    """All that was declared."""
    devices: Mapping[Subject, Still] = field(default_factory=dict)


class _Kind(NamedTuple):
    """All devices of a kind, in one look."""

    ground: Ground
    concerned: CpuSet
    """Whose devices must be judged again."""
    verified: Instant
    timeout_s: int


class Settling:
    """One look at what is settled, in the making.

    Args:
        settled: By the last look.
        past: What is declared now.
        checked: Devices that their drivers check themselves.
    """

    def __init__(
        self,
        look: Evaluation,
        before: PreviousVerdicts,
        settled: Settled,
        past: DeclaredPast,
        memory: HostRuleState,
        snapshot: Snapshot,
        pools: Pools,
        checked: Collection[Subject],
    ) -> None:
        self._look = look
        self._before = before
        self._past = past
        self._watched = memory.cpus.watched
        self._checked = checked
        self._kinds = dict(_kinds(look, before, settled, past, memory, snapshot, pools))
        self._unmoved = self._unmoved_of(settled)
        self._still: dict[Subject, Still] = {}

    def again(self) -> Iterator[tuple[Subject, Device, DeviceHealth | None]]:
        """All devices that are told of, in the order of a report, and what is said of each that need not be
        judged; None: it must be, before the next one's turn.
        """
        look, kinds, unmoved, said_of = self._look, self._kinds, self._unmoved, self._before.devices
        for subject, device in self._past.known.items():
            still, said = unmoved.get(subject), said_of.get(subject)
            if still is None or said is None or said.causes != still.causes:
                yield subject, device, None
                continue
            declared, kind, _, _, _, raised, not_applicable, not_evaluated, due_in_ns = still
            look.not_applicable += not_applicable
            if not_evaluated:
                look.not_evaluated += not_evaluated
            if due_in_ns:
                look.due_ns += [look.now.mono_ns + in_ns for in_ns in due_in_ns]
            for code, source in raised:
                look.again(subject, code, look.sources[source].passes)
            self._still[subject] = still
            _, _, verified, timeout_s = kinds[kind]
            if declared.lease_s:
                timeout_s = with_lease(timeout_s, declared, self._before)
            yield subject, device, said.again(verified, timeout_s)

    def _unmoved_of(self, settled: Settled) -> Mapping[Subject, Still]:
        """Those that the last look settled and nothing new concerns: most often all."""
        known, declared, kinds = settled.devices, self._past.devices, self._kinds
        if declared is not settled.declared:
            known = {subject: one for subject, one in known.items() if one.declared == declared.get(subject)}
        if any(kind not in kinds or kinds[kind].concerned for kind in settled.grounds):
            known = {
                subject: one
                for subject, one in known.items()
                if one.kind in kinds and not one.cpus & kinds[one.kind].concerned
            }
        if self._checked:
            known = {subject: one for subject, one in known.items() if subject not in self._checked}
        if self._watched:
            known = {
                subject: one for subject, one in known.items() if one.throttled == self._throttled(subject)
            }
        return known

    def judged(self, subject: Subject, kind: Kind, found: DeviceHealth, begin: tuple[int, int, int]) -> None:
        """Takes a device that was judged: in the next look it may be settled.

        Args:
            begin: As of :meth:`Look.extent` before it was.
        """
        look = self._look
        raised = look.raised(subject)
        if kind not in self._kinds or raised is None or subject in self._checked:
            return
        not_applicable, not_evaluated, due_ns = begin
        declared = self._past.devices[subject]
        rules = DECLARED_RULES[kind]
        self._still[subject] = Still(
            declared,
            kind,
            cpus_near(declared),
            self._throttled(subject),
            found.causes,
            tuple((code, row_among(rules, code).source) for code in raised),
            tuple(look.not_applicable[not_applicable:]),
            tuple(look.not_evaluated[not_evaluated:]),
            tuple(at_ns - look.now.mono_ns for at_ns in look.due_ns[due_ns:]),
        )

    def settled(self) -> Settled:
        """What this look has settled."""
        grounds = {kind: of.ground for kind, of in self._kinds.items()}
        passes = {source.name: source.passes for source in self._look.sources.values()}
        return Settled(passes, grounds, self._past.devices, self._still)

    def _throttled(self, subject: Subject) -> tuple[Growth, Growth] | None:
        if (watched := self._watched.get(subject)) is None:
            return None
        return watched.throttled.core.growth, watched.throttled.package.growth


def with_lease(timeout_s: int, declared: Declared, before: PreviousVerdicts) -> int:
    """The lease that its driver asks for, unless looks are too rare for that [s]."""
    return max(declared.lease_s + before.nudge_s, timeout_s) if declared.lease_s else timeout_s


def _kinds(
    look: Evaluation,
    before: PreviousVerdicts,
    settled: Settled,
    past: DeclaredPast,
    memory: HostRuleState,
    snapshot: Snapshot,
    pools: Pools,
) -> Iterator[tuple[Kind, _Kind]]:
    """Those that rules judge, and whose sources have been read and go on."""
    goes_on = settled.passes.keys() == look.sources.keys() and all(
        look.sources[name].passes >= passes for name, passes in settled.passes.items()
    )
    for kind, device in past.kinds.items():
        rules = DECLARED_RULES.get(kind, ())
        if not rules or unread(look, device):
            continue
        sources = sources_of(look, device)
        reading = {rule.source for rule in rules} | {source.name for source in sources}
        if reading & before.stalled.keys():
            continue
        ground = ground_of(kind, memory, snapshot, pools, look.settings, look.now)
        yield (
            kind,
            _Kind(
                ground,
                concerned(settled.grounds.get(kind), ground) if goes_on else EVERYONE,
                verified_by(sources, look.now),
                lease_of(look, sources) + before.nudge_s,
            ),
        )
