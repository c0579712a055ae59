"""Typed access to single values of Kubernetes objects decoded from JSON or YAML."""

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
    """Return the object under a key, or an empty one. Raises ValueError for another type."""
    value = parent.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        refuse(f"{place}.{key}".lstrip("."), f"is {kind_of(value)}, not an object")
    return value


def objects(parent: Object, key: str, place: str) -> list[Object]:
    """Return the list of objects under a key, or an empty one. Raises ValueError for another type."""
    value = parent.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        refuse(f"{place}.{key}", "is not a list of objects")
    return value


def text(parent: Object, key: str, place: str) -> str:
    """Return the text under a key, or an empty one. Raises ValueError for another type."""
    value = parent.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        refuse(f"{place}.{key}", f"is {kind_of(value)}, no text")
    return value


def needed(parent: Object, key: str, place: str) -> str:
    """Return the text under a key. Raises ValueError if there is none."""
    value = text(parent, key, place)
    if not value:
        refuse(f"{place}.{key}", "is not there")
    return value


def kind_of(value: object) -> str:
    """Return the type of a JSON value in words, for error messages."""
    return _KINDS.get(type(value), "a number" if isinstance(value, int | float) else "an object")


def short(value: object) -> str:
    """Format a value for an error message, at most 64 characters."""
    text = ascii(value) if isinstance(value, str | int | float | None) else kind_of(value)
    return text if len(text) <= 64 else f"{text[:61]}..."


def refuse(place: str, what: str) -> Never:
    """Raise ValueError with the place first."""
    raise ValueError(f"{place}: {what}")
