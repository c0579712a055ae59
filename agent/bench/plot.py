"""Plots for ``--plot FILE.svg``, drawn by matplotlib: an overview on one screen, and all distributions.

In the second plot, tables with an independent variable are curves with confidence intervals; tables of times
are empirical distributions. A comparison is a list of ratios. Equal results give equal files.
"""

import io
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from textwrap import fill
from typing import Any, Final, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator, PercentFormatter, StrMethodFormatter

from agent.bench.result import (
    ResultRow,
    SuiteOutcome,
    Unit,
    find_goals,
    format_value,
    short_labels,
    unit_scale,
)
from agent.bench.revisions import RevisionComparison

GREY: Final = "#6e7781"
COLOURS: Final = ("#0969da", "#1a7f37", "#bc4c00", "#8250df", "#1b7c83", "#bf3989", "#9a6700", "#cf222e")
VERDICT_COLOURS: Final = {"less": "#1a7f37", "more": "#cf222e", "": GREY}
STYLE: Final[Any] = {
    "axes.edgecolor": "#8c959f",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlepad": 14,
    "font.size": 8,
    "grid.alpha": 0.3,
    "path.simplify_threshold": 0.5,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "drahealth",  # without it, identifiers in the file are random
    "text.parse_math": False,
}
CAPTION: Final = (
    "Steps: share of samples up to this value. Points: medians with 95 % intervals. "
    "Grey: lower bound. Dashes: budgets."
)
COLUMNS: Final = 2
PANEL_INCHES: Final = (4.8, 3.2)
TITLE_CHARACTERS: Final = 56
LOG_FROM: Final = 8
"""Ratio of largest to smallest value from which an axis is logarithmic."""
DECADES_FROM: Final = 100
"""Ratio of largest to smallest value from which the ticks of a logarithmic axis are powers of ten."""
SAMPLES_MIN: Final = 10
"""Number of samples that each result row needs for a distribution."""
EDGE_MIN: Final = 1.15
"""Smallest ratio at the right edge of the plot that compares two revisions."""
COMPARISON_STEPS: Final = (1.05, 1.1, 1.25, 1.5, 2, 4, 16)
"""Possible ratios of two neighbouring ticks in the plot that compares two revisions.
The smallest ratio that gives few ticks is used."""
TICKS_PER_SIDE: Final = 4
LOWER_BOUND: Final = "lower bound"


def plot_suites(outcomes: Mapping[str, SuiteOutcome], budgets: Mapping[str, Any]) -> str:
    """Plot the results of all suites; return the content of an SVG file."""
    with mpl.rc_context(STYLE):
        panels = list(_panels(outcomes, budgets))
        rows = max(1, -(-len(panels) // COLUMNS))
        width, height = PANEL_INCHES
        figure = Figure((COLUMNS * width, rows * height + 0.3), layout="constrained")
        figure.suptitle(CAPTION, x=0.01, ha="left", fontsize=8)
        for number, (title, draw) in enumerate(panels, 1):
            axes = figure.add_subplot(rows, COLUMNS, number)
            axes.set_title(fill(title, TITLE_CHARACTERS))
            draw(axes)
        return _render_svg(figure)


def _panels(
    outcomes: Mapping[str, SuiteOutcome], budgets: Mapping[str, Any]
) -> Iterator[tuple[str, Callable[[Axes], None]]]:
    """Yield the title and the drawing function of each panel of the plot."""
    for name, outcome in outcomes.items():
        for table in outcome.tables:
            title = f"{name}: {table.full_title}"
            curves = [row for row in table.rows if row.x is not None]
            for unit in dict.fromkeys(row.unit for row in curves):
                rows = [row for row in curves if row.unit == unit]
                yield title, partial(_draw_curves, rows, unit, table.grows_with, budgets)
            times = [row for row in table.rows if row.unit == "s" and row.x is None and len(row.values) > 1]
            if times and min(len(row.values) for row in times) >= SAMPLES_MIN:
                yield title, partial(_draw_distributions, times, budgets)


def _draw_distributions(rows: Sequence[ResultRow], budgets: Mapping[str, Any], axes: Axes) -> None:
    names = short_labels([row.label for row in rows])
    values = [value for row in rows for value in row.values]
    for row, name, colour in zip(rows, names, series_colours(names), strict=True):
        axes.ecdf(row.values, label=name, color=colour, compress=True)
        for goal in find_goals(row, budgets):
            values.append(goal.limit)
            axes.axvline(goal.limit, color=colour, linestyle="--")
            text, at = goal.describe(goal.limit, "s"), (goal.limit, 1.02)
            axes.annotate(text, at, xycoords=("data", "axes fraction"), ha="center", fontsize=7)
    _scale_axis(axes, "x", values, "s")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(loc="best")


def _draw_curves(
    rows: Sequence[ResultRow], unit: Unit, grows_with: str, budgets: Mapping[str, Any], axes: Axes
) -> None:
    # bytes are plotted in MiB, because ticks are powers of ten
    divisor, unit_name = unit_scale(max(row.max for row in rows), unit) if unit == "B" else (1, unit)
    series: dict[str, list[ResultRow]] = {}
    for row in sorted(rows, key=lambda row: row.x or 0):
        series.setdefault(row.label.replace(f"{row.x:g} {grows_with}", "").strip(" ,"), []).append(row)
    limits = []
    for (name, points), colour in zip(series.items(), series_colours(list(series)), strict=True):
        xs = [point.x or 0.0 for point in points]
        low, middle, high = zip(
            *([value / divisor for value in point.median] for point in points), strict=True
        )
        axes.plot(xs, middle, marker="o", markersize=3, color=colour, label=name)
        axes.vlines(xs, low, high, color=colour)
        for x, point in zip(xs, points, strict=True):
            for goal in find_goals(point, budgets):
                limits.append(goal.limit / divisor)
                axes.plot(x, limits[-1], marker="_", markersize=18, color=colour)
                text, at = goal.describe(goal.limit, unit), (x, limits[-1])
                axes.annotate(text, at, (0, 3), textcoords="offset points", ha="center", fontsize=7)
    _scale_axis(axes, "x", [row.x or 0 for row in rows], "1")
    values = [value / divisor for row in rows for value in row.median]
    _scale_axis(axes, "y", [*values, *limits], unit_name)
    axes.set_xlabel(grows_with)
    if len(series) > 1:
        axes.legend(loc="best")


def series_colours(names: Sequence[str]) -> Iterator[str]:
    """Return a colour for each name; grey for the lower bound."""
    others = itertools.cycle(COLOURS)
    return (GREY if name.startswith(LOWER_BOUND) else next(others) for name in names)


def _scale_axis(axes: Axes, name: Literal["x", "y"], values: Sequence[float], unit: str) -> None:
    """Make an axis logarithmic if its values are positive and far apart, else begin it at 0; format ticks."""
    axis = axes.xaxis if name == "x" else axes.yaxis
    low, high = min(values), max(values)
    if low > 0 and high / low >= LOG_FROM:
        axes.set(**{f"{name}scale": "log", f"{name}lim": (low * 0.9, high * 1.1)})
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < DECADES_FROM else (1,)))
        axis.set_minor_locator(NullLocator())
    else:
        axes.set(**{f"{name}lim": (0, high * 1.05 or 1)})
    suffix = "" if unit == "1" else f" {unit}"
    axis.set_major_formatter(EngFormatter("s") if unit == "s" else StrMethodFormatter(f"{{x:,g}}{suffix}"))


def plot_comparison(comparison: RevisionComparison) -> str:
    """Plot how benchmark figures differ between two revisions; return the content of an SVG file.

    Each figure has the ratios (after / before) of all pairs of runs, their median, and its interval.
    """
    figures = comparison.figures
    ratios = [value for figure in figures for value in (*figure.ratio, *figure.pair_ratios)]
    edge = max(EDGE_MIN, *ratios, *(1 / ratio for ratio in ratios)) * 1.02
    step = next((step for step in COMPARISON_STEPS if step**TICKS_PER_SIDE >= edge), COMPARISON_STEPS[-1])
    with mpl.rc_context(STYLE):
        plotted = Figure((9, 1 + 0.22 * len(figures)), layout="constrained")
        axes = plotted.add_subplot()
        axes.set_title(f"this tree to {comparison.before}: less is to the left")
        axes.axvline(1, color=GREY, linewidth=1)
        for line, figure in enumerate(figures):
            colour = VERDICT_COLOURS[figure.verdict]
            low, middle, high = figure.ratio
            axes.scatter(figure.pair_ratios, [line] * len(figure.pair_ratios), s=4, color=GREY)
            axes.hlines(line, low, high, color=colour)
            axes.scatter(middle, line, s=20, color=colour)
            text = f" {middle - 1:+.1%} {figure.verdict}"
            axes.text(1, line, text, transform=axes.get_yaxis_transform(), va="center")
        axes.set(xscale="log", xlim=(1 / edge, edge), ylim=(len(figures) - 0.5, -0.5))
        axes.set_yticks(range(len(figures)), [figure.key for figure in figures])
        ticks = [step**power for power in range(-TICKS_PER_SIDE, TICKS_PER_SIDE + 1)]
        ticks = [tick for tick in ticks if 1 / edge <= tick <= edge]
        axes.set_xticks(ticks, [f"{tick - 1:+.0%}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        return _render_svg(plotted)


def _render_svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Title": "drahealth bench"})
    return text.getvalue()


# --- overview ----------------------------------------------------------------------------------------------

SCREEN_STYLE: Final[Any] = STYLE | {"font.size": 11, "axes.titlesize": 13, "legend.fontsize": 9}
BAR_LABEL: Final[Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
OVERVIEW_CAPTION: Final = "Grey in bars of hops and of threads: lower bound. Dashes: budget."
HOPS_WITH_BOUND: Final = {"woken": "trio", "client": "socket"}
"""Hops of a change whose lower bound is measured, with the key of the bound."""


def plot_overview(
    header: Sequence[str], outcomes: Mapping[str, SuiteOutcome], budgets: Mapping[str, Any]
) -> str:
    """Plot the main costs of the suites that ran on one screen; return the content of an SVG file."""
    rows = {row.key: row for outcome in outcomes.values() for table in outcome.tables for row in table.rows}
    groups = [group for group in _overview_groups(rows, budgets) if group]
    is_odd = len(groups) % 2
    with mpl.rc_context(SCREEN_STYLE):
        figure = Figure((16, 10), layout="constrained")
        caption = OVERVIEW_CAPTION if groups else "No suite of the overview ran: trace, idle, scale."
        figure.suptitle("\n".join([*header, caption]), x=0.01, ha="left", fontsize=10)
        grid = figure.add_gridspec(-(-len(groups) // 2) or 1, 2)
        for number, group in enumerate(groups):
            line, column = divmod(number + is_odd, 2)
            cell = grid[0, :] if is_odd and number == 0 else grid[line, column]
            panels = figure.add_subfigure(cell).subplots(1, len(group), squeeze=False)[0]
            for axes, (title, draw) in zip(panels, group, strict=True):
                axes.set_title(title)
                draw(axes)
        return _render_svg(figure)


def _overview_groups(
    rows: Mapping[str, ResultRow], budgets: Mapping[str, Any]
) -> Iterator[list[tuple[str, Callable[[Axes], None]]]]:
    """Yield the neighbouring panels of each subject; none if its suite did not run."""
    hops = {key: row for key, row in rows.items() if re.fullmatch(r"trace\.\w+", key)}
    yield [("from a change to a client, medians", partial(_draw_hops, hops, rows))] if hops else []
    peers = (("idle.peers.cpu.", "idle CPU, % of one core"), ("idle.peers.pss.", "memory (PSS)"))
    for subject in (peers, (("idle.cpu", "CPU of the idle agent, % of one core"),)):
        yield [
            (title, partial(_draw_bars, found, budgets))
            for prefix, title in subject
            if (found := [row for key, row in rows.items() if key.startswith(prefix)])
        ]
    curves = [
        replace(row, label=f"{key.split('.')[1]}, by {row.label.split()[-1]}")
        for key, row in rows.items()
        if row.x is not None and key.startswith("scale.") and not key.startswith("scale.floor.")
    ]
    growth: tuple[tuple[Unit, str], ...] = (("s", "growth of durations"), ("B", "growth of memory (RSS)"))
    yield [
        (title, partial(_draw_curves, found, unit, "devices, cgroups or pods", budgets))
        for unit, title in growth
        if (found := [row for row in curves if row.unit == unit])
    ]


def _draw_hops(hops: Mapping[str, ResultRow], rows: Mapping[str, ResultRow], axes: Axes) -> None:
    """Draw each hop of a change where the previous one ends, with its lower bound; draw the sums last."""
    start = 0.0
    sums = {"all": 0.0, "wake": next(iter(hops.values())).median.median}
    for line, (key, row) in enumerate(hops.items()):
        name, duration = key.removeprefix("trace."), row.median.median
        left = sums.get(name, start)
        axes.barh(line, duration, left=left, color=COLOURS[1 if name in sums else 0])
        text = format_value(duration, "s")
        if bound := rows.get(f"trace.bare.{HOPS_WITH_BOUND.get(name)}"):
            axes.barh(line, bound.median.median, left=left, height=0.4, color=GREY)
            text += f", lower bound {format_value(bound.median.median, 's')}"
        axes.annotate(text, (left + duration, line), **BAR_LABEL)
        start += duration
    _list_bars(axes, short_labels([row.label for row in hops.values()]), 0.4)
    axes.xaxis.set_major_formatter(EngFormatter("s"))


def _draw_bars(rows: Sequence[ResultRow], budgets: Mapping[str, Any], axes: Axes) -> None:
    """Draw a bar for each row, the first one in another colour, with values and goals."""
    names = [
        name.replace("CPU, % of one core", "total") for name in short_labels([row.label for row in rows])
    ]
    for line, (row, name) in enumerate(zip(rows, names, strict=True)):
        colour = GREY if name.startswith(LOWER_BOUND) else COLOURS[2 if line else 0]
        axes.barh(line, row.max, color=colour)
        axes.annotate(format_value(row.max, row.unit), (row.max, line), **BAR_LABEL)
        for goal in find_goals(row, budgets):
            axes.axvline(goal.limit, color=colour, linestyle="--")
    _list_bars(axes, names, 0.25)
    axes.xaxis.set_visible(False)


def _list_bars(axes: Axes, names: Sequence[str], margin: float) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, axes.dataLim.xmax * (1 + margin) or 1)
