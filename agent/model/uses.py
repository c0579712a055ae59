"""A use: a device of a claim of a pod on this node, from when it was seen to begin until it ended.

Words only. What follows from one look to the next is in agent.devices.consumers.usage, where it is kept in
agent.store.history.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import Origin, PodRef
from agent.model.health import Health, Severity
from agent.model.time import Instant


class DeviceState(NamedTuple):
    """How a device was at one moment."""

    health: Health
    severity: Severity
    code: str = ""
    """Of the cause that led; empty: there was none."""
    evidence: str = ""
    """One line with the numbers that were compared."""
    since_s: float = 0.0
    """Since when that was so [s since 1970]; 0: nobody says."""


NOT_KNOWN: Final = DeviceState(Health.UNKNOWN, Severity.UNKNOWN, "", "not known to the agent")
"""Of a device that no report has: nobody looks at it, so nobody knows."""


class Ending(StrEnum):
    """How a use ended."""

    RELEASED = "released"
    """Those who told of it no longer do: the claim is not prepared for the pod any more."""
    SUCCEEDED = "succeeded"
    """The pod has."""
    FAILED = "failed"
    """Likewise."""
    REPLACED = "replaced"
    """There is another claim of the same name in its place."""
    AWAY = "away"
    """Somehow, while the agent was away."""


class UsageEnd(NamedTuple):
    """That a use is over."""

    ending: Ending
    seen_s: float
    """When it was last seen [s since 1970]: it ended between this and..."""
    noticed_s: float
    """...that."""
    lasted_s: float
    """From when it was first seen [s]; by the clock that nobody sets, unless the agent was away meanwhile."""


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """One pod's use of one device through one claim."""

    id: str
    """Like no other's, whichever agent saw it."""
    pod: PodRef
    claim: ClaimRef
    device: DeviceRef
    began: Instant
    """When it was first seen."""
    before: bool
    """It was there when somebody looked for the first time: it began then, or before."""
    state: DeviceState
    """The newest; of one that has ended, the last."""
    worst: DeviceState
    """The worst meanwhile; of several that are equally bad, the first."""
    told_by: tuple[Origin, ...]
    """Who must be heard before it can be said that it is over."""
    requests: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    """All that anybody has named; empty: nobody has."""
    owner: str = ""
    """The pod's controller, ``Job train``."""
    maybe: tuple[str, ...] = ()
    """While nobody has told the name of the pod: those that it may have, ``<namespace>/<name>``."""
    resumed: bool = False
    """An earlier agent saw it begin: ``began.mono_ns`` means nothing."""
    ended: UsageEnd | None = None
    """None: it goes on."""


class Kept(NamedTuple):
    """What an earlier agent has left."""

    running: tuple[DeviceUsage, ...] = ()
    over: tuple[DeviceUsage, ...] = ()
    """Those that ended while somebody still told of them: they do not begin again."""
    left_s: float = 0.0
    """When it last wrote [s since 1970]."""
