"""ResourceClaims as the API server writes them, to the claim that a driver prepares.

What concerns others is passed over: results and parameters of other drivers, who reserved the claim and how,
fields that are younger than this file. What the driver relies on is checked, and named if it is wrong. What
the parameters say is for agent.prepare.parameters to read.
"""

import json
from collections.abc import Mapping
from typing import Final

from agent.model.claim import Claim, ClaimConfig, ClaimDevice, ClaimRef
from agent.model.objects import Object, kind_of, mapping, objects, refuse, short
from agent.prepare.errors import BadConfig, TransientError

GROUP: Final = "resource.k8s.io/"
"""Allocations are alike in v1beta1, v1beta2 and v1 of it."""
PARAMETERS_BYTES: Final = 10 * 1024
"""What the API server takes of opaque parameters."""
DEPTH_MAX: Final = 64
"""Braces within braces. The API server has no limit, but who walks through them has."""
NAME_BYTES: Final = 253
"""The longest of Kubernetes' names."""


def parse_claim(obj: Mapping[str, object], driver: str, ref: ClaimRef | None = None) -> Claim:
    """The claim, as far as it is one driver's.

    Args:
        obj: A ResourceClaim, as ``kubectl get resourceclaim -o json`` shows it.
        driver: Whose results and parameters are wanted.
        ref: What the kubelet asked for; None: whatever claim it is.

    Returns:
        With the devices in the order of the allocation, and the parameters of the class before those of the
        claim, which outrank them.

    Raises:
        TransientError: ``claim.unallocated``, ``claim.uid_mismatch``, ``claim.no_result_for_driver``: the
            claim has changed, or is about to. ``claim.malformed``, with the place: this is no ResourceClaim,
            and reading it again may give one.
        BadConfig: ``config.decode``: parameters that are no object, or larger than the API server takes.

    Source:
        ``metadata``, ``status.allocation.devices.results[]`` and ``.config[]`` of resource.k8s.io.
    """
    try:
        return _parse(obj, driver, ref)
    except ValueError as error:
        raise TransientError(str(error), code="claim.malformed") from None


def _parse(obj: Object, driver: str, ref: ClaimRef | None) -> Claim:
    """The same; raises ValueError, with the place, where it is no ResourceClaim."""
    _check_kind(obj)
    found = _ref(obj)
    if ref is not None:
        _check_ref(found, ref)
    allocation = mapping(mapping(obj, "status", ""), "allocation", "status")
    if not allocation:
        raise TransientError("the claim is not allocated", code="claim.unallocated")
    place = "status.allocation.devices"
    devices = mapping(allocation, "devices", "status.allocation")
    mine = [
        _device(result, f"{place}.results[{number}]")
        for number, result in enumerate(objects(devices, "results", place))
        if _is(result.get("driver"), driver)
    ]
    if not mine:
        raise TransientError(
            f"no device of {driver} is allocated to the claim", code="claim.no_result_for_driver"
        )
    configs = [
        _config(config, opaque, f"{place}.config[{number}]")
        for number, config in enumerate(objects(devices, "config", place))
        if _is((opaque := mapping(config, "opaque", f"{place}.config[{number}]")).get("driver"), driver)
    ]
    configs.sort(key=lambda config: config.source != "FromClass")  # stable: the order of each stays
    return Claim(*found, devices=tuple(mine), configs=tuple(configs))


# --- which claim -------------------------------------------------------------------------------------------


def _check_kind(obj: Object) -> None:
    version, kind = obj.get("apiVersion"), obj.get("kind")
    if not isinstance(version, str) or not version.startswith(GROUP) or kind != "ResourceClaim":
        raise ValueError(f"{short(kind)} of {short(version)} is no ResourceClaim of {GROUP[:-1]}")


def _ref(obj: Object) -> ClaimRef:
    metadata = mapping(obj, "metadata", "")
    return ClaimRef(*(_name(metadata, key, "metadata") for key in ClaimRef._fields))


def _check_ref(found: ClaimRef, wanted: ClaimRef) -> None:
    if found[:2] != wanted[:2]:
        refuse("metadata", f"is of {found}, not of {wanted}")
    if found.uid != wanted.uid:
        raise TransientError(
            f"the claim of this name has UID {found.uid}, not {wanted.uid}: it was deleted and made anew",
            code="claim.uid_mismatch",
        )


# --- what it was given, and what was asked for -------------------------------------------------------------


def _device(result: Object, place: str) -> ClaimDevice:
    consumed = mapping(result, "consumedCapacity", place)
    return ClaimDevice(
        request=_name(result, "request", place),
        driver=_name(result, "driver", place),
        pool=_name(result, "pool", place),
        device=_name(result, "device", place),
        share_id=_name(result, "shareID", place) if result.get("shareID") is not None else "",
        admin=_switch(result, "adminAccess", place),
        consumed=tuple(sorted((key, str(amount)) for key, amount in consumed.items())),
    )


def _config(config: Object, opaque: Object, place: str) -> ClaimConfig:
    requests = config.get("requests")
    if requests is None:
        requests = []
    if not isinstance(requests, list) or not all(_is_name(request) for request in requests):
        refuse(f"{place}.requests", "is no list of names")
    source = _name(config, "source", place)
    return ClaimConfig(
        source, tuple(requests), _parameters(opaque.get("parameters"), f"{place}.opaque.parameters")
    )


def _parameters(value: object, place: str) -> Object:
    if not isinstance(value, Mapping):
        raise BadConfig(f"{place}: is {kind_of(value)}, no object", code="config.decode")
    if not _is_flatter(value, DEPTH_MAX):
        raise BadConfig(f"{place}: is nested more than {DEPTH_MAX} deep", code="config.decode")
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError):  # not from JSON: a date of YAML, a key that is no text
        raise BadConfig(f"{place}: has values that JSON has not", code="config.decode") from None
    size = len(text.encode(errors="surrogatepass"))
    if size > PARAMETERS_BYTES:
        raise BadConfig(f"{place}: {size} bytes, limit {PARAMETERS_BYTES}", code="config.decode")
    return value


def _is_flatter(value: object, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [child for parent in level for child in _children(parent)]
    return not level


def _children(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []


# --- single values -----------------------------------------------------------------------------------------


def _name(parent: Object, key: str, place: str) -> str:
    value = parent.get(key)
    if not _is_name(value):
        refuse(f"{place}.{key}", f"{short(value)} is no name")
    return str(value)


def _is_name(value: object) -> bool:
    """One word. Looser than the API server, which may one day allow more than it does."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= NAME_BYTES
        and value.isascii()
        and value.isprintable()
        and " " not in value
    )


def _switch(parent: Object, key: str, place: str) -> bool:
    value = parent.get(key)
    if value is not None and not isinstance(value, bool):
        refuse(f"{place}.{key}", f"{short(value)} is neither true nor false")
    return value is True


def _is(value: object, driver: str) -> bool:
    return isinstance(value, str) and value == driver
