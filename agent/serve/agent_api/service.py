"""``drahealth.v1.Agent``: the whole picture and the agent's own state, for the command line.

A picture is only made while somebody watches, once for all of them, and some pieces at a time: the kubelet's
streams go first.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import grpclib.const
import grpclib.server

from agent.model.report import Report
from agent.model.status import AgentStatus, Subscribers, Tally
from agent.serve.agent_api.encode import picture, status_reply
from agent.serve.grpc.codec import Unread
from agent.system.threads.latest import Latest

STATUS: Final = "/drahealth.v1.Agent/Status"
WATCH: Final = "/drahealth.v1.Agent/Watch"

AT_ONCE: Final = 16
"""Pieces of a picture that are made before others have their turn: 0.1 ms of them."""


class AgentService:
    """The service of ``agent.sock``."""

    def __init__(
        self, latest: Latest[Report], *, version: str, subscribers: Callable[[], tuple[Subscribers, ...]]
    ) -> None:
        self.streams = 0
        """How many streams are open."""
        self._latest = latest
        self._version = version
        self._subscribers = subscribers
        self._encoding = asyncio.Lock()
        self._encoded = (0, b"")

    def __mapping__(self) -> dict[str, grpclib.const.Handler]:
        """The methods by path, as grpclib asks for them. They send bytes, not messages."""
        unary, streaming = grpclib.const.Cardinality.UNARY_UNARY, grpclib.const.Cardinality.UNARY_STREAM
        return {
            STATUS: grpclib.const.Handler(self._status, unary, Unread, bytes),
            WATCH: grpclib.const.Handler(self._watch, streaming, Unread, bytes),
        }

    async def _status(self, stream: grpclib.server.Stream[Any, bytes]) -> None:
        """How the agent is doing, at this moment."""
        await stream.recv_message()
        status = read_status(*self._latest.peek(), version=self._version, subscribers=self._subscribers())
        await stream.send_message(status_reply(status))

    async def _watch(self, stream: grpclib.server.Stream[Any, bytes]) -> None:
        await stream.recv_message()
        await stream.send_initial_metadata()
        self.streams += 1
        try:
            version = 0
            while True:
                version, report = await self._latest.wait_newer(version)
                version, data = await self._picture(version, report)
                await stream.send_message(data)
        finally:
            self.streams -= 1

    async def _picture(self, version: int, report: Report) -> tuple[int, bytes]:
        async with self._encoding:
            if self._encoded[0] < version:
                pieces = []
                for piece in picture(report):
                    pieces.append(piece)
                    if len(pieces) % AT_ONCE == 0:
                        await asyncio.sleep(0)
                self._encoded = (version, b"".join(pieces))
            return self._encoded


def read_status(
    publications: int, report: Report | None, *, version: str, subscribers: tuple[Subscribers, ...]
) -> AgentStatus:
    """The status of this process. Reads a few files of its own in procfs."""
    import psutil  # 20 ms that only the one who asks should pay

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
