"""Types of the columns in the table of XIDs, and recovery actions that the driver requests."""

from enum import Enum, IntEnum, StrEnum, auto
from typing import Final, NamedTuple

from agent.model.health import Blame, Repair
from agent.model.persistent_faults import Cure


class CatalogAnswer(StrEnum):
    """Answer of NVIDIA's XID catalog to "is this repair enough?" or "is hardware suspected?"."""

    YES = "yes"
    NO = "no"
    MAYBE = "maybe"
    NOT_NEEDED = "na"
    UNKNOWN = "unknown"
    BY_TEXT = "see-text"


class XidRepairs(NamedTuple):
    """Answers on one XID: whether a restart, reset or reboot is enough, and whether hardware is suspected."""

    app_restart: CatalogAnswer
    gpu_reset: CatalogAnswer
    reboot: CatalogAnswer
    hardware: CatalogAnswer


_LETTERS: Final = {
    "y": CatalogAnswer.YES,
    "n": CatalogAnswer.NO,
    "m": CatalogAnswer.MAYBE,
    "-": CatalogAnswer.NOT_NEEDED,
    "?": CatalogAnswer.UNKNOWN,
    "t": CatalogAnswer.BY_TEXT,
}


def parse_repairs(letters: str) -> XidRepairs:
    """Parse four letters that state which repairs of an XID are enough, and whether hardware is suspected.

    ``nyym``: restart no, reset yes, reboot yes, hardware maybe.
    """
    app_restart, gpu_reset, reboot, hardware = (_LETTERS[letter] for letter in letters)
    return XidRepairs(app_restart, gpu_reset, reboot, hardware)


class XidEffect(StrEnum):
    """Whether an XID makes a device Unhealthy: always, under its XidCondition, or never."""

    ALWAYS = "yes"
    CONDITIONAL = "cond"
    NEVER = "no"


class XidCondition(Enum):
    """Circumstances that decide the severity of an XID; agent.health.gpu.xid.conditions evaluates them."""

    PLAIN = auto()
    """No condition: the XidEffect alone decides."""
    ALWAYS_DEGRADED = auto()
    """Always Degraded: the device stays usable."""
    RETIRED = auto()
    """XID of older GPUs: Info if the driver requests no recovery action, else Degraded."""
    UNLISTED = auto()
    """XID of a newer driver: Info if the driver requests no recovery action, else Degraded."""
    FOLLOWER = auto()
    """Always Info: consequence of another XID."""
    RECOVERY_ACTION = auto()
    """Unhealthy if the driver requests a recovery action, Info if not, Degraded if that is not known."""
    REQUESTED_ONLY = auto()
    """Degraded if the driver requests a recovery action; never Unhealthy."""
    ANNOUNCES = auto()
    """XID 154: its text is the recovery action, which applies where NVML field 230 cannot be read."""
    STUCK = auto()
    """Unhealthy if the driver requests a recovery action or cannot report one; else Info."""
    SAME_PLACE = auto()
    """A program's fault (Info), unless the same part of the GPU reports it again."""
    ACROSS_WORKLOADS = auto()
    """A program's fault (Info), unless different processes have it within a day."""
    WITH_REPLAYS = auto()
    """A program's fault (Info), unless it recurs while the PCIe link replays packets."""
    ON_REPEAT = auto()
    """A program's fault (Info), unless the XID recurs."""
    REMAP_PENDING = auto()
    """Unhealthy while a remapping is pending and the driver requests a recovery action."""
    CONTAINED = auto()
    """Unhealthy while a remapping is pending, if a recovery action is requested, or if it recurs."""
    REMAP_FAILED = auto()
    """Always Unhealthy; the GPU must be replaced if the remapping of a row has failed."""
    LOST_AGAIN = auto()
    """Always Unhealthy; hardware is suspected if the XID recurs."""
    LINK_REGISTERS = auto()
    """NVLink 4 and older: agent.health.gpu.xid.log_lines decodes the registers."""
    LINK_WORDS = auto()
    """NVLink 5: agent.health.gpu.xid.log_lines decodes the error words."""
    LINKS_DOWN = auto()
    """Unhealthy while NVLinks are down."""
    RESET_PENDING = auto()
    """Unhealthy until the GPU was reset."""
    CAPACITY_CUT = auto()
    """Severity as RECOVERY_ACTION; if ECC is off, the advice is to switch it on."""
    DRAM_OF_48 = auto()
    """Detail of an XID 48: Unhealthy while a row of the DRAM is not remapped."""
    SRAM_OF_48 = auto()
    """Detail of an XID 48: Unhealthy if SRAM errors exceed the limit."""
    CANCELLED = auto()
    """Degraded until another XID reports that this XID has ended."""


class XidAdvice(StrEnum):
    """Advice for operators on an XID, as its table row has it."""

    NOTHING = "nothing to do"
    CHECK_WORKLOAD = "check the workload that ran; the GPU needs no repair"
    FIND_ROOT = "check the fault that preceded it"
    WATCH = "monitor whether it recurs"
    RESET_GPU = "drain the GPU and reset it (nvidia-smi --gpu-reset), else reboot the node"
    RESET_LATER = "reset the GPU when its work has ended"
    REBOOT = "drain and reboot the node"
    RESTART_VM = "restart the virtual machine that has the GPU, else reboot the node"
    DIAGNOSE = "drain the GPU and run a diagnostic (dcgmi diag -r 3); replace the GPU if that fails"
    REPLACE = "drain and replace the GPU"
    PLAN_REPLACE = "plan to replace the GPU"
    CHECK_POWER = "check the GPU's auxiliary power cables, then reboot the node"
    CHECK_SEATING = "drain and reboot the node; if the fault recurs, reseat or replace the GPU"
    CHECK_COOLING = "check cooling and power; a GPU reset enables power smoothing again"
    RESET_FABRIC = "drain the node, reset all its GPUs and NVSwitches together, restart the Fabric Manager"
    CHECK_SWITCH = "check cooling and firmware of the NVSwitch, and the log of the Fabric Manager"
    CHECK_LINKS = "check NVLink cables, bridges and switches, then reset the GPU"
    MATCH_DRIVERS = "use a guest driver and vGPU type that match the host's"
    ENABLE_ECC = "switch ECC on, then reboot the node or the virtual machine"
    FOLLOW_ACTION = "see the GPU's recovery action (nvidia-smi -q); without one, monitor whether it recurs"

    @property
    def repair(self) -> Repair:
        """Repair that the advice describes; NONE if the advice is to follow the driver's recovery action."""
        return REPAIR_BY_ADVICE[self]


REPAIR_BY_ADVICE: Final = {
    XidAdvice.CHECK_SWITCH: Repair.INSPECT_HARDWARE,
    XidAdvice.NOTHING: Repair.NONE,
    XidAdvice.CHECK_WORKLOAD: Repair.RESTART_WORKLOAD,
    XidAdvice.FIND_ROOT: Repair.NONE,  # the repair of the fault that preceded it
    XidAdvice.WATCH: Repair.NONE,
    XidAdvice.RESET_GPU: Repair.RESET_DEVICE,
    XidAdvice.RESET_LATER: Repair.RESET_DEVICE,
    XidAdvice.REBOOT: Repair.REBOOT_NODE,
    XidAdvice.RESTART_VM: Repair.REBOOT_NODE,
    XidAdvice.DIAGNOSE: Repair.INSPECT_HARDWARE,
    XidAdvice.REPLACE: Repair.REPLACE_HARDWARE,
    XidAdvice.PLAN_REPLACE: Repair.REPLACE_HARDWARE,
    XidAdvice.CHECK_POWER: Repair.INSPECT_HARDWARE,
    XidAdvice.CHECK_SEATING: Repair.INSPECT_HARDWARE,
    XidAdvice.CHECK_COOLING: Repair.RESET_DEVICE,
    XidAdvice.RESET_FABRIC: Repair.REBOOT_NODE,  # a reset of single GPUs does not reset the switches
    XidAdvice.CHECK_LINKS: Repair.RESET_DEVICE,
    XidAdvice.MATCH_DRIVERS: Repair.NONE,
    XidAdvice.ENABLE_ECC: Repair.REBOOT_NODE,
    XidAdvice.FOLLOW_ACTION: Repair.NONE,
}


class XidRow(NamedTuple):
    """Row of the table of XIDs: what one XID means and which severity, advice and repair it has."""

    code: int
    meaning: str
    repairs: XidRepairs
    effect: XidEffect
    condition: XidCondition
    cure: Cure
    """Event that ends the XID's fault; a fault of severity INFO always expires."""
    blame: Blame
    advice: XidAdvice

    @property
    def repair(self) -> Repair:
        """Repair that the advice describes. If that is the driver's recovery action, the mildest repair that
        NVIDIA's catalog calls enough, for GPUs whose driver reports no action."""
        if self.advice is not XidAdvice.FOLLOW_ACTION:
            return self.advice.repair
        answers = (
            (Repair.RESTART_WORKLOAD, self.repairs.app_restart),
            (Repair.RESET_DEVICE, self.repairs.gpu_reset),
            (Repair.REBOOT_NODE, self.repairs.reboot),
        )
        return next((repair for repair, answer in answers if answer is CatalogAnswer.YES), Repair.NONE)


class RecoveryAction(IntEnum):
    """Recovery action that the driver requests for a GPU (NVML's ``nvmlGpuRecoveryAction_t``).

    A number that is not listed comes from a newer driver: ``RecoveryAction(9)`` becomes a member of its own.
    """

    NONE = 0
    GPU_RESET = 1
    NODE_REBOOT = 2
    DRAIN_P2P = 3
    DRAIN_AND_RESET = 4
    RECOVER_IMEX_DOMAIN = 5
    BUS_RESET = 6
    SYSTEM_REBOOT = 7

    @classmethod
    def _missing_(cls, value: object) -> "RecoveryAction | None":
        if not isinstance(value, int):
            return None
        member = int.__new__(cls, value)
        member._name_ = f"ACTION_{value}"
        member._value_ = value
        return member

    @property
    def text(self) -> str:
        """Name of the recovery action in evidence texts: ``drain and reset``."""
        return self.name.lower().replace("_", " ")

    @property
    def advice(self) -> str:
        """Advice for operators on the requested action; empty: no action is requested."""
        return ADVICE.get(self, f"see recovery action {self.value} in the driver's NVML manual")

    @property
    def repair(self) -> Repair:
        """Repair that corresponds to the action; CONTACT_VENDOR for an unlisted action."""
        return REPAIR_BY_ACTION.get(self, Repair.CONTACT_VENDOR)


ADVICE: Final[dict[RecoveryAction, str]] = {
    RecoveryAction.NONE: "",
    RecoveryAction.GPU_RESET: "drain the GPU and reset it (nvidia-smi --gpu-reset)",
    RecoveryAction.NODE_REBOOT: "drain and reboot the node",
    RecoveryAction.DRAIN_P2P: "stop the workloads that access this GPU over NVLink or PCIe peer access",
    RecoveryAction.DRAIN_AND_RESET: "schedule no new work on the GPU; reset it when its work has ended",
    RecoveryAction.RECOVER_IMEX_DOMAIN: "restart the IMEX domain that the node belongs to",
    RecoveryAction.BUS_RESET: "drain the GPU and reset its PCIe slot, or reboot the node",
    RecoveryAction.SYSTEM_REBOOT: "drain the node and power-cycle the whole system",
}
REPAIR_BY_ACTION: Final = {
    RecoveryAction.NONE: Repair.NONE,
    RecoveryAction.GPU_RESET: Repair.RESET_DEVICE,
    RecoveryAction.NODE_REBOOT: Repair.REBOOT_NODE,
    RecoveryAction.DRAIN_P2P: Repair.RESTART_WORKLOAD,
    RecoveryAction.DRAIN_AND_RESET: Repair.RESET_DEVICE,
    RecoveryAction.RECOVER_IMEX_DOMAIN: Repair.RELOAD_DRIVER,
    RecoveryAction.BUS_RESET: Repair.RESET_DEVICE,
    RecoveryAction.SYSTEM_REBOOT: Repair.REBOOT_NODE,
}
