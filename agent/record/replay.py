"""Replay of recorded evaluations by the health engine, with the recorded settings or with others."""

import os
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from agent.engine.step import EngineState, StepOutcome, step, with_settings
from agent.errors import ProbeError
from agent.model.pod_findings import PodsSample
from agent.model.report import Report
from agent.model.settings import EngineSettings
from agent.model.snapshot import Snapshot
from agent.model.time import Instant
from agent.record.events import DeviceVerdict, RecordedInputs, RecordedStep, Verdicts, recorded_verdicts
from agent.record.segment_file import SegmentReader, segment_paths
from agent.record.steady_state import (
    SteadyState,
    do_cgroups_matter,
    find_steady_state,
    find_unread,
    with_counters_read,
)

ChangeSettings = Callable[[EngineSettings], EngineSettings]
"""Function that returns the settings of a replay, from the recorded settings."""


class ReplayedStep(NamedTuple):
    """Evaluation of a replay: the recorded evaluation, and the report that this release makes of it."""

    recorded: RecordedStep
    report: Report
    """Report that this release computes, with the settings of the replay."""
    boot_id: str
    """Boot in which the evaluation was recorded; empty: unknown."""

    @property
    def is_published(self) -> bool:
        """True: the agent that recorded the evaluation published its report."""
        return self.recorded.use is StepOutcome.PUBLISHED


class ReplayedVerdicts(NamedTuple):
    """Evaluation of a replay: the recorded inputs, and the verdicts that this release makes of them."""

    recorded: RecordedInputs
    verdicts: Verdicts
    pods: PodsSample | None
    """Newest sample of pods."""
    starting: bool
    """True: a source has yet to finish its first pass, so that the verdicts are incomplete."""
    declaring: Collection[str]
    """Names of the drivers that declare devices of their own."""
    settings: EngineSettings


class CgroupsMatter(Exception):
    """Error of a replay that leaves out cgroups, although their readings may change verdicts on devices."""


class VerdictDifference(NamedTuple):
    """Device whose health or causes in a replay differ from the recorded ones."""

    at: Instant
    subject: str
    recorded: DeviceVerdict | None
    """Recorded verdict; None: the recorded report does not have the device."""
    replayed: DeviceVerdict | None


class Replay:
    """Replay of the files (segments) of a record, oldest first, with the recorded or with other settings."""

    def __init__(self, change: ChangeSettings | None = None) -> None:
        """Create a replay.

        Args:
            change: Returns the settings of the replay for the recorded settings; None: the recorded settings
                apply.
        """
        self._change = change
        self._state: EngineState | None = None
        self._snapshot: Snapshot | None = None
        """Last evaluated snapshot."""
        self._unread: Set[str] = frozenset()
        """Sources whose newest counters the state may lack."""

    def segment(self, reader: SegmentReader) -> Iterator[ReplayedStep]:
        """Replay a segment (file of a record); yield its evaluations with the reports of this release.

        The replay begins with the recorded state. With other settings it continues with its own state if no
        evaluation is missing between the last segment and this one. Raises INVALID_DATA.
        """
        state, recorded, is_first = self._begin(reader)
        for step_ in reader.steps():
            if is_first and self._change is not None:
                state = with_settings(state, self._change(recorded), step_.now)
            next_state, report = step(state, step_.snapshot, step_.now, is_full=step_.is_full)
            yield ReplayedStep(step_, report, reader.head.boot_id)
            is_first = False
            if step_.use is not StepOutcome.DISCARDED:
                state = next_state
        self._state = state

    def verdicts(self, reader: SegmentReader, *, with_cgroups: bool) -> Iterator[ReplayedVerdicts]:
        """Replay a segment (file of a record); yield its evaluations with the verdicts of this release.

        Evaluations that cannot change a verdict are not computed again.

        Args:
            with_cgroups: False: cgroups are not evaluated.

        Raises:
            CgroupsMatter: Cgroups are not evaluated, but may change verdicts.
            INVALID_DATA: A value is not valid; SegmentReader.until_invalid() handles these errors.
        """
        state, recorded, is_first = self._begin(reader)
        steady: SteadyState | None = None
        replayed: ReplayedVerdicts | None = None
        # cgroups that are not evaluated need not be decoded
        fields = reader.field_names(Snapshot)
        left_out = fields.index("groups") if "groups" in fields and not with_cgroups else -1
        for inputs in reader.inputs():
            if isinstance(inputs.difference, dict):
                inputs.difference.pop(left_out, None)
            if steady is not None and replayed is not None:
                if inputs.use is not StepOutcome.DISCARDED and steady.accept(inputs):
                    yield replayed._replace(recorded=inputs)
                    continue
                state = self._after_steady(state, steady, reader, with_cgroups=with_cgroups)
            snapshot = reader.snapshot(inputs.difference)
            if is_first and self._change is not None:
                state = with_settings(state, self._change(recorded), inputs.now)
            is_first = False
            self._unread = find_unread(self._snapshot, snapshot, self._unread)
            self._snapshot = snapshot
            evaluated = snapshot if with_cgroups else replace(snapshot, groups=())
            next_state, report = step(state, evaluated, inputs.now, is_full=inputs.is_full)
            if not with_cgroups and do_cgroups_matter(next_state, snapshot, report):
                raise CgroupsMatter
            verdicts, declaring = recorded_verdicts(report), report.declaring
            replayed = ReplayedVerdicts(
                inputs, verdicts, snapshot.pods, report.starting, declaring, next_state.settings
            )
            yield replayed
            steady = None
            if inputs.use is StepOutcome.DISCARDED:
                continue
            state = next_state
            if inputs.is_full and not self._unread:
                steady = find_steady_state(
                    state, snapshot, report, reader.field_names, with_cgroups=with_cgroups
                )
        if steady is not None:
            state = self._after_steady(state, steady, reader, with_cgroups=with_cgroups)
        self._state = state

    def _after_steady(
        self, state: EngineState, steady: SteadyState, reader: SegmentReader, *, with_cgroups: bool
    ) -> EngineState:
        """Return the engine's state after the evaluations that ``steady`` accepted as changing no verdict."""
        differences = [(steady.difference, steady.at, True)] if steady.at != state.evaluated else []
        differences += [(inputs.difference, inputs.now, False) for inputs in steady.later]
        for difference, now, is_full in differences:
            snapshot = reader.snapshot(difference)
            self._snapshot = snapshot
            snapshot = snapshot if with_cgroups else replace(snapshot, groups=())
            before = with_counters_read(state, snapshot, now) if is_full else state
            state, _ = step(before, snapshot, now, is_full=is_full)
        return state

    def _begin(self, reader: SegmentReader) -> tuple[EngineState, EngineSettings, bool]:
        """Return the engine's state before a segment, the recorded settings, and a flag.

        The flag is True if the evaluations before the segment are not known.
        """
        recorded, _ = reader.state()
        own = self._state
        has_own = self._change is not None and own is not None and own.evaluated is not None
        if has_own and own is not None and own.evaluated == recorded.evaluated:
            return own, recorded.settings, False
        return recorded, recorded.settings, True


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


def find_segments(records: list[Path]) -> list[Path]:
    """Return the segment files of records, which are given as files or directories.

    The files of a directory are in the order of their age, the oldest first.

    Raises:
        ProbeError: A directory cannot be read, or has no segment.
    """
    found: list[Path] = []
    for record in records:
        if not os.path.isdir(record):  # Path.is_dir() may raise PermissionError
            found.append(record)
            continue
        try:
            paths = segment_paths(record)
        except OSError as error:
            raise ProbeError(f"record {record}: cannot be read: {error.strerror}") from None
        if not paths:
            raise ProbeError(
                f"record {record}: the directory has no segment file, record-*.drahrec; name the directory "
                "of a record"
            )
        found += paths
    return found


def open_segments(
    paths: Sequence[Path], problems: list[str], *, needs_state: bool = False
) -> Iterator[SegmentReader]:
    """Yield a reader of each segment that can be read; add a text about each other segment to ``problems``.

    A loss of power can leave a new segment without content, and the agent deletes old segments at any time.

    Args:
        paths: Files of the segments.
        problems: Receives the texts.
        needs_state: Whether a segment whose recorded state cannot be read counts as unreadable.

    Raises:
        ProbeError: None of the segments can be read.
    """
    first_problem = ""
    opened = 0
    for path in paths:
        try:
            reader = _open_segment(path, needs_state=needs_state)
        except ProbeError as error:
            if len(paths) == 1:
                raise
            first_problem = first_problem or str(error)
            problems.append(str(error))
        else:
            opened += 1
            yield reader
    if not opened:
        raise ProbeError(f"none of the {len(paths)} record files can be read; the first one: {first_problem}")


def _open_segment(path: Path, *, needs_state: bool) -> SegmentReader:
    """Return a reader of a segment; raises ProbeError if its head, settings or a needed state is invalid."""
    reader = SegmentReader(path)
    reason = reader.state()[1]
    if needs_state and reason:
        raise ProbeError(f"record file {path}: its first state is unreadable: {reason}")
    return reader


def published_steps(
    records: list[Path], change: ChangeSettings | None, until_s: float | None, problems: list[str]
) -> Iterator[ReplayedStep]:
    """Yield the replayed evaluations whose reports were published.

    Args:
        records: Files and directories of the records.
        change: Returns the settings of the replay; None: the recorded settings apply.
        until_s: Time after which the replay ends [s since 1970]; None: at the end of the records.
        problems: Receives a text about each part of a record that cannot be read.
    """
    replay = Replay(change)
    for reader in open_segments(find_segments(records), problems):
        path = reader.path
        if reader.head.lost:
            problems.append(f"{path}: {reader.head.lost} snapshots right before it were not recorded")
        if reason := reader.state()[1]:
            problems.append(f"{path}: the replay begins without the recorded state: {reason}")
        for replayed in reader.until_invalid(replay.segment(reader)):
            if until_s is not None and replayed.recorded.now.wall_s > until_s:
                return
            if replayed.is_published:
                yield replayed
        if reader.problem:
            problems.append(str(reader.problem))


def compared_steps(
    steps: Iterator[ReplayedStep], differences: list[VerdictDifference]
) -> Iterator[ReplayedStep]:
    """Yield the replayed evaluations unchanged.

    Each device whose verdict begins to differ from the recorded one is added to ``differences``.
    """
    open_differences: set[str] = set()
    for replayed in steps:
        found = list(
            verdict_differences(
                replayed.recorded.now, replayed.recorded.verdicts, recorded_verdicts(replayed.report)
            )
        )
        differences += [new for new in found if new.subject not in open_differences]
        open_differences = {new.subject for new in found}
        yield replayed
