"""Decoder of the C core's GPU records (C structs) into samples, which share no memory with the C core.

A read of a GPU usually changes only a heartbeat and a temperature. So a record is decoded in sections, and a
section with unchanged bytes keeps its decoded value.
"""

import dataclasses
import errno
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple

from agent.model.gpu import (
    UNSUPPORTED_CODES,
    EventCount,
    GpuEvent,
    GpuField,
    GpuSample,
    MigSample,
    NvmlReturnCode,
    NvmlSample,
    XidCount,
)
from agent.model.reading import Absence, Missing, Reading, SourceSample, SourceState
from agent.native._core import ffi, lib
from agent.native.published_tables import SOURCE_STATES, CopiedBytes

_FIELD_NUM: Final = lib.DH_GPU_FIELD_NUM
_WORDS: Final = lib.DH_GPU_WORDS
_ERRNO_CODE: Final = 4096
"""Offset of an errno in the code of a field that is read from a file; smaller codes are NVML's."""
_HEAD_SIZE: Final = ffi.sizeof("struct dh_gpus")
_GPU_SIZE: Final = ffi.sizeof("struct dh_gpu")

_STATUS: Final = struct.Struct("=IIiI11Q")
_READINGS: Final = struct.Struct(f"={2 * _WORDS}Q{_FIELD_NUM}Q{_FIELD_NUM}H")
READINGS_BYTES: Final = _READINGS.size
"""Size of the readings in the record of a GPU [bytes]."""
_VALUES: Final = slice(2 * _WORDS * 8, (2 * _WORDS + _FIELD_NUM) * 8)
"""Position of the values of all readings within the readings of a GPU's record [bytes]."""
_LINKS: Final = struct.Struct(f"={lib.DH_LINK_MAX}Q")
_IDENTITY: Final = struct.Struct("=48s24s96s32s")
_MIG: Final = struct.Struct("=II48s")
_EVENTS: Final = struct.Struct(f"={3 * lib.DH_GPU_EVENTS}Q")
_XID: Final = struct.Struct("=4I3Q")

_SIGNED: Final = frozenset({GpuField.TEMP, GpuField.MARGIN, GpuField.MEM_TEMP})
_STATUS_TEXTS: Final = {
    NvmlReturnCode.UNINITIALIZED: "not initialized",
    NvmlReturnCode.NOT_SUPPORTED: "not supported",
    NvmlReturnCode.NO_PERMISSION: "no permission",
    NvmlReturnCode.NOT_FOUND: "not found",
    NvmlReturnCode.DRIVER_NOT_LOADED: "driver not loaded",
    NvmlReturnCode.TIMEOUT: "timed out",
    NvmlReturnCode.LIBRARY_NOT_FOUND: "no library",
    NvmlReturnCode.FUNCTION_NOT_FOUND: "no such function",
    NvmlReturnCode.LOST: "GPU is lost",
    NvmlReturnCode.RESET_REQUIRED: "GPU requires a reset",
    NvmlReturnCode.MISMATCH: "driver and library are of different versions",
    NvmlReturnCode.GPU_NOT_FOUND: "GPU not found",
    NvmlReturnCode.UNKNOWN: "unknown error",
}
_CALLS: Final[tuple[str, ...]] = tuple(
    ffi.string(lib.dh_nvml_call_name(call)).decode() for call in range(lib.DH_CALL_NUM)
)


def call_name(call: int) -> str:
    """Return the name of a kind of NVML call, such as ``fields``."""
    return _CALLS[call]


def status_text(code: int) -> str:
    """Return the text of an NVML return code, such as ``driver not loaded``."""
    return _STATUS_TEXTS.get(code, f"NVML error {code}")


def _fields() -> tuple[GpuField, ...]:
    names = (ffi.string(lib.dh_gpu_field_name(field)).decode() for field in range(_FIELD_NUM))
    fields = tuple(map(GpuField, names))
    if len(set(fields)) != len(GpuField):
        raise ImportError(f"C core: {len(set(fields))} GPU fields, expected {len(GpuField)}: rebuild it")
    return fields


_FIELDS: Final = _fields()


class _RecordSection(NamedTuple):
    """Byte range in the C struct dh_gpu (the record of a GPU), and the function that decodes the range."""

    start: int
    end: int
    decode: Callable[[bytes], Any]


def _section(first: str, end: str, decode: Callable[[bytes], Any]) -> _RecordSection:
    start = ffi.offsetof("struct dh_gpu", first)
    return _RecordSection(start, ffi.offsetof("struct dh_gpu", end) if end else _GPU_SIZE, decode)


def _text(padded: bytes) -> str:
    return padded.split(b"\0", 1)[0].decode("utf-8", "replace")


def _missing_reading(seen: bool, code: int) -> Missing:
    # 0: the field was not read yet
    is_absent = not seen and (code in UNSUPPORTED_CODES or code in (0, _ERRNO_CODE + errno.ENOENT))
    absence = Absence.ABSENT if is_absent else Absence.UNREADABLE
    return Missing(absence, code - _ERRNO_CODE if code >= _ERRNO_CODE else 0)


class DecodedReadings(NamedTuple):
    """Readings of a GPU, with the bytes that they were decoded from."""

    values: bytes
    """Raw values of all readings, 8 bytes each."""
    masks: bytes
    """Raw bits that state which readings are valid, and were before, with the return code of each reading."""
    readings: Mapping[GpuField, Reading]


def decode_readings(data: bytes, before: DecodedReadings | None = None) -> DecodedReadings:
    """Decode the readings of a GPU's record.

    If the same readings as in ``before`` are valid, with the same return codes, only changed values are
    decoded.
    """
    values, masks = data[_VALUES], data[: _VALUES.start] + data[_VALUES.stop :]
    if before is None or masks != before.masks:
        return DecodedReadings(values, masks, _decode_all_readings(data))
    readings = dict(before.readings)
    changed = int.from_bytes(values, "little") ^ int.from_bytes(before.values, "little")
    at = 0
    while changed:
        skipped = ((changed & -changed).bit_length() - 1) // 64
        at += skipped
        if isinstance(readings[_FIELDS[at]], int):
            value = int.from_bytes(values[8 * at : 8 * at + 8], "little")
            readings[_FIELDS[at]] = _to_signed(_FIELDS[at], value)
        changed >>= 64 * (skipped + 1)
        at += 1
    return DecodedReadings(values, masks, readings)


def _decode_all_readings(data: bytes) -> Mapping[GpuField, Reading]:
    words = _READINGS.unpack_from(data)
    valid = sum(word << 64 * i for i, word in enumerate(words[:_WORDS]))
    seen = sum(word << 64 * i for i, word in enumerate(words[_WORDS : 2 * _WORDS]))
    values = words[2 * _WORDS : 2 * _WORDS + _FIELD_NUM]
    codes = words[2 * _WORDS + _FIELD_NUM :]
    return {
        field: _to_signed(field, values[i])
        if valid >> i & 1
        else _missing_reading(bool(seen >> i & 1), codes[i])
        for i, field in enumerate(_FIELDS)
    }


def _to_signed(field: GpuField, value: int) -> int:
    return value - (1 << 64) if field in _SIGNED and value >> 63 else value


def _decode_migs(data: bytes) -> tuple[MigSample, ...]:
    return tuple(MigSample(gi, ci, _text(uuid)) for gi, ci, uuid in _MIG.iter_unpack(data) if uuid[0])


def _decode_events(data: bytes) -> Mapping[GpuEvent, EventCount]:
    n = lib.DH_GPU_EVENTS
    words = _EVENTS.unpack(data)
    bits = ((event, event.value.bit_length() - 1) for event in GpuEvent)
    return {
        event: EventCount(words[bit], words[n + bit], words[2 * n + bit]) for event, bit in bits if words[bit]
    }


def _decode_xids(data: bytes) -> tuple[XidCount, ...]:
    rows = _XID.iter_unpack(data)  # code, gi, ci, reserved, times, first_ns, last_ns
    return tuple(XidCount(*row[:3], *row[4:]) for row in rows if row[4])


_STATUS_SECTION: Final = _section("index", "valid", _STATUS.unpack)
_READINGS_SECTION: Final = slice(_STATUS_SECTION.end, ffi.offsetof("struct dh_gpu", "links"))
_SECTIONS: Final = {
    "link_errors": _section("link_errors", "uuid", _LINKS.unpack),
    "identity": _section("uuid", "migs", lambda data: tuple(map(_text, _IDENTITY.unpack(data)))),
    "migs": _section("mig", "event_count", _decode_migs),
    "events": _section("event_count", "event_mask", _decode_events),
    "xids": _section("xid", "", _decode_xids),
}
"""Parts of a GPU's record that rarely change."""


class _RareSections(NamedTuple):
    """Values of a GPU's record that rarely change, with the bytes that they were decoded from."""

    raw: bytes
    """Bytes of a GPU's record without status and readings."""
    identity: tuple[str, str, str, str]
    """UUID, PCI address, name and serial number."""
    tail: tuple[Any, ...]
    """Values of the fields of :class:`GpuSample` after ``readings``, in their order."""


class _UnchangedRecord(NamedTuple):
    """Bytes of a GPU's record without its status, and the values that they were decoded to."""

    raw: bytes
    rare: _RareSections
    readings: Mapping[GpuField, Reading]


class GpuRecordDecoder:
    """Decoder of the C core's GPU records into samples; an unchanged section keeps its decoded value."""

    def __init__(self) -> None:
        self._sections: dict[tuple[int, str], tuple[bytes, Any]] = {}
        self._rare: dict[int, _RareSections] = {}
        self._readings: dict[int, DecodedReadings] = {}
        self._records: dict[int, _UnchangedRecord] = {}

    def decode(self, data: CopiedBytes) -> NvmlSample:
        """Decode one copy of all GPU records, made by ``dh_gpus_read()``."""
        head = ffi.from_buffer("struct dh_gpus *", data, require_writable=False)
        ends = range(_HEAD_SIZE, len(data), _GPU_SIZE)
        gpus = tuple(self._decode_gpu(data[at : at + _GPU_SIZE], slot) for slot, at in enumerate(ends))
        return NvmlSample(
            gpus=gpus,
            nvml=SourceSample(
                name="nvml",
                state=SOURCE_STATES[head.state],
                beat_ns=head.heartbeat_ns,
                period_ns=head.period_ns,
                failures=head.failures,
                detail=_failure_text(head),
                passes=head.passes,
                vital=False,  # a driver that hangs affects its GPUs only
            ),
            events=SourceSample(
                name="nvml-events",
                # without a working library there are no events
                state=SOURCE_STATES[head.wait_state] if head.state == lib.DH_STATE_OK else SourceState.ABSENT,
                beat_ns=head.wait_heartbeat_ns,
                period_ns=head.wait_period_ns,
                failures=head.wait_failures,
                detail=_event_failure_text(head, gpus) if head.state == lib.DH_STATE_OK else "",
                passes=head.wait_passes,
                vital=False,
            ),
            err=head.err,
            generation=head.generation,
            module=head.module,
            count=head.count,
            driver=_text(ffi.buffer(head.driver)[:]),
            library=_text(ffi.buffer(head.nvml)[:]),
            call=_CALLS[head.call],
            call_ns=head.call_ns,
        )

    def _decode_section(self, data: bytes, slot: int, name: str) -> Any:
        section = _SECTIONS[name]
        raw = data[section.start : section.end]
        known = self._sections.get((slot, name))
        if known is None or known[0] != raw:
            known = self._sections[slot, name] = (raw, section.decode(raw))
        return known[1]

    def _decode_rare(self, data: bytes, slot: int) -> _RareSections:
        raw, known = data[_READINGS_SECTION.stop :], self._rare.get(slot)
        if known is None or known.raw != raw:
            record = ffi.from_buffer("struct dh_gpu *", data, require_writable=False)
            link_errors, identity, migs, events, xids = (
                self._decode_section(data, slot, name) for name in _SECTIONS
            )
            tail = (record.links, link_errors, migs, events, record.event_mask, xids, record.xid_evicted)
            known = self._rare[slot] = _RareSections(raw, identity, tail)
        return known

    def _decode_rest(self, data: bytes, raw: bytes, slot: int) -> _UnchangedRecord:
        """Decode the record of a GPU without its status."""
        readings = data[_READINGS_SECTION]
        known = self._readings[slot] = decode_readings(readings, self._readings.get(slot))
        rest = self._records[slot] = _UnchangedRecord(raw, self._decode_rare(data, slot), known.readings)
        return rest

    def _decode_gpu(self, data: bytes, slot: int) -> GpuSample:
        index, _, status, call, call_ns, passes, beat_ns, period_ns, slow_passes, *more = _STATUS.unpack_from(
            data
        )
        failures, overdue, probe_p50_ns, handles, _, changes = more
        raw, known = data[_READINGS_SECTION.start :], self._records.get(slot)
        if known is None or known.raw != raw:
            known = self._decode_rest(data, raw, slot)
        _, rare, readings = known
        status_values = (
            status,
            passes,
            beat_ns,
            period_ns,
            _CALLS[call],
            call_ns,
            slow_passes,
            handles,
            changes,
        )
        more_values = (overdue, failures, probe_p50_ns, readings)
        return _new_sample((index, *rare.identity, *status_values, *more_values, *rare.tail))


_SAMPLE_FIELDS: Final = tuple(field.name for field in dataclasses.fields(GpuSample))


def _new_sample(values: tuple[Any, ...]) -> GpuSample:
    """Return the sample with these values of all its fields, in their order.

    The constructor of a frozen class with as many fields takes several times as long.
    """
    sample = object.__new__(GpuSample)
    deque(map(object.__setattr__, repeat(sample), _SAMPLE_FIELDS, values), maxlen=0)
    return sample


def _event_failure_text(head: Any, gpus: Sequence[GpuSample]) -> str:
    """Return the last failure of the NVML event thread and the number of dropped XIDs; empty: neither."""
    forgotten = sum(gpu.xids_forgotten for gpu in gpus)
    parts = [
        (head.wait_err, status_text(head.wait_err)),
        (forgotten, f"{forgotten} XIDs were dropped for lack of room"),
    ]
    return ", ".join(text for count, text in parts if count)


def _failure_text(head: Any) -> str:
    if head.state == lib.DH_STATE_STARTING or not head.err:
        return ""
    return _text(ffi.buffer(head.err_text)[:]) or status_text(head.err)
