"""Replay of recorded steps through the health engine, with the recorded settings or with others."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from agent.engine.loop import StepUse
from agent.engine.step import EngineState, step, with_settings
from agent.model.report import Report
from agent.model.settings import EngineSettings
from agent.model.time import Instant
from agent.record.events import DeviceVerdict, RecordedStep, Verdicts
from agent.record.segment_file import SegmentReader

ChangeSettings = Callable[[EngineSettings], EngineSettings]
"""Function that returns the settings of a replay instead of the recorded ones."""


class ReplayedStep(NamedTuple):
    """Step of a replay."""

    recorded: RecordedStep
    report: Report
    """Report of this release, with the settings of the replay."""
    is_first: bool
    """True: the first step of a segment, so the steps before it may be missing."""

    @property
    def is_published(self) -> bool:
        """True: the agent published the report of this step."""
        return self.recorded.use is StepUse.PUBLISHED


class VerdictDifference(NamedTuple):
    """Device whose verdict in a replay is not the recorded one."""

    at: Instant
    subject: str
    recorded: DeviceVerdict | None
    """None: the recorded report does not have the device."""
    replayed: DeviceVerdict | None


def replay_segment(reader: SegmentReader, change: ChangeSettings | None = None) -> Iterator[ReplayedStep]:
    """Yield the steps of a segment with the reports of this release.

    Args:
        reader: The segment.
        change: Function that changes the settings, as a reload before the first step would; None: the
            recorded settings apply.

    Raises:
        CodecError: Another release wrote the segment, and its state cannot be read.
    """
    state: EngineState | None = reader.state()
    is_first = True
    for recorded in reader.steps():
        assert state is not None
        if is_first and change is not None:
            state = with_settings(state, change(state.settings), recorded.now)
        next_state, report = step(state, recorded.snapshot, recorded.now, is_full=recorded.is_full)
        yield ReplayedStep(recorded, report, is_first)
        is_first = False
        if recorded.use is not StepUse.DISCARDED:
            state = next_state


def verdict_differences(at: Instant, recorded: Verdicts, replayed: Verdicts) -> Iterator[VerdictDifference]:
    """Yield the devices on which two reports have different verdicts, in the order of the first report."""
    if recorded == replayed:
        return
    others = {verdict.subject: verdict for verdict in replayed}
    for verdict in recorded:
        other = others.pop(verdict.subject, None)
        if other != verdict:
            yield VerdictDifference(at, verdict.subject, verdict, other)
    for verdict in others.values():
        yield VerdictDifference(at, verdict.subject, None, verdict)
