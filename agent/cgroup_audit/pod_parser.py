"""Parser that converts a v1.Pod object, decoded from JSON or YAML, to the Pod class of the cgroup audit.

Fields that cgroups depend on are validated, and errors name the field; other fields are ignored. Amounts of
claims are parsed in the formats of Kubernetes 1.36, 1.37 and KEP-5517; in another format they are unknown.
"""

from collections.abc import Container, Iterable, Mapping
from datetime import datetime
from typing import Final

from agent.cgroup_audit.pod_model import (
    CPU,
    HUGEPAGES,
    MEMORY,
    ZERO,
    ClaimResources,
    ContainerClaimRef,
    ContainerRole,
    Pod,
    PodContainer,
    QosClass,
    Quantity,
    ResourceAmounts,
    UnfinishedResize,
    UnknownAmount,
    parse_quantity,
)
from agent.errors import ProbeError
from agent.model.json_values import (
    JsonObject,
    format_short,
    get_mapping,
    get_mappings,
    get_text,
    raise_invalid,
)


def name_field(parent: JsonObject, key: str, place: str, default: str | None = None) -> str:
    """Return the name in a field, or ``default`` if the field is missing.

    If ``default`` is None, the field is required.
    """
    value = parent.get(key)
    if default is not None and (value is None or value == ""):
        return default
    if not isinstance(value, str) or not value or not value.isprintable() or " " in value:
        raise_invalid(f"{place}.{key}", f"{format_short(value)} is not a name")
    return value


def name_list(parent: JsonObject, key: str, place: str) -> tuple[str, ...]:
    """Return the names in a list field of an API object; empty: the field is missing."""
    value = parent.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise_invalid(f"{place}.{key}", "is not a list of names")
    return tuple(value)


def time_field(parent: JsonObject, key: str, place: str) -> float | None:
    """Return the time in a field [s since 1970]; None: the field is missing."""
    text = parent.get(key)
    if text is None:
        return None
    try:
        when = datetime.fromisoformat(str(text))
    except ValueError:
        raise_invalid(f"{place}.{key}", f"{format_short(text)} is not a time, such as 2026-11-22T10:00:00Z")
    if when.tzinfo is None:
        raise_invalid(f"{place}.{key}", f"{format_short(text)} has no time zone; append Z for UTC")
    return when.timestamp()


def resource_amounts(parent: JsonObject, key: str, place: str) -> ResourceAmounts:
    """Return the CPU, memory and hugepages in a field of an API object; other resources are ignored."""
    return parse_amounts(get_mapping(parent, key, place), f"{place}.{key}")


def parse_amounts(amounts: JsonObject, place: str) -> ResourceAmounts:
    """Parse amounts of CPU, memory and hugepages; other resources are ignored."""
    parsed = {}
    for name, amount in amounts.items():
        if name not in {CPU, MEMORY} and not name.startswith(HUGEPAGES):
            continue
        if isinstance(amount, bool) or not isinstance(amount, str | int | float):
            raise_invalid(f"{place}.{name}", f"{format_short(amount)} is not a quantity, such as 250m or 2Gi")
        try:
            quantity = parse_quantity(str(amount))
        except ValueError as error:
            raise_invalid(f"{place}.{name}", str(error))
        if quantity.nanos < 0:
            raise_invalid(f"{place}.{name}", f"{format_short(amount)} is negative")
        parsed[name] = quantity
    return parsed


_MIRROR: Final = "kubernetes.io/config.mirror"
"""Annotation of a mirror pod with the UID of its static pod, which is the UID in the cgroup's name."""
_STATIC_SOURCE: Final = "kubernetes.io/config.source"
"""Annotation with the origin of a pod: ``api``; any other value for a static pod."""
SHARED_CLAIMS: Final = "drahealth/shared-claims"
"""Annotation with the names of claims that pods share on purpose, separated by commas."""
_SYSTEM_PRIORITY: Final = 2_000_000_000
"""Lowest priority of critical pods (system-cluster-critical)."""
_MAPPINGS: Final = ("mapping", "direct")
"""Fields of a pod's status with a claim's amounts in Kubernetes 1.37 and in KEP-5517.

Kubernetes 1.36 has a map, ``resources``.
"""
_PER_POD: Final = ("perPod", "perPodReference")
_PER_CONTAINER: Final = ("perContainer", "perContainerReference")
_NOT_IN_PODS_API: Final = (
    "the kubelet's pods API does not list the amounts of claims; the API server does: "
    "drahealth audit --pods FILE"
)
_AMOUNT_FIELDS: Final = frozenset({"resources", "overhead", *_MAPPINGS})


def parse_pod(obj: JsonObject, *, from_kubelet: bool = False, claim_users: Container[str] = ()) -> Pod:
    """Parse a v1.Pod object.

    Args:
        obj: A v1.Pod, such as an item of ``kubectl get pods -o json``. ``kind`` is optional.
        from_kubelet: True: the kubelet's own copy, whose status lacks what the scheduler and controllers
            write: the amounts of claims are unknown. False: the API server's object.
        claim_users: UIDs of pods with prepared claims, as in the names of the pods' cgroups. The kubelet's
            object of such a pod does not name claims for extended resources.

    Raises:
        ProbeError: The object is not a valid pod; the text names the pod and the field.

    Source:
        ``metadata``, ``spec`` and ``status`` of v1.Pod, 1.34 to 1.38.
    """
    if obj.get("kind") not in (None, "Pod"):
        raise ProbeError(f"object of kind {format_short(obj.get('kind'))} is not a Pod")
    try:
        return _parse_pod(obj, claim_users, from_kubelet=from_kubelet)
    except ValueError as error:
        metadata = obj.get("metadata")
        name = metadata.get("name") if isinstance(metadata, Mapping) else None
        raise ProbeError(f"pod {format_short(name) if name else 'without a name'}: {error}") from None


def _parse_pod(obj: JsonObject, claim_users: Container[str], *, from_kubelet: bool) -> Pod:
    metadata, spec, status = (get_mapping(obj, key, "") for key in ("metadata", "spec", "status"))
    level = get_mapping(spec, "resources", "spec")
    claims = _claim_names(spec, status)
    is_critical = _is_critical(metadata, spec)
    return Pod(
        namespace=name_field(metadata, "namespace", "metadata", "default"),
        name=name_field(metadata, "name", "metadata"),
        uid=name_field(metadata, "uid", "metadata"),
        cgroup_uid=_cgroup_uid(metadata),
        reported_qos=_parse_qos_class(status),
        containers=_parse_containers(spec, status),
        overhead=resource_amounts(spec, "overhead", "spec"),
        pod_level_requests=resource_amounts(level, "requests", "spec.resources"),
        pod_level_limits=resource_amounts(level, "limits", "spec.resources"),
        claims=claims,
        claim_resources=_parse_claim_resources(
            status, bool(claims) or _cgroup_uid(metadata) in claim_users, from_kubelet=from_kubelet
        ),
        phase=name_field(status, "phase", "status", ""),
        resize=_parse_resize(metadata, status),
        is_critical=is_critical,
        is_node_critical=is_critical and spec.get("priorityClassName") == "system-node-critical",
        is_changed=_integer_field(metadata, "generation", "metadata") > 1,
        shared_claims=_shared_claims(metadata),
    )


def _is_critical(metadata: JsonObject, spec: JsonObject) -> bool:
    annotations = get_mapping(metadata, "annotations", "metadata")
    is_static = annotations.get(_STATIC_SOURCE, "api") != "api" or _MIRROR in annotations
    return is_static or _integer_field(spec, "priority", "spec") >= _SYSTEM_PRIORITY


def _integer_field(parent: JsonObject, key: str, place: str) -> int:
    """Return the whole number in a field of an API object; 0: the field is missing."""
    value = parent.get(key)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int):
        raise_invalid(f"{place}.{key}", f"{format_short(value)} is not a whole number")
    return value


def _shared_claims(metadata: JsonObject) -> frozenset[str]:
    text = get_text(get_mapping(metadata, "annotations", "metadata"), SHARED_CLAIMS, "metadata.annotations")
    return frozenset(name for part in text.split(",") if (name := part.strip()))


def _cgroup_uid(metadata: JsonObject) -> str:
    annotations = get_mapping(metadata, "annotations", "metadata")
    static_uid = name_field(annotations, _MIRROR, "metadata.annotations", "")
    return static_uid or name_field(metadata, "uid", "metadata")


def _parse_qos_class(status: JsonObject) -> QosClass | None:
    stated = name_field(status, "qosClass", "status", "")
    if not stated:
        return None
    if stated not in set(QosClass):
        raise_invalid("status.qosClass", f"{format_short(stated)} is none of {', '.join(QosClass)}")
    return QosClass(stated)


def _parse_resize(metadata: JsonObject, status: JsonObject) -> UnfinishedResize | None:
    """Return the unfinished resize in a pod's status; None: no resize is unfinished.

    A pending resize takes precedence. A spec that is newer than the status may contain a resize that the
    status does not show yet, and counts as one.
    """
    observed = _integer_field(status, "observedGeneration", "status")
    is_outdated = 0 < observed < _integer_field(metadata, "generation", "metadata")
    found = {
        get_text(mapping, "type", "status.conditions"): mapping
        for mapping in get_mappings(status, "conditions", "status")
        if mapping.get("status") == "True"
    }
    for kind in ("PodResizePending", "PodResizeInProgress"):
        if kind in found:
            place = f"status.conditions[{kind}]"
            since = time_field(found[kind], "lastTransitionTime", place)
            return UnfinishedResize(
                kind == "PodResizePending", name_field(found[kind], "reason", place, ""), since
            )
        if is_outdated:
            return UnfinishedResize(True, "the status is older than the spec", None)
    return None


def _parse_containers(spec: JsonObject, status: JsonObject) -> tuple[PodContainer, ...]:
    states = {
        get_text(entry, "name", f"status.{key}"): entry
        for key in ("initContainerStatuses", "containerStatuses")
        for entry in get_mappings(status, key, "status")
    }
    found = []
    for key in ("initContainers", "containers"):
        for number, entry in enumerate(get_mappings(spec, key, "spec")):
            place = f"spec.{key}[{number}]"
            sidecar = entry.get("restartPolicy") == "Always"
            role = (
                ContainerRole.APP
                if key == "containers"
                else ContainerRole.SIDECAR
                if sidecar
                else ContainerRole.INIT
            )
            name = name_field(entry, "name", place)
            found.append(_parse_container(entry, name, role, states.get(name, {}), place))
    if not get_mappings(spec, "containers", "spec"):
        raise_invalid("spec.containers", "is empty; a pod has at least one container")
    return tuple(found)


def _parse_container(
    entry: JsonObject, name: str, role: ContainerRole, state: JsonObject, place: str
) -> PodContainer:
    wanted = get_mapping(entry, "resources", place)
    place = f"{place}.resources"
    at = f"status of container {name}"
    runtime, _, ident = name_field(state, "containerID", at, "").partition("://")
    running = get_mapping(get_mapping(state, "state", at), "running", at)
    has_allocated = state.get("allocatedResources") is not None
    return PodContainer(
        name=name,
        role=role,
        requests=resource_amounts(wanted, "requests", place),
        limits=resource_amounts(wanted, "limits", place),
        claims=tuple(
            ContainerClaimRef(
                name_field(claim, "name", f"{place}.claims"),
                name_field(claim, "request", f"{place}.claims", ""),
            )
            for claim in get_mappings(wanted, "claims", place)
        ),
        id=ident,
        runtime=runtime if ident else "",
        started_wall_s=time_field(running, "startedAt", at),
        granted_requests=resource_amounts(state, "allocatedResources", at) if has_allocated else None,
    )


def _claim_names(spec: JsonObject, status: JsonObject) -> tuple[str, ...]:
    place = "status.resourceClaimStatuses"
    made = {
        get_text(entry, "name", place): name_field(entry, "resourceClaimName", place, "")
        for entry in get_mappings(status, "resourceClaimStatuses", "status")
    }
    names = []
    for number, entry in enumerate(get_mappings(spec, "resourceClaims", "spec")):
        place = f"spec.resourceClaims[{number}]"
        name = name_field(entry, "name", place)
        names.append(name_field(entry, "resourceClaimName", place, "") or made.get(name) or name)
    extended = get_mapping(status, "extendedResourceClaimStatus", "status")
    if extended:  # created by the scheduler for a device that the pod requests as an extended resource
        names.append(name_field(extended, "resourceClaimName", "status.extendedResourceClaimStatus"))
    return tuple(names)


def _parse_claim_resources(
    status: JsonObject, uses_claims: bool, *, from_kubelet: bool
) -> tuple[ClaimResources, ...] | UnknownAmount:
    key = "nodeAllocatableResourceClaimStatuses"
    if uses_claims and not status:
        return UnknownAmount("the object has no status, which contains the amounts of claims")
    if uses_claims and from_kubelet and status.get(key) is None:
        return UnknownAmount(_NOT_IN_PODS_API)
    grants = []
    for number, entry in enumerate(get_mappings(status, key, "status")):
        place = f"status.{key}[{number}]"
        name = name_field(entry, "resourceClaimName", place)
        if not _AMOUNT_FIELDS & entry.keys():
            return UnknownAmount(
                f"{place}: the amounts of claim {name} are not in a form of Kubernetes 1.36 or 1.37"
            )
        grants.append(_parse_one_claim(entry, name, place))
    return tuple(grants)


def _parse_one_claim(entry: JsonObject, name: str, place: str) -> ClaimResources:
    shape = next((key for key in _MAPPINGS if entry.get(key) is not None), "")
    overhead = get_mappings(entry, "overhead", place)
    for amount in overhead:
        if all(amount.get(key) is None for key in (*_PER_POD, *_PER_CONTAINER)):
            raise_invalid(
                f"{place}.overhead", f"{format_short(amount.get('name'))} has neither perPod nor perContainer"
            )
    mapped = _sum_amounts(get_mappings(entry, shape, place), ("quantity",), f"{place}.{shape}", needed=True)
    return ClaimResources(
        claim=name,
        containers=name_list(entry, "containers", place),
        shared=mapped if shape else resource_amounts(entry, "resources", place),
        per_pod=_sum_amounts(overhead, _PER_POD, f"{place}.overhead"),
        per_container=_sum_amounts(overhead, _PER_CONTAINER, f"{place}.overhead"),
    )


def _sum_amounts(
    entries: Iterable[JsonObject], keys: tuple[str, ...], place: str, *, needed: bool = False
) -> ResourceAmounts:
    """Sum the amounts of a list of API objects by resource.

    Each object has its amount in one of the fields ``keys``.

    Args:
        needed: True: an entry without an amount is an error. False: it is ignored.
    """
    total: dict[str, Quantity] = {}
    for entry in entries:
        name = name_field(entry, "name", place)
        amount = next((entry[key] for key in keys if entry.get(key) is not None), None)
        if amount is None and not needed:
            continue
        for resource, quantity in parse_amounts({name: amount}, place).items():
            total[resource] = total.get(resource, ZERO) + quantity
    return total
