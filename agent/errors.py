"""What can go wrong, named by who is at fault. The command line has one exit code for each class.

The text of an error holds the culprit and the numbers, and reads well behind ``drahealth: ``. A mistake of
our own has no class here: it ends the process with its traceback.
"""

from collections.abc import Iterable


class DrahealthError(Exception):
    """Anything that somebody other than the agent's authors can mend."""


class ConfigError(DrahealthError):
    """The operator's: a setting, or a machine that cannot be served with it."""

    def __init__(self, text: str, *, key: str = "") -> None:
        """``key`` is the setting's place in the file, e.g. ``agent.period``; empty if it is none's."""
        super().__init__(f"{key}: {text}" if key else text)
        self.text = text
        self.key = key


class Busy(DrahealthError):
    """Somebody else's process holds what we need; trying again later can help."""


class ProbeError(DrahealthError):
    """A source's: it cannot be read, or says what nobody understands."""


class UsageError(DrahealthError):
    """The caller's: a command line that means nothing."""


class AgentUnreachable(DrahealthError):
    """Nobody serves the socket, or whoever does stopped or does not speak our language."""


class PermissionDenied(DrahealthError):
    """The system's: the user who runs this may not read or write what is needed."""


class OutputError(DrahealthError):
    """Whoever's we write to: standard output or standard error, which took not all that was said.

    No OSError, of which argparse, warnings and others think nothing.
    """


class ReaderGone(OutputError):
    """It was a pipe, and whoever read it has closed it."""


def root_of(error: BaseException) -> BaseException:
    """The only exception in groups of one: what a task raises, Trio puts into one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def suggestion(word: str, known: Iterable[str]) -> str:
    """What ``word`` was probably meant to be, as the end of a sentence; empty if nothing is near."""
    from difflib import get_close_matches  # nobody mistypes the words of an agent that runs

    near = get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
