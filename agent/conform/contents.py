"""Checks of what is in the lists: bytes, names, texts, numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from agent.conform.observed import Device, HealthList, Key, Observed, Stream
from agent.conform.stream_queries import entries, lists_of, name_of, over_streams, tellings
from agent.conform.verdicts import Judgement, count, failed, passed, spell, warned, worst

MESSAGE_LIMIT: Final = 1024
"""The kubelet's [bytes]; of a longer one it keeps..."""
MESSAGE_KEPT: Final = 1021
"""...so many, and adds three dots."""
LIST_LIMIT: Final = 4 << 20
"""The largest message that grpc-go reads unless it is told otherwise [bytes]."""
LIST_LARGE: Final = 1 << 20
FUTURE_S: Final = 60
MILLISECONDS: Final = 100_000_000_000
"""In seconds the year 5138, in milliseconds 1973."""

_LABEL: Final = rb"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
LABEL: Final = re.compile(_LABEL)
POOL: Final = re.compile(_LABEL + rb"(?:[./]" + _LABEL + rb")*")
"""DNS subdomains with slashes between them."""
POOL_LIMIT: Final = 253


def stable_text(seen: Observed) -> Judgement:
    """Each message is compared with the one before, where the health is the same."""

    def moving(stream: Stream) -> Iterator[Judgement]:
        for key, told in tellings(stream).items():
            pairs = [
                (before.message, after.message)
                for (_, before), (_, after) in pairwise(told)
                if before.health == after.health
            ]
            changes = [(before, after) for before, after in pairs if before != after]
            numbers = [pair for pair in changes if _words(pair[0]) == _words(pair[1])]
            if len(numbers) > 1 or (numbers and len(numbers) == len(pairs)):
                yield failed(f"{name_of(key)}: only numbers change, {_shown(*numbers[0])}")
            elif numbers:
                yield warned(f"{name_of(key)}: a number changed once, {_shown(*numbers[0])}")
            elif len(changes) > 1 and len(changes) == len(pairs):
                yield warned(f"{name_of(key)}: another text in every list, {_shown(*changes[0])}")

    return over_streams(seen, moving, passed("no text changed while the health stayed"))


def _words(message: bytes) -> bytes:
    """The message without its numbers."""
    return re.sub(rb"[0-9]+", b"0", message)


def _shown(before: bytes, after: bytes) -> str:
    return f"{spell(before)!r}, then {spell(after)!r}"


def message_size(seen: Observed) -> Judgement:
    """Each message is measured, and cut as the kubelet does."""

    def long(stream: Stream) -> Iterator[Judgement]:
        for key, message in _messages(stream):
            if len(message) <= MESSAGE_LIMIT:
                continue
            said = f"{name_of(key)}: {len(message):,} bytes"
            if _is_text(message) and not _is_text(message[:MESSAGE_KEPT]):
                yield failed(f"{said}, and the cut at {MESSAGE_KEPT} splits a character")
            else:
                yield warned(said)

    longest = max((len(text) for stream in seen.main.streams for _, text in _messages(stream)), default=0)
    return over_streams(seen, long, passed(f"{count(longest, 'byte')} at most"))


def _messages(stream: Stream) -> Iterator[tuple[Key, bytes]]:
    yield from dict.fromkeys((device.key, device.message) for device in entries(stream))


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def utf8(seen: Observed) -> Judgement:
    """Every string is decoded."""

    def broken(stream: Stream) -> Iterator[Judgement]:
        for device in entries(stream):
            parts = {"pool": device.pool, "name": device.name, "message": device.message}
            for what, data in parts.items():
                if not _is_text(data):
                    yield failed(f"{name_of(device.key)}: its {what} is no UTF-8")

    return over_streams(seen, broken, passed("every string"))


def decode(seen: Observed) -> Judgement:
    """Every list is read as the protobuf message that it should be."""

    def broken(stream: Stream) -> Iterator[Judgement]:
        for number, one in enumerate(stream.lists, 1):
            if one.broken:
                yield failed(f"list {number} of {one.size:,} bytes: {one.broken}")

    return over_streams(seen, broken, passed(count(lists_of(seen.main), "list")))


def size(seen: Observed) -> Judgement:
    """Every list is measured. One above 4 MiB is not read."""
    refused = [
        failed(f"{watch.version}: {stream.ended.too_large:,} bytes, the kubelet reads {LIST_LIMIT:,}")
        for watch in seen.watches
        for stream in watch.streams
        if stream.ended and stream.ended.too_large
    ]
    if refused:
        return worst(refused, refused[0])

    def large(stream: Stream) -> Iterator[Judgement]:
        for one in stream.lists:
            if one.size > LIST_LARGE:
                yield warned(f"{one.size:,} bytes")
            elif one.cut:
                yield warned(f"more than {len(one.devices):,} devices in a list; the rest was not looked at")

    largest = max((one.size for stream in seen.main.streams for one in stream.lists), default=0)
    return over_streams(seen, large, passed(f"{count(largest, 'byte')} at most"))


def duplicates(seen: Observed) -> Judgement:
    """A device is looked for that is told twice in one list."""

    def twice(stream: Stream) -> Iterator[Judgement]:
        for one in stream.lists:
            yield from _twice(one)

    return over_streams(seen, twice, passed("each device once in a list"))


def _twice(one: HealthList) -> Iterator[Judgement]:
    first: dict[Key, Device] = {}
    for device in one.devices:
        if device.key not in first:
            first[device.key] = device
        elif _verdict(first[device.key]) == _verdict(device):
            yield warned(f"{name_of(device.key)}: twice, alike")
        else:
            yield failed(f"{name_of(device.key)}: twice, and not alike")


def _verdict(device: Device) -> tuple[int, bytes, int]:
    """What the kubelet compares."""
    return device.health, device.message, device.lease_s


def names(seen: Observed) -> Judgement:
    """Pool and name of every device are read."""

    def odd(stream: Stream) -> Iterator[Judgement]:
        for device in entries(stream):
            if not device.identified:
                yield failed("an entry without a device")
            elif not (device.pool and device.name):
                yield failed(f"{name_of(device.key)}: an empty {'name' if device.pool else 'pool'}")
            elif _is_text(device.name) and not LABEL.fullmatch(device.name):
                yield warned(f"{name_of(device.key)}: the name is no DNS label")
            elif _is_text(device.pool) and not (
                POOL.fullmatch(device.pool) and len(device.pool) <= POOL_LIMIT
            ):
                yield warned(f"{name_of(device.key)}: the pool is no path of DNS subdomains")

    known = {key for stream in seen.main.streams for key in tellings(stream)}
    return over_streams(seen, odd, passed(count(len(known), "device")))


def enum(seen: Observed) -> Judgement:
    """The health of every device is read: 0 is Unknown, 1 Healthy, 2 Unhealthy."""

    def strange(stream: Stream) -> Iterator[Judgement]:
        for device in entries(stream):
            if device.health not in (0, 1, 2):
                yield warned(f"{name_of(device.key)}: {device.health}")

    return over_streams(seen, strange, passed("0, 1 or 2"))


def time(seen: Observed) -> Judgement:
    """Each last_updated_time is compared with the clock of this machine."""

    def strange(stream: Stream) -> Iterator[Judgement]:
        for one in stream.lists:
            now_s = seen.began_wall_s + one.at_s
            for device in one.devices:
                said = f"{name_of(device.key)}: {device.updated_s}"
                if device.updated_s <= 0:
                    yield warned(f"{said}, which is no time")
                elif device.updated_s > MILLISECONDS:
                    yield warned(f"{said}, which is not in seconds")
                elif device.updated_s > now_s + FUTURE_S:
                    yield warned(f"{said}, {device.updated_s - now_s:,.0f} s ahead")

    return over_streams(seen, strange, passed("seconds since 1970, none ahead"))
