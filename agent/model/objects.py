"""Single values of Kubernetes' objects, checked for their kind and nothing else."""

from collections.abc import Mapping
from typing import Final, Never

Object = Mapping[str, object]

_KINDS: Final[Mapping[type, str]] = {
    type(None): "nothing",
    str: "text",
    bool: "a truth value",
    list: "a list",
}


def mapping(parent: Object, key: str, place: str = "") -> Object:
    """The object under a key; an empty one if there is none. Raises ValueError."""
    value = parent.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        refuse(f"{place}.{key}".lstrip("."), f"is {kind_of(value)}, no object")
    return value


def objects(parent: Object, key: str, place: str) -> list[Object]:
    """The objects in the list under a key; none if there is no list. Raises ValueError."""
    value = parent.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        refuse(f"{place}.{key}", "is no list of objects")
    return value


def text(parent: Object, key: str, place: str) -> str:
    """The text under a key; empty if there is none. Raises ValueError."""
    value = parent.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        refuse(f"{place}.{key}", f"is {kind_of(value)}, no text")
    return value


def needed(parent: Object, key: str, place: str) -> str:
    """The text under a key. Raises ValueError if there is none."""
    value = text(parent, key, place)
    if not value:
        refuse(f"{place}.{key}", "is not there")
    return value


def kind_of(value: object) -> str:
    """What a value of JSON is, in words."""
    return _KINDS.get(type(value), "a number" if isinstance(value, int | float) else "an object")


def short(value: object) -> str:
    """A value for an error's text."""
    text = ascii(value) if isinstance(value, str | int | float | None) else kind_of(value)
    return text if len(text) <= 64 else f"{text[:61]}..."


def refuse(place: str, what: str) -> Never:
    """Raises ValueError, the place first."""
    raise ValueError(f"{place}: {what}")
