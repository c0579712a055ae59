"""Model of one machine: its readings, and how events of a fault script change them. Reads no clock.

A source reads its devices in passes. The number of finished passes follows from the simulated time, so that
time without events needs no computation. A reading that an event changes is in the source's pass at that
time.
"""

from collections.abc import Container, Mapping
from functools import cached_property, lru_cache
from typing import Final

from agent.devices.inventory import gpu_device, mig_device
from agent.health.gpu.h100_readings import ALL_UP, IDLE_H100, LINKS
from agent.health.gpu.xid.log_lines import GPU_LOG_PATTERNS
from agent.health.kernel_log.facts import compile_pattern
from agent.model.declared_devices import DeclaredCpuDevice, DeclaredFile, DeclaredGpuDevice, DriverDevice
from agent.model.gpu import (
    WHOLE_GPU,
    GpuAttributes,
    GpuEvent,
    GpuField,
    GpuOsSample,
    GpuSample,
    MigSample,
    NvmlReturnCode,
    NvmlSample,
    XidCount,
)
from agent.model.machine_samples import (
    DimmSample,
    LogLine,
    LogSample,
    MachineSample,
    NumaMemorySample,
    PerCpuSample,
    PressureSample,
)
from agent.model.prepare import DriverFault
from agent.model.reading import NEVER_READ, Absence, Missing, Reading, SourceSample, SourceState
from agent.model.snapshot import CpuSetsSample, HugepagePoolSample, NativeCoreStats, NumaCpuSample, Snapshot
from agent.model.time import NS, Instant
from agent.simulate.fault_model import MachineSpec

NODE: Final = "node-a"
DRIVER: Final = "gpu.example.com"
WALL_S: Final = 1_700_000_000.0
"""Time of day at the start of a script [s since 1970]."""
UPTIME_NS: Final = 60 * NS
"""Time from the boot until the agent starts [ns]."""
UNREADABLE: Final = Missing(Absence.UNREADABLE)
GIB_KIB: Final = 1 << 20
NOT_VITAL: Final = frozenset({"edac", "memory", "cores", "pressure", "kmsg", "pci", "nvml", "nvml-events"})
PERIOD_NS: Final = {"nvml": 10 * NS, "kmsg": 10 * NS, "memory": 5 * NS, "cores": 60 * NS, "pressure": 5 * NS}
"""Periods of sources that are not read every second [ns]."""
HOST_SOURCES: Final = ("cpus", "throttle", "hugepages", "cgroups", "pci")
SLOW_SOURCES: Final = ("edac", "memory", "cores", "pressure")
SOURCE_DEVICES: Final = {"cpus": "cpu-", "hugepages": "hugepages-", "edac": "memory-"}
"""Prefix of the host devices that depend on a source; of ``kmsg`` no device depends."""
RESET_FIELDS: Final = tuple(
    field
    for field in GpuField
    if field in (GpuField.RECOVERY_ACTION, GpuField.REMAP_PENDING, GpuField.SRAM_PARITY)
    or (field.startswith(("ecc_correctable", "ecc_uncorrectable")) and not field.endswith("_life"))
)
"""Readings that a reset of the GPU clears."""
_H100: Final[Mapping[GpuField, Reading]] = {
    **dict.fromkeys(GpuField, 0),
    **IDLE_H100,
    **{field: NEVER_READ for field in GpuField if field.startswith("retired")},
}
_T4: Final[Mapping[GpuField, Reading]] = {
    **_H100,
    **{
        field: NEVER_READ
        for field in GpuField
        if field.startswith(("remap", "link", "fabric", "sram", "mem_", "recovery", "mig", "margin"))
    },
    **{field: 0 for field in GpuField if field.startswith("retired")},
    GpuField.TEMP_MEM_MAX: NEVER_READ,
    GpuField.ARCHITECTURE: 6,
}
READINGS_OF_MODEL: Final = {"H100": _H100, "T4": _T4}
"""Readings of a sound, idle GPU by its model."""
_PATTERNS: Final = tuple(compile_pattern(pattern) for pattern in GPU_LOG_PATTERNS)


@lru_cache(4096)
def _pattern_of(text: str) -> int:
    return next(index for index, pattern in enumerate(_PATTERNS) if pattern.match(text))


class PassCounter:
    """Counter of the finished passes (complete readings) of one source over the simulated time."""

    def __init__(self, start_ns: int, period_ns: int) -> None:
        self.period_ns = period_ns
        self._base = (0, start_ns)
        self._stopped_ns: int | None = None

    def passes_at(self, t_ns: int) -> tuple[int, int]:
        """Return the number of passes finished until ``t_ns``, and the time of the last one [ns]."""
        count, base_ns = self._base
        until_ns = t_ns if self._stopped_ns is None else min(t_ns, self._stopped_ns)
        passes = max(0, until_ns - base_ns) // self.period_ns
        return count + passes, base_ns + passes * self.period_ns

    def stop(self, t_ns: int) -> None:
        """Make the source hang from ``t_ns`` on, so that it finishes no pass."""
        if self._stopped_ns is None:
            self._stopped_ns = t_ns

    def resume(self, t_ns: int) -> None:
        """End the source's hang with a pass (complete reading) that finishes at ``t_ns``."""
        if self._stopped_ns is not None:
            self._base, self._stopped_ns = (self.passes_at(t_ns)[0] + 1, t_ns), None


class Machine:
    """Readings of one machine and of the agent's sources on it. Times count from the start of the script."""

    def __init__(self, spec: MachineSpec) -> None:
        self.spec = spec
        self.clock_offset_s = 0.0
        """Sum of all steps of the wall clock [s]."""
        self.boots = 0
        self.boot_ns = -UPTIME_NS
        self.driver_faults: tuple[DriverFault, ...] = ()
        self.declared = (DeclaredFile(DRIVER, tuple(self._declared_devices())),) if spec.declares else ()
        self._boot_hardware()
        self.start_agent(0)

    # --- time ------------------------------------------------------------------------------------------

    def now(self, t_ns: int) -> Instant:
        """Return what the clocks of the machine show at the simulated time `t_ns` [ns]."""
        return Instant(t_ns - self.boot_ns, WALL_S + t_ns / NS + self.clock_offset_s)

    @property
    def boot_id(self) -> str:
        """ID of the present boot."""
        return f"00000000-0000-4000-8000-{self.boots:012}"

    def reboot(self, t_ns: int) -> None:
        """Boot the machine, which repairs all hardware. The caller must call :meth:`start_agent` next."""
        self.boots += 1
        self.boot_ns = t_ns - UPTIME_NS
        self._boot_hardware()

    def start_agent(self, t_ns: int, hanging: Container[str] = ()) -> None:
        """Start the agent: each source finishes its first reading at once, except the sources in `hanging`.

        The sources in `hanging` hang during their first reading.
        """
        names = (*HOST_SOURCES, *SLOW_SOURCES, "kmsg", "nvml")
        self._passes |= {name: PassCounter(t_ns, PERIOD_NS.get(name, NS)) for name in names}
        for name in names:  # slow sources, too, finish their first pass at once
            self._passes[name].stop(t_ns)
            if name not in hanging:
                self._passes[name].resume(t_ns)
        self.restart_nvml(t_ns)

    def _boot_hardware(self) -> None:
        spec = self.spec
        self.online = (1 << spec.cpus_per_node * spec.numa_nodes) - 1
        self.pages = dict.fromkeys(range(spec.numa_nodes), spec.pool_pages)
        self.dimm_errors = {node: [0, 0] for node in range(spec.numa_nodes)}
        self.readings = {gpu: dict(READINGS_OF_MODEL[spec.model]) for gpu in range(spec.gpus)}
        self.status = dict.fromkeys(range(spec.gpus), NvmlReturnCode.OK)
        self.generation = 1
        self._lines: dict[str, LogLine] = {}
        self._hanging: dict[int, tuple[int, dict[GpuField, Reading]]] = {}
        self._passes: dict[str, PassCounter] = {}
        self.nvml_process = ""

    # --- GPUs ------------------------------------------------------------------------------------------

    def bus(self, gpu: int) -> str:
        """Return the PCI address of a GPU."""
        return f"{gpu // 15:04x}:{gpu % 15 + 1:x}b:00.0"

    def xid(
        self, gpu: int, code: int, t_ns: int, times: int = 1, detail: str = "", instance: int = WHOLE_GPU
    ) -> None:
        """Report an XID error of a GPU in the kernel log and, while the NVML process runs, by NVML.

        Args:
            instance: GPU instance that has the fault; WHOLE_GPU: the whole GPU has the fault.
        """
        where = self.bus(gpu).removesuffix(".0") + ("" if instance == WHOLE_GPU else f" GPU-I:{instance:02}")
        text = f"NVRM: Xid (PCI:{where}): {code}, {detail or 'pid=1234, name=python, something failed'}"
        us = self.now(t_ns).mono_ns // 1000
        known = self._lines.get(text) or LogLine(_pattern_of(text), 0, us, us, text, text, 0)
        seq = 1 + max((line.seq for line in self._lines.values()), default=0)
        self._lines[text] = known._replace(times=known.times + times, last_us=us, seq=seq)
        if not self.nvml_process:
            mono_ns = self.now(t_ns).mono_ns
            compute = WHOLE_GPU if instance == WHOLE_GPU else 0
            before = self._xids[gpu].get((code, instance))
            before = before or XidCount(code, instance, compute, 0, mono_ns, mono_ns)
            self._xids[gpu][code, instance] = before._replace(times=before.times + times, last_ns=mono_ns)

    def add(self, gpu: int, field: GpuField, value: int) -> None:
        """Add a number to a reading of a GPU, unless the GPU lacks the reading."""
        before = self.readings[gpu][field]
        if isinstance(before, int):
            self.readings[gpu][field] = before + value

    def set(self, gpu: int, field: GpuField, value: int) -> None:
        """Replace a reading of a GPU, unless the GPU lacks the reading."""
        if isinstance(self.readings[gpu][field], int):
            self.readings[gpu][field] = value

    def reset(self, gpu: int) -> None:
        """Reset a GPU, which repairs what a reset can repair."""
        for field in RESET_FIELDS:
            self.set(gpu, field, 0)
        self.set(gpu, GpuField.LINKS_UP, ALL_UP)

    def reload_driver(self) -> None:
        """Reload the GPU driver, which resets all GPUs that answer it."""
        self.generation += 1
        for gpu in self.readings:
            self._handles[gpu] += 1
            if self.status[gpu] == NvmlReturnCode.OK:
                self.reset(gpu)

    def hang(self, gpu: int, t_ns: int) -> None:
        """Make an NVML call on a GPU hang from ``t_ns`` on."""
        if gpu not in self._hanging:
            self._hanging[gpu] = (t_ns, dict(self.readings[gpu]))
            self._gpu_passes[gpu].stop(t_ns)

    def end_hang(self, gpu: int, t_ns: int) -> None:
        """End the hang of the NVML call on a GPU."""
        if self._hanging.pop(gpu, None) and not self.nvml_process:
            self._gpu_passes[gpu].resume(t_ns)

    def crash_nvml(self, t_ns: int) -> None:
        """End the process that calls NVML."""
        self.nvml_process = "the NVML process was killed by SIGSEGV"
        self._hanging.clear()
        self._passes["nvml"].stop(t_ns)
        for gpu, counter in self._gpu_passes.items():
            counter.stop(t_ns)
            self._xids[gpu].clear()

    def recover_nvml(self, t_ns: int) -> None:
        """Start the process that calls NVML again."""
        self.nvml_process = ""
        self._passes["nvml"].resume(t_ns)
        for gpu, counter in self._gpu_passes.items():
            counter.resume(t_ns)
            self._handles[gpu] = 1

    def restart_nvml(self, t_ns: int) -> None:
        """Start all passes (complete readings) over the GPUs again, because the agent starts."""
        self.nvml_process = ""
        self._xids: dict[int, dict[tuple[int, int], XidCount]] = {gpu: {} for gpu in self.readings}
        self._handles = dict.fromkeys(self.readings, 1)
        self._gpu_passes = {gpu: PassCounter(t_ns - NS, NS) for gpu in self.readings}
        self.generation = 1
        for gpu in self._hanging:
            self._hanging[gpu] = (t_ns, dict(self.readings[gpu]))
            self._gpu_passes[gpu] = PassCounter(t_ns, NS)
            self._gpu_passes[gpu].stop(t_ns)

    # --- sources ---------------------------------------------------------------------------------------

    def stop_agent(self, t_ns: int) -> None:
        """Stop the agent's process (SIGSTOP), so that its sources read nothing."""
        for counter in self._passes.values():
            counter.stop(t_ns)

    def continue_agent(self, t_ns: int, hanging: Container[str]) -> None:
        """Let the agent's process continue; the sources in `hanging` still hang."""
        for name, counter in self._passes.items():
            if name not in hanging and not (name == "nvml" and self.nvml_process):
                counter.resume(t_ns)

    def stop_source(self, name: str, t_ns: int) -> None:
        """Make a source hang from ``t_ns`` on."""
        self._passes[name].stop(t_ns)

    def resume_source(self, name: str, t_ns: int) -> None:
        """End the hang of a source."""
        self._passes[name].resume(t_ns)

    def last_read_ns(self, device: str, t_ns: int) -> int:
        """Return when the source of a host device or GPU last finished a pass (complete reading) [ns]."""
        for name, prefix in SOURCE_DEVICES.items():
            if device.startswith(prefix):
                return self._passes[name].passes_at(t_ns)[1]
        return self._gpu_passes[int(device.split("-")[1])].passes_at(t_ns)[1]

    def _source(self, name: str, t_ns: int) -> SourceSample:
        counter = self._passes[name]
        passes, beat_ns = counter.passes_at(t_ns)
        state = SourceState.OK if passes else SourceState.STARTING
        detail = ""
        if name in ("throttle", "cgroups", "pressure") or (name == "nvml" and not self.spec.gpus):
            state = SourceState.ABSENT
        elif name == "nvml" and self.nvml_process:
            state, detail = SourceState.FAILING, self.nvml_process
            beat_ns = t_ns
        return SourceSample(
            name, state, beat_ns - self.boot_ns, counter.period_ns, 0, detail, passes, name not in NOT_VITAL
        )

    # --- snapshot --------------------------------------------------------------------------------------

    def snapshot(self, t_ns: int) -> Snapshot:
        """Return the newest samples of all sources."""
        spec = self.spec
        host = [self._source(name, t_ns) for name in HOST_SOURCES]
        slow = tuple(self._source(name, t_ns) for name in SLOW_SOURCES)
        kmsg, nvml = self._source("kmsg", t_ns), self._source("nvml", t_ns)
        events = nvml._replace(name="nvml-events", period_ns=NS, beat_ns=t_ns - self.boot_ns)
        gpus = tuple(self._gpu(gpu, t_ns) for gpu in self.readings)
        nodes = range(spec.numa_nodes)
        present = (1 << spec.cpus_per_node * spec.numa_nodes) - 1
        return Snapshot(
            seq=t_ns,
            cpus=CpuSetsSample(present, self.online, 0),
            nodes=tuple(NumaCpuSample(node, self.cpus_of(node), NEVER_READ, NEVER_READ) for node in nodes),
            pools=tuple(
                HugepagePoolSample(2048, node, pages, pages, NEVER_READ, 0, NEVER_READ)
                for node, pages in self.pages.items()
                if spec.pool_pages
            ),
            sources=(*host, *slow, kmsg, nvml, events),
            core=NativeCoreStats(),
            gpus=NvmlSample(
                gpus,
                nvml,
                events,
                generation=self.generation,
                count=len(gpus),
                driver="580.95.05",
                process=self.nvml_process,
            ),
            host=GpuOsSample(
                inventory=tuple(GpuAttributes(f"GPU-{gpu:08x}", self.bus(gpu)) for gpu in self.readings),
                bus_gpus=tuple(self.bus(gpu) for gpu in self.readings),
                fabric_manager=True,
                boot_id=self.boot_id,
                bound_gpus=tuple(self.bus(gpu) for gpu in self.readings),
            ),
            log=LogSample(tuple(self._lines.values()), kmsg),
            machine=MachineSample(
                dimms=tuple(
                    DimmSample(node, dimm, label, "", *errors)
                    for node, errors in self.dimm_errors.items()
                    for dimm, label in ((None, "skx"), (0, f"CPU_SrcID#{node}_MC#0_Chan#0_DIMM#0"))
                ),
                numa=tuple(NumaMemorySample(node, 64 * GIB_KIB, 0, 512, 0) for node in nodes),
                cores=tuple(
                    PerCpuSample(cpu, cpu, cpu // spec.cpus_per_node, NEVER_READ, NEVER_READ, 0)
                    for cpu in range(spec.cpus_per_node * spec.numa_nodes)
                ),
                pressure=PressureSample(NEVER_READ, NEVER_READ, NEVER_READ),
                nodes_online=(1 << spec.numa_nodes) - 1,
                nodes_memory=(1 << spec.numa_nodes) - 1,
                corrupted_kib=0,
                surplus_failed=0,
                smt_active=0,
                sources=slow,
            ),
            pci=(),
            declared=self.declared,
            driver_faults=self.driver_faults,
        )

    def cpus_of(self, node: int) -> int:
        """Return the CPUs of a NUMA node as a bit set."""
        return ((1 << self.spec.cpus_per_node) - 1) << node * self.spec.cpus_per_node

    def _gpu(self, gpu: int, t_ns: int) -> GpuSample:
        passes, beat_ns = self._gpu_passes[gpu].passes_at(t_ns)
        call_ns, frozen = self._hanging.get(gpu, (None, None))
        readings = self.readings[gpu] if frozen is None else frozen
        status = NvmlReturnCode.UNINITIALIZED if self.nvml_process else self.status[gpu]
        if status != NvmlReturnCode.OK:
            readings = {
                field: UNREADABLE if isinstance(value, int) else value for field, value in readings.items()
            }
        migs = self.spec.migs[gpu] if self.spec.migs else 0
        return GpuSample(
            index=gpu,
            uuid=f"GPU-{gpu:08x}",
            bus=self.bus(gpu),
            name=f"NVIDIA {self.spec.model}",
            serial=str(gpu),
            status=status,
            passes=passes,
            beat_ns=beat_ns - self.boot_ns if passes else 0,
            period_ns=NS,
            call="nvmlDeviceGetFieldValues" if frozen is not None else "",
            call_ns=0 if call_ns is None else call_ns - self.boot_ns,
            handles=self._handles[gpu],
            probe_p50_ns=400_000,
            readings=dict(readings),
            links=LINKS if self.spec.model == "H100" else 0,
            link_errors=(0,) * LINKS if self.spec.model == "H100" else (),
            migs=tuple(MigSample(number + 1, 0, f"MIG-{gpu}-{number}") for number in range(migs)),
            event_mask=0 if self.nvml_process else int(GpuEvent.XID),
            xids=tuple(self._xids[gpu].values()),
        )

    # --- devices ---------------------------------------------------------------------------------------

    @cached_property
    def subjects(self) -> tuple[str, ...]:
        """Names of all devices of the machine, also of those that the driver declares."""
        spec, nodes = self.spec, range(self.spec.numa_nodes)
        return (
            *(name for gpu in range(spec.gpus) for name in self.devices_of_gpu(gpu)),
            *(name for node in nodes for name in (*self.devices_of_cpus(node), f"memory-node{node}")),
            *(f"hugepages-2mi-node{node}" for node in nodes if spec.pool_pages),
        )

    def devices_of_gpu(self, gpu: int) -> tuple[str, ...]:
        """Return the names of the devices on one GPU: itself, MIG instances, the driver's device."""
        migs = self.spec.migs[gpu] if self.spec.migs else 0
        names = [gpu_device(gpu).name, *(mig_device(gpu, number + 1, 0).name for number in range(migs))]
        return (*names, *([f"{DRIVER}/{NODE}/gpu-{gpu}"] if self.spec.declares else []))

    def devices_of_cpus(self, node: int) -> tuple[str, ...]:
        """Return the devices that consist of the CPUs of a NUMA node."""
        return (f"cpu-node{node}", *([f"{DRIVER}/{NODE}/cpus-{node}"] if self.spec.declares else []))

    def declared_device(self, target: int) -> str:
        """Return the name of the device that the driver declares under a number: GPUs first, then CPUs."""
        gpus = self.spec.gpus
        return f"gpu-{target}" if target < gpus else f"cpus-{target - gpus}"

    def _declared_devices(self) -> list[DriverDevice]:
        gpus = [
            DriverDevice(DRIVER, NODE, f"gpu-{gpu}", DeclaredGpuDevice(self.bus(gpu), "", -1, -1), 0)
            for gpu in range(self.spec.gpus)
        ]
        cpus = [
            DriverDevice(
                DRIVER, NODE, f"cpus-{node}", DeclaredCpuDevice(self.cpus_of(node), node, False, False), 0
            )
            for node in range(self.spec.numa_nodes)
        ]
        return [*gpus, *cpus]
