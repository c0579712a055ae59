"""Health lists encoded by hand: a protobuf library would refuse to encode most of the faults.

Source of the field numbers: ``proto/dra_health/v1/dra_health_v1.proto``. Nothing is checked.
"""

import time
from collections.abc import Iterable
from typing import Final, NamedTuple

VARINT: Final = 0
LENGTH: Final = 2
UNKNOWN, HEALTHY, UNHEALTHY = 0, 1, 2
LEASE_S: Final = 8
"""Lease far above the heartbeat of half a second, so that a busy machine does not make a driver bad."""


class ListedDevice(NamedTuple):
    """Entry of a list."""

    name: bytes = b"gpu-0"
    pool: bytes = b"node-a"
    health: int = HEALTHY
    message: bytes = b""
    lease_s: int = LEASE_S
    at_s: int | None = None
    """Time since 1970; None: the time of encoding."""
    nameless: bool = False
    """Whether the entry has no identifier."""


def health_list(devices: Iterable[ListedDevice]) -> bytes:
    """Encode a NodeWatchResourcesResponse."""
    return b"".join(field(1, _entry(device)) for device in devices)


def _entry(device: ListedDevice) -> bytes:
    identifier = field(1, field(1, device.pool) + field(2, device.name))
    at_s = int(time.time()) if device.at_s is None else device.at_s
    return b"".join(
        (
            b"" if device.nameless else identifier,
            number(2, device.health),
            number(3, at_s),
            number(4, device.lease_s),
            field(5, device.message) if device.message else b"",
        )
    )


def field(index: int, data: bytes) -> bytes:
    """Encode a string, or a message within a message."""
    return varint(index << 3 | LENGTH) + varint(len(data)) + data


def number(index: int, value: int) -> bytes:
    """Encode an int64 or an enum; zero is left out, as in proto3."""
    return varint(index << 3 | VARINT) + varint(value) if value else b""


def varint(value: int) -> bytes:
    """Encode a number; a negative one takes ten bytes."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
