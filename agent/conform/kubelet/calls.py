"""Single calls of the kubelet's part: how each ended, how long it took, and the bytes of its answer.

A peer is not trusted: whatever it sends or leaves out, the outcome is an :class:`Answer`, within
:data:`CALL_S`.
"""

import asyncio
from typing import Final

import h2.exceptions
from grpclib.const import Cardinality
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from agent.conform.observed import Answer
from agent.errors import PermissionDenied
from agent.serve.grpc.bare_channel import BareChannel
from agent.serve.grpc.channel import TooLarge
from agent.serve.sockets import why_no_connection

CALL_S: Final = 5.0
"""How long a call may take [s]."""
CONNECT_S: Final = 2.0
"""How long a connection may take [s]."""

PEER_FAULTS: Final = (
    GRPCError,
    StreamTerminatedError,
    ProtocolError,
    h2.exceptions.H2Error,
    OSError,
    ValueError,
)
"""What a peer can bring about in grpclib."""


class Clock:
    """Seconds since the part began."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()

    def now_s(self) -> float:
        return self._loop.time() - self._began_s


def words_of(error: Exception) -> str:
    """Why a connection was of no use, in words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


async def ask(path: str, clock: Clock, method: str, request: bytes = b"") -> tuple[Answer, bytes]:
    """One call on a connection of its own, and the bytes of its answer; none if there is none in time.

    Raises:
        PermissionDenied: the socket may not be opened.
    """
    began_s, data = clock.now_s(), b""
    status, text = "OK", ""
    channel = BareChannel(path)
    try:
        async with asyncio.timeout(CALL_S):
            await channel.connect()
            began_s = clock.now_s()
            call = channel.request(method, Cardinality.UNARY_UNARY, bytes, bytes, timeout=CALL_S)
            async with call as stream:
                await stream.send_message(request, end=True)
                answer = await stream.recv_message()
                if answer is None:
                    status, text = "", "no message in the answer"
                data = answer or b""
    except TooLarge as error:
        status, text = "", str(error)
    except TimeoutError:
        status, text = "DEADLINE_EXCEEDED", f"no answer within {CALL_S:g} s"
    except GRPCError as error:
        status, text = error.status.name, error.message or ""
    except PermissionError as error:
        raise PermissionDenied(f"{path}: may not open this socket ({error.strerror})") from None
    except PEER_FAULTS as error:
        status, text = "", words_of(error)
    finally:
        channel.close()
    return Answer(method, clock.now_s() - began_s, status, text), data


async def connect_error(path: str) -> str:
    """Why a socket takes no connection, in words; empty: it does.

    Raises:
        PermissionDenied: the socket may not be opened.
    """
    channel = BareChannel(path)
    try:
        async with asyncio.timeout(CONNECT_S):
            await channel.connect()
    except TimeoutError:
        return f"takes no connection within {CONNECT_S:g} s"
    except PermissionError as error:
        raise PermissionDenied(f"{path}: may not open this socket ({error.strerror})") from None
    except OSError as error:
        return why_no_connection(path, error)
    except PEER_FAULTS as error:
        return words_of(error)
    finally:
        channel.close()
    return ""
