"""Recorder of device uses: on real files, and on disks that refuse writes."""

import logging
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from claim_samples import at, known_pod, listed_prepared, use
from patience import PATIENCE_S
from small_disk import run_on_small_disk
from usage_samples import UNREADABLE, checkpoint_map

from agent.errors import DrahealthError
from agent.model.consumers import ConsumerMap
from agent.model.device_usage import UsageEnd, UsageEndKind
from agent.model.health import DeviceHealth, Health, Severity
from agent.model.report import Report
from agent.model.settings import HISTORY_FILE, UsageHistoryLimits
from agent.model.time import NS, Instant
from agent.node.pods.usage_recorder import UsageRecorder
from agent.store.history_file import HistoryContent, HistoryFile, read_history

HERE = Path(__file__).parent
NO_PODS = checkpoint_map()


def train(*numbers: int) -> ConsumerMap:
    """Return a map with one claim and one device for each of these pods."""
    return checkpoint_map(
        *(
            listed_prepared(f"c-{n}", use(f"gpu-{n}", "gpus"), pods=[f"p-{n}"], name=f"gpus-{n}")
            for n in numbers
        )
    )


def report_of(*sick: str, starting: bool = False) -> Report:
    devices = (
        DeviceHealth(
            "node-1",
            f"gpu-{n}",
            "gpu",
            Health.UNHEALTHY if f"gpu-{n}" in sick else Health.HEALTHY,
            Severity.UNHEALTHY if f"gpu-{n}" in sick else Severity.OK,
            "it is lost" if f"gpu-{n}" in sick else "",
            at(1),
            at(2),
            30,
            driver="gpu.example.com",
        )
        for n in range(4)
    )
    return Report("node-1", at(1), tuple(devices), starting=starting)


class Agent:
    """Recorder side of one agent run."""

    def __init__(self, state: Path, limits: UsageHistoryLimits | None = None, first: int = 1000) -> None:
        limits = limits or UsageHistoryLimits()
        self.path = state / HISTORY_FILE
        self.recorder = UsageRecorder(HistoryFile(self.path, limits, wait_s=PATIENCE_S), limits=limits)
        self.second = first

    def take(self, map_: ConsumerMap, *sick: str, after_s: int = 20, now: Instant | None = None) -> None:
        self.second += after_s
        self.recorder.record(map_, report_of(*sick), now or at(self.second))

    @property
    def record(self) -> HistoryContent:
        return read_history(self.path)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def agent(state: Path) -> Agent:
    return Agent(state)


def test_ended_use_is_recorded_with_pod_device_and_state(agent: Agent) -> None:
    agent.take(NO_PODS)
    agent.take(train(1, 2))
    assert [usage.pod.uid for usage in agent.record.running] == ["p-2", "p-1"]
    agent.take(train(1, 2), "gpu-1")
    agent.take(train(2))
    (ended,) = agent.record.ended
    assert ended.pod.uid == "p-1"
    assert (ended.state.health, ended.worst.evidence) == (Health.HEALTHY, "it is lost")
    (running,) = agent.record.running
    assert running.pod.uid == "p-2"


def test_unchanged_uses_cause_one_write_in_five_minutes(agent: Agent) -> None:
    agent.take(train(1))
    os.utime(agent.path, (0, 0))  # the kernel's time of a file moves on in steps of milliseconds
    written = agent.path.stat().st_mtime_ns
    for _ in range(10):
        agent.take(train(1))
    assert agent.path.stat().st_mtime_ns == written
    agent.take(train(1), after_s=200)
    assert agent.path.stat().st_mtime_ns > written
    assert agent.record.last_write_s == at(agent.second).wall_s


def test_empty_map_of_unreadable_sources_ends_no_use(agent: Agent) -> None:
    agent.recorder.record(train(1), report_of(starting=True), at(1))
    assert not agent.path.exists()


def test_zero_rows_disable_the_record(state: Path) -> None:
    agent = Agent(state, UsageHistoryLimits(rows=0))
    agent.take(train(1))
    assert agent.recorder.close(PATIENCE_S)
    assert not state.exists()


def test_node_without_device_use_creates_no_file(agent: Agent) -> None:
    agent.take(NO_PODS)
    assert agent.recorder.close(PATIENCE_S)
    assert not agent.path.exists()


# --- agent restarts ----------------------------------------------------------------------------


def test_restarted_agent_continues_open_uses(agent: Agent, state: Path) -> None:
    agent.take(train(1, 2))
    agent.take(train(1, 2))
    assert agent.recorder.close(PATIENCE_S)
    left = agent.record
    assert left.last_write_s == at(agent.second).wall_s
    following = Agent(state, first=5000)
    following.take(train(1))
    (ended,) = following.record.ended
    assert ended.ended
    assert (ended.pod.uid, ended.ended.ending) == ("p-2", UsageEndKind.AWAY)
    assert ended.ended.seen_s == left.last_write_s
    (running,) = following.record.running
    assert running.id in {usage.id for usage in left.running}


def test_failed_pod_is_recorded_once_over_agent_restarts(agent: Agent, state: Path) -> None:
    claim = listed_prepared("c-1", use("gpu-1"), pods=["p-1"], name="gpus")
    failed = checkpoint_map(claim, pods=[known_pod("p-1", "gpus", phase="Failed")])
    agent.take(failed)
    for life in range(3):
        Agent(state, first=5000 + life).take(failed)
    Agent(state, first=6000).take(checkpoint_map(claim))
    assert len(agent.record.ended) == 1
    assert agent.record.running == ()


def test_unreadable_kubelet_at_start_ends_no_use(agent: Agent, state: Path) -> None:
    agent.take(train(1))
    following = Agent(state, first=5000)
    following.take(UNREADABLE)
    assert len(following.record.running) == 1
    following.take(train(1))
    assert following.record.ended == ()


@pytest.fixture
def unread(agent: Agent, state: Path) -> Agent:
    """A following run of the agent, of which the first read of the file failed; pods 1 and 2 use devices."""
    agent.take(train(1, 2))
    following = Agent(state, first=5000)
    state.chmod(0o777)
    following.take(train(1, 2))
    assert "has mode 0777" in following.recorder.error
    state.chmod(0o700)
    return following


def test_uses_continue_under_their_ids_after_a_failed_first_read(unread: Agent) -> None:
    before = unread.record
    unread.take(train(1, 2, 3))
    assert [usage.pod.uid for usage in unread.record.running] == ["p-3", "p-2", "p-1"]
    assert unread.record.running[1:] == before.running
    unread.take(train(3))
    assert {usage.id for usage in unread.record.ended} == {usage.id for usage in before.running}


def test_nothing_is_written_before_a_read_that_fails_once(
    agent: Agent, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.take(train(1))
    before = agent.record
    following = Agent(state, first=5000)

    def fail(_: HistoryFile) -> None:
        raise DrahealthError("too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(HistoryFile, "content_if_replaced", fail)
        following.take(train(1))
        assert following.recorder.error == "too many open files"
        assert following.record == before
    assert following.recorder.close(PATIENCE_S)  # reads, then writes
    assert [usage.id for usage in following.record.running] == [before.running[0].id]
    assert following.record.last_write_s > before.last_write_s


def test_use_that_ends_before_the_first_read_is_recorded_once(unread: Agent, state: Path) -> None:
    (_, first) = unread.record.running
    state.chmod(0o777)
    unread.take(train(2))
    state.chmod(0o700)
    unread.take(train(2))
    assert [usage.pod.uid for usage in unread.record.running] == ["p-2"]
    (ended,) = unread.record.ended
    assert (ended.id, ended.began.wall_s, ended.ended) == (
        first.id,
        first.began.wall_s,
        UsageEnd(UsageEndKind.RELEASED, at(5020).wall_s, at(5040).wall_s, 5040 - 1020),
    )


def test_second_row_of_a_running_use_is_deleted_by_the_next_run(agent: Agent, state: Path) -> None:
    agent.take(train(1))
    (first,) = agent.record.running
    second = replace(first, id="other-1")
    agent.recorder._file.write_uses((second,), (), at(agent.second).wall_s, delete_by_age=False)
    assert len(agent.record.running) == 2
    following = Agent(state, first=5000)
    following.take(train(1))
    assert following.record.running == (first,)


LIFE = f"""
import sys, time
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from test_usage_recorder import Agent, train
agent = Agent(Path(sys.argv[1]))
agent.take(train(*range(30)))
print("ready", flush=True)
number = 30
while True:
    begun_s = time.monotonic()
    agent.take(train(*range(number - 29, number + 1)))
    number += 1
    time.sleep(0.01 + time.monotonic() - begun_s)  # readers have half of the time, however slow the disk is
"""


@pytest.mark.parametrize("ended", [1, 4, 9])
def test_killed_agent_loses_no_written_use(state: Path, ended: int) -> None:
    """Each step ends one use and begins another, so a kill at any time leaves the same number of uses."""
    with subprocess.Popen([sys.executable, "-c", LIFE, str(state)], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        try:
            while len(read_history(state / HISTORY_FILE, wait_s=PATIENCE_S).ended) < ended:
                pass
        finally:
            process.send_signal(signal.SIGKILL)
    before = read_history(state / HISTORY_FILE)
    assert len(before.running) == 30
    following = Agent(state, first=100_000)
    following.take(NO_PODS)
    after = following.record
    assert after.running == ()
    assert {usage.id for usage in after.ended} == {usage.id for usage in (*before.ended, *before.running)}


# --- disks -------------------------------------------------------------------------------------------------


def test_unusable_directory_is_logged_once_and_uses_are_queued(
    agent: Agent, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state.write_text("in the way")
    agent.take(train(1, 2))
    for _ in range(5):
        agent.take(train(2))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(agent.path) in caplog.text
    assert str(agent.path) in agent.recorder.error
    state.unlink()
    agent.take(train(2))
    assert agent.recorder.error == ""
    assert [usage.pod.uid for usage in agent.record.ended] == ["p-1"]
    assert [usage.pod.uid for usage in agent.record.running] == ["p-2"]


def test_failed_write_of_a_running_use_stays_an_error_and_is_logged_once(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent.take(train(1))

    def fail(*_: object, **__: object) -> None:
        raise DrahealthError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(HistoryFile, "write_uses", fail)
        agent.take(train(1), after_s=300)
        for _ in range(3):  # also before the next attempt
            assert agent.recorder.error == "the disk is full"
            agent.take(train(1), after_s=5)
    assert len(caplog.records) == 1
    agent.take(train(1))
    assert agent.recorder.error == ""


def test_error_of_a_file_that_cannot_be_read_ends_without_a_write(agent: Agent, state: Path) -> None:
    agent.take(train(1))
    with closing(sqlite3.connect(agent.path)) as db:
        db.execute("PRAGMA user_version = 2")
    following = Agent(state, first=5000)
    following.take(NO_PODS)
    assert "file has format version 2" in following.recorder.error
    agent.path.unlink()
    following.take(NO_PODS)
    assert following.recorder.error == ""


def test_uses_beyond_memory_limit_are_dropped_and_counted(
    state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(state, UsageHistoryLimits(rows=3))
    state.write_text("in the way")
    for number in range(6):
        agent.take(train(number))
    agent.take(NO_PODS)
    state.unlink()
    agent.take(NO_PODS)
    assert [usage.pod.uid for usage in agent.record.ended] == ["p-5", "p-4", "p-3"]
    assert "3 ended uses of devices were lost while the file could not be written" in caplog.text


def test_removed_file_is_created_again_with_all_current_uses(agent: Agent) -> None:
    agent.take(train(1, 2))
    agent.path.unlink()
    agent.take(train(1, 2))
    assert len(agent.record.running) == 2


def test_damaged_file_is_set_aside_and_current_uses_are_kept(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    agent.take(train(1, 2))
    agent.path.write_bytes(b"no database at all, " * 500)
    agent.take(train(1, 2, 3))
    agent.take(train(1, 2, 3))
    assert f"{agent.path}: history file cannot be parsed" in caplog.text
    assert f"{agent.path}.corrupt-1" in caplog.text
    assert len(agent.record.running) == 3


def test_file_of_later_version_is_logged_once_and_not_written(
    agent: Agent, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent.take(train(1))
    with closing(sqlite3.connect(agent.path)) as db:
        db.execute("PRAGMA user_version = 2")
    before = agent.path.read_bytes()
    following = Agent(state, first=5000)
    for number in range(3):
        following.take(train(number))
    assert following.recorder.close(PATIENCE_S)
    assert agent.path.read_bytes() == before
    assert len(caplog.records) == 1
    assert "file has format version 2, this agent reads up to 1" in caplog.text


def test_full_disk_loses_no_use_within_memory_limit(tmp_path: Path) -> None:
    program = f"""
import sys, os
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from test_usage_recorder import Agent, NO_PODS, train
agent = Agent(Path({str(tmp_path)!r}))
agent.take(train(1, 2, 3))
ballast = Path({str(tmp_path)!r}, "ballast")
with open(ballast, "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
for number in range(10, 60):
    agent.take(train(1, 2, number))
ballast.unlink()
agent.take(train(1, 2))
print(len(agent.record.running), len(agent.record.ended))
"""
    assert run_on_small_disk(program, tmp_path) == ["2 51"]


def test_stop_does_not_wait_for_hung_disk(agent: Agent) -> None:
    agent.take(train(1))
    with closing(sqlite3.connect(agent.path, timeout=PATIENCE_S, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        assert not agent.recorder.close(0.05)
        db.execute("ROLLBACK")
    assert agent.recorder.close(PATIENCE_S)


# --- clocks ------------------------------------------------------------------------------------------------


def ends_at(agent: Agent, wall_s: float, numbers: Iterator[int]) -> None:
    """Record a use that begins and ends at a time of the wall clock."""
    number = next(numbers)
    for map_ in (train(number), NO_PODS):
        agent.second += 60
        agent.take(map_, now=Instant(agent.second * NS, wall_s + agent.second))


def test_clock_step_delays_deletion_by_age_for_an_hour(state: Path) -> None:
    agent = Agent(state, UsageHistoryLimits(age_s=86_400))
    numbers = iter(range(1000))
    for _ in range(3):
        ends_at(agent, 1_700_000_000.0, numbers)
    decade_s = 1_700_000_000.0 + 3650 * 86_400
    ends_at(agent, decade_s, numbers)
    assert len(agent.record.ended) == 4
    agent.second += 3600
    ends_at(agent, decade_s, numbers)
    assert [usage.device.device for usage in agent.record.ended] == ["gpu-4", "gpu-3"]


def test_end_of_a_use_stays_after_a_boot_with_its_clock_behind(agent: Agent, state: Path) -> None:
    agent.take(train(1))
    last_s, year_s = agent.record.last_write_s, 365 * 86_400.0
    following = Agent(state)
    following.take(train(2), now=Instant(30 * NS, last_s + 600 - year_s))
    (ended,) = following.record.ended
    assert ended.ended == UsageEnd(UsageEndKind.AWAY, last_s, last_s, 0.0)
    assert [usage.began.wall_s for usage in following.record.running] == [last_s]
    assert following.record.last_write_s == last_s
    for second in (90, 4000):
        following.take(train(2), now=Instant(second * NS, last_s + 600 + second))
    assert following.record.last_write_s == last_s + 4600
    assert following.record.ended == (ended,)


def test_use_ids_of_two_agent_runs_differ(tmp_path: Path) -> None:
    lives = [Agent(tmp_path / name) for name in ("one", "other")]
    for life in lives:
        life.take(train(1))
    usage, other = (life.record.running[0] for life in lives)
    assert usage.id != other.id
    assert replace(usage, id="") == replace(other, id="")
