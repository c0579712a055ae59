"""Recorder of one health stream of a DRA driver. The recorded amount is limited."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from grpclib.const import Cardinality
from grpclib.exceptions import GRPCError

from agent.conform.health_list_decoder import decode_health_list
from agent.conform.kubelet.unary_calls import PEER_FAULTS, SessionClock, describe_error
from agent.conform.session_record import DeviceEntry, HealthList, RawDeviceKey, StreamEnd, StreamRecord
from agent.serve.grpc.channel import RawChannel, ResponseTooLarge

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
    """A health stream exceeds a limit on its lists, device entries or bytes."""


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
        except _StreamFlooded:
            self._end("", "more than is recorded", flooded=True)
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
        if len(self.lists) >= LISTS_LIMIT or self._devices >= DEVICES_LIMIT or self._bytes >= BYTES_LIMIT:
            raise _StreamFlooded

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
