"""Connections that asyncio ends later than they are closed, because data wait for the peer to read."""

import asyncio
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from grpclib.client import Handler
from grpclib.config import Configuration
from patience import PATIENCE_S

from agent.http.server import PacedReader, ReceiveBudget, ResponseProgress, UnsentResponses
from agent.serve.grpc.hardened import HardenedProtocol, h2_config
from agent.serve.sockets import abort_transport, is_lost

Sockets = tuple[socket.socket, socket.socket]
WAITING_BYTES = 1 << 22  # more than a socket holds


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    near, far = socket.socketpair()
    with near, far:
        far.setblocking(False)
        yield near, far


async def read_until_end(sock: socket.socket) -> None:
    """Read all data of a connection."""
    while await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 1 << 20), PATIENCE_S):
        pass


async def close_before_read(transport: asyncio.Transport, peer: socket.socket) -> None:
    """Close a connection whose peer reads nothing, then let the peer read all; asyncio ends it by that."""
    transport.write(bytes(WAITING_BYTES))
    transport.close()
    assert transport.get_write_buffer_size()
    assert not is_lost(transport)
    await read_until_end(peer)
    assert is_lost(transport)


def test_abort_of_an_ended_connection_does_nothing(sockets: Sockets) -> None:
    near, far = sockets

    async def main() -> None:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(asyncio.Protocol, near)
        await close_before_read(transport, far)
        abort_transport(transport)

    asyncio.run(main())


def test_abort_of_an_open_connection_drops_unsent_data(sockets: Sockets) -> None:
    near, far = sockets

    async def main() -> None:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(asyncio.Protocol, near)
        transport.write(bytes(WAITING_BYTES))
        abort_transport(transport)
        assert not transport.get_write_buffer_size()
        await read_until_end(far)

    asyncio.run(main())


@pytest.mark.parametrize("use", ["abort", "write"])
def test_ended_grpc_connection_ignores_a_later_use(use: str, sockets: Sockets) -> None:
    """The server and the client abort a closed connection some seconds later, in case data still wait."""
    near, far = sockets

    async def main() -> None:
        factory = partial(
            HardenedProtocol, Handler(), Configuration().__for_test__(), h2_config(client_side=True)
        )
        transport, protocol = await asyncio.get_running_loop().connect_accepted_socket(factory, near)
        await close_before_read(transport, far)
        if use == "abort":
            protocol.transport.abort()
        else:
            protocol.transport.write(b"x")

    asyncio.run(main())


def test_abort_of_an_ended_http_connection_ends_its_task(sockets: Sockets) -> None:
    """The server aborts such a connection when it accepts another one, which it could not serve otherwise."""
    near, far = sockets

    async def main() -> None:
        reader, writer = await asyncio.open_connection(sock=near)
        await close_before_read(writer.transport, far)
        paced = PacedReader(reader, writer.transport.is_closing, ReceiveBudget())
        application: Any = None
        progress = ResponseProgress(application, writer, UnsentResponses(0), paced)
        progress.task = asyncio.create_task(asyncio.sleep(PATIENCE_S))
        assert progress.is_lost
        progress.abort()
        await asyncio.wait({progress.task})
        assert progress.task.cancelled()

    asyncio.run(main())
