"""Records of a session with a driver: values as the driver sent them, neither trusted nor evaluated.

Times are seconds on the monotonic clock since the session began, unless a name contains ``wall``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

V1: Final = "v1"
V1ALPHA1: Final = "v1alpha1"

LEAST_S: Final = 2
MOST_S: Final = 600
"""Longest duration of a session [s]."""

RawDeviceKey = tuple[bytes, bytes]
"""Pool and name of a device as the driver sent them."""


class DeviceEntry(NamedTuple):
    """Entry of a health list: the reported health of one device."""

    has_identifier: bool
    """Whether the entry has a device identifier."""
    pool: bytes
    name: bytes
    health: int
    updated_s: int
    """Value of last_updated_time, which should be Unix time."""
    lease_s: int
    message: bytes

    @property
    def key(self) -> RawDeviceKey:
        return (self.pool, self.name)


class HealthList(NamedTuple):
    """Health list: one message of a health stream."""

    at_s: float
    size: int
    """Size of the encoded message [bytes]."""
    devices: tuple[DeviceEntry, ...]
    """Entries of the list; empty if the list cannot be decoded."""
    broken: str = ""
    """Reason why the list cannot be decoded; empty: it is a valid message."""
    cut: bool = False
    """Whether the list has more entries than were read."""


class StreamEnd(NamedTuple):
    """End of a health stream: time, status and reason."""

    at_s: float
    status: str
    """Name of the gRPC status; empty: none was received, as after a lost connection."""
    text: str
    too_large: int = 0
    """Size of a message above the kubelet's limit, because of which our side ended the stream [bytes]; 0:
    none."""
    flooded: bool = False
    """Whether our side ended the stream because the server sent more than is recorded."""


class StreamRecord(NamedTuple):
    """Record of one health stream."""

    opened_s: float
    lists: tuple[HealthList, ...]
    ended: StreamEnd | None
    """End of the stream by the server; None: it was open until our side closed it."""
    closed_s: float
    """Time at which our side closed the stream, or at which the server ended it."""
    goaway: str = ""
    """Code and text of the server's GOAWAY on the connection; empty: none."""


class VersionRecord(NamedTuple):
    """Streams of one version of the health API; the next is opened 5 s after the end of the one before."""

    version: str
    streams: tuple[StreamRecord, ...]

    @property
    def unimplemented(self) -> bool:
        """Whether a stream ended as UNIMPLEMENTED before its first list."""
        return any(
            not stream.lists and stream.ended is not None and stream.ended.status == "UNIMPLEMENTED"
            for stream in self.streams
        )

    @property
    def has_lists(self) -> bool:
        """Whether any list was received on a stream of this version."""
        return any(stream.lists for stream in self.streams)


class StoppedReader(NamedTuple):
    """Stream of a simulated kubelet that stops reading and resumes."""

    stream: StreamRecord
    stopped_s: float
    resumed_s: float


class Reopening(NamedTuple):
    """Record of a stream that was opened after another stream was closed."""

    after: str
    """Way in which the stream before was closed: ``cancel`` (its connection stays) or ``close`` (with its
    connection)."""
    stream: StreamRecord


class UnaryResult(NamedTuple):
    """Result of a unary call: status and duration."""

    method: str
    took_s: float
    status: str
    """Name of the gRPC status; empty: none was received."""
    text: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "OK"


class PluginInfo(NamedTuple):
    """Answer of a plugin to GetInfo."""

    type: str
    name: str
    endpoint: str
    versions: tuple[str, ...]


class RegistrationFile(NamedTuple):
    """File in the directory of registration sockets, and the answer of its server."""

    path: str
    is_socket: bool
    made_ns: int
    """Status change time (ctime) of the file."""
    answer: UnaryResult | None
    """Result of GetInfo; None: not called, because the file is not a socket or its path is too long."""
    info: PluginInfo | None


class PluginEndpoint(NamedTuple):
    """Service socket that a plugin names."""

    path: str
    size: int
    """Length of the path in bytes."""
    absolute: bool
    inside: bool
    """Whether the path is below the kubelet's directory, after both paths were cleaned."""
    error: str
    """Reason why a connection to the endpoint fails; empty: the connection succeeds."""


class RefusalRecord(NamedTuple):
    """Results of the calls after a failed registration was reported to the driver."""

    notified_refused: UnaryResult
    info: UnaryResult
    notified: UnaryResult


class RegistrationRecord(NamedTuple):
    """Registration socket of the driver, and the results of registering it."""

    file: RegistrationFile
    endpoint: PluginEndpoint | None = None
    notified: UnaryResult | None = None
    again: RegistrationFile | None = None
    prepared: tuple[tuple[str, UnaryResult], ...] = ()
    """Results of NodePrepareResources by advertised version."""
    refused: RefusalRecord | None = None


class RegistryRecord(NamedTuple):
    """Directory of registration sockets, and the sockets that belong to the driver."""

    path: str
    kubelet_dir: str
    registrations: tuple[RegistrationRecord, ...]


class SessionRecord(NamedTuple):
    """Everything that a session recorded."""

    socket: str
    """Absolute path of the service socket; empty: none is known."""
    socket_size: int
    window_s: float
    """Duration of the session; 0: no socket accepted a connection."""
    began_wall_s: float
    versions: tuple[VersionRecord, ...] = ()
    """Records of v1 and v1alpha1; none if the socket accepts no connection."""
    leaver: StreamRecord | None = None
    """Stream of a second kubelet, which leaves while the first remains."""
    stopped: StoppedReader | None = None
    reopenings: tuple[Reopening, ...] = ()
    unknown: tuple[UnaryResult, ...] = ()
    """Results of calls to methods that do not exist."""
    directory: RegistryRecord | None = None
    """Record of the registration; None: registration was not tested."""

    def version(self, version: str) -> VersionRecord:
        """Return the record of a version of the health API; without streams if the version was not
        recorded."""
        return next(
            (record for record in self.versions if record.version == version), VersionRecord(version, ())
        )

    @property
    def main(self) -> VersionRecord:
        """Record of the version that kubelet 1.37 uses: v1, unless only v1alpha1 sent lists."""
        first, second = self.version(V1), self.version(V1ALPHA1)
        return second if second.has_lists and not first.has_lists else first

    @property
    def streams(self) -> tuple[StreamRecord, ...]:
        """All health streams of all connections."""
        visitors = [self.leaver, self.stopped.stream if self.stopped else None]
        watched = [stream for version in self.versions for stream in version.streams]
        return (*watched, *filter(None, visitors), *(reopening.stream for reopening in self.reopenings))

    @property
    def other(self) -> VersionRecord:
        """Record of the version that kubelet 1.37 does not use."""
        return self.version(V1 if self.main.version == V1ALPHA1 else V1ALPHA1)
