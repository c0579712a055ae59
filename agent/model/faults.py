"""What is remembered of GPUs when the agent is not running: faults that only something outside can mend."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from agent.model.gpu import MigSample
from agent.model.health import Blame


class Cure(StrEnum):
    """What ends a latched fault. All but REPLACE are ended by a reboot, LINKS_UP to RESET by a reset."""

    EXPIRES = "expires"
    """Time: it is told for ten minutes."""
    LINKS_UP = "links-up"
    """Every NVLink that was up before is up again."""
    ACTION = "action"
    """The driver asks for no recovery, no row waits for its replacement; both for long enough."""
    NOTHING_PENDING = "nothing-pending"
    """The reset that the driver waits for was done."""
    RESET = "reset"
    """The GPU was reset."""
    REBOOT = "reboot"
    """The node was booted anew."""
    REPLACE = "replace"
    """Another GPU in its place."""


class KnownGpu(NamedTuple):
    """A GPU that this node had."""

    number: int
    """Of its name, ``gpu-<number>``."""
    uuid: str
    bus: str
    name: str
    migs: tuple[MigSample, ...] = ()
    """Its instances, when it was seen last."""


class KeptFault(NamedTuple):
    """A latched fault of one GPU, or of the fabric."""

    uuid: str
    """Of the GPU; empty: of the fabric."""
    code: str
    """Of the cause, ``gpu.xid.79``."""
    gi: int
    """WHOLE_GPU if it names no instance; so ``ci``."""
    ci: int
    times: int
    first_wall_s: float
    last_wall_s: float
    log_us: int
    """Lines of the kernel log of the same boot up to this time are counted already [us]."""
    boot_id: str
    cure: Cure
    healed: bool
    """It is over, and kept so that the log's old lines do not raise it again."""
    evidence: str
    advice: str
    severity: int
    """Of :class:`agent.model.health.Severity`."""
    texts: tuple[str, ...] = ()
    """Lines of the log that told of it, the newest last; a few."""
    pids: tuple[int, ...] = ()
    """Processes that the lines named; a few."""
    bursts_wall_s: tuple[float, ...] = ()
    """When each burst of the day before ``last_wall_s`` began."""
    earlier_boots: int = 0
    """In how many boots before ``boot_id`` it came, too."""
    healed_wall_s: float = 0.0
    """Since when it is over, if it is."""
    blame: Blame = Blame.HARDWARE
    before_us: bool = False
    """It came while no agent was there: nobody saw what happened since."""
    action: int = 0
    """Recovery action that the driver asked for last."""
    counters: tuple[int, ...] = ()
    """Counters that a reset sets back, as they were read last; -1 if one is not there."""


@dataclass(frozen=True, slots=True)
class FaultMemory:
    """All that is kept. The default is an agent's first start."""

    gpus: tuple[KnownGpu, ...] = ()
    faults: tuple[KeptFault, ...] = ()
