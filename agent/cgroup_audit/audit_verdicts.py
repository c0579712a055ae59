"""Results of the cgroup audit: actual values, verdicts (MATCH, LOWER, ...) and their consequences."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from agent.cgroup_audit.cgroup_settings import CgroupSettingId, SettingKind
from agent.cgroup_audit.expected_cgroups import CgroupId
from agent.cgroup_audit.expected_values import ExpectedSetting
from agent.model.reading import Reading


@dataclass(frozen=True, slots=True)
class ActualCgroup:
    """Values that were read from one cgroup."""

    values: Mapping[CgroupSettingId, Reading] = field(default_factory=dict)
    """Value by setting: limits in bytes or us, NO_LIMIT if there is none; CPU sets as bit sets; scores."""
    controllers: frozenset[str] | None = None
    """Controllers that are enabled in the cgroup; None: not read."""
    is_gone: bool = False
    """True: the cgroup did not exist when it was read."""
    since_change_s: float | None = None
    """Time since the last start or resize of its container or pod [s]; None: long ago or unknown."""


class AuditVerdict(StrEnum):
    """Result of the comparison of one cgroup setting with its expected value."""

    MATCH = "match"
    """The cgroup setting has the expected value."""
    ROUNDED = "rounded"
    """The cgroup setting has the expected value after rounding by systemd or the kernel."""
    LOWER = "lower"
    """The cgroup setting is below the expected value."""
    HIGHER = "higher"
    """The cgroup setting is above the expected value."""
    UNLIMITED = "unlimited"
    """The setting has no limit although one is expected."""
    LIMITED = "limited"
    """The setting has a limit although none is expected."""
    PARENT_TIGHTER = "parent-tighter"
    """The pod's limit is tighter than the limits of its containers."""
    MISSING = "missing"
    """The cgroup's controller or the setting's file is missing, or cannot be read."""
    NOT_MISSED = "not-missed"
    """The file does not exist, but no limit is missing.

    No limit is expected, as on older kernels; or the container runtime sets no limits of this kind, and the
    pod's limit is enough.
    """
    VANISHED = "vanished"
    """The cgroup is gone: its container or pod has ended."""
    QUIET = "quiet"
    """The cgroup setting is wrong shortly after a change and may still be written."""
    UNKNOWN = "unknown"
    """The expected or the actual value of the cgroup setting is unknown."""


DRIFT_VERDICTS: Final = frozenset(
    {
        AuditVerdict.LOWER,
        AuditVerdict.HIGHER,
        AuditVerdict.UNLIMITED,
        AuditVerdict.LIMITED,
        AuditVerdict.PARENT_TIGHTER,
        AuditVerdict.MISSING,
    }
)
"""Verdicts that mean a wrong cgroup setting; the other verdicts mean a correct or undecided one."""

_LESS: Final = {
    SettingKind.WEIGHT: "on a busy node the cgroup gets less CPU time than allocated",
    SettingKind.QUOTA: "the cgroup is throttled before it uses its allocation",
    SettingKind.PERIOD: "the cgroup is throttled more often, for shorter times",
    SettingKind.MEMORY: "the cgroup's processes are OOM-killed before they use the allocation",
    SettingKind.PAGES: "access to allocated pages ends in SIGBUS",
    SettingKind.RESERVED: "mapping allocated pages fails with ENOMEM",
    SettingKind.CPUS: "the cgroup is excluded from allocated CPUs",
    SettingKind.EFFECTIVE: "the cgroup's processes cannot run on allocated CPUs",
    SettingKind.HIGH: "the cgroup is throttled before it uses its allocation",
    SettingKind.MIN: "the kernel may reclaim memory that the requests protect",
    SettingKind.LOW: "the kernel reclaims memory that the requests protect as early as unprotected memory",
    SettingKind.SWAP: "less of the cgroup's memory can be swapped, so it runs out of memory earlier",
    SettingKind.OOM_SCORE: "when memory runs out, the kernel kills other processes first",
}
_MORE: Final = {
    SettingKind.WEIGHT: "on a busy node the cgroup takes CPU time from other cgroups",
    SettingKind.QUOTA: "the cgroup can use CPU time allocated to others",
    SettingKind.PERIOD: "the cgroup is throttled less often, for longer times",
    SettingKind.MEMORY: "the cgroup can use memory allocated to others",
    SettingKind.PAGES: "the cgroup can use pages allocated to others",
    SettingKind.RESERVED: "the cgroup can reserve pages allocated to others",
    SettingKind.CPUS: "the cgroup may run on CPUs allocated to others",
    SettingKind.EFFECTIVE: "the cgroup runs on CPUs allocated to others",
    SettingKind.HIGH: "the cgroup is not throttled before it reaches its limit",
    SettingKind.MIN: "memory beyond the requests is kept from other cgroups",
    SettingKind.LOW: "memory beyond the requests is reclaimed later than that of other cgroups",
    SettingKind.SWAP: "more of the cgroup's memory is swapped than allocated",
    SettingKind.OOM_SCORE: "when memory runs out, the kernel kills these processes first",
}
CONSEQUENCES: Final[Mapping[AuditVerdict, Mapping[SettingKind, str]]] = {
    AuditVerdict.LOWER: _LESS,
    AuditVerdict.LIMITED: _LESS,
    AuditVerdict.HIGHER: _MORE,
    AuditVerdict.UNLIMITED: _MORE,
    AuditVerdict.PARENT_TIGHTER: {
        SettingKind.QUOTA: "the pod is throttled before its containers use their allocation",
        SettingKind.MEMORY: "the pod runs out of memory before its containers use their allocation",
        SettingKind.PAGES: "the pod runs out of pages before its containers use their allocation",
        SettingKind.RESERVED: "the pod cannot reserve the pages allocated to its containers",
    },
    AuditVerdict.MISSING: dict.fromkeys(SettingKind, "the allocation has no effect"),
}
"""Consequence for the container or pod, by verdict and kind of setting."""


class SettingComparison(NamedTuple):
    """Actual and expected value of one cgroup setting, with the result of comparing them."""

    cgroup: CgroupId
    expected: ExpectedSetting
    actual: Reading
    verdict: AuditVerdict
    reason: str
    """Compared numbers and the arithmetic of the expected value. It changes only if a number changes."""
    consequence: str
    """Consequence of a wrong setting for the container or pod; empty: none."""

    @property
    def setting(self) -> CgroupSettingId:
        """Identity of the cgroup setting."""
        return self.expected.setting
