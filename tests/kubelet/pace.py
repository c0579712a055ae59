"""How long the kubelet waits for what, and what time it is.

The numbers are the kubelet's; nothing else of it is in this file.
"""

import time
from dataclasses import dataclass, replace
from typing import Final, Self

NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Pace:
    """Every duration of the kubelet that a plugin can notice [s]."""

    # Deadlines: what a plugin gets, at most.
    dial_s: float = 10.0
    get_info_s: float = 1.0
    notify_s: float = 5.0
    call_s: float = 45.0
    """Of NodePrepareResources and NodeUnprepareResources."""

    # Waiting: for how long the kubelet itself does nothing.
    reconcile_s: float = 1.0
    """Between two comparisons of the sockets that are there with the plugins that are registered."""
    backoff_first_s: float = 0.5
    backoff_limit_s: float = 122.0
    """After a registration that failed, doubling, for each socket."""
    reconnect_first_s: float = 1.0
    reconnect_limit_s: float = 120.0
    """gRPC's, of a connection that cannot be made."""
    stream_retry_s: float = 5.0
    """After a health stream has ended, whatever for."""
    wipe_s: float = 30.0
    """Without a connection to any endpoint of a driver, before its ResourceSlices are deleted."""
    resync_s: tuple[float, float] = (60.0, 90.0)
    """Between two looks at a pod to which nothing happens."""
    unprepare_retry_s: tuple[float, float] = (10.0, 15.0)
    """After a failed unprepare of a pod that ends."""
    inactive_s: float = 60.0
    """Between two searches for claims whose pods are gone."""

    @classmethod
    def fast(cls) -> Self:
        """Waits tenths of a second. The deadlines are the real ones: a slow machine is no late plugin."""
        return replace(
            cls(),
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
        )


class Clock:
    """The wall clock, which a test may put forward: leases are the plugin's, in real seconds."""

    def __init__(self) -> None:
        self._ahead_ns = 0

    def now_ns(self) -> int:
        """Since 1970 [ns]."""
        return time.time_ns() + self._ahead_ns

    def advance(self, seconds: float) -> None:
        """It is so much later from now on."""
        self._ahead_ns += int(seconds * NS)
