"""Service ``drahealth.v1.Agent`` for the command line: the whole report, and the state of the agent.

A report is encoded only while a client watches, once for all clients, and in small steps: the kubelet's
streams have priority.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import grpclib.const
import grpclib.server

from agent.model.report import AgentStatus, Report, Subscribers, Tally
from agent.serve.agent_api.encode import encode_report, encode_status
from agent.serve.grpc.codec import UnreadRequest
from agent.system.threads.latest import Latest

STATUS: Final = "/drahealth.v1.Agent/Status"
WATCH: Final = "/drahealth.v1.Agent/Watch"

CHUNKS_AT_ONCE: Final = 16
"""Number of chunks of a report that are encoded before the event loop runs other tasks; takes 0.1 ms."""


class AgentService:
    """gRPC service of ``agent.sock``. Event loop only."""

    def __init__(
        self, latest: Latest[Report], *, version: str, subscribers: Callable[[], tuple[Subscribers, ...]]
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
            STATUS: grpclib.const.Handler(self._status, unary, UnreadRequest, bytes),
            WATCH: grpclib.const.Handler(self._watch, streaming, UnreadRequest, bytes),
        }

    async def _status(self, stream: grpclib.server.Stream[Any, bytes]) -> None:
        """Send the agent's current status to the client."""
        await stream.recv_message()
        status = read_status(*self._latest.peek(), version=self._version, subscribers=self._subscribers())
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


def read_status(
    publications: int, report: Report | None, *, version: str, subscribers: tuple[Subscribers, ...]
) -> AgentStatus:
    """Return the status of this agent process. Reads a few of its own files in procfs."""
    import psutil  # 20 ms, only when a client requests the status

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
    return replace(
        status,
        node=report.node,
        at=report.at,
        publications=publications,
        tallies=tuple(Tally(severity, tallies[severity]) for severity in sorted(tallies, reverse=True)),
        sources=report.sources,
        core=report.core,
        groups=report.groups,
    )
