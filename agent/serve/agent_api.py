"""``drahealth.v1.Agent``: the whole picture and the agent's own state, for the command line.

A cold path, and betterproto takes its time over it; so a picture is only made while somebody
watches, once for all of them, and piece by piece behind the kubelet's streams.
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
from agent.serve.picture import encode_device, encode_header, reply_of, warm_up
from agent.serve.rpc.gen.agent.drahealth import v1
from agent.serve.rpc.latest import Latest

WATCH: Final = "/drahealth.v1.Agent/Watch"


class AgentService(v1.AgentBase):
    """The service of ``agent.sock``."""

    def __init__(
        self, latest: Latest[Report], *, version: str, subscribers: Callable[[], tuple[Subscribers, ...]]
    ) -> None:
        warm_up()
        self.streams = 0
        """How many streams are open."""
        self._latest = latest
        self._version = version
        self._subscribers = subscribers
        self._encoding = asyncio.Lock()
        self._encoded = (0, b"")

    def __mapping__(self) -> dict[str, grpclib.const.Handler]:
        """The methods by path, as grpclib asks for them; Watch sends bytes, not messages."""
        mapping = super().__mapping__()
        return mapping | {WATCH: mapping[WATCH]._replace(func=self._watch)}

    async def status(self, status_request: v1.StatusRequest) -> v1.StatusReply:
        """How the agent is doing, at this moment."""
        return reply_of(
            read_status(*self._latest.peek(), version=self._version, subscribers=self._subscribers())
        )

    async def _watch(self, stream: grpclib.server.Stream[Any, bytes]) -> None:
        await stream.recv_message()
        await stream.send_initial_metadata()
        self.streams += 1
        try:
            version = 0
            while True:
                version, report = await self._latest.wait_newer(version)
                version, picture = await self._picture(version, report)
                await stream.send_message(picture)
        finally:
            self.streams -= 1

    async def _picture(self, version: int, report: Report) -> tuple[int, bytes]:
        async with self._encoding:
            if self._encoded[0] < version:
                await asyncio.sleep(0)
                pieces = [encode_header(report)]
                for device in report.devices:
                    pieces.append(encode_device(device))
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
