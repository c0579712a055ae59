"""What cgroups say against what they should say: a verdict for each knob, with its reason and its risk.

Nothing is judged that was not read, or that nobody knows what it should be; both are said. A wrong value soon
after a start or a resize is QUIET: whoever writes it may not be done.
"""

import errno
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from agent.allocatable.cgroups import Level
from agent.allocatable.expected import ExpectedGroup, GroupRef
from agent.allocatable.knobs import Knob, KnobId, file_of, limit_of, value_text
from agent.allocatable.pod import Pod
from agent.allocatable.tightness import tightness
from agent.allocatable.values import Expected, Option
from agent.allocatable.verdicts import CONCERNS, RISKS, Actual, Compared, Verdict
from agent.model.cgroup import NO_LIMIT
from agent.model.cpuset import format_cpus
from agent.model.reading import NEVER_READ, Absence, Missing

_GONE: Final = frozenset({errno.ENOENT, errno.ENODEV})
"""What the kernel answers for a cgroup that was removed meanwhile."""
_CPU_SETS: Final = frozenset({Knob.CPUS, Knob.EFFECTIVE})


def compare(
    expected: Sequence[ExpectedGroup], actual: Mapping[GroupRef, Actual], version: int
) -> tuple[Compared, ...]:
    """Each knob of each group, in the order of what is expected.

    Args:
        expected: Of a pod and its containers, or of classes.
        actual: What was read. A group that is not there was not read.
        version: Of cgroups, 1 or 2; for the names of files.
    """
    found = []
    for group in expected:
        read = actual.get(group.group)
        tight = tightness(group, expected, actual) if group.group.level is Level.POD else {}
        for knob in group.knobs:
            compared = _compared(group.group, knob, read, version)
            found.append(_quieted(_or_tight(compared, tight.get(knob.knob, "")), group, read))
    return tuple(found)


def changed_s(pod: Pod, now_wall_s: float, container: str = "") -> float | None:
    """Since a container, or any of the pod's, was last started or the pod was resized [s]; None: not said."""
    times = [one.started_wall_s for one in pod.containers if container in {"", one.name}]
    times += [pod.resize.since_wall_s] if pod.resize else []
    known = [now_wall_s - when for when in times if when is not None]
    return min(known, default=None)


# --- one knob ----------------------------------------------------------------------------------------------


def _compared(group: GroupRef, expected: Expected, read: Actual | None, version: int) -> Compared:
    reading = read.values.get(expected.knob) if read else None

    def judged(verdict: Verdict, why: str) -> Compared:
        risk = RISKS.get(verdict, {}).get(expected.knob.knob, "")
        value = NEVER_READ if reading is None else reading
        return Compared(group, expected, value, verdict, why, risk)

    if read is not None and read.vanished:
        return judged(Verdict.VANISHED, "the cgroup is gone")
    if read is None or reading is None:
        return judged(Verdict.UNKNOWN, "nobody has read it")
    if isinstance(reading, Missing):
        return judged(*_missing(expected, reading, read, version))
    if not expected.accepted:
        return judged(Verdict.UNKNOWN, f"what it should be is not known: {expected.unknown}")
    if expected.knob.knob in _CPU_SETS:
        return judged(*_cpus(expected, reading, version))
    return judged(*_number(_rescaled(expected, read), reading))


def _missing(expected: Expected, reading: Missing, read: Actual, version: int) -> tuple[Verdict, str]:
    file = file_of(expected.knob, version)
    if reading.errno in _GONE and reading.absence is Absence.UNREADABLE:
        return Verdict.VANISHED, f"{file.name} is gone, and the cgroup with it"
    if expected.accepted and expected.accepted[0].value == NO_LIMIT:
        return Verdict.NOT_MISSED, f"there is no {file.name}, and nothing to limit"
    if read.controllers is not None and file.controller not in read.controllers:
        return Verdict.MISSING, f"the controller {file.controller} is not enabled"
    if reading.absence is Absence.UNREADABLE:
        return Verdict.MISSING, f"{file.name} cannot be read: {reading}"
    if expected.knob.knob is Knob.RESERVED:
        return Verdict.NOT_MISSED, f"there is no {file.name} before Linux 5.7"
    return Verdict.MISSING, f"there is no {file.name}"


def _rescaled(expected: Expected, read: Actual) -> Expected:
    """As it is expected over the period that there is, which is another knob's verdict."""
    period = read.values.get(KnobId(Knob.PERIOD))
    if not expected.over_us or not isinstance(period, int) or period == expected.over_us:
        return expected

    def scaled(option: Option) -> Option:
        return option._replace(value=option.value * period // expected.over_us)

    return replace(
        expected,
        accepted=tuple(map(scaled, expected.accepted)),
        arithmetic=f"{expected.arithmetic}, here of {period}",
        explains=tuple(map(scaled, expected.explains)),
    )


def _number(expected: Expected, value: int) -> tuple[Verdict, str]:
    value = limit_of(value)
    why = _why(expected, value)
    for option in expected.accepted:
        if option.value == value:
            note = f", {option.note}" if option.note else ""
            return (Verdict.ROUNDED if option.rounded else Verdict.MATCH), f"{why}{note}"
    text = value_text(expected.knob.knob, value)
    why += next((f"; {text} is {one.note}" for one in expected.explains if one.value == value), "")
    return _direction(expected, value), why


def _direction(expected: Expected, value: int) -> Verdict:
    """Between two values that are accepted, the first decides."""
    values = [option.value for option in expected.accepted]
    if values[0] == NO_LIMIT:
        return Verdict.LIMITED
    if value == NO_LIMIT:
        return Verdict.UNLIMITED
    if value < min(values) or min(values) < value < values[0]:
        return Verdict.LOWER
    return Verdict.HIGHER


def _cpus(expected: Expected, value: int, version: int) -> tuple[Verdict, str]:
    wanted = expected.accepted[0].value
    lacking, beyond = wanted & ~value, value & ~wanted
    why = _why(expected, value)
    if not value and version == 2 and expected.knob.knob is Knob.CPUS:
        return Verdict.UNLIMITED, f"{why}; with none it may run wherever the cgroup above may"
    if lacking:
        why += f", without {format_cpus(lacking)}"
    if beyond:
        why += f", and besides {format_cpus(beyond)}"
    return (Verdict.LOWER if lacking else Verdict.HIGHER if beyond else Verdict.MATCH), why


def _why(expected: Expected, value: int) -> str:
    text = value_text(expected.knob.knob, value)
    return f"{text}, expected {expected_text(expected)}: {expected.arithmetic}"


def expected_text(expected: Expected) -> str:
    """The values to accept, for people; what rounding makes of them is left out."""
    texts = [value_text(expected.knob.knob, one.value) for one in expected.accepted if not one.rounded]
    return " or ".join(dict.fromkeys(texts)) or "unknown"


# --- what else is known of it ------------------------------------------------------------------------------


def _or_tight(compared: Compared, tight: str) -> Compared:
    """What is right in itself can still be too little; what is wrong has one reason more."""
    if not tight:
        return compared
    why = f"{compared.why}; {tight}"
    if compared.verdict in {Verdict.LOWER, Verdict.LIMITED}:
        return compared._replace(why=why)
    risk = RISKS[Verdict.PARENT_TIGHTER][compared.knob.knob]
    return compared._replace(verdict=Verdict.PARENT_TIGHTER, why=why, risk=risk)


def _quieted(compared: Compared, group: ExpectedGroup, read: Actual | None) -> Compared:
    """A clock that was set back does not make it quiet for long."""
    since = read.changed_s if read else None
    if since is None or abs(since) >= group.quiet_s or compared.verdict not in CONCERNS:
        return compared
    why = f"{compared.why}; it changed less than {group.quiet_s} s ago"
    return compared._replace(verdict=Verdict.QUIET, why=why, risk="")
