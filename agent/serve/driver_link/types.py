"""Types that the driver link shares with the code that handles a driver's calls."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from agent.errors import DrahealthError
from agent.model.claim import Claim
from agent.model.prepare import PrepareVerdict
from agent.model.taint import Taints
from agent.system.threads.latest import Latest

if TYPE_CHECKING:
    from agent.prepare.evidence import Evidence


class ClaimResult(NamedTuple):
    """Result that a driver reports for a prepare or unprepare of a claim."""

    claim: Claim
    evidence: "tuple[Evidence, ...] | None"
    """Evidence of the failure, the outermost error first; empty: a failure without evidence. None:
    success."""


class SyncResult(NamedTuple):
    """Result of a driver's declaration of its devices."""

    devices: int
    """Number of devices that the driver has declared now."""
    evaluated: bool
    """Whether every declared device already has a verdict."""


class DeviceDeclaration(NamedTuple):
    """Device that a driver declares."""

    pool: str
    """Resource pool of the device; empty: the name of the Kubernetes node."""
    keys: Mapping[str, object]
    """Values by key, as in a file in ``devices.d``: ``{"name": "cpus-0", "kind": "cpu", ...}``."""


class TooManyDevices(DrahealthError):
    """A declaration exceeds the maximum of devices of all drivers; has the numbers."""


class DriverLinkHandler(Protocol):
    """Handler of one driver's calls. Thread-safe; each call may block for as long as a disk does."""

    def sync(self, rows: Sequence[DeviceDeclaration]) -> SyncResult:
        """Declare all devices of the driver.

        Raises:
            ConfigError: A device is not valid; names the device, the key, and the value with its limit.
            TooManyDevices: Together with those of other drivers these are too many devices.
            Busy: Another program wrote the driver's declaration file.
        """

    def check(self, claims: Sequence[Claim]) -> list[PrepareVerdict | None]:
        """Return the known reason why each claim cannot be prepared; None: no reason. Reads no disk."""

    def classify(self, claim: Claim, evidence: "Sequence[Evidence]") -> PrepareVerdict:
        """Return the verdict on a failed prepare of a claim, from its evidence. Reads no disk."""

    def prepared(self, results: Sequence[ClaimResult]) -> list[PrepareVerdict | None]:
        """Record the results of prepares, and return the verdict on each that failed; None: the prepare
        succeeded."""

    def unprepared(self, results: Sequence[ClaimResult]) -> list[PrepareVerdict | None]:
        """Record the results of unprepares, and return the verdict on each that failed; None: the unprepare
        succeeded, or failed and the driver should report success."""

    @property
    def taints(self) -> Latest[Taints]:
        """Taints to publish. Raises ConfigError if the driver's name cannot begin a taint's key."""
