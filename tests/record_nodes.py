"""Simulated nodes whose steps are recorded, with random days."""

import random
from dataclasses import replace
from typing import Any, Final

from golden import stories
from gpu_samples import H100, gpu_sample, gpu_set, pci_sample
from nic_samples import PORT, UNCABLED, nic_sample
from paper import group_sample, node_sample
from paper_gpus import GpuNode, PaperLog

from agent.engine.step import EngineState, StepOutcome, step
from agent.health.kernel_log.facts import HOST_PATTERNS
from agent.model.claim import DeviceRef
from agent.model.declared_devices import DeclaredFile, DeclaredNicDevice, DeclaredPciDevice, DriverDevice
from agent.model.gpu import GpuField, GpuSample
from agent.model.machine_samples import NicSample, PressureSample
from agent.model.pod_findings import PodsSample
from agent.model.reading import SourceSample, SourceState
from agent.model.report import Report
from agent.model.settings import EngineSettings
from agent.model.snapshot import CgroupSample, Snapshot
from agent.model.time import NS

Step = tuple[EngineState, Snapshot, Report, StepOutcome]
"""State before a step, snapshot, report and use, as the engine loop gives them to a recorder."""

DRIVER, CPU_DRIVER = "gpu.example.com", "cpu.example.com"
XIDS: Final = (13, 31, 43, 48, 63, 74, 79, 94, 95, 119, 154)


class RecordedHost(stories.Host):
    """Host whose steps are kept."""

    def __init__(self, settings: EngineSettings | None = None) -> None:
        self.steps: list[Step] = []
        super().__init__(settings)

    def evaluate(self) -> Report:
        before, snapshot = self.state, self.snapshot() if self.passes else self.starting_snapshot()
        self.state, report = step(before, snapshot, self.now)
        use = StepOutcome.SILENT if report.starting else StepOutcome.PUBLISHED
        self.steps.append((before, snapshot, report, use))
        return report


class RecordedGpuNode(GpuNode):
    """Node with GPUs whose steps are kept."""

    def __init__(self, gpus: int = 2, **limits: Any) -> None:
        self.steps: list[Step] = []
        self.pods: PodsSample | None = None
        super().__init__(gpus, **limits)

    def snapshot(self) -> Snapshot:
        return replace(super().snapshot(), pods=self.pods)

    def evaluate(self) -> Report:
        before, snapshot = self.state, self.snapshot() if self.passes else self.starting_snapshot()
        self.state, report = step(before, snapshot, self.now, is_full=len(self.steps) % 3 != 1)
        use = StepOutcome.SILENT if report.starting else StepOutcome.PUBLISHED
        self.steps.append((before, snapshot, report, use))
        return report


def host_day(seed: int, events: int = 25) -> list[Step]:
    """Return the steps of a host with random events."""
    draw = random.Random(seed)
    node = RecordedHost()
    node.evaluate()
    for _ in range(events):
        stories._apply_random_event(draw, node)
        node.next(draw.randrange(1, 5))
    return node.steps


def gpu_day(seed: int, events: int = 25, **limits: Any) -> list[Step]:
    """Return the steps of a node with random events of its GPUs."""
    draw = random.Random(seed)
    node = RecordedGpuNode(3, **limits)
    for _ in range(events):
        gpu = draw.randrange(3)
        match draw.randrange(8):
            case 0:
                node.xid(gpu, draw.choice(XIDS))
            case 1:
                node.set_readings(gpu, temp=draw.choice((40, 85, 95)))
            case 2:
                node.set_readings(
                    gpu, ecc_correctable=draw.choice((0, 500, 5000)), pcie_width=draw.choice((8, 16))
                )
            case 3:
                node.lose(gpu)
            case 4:
                node.recover(gpu)
            case 5:
                node.hang(gpu)
            case 6:
                node.return_from_hang(gpu)
            case _:
                node.set_readings(gpu, **{field.value: H100[field] for field in H100})
        node.rest(draw.choice((3, 30, 120)))
    return node.steps


class MixedNode(stories.Host):
    """Host with GPUs, NICs and pods, whose readings move at each heartbeat, and whose steps are kept."""

    def __init__(self, draw: random.Random, gpus: int, *, with_cgroups: bool) -> None:
        """Create the node; ``with_cgroups``: a pod uses a device whose verdict cgroups change."""
        drivers = (DRIVER, CPU_DRIVER) if with_cgroups else (DRIVER,)
        super().__init__(EngineSettings("node-a", drivers=drivers))
        self.steps: list[Step] = []
        self.draw = draw
        self.gpus = [gpu_sample(number=number, beat_ns=self.now_ns) for number in range(gpus)]
        self.frozen: set[int] = set()
        """Numbers of GPUs that are not read."""
        self.kmsg = PaperLog()
        self.nics = [nic_sample(), nic_sample(PORT._replace(**draw.choice(({}, UNCABLED))), name="mlx5_1")]
        self.nic_source = SourceSample("nic", SourceState.OK, 0, 30 * NS, 0, "", 0, vital=False)
        self.nics_read: tuple[NicSample, ...] = ()
        self.nodes[0] = node_sample(0, 0b11, 5, 2)
        self.states.pop("throttle")
        self.functions = (pci_sample(0), pci_sample(1), pci_sample(5, "mlx5_core"))
        self.groups = [group_sample(7), group_sample(8, container=""), group_sample(9)]
        used = [DeviceRef(DRIVER, "node-a", "gpu-0")]
        if with_cgroups:
            used.append(DeviceRef(CPU_DRIVER, "node-a", draw.choice(("memory-node0", "hugepages-2mi-node0"))))
        self.uses = {self.groups[0].pod_uid: tuple(used)}

    def snapshot(self) -> Snapshot:
        read = super().snapshot()
        minute_ns = self.now_ns // (60 * NS) * 60 * NS
        pods = SourceSample("pods", SourceState.OK, minute_ns, 60 * NS, 0, "", self.passes // 60, vital=False)
        gpus = gpu_set(*self.gpus)
        late_ns = self.draw.randrange(NS)
        nvml, events = (
            source._replace(beat_ns=self.now_ns - late_ns, passes=self.passes, period_ns=10 * NS)
            for source in (gpus.nvml, gpus.events)
        )
        if self.now_ns - self.nic_source.beat_ns >= self.nic_source.period_ns:
            self.nics_read = tuple(self.nics)
            self.nic_source = self.nic_source._replace(
                beat_ns=self.now_ns - late_ns, passes=self.nic_source.passes + 1
            )
        assert read.log is not None
        lines = (line._replace(pattern=line.pattern + len(HOST_PATTERNS)) for line in self.kmsg.lines())
        return replace(
            read,
            gpus=replace(gpus, nvml=nvml, events=events),
            nics=self.nics_read,
            pods=PodsSample(pods, self.uses, dict.fromkeys(self.uses, "team/train")),
            log=replace(read.log, lines=(*read.log.lines, *lines)),
            sources=(*read.sources, nvml, events, pods, self.nic_source),
        )

    def heartbeat(self, pause_s: float) -> None:
        """Let time pass, move readings within their limits, and evaluate."""
        draw = self.draw
        for _ in range(int(pause_s)):
            self.read()
        self.wait(pause_s % 1)
        self.pressure = PressureSample(*(total + draw.randrange(1000) for total in self.pressure))
        self.groups = [
            self._advance_counters(group) if draw.random() < 0.5 else group for group in self.groups
        ]
        self.gpus = [
            gpu
            if number in self.frozen or draw.random() < 0.03
            else self._advance_readings(gpu, max(1, int(pause_s)))
            for number, gpu in enumerate(self.gpus)
        ]
        before, snapshot = self.state, self.snapshot()
        state, report = step(before, snapshot, self.now, is_full=draw.random() < 0.9)
        uses = (StepOutcome.PUBLISHED, StepOutcome.SILENT, StepOutcome.DISCARDED)
        use = StepOutcome.SILENT if report.starting else draw.choices(uses, (90, 9, 1))[0]
        self.steps.append((before, snapshot, report, use))
        if use is not StepOutcome.DISCARDED:
            self.state = state

    def _advance_counters(self, group: CgroupSample) -> CgroupSample:
        assert isinstance(group.cpu_periods, int)
        assert isinstance(group.cpu_throttled, int)
        return group._replace(
            cpu_periods=group.cpu_periods + self.draw.randrange(100),
            cpu_throttled=group.cpu_throttled + (50 if self.draw.random() < 0.02 else 0),
        )

    def _advance_readings(self, gpu: GpuSample, passes: int) -> GpuSample:
        draw, readings = self.draw, dict(gpu.readings)
        temp = readings[GpuField.TEMP]
        if isinstance(temp, int) and temp < 85:
            readings[GpuField.TEMP] = min(80, max(40, temp + draw.choice((-1, 0, 1))))
        if draw.random() < 0.5:
            readings[GpuField.UTILIZATION] = draw.choice((0, 97, 98, 100))
        if draw.random() < 0.3:
            readings[GpuField.CLOCK_REASONS] = draw.choice((0, 4))
        return replace(
            gpu,
            readings=readings,
            passes=gpu.passes + passes,
            beat_ns=self.now_ns - draw.randrange(NS // 10),
            slow_passes=gpu.passes // 10,
            probe_p50_ns=draw.choice((gpu.probe_p50_ns, draw.randrange(300_000, 500_000))),
        )

    def recover(self) -> None:
        """Let all GPUs answer with healthy readings; counters stay."""
        for number, gpu in enumerate(self.gpus):
            kept = {field: gpu.readings[field] for field in (GpuField.ECC_CORRECTABLE, GpuField.PCIE_REPLAY)}
            healthy = replace(gpu, status=0, call="", call_ns=0, probe_p50_ns=400_000)
            self.gpus[number] = replace(healthy, readings={**H100, **kept})
        self.frozen.clear()

    def happen(self) -> None:
        """Let something happen to a GPU, a NIC, the host or its log."""
        draw = self.draw
        number = draw.randrange(len(self.gpus))
        gpu = self.gpus[number]
        changed: dict[GpuField, Any] = {}
        match draw.randrange(13):
            case 0:
                changed[GpuField.TEMP] = draw.choice((85, 95))
            case 1:
                changed[GpuField.PCIE_WIDTH] = draw.choice((8, 16))
            case 2:
                field = draw.choice((GpuField.ECC_CORRECTABLE, GpuField.PCIE_REPLAY))
                reading = gpu.readings[field]
                assert isinstance(reading, int)
                changed[field] = reading + draw.choice((1, 20, 5000))
            case 3:
                changed = {GpuField.UTILIZATION: 99, GpuField.PCIE_GEN: draw.choice((1, 5))}
            case 4:
                changed[GpuField.CLOCK_REASONS] = draw.choice((8, 0x40))
            case 5:
                self.frozen ^= {number}
            case 6:
                self.gpus[number] = replace(gpu, status=draw.choice((0, 15)))
            case 7:
                self.gpus[number] = replace(gpu, call="nvmlDeviceGetFieldValues", call_ns=self.now_ns)
            case 8:
                self.gpus[number] = replace(gpu, probe_p50_ns=100_000_000)
            case 9:
                name, bus = draw.choice(XIDS), gpu.bus.removesuffix(".0")
                self.kmsg.write(f"NVRM: Xid (PCI:{bus}): {name}, pid=7, name=a, failed", self.now_ns)
            case 10:
                line = draw.choice(stories.load(stories.INPUTS / "kernel-log.json"))
                self.log(line.replace("0000:3b:00.0", self.functions[-1].address), draw.choice((1, 200)))
            case 11:
                port = self.nics[0].ports[0]
                counted = port._replace(link_downs=port.link_downs + draw.choice((1, 30)))
                self.nics[0] = self.nics[0]._replace(ports=(counted,))
                self.dimms[1] = self.dimms[1]._replace(correctable=draw.choice((1, 30, 60)))
            case _:
                *others, last = self.functions
                self.functions = (*others, last._replace(aer_correctable=draw.choice((1, 100, 200))))
                self.nodes[0] = node_sample(0, 0b11, draw.choice((6, 40, 80)), 2)
        if changed:
            self.gpus[number] = replace(self.gpus[number], readings={**gpu.readings, **changed})


def mixed_day(seed: int, events: int = 12) -> list[Step]:
    """Return the steps of a node on which something happens after up to 40 heartbeats."""
    draw = random.Random(seed)
    node = MixedNode(draw, draw.choice((2, 5)), with_cgroups=seed % 3 == 0)
    node.read()
    for _ in range(events):
        for _ in range(draw.randrange(2, 40)):
            node.heartbeat(draw.choice((10.0, 10.0, 9.7, draw.uniform(0.5, 10.0))))
        match draw.randrange(10):
            case 0:
                node.wait(draw.choice((30.0, 90.0, 700.0)))
            case 1:
                parts = {"nic-0": DeclaredNicDevice("", "mlx5_0"), "nic-1": DeclaredNicDevice("", "mlx5_1")}
                parts["pci-0"] = DeclaredPciDevice(node.functions[-1].address, "mlx5_core")
                devices = tuple(DriverDevice(DRIVER, "node-a", name, part, 0) for name, part in parts.items())
                node.files = draw.choice(((), (DeclaredFile(DRIVER, devices),)))
            case 2 | 3 | 4 | 5:
                node.recover()
            case _:
                node.happen()
    for _ in range(12):
        node.heartbeat(10.0)
    return node.steps
