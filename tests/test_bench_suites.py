"""Every suite of the benchmark in the smallest effort: its figures hang together, and what is wrong is named.

How fast anything is, is not tested.
"""

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from patience import PATIENCE_S

from agent.bench.baselines import PlainReader, flat, sweep_files, sweep_values
from agent.bench.effort import FULL, QUICK, Effort
from agent.bench.fit import fit, words
from agent.bench.gpu_baselines import Values
from agent.bench.latency import batches, paired_rows
from agent.bench.lower_bound import NoFloor, floor
from agent.bench.main import SUITES
from agent.bench.nvml import FakeNvml, NoLibrary, fake_nvml
from agent.bench.processes import Silence, child
from agent.bench.result import Outcome, Row, Unequal, Unmeasured, row_of
from agent.bench.starts import command, start
from agent.bench.suites import poll, poll_gpus, scale_consumers
from agent.bench.suites.decide import changed, declarations, now_of
from agent.bench.suites.poll import open_sampler, read
from agent.bench.suites.poll_gpus import check_calls, check_equal
from agent.bench.suites.trace import HOPS, hop_times
from agent.bench.trees import scratch, write_groups
from agent.engine.step import State, step
from agent.model.gpu import GpuField
from agent.model.settings import Settings

TINY: Final = replace(
    QUICK,
    warm_rounds=3,
    warm_limit_s=0.0,
    cold_rounds=1,
    groups=(2, 4),
    gpus=(2,),
    causes=1,
    events=1,
    publications=2,
    imports=True,
    idle_s=0.3,
    settle_s=0.0,
    sizes=(2, 8),
)
EXPECTED: Final = {
    "poll": {"poll.pass.warm.core", "poll.groups4.situ.floor", "poll.groups2.warm.plain"},
    "decide": {"decide.devices1000.change", "decide.groups1000.decode"},
    "encode": {"encode.8.core", "encode.128.betterproto", "encode.1000.core"},
    "publish": {"publish.1.server", "publish.64.frames", "publish.64.floor"},
    "detect": {"detect.file.10ms"},
    "trace": {f"trace.{key}" for key, _ in HOPS} | {"trace.all"},
    "idle": {"idle.cpu.new", "idle.rss", "idle.wakes"},
    "startup": {"startup.floor", "startup.help.rss", "startup.told", "startup.imports"},
    "scale": {"scale.encode.8", "scale.decide.2", "scale.poll.4", "scale.rss.8"},
}


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_yields_rows_that_hang_together(name: str) -> None:
    outcome = SUITES[name](TINY)
    rows = [row for table in outcome.tables for row in table.rows]
    keys = [row.key for row in rows]
    assert {*keys} >= EXPECTED[name], outcome.skipped
    assert len({*keys}) == len(keys)
    for row in rows:
        check_row(name, row)
    assert all(table.title and (not table.reference or len(table.rows) > 1) for table in outcome.tables)


def check_row(suite: str, row: Row) -> None:
    assert row.key.startswith(f"{suite}.")
    assert row.label
    assert row.values
    assert min(row.values) <= row.median.low <= row.median.median <= row.median.high <= row.max
    assert row.max == max(row.values)
    assert row.unit != "s" or min(row.values) > 0
    assert row.ratio is None or 0 < row.ratio.low <= row.ratio.high


def test_the_quick_effort_is_the_smaller_one() -> None:
    names = Effort.__slots__
    size = {name: lambda value: value if isinstance(value, int | float) else len(value) for name in names}
    assert all(size[name](getattr(QUICK, name)) <= size[name](getattr(FULL, name)) for name in names)


# --- what must be equal -----------------------------------------------------------------------------------


@contextmanager
def fake_gpus(number: int) -> Iterator[FakeNvml]:
    with scratch() as directory:
        try:
            fake = fake_nvml(directory, number)
        except NoLibrary as why:
            pytest.skip(str(why))
        yield fake


def test_a_suite_over_gpus_compares_every_value_of_every_gpu() -> None:
    with fake_gpus(2):
        outcome = Outcome()
        poll_gpus.run(TINY, outcome)
    table = outcome.tables[0]
    assert [row.key for row in table.rows] == [
        f"poll.gpus2.warm.{who}" for who in ("core", "floor", "good", "plain")
    ]
    equal = re.match(r"(\d+) values equal in core, good and plain; (\d+) NVML calls", table.notes[0])
    assert equal is not None
    assert int(equal[1]) % 2 == 0 < int(equal[1])
    assert int(equal[2]) == 2 * 4, "fields, temperature, margin and reasons of each"


def test_a_reader_of_gpus_that_reads_something_else_is_named() -> None:
    core: Values = {(0, GpuField.TEMP): 33, (1, GpuField.REMAP_PENDING): 0}
    check_equal(core, dict(core), frozenset())
    with pytest.raises(Unequal, match=r"gpu-1: remap_pending: the core read 0, pynvml 1"):
        check_equal(core, core | {(1, GpuField.REMAP_PENDING): 1}, frozenset())
    with pytest.raises(Unequal, match=r"gpu-0: temp: the core read 33, pynvml None"):
        check_equal(core, {(1, GpuField.REMAP_PENDING): 0}, frozenset({GpuField.TEMP}))


def test_a_floor_of_other_calls_is_none() -> None:
    assert check_calls(8, 8) == 8
    with pytest.raises(Unequal, match="the core makes 8 calls of NVML, the floor 7"):
        check_calls(8, 7)


def test_what_moves_by_itself_is_only_asked_to_be_there() -> None:
    check_equal({(0, GpuField.TEMP): 33}, {(0, GpuField.TEMP): 35}, frozenset({GpuField.TEMP}))


LATE_GPU: Final = """
import os, sys
from pathlib import Path
from agent.bench.gpu_baselines import GoodGpus, PlainGpus, fast_values, wanted_of
from agent.bench.nvml import FakeNvml
from agent.bench.suites.poll_gpus import check_equal, read, watch
from agent.sources.nvml import session
library, scenario, control = map(Path, sys.argv[1:])
os.environ["FAKE_NVML"] = str(scenario)
with watch(str(library)) as gpus, session(str(library)) as nvml:
    seen = read(gpus).gpus
    wanted = [wanted_of(gpu) for gpu in seen]
    readers = [GoodGpus(nvml.binding, wanted), PlainGpus(nvml.binding, wanted)]
    with FakeNvml(library, scenario, control).told() as director:
        director.tell("gpu 1 set remap.pending=1")
    for reader in readers:
        try:
            check_equal(fast_values(seen), reader(), frozenset())
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
"""


def test_a_gpu_that_changed_between_two_readers_is_noticed_by_both_pythons() -> None:
    with fake_gpus(2) as fake:
        arguments = [sys.executable, "-c", LATE_GPU, str(fake.library), str(fake.scenario), str(fake.control)]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.splitlines() == ["Unequal: gpu-1: remap_pending: the core read 0, pynvml 1"] * 2


def test_a_cgroup_that_changed_between_two_readers_is_noticed() -> None:
    with scratch() as root:
        tree = write_groups(root, 4)
        sampler = open_sampler(tree)
        sampler.run_sweep()
        snapshot = read(sampler)
        sampler.stop(PATIENCE_S)
        plain = PlainReader(sweep_files(tree, snapshot))
        uid, container = tree.groups[1]
        stat = tree.path("v2", uid, container) / "cpu.stat"
        stat.write_text(stat.read_text().replace("nr_throttled 0", "nr_throttled 7"))
        values = flat(plain())
        with pytest.raises(Unequal, match=f"{container}/cpu_throttled: the core read 0, Python 7"):
            poll.check_equal("sweep", sweep_values(snapshot, values), values)


def test_a_change_of_one_cpu_shows_in_one_declared_device_and_in_no_other() -> None:
    sampler = open_sampler(None)
    alone = read(sampler)
    sampler.stop(PATIENCE_S)
    snapshot = replace(alone, declared=declarations(alone, 3))
    now = now_of(snapshot)
    state, before = step(State(Settings("bench")), snapshot, now)
    _, after = step(state, changed(snapshot), now)
    news = {
        one.device
        for one, other in zip(after.devices, before.devices, strict=True)
        if one != other and one.driver
    }
    one_cpu = snapshot.cpus.online in {1, 2}
    assert news == ({"cpu-0", "cpu-1", "cpu-2"} if one_cpu else {"cpu-0"})


# --- consumers and audits ---------------------------------------------------------------------------------


def test_the_whole_node_is_resolved_and_every_pod_audited() -> None:
    outcome = Outcome()
    scale_consumers.run(replace(TINY, pods=10, audited=4), outcome)
    found = {row.key: row for table in outcome.tables for row in table.rows}
    assert {"scale.explain.10", "scale.floor.10.rss", "scale.audit.4", "scale.audit.4.rss"} <= found.keys()
    assert all(table.notes[0].startswith("fit: ") for table in outcome.tables)
    assert found["scale.explain.10.rss"].max > found["scale.floor.10.rss"].max


# --- what grows, and what takes turns ---------------------------------------------------------------------


def grown(*points: tuple[float, float]) -> list[Row]:
    return [replace(row_of(f"a.{x:g}", "", [y], "s"), x=x) for x, y in points]


def test_a_line_is_found_again() -> None:
    line = fit(grown((1, 12e-6), (8, 19e-6), (64, 75e-6)))
    assert line.slope == pytest.approx(1e-6)
    assert line.intercept == pytest.approx(11e-6)
    assert line.r2 == pytest.approx(1.0)
    assert words(line, "s", "device") == "fit: 11.0 us + 1.00 us per device, R2 1.000"


def test_two_points_prove_no_line() -> None:
    assert words(fit(grown((0, 1e-3), (10, 0.0))), "s", "pod") == "fit: 1.00 ms - 100 us per pod"


def test_what_is_no_line_explains_less() -> None:
    line = fit(grown((1, 1e-3), (2, 5e-3), (3, 1e-3)))
    assert line.r2 == pytest.approx(0.0, abs=1e-9)


def test_hops_are_all_of_the_way() -> None:
    stamps = {key: 100 + 10 * place for place, (key, _) in enumerate(HOPS)}
    taken = hop_times(stamps, 40)
    assert taken == {key: 60 if place == 0 else 10 for place, (key, _) in enumerate(HOPS)}
    assert sum(taken.values()) == stamps["client"] - 40


def test_a_ratio_of_latencies_is_of_the_same_cause() -> None:
    """The second cause was slow for both: the ratio does not see it."""
    rows = paired_rows("a", {"agent": "A", "floor": "F"}, {"agent": [20, 200, 30], "floor": [10, 100, 15]})
    assert [row.key for row in rows] == ["a.agent", "a.floor"]
    assert rows[0].ratio is not None
    assert rows[0].ratio.low == rows[0].ratio.high == 2.0


def test_batches_hold_every_number_once() -> None:
    assert [*batches(7, 3)] == [range(3), range(3, 6), range(6, 7)]
    assert [*batches(0, 3)] == []


# --- processes --------------------------------------------------------------------------------------------


def test_a_crowd_says_when_the_last_of_it_has_a_message() -> None:
    with scratch() as directory, socket.socket(socket.AF_UNIX) as listener:
        path = directory / "crowd.sock"
        listener.bind(str(path))
        listener.listen()
        with child("agent.bench.crowd", path, "bare", 4) as crowd:
            crowd.tell("2")
            connections = [listener.accept()[0] for _ in range(2)]
            assert crowd.wait() == {"subscribers": 2}
            for data in (b"ab", b"cd"):
                for connection in connections:
                    connection.sendall(data)
            assert crowd.wait().keys() == {"t_ns"}
            crowd.tell("3")
            connections.append(listener.accept()[0])
            assert crowd.wait() == {"subscribers": 3}
            connections[0].sendall(b"full")
            with pytest.raises(Silence, match=r"no such line in 0\.2 s"):
                crowd.wait(timeout_s=0.2)
            for connection in connections:
                connection.close()


def test_the_floor_tells_of_each_change_of_a_file(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.touch()
    try:
        with floor("inotify", *files) as beside:
            files[1].write_text("changed")
            line = beside.wait()
    except NoFloor as why:
        pytest.skip(str(why))
    assert line["file"] == 1
    assert line["t_ns"] > 0


def test_what_a_process_had_is_its_own_and_not_its_parents() -> None:
    """This process has more than an interpreter that does nothing."""
    small, large = start("pass"), start("area = bytearray(64 << 20)")
    assert large.rss - small.rss > 60 << 20
    assert small.rss < 32 << 20


def test_a_program_that_fails_is_no_figure() -> None:
    with pytest.raises(Unmeasured, match="exit 3"):
        start("import sys; sys.exit(3)")
    assert start("import sys; sys.exit(3)", exits=(3,)).took_ns > 0


def test_a_command_is_given_its_words_as_they_are() -> None:
    assert "usage: drahealth checks" in start(command("checks", "--help")).output


def test_nothing_that_a_suite_started_is_left() -> None:
    with child("agent.bench.hitter") as hitter:
        pid = hitter.pid
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()
