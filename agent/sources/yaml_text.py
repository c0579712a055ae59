"""YAML as kubectl writes it: the documents of a text, as the same objects would be in JSON.

PyYAML takes the text apart; what the parts mean is said here. A plain word is what it is in JSON, else it is
text: ``on``, ``012``, ``1:20`` and a date stay what they are, whichever YAML somebody quoted them for.
Aliases are written by scripts that dump such objects again; as they let a small text unfold into a large one,
there is a limit. What nobody writes of such objects is refused: a tag, a merge, and the same key twice.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from sys import intern
from typing import Any, Final, NoReturn

import msgspec
import yaml

DEPTH_MAX: Final = 100
"""A pod is 12 deep."""
SHARED_MAX: Final = 1_000_000
"""Values that a text may have by aliases, beyond those that it spells out: as many as 5,000 pods have."""
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, where PyYAML was built with it
_WORDS: Final = {"": None, "~": None, "null": None, "true": True, "false": False}
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


@dataclass(slots=True)
class _Reading:
    """What is left of a text, and what of it may be meant by an alias."""

    events: Iterator[Any]
    anchors: dict[str, object] = field(default_factory=dict)
    """Values of this document that are complete."""
    shared: int = 0
    """Values of which there are more by aliases."""


def parse_yaml(data: bytes) -> tuple[object, ...]:
    """The documents; an empty one is None. What aliases stand for is one object in several places.

    Raises:
        ValueError: It is no YAML, or none that is written of such objects; with line and column.
    """
    reading = _Reading(iter(yaml.parse(data, Loader=_LOADER)))
    try:
        return tuple(
            _document(reading) for event in reading.events if isinstance(event, yaml.DocumentStartEvent)
        )
    except yaml.MarkedYAMLError as error:
        what = ", ".join(filter(None, (error.context, error.problem)))
        raise ValueError(f"{_place(error.problem_mark)}: {what}") from None
    except yaml.reader.ReaderError as error:
        before = data[: error.position].split(b"\n")
        raise ValueError(f"line {len(before)}, column {len(before[-1]) + 1}: {error.reason}") from None


def _document(reading: _Reading) -> object:
    reading.anchors.clear()
    return _value(next(reading.events), reading, 0)


def _value(event: Any, reading: _Reading, depth: int) -> object:
    """The value that begins with an event, of those inside so many others."""
    if isinstance(event, yaml.AliasEvent):
        return _again(event, reading, depth)
    if event.tag is not None:
        _refuse(event, f"tag, {event.tag[:64]}")
    if event.anchor is not None:
        reading.anchors.pop(event.anchor, None)  # one inside of it means this, which is not complete
    found: object
    if isinstance(event, yaml.ScalarEvent):
        found = _word(event) if event.implicit[0] else event.value
    elif depth == DEPTH_MAX:
        _refuse(event, f"lists and maps more than {DEPTH_MAX} deep")
    elif isinstance(event, yaml.SequenceStartEvent):
        found = _list(reading, depth + 1)
    else:
        found = _map(reading, depth + 1)
    if event.anchor is not None:
        reading.anchors[event.anchor] = found
    return found


def _again(event: Any, reading: _Reading, depth: int) -> object:
    """The value that an alias stands for."""
    if event.anchor not in reading.anchors:
        _refuse(event, f"alias but of a value that ends before it, *{str(event.anchor)[:64]}")
    found = reading.anchors[event.anchor]
    values, height = _extent(found)
    if depth + height > DEPTH_MAX:
        _refuse(event, f"lists and maps more than {DEPTH_MAX} deep")
    reading.shared += values
    if reading.shared > SHARED_MAX:
        _refuse(event, f"aliases that stand for more than {SHARED_MAX:,} values in all")
    return found


def _extent(value: object) -> tuple[int, int]:
    """How many values it is with those inside, and how many lists and maps deep."""
    if not isinstance(value, list | dict):
        return 1, 0
    inner = [_extent(one) for one in (value.values() if isinstance(value, dict) else value)]
    return 1 + sum(values for values, _ in inner), 1 + max((height for _, height in inner), default=0)


def _list(reading: _Reading, depth: int) -> list[object]:
    found = []
    while not isinstance(event := next(reading.events), yaml.SequenceEndEvent):
        found.append(_value(event, reading, depth))
    return found


def _map(reading: _Reading, depth: int) -> dict[str, object]:
    found: dict[str, object] = {}
    while not isinstance(event := next(reading.events), yaml.MappingEndEvent):
        if not isinstance(event, yaml.ScalarEvent):
            _refuse(event, "key that is no text")
        if event.value in found:
            _refuse(event, f"key twice, {event.value[:64]!r}")
        value = next(reading.events)
        if event.value == "<<" and isinstance(value, yaml.AliasEvent):
            _refuse(event, f"merge, <<: *{str(value.anchor)[:64]}")
        found[intern(event.value)] = _value(value, reading, depth)  # each key is there once per pod
    return found


def _word(event: Any) -> object:
    """What stands there without quotes."""
    text = event.value
    if text in _WORDS:
        return _WORDS[text]
    if not _NUMBER.fullmatch(text):
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.ValidationError:  # JSON has words for such numbers, nobody has a value
        _refuse(event, f"number beyond all range, {text[:64]}")


def _refuse(event: Any, what: str) -> NoReturn:
    raise ValueError(f"{_place(event.start_mark)}: kubectl writes no {what}")


def _place(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
