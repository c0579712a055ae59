"""Use of one device by one pod through one claim on this Kubernetes node, from begin to end.

agent.devices.consumers.usage tracks the uses over time; agent.store.history stores them.
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


class UsageEndKind(StrEnum):
    """Way in which the use of a device by a pod ended."""

    RELEASED = "released"
    """The claim is no longer prepared for the pod: its sources no longer list it."""
    SUCCEEDED = "succeeded"
    """The pod succeeded."""
    FAILED = "failed"
    """The pod failed."""
    REPLACED = "replaced"
    """A new claim with the same name replaced the claim."""
    AWAY = "away"
    """The use ended while the agent did not run."""


class UsageEnd(NamedTuple):
    """Time and kind of the end of a device's use by a pod."""

    ending: UsageEndKind
    seen_s: float
    """Time when a source last listed the use [s since 1970]. The use ended between this and ``noticed_s``."""
    noticed_s: float
    """Time when the agent noticed the end [s since 1970]."""
    lasted_s: float
    """Duration since the agent first saw the use [s], by the monotonic clock unless the agent restarted."""


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """Use of one device by one pod through one claim."""

    id: str
    """Id, unique over all runs of the agent."""
    pod: PodRef
    claim: ClaimRef
    device: DeviceRef
    began: Instant
    """Time when the agent first saw the use."""
    before: bool
    """True: the use existed at the agent's first read and may have begun earlier than ``began``."""
    state: DeviceState
    """Newest state of the device; for an ended use, the state at its end."""
    worst: DeviceState
    """Worst state of the device during the use; the first of several equal states."""
    sources: tuple[Origin, ...]
    """Sources that reported the use; all of them must answer before the use can end."""
    requests: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    """All containers that any source named; empty: none."""
    owner: str = ""
    """Controller of the pod, ``Job train``."""
    maybe: tuple[str, ...] = ()
    """Possible names of the pod, ``<namespace>/<name>``, while no source gives its name."""
    resumed: bool = False
    """True: an earlier run of the agent saw the begin, so that ``began.mono_ns`` is invalid."""
    ended: UsageEnd | None = None
    """End of the use; None: the use continues."""


class StoredUses(NamedTuple):
    """Uses of devices by pods that an earlier run of the agent stored."""

    running: tuple[DeviceUsage, ...] = ()
    over: tuple[DeviceUsage, ...] = ()
    """Ended uses that a source still listed; the agent does not track them as new uses."""
    left_s: float = 0.0
    """Time of the last write [s since 1970]; 0: nothing was stored."""
