"""Table of latched faults other than XIDs and SXids: NVML events and kernel log lines that no reading shows.

NVML events for ECC errors, repartitions and recovery actions have no row, because rules evaluate readings of
the same state.
"""

from typing import Final, NamedTuple

from agent.model.gpu import GpuEvent
from agent.model.health import Blame, Repair, Severity
from agent.model.persistent_faults import Cure

INIT_FAILED: Final = "gpu.init_failed"
LINK_SETUP_FAILED: Final = "gpu.nvlink.setup_failed"
API_MISMATCH: Final = "gpu.driver.api_mismatch"


class EventFaultRow(NamedTuple):
    """Table row of a latched fault that an NVML event or a kernel log line reports."""

    code: str
    event: GpuEvent | None
    """NVML event that reports the fault; None: a kernel log line reports it."""
    severity: Severity
    blame: Blame
    cure: Cure
    """Event, such as a reset, that ends the fault."""
    meaning: str
    why: str
    advice: str
    repair: Repair


# fmt: off
EVENT_FAULT_ROWS: Final = (
    EventFaultRow("gpu.unavailable", GpuEvent.UNAVAILABLE, Severity.UNHEALTHY, Blame.HARDWARE, Cure.ACTION,
                  "NVML announced that the GPU is not available",
                  "programs on the GPU fail, and new ones cannot start",
                  "drain the GPU and reset it (nvidia-smi --gpu-reset), else reboot the node",
                  Repair.RESET_DEVICE),
    EventFaultRow("gpu.poison.fatal", GpuEvent.FATAL_POISON, Severity.UNHEALTHY, Blame.HARDWARE, Cure.RESET,
                  "corrupt data was not contained",
                  "results of every program on the GPU may be wrong",
                  "drain the GPU and reset it (nvidia-smi --gpu-reset)",
                  Repair.RESET_DEVICE),
    EventFaultRow("gpu.poison.contained", GpuEvent.NON_FATAL_POISON,
                  Severity.DEGRADED, Blame.HARDWARE, Cure.ACTION,
                  "corrupt data was contained: only the program that read it was ended",
                  "a part of the memory is failing",
                  "reset the GPU when its work has ended, so that the row is replaced",
                  Repair.RESET_DEVICE),
    EventFaultRow("gpu.retirement.failed", GpuEvent.DRAM_RETIREMENT_FAILURE,
                  Severity.UNHEALTHY, Blame.HARDWARE, Cure.RESET,
                  "bad memory could not be retired",
                  "the next access to it fails again",
                  "drain the GPU and reset it; replace it if the fault recurs",
                  Repair.RESET_DEVICE),
    EventFaultRow("gpu.retirement", GpuEvent.DRAM_RETIREMENT, Severity.INFO, Blame.HARDWARE, Cure.EXPIRES,
                  "bad memory was retired",
                  "the number of retirements shows how the memory ages",
                  "nothing to do",
                  Repair.NONE),
    EventFaultRow(INIT_FAILED, None, Severity.UNHEALTHY, Blame.DRIVER, Cure.RESET,
                  "the driver could not initialise the GPU (RmInitAdapter failed)",
                  "no program can open the GPU",
                  "reset the GPU, else reboot the node; read the NVRM lines before it in the kernel log",
                  Repair.RESET_DEVICE),
    EventFaultRow(LINK_SETUP_FAILED, None, Severity.DEGRADED, Blame.HARDWARE, Cure.RESET,
                  "the driver cannot determine which NVLinks are up",
                  "if it repeats, NVML calls begin to hang",
                  "check nv-fabricmanager and the NVSwitches, then reset the GPUs",
                  Repair.RESET_DEVICE),
    EventFaultRow(API_MISMATCH, None, Severity.INFO, Blame.CONFIGURATION, Cure.EXPIRES,
                  "a program's driver library does not match the loaded kernel module",
                  "that program cannot use a GPU; other programs can",
                  "restart the program, or its container, with the node's driver libraries",
                  Repair.RESTART_WORKLOAD),
    EventFaultRow("gpu.ecc.storm", GpuEvent.SINGLE_BIT_ECC_STORM,
                  Severity.DEGRADED, Blame.HARDWARE, Cure.EXPIRES,
                  "a storm of correctable memory errors in the last 10 min",
                  "corrections slow the workload, and such memory fails earlier",
                  "drain the GPU and run a diagnostic; replace the GPU if the storm recurs",
                  Repair.INSPECT_HARDWARE),
)
# fmt: on

ROW_BY_EVENT: Final = {row.event: row for row in EVENT_FAULT_ROWS if row.event}
ROW_BY_CODE: Final = {row.code: row for row in EVENT_FAULT_ROWS}
