"""Reads what an agent, or any DRA driver, serves on a unix socket. For the command line.

asyncio, for a process that does nothing else. A peer is not trusted: whatever it sends, the
outcome is a Report, an AgentStatus, or an error that says what was wrong.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import betterproto
from grpclib.const import Cardinality, Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from agent.errors import AgentUnreachable, PermissionDenied
from agent.model.report import Report
from agent.model.status import AgentStatus
from agent.serve.agent_api.decode import report_of, status_of
from agent.serve.grpc.channel import Channel
from agent.serve.grpc.gen.agent.drahealth import v1 as agent_v1
from agent.serve.grpc.gen.health_v1 import v1
from agent.serve.health.merge import Merge
from agent.serve.sockets import GONE, UNSERVED, why_no_connection
from agent.system.clock import read_clocks

M = TypeVar("M", bound=betterproto.Message)

STATUS_TIMEOUT_S: Final = 5.0
"""How long an agent may take to say how it is [s]."""

# The messages of v1 and v1alpha1 are the same bytes, so one pair of types reads both.
HEALTH_METHODS: Final = (
    "/v1.DRAResourceHealth/NodeWatchResources",
    "/v1alpha1.DRAResourceHealth/NodeWatchResources",
)


async def follow(socket: Path) -> AsyncGenerator[Report]:
    """Every newest report that ``socket`` tells of, the first as soon as there is one.

    An agent's own socket gives whole reports. A driver's health socket, v1 or v1alpha1, gives
    devices only, without causes, merged over its partial lists; a device whose lease runs out
    becomes Unknown. It never ends by itself.

    Raises:
        AgentUnreachable: nobody serves the socket, or whoever does stopped, or speaks none of these
            APIs, or sends something that is none of their messages; says which.
        PermissionDenied: the socket may not be opened.
    """
    with _blaming(socket):
        channel = Channel(os.fspath(socket))
        try:
            for reports in (_pictures(channel), *(_healths(channel, method) for method in HEALTH_METHODS)):
                async with contextlib.aclosing(reports):
                    try:
                        async for report in reports:
                            yield report
                    except GRPCError as error:
                        if error.status is Status.UNIMPLEMENTED:
                            continue
                        raise
                raise AgentUnreachable(f"{socket}: ended the stream")
            raise AgentUnreachable(f"{socket}: serves neither drahealth.v1.Agent nor a DRA health API")
        finally:
            channel.close()


async def status(socket: Path) -> AgentStatus:
    """How the agent behind ``socket`` is doing.

    Raises:
        AgentUnreachable: as :func:`follow`, or it did not answer within :data:`STATUS_TIMEOUT_S`.
        PermissionDenied: the socket may not be opened.
    """
    with _blaming(socket):
        channel = Channel(os.fspath(socket))
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                stub = agent_v1.AgentStub(channel)
                return status_of(await stub.status(agent_v1.StatusRequest()))
        finally:
            channel.close()


async def _pictures(channel: Channel) -> AsyncGenerator[Report]:
    call = channel.request(
        "/drahealth.v1.Agent/Watch", Cardinality.UNARY_STREAM, agent_v1.WatchRequest, agent_v1.Picture
    )
    async with call as stream:
        await stream.send_message(agent_v1.WatchRequest(), end=True)
        async for picture in stream:
            yield report_of(picture)


async def _healths(channel: Channel, method: str) -> AsyncGenerator[Report]:
    call = channel.request(
        method, Cardinality.UNARY_STREAM, v1.NodeWatchResourcesRequest, v1.NodeWatchResourcesResponse
    )
    merge = Merge()
    async with call as stream:
        await stream.send_message(v1.NodeWatchResourcesRequest(), end=True)
        async for response in _or_none(stream, merge):
            if response is not None:
                merge.take(response, read_clocks())
            merge.expire(read_clocks())
            yield merge.report(read_clocks())


async def _or_none(stream: Any, merge: Merge) -> AsyncIterator[v1.NodeWatchResourcesResponse | None]:
    """Each message of the stream, and None whenever a lease runs out in between."""
    reading = asyncio.ensure_future(stream.recv_message())
    try:
        while True:
            done, _ = await asyncio.wait({reading}, timeout=merge.expires_in_s(read_clocks()))
            if not done:
                yield None
            elif (response := reading.result()) is None:
                return
            else:
                yield response
                reading = asyncio.ensure_future(stream.recv_message())
    finally:
        reading.cancel()
        await asyncio.wait({reading})


@contextlib.contextmanager
def _blaming(socket: Path) -> Iterator[None]:
    """Turns what can go wrong with a peer into an error that names its socket."""
    try:
        yield
    except PermissionError as error:
        raise PermissionDenied(f"{socket}: may not open this socket ({error.strerror})") from None
    except TimeoutError:
        raise AgentUnreachable(f"{socket}: no answer within {STATUS_TIMEOUT_S:g} s") from None
    except OSError as error:
        why = why_no_connection(socket, error)
        question = "; is the agent running?" if why in {GONE, UNSERVED} else ""
        raise AgentUnreachable(f"{socket}: {why}{question}") from None
    except GRPCError as error:
        raise AgentUnreachable(f"{socket}: {error.status.name}: {error.message}") from None
    except (StreamTerminatedError, ProtocolError):
        raise AgentUnreachable(f"{socket}: closed the connection") from None
    except ValueError as error:
        raise AgentUnreachable(f"{socket}: {error}") from None
