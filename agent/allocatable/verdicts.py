"""Actual values of cgroups, verdicts of the comparison, and the consequence of each verdict."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from agent.allocatable.expected import GroupRef
from agent.allocatable.settings import SettingId, SettingKind
from agent.allocatable.values import ExpectedSetting
from agent.model.reading import Reading


@dataclass(frozen=True, slots=True)
class ActualCgroup:
    """Actual values of one cgroup."""

    values: Mapping[SettingId, Reading] = field(default_factory=dict)
    """Limits [bytes, us], NO_LIMIT if there is none; CPU sets as bit sets."""
    controllers: frozenset[str] | None = None
    """Enabled controllers; None: not read."""
    vanished: bool = False
    """Whether two reads of the agent did not find the cgroup."""
    changed_s: float | None = None
    """Time since the last start or resize of its container or pod [s]; None: long ago or unknown."""


class AuditVerdict(StrEnum):
    """Result of comparing one cgroup setting with its expected value."""

    MATCH = "match"
    ROUNDED = "rounded"
    """The value is the rounded form of the expected value."""
    LOWER = "lower"
    HIGHER = "higher"
    UNLIMITED = "unlimited"
    """The setting has no limit although one is expected."""
    LIMITED = "limited"
    """The setting has a limit although none is expected."""
    PARENT_TIGHTER = "parent-tighter"
    """The pod's limit is tighter than the limits of its containers."""
    MISSING = "missing"
    """The controller or the file is missing, or cannot be read."""
    NOT_MISSED = "not-missed"
    """The file does not exist, as on older kernels, and no limit is expected."""
    VANISHED = "vanished"
    """The cgroup is gone: its container or pod has ended."""
    QUIET = "quiet"
    """The value is wrong shortly after a change and may still be written."""
    UNKNOWN = "unknown"
    """The expected or the actual value is unknown."""


DRIFT: Final = frozenset(
    {
        AuditVerdict.LOWER,
        AuditVerdict.HIGHER,
        AuditVerdict.UNLIMITED,
        AuditVerdict.LIMITED,
        AuditVerdict.PARENT_TIGHTER,
        AuditVerdict.MISSING,
    }
)
"""Verdicts of a difference from the expected allocation."""

_LESS: Final = {
    SettingKind.WEIGHT: "on a busy node it gets less CPU time than allocated",
    SettingKind.QUOTA: "it is throttled before it uses its allocation",
    SettingKind.PERIOD: "it is throttled more often, for shorter times",
    SettingKind.MEMORY: "its processes are OOM-killed before they use their allocation",
    SettingKind.PAGES: "access to allocated pages ends in SIGBUS",
    SettingKind.RESERVED: "mapping allocated pages fails with ENOMEM",
    SettingKind.CPUS: "it is excluded from allocated CPUs",
    SettingKind.EFFECTIVE: "it cannot run on allocated CPUs",
}
_MORE: Final = {
    SettingKind.WEIGHT: "on a busy node it takes CPU time from others",
    SettingKind.QUOTA: "it can use CPU time allocated to others",
    SettingKind.PERIOD: "it is throttled less often, for longer times",
    SettingKind.MEMORY: "it can use memory allocated to others",
    SettingKind.PAGES: "it can use pages allocated to others",
    SettingKind.RESERVED: "it can reserve pages allocated to others",
    SettingKind.CPUS: "it may run on CPUs allocated to others",
    SettingKind.EFFECTIVE: "it runs on CPUs allocated to others",
}
RISKS: Final[Mapping[AuditVerdict, Mapping[SettingKind, str]]] = {
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
"""Consequence by verdict and cgroup setting."""


class SettingComparison(NamedTuple):
    """Verdict on one cgroup setting."""

    group: GroupRef
    expected: ExpectedSetting
    actual: Reading
    verdict: AuditVerdict
    why: str
    """Compared numbers and the arithmetic of the expected value. The text changes only if a number
    changes."""
    risk: str
    """Consequence of the verdict; empty: none."""

    @property
    def knob(self) -> SettingId:
        """Identity of the cgroup setting."""
        return self.expected.knob
