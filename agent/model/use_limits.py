"""Limits of the history of the uses of devices by pods.

Separate from agent.model.uses, so that an agent on a node without claims does not load that module.
"""

from typing import Final, NamedTuple

RUNNING_MAX: Final = 20_000
"""Limit of uses tracked at the same time: many times the number of pods that a Kubernetes node can run."""


class UseLimits(NamedTuple):
    """Limits of the stored uses of devices that have ended."""

    rows: int = 10_000
    """Greatest number of stored uses; 0: nothing is stored."""
    age_s: int = 30 * 86_400
    """Greatest time since the end of a stored use [s]."""
    size: int = 64 << 20
    """Greatest size of the file [bytes]; the default number of rows takes at most half of it."""
