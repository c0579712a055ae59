"""State of declarations between evaluations: declared devices, removed devices, and invalid files.

The module also has the cache of verdicts on declared devices. A device is evaluated again only if its
readings have changed.

Up to 4,096 devices can be declared, and most changes affect few of them. A cached verdict only gets a new
verification time and lease (how long the kubelet trusts it). Three groups of devices are not cached: devices
with health checks, devices with a fault that is about to be raised or cleared, and all devices of a kind
while a source of that kind is stalled or starting.

A new snapshot of readings makes some cached verdicts outdated. The rules for the declared devices of one
kind share most of their input. A device that no change of the shared input affects keeps its verdict,
because its rules would return the same results.
"""

from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field
from operator import attrgetter, ge
from typing import Final, NamedTuple

from agent.devices.inventory import DeviceKind, InventoryDevice, declared_device
from agent.health.evaluation import Evaluation, Subject, row_with_code
from agent.health.host.cpu.facts import CpuFacts
from agent.health.host.memory.edac import has_edac_been_read, has_source_been_read
from agent.health.host.pci.state import PCI_LOG_CODES
from agent.health.host.verdicts import DECLARED_RULES, HostRuleState, PoolsByDevice, main_sources
from agent.health.kernel_log.facts import is_log_complete, log_reader_state
from agent.health.rules import CounterGrowth
from agent.health.verdict import VerdictContext
from agent.model.cpuset import CpuSet, cpu_numbers
from agent.model.declared_devices import Declarations, DeclaredCpuDevice, DriverDevice
from agent.model.health import Cause, DeviceHealth, NotApplicable
from agent.model.reading import Missing, source_name
from agent.model.settings import EngineSettings
from agent.model.snapshot import HugepagePoolSample, Snapshot
from agent.model.time import NS, Instant

REMOVED_REPORT_NS: Final = 600 * NS
"""Time for which a removed device is reported [ns], so that its pods are not shown as Healthy.

It is Unknown, or Unhealthy if the driver had reported a fault.
"""
REMOVED_MAX: Final = 4096
"""Largest number of removed devices that are kept, in case a driver keeps renaming its devices."""


class RemovedDevice(NamedTuple):
    """Device that its driver no longer declares, and the time since which it is not declared."""

    device: DriverDevice
    since: Instant


class InvalidDeclarationFile(NamedTuple):
    """Error in a driver's declaration file, and the time since which it is known."""

    error: str
    since: Instant


@dataclass(frozen=True, slots=True)
class DeclaredState:
    """Declared devices of all drivers, with recently removed devices and invalid files."""

    declarations: Declarations = ()
    """Contents of the declaration files from which this state was derived."""
    devices: Mapping[str, DriverDevice] = field(default_factory=dict)
    """Declared devices by subject (the device's name in reports)."""
    since: Mapping[str, Instant] = field(default_factory=dict)
    """Time of the last change of each declaration, by subject."""
    redeclared: Mapping[str, Instant] = field(default_factory=dict)
    """Time at which a device was declared with other hardware than before, by subject; a removed device that
    is still reported keeps its time."""
    removed: Mapping[str, RemovedDevice] = field(default_factory=dict)
    """Removed devices that are still reported, by subject."""
    invalid: Mapping[str, InvalidDeclarationFile] = field(default_factory=dict)
    """Declaration files that cannot be used, by driver, with the error."""
    declaring: tuple[str, ...] = ()
    """Names of the drivers with a declaration file since the agent started, even an empty or invalid one.

    The host's devices are not sent for these drivers.
    """
    known: Mapping[str, InventoryDevice] = field(default_factory=dict)
    """All reported devices, including removed ones, by subject in report order."""
    kinds: Mapping[DeviceKind, InventoryDevice] = field(default_factory=dict)
    """One of the reported devices of each kind, for queries about the kind."""
    checked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the checks whose results drivers report over their sockets, by subject."""


def update_declared(past: DeclaredState, declarations: Declarations, now: Instant) -> DeclaredState:
    """Return the state of declarations after new declarations; ``past`` itself if nothing changed."""
    times_ns = [now.mono_ns - removed.since.mono_ns for removed in past.removed.values()]
    if declarations == past.declarations and max(times_ns, default=0) < REMOVED_REPORT_NS:
        return past
    devices = {device.subject: device for file in declarations for device in file.devices}
    gone = {
        subject: RemovedDevice(device, now)
        for subject, device in past.devices.items()
        if subject not in devices
    }
    before = {
        subject: removed
        for subject, removed in past.removed.items()
        if subject not in devices and now.mono_ns - removed.since.mono_ns < REMOVED_REPORT_NS
    }
    gone = dict([*before.items(), *gone.items()][-REMOVED_MAX:])
    wrong = {
        file.driver: _invalid_file(past.invalid.get(file.driver), file.error, now)
        for file in declarations
        if file.error
    }
    declaring = {*past.declaring, *(file.driver for file in declarations)}
    former = {subject: removed.device for subject, removed in past.removed.items()} | dict(past.devices)
    changed = redeclared_devices(former, devices)
    since = {subject: now if subject in changed else past.since.get(subject, now) for subject in devices}
    reported = {subject: removed.device for subject, removed in gone.items()} | devices
    redeclared = {
        subject: now if subject in changed else past.redeclared[subject]
        for subject in reported
        if subject in changed or subject in past.redeclared
    }
    known = sorted((declared_device(device) for device in reported.values()), key=InventoryDevice.sort_key)
    return DeclaredState(
        declarations,
        devices,
        since,
        redeclared,
        gone,
        wrong,
        tuple(sorted(declaring)),
        {device.subject: device for device in known},
        {device.kind: device for device in known},
        {subject: device.checks for subject, device in devices.items() if device.checks},
    )


def redeclared_devices(
    before: Mapping[str, DriverDevice], devices: Mapping[str, DriverDevice]
) -> frozenset[str]:
    """Return the names of declared devices that consist of other hardware in the newest declaration. Values
    from earlier readings of such a device are no longer valid."""
    if before is devices:
        return frozenset()
    return frozenset(
        subject
        for subject, device in devices.items()
        if subject in before and before[subject].part != device.part
    )


def _invalid_file(before: InvalidDeclarationFile | None, error: str, now: Instant) -> InvalidDeclarationFile:
    return before if before and before.error == error else InvalidDeclarationFile(error, now)


# --- outdated cached verdicts ------------------------------------------------------------------------------

ALL_DEVICES: Final[CpuSet] = -1
"""Stands for all CPUs, also of devices without CPUs: a change of the shared input affects each device."""


class SharedRuleInput(NamedTuple):
    """Part of the rules' input that is the same for all declared devices of one kind."""

    shared: tuple[object, ...]
    """Values whose change affects every device of the kind."""
    cpu_sets: tuple[CpuSet, ...] = ()
    """CPU sets whose change affects the CPUs that were added to a set or removed from it, and the CPUs that
    share a physical core with them."""
    cpu_facts: CpuFacts = CpuFacts()
    """Facts about single CPUs. A change of a CPU's fact affects the CPU and those that share its physical
    core.
    """


def shared_rule_input(
    kind: DeviceKind,
    host: HostRuleState,
    snapshot: Snapshot,
    pools: Mapping[InventoryDevice, HugepagePoolSample],
    settings: EngineSettings,
    now: Instant,
) -> SharedRuleInput:
    """Return the input that the rules for declared devices of one kind share. Raises TypeError for GPUs."""
    match kind:
        case DeviceKind.CPU:
            return _shared_cpu_input(host, snapshot, settings)
        case DeviceKind.MEMORY:
            return _shared_memory_input(host, snapshot, settings)
        case DeviceKind.HUGEPAGES:
            return SharedRuleInput((pools, host.pools.declared_pages, host.pools.max_seen))
        case DeviceKind.PCI:
            return _shared_pci_input(host, snapshot, now)
        case DeviceKind.NIC:
            function = _shared_pci_input(host, snapshot, now)
            return SharedRuleInput((host.nics, snapshot.nics, settings.host, *function.shared))
        case _:
            raise TypeError(f"device kind {kind}: there are no host rules for devices of this kind")


def _shared_cpu_input(host: HostRuleState, snapshot: Snapshot, settings: EngineSettings) -> SharedRuleInput:
    cpus, cores = host.cpus, host.cpus.cpu_facts
    machine, nodes = snapshot.machine, snapshot.nodes
    readings = (*snapshot.cpus, cpus.isolated_start, *(node.cpus for node in nodes))
    return SharedRuleInput(
        (
            log_reader_state(snapshot.log),
            [node.numa_node for node in nodes],
            [reading if isinstance(reading, Missing) else None for reading in readings],
            cores.machine_check_readers if isinstance(cores.machine_check_readers, Missing) else None,
            (machine.smt_active if machine else None, cpus.smt_start),
            bool(cpus.declared_throttle),
            settings,
        ),
        (
            *(0 if isinstance(reading, Missing) else reading for reading in readings),
            cores.machine_checked | cpus.log_facts.machine_checks,
            cpus.corrected,
            cpus.hard_lockups,
            cpus.soft_lockups,
        ),
        cores,
    )


def _shared_memory_input(
    host: HostRuleState, snapshot: Snapshot, settings: EngineSettings
) -> SharedRuleInput:
    memory, machine = host.memory, snapshot.machine
    if machine is None:
        return SharedRuleInput((settings, memory))
    return SharedRuleInput(
        (
            settings,
            (memory.blocks_online, memory.failure_lines, memory.locations),
            (log_reader_state(snapshot.log), is_log_complete(snapshot.log)),
            (has_source_been_read(machine, "memory"), has_edac_been_read(machine)),
            (machine.numa, machine.nodes_online, machine.nodes_memory, machine.corrupted_kib),
        )
    )


def _shared_pci_input(host: HostRuleState, snapshot: Snapshot, now: Instant) -> SharedRuleInput:
    facts = host.kernel_log.select(*PCI_LOG_CODES)
    functions = "read" if isinstance(snapshot.pci, tuple) else snapshot.pci
    # facts expire with time
    expires = now if facts else None
    return SharedRuleInput((host.pci, functions, log_reader_state(snapshot.log), facts, expires))


def changed_cpus(before: SharedRuleInput | None, now: SharedRuleInput) -> CpuSet:
    """Return the CPUs that a change of the shared rule input affects.

    The change is that between two evaluations. The result is ``ALL_DEVICES`` if the change affects every
    device of the kind. ``before`` is None in the first evaluation.
    """
    if before is None or before.shared != now.shared:
        return ALL_DEVICES
    cpus = 0
    for old, new in zip(before.cpu_sets, now.cpu_sets, strict=True):
        cpus |= old ^ new
    if before.cpu_facts is not now.cpu_facts:
        for core in set(before.cpu_facts.samples) ^ set(now.cpu_facts.samples):
            cpus |= 1 << core.cpu
    near = cpus
    for cpu in cpu_numbers(cpus):
        near |= before.cpu_facts.core_siblings.get(cpu, 0) | now.cpu_facts.core_siblings.get(cpu, 0)
    return near


def cpus_affecting(declared: DriverDevice) -> CpuSet:
    """Return the CPUs whose change makes the cached verdict on a declared device outdated. ``ALL_DEVICES``
    for a device without CPUs: every change makes its verdict outdated."""
    part = declared.part
    return part.cpus if isinstance(part, DeclaredCpuDevice) and part.cpus else ALL_DEVICES


# --- cache of verdicts -------------------------------------------------------------------------------------


class CachedVerdict(NamedTuple):
    """Rule results of a device from the last evaluation, valid while the device's readings are equal."""

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


class VerdictCache(NamedTuple):
    """Cached verdicts of the last evaluation, and the inputs of rules from which the verdicts were made."""

    passes: Mapping[str, int] = {}
    """Number of passes by source.

    If it decreases or the sources change, all cached verdicts are invalid.
    """
    inputs: Mapping[DeviceKind, SharedRuleInput] = {}
    """Inputs of the rules in the last evaluation, by kind of device."""
    declared: Mapping[Subject, DriverDevice] = {}
    """Declared devices at the time of the last evaluation."""
    devices: Mapping[Subject, CachedVerdict] = {}


NO_VERDICTS: Final = VerdictCache()
_passes: Final = attrgetter("passes")


class _KindState(NamedTuple):
    """Values that all declared devices of one kind, such as CPUs, share in one evaluation."""

    inputs: SharedRuleInput
    affected_cpus: CpuSet
    """CPUs with changed readings: their devices must be evaluated again."""
    verified: Instant
    timeout_s: int


class CachingEvaluation:
    """One evaluation of declared devices.

    It reuses cached verdicts, and collects verdicts for the next evaluation.

    Args:
        cache: Cached verdicts of the last evaluation.
        state: Current declarations.
        checked: Devices for which their driver runs health checks. Their verdicts are not cached.
        unchanged: Parts of the host with the same input as in the last evaluation.
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
        unchanged: Set[str],
    ) -> None:
        self._evaluation = evaluation
        self._before = before
        self._state = state
        self._watched = host_state.cpus.declared_throttle
        self._checked = checked
        self._kinds = dict(
            _kind_states(evaluation, before, cache, state, host_state, snapshot, pools, unchanged)
        )
        self._entries = dict(self._valid_entries(cache))

    def add_cached(self, verdicts: dict[Subject, DeviceHealth]) -> Iterator[tuple[Subject, InventoryDevice]]:
        """Add the cached verdicts on reported devices to `verdicts`, in report order. Yield each other
        device, which the caller must evaluate before it takes the next one."""
        entries, kinds, evaluation = self._entries, self._kinds, self._evaluation
        entry_of, last_of = entries.get, self._before.devices.get
        for subject, device in self._state.known.items():
            entry, last = entry_of(subject), last_of(subject)
            if entry is None or last is None or last.causes != entry.causes:
                entries.pop(subject, None)
                yield subject, device
                continue
            declared, kind, _, _, _, raised, not_applicable, not_evaluated, due_in_ns = entry
            evaluation.not_applicable += not_applicable
            if raised or not_evaluated or due_in_ns:
                self._apply_unusual_results(subject, entry)
            _, _, verified, timeout_s = kinds[kind]
            if declared.lease_s:
                timeout_s = with_lease(timeout_s, declared, self._before)
            verdicts[subject] = last.with_verification(verified, timeout_s)

    def _apply_unusual_results(self, subject: Subject, entry: CachedVerdict) -> None:
        """Apply the results of a device that has raised faults, or rules that wait for something."""
        evaluation = self._evaluation
        evaluation.not_evaluated += entry.not_evaluated
        evaluation.due_ns += [evaluation.now.mono_ns + in_ns for in_ns in entry.due_in_ns]
        for code, source in entry.raised:
            evaluation.repeat_finding(subject, code, evaluation.sources[source].passes)

    def _valid_entries(self, cache: VerdictCache) -> Mapping[Subject, CachedVerdict]:
        """Return the cached verdicts of the last evaluation that are still valid, by device."""
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
                if entry.throttled == self._throttle_growth(subject)
            }
        return known

    def store(
        self, subject: Subject, kind: DeviceKind, found: DeviceHealth, begin: tuple[int, int, int]
    ) -> None:
        """Store a device's rule results for the next evaluation, unless they can change without new readings.

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
            self._throttle_growth(subject),
            found.causes,
            tuple((code, row_with_code(rules, code).source) for code in raised),
            tuple(evaluation.not_applicable[not_applicable:]),
            tuple(evaluation.not_evaluated[not_evaluated:]),
            tuple(at_ns - evaluation.now.mono_ns for at_ns in evaluation.due_ns[due_ns:]),
        )

    def next_cache(self) -> VerdictCache:
        """Return the cache for the next evaluation, with those verdicts of this evaluation that can be
        reused."""
        inputs = {kind: state.inputs for kind, state in self._kinds.items()}
        sources = self._evaluation.sources
        passes = dict(zip(sources, map(_passes, sources.values()), strict=True))
        return VerdictCache(passes, inputs, self._state.devices, self._entries)

    def _throttle_growth(self, subject: Subject) -> tuple[CounterGrowth, CounterGrowth] | None:
        if (watched := self._watched.get(subject)) is None:
            return None
        return watched.throttled.core.growth, watched.throttled.package.growth


def with_lease(timeout_s: int, declared: DriverDevice, before: VerdictContext) -> int:
    """Return how long the kubelet trusts a verdict [s]: the declared lease, but at least ``timeout_s``."""
    return max(declared.lease_s + before.lease_salt_s, timeout_s) if declared.lease_s else timeout_s


def _kind_states(
    evaluation: Evaluation,
    before: VerdictContext,
    cache: VerdictCache,
    state: DeclaredState,
    host_state: HostRuleState,
    snapshot: Snapshot,
    pools: PoolsByDevice,
    unchanged: Set[str],
) -> Iterator[tuple[DeviceKind, _KindState]]:
    """Yield the values that all declared devices of a kind share, for each kind that has rules. A kind is
    left out while one of its sources is stalled or starting."""
    names, now = cache.passes.keys(), evaluation.sources
    is_continued = names == now.keys() and all(
        map(ge, map(_passes, map(now.__getitem__, names)), cache.passes.values())
    )
    for kind in state.kinds:
        rules = DECLARED_RULES.get(kind, ())
        if not rules or (main := main_sources(evaluation, kind)).starting:
            continue
        if before.stalls:
            reading = {rule.source for rule in rules} | set(map(source_name, main.sources))
            if reading & before.stalls.keys():
                continue
        known = cache.inputs.get(kind)
        if known is not None and kind in unchanged:
            inputs, affected = known, 0
        else:
            inputs = shared_rule_input(kind, host_state, snapshot, pools, evaluation.settings, evaluation.now)
            affected = changed_cpus(known, inputs)
        yield (
            kind,
            _KindState(
                inputs,
                affected if is_continued else ALL_DEVICES,
                main.verified,
                main.lease_s + before.lease_salt_s,
            ),
        )
