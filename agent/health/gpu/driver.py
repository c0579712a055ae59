"""The driver as a whole, as each GPU feels it: the library, the count of GPUs, settings, stuck processes.

Whether a GPU that NVML counts answers is in agent.health.gpu.answers. What is judged here needs no answer of
the GPU, but for its persistence mode.
"""

from typing import Final

from agent.health.catalog import Rule
from agent.health.gpu.common import is_opening, library_error, nvml_name, probation_ns, read
from agent.health.gpu.view import GpuView
from agent.health.rules import OK, RuleNotApplicable, RuleNotEvaluated, RuleResult, lacking
from agent.model.gpu import GpuEvent, GpuField, Status
from agent.model.health import Blame, Finding, Severity
from agent.model.pci import GIVEN_AWAY
from agent.model.reading import Missing
from agent.model.settings import GpuLimits
from agent.model.source import SourceState
from agent.model.time import NS
from agent.model.wake import GpuWake

DEAF_S: Final = 20  # a registration that failed is tried again within
DRIVER: Final = "nvidia"
STUCK_NAMED: Final = 4  # a hang of one GPU holds a process per rank: the first few tell who


def init(view: GpuView) -> RuleResult:
    """There are GPUs, or should be, and NVML cannot be used to read them.

    Source: NVML's return code of nvmlInit_v2 and of what follows it; dlopen.
    """
    if view.gpus.nvml.state is SourceState.STARTING:
        return RuleNotEvaluated("NVML is being opened")
    error = library_error(view.gpus)
    if error in (Status.OK, Status.MISMATCH):
        return OK
    advice = ""
    if error == Status.LIBRARY_NOT_FOUND:
        advice = "install the driver's libnvidia-ml.so.1, or name it (--nvml-library)"
    elif error == Status.DRIVER_NOT_LOADED:
        advice = "load the kernel module (modprobe nvidia); if that fails, the kernel log says why"
    return Finding("gpu.driver.init", Severity.UNKNOWN, f"NVML cannot be used: {nvml_name(error)}", advice)


def mismatch(view: GpuView) -> RuleResult:
    """The driver's libraries were updated under a kernel module that still runs.

    Source: NVML's return code 18 of nvmlInit_v2.
    """
    if view.gpus.nvml.state is SourceState.STARTING:
        return RuleNotEvaluated("NVML is being opened")
    if library_error(view.gpus) != Status.MISMATCH:
        return OK
    evidence = "library and kernel module are of different driver versions"
    return Finding("gpu.driver.mismatch", Severity.UNKNOWN, evidence)


def missing(view: GpuView) -> RuleResult:
    """A GPU that was there, or that the configuration expects, is no longer among those that NVML counts.

    Source: nvmlDeviceGetCount_v2 and each GPU's UUID; ``/sys/bus/pci/devices`` for whether the bus has it.
    """
    gpu = view.gpu
    if gpu is not None and gpu.status != Status.GPU_NOT_FOUND:
        return OK
    if view.gpus.nvml.state is SourceState.STARTING:
        return RuleNotEvaluated("NVML is being opened")
    if library_error(view.gpus):
        return RuleNotEvaluated("NVML cannot be used")
    if gpu is None and is_opening(view.gpus):
        return RuleNotEvaluated("NVML is being asked for its GPUs")
    evidence = f"not among the {view.gpus.count} GPUs that NVML counts"
    if view.limits.expect is not None:
        evidence += f"; {view.limits.expect} expected by configuration"
    bus = view.host.bus_gpus
    if gpu is not None and gpu.bus and isinstance(bus, tuple):
        is_there = gpu.bus in bus or view.pci is not None  # the first are those that a driver here may have
        evidence += f"; {gpu.bus} is {'still on' if is_there else 'gone from'} the PCI bus"
    return Finding("gpu.missing", Severity.UNHEALTHY, evidence)


def unbound(view: GpuView) -> RuleResult:
    """The GPU is on the bus, but NVML, which counted it before, cannot: another driver has it, or none.

    Source: ``/sys/bus/pci/devices/<address>/driver``.
    """
    gpu, function = view.gpu, view.pci
    if gpu is not None and gpu.status != Status.GPU_NOT_FOUND and not library_error(view.gpus):
        return OK
    if function is None:
        return RuleNotEvaluated("nobody has seen it on the PCI bus")
    if function.driver == DRIVER:
        return OK
    if not function.driver and library_error(view.gpus):
        return RuleNotEvaluated("NVML cannot be used")  # without the kernel module no GPU has a driver
    unbind = f"/sys/bus/pci/drivers/{function.driver}/unbind"
    bind = f"echo {function.address} > /sys/bus/pci/drivers/{DRIVER}/bind"
    what = f"{function.address} ({function.model})" if function.model else function.address
    if not function.driver:
        evidence, advice = f"no driver is bound to {what}", bind
    else:
        evidence = f"{function.driver} is bound to {what}, not {DRIVER}"
        advice = f"unless that is wanted: echo {function.address} > {unbind}; {bind}"
    if function.driver == GIVEN_AWAY:
        evidence = f"{what} is given to a virtual machine: {GIVEN_AWAY} is bound to it"
    return Finding("gpu.unbound", Severity.UNHEALTHY, evidence, advice)


def reloaded(view: GpuView) -> RuleResult:
    """The driver was loaded anew since the agent started. Counters that start at its load began again.

    Source: how often NVML had to be initialised.
    """
    again = view.gpus.generation - 1
    if again < 1:
        return OK
    evidence = f"{again} time{'s' if again > 1 else ''} since the agent started"
    return Finding("gpu.driver.reloaded", Severity.INFO, evidence)


def persistence_off(view: GpuView) -> RuleResult:
    """The driver lets go of the GPU whenever nobody uses it.

    Source: nvmlDeviceGetPersistenceMode [0 or 1].
    """
    mode = read(view, GpuField.PERSISTENCE)
    if isinstance(mode, Missing):
        return lacking(GpuField.PERSISTENCE, mode, "the driver has no persistence mode for it")
    if mode:
        return OK
    return Finding("gpu.driver.persistence_off", Severity.INFO, "persistence mode is off")


def stuck_process(view: GpuView) -> RuleResult:
    """Processes are held inside the driver and cannot be ended.

    Source: processes in uninterruptible sleep in the driver through several looks; psutil.
    """
    stuck = view.host.stuck
    if isinstance(stuck, Missing):
        return RuleNotApplicable("the agent may not look into other processes (CAP_SYS_PTRACE)")
    if not stuck:
        return OK
    named = ", ".join(f"{process.name} ({process.pid})" for process in stuck[:STUCK_NAMED])
    more = f" and {len(stuck) - STUCK_NAMED} more" if len(stuck) > STUCK_NAMED else ""
    evidence = f"held in the driver: {named}{more}"
    return Finding("gpu.driver.stuck_process", Severity.DEGRADED, evidence)


def deaf(view: GpuView) -> RuleResult:
    """Nobody would hear of an XID: neither NVML's events nor the kernel log tell of the GPU.

    Source: the event types that the GPU is registered for; the state of the kernel log's reader.
    """
    if view.gpu is None:
        return RuleNotEvaluated("needs the GPU")
    if view.log_read or view.gpu.event_mask & GpuEvent.XID:
        return OK
    evidence = "neither NVML's events nor the kernel log tell of its XIDs"
    return Finding("gpu.driver.deaf", Severity.DEGRADED, evidence)


def rows(limits: GpuLimits) -> tuple[Rule, ...]:
    """The rows of these rules."""
    return (
        Rule(
            code="gpu.driver.init",
            severity=Severity.UNKNOWN,
            blame=Blame.DRIVER,
            source="nvml",
            threshold="any return code but 0 and 18, or no library",
            why="nothing is known of any GPU of the node",
            advice="see whether nvidia-smi answers, and what the kernel log says of NVRM",
            judge=init,
            blind=True,
            try_it="init 9",
        ),
        Rule(
            code="gpu.driver.mismatch",
            severity=Severity.UNKNOWN,
            blame=Blame.CONFIGURATION,
            source="nvml",
            threshold="NVML's return code 18",
            why="what runs goes on; nothing new can use a GPU",
            advice="drain the node and load the new kernel module, or reboot",
            judge=mismatch,
            blind=True,
            try_it="init 18",
        ),
        Rule(
            code="gpu.missing",
            severity=Severity.UNHEALTHY,
            blame=Blame.HARDWARE,
            source="nvml",
            threshold="any GPU that was there at start, or that the configuration expects (expect.gpus)",
            why="a claim may hold a GPU that nobody can reach",
            advice="look for it in lspci; rescan the bus or reboot; if it stays away reseat or replace it",
            judge=missing,
            probation_ns=probation_ns(limits),
            blind=True,
            try_it="reload gpus=7",
        ),
        Rule(
            code="gpu.unbound",
            severity=Severity.UNHEALTHY,
            blame=Blame.CONFIGURATION,
            source="pci",
            threshold="any GPU that NVML counted, that it does not count now, and that is on the bus",
            why="a claim may hold a GPU that somebody took away from its driver",
            advice="bind it to the driver again",
            judge=unbound,
            probation_ns=probation_ns(limits),
            blind=True,
            leads=True,
            try_it="echo <address> > /sys/bus/pci/drivers/nvidia/unbind",
        ),
        Rule(
            code="gpu.driver.reloaded",
            severity=Severity.INFO,
            blame=Blame.CONFIGURATION,
            source="nvml",
            threshold="NVML initialised more than once",
            why="counts since the driver was loaded began again; faults of before may be gone or hidden",
            advice="nothing, if the driver was updated on purpose",
            judge=reloaded,
            blind=True,
            try_it="reload driver=575.57.08",
        ),
        Rule(
            code="gpu.driver.persistence_off",
            severity=Severity.INFO,
            blame=Blame.CONFIGURATION,
            source="gpu",
            gpu_reads=(GpuWake(GpuField.PERSISTENCE),),
            threshold="mode 0",
            why="each first user waits seconds while the GPU is set up, and error counts are forgotten",
            advice="run nvidia-persistenced",
            judge=persistence_off,
            try_it="gpu 0 set persistence=0",
        ),
        Rule(
            code="gpu.driver.stuck_process",
            severity=Severity.DEGRADED,
            blame=Blame.DRIVER,
            source="host",
            threshold="any process, in several looks",
            why="it cannot be killed, its pod cannot end, and the driver may hang for the next one too",
            advice="look at /proc/<pid>/stack and the kernel log; what stays held ends with a reboot only",
            judge=stuck_process,
            blind=True,
            try_it="no fake: it takes a driver that holds a process in state D",
        ),
        Rule(
            code="gpu.driver.deaf",
            severity=Severity.DEGRADED,
            blame=Blame.AGENT,
            source="gpu",
            threshold=f"for {DEAF_S} s",
            why="most faults of a GPU are told of once, by an XID; the rest is read all the same",
            advice="let the agent read /dev/kmsg (CAP_SYSLOG); see the sources in drahealth status",
            judge=deaf,
            blind=True,
            raise_ns=DEAF_S * NS,
            try_it="wait 999 in the scenario of an agent that runs with --kmsg /nonexistent",
        ),
    )
