"""Baseline of a boot, the machine's values at start: the engine stores them, restores them when the agent
restarts, and replaces them when an operator accepts the machine's present values. Pure.

An agent without stored values would take the values of a faulty machine as those at start, and the fault
would end without a repair. A reboot ends stored values; the configuration's ``[expect]`` outranks them.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from agent.devices.inventory import DeviceKind, InventoryDevice
from agent.health.gpu.rule_input import SeenGpuFeatures
from agent.health.gpu.rule_state import GpuRuleState
from agent.health.host.cpu.state import (
    cpu_baselines,
    frequency_baselines,
    restart_cpus,
    restored_cpu_state,
)
from agent.health.host.hugepages.state import pool_baselines, restart_pool, restored_pool_state
from agent.health.host.memory.state import memory_baselines, restart_memory, restored_memory_state
from agent.health.host.nic.state import nic_address, nic_baselines, restart_nic, restored_nic_state
from agent.health.host.pci.state import pci_baselines, restart_pci, restored_pci_state
from agent.health.host.state import HostRuleState
from agent.model.boot_baseline import BootBaseline, GpuBaseline
from agent.model.cpuset import format_cpus
from agent.model.declared_devices import DeclaredCpuDevice, DeclaredNicDevice, DeclaredPart, DeclaredPciDevice
from agent.model.reading import Missing
from agent.model.settings import EngineSettings
from agent.model.snapshot import Snapshot

STORED_MAX: Final = 1024
"""Largest number of PCI functions, and of NICs, whose values at start are stored."""

Basis = tuple[object, ...]
"""Parts of the rules' state from which values at start are made; while they are equal, so are the values."""


def start_basis(host: HostRuleState, gpus: GpuRuleState) -> Basis:
    """Return the parts of the rules' state from which :func:`collect_baseline` makes the baseline."""
    cpus, pools = host.cpus, host.pools
    return (
        cpus.expected,
        cpus.isolated_start,
        cpus.smt_start,
        cpus.cpu_facts.start_khz,
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
    """Return the machine's values at start, which are stored on disk, without those that the configuration
    sets.
    """
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
    )


def values_of_boot(stored: BootBaseline, boot_id: str) -> BootBaseline:
    """Return the stored baseline (values at start) if it is of the running boot, else an empty one for it.

    Args:
        boot_id: Boot ID of the running kernel; empty: unknown, stored values may be of another boot.
    """
    return stored if boot_id and stored.boot_id == boot_id else BootBaseline(boot_id)


def restored_host_state(start: BootBaseline) -> HostRuleState:
    """Return the state of the host's rules when an agent starts, with the boot's stored baseline."""
    return HostRuleState(
        cpus=restored_cpu_state(start),
        memory=restored_memory_state(start.memory),
        pools=restored_pool_state(start.pools),
        nics=restored_nic_state(start.nics),
        pci=restored_pci_state(start.pci),
    )


def with_seen_features(gpus: GpuRuleState, stored: Iterable[GpuBaseline]) -> GpuRuleState:
    """Return the state of the GPU rules with the features that the GPUs showed before the agent started."""
    seen = {gpu.uuid: SeenGpuFeatures(gpu.links_up, gpu.ecc, gpu.fabric_manager) for gpu in stored}
    per_gpu = {
        number: replace(state, seen=seen[state.uuid]) if state.uuid in seen else state
        for number, state in gpus.per_gpu.items()
    }
    return replace(gpus, per_gpu=per_gpu)


# --- accept what the machine has now ------------------------------------------------------------------------


def restart_host_device(
    host: HostRuleState, snapshot: Snapshot, settings: EngineSettings, device: InventoryDevice
) -> HostRuleState:
    """Return the host rules' state in which the present values of a host device are its new baseline.
    Expectations that the configuration sets stay."""
    match device.kind:
        case DeviceKind.CPU:
            node = device.numa_node
            cpus = host.cpus.expected.get(node, 0) | host.cpus.numa_cpus.get(node, 0)
            observed = node if settings.expect_cpus is None else None
            return replace(host, cpus=restart_cpus(host.cpus, snapshot, cpus, observed))
        case DeviceKind.MEMORY:
            return replace(host, memory=restart_memory(host.memory, snapshot, device.numa_node))
        case DeviceKind.HUGEPAGES if device.name not in settings.expect_pools:
            return replace(host, pools=restart_pool(host.pools, snapshot, device.name))
        case _:
            return host


def restart_declared_part(host: HostRuleState, snapshot: Snapshot, part: DeclaredPart) -> HostRuleState:
    """Return the host rules' state in which the present values of a declared part of the host are its new
    baseline. Expectations that the driver declares stay."""
    match part:
        case DeclaredCpuDevice():
            return replace(host, cpus=restart_cpus(host.cpus, snapshot, part.cpus))
        case DeclaredPciDevice():
            return replace(host, pci=restart_pci(host.pci, part.address))
        case DeclaredNicDevice():
            pci = restart_pci(host.pci, nic_address(host.nics, part))
            return replace(host, nics=restart_nic(host.nics, snapshot, part), pci=pci)
        case _:
            return host
