"""Parser of the YAML that kubectl writes and Kubernetes reads; values have JSON's types.

PyYAML produces the events. A plain scalar that is a JSON number, boolean or null becomes that value, also
with capitals (``True``); so do ``yes``, ``no``, ``on`` and ``off``, as in Kubernetes. Any other becomes text:
``012``, ``1:20`` and dates stay text. Aliases are allowed, because scripts that dump objects again write
them, but limited, because a small file could expand to a huge one. Tags, merges and duplicate keys are
errors.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from sys import intern
from typing import Any, Final, NoReturn

import msgspec
import yaml

DEPTH_MAX: Final = 100
"""Largest accepted depth of nested lists and maps in a YAML text; a pod has 12."""
SHARED_MAX: Final = 1_000_000
"""Largest number of values that the aliases of a YAML text may repeat: as many as 5,000 pods have."""
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, if PyYAML was built with it
_WORDS: Final = {"": None, "~": None, "null": None, "true": True, "false": False, "yes": True, "no": False,
                 "on": True, "off": False}  # fmt: skip
_CONSTANTS: Final = {spell(word): _WORDS[word] for word in _WORDS for spell in (str, str.title, str.upper)}
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


@dataclass(slots=True)
class _ParseState:
    """Events of a YAML text that are not parsed yet, and the values that its aliases can refer to."""

    events: Iterator[Any]
    anchors: dict[str, object] = field(default_factory=dict)
    """Complete values of the current document that have an anchor, by its name."""
    shared: int = 0
    """Number of values that the text's aliases have repeated so far."""


def parse_yaml(data: bytes) -> tuple[object, ...]:
    """Parse the documents of a YAML text; an empty document is None.

    Raises:
        ValueError: The text is not YAML, or has an unsupported construct; with its position.
    """
    state = _ParseState(iter(yaml.parse(data, Loader=_LOADER)))
    try:
        documents = []
        for event in state.events:
            if isinstance(event, yaml.DocumentStartEvent):
                state.anchors.clear()
                documents.append(_parse_value(next(state.events), state, 0))
        return tuple(documents)
    except yaml.MarkedYAMLError as error:
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise ValueError(f"{_position_text(error.problem_mark)}: {problem}") from None
    except yaml.reader.ReaderError as error:
        before = data[: error.position].split(b"\n")
        raise ValueError(f"line {len(before)}, column {len(before[-1]) + 1}: {error.reason}") from None


def _parse_value(event: Any, state: _ParseState, depth: int) -> object:
    """Parse the YAML value that begins with `event`.

    Args:
        depth: Number of lists and maps that enclose the value.
    """
    if isinstance(event, yaml.AliasEvent):
        return _alias_value(event, state, depth)
    if event.tag is not None:
        _refuse(event, f"tag, {event.tag[:64]}")
    if event.anchor is not None:
        state.anchors.pop(event.anchor, None)  # an alias inside the value would refer to itself
    found: object
    if isinstance(event, yaml.ScalarEvent):
        found = _plain_scalar(event) if event.implicit[0] else event.value
    elif depth == DEPTH_MAX:
        _refuse(event, f"lists and maps nested more than {DEPTH_MAX} deep")
    elif isinstance(event, yaml.SequenceStartEvent):
        found = _parse_list(state, depth + 1)
    else:
        found = _parse_map(state, depth + 1)
    if event.anchor is not None:
        state.anchors[event.anchor] = found
    return found


def _alias_value(event: Any, state: _ParseState, depth: int) -> object:
    if event.anchor not in state.anchors:
        _refuse(event, f"alias without a complete value before it, *{str(event.anchor)[:64]}")
    found = state.anchors[event.anchor]
    values, height = _extent(found)
    if depth + height > DEPTH_MAX:
        _refuse(event, f"lists and maps nested more than {DEPTH_MAX} deep")
    state.shared += values
    if state.shared > SHARED_MAX:
        _refuse(event, f"aliases that add more than {SHARED_MAX:,} values")
    return found


def _extent(value: object) -> tuple[int, int]:
    """Return the size of a parsed YAML value: number of values including itself, and nesting depth."""
    if not isinstance(value, list | dict):
        return 1, 0
    inner = [_extent(item) for item in (value.values() if isinstance(value, dict) else value)]
    return 1 + sum(values for values, _ in inner), 1 + max((height for _, height in inner), default=0)


def _parse_list(state: _ParseState, depth: int) -> list[object]:
    found = []
    while not isinstance(event := next(state.events), yaml.SequenceEndEvent):
        found.append(_parse_value(event, state, depth))
    return found


def _parse_map(state: _ParseState, depth: int) -> dict[str, object]:
    found: dict[str, object] = {}
    while not isinstance(event := next(state.events), yaml.MappingEndEvent):
        if not isinstance(event, yaml.ScalarEvent):
            _refuse(event, "key that is not a string")
        if event.value in found:
            _refuse(event, f"duplicate key, {event.value[:64]!r}")
        value = next(state.events)
        if event.value == "<<" and not isinstance(value, yaml.ScalarEvent):
            alias = f": *{str(value.anchor)[:64]}" if isinstance(value, yaml.AliasEvent) else ""
            _refuse(event, f"merge, <<{alias}")
        found[intern(event.value)] = _parse_value(value, state, depth)  # the same keys repeat in each pod
    return found


def _plain_scalar(event: Any) -> object:
    """Convert a YAML scalar without quotes to a JSON number, boolean or null; any other becomes text."""
    text = event.value
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if not _NUMBER.fullmatch(text):
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.ValidationError:  # valid JSON, but out of the range of a float
        _refuse(event, f"number out of range, {text[:64]}")


def _refuse(event: Any, construct: str) -> NoReturn:
    raise ValueError(f"{_position_text(event.start_mark)}: unsupported YAML: {construct}")


def _position_text(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}" if mark else "unknown position"
