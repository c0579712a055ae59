"""Comparison of actual with expected cgroup settings: a verdict for each setting, with reason and risk.

A setting that the agent did not read, or whose expected value is unknown, is UNKNOWN. A wrong value shortly
after a start or a resize is QUIET: kubelet and runtime may still be writing.
"""

import errno
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final, NamedTuple

from agent.allocatable.cgroups import Level
from agent.allocatable.expected import ExpectedGroup, GroupRef
from agent.allocatable.pod import Pod
from agent.allocatable.settings import SettingId, SettingKind, file_of, limit_of, value_text
from agent.allocatable.values import AcceptedValue, ExpectedSetting
from agent.allocatable.verdicts import DRIFT, RISKS, ActualCgroup, AuditVerdict, SettingComparison
from agent.model.cgroup import NO_LIMIT
from agent.model.cpuset import format_cpus
from agent.model.reading import NEVER_READ, Absence, Missing

_SHARED: Final = (SettingKind.QUOTA, SettingKind.MEMORY, SettingKind.PAGES, SettingKind.RESERVED)
"""Cgroup settings for which the pod's limit also bounds its containers."""


def tighter_limits(
    pod: ExpectedGroup, groups: Sequence[ExpectedGroup], actual: Mapping[GroupRef, ActualCgroup]
) -> Mapping[SettingId, str]:
    """Describe each cgroup setting whose limit is unexpectedly tighter in the pod than in its containers.

    A pod's expected limit can be below the sum of its containers' limits: a shared claim counts once.
    """
    tight = {}
    mine_are = (Level.CONTAINER, pod.group.pod_uid)
    containers = [one for one in groups if (one.group.level, one.group.pod_uid) == mine_are]
    for knob in (one.knob for one in pod.knobs if one.knob.knob in _SHARED):
        mine = _amount(pod, knob, actual)
        theirs = [pair for one in containers if (pair := _amount(one, knob, actual))]
        if mine is None or not theirs:
            continue
        for words, of in (("one of its containers has", max), ("its containers together have", _sum)):
            most = of([pair.read for pair in theirs])
            if mine.read < most and mine.meant >= of([Fraction(pair.meant) for pair in theirs]):
                tight[knob] = f"{words} {value_text(knob.knob, int(most))}"
                break
    return tight


class _Pair(NamedTuple):
    meant: int
    read: Fraction


def _amount(group: ExpectedGroup, knob: SettingId, actual: Mapping[GroupRef, ActualCgroup]) -> _Pair | None:
    """Return the expected and actual amount of a cgroup setting; None: one of both is unknown."""
    read = actual.get(group.group)
    expected = next((one for one in group.knobs if one.knob == knob), None)
    if read is None or read.vanished or expected is None or not expected.accepted:
        return None
    value, meant = read.values.get(knob), expected.accepted[0].value
    if not isinstance(value, int):
        return None
    if value in {option.value for option in expected.accepted}:
        return _Pair(
            meant, Fraction(meant)
        )  # containers are rounded one by one, so their sum can exceed the pod
    return _Pair(meant, limit_of(value) * _share(expected, read, value))


def _share(expected: ExpectedSetting, read: ActualCgroup, value: int) -> Fraction:
    """Return the factor that scales a quota from the actual to the expected CFS period."""
    period = read.values.get(SettingId(SettingKind.PERIOD))
    if not expected.over_us or not isinstance(period, int) or not period or limit_of(value) == NO_LIMIT:
        return Fraction(1)
    return Fraction(expected.over_us, period)


def _sum(amounts: Iterable[Fraction]) -> Fraction:
    return min(sum(amounts, Fraction(0)), Fraction(NO_LIMIT))


_GONE: Final = frozenset({errno.ENOENT, errno.ENODEV})
"""Error numbers of a read whose cgroup was removed meanwhile."""
_CPU_SETS: Final = frozenset({SettingKind.CPUS, SettingKind.EFFECTIVE})


def compare(
    expected: Sequence[ExpectedGroup], actual: Mapping[GroupRef, ActualCgroup], version: int
) -> tuple[SettingComparison, ...]:
    """Compare each setting of each cgroup, in the order of ``expected``.

    Args:
        expected: Expected values of a pod and its containers, or of QoS classes.
        actual: Actual values by cgroup; a missing cgroup was not read.
        version: cgroup version, 1 or 2, which decides the file names.
    """
    found = []
    for group in expected:
        read = actual.get(group.group)
        tight = tighter_limits(group, expected, actual) if group.group.level is Level.POD else {}
        for knob in group.knobs:
            compared = _compared(group.group, knob, read, version)
            found.append(
                _quiet_after_change(_with_tighter_pod(compared, tight.get(knob.knob, "")), group, read)
            )
    return tuple(found)


def changed_s(pod: Pod, now_wall_s: float, container: str = "") -> float | None:
    """Return the time since the last start of a container or since a resize [s]; None: unknown."""
    times = [one.started_wall_s for one in pod.containers if container in {"", one.name}]
    times += [pod.resize.since_wall_s] if pod.resize else []
    known = [now_wall_s - when for when in times if when is not None]
    return min(known, default=None)


# --- one knob ----------------------------------------------------------------------------------------------


def _compared(
    group: GroupRef, expected: ExpectedSetting, read: ActualCgroup | None, version: int
) -> SettingComparison:
    reading = read.values.get(expected.knob) if read else None

    def result(verdict: AuditVerdict, why: str) -> SettingComparison:
        risk = RISKS.get(verdict, {}).get(expected.knob.knob, "")
        value = NEVER_READ if reading is None else reading
        return SettingComparison(group, expected, value, verdict, why, risk)

    if read is not None and read.vanished:
        return result(AuditVerdict.VANISHED, "the cgroup is gone")
    if read is None or reading is None:
        return result(AuditVerdict.UNKNOWN, "not read")
    if isinstance(reading, Missing):
        return result(*_missing(expected, reading, read, version))
    if not expected.accepted:
        return result(AuditVerdict.UNKNOWN, f"the expected value is unknown: {expected.unknown}")
    if expected.knob.knob in _CPU_SETS:
        return result(*_cpus(expected, reading, version))
    return result(*_number(_rescaled(expected, read), reading))


def _missing(
    expected: ExpectedSetting, reading: Missing, read: ActualCgroup, version: int
) -> tuple[AuditVerdict, str]:
    file = file_of(expected.knob, version)
    if reading.errno in _GONE and reading.absence is Absence.UNREADABLE:
        return AuditVerdict.VANISHED, f"{file.name} and its cgroup are gone"
    if expected.accepted and expected.accepted[0].value == NO_LIMIT:
        return AuditVerdict.NOT_MISSED, f"there is no {file.name}, and no limit is expected"
    if read.controllers is not None and file.controller not in read.controllers:
        return AuditVerdict.MISSING, f"the controller {file.controller} is not enabled"
    if reading.absence is Absence.UNREADABLE:
        return AuditVerdict.MISSING, f"{file.name} cannot be read: {reading}"
    if expected.knob.knob is SettingKind.RESERVED:
        return AuditVerdict.NOT_MISSED, f"{file.name} does not exist before Linux 5.7"
    return AuditVerdict.MISSING, f"there is no {file.name}"


def _rescaled(expected: ExpectedSetting, read: ActualCgroup) -> ExpectedSetting:
    """Scale an expected quota to the actual CFS period. The period has a verdict of its own."""
    period = read.values.get(SettingId(SettingKind.PERIOD))
    if not expected.over_us or not isinstance(period, int) or period == expected.over_us:
        return expected

    def scaled(option: AcceptedValue) -> AcceptedValue:
        return option._replace(value=option.value * period // expected.over_us)

    return replace(
        expected,
        accepted=tuple(map(scaled, expected.accepted)),
        arithmetic=f"{expected.arithmetic}, scaled to a period of {period}",
        explains=tuple(map(scaled, expected.explains)),
    )


def _number(expected: ExpectedSetting, value: int) -> tuple[AuditVerdict, str]:
    value = limit_of(value)
    why = _why(expected, value)
    for option in expected.accepted:
        if option.value == value:
            note = f", {option.note}" if option.note else ""
            return (AuditVerdict.ROUNDED if option.rounded else AuditVerdict.MATCH), f"{why}{note}"
    text = value_text(expected.knob.knob, value)
    why += next((f"; {text} is {one.note}" for one in expected.explains if one.value == value), "")
    return _direction(expected, value), why


def _direction(expected: ExpectedSetting, value: int) -> AuditVerdict:
    """Return whether a wrong value is lower or higher than expected, or a limit is missing or unexpected.

    Between two accepted values, the first accepted value decides.
    """
    values = [option.value for option in expected.accepted]
    if values[0] == NO_LIMIT:
        return AuditVerdict.LIMITED
    if value == NO_LIMIT:
        return AuditVerdict.UNLIMITED
    if value < min(values) or min(values) < value < values[0]:
        return AuditVerdict.LOWER
    return AuditVerdict.HIGHER


def _cpus(expected: ExpectedSetting, value: int, version: int) -> tuple[AuditVerdict, str]:
    wanted = expected.accepted[0].value
    missing, extra = wanted & ~value, value & ~wanted
    why = _why(expected, value)
    if not value and version == 2 and expected.knob.knob is SettingKind.CPUS:
        return AuditVerdict.UNLIMITED, f"{why}; an empty set inherits the CPUs of the parent cgroup"
    if missing:
        why += f", missing {format_cpus(missing)}"
    if extra:
        why += f", extra {format_cpus(extra)}"
    return (AuditVerdict.LOWER if missing else AuditVerdict.HIGHER if extra else AuditVerdict.MATCH), why


def _why(expected: ExpectedSetting, value: int) -> str:
    text = value_text(expected.knob.knob, value)
    return f"{text}, expected {expected_text(expected)}: {expected.arithmetic}"


def expected_text(expected: ExpectedSetting) -> str:
    """Format the accepted values of a cgroup setting for display, without rounded values."""
    texts = [value_text(expected.knob.knob, one.value) for one in expected.accepted if not one.rounded]
    return " or ".join(dict.fromkeys(texts)) or "unknown"


# --- adjustments of a verdict ------------------------------------------------------------------------------


def _with_tighter_pod(compared: SettingComparison, tight: str) -> SettingComparison:
    """Add the pod's tighter limit to a verdict: a correct value becomes PARENT_TIGHTER, a wrong one gets it
    as reason."""
    if not tight:
        return compared
    why = f"{compared.why}; {tight}"
    if compared.verdict in {AuditVerdict.LOWER, AuditVerdict.LIMITED}:
        return compared._replace(why=why)
    risk = RISKS[AuditVerdict.PARENT_TIGHTER][compared.knob.knob]
    return compared._replace(verdict=AuditVerdict.PARENT_TIGHTER, why=why, risk=risk)


def _quiet_after_change(
    compared: SettingComparison, group: ExpectedGroup, read: ActualCgroup | None
) -> SettingComparison:
    """Change the verdict of a wrong value to QUIET shortly after a start or resize.

    A clock step does not extend this time.
    """
    since = read.changed_s if read else None
    if since is None or abs(since) >= group.quiet_s or compared.verdict not in DRIFT:
        return compared
    why = f"{compared.why}; it changed less than {group.quiet_s} s ago"
    return compared._replace(verdict=AuditVerdict.QUIET, why=why, risk="")
