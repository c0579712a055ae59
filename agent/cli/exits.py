"""Exit codes: one table for what was found, one for what went wrong.

0 to 3 are the codes of Nagios and its kin, so that ``drahealth scan`` is a check as it stands. 64 to 78 are
those of sysexits.h, 128 and above those of a shell for signals.
"""

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Final

from agent.errors import (
    AgentUnreachable,
    Busy,
    ConfigError,
    DrahealthError,
    PermissionDenied,
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
    (Busy, 75),
    (PermissionDenied, NOT_ALLOWED),
    (PermissionError, NOT_ALLOWED),
    (ConfigError, 78),
    (DrahealthError, INTERNAL),
    (KeyboardInterrupt, 130),
    (BrokenPipeError, 141),
)
"""The first row that fits decides. What fits none is a mistake of ours: INTERNAL, with its traceback."""


def exit_of_severities(severities: Iterable[Severity]) -> int:
    """The worst one decides. None at all is no knowledge, hence unknown, never healthy."""
    return EXIT_OF_SEVERITY[max(severities, default=Severity.UNKNOWN)]


def leave(code: int, left: Sequence[str]) -> int:
    """The code, if nothing hangs; else ends the process here and now, with it.

    Args:
        left: Threads that hang and were left behind. Destructors of a library that one is still inside could
            wait for it for ever.
    """
    if not left:
        return code
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
