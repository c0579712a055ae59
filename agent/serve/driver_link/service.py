"""Service ``drahealth.v1.DriverLink`` on a driver's socket: runs each call in a thread.

Requests are decoded in threads because the event loop also serves the kubelet. Calls that only read memory
have their own threads, so that they never wait for a disk. agent.serve.driver_link.methods is imported at
the first call, which saves memory if no driver calls.
"""

import asyncio
import errno
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import grpclib.server
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError

from agent.errors import LACK_ERRNOS, ConfigError, DrahealthError, ResourceBusyError
from agent.model.health import Taints
from agent.serve.driver_link.handler_interface import DriverLinkHandler, TooManyDevices
from agent.serve.grpc.hardened import HardenedStream, send_shared_message
from agent.system.output import LogRateLimiter, get_logger
from agent.system.threads.latest_value import LatestValue
from agent.system.threads.worker_threads import PoolFull, WorkerPool

T = TypeVar("T")

SERVICE: Final = "/drahealth.v1.DriverLink"
QUERY_THREADS: Final = 2
"""Number of threads for calls of a driver that only read memory; more would wait for the interpreter lock."""
DRAIN_S: Final = 0.3
"""Time that the shutdown waits until the ReportPrepare calls that have arrived are recorded [s]."""
TEXT_BYTES: Final = 1024
"""Maximum length of an error text for a client [bytes]; longer texts are shortened."""

_EXHAUSTED: Final = LACK_ERRNOS | {errno.EDQUOT, errno.EFBIG, errno.ENOSPC}

log = get_logger(__name__)


class SizeLimitedDriverLinkStream(HardenedStream):
    """gRPC stream for requests of at most 512 KiB: 4,096 devices, or 256 claims with the longest names."""

    limit = 512 << 10


class DriverLinkService:
    """Driver link service, which answers the calls of one DRA driver on the driver's socket.

    Used only in the event loop.
    """

    def __init__(self, driver: str, open_handler: Callable[[], DriverLinkHandler]) -> None:
        """Create the service.

        Args:
            driver: Name of the driver of the socket.
            open_handler: Returns the handler of the driver's calls. Called in a thread at the driver's first
                call. After an exception it is called again at the next call.
        """
        self.streams = 0
        """Number of open streams on which the driver receives its devices' taints."""
        self._driver = driver
        self._open_handler = open_handler
        self._handler: DriverLinkHandler | None = None
        self._opening = threading.Lock()
        self._queries = WorkerPool("dh-link", QUERY_THREADS)
        self._declarations = WorkerPool("dh-link", 1)
        self._checks = WorkerPool("dh-link", 1)  # one thread: the newest result of a check must win
        self._reports = WorkerPool("dh-link", 1)  # one thread: the last report of a claim must win
        self._taints = WorkerPool("dh-link", 1)
        self._encoding = asyncio.Lock()
        self._encoded = (0, b"")
        self._error_lock = threading.Lock()
        self._error_limit = LogRateLimiter()

    def __mapping__(self) -> dict[str, Handler]:
        """Return the handlers of the driver link's methods by gRPC path, for grpclib.

        They receive and send encoded messages.
        """
        unary, streaming = Cardinality.UNARY_UNARY, Cardinality.UNARY_STREAM
        pools = {
            "SyncDevices": self._declarations,
            "ReportChecks": self._checks,
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
        """Wait at most :data:`DRAIN_S` until open ReportPrepare calls are recorded, then end the threads.

        Call this method after the server has stopped.
        """
        await self._reports.finish(DRAIN_S)
        for pool in (self._queries, self._declarations, self._checks, self._reports, self._taints):
            pool.close()

    async def _serve(
        self, method: str, pool: WorkerPool, stream: "grpclib.server.Stream[bytes, bytes]"
    ) -> None:
        data = await stream.recv_message()
        assert data is not None  # a request that ends without a body is the empty one
        reply = await self._call(
            pool, partial(self._reply, method, data), run_even_if_abandoned=pool is self._reports
        )
        await send_shared_message(stream, reply)

    async def _watch(self, stream: "grpclib.server.Stream[bytes, bytes]") -> None:
        data = await stream.recv_message()
        assert data is not None
        await stream.send_initial_metadata()
        self.streams += 1
        try:
            latest = await self._call(self._taints, partial(self._newest_taints, data))
            version = 0
            while True:
                version, message = await self._encoded_taints(latest, version)
                await send_shared_message(stream, message)
        finally:
            self.streams -= 1

    async def _encoded_taints(self, latest: LatestValue[Taints], version: int) -> tuple[int, bytes]:
        """Wait for taints newer than a version, and encode them, once for all streams.

        Returns their version and the message. If newer taints are encoded already, both are those of the
        newer taints.
        """
        version, taints = await latest.wait_newer(version)
        async with self._encoding:
            if self._encoded[0] < version:
                self._encoded = version, await self._call(self._taints, partial(_encode_taints, taints))
            return self._encoded

    async def _call(
        self, pool: WorkerPool, function: Callable[[], T], *, run_even_if_abandoned: bool = False
    ) -> T:
        """Run a function in a worker pool and return its result.

        ``run_even_if_abandoned`` runs the function even if the caller no longer waits.

        Raises GRPCError if the function fails, or the pool's queue is full.
        """
        try:
            answer = await pool.call(
                partial(self._call_guarded, function), run_even_if_abandoned=run_even_if_abandoned
            )
        except PoolFull as error:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, str(error)) from None
        if isinstance(answer, GRPCError):
            raise answer
        return answer

    # --- in a thread ---------------------------------------------------------------------------------------

    def _reply(self, method: str, data: bytes) -> bytes:
        from agent.serve.driver_link.methods import METHODS  # only if a driver calls

        return METHODS[method](data, self._driver, self._open)

    def _newest_taints(self, data: bytes) -> LatestValue[Taints]:
        from agent.serve.driver_link.requests import check_watch_taints

        check_watch_taints(data)
        try:
            return self._open().taints
        except ConfigError as error:
            raise _grpc_error(Status.FAILED_PRECONDITION, error) from None

    def _open(self) -> DriverLinkHandler:
        with self._opening:
            if self._handler is None:
                try:
                    self._handler = self._open_handler()
                except ConfigError as error:  # a mistake of the operator, not of the client
                    raise _grpc_error(Status.FAILED_PRECONDITION, error) from None
            return self._handler

    def _call_guarded(self, function: Callable[[], T]) -> T | GRPCError:
        """Return the result of `function`; if it raises an exception, return the GRPCError for the driver."""
        try:
            return function()
        except GRPCError as error:
            return error
        except ConfigError as error:
            return _grpc_error(Status.INVALID_ARGUMENT, error)
        except ResourceBusyError as error:
            return _grpc_error(Status.FAILED_PRECONDITION, error)
        except (DrahealthError, OSError) as error:
            exhausted = isinstance(error, TooManyDevices) or getattr(error, "errno", None) in _EXHAUSTED
            return _grpc_error(Status.RESOURCE_EXHAUSTED if exhausted else Status.UNAVAILABLE, error)
        except BaseException as error:  # an internal error ends this call, and nothing else
            with self._error_lock:
                times = self._error_limit.tick()
            if times:
                log.exception(
                    "driver %s: call to the agent failed: internal error; the driver got the status "
                    "INTERNAL; %d such errors",
                    self._driver, times,
                )  # fmt: skip
            return GRPCError(Status.INTERNAL, f"internal error: {type(error).__name__}; see the agent's log")


def _encode_taints(taints: Taints) -> bytes:
    from agent.serve.driver_link.methods import encode_taints

    return encode_taints(taints)


def _grpc_error(status: Status, error: Exception) -> GRPCError:
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    data = text.encode("utf-8", "replace")
    if len(data) > TEXT_BYTES:
        text = f"{data[: TEXT_BYTES - 3].decode('utf-8', 'ignore')}..."
    return GRPCError(status, text)
