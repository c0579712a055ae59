"""What was seen of a driver: values, as they were sent, believed of nobody and judged by nobody.

Times are seconds since the kubelet's part began, on the monotonic clock, unless a name says ``wall``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

V1: Final = "v1"
V1ALPHA1: Final = "v1alpha1"

LEAST_S: Final = 2
MOST_S: Final = 600
"""How long can be listened [s]."""

Key = tuple[bytes, bytes]
"""Pool and name of a device, as they were sent."""


class Device(NamedTuple):
    """One entry of a health list."""

    identified: bool
    """Whether it names a device at all."""
    pool: bytes
    name: bytes
    health: int
    updated_s: int
    """Unix time, or whatever it is."""
    lease_s: int
    message: bytes

    @property
    def key(self) -> Key:
        return (self.pool, self.name)


class HealthList(NamedTuple):
    """One message of a health stream."""

    at_s: float
    size: int
    """In bytes."""
    devices: tuple[Device, ...]
    """None, if it is broken."""
    broken: str = ""
    """Why its bytes are no such message."""
    cut: bool = False
    """It has more entries than were read."""


class StreamEnd(NamedTuple):
    """How a stream ended, or a call."""

    at_s: float
    status: str
    """The gRPC status by name; empty: there was none, as where the connection is lost."""
    text: str
    too_large: int = 0
    """Size of a message above the kubelet's limit, for which our side ended it [bytes]."""
    flooded: bool = False
    """Our side ended it: more was sent than is remembered."""


class Stream(NamedTuple):
    """One health stream."""

    opened_s: float
    lists: tuple[HealthList, ...]
    ended: StreamEnd | None
    """None: it was open until our side closed it."""
    closed_s: float
    """When our side stopped listening, or it ended."""
    goaway: str = ""
    """What the server's GOAWAY said on its connection; empty: it sent none."""


class Watch(NamedTuple):
    """One version of the service, for as long as was listened; opened again 5 s after it ended."""

    version: str
    streams: tuple[Stream, ...]

    @property
    def unimplemented(self) -> bool:
        """Whether the service is said not to be there."""
        return any(
            not stream.lists and stream.ended is not None and stream.ended.status == "UNIMPLEMENTED"
            for stream in self.streams
        )

    @property
    def told(self) -> bool:
        """Whether it sent a list at all."""
        return any(stream.lists for stream in self.streams)


class Stopped(NamedTuple):
    """A reader that stops to read, and reads again."""

    stream: Stream
    stopped_s: float
    resumed_s: float


class Reopening(NamedTuple):
    """A stream that was opened after one was let go of."""

    after: str
    """``cancel``: on the same connection; ``close``: on a new one."""
    stream: Stream


class Answer(NamedTuple):
    """How one call ended."""

    what: str
    took_s: float
    status: str
    """As in :class:`Ended`."""
    text: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "OK"


class Info(NamedTuple):
    """What a plugin says of itself."""

    type: str
    name: str
    endpoint: str
    versions: tuple[str, ...]


class Introduction(NamedTuple):
    """A file where registration sockets belong, and what whoever serves it said of itself."""

    path: str
    is_socket: bool
    made_ns: int
    """Its ctime."""
    answer: Answer | None
    """None: nobody was asked, because it is no socket, or no path can be that long."""
    info: Info | None


class Endpoint(NamedTuple):
    """The service socket that a plugin names."""

    path: str
    size: int
    """In bytes."""
    absolute: bool
    inside: bool
    """Of the kubelet's directory, after both were cleaned."""
    error: str
    """Why it takes no connection; empty: it does."""


class Refusal(NamedTuple):
    """What followed on telling a driver that it was not registered."""

    told: Answer
    info: Answer
    notified: Answer


class Registration(NamedTuple):
    """One registration socket of the driver, and how registering went."""

    introduction: Introduction
    endpoint: Endpoint | None = None
    notified: Answer | None = None
    again: Introduction | None = None
    prepared: tuple[tuple[str, Answer], ...] = ()
    """By the version that is advertised."""
    refused: Refusal | None = None


class Directory(NamedTuple):
    """Where registration sockets were looked for, and those that concern the driver."""

    path: str
    kubelet_dir: str
    registrations: tuple[Registration, ...]


class Observed(NamedTuple):
    """All that was seen."""

    socket: str
    """The service socket, absolute; empty: there is none to speak to."""
    socket_size: int
    window_s: float
    """How long was listened; 0: there was nobody to listen to."""
    began_wall_s: float
    watches: tuple[Watch, ...] = ()
    """Of v1 and v1alpha1; none where the socket could not be spoken to."""
    leaver: Stream | None = None
    """Of a second kubelet, which leaves while the first one stays."""
    stopped: Stopped | None = None
    reopenings: tuple[Reopening, ...] = ()
    unknown: tuple[Answer, ...] = ()
    """Calls of what does not exist."""
    directory: Directory | None = None
    """None: nobody asked for it."""

    def watch(self, version: str) -> Watch:
        """The watch of that version; one without streams if there is none."""
        return next((one for one in self.watches if one.version == version), Watch(version, ()))

    @property
    def main(self) -> Watch:
        """What a kubelet of 1.37 would hear: v1, unless only v1alpha1 has anything to say."""
        first, second = self.watch(V1), self.watch(V1ALPHA1)
        return second if second.told and not first.told else first

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Every health stream of every connection."""
        apart = [self.leaver, self.stopped.stream if self.stopped else None]
        watched = [stream for watch in self.watches for stream in watch.streams]
        return (*watched, *filter(None, apart), *(one.stream for one in self.reopenings))

    @property
    def other(self) -> Watch:
        """The watch that is not the main one."""
        return self.watch(V1 if self.main.version == V1ALPHA1 else V1ALPHA1)
