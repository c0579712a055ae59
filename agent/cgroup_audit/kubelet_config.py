"""Settings of a kubelet's configuration that decide cgroup values, and the parser of a KubeletConfiguration.

The configuration comes from the kubelet's files and flags, or from its endpoint ``/configz``, which shows the
configuration in effect.

Source: kubelet v1.37.1, pkg/kubelet/apis/config (fields, defaults), cmd/kubelet/app (flags, reserved CPUs).

The module also has the properties of a Kubernetes node and its kubelet that decide which cgroup values are
correct.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from agent.cgroup_audit.pod_model import CPU, MEMORY, ZERO, Quantity, ResourceAmounts, parse_quantity
from agent.cgroup_audit.pod_parser import name_list, parse_amounts
from agent.model.cpuset import CpuSet, cpu_numbers, parse_cpus
from agent.model.json_values import JsonObject, format_short, get_mapping, get_text, raise_invalid

PODS: Final = "pods"
"""Value in ``enforceNodeAllocatable``: pods together get no more than the node's allocatable resources."""
KUBE_RESERVED: Final = "kube-reserved"
SYSTEM_RESERVED: Final = "system-reserved"
"""Value in ``enforceNodeAllocatable``, like KUBE_RESERVED: the cgroup of this reservation has limits, too."""
TIERED: Final = "TieredReservation"
"""Value of ``memoryReservationPolicy``: Guaranteed pods get memory.min, Burstable pods memory.low."""
LIMITED_SWAP: Final = "LimitedSwap"
_DURATION: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)(us|µs|ms|s)", re.ASCII | re.IGNORECASE)
_MICROSECONDS: Final = {"us": 1, "µs": 1, "ms": 1000, "s": 1_000_000}


class MemoryQosMode(NamedTuple):
    """Way in which a kubelet sets ``memory.high``, ``memory.min`` and ``memory.low`` (KEP-2570)."""

    throttling_factor: float | None = None
    """Position of ``memory.high`` between request (0) and limit (1); None: ``memory.high`` is not set."""
    reserves: bool = False
    """True: requests are protected from reclaim."""
    is_tiered: bool = True
    """True: Guaranteed pods have ``memory.min``, Burstable ones ``memory.low``.
    False: all have ``memory.min``, as up to 1.35."""


@dataclass(frozen=True, slots=True)
class KubeletConfig:
    """Settings of a kubelet's configuration that decide cgroup values; the defaults are the kubelet's."""

    source: str
    """Where the configuration was read, such as the path of the file."""
    gates: Mapping[str, bool] = field(default_factory=dict)
    """Feature gates that the configuration sets explicitly, by name."""
    throttling_factor: float | None = None
    """Value of ``memoryThrottlingFactor``; None: the configuration does not set it."""
    reservation_policy: str = ""
    """``memoryReservationPolicy``, which exists from 1.36 on; empty: not set."""
    swap_behavior: str = ""
    """``memorySwap.swapBehavior``; empty: the default, NoSwap."""
    enforced: tuple[str, ...] = (PODS,)
    """``enforceNodeAllocatable``: cgroups on which the kubelet enforces limits."""
    kube_reserved: ResourceAmounts = field(default_factory=dict)
    system_reserved: ResourceAmounts = field(default_factory=dict)
    kube_reserved_cgroup: str = ""
    system_reserved_cgroup: str = ""
    has_qos_cgroups: bool = True
    """``cgroupsPerQOS``: True if the kubelet creates cgroups for QoS classes and pods."""
    enforces_quota: bool = True
    """``cpuCFSQuota``: True if the kubelet sets CPU quotas for CPU limits."""
    period_us: int = 100_000
    """``cpuCFSQuotaPeriod``: period of CPU quotas [us]."""

    @property
    def reserves_qos_memory(self) -> bool:
        """True: the memory requests of a QoS class may limit the memory of lower QoS classes
        (``qosReserved``, an alpha gate)."""
        return self.gates.get("QOSReserved", False)

    def possible_gate(self, gate: str, default: bool) -> tuple[bool, ...]:
        """Return the possible values of a feature gate; ``default`` is its default in the kubelet release."""
        if gate in self.gates:
            return (self.gates[gate],)
        groups = {self.gates[name] for name in ("AllAlpha", "AllBeta") if name in self.gates}
        return tuple(dict.fromkeys((default, *sorted(groups))))


def parse_kubelet_config(obj: JsonObject, source: str) -> KubeletConfig:
    """Parse a KubeletConfiguration, or the answer of the kubelet's endpoint ``/configz``.

    Raises:
        ValueError: A field is invalid; the text names the field.
    """
    if effective := get_mapping(obj, "kubeletconfig"):  # has all defaults, and leaves out empty lists
        obj = {"enforceNodeAllocatable": [], **effective}
    kind = obj.get("kind")
    if kind not in (None, "KubeletConfiguration"):
        raise_invalid("kind", f"{format_short(kind)} is not KubeletConfiguration")
    system = dict(_reserved_amounts(obj, "systemReserved"))
    kube = dict(_reserved_amounts(obj, "kubeReserved"))
    if cpus := get_text(obj, "reservedSystemCPUs", ""):
        system[CPU] = parse_quantity(str(_count_cpus(cpus)))
        kube.pop(CPU, None)
    return KubeletConfig(
        source,
        gates=_parse_gates(obj),
        throttling_factor=_parse_factor(obj),
        reservation_policy=get_text(obj, "memoryReservationPolicy", ""),
        swap_behavior=get_text(get_mapping(obj, "memorySwap"), "swapBehavior", "memorySwap"),
        enforced=_parse_enforced(obj),
        kube_reserved=kube,
        system_reserved=system,
        kube_reserved_cgroup=get_text(obj, "kubeReservedCgroup", ""),
        system_reserved_cgroup=get_text(obj, "systemReservedCgroup", ""),
        has_qos_cgroups=_flag(obj, "cgroupsPerQOS", default=True),
        enforces_quota=_flag(obj, "cpuCFSQuota", default=True),
        period_us=_parse_period(obj),
    )


def _reserved_amounts(obj: JsonObject, key: str) -> ResourceAmounts:
    return parse_amounts(get_mapping(obj, key), key)


def _count_cpus(text: str) -> int:
    try:
        return len(list(cpu_numbers(parse_cpus(text))))
    except ValueError:
        raise_invalid("reservedSystemCPUs", f"{format_short(text)} is not a list of CPUs, such as 0-3")


def _parse_gates(obj: JsonObject) -> Mapping[str, bool]:
    gates = get_mapping(obj, "featureGates")
    for name, value in gates.items():
        if not isinstance(value, bool):
            raise_invalid(f"featureGates.{name}", f"{format_short(value)} is neither true nor false")
    return {name: bool(value) for name, value in gates.items()}


def _parse_factor(obj: JsonObject) -> float | None:
    value = obj.get("memoryThrottlingFactor")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise_invalid("memoryThrottlingFactor", f"{format_short(value)} is not a number above 0 and up to 1")
    return float(value)


def _parse_enforced(obj: JsonObject) -> tuple[str, ...]:
    if obj.get("enforceNodeAllocatable") is None:
        return (PODS,)
    return name_list(obj, "enforceNodeAllocatable", "KubeletConfiguration")


def _flag(obj: JsonObject, key: str, *, default: bool) -> bool:
    value = obj.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise_invalid(key, f"{format_short(value)} is neither true nor false")
    return value


def _parse_period(obj: JsonObject) -> int:
    text = obj.get("cpuCFSQuotaPeriod")
    if text is None:
        return 100_000
    match = _DURATION.fullmatch(str(text))
    if match is None:
        raise_invalid("cpuCFSQuotaPeriod", f"{format_short(text)} is not a duration, such as 100ms")
    return int(float(match[1]) * _MICROSECONDS[match[2].lower()]) or 100_000


# --- flags -------------------------------------------------------------------------------------------------

FILE_FLAG: Final = "config"
DIRECTORY_FLAG: Final = "config-dir"
_FIELDS: Final = {
    "cgroups-per-qos": "cgroupsPerQOS",
    "cpu-cfs-quota": "cpuCFSQuota",
    "cpu-cfs-quota-period": "cpuCFSQuotaPeriod",
    "enforce-node-allocatable": "enforceNodeAllocatable",
    "feature-gates": "featureGates",
    "kube-reserved": "kubeReserved",
    "kube-reserved-cgroup": "kubeReservedCgroup",
    "reserved-cpus": "reservedSystemCPUs",
    "system-reserved": "systemReserved",
    "system-reserved-cgroup": "systemReservedCgroup",
}
"""Field of KubeletConfiguration that each flag of the kubelet sets, by flag."""
_SWITCHES: Final = frozenset({"cgroups-per-qos", "cpu-cfs-quota"})
"""Boolean flags of the kubelet, which need no value on the command line."""
_LISTS: Final = frozenset({"enforce-node-allocatable"})
_MAPS: Final = frozenset({"feature-gates", "kube-reserved", "system-reserved"})


def parse_flags(arguments: list[str]) -> dict[str, str]:
    """Return the kubelet's flags that decide cgroup values, by name; repeated maps and lists are joined.

    Args:
        arguments: Command line of the kubelet's process, without the program.
    """
    known = {FILE_FLAG, DIRECTORY_FLAG, *_FIELDS}
    flags: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            break
        name, has_value, value = argument.lstrip("-").partition("=")
        name = name.replace("_", "-")  # the kubelet accepts both
        if not argument.startswith("-") or name not in known:
            continue
        if not has_value:
            value = "true" if name in _SWITCHES else next(rest, "")
        flags[name] = f"{flags[name]},{value}" if name in _MAPS | _LISTS and name in flags else value
    return flags


def with_flags(obj: JsonObject, flags: Mapping[str, str]) -> JsonObject:
    """Return a KubeletConfiguration changed by flags, which take precedence; feature gates are added.

    Raises:
        ValueError: A flag's value is invalid.
    """
    changed = dict(obj)
    for name, text in flags.items():
        if name in _FIELDS:
            changed[_FIELDS[name]] = _flag_value(name, text, obj)
    return changed


def _flag_value(name: str, text: str, obj: JsonObject) -> object:
    if name in _SWITCHES:
        return _bool_of(name, text)
    if name in _LISTS:
        return [] if text in {"", "none"} else text.split(",")
    if name not in _MAPS:
        return text
    pairs = dict(_pair_of(name, part) for part in text.split(",") if part)
    if name != "feature-gates":
        return pairs
    return {**get_mapping(obj, "featureGates"), **{gate: _bool_of(name, on) for gate, on in pairs.items()}}


def merge_configs(base: JsonObject, other: JsonObject) -> JsonObject:
    """Merge a drop-in file into a KubeletConfiguration. Maps are merged, null removes, others replace."""
    merged = dict(base)
    for key, value in other.items():
        mine = merged.pop(key, None)
        if isinstance(value, Mapping):
            merged[key] = merge_configs(mine if isinstance(mine, Mapping) else {}, value)
        elif value is not None:
            merged[key] = value
    return merged


def _bool_of(name: str, text: str) -> bool:
    if text.lower() not in {"true", "false", "t", "f", "1", "0"}:
        raise ValueError(f"--{name}: {format_short(text)} is neither true nor false")
    return text.lower() in {"true", "t", "1"}


def _pair_of(name: str, part: str) -> tuple[str, str]:
    key, equals, value = part.partition("=")
    if not equals:
        raise ValueError(f"--{name}: {format_short(part)} is not NAME=VALUE")
    return key.strip(), value.strip()


# --- memory QoS --------------------------------------------------------------------------------------------

_DEFAULT_FACTOR: Final = 0.9
"""``memoryThrottlingFactor`` up to 1.36, if it is not set; from 1.37 on there is no default."""
_TIERED_FROM: Final = 36
MEMORY_QOS_DEFAULT_FROM: Final = 37
"""First minor version with the gate MemoryQoS on by default, and no default ``memoryThrottlingFactor``."""


def possible_memory_qos(config: KubeletConfig, minor: int | None) -> tuple[MemoryQosMode, ...]:
    """Return the ways in which the kubelet may set memory QoS, the most likely first.

    Args:
        minor: Minor version of the kubelet, such as 37; None: unknown, each supported version is possible.
    """
    minors: tuple[int, ...] = (
        (MEMORY_QOS_DEFAULT_FROM, _TIERED_FROM, _TIERED_FROM - 1) if minor is None else (minor,)
    )
    if config.reservation_policy:
        minors = tuple(max(minor, _TIERED_FROM) for minor in minors)  # older kubelets refuse the field
    found = [
        _memory_qos(config, minor, is_on)
        for minor in minors
        for is_on in config.possible_gate("MemoryQoS", minor >= MEMORY_QOS_DEFAULT_FROM)
    ]
    return tuple(dict.fromkeys(found))


def _memory_qos(config: KubeletConfig, minor: int, is_on: bool) -> MemoryQosMode:
    if not is_on:
        return MemoryQosMode()
    default = None if minor >= MEMORY_QOS_DEFAULT_FROM else _DEFAULT_FACTOR
    factor = default if config.throttling_factor is None else config.throttling_factor
    if minor < _TIERED_FROM:
        return MemoryQosMode(factor, reserves=True, is_tiered=False)
    return MemoryQosMode(factor, reserves=config.reservation_policy == TIERED)


# --- properties of the node --------------------------------------------------------------------------------

PAGE_BYTES: Final = 4096
PERIOD_US: Final = 100_000
"""The kubelet's default CFS period [us]; its cpuCFSQuotaPeriod changes it."""


LIFTS_QUOTA_GATE: Final = "DisableCPUQuotaWithExclusiveCPUs"
"""Feature gate of the kubelet, on by default, that lifts the quota of containers with exclusive CPUs."""


class CgroupDriver(StrEnum):
    """The way in which kubelet and container runtime create cgroups: directly, or through systemd."""

    CGROUPFS = "cgroupfs"
    SYSTEMD = "systemd"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Properties of a Kubernetes node and its kubelet that decide which cgroup values are correct."""

    cgroup_version: int = 2
    """Version of the cgroups on this machine: 1 or 2."""
    cgroup_driver: CgroupDriver = CgroupDriver.SYSTEMD
    page_bytes: int = PAGE_BYTES
    hugepages_kib: tuple[int, ...] = ()
    """Sizes of hugepages that the machine supports, from ``/sys/kernel/mm/hugepages`` [KiB]."""
    period_us: int = PERIOD_US
    """Period of CPU quotas [us]: the kubelet's ``cpuCFSQuotaPeriod``."""
    enforces_quota: bool = True
    """True: the kubelet sets a CPU quota for each CPU limit, by its ``cpuCFSQuota``."""
    are_quotas_known: bool = True
    """False: period and enforcement of quotas are not known, but assumed to be the defaults."""
    counts_claims: bool = True
    """True: the kubelet adds the resources of claims to those of pods. False: expected values exclude claims.

    Kubelets do so from 1.37 on, with the feature gate DRANodeAllocatableResources, off by default.
    """
    counts_earlier_sidecars: bool | None = None
    """Whether an init container without a limit counts as limited if an earlier sidecar has a limit.

    True: as up to Kubernetes 1.36. False: as from 1.37 on. None: unknown; both values are correct.
    """
    kubelet: KubeletConfig | None = None
    """Configuration of the kubelet; None: unknown, so values that depend on it are not compared."""
    kubelet_minor: int | None = None
    """Minor version of the kubelet, such as 37; None: unknown."""
    memory_bytes: int | None = None
    """Memory of the machine, ``MemTotal``; None: unknown."""
    swap_bytes: int | None = None
    """Swap space of the machine, ``SwapTotal``; None: unknown."""
    cpu_counts: tuple[int, ...] = ()
    """Numbers of CPUs that the kubelet may have found at its start: online, present. Empty: unknown."""

    @property
    def memory_qos(self) -> tuple[MemoryQosMode, ...]:
        """Ways in which the kubelet may set memory QoS; empty: unknown, or cgroup v1, which has none."""
        if self.kubelet is None or self.cgroup_version == 1:
            return ()
        return possible_memory_qos(self.kubelet, self.kubelet_minor)

    @property
    def lifts_quota(self) -> tuple[bool, ...]:
        """Whether the kubelet lifts the quota of containers with exclusive CPUs: its possible answers."""
        if self.kubelet is None:
            return (True, False)
        return self.kubelet.possible_gate(LIFTS_QUOTA_GATE, default=True)

    @property
    def kubelet_source(self) -> str:
        """Source from which the kubelet's configuration was read; empty: the configuration is unknown."""
        return self.kubelet.source if self.kubelet else ""

    def reserved_amount(self, resource: str) -> Quantity:
        """Return the amount of CPU or memory that the configuration reserves for kubelet and system."""
        if self.kubelet is None:
            return ZERO
        return self.kubelet.kube_reserved.get(resource, ZERO) + self.kubelet.system_reserved.get(
            resource, ZERO
        )

    @property
    def allocatable_memory(self) -> int | None:
        """Memory that all pods together may use, without the eviction threshold [bytes].

        None: the kubelet's configuration is unknown.
        """
        if self.kubelet is None or self.memory_bytes is None:
            return None
        return max(0, self.memory_bytes - self.reserved_amount(MEMORY).value)


class ExclusiveCpus(NamedTuple):
    """CPUs that only one container may use."""

    container: str
    cpus: CpuSet
    by_kubelet: bool
    """True: the kubelet's CPU manager assigned the CPUs and lifts the quota.
    False: a driver assigned them, and the kubelet keeps the quota."""
