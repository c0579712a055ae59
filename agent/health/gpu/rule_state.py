"""State that the GPU rules compare readings with (features seen, counter windows, MIG instances).

The module also makes the rules' input for each GPU, and has the catalog of all rules for GPU readings and the
list of readings that the rules need from the C core. The state of faults such as XIDs is in
agent.health.gpu.faults.fault_log.

GPUs have stable numbers, as in ``gpu-3``: unchanged by restarts, driver reloads and the loss of other GPUs.
NVML's own numbers change when a GPU is lost. A stable number belongs to the GPU's UUID. A lost GPU keeps its
number until another GPU replaces it.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from operator import attrgetter
from typing import Final, NamedTuple

from agent.devices.inventory import InventoryDevice, gpu_device, mig_device
from agent.health.gpu.driver import driver_rules
from agent.health.gpu.heat import heat_rules
from agent.health.gpu.memory import memory_rules
from agent.health.gpu.nvlink import fabric_rules, nvlink_rules
from agent.health.gpu.pcie import pcie_rules
from agent.health.gpu.responsiveness import responsiveness_rules
from agent.health.gpu.rule_input import GpuRuleInput, SeenGpuFeatures, is_identifying_gpus, nvml_library_error
from agent.health.rate_window import RateWindow, append_reading, counter_growth
from agent.health.rules import CounterGrowth, Rule, lowest_limit
from agent.model.gpu import (
    GpuField,
    GpuOsSample,
    GpuSample,
    GpuWakeCondition,
    GpuWakeMode,
    MigSample,
    NvmlReturnCode,
    NvmlSample,
)
from agent.model.persistent_faults import KnownGpu
from agent.model.reading import NEVER_READ, SourceSample, SourceState
from agent.model.settings import GpuLimits, RuleOverride
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant


def assign_gpu_numbers(
    known: Iterable[KnownGpu],
    samples: Sequence[GpuSample],
    expected_count: int | None,
    bus_addresses: Sequence[str] = (),
    *,
    is_identifying: bool = False,
    is_list_complete: bool = True,
) -> tuple[KnownGpu, ...]:
    """Return the GPUs of this machine with their stable numbers, including missing GPUs.

    NVML identifies one GPU after another. Before it has identified all, a missing GPU may be a GPU without
    UUID that now has another PCI address. So no GPU with another UUID gets its number before.

    Args:
        known: GPUs with their previous numbers.
        samples: GPUs that NVML has listed since the agent started.
        expected_count: Expected number of GPUs; None: the largest number so far.
        bus_addresses: PCI addresses of the machine's GPUs, used only while neither ``known`` nor ``samples``
            has a GPU that NVML listed.
        is_identifying: Some GPUs have no UUID or PCI address yet, and will soon. Meanwhile a new GPU that may
            replace a missing GPU gets no number.
        is_list_complete: NVML has listed all its GPUs. Otherwise no missing GPU is dropped.
    """
    registry = {gpu.number: gpu for gpu in known}
    if not samples and not any(gpu.uuid for gpu in registry.values()):
        _add_gpus_on_bus(registry, bus_addresses)
    if samples:  # NVML outranks the PCI bus, where a GPU can be bound to another driver
        buses = {sample.bus for sample in samples}
        registry = {number: gpu for number, gpu in registry.items() if gpu.uuid or gpu.bus in buses}
    present = _match_known_gpus(registry, samples)
    absent = [number for number in sorted(registry) if number not in present.values()]
    all_replaced = not present
    unmatched = [sample for sample in samples if sample.index not in present]
    all_identified = not is_identifying and all(sample.uuid for sample in unmatched)
    for sample in unmatched:
        free = absent
        if sample.uuid and not all_identified:
            free = [number for number in absent if not registry[number].uuid]
            if is_identifying and len(free) < len(absent):
                continue  # it may replace a missing GPU
        number = _new_number(sample, registry, free, all_replaced=all_replaced)
        present[sample.index] = number
        registry.setdefault(number, KnownGpu(number, "", "", ""))
        absent = [other for other in absent if other != number]
    numbered = [sample for sample in samples if sample.index in present]
    buses = {sample.bus for sample in numbered}
    for number in absent:
        if registry[number].bus in buses:  # the bus was renumbered: the address belongs to another GPU now
            registry[number] = registry[number]._replace(bus="")
    for sample in numbered:
        number = present[sample.index]
        before = registry[number]
        registry[number] = before._replace(
            uuid=sample.uuid or before.uuid, bus=sample.bus or before.bus, name=sample.name or before.name
        )
    if expected_count is not None:
        for number in reversed(absent):
            if is_list_complete and all_identified and len(registry) > expected_count:
                del registry[number]
        unused = (number for number in count() if number not in registry)
        while len(registry) < expected_count:
            number = next(unused)
            registry[number] = KnownGpu(number, "", "", "")
    return tuple(registry[number] for number in sorted(registry))


def replaced_gpu_numbers(before: Iterable[KnownGpu], now: Iterable[KnownGpu]) -> frozenset[int]:
    """Return the stable numbers of GPUs that now belong to another GPU than before, or to no GPU. A number
    counts only if its GPU had a UUID before."""
    uuids = {gpu.number: gpu.uuid for gpu in now}
    return frozenset(gpu.number for gpu in before if gpu.uuid and uuids.get(gpu.number, "") != gpu.uuid)


def _add_gpus_on_bus(registry: dict[int, KnownGpu], bus_addresses: Iterable[str]) -> None:
    """Add the GPUs that the PCI bus lists and the registry does not have yet. At boot, the driver binds to
    one GPU after another."""
    known = {gpu.bus for gpu in registry.values()}
    free = (number for number in count() if number not in registry or not registry[number].bus)
    for address in bus_addresses:
        if address not in known:
            number = next(free)
            registry[number] = KnownGpu(number, "", address, "")


def _match_known_gpus(registry: dict[int, KnownGpu], samples: Iterable[GpuSample]) -> dict[int, int]:
    by_uuid = {gpu.uuid: number for number, gpu in registry.items() if gpu.uuid}
    by_bus = {gpu.bus: number for number, gpu in registry.items() if gpu.bus}
    found: dict[int, int] = {}
    for sample in samples:
        number = by_uuid.get(sample.uuid)
        if number is None:
            number = by_bus.get(sample.bus)
            if number is not None and sample.uuid and registry[number].uuid:
                number = None  # another GPU in its slot
        if number is not None and number not in found.values():
            found[sample.index] = number
    return found


def _new_number(
    sample: GpuSample, registry: dict[int, KnownGpu], absent: Sequence[int], *, all_replaced: bool
) -> int:
    """Return the stable number for a GPU that has no number yet.

    A GPU at the PCI address of a missing GPU is its replacement, and gets its number. A GPU at another
    address is an additional GPU, except when all known GPUs were replaced: then it also gets the number of a
    missing GPU.
    """
    for number in absent:
        if registry[number].bus and registry[number].bus == sample.bus:
            return number
    unidentified = [number for number in absent if not registry[number].uuid and not registry[number].bus]
    if unidentified:
        return sample.index if sample.index in unidentified else unidentified[0]
    if sample.index not in registry:
        return sample.index
    if absent and (all_replaced or not sample.uuid):
        return sample.index if sample.index in absent else absent[0]
    return next(number for number in count() if number not in registry)


@cache
def gpu_rules(limits: GpuLimits) -> tuple[Rule, ...]:
    """Return all rules for GPU readings, in report order.

    The texts of the rules name the configured limits.
    """
    return (
        *responsiveness_rules(limits),
        *driver_rules(limits),
        *memory_rules(limits),
        *nvlink_rules(limits),
        *fabric_rules(limits),
        *pcie_rules(limits),
        *heat_rules(limits),
    )


@cache
def counter_windows_s(limits: GpuLimits) -> Mapping[GpuField, int]:
    """Return the length of the window in which the rules evaluate the growth of each counter [s]."""
    reads = (wake for rule in gpu_rules(limits) for wake in rule.gpu_reads)
    return {wake.field: wake.window_ns // NS for wake in reads if wake.mode is GpuWakeMode.RISE}


def _merge_wakes(first: GpuWakeCondition, second: GpuWakeCondition) -> GpuWakeCondition:
    """Return a wake condition that covers two wake conditions of the same GPU field. A wake condition is a
    change of the field for which the C core wakes the evaluation engine."""
    if first == second:
        return first
    if first.mode is second.mode is GpuWakeMode.BITS:
        return first._replace(threshold=first.threshold | second.threshold)
    return GpuWakeCondition(first.field)  # any change, which includes both


def gpu_wakes(limits: GpuLimits, overrides: tuple[RuleOverride, ...] = ()) -> tuple[GpuWakeCondition, ...]:
    """Return the changes of GPU fields for which the C core must wake the engine, at most one per field.

    The engine evaluates the rules. A counter wakes the engine only when its growth reaches a limit: the limit
    of the counter's rule, or a lower limit that the operator sets for some GPU (``overrides``).
    """
    found: dict[GpuField, GpuWakeCondition] = {}
    for rule in gpu_rules(limits):
        for wake in rule.gpu_reads:
            if rule.limit_in_view and wake.mode is GpuWakeMode.RISE:
                wake = wake._replace(threshold=lowest_limit(overrides, rule.code, wake.threshold))
            found[wake.field] = _merge_wakes(found.get(wake.field, wake), wake)
    return tuple(found.values())


# --- state of the rules ------------------------------------------------------------------------------------

PASS_DEADLINES: Final = 6
"""Duration of a pass over a GPU after which its source is stalled, in deadlines of one NVML call."""
UNREAD_STATES: Final = (SourceState.ABSENT, SourceState.FAILING)
REMOVED_NS: Final = 600 * NS
"""Time for which a removed MIG instance is reported, so that the status of its pod is updated [ns]."""

_NO_SOURCE: Final = SourceSample("nvml", SourceState.ABSENT, 0, NS, 0, "", vital=False)
NO_GPUS: Final = NvmlSample((), _NO_SOURCE, _NO_SOURCE._replace(name="nvml-events"))


_index: Final = attrgetter("index")


class MigInstance(NamedTuple):
    """MIG instance of a GPU, and the time at which it was removed; ``removed_at`` is None while it exists."""

    mig: MigSample
    removed_at: Instant | None


@dataclass(frozen=True, slots=True)
class PerGpuState:
    """Values of one GPU from earlier evaluations, with which the GPU rules compare new readings."""

    uuid: str = ""
    seen: SeenGpuFeatures = field(default_factory=SeenGpuFeatures)
    read_ns: int = 0
    """CLOCK_MONOTONIC of the GPU's last reading [ns]."""
    windows: Mapping[GpuField, RateWindow] = field(default_factory=dict)
    """Recent readings of each counter whose growth the rules evaluate."""
    growth: Mapping[GpuField, CounterGrowth] = field(default_factory=dict)
    """Growth of each counter in ``windows`` within its window."""
    instances: tuple[MigInstance, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuRuleState:
    """State that GPU rules carry between evaluations: known GPUs, with earlier values and newest readings."""

    registry: tuple[KnownGpu, ...] = ()
    per_gpu: Mapping[int, PerGpuState] = field(default_factory=dict)
    """Values of earlier evaluations, by GPU number."""
    samples: Mapping[int, GpuSample] = field(default_factory=dict)
    """Newest sample by GPU number, of all GPUs that NVML has listed since the agent started."""


def next_gpu_rule_state(
    previous: GpuRuleState,
    snapshot: Snapshot,
    limits: GpuLimits,
    now: Instant,
    unchanged: Set[int] = frozenset(),
) -> GpuRuleState:
    """Return the state of the GPU rules after a snapshot (the newest readings).

    Args:
        unchanged: Numbers of GPUs that are not evaluated; their state stays as it is.
    """
    gpus = snapshot.gpus or NO_GPUS
    if unchanged and len(unchanged) == len(previous.registry):
        by_index = dict(zip(map(_index, gpus.gpus), gpus.gpus, strict=True))
        found = map(by_index.__getitem__, map(_index, previous.samples.values()))
        samples = dict(zip(previous.samples, found, strict=True))
        return GpuRuleState(previous.registry, previous.per_gpu, samples)
    bus = _gpus_on_bus(gpus, snapshot.host)
    known = _without_unbound(previous.registry, gpus, snapshot.host)
    registry = assign_gpu_numbers(
        known,
        gpus.gpus,
        limits.expect,
        bus,
        is_identifying=is_identifying_gpus(gpus, limits.dead_s, now.mono_ns),
        is_list_complete=gpus.nvml.state is SourceState.OK and len(gpus.gpus) >= gpus.count,
    )
    samples = _samples_by_number(registry, gpus.gpus)
    manager = snapshot.host.fabric_manager is True
    per_gpu = {}
    for gpu in registry:
        before = previous.per_gpu.get(gpu.number, PerGpuState())
        if gpu.number in unchanged:
            per_gpu[gpu.number] = before
            continue
        if before.uuid and gpu.uuid and before.uuid != gpu.uuid:  # the GPU was replaced
            before = PerGpuState()
        per_gpu[gpu.number] = _next_per_gpu(
            before, gpu, samples.get(gpu.number), limits, now, manager=manager
        )
    registry = tuple(
        gpu._replace(migs=tuple(mig for mig, gone in per_gpu[gpu.number].instances if gone is None))
        for gpu in registry
    )
    return GpuRuleState(previous.registry if registry == previous.registry else registry, per_gpu, samples)


def _is_library_open(gpus: NvmlSample) -> bool:
    """Return whether the NVML library was loaded. True also if the driver then refused to initialize it."""
    starting = gpus.nvml.state is SourceState.STARTING
    return not starting and nvml_library_error(gpus) != NvmlReturnCode.LIBRARY_NOT_FOUND


def _gpus_on_bus(gpus: NvmlSample, host: GpuOsSample) -> tuple[str, ...]:
    """Return the PCI addresses of the GPUs on the bus that the agent reports although NVML does not list
    them.

    If the NVML library is not loaded, these are the GPUs that are bound to the driver ``nvidia``. A node
    whose GPUs have another driver, or no driver, needs no library.
    """
    if len(gpus.gpus) < gpus.count:  # NVML will list them
        return ()
    if not _is_library_open(gpus):
        return host.bound_gpus
    return host.bus_gpus if isinstance(host.bus_gpus, tuple) else ()


def _without_unbound(
    known: tuple[KnownGpu, ...], gpus: NvmlSample, host: GpuOsSample
) -> tuple[KnownGpu, ...]:
    """Return the known GPUs without those that only the PCI bus listed and that are no longer bound to
    ``nvidia``. If the NVML library can be loaded, all known GPUs are returned."""
    if _is_library_open(gpus) or not isinstance(host.bus_gpus, tuple):
        return known
    return tuple(gpu for gpu in known if gpu.uuid or not gpu.bus or gpu.bus in host.bound_gpus)


def _samples_by_number(registry: Iterable[KnownGpu], samples: Sequence[GpuSample]) -> dict[int, GpuSample]:
    found: dict[int, GpuSample] = {}
    left = list(samples)
    for same in (_same_uuid, _same_bus):
        for gpu in registry:
            match = next((sample for sample in left if gpu.number not in found and same(gpu, sample)), None)
            if match:
                found[gpu.number] = match
                left.remove(match)
    free = [gpu.number for gpu in registry if gpu.number not in found]
    for sample in left:
        if sample.uuid:
            continue  # it has no number yet
        number = sample.index if sample.index in free else free[0] if free else None
        if number is not None:
            found[number] = sample
            free.remove(number)
    return found


def _same_uuid(gpu: KnownGpu, sample: GpuSample) -> bool:
    return bool(sample.uuid) and gpu.uuid == sample.uuid


def _same_bus(gpu: KnownGpu, sample: GpuSample) -> bool:
    return not sample.uuid and bool(sample.bus) and gpu.bus == sample.bus


def _next_per_gpu(
    before: PerGpuState,
    gpu: KnownGpu,
    sample: GpuSample | None,
    limits: GpuLimits,
    now: Instant,
    *,
    manager: bool,
) -> PerGpuState:
    seen = before.seen
    if manager and not seen.fabric_manager:
        seen = seen._replace(fabric_manager=True)
    if sample is None or sample.status != NvmlReturnCode.OK or not sample.passes:
        growth = _growth(before.windows, sample, limits) if sample else {}
        return replace(before, uuid=gpu.uuid, seen=seen, growth=growth)
    if sample.beat_ns == before.read_ns and seen is before.seen:
        instances = _instances(before.instances, sample.migs, now)
        return before if instances == before.instances else replace(before, instances=instances)
    now_seen = _features(sample)
    seen = seen._replace(links_up=seen.links_up | now_seen.links_up, ecc=seen.ecc or now_seen.ecc)
    windows, readings, beat_ns = before.windows, sample.readings, sample.beat_ns
    new_windows = {
        field: append_reading(
            windows.get(field, ()), readings.get(field, NEVER_READ), beat_ns, window_s * NS, reset_ends=True
        )
        for field, window_s in counter_windows_s(limits).items()
    }
    instances = _instances(before.instances, sample.migs, now)
    growth = _growth(new_windows, sample, limits)
    return PerGpuState(gpu.uuid, seen, sample.beat_ns, new_windows, growth, instances)


def _features(sample: GpuSample) -> SeenGpuFeatures:
    links = sample[GpuField.LINKS_UP]
    return SeenGpuFeatures(links if isinstance(links, int) else 0, sample[GpuField.ECC_MODE] == 1)


def rebaseline_gpu(state: GpuRuleState, number: int, host: GpuOsSample) -> GpuRuleState:
    """Return the GPU rules' state in which a GPU's present features replace those seen earlier."""
    sample = state.samples.get(number)
    seen = _features(sample) if sample else SeenGpuFeatures()
    seen = seen._replace(fabric_manager=host.fabric_manager is True)
    return replace(state, per_gpu={**state.per_gpu, number: replace(state.per_gpu[number], seen=seen)})


def _growth(
    new_windows: Mapping[GpuField, RateWindow], sample: GpuSample, limits: GpuLimits
) -> dict[GpuField, CounterGrowth]:
    readings = sample.readings
    return {
        field: counter_growth(readings.get(field, NEVER_READ), new_windows.get(field, ()), window_s)
        for field, window_s in counter_windows_s(limits).items()
    }


def _instances(
    before: tuple[MigInstance, ...], migs: tuple[MigSample, ...], now: Instant
) -> tuple[MigInstance, ...]:
    """Return a GPU's MIG instances, followed by those that were removed less than REMOVED_NS ago."""
    present = {(mig.gi, mig.ci) for mig in migs}
    removed = [
        MigInstance(instance.mig, instance.removed_at or now)
        for instance in before
        if (instance.mig.gi, instance.mig.ci) not in present
        and (instance.removed_at is None or now.mono_ns - instance.removed_at.mono_ns < REMOVED_NS)
    ]
    return (*(MigInstance(mig, None) for mig in migs), *removed)


def gpu_devices(rule_state: GpuRuleState) -> Iterator[InventoryDevice]:
    """Yield every known GPU, each followed by its MIG instances, including recently removed instances."""
    for gpu in rule_state.registry:
        yield gpu_device(gpu.number)
        for instance in rule_state.per_gpu[gpu.number].instances:
            yield mig_device(gpu.number, instance.mig.gi, instance.mig.ci)


def gpu_sources(
    rule_state: GpuRuleState, gpus: NvmlSample | None, limits: GpuLimits
) -> Iterator[SourceSample]:
    """Yield a source for each GPU's readings, with the name of the GPU's device (``gpu-0``). The sources are
    not vital: if a GPU does not answer, the agent still sends its pings to systemd's watchdog."""
    found_ns = gpus.nvml.beat_ns if gpus else 0
    # a pass has many calls; a rule reports a call that exceeds its own deadline long before
    pass_ns = PASS_DEADLINES * int(limits.deadline_s * NS)
    for number, sample in rule_state.samples.items():
        status, passes, period_ns = sample.status, sample.passes, sample.period_ns
        state = SourceState.FAILING if status else SourceState.OK
        yield SourceSample(
            gpu_device(number).name,
            state if passes else SourceState.STARTING,
            sample.beat_ns or found_ns,
            period_ns,
            sample.failures,
            f"NVML returned {status}" if status else "",
            passes,
            vital=False,
            limit_ns=pass_ns + 3 * period_ns,
        )


def gpu_views(
    rule_state: GpuRuleState,
    snapshot: Snapshot,
    limits: GpuLimits,
    now: Instant,
    unneeded: Container[int] = (),
) -> dict[int, GpuRuleInput]:
    """Return the rules' input for each known GPU, by GPU number. The GPUs in ``unneeded`` are left out."""
    if all(gpu.number in unneeded for gpu in rule_state.registry):
        return {}
    gpus = snapshot.gpus or NO_GPUS
    times = {
        number: sample.probe_p50_ns
        for number, sample in rule_state.samples.items()
        if sample.status == NvmlReturnCode.OK and sample.probe_p50_ns
    }
    log_read = snapshot.log is not None and snapshot.log.source.state not in UNREAD_STATES
    functions = (
        {function.address: function for function in snapshot.pci} if isinstance(snapshot.pci, tuple) else {}
    )
    views = {}
    for gpu in rule_state.registry:
        if gpu.number in unneeded:
            continue
        sample, state = rule_state.samples.get(gpu.number), rule_state.per_gpu[gpu.number]
        views[gpu.number] = GpuRuleInput(
            sample=sample,
            name=gpu_device(gpu.number).name,
            seen=state.seen,
            gpu_set=gpus,
            host=snapshot.host,
            growth=state.growth if sample is not None else {},
            siblings_p50_ns=tuple(sorted(ns for number, ns in times.items() if number != gpu.number)),
            limits=limits,
            now_ns=now.mono_ns,
            is_log_readable=log_read,
            pci_function=functions.get(gpu.bus) if gpu.uuid else None,
        )
    return views
