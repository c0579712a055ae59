"""Exit codes: one table for what was found, one for what went wrong.

0 to 3 are the codes of Nagios and its kin, so that ``drahealth scan`` is a check as it stands. 64 to 78 are
those of sysexits.h, 128 and above those of a shell for signals.
"""

from collections.abc import Iterable
from typing import Final

from agent.errors import (
    AgentUnreachable,
    Busy,
    ConfigError,
    DrahealthError,
    OutputError,
    PermissionDenied,
    ReaderGone,
    UsageError,
)
from agent.model.health import Severity

EXIT_OF_SEVERITY: Final = {
    Severity.OK: 0,
    Severity.INFO: 0,
    Severity.DEGRADED: 1,
    Severity.UNHEALTHY: 2,
    Severity.UNKNOWN: 3,
}

INTERNAL: Final = 70
NOT_ALLOWED: Final = 77

EXIT_OF_ERROR: Final[tuple[tuple[type[BaseException], int], ...]] = (
    (UsageError, 64),
    (AgentUnreachable, 69),
    (ReaderGone, 141),
    (OutputError, 74),
    (Busy, 75),
    (PermissionDenied, NOT_ALLOWED),
    (PermissionError, NOT_ALLOWED),
    (ConfigError, 78),
    (DrahealthError, INTERNAL),
    (KeyboardInterrupt, 130),
)
"""The first row that fits decides. What fits none is a mistake of ours: INTERNAL, with its traceback."""


def exit_of_severities(severities: Iterable[Severity]) -> int:
    """The worst one decides. None at all is no knowledge, hence unknown, never healthy."""
    return EXIT_OF_SEVERITY[max(severities, default=Severity.UNKNOWN)]
