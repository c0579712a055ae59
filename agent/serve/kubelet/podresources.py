"""Containers' use of devices, from the kubelet's podresources API: by names, of the pods that have not
ended.

The API has no UIDs and no requests, and lists all devices of a claim for a container that may use only one.
A missing entry proves nothing: the API lists no claim of a container as soon as the kubelet has forgotten
one, and no init container that ends. CDI ids are not read: the list of a device also has those of all
devices before it.

Source: ``podresources/v1/api.proto`` of k8s.io/kubelet; kubelet ``apis/podresources/server_v1.go`` and
GetDynamicResources of ``cm/container_manager_linux.go`` as of 1.36 and 1.37.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from agent.model.claim import DeviceRef
from agent.model.claim_sources import (
    DeviceUse,
    ListedClaim,
    ListedContainer,
    ListedPod,
    Origin,
    Provenance,
    SourceAnswer,
)
from agent.model.reading import Absence
from agent.model.time import Instant
from agent.serve.grpc.wire.reader import MessageShape, ShapeField, read_shape
from agent.serve.kubelet.api import NoAnswer, call_kubelet

SOCKET: Final = "pod-resources/kubelet.sock"
"""Path of the socket in the kubelet's directory."""
LIST: Final = "/v1.PodResourcesLister/List"

_DEVICE: Final[MessageShape] = {
    2: ShapeField("driver_name"),
    3: ShapeField("pool_name"),
    4: ShapeField("device_name"),
    5: ShapeField("share_id"),
}
_CLAIM: Final[MessageShape] = {
    2: ShapeField("claim_name"),
    3: ShapeField("claim_namespace"),
    4: ShapeField("claim_resources", _DEVICE, repeated=True),
}
_CONTAINER: Final[MessageShape] = {
    1: ShapeField("name"),
    5: ShapeField("dynamic_resources", _CLAIM, repeated=True),
}
_POD: Final[MessageShape] = {
    1: ShapeField("name"),
    2: ShapeField("namespace"),
    3: ShapeField("containers", _CONTAINER, repeated=True),
}
_PODS: Final[MessageShape] = {1: ShapeField("pod_resources", _POD, repeated=True)}


async def list_podresources(socket: Path, clock: Callable[[], Instant]) -> SourceAnswer[ListedPod]:
    """Return the running and pending pods with the devices of their containers, or the reason why the pods
    are not known.

    Args:
        socket: :data:`SOCKET` in the kubelet's directory.
        clock: Clock for the time of the answer.
    """
    try:
        answer = await call_kubelet(socket, LIST)
        pods = parse_podresources(answer)
    except NoAnswer as error:
        return SourceAnswer(Provenance(Origin.PODRESOURCES, clock()), (), error.absence, error.why)
    except ValueError as error:
        why = f"{socket}: {error}"
        return SourceAnswer(Provenance(Origin.PODRESOURCES, clock()), (), Absence.UNREADABLE, why)
    return SourceAnswer(Provenance(Origin.PODRESOURCES, clock()), pods)


def parse_podresources(data: bytes) -> tuple[ListedPod, ...]:
    """Decode the pods of a ListPodResourcesResponse. Raises ValueError with the place if it is not valid."""
    pods = read_shape(data, _PODS, "the answer").get("pod_resources", ())
    return tuple(
        ListedPod(
            pod.get("namespace", ""),
            pod.get("name", ""),
            tuple(
                ListedContainer(
                    container.get("name", ""), tuple(map(_claim, container.get("dynamic_resources", ())))
                )
                for container in pod.get("containers", ())
            ),
        )
        for pod in pods
    )


def _claim(claim: Mapping[str, Any]) -> ListedClaim:
    return ListedClaim(
        claim.get("claim_namespace", ""),
        claim.get("claim_name", ""),
        tuple(map(_use, claim.get("claim_resources", ()))),
    )


def _use(device: Mapping[str, Any]) -> DeviceUse:
    names = (device.get(key, "") for key in ("driver_name", "pool_name", "device_name"))
    return DeviceUse(DeviceRef(*names), share_id=device.get("share_id", ""))
