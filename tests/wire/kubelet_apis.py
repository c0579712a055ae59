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
    """Return the descriptors in their own pool: several of the kubelet's APIs are called v1."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "descriptors"
        arguments = ["protoc", f"--proto_path={PROTOS}", f"--descriptor_set_out={out}", *FILES.values()]
        if protoc.main(arguments) != 0:
            raise ValueError("protoc refused the tests' own files")
        message = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in message.file:
        pool.Add(file)
    return pool


@cache
def message_class(package: str, name: str) -> Any:
    """Return the message class ``name`` of a package."""
    file = _pool().FindFileByName(FILES[package])
    return message_factory.GetMessageClass(file.message_types_by_name[name])


# --- messages -----------------------------------------------------------------------------------------------


def listed_pods(*pods: Any) -> Any:
    """Return a ListPodResourcesResponse."""
    return message_class("v1", "ListPodResourcesResponse")(pod_resources=pods)


def listed_pod(name: str, *containers: Any, namespace: str = "team-a") -> Any:
    """Return a pod of podresources, with other fields that it may have."""
    pod = message_class("v1", "PodResources")(
        name=name, namespace=namespace, containers=containers, cpu_ids=[0, 300]
    )
    pod.memory.add(memory_type="memory", size=1 << 40)
    return pod


def listed_container(name: str, *claims: Any) -> Any:
    """Return a container of podresources."""
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
    """Return a claim of a container. Each device also has the CDI ids of those before it, as with the
    kubelet.
    """
    claim = message_class("v1", "DynamicResource")(claim_name=name, claim_namespace=namespace)
    for number, device in enumerate(devices, start=1):
        item = claim.claim_resources.add(
            driver_name=driver, pool_name=pool, device_name=device, share_id=share
        )
        for earlier in devices[:number]:
            item.cdi_devices.add(name=f"example.com/gpu={earlier}")
    return claim


def pod(
    uid: str, name: str = "", *, claims: Sequence[str] = (), phase: str = "Running", size: int = 0
) -> bytes:
    """Return a v1.Pod whose only container uses these claims, with `size` bytes in a field that is not
    read.
    """
    message = message_class("core", "Pod")()
    message.metadata.name, message.metadata.namespace, message.metadata.uid = (
        name or f"pod-{uid}",
        "team-a",
        uid,
    )
    message.spec.nodeName, message.status.phase = "node-1", phase
    message.status.message = "x" * size
    container = message.spec.containers.add(name="main", image="")
    for number, claim in enumerate(claims):
        message.spec.resourceClaims.add(name=f"c-{number}", resourceClaimName=claim)
        container.resources.claims.add(name=f"c-{number}")
    return bytes(message.SerializeToString())


def event(kind: str, data: bytes = b"") -> Any:
    """Return a WatchPodsEvent."""
    event_class = message_class("v1alpha1", "WatchPodsEvent")
    return event_class(type=kind, pod=data)


def deleted_event(uid: str) -> Any:
    """Return the event of a deleted pod, which has only names and UID."""
    message = message_class("core", "Pod")()
    message.metadata.name, message.metadata.namespace, message.metadata.uid = f"pod-{uid}", "team-a", uid
    return event("DELETED", message.SerializeToString())


# --- servers ------------------------------------------------------------------------------------------------


class RefuseCall(Exception):
    """Error that replaces an answer or the next event."""

    def __init__(self, status: grpc.StatusCode, text: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.text = text


RATE_LIMIT = RefuseCall(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
SLOW_CLIENT = RefuseCall(grpc.StatusCode.RESOURCE_EXHAUSTED, "watch client channel closed")
STARTING = RefuseCall(grpc.StatusCode.FAILED_PRECONDITION, "Kubelet is initializing")


class FakeApi:
    """Server on a unix socket, which stops when its context ends."""

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


class ListingApi(FakeApi):
    """Server of one call, answered by a function that may raise :class:`RefuseCall`."""

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
        except RefuseCall as error:
            context.abort(error.status, error.text)


class WatchApi(FakeApi):
    """Server of the pods API's watch. Each stream sends the events that a test puts into its queue."""

    def __init__(self, socket: Path) -> None:
        self.streams: queue.Queue[queue.Queue[Any]] = queue.Queue()
        self._stopped = threading.Event()
        super().__init__(socket)

    def stream(self, timeout_s: float = PATIENCE_S) -> "queue.Queue[Any]":
        """Return the queue of the next stream that a client opens: its items are sent; a
        :class:`RefuseCall` ends it.
        """
        return self.streams.get(timeout=timeout_s)

    def __exit__(self, *args: Any) -> None:
        self._stopped.set()
        super().__exit__(*args)

    def _handlers(self) -> Any:
        request = message_class("v1alpha1", "WatchPodsRequest")
        handler = grpc.unary_stream_rpc_method_handler(
            self._watch, request.FromString, lambda item: item.SerializeToString()
        )
        return grpc.method_handlers_generic_handler("v1alpha1.Pods", {"WatchPods": handler})

    def _watch(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        events: queue.Queue[Any] = queue.Queue()
        self.streams.put(events)
        while context.is_active() and not self._stopped.is_set():
            try:
                item = events.get(timeout=0.02)
            except queue.Empty:
                continue
            if isinstance(item, RefuseCall):
                context.abort(item.status, item.text)
            yield item
