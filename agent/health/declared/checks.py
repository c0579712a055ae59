"""Health checks that drivers run: their findings raise and clear conditions as findings of rules do.

A health check counts passes per device: a check that hangs for one device does not affect other devices.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from agent.health.evaluation import Evaluation, Subject
from agent.health.rules import CatalogRow
from agent.model.declared import CheckSample
from agent.model.health import Blame, Cause, Finding, Severity
from agent.model.source import SourceSample, SourceState

UNCHECKED: Final = CatalogRow(
    code="declared.unchecked",
    severity=Severity.UNKNOWN,
    blame=Blame.DRIVER,
    source="any",
    threshold="a declared device without a host part and without a check of its driver",
    why="no source reports the state of the device",
    advice="let the driver declare the host part of the device, or add a check for it",
    try_it="add a device without a part to a monitor, and no check",
)
NO_ANSWER: Final = CatalogRow(
    code="check.<name>.unreadable",
    severity=Severity.UNKNOWN,
    blame=Blame.DRIVER,
    source="any",
    threshold="as many consecutive runs as the check is raised after, each timed out or with an exception",
    why="the driver's check of the device gave no result",
    advice="read the driver's log; the check, or what it calls, fails or hangs",
    try_it="raise an exception in a check",
)
_UNREADABLE: Final = "!"
"""Finding code of a health check that returned no result; no code of a driver equals it."""
NEVER_BY_TIME_NS: Final = 1 << 62
"""Time so long that a condition of a health check never clears by time, only by the number of passes [ns]."""

CheckSamples = Mapping[Subject, Sequence[CheckSample]]
"""Results of health checks by device."""


def samples_of(samples: Iterable[CheckSample]) -> CheckSamples:
    """Group the results of health checks by device."""
    found: dict[Subject, list[CheckSample]] = {}
    for sample in samples:
        found.setdefault(sample.subject, []).append(sample)
    return found


def check_sources(samples: Iterable[CheckSample]) -> Iterable[SourceSample]:
    """Yield each health check as a source: failing if any device cannot be read, as old as its oldest
    pass."""
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


def checks_subject(subject: Subject) -> Subject:
    """Return the key of the conditions that health checks raise for a device.

    The key differs from the device's own, because a driver's codes can equal the agent's codes.
    """
    return f"check:{subject}"


def evaluate_checks(evaluation: Evaluation, subject: Subject, samples: Iterable[CheckSample]) -> list[Cause]:
    """Update the conditions that the driver's health checks raise for one device.

    Returns:
        Causes of the raised conditions, worst first.
    """
    own = checks_subject(subject)
    for sample in samples:
        source = check_source(sample)
        seen = bool(sample.passes) and not sample.unread  # a check that restarts has no result yet
        found = Finding(_UNREADABLE, Severity.UNKNOWN, sample.unread) if sample.unread else sample.finding
        prefix = f"{sample.check}/"
        keys = {code for code in evaluation.previous_codes(own) if code.startswith(prefix)}
        key = prefix + found.code if found else ""
        for code in keys - {key}:
            evaluation.update_condition(own, _row(sample, code), None, source, seen=seen)
        if found:
            evaluation.update_condition(own, _row(sample, key), found, source)
    return evaluation.causes(own, _public_row)


def check_source(sample: CheckSample) -> SourceSample:
    """Return the health check of one device as a source whose passes verify the device."""
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


def _row(sample: CheckSample, key: str) -> CatalogRow:
    return replace(
        NO_ANSWER,
        code=key,
        raise_after=sample.raise_after,
        clear_after=sample.clear_after,
        clear_ns=NEVER_BY_TIME_NS,
    )


def _public_row(key: str) -> CatalogRow:
    """Return the catalog row, as operators see it, of a condition's key ``check/code``."""
    check, _, code = key.partition("/")
    if code == _UNREADABLE:
        return replace(NO_ANSWER, code=f"check.{check}.unreadable")
    return replace(NO_ANSWER, code=code, advice="")
