"""Recorder of changed verdicts: on real files, over restarts, and on disks that refuse writes."""

import logging
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from claim_samples import at, listed_prepared, use
from patience import PATIENCE_S
from small_disk import run_on_small_disk
from usage_samples import checkpoint_map
from wire.serving import eventually

from agent.health.availability_statistics import ObservedTimeAxis, listed_changes, summarize, verdict_spans
from agent.health.state_machine import HEALTH_OF_SEVERITY
from agent.health.verdict import VerdictChangeLog
from agent.model.health import Blame, Cause, DeviceHealth, Severity
from agent.model.history import ClockReading, RecordedState, StoredVerdicts
from agent.model.report import Report
from agent.model.settings import HISTORY_FILE, UsageHistoryLimits
from agent.model.time import NS, Instant
from agent.node import verdict_recorder
from agent.node.pods.usage_recorder import UsageRecorder
from agent.node.verdict_recorder import VerdictRecorder
from agent.store.history_file import HistoryError, HistoryFile, period_file_path, read_history, read_verdicts

HERE = Path(__file__).parent
OK, BAD, LOST, HOT, UNKNOWN = "", "gpu.xid.79", "gpu.lost", "gpu.heat", "source.stalled"
SEVERITIES = {
    BAD: Severity.UNHEALTHY,
    LOST: Severity.UNHEALTHY,
    HOT: Severity.DEGRADED,
    UNKNOWN: Severity.UNKNOWN,
}
HEARTBEAT_S = 10.0


def device(name: str, code: str = OK, evidence: str = "1 time") -> DeviceHealth:
    """Return a device with one cause, or with none."""
    severity = SEVERITIES.get(code, Severity.OK)
    causes = (Cause(code, severity, Blame.HARDWARE, evidence, "", at(1)),) if code else ()
    health = HEALTH_OF_SEVERITY[severity]
    return DeviceHealth("node-1", name, "gpu", health, severity, "", at(1), at(2), 30, causes=causes)


class Agent:
    """One run of an agent, whose clocks the test moves."""

    def __init__(
        self,
        state: Path,
        *,
        limits: UsageHistoryLimits | None = None,
        second: int = 1000,
        boot: str = "boot-1",
        wait_s: float = PATIENCE_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        limits = limits or UsageHistoryLimits()
        self.path = state / HISTORY_FILE
        self.boot_s = float(second)
        self.wall_step_s = 0.0
        self.boot = boot
        self.recorder = VerdictRecorder(
            HistoryFile(self.path, limits, wait_s=wait_s),
            limits=limits,
            boot_id=boot,
            heartbeat_s=heartbeat_s,
            boot_clock=lambda: self.boot_s,
        )

    def report(self, *devices: DeviceHealth, after_s: float = 10, starting: bool = False) -> None:
        """Publish a report, a heartbeat after the last one."""
        self.boot_s += after_s
        now = at(0)
        instant = Instant(int(self.boot_s * NS), now.wall_s + self.boot_s + self.wall_step_s)
        self.recorder.handle_report(Report("node-1", instant, devices, starting=starting))

    def follow(self, *codes: str, after_s: float = 10) -> None:
        """Publish a report for each code of the device's cause."""
        for code in codes:
            self.report(device("gpu-3", code), after_s=after_s)

    def stop(self) -> None:
        assert self.recorder.close(PATIENCE_S)

    @property
    def clocks(self) -> ClockReading:
        return ClockReading(at(0).wall_s + self.boot_s + self.wall_step_s, self.boot_s, self.boot)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def agent(state: Path) -> Iterator[Agent]:
    agent = Agent(state)
    yield agent
    agent.stop()


def read_stored(path: Path) -> StoredVerdicts:
    """Return the content of the file, on which a commit may take long."""
    return read_verdicts(path, wait_s=PATIENCE_S)


def stored_states(agent: Agent) -> list[tuple[str, str | None, str]]:
    """Return device, state before and state after of each stored change."""
    return [
        (change.device.device, change.before, change.verdict.state)
        for change in read_stored(agent.path).changes
    ]


def listed_states(agent: Agent) -> list[tuple[str, float]]:
    """Return the listed changes, the oldest first: state and duration."""
    stored = read_stored(agent.path)
    timeline = ObservedTimeAxis(stored.periods, agent.clocks)
    found = listed_changes(verdict_spans(stored, timeline))
    return [(span.verdict.state, pytest.approx(span.end_s - span.begin_s)) for span in reversed(found)]


# --- changes -----------------------------------------------------------------------------------------------


def test_changes_are_recorded_with_causes_and_durations(agent: Agent) -> None:
    agent.follow(OK, OK, BAD, BAD, OK)
    agent.stop()
    assert stored_states(agent) == [
        ("gpu-3", None, "healthy"),
        ("gpu-3", "healthy", "unhealthy"),
        ("gpu-3", "unhealthy", "healthy"),
    ]
    assert listed_states(agent) == [("unhealthy", 20), ("healthy", 0)]
    (cause,) = read_stored(agent.path).changes[1].verdict.causes
    assert cause == (BAD, Severity.UNHEALTHY, "1 time")


def test_new_evidence_is_no_change_and_another_code_is(agent: Agent) -> None:
    agent.report(device("gpu-3", BAD))
    agent.report(device("gpu-3", BAD, "2 times"))
    agent.report(device("gpu-3", LOST))
    agent.stop()
    assert [change.verdict.causes[0].code for change in read_stored(agent.path).changes] == [BAD, LOST]


def test_incomplete_report_is_not_recorded(agent: Agent) -> None:
    agent.report(starting=True)
    agent.stop()
    assert not agent.path.exists()


def test_device_that_vanishes_is_absent_until_it_returns(agent: Agent) -> None:
    agent.follow(OK)
    agent.report()
    agent.follow(OK)
    agent.stop()
    assert stored_states(agent)[1:] == [("gpu-3", "healthy", "absent"), ("gpu-3", "absent", "healthy")]


def test_change_is_in_the_file_while_the_agent_runs(agent: Agent) -> None:
    agent.follow(OK, BAD)
    eventually(lambda: agent.path.exists() and len(stored_states(agent)) == 2, "the change is written")


# --- restarts ----------------------------------------------------------------------------------------------


def test_restart_without_a_change_adds_no_row(agent: Agent, state: Path) -> None:
    agent.follow(OK, BAD)
    agent.stop()
    following = Agent(state, second=2000)
    following.follow(BAD, BAD)
    following.stop()
    assert len(stored_states(agent)) == 2
    assert len(read_stored(agent.path).periods) == 2


def test_change_while_the_agent_was_away_is_found_at_start(agent: Agent, state: Path) -> None:
    agent.report(device("gpu-3"), device("gpu-4"))
    agent.stop()
    following = Agent(state, second=2000)
    following.follow(BAD)
    following.stop()
    changes = read_stored(agent.path).changes[-2:]
    assert [
        (change.device.device, change.before, change.verdict.state, change.offset_s) for change in changes
    ] == [
        ("gpu-4", RecordedState.HEALTHY, RecordedState.ABSENT, 0.0),
        ("gpu-3", RecordedState.HEALTHY, RecordedState.UNHEALTHY, 0.0),
    ]


def test_device_that_was_absent_returns_with_a_change_in_the_next_run(agent: Agent, state: Path) -> None:
    agent.report(device("gpu-3"), device("gpu-4"))
    agent.report()
    agent.stop()
    following = Agent(state, second=2000)
    following.follow(BAD, OK)
    following.stop()
    assert stored_states(agent)[2:] == [
        ("gpu-3", "healthy", "absent"),
        ("gpu-4", "healthy", "absent"),
        ("gpu-3", "absent", "unhealthy"),
        ("gpu-3", "unhealthy", "healthy"),
    ]
    stored = read_stored(agent.path)
    timeline = ObservedTimeAxis(stored.periods, following.clocks)
    gpu = next(
        of
        for of in summarize(verdict_spans(stored, timeline), timeline).devices
        if of.device.device == "gpu-3"
    )
    assert gpu.faults == 1


def test_time_between_two_runs_is_not_observed(agent: Agent, state: Path) -> None:
    agent.follow(OK, OK)
    agent.stop()
    following = Agent(state, second=2000)
    following.follow(OK, OK)
    following.stop()
    stored = read_stored(agent.path)
    timeline = ObservedTimeAxis(stored.periods, following.clocks)
    (span,) = summarize(verdict_spans(stored, timeline), timeline).devices
    assert span.observed_s[RecordedState.HEALTHY] == pytest.approx(20)
    assert span.not_observed_s == pytest.approx(2010 - 1020)


LIFE = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from threading import Event
from typing import Any
from test_verdict_recorder import Agent, BAD, OK
agent = Agent(Path(sys.argv[1]))
for number in range(10_000):
    agent.follow(OK if number % 2 else BAD)
    print(number, flush=True)
    sys.stdin.readline()
"""


@contextmanager
def life(state: Path) -> Iterator["subprocess.Popen[str]"]:
    """Run a process whose device changes with each line of its input."""
    command = [sys.executable, "-c", LIFE, str(state)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=HERE.parent) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("changes", [1, 2, 5])
def test_killed_agent_loses_no_written_change_and_doubles_none(state: Path, changes: int) -> None:
    with life(state) as process:
        assert process.stdin
        assert process.stdout
        for number in range(changes):
            assert process.stdout.readline() == f"{number}\n"
            path = state / HISTORY_FILE
            eventually(
                lambda: path.exists() and len(read_stored(path).changes) == number + 1,  # noqa: B023
                "the change is written",
            )
            process.stdin.write("\n")
            process.stdin.flush()
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = read_stored(state / HISTORY_FILE)
    following = Agent(state, second=100_000)
    following.follow(OK)
    following.stop()
    after = read_stored(state / HISTORY_FILE)
    assert after.changes[: len(before.changes)] == before.changes
    keys = [(change.period, change.number) for change in after.changes]
    assert len(set(keys)) == len(keys)
    assert after.periods[:-1] == before.periods
    begins = [span.begin_s for span in spans_of(after, following)]
    assert begins == sorted(begins)


def spans_of(stored: StoredVerdicts, agent: Agent) -> list:
    timeline = ObservedTimeAxis(stored.periods, agent.clocks)
    return [span for known in verdict_spans(stored, timeline).values() for span in known]


def test_killed_quiet_agent_was_observed_until_its_last_report(state: Path) -> None:
    agent = Agent(state, heartbeat_s=0.1)
    agent.follow(OK)
    eventually(lambda: agent.path.exists() and bool(stored_states(agent)), "the first report is written")
    for _ in range(5):
        agent.follow(OK, after_s=0.1)
    lasted_s = pytest.approx(0.5)
    eventually(lambda: read_stored(agent.path).periods[-1].lasted_s == lasted_s, "the mark is written")
    following = Agent(state, second=5000)
    following.follow(OK)
    following.stop()
    period_file_path(agent.path).unlink()
    assert [period.lasted_s for period in read_stored(agent.path).periods] == [lasted_s, 0]
    agent.recorder.close(PATIENCE_S)


# --- clocks ------------------------------------------------------------------------------------------------


def test_silence_of_the_agent_is_not_observed(agent: Agent) -> None:
    """A stopped process, a frozen cgroup, or a machine that slept."""
    agent.follow(OK)
    agent.report(device("gpu-3", BAD), after_s=3600)
    agent.stop()
    stored = read_stored(agent.path)
    assert len(stored.periods) == 2
    assert ObservedTimeAxis(stored.periods, agent.clocks).unobserved_s(0, agent.clocks.wall_s) > 3600
    assert stored.changes[-1].before is RecordedState.HEALTHY
    assert stored.changes[-1].offset_s == 0


def test_longer_heartbeat_after_a_reload_is_observed_time(agent: Agent) -> None:
    agent.follow(OK)
    agent.recorder.reconfigure(6 * HEARTBEAT_S)
    agent.follow(OK, OK, BAD, after_s=6 * HEARTBEAT_S)
    agent.stop()
    assert [period.lasted_s for period in read_stored(agent.path).periods] == [18 * HEARTBEAT_S]


def test_report_after_a_reload_is_marked_at_once(state: Path) -> None:
    """The thread still waits for a heartbeat of the former length."""
    agent = Agent(state, heartbeat_s=3600)
    agent.follow(OK)
    eventually(lambda: agent.path.exists() and bool(stored_states(agent)), "the first report is written")
    agent.recorder.reconfigure(HEARTBEAT_S)
    agent.follow(OK, after_s=HEARTBEAT_S)
    lasted_s = pytest.approx(HEARTBEAT_S)
    eventually(lambda: read_stored(agent.path).periods[-1].lasted_s == lasted_s, "the mark is written")
    agent.stop()


def test_shorter_heartbeat_after_a_reload_counts_from_the_next_report(agent: Agent) -> None:
    """The report after the reload may still come at the former interval."""
    agent.follow(OK)
    agent.recorder.reconfigure(1)
    agent.follow(OK, after_s=HEARTBEAT_S)
    agent.follow(OK, after_s=1)
    agent.follow(OK, after_s=HEARTBEAT_S)
    agent.stop()
    assert [period.lasted_s for period in read_stored(agent.path).periods] == [HEARTBEAT_S + 1, 0]


def test_period_that_ends_during_a_write_keeps_its_end(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    file = agent.recorder._file
    write, is_writing, may_write = file.write_verdicts, Event(), Event()

    def write_when_allowed(*args: Any, **options: Any) -> None:
        is_writing.set()
        assert may_write.wait(PATIENCE_S)
        write(*args, **options)

    monkeypatch.setattr(file, "write_verdicts", write_when_allowed)
    agent.follow(OK)
    assert is_writing.wait(PATIENCE_S)
    agent.follow(OK, after_s=HEARTBEAT_S)
    agent.follow(OK, after_s=10 * HEARTBEAT_S)
    may_write.set()
    agent.stop()
    assert [period.lasted_s for period in read_stored(agent.path).periods] == [HEARTBEAT_S, 0]


@pytest.mark.parametrize("step_s", [-86_400.0, 86_400.0])
def test_wall_clock_that_is_set_changes_no_duration(agent: Agent, step_s: float) -> None:
    agent.follow(OK, BAD)
    agent.wall_step_s = step_s
    agent.follow(BAD, OK, OK)
    agent.stop()
    assert listed_states(agent) == [("unhealthy", 20), ("healthy", 10)]


# --- disks -------------------------------------------------------------------------------------------------


def test_unusable_directory_is_logged_once_and_changes_are_kept(
    agent: Agent, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state.write_text("in the way")
    agent.follow(OK, BAD)
    eventually(lambda: bool(caplog.records), "the failed write is logged")
    eventually(lambda: f"{state} is not a directory" in agent.recorder.error, "the error is shown")
    agent.follow(OK, BAD, OK)
    state.unlink()
    agent.follow(OK, OK)
    agent.stop()
    assert agent.recorder.error == ""
    assert [state for _, _, state in stored_states(agent)] == ["healthy", "unhealthy"] * 2 + ["healthy"]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"{agent.path}: {state} is not a directory; they are kept in memory" in caplog.text


def test_changes_beyond_the_limit_are_counted_and_not_observed(
    state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(state, limits=UsageHistoryLimits(rows=3))
    state.write_text("in the way")
    agent.follow(OK, BAD, OK, BAD, OK, BAD, after_s=1)
    eventually(lambda: bool(caplog.records), "the failed write is logged")
    state.unlink()
    agent.follow(BAD, after_s=12)
    eventually(lambda: "were lost" in caplog.text, "the loss is logged")
    agent.follow(HOT, OK)
    agent.stop()
    assert "3 changes of verdicts were lost while the file could not be written: limit of 3" in caplog.text
    stored = read_stored(agent.path)
    assert [change.verdict.state for change in stored.changes][-2:] == ["degraded", "healthy"]
    timeline = ObservedTimeAxis(stored.periods, agent.clocks)
    (span,) = summarize(verdict_spans(stored, timeline), timeline).devices
    assert span.not_observed_s >= 15
    assert span.observed_s[RecordedState.UNHEALTHY] <= 11


def remove_written_file(agent: Agent) -> None:
    """Remove the file once it has the verdicts of two devices."""
    agent.report(device("gpu-3", BAD), device("gpu-4"))
    eventually(lambda: agent.path.exists() and len(stored_states(agent)) == 2, "the report is written")
    agent.path.unlink()


def assert_all_verdicts_are_written_again(agent: Agent) -> None:
    """Report a change of the second device, and stop the agent."""
    agent.report(device("gpu-3", BAD), device("gpu-4", HOT))
    agent.stop()
    assert stored_states(agent) == [
        ("gpu-3", None, "unhealthy"),
        ("gpu-4", None, "healthy"),
        ("gpu-4", "healthy", "degraded"),
    ]


def test_removed_file_is_created_again_with_all_verdicts(agent: Agent) -> None:
    remove_written_file(agent)
    assert_all_verdicts_are_written_again(agent)


def test_file_created_again_by_the_uses_gets_all_verdicts(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file has the inode of the removed one."""
    file = agent.recorder._file
    file_id = file._file_id
    monkeypatch.setattr(file, "_file_id", lambda: file_id() and (1, 1))
    remove_written_file(agent)
    limits = UsageHistoryLimits()
    report = Report("node-1", at(2000), (), starting=False)
    claim = listed_prepared("c-1", use("gpu-3", "gpus"), pods=["p-1"])
    UsageRecorder(file, limits=limits).record(checkpoint_map(claim), report, at(2000))
    assert agent.path.exists()
    assert_all_verdicts_are_written_again(agent)
    assert len(read_history(agent.path).running) == 1


def test_damaged_file_is_renamed_and_verdicts_are_kept(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    agent.follow(OK)
    eventually(lambda: agent.path.exists() and bool(stored_states(agent)), "the report is written")
    agent.path.write_bytes(b"no database at all, " * 500)
    agent.follow(BAD)
    eventually(lambda: "corrupt-1" in caplog.text, "the damage is logged")
    agent.follow(BAD, BAD)
    agent.stop()
    assert stored_states(agent) == [("gpu-3", None, "healthy"), ("gpu-3", "healthy", "unhealthy")]


def test_hung_disk_delays_no_report_and_no_stop(state: Path) -> None:
    agent = Agent(state, wait_s=3600)
    agent.follow(OK)
    eventually(lambda: agent.path.exists() and bool(stored_states(agent)), "the report is written")
    with closing(sqlite3.connect(agent.path, timeout=PATIENCE_S, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        agent.follow(*[BAD, OK] * 50)
        assert not agent.recorder.close(0.05)
        db.execute("ROLLBACK")
    assert agent.recorder.close(PATIENCE_S)
    assert len(stored_states(agent)) == 101


def test_full_disk_loses_no_change_within_the_limit(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from threading import Event
from typing import Any
from test_verdict_recorder import Agent, BAD, OK, stored_states
from wire.serving import eventually
agent = Agent(Path({str(tmp_path)!r}))
agent.follow(OK)
eventually(lambda: agent.path.exists() and bool(stored_states(agent)), "written")
ballast = Path({str(tmp_path)!r}, "ballast")
with open(ballast, "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
agent.follow(*[BAD, OK] * 20)
eventually(lambda: bool(agent.recorder.error), "refused")
ballast.unlink()
agent.follow(OK, OK)
agent.stop()
print(len(stored_states(agent)))
"""
    assert run_on_small_disk(program, tmp_path) == ["41"]


def run_in_this_thread(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that publishes a report, 4 s after the last one, and does the work of the thread."""
    monkeypatch.setattr(verdict_recorder, "PAUSE_S", 0.0)
    monkeypatch.setattr(agent.recorder, "_start_thread", lambda: None)

    def report(code: str) -> None:
        agent.follow(code, after_s=4)
        agent.recorder._handle(agent.recorder._next_job(), is_last=False)

    return report


def test_time_after_a_refused_change_is_not_observed(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark can be written on a full disk. The agent is killed, and the next one finds the device well."""
    agent = Agent(state)
    report = run_in_this_thread(agent, monkeypatch)
    report(OK)
    report(OK)
    with monkeypatch.context() as disk:
        disk.setattr(agent.recorder._file, "write_verdicts", refuse)
        for _ in range(6):
            report(BAD)
    following = Agent(state, second=2000)
    following.follow(OK)
    following.stop()
    assert [period.lasted_s for period in read_stored(agent.path).periods] == [4, 0]
    assert stored_states(agent) == [("gpu-3", None, "healthy")]


def test_mark_of_the_last_run_outlives_a_failed_first_read(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(state)
    report = run_in_this_thread(agent, monkeypatch)
    for _ in range(3):
        report(OK)
    following = Agent(state, second=2000)
    report = run_in_this_thread(following, monkeypatch)
    with monkeypatch.context() as disk:
        disk.setattr(following.recorder._file, "verdicts_if_replaced", refuse)
        report(OK)
        report(OK)
    following.boot_s += 4
    report(OK)
    assert [period.lasted_s for period in read_stored(agent.path).periods] == [8, 12]


def refuse(*_: Any, **__: Any) -> None:
    raise HistoryError(Path("history"), "database or disk is full (SQLITE_FULL)")


def test_refused_change_leaves_the_stored_period_as_it_is(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(state)
    report = run_in_this_thread(agent, monkeypatch)
    report(OK)
    monkeypatch.setattr(agent.recorder._file, "_make_room", refuse)
    report(BAD)
    assert agent.recorder.error
    assert [period.lasted_s for period in read_stored(agent.path).periods] == [0]


def test_device_of_an_earlier_run_is_present_again_after_a_silence() -> None:
    """The file is read late: the run has two periods, and the report of the first one lacks the device."""
    earlier, log = (VerdictChangeLog(run, "", 30.0, rows=100) for run in ("run1", "run2"))
    earlier.handle_report(Report("node-1", at(0), (device("gpu-0"),)), 0.0)
    log.handle_report(Report("node-1", at(100)), 100.0)
    log.handle_report(Report("node-1", at(200), (device("gpu-0"),)), 200.0)
    stored = {change.device: change for change in earlier.pending}
    assert [(change.before, change.verdict.state) for change in log.changes_after(stored)] == [
        (RecordedState.HEALTHY, RecordedState.ABSENT),
        (RecordedState.ABSENT, RecordedState.HEALTHY),
    ]
