"""Interface between the driver link service and the handler of a driver's calls."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from agent.errors import DrahealthError
from agent.model.claim import Claim, ClaimRef
from agent.model.health import Finding, Taints
from agent.model.prepare import OtherDriverFailure, PrepareVerdict
from agent.system.threads.latest_value import LatestValue

if TYPE_CHECKING:
    from agent.prepare.evidence import Evidence


class ReportedClaimResult(NamedTuple):
    """Success or failure of a prepare or unprepare of one claim, as its driver reports it."""

    claim: Claim
    evidence: "tuple[Evidence, ...] | None"
    """Evidence of the failure, the outermost error first; may be empty. None: the claim's call succeeded."""


class SyncDevicesResult(NamedTuple):
    """Result of a SyncDevices call, with which a driver declares its devices."""

    devices: int
    """Number of devices that the driver has declared."""
    evaluated: bool
    """Whether every declared device has a verdict; False: the verdicts follow on the health stream."""


class DeviceDeclaration(NamedTuple):
    """Device that a driver declares to the agent, which then evaluates the device's health."""

    pool: str
    """Name of the device's resource pool; empty: the name of the Kubernetes node."""
    keys: Mapping[str, object]
    """Keys of the device in a declaration file: ``{"name": "cpus-0", "kind": "cpu", ...}``."""


class DriverCheckResult(NamedTuple):
    """Result of one run of a driver's own check on one device, as the driver reports it."""

    check: str
    pool: str
    """Name of the device's resource pool; empty: the name of the Kubernetes node."""
    device: str
    finding: Finding | None
    """Fault that the check found; None: no fault, or no result."""
    no_result_reason: str
    """Reason why the check's run has no result; empty: it has one."""
    every_s: float
    """Time between two runs of the check [s]."""
    lease_s: float
    """Time for which the result of the check counts [s]."""
    age_s: float
    """Age of the result at the driver's call [s]."""
    raise_after: int
    clear_after: int
    run: int
    """Number of the check's run; 0: not numbered. The same number again: the result was sent again."""


class TooManyDevices(DrahealthError):
    """Error: the devices of all drivers together would be more than the maximum."""


class DriverLinkHandler(Protocol):
    """Handler of the calls that one driver makes to the agent over its socket (``drahealth.v1.DriverLink``).

    Thread-safe. May block while it writes to a disk.
    """

    def sync(self, declarations: Sequence[DeviceDeclaration]) -> SyncDevicesResult:
        """Replace the devices that the driver has declared to the agent.

        Raises:
            ConfigError: A device is not valid; the error names the device, the key, and the value.
            TooManyDevices: The devices of all drivers together would be too many.
            ResourceBusyError: Another program wrote the driver's declaration file.
        """

    def report_checks(self, results: Sequence[DriverCheckResult]) -> None:
        """Replace the newest results of the driver's own checks. Reads no disk.

        Raises:
            ConfigError: A name or a finding is not valid; the error names the result and the value.
        """

    def check_claims(self, claims: Sequence[Claim]) -> list[PrepareVerdict | None]:
        """Return for each claim the known reason why a prepare would fail now; None: no known reason.

        Reads no disk.
        """

    def classify(self, claim: Claim, evidence: "Sequence[Evidence]") -> PrepareVerdict:
        """Return the verdict on a claim's failed prepare, by the evidence that the driver has of the failure.

        Records nothing, reads no disk.
        """

    def record_prepares(self, results: Sequence[ReportedClaimResult]) -> list[PrepareVerdict | None]:
        """Record the driver's results of prepares; return class, code and advice for each failure.

        The result for a success is None.
        """

    def record_unprepares(self, results: Sequence[ReportedClaimResult]) -> list[PrepareVerdict | None]:
        """Record the driver's results of unprepares; return class, code and advice for each failure.

        The result is None for a success, and for a failure that the driver should report to the kubelet as
        success.
        """

    def recorded_failures(self, uids: Iterable[str]) -> list[PrepareVerdict]:
        """Return the verdicts on the claims with these UIDs whose last prepare failed.

        Reads no disk.
        """

    def failures_at_other_drivers(self, claim: ClaimRef) -> Sequence[OtherDriverFailure]:
        """Return recent failures of other drivers for the pods that use a claim. Reads no disk."""

    @property
    def taints(self) -> LatestValue[Taints]:
        """Taints of the driver's devices.

        Raises ConfigError if the driver's name is not a valid beginning of a taint's key.
        """
