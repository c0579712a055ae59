"""The record on its way to the disk: real files, and disks that take nothing."""

import logging
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from claims_paper import at, known_pod, prepared, use
from small_disk import run_on_small_disk
from uses_paper import UNREADABLE, known

from agent.model.consumers import ConsumerMap
from agent.model.health import DeviceHealth, Health, Severity
from agent.model.report import Report
from agent.model.time import NS, Instant
from agent.model.use_limits import Limits
from agent.model.uses import Ending
from agent.node.pods.history_recorder import FILE, Recorder
from agent.store.history import Record, read

HERE = Path(__file__).parent
NOBODY = known()


def train(*numbers: int) -> ConsumerMap:
    """A claim with a device of its own for each of these pods."""
    return known(
        *(prepared(f"c-{n}", use(f"gpu-{n}", "gpus"), pods=[f"p-{n}"], name=f"gpus-{n}") for n in numbers)
    )


def reported(*sick: str, starting: bool = False) -> Report:
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
    """An agent's life, as far as it is recorded."""

    def __init__(self, state: Path, limits: Limits | None = None, first: int = 1000) -> None:
        self.recorder = Recorder(state, limits=limits or Limits())
        self.path = state / FILE
        self.second = first

    def take(self, map_: ConsumerMap, *sick: str, after_s: int = 20, now: Instant | None = None) -> None:
        self.second += after_s
        self.recorder.take(map_, reported(*sick), now or at(self.second))

    @property
    def record(self) -> Record:
        return read(self.path)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def agent(state: Path) -> Agent:
    return Agent(state)


def test_who_had_which_device_in_which_state_when_it_ended(agent: Agent) -> None:
    agent.take(NOBODY)
    agent.take(train(1, 2))
    assert [one.pod.uid for one in agent.record.running] == ["p-2", "p-1"]
    agent.take(train(1, 2), "gpu-1")
    agent.take(train(2))
    (ended,) = agent.record.ended
    assert ended.pod.uid == "p-1"
    assert (ended.state.health, ended.worst.evidence) == (Health.HEALTHY, "it is lost")
    (running,) = agent.record.running
    assert running.pod.uid == "p-2"


def test_while_nothing_changes_the_disk_is_left_alone_but_for_a_word_in_five_minutes(agent: Agent) -> None:
    agent.take(train(1))
    written = agent.path.stat().st_mtime_ns
    for _ in range(10):
        agent.take(train(1))
    assert agent.path.stat().st_mtime_ns == written
    agent.take(train(1), after_s=200)
    assert agent.path.stat().st_mtime_ns > written
    assert agent.record.left_s == at(agent.second).wall_s


def test_no_picture_is_no_knowledge(agent: Agent) -> None:
    agent.recorder.take(train(1), reported(starting=True), at(1))
    assert not agent.path.exists()


def test_no_rows_is_no_record(state: Path) -> None:
    agent = Agent(state, Limits(rows=0))
    agent.take(train(1))
    assert agent.recorder.close(10)
    assert not state.exists()


def test_where_no_device_was_ever_in_use_nothing_is_made_and_nothing_of_sqlite_loaded(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from claims_paper import at
from uses_paper import known
from agent.model.report import Report
from agent.model.use_limits import Limits
from agent.node.pods.history_recorder import Recorder
recorder = Recorder(Path({str(tmp_path)!r}), limits=Limits())
recorder.take(known(), Report("node-1", at(1)), at(1))
assert recorder.close(10)
print("sqlite3" in sys.modules, list(Path({str(tmp_path)!r}).iterdir()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=HERE.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False []\n"


# --- from one agent to the next ----------------------------------------------------------------------------


def test_an_agent_goes_on_where_the_one_before_it_was_ended(agent: Agent, state: Path) -> None:
    agent.take(train(1, 2))
    agent.take(train(1, 2))
    assert agent.recorder.close(10)
    left = agent.record
    assert left.left_s == at(agent.second).wall_s
    following = Agent(state, first=5000)
    following.take(train(1))
    (ended,) = following.record.ended
    assert ended.ended
    assert (ended.pod.uid, ended.ended.ending) == ("p-2", Ending.AWAY)
    assert ended.ended.seen_s == left.left_s
    (running,) = following.record.running
    assert running.id in {one.id for one in left.running}


def test_a_pod_that_failed_is_recorded_once_by_however_many_agents(agent: Agent, state: Path) -> None:
    claim = prepared("c-1", use("gpu-1"), pods=["p-1"], name="gpus")
    failed = known(claim, pods=[known_pod("p-1", "gpus", phase="Failed")])
    agent.take(failed)
    for life in range(3):
        Agent(state, first=5000 + life).take(failed)
    Agent(state, first=6000).take(known(claim))
    assert len(agent.record.ended) == 1
    assert agent.record.running == ()


def test_a_kubelet_that_cannot_be_heard_at_the_start_ends_nothing(agent: Agent, state: Path) -> None:
    agent.take(train(1))
    following = Agent(state, first=5000)
    following.take(UNREADABLE)
    assert len(following.record.running) == 1
    following.take(train(1))
    assert following.record.ended == ()


LIFE = f"""
import sys, time
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from test_recorder import Agent, train
agent = Agent(Path(sys.argv[1]))
agent.take(train(*range(30)))
print("ready", flush=True)
number = 30
while True:
    agent.take(train(*range(number - 29, number + 1)))
    number += 1
    time.sleep(0.01)  # readers have their turn
"""


@pytest.mark.parametrize("ended", [1, 4, 9])
def test_an_agent_that_is_killed_loses_no_use_that_was_on_the_disk(state: Path, ended: int) -> None:
    """Each look ends one use and begins another; whenever it is killed, as many run as ran."""
    with subprocess.Popen([sys.executable, "-c", LIFE, str(state)], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        try:
            while len(read(state / FILE).ended) < ended:
                pass
        finally:
            process.send_signal(signal.SIGKILL)
    before = read(state / FILE)
    assert len(before.running) == 30
    following = Agent(state, first=100_000)
    following.take(NOBODY)
    after = following.record
    assert after.running == ()
    assert {one.id for one in after.ended} == {one.id for one in (*before.ended, *before.running)}


# --- disks -------------------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_made_is_told_of_once_and_nothing_is_lost(
    agent: Agent, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state.write_text("in the way")
    agent.take(train(1, 2))
    for _ in range(5):
        agent.take(train(2))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(agent.path) in caplog.text
    state.unlink()
    agent.take(train(2))
    assert [one.pod.uid for one in agent.record.ended] == ["p-1"]
    assert [one.pod.uid for one in agent.record.running] == ["p-2"]


def test_what_memory_cannot_hold_is_lost_and_counted(state: Path, caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent(state, Limits(rows=3))
    state.write_text("in the way")
    for number in range(6):
        agent.take(train(number))
    agent.take(NOBODY)
    state.unlink()
    agent.take(NOBODY)
    assert [one.pod.uid for one in agent.record.ended] == ["p-5", "p-4", "p-3"]
    assert "3 uses that ended meanwhile are lost" in caplog.text


def test_a_file_that_somebody_removed_is_made_again_with_all_that_runs(agent: Agent) -> None:
    agent.take(train(1, 2))
    agent.path.unlink()
    agent.take(train(1, 2))
    assert len(agent.record.running) == 2


def test_a_file_that_is_damaged_is_set_aside_with_a_warning_and_all_that_runs_is_kept(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    agent.take(train(1, 2))
    agent.path.write_bytes(b"no database at all, " * 500)
    agent.take(train(1, 2, 3))
    agent.take(train(1, 2, 3))
    assert f"{agent.path}: is not understood" in caplog.text
    assert f"{agent.path}.corrupt-1" in caplog.text
    assert len(agent.record.running) == 3


def test_a_later_versions_file_is_told_of_once_and_never_written(
    agent: Agent, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent.take(train(1))
    with closing(sqlite3.connect(agent.path)) as db:
        db.execute("PRAGMA user_version = 2")
    before = agent.path.read_bytes()
    following = Agent(state, first=5000)
    for number in range(3):
        following.take(train(number))
    assert following.recorder.close(10)
    assert agent.path.read_bytes() == before
    assert len(caplog.records) == 1
    assert "is of version 2, this agent reads 1; it is left as it is" in caplog.text


def test_a_full_disk_loses_nothing_that_memory_can_hold(tmp_path: Path) -> None:
    program = f"""
import sys, os
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from test_recorder import Agent, NOBODY, train
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


def test_the_end_does_not_wait_for_a_disk_that_hangs(agent: Agent) -> None:
    agent.take(train(1))
    with closing(sqlite3.connect(agent.path, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        assert not agent.recorder.close(0.05)
        db.execute("ROLLBACK")
    assert agent.recorder.close(10)


# --- clocks ------------------------------------------------------------------------------------------------


def ends_at(agent: Agent, wall_s: float, numbers: Iterator[int]) -> None:
    """A use that begins and ends at that time of the wall clock."""
    number = next(numbers)
    for map_ in (train(number), NOBODY):
        agent.second += 60
        agent.take(map_, now=Instant(agent.second * NS, wall_s + agent.second))


def test_a_clock_that_was_set_deletes_nothing_before_it_has_held_for_an_hour(state: Path) -> None:
    agent = Agent(state, Limits(age_s=86_400))
    numbers = iter(range(1000))
    for _ in range(3):
        ends_at(agent, 1_700_000_000.0, numbers)
    decade_s = 1_700_000_000.0 + 3650 * 86_400
    ends_at(agent, decade_s, numbers)
    assert len(agent.record.ended) == 4
    agent.second += 3600
    ends_at(agent, decade_s, numbers)
    assert [one.device.device for one in agent.record.ended] == ["gpu-4", "gpu-3"]


def test_ids_of_two_lives_are_never_the_same(tmp_path: Path) -> None:
    lives = [Agent(tmp_path / name) for name in ("one", "other")]
    for life in lives:
        life.take(train(1))
    one, other = (life.record.running[0] for life in lives)
    assert one.id != other.id
    assert replace(one, id="") == replace(other, id="")
