"""gRPC clients of the simulated kubelet: unary calls to a DRA driver, and its health streams.

The streams are those of a kubelet 1.37 (v1), a kubelet 1.36 (v1alpha1), one that disconnects, one that stops
reading, and one that reconnects. No call changes anything in the driver. A limited amount of each stream is
recorded.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple

import h2.exceptions
from grpclib.const import Cardinality
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from agent.conform.answer_decoders import decode_health_list
from agent.conform.session_record import (
    V1,
    V1ALPHA1,
    ApiVersionStreams,
    DeviceEntry,
    HealthList,
    RawDeviceKey,
    ReopenedStream,
    StoppedReader,
    StreamEnd,
    StreamRecord,
    UnaryCallResult,
)
from agent.errors import PermissionDeniedError
from agent.serve.grpc.channel import WINDOW, RawChannel, ResponseTooLarge
from agent.serve.sockets import connection_failure_reason

CALL_S: Final = 5.0
"""Timeout of a unary gRPC call to the driver [s]."""
CONNECT_S: Final = 2.0
"""Timeout for connecting to a socket of the driver [s]."""

PEER_FAULTS: Final = (
    GRPCError,
    StreamTerminatedError,
    ProtocolError,
    h2.exceptions.H2Error,
    OSError,
    ValueError,
)
"""Exceptions that a faulty server can cause in grpclib."""


class SessionClock:
    """Clock of a conformance session with a driver: seconds since the session began."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self.began_wall_s: Final = time.time()
        """Wall time at which the clock began [s since 1970]."""

    def now_s(self) -> float:
        return self._loop.time() - self._began_s


def describe_error(error: Exception) -> str:
    """Return the text of an exception: its system error text, its message or its type."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


async def call_unary(
    path: str, clock: SessionClock, method: str, request: bytes = b"", timeout_s: float = CALL_S
) -> tuple[UnaryCallResult, bytes]:
    """Call a gRPC method of the server at `path`, on a new connection.

    Returns the result and the encoded answer.

    Without an answer, the bytes are empty. Takes at most `timeout_s`. Errors of the server are in the result.

    Raises PermissionDeniedError: the socket may not be opened.
    """
    began_s, data = clock.now_s(), b""
    status, text = "OK", ""
    channel = RawChannel(path)
    try:
        async with asyncio.timeout(timeout_s):
            await channel.connect()
            began_s = clock.now_s()
            request_stream = channel.request(method, Cardinality.UNARY_UNARY, bytes, bytes, timeout=timeout_s)
            async with request_stream as stream:
                await stream.send_message(request, end=True)
                answer = await stream.recv_message()
                if answer is None:
                    status, text = "", "the answer has no message"
                data = answer or b""
    except ResponseTooLarge as error:
        status, text = "", str(error)
    except TimeoutError:
        status, text = "DEADLINE_EXCEEDED", f"no answer within {timeout_s:g} s"
    except GRPCError as error:
        status, text = error.status.name, error.message or ""
    except PermissionError as error:
        raise PermissionDeniedError(
            f"socket {path}: may not be opened: {error.strerror}; run as root"
        ) from None
    except PEER_FAULTS as error:
        status, text = "", describe_error(error)
    finally:
        channel.close()
    return UnaryCallResult(method, clock.now_s() - began_s, status, text), data


async def connect_error(path: str) -> str:
    """Return the reason why a connection to a socket fails; empty: the connection succeeds.

    Raises PermissionDeniedError: the socket may not be opened.
    """
    channel = RawChannel(path)
    try:
        async with asyncio.timeout(CONNECT_S):
            await channel.connect()
    except TimeoutError:
        return f"accepted no connection within {CONNECT_S:g} s"
    except PermissionError as error:
        raise PermissionDeniedError(
            f"socket {path}: may not be opened: {error.strerror}; run as root"
        ) from None
    except OSError as error:
        return connection_failure_reason(path, error)
    except PEER_FAULTS as error:
        return describe_error(error)
    finally:
        channel.close()
    return ""


# --- recorder of a stream ----------------------------------------------------------------------------------

TRAILERS_S: Final = 1.0
"""Time to wait for the gRPC status after the last message of a stream [s]."""
LISTS_LIMIT: Final = 20_000
"""Largest number of health lists that are recorded of one stream."""
DEVICES_LIMIT: Final = 100_000
"""Largest number of device entries, in all lists, that are recorded of one stream."""
BYTES_LIMIT: Final = 64 << 20
"""Largest number of bytes that are read of one health stream."""


def health_method(version: str) -> str:
    """Return the path of the gRPC method NodeWatchResources of a version of the health API."""
    return f"/{version}.DRAResourceHealth/NodeWatchResources"


class _StreamFlooded(Exception):
    """A health stream has reached a limit of the recording; the text names it, unless it is LISTS_LIMIT."""


class StreamRecorder:
    """Recorder of one health stream.

    Args:
        clock: Clock of the session.
        on_change: Called after each list, and at the end of the stream.
    """

    def __init__(self, clock: SessionClock, on_change: Callable[[], None] | None = None) -> None:
        self.lists: list[HealthList] = []
        self.devices_seen: set[RawDeviceKey] = set()
        """Devices that the health stream has reported so far."""
        self.ended: StreamEnd | None = None
        self._clock = clock
        self._on_change = on_change
        self._opened_s = self._closed_s = clock.now_s()
        self._known: dict[bytes, DeviceEntry] = {}
        self._goaway = ""
        self._devices = 0
        self._bytes = 0
        self._changed = asyncio.Event()

    async def record(self, channel: RawChannel, method: str) -> None:
        """Open the health stream and record its lists until its end, a limit, or the call's cancellation."""
        try:
            await channel.connect()
            self._opened_s = self._clock.now_s()
            async with channel.request(method, Cardinality.UNARY_STREAM, bytes, bytes) as stream:
                await stream.send_message(b"", end=True)
                while (data := await stream.recv_message()) is not None:
                    self._add(data)
                async with asyncio.timeout(TRAILERS_S):
                    await stream.recv_trailing_metadata()
            self._end("OK", "")
        except ResponseTooLarge as error:
            self._end("", str(error), too_large_bytes=error.size)
        except _StreamFlooded as error:
            limit = str(error)
            self._end("", "more than is recorded", flooded=not limit, limit=limit)
        except TimeoutError:
            self._end("", f"no status within {TRAILERS_S:g} s of the last message")
        except GRPCError as error:
            self._end(error.status.name, error.message or "")
        except PEER_FAULTS as error:
            self._end("", describe_error(error))
        finally:
            self._goaway = channel.goaway
            self._closed_s = self._clock.now_s()

    async def wait_for_change(self) -> None:
        """Wait for the next health list or the end of the stream."""
        self._changed.clear()
        await self._changed.wait()

    def to_record(self) -> StreamRecord:
        """Return the recorded health stream. Call it after the end of record()."""
        return StreamRecord(self._opened_s, tuple(self.lists), self.ended, self._closed_s, self._goaway)

    def _add(self, data: bytes) -> None:
        found = decode_health_list(data, self._clock.now_s(), self._known)
        self.lists.append(found)
        self.devices_seen.update(device.key for device in found.devices)
        self._devices += len(found.devices)
        self._bytes += len(data)
        self._notify()
        if len(self.lists) >= LISTS_LIMIT:
            raise _StreamFlooded
        if self._devices >= DEVICES_LIMIT:
            raise _StreamFlooded(f"{DEVICES_LIMIT:,} device entries")
        if self._bytes >= BYTES_LIMIT:
            raise _StreamFlooded(f"{BYTES_LIMIT >> 20} MiB")

    def _end(self, status: str, text: str, **details: Any) -> None:
        self.ended = StreamEnd(self._clock.now_s(), status, text, **details)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        if self._on_change is not None:
            self._on_change()


async def stop_recording(recording: asyncio.Future[None]) -> None:
    """Cancel a recording task and wait for its end."""
    recording.cancel()
    await asyncio.wait({recording})


# --- clients of health streams -----------------------------------------------------------------------------

RETRY_S: Final = 5.0
"""Delay after the end of a health stream before a kubelet opens it again [s]."""
FIRST_LIST_S: Final = 2.0
"""Longest time to wait for the first health list [s].

Then v1alpha1 is used instead of v1, or a late stream is given up.
"""

LEAVES_AT_FRACTION: Final = 0.45
"""Fraction of the session's duration after which the second simulated kubelet closes its connection."""
RESUMES_AT_FRACTION: Final = 0.6
"""Fraction of the session's duration after which the kubelet that stopped reading reads again."""
REOPENINGS: Final = ("close", "cancel") * 3
"""How the stream before each reopened stream ends, ``cancel`` or ``close``: see ReopenedStream.after."""
PAUSE_FRACTION: Final = 0.02
"""Pause between two reopened streams, as a fraction of the session's duration."""

UNKNOWN_METHODS: Final = (
    "/v1.DRAResourceHealth/DrahealthConform",
    "/v1.DrahealthConform/NodeWatchResources",
)
"""Paths of a method that the health service does not have, and of a service that does not exist."""


class StreamRecords(NamedTuple):
    """Recorded health streams and calls of all simulated kubelets."""

    versions: tuple[ApiVersionStreams, ...]
    second_kubelet: StreamRecord | None
    stopped_reader: StoppedReader | None
    reopenings: tuple[ReopenedStream, ...]
    unknown_methods: tuple[UnaryCallResult, ...]
    began_wall_s: float
    recorded_s: float


class HealthStreamClients:
    """All simulated kubelets that connect to one service socket.

    Args:
        socket: Service socket.
        window_s: Duration for which health lists are recorded [s], from now on.
    """

    def __init__(self, socket: str, window_s: float) -> None:
        self._socket = socket
        self._clock = SessionClock()
        self._window_s = window_s
        self._recorders: dict[str, list[StreamRecorder]] = {V1: [], V1ALPHA1: []}
        self._tried: set[str] = set()
        """Versions of the health API whose first stream has ended."""
        self._changed = asyncio.Event()
        self._leaver: StreamRecord | None = None
        self._stopped: StoppedReader | None = None
        self._reopenings: list[ReopenedStream] = []

    async def record(self) -> StreamRecords:
        """Run all simulated kubelets for ``window_s``, and return records of their streams.

        It takes up to 7 s longer if a stream ended at first.

        Raises PermissionDeniedError: the socket may not be opened.
        """
        unknown, *_ = await asyncio.gather(
            self._call_unknown(), self._watch_version(V1), self._watch_version(V1ALPHA1), self._run_visitors()
        )
        versions = tuple(
            ApiVersionStreams(version, tuple(recorder.to_record() for recorder in recorders))
            for version, recorders in self._recorders.items()
        )
        return StreamRecords(
            versions,
            self._leaver,
            self._stopped,
            tuple(self._reopenings),
            unknown,
            self._clock.began_wall_s,
            min(self._clock.now_s(), self._window_s),
        )

    async def _call_unknown(self) -> tuple[UnaryCallResult, ...]:
        return tuple([(await call_unary(self._socket, self._clock, method))[0] for method in UNKNOWN_METHODS])

    async def _watch_version(self, version: str) -> None:
        """Record the health streams of an API version.

        A new stream is opened 5 s after the end of each one, except after UNIMPLEMENTED.
        """
        until_s = self._window_s
        while True:
            recorder = StreamRecorder(self._clock, self._changed.set)
            self._recorders[version].append(recorder)
            await self._record_until(recorder, version, until_s)
            if version not in self._tried and not recorder.lists:
                until_s = max(until_s, self._clock.now_s() + RETRY_S + FIRST_LIST_S)
            self._tried.add(version)
            self._changed.set()
            end = recorder.ended
            is_over = end is None or end.status == "UNIMPLEMENTED" or end.flooded or bool(end.limit)
            if is_over or self._clock.now_s() + RETRY_S >= until_s:
                return
            await asyncio.sleep(RETRY_S)

    async def _record_until(self, recorder: StreamRecorder, version: str, until_s: float) -> None:
        channel = RawChannel(self._socket)
        try:
            await self._run_until(until_s, recorder.record(channel, health_method(version)))
        finally:
            channel.close()

    async def _run_until(self, until_s: float, work: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until_s - self._clock.now_s())):
                await work

    async def _run_visitors(self) -> None:
        """Run the kubelets that disconnect, stop reading or reconnect, once a health list has arrived."""
        await self._run_until(
            min(FIRST_LIST_S, self._window_s), self._wait_until(lambda: self._is_first_stream_over(V1))
        )
        await self._run_until(
            self._window_s, self._wait_until(lambda: self._is_first_stream_over(V1, V1ALPHA1))
        )
        version = next((candidate for candidate in (V1, V1ALPHA1) if self._has_lists(candidate)), None)
        if version is not None:
            await asyncio.gather(
                self._run_second_kubelet(version),
                self._run_stopped_reader(version),
                self._run_reopenings(version),
            )

    def _is_first_stream_over(self, *versions: str) -> bool:
        """Return True if one of these API versions has sent a list, or the first stream of each has ended."""
        return any(map(self._has_lists, versions)) or self._tried >= set(versions)

    def _has_lists(self, version: str) -> bool:
        return any(recorder.lists for recorder in self._recorders[version])

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _time_at(self, fraction: float) -> float:
        now_s = self._clock.now_s()
        return now_s + max(0.0, self._window_s - now_s) * fraction

    async def _sleep_until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self._clock.now_s()))

    async def _run_second_kubelet(self, version: str) -> None:
        """Record a second health stream on a connection of its own.

        The simulated kubelet closes the stream after LEAVES_AT_FRACTION of the session, or after its first
        list if that is later.
        """
        recorder, channel = StreamRecorder(self._clock), RawChannel(self._socket)
        recording = asyncio.ensure_future(recorder.record(channel, health_method(version)))
        leaves_s = self._time_at(LEAVES_AT_FRACTION)
        try:
            await self._run_until(self._window_s, _wait_for_first_list(recorder))
            await self._sleep_until(leaves_s)
        finally:
            await stop_recording(recording)
            channel.close()
        self._leaver = recorder.to_record()

    async def _run_stopped_reader(self, version: str) -> None:
        recorder, channel = StreamRecorder(self._clock), RawChannel(self._socket)
        recording = asyncio.ensure_future(recorder.record(channel, health_method(version)))
        stopped_s = resumed_s = None
        try:
            await self._run_until(self._window_s, _wait_for_first_list(recorder))
            if recorder.lists and recorder.ended is None:
                stopped_s = self._clock.now_s()
                channel.set_window(0)
                await self._sleep_until(self._time_at(RESUMES_AT_FRACTION))
                resumed_s = self._clock.now_s()
                channel.set_window(WINDOW)
            await self._sleep_until(self._window_s)
        finally:
            await stop_recording(recording)
            channel.close()
        if stopped_s is not None and resumed_s is not None:
            self._stopped = StoppedReader(recorder.to_record(), stopped_s, resumed_s)

    async def _run_reopenings(self, version: str) -> None:
        channel = RawChannel(self._socket)
        try:
            for after in REOPENINGS:
                await asyncio.sleep(self._window_s * PAUSE_FRACTION)
                if self._clock.now_s() >= self._window_s:
                    return
                if after == "close" or channel.goaway:
                    channel.close()
                    channel = RawChannel(self._socket)
                self._reopenings.append(ReopenedStream(after, await self._record_once(channel, version)))
        finally:
            channel.close()

    async def _record_once(self, channel: RawChannel, version: str) -> StreamRecord:
        """Record one health stream until it has reported all known devices, at most 5 s."""
        recorder = StreamRecorder(self._clock)
        recording = asyncio.ensure_future(recorder.record(channel, health_method(version)))
        others = self._recorders[version]
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CALL_S):
                    while recorder.ended is None and not (
                        recorder.lists
                        and all(other.devices_seen <= recorder.devices_seen for other in others)
                    ):
                        await recorder.wait_for_change()
        finally:
            await stop_recording(recording)
        return recorder.to_record()


async def _wait_for_first_list(recorder: StreamRecorder) -> None:
    while recorder.ended is None and not recorder.lists:
        await recorder.wait_for_change()
