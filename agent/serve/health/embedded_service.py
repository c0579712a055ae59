"""The health service in somebody else's grpclib server: it runs in whichever asyncio loop serves it.

The first stream begins to follow the reports, in its own loop; from then on the service belongs to that loop.
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
from agent.serve.health.feed import Encode
from agent.serve.health.service import HealthPublisher, HealthService, Stream
from agent.system.threads.latest import Latest

SERVICES: Final = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""What a driver's registration names among its ``supported_versions``."""


class HostedCodec(Codec):
    """For a server that serves more than health: what is not ours is coded by the library that it is of.

    That is Google's protobuf, which grpclib has of itself, or betterproto.
    """

    def encode(self, message: Any, message_type: Any) -> bytes:
        """The message's bytes. ``bytes`` are taken to be a ``message_type`` already."""
        data: bytes = message if isinstance(message, bytes) else message.SerializeToString()
        return data

    def decode(self, data: bytes, message_type: Any) -> Any:
        """The message in ``data``. Raises GRPCError of ours, and of others whatever their library raises."""
        if issubclass(message_type, bytes):
            return super().decode(data, message_type)
        return message_type.FromString(data)


class EmbeddedHealth:
    """The health of one driver's devices, in both versions. For one server, or several of one loop."""

    def __init__(self, latest: Latest[Report], encode: Encode, driver: str) -> None:
        self._publications = HealthPublisher(latest, encode, [driver])
        self._service = HealthService(self._publications.of(driver))
        self._streams: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reason = ""

    @property
    def streams(self) -> int:
        """How many streams are open."""
        return self._service.streams

    def __mapping__(self) -> dict[str, grpclib.const.Handler]:
        """The methods by path, as grpclib asks for them."""
        return {
            path: handler._replace(func=partial(self._serve, handler.func))
            for path, handler in self._service.__mapping__().items()
        }

    def end(self, reason: str) -> None:
        """Ends all streams, open and still to come, with UNAVAILABLE and the reason. From any thread."""
        with self._lock:
            self._reason = self._reason or reason
            if self._loop is not None:
                with suppress(RuntimeError):  # the loop is closed, and its streams with it
                    self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._following is not None:
            self._following.cancel()
        for stream in self._streams:
            stream.cancel()

    async def _serve(self, handler: Callable[[Any], Awaitable[None]], stream: Stream) -> None:
        self._begin()
        task = asyncio.ensure_future(handler(stream))
        self._streams.add(task)
        try:
            await task
        except asyncio.CancelledError:
            ours = asyncio.current_task()
            if self._reason and not (ours and ours.cancelling()):
                raise self._refusal() from None
            raise
        finally:
            task.cancel()
            self._streams.discard(task)

    def _begin(self) -> None:
        """From the first stream on the reports are followed.

        Raises:
            GRPCError: there are no more.
            RuntimeError: the service is another loop's.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._reason:
                raise self._refusal()
            if self._loop is None:
                self._loop = loop
                self._following = loop.create_task(self._publications.run())
                self._following.add_done_callback(self._followed)
            elif self._loop is not loop:
                raise RuntimeError("a health service belongs to one loop; make another for another server")

    def _followed(self, task: "asyncio.Task[None]") -> None:
        """Whoever follows must not end alone: streams that nobody feeds would look as if all were well."""
        error = None if task.cancelled() else task.exception()
        self._reason = self._reason or (
            f"{type(error).__name__}: {error}" if error else "the server is closing"
        )
        for stream in self._streams:
            stream.cancel()

    def _refusal(self) -> GRPCError:
        return GRPCError(Status.UNAVAILABLE, self._reason)
