"""Service ``drahealth.v1.Agent`` for the command line: reports, status, and requests to clear faults.

A report is encoded once for all clients, only while a client watches, and in steps between which the event
loop serves the kubelet's streams.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

import grpclib.const
import grpclib.server
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.model.cleared_faults import NO_LOGIN_UID, ClearResult, Operator
from agent.model.health import Repair
from agent.model.report import (
    AgentStatus,
    PartsStatus,
    RepairCount,
    Report,
    SeverityCount,
    SocketSubscriberCounts,
)
from agent.serve.agent_api.encode import encode_clear_reply, encode_report, encode_status
from agent.serve.grpc.codec import EmptyRequest
from agent.serve.grpc.hardened import send_shared_message
from agent.serve.grpc.wire import SchemaField, read_by_schema
from agent.serve.sockets import peer_credentials
from agent.system.process_stat import read_boot_time, read_process_stat
from agent.system.threads.latest_value import LatestValue

STATUS: Final = "/drahealth.v1.Agent/Status"
WATCH: Final = "/drahealth.v1.Agent/Watch"

CLEAR: Final = "/drahealth.v1.Agent/Clear"
CLEAR_ANSWER_S: Final = 1.0
"""Longest time that a request to clear faults waits for the health engine [s]."""
CLEAR_REQUEST: Final = {1: SchemaField("device"), 2: SchemaField("code")}
CLEAR_TEXT_MAX: Final = 1024
"""Longest device name, and longest code, in a request to clear faults [characters]."""
LOGIN_UID_UNSET: Final = (1 << 32) - 1
"""Login uid in procfs of a process that no login started."""

CHUNKS_AT_ONCE: Final = 16
"""Number of chunks of a report that are encoded, in 0.1 ms, before the event loop runs other tasks."""


class ClearRequests(Protocol):
    """Interface to the queue of operators' requests to clear remembered faults.

    The health engine answers the requests.
    """

    def submit(self, device: str, code: str, operator: Operator) -> Future[ClearResult]:
        """Queue a request to clear faults; return a future that gets the answer.

        Its method ``cancel`` returns True if it withdrew the request, and False if the request takes effect.
        Thread-safe. Never blocks.
        """


class AgentService:
    """gRPC service on ``agent.sock`` for the command line. Used only in the event loop."""

    def __init__(
        self,
        latest: LatestValue[Report],
        *,
        version: str,
        subscribers: Callable[[], tuple[SocketSubscriberCounts, ...]],
        clear_requests: ClearRequests | None = None,
        parts: Callable[[], PartsStatus] = PartsStatus,
    ) -> None:
        """Create the service for the command line.

        Args:
            latest: Newest published report.
            version: Version of the agent.
            subscribers: Returns the number of open streams of each socket.
            clear_requests: Queue of requests to clear faults; None: they are refused with UNIMPLEMENTED.
            parts: Returns the status of the agent's parts, such as NVML.
        """
        self.streams = 0
        """Number of open streams on which the command line receives reports."""
        self._latest = latest
        self._version = version
        self._subscribers = subscribers
        self._clear_requests = clear_requests
        self._parts = parts
        self._encoding = asyncio.Lock()
        self._encoded = (0, b"")

    def __mapping__(self) -> dict[str, grpclib.const.Handler]:
        """Return the handlers of the service's methods by gRPC path. They send encoded messages."""
        unary, streaming = grpclib.const.Cardinality.UNARY_UNARY, grpclib.const.Cardinality.UNARY_STREAM
        return {
            STATUS: grpclib.const.Handler(self._status, unary, EmptyRequest, bytes),
            CLEAR: grpclib.const.Handler(self._clear, unary, bytes, bytes),
            WATCH: grpclib.const.Handler(self._watch, streaming, EmptyRequest, bytes),
        }

    async def _status(self, stream: grpclib.server.Stream[Any, bytes]) -> None:
        await stream.recv_message()
        status = collect_status(*self._latest.peek(), version=self._version, subscribers=self._subscribers())
        if isinstance(status, str):
            raise GRPCError(Status.UNAVAILABLE, status)
        await stream.send_message(encode_status(replace(status, parts=self._parts())))

    async def _clear(self, stream: grpclib.server.Stream[bytes, bytes]) -> None:
        data = await stream.recv_message()
        operator = _sender(stream)
        try:
            request = read_by_schema(data or b"", CLEAR_REQUEST, "the request")
        except ValueError as error:
            raise GRPCError(Status.INVALID_ARGUMENT, str(error)) from None
        device, code = request.get("device", ""), request.get("code", "")
        if not device or max(len(device), len(code)) > CLEAR_TEXT_MAX:
            raise GRPCError(
                Status.INVALID_ARGUMENT,
                f"device has {len(device)} characters and code {len(code)}; limit {CLEAR_TEXT_MAX}, "
                "device must not be empty",
            )
        if self._clear_requests is None:
            raise GRPCError(
                Status.UNIMPLEMENTED, "this server has no health engine, so it cannot clear faults"
            )
        if self._latest.peek()[1] is None:
            raise GRPCError(Status.UNAVAILABLE, "the agent has not published its first report; try again")
        answer = self._clear_requests.submit(device, code, operator)
        try:
            awaited = asyncio.wrap_future(answer)
            await asyncio.wait({awaited}, timeout=CLEAR_ANSWER_S)
            if answer.cancel():
                raise GRPCError(
                    Status.DEADLINE_EXCEEDED,
                    f"the health engine did not answer within {CLEAR_ANSWER_S:g} s; no fault was cleared; "
                    "try again",
                )
            result = await awaited  # already there, or of a request that takes effect at this moment
        finally:
            answer.cancel()  # the client ended the call
        await stream.send_message(encode_clear_reply(result))

    async def _watch(self, stream: grpclib.server.Stream[Any, bytes]) -> None:
        await stream.recv_message()
        await stream.send_initial_metadata()
        self.streams += 1
        try:
            version = 0
            while True:
                version, data = await self._encoded_report(version)
                await send_shared_message(stream, data)
        finally:
            self.streams -= 1

    async def _encoded_report(self, version: int) -> tuple[int, bytes]:
        """Wait for a report newer than a version, and encode the report, once for all streams.

        Returns its version and the message, or those of a newer report that is encoded already.
        """
        version, report = await self._latest.wait_newer(version)
        async with self._encoding:
            if self._encoded[0] < version:
                chunks = []
                for chunk in encode_report(report):
                    chunks.append(chunk)
                    if len(chunks) % CHUNKS_AT_ONCE == 0:
                        await asyncio.sleep(0)
                self._encoded = (version, b"".join(chunks))
            return self._encoded


def _sender(stream: grpclib.server.Stream[Any, Any]) -> Operator:
    """Return the process that sent a request to clear faults.

    Raises GRPCError unless the process runs as root or as the agent.
    """
    connection = stream._stream._transport.get_extra_info("socket")
    try:
        peer = peer_credentials(connection)
    except OSError as error:
        raise GRPCError(
            Status.PERMISSION_DENIED, f"the caller's user id cannot be read: {error.strerror}"
        ) from None
    if peer.uid not in (0, os.geteuid()):
        raise GRPCError(
            Status.PERMISSION_DENIED,
            f"uid {peer.uid} may not clear faults; run the command as root or as uid {os.geteuid()}",
        )
    return Operator(peer.uid, peer.pid, _login_uid(peer.pid))


def _login_uid(pid: int) -> int:
    """Return the login uid of a process.

    Returns NO_LOGIN_UID if the process has none, or procfs does not show it.
    """
    try:
        with open(f"/proc/{pid}/loginuid", encoding="ascii") as file:
            uid = int(file.read(16))
    except (OSError, ValueError):
        return NO_LOGIN_UID
    return NO_LOGIN_UID if uid == LOGIN_UID_UNSET else uid


def collect_status(
    publications: int, report: Report | None, *, version: str, subscribers: tuple[SocketSubscriberCounts, ...]
) -> AgentStatus | str:
    """Return the status of this agent process, from procfs, and of its newest report.

    Returns the reason if procfs cannot be read, for example for lack of descriptors.

    Args:
        publications: Number of reports published so far.
        report: Newest report; None: there is none yet.
    """
    own = Path("/proc/self")
    try:
        stat, files = read_process_stat(own), os.listdir(own / "fd")
        started_wall_s = read_boot_time(own.parent) + stat.started_s
    except (OSError, ValueError) as error:
        return f"status of the agent's process: cannot be read: {error}"
    status = AgentStatus(
        version=version,
        pid=os.getpid(),
        started_wall_s=started_wall_s,
        cpu_s=stat.cpu_s,
        rss_bytes=stat.rss_bytes,
        threads=stat.threads,
        descriptors=len(files),
        subscribers=subscribers,
    )
    if report is None:
        return status
    tallies = Counter(device.severity for device in report.devices)
    repairs = Counter(device.repair for device in report.devices)
    return replace(
        status,
        node=report.node,
        at=report.at,
        publications=publications,
        tallies=tuple(
            SeverityCount(severity, tallies[severity]) for severity in sorted(tallies, reverse=True)
        ),
        sources=report.sources,
        core=report.core,
        groups=report.groups,
        repairs=tuple(
            RepairCount(repair, repairs[repair])
            for repair in reversed(Repair)
            if repair is not Repair.NONE and repairs[repair]
        ),
    )
