"""What somebody means who names a device, a claim or a pod. Pure.

Several things may have one name. It is said which, and none is taken instead of another; where one of them
was meant, it can be said in full.
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


class NotKnown(UsageError):
    """Nothing has that name, as far as anybody said."""


NAMED_MAX: Final = 8
"""Things that are named where several could be meant."""


def title(device: DeviceRef) -> str:
    """``driver/pool/name``; of the host's own devices, which have no driver, ``pool/name``."""
    return "/".join(filter(None, device))


def find_devices(
    word: str,
    devices: Iterable[DeviceRef],
    cdi: Iterable[tuple[str, DeviceRef]],
    mirrors: Mapping[DeviceRef, DeviceRef],
) -> tuple[DeviceRef, ...]:
    """The device that is meant: one, unless several drivers have the same device of the host's.

    Args:
        word: ``driver/pool/name``, ``pool/name``, a name, or a CDI id.
        devices: All that anybody knows, but for mirrors that nobody has used.
        cdi: CDI ids, each with the device that it stands for.
        mirrors: Devices that are the host's own under a driver's name, each with the host's. Who means one
            of these means those in use, if any are.

    Raises:
        NotKnown: There is none.
        UsageError: There are several; with their names.
    """
    known = sorted(set(devices))
    if exact := [one for one in {*known, *mirrors} if one.driver and title(one) == word]:
        return (exact[0],)
    meant = [one for one in known if title(one) == word]
    meant = meant or [one for one in known if f"{one.pool}/{one.device}" == word]
    meant = meant or [one for one in known if one.device == word]
    ids: dict[str, set[DeviceRef]] = defaultdict(set)
    for id_, device in cdi:
        ids[id_].add(device)
    meant = meant or sorted(ids.get(word, ()))
    if not meant:
        words = [*map(title, known), *(one.device for one in known), *ids]
        raise NotKnown(f"no device {word!r} is known{suggestion(word, words)}")
    only = _only(word, "devices", {mirrors.get(one, one): title(one) for one in meant})
    return tuple(one for one in known if mirrors.get(one) == only) or (only,)


def find_pods(word: str, known: ConsumerMap) -> tuple[PodRef, ...]:
    """The pods that are meant: more than one where it is not clear which has the name.

    Args:
        word: ``namespace/name``, a UID, or a name that is in one namespace alone.

    Raises:
        NotKnown: There is none.
        UsageError: There is one of this name in several namespaces.
    """
    uids = {ref.uid: ref for ref in known.pods if ref.uid}
    uids |= {
        one.mirror_uid: ref for ref, view in known.pods.items() for one, _ in view.objects if one.mirror_uid
    }
    if word in uids:
        return (uids[word],)
    names = [(ref.namespace, ref.name) for ref in known.pods if ref.name]
    name = _find_name(word, "pod", names, uids)
    return tuple(one.ref for one in pods_named(known, *name))


def find_claims(word: str, known: ConsumerMap) -> tuple[ClaimRef, ...]:
    """The claims that are meant likewise."""
    uids = {ref.uid: ref for ref in known.claims if ref.uid}
    if word in uids:
        return (uids[word],)
    name = _find_name(word, "claim", [(ref.namespace, ref.name) for ref in known.claims], uids)
    return tuple(one.ref for one in claims_named(known, *name))


def _find_name(
    word: str, what: str, names: Iterable[tuple[str, str]], uids: Iterable[str]
) -> tuple[str, str]:
    words = {name: "/".join(name) for name in sorted(set(names))}
    meant = {name: text for name, text in words.items() if word in (text, name[1])}
    if not meant:
        near = suggestion(word, [*words.values(), *(name for _, name in words), *uids])
        raise NotKnown(f"no {what} {word!r} is known{near}")
    return _only(word, f"{what}s", meant)


def _only(word: str, what: str, meant: Mapping[T, str]) -> T:
    """The only one that is meant."""
    if len(meant) > 1:
        texts = list(meant.values())
        more = f" and {len(texts) - NAMED_MAX} more" if len(texts) > NAMED_MAX else ""
        raise UsageError(f"{word!r} is {len(texts)} {what}: {', '.join(texts[:NAMED_MAX])}{more}; say which")
    return next(iter(meant))
