"""Record of a conformance session with a DRA driver: values as the driver sent them, not evaluated.

Times are seconds since the recording of health streams began, unless a name contains ``wall``.

The module also has the queries on recorded health streams that several conformance checks use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import pairwise
from typing import Final, NamedTuple

from agent.conform.outcomes import CheckOutcome, describe_status, escape_bytes, failed, warned, worst_outcome
from agent.model.claim import ClaimRef

V1: Final = "v1"
V1ALPHA1: Final = "v1alpha1"
"""Version of the DRA health API (service DRAResourceHealth) that kubelet 1.36 calls; 1.37 calls V1."""

SESSION_MIN_S: Final = 2
"""Shortest duration of a session [s]."""
SESSION_MAX_S: Final = 600
"""Longest duration of a session [s]."""

RawDeviceKey = tuple[bytes, bytes]
"""(pool, name) of a device as bytes, as the driver sent them."""


class DeviceEntry(NamedTuple):
    """Entry of a driver's health list: the reported health of one device."""

    has_identifier: bool
    """True: the entry has a device identifier."""
    pool: bytes
    name: bytes
    health: int
    """Reported health: 0 Unknown, 1 Healthy, 2 Unhealthy; other numbers are invalid."""
    updated_s: int
    """Value of last_updated_time, which should be seconds since 1970."""
    lease_s: int
    """Value of health_check_timeout_seconds: the lease of the report [s]."""
    message: bytes

    @property
    def key(self) -> RawDeviceKey:
        return (self.pool, self.name)


class HealthList(NamedTuple):
    """Health list: one message of a health stream, with the health of devices."""

    received_s: float
    size: int
    """Size of the encoded health list [bytes]."""
    devices: tuple[DeviceEntry, ...]
    """Entries of the health list, one per device; empty if the list cannot be decoded."""
    decode_error: str = ""
    """Reason why the health list cannot be decoded; empty: it is a valid message."""
    is_truncated: bool = False
    """True: the health list has more entries than were decoded."""


class StreamEnd(NamedTuple):
    """End of a health stream: time, status and reason."""

    at_s: float
    status: str
    """Name of the gRPC status; empty: no status was received, as after a lost connection."""
    text: str
    too_large_bytes: int = 0
    """Size of a message above the kubelet's limit, at which the session ended the stream [bytes]; 0: none."""
    flooded: bool = False
    """True: the session ended the stream, because the server sent more lists than are recorded."""
    limit: str = ""
    """Limit on recorded device entries or bytes, at which the session ended the stream; empty: none."""


class StreamRecord(NamedTuple):
    """Record of one health stream."""

    opened_s: float
    lists: tuple[HealthList, ...]
    ended: StreamEnd | None
    """End of the health stream; None: it was open until the session closed it."""
    closed_s: float
    """Time at which the session or the server closed the health stream."""
    goaway: str = ""
    """Code and text of the server's HTTP/2 GOAWAY on the connection; empty: no GOAWAY."""


class ApiVersionStreams(NamedTuple):
    """Successive streams of one version of the health API, each opened 5 s after the end of the last."""

    version: str
    streams: tuple[StreamRecord, ...]

    @property
    def is_unimplemented(self) -> bool:
        """True: a stream of this version ended with UNIMPLEMENTED before its first health list."""
        return any(
            not stream.lists and stream.ended is not None and stream.ended.status == "UNIMPLEMENTED"
            for stream in self.streams
        )

    @property
    def has_lists(self) -> bool:
        """True: a stream of this version received a health list."""
        return any(stream.lists for stream in self.streams)


class StoppedReader(NamedTuple):
    """Stream of a simulated kubelet that stopped reading for a while."""

    stream: StreamRecord
    stopped_s: float
    resumed_s: float


class ReopenedStream(NamedTuple):
    """Health stream that a simulated kubelet opened after it had closed another stream."""

    after: str
    """``cancel``: the stream before was cancelled, on the same connection.
    ``close``: its connection was closed."""
    stream: StreamRecord


class UnaryCallResult(NamedTuple):
    """Status and duration of a unary gRPC call to the driver."""

    method: str
    """Path of the gRPC method that was called."""
    took_s: float
    status: str
    """Name of the gRPC status of the answer; empty: no status was received."""
    text: str = ""

    @property
    def is_ok(self) -> bool:
        return self.status == "OK"


class PluginInfo(NamedTuple):
    """Answer of a driver's registration socket to GetInfo."""

    type: str
    name: str
    endpoint: str
    versions: tuple[str, ...]


class RegistrationFile(NamedTuple):
    """File in the directory of registration sockets, with the answer of the server on it to GetInfo."""

    path: str
    is_socket: bool
    ctime_ns: int
    """Status change time (ctime) of the file [ns since 1970]."""
    get_info: UnaryCallResult | None
    """Result of GetInfo; None: not called, because the file is not a socket or its path is too long."""
    info: PluginInfo | None
    """Answer of the server on the socket to GetInfo; None: no valid answer."""


class PluginEndpoint(NamedTuple):
    """Service socket that a driver's answer to GetInfo names."""

    path: str
    size: int
    """Length of the socket's path [bytes]."""
    is_absolute: bool
    is_in_kubelet_dir: bool
    """True: the path of the socket is below the kubelet's directory."""
    error: str
    """Reason why a connection to the endpoint fails; empty: the connection succeeds."""


class FailedRegistrationRecord(NamedTuple):
    """Results of the calls that report a failed registration to the driver, and then register it."""

    notified_refused: UnaryCallResult
    info: UnaryCallResult
    notified: UnaryCallResult


class RegistrationRecord(NamedTuple):
    """Registration socket of the driver, with the results of registering the driver."""

    file: RegistrationFile
    endpoint: PluginEndpoint | None = None
    notified: UnaryCallResult | None = None
    """Result of reporting a successful registration to the driver; None: not called."""
    second_file: RegistrationFile | None = None
    """The file with the answer to a second GetInfo; None: not called."""
    prepared: tuple[tuple[str, UnaryCallResult], ...] = ()
    """(advertised service, result of NodePrepareResources without claims) pairs."""
    refused: FailedRegistrationRecord | None = None
    """Results of a reported failure of the registration; None: not reported."""


class RegistrationDirRecord(NamedTuple):
    """Directory of registration sockets, with the sockets of the driver under test."""

    path: str
    kubelet_dir: str
    registrations: tuple[RegistrationRecord, ...]


class PrepareStage(StrEnum):
    """Stage of a conformance session that prepares claims, in the order in which the stages run."""

    UNKNOWN = "unknown"
    """Unprepares a claim that was never prepared."""
    FIRST = "first"
    """Prepares all claims in one call."""
    AGAIN = "again"
    """Repeats the first prepare of all claims."""
    ALONE = "alone"
    """Prepares each claim in a call of its own."""
    AT_ONCE = "at once"
    """Prepares all claims in two calls at the same time."""
    MISSING = "missing"
    """Prepares a claim that does not exist."""
    OTHER_UID = "other uid"
    """Prepares a claim by its name and another UID."""
    BAD = "bad"
    """Prepares, in one call, claims that must fail and all other claims; twice."""
    RESTARTED = "restarted"
    """Prepares all claims after a restart of the driver."""
    REBOOTED = "rebooted"
    """Prepares all claims after their CDI files were removed and the driver was restarted."""
    UNPREPARED = "unprepared"
    """Unprepares all claims in one call."""
    UNPREPARED_AGAIN = "unprepared again"
    """Repeats the unprepare of all claims."""
    RELEASED = "released"
    """Prepares all claims after their unprepare."""
    LOST_DEVICE = "lost device"
    """Unprepares all claims after their devices were removed."""
    DELETED_CLAIM = "deleted claim"
    """Unprepares all claims after the claims were deleted."""
    CLEANUP = "cleanup"
    """Unprepares all claims that may still be prepared."""


class ReturnedDevice(NamedTuple):
    """Device of a claim, as the driver's answer to a prepare has it."""

    requests: tuple[str, ...]
    pool: str
    name: str
    cdi_ids: tuple[str, ...] = ()
    share_id: str = ""


class ClaimReply(NamedTuple):
    """Answer of the driver for one claim in a prepare or unprepare call."""

    uid: str
    devices: tuple[ReturnedDevice, ...] = ()
    """Devices that the driver prepared for the claim; empty for an unprepare."""
    error: str = ""
    """Error of the driver for the claim; empty: success."""


class PrepareCall(NamedTuple):
    """Prepare or unprepare call to the driver, with its answer."""

    claims: tuple[ClaimRef, ...]
    """Claims that the call has in its request."""
    result: UnaryCallResult
    answers: tuple[ClaimReply, ...] = ()
    """Replies for single claims, in the order in which the driver sent them."""
    decode_error: str = ""
    """Reason why the driver's answer cannot be decoded; empty: it is a valid message."""

    def answer(self, uid: str) -> ClaimReply | None:
        """Return the last answer of the call for a claim, which is the one that counts; None: no answer."""
        return next((answer for answer in reversed(self.answers) if answer.uid == uid), None)

    def error_of(self, claim: ClaimRef) -> str:
        """Return why a prepare or unprepare call failed for a claim; empty: it succeeded.

        If the whole call failed, the text has the gRPC status.
        """
        if not self.result.is_ok:
            return describe_status(self.result.status, self.result.text)
        if self.decode_error:
            return f"the answer is not valid: {self.decode_error}"
        answer = self.answer(claim.uid)
        return answer.error if answer else "no answer for this claim"


class CdiFile(NamedTuple):
    """CDI file with its decoded content."""

    path: str
    document: object
    """Decoded JSON or YAML of the CDI file; None: it cannot be read."""
    error: str = ""
    """Reason why the CDI file cannot be read; empty: it was read."""


class CdiSnapshot(NamedTuple):
    """Content of all CDI files at one time."""

    files: tuple[CdiFile, ...] = ()
    error: str = ""
    """Reason why no directory of CDI files could be listed; empty: one was listed."""


class ConformClaim(NamedTuple):
    """Claim that a session prepares, with the devices that were allocated to it."""

    ref: ClaimRef
    devices: tuple[tuple[str, str, str], ...]
    """(request, pool, device) of each allocated device of the driver."""


NO_CDI: Final = CdiSnapshot()


class ClaimSessionRecord(NamedTuple):
    """Record of the part of a session that prepares and unprepares claims, stage by stage."""

    version: str
    """Advertised service that was called, such as ``v1.DRAPlugin``; empty: none."""
    claims: tuple[ConformClaim, ...]
    bad_claims: tuple[ClaimRef, ...]
    """Claims whose prepare must fail."""
    calls: Mapping[PrepareStage, tuple[PrepareCall, ...]]
    """Prepare and unprepare calls of each stage that ran."""
    omitted: Mapping[PrepareStage, CheckOutcome]
    """Outcome of the checks of each stage that did not run, with the reason."""
    cdi_before: CdiSnapshot = NO_CDI
    """CDI files before the first prepare."""
    cdi_prepared: CdiSnapshot = NO_CDI
    """CDI files after the first prepare."""
    cdi_before_bad: CdiSnapshot = NO_CDI
    """CDI files before bad claims were prepared."""
    cdi_after_bad: CdiSnapshot = NO_CDI
    cdi_rebooted: CdiSnapshot = NO_CDI
    """CDI files after the prepare that followed their removal."""
    cdi_unprepared: CdiSnapshot = NO_CDI
    cdi_released: CdiSnapshot = NO_CDI
    """CDI files after the prepare that followed the unprepare."""

    def first_call(self, stage: PrepareStage) -> PrepareCall:
        """Return the first call of a stage of the session, which must have run."""
        return self.calls[stage][0]


class SessionRecord(NamedTuple):
    """Everything that one conformance session with a driver recorded."""

    socket: str
    """Absolute path of the service socket; empty: the path is unknown."""
    socket_size: int
    """Length of the service socket's path ``socket`` [bytes]."""
    window_s: float
    """Requested duration of the session; 0: no socket accepted a connection."""
    began_wall_s: float = 0.0
    """Wall time from which the times of the health streams count [s since 1970]; 0: none was recorded."""
    versions: tuple[ApiVersionStreams, ...] = ()
    """Streams of v1 and v1alpha1 of the health API; none if the socket accepts no connection."""
    second_kubelet: StreamRecord | None = None
    """Stream of a second kubelet, which disconnects while the first stays; None: not recorded."""
    stopped_reader: StoppedReader | None = None
    reopenings: tuple[ReopenedStream, ...] = ()
    unknown_methods: tuple[UnaryCallResult, ...] = ()
    """Results of calls to gRPC methods that do not exist."""
    directory: RegistrationDirRecord | None = None
    """Record of the driver's registration; None: registration was not tested."""
    recorded_s: float = 0.0
    """Time for which health lists were recorded: less than ``window_s`` if the server ended all streams."""
    prepare: ClaimSessionRecord | None = None
    """Record of the prepared and unprepared claims; None: the session prepared no claims."""

    def version(self, version: str) -> ApiVersionStreams:
        """Return the streams of an API version; there are none if nothing was recorded."""
        return next(
            (record for record in self.versions if record.version == version), ApiVersionStreams(version, ())
        )

    @property
    def main(self) -> ApiVersionStreams:
        """Streams of the API version that kubelet 1.37 uses: v1, unless only v1alpha1 sent lists."""
        first, second = self.version(V1), self.version(V1ALPHA1)
        return second if second.has_lists and not first.has_lists else first

    @property
    def watched_streams(self) -> tuple[StreamRecord, ...]:
        """Health streams of both API versions that were recorded for as long as they were open."""
        return tuple(stream for version in self.versions for stream in version.streams)

    @property
    def streams(self) -> tuple[StreamRecord, ...]:
        """Health streams of all simulated kubelets that were recorded."""
        visitors = [self.second_kubelet, self.stopped_reader.stream if self.stopped_reader else None]
        return (
            *self.watched_streams,
            *filter(None, visitors),
            *(reopening.stream for reopening in self.reopenings),
        )

    @property
    def other(self) -> ApiVersionStreams:
        """Streams of the API version that kubelet 1.37 does not use."""
        return self.version(V1 if self.main.version == V1ALPHA1 else V1ALPHA1)


# --- queries on streams ------------------------------------------------------------------------------------

DEFAULT_LEASE_S: Final = 30
"""Lease that the kubelet uses if a driver sends 0 or less as health_check_timeout_seconds [s]."""
LEASE_OVERFLOW_S: Final = 9_223_372_036
"""Longest lease (health_check_timeout_seconds) that the kubelet can count in 64-bit nanoseconds [s]."""
PROPAGATION_S: Final = 1.0
"""Time that a driver may take to send a change on every stream [s]."""

NAMES_LIMIT: Final = 60
"""Length at which a pool and a name are cut for display [characters]."""

TimedEntry = tuple[float, DeviceEntry]
"""One report on a device in a health stream: time of receipt [s since the session began], list entry."""


def format_device(key: RawDeviceKey) -> str:
    """Format a device as ``<pool>/<name>`` for an observation."""
    pool, name = (escape_bytes(part, NAMES_LIMIT) or "(empty)" for part in key)
    return f"{pool}/{name}"


def effective_lease_s(device: DeviceEntry) -> float:
    """Return how long the kubelet uses the health in a device entry, its lease [s].

    0: the lease is too long and overflows.
    """
    if device.lease_s > LEASE_OVERFLOW_S:
        return 0.0
    return device.lease_s if device.lease_s > 0 else DEFAULT_LEASE_S


def reports_by_device(stream: StreamRecord) -> dict[RawDeviceKey, list[TimedEntry]]:
    """Return the reports on each device in the order of receipt, at most one for each list."""
    found: dict[RawDeviceKey, list[TimedEntry]] = {}
    for item in stream.lists:
        for key, device in {device.key: device for device in item.devices}.items():
            found.setdefault(key, []).append((item.received_s, device))
    return found


def consecutive_reports(stream: StreamRecord) -> Iterator[tuple[RawDeviceKey, TimedEntry, TimedEntry]]:
    """Yield (device, report, next report) for each pair of consecutive reports on a device."""
    for key, reports in reports_by_device(stream).items():
        for before, after in pairwise(reports):
            yield key, before, after


def distinct_entries(stream: StreamRecord) -> Iterator[DeviceEntry]:
    """Yield each different device entry of a health stream once, in the order of its first receipt."""
    yield from dict.fromkeys(device for item in stream.lists for device in item.devices)


def last_reports_at(streams: Iterable[StreamRecord], at_s: float) -> dict[RawDeviceKey, TimedEntry]:
    """Return the last report on each device that the streams received up to `at_s`."""
    known: dict[RawDeviceKey, TimedEntry] = {}
    for stream in streams:
        for item in stream.lists:
            if item.received_s <= at_s:
                known |= {device.key: (item.received_s, device) for device in item.devices}
    return known


def count_lists(version: ApiVersionStreams) -> int:
    """Return the number of health lists received in all streams of an API version."""
    return sum(len(stream.lists) for stream in version.streams)


def ended_by_session(end: StreamEnd) -> bool:
    """Return True if the conformance test ended a stream because of a limit; False if the driver ended it."""
    return bool(end.too_large_bytes or end.flooded or end.limit)


def evaluate_streams(
    session: SessionRecord,
    evaluate: Callable[[StreamRecord], Iterable[CheckOutcome]],
    otherwise: CheckOutcome,
) -> CheckOutcome:
    """Evaluate the health streams of the API version that kubelet 1.37 uses.

    If `evaluate` yields no outcome for them, evaluate those of the other API version.

    Returns the worst outcome; `otherwise` if there is none for both versions.
    """
    found = [outcome for stream in session.main.streams if stream.lists for outcome in evaluate(stream)]
    if found:
        return worst_outcome(found, otherwise)
    second = session.other
    found = [outcome for stream in second.streams if stream.lists for outcome in evaluate(stream)]
    return worst_outcome(
        (outcome._replace(observation=f"{second.version}: {outcome.observation}") for outcome in found),
        otherwise,
    )


def compare_streams(
    first: Iterable[StreamRecord],
    second: Iterable[StreamRecord],
    at_s: float,
    first_name: str,
    second_name: str,
) -> Iterator[CheckOutcome]:
    """Yield an outcome for each device on which the last reports of two sets of streams differ.

    Reports up to `at_s` count; devices that changed less than 1 s before `at_s` are skipped. ``first_name``
    and ``second_name`` name the two sets in the observations.
    """
    first, second = list(first), list(second)
    known_first, known_second = last_reports_at(first, at_s), last_reports_at(second, at_s)
    since_s = at_s - PROPAGATION_S
    recent = changed_devices(first, since_s, at_s) | changed_devices(second, since_s, at_s)
    for key in sorted((known_first.keys() | known_second.keys()) - recent):
        if key not in known_first or key not in known_second:
            yield failed(f"{format_device(key)}: {first_name if key in known_first else second_name} only")
            continue
        entry, other = known_first[key][1], known_second[key][1]
        if entry.health != other.health:
            yield failed(
                f"{format_device(key)}: health {entry.health} for {first_name}, "
                f"{other.health} for {second_name}"
            )
        elif entry.message != other.message:
            yield warned(f"{format_device(key)}: one message for {first_name}, another for {second_name}")


def changed_devices(streams: Iterable[StreamRecord], since_s: float, at_s: float) -> set[RawDeviceKey]:
    """Return the devices whose health or message changed after `since_s`, up to `at_s`."""
    last: dict[RawDeviceKey, tuple[int, bytes]] = {}
    changed: set[RawDeviceKey] = set()
    for stream in streams:
        for index, item in enumerate(stream.lists):
            for device in item.devices:
                verdict = (device.health, device.message)
                is_new = last.get(device.key, verdict if index == 0 else None) != verdict
                if is_new and since_s < item.received_s <= at_s:
                    changed.add(device.key)
                last[device.key] = verdict
    return changed
