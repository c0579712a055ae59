"""The whole core in one function: a state and a snapshot in, the next state and a report out.

Read this first. Nothing here reads a clock, a file or a socket, and nothing is changed in place, so any day
of a node can be replayed from recorded snapshots. What each part decides stands in one file each:

    health/host/         what is wrong with CPUs, memory, hugepages, cgroups; what the rules are shown
    health/gpu/          both, of GPUs, by what can be read of them
    health/faults/       what is wrong with GPUs by what was told once, XIDs above all
    health/stalls.py     who has not looked
    health/machine.py    since when, and until when
    health/message.py    how it is said
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from agent.devices.inventory import Device, Kind, device_pools, gpu_device
from agent.health import message
from agent.health.faults.keeping import Restored
from agent.health.gpu.answers import NOT_ANSWERING
from agent.health.gpu.catalogue import gpu_rules
from agent.health.gpu.judging import gpu_row, judge_gpu, judge_instance
from agent.health.gpu.state import GpuLook, GpuState, look_at_gpus
from agent.health.gpu.verdicts import answers, attributes_of, unseen_of
from agent.health.gpu.views import gpu_devices, gpu_sources, gpu_views
from agent.health.host.catalogue import RULES
from agent.health.host.group_view import GroupView, view_groups
from agent.health.host.groups import GROUP_RULES
from agent.health.host.views import Memory, is_starting, remember, view_device
from agent.health.look import Look, Tracks, row_among
from agent.health.machine import HEALTH
from agent.health.stalls import Stall, find_stalls, stall_cause, stall_limit_ns, with_stall
from agent.model.health import Cause, DeviceHealth, Health, Note, Severity
from agent.model.report import Report
from agent.model.settings import Settings
from agent.model.snapshot import Snapshot
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS, Instant, at_mono

STALL_RETRY_NS: Final = NS
START_NS: Final = 2 * NS  # how long the picture waits for the first pass of what the agent can do without
NVML: Final = "nvml"


@dataclass(frozen=True, slots=True)
class State:
    """Everything the core knows between two looks."""

    settings: Settings
    memory: Memory = field(default_factory=Memory)
    gpus: GpuState = field(default_factory=GpuState)
    tracks: Tracks = field(default_factory=dict)
    stalled: Mapping[str, Stall] = field(default_factory=dict)
    """Sources that stand still, or did so until a moment ago."""
    devices: Mapping[str, DeviceHealth] = field(default_factory=dict)
    """The last verdicts, by device name."""
    began: Instant | None = None
    """When the first look was."""
    looked: Instant | None = None
    """When this state was made."""
    nudge_s: int = 0
    """Added to every lease [s]; see :func:`_nudge`."""
    due_ns: int | None = None
    """Look again at this time even if nothing wakes us: a dwell time ends."""


def begin(settings: Settings, restored: Restored | None = None) -> State:
    """The state of a start; with what an earlier one remembered."""
    if restored is None:
        return State(settings)
    gpus = GpuState(restored.gpus, restored.faults, restored.watched)
    return State(settings, gpus=gpus, tracks=restored.tracks)


def step(state: State, snapshot: Snapshot, now: Instant) -> tuple[State, Report]:
    """One look at the node.

    Args:
        state: As the last call returned it, or that of :func:`begin`.
        snapshot: The newest whole publication of the sources.
        now: The time of this look; the snapshot is not newer.

    Returns:
        The next state, and the whole outward picture. As long as it says that it is starting, it is none
        yet: somebody has still to look for the first time.
    """
    settings = state.settings
    began = state.began or now
    memory = remember(state.memory, snapshot, settings, now)
    gpus = look_at_gpus(state.gpus, snapshot, settings.gpu, now)
    seen = (*snapshot.sources, *gpu_sources(gpus.state.memory, snapshot.gpus, settings.gpu))
    stalled = find_stalls(state.stalled, seen, now)
    sources = {source.name: with_stall(source, stalled) for source in seen}
    look = Look(settings, _tracks(state, gpus), sources, now)
    standing = [source for source in sources.values() if source.state is SourceState.STALLED]
    # a source that returns wakes nobody
    look.due_ns.extend(now.mono_ns + max(source.period_ns, STALL_RETRY_NS) for source in standing)
    starting = [source for source in sources.values() if source.state is SourceState.STARTING]
    look.due_ns.extend(source.beat_ns + stall_limit_ns(source) + 1 for source in starting if source.vital)
    late = now.mono_ns - began.mono_ns >= START_NS
    if not late and any(not source.vital for source in starting):
        look.due_ns.append(began.mono_ns + START_NS)
    nudge_s = _nudge(state, now)
    if not is_starting(snapshot):
        _judge_host(look, memory, snapshot)
    verdicts = {device: _host_verdict(state, look, device, stalled, nudge_s) for device in memory.devices}
    verdicts.update(_gpu_verdicts(state, look, gpus, snapshot, nudge_s))
    devices = [verdicts[device] for device in sorted(verdicts, key=Device.sort_key)]
    notes = tuple(_notes(look, view_groups(memory.groups)))

    report = Report(
        node=settings.node,
        at=now,
        devices=tuple(devices),
        notes=notes,
        not_applicable=tuple(look.not_applicable),
        not_evaluated=tuple(look.not_evaluated),
        sources=tuple(sources.values()),
        core=snapshot.core,
        groups=len(snapshot.groups),
        starting=any(source.vital or not late for source in starting),
    )
    if gpus.due_ns is not None:
        look.due_ns.append(max(gpus.due_ns, now.mono_ns + STALL_RETRY_NS // 10))
    state = replace(
        state,
        memory=memory,
        gpus=gpus.state,
        tracks=look.tracks,
        stalled=stalled,
        devices={device.device: device for device in devices},
        began=began,
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


# --- the host's own devices -------------------------------------------------------------------------------


def _judge_host(look: Look, memory: Memory, snapshot: Snapshot) -> None:
    pools = device_pools(snapshot)
    for device in memory.devices:
        view = view_device(memory, snapshot, pools, look.settings, device)
        for rule in RULES[device.kind]:
            look.judge(device.name, rule, rule.judge(view))


def _host_verdict(
    state: State, look: Look, device: Device, stalled: Mapping[str, Stall], nudge_s: int
) -> DeviceHealth:
    """A device whose source stands still is Unknown whatever was known of it: nobody has looked.

    What was known stays among the causes.
    """
    rules = RULES[device.kind]
    causes = look.causes(device.name, partial(row_among, rules))
    sources = [look.sources[name] for name in dict.fromkeys(rule.source for rule in rules)]
    sources = [source for source in sources if source.state is not SourceState.ABSENT] or sources
    standing = [source for source in sources if source.name in stalled]
    causes[:0] = [stall_cause(source, stalled, look.now) for source in standing]
    severity = Severity.UNKNOWN if standing else causes[0].severity if causes else Severity.OK
    verified = _verified(sources, look.now)
    return _verdict(state, look, device, severity, causes, verified, _lease_s(look, sources) + nudge_s)


def _notes(look: Look, views: list[GroupView]) -> Iterator[Note]:
    for view in views:
        group = view.group
        for rule in GROUP_RULES:
            look.judge(f"group:{group.id}", rule, rule.judge(view))
        for cause in look.causes(f"group:{group.id}", partial(row_among, GROUP_RULES)):
            yield Note(f"pod {group.pod_uid} container {group.container}", cause)


# --- GPUs -------------------------------------------------------------------------------------------------


def _gpu_verdicts(
    state: State, look: Look, gpus: GpuLook, snapshot: Snapshot, nudge_s: int
) -> Iterator[tuple[Device, DeviceHealth]]:
    """Each GPU is judged, then each of its instances: what is wrong with a GPU is wrong with all of them."""
    if snapshot.gpus is None:
        return
    memory, limits = gpus.state.memory, look.settings.gpu
    rules = gpu_rules(limits)
    views = gpu_views(memory, snapshot, limits, look.now)
    source, verified, lease_s = None, look.now, look.settings.lease_s
    above: tuple[Cause, ...] = ()
    for device in gpu_devices(memory):
        if device.kind is Kind.GPU:
            view = views[device.gpu]
            source = look.sources.get(device.name) or look.sources[NVML]
            if _appears(state, look, device, source) and not memory.past[device.gpu].instances:
                look.due_ns.append(source.beat_ns + START_NS)
                continue
            answering = answers(view)
            judge_gpu(look, device, view, rules, gpus, source)
            # of one that does not answer it is verified, just now, that it does not
            verified = _verified([source], look.now) if answering else look.now
            above = unseen_of(view, state.began or look.now)
            if answering and source.state is SourceState.STALLED:
                above = (stall_cause(source, state.stalled, look.now),)
            lease_s = _lease_s(look, [source]) + nudge_s
            parent = ""
        else:
            assert source is not None, "a GPU comes before its instances"
            judge_instance(look, device, gpus, source)
            parent = gpu_device(device.gpu).name
        causes = look.causes(device.name, partial(gpu_row, rules, limits), parent)
        if above and not any(cause.code == NOT_ANSWERING for cause in causes):  # which says why
            causes = sorted([*above, *causes], key=lambda cause: -cause.severity)
        severity = causes[0].severity if causes else Severity.OK
        attributes = attributes_of(memory, snapshot.gpus, snapshot.host, device)
        yield device, _verdict(state, look, device, severity, causes, verified, lease_s, attributes)


def _tracks(state: State, gpus: GpuLook) -> Tracks:
    """Those of before, but of GPUs that have others in their places."""
    if not gpus.replaced:
        return state.tracks
    names = {device.name for device in gpu_devices(state.gpus.memory) if device.gpu in gpus.replaced}
    return {key: track for key, track in state.tracks.items() if key[0] not in names}


def _appears(state: State, look: Look, device: Device, source: SourceSample) -> bool:
    """Whether a GPU was found a moment ago: it is told of when somebody has looked at it, or is late to."""
    if source.name != device.name or source.state is not SourceState.STARTING:
        return False
    known = device.name in state.devices or look.codes_of(device.name)
    return not known and look.now.mono_ns < source.beat_ns + START_NS


# --- verdicts ---------------------------------------------------------------------------------------------


def _verdict(
    state: State,
    look: Look,
    device: Device,
    severity: Severity,
    causes: list[Cause],
    verified: Instant,
    timeout_s: int,
    attributes: tuple[tuple[str, str], ...] = (),
) -> DeviceHealth:
    health, text = HEALTH[severity], message.message(causes)
    before = state.devices.get(device.name)
    return DeviceHealth(
        pool=look.settings.node,
        device=device.name,
        kind=device.kind,
        health=health,
        severity=severity,
        message=text,
        since=_since(state, look, before, (health, severity, text), causes),
        verified=verified,
        timeout_s=timeout_s,
        causes=tuple(causes),
        attributes=attributes,
    )


def _since(
    state: State,
    look: Look,
    before: DeviceHealth | None,
    said: tuple[Health, Severity, str],
    causes: list[Cause],
) -> Instant:
    """When what is said of a device began: with its newest cause, if that came since the last look."""
    if before is not None and (before.health, before.severity, before.message) == said:
        return before.since
    newest = max((cause.since for cause in causes if cause.severity > Severity.INFO), default=look.now)
    return newest if state.looked is None or newest > state.looked else look.now


def _verified(sources: list[SourceSample], now: Instant) -> Instant:
    """When the last of the device's sources was read to its end, on both clocks."""
    beat_ns = min((source.beat_ns for source in sources), default=now.mono_ns)
    return at_mono(beat_ns, now)


def _lease_s(look: Look, sources: list[SourceSample]) -> int:
    """At least three periods of the slowest source: a lease must outlive the next verification."""
    return max(look.settings.lease_s, *(-(-3 * source.period_ns // NS) for source in sources), 0)
