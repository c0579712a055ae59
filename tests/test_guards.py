"""Guards of the exact costs of the agent, as in ``python -m agent.bench --check``.

``test_regressions.py`` checks that guards detect planted mistakes.
"""

import select
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from patience import PATIENCE_S

from agent.bench import guards, idle_counts
from agent.bench.file_trees import temporary_directory, write_sysfs
from agent.bench.guards import KINDS, RATIOS, BudgetedFigure, GuardContext, GuardResult, select_guards
from agent.bench.result import BUDGETS_FILE, MeasurementError
from agent.bench.timing import MedianInterval
from agent.health.host.verdicts import sampler_wakes
from agent.model.time import NS
from agent.native.sampler import Sampler, SamplerOptions

ROOT: Final = Path(__file__).resolve().parents[1]
BUDGETS: Final[dict[str, Any]] = tomllib.loads((ROOT / BUDGETS_FILE).read_text())


@pytest.fixture(scope="module")
def context() -> Iterator[GuardContext]:
    with temporary_directory() as directory:
        yield GuardContext(ROOT, BUDGETS, directory)


@pytest.mark.parametrize("guard", select_guards(), ids=str)
def test_guard_meets_its_budget(context: GuardContext, guard: BudgetedFigure) -> None:
    result = guard.check(context)
    if result.met is None:
        pytest.skip(f"{guard}: {result.value}")
    assert result.met, f"{result.value}; budget {result.budget}"


def test_each_exact_budget_has_a_guard() -> None:
    """A misspelt or obsolete budget would never be checked."""
    for kind in KINDS.keys() - {"instructions", "opcodes", "ratio"}:
        assert set(BUDGETS[kind]) == set(KINDS[kind].names)
    for budgets in BUDGETS["opcodes"].values():
        assert set(budgets) == set(KINDS["opcodes"].names)
    names = set(KINDS["instructions"].names)
    for baselines in BUDGETS["instructions"].values():
        assert set(baselines) == names | {f"{name}_calls" for name in names}
    assert RATIOS.keys() <= BUDGETS["ratio"].keys()


def test_guard_without_budget_raises(tmp_path: Path) -> None:
    with pytest.raises(
        MeasurementError, match=r"benchmarks/budgets\.toml: \[bytes\] has no budget for health_8_devices"
    ):
        BudgetedFigure("bytes", "health_8_devices").check(GuardContext(ROOT, {}, tmp_path))


def test_count_below_budget_is_a_miss(tmp_path: Path) -> None:
    context = GuardContext(ROOT, {"bytes": {"health_8_devices": 377}}, tmp_path)
    assert BudgetedFigure("bytes", "health_8_devices").check(context) == GuardResult("376", "377", met=False)


def test_other_number_of_opcodes_is_a_miss(tmp_path: Path) -> None:
    python = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
    guard = BudgetedFigure("opcodes", "change")
    result = guard.check(GuardContext(ROOT, {"opcodes": {python: {"change": 1000}}}, tmp_path))
    assert (result.met, result.budget) == (False, "1,000")
    result = guard.check(GuardContext(ROOT, {"opcodes": {}}, tmp_path))
    assert result.met is None
    assert f"no budget for {python}" in result.value


def test_delayed_count_of_opcodes_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = iter(["", "", "1000"])
    monkeypatch.setattr(idle_counts, "_run_workload", lambda _: next(printed))
    assert idle_counts.count_change_opcodes("change") == 1000
    monkeypatch.setattr(idle_counts, "_run_workload", lambda _: "")
    with pytest.raises(idle_counts.CountDelayed, match=r"opcodes\.change: a pass took over 1 s in each of"):
        idle_counts.count_change_opcodes("change")


def test_count_of_opcodes_with_a_late_pass_prints_nothing(tmp_path: Path) -> None:
    program = "from agent.bench import idle_counts as counts; counts.FRESH_S = -1.0; "
    program += f"counts._print_opcodes({str(tmp_path)!r}, '', 0, 'change')"
    assert idle_counts.run_python(["-c", program]) == ""


def test_more_modules_than_budgeted_are_a_miss(tmp_path: Path) -> None:
    guard = BudgetedFigure("modules", "nvml_process")
    assert guard.check(GuardContext(ROOT, {"modules": {"nvml_process": 20}}, tmp_path)).met is False
    assert guard.check(GuardContext(ROOT, {"modules": {"nvml_process": 1000}}, tmp_path)).met is True


@pytest.mark.parametrize(
    ("median", "others", "met"),
    [(1.05, 1.0, True), (2.0, 1.0, None), (2.0, 0.0, False), (1.05, 0.0, True)],
    ids=["met next to others", "over next to others", "over alone", "met alone"],
)
def test_ratio_over_its_budget_is_a_miss_only_without_other_programs(
    median: float, others: float, met: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratio = MedianInterval(median, median, median)
    monkeypatch.setattr(guards, "_measure_next_to_others", lambda _: (ratio, others))
    context = GuardContext(ROOT, {"ratio": {"poll.pass.warm.core": 1.1}}, tmp_path)
    assert BudgetedFigure("ratio", "poll.pass.warm.core").check(context).met is met


@pytest.mark.parametrize(("misses", "met"), [(0, True), (guards.COUNT_TRIES - 1, True), (9, False)])
def test_count_is_a_miss_only_in_each_of_several_counts(
    misses: int, met: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a lock or a wait is in some counts."""
    counts = iter([*[{"futex": 0.02}] * misses, {}])
    monkeypatch.setattr(guards, "count_system_calls", lambda *_: next(counts))
    monkeypatch.setattr(GuardContext, "driver", None)
    context = GuardContext(ROOT, {"system_calls": {"pass_8_gpus": {}}}, tmp_path)
    assert BudgetedFigure("system_calls", "pass_8_gpus").check(context).met is met


def sleep_for_a_second() -> MedianInterval:
    time.sleep(1)
    return MedianInterval(1, 1, 1)


def test_busy_loop_of_another_program_counts_as_use_of_a_cpu() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as loop:
        try:
            measured, used = guards._measure_next_to_others(sleep_for_a_second)
        finally:
            loop.kill()
    assert measured.median == 1
    assert used > guards.OTHERS_MAX


def test_guard_with_missing_tool_is_neither_met_nor_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert guards.compiler() == "no-such-compiler"
    result = BudgetedFigure("allocations", "pass").check(GuardContext(ROOT, BUDGETS, tmp_path))
    assert result == GuardResult("no-such-compiler is not installed", "", None)


def test_changed_file_wakes_python() -> None:
    """A broken descriptor would also pass the guard of quiet passes."""
    with temporary_directory() as root:
        write_sysfs(root / "sys")
        options = SamplerOptions(
            sysfs_root=root / "sys", cgroupfs_root=root, period_ns=NS // 100, wakes=sampler_wakes(10, 60)
        )
        sampler = Sampler(options)
        try:
            sampler.start()
            assert readable(sampler, PATIENCE_S)
            sampler.clear()
            pool = root / "sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages"
            with pool.open("r+b", buffering=0) as file:
                file.write(b"7\n")
            assert readable(sampler, PATIENCE_S)
        finally:
            sampler.stop(PATIENCE_S)


def readable(sampler: Sampler, within_s: float) -> bool:
    return bool(select.select([sampler], [], [], within_s)[0])
