"""Unary gRPC calls of the simulated kubelet to a DRA driver, with status and duration."""

import asyncio
from typing import Final

import h2.exceptions
from grpclib.const import Cardinality
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from agent.conform.session_record import UnaryCallResult
from agent.errors import PermissionDeniedError
from agent.serve.grpc.channel import RawChannel, ResponseTooLarge
from agent.serve.sockets import connection_failure_reason

CALL_S: Final = 5.0
"""Timeout of a unary gRPC call to the driver [s]."""
CONNECT_S: Final = 2.0
"""Timeout for connecting to a socket of the driver [s]."""

PEER_FAULTS: Final = (
    GRPCError,
    StreamTerminatedError,
    ProtocolError,
    h2.exceptions.H2Error,
    OSError,
    ValueError,
)
"""Exceptions that a faulty server can cause in grpclib."""


class SessionClock:
    """Clock of a conformance session with a driver: seconds since the session began."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()

    def now_s(self) -> float:
        return self._loop.time() - self._began_s


def describe_error(error: Exception) -> str:
    """Return the text of an exception: its system error text, its message or its type."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


async def call_unary(
    path: str, clock: SessionClock, method: str, request: bytes = b"", timeout_s: float = CALL_S
) -> tuple[UnaryCallResult, bytes]:
    """Call a gRPC method of the server at `path`, on a new connection.

    Returns the result and the encoded answer.

    Without an answer, the bytes are empty. Takes at most `timeout_s`. Errors of the server are in the result.

    Raises PermissionDeniedError: the socket may not be opened.
    """
    began_s, data = clock.now_s(), b""
    status, text = "OK", ""
    channel = RawChannel(path)
    try:
        async with asyncio.timeout(timeout_s):
            await channel.connect()
            began_s = clock.now_s()
            request_stream = channel.request(method, Cardinality.UNARY_UNARY, bytes, bytes, timeout=timeout_s)
            async with request_stream as stream:
                await stream.send_message(request, end=True)
                answer = await stream.recv_message()
                if answer is None:
                    status, text = "", "the answer has no message"
                data = answer or b""
    except ResponseTooLarge as error:
        status, text = "", str(error)
    except TimeoutError:
        status, text = "DEADLINE_EXCEEDED", f"no answer within {timeout_s:g} s"
    except GRPCError as error:
        status, text = error.status.name, error.message or ""
    except PermissionError as error:
        raise PermissionDeniedError(
            f"socket {path}: may not be opened: {error.strerror}; run as root"
        ) from None
    except PEER_FAULTS as error:
        status, text = "", describe_error(error)
    finally:
        channel.close()
    return UnaryCallResult(method, clock.now_s() - began_s, status, text), data


async def connect_error(path: str) -> str:
    """Return the reason why a connection to a socket fails; empty: the connection succeeds.

    Raises PermissionDeniedError: the socket may not be opened.
    """
    channel = RawChannel(path)
    try:
        async with asyncio.timeout(CONNECT_S):
            await channel.connect()
    except TimeoutError:
        return f"accepted no connection within {CONNECT_S:g} s"
    except PermissionError as error:
        raise PermissionDeniedError(
            f"socket {path}: may not be opened: {error.strerror}; run as root"
        ) from None
    except OSError as error:
        return connection_failure_reason(path, error)
    except PEER_FAULTS as error:
        return describe_error(error)
    finally:
        channel.close()
    return ""
