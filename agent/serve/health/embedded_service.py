"""Health service in another program's grpclib server, in the asyncio loop of that server.

The first stream starts following the reports in its loop; from then on the service belongs to that loop.
When the reports end, so do the streams, as if the server did.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import grpclib.const
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.model.report import Report
from agent.serve.grpc.codec import Codec
from agent.serve.health.feed import EncodeDevices
from agent.serve.health.service import HealthPublisher, HealthService, HealthStream
from agent.system.threads.latest import Latest

SERVICES: Final = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""Health services that a driver's registration lists in ``supported_versions``."""


class EmbeddedCodec(Codec):
    """Codec of a server that also serves other services: their messages are encoded by their own library.

    That is Google's protobuf, grpclib's default, or betterproto.
    """

    def encode(self, message: Any, message_type: Any) -> bytes:
        """Return the encoded message; ``bytes`` are already encoded and returned unchanged."""
        data: bytes = message if isinstance(message, bytes) else message.SerializeToString()
        return data

    def decode(self, data: bytes, message_type: Any) -> Any:
        """Decode a message. Raises GRPCError for an invalid health request; for others, the exception of
        their library."""
        if issubclass(message_type, bytes):
            return super().decode(data, message_type)
        return message_type.FromString(data)


class EmbeddedHealth:
    """Health service for one driver's devices, in both versions; for servers of one event loop."""

    def __init__(self, latest: Latest[Report], encode: EncodeDevices, driver: str) -> None:
        self._publisher = HealthPublisher(latest, encode, [driver])
        self._service = HealthService(self._publisher.subscribers_of(driver))
        self._streams: set[asyncio.Task[None]] = set()
        self._publisher_task: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reason = ""

    @property
    def streams(self) -> int:
        """Number of open health streams."""
        return self._service.streams

    def __mapping__(self) -> dict[str, grpclib.const.Handler]:
        """Return the handlers of the methods by path, for grpclib."""
        return {
            path: handler._replace(func=partial(self._serve, handler.func))
            for path, handler in self._service.__mapping__().items()
        }

    def end(self, reason: str) -> None:
        """End all streams, open and future, with UNAVAILABLE and the reason. Thread-safe."""
        with self._lock:
            self._reason = self._reason or reason
            if self._loop is not None:
                with suppress(RuntimeError):  # the loop is closed, and its streams have ended
                    self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._publisher_task is not None:
            self._publisher_task.cancel()
        for stream in self._streams:
            stream.cancel()

    async def _serve(self, handler: Callable[[Any], Awaitable[None]], stream: HealthStream) -> None:
        self._begin()
        task = asyncio.ensure_future(handler(stream))
        self._streams.add(task)
        try:
            await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._reason and not (current and current.cancelling()):
                raise self._unavailable() from None
            raise
        finally:
            task.cancel()
            self._streams.discard(task)

    def _begin(self) -> None:
        """Start following the reports at the first stream.

        Raises:
            GRPCError: The reports have ended.
            RuntimeError: The service belongs to another event loop.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._reason:
                raise self._unavailable()
            if self._loop is None:
                self._loop = loop
                self._publisher_task = loop.create_task(self._publisher.run())
                self._publisher_task.add_done_callback(self._publisher_ended)
            elif self._loop is not loop:
                raise RuntimeError("a health service belongs to one loop; make another for another server")

    def _publisher_ended(self, task: "asyncio.Task[None]") -> None:
        """End all streams when the publisher ends: a stream without new lists must not stay open."""
        error = None if task.cancelled() else task.exception()
        self._reason = self._reason or (
            f"{type(error).__name__}: {error}" if error else "the server is closing"
        )
        for stream in self._streams:
            stream.cancel()

    def _unavailable(self) -> GRPCError:
        return GRPCError(Status.UNAVAILABLE, self._reason)
