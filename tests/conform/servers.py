"""A good DRA driver on gRPC's own library, for bad ones to be made of: see ``faults.py``.

What goes over its sockets is bytes that it writes by hand, so that nothing stands in the way of a wrong one.
It has no code of the agent's.
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

from conform.lists import HEALTHY, UNHEALTHY, Told, field, health_list

DRA: Final = "k8s.io.kubelet.pkg.apis.dra"
SERVICES: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
PATH_LIMIT: Final = 107
"""Of a socket, in bytes."""
THREADS: Final = 64
"""More than one run of conform opens streams."""


class Info(NamedTuple):
    """What a driver says of itself: the message PluginInfo."""

    kind: str
    name: str
    endpoint: str
    services: Sequence[str]

    def __bytes__(self) -> bytes:
        said = (self.kind, self.name, self.endpoint, *self.services)
        numbers = (1, 2, 3, *(4 for _ in self.services))
        return b"".join(field(number, text.encode()) for number, text in zip(numbers, said, strict=True))


class Refused(Exception):
    """A call ends with this status."""

    def __init__(self, code: grpc.StatusCode, text: str = "as the test wants it") -> None:
        super().__init__(code, text)
        self.code, self.text = code, text


class Stream:
    """A health stream that somebody has opened."""

    def __init__(self, version: str, opened: int, ended: threading.Event) -> None:
        self.version = version
        self.opened = opened
        """How many streams of that version were opened before this one."""
        self.began_s = time.monotonic()
        self.ended = ended

    @property
    def age_s(self) -> float:
        """How long it has been open."""
        return time.monotonic() - self.began_s

    def wait(self, seconds: float) -> bool:
        """Blocks for so long, or until nobody listens any more; whether somebody still does."""
        return not self.ended.wait(seconds)

    def stay(self) -> None:
        """Blocks until nobody listens any more."""
        self.ended.wait()


class Driver:
    """One instance of a driver: sockets, registration, an empty prepare, and health in both versions.

    Entered, it serves. A bad one overrides what it does wrong; what it overrides runs in threads of gRPC's.
    """

    name = "gpu.example.com"
    instance = ""
    """Makes the names of its sockets differ from those of another instance."""
    heartbeat_s = 0.5
    health_versions: Sequence[str] = ("v1", "v1alpha1")
    plugin_versions: Sequence[str] = ("v1", "v1beta1")
    services: Sequence[str] = SERVICES
    """As it introduces itself."""
    options: Sequence[tuple[str, Any]] = ()
    """Of gRPC's servers."""

    def __init__(self, root: Path) -> None:
        """
        Args:
            root: The kubelet's directory, whose path leaves room for a socket's.
        """
        self.root = root
        self.ended = threading.Event()
        """It is to end."""
        self._lock = threading.Lock()
        self._opened: dict[str, int] = {}
        self._asked = 0
        self._servers: list[grpc.Server] = []

    @property
    def registry(self) -> Path:
        """The directory of registration sockets."""
        return self.root / "plugins_registry"

    @property
    def registration(self) -> Path:
        """Its registration socket."""
        return self.registry / f"{self.name}{self.instance}-reg.sock"

    @property
    def service(self) -> Path:
        """Its service socket."""
        return self.root / "plugins" / self.name / f"dra{self.instance}.sock"

    # --- what it says ---------------------------------------------------------------------------------------

    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        """What it tells of, after so many lists on that stream."""
        return (
            Told(b"gpu-0", health=HEALTHY),
            Told(b"gpu-1", health=UNHEALTHY, message=b"gpu.xid.79: fell off the bus"),
        )

    def speak(self, stream: Stream) -> Iterator[bytes]:
        """The messages of a health stream: everything at once, and again at every heartbeat."""
        for lists in count():
            yield health_list(self.devices(stream, lists))
            if not stream.wait(self.heartbeat_s):
                return

    def info(self) -> Info:
        """What it says of itself."""
        return Info("DRAPlugin", self.name, str(self.service), self.services)

    def get_info(self, asked: int) -> Info:
        """The same, after so many who asked before; may take its time, or raise Refused."""
        return self.info()

    def notify(self, status: bytes) -> None:
        """It is told how its registration ended: the message RegistrationStatus. Likewise."""

    def prepare(self, version: str) -> None:
        """It is to prepare, with no claims. Likewise."""

    # --- its sockets ----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.serve()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def serve(self) -> None:
        """Its sockets appear: the one for registration last."""
        self.listen(self.service, [*self.plugin_handlers(), *self.health_handlers()])
        self.listen(self.registration, [self.registration_handler()])

    def stop(self) -> None:
        """Everything is gone."""
        self.ended.set()
        for server in self._servers:
            server.stop(0).wait()

    def listen(self, socket: Path, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """A socket appears. Where it has no room, it is made elsewhere and moved there."""
        socket.parent.mkdir(parents=True, exist_ok=True)
        near = socket if len(os.fsencode(socket)) <= PATH_LIMIT else self.root / "near.sock"
        server = grpc.server(ThreadPoolExecutor(THREADS), handlers=handlers, options=self.options)
        server.add_insecure_port(f"unix:{near}")
        server.start()
        near.rename(socket)
        self._servers.append(server)

    def health_handlers(self) -> list[grpc.GenericRpcHandler]:
        """Of its health services."""
        return [self._health_handler(version) for version in self.health_versions]

    def plugin_handlers(self) -> list[grpc.GenericRpcHandler]:
        """Of its DRAPlugin services."""
        return [
            _service(f"{DRA}.{version}.DRAPlugin", {"NodePrepareResources": self._prepares(version)})
            for version in self.plugin_versions
        ]

    def registration_handler(self) -> grpc.GenericRpcHandler:
        """Of its registration."""

        def get_info(request: bytes) -> bytes:
            with self._lock:
                asked, self._asked = self._asked, self._asked + 1
            return bytes(self.get_info(asked))

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
                yield from self.speak(Stream(version, opened, ended))
            except Refused as refused:
                context.abort(refused.code, refused.text)

        methods = {"NodeWatchResources": grpc.unary_stream_rpc_method_handler(watch)}
        return grpc.method_handlers_generic_handler(f"{version}.DRAResourceHealth", methods)


def _service(name: str, methods: Mapping[str, Callable[[bytes], bytes]]) -> grpc.GenericRpcHandler:
    def handler(method: Callable[[bytes], bytes]) -> grpc.RpcMethodHandler:
        def call(request: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                return method(request)
            except Refused as refused:
                context.abort(refused.code, refused.text)
                raise AssertionError("abort raises") from refused

        return grpc.unary_unary_rpc_method_handler(call)

    handlers = {method: handler(function) for method, function in methods.items()}
    return grpc.method_handlers_generic_handler(name, handlers)
