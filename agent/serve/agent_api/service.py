"""Service ``drahealth.v1.Agent`` for the command line: reports, and the status of the agent.

A report is encoded once for all clients, only while a client watches, and in steps between which the event
loop serves the kubelet's streams.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import grpclib.const
import grpclib.server

from agent.model.health import Repair
from agent.model.report import AgentStatus, RepairCount, Report, SeverityCount, SocketSubscribers
from agent.serve.agent_api.encode import encode_report, encode_status
from agent.serve.grpc.codec import EmptyRequest
from agent.system.threads.latest_value import LatestValue

STATUS: Final = "/drahealth.v1.Agent/Status"
WATCH: Final = "/drahealth.v1.Agent/Watch"

CHUNKS_AT_ONCE: Final = 16
"""Number of chunks of a report that are encoded, in 0.1 ms, before the event loop runs other tasks."""


class AgentService:
    """gRPC service on ``agent.sock`` for the command line. Event loop only."""

    def __init__(
        self,
        latest: LatestValue[Report],
        *,
        version: str,
        subscribers: Callable[[], tuple[SocketSubscribers, ...]],
    ) -> None:
        self.streams = 0
        """Number of open report streams."""
        self._latest = latest
        self._version = version
        self._subscribers = subscribers
        self._encoding = asyncio.Lock()
        self._encoded = (0, b"")

    def __mapping__(self) -> dict[str, grpclib.const.Handler]:
        """Return the handlers of the methods by path, for grpclib. They send encoded messages."""
        unary, streaming = grpclib.const.Cardinality.UNARY_UNARY, grpclib.const.Cardinality.UNARY_STREAM
        return {
            STATUS: grpclib.const.Handler(self._status, unary, EmptyRequest, bytes),
            WATCH: grpclib.const.Handler(self._watch, streaming, EmptyRequest, bytes),
        }

    async def _status(self, stream: grpclib.server.Stream[Any, bytes]) -> None:
        await stream.recv_message()
        status = collect_status(*self._latest.peek(), version=self._version, subscribers=self._subscribers())
        await stream.send_message(encode_status(status))

    async def _watch(self, stream: grpclib.server.Stream[Any, bytes]) -> None:
        await stream.recv_message()
        await stream.send_initial_metadata()
        self.streams += 1
        try:
            version = 0
            while True:
                version, report = await self._latest.wait_newer(version)
                version, data = await self._encoded_report(version, report)
                await stream.send_message(data)
        finally:
            self.streams -= 1

    async def _encoded_report(self, version: int, report: Report) -> tuple[int, bytes]:
        async with self._encoding:
            if self._encoded[0] < version:
                chunks = []
                for chunk in encode_report(report):
                    chunks.append(chunk)
                    if len(chunks) % CHUNKS_AT_ONCE == 0:
                        await asyncio.sleep(0)
                self._encoded = (version, b"".join(chunks))
            return self._encoded


def collect_status(
    publications: int, report: Report | None, *, version: str, subscribers: tuple[SocketSubscribers, ...]
) -> AgentStatus:
    """Return the status of this agent process, from procfs, and of its newest report.

    ``publications`` is the number of reports so far, ``report`` the newest, None: there is none yet.
    """
    import psutil  # the import takes 20 ms

    process = psutil.Process(os.getpid())
    with process.oneshot():
        cpu = process.cpu_times()
        status = AgentStatus(
            version=version,
            pid=process.pid,
            started_wall_s=process.create_time(),
            cpu_s=cpu.user + cpu.system,
            rss_bytes=process.memory_info().rss,
            threads=process.num_threads(),
            descriptors=process.num_fds(),
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
