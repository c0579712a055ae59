"""Single values of Kubernetes' objects, checked for their kind and nothing else."""

from collections.abc import Mapping
from typing import Never

Object = Mapping[str, object]


def mapping(parent: Object, key: str, place: str = "") -> Object:
    """The object under a key; an empty one if there is none. Raises ValueError."""
    value = parent.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        refuse(f"{place}.{key}".lstrip("."), "is no object")
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
        refuse(f"{place}.{key}", "is no text")
    return value


def needed(parent: Object, key: str, place: str) -> str:
    """The text under a key. Raises ValueError if there is none."""
    value = text(parent, key, place)
    if not value:
        refuse(f"{place}.{key}", "is not there")
    return value


def refuse(place: str, what: str) -> Never:
    """Raises ValueError, the place first."""
    raise ValueError(f"{place}: {what}")
