"""Health of devices, findings (faults seen at one moment), and causes (findings that determine the health).

The module also has device taints (KEP-5055): a driver publishes them so that the scheduler avoids an
unhealthy device.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple

from agent.model.claim import DeviceRef
from agent.model.time import Instant

_new: Final = tuple.__new__  # a NamedTuple's own __new__ parses keywords in Python, which costs time


class Severity(IntEnum):
    """Severity of a finding. The greatest severity of a device's findings determines its health.

    A proven fault outranks a lack of knowledge, and a lack of knowledge outranks a fault that
    leaves the device usable.
    """

    OK = 0
    INFO = 1
    """Severity of information for operators, which is never sent to the kubelet."""
    DEGRADED = 2
    """The device works with limitations: HEALTHY for the kubelet, with a message."""
    UNKNOWN = 3
    UNHEALTHY = 4


class Health(IntEnum):
    """Health of a device as the kubelet receives it.

    The numbers are those of the DRA health API (KEP-4680).
    """

    UNKNOWN = 0
    HEALTHY = 1
    UNHEALTHY = 2


class Blame(StrEnum):
    """Part of the system in which a fault must be fixed."""

    HARDWARE = "hardware"
    DRIVER = "driver"
    WORKLOAD = "workload"
    CONFIGURATION = "configuration"
    AGENT = "agent"
    """The agent itself must be fixed; the device has no known fault."""


class Repair(StrEnum):
    """Action that repairs a fault: the mildest action that is expected to end the fault.

    Members are in the order of :func:`worst_repair`: a later member interrupts more, or takes longer. An
    action that a machine can execute comes before those that need a person.
    """

    NONE = "none"
    """No repair of this list is needed or known: the advice says what to do, for example to change a
    configuration."""
    RESTART_WORKLOAD = "restart-workload"
    """Restart the workloads that use the device."""
    RESET_DEVICE = "reset-device"
    """Stop the workloads that use the device, then reset it."""
    RELOAD_DRIVER = "reload-driver"
    """Drain the node, then load or bind the device's driver again, or start its services again."""
    REBOOT_NODE = "reboot-node"
    """Drain and reboot the node."""
    INSPECT_HARDWARE = "inspect-hardware"
    """Run a diagnostic, and check seat, cables, power and cooling."""
    CONTACT_VENDOR = "contact-vendor"
    """Ask the vendor's support: its documents decide what to do."""
    REPLACE_HARDWARE = "replace-hardware"
    """Replace the device or its part."""


_REPAIR_RANKS: Final = {repair: rank for rank, repair in enumerate(Repair)}


def most_needed_first(causes: Iterable["Cause"]) -> list["Cause"]:
    """Return the causes with a severity above INFO, in the order in which they need a repair.

    The causes with the greatest severity come first. Of causes with equal severity, the one with the worst
    repair comes first.
    """
    severe = (cause for cause in causes if cause.severity > Severity.INFO)
    return sorted(severe, key=lambda cause: (-cause.severity, -_REPAIR_RANKS[cause.repair]))


def worst_repair(repairs: Iterable[Repair]) -> Repair:
    """Return the worst of several repairs, in the order of :class:`Repair`; NONE if there are none."""
    return max(repairs, key=_REPAIR_RANKS.__getitem__, default=Repair.NONE)


def repair_for_severity(repair: Repair, severity: Severity) -> Repair:
    """Return the repair to report for a fault of a given severity.

    A device with a fault of severity INFO needs no repair itself. At INFO, RESTART_WORKLOAD therefore stays,
    since the workload can need a restart, and other repairs become NONE.
    """
    if severity > Severity.INFO or repair is Repair.RESTART_WORKLOAD:
        return repair
    return Repair.NONE


class XidOverride(StrEnum):
    """Severity that an operator sets for a GPU error (XID), instead of the one in the XID table."""

    IGNORE = "ignore"
    INFO = "info"
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"


class Finding(NamedTuple):
    """Fault of a device, a pod or the Kubernetes node that a health rule or a driver's check finds at one
    moment."""

    code: str
    """Stable dotted code of the fault, ``mem.hugepages.pool_shrunk``."""
    severity: Severity
    evidence: str = ""
    """Proof of the fault: one line with the measured and the expected numbers."""
    advice: str = ""
    """Action for the operator; empty: the rule's advice applies."""
    blame: Blame | None = None
    """Part of the system in which the fault must be fixed; None: the rule's default applies."""
    since: Instant | None = None
    """Time at which the fault began, such as that of its first kernel-log line; None: the evaluation that
    found it."""
    repair: Repair | None = None
    """Repair of the fault; None: the rule's repair applies."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Finding that has lasted long enough to be reported.

    A cause is the reason for a device's health or message.
    """

    code: str
    severity: Severity
    blame: Blame
    evidence: str
    advice: str
    since: Instant
    driver_reported: bool = False
    """True: only the device's driver reported the fault, after a failed prepare. False: a rule found it."""
    keep_away: bool = False
    """True: the device gets a taint although it has no known fault."""
    repair: Repair = Repair.NONE
    """Repair that is expected to end the fault."""


class DeviceHealth(NamedTuple):
    """Health of one device, with its causes, as reported to the kubelet and to operators."""

    pool: str
    device: str
    kind: str
    health: Health
    severity: Severity
    message: str
    """Text for the kubelet, at most 1,024 bytes of UTF-8: each cause with its code, the worst cause first."""
    since: Instant
    """Time of the last change of health, severity or message."""
    verified: Instant
    """Time at which all sources of the device had last been read; for a GPU that does not answer, the time of
    the evaluation."""
    timeout_s: int
    """Lease: how long the kubelet may use this health report [s]."""
    causes: tuple[Cause, ...] = ()
    """Causes of the device's health, worst first; empty: no fault is known."""
    attributes: tuple[tuple[str, str], ...] = ()
    """Known attributes of the device, as (name, value): ``uuid``, ``pciBusId``, ``product``, ..."""
    driver: str = ""
    """Driver that declared the device; empty: a host device."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Identity of the device, unique within a report: (driver, pool, name)."""
        return (self.driver, self.pool, self.device)

    @property
    def repair(self) -> Repair | None:
        """Worst repair of all causes of the device's health.

        None: unknown, because the device has a fault without causes.
        """
        if not self.causes and self.severity > Severity.OK:
            return None
        return worst_repair(cause.repair for cause in self.causes)

    def with_verification(self, verified: Instant, timeout_s: int) -> "DeviceHealth":
        """Return the device's health with another verification time and another lease.

        The lease is the time for which the kubelet trusts the health.
        """
        return _new(DeviceHealth, (*self[:_VERIFIED], verified, timeout_s, *self[_VERIFIED + 2 :]))


_VERIFIED: Final = DeviceHealth._fields.index("verified")


@dataclass(frozen=True, slots=True)
class NonDeviceCause:
    """Reported fault of a pod or of the Kubernetes node, not of a device.

    The agent does not send the fault to the kubelet.
    """

    subject: str
    """Object that has the fault: ``node``, or ``pod 0f3c... (team-a/train-0) container main``."""
    cause: Cause
    devices: tuple[str, ...] = ()
    """Devices that the pod uses: ``<driver>/<pool>/<name>``, host devices by name."""


@dataclass(frozen=True, slots=True)
class NotApplicable:
    """Health rule that was not evaluated for a device, with the reason."""

    device: str
    code: str
    reason: str


# --- taints ------------------------------------------------------------------------------------------------

TAINTS_MAX: Final = 16
"""Largest number of taints on one device; the API server rejects more."""
SLICE_DEVICES_MAX: Final = 128
"""Largest number of devices in a ResourceSlice without taints."""
TAINTED_SLICE_DEVICES_MAX: Final = 64
"""Largest number of devices in a ResourceSlice with at least one taint."""


class Effect(StrEnum):
    """Effect of a taint, spelled as in the Kubernetes API."""

    NONE = "None"
    """The taint informs operators; pods are neither kept away nor evicted."""
    NO_SCHEDULE = "NoSchedule"
    NO_EXECUTE = "NoExecute"
    """Kubernetes evicts pods that use the device and do not tolerate the taint."""


class Taint(NamedTuple):
    """One taint of a device."""

    key: str
    """Key of the taint in the form of a label name, ``<driver>/<cause>``."""
    value: str
    """Value of the taint in the form of a label value; may be empty."""
    effect: Effect
    added_wall_s: int
    """Time when the taint was first published [s since 1970].

    Tolerations count from this time, so it stays until key, value or effect changes, or the clock is set.
    """

    @property
    def identity(self) -> tuple[str, str, Effect]:
        """Key, value and effect of the taint, without the time of the taint."""
        return (self.key, self.value, self.effect)


@dataclass(frozen=True, slots=True)
class Taints:
    """Taints of all devices of a driver: the complete set, which replaces any earlier set."""

    devices: Mapping[DeviceRef, tuple[Taint, ...]] = field(default_factory=dict)
    """Taints of every device of the driver, worst first, at most :data:`TAINTS_MAX` each."""

    def slice_limit(self, pool: str) -> int:
        """Return how many devices a ResourceSlice of a pool may have: 128, or 64 if a device of the pool has
        a taint."""
        tainted = any(taints for device, taints in self.devices.items() if device.pool == pool)
        return TAINTED_SLICE_DEVICES_MAX if tainted else SLICE_DEVICES_MAX
