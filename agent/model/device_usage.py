"""Records of usages. A usage is the use of one device by one pod through one claim, from its beginning to its
end.

agent.devices.consumers.usage tracks usages over time; agent.store.history_file stores them.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import Origin, PodRef
from agent.model.health import Health, Severity
from agent.model.time import Instant


class DeviceState(NamedTuple):
    """Health of a device at one moment, with the worst of its causes (faults that determine the health)."""

    health: Health
    severity: Severity
    code: str = ""
    """Code of the device's worst cause; empty: the device has no cause."""
    evidence: str = ""
    """Evidence of the worst cause: one line with the compared numbers."""
    since_s: float = 0.0
    """Time when the device's health changed to this state [s since 1970]; 0: unknown."""


STATE_NOT_KNOWN: Final = DeviceState(Health.UNKNOWN, Severity.UNKNOWN, "", "not known to the agent")
"""State of a device that the agent's report does not have."""


class UsageEndKind(StrEnum):
    """Way in which the usage of a device by a pod ended."""

    RELEASED = "released"
    """The usage ended because the claim is no longer prepared for the pod."""
    SUCCEEDED = "succeeded"
    """The usage ended because the pod succeeded."""
    FAILED = "failed"
    """The usage ended because the pod failed."""
    REPLACED = "replaced"
    """The usage ended because a new claim with the same name replaced the claim."""
    AWAY = "away"
    """The usage ended while the agent did not run, so its exact end is not known."""


class UsageEnd(NamedTuple):
    """End of the usage of a device by a pod: kind, times and duration."""

    ending: UsageEndKind
    seen_s: float
    """Time when a source last listed the usage [s since 1970].

    The usage ended between this time and ``noticed_s``.
    """
    noticed_s: float
    """Time when the agent noticed the end of the usage [s since 1970]."""
    lasted_s: float
    """Time from the agent's first sight of the usage to its end [s]."""


@dataclass(frozen=True, slots=True)
class PodDeviceUsage:
    """Usage of one device by one pod through one claim, with the states of the device during the usage."""

    id: str
    """Id of the usage, unique over all runs of the agent."""
    pod: PodRef
    claim: ClaimRef
    device: DeviceRef
    began: Instant
    """Time when the agent first saw the usage."""
    before: bool
    """True: the usage existed at the agent's first read of its sources; it may have begun before ``began``.
    """
    state: DeviceState
    """Newest state of the device; for an ended usage, the state at its end."""
    worst: DeviceState
    """Worst state of the device during the usage; the first of several equal states."""
    sources: tuple[Origin, ...]
    """Sources that list the usage. It ends only when all of them answer and no longer list it."""
    requests: tuple[str, ...] = ()
    """Names of the claim's requests that the device serves; empty: unknown."""
    containers: tuple[str, ...] = ()
    """Names of the containers that use the device; empty: unknown."""
    owner: str = ""
    """Controller of the pod, such as ``Job train``; empty: none or unknown."""
    maybe: tuple[str, ...] = ()
    """Possible names of the pod, ``<namespace>/<name>``, while no source gives its name."""
    resumed: bool = False
    """True: an earlier run of the agent saw the begin; ``began.mono_ns`` is not comparable with this run's
    clock."""
    ended: UsageEnd | None = None
    """End of the usage; None: the usage continues."""


class StoredUsages(NamedTuple):
    """Usages of devices by pods that an earlier run of the agent stored."""

    running: tuple[PodDeviceUsage, ...] = ()
    ended: tuple[PodDeviceUsage, ...] = ()
    """Ended usages that a source still listed at the last write; they do not count as new usages."""
    last_written_s: float = 0.0
    """Time of the last write [s since 1970]; 0: nothing was stored."""
