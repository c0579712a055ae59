"""Values as plain JSON without the names that the code gives their fields."""

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec


def plain(value: Any) -> Any:
    """Return a value as lists of its fields in their order, enums by value, mappings as sorted pairs.

    A regular expression is its source.
    """
    match value:
        case Enum():
            return value.value
        case None | bool() | int() | float() | str():
            return value
        case Path():
            return str(value)
        case re.Pattern():
            return value.pattern
        case Mapping():
            return sorted(([plain(key), plain(inner)] for key, inner in value.items()), key=str)
        case frozenset() | set():
            return sorted((plain(inner) for inner in value), key=str)
        case list() | tuple():
            return [plain(inner) for inner in value]
        case msgspec.Struct():
            return [plain(getattr(value, name)) for name in value.__struct_fields__]
    if is_dataclass(value):
        return [plain(getattr(value, field.name)) for field in fields(value)]
    raise TypeError(f"{type(value).__name__} has no plain form")
