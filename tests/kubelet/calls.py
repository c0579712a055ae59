"""gRPC calls as the kubelet makes them: messages by Google's protobuf, status texts as grpc-go writes them.

Each channel has its own connection, without keepalive, and accepts messages of up to 4 MiB, which is gRPC's
default and the kubelet's setting.
"""

import threading
import time
from pathlib import Path
from typing import Any, Final

import grpc
from wire.google import message_class

from kubelet.pace import Pace

RECEIVE_LIMIT: Final = 4 << 20
CONNECT_MS: Final = 20_000
"""Time that grpc-go gives to each attempt to connect [ms]."""
DRA_PACKAGES: Final = {
    "v1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1",
    "v1beta1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1beta1",
}
"""The proto package of each DRAPlugin service that a plugin advertises. The health service's name contains
its package."""
REGISTRATION: Final = "pluginregistration"

# grpc-go spells the status codes differently from the constants of grpcio.
_GO_NAMES: Final = {"OK": "OK", "CANCELLED": "Canceled"}


class CallFailed(Exception):
    """A call that ended with a status other than OK. Its text is the text of grpc-go."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        name = _GO_NAMES.get(code.name) or "".join(part.capitalize() for part in code.name.split("_"))
        details_text = "context deadline exceeded" if code is grpc.StatusCode.DEADLINE_EXCEEDED else details
        super().__init__(f"rpc error: code = {name} desc = {details_text}")
        self.code = code
        self.details_text = details_text


def open_channel(socket: str, pace: Pace) -> grpc.Channel:
    """Return a channel with its own connection to that socket. It connects on first use."""
    options = {
        "grpc.use_local_subchannel_pool": 1,
        "grpc.max_receive_message_length": RECEIVE_LIMIT,
        "grpc.initial_reconnect_backoff_ms": int(pace.reconnect_first_s * 1000),
        "grpc.min_reconnect_backoff_ms": CONNECT_MS,
        "grpc.max_reconnect_backoff_ms": int(pace.reconnect_limit_s * 1000),
    }
    return grpc.insecure_channel(f"unix:{Path(socket)}", list(options.items()))


def close_channel(channel: grpc.Channel) -> None:
    """Close a channel after its last subscription has ended.

    grpcio polls the channel's state in a thread, which raises if the channel is closed meanwhile. The
    thread ends within 0.2 s after the last unsubscribe, and only this private attribute shows it.
    """
    while channel._connectivity_state.polling:  # type: ignore[attr-defined]
        time.sleep(0.01)
    channel.close()


class Calls:
    """Unary calls in progress, all of which a stop of the kubelet cancels."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: set[Any] = set()
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        """Whether :meth:`end` was called."""
        return self._ended.is_set()

    def wait_ready(self, channel: grpc.Channel, timeout_s: float) -> None:
        """Connect the channel and wait until it is connected.

        Raises:
            CallFailed: the connection was not made in time.
        """
        future = grpc.channel_ready_future(channel)
        self._await(future, timeout_s)

    def call(
        self, channel: grpc.Channel, package: str, service: str, method: str, request: Any, timeout_s: float
    ) -> Any:
        """Call a method and return the response.

        The response class follows gRPC's naming convention, except for the two registration methods.

        Raises:
            CallFailed: the status was not OK, or the kubelet stops.
        """
        response = {
            "GetInfo": "PluginInfo",
            "NotifyRegistrationStatus": "RegistrationStatusResponse",
        }.get(method, f"{method}Response")
        try:
            start = channel.unary_unary(
                f"/{package}.{service}/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=message_class(package, response).FromString,
            )
            future = start.future(request, timeout=timeout_s)
        except ValueError as error:  # grpcio raises it for a closed channel
            raise CallFailed(grpc.StatusCode.CANCELLED, "grpc: the client connection is closing") from error
        return self._await(future, None)

    def end(self) -> None:
        """Cancel all running calls. Every later call ends at once."""
        self._ended.set()
        with self._lock:
            live = list(self._live)
        for future in live:
            future.cancel()

    def _await(self, future: Any, timeout_s: float | None) -> Any:
        with self._lock:
            self._live.add(future)
        try:
            if self.ended:
                future.cancel()
            return future.result(timeout_s)
        except grpc.FutureCancelledError as error:
            raise CallFailed(grpc.StatusCode.CANCELLED, "context canceled") from error
        except grpc.FutureTimeoutError as error:
            future.cancel()
            raise CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "") from error
        except grpc.RpcError as error:
            raise CallFailed(error.code(), error.details()) from error
        finally:
            with self._lock:
                self._live.discard(future)


def dra_message(service: str, name: str) -> Any:
    """Return a message class of the DRAPlugin API for an advertised service name."""
    return message_class(DRA_PACKAGES[service], name)
