"""``--plot FILE.svg``: an SVG with a panel for each table of curves or distributions.

Figures with an independent variable are curves with confidence intervals. Races are empirical cumulative
distributions. A comparison of two revisions is a list of ratios. The SVG paints no background and sets
colours by class, so that it is readable in light and dark mode.
"""

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final, NamedTuple

from agent.bench.against import Comparison, FigureComparison
from agent.bench.budgets import find_goal
from agent.bench.result import ResultRow, SuiteOutcome, Table, Unit, short_labels, unit_scale

# fmt: off
COLOURS: Final = (
    "#0969da", "#57606a", "#1a7f37", "#9a6700", "#cf222e", "#8250df", "#1b7c83", "#bf3989", "#24292f",
)
DARK: Final = (
    "#58a6ff", "#9ea7b3", "#3fb950", "#d29922", "#ff7b72", "#bc8cff", "#39c5cf", "#f778ba", "#e6edf3",
)
# fmt: on
GREY: Final = 1
CHAR_PX: Final = 6.1  # slightly more than the mean width of a letter at 11 px
LOG_FROM: Final = 8
"""Smallest ratio of the ends of an axis with which the axis is logarithmic."""
DECADE_TICKS_FROM: Final = 100
"""Ratio of the ends of a logarithmic axis from which its ticks are powers of ten."""

_LIGHT_INK: Final = ("#24292f", "#57606a", "#8c959f")
_DARK_INK: Final = ("#e6edf3", "#9ea7b3", "#6e7681")
_SANS: Final = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def _colour_rules(ink: Sequence[str], colours: Sequence[str]) -> str:
    title, text, line = ink
    rules = [f"text{{fill:{text}}}.title{{fill:{title}}}.axis,.grid{{stroke:{line}}}"]
    rules += [f".s{n}{{stroke:{colour}}}.f{n}{{fill:{colour}}}" for n, colour in enumerate(colours)]
    return "".join(rules)


STYLE: Final = (
    f"text{{font:11px {_SANS}}}.title{{font-weight:600;font-size:12px}}.grid{{stroke-opacity:.3}}"
    "path,line{fill:none;stroke-width:1}.curve{stroke-width:1.6}.budget{stroke-dasharray:4 3}"
    f"{_colour_rules(_LIGHT_INK, COLOURS)}"
    f"@media (prefers-color-scheme:dark){{{_colour_rules(_DARK_INK, DARK)}}}"
)


class Axis(NamedTuple):
    """Axis that maps values to pixels."""

    low: float
    high: float
    begin: float
    """Pixel of ``low``; ``end`` is the pixel of ``high`` and may be smaller."""
    end: float
    is_log: bool
    tick_unit: float = 1.0
    """Unit in which ticks are round numbers: 2 MiB is round in MiB."""

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high, position = self.low, self.high, value
        if self.is_log:
            low, high, position = math.log(low), math.log(high), math.log(value)
        return self.begin + (position - low) / (high - low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Return few round values on the axis: 1, 2 and 5 times powers of ten, or powers of ten."""
        low, high = self.low / self.tick_unit, self.high / self.tick_unit
        if self.is_log:
            steps = (1, 2, 5) if high / low <= DECADE_TICKS_FROM else (1,)
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            values = [step * 10.0**power for power in powers for step in steps]
        else:
            step = _round_step((high - low) / 5)
            values = [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
        return [value * self.tick_unit for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def axis_over(values: Sequence[float], begin: float, end: float, tick_unit: float = 1.0) -> Axis:
    """Return an axis for ``values``: logarithmic if they are positive and far apart, otherwise from 0."""
    low, high = min(values), max(values)
    if low > 0 and high / low >= LOG_FROM:
        return Axis(low * 0.9, high * 1.1, begin, end, is_log=True, tick_unit=tick_unit)
    return Axis(0.0, high * 1.05 or 1.0, begin, end, is_log=False, tick_unit=tick_unit)


def _round_step(minimum: float) -> float:
    power = 10.0 ** math.floor(math.log10(minimum))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= minimum)


def svg_text(x: float, y: float, content: str, *, anchor: str = "start", css_class: str = "") -> str:
    """Return an SVG text element; ``anchor`` (``start``, ``middle``, ``end``) is the part of the text at
    ``x``."""
    class_attribute = f' class="{css_class}"' if css_class else ""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.0f}" y="{y:.0f}"{at}{class_attribute}>{escape(content, quote=False)}</text>'


def svg_line(x1: float, y1: float, x2: float, y2: float, css_class: str) -> str:
    """Return an SVG line element."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css_class}"/>'


def svg_circle(x: float, y: float, colour: int, radius: float = 2.5) -> str:
    """Return an SVG element of a filled circle."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="f{colour}"/>'


def svg_path(points: Iterable[tuple[float, float]], colour: int) -> str:
    """Return an SVG path of straight lines through the points."""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{path}" class="curve s{colour}"/>'


def svg_step_path(points: Iterable[tuple[float, float]], colour: int) -> str:
    """Return an SVG step path: from each point right, then up to the next."""
    (x, y), *rest = points
    path = f"M{x:.1f} {y:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in rest)
    return f'<path d="{path}" class="curve s{colour}"/>'


def svg_document(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """Return a complete SVG document."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">\n<title>{escape(title, quote=False)}</title>\n'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


WIDTH: Final = 430
HEIGHT: Final = 290
COLUMNS: Final = 2
MARGIN: Final = 10
LEFT: Final = 62
RIGHT: Final = 22
BOTTOM: Final = 34
TOP: Final = 18
LINE_PX: Final = 15
CAPTION_PX: Final = 30
CAPTION: Final = (
    "Steps: share of samples up to this time. Curves: medians with 95 % intervals. "
    "Grey: lower bound. Dashed: budget."
)
GOAL_PX: Final = 14
"""Half the width of the budget line at a point of a curve."""
GOAL_TEXT_PX: Final = 40
"""Half the maximum width of the text above a budget line."""
SWATCH_PX: Final = 14
SHARES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
SAMPLES_MIN: Final = 10
"""Smallest number of samples of each result row in a drawn table."""
POINTS_MAX: Final = 150
"""Maximum number of points of a distribution, evenly by rank and including the largest sample."""
KEY_PX: Final = 260
RATIO_PX: Final = 420
VERDICT_PX: Final = 110
EDGE_MIN: Final = 1.15
"""Smallest ratio that the axis of a comparison extends to."""
PREFERRED_TICKS: Final = (1, 2, 0.5, 4, 0.25, 1.25, 0.8, 1.1, 0.9, 16, 1 / 16)
"""Preferred ticks of a comparison, most important first."""
TICK_PX: Final = 45
VERDICT_COLOURS: Final = {"less": 2, "more": 4, "": GREY}
"""Colour of a compared figure by its verdict."""
LOWER_BOUND: Final = "lower bound"


def plot(outcomes: Mapping[str, SuiteOutcome], budgets: Mapping[str, Any]) -> str:
    """Draw all panels in columns as one SVG."""
    panels = [
        panel
        for name, outcome in outcomes.items()
        for table in outcome.tables
        for panel in _panels(f"{name}: {table.full_title}", table, budgets)
    ]
    parts = [svg_text(MARGIN, TOP, CAPTION)]
    for number, panel in enumerate(panels):
        row, column = divmod(number, COLUMNS)
        at = f"{column * WIDTH} {CAPTION_PX + row * HEIGHT}"
        parts.append(f'<g transform="translate({at})">{"".join(panel)}</g>')
    height = CAPTION_PX + -(-len(panels) // COLUMNS) * HEIGHT
    return svg_document(COLUMNS * WIDTH, height, "drahealth bench", parts)


def _panels(title: str, table: Table, budgets: Mapping[str, Any]) -> Iterator[list[str]]:
    curves = [row for row in table.rows if row.x is not None]
    for unit in dict.fromkeys(row.unit for row in curves):
        yield list(
            _curves(title, table.grows_with, [row for row in curves if row.unit == unit], unit, budgets)
        )
    times = [row for row in table.rows if row.unit == "s" and row.x is None and len(row.values) > 1]
    if times and min(len(row.values) for row in times) >= SAMPLES_MIN:
        yield list(_distributions(title, times, budgets))


def _distributions(title: str, rows: Sequence[ResultRow], budgets: Mapping[str, Any]) -> Iterator[str]:
    names = short_labels([row.label for row in rows])
    heading, top = _title_and_legend(title, names)
    goals = [find_goal(row, budgets) for row in rows]
    values = [*(value for row in rows for value in row.values), *(goal.limit for goal in goals if goal)]
    x = axis_over(values, LEFT, WIDTH - RIGHT, unit_scale(max(values), "s")[0])
    y = Axis(0.0, 1.0, HEIGHT - BOTTOM, top, is_log=False)
    yield from heading
    yield from _axes(x, y, "s", [(share, f"{share:.0%}") for share in SHARES])
    for colour, row, goal in zip(_colours(names), rows, goals, strict=True):
        yield svg_step_path(((x.at(value), y.at(share)) for value, share in distribution(row.values)), colour)
        if goal:
            at = x.at(goal.limit)
            yield svg_line(at, y.begin, at, y.end, f"budget s{colour}")
            is_near_edge = at > WIDTH - RIGHT - GOAL_TEXT_PX
            goal_text = goal.describe(goal.limit, "s")
            yield svg_text(at, y.end - 3, goal_text, anchor="end" if is_near_edge else "middle")


def _colours(names: Sequence[str]) -> Iterator[int]:
    """Assign a colour to each name; the lower bound is grey."""
    other_colours = (colour for colour in range(len(COLOURS)) if colour != GREY)
    return (GREY if name.startswith(LOWER_BOUND) else next(other_colours) for name in names)


def distribution(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return the empirical distribution: values with the share of values up to each; it begins at share 0."""
    ordered = sorted(values)
    step = max(1, len(ordered) // POINTS_MAX)
    ranks = [*range(step, len(ordered), step), len(ordered)]
    return [(ordered[0], 0.0), *((ordered[rank - 1], rank / len(ordered)) for rank in ranks)]


def _curves(
    title: str, grows_with: str, rows: Sequence[ResultRow], unit: Unit, budgets: Mapping[str, Any]
) -> Iterator[str]:
    series = _series(rows, grows_with)
    heading, top = _title_and_legend(title, list(series) if len(series) > 1 else [])
    goals = {row.key: goal for row in rows if (goal := find_goal(row, budgets))}
    x = axis_over([at for points in series.values() for at, _ in points], LEFT, WIDTH - RIGHT)
    values = [*(value for row in rows for value in row.median), *(goal.limit for goal in goals.values())]
    y = axis_over(values, HEIGHT - BOTTOM, top, unit_scale(max(values), unit)[0])
    yield from heading
    yield from _axes(x, y, "1", [(value, _label(value, unit)) for value in y.ticks()])
    yield svg_text((x.begin + x.end) / 2, y.begin + 2 * LINE_PX - 2, grows_with, anchor="middle")
    for colour, points in zip(_colours(list(series)), series.values(), strict=True):
        points.sort(key=lambda point: point[0])
        yield svg_path(((x.at(at), y.at(row.median.median)) for at, row in points), colour)
        for at, row in points:
            low, middle, high = (y.at(value) for value in row.median)
            yield svg_line(x.at(at), low, x.at(at), high, f"s{colour}")
            yield svg_circle(x.at(at), middle, colour)
            if goal := goals.get(row.key):
                budget = y.at(goal.limit)
                yield svg_line(x.at(at) - GOAL_PX, budget, x.at(at) + GOAL_PX, budget, f"budget s{colour}")
                goal_text = goal.describe(goal.limit, unit)
                yield svg_text(x.at(at) + GOAL_PX, budget - 4, goal_text, anchor="end")


def _series(rows: Sequence[ResultRow], grows_with: str) -> dict[str, list[tuple[float, ResultRow]]]:
    """Group result rows into curves by their label without the value of the independent variable."""
    series: dict[str, list[tuple[float, ResultRow]]] = {}
    for row in rows:
        if row.x is not None:
            name = row.label.replace(f"{row.x:g} {grows_with}", "").strip(" ,")
            series.setdefault(name, []).append((row.x, row))
    return series


def _title_and_legend(title: str, names: Sequence[str]) -> tuple[list[str], float]:
    """Return the elements of title and coloured legend, and the y pixel below them."""
    title_width = WIDTH - RIGHT - MARGIN
    parts = []
    y = TOP
    for n, part in enumerate(textwrap.wrap(title, int(title_width / CHAR_PX / 1.15))):
        parts.append(svg_text(MARGIN, y := TOP + n * LINE_PX, part, css_class="title"))
    x, y = float(MARGIN), y + (LINE_PX if names else 0)
    for colour, name in zip(_colours(names), names, strict=True):
        item_width = SWATCH_PX + len(name) * CHAR_PX
        if x > MARGIN and x + item_width > WIDTH - RIGHT:
            x, y = MARGIN, y + LINE_PX
        parts += [svg_circle(x + 4, y - 4, colour, 4), svg_text(x + SWATCH_PX - 1, y, name)]
        x += item_width + SWATCH_PX
    return parts, y + LINE_PX + 4


def _axes(x: Axis, y: Axis, unit: Unit, y_ticks: Iterable[tuple[float, str]]) -> Iterator[str]:
    for value in x.ticks():
        at = x.at(value)
        yield svg_line(at, y.begin, at, y.end, "grid")
        yield svg_text(at, y.begin + LINE_PX, _label(value, unit), anchor="middle")
    for value, label in y_ticks:
        yield svg_line(x.begin, y.at(value), x.end, y.at(value), "grid")
        yield svg_text(x.begin - 5, y.at(value) + 4, label, anchor="end")
    yield svg_line(x.begin, y.begin, x.end, y.begin, "axis")
    yield svg_line(x.begin, y.begin, x.begin, y.end, "axis")


def _label(value: float, unit: Unit) -> str:
    """Format the label of an axis tick."""
    size, name = unit_scale(value, unit)
    return f"{value / size:,g} {name}".rstrip() if value else "0"


def plot_comparison(comparison: Comparison) -> str:
    """Draw the ratios after / before: a line per figure with all pairs, the median and its interval."""
    top = TOP + 2 * LINE_PX
    bottom = top + len(comparison.figures) * LINE_PX
    ratios = [value for figure in comparison.figures for value in (*figure.ratio, *figure.pairs)]
    limit = max(EDGE_MIN, *ratios, *(1 / ratio for ratio in ratios)) * 1.02
    x = Axis(1 / limit, limit, KEY_PX, KEY_PX + RATIO_PX, is_log=True)
    parts = [
        svg_text(MARGIN, TOP, f"this tree to {comparison.before}: less is to the left", css_class="title")
    ]
    for value in _ticks(x):
        parts.append(svg_line(x.at(value), top, x.at(value), bottom, "axis" if value == 1 else "grid"))
        parts.append(svg_text(x.at(value), bottom + LINE_PX, f"{value - 1:+.0%}", anchor="middle"))
    for n, figure in enumerate(comparison.figures):
        parts += _comparison_line(figure, x, top + (n + 0.5) * LINE_PX)
    width = KEY_PX + RATIO_PX + VERDICT_PX
    return svg_document(width, bottom + BOTTOM, "drahealth bench, before and after", parts)


def _ticks(x: Axis) -> list[float]:
    """Return the preferred ticks for whose labels there is room."""
    ticks: list[float] = []
    for value in PREFERRED_TICKS:
        if x.low < value < x.high and all(abs(x.at(value) - x.at(other)) > TICK_PX for other in ticks):
            ticks.append(value)
    return ticks


def _comparison_line(figure: FigureComparison, x: Axis, y: float) -> Iterator[str]:
    colour = VERDICT_COLOURS[figure.verdict]
    low, middle, high = (x.at(value) for value in figure.ratio)
    yield svg_text(KEY_PX - 10, y + 4, figure.key, anchor="end")
    yield from (svg_circle(x.at(pair), y, GREY, 1.2) for pair in figure.pairs)
    yield svg_line(low, y, high, y, f"s{colour}")
    yield svg_circle(middle, y, colour, 3)
    yield svg_text(x.end + 10, y + 4, f"{figure.ratio.median - 1:+.1%} {figure.verdict}")
