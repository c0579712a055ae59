"""The history's file: real SQLite on real disks, and what others do to it."""

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from claims_paper import at
from small_disk import run_on_small_disk
from uses_paper import GOOD, LOST, SLOW, a_use

from agent.errors import Busy
from agent.model.claim_sources import Origin, PodRef
from agent.model.use_limits import Limits
from agent.model.uses import DeviceUsage, Ending, Kept, UsageEnd
from agent.store.files import CorruptFile
from agent.store.history import History, NotRecorded, read

HERE = Path(__file__).parent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "history.sqlite"


@pytest.fixture
def history(path: Path) -> History:
    return History(path, Limits())


def kept(history: History, *uses: DeviceUsage, merged: tuple[str, ...] = (), second: int = 5) -> None:
    history.write(uses, merged, at(second).wall_s, by_age=False)


def as_read(use: DeviceUsage) -> DeviceUsage:
    """What the file cannot know: the monotonic clock of another life."""
    return replace(use, began=replace(use.began, mono_ns=0), resumed=True)


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.parent.iterdir())


# --- what is kept ------------------------------------------------------------------------------------------


def test_everything_of_a_use_is_read_as_it_was_written(history: History, path: Path) -> None:
    running = a_use(
        1,
        goes_on=True,
        pod=PodRef("", "", "p-1"),
        maybe=("team-a/train-0", "team-a/train-1"),
        state=LOST,
        worst=LOST,
        told_by=(Origin.CHECKPOINT, Origin.DRIVER),
        requests=("big", "small"),
        containers=(),
        owner="",
        before=True,
    )
    ended = a_use(2, state=SLOW, worst=LOST)
    kept(history, running, ended)
    found = read(path)
    assert found.running == (as_read(running),)
    assert found.ended == (as_read(ended),)
    assert found.left_s == at(5).wall_s


def test_the_newest_of_a_use_counts_and_when_it_ends_it_no_longer_runs(history: History, path: Path) -> None:
    kept(history, a_use(1, goes_on=True), a_use(2, goes_on=True))
    kept(history, a_use(1, goes_on=True, state=LOST, worst=LOST))
    assert [(one.id, one.state) for one in read(path).running] == [("life-2", GOOD), ("life-1", LOST)]
    kept(history, a_use(1))
    assert [one.id for one in read(path).running] == ["life-2"]
    assert [one.id for one in read(path).ended] == ["life-1"]


def test_what_was_written_twice_is_there_once(history: History, path: Path) -> None:
    for _ in range(2):
        kept(history, a_use(1), a_use(2, goes_on=True))
    assert [len(part) for part in read(path)[:2]] == [1, 1]


def test_what_turned_out_to_be_another_is_gone(history: History, path: Path) -> None:
    kept(history, a_use(1, goes_on=True), a_use(2, goes_on=True))
    kept(history, merged=("life-1",))
    assert [one.id for one in read(path).running] == ["life-2"]


def test_rows_are_in_the_order_in_which_they_came_whatever_the_clock_said(
    history: History, path: Path
) -> None:
    for number, noticed_s in enumerate((900.0, 1.0, 500.0)):
        ended = UsageEnd(Ending.RELEASED, noticed_s, noticed_s, 1.0)
        kept(history, a_use(number, ended=ended))
    assert [one.id for one in read(path).ended] == ["life-2", "life-1", "life-0"]


def test_a_text_without_end_is_cut_and_one_that_is_no_unicode_is_kept(history: History, path: Path) -> None:
    kept(history, a_use(state=LOST._replace(evidence="x" * 10_000), owner="Job \udc80"))
    (found,) = read(path).ended
    assert len(found.state.evidence) == 512
    assert found.owner == "Job ?"


# --- limits ------------------------------------------------------------------------------------------------


def test_of_too_many_the_oldest_go(path: Path) -> None:
    history = History(path, Limits(rows=3))
    for number in range(5):
        kept(history, a_use(number), a_use(100 + number, goes_on=True))
    assert [one.id for one in read(path).ended] == ["life-4", "life-3", "life-2"]
    assert len(read(path).running) == 5


def test_those_of_long_ago_go_if_the_clock_can_be_trusted(path: Path) -> None:
    history = History(path, Limits(age_s=60))
    old, new = (UsageEnd(Ending.RELEASED, second, second, 1.0) for second in (100.0, 170.0))
    history.write((a_use(1, ended=old), a_use(2, ended=new)), (), 200.0, by_age=False)
    assert len(read(path).ended) == 2
    history.write((), (), 200.0, by_age=True)
    assert [one.id for one in read(path).ended] == ["life-2"]


def test_the_file_has_an_end_and_the_oldest_make_room(path: Path) -> None:
    history = History(path, Limits(size=256 << 10))
    large = LOST._replace(evidence="\N{WARNING SIGN}" * 1000)
    for number in range(0, 400, 4):
        kept(history, *(a_use(number + more, state=large) for more in range(4)))
    assert path.stat().st_size <= 256 << 10
    found = [one.id for one in read(path).ended]
    assert found == [f"life-{number}" for number in range(399, 399 - len(found), -1)]
    assert 50 < len(found) < 400


def test_more_than_fits_at_once_is_written_all_the_same(path: Path) -> None:
    history = History(path, Limits(rows=100, size=20 << 20))
    large = LOST._replace(evidence="\N{WARNING SIGN}" * 1000)
    kept(history, *(a_use(number, state=large, worst=large) for number in range(8000)))
    assert [one.id for one in read(path).ended] == [f"life-{number}" for number in range(7999, 7899, -1)]


def test_nobody_else_may_read_it(history: History, path: Path) -> None:
    kept(history, a_use())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    kept(history, a_use())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# --- after another agent -----------------------------------------------------------------------------------


def test_the_next_agent_finds_what_was_left(history: History, path: Path) -> None:
    failed = UsageEnd(Ending.FAILED, 1.0, 2.0, 3.0)
    running, over = a_use(1, goes_on=True), a_use(2, ended=failed)
    kept(history, running, over, a_use(3))
    found = History(path, Limits()).news()
    assert found == Kept((as_read(running),), (as_read(over),), at(5).wall_s)


def test_a_file_is_news_once_and_again_when_it_is_another(history: History, path: Path) -> None:
    assert history.news() is None
    kept(history, a_use(goes_on=True))
    assert history.news() is None
    path.unlink()
    assert history.news() == Kept()
    assert history.news() is None
    kept(History(path, Limits()), a_use(2, goes_on=True))
    found = history.news()
    assert found is not None
    assert [one.id for one in found.running] == ["life-2"]


# --- files that cannot be used -----------------------------------------------------------------------------


def scribbled(path: Path) -> None:
    path.write_bytes(b"no database at all, " * 500)


def damaged(path: Path) -> None:
    """Pages of a real one are overwritten."""
    kept(History(path, Limits()), *(a_use(number) for number in range(200)))
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(os.urandom(60_000))


def of_somebody_else(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE running (x)")


def with_strange_rows(path: Path) -> None:
    kept(History(path, Limits()), a_use(goes_on=True))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE running SET state_health = 'well'")


def without_a_column(path: Path) -> None:
    kept(History(path, Limits()), a_use(goes_on=True))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("ALTER TABLE running DROP COLUMN owner")


@pytest.mark.parametrize(
    ("make", "reason", "kind"),
    [
        (scribbled, "is not understood: file is not a database", "corrupt"),
        (damaged, "", "corrupt"),
        (of_somebody_else, "is no history of drahealth", "foreign"),
        (with_strange_rows, "is not understood: 'well' is not a valid Health", "corrupt"),
        (without_a_column, "is not understood: No item with that key", "corrupt"),
        (os.mkdir, "is no regular file", "corrupt"),
        (os.mkfifo, "is no regular file", "corrupt"),
        (lambda path: path.symlink_to("/dev/null"), "is no regular file", "corrupt"),
    ],
)
def test_what_cannot_be_used_is_set_aside_under_both_names_and_made_anew(path, make, reason, kind) -> None:
    path.parent.mkdir()
    make(path)
    history = History(path, Limits())
    with pytest.raises(NotRecorded) as caught:
        history.news()
    aside = path.with_name(f"history.sqlite.{kind}-1")
    assert str(caught.value).startswith(f"{path}: {reason}")
    assert str(caught.value).endswith(f"; set aside as {aside}")
    assert os.path.lexists(aside)
    assert history.news() is None
    kept(history, a_use(1, goes_on=True))
    assert [one.id for one in read(path).running] == ["life-1"]


def test_what_is_damaged_while_the_agent_runs_is_noticed_by_the_next_write(
    history: History, path: Path
) -> None:
    kept(history, *(a_use(number, goes_on=True) for number in range(50)))
    inode = path.stat().st_ino
    path.write_bytes(b"no database at all, " * 500)
    assert path.stat().st_ino == inode
    with pytest.raises(NotRecorded, match="set aside"):
        kept(history, a_use(1))
    assert history.news() == Kept()


def test_the_journal_of_a_file_goes_with_it(history: History, path: Path) -> None:
    """In the place of the next file's it would be put into that."""
    path.mkdir(parents=True)
    path.with_name("history.sqlite-journal").write_bytes(b"its pages")
    with pytest.raises(NotRecorded):
        history.news()
    assert names(path) == ["history.sqlite.corrupt-1", "history.sqlite.corrupt-1-journal"]


def test_an_empty_file_is_a_new_one(history: History, path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    assert history.news() == Kept()
    kept(history, a_use())
    assert len(read(path).ended) == 1


def test_what_a_later_version_wrote_is_left_as_it_is(history: History, path: Path) -> None:
    kept(history, a_use())
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 2")
    before = path.read_bytes()
    later = History(path, Limits())
    for attempt in (later.news, lambda: kept(later, a_use(2))):
        with pytest.raises(NotRecorded, match=r"is of version 2, this agent reads 1; it is left as it is"):
            attempt()
    assert path.read_bytes() == before
    assert names(path) == ["history.sqlite"]
    with pytest.raises(CorruptFile, match="is of version 2"):
        read(path)


def test_a_directory_that_cannot_be_made_is_no_loss(history: History, path: Path) -> None:
    path.parent.write_text("in the way")
    with pytest.raises(NotRecorded, match=str(path)):
        kept(history, a_use())
    path.parent.unlink()
    kept(history, a_use())
    assert len(read(path).ended) == 1


# --- readers -----------------------------------------------------------------------------------------------


def test_reading_leaves_nothing_behind_and_needs_no_right_to_write(history: History, path: Path) -> None:
    kept(history, a_use())
    path.chmod(0o444)
    path.parent.chmod(0o555)
    before = os.geteuid()
    if before == 0:
        os.chmod(path.parent.parent, 0o755)
        for parent in path.parents[2:4]:
            os.chmod(parent, 0o755)
        os.seteuid(65534)
    try:
        assert len(read(path).ended) == 1
    finally:
        os.seteuid(before)
        path.parent.chmod(0o700)
    assert names(path) == ["history.sqlite"]


def test_a_database_in_wal_mode_is_put_back_to_what_everybody_can_read(history: History, path: Path) -> None:
    kept(history, a_use())
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
    kept(history, a_use(2))
    assert names(path) == ["history.sqlite"]
    assert len(read(path).ended) == 2


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Somebody is in the middle of reading."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN")
        db.execute("SELECT * FROM ended").fetchone()
        yield


def test_a_reader_that_does_not_end_delays_the_writer_and_loses_nothing(path: Path) -> None:
    history = History(path, Limits(), wait_s=0.05)
    kept(history, a_use(1))
    with reading(path), pytest.raises(NotRecorded, match="database is locked"):
        kept(history, a_use(2))
    kept(history, a_use(2))
    assert [one.id for one in read(path).ended] == ["life-2", "life-1"]


def test_a_writer_that_does_not_end_is_told_of(history: History, path: Path) -> None:
    kept(history, a_use(1))
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        with pytest.raises(Busy, match=r"the agent is writing, for over 0\.05 s"):
            read(path, wait_s=0.05)


WRITER = """
import sys, time
from uses_paper import a_use
from pathlib import Path
from agent.model.use_limits import Limits
from agent.store.history import History
history = History(Path(sys.argv[1]), Limits(rows=50))
print("ready", flush=True)
number = 0
while True:
    number += 2
    history.write((a_use(number), a_use(number + 1)), (), float(number), by_age=False)
    time.sleep(0.005)
"""


@contextmanager
def writer(path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that writes two uses at a time, one after the other."""
    env = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}"}
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], env=env, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_who_reads_while_another_process_writes_sees_whole_transactions(path: Path) -> None:
    with writer(path):
        seen = set()
        while len(seen) < 20:
            if path.exists() and path.stat().st_size:
                found = read(path)
                ids = [int(one.id.removeprefix("life-")) for one in found.ended]
                assert len(ids) % 2 == 0
                assert ids == sorted(ids, reverse=True)
                assert not ids or found.left_s in {ids[1], ids[1] - 2}
                seen.add(found.left_s)


@pytest.mark.parametrize("pause_s", [0.0, 0.003, 0.011, 0.023, 0.05])
def test_a_writer_that_is_killed_leaves_whole_transactions(path: Path, pause_s: float) -> None:
    """Whenever that is; the next one, and every reader, goes on with what is there."""
    with writer(path) as process:
        threading.Event().wait(pause_s)
        process.send_signal(signal.SIGKILL)
    history = History(path, Limits())
    assert history.news() is not None or not path.exists()
    kept(history, a_use(1_000_000), a_use(1_000_001))
    ids = [one.id for one in read(path).ended]
    assert ids[:2] == ["life-1000001", "life-1000000"]
    assert len(ids) % 2 == 0
    assert names(path) == ["history.sqlite"]


HOT = """
import os, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA cache_size = 1")
db.execute("BEGIN IMMEDIATE")
db.execute("UPDATE ended SET owner = 'half of it'")
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def hot(history: History, path: Path) -> Path:
    """Somebody was killed in a transaction, part of which is in the file."""
    kept(history, *(a_use(number) for number in range(500)))
    subprocess.run([sys.executable, "-c", HOT, str(path)], check=False)
    assert path.with_name("history.sqlite-journal").stat().st_size
    return path


def test_half_a_transaction_is_taken_back_by_the_first_who_reads(hot: Path) -> None:
    found = read(hot)
    assert {one.owner for one in found.ended} == {"Job train"}
    assert names(hot) == ["history.sqlite"]


def test_half_a_transaction_is_taken_back_by_the_next_agent(hot: Path) -> None:
    history = History(hot, Limits())
    assert history.news() is not None
    kept(history, a_use(1000))
    assert {one.owner for one in read(hot).ended} == {"Job train"}


# --- a full disk -------------------------------------------------------------------------------------------


def test_a_full_disk_takes_nothing_and_loses_nothing(tmp_path: Path) -> None:
    program = f"""
import sys, os
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from uses_paper import a_use
from agent.model.use_limits import Limits
from agent.store.history import History, NotRecorded, read
path = Path({str(tmp_path)!r}, "history.sqlite")
history = History(path, Limits())
history.write((a_use(1, goes_on=True),), (), 1.0, by_age=False)
ballast = open({str(tmp_path / "ballast")!r}, "wb", buffering=0)
try:
    while True:
        ballast.write(bytes(4096))
except OSError:
    pass
try:
    history.write(tuple(a_use(number) for number in range(100)), (), 2.0, by_age=False)
except NotRecorded as error:
    print(error)
print(len(read(path).running), len(read(path).ended))
os.truncate({str(tmp_path / "ballast")!r}, 0)
history.write(tuple(a_use(number) for number in range(100)), (), 2.0, by_age=False)
print(len(read(path).running), len(read(path).ended))
"""
    said, full, after = run_on_small_disk(program, tmp_path)
    assert said.startswith(f"{tmp_path}/history.sqlite: ")
    assert "full" in said or "disk I/O error" in said
    assert full == "1 0"
    assert after == "0 100"
