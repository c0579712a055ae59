"""The library, the count of GPUs, settings and stuck processes: what is told, and what is left to others."""

from typing import Any, Final

import pytest
from gpu_samples import ABSENT, EIO, LIMITS, NOW_NS, gpu_sample, gpu_set, gpu_view, pci_sample

from agent.health.gpu.catalog import gpu_rules
from agent.health.gpu.view import GpuView
from agent.health.rules import OK, RuleNotApplicable, RuleNotEvaluated, RuleResult, Unreadable
from agent.model.gpu import GpuEvent, GpuField, GpuHost, GpuSample, StuckProcess
from agent.model.health import Finding, Severity
from agent.model.settings import GpuLimits
from agent.model.source import SourceState

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
STARTING: Final = gpu_view(gpu=None, gpus=gpu_set(state=SourceState.STARTING))
NO_LIBRARY: Final = gpu_view(gpu=None, gpus=gpu_set(state=SourceState.ABSENT))


def broken(err: int) -> GpuView:
    return gpu_view(gpu=None, gpus=gpu_set(state=SourceState.FAILING, err=err))


def stuck(*processes: tuple[int, str]) -> GpuView:
    return gpu_view(host=GpuHost(stuck=tuple(StuckProcess(pid, name) for pid, name in processes)))


def unusable(text: str, advice: str = "") -> Finding:
    return Finding(INIT, Severity.UNKNOWN, f"NVML cannot be used: {text}", advice)


def gone(text: str) -> Finding:
    return Finding(MISSING, Severity.UNHEALTHY, text)


def taken(driver: str, gpu: GpuSample | None = GONE, **attributes: Any) -> GpuView:
    """A GPU that NVML no longer counts and that is on the bus, bound to this driver."""
    return gpu_view(gpu=gpu, **{"gpus": SEVEN, "pci": pci_sample(driver=driver), **attributes})


def given(text: str, advice: str) -> Finding:
    return Finding(UNBOUND, Severity.UNHEALTHY, text, advice)


BIND: Final = "echo 0000:1b:00.0 > /sys/bus/pci/drivers/nvidia/bind"
INSTALL: Final = "install the driver's libnvidia-ml.so.1, or name it (--nvml-library)"
LOAD: Final = "load the kernel module (modprobe nvidia); if that fails, the kernel log says why"
CASES: Final[list[tuple[str, GpuView, RuleResult]]] = [
    # --- gpu.driver.init, gpu.driver.mismatch
    (INIT, gpu_view(), OK),
    (INIT, broken(18), OK),
    (INIT, broken(-4100), OK),  # the core's own word of a library that works: more GPUs than are watched
    (INIT, broken(9), unusable("DRIVER_NOT_LOADED (9)", LOAD)),
    (INIT, broken(13), unusable("FUNCTION_NOT_FOUND (13)")),
    (INIT, broken(999), unusable("UNKNOWN (999)")),
    (INIT, NO_LIBRARY, unusable("LIBRARY_NOT_FOUND (12)", INSTALL)),
    (INIT, STARTING, RuleNotEvaluated("NVML is being opened")),
    (MISMATCH, gpu_view(), OK),
    (MISMATCH, broken(9), OK),
    (MISMATCH, NO_LIBRARY, OK),
    (MISMATCH, STARTING, RuleNotEvaluated("NVML is being opened")),
    (MISMATCH, broken(18),
     Finding(MISMATCH, Severity.UNKNOWN, "library and kernel module are of different driver versions")),
    # --- gpu.unbound
    (UNBOUND, taken("nvidia"), OK),
    (UNBOUND, taken("", gpu_sample()), OK),  # whoever is counted has a driver, whatever the bus says
    (UNBOUND, taken("", gpu_sample(status=15)), OK),
    (UNBOUND, gpu_view(gpu=GONE, gpus=SEVEN), RuleNotEvaluated("nobody has seen it on the PCI bus")),
    (UNBOUND, taken(""), given("no driver is bound to 0000:1b:00.0", BIND)),
    (UNBOUND, taken("", pci=pci_sample(driver="", model="GH100 [H100 SXM5 80GB]")),
     given("no driver is bound to 0000:1b:00.0 (GH100 [H100 SXM5 80GB])", BIND)),
    (UNBOUND, taken("", None), given("no driver is bound to 0000:1b:00.0", BIND)),  # known from another day
    (UNBOUND, taken("nouveau"),
     given("nouveau is bound to 0000:1b:00.0, not nvidia",
           f"unless that is wanted: echo 0000:1b:00.0 > /sys/bus/pci/drivers/nouveau/unbind; {BIND}")),
    (UNBOUND, taken("vfio-pci"),
     given("0000:1b:00.0 is given to a virtual machine: vfio-pci is bound to it",
           f"unless that is wanted: echo 0000:1b:00.0 > /sys/bus/pci/drivers/vfio-pci/unbind; {BIND}")),
    (UNBOUND, taken("", gpus=gpu_set(state=SourceState.FAILING, err=9)), RuleNotEvaluated("NVML cannot be used")),
    (UNBOUND, taken("vfio-pci", gpus=gpu_set(state=SourceState.FAILING, err=9)),
     given("0000:1b:00.0 is given to a virtual machine: vfio-pci is bound to it",
           f"unless that is wanted: echo 0000:1b:00.0 > /sys/bus/pci/drivers/vfio-pci/unbind; {BIND}")),
    # --- gpu.missing
    (MISSING, gpu_view(), OK),
    (MISSING, gpu_view(gpu=gpu_sample(status=15)), OK),  # a lost GPU still counts
    (MISSING, gpu_view(gpu=None, gpus=SEVEN), gone("not among the 7 GPUs that NVML counts")),
    (MISSING, gpu_view(gpu=None, gpus=SEVEN, limits=GpuLimits(expect=8)),
     gone("not among the 7 GPUs that NVML counts; 8 expected by configuration")),
    (MISSING, gpu_view(gpu=GONE, gpus=SEVEN),
     gone("not among the 7 GPUs that NVML counts; 0000:1b:00.0 is still on the PCI bus")),
    (MISSING, gpu_view(gpu=GONE, gpus=SEVEN, host=GpuHost(bus_gpus=("0000:2b:00.0",))),
     gone("not among the 7 GPUs that NVML counts; 0000:1b:00.0 is gone from the PCI bus")),
    (MISSING, taken("vfio-pci", host=GpuHost(bus_gpus=("0000:2b:00.0",))),
     gone("not among the 7 GPUs that NVML counts; 0000:1b:00.0 is still on the PCI bus")),
    (MISSING, gpu_view(gpu=GONE, gpus=SEVEN, host=GpuHost(bus_gpus=EIO)),
     gone("not among the 7 GPUs that NVML counts")),
    (MISSING, STARTING, RuleNotEvaluated("NVML is being opened")),
    (MISSING, NO_LIBRARY, RuleNotEvaluated("NVML cannot be used")),
    (MISSING, broken(9), RuleNotEvaluated("NVML cannot be used")),
    (MISSING, gpu_view(gpu=None, gpus=gpu_set(*EIGHT[1:], call="nvmlDeviceGetCount_v2", call_ns=NOW_NS)),
     RuleNotEvaluated("NVML is being asked for its GPUs")),
    # --- gpu.driver.reloaded
    (RELOADED, gpu_view(), OK),
    (RELOADED, NO_LIBRARY._replace(gpus=gpu_set(generation=0)), OK),
    (RELOADED, gpu_view(gpus=gpu_set(generation=2)),
     Finding(RELOADED, Severity.INFO, "1 time since the agent started")),
    (RELOADED, gpu_view(gpus=gpu_set(generation=4)),
     Finding(RELOADED, Severity.INFO, "3 times since the agent started")),
    # --- gpu.driver.persistence_off
    (PERSISTENCE, gpu_view(), OK),
    (PERSISTENCE, gpu_view({GpuField.PERSISTENCE: 0}),
     Finding(PERSISTENCE, Severity.INFO, "persistence mode is off")),
    (PERSISTENCE, gpu_view({GpuField.PERSISTENCE: EIO}), Unreadable("persistence", EIO)),
    (PERSISTENCE, gpu_view({GpuField.PERSISTENCE: ABSENT}),
     RuleNotApplicable("the driver has no persistence mode for it")),
    # --- gpu.driver.deaf
    (DEAF, gpu_view(log_read=True), OK),
    (DEAF, gpu_view(log_read=False, gpu=gpu_sample(event_mask=int(GpuEvent.XID))), OK),
    (DEAF, gpu_view(log_read=False, gpu=gpu_sample(event_mask=int(GpuEvent.DOUBLE_BIT_ECC))),
     Finding(DEAF, Severity.DEGRADED, "neither NVML's events nor the kernel log tell of its XIDs")),
    (DEAF, gpu_view(log_read=False, gpu=None), RuleNotEvaluated("needs the GPU")),
    # --- gpu.driver.stuck_process
    (STUCK, stuck(), OK),
    (
        STUCK,
        gpu_view(host=GpuHost(stuck=ABSENT)),
        RuleNotApplicable("the agent may not look into other processes (CAP_SYS_PTRACE)"),
    ),
    (STUCK, stuck((12, "python")), Finding(STUCK, Severity.DEGRADED, "held in the driver: python (12)")),
    (STUCK, stuck(*((pid, "rank") for pid in (1, 2, 3, 4))),
     Finding(STUCK, Severity.DEGRADED, "held in the driver: rank (1), rank (2), rank (3), rank (4)")),
    (STUCK, stuck(*((pid, "rank") for pid in range(1, 9))),
     Finding(STUCK, Severity.DEGRADED,
             "held in the driver: rank (1), rank (2), rank (3), rank (4) and 4 more")),
    (STUCK, gpu_view(gpu=None, host=GpuHost(stuck=(StuckProcess(5, "nvidia-smi"),))),
     Finding(STUCK, Severity.DEGRADED, "held in the driver: nvidia-smi (5)")),
]  # fmt: skip


@pytest.mark.parametrize(("code", "view", "answer"), CASES)
def test_a_view_has_this_answer(code: str, view: GpuView, answer: RuleResult) -> None:
    assert ROWS[code].judge(view) == answer


@pytest.mark.parametrize("err", [1, 9, 12, 13, 18, 999])
def test_a_library_that_is_of_no_use_has_exactly_one_cause(err: int) -> None:
    view = gpu_view(gpu=gpu_sample(status=err), gpus=gpu_set(err=err, state=SourceState.FAILING))
    answers = (rule.judge(view) for rule in gpu_rules(LIMITS) if rule.blind)
    found = [answer.code for answer in answers if isinstance(answer, Finding)]
    assert found == [MISMATCH if err == 18 else INIT]
