"""Values of the code under test with something in every field: what the encoders and the sockets are given.

Fields are given by position, and enums by their value on the wire, in a file or in a document: both are what
an earlier release wrote, names in the code are not.
"""

from typing import Final

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.health import (
    Blame,
    Cause,
    DeviceHealth,
    Effect,
    Health,
    NonDeviceCause,
    NotApplicable,
    Severity,
    Taint,
    Taints,
)
from agent.model.prepare import ErrorClass, FaultTaint, PrepareVerdict, Scope
from agent.model.reading import SourceSample, SourceState
from agent.model.report import (
    AgentStatus,
    ConfigReload,
    PartsStatus,
    Report,
    SeverityCount,
    SocketSubscriberCounts,
)
from agent.model.snapshot import NativeCoreStats
from agent.model.time import NS, Instant

NOW_S: Final = 1_790_000_000.25
DRIVER: Final = "gpu.example.com"
POOL: Final = "node-1"
OK, INFO, DEGRADED, UNKNOWN, UNHEALTHY = map(Severity, range(5))
HEALTH_OF: Final = {UNHEALTHY: Health(2), UNKNOWN: Health(0)}


def instant(ago_s: float = 0) -> Instant:
    """Return a moment so many seconds before NOW_S."""
    return Instant(round((50_000 - ago_s) * NS), NOW_S - ago_s)


def cause(
    code: str, severity: Severity, blame: str = "hardware", evidence: str = "1 of 2", ago_s: float = 12
) -> Cause:
    """Return a cause with advice."""
    return Cause(code, severity, Blame(blame), evidence, f"advice on {code}", instant(ago_s))


def device(
    name: str, *causes: Cause, driver: str = "", kind: str = "", lease_s: int = 30, **attributes: str
) -> DeviceHealth:
    """Return a device with these causes, worst first."""
    severity = max((cause.severity for cause in causes), default=OK)
    shown = [f"{cause.code}: {cause.evidence}" for cause in causes if cause.severity > INFO]
    return DeviceHealth(
        POOL,
        name,
        kind or name.split("-")[0],
        HEALTH_OF.get(severity, Health(1)),
        severity,
        "; ".join(shown),
        instant(300),
        instant(1.5),
        lease_s,
        causes,
        tuple(attributes.items()),
        driver,
    )


SHRUNK: Final = cause("mem.hugepages.pool_shrunk", UNHEALTHY, "configuration", "500 pages, 512 at start")
THROTTLED: Final = cause("cpu.throttled.core", DEGRADED, "hardware", "10 events in 60 s", 340)
UNREADABLE: Final = cause("mem.ecc.uncorrectable.unreadable", UNKNOWN, "agent", "Input/output error")
OFF_THE_BUS: Final = cause("gpu.xid.79", UNHEALTHY, "driver", "1 time: ünïcode … ✖")
FAULT: Final = cause("gpu.xid.31", INFO, "workload", "1 time")
GPU: Final = {"uuid": "GPU-00000001", "pciBusId": "0000:1b:00.0", "product": "NVIDIA H100 80GB HBM3"}
SOURCES: Final = (
    SourceSample("cpus", SourceState("ok"), instant(1).mono_ns, NS, 0, "", 49_000),
    SourceSample("throttle", SourceState("absent"), instant(1).mono_ns, NS, 0, "no counters", 49_000),
    SourceSample("edac", SourceState("failing"), instant(2).mono_ns, 10 * NS, 3, "mc0/ue_count: EIO", 4_900),
    SourceSample("nvml", SourceState("stalled"), instant(90).mono_ns, NS, 1, "hangs", 7, False, 60 * NS),
    SourceSample("kmsg", SourceState("starting"), instant(3).mono_ns, NS, 0, "", 0, False),
)
CORE: Final = NativeCoreStats(11, 12, 13, 14, 15, 16, 17, 18, 19, 20)
POD: Final = "0f3c7a52-4a4e-4a52-9f0e-5d3a6f1b2c3d"


def report() -> Report:
    """Return a report with something in each field."""
    return Report(
        POOL,
        instant(),
        (
            device("cpu-node0", THROTTLED),
            device("memory-node0", UNREADABLE),
            device("hugepages-2mi-node0", SHRUNK, THROTTLED, lease_s=86_399),
            device("gpu-0", **GPU),
            device("gpu-0", FAULT, driver=DRIVER, kind="gpu", **GPU),
            device("gpu-1", OFF_THE_BUS, FAULT, driver=DRIVER, kind="gpu"),
            device("gpu-2", driver=DRIVER, kind="gpu", lease_s=3),
        ),
        (
            NonDeviceCause("node", cause("node.hung_task", DEGRADED, "driver", "blocked for minutes: dd")),
            NonDeviceCause(
                f"pod {POD} (team-a/train-0) container main",
                cause("cgroup.memory.oom_kill", DEGRADED, "workload", "3 kills"),
                (f"{DRIVER}/{POOL}/gpu-1", "hugepages-2mi-node0"),
            ),
        ),
        (NotApplicable("cpu-node0", "cpu.throttled.package", "no counters"),),
        (NotApplicable("", "node.pressure.memory", "needs 60 s of history"),),
        SOURCES,
        CORE,
        214,
    )


def status() -> AgentStatus:
    """Return a status with something in each field."""
    tallies = (
        SeverityCount(UNHEALTHY, 2),
        SeverityCount(UNKNOWN, 1),
        SeverityCount(DEGRADED, 1),
        SeverityCount(OK, 3),
    )
    subscribers = (
        SocketSubscriberCounts(f"drivers/{DRIVER}.sock", 2, 3),
        SocketSubscriberCounts("agent.sock", 0, 1),
    )
    return AgentStatus(
        "0.1.0",
        4242,
        NOW_S - 50_000,
        12.345,
        41_943_040,
        7,
        23,
        POOL,
        instant(),
        117,
        tallies,
        SOURCES,
        CORE,
        214,
        subscribers,
        parts=PartsStatus(ConfigReload(NOW_S - 60, "", ("throttle.events: 10 to 5",))),
    )


def new_status() -> AgentStatus:
    """Return the status of an agent that has no report yet."""
    return AgentStatus("0.1.0", 4242, NOW_S - 1, 0.5, 41_943_040, 7, 23)


def taints() -> Taints:
    """Return the taints of a driver's devices, with every effect."""
    tainted = (
        Taint(f"{DRIVER}/gpu.xid.79", "", Effect("NoExecute"), 1_789_999_000),
        Taint(f"{DRIVER}/fpga.bank", "bank-3", Effect("NoSchedule"), 1_789_999_100),
        Taint(f"{DRIVER}/unmonitored", "x", Effect("None"), 1_789_999_200),
    )
    devices = {"gpu-2": (), "gpu-0": tainted[2:], "gpu-1": tainted}
    return Taints({DeviceRef(DRIVER, POOL, name): found for name, found in devices.items()})


def verdicts() -> tuple[PrepareVerdict | None, ...]:
    """Return how the prepares of five claims ended: one of each class that fails, and one that went well."""

    def ref(name: str) -> ClaimRef:
        return ClaimRef("team-a", name, f"uid-{name}")

    gpus = tuple(DeviceRef(DRIVER, POOL, f"gpu-{number}") for number in range(3))
    return (
        PrepareVerdict(
            ErrorClass("failed-device"),
            "gpu.xid.79",
            Scope("device"),
            ref("a"),
            "the GPU is off the bus",
            ("gpus", "gpus/first"),
            gpus[:1],
            "more of it",
            ("NVML 15", "errno EIO"),
            0.95,
            "reboot the node",
            None,
            300,
            Health(2),
            FaultTaint(Effect("NoExecute"), "x"),
            NOW_S - 60,
            NOW_S,
            3,
        ),
        None,
        PrepareVerdict(
            ErrorClass("transient"),
            "cdi.write",
            Scope("node"),
            ref("c"),
            "ENOSPC while writing",
            (),
            gpus,
            "",
            (),
            0.8,
            "free space",
            2.5,
            0,
            None,
            None,
            0.0,
            0.0,
            1,
        ),
        PrepareVerdict(
            ErrorClass("bad-config"),
            "config.decode",
            Scope("claim"),
            ref("d"),
            "unknown field: shred",
            ("gpus",),
            gpus[1:],
            "",
            ("strict decoding error",),
            1.0,
            "fix the claim",
            None,
            60,
            None,
            None,
            NOW_S,
            NOW_S,
            1,
        ),
        PrepareVerdict(
            ErrorClass("permanent"),
            "driver.bug",
            Scope("driver"),
            ref("e"),
            "x" * 250,
            (),
            (),
            "",
            (),
            0.5,
            "",
            None,
            10,
            Health(0),
            FaultTaint(Effect("NoSchedule"), ""),
            NOW_S,
            NOW_S,
            2,
        ),
    )
