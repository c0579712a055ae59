"""Checks that operators configure as commands, and the results of their runs."""

from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from agent.model.health import Finding, Repair, Severity

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
