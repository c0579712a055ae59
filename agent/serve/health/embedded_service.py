"""Health service that a Python driver adds to its own grpclib server.

The service belongs to the asyncio loop in which its first stream opens, and publishes reports from then on.
When the publishing ends, all streams end with UNAVAILABLE.
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
from agent.serve.grpc.hardened import end_without_log
from agent.serve.health.service import HealthListEncoder, HealthPublisher, HealthService, HealthStream
from agent.system.threads.latest_value import LatestValue

SERVICES: Final = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""gRPC services that the driver lists in ``supported_versions`` of its registration."""


class EmbeddedCodec(Codec):
    """Codec for a Python driver's own grpclib server: health messages pass as bytes.

    The messages of the driver's other services are encoded by their own methods, as in Google's protobuf and
    betterproto.
    """

    def encode(self, message: Any, message_type: Any) -> bytes:
        """Return the encoded message; ``bytes`` are already encoded and returned unchanged."""
        data: bytes = message if isinstance(message, bytes) else message.SerializeToString()
        return data

    def decode(self, data: bytes, message_type: Any) -> Any:
        """Decode a health request, or a message of another service by the class of that message.

        Raises GRPCError for an invalid health request, and the exception of the message's library for any
        other message.
        """
        if issubclass(message_type, bytes):
            return super().decode(data, message_type)
        return message_type.FromString(data)


class EmbeddedHealthService:
    """Health service (v1 and v1alpha1) of one driver for the servers of one event loop."""

    def __init__(self, latest: LatestValue[Report], encode: HealthListEncoder, driver: str) -> None:
        self.on_end: Callable[[EmbeddedHealthService], object] = lambda _: None
        """Called in the event loop when the publishing has ended."""
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
        """Return the handlers of the health API's methods by gRPC path, for grpclib."""
        return {
            path: handler._replace(func=partial(self._serve, handler.func))
            for path, handler in self._service.__mapping__().items()
        }

    def end(self, reason: str) -> None:
        """End all open and future streams with UNAVAILABLE and the reason. Thread-safe."""
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
        self._ensure_started()
        task = asyncio.ensure_future(handler(stream))
        self._streams.add(task)
        try:
            await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._reason and not (current and current.cancelling()):
                raise self._unavailable_error() from None
            end_without_log(stream)
            raise
        finally:
            task.cancel()
            self._streams.discard(task)

    def _ensure_started(self) -> None:
        """Start the task that publishes reports when the first stream opens.

        Raises:
            GRPCError: The task that publishes reports has ended.
            RuntimeError: The service belongs to another event loop.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._reason:
                raise self._unavailable_error()
            if self._loop is None:
                self._loop = loop
                self._publisher_task = loop.create_task(self._publisher.run())
                self._publisher_task.add_done_callback(self._publisher_ended)
            elif self._loop is not loop:
                raise RuntimeError(
                    "health service is used in two event loops; create one service per event loop"
                )

    def _publisher_ended(self, task: "asyncio.Task[None]") -> None:
        """End all health streams, because a stream without new lists must not stay open."""
        error = None if task.cancelled() else task.exception()
        self._reason = self._reason or (
            f"{type(error).__name__}: {error}" if error else "the server is closing"
        )
        for stream in self._streams:
            stream.cancel()
        self.on_end(self)

    def _unavailable_error(self) -> GRPCError:
        return GRPCError(Status.UNAVAILABLE, self._reason)
