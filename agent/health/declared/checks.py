"""What a driver's own checks say of its devices: their findings move tracks like those of our rules.

A check counts its own passes, for each device apart: one that hangs for a device says nothing of others.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from agent.health.catalog import Row
from agent.health.evaluation import Evaluation, Subject
from agent.model.check import CheckSample
from agent.model.health import Blame, Cause, Finding, Severity
from agent.model.source import SourceSample, SourceState

UNCHECKED: Final = Row(
    code="declared.unchecked",
    severity=Severity.UNKNOWN,
    blame=Blame.DRIVER,
    source="any",
    threshold="a device that is no part of the host's, and that no check of its driver's is for",
    why="nobody looks at it",
    advice="let the driver say what part of the host the device is, or check it",
    try_it="add a device without a part to a monitor, and no check",
)
NO_ANSWER: Final = Row(
    code="check.<name>.unreadable",
    severity=Severity.UNKNOWN,
    blame=Blame.DRIVER,
    source="any",
    threshold="as many looks in a row as the check is raised after, each too late or with an exception",
    why="the driver's own check of the device could not look",
    advice="look at the driver's log; the check or what it asks is broken, or hangs",
    try_it="raise an exception in a check",
)
_UNREAD: Final = "!"
"""Stands for a look that could not be had; no code of a driver's is like it."""
COUNTED_ALONE: Final = 1 << 62
"""No time takes the place of a check's clear count [ns]."""

Samples = Mapping[Subject, Sequence[CheckSample]]
"""By device."""


def samples_of(samples: Iterable[CheckSample]) -> Samples:
    """The samples by device."""
    found: dict[Subject, list[CheckSample]] = {}
    for sample in samples:
        found.setdefault(sample.subject, []).append(sample)
    return found


def check_sources(samples: Iterable[CheckSample]) -> Iterable[SourceSample]:
    """Each check as a source: as good as its worst device, as late as its latest."""
    for check, group in groupby(sorted(samples, key=lambda one: one.check), key=lambda one: one.check):
        of = list(group)
        unread = [one for one in of if one.unread]
        state = SourceState.FAILING if unread else SourceState.OK
        yield SourceSample(
            f"check.{check}",
            SourceState.STARTING if all(not one.passes for one in of) else state,
            min(one.beat_ns for one in of),
            of[0].period_ns,
            len(unread),
            unread[0].unread if unread else "",
            passes=min(one.passes for one in of),
            vital=False,
        )


def tracked_as(subject: Subject) -> Subject:
    """What a device's checks are tracked by: their codes are their driver's, and may be like ours."""
    return f"check:{subject}"


def judge_checks(look: Evaluation, subject: Subject, samples: Iterable[CheckSample]) -> list[Cause]:
    """Moves the tracks of a device's checks.

    Returns:
        The causes that are held, worst first.
    """
    own = tracked_as(subject)
    for sample in samples:
        source = as_source(sample)
        seen = bool(sample.passes) and not sample.unread  # one that begins anew has not looked yet
        found = Finding(_UNREAD, Severity.UNKNOWN, sample.unread) if sample.unread else sample.finding
        prefix = f"{sample.check}/"
        keys = {code for code in look.codes_of(own) if code.startswith(prefix)}
        key = prefix + found.code if found else ""
        for code in keys - {key}:
            look.track(own, _row(sample, code), None, source, seen=seen)
        if found:
            look.track(own, _row(sample, key), found, source)
    return look.causes(own, _shown)


def as_source(sample: CheckSample) -> SourceSample:
    """One check of one device as the source that verifies it."""
    return SourceSample(
        f"check.{sample.check}",
        SourceState.FAILING if sample.unread else SourceState.OK,
        sample.beat_ns,
        sample.period_ns,
        0,
        sample.unread,
        passes=sample.passes,
        vital=False,
    )


def _row(sample: CheckSample, key: str) -> Row:
    return replace(
        NO_ANSWER,
        code=key,
        raise_after=sample.raise_after,
        clear_after=sample.clear_after,
        clear_ns=COUNTED_ALONE,
    )


def _shown(key: str) -> Row:
    """The row of a tracked code, as people know it."""
    check, _, code = key.partition("/")
    if code == _UNREAD:
        return replace(NO_ANSWER, code=f"check.{check}.unreadable")
    return replace(NO_ANSWER, code=code, advice="")
