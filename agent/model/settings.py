"""Settings of the health engine (limits of the rules, expected devices, names) and limits of the history.

The module also has the checks that operators configure as commands, and the results of these checks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from agent.model.cpuset import CpuSet
from agent.model.health import Finding, Repair, Severity, XidOverride

CUSTOM_PREFIX: Final = "custom."
"""Prefix of the finding codes of custom checks."""
DEVICE_ARGUMENT: Final = "{device}"
"""Part of an argument that stands for the device's name: the command then runs once for each device."""


class CustomCheck(NamedTuple):
    """Check that an operator configures as a command (``[[check]]``)."""

    name: str
    """Name of the check: a DNS label."""
    command: tuple[str, ...]
    """Absolute path of the program, and its arguments."""
    devices: str = ""
    """Pattern of the names of the checked devices; empty: the check concerns the Kubernetes node."""
    period_s: float = 60
    timeout_s: float = 10
    severity: Severity = Severity.DEGRADED
    """Severity of a fault: INFO, DEGRADED or UNHEALTHY."""
    advice: str = ""
    repair: Repair = Repair.NONE
    raise_after: int = 1
    """Number of consecutive failing runs before the check's fault is raised."""
    clear_after: int = 1
    """Number of consecutive passing runs before the check's fault is cleared."""
    user: str = ""
    """Name or number of the command's user; empty: 65534 for an agent of root, else the agent's own."""
    memory: int = 64 << 20
    """Limit of the command's memory [bytes]."""
    processes: int = 32
    """Limit of the command's processes and threads."""

    @property
    def code(self) -> str:
        """Finding code of the check's fault."""
        return CUSTOM_PREFIX + self.name

    @property
    def is_per_device(self) -> bool:
        """Whether the command runs once for each device."""
        return any(DEVICE_ARGUMENT in argument for argument in self.command)

    def matches(self, device: str) -> bool:
        """Return whether the check concerns a device, by the device's name in reports."""
        return bool(self.devices) and fnmatchcase(device, self.devices)


class CustomCheckResult(NamedTuple):
    """Newest result of one of the operator's checks (``[[check]]``), for one device or for all."""

    check: str
    """Name of the check."""
    device: str
    """Device for which the command ran; empty: one run for the node or for all devices."""
    finding: Finding | None
    """Fault that the command reported; None: no fault, or no result."""
    no_result_reason: str
    """Reason why the command's run gave no result; empty: it gave one."""
    passes: int
    """Number of runs of the command that have finished."""
    beat_ns: int
    """CLOCK_MONOTONIC at the end of the command's last run [ns]."""
    equal_passes: int = 0
    """Number of consecutive runs, up to the last one, with this code or without a result; 0: not counted."""


# --- settings ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """Limits at which the GPU rules report a fault."""

    deadline_s: float = 5
    """Time without an answer to an NVML call after which the GPU is Unknown [s]."""
    dead_s: float = 60
    """Time without an answer to an NVML call after which the GPU is Unhealthy [s]."""
    probation_s: float = 60
    """Time for which a recovered GPU stays Unhealthy without a new fault [s]."""
    correctable_errors: int = 1000
    """Correctable memory errors within ``correctable_window_s`` that make a GPU degraded."""
    correctable_window_s: int = 3600
    expect: int | None = None
    """Expected number of GPUs; None: the number at the agent's start."""
    xids: tuple[tuple[int, XidOverride], ...] = ()
    """Severities that the operator sets for GPU errors, as (XID, severity)."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Limits at which the rules for memory, CPUs, NICs and cgroups report a fault."""

    correctable_errors: int = 24
    """Correctable errors within ``correctable_window_s`` that make a memory module or CPU degraded."""
    correctable_window_s: int = 86_400
    throttled_percent: int = 25
    """Share of throttled CPU periods above which a container is reported [%]."""
    throttled_window_s: int = 60
    pressure_percent: int = 10
    """Share of time with all tasks waiting above which the Kubernetes node is reported [%]."""
    pressure_window_s: int = 60
    nic_errors: int = 120
    """Symbol errors, or receive errors, of a NIC's port within ``nic_error_window_s`` that make the NIC
    degraded. The default is the rate up to which InfiniBand considers a link sound."""
    nic_error_window_s: int = 3600
    nic_link_downs: int = 3
    """Times that a port's link goes down within ``nic_link_window_s`` that make the NIC degraded."""
    nic_link_window_s: int = 600


@dataclass(frozen=True, slots=True)
class RuleOverride:
    """Operator's change of one health rule, or of a family of rules.

    None in a field: the property is not changed.
    """

    code: str
    """Finding code of the rule, or a family of codes: ``gpu.ecc.*``."""
    device: str = ""
    """Pattern of device names with ``*`` and ``?``; empty: all devices, and findings that concern no
    device."""
    off: bool | None = None
    """True: the rule is not evaluated. None: not changed."""
    severity: Severity | None = None
    """Severity that replaces the rule's own: INFO, DEGRADED or UNHEALTHY."""
    probation_s: int | None = None
    """Time for which a cleared cause is still reported [s]."""
    limit: int | None = None
    """Limit that replaces the rule's own limit, in the unit of the rule (errors, events)."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of the health engine, which evaluates the rules."""

    node: str
    """Name of the Kubernetes node; also the pool name of its devices."""
    drivers: tuple[str, ...] = ()
    """DRA drivers that the agent serves. A driver's socket reports the host devices until the driver declares
    its own devices."""
    lease_s: int = 30
    """Default lease: how long the kubelet may use a health report [s]."""
    throttle_events: int = 10
    """CPU thermal-throttle events within ``throttle_window_s`` that make the CPUs degraded."""
    throttle_window_s: int = 60
    expect_cpus: CpuSet | None = None
    """CPUs that must be online; None: the CPUs that are online at the agent's start."""
    expect_pools: Mapping[str, int] = field(default_factory=dict)
    """Expected number of hugepages by device name; other pools must keep their size at the agent's start."""
    host: HostLimits = field(default_factory=HostLimits)
    gpu: GpuLimits = field(default_factory=GpuLimits)
    rules: tuple[RuleOverride, ...] = ()
    """Changes of rules; of several entries for a code and device, the last one decides."""
    checks: tuple[CustomCheck, ...] = ()
    """Checks that the operator configures as commands (``[[check]]``)."""


TRACKED_USAGES_MAX: Final = 20_000
"""Largest number of current usages (device used by a pod) that the agent tracks; further ones are not
stored."""


HISTORY_FILE: Final = "history.sqlite"
"""Name of the history file in the state directory."""


class UsageHistoryLimits(NamedTuple):
    """Limits on the size of the history: on usages (device used by a pod) that have ended, and on changes of
    verdicts (state and causes of a device)."""

    rows: int = 10_000
    """Largest number of stored usages, and of stored changes of verdicts; 0: nothing is stored."""
    age_s: int = 30 * 86_400
    """Time after which an ended usage, or a change of a verdict, is deleted [s]."""
    size: int = 64 << 20
    """Largest size of the history file [bytes]; the default number of usages takes at most half of it."""
