"""Client of the kubelet's gRPC sockets, and of its podresources API. Used only in the event loop.

The podresources API lists the devices of the containers of all pods that have not ended. The API has the
names of claims, but not their UIDs and requests, and lists all devices of a claim for each container, even if
the container uses only one of them. A missing entry proves nothing: the API lists no claim of a container
after the kubelet has forgotten one of its claims, and no init container but sidecars. CDI ids are skipped,
because the kubelet also lists the ids of other devices.

Source: ``podresources/v1/api.proto`` of k8s.io/kubelet; kubelet ``apis/podresources/server_v1.go`` and
GetDynamicResources of ``cm/container_manager_linux.go`` as of 1.36 and 1.37.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from grpclib.const import Cardinality, Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from h2.exceptions import H2Error

from agent.model.claim import DeviceRef
from agent.model.claim_sources import (
    AllocatedDevice,
    Origin,
    PodResourcesClaim,
    PodResourcesContainer,
    PodResourcesPod,
    Provenance,
    SourceAnswer,
)
from agent.model.reading import Absence
from agent.model.time import Instant
from agent.serve.grpc.channel import KubeletClientStream, ResponseTooLarge, UnixChannel
from agent.serve.grpc.wire import MessageSchema, SchemaField, read_by_schema
from agent.serve.sockets import connection_failure_reason

CALL_S: Final = 10.0
"""Timeout of a call on a kubelet's socket [s]."""
RATE_PAUSES_S: Final = (0.1, 0.2, 0.4, 0.8)
"""Pauses before further attempts after the kubelet refused a call [s]: it accepts 100 calls a second."""


class KubeletCallFailed(Exception):
    """Failure of a call to the kubelet; the text has the socket and the reason."""

    def __init__(self, absence: Absence, why: str, *, rate_limited: bool = False) -> None:
        super().__init__(why)
        self.absence = absence
        """ABSENT: this kubelet does not serve the API; UNREADABLE: any other failure."""
        self.why = why
        self.rate_limited = rate_limited
        """True: the kubelet refused the call with RESOURCE_EXHAUSTED, its rate limit."""


async def call_kubelet(socket: Path, method: str) -> bytes:
    """Call a method of a kubelet's socket with an empty request, and return the encoded answer.

    Retries a call that the kubelet refused because of its rate limit. Raises KubeletCallFailed.
    """
    for pause_s in RATE_PAUSES_S:
        try:
            return await _call_once(socket, method)
        except KubeletCallFailed as error:
            if not error.rate_limited:
                raise
        await asyncio.sleep(pause_s)
    return await _call_once(socket, method)


async def stream_kubelet(socket: Path, method: str) -> AsyncGenerator[bytes]:
    """Yield the encoded messages of a stream from a kubelet's socket.

    Raises KubeletCallFailed if the stream cannot be opened, and when it ends.
    """
    with _errors_with_socket(socket):
        channel = UnixChannel(os.fspath(socket), KubeletClientStream)
        try:
            call = channel.request(method, Cardinality.UNARY_STREAM, bytes, bytes)
            async with call as stream:
                await stream.send_message(b"", end=True)
                async for message in stream:
                    yield message
        finally:
            channel.close()
    raise KubeletCallFailed(Absence.UNREADABLE, f"{socket}: kubelet ended the stream")


async def _call_once(socket: Path, method: str) -> bytes:
    with _errors_with_socket(socket):
        channel = UnixChannel(os.fspath(socket), KubeletClientStream)
        try:
            async with asyncio.timeout(CALL_S):
                call = channel.request(method, Cardinality.UNARY_UNARY, bytes, bytes)
                async with call as stream:
                    await stream.send_message(b"", end=True)
                    answer = await stream.recv_message()
                    if answer is None:
                        await stream.recv_trailing_metadata()
                        raise KubeletCallFailed(
                            Absence.UNREADABLE, f"{socket}: kubelet's answer has no message"
                        )
                    return answer
        finally:
            channel.close()


@contextmanager
def _errors_with_socket(socket: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise KubeletCallFailed(
            Absence.ABSENT, f"{socket}: {connection_failure_reason(socket, error)}"
        ) from None
    except TimeoutError:
        raise KubeletCallFailed(Absence.UNREADABLE, f"{socket}: no answer within {CALL_S:g} s") from None
    except OSError as error:
        raise KubeletCallFailed(
            Absence.UNREADABLE, f"{socket}: {connection_failure_reason(socket, error)}"
        ) from None
    except GRPCError as error:
        absence = Absence.ABSENT if error.status is Status.UNIMPLEMENTED else Absence.UNREADABLE
        why = f"{socket}: {error.status.name}: {error.message}"
        raise KubeletCallFailed(
            absence, why, rate_limited=error.status is Status.RESOURCE_EXHAUSTED
        ) from None
    except (StreamTerminatedError, ProtocolError):
        raise KubeletCallFailed(Absence.UNREADABLE, f"{socket}: kubelet closed the connection") from None
    except (ResponseTooLarge, H2Error, ValueError) as error:
        raise KubeletCallFailed(Absence.UNREADABLE, f"{socket}: {error}") from None


PODRESOURCES_SOCKET: Final = "pod-resources/kubelet.sock"
"""Path of the podresources API's socket, relative to the kubelet's directory."""
PODRESOURCES_LIST: Final = "/v1.PodResourcesLister/List"


# --- podresources API --------------------------------------------------------------------------------------

_DEVICE: Final[MessageSchema] = {
    2: SchemaField("driver_name"),
    3: SchemaField("pool_name"),
    4: SchemaField("device_name"),
    5: SchemaField("share_id"),
}
_CLAIM: Final[MessageSchema] = {
    2: SchemaField("claim_name"),
    3: SchemaField("claim_namespace"),
    4: SchemaField("claim_resources", _DEVICE, repeated=True),
}
_CONTAINER: Final[MessageSchema] = {
    1: SchemaField("name"),
    5: SchemaField("dynamic_resources", _CLAIM, repeated=True),
}
_POD: Final[MessageSchema] = {
    1: SchemaField("name"),
    2: SchemaField("namespace"),
    3: SchemaField("containers", _CONTAINER, repeated=True),
}
_PODS: Final[MessageSchema] = {1: SchemaField("pod_resources", _POD, repeated=True)}


async def list_podresources(socket: Path, clock: Callable[[], Instant]) -> SourceAnswer[PodResourcesPod]:
    """Return the running and pending pods with their containers' devices, or why the call failed.

    Args:
        socket: :data:`PODRESOURCES_SOCKET` in the kubelet's directory.
        clock: Returns the time of the answer.
    """
    try:
        answer = await call_kubelet(socket, PODRESOURCES_LIST)
        pods = parse_podresources(answer)
    except KubeletCallFailed as error:
        return SourceAnswer(Provenance(Origin.PODRESOURCES, clock()), (), error.absence, error.why)
    except ValueError as error:
        why = f"{socket}: {error}"
        return SourceAnswer(Provenance(Origin.PODRESOURCES, clock()), (), Absence.UNREADABLE, why)
    return SourceAnswer(Provenance(Origin.PODRESOURCES, clock()), pods)


def parse_podresources(data: bytes) -> tuple[PodResourcesPod, ...]:
    """Decode the pods of a ListPodResourcesResponse. Raises ValueError with the field if it is not valid."""
    pods = read_by_schema(data, _PODS, "the answer").get("pod_resources", ())
    return tuple(
        PodResourcesPod(
            pod.get("namespace", ""),
            pod.get("name", ""),
            tuple(
                PodResourcesContainer(
                    container.get("name", ""), tuple(map(_claim, container.get("dynamic_resources", ())))
                )
                for container in pod.get("containers", ())
            ),
        )
        for pod in pods
    )


def _claim(claim: Mapping[str, Any]) -> PodResourcesClaim:
    return PodResourcesClaim(
        claim.get("claim_namespace", ""),
        claim.get("claim_name", ""),
        tuple(map(_device_use, claim.get("claim_resources", ()))),
    )


def _device_use(device: Mapping[str, Any]) -> AllocatedDevice:
    names = (device.get(key, "") for key in ("driver_name", "pool_name", "device_name"))
    return AllocatedDevice(DeviceRef(*names), share_id=device.get("share_id", ""))
