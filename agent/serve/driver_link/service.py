"""``drahealth.v1.DriverLink``: what a DRA driver in any language tells the agent, and asks it.

Owns who waits for whom: nothing is decoded in the loop, in which the kubelet's streams live, and what asks
for something known waits for no disk. What is in the messages is agent.serve.driver_link.replies's, which is
imported when a driver calls: an agent that only serves health does without.
"""

import asyncio
import errno
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

import grpclib.server
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError

from agent.errors import Busy, ConfigError, DrahealthError
from agent.model.claim import Claim
from agent.model.prepare import PrepareVerdict
from agent.model.taint import Taints
from agent.serve.grpc.hardened import Stream
from agent.system.rate_limit import RateLimiter
from agent.system.threads.latest import Latest
from agent.system.threads.worker_pool import Full, WorkerPool

if TYPE_CHECKING:
    from agent.prepare.evidence import Evidence

T = TypeVar("T")

SERVICE: Final = "/drahealth.v1.DriverLink"
ASKING: Final = 2
"""Threads for what asks, and waits for nothing. More would share the one interpreter lock, and each holds
what a large request takes."""
END_S: Final = 0.3
"""How long the end waits for reports that have come, so that they count [s]."""
TEXT_BYTES: Final = 1024
"""Of what a client is told of a refusal; what others say may be any length."""

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EMFILE, errno.ENFILE})

log = logging.getLogger(__name__)


class LinkStream(Stream):
    """A request of up to 512 KiB: 4,096 devices, or 256 claims with the longest names."""

    limit = 512 << 10


# --- for whoever does what a driver asks for ----------------------------------------------------------------


class HandlerGone(NamedTuple):
    """How a prepare or unprepare of a claim ended."""

    claim: Claim
    evidence: "tuple[Evidence, ...] | None"
    """Why it failed, the outermost first; none: nothing shows why. None: it went well."""


class Synced(NamedTuple):
    """What came of a declaration."""

    devices: int
    """How many are declared now."""
    judged: bool
    """Each of them has a verdict by now."""


class Row(NamedTuple):
    """One device that a driver declares."""

    pool: str
    """Empty: the node's name."""
    keys: Mapping[str, object]
    """Key to value, as a file in ``devices.d`` has them: ``{"name": "cpus-0", "kind": "cpu", ...}``."""


class NoRoom(DrahealthError):
    """More devices than may be declared, all drivers together. Says how many."""


class Link(Protocol):
    """What the agent does for one driver. From any thread; each call may take as long as a disk takes."""

    def sync(self, rows: Sequence[Row]) -> Synced:
        """Declares the driver's devices: all of them.

        Raises:
            ConfigError: Names the device, the key, and the value with its limit.
            NoRoom: Other drivers declare so many that these are too many.
            Busy: Somebody else wrote the file of what the driver declares.
        """

    def check(self, claims: Sequence[Claim]) -> list[PrepareVerdict | None]:
        """What is known against preparing each of these claims; None: nothing. Waits for no disk."""

    def classify(self, claim: Claim, evidence: "Sequence[Evidence]") -> PrepareVerdict:
        """Of what kind a failure is. Waits for no disk."""

    def prepared(self, ended: Sequence[HandlerGone]) -> list[PrepareVerdict | None]:
        """How prepares have ended; what is said of each that failed."""

    def unprepared(self, ended: Sequence[HandlerGone]) -> list[PrepareVerdict | None]:
        """How unprepares have ended; None of one that failed: let it succeed."""

    @property
    def taints(self) -> Latest[Taints]:
        """What the driver should publish. Raises ConfigError if its name can begin no taint's key."""


# --- the service --------------------------------------------------------------------------------------------


class DriverLinkService:
    """The service of one driver's socket. Of one loop."""

    def __init__(self, driver: str, open_link: Callable[[], Link]) -> None:
        """
        Args:
            driver: Whose socket it is.
            open_link: Called in a thread by the first call, once; if it raises, by the next one again.
        """
        self.streams = 0
        """How many streams of taints are open."""
        self._driver = driver
        self._open_link = open_link
        self._link: Link | None = None
        self._opening = threading.Lock()
        self._asks = WorkerPool("dh-link", ASKING)
        self._declares = WorkerPool("dh-link", 1)
        self._reports = WorkerPool("dh-link", 1)  # the last that is said of a claim must be what stays
        self._taints = WorkerPool("dh-link", 1)
        self._telling = asyncio.Lock()
        self._told = (0, b"")
        self._complaining = threading.Lock()
        self._complaints = RateLimiter()

    def __mapping__(self) -> dict[str, Handler]:
        """The methods by path, as grpclib asks for them. They take and send bytes, not messages."""
        unary, streaming = Cardinality.UNARY_UNARY, Cardinality.UNARY_STREAM
        lanes = {
            "SyncDevices": self._declares,
            "CheckClaims": self._asks,
            "Classify": self._asks,
            "ReportPrepare": self._reports,
        }
        mapping = {
            f"{SERVICE}/{method}": Handler(partial(self._serve, method, lane), unary, bytes, bytes)
            for method, lane in lanes.items()
        }
        return mapping | {f"{SERVICE}/WatchTaints": Handler(self._watch, streaming, bytes, bytes)}

    async def close(self) -> None:
        """Ends the threads; waits a moment for reports that have come. When the server has stopped."""
        await self._reports.finish(END_S)
        for lane in (self._asks, self._declares, self._reports, self._taints):
            lane.close()

    async def _serve(
        self, method: str, lane: WorkerPool, stream: "grpclib.server.Stream[bytes, bytes]"
    ) -> None:
        data = await stream.recv_message()
        assert data is not None  # a request that ends without a body is the empty one
        reply = await self._call(lane, partial(self._reply, method, data), kept=lane is self._reports)
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
                version, message = await self._told_of(version, taints)
                await stream.send_message(message)
        finally:
            self.streams -= 1

    async def _told_of(self, version: int, taints: Taints) -> tuple[int, bytes]:
        """The newest message and its version; made once for all streams."""
        async with self._telling:
            if self._told[0] < version:
                self._told = version, await self._call(self._taints, partial(_message, taints))
            return self._told

    async def _call(self, lane: WorkerPool, function: Callable[[], T], *, kept: bool = False) -> T:
        """What the function returns. Raises GRPCError."""
        try:
            answer = await lane.call(partial(self._guarded, function), kept=kept)
        except Full as error:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, str(error)) from None
        if isinstance(answer, GRPCError):
            raise answer
        return answer

    # --- in a thread ---------------------------------------------------------------------------------------

    def _reply(self, method: str, data: bytes) -> bytes:
        from agent.serve.driver_link.replies import METHODS  # that only a driver that calls should pay

        return METHODS[method](data, self._driver, self._opened)

    def _newest_taints(self, data: bytes) -> Latest[Taints]:
        from agent.serve.driver_link.requests import check_watch

        check_watch(data)
        try:
            return self._opened().taints
        except ConfigError as error:
            raise GRPCError(Status.FAILED_PRECONDITION, _cut(str(error))) from None

    def _opened(self) -> Link:
        with self._opening:
            if self._link is None:
                try:
                    self._link = self._open_link()
                except ConfigError as error:  # the operator's, whatever the driver asks for
                    raise GRPCError(Status.FAILED_PRECONDITION, _cut(str(error))) from None
            return self._link

    def _guarded(self, function: Callable[[], T]) -> T | GRPCError:
        """What the function returns, or what the client is told instead. Whoever waits may be gone."""
        try:
            return function()
        except GRPCError as error:
            return error
        except ConfigError as error:
            return GRPCError(Status.INVALID_ARGUMENT, _cut(str(error)))
        except Busy as error:
            return GRPCError(Status.FAILED_PRECONDITION, _cut(str(error)))
        except NoRoom as error:
            return GRPCError(Status.RESOURCE_EXHAUSTED, _cut(str(error)))
        except (DrahealthError, OSError) as error:
            full = getattr(error, "errno", None) in _FULL
            return GRPCError(Status.RESOURCE_EXHAUSTED if full else Status.UNAVAILABLE, _cut(_words(error)))
        except BaseException as error:  # a mistake of ours: it ends this call, and nothing else
            with self._complaining:
                times = self._complaints.tick()
            if times:
                log.exception("%s: a call failed; so it was %d times", self._driver, times)
            return GRPCError(Status.INTERNAL, f"{type(error).__name__}; the agent's log has more")


def _message(taints: Taints) -> bytes:
    from agent.serve.driver_link.replies import encode_taints

    return encode_taints(taints)


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _cut(text: str) -> str:
    data = text.encode("utf-8", "replace")
    return text if len(data) <= TEXT_BYTES else f"{data[: TEXT_BYTES - 3].decode('utf-8', 'ignore')}..."
