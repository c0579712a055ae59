"""When a prepare that failed for a passing reason is tried again within the same call. Pure.

The kubelet waits 45 s for an answer and comes back after 60 to 90 s, so a short hitch is worth waiting out; a
driver that used up the 45 s itself would lose the race for its own answer.
"""

from typing import Final

FIRST_S: Final = 0.1
"""Bound of the first pause; each is twice the one before..."""
LONGEST_S: Final = 5.0
"""...up to this."""
LEAST_S: Final = 0.01
"""No pause is shorter, whatever the dice say."""
TOTAL_S: Final = 30.0
"""From the start of the call to the start of its last try: what is left of the 45 s is that try's."""


def pause_s(attempt: int, spent_s: float, jitter: float, retry_after_s: float | None = None) -> float | None:
    """How long to wait before the next try; None: no more tries.

    Args:
        attempt: How many tries have failed, less one: 0 after the first.
        spent_s: Since the call began.
        jitter: From 0 to 1, drawn anew each time: full jitter, so that drivers of a whole cluster that failed
            together do not come back together.
        retry_after_s: The failure's own word for when trying can help at the earliest. If that is later than
            what is left of the time, nothing is gained by trying.
    """
    bound = min(LONGEST_S, FIRST_S * 2 ** min(attempt, 16))
    pause = max(LEAST_S, bound * jitter, retry_after_s or 0.0)
    return pause if spent_s + pause <= TOTAL_S else None
