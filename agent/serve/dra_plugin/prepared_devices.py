"""Devices that a driver returns for a prepared claim, their validation, and the error class of an answer."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from agent.model.claim import Claim
from agent.model.prepare import ErrorClass
from agent.prepare.errors import DriverError

log = logging.getLogger(__name__)

# A CDI id is <vendor>/<class>=<name>, each by the rules of the CDI specification.
_CDI_PART: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"
_NAME: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.:]*[A-Za-z0-9])?"
_CDI_ID: Final = re.compile(rf"(?=[A-Za-z]){_CDI_PART}/(?=[A-Za-z]){_CDI_PART}={_NAME}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDevice:
    """Device that the driver prepared for a claim."""

    requests: tuple[str, ...] = ()
    """Requests of the claim that the device serves; empty: all. The kubelet receives ``gpu`` for the
    subrequest ``gpu/big``, because containers name only the request."""
    pool: str
    device: str
    cdi_ids: tuple[str, ...] = ()
    """CDI ids for the container runtime, ``<vendor>/<class>=<name>``. The kubelet shows the device's health
    under the first id, which no other device should have first."""
    share_id: str = ""
    """Share ID, if several claims share the device's capacity; empty: the device is not shared."""


def validate_prepared_devices(claim: Claim, answer: object) -> tuple[PreparedDevice, ...]:
    """Check the devices that the driver returned for a claim, and return them.

    A device for a subrequest gets the name ``<request>``, because containers name only the request.

    Raises:
        DriverError: The answer is not valid; names the device and the field.
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
            raise _answer_error(f"prepared device {name}: is not a device of the claim")
        for request in device.requests:
            if not request:
                raise _answer_error(f"prepared device {name}: requests: contains an empty name")
            if request not in known:
                raise _answer_error(
                    f"prepared device {name}: requests: the device is not allocated to {request!r}"
                )
        if device.share_id and (device.pool, device.device, device.share_id) not in shares:
            raise _answer_error(
                f"prepared device {name}: share_id: the claim has no share {device.share_id!r} of the device"
            )
        for cdi_id in device.cdi_ids:
            if not _CDI_ID.fullmatch(cdi_id):
                raise _answer_error(
                    f"prepared device {name}: cdi_ids: {cdi_id!r} is not <vendor>/<class>=<name>"
                )
        if device.cdi_ids and (other := first_ids.setdefault(device.cdi_ids[0], name)) != name:
            log.warning(
                "claim %s: devices %s and %s have the same first CDI id %s; the kubelet shows the health of "
                "only one of them",
                claim.ref, other, name, device.cdi_ids[0],
            )  # fmt: skip
    returned = {(device.pool, device.device) for device in answer}
    if missing := sorted(f"{pool}/{device}" for pool, device in requests.keys() - returned):
        log.warning(
            "claim %s: prepare did not return the allocated devices %s; the pod's status does not show their "
            "health",
            claim.ref,
            ", ".join(missing),
        )
    return tuple(
        replace(device, requests=tuple(dict.fromkeys(map(_base, device.requests)))) for device in answer
    )


def _base(request: str) -> str:
    """Return the request of a subrequest: ``<request>`` for ``<request>/<subrequest>``."""
    return request.partition("/")[0]


def _check_types(device: PreparedDevice, name: str) -> None:
    for field in ("requests", "cdi_ids"):
        value = getattr(device, field)
        if not isinstance(value, tuple | list) or not all(isinstance(text, str) for text in value):
            raise _answer_error(f"prepared device {name}: {field}: {value!r} is not a tuple of strings")
    for field in ("pool", "device", "share_id"):
        if not isinstance(value := getattr(device, field), str):
            raise _answer_error(f"prepared device {name}: {field}: {value!r} is not a string")


def _answer_error(text: str) -> DriverError:
    return DriverError(text, code="driver.bug.answer")


class WireMode(StrEnum):
    """Encoding of an error's class in the answer to the kubelet, a proposed field that is not released."""

    NONE = "none"
    """The answer has no field for the error's class."""
    ERROR_TYPE = "error-type"
    """The field is an enum: 0 unknown, 1 permanent."""
    PERMANENT_ERROR = "permanent-error"
    """The field is a boolean, from an older proposal: true means permanent."""


ERROR_CLASS_FIELD: Final = 3
"""Protobuf number of the error class field in both encodings."""
_TYPES: Final[Mapping[ErrorClass, int]] = {
    ErrorClass.UNKNOWN: 0,
    ErrorClass.TRANSIENT: 0,  # the proposal has no value for it
    ErrorClass.BAD_CONFIG: 1,
    ErrorClass.FAILED_DEVICE: 1,
    ErrorClass.PERMANENT: 1,
}
ERROR_CLASS_NUMBERS: Final[Mapping[WireMode, Mapping[ErrorClass, int]]] = {
    WireMode.NONE: dict.fromkeys(ErrorClass, 0),
    WireMode.ERROR_TYPE: _TYPES,
    WireMode.PERMANENT_ERROR: _TYPES,
}
"""Value of the error class field, by encoding and error class; 0 is not sent."""


def encode_error_class(error_class: ErrorClass, mode: WireMode) -> bytes:
    """Encode the error class field, which is appended to an encoded NodePrepareResourceResponse."""
    number = ERROR_CLASS_NUMBERS[mode][error_class]
    return bytes((ERROR_CLASS_FIELD << 3, number)) if number else b""  # wire type 0: varint
