"""Driver's answer for a prepared claim, its checks, and the extension field of an error's class.

A wrong answer is a mistake of the driver, and is found here before it prevents a pod's start.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from agent.model.claim import Claim
from agent.model.prepare import ErrorClass
from agent.prepare.errors import DriverError

log = logging.getLogger(__name__)

# A CDI id is <vendor>/<class>=<name>, each by the rules of the CDI specification.
_CDI_PART: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"
_NAME: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.:]*[A-Za-z0-9])?"
_CDI_ID: Final = re.compile(rf"(?=[A-Za-z]){_CDI_PART}/(?=[A-Za-z]){_CDI_PART}={_NAME}")


class PreparedDevice(NamedTuple):
    """Device of a claim that is ready for its containers."""

    requests: tuple[str, ...]
    """Requests of the claim that the device serves, as the claim's devices name them; empty: all. The
    kubelet receives ``gpu`` for ``gpu/big``, because containers name that."""
    pool: str
    device: str
    cdi_ids: tuple[str, ...] = ()
    """CDI ids for the container runtime, ``<vendor>/<class>=<name>``. The first should be the device's own:
    the kubelet shows its health under that id."""
    share_id: str = ""
    """Share ID of a device that several claims use in parts."""


def check_prepared(claim: Claim, answer: object) -> tuple[PreparedDevice, ...]:
    """Return the driver's answer for the claim, if it is valid; requests without the chosen alternative.

    Raises:
        DriverError: It is not valid; the text names the device and the field.
    """
    if not isinstance(answer, Sequence) or isinstance(answer, str | bytes | bytearray):
        raise _answer_error(f"prepare returned {type(answer).__name__}, not a sequence of PreparedDevice")
    requests: dict[tuple[str, str], set[str]] = {}
    shares: set[tuple[str, str, str]] = set()
    for given in claim.devices:
        names = requests.setdefault((given.pool, given.device), set())
        names.update((given.request, _base(given.request)))
        shares.add((given.pool, given.device, given.share_id))
    first_ids: dict[str, str] = {}
    for device in answer:
        if not isinstance(device, PreparedDevice):
            raise _answer_error(
                f"prepare returned {type(device).__name__} among the devices, not PreparedDevice"
            )
        name = f"{device.pool}/{device.device}"
        _check_types(device, name)
        known = requests.get((device.pool, device.device))
        if known is None:
            raise _answer_error(f"{name}: is not a device of the claim")
        for request in device.requests:
            if not request:
                raise _answer_error(f"{name}: requests: contains an empty name")
            if request not in known:
                raise _answer_error(f"{name}: requests: the device is not allocated to {request!r}")
        if device.share_id and (device.pool, device.device, device.share_id) not in shares:
            raise _answer_error(f"{name}: share_id: the claim has no share {device.share_id!r} of the device")
        for cdi_id in device.cdi_ids:
            if not _CDI_ID.fullmatch(cdi_id):
                raise _answer_error(f"{name}: cdi_ids: {cdi_id!r} is not <vendor>/<class>=<name>")
        if device.cdi_ids and (other := first_ids.setdefault(device.cdi_ids[0], name)) != name:
            log.warning(
                "claim %s: %s and %s have the same first CDI id %s; the kubelet shows one health only",
                claim.ref, other, name, device.cdi_ids[0],
            )  # fmt: skip
    returned = {(device.pool, device.device) for device in answer}
    if missing := sorted(f"{pool}/{device}" for pool, device in requests.keys() - returned):
        log.warning("claim %s: prepare returned no device for %s", claim.ref, ", ".join(missing))
    return tuple(
        device._replace(requests=tuple(dict.fromkeys(map(_base, device.requests)))) for device in answer
    )


def _base(request: str) -> str:
    """Return the request of a ``<request>/<subrequest>`` alternative."""
    return request.partition("/")[0]


def _check_types(device: PreparedDevice, name: str) -> None:
    for field in ("requests", "cdi_ids"):
        value = getattr(device, field)
        if not isinstance(value, tuple | list) or not all(isinstance(text, str) for text in value):
            raise _answer_error(f"{name}: {field}: {value!r} is not a tuple of strings")
    for field in ("pool", "device", "share_id"):
        if not isinstance(value := getattr(device, field), str):
            raise _answer_error(f"{name}: {field}: {value!r} is not a string")


def _answer_error(text: str) -> DriverError:
    return DriverError(text, code="driver.bug.answer")


class WireMode(StrEnum):
    """Form of the error class field in an answer."""

    NONE = "none"
    ERROR_TYPE = "error-type"
    """Enum: 0 unknown, 1 permanent."""
    PERMANENT_ERROR = "permanent-error"
    """Boolean of an older proposal."""


FIELD: Final = 3
"""Number of the field in both forms."""
_TYPES: Final[Mapping[ErrorClass, int]] = {
    ErrorClass.UNKNOWN: 0,
    ErrorClass.TRANSIENT: 0,  # upstream has no value for it
    ErrorClass.BAD_CONFIG: 1,
    ErrorClass.FAILED_DEVICE: 1,
    ErrorClass.PERMANENT: 1,
}
NUMBERS: Final[Mapping[WireMode, Mapping[ErrorClass, int]]] = {
    WireMode.NONE: dict.fromkeys(ErrorClass, 0),
    WireMode.ERROR_TYPE: _TYPES,
    WireMode.PERMANENT_ERROR: _TYPES,  # a flag is a number of 0 or 1
}
"""Value by mode and class; 0 is not sent. All are below 128, so that each fits into a byte."""


def extension(error_class: ErrorClass, mode: WireMode) -> bytes:
    """Return the field in protobuf, to be appended to an encoded NodePrepareResourceResponse."""
    number = NUMBERS[mode][error_class]
    return bytes((FIELD << 3, number)) if number else b""  # wire type 0: varint
