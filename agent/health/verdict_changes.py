"""Comparison of reports: on which devices the verdict changed between two of them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from agent.model.claim import DeviceRef
from agent.model.health import Cause, DeviceHealth, Severity
from agent.model.verdict_history import (
    CAUSES_MAX,
    GONE,
    STATE_OF_SEVERITY,
    RecordedCause,
    RecordedState,
    RecordedVerdict,
)


class SeenVerdict(NamedTuple):
    """Verdict on a device in the last report, and the part of it that the history records."""

    severity: Severity
    causes: tuple[Cause, ...]
    verdict: RecordedVerdict


SeenVerdicts = Mapping[DeviceRef, SeenVerdict]
"""Verdicts of the last report, by device."""


def recorded_verdict(device: DeviceHealth) -> RecordedVerdict:
    """Return the part of a device's verdict that the history records: state, and causes above INFO."""
    causes = [cause for cause in device.causes if cause.severity > Severity.INFO]
    return RecordedVerdict(
        STATE_OF_SEVERITY[device.severity],
        tuple(RecordedCause(cause.code, cause.severity, cause.evidence) for cause in causes[:CAUSES_MAX]),
    )


def see_devices(last: SeenVerdicts, devices: Iterable[DeviceHealth]) -> dict[DeviceRef, SeenVerdict]:
    """Return the verdicts of a new report by device; a device without a change keeps its object of `last`.

    Args:
        last: Verdicts of the report before.
        devices: Devices of the new report.
    """
    seen: dict[DeviceRef, SeenVerdict] = {}
    for device in devices:
        ref = DeviceRef(*device.key)
        before = last.get(ref)
        if before and before.severity is device.severity and before.causes == device.causes:
            seen[ref] = before
        else:
            seen[ref] = SeenVerdict(device.severity, device.causes, recorded_verdict(device))
    return seen


def changed_verdicts(
    last: Mapping[DeviceRef, RecordedVerdict], now: Mapping[DeviceRef, RecordedVerdict]
) -> Iterator[tuple[DeviceRef, RecordedVerdict]]:
    """Yield each device whose verdict changed between two reports, with its verdict in the second report.

    The verdict is GONE for a device that the second report no longer has.

    Args:
        last: Verdicts of the first report, by device.
        now: Verdicts of the second report, by device.
    """
    for ref, verdict in now.items():
        if not verdict.is_same(last.get(ref)):
            yield ref, verdict
    for ref, verdict in last.items():
        if ref not in now and verdict.state is not RecordedState.ABSENT:
            yield ref, GONE
