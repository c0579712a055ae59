"""Paths that callers of the public API pass as strings or as path objects."""

import os
from pathlib import Path

from agent.errors import ConfigError

StrPath = str | os.PathLike[str]
"""Path of a file or directory, as :func:`open` accepts it."""


def as_path(argument: str, value: StrPath | None) -> Path | None:
    """Convert the value of an argument to a Path; None stays None.

    Raises:
        ConfigError: The value is neither a string nor a path object, or is empty.
    """
    if value is None:
        return None
    given: object = value
    if not isinstance(given, str | os.PathLike) or not given or not isinstance(os.fspath(given), str):
        raise ConfigError(f"argument {argument}: {value!r} is not a path; pass a string or a Path")
    return Path(value)
