"""Reports for tests of the output: a node with devices of every severity, and one with GPUs."""

from agent.model.health import Blame, Cause, DeviceHealth, Health, NonDeviceCause, NotApplicable, Severity
from agent.model.reading import SourceSample, SourceState
from agent.model.report import Report
from agent.model.snapshot import NativeCoreStats
from agent.model.time import NS, Instant

NOW_S = 1_795_255_444.0
"""2026-11-21T10:04:04Z."""

HEALTH_OF = {Severity.UNHEALTHY: Health.UNHEALTHY, Severity.UNKNOWN: Health.UNKNOWN}


def instant(ago_s: float = 0) -> Instant:
    """Return the time `ago_s` before NOW_S."""
    return Instant(round((1000 - ago_s) * NS), NOW_S - ago_s)


def cause(
    code: str, severity: Severity, evidence: str = "1 of 2", advice: str = "check it", ago_s: float = 12
) -> Cause:
    return Cause(code, severity, Blame.CONFIGURATION, evidence, advice, instant(ago_s))


def device(
    name: str,
    *causes: Cause,
    pool: str = "worker-7",
    owner: str = "",
    message: str | None = None,
    severity: Severity | None = None,
    since_s: float = 12,
    **attributes: str,
) -> DeviceHealth:
    """Return a device with these causes, worst first, or with a severity and a message only."""
    if severity is None:
        severity = max((c.severity for c in causes), default=Severity.OK)
    findings = [f"{c.code}: {c.evidence}" for c in causes if c.severity > Severity.INFO]
    return DeviceHealth(
        driver=owner,
        pool=pool,
        device=name,
        kind=name.split("-")[0],
        health=HEALTH_OF.get(severity, Health.HEALTHY),
        severity=severity,
        message="; ".join(findings) if message is None else message,
        since=instant(since_s),
        verified=instant(1),
        timeout_s=30,
        causes=causes,
        attributes=tuple(attributes.items()),
    )


def report(*devices: DeviceHealth, node: str = "worker-7", **more: object) -> Report:
    return Report(node=node, at=instant(), devices=devices, **more)  # type: ignore[arg-type]


def source(
    name: str,
    state: SourceState = SourceState.OK,
    failures: int = 0,
    detail: str = "",
    *,
    vital: bool = True,
) -> SourceSample:
    return SourceSample(name, state, instant(3).mono_ns, NS, failures, detail, vital=vital)


SHRUNK = cause(
    "mem.hugepages.pool_shrunk",
    Severity.UNHEALTHY,
    "500 pages, 512 at start",
    "write the old number to nr_hugepages and read it back; free memory or reboot if it stays short",
)
THROTTLED = cause(
    "cpu.throttled.core",
    Severity.DEGRADED,
    "10 events or more in 60 s",
    "check fans, heat sinks and inlet temperature",
)
UNREADABLE = cause(
    "mem.hugepages.pool_shrunk.unreadable",
    Severity.UNKNOWN,
    "nr_hugepages: Input/output error",
    "read the file by hand: an error there too is the kernel's; otherwise restart the agent",
)
HUNG = cause("node.hung_task", Severity.DEGRADED, "blocked for minutes: dd", "reboot the node", ago_s=60)
STOLEN = cause("cgroup.cpu.throttled_exclusive", Severity.DEGRADED, "throttled", "take the quota off")
HIT = cause("cgroup.hugetlb.max_hit", Severity.INFO, "2MB limit of 64 MiB hit", ago_s=200)

BUSY = report(
    device("cpu-node0", since_s=11_000),
    device("cpu-node1", THROTTLED, since_s=340),
    device("hugepages-1gi-node0", UNREADABLE, since_s=95),
    device("hugepages-2mi-node0", SHRUNK, THROTTLED, since_s=12),
    device("hugepages-2mi-node1", since_s=11_000),
    notes=(NonDeviceCause("pod 0f3c7a52-5b1e-4a0b-9f57-1f2d3c4b5a69 container 9b1d", HIT),),
    not_applicable=(
        NotApplicable("cpu-node0", "cpu.throttled.package", "this machine counts no package throttling"),
        NotApplicable("cpu-node1", "cpu.throttled.package", "this machine counts no package throttling"),
        NotApplicable("", "cgroup.hugetlb.max_hit", "no hugetlb controller"),
    ),
    not_evaluated=(NotApplicable("cpu-node0", "cpu.throttled.core", "needs 60 s of history"),),
    sources=(
        source("cpus"),
        source("throttle"),
        source("hugepages", SourceState.FAILING, 3, "hugepages-1048576kB/nr_hugepages: Input/output error"),
        source("cgroups", SourceState.ABSENT, 0, "no kubepods below /sys/fs/cgroup"),
    ),
    core=NativeCoreStats(groups_dropped=2),
    groups=214,
)
"""One device of each severity, one with two causes, and an entry of each kind in the footer."""

LOST = cause("gpu.lost", Severity.UNHEALTHY, "NVML returned 15, the GPU is lost", "reboot the node")
CONTAINED = cause("gpu.xid.94", Severity.UNHEALTHY, "1 time, row remap pending", "reset the GPU")
FAULT = cause("gpu.xid.31", Severity.INFO, "1 time", "")
GPU = {"product": "NVIDIA A100-SXM4-40GB", "driver": "570.86.15"}


def gpu(number: int, *causes: Cause) -> DeviceHealth:
    return device(
        f"gpu-{number}",
        *causes,
        uuid=f"GPU-{number:08x}",
        pciBusId=f"0000:{0x1B + number:02x}:00.0",
        serial=f"165{number:04}",
        **GPU,
    )


def mig_instance(number: int, of: int, *causes: Cause) -> DeviceHealth:
    return device(
        f"gpu-{of}-mig-{number}-0",
        *causes,
        uuid=f"MIG-{of}{number}",
        profile="1g.5gb",
        pciBusId=f"0000:{0x1B + of:02x}:00.0",
        serial=f"165{of:04}",
        **GPU,
    )


GPUS = report(
    gpu(0),
    *(mig_instance(n, 0) for n in range(1, 8)),
    gpu(1, LOST),
    *(mig_instance(n, 1, LOST) for n in range(1, 8)),
    gpu(2),
    mig_instance(1, 2, CONTAINED),
    mig_instance(2, 2, FAULT),
    mig_instance(3, 2),
    gpu(3),
    sources=(
        source("cpus"),
        source("nvml", vital=False),
        *(source(f"gpu-{n}", vital=False) for n in range(4)),
        source("kmsg", vital=False),
    ),
)
"""Four GPUs: healthy; lost with all instances; with one unhealthy instance; and without MIG."""
