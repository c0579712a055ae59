"""Benchmarks: statistics, parsers, baselines and budgets. Speed itself is not tested."""

import itertools
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from patience import PATIENCE_S

from agent.bench.file_trees import (
    cgroup_names,
    machine_lock,
    real_cgroup_tree,
    temporary_directory,
    write_cgroup_files,
    write_sysfs,
)
from agent.bench.guards import parse_callgrind
from agent.bench.processes import read_threads
from agent.bench.result import (
    ResultMismatch,
    ResultRow,
    evaluate_budgets,
    load_budgets,
    replace_table,
    row_from_ratio,
    row_from_samples,
)
from agent.bench.suites.poll import (
    KeptDescriptorReader,
    ReopeningReader,
    check_equal,
    flatten_values,
    machine_files,
    machine_values,
    open_sampler,
    read_snapshot,
    sum_of_halves,
    sweep_files,
)
from agent.bench.timing import (
    BLOCK_SAMPLES,
    Contender,
    ContenderSamples,
    MedianInterval,
    median_interval,
    outlier_share,
    paired_ratio,
    percentile,
    relative_deviation,
    round_order,
    time_contenders,
)
from agent.native.sampler import Sampler, SamplerOptions


def samples_of(*medians: float) -> ContenderSamples:
    return ContenderSamples(tuple((median,) for median in medians), 1)


# --- statistics -------------------------------------------------------------------------------------------


def test_paired_ratio_slow_round_has_no_effect() -> None:
    """The second round is twice as slow for both contenders."""
    assert paired_ratio(samples_of(11, 22, 11), samples_of(10, 20, 10)) == MedianInterval(1.1, 1.1, 1.1)


def test_interval_contains_median_and_narrows_with_more_values() -> None:
    few, many = median_interval(range(20)), median_interval([n / 50 for n in range(1000)])
    assert few.low < few.median == 9.5 < few.high
    assert many.high - many.low < few.high - few.low


def test_interval_of_few_values_is_their_range() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == MedianInterval(1.0, 2.0, 3.0)
    assert median_interval([1.0]) == MedianInterval(1.0, 1.0, 1.0)


def test_percentile_of_too_few_values_is_none() -> None:
    assert percentile(range(99), 0.99) is None
    assert percentile(range(100), 0.99) == 98
    assert percentile(range(1000), 0.99) == 989


def test_outlier_affects_outlier_share_and_not_deviation() -> None:
    steady = [10.0, 10.1, 9.9, 10.0, 10.0, 10.2, 9.8]
    assert relative_deviation(steady) == pytest.approx(0.01)
    assert outlier_share(steady) == 0
    assert relative_deviation([*steady, 1000.0]) == pytest.approx(0.01)
    assert outlier_share([*steady, 1000.0]) == 1 / 8


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_contender_runs_after_each_other_one_equally_often(count: int) -> None:
    orders = [round_order(count, index) for index in range(2 * count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    followed = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert followed == Counter(dict.fromkeys(itertools.permutations(range(count), 2), 2))


def test_race_changes_the_order_and_times_each_contender_in_every_round() -> None:
    calls: list[str] = []
    run = time_contenders(
        [Contender("a", "", lambda: calls.append("a")), Contender("b", "", lambda: calls.append("b"))],
        rounds=4,
        limit_s=60.0,
        pause_s=1e-9,
    )
    assert {key: len(timing.blocks) for key, timing in run.timed.items()} == {"a": 4, "b": 4}
    assert len(run.reference) == 4 * BLOCK_SAMPLES
    assert calls[:8] == ["a", "b", "b", "a", "b", "a", "a", "b"]


# --- baselines and trees ------------------------------------------------------------------------------


def fixture_sampler(root: Path) -> Sampler:
    sampler = Sampler(SamplerOptions(sysfs_root=root, cgroupfs_root=root / "none"))
    sampler.run_pass()
    return sampler


def test_python_readers_return_the_values_of_the_core() -> None:
    with temporary_directory() as root:
        write_sysfs(root)
        files = machine_files(root)
        good = KeptDescriptorReader(files)
        sampler = fixture_sampler(root)
        core = machine_values(read_snapshot(sampler))
        assert len(core) == 3
        assert core == good() == ReopeningReader(files)()
        good.close()
        sampler.stop(PATIENCE_S)


def test_check_equal_different_value_raises_and_names_it() -> None:
    with pytest.raises(ResultMismatch, match=r"workload pass: value 2048/0/nr: the C core read 8, Python 7"):
        check_equal("pass", {("2048", "0", "nr"): 8}, {("2048", "0", "nr"): 7})
    with pytest.raises(ResultMismatch, match=r"value cpus/online: the C core read 3, Python None"):
        check_equal("pass", {("cpus", "online"): 3}, {})


def test_core_finds_all_groups_of_a_file_tree() -> None:
    with temporary_directory() as root:
        tree = write_cgroup_files(root, 10)
        sampler = open_sampler(tree)
        found = {(group.pod_uid, group.container) for group in read_snapshot(sampler).groups}
        sampler.stop(PATIENCE_S)
    assert found == set(tree.groups) == set(cgroup_names(10))


def test_real_tree_removes_its_cgroups() -> None:
    try:
        with real_cgroup_tree(4) as tree:
            roots = [mount / tree.kubelet_root.strip("/") for mount in tree.hierarchies.values()]
            assert all(tree.path(name, *tree.groups[-1]).is_dir() for name in tree.hierarchies)
    except OSError as error:
        pytest.skip(f"may not make cgroups: {error}")
    assert not any(root.exists() for root in roots)


def test_machine_lock_held_by_another_process_prints_wait_message() -> None:
    program = "from agent.bench.file_trees import machine_lock\nwith machine_lock(): pass"
    with machine_lock():
        waiter = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
        assert waiter.stderr is not None
        assert waiter.stderr.readline().startswith(b"waiting for /tmp/drahealth-machine.lock")
        assert waiter.poll() is None
    with waiter:
        assert waiter.wait() == 0


def test_parse_callgrind_separates_own_cost_from_callees() -> None:
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


def test_threads_of_this_process_have_cpu_time() -> None:
    before = read_threads(int(Path("/proc/self").readlink().name))
    assert {thread.name for thread in before.values()} >= {"main"}
    assert all(thread.run_ns > 0 for thread in before.values() if thread.name == "main")


# --- budgets ----------------------------------------------------------------------------------------------


def ratio_row(low: float, median: float, high: float) -> ResultRow:
    return ResultRow(
        "a.b",
        "",
        "s",
        (1.0,),
        MedianInterval(1.0, 1.0, 1.0),
        None,
        1.0,
        ratio=MedianInterval(low, median, high),
    )


def test_ratio_interval_around_budget_is_undecided() -> None:
    budgets = {"ratio": {"a.b": 1.10}}
    assert evaluate_budgets(ratio_row(1.05, 1.09, 1.2), budgets)[0][:3] == ("1.10x", True, "1.09x")
    assert evaluate_budgets(ratio_row(1.05, 1.12, 1.2), budgets)[0][:3] == ("1.10x", None, "1.12x")
    assert evaluate_budgets(ratio_row(1.11, 1.12, 1.2), budgets)[0][:3] == ("1.10x", False, "1.12x")


def test_goal_on_unknown_percentile_is_undecided() -> None:
    row = row_from_samples("a.b", "", [1.0, 2.0], "s")
    unknown = evaluate_budgets(row, {"goal": {"a.b": {"p99": 3.0, "why": "so"}}})
    assert unknown == [("p99 3.00 s", None, "too few samples", "so")]
    over = evaluate_budgets(row, {"goal": {"a.b": {"max": 1.5, "why": "so"}}})
    assert over == [("max 1.50 s", False, "max 2.00 s", "so")]
    assert evaluate_budgets(row, {}) == []


def test_row_with_ratio_and_two_goals_has_three_verdicts() -> None:
    goal = {"median": 2.0, "max": 0.5, "why": "so"}
    verdicts = evaluate_budgets(ratio_row(1.0, 1.0, 1.0), {"ratio": {"a.b": 1.10}, "goal": {"a.b": goal}})
    assert [(verdict.text, verdict.met) for verdict in verdicts] == [
        ("1.10x", True),
        ("2.00 s", True),
        ("max 500 ms", False),
    ]


def test_goal_of_ratios_within_their_interval_is_undecided() -> None:
    row = row_from_ratio("a.b", "", samples_of(3, 2, 4), samples_of(2, 2, 2))
    assert row.values == (1.5, 1.0, 2.0)
    for limit, met in ((1.5, True), (1.25, None), (0.9, False)):
        verdict = evaluate_budgets(row, {"goal": {"a.b": {"median": limit, "why": "so"}}})[0]
        assert verdict[:3] == (f"{limit:.2f}x", met, "1.50x")


def test_sum_of_halves_is_half_of_each_sweep() -> None:
    assert sum_of_halves({"core": samples_of(1, 2), "none": samples_of(5, 4)}).medians() == [3, 3]


def test_goals_have_statistics_and_a_reason() -> None:
    goals = load_budgets()["goal"]
    for key, goal in goals.items():
        statistics = {*goal} - {"why"}
        assert statistics, key
        assert statistics <= {"median", "p99", "max"}, key
        assert goal["why"], key


def test_replace_table_changes_only_that_table() -> None:
    text = '# why\n[a]\nx = 1\n\n[b."c 1.2"]\ny = 2\nz = 3\n\n[d]\n# kept\nw = 4\n'
    changed = replace_table(text, 'b."c 1.2"', {"y": 5})
    assert changed == '# why\n[a]\nx = 1\n\n[b."c 1.2"]\ny = 5\n\n[d]\n# kept\nw = 4\n'
    assert tomllib.loads(replace_table(text, 'b."c 2"', {"y": 5}))["b"] == {
        "c 1.2": {"y": 2, "z": 3},
        "c 2": {"y": 5},
    }


def test_sweep_files_have_distinct_keys() -> None:
    with temporary_directory() as root:
        tree = write_cgroup_files(root, 4)
        sampler = open_sampler(tree)
        files = sweep_files(tree, read_snapshot(sampler))
        sampler.stop(PATIENCE_S)
        values = ReopeningReader(files)()
        assert len(values) == len(files)
        assert {key[2] for key in flatten_values(values)} == {"cpu_periods", "cpu_throttled"}
