"""Exceptions that drahealth raises; the command line has one exit code for each class.

The text of an exception names the object and the numbers, and is printed after ``drahealth: ``. A bug of the
agent has no class here: it ends the process with its traceback.
"""

import re
from collections.abc import Iterable
from errno import EMFILE, ENFILE, ENOBUFS, ENOMEM
from typing import Any, Final

LACKING_VERB: Final = re.compile(r'\bUser ".*" cannot ([a-z]+) (?:resource|path)\b')
"""Pattern of the message of an API server whose role-based access control refuses a verb."""
LACK_ERRNOS: Final = frozenset({EMFILE, ENFILE, ENOBUFS, ENOMEM})
"""Errnos of a call for which this process, or the machine, lacks a resource; its object may be well."""


class CopyableError(Exception):
    """Exception that can be copied, and pickled for another process, whatever its constructor needs."""

    def __reduce__(self) -> tuple[Any, ...]:  # Python's own calls the constructor with the text alone
        return type(self).__new__, (type(self), *self.args), self.__dict__


class DrahealthError(CopyableError):
    """Base class of all errors that an operator or a caller can fix."""


ERROR_CHARS: Final = 2000
"""Largest length of a ConfigError, and of a line of an error on the command line."""


def without_middle(text: str) -> str:
    """Return `text`; if it is over ERROR_CHARS, as one that quotes a long value, without its middle."""
    if len(text) <= ERROR_CHARS:
        return text
    return f"{text[: ERROR_CHARS // 2]} ... {text[-ERROR_CHARS // 2 :]}"


class ConfigError(DrahealthError, ValueError):
    """A setting or an argument is invalid, or does not fit this machine."""

    def __init__(self, text: str, *, key: str = "") -> None:
        """Create the error; ``key`` is the key of the setting in the configuration file, e.g.
        ``agent.period``, or empty."""
        text = without_middle(text)
        super().__init__(f"{key}: {text}" if key else text)
        self.text = text
        self.key = key


class ResourceBusyError(DrahealthError):
    """A lock, socket or file is held by another process, or does not exist yet; a later retry can help."""


class ProbeError(DrahealthError):
    """A source of data (file, socket or library) cannot be read or parsed."""


class UsageError(DrahealthError):
    """The command line is invalid."""


class FaultStillPresent(DrahealthError):
    """A reading still shows a fault of a device whose faults are to be cleared; a later retry can help."""


class AgentUnreachable(DrahealthError):
    """No agent or driver serves the socket, or the server stopped or does not speak the protocol."""


class PermissionDeniedError(DrahealthError):
    """The user who runs the process lacks a permission."""


class ApiUnreachableError(DrahealthError):
    """The API server is unreachable or not trusted, did not answer in time, or sent no object."""


class ApiError(DrahealthError):
    """The API server answered a call with an error."""

    def __init__(
        self, status: int, reason: str, message: str, body: bytes = b"", *, retry_after_s: float | None = None
    ) -> None:
        text = " ".join(message.split())  # the API server lists conflicts and wrong fields in lines
        super().__init__(f"{status} {reason}: {text}" if text else f"{status} {reason}")
        self.status = status
        """HTTP status of the API server's answer."""
        self.reason = reason
        """Reason of the API server's Status, such as ``NotFound``; else the phrase of the HTTP status."""
        self.body = body
        """Complete answer of the API server, normally a ``Status`` object."""
        self.retry_after_s = retry_after_s
        """Time that the API server asks its client to wait before another call [s]; None: it names none."""


class ApiForbiddenError(ApiError):
    """The API server refuses a call: the role lacks a verb, or an admission policy denies the object."""

    def __init__(
        self, status: int, reason: str, message: str, body: bytes = b"", *, verb: str, resource: str
    ) -> None:
        """Create the error for a verb and a resource, as they are written in a role."""
        # a webhook or a quota refuses for other reasons than the role
        hint = "; check that the role has this verb" if LACKING_VERB.search(message) else ""
        detail = f": {message}{hint}" if message.strip() else ""
        super().__init__(status, reason, f"{verb} of {resource}{detail}", body)
        self.verb = verb
        """Verb of the role's rule, such as ``create``."""
        self.resource = resource
        """Resource with its API group, such as ``resourceslices.resource.k8s.io``."""


class OutputError(DrahealthError):
    """Standard output or standard error cannot be written.

    This class is not an OSError, because argparse and the module warnings ignore an OSError.
    """


class OutputPipeClosed(OutputError):
    """The reader of an output pipe has closed it, as ``head`` does."""


def unwrap_error(error: BaseException) -> BaseException:
    """Return the exception inside nested groups of one exception each. Trio wraps errors in such groups."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def suggestion(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``; did you mean 'name'?`` with the known name closest to ``word``; empty if none is as similar
    as ``cutoff``, 0 to 1."""
    from difflib import get_close_matches  # needed only for wrong input

    names = {name.lstrip("-"): name for name in known}  # every flag begins with two equal characters
    near = get_close_matches(str(word).lstrip("-"), names, 1, cutoff)  # a driver may pass anything
    return f"; did you mean {names[near[0]]!r}?" if near else ""
