"""Device usage: one device of one claim of one pod on this node, from its begin to its end.

agent.devices.consumers.usage tracks usages over time; agent.store.history stores them.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import Origin, PodRef
from agent.model.health import Health, Severity
from agent.model.time import Instant


class DeviceState(NamedTuple):
    """State of a device at one moment."""

    health: Health
    severity: Severity
    code: str = ""
    """Code of the worst cause; empty: there is none."""
    evidence: str = ""
    """One line with the compared numbers."""
    since_s: float = 0.0
    """Begin of this state [s since 1970]; 0: unknown."""


NOT_KNOWN: Final = DeviceState(Health.UNKNOWN, Severity.UNKNOWN, "", "not known to the agent")
"""State of a device that is in no report."""


class Ending(StrEnum):
    """How a usage ended."""

    RELEASED = "released"
    """The claim is no longer prepared for the pod: its sources no longer list it."""
    SUCCEEDED = "succeeded"
    """The pod succeeded."""
    FAILED = "failed"
    """The pod failed."""
    REPLACED = "replaced"
    """A new claim has the same name."""
    AWAY = "away"
    """The usage ended while the agent did not run."""


class UsageEnd(NamedTuple):
    """End of a usage."""

    ending: Ending
    seen_s: float
    """When the usage was last seen [s since 1970]. It ended between this and ``noticed_s``."""
    noticed_s: float
    """When the end was noticed [s since 1970]."""
    lasted_s: float
    """Duration since the usage was first seen [s], by the monotonic clock unless the agent restarted."""


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """Use of one device by one pod through one claim."""

    id: str
    """Id, unique over all runs of the agent."""
    pod: PodRef
    claim: ClaimRef
    device: DeviceRef
    began: Instant
    """When the usage was first seen."""
    before: bool
    """Whether the usage existed at the first read, so that it may have begun earlier than ``began``."""
    state: DeviceState
    """Newest state of the device; the last one if the usage has ended."""
    worst: DeviceState
    """Worst state during the usage; the first of several equal ones."""
    sources: tuple[Origin, ...]
    """Sources that reported the usage; all must answer before it can end."""
    requests: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    """All containers that any source named; empty: none."""
    owner: str = ""
    """Controller of the pod, ``Job train``."""
    maybe: tuple[str, ...] = ()
    """Possible names of the pod, ``<namespace>/<name>``, while no source gives its name."""
    resumed: bool = False
    """Whether an earlier run of the agent saw the begin, so that ``began.mono_ns`` is invalid."""
    ended: UsageEnd | None = None
    """End of the usage; None: it continues."""


class Kept(NamedTuple):
    """Usages that an earlier run of the agent stored."""

    running: tuple[DeviceUsage, ...] = ()
    over: tuple[DeviceUsage, ...] = ()
    """Ended usages that a source still listed; they do not begin again."""
    left_s: float = 0.0
    """Time of the last write [s since 1970]."""
