"""Rules for the library, missing GPUs, settings and stuck processes."""

from typing import Any, Final

import pytest
from gpu_samples import ABSENT, EIO, LIMITS, NOW_NS, gpu_sample, gpu_set, gpu_view, pci_sample

from agent.health.gpu.rule_input import GpuRuleInput
from agent.health.gpu.rule_state import gpu_rules
from agent.health.rules import OK, RuleInconclusive, RuleInputUnreadable, RuleNotApplicable, RuleResult
from agent.model.gpu import GpuEvent, GpuField, GpuOsSample, GpuSample, StuckProcess
from agent.model.health import Finding, Repair, Severity
from agent.model.reading import SourceState
from agent.model.settings import GpuLimits

ROWS: Final = {rule.code: rule for rule in gpu_rules(LIMITS)}
INIT: Final = "gpu.driver.init"
MISMATCH: Final = "gpu.driver.mismatch"
MISSING: Final = "gpu.missing"
UNBOUND: Final = "gpu.unbound"
DEAF: Final = "gpu.driver.deaf"
STUCK: Final = "gpu.driver.stuck_process"
RELOADED: Final = "gpu.driver.reloaded"
PERSISTENCE: Final = "gpu.driver.persistence_off"

EIGHT: Final = [gpu_sample(number=number) for number in range(8)]
SEVEN: Final = gpu_set(*EIGHT[1:])
GONE: Final = gpu_sample(status=28)
STARTING: Final = gpu_view(sample=None, gpu_set=gpu_set(state=SourceState.STARTING))
NO_LIBRARY: Final = gpu_view(sample=None, gpu_set=gpu_set(state=SourceState.ABSENT))


def failing_library(err: int) -> GpuRuleInput:
    return gpu_view(sample=None, gpu_set=gpu_set(state=SourceState.FAILING, err=err))


def view_with_stuck(*processes: tuple[int, str]) -> GpuRuleInput:
    return gpu_view(host=GpuOsSample(stuck=tuple(StuckProcess(pid, name) for pid, name in processes)))


def init_finding(text: str, advice: str = "", repair: Repair | None = None) -> Finding:
    return Finding(INIT, Severity.UNKNOWN, f"NVML cannot be used: {text}", advice, repair=repair)


def missing_finding(text: str) -> Finding:
    return Finding(MISSING, Severity.UNHEALTHY, text)


def unbound_view(driver: str, gpu: GpuSample | None = GONE, **attributes: Any) -> GpuRuleInput:
    """Return the view of a GPU that NVML no longer lists, bound to this driver on the bus."""
    return gpu_view(sample=gpu, **{"gpu_set": SEVEN, "pci_function": pci_sample(driver=driver), **attributes})


def unbound_finding(text: str, advice: str, repair: Repair | None = None) -> Finding:
    return Finding(UNBOUND, Severity.UNHEALTHY, text, advice, repair=repair)


BIND: Final = "echo 0000:1b:00.0 > /sys/bus/pci/drivers/nvidia/bind"
INSTALL: Final = "install the driver's libnvidia-ml.so.1, or set its path (--nvml-library)"
LOAD: Final = "load the kernel module (modprobe nvidia); if that fails, read the kernel log"
CASES: Final[list[tuple[str, GpuRuleInput, RuleResult]]] = [
    # --- gpu.driver.init, gpu.driver.mismatch
    (INIT, gpu_view(), OK),
    (INIT, failing_library(18), OK),
    # a code of the C core, not of NVML: more GPUs than it monitors
    (INIT, failing_library(-4100), OK),
    (INIT, failing_library(9), init_finding("DRIVER_NOT_LOADED (9)", LOAD)),
    (INIT, failing_library(13), init_finding("FUNCTION_NOT_FOUND (13)")),
    (INIT, failing_library(999), init_finding("UNKNOWN (999)")),
    (INIT, NO_LIBRARY, init_finding("LIBRARY_NOT_FOUND (12)", INSTALL, Repair.NONE)),
    (INIT, STARTING, RuleInconclusive("NVML is being opened")),
    (MISMATCH, gpu_view(), OK),
    (MISMATCH, failing_library(9), OK),
    (MISMATCH, NO_LIBRARY, OK),
    (MISMATCH, STARTING, RuleInconclusive("NVML is being opened")),
    (MISMATCH, failing_library(18),
     Finding(MISMATCH, Severity.UNKNOWN, "library and kernel module have different driver versions")),
    # --- gpu.unbound
    (UNBOUND, unbound_view("nvidia"), OK),
    (UNBOUND, unbound_view("", gpu_sample()), OK),  # a listed GPU has a driver, whatever the bus reports
    (UNBOUND, unbound_view("", gpu_sample(status=15)), OK),
    (UNBOUND, gpu_view(sample=GONE, gpu_set=SEVEN), RuleInconclusive("not found on the PCI bus")),
    (UNBOUND, unbound_view(""), unbound_finding("no driver is bound to 0000:1b:00.0", BIND)),
    (UNBOUND, unbound_view("", pci_function=pci_sample(driver="", model="GH100 [H100 SXM5 80GB]")),
     unbound_finding("no driver is bound to 0000:1b:00.0 (GH100 [H100 SXM5 80GB])", BIND)),
    (UNBOUND, unbound_view("", None),
     unbound_finding("no driver is bound to 0000:1b:00.0", BIND)),  # known from the checkpoint
    (UNBOUND, unbound_view("nouveau"),
     unbound_finding("nouveau is bound to 0000:1b:00.0, not nvidia",
           f"unless this is intended: echo 0000:1b:00.0 > /sys/bus/pci/drivers/nouveau/unbind; {BIND}")),
    (UNBOUND, unbound_view("vfio-pci"),
     unbound_finding("0000:1b:00.0 is assigned to a virtual machine: vfio-pci is bound to it",
           f"unless this is intended: echo 0000:1b:00.0 > /sys/bus/pci/drivers/vfio-pci/unbind; {BIND}",
           Repair.NONE)),
    (UNBOUND, unbound_view("", gpu_set=gpu_set(state=SourceState.FAILING, err=9)),
     RuleInconclusive("NVML cannot be used")),
    (UNBOUND, unbound_view("vfio-pci", gpu_set=gpu_set(state=SourceState.FAILING, err=9)),
     unbound_finding("0000:1b:00.0 is assigned to a virtual machine: vfio-pci is bound to it",
           f"unless this is intended: echo 0000:1b:00.0 > /sys/bus/pci/drivers/vfio-pci/unbind; {BIND}",
           Repair.NONE)),
    # --- gpu.missing
    (MISSING, gpu_view(), OK),
    (MISSING, gpu_view(sample=gpu_sample(status=15)), OK),  # a lost GPU still counts
    (MISSING, gpu_view(sample=None, gpu_set=SEVEN), missing_finding("not among the 7 GPUs of NVML")),
    (MISSING, gpu_view(sample=None, gpu_set=SEVEN, limits=GpuLimits(expect=8)),
     missing_finding("not among the 7 GPUs of NVML; 8 expected by configuration")),
    (MISSING, gpu_view(sample=GONE, gpu_set=SEVEN),
     missing_finding("not among the 7 GPUs of NVML; 0000:1b:00.0 is still on the PCI bus")),
    (MISSING, gpu_view(sample=GONE, gpu_set=SEVEN, host=GpuOsSample(bus_gpus=("0000:2b:00.0",))),
     missing_finding("not among the 7 GPUs of NVML; 0000:1b:00.0 is no longer on the PCI bus")),
    (MISSING, unbound_view("vfio-pci", host=GpuOsSample(bus_gpus=("0000:2b:00.0",))),
     missing_finding("not among the 7 GPUs of NVML; 0000:1b:00.0 is still on the PCI bus")),
    (MISSING, gpu_view(sample=GONE, gpu_set=SEVEN, host=GpuOsSample(bus_gpus=EIO)),
     missing_finding("not among the 7 GPUs of NVML")),
    (MISSING, STARTING, RuleInconclusive("NVML is being opened")),
    (MISSING, NO_LIBRARY, RuleInconclusive("NVML cannot be used")),
    (MISSING, failing_library(9), RuleInconclusive("NVML cannot be used")),
    (MISSING, gpu_view(gpu_set=gpu_set(*EIGHT, err=999)), RuleInconclusive("NVML cannot be used")),
    (MISSING, gpu_view(sample=None, gpu_set=gpu_set(*EIGHT[1:], call="nvmlDeviceGetCount_v2", call_ns=NOW_NS)),  # noqa: E501
     RuleInconclusive("NVML is still listing its GPUs")),
    # --- gpu.driver.reloaded
    (RELOADED, gpu_view(), OK),
    (RELOADED, NO_LIBRARY._replace(gpu_set=gpu_set(generation=0)), OK),
    (RELOADED, gpu_view(gpu_set=gpu_set(generation=2)),
     Finding(RELOADED, Severity.INFO, "1 time since the agent started")),
    (RELOADED, gpu_view(gpu_set=gpu_set(generation=4)),
     Finding(RELOADED, Severity.INFO, "3 times since the agent started")),
    # --- gpu.driver.persistence_off
    (PERSISTENCE, gpu_view(), OK),
    (PERSISTENCE, gpu_view({GpuField.PERSISTENCE: 0}),
     Finding(PERSISTENCE, Severity.INFO, "persistence mode is off")),
    (PERSISTENCE, gpu_view({GpuField.PERSISTENCE: EIO}), RuleInputUnreadable("persistence", EIO)),
    (PERSISTENCE, gpu_view({GpuField.PERSISTENCE: ABSENT}),
     RuleNotApplicable("the driver has no persistence mode for it")),
    # --- gpu.driver.deaf
    (DEAF, gpu_view(is_log_readable=True), OK),
    (DEAF, gpu_view(is_log_readable=False, sample=gpu_sample(event_mask=int(GpuEvent.XID))), OK),
    (DEAF, gpu_view(is_log_readable=False, sample=gpu_sample(event_mask=int(GpuEvent.DOUBLE_BIT_ECC))),
     Finding(DEAF, Severity.DEGRADED, "neither NVML's events nor the kernel log report its XIDs")),
    (DEAF, gpu_view(is_log_readable=False, sample=None), RuleInconclusive("needs the GPU")),
    # --- gpu.driver.stuck_process
    (STUCK, view_with_stuck(), OK),
    (
        STUCK,
        gpu_view(host=GpuOsSample(stuck=ABSENT)),
        RuleNotApplicable("the agent may not inspect other processes (CAP_SYS_PTRACE)"),
    ),
    (STUCK, view_with_stuck((12, "python")),
     Finding(STUCK, Severity.DEGRADED, "stuck in the driver: python (12)")),
    (STUCK, view_with_stuck(*((pid, "rank") for pid in (1, 2, 3, 4))),
     Finding(STUCK, Severity.DEGRADED, "stuck in the driver: rank (1), rank (2), rank (3), rank (4)")),
    (STUCK, view_with_stuck(*((pid, "rank") for pid in range(1, 9))),
     Finding(STUCK, Severity.DEGRADED,
             "stuck in the driver: rank (1), rank (2), rank (3), rank (4) and 4 more")),
    (STUCK, gpu_view(sample=None, host=GpuOsSample(stuck=(StuckProcess(5, "nvidia-smi"),))),
     Finding(STUCK, Severity.DEGRADED, "stuck in the driver: nvidia-smi (5)")),
]  # fmt: skip


@pytest.mark.parametrize(("code", "view", "answer"), CASES)
def test_rule_returns_expected_result_for_view(code: str, view: GpuRuleInput, answer: RuleResult) -> None:
    assert ROWS[code].evaluate(view) == answer


@pytest.mark.parametrize("err", [1, 9, 12, 13, 18, 999])
def test_unusable_library_is_exactly_one_cause(err: int) -> None:
    view = gpu_view(sample=gpu_sample(status=err), gpu_set=gpu_set(err=err, state=SourceState.FAILING))
    answers = (rule.evaluate(view) for rule in gpu_rules(LIMITS) if rule.valid_when_stalled)
    found = [answer.code for answer in answers if isinstance(answer, Finding)]
    assert found == [MISMATCH if err == 18 else INIT]
