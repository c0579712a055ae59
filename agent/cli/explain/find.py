"""Lookup of a device, claim or pod by a name that an operator gives. Pure.

Several objects may have one name. The error then lists all of them with full names, and none is preferred.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from agent.devices.consumers.affected import claims_named, pods_named
from agent.errors import UsageError, suggestion
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import PodRef
from agent.model.consumers import ConsumerMap

T = TypeVar("T")


class UnknownName(UsageError):
    """No source knows an object of that name."""


MAX_NAMED: Final = 8
"""Limit of objects listed in the error for an ambiguous name."""


def title(device: DeviceRef) -> str:
    """Return ``driver/pool/name``; for the host's own devices, which have no driver, ``pool/name``."""
    return "/".join(filter(None, device))


def find_devices(
    name: str,
    devices: Iterable[DeviceRef],
    cdi: Iterable[tuple[str, DeviceRef]],
    mirrors: Mapping[DeviceRef, DeviceRef],
) -> tuple[DeviceRef, ...]:
    """Return the device with this name; several if several drivers have the same host device.

    Args:
        name: ``driver/pool/name``, ``pool/name``, a name, or a CDI id.
        devices: All known devices, without unused mirrors (a driver's name for a host device).
        cdi: CDI ids with their devices.
        mirrors: Devices of drivers that are devices of the host, each with the host's. The name of such a
            device stands for all mirrors in use, if there are any.

    Raises:
        UnknownName: No device has the name.
        UsageError: Several devices have the name.
    """
    known = sorted(set(devices))
    if exact := [ref for ref in {*known, *mirrors} if ref.driver and title(ref) == name]:
        return (exact[0],)
    found = [ref for ref in known if title(ref) == name]
    found = found or [ref for ref in known if f"{ref.pool}/{ref.device}" == name]
    found = found or [ref for ref in known if ref.device == name]
    ids: dict[str, set[DeviceRef]] = defaultdict(set)
    for id_, device in cdi:
        ids[id_].add(device)
    found = found or sorted(ids.get(name, ()))
    if not found:
        names = [*map(title, known), *(ref.device for ref in known), *ids]
        raise UnknownName(f"no device {name!r} is known{suggestion(name, names)}")
    only = _require_one(name, "devices", {mirrors.get(ref, ref): title(ref) for ref in found})
    return tuple(ref for ref in known if mirrors.get(ref) == only) or (only,)


def find_pods(name: str, known: ConsumerMap) -> tuple[PodRef, ...]:
    """Return the pods with this name: several where sources disagree on the UID.

    Args:
        name: ``namespace/name``, a UID, or a name that exists in one namespace only.
        known: All known pods and claims.

    Raises:
        UnknownName: No pod has the name.
        UsageError: Pods of several namespaces have the name.
    """
    uids = {ref.uid: ref for ref in known.pods if ref.uid}
    uids |= {
        obj.mirror_uid: ref for ref, view in known.pods.items() for obj, _ in view.objects if obj.mirror_uid
    }
    if name in uids:
        return (uids[name],)
    full_name = _find_name(name, "pod", [(ref.namespace, ref.name) for ref in known.pods if ref.name], uids)
    return tuple(view.ref for view in pods_named(known, *full_name))


def find_claims(name: str, known: ConsumerMap) -> tuple[ClaimRef, ...]:
    """Return the claims with this name, see :func:`find_pods`: several where sources disagree on the UID."""
    uids = {ref.uid: ref for ref in known.claims if ref.uid}
    if name in uids:
        return (uids[name],)
    full_name = _find_name(name, "claim", [(ref.namespace, ref.name) for ref in known.claims], uids)
    return tuple(view.ref for view in claims_named(known, *full_name))


def _find_name(
    name: str, kind: str, known: Iterable[tuple[str, str]], uids: Iterable[str]
) -> tuple[str, str]:
    texts = {full_name: "/".join(full_name) for full_name in sorted(set(known))}
    found = {full_name: text for full_name, text in texts.items() if name in (text, full_name[1])}
    if not found:
        near = suggestion(name, [*texts.values(), *(short for _, short in texts), *uids])
        raise UnknownName(f"no {kind} {name!r} is known{near}")
    return _require_one(name, f"{kind}s", found)


def _require_one(name: str, kind: str, found: Mapping[T, str]) -> T:
    if len(found) > 1:
        texts = list(found.values())
        more = f" and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else ""
        listed = ", ".join(texts[:MAX_NAMED])
        raise UsageError(f"{name!r} matches {len(texts)} {kind}: {listed}{more}; use a full name")
    return next(iter(found))
