"""From snapshots to what the rules are shown of GPUs, and what must be remembered for that.

Memory is a value: :func:`remember_gpus` makes the next one from the last and a snapshot. Faults that are
latched, XIDs above all, have a memory of their own in agent.health.gpu.faults.values.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from agent.devices.gpu_identity import assign_indices
from agent.devices.inventory import Device, gpu_device, mig_device
from agent.health.gpu.catalog import windows
from agent.health.gpu.view import GpuStart, GpuView
from agent.health.rate_window import RateWindow, appended, growth_of
from agent.health.rules import Growth
from agent.model.faults import KnownGpu
from agent.model.gpu import GpuField, GpuSample, GpuSet, MigSample, Status
from agent.model.settings import GpuLimits
from agent.model.snapshot import Snapshot
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS, Instant

PASS_DEADLINES: Final = 6
"""A pass over a GPU may take as long as so many calls that just keep their deadline."""
UNHEARD: Final = (SourceState.ABSENT, SourceState.FAILING)
GONE_NS: Final = 600 * NS
"""A MIG instance that was taken away is told of for so long: its pod's status must not freeze."""

_NOBODY: Final = SourceSample("nvml", SourceState.ABSENT, 0, NS, 0, "", vital=False)
NO_GPUS: Final = GpuSet((), _NOBODY, _NOBODY._replace(name="nvml-events"))


class Instance(NamedTuple):
    """A MIG instance, and since when it is gone."""

    mig: MigSample
    gone: Instant | None


@dataclass(frozen=True, slots=True)
class GpuPast:
    """What is remembered of one GPU."""

    uuid: str = ""
    start: GpuStart = field(default_factory=GpuStart)
    read_ns: int = 0
    """When it was read last."""
    histories: Mapping[GpuField, RateWindow] = field(default_factory=dict)
    """Of the counters that are judged by their growth."""
    growth: Mapping[GpuField, Growth] = field(default_factory=dict)
    """What follows from them."""
    instances: tuple[Instance, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuRuleState:
    """What is remembered of all GPUs."""

    roll: tuple[KnownGpu, ...] = ()
    past: Mapping[int, GpuPast] = field(default_factory=dict)
    """By number."""
    samples: Mapping[int, GpuSample] = field(default_factory=dict)
    """By number: the newest of those that NVML has counted since the agent started."""


def remember_gpus(memory: GpuRuleState, snapshot: Snapshot, limits: GpuLimits, now: Instant) -> GpuRuleState:
    """The memory after a snapshot."""
    gpus = snapshot.gpus or NO_GPUS
    absent = gpus.nvml.state is SourceState.ABSENT  # a node without the driver has no use for its GPUs
    told = absent or len(gpus.gpus) < gpus.count  # and one that counts them will tell who they are
    bus = snapshot.host.bus_gpus if isinstance(snapshot.host.bus_gpus, tuple) and not told else ()
    roll = assign_indices(memory.roll, gpus.gpus, limits.expect, bus)
    samples = _samples(roll, gpus.gpus)
    manager = snapshot.host.fabric_manager is True
    past = {}
    for gpu in roll:
        before = memory.past.get(gpu.number, GpuPast())
        if before.uuid and gpu.uuid and before.uuid != gpu.uuid:  # another GPU in its place
            before = GpuPast()
        past[gpu.number] = _past(before, gpu, samples.get(gpu.number), limits, now, manager=manager)
    roll = tuple(gpu._replace(migs=_present(past[gpu.number])) for gpu in roll)
    return GpuRuleState(memory.roll if roll == memory.roll else roll, past, samples)


def _present(past: GpuPast) -> tuple[MigSample, ...]:
    return tuple(one.mig for one in past.instances if one.gone is None)


def _samples(roll: Iterable[KnownGpu], samples: Sequence[GpuSample]) -> dict[int, GpuSample]:
    found: dict[int, GpuSample] = {}
    left = list(samples)
    for same in (_same_uuid, _same_bus):
        for gpu in roll:
            match = next((sample for sample in left if gpu.number not in found and same(gpu, sample)), None)
            if match:
                found[gpu.number] = match
                left.remove(match)
    free = [gpu.number for gpu in roll if gpu.number not in found]
    for sample in left:  # nameless: the roll has a place for each
        number = sample.index if sample.index in free else free[0] if free else None
        if number is not None:
            found[number] = sample
            free.remove(number)
    return found


def _same_uuid(gpu: KnownGpu, sample: GpuSample) -> bool:
    return bool(sample.uuid) and gpu.uuid == sample.uuid


def _same_bus(gpu: KnownGpu, sample: GpuSample) -> bool:
    return not sample.uuid and bool(sample.bus) and gpu.bus == sample.bus


def _past(
    before: GpuPast,
    gpu: KnownGpu,
    sample: GpuSample | None,
    limits: GpuLimits,
    now: Instant,
    *,
    manager: bool,
) -> GpuPast:
    start = before.start
    if manager and not start.fabric_manager:
        start = start._replace(fabric_manager=True)
    if sample is None or sample.status != Status.OK or not sample.passes:
        growth = _growth(before.histories, sample, limits) if sample else {}
        return replace(before, uuid=gpu.uuid, start=start, growth=growth)
    if sample.beat_ns == before.read_ns and start is before.start:
        instances = _instances(before.instances, sample.migs, now)
        return before if instances == before.instances else replace(before, instances=instances)
    links, ecc = sample[GpuField.LINKS_UP], sample[GpuField.ECC_MODE]
    start = start._replace(
        links_up=start.links_up | (links if isinstance(links, int) else 0), ecc=start.ecc or ecc == 1
    )
    histories = {
        which: appended(before.histories.get(which, ()), sample[which], sample.beat_ns, window_s * NS)
        for which, window_s in windows(limits).items()
    }
    instances = _instances(before.instances, sample.migs, now)
    growth = _growth(histories, sample, limits)
    return GpuPast(gpu.uuid, start, sample.beat_ns, histories, growth, instances)


def _growth(
    histories: Mapping[GpuField, RateWindow], sample: GpuSample, limits: GpuLimits
) -> dict[GpuField, Growth]:
    return {
        which: growth_of(sample[which], histories.get(which, ()), window_s)
        for which, window_s in windows(limits).items()
    }


def _instances(
    before: tuple[Instance, ...], migs: tuple[MigSample, ...], now: Instant
) -> tuple[Instance, ...]:
    """The instances of now, and those that are gone for a while: a repartition is followed."""
    there = {(mig.gi, mig.ci) for mig in migs}
    gone = [
        Instance(one.mig, one.gone or now)
        for one in before
        if (one.mig.gi, one.mig.ci) not in there
        and (one.gone is None or now.mono_ns - one.gone.mono_ns < GONE_NS)
    ]
    return (*(Instance(mig, None) for mig in migs), *gone)


def gpu_devices(memory: GpuRuleState) -> Iterator[Device]:
    """Every GPU on the roll, and every MIG instance, those that are gone for a while."""
    for gpu in memory.roll:
        yield gpu_device(gpu.number)
        for instance in memory.past[gpu.number].instances:
            yield mig_device(gpu.number, instance.mig.gi, instance.mig.ci)


def gpu_sources(memory: GpuRuleState, gpus: GpuSet | None, limits: GpuLimits) -> Iterator[SourceSample]:
    """One source per GPU, named as its device. None is vital: what its silence means is for its rules."""
    found_ns = gpus.nvml.beat_ns if gpus else 0
    for number, sample in memory.samples.items():
        state = SourceState.OK if sample.status == Status.OK else SourceState.FAILING
        yield SourceSample(
            name=gpu_device(number).name,
            state=state if sample.passes else SourceState.STARTING,
            beat_ns=sample.beat_ns or found_ns,
            period_ns=sample.period_ns,
            failures=sample.failures,
            detail=f"NVML answers {sample.status}" if sample.status else "",
            passes=sample.passes,
            vital=False,
            # A pass is many calls, each with a deadline of its own: one that hangs is told of long before.
            limit_ns=PASS_DEADLINES * int(limits.deadline_s * NS) + 3 * sample.period_ns,
        )


def gpu_views(
    memory: GpuRuleState, snapshot: Snapshot, limits: GpuLimits, now: Instant
) -> dict[int, GpuView]:
    """By number, what the rules are shown of each GPU on the roll."""
    gpus = snapshot.gpus or NO_GPUS
    times = {
        number: sample.probe_p50_ns
        for number, sample in memory.samples.items()
        if sample.status == Status.OK and sample.probe_p50_ns
    }
    log_read = snapshot.log is not None and snapshot.log.source.state not in UNHEARD
    functions = {one.address: one for one in snapshot.pci} if isinstance(snapshot.pci, tuple) else {}
    views = {}
    for gpu in memory.roll:
        sample, past = memory.samples.get(gpu.number), memory.past[gpu.number]
        views[gpu.number] = GpuView(
            gpu=sample,
            name=gpu_device(gpu.number).name,
            start=past.start,
            gpus=gpus,
            host=snapshot.host,
            growth=past.growth if sample is not None else {},
            siblings_p50_ns=tuple(sorted(ns for number, ns in times.items() if number != gpu.number)),
            limits=limits,
            now_ns=now.mono_ns,
            log_read=log_read,
            pci=functions.get(gpu.bus) if gpu.uuid else None,
        )
    return views
