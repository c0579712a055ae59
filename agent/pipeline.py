"""The whole core in one function: a state and a snapshot in, the next state and a report out.

Read this first. Nothing here reads a clock, a file or a socket, and nothing is changed in place, so any day
of a node can be replayed from recorded snapshots. What each part decides stands in one file each:

    health/views.py      what the rules are shown, and what is remembered for that
    health/rules.py      what is wrong
    health/machine.py    since when, and until when
    health/message.py    how it is said
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from agent.devices.inventory import Device, Kind, device_pools
from agent.health import machine, message
from agent.health.catalogue import (
    CLEAN_PASSES,
    CPU_RULES,
    GROUP_RULES,
    POOL_RULES,
    STALLED,
    STALLED_ADVICE,
    Rule,
    unreadable_of,
)
from agent.health.machine import HEALTH, Track, advance, worst_first
from agent.health.rules import Answer, GroupView, Inapplicable, Unevaluated, Unreadable
from agent.health.views import Memory, is_starting, remember, view_device, view_groups
from agent.model.health import Blame, Cause, DeviceHealth, Finding, Health, NotApplicable, Note, Severity
from agent.model.report import Report
from agent.model.settings import Settings
from agent.model.snapshot import Snapshot, SourceSample, SourceState
from agent.model.time import NS, Instant

RULES: Final[Mapping[Kind, tuple[Rule, ...]]] = {Kind.CPU: CPU_RULES, Kind.HUGEPAGES: POOL_RULES}
STALL_PERIODS: Final = 3
STALL_MIN_NS: Final = 2 * NS  # a busy machine delays a 10 ms sampler by more than three periods
STALL_RETRY_NS: Final = NS

Subject = str
"""A device's name, or ``group:<id>``."""


class Stall(NamedTuple):
    """A source that stands still."""

    since: Instant
    passes: int
    """How many it had finished when it last stood still."""


@dataclass(frozen=True, slots=True)
class State:
    """Everything the core knows between two looks."""

    settings: Settings
    memory: Memory = field(default_factory=Memory)
    tracks: Mapping[tuple[Subject, str], Track] = field(default_factory=dict)
    stalled: Mapping[str, Stall] = field(default_factory=dict)
    """Sources that stand still, or did so until a moment ago."""
    devices: Mapping[str, DeviceHealth] = field(default_factory=dict)
    """The last verdicts, by device name."""
    looked: Instant | None = None
    """When this state was made."""
    nudge_s: int = 0
    """Added to every lease [s]; see :func:`_nudge`."""
    due_ns: int | None = None
    """Look again at this time even if nothing wakes us: a dwell time ends."""


@dataclass(slots=True)
class _Look:
    """One look in the making: inputs, and what the rules have answered so far."""

    state: State
    snapshot: Snapshot
    now: Instant
    sources: dict[str, SourceSample]
    tracks: dict[tuple[Subject, str], Track] = field(default_factory=dict)
    not_applicable: list[NotApplicable] = field(default_factory=list)
    not_evaluated: list[NotApplicable] = field(default_factory=list)
    due_ns: list[int] = field(default_factory=list)


def step(state: State, snapshot: Snapshot, now: Instant) -> tuple[State, Report]:
    """One look at the node.

    Args:
        state: As the last call returned it, or ``State(settings)``.
        snapshot: The newest whole publication of the sources.
        now: The time of this look; the snapshot is not newer.

    Returns:
        The next state, and the whole outward picture. As long as one of its sources is STARTING, it is
        none yet: nobody has looked, and the first look may still be in time.
    """
    settings = state.settings
    memory = remember(state.memory, snapshot, settings, now)
    stalled = _stalls(state, snapshot, now)
    sources = {source.name: _with_stall(source, stalled) for source in snapshot.sources}
    look = _Look(state, snapshot, now, sources)
    standing = [source for source in sources.values() if source.state is SourceState.STALLED]
    # a source that returns wakes nobody
    look.due_ns.extend(now.mono_ns + max(source.period_ns, STALL_RETRY_NS) for source in standing)
    if is_starting(snapshot):
        starting = [source for source in sources.values() if source.state is SourceState.STARTING]
        look.due_ns.extend(source.beat_ns + _stall_limit_ns(source) + 1 for source in starting)
    else:
        _judge_devices(look, memory)
    nudge_s = _nudge(state, now)
    devices = tuple(_verdict(look, device, stalled, nudge_s) for device in memory.devices)
    notes = tuple(_notes(look, view_groups(memory)))

    report = Report(
        node=settings.node,
        at=now,
        devices=devices,
        notes=notes,
        not_applicable=tuple(look.not_applicable),
        not_evaluated=tuple(look.not_evaluated),
        sources=tuple(sources.values()),
        core=snapshot.core,
        groups=len(snapshot.groups),
    )
    state = replace(
        state,
        memory=memory,
        tracks=look.tracks,
        stalled=stalled,
        devices={device.device: device for device in devices},
        looked=now,
        nudge_s=nudge_s,
        due_ns=min(look.due_ns, default=None),
    )
    return state, report


def _nudge(state: State, now: Instant) -> int:
    """A second more or less of lease after a look that came too late.

    The kubelet lets a lease run out silently, and a message that is identical to the last refreshes it
    without telling the pods. So what is said after a gap differs in one number that nobody minds.
    """
    lease_s = max((device.timeout_s for device in state.devices.values()), default=state.settings.lease_s)
    late = state.looked is not None and now.mono_ns - state.looked.mono_ns > lease_s * NS
    return 1 - state.nudge_s if late else state.nudge_s


def _stall_limit_ns(source: SourceSample) -> int:
    return max(STALL_PERIODS * source.period_ns, STALL_MIN_NS)


def stands_still(source: SourceSample, now: Instant) -> bool:
    """Whether the source's last pass is too long ago, whatever it said then."""
    return now.mono_ns - source.beat_ns > _stall_limit_ns(source)


def _stalls(state: State, snapshot: Snapshot, now: Instant) -> dict[str, Stall]:
    """The sources that stand still. One that goes on must finish some passes before it is believed."""
    found: dict[str, Stall] = {}
    for source in snapshot.sources:
        before = state.stalled.get(source.name)
        if source.state is SourceState.ABSENT:
            continue
        if stands_still(source, now):
            found[source.name] = Stall(before.since if before else now, source.passes)
        elif before and source.passes < before.passes + CLEAN_PASSES:
            found[source.name] = before
    return found


def _with_stall(source: SourceSample, stalled: Mapping[str, Stall]) -> SourceSample:
    if source.name not in stalled:
        return source
    detail = f"no pass for more than {_stall_limit_ns(source) / NS:g} s"
    return source._replace(state=SourceState.STALLED, detail=detail)


def _judge_devices(look: _Look, memory: Memory) -> None:
    pools = device_pools(look.snapshot)
    for device in memory.devices:
        view = view_device(memory, look.snapshot, pools, look.state.settings, device)
        for rule in RULES[device.kind]:
            _judge(look, device.name, rule, rule.judge(view))


def _judge(look: _Look, subject: Subject, rule: Rule, answer: Answer) -> None:
    """Move the tracks of one rule and of its unreadability by one answer."""
    if isinstance(answer, Inapplicable):
        look.not_applicable.append(NotApplicable(subject, rule.code, answer.reason))
        return
    if rule.counter:  # a rate is judged by looks that are not too far apart
        look.due_ns.append(look.now.mono_ns + look.state.settings.throttle_window_s * NS // 2)
    unreadable = unreadable_of(rule)
    if isinstance(answer, Unreadable):
        finding = Finding(unreadable.code, Severity.UNKNOWN, f"{answer.what}: {answer.why}")
        _track(look, subject, unreadable, finding)
        _track(look, subject, rule, None, seen=False)
    elif isinstance(answer, Unevaluated):
        look.not_evaluated.append(NotApplicable(subject, rule.code, answer.reason))
        _track(look, subject, unreadable, None)
        _track(look, subject, rule, None, seen=False)
    else:
        _track(look, subject, unreadable, None)
        _track(look, subject, rule, answer)


def _track(look: _Look, subject: Subject, rule: Rule, finding: Finding | None, *, seen: bool = True) -> None:
    source = look.sources[rule.source]
    seen = seen and source.state is not SourceState.STALLED
    before = look.state.tracks.get((subject, rule.code))
    track = advance(before, finding, rule, source.passes, look.now, seen=seen)
    if track is None:
        return
    look.tracks[subject, rule.code] = track
    if not seen:  # time alone moves nothing that nobody can see
        return
    due = machine.due_ns(track, rule, source.period_ns, look.now.mono_ns)
    if due is not None:
        look.due_ns.append(due)


def _causes(look: _Look, subject: Subject, rules: tuple[Rule, ...]) -> Iterator[Cause]:
    rows = {row.code: row for rule in rules for row in (rule, unreadable_of(rule))}
    mine = ((code, look.tracks[subject, code]) for code in rows if (subject, code) in look.tracks)
    for code, track in worst_first(mine):
        row, finding = rows[code], track.finding
        yield Cause(code, finding.severity, row.blame, finding.evidence, row.advice, track.since)


def _verdict(look: _Look, device: Device, stalled: Mapping[str, Stall], nudge_s: int) -> DeviceHealth:
    """One device's verdict from its causes, and from how its sources are doing.

    A device whose source stands still is Unknown whatever was known of it: nobody has looked. What was
    known stays among the causes.
    """
    rules = RULES[device.kind]
    causes = list(_causes(look, device.name, rules))
    sources = [look.sources[name] for name in dict.fromkeys(rule.source for rule in rules)]
    sources = [source for source in sources if source.state is not SourceState.ABSENT] or sources
    standing = [source for source in sources if source.name in stalled]
    health = HEALTH[causes[0].severity if causes else Severity.OK]
    severity = causes[0].severity if causes else Severity.OK
    if standing:
        health, severity = Health.UNKNOWN, Severity.UNKNOWN
        causes[:0] = [_stall_cause(source, stalled[source.name].since) for source in standing]
    verdict = DeviceHealth(
        pool=look.state.settings.node,
        device=device.name,
        kind=device.kind,
        health=health,
        severity=severity,
        message=message.message(causes),
        since=look.now,
        verified=_verified(sources, look.now),
        timeout_s=_lease_s(look.state.settings.lease_s, sources) + nudge_s,
        causes=tuple(causes),
    )
    before = look.state.devices.get(device.name)
    same = before and (before.health, before.severity, before.message) == (health, severity, verdict.message)
    return replace(verdict, since=before.since) if before and same else verdict


def _stall_cause(source: SourceSample, since: Instant) -> Cause:
    evidence = f"{source.name}: {source.detail}"
    return Cause(STALLED, Severity.UNKNOWN, Blame.AGENT, evidence, STALLED_ADVICE, since)


def _verified(sources: list[SourceSample], now: Instant) -> Instant:
    """When the last of the device's sources was read to its end, on both clocks."""
    beat_ns = min((source.beat_ns for source in sources), default=now.mono_ns)
    return Instant(beat_ns, now.wall_s - (now.mono_ns - beat_ns) / NS)


def _lease_s(lease_s: int, sources: list[SourceSample]) -> int:
    """At least three periods of the slowest source: a lease must outlive the next verification."""
    return max(lease_s, *(-(-3 * source.period_ns // NS) for source in sources), 0)


def _notes(look: _Look, views: list[GroupView]) -> Iterator[Note]:
    for view in views:
        group = view.group
        for rule in GROUP_RULES:
            _judge(look, f"group:{group.id}", rule, rule.judge(view))
        for cause in _causes(look, f"group:{group.id}", GROUP_RULES):
            yield Note(f"pod {group.pod_uid} container {group.container}", cause)
