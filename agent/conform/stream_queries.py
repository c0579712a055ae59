"""Queries on recorded health streams that several conformance checks use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Final

from agent.conform.outcomes import CheckOutcome, escape_bytes, failed, warned, worst_outcome
from agent.conform.session_record import (
    ApiVersionStreams,
    DeviceEntry,
    RawDeviceKey,
    SessionRecord,
    StreamEnd,
    StreamRecord,
)

DEFAULT_LEASE_S: Final = 30
"""Lease that the kubelet uses if a driver sends 0 or less as health_check_timeout_seconds [s]."""
LEASE_OVERFLOW_S: Final = 9_223_372_036
"""Longest lease (health_check_timeout_seconds) that the kubelet can count in 64-bit nanoseconds [s]."""
PROPAGATION_S: Final = 1.0
"""Time that a driver may take to send a change on every stream [s]."""

NAMES_LIMIT: Final = 60
"""Length at which a pool and a name are cut for display [characters]."""

TimedEntry = tuple[float, DeviceEntry]
"""One report on a device in a health stream: time of receipt [s since the session began], list entry."""


def format_device(key: RawDeviceKey) -> str:
    """Format a device as ``<pool>/<name>`` for an observation."""
    pool, name = (escape_bytes(part, NAMES_LIMIT) or "(empty)" for part in key)
    return f"{pool}/{name}"


def effective_lease_s(device: DeviceEntry) -> float:
    """Return how long the kubelet uses the health in a device entry, its lease [s].

    0: the lease is too long and overflows.
    """
    if device.lease_s > LEASE_OVERFLOW_S:
        return 0.0
    return device.lease_s if device.lease_s > 0 else DEFAULT_LEASE_S


def reports_by_device(stream: StreamRecord) -> dict[RawDeviceKey, list[TimedEntry]]:
    """Return the reports on each device in the order of receipt, at most one for each list."""
    found: dict[RawDeviceKey, list[TimedEntry]] = {}
    for item in stream.lists:
        for key, device in {device.key: device for device in item.devices}.items():
            found.setdefault(key, []).append((item.received_s, device))
    return found


def consecutive_reports(stream: StreamRecord) -> Iterator[tuple[RawDeviceKey, TimedEntry, TimedEntry]]:
    """Yield (device, report, next report) for each pair of consecutive reports on a device."""
    for key, reports in reports_by_device(stream).items():
        for before, after in pairwise(reports):
            yield key, before, after


def distinct_entries(stream: StreamRecord) -> Iterator[DeviceEntry]:
    """Yield each different device entry of a health stream once, in the order of its first receipt."""
    yield from dict.fromkeys(device for item in stream.lists for device in item.devices)


def last_reports_at(streams: Iterable[StreamRecord], at_s: float) -> dict[RawDeviceKey, TimedEntry]:
    """Return the last report on each device that the streams received up to a time."""
    known: dict[RawDeviceKey, TimedEntry] = {}
    for stream in streams:
        for item in stream.lists:
            if item.received_s <= at_s:
                known |= {device.key: (item.received_s, device) for device in item.devices}
    return known


def count_lists(version: ApiVersionStreams) -> int:
    """Return the number of lists received in all streams of a version."""
    return sum(len(stream.lists) for stream in version.streams)


def ended_by_session(end: StreamEnd) -> bool:
    """Return True if the conformance test ended a stream because of a limit; False if the driver ended it."""
    return bool(end.too_large_bytes or end.flooded)


def evaluate_streams(
    session: SessionRecord,
    evaluate: Callable[[StreamRecord], Iterable[CheckOutcome]],
    otherwise: CheckOutcome,
) -> CheckOutcome:
    """Evaluate the health streams of the API version that kubelet 1.37 uses.

    If `evaluate` yields no outcome for them, evaluate those of the other API version.

    Returns the worst outcome; `otherwise` if there is none for both versions.
    """
    found = [outcome for stream in session.main.streams if stream.lists for outcome in evaluate(stream)]
    if found:
        return worst_outcome(found, otherwise)
    second = session.other
    found = [outcome for stream in second.streams if stream.lists for outcome in evaluate(stream)]
    return worst_outcome(
        (outcome._replace(observation=f"{second.version}: {outcome.observation}") for outcome in found),
        otherwise,
    )


def compare_streams(
    first: Iterable[StreamRecord],
    second: Iterable[StreamRecord],
    at_s: float,
    first_name: str,
    second_name: str,
) -> Iterator[CheckOutcome]:
    """Yield an outcome for each device on which the last reports of two sets of streams differ.

    Reports up to `at_s` count; devices that changed in the second before are skipped. ``first_name`` and
    ``second_name`` name the two sets in the observations.
    """
    first, second = list(first), list(second)
    known_first, known_second = last_reports_at(first, at_s), last_reports_at(second, at_s)
    since_s = at_s - PROPAGATION_S
    recent = changed_devices(first, since_s, at_s) | changed_devices(second, since_s, at_s)
    for key in sorted((known_first.keys() | known_second.keys()) - recent):
        if key not in known_first or key not in known_second:
            yield failed(f"{format_device(key)}: {first_name if key in known_first else second_name} only")
            continue
        entry, other = known_first[key][1], known_second[key][1]
        if entry.health != other.health:
            yield failed(
                f"{format_device(key)}: health {entry.health} for {first_name}, "
                f"{other.health} for {second_name}"
            )
        elif entry.message != other.message:
            yield warned(f"{format_device(key)}: one message for {first_name}, another for {second_name}")


def changed_devices(streams: Iterable[StreamRecord], since_s: float, at_s: float) -> set[RawDeviceKey]:
    """Return the devices whose health or message changed after `since_s`, up to `at_s`."""
    last: dict[RawDeviceKey, tuple[int, bytes]] = {}
    changed: set[RawDeviceKey] = set()
    for stream in streams:
        for index, item in enumerate(stream.lists):
            for device in item.devices:
                verdict = (device.health, device.message)
                is_new = last.get(device.key, verdict if index == 0 else None) != verdict
                if is_new and since_s < item.received_s <= at_s:
                    changed.add(device.key)
                last[device.key] = verdict
    return changed
