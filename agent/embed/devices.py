"""Devices that a Python driver declares: a name and the hardware that the device consists of.

The fields are the keys of a declaration file, and the same code validates them.

The module also defines the format of these devices in ResourceSlices, and divides the devices into slices.
All functions are pure.

A pool's devices are divided in their order, 64 to a slice: that is the limit of a slice with a taint, so no
device moves to another slice when it gets a taint. A change of devices raises the pool's generation (a field
of ResourceSlices), so that the scheduler never uses a part of the change. A change of taints does not raise
the generation.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Final

from agent.cgroup_audit.pod_model import parse_quantity
from agent.config.values import check_node_name
from agent.driver.taint_callback_publisher import taint_objects
from agent.errors import ConfigError
from agent.model.claim import DeviceRef
from agent.model.declared_devices import DriverDevice
from agent.model.health import TAINTED_SLICE_DEVICES_MAX, Effect, Taint, Taints
from agent.model.json_values import JsonObject
from agent.sources.declaration_file import parse_declared_device


@dataclass(frozen=True, slots=True)
class Cpus:
    """CPUs that a declared device consists of."""

    cpus: str
    """CPUs of the device in the kernel's list format, ``0-3,8``."""
    _: KW_ONLY
    numa: int | None = None
    """NUMA node that all CPUs of the device must belong to; None: any."""
    exclusive: bool = False
    """Whether only the claim's containers run on these CPUs; they must not be throttled."""
    isolated: bool = False
    """Whether the CPUs of the device must be in the kernel's isolated set."""


@dataclass(frozen=True, slots=True)
class Hugepages:
    """Hugepages of one size and one NUMA node that a declared device consists of."""

    size: str
    """Page size as a Kubernetes quantity, ``2Mi``."""
    _: KW_ONLY
    pages: int
    """Number of hugepages that the device consists of."""
    numa: int = 0
    """NUMA node that the hugepages belong to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of one NUMA node that a declared device consists of."""

    size: str = ""
    """Size of the memory as a Kubernetes quantity, ``64Gi``; empty: unspecified."""
    numa: int = 0
    """NUMA node that the memory belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """GPU or MIG instance of a declared device, identified by PCI address, UUID or both."""

    pci: str = ""
    """PCI address of the GPU, ``0000:3b:00.0``."""
    uuid: str = ""
    """UUID of the GPU (``GPU-...``) or of the MIG instance (``MIG-...``)."""
    gi: int | None = None
    """ID of the MIG GPU instance; set only together with ``ci``."""
    ci: int | None = None
    """ID of the MIG compute instance; set only together with ``gi``."""


@dataclass(frozen=True, slots=True)
class Pci:
    """PCI function of a declared device that is neither a GPU nor an RDMA network adapter."""

    address: str
    """Address of the PCI function, ``0000:3b:00.0``."""
    _: KW_ONLY
    driver: str = ""
    """Kernel driver that must be bound to the PCI function; empty: any driver or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """RDMA network adapter of a declared device, identified by PCI address or RDMA name."""

    pci: str = ""
    """PCI address of the network adapter, ``0000:41:00.0``; set only without ``rdma``."""
    rdma: str = ""
    """RDMA name of the network adapter, ``mlx5_0``; set only without ``pci``."""


DevicePart = Cpus | Hugepages | Memory | Gpu | Pci | Nic
_KINDS: Final[Mapping[type, str]] = {
    Cpus: "cpu",
    Hugepages: "hugepages",
    Memory: "memory",
    Gpu: "gpu",
    Pci: "pci",
    Nic: "nic",
}


@dataclass(frozen=True, slots=True)
class Device:
    """One device of the driver. Its fields are validated when it is created.

    Missing hardware is not an error here; the device's health shows it.

    Raises:
        ConfigError: A value is invalid.
    """

    name: str
    """Name in the driver's ResourceSlice: a DNS label."""
    part: DevicePart | None = None
    """Hardware of the device; None: only the driver's health checks determine its health."""
    _: KW_ONLY
    pool: str = ""
    """Pool in the ResourceSlice; empty: the name of the Kubernetes node."""
    lease_s: int = 0
    """Time that the kubelet considers a reported health valid [s]; 0: the configured lease."""

    def __post_init__(self) -> None:
        self.declare("any", "any")

    def declare(self, driver: str, node: str) -> DriverDevice:
        """Convert the device to the health engine's format.

        The name of the Kubernetes `node` is the default pool.
        """
        row: dict[str, object] = {"name": self.name}
        if self.lease_s:
            row["lease"] = f"{self.lease_s}s"
        if self.part is not None:
            if type(self.part) not in _KINDS:
                kinds = ", ".join(kind.__name__ for kind in _KINDS)
                raise ConfigError(f"device {self.name!r}: part: {self.part!r} is not one of {kinds}")
            row["kind"] = _KINDS[type(self.part)]
            values = {field.name: getattr(self.part, field.name) for field in fields(self.part)}
            row |= {key: value for key, value in values.items() if value not in (None, "")}
        return parse_declared_device(row, driver, self.pool or node)


# --- ResourceSlices ----------------------------------------------------------------------------------------

OLD_TAINTS_MAX: Final = 4
"""Largest number of taints of a device for API servers before 1.35, which have no effect ``None`` either."""
NAME_BYTES: Final = 240
"""Longest beginning of a ResourceSlice's name [bytes]; names of objects have at most 253."""
NESTED_VERSION: Final = "v1beta1"
"""Version of ``resource.k8s.io`` in which a device's fields, except its name, are in ``basic``."""
_QUANTITY_FIELDS: Final = (
    "capacity",
    "consumesCounters",
    "nodeAllocatableResourceMappings",  # of Kubernetes 1.36
    "nodeAllocatableResources",
)
"""Fields of a device that contain quantities."""

AttributeValue = str | bool | int | Mapping[str, object]
"""Value of a device's attribute.

An object is used unchanged, such as ``{"version": "1.2.0"}``.
"""
CapacityValue = str | int | Mapping[str, object]
"""Value of a device's capacity, a quantity such as ``"16Gi"``.

An object is used unchanged, with ``value`` and ``requestPolicy``.
"""


@dataclass(frozen=True, slots=True)
class SliceDevice:
    """Device as the scheduler sees it: its name, and the attributes and capacity by which claims select it.

    Raises:
        ConfigError: A name or a value is invalid.
    """

    name: str
    """Name of the device, a DNS label; the same as that of its :class:`drahealth.Device`."""
    _: KW_ONLY
    pool: str = ""
    """Pool of the device; empty: the name of the Kubernetes node."""
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    """Attributes of the device for the selectors of claims, by name."""
    capacity: Mapping[str, CapacityValue] = field(default_factory=dict)
    """Capacities of the device, by name."""
    fields: Mapping[str, object] = field(default_factory=dict)
    """Further fields of the device in ``resource.k8s.io/v1``, such as ``allowMultipleAllocations``."""

    def __post_init__(self) -> None:
        Device(self.name)
        if self.pool:
            try:
                check_node_name(self.pool)
            except ValueError as error:
                raise ConfigError(f"device {self.name!r}: pool: {error}") from None
        if taken := {"name", "attributes", "capacity", "taints"} & self.fields.keys():
            text = f"device {self.name!r}: fields: {sorted(taken)[0]!r} is set by drahealth; leave it out"
            raise ConfigError(text)
        self.to_object()

    def to_object(self) -> dict[str, Any]:
        """Return the device in the format of ``resource.k8s.io/v1``, without taints."""
        attributes = {key: self._attribute(key, value) for key, value in self.attributes.items()}
        capacity = {key: self._capacity(key, value) for key, value in self.capacity.items()}
        found: dict[str, Any] = {"name": self.name}
        if attributes:
            found["attributes"] = attributes
        if capacity:
            found["capacity"] = capacity
        return {**found, **self.fields}

    def _attribute(self, key: str, value: object) -> JsonObject:
        if isinstance(value, Mapping):
            return value
        for kind, name in ((bool, "bool"), (int, "int"), (str, "string")):  # True is an int, too
            if isinstance(value, kind):
                return {name: value}
        raise ConfigError(
            f"device {self.name!r}: attribute {key!r}: {value!r} is not a string, number or boolean"
        )

    def _capacity(self, key: str, value: object) -> JsonObject:
        if isinstance(value, Mapping):
            return value
        text = f"device {self.name!r}: capacity {key!r}"
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ConfigError(f"{text}: {value!r} is not a quantity, such as 16Gi")
        try:
            parse_quantity(str(value))
        except ValueError as error:
            raise ConfigError(f"{text}: {error}") from None
        return {"value": str(value)}


def plan_slices(
    devices: Sequence[SliceDevice],
    taints: Taints,
    existing: Mapping[str, JsonObject],
    *,
    driver: str,
    node: str,
    version: str,
    for_old_server: bool = False,
) -> dict[str, dict[str, Any]]:
    """Return the wanted ``spec`` of each slice of a driver on a node, by name.

    Args:
        devices: All devices of the driver.
        taints: Taints of the driver's devices; those of other devices are ignored.
        existing: Specs of the existing slices by name, in the version ``version``.
        driver: Name of the driver.
        node: Name of the Kubernetes node, which is the default pool.
        version: Version of ``resource.k8s.io`` in which the slices are written.
        for_old_server: Whether to leave out taints that API servers before 1.35 refuse.
    """
    pools: dict[str, list[dict[str, Any]]] = {node: []}
    for device in devices:
        pool = device.pool or node
        found = taints.devices.get(DeviceRef(driver, pool, device.name), ())
        objects = taint_objects(_for_old_server(found) if for_old_server else found)
        fields = device.to_object() | ({"taints": objects} if objects else {})
        pools.setdefault(pool, []).append(_in_version(fields, version))
    if not pools[node] and len(pools) > 1:
        del pools[node]  # an empty slice shows that a driver without any device runs
    wanted: dict[str, dict[str, Any]] = {}
    for pool, members in pools.items():
        wanted |= _plan_pool(pool, members, existing, driver, node)
    return wanted


def _plan_pool(
    pool: str, devices: list[dict[str, Any]], existing: Mapping[str, JsonObject], driver: str, node: str
) -> dict[str, dict[str, Any]]:
    size = TAINTED_SLICE_DEVICES_MAX
    base = slice_base_name(driver, node, pool)
    parts = {
        f"{base}-{number}": devices[start : start + size]
        for number, start in enumerate(range(0, max(len(devices), 1), size))
    }
    published = {name: spec for name, spec in existing.items() if _pool_of(spec).get("name") == pool}
    generation = max((_generation(spec) for spec in published.values()), default=0)
    if published.keys() != parts.keys() or not all(
        _has_same_amounts(untainted(_devices_of(published[name])), untainted(part))
        for name, part in parts.items()
    ):
        generation += 1
    common = {
        "driver": driver,
        "nodeName": node,
        "pool": {"name": pool, "generation": generation, "resourceSliceCount": len(parts)},
    }
    return {name: {**common, "devices": part} for name, part in parts.items()}


def slice_base_name(driver: str, node: str, pool: str) -> str:
    """Return the beginning of the names of a pool's ResourceSlices, which no other pool or driver has."""
    base = f"{node}-{driver}"
    if pool == node and len(base) <= NAME_BYTES:
        return base
    digest = hashlib.sha256(f"{node}/{driver}/{pool}".encode()).hexdigest()[:10]
    return f"{base[: NAME_BYTES - 11].rstrip('.-')}-{digest}"


def is_up_to_date(found: JsonObject, wanted: JsonObject) -> bool:
    """Return whether the spec of a ResourceSlice has all wanted fields; it may have others, too."""
    return all(_has_same_amounts(found.get(key), value) for key, value in wanted.items())


def _has_same_amounts(part: object, other: object) -> bool:
    """Return whether two parts of a spec are equal, with quantities compared by their amounts."""
    return part == other or _with_amounts(part) == _with_amounts(other)


def _with_amounts(part: object, *, is_quantity: bool = False) -> object:
    """Return a part of a spec with amounts for quantities: API servers rewrite ``1024Mi`` as ``1Gi``.

    The texts of the part are quantities if `is_quantity` is true.
    """
    if isinstance(part, Mapping):
        return {
            key: value
            if key == "attributes"
            else _with_amounts(value, is_quantity=is_quantity or key in _QUANTITY_FIELDS)
            for key, value in part.items()
        }
    if isinstance(part, list | tuple):
        return [_with_amounts(value, is_quantity=is_quantity) for value in part]
    if is_quantity and isinstance(part, str | int) and not isinstance(part, bool):
        with suppress(ValueError):  # else another field, such as the name of a counter set
            return parse_quantity(str(part))
    return part


def untainted(devices: Iterable[JsonObject]) -> list[JsonObject]:
    """Return the devices of a ResourceSlice without their taints, in the format of any API version."""
    return [
        {
            key: {name: part for name, part in value.items() if name != "taints"}
            if key == "basic" and isinstance(value, Mapping)
            else value
            for key, value in device.items()
            if key != "taints"
        }
        for device in devices
    ]


def count_taints(spec: JsonObject) -> int:
    """Return the number of taints of all devices in a slice's ``spec``."""
    total = 0
    for device in _devices_of(spec):
        basic = device.get("basic")
        taints = (basic if isinstance(basic, Mapping) else device).get("taints")
        total += len(taints) if isinstance(taints, list) else 0
    return total


def _devices_of(spec: JsonObject) -> list[JsonObject]:
    devices = spec.get("devices")
    return devices if isinstance(devices, list) else []


def _pool_of(spec: JsonObject) -> JsonObject:
    pool = spec.get("pool")
    return pool if isinstance(pool, Mapping) else {}


def _generation(spec: JsonObject) -> int:
    generation = _pool_of(spec).get("generation")
    return generation if isinstance(generation, int) else 0


def _for_old_server(taints: Sequence[Taint]) -> list[Taint]:
    return [taint for taint in taints if taint.effect is not Effect.NONE][:OLD_TAINTS_MAX]


def _in_version(device: dict[str, Any], version: str) -> dict[str, Any]:
    if version != NESTED_VERSION:
        return device
    return {"name": device["name"], "basic": {key: value for key, value in device.items() if key != "name"}}
