"""Google's protobuf and gRPC as independent implementation. Messages are made from ``proto/`` at run time."""

import queue
import tempfile
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FileDescriptor
from grpc_tools import protoc
from patience import PATIENCE_S

PROTO = Path(__file__).resolve().parents[2] / "proto"
FILES = {
    "v1": "dra_health/v1/dra_health_v1.proto",
    "v1alpha1": "dra_health/v1alpha1/dra_health_v1alpha1.proto",
    "drahealth.v1": "drahealth/v1/agent.proto",
    "drahealth.v1.DriverLink": "drahealth/v1/driver_link.proto",
    "datamodels": "nvsentinel/platform_connector.proto",
    "k8s.io.kubelet.pkg.apis.dra.v1": "dra/v1/dra_v1.proto",
    "k8s.io.kubelet.pkg.apis.dra.v1beta1": "dra/v1beta1/dra_v1beta1.proto",
    "pluginregistration": "plugin_registration/v1/plugin_registration_v1.proto",
}


@cache
def load_descriptors() -> Mapping[str, FileDescriptor]:
    """Return the descriptors of our APIs by package (one by its service), in one pool as in a program."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "descriptors"
        arguments = ["protoc", f"--proto_path={PROTO}", f"--descriptor_set_out={out}", *FILES.values()]
        if protoc.main(arguments) != 0:
            raise ValueError("protoc refused our own files")
        files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return {package: pool.FindFileByName(name) for package, name in FILES.items()}


@cache
def message_class(package: str, name: str) -> Any:
    """Return the message class ``name`` of a package."""
    return message_factory.GetMessageClass(load_descriptors()[package].message_types_by_name[name])


class Watcher:
    """Reader of a server stream in its own thread, by grpcio.

    On its own connection, unless ``shared``: then on one for all watchers of that socket.
    """

    def __init__(
        self, socket: Path, method: str, request: Any, response: Any, *, shared: bool = False
    ) -> None:
        options = [("grpc.use_local_subchannel_pool", 0 if shared else 1)]
        self._channel = grpc.insecure_channel(f"unix:{socket}", options)
        open_stream = self._channel.unary_stream(
            method, request_serializer=request.SerializeToString, response_deserializer=response.FromString
        )
        self._call = open_stream(request())
        self._queue: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()
        self._thread.join()
        self._channel.close()

    def wait_opened(self) -> None:
        """Wait until the server has accepted the call."""
        self._call.initial_metadata()

    def next(self, timeout_s: float = PATIENCE_S) -> Any:
        """Return the next message.

        Raises:
            grpc.RpcError: The stream has ended; has its status.
        """
        item = self._queue.get(timeout=timeout_s)
        if isinstance(item, grpc.RpcError):
            raise item
        return item

    def pending_count(self) -> int:
        """Return the number of received messages that no call of next() has returned."""
        return self._queue.qsize()

    def _read(self) -> None:
        try:
            for response in self._call:
                self._queue.put(response)
        except grpc.RpcError as error:
            self._queue.put(error)


def watch_health(socket: Path, version: str = "v1", *, shared: bool = False) -> Watcher:
    """Open a health stream as a kubelet of that version."""
    return Watcher(
        socket,
        f"/{version}.DRAResourceHealth/NodeWatchResources",
        message_class(version, "NodeWatchResourcesRequest"),
        message_class(version, "NodeWatchResourcesResponse"),
        shared=shared,
    )


def names(response: Any) -> list[str]:
    """Return the names of the devices in a health list."""
    return [entry.device.device_name for entry in response.devices]
