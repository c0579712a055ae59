"""Output of the benchmarks: text, Markdown, JSON of pyperf, plots, and the command."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import pytest
from patience import PATIENCE_S

from agent.bench import report
from agent.bench.main import main
from agent.bench.plot import GREY, plot_comparison, plot_overview, plot_suites, series_colours
from agent.bench.report import HostFacts
from agent.bench.result import (
    ResultRow,
    ResultTable,
    SuiteOutcome,
    Unit,
    format_value,
    row_from_samples,
    rows_from_race,
)
from agent.bench.revisions import FigureComparison, RevisionComparison
from agent.bench.timing import ContenderSamples, InterleavedTimings, MedianInterval

HOST: Final = HostFacts(
    date="2026-11-22 10:00 UTC",
    version="1.0",
    cpu="a CPU",
    cpus=2,
    governor="performance",
    kernel="6.18",
    python="3.11.7",
    compiler="gcc 12.2.0",
    flags="-O2",
    load="0.10",
)
LABELS: Final = {
    "core": "core: C",
    "floor": "lower bound: bare system calls",
    "psutil": "psutil 7.2.2: other files, with interval=None",
    "slow": "plain Python",
}
SVG: Final = "{http://www.w3.org/2000/svg}"


def samples_of(*medians: float, memory: int | None = None) -> ContenderSamples:
    return ContenderSamples(tuple((median,) for median in medians), 1, memory)


def race_table(rounds: int = 2) -> ResultTable:
    """Return a race: core 1.1 times the lower bound, psutil 5.5 times, plain Python 22 times."""
    times = {"core": 11.0, "floor": 10.0, "psutil": 55.0, "slow": 220.0}
    found = {
        key: samples_of(*(time * n for n in range(1, rounds + 1)), memory=64) for key, time in times.items()
    }
    return ResultTable(
        "pass",
        rows_from_race("poll.pass.warm", InterleavedTimings(LABELS, found, ()), "floor"),
        LABELS["floor"],
        ("equal",),
    )


def curve_table() -> ResultTable:
    rows = []
    for size in (1, 8, 64):
        middle = MedianInterval(size * 1e-6, size * 1.1e-6, size * 1.2e-6)
        rows.append(
            ResultRow(f"scale.{size}", f"{size} devices", "s", (1e-6,), middle, None, 1.0, x=float(size))
        )
    return ResultTable("growth", tuple(rows), grows_with="devices")


def outcome() -> SuiteOutcome:
    idle = (
        row_from_samples("idle.cpu", "CPU", [0.2], "%"),
        row_from_samples("idle.rss", "RSS", [39 << 20], "B"),
    )
    idle += (row_from_samples("idle.wakes", "wakes", [0], "1"),)
    return SuiteOutcome([race_table(), ResultTable("idle", idle)], ["x: no x here"], [5.0, 5.0])


# --- text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (14.7e-6, "s", "14.7 us"),
        (0.0123, "s", "12.3 ms"),
        (2.5e-10, "s", "0.25 ns"),
        (38.2 * (1 << 20), "B", "38.2 MiB"),
        (705, "B", "705 B"),
        (0.123, "%", "0.12 %"),
        (1509, "1", "1,509"),
        (1.204, "x", "1.20x"),
    ],
)
def test_format_value_has_three_digits_and_a_unit(value: float, unit: Any, text: str) -> None:
    assert format_value(value, unit) == text


def lines_of(*tables: ResultTable, budgets: Any = None) -> list[str]:
    return report.text_report(HOST, {"poll": SuiteOutcome([*tables])}, budgets or {}).splitlines()


def grid_of(table: ResultTable) -> list[str]:
    """Return the heading and rows of a table as printed."""
    lines = lines_of(table)
    begin = lines.index(f"poll: {table.title}") + 1
    return lines[begin : begin + 1 + len(table.rows)]


def test_text_report_has_ratios_verdicts_and_skipped_measurements() -> None:
    budgets = {"ratio": {"poll.pass.warm.core": 1.05}, "goal": {"idle.cpu": {"max": 0.25, "why": "so"}}}
    lines = report.text_report(HOST, {"poll": outcome()}, budgets).splitlines()
    core = next(line for line in lines if line.startswith("  core"))
    assert core.split()[-5:] == ["1.10x", "64", "B", "1.05x", "OVER"]
    assert next(line for line in lines if line.startswith("  CPU")).endswith("max 0.25 %  ok")
    assert any(line.startswith("stability of medians: good") for line in lines)
    assert "  poll.pass.warm.core       1.05x       1.10x  OVER" in lines
    assert "not measured: x: no x here" in lines
    assert lines[-1] == "budgets: 1 met, 1 over (1 figure: poll.pass.warm.core)"


def test_budget_whose_key_no_figure_has_is_named() -> None:
    goal = {"max": 1.0, "why": "so"}
    budgets = {"ratio": {"poll.pass.warm.croe": 1.05}, "goal": {"poll.x": goal, "soak.rss": goal}}
    lines = lines_of(race_table(), budgets=budgets)
    assert lines[-1] == "budgets: 0 met, 0 over; 2 unused (2 figures: poll.pass.warm.croe, poll.x)"


def test_figure_with_too_few_samples_is_unsure() -> None:
    lines = lines_of(race_table(), budgets={"goal": {"poll.pass.warm.core": {"p99": 1.0, "why": "so"}}})
    assert any(line.startswith("  core") and line.endswith("p99 1.00 s  unsure") for line in lines)
    assert lines[-1] == "budgets: 0 met, 0 over; 1 unsure (1 figure: poll.pass.warm.core)"


def test_row_with_two_goals_has_a_verdict_for_each() -> None:
    goal = {"median": 1.0, "p99": 1.0, "why": "so"}
    lines = lines_of(race_table(), budgets={"goal": {"poll.pass.warm.core": goal}})
    assert any(line.endswith("1.00 s, p99 1.00 s  ok, unsure") for line in lines)
    assert lines[-1] == "budgets: 1 met, 0 over; 1 unsure (1 figure: poll.pass.warm.core)"


def test_summary_counts_budgets_and_figures_of_exceeded_budgets() -> None:
    goal = {"median": 1e-9, "max": 1e-9, "why": "so"}
    lines = lines_of(race_table(), budgets={"goal": {"poll.pass.warm.core": goal}})
    assert lines[-1] == "budgets: 0 met, 2 over (1 figure: poll.pass.warm.core)"


def test_table_remark_compares_core_with_each_alternative() -> None:
    """The lower bound is no alternative; descriptions of contenders are printed below."""
    lines = lines_of(race_table())
    assert "    core: 5.0x less than psutil 7.2.2, 20x less than plain Python" in lines
    assert "    psutil 7.2.2: other files, with interval=None" in lines


def test_table_remark_omits_other_rows_of_core_and_bare_system_calls() -> None:
    labels = {
        "half": "core: half of the files are held",
        "opens": "bare system calls: openat, read and close",
    }
    table = race_table()
    more = [row_from_samples(f"poll.pass.warm.{key}", label, [3.0], "s") for key, label in labels.items()]
    lines = lines_of(replace(table, rows=(*table.rows, *more)))
    assert "    core: 5.0x less than psutil 7.2.2, 20x less than plain Python" in lines


def test_format_factor_states_more_and_less() -> None:
    assert report.format_factor(0.5) == "2.0x more"
    assert report.format_factor(1.25) == "1.2x less"


def test_empty_columns_are_left_out() -> None:
    heading, row = grid_of(ResultTable("idle", (row_from_samples("idle.rss", "RSS", [1], "B"),)))
    assert heading.split() == ["figure"], "one value has no median"
    assert row.split() == ["RSS", "1", "B"]


def test_rows_with_ambiguous_names_have_full_labels() -> None:
    rows = (
        row_from_samples("a", "8 pods: explain", [1], "s"),
        row_from_samples("b", "8 pods: read", [2], "s"),
    )
    assert [line.split("  ")[1] for line in grid_of(ResultTable("t", rows))[1:]] == [
        row.label for row in rows
    ]


def test_text_report_fits_100_columns() -> None:
    """The table has a long name, more than a hundred samples, and all columns."""
    rows = [replace(row, p99=9.99e-6, label="Google's protobuf 7.36.2: all") for row in race_table().rows]
    long = ResultTable("word " * 40, tuple(rows), LABELS["floor"], ("word " * 60,))
    assert max(map(len, lines_of(long, budgets={"ratio": {"poll.pass.warm.core": 1.05}}))) <= 100


def test_unstable_run_names_the_unreliable_figures() -> None:
    slow, with_outliers = (
        report.stability_lines([1.0, 1.5] * 50),
        report.stability_lines([1.0] * 98 + [9.0] * 2),
    )
    assert slow[0].startswith(
        "stability of medians: POOR: only ratios are reliable (median absolute deviation of 100 samples"
    )
    assert slow[1].startswith("stability of tails: p99 is reliable, max may be noise of the machine (0.0%")
    assert with_outliers[0].startswith("stability of medians: good (median absolute deviation of 100 samples")
    assert with_outliers[1].startswith("stability of tails: p99 and max are noise of the machine (2.0%")
    assert report.stability_lines([]) == ("stability: unknown; no suite timed a loop",)


def table_of_size(size: int, *labels: str, notes: tuple[str, ...] = ()) -> ResultTable:
    rows = tuple(row_from_samples(f"a.{size}.{label[0]}", label, [1.0, 2.0], "s") for label in labels)
    return ResultTable(f"{size} devices", rows, "floor", notes, "devices")


def test_common_remarks_of_a_section_are_printed_once() -> None:
    """A description is common if it is below each table with its contender; different remarks are not."""
    tables = (
        table_of_size(1, "core: C", "plain: Python", notes=("equal", "1 read")),
        table_of_size(8, "core: C", notes=("equal", "8 reads")),
        table_of_size(9, "core: C", "good: 9 kept", "plain: Python", notes=("equal", "9 reads")),
        table_of_size(10, "core: C", "good: 10 kept", notes=("equal", "10 reads")),
    )
    (section,) = report.group_by_section(tables)
    assert section.common == ("ratio to floor", "core: C", "plain: Python", "equal")
    lines = lines_of(*tables)
    begin = lines.index("poll: devices")
    assert [line.strip() for line in lines[begin + 1 : begin + 5]] == [*section.common]
    assert sum("plain: Python" in line for line in lines) == 1
    assert "    good: 9 kept" in lines
    assert "    10 reads" in lines


def test_tables_without_section_have_no_common_remarks() -> None:
    alone = [section.common for section in report.group_by_section((race_table(), curve_table()))]
    assert alone == [()]


# --- Markdown ---------------------------------------------------------------------------------------------


def test_markdown_rows_have_the_columns_of_their_heading() -> None:
    plots = (Path("docs/a.svg"), Path("docs/b.svg"))
    lines = report.markdown_report(HOST, {"poll": outcome()}, {}, plots).splitlines()
    assert lines.index("![Overview](a.svg)") < lines.index("## Summary")
    assert lines[-1] == "![Distributions and curves](b.svg)"
    tables = [line for line in lines if line.startswith("|")]
    assert len(tables) == 2 * 2 + 4 + 3, "two headings with separators, and seven figures"
    assert [line.count("|") for line in tables] == [7] * 6 + [3] * 5


def test_markdown_begins_with_the_summary() -> None:
    budgets = {"ratio": {"poll.pass.warm.core": 1.05}, "goal": {"idle.cpu": {"max": 0.25, "why": "a timer"}}}
    lines = report.markdown_report(HOST, {"poll": outcome()}, budgets).splitlines()
    begin = lines.index("## Summary")
    assert lines[begin + 2] == "budgets: 1 met, 1 over (1 figure: poll.pass.warm.core)"
    assert lines[begin + 4] == "|  | budget | measured |  | reason |"
    assert lines[begin + 7] == "| idle.cpu | max 0.25 % | max 0.20 % | ok | a timer |"
    assert begin < lines.index("## poll")


# --- pyperf -----------------------------------------------------------------------------------------------


def test_pyperf_reads_the_json(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(report.pyperf_document(HOST, {"poll": outcome()}))
    command = [sys.executable, "-m", "pyperf", "compare_to", "--verbose", str(file), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "poll.pass.warm.core" in done.stdout
    assert "idle.rss" in done.stdout


def test_json_has_units_of_pyperf_and_no_zero_values() -> None:
    document = json.loads(report.pyperf_document(HOST, {"poll": outcome()}))
    values = {
        benchmark["metadata"]["name"]: benchmark["runs"][0]["values"] for benchmark in document["benchmarks"]
    }
    assert values["idle.cpu"] == [pytest.approx(0.002)]
    assert values["idle.rss"] == [39 << 20]
    assert "idle.wakes" not in values, "pyperf refuses zero"


def test_json_is_read_back() -> None:
    figures = report.decode_figures(report.pyperf_document(HOST, {"poll": outcome()}))
    assert figures["poll.pass.warm.core"] == ("s", pytest.approx(16.5e-9))
    assert figures["idle.rss"] == ("B", 39 << 20)


# --- plots ------------------------------------------------------------------------------------------------


def draw(*tables: ResultTable, budgets: Any = None) -> ElementTree.Element:
    return ElementTree.fromstring(plot_suites({"poll": SuiteOutcome([*tables])}, budgets or {}))


def texts(svg: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in svg.iter(f"{SVG}text")]


def panels(svg: ElementTree.Element) -> int:
    return sum(element.get("id", "").startswith("axes_") for element in svg.iter(f"{SVG}g"))


def styles(svg: ElementTree.Element) -> list[str]:
    return [element.get("style", "") for element in svg.iter(f"{SVG}path")]


def test_plot_draws_races_as_distributions_and_growth_as_curve() -> None:
    svg = draw(race_table(20), curve_table())
    assert panels(svg) == 2
    found = texts(svg)
    assert {"poll: pass", "core", "psutil 7.2.2", "60%", "100 ns"} <= set(found)
    assert {"poll: growth", "10", "10 µs", "devices"} <= set(found)


def test_plot_lower_bound_is_grey_and_other_colours_are_distinct() -> None:
    names = [row.label for row in race_table().rows]
    for order in (names, names[::-1]):
        colours = dict(zip(order, series_colours(order), strict=True))
        assert colours[LABELS["floor"]] == GREY
        assert len({*colours.values()}) == 4


def test_plot_budget_is_a_labelled_line() -> None:
    times = {"median": 2e-7, "p99": 3e-7, "why": "so"}
    goals = {"poll.pass.warm.core": times, "scale.64": {"median": 9e-5, "why": "so"}}
    svg = draw(race_table(20), curve_table(), budgets={"goal": goals})
    assert sum("stroke-dasharray" in style for style in styles(svg)) == 2, "dashed lines in the distributions"
    assert {"200 ns", "p99 300 ns", "90.0 us"} <= {*texts(svg)}


def test_plot_table_of_too_few_samples_is_not_drawn() -> None:
    assert panels(draw(race_table(9))) == 0
    assert panels(draw(ResultTable("idle", (row_from_samples("idle.rss", "RSS", [1], "B"),)))) == 0
    sizes = tuple(float(size) for size in range(100))
    table = ResultTable("memory", (row_from_samples("a.rss", "RSS", sizes, "B"),))
    assert panels(draw(table)) == 0, "no row of times"


def test_plot_shows_markup_and_dollars_as_text() -> None:
    rows = (row_from_samples("a", "<b> & $c$", [float(n) for n in range(1, 30)], "s"),)
    assert {"poll: 1 < 2", "<b> & $c$"} <= set(texts(draw(ResultTable("1 < 2", rows), curve_table())))


@pytest.mark.parametrize("values", [(1e-6, 3e-6), (2e-9, 5.0), (0.0, 0.0), (39 << 20, 43 << 20)])
def test_plot_curve_of_any_range_is_drawn(values: tuple[float, float]) -> None:
    unit: Unit = "B" if values[0] > 1e6 else "s"
    rows = [
        ResultRow(
            f"a.{n}", f"{n} devices", unit, (value,), MedianInterval(value, value, value), None, value, x=n
        )
        for n, value in enumerate(values, 1)
    ]
    assert panels(draw(ResultTable("t", tuple(rows), grows_with="devices"))) == 1


def test_plots_of_equal_results_are_equal() -> None:
    outcomes = {"poll": SuiteOutcome([race_table(20), curve_table()])}
    assert plot_suites(outcomes, {}) == plot_suites(outcomes, {})
    figures = (
        FigureComparison("a.b", "s", (1.0,) * 6, (1.2,) * 6),
        FigureComparison("a.c", "s", (1.0,), (1.0,)),
    )
    comparison = RevisionComparison("main (5948652f)", 3, figures, ())
    assert plot_comparison(comparison) == plot_comparison(comparison)
    assert {"a.b", "+20.0% more"} <= {
        text.strip() for text in texts(ElementTree.fromstring(plot_comparison(comparison)))
    }


# --- overview ---------------------------------------------------------------------------------------------


def overview(outcomes: dict[str, SuiteOutcome], budgets: Any = None) -> ElementTree.Element:
    return ElementTree.fromstring(plot_overview(["a CPU"], outcomes, budgets or {}))


def single_rows(unit: Unit, figures: dict[str, float]) -> SuiteOutcome:
    rows = (
        row_from_samples(key, f"the {key.rpartition('.')[2]}", [value], unit)
        for key, value in figures.items()
    )
    return SuiteOutcome([ResultTable("t", tuple(rows))])


def test_overview_has_a_panel_per_subject_with_values_and_budget() -> None:
    trace = {"trace.rung": 2e-3, "trace.woken": 3e-4, "trace.all": 2.4e-3, "trace.bare.trio": 1e-4}
    idle = single_rows("%", {"idle.cpu": 0.2, "idle.cpu.main": 0.05, "idle.peers.cpu.agent": 0.3})
    idle.merge(single_rows("B", {"idle.peers.pss.agent": 31 << 20, "idle.rss": 40 << 20}))
    curve = [
        replace(
            row_from_samples(f"scale.{subject}.{size}", f"{size} devices", [size * 1e-6], "s"), x=float(size)
        )
        for subject in ("encode", "decide", "floor")
        for size in (8, 1000)
    ]
    growth = SuiteOutcome([ResultTable("t", tuple(curve))])
    budgets = {"goal": {"idle.cpu": {"max": 0.25, "why": "so"}}}
    svg = overview({"trace": single_rows("s", trace), "idle": idle, "scale": growth}, budgets)
    found = texts(svg)
    assert panels(svg) == 5, "hops, CPU and memory of peers, CPU of the agent, durations"
    assert {"2.00 ms", "300 us, lower bound 100 us", "2.40 ms"} <= {*found}
    assert {"0.20 %", "0.05 %", "0.30 %", "31 MiB"} <= {*found}
    assert {"encode, by devices", "decide, by devices"} <= {*found}
    assert "40 MiB" not in found
    assert sum("stroke-dasharray" in style for style in styles(svg)) == 1, "the budget"


def test_overview_of_other_suites_has_no_panel_and_names_its_suites() -> None:
    svg = overview({"poll": SuiteOutcome([race_table(20)])})
    assert panels(svg) == 0
    assert "No suite of the overview ran: trace, idle, scale." in texts(svg)


@pytest.mark.parametrize("suites", [("trace",), ("trace", "idle"), ("idle", "scale")])
def test_overview_of_some_suites_is_drawn_the_same_each_time(suites: tuple[str, ...]) -> None:
    every = {
        "trace": single_rows("s", {"trace.rung": 2e-3, "trace.all": 2e-3}),
        "idle": single_rows("%", {"idle.cpu": 0.0}),
        "scale": SuiteOutcome(
            [
                replace(
                    curve_table(),
                    rows=tuple(replace(row, key=f"scale.poll.{row.x:g}") for row in curve_table().rows),
                )
            ]
        ),
    }
    outcomes = {suite: every[suite] for suite in suites}
    assert panels(overview(outcomes)) == len(suites)
    assert plot_overview([], outcomes, {}) == plot_overview([], outcomes, {})


# --- the command ------------------------------------------------------------------------------------------


def bench(*arguments: str, path: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run the command; ``path`` limits the programs that it finds to one directory."""
    command = [sys.executable, "-m", "agent.bench", *arguments]
    environment = os.environ | ({"PATH": str(path)} if path else {})
    limit_s = 5 * PATIENCE_S  # it measures, perhaps after a test that holds the machine's lock
    return subprocess.run(
        command, capture_output=True, text=True, timeout=limit_s, check=False, env=environment
    )


def test_command_with_json_prints_only_json(tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    done = bench("--quick", "--json", "--suite", "encode", "--plot", str(file))
    assert done.returncode == 0, done.stderr
    assert {"encode.8.core", "encode.128.core", "encode.1000.core"} <= report.decode_figures(
        done.stdout
    ).keys()
    overview, distributions = (
        ElementTree.parse(plot).getroot() for plot in (file, file.with_name("plot-distributions.svg"))
    )
    assert panels(overview) == 0, "no suite of the overview"
    assert distributions.tag == f"{SVG}svg", "a busy machine has too few samples for a panel"


def test_failed_suite_is_named_and_other_results_are_kept(tmp_path: Path) -> None:
    """Idle needs a lower bound in C, and this compiler fails."""
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\necho no such luck >&2; exit 1\n")
    compiler.chmod(0o755)
    done = bench("--quick", "--json", "--suite", "idle", "--suite", "encode", path=tmp_path)
    assert done.returncode == 1
    assert "python -m agent.bench: idle: benchmarks/lower_bound.c: gcc failed: no such luck" in done.stderr
    assert "encode.8.core" in report.decode_figures(done.stdout)


def test_unwritable_plot_is_named_and_results_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "none" / "plot.svg"
    done = bench("--quick", "--json", "--suite", "encode", "--plot", str(file))
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == [f"python -m agent.bench: file {file}: No such file or directory"]
    assert "encode.8.core" in report.decode_figures(done.stdout)


def test_plot_without_matplotlib_fails_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["bench", "--plot", "plot.svg"])
    assert main() == 1
    assert capsys.readouterr().err == (
        "python -m agent.bench: --plot: matplotlib is not installed; run: pip install 'drahealth[bench]'\n"
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--record",), "is not installed; instructions cannot be counted\n"),
        (("--against", "HEAD"), "git is not installed\n"),
    ],
    ids=["record", "against"],
)
def test_missing_program_is_named(arguments: tuple[str, ...], error: str, tmp_path: Path) -> None:
    done = bench(*arguments, path=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith(error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--suite", "speed"), "invalid choice: 'speed'"),
        (("--check", "speed"), "no guard 'speed'; there are bytes, allocations,"),
        (("--check", "--quick"), "--check measures no suite"),
        (("--against", "HEAD", "--json"), "--json cannot be combined with --against"),
        (("--against", "HEAD", "--peers"), "--peers belongs to the suite idle"),
        (("--suite", "encode", "--peers"), "--peers belongs to the suite idle"),
        (("--check", "--peers"), "--check measures no suite"),
        (("--for", "1h"), "--for is the duration of suite soak: it needs --suite soak"),
        (("--suite", "soak", "--for", "0s"), "'0s' is not a positive duration; give one such as 10m"),
        (("--suite", "soak", "--for", "1"), "'1' is not a duration; write a number and its unit"),
    ],
)
def test_invalid_options_are_refused(arguments: tuple[str, ...], message: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert not done.stdout
