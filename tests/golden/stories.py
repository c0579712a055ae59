"""Lives of nodes: what the core reports after each step, over faults, recoveries and restarts.

Readings come from the nodes on paper of the other tests. What happens to them is written here, or drawn from
a random generator with a fixed seed.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from gpu_samples import H100, T4, pci_sample
from paper import ABSENT, EIO, NO_LIMIT, PaperNode, group_sample, hugetlb_sample, node_sample, pool_sample
from paper_gpus import FIRST_BOOT, OLD_DRIVER, SECOND_BOOT, GpuNode

from agent.cli.output.json import report_document
from agent.devices.taints import TaintPolicy, TaintState, decide_taints, restore_taints
from agent.engine.step import initial_state
from agent.health.gpu.faults import checkpoint
from agent.health.gpu.xid.sxid_table import SXIDS
from agent.health.kernel_log.facts import HOST_PATTERNS, compile_pattern
from agent.model.claim import Claim, ClaimConfig, ClaimDevice, ClaimRef, DeviceRef
from agent.model.declared_devices import Declarations, DeclaredFile, DriverCheckSample
from agent.model.gpu import GpuAttributes, GpuEvent, GpuField, GpuOsSample, StuckProcess
from agent.model.health import DeviceHealth, Finding, Health, Severity
from agent.model.machine_samples import (
    DimmSample,
    LogLine,
    LogSample,
    MachineSample,
    NumaMemorySample,
    PciSample,
    PerCpuSample,
    PressureSample,
)
from agent.model.pod_findings import PodFinding, PodsSample, Resource
from agent.model.prepare import DriverFault
from agent.model.reading import SourceSample, SourceState
from agent.model.report import Report
from agent.model.settings import EngineSettings
from agent.model.snapshot import Snapshot
from agent.model.time import NS
from agent.prepare import prepare_ledger as ledgers
from agent.sources.declaration_file import parse_declaration
from agent.store import driver_files, gpu_fault_file
from golden import values
from golden.files import DOCUMENTS, INPUTS, RELEASE, load
from golden.release import DECLARATION

Steps = Iterator[tuple[str, Any]]
"""Name of a step, and the report or file after it."""
DRIVER: Final = values.DRIVER
MACHINE: Final = ("edac", "memory", "cores", "pressure")
GIB_KIB: Final = 1 << 20


def brief_report(report: Report) -> dict[str, Any]:
    """Return what a report concludes, without its texts."""
    document = report_document(report)
    return {
        "devices": [
            [
                device["driver"],
                device["name"],
                device["health"],
                device["since"],
                device["timeoutSeconds"],
                _causes(device["causes"]),
            ]
            for device in document["devices"]
        ],
        "notes": [[note["subject"], note["devices"], *_causes([note])] for note in document["notes"]],
        "notApplicable": [[rule["device"], rule["code"]] for rule in document["notApplicable"]],
        "notEvaluated": [[rule["device"], rule["code"]] for rule in document["notEvaluated"]],
        "sources": [[source["name"], source["state"], source["failures"]] for source in document["sources"]],
        "starting": report.starting,
    }


def _causes(causes: list[dict[str, Any]]) -> list[list[str]]:
    return [[cause["code"], cause["severity"], cause["blame"], cause["since"]] for cause in causes]


# --- the host ----------------------------------------------------------------------------------------------


class Host(PaperNode):
    """A node of which everything is read; what is read is in the attributes."""

    def __init__(self, settings: EngineSettings | None = None) -> None:
        super().__init__(settings)
        self.dimms = [
            DimmSample(0, None, "skx", "", 0, 0),
            DimmSample(0, 1, "DIMM A1", "channel 0 slot 1", 0, 0),
        ]
        self.numa = [NumaMemorySample(0, 16 * GIB_KIB, 0, 128, 0)]
        self.cores = [PerCpuSample(cpu, cpu, 0, 3_000_000, 3_000_000, 0) for cpu in (0, 1)]
        self.pressure = PressureSample(0, 0, 0)
        self.numbers: list[Any] = [0b1, 0b1, 0, 0, 0]
        """Nodes online, nodes with memory, corrupted memory, surplus pages refused, threads of a core."""
        self.functions: Any = (pci_sample(0, "mlx5_core"),)
        self.lines: tuple[LogLine, ...] = ()
        self.files: Declarations = ()
        self.faults: tuple[DriverFault, ...] = ()
        self.checks: tuple[DriverCheckSample, ...] = ()
        self.pods: PodsSample | None = None
        self.slow: dict[str, tuple[int, int]] = {}
        self.pool(pool_sample(10))

    def log(self, text: str, times: int = 1) -> None:
        """Add lines of the kernel log that the reader has counted."""
        number = next(i for i, pattern in enumerate(HOST_PATTERNS) if compile_pattern(pattern).match(text))
        us = self.now_ns // 1000
        self.lines = (*self.lines, LogLine(number, times, us, us, text, text, len(self.lines)))

    def source(self, name: str) -> SourceSample:
        """Return the sample of a source that the C core's slow threads read."""
        if name not in self.stuck:
            self.slow[name] = (self.passes, self.now_ns)
        passes, beat_ns = self.slow.get(name, (0, self.started_ns))
        state = self.states.get(name, SourceState("ok"))
        return SourceSample(name, state, beat_ns, NS, 0, "", passes, False)

    def snapshot(self) -> Snapshot:
        """Return the snapshot that the sources have published."""
        read = super().snapshot()
        more = {name: self.source(name) for name in (*MACHINE, "pci", "kmsg")}
        slow = tuple(more[name] for name in MACHINE)
        machine = MachineSample(
            tuple(self.dimms), tuple(self.numa), tuple(self.cores), self.pressure, *self.numbers, slow
        )
        return replace(
            read,
            sources=(*read.sources, *more.values()),
            machine=machine,
            log=LogSample(self.lines, more["kmsg"]),
            pci=self.functions,
            declared=self.files,
            checks=self.checks,
            driver_faults=self.faults,
            pods=self.pods,
        )


def host() -> Steps:
    """Yield reports with faults of the host's own devices, of pods and of the node, and with their ends."""
    node = Host()
    yield "starting", report_document(node.evaluate())
    yield "healthy", report_document(node.next(3))
    node.pool(pool_sample(7, 1))
    yield "pool shrunk", report_document(node.next())
    node.pool(pool_sample(10))
    yield "pool back", report_document(node.next(2))
    yield "pool healthy", report_document(node.next(3))
    node.set_online("0")
    node.cores[0] = PerCpuSample(0, 0, 0, 3_000_000, 800_000, 3)
    yield "CPU offline and capped", report_document(node.next(4))
    node.nodes[0] = node_sample(0, 0b11, 25, 12)
    node.states["throttle"] = SourceState("ok")
    yield "throttled", report_document(node.next(2))
    node.set_online("0-1")
    node.dimms[1] = DimmSample(0, 1, "DIMM A1", "channel 0 slot 1", 40, 2)
    node.numa[0] = NumaMemorySample(0, 15 * GIB_KIB, 64, 128, 2)
    node.numbers[2:4] = [64, 5]
    yield "memory errors", report_document(node.next(3))
    node.pool(pool_sample(EIO))
    yield "pool unreadable", report_document(node.next(2))
    node.pool(pool_sample(10))
    node.groups = [
        group_sample(7, hugetlb_sample(3), pod=values.POD)._replace(
            mem_oom_kill=2, cpu_periods=100, cpu_throttled=90
        ),
        group_sample(8, pod=values.POD, container="")._replace(mem_max=4, mem_limit=1 << 30, frozen=1),
        group_sample(9, hugetlb_sample(limit=4 << 20), pod="pod-b", container="c2")._replace(
            mem_oom=1, cpus=0b10
        ),
    ]
    yield "pods seen", report_document(node.next(2))
    node.groups[0] = node.groups[0]._replace(mem_oom_kill=5, cpu_periods=700, cpu_throttled=600)
    node.groups[1] = node.groups[1]._replace(mem_max=9, mem_failcnt=3)
    node.groups[2] = node.groups[2]._replace(hugetlb=(hugetlb_sample(2, limit=4 << 20),), mem_oom=4)
    yield "pods killed and throttled", report_document(node.next(70))
    for text in load(INPUTS / "kernel-log.json"):
        node.log(text)
    yield "kernel log", report_document(node.next(2))
    for text in load(INPUTS / "kernel-log.json"):
        node.log(re.sub(r"(?i)(cpu[ #:]{0,2})[0-9]+", r"\g<1>1", text), 40)
    yield "kernel log of one CPU", report_document(node.next(3))
    node.pressure = PressureSample(30 * 10**6, 30 * 10**6, 30 * 10**6)
    yield "pressure", report_document(node.next(30))
    node.stuck |= {"hugepages", "edac", "kmsg"}
    yield "sources stalled", report_document(node.next(12))
    node.stuck.clear()
    node.states["memory"] = SourceState("failing")
    yield "sources back", report_document(node.next(4))
    node.wait(90_000)
    yield "a day later", report_document(node.next(5))
    node.wall_s -= 3600
    yield "clock set back", report_document(node.next(5))


def expectations() -> Steps:
    """Yield the reports of a node whose configuration has expectations."""
    settings = EngineSettings("node-a", ("a.example.com",), 40, 3, 20, 0b111, {"hugepages-2mi-node0": 12})
    node = Host(settings)
    yield "first", report_document(node.next())
    node.pool(pool_sample(12))
    node.cpus = node.cpus._replace(present=0b111, online=0b111)
    yield "met", report_document(node.next(5))


READINGS: Final = (0, 1, 2, 3, 10, 25, 1 << 20, (1 << 64) - 1, ABSENT, EIO)


def _apply_random_event(draw: random.Random, node: Host) -> str:
    """Apply one random event to a node; return its name."""
    reading = draw.choice(READINGS)
    small = draw.randrange(4)
    match draw.randrange(14):
        case 0:
            node.cpus = node.cpus._replace(online=draw.choice((0b11, 0b01, 0b10, EIO)))
        case 1:
            node.nodes[draw.randrange(2)] = node_sample(
                draw.randrange(2), 0b11, reading, draw.choice(READINGS)
            )
        case 2:
            node.pool(
                pool_sample(reading, small, node=draw.randrange(2), size_kib=draw.choice((2048, GIB_KIB)))
            )
        case 3:
            node.groups = [
                group_sample(7, hugetlb_sample(draw.randrange(9)))._replace(
                    mem_oom_kill=reading,
                    cpu_periods=100 * node.passes,
                    cpu_throttled=50 * small * node.passes,
                ),
                group_sample(8, container="")._replace(
                    mem_limit=draw.choice((NO_LIMIT, 1 << 30)), mem_failcnt=reading
                ),
            ]
        case 4:
            node.dimms = [DimmSample(0, None, "skx", "", draw.randrange(50), small % 2)]
        case 5:
            node.numa[0] = NumaMemorySample(0, 16 * GIB_KIB, reading, 128, small)
        case 6:
            node.cores[0] = PerCpuSample(
                0, 0, small % 2, 3_000_000, draw.choice((3_000_000, 800_000)), reading
            )
        case 7:
            node.numbers[draw.randrange(5)] = draw.choice((0, 1, EIO, ABSENT))
        case 8:
            node.log(draw.choice(load(INPUTS / "kernel-log.json")), draw.choice((1, 200)))
        case 9:
            names = ("hugepages", *MACHINE, "pci", "kmsg", "throttle")
            node.states[draw.choice(names)] = SourceState(
                draw.choice(("ok", "absent", "failing", "starting"))
            )
        case 10:
            node.stuck ^= {draw.choice(("cpus", "hugepages", "cgroups", *MACHINE, "pci", "kmsg"))}
        case 11:
            node.wait(draw.choice((0.01, 1.0, 30.0, 700.0, 90_000.0)))
        case 12:
            node.functions = draw.choice(
                ((), (pci_sample(0, "mlx5_core"),), (pci_sample(0, "vfio-pci"),), None, EIO)
            )
        case _:
            devices = _declaration()
            node.files = (DeclaredFile(DRIVER, tuple(draw.sample(devices, small + 1))),)
    return "event"


def apply_random_events(seed: int) -> Steps:
    """Random events on a host, with passes between them."""
    draw = random.Random(seed)
    node = Host()
    for _ in range(25):
        what = _apply_random_event(draw, node)
        yield what, brief_report(node.next(draw.randrange(1, 5)))


# --- devices of drivers ------------------------------------------------------------------------------------


def _declaration() -> tuple[Any, ...]:
    return parse_declaration((RELEASE / DECLARATION).read_bytes(), DRIVER, "node-a")


def declare_devices() -> Steps:
    """Yield reports on declared devices: by rules for parts of the host, checks, audits and prepares."""
    node = Host()
    node.next(2)
    node.files = (
        DeclaredFile(DRIVER, _declaration()),
        DeclaredFile("b.example.com", (), "devices.d/b: no TOML"),
    )
    yield "declared", report_document(node.next(4))
    node.pool(pool_sample(7))
    node.set_online("0")
    yield "parts fail", report_document(node.next(4))
    mem = DeviceRef(DRIVER, "node-a", "mem-0")
    claim = ClaimRef("team-a", "gpus", "c-1")
    node.faults = (
        DriverFault(1, mem, "fpga.bank_locked", "bank 3 is locked", "unlock it", node.wall_s, claim),
        DriverFault(
            2, mem._replace(device="gpu-0"), "driver.bug", "no", "", node.wall_s, claim, 0.0, Health(0), False
        ),
    )
    yield "driver reports", report_document(node.next(2))
    subject = f"{DRIVER}/node-a/mem-0"
    bad = Finding("fpga.bank_locked", Severity(2), "bank 3", "unlock it", None)
    node.checks = (DriverCheckSample("bank", subject, bad, "", 3, node.now_ns, NS, 1, 2),)
    yield "check finds", report_document(node.next(3))
    node.checks = (
        DriverCheckSample("bank", subject, None, "did not answer within 2 s", 4, node.now_ns, NS, 1, 2),
    )
    yield "check late", report_document(node.next(3))
    node.groups = [group_sample(7, pod=values.POD, container="main")]
    node.pods = PodsSample(
        SourceSample("pods", SourceState("ok"), node.now_ns, 60 * NS, 0, "", 1, False),
        {values.POD: (mem, mem._replace(device="cpus-0"))},
        {values.POD: "team-a/train-0"},
        (
            PodFinding(values.POD, "main", "cgroup.lower", "4000m, 9000m expected", "", Resource("cpu")),
            PodFinding(values.POD, "", "cgroup.unlimited", "unlimited, 9Gi expected", "", Resource("memory")),
        ),
    )
    yield "audit finds", report_document(node.next(3))
    node.faults = tuple(fault._replace(expired_wall_s=node.wall_s) for fault in node.faults)
    node.checks = ()
    node.files = (DeclaredFile(DRIVER, _declaration()[:3]),)
    yield "fewer declared", report_document(node.next(5))
    node.files = ()
    yield "nothing declared", report_document(node.next(3))


NIC: Final = "0000:5e:00.1"
MISFITS: Final = """
version = 1
[[device]]
name = "isolated"
kind = "cpu"
cpus = "0"
isolated = true
[[device]]
name = "elsewhere"
kind = "cpu"
cpus = "1"
numa = 3
[[device]]
name = "shared"
kind = "cpu"
cpus = "0"
exclusive = true
[[device]]
name = "absent"
kind = "cpu"
cpus = "9"
[[device]]
name = "pages"
kind = "hugepages"
size = "2Mi"
pages = 512
numa = 0
[[device]]
name = "memory"
kind = "memory"
size = "64Gi"
numa = 0
[[device]]
name = "gpu"
kind = "gpu"
uuid = "GPU-0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"
[[device]]
name = "nic"
kind = "pci"
address = "0000:5e:00.1"
driver = "mlx5_core"
"""


def declare_misfits() -> Steps:
    """Declared devices that differ from the machine, and the faults of a PCI function."""
    node = Host()
    node.files = (DeclaredFile(DRIVER, parse_declaration(MISFITS.encode(), DRIVER, "node-a")),)
    for core in (0, 1):
        node.cores[core] = PerCpuSample(core, 0, 0, 3_000_000, 3_000_000, 0)
    yield "declared", report_document(node.next(4))
    for name, function in {
        "well": ("mlx5_core", 16, 16, 0, 0, 0),
        "another driver": ("vfio-pci", 16, 16, 0, 0, 0),
        "no driver": ("", 16, 16, 0, 0, 0),
        "narrow": ("mlx5_core", 8, 16, 0, 0, 0),
        "errors": ("mlx5_core", 16, 16, 3, 2, 900),
        "more errors": ("mlx5_core", 16, 16, 4, 3, 90_000),
        "unreadable": ("mlx5_core", EIO, 16, EIO, EIO, EIO),
    }.items():
        driver, *numbers = function
        node.functions = (PciSample(NIC, 0x15B3, 0x101D, driver, "", *numbers),)
        yield name, brief_report(node.next(15))


def audits() -> Steps:
    """Yield each finding of an audit of cgroups, on a pod and on a container."""
    documents = load(DOCUMENTS / "checks.json")["document"]["checks"]
    of_pods = [check["code"] for check in documents if check["source"] == "pods"]
    codes = [code for code in of_pods if not code.startswith("node.")]
    node = Host()
    node.files = (DeclaredFile(DRIVER, _declaration()),)
    node.groups = [group_sample(7, pod=values.POD, container="main")]
    node.next(2)
    cpus = DeviceRef(DRIVER, "node-a", "cpus-0")
    of = {values.POD: (cpus, cpus._replace(device="mem-0"), cpus._replace(device="pages-0"))}
    for code in codes:
        for resource in (*Resource, None):
            found = PodFinding(
                values.POD, "main" if resource else "", code, "1, 2 expected", "", resource, 2048
            )
            source = SourceSample("pods", SourceState("ok"), node.now_ns, 60 * NS, 0, "", 1, False)
            node.pods = PodsSample(source, of, {}, (found,))
            report = brief_report(node.next(2))
            report["devices"] = [device for device in report["devices"] if device[-1]]
            yield f"{code} {resource}", [report["devices"], report["notes"]]


# --- GPUs --------------------------------------------------------------------------------------------------


def gpus() -> Steps:
    """Yield reports with faults of GPUs by readings and by events, over restarts and a boot."""
    node = GpuNode(3, migs={2: [(1, 0), (2, 0)]}, expect=3)
    yield "healthy", report_document(node.rest(5))
    node.set_readings(0, recovery_action=1, temp=95)
    node.xid(0, 79)
    yield "XID 79", report_document(node.next(2))
    node.xid(2, 94, 1, 0, times=3)
    node.log("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 11004, Fatal, something without a port")
    yield "instance and switch", report_document(node.next(3))
    yield "kept", load_json(gpu_fault_file.encode_gpu_faults(node.checkpoint))
    node.restart(away_s=30)
    yield "restarted", report_document(node.rest(3))
    node.reset(0)
    node.set_readings(0, temp=33)
    yield "reset", report_document(node.rest(20))
    yield "probation over", report_document(node.rest(100))
    node.lose(1)
    yield "lost", report_document(node.next(3))
    node.hang(0)
    yield "hangs", report_document(node.rest(8))
    yield "dead", report_document(node.rest(70))
    node.return_from_hang(0)
    node.recover(1)
    yield "back", report_document(node.rest(10))
    node.set_readings(0, ecc_uncorrectable=3, remap_pending=1, pcie_width=8, links_up=1)
    node.nvml_event(0, GpuEvent(min(map(int, GpuEvent))))
    yield "readings", report_document(node.rest(15))
    node.reload()
    yield "driver reloaded", report_document(node.rest(5))
    yield "kept again", load_json(gpu_fault_file.encode_gpu_faults(node.checkpoint))
    node.restart(boot_id=SECOND_BOOT, away_s=300)
    yield "booted", report_document(node.rest(30))
    yield "an hour later", report_document(node.rest(3600))


def readings() -> Steps:
    """Yield reports with each reading of a GPU at several values, and later reports if there is a cause."""
    for field in GpuField:
        model = H100 if isinstance(H100[field], int) else T4
        for value in (0, 1, 95, 10**6, EIO):
            name = value if isinstance(value, int) else "EIO"
            node = GpuNode(1, readings=model)
            node.set_readings(0, **{field.value: value})
            first = _codes(node.next(2))
            node.set_readings(0, **{field.value: value + 5000 if isinstance(value, int) else 0})
            second, later = _codes(node.next(2)), _codes(node.rest(15))
            if first or second or later:
                yield f"{field.value} {name}", [first, second, later]


def _codes(report: Report) -> list[Any]:
    return [[cause.code, cause.severity.value] for device in report.devices for cause in device.causes]


def announce_events() -> Steps:
    """Yield reports with each event of NVML, each state of its library, and each GPU fact of the host."""
    for event in GpuEvent:
        node = GpuNode(1)
        node.nvml_event(0, event, 3)
        yield f"event {event.value}", [brief_report(node.next(2)), brief_report(node.rest(700))["devices"]]
    for error in (3, 4, 9, 12, 18, 999):
        node = GpuNode(2)
        node.library |= {"err": error, "count": 0}
        yield f"library {error}", brief_report(node.next(3))
    node = GpuNode(2, expect=3)
    buses = tuple(gpu.bus for gpu in node.gpus.values())
    for name, known in {
        "no fabric manager": GpuOsSample((), buses, False),
        "unknown to NVML": GpuOsSample((), (*buses, "0000:9b:00.0"), True),
        "off the bus": GpuOsSample((), buses[:1], True),
        "stuck process": GpuOsSample((), buses, True, (StuckProcess(4242, "python"),)),
        "nothing known": GpuOsSample((), EIO, EIO, EIO),
        "inventory": GpuOsSample(
            (GpuAttributes("GPU-00000000", buses[0], "s1", "H100", "570", "v1", "Hopper", 1),), buses
        ),
    }.items():
        node.host = known
        yield name, report_document(node.rest(20))
    for text in (
        "NVRM: GPU 0000:1b:00.0: RmInitAdapter failed! (0x62:0xffff:1863)",
        "NVRM: knvlinkDiscoverPostRxDetLinks_GH100: failed to update link mask",
        "NVRM: API mismatch: the client has the version 570.86.15, but this kernel module has 570.86.10.",
    ):
        node = GpuNode(2)
        node.log(text)
        yield text[:30], brief_report(node.next(2))


def load_json(data: bytes) -> Any:
    """Return the JSON value of a file's bytes."""
    return json.loads(data)


def gpus_released(boot_id: str) -> Steps:
    """Yield the reports of an agent that starts with the stored faults of the last release."""
    node = GpuNode(2)
    node.now_ns, node.wall_s = 50_000 * NS, values.NOW_S
    node.boot_id = boot_id
    for number, bus in ((0, "0000:1b:00.0"), (1, "0000:2b:00.0")):
        node.change(number, uuid=f"GPU-{number:08}", bus=bus)
    memory = gpu_fault_file.decode_gpu_faults((RELEASE / "gpu-faults.json").read_bytes())
    node.state = initial_state(
        node.settings, checkpoint.restore_faults(memory, boot_id, node.limits, node.now)
    )
    yield "first", report_document(node.next())
    yield "later", report_document(node.rest(60))
    yield "kept", load_json(gpu_fault_file.encode_gpu_faults(node.checkpoint))
    yield "an hour later", report_document(node.rest(3600))


def report_xids() -> Steps:
    """Yield reports with each XID and SXid once, on a GPU that answers and on one with an older driver."""
    codes = [check["code"] for check in load(DOCUMENTS / "checks.json")["document"]["checks"]]
    for code in codes:
        number = code.rpartition(".")[2]
        if code.startswith("gpu.xid."):
            for readings in ({}, {"readings": OLD_DRIVER}):
                node = GpuNode(1, **readings)
                node.xid(0, int(number))
                yield f"{code} {bool(readings)}", brief_report(node.next(2))["devices"]
        elif code.startswith("gpu.fabric.sxid."):
            node = GpuNode(1)
            severity = "Non-fatal, Link 28 " if SXIDS[int(number)].states_severity else ""
            node.log(f"nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): {number}, {severity}something")
            yield code, brief_report(node.next(2))["devices"]


# --- prepares and taints -----------------------------------------------------------------------------------


def _claim(name: str, *devices: str) -> Claim:
    given = tuple(ClaimDevice("gpus", DRIVER, values.POOL, device) for device in devices)
    return Claim(
        "team-a",
        name,
        f"uid-{name}",
        devices=given,
        configs=(ClaimConfig("FromClaim", (), {"mode": "shared"}),),
    )


def _unhealthy_device(name: str, *codes: str) -> DeviceHealth:
    return values.device(name, *(values.cause(code, values.UNHEALTHY) for code in codes), driver=DRIVER)


def ledger() -> Steps:
    """Yield a driver's prepare ledger over several failures, and the failures that its cache answers."""
    now_s = values.NOW_S
    failed, _, later, wrong, bug = values.verdicts()
    assert failed is not None
    assert later is not None
    assert wrong is not None
    assert bug is not None
    known = ledgers.PrepareLedger()

    def encode_known() -> Any:
        return load_json(driver_files.encode_ledger(driver_files.LedgerFileContent(DRIVER, "1.2", known)))

    a, b, c, d = _claim("a", "gpu-0"), _claim("b", "gpu-1"), _claim("c", "gpu-0", "gpu-1"), _claim("d")
    well = ledgers.health_fingerprint([_unhealthy_device("gpu-0")])
    sick = ledgers.health_fingerprint([_unhealthy_device("gpu-0", "gpu.xid.79", "gpu.lost"), None])
    known = ledgers.with_success(known, a, well, now_s, "1.2")
    yield "succeeded", encode_known()
    for number in range(3):
        known, _ = ledgers.with_failure(known, a, well, failed, now_s + number, "1.2")
    yield "failed three times", encode_known()
    known, _ = ledgers.with_failure(known, b, sick, later, now_s + 10, "1.2")
    known, _ = ledgers.with_failure(
        known, c, sick, bug, now_s + 11, "1.3", [DeviceRef(DRIVER, values.POOL, "gpu-0")]
    )
    known, _ = ledgers.with_failure(known, d, "", wrong, now_s + 12, "1.2")
    yield "others failed", encode_known()
    answers = {}
    for claim in (a, b, c, d):
        for version in ("1.2", "1.3"):
            for generation in (well, sick, ""):
                for after_s in (13, 70, 200, 400):
                    found = ledgers.cached_failure(known, claim, generation, now_s + after_s, version)
                    answers[f"{claim.name} {version} {generation} {after_s}"] = found.code if found else None
    yield "answered without trying", answers
    known, _ = ledgers.with_unprepare_failure(known, a, later, now_s + 20, "1.2")
    known = ledgers.with_unprepare(known, b.ref, now_s + 21)
    yield "unprepared", encode_known()
    yield (
        "aged",
        load_json(
            driver_files.encode_ledger(
                driver_files.LedgerFileContent(DRIVER, "", ledgers.expire_entries(known, now_s + 700))
            )
        ),
    )
    theirs = driver_files.decode_ledger((RELEASE / "prepares.json").read_bytes())[2]
    merged = ledgers.merge_ledgers(known, theirs, now_s + 30)
    yield (
        "merged",
        load_json(driver_files.encode_ledger(driver_files.LedgerFileContent(DRIVER, "1.4", merged))),
    )
    yield "fingerprints", [claim.fingerprint for claim in (a, b, c, d)]


def publish_taints() -> Steps:
    """Yield the taints of each code, of several causes, over time and over a restart."""
    codes = [check["code"] for check in load(DOCUMENTS / "checks.json")["document"]["checks"]]
    policies = {
        "default": TaintPolicy(),
        "evict": TaintPolicy(
            evict=frozenset({"gpu.lost", "gpu.xid.*"}),
            quiet_s=5,
            domain="health.example.com",
            report_unknown=False,
        ),
        "silent": TaintPolicy(inform=False),
    }
    for name, policy in policies.items():
        for severity in map(Severity, (1, 2, 3, 4)):
            past = TaintState()
            devices = tuple(
                values.device(f"d-{n}", values.cause(code, severity)) for n, code in enumerate(codes)
            )
            report = Report(values.POOL, values.instant(), devices)
            for seconds in (0, 61):
                past = decide_taints(past, report, DRIVER, policy, values.instant(-seconds))
            by_device = [tainted for _, tainted in sorted(past.taints.devices.items())]
            yield (
                f"{name} {severity.value}",
                [[f"{taint.key}={taint.value}:{taint.effect}" for taint in tainted] for tainted in by_device],
            )
    kept = driver_files.decode_taints((RELEASE / "taints.json").read_bytes())
    for name, policy in policies.items():
        past = restore_taints(kept, DRIVER, policy)
        yield f"restored {name}", load_json(driver_files.encode_taints(past.taints))
        for seconds in (0, 30, 61, 200):
            past = decide_taints(past, values.report(), DRIVER, policy, values.instant(-seconds))
            yield f"{name} after {seconds} s", load_json(driver_files.encode_taints(past.taints))


STORIES: Final[Mapping[str, Callable[[], Steps]]] = {
    "host": host,
    "expectations": expectations,
    **{f"chance-{seed}": lambda seed=seed: apply_random_events(seed) for seed in range(8)},
    "declared": declare_devices,
    "gpus": gpus,
    "gpus-released": lambda: gpus_released(FIRST_BOOT),
    "gpus-released-booted": lambda: gpus_released(SECOND_BOOT),
    "misfits": declare_misfits,
    "audits": audits,
    "gpu-readings": readings,
    "gpu-announced": announce_events,
    "xids": report_xids,
    "ledger": ledger,
    "tainted": publish_taints,
}
"""Stories by the name of their golden file."""


def steps(name: str) -> list[dict[str, Any]]:
    """Return the steps of a story."""
    return [{"step": step, "known": known} for step, known in STORIES[name]()]
