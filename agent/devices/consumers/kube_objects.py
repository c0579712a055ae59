"""Parser of Pod and ResourceClaim objects.

An object is a mapping as in ``kubectl get -o json``; objects of the pods API are converted to this form
before. Other fields are ignored. Reservations of a claim are parsed in agent.devices.consumers.reservations.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

from agent.devices.consumers.reservations import parse_reservations
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import (
    Container,
    ContainerClaim,
    DeviceUse,
    KnownClaim,
    KnownPod,
    Owner,
    PodClaim,
    PodRef,
    SourceAnswer,
)
from agent.model.objects import Object, mapping, needed, objects, text

T = TypeVar("T")

MIRROR: Final = "kubernetes.io/config.mirror"
"""Annotation of a mirror pod that has the UID of the static pod in the kubelet."""
WRONG_MAX: Final = 16
"""Limit of invalid objects whose error is listed."""


def pods_from(answer: SourceAnswer[Object]) -> SourceAnswer[KnownPod]:
    """Parse the pods of an answer; a pod that cannot be parsed is listed in ``invalid``."""
    return _each(answer, parse_pod)


def claims_from(answer: SourceAnswer[Object]) -> SourceAnswer[KnownClaim]:
    """Parse the claims of an answer; a claim that cannot be parsed is listed in ``invalid``."""
    return _each(answer, parse_claim_object)


def _each(answer: SourceAnswer[Object], parse: Callable[[Object], T]) -> SourceAnswer[T]:
    items: list[T] = []
    wrong: list[str] = []
    for number, obj in enumerate(answer.items):
        try:
            items.append(parse(obj))
        except ValueError as error:
            wrong.append(f"item {number} ({_title(obj)}): {error}")
    if len(wrong) > WRONG_MAX:
        wrong[WRONG_MAX:] = [f"{len(wrong) - WRONG_MAX} more"]
    return SourceAnswer(
        answer.provenance, tuple(items), answer.absence, answer.reason, (*answer.invalid, *wrong)
    )


def _title(obj: Object) -> str:
    metadata = obj.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return ascii(name)[:70] if isinstance(name, str) else "without a name"


# --- pods --------------------------------------------------------------------------------------------------


def parse_pod(obj: Object) -> KnownPod:
    """Parse a pod.

    Args:
        obj: A v1.Pod.

    Raises:
        ValueError: The object is not a pod; the message names the field. An empty text counts as missing, as
        in protobuf.

    Source:
        ``metadata``, ``spec.{nodeName,resourceClaims,schedulingGroup}``, ``resources.claims`` of containers,
        ``status.{phase,resourceClaimStatuses,extendedResourceClaimStatus}`` and the containers' ids
        and states.
    """
    metadata = mapping(obj, "metadata")
    spec = mapping(obj, "spec")
    status = mapping(obj, "status")
    namespace, name, uid = (needed(metadata, key, "metadata") for key in ("namespace", "name", "uid"))
    annotation = mapping(metadata, "annotations", "metadata").get(MIRROR)
    mirrored = annotation if isinstance(annotation, str) else ""
    generated = _generated(status)
    claims = [_pod_claim(one, generated, f"spec.resourceClaims[{at}]") for at, one in _claims_of(spec)]
    extended = mapping(status, "extendedResourceClaimStatus", "status")
    used: dict[str, list[ContainerClaim]] = {}
    if extended:
        claims.append(PodClaim("", text(extended, "resourceClaimName", "status.extendedResourceClaimStatus")))
        for one in objects(extended, "requestMappings", "status.extendedResourceClaimStatus"):
            use = ContainerClaim("", text(one, "requestName", "requestMappings"))
            used.setdefault(text(one, "containerName", "requestMappings"), []).append(use)
    return KnownPod(
        ref=PodRef(namespace, name, mirrored or uid),
        node=text(spec, "nodeName", "spec"),
        phase=text(status, "phase", "status"),
        owners=tuple(_owners(metadata)),
        group=text(mapping(spec, "schedulingGroup", "spec"), "podGroupName", "spec.schedulingGroup"),
        claims=tuple(claims),
        containers=tuple(_containers(spec, status, used)),
        mirror_uid=uid if mirrored else "",
    )


def _claims_of(spec: Object) -> Iterable[tuple[int, Object]]:
    return enumerate(objects(spec, "resourceClaims", "spec"))


def _generated(status: Object) -> Mapping[str, str]:
    """Return the object names of a pod's generated claims by the claims' names in the pod's spec."""
    place = "status.resourceClaimStatuses"
    found = objects(status, "resourceClaimStatuses", "status")
    return {text(one, "name", place): text(one, "resourceClaimName", place) for one in found}


def _pod_claim(one: Object, generated: Mapping[str, str], place: str) -> PodClaim:
    name = needed(one, "name", place)
    if claim := text(one, "resourceClaimName", place):
        return PodClaim(name, claim)
    return PodClaim(
        name, generated.get(name, ""), template=bool(text(one, "resourceClaimTemplateName", place))
    )


def _containers(
    spec: Object, status: Object, used: Mapping[str, list[ContainerClaim]]
) -> Iterable[Container]:
    for key, statuses in (("initContainers", "initContainerStatuses"), ("containers", "containerStatuses")):
        known = {
            text(one, "name", f"status.{statuses}"): _state(one, f"status.{statuses}")
            for one in objects(status, statuses, "status")
        }
        for at, one in enumerate(objects(spec, key, "spec")):
            place = f"spec.{key}[{at}]"
            name = needed(one, "name", place)
            resources = mapping(one, "resources", place)
            named = [
                ContainerClaim(needed(claim, "name", place), text(claim, "request", place))
                for claim in objects(resources, "claims", f"{place}.resources")
            ]
            yield Container(name, (*named, *used.get(name, ())), *known.get(name, ()))


def _state(status: Object, place: str) -> tuple[str, bool]:
    """Parse a container status: return the container id without the runtime, and whether the container
    runs."""
    ident = text(status, "containerID", place).rpartition("://")[2]
    return ident, "running" in mapping(status, "state", place)


# --- claims ------------------------------------------------------------------------------------------------


def parse_claim_object(obj: Object) -> KnownClaim:
    """Parse a ResourceClaim with the devices of all drivers.

    Args:
        obj: A ResourceClaim of resource.k8s.io, v1beta1 to v1; the parsed fields are the same in all.

    Raises:
        ValueError: The object is not a claim; the message names the field.

    Source:
        ``metadata``, ``status.allocation.devices.results[]``, ``status.reservedFor[]``.
    """
    metadata = mapping(obj, "metadata")
    status = mapping(obj, "status")
    ref = ClaimRef(*(needed(metadata, key, "metadata") for key in ClaimRef._fields))
    allocation = mapping(status, "allocation", "status")
    devices = mapping(allocation, "devices", "status.allocation")
    place = "status.allocation.devices.results"
    controllers = [owner for owner in _owners(metadata) if owner.controller]
    return KnownClaim(
        ref=ref,
        allocated=status.get("allocation") is not None,
        devices=tuple(
            _device(one, place) for one in objects(devices, "results", "status.allocation.devices")
        ),
        reserved=parse_reservations(status.get("reservedFor"), "status.reservedFor"),
        owner=controllers[0] if controllers else None,
        meant_for=parse_reservations(mapping(obj, "spec").get("reservedFor"), "spec.reservedFor"),
        any_pod=allocation.get("reservedForAnyPod") is True,
    )


def _device(result: Object, place: str) -> DeviceUse:
    ref = DeviceRef(*(needed(result, key, place) for key in DeviceRef._fields))
    request = text(result, "request", place)
    return DeviceUse(ref, (base_request(request),) if request else (), text(result, "shareID", place))


def base_request(request: str) -> str:
    """Return the name of a request without its subrequest: ``gpus`` for ``gpus/large``."""
    return request.partition("/")[0]


# --- both --------------------------------------------------------------------------------------------------


def _owners(metadata: Object) -> Iterable[Owner]:
    """Yield the owners of an object from its ``ownerReferences``."""
    place = "metadata.ownerReferences"
    for one in objects(metadata, "ownerReferences", "metadata"):
        version, kind, name, uid = (text(one, key, place) for key in ("apiVersion", "kind", "name", "uid"))
        yield Owner(version, kind, name, uid, one.get("controller") is True)
