"""Limits of the history of device usage.

Separate from agent.model.uses, so that an agent on a node without claims does not load that module.
"""

from typing import Final, NamedTuple

RUNNING_MAX: Final = 20_000
"""Limit of usages tracked at the same time: many times what a node can run."""


class Limits(NamedTuple):
    """Limits of the stored usages that have ended."""

    rows: int = 10_000
    """Number of usages; 0: nothing is stored."""
    age_s: int = 30 * 86_400
    """Age since the end of the usage [s]."""
    size: int = 64 << 20
    """Size of the file [bytes]; the default number of rows takes at most half of it."""
