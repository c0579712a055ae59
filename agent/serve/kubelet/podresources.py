"""Client of the kubelet's podresources API: devices of the containers of all pods that have not ended.

The API has names but no UIDs and no requests of claims, and lists all devices of a claim for each container,
even if the container uses only one of them. A missing entry proves nothing: the API lists no claim of a
container after the kubelet has forgotten one of them, and no init container that ends. CDI ids are skipped,
because the kubelet also lists those of other devices.

Source: ``podresources/v1/api.proto`` of k8s.io/kubelet; kubelet ``apis/podresources/server_v1.go`` and
GetDynamicResources of ``cm/container_manager_linux.go`` as of 1.36 and 1.37.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

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
from agent.serve.grpc.wire.reader import MessageSchema, SchemaField, read_by_schema
from agent.serve.kubelet.client import KubeletCallFailed, call_kubelet

SOCKET: Final = "pod-resources/kubelet.sock"
"""Path of the podresources API's socket, relative to the kubelet's directory."""
LIST: Final = "/v1.PodResourcesLister/List"

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
        socket: :data:`SOCKET` in the kubelet's directory.
        clock: Returns the time of the answer.
    """
    try:
        answer = await call_kubelet(socket, LIST)
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
