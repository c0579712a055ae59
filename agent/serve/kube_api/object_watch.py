"""Watch of a list of Kubernetes objects that resumes after every interruption.

A watch begins with the complete list and continues with each change. After a lost connection it resumes from
the last version that it has seen; if the API server no longer has that version (410 Gone), it lists again.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from urllib.parse import urlencode

import msgspec

from agent.errors import ApiError, ApiUnreachableError
from agent.system.output import get_logger
from agent.system.timing import random_fraction

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

STREAM_S: Final = 300
"""Time after which the API server ends the stream of a watch [s]; the watch resumes with a new one."""
RETRY_S: Final = 1.0
"""Shortest pause before a failed watch resumes [s], doubled after each further failure."""
RETRY_MAX_S: Final = 30.0
RETRY_AFTER_MAX_S: Final = 600.0
"""Longest pause that the API server can ask for with Retry-After [s]."""
EVENT_BYTES: Final = 16 << 20
"""Largest accepted event of a watch [bytes]."""
GONE: Final = 410
LASTING: Final = frozenset({400, 401, 403, 404, 405, 422})
"""HTTP statuses that end a watch with an exception: another attempt would get the same answer."""
KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Socket options with which a dead connection is found within half a minute."""

log = get_logger(__name__)


class ObjectList(NamedTuple):
    """Objects of a list, and the version of the API server's data that the list shows."""

    items: list[dict[str, Any]]
    resource_version: str


class OpenStream:
    """Open answer of the API server whose body has no end.

    The object keeps the socket, which HTTPConnection may drop before the answer ends.
    """

    def __init__(self, connection: "HTTPConnection", used: socket.socket, answer: "HTTPResponse") -> None:
        self.socket = used
        self.answer = answer
        self._connection = connection

    def close(self) -> None:
        """Close the answer and its connection."""
        self.answer.close()
        self._connection.close()


class WatchEventKind(StrEnum):
    """Kind of a watch event: the complete list, or the change of one object."""

    LISTED = "listed"
    """The event has the complete list, which replaces all earlier events."""
    CHANGED = "changed"
    """The event has an object that was created or updated."""
    DELETED = "deleted"


class WatchEvent(NamedTuple):
    """Event of a watch: the watched objects, or a change of one of them."""

    kind: WatchEventKind
    objects: tuple[dict[str, Any], ...]
    """All watched objects, or the one that was changed or deleted, in its last version."""


class WatchedServer(Protocol):
    """Interface to the client of the API server, as a watch uses it."""

    @property
    def url(self) -> str:
        """URL of the API server."""

    def list_objects(self, path: str, field_selector: str = "") -> ObjectList:
        """Return all objects of a list of the API server."""

    def open_stream(self, path: str) -> OpenStream:
        """Return the open answer to a GET whose body has no end."""


class ObjectWatch:
    """Watch of the objects of a list: an iterator for one thread, which any thread closes.

    ``for event in watch`` blocks until the next event and ends after :meth:`close`. An API server that is
    unreachable is tried again, with growing pauses.

    Raises:
        ApiForbiddenError: The role lacks the verb ``list`` or ``watch``. Raised by the iteration.
        ApiError: The API server refuses the watch for another lasting reason. Raised by the iteration.
    """

    def __init__(
        self,
        api: WatchedServer,
        path: str,
        field_selector: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._path = path
        self._selector = field_selector
        self._clock = clock
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def __iter__(self) -> Iterator[WatchEvent]:
        version, pause_s, logged = "", RETRY_S, ""
        while not self._closed.is_set():
            failure, asked_s, began_s = "", 0.0, self._clock()
            try:
                if not version:
                    items, version = self._api.list_objects(self._path, self._selector)
                    yield WatchEvent(WatchEventKind.LISTED, tuple(items))
                for event, newest in self._stream(version):
                    version, pause_s = newest or version, RETRY_S
                    if event is not None:
                        yield event
                    if self._closed.is_set():
                        return
            except ApiError as error:
                if error.status in LASTING:
                    raise
                asked_s = retry_after_s(error)
                version = "" if error.status == GONE else version
                failure = "" if error.status == GONE else str(error)
            except (ApiUnreachableError, OSError) as error:
                failure = str(error)
            if self._closed.is_set():
                return
            if failure and failure != logged:
                log.warning("watch of %s: interrupted: %s; will resume", self._path, failure)
            logged = failure
            if self._clock() - began_s > RETRY_MAX_S:  # a stream that ends in its time, also without an event
                pause_s = RETRY_S
            self._closed.wait(max(asked_s, pause_s * (0.5 + random_fraction())))
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    def close(self) -> None:
        """End the watch's iteration, also while it waits for an event. Thread-safe. Never blocks."""
        self._closed.set()
        with self._lock:
            if self._socket is not None:
                with suppress(OSError):  # not SSLSocket.shutdown, which takes the reader's state away
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _stream(self, version: str) -> Iterator[tuple[WatchEvent | None, str]]:
        """Yield each change since a version, with the version after the change.

        A bookmark only announces a version; it is yielded as None with that version.

        Raises ApiError (410 if the version is too old), ApiUnreachableError, OSError.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(STREAM_S),
            "fieldSelector": self._selector,
        }
        chosen = urlencode({key: value for key, value in query.items() if value})
        stream = self._api.open_stream(f"{self._path}?{chosen}")
        try:
            self._keep(stream.socket)
            while line := self._read_line(stream.answer):
                yield _parse_event(line)
        finally:
            with self._lock:
                self._socket = None
            stream.close()

    def _keep(self, used: socket.socket) -> None:
        """Set timeout and keepalive of a stream's socket, and store it for :meth:`close`."""
        used.settimeout(STREAM_S + 60.0)
        for level, option, value in KEEPALIVE:
            with suppress(OSError):  # no TCP socket
                used.setsockopt(level, option, value)
        with self._lock:
            self._socket = used
        if self._closed.is_set():
            self.close()

    def _read_line(self, answer: "HTTPResponse") -> bytes:
        """Return the next line of a stream's body; empty at its end, also after :meth:`close`."""
        from http.client import HTTPException

        try:
            line = answer.readline(EVENT_BYTES + 1)
        except (OSError, ValueError, HTTPException) as error:
            if self._closed.is_set():
                return b""
            raise ApiUnreachableError(f"API server {self._api.url}: stream ended: {error}") from error
        if len(line) > EVENT_BYTES:
            raise ApiUnreachableError(f"API server {self._api.url}: event of more than {EVENT_BYTES} bytes")
        return line


def retry_after_s(error: BaseException) -> float:
    """Return the pause that the API server asks for with an error [s], at most RETRY_AFTER_MAX_S; 0: none."""
    asked_s = error.retry_after_s if isinstance(error, ApiError) else None
    return min(asked_s or 0.0, RETRY_AFTER_MAX_S)


def is_stored(obj: object) -> bool:
    """Return whether a value is an object that an API server has stored: it has a name and a version."""
    metadata = obj.get("metadata") if isinstance(obj, dict) else None
    return isinstance(metadata, dict) and all(
        isinstance(metadata.get(key), str) for key in ("name", "resourceVersion")
    )


class _WireEvent(msgspec.Struct):
    """Watch event as the API server sends it in a line of JSON."""

    type: str
    object: dict[str, Any]


def _parse_event(line: bytes) -> tuple[WatchEvent | None, str]:
    """Parse a line of a watch; return its event and version.

    The event is None for a bookmark, which only has a version.

    Raises:
        ApiError: The API server ends the watch with an error.
        ApiUnreachableError: The line is not an event.
    """
    try:
        event = msgspec.json.decode(line, type=_WireEvent)
    except (ValueError, RecursionError) as error:
        raise ApiUnreachableError(f"API server: watch event cannot be read: {error}") from error
    obj = event.object
    if event.type == "ERROR":
        code = obj.get("code")
        status = code if isinstance(code, int) else 500
        raise ApiError(status, str(obj.get("reason", "")), str(obj.get("message", "")), line)
    metadata = obj.get("metadata")
    version = str(metadata.get("resourceVersion", "")) if isinstance(metadata, dict) else ""
    if event.type == "BOOKMARK":
        return None, version
    if not is_stored(obj):
        raise ApiUnreachableError("API server: watch event has no object with a name and a version")
    kind = WatchEventKind.DELETED if event.type == "DELETED" else WatchEventKind.CHANGED
    return WatchEvent(kind, (obj,)), version
