"""Verdicts on the devices that the agent itself publishes, and faults that concern the whole machine.

The module has the tables of the host's health rules by kind of device, and the state that these rules carry
from one snapshot to the next.

The module also evaluates custom checks: commands that operators configure. Their results count in the same
way as the results of drivers' own checks. A result concerns the devices whose names match the check's
pattern, or the Kubernetes node. Until its first run has ended, a check is listed as not evaluated and changes
no verdict.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Final, NamedTuple

from agent.devices.inventory import (
    DeviceKind,
    InventoryDevice,
    cpu_device,
    expected_devices,
    memory_device,
    parse_pool_name,
    pools_by_device,
    update_inventory,
)
from agent.health.declared.driver_reports import (
    evaluate_driver_checks,
    health_check_sources,
    subject_of_checks,
)
from agent.health.evaluation import Evaluation, Subject, row_with_code
from agent.health.host.cgroup.rules import CGROUP_RULES
from agent.health.host.cgroup.state import CgroupRuleState, next_cgroup_state
from agent.health.host.cpu.rules import CPU_RULES, DECLARED_CPU_RULES
from agent.health.host.cpu.state import (
    CpuRuleInput,
    CpuRuleState,
    declared_cpu_rule_input,
    next_cpu_state,
    numa_cpu_rule_input,
    unchanged_cpu_state,
    with_gained_cpus,
)
from agent.health.host.hugepages import (
    DECLARED_POOL_RULES,
    POOL_RULES,
    PoolRuleInput,
    PoolRuleState,
    declared_pages_rule_input,
    next_pool_state,
    pool_rule_input,
    with_gained_pages,
)
from agent.health.host.machine.log_rules import MACHINE_LOG_RULES
from agent.health.host.machine.rules import MACHINE_RULES
from agent.health.host.machine.state import MachineRuleState, machine_rule_input, next_machine_state
from agent.health.host.memory.rules import (
    DECLARED_MEMORY_RULES,
    MEMORY_RULES,
    MemoryRuleInput,
    MemoryRuleState,
    declared_memory_rule_input,
    memory_rule_input,
    next_memory_state,
    unchanged_memory_state,
)
from agent.health.host.nic.rules import NIC_RULES
from agent.health.host.nic.state import (
    NicRuleInput,
    NicRuleState,
    next_nic_state,
    nic_address,
    nic_rule_input,
)
from agent.health.host.pci.rules import PCI_RULES
from agent.health.host.pci.state import PciRuleInput, PciRuleState, next_pci_rule_state, pci_rule_input
from agent.health.kernel_log.facts import KernelLogState
from agent.health.kernel_log.latch import next_log_state
from agent.health.rules import STALLED, STALLED_ADVICE, Rule, lowest_limit
from agent.health.verdict import (
    VerdictContext,
    lease_seconds,
    make_verdict,
    oldest_pass_time,
    replace_causes,
    stall_cause,
)
from agent.model.declared_devices import (
    DeclaredCpuDevice,
    DeclaredHugepageDevice,
    DeclaredMemoryDevice,
    DeclaredNicDevice,
    DeclaredPciDevice,
    DriverCheckSample,
    DriverDevice,
)
from agent.model.gpu import SamplerField, WakeCondition
from agent.model.health import Blame, Cause, DeviceHealth, NonDeviceCause, NotApplicable, Severity
from agent.model.reading import SourceSample, SourceState, source_name, sources_in_state
from agent.model.settings import CustomCheck, CustomCheckResult, EngineSettings, RuleOverride
from agent.model.snapshot import HugepagePoolSample, Snapshot
from agent.model.time import NS, Instant

HOST_RULES: Final[Mapping[DeviceKind, tuple[Rule, ...]]] = {
    DeviceKind.CPU: CPU_RULES,
    DeviceKind.MEMORY: MEMORY_RULES,
    DeviceKind.HUGEPAGES: POOL_RULES,
}
"""Rules for the devices that the agent itself publishes, by kind."""
DECLARED_RULES: Final[Mapping[DeviceKind, tuple[Rule, ...]]] = {
    DeviceKind.CPU: DECLARED_CPU_RULES,
    DeviceKind.MEMORY: DECLARED_MEMORY_RULES,
    DeviceKind.HUGEPAGES: DECLARED_POOL_RULES,
    DeviceKind.PCI: PCI_RULES,
    DeviceKind.NIC: (*NIC_RULES, *PCI_RULES),
    DeviceKind.OTHER: (),
}
"""Rules for devices that drivers declare, by kind; declared GPUs have the rules in agent.health.gpu."""
MAIN_SOURCES: Final[Mapping[DeviceKind, tuple[str, ...]]] = {
    DeviceKind.CPU: ("cpus", "throttle"),
    DeviceKind.GPU: ("nvml",),
    DeviceKind.MEMORY: ("memory", "edac"),
    DeviceKind.HUGEPAGES: ("hugepages",),
    DeviceKind.PCI: ("pci",),
    DeviceKind.NIC: ("nic",),
    DeviceKind.OTHER: (),
}
"""Names of the sources whose passes verify a device, by kind. If one of them stalls, the device is Unknown. A
GPU that NVML has found has a source of its own."""
NODE_RULES: Final = (*MACHINE_RULES, *MACHINE_LOG_RULES)
"""Rules for the machine as a whole, whose findings are notes."""
ALL_HOST_RULES: Final = tuple(
    dict.fromkeys(chain(*HOST_RULES.values(), *DECLARED_RULES.values(), CGROUP_RULES, NODE_RULES))
)
"""All rules for the machine, its devices and the cgroups of pods, without duplicates."""


def sampler_wakes(
    throttle_events: int, throttle_window_s: int, overrides: tuple[RuleOverride, ...] = ()
) -> tuple[WakeCondition, ...]:
    """Return the changes of readings for which the native sampler must wake the evaluation engine.

    Args:
        throttle_events: Growth of a thermal-throttle counter that wakes the engine.
        throttle_window_s: Window of that growth [s].
        overrides: Changes of rules by the operator, which may have lower limits.
    """
    found: dict[SamplerField, WakeCondition] = {}
    for rule in ALL_HOST_RULES:
        for reading in rule.sampler_reads:
            if isinstance(reading, WakeCondition):
                found.setdefault(reading.field, reading)
            elif not rule.counts_growth:
                found[reading] = WakeCondition(reading)  # any change, which includes any threshold
            else:
                limit = lowest_limit(overrides, rule.code, throttle_events)
                found.setdefault(reading, WakeCondition(reading, limit, throttle_window_s * NS))
    return tuple(found.values())


# --- state -------------------------------------------------------------------------------------------------

PoolsByDevice = Mapping[InventoryDevice, HugepagePoolSample]
"""Samples of hugepage pools, by the device as which the agent publishes the pool."""


class HostRuleState(NamedTuple):
    """Values of the rules for the machine, its devices and its pods, kept between evaluations."""

    devices: tuple[InventoryDevice, ...] = ()
    """Devices that the agent itself publishes: CPUs, memory and hugepage pools."""
    kernel_log: KernelLogState = KernelLogState()
    cpus: CpuRuleState = CpuRuleState()
    memory: MemoryRuleState = MemoryRuleState()
    pools: PoolRuleState = PoolRuleState()
    nics: NicRuleState = NicRuleState()
    pci: PciRuleState = PciRuleState()
    groups: CgroupRuleState = CgroupRuleState()
    machine: MachineRuleState = MachineRuleState()
    started: bool = False
    """True: since the agent's start, all vital sources have finished their first pass once."""


def is_snapshot_incomplete(snapshot: Snapshot) -> bool:
    """Return True if the snapshot is incomplete: a vital source has not finished its first pass (reading)."""
    return any(source.vital for source in sources_in_state(snapshot.sources, SourceState.STARTING))


def next_host_state(
    previous: HostRuleState,
    snapshot: Snapshot,
    settings: EngineSettings,
    now: Instant,
    unchanged: Set[str] = frozenset(),
) -> HostRuleState:
    """Return the state of the host's rules after a snapshot (the newest readings). Until all vital sources
    have finished a pass (reading), it is the state at start, with the expected devices only.

    Args:
        unchanged: Parts of the host with the same input as in the last evaluation.
    """
    if is_snapshot_incomplete(snapshot):
        devices = expected_devices(settings.expect_cpus, settings.expect_pools)
        return (HostRuleState() if previous.started else previous)._replace(devices=devices)
    known = previous.devices
    if not previous.started:
        known = _devices_at_start(previous)
        previous = previous._replace(
            cpus=with_gained_cpus(previous.cpus, snapshot),
            pools=with_gained_pages(previous.pools, snapshot),
        )
    log = next_log_state(previous.kernel_log, snapshot.log, now)
    nics = next_nic_state(previous.nics, snapshot, settings.host, now)
    evaluated_ns = previous.cpus.evaluated_ns
    return HostRuleState(
        devices=known
        if unchanged >= HOST_RULES.keys()
        else update_inventory(snapshot, known, settings.expect_pools),
        kernel_log=log,
        cpus=unchanged_cpu_state(previous.cpus, snapshot, now)
        if DeviceKind.CPU in unchanged
        else next_cpu_state(previous.cpus, log, snapshot, settings, now),
        memory=unchanged_memory_state(previous.memory, snapshot)
        if DeviceKind.MEMORY in unchanged
        else next_memory_state(previous.memory, log, snapshot, settings, now),
        pools=previous.pools
        if DeviceKind.HUGEPAGES in unchanged
        else next_pool_state(previous.pools, log, snapshot, settings, now),
        nics=nics,
        pci=next_pci_rule_state(previous.pci, snapshot, now, nics.addresses),
        groups=next_cgroup_state(previous.groups, snapshot, settings, now, started=previous.started),
        machine=previous.machine
        if MACHINE_SUBJECT in unchanged
        else next_machine_state(previous.machine, log, snapshot, settings, now, evaluated_ns),
        started=True,
    )


def _devices_at_start(state: HostRuleState) -> tuple[InventoryDevice, ...]:
    """Return the devices with values at start from an earlier agent; some may no longer exist."""
    # the CPUs that the configuration expects have no values at start
    cpus_of = state.cpus.expected or state.cpus.numa_cpus
    found = [cpu_device(node) for node, cpus in cpus_of.items() if cpus]
    found += [memory_device(node) for node in state.memory.blocks_online]
    found += [pool for name in state.pools.expected if (pool := parse_pool_name(name)) is not None]
    return tuple(sorted(found, key=InventoryDevice.sort_key))


def device_rule_input(
    host: HostRuleState,
    snapshot: Snapshot,
    pools: PoolsByDevice,
    settings: EngineSettings,
    device: InventoryDevice,
    now: Instant,
) -> CpuRuleInput | MemoryRuleInput | PoolRuleInput:
    """Return the rules' input for a device that the agent itself publishes."""
    match device.kind:
        case DeviceKind.CPU:
            return numa_cpu_rule_input(host.cpus, snapshot, settings, device.numa_node)
        case DeviceKind.MEMORY:
            return memory_rule_input(host.memory, snapshot, settings, device.numa_node)
        case _:
            return pool_rule_input(host.pools, pools, snapshot, settings, device, now)


def declared_rule_input(
    host: HostRuleState,
    snapshot: Snapshot,
    pools: PoolsByDevice,
    settings: EngineSettings,
    declared: DriverDevice,
    now: Instant,
) -> CpuRuleInput | MemoryRuleInput | PoolRuleInput | PciRuleInput | NicRuleInput:
    """Return the rules' input for a device that a driver declares. Raises TypeError for a GPU."""
    match declared.part:
        case DeclaredCpuDevice():
            return declared_cpu_rule_input(host.cpus, snapshot, settings, declared)
        case DeclaredMemoryDevice():
            return declared_memory_rule_input(host.memory, snapshot, settings, declared)
        case DeclaredHugepageDevice():
            return declared_pages_rule_input(host.pools, pools, declared)
        case DeclaredPciDevice(address, driver):
            return pci_rule_input(host.pci, host.kernel_log, snapshot, address, driver, now)
        case DeclaredNicDevice() as nic:
            address = nic_address(host.nics, nic)
            function = (
                pci_rule_input(host.pci, host.kernel_log, snapshot, address, "", now) if address else None
            )
            return nic_rule_input(host.nics, snapshot, nic, settings.host, function)
        case _:
            kind = type(declared.part).__name__
            raise TypeError(f"declared device {declared.subject}: no host rules evaluate {kind}")


# --- verdicts ----------------------------------------------------------------------------------------------

MACHINE_SUBJECT: Final = "node"
"""Subject of causes that concern the whole machine instead of a device or pod."""
STARTING_DETAIL: Final = "first pass not finished"


def evaluate_host(
    evaluation: Evaluation, host: HostRuleState, snapshot: Snapshot, unchanged: Set[str]
) -> None:
    """Evaluate the rules of every device that the agent itself publishes.

    Args:
        unchanged: Parts of the host whose results are those of the last evaluation.
    """
    pools = pools_by_device(snapshot)
    for device in host.devices:
        if device.kind in unchanged:
            evaluation.reuse_ok_results(device.subject)
            continue
        view = device_rule_input(host, snapshot, pools, evaluation.settings, device, evaluation.now)
        evaluation.run_cached_rules(device.subject, HOST_RULES[device.kind], view)


def host_verdicts(
    evaluation: Evaluation, previous: VerdictContext, host: HostRuleState
) -> Iterator[tuple[InventoryDevice, DeviceHealth]]:
    """Yield each device that the agent publishes, with its verdict. A device is Unknown until its sources
    have finished a pass (reading)."""
    for device in host.devices:
        main = main_sources(evaluation, device.kind)
        if found := unchanged_ok_verdict(evaluation, previous, device, main):
            yield device, found
            continue
        more = [
            Cause(
                STALLED,
                Severity.UNKNOWN,
                Blame.AGENT,
                f"{name}: {STARTING_DETAIL}",
                STALLED_ADVICE,
                previous.started,
            )
            for name in main.starting
        ]
        yield device, verdict_from_causes(evaluation, previous, device, HOST_RULES[device.kind], more)


def verdict_from_causes(
    evaluation: Evaluation,
    previous: VerdictContext,
    device: InventoryDevice,
    rules: Sequence[Rule],
    more: Iterable[Cause] = (),
    more_sources: Iterable[SourceSample] = (),
) -> DeviceHealth:
    """Return the verdict on a device from the causes (confirmed faults) of its rules.

    If one of its main sources is stalled (has stopped reading), the device is Unknown, with this as the first
    cause. The other causes stay listed.

    Args:
        more: Causes from outside the device's own rules.
        more_sources: Additional sources that must not be stalled, like those in ``MAIN_SOURCES``.
    """
    causes = [*evaluation.causes(device.subject, partial(row_with_code, rules)), *more]
    causes.sort(key=lambda cause: -cause.severity)
    main = main_sources(evaluation, device.kind)
    sources, verified, lease_s = (*main.sources, *more_sources), main.verified, main.lease_s
    if len(sources) > len(main.sources):
        verified, lease_s = oldest_pass_time(sources, evaluation.now), lease_seconds(evaluation, sources)
    stalled = [source for source in sources if source.name in previous.stalls] if previous.stalls else []
    causes[:0] = [stall_cause(source, previous.stalls, evaluation.now) for source in stalled]
    severity = Severity.UNKNOWN if stalled else causes[0].severity if causes else Severity.OK
    return make_verdict(evaluation, previous, device, severity, causes, verified, lease_s)


def unchanged_ok_verdict(
    evaluation: Evaluation, previous: VerdictContext, device: InventoryDevice, main: "MainSources"
) -> DeviceHealth | None:
    """Return the last verdict on a device without faults, with a new lease; None: it must be made again."""
    last = previous.devices.get(device.subject)
    if (
        last is None
        or last.causes
        or last.severity is not Severity.OK
        or main.starting
        or previous.stalls
        or evaluation.has_conditions(device.subject)
    ):
        return None
    return last.with_verification(main.verified, main.lease_s + previous.lease_salt_s)


_state: Final = attrgetter("state")
_ONLY_OK: Final = {SourceState.OK}


class MainSources(NamedTuple):
    """Main sources of the devices of one kind: those whose readings their verdicts are based on."""

    sources: tuple[SourceSample, ...]
    """Without absent sources, unless all main sources are absent."""
    starting: tuple[str, ...]
    """Names of the sources that have not finished their first pass (reading). If the snapshot has none of the
    main sources, the names of all of them."""
    verified: Instant
    """Time of the oldest of the last passes of the sources."""
    lease_s: int
    """Lease of verdicts on the devices [s], see ``lease_seconds()``."""


def main_sources(evaluation: Evaluation, kind: DeviceKind) -> MainSources:
    """Return the main sources of the devices of one kind; they are found once per evaluation."""
    known: MainSources | None = evaluation.main_sources.get(kind)
    if known is None:
        names = MAIN_SOURCES[kind]
        sources = found = tuple(filter(None, map(evaluation.sources.get, names)))
        starting = () if sources else names
        if (states := set(map(_state, found))) != _ONLY_OK:
            if SourceState.ABSENT in states:
                sources = tuple(source for source in found if source.state is not SourceState.ABSENT) or found
            starting = starting or tuple(map(source_name, sources_in_state(sources, SourceState.STARTING)))
        verified, lease_s = oldest_pass_time(sources, evaluation.now), lease_seconds(evaluation, sources)
        known = evaluation.main_sources[kind] = MainSources(sources, starting, verified, lease_s)
    return known


def machine_causes(
    evaluation: Evaluation,
    host: HostRuleState,
    snapshot: Snapshot,
    unlisted_gpus: tuple[str, ...],
    unchanged: Set[str],
) -> Iterator[NonDeviceCause]:
    """Evaluate the rules for the whole machine, and yield a cause for each confirmed fault.

    Args:
        unchanged: Parts of the host whose results are those of the last evaluation.
    """
    if MACHINE_SUBJECT in unchanged and not unlisted_gpus:
        evaluation.reuse_ok_results(MACHINE_SUBJECT)
        return
    view = machine_rule_input(host.machine, host.kernel_log, snapshot, evaluation.settings, evaluation.now)
    view = view._replace(unlisted_gpus=unlisted_gpus) if unlisted_gpus else view
    evaluation.run_cached_rules(MACHINE_SUBJECT, NODE_RULES, view)
    for cause in evaluation.causes(MACHINE_SUBJECT, partial(row_with_code, NODE_RULES)):
        yield NonDeviceCause(MACHINE_SUBJECT, cause)


# --- checks of operators -----------------------------------------------------------------------------------

NOT_RUN_YET: Final = "its command has not ended yet, or runs in the agent only"

_Results = Mapping[tuple[str, str], CustomCheckResult]


def custom_check_sources(
    checks: Sequence[CustomCheck], results: Iterable[CustomCheckResult], now: Instant
) -> Iterable[SourceSample]:
    """Return a source, for the list of sources in the report, for each custom check that has a result."""
    if not checks:
        return ()
    by_name = {check.name: check for check in checks}
    samples = [
        _sample(by_name[result.check], result.device, result, now)
        for result in results
        if result.check in by_name
    ]
    return health_check_sources(samples, now)


class CustomCheckEvaluation:
    """Results of the custom checks (commands of operators) in one evaluation, for devices and the Kubernetes
    node."""

    def __init__(
        self, evaluation: Evaluation, checks: Sequence[CustomCheck], results: Iterable[CustomCheckResult]
    ) -> None:
        self._evaluation = evaluation
        self._checks = checks
        self._results: _Results = {(result.check, result.device): result for result in results}

    def samples(self, subject: Subject) -> list[DriverCheckSample]:
        """Return the newest result of each custom check (command of an operator) of a device. A check without
        a result is listed as not evaluated."""
        return self._samples(subject, [check for check in self._checks if check.matches(subject)])

    def _samples(self, subject: Subject, checks: Iterable[CustomCheck]) -> list[DriverCheckSample]:
        samples = []
        for check in checks:
            result = self._results.get((check.name, subject if check.is_per_device else ""))
            if result is None:
                self._evaluation.not_evaluated.append(NotApplicable(subject, check.code, NOT_RUN_YET))
            samples.append(_sample(check, subject, result, self._evaluation.now))
        return samples

    def add_to_host(self, previous: VerdictContext, verdicts: dict[InventoryDevice, DeviceHealth]) -> None:
        """Add the causes (confirmed faults) from custom checks to the verdicts on the host's devices."""
        if not self._checks:
            return
        for device, found in verdicts.items():
            samples = self.samples(device.subject)
            if causes := samples and evaluate_driver_checks(self._evaluation, device.subject, samples):
                more = [*found.causes, *causes]
                verdicts[device] = replace_causes(self._evaluation, previous, device, found, more)

    def notes(self) -> list[NonDeviceCause]:
        """Return the causes that custom checks of the Kubernetes node found.

        They concern no single device.
        """
        if not self._checks:
            return []
        samples = self._samples(MACHINE_SUBJECT, [check for check in self._checks if not check.devices])
        causes = evaluate_driver_checks(self._evaluation, MACHINE_SUBJECT, samples)
        return [NonDeviceCause(MACHINE_SUBJECT, cause) for cause in causes]

    def keep_faults_of_unread_devices(self, known: Iterable[Subject]) -> None:
        """Keep the faults from before a restart of the agent for devices that no source has read since the
        restart.

        Args:
            known: Devices that have been read since the restart.
        """
        if not self._checks:
            return
        present = {subject_of_checks(subject) for subject in (*known, MACHINE_SUBJECT)}
        prefixes = tuple(f"{check.code}/" for check in self._checks)
        for (subject, code), condition in self._evaluation.previous.items():
            if condition.last_pass == 0 and code.startswith(prefixes) and subject not in present:
                self._evaluation.repeat_finding(subject, code, passes=0)


def _sample(
    check: CustomCheck, subject: Subject, result: CustomCheckResult | None, now: Instant
) -> DriverCheckSample:
    return DriverCheckSample(
        check.code,
        subject,
        finding=result.finding if result else None,
        no_result_reason=result.no_result_reason if result else "",
        passes=result.passes if result else 0,
        beat_ns=result.beat_ns if result else now.mono_ns,
        period_ns=int((check.period_s + check.timeout_s) * NS),
        raise_after=check.raise_after,
        clear_after=check.clear_after,
        equal_passes=result.equal_passes if result else 0,
    )
