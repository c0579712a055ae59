"""Encoder of devices' health as protobuf messages for the kubelet, through the C core.

For 128 devices betterproto takes 10 to 36 ms, this module 0.05 ms.
"""

import errno
import os
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from agent.native._core import ffi, lib

SIZE_LIMIT: Final = 1 << 20
"""Largest size of one message, unless the caller sets another limit [bytes]."""
_NUMBERS: Final = struct.Struct("=iqq")  # health, last_updated_s and timeout_s of struct dh_health
_OVERHEAD: Final = 64  # bytes of tags, lengths and numbers around the texts of one device, at most 63
_new_uncleared: Final = ffi.new_allocator(should_clear_after_alloc=False)


class WireHealth(NamedTuple):
    """Health of one device as sent to the kubelet: ``DeviceHealth`` of KEP-4680, in v1 and v1alpha1."""

    pool: str
    device: str
    health: int
    """Health of the device, as ``HealthStatus``: 0 unknown, 1 healthy, 2 unhealthy."""
    last_updated_s: int
    """Time at which the health of the device was last verified [s since 1970]."""
    timeout_s: int
    """Time after which the kubelet considers the health unknown [s]; 0 is the kubelet's default."""
    message: str


class HealthColumns(NamedTuple):
    """Health of devices as columns of equal length, one per field of WireHealth.

    The values of many devices are converted at once, which takes a third of the time.
    """

    pools: Sequence[str]
    devices: Sequence[str]
    healths: Sequence[int]
    last_updated_s: Sequence[int]
    timeouts_s: Sequence[int]
    messages: Sequence[str]

    def entry(self, index: int) -> WireHealth:
        """Return the health of one device."""
        return WireHealth._make(column[index] for column in self)


def encode_health_lists(entries: Sequence[WireHealth], *, size_limit: int = SIZE_LIMIT) -> list[bytes]:
    """Encode the health of devices as ``NodeWatchResourcesResponse`` messages.

    Entries are encoded as by :func:`encode_health_columns`; without entries there is no message.
    """
    if not entries:
        return []
    return encode_health_columns(HealthColumns(*zip(*entries, strict=True)), size_limit=size_limit)


def encode_health_columns(columns: HealthColumns, *, size_limit: int = SIZE_LIMIT) -> list[bytes]:
    """Encode the health of devices as ``NodeWatchResourcesResponse`` messages.

    Args:
        columns: Devices in the order in which they are sent; without devices there is no message.
        size_limit: Largest size of one message [bytes]. More devices make several messages; a device that is
            missing in a message keeps its health.

    Returns:
        The messages; together they hold every device once.

    Raises:
        ValueError: A device has a text with a lone surrogate, a number that does not fit its field (int32 for
            ``health``, else int64), or alone exceeds ``size_limit``.
    """
    count = len(columns.pools)
    texts = (*columns.pools, *columns.devices, *columns.messages)
    joined = "".join(texts)
    try:
        text = joined.encode()
        sizes = map(len, texts) if joined.isascii() else (len(part.encode()) for part in texts)
        numbers = (*sizes, *columns.healths, *columns.last_updated_s, *columns.timeouts_s)
        packed = struct.pack(f"={3 * count}I{count}i{2 * count}q", *numbers)
    except (UnicodeEncodeError, struct.error):
        raise _value_error(columns) from None
    records = _new_uncleared("struct dh_health[]", count)
    if lib.dh_health_fill(records, count, packed):
        raise ValueError(f"texts of {count} devices: {len(text)} bytes, limit 4 GiB")
    return _encode_messages(columns, records, text, size_limit)


def _value_error(columns: HealthColumns) -> ValueError:
    """Return the error that names the first device with a text or number that cannot be encoded."""
    for index in range(len(columns.pools)):
        entry = columns.entry(index)
        try:
            for text in (entry.pool, entry.device, entry.message):
                text.encode()
            _NUMBERS.pack(entry.health, entry.last_updated_s, entry.timeout_s)
        except UnicodeEncodeError as error:
            part = error.object[error.start : error.end]
            return ValueError(
                f"{_device_label(entry)}: text has a lone surrogate {part!r} at character {error.start}"
            )
        except struct.error as error:
            numbers = f"health {entry.health}, updated {entry.last_updated_s}, timeout {entry.timeout_s}"
            return ValueError(f"{_device_label(entry)}: {numbers}: {error}")
    raise AssertionError("no device has a value that cannot be encoded")


def _encode_messages(columns: HealthColumns, records: Any, text: bytes, limit: int) -> list[bytes]:
    count = len(columns.pools)
    cap = min(limit, len(text) + _OVERHEAD * count)
    out = _new_uncleared("uint8_t[]", cap)
    taken = ffi.new("uint32_t *")
    messages: list[bytes] = []
    done = 0
    while done < count:
        used = lib.dh_health_encode(records + done, count - done, text, len(text), out, cap, taken)
        if used == -errno.ENOSPC:
            entry = columns.entry(done)
            raise ValueError(f"{_device_label(entry)}: {_sizes_text(entry)}, limit {limit}")
        if used < 0:
            label = _device_label(columns.entry(done))
            raise RuntimeError(f"health of {label}: cannot be encoded: {os.strerror(-used)}")
        messages.append(bytes(ffi.buffer(out, used)))
        done += taken[0]
    return messages


def _device_label(entry: WireHealth) -> str:
    return f"device {entry.device[:63]!r} of pool {entry.pool[:63]!r}"


def _sizes_text(entry: WireHealth) -> str:
    pool, device, message = (len(text.encode()) for text in (entry.pool, entry.device, entry.message))
    return f"too large for one message: pool {pool} bytes, name {device}, message {message}"
