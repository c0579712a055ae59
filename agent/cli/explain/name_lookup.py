"""Lookup of a device, claim or pod by the name that an operator gives. Pure.

If several objects have the name, an error lists their full names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from agent.devices.consumers.consumer_queries import claims_by_name, pods_by_name
from agent.errors import UsageError, suggestion
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import PodRef
from agent.model.consumers import ConsumerMap

T = TypeVar("T")


class UnknownName(UsageError):
    """No source knows an object of that name."""


MAX_NAMED: Final = 8
"""Largest number of objects that the error for an ambiguous name lists."""


def full_device_name(device: DeviceRef) -> str:
    """Return ``driver/pool/name`` of a device; ``pool/name`` for a host device, which has no driver."""
    return "/".join(filter(None, device))


def find_devices(
    name: str,
    devices: Iterable[DeviceRef],
    cdi: Iterable[tuple[str, DeviceRef]],
    host_aliases: Mapping[DeviceRef, DeviceRef],
) -> tuple[DeviceRef, ...]:
    """Return the device with this name; for a host device that drivers also publish, one entry for each name.

    Args:
        name: ``driver/pool/name``, ``pool/name``, a name, or a CDI id.
        devices: All known devices, without unused host aliases.
        cdi: CDI ids with their devices.
        host_aliases: Drivers' devices that are host devices under another name, mapped to the host device.

    Raises:
        UnknownName: No device has the name.
        UsageError: Several devices have the name.
    """
    known = sorted(set(devices))
    if exact := [ref for ref in {*known, *host_aliases} if ref.driver and full_device_name(ref) == name]:
        return (exact[0],)
    found = [ref for ref in known if full_device_name(ref) == name]
    found = found or [ref for ref in known if f"{ref.pool}/{ref.device}" == name]
    found = found or [ref for ref in known if ref.device == name]
    ids: dict[str, set[DeviceRef]] = defaultdict(set)
    for id_, device in cdi:
        ids[id_].add(device)
    found = found or sorted(ids.get(name, ()))
    if not found:
        names = [*map(full_device_name, known), *(ref.device for ref in known), *ids]
        raise UnknownName(f"no device {name!r} is known{suggestion(name, names)}")
    only = _require_one(name, "devices", {host_aliases.get(ref, ref): full_device_name(ref) for ref in found})
    return tuple(ref for ref in known if host_aliases.get(ref) == only) or (only,)


def find_pods(name: str, known: ConsumerMap) -> tuple[PodRef, ...]:
    """Return the pod with this name; several if sources disagree on its UID.

    Args:
        name: ``namespace/name``, a UID, or a name that exists in only one namespace.
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
    return tuple(view.ref for view in pods_by_name(known, *full_name))


def find_claims(name: str, known: ConsumerMap) -> tuple[ClaimRef, ...]:
    """Return the claim with this name, UID or ``namespace/name``; several if sources disagree on its UID."""
    uids = {ref.uid: ref for ref in known.claims if ref.uid}
    if name in uids:
        return (uids[name],)
    full_name = _find_name(name, "claim", [(ref.namespace, ref.name) for ref in known.claims], uids)
    return tuple(view.ref for view in claims_by_name(known, *full_name))


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
