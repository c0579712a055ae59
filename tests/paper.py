"""Simulated node: tests set what its sources read, let time pass, and evaluate it with step()."""

from collections.abc import Iterable, Mapping
from typing import Final

from agent.engine.step import EngineState, step
from agent.health.rules import RuleResult
from agent.model.claim import DeviceRef
from agent.model.cpuset import CpuSet, parse_cpus
from agent.model.health import DeviceHealth, Finding
from agent.model.pod_findings import PodsSample
from agent.model.reading import Absence, Missing, Reading, SourceSample, SourceState
from agent.model.report import Report
from agent.model.settings import EngineSettings
from agent.model.snapshot import (
    CgroupKind,
    CgroupSample,
    CpuSetsSample,
    HugepagePoolSample,
    HugetlbSample,
    NativeCoreStats,
    NumaCpuSample,
    Snapshot,
)
from agent.model.time import NS, Instant

ABSENT: Final = Missing(Absence.ABSENT, 2)
EIO: Final = Missing(Absence.UNREADABLE, 5)
ENODEV: Final = Missing(Absence.UNREADABLE, 19)
SOURCES: Final = ("cpus", "throttle", "hugepages", "cgroups")
NO_LIMIT: Final = 2**64 - 1
MIB: Final = 1 << 20


def pods_sample(uses: Mapping[str, tuple[DeviceRef, ...]]) -> PodsSample:
    """Return the pods of a kubelet that answers; ``uses``: their prepared devices, by pod UID."""
    return PodsSample(SourceSample("pods", SourceState.OK, 0, 60 * NS, 0, "", 1, vital=False), uses)


def node_sample(
    node: int = 0, cpus: CpuSet | Missing = 0b11, core: Reading = ABSENT, package: Reading = ABSENT
) -> NumaCpuSample:
    """Return one NUMA node of a virtual machine, without thermal counters."""
    return NumaCpuSample(node, cpus, core, package)


def pool_sample(
    nr: Reading = 10, surplus: Reading = 0, *, size_kib: int = 2048, node: int | None = 0
) -> HugepagePoolSample:
    """Return one hugepage pool with all pages free."""
    return HugepagePoolSample(size_kib, node, nr, nr, ABSENT, surplus, ABSENT)


def hugetlb_sample(
    events: Reading = 0, *, size_kib: int = 2048, limit: Reading = NO_LIMIT, rsvd: Reading = NO_LIMIT
) -> HugetlbSample:
    """Return one hugepage size of a cgroup."""
    return HugetlbSample(size_kib, limit, rsvd, events, ABSENT)


def group_sample(
    ident: int, *hugetlb: HugetlbSample, pod: str = "pod-a", container: str = "container-a"
) -> CgroupSample:
    """Return one cgroup; the pod's own if ``container`` is empty."""
    kind = CgroupKind.CONTAINER if container else CgroupKind.POD
    return CgroupSample(
        id=ident,
        kind=kind,
        pod_uid=pod,
        container=container,
        populated=1,
        frozen=0,
        mem_high=0,
        mem_max=0,
        mem_oom=0,
        mem_oom_kill=0,
        mem_failcnt=0,
        cpu_periods=0,
        cpu_throttled=0,
        mem_limit=NO_LIMIT,
        cpus=ABSENT,
        hugetlb=hugetlb,
    )


def cpus_sample(online: CpuSet | Missing = 0b11) -> CpuSetsSample:
    """Return the CPU sets of a machine with two CPUs."""
    return CpuSetsSample(0b11, online, 0)


class PaperNode:
    """Node with readings in its attributes. Time passes in whole passes of all sources that are not stuck."""

    def __init__(self, settings: EngineSettings | None = None, *, period_ns: int = NS) -> None:
        self.state = EngineState(settings or EngineSettings("node-a"))
        self.period_ns = period_ns
        self.now_ns = 1_000 * NS
        self.wall_s = 1_700_000_000.0
        self.started_ns = self.now_ns
        self.passes = 0
        self.cpus = cpus_sample()
        self.nodes: dict[int, NumaCpuSample] = {0: node_sample()}
        self.pools: dict[tuple[int, int | None], HugepagePoolSample] = {}
        self.groups: list[CgroupSample] = []
        self.pods: PodsSample | None = None
        self.states: dict[str, SourceState] = {"throttle": SourceState.ABSENT}
        """States of sources that are not OK."""
        self.stuck: set[str] = set()
        """Sources that hang."""
        self._beats = dict.fromkeys(SOURCES, (0, 0))

    @property
    def now(self) -> Instant:
        return Instant(self.now_ns, self.wall_s)

    def pool(self, sample: HugepagePoolSample) -> None:
        """Set one pool."""
        self.pools[sample.size_kib, sample.numa_node] = sample

    def set_online(self, cpus: str) -> None:
        """Set the online CPUs."""
        self.cpus = cpus_sample(parse_cpus(cpus))

    def wait(self, seconds: float) -> None:
        """Let time pass without a pass of any source."""
        self.now_ns += int(seconds * NS)
        self.wall_s += seconds

    def read(self) -> None:
        """Let every source that is not stuck finish a pass, a period after the last."""
        self.wait(self.period_ns / NS)
        self.passes += 1
        for name in SOURCES:
            if name not in self.stuck:
                self._beats[name] = (self._beats[name][0] + 1, self.now_ns)

    def snapshot(self) -> Snapshot:
        """Return the snapshot of the sources."""
        sources = [
            SourceSample(
                name, self.states.get(name, SourceState.OK), beat_ns, self.period_ns, 0, "", passes=passes
            )
            for name, (passes, beat_ns) in self._beats.items()
        ]
        return Snapshot(
            seq=self.passes,
            cpus=self.cpus,
            nodes=tuple(self.nodes.values()),
            pools=tuple(self.pools.values()),
            groups=tuple(self.groups),
            pods=self.pods,
            sources=tuple(sources),
            core=NativeCoreStats(passes=self.passes),
        )

    def starting_snapshot(self) -> Snapshot:
        """Return the snapshot before the end of the first pass."""
        unread = CpuSetsSample(ABSENT, ABSENT, ABSENT)
        state = SourceState.STARTING
        sources = [SourceSample(name, state, self.started_ns, self.period_ns, 0, "") for name in SOURCES]
        return Snapshot(seq=1, cpus=unread, sources=tuple(sources))

    def evaluate(self) -> Report:
        """Evaluate the snapshot and return the report."""
        self.state, report = step(
            self.state, self.snapshot() if self.passes else self.starting_snapshot(), self.now
        )
        return report

    def next(self, passes: int = 1) -> Report:
        """Run some passes with an evaluation after each; return the last report."""
        for _ in range(passes - 1):
            self.read()
            self.evaluate()
        self.read()
        return self.evaluate()


def device_of(report: Report, name: str) -> DeviceHealth:
    """Return the verdict on one device."""
    return next(device for device in report.devices if device.device == name)


def codes(device: DeviceHealth) -> list[str]:
    """Return the codes of a device's causes, worst first."""
    return [cause.code for cause in device.causes]


def without_times(devices: Iterable[DeviceHealth]) -> list[DeviceHealth]:
    """Return the verdicts with the same time of verification."""
    return [device._replace(verified=Instant(0, 0.0)) for device in devices]


def without_since(result: RuleResult) -> RuleResult:
    """Return the result of a rule without the time at which a finding says that its fault began."""
    return result._replace(since=None) if isinstance(result, Finding) else result
