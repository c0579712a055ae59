"""Parser of a v1.Pod object, from JSON or YAML, to the pod that the audit uses.

Fields that cgroups depend on are checked, and errors name the field; other fields are ignored. Amounts of
claims are read in each form that a release or KEP-5517 has; amounts in another form are unknown, not zero.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

from agent.allocatable.pod import (
    CPU,
    HUGEPAGES,
    MEMORY,
    ClaimGrant,
    Pod,
    PodContainer,
    PodContainerClaim,
    Qos,
    Resize,
    Resources,
    Role,
    UnknownAmount,
)
from agent.allocatable.quantity import ZERO, Quantity, parse_quantity
from agent.errors import ProbeError
from agent.model.objects import Object, mapping, objects, refuse, short


def name_field(parent: Object, key: str, place: str, default: str | None = None) -> str:
    """Return a name without spaces. Without a default the field is required."""
    value = parent.get(key)
    if default is not None and (value is None or value == ""):
        return default
    if not isinstance(value, str) or not value or not value.isprintable() or " " in value:
        refuse(f"{place}.{key}", f"{short(value)} is not a name")
    return value


def name_list(parent: Object, key: str, place: str) -> tuple[str, ...]:
    """Return the list of names under a key; empty: the field is missing or empty."""
    value = parent.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        refuse(f"{place}.{key}", "is not a list of names")
    return tuple(value)


def time_field(parent: Object, key: str, place: str) -> float | None:
    """Return a time [s since 1970]; None: the field is missing."""
    text = parent.get(key)
    if text is None:
        return None
    try:
        when = datetime.fromisoformat(str(text))
    except ValueError:
        refuse(f"{place}.{key}", f"{short(text)} is not a time")
    if when.tzinfo is None:
        refuse(f"{place}.{key}", f"{short(text)} has no time zone")
    return when.timestamp()


def resources(parent: Object, key: str, place: str) -> Resources:
    """Return the quantities under a key of the resources that cgroups control."""
    return quantities(mapping(parent, key, place), f"{place}.{key}")


def quantities(amounts: Object, place: str) -> Resources:
    """Parse the quantities of the resources that cgroups control; numbers, as in YAML, are accepted."""
    parsed = {}
    for name, amount in amounts.items():
        if name not in {CPU, MEMORY} and not name.startswith(HUGEPAGES):
            continue
        if isinstance(amount, bool) or not isinstance(amount, str | int | float):
            refuse(f"{place}.{name}", "is not a quantity")
        try:
            quantity = parse_quantity(str(amount))
        except ValueError as error:
            refuse(f"{place}.{name}", str(error))
        if quantity.nanos < 0:
            refuse(f"{place}.{name}", f"{short(amount)} is negative")
        parsed[name] = quantity
    return parsed


_HASHES: Final = ("kubernetes.io/config.mirror", "kubernetes.io/config.hash")
"""Annotations of a static pod with the hash of its manifest."""
_MAPPINGS: Final = ("mapping", "direct")
"""Field names of a claim's resources in Kubernetes 1.37 and in the KEP's text; 1.36 has a map,
``resources``."""
_PER_POD: Final = ("perPod", "perPodReference")
_PER_CONTAINER: Final = ("perContainer", "perContainerReference")
_SHAPES: Final = frozenset({"resources", "overhead", *_MAPPINGS})


def parse_pod(obj: Object) -> Pod:
    """Parse a v1.Pod object.

    Args:
        obj: A v1.Pod, such as an item of ``kubectl get pods -o json``. ``kind`` is optional.

    Raises:
        ProbeError: The object is not a valid pod; the text names the pod and the field.

    Source:
        ``metadata``, ``spec`` and ``status`` of v1.Pod, 1.34 to 1.37.
    """
    if obj.get("kind") not in {None, "Pod"}:
        raise ProbeError(f"{short(obj.get('kind'))} is not a Pod")
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
        namespace=name_field(metadata, "namespace", "metadata", "default"),
        name=name_field(metadata, "name", "metadata"),
        uid=name_field(metadata, "uid", "metadata"),
        cgroup_uid=_cgroup_uid(metadata),
        reported_qos=_qos(status),
        containers=_containers(spec, status),
        overhead=resources(spec, "overhead", "spec"),
        level_requests=resources(level, "requests", "spec.resources"),
        level_limits=resources(level, "limits", "spec.resources"),
        claims=claims,
        grants=_grants(status, claims),
        phase=name_field(status, "phase", "status", ""),
        resize=_resize(status),
    )


def _cgroup_uid(metadata: Object) -> str:
    """Return the pod UID in the cgroup's name: for a static pod the hash of its manifest."""
    annotations = mapping(metadata, "annotations", "metadata")
    hashes = (name_field(annotations, key, "metadata.annotations", "") for key in _HASHES)
    return next(filter(None, hashes), name_field(metadata, "uid", "metadata"))


def _qos(status: Object) -> Qos | None:
    stated = name_field(status, "qosClass", "status", "")
    if not stated:
        return None
    if stated not in set(Qos):
        refuse("status.qosClass", f"{short(stated)} is none of {', '.join(Qos)}")
    return Qos(stated)


def _resize(status: Object) -> Resize | None:
    """Return the pod's unfinished resize; None: there is none. A pending resize takes precedence: the spec is
    not in effect."""
    found = {
        one.get("type"): one for one in objects(status, "conditions", "status") if one.get("status") == "True"
    }
    for kind in ("PodResizePending", "PodResizeInProgress"):
        if kind in found:
            place = f"status.conditions[{kind}]"
            since = time_field(found[kind], "lastTransitionTime", place)
            return Resize(kind == "PodResizePending", name_field(found[kind], "reason", place, ""), since)
    return None


# --- containers --------------------------------------------------------------------------------------------


def _containers(spec: Object, status: Object) -> tuple[PodContainer, ...]:
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
            name = name_field(entry, "name", place)
            found.append(_container(entry, name, role, states.get(name, {}), place))
    if not found:
        refuse("spec.containers", "is empty")
    return tuple(found)


def _container(entry: Object, name: str, role: Role, state: Object, place: str) -> PodContainer:
    wanted = mapping(entry, "resources", place)
    place = f"{place}.resources"
    at = f"status of container {name}"
    runtime, _, ident = name_field(state, "containerID", at, "").partition("://")
    running = mapping(mapping(state, "state", at), "running", at)
    has_allocated = state.get("allocatedResources") is not None
    return PodContainer(
        name=name,
        role=role,
        requests=resources(wanted, "requests", place),
        limits=resources(wanted, "limits", place),
        claims=tuple(
            PodContainerClaim(
                name_field(claim, "name", f"{place}.claims"),
                name_field(claim, "request", f"{place}.claims", ""),
            )
            for claim in objects(wanted, "claims", place)
        ),
        id=ident,
        runtime=runtime if ident else "",
        started_wall_s=time_field(running, "startedAt", at),
        allocated=resources(state, "allocatedResources", at) if has_allocated else None,
    )


# --- claims ------------------------------------------------------------------------------------------------


def _claims(spec: Object, status: Object) -> tuple[str, ...]:
    made = {
        entry.get("name"): name_field(entry, "resourceClaimName", "status.resourceClaimStatuses", "")
        for entry in objects(status, "resourceClaimStatuses", "status")
    }
    names = []
    for number, entry in enumerate(objects(spec, "resourceClaims", "spec")):
        place = f"spec.resourceClaims[{number}]"
        name = name_field(entry, "name", place)
        names.append(name_field(entry, "resourceClaimName", place, "") or made.get(name) or name)
    extended = mapping(status, "extendedResourceClaimStatus", "status")
    if extended:  # created by the scheduler for a device that the pod requests as an extended resource
        names.append(name_field(extended, "resourceClaimName", "status.extendedResourceClaimStatus"))
    return tuple(names)


def _grants(status: Object, claims: tuple[str, ...]) -> tuple[ClaimGrant, ...] | UnknownAmount:
    if claims and not status:
        return UnknownAmount("the object has no status, which contains the amounts of claims")
    grants = []
    key = "nodeAllocatableResourceClaimStatuses"
    for number, entry in enumerate(objects(status, key, "status")):
        place = f"status.{key}[{number}]"
        name = name_field(entry, "resourceClaimName", place)
        if not _SHAPES & entry.keys():
            return UnknownAmount(
                f"{place}: the amounts of claim {name} are not in a form of Kubernetes 1.36 or 1.37"
            )
        grants.append(_grant(entry, name, place))
    return tuple(grants)


def _grant(entry: Object, name: str, place: str) -> ClaimGrant:
    shape = next((key for key in _MAPPINGS if entry.get(key) is not None), "")
    overhead = objects(entry, "overhead", place)
    for one in overhead:
        if all(one.get(key) is None for key in (*_PER_POD, *_PER_CONTAINER)):
            refuse(f"{place}.overhead", f"{short(one.get('name'))} has neither perPod nor perContainer")
    mapped = _amounts(objects(entry, shape, place), ("quantity",), f"{place}.{shape}", needed=True)
    return ClaimGrant(
        claim=name,
        containers=name_list(entry, "containers", place),
        mapping=mapped if shape else resources(entry, "resources", place),
        per_pod=_amounts(overhead, _PER_POD, f"{place}.overhead"),
        per_container=_amounts(overhead, _PER_CONTAINER, f"{place}.overhead"),
    )


def _amounts(
    entries: Iterable[Object], keys: tuple[str, ...], place: str, *, needed: bool = False
) -> Resources:
    """Sum the amounts in a list of entries by resource; each entry has its amounts under one of ``keys``."""
    total: dict[str, Quantity] = {}
    for entry in entries:
        name = name_field(entry, "name", place)
        amount = next((entry[key] for key in keys if entry.get(key) is not None), None)
        if amount is None and not needed:
            continue
        for resource, quantity in quantities({name: amount}, place).items():
            total[resource] = total.get(resource, ZERO) + quantity
    return total
