"""GPU faults that persist across restarts of the agent, until a recovery outside the agent ends them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from agent.model.gpu import MigSample
from agent.model.health import Blame


class Cure(StrEnum):
    """Event that ends a latched fault. A reboot ends all but REPLACE; a GPU reset ends LINKS_UP to RESET."""

    EXPIRES = "expires"
    """Time ends the fault: it is reported for ten minutes."""
    LINKS_UP = "links-up"
    """All NVLinks that were up before are up again."""
    ACTION = "action"
    """The driver requests no recovery action and no row remap is pending, both for long enough."""
    NOTHING_PENDING = "nothing-pending"
    """The reset that the driver requested was done."""
    RESET = "reset"
    """The GPU was reset."""
    REBOOT = "reboot"
    """The node was rebooted."""
    REPLACE = "replace"
    """Another GPU is in the slot."""


class KnownGpu(NamedTuple):
    """A GPU that this node has or had."""

    number: int
    """Number in the device name ``gpu-<number>``."""
    uuid: str
    bus: str
    name: str
    migs: tuple[MigSample, ...] = ()
    """MIG instances when the GPU was last seen."""


class PersistentFault(NamedTuple):
    """A latched fault of one GPU, or of the fabric."""

    uuid: str
    """UUID of the GPU; empty: the fabric."""
    code: str
    """Code of the cause, ``gpu.xid.79``."""
    gi: int
    """GPU instance; WHOLE_GPU if the fault names none."""
    ci: int
    """Compute instance; WHOLE_GPU if the fault names none."""
    times: int
    first_wall_s: float
    last_wall_s: float
    log_us: int
    """Kernel-log time of this boot up to which lines are already counted [us]."""
    boot_id: str
    cure: Cure
    healed: bool
    """Whether the fault is resolved. It is kept so that old lines of the log do not raise it again."""
    evidence: str
    advice: str
    severity: int
    """Value of :class:`agent.model.health.Severity`."""
    texts: tuple[str, ...] = ()
    """Newest kernel-log lines that reported the fault, the newest last."""
    pids: tuple[int, ...] = ()
    """Newest process ids that the lines in ``texts`` name."""
    bursts_wall_s: tuple[float, ...] = ()
    """Start times of the bursts of log lines in the day before ``last_wall_s`` [s since 1970]."""
    earlier_boots: int = 0
    """Number of earlier boots in which the fault occurred."""
    healed_wall_s: float = 0.0
    """Time when the fault was resolved [s since 1970]; 0: not resolved."""
    blame: Blame = Blame.HARDWARE
    before_us: bool = False
    """Whether the fault occurred while no agent ran, so that a later recovery may have been missed."""
    action: int = 0
    """Recovery action that the driver last requested."""
    counters: tuple[int, ...] = ()
    """Last readings of the counters that a reset clears; -1: not available."""


@dataclass(frozen=True, slots=True)
class PersistentGpuState:
    """All persistent GPU state. The default is that of an agent's first start."""

    gpus: tuple[KnownGpu, ...] = ()
    faults: tuple[PersistentFault, ...] = ()
