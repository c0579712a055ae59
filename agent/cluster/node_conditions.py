"""Conditions of the Node that show the health of its devices, and the Node's conditions about maintenance.
Pure.

Types, reasons and statuses are fixed, because controllers outside match them. A message has names of devices
and codes only, in a fixed order: a message that counts or measures would be another text at each evaluation.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

from agent.devices.inventory import DeviceKind
from agent.model.claim import DeviceRef
from agent.model.health import DeviceHealth, Health, Severity
from agent.model.json_values import JsonObject
from agent.model.report import Report
from agent.model.time import NS, rfc3339

ALL_DEVICES: Final = "DRADevicesHealthy"
"""Type of the Node's condition about all of its devices."""
KIND_CONDITIONS: Final[Mapping[str, str]] = {
    DeviceKind.CPU: "DRACPUDevicesHealthy",
    DeviceKind.GPU: "DRAGPUDevicesHealthy",
    DeviceKind.MIG: "DRAMIGDevicesHealthy",
    DeviceKind.MEMORY: "DRAMemoryDevicesHealthy",
    DeviceKind.HUGEPAGES: "DRAHugepageDevicesHealthy",
    DeviceKind.PCI: "DRAPCIDevicesHealthy",
    DeviceKind.NIC: "DRANICDevicesHealthy",
    DeviceKind.OTHER: "DRAOtherDevicesHealthy",
}
"""Types of the Node's conditions about the devices of one kind."""
OWN_TYPES: Final = frozenset({ALL_DEVICES, *KIND_CONDITIONS.values()})
MAINTENANCE_TYPES: Final = (
    "DrainInProgress",
    "Drained",
    "MaintenanceInProgress",
    "GracefulNodeShutdownInProgress",
)
"""Lifecycle conditions (KEP-5683) with which the node is out of use on purpose. MaintenancePlanned is absent:
it concerns the future."""
MESSAGE_CHARS: Final = 1024
"""Longest message of a condition of the Node [characters]."""
UNKNOWN_S: Final = 60.0
"""Time for which a device or a condition must be Unknown before the Node has an event or the condition [s].

A restart of the agent or of a driver makes devices Unknown for a moment.
"""
CODES_MAX: Final = 3
"""Largest number of finding codes that a condition's message has for one device."""


class ConditionReason(StrEnum):
    """Reason of a condition about devices."""

    ALL_HEALTHY = "AllDevicesHealthy"
    DEGRADED = "DevicesDegraded"
    """Reason for a condition: all devices are usable, and some work with limitations."""
    UNHEALTHY = "DevicesUnhealthy"
    UNKNOWN = "DevicesUnknown"
    """Reason for a condition: no device is known to be Unhealthy, and the health of some is not known."""
    NO_DEVICES = "NoDevices"


class NodeCondition(NamedTuple):
    """Condition of the Node as the agent wants it, without its times."""

    type: str
    status: str
    """Status of the condition: ``True``, ``False`` or ``Unknown``."""
    reason: ConditionReason
    message: str


class _Outcome(NamedTuple):
    """Status and reason of a Node condition, which follow from the severity of the worst device."""

    status: str
    reason: ConditionReason


_OUTCOMES: Final[Mapping[Severity, _Outcome]] = {
    Severity.OK: _Outcome("True", ConditionReason.ALL_HEALTHY),
    Severity.INFO: _Outcome("True", ConditionReason.ALL_HEALTHY),
    Severity.DEGRADED: _Outcome("True", ConditionReason.DEGRADED),
    Severity.UNKNOWN: _Outcome("Unknown", ConditionReason.UNKNOWN),
    Severity.UNHEALTHY: _Outcome("False", ConditionReason.UNHEALTHY),
}


class UnknownDelay:
    """Delay of the status Unknown in Node conditions: a restart changes no condition. For one thread."""

    def __init__(self) -> None:
        self._since_ns: dict[str, int] = {}

    def delayed(
        self, wanted: Sequence[NodeCondition], found: Mapping[str, JsonObject], now_ns: int
    ) -> tuple[tuple[NodeCondition, ...], float | None]:
        """Return the conditions to write, and the time until an Unknown one is due [s]; None: none waits.

        A condition that has been Unknown for less than :data:`UNKNOWN_S` stays as found on the Node.
        """
        unknown = {condition.type for condition in wanted if condition.status == "Unknown"}
        self._since_ns = {name: self._since_ns.get(name, now_ns) for name in unknown}
        kept: dict[str, NodeCondition] = {}
        for name in unknown:
            before = _from_node(found.get(name, {}))
            if before and now_ns - self._since_ns[name] < UNKNOWN_S * NS:
                kept[name] = before
        due_ns = min((self._since_ns[name] for name in kept), default=None)
        due_s = None if due_ns is None else UNKNOWN_S - (now_ns - due_ns) / NS
        return tuple(kept.get(condition.type, condition) for condition in wanted), due_s


def _from_node(entry: JsonObject) -> NodeCondition | None:
    """Return a condition of the Node whose status is known; None: it is Unknown, or the Node lacks it."""
    if entry.get("status") not in {"True", "False"} or entry.get("reason") not in list(ConditionReason):
        return None
    texts = (str(entry.get(key, "")) for key in NodeCondition._fields)
    type_, status, reason, message = texts
    return NodeCondition(type_, status, ConditionReason(reason), message)


def decide_conditions(report: Report, kinds: Iterable[str]) -> tuple[NodeCondition, ...]:
    """Return the conditions that a report justifies; none while the agent starts.

    Args:
        report: Newest health report.
        kinds: Kinds of devices with a condition of their own. A kind without devices has no condition, so
            that one configuration fits nodes with and without GPUs.
    """
    if report.starting:
        return ()
    by_kind = ((kind, [one for one in report.devices if one.kind == kind]) for kind in sorted(set(kinds)))
    of_kinds = (_condition(KIND_CONDITIONS[kind], devices) for kind, devices in by_kind if devices)
    return (_condition(ALL_DEVICES, report.devices), *of_kinds)


def device_name(device: DeviceHealth) -> str:
    """Return a device's name in messages: its name alone for a host device, else with driver and pool."""
    return str(DeviceRef(*device.key)) if device.driver else device.device


def node_status_patch(
    wanted: Sequence[NodeCondition], found: Mapping[str, JsonObject], node: str, now_wall_s: float
) -> dict[str, Any]:
    """Return the Node for a server-side apply of the conditions.

    ``lastTransitionTime`` is that of the condition found on the Node while the status is the same, so that
    neither a restart of the agent nor a step of the clock moves it.

    Args:
        wanted: Conditions of this agent.
        found: Conditions of the Node by type.
        node: Name of the Node.
        now_wall_s: Current time [s since 1970].
    """
    now = rfc3339(now_wall_s)
    conditions = []
    for condition in wanted:
        before = found.get(condition.type, {})
        since = before.get("lastTransitionTime") if before.get("status") == condition.status else None
        times = {"lastHeartbeatTime": now, "lastTransitionTime": since or now}
        conditions.append(condition._asdict() | times)
    metadata = {"name": node}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": {"conditions": conditions}}


def conditions_by_type(node: JsonObject) -> dict[str, JsonObject]:
    """Return the conditions of a Node object by their type; entries of an unexpected form are left out."""
    status = node.get("status")
    entries = status.get("conditions") if isinstance(status, Mapping) else None
    found = [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
    return {str(entry.get("type")): entry for entry in found}


def are_on_node(wanted: Sequence[NodeCondition], found: Mapping[str, JsonObject]) -> bool:
    """Return whether the Node has exactly the agent's conditions that are wanted."""
    own = {
        name: tuple(entry.get(key) for key in NodeCondition._fields)
        for name, entry in found.items()
        if name in OWN_TYPES
    }
    return own == {condition.type: tuple(map(str, condition)) for condition in wanted}


def active_maintenance(found: Mapping[str, JsonObject]) -> tuple[str, ...]:
    """Return the types of the Node's conditions that show a drain or maintenance in progress."""
    return tuple(name for name in MAINTENANCE_TYPES if found.get(name, {}).get("status") == "True")


def _condition(type_: str, devices: Sequence[DeviceHealth]) -> NodeCondition:
    if not devices:
        return NodeCondition(type_, "Unknown", ConditionReason.NO_DEVICES, "the node has no known devices")
    worst = max(map(_severity, devices))
    status, reason = _OUTCOMES[worst]
    if reason is ConditionReason.ALL_HEALTHY:
        return NodeCondition(type_, status, reason, "all devices are healthy")
    texts = [_device_text(device, worst) for device in devices if _severity(device) is worst]
    return NodeCondition(type_, status, reason, _joined(texts))


def _severity(device: DeviceHealth) -> Severity:
    """Return a device's severity for Node conditions: by its health; at most DEGRADED if it is Healthy."""
    if device.health is Health.UNHEALTHY:
        return Severity.UNHEALTHY
    return Severity.UNKNOWN if device.health is Health.UNKNOWN else min(device.severity, Severity.DEGRADED)


def _device_text(device: DeviceHealth, worst: Severity) -> str:
    codes = sorted({cause.code for cause in device.causes if cause.severity is worst})
    return f"{device_name(device)}: {', '.join(codes[:CODES_MAX])}" if codes else device_name(device)


def _joined(texts: Sequence[str]) -> str:
    """Join texts with semicolons, as many as fit into a condition's message.

    Texts that are left out are not counted: the number would change with each device.
    """
    joined, rest = "", "; and others"
    for number, text in enumerate(texts):
        longer = f"{joined}; {text}" if joined else text
        room = MESSAGE_CHARS - (0 if number == len(texts) - 1 else len(rest))
        if len(longer) > room:
            return f"{joined}{rest}" if joined else longer[:room]
        joined = longer
    return joined
