"""Updates of the rules' state outside an evaluation: from the baseline of a boot, and after a change of
settings. Pure.

The baseline is the set of values that the machine had at the agent's start. The engine stores these values,
restores them when the agent restarts, and replaces them when an operator accepts the machine's present
values. Without stored values, an agent that restarts on a faulty machine would take the faulty values as
those at start, and the fault would end without a repair. Stored values are not used after a reboot. The
configuration's ``[expect]`` outranks them.

After a change of settings, the parts of the state that depend on the changed setting start again. Raised and
latched faults stay. If the window of a counter becomes shorter, a new window begins, because a long window
has too few points. Until the new window is full, the counter's rule does not decide, and a raised fault
stays. A longer window continues. If a device's expected value is removed from the settings, the device is
compared with its present value from then on.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from agent.devices.inventory import DeviceKind, InventoryDevice
from agent.health.evaluation import Conditions
from agent.health.gpu.rule_input import SeenGpuFeatures
from agent.health.gpu.rule_state import GpuRuleState, counter_windows_s, gpu_devices, gpu_rules
from agent.health.gpu.verdicts import gpu_catalog_row
from agent.health.host.cpu.state import (
    CpuRuleState,
    CpuThrottleCounters,
    cpu_baselines,
    frequency_baselines,
    numa_cpu_baselines,
    rebaseline_cpus,
    restored_cpu_state,
)
from agent.health.host.hugepages import PoolRuleState, pool_baselines, rebaseline_pool, restored_pool_state
from agent.health.host.memory.edac import EdacState
from agent.health.host.memory.rules import memory_baselines, rebaseline_memory, restored_memory_state
from agent.health.host.nic.state import (
    NicPortCounters,
    NicRuleState,
    nic_address,
    nic_baselines,
    rebaseline_nic,
    restored_nic_state,
)
from agent.health.host.pci.state import pci_baselines, rebaseline_pci, restored_pci_state
from agent.health.host.verdicts import HostRuleState
from agent.health.rate_window import RateWindow, WindowedCounter
from agent.health.rules import RuleChange, RuleChanges
from agent.health.state_machine import Condition, ConditionPhase, with_probation_time
from agent.health.verdict import Pause
from agent.model.cpuset import format_cpus
from agent.model.declared_devices import DeclaredCpuDevice, DeclaredNicDevice, DeclaredPart, DeclaredPciDevice
from agent.model.health import Severity
from agent.model.persistent_faults import BootBaseline, GpuBaseline
from agent.model.reading import Missing
from agent.model.settings import EngineSettings, GpuLimits, HostLimits
from agent.model.snapshot import Snapshot
from agent.model.time import Instant

STORED_MAX: Final = 1024
"""Largest number of PCI functions, and of NICs, whose values at start are stored."""

Basis = tuple[object, ...]
"""Parts of the rules' state from which values at start are made; while they are equal, so are the values."""


def conditions_after_pause(conditions: Conditions, pause: Pause) -> Conditions:
    """Return conditions whose pending faults count no time in which the agent was stopped.

    A reading before and one after the pause do not show that the fault lasted as long as the pause. A fault
    that could not be evaluated before the pause counts no time until it is evaluated again anyway.
    """
    begin_ns, end_ns = pause
    return {
        key: condition._replace(run_start_ns=condition.run_start_ns + end_ns - begin_ns)
        if condition.phase is ConditionPhase.PENDING and not condition.unseen_ns
        else condition
        for key, condition in conditions.items()
    }


def start_basis(host: HostRuleState, gpus: GpuRuleState) -> Basis:
    """Return the parts of the rules' state from which :func:`collect_baseline` takes the values at start."""
    cpus, pools = host.cpus, host.pools
    return (
        cpus.expected,
        cpus.isolated_start,
        cpus.smt_start,
        cpus.cpu_facts.start_khz,
        cpus.numa_cpus,
        host.memory.blocks_online,
        pools.expected,
        pools.max_seen,
        host.pci.states,
        host.pci.restored,
        host.nics.states,
        host.nics.restored,
        [gpus.per_gpu[gpu.number].seen for gpu in gpus.registry],
        gpus.registry,
    )


def collect_baseline(
    boot_id: str, host: HostRuleState, gpus: GpuRuleState, settings: EngineSettings
) -> BootBaseline:
    """Return the machine's values at start, to be stored on disk. Values that the configuration sets are left
    out."""
    isolated, smt = host.cpus.isolated_start, host.cpus.smt_start
    seen = [(gpu.uuid, gpus.per_gpu[gpu.number].seen) for gpu in gpus.registry if gpu.uuid]
    return BootBaseline(
        boot_id=boot_id,
        cpus=tuple(cpu_baselines(host.cpus)) if settings.expect_cpus is None else (),
        isolated=None if isinstance(isolated, Missing) else format_cpus(isolated) if isolated else "",
        smt=None if isinstance(smt, Missing) else smt,
        frequencies=tuple(frequency_baselines(host.cpus)),
        memory=tuple(memory_baselines(host.memory)),
        pools=tuple(pool_baselines(host.pools, settings.expect_pools)),
        pci=tuple(pci_baselines(host.pci))[:STORED_MAX],
        nics=tuple(nic_baselines(host.nics))[:STORED_MAX],
        gpus=tuple(GpuBaseline(uuid, *features) for uuid, features in seen if features != SeenGpuFeatures()),
        numa_cpus=tuple(numa_cpu_baselines(host.cpus)),
    )


def values_of_boot(stored: BootBaseline, boot_id: str) -> BootBaseline:
    """Return the stored values at start if they are of the running boot. Otherwise, return an empty baseline.

    Args:
        boot_id: Boot ID of the running kernel; empty: unknown, stored values may be of another boot.
    """
    return stored if boot_id and stored.boot_id == boot_id else BootBaseline(boot_id)


def restored_host_state(start: BootBaseline) -> HostRuleState:
    """Return the state of the host's rules at the agent's start, with values stored earlier in this boot."""
    return HostRuleState(
        cpus=restored_cpu_state(start),
        memory=restored_memory_state(start.memory),
        pools=restored_pool_state(start.pools),
        nics=restored_nic_state(start.nics),
        pci=restored_pci_state(start.pci),
    )


def with_seen_features(gpus: GpuRuleState, stored: Iterable[GpuBaseline]) -> GpuRuleState:
    """Return the state of the GPU rules with the features that the GPUs showed before the agent's start."""
    seen = {gpu.uuid: SeenGpuFeatures(gpu.links_up, gpu.ecc, gpu.fabric_manager) for gpu in stored}
    per_gpu = {
        number: replace(state, seen=seen[state.uuid]) if state.uuid in seen else state
        for number, state in gpus.per_gpu.items()
    }
    return replace(gpus, per_gpu=per_gpu)


# --- accept what the machine has now ------------------------------------------------------------------------


def rebaseline_host_device(
    host: HostRuleState, snapshot: Snapshot, settings: EngineSettings, device: InventoryDevice, code: str
) -> HostRuleState:
    """Return the host rules' state in which the present values of a host device replace its values at start.
    Expected values that the configuration sets stay.

    Args:
        code: Finding code of the rule whose values are replaced; empty: the values of all rules.
    """
    match device.kind:
        case DeviceKind.CPU:
            node = device.numa_node
            cpus = host.cpus.expected.get(node, 0) | host.cpus.numa_cpus.get(node, 0)
            observed = node if settings.expect_cpus is None else None
            return host._replace(cpus=rebaseline_cpus(host.cpus, snapshot, cpus, observed, code))
        case DeviceKind.MEMORY:
            return host._replace(memory=rebaseline_memory(host.memory, snapshot, device.numa_node))
        case DeviceKind.HUGEPAGES if device.name not in settings.expect_pools:
            return host._replace(pools=rebaseline_pool(host.pools, snapshot, device.name))
        case _:
            return host


def rebaseline_declared_part(
    host: HostRuleState, snapshot: Snapshot, part: DeclaredPart, code: str, now: Instant
) -> HostRuleState:
    """Return the host rules' state in which the present values of a declared part replace those at start.

    A declared part is the hardware of the host that a driver declares as a device. Expected values that the
    driver declares stay.

    Args:
        code: Finding code of the rule whose values are replaced; empty: the values of all rules.
    """
    match part:
        case DeclaredCpuDevice():
            return host._replace(cpus=rebaseline_cpus(host.cpus, snapshot, part.cpus, code=code))
        case DeclaredPciDevice():
            return host._replace(pci=rebaseline_pci(host.pci, part.address, now.mono_ns, code))
        case DeclaredNicDevice():
            address = nic_address(host.nics, part)
            pci = rebaseline_pci(host.pci, address, now.mono_ns, code)
            return host._replace(nics=rebaseline_nic(host.nics, snapshot, part, code), pci=pci)
        case _:
            return host


# --- changed settings --------------------------------------------------------------------------------------

_UNREAD_NS = -1
"""Time that no reading has [ns]: the next evaluation takes its reading as new.

It computes the growth again.
"""


def _resize_window(window: RateWindow, before_s: int, after_s: int) -> RateWindow:
    """Return the readings of a counter after the operator changed the length of the counter's window. If the
    window became shorter, only the newest reading is kept."""
    return window if after_s >= before_s else window[-1:]


def _resized_counter(counter: WindowedCounter, before_s: int, after_s: int) -> WindowedCounter:
    return counter._replace(window=_resize_window(counter.window, before_s, after_s))


# --- the host -----------------------------------------------------------------------------------------------


def host_with_settings(host: HostRuleState, before: EngineSettings, after: EngineSettings) -> HostRuleState:
    """Return the state of the host's rules after a change of the settings from ``before`` to ``after``."""
    unexpected = before.expect_pools.keys() - after.expect_pools.keys()
    return host._replace(
        devices=tuple(device for device in host.devices if device.name not in unexpected),
        cpus=_cpu_state_with_settings(host.cpus, before, after),
        pools=_pool_state_without(host.pools, unexpected),
        memory=host.memory._replace(
            errors=_edac_state_with_settings(host.memory.errors, before.host, after.host)
        ),
        nics=_nic_state_with_settings(host.nics, before.host, after.host),
    )


def _cpu_state_with_settings(
    state: CpuRuleState, before: EngineSettings, after: EngineSettings
) -> CpuRuleState:
    if before.expect_cpus is not None and after.expect_cpus is None:
        state = state._replace(expected={})
    window_s = (before.throttle_window_s, after.throttle_window_s)
    if window_s[0] == window_s[1]:
        return state

    def resize(counters: CpuThrottleCounters) -> CpuThrottleCounters:
        return CpuThrottleCounters(
            _UNREAD_NS,
            _resized_counter(counters.core, *window_s),
            _resized_counter(counters.package, *window_s),
        )

    return state._replace(
        node_throttle={node: resize(counters) for node, counters in state.node_throttle.items()},
        declared_throttle={
            name: known._replace(throttled=resize(known.throttled))
            for name, known in state.declared_throttle.items()
        },
    )


def _pool_state_without(state: PoolRuleState, unexpected: set[str]) -> PoolRuleState:
    if not unexpected:
        return state
    expected = {name: pages for name, pages in state.expected.items() if name not in unexpected}
    return state._replace(expected=expected)


def _edac_state_with_settings(state: EdacState, before: HostLimits, after: HostLimits) -> EdacState:
    window_s = (before.correctable_window_s, after.correctable_window_s)
    if window_s[0] == window_s[1]:
        return state
    counters = {
        key: total._replace(window=_resize_window(total.window, *window_s))
        for key, total in state.counters.items()
    }
    return state._replace(sources=(), counters=counters)  # without sources: computed again


def _nic_state_with_settings(state: NicRuleState, before: HostLimits, after: HostLimits) -> NicRuleState:
    errors_s = (before.nic_error_window_s, after.nic_error_window_s)
    link_s = (before.nic_link_window_s, after.nic_link_window_s)
    if errors_s[0] == errors_s[1] and link_s[0] == link_s[1]:
        return state

    def resize(counters: NicPortCounters) -> NicPortCounters:
        return NicPortCounters(
            _resized_counter(counters.link_downs, *link_s),
            *(_resized_counter(counter, *errors_s) for counter in counters[1:]),
        )

    states = {
        declared: nic._replace(
            ports={
                number: port._replace(counters=resize(port.counters)) for number, port in nic.ports.items()
            }
        )
        for declared, nic in state.states.items()
    }
    return replace(state, states=states, read_ns=_UNREAD_NS)


# --- GPUs ---------------------------------------------------------------------------------------------------


def gpus_with_settings(state: GpuRuleState, before: GpuLimits, after: GpuLimits) -> GpuRuleState:
    """Return the state of the GPU rules after a change of their limits from ``before`` to ``after``."""
    if before.expect != after.expect:  # GPUs that only the expectation added
        state = replace(state, registry=tuple(gpu for gpu in state.registry if gpu.uuid or gpu.bus))
    windows_s = {
        field: (length_s, counter_windows_s(after)[field])
        for field, length_s in counter_windows_s(before).items()
    }
    if all(old_s == new_s for old_s, new_s in windows_s.values()):
        return state
    per_gpu = {
        number: replace(
            gpu,
            read_ns=_UNREAD_NS,
            windows={
                field: _resize_window(window, *windows_s[field]) for field, window in gpu.windows.items()
            },
        )
        for number, gpu in state.per_gpu.items()
    }
    return replace(state, per_gpu=per_gpu)


def conditions_with_settings(
    conditions: Conditions, gpus: GpuRuleState, before: EngineSettings, after: EngineSettings, now: Instant
) -> Conditions:
    """Return the conditions (raised and pending faults) after a change of the settings.

    A fault that has ended is still reported for a probation time. If the setting of this time changes, its
    end also changes for faults that have already ended. If the operator sets a milder severity for a rule, it
    applies at once.
    """
    if before.rules == after.rules and before.gpu.probation_s == after.gpu.probation_s:
        return conditions
    gpu_names = {device.name for device in gpu_devices(gpus)}
    old_changes, new_changes = RuleChanges(before.rules), RuleChanges(after.rules)
    changed = {}
    for (subject, code), condition in conditions.items():
        old, new = old_changes.of(subject, code), new_changes.of(subject, code)
        if old.severity is not new.severity:
            condition = _with_milder_severity(condition, new.severity)
        if condition.phase is ConditionPhase.PROBATION:
            is_gpu = subject in gpu_names
            old_ns, new_ns = (
                _probation_ns(change, code, settings.gpu if is_gpu else None)
                for change, settings in ((old, before), (new, after))
            )
            if new_ns and old_ns != new_ns:
                condition = with_probation_time(condition, new_ns, now)
        changed[subject, code] = condition
    return changed


def with_milder_severities(conditions: Conditions, settings: EngineSettings) -> Conditions:
    """Return restored conditions with the severities that the operator set for their rules, if milder."""
    changes = RuleChanges(settings.rules)
    return {
        key: _with_milder_severity(condition, changes.of(*key).severity)
        for key, condition in conditions.items()
    }


def _with_milder_severity(condition: Condition, severity: Severity | None) -> Condition:
    finding = condition.finding
    if severity is None or finding.severity is Severity.UNKNOWN or severity >= finding.severity:
        return condition
    return condition._replace(finding=finding._replace(severity=severity))


def _probation_ns(change: RuleChange, code: str, limits: GpuLimits | None) -> int:
    """Return how long an ended fault with a finding code is still reported [ns].

    Args:
        change: Changes of the rule by the operator.
        limits: Limits of GPUs; None: the device is no GPU.
    """
    if change.probation_ns is not None:
        return change.probation_ns
    return gpu_catalog_row(gpu_rules(limits), limits, code).probation_ns if limits is not None else 0
