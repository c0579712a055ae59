"""A DRA plugin whose behaviour a test sets. It tests the fake kubelet.

It uses grpcio like the fake kubelet, so both can only be wrong about the meaning of the messages.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import grpc
from wire.google import message_class

from kubelet.calls import DRA_PACKAGES, REGISTRATION

SERVICES: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
UNKNOWN, HEALTHY, UNHEALTHY = 0, 1, 2

Devices = Sequence[Mapping[str, Any]]
"""Fields of the Device messages of one claim."""


class Status(NamedTuple):
    """A registration status that the kubelet sent."""

    registered: bool
    error: str


class Call(NamedTuple):
    """A call of the DRAPlugin service."""

    service: str
    method: str
    claims: tuple[tuple[str, str, str], ...]
    """Namespace, name and uid of each claim."""


def one_device(claim: Any) -> Devices:
    """Return one device with the claim's name. :class:`SamplePlugin` prepares it by default."""
    return [
        {
            "request_names": ["gpu"],
            "pool_name": "node-a",
            "device_name": claim.name,
            "cdi_device_ids": [f"example.com/gpu={claim.name}"],
        }
    ]


class SamplePlugin:
    """One instance of a driver. It serves and registers in a ``with`` block, or by single method calls."""

    def __init__(self, root: Path, driver: str, *, instance: str = "", one_socket: bool = False) -> None:
        """Args:
        root: The kubelet's directory.
        driver: The driver's name in GetInfo.
        instance: A suffix that distinguishes the socket names of several instances.
        one_socket: Serve everything on the registration socket.
        """
        self.driver = driver
        self.registration = root / "plugins_registry" / f"{driver}{instance}-reg.sock"
        self.service = self.registration if one_socket else root / "plugins" / driver / f"dra{instance}.sock"
        self.endpoint = "" if one_socket else str(self.service)
        """The endpoint in GetInfo."""
        self.services: Sequence[str] = SERVICES
        """The service names in GetInfo."""
        self.kind = "DRAPlugin"
        self.get_info: Callable[[], None] = lambda: None
        """Called within GetInfo. It may sleep or raise."""
        self.notify: Callable[[], None] = lambda: None
        """Called within NotifyRegistrationStatus. It may sleep or raise."""
        self.prepare: Callable[[Any], Devices | str] = one_device
        """Returns the devices of a claim, or its error."""
        self.unprepare: Callable[[Any], str] = lambda claim: ""
        """Returns the error of a claim, or an empty string."""
        self.amend: Callable[[Any], None] = lambda response: None
        """Changes a whole response."""
        self.health_status: grpc.StatusCode | None = None
        """Status with which every health stream ends at once; None: streams stay open."""
        self.statuses: list[Status] = []
        self.calls: list[Call] = []
        self.get_info_calls: list[str] = []
        """The driver name for each GetInfo call."""
        self.opened: list[str] = []
        """The package version of each opened health stream."""
        self._streams: list[queue.Queue[Any]] = []
        self._lock = threading.Lock()
        self._servers: list[grpc.Server] = []

    def __enter__(self) -> Self:
        self.serve()
        if self.registration != self.service:
            self.register()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- the sockets ------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Create the service socket."""
        handlers = [self._registration_handler()] if self.registration == self.service else []
        handlers += [self._plugin_handler(service) for service in DRA_PACKAGES]
        handlers += [self._health_handler(version) for version in ("v1", "v1alpha1")]
        self._listen(self.service, handlers)

    def register(self) -> None:
        """Create the registration socket."""
        self._listen(self.registration, [self._registration_handler()])

    def unregister(self) -> None:
        """Unlink the registration socket, as a plugin does that ends."""
        self.registration.unlink()

    def stop(self) -> None:
        """Stop all servers. gRPC unlinks the sockets."""
        for server in self._servers:
            self.end_streams(None)
            server.stop(0).wait()
        self.end_streams(None)  # a stream may have started meanwhile
        self._servers.clear()

    def connections(self) -> int:
        """Count the connections to the service socket."""
        rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        return sum(row[5] == "03" and row[-1] == str(self.service) for row in rows if len(row) == 8)

    # --- health -----------------------------------------------------------------------------------------

    def send_health(self, *devices: Mapping[str, Any], pool: str = "node-a") -> None:
        """Send one message on every stream. Each device has a ``name`` and fields of DeviceHealth."""
        with self._lock:
            for stream in self._streams:
                stream.put(("send", pool, devices))

    def end_streams(self, code: grpc.StatusCode | None, details: str = "") -> None:
        """End every stream with that status, or in order without one."""
        with self._lock:
            for stream in self._streams:
                stream.put(("end", code, details))

    # --- the gRPC services ------------------------------------------------------------------------------

    def _listen(self, socket: Path, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        socket.parent.mkdir(parents=True, exist_ok=True)
        server = grpc.server(ThreadPoolExecutor(16), handlers=handlers)
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        self._servers.append(server)

    def _registration_handler(self) -> grpc.GenericRpcHandler:
        def get_info(request: Any, context: grpc.ServicerContext) -> Any:
            with self._lock:
                self.get_info_calls.append(self.driver)
            self.get_info()
            return message_class(REGISTRATION, "PluginInfo")(
                type=self.kind,
                name=self.driver,
                endpoint=self.endpoint,
                supported_versions=self.services,
            )

        def notify(request: Any, context: grpc.ServicerContext) -> Any:
            with self._lock:
                self.statuses.append(Status(request.plugin_registered, request.error))
            self.notify()
            return message_class(REGISTRATION, "RegistrationStatusResponse")()

        return _handler(
            REGISTRATION,
            "Registration",
            {
                "GetInfo": (get_info, "InfoRequest"),
                "NotifyRegistrationStatus": (notify, "RegistrationStatus"),
            },
        )

    def _plugin_handler(self, service: str) -> grpc.GenericRpcHandler:
        def record_call(method: str, request: Any) -> Any:
            response = message_class(DRA_PACKAGES[service], f"{method}Response")()
            with self._lock:
                get_info_calls = tuple((claim.namespace, claim.name, claim.uid) for claim in request.claims)
                self.calls.append(Call(service, method, get_info_calls))
            return response

        def prepare(request: Any, context: grpc.ServicerContext) -> Any:
            response = record_call("NodePrepareResources", request)
            for claim in request.claims:
                result_or_error = self.prepare(claim)
                if isinstance(result_or_error, str):
                    response.claims[claim.uid].error = result_or_error
                else:
                    result = response.claims[claim.uid]
                    for device in result_or_error:
                        result.devices.add(**device)
            self.amend(response)
            return response

        def unprepare(request: Any, context: grpc.ServicerContext) -> Any:
            response = record_call("NodeUnprepareResources", request)
            for claim in request.claims:
                response.claims[claim.uid].error = self.unprepare(claim)
            self.amend(response)
            return response

        return _handler(
            DRA_PACKAGES[service],
            "DRAPlugin",
            {
                "NodePrepareResources": (prepare, "NodePrepareResourcesRequest"),
                "NodeUnprepareResources": (unprepare, "NodeUnprepareResourcesRequest"),
            },
        )

    def _health_handler(self, version: str) -> grpc.GenericRpcHandler:
        def watch(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            stream: queue.Queue[Any] = queue.Queue()
            with self._lock:
                self.opened.append(version)
                self._streams.append(stream)
                if self.health_status is not None:
                    stream.put(("end", self.health_status, "set by the test"))
            if context.add_callback(
                lambda: stream.put(("end", None, ""))
            ):  # false if the call has ended already
                yield from self._send_messages(version, stream, context)

        request = message_class(version, "NodeWatchResourcesRequest")
        handler = grpc.unary_stream_rpc_method_handler(
            watch, request.FromString, lambda message: message.SerializeToString()
        )
        return grpc.method_handlers_generic_handler(
            f"{version}.DRAResourceHealth", {"NodeWatchResources": handler}
        )

    def _send_messages(
        self, version: str, stream: "queue.Queue[Any]", context: grpc.ServicerContext
    ) -> Iterator[Any]:
        while True:
            match stream.get():
                case "send", pool, devices:
                    message = message_class(version, "NodeWatchResourcesResponse")()
                    for device in devices:
                        fields = dict(device)
                        entry = message.devices.add(
                            device={"pool_name": pool, "device_name": fields.pop("name")}
                        )
                        for name, value in fields.items():
                            setattr(entry, name, value)
                    yield message
                case "end", code, details:
                    with self._lock:
                        self._streams = [
                            open_stream for open_stream in self._streams if open_stream is not stream
                        ]
                    if code is not None:
                        context.abort(code, details)
                    return


def _handler(
    package: str, service: str, methods: Mapping[str, tuple[Callable[..., Any], str]]
) -> grpc.GenericRpcHandler:
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            function,
            message_class(package, request).FromString,
            lambda message: message.SerializeToString(),
        )
        for name, (function, request) in methods.items()
    }
    return grpc.method_handlers_generic_handler(f"{package}.{service}", handlers)


def sleep_for(seconds: float) -> Callable[..., Any]:
    """Return a function that sleeps."""
    return lambda *_: time.sleep(seconds)
