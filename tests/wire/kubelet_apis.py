"""The kubelet's podresources and pods APIs on grpcio, with messages of Google's protobuf."""

import queue
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc
from patience import PATIENCE_S

PROTOS = Path(__file__).resolve().parent / "protos"
FILES = {
    "v1": "podresources_v1.proto",
    "v1alpha1": "pods_v1alpha1.proto",
    "core": "pod_v1.proto",
}
MIB = 1 << 20


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    """One of its own: several of the kubelet's APIs are called v1."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "descriptors"
        arguments = ["protoc", f"--proto_path={PROTOS}", f"--descriptor_set_out={out}", *FILES.values()]
        if protoc.main(arguments) != 0:
            raise ValueError("protoc refused the tests' own files")
        found = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in found.file:
        pool.Add(file)
    return pool


@cache
def message_class(package: str, name: str) -> Any:
    """The message class ``name`` of a package."""
    file = _pool().FindFileByName(FILES[package])
    return message_factory.GetMessageClass(file.message_types_by_name[name])


# --- what they tell ----------------------------------------------------------------------------------------


def listed_pods(*pods: Any) -> Any:
    """A ListPodResourcesResponse."""
    return message_class("v1", "ListPodResourcesResponse")(pod_resources=pods)


def listed_pod(name: str, *containers: Any, namespace: str = "team-a") -> Any:
    """A pod in podresources, with all else that may be there."""
    pod = message_class("v1", "PodResources")(
        name=name, namespace=namespace, containers=containers, cpu_ids=[0, 300]
    )
    pod.memory.add(memory_type="memory", size=1 << 40)
    return pod


def listed_container(name: str, *claims: Any) -> Any:
    """A container of one."""
    container = message_class("v1", "ContainerResources")(name=name, cpu_ids=[1], dynamic_resources=claims)
    container.devices.add(resource_name="example.com/old", device_ids=["a", "b"])
    return container


def listed_claim(
    name: str,
    *devices: str,
    driver: str = "gpu.example.com",
    pool: str = "node-1",
    namespace: str = "team-a",
    share: str | None = None,
) -> Any:
    """A claim of a container. Its devices' CDI ids pile up, as with the kubelet."""
    claim = message_class("v1", "DynamicResource")(claim_name=name, claim_namespace=namespace)
    for number, device in enumerate(devices, start=1):
        one = claim.claim_resources.add(
            driver_name=driver, pool_name=pool, device_name=device, share_id=share
        )
        for before in devices[:number]:
            one.cdi_devices.add(name=f"example.com/gpu={before}")
    return claim


def pod(
    uid: str, name: str = "", *, claims: Sequence[str] = (), phase: str = "Running", size: int = 0
) -> bytes:
    """A v1.Pod whose only container uses these claims; with that many bytes of what nobody reads."""
    found = message_class("core", "Pod")()
    found.metadata.name, found.metadata.namespace, found.metadata.uid = name or f"pod-{uid}", "team-a", uid
    found.spec.nodeName, found.status.phase = "node-1", phase
    found.status.message = "x" * size
    container = found.spec.containers.add(name="main", image="")
    for number, claim in enumerate(claims):
        found.spec.resourceClaims.add(name=f"c-{number}", resourceClaimName=claim)
        container.resources.claims.add(name=f"c-{number}")
    return bytes(found.SerializeToString())


def event(kind: str, data: bytes = b"") -> Any:
    """A WatchPodsEvent."""
    made = message_class("v1alpha1", "WatchPodsEvent")
    return made(type=kind, pod=data)


def gone(uid: str) -> Any:
    """That a pod is gone: of it there are only names and UID."""
    found = message_class("core", "Pod")()
    found.metadata.name, found.metadata.namespace, found.metadata.uid = f"pod-{uid}", "team-a", uid
    return event("DELETED", found.SerializeToString())


# --- who tells it ------------------------------------------------------------------------------------------


class Refuse(Exception):
    """Instead of an answer, or of the next event."""

    def __init__(self, status: grpc.StatusCode, text: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.text = text


RATE_LIMIT = Refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
SLOW_CLIENT = Refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "watch client channel closed")
STARTING = Refuse(grpc.StatusCode.FAILED_PRECONDITION, "Kubelet is initializing")


class Api:
    """A server on a unix socket; leaving stops it."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        self._server.add_generic_rpc_handlers([self._handlers()])
        self._server.add_insecure_port(f"unix:{socket}")

    def _handlers(self) -> Any:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(None).wait()


class ListingApi(Api):
    """One call, answered by a function; it may raise :class:`Refuse`."""

    def __init__(self, socket: Path, method: str, answer: Callable[[], Any]) -> None:
        self.calls = 0
        self._method = method
        self._answer = answer
        super().__init__(socket)

    def _handlers(self) -> Any:
        _, service, name = self._method.split("/")
        package = service.partition(".")[0]
        request = message_class(package, {"List": "ListPodResourcesRequest"}.get(name, f"{name}Request"))
        handler = grpc.unary_unary_rpc_method_handler(
            self._call, request.FromString, lambda answer: answer.SerializeToString()
        )
        return grpc.method_handlers_generic_handler(service, {name: handler})

    def _call(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.calls += 1
        try:
            return self._answer()
        except Refuse as error:
            context.abort(error.status, error.text)


class WatchApi(Api):
    """The pods API's watch. Each stream gets what :meth:`say` is told, until it is told to end."""

    def __init__(self, socket: Path) -> None:
        self.streams: queue.Queue[queue.Queue[Any]] = queue.Queue()
        self._stopped = threading.Event()
        super().__init__(socket)

    def stream(self, timeout_s: float = PATIENCE_S) -> "queue.Queue[Any]":
        """The next stream that somebody opens: what is put into it is sent; a :class:`Refuse` ends it."""
        return self.streams.get(timeout=timeout_s)

    def __exit__(self, *args: Any) -> None:
        self._stopped.set()
        super().__exit__(*args)

    def _handlers(self) -> Any:
        request = message_class("v1alpha1", "WatchPodsRequest")
        handler = grpc.unary_stream_rpc_method_handler(
            self._watch, request.FromString, lambda one: one.SerializeToString()
        )
        return grpc.method_handlers_generic_handler("v1alpha1.Pods", {"WatchPods": handler})

    def _watch(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        mine: queue.Queue[Any] = queue.Queue()
        self.streams.put(mine)
        while context.is_active() and not self._stopped.is_set():
            try:
                one = mine.get(timeout=0.02)
            except queue.Empty:
                continue
            if isinstance(one, Refuse):
                context.abort(one.status, one.text)
            yield one
