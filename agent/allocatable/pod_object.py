"""A pod's object, as kubectl shows it in JSON or YAML, to the pod that is judged.

What concerns others is passed over, and so are fields that are younger than this file. What cgroups follow
from is checked, and named if it is wrong. Claims' amounts are read in all shapes that a release or KEP-5517
gave them; amounts in a shape that is none of these are unsaid, not zero.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from agent.allocatable.object_fields import moment, quantities, resources, word, words
from agent.allocatable.pod import Container, ContainerClaim, Grant, Pod, Qos, Resize, Resources, Role, Unsaid
from agent.allocatable.quantity import ZERO, Quantity
from agent.errors import ProbeError
from agent.model.objects import Object, mapping, objects, refuse, short

_HASHES: Final = ("kubernetes.io/config.mirror", "kubernetes.io/config.hash")
"""Annotations of a static pod with the hash of its manifest."""
_MAPPINGS: Final = ("mapping", "direct")
"""As released in 1.37, and in the KEP's text; in 1.36 it was a map, ``resources``."""
_PER_POD: Final = ("perPod", "perPodReference")
_PER_CONTAINER: Final = ("perContainer", "perContainerReference")
_SHAPES: Final = frozenset({"resources", "overhead", *_MAPPINGS})


def parse_pod(obj: Object) -> Pod:
    """The pod of an object.

    Args:
        obj: A v1.Pod, e.g. an item of ``kubectl get pods -o json``. ``kind`` may be left out.

    Raises:
        ProbeError: with the pod and the place: this is no pod, or one that no API server has.

    Source:
        ``metadata``, ``spec`` and ``status`` of v1.Pod, 1.34 to 1.37.
    """
    if obj.get("kind") not in {None, "Pod"}:
        raise ProbeError(f"{short(obj.get('kind'))} is no Pod")
    try:
        return _pod(obj)
    except ValueError as error:
        metadata = obj.get("metadata")
        name = metadata.get("name") if isinstance(metadata, Mapping) else None
        raise ProbeError(f"pod {short(name) if name else 'without a name'}: {error}") from None


def _pod(obj: Object) -> Pod:
    metadata, spec, status = (mapping(obj, key, "") for key in ("metadata", "spec", "status"))
    level = mapping(spec, "resources", "spec")
    claims = _claims(spec, status)
    return Pod(
        namespace=word(metadata, "namespace", "metadata", "default"),
        name=word(metadata, "name", "metadata"),
        uid=word(metadata, "uid", "metadata"),
        cgroup_uid=_cgroup_uid(metadata),
        stated_qos=_qos(status),
        containers=_containers(spec, status),
        overhead=resources(spec, "overhead", "spec"),
        level_requests=resources(level, "requests", "spec.resources"),
        level_limits=resources(level, "limits", "spec.resources"),
        claims=claims,
        grants=_grants(status, claims),
        phase=word(status, "phase", "status", ""),
        resize=_resize(status),
    )


def _cgroup_uid(metadata: Object) -> str:
    """The kubelet knows a static pod by the hash of its manifest; the uid is that of its mirror."""
    annotations = mapping(metadata, "annotations", "metadata")
    hashes = (word(annotations, key, "metadata.annotations", "") for key in _HASHES)
    return next(filter(None, hashes), word(metadata, "uid", "metadata"))


def _qos(status: Object) -> Qos | None:
    stated = word(status, "qosClass", "status", "")
    if not stated:
        return None
    if stated not in set(Qos):
        refuse("status.qosClass", f"{short(stated)} is none of {', '.join(Qos)}")
    return Qos(stated)


def _resize(status: Object) -> Resize | None:
    """Pending outranks in progress: then the spec is not what the cgroups were made of."""
    found = {
        one.get("type"): one for one in objects(status, "conditions", "status") if one.get("status") == "True"
    }
    for kind in ("PodResizePending", "PodResizeInProgress"):
        if kind in found:
            place = f"status.conditions[{kind}]"
            since = moment(found[kind], "lastTransitionTime", place)
            return Resize(kind == "PodResizePending", word(found[kind], "reason", place, ""), since)
    return None


# --- containers --------------------------------------------------------------------------------------------


def _containers(spec: Object, status: Object) -> tuple[Container, ...]:
    states = {
        entry.get("name"): entry
        for key in ("initContainerStatuses", "containerStatuses")
        for entry in objects(status, key, "status")
    }
    found = []
    for key in ("initContainers", "containers"):
        for number, entry in enumerate(objects(spec, key, "spec")):
            place = f"spec.{key}[{number}]"
            sidecar = entry.get("restartPolicy") == "Always"
            role = Role.APP if key == "containers" else Role.SIDECAR if sidecar else Role.INIT
            name = word(entry, "name", place)
            found.append(_container(entry, name, role, states.get(name, {}), place))
    if not found:
        refuse("spec.containers", "is empty")
    return tuple(found)


def _container(entry: Object, name: str, role: Role, state: Object, place: str) -> Container:
    asked = mapping(entry, "resources", place)
    place = f"{place}.resources"
    at = f"status of container {name}"
    runtime, _, ident = word(state, "containerID", at, "").partition("://")
    running = mapping(mapping(state, "state", at), "running", at)
    has_allocated = state.get("allocatedResources") is not None
    return Container(
        name=name,
        role=role,
        requests=resources(asked, "requests", place),
        limits=resources(asked, "limits", place),
        claims=tuple(
            ContainerClaim(
                word(claim, "name", f"{place}.claims"), word(claim, "request", f"{place}.claims", "")
            )
            for claim in objects(asked, "claims", place)
        ),
        id=ident,
        runtime=runtime if ident else "",
        started_wall_s=moment(running, "startedAt", at),
        allocated=resources(state, "allocatedResources", at) if has_allocated else None,
    )


# --- claims ------------------------------------------------------------------------------------------------


def _claims(spec: Object, status: Object) -> tuple[str, ...]:
    made = {
        entry.get("name"): word(entry, "resourceClaimName", "status.resourceClaimStatuses", "")
        for entry in objects(status, "resourceClaimStatuses", "status")
    }
    names = []
    for number, entry in enumerate(objects(spec, "resourceClaims", "spec")):
        place = f"spec.resourceClaims[{number}]"
        name = word(entry, "name", place)
        names.append(word(entry, "resourceClaimName", place, "") or made.get(name) or name)
    extended = mapping(status, "extendedResourceClaimStatus", "status")
    if extended:  # made by the scheduler for a device that was asked for as an extended resource
        names.append(word(extended, "resourceClaimName", "status.extendedResourceClaimStatus"))
    return tuple(names)


def _grants(status: Object, claims: tuple[str, ...]) -> tuple[Grant, ...] | Unsaid:
    if claims and not status:
        return Unsaid("the object has no status, which is where the amounts of claims stand")
    grants = []
    key = "nodeAllocatableResourceClaimStatuses"
    for number, entry in enumerate(objects(status, key, "status")):
        place = f"status.{key}[{number}]"
        name = word(entry, "resourceClaimName", place)
        if not _SHAPES & entry.keys():
            return Unsaid(f"{place}: the amounts of claim {name} are in no shape of Kubernetes 1.36 or 1.37")
        grants.append(_grant(entry, name, place))
    return tuple(grants)


def _grant(entry: Object, name: str, place: str) -> Grant:
    shape = next((key for key in _MAPPINGS if entry.get(key) is not None), "")
    overhead = objects(entry, "overhead", place)
    for one in overhead:
        if all(one.get(key) is None for key in (*_PER_POD, *_PER_CONTAINER)):
            refuse(f"{place}.overhead", f"{short(one.get('name'))} has neither perPod nor perContainer")
    mapped = _amounts(objects(entry, shape, place), ("quantity",), f"{place}.{shape}", needed=True)
    return Grant(
        claim=name,
        containers=words(entry, "containers", place),
        mapping=mapped if shape else resources(entry, "resources", place),
        per_pod=_amounts(overhead, _PER_POD, f"{place}.overhead"),
        per_container=_amounts(overhead, _PER_CONTAINER, f"{place}.overhead"),
    )


def _amounts(
    entries: Iterable[Object], keys: tuple[str, ...], place: str, *, needed: bool = False
) -> Resources:
    """A list of named amounts, each under one of the keys; a name that comes twice is added up."""
    total: dict[str, Quantity] = {}
    for entry in entries:
        name = word(entry, "name", place)
        amount = next((entry[key] for key in keys if entry.get(key) is not None), None)
        if amount is None and not needed:
            continue
        for resource, quantity in quantities({name: amount}, place).items():
            total[resource] = total.get(resource, ZERO) + quantity
    return total
