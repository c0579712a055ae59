"""Asks the kubelet on the sockets that it serves to anybody on its node, and says why there is no answer.

For an asyncio loop. The answers are bytes: what they say is for agent.serve.kubelet.podresources and
agent.serve.kubelet.pods_api.
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
from agent.serve.grpc.channel import TooLarge
from agent.serve.grpc.wide_channel import WideChannel
from agent.serve.sockets import why_no_connection

CALL_S: Final = 10.0
"""How long the kubelet may take for an answer [s]."""
RATE_PAUSES_S: Final = (0.1, 0.2, 0.4, 0.8)
"""Before each further attempt, where others ask too much: the kubelet answers 100 times a second in all."""


class NoAnswer(Exception):
    """The kubelet has not answered; the socket comes first."""

    def __init__(self, absence: Absence, why: str, *, too_fast: bool = False) -> None:
        super().__init__(why)
        self.absence = absence
        """Absent: this kubelet serves no such thing."""
        self.why = why
        self.too_fast = too_fast
        """It refuses for the moment, whoever asked too much."""


async def ask(socket: Path, method: str) -> bytes:
    """The answer to a call without a request.

    Raises:
        NoAnswer: With the reason.
    """
    for pause_s in RATE_PAUSES_S:
        try:
            return await _ask(socket, method)
        except NoAnswer as error:
            if not error.too_fast:
                raise
        await asyncio.sleep(pause_s)
    return await _ask(socket, method)


async def listen(socket: Path, method: str) -> AsyncGenerator[bytes]:
    """The messages of a stream without a request, for as long as there is one.

    Raises:
        NoAnswer: It has ended, or there never was one; with the reason.
    """
    with _blaming(socket):
        channel = WideChannel(os.fspath(socket))
        try:
            call = channel.request(method, Cardinality.UNARY_STREAM, bytes, bytes)
            async with call as stream:
                await stream.send_message(b"", end=True)
                async for message in stream:
                    yield message
        finally:
            channel.close()
    raise NoAnswer(Absence.UNREADABLE, f"{socket}: ended the stream")


async def _ask(socket: Path, method: str) -> bytes:
    with _blaming(socket):
        channel = WideChannel(os.fspath(socket))
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
def _blaming(socket: Path) -> Iterator[None]:
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
