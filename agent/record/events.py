"""Events of a record, one for each evaluation of the health engine, and their form as plain data. Pure.

A segment is a part of a record that can be read alone: a head, the engine's state before the first event, and
the events, each as the difference to the event before.
"""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import msgspec

from agent.engine.step import EngineState, StepOutcome
from agent.health.declared.state import VerdictCache
from agent.health.gpu.state import GpuVerdictCache
from agent.health.host.unchanged_parts import HostResults
from agent.model.health import Health, Severity
from agent.model.report import Report
from agent.model.settings import EngineSettings
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant
from agent.record.value_codec import NO_CHANGE, CodecError, ValueClass, ValueDecoder, ValueEncoder, classes_of

FORMAT: Final = "drahealth-record"
SCHEMA: Final = 1
"""Version of the record's format. Added and removed fields of the recorded classes need no new version."""
CLASSES: Final[tuple[ValueClass, ...]] = tuple(classes_of(Snapshot, EngineState))
_SKIPS_GPUS: Final = 1 << 4
"""Bit in a recorded step's use, set if the step did not evaluate GPUs and parts of the host without a change.
"""
_WALL_ULPS_MAX: Final = 1 << 40
"""Largest difference between wall time and predicted wall time that is stored as an integer.

The integer counts the representable floating-point values between them; a larger difference stores the time
itself.
"""
_WALL_END_S: Final = 1 << 37
"""Upper limit of wall times in a record [s since 1970], in the year 6325: later ones cannot be printed."""
_VERDICTS: Final = tuple[tuple[str, Health, Severity, tuple[tuple[str, Severity], ...]], ...]


class DeviceVerdict(NamedTuple):
    """Verdict (health and causes) on one device in a recorded report."""

    subject: str
    """Name of the device: ``<driver>/<pool>/<name>``, or the name of a host device."""
    health: int
    severity: int
    causes: tuple[tuple[str, int], ...]
    """Code and severity of each cause, the worst first."""


Verdicts = tuple[DeviceVerdict, ...]


class RecordedStep(NamedTuple):
    """Recorded evaluation of the health engine: its inputs, the verdicts, and whether they were published."""

    snapshot: Snapshot
    now: Instant
    use: StepOutcome
    verdicts: Verdicts
    """Verdicts of the newest published report: of this evaluation's, if it was published."""
    is_full: bool = True
    """False: the evaluation left out GPUs and parts of the host that had not changed."""


class RecordedInputs(NamedTuple):
    """Recorded evaluation whose snapshot has not been decoded; the other fields are those of RecordedStep."""

    difference: Any
    """Plain data of the difference between the snapshot and the one before."""
    now: Instant
    use: StepOutcome
    verdicts: Verdicts
    is_full: bool


class SegmentHead(NamedTuple):
    """Head of a segment (one file of a record): which agent, node and settings the file comes from."""

    version: str
    """Version of drahealth that wrote the segment."""
    node: str
    boot_id: str
    lost: int = 0
    """Number of evaluations right before the segment that a slow or full disk kept from being recorded."""
    is_redacted: bool = False
    """True: names, serial numbers and UUIDs are pseudonyms."""


def recorded_verdicts(report: Report) -> Verdicts:
    """Return the verdicts of a report as they are recorded, in the report's order."""
    return tuple(
        DeviceVerdict(
            f"{device.driver}/{device.pool}/{device.device}" if device.driver else device.device,
            int(device.health),
            int(device.severity),
            tuple([(cause.code, int(cause.severity)) for cause in device.causes]),
        )
        for device in report.devices
    )


def recordable_state(state: EngineState) -> EngineState:
    """Return the engine's state without its caches, which save work and do not change results."""
    return replace(
        state,
        verdict_cache=VerdictCache(),
        gpu_cache=GpuVerdictCache(),
        host_results=HostResults(),
        ok_cache={},
    )


class SegmentEncoder:
    """Encoder of a segment's head and evaluations as plain data for msgpack."""

    def __init__(self, table: ValueEncoder) -> None:
        self._table = table
        self._snapshot: Snapshot | None = None
        self._now = Instant(0, 0.0)
        self._verdicts: tuple[Any, ...] = ()

    def begin(self, head: SegmentHead, state: EngineState) -> dict[str, Any]:
        """Return the segment's head as plain data, with the engine's state before the first evaluation."""
        return {
            "format": FORMAT,
            "schema": SCHEMA,
            **head._asdict(),
            "classes": self._table.description(),
            "settings": self._table.complete(state.settings),
            "state": self._table.complete(recordable_state(state)),
        }

    def event(self, step: RecordedStep) -> list[Any]:
        """Return an evaluation as plain data: its difference to the evaluation that was encoded before it."""
        difference = self._table.difference
        snapshot = difference(self._snapshot, step.snapshot)
        verdicts = tuple(map(tuple, step.verdicts))
        change = difference(self._verdicts, verdicts)
        event = [
            int(step.use) | (0 if step.is_full else _SKIPS_GPUS),
            step.now.mono_ns - self._now.mono_ns,
            _wall_difference(self._now, step.now),
            {} if snapshot is NO_CHANGE else snapshot,
        ]
        if change is not NO_CHANGE:
            event.append(change)
        self._snapshot, self._now, self._verdicts = step.snapshot, step.now, verdicts
        return event


class SegmentDecoder:
    """Decoder of a segment's head and evaluations from plain data."""

    def __init__(self, data: Any) -> None:
        """Read the head of the segment from plain data.

        Raises:
            CodecError: The data are not the head of a segment, or have a later schema.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise CodecError("the file is not a drahealth record")
        if data["schema"] > SCHEMA:
            raise CodecError(
                f"the record has schema {data['schema']}, this release reads up to {SCHEMA}; update drahealth"
            )
        head = SegmentHead(**{name: data[name] for name in SegmentHead._fields if name in data})
        self.head = msgspec.convert(tuple(head), SegmentHead)
        self._decoder = ValueDecoder(data["classes"], CLASSES)
        self._settings, self._state = data["settings"], data["state"]
        self._snapshot: Snapshot | None = None
        self._now = Instant(0, 0.0)
        self._changed_verdicts: Any = ()
        self._verdicts: Verdicts = ()

    def settings(self) -> EngineSettings:
        """Return the engine's recorded settings. Raises CodecError: this release cannot represent them."""
        settings = self._decoder.complete(self._settings)
        if not isinstance(settings, EngineSettings):
            raise CodecError("the record is damaged: its head lacks the engine's settings")
        return settings

    def state(self) -> EngineState:
        """Return the engine's state before the first evaluation of the segment.

        Raises:
            CodecError: Another release wrote the segment, and this release cannot represent its state.
        """
        state = self._decoder.complete(self._state)
        if not isinstance(state, EngineState):
            raise CodecError("the record is damaged: its head lacks the engine's state")
        return state

    @property
    def field_names(self) -> Callable[[type], tuple[str, ...]]:
        """Function that returns the names of the recorded fields of a class."""
        return self._decoder.field_names

    def inputs(self, data: Any) -> RecordedInputs:
        """Return the evaluation that `data` encodes. All earlier evaluations must have been decoded already.

        Raises:
            CodecError: The data are not valid.
        """
        use, mono_ns, wall, snapshot, *rest = data
        mono_ns += self._now.mono_ns
        wall_s = _wall_after(self._now, mono_ns, wall)
        if mono_ns >> 63 or not 0 <= wall_s < _WALL_END_S:
            raise CodecError(f"the record is damaged: it has the invalid time {wall_s:.2g} s, {mono_ns} ns")
        self._now = Instant(mono_ns, wall_s)
        if rest:
            self._changed_verdicts = self._decoder.apply(self._changed_verdicts, rest[0])
            msgspec.convert(self._changed_verdicts, _VERDICTS)  # raises an error if a value is not valid
            self._verdicts = tuple(DeviceVerdict(*verdict) for verdict in self._changed_verdicts)
        return RecordedInputs(
            snapshot, self._now, StepOutcome(use & ~_SKIPS_GPUS), self._verdicts, not use & _SKIPS_GPUS
        )

    def snapshot(self, difference: Any) -> Snapshot:
        """Return the next snapshot: the snapshot that was returned last, changed by ``difference``.

        Raises:
            CodecError: The difference is not valid.
        """
        self._snapshot = self._decoder.apply(self._snapshot, difference)
        if not isinstance(self._snapshot, Snapshot):
            raise CodecError("the record is damaged: an evaluation has no snapshot")
        return self._snapshot


def _wall_difference(before: Instant, now: Instant) -> int | float:
    """Return the wall time of ``now`` as its distance from the predicted wall time, in ULPs.

    The predicted wall time is that of ``before`` plus the monotonic time since then. A ULP is the step from a
    floating-point number to the next one, so the distance is a small integer. If it is larger than
    _WALL_ULPS_MAX, as after a change of the clock, the result is the wall time itself [s], a float.
    """
    ulps = _bits(now.wall_s) - _bits(_predicted_wall(before, now.mono_ns))
    return ulps if abs(ulps) <= _WALL_ULPS_MAX and math.isfinite(now.wall_s) else now.wall_s


def _wall_after(before: Instant, mono_ns: int, difference: int | float) -> float:
    """Return the wall time [s] that _wall_difference() returned ``difference`` for."""
    if isinstance(difference, float):
        return difference
    return float(
        struct.unpack("<d", struct.pack("<q", _bits(_predicted_wall(before, mono_ns)) + difference))[0]
    )


def _predicted_wall(before: Instant, mono_ns: int) -> float:
    return before.wall_s + (mono_ns - before.mono_ns) / NS


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
