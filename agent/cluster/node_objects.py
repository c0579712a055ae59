"""Conditions of the Node that show the health of its devices, and the Lease of the agent that writes them.

The module also evaluates the Node's conditions about maintenance. Types, reasons and statuses are fixed,
because controllers outside match them. A message has names of devices and codes only, in a fixed order: a
message that counts or measures would be another text at each evaluation.

Only the agent that holds the Lease writes the node's health to the API server. The Lease is also the sign
that the agent lives, since the conditions of a Node have no heartbeat. All durations are on the monotonic
clock: the times in a Lease come from clocks of other machines.
"""

import hashlib
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from agent.devices.inventory import DeviceKind
from agent.errors import ApiError
from agent.model.claim import DeviceRef
from agent.model.health import DeviceHealth, Health, Severity
from agent.model.json_values import JsonObject
from agent.model.reading import unlisted_sources
from agent.model.report import Report
from agent.model.time import NS, Instant, rfc3339
from agent.serve.kube_api.api_server import NOT_FOUND, ApiServer, metadata_of, path_of
from agent.store.state_files import write_and_rename
from agent.system.files import ReadError, read_bounded
from agent.system.output import get_logger

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
GPU_KINDS: Final = frozenset({DeviceKind.GPU, DeviceKind.MIG})
"""Kinds of devices that NVML lists, see :func:`unlisted_sources`."""
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
OTHERS: Final = "and others"
"""Last text of a message that leaves out devices."""
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
    """Delay before a Node condition becomes Unknown, so that a restart of the agent changes no condition.

    For one thread.
    """

    def __init__(self) -> None:
        self._since_ns: dict[str, int] = {}

    def delay_unknown(
        self, wanted: Sequence[NodeCondition], found: Mapping[str, JsonObject], now_ns: int
    ) -> tuple[tuple[NodeCondition, ...], float | None]:
        """Return the conditions to write, and the time until a delayed Unknown condition is due [s].

        The time is None if no condition is delayed.

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
    if entry.get("status") not in ("True", "False") or entry.get("reason") not in list(ConditionReason):
        return None
    texts = (str(entry.get(key, "")) for key in NodeCondition._fields)
    type_, status, reason, message = texts
    return NodeCondition(type_, status, ConditionReason(reason), message)


def decide_conditions(
    report: Report,
    kinds: Iterable[str],
    found: Mapping[str, JsonObject] = MappingProxyType({}),
    undeclared: Collection[str] = (),
) -> tuple[NodeCondition, ...]:
    """Return the Node conditions that follow from a report; empty while the agent starts.

    Args:
        report: Newest health report.
        kinds: Kinds of devices with a condition of their own. A kind without devices has no condition, so
            that one configuration fits nodes with and without GPUs.
        found: Conditions of the Node by type. Until NVML lists the GPUs, these remain as Unknown.
        undeclared: Drivers that may not have declared their devices yet. Until then, a condition that names
            faulty devices of such a driver is not True.
    """
    if report.starting:
        return ()
    unlisted = unlisted_sources(report.sources)
    absent = {type_: _drivers_in(entry, undeclared) for type_, entry in found.items()}
    conditions = [_condition(ALL_DEVICES, report.devices, unlisted, absent.get(ALL_DEVICES, ()))]
    for kind in sorted(set(kinds)):
        type_, devices = KIND_CONDITIONS[kind], [device for device in report.devices if device.kind == kind]
        missing = unlisted if kind in GPU_KINDS and type_ in found else ()
        if devices or missing or absent.get(type_):
            conditions.append(_condition(type_, devices, missing, absent.get(type_, ())))
    return tuple(conditions)


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


def _drivers_in(entry: JsonObject, drivers: Collection[str]) -> list[str]:
    """Return the drivers that a condition of the Node names, or all if it was cut; none if it is True."""
    texts = () if entry.get("status") == "True" else str(entry.get("message", "")).split("; ")
    return [
        driver
        for driver in sorted(drivers)
        if texts[-1:] == [OTHERS] or any(text.startswith((f"{driver}/", f"{driver}: ")) for text in texts)
    ]


def _condition(
    type_: str, devices: Sequence[DeviceHealth], unlisted: Sequence[str], undeclared: Sequence[str]
) -> NodeCondition:
    if not devices and not unlisted and not undeclared:
        return NodeCondition(type_, "Unknown", ConditionReason.NO_DEVICES, "the node has no known devices")
    worst = max([*map(_severity, devices), *(Severity.UNKNOWN for _ in [*unlisted, *undeclared])])
    status, reason = _OUTCOMES[worst]
    if reason is ConditionReason.ALL_HEALTHY:
        return NodeCondition(type_, status, reason, "all devices are healthy")
    texts = [_device_text(device, worst) for device in devices if _severity(device) is worst]
    if worst is Severity.UNKNOWN:
        texts += [f"{source}: devices not listed yet" for source in unlisted]
    texts += [f"{driver}: devices not declared yet" for driver in undeclared]
    return NodeCondition(type_, status, reason, _join_texts(texts))


def _severity(device: DeviceHealth) -> Severity:
    """Return a device's severity for Node conditions; at most DEGRADED if the device's health is Healthy."""
    if device.health is Health.UNHEALTHY:
        return Severity.UNHEALTHY
    return Severity.UNKNOWN if device.health is Health.UNKNOWN else min(device.severity, Severity.DEGRADED)


def _device_text(device: DeviceHealth, worst: Severity) -> str:
    codes = sorted({cause.code for cause in device.causes if cause.severity is worst})
    return f"{device_name(device)}: {', '.join(codes[:CODES_MAX])}" if codes else device_name(device)


def _join_texts(texts: Sequence[str]) -> str:
    """Join texts with semicolons, as many as fit into a condition's message.

    Texts that are left out are not counted: the number would change with each device.
    """
    joined, rest = "", f"; {OTHERS}"
    for number, text in enumerate(texts):
        longer = f"{joined}; {text}" if joined else text
        room = MESSAGE_CHARS - (0 if number == len(texts) - 1 else len(rest))
        if len(longer) > room:
            return f"{joined}{rest}" if joined else longer[:room]
        joined = longer
    return joined


# --- the Lease ---------------------------------------------------------------------------------------------

RENEW_S: Final = 10.0
"""Interval of renewals of the node's Lease [s], the same as that of the kubelet's own Lease."""
DURATION_S: Final = 40
"""Time after the last renewal of the Lease from which another agent may take it [s]."""
HELD_S: Final = 30
"""Time after the last renewal for which the agent itself counts the Lease as held [s]. A request that begins
then ends before another agent may take the Lease."""
DURATION_MAX_S: Final = 600
"""Longest duration that is respected in the Lease of another agent [s]."""
CONFLICT: Final = 409
NAME_CHARS: Final = 253
IDENTITY_FILE: Final = "cluster-writer"
"""File in the state directory with the agent's identity as holder of the Lease.

The directory belongs to one agent at a time, so that an agent after a restart holds the Lease at once.
"""
DECLARING: Final = "drahealth.dev/declaring"
"""Annotation of the Lease with the names of the drivers that declare devices, separated by commas.

Declarations end with a reboot, and an agent then starts before the drivers.
"""

log = get_logger(__name__)


def load_identity(state_dir: Path, node: str) -> str:
    """Return the identity of the agent that owns a state directory, from its file or else a new one.

    Blocks on the disk. Without a file that can be written, the identity lasts until the agent ends.
    """
    path = state_dir / IDENTITY_FILE
    try:
        text = read_bounded(path, 128).data.decode("ascii").strip()
        return f"{node}_{uuid.UUID(text)}"
    except (ReadError, ValueError):
        made = uuid.uuid4()
    data = f"{made}\n".encode()
    try:
        write_and_rename(path, data, temporary=path.with_name(f".{path.name}.new"), mode=0o600)
    except OSError as error:
        log.warning(
            "cluster: lease holder file %s: not written: %s; after a restart the agent waits until the "
            "Lease that it holds now has expired",
            path,
            error,
        )
    return f"{node}_{made}"


def lease_name(node: str) -> str:
    """Return the name of a node's Lease: ``drahealth-<node>``; for a long name its beginning and a hash."""
    name = f"drahealth-{node}"
    if len(name) <= NAME_CHARS:
        return name
    digest = hashlib.sha256(node.encode()).hexdigest()[:16]
    return f"{name[: NAME_CHARS - 17].rstrip('-.')}-{digest}"


class AgentLease:
    """Kubernetes Lease of one node, renewed or acquired by :meth:`renew`. For one thread."""

    def __init__(self, api: ApiServer, *, node: str, namespace: str, identity: str) -> None:
        """Create the client of the Lease; the API server is not called yet.

        ``identity`` is that of this agent.
        """
        self.name = lease_name(node)
        self.namespace = namespace
        self.holder = ""
        """Identity of the Lease's holder in the last answer; empty: not known, or it has none."""
        self.declaring: frozenset[str] = frozenset()
        """Drivers that the next write puts into the annotation DECLARING. A Lease that is read adds those
        of the agent's former run."""
        self._api = api
        self._identity = identity
        self._collection = path_of("apis", "coordination.k8s.io", "v1", "namespaces", namespace, "leases")
        self._object: dict[str, Any] | None = None
        """Lease object as this agent has last written it; None: not known, or another agent holds it."""
        self._held_until_ns = 0
        self._observed: tuple[object, ...] = ()
        """Holder, renewal time and resource version of another agent's Lease, when they last changed."""
        self._observed_ns = 0

    def is_held(self, now: Instant) -> bool:
        """Return whether this agent holds the node's Lease now."""
        return now.mono_ns < self._held_until_ns

    def renew(self, now: Instant, read_owner: Callable[[], JsonObject]) -> bool:
        """Renew the Lease, or take it if it is free or expired; return whether this agent holds it.

        Args:
            now: Current time.
            read_owner: Returns the owner reference to the Node, with which a new Lease is deleted;
                raises the errors of the API server.

        Raises:
            ApiError, ApiUnreachableError, OSError: See :meth:`ApiServer.call`.
        """
        known, self._object = self._object, None  # after a failure, the Lease is read again
        if known is not None and self._try_write(known, now):
            return True
        found = self._read()
        if found is None:
            return self._try_create(now, read_owner())
        holder = str(self._spec(found).get("holderIdentity") or "")
        if holder in {"", self._identity} or self._observe_expiry(found, now):
            if self._try_write(found, now):
                return True
            holder = ""  # another agent was faster; the next renewal reads who
        self._store_holder(holder)
        self._held_until_ns = 0
        return False

    def _read(self) -> dict[str, Any] | None:
        try:
            found = self._api.call("GET", f"{self._collection}{path_of(self.name)}")
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return None
        names = str((metadata_of(found).get("annotations") or {}).get(DECLARING, ""))
        self.declaring |= set(filter(None, names.split(",")))
        return found

    def _try_create(self, now: Instant, owner: JsonObject) -> bool:
        metadata = {"name": self.name, "ownerReferences": [owner]}
        return self._send("POST", self._collection, {"metadata": metadata}, now)

    def _try_write(self, found: dict[str, Any], now: Instant) -> bool:
        return self._send("PUT", f"{self._collection}{path_of(self.name)}", found, now)

    def _send(self, method: str, path: str, found: dict[str, Any], now: Instant) -> bool:
        """Write the Lease with this agent as holder; return False if it was changed or deleted meanwhile."""
        before = self._spec(found)
        is_new_holder = before.get("holderIdentity") != self._identity
        stamp = datetime.fromtimestamp(now.wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        transitions = before.get("leaseTransitions")
        transitions = transitions if isinstance(transitions, int) else 0
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": DURATION_S,
            "acquireTime": stamp if is_new_holder else before.get("acquireTime") or stamp,
            "renewTime": stamp,
            "leaseTransitions": transitions + (is_new_holder and method == "PUT"),
        }
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": spec}
        annotations = dict(found["metadata"].get("annotations") or {})
        annotations[DECLARING] = ",".join(sorted(self.declaring))
        metadata = found["metadata"] | {"annotations": annotations}
        try:
            written = self._api.call(method, path, body | {"metadata": metadata})
        except ApiError as error:
            if error.status in {CONFLICT, NOT_FOUND} and not (method == "POST" and error.status == NOT_FOUND):
                return False
            raise
        metadata_of(written)
        self._object = written
        self._held_until_ns = now.mono_ns + HELD_S * NS
        self._store_holder(self._identity)
        return True

    def _observe_expiry(self, found: dict[str, Any], now: Instant) -> bool:
        """Return whether another agent's Lease has expired: it has not changed for its duration.

        The duration is measured on this agent's clock.
        """
        spec = self._spec(found)
        observed = (
            spec.get("holderIdentity"),
            spec.get("renewTime"),
            found["metadata"].get("resourceVersion"),
        )
        if observed != self._observed:
            self._observed, self._observed_ns = observed, now.mono_ns
        duration = spec.get("leaseDurationSeconds")
        limit_s = min(duration, DURATION_MAX_S) if isinstance(duration, int) else DURATION_S
        return now.mono_ns - self._observed_ns >= limit_s * NS

    def _store_holder(self, holder: str) -> None:
        if holder == self.holder:
            return
        if holder == self._identity:
            log.info(
                "lease %s/%s: held by this agent; it writes to the API server", self.namespace, self.name
            )
        elif holder:
            log.warning(
                "lease %s/%s: held by another agent, %s; this agent writes nothing to the API server until "
                "it holds the lease",
                self.namespace,
                self.name,
                holder,
            )
        self.holder = holder

    @staticmethod
    def _spec(found: dict[str, Any]) -> dict[str, Any]:
        spec = found.get("spec")
        return spec if isinstance(spec, dict) else {}
