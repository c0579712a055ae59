"""Files of the configuration: the main file and its drop-ins, read within limits and parsed as TOML."""

import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.errors import ConfigError, PermissionDeniedError
from agent.model.reading import Absence
from agent.system.files import ReadError, read_bounded

FILE_BYTES: Final = 256 << 10
"""Largest accepted configuration file [bytes]."""
LINE_BYTES: Final = 4096
"""Longest accepted line of a TOML file [bytes]."""
KEY_PARTS_MAX: Final = 64
"""Number of parts from which on a dotted key is refused: tomllib's time grows with their square."""
DEPTH_MAX: Final = 32
"""Largest accepted depth of nested arrays and tables in a TOML file."""
INTEGER_BITS: Final = 64
"""Size of the largest integer that TOML requires a parser to accept [bits]."""
_KEY_PART: Final = r"""(?>[-\w]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*"""
_LONG_KEY: Final = re.compile(rf"""(?<![-\w."'])(?:{_KEY_PART}){{{KEY_PARTS_MAX}}}""")
DEFAULT_FILE: Final = Path("/etc/drahealth/config.toml")
DROP_INS: Final = "config.d"
"""Directory of drop-ins, next to the default file: files ``*.toml``, read in the order of their names."""
DROP_INS_MAX: Final = 64
"""Largest number of drop-in files of the configuration."""


class ConfigFile(NamedTuple):
    """Configuration file with its parsed content."""

    path: Path
    table: dict[str, Any]


def read_config_files(file: Path | None, default_file: Path = DEFAULT_FILE) -> tuple[ConfigFile, ...]:
    """Read the configuration files, in the order in which later ones replace values of earlier ones.

    Args:
        file: File given by the operator, which must exist and is the only one; None: ``default_file`` and
            its drop-ins, which need not exist.

    Raises:
        ConfigError: A file is unreadable, too large or no TOML; the text has the file and the line.
        PermissionDeniedError: This user may not read a file.
    """
    if file is not None:
        return (ConfigFile(file, _read_toml(file, must_exist=True) or {}),)
    found = [(default_file, _read_toml(default_file, must_exist=False))]
    found += [
        (path, _read_toml(path, must_exist=False)) for path in list_drop_ins(default_file.parent / DROP_INS)
    ]
    return tuple(ConfigFile(path, table) for path, table in found if table is not None)


def list_drop_ins(directory: Path) -> list[Path]:
    """Return the paths of the configuration's drop-in files; none if the directory does not exist.

    Raises ConfigError or PermissionDeniedError if the directory cannot be listed or has too many files.
    """
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(".toml") and name[0] != ".")
    except FileNotFoundError:
        return []
    except PermissionError as error:
        raise PermissionDeniedError(f"configuration directory {directory}: {error.strerror}") from None
    except OSError as error:
        raise ConfigError(f"configuration directory {directory}: {error.strerror}") from None
    if len(names) > DROP_INS_MAX:
        raise ConfigError(
            f"configuration directory {directory}: {len(names)} files, limit {DROP_INS_MAX}; merge some"
        )
    return [directory / name for name in names]


def _read_toml(path: Path, *, must_exist: bool) -> dict[str, Any] | None:
    """Read and parse one file; None: the file does not exist, and `must_exist` is false."""
    try:
        data = b"" if path == Path(os.devnull) else read_bounded(path, FILE_BYTES).data
    except ReadError as error:
        if error.absence is Absence.ABSENT and not must_exist:
            return None
        refusal = PermissionDeniedError if error.is_forbidden else ConfigError
        raise refusal(f"configuration file {path}: {error.reason}") from None
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration file {path}: byte {error.start} is not UTF-8") from None
    try:
        return parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        # tomllib: "<problem> (at line 2, column 5)", or "<problem> (at end of document)"
        problem, _, where = str(error).rpartition(" (at ")
        found = re.match(r"line (\d+)", where)
        line_number = found[1] if found else str(text.count("\n") + 1)
        raise ConfigError(
            f"{path}:{line_number}: not valid TOML: {problem[:1].lower()}{problem[1:]}"
        ) from None
    except CostlyToml as error:
        raise ConfigError(f"{path}{f':{error.line}' if error.line else ''}: {error}") from None


class CostlyToml(ValueError):
    """TOML that would take too long to parse, or whose values are too large or nested too deeply.

    Attributes:
        line: Number of the line; 0: not known.
    """

    def __init__(self, problem: str, line: int = 0) -> None:
        super().__init__(problem)
        self.line = line


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML that another user may have written: within a time that grows with its length only.

    Raises:
        CostlyToml: A line, a key, an integer or the nesting exceeds its limit.
        tomllib.TOMLDecodeError: The text is not TOML.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if (size := len(line.encode())) > LINE_BYTES:
            raise CostlyToml(f"line is {size} bytes, limit {LINE_BYTES}; split it", number)
    if found := _LONG_KEY.search(text):
        number = text.count("\n", 0, found.start()) + 1
        raise CostlyToml(f"dotted key has over {KEY_PARTS_MAX} parts, the limit; shorten it", number)
    try:
        table = tomllib.loads(text.removeprefix("\ufeff"))
    except RecursionError:
        raise CostlyToml("arrays or tables are nested too deeply; remove brackets") from None
    _check_nested_values(table)
    return table


def _check_nested_values(table: dict[str, Any]) -> None:
    """Raise CostlyToml for arrays or tables nested deeper than DEPTH_MAX, or an integer above INTEGER_BITS.

    Python shows neither in an error text: a deep value exceeds its recursion limit, a large integer its limit
    of digits.
    """
    values: Iterable[tuple[str, Any]] = (("", table),)
    depth = 0
    while values := [value for name, inner in values for value in _values_in(name, inner)]:
        depth += 1
        if depth > DEPTH_MAX:
            raise CostlyToml(
                f"arrays or tables are nested more than {DEPTH_MAX} deep, the limit; remove brackets or dots"
            )
        for name, value in values:
            if isinstance(value, int) and (bits := value.bit_length()) > INTEGER_BITS:
                raise CostlyToml(
                    f"{name}: integer has {bits} bits, limit {INTEGER_BITS}; write a smaller one"
                )


def _values_in(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Return the values in a table, each with its name, or those in a list with the list's name."""
    if isinstance(value, list):
        return ((name, inner) for inner in value)
    return value.items() if isinstance(value, dict) else ()
