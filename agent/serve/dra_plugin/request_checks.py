"""Validation of the claims in a prepare or unprepare request. Pure.

Only valid Kubernetes names pass, because drivers use them in file names and labels. Each invalid claim gets
an error of its own.
"""

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from agent.model.claim import ClaimRef

CLAIMS_LIMIT: Final = 1024
"""Maximum number of claims in one call. Each answer may take 1 KiB, and the kubelet reads 4 MiB."""
NAME_LIMIT: Final = 253
NAMESPACE_LIMIT: Final = 63
UID_LIMIT: Final = 63
"""Length of the longest valid UID of a claim [characters]; those of the API server have 36."""

_LABEL: Final = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_NAME: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_NAMESPACE: Final = re.compile(_LABEL)
UID: Final = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]*")
_SHOWN: Final = 64  # characters of a wrong value in an error text


class ValidatedClaims(NamedTuple):
    """Valid and invalid claims of one request, each uid once, in the order of the request."""

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
        ("name", ref.name, NAME_LIMIT, _NAME, "a DNS subdomain"),
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
