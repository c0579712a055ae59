"""A pod that has less than its containers: they have what they should, and cannot use it.

Whoever raises a container's limits behind the kubelet's back (NRI can) cannot raise the pod's.
"""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Final, NamedTuple

from agent.allocatable.cgroups import Level
from agent.allocatable.expected import ExpectedGroup, GroupRef
from agent.allocatable.knobs import Knob, KnobId, limit_of, value_text
from agent.allocatable.values import Expected
from agent.allocatable.verdicts import Actual
from agent.model.cgroup import NO_LIMIT

_SHARED: Final = (Knob.QUOTA, Knob.MEMORY, Knob.PAGES, Knob.RESERVED)
"""What containers have only as far as their pod has."""


def tightness(
    pod: ExpectedGroup, groups: Sequence[ExpectedGroup], actual: Mapping[GroupRef, Actual]
) -> Mapping[KnobId, str]:
    """By knob, in what a pod has less than its containers, where it should not.

    It may be meant to have less than all of them together: a claim that they share counts once.
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


def _amount(group: ExpectedGroup, knob: KnobId, actual: Mapping[GroupRef, Actual]) -> _Pair | None:
    """What a group should have and has of something; None: that is not known of it."""
    read = actual.get(group.group)
    expected = next((one for one in group.knobs if one.knob == knob), None)
    if read is None or read.vanished or expected is None or not expected.accepted:
        return None
    value, meant = read.values.get(knob), expected.accepted[0].value
    if not isinstance(value, int):
        return None
    if value in {option.value for option in expected.accepted}:
        return _Pair(meant, Fraction(meant))  # rounded one by one, parts can be more than the whole
    return _Pair(meant, limit_of(value) * _share(expected, read, value))


def _share(expected: Expected, read: Actual, value: int) -> Fraction:
    """What a value over the period that there is is worth over the period that is expected."""
    period = read.values.get(KnobId(Knob.PERIOD))
    if not expected.over_us or not isinstance(period, int) or not period or limit_of(value) == NO_LIMIT:
        return Fraction(1)
    return Fraction(expected.over_us, period)


def _sum(amounts: Iterable[Fraction]) -> Fraction:
    return min(sum(amounts, Fraction(0)), Fraction(NO_LIMIT))
