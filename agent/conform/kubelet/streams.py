"""Simulated kubelets that open a driver's health streams.

Up to five connections at a time: a kubelet of 1.37 (v1), one of 1.36 (v1alpha1), one that leaves, one that
stops reading, and one that reconnects. No call changes anything in the driver.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple

from agent.conform.kubelet.calls import CALL_S, SessionClock, call
from agent.conform.kubelet.recorder import StreamRecorder, health_method, stop_recording
from agent.conform.observed import (
    V1,
    V1ALPHA1,
    RawDeviceKey,
    Reopening,
    StoppedReader,
    StreamRecord,
    UnaryResult,
    VersionRecord,
)
from agent.serve.grpc.channel import RawChannel

RETRY_S: Final = 5.0
"""Delay after a stream's end before the kubelet opens it again [s]."""
SETTLE_S: Final = 2.0
"""Time to wait for the first list [s] of a stream that was not ready, and of v1 before v1alpha1 is used."""

LEAVES_AT: Final = 0.45
"""Fraction of the recording after which the second kubelet closes its connection."""
RESUMES_AT: Final = 0.6
"""Fraction of the recording after which the kubelet that stopped reading resumes."""
REOPENINGS: Final = ("close", "cancel") * 3
PAUSE_PART: Final = 0.02
"""Pause between two reopened streams, as a fraction of the recording."""

UNKNOWN_METHODS: Final = (
    "/v1.DRAResourceHealth/DrahealthConform",
    "/v1.DrahealthConform/NodeWatchResources",
)
"""Paths of a method that the health service does not have, and of a service that does not exist."""


class StreamRecords(NamedTuple):
    """Recorded streams and calls of all simulated kubelets."""

    versions: tuple[VersionRecord, ...]
    leaver: StreamRecord | None
    stopped: StoppedReader | None
    reopenings: tuple[Reopening, ...]
    unknown: tuple[UnaryResult, ...]


class SimulatedKubelets:
    """All simulated kubelets of one socket.

    Args:
        socket: Service socket.
        window_s: Duration of the recording, from now on.
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
        self._reopenings: list[Reopening] = []

    async def record(self) -> StreamRecords:
        """Record all streams for the window; a version that was not ready at first a little longer.

        Raises:
            PermissionDenied: The socket may not be opened.
        """
        unknown, *_ = await asyncio.gather(
            self._call_unknown(), self._watch(V1), self._watch(V1ALPHA1), self._run_visitors()
        )
        versions = tuple(
            VersionRecord(version, tuple(recorder.to_record() for recorder in recorders))
            for version, recorders in self._recorders.items()
        )
        return StreamRecords(versions, self._leaver, self._stopped, tuple(self._reopenings), unknown)

    async def _call_unknown(self) -> tuple[UnaryResult, ...]:
        return tuple([(await call(self._socket, self._clock, method))[0] for method in UNKNOWN_METHODS])

    # --- kubelets that remain ---------------------------------------------------------------------------

    async def _watch(self, version: str) -> None:
        """Record the stream of a version; open it again 5 s after each end, except after UNIMPLEMENTED."""
        until_s = self._window_s
        while True:
            recorder = StreamRecorder(self._clock, self._changed.set)
            self._recorders[version].append(recorder)
            await self._record_until(recorder, version, until_s)
            if version not in self._tried and not recorder.lists:
                until_s = max(until_s, self._clock.now_s() + RETRY_S + SETTLE_S)
            self._tried.add(version)
            self._changed.set()
            is_over = (
                recorder.ended is None or recorder.ended.status == "UNIMPLEMENTED" or recorder.ended.flooded
            )
            if is_over or self._clock.now_s() + RETRY_S >= until_s:
                return
            await asyncio.sleep(RETRY_S)

    async def _record_until(self, recorder: StreamRecorder, version: str, until_s: float) -> None:
        """Record one stream until a time, on its own connection."""
        channel = RawChannel(self._socket)
        try:
            await self._within(until_s, recorder.record(channel, health_method(version)))
        finally:
            channel.close()

    async def _within(self, until_s: float, work: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until_s - self._clock.now_s())):
                await work

    # --- kubelets that come and go ----------------------------------------------------------------------

    async def _run_visitors(self) -> None:
        """Run the kubelets that leave, stop reading or reconnect, after the first list of a version."""
        await self._within(min(SETTLE_S, self._window_s), self._wait_until(lambda: self._is_clear(V1)))
        await self._within(self._window_s, self._wait_until(lambda: self._is_clear(V1, V1ALPHA1)))
        version = next((candidate for candidate in (V1, V1ALPHA1) if self._has_lists(candidate)), None)
        if version is not None:
            await asyncio.gather(self._leave(version), self._stop_reading(version), self._reopen(version))

    def _is_clear(self, *versions: str) -> bool:
        """Return whether a version has sent a list, or the first stream of every version has ended without a
        list.
        """
        return any(map(self._has_lists, versions)) or self._tried >= set(versions)

    def _has_lists(self, version: str) -> bool:
        return any(recorder.lists for recorder in self._recorders[version])

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _time_at(self, part: float) -> float:
        """Return the time at which `part` of the remaining window is over."""
        now_s = self._clock.now_s()
        return now_s + max(0.0, self._window_s - now_s) * part

    async def _sleep_until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self._clock.now_s()))

    async def _leave(self, version: str) -> None:
        """Record a second stream and close it at LEAVES_AT, or after its first list if that is later."""
        recorder, channel = StreamRecorder(self._clock), RawChannel(self._socket)
        recording = asyncio.ensure_future(recorder.record(channel, health_method(version)))
        leaves_s = self._time_at(LEAVES_AT)
        try:
            await self._within(self._window_s, _wait_for_first_list(recorder))
            await self._sleep_until(leaves_s)
        finally:
            await stop_recording(recording)
            channel.close()
        self._leaver = recorder.to_record()

    async def _stop_reading(self, version: str) -> None:
        recorder, channel = StreamRecorder(self._clock), RawChannel(self._socket)
        recording = asyncio.ensure_future(recorder.record(channel, health_method(version)))
        stopped_s = resumed_s = None
        try:
            await self._within(self._window_s, _wait_for_first_list(recorder))
            if recorder.lists and recorder.ended is None:
                stopped_s = self._clock.now_s()
                channel.close_window()
                await self._sleep_until(self._time_at(RESUMES_AT))
                resumed_s = self._clock.now_s()
                channel.open_window()
            await self._sleep_until(self._window_s)
        finally:
            await stop_recording(recording)
            channel.close()
        if stopped_s is not None and resumed_s is not None:
            self._stopped = StoppedReader(recorder.to_record(), stopped_s, resumed_s)

    async def _reopen(self, version: str) -> None:
        """Record streams on new connections; cancel each and record another stream on the same connection."""
        channel = RawChannel(self._socket)
        try:
            for after in REOPENINGS:
                await asyncio.sleep(self._window_s * PAUSE_PART)
                if self._clock.now_s() >= self._window_s:
                    return
                if after == "close" or channel.goaway:
                    channel.close()
                    channel = RawChannel(self._socket)
                self._reopenings.append(Reopening(after, await self._record_once(channel, version)))
        finally:
            channel.close()

    async def _record_once(self, channel: RawChannel, version: str) -> StreamRecord:
        """Record one stream until it has reported all devices or :data:`CALL_S` are over."""
        recorder = StreamRecorder(self._clock)
        recording = asyncio.ensure_future(recorder.record(channel, health_method(version)))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CALL_S):
                    while recorder.ended is None and not (
                        recorder.lists and self._known_devices(version) <= recorder.devices_seen
                    ):
                        await recorder.wait_for_change()
        finally:
            await stop_recording(recording)
        return recorder.to_record()

    def _known_devices(self, version: str) -> set[RawDeviceKey]:
        """Return the devices that the version's other streams have reported."""
        return set().union(*(recorder.devices_seen for recorder in self._recorders[version]))


async def _wait_for_first_list(recorder: StreamRecorder) -> None:
    """Wait for the first list or the end of a stream."""
    while recorder.ended is None and not recorder.lists:
        await recorder.wait_for_change()
