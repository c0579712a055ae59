"""Errors by origin; the command line has one exit code for each class.

An error's text names the object and the numbers, and is printed after ``drahealth: ``. A bug of the agent has
no
class here: it ends the process with its traceback.
"""

from collections.abc import Iterable


class DrahealthError(Exception):
    """Base class of all errors that an operator or a caller can fix."""


class ConfigError(DrahealthError):
    """Invalid setting, or a machine that cannot be served with the settings."""

    def __init__(self, text: str, *, key: str = "") -> None:
        """Create the error; ``key`` is the setting's key in the file, e.g. ``agent.period``, or empty."""
        super().__init__(f"{key}: {text}" if key else text)
        self.text = text
        self.key = key


class Busy(DrahealthError):
    """Resource that another process holds; a later retry can help."""


class ProbeError(DrahealthError):
    """Source that cannot be read or parsed."""


class UsageError(DrahealthError):
    """Invalid command line."""


class AgentUnreachable(DrahealthError):
    """Socket without a server, or with a server that stopped or does not speak the protocol."""


class PermissionDenied(DrahealthError):
    """Missing permission of the user who runs the process."""


class OutputError(DrahealthError):
    """Failed write to standard output or standard error.

    Not an OSError, because argparse, warnings and others ignore those.
    """


class ReaderGone(OutputError):
    """Output pipe whose reader has closed it."""


def root_of(error: BaseException) -> BaseException:
    """Return the only exception in nested groups of one, as Trio wraps the exception of a task."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'name'?`` with the known name closest to ``word``; empty if none is close."""
    from difflib import get_close_matches  # needed only for wrong input

    near = get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
