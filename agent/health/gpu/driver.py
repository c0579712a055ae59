"""Rules for the NVIDIA driver and its NVML library: errors, missing GPUs, settings, and stuck processes."""

from typing import Final

from agent.health.gpu.rule_input import (
    GpuRuleInput,
    gpu_probation_ns,
    gpu_reading,
    is_identifying_gpus,
    is_listing_gpus,
    nvml_code_text,
    nvml_library_error,
)
from agent.health.rules import (
    OK,
    Rule,
    RuleInconclusive,
    RuleNotApplicable,
    RuleResult,
    missing_reading_result,
)
from agent.model.gpu import GpuEvent, GpuField, GpuWakeCondition, NvmlReturnCode
from agent.model.health import Blame, Finding, Repair, Severity
from agent.model.machine_samples import NVIDIA_DRIVER, PASSTHROUGH_DRIVER
from agent.model.reading import Missing, SourceState
from agent.model.settings import GpuLimits
from agent.model.time import NS

NO_XID_SOURCE_S: Final = 20  # longer than the pause before a failed registration for events is retried
MAX_STUCK_LISTED: Final = 4  # a hang of one GPU blocks one process for each rank


def evaluate_nvml_process(view: GpuRuleInput) -> RuleResult:
    """The process that calls NVML ended, so that no GPU is read.

    Source: signal or exit code of the process, which the agent starts again.
    """
    if not view.gpu_set.process:
        return OK
    return Finding("gpu.driver.process", Severity.UNKNOWN, view.gpu_set.process)


def evaluate_nvml_init(view: GpuRuleInput) -> RuleResult:
    """The node has GPUs, or should have, and NVML cannot be used to read them.

    Source: NVML's return codes of nvmlInit_v2 and the calls after it; dlopen.
    """
    if view.gpu_set.nvml.state is SourceState.STARTING:
        return RuleInconclusive("NVML is being opened")
    error = nvml_library_error(view.gpu_set)
    if error in (NvmlReturnCode.OK, NvmlReturnCode.MISMATCH) or view.gpu_set.process:
        return OK
    evidence, advice, repair = f"NVML cannot be used: {nvml_code_text(error)}", "", None
    if error == NvmlReturnCode.LIBRARY_NOT_FOUND:
        repair = Repair.NONE
        advice = "install the driver's libnvidia-ml.so.1, or set its path (--nvml-library)"
        if view.gpu_set.nvml.detail:
            evidence += f": {view.gpu_set.nvml.detail}"
    elif error == NvmlReturnCode.DRIVER_NOT_LOADED:
        advice = "load the kernel module (modprobe nvidia); if that fails, read the kernel log"
    return Finding("gpu.driver.init", Severity.UNKNOWN, evidence, advice, repair=repair)


def evaluate_version_mismatch(view: GpuRuleInput) -> RuleResult:
    """The driver's libraries were updated, and the old kernel module is still loaded.

    Source: NVML's return code 18 of nvmlInit_v2.
    """
    if view.gpu_set.nvml.state is SourceState.STARTING:
        return RuleInconclusive("NVML is being opened")
    if nvml_library_error(view.gpu_set) != NvmlReturnCode.MISMATCH:
        return OK
    evidence = "library and kernel module have different driver versions"
    return Finding("gpu.driver.mismatch", Severity.UNKNOWN, evidence)


def evaluate_missing_gpu(view: GpuRuleInput) -> RuleResult:
    """NVML does not list a GPU that it listed before, or that the configuration expects.

    Source: nvmlDeviceGetCount_v2 and each GPU's UUID; ``/sys/bus/pci/devices`` for its presence on the bus.
    """
    gpu = view.sample
    has_error = nvml_library_error(view.gpu_set) != NvmlReturnCode.OK
    if gpu is not None and gpu.status != NvmlReturnCode.GPU_NOT_FOUND and not has_error:
        return OK
    if view.gpu_set.nvml.state is SourceState.STARTING:
        return RuleInconclusive("NVML is being opened")
    if has_error:
        return RuleInconclusive("NVML cannot be used")
    if gpu is None and is_listing_gpus(view.gpu_set):
        return RuleInconclusive("NVML is still listing its GPUs")
    if gpu is None and is_identifying_gpus(view.gpu_set, view.limits.dead_s, view.now_ns):
        return RuleInconclusive("NVML is still identifying its GPUs")
    evidence = f"not among the {view.gpu_set.count} GPUs of NVML"
    if view.limits.expect is not None:
        evidence += f"; {view.limits.expect} expected by configuration"
    bus = view.host.bus_gpus
    if gpu is not None and gpu.bus and isinstance(bus, tuple):
        is_present = (
            gpu.bus in bus or view.pci_function is not None
        )  # bus_gpus omits GPUs with a foreign driver
        evidence += f"; {gpu.bus} is {'still' if is_present else 'no longer'} on the PCI bus"
    return Finding("gpu.missing", Severity.UNHEALTHY, evidence)


def evaluate_unbound_gpu(view: GpuRuleInput) -> RuleResult:
    """The GPU is on the bus, but is bound to another driver or to none, so that NVML no longer lists it.

    Source: ``/sys/bus/pci/devices/<address>/driver``.
    """
    gpu, function = view.sample, view.pci_function
    if (
        gpu is not None
        and gpu.status != NvmlReturnCode.GPU_NOT_FOUND
        and not nvml_library_error(view.gpu_set)
    ):
        return OK
    if function is None:
        return RuleInconclusive("not found on the PCI bus")
    if function.driver == NVIDIA_DRIVER:
        return OK
    if not function.driver and nvml_library_error(view.gpu_set):
        return RuleInconclusive("NVML cannot be used")  # without the kernel module no GPU has a driver
    unbind = f"/sys/bus/pci/drivers/{function.driver}/unbind"
    bind = f"echo {function.address} > /sys/bus/pci/drivers/{NVIDIA_DRIVER}/bind"
    name = f"{function.address} ({function.model})" if function.model else function.address
    if not function.driver:
        evidence, advice = f"no driver is bound to {name}", bind
    else:
        evidence = f"{function.driver} is bound to {name}, not {NVIDIA_DRIVER}"
        advice = f"unless this is intended: echo {function.address} > {unbind}; {bind}"
    repair = None
    if function.driver == PASSTHROUGH_DRIVER:
        repair = Repair.NONE  # usually intended, and the virtual machine would lose its GPU
        evidence = f"{name} is assigned to a virtual machine: {PASSTHROUGH_DRIVER} is bound to it"
    return Finding("gpu.unbound", Severity.UNHEALTHY, evidence, advice, repair=repair)


def evaluate_driver_reloads(view: GpuRuleInput) -> RuleResult:
    """The driver was reloaded since the agent started, which resets its counters.

    Source: inode of ``module/nvidia`` in sysfs, and the driver's version.
    """
    again = view.gpu_set.generation - 1
    if again < 1:
        return OK
    evidence = f"{again} time{'s' if again > 1 else ''} since the agent started"
    return Finding("gpu.driver.reloaded", Severity.INFO, evidence)


def evaluate_persistence_mode(view: GpuRuleInput) -> RuleResult:
    """Persistence mode is off: the driver shuts the GPU down whenever no process uses it.

    Source: nvmlDeviceGetPersistenceMode [0 or 1].
    """
    mode = gpu_reading(view, GpuField.PERSISTENCE)
    if isinstance(mode, Missing):
        return missing_reading_result(GpuField.PERSISTENCE, mode, "the driver has no persistence mode for it")
    if mode:
        return OK
    return Finding("gpu.driver.persistence_off", Severity.INFO, "persistence mode is off")


def evaluate_stuck_processes(view: GpuRuleInput) -> RuleResult:
    """Processes hang inside the driver and cannot be killed.

    Source: processes that stay in uninterruptible sleep in the driver; procfs.
    """
    stuck = view.host.stuck
    if isinstance(stuck, Missing):
        return RuleNotApplicable("the agent may not inspect other processes (CAP_SYS_PTRACE)")
    if not stuck:
        return OK
    named = ", ".join(f"{process.name} ({process.pid})" for process in stuck[:MAX_STUCK_LISTED])
    more = f" and {len(stuck) - MAX_STUCK_LISTED} more" if len(stuck) > MAX_STUCK_LISTED else ""
    evidence = f"stuck in the driver: {named}{more}"
    return Finding("gpu.driver.stuck_process", Severity.DEGRADED, evidence)


def evaluate_xid_sources(view: GpuRuleInput) -> RuleResult:
    """The agent would miss XIDs of the GPU: it has neither NVML's events nor the kernel log.

    Source: event types for which the GPU is registered; state of the kernel log reader.
    """
    if view.sample is None:
        return RuleInconclusive("needs the GPU")
    if view.is_log_readable or view.sample.event_mask & GpuEvent.XID:
        return OK
    evidence = "neither NVML's events nor the kernel log report its XIDs"
    return Finding("gpu.driver.deaf", Severity.DEGRADED, evidence)


def driver_rules(limits: GpuLimits) -> tuple[Rule, ...]:
    """Return the rules for the driver, the NVML library and missing GPUs, with the configured limits."""
    return (
        Rule(
            code="gpu.driver.process",
            severity=Severity.UNKNOWN,
            blame=Blame.DRIVER,
            source="nvml",
            threshold="the process ended and was not started again, or has not read the GPU yet",
            why="the state of all GPUs of the machine is not known; the kernel log still reports new faults",
            advice="none if it happens once: the agent starts the process again; if it repeats, read the "
            "agent's log and the NVRM lines in the kernel log, and update or reinstall the driver",
            repair=Repair.NONE,
            evaluate=evaluate_nvml_process,
            valid_when_stalled=True,
            try_it="crash segv, or end the process drahealth-nvml",
        ),
        Rule(
            code="gpu.driver.init",
            severity=Severity.UNKNOWN,
            blame=Blame.DRIVER,
            source="nvml",
            threshold="any return code except 0 and 18, or no library",
            why="the state of all GPUs of the node is not known",
            advice="check whether nvidia-smi works; read the NVRM lines in the kernel log",
            repair=Repair.RELOAD_DRIVER,
            evaluate=evaluate_nvml_init,
            valid_when_stalled=True,
            try_it="init 9",
        ),
        Rule(
            code="gpu.driver.mismatch",
            severity=Severity.UNKNOWN,
            blame=Blame.CONFIGURATION,
            source="nvml",
            threshold="NVML's return code 18",
            why="running programs continue; new ones cannot use a GPU",
            advice="drain the node and load the new kernel module, or reboot",
            repair=Repair.RELOAD_DRIVER,
            evaluate=evaluate_version_mismatch,
            valid_when_stalled=True,
            try_it="init 18",
        ),
        Rule(
            code="gpu.missing",
            severity=Severity.UNHEALTHY,
            blame=Blame.HARDWARE,
            source="nvml",
            threshold="any GPU that NVML ever listed, or that the configuration expects (expect.gpus)",
            why="a claim may have a GPU that no program can reach",
            advice="check lspci; rescan the bus or reboot; if the GPU stays missing, reseat or replace it",
            repair=Repair.REBOOT_NODE,
            evaluate=evaluate_missing_gpu,
            probation_ns=gpu_probation_ns(limits),
            valid_when_stalled=True,
            try_it="reload gpus=7",
        ),
        Rule(
            code="gpu.unbound",
            severity=Severity.UNHEALTHY,
            blame=Blame.CONFIGURATION,
            source="pci",
            threshold="any GPU that NVML listed, that it does not list now, and that is on the bus",
            why="a claim may have a GPU that was taken away from its driver",
            advice="bind the GPU to the driver again",
            repair=Repair.RELOAD_DRIVER,
            evaluate=evaluate_unbound_gpu,
            probation_ns=gpu_probation_ns(limits),
            valid_when_stalled=True,
            listed_first=True,
            try_it="echo <address> > /sys/bus/pci/drivers/nvidia/unbind",
        ),
        Rule(
            code="gpu.driver.reloaded",
            severity=Severity.INFO,
            blame=Blame.CONFIGURATION,
            source="nvml",
            threshold="NVML initialized more than once",
            why="counters of the driver were reset; earlier faults may be repaired or hidden",
            advice="none, if the driver was updated on purpose",
            repair=Repair.NONE,
            evaluate=evaluate_driver_reloads,
            valid_when_stalled=True,
            try_it="reload driver=575.57.08",
        ),
        Rule(
            code="gpu.driver.persistence_off",
            severity=Severity.INFO,
            blame=Blame.CONFIGURATION,
            source="gpu",
            gpu_reads=(GpuWakeCondition(GpuField.PERSISTENCE),),
            threshold="mode 0",
            why="a first program waits seconds until the GPU is initialized, and error counts are lost",
            advice="run nvidia-persistenced",
            repair=Repair.NONE,
            evaluate=evaluate_persistence_mode,
            try_it="gpu 0 set persistence=0",
        ),
        Rule(
            code="gpu.driver.stuck_process",
            severity=Severity.DEGRADED,
            blame=Blame.DRIVER,
            source="host",
            threshold="any process, in several samples",
            why="the process cannot be killed, its pod cannot end, and the next process may hang too",
            advice="read /proc/<pid>/stack and the kernel log; only a reboot ends a process that stays stuck",
            repair=Repair.REBOOT_NODE,
            evaluate=evaluate_stuck_processes,
            valid_when_stalled=True,
            try_it="not with the fake NVML: needs a driver that keeps a process in state D",
        ),
        Rule(
            code="gpu.driver.deaf",
            severity=Severity.DEGRADED,
            blame=Blame.AGENT,
            source="gpu",
            threshold=f"for {NO_XID_SOURCE_S} s",
            why="an XID reports most faults of a GPU, and only once; readings continue",
            advice="let the agent read /dev/kmsg (as standard input, or with CAP_SYSLOG); see the sources in "
            "drahealth status",
            repair=Repair.NONE,
            evaluate=evaluate_xid_sources,
            valid_when_stalled=True,
            raise_ns=NO_XID_SOURCE_S * NS,
            try_it="wait 999 in the scenario of an agent that runs with --kmsg /nonexistent",
        ),
    )
