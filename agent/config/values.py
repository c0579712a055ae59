"""Parsers and range checks of single configuration values.

Errors are ValueError or TypeError; the text has the value and the limit, and agent.config.config puts the
setting's file and key, variable or flag before it.
"""

import os
import re
import socket
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from agent.devices.inventory import DeviceKind, canonical_pool_name, parse_pool_name
from agent.errors import suggestion
from agent.model.cpuset import CpuSet, parse_cpus
from agent.model.health import XidOverride
from agent.model.socket_address import SOCKET_PATH_LIMIT, ListenAddress
from agent.system.files import absolute_path

MS: Final = 1_000_000
S: Final = 1000 * MS
HOUR: Final = 3600 * S
DAY: Final = 24 * HOUR
SIZES: Final = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
UNITS: Final = {"h": HOUR, "m": 60 * S, "s": S, "ms": MS, "us": 1000, "ns": 1}

DRIVERS_MAX: Final = 64
"""Largest number of DRA drivers: each has a socket, and all sockets share the agent's descriptors."""
ROOT_BYTES: Final = 200  # size of a root in the C core's options
LIBRARY_BYTES: Final = 4000  # size of the library's name there
XID_MAX: Final = 999  # NVML's code for an unknown XID; real codes are far below
SWITCH_VALUES: Final = {"1": True, "true": True, "0": False, "false": False}
"""Texts that the environment variable of a boolean setting may have, with their values."""
LOG_FORMATS: Final = ("text", "json")
HTTP_PORT: Final = 14680
"""Port of the HTTP server for an address without a port; Prometheus' list of default ports has it free."""
LISTEN_MAX: Final = 4
"""Largest number of addresses of the agent's HTTP server."""
_LABELS: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"

# --- readers: value in TOML, flag or variable to the field's value -----------------------------------------


def parse_duration(value: object) -> int:
    """Parse a duration such as ``"100ms"`` or ``"1.5s"`` into nanoseconds.

    Raises:
        ValueError: The text is not one number and one unit (ns, us, ms, s, m, h, d).
    """
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?) *(ns|us|ms|s|m|h|d)", str(value).strip())
    if found is None:
        raise ValueError(f"{value!r} is not a duration; write a number and its unit, such as 100ms or 1s")
    return int(Decimal(found[1]) * {"d": DAY, **UNITS}[found[2]])


def format_duration(ns: float) -> str:
    """Format a duration [ns] as a whole number of the largest possible unit: ``10ms``, ``90s``, ``1h``."""
    unit = next((u for u, size in UNITS.items() if ns >= size and round(ns) % size == 0), "ns")
    return f"{ns / UNITS[unit]:.0f}{unit}" if ns else "0s"


def parse_size(value: object) -> int:
    """Parse a size such as ``"4MiB"`` into bytes.

    Raises:
        ValueError: The text is not a whole number and one unit (KiB, MiB, GiB), or 0.
    """
    if str(value).strip() == "0":
        return 0
    found = re.fullmatch(r"([0-9]{1,12}) *(KiB|MiB|GiB)", str(value).strip())
    if found is None:
        raise ValueError(f"{value!r} is not a size; write a whole number and its unit, such as 4MiB")
    return int(found[1]) * SIZES[found[2]]


def format_size(size: int) -> str:
    """Format a size [bytes] as a whole number of the largest possible unit: ``4MiB``, ``0``."""
    unit = next((u for u, unit_size in SIZES.items() if size >= unit_size and size % unit_size == 0), "")
    return f"{size // SIZES.get(unit, 1)}{unit}"


def parse_whole_seconds(value: object) -> int:
    """Parse a duration that is a whole number of seconds; return it in seconds."""
    seconds, rest = divmod(parse_duration(value), S)
    if rest:
        raise ValueError(f"{value!r} is not a whole number of seconds; write a value such as 30s or 5m")
    return seconds


def parse_string(value: object) -> str:
    """Return `value` if it is a string, else raise TypeError: an unquoted number is likely a mistake."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string; put it in quotes")
    return value


def parse_count(value: object) -> int:
    """Return `value` if it is a whole number; raise TypeError for others, also for a boolean."""
    try:
        return msgspec.convert(value, int)
    except msgspec.ValidationError:
        raise TypeError(f"{value!r} is not a whole number; write digits without quotes") from None


def parse_path(value: object) -> Path:
    """Return the path in `value`, made absolute from the working directory."""
    if not (text := parse_string(value)) or "\0" in text:
        raise ValueError(f"{text!r} is not a path; write the path of a file or directory")
    return Path(absolute_path(text))


def parse_bool(value: object) -> bool:
    """Return `value` if it is a boolean; raise TypeError for others, such as 1 and "yes"."""
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false; write one of them without quotes")
    return value


def parse_library(value: object) -> str:
    """Return the name of a library for the dynamic linker; a name with a slash is made an absolute path."""
    text = parse_string(value)
    if not text or "\0" in text:
        raise ValueError(f"{text!r} is not the name or path of a library, such as libnvidia-ml.so.1")
    return absolute_path(text) if "/" in text else text


def parse_cgroup_root(value: object) -> str:
    """Return a cgroup's path from the root of the cgroup tree; the first slash of `value` is optional."""
    parts = parse_string(value).strip("/").split("/")
    if ".." in parts or "\0" in parse_string(value):
        raise ValueError(f"cgroup {value!r} is outside the cgroup tree; write it without '..'")
    return "/" + "/".join(part for part in parts if part not in {"", "."})


def split_values(text: str) -> list[str]:
    """Split the text of an environment variable with several values, separated by commas or blanks."""
    return re.split(r"[,\s]+", text.strip())


def parse_names(value: object) -> tuple[str, ...]:
    try:
        return msgspec.convert(value, tuple[str, ...])
    except msgspec.ValidationError:
        raise TypeError(f"{value!r} is not a list of names; write it in brackets, as in ['a', 'b']") from None


def parse_listen_addresses(value: object) -> tuple[ListenAddress, ...]:
    """Parse the addresses of the HTTP server, ``ADDRESS:PORT``, ``ADDRESS`` or ``unix:PATH``."""
    try:
        texts = msgspec.convert(value, tuple[str, ...])
    except msgspec.ValidationError:
        raise TypeError(f"{value!r} is not a list of addresses, such as ['localhost:14680']") from None
    return tuple(map(_parse_listen_address, texts))


def _parse_listen_address(text: str) -> ListenAddress:
    if text.startswith("unix:"):
        return ListenAddress("", path=str(parse_path(text.removeprefix("unix:"))))
    found = re.fullmatch(r"(?:\[(?P<ipv6>[^]]*)\]|(?P<host>[^:]*))(?::(?P<port>[0-9]{1,5}))?", text)
    if found is None or not text:
        raise ValueError(
            f"{text!r} is not an address; write localhost:{HTTP_PORT}, [::1]:{HTTP_PORT} or unix:/path"
        )
    if not (host := found["ipv6"] or found["host"]):
        raise ValueError(
            f"address {text!r} has a port only; write localhost{text}, or 0.0.0.0{text} for all addresses of "
            "the host"
        )
    host = "127.0.0.1" if host == "localhost" else host
    try:
        socket.inet_pton(socket.AF_INET6 if found["ipv6"] else socket.AF_INET, host)
    except (OSError, ValueError):  # ValueError: a NUL character
        raise ValueError(
            f"address {text!r}: {host!r} is neither localhost nor an IP address; host names are not resolved"
        ) from None
    port = int(found["port"] or HTTP_PORT)
    number_within(1, 65535)(port)
    return ListenAddress(host, port)


def parse_cpu_list(value: object) -> CpuSet:
    """Parse a set of CPUs in the kernel's list format, such as ``0-3,8``."""
    return parse_cpus(parse_string(value))


def parse_hugepage_pools(value: object) -> dict[str, int]:
    """Parse the table of hugepage devices; return the expected number of pages by device."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is not a table of hugepage devices and their number of pages")
    pools: dict[str, int] = {}
    for name, pages in value.items():
        try:
            pools[name] = parse_count(pages)
        except TypeError as error:
            raise TypeError(f"hugepage device {name}: pages: {error}") from None
    return pools


def parse_xid_overrides(value: object) -> dict[int, XidOverride]:
    """Parse the table of severity overrides; return the operator's override by XID number."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is not a table of XIDs and their severities")
    return {_parse_xid(code): _parse_override(code, text) for code, text in value.items()}


def _parse_xid(code: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,8}", code):  # one spelling per code: "031" would be a second 31
        raise ValueError(f"{code!r} is not an XID; write its number, such as 31")
    return int(code)


def _parse_override(code: str, text: object) -> XidOverride:
    try:
        return XidOverride(parse_string(text))
    except (ValueError, TypeError):
        raise ValueError(f"XID {code}: severity {text!r} is not one of {', '.join(XidOverride)}") from None


# --- checks: limits of a field, whatever the origin of its value -------------------------------------------


def _check_range(show: Callable[[Any], str], low: float, high: float, value: Any) -> None:
    # Compared this way round, a NaN is out of range too.
    if not low <= value <= high:
        side, limit = ("over", high) if value > high else ("below", low)
        raise ValueError(f"{show(value)} is {side} the limit of {show(limit)}")


def duration_within(low_ns: int, high_ns: int) -> Callable[[Any], None]:
    """Return a check that raises ValueError unless a duration is from `low_ns` to `high_ns` [ns]."""
    return partial(_check_range, format_duration, low_ns, high_ns)


def seconds_within(low_s: float, high_s: float) -> Callable[[Any], None]:
    """Return a check that raises ValueError unless a duration is from `low_s` to `high_s` [s]."""
    return partial(_check_range, lambda s: format_duration(s * S), low_s, high_s)


def number_within(low: int, high: int) -> Callable[[Any], None]:
    """Return a check that raises ValueError unless a number is from `low` to `high`."""
    return partial(_check_range, str, low, high)


def size_within(low: int, high: int) -> Callable[[Any], None]:
    """Return a check that raises ValueError unless a size is from `low` to `high` [bytes]."""
    return partial(_check_range, format_size, low, high)


def unless_zero(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a check that accepts 0, which means never, and passes all other values to `check`."""
    return lambda value: check(value) if value else None


def check_driver_name(name: str) -> None:
    """Check the name of a DRA driver: a DNS subdomain of at most 63 bytes.

    Raises:
        ValueError: The name is not valid.
    """
    if len(name) > 63:
        raise ValueError(f"driver name {name!r} is {len(name)} bytes long, limit 63; shorten it")
    if not re.fullmatch(_LABELS, name):
        raise ValueError(f"driver name {name!r} is not a DNS subdomain, such as gpu.example.com")


def check_driver_names(names: tuple[str, ...]) -> None:
    """Check the names of DRA drivers: at most DRIVERS_MAX, each valid and given once."""
    if len(names) > DRIVERS_MAX:
        raise ValueError(f"{len(names)} drivers are given, limit {DRIVERS_MAX}; name fewer drivers")
    for name in names:
        check_driver_name(name)
        if names.count(name) > 1:
            raise ValueError(f"driver {name!r} is given {names.count(name)} times; give it once")


def check_node_name(name: str) -> None:
    """Check the name of a DRA pool: DNS subdomains separated by slashes, at most 253 bytes in all."""
    if len(name) > 253:
        raise ValueError(f"pool name {name!r} is {len(name)} bytes long, limit 253; shorten it")
    if not all(re.fullmatch(_LABELS, part) for part in name.split("/")):
        rule = "DNS subdomains, with '/' between them"
        raise ValueError(f"pool name {name!r} is not valid: it must be {rule}; see --node-name")


def check_namespace(name: str) -> None:
    """Check the name of a Kubernetes namespace: a DNS label of at most 63 bytes; empty: the default."""
    if name and not re.fullmatch(r"(?=.{1,63}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?", name):
        raise ValueError(f"namespace {name!r} is not a DNS label of at most 63 bytes, such as kube-system")


def check_device_kinds(names: tuple[str, ...]) -> None:
    """Check that all names are kinds of devices; raises ValueError."""
    known = [str(kind) for kind in DeviceKind]
    for name in names:
        if name not in known:
            raise ValueError(
                f"device kind {name!r} is not one of {', '.join(known)}{suggestion(name, known)}"
            )


def check_log_format(name: str) -> None:
    """Check that a log format with this name exists; raises ValueError."""
    if name not in LOG_FORMATS:
        raise ValueError(
            f"log format {name!r} is not one of {', '.join(LOG_FORMATS)}{suggestion(name, LOG_FORMATS)}"
        )


def check_listen_addresses(addresses: tuple[ListenAddress, ...]) -> None:
    """Check the addresses of the HTTP server: at most LISTEN_MAX, no duplicates, no socket path too long."""
    if len(addresses) > LISTEN_MAX:
        raise ValueError(f"{len(addresses)} addresses are given, limit {LISTEN_MAX}; name fewer")
    for address in addresses:
        if addresses.count(address) > 1:
            raise ValueError(f"address {address} is given {addresses.count(address)} times; give it once")
        if (size := len(os.fsencode(address.path))) > SOCKET_PATH_LIMIT:
            raise ValueError(
                f"address {address}: socket path is {size} bytes, limit {SOCKET_PATH_LIMIT}; shorten it"
            )


def check_path_length(path: Path | str) -> None:
    """Check the length of a path of sysfs, procfs, cgroupfs or kmsg.

    The path must fit into the options of the C core.
    """
    if (size := len(os.fsencode(path))) > ROOT_BYTES:
        raise ValueError(f"path {str(path)!r} is {size} bytes long, limit {ROOT_BYTES}; use a shorter path")


def check_hugepage_pools(pools: dict[str, int]) -> None:
    """Check the names of hugepage devices and their expected page counts."""
    for name, pages in pools.items():
        if parse_pool_name(name) is None:
            if spelled := canonical_pool_name(name):
                raise ValueError(f"{name!r} is not a hugepage device; write {spelled!r}")
            raise ValueError(f"{name!r} is not a hugepage device, such as hugepages-2mi-node0")
        try:
            number_within(0, 2**40)(pages)
        except ValueError as error:
            raise ValueError(f"hugepage device {name}: pages: {error}") from None


def check_library_length(name: str) -> None:
    """Check that a library's name fits into the options of the C core."""
    if (size := len(os.fsencode(name))) > LIBRARY_BYTES:
        raise ValueError(
            f"library {name[:40]!r}... is {size} bytes long, limit {LIBRARY_BYTES}; use a shorter path"
        )


def check_xids(xids: dict[int, XidOverride]) -> None:
    for code in xids:
        number_within(1, XID_MAX)(code)
