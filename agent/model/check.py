"""What a driver's own checks of its own devices found."""

from typing import NamedTuple

from agent.model.health import Finding


class CheckSample(NamedTuple):
    """One check of one device, as it ended last."""

    check: str
    """Name of the check: a DNS label."""
    subject: str
    """The device, ``<driver>/<pool>/<name>``."""
    finding: Finding | None
    """What was found; None: all is well, or nobody could look."""
    unread: str
    """Why nobody could look: it did not answer in time, or raised. Empty: it answered."""
    passes: int
    """How often it has ended; 0: its first look is not over."""
    beat_ns: int
    """CLOCK_MONOTONIC of its last end; before the first that of its start [ns]."""
    period_ns: int
    raise_after: int
    """Bad looks in a row that it takes to believe it..."""
    clear_after: int
    """...and good ones to believe that it is over."""
