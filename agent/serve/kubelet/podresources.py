"""What containers use, as the kubelet's podresources API tells it: by names, of the pods that have not ended.

It knows no UIDs and no requests, and lists for a container all devices of a claim of which it may use one.
What it leaves out proves nothing: it lists no claim of a container as soon as the kubelet has forgotten one,
and no init container that ends. Its CDI ids are not read: a device's stand behind those of all before it.

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
from agent.serve.grpc.wire.shapes import Part, Shape, read_shape
from agent.serve.kubelet.api import NoAnswer, ask

SOCKET: Final = "pod-resources/kubelet.sock"
"""In the kubelet's directory."""
LIST: Final = "/v1.PodResourcesLister/List"

_DEVICE: Final[Shape] = {
    2: Part("driver_name"),
    3: Part("pool_name"),
    4: Part("device_name"),
    5: Part("share_id"),
}
_CLAIM: Final[Shape] = {
    2: Part("claim_name"),
    3: Part("claim_namespace"),
    4: Part("claim_resources", _DEVICE, many=True),
}
_CONTAINER: Final[Shape] = {1: Part("name"), 5: Part("dynamic_resources", _CLAIM, many=True)}
_POD: Final[Shape] = {1: Part("name"), 2: Part("namespace"), 3: Part("containers", _CONTAINER, many=True)}
_PODS: Final[Shape] = {1: Part("pod_resources", _POD, many=True)}


async def list_podresources(socket: Path, clock: Callable[[], Instant]) -> SourceAnswer[ListedPod]:
    """The pods that have not ended and what their containers use, or why nobody knows.

    Args:
        socket: :data:`SOCKET` in the kubelet's directory.
        clock: Read when the answer is there.
    """
    try:
        answer = await ask(socket, LIST)
        pods = parse_podresources(answer)
    except NoAnswer as error:
        return SourceAnswer(Provenance(Origin.PODRESOURCES, clock()), (), error.absence, error.why)
    except ValueError as error:
        why = f"{socket}: {error}"
        return SourceAnswer(Provenance(Origin.PODRESOURCES, clock()), (), Absence.UNREADABLE, why)
    return SourceAnswer(Provenance(Origin.PODRESOURCES, clock()), pods)


def parse_podresources(data: bytes) -> tuple[ListedPod, ...]:
    """The pods of a ListPodResourcesResponse. Raises ValueError, with the place, if it is none."""
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
