"""Good DRA driver on gRPC's own library, from which drivers with faults derive: see ``faults.py``.

It encodes its messages by hand, so that any wrong message can be sent. It uses no code of the agent.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import grpc

from conform.lists import HEALTHY, UNHEALTHY, ListedDevice, field, health_list

DRA: Final = "k8s.io.kubelet.pkg.apis.dra"
SERVICES: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
PATH_LIMIT: Final = 107
"""Maximum length of the path of a socket in bytes."""
THREADS: Final = 64
"""Threads of a server: more than the streams that one run of conform opens."""


class DriverInfo(NamedTuple):
    """A driver's answer to GetInfo: the message PluginInfo."""

    kind: str
    name: str
    endpoint: str
    services: Sequence[str]

    def __bytes__(self) -> bytes:
        run = (self.kind, self.name, self.endpoint, *self.services)
        numbers = (1, 2, 3, *(4 for _ in self.services))
        return b"".join(field(number, text.encode()) for number, text in zip(numbers, run, strict=True))


class RefusedCall(Exception):
    """Error that ends a call with this status."""

    def __init__(self, code: grpc.StatusCode, text: str = "refused by the test") -> None:
        super().__init__(code, text)
        self.code, self.text = code, text


class Stream:
    """Open health stream."""

    def __init__(self, version: str, opened: int, ended: threading.Event) -> None:
        self.version = version
        self.opened = opened
        """Number of streams of that version that were opened before this one."""
        self.began_s = time.monotonic()
        self.ended = ended

    @property
    def age_s(self) -> float:
        """Time since its opening."""
        return time.monotonic() - self.began_s

    def wait(self, seconds: float) -> bool:
        """Wait for a time or the end of the stream; return whether the stream is still open."""
        return not self.ended.wait(seconds)

    def wait_closed(self) -> None:
        """Wait for the end of the stream."""
        self.ended.wait()


class Driver:
    """Instance of a driver: sockets, registration, an empty prepare, and health in both versions.

    Serves within its context. A driver with a fault overrides methods, which run in gRPC's threads.
    """

    name = "gpu.example.com"
    instance = ""
    """Suffix of the names of its sockets, to differ from those of another instance."""
    heartbeat_s = 0.5
    health_versions: Sequence[str] = ("v1", "v1alpha1")
    plugin_versions: Sequence[str] = ("v1", "v1beta1")
    services: Sequence[str] = SERVICES
    """Services that it advertises."""
    options: Sequence[tuple[str, Any]] = ()
    """Options of gRPC's servers."""

    def __init__(self, root: Path) -> None:
        """Create the driver.

        Args:
            root: Kubelet's directory, whose path leaves room for a socket's.
        """
        self.root = root
        self.ended = threading.Event()
        """Set at the end of the driver."""
        self._lock = threading.Lock()
        self._opened: dict[str, int] = {}
        self._previous_calls = 0
        self._servers: list[grpc.Server] = []

    @property
    def registry(self) -> Path:
        """Directory of registration sockets."""
        return self.root / "plugins_registry"

    @property
    def registration(self) -> Path:
        """Path of its registration socket."""
        return self.registry / f"{self.name}{self.instance}-reg.sock"

    @property
    def service(self) -> Path:
        """Path of its service socket."""
        return self.root / "plugins" / self.name / f"dra{self.instance}.sock"

    # --- answers ----------------------------------------------------------------------------------------

    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        """Return the devices of the next list, after so many lists on that stream."""
        return (
            ListedDevice(b"gpu-0", health=HEALTHY),
            ListedDevice(b"gpu-1", health=UNHEALTHY, message=b"gpu.xid.79: fell off the bus"),
        )

    def send_lists(self, stream: Stream) -> Iterator[bytes]:
        """Yield the lists of a health stream: all devices at once, and again at every heartbeat."""
        for lists in count():
            yield health_list(self.devices(stream, lists))
            if not stream.wait(self.heartbeat_s):
                return

    def info(self) -> DriverInfo:
        """Return its name, endpoint and services."""
        return DriverInfo("DRAPlugin", self.name, str(self.service), self.services)

    def get_info(self, previous_calls: int) -> DriverInfo:
        """Return the answer to GetInfo after so many previous calls; may block, or raise RefusedCall."""
        return self.info()

    def notify(self, status: bytes) -> None:
        """Handle the result of a registration: the message RegistrationStatus. May block, or raise
        RefusedCall.
        """

    def prepare(self, version: str) -> None:
        """Prepare no claims. May block, or raise RefusedCall."""

    # --- sockets ----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.serve()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def serve(self) -> None:
        """Create its sockets: the registration socket last."""
        self.listen(self.service, [*self.plugin_handlers(), *self.health_handlers()])
        self.listen(self.registration, [self.registration_handler()])

    def stop(self) -> None:
        """Stop all servers."""
        self.ended.set()
        for server in self._servers:
            server.stop(0).wait()

    def listen(self, socket: Path, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Create a socket. If its path is too long, create it elsewhere and move it."""
        socket.parent.mkdir(parents=True, exist_ok=True)
        short_path = socket if len(os.fsencode(socket)) <= PATH_LIMIT else self.root / "short.sock"
        server = grpc.server(ThreadPoolExecutor(THREADS), handlers=handlers, options=self.options)
        server.add_insecure_port(f"unix:{short_path}")
        server.start()
        short_path.rename(socket)
        self._servers.append(server)

    def health_handlers(self) -> list[grpc.GenericRpcHandler]:
        """Return the handlers of its health services."""
        return [self._health_handler(version) for version in self.health_versions]

    def plugin_handlers(self) -> list[grpc.GenericRpcHandler]:
        """Return the handlers of its DRAPlugin services."""
        return [
            _service(f"{DRA}.{version}.DRAPlugin", self.plugin_methods(version))
            for version in self.plugin_versions
        ]

    def plugin_methods(self, version: str) -> Mapping[str, Callable[[bytes], bytes]]:
        """Return the methods of its DRAPlugin service by name; each takes a request and returns the
        answer."""
        return {"NodePrepareResources": self._prepares(version)}

    def registration_handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of its registration."""

        def get_info(request: bytes) -> bytes:
            with self._lock:
                previous_calls, self._previous_calls = self._previous_calls, self._previous_calls + 1
            return bytes(self.get_info(previous_calls))

        def notify(request: bytes) -> bytes:
            self.notify(request)
            return b""

        methods = {"GetInfo": get_info, "NotifyRegistrationStatus": notify}
        return _service("pluginregistration.Registration", methods)

    def _prepares(self, version: str) -> Callable[[bytes], bytes]:
        def prepare(request: bytes) -> bytes:
            self.prepare(version)
            return b""

        return prepare

    def _health_handler(self, version: str) -> grpc.GenericRpcHandler:
        def watch(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            ended = threading.Event()
            if not context.add_callback(ended.set):
                return
            with self._lock:
                opened = self._opened[version] = self._opened.get(version, -1) + 1
            try:
                yield from self.send_lists(Stream(version, opened, ended))
            except RefusedCall as refused:
                context.abort(refused.code, refused.text)

        methods = {"NodeWatchResources": grpc.unary_stream_rpc_method_handler(watch)}
        return grpc.method_handlers_generic_handler(f"{version}.DRAResourceHealth", methods)


def _service(name: str, methods: Mapping[str, Callable[[bytes], bytes]]) -> grpc.GenericRpcHandler:
    def handler(method: Callable[[bytes], bytes]) -> grpc.RpcMethodHandler:
        def call(request: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                return method(request)
            except RefusedCall as refused:
                context.abort(refused.code, refused.text)
                raise AssertionError("abort raises") from refused

        return grpc.unary_unary_rpc_method_handler(call)

    handlers = {method: handler(function) for method, function in methods.items()}
    return grpc.method_handlers_generic_handler(name, handlers)
