"""Conformance checks of the content of health lists: encoding, names, messages, numbers and leases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from agent.conform.outcomes import (
    CheckOutcome,
    CheckVerdict,
    escape_bytes,
    failed,
    format_count,
    format_seconds,
    join_first,
    not_run,
    passed,
    warned,
    worst_outcome,
)
from agent.conform.session_record import (
    DEFAULT_LEASE_S,
    LEASE_OVERFLOW_S,
    SESSION_MAX_S,
    DeviceEntry,
    HealthList,
    RawDeviceKey,
    SessionRecord,
    StreamRecord,
    consecutive_reports,
    count_lists,
    distinct_entries,
    effective_lease_s,
    evaluate_streams,
    format_device,
    reports_by_device,
)

MESSAGE_LIMIT: Final = 1024
"""Longest health message of a device that the kubelet keeps whole [bytes]."""
MESSAGE_KEPT: Final = 1021
"""Length to which the kubelet cuts a longer health message, before it adds three dots [bytes]."""
LIST_LIMIT: Final = 4 << 20
"""Largest gRPC message that grpc-go, and so a kubelet, reads by default [bytes]."""
LARGE_LIST: Final = 1 << 20
"""Size of a health list above which a check warns [bytes]."""
FUTURE_S: Final = 60
"""Time by which a device's last_updated_time may be ahead of this machine's clock without a warning [s]."""
MILLISECONDS: Final = 100_000_000_000
"""Value of last_updated_time from which it must be in milliseconds: in seconds it is the year 5138."""
SHORT_LEASE_S: Final = 2
LONG_LEASE_S: Final = 86_400
"""Longest lease (health_check_timeout_seconds) without a warning [s].
SHORT_LEASE_S: longest lease that is too short."""
MARGIN_S: Final = 5
"""Time by which a recommended session is longer than the longest lease of a device [s]."""
HEARTBEAT_FRACTION: Final = 0.6
"""Fraction of a device's lease above which a check warns of the time between two reports on the device.

It is half of the lease, and a tenth of it for delays of a busy machine.
"""
TIME_ROUNDING_S: Final = 2.0
"""Age that a device's last_updated_time may have on arrival without a fault of the driver [s].

The time is in whole seconds, and the transfer of the health list takes time.
"""
REPORTED_ONCE: Final = "no device was reported twice: try a longer --for"
EMPTY_LISTS: Final = "every list is empty"
EXPIRING: Final = (1, 2)
"""Health values that the kubelet changes to Unknown when the lease ends: Healthy (1) and Unhealthy (2)."""

LABEL: Final = re.compile(rb"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_LABEL: Final = rb"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
POOL: Final = re.compile(rb"(?=.{1,253}\Z)" + _LABEL + rb"(?:[./]" + _LABEL + rb")*")
"""Pattern of a valid pool name: DNS subdomains with slashes between them, at most 253 bytes in all."""


def check_stable_text(session: SessionRecord) -> CheckOutcome:
    """Compares each message with the message before, where the health is the same."""

    def changed_messages(stream: StreamRecord) -> Iterator[CheckOutcome]:
        for key, reports in reports_by_device(stream).items():
            pairs = [
                (before.message, after.message)
                for (_, before), (_, after) in pairwise(reports)
                if before.health == after.health
            ]
            changes = [(before, after) for before, after in pairs if before != after]
            numbers = [pair for pair in changes if _without_numbers(pair[0]) == _without_numbers(pair[1])]
            if len(numbers) > 1 or (numbers and len(numbers) == len(pairs)):
                yield failed(f"{format_device(key)}: only numbers change, {_format_change(*numbers[0])}")
            elif numbers:
                yield warned(f"{format_device(key)}: a number changed once, {_format_change(*numbers[0])}")
            elif len(changes) > 1 and len(changes) == len(pairs):
                yield warned(
                    f"{format_device(key)}: another text in every list, {_format_change(*changes[0])}"
                )

    compared = [pair for stream in session.main.streams for pair in consecutive_reports(stream)]
    if not any(before.health == after.health for _, (_, before), (_, after) in compared):
        return not_run(REPORTED_ONCE)
    return evaluate_streams(session, changed_messages, passed("no text changed while the health stayed"))


def _without_numbers(message: bytes) -> bytes:
    return re.sub(rb"[0-9]+", b"0", message)


def _format_change(before: bytes, after: bytes) -> str:
    return f"{escape_bytes(before)!r}, then {escape_bytes(after)!r}"


def check_message_size(session: SessionRecord) -> CheckOutcome:
    """Measures each message, and tests where the kubelet would cut it."""

    def find_long(stream: StreamRecord) -> Iterator[CheckOutcome]:
        for key, message in _messages(stream):
            if len(message) <= MESSAGE_LIMIT:
                continue
            size = f"{format_device(key)}: {len(message):,} bytes"
            if _is_utf8(message) and not _is_utf8(message[:MESSAGE_KEPT]):
                yield failed(f"{size}; truncation at {MESSAGE_KEPT} bytes splits a character")
            else:
                yield warned(size)

    longest = max((len(text) for stream in session.main.streams for _, text in _messages(stream)), default=0)
    return evaluate_streams(session, find_long, passed(f"{format_count(longest, 'byte')} at most"))


def _messages(stream: StreamRecord) -> Iterator[tuple[RawDeviceKey, bytes]]:
    yield from dict.fromkeys((device.key, device.message) for device in distinct_entries(stream))


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def check_utf8(session: SessionRecord) -> CheckOutcome:
    """Decodes the pool, name and message of every device as UTF-8."""

    def find_broken(stream: StreamRecord) -> Iterator[CheckOutcome]:
        for device in distinct_entries(stream):
            fields = {"pool": device.pool, "name": device.name, "message": device.message}
            for field, data in fields.items():
                if not _is_utf8(data):
                    yield failed(f"{format_device(device.key)}: its {field} is not UTF-8")

    return evaluate_streams(session, find_broken, passed("every string"))


def check_decodable(session: SessionRecord) -> CheckOutcome:
    """Decodes every list as a protobuf message."""

    def find_broken(stream: StreamRecord) -> Iterator[CheckOutcome]:
        for number, item in enumerate(stream.lists, 1):
            if item.decode_error:
                yield failed(f"list {number} of {item.size:,} bytes: {item.decode_error}")

    if not _largest_list(session):
        return not_run(EMPTY_LISTS)
    return evaluate_streams(session, find_broken, passed(format_count(count_lists(session.main), "list")))


def check_list_size(session: SessionRecord) -> CheckOutcome:
    """Measures every list. A list above 4 MiB ends the stream, as in the kubelet."""
    refused = [
        failed(f"{version.version}: {stream.ended.too_large_bytes:,} bytes, the kubelet reads {LIST_LIMIT:,}")
        for version in session.versions
        for stream in version.streams
        if stream.ended and stream.ended.too_large_bytes
    ]
    if refused:
        return worst_outcome(refused, refused[0])

    def find_large(stream: StreamRecord) -> Iterator[CheckOutcome]:
        for item in stream.lists:
            if item.size > LARGE_LIST:
                yield warned(f"{item.size:,} bytes")
            elif item.is_truncated:
                yield warned(f"more than {len(item.devices):,} devices in a list; the others were not read")

    largest = _largest_list(session)
    if not largest:
        return not_run(EMPTY_LISTS if session.main.has_lists else "no list was received")
    return evaluate_streams(session, find_large, passed(f"{format_count(largest, 'byte')} at most"))


def _largest_list(session: SessionRecord) -> int:
    """Return the size of the largest health list of a session [bytes].

    0: the session received no list, or all lists are empty.
    """
    return max((item.size for stream in session.watched_streams for item in stream.lists), default=0)


def check_duplicates(session: SessionRecord) -> CheckOutcome:
    """Searches each list for devices that appear twice."""

    def find_repeated(stream: StreamRecord) -> Iterator[CheckOutcome]:
        for item in stream.lists:
            yield from _duplicates_in_list(item)

    return evaluate_streams(session, find_repeated, passed("each device once in a list"))


def _duplicates_in_list(item: HealthList) -> Iterator[CheckOutcome]:
    first: dict[RawDeviceKey, DeviceEntry] = {}
    for device in item.devices:
        if device.key not in first:
            first[device.key] = device
        elif _compared_values(first[device.key]) == _compared_values(device):
            yield warned(f"{format_device(device.key)}: listed twice, with equal values")
        else:
            yield failed(f"{format_device(device.key)}: listed twice, with different values")


def _compared_values(device: DeviceEntry) -> tuple[int, bytes, int]:
    """Return the values of a device in a health list by which the kubelet notices a change."""
    return device.health, device.message, device.lease_s


def check_device_names(session: SessionRecord) -> CheckOutcome:
    """Compares the pool and name of every device with the form of ResourceSlice names."""

    def invalid(stream: StreamRecord) -> Iterator[CheckOutcome]:
        for device in distinct_entries(stream):
            if not device.has_identifier:
                yield failed("a list has an entry without a device")
            elif not (device.pool and device.name):
                yield failed(f"{format_device(device.key)}: its {'name' if device.pool else 'pool'} is empty")
            elif _is_utf8(device.name) and not LABEL.fullmatch(device.name):
                yield warned(f"{format_device(device.key)}: the name is not a DNS label")
            elif _is_utf8(device.pool) and not POOL.fullmatch(device.pool):
                yield warned(f"{format_device(device.key)}: the pool is not a path of DNS subdomains")

    known = {key for stream in session.main.streams for key in reports_by_device(stream)}
    return evaluate_streams(session, invalid, passed(format_count(len(known), "device")))


def check_health_values(session: SessionRecord) -> CheckOutcome:
    """Reads the health of every device: 0 is Unknown, 1 Healthy, 2 Unhealthy."""

    def invalid(stream: StreamRecord) -> Iterator[CheckOutcome]:
        for device in distinct_entries(stream):
            if device.health not in (0, 1, 2):
                yield warned(f"{format_device(device.key)}: {device.health}")

    return evaluate_streams(session, invalid, passed("0, 1 or 2"))


def check_update_times(session: SessionRecord) -> CheckOutcome:
    """Compares each last_updated_time with the clock of this machine."""

    def invalid(stream: StreamRecord) -> Iterator[CheckOutcome]:
        for item in stream.lists:
            now_s = session.began_wall_s + item.received_s
            for device in item.devices:
                value = f"{format_device(device.key)}: {device.updated_s}"
                if device.updated_s <= 0:
                    yield warned(f"{value}, which is not a time")
                elif device.updated_s > MILLISECONDS:
                    yield warned(f"{value}, which is not in seconds")
                elif device.updated_s > now_s + FUTURE_S:
                    yield warned(f"{value}, {device.updated_s - now_s:,.0f} s ahead")

    return evaluate_streams(session, invalid, passed("seconds since 1970, none ahead"))


def check_fresh_times(session: SessionRecord) -> CheckOutcome:
    """Compares the age of each last_updated_time at receipt with the lease (health_check_timeout_seconds),
    unless the device is Unknown."""
    ages: list[float] = []

    def old(stream: StreamRecord) -> Iterator[CheckOutcome]:
        for item in stream.lists:
            now_s = session.began_wall_s + item.received_s
            for device in item.devices:
                if device.health not in EXPIRING or not 0 < device.updated_s <= MILLISECONDS:
                    continue
                age_s = max(0.0, now_s - device.updated_s)
                ages.append(age_s)
                lease_s = effective_lease_s(device)
                if not lease_s:
                    continue
                text = (
                    f"{format_device(device.key)}: last_updated_time is {age_s:,.0f} s old, "
                    f"its lease is {lease_s:,.0f} s"
                )
                if age_s > lease_s + TIME_ROUNDING_S:
                    yield failed(text)
                elif age_s > lease_s / 2 + TIME_ROUNDING_S:
                    yield warned(text)

    outcome = evaluate_streams(session, old, passed(""))
    if outcome.verdict is not CheckVerdict.PASS:
        return outcome
    if not ages:
        return not_run("no Healthy or Unhealthy device has a last_updated_time in seconds")
    return passed(f"{format_seconds(max(ages))} old at most")


def check_devices(session: SessionRecord) -> CheckOutcome:
    """Counts the devices in all lists."""
    known = {key for stream in session.watched_streams for key in reports_by_device(stream)}
    if any(item.decode_error for stream in session.main.streams for item in stream.lists) and not known:
        return not_run("no list can be decoded: see health.decode")
    if not known:
        return warned(f"no device in {format_count(count_lists(session.main), 'list')}")
    return passed(format_count(len(known), "device"))


def check_known_health(session: SessionRecord) -> CheckOutcome:
    """Searches for devices that are Unknown in every list."""
    healths: dict[RawDeviceKey, set[int]] = {}
    for stream in session.watched_streams:
        for device in distinct_entries(stream):
            healths.setdefault(device.key, set()).add(device.health)
    unknown = [key for key, reported in healths.items() if reported == {0}]
    recorded = format_seconds(session.recorded_s)
    if len(unknown) == len(healths):
        return failed(f"{format_count(len(unknown), 'device')}, all Unknown for {recorded}")
    if unknown:
        return warned(f"{join_first(map(format_device, unknown))}: Unknown for {recorded}")
    return passed(f"{format_count(len(healths), 'device')}")


def check_heartbeat(session: SessionRecord) -> CheckOutcome:
    """Compares the time between two reports on a device, and since its last report, with its lease
    (health_check_timeout_seconds)."""
    kept: list[float] = []
    waiting: list[float] = []

    def gaps(stream: StreamRecord) -> Iterator[CheckOutcome]:
        for key, reports in reports_by_device(stream).items():
            ends = [*(at_s for at_s, _ in reports[1:]), stream.closed_s]
            for (at_s, device), end_s in zip(reports, ends, strict=True):
                if device.health not in EXPIRING or device.lease_s > LEASE_OVERFLOW_S:
                    continue
                lease_s, gap_s = effective_lease_s(device), end_s - at_s
                text = (
                    f"{format_device(key)}: {format_seconds(gap_s)} without a report, "
                    f"its lease is {lease_s:,.0f} s"
                )
                if gap_s > lease_s:
                    yield failed(text)
                elif len(reports) == 1:
                    waiting.append(lease_s)
                elif gap_s > HEARTBEAT_FRACTION * lease_s:
                    yield warned(text)
                else:
                    kept.append(gap_s)

    outcome = evaluate_streams(session, gaps, passed(""))
    if outcome.verdict is not CheckVerdict.PASS:
        return outcome
    if not kept:
        return not_run(
            _describe_short_session(waiting) if waiting else "every device is Unknown, which no lease ends"
        )
    some = f"; {_describe_short_session(waiting)}" if waiting else ""
    return passed(f"again after {format_seconds(max(kept))} at most{some}")


def _describe_short_session(leases: list[float]) -> str:
    required_s = max(leases) + MARGIN_S
    text = f"reported once, with leases of up to {max(leases):,.0f} s"
    if required_s <= SESSION_MAX_S:
        return f"{text}: --for {required_s:.0f}s is long enough"
    return f"{text}: longer than the longest --for"


def check_lease(session: SessionRecord) -> CheckOutcome:
    """Reads the health_check_timeout_seconds of every device."""

    def find_unusual(stream: StreamRecord) -> Iterator[CheckOutcome]:
        leases = dict.fromkeys((device.key, device.lease_s) for device in distinct_entries(stream))
        for key, lease_s in leases:
            text = f"{format_device(key)}: {lease_s:,} s"
            if lease_s > LEASE_OVERFLOW_S:
                yield failed(f"{text}, more than {LEASE_OVERFLOW_S:,} s")
            elif lease_s > LONG_LEASE_S or lease_s < 0 or 0 < lease_s <= SHORT_LEASE_S:
                yield warned(text)

    reported = {device.lease_s for stream in session.main.streams for device in distinct_entries(stream)}
    if not reported:
        return not_run("no device was reported")
    shortest, longest = min(reported), max(reported)
    text = f"{shortest:,} s" if len(reported) == 1 else f"{shortest:,} to {longest:,} s"
    return evaluate_streams(
        session, find_unusual, passed(text if shortest else f"{text}; 0 is {DEFAULT_LEASE_S} s")
    )


def check_stable_lease(session: SessionRecord) -> CheckOutcome:
    """Compares the lease of each device (health_check_timeout_seconds) with that in the list before.

    A change after that lease has ended is correct.
    """

    def find_changed(stream: StreamRecord) -> Iterator[CheckOutcome]:
        for key, (before_s, before), (at_s, after) in consecutive_reports(stream):
            if before.lease_s != after.lease_s and at_s - before_s <= effective_lease_s(before):
                yield warned(f"{format_device(key)}: {before.lease_s:,} s, then {after.lease_s:,} s")

    if not any(True for stream in session.main.streams for _ in consecutive_reports(stream)):
        return not_run(REPORTED_ONCE)
    lists = format_count(count_lists(session.main), "list")
    return evaluate_streams(session, find_changed, passed(f"the same in {lists}"))
