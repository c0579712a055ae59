"""Parser of Pod and ResourceClaim objects.

It converts decoded JSON, as in ``kubectl get -o json``, to the agent's own classes.

The module also has the reservations of a claim (``status.reservedFor``), and the pods that the kubelet
refuses because of these reservations.

A reservation names a pod, a pod group (KEP-5729) or another object, anywhere in the cluster. The kubelet
evaluates reservations only when it creates a pod's sandbox, so a running pod can be refused after a reboot.

Source of the refusal rules: kubelet ``cm/dra/manager.go`` prepareResources, and ``IsForPod`` and
``IsReservedForPod`` of k8s.io/dynamic-resource-allocation, as of 1.36 and 1.37. A kubelet compares the UID of
a reservation with the pod's and ignores the rest of the entry.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple, TypeVar

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import (
    SCHEDULING_GROUP,
    AllocatedDevice,
    ClaimObject,
    ConsumerKind,
    ContainerClaim,
    ContainerObject,
    Origin,
    OwnerReference,
    PodClaim,
    PodObject,
    PodRef,
    Reservation,
    SourceAnswer,
    WorkloadRef,
)
from agent.model.json_values import (
    JsonObject,
    get_mapping,
    get_mappings,
    get_required_text,
    get_text,
    raise_invalid,
    type_in_words,
)

RESERVED_MAX: Final = 256
"""Largest number of reservations of one claim that the API server accepts."""

_KINDS: Final = {
    ("", "pods"): ConsumerKind.POD,
    (SCHEDULING_GROUP, "podgroups"): ConsumerKind.POD_GROUP,
}


class ClaimReservations(NamedTuple):
    """Reservations of a claim, grouped by the kind of consumer that they name."""

    pods: tuple[Reservation, ...]
    groups: tuple[Reservation, ...]
    others: tuple[Reservation, ...]

    @property
    def exceeds_limit(self) -> bool:
        """True if the claim has more reservations than the API server accepts."""
        return sum(map(len, self)) > RESERVED_MAX


def parse_reservations(value: object, place: str) -> tuple[Reservation, ...]:
    """Parse the value of a ``reservedFor`` field: a list of references, or one reference (KEP-5194).

    Raises ValueError if an entry is not an object reference; the message has the path (``place``) of the
    entry.
    """
    entries = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(_reservation(entry, f"{place}[{number}]") for number, entry in enumerate(entries))


def _reservation(entry: object, place: str) -> Reservation:
    if not isinstance(entry, Mapping):
        raise_invalid(place, f"is {type_in_words(entry)}, not an object")
    group, resource, name, uid = (
        get_text(entry, key, place) for key in ("apiGroup", "resource", "name", "uid")
    )
    return Reservation(_KINDS.get((group, resource), ConsumerKind.OTHER), group, resource, name, uid)


def reservations_by_kind(reserved: Iterable[Reservation]) -> ClaimReservations:
    """Group the reservations of a claim by the kind of consumer that they name.

    The order within a group is kept.
    """
    entries = tuple(reserved)
    kinds = (ConsumerKind.POD, ConsumerKind.POD_GROUP, ConsumerKind.OTHER)
    return ClaimReservations(*(tuple(entry for entry in entries if entry.kind is kind) for kind in kinds))


class ExistingReservationTargets(NamedTuple):
    """Existing pods, pod groups and other objects. Reservations of claims are compared with these objects."""

    uids: frozenset[tuple[str, str]]
    """Existing pods, as (namespace, UID)."""
    groups: frozenset[tuple[str, str]]
    """Existing pod groups, which have pods, as (namespace, name)."""
    workloads: Mapping[tuple[str, str], frozenset[tuple[str, str]]]
    """(namespace, UID) of each other object, by (API group, resource).
    A missing key: no object of the resource is given, so that nothing is known about it."""


def existing_reservation_targets(
    pods: Iterable[PodObject], workloads: Iterable[WorkloadRef] = ()
) -> ExistingReservationTargets:
    """Collect existing pods, pod groups and other objects with which reservations of claims are compared."""
    known = tuple(pods)
    uids = ((pod.ref.namespace, uid) for pod in known for uid in (pod.ref.uid, pod.mirror_uid) if uid)
    groups = ((pod.ref.namespace, pod.group) for pod in known if pod.group)
    given: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for obj in workloads:
        given.setdefault((obj.api_group, obj.resource), set()).add((obj.namespace, obj.uid))
    return ExistingReservationTargets(
        frozenset(uids),
        frozenset(groups),
        {resource: frozenset(found) for resource, found in given.items()},
    )


def unmatched_reservations(claim: ClaimObject, known: ExistingReservationTargets) -> tuple[Reservation, ...]:
    """Return a claim's reservations for objects that ``known`` does not have.

    If ``known`` has all objects of the cluster, these reservations are orphaned. Reservations for other
    objects than pods and pod groups are left out unless ``known`` has objects of their resource.
    """
    return tuple(user for user in claim.reserved if _is_unmatched(user, claim.ref.namespace, known))


def _is_unmatched(user: Reservation, namespace: str, known: ExistingReservationTargets) -> bool:
    if user.kind is ConsumerKind.POD:
        return (namespace, user.uid) not in known.uids
    if user.kind is ConsumerKind.POD_GROUP and (namespace, user.name) in known.groups:
        return False
    given = known.workloads.get((user.api_group, user.resource))
    if given is None:
        return user.kind is ConsumerKind.POD_GROUP
    return (namespace, user.uid) not in given


class KubeletsRefusingPod(StrEnum):
    """Kubelets that refuse a pod: all kubelets, or those with certain versions and feature gates."""

    ALL = "all kubelets"
    WITHOUT_GROUPS = "kubelets without DRAWorkloadResourceClaims: before 1.36 all, to 1.37 by default"
    """Kubelets that do not know pod groups.

    The feature gate for pod groups is alpha in 1.36 and beta in 1.37, off in both, and needs GenericWorkload.
    """


class PredictedPodRefusal(NamedTuple):
    """A pod that the kubelet refuses when it creates the pod's sandbox.

    The pod is pending, or it runs and is refused after a reboot.
    """

    pod: PodRef
    claim: ClaimRef
    kubelets: KubeletsRefusingPod
    reason: str
    """Main reason of the refusal; a reason of all kubelets precedes a reason of some kubelets."""
    is_pending: bool = False
    """True: the pod is pending, and the kubelet refuses to start it. False: the pod runs."""


def find_refusal(pod: PodObject, named: PodClaim, claim: ClaimObject) -> PredictedPodRefusal | None:
    """Return why a claim keeps the kubelet from starting a pod.

    None: the claim does not, or the pod has ended.

    Args:
        pod: A pod in the claim's namespace.
        named: Entry of the pod's ``spec.resourceClaims`` for the claim.
        claim: The claim.
    """
    if pod.has_ended:
        return None
    reasons = list(_refusal_reasons(pod, named, claim))
    if not reasons:
        return None
    kubelets, why = min(reasons, key=lambda reason: reason[0] is not KubeletsRefusingPod.ALL)
    return PredictedPodRefusal(pod.ref, claim.ref, kubelets, why)


def find_refusal_by_uid(uid: str, claim: ClaimObject) -> PredictedPodRefusal | None:
    """Return why a claim keeps the kubelet from starting a pod of which only the UID is known.

    None: the kubelet starts the pod, or the result is unknown, since the pod can belong to a pod group that
    the claim is reserved for.
    """
    groups = reservations_by_kind(claim.reserved).groups
    if not claim.allocated:
        why = "the claim is not allocated"
    elif not groups and not _is_reserved_for(claim, uid):
        why = f"the claim is not reserved for the pod, but for {_format_reserved(claim)}"
    else:
        return None
    return PredictedPodRefusal(PodRef(uid=uid), claim.ref, KubeletsRefusingPod.ALL, why)


def _refusal_reasons(
    pod: PodObject, named: PodClaim, claim: ClaimObject
) -> Iterable[tuple[KubeletsRefusingPod, str]]:
    if not claim.allocated:
        yield KubeletsRefusingPod.ALL, "the claim is not allocated"
    owner = claim.owner
    if named.template and (owner is None or owner.uid != pod.ref.uid):
        is_group = owner is not None and owner.api_version.startswith(f"{SCHEDULING_GROUP}/")
        if is_group and owner and owner.kind == "PodGroup" and owner.name == pod.group != "":
            yield KubeletsRefusingPod.WITHOUT_GROUPS, f"the claim belongs to pod group {owner.name}"
        else:
            yield (
                KubeletsRefusingPod.ALL,
                f"the claim was created for {owner or 'an unknown owner'}, not for the pod",
            )
    if _is_reserved_for(claim, pod.ref.uid):
        return
    if pod.group and any(group.name == pod.group for group in reservations_by_kind(claim.reserved).groups):
        yield KubeletsRefusingPod.WITHOUT_GROUPS, f"the claim is reserved for pod group {pod.group}"
    else:
        yield (
            KubeletsRefusingPod.ALL,
            f"the claim is not reserved for the pod, but for {_format_reserved(claim)}",
        )


def _is_reserved_for(claim: ClaimObject, uid: str) -> bool:
    return any(reservation.uid == uid != "" for reservation in claim.reserved)


def _format_reserved(claim: ClaimObject) -> str:
    nouns = (("pod", "pods"), ("pod group", "pod groups"), ("other", "others"))
    counted = [
        f"{len(of)} {names[len(of) > 1]}"
        for of, names in zip(reservations_by_kind(claim.reserved), nouns, strict=True)
        if of
    ]
    return " and ".join(counted) or "no consumer"


# --- objects -----------------------------------------------------------------------------------------------

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

    The error of each invalid object is added to ``invalid``.
    """
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
    claims = [
        _pod_claim(entry, generated, f"spec.resourceClaims[{at}]")
        for at, entry in enumerate(get_mappings(spec, "resourceClaims", "spec"))
    ]
    extended = get_mapping(status, "extendedResourceClaimStatus", "status")
    used: dict[str, list[ContainerClaim]] = {}
    if extended:
        claims.append(
            PodClaim("", get_text(extended, "resourceClaimName", "status.extendedResourceClaimStatus"))
        )
        for mapping in get_mappings(extended, "requestMappings", "status.extendedResourceClaimStatus"):
            use = ContainerClaim("", get_text(mapping, "requestName", "requestMappings"))
            used.setdefault(get_text(mapping, "containerName", "requestMappings"), []).append(use)
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
        and (any(not used.claim for used in claims) or (not extended and _requests_extended_resources(spec))),
    )


def _requests_extended_resources(spec: JsonObject) -> bool:
    """Return whether a container requests an extended resource: the scheduler may create a claim for it."""
    return any(
        name.startswith(_IMPLICIT_RESOURCES)
        or ("/" in name and "kubernetes.io/" not in name and not name.startswith("requests."))
        for key in ("initContainers", "containers")
        for mapping in get_mappings(spec, key, "spec")
        for name in get_mapping(get_mapping(mapping, "resources", key), "limits", key)
    )


def _generated_claim_names(status: JsonObject) -> Mapping[str, str]:
    place = "status.resourceClaimStatuses"
    found = get_mappings(status, "resourceClaimStatuses", "status")
    return {get_text(obj, "name", place): get_text(obj, "resourceClaimName", place) for obj in found}


def _pod_claim(obj: JsonObject, generated: Mapping[str, str], place: str) -> PodClaim:
    name = get_required_text(obj, "name", place)
    if claim := get_text(obj, "resourceClaimName", place):
        return PodClaim(name, claim)
    return PodClaim(
        name, generated.get(name, ""), template=bool(get_text(obj, "resourceClaimTemplateName", place))
    )


def _containers(
    spec: JsonObject, status: JsonObject, used: Mapping[str, list[ContainerClaim]]
) -> Iterable[ContainerObject]:
    for key, statuses in (("initContainers", "initContainerStatuses"), ("containers", "containerStatuses")):
        known = {
            get_text(mapping, "name", f"status.{statuses}"): _container_state(mapping, f"status.{statuses}")
            for mapping in get_mappings(status, statuses, "status")
        }
        for at, entry in enumerate(get_mappings(spec, key, "spec")):
            place = f"spec.{key}[{at}]"
            name = get_required_text(entry, "name", place)
            resources = get_mapping(entry, "resources", place)
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
            _allocated_device(mapping, place)
            for mapping in get_mappings(devices, "results", "status.allocation.devices")
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
    """Return the resource name of an object's kind, such as ``jobs`` for ``Job``.

    The name is derived as in Kubernetes.
    """
    singular = kind.lower()
    if singular.endswith("s"):
        return f"{singular}es"
    return f"{singular[:-1]}ies" if singular.endswith("y") else f"{singular}s"


def base_request(request: str) -> str:
    """Return the name of a claim's request without its subrequest: ``gpus`` for ``gpus/large``."""
    return request.partition("/")[0]


def _owners(metadata: JsonObject) -> Iterable[OwnerReference]:
    place = "metadata.ownerReferences"
    for mapping in get_mappings(metadata, "ownerReferences", "metadata"):
        version, kind, name, uid = (
            get_text(mapping, key, place) for key in ("apiVersion", "kind", "name", "uid")
        )
        yield OwnerReference(version, kind, name, uid, mapping.get("controller") is True)
