"""What goes into the judgement of an XID, and what comes out of it.

Values only; they are gathered elsewhere, and judged by agent.health.gpu.xid.rules.
"""

from collections.abc import Sequence
from typing import NamedTuple

from agent.health.gpu.xid.lines import XidLine
from agent.health.gpu.xid.recovery import RecoveryAction
from agent.model.faults import Cure
from agent.model.health import Blame, Severity


class XidFault(NamedTuple):
    """What was seen of one XID on one device."""

    times: int = 1
    bursts: int = 1
    """Spells in the last 24 h, with quiet between them."""
    details: tuple[XidLine, ...] = ()
    """Lines of the kernel log, the newest last; a few. None if only NVML told of it."""
    pids: frozenset[int] = frozenset()
    """Processes that the lines named; a few."""
    followers: frozenset[int] = frozenset()
    """Other XIDs that came soon after."""


class XidFacts(NamedTuple):
    """What else is known of the device. None: it has no such thing, or it cannot be read now."""

    action: RecoveryAction | None = None
    """Field 230."""
    has_action: bool = False
    """Whether driver and GPU have field 230, be it readable now or not."""
    announced: RecoveryAction | None = None
    """What the newest XID 154 said; see :func:`announced`."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    page_pending: bool | None = None
    """Retired pages that wait for a reset (before Ampere)."""
    sram_threshold: bool | None = None
    links_down: bool | None = None
    """NVLinks are down that were up before."""
    replays_growing: bool = False
    """The PCIe link repeats packets."""
    ecc_on: bool | None = None
    has_root: bool = False
    """Another XID of the same GPU came before it, near enough to be its cause."""

    @property
    def asked(self) -> RecoveryAction | None:
        """What the driver asks for; None if it cannot be known."""
        return self.announced if self.action is None else self.action


class Decision(NamedTuple):
    """What is to be said of a fault."""

    severity: Severity
    evidence: str
    advice: str
    blame: Blame
    cure: Cure


def announced(lines: Sequence[XidLine]) -> RecoveryAction | None:
    """The recovery action that the newest XID 154 among the lines announced, if any says."""
    return next((line.action for line in reversed(lines) if line.action is not None), None)
