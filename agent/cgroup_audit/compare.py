"""Comparison of actual with expected cgroup settings: a verdict on each setting, with its reason.

A setting that the agent did not read, or whose expected value is unknown, is UNKNOWN. A wrong value shortly
after a start or a resize is QUIET: the kubelet and the container runtime may still be writing.
"""

import errno
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final, NamedTuple

from agent.cgroup_audit.audit_verdicts import (
    CONSEQUENCES,
    DRIFT_VERDICTS,
    ActualCgroup,
    AuditVerdict,
    SettingComparison,
)
from agent.cgroup_audit.cgroup_paths import CgroupLevel
from agent.cgroup_audit.cgroup_settings import (
    PROTECTIONS,
    UNLIMITED_FROM,
    CgroupSettingId,
    SettingKind,
    format_setting_value,
    normalize_limit,
    setting_file,
)
from agent.cgroup_audit.expected_cgroups import CgroupId, ExpectedCgroup
from agent.cgroup_audit.expected_values import AcceptedValue, ExpectedSetting
from agent.cgroup_audit.pod_model import Pod
from agent.model.cpuset import format_cpus
from agent.model.pod_findings import NO_LIMIT
from agent.model.reading import NEVER_READ, Absence, Missing, is_absent

_POD_WIDE_LIMITS: Final = (SettingKind.QUOTA, SettingKind.MEMORY, SettingKind.PAGES, SettingKind.RESERVED)
"""Cgroup settings for which the pod's limit also bounds its containers."""


def tighter_pod_limits(
    pod: ExpectedCgroup, groups: Sequence[ExpectedCgroup], actual: Mapping[CgroupId, ActualCgroup]
) -> Mapping[CgroupSettingId, str]:
    """Return the settings whose actual limit is tighter in the pod's cgroup than in its containers' cgroups.

    Settings whose expected limit is also tighter in the pod's cgroup are left out: the pod counts a claim
    that its containers share only once. The result has a text with the containers' limit for each setting.
    """
    tight = {}
    mine_are = (CgroupLevel.CONTAINER, pod.cgroup.pod_uid)
    containers = [group for group in groups if (group.cgroup.level, group.cgroup.pod_uid) == mine_are]
    for setting in (limit.setting for limit in pod.settings if limit.setting.kind in _POD_WIDE_LIMITS):
        own = _expected_and_actual(pod, setting, actual)
        pairs = [
            # of the pod's limit, a container without a limit needs at most its own expected one
            pair._replace(actual=Fraction(pair.expected)) if pair.actual >= NO_LIMIT else pair
            for container in containers
            if (pair := _expected_and_actual(container, setting, actual))
        ]
        if own is None or not pairs:
            continue
        for words, combine in (("one of its containers has", max), ("its containers together have", _sum)):
            most = combine([pair.actual for pair in pairs])
            if own.actual < most and own.expected >= combine([Fraction(pair.expected) for pair in pairs]):
                tight[setting] = f"{words} {format_setting_value(setting.kind, int(most))}"
                break
    return tight


class _Amounts(NamedTuple):
    expected: int
    actual: Fraction


def _expected_and_actual(
    group: ExpectedCgroup, setting: CgroupSettingId, actual: Mapping[CgroupId, ActualCgroup]
) -> _Amounts | None:
    read = actual.get(group.cgroup)
    expected = next((known for known in group.settings if known.setting == setting), None)
    if read is None or read.is_gone or expected is None or not expected.accepted:
        return None
    value, meant = read.values.get(setting), expected.accepted[0].value
    if not isinstance(value, int):
        return None
    if value in {option.value for option in expected.accepted}:
        # containers are rounded one by one, so their sum can exceed the pod
        return _Amounts(meant, Fraction(meant))
    return _Amounts(meant, normalize_limit(value) * _period_ratio(expected, read, value))


def _period_ratio(expected: ExpectedSetting, read: ActualCgroup, value: int) -> Fraction:
    """Return the factor that scales a quota from the actual to the expected CFS period."""
    period = read.values.get(CgroupSettingId(SettingKind.PERIOD))
    if not expected.period_us or not isinstance(period, int) or not period or value >= UNLIMITED_FROM:
        return Fraction(1)
    return Fraction(expected.period_us, period)


def _sum(amounts: Iterable[Fraction]) -> Fraction:
    return min(sum(amounts, Fraction(0)), Fraction(NO_LIMIT))


_GONE: Final = frozenset({errno.ENOENT, errno.ENODEV})
"""Error numbers of a failed read that show that the cgroup was removed."""
_CPU_SETS: Final = frozenset({SettingKind.CPUS, SettingKind.EFFECTIVE})


def compare_cgroups(
    expected: Sequence[ExpectedCgroup], actual: Mapping[CgroupId, ActualCgroup], cgroup_version: int
) -> tuple[SettingComparison, ...]:
    """Compare each cgroup setting with its expected value, in the order of ``expected``.

    Args:
        expected: Expected values of a pod and its containers, or of QoS classes.
        actual: Actual values by cgroup; a cgroup without an entry was not read.
        cgroup_version: 1 or 2; decides the names of the files.
    """
    found = []
    for group in expected:
        read = actual.get(group.cgroup)
        tight = tighter_pod_limits(group, expected, actual) if group.cgroup.level is CgroupLevel.POD else {}
        for setting in group.settings:
            if _has_no_process(setting, read):
                continue
            compared = _compare_setting(group.cgroup, setting, read, cgroup_version)
            found.append(
                _quiet_after_change(_with_tighter_pod(compared, tight.get(setting.setting, "")), group, read)
            )
    return tuple(found)


def _has_no_process(expected: ExpectedSetting, read: ActualCgroup | None) -> bool:
    """Return whether a setting is the OOM score of a cgroup in which the agent found no process."""
    is_score = expected.setting.kind is SettingKind.OOM_SCORE and read is not None and not read.is_gone
    return is_score and read is not None and is_absent(read.values.get(expected.setting, NEVER_READ))


def compare_inherited_limit(compared: SettingComparison, pod_limit: int) -> SettingComparison:
    """Compare the pod's limit with a container's expected limit, if the container's own cgroup has no limit.

    The kernel then enforces the pod's limit only. A pod's limit above the container's expected limit is
    correct, since all containers of the pod share it.
    """
    expected, kind = compared.expected, compared.setting.kind
    verdict, _ = _compare_number(expected, pod_limit)
    why = f"no limit of its own; the pod's limit of {format_setting_value(kind, pod_limit)} is in effect"
    if verdict is AuditVerdict.LOWER:
        if compared.verdict is AuditVerdict.QUIET:
            return compared
        why = f"{why}, expected {format_expected(expected)}: {expected.arithmetic}"
        return compared._replace(verdict=verdict, reason=why, consequence=CONSEQUENCES[verdict][kind])
    if verdict not in {AuditVerdict.MATCH, AuditVerdict.ROUNDED}:
        verdict = AuditVerdict.NOT_MISSED
        why = f"{why} for all its containers"
    return compared._replace(verdict=verdict, reason=why, consequence="")


def since_change_s(pod: Pod, now_wall_s: float, container: str = "") -> float | None:
    """Return the time since the last start of a container or the last resize of its pod [s]; None: unknown.

    Args:
        container: Container whose start counts; empty: the starts of all containers of the pod count.
    """
    times = [known.started_wall_s for known in pod.containers if container in {"", known.name}]
    times += [pod.resize.since_wall_s] if pod.resize else []
    known = [now_wall_s - when for when in times if when is not None]
    return min(known, default=None)


def _compare_setting(
    group: CgroupId, expected: ExpectedSetting, read: ActualCgroup | None, version: int
) -> SettingComparison:
    reading = read.values.get(expected.setting) if read else None

    def result(verdict: AuditVerdict, why: str) -> SettingComparison:
        risk = CONSEQUENCES.get(verdict, {}).get(expected.setting.kind, "")
        value = NEVER_READ if reading is None else reading
        return SettingComparison(group, expected, value, verdict, why, risk)

    if read is not None and read.is_gone:
        return result(AuditVerdict.VANISHED, "the cgroup is gone")
    if read is None or reading is None:
        return result(AuditVerdict.UNKNOWN, "not read")
    if isinstance(reading, Missing):
        return result(*_compare_missing(expected, reading, read, version))
    if not expected.accepted:
        return result(*_compare_unknown(_with_actual_period(expected, read), reading))
    if expected.setting.kind in _CPU_SETS:
        return result(*_compare_cpus(expected, reading, version))
    return result(*_compare_number(_with_actual_period(expected, read), reading))


def _compare_missing(
    expected: ExpectedSetting, reading: Missing, read: ActualCgroup, version: int
) -> tuple[AuditVerdict, str]:
    file = setting_file(expected.setting, version)
    if reading.errno in _GONE and reading.absence is Absence.UNREADABLE:
        return AuditVerdict.VANISHED, f"{file.name} and its cgroup are gone"
    if expected.accepted and expected.accepted[0].value == NO_LIMIT:
        return AuditVerdict.NOT_MISSED, f"there is no {file.name}, and no limit is expected"
    is_zero = bool(expected.accepted) and expected.accepted[0].value == 0
    if expected.setting.kind in PROTECTIONS and is_zero:
        return AuditVerdict.NOT_MISSED, f"there is no {file.name}, and no protection is expected"
    if expected.setting.kind is SettingKind.SWAP and reading.absence is Absence.ABSENT:
        return AuditVerdict.NOT_MISSED, f"there is no {file.name}: the kernel does not limit swap"
    if read.controllers is not None and file.controller not in read.controllers:
        why = f"the controller {file.controller} is not enabled"
        if not expected.accepted and not expected.at_least:
            return AuditVerdict.UNKNOWN, f"{why}; the expected value is unknown: {expected.unknown_reason}"
        return AuditVerdict.MISSING, why
    if reading.absence is Absence.UNREADABLE:
        return AuditVerdict.MISSING, f"{file.name} cannot be read: {reading}"
    if expected.setting.kind is SettingKind.RESERVED:
        return AuditVerdict.NOT_MISSED, f"{file.name} does not exist before Linux 5.7"
    return AuditVerdict.MISSING, f"there is no {file.name}"


def _compare_unknown(expected: ExpectedSetting, value: int) -> tuple[AuditVerdict, str]:
    """Return the verdict on a setting whose expected value is unknown.

    The verdict is LOWER if the value is too low for every possible amount of the unknown resources, else
    UNKNOWN.
    """
    why = f"the expected value is unknown: {expected.unknown_reason}"
    if expected.at_least is None or normalize_limit(value) >= expected.at_least:
        return AuditVerdict.UNKNOWN, why
    text = format_setting_value(expected.setting.kind, value)
    return AuditVerdict.LOWER, f"{text}, expected {format_expected(expected)}: {why}"


def _with_actual_period(expected: ExpectedSetting, read: ActualCgroup) -> ExpectedSetting:
    """Scale an expected CPU quota to the actual CFS period, so that a wrong period counts only once."""
    period = read.values.get(CgroupSettingId(SettingKind.PERIOD))
    if not expected.period_us or not isinstance(period, int) or period == expected.period_us:
        return expected

    def scale(option: AcceptedValue) -> AcceptedValue:
        return option._replace(value=option.value * period // expected.period_us)

    return replace(
        expected,
        accepted=tuple(map(scale, expected.accepted)),
        arithmetic=f"{expected.arithmetic}, scaled to a period of {period}",
        at_least=None if expected.at_least is None else expected.at_least * period // expected.period_us,
        explained_wrong_values=tuple(map(scale, expected.explained_wrong_values)),
    )


def _compare_number(expected: ExpectedSetting, value: int) -> tuple[AuditVerdict, str]:
    value = normalize_limit(value)
    why = _describe_comparison(expected, value)
    for option in expected.accepted:
        if option.value == value:
            note = f", {option.note}" if option.note else ""
            return (AuditVerdict.ROUNDED if option.is_rounded else AuditVerdict.MATCH), f"{why}{note}"
    text = format_setting_value(expected.setting.kind, value)
    why += next(
        (f"; {text} is {wrong.note}" for wrong in expected.explained_wrong_values if wrong.value == value), ""
    )
    if doubt := expected.doubt or (value == NO_LIMIT and expected.no_limit_doubt):
        return AuditVerdict.UNKNOWN, f"{why}; {doubt}"
    return _verdict_on_wrong_value(expected, value), why


def _verdict_on_wrong_value(expected: ExpectedSetting, value: int) -> AuditVerdict:
    """Return the verdict on a wrong value of a cgroup setting: LOWER, HIGHER, UNLIMITED or LIMITED.

    A value between two accepted values is compared with the first accepted value.
    """
    values = [option.value for option in expected.accepted]
    if values[0] == NO_LIMIT:
        return AuditVerdict.LIMITED
    if value == NO_LIMIT:
        return AuditVerdict.UNLIMITED
    if value < min(values) or min(values) < value < values[0]:
        return AuditVerdict.LOWER
    return AuditVerdict.HIGHER


def _compare_cpus(expected: ExpectedSetting, value: int, version: int) -> tuple[AuditVerdict, str]:
    wanted = expected.accepted[0].value
    missing, extra = wanted & ~value, value & ~wanted
    why = _describe_comparison(expected, value)
    if not value and version == 2 and expected.setting.kind is SettingKind.CPUS:
        return AuditVerdict.UNLIMITED, f"{why}; an empty set inherits the CPUs of the parent cgroup"
    if missing:
        why += f", missing {format_cpus(missing)}"
    if extra:
        why += f", extra {format_cpus(extra)}"
    return (AuditVerdict.LOWER if missing else AuditVerdict.HIGHER if extra else AuditVerdict.MATCH), why


def _describe_comparison(expected: ExpectedSetting, value: int) -> str:
    text = format_setting_value(expected.setting.kind, value)
    return f"{text}, expected {format_expected(expected)}: {expected.arithmetic}"


def format_expected(expected: ExpectedSetting) -> str:
    """Format the accepted values of a cgroup setting, joined by "or".

    If the setting has no accepted value, the text is the lowest correct value or ``unknown``.
    """
    if not expected.accepted and expected.at_least:
        return f"at least {format_setting_value(expected.setting.kind, expected.at_least)}"
    texts = [
        format_setting_value(expected.setting.kind, value.value)
        for value in expected.accepted
        if not value.is_rounded
    ]
    return " or ".join(dict.fromkeys(texts)) or "unknown"


def _with_tighter_pod(compared: SettingComparison, tight: str) -> SettingComparison:
    """Add the text ``tight``, about a pod limit below the containers' limits, to the comparison of a cgroup
    setting. A correct value gets the verdict PARENT_TIGHTER."""
    if not tight:
        return compared
    why = f"{compared.reason}; {tight}"
    if compared.verdict in {AuditVerdict.LOWER, AuditVerdict.LIMITED}:
        return compared._replace(reason=why)
    risk = CONSEQUENCES[AuditVerdict.PARENT_TIGHTER][compared.setting.kind]
    return compared._replace(verdict=AuditVerdict.PARENT_TIGHTER, reason=why, consequence=risk)


def _quiet_after_change(
    compared: SettingComparison, group: ExpectedCgroup, read: ActualCgroup | None
) -> SettingComparison:
    """Mark a wrong value as QUIET (not reported) shortly after a start or resize of the container or pod."""
    since = read.since_change_s if read else None  # negative after a clock step
    if since is None or abs(since) >= group.quiet_s or compared.verdict not in DRIFT_VERDICTS:
        return compared
    why = f"{compared.reason}; it changed less than {group.quiet_s} s ago"
    return compared._replace(verdict=AuditVerdict.QUIET, reason=why, consequence="")
