"""Readers and checks of single configuration values.

Readers and checks raise ValueError or TypeError with the value and its limit, if any; agent.config.config
adds the origin.
"""

import os
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from agent.devices.inventory import canonical_pool_name, parse_pool_name
from agent.model.cpuset import CpuSet, parse_cpus
from agent.model.health import XidOverride

MS: Final = 1_000_000
S: Final = 1000 * MS
HOUR: Final = 3600 * S
UNITS: Final = {"h": HOUR, "m": 60 * S, "s": S, "ms": MS, "us": 1000, "ns": 1}

ROOT_BYTES: Final = 200  # size of a root in the native core's options
LIBRARY_BYTES: Final = 4000  # size of the library's name there
XID_MAX: Final = 999  # NVML's code for an unknown XID; real codes are far below
SWITCH_VALUES: Final = {"1": True, "true": True, "0": False, "false": False}
"""Values that the environment variable of a switch may have."""
_LABELS: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"

# --- readers: value in TOML, flag or variable to the field's value -----------------------------------------


def parse_duration(value: object) -> int:
    """Parse a duration such as ``"100ms"`` or ``"1.5s"`` into nanoseconds.

    Raises:
        ValueError: The text is not one number and one unit (ns, us, ms, s, m, h).
    """
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?) *(ns|us|ms|s|m|h)", str(value).strip())
    if found is None:
        raise ValueError(f"{value!r} is not a duration; write a number and its unit, such as 100ms or 1s")
    return int(Decimal(found[1]) * UNITS[found[2]])


def format_duration(ns: float) -> str:
    """Format a duration [ns] with the largest unit that keeps it a whole number: ``10ms``, ``90s``,
    ``1h``."""
    unit = next((u for u, size in UNITS.items() if ns >= size and ns % size == 0), "ns")
    return f"{ns / UNITS[unit]:.0f}{unit}" if ns else "0s"


def read_whole_seconds(value: object) -> int:
    """Read a duration that is a whole number of seconds [s]."""
    seconds, rest = divmod(parse_duration(value), S)
    if rest:
        raise ValueError(f"{value!r} is not a whole number of seconds")
    return seconds


def read_text(value: object) -> str:
    """Read a text. Raises TypeError for any other type: an unquoted number in a file is likely a mistake."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string; put it in quotes")
    return value


def read_count(value: object) -> int:
    """Read a whole number; a boolean is an error."""
    try:
        return msgspec.convert(value, int)
    except msgspec.ValidationError:
        raise TypeError(f"{value!r} is not a whole number") from None


def read_path(value: object) -> Path:
    """Read a path and make it absolute from the working directory."""
    if not (text := read_text(value)) or "\0" in text:
        raise ValueError(f"{text!r} is not a path")
    return Path(os.path.abspath(text))  # resolve() would follow links, absolute() keep ".."


def read_switch(value: object) -> bool:
    """Read a boolean; 1 and "yes" are errors."""
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def read_library(value: object) -> str:
    """Read the name of a library: a bare name for the dynamic linker, or a path if it contains a slash."""
    text = read_text(value)
    if not text or "\0" in text:
        raise ValueError(f"{text!r} is not a library")
    return os.path.abspath(text) if "/" in text else text


def read_cgroup_root(value: object) -> str:
    """Read a cgroup as a path from the root of the tree; the first slash is optional."""
    parts = read_text(value).strip("/").split("/")
    if ".." in parts or "\0" in read_text(value):
        raise ValueError(f"{value!r} leaves the cgroup tree")
    return "/" + "/".join(part for part in parts if part not in {"", "."})


def split_values(text: str) -> list[str]:
    """Split the text of a variable that holds several values, separated by commas or blanks."""
    return re.split(r"[,\s]+", text.strip())


def read_drivers(value: object) -> tuple[str, ...]:
    """Read a list of driver names."""
    try:
        return msgspec.convert(value, tuple[str, ...])
    except msgspec.ValidationError:
        raise TypeError(f"{value!r} is not a list of driver names") from None


def read_cpus(value: object) -> CpuSet:
    """Read a set of CPUs in the kernel's list format."""
    return parse_cpus(read_text(value))


def read_pools(value: object) -> dict[str, int]:
    """Read a table of hugepage devices and their pages."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is not a table of devices and their pages")
    return {str(name): read_count(pages) for name, pages in value.items()}


def read_xids(value: object) -> dict[int, XidOverride]:
    """Read a table of XID codes and their overrides."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is not a table of XIDs and their overrides")
    return {_read_xid(code): _read_override(code, text) for code, text in value.items()}


def _read_xid(code: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,8}", code):  # one spelling per code: "031" would be a second 31
        raise ValueError(f"{code!r} is not an XID; write its number, such as 31")
    return int(code)


def _read_override(code: str, text: object) -> XidOverride:
    try:
        return XidOverride(read_text(text))
    except (ValueError, TypeError):
        raise ValueError(f"{code}: {text!r} is not one of {', '.join(XidOverride)}") from None


# --- checks: limits of a field, whatever the origin of its value -------------------------------------------


def _check_range(show: Callable[[Any], str], low: float, high: float, value: Any) -> None:
    # Compared this way round, a NaN is out of range too.
    if not low <= value <= high:
        side, limit = ("over", high) if value > high else ("below", low)
        raise ValueError(f"{show(value)} is {side} the limit of {show(limit)}")


def duration_within(low_ns: int, high_ns: int) -> Callable[[Any], None]:
    """Return a function that raises ValueError for a duration outside the inclusive limits [ns]."""
    return partial(_check_range, format_duration, low_ns, high_ns)


def seconds_within(low_s: float, high_s: float) -> Callable[[Any], None]:
    """Return a function that raises ValueError for a duration outside the inclusive limits [s]."""
    return partial(_check_range, lambda s: format_duration(s * S), low_s, high_s)


def number_within(low: int, high: int) -> Callable[[Any], None]:
    """Return a function that raises ValueError for a number outside the inclusive limits."""
    return partial(_check_range, str, low, high)


def unless_zero(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a function like `check` that also accepts 0, which means never."""
    return lambda value: check(value) if value else None


def check_driver(name: str) -> None:
    """Check the name of a DRA driver: a DNS subdomain of at most 63 bytes.

    Raises:
        ValueError: The text has the name and what is wrong with it.
    """
    if len(name) > 63:
        raise ValueError(f"driver name {name!r} is {len(name)} bytes, limit 63")
    if not re.fullmatch(_LABELS, name):
        raise ValueError(f"driver name {name!r} is not a DNS subdomain, such as gpu.example.com")


def check_drivers(names: tuple[str, ...]) -> None:
    """Check names of drivers; each may occur once."""
    for name in names:
        check_driver(name)
        if names.count(name) > 1:
            raise ValueError(f"driver {name!r} is named {names.count(name)} times")


def check_node_name(name: str) -> None:
    """Check the name of a DRA pool: DNS subdomains separated by slashes, 253 bytes in all."""
    if len(name) > 253:
        raise ValueError(f"{name!r} is {len(name)} bytes, limit 253")
    if not all(re.fullmatch(_LABELS, part) for part in name.split("/")):
        rule = "DNS subdomains, with '/' between them"
        raise ValueError(f"{name!r} cannot name a DRA pool, whose name is {rule}; see --node-name")


def check_root(path: Path | str) -> None:
    """Check that the path of a root (sysfs, procfs, cgroupfs) fits into the native core's options."""
    if (size := len(os.fsencode(path))) > ROOT_BYTES:
        raise ValueError(f"{str(path)!r} is {size} bytes, limit {ROOT_BYTES}")


def check_pools(pools: dict[str, int]) -> None:
    """Check names and page counts of hugepage devices."""
    for name, pages in pools.items():
        if parse_pool_name(name) is None:
            if spelled := canonical_pool_name(name):
                raise ValueError(f"{name!r} is not a hugepage device; write {spelled!r}")
            raise ValueError(f"{name!r} is not a hugepage device, such as hugepages-2mi-node0")
        try:
            number_within(0, 2**40)(pages)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def check_library(name: str) -> None:
    """Check that a library's name fits into the native core's options."""
    if (size := len(os.fsencode(name))) > LIBRARY_BYTES:
        raise ValueError(f"{name[:40]!r}... is {size} bytes, limit {LIBRARY_BYTES}")


def check_xids(xids: dict[int, XidOverride]) -> None:
    """Check that XID codes are in range."""
    for code in xids:
        number_within(1, XID_MAX)(code)
