"""Rules for GPUs that hang, are lost, need a recovery action or slow down: limits and texts."""

from typing import Any, Final

import pytest
from gpu_samples import ABSENT, EIO, LIMITS, NOW_NS, T4, gpu_sample, gpu_set, gpu_view, hanging_view

from agent.health.gpu.responsiveness import FIELD_VALUES, next_not_answering_change_ns
from agent.health.gpu.rule_input import GpuRuleInput
from agent.health.gpu.rule_state import gpu_rules
from agent.health.rules import OK, RuleInconclusive, RuleInputUnreadable, RuleNotApplicable, RuleResult
from agent.model.gpu import GpuField, NvmlReturnCode
from agent.model.health import Finding, Repair, Severity
from agent.model.reading import SourceState
from agent.model.settings import GpuLimits
from agent.model.time import NS

ROWS: Final = {rule.code: rule for rule in gpu_rules(LIMITS)}
MS: Final = 1_000_000
ACTION: Final = "gpu.recovery_action"
SILENT: Final = "gpu.not_answering"
SLOW: Final = "gpu.probe.slow"


def silence(text: str, severity: Severity = Severity.UNKNOWN) -> Finding:
    evidence = f"nvmlDeviceGetFieldValues has not returned for more than {text}"
    return Finding(SILENT, severity, evidence, repair=Repair.NONE if severity is Severity.UNKNOWN else None)


def status(code: int, **attributes: Any) -> GpuRuleInput:
    return gpu_view(sample=gpu_sample(status=code), **attributes)


def probe(own_ns: int, *others_ns: int) -> GpuRuleInput:
    return gpu_view(sample=gpu_sample(probe_p50_ns=own_ns), siblings_p50_ns=others_ns)


OPENING: Final = gpu_view(
    sample=None, gpu_set=gpu_set(state=SourceState.STARTING, call="nvmlInit_v2", call_ns=NOW_NS - 7 * NS)
)
PROBE_BAD: Final = Finding(
    SLOW, Severity.DEGRADED, "readings take at least 50 ms, and 10 times as long as others"
)
BLANK: Final = "gpu.no_readings"
NO_FIELDS: Final = {field: ABSENT for fields in FIELD_VALUES.values() for field in fields}
FIELDS_TEXT: Final = "recovery action, ECC errors, remapped rows, retired pages, PCIe replays, slowdown times"


def blank_finding(kinds: str) -> Finding:
    return Finding(BLANK, Severity.UNKNOWN, f"NVML reports none of these: {kinds}")


CASES: Final[list[tuple[str, GpuRuleInput, RuleResult]]] = [
    # --- gpu.recovery_action
    (ACTION, gpu_view(), OK),
    (ACTION, gpu_view({GpuField.RECOVERY_ACTION: 1}),
     Finding(ACTION, Severity.UNHEALTHY, "the driver requests: gpu reset",
             "drain the GPU and reset it (nvidia-smi --gpu-reset)", repair=Repair.RESET_DEVICE)),
    (ACTION, gpu_view({GpuField.RECOVERY_ACTION: 2}),
     Finding(ACTION, Severity.UNHEALTHY, "the driver requests: node reboot", "drain and reboot the node",
             repair=Repair.REBOOT_NODE)),
    (ACTION, gpu_view({GpuField.RECOVERY_ACTION: EIO}), RuleInputUnreadable("recovery_action", EIO)),
    (ACTION, gpu_view({GpuField.RECOVERY_ACTION: ABSENT}),
     RuleNotApplicable("drivers before 565 and older GPUs do not report it")),
    # --- gpu.no_readings
    (BLANK, gpu_view(), OK),
    (BLANK, gpu_view(readings=T4), OK),
    (BLANK, gpu_view({**NO_FIELDS, GpuField.PCIE_REPLAY: 0}), OK),
    (BLANK, gpu_view({**NO_FIELDS, GpuField.PCIE_REPLAY: EIO}), OK),  # gpu.pcie.replay.unreadable
    (BLANK, gpu_view(NO_FIELDS), blank_finding(FIELDS_TEXT)),
    (BLANK, gpu_view(dict.fromkeys(GpuField, ABSENT)),
     blank_finding(f"{FIELDS_TEXT}, ECC errors by memory, temperature, "
                   "reasons for reduced clocks, PCIe link")),
    (BLANK, gpu_view(sample=None), RuleInconclusive("needs the GPU")),
    # --- gpu.not_answering
    (SILENT, gpu_view(), OK),
    (SILENT, hanging_view(4.999), OK),
    (SILENT, hanging_view(5), silence("5 s")),
    (SILENT, hanging_view(9.999), silence("5 s")),
    (SILENT, hanging_view(10), silence("10 s")),
    (SILENT, hanging_view(59.999), silence("30 s")),
    (SILENT, hanging_view(60), silence("1 min", Severity.UNHEALTHY)),
    (SILENT, hanging_view(299), silence("2 min", Severity.UNHEALTHY)),
    (SILENT, hanging_view(3600), silence("1 h", Severity.UNHEALTHY)),
    (SILENT, hanging_view(90_000), silence("1 d", Severity.UNHEALTHY)),
    (SILENT, hanging_view(7, limits=GpuLimits(deadline_s=8)), OK),
    (SILENT, hanging_view(9, limits=GpuLimits(deadline_s=8)), silence("8 s")),
    (SILENT, hanging_view(11, limits=GpuLimits(deadline_s=8)), silence("10 s")),
    (SILENT, hanging_view(0.5, limits=GpuLimits(deadline_s=0.25)), silence("0.25 s")),
    (SILENT, hanging_view(45, limits=GpuLimits(dead_s=45)), silence("30 s", Severity.UNHEALTHY)),
    (SILENT, OPENING, Finding(SILENT, Severity.UNKNOWN, "nvmlInit_v2 has not returned for more than 5 s",
                              repair=Repair.NONE)),
    # the library's thread looks at the count now and then: no affair of a GPU that answers
    (SILENT, gpu_view(gpu_set=gpu_set(call="nvmlInit_v2", call_ns=NOW_NS - 7 * NS)), OK),
    (SILENT, gpu_view(gpu_set=gpu_set(process="the NVML process was killed by SIGSEGV")),
     RuleInconclusive("no process calls NVML")),
    # --- gpu.lost, gpu.reset_required, gpu.failing
    ("gpu.lost", gpu_view(), OK),
    ("gpu.lost", gpu_view(sample=None), RuleInconclusive("needs the GPU")),
    ("gpu.lost", status(NvmlReturnCode.RESET_REQUIRED), OK),
    ("gpu.lost", status(NvmlReturnCode.LOST),
     Finding("gpu.lost", Severity.UNHEALTHY, "NVML returned GPU_IS_LOST (15)")),
    ("gpu.lost", status(NvmlReturnCode.UNINITIALIZED), RuleInconclusive("NVML returned UNINITIALIZED (1)")),
    ("gpu.reset_required", gpu_view(), OK),
    ("gpu.reset_required", gpu_view(sample=None), RuleInconclusive("needs the GPU")),
    ("gpu.reset_required", status(NvmlReturnCode.LOST), OK),
    ("gpu.reset_required", status(NvmlReturnCode.RESET_REQUIRED),
     Finding("gpu.reset_required", Severity.UNHEALTHY, "NVML returned RESET_REQUIRED (16)")),
    ("gpu.failing", gpu_view(), OK),
    ("gpu.failing", gpu_view(sample=None), RuleInconclusive("needs the GPU")),
    *[("gpu.failing", status(code), OK)
      for code in (NvmlReturnCode.LOST, NvmlReturnCode.RESET_REQUIRED, NvmlReturnCode.GPU_NOT_FOUND)],
    ("gpu.failing", status(NvmlReturnCode.UNKNOWN),
     Finding("gpu.failing", Severity.UNKNOWN, "NVML returned UNKNOWN (999)")),
    ("gpu.failing", status(77), Finding("gpu.failing", Severity.UNKNOWN, "NVML returned unknown code 77")),
    ("gpu.failing", status(NvmlReturnCode.DRIVER_NOT_LOADED),
     Finding("gpu.failing", Severity.UNKNOWN, "NVML returned DRIVER_NOT_LOADED (9)")),
    # gpu.driver.init reports it
    ("gpu.failing", status(9, gpu_set=gpu_set(err=9, state=SourceState.FAILING)), OK),
    # --- gpu.probe.slow
    (SLOW, gpu_view(), OK),
    (SLOW, probe(50 * MS, 5 * MS, 5 * MS), PROBE_BAD),
    (SLOW, probe(50 * MS - 1, 5 * MS, 5 * MS), OK),
    (SLOW, probe(50 * MS, 5 * MS + 1, 5 * MS), OK),
    (SLOW, probe(50 * MS, 1 * MS, 1 * MS, 900 * MS), PROBE_BAD),  # another one that is slow hides nothing
    (SLOW, probe(0, 5 * MS, 5 * MS), RuleInconclusive("needs a reading")),
    (SLOW, probe(50 * MS, 5 * MS), RuleInconclusive("needs 2 other GPUs that answer")),
    (SLOW, gpu_view(siblings_p50_ns=(), gpu_set=gpu_set(gpu_sample())),
     RuleNotApplicable("fewer than 2 other GPUs to compare with")),
]  # fmt: skip


@pytest.mark.parametrize(("code", "view", "answer"), CASES)
def test_rule_returns_expected_result_for_view(code: str, view: GpuRuleInput, answer: RuleResult) -> None:
    assert ROWS[code].evaluate(view) == answer


def test_recovery_action_is_the_first_rule() -> None:
    assert gpu_rules(LIMITS)[0].code == ACTION


def test_unknown_recovery_action_is_unhealthy() -> None:
    answer = ROWS[ACTION].evaluate(gpu_view({GpuField.RECOVERY_ACTION: 12}))
    assert isinstance(answer, Finding)
    assert answer.severity is Severity.UNHEALTHY
    assert "12" in answer.advice


@pytest.mark.parametrize("limits", [LIMITS, GpuLimits(deadline_s=2, dead_s=45), GpuLimits(deadline_s=7)])
def test_not_answering_result_changes_exactly_at_next_step(limits: GpuLimits) -> None:
    view = hanging_view(0, limits=limits)
    judge = ROWS[SILENT].evaluate
    steps = 0
    while (step_ns := next_not_answering_change_ns(view)) is not None:
        assert step_ns > view.now_ns
        assert judge(view._replace(now_ns=step_ns - 1)) == judge(view)
        later = view._replace(now_ns=step_ns)
        assert judge(later) != judge(view)
        view, steps = later, steps + 1
    assert steps >= 11
    assert judge(view._replace(now_ns=10**18)) == judge(view)


def test_gpu_without_open_call_has_no_next_step() -> None:
    assert next_not_answering_change_ns(gpu_view()) is None


def test_older_of_two_calls_decides_waiting_time() -> None:
    gpu = gpu_sample(status=9, call="nvmlDeviceGetHandleByUUID", call_ns=NOW_NS - 6 * NS)
    gpus = gpu_set(gpu, call="nvmlInit_v2", call_ns=NOW_NS - 61 * NS)
    answer = ROWS[SILENT].evaluate(gpu_view(sample=gpu, gpu_set=gpus))
    assert answer == Finding(SILENT, Severity.UNHEALTHY, "nvmlInit_v2 has not returned for more than 1 min")
