"""What is said of one check, and of checks that belong together. Values only."""

from typing import NamedTuple

from agent.model.health import Blame, Severity


class Check(NamedTuple):
    """One thing that can be said of a device."""

    code: str
    severity: Severity
    """The worst that it comes to."""
    blame: Blame
    source: str
    what: str
    """What it means."""
    threshold: str
    """When it is said."""
    why: str
    """Why it matters; of an XID, what is enough to mend it."""
    advice: str
    try_it: str = ""
    """How to see it happen: a command of the fake NVML's scenarios, or words."""


class Group(NamedTuple):
    """Checks that belong together."""

    title: str
    text: str
    checks: tuple[Check, ...]
    prefix: str = ""
    """Of the codes, if all that differs is a number behind it: a long list, printed as one table."""
    when: str = "when"
    """What the check's threshold is called."""
    why: str = "why it matters"
    """What its reason is called."""
