"""Records of snapshots: what was written is read back, and a replay gives the reports that were published."""

import errno
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S
from record_nodes import Step, gpu_day, host_day
from record_size import write_quiet_day

from agent.engine.step import EngineState, StepOutcome, step
from agent.errors import ProbeError
from agent.health.gpu.state import GpuVerdictCache
from agent.model.reading import Absence, Missing
from agent.model.snapshot import CpuSetsSample, CpuThrottleSample
from agent.model.time import Instant
from agent.record.events import CLASSES, RecordedStep, SegmentHead, recordable_state, recorded_verdicts
from agent.record.recorder import RecordLimits, SnapshotRecorder, _Queued
from agent.record.replay import Replay, verdict_differences
from agent.record.segment_file import (
    MAGIC,
    SegmentReader,
    SegmentWriter,
    _packed_frames,
    cut_torn_tail,
    segment_path,
    segment_paths,
)
from agent.record.value_codec import NO_CHANGE, CodecError, ValueClass, ValueDecoder, ValueEncoder
from agent.serve.agent_api.encode import encode_report
from agent.system.files import CheckedDirectory
from agent.system.timing import CLOCK_TRUST_S

HEAD = SegmentHead("0.1.0", "node-a", "boot-1")
TABLE = ValueEncoder(CLASSES)
DAYS = [*((host_day, seed) for seed in range(3)), *((gpu_day, seed) for seed in range(2))]


def through_msgpack(data: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(data))


def decoder() -> ValueDecoder:
    return ValueDecoder(TABLE.description(), CLASSES)


def report_bytes(report: Any) -> bytes:
    return b"".join(encode_report(report))


def write_segment(path: Path, steps: list[Step], per_frame: int = 3) -> None:
    recorded, verdicts = [], ()
    for _, snapshot, report, use in steps:
        if use is StepOutcome.PUBLISHED:
            verdicts = recorded_verdicts(report)
        recorded.append(RecordedStep(snapshot, report.at, use, verdicts, report.is_full))
    writer = SegmentWriter(path, HEAD, steps[0][0])
    for at in range(0, len(recorded), per_frame):
        writer.append(recorded[at : at + per_frame])
    writer.close()


# --- values ------------------------------------------------------------------------------------------------

readings = st.one_of(
    st.integers(),
    st.builds(Missing, st.sampled_from(Absence), st.integers(-5000, 200)),
    st.just((1 << 64) - 1),
)
values = st.recursive(
    st.one_of(
        readings,
        st.none(),
        st.booleans(),
        st.text(),
        st.floats(allow_nan=False),
        st.sampled_from(StepOutcome),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.frozensets(st.integers(), max_size=1),
        st.builds(CpuThrottleSample, st.integers(0, 9), inner, inner),
        st.builds(CpuSetsSample, inner, inner, inner),
        st.builds(Instant, st.integers(), st.floats(allow_nan=False)),
    ),
    max_leaves=12,
)
ANY_TABLE = ValueEncoder([*CLASSES, ValueClass(StepOutcome, ())])


@given(values, values)
def test_value_and_its_change_are_decoded_as_they_were(old: Any, new: Any) -> None:
    reader = ValueDecoder(ANY_TABLE.description(), [*CLASSES, ValueClass(StepOutcome, ())])
    first = reader.complete(through_msgpack(ANY_TABLE.complete(old)))
    assert repr(first) == repr(old)
    change = ANY_TABLE.difference(old, new)
    after = first if change is NO_CHANGE else reader.apply(first, through_msgpack(change))
    assert repr(after) == repr(new)
    assert type(after) is type(new)


def test_text_without_valid_unicode_is_decoded_as_it_was() -> None:
    assert decoder().complete(through_msgpack(TABLE.complete("a\udcffb"))) == "a\udcffb"


def test_value_of_unknown_type_is_refused() -> None:
    with pytest.raises(TypeError, match="a value of type PosixPath cannot be recorded"):
        TABLE.complete((Path("/"),))


def test_class_without_a_field_of_the_file_ignores_it() -> None:
    names = ["CpuThrottleSample", "package", "gone", "cpu", "core"]
    old = ValueDecoder([names], CLASSES)
    sample = old.complete([16, 3, "x", 1, 2])
    assert sample == CpuThrottleSample(1, 2, 3)
    assert old.apply(sample, {0: 10, 1: "y", 3: 5}) == CpuThrottleSample(1, 7, 13)
    assert old.changed_classes == {"CpuThrottleSample"}


def test_field_that_the_file_lacks_has_its_default_or_is_an_error() -> None:
    old = ValueDecoder(
        [["SourceSample", "name", "state", "beat_ns", "period_ns", "failures", "detail"]], CLASSES
    )
    assert old.complete([16, "a", "ok", 1, 2, 3, ""]).vital is True
    with pytest.raises(CodecError, match=r"CpuThrottleSample: .*missing 1 required"):
        ValueDecoder([["CpuThrottleSample", "cpu", "core"]], CLASSES).complete([16, 1, 2])


def test_class_of_another_release_is_named() -> None:
    with pytest.raises(CodecError, match="this release has no class Sample"):
        ValueDecoder([["Sample", "x"]], CLASSES).complete([16, 1])


@pytest.mark.parametrize("data", [{}, [], ["x"], [15], [999], [16]])
def test_invalid_value_is_refused(data: Any) -> None:
    with pytest.raises(CodecError):
        ValueDecoder([["CpuThrottleSample", "cpu", "core", "package"]], CLASSES).complete(data)


# --- days of nodes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("day", "seed"), DAYS)
def test_replayed_random_day_gives_the_published_reports(day: Any, seed: int, tmp_path: Path) -> None:
    steps = day(seed)
    path = segment_path(tmp_path, 1)
    write_segment(path, steps)
    reader = SegmentReader(path)
    assert reader.head == HEAD
    replayed = list(Replay().segment(reader))
    assert reader.problem is None
    assert len(replayed) == len(steps)
    for (_, snapshot, report, use), again in zip(steps, replayed, strict=True):
        assert again.recorded.use is use
        assert again.recorded.snapshot == snapshot
        assert report_bytes(again.report) == report_bytes(report)
        assert again.report == report
        if use is StepOutcome.PUBLISHED:
            now = again.recorded.now
            assert not list(
                verdict_differences(now, again.recorded.verdicts, recorded_verdicts(again.report))
            )


@pytest.mark.parametrize(("day", "seed"), DAYS[2:4])
def test_state_in_the_middle_of_a_day_continues_with_the_same_reports(day: Any, seed: int) -> None:
    steps = day(seed)
    for at in range(0, len(steps), max(1, len(steps) // 6)):
        before, _, report, _ = steps[at]
        if not report.is_full:  # the recorder begins no segment there
            continue
        state = decoder().complete(through_msgpack(TABLE.complete(recordable_state(before))))
        assert isinstance(state, EngineState)
        for _, snapshot, report, _ in steps[at : at + 40]:
            state, again = step(state, snapshot, report.at, is_full=report.is_full)
            assert report_bytes(again) == report_bytes(report)


def test_discarded_step_leaves_the_state_of_the_replay(tmp_path: Path) -> None:
    steps = host_day(3, 6)
    before, snapshot, report, _ = steps[5]
    discarded = (before, snapshot, step(before, snapshot, report.at)[1], StepOutcome.DISCARDED)
    steps.insert(5, discarded)
    write_segment(segment_path(tmp_path, 1), steps)
    replayed = Replay().segment(SegmentReader(segment_path(tmp_path, 1)))
    for (_, _, report, _), again in zip(steps, replayed, strict=True):
        assert again.report == report


# --- files --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short_day() -> list[Step]:
    return host_day(1, 8)


def count_steps(path: Path) -> tuple[int, str]:
    reader = SegmentReader(path)
    return sum(1 for _ in reader.steps()), reader.problem.reason if reader.problem else ""


def cut_tail(path: Path) -> object:
    with CheckedDirectory(path.parent) as directory:
        return cut_torn_tail(directory, path)


def test_file_that_ends_anywhere_is_read_up_to_its_last_frame(short_day: list[Step], tmp_path: Path) -> None:
    path = segment_path(tmp_path, 1)
    write_segment(path, short_day, per_frame=1)
    data = path.read_bytes()
    seen = set()
    for size in range(len(data) - 900, len(data), 37):
        path.write_bytes(data[:size])
        steps, reason = count_steps(path)
        assert reason in ("", "the last frame is incomplete")
        problem = cut_tail(path)
        assert bool(problem) == bool(reason)
        assert count_steps(path) == (steps, "")
        seen.add(steps)
    assert len(seen) > 2
    assert max(seen) < len(short_day)


def test_zeros_at_the_end_are_cut_after_the_last_frame(short_day: list[Step], tmp_path: Path) -> None:
    """A loss of power can leave them, if the file system had stored the size and not the data."""
    path = segment_path(tmp_path, 1)
    write_segment(path, short_day, per_frame=1)
    data = path.read_bytes()
    path.write_bytes(data + bytes(4096))
    assert count_steps(path) == (len(short_day), "the checksum of a frame is wrong")
    assert cut_tail(path)
    assert path.read_bytes() == data


def test_changed_byte_ends_the_read_before_its_frame(short_day: list[Step], tmp_path: Path) -> None:
    path = segment_path(tmp_path, 1)
    write_segment(path, short_day, per_frame=1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    steps, reason = count_steps(path)
    assert (steps, reason) == (len(short_day) - 1, "the checksum of a frame is wrong")


@pytest.mark.parametrize("data", [b"", b"DRAHREC1", b"PK\x03\x04" * 9, b"DRAHREC1" + b"\xff" * 40])
def test_file_without_a_head_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(ProbeError, match=str(path)):
        SegmentReader(path)


# --- recorder -----------------------------------------------------------------------------------------------

LIMITS = RecordLimits(1 << 30, 86_400)


def record_all(directory: Path, steps: list[Step], limits: RecordLimits = LIMITS, **options: Any) -> None:
    recorder = SnapshotRecorder(directory, limits, HEAD, **options)
    for at, recorded in enumerate(steps):
        recorder.record(*recorded)
        if at % 100 == 99:  # the disk keeps up
            wait_written(recorder)
    assert recorder.close(PATIENCE_S)


def wait_written(recorder: SnapshotRecorder) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while recorder._queue:
        assert time.monotonic() < end_s, "the queue is not written"
        time.sleep(0.01)


def test_recorded_steps_are_replayed(short_day: list[Step], tmp_path: Path) -> None:
    record_all(tmp_path / "record", short_day)
    (path,) = segment_paths(tmp_path / "record")
    assert path.stat().st_mode & 0o777 == 0o600
    replayed = list(Replay().segment(SegmentReader(path)))
    assert [recorded.report for recorded in replayed] == [report for _, _, report, _ in short_day]


def test_second_run_begins_a_segment_and_cuts_the_torn_one(
    short_day: list[Step], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record_all(tmp_path, short_day)
    (path,) = segment_paths(tmp_path)
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(whole[-20:])
    record_all(tmp_path, short_day)
    assert len(segment_paths(tmp_path)) == 2
    assert path.read_bytes() == whole
    assert "not readable from byte" in caplog.text


def test_large_evaluations_are_written_to_a_frame_each(
    short_day: list[Step], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader refuses frames that are too large, also those of evaluations that waited for a slow disk."""
    monkeypatch.setattr("agent.record.segment_file.FRAME_GOAL", 1)
    recorder = SnapshotRecorder(tmp_path, LIMITS, HEAD)
    recorder._queue = [_Queued(*recorded) for recorded in short_day[:-1]]
    recorder.record(*short_day[-1])
    assert recorder.close(PATIENCE_S)
    (path,) = segment_paths(tmp_path)
    assert count_steps(path) == (len(short_day), "")
    with path.open("rb") as file:
        assert len(list(_packed_frames(path, file))) == 1 + len(short_day)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path, victim: path.symlink_to(victim), "is a symbolic link"),
        (lambda path, victim: path.hardlink_to(victim), "has a second name"),
        (lambda path, _: os.mkfifo(path), "is not a regular file"),
    ],
    ids=["symlink", "hard-link", "fifo"],
)
def test_last_segment_that_is_another_file_is_not_cut(
    make: Callable[[Path, Path], None],
    reason: str,
    short_day: list[Step],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    record, victim = tmp_path / "record", tmp_path / "victim"
    record.mkdir()
    victim.write_bytes(MAGIC + b"torn")
    make(segment_path(record, 1), victim)
    record_all(record, short_day)
    assert victim.read_bytes() == MAGIC + b"torn"
    assert count_steps(segment_path(record, 2)) == (len(short_day), "")
    assert f"record {record}: last segment not checked for an incomplete frame: " in caplog.text
    assert reason in caplog.text


def test_old_segments_are_deleted_beyond_the_limit_of_bytes(tmp_path: Path) -> None:
    steps = host_day(1, 30)
    for number in range(12):
        record_all(tmp_path, steps[number * 5 : number * 5 + 5], RecordLimits(60_000, 86_400))
    paths = segment_paths(tmp_path)
    assert 1 < len(paths) < 12
    assert sum(path.stat().st_size for path in paths) <= 60_000
    assert paths[-1].name == "record-00000012.drahrec"


def test_old_segments_are_deleted_beyond_the_limit_of_age(short_day: list[Step], tmp_path: Path) -> None:
    record_all(tmp_path, short_day)
    later_s, mono_s = time.time() + 90_000, [1000.0]
    read_s = mono_s.copy()  # by the recorder, which reads both clocks while the test changes the time

    def read_clock() -> float:
        read_s[0] = mono_s[0]
        return read_s[0]

    clocks = {"clock": read_clock, "wall_clock": lambda: later_s + read_s[0]}
    recorder = SnapshotRecorder(tmp_path, LIMITS, HEAD, **clocks)
    recorder.record(*short_day[0])
    end_s = time.monotonic() + PATIENCE_S
    while len(segment_paths(tmp_path)) < 2:
        assert time.monotonic() < end_s, "no segment"
        time.sleep(0.01)
    mono_s[0] += CLOCK_TRUST_S
    recorder.record(*short_day[1])
    assert recorder.close(PATIENCE_S)
    assert [path.name for path in segment_paths(tmp_path)] == ["record-00000002.drahrec"]


def test_clock_that_is_ahead_at_the_start_deletes_no_segment(short_day: list[Step], tmp_path: Path) -> None:
    record_all(tmp_path, short_day)
    record_all(tmp_path, short_day, wall_clock=lambda: time.time() + 365 * 86_400)
    assert len(segment_paths(tmp_path)) == 2


def test_full_disk_loses_steps_and_the_next_segment_counts_them(
    short_day: list[Step], tmp_path: Path
) -> None:
    write_segment(segment_path(tmp_path, 1), short_day, per_frame=1)
    size = segment_path(tmp_path, 1).stat().st_size
    segment_path(tmp_path, 1).unlink()
    pid = os.fork()
    if pid == 0:  # a limit of file size is a full disk for this process alone
        code = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            times = [0.0]
            recorder = SnapshotRecorder(tmp_path, LIMITS, HEAD, clock=lambda: times[0])
            for _ in range(40):
                for recorded in short_day:
                    recorder.record(*recorded)
                wait_written(recorder)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            times[0] = 1000.0
            recorder.record(*short_day[0])
            code = 0 if recorder.close(PATIENCE_S) else 2
            (tmp_path / "lost").write_text(str(recorder.lost))
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    first, last = segment_paths(tmp_path)
    steps, reason = count_steps(first)
    assert steps > 0
    assert reason == ""
    lost = SegmentReader(last).head.lost
    assert lost > 0
    assert (tmp_path / "lost").read_text() == str(lost)
    last_steps, reason = count_steps(last)  # the last steps of the loop, too, if they were still waiting
    assert reason == ""
    assert steps + lost + last_steps == 40 * len(short_day) + 1


def test_directory_whose_files_others_can_replace_gets_no_record(
    short_day: list[Step], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "record").mkdir()
    (tmp_path / "record").chmod(0o777)
    record_all(tmp_path / "record", short_day)
    assert segment_paths(tmp_path / "record") == []
    why = f"directory {tmp_path}/record has mode 0777: all users may write to it; run chmod o-w on it"
    assert f"record {tmp_path}/record: snapshots not written: {why}" in caplog.text


def test_disk_with_room_for_a_head_only_keeps_no_empty_segment(
    short_day: list[Step], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_writer: SegmentWriter, _steps: list[RecordedStep]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    append = SegmentWriter.append
    monkeypatch.setattr(SegmentWriter, "append", refuse)
    times = [0.0]
    recorder = SnapshotRecorder(tmp_path, LIMITS, HEAD, clock=lambda: times[0])
    for attempt in range(3):
        times[0] = 100.0 * attempt
        recorder.record(*short_day[0])
        wait_for(lambda lost=attempt + 1: recorder._lost == lost and not segment_paths(tmp_path))
        assert recorder.error == f"{tmp_path}: No space left on device"
    state, snapshot, report, use = short_day[0]
    partial = replace(state, gpu_cache=GpuVerdictCache((0,))), snapshot, replace(report, is_full=False), use
    times[0] = 300.0
    recorder.record(*partial)  # cannot begin a segment, so nothing is written
    wait_for(lambda: recorder._lost == 4)
    assert recorder.error == f"{tmp_path}: No space left on device"
    monkeypatch.setattr(SegmentWriter, "append", append)
    times[0] = 1000.0
    recorder.record(*short_day[0])
    assert recorder.close(PATIENCE_S)
    assert recorder.error == ""
    (path,) = segment_paths(tmp_path)
    assert SegmentReader(path).head.lost == 4
    assert count_steps(path) == (1, "")


def wait_for(is_done: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_done():
        assert time.monotonic() < end_s, "nothing happens"
        time.sleep(0.01)


def test_slow_disk_drops_queued_steps_and_the_next_segment_counts_them(
    short_day: list[Step], tmp_path: Path
) -> None:
    recorder = SnapshotRecorder(tmp_path, LIMITS, HEAD)
    recorder.record(*short_day[0])
    wait_written(recorder)
    with recorder._changed:  # the thread waits, as in a call of a hung disk
        for _ in range(1000):
            recorder._queue.append(recorder_item(short_day[1]))
    recorder.record(*short_day[1])
    assert recorder.close(PATIENCE_S)
    paths = segment_paths(tmp_path)
    found = [(count_steps(path)[0], SegmentReader(path).head.lost) for path in paths]
    assert sum(steps + lost for steps, lost in found) == 1002


def is_recorded(directory: Path, steps: int) -> Callable[[], bool]:
    """Return a condition: the segments in a directory have this number of evaluations."""

    def is_done() -> bool:
        try:
            return sum(count_steps(path)[0] for path in segment_paths(directory)) == steps
        except (FileNotFoundError, ProbeError):
            return False

    return is_done


@pytest.mark.parametrize("is_moved", [True, False])
def test_removed_record_continues_in_a_new_segment(
    short_day: list[Step], tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_moved: bool
) -> None:
    directory = tmp_path / "record"
    recorder = SnapshotRecorder(directory, LIMITS, HEAD)
    recorder.record(*short_day[0])
    wait_for(is_recorded(directory, 1))
    if is_moved:
        directory.rename(tmp_path / "moved")
    else:
        shutil.rmtree(directory)
    for recorded in short_day[1:4]:
        recorder.record(*recorded)
    assert recorder.close(PATIENCE_S)
    (path,) = segment_paths(directory)
    assert SegmentReader(path).head.lost == 0
    assert count_steps(path) == (3, "")
    assert f"{path} was removed by another process" in caplog.text
    assert not is_moved or is_recorded(tmp_path / "moved", 1)()


@pytest.mark.parametrize("discarded", [0, 2])
def test_silent_step_after_lost_ones_has_the_verdicts_of_its_report(tmp_path: Path, discarded: int) -> None:
    steps = host_day(1, 30)
    first = steps[1]
    state, snapshot, report, _ = next(
        step
        for step in steps
        if recorded_verdicts(step[2]) != recorded_verdicts(first[2]) and not step[2].starting
    )
    recorder = SnapshotRecorder(tmp_path, LIMITS, HEAD)
    recorder.record(*first)
    wait_for(is_recorded(tmp_path, 1))
    with recorder._changed:  # the thread waits, as in a call of a hung disk
        for _ in range(1000):
            recorder._queue.append(recorder_item((state, snapshot, report, StepOutcome.PUBLISHED)))
        for _ in range(discarded):
            recorder.record(state, snapshot, report, StepOutcome.DISCARDED)
        recorder.record(state, snapshot, report, StepOutcome.SILENT)
    assert recorder.close(PATIENCE_S)
    reader = SegmentReader(segment_paths(tmp_path)[-1])
    *_, recorded = reader.steps()
    assert (reader.head.lost, recorded.use) == (1000, StepOutcome.SILENT)
    assert recorded.verdicts == recorded_verdicts(report)


def recorder_item(recorded: Step) -> Any:
    from agent.record.recorder import _Queued

    return _Queued(*recorded)


def test_next_recorder_waits_until_the_previous_one_has_written(
    short_day: list[Step], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, is_writing, may_write = SegmentWriter.append, threading.Event(), threading.Event()

    def write_in_two_parts(writer: SegmentWriter, steps: list[RecordedStep]) -> None:
        monkeypatch.undo()
        size = os.write(writer._fd, b"the first part of a frame")
        is_writing.set()
        assert may_write.wait(PATIENCE_S)
        os.lseek(writer._fd, -size, os.SEEK_CUR)
        write(writer, steps)

    monkeypatch.setattr(SegmentWriter, "append", write_in_two_parts)
    first = SnapshotRecorder(tmp_path, LIMITS, HEAD)
    first.record(*short_day[0])
    assert is_writing.wait(PATIENCE_S)
    (path,) = segment_paths(tmp_path)
    size = path.stat().st_size
    assert not first.close(0.0)
    unused = SnapshotRecorder(tmp_path, LIMITS, HEAD, previous=first)  # of two reloads in a row
    assert unused.close(0.0)
    second = SnapshotRecorder(tmp_path, LIMITS, HEAD, previous=unused)
    second.record(*short_day[1])
    assert not second.close(0.2)
    assert path.stat().st_size == size
    may_write.set()
    assert second.close(PATIENCE_S)
    assert [count_steps(path) for path in segment_paths(tmp_path)] == [(1, ""), (1, "")]


def test_killed_recorder_leaves_a_readable_record(short_day: list[Step], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            recorder = SnapshotRecorder(tmp_path, LIMITS, HEAD)
            while True:
                for recorded in short_day:
                    recorder.record(*recorded)
                wait_written(recorder)
                os.write(writer, b".")
        finally:
            os._exit(1)  # an error must not go on to the other tests in this copy of the process
    os.close(writer)
    answers = [os.read(reader, 1) for _ in range(3)]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reader)
    assert answers == [b"."] * 3, "the recorder failed"
    (path,) = segment_paths(tmp_path)
    steps, reason = count_steps(path)
    assert steps >= 2 * len(short_day)
    assert reason in ("", "the last frame is incomplete")


def test_step_that_cannot_be_recorded_ends_the_record(
    short_day: list[Step], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, snapshot, report, use = short_day[1]
    recorder = SnapshotRecorder(tmp_path, LIMITS, HEAD)
    recorder.record(*short_day[0])
    wait_written(recorder)
    recorder.record(state, replace(snapshot, pools=(object(),)), report, use)  # type: ignore[arg-type]
    assert recorder._thread is not None
    recorder._thread.join(PATIENCE_S)
    recorder.record(*short_day[2])
    assert recorder._queue == []
    assert recorder.lost == 2  # the one that cannot be recorded, and the next
    assert recorder.close(PATIENCE_S)
    assert "recording ends" in caplog.text
    assert count_steps(segment_path(tmp_path, 1)) == (1, "")


def test_changed_settings_begin_a_segment(tmp_path: Path) -> None:
    first, second = host_day(1, 2), gpu_day(1, 2)
    record_all(tmp_path, [*first, *second])
    assert len(segment_paths(tmp_path)) == 2


# --- size ---------------------------------------------------------------------------------------------------


def test_record_of_a_quiet_hour_keeps_the_limit_of_a_day(tmp_path: Path) -> None:
    hour, *_ = write_quiet_day(tmp_path, 3600)
    quarter, *_ = write_quiet_day(tmp_path / "other", 900)
    head = quarter - (hour - quarter) // 3  # once in six hours
    assert head > 0
    assert 24 * (hour - head) + 4 * head < 5 << 20
