"""Table of all XIDs (GPU errors) that NVIDIA's drivers report, and the types of its columns.

Four letters in a row answer four questions. Is a restart of the program enough? Is a GPU reset enough? Is a
reboot enough? Is the hardware suspected? The letters are (y)es, (n)o, (m)aybe, (-) nothing is needed, (?) not
known, and (t) see the XID's text. agent.health.gpu.xid.decisions decides on an XID from its row and the GPU's
readings.

Sources: NVIDIA's XID catalog, and other agents where they agree with it.
"""

from enum import Enum, IntEnum, StrEnum, auto
from typing import Final, NamedTuple

from agent.model.health import Blame, Repair
from agent.model.persistent_faults import Cure


class CatalogAnswer(StrEnum):
    """Answer of NVIDIA's XID catalog to the question "is this repair enough?" or "is hardware suspected?"."""

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
    For example, ``nyym`` is: restart no, reset yes, reboot yes, hardware maybe."""
    app_restart, gpu_reset, reboot, hardware = (_LETTERS[letter] for letter in letters)
    return XidRepairs(app_restart, gpu_reset, reboot, hardware)


class XidEffect(StrEnum):
    """Effect of an XID on a device: the XID makes it Unhealthy always, under its XidCondition, or never."""

    ALWAYS = "yes"
    CONDITIONAL = "cond"
    NEVER = "no"


class XidCondition(Enum):
    """Circumstances on which an XID's severity depends. agent.health.gpu.xid.decisions evaluates them."""

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
    """Advice for operators on what to do about an XID."""

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
        """Repair that the advice describes; NONE for the advice to follow the driver's recovery action."""
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
    """Row of the table of XIDs: the meaning of one XID, and its severity, advice and repair."""

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
        """Repair that the advice on the XID describes.

        If the advice is to follow the driver's recovery action, the repair is the mildest that NVIDIA's
        catalog calls enough. It is used for GPUs whose driver reports no action.
        """
        if self.advice is not XidAdvice.FOLLOW_ACTION:
            return self.advice.repair
        answers = (
            (Repair.RESTART_WORKLOAD, self.repairs.app_restart),
            (Repair.RESET_DEVICE, self.repairs.gpu_reset),
            (Repair.REBOOT_NODE, self.repairs.reboot),
        )
        return next((repair for repair, answer in answers if answer is CatalogAnswer.YES), Repair.NONE)


class RecoveryAction(IntEnum):
    """Recovery action that the driver requests for a GPU (NVML's ``nvmlGpuRecoveryAction_t``). A newer driver
    can report a number that is not listed here. ``RecoveryAction(9)`` then becomes a new member."""

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


def _row(
    code: int,
    meaning: str,
    letters: str,
    effect: XidEffect,
    condition: XidCondition,
    cure: Cure,
    blame: Blame,
    advice: XidAdvice,
) -> XidRow:
    return XidRow(code, meaning, parse_repairs(letters), effect, condition, cure, blame, advice)


def _program_rows(engine: str, *codes: int, first: int = 0) -> list[XidRow]:
    """Return table rows for XIDs that a program's fault on one engine of the GPU causes, one row per code.

    Args:
        engine: Name of the engine.
        codes: Numbers of the XIDs.
        first: Number of the first engine of this kind.
    """
    return [
        _row(code, f"{engine} {number} fault", "yyyn", XidEffect.NEVER,
             XidCondition.PLAIN, Cure.EXPIRES, Blame.WORKLOAD, XidAdvice.CHECK_WORKLOAD)
        for number, code in enumerate(codes, first)
    ]  # fmt: skip


# fmt: off
_C = XidCondition
_HARDWARE, _DRIVER, _WORKLOAD, _SETUP = Blame.HARDWARE, Blame.DRIVER, Blame.WORKLOAD, Blame.CONFIGURATION
_A = XidAdvice

_YES, _COND, _NO = XidEffect.ALWAYS, XidEffect.CONDITIONAL, XidEffect.NEVER
_EXPIRES, _ACTION, _RESET, _REBOOT = Cure.EXPIRES, Cure.ACTION, Cure.RESET, Cure.REBOOT

ALWAYS: Final = (
    _row(46, "the GPU stopped making progress", "nyym", _YES, _C.PLAIN, _RESET, _HARDWARE, _A.RESET_GPU),
    _row(48, "uncorrectable (two-bit) ECC error", "nyym", _YES, _C.PLAIN, _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(54, "auxiliary power is missing or loose", "nnny", _YES, _C.PLAIN,
         _REBOOT, _HARDWARE, _A.CHECK_POWER),
    _row(62, "a micro-controller on the chip halted", "nyym", _YES, _C.PLAIN,
         _RESET, _HARDWARE, _A.RESET_GPU),
    _row(64, "replacing a bad memory row or page failed", "nyym", _YES, _C.REMAP_FAILED,
         _RESET, _HARDWARE, _A.RESET_GPU),
    _row(79, "the GPU no longer answers on PCIe", "nmym", _YES, _C.LOST_AGAIN, _REBOOT, _HARDWARE, _A.REBOOT),
    _row(95, "uncontained memory error: all programs at risk", "nyym", _YES, _C.PLAIN,
         _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(110, "security unit fault", "nyym", _YES, _C.PLAIN, _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(119, "GSP firmware does not answer the driver", "nyym", _YES, _C.PLAIN,
         _ACTION, _DRIVER, _A.RESET_GPU),
    _row(120, "GSP firmware fault", "nyym", _YES, _C.PLAIN, _ACTION, _DRIVER, _A.RESET_GPU),
    _row(136, "NVLink training failed", "nyym", _YES, _C.PLAIN, _ACTION, _HARDWARE, _A.CHECK_LINKS),
    _row(140, "memory error that row replacement did not catch", "nyym", _YES, _C.PLAIN,
         _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(143, "the GPU failed to initialize", "nyym", _YES, _C.PLAIN, _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(150, "NVLink controller degraded, or its watchdog", "nyym", _YES, _C.PLAIN,
         _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(151, "key rotation of confidential computing failed", "nmyn", _YES, _C.PLAIN,
         _REBOOT, _DRIVER, _A.RESTART_VM),
    _row(158, "fatal timeout of the GPU", "nyym", _YES, _C.PLAIN, _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(167, "fatal PCIe timeout", "nmym", _YES, _C.PLAIN, _ACTION, _HARDWARE, _A.REBOOT),
    _row(169, "the SEC2 micro-controller halted", "nmym", _YES, _C.PLAIN, _ACTION, _HARDWARE, _A.REBOOT),
    _row(173, "chip-to-chip link to the CPU failed", "nmym", _YES, _C.PLAIN, _ACTION, _HARDWARE, _A.REBOOT),
)

CONDITIONAL: Final = (
    _row(63, "bad memory row or page, replaced at the next reset", "-yyn", _COND,
         _C.REMAP_PENDING, _ACTION, _HARDWARE, _A.RESET_LATER),
    _row(74, "NVLink fault", "nyym", _COND, _C.LINK_REGISTERS, _ACTION, _HARDWARE, _A.CHECK_LINKS),
    _row(94, "contained memory error: only its program was affected", "yyym", _COND,
         _C.CONTAINED, _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(109, "a context switch did not finish", "nyym", _COND, _C.STUCK, _ACTION, _DRIVER, _A.RESET_GPU),
    _row(142, "video encoder 3 fault", "mmmm", _COND, _C.RECOVERY_ACTION, _ACTION, _DRIVER, _A.FOLLOW_ACTION),
    _row(144, "NVLink SAW fault", "myym", _COND, _C.LINK_WORDS, _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(145, "NVLink RLW fault", "myym", _COND, _C.LINK_WORDS, _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(146, "NVLink TLW fault", "myym", _COND, _C.LINK_WORDS, _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(149, "NVLink down, or its error rate too high", "myym", _COND, _C.LINK_WORDS,
         _ACTION, _HARDWARE, _A.CHECK_LINKS),
    _row(154, "the driver requests a recovery action", "tttn", _COND, _C.ANNOUNCES,
         _ACTION, _DRIVER, _A.FOLLOW_ACTION),
    _row(155, "software brought NVLink down", "nyym", _COND, _C.LINKS_DOWN,
         Cure.LINKS_UP, _SETUP, _A.CHECK_LINKS),
    _row(156, "a faulty resource retires at the next reset", "nyyn", _COND,
         _C.RESET_PENDING, Cure.NOTHING_PENDING, _HARDWARE, _A.RESET_GPU),
    _row(159, "fault of the coherent interface", "myyn", _COND, _C.RECOVERY_ACTION,
         _ACTION, _HARDWARE, _A.FOLLOW_ACTION),
    _row(166, "encrypted NVLink traffic before the link was set up", "myyn", _COND,
         _C.RECOVERY_ACTION, _ACTION, _SETUP, _A.FOLLOW_ACTION),
    _row(168, "bad memory in a protected region, capacity cut", "nmym", _COND,
         _C.CAPACITY_CUT, _ACTION, _HARDWARE, _A.ENABLE_ECC),
    _row(170, "interrupt of an encrypted NVLink", "myyn", _COND, _C.RECOVERY_ACTION,
         _ACTION, _SETUP, _A.FOLLOW_ACTION),
    _row(171, "uncorrectable error in DRAM", "nyym", _COND, _C.DRAM_OF_48, _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(172, "uncorrectable error in SRAM", "nyym", _COND, _C.SRAM_OF_48, _ACTION, _HARDWARE, _A.RESET_GPU),
)

NEVER: Final = (
    # --- caused by a program
    _row(8, "a channel made no progress in time", "yyyn", _NO, _C.PLAIN,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(11, "bad command stream for the graphics engine", "yyyn", _NO, _C.PLAIN,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(13, "a kernel or shader faulted", "yyyn", _NO, _C.SAME_PLACE,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(25, "illegal command stream", "yyyn", _NO, _C.PLAIN, _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(31, "memory page fault", "yyyn", _NO, _C.ACROSS_WORKLOADS, _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(32, "corrupt commands fetched by DMA", "yyyn", _NO, _C.WITH_REPLAYS,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(43, "a program's channel was torn down", "----", _NO, _C.PLAIN,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(45, "a channel was cleaned up after another fault", "y---", _NO, _C.FOLLOWER,
         _EXPIRES, _WORKLOAD, _A.FIND_ROOT),
    _row(69, "wrong object class on the graphics engine", "yyyn", _NO, _C.PLAIN,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(80, "pushed commands failed their checksum", "yyyn", _NO, _C.ON_REPEAT,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(108, "a remote address was not translated", "----", _NO, _C.PLAIN,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(137, "illegal access to a peer's memory over NVLink", "----", _NO, _C.PLAIN,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(141, "CUDA fast-path channel fault", "----", _NO, _C.PLAIN, _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    *_program_rows("copy engine", 39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)),
    _row(60, "SEC2 or video processor fault", "yyyn", _NO, _C.PLAIN, _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    *(row._replace(condition=_C.REQUESTED_ONLY) for row in _program_rows("video decoder", 68)),
    *_program_rows("video decoder", 83, 84, 88, 89, 96, 97, 98, first=1),
    *_program_rows("JPEG engine", 82, *range(99, 106)),
    *_program_rows("optical-flow engine", 86, 139),
    # --- caused by the driver or its firmware
    _row(37, "context-switch firmware got an unknown method", "----", _NO, _C.PLAIN,
         _EXPIRES, _DRIVER, _A.NOTHING),
    _row(38, "watchdog of the context-switch firmware", "----", _NO, _C.REQUESTED_ONLY,
         _EXPIRES, _DRIVER, _A.WATCH),
    _row(44, "graphics fault during a context switch", "----", _NO, _C.REQUESTED_ONLY,
         _EXPIRES, _DRIVER, _A.WATCH),
    _row(66, "illegal register access by the driver", "----", _NO, _C.PLAIN, _EXPIRES, _DRIVER, _A.NOTHING),
    _row(67, "driver violation in the context-switch unit", "----", _NO, _C.PLAIN,
         _EXPIRES, _DRIVER, _A.NOTHING),
    # --- caused by the configuration
    _row(14, "fault injected for a test", "----", _NO, _C.PLAIN, _EXPIRES, _SETUP, _A.NOTHING),
    _row(78, "a vGPU could not start: guest and host do not match", "nnnn", _NO, _C.PLAIN,
         _EXPIRES, _SETUP, _A.MATCH_DRIVERS),
    _row(106, "test message of out-of-band management", "----", _NO, _C.PLAIN, _EXPIRES, _SETUP, _A.NOTHING),
    _row(107, "silent test message of out-of-band management", "----", _NO, _C.PLAIN,
         _EXPIRES, _SETUP, _A.NOTHING),
    # --- caused by hardware that still works
    _row(92, "many one-bit memory errors", "----", _NO, _C.PLAIN, _EXPIRES, _HARDWARE, _A.WATCH),
    _row(93, "too many writes to the InfoROM", "----", _NO, _C.PLAIN, _EXPIRES, _HARDWARE, _A.NOTHING),
    _row(121, "corrected errors of the chip-to-chip link", "----", _NO, _C.PLAIN,
         _EXPIRES, _HARDWARE, _A.RESET_LATER),
    _row(147, "NVLink TREX event", "----", _NO, _C.LINK_WORDS, _EXPIRES, _HARDWARE, _A.WATCH),
    _row(148, "NVLink NVLPW event", "----", _NO, _C.LINK_WORDS, _EXPIRES, _HARDWARE, _A.WATCH),
    _row(157, "nothing is left to retire", "-nnm", _NO, _C.ALWAYS_DEGRADED,
         Cure.REPLACE, _HARDWARE, _A.PLAN_REPLACE),
    _row(160, "a memory channel was retired", "-yyn", _NO, _C.PLAIN, _EXPIRES, _HARDWARE, _A.WATCH),
    _row(161, "a memory channel could not be retired", "-nnm", _NO, _C.ALWAYS_DEGRADED,
         Cure.REPLACE, _HARDWARE, _A.PLAN_REPLACE),
    _row(162, "power smoothing works again", "----", _NO, _C.PLAIN, _EXPIRES, _HARDWARE, _A.NOTHING),
    _row(163, "power smoothing switched off by heat or timeout", "nyyn", _NO, _C.CANCELLED,
         _RESET, _HARDWARE, _A.CHECK_COOLING),
    _row(164, "power smoothing is nearly worn out", "nnny", _NO, _C.ALWAYS_DEGRADED,
         Cure.REPLACE, _HARDWARE, _A.PLAN_REPLACE),
    _row(165, "power smoothing is worn out", "nnny", _NO, _C.ALWAYS_DEGRADED,
         Cure.REPLACE, _HARDWARE, _A.PLAN_REPLACE),
)

_RETIRED: Final = {
    1: "channel FIFO fault", 2: "FIFO software method fault", 3: "unknown FIFO method", 4: "FIFO busy",
    5: "FIFO ran out", 6: "FIFO parse fault", 7: "FIFO page-table fault", 9: "graphics instance fault",
    10: "single-step fault", 12: "graphics software method fault", 15: "display scanline timeout",
    16: "display vblank callback late", 17: "channel parameter fault", 18: "bus-master wait expired",
    19: "display notifier missed", 20: "MPEG engine fault", 21: "motion-estimation engine fault",
    22: "video processor method fault", 23: "channel logging marker", 24: "graphics semaphore wait expired",
    26: "frame-buffer interface wait expired", 27: "video engine fault", 28: "video engine 2 fault",
    29: "bitstream engine fault", 30: "bad register access", 33: "security engine fault",
    34: "VLD decoder fault", 35: "picture decoder fault", 36: "post-processor fault",
    42: "image compositor fault", 47: "video encoder 0 fault", 49: "power-saving level set by registry",
    50: "power-saving level changed after a fault", 51: "power-saving stress test failed",
    52: "power-saving level changed by heat", 53: "clocks lowered by heat",
    55: "temperature sensor read failed", 56: "display channel fault", 57: "memory link training failed",
    58: "frame-buffer memory fault", 59: "power controller fault", 61: "power controller breakpoint",
    65: "video encoder 1 fault", 73: "video encoder 2 fault", 81: "VGA subsystem fault",
    87: "telemetry report marker", 90: "L2 cache fault", 91: "reserved", 111: "display bundle fault",
    112: "display supervisor fault", 113: "DisplayPort training failed", 114: "display head underflow",
    115: "display core channel register fault", 116: "display window channel fault",
    117: "cursor channel fault", 118: "display head register fault", 122: "SPI flash read failed",
    123: "SPI flash write failed", 124: "SPI flash erase failed", 125: "InfoROM file system fault",
    138: "deep-learning accelerator fault", 152: "deep-learning accelerator SMMU fault",
    153: "deep-learning accelerator timeout",
}
_RETIRED_HARMLESS: Final = (152, 153)  # NVIDIA's catalog states that nothing is needed

RETIRED: Final = tuple(
    _row(code, meaning, "----" if code in _RETIRED_HARMLESS else "????", _COND,
         _C.RETIRED, _ACTION, _DRIVER, _A.FOLLOW_ACTION)
    for code, meaning in _RETIRED.items()
)
# fmt: on

XIDS: Final = {row.code: row for row in sorted((*ALWAYS, *CONDITIONAL, *NEVER, *RETIRED))}
"""Table rows of all XIDs, by XID number in ascending order."""

ENDED_XIDS: Final = {162: 163}
"""Number of the XID that has ended, by the XID that reports its end."""


def xid_row(code: int) -> XidRow:
    """Return the table row of an XID. For an unknown XID, return a row whose severity depends on the recovery
    action that the driver requests."""
    return XIDS.get(code) or XidRow(
        code, "unknown to this version", parse_repairs("????"),
        XidEffect.CONDITIONAL, XidCondition.UNLISTED, Cure.ACTION, Blame.DRIVER, XidAdvice.FOLLOW_ACTION,
    )  # fmt: skip
