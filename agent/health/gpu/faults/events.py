"""What is latched beside XIDs and SXids: events of NVML, and lines of the kernel log; one row each.

ECC errors that NVML counts, repartitions and recovery actions are events too, but what they announce can be
read, and is judged there. These cannot: who was not there when they came never hears of them.
"""

from typing import Final, NamedTuple

from agent.model.faults import Cure
from agent.model.gpu import GpuEvent
from agent.model.health import Blame, Severity

INIT_FAILED: Final = "gpu.init_failed"
LINK_SETUP_FAILED: Final = "gpu.nvlink.setup_failed"
API_MISMATCH: Final = "gpu.driver.api_mismatch"


class EventRow(NamedTuple):
    """One event of NVML's, or one kind of line."""

    code: str
    event: GpuEvent | None
    """None: the kernel log tells of it."""
    severity: Severity
    blame: Blame
    cure: Cure
    meaning: str
    why: str
    advice: str


ROWS: Final = (
    EventRow(
        "gpu.unavailable",
        GpuEvent.UNAVAILABLE,
        Severity.UNHEALTHY,
        Blame.HARDWARE,
        Cure.ACTION,
        "NVML announced that the GPU is not available",
        "whatever runs on it gets errors, and nothing new can start",
        "drain the GPU and reset it (nvidia-smi --gpu-reset), else reboot the node",
    ),
    EventRow(
        "gpu.poison.fatal",
        GpuEvent.FATAL_POISON,
        Severity.UNHEALTHY,
        Blame.HARDWARE,
        Cure.RESET,
        "bad data reached a place from where it cannot be kept in",
        "no program on the GPU can trust what it computes",
        "drain the GPU and reset it (nvidia-smi --gpu-reset)",
    ),
    EventRow(
        "gpu.poison.contained",
        GpuEvent.NON_FATAL_POISON,
        Severity.DEGRADED,
        Blame.HARDWARE,
        Cure.ACTION,
        "bad data was met and kept in: only the program that met it was ended",
        "the memory behind it is failing",
        "reset the GPU in a quiet hour, so that the row is replaced",
    ),
    EventRow(
        "gpu.retirement.failed",
        GpuEvent.DRAM_RETIREMENT_FAILURE,
        Severity.UNHEALTHY,
        Blame.HARDWARE,
        Cure.RESET,
        "bad memory could not be retired",
        "the next access meets it again",
        "drain the GPU and reset it; replace it if that comes again",
    ),
    EventRow(
        "gpu.retirement",
        GpuEvent.DRAM_RETIREMENT,
        Severity.INFO,
        Blame.HARDWARE,
        Cure.EXPIRES,
        "bad memory was retired",
        "worth knowing: how often says how the memory ages",
        "nothing to do",
    ),
    EventRow(
        INIT_FAILED,
        None,
        Severity.UNHEALTHY,
        Blame.DRIVER,
        Cure.RESET,
        "the driver could not initialise the GPU (RmInitAdapter failed)",
        "no program can open it",
        "reset the GPU, else reboot the node; look for other lines of NVRM before it in the kernel log",
    ),
    EventRow(
        LINK_SETUP_FAILED,
        None,
        Severity.DEGRADED,
        Blame.HARDWARE,
        Cure.RESET,
        "the driver cannot find out which NVLinks came up",
        "management calls begin to hang when that goes on",
        "check nv-fabricmanager and the NVSwitches, then reset the GPUs",
    ),
    EventRow(
        API_MISMATCH,
        None,
        Severity.INFO,
        Blame.CONFIGURATION,
        Cure.EXPIRES,
        "a program's driver library does not match the loaded kernel module",
        "that program cannot use a GPU; others can",
        "restart the program, or its container, with the node's driver libraries",
    ),
    EventRow(
        "gpu.ecc.storm",
        GpuEvent.SINGLE_BIT_ECC_STORM,
        Severity.DEGRADED,
        Blame.HARDWARE,
        Cure.EXPIRES,
        "a storm of correctable memory errors in the last 10 min",
        "corrections take time from the workload, and such memory fails sooner",
        "drain the GPU and run a diagnostic; replace it if the storm comes back",
    ),
)

BY_EVENT: Final = {row.event: row for row in ROWS if row.event}
BY_CODE: Final = {row.code: row for row in ROWS}
