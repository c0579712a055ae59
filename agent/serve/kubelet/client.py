"""gRPC calls on the kubelet's own sockets; answers are encoded messages. Event loop only."""

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
from agent.serve.grpc.channel import KubeletStream, ResponseTooLarge, UnixChannel
from agent.serve.sockets import connection_failure_reason

CALL_S: Final = 10.0
"""Timeout of a call on a kubelet's socket [s]."""
RATE_PAUSES_S: Final = (0.1, 0.2, 0.4, 0.8)
"""Pauses before each further attempt after the kubelet refused a call [s]: it accepts 100 calls a second from
all its clients."""


class KubeletCallFailed(Exception):
    """A call of the kubelet failed; the text has the socket and the reason."""

    def __init__(self, absence: Absence, why: str, *, rate_limited: bool = False) -> None:
        super().__init__(why)
        self.absence = absence
        """ABSENT: this kubelet does not serve the API; UNREADABLE: any other failure."""
        self.why = why
        self.rate_limited = rate_limited
        """True: the kubelet refused the call with RESOURCE_EXHAUSTED, its rate limit."""


async def call_kubelet(socket: Path, method: str) -> bytes:
    """Call a method of a kubelet's socket with an empty request, and return the encoded answer.

    Retries a call that the kubelet refused because of its rate limit. Raises KubeletCallFailed.
    """
    for pause_s in RATE_PAUSES_S:
        try:
            return await _call_once(socket, method)
        except KubeletCallFailed as error:
            if not error.rate_limited:
                raise
        await asyncio.sleep(pause_s)
    return await _call_once(socket, method)


async def stream_kubelet(socket: Path, method: str) -> AsyncGenerator[bytes]:
    """Yield the encoded messages of a stream from a kubelet's socket.

    Raises KubeletCallFailed if the stream cannot be opened, and when it ends.
    """
    with _errors_with_socket(socket):
        channel = UnixChannel(os.fspath(socket), KubeletStream)
        try:
            call = channel.request(method, Cardinality.UNARY_STREAM, bytes, bytes)
            async with call as stream:
                await stream.send_message(b"", end=True)
                async for message in stream:
                    yield message
        finally:
            channel.close()
    raise KubeletCallFailed(Absence.UNREADABLE, f"{socket}: kubelet ended the stream")


async def _call_once(socket: Path, method: str) -> bytes:
    with _errors_with_socket(socket):
        channel = UnixChannel(os.fspath(socket), KubeletStream)
        try:
            async with asyncio.timeout(CALL_S):
                call = channel.request(method, Cardinality.UNARY_UNARY, bytes, bytes)
                async with call as stream:
                    await stream.send_message(b"", end=True)
                    answer = await stream.recv_message()
                    if answer is None:
                        await stream.recv_trailing_metadata()
                        raise KubeletCallFailed(
                            Absence.UNREADABLE, f"{socket}: kubelet's answer has no message"
                        )
                    return answer
        finally:
            channel.close()


@contextmanager
def _errors_with_socket(socket: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise KubeletCallFailed(
            Absence.ABSENT, f"{socket}: {connection_failure_reason(socket, error)}"
        ) from None
    except TimeoutError:
        raise KubeletCallFailed(Absence.UNREADABLE, f"{socket}: no answer within {CALL_S:g} s") from None
    except OSError as error:
        raise KubeletCallFailed(
            Absence.UNREADABLE, f"{socket}: {connection_failure_reason(socket, error)}"
        ) from None
    except GRPCError as error:
        absence = Absence.ABSENT if error.status is Status.UNIMPLEMENTED else Absence.UNREADABLE
        why = f"{socket}: {error.status.name}: {error.message}"
        raise KubeletCallFailed(
            absence, why, rate_limited=error.status is Status.RESOURCE_EXHAUSTED
        ) from None
    except (StreamTerminatedError, ProtocolError):
        raise KubeletCallFailed(Absence.UNREADABLE, f"{socket}: kubelet closed the connection") from None
    except (ResponseTooLarge, H2Error, ValueError) as error:
        raise KubeletCallFailed(Absence.UNREADABLE, f"{socket}: {error}") from None
