"""Service ``drahealth.v1.DriverLink`` of a driver's socket, for a DRA driver in any language.

This module decides which thread handles which call: the event loop, which also runs the kubelet's streams,
decodes nothing, and calls that only read memory wait for no disk. agent.serve.driver_link.replies has the
messages; it is imported when a driver calls, so an agent that only serves health does without.
"""

import asyncio
import errno
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import grpclib.server
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError

from agent.errors import Busy, ConfigError, DrahealthError
from agent.model.taint import Taints
from agent.serve.driver_link.types import DriverLinkHandler, TooManyDevices
from agent.serve.grpc.hardened import HardenedStream
from agent.system.threads.latest import Latest
from agent.system.threads.worker_pool import PoolFull, WorkerPool
from agent.system.timing import RateLimiter

T = TypeVar("T")

SERVICE: Final = "/drahealth.v1.DriverLink"
QUERY_THREADS: Final = 2
"""Number of threads for calls that only read memory. More would share the one interpreter lock, and each
holds the memory of a large request."""
DRAIN_S: Final = 0.3
"""Time that the shutdown waits until reports that have arrived are recorded [s]."""
TEXT_BYTES: Final = 1024
"""Maximum length of an error text for a client [bytes]; other texts may have any length."""

_EXHAUSTED: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
)

log = logging.getLogger(__name__)


class DriverLinkStream(HardenedStream):
    """Stream of requests of up to 512 KiB: 4,096 devices, or 256 claims with the longest names."""

    limit = 512 << 10


class DriverLinkService:
    """Driver link service on the socket of one driver. Event loop only."""

    def __init__(self, driver: str, open_handler: Callable[[], DriverLinkHandler]) -> None:
        """Create the service.

        Args:
            driver: Name of the driver of the socket.
            open_handler: Called in a thread by the first call, once; after an exception by the next call
                again.
        """
        self.streams = 0
        """Number of open taint streams."""
        self._driver = driver
        self._open_handler = open_handler
        self._handler: DriverLinkHandler | None = None
        self._opening = threading.Lock()
        self._queries = WorkerPool("dh-link", QUERY_THREADS)
        self._declarations = WorkerPool("dh-link", 1)
        self._reports = WorkerPool("dh-link", 1)  # in order: the last report on a claim must win
        self._taints = WorkerPool("dh-link", 1)
        self._encoding = asyncio.Lock()
        self._encoded = (0, b"")
        self._error_lock = threading.Lock()
        self._error_limit = RateLimiter()

    def __mapping__(self) -> dict[str, Handler]:
        """Return the handlers of the methods by path, for grpclib. They receive and send encoded messages."""
        unary, streaming = Cardinality.UNARY_UNARY, Cardinality.UNARY_STREAM
        pools = {
            "SyncDevices": self._declarations,
            "CheckClaims": self._queries,
            "Classify": self._queries,
            "ReportPrepare": self._reports,
        }
        mapping = {
            f"{SERVICE}/{method}": Handler(partial(self._serve, method, pool), unary, bytes, bytes)
            for method, pool in pools.items()
        }
        return mapping | {f"{SERVICE}/WatchTaints": Handler(self._watch, streaming, bytes, bytes)}

    async def close(self) -> None:
        """End the threads after the server has stopped; wait :data:`DRAIN_S` for pending reports."""
        await self._reports.finish(DRAIN_S)
        for pool in (self._queries, self._declarations, self._reports, self._taints):
            pool.close()

    async def _serve(
        self, method: str, pool: WorkerPool, stream: "grpclib.server.Stream[bytes, bytes]"
    ) -> None:
        data = await stream.recv_message()
        assert data is not None  # a request that ends without a body is the empty one
        reply = await self._call(
            pool, partial(self._reply, method, data), run_even_if_abandoned=pool is self._reports
        )
        await stream.send_message(reply)

    async def _watch(self, stream: "grpclib.server.Stream[bytes, bytes]") -> None:
        data = await stream.recv_message()
        assert data is not None
        await stream.send_initial_metadata()
        self.streams += 1
        try:
            latest = await self._call(self._taints, partial(self._newest_taints, data))
            version = 0
            while True:
                version, taints = await latest.wait_newer(version)
                version, message = await self._encoded_taints(version, taints)
                await stream.send_message(message)
        finally:
            self.streams -= 1

    async def _encoded_taints(self, version: int, taints: Taints) -> tuple[int, bytes]:
        """Return the newest encoded taints message and its version; encoded once for all streams."""
        async with self._encoding:
            if self._encoded[0] < version:
                self._encoded = version, await self._call(self._taints, partial(_encode_taints, taints))
            return self._encoded

    async def _call(
        self, pool: WorkerPool, function: Callable[[], T], *, run_even_if_abandoned: bool = False
    ) -> T:
        """Run a function in a worker pool and return its result. Raises GRPCError."""
        try:
            answer = await pool.call(
                partial(self._guarded, function), run_even_if_abandoned=run_even_if_abandoned
            )
        except PoolFull as error:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, str(error)) from None
        if isinstance(answer, GRPCError):
            raise answer
        return answer

    # --- in a thread ---------------------------------------------------------------------------------------

    def _reply(self, method: str, data: bytes) -> bytes:
        from agent.serve.driver_link.replies import METHODS  # only if a driver calls

        return METHODS[method](data, self._driver, self._open)

    def _newest_taints(self, data: bytes) -> Latest[Taints]:
        from agent.serve.driver_link.requests import check_watch

        check_watch(data)
        try:
            return self._open().taints
        except ConfigError as error:
            raise GRPCError(Status.FAILED_PRECONDITION, _shorten(str(error))) from None

    def _open(self) -> DriverLinkHandler:
        with self._opening:
            if self._handler is None:
                try:
                    self._handler = self._open_handler()
                except ConfigError as error:  # the operator's mistake, not the request's
                    raise GRPCError(Status.FAILED_PRECONDITION, _shorten(str(error))) from None
            return self._handler

    def _guarded(self, function: Callable[[], T]) -> T | GRPCError:
        """Return the result of `function`, or the error for the client. The call may have been cancelled
        meanwhile.
        """
        try:
            return function()
        except GRPCError as error:
            return error
        except ConfigError as error:
            return GRPCError(Status.INVALID_ARGUMENT, _shorten(str(error)))
        except Busy as error:
            return GRPCError(Status.FAILED_PRECONDITION, _shorten(str(error)))
        except TooManyDevices as error:
            return GRPCError(Status.RESOURCE_EXHAUSTED, _shorten(str(error)))
        except (DrahealthError, OSError) as error:
            exhausted = getattr(error, "errno", None) in _EXHAUSTED
            return GRPCError(
                Status.RESOURCE_EXHAUSTED if exhausted else Status.UNAVAILABLE,
                _shorten(_describe_error(error)),
            )
        except BaseException as error:  # an internal error ends this call, and nothing else
            with self._error_lock:
                times = self._error_limit.tick()
            if times:
                log.exception("driver %s: call failed: internal error; %d such errors", self._driver, times)
            return GRPCError(Status.INTERNAL, f"{type(error).__name__}; see the agent's log")


def _encode_taints(taints: Taints) -> bytes:
    from agent.serve.driver_link.replies import encode_taints

    return encode_taints(taints)


def _describe_error(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _shorten(text: str) -> str:
    data = text.encode("utf-8", "replace")
    return text if len(data) <= TEXT_BYTES else f"{data[: TEXT_BYTES - 3].decode('utf-8', 'ignore')}..."
