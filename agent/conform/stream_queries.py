"""Queries over the recorded health streams that several conformance checks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Final

from agent.conform.observed import (
    DeviceEntry,
    RawDeviceKey,
    SessionRecord,
    StreamEnd,
    StreamRecord,
    VersionRecord,
)
from agent.conform.verdicts import CheckOutcome, escape_bytes, failed, warned, worst

DEFAULT_LEASE_S: Final = 30
"""Lease that the kubelet gives a device whose lease is 0 or negative [s]."""
OVERFLOW_S: Final = 9_223_372_036
"""Longest lease that fits into the kubelet's 64-bit nanoseconds [s]."""
PROPAGATION_S: Final = 1.0
"""Time that a driver may take to send a change on every stream [s]."""

NAMES_LIMIT: Final = 60
"""Length at which a pool and a name are cut for display [characters]."""

TimedEntry = tuple[float, DeviceEntry]
"""Time of a report on a device, and its entry."""


def name_of(key: RawDeviceKey) -> str:
    """Format a device as ``pool/name``."""
    pool, name = (escape_bytes(part, NAMES_LIMIT) or "(empty)" for part in key)
    return f"{pool}/{name}"


def lease_of(device: DeviceEntry) -> float:
    """Return the lease that the kubelet gives an entry [s]; a lease that overflows is over at once."""
    if device.lease_s > OVERFLOW_S:
        return 0.0
    return device.lease_s if device.lease_s > 0 else DEFAULT_LEASE_S


def reports_by_device(stream: StreamRecord) -> dict[RawDeviceKey, list[TimedEntry]]:
    """Return the reports on each device in the order of receipt; of several entries in one list the last
    counts."""
    found: dict[RawDeviceKey, list[TimedEntry]] = {}
    for item in stream.lists:
        for key, device in {device.key: device for device in item.devices}.items():
            found.setdefault(key, []).append((item.at_s, device))
    return found


def consecutive_reports(stream: StreamRecord) -> Iterator[tuple[RawDeviceKey, TimedEntry, TimedEntry]]:
    """Yield each pair of consecutive reports on a device."""
    for key, reports in reports_by_device(stream).items():
        for before, after in pairwise(reports):
            yield key, before, after


def distinct_entries(stream: StreamRecord) -> Iterator[DeviceEntry]:
    """Yield each different entry once, in the order of its first report."""
    yield from dict.fromkeys(device for item in stream.lists for device in item.devices)


def known_at(streams: Iterable[StreamRecord], at_s: float) -> dict[RawDeviceKey, TimedEntry]:
    """Return the last report of the streams on each device up to a time."""
    known: dict[RawDeviceKey, TimedEntry] = {}
    for stream in streams:
        for item in stream.lists:
            if item.at_s <= at_s:
                known |= {device.key: (item.at_s, device) for device in item.devices}
    return known


def list_count(version: VersionRecord) -> int:
    """Return the number of lists received in all streams of a version."""
    return sum(len(stream.lists) for stream in version.streams)


def ended_by_us(end: StreamEnd) -> bool:
    """Return whether our side, not the server, ended the stream."""
    return bool(end.too_large or end.flooded)


def evaluate_streams(
    session: SessionRecord,
    evaluate: Callable[[StreamRecord], Iterable[CheckOutcome]],
    otherwise: CheckOutcome,
) -> CheckOutcome:
    """Evaluate the streams of the version that kubelet 1.37 uses; if they have no findings, evaluate those of
    the other version."""
    found = [outcome for stream in session.main.streams if stream.lists for outcome in evaluate(stream)]
    if found:
        return worst(found, otherwise)
    second = session.other
    found = [outcome for stream in second.streams if stream.lists for outcome in evaluate(stream)]
    return worst(
        (outcome._replace(observation=f"{second.version}: {outcome.observation}") for outcome in found),
        otherwise,
    )


def differences(
    first: Iterable[StreamRecord],
    second: Iterable[StreamRecord],
    at_s: float,
    first_name: str,
    second_name: str,
) -> Iterator[CheckOutcome]:
    """Yield how the reports of two groups of streams differ, without devices that changed just before.

    Args:
        first: First group of streams.
        second: Second group of streams.
        at_s: Time up to which reports count.
        first_name: Name of the first group in observations.
        second_name: Name of the second group.
    """
    first, second = list(first), list(second)
    known_first, known_second = known_at(first, at_s), known_at(second, at_s)
    since_s = at_s - PROPAGATION_S
    recent = changed_since(first, since_s, at_s) | changed_since(second, since_s, at_s)
    for key in sorted((known_first.keys() | known_second.keys()) - recent):
        if key not in known_first or key not in known_second:
            yield failed(f"{name_of(key)}: {first_name if key in known_first else second_name} only")
            continue
        entry, other = known_first[key][1], known_second[key][1]
        if entry.health != other.health:
            yield failed(
                f"{name_of(key)}: health {entry.health} for {first_name}, {other.health} for {second_name}"
            )
        elif entry.message != other.message:
            yield warned(f"{name_of(key)}: one message for {first_name}, another for {second_name}")


def changed_since(streams: Iterable[StreamRecord], since_s: float, at_s: float) -> set[RawDeviceKey]:
    """Return the devices whose health or message changed after `since_s`, up to `at_s`.

    The first list of a stream is not a change.
    """
    last: dict[RawDeviceKey, tuple[int, bytes]] = {}
    changed: set[RawDeviceKey] = set()
    for stream in streams:
        for index, item in enumerate(stream.lists):
            for device in item.devices:
                verdict = (device.health, device.message)
                is_new = last.get(device.key, verdict if index == 0 else None) != verdict
                if is_new and since_s < item.at_s <= at_s:
                    changed.add(device.key)
                last[device.key] = verdict
    return changed
