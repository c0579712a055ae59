"""What the benchmark prints and draws: for people, for Markdown, for pyperf."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import pytest
from patience import PATIENCE_S

from agent.bench import plot, pyperf, report
from agent.bench.host import Host
from agent.bench.plot import distribution
from agent.bench.result import Outcome, Row, Table, quantity, row_of, rows_of
from agent.bench.svg import GREY, STYLE, axis_over
from agent.bench.timing import Interval, Race, Timed

HOST: Final = Host(
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
    "floor": "floor: bare system calls",
    "psutil": "psutil 7.2.2: other files, with interval=None",
    "slow": "plain Python",
}
SVG: Final = "{http://www.w3.org/2000/svg}"


def timed(*medians: float, memory: int | None = None) -> Timed:
    return Timed(tuple((median,) for median in medians), 1, memory)


def race_table(rounds: int = 2) -> Table:
    """Core at 1.1 times its floor, psutil at 5.5, plain Python at 22; each round is slower than the last."""
    times = {"core": 11.0, "floor": 10.0, "psutil": 55.0, "slow": 220.0}
    found = {key: timed(*(time * n for n in range(1, rounds + 1)), memory=64) for key, time in times.items()}
    return Table(
        "pass", rows_of("poll.pass.warm", LABELS, Race(found, ()), "floor"), LABELS["floor"], ("equal",)
    )


def curve_table() -> Table:
    rows = []
    for size in (1, 8, 64):
        middle = Interval(size * 1e-6, size * 1.1e-6, size * 1.2e-6)
        rows.append(Row(f"scale.{size}", f"{size} devices", "s", (1e-6,), middle, None, 1.0, x=float(size)))
    return Table("growth", tuple(rows), grows_with="devices")


def outcome() -> Outcome:
    idle = (row_of("idle.cpu", "CPU", [0.2], "%"), row_of("idle.rss", "RSS", [39 << 20], "B"))
    idle += (row_of("idle.wakes", "wakes", [0], "1"),)
    return Outcome([race_table(), Table("idle", idle)], ["x: no x here"], [5.0, 5.0])


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
    ],
)
def test_quantities_have_three_digits_and_a_unit(value: float, unit: Any, text: str) -> None:
    assert quantity(value, unit) == text


def lines_of(*tables: Table, budgets: Any = None) -> list[str]:
    return report.text(HOST, {"poll": Outcome([*tables])}, budgets or {}).splitlines()


def grid_of(table: Table) -> list[str]:
    """Its heading and rows, as printed."""
    lines = lines_of(table)
    begin = lines.index(f"poll: {table.title}") + 1
    return lines[begin : begin + 1 + len(table.rows)]


def test_the_report_says_ratios_verdicts_and_what_was_not_measured() -> None:
    budgets = {"ratio": {"poll.pass.warm.core": 1.05}, "goal": {"idle.cpu": {"max": 0.25, "why": "so"}}}
    lines = report.text(HOST, {"poll": outcome()}, budgets).splitlines()
    core = next(line for line in lines if line.startswith("  core"))
    assert core.split()[-5:] == ["1.10x", "64", "B", "1.05x", "OVER"]
    assert next(line for line in lines if line.startswith("  CPU")).endswith("max 0.25 %  ok")
    assert any(line.startswith("stability of medians: good") for line in lines)
    assert "  poll.pass.warm.core       1.05x       1.10x  OVER" in lines
    assert "not measured: x: no x here" in lines
    assert lines[-1] == "budgets: 1 met, 1 over: poll.pass.warm.core"


def test_a_figure_that_is_not_sure_enough_is_called_so() -> None:
    lines = lines_of(race_table(), budgets={"goal": {"poll.pass.warm.core": {"p99": 1.0, "why": "so"}}})
    assert any(line.startswith("  core") and line.endswith("p99 1.00 s  unsure") for line in lines)
    assert lines[-1] == "budgets: 0 met, 0 over; 1 unsure: poll.pass.warm.core"


def test_beside_ours_stands_how_much_less_it_takes_than_each_other() -> None:
    """The floor is no alternative; what a peer leaves out stands below."""
    lines = lines_of(race_table())
    assert "    core: 5.0x less than psutil 7.2.2, 20x less than plain Python" in lines
    assert "    psutil 7.2.2: other files, with interval=None" in lines


def test_what_is_faster_than_ours_is_said_as_plainly() -> None:
    assert report.times(0.5) == "2.0x more"
    assert report.times(1.25) == "1.2x less"


def test_a_column_in_which_nothing_stands_is_left_out() -> None:
    heading, row = grid_of(Table("idle", (row_of("idle.rss", "RSS", [1], "B"),)))
    assert heading.split() == ["figure"], "one alone is no median"
    assert row.split() == ["RSS", "1", "B"]


def test_rows_that_only_their_details_tell_apart_are_printed_with_them() -> None:
    rows = (row_of("a", "8 pods: explain", [1], "s"), row_of("b", "8 pods: read", [2], "s"))
    assert [line.split("  ")[1] for line in grid_of(Table("t", rows))[1:]] == [row.label for row in rows]


def test_the_report_fits_a_terminal_of_100_columns() -> None:
    """With as long a name as our longest, more than a hundred samples, and all columns."""
    rows = [replace(row, p99=9.99e-6, label="Google's protobuf 7.36.2: all") for row in race_table().rows]
    long = Table("word " * 40, tuple(rows), LABELS["floor"], ("word " * 60,))
    assert max(map(len, lines_of(long, budgets={"ratio": {"poll.pass.warm.core": 1.05}}))) <= 100


def test_an_unstable_run_says_which_figures_are_hurt() -> None:
    slow, shaken = report.stability([1.0, 1.5] * 50), report.stability([1.0] * 98 + [9.0] * 2)
    assert slow[0].startswith(
        "stability of medians: POOR: believe the ratios, not the times (half of 100 samples"
    )
    assert slow[1].startswith("stability of tails: p99 is ours, max may be the machine's (0.0%")
    assert shaken[0].startswith("stability of medians: good (half of 100 samples")
    assert shaken[1].startswith("stability of tails: p99 and max are the machine's (2.0%")
    assert report.stability([]) == ("stability: not known; nothing was timed in a loop",)


def sized(size: int, *labels: str, notes: tuple[str, ...] = ()) -> Table:
    rows = tuple(row_of(f"a.{size}.{label[0]}", label, [1.0, 2.0], "s") for label in labels)
    return Table(f"{size} devices", rows, "floor", notes, "devices")


def test_what_all_tables_of_a_section_say_is_said_once_above_them() -> None:
    """Of a contender that is in some of them alone, too; but not what differs from table to table."""
    tables = (
        sized(1, "core: C", "plain: Python", notes=("equal", "1 read")),
        sized(8, "core: C", notes=("equal", "8 reads")),
        sized(9, "core: C", "good: 9 kept", "plain: Python", notes=("equal", "9 reads")),
        sized(10, "core: C", "good: 10 kept", notes=("equal", "10 reads")),
    )
    (section,) = report.sections(tables)
    assert section.common == ("ratio to floor", "core: C", "plain: Python", "equal")
    lines = lines_of(*tables)
    begin = lines.index("poll: devices")
    assert [line.strip() for line in lines[begin + 1 : begin + 5]] == [*section.common]
    assert sum("plain: Python" in line for line in lines) == 1
    assert "    good: 9 kept" in lines
    assert "    10 reads" in lines


def test_tables_without_a_section_stand_alone() -> None:
    alone = [section.common for section in report.sections((race_table(), curve_table()))]
    assert alone == [()]


# --- Markdown ---------------------------------------------------------------------------------------------


def test_markdown_has_a_row_for_every_figure_as_wide_as_its_heading() -> None:
    lines = report.markdown(HOST, {"poll": outcome()}, {}, Path("docs/performance.svg")).splitlines()
    assert lines[-1] == "![All that has a shape](performance.svg)"
    tables = [line for line in lines if line.startswith("|")]
    assert len(tables) == 2 * 2 + 4 + 3, "two headings with their rules, and seven figures"
    assert [line.count("|") for line in tables] == [7] * 6 + [3] * 5


def test_the_page_begins_with_what_it_comes_to() -> None:
    budgets = {"ratio": {"poll.pass.warm.core": 1.05}, "goal": {"idle.cpu": {"max": 0.25, "why": "a timer"}}}
    lines = report.markdown(HOST, {"poll": outcome()}, budgets).splitlines()
    begin = lines.index("## What it comes to")
    assert lines[begin + 2] == "budgets: 1 met, 1 over: poll.pass.warm.core"
    assert lines[begin + 4] == "|  | budget | measured |  | because |"
    assert lines[begin + 7] == "| idle.cpu | max 0.25 % | max 0.20 % | ok | a timer |"
    assert begin < lines.index("## poll")


# --- pyperf -----------------------------------------------------------------------------------------------


def test_pyperf_itself_reads_our_json(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(pyperf.suite(HOST, {"poll": outcome()}))
    command = [sys.executable, "-m", "pyperf", "compare_to", "--verbose", str(file), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "poll.pass.warm.core" in done.stdout
    assert "idle.rss" in done.stdout


def test_json_has_pyperfs_units_and_leaves_out_what_it_cannot_hold() -> None:
    document = json.loads(pyperf.suite(HOST, {"poll": outcome()}))
    values = {one["metadata"]["name"]: one["runs"][0]["values"] for one in document["benchmarks"]}
    assert values["idle.cpu"] == [pytest.approx(0.002)]
    assert values["idle.rss"] == [39 << 20]
    assert "idle.wakes" not in values, "pyperf refuses zero"


def test_what_was_written_as_json_is_read_back() -> None:
    figures = pyperf.read(pyperf.suite(HOST, {"poll": outcome()}))
    assert figures["poll.pass.warm.core"] == ("s", pytest.approx(16.5e-9))
    assert figures["idle.rss"] == ("B", 39 << 20)


# --- plots ------------------------------------------------------------------------------------------------


def drawn(*tables: Table, budgets: Any = None) -> ElementTree.Element:
    return ElementTree.fromstring(plot.plot({"poll": Outcome([*tables])}, budgets or {}))


def texts(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


def test_a_race_is_drawn_as_distributions_and_growth_as_a_curve() -> None:
    picture = drawn(race_table(20), curve_table())
    assert len(picture.findall(f"{SVG}g")) == 2
    assert len(list(picture.iter(f"{SVG}path"))) == 4 + 1
    found = texts(picture)
    assert {"poll: pass", "core", "psutil 7.2.2", "50%", "100 ns"} <= set(found)
    assert {"poll: growth", "10", "10 us", "devices"} <= set(found)


def test_the_floor_is_grey_wherever_it_stands_and_no_two_others_look_alike() -> None:
    rows = race_table(20).rows
    for order in (rows, rows[::-1]):
        picture = drawn(Table("t", order))
        colours = dict(zip([row.key for row in order], classes(picture, "path"), strict=True))
        assert colours["poll.pass.warm.floor"] == f"curve s{GREY}"
        assert len({*colours.values()}) == 4


def classes(picture: ElementTree.Element, tag: str) -> list[str]:
    return [element.get("class", "") for element in picture.iter(f"{SVG}{tag}")]


def test_a_budget_is_a_dashed_line_that_says_how_much() -> None:
    goals = {"poll.pass.warm.core": {"p99": 3e-7, "why": "so"}, "scale.64": {"median": 9e-5, "why": "so"}}
    picture = drawn(race_table(20), curve_table(), budgets={"goal": goals})
    assert sum(kind.startswith("budget ") for kind in classes(picture, "line")) == 2
    assert {"p99 300 ns", "90.0 us"} <= {*texts(picture)}


def test_a_table_of_too_few_samples_is_not_drawn() -> None:
    assert drawn(race_table(9)).findall(f"{SVG}g") == []
    assert drawn(Table("idle", (row_of("idle.rss", "RSS", [1], "B"),))).findall(f"{SVG}g") == []
    sizes = tuple(float(size) for size in range(100))
    assert drawn(Table("memory", (row_of("a.rss", "RSS", sizes, "B"),))).findall(f"{SVG}g") == [], "no time"


def test_text_stays_text_and_nothing_in_it_is_markup() -> None:
    rows = (row_of("a", "<b> & c", [float(n) for n in range(1, 30)], "s"),)
    assert {"poll: 1 < 2", "<b> & c"} <= set(texts(drawn(Table("1 < 2", rows))))


def test_a_plot_has_colours_for_light_paper_and_for_dark_and_paints_neither() -> None:
    light, dark = STYLE.split("@media (prefers-color-scheme:dark)")
    for rule in ("text{fill", ".title{fill", ".s8{stroke", ".f8{fill"):
        assert rule in light
        assert rule in dark
    assert list(drawn(race_table(20)).iter(f"{SVG}rect")) == []


def test_a_distribution_begins_at_nothing_and_ends_with_the_largest_of_all() -> None:
    points = distribution([3.0, 1.0, 2.0] * 1000)
    assert (points[0], points[-1]) == ((1.0, 0.0), (3.0, 1.0))
    assert points == sorted(points)
    assert len(points) < 200


@pytest.mark.parametrize("values", [(1e-6, 3e-6), (2e-9, 5.0), (0.0, 0.0), (7, 7), (39 << 20, 43 << 20)])
def test_an_axis_holds_its_values_and_has_ticks_to_read_them_by(values: tuple[float, float]) -> None:
    axis = axis_over(values, 60.0, 400.0, 1 << 20 if values[0] > 1e6 else 1.0)
    assert all(60 <= axis.at(value) <= 400 for value in (*values, *axis.ticks()))
    assert 2 <= len(axis.ticks()) <= 12
    assert all(math.isfinite(tick) for tick in axis.ticks())


# --- the command ------------------------------------------------------------------------------------------


def bench(*arguments: str, path: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """With the programs of one directory alone, if it is given."""
    command = [sys.executable, "-m", "agent.bench", *arguments]
    environment = os.environ | ({"PATH": str(path)} if path else {})
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment
    )


def test_the_command_prints_json_and_nothing_else_on_standard_output(tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    done = bench("--quick", "--json", "--suite", "encode", "--plot", str(file))
    assert done.returncode == 0, done.stderr
    assert {"encode.8.core", "encode.128.core", "encode.1000.core"} <= pyperf.read(done.stdout).keys()
    assert ElementTree.parse(file).getroot().tag == f"{SVG}svg"


def test_a_suite_that_fails_is_named_and_what_the_others_found_is_kept(tmp_path: Path) -> None:
    """Idle needs a floor in C, and this compiler makes none."""
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\necho no such luck >&2; exit 1\n")
    compiler.chmod(0o755)
    done = bench("--quick", "--json", "--suite", "idle", "--suite", "encode", path=tmp_path)
    assert done.returncode == 1
    assert "python -m agent.bench: idle: benchmarks/floor.c: no such luck" in done.stderr
    assert "encode.8.core" in pyperf.read(done.stdout)


def test_a_plot_that_cannot_be_drawn_is_named_and_what_was_found_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "none" / "plot.svg"
    done = bench("--quick", "--json", "--suite", "encode", "--plot", str(file))
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == [f"python -m agent.bench: {file}: No such file or directory"]
    assert "encode.8.core" in pyperf.read(done.stdout)


@pytest.mark.parametrize("arguments", [("--record",), ("--against", "HEAD")])
def test_a_program_that_is_not_there_is_named(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = bench(*arguments, path=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("is not installed\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--suite", "speed"), "invalid choice: 'speed'"),
        (("--check", "speed"), "no guard 'speed'; there are bytes, allocations,"),
        (("--check", "--quick"), "--check measures no suite"),
        (("--against", "HEAD", "--json"), "--json has no form for --against"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: tuple[str, ...], said: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert not done.stdout
