"""Parser that converts a ResourceClaim to the claim that a driver prepares, and decoder of the claim's opaque
parameters. The parameters can also be checked before a claim is allocated.

The parser ignores results and parameters of other drivers, reservations and unknown fields. Every field that
the driver relies on is validated; an error names the field. Parameters are decoded strictly: an unknown
version or a misspelled field is an error of the user, never ignored.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from agent.errors import suggestion
from agent.model.claim import Claim, ClaimConfig, ClaimDevice, ClaimRef
from agent.model.json_values import (
    JsonObject,
    format_short,
    get_mapping,
    get_mappings,
    raise_invalid,
    type_in_words,
)
from agent.prepare.errors import BadConfigError, TransientError

API_GROUP: Final = "resource.k8s.io/"
"""API group of claims; its versions v1beta1, v1beta2 and v1 have the same format of allocations."""
PARAMETERS_MAX_BYTES: Final = 10 * 1024
"""Largest opaque parameters that the API server accepts [bytes]."""
DEPTH_MAX: Final = 64
"""Largest number of nested levels in opaque parameters; Python limits recursion, the API server does not."""
NAME_BYTES: Final = 253
"""Longest name of a Kubernetes object [bytes]."""


def parse_claim(obj: Mapping[str, object], driver: str, ref: ClaimRef | None = None) -> Claim:
    """Parse a ResourceClaim into the devices and parameters for one driver.

    Args:
        obj: A ResourceClaim, as ``kubectl get resourceclaim -o json`` shows it.
        driver: Name of the driver, such as ``gpu.example.com``.
        ref: Claim that the kubelet requested, compared with the object; None: any claim.

    Returns:
        The claim with its devices in the order of the allocation. Parameters of the class come before those
        of the claim, which take precedence.

    Raises:
        TransientError: ``claim.unallocated``, ``claim.uid_mismatch``, ``claim.no_result_for_driver``: the
            claim has changed or is about to change. ``claim.malformed``, with the path: the object is not a
            ResourceClaim; reading it again may help.
        BadConfigError: ``config.decode``: the parameters are not an object, or exceed the API server's limit.

    Source:
        ``metadata``, ``status.allocation.devices.results[]`` and ``.config[]`` of resource.k8s.io.
    """
    try:
        return _parse_resource_claim(obj, driver, ref)
    except ValueError as error:
        raise TransientError(str(error), code="claim.malformed") from None


def _parse_resource_claim(obj: JsonObject, driver: str, ref: ClaimRef | None) -> Claim:
    _check_kind(obj)
    found = _parse_ref(obj)
    if ref is not None:
        _check_ref(found, ref)
    allocation = get_mapping(get_mapping(obj, "status", ""), "allocation", "status")
    if not allocation:
        raise TransientError("the claim is not allocated yet by the scheduler", code="claim.unallocated")
    path = "status.allocation.devices"
    devices = get_mapping(allocation, "devices", "status.allocation")
    allocated = [
        _parse_device(result, f"{path}.results[{number}]")
        for number, result in enumerate(get_mappings(devices, "results", path))
        if _is_driver(result.get("driver"), driver)
    ]
    if not allocated:
        summary = f"the claim has no allocated device of {driver}"
        raise TransientError(summary, code="claim.no_result_for_driver")
    configs = []
    for number, config in enumerate(get_mappings(devices, "config", path)):
        opaque = get_mapping(config, "opaque", f"{path}.config[{number}]")
        if _is_driver(opaque.get("driver"), driver):
            configs.append(_parse_config(config, opaque, f"{path}.config[{number}]"))
    configs.sort(key=lambda config: config.source != "FromClass")  # the order within a source stays
    return Claim(*found, devices=tuple(allocated), configs=tuple(configs))


def _check_kind(obj: JsonObject) -> None:
    version, kind = obj.get("apiVersion"), obj.get("kind")
    if not isinstance(version, str) or not version.startswith(API_GROUP) or kind != "ResourceClaim":
        raise ValueError(
            f"{format_short(kind)} of {format_short(version)} is not a ResourceClaim of {API_GROUP[:-1]}"
        )


def _parse_ref(obj: JsonObject) -> ClaimRef:
    metadata = get_mapping(obj, "metadata", "")
    return ClaimRef(*(_name_field(metadata, key, "metadata") for key in ClaimRef._fields))


def _check_ref(found: ClaimRef, wanted: ClaimRef) -> None:
    if found[:2] != wanted[:2]:
        raise_invalid("metadata", f"is of claim {found}, but the kubelet requested {wanted}")
    if found.uid != wanted.uid:
        raise TransientError(
            f"the claim of this name has UID {found.uid}, not {wanted.uid}: it was deleted and created again",
            code="claim.uid_mismatch",
        )


def _parse_device(result: JsonObject, path: str) -> ClaimDevice:
    consumed = get_mapping(result, "consumedCapacity", path)
    tolerated = [toleration.get("effect") for toleration in get_mappings(result, "tolerations", path)]
    return ClaimDevice(
        request=_name_field(result, "request", path),
        driver=_name_field(result, "driver", path),
        pool=_name_field(result, "pool", path),
        device=_name_field(result, "device", path),
        share_id=_name_field(result, "shareID", path) if result.get("shareID") is not None else "",
        admin=_boolean_field(result, "adminAccess", path),
        consumed=tuple(sorted((key, str(amount)) for key, amount in consumed.items())),
        tolerates=any(effect != "None" for effect in tolerated),  # None: all effects
    )


def _parse_config(config: JsonObject, opaque: JsonObject, path: str) -> ClaimConfig:
    requests = config.get("requests")
    if requests is None:
        requests = []
    if not isinstance(requests, list) or not all(_is_name(request) for request in requests):
        raise_invalid(f"{path}.requests", "is not a list of request names")
    source = _name_field(config, "source", path)
    return ClaimConfig(
        source, tuple(requests), _validate_parameters(opaque.get("parameters"), f"{path}.opaque.parameters")
    )


def _validate_parameters(value: object, path: str) -> JsonObject:
    if not isinstance(value, Mapping):
        raise BadConfigError(f"{path}: is {type_in_words(value)}, not an object", code="config.decode")
    if not _fits_depth(value, DEPTH_MAX):
        raise BadConfigError(f"{path}: is nested deeper than {DEPTH_MAX} levels", code="config.decode")
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError):  # not from JSON: a YAML date, a key that is not a string
        raise BadConfigError(f"{path}: has values that JSON cannot represent", code="config.decode") from None
    size = len(text.encode(errors="surrogatepass"))
    if size > PARAMETERS_MAX_BYTES:
        raise BadConfigError(
            f"{path}: parameters of {size} bytes, limit {PARAMETERS_MAX_BYTES}", code="config.decode"
        )
    return value


def _fits_depth(value: object, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [child for parent in level for child in _children(parent)]
    return not level


def _children(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []


def _name_field(parent: JsonObject, key: str, path: str) -> str:
    value = parent.get(key)
    if not _is_name(value):
        raise_invalid(
            f"{path}.{key}",
            f"{format_short(value)} is not a name: 1 to {NAME_BYTES} ASCII characters without spaces",
        )
    return str(value)


def _is_name(value: object) -> bool:
    """Return True if a value can be the name of a Kubernetes object; the API server's rules are stricter."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= NAME_BYTES
        and value.isascii()
        and value.isprintable()
        and " " not in value
    )


def _boolean_field(parent: JsonObject, key: str, path: str) -> bool:
    value = parent.get(key)
    if value is not None and not isinstance(value, bool):
        raise_invalid(f"{path}.{key}", f"{format_short(value)} is neither true nor false")
    return value is True


def _is_driver(value: object, name: str) -> bool:
    return isinstance(value, str) and value == name


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of the types into which a driver decodes the opaque parameters of claims.

    A field without a default is required. For further validation, raise ValueError in ``__post_init__``.
    """


P = TypeVar("P", bound=Parameters)


def decode_parameters(config: ClaimConfig, kinds: Mapping[str, type[P]]) -> P:
    """Decode the opaque parameters of a claim into one of the driver's types.

    Args:
        config: One of the claim's parameter objects.
        kinds: Types by ``<apiVersion>/<kind>``, e.g. ``gpu.example.com/v1/GpuParameters``.

    Raises:
        BadConfigError: Code ``config.decode``; the text has the kind and the wrong field.
    """
    name = _kind_of(config)
    kind = name.rpartition("/")[2]
    if name not in kinds:
        summary = f"{name[:128]!a} is not one of the driver's kinds{suggestion(name[:128], kinds)}"
        raise _decode_error(config, summary, f"Known kinds: {', '.join(sorted(kinds))}")
    fields = {key: value for key, value in config.parameters.items() if key not in {"apiVersion", "kind"}}
    try:
        return msgspec.convert(fields, kinds[name])
    except msgspec.ValidationError as error:
        text = "".join(char if char.isprintable() else "?" for char in str(error))
        raise _decode_error(config, f"{kind}: {text[:1].lower()}{text[1:]}") from None


class ParameterCheck(NamedTuple):
    """Result of the check of one set of opaque parameters in an object that is not allocated yet."""

    path: str
    """Path of the parameters, ``spec.devices.config[0].opaque.parameters``."""
    driver: str
    """Name of the driver that the parameters are for."""
    error: BadConfigError | None
    """Error with which a prepare would fail; None: the parameters can be decoded."""


def check_parameters(
    obj: Mapping[str, object], kinds: Mapping[str, type[P]] | None = None, driver: str = ""
) -> tuple[ParameterCheck, ...]:
    """Check the opaque parameters of an object as a prepare does, before a device is allocated.

    Values that depend on the allocated device, such as a number of pages, remain unchecked.

    Args:
        obj: A ResourceClaim, ResourceClaimTemplate or DeviceClass.
        kinds: Types of the driver's parameters, as for :func:`decode_parameters`; None: check only the size
            and the presence of ``apiVersion`` and ``kind``.
        driver: Check only parameters for this driver; empty: all parameters.

    Returns:
        One result for each set of parameters, in the order of the object.

    Raises:
        ValueError: The object is of another kind, or not valid; with the path.
    """
    version, kind = obj.get("apiVersion"), obj.get("kind")
    path = PARAMETER_KINDS.get(kind) if isinstance(kind, str) else None
    if path is None or not isinstance(version, str) or not version.startswith(API_GROUP):
        known = ", ".join(PARAMETER_KINDS)
        raise ValueError(f"{format_short(kind)} of {format_short(version)} is none of {known} of {API_GROUP}")
    owner: Mapping[str, object] = obj
    for number, key in enumerate(path):
        owner = get_mapping(owner, key, ".".join(path[:number]))
    checks = []
    for number, config in enumerate(get_mappings(owner, "config", ".".join(path))):
        where = f"{'.'.join(path)}.config[{number}].opaque"
        opaque = get_mapping(config, "opaque", where.removesuffix(".opaque"))
        name = str(opaque.get("driver", ""))
        if opaque and driver in {"", name}:
            checks.append(_check_opaque(config, opaque.get("parameters"), f"{where}.parameters", name, kinds))
    return tuple(checks)


PARAMETER_KINDS: Final[Mapping[str, Sequence[str]]] = {
    "ResourceClaim": ("spec", "devices"),
    "ResourceClaimTemplate": ("spec", "spec", "devices"),
    "DeviceClass": ("spec",),
}
"""Kinds of objects with opaque parameters, each with the path of the field that has the list ``config``."""


def _check_opaque(
    config: JsonObject, parameters: object, path: str, driver: str, kinds: Mapping[str, type[P]] | None
) -> ParameterCheck:
    requests = config.get("requests")
    names = tuple(map(str, requests)) if isinstance(requests, list) else ()
    try:
        found = ClaimConfig("FromClaim", names, _validate_parameters(parameters, path))
        if kinds is None:
            _kind_of(found)
        else:
            decode_parameters(found, kinds)
    except BadConfigError as error:
        return ParameterCheck(path, driver, error)
    return ParameterCheck(path, driver, None)


def configs_for(claim: Claim, request: str) -> tuple[ClaimConfig, ...]:
    """Return the opaque parameters that apply to one request of a claim; later ones take precedence.

    Args:
        request: Request as in :class:`ClaimDevice`; for ``<request>/<subrequest>``, parameters for either
            name apply.
    """
    names = {request, request.partition("/")[0]}
    return tuple(config for config in claim.configs if not config.requests or names & set(config.requests))


def _kind_of(config: ClaimConfig) -> str:
    """Return ``<apiVersion>/<kind>`` of opaque parameters.

    Raises BadConfigError if ``apiVersion`` or ``kind`` is missing.
    """
    version, kind = (config.parameters.get(key) for key in ("apiVersion", "kind"))
    for key, value in (("apiVersion", version), ("kind", kind)):
        if not isinstance(value, str) or not value:
            raise _decode_error(config, f"the parameters have no {key}")
    return f"{version}/{kind}"


def _decode_error(config: ClaimConfig, summary: str, detail: str = "") -> BadConfigError:
    return BadConfigError(summary, code="config.decode", detail=detail, requests=config.requests)
