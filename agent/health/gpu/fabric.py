"""The fabric that joins a machine's GPUs, as each GPU sees it: registration, health, its manager.

A fabric is NVLinks through switches, set up by nv-fabricmanager or from outside the machine. Boards that
belong to none say so, or say for ever that registration has not begun; neither is a fault.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from agent.health.catalog import Rule
from agent.health.gpu.common import nvml_name, probation_ns, read
from agent.health.gpu.view import GpuView
from agent.health.rules import OK, RuleNotApplicable, RuleResult, Unreadable, lacking
from agent.model.gpu import GpuField
from agent.model.health import Blame, Finding, Severity
from agent.model.reading import Absence, Missing
from agent.model.settings import GpuLimits
from agent.model.time import NS
from agent.model.wake import GpuWake

BOOT_S: Final = 60
"""A GPU joins its fabric in seconds; who is told of one that is about to has nothing to do."""


class State:
    """NVML's states of a GPU's registration with the fabric."""

    NOT_SUPPORTED: Final = 0
    NOT_STARTED: Final = 1
    IN_PROGRESS: Final = 2
    COMPLETED: Final = 3


class Part(NamedTuple):
    """One field of NVML's fabric health mask, and what its bad values mean."""

    shift: int
    mask: int
    bad: dict[int, tuple[Severity, str]]


_TRUE: Final = 1  # 0: not supported, 2: false
MASK: Final = (
    Part(0, 0x3, {_TRUE: (Severity.DEGRADED, "bandwidth is degraded")}),
    Part(2, 0x3, {_TRUE: (Severity.DEGRADED, "routes are being recovered")}),
    Part(4, 0x3, {_TRUE: (Severity.UNHEALTHY, "a route is unhealthy")}),
    Part(6, 0x3, {_TRUE: (Severity.DEGRADED, "recovering from an access timeout")}),
    Part(
        8,
        0xF,
        {
            2: (Severity.UNHEALTHY, "wrong system GUID"),
            3: (Severity.UNHEALTHY, "wrong chassis serial number"),
            4: (Severity.UNHEALTHY, "in no partition"),
            5: (Severity.UNHEALTHY, "too few NVLinks"),
            6: (Severity.UNHEALTHY, "incompatible GPU firmware"),
            7: (Severity.UNHEALTHY, "invalid location"),
            8: (Severity.UNHEALTHY, "invalid state of the GPU"),
            **dict.fromkeys(range(9, 16), (Severity.UNHEALTHY, "a wrong configuration of a newer kind")),
        },
    ),
)
"""NVML_GPU_FABRIC_HEALTH_MASK_*; in the last one, incorrect configuration, 1 means none."""
SUMMARY: Final = {
    2: (Severity.UNHEALTHY, "its summary is: unhealthy"),
    3: (Severity.DEGRADED, "its summary is: limited capacity"),
}
NO_FABRIC: Final = "the GPU belongs to no fabric, or the driver does not tell"
NO_HEALTH: Final = "the driver tells nothing of the fabric's health (before 550), or the GPU belongs to none"


def state(view: GpuView) -> RuleResult:
    """The GPU waits to be let into the fabric. CUDA does not start before (error 802).

    A registration that has not begun counts only where a fabric manager runs, ran or is needed.

    Source: nvmlDeviceGetGpuFabricInfoV, state [0 to 3].
    """
    reached = read(view, GpuField.FABRIC_STATE)
    if isinstance(reached, Missing):
        return lacking(GpuField.FABRIC_STATE, reached, NO_FABRIC)
    if reached == State.NOT_SUPPORTED:
        return RuleNotApplicable(NO_FABRIC)
    if reached == State.IN_PROGRESS:
        return Finding("gpu.fabric.state", Severity.UNHEALTHY, "registration with the fabric does not end")
    if reached == State.NOT_STARTED:
        if not view.start.fabric_manager and isinstance(view.host.fabric_manager, Missing):
            return RuleNotApplicable("registration has not begun, and nothing here would begin it")
        return Finding("gpu.fabric.state", Severity.UNHEALTHY, "registration with the fabric does not begin")
    return OK


def status(view: GpuView) -> RuleResult:
    """Registration with the fabric ended with an error.

    Source: nvmlDeviceGetGpuFabricInfoV, status [NVML's return code], which counts in state 3 only.
    """
    reached, code = read(view, GpuField.FABRIC_STATE), read(view, GpuField.FABRIC_STATUS)
    if isinstance(reached, Missing):
        return lacking(GpuField.FABRIC_STATE, reached, NO_FABRIC)
    if isinstance(code, Missing):
        return lacking(GpuField.FABRIC_STATUS, code, NO_FABRIC)
    if reached != State.COMPLETED:
        return RuleNotApplicable("registration is not complete")
    if not code:
        return OK
    evidence = f"registration with the fabric failed: {nvml_name(code)}"
    return Finding("gpu.fabric.status", Severity.UNHEALTHY, evidence)


def _complaints(mask: int, summary: int) -> Iterator[tuple[Severity, str]]:
    for part in MASK:
        value = mask >> part.shift & part.mask
        if value in part.bad:
            yield part.bad[value]
    if summary in SUMMARY:
        yield SUMMARY[summary]


def health(view: GpuView) -> RuleResult:
    """The fabric says of this GPU that something is wrong.

    Source: nvmlDeviceGetGpuFabricInfoV, health mask (version 2 and later) and summary (version 3 and later).
    """
    mask, summary = read(view, GpuField.FABRIC_HEALTH), read(view, GpuField.FABRIC_SUMMARY)
    if isinstance(mask, Missing):
        return lacking(GpuField.FABRIC_HEALTH, mask, NO_HEALTH)
    if isinstance(summary, Missing):
        if summary.absence is Absence.UNREADABLE:
            return Unreadable(GpuField.FABRIC_SUMMARY, summary)
        summary = 0  # older drivers have the mask only
    if not mask and not summary:
        return RuleNotApplicable(NO_HEALTH)
    found = list(_complaints(mask, summary))
    if not found:
        return OK
    severity = max(severity for severity, _ in found)
    return Finding("gpu.fabric.health", severity, ", ".join(text for _, text in found))


def manager(view: GpuView) -> RuleResult:
    """nv-fabricmanager does not run on a machine with NVSwitches, or where it ran before.

    Source: the machine's processes, and NVSwitches on its PCI bus; psutil, sysfs.
    """
    running = view.host.fabric_manager
    if running is True:
        return OK
    if isinstance(running, Missing) and running.absence is Absence.UNREADABLE:
        return Unreadable("processes", running)
    if view.start.fabric_manager:
        evidence = "nv-fabricmanager ran and does not any more"
    elif running is False:
        evidence = "nv-fabricmanager does not run, and the machine has NVSwitches"
    else:
        return RuleNotApplicable("no NVSwitches on the PCI bus, or processes cannot be seen")
    return Finding("gpu.fabric.manager", Severity.DEGRADED, evidence)


def rows(limits: GpuLimits) -> tuple[Rule, ...]:
    """The rows of these rules."""
    watch_ns = probation_ns(limits)
    look = "see whether nvidia-fabricmanager runs, and what its log says"
    return (
        Rule(
            code="gpu.fabric.status",
            severity=Severity.UNHEALTHY,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(GpuWake(GpuField.FABRIC_STATUS), GpuWake(GpuField.FABRIC_STATE)),
            threshold="state 3 (completed) with any return code but 0",
            why="CUDA does not start on the GPU, or it cannot reach the others",
            advice=look + "; then reset the GPU",
            judge=status,
            probation_ns=watch_ns,
            try_it="gpu 0 set fabric.status=999",
        ),
        Rule(
            code="gpu.fabric.state",
            severity=Severity.UNHEALTHY,
            blame=Blame.DRIVER,
            source="gpu",
            gpu_reads=(GpuWake(GpuField.FABRIC_STATE),),
            threshold=f"state 2, or 1 where a manager is needed, for {BOOT_S} s (for booting)",
            why="CUDA does not start on the GPU (error 802, system not yet initialized)",
            advice=look,
            judge=state,
            raise_ns=BOOT_S * NS,
            probation_ns=watch_ns,
            try_it="gpu 0 set fabric.state=2",
        ),
        Rule(
            code="gpu.fabric.health",
            severity=Severity.UNHEALTHY,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(GpuWake(GpuField.FABRIC_HEALTH), GpuWake(GpuField.FABRIC_SUMMARY)),
            threshold="unhealthy route, incorrect configuration; degraded: less bandwidth, a recovery",
            why="work that spans GPUs or machines is slow or fails",
            advice=look + "; compare with the other GPUs of the fabric",
            judge=health,
            probation_ns=watch_ns,
            try_it="gpu 0 set fabric.health=0x1a9",
        ),
        Rule(
            code="gpu.fabric.manager",
            severity=Severity.DEGRADED,
            blame=Blame.DRIVER,
            source="host",
            threshold="not running where it ran, or where there are NVSwitches",
            why="what is set up goes on; nothing mends a link or lets a GPU in after its reset",
            advice="start nvidia-fabricmanager; its version must be the driver's",
            judge=manager,
            blind=True,
            try_it="run a copy of sleep(1) named nv-fabricmanager, and end it",
        ),
    )
