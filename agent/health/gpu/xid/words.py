"""The words of an XID's row: its class, what it is worth, what decides it, what to do about it.

Owns no row; the table is agent.health.gpu.xid.table. What the conditions mean stands in
agent.health.gpu.xid.conditions.
"""

from enum import Enum, StrEnum, auto
from typing import Final, NamedTuple

from agent.model.faults import Cure
from agent.model.health import Blame


class XidClass(StrEnum):
    """The part that reports."""

    APP = "app"
    """An engine that ran what a program gave it."""
    MEDIA = "media"
    """Likewise: video, JPEG, optical flow."""
    GPU = "gpu"
    MEMORY = "gpu-mem"
    FIRMWARE = "firmware"
    BUS = "bus"
    NVLINK = "nvlink"
    NVLINK5 = "nvlink5"
    C2C = "c2c"
    """The chip-to-chip link to a Grace CPU."""
    POWER = "power"
    HOST = "host"
    META = "meta"
    """About other XIDs."""
    UNUSED = "unused"
    """No GPU since Ampere reports it."""


class Grade(StrEnum):
    """How grave the code is by itself, before anything else is looked at."""

    INFO = "info"
    WARN = "warn"
    ERROR = "error"
    FATAL = "fatal"
    BY_TEXT = "cond"


class Answer(StrEnum):
    """Of a column that asks "is this enough?" or "is hardware suspected?"."""

    YES = "yes"
    NO = "no"
    MAYBE = "maybe"
    NOT_NEEDED = "na"
    UNKNOWN = "unknown"
    BY_TEXT = "see-text"


class Mends(NamedTuple):
    """What is enough to end it, from the mildest to the strongest, and whether hardware is suspected."""

    app_restart: Answer
    gpu_reset: Answer
    reboot: Answer
    hardware: Answer


_LETTERS: Final = {
    "y": Answer.YES,
    "n": Answer.NO,
    "m": Answer.MAYBE,
    "-": Answer.NOT_NEEDED,
    "?": Answer.UNKNOWN,
    "t": Answer.BY_TEXT,
}


def mends(letters: str) -> Mends:
    """Four letters as a row spells them: ``nyym`` = restart no, reset yes, reboot yes, hardware maybe."""
    app_restart, gpu_reset, reboot, hardware = (_LETTERS[letter] for letter in letters)
    return Mends(app_restart, gpu_reset, reboot, hardware)


class Mark(StrEnum):
    """Whether the code makes a device Unhealthy."""

    ALWAYS = "yes"
    CONDITIONAL = "cond"
    NEVER = "no"


class Condition(Enum):
    """What decides a code beyond its mark. One function of agent.health.gpu.xid.conditions each."""

    PLAIN = auto()
    """The mark alone."""
    WARNS = auto()
    """It leaves the device usable, and is told."""
    RETIRED = auto()
    """Not expected of this hardware: a word if the driver asks for nothing, else a warning."""
    UNLISTED = auto()
    """A code that the table does not have: a newer driver's. Likewise."""
    FOLLOWER = auto()
    """The echo of another XID."""
    DEFERS = auto()
    """The recovery action decides."""
    ASKS = auto()
    """Never Unhealthy, but told as degraded when the driver asks for a recovery action."""
    ANNOUNCES = auto()
    """XID 154: its text is the recovery action, for where the field cannot be read."""
    STUCK = auto()
    """The recovery action decides; a driver that has none is taken at its worst."""
    SAME_PLACE = auto()
    """A program's fault, unless the same part of the GPU reports each time."""
    ACROSS_WORKLOADS = auto()
    """A program's fault, unless different programs meet it."""
    WITH_REPLAYS = auto()
    """A program's fault, unless it comes back while the PCIe link replays packets."""
    ON_REPEAT = auto()
    """A program's fault, unless it comes back."""
    REMAP_PENDING = auto()
    """Bad while a replacement waits and the driver asks for a recovery action."""
    CONTAINED = auto()
    """Bad while a replacement waits, a recovery action is asked for, or when it comes again and again."""
    REMAP_FAILED = auto()
    """Always bad; beyond repair if the replacement of a row has failed."""
    LOST_AGAIN = auto()
    """Always bad; hardware is suspected when it comes back."""
    LINK_REGISTERS = auto()
    """NVLink 4 and older: agent.health.gpu.xid.nvlink4 decodes the registers."""
    LINK_WORDS = auto()
    """NVLink 5: agent.health.gpu.xid.nvlink5 decodes the words."""
    LINKS_DOWN = auto()
    """Bad while links are down."""
    RESET_PENDING = auto()
    """Bad until its reset was done."""
    CAPACITY_CUT = auto()
    """The recovery action decides; with ECC off, switching it on is the way out."""
    DRAM_OF_48 = auto()
    """The detail of an XID 48, unless memory says that it is worse."""
    SRAM_OF_48 = auto()
    """Likewise."""
    CANCELLED = auto()
    """Over as soon as its counterpart comes."""


class Advice(StrEnum):
    """What to do."""

    NOTHING = "nothing to do"
    CHECK_WORKLOAD = "look at the workload that ran; nothing has to be done to the GPU"
    FIND_ROOT = "look at the fault that came before it"
    WATCH = "watch whether it comes back"
    RESET_GPU = "drain the GPU and reset it (nvidia-smi --gpu-reset), else reboot the node"
    RESET_LATER = "reset the GPU in a quiet hour"
    REBOOT = "drain and reboot the node"
    RESTART_VM = "restart the virtual machine that has the GPU, else reboot the node"
    DIAGNOSE = "drain the GPU and run a diagnostic (dcgmi diag -r 3); replace it if that fails"
    REPLACE = "drain and replace the GPU"
    PLAN_REPLACE = "plan to replace the GPU"
    CHECK_POWER = "check the GPU's auxiliary power cables, then reboot the node"
    CHECK_SEATING = "drain and reboot the node; if it comes back, reseat or replace the GPU"
    CHECK_COOLING = "check cooling and power; a GPU reset switches it on again"
    RESET_FABRIC = "drain the node, reset all its GPUs and NVSwitches together, restart the Fabric Manager"
    CHECK_LINKS = "check NVLink cables, bridges and switches, then reset the GPU"
    MATCH_DRIVERS = "bring the guest's driver and vGPU type in line with the host's"
    ENABLE_ECC = "switch ECC on, then reboot the node or the virtual machine"
    FOLLOW_ACTION = "see the GPU's recovery action (nvidia-smi -q); without one, watch whether it comes back"


class XidRow(NamedTuple):
    """One code."""

    code: int
    what: XidClass
    meaning: str
    grade: Grade
    mends: Mends
    mark: Mark
    condition: Condition
    cure: Cure
    """What ends it once it is more than a word; a word expires."""
    blame: Blame
    advice: Advice
