"""gRPC as the kubelet speaks it: messages by Google's protobuf, statuses in the words of grpc-go.

One channel is one connection, shared with nobody. Without keepalive, and with gRPC's own limit of 4 MiB for a
message that comes in, as in the kubelet.
"""

import threading
import time
from pathlib import Path
from typing import Any, Final

import grpc
from wire.google import message_class

from kubelet.pace import Pace

RECEIVE_LIMIT: Final = 4 << 20
DRA_PACKAGES: Final = {
    "v1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1",
    "v1beta1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1beta1",
}
"""The proto package of each service that a plugin advertises; for the health service it is in the name."""
REGISTRATION: Final = "pluginregistration"

# grpc-go writes the codes otherwise than their numbers' names are written elsewhere.
_GO_NAMES: Final = {"OK": "OK", "CANCELLED": "Canceled"}


class CallFailed(Exception):
    """A call that ended with a status other than OK. Its text is that of grpc-go."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        name = _GO_NAMES.get(code.name) or "".join(word.capitalize() for word in code.name.split("_"))
        words = "context deadline exceeded" if code is grpc.StatusCode.DEADLINE_EXCEEDED else details
        super().__init__(f"rpc error: code = {name} desc = {words}")
        self.code = code
        self.words = words


def open_channel(socket: str, pace: Pace) -> grpc.Channel:
    """A connection of its own to that socket, made when it is first needed."""
    options = {
        "grpc.use_local_subchannel_pool": 1,
        "grpc.max_receive_message_length": RECEIVE_LIMIT,
        "grpc.initial_reconnect_backoff_ms": int(pace.reconnect_first_s * 1000),
        "grpc.min_reconnect_backoff_ms": int(min(20.0, pace.reconnect_limit_s) * 1000),
        "grpc.max_reconnect_backoff_ms": int(pace.reconnect_limit_s * 1000),
    }
    return grpc.insecure_channel(f"unix:{Path(socket)}", list(options.items()))


def close_channel(channel: grpc.Channel) -> None:
    """Ends it, when nobody is subscribed to it any more.

    grpcio follows a channel's state in a thread, which raises if the channel is closed under its feet. It
    ends within 0.2 s when nobody is subscribed, and that can be seen nowhere but here.
    """
    while channel._connectivity_state.polling:  # type: ignore[attr-defined]
        time.sleep(0.01)
    channel.close()


class Calls:
    """Unary calls, all of which can be ended at once: by the end of the kubelet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: set[Any] = set()
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        """Whether there are no more calls."""
        return self._ended.is_set()

    def ready(self, channel: grpc.Channel, timeout_s: float) -> None:
        """Connects, and blocks until that is done.

        Raises:
            CallFailed: it was not possible in time.
        """
        future = grpc.channel_ready_future(channel)
        self._await(future, timeout_s)

    def call(
        self, channel: grpc.Channel, package: str, service: str, method: str, request: Any, timeout_s: float
    ) -> Any:
        """The response; its class is called as gRPC's convention has it, or ``PluginInfo``.

        Raises:
            CallFailed: the status was another than OK, or the kubelet ends.
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
        except ValueError as error:  # of grpcio, for a channel that was closed
            raise CallFailed(grpc.StatusCode.CANCELLED, "grpc: the client connection is closing") from error
        return self._await(future, None)

    def end(self) -> None:
        """Cancels those under way; from now on each ends at once."""
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
    """A message class of the DRAPlugin API by the service's advertised name."""
    return message_class(DRA_PACKAGES[service], name)
