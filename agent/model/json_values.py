"""Typed access to fields of decoded JSON or YAML objects. In errors, ``place`` is the path of the object."""

from collections.abc import Mapping
from typing import Final, Never

JsonObject = Mapping[str, object]

_KINDS: Final[Mapping[type, str]] = {
    type(None): "nothing",
    str: "text",
    bool: "a boolean",
    list: "a list",
}


def get_mapping(parent: JsonObject, key: str, place: str = "") -> JsonObject:
    """Return the object in a field of a JSON object; empty if the field is missing.

    Raises ValueError for a value of another type.
    """
    value = parent.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise_invalid(f"{place}.{key}".lstrip("."), f"is {type_in_words(value)}, not an object")
    return value


def get_mappings(parent: JsonObject, key: str, place: str) -> list[JsonObject]:
    """Return the list of objects in a field of a JSON object; [] if the field is missing.

    Raises ValueError for a value of another type.
    """
    value = parent.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise_invalid(f"{place}.{key}", "is not a list of objects")
    return value


def get_text(parent: JsonObject, key: str, place: str) -> str:
    """Return the text in a field of a JSON object; "" if the field is missing.

    Raises ValueError for a value of another type.
    """
    value = parent.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise_invalid(f"{place}.{key}", f"is {type_in_words(value)}, not text")
    return value


def get_required_text(parent: JsonObject, key: str, place: str) -> str:
    """Return the text in a field of a JSON object.

    Raises ValueError if the field is missing, empty or not text.
    """
    value = get_text(parent, key, place)
    if not value:
        raise_invalid(f"{place}.{key}", "is missing")
    return value


def type_in_words(value: object) -> str:
    """Return the type of a JSON value in words, for error messages."""
    return _KINDS.get(type(value), "a number" if isinstance(value, int | float) else "an object")


def format_short(value: object) -> str:
    """Format a value for an error message, at most 64 characters."""
    text = ascii(value) if isinstance(value, str | int | float | None) else type_in_words(value)
    return text if len(text) <= 64 else f"{text[:61]}..."


def raise_invalid(place: str, problem: str) -> Never:
    """Raise a ValueError about a part of a JSON object: "<place>: <problem>"."""
    raise ValueError(f"{place}: {problem}")
