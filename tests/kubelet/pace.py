"""The kubelet's deadlines and waiting times, and a clock that a test can advance."""

import time
from dataclasses import dataclass, replace
from typing import Final, Self

from patience import PATIENCE_S

NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Pace:
    """Every duration of the kubelet that a plugin can notice [s]."""

    # Deadlines of calls to the plugin.
    dial_s: float = 10.0
    get_info_s: float = 1.0
    notify_s: float = 5.0
    call_s: float = 45.0
    """The deadline of NodePrepareResources and NodeUnprepareResources."""

    # Times between two actions of the kubelet.
    reconcile_s: float = 1.0
    """Time between two comparisons of the existing sockets with the registered plugins."""
    backoff_first_s: float = 0.5
    backoff_limit_s: float = 122.0
    """The wait after a failed registration doubles up to this limit, for each socket."""
    reconnect_first_s: float = 1.0
    reconnect_limit_s: float = 120.0
    """gRPC's backoff for a connection that cannot be established."""
    stream_retry_s: float = 5.0
    """Wait after a health stream has ended for any reason."""
    wipe_s: float = 30.0
    """Time without a connection to any endpoint of a driver before its ResourceSlices are deleted."""
    resync_s: tuple[float, float] = (60.0, 90.0)
    """Time between two syncs of a pod without events."""
    unprepare_retry_s: tuple[float, float] = (10.0, 15.0)
    """Wait after a failed unprepare of a deleted pod."""
    inactive_s: float = 60.0
    """Time between two searches for claims whose pods are gone."""
    event_refill_s: float = 300.0
    """Time after which a pod whose events were limited may have one more."""

    @classmethod
    def fast(cls) -> Self:
        """Return waiting times of tenths of a second, and patient deadlines of registrations, so that slow
        machines do not fail.
        """
        return replace(
            cls(),
            dial_s=PATIENCE_S,
            get_info_s=PATIENCE_S,
            notify_s=PATIENCE_S,
            reconcile_s=0.05,
            backoff_first_s=0.05,
            backoff_limit_s=0.4,
            reconnect_first_s=0.1,
            reconnect_limit_s=0.2,
            stream_retry_s=0.25,
            wipe_s=1.5,
            resync_s=(0.6, 0.9),
            unprepare_retry_s=(0.1, 0.15),
            inactive_s=0.5,
            event_refill_s=0.3,  # below resync_s: a pod has events however long a slow machine takes
        )


class Clock:
    """The wall clock plus an offset. Leases are in real seconds, so a test advances the clock instead of
    waiting.
    """

    def __init__(self) -> None:
        self._ahead_ns = 0

    def now_ns(self) -> int:
        """Return the time since 1970 [ns]."""
        return time.time_ns() + self._ahead_ns

    def advance(self, seconds: float) -> None:
        """Advance the clock."""
        self._ahead_ns += int(seconds * NS)
