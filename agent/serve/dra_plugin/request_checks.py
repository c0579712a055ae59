"""What a prepare or unprepare request may say of its claims. Pure: names in, what is wrong out.

A driver makes file names and labels of these strings, so what is no name of Kubernetes' does not get in. What
is wrong is told claim by claim: a request has no other fault than theirs.
"""

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from agent.model.claim import ClaimRef

CLAIMS_LIMIT: Final = 1024
"""Claims in one call. A pod has a handful; each may be answered by 1 KiB, and the kubelet reads 4 MiB."""
NAME_LIMIT: Final = 253
NAMESPACE_LIMIT: Final = 63
UID_LIMIT: Final = 63
"""The API server makes them of 36."""

_LABEL: Final = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_NAME: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_NAMESPACE: Final = re.compile(_LABEL)
UID: Final = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]*")
_SHOWN: Final = 64  # characters of a wrong value, so that the text stays one that can be read


class ValidatedClaims(NamedTuple):
    """The claims of one request, each uid once, in the order of the request."""

    claims: tuple[ClaimRef, ...]
    """Those that can be acted upon."""
    refused: tuple[tuple[ClaimRef, str], ...]
    """The others, each with what is wrong: the field first."""


def check_claims(claims: Iterable[ClaimRef]) -> ValidatedClaims:
    """Sorts the claims of one request into those that can be acted upon and those that cannot.

    A uid that is there twice is one claim, if everything else is the same.
    """
    by_uid: dict[str, ClaimRef] = {}
    wrong: dict[str, str] = {}
    for ref in claims:
        first = by_uid.setdefault(ref.uid, ref)
        if first != ref:
            wrong.setdefault(
                ref.uid, f"uid: {_show(ref.uid)} is both {_show(str(first))} and {_show(str(ref))}"
            )
    number = len(by_uid)
    if number > CLAIMS_LIMIT:
        wrong = dict.fromkeys(by_uid, f"claims: {number} in one call, limit {CLAIMS_LIMIT}")
    for uid, ref in by_uid.items():
        if uid not in wrong and (text := _problem(ref)):
            wrong[uid] = text
    return ValidatedClaims(
        tuple(ref for uid, ref in by_uid.items() if uid not in wrong),
        tuple((ref, wrong[uid]) for uid, ref in by_uid.items() if uid in wrong),
    )


def _problem(ref: ClaimRef) -> str:
    """What is wrong with the fields of one claim; empty if nothing is."""
    return (
        _field("uid", ref.uid, UID_LIMIT, UID, "letters, digits, '-', '_', '.', the first no sign")
        or _field("namespace", ref.namespace, NAMESPACE_LIMIT, _NAMESPACE, "a DNS label")
        or _field("name", ref.name, NAME_LIMIT, _NAME, "a DNS subdomain")
    )  # fmt: skip


def _field(name: str, value: str, limit: int, rule: re.Pattern[str], words: str) -> str:
    if not value:
        return f"{name}: is empty"
    if (size := len(value.encode())) > limit:
        return f"{name}: is {size} bytes, limit {limit}"
    if not rule.fullmatch(value):
        return f"{name}: {_show(value)} is not {words}"
    return ""


def _show(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
