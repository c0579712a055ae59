"""The benchmark itself: statistics, parsers, baselines. How fast anything is, is not tested."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from patience import PATIENCE_S

from agent.bench.baselines import GoodReader, PlainReader, flat, machine_files, machine_values, sweep_files
from agent.bench.budgets import load, verdict, with_table
from agent.bench.counts import parse_callgrind
from agent.bench.result import Row, Unequal, row_of
from agent.bench.suites.idle import threads
from agent.bench.suites.poll import check_equal, open_sampler, read
from agent.bench.timing import (
    BLOCK_SAMPLES,
    Contender,
    Interval,
    Timed,
    interval,
    paired_ratio,
    percentile,
    race,
    spread,
    wild,
)
from agent.bench.trees import group_names, machine_lock, real_tree, scratch, write_groups, write_sysfs
from agent.native.sampler import Sampler, SamplerOptions


def timed(*medians: float) -> Timed:
    return Timed(tuple((median,) for median in medians), 1)


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


def test_a_value_gone_wild_is_told_of_the_tail_and_not_of_the_median() -> None:
    steady = [10.0, 10.1, 9.9, 10.0, 10.0, 10.2, 9.8]
    assert spread(steady) == pytest.approx(0.01)
    assert wild(steady) == 0
    assert spread([*steady, 1000.0]) == pytest.approx(0.01)
    assert wild([*steady, 1000.0]) == 1 / 8


def test_a_race_gives_every_contender_every_round() -> None:
    calls: list[str] = []
    run = race(
        [Contender("a", "", lambda: calls.append("a")), Contender("b", "", lambda: calls.append("b"))],
        rounds=4,
        limit_s=60.0,
        pause_s=1e-9,
    )
    assert {key: len(one.blocks) for key, one in run.timed.items()} == {"a": 4, "b": 4}
    assert len(run.reference) == 4 * BLOCK_SAMPLES
    assert calls[:8] == ["a", "b", "b", "a", "a", "b", "b", "a"], "the order rotates"


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
        assert len(core) == 3
        assert core == good() == PlainReader(files)()
        good.close()
        sampler.stop(PATIENCE_S)


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
        sampler.stop(PATIENCE_S)
    assert found == set(tree.groups) == set(group_names(10))


def test_real_cgroups_are_gone_afterwards() -> None:
    try:
        with real_tree(4) as tree:
            roots = [mount / tree.kubelet_root.strip("/") for mount in tree.hierarchies.values()]
            assert all(tree.path(name, *tree.groups[-1]).is_dir() for name in tree.hierarchies)
    except OSError as error:
        pytest.skip(f"may not make cgroups: {error}")
    assert not any(root.exists() for root in roots)


def test_who_waits_for_the_machine_says_so() -> None:
    program = "from agent.bench.trees import machine_lock\nwith machine_lock(): pass"
    with machine_lock():
        waits = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
        assert waits.stderr is not None
        assert waits.stderr.readline().startswith(b"waiting for /tmp/drahealth-machine.lock")
        assert waits.poll() is None
    with waits:
        assert waits.wait() == 0


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


def test_a_ratio_whose_interval_holds_the_budget_is_neither_met_nor_missed() -> None:
    budgets = {"ratio": {"a.b": 1.10}}
    assert verdict(ratio_row(1.05, 1.09, 1.2), budgets)[:3] == ("1.10x", True, "1.09x")
    assert verdict(ratio_row(1.05, 1.12, 1.2), budgets)[:3] == ("1.10x", None, "1.12x")
    assert verdict(ratio_row(1.11, 1.12, 1.2), budgets)[:3] == ("1.10x", False, "1.12x")


def test_a_goal_on_a_percentile_that_is_not_known_is_neither_met_nor_missed() -> None:
    row = row_of("a.b", "", [1.0, 2.0], "s")
    unknown = verdict(row, {"goal": {"a.b": {"p99": 3.0, "why": "so"}}})
    assert unknown == ("p99 3.00 s", None, "too few to tell", "so")
    over = verdict(row, {"goal": {"a.b": {"max": 1.5, "why": "so"}}})
    assert over == ("max 1.50 s", False, "max 2.00 s", "so")
    assert verdict(row, {}).text == ""


def test_every_goal_of_this_tree_is_one_figure_and_says_why() -> None:
    goals = load()["goal"]
    for key, goal in goals.items():
        of = {*goal} - {"why"}
        assert len(of) == 1, key
        assert of < {"median", "p99", "max"}, key
        assert goal["why"], key


def test_a_table_is_replaced_where_it_stands_and_nothing_else_is_touched() -> None:
    text = '# why\n[a]\nx = 1\n\n[b."c 1.2"]\ny = 2\nz = 3\n\n[d]\n# kept\nw = 4\n'
    changed = with_table(text, 'b."c 1.2"', {"y": 5})
    assert changed == '# why\n[a]\nx = 1\n\n[b."c 1.2"]\ny = 5\n\n[d]\n# kept\nw = 4\n'
    assert tomllib.loads(with_table(text, 'b."c 2"', {"y": 5}))["b"] == {
        "c 1.2": {"y": 2, "z": 3},
        "c 2": {"y": 5},
    }


def test_each_file_of_a_sweep_is_compared_under_a_name_of_its_own() -> None:
    with scratch() as root:
        tree = write_groups(root, 4)
        sampler = open_sampler(tree)
        files = sweep_files(tree, read(sampler))
        sampler.stop(PATIENCE_S)
        values = PlainReader(files)()
        assert len(values) == len(files)
        assert {key[2] for key in flat(values)} == {"cpu_periods", "cpu_throttled"}
