"""Validation of the claims in a prepare or unprepare request. Pure: names go in, errors come out.

A driver makes file names and labels of these strings, so only valid Kubernetes names pass. Errors are
reported per claim: a request has no other fault.
"""

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from agent.model.claim import ClaimRef

CLAIMS_LIMIT: Final = 1024
"""Maximum number of claims in one call. A pod has a handful; each answer may take 1 KiB, and the kubelet
reads 4 MiB."""
NAME_LIMIT: Final = 253
NAMESPACE_LIMIT: Final = 63
UID_LIMIT: Final = 63
"""Longest valid UID [characters]; those of the API server have 36."""

_LABEL: Final = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_NAME: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_NAMESPACE: Final = re.compile(_LABEL)
UID: Final = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]*")
_SHOWN: Final = 64  # characters of a wrong value in an error text


class ValidatedClaims(NamedTuple):
    """Claims of one request, each uid once, in the order of the request."""

    claims: tuple[ClaimRef, ...]
    """Valid claims."""
    refused: tuple[tuple[ClaimRef, str], ...]
    """Invalid claims, each with its error, which begins with the field."""


def check_claims(claims: Iterable[ClaimRef]) -> ValidatedClaims:
    """Split the claims of one request into valid and invalid ones.

    A uid that appears twice is one claim, if everything else is the same.
    """
    by_uid: dict[str, ClaimRef] = {}
    errors: dict[str, str] = {}
    for ref in claims:
        first = by_uid.setdefault(ref.uid, ref)
        if first != ref:
            errors.setdefault(
                ref.uid, f"uid: {_show(ref.uid)} is both {_show(str(first))} and {_show(str(ref))}"
            )
    number = len(by_uid)
    if number > CLAIMS_LIMIT:
        errors = dict.fromkeys(by_uid, f"claims: {number} in one call, limit {CLAIMS_LIMIT}")
    for uid, ref in by_uid.items():
        if uid not in errors and (text := _problem(ref)):
            errors[uid] = text
    return ValidatedClaims(
        tuple(ref for uid, ref in by_uid.items() if uid not in errors),
        tuple((ref, errors[uid]) for uid, ref in by_uid.items() if uid in errors),
    )


def _problem(ref: ClaimRef) -> str:
    """Return the error of the first invalid field of a claim; empty: all fields are valid."""
    return (
        _field("uid", ref.uid, UID_LIMIT, UID, "letters, digits, '-', '_', '.', the first a letter or digit")
        or _field("namespace", ref.namespace, NAMESPACE_LIMIT, _NAMESPACE, "a DNS label")
        or _field("name", ref.name, NAME_LIMIT, _NAME, "a DNS subdomain")
    )  # fmt: skip


def _field(name: str, value: str, limit: int, rule: re.Pattern[str], form: str) -> str:
    if not value:
        return f"{name}: empty"
    if (size := len(value.encode())) > limit:
        return f"{name}: {size} bytes, limit {limit}"
    if not rule.fullmatch(value):
        return f"{name}: {_show(value)} is not {form}"
    return ""


def _show(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
