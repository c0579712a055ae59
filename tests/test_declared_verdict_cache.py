"""Cached verdicts on declared devices equal those of a full evaluation, whatever changes."""

from dataclasses import replace
from typing import Any, Final

from gpu_samples import pci_sample
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from log_lines import CASES
from nic_samples import NIC as HCA
from nic_samples import PORT, nic_sample
from paper import ABSENT, EIO, node_sample, pool_sample
from test_engine_step_host import BUS_SOURCES, MACHINE_SOURCES, HostNode

from agent.engine.step import step
from agent.health.declared.state import VerdictCache
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.cpuset import parse_cpus
from agent.model.declared_devices import (
    DeclaredCpuDevice,
    DeclaredFile,
    DeclaredHugepageDevice,
    DeclaredMemoryDevice,
    DeclaredNicDevice,
    DeclaredOtherDevice,
    DeclaredPart,
    DeclaredPciDevice,
    DriverCheckSample,
    DriverDevice,
)
from agent.model.health import Finding, Health, Severity
from agent.model.machine_samples import DimmSample, NumaMemorySample, PerCpuSample
from agent.model.prepare import DriverFault
from agent.model.reading import Missing, Reading, SourceSample, SourceState
from agent.model.report import Report
from agent.model.snapshot import CpuSetsSample, CpuThrottleSample, Snapshot
from agent.model.time import NS

DRIVER: Final = "a.example.com"
CPUS: Final = range(6)
"""0 shares its core with 3, 1 with 4, 2 with 5."""
ALL: Final = parse_cpus("0-5")
NICS: Final = tuple(pci_sample(number, "mlx5_core") for number in range(2))
HCA_PORTS: Final = (
    PORT,
    PORT._replace(state=1, phys_state=2),
    PORT._replace(rate_mbps=100_000),
    PORT._replace(link_downs=5),
    PORT._replace(symbol_errors=EIO),
)
PARTS: Final[dict[str, DeclaredPart]] = {
    "core-0": DeclaredCpuDevice(parse_cpus("0,3"), 0, exclusive=True, isolated=False),
    "core-1": DeclaredCpuDevice(parse_cpus("1,4"), None, exclusive=True, isolated=True),
    "core-2": DeclaredCpuDevice(parse_cpus("2,5"), None, exclusive=True, isolated=False),
    "cores-1-2": DeclaredCpuDevice(parse_cpus("1-2,4-5"), None, exclusive=True, isolated=False),
    "half-core": DeclaredCpuDevice(parse_cpus("0"), None, exclusive=True, isolated=False),
    "no-cpus": DeclaredCpuDevice(0, None, exclusive=False, isolated=False),
    "memory-0": DeclaredMemoryDevice(1 << 30, 0),
    "memory-1": DeclaredMemoryDevice(0, 1),
    "pages-0": DeclaredHugepageDevice(2048, 4, 0),
    "pages-1": DeclaredHugepageDevice(2048, 6, 0),
    **{f"nic-{at}": DeclaredPciDevice(nic.address, "") for at, nic in enumerate(NICS)},
    "hca-0": DeclaredNicDevice("", "mlx5_0"),
    "hca-1": DeclaredNicDevice(HCA, ""),
    "other": DeclaredOtherDevice(),
}
NEVER_CACHED: Final = {"other"}
"""Device without rules, whose verdict is never cached."""
BUS_NS: Final = 60 * NS
BUS_LINES: Final = [
    f"mlx5_core {nic.address}: PCIe Bus Error: severity={severity}, type=Transaction Layer, (Receiver ID)"
    for nic in NICS
    for severity in ("Uncorrectable (Fatal)", "Uncorrectable (Non-Fatal)")
]


class FullNode(HostNode):
    """Node with declared devices, checks and driver faults, evaluated both with and
    without cached results."""

    def __init__(self) -> None:
        super().__init__()
        self.cpus = CpuSetsSample(ALL, ALL, parse_cpus("1,4"))
        self.nodes = {0: node_sample(0, ALL)}
        self.throttle: dict[int, Reading] = {}
        self.checks: dict[str, DriverCheckSample] = {}
        self.faults: tuple[DriverFault, ...] = ()
        self.leases: dict[str, int] = {}
        self.parts = dict(PARTS)
        self.functions = NICS
        cores = tuple(PerCpuSample(cpu, cpu % 3, 0, 3_000_000, 3_000_000, 0) for cpu in CPUS)
        self.change(
            cores=cores,
            numa=(NumaMemorySample(0, 1 << 24, 0, 128, 0), NumaMemorySample(1, 1 << 24, 0, 128, 0)),
        )
        self.change(nodes_online=0b11, nodes_memory=0b11, dimms=())
        self.bus_read = (1, self.now_ns)
        self.declare_all()

    def declare_all(self) -> None:
        devices = [
            DriverDevice(DRIVER, "node-a", name, what, self.leases.get(name, 0))
            for name, what in self.parts.items()
        ]
        self.files = (DeclaredFile(DRIVER, tuple(devices)),)

    def snapshot(self) -> Snapshot:
        throttle = tuple(CpuThrottleSample(cpu, count, 0) for cpu, count in self.throttle.items())
        return replace(
            super().snapshot(),
            throttle=throttle,
            checks=tuple(self.checks.values()),
            driver_faults=self.faults,
        )

    def source(self, name: str) -> SourceSample:
        if name not in BUS_SOURCES:
            return super().source(name)
        if self.now_ns - self.bus_read[1] >= BUS_NS and name not in self.stuck:
            self.read_bus()
        passes, beat_ns = self.bus_read
        state = self.states.get(name, SourceState.OK)
        return SourceSample(name, state, beat_ns, BUS_NS, 0, "", passes=passes, vital=False)

    def read_bus(self) -> None:
        self.bus_read = (self.bus_read[0] + 1, self.now_ns)

    def evaluate(self) -> Report:
        snapshot = self.snapshot()
        uncached = replace(self.state, verdict_cache=VerdictCache(), ok_cache={})
        self.state, report = step(self.state, snapshot, self.now)
        assert step(uncached, snapshot, self.now) == (self.state, report)
        return report

    def reevaluated_devices(self) -> set[str]:
        """Evaluate the node, and return the devices whose verdict did not come from the cache."""
        before = self.state.verdict_cache.devices
        self.next()
        verdict_cache = self.state.verdict_cache.devices
        again = {subject for subject in before if verdict_cache.get(subject) is not before[subject]}
        return {subject.split("/")[-1] for subject in again}


def node_with_cache() -> FullNode:
    node = FullNode()
    node.next(4)
    return node


def cached_names(node: FullNode) -> set[str]:
    return {subject.split("/")[-1] for subject in node.state.verdict_cache.devices}


# --- devices that are evaluated again -----------------------------------------------------------------------


def test_unchanged_evaluation_reuses_declared_verdicts() -> None:
    node = node_with_cache()
    assert cached_names(node) == {*PARTS} - NEVER_CACHED
    before = {device.key: device for device in node.state.devices.values()}
    assert node.reevaluated_devices() == set()
    for device in node.state.devices.values():
        assert (
            device.verified > before[device.key].verified or device.kind in BUS_SOURCES
        )  # read once a minute


def test_unchanged_evaluation_reuses_host_results() -> None:
    node = node_with_cache()
    before = node.state.ok_cache
    devices = before.keys() - {"node"}  # whose pressure is read in every pass
    assert devices == {device.device for device in node.state.devices.values() if not device.driver}
    node.next()
    assert all(node.state.ok_cache[device] is before[device] for device in devices)


def test_change_during_pause_is_evaluated_afterwards() -> None:
    node = node_with_cache()
    node.wait(30)  # every source is stalled
    node.cpus = node.cpus._replace(online=0)
    node.evaluate()
    assert "cpu-node0" not in node.state.ok_cache
    node.next(4)
    assert ("cpu-node0", "cpu.offline") in node.state.conditions


def test_offline_cpu_invalidates_devices_on_its_core() -> None:
    node = node_with_cache()
    node.cpus = node.cpus._replace(online=ALL & ~0b10)
    assert node.reevaluated_devices() == {"core-1", "cores-1-2", "no-cpus"}


def test_changed_declaration_invalidates_only_its_device() -> None:
    node = node_with_cache()
    first, *others = node.files[0].devices
    node.files = (DeclaredFile(DRIVER, (first._replace(lease_s=90), *others)),)
    assert node.reevaluated_devices() == {first.name}


def test_removed_throttle_counters_invalidate_their_devices() -> None:
    node = node_with_cache()
    node.throttle = dict.fromkeys(CPUS, 0)
    node.next(2)
    node.throttle = {}
    assert node.reevaluated_devices() >= {"core-0", "core-1", "core-2"}


def test_removed_machine_check_counts_invalidate_all_cpus() -> None:
    node = node_with_cache()
    only = [core_counting(cpu, ABSENT if cpu else 0) for cpu in CPUS]
    node.change(cores=tuple(only))
    node.next(2)
    node.change(cores=(core_counting(0, EIO), *only[1:]))
    assert node.reevaluated_devices() >= {"core-0", "core-1", "core-2"}


def core_counting(cpu: int, checks: Reading) -> PerCpuSample:
    return PerCpuSample(cpu, cpu % 3, 0, 3_000_000, 3_000_000, checks)


def test_removed_source_invalidates_all_devices() -> None:
    node = node_with_cache()
    names = cached_names(node)
    node.machine = None
    assert node.reevaluated_devices() == names


def test_restarted_source_invalidates_its_devices() -> None:
    node = node_with_cache()
    node._beats["cpus"] = (0, node.now_ns)
    assert node.reevaluated_devices() >= {"core-0", "half-core"}


def test_cache_holds_only_declared_devices() -> None:
    node = node_with_cache()
    node.files = (DeclaredFile(DRIVER, node.files[0].devices[:2]),)
    node.next(3)
    assert cached_names(node) == {"core-0", "core-1"}


# --- random sequences of changes ----------------------------------------------------------------------------

sets: Final = st.one_of(st.integers(0, ALL), st.sampled_from([ALL, ALL & ~1, EIO, ABSENT]))
counts: Final = st.sampled_from([0, 1, 3, 11, ABSENT, EIO])
stalls: Final = st.sampled_from([0, 1_000_000, 30_000_000, ABSENT, EIO])
names: Final = st.sampled_from([*PARTS])
cpu: Final = st.sampled_from(CPUS)
SOURCES: Final = ("cpus", "throttle", "hugepages", *MACHINE_SOURCES, *BUS_SOURCES, "kmsg")
ONLINE: Final = [ALL, ALL, ALL & ~1, ALL & ~0b10]
LINES: Final = [
    text
    for text, line in CASES
    if line.code.startswith(("machine-check", "hard", "memory")) or "pci" in line.code
] + [f"watchdog: BUG: soft lockup - CPU#{cpu} stuck for 26s! [x:1]" for cpu in CPUS]
CHANGES: Final = {
    "cpus": st.one_of(
        st.tuples(st.just("cpus"), st.sampled_from(["present", "online", "isolated"]), sets),
        st.tuples(st.just("cpus"), st.just("online"), st.sampled_from(ONLINE)),
        st.tuples(st.just("nodes"), st.integers(0, 2), sets),
        st.tuples(st.just("core"), cpu, st.sampled_from(["core", "cap_khz", "machine_checks"]), counts),
        st.tuples(st.just("cores"), cpu),
        st.tuples(st.just("throttle"), cpu, counts),
        st.just(("no throttle",)),
        st.tuples(st.just("one counts"), st.sampled_from([0, EIO])),
        st.tuples(st.just("smt"), counts),
    ),
    "memory": st.one_of(
        st.tuples(st.just("numa"), st.integers(0, 1), st.sampled_from(["total_kib", "poisoned"]), counts),
        st.tuples(st.just("machine"), st.sampled_from(["nodes_online", "nodes_memory"]), counts),
        st.tuples(st.just("machine"), st.just("corrupted_kib"), counts),
        st.tuples(st.just("state"), st.sampled_from(["memory", "edac"]), st.sampled_from([*SourceState][:4])),
    ),
    "pages": st.one_of(
        st.tuples(st.just("pool"), counts, counts),
        st.tuples(st.just("pool"), st.sampled_from([10, 12]), st.just(0)),
        st.tuples(
            st.just("declared"),
            st.sampled_from(["pages-0", "other"]),
            st.sampled_from([None, "pages-0", "pages-1", "other"]),
            st.just(0),
        ),
    ),
    "bus": st.one_of(
        st.tuples(st.just("bus"), st.one_of(st.none(), st.just(EIO), st.sets(st.sampled_from(range(2))))),
        st.tuples(st.just("line"), st.sampled_from(BUS_LINES), st.just(1)),
        st.tuples(
            st.just("nics"), st.sampled_from([None, EIO, (), *((nic_sample(port),) for port in HCA_PORTS)])
        ),
    ),
    "log": st.one_of(
        st.tuples(st.just("line"), st.sampled_from(LINES), st.sampled_from([1, 30])),
        st.tuples(st.just("log"), st.booleans()),
        st.tuples(st.just("state"), st.just("kmsg"), st.sampled_from([*SourceState][:4])),
    ),
    "node": st.one_of(
        st.tuples(st.just("line"), st.sampled_from([text for text, _ in CASES]), st.sampled_from([1, 3, 30])),
        st.tuples(st.just("stalls"), st.sampled_from(["cpu_some", "memory_full", "io_full"]), stalls),
        st.tuples(st.just("dimm"), st.sampled_from(["correctable", "uncorrectable"]), counts),
        st.tuples(st.just("wait"), st.sampled_from([59, 61, 299, 601, 3599, 3601, 86_500])),
    ),
    "drivers": st.one_of(
        st.tuples(st.just("declared"), names, st.one_of(st.none(), names), st.sampled_from([0, 0, 45, 600])),
        st.just(("read again",)),
        st.tuples(st.just("check"), names, st.booleans(), st.integers(0, 2)),
        st.tuples(st.just("unchecked"), names),
        st.tuples(st.just("driver_faults"), names, st.booleans()),
    ),
    "sources": st.one_of(
        st.tuples(st.just("state"), st.sampled_from(SOURCES), st.sampled_from([*SourceState][:4])),
        st.tuples(st.just("stuck"), st.sets(st.sampled_from(SOURCES), max_size=2)),
    ),
}
moves: Final = st.one_of(
    st.just(("pass",)),
    st.just(("pass",)),
    st.just(("look",)),
    st.tuples(st.just("wait"), st.sampled_from([0.01, 1, 30, 700, 90_000])),
)


def apply_event(node: FullNode, what: str, how: Any) -> None:
    match what:
        case "cpus":
            node.cpus = node.cpus._replace(**{how[0]: how[1]})
        case "nodes":
            node.nodes[how[0]] = node_sample(how[0], how[1])
        case "no throttle":
            node.throttle = {}
        case "core" | "one counts" | "cores" | "numa" | "smt" | "stalls" | "dimm" | "machine":
            change_machine(node, what, how)
        case "throttle":
            node.throttle[how[0]] = how[1]
        case "pool":
            node.pool(pool_sample(how[0], how[1]))
        case "bus":
            seen: set[int] | Missing | None = how[0]
            node.functions = tuple(NICS[at] for at in sorted(seen)) if isinstance(seen, set) else seen
            node.read_bus()
        case "nics":
            node.nics = how[0]
            node.read_bus()
        case "line":
            node.write(*how)
        case "log":
            node.reads_log = how[0]
        case "declared" | "read again":
            declare(node, *how)
        case "check":
            beats = DriverCheckSample("own", "", FOUND if how[1] else None, "", how[2], node.now_ns, NS, 1, 1)
            node.checks[how[0]] = beats._replace(subject=f"{DRIVER}/node-a/{how[0]}")
        case "unchecked":
            node.checks.pop(how[0], None)
        case "driver_faults":
            excused_wall_s = node.wall_s if how[1] else 0.0
            device = DeviceRef(DRIVER, "node-a", how[0])
            node.faults = (DriverFault(1, device, "x.y", "down", "", 5.0, CLAIM, excused_wall_s),)
        case "state":
            node.states[how[0]] = how[1]
        case "stuck":
            node.stuck = how[0]
        case "pass":
            node.read()
        case "wait":
            node.wait(how[0])


FOUND: Final = Finding("own.bad", Severity.UNHEALTHY, "as its driver says")
CLAIM: Final = ClaimRef("team", "claim", "uid-1")


def change_machine(node: FullNode, what: str, how: Any) -> None:
    machine = node.machine
    assert machine is not None, "the machine was read"
    match what:
        case "core":
            number, member, reading = how
            node.change(
                cores=tuple(
                    core._replace(**{member: reading}) if core.cpu == number else core
                    for core in machine.cores
                )
            )
        case "one counts":
            node.change(
                cores=tuple(
                    core._replace(machine_checks=ABSENT if at else how[0])
                    for at, core in enumerate(machine.cores)
                )
            )
        case "cores":
            there = tuple(core for core in machine.cores if core.cpu != how[0])
            back = PerCpuSample(how[0], how[0] % 3, 0, 3_000_000, 2_000_000, 0)
            node.change(cores=there if len(there) < len(machine.cores) else tuple(sorted([*there, back])))
        case "numa":
            number, member, reading = how
            node.change(
                numa=tuple(
                    numa._replace(**{member: reading}) if numa.numa_node == number else numa
                    for numa in machine.numa
                )
            )
        case "smt":
            node.change(smt_active=how[0])
        case "stalls":
            node.change(pressure=machine.pressure._replace(**{how[0]: how[1]}))
        case "dimm":
            module = DimmSample(0, 0, "DIMM_A1", "", 0, 0)
            node.change(dimms=(module._replace(**{how[0]: how[1]}),))
        case _:
            node.change(**{how[0]: how[1]})


def declare(node: FullNode, name: str = "", other: str | None = None, lease_s: int = 0) -> None:
    """Declare a device like ``other``; None: remove it. Without a name, all are read again as they were."""
    if name and other is None:
        node.parts.pop(name, None)
    elif name and other is not None:
        node.parts[name] = PARTS[other]
        node.leases[name] = lease_s
    node.declare_all()


def stories(theme: str) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.one_of(CHANGES[theme], moves), max_size=20)


@given(st.one_of(*map(stories, CHANGES), st.lists(st.one_of(*CHANGES.values(), moves, moves), max_size=30)))
@hypothesis_settings(max_examples=2 * hypothesis_settings.default.max_examples)
def test_cached_verdicts_equal_full_evaluation(story: list[Any]) -> None:
    node = node_with_cache()
    for what, *how in story:
        apply_event(node, what, how)
        node.evaluate()
        node.next()


def test_reverified_verdict_differs_only_in_time() -> None:
    node = node_with_cache()
    for device in node.state.devices.values():
        again = device.with_verification(node.now, 99)
        assert again == device._replace(verified=node.now, timeout_s=99)
        assert again.health is Health(device.health)
