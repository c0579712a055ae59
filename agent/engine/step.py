"""The whole core in one function: a state and a snapshot in, the next state and a report out.

Read this first. Nothing here reads a clock, a file or a socket, and nothing is changed in place, so any day
of a node can be replayed from recorded snapshots. What each part decides stands in one place each:

    health/host/         what is wrong with CPUs, memory, hugepages, pods and their cgroups, and the node
    health/gpu/          what is wrong with GPUs, by what can be read of them
    health/faults/       what is wrong with GPUs by what was told once, XIDs above all
    health/klog/         what the kernel log says of the host
    health/declared/     all of that for what drivers declare as their devices, and what they know themselves
    health/stalls.py     who has not looked
    health/machine.py    since when, and until when
    health/verdict.py    what is said of a device, and how
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.devices.inventory import Device
from agent.health.declared.checks import check_sources, tracked_as
from agent.health.declared.devices import declared_notes, declared_verdicts
from agent.health.declared.driver_faults import DriverFaultState, remember_told, with_told
from agent.health.declared.state import DeclaredPast, redeclared, remember_declared
from agent.health.declared.verdict_cache import Settled
from agent.health.evaluation import CachedOk, Conditions, Evaluation, Subject
from agent.health.gpu.devices import START_NS, gpu_verdicts
from agent.health.gpu.faults.checkpoint import Restored
from agent.health.gpu.state import GpuLook, GpuState, look_at_gpus
from agent.health.gpu.views import gpu_devices, gpu_sources
from agent.health.host.cgroup.view import view_groups
from agent.health.host.pod.attribution import judge_pods
from agent.health.host.pod.state import PodsPast, remember_pods
from agent.health.host.state import HostRuleState, is_starting, remember
from agent.health.host.verdicts import host_verdicts, judge_host, node_notes
from agent.health.stalls import Stall, find_stalls, stall_limit_ns, with_stall
from agent.health.verdict import PreviousVerdicts
from agent.model.health import DeviceHealth
from agent.model.report import Report
from agent.model.settings import Settings
from agent.model.snapshot import Snapshot
from agent.model.source import SourceState
from agent.model.time import NS, Instant

STALL_RETRY_NS: Final = NS


@dataclass(frozen=True, slots=True)
class State:
    """Everything the core knows between two looks."""

    settings: Settings
    memory: HostRuleState = field(default_factory=HostRuleState)
    gpus: GpuState = field(default_factory=GpuState)
    declared: DeclaredPast = field(default_factory=DeclaredPast)
    settled: Settled = field(default_factory=Settled)
    """Spares work and changes nothing: without it, each declared device is judged."""
    quiet: Mapping[Subject, CachedOk] = field(default_factory=dict)
    """Likewise: without it, so is each of the host's own."""
    told: DriverFaultState = field(default_factory=dict)
    pods: PodsPast = field(default_factory=PodsPast)
    tracks: Conditions = field(default_factory=dict)
    stalled: Mapping[str, Stall] = field(default_factory=dict)
    """Sources that stand still, or did so until a moment ago."""
    devices: Mapping[str, DeviceHealth] = field(default_factory=dict)
    """The last verdicts, by subject."""
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
    declared = remember_declared(state.declared, snapshot.declared, now)
    gpus = look_at_gpus(state.gpus, snapshot, settings.gpu, now)
    seen = (
        *snapshot.sources,
        *gpu_sources(gpus.state.memory, snapshot.gpus, settings.gpu),
        *check_sources(snapshot.checks),
    )
    stalled = find_stalls(state.stalled, seen, now)
    sources = {source.name: source for source in seen}
    sources |= {name: with_stall(sources[name], stalled) for name in stalled}
    pods = remember_pods(state.pods, snapshot.pods, sources, now)
    look = Evaluation(settings, _tracks(state, gpus, declared), sources, now, state.quiet)
    standing = [source for source in sources.values() if source.state is SourceState.STALLED]
    # a source that returns wakes nobody
    look.due_ns.extend(now.mono_ns + max(source.period_ns, STALL_RETRY_NS) for source in standing)
    starting = [source for source in sources.values() if source.state is SourceState.STARTING]
    look.due_ns.extend(source.beat_ns + stall_limit_ns(source) + 1 for source in starting if source.vital)
    late = now.mono_ns - began.mono_ns >= START_NS
    if not late and any(not source.vital for source in starting):
        look.due_ns.append(began.mono_ns + START_NS)
    before = PreviousVerdicts(began, state.looked, state.devices, stalled, _lease_salt(state, now))
    if not is_starting(snapshot):
        judge_host(look, memory, snapshot)
    own = dict(host_verdicts(look, before, memory))
    own.update(gpu_verdicts(look, before, gpus, snapshot))
    found, settled = declared_verdicts(look, before, declared, memory, gpus, snapshot, own, state.settled)
    told = remember_told(look, state.told, snapshot.told, found)
    found.update(with_told(look, before, told, declared.known, found))
    hosts = sorted(own, key=Device.sort_key)  # which come before those that drivers declare
    known = {**{device.subject: device for device in hosts}, **declared.known}
    devices = {device.subject: own[device] for device in hosts} | found
    views = view_groups(memory.groups, snapshot, settings, now)
    of_pods, hurt = judge_pods(look, before, pods, views, known, devices, declared.declaring)
    devices.update(hurt)
    notes = (*node_notes(look, memory, snapshot), *of_pods, *declared_notes(declared))

    report = Report(
        node=settings.node,
        at=now,
        devices=tuple(devices.values()),
        notes=notes,
        declaring=declared.declaring,
        not_applicable=tuple(look.not_applicable),
        not_evaluated=tuple(look.not_evaluated),
        sources=tuple(sources.values()),
        core=snapshot.core,
        groups=len(snapshot.groups),
        starting=any(source.vital or not late for source in starting),
    )
    if gpus.due_ns is not None:
        look.due_ns.append(max(gpus.due_ns, now.mono_ns + STALL_RETRY_NS // 10))
    state = State(
        settings,
        memory=memory,
        gpus=gpus.state,
        declared=declared,
        settled=settled,
        quiet=look.quiet,
        told=told,
        pods=pods,
        tracks=look.tracks,
        stalled=stalled,
        devices=devices,
        began=began,
        looked=now,
        nudge_s=before.nudge_s,
        due_ns=min(look.due_ns, default=None),
    )
    return state, report


def _lease_salt(state: State, now: Instant) -> int:
    """A second more or less of lease after a look that came too late.

    The kubelet lets a lease run out silently, and a message that is identical to the last refreshes it
    without telling the pods. So what is said after a gap differs in one number that nobody minds.
    """
    gap_ns = now.mono_ns - state.looked.mono_ns if state.looked else 0
    if gap_ns <= state.settings.lease_s * NS:  # no device's lease is shorter
        return state.nudge_s
    lease_s = max((device.timeout_s for device in state.devices.values()), default=0)
    return 1 - state.nudge_s if gap_ns > lease_s * NS else state.nudge_s


def _tracks(state: State, gpus: GpuLook, declared: DeclaredPast) -> Conditions:
    """Those of before, but of GPUs that have others in their places, and of names that are other devices'."""
    names = redeclared(state.declared.devices, declared.devices)
    names |= {tracked_as(name) for name in names}
    if gpus.replaced:
        known = gpu_devices(state.gpus.memory)
        names |= {device.name for device in known if device.gpu in gpus.replaced}
    if not names:
        return state.tracks
    return {key: track for key, track in state.tracks.items() if key[0] not in names}
