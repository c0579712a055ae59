"""Devices that a driver returns for a prepared claim, their validation, and encoded error classes.

The module also validates the claims in a prepare or unprepare request. All functions are pure.

Only valid Kubernetes names are accepted, because drivers use them in file names and labels. Each invalid
claim gets an error of its own.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple

from agent.model.claim import Claim, ClaimRef
from agent.model.prepare import ErrorClass
from agent.prepare.errors import DriverError
from agent.system.output import get_logger

log = get_logger(__name__)

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

    For a device of a subrequest ``<request>/<subrequest>``, the result names ``<request>``, because
    containers refer only to the request.

    Raises:
        DriverError: The answer is not valid; the error names the device and the field.
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
    """Return the name of a request without its subrequest: ``<request>`` for ``<request>/<subrequest>``."""
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
    """Whether and how the answer to the kubelet has the class of an error as a field.

    Kubernetes has proposals for such a field, but no release has the field.
    """

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


# --- claims of a request -----------------------------------------------------------------------------------

CLAIMS_LIMIT: Final = 1024
"""Maximum number of claims in one call. Each answer may take 1 KiB, and the kubelet reads 4 MiB."""
NAME_LIMIT: Final = 253
NAMESPACE_LIMIT: Final = 63
UID_LIMIT: Final = 63
"""Length of the longest valid UID of a claim [characters]; those of the API server have 36."""

_LABEL: Final = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_DNS_SUBDOMAIN: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_NAMESPACE: Final = re.compile(_LABEL)
UID: Final = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]*")
_SHOWN: Final = 64  # characters of a wrong value in an error text


class ValidatedClaims(NamedTuple):
    """Claims of one request, divided into valid and invalid ones.

    Each UID appears once, in the order of the request.
    """

    claims: tuple[ClaimRef, ...]
    refused: tuple[tuple[ClaimRef, str], ...]
    """Invalid claims, each with an error text that begins with the name of the field."""


def validate_claims(claims: Iterable[ClaimRef]) -> ValidatedClaims:
    """Divide the claims of one request into valid and invalid ones; equal claims count once."""
    by_uid: dict[str, ClaimRef] = {}
    errors: dict[str, str] = {}
    for ref in claims:
        first = by_uid.setdefault(ref.uid, ref)
        if first != ref:
            errors.setdefault(
                ref.uid, f"uid: {_show(ref.uid)} is the uid of both {_show(str(first))} and {_show(str(ref))}"
            )
    number = len(by_uid)
    if number > CLAIMS_LIMIT:
        errors = dict.fromkeys(by_uid, f"claims: {number} in one call, limit {CLAIMS_LIMIT}")
    for uid, ref in by_uid.items():
        if uid not in errors and (text := _claim_error(ref)):
            errors[uid] = text
    return ValidatedClaims(
        tuple(ref for uid, ref in by_uid.items() if uid not in errors),
        tuple((ref, errors[uid]) for uid, ref in by_uid.items() if uid in errors),
    )


def _claim_error(ref: ClaimRef) -> str:
    """Return the error text of a claim's first invalid field; empty: the claim is valid."""
    uid_form = "letters, digits, '-', '_', '.', the first a letter or digit"
    for name, value, limit, rule, form in (
        ("uid", ref.uid, UID_LIMIT, UID, uid_form),
        ("namespace", ref.namespace, NAMESPACE_LIMIT, _NAMESPACE, "a DNS label"),
        ("name", ref.name, NAME_LIMIT, _DNS_SUBDOMAIN, "a DNS subdomain"),
    ):
        if not value:
            return f"{name}: is empty"
        if (size := len(value.encode())) > limit:
            return f"{name}: {size} bytes, limit {limit}"
        if not rule.fullmatch(value):
            return f"{name}: {_show(value)} is not {form}"
    return ""


def _show(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
