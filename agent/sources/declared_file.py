"""Parser of one driver's declaration: a TOML file to devices.

``KINDS`` defines the whole format: each kind of device with its keys. An unknown key is an error, as in the
configuration. Whether a declared device exists is decided by the rules. docs/declared-devices.md describes
the format.
"""

import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from agent.config.config import LEASE_MAX_S
from agent.config.values import (
    check_node_name,
    number_within,
    read_count,
    read_cpus,
    read_switch,
    read_text,
    read_whole_seconds,
    seconds_within,
)
from agent.errors import ConfigError, suggestion
from agent.model.cpuset import CpuSet
from agent.model.declared import (
    Declared,
    DeclaredCpus,
    DeclaredGpu,
    DeclaredHugepages,
    DeclaredMemory,
    DeclaredOther,
    DeclaredPart,
    DeclaredPci,
)
from agent.sources.pci import parse_address

LINE_BYTES: Final = 4096
"""Limit of a line: tomllib's time grows with the square of a dotted key's length, to an hour for 1 MiB."""
VERSION: Final = 1
DEVICES_MAX: Final = 4096
NAME_BYTES: Final = 63
LEASE_MIN_S: Final = 3
NUMA_MAX: Final = 1023
"""Highest id of a NUMA node: the kernel's largest CONFIG_NODES_SHIFT is 10."""
PAGES_MAX: Final = 2**40
INSTANCE_MAX: Final = 255
_SIZE: Final = re.compile(r"([1-9][0-9]{0,11})(Ki|Mi|Gi|Ti|Pi)")
_UNITS: Final[Mapping[str, int]] = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_LABEL: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_UUID: Final = re.compile(r"(?:GPU|MIG)-[-/0-9A-Za-z]{1,91}")
_KERNEL_DRIVER: Final = re.compile(r"[-.+\w]{1,63}", re.ASCII)


class DeclarationKey(NamedTuple):
    """Key that a device's table in the file may have."""

    name: str
    read: Callable[[object], Any]
    """Converts the value; raises ValueError or TypeError with the value and the limit."""
    needed: bool = False


# --- values ------------------------------------------------------------------------------------------------


def _within(low: int, high: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        count = read_count(value)
        number_within(low, high)(count)
        return count

    return read


def _size(value: object) -> int:
    """Parse a size in Kubernetes' notation, such as ``1Gi`` [bytes]."""
    found = _SIZE.fullmatch(read_text(value))
    if found is None:
        raise ValueError(f"{value!r} is not a size; write a number and Ki, Mi, Gi, Ti or Pi, such as 2Mi")
    return int(found[1]) * _UNITS[found[2]]


def _page_size(value: object) -> int:
    size_kib = _size(value) // 1024
    if size_kib & (size_kib - 1):
        raise ValueError(f"{value!r} is not a page size: {size_kib} KiB is not a power of two")
    return size_kib


def _cpus(value: object) -> CpuSet:
    cpus = read_cpus(value)
    if not cpus:
        raise ValueError(f"{value!r} names no CPU")
    return cpus


def _text_matching(pattern: re.Pattern[str], kind: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        text = read_text(value)
        if not pattern.fullmatch(text):
            raise ValueError(f"{text!r} is not {kind}")
        return text

    return read


def _name(value: object) -> str:
    name = read_text(value)
    if len(name) > NAME_BYTES:
        raise ValueError(f"{name!r} is {len(name.encode())} bytes, limit {NAME_BYTES}")
    return _text_matching(_LABEL, "a DNS label, such as gpu-3")(name)


def _lease_s(value: object) -> int:
    seconds = read_whole_seconds(value)
    seconds_within(LEASE_MIN_S, LEASE_MAX_S)(seconds)
    return seconds


def _pool(value: object) -> str:
    pool = read_text(value)
    check_node_name(pool)
    return pool


def _address(value: object) -> str:
    return parse_address(read_text(value))


# --- the format --------------------------------------------------------------------------------------------

_NUMA: Final = DeclarationKey("numa", _within(0, NUMA_MAX))
_UUID_KEY: Final = DeclarationKey("uuid", _text_matching(_UUID, "an NVIDIA UUID, such as GPU-... or MIG-..."))
_DRIVER: Final = DeclarationKey("driver", _text_matching(_KERNEL_DRIVER, "a kernel driver, such as nvme"))

_NAME: Final = DeclarationKey("name", _name, needed=True)
_LEASE: Final = DeclarationKey("lease", _lease_s)
_POOL: Final = DeclarationKey("pool", _pool)

COMMON: Final = (_NAME, DeclarationKey("kind", read_text, needed=True), _LEASE, _POOL)
KINDS: Final[Mapping[str, tuple[DeclarationKey, ...]]] = {
    "cpu": (
        DeclarationKey("cpus", _cpus, needed=True),
        _NUMA,
        DeclarationKey("exclusive", read_switch),
        DeclarationKey("isolated", read_switch),
    ),
    "gpu": (
        DeclarationKey("pci", _address),
        _UUID_KEY,
        DeclarationKey("gi", _within(0, INSTANCE_MAX)),
        DeclarationKey("ci", _within(0, INSTANCE_MAX)),
    ),
    "hugepages": (
        DeclarationKey("size", _page_size, needed=True),
        DeclarationKey("pages", _within(1, PAGES_MAX), needed=True),
        _NUMA._replace(needed=True),
    ),
    "memory": (DeclarationKey("size", _size), _NUMA._replace(needed=True)),
    "pci": (DeclarationKey("address", _address, needed=True), _DRIVER),
}


def _device_of_kind(kind: str, values: Mapping[str, Any]) -> DeclaredPart:
    """Create the device of `kind` from the values of its keys."""
    match kind:
        case "cpu":
            flags = values.get("exclusive", False), values.get("isolated", False)
            return DeclaredCpus(values["cpus"], values.get("numa"), *flags)
        case "hugepages":
            return DeclaredHugepages(values["size"], values["pages"], values["numa"])
        case "memory":
            return DeclaredMemory(values.get("size", 0), values["numa"])
        case "pci":
            return DeclaredPci(values["address"], values.get("driver", ""))
    if not {"pci", "uuid"} & values.keys():
        raise ConfigError("neither 'pci' nor 'uuid' is given; one must name the GPU")
    if ("gi" in values) != ("ci" in values):
        raise ConfigError("only one of 'gi' and 'ci': an instance is named by both")
    return DeclaredGpu(
        values.get("pci", ""), values.get("uuid", ""), values.get("gi", -1), values.get("ci", -1)
    )


# --- one device --------------------------------------------------------------------------------------------


def parse_device(row: Mapping[str, object], driver: str, pool: str) -> Declared:
    """Create one declared device from the values of its keys.

    Args:
        row: Values by key. A device without ``kind`` is known to its driver only; in a file that is an error.
        driver: Driver of the device.
        pool: Pool of the device.

    Raises:
        ConfigError: The text names the device, the key, and the value with its limit.
    """
    try:
        _value({_POOL.name: pool}, _POOL)
        if "kind" in row:
            return _device(row, driver, pool)
        _check_keys(row, (_NAME.name, _LEASE.name))
        return Declared(driver, pool, _value(row, _NAME), DeclaredOther(), _value(row, _LEASE) or 0)
    except ConfigError as error:
        raise ConfigError(f"device {str(row.get('name'))[:NAME_BYTES]!r}: {error}") from None


def _device(row: Mapping[str, Any], driver: str, pool: str) -> Declared:
    name, kind, lease_s, own_pool = (_value(row, key) for key in COMMON)
    if kind not in KINDS:
        raise ConfigError(f"kind: {kind!r} is not one of {', '.join(KINDS)}")
    keys = KINDS[kind]
    _check_keys(row, [key.name for key in (*COMMON, *keys)], scope=f" of kind {kind!r}")
    values = {key.name: value for key in keys if (value := _value(row, key)) is not None}
    return Declared(driver, own_pool or pool, name, _device_of_kind(kind, values), lease_s or 0)


# --- the file ----------------------------------------------------------------------------------------------


def parse_declaration(data: bytes, driver: str, node: str) -> tuple[Declared, ...]:
    """Parse the devices of one declaration file, in the file's order.

    Args:
        data: The whole file.
        driver: Driver of the file.
        node: Default pool of devices.

    Raises:
        ConfigError: The text names the device, the key, and the value with its limit, but not the file.
    """
    table = _table(data)
    _check_keys(table, ("version", "pool", "device"))
    version = _value(table, DeclarationKey("version", read_count, needed=True))
    if version != VERSION:
        raise ConfigError(f"version {version}; this agent reads version {VERSION}")
    pool = _value(table, _POOL) or node
    rows = table.get("device", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError("device: no list of tables; write [[device]] above each")
    if len(rows) > DEVICES_MAX:
        raise ConfigError(f"{len(rows)} devices, limit {DEVICES_MAX}")
    devices = []
    for number, row in enumerate(rows, start=1):
        try:
            devices.append(_device(row, driver, pool))
        except ConfigError as error:
            raise ConfigError(f"{device_label(number, row.get('name'))}: {error}") from None
    _check_names([device.name for device in devices])
    return tuple(devices)


def _check_names(names: Sequence[str]) -> None:
    numbers: dict[str, int] = {}
    for number, name in enumerate(names, start=1):
        other = numbers.setdefault(name, number)
        if other != number:
            raise ConfigError(f"{device_label(number, name)}: device {other} has the same name")


def device_label(number: int, name: object) -> str:
    """Return the label of a device in error texts: its number in the file, from 1, and its name if valid."""
    is_name = isinstance(name, str) and len(name) <= NAME_BYTES and _LABEL.fullmatch(name)
    return f"device {number} ({name})" if is_name else f"device {number}"


def _value(table: Mapping[str, Any], key: DeclarationKey) -> Any:
    """Return the value of a key; None if the table does not have it."""
    if key.name not in table:
        if key.needed:
            raise ConfigError(f"has no {key.name!r}")
        return None
    try:
        return key.read(table[key.name])
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{key.name}: {error}") from None


def _check_keys(table: Mapping[str, Any], known: Collection[str], scope: str = "") -> None:
    for name in table:
        if name not in known:
            raise ConfigError(f"{name!r}: no such key{scope}{suggestion(name[:NAME_BYTES], known)}")


def _table(data: bytes) -> dict[str, Any]:
    for number, line in enumerate(data.splitlines(), 1):
        if len(line) > LINE_BYTES:
            raise ConfigError(f"line {number} is {len(line)} bytes, limit {LINE_BYTES}")
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"byte {error.start} is not UTF-8") from None
    except ValueError as error:  # a too long integer raises a plain ValueError
        raise ConfigError(f"no TOML: {error}") from None
    except RecursionError:
        raise ConfigError("no TOML: nested too deeply") from None
