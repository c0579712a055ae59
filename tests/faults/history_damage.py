"""Damage of a history file: changes of a valid file, and what its readers and its writer must do with it.

A change is written as the number of a byte that is not 0, a count, and as many new bytes from there on; the
count 0 cuts the file off. The file keeps its length otherwise, so that SQLite still opens most changed files,
and an input is small although the file is not.
"""

import struct
from pathlib import Path
from typing import Final

from usage_samples import LOST, device_usage

from agent.model.claim import DeviceRef
from agent.model.device_usage import PodDeviceUsage
from agent.model.health import Severity
from agent.model.history import ObservedPeriod, RecordedCause, RecordedState, RecordedVerdict, VerdictChange
from agent.model.settings import UsageHistoryLimits
from agent.store.history_file import HistoryError, HistoryFile, read_history, read_verdicts

LIMITS: Final = UsageHistoryLimits()
PERIOD: Final = ObservedPeriod("run-1", "boot", 10.0, 20.0, 1030.0)
USES: Final = [device_usage(number, active=number % 2 == 0, state=LOST) for number in range(6)]
NEW_USE: Final = device_usage(99, active=True)


def verdict_change(number: int) -> VerdictChange:
    """Return a change of a device to Unhealthy."""
    cause = RecordedCause("gpu.xid.79", Severity.UNHEALTHY, f"{number} times")
    return VerdictChange(
        "run-1",
        number,
        DeviceRef("gpu.example.com", "node-1", f"gpu-{number}"),
        RecordedState.HEALTHY,
        RecordedVerdict(RecordedState.UNHEALTHY, (cause,)),
        1000.0 + number,
        float(number),
    )


CHANGES: Final = [verdict_change(number) for number in range(6)]
NEW_CHANGE: Final = verdict_change(99)


class HistoryBug(Exception):
    """A damaged history file was read with content that was never written, or ended recording."""


class DamagedHistory:
    """History file in a directory, which is damaged, read and written again for each input."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "history.sqlite"
        self._write(USES, CHANGES)
        self._uses = self._read_uses()
        self._whole = self._path.read_bytes()
        self._places = [at for at, byte in enumerate(self._whole) if byte]

    def seeds(self) -> list[bytes]:
        """Return inputs that change nothing, one byte, and the length."""
        return [
            b"",
            *(struct.pack(">HB", number, 1) + b"\0" for number in range(0, len(self._places), 500)),
            struct.pack(">HB", len(self._places) // 2, 0),
        ]

    def apply_damage(self, data: bytes) -> bytes:
        """Return the file with the changes in an input."""
        out, rest = bytearray(self._whole), data
        while len(rest) >= 3:
            number, count = struct.unpack_from(">HB", rest)
            at = self._places[number % len(self._places)]
            if count:
                new = rest[3 : 3 + count][: len(out) - at]
                out[at : at + len(new)] = new
            else:
                del out[at:]
            rest = rest[3 + count :]
        return bytes(out)

    def use(self, data: bytes) -> str:
        """Go on recording in a damaged file, then read one; returns what was found.

        Raises:
            UnusableFile: A reader found the damage.
            HistoryBug: A reader or the writer did something that it must not do.
        """
        damaged = self.apply_damage(data)
        self._place(damaged)
        recorded = self._record()
        self._place(damaged)
        uses, verdicts = self._read_uses(), read_verdicts(self._path)
        if uses - self._uses or set(verdicts.changes) - set(CHANGES) or set(verdicts.periods) - {PERIOD}:
            raise HistoryBug("something was read that was never written")
        return f"{len(uses)} uses, {len(verdicts.changes)} changes, {recorded}"

    def _place(self, content: bytes) -> None:
        """Make this the only file."""
        for path in self._path.parent.glob(f"{self._path.name}*"):
            path.unlink()
        self._path.write_bytes(content)

    def _record(self) -> str:
        """Write to the file as an agent that starts; returns what happened to the file."""
        problem = ""
        for _ in range(4):  # each part of the file may have damage of its own
            try:
                self._write([NEW_USE], [NEW_CHANGE])
            except HistoryError as error:
                problem = str(error)
                if "the file is left unchanged" in problem:
                    return "left unchanged"
                continue
            break
        else:
            raise HistoryBug(f"recording does not go on: {problem}")
        ids = {use.id for use in self._read_uses()}
        if NEW_USE.id not in ids or NEW_CHANGE not in read_verdicts(self._path).changes:
            raise HistoryBug("what was recorded after the damage is not there")
        return "set aside" if problem else "continued"

    def _read_uses(self) -> set[PodDeviceUsage]:
        content = read_history(self._path)
        return {*content.running, *content.ended}

    def _write(self, uses: list[PodDeviceUsage], changes: list[VerdictChange]) -> None:
        file = HistoryFile(self._path, LIMITS)
        file.content_if_replaced()
        file.write_uses(uses, (), 1100.0, delete_by_age=False)
        file.verdicts_if_replaced()
        file.write_verdicts((PERIOD,), changes, 1100.0, delete_by_age=False)
