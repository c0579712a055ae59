"""Client of the sockets that the kubelet serves to every program on its Kubernetes node, with the reason of
each failure.

Event loop only. The answers are bytes, which agent.serve.kubelet.podresources and
agent.serve.kubelet.pods_api decode.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from grpclib.const import Cardinality, Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from h2.exceptions import H2Error

from agent.model.reading import Absence
from agent.serve.grpc.channel import Channel, NodeStream, TooLarge
from agent.serve.sockets import why_no_connection

CALL_S: Final = 10.0
"""Timeout of a call [s]."""
RATE_PAUSES_S: Final = (0.1, 0.2, 0.4, 0.8)
"""Pauses before each further attempt, if the kubelet's rate limit of 100 calls a second for all clients is
exceeded."""


class NoAnswer(Exception):
    """The kubelet has not answered; the text begins with the socket."""

    def __init__(self, absence: Absence, why: str, *, too_fast: bool = False) -> None:
        super().__init__(why)
        self.absence = absence
        """Kind of the failure; "absent" means that this kubelet does not serve the API."""
        self.why = why
        self.too_fast = too_fast
        """Whether the kubelet refused the call because of its rate limit."""


async def call_kubelet(socket: Path, method: str) -> bytes:
    """Call a method of a kubelet's socket with an empty request, and return the encoded answer.

    Raises:
        NoAnswer: The kubelet has not answered; has the reason.
    """
    for pause_s in RATE_PAUSES_S:
        try:
            return await _call_once(socket, method)
        except NoAnswer as error:
            if not error.too_fast:
                raise
        await asyncio.sleep(pause_s)
    return await _call_once(socket, method)


async def stream_kubelet(socket: Path, method: str) -> AsyncGenerator[bytes]:
    """Yield the encoded messages of a stream from a kubelet's socket, until the stream ends.

    Raises:
        NoAnswer: The stream has ended, or could not be opened; with the reason.
    """
    with _naming_socket(socket):
        channel = Channel(os.fspath(socket), NodeStream)
        try:
            call = channel.request(method, Cardinality.UNARY_STREAM, bytes, bytes)
            async with call as stream:
                await stream.send_message(b"", end=True)
                async for message in stream:
                    yield message
        finally:
            channel.close()
    raise NoAnswer(Absence.UNREADABLE, f"{socket}: ended the stream")


async def _call_once(socket: Path, method: str) -> bytes:
    with _naming_socket(socket):
        channel = Channel(os.fspath(socket), NodeStream)
        try:
            async with asyncio.timeout(CALL_S):
                call = channel.request(method, Cardinality.UNARY_UNARY, bytes, bytes)
                async with call as stream:
                    await stream.send_message(b"", end=True)
                    answer = await stream.recv_message()
                    if answer is None:
                        await stream.recv_trailing_metadata()
                        raise NoAnswer(Absence.UNREADABLE, f"{socket}: no message in the answer")
                    return answer
        finally:
            channel.close()


@contextmanager
def _naming_socket(socket: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NoAnswer(Absence.ABSENT, f"{socket}: {why_no_connection(socket, error)}") from None
    except TimeoutError:
        raise NoAnswer(Absence.UNREADABLE, f"{socket}: no answer within {CALL_S:g} s") from None
    except OSError as error:
        raise NoAnswer(Absence.UNREADABLE, f"{socket}: {why_no_connection(socket, error)}") from None
    except GRPCError as error:
        absence = Absence.ABSENT if error.status is Status.UNIMPLEMENTED else Absence.UNREADABLE
        why = f"{socket}: {error.status.name}: {error.message}"
        raise NoAnswer(absence, why, too_fast=error.status is Status.RESOURCE_EXHAUSTED) from None
    except (StreamTerminatedError, ProtocolError):
        raise NoAnswer(Absence.UNREADABLE, f"{socket}: closed the connection") from None
    except (TooLarge, H2Error, ValueError) as error:
        raise NoAnswer(Absence.UNREADABLE, f"{socket}: {error}") from None
