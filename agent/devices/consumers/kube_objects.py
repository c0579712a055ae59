"""Parser of Pod and ResourceClaim objects: from decoded JSON, as in ``kubectl get -o json``, to the model."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, TypeVar

from agent.devices.consumers.reservations import parse_reservations
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import (
    AllocatedDevice,
    ClaimObject,
    ContainerClaim,
    ContainerObject,
    Origin,
    OwnerReference,
    PodClaim,
    PodObject,
    PodRef,
    SourceAnswer,
    WorkloadRef,
)
from agent.model.json_values import JsonObject, get_mapping, get_mappings, get_required_text, get_text

T = TypeVar("T")

MIRROR_ANNOTATION: Final = "kubernetes.io/config.mirror"
"""Annotation of a mirror pod with the static pod's UID in the kubelet."""
_IMPLICIT_RESOURCES: Final = "deviceclass.resource.kubernetes.io/"
"""Prefix of the name of the extended resource that Kubernetes provides for each DeviceClass."""
INVALID_LISTED_MAX: Final = 16
"""Largest number of invalid API objects whose errors are listed."""


def parse_pods(answer: SourceAnswer[JsonObject]) -> SourceAnswer[PodObject]:
    """Parse the Pod objects of a source's answer; errors of invalid objects are added to ``invalid``."""
    from_kubelet = answer.provenance.origin is Origin.PODS_API
    return _parse_items(answer, partial(parse_pod, from_kubelet=from_kubelet))


def parse_claims(answer: SourceAnswer[JsonObject]) -> SourceAnswer[ClaimObject]:
    """Parse the ResourceClaim objects of a source's answer.
    The error of each invalid one is added to ``invalid``."""
    return _parse_items(answer, parse_claim_object)


def _parse_items(answer: SourceAnswer[JsonObject], parse: Callable[[JsonObject], T]) -> SourceAnswer[T]:
    items: list[T] = []
    wrong: list[str] = []
    for number, obj in enumerate(answer.items):
        try:
            items.append(parse(obj))
        except ValueError as error:
            wrong.append(f"item {number} ({_title(obj)}): {error}")
    if len(wrong) > INVALID_LISTED_MAX:
        wrong[INVALID_LISTED_MAX:] = [f"{len(wrong) - INVALID_LISTED_MAX} more"]
    return SourceAnswer(
        answer.provenance, tuple(items), answer.absence, answer.reason, (*answer.invalid, *wrong)
    )


def _title(obj: JsonObject) -> str:
    metadata = obj.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return ascii(name)[:70] if isinstance(name, str) else "without a name"


def parse_pod(obj: JsonObject, *, from_kubelet: bool = False) -> PodObject:
    """Parse a v1.Pod object; fields that do not concern claims are ignored. An empty text counts as missing.

    Args:
        from_kubelet: True: the kubelet's own copy, whose status lacks what the scheduler and controllers
            write. False: the API server's object.

    Raises ValueError with the name of the missing or invalid field.
    """
    metadata = get_mapping(obj, "metadata")
    spec = get_mapping(obj, "spec")
    status = get_mapping(obj, "status")
    namespace, name, uid = (
        get_required_text(metadata, key, "metadata") for key in ("namespace", "name", "uid")
    )
    annotation = get_mapping(metadata, "annotations", "metadata").get(MIRROR_ANNOTATION)
    mirrored = annotation if isinstance(annotation, str) else ""
    generated = _generated_claim_names(status)
    claims = [_pod_claim(one, generated, f"spec.resourceClaims[{at}]") for at, one in _claims_of(spec)]
    extended = get_mapping(status, "extendedResourceClaimStatus", "status")
    used: dict[str, list[ContainerClaim]] = {}
    if extended:
        claims.append(
            PodClaim("", get_text(extended, "resourceClaimName", "status.extendedResourceClaimStatus"))
        )
        for one in get_mappings(extended, "requestMappings", "status.extendedResourceClaimStatus"):
            use = ContainerClaim("", get_text(one, "requestName", "requestMappings"))
            used.setdefault(get_text(one, "containerName", "requestMappings"), []).append(use)
    return PodObject(
        ref=PodRef(namespace, name, mirrored or uid),
        node=get_text(spec, "nodeName", "spec"),
        phase=get_text(status, "phase", "status"),
        owners=tuple(_owners(metadata)),
        group=get_text(get_mapping(spec, "schedulingGroup", "spec"), "podGroupName", "spec.schedulingGroup"),
        claims=tuple(claims),
        containers=tuple(_containers(spec, status, used)),
        mirror_uid=uid if mirrored else "",
        lacks_claim_names=from_kubelet
        and (any(not one.claim for one in claims) or (not extended and _requests_extended_resources(spec))),
    )


def _requests_extended_resources(spec: JsonObject) -> bool:
    """Return whether a container requests an extended resource; the scheduler may create a claim for it."""
    return any(
        name.startswith(_IMPLICIT_RESOURCES)
        or ("/" in name and "kubernetes.io/" not in name and not name.startswith("requests."))
        for key in ("initContainers", "containers")
        for one in get_mappings(spec, key, "spec")
        for name in get_mapping(get_mapping(one, "resources", key), "limits", key)
    )


def _claims_of(spec: JsonObject) -> Iterable[tuple[int, JsonObject]]:
    return enumerate(get_mappings(spec, "resourceClaims", "spec"))


def _generated_claim_names(status: JsonObject) -> Mapping[str, str]:
    place = "status.resourceClaimStatuses"
    found = get_mappings(status, "resourceClaimStatuses", "status")
    return {get_text(one, "name", place): get_text(one, "resourceClaimName", place) for one in found}


def _pod_claim(one: JsonObject, generated: Mapping[str, str], place: str) -> PodClaim:
    name = get_required_text(one, "name", place)
    if claim := get_text(one, "resourceClaimName", place):
        return PodClaim(name, claim)
    return PodClaim(
        name, generated.get(name, ""), template=bool(get_text(one, "resourceClaimTemplateName", place))
    )


def _containers(
    spec: JsonObject, status: JsonObject, used: Mapping[str, list[ContainerClaim]]
) -> Iterable[ContainerObject]:
    for key, statuses in (("initContainers", "initContainerStatuses"), ("containers", "containerStatuses")):
        known = {
            get_text(one, "name", f"status.{statuses}"): _container_state(one, f"status.{statuses}")
            for one in get_mappings(status, statuses, "status")
        }
        for at, one in enumerate(get_mappings(spec, key, "spec")):
            place = f"spec.{key}[{at}]"
            name = get_required_text(one, "name", place)
            resources = get_mapping(one, "resources", place)
            named = [
                ContainerClaim(get_required_text(claim, "name", place), get_text(claim, "request", place))
                for claim in get_mappings(resources, "claims", f"{place}.resources")
            ]
            yield ContainerObject(name, (*named, *used.get(name, ())), *known.get(name, ()))


def _container_state(status: JsonObject, place: str) -> tuple[str, bool]:
    """Return the container id (without the runtime's name) of a container status, and True if it runs."""
    ident = get_text(status, "containerID", place).rpartition("://")[2]
    return ident, "running" in get_mapping(status, "state", place)


def parse_claim_object(obj: JsonObject) -> ClaimObject:
    """Parse a ResourceClaim object (resource.k8s.io, v1beta1 to v1) with the devices of all drivers.

    Raises ValueError with the name of the missing or invalid field.
    """
    metadata = get_mapping(obj, "metadata")
    status = get_mapping(obj, "status")
    ref = ClaimRef(*(get_required_text(metadata, key, "metadata") for key in ClaimRef._fields))
    allocation = get_mapping(status, "allocation", "status")
    devices = get_mapping(allocation, "devices", "status.allocation")
    place = "status.allocation.devices.results"
    controllers = [owner for owner in _owners(metadata) if owner.controller]
    return ClaimObject(
        ref=ref,
        allocated=status.get("allocation") is not None,
        devices=tuple(
            _allocated_device(one, place)
            for one in get_mappings(devices, "results", "status.allocation.devices")
        ),
        reserved=parse_reservations(status.get("reservedFor"), "status.reservedFor"),
        owner=controllers[0] if controllers else None,
        spec_reserved=parse_reservations(get_mapping(obj, "spec").get("reservedFor"), "spec.reservedFor"),
        any_pod=allocation.get("reservedForAnyPod") is True,
    )


def _allocated_device(result: JsonObject, place: str) -> AllocatedDevice:
    ref = DeviceRef(*(get_required_text(result, key, place) for key in DeviceRef._fields))
    request = get_text(result, "request", place)
    return AllocatedDevice(
        ref, (base_request(request),) if request else (), get_text(result, "shareID", place)
    )


def parse_workloads(objects: Iterable[tuple[JsonObject, str]]) -> tuple[WorkloadRef, ...]:
    """Return the identities of objects of any kind; objects without group, name or UID are left out.

    Args:
        objects: Objects, each with its kind.
    """
    found = []
    for obj, kind in objects:
        try:
            metadata = get_mapping(obj, "metadata")
            version = get_required_text(obj, "apiVersion", "object")
            namespace = get_text(metadata, "namespace", "metadata")
            name, uid = (get_required_text(metadata, key, "metadata") for key in ("name", "uid"))
        except ValueError:
            continue
        group = version.rpartition("/")[0]
        found.append(WorkloadRef(group, _resource_of_kind(kind), namespace, name, uid))
    return tuple(found)


def _resource_of_kind(kind: str) -> str:
    """Return the resource name of an object's kind, such as ``jobs`` for ``Job``, as Kubernetes guesses."""
    singular = kind.lower()
    if singular.endswith("s"):
        return f"{singular}es"
    return f"{singular[:-1]}ies" if singular.endswith("y") else f"{singular}s"


def base_request(request: str) -> str:
    """Return the name of a claim's request without its subrequest: ``gpus`` for ``gpus/large``."""
    return request.partition("/")[0]


def _owners(metadata: JsonObject) -> Iterable[OwnerReference]:
    place = "metadata.ownerReferences"
    for one in get_mappings(metadata, "ownerReferences", "metadata"):
        version, kind, name, uid = (
            get_text(one, key, place) for key in ("apiVersion", "kind", "name", "uid")
        )
        yield OwnerReference(version, kind, name, uid, one.get("controller") is True)
