"""The benchmark itself: statistics, parsers and what it prints. How fast anything is, is not tested."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from agent.bench import pyperf, report
from agent.bench.baselines import GoodReader, PlainReader, flat, machine_files, machine_values, sweep_files
from agent.bench.budgets import verdict, with_table
from agent.bench.counts import parse_callgrind
from agent.bench.host import Host
from agent.bench.result import Outcome, Row, Table, Unequal, quantity, row_of, rows_of
from agent.bench.suites.idle import threads
from agent.bench.suites.poll import check_equal, open_sampler, read
from agent.bench.timing import Contender, Interval, Race, Timed, interval, paired_ratio, percentile, race
from agent.bench.trees import group_names, real_tree, scratch, write_groups, write_sysfs
from agent.native.sampler import Sampler, SamplerOptions

HOST = Host("1.0", "a CPU", 2, "performance", "6.18", "3.11.7", "gcc 12.2.0", "-O2", "0.10")


def timed(*medians: float) -> Timed:
    return Timed(tuple((median,) for median in medians), 1)


def outcome() -> Outcome:
    """One table of a race and one of single figures."""
    run = Race({"core": timed(11.0, 22.0), "floor": timed(10.0, 20.0)}, (5.0, 5.0))
    rows = rows_of("poll.pass.warm", {"core": "core: C", "floor": "floor"}, run, "floor")
    idle = (row_of("idle.cpu", "CPU", [0.2], "%"), row_of("idle.rss", "RSS", [39 << 20], "B"))
    idle += (row_of("idle.wakes", "wakes", [0], "1"),)
    return Outcome([Table("pass", rows, "floor"), Table("idle", idle)], ["x: no x here"], [5.0, 5.0])


# --- statistics -------------------------------------------------------------------------------------------


def test_a_ratio_is_paired_within_rounds() -> None:
    """The second round was twice as slow for both: the ratio does not see it."""
    assert paired_ratio(timed(11, 22, 11), timed(10, 20, 10)) == Interval(1.1, 1.1, 1.1)


def test_an_interval_holds_the_median_and_narrows_with_more_values() -> None:
    few, many = interval(range(20)), interval([n / 50 for n in range(1000)])
    assert few.low < few.median == 9.5 < few.high
    assert many.high - many.low < few.high - few.low


def test_an_interval_of_few_values_is_their_range() -> None:
    assert interval([3.0, 1.0, 2.0]) == Interval(1.0, 2.0, 3.0)
    assert interval([1.0]) == Interval(1.0, 1.0, 1.0)


def test_a_percentile_needs_enough_values() -> None:
    assert percentile(range(99), 0.99) is None
    assert percentile(range(100), 0.99) == 99
    assert percentile(range(1000), 0.99) == 990


def test_a_race_gives_every_contender_every_round() -> None:
    calls: list[str] = []
    run = race(
        [Contender("a", "", lambda: calls.append("a")), Contender("b", "", lambda: calls.append("b"))],
        rounds=4,
        limit_s=60.0,
        pause_s=1e-9,
    )
    assert {key: len(one.blocks) for key, one in run.timed.items()} == {"a": 4, "b": 4}
    assert len(run.reference) == 4
    assert calls == ["a", "b", "b", "a", "a", "b", "b", "a"], "the order rotates"


# --- what is measured against ------------------------------------------------------------------------------


def fixture_sampler(root: Path) -> Sampler:
    sampler = Sampler(SamplerOptions(sysfs_root=root, cgroupfs_root=root / "none"))
    sampler.run_pass()
    return sampler


def test_both_pythons_read_what_the_core_reads() -> None:
    with scratch() as root:
        write_sysfs(root)
        files = machine_files(root)
        good = GoodReader(files)
        sampler = fixture_sampler(root)
        core = machine_values(read(sampler))
        assert len(core) == 10
        assert core == good() == PlainReader(files)()
        good.close()
        sampler.stop(1.0)


def test_unequal_results_are_named_and_nothing_is_timed() -> None:
    with pytest.raises(Unequal, match=r"pass: 2048/0/nr: the core read 8, Python 7"):
        check_equal("pass", {("2048", "0", "nr"): 8}, {("2048", "0", "nr"): 7})
    with pytest.raises(Unequal, match=r"pass: cpus/online: the core read 3, Python None"):
        check_equal("pass", {("cpus", "online"): 3}, {})


def test_every_group_of_a_tree_of_files_is_found_by_the_core() -> None:
    with scratch() as root:
        tree = write_groups(root, 10)
        sampler = open_sampler(tree)
        found = {(group.pod_uid, group.container) for group in read(sampler).groups}
        sampler.stop(1.0)
    assert found == set(tree.groups) == set(group_names(10))


def test_real_cgroups_are_gone_afterwards() -> None:
    try:
        with real_tree(4) as tree:
            roots = [mount / tree.kubelet_root.strip("/") for mount in tree.hierarchies.values()]
            assert all(tree.path(name, *tree.groups[-1]).is_dir() for name in tree.hierarchies)
    except OSError as error:
        pytest.skip(f"may not make cgroups: {error}")
    assert not any(root.exists() for root in roots)


def test_own_instructions_of_an_object_are_told_from_those_of_its_callees() -> None:
    text = """\
summary: 999
ob=/tmp/driver
fn=pass
0 100
cfn=helper
calls=3 0
0 30
cob=/lib/libc.so.6
cfn=pread
calls=7 0
0 700
0 5

fn=helper
0 30
ob=/lib/libc.so.6
fn=pread
0 700
cob=/tmp/driver
cfn=pass
calls=1 0
0 1
"""
    assert parse_callgrind(text, "/tmp/driver") == (135, 7)


def test_every_thread_of_this_process_is_accounted() -> None:
    before = threads(int(Path("/proc/self").readlink().name))
    assert {thread.name for thread in before.values()} >= {"main"}
    assert all(thread.run_ns > 0 for thread in before.values() if thread.name == "main")


# --- budgets ----------------------------------------------------------------------------------------------


def ratio_row(low: float, median: float, high: float) -> Row:
    return Row("a.b", "", "s", (1.0,), Interval(1.0, 1.0, 1.0), None, 1.0, ratio=Interval(low, median, high))


def test_a_ratio_is_missed_only_if_its_whole_interval_is_above() -> None:
    budgets = {"ratio": {"a.b": 1.10}}
    assert verdict(ratio_row(1.05, 1.12, 1.2), budgets) == ("<= 1.10x", True)
    assert verdict(ratio_row(1.11, 1.12, 1.2), budgets) == ("<= 1.10x", False)


def test_a_goal_on_a_percentile_that_is_not_known_is_neither_met_nor_missed() -> None:
    row = row_of("a.b", "", [1.0, 2.0], "s")
    assert verdict(row, {"goal": {"a.b": {"p99": 3.0}}}) == ("p99 <= 3.00 s", None)
    assert verdict(row, {"goal": {"a.b": {"max": 1.5}}}) == ("max <= 1.50 s", False)
    assert verdict(row, {}) == ("", None)


def test_a_table_is_replaced_where_it_stands_and_nothing_else_is_touched() -> None:
    text = '# why\n[a]\nx = 1\n\n[b."c 1.2"]\ny = 2\nz = 3\n\n[d]\n# kept\nw = 4\n'
    changed = with_table(text, 'b."c 1.2"', {"y": 5})
    assert changed == '# why\n[a]\nx = 1\n\n[b."c 1.2"]\ny = 5\n\n[d]\n# kept\nw = 4\n'
    assert tomllib.loads(with_table(text, 'b."c 2"', {"y": 5}))["b"] == {
        "c 1.2": {"y": 2, "z": 3},
        "c 2": {"y": 5},
    }


# --- output -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (14.7e-6, "s", "14.7 us"),
        (0.0123, "s", "12.3 ms"),
        (2.5e-10, "s", "0.25 ns"),
        (38.2 * (1 << 20), "B", "38.2 MiB"),
        (0.123, "%", "0.12 %"),
        (1509, "1", "1,509"),
    ],
)
def test_quantities_have_three_digits_and_a_unit(value: float, unit: Any, text: str) -> None:
    assert quantity(value, unit) == text


def test_the_report_says_ratios_verdicts_and_what_was_not_measured() -> None:
    budgets = {"ratio": {"poll.pass.warm.core": 1.05}, "goal": {"idle.cpu": {"max": 0.25}}}
    lines = report.text(HOST, {"poll": outcome()}, budgets).splitlines()
    core = next(line for line in lines if "core: C" in line)
    assert core.split()[-4:] == ["1.10x", "<=", "1.05x", "OVER"]
    assert next(line for line in lines if line.startswith("  CPU")).endswith("max <= 0.25 %  ok")
    assert "stability: good" in lines[2]
    assert lines[-1] == "not measured: x: no x here"


def test_markdown_has_a_row_for_every_figure() -> None:
    rows = [line for line in report.markdown(HOST, {"poll": outcome()}, {}).splitlines() if line[:2] == "| "]
    assert len(rows) == 2 + 5, "two headings and five figures"
    assert all(row.count("|") == 9 for row in rows)


def test_an_unstable_run_says_so() -> None:
    assert report.stability([1.0, 2.0, 1.0]).startswith("stability: POOR")


def check_pyperf(document: Any) -> None:
    """pyperf's schema, version 1.0, as its loader enforces it."""
    assert document["version"] == "1.0"
    assert set(document) == {"version", "metadata", "benchmarks"}
    metadatas = [document["metadata"]]
    names = []
    for benchmark in document["benchmarks"]:
        assert set(benchmark) == {"metadata", "runs"}
        names.append(benchmark["metadata"]["name"])
        assert benchmark["metadata"]["unit"] in {"second", "byte", "integer"}
        assert benchmark["metadata"]["loops"] >= 1
        assert benchmark["runs"]
        metadatas.append(benchmark["metadata"])
        for run in benchmark["runs"]:
            metadatas.append(run["metadata"])
            assert run["values"]
            assert all(type(value) in {int, float} and value > 0 for value in run["values"])
    assert names
    assert len(set(names)) == len(names)
    assert all(type(value) in {str, int, float} for metadata in metadatas for value in metadata.values())


def test_json_is_pyperfs_and_leaves_out_what_it_cannot_hold() -> None:
    document = json.loads(pyperf.suite(HOST, {"poll": outcome()}))
    check_pyperf(document)
    values = {one["metadata"]["name"]: one["runs"][0]["values"] for one in document["benchmarks"]}
    assert values["idle.cpu"] == [pytest.approx(0.002)]
    assert values["idle.rss"] == [39 << 20]
    assert "idle.wakes" not in values, "pyperf refuses zero"


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "agent.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def test_the_command_prints_json_and_nothing_else_on_standard_output() -> None:
    done = bench("--quick", "--json", "--suite", "encode")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    check_pyperf(document)
    names = {one["metadata"]["name"] for one in document["benchmarks"]}
    assert {"encode.8.core", "encode.128.core", "encode.1000.core"} <= names


def test_an_unknown_suite_is_refused_with_the_known_ones() -> None:
    done = bench("--suite", "speed")
    assert done.returncode == 2
    assert "'speed'" in done.stderr
    assert "'poll'" in done.stderr


def test_each_file_of_a_sweep_is_compared_under_a_name_of_its_own() -> None:
    with scratch() as root:
        tree = write_groups(root, 4)
        sampler = open_sampler(tree)
        files = sweep_files(tree, read(sampler))
        sampler.stop(1.0)
        values = PlainReader(files)()
        assert len(values) == len(files)
        assert {key[2] for key in flat(values)} == {"cpu_periods", "cpu_throttled", "cpu_throttled_us"}
