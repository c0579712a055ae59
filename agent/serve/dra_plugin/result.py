"""What a driver answers for a claim that it prepared, and what such an answer must be.

A wrong one is the driver's mistake, and is found here rather than by a pod that does not start.
"""

import logging
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from agent.model.claim import Claim
from agent.prepare.errors import DriverError

log = logging.getLogger(__name__)

# A CDI id is <vendor>/<class>=<name>, each by the rules of the CDI specification.
_WORD: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"
_NAME: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.:]*[A-Za-z0-9])?"
_CDI_ID: Final = re.compile(rf"(?=[A-Za-z]){_WORD}/(?=[A-Za-z]){_WORD}={_NAME}")


class PreparedDevice(NamedTuple):
    """A device of a claim that its containers can use now."""

    requests: tuple[str, ...]
    """Of the claim, those that it is for, as the claim's devices name them; none: all. The kubelet is told
    ``gpu`` of ``gpu/big``, because that is what containers name."""
    pool: str
    device: str
    cdi_ids: tuple[str, ...] = ()
    """What the container runtime is told, ``<vendor>/<class>=<name>``. The first should be the device's own:
    the kubelet shows its health under that."""
    share_id: str = ""
    """Of a device that several claims consume a part of."""


def check_prepared(claim: Claim, answer: object) -> tuple[PreparedDevice, ...]:
    """The driver's answer for the claim, if it is one; requests without the alternative that was taken.

    Raises:
        DriverError: it is not; the text names the device and the field.
    """
    if not isinstance(answer, Sequence) or isinstance(answer, str | bytes | bytearray):
        raise _mistake(f"prepare returned {type(answer).__name__}, not a sequence of PreparedDevice")
    requests: dict[tuple[str, str], set[str]] = {}
    shares: set[tuple[str, str, str]] = set()
    for given in claim.devices:
        names = requests.setdefault((given.pool, given.device), set())
        names.update((given.request, _base(given.request)))
        shares.add((given.pool, given.device, given.share_id))
    first_ids: dict[str, str] = {}
    for one in answer:
        if not isinstance(one, PreparedDevice):
            raise _mistake(f"prepare returned {type(one).__name__} among the devices, not PreparedDevice")
        name = f"{one.pool}/{one.device}"
        _check_types(one, name)
        known = requests.get((one.pool, one.device))
        if known is None:
            raise _mistake(f"{name}: is no device of the claim")
        for request in one.requests:
            if not request:
                raise _mistake(f"{name}: requests: one is empty")
            if request not in known:
                raise _mistake(f"{name}: requests: {request!r} is none that the device was given to")
        if one.share_id and (one.pool, one.device, one.share_id) not in shares:
            raise _mistake(f"{name}: share_id: {one.share_id!r} is none that the claim has of the device")
        for cdi_id in one.cdi_ids:
            if not _CDI_ID.fullmatch(cdi_id):
                raise _mistake(f"{name}: cdi_ids: {cdi_id!r} is not <vendor>/<class>=<name>")
        if one.cdi_ids and (other := first_ids.setdefault(one.cdi_ids[0], name)) != name:
            log.warning(
                "claim %s: %s and %s have the same first CDI id %s; the kubelet shows one's health only",
                claim.ref, other, name, one.cdi_ids[0],
            )  # fmt: skip
    returned = {(one.pool, one.device) for one in answer}
    if missing := sorted(f"{pool}/{device}" for pool, device in requests.keys() - returned):
        log.warning("claim %s: prepare returned nothing for %s", claim.ref, ", ".join(missing))
    return tuple(one._replace(requests=tuple(dict.fromkeys(map(_base, one.requests)))) for one in answer)


def _base(request: str) -> str:
    """The request that a ``<request>/<subrequest>`` is an alternative of."""
    return request.partition("/")[0]


def _check_types(one: PreparedDevice, name: str) -> None:
    for field in ("requests", "cdi_ids"):
        value = getattr(one, field)
        if not isinstance(value, tuple | list) or not all(isinstance(text, str) for text in value):
            raise _mistake(f"{name}: {field}: {value!r} is no tuple of texts")
    for field in ("pool", "device", "share_id"):
        if not isinstance(value := getattr(one, field), str):
            raise _mistake(f"{name}: {field}: {value!r} is no text")


def _mistake(text: str) -> DriverError:
    return DriverError(text, code="driver.bug.answer")
