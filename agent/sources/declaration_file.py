"""Reader of the directory in which drivers declare their devices, and parser of one TOML file in it.

``KEYS_BY_KIND`` defines the keys of each kind of device; an unknown key is an error. Whether a declared
device exists is decided by the rules. docs/declared-devices.md describes the format.

The reader checks ownership and size. An invalid file removes no device: the devices of its last valid
version stay, together with the error.
"""

import errno
import os
import re
import stat
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.config.config import LEASE_MAX_S
from agent.config.files import CostlyToml, parse_toml
from agent.config.values import (
    check_driver_name,
    check_node_name,
    number_within,
    parse_bool,
    parse_count,
    parse_cpu_list,
    parse_string,
    parse_whole_seconds,
    seconds_within,
)
from agent.errors import ConfigError, ProbeError, suggestion
from agent.model.cpuset import CpuSet
from agent.model.declared_devices import (
    Declarations,
    DeclaredCpuDevice,
    DeclaredFile,
    DeclaredGpuDevice,
    DeclaredHugepageDevice,
    DeclaredMemoryDevice,
    DeclaredNicDevice,
    DeclaredOtherDevice,
    DeclaredPart,
    DeclaredPciDevice,
    DriverDevice,
)
from agent.sources.pci import parse_pci_address
from agent.system.files import CheckedDirectory, UnsafeDirectory

VERSION: Final = 1
DEVICES_MAX: Final = 4096
NAME_BYTES: Final = 63
LEASE_MIN_S: Final = 3
NUMA_ID_MAX: Final = 1023
"""Highest id of a NUMA node: the kernel's largest CONFIG_NODES_SHIFT is 10."""
PAGES_MAX: Final = 2**40
CHECKS_MAX: Final = 8
"""Largest number of health checks that a driver may declare for one device."""
MIG_ID_MAX: Final = 255
"""Highest id of a MIG GPU instance or compute instance."""
_SIZE: Final = re.compile(r"([1-9][0-9]{0,11})(Ki|Mi|Gi|Ti|Pi)")
_UNITS: Final[Mapping[str, int]] = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_LABEL: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_UUID: Final = re.compile(r"(?:GPU|MIG)-[-/0-9A-Za-z]{1,91}")
_RDMA_NAME: Final = re.compile(r"[-.\w]{1,63}", re.ASCII)
_KERNEL_DRIVER: Final = re.compile(r"[-.+\w]{1,63}", re.ASCII)


class DeclarationKey(NamedTuple):
    """Key that a device's TOML table may have, and how its value is converted."""

    name: str
    convert: Callable[[object], Any]
    """Function that converts the key's value; raises ValueError or TypeError with the value and the limit."""
    is_required: bool = False


def _integer_within(low: int, high: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        count = parse_count(value)
        number_within(low, high)(count)
        return count

    return read


def _parse_size_bytes(value: object) -> int:
    """Parse a size in Kubernetes' notation, such as ``1Gi`` [bytes]."""
    found = _SIZE.fullmatch(parse_string(value))
    if found is None:
        raise ValueError(f"{value!r} is not a size; write a number and Ki, Mi, Gi, Ti or Pi, such as 2Mi")
    return int(found[1]) * _UNITS[found[2]]


def _parse_page_size_kib(value: object) -> int:
    size_kib = _parse_size_bytes(value) // 1024
    if size_kib & (size_kib - 1):
        raise ValueError(f"{value!r} is not a page size: {size_kib} KiB is not a power of two")
    return size_kib


def _parse_cpus(value: object) -> CpuSet:
    cpus = parse_cpu_list(value)
    if not cpus:
        raise ValueError(f"{value!r} is an empty list of CPUs; name at least one, such as 0-3")
    return cpus


def _text_matching(pattern: re.Pattern[str], kind: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        text = parse_string(value)
        if not pattern.fullmatch(text):
            raise ValueError(f"{text!r} is not {kind}")
        return text

    return read


def parse_label(value: object, example: str) -> str:
    """Check that a value is a DNS label of at most 63 bytes, and return it.

    Raises ValueError or TypeError with the value and the limit.

    Args:
        example: Valid label, for the error text.
    """
    name = parse_string(value)
    if len(name) > NAME_BYTES:
        raise ValueError(f"{name!r} is {len(name.encode())} bytes, limit {NAME_BYTES}")
    return _text_matching(_LABEL, f"a DNS label, such as {example}")(name)


def _parse_lease_s(value: object) -> int:
    seconds = parse_whole_seconds(value)
    seconds_within(LEASE_MIN_S, LEASE_MAX_S)(seconds)
    return seconds


def _parse_pool(value: object) -> str:
    pool = parse_string(value)
    check_node_name(pool)
    return pool


def _parse_checks(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list of names of checks")
    if len(value) > CHECKS_MAX:
        raise ValueError(f"{len(value)} checks, limit {CHECKS_MAX}")
    names = tuple(parse_label(name, "link-up") for name in value)
    if len({*names}) < len(names):
        raise ValueError(f"{', '.join(names)}: name each check once")
    return names


def _parse_address(value: object) -> str:
    return parse_pci_address(parse_string(value))


# --- the format --------------------------------------------------------------------------------------------

_NUMA: Final = DeclarationKey("numa", _integer_within(0, NUMA_ID_MAX))
_UUID_KEY: Final = DeclarationKey("uuid", _text_matching(_UUID, "an NVIDIA UUID, such as GPU-... or MIG-..."))
_DRIVER: Final = DeclarationKey("driver", _text_matching(_KERNEL_DRIVER, "a kernel driver, such as nvme"))

_NAME: Final = DeclarationKey("name", partial(parse_label, example="gpu-3"), is_required=True)
_LEASE: Final = DeclarationKey("lease", _parse_lease_s)
_POOL: Final = DeclarationKey("pool", _parse_pool)

_CHECKS: Final = DeclarationKey("checks", _parse_checks)

COMMON_KEYS: Final = (_NAME, DeclarationKey("kind", parse_string), _LEASE, _POOL, _CHECKS)
KEYS_BY_KIND: Final[Mapping[str, tuple[DeclarationKey, ...]]] = {
    "cpu": (
        DeclarationKey("cpus", _parse_cpus, is_required=True),
        _NUMA,
        DeclarationKey("exclusive", parse_bool),
        DeclarationKey("isolated", parse_bool),
    ),
    "gpu": (
        DeclarationKey("pci", _parse_address),
        _UUID_KEY,
        DeclarationKey("gi", _integer_within(0, MIG_ID_MAX)),
        DeclarationKey("ci", _integer_within(0, MIG_ID_MAX)),
    ),
    "hugepages": (
        DeclarationKey("size", _parse_page_size_kib, is_required=True),
        DeclarationKey("pages", _integer_within(1, PAGES_MAX), is_required=True),
        _NUMA._replace(is_required=True),
    ),
    "memory": (DeclarationKey("size", _parse_size_bytes), _NUMA._replace(is_required=True)),
    "nic": (
        DeclarationKey("pci", _parse_address),
        DeclarationKey("rdma", _text_matching(_RDMA_NAME, "the name of an RDMA device, such as mlx5_0")),
    ),
    "pci": (DeclarationKey("address", _parse_address, is_required=True), _DRIVER),
}


def _device_of_kind(kind: str, values: Mapping[str, Any]) -> DeclaredPart:
    """Create the declared device of a kind (cpu, memory, gpu, ...) from the values of its keys."""
    match kind:
        case "cpu":
            flags = values.get("exclusive", False), values.get("isolated", False)
            return DeclaredCpuDevice(values["cpus"], values.get("numa"), *flags)
        case "hugepages":
            return DeclaredHugepageDevice(values["size"], values["pages"], values["numa"])
        case "memory":
            return DeclaredMemoryDevice(values.get("size", 0), values["numa"])
        case "pci":
            return DeclaredPciDevice(values["address"], values.get("driver", ""))
        case "nic":
            if len(values) != 1:
                both = "both 'pci' and 'rdma'" if values else "neither 'pci' nor 'rdma'"
                raise ConfigError(f"NIC has {both}; give one of them")
            return DeclaredNicDevice(values.get("pci", ""), values.get("rdma", ""))
    if not {"pci", "uuid"} & values.keys():
        raise ConfigError("GPU has neither 'pci' nor 'uuid'; give one of them")
    if ("gi" in values) != ("ci" in values):
        raise ConfigError("only one of 'gi' and 'ci' is given; a MIG instance needs both")
    return DeclaredGpuDevice(
        values.get("pci", ""), values.get("uuid", ""), values.get("gi", -1), values.get("ci", -1)
    )


# --- one device --------------------------------------------------------------------------------------------


def parse_declared_device(values: Mapping[str, object], driver: str, pool: str) -> DriverDevice:
    """Create the device that a driver declares by the values of its keys.

    Args:
        values: Values by key. Without ``kind`` the device stands for no hardware of the host.
        driver: Name of the DRA driver.
        pool: Pool of a device that names no pool.

    Raises:
        ConfigError: The text names the device, the key, and the value with its limit.
    """
    try:
        _converted_value({_POOL.name: pool}, _POOL)
        if "kind" in values:
            return _parse_device_table(values, driver, pool)
        _check_keys_known(values, (_NAME.name, _LEASE.name))
        return DriverDevice(
            driver,
            pool,
            _converted_value(values, _NAME),
            DeclaredOtherDevice(),
            _converted_value(values, _LEASE) or 0,
        )
    except ConfigError as error:
        raise ConfigError(f"device {str(values.get('name'))[:NAME_BYTES]!r}: {error}") from None


def _parse_device_table(row: Mapping[str, Any], driver: str, pool: str) -> DriverDevice:
    name, kind, lease_s, own_pool, checks = (_converted_value(row, key) for key in COMMON_KEYS)
    if kind is None and checks:
        _check_keys_known(row, [key.name for key in COMMON_KEYS], scope=" of a device without kind")
        return DriverDevice(driver, own_pool or pool, name, DeclaredOtherDevice(), lease_s or 0, checks)
    if kind is None:
        raise ConfigError("required key 'kind' is missing")
    if kind not in KEYS_BY_KIND:
        raise ConfigError(f"kind: {kind!r} is not one of {', '.join(KEYS_BY_KIND)}")
    keys = KEYS_BY_KIND[kind]
    _check_keys_known(row, [key.name for key in (*COMMON_KEYS, *keys)], scope=f" of kind {kind!r}")
    values = {key.name: value for key in keys if (value := _converted_value(row, key)) is not None}
    part = _device_of_kind(kind, values)
    return DriverDevice(driver, own_pool or pool, name, part, lease_s or 0, checks or ())


# --- the file ----------------------------------------------------------------------------------------------


def parse_declaration(data: bytes, driver: str, default_pool: str) -> tuple[DriverDevice, ...]:
    """Parse the devices of one declaration file, in the file's order.

    Args:
        data: The whole file.
        driver: Name of the DRA driver that declares the devices.
        default_pool: Pool of devices that name no pool.

    Raises:
        ConfigError: The text names the device, the key, and the value with its limit, but not the file.
    """
    table = _parse_toml(data)
    _check_keys_known(table, ("version", "pool", "device"))
    version = _converted_value(table, DeclarationKey("version", parse_count, is_required=True))
    if version != VERSION:
        raise ConfigError(f"file format version {version} is not supported; write version = {VERSION}")
    pool = _converted_value(table, _POOL) or default_pool
    rows = table.get("device", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError("'device' is not a list of tables; write [[device]] above each device")
    if len(rows) > DEVICES_MAX:
        raise ConfigError(f"the file declares {len(rows)} devices, limit {DEVICES_MAX}")
    devices = []
    for number, row in enumerate(rows, start=1):
        try:
            devices.append(_parse_device_table(row, driver, pool))
        except ConfigError as error:
            raise ConfigError(f"{device_label(number, row.get('name'))}: {error}") from None
    _check_names_unique([device.name for device in devices])
    return tuple(devices)


def _check_names_unique(names: Sequence[str]) -> None:
    numbers: dict[str, int] = {}
    for number, name in enumerate(names, start=1):
        other = numbers.setdefault(name, number)
        if other != number:
            raise ConfigError(f"{device_label(number, name)}: device {other} has the same name")


def device_label(number: int, name: object) -> str:
    """Return the name of a declared device in error texts: ``device 3 (gpu-2)``.

    Args:
        number: Position of the device in the file, from 1.
        name: Value of the key ``name``, which is left out if it is not valid.
    """
    is_name = isinstance(name, str) and len(name) <= NAME_BYTES and _LABEL.fullmatch(name)
    return f"device {number} ({name})" if is_name else f"device {number}"


def _converted_value(table: Mapping[str, Any], key: DeclarationKey) -> Any:
    """Return the converted value of a key in a device's TOML table; None: the table does not have the key."""
    if key.name not in table:
        if key.is_required:
            raise ConfigError(f"required key {key.name!r} is missing")
        return None
    try:
        return key.convert(table[key.name])
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{key.name}: {error}") from None


def _check_keys_known(table: Mapping[str, Any], known: Collection[str], scope: str = "") -> None:
    for name in table:
        if name not in known:
            raise ConfigError(f"unknown key {name!r}{scope}{suggestion(name[:NAME_BYTES], known)}")


def _parse_toml(data: bytes) -> dict[str, Any]:
    try:
        return parse_toml(data.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text: byte {error.start} is invalid") from None
    except CostlyToml as error:
        raise ConfigError(f"line {error.line}: {error}" if error.line else str(error)) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"is not valid TOML: {error}") from None


# --- the directory -----------------------------------------------------------------------------------------

DIRECTORY: Final = "devices.d"
"""Name of the directory of declaration files, in the agent's runtime directory."""
DIRECTORY_MODE: Final = 0o755
"""Mode of the directory, whatever the umask."""
SUFFIX: Final = ".toml"
FILE_BYTES: Final = 1 << 20
"""Largest accepted declaration file [bytes]."""
FILES_MAX: Final = 64
ERROR_CHARS: Final = 1000
"""Length to which the text of an error in a declaration file is cut [characters].

A quoted value can be as long as the file.
"""


class _FileReadError(ConfigError):
    """A declaration file could not be read, although a later read of the unchanged file may succeed."""


def read_declarations(
    directory: Path,
    previous: Declarations,
    default_pool: str,
    on_read_error: Callable[[], None] = lambda: None,
) -> Declarations:
    """Read the declaration files of all drivers; an absent directory yields an empty result.

    Args:
        directory: ``devices.d`` of the runtime directory.
        previous: Result of the last call; devices of a file that has become invalid are taken from it.
        default_pool: Pool of devices that name no pool.
        on_read_error: Called for each file that could not be read, for example without free descriptors. A
            later read may succeed although the file does not change.

    Raises:
        ProbeError: The directory cannot be read, or another user could replace its files.
    """
    try:
        with CheckedDirectory(directory) as opened:
            return _read_directory(opened, previous, default_pool, on_read_error)
    except FileNotFoundError:
        return ()
    except UnsafeDirectory as error:
        raise ProbeError(f"declaration directory {directory}: not read: {error.reason}") from None
    except OSError as error:
        raise ProbeError(f"declaration directory {directory}: cannot be listed: {error.strerror}") from None


def _read_directory(
    directory: CheckedDirectory,
    previous: Declarations,
    default_pool: str,
    on_read_error: Callable[[], None],
) -> Declarations:
    names = [name for name in directory.names() if name.endswith(SUFFIX) and name[0] != "."]
    present = {_driver_of_file(name) for name in names}
    known = {file.driver: file.devices for file in previous if file.driver in present}
    names.sort(
        key=lambda name: (not known.get(_driver_of_file(name)), name)
    )  # the newest file exceeds the limit
    read: list[tuple[DeclaredFile, Path]] = []
    for name in names[:FILES_MAX]:
        driver = _driver_of_file(name)
        before = known.get(driver, ())
        if file := _read_declaration(directory, name, driver, before, default_pool, on_read_error):
            read.append((file, directory.path / name))
    # a file with fewer devices than before makes room for another one
    read.sort(key=lambda found: len(found[0].devices) > len(known.get(found[0].driver, ())))
    files: dict[str, DeclaredFile] = {}
    for file, path in read:
        files[file.driver] = within = _within_device_limit(file, known, path)
        known[file.driver] = within.devices
    for name in names[FILES_MAX : FILES_MAX + 1]:
        shown = _printable(str(directory.path / name))
        text = f"declaration file {shown}: not read: one of {len(names)} files, limit {FILES_MAX}"
        files[_driver_of_file(name)] = DeclaredFile(_driver_of_file(name), (), text)
    return tuple(files[driver] for driver in sorted(files))


def _read_declaration(
    directory: CheckedDirectory,
    name: str,
    driver: str,
    before: tuple[DriverDevice, ...],
    node: str,
    on_read_error: Callable[[], None],
) -> DeclaredFile | None:
    """Read one driver's declaration file; None: the file no longer exists."""
    try:
        return DeclaredFile(driver, _read_devices(directory, name, driver, node))
    except FileNotFoundError:
        return None
    except ConfigError as error:
        if isinstance(error, _FileReadError):
            on_read_error()
        shown = _printable(str(directory.path / name))
        return DeclaredFile(driver, before, f"declaration file {shown}: {error}"[:ERROR_CHARS])


def _within_device_limit(
    file: DeclaredFile, known: Mapping[str, tuple[DriverDevice, ...]], path: Path
) -> DeclaredFile:
    """Return a declaration file if the devices of all drivers are within DEVICES_MAX.

    Otherwise return its previous devices with an error, so that a growing file never removes devices of other
    drivers.

    Args:
        file: New content of the file.
        known: Devices of the files that were read before this one.
        path: Path of the file.
    """
    others = sum(len(devices) for driver, devices in known.items() if driver != file.driver)
    if others + len(file.devices) <= DEVICES_MAX:
        return file
    text = f"declares {len(file.devices)} devices, other drivers {others}; limit of all: {DEVICES_MAX}"
    return DeclaredFile(
        file.driver, known.get(file.driver, ()), f"declaration file {_printable(str(path))}: {text}"
    )


def _driver_of_file(name: str) -> str:
    return _printable(name.removesuffix(SUFFIX))


def _printable(name: str) -> str:
    """Escape a file name for error texts: it can hold any bytes."""
    return name.encode("ascii", "backslashreplace").decode()


def _read_devices(directory: CheckedDirectory, name: str, driver: str, node: str) -> tuple[DriverDevice, ...]:
    try:
        check_driver_name(driver)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        # fails for a symbolic link, and does not wait for the writer of a FIFO
        fd = directory.open(name, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError("is a symbolic link") from None
        raise _FileReadError(str(error.strerror)) from None
    try:
        check_owner_and_mode(os.fstat(fd), {0, os.geteuid()})
        with open(fd, "rb", closefd=False) as file:
            data = file.read(FILE_BYTES + 1)
    except OSError as error:
        raise _FileReadError(str(error.strerror)) from None
    finally:
        os.close(fd)
    if len(data) > FILE_BYTES:
        raise ConfigError(f"is larger than {FILE_BYTES} bytes, the limit")
    return parse_declaration(data, driver, node)


def check_owner_and_mode(status: os.stat_result, allowed_uids: Iterable[int]) -> None:
    """Check that only the file's owner can write it, and that the owner is allowed to declare devices.

    Raises:
        ConfigError: The file is not regular, has another owner, or is writable by others.
    """
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError("is not a regular file")
    if status.st_uid not in allowed_uids:
        users = " or ".join(map(str, sorted(allowed_uids)))
        raise ConfigError(f"belongs to user id {status.st_uid}; must belong to user id {users}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"is writable by group or others: mode {mode:04o}; set at most 0644")
