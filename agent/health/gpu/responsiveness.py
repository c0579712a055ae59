"""Rules for GPUs that do not answer NVML calls, answer with an error or slowly, or need a recovery action.

An NVML call can hang for ever. So the rules evaluate for how long unfinished calls have been waiting. Rules
for the NVML library, and for GPUs that NVML no longer lists, are in agent.health.gpu.driver.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from agent.health.gpu.rule_input import (
    GpuRuleInput,
    gpu_probation_ns,
    gpu_reading,
    hardware_rule,
    nvml_code_text,
    nvml_library_error,
)
from agent.health.gpu.xid.xid_table import RecoveryAction
from agent.health.rules import (
    OK,
    Rule,
    RuleInconclusive,
    RuleNotApplicable,
    RuleResult,
    format_duration,
    missing_reading_result,
)
from agent.model.gpu import GpuField, GpuWakeCondition, NvmlReturnCode
from agent.model.health import Blame, Finding, Repair, Severity
from agent.model.reading import Missing, is_absent
from agent.model.settings import GpuLimits
from agent.model.time import NS

NOT_ANSWERING: Final = "gpu.not_answering"
REPORTED_STEPS_S: Final = (5, 10, 30, 60, 120, 300, 600, 1800, 3600, 21_600, 86_400)
"""Waiting times at which the evidence of an open NVML call changes [s]; each change publishes a report."""
SLOW_FACTOR: Final = 10
"""Ratio of a GPU's answer time to the median of the other GPUs from which on it is slow."""
SLOW_NS: Final = 50_000_000  # faster answers are never reported as slow
MIN_SIBLINGS: Final = 2  # with one sibling, either GPU could be the slow one

HANDLED_STATUSES: Final = frozenset(
    {NvmlReturnCode.OK, NvmlReturnCode.LOST, NvmlReturnCode.RESET_REQUIRED, NvmlReturnCode.GPU_NOT_FOUND}
)
"""NVML return codes that are no error, or that another rule evaluates."""

NO_SAMPLE: Final = RuleInconclusive("needs the GPU")
"""Result of a rule about a GPU's last read if NVML does not list the GPU: nothing was read."""
FIELD_VALUES: Final[Mapping[str, tuple[GpuField, ...]]] = {
    "recovery action": (GpuField.RECOVERY_ACTION,),
    "ECC errors": (GpuField.ECC_UNCORRECTABLE, GpuField.ECC_CORRECTABLE),
    "remapped rows": (GpuField.REMAP_PENDING, GpuField.REMAP_FAILURE),
    "retired pages": (GpuField.RETIRED_SBE, GpuField.RETIRED_DBE, GpuField.RETIRED_PENDING),
    "PCIe replays": (GpuField.PCIE_REPLAY,),
    "slowdown times": (
        GpuField.SLOWED_SW_POWER,
        GpuField.SLOWED_SW_THERMAL,
        GpuField.SLOWED_HW_THERMAL,
        GpuField.SLOWED_HW_BRAKE,
    ),
}
"""Readings that show faults and that nvmlDeviceGetFieldValues returns, by kind. Every GPU supports some."""
FUNCTION_VALUES: Final[Mapping[str, tuple[GpuField, ...]]] = {
    "ECC errors by memory": (GpuField.ECC_UNCORRECTABLE_DRAM, GpuField.ECC_UNCORRECTABLE_SRAM),
    "temperature": (GpuField.TEMP, GpuField.MARGIN),
    "reasons for reduced clocks": (GpuField.CLOCK_REASONS,),
    "PCIe link": (GpuField.PCIE_WIDTH, GpuField.PCIE_GEN),
}
"""Readings that show faults and that have NVML functions of their own, by kind."""


def evaluate_recovery_action(view: GpuRuleInput) -> RuleResult:
    """The driver requests a recovery action for the GPU.

    Source: NVML field 230, driver 565 and later [0: none; else a RecoveryAction].
    """
    action = gpu_reading(view, GpuField.RECOVERY_ACTION)
    if isinstance(action, Missing):
        return missing_reading_result(
            GpuField.RECOVERY_ACTION, action, "drivers before 565 and older GPUs do not report it"
        )
    if action == RecoveryAction.NONE:
        return OK
    requested = RecoveryAction(action)
    evidence = f"the driver requests: {requested.text}"
    return Finding(
        "gpu.recovery_action", Severity.UNHEALTHY, evidence, requested.advice, repair=requested.repair
    )


def _oldest_open_call(view: GpuRuleInput) -> tuple[int, str] | None:
    """Return the start time [ns] and the name of the oldest NVML call for the GPU that has not returned.
    None: all calls have returned."""
    gpu, gpus = view.sample, view.gpu_set
    calls = []
    if gpu and gpu.call:
        calls.append((gpu.call_ns, gpu.call))
    if gpus.call and (gpu is None or not gpu.passes or gpu.status):  # the GPU waits for the library's thread
        calls.append((gpus.call_ns, gpus.call))
    return min(calls, default=None)


def _steps_ns(limits: GpuLimits) -> Iterator[int]:
    yield int(limits.deadline_s * NS)
    yield from (step * NS for step in REPORTED_STEPS_S if step > limits.deadline_s)


def evaluate_not_answering(view: GpuRuleInput) -> RuleResult:
    """An NVML call has not returned: Unknown after the first limit, Unhealthy after the second.

    Source: waiting time of the GPU's thread in NVML, or of the library's thread for which it waits [ns].
    """
    call = _oldest_open_call(view)
    if call is None:  # the end of the process that calls NVML is no answer of the GPU
        return RuleInconclusive("no process calls NVML") if view.gpu_set.process else OK
    since_ns, name = call
    waiting_ns = view.now_ns - since_ns
    step_ns = max((step for step in _steps_ns(view.limits) if step <= waiting_ns), default=None)
    if step_ns is None:
        return OK
    dead = waiting_ns >= view.limits.dead_s * NS
    evidence = f"{name} has not returned for more than {format_duration(step_ns / NS)}"
    if not dead:  # most calls return
        return Finding(NOT_ANSWERING, Severity.UNKNOWN, evidence, repair=Repair.NONE)
    return Finding(NOT_ANSWERING, Severity.UNHEALTHY, evidence)


def next_not_answering_change_ns(view: GpuRuleInput) -> int | None:
    """Return the monotonic time at which the finding about an unfinished NVML call changes [ns]. None: all
    calls have returned."""
    call = _oldest_open_call(view)
    if call is None:
        return None
    since_ns, _ = call
    changes = (since_ns + step for step in (*_steps_ns(view.limits), int(view.limits.dead_s * NS)))
    return min((change for change in changes if change > view.now_ns), default=None)


def _status_result(view: GpuRuleInput, status: int, code: str) -> RuleResult:
    """Return a finding if the last read of the GPU ended with NVML's return code ``status``.

    If the read ended without an error, or with an error that another rule reports, the result is OK. After
    any other error, and without a sample, it is inconclusive.
    """
    if view.sample is None:
        return NO_SAMPLE
    found = view.sample.status
    if found == status:
        return Finding(code, Severity.UNHEALTHY, f"NVML returned {nvml_code_text(status)}")
    return OK if found in HANDLED_STATUSES else RuleInconclusive(f"NVML returned {nvml_code_text(found)}")


def evaluate_lost_gpu(view: GpuRuleInput) -> RuleResult:
    """The GPU has fallen off the bus, or stopped responding to the driver.

    Source: NVML's return code 15 from any call on the GPU.
    """
    return _status_result(view, NvmlReturnCode.LOST, "gpu.lost")


def evaluate_reset_required(view: GpuRuleInput) -> RuleResult:
    """The driver refuses the GPU until it is reset.

    Source: NVML's return code 16 from any call on the GPU.
    """
    return _status_result(view, NvmlReturnCode.RESET_REQUIRED, "gpu.reset_required")


def evaluate_failing_calls(view: GpuRuleInput) -> RuleResult:
    """Readings fail, although neither the GPU is lost nor the library fails.

    Source: NVML's return code for the last pass as a whole.
    """
    if view.sample is None:
        return NO_SAMPLE
    status = view.sample.status
    if status in HANDLED_STATUSES:
        return OK
    if nvml_library_error(view.gpu_set):  # gpu.driver.init reports it
        return OK
    return Finding("gpu.failing", Severity.UNKNOWN, f"NVML returned {nvml_code_text(status)}")


def evaluate_slow_answers(view: GpuRuleInput) -> RuleResult:
    """The GPU answers much more slowly than its siblings, often the first sign of a hang.

    Source: time of nvmlDeviceGetFieldValues, median of 15 passes [ns], compared with the siblings' median.
    """
    if view.sample is None or not view.sample.probe_p50_ns:
        return RuleInconclusive("needs a reading")
    if len(view.siblings_p50_ns) < MIN_SIBLINGS:
        if view.gpu_set.count <= MIN_SIBLINGS:
            return RuleNotApplicable(f"fewer than {MIN_SIBLINGS} other GPUs to compare with")
        return RuleInconclusive(f"needs {MIN_SIBLINGS} other GPUs that answer")
    own_ns = view.sample.probe_p50_ns
    if own_ns < SLOW_NS or own_ns < SLOW_FACTOR * _median(view.siblings_p50_ns):
        return OK
    evidence = f"readings take at least {SLOW_NS // 1_000_000} ms, and {SLOW_FACTOR} times as long as others"
    return Finding("gpu.probe.slow", Severity.DEGRADED, evidence)


def _median(values: Sequence[int]) -> float:
    """Return the median of `values`. The module ``statistics`` would take 0.3 MiB of an agent with GPUs."""
    ascending = sorted(values)
    middle = len(ascending) // 2
    return (ascending[middle] + ascending[~middle]) / 2


def _absent_kinds(view: GpuRuleInput, kinds: Mapping[str, tuple[GpuField, ...]]) -> list[str]:
    """Return the names of the kinds of readings (keys of ``kinds``) for which the GPU has no value at all."""
    return [
        kind for kind, fields in kinds.items() if all(is_absent(gpu_reading(view, field)) for field in fields)
    ]


def evaluate_missing_readings(view: GpuRuleInput) -> RuleResult:
    """NVML lists the GPU, but reports none of the readings that every GPU has and that show most faults.

    Source: the values of nvmlDeviceGetFieldValues, all of them not supported.
    """
    if view.sample is None:
        return NO_SAMPLE
    absent = _absent_kinds(view, FIELD_VALUES)
    if len(absent) < len(FIELD_VALUES):
        return OK
    kinds = ", ".join([*absent, *_absent_kinds(view, FUNCTION_VALUES)])
    return Finding("gpu.no_readings", Severity.UNKNOWN, f"NVML reports none of these: {kinds}")


def responsiveness_rules(limits: GpuLimits) -> tuple[Rule, ...]:
    """Return the rules for a GPU's answers to NVML calls.

    The texts of the rules name the configured limits.
    """
    watch_ns = gpu_probation_ns(limits)
    return (
        hardware_rule(
            code="gpu.recovery_action",
            severity=Severity.UNHEALTHY,
            gpu_reads=(GpuWakeCondition(GpuField.RECOVERY_ACTION),),
            threshold="any action except none",
            why="the driver cannot repair the GPU while it is in use",
            advice="do what the evidence names",
            repair=Repair.RESET_DEVICE,
            evaluate=evaluate_recovery_action,
            probation_ns=watch_ns,
            try_it="gpu 0 set recovery_action=1",
            listed_first=True,
        ),
        Rule(
            code=NOT_ANSWERING,
            severity=Severity.UNKNOWN,
            blame=Blame.DRIVER,
            source="gpu",
            threshold=f"a call older than {format_duration(limits.deadline_s)}; "
            f"unhealthy after {format_duration(limits.dead_s)} (gpu.deadline, gpu.dead)",
            why="the state of the GPU is not known, and its workload probably hangs too",
            advice="read the NVRM lines in the kernel log; a call stuck in the driver ends only by reboot",
            repair=Repair.REBOOT_NODE,
            evaluate=evaluate_not_answering,
            probation_ns=watch_ns,
            valid_when_stalled=True,
            try_it="gpu 0 hang nvmlDeviceGetFieldValues 30s",
        ),
        hardware_rule(
            code="gpu.lost",
            severity=Severity.UNHEALTHY,
            threshold="NVML's return code 15, once",
            why="the GPU is not reachable; its workload has failed or will hang",
            advice="drain and reboot the node; if the GPU is lost again, reseat or replace it",
            repair=Repair.REBOOT_NODE,
            evaluate=evaluate_lost_gpu,
            probation_ns=watch_ns,
            valid_when_stalled=True,
            try_it="gpu 0 lost",
        ),
        hardware_rule(
            code="gpu.reset_required",
            severity=Severity.UNHEALTHY,
            threshold="NVML's return code 16, once",
            why="no new work can start on the GPU before a reset",
            advice="drain the GPU and reset it (nvidia-smi --gpu-reset)",
            repair=Repair.RESET_DEVICE,
            evaluate=evaluate_reset_required,
            probation_ns=watch_ns,
            valid_when_stalled=True,
            try_it="gpu 0 fail all 16",
        ),
        Rule(
            code="gpu.failing",
            severity=Severity.UNKNOWN,
            blame=Blame.DRIVER,
            source="gpu",
            threshold="any other return code for a pass as a whole",
            why="the state of the GPU is not known while its readings fail",
            advice="read the NVRM lines in the kernel log; check whether nvidia-smi works",
            repair=Repair.RELOAD_DRIVER,
            evaluate=evaluate_failing_calls,
            valid_when_stalled=True,
            try_it="gpu 0 fail nvmlDeviceGetFieldValues 999",
        ),
        Rule(
            code="gpu.no_readings",
            severity=Severity.UNKNOWN,
            blame=Blame.DRIVER,
            source="gpu",
            threshold="no value of nvmlDeviceGetFieldValues is supported",
            why="nothing shows most faults of the GPU, so that it would look healthy with any of them",
            advice="compare with nvidia-smi -q; install the libnvidia-ml.so.1 of the loaded driver version",
            repair=Repair.RELOAD_DRIVER,
            evaluate=evaluate_missing_readings,
            try_it="in the scenario of the agent's start: gpu 0 fail nvmlDeviceGetFieldValues 13",
        ),
        Rule(
            code="gpu.probe.slow",
            severity=Severity.DEGRADED,
            blame=Blame.DRIVER,
            source="gpu",
            threshold=f"{SLOW_FACTOR} times the median of the other GPUs, and {SLOW_NS // 1_000_000} ms",
            why="a GPU that answers more and more slowly often hangs next",
            advice="read the NVRM lines in the kernel log; reset the GPU when its work has ended",
            repair=Repair.RESET_DEVICE,
            evaluate=evaluate_slow_answers,
            raise_after=3,
            try_it="gpu 0 slow 60ms",
        ),
    )
