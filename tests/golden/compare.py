"""Compare a golden value with today's: everything except texts for people."""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

import pytest

PROSE: Final = frozenset(
    {
        "advice",
        "arithmetic",
        "costs",
        "detail",
        "evidence",
        "found",
        "group",
        "looksAt",
        "message",
        "notKnown",
        "reason",
        "risk",
        "saw",
        "summary",
        "text",
        "threshold",
        "title",
        "tryIt",
        "unread",
        "what",
        "why",
        "wrong",
    }
)
"""Keys whose values are texts for people. A text that the golden file has must be there today."""
CODES: Final = re.compile(
    r"\[class=[^\]]*\]"  # the head of a prepare error
    r"|\S+/\S+ \((?:unknown|transient|bad-config|failed-device|permanent) [^)]*\)"  # another claim
    r"|\b[a-z][a-z0-9_-]*(?:\.[a-z0-9_-]+)+(?=: )"  # the code before the evidence of a cause
)
"""The parts of a text that programs match."""
VOLATILE: Final = "<volatile>"
"""Placeholder for a value that differs from run to run."""
SHOWN_MAX: Final = 30
"""Differences that a failed test shows."""


def differences(golden: Any, today: Any, where: str = "", *, prose: bool = False) -> Iterator[str]:
    """Yield each place where today's value differs from the golden one.

    Args:
        golden: Value that an earlier release gave.
        today: Value that the code under test gives.
        where: Path of the value, for the differences.
        prose: Whether texts inside the value are texts for people.
    """
    if isinstance(golden, Mapping) and isinstance(today, Mapping):
        yield from _compare_mappings(golden, today, where, prose)
    elif isinstance(golden, list) and isinstance(today, list):
        if len(golden) != len(today):
            yield f"{where}: {len(today)} entries, golden {len(golden)}: {_short(today)}"
        for number, (before, now) in enumerate(zip(golden, today, strict=False)):
            yield from differences(before, now, f"{where}[{number}]", prose=prose)
    elif prose and isinstance(golden, str) and isinstance(today, str):
        yield from _text(golden, today, where)
    elif type(golden) is not type(today) or golden != today:
        yield f"{where}: {_short(today)}, golden {_short(golden)}"


def check(golden: Any, today: Any, where: str = "") -> None:
    """Fail the test with the first differences, if there are any.

    Args:
        golden: Value that an earlier release gave.
        today: Value that the code under test gives, as any types that JSON has.
        where: Name of the value, for the differences.
    """
    if found := list(islice(differences(golden, json.loads(json.dumps(today)), where), SHOWN_MAX)):
        pytest.fail("\n".join(["differs from the golden file:", *found]), pytrace=False)


def _compare_mappings(
    golden: Mapping[str, Any], today: Mapping[str, Any], where: str, prose: bool
) -> Iterator[str]:
    if list(golden) != list(today):
        yield f"{where}: keys {list(today)}, golden {list(golden)}"
    for key in golden:
        if key in today:
            yield from differences(golden[key], today[key], f"{where}.{key}", prose=prose or key in PROSE)


def _text(golden: str, today: str, where: str) -> Iterator[str]:
    if bool(golden.strip()) != bool(today.strip()):
        yield f"{where}: {_short(today)}, golden {_short(golden)}: a text is empty"
    elif CODES.findall(golden) != CODES.findall(today):
        yield f"{where}: codes {CODES.findall(today)}, golden {CODES.findall(golden)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def without_prose(value: Any, *, prose: bool = False) -> Any:
    """Return a value without its texts for people: only the codes in them stay."""
    match value:
        case dict():
            return {key: without_prose(inner, prose=prose or key in PROSE) for key, inner in value.items()}
        case list():
            return [without_prose(inner, prose=prose) for inner in value]
        case str() if prose and value.strip():
            codes = (found if found.endswith(("]", ")")) else f"{found}: " for found in CODES.findall(value))
            return " ".join(["<text>", *codes])
    return value


def mask_keys(value: Any, keys: frozenset[str]) -> Any:
    """Return the value with a placeholder for everything under these keys that is not null."""
    if isinstance(value, Mapping):
        return {
            key: VOLATILE if key in keys and inner is not None else mask_keys(inner, keys)
            for key, inner in value.items()
        }
    return [mask_keys(inner, keys) for inner in value] if isinstance(value, list) else value
