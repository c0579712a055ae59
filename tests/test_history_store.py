"""History file: real SQLite on real disks, concurrent readers, damage and full disks."""

import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from claim_samples import at
from golden.files import RELEASE
from other_user import become_other_user
from patience import PATIENCE_S
from small_disk import run_on_small_disk
from usage_samples import GOOD, LOST, SLOW, device_usage
from verdict_samples import GPU, HEALTHY, OTHER_GPU, STALLED, START_S, SimulatedNode, node_with
from verdict_samples import HOT as VERDICT_HOT
from verdict_samples import LOST as VERDICT_LOST

from agent.errors import ResourceBusyError
from agent.health.availability_statistics import (
    DeviceAvailability,
    ObservedTimeAxis,
    summarize,
    verdict_spans,
)
from agent.model.claim_sources import Origin, PodRef
from agent.model.device_usage import PodDeviceUsage, StoredUsages, UsageEnd, UsageEndKind
from agent.model.health import Severity
from agent.model.history import GONE, RecordedCause, StoredVerdicts
from agent.model.settings import UsageHistoryLimits
from agent.store.history_file import (
    HistoryError,
    HistoryFile,
    period_file_path,
    read_history,
    read_verdicts,
    write_period_file,
)
from agent.store.state_files import UnusableFile

HERE = Path(__file__).parent
DAY_S = 86_400.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "history.sqlite"


@pytest.fixture
def history(path: Path) -> HistoryFile:
    return HistoryFile(path, UsageHistoryLimits())


def write_uses_at(
    history: HistoryFile, *uses: PodDeviceUsage, merged: tuple[str, ...] = (), second: int = 5
) -> None:
    history.write_uses(uses, merged, at(second).wall_s, delete_by_age=False)


def as_read(use: PodDeviceUsage) -> PodDeviceUsage:
    """Return the use as the file has it, without the monotonic clock of the agent that wrote it."""
    return replace(use, began=replace(use.began, mono_ns=0), resumed=True)


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.iterdir())


# --- content ------------------------------------------------------------------------------------------


def test_use_survives_a_round_trip_with_all_fields(history: HistoryFile, path: Path) -> None:
    running = device_usage(
        1,
        active=True,
        pod=PodRef("", "", "p-1"),
        maybe=("team-a/train-0", "team-a/train-1"),
        state=LOST,
        worst=LOST,
        sources=(Origin.CHECKPOINT, Origin.DRIVER),
        requests=("big", "small"),
        containers=(),
        owner="",
        before=True,
    )
    ended = device_usage(2, state=SLOW, worst=LOST)
    write_uses_at(history, running, ended)
    found = read_history(path)
    assert found.running == (as_read(running),)
    assert found.ended == (as_read(ended),)
    assert found.last_write_s == at(5).wall_s


def test_history_in_a_directory_whose_name_has_signs_of_uris_is_read(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"a?b#c%20 \xff") / "history.sqlite"
    write_uses_at(HistoryFile(path, UsageHistoryLimits()), device_usage(1))
    assert read_history(path).ended == (as_read(device_usage(1)),)
    assert names(path) == ["history.sqlite"]


def test_newest_write_of_a_use_counts_and_its_end_moves_it(history: HistoryFile, path: Path) -> None:
    write_uses_at(history, device_usage(1, active=True), device_usage(2, active=True))
    write_uses_at(history, device_usage(1, active=True, state=LOST, worst=LOST))
    assert [(use.id, use.state) for use in read_history(path).running] == [("run-2", GOOD), ("run-1", LOST)]
    write_uses_at(history, device_usage(1))
    assert [use.id for use in read_history(path).running] == ["run-2"]
    assert [use.id for use in read_history(path).ended] == ["run-1"]


def test_repeated_write_of_a_use_is_one_row(history: HistoryFile, path: Path) -> None:
    for _ in range(2):
        write_uses_at(history, device_usage(1), device_usage(2, active=True))
    assert [len(part) for part in read_history(path)[:2]] == [1, 1]


def test_merged_use_is_deleted(history: HistoryFile, path: Path) -> None:
    write_uses_at(history, device_usage(1, active=True), device_usage(2, active=True))
    write_uses_at(history, merged=("run-1",))
    assert [use.id for use in read_history(path).running] == ["run-2"]


def test_rows_are_in_order_of_writes_whatever_the_clock(history: HistoryFile, path: Path) -> None:
    for number, noticed_s in enumerate((900.0, 1.0, 500.0)):
        ended = UsageEnd(UsageEndKind.RELEASED, noticed_s, noticed_s, 1.0)
        write_uses_at(history, device_usage(number, ended=ended))
    assert [use.id for use in read_history(path).ended] == ["run-2", "run-1", "run-0"]


def test_long_text_is_cut_and_invalid_unicode_is_replaced(history: HistoryFile, path: Path) -> None:
    write_uses_at(history, device_usage(state=LOST._replace(evidence="x" * 10_000), owner="Job \udc80"))
    (found,) = read_history(path).ended
    assert len(found.state.evidence) == 512
    assert found.owner == "Job ?"


# --- limits ------------------------------------------------------------------------------------------------


def test_rows_above_limit_delete_the_oldest(path: Path) -> None:
    history = HistoryFile(path, UsageHistoryLimits(rows=3))
    for number in range(5):
        write_uses_at(history, device_usage(number), device_usage(100 + number, active=True))
    assert [use.id for use in read_history(path).ended] == ["run-4", "run-3", "run-2"]
    assert len(read_history(path).running) == 5


def test_old_rows_are_deleted_if_the_clock_is_reliable(path: Path) -> None:
    history = HistoryFile(path, UsageHistoryLimits(age_s=60))
    old, new = (UsageEnd(UsageEndKind.RELEASED, second, second, 1.0) for second in (100.0, 170.0))
    history.write_uses(
        (device_usage(1, ended=old), device_usage(2, ended=new)), (), 200.0, delete_by_age=False
    )
    assert len(read_history(path).ended) == 2
    history.write_uses((), (), 200.0, delete_by_age=True)
    assert [use.id for use in read_history(path).ended] == ["run-2"]


def test_file_size_is_limited_and_oldest_rows_make_room(path: Path) -> None:
    history = HistoryFile(path, UsageHistoryLimits(size=256 << 10))
    large = LOST._replace(evidence="\N{WARNING SIGN}" * 1000)
    for number in range(0, 400, 4):
        write_uses_at(history, *(device_usage(number + more, state=large) for more in range(4)))
    assert path.stat().st_size <= 256 << 10
    found = [use.id for use in read_history(path).ended]
    assert found == [f"run-{number}" for number in range(399, 399 - len(found), -1)]
    assert 50 < len(found) < 400


def test_write_larger_than_the_free_room_succeeds(path: Path) -> None:
    history = HistoryFile(path, UsageHistoryLimits(rows=100, size=20 << 20))
    large = LOST._replace(evidence="\N{WARNING SIGN}" * 1000)
    write_uses_at(history, *(device_usage(number, state=large, worst=large) for number in range(8000)))
    assert [use.id for use in read_history(path).ended] == [
        f"run-{number}" for number in range(7999, 7899, -1)
    ]


def test_file_is_private(history: HistoryFile, path: Path) -> None:
    write_uses_at(history, device_usage())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    write_uses_at(history, device_usage())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# --- after another agent -----------------------------------------------------------------------------------


def test_next_agent_finds_the_last_content(history: HistoryFile, path: Path) -> None:
    failed = UsageEnd(UsageEndKind.FAILED, 1.0, 2.0, 3.0)
    running, over = device_usage(1, active=True), device_usage(2, ended=failed)
    write_uses_at(history, running, over, device_usage(3))
    found = HistoryFile(path, UsageHistoryLimits()).content_if_replaced()
    assert found == StoredUsages((as_read(running),), (as_read(over),), at(5).wall_s)


def test_file_content_is_returned_once_and_again_after_replacement(history: HistoryFile, path: Path) -> None:
    assert history.content_if_replaced() is None
    write_uses_at(history, device_usage(active=True))
    assert history.content_if_replaced() is None
    path.unlink()
    assert history.content_if_replaced() == StoredUsages()
    assert history.content_if_replaced() is None
    write_uses_at(HistoryFile(path, UsageHistoryLimits()), device_usage(2, active=True))
    found = history.content_if_replaced()
    assert found is not None
    assert [use.id for use in found.running] == ["run-2"]


@pytest.fixture
def same_inode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each file at a path the same id, as ext4 gives a new file the inode of a removed one."""
    file_id = HistoryFile._file_id
    monkeypatch.setattr(HistoryFile, "_file_id", lambda file: file_id(file) and (1, 1))


@pytest.mark.usefixtures("same_inode")
def test_new_file_with_the_inode_of_the_removed_one_is_noticed(history: HistoryFile, path: Path) -> None:
    node = node_with([(HEALTHY, 60)])
    kept_verdicts(history, node)
    write_uses_at(history, device_usage(active=True))
    path.unlink()
    write_uses_at(history, device_usage(2, active=True))
    assert history.verdicts_if_replaced() == StoredVerdicts()
    kept_verdicts(history, node)
    path.unlink()
    kept_verdicts(history, node)
    assert history.content_if_replaced() == StoredUsages()


# --- unusable files -----------------------------------------------------------------------------


def overwrite_with_garbage(path: Path) -> None:
    path.write_bytes(b"no database at all, " * 500)


def write_damaged_file(path: Path) -> None:
    """Overwrite pages of a valid file."""
    write_uses_at(HistoryFile(path, UsageHistoryLimits()), *(device_usage(number) for number in range(200)))
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(os.urandom(60_000))


def write_foreign_file(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE running (x)")


def write_strange_rows(path: Path) -> None:
    write_uses_at(HistoryFile(path, UsageHistoryLimits()), device_usage(active=True))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE running SET state_health = 'well'")


def without_a_column(path: Path) -> None:
    write_uses_at(HistoryFile(path, UsageHistoryLimits()), device_usage(active=True))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("ALTER TABLE running DROP COLUMN owner")


def write_an_empty_value(path: Path) -> None:
    """Set a column to NULL that never is, as a changed byte in the file does."""
    write_uses_at(HistoryFile(path, UsageHistoryLimits()), device_usage(active=True))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_master SET sql = replace(sql, 'told_by TEXT NOT NULL', 'told_by TEXT')")
        db.commit()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE running SET told_by = NULL")


def write_a_changed_text(path: Path) -> None:
    """Change one letter of a name, which leaves a valid database with valid values."""
    write_uses_at(HistoryFile(path, UsageHistoryLimits()), device_usage(active=True))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE running SET device_device = device_device || 'x'")


def write_an_invalid_schema(path: Path) -> None:
    """Damage the schema, which SQLite quotes in its error message."""
    write_uses_at(HistoryFile(path, UsageHistoryLimits()), device_usage(active=True))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"CREATE TABLE running", b"CREATE \xff\xfe\xfdLE running", 1))


@pytest.mark.parametrize(
    ("make", "reason", "kind"),
    [
        (write_an_empty_value, "history file cannot be parsed: checksum of row 1 is wrong", "corrupt"),
        (write_a_changed_text, "history file cannot be parsed: checksum of row 1 is wrong", "corrupt"),
        (
            write_an_invalid_schema,
            "history file cannot be parsed: SQLite reports damage in bytes",
            "corrupt",
        ),
        (overwrite_with_garbage, "history file cannot be parsed: file is not a database", "corrupt"),
        (write_damaged_file, "", "corrupt"),
        (write_foreign_file, "file is not a history file of drahealth", "foreign"),
        (write_strange_rows, "history file cannot be parsed: checksum of row 1 is wrong", "corrupt"),
        (without_a_column, "history file cannot be parsed: checksum of row 1 is wrong", "corrupt"),
        (os.mkdir, "is not a regular file", "corrupt"),
        (os.mkfifo, "is not a regular file", "corrupt"),
        (lambda path: path.symlink_to("/dev/null"), "is not a regular file", "corrupt"),
    ],
)
def test_unusable_file_is_set_aside_and_created_again(path, make, reason, kind) -> None:
    path.parent.mkdir()
    make(path)
    history = HistoryFile(path, UsageHistoryLimits())
    with pytest.raises(HistoryError) as caught:
        history.content_if_replaced()
    aside = path.with_name(f"history.sqlite.{kind}-1")
    assert str(caught.value).startswith(f"history file {path}: {reason}")
    assert str(caught.value).endswith(f"; renamed to {aside}")
    assert os.path.lexists(aside)
    assert history.content_if_replaced() is None
    write_uses_at(history, device_usage(1, active=True))
    assert [use.id for use in read_history(path).running] == ["run-1"]


@pytest.mark.parametrize(
    "make",
    [
        overwrite_with_garbage,
        write_damaged_file,
        write_an_empty_value,
        write_a_changed_text,
        write_an_invalid_schema,
    ],
)
def test_reader_of_a_damaged_file_gets_one_error(path: Path, make: Callable[[Path], None]) -> None:
    path.parent.mkdir()
    make(path)
    with pytest.raises(UnusableFile):
        read_history(path)


def test_any_damage_is_found_or_harmless(path: Path) -> None:
    """If one byte changes, the content is the same, or the file is renamed and recording continues."""
    whole = path.with_name("whole")
    uses = [device_usage(number, active=number % 2 == 0, state=LOST) for number in range(12)]
    write_uses_at(HistoryFile(whole, UsageHistoryLimits()), *uses)
    data, content = whole.read_bytes(), read_history(whole)
    chance = random.Random(5)
    for _ in range(80):
        damage = bytearray(data)
        for _ in range(chance.choice((1, 2, 8, 64))):
            at_byte = chance.randrange(len(data) if chance.random() < 0.6 else 4096)
            damage[at_byte] = chance.choice((0, 0xFF, chance.randrange(256)))
        path.write_bytes(damage)
        with suppress(UnusableFile):
            assert read_history(path) in (content, ((), (), 0.0))
        history = HistoryFile(path, UsageHistoryLimits())
        with suppress(HistoryError):
            history.content_if_replaced()
        with suppress(HistoryError):
            write_uses_at(history, device_usage(99, active=True))
        write_uses_at(history, device_usage(99, active=True))
        assert "run-99" in [use.id for use in read_history(path).running]


def test_file_without_checksums_gets_them(history: HistoryFile, path: Path) -> None:
    write_uses_at(history, device_usage(1, active=True), device_usage(2))
    with closing(sqlite3.connect(path)) as db, db:
        for table in ("running", "ended"):
            db.execute(f"ALTER TABLE {table} DROP COLUMN checksum")
    before = read_history(path)
    later = HistoryFile(path, UsageHistoryLimits())
    assert later.content_if_replaced() is not None
    assert read_history(path) == before
    write_uses_at(later, device_usage(3))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE ended SET owner = 'other'")
    with pytest.raises(UnusableFile, match="checksum of row 2 is wrong"):
        read_history(path)


# --- verdicts ----------------------------------------------------------------------------------------------


def kept_verdicts(history: HistoryFile, node: SimulatedNode, *, oldest_s: float | None = None) -> None:
    """Write everything that a simulated node recorded; with `oldest_s`, delete older records by age."""
    now_s = node.wall_s if oldest_s is None else oldest_s + UsageHistoryLimits().age_s
    history.write_verdicts(node.periods, node.changes, now_s, delete_by_age=oldest_s is not None)


def test_verdicts_survive_a_round_trip(history: HistoryFile, path: Path) -> None:
    node = node_with([(HEALTHY, 60), (VERDICT_LOST, 60), (VERDICT_HOT, 60), (GONE, 60)])
    node.change(OTHER_GPU, STALLED)
    kept_verdicts(history, node)
    assert read_verdicts(path) == node.stored
    kept_verdicts(history, node)
    assert read_verdicts(path) == node.stored


def test_file_of_the_release_gets_the_tables_of_verdicts(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes((RELEASE / "history.sqlite").read_bytes())
    uses = read_history(path)
    assert read_verdicts(path) == StoredVerdicts()
    node = node_with([(HEALTHY, 60), (VERDICT_LOST, 60)])
    history = HistoryFile(path, UsageHistoryLimits())
    assert history.verdicts_if_replaced() == StoredVerdicts()
    kept_verdicts(history, node)
    assert read_verdicts(path) == node.stored
    assert read_history(path) == uses


def test_long_texts_of_causes_are_cut(history: HistoryFile, path: Path) -> None:
    cause = RecordedCause("gpu.xid.79", Severity.UNHEALTHY, "\ud800" + "x" * 5000)
    kept_verdicts(history, node_with([(VERDICT_LOST._replace(causes=(cause,)), 60)]))
    (change,) = read_verdicts(path).changes
    assert change.verdict.causes[0].evidence == "?" + "x" * 511


def test_row_limit_keeps_the_verdict_of_each_device_at_the_limit(path: Path) -> None:
    history = HistoryFile(path, UsageHistoryLimits(rows=4))
    node = node_with([(HEALTHY, 60)])
    node.change(OTHER_GPU, VERDICT_HOT)
    node.follow(*[(VERDICT_LOST, 60), (HEALTHY, 60)] * 10)
    kept_verdicts(history, node)
    assert [change.device for change in read_verdicts(path).changes] == [OTHER_GPU, *[GPU] * 5]


def test_row_limit_forgets_devices_that_are_gone(path: Path) -> None:
    history = HistoryFile(path, UsageHistoryLimits(rows=4))
    node = node_with([(HEALTHY, 60)])
    node.follow((VERDICT_HOT, 60), (GONE, 60), device=OTHER_GPU)
    node.follow(*[(VERDICT_LOST, 60), (HEALTHY, 60)] * 10)
    kept_verdicts(history, node)
    assert {change.device for change in read_verdicts(path).changes} == {GPU}


def test_age_limit_keeps_the_verdict_at_the_limit(history: HistoryFile, path: Path) -> None:
    node = node_with([(HEALTHY, 100), (VERDICT_LOST, 100), (VERDICT_HOT, 100), (HEALTHY, 100)])
    node.stop(10)
    node.start()
    node.run(500)
    kept_verdicts(history, node, oldest_s=START_S + 250)
    assert [change.verdict for change in read_verdicts(path).changes] == [VERDICT_HOT, HEALTHY]
    assert len(read_verdicts(path).periods) == 2
    kept_verdicts(HistoryFile(path, UsageHistoryLimits()), node, oldest_s=START_S + 450)
    assert [period.id for period in read_verdicts(path).periods] == ["run-2"]


@pytest.mark.parametrize(
    ("away_s", "is_rebooted"), [(600, True), (40 * DAY_S, False)], ids=["two boots", "a month"]
)
def test_age_limit_keeps_changes_of_a_boot_with_its_clock_behind(
    history: HistoryFile, path: Path, away_s: float, is_rebooted: bool
) -> None:
    node = node_with([(VERDICT_LOST, 60), (HEALTHY, 40 * DAY_S)])
    node.stop(away_s)
    node.reboot()
    node.set_wall_clock(-400 * DAY_S)
    node.start((GPU, GONE))
    node.run(60)
    if is_rebooted:
        node.reboot()
        node.start()
    node.set_wall_clock(400 * DAY_S)
    node.run(7200)
    kept_verdicts(history, node, oldest_s=node.wall_s - 30 * DAY_S)
    assert [change.verdict for change in read_verdicts(path).changes] == [HEALTHY, GONE]
    assert node.periods[1] in read_verdicts(path).periods
    node.run(31 * DAY_S)
    history.write_verdicts(node.periods[-1:], (), node.wall_s, delete_by_age=True)
    assert read_verdicts(path) == StoredVerdicts((node.periods[-1],))


def availability(path: Path, node: SimulatedNode) -> DeviceAvailability:
    """Return the availability of the only device, as the history file has it."""
    stored = read_verdicts(path)
    timeline = ObservedTimeAxis(stored.periods, node.clocks)
    (device,) = summarize(verdict_spans(stored, timeline), timeline).devices
    return device


def test_row_limit_keeps_the_times_of_stored_changes_over_restarts(path: Path) -> None:
    history = HistoryFile(path, UsageHistoryLimits(rows=10))
    node = SimulatedNode()
    for _ in range(3):
        node.start()
        node.follow((HEALTHY, 3600), (VERDICT_LOST, 3600), (HEALTHY, 79_000))
        node.stop(200)
        kept_verdicts(history, node)
    before = availability(path, node)
    assert (before.faults, before.lost_s, before.mean_to_recover_s) == (3, 3 * 3600, 3600)
    for _ in range(11):
        node.start()
        node.run(60)
        history.write_verdicts(node.periods[-1:], (), node.wall_s, delete_by_age=False)
    after = availability(path, node)
    assert len(read_verdicts(path).periods) == 13
    assert after.begin_s == before.begin_s
    for name in ("faults", "lost_s", "mean_to_recover_s", "interruptions", "changes"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.not_observed_s == before.not_observed_s + 60  # of the deleted run


def test_row_limit_forgets_runs_in_which_nothing_changed(path: Path) -> None:
    history = HistoryFile(path, UsageHistoryLimits(rows=4))
    node = node_with([(HEALTHY, 60)])
    for _ in range(9):
        node.start()
        node.run(60)
    kept_verdicts(history, node)
    assert len(read_verdicts(path).periods) == 4
    assert availability(path, node).not_observed_s == 0


def test_age_limit_keeps_the_period_of_a_later_change(history: HistoryFile, path: Path) -> None:
    node = node_with([(HEALTHY, 100), (VERDICT_LOST, 100)])
    node.set_wall_clock(-1000)
    node.follow((HEALTHY, 100))
    node.set_wall_clock(1000)
    node.stop(10)
    node.start()
    node.run(500)
    kept_verdicts(history, node, oldest_s=START_S + 50)
    assert availability(path, node).lost_s == 100


def test_full_file_deletes_the_oldest_changes(path: Path) -> None:
    history = HistoryFile(path, UsageHistoryLimits(size=1 << 20, rows=100_000))
    node = node_with([(HEALTHY, 1)])
    wordy = VERDICT_LOST.causes[0]._replace(evidence="x" * 512)
    steps = [(VERDICT_LOST._replace(causes=(wordy,)), 1), (HEALTHY, 1)]
    for _ in range(20):
        node.follow(*steps * 200)
        history.write_verdicts(node.periods, node.changes[-400:], node.wall_s, delete_by_age=False)
    changes = read_verdicts(path).changes
    assert 1000 < len(changes) < 3000
    assert changes[-1].at_s == node.wall_s - 1


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE verdicts SET state = 'well'",
        "UPDATE verdicts SET causes = '[[1, 2]]'",
        "UPDATE observed SET lasted_s = lasted_s + 1",
        "ALTER TABLE verdicts DROP COLUMN offset_s",
        "DROP TABLE observed",
    ],
)
def test_damaged_verdicts_are_set_aside(history: HistoryFile, path: Path, damage: str) -> None:
    kept_verdicts(history, node_with([(HEALTHY, 60), (VERDICT_LOST, 60)]))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(damage)
    with pytest.raises(UnusableFile):
        read_verdicts(path)
    later = HistoryFile(path, UsageHistoryLimits())
    with pytest.raises(HistoryError, match="renamed to"):
        later.verdicts_if_replaced()
    assert later.verdicts_if_replaced() == StoredVerdicts()


def test_mark_is_the_end_of_the_newest_period(history: HistoryFile, path: Path) -> None:
    node = node_with([(HEALTHY, 60)])
    kept_verdicts(history, node)
    node.run(600)
    write_period_file(period_file_path(path), node.periods[-1])
    assert read_verdicts(path).periods == node.stored.periods
    assert stat.S_IMODE(period_file_path(path).stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"run-1 660.0", b"run-1 660.0 1.0 0000dead", b"\xff" * 128])
def test_damaged_mark_is_ignored(history: HistoryFile, path: Path, content: bytes) -> None:
    node = node_with([(HEALTHY, 60)])
    kept_verdicts(history, node)
    period_file_path(path).write_bytes(content)
    assert read_verdicts(path) == node.stored


def test_damage_while_running_is_noticed_by_next_write(history: HistoryFile, path: Path) -> None:
    write_uses_at(history, *(device_usage(number, active=True) for number in range(50)))
    inode = path.stat().st_ino
    path.write_bytes(b"no database at all, " * 500)
    assert path.stat().st_ino == inode
    with pytest.raises(HistoryError, match="renamed to"):
        write_uses_at(history, device_usage(1))
    assert history.content_if_replaced() == StoredUsages()


def test_journal_is_set_aside_with_its_file(history: HistoryFile, path: Path) -> None:
    """SQLite would apply a leftover journal to the next file."""
    path.mkdir(parents=True)
    path.with_name("history.sqlite-journal").write_bytes(b"its pages")
    with pytest.raises(HistoryError):
        history.content_if_replaced()
    assert names(path) == ["history.sqlite.corrupt-1", "history.sqlite.corrupt-1-journal"]


def test_empty_file_is_treated_as_new(history: HistoryFile, path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    assert history.content_if_replaced() == StoredUsages()
    write_uses_at(history, device_usage())
    assert len(read_history(path).ended) == 1


def test_file_of_later_version_is_left_unchanged(history: HistoryFile, path: Path) -> None:
    write_uses_at(history, device_usage())
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 2")
    before = path.read_bytes()
    later = HistoryFile(path, UsageHistoryLimits())
    for attempt in (later.content_if_replaced, lambda: write_uses_at(later, device_usage(2))):
        with pytest.raises(
            HistoryError,
            match=r"file has format version 2, this agent reads up to 1; .*the file is left unchanged",
        ):
            attempt()
    assert path.read_bytes() == before
    assert names(path) == ["history.sqlite"]
    with pytest.raises(UnusableFile, match="history file has format version 2"):
        read_history(path)


def test_unusable_directory_raises_and_loses_nothing(history: HistoryFile, path: Path) -> None:
    path.parent.write_text("in the way")
    with pytest.raises(HistoryError, match=str(path)):
        write_uses_at(history, device_usage())
    path.parent.unlink()
    write_uses_at(history, device_usage())
    assert len(read_history(path).ended) == 1


# --- readers -----------------------------------------------------------------------------------------------


def test_read_leaves_no_file_and_needs_no_write_permission(history: HistoryFile, path: Path) -> None:
    write_uses_at(history, device_usage())
    path.chmod(0o444)
    path.parent.chmod(0o555)
    before = os.geteuid()
    if before == 0:
        for parent in path.parents[1:-2]:
            os.chmod(parent, 0o755)
        become_other_user()
    try:
        assert len(read_history(path).ended) == 1
    finally:
        os.seteuid(before)
        path.parent.chmod(0o700)
    assert names(path) == ["history.sqlite"]


def test_database_in_wal_mode_is_converted_back(history: HistoryFile, path: Path) -> None:
    write_uses_at(history, device_usage())
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
    write_uses_at(history, device_usage(2))
    assert names(path) == ["history.sqlite"]
    assert len(read_history(path).ended) == 2


@contextmanager
def hold_read_transaction(path: Path) -> Iterator[None]:
    """Hold a read transaction open."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN")
        db.execute("SELECT * FROM ended").fetchone()
        yield


def test_endless_reader_delays_the_writer_and_loses_nothing(path: Path) -> None:
    history = HistoryFile(path, UsageHistoryLimits(), wait_s=0.05)
    write_uses_at(history, device_usage(1))
    with hold_read_transaction(path), pytest.raises(HistoryError, match="database is locked"):
        write_uses_at(history, device_usage(2))
    write_uses_at(history, device_usage(2))
    assert [use.id for use in read_history(path).ended] == ["run-2", "run-1"]


def test_endless_writer_is_reported_as_busy(history: HistoryFile, path: Path) -> None:
    write_uses_at(history, device_usage(1))
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        with pytest.raises(ResourceBusyError, match=r"locked by the agent's write for over 0\.05 s"):
            read_history(path, wait_s=0.05)


BEGINNER = """
import sqlite3, sys
sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None).execute("BEGIN IMMEDIATE")
"""


def test_read_in_the_process_of_the_writer_keeps_the_lock_of_the_writer(
    history: HistoryFile, path: Path
) -> None:
    kept_verdicts(history, node_with([(HEALTHY, 60)]))
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        reader = threading.Thread(target=read_verdicts, args=(path,))
        reader.start()
        reader.join()
        found = subprocess.run([sys.executable, "-c", BEGINNER, str(path)], capture_output=True, text=True)
    assert "database is locked" in found.stderr


WRITER = """
import sys, time
from usage_samples import device_usage
from pathlib import Path
from agent.model.settings import UsageHistoryLimits
from agent.store.history_file import HistoryFile
history = HistoryFile(Path(sys.argv[1]), UsageHistoryLimits(rows=50))
print("ready", flush=True)
number = 0
while True:
    number += 2
    begun_s = time.monotonic()
    history.write_uses((device_usage(number), device_usage(number + 1)), (), float(number), delete_by_age=False)
    time.sleep(0.005 + time.monotonic() - begun_s)  # readers have half of the time, however slow the disk is
"""  # noqa: E501


@contextmanager
def writer(path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process that writes two uses per transaction."""
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


def test_reader_during_writes_sees_complete_transactions(path: Path) -> None:
    with writer(path):
        seen = set()
        while len(seen) < 20:
            if path.exists() and path.stat().st_size:
                found = read_history(path, wait_s=PATIENCE_S)
                ids = [int(use.id.removeprefix("run-")) for use in found.ended]
                assert len(ids) % 2 == 0
                assert ids == sorted(ids, reverse=True)
                assert not ids or found.last_write_s in {ids[1], ids[1] - 2}
                seen.add(found.last_write_s)


@pytest.mark.parametrize("pause_s", [0.0, 0.003, 0.011, 0.023, 0.05])
def test_killed_writer_leaves_complete_transactions(path: Path, pause_s: float) -> None:
    """The next writer and every reader continue with the content after a kill at any time."""
    with writer(path) as process:
        threading.Event().wait(pause_s)
        process.send_signal(signal.SIGKILL)
    history = HistoryFile(path, UsageHistoryLimits())
    assert history.content_if_replaced() is not None or not path.exists()
    write_uses_at(history, device_usage(1_000_000), device_usage(1_000_001))
    ids = [use.id for use in read_history(path).ended]
    assert ids[:2] == ["run-1000001", "run-1000000"]
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
def hot(history: HistoryFile, path: Path) -> Path:
    """Leave the file of a process killed in a transaction that is partly written."""
    write_uses_at(history, *(device_usage(number) for number in range(500)))
    subprocess.run([sys.executable, "-c", HOT, str(path)], check=False)
    assert path.with_name("history.sqlite-journal").stat().st_size
    return path


def test_interrupted_transaction_is_rolled_back_by_first_reader(hot: Path) -> None:
    found = read_history(hot)
    assert {use.owner for use in found.ended} == {"Job train"}
    assert names(hot) == ["history.sqlite"]


def test_interrupted_transaction_is_rolled_back_by_next_agent(hot: Path) -> None:
    history = HistoryFile(hot, UsageHistoryLimits())
    assert history.content_if_replaced() is not None
    write_uses_at(history, device_usage(1000))
    assert {use.owner for use in read_history(hot).ended} == {"Job train"}


# --- a full disk -------------------------------------------------------------------------------------------


def test_full_disk_refuses_the_write_and_loses_nothing(tmp_path: Path) -> None:
    program = f"""
import sys, os
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from usage_samples import device_usage
from agent.model.settings import UsageHistoryLimits
from agent.store.history_file import HistoryError, HistoryFile, read_history as read
path = Path({str(tmp_path)!r}, "history.sqlite")
history = HistoryFile(path, UsageHistoryLimits())
history.write_uses((device_usage(1, active=True),), (), 1.0, delete_by_age=False)
ballast = open({str(tmp_path / "ballast")!r}, "wb", buffering=0)
try:
    while True:
        ballast.write(bytes(4096))
except OSError:
    pass
try:
    history.write_uses(tuple(device_usage(number) for number in range(100)), (), 2.0, delete_by_age=False)
except HistoryError as error:
    print(error)
print(len(read(path).running), len(read(path).ended))
os.truncate({str(tmp_path / "ballast")!r}, 0)
history.write_uses(tuple(device_usage(number) for number in range(100)), (), 2.0, delete_by_age=False)
print(len(read(path).running), len(read(path).ended))
"""
    error, full, after = run_on_small_disk(program, tmp_path)
    assert error.startswith(f"history file {tmp_path}/history.sqlite: ")
    assert "full" in error or "disk I/O error" in error
    assert full == "1 0"
    assert after == "0 100"
