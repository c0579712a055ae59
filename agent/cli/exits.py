"""Exit codes of the command line: by the severity of a device, and by the class of an error.

0 to 3 are the codes of Nagios plugins, so that ``drahealth scan`` can be used as one; with ``--exit-style
npd`` its codes are those of node-problem-detector's custom plugins. 64 to 78 are those of sysexits.h, 128 and
above those of a shell for signals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from agent.errors import (
    AgentUnreachable,
    ApiError,
    ApiForbiddenError,
    ApiUnreachableError,
    ConfigError,
    DrahealthError,
    FaultStillPresent,
    OutputError,
    OutputPipeClosed,
    PermissionDeniedError,
    ResourceBusyError,
    UsageError,
)
from agent.model.health import Severity
from agent.model.source_state import unlisted_sources

if TYPE_CHECKING:
    from pathlib import Path

    from agent.model.source_state import SourceSample

EXIT_OF_SEVERITY: Final = {
    Severity.OK: 0,
    Severity.INFO: 0,
    Severity.DEGRADED: 1,
    Severity.UNHEALTHY: 2,
    Severity.UNKNOWN: 3,
}

EXIT_OF_SEVERITY_NPD: Final = {
    Severity.OK: 0,
    Severity.INFO: 0,
    Severity.DEGRADED: 0,  # the device can be used, and a condition of the node would say that it cannot
    Severity.UNHEALTHY: 1,
    Severity.UNKNOWN: 2,
}

INTERNAL: Final = 70
NOT_ALLOWED: Final = 77

EXIT_OF_ERROR: Final[tuple[tuple[type[BaseException], int], ...]] = (
    (UsageError, 64),
    (AgentUnreachable, 69),
    (ApiForbiddenError, NOT_ALLOWED),
    (ApiError, 69),
    (ApiUnreachableError, 69),
    (OutputPipeClosed, 141),
    (OutputError, 74),
    (ResourceBusyError, 75),
    (FaultStillPresent, 75),
    (PermissionDeniedError, NOT_ALLOWED),
    (PermissionError, NOT_ALLOWED),
    (ConfigError, 78),
    (DrahealthError, INTERNAL),
    (KeyboardInterrupt, 130),
)
"""Exit code by exception class; the first match counts.

Other exceptions are bugs: INTERNAL with a traceback.
"""


class UnreadablePath(NamedTuple):
    """File or directory that could not be read, with the reason and the exit code of the command."""

    path: Path
    reason: str
    exit_code: int


def exit_of_severities(
    severities: Iterable[Severity],
    codes: Mapping[Severity, int] = EXIT_OF_SEVERITY,
    *,
    sources: Iterable[SourceSample] = (),
) -> int:
    """Return the exit code for the worst of `severities`; if there are none, the exit code for UNKNOWN.

    The devices of `sources` that have not listed any yet are UNKNOWN.
    """
    missing = [Severity.UNKNOWN for _ in unlisted_sources(sources)]
    return codes[max((*severities, *missing), default=Severity.UNKNOWN)]
