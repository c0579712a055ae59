"""``--plot FILE.svg``: a panel for each table that says more as a picture.

Figures that grow with something are curves, with their intervals. Races are empirical distributions: what
share of the samples took no longer than that. Two revisions are a list of ratios.
"""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from agent.bench import svg
from agent.bench.against import Compared, Comparison
from agent.bench.budgets import goal_of
from agent.bench.result import Outcome, Row, Table, Unit, scale, short
from agent.bench.svg import Axis, axis_over

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
    "Steps: what share of the samples took no longer. Curves: medians with their 95 % intervals. "
    "Grey: the floor. Dashed: a budget."
)
GOAL_PX: Final = 14
"""To both sides of a point of a curve that has a budget."""
GOAL_WIDE_PX: Final = 40
"""Half of what stands above a budget, at most."""
SWATCH_PX: Final = 14
SHARES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
SAMPLES_MIN: Final = 10
"""A distribution of fewer is no curve; a table in which one has fewer is not drawn."""
POINTS_MAX: Final = 150
"""Of a distribution, evenly by rank; the largest is always among them."""
KEY_PX: Final = 260
RATIO_PX: Final = 420
VERDICT_PX: Final = 110
EDGE_MIN: Final = 1.15
"""Differences smaller than this fill no plot."""
TELLING: Final = (1, 2, 0.5, 4, 0.25, 1.25, 0.8, 1.1, 0.9, 16, 1 / 16)
"""Ratios that make good ticks."""
TICK_PX: Final = 45
SHADES: Final = {"less": 2, "more": 4, "": svg.GREY}
"""Colours of verdicts."""
FLOOR: Final = "floor"


def plot(outcomes: Mapping[str, Outcome], budgets: Mapping[str, Any]) -> str:
    """All panels in columns, as one SVG."""
    panels = [
        panel
        for name, outcome in outcomes.items()
        for table in outcome.tables
        for panel in _panels(f"{name}: {table.full_title}", table, budgets)
    ]
    parts = [svg.text(MARGIN, TOP, CAPTION)]
    for number, panel in enumerate(panels):
        row, column = divmod(number, COLUMNS)
        at = f"{column * WIDTH} {CAPTION_PX + row * HEIGHT}"
        parts.append(f'<g transform="translate({at})">{"".join(panel)}</g>')
    height = CAPTION_PX + -(-len(panels) // COLUMNS) * HEIGHT
    return svg.picture(COLUMNS * WIDTH, height, "drahealth bench", parts)


def _panels(title: str, table: Table, budgets: Mapping[str, Any]) -> Iterator[list[str]]:
    curves = [row for row in table.rows if row.x is not None]
    for unit in dict.fromkeys(row.unit for row in curves):
        yield list(
            _curves(title, table.grows_with, [row for row in curves if row.unit == unit], unit, budgets)
        )
    times = [row for row in table.rows if row.unit == "s" and row.x is None and len(row.values) > 1]
    if times and min(len(row.values) for row in times) >= SAMPLES_MIN:
        yield list(_distributions(title, times, budgets))


def _distributions(title: str, rows: Sequence[Row], budgets: Mapping[str, Any]) -> Iterator[str]:
    names = short([row.label for row in rows])
    head, top = _head(title, names)
    goals = [goal_of(row, budgets) for row in rows]
    values = [*(value for row in rows for value in row.values), *(goal.limit for goal in goals if goal)]
    x = axis_over(values, LEFT, WIDTH - RIGHT, scale(max(values), "s")[0])
    y = Axis(0.0, 1.0, HEIGHT - BOTTOM, top, is_log=False)
    yield from head
    yield from _frame(x, y, "s", [(share, f"{share:.0%}") for share in SHARES])
    for colour, row, goal in zip(_colours(names), rows, goals, strict=True):
        yield svg.steps(((x.at(value), y.at(share)) for value, share in distribution(row.values)), colour)
        if goal:
            at = x.at(goal.limit)
            yield svg.line(at, y.begin, at, y.end, f"budget s{colour}")
            is_far = at > WIDTH - RIGHT - GOAL_WIDE_PX
            said = goal.words(goal.limit, "s")
            yield svg.text(at, y.end - 3, said, anchor="end" if is_far else "middle")


def _colours(names: Sequence[str]) -> Iterator[int]:
    """One for each; the floor is always grey."""
    others = (colour for colour in range(len(svg.COLOURS)) if colour != svg.GREY)
    return (svg.GREY if name.startswith(FLOOR) else next(others) for name in names)


def distribution(values: Sequence[float]) -> list[tuple[float, float]]:
    """Values, each with the share of all that do not exceed it; the smallest at share 0."""
    ordered = sorted(values)
    step = max(1, len(ordered) // POINTS_MAX)
    ranks = [*range(step, len(ordered), step), len(ordered)]
    return [(ordered[0], 0.0), *((ordered[rank - 1], rank / len(ordered)) for rank in ranks)]


def _curves(
    title: str, grows_with: str, rows: Sequence[Row], unit: Unit, budgets: Mapping[str, Any]
) -> Iterator[str]:
    series = _series(rows, grows_with)
    head, top = _head(title, list(series) if len(series) > 1 else [])
    goals = {row.key: goal for row in rows if (goal := goal_of(row, budgets))}
    x = axis_over([at for points in series.values() for at, _ in points], LEFT, WIDTH - RIGHT)
    values = [*(value for row in rows for value in row.median), *(goal.limit for goal in goals.values())]
    y = axis_over(values, HEIGHT - BOTTOM, top, scale(max(values), unit)[0])
    yield from head
    yield from _frame(x, y, "1", [(value, _label(value, unit)) for value in y.ticks()])
    yield svg.text((x.begin + x.end) / 2, y.begin + 2 * LINE_PX - 2, grows_with, anchor="middle")
    for colour, points in zip(_colours(list(series)), series.values(), strict=True):
        points.sort(key=lambda point: point[0])
        yield svg.curve(((x.at(at), y.at(row.median.median)) for at, row in points), colour)
        for at, row in points:
            low, middle, high = (y.at(value) for value in row.median)
            yield svg.line(x.at(at), low, x.at(at), high, f"s{colour}")
            yield svg.dot(x.at(at), middle, colour)
            if goal := goals.get(row.key):
                budget = y.at(goal.limit)
                yield svg.line(x.at(at) - GOAL_PX, budget, x.at(at) + GOAL_PX, budget, f"budget s{colour}")
                said = goal.words(goal.limit, unit)
                yield svg.text(x.at(at) + GOAL_PX, budget - 4, said, anchor="end")


def _series(rows: Sequence[Row], grows_with: str) -> dict[str, list[tuple[float, Row]]]:
    """Curves by name, which is the label of their rows without the number at which each was measured."""
    series: dict[str, list[tuple[float, Row]]] = {}
    for row in rows:
        if row.x is not None:
            name = row.label.replace(f"{row.x:g} {grows_with}", "").strip(" ,")
            series.setdefault(name, []).append((row.x, row))
    return series


def _head(title: str, names: Sequence[str]) -> tuple[list[str], float]:
    """The title and, in their colours, what is shown below it; and where the drawing may begin."""
    room = WIDTH - RIGHT - MARGIN
    parts = []
    y = TOP
    for n, part in enumerate(textwrap.wrap(title, int(room / svg.CHAR_PX / 1.15))):
        parts.append(svg.text(MARGIN, y := TOP + n * LINE_PX, part, kind="title"))
    x, y = float(MARGIN), y + (LINE_PX if names else 0)
    for colour, name in zip(_colours(names), names, strict=True):
        wide = SWATCH_PX + len(name) * svg.CHAR_PX
        if x > MARGIN and x + wide > WIDTH - RIGHT:
            x, y = MARGIN, y + LINE_PX
        parts += [svg.dot(x + 4, y - 4, colour, 4), svg.text(x + SWATCH_PX - 1, y, name)]
        x += wide + SWATCH_PX
    return parts, y + LINE_PX + 4


def _frame(x: Axis, y: Axis, unit: Unit, y_ticks: Iterable[tuple[float, str]]) -> Iterator[str]:
    for value in x.ticks():
        at = x.at(value)
        yield svg.line(at, y.begin, at, y.end, "grid")
        yield svg.text(at, y.begin + LINE_PX, _label(value, unit), anchor="middle")
    for value, label in y_ticks:
        yield svg.line(x.begin, y.at(value), x.end, y.at(value), "grid")
        yield svg.text(x.begin - 5, y.at(value) + 4, label, anchor="end")
    yield svg.line(x.begin, y.begin, x.end, y.begin, "axis")
    yield svg.line(x.begin, y.begin, x.begin, y.end, "axis")


def _label(value: float, unit: Unit) -> str:
    """Of a tick, whose value is round."""
    size, name = scale(value, unit)
    return f"{value / size:,g} {name}".rstrip() if value else "0"


def plot_comparison(found: Comparison) -> str:
    """After to before, a line for each figure: every pair, the median and its interval."""
    top = TOP + 2 * LINE_PX
    bottom = top + len(found.figures) * LINE_PX
    ratios = [value for one in found.figures for value in (*one.ratio, *one.pairs)]
    reach = max(EDGE_MIN, *ratios, *(1 / ratio for ratio in ratios)) * 1.02
    x = Axis(1 / reach, reach, KEY_PX, KEY_PX + RATIO_PX, is_log=True)
    parts = [svg.text(MARGIN, TOP, f"this tree to {found.before}: less is to the left", kind="title")]
    for value in _ticks(x):
        parts.append(svg.line(x.at(value), top, x.at(value), bottom, "axis" if value == 1 else "grid"))
        parts.append(svg.text(x.at(value), bottom + LINE_PX, f"{value - 1:+.0%}", anchor="middle"))
    for n, one in enumerate(found.figures):
        parts += _compared(one, x, top + (n + 0.5) * LINE_PX)
    width = KEY_PX + RATIO_PX + VERDICT_PX
    return svg.picture(width, bottom + BOTTOM, "drahealth bench, before and after", parts)


def _ticks(x: Axis) -> list[float]:
    """As many as can be labelled, the most telling first."""
    found: list[float] = []
    for value in TELLING:
        if x.low < value < x.high and all(abs(x.at(value) - x.at(other)) > TICK_PX for other in found):
            found.append(value)
    return found


def _compared(one: Compared, x: Axis, y: float) -> Iterator[str]:
    colour = SHADES[one.verdict]
    low, middle, high = (x.at(value) for value in one.ratio)
    yield svg.text(KEY_PX - 10, y + 4, one.key, anchor="end")
    yield from (svg.dot(x.at(pair), y, svg.GREY, 1.2) for pair in one.pairs)
    yield svg.line(low, y, high, y, f"s{colour}")
    yield svg.dot(middle, y, colour, 3)
    yield svg.text(x.end + 10, y + 4, f"{one.ratio.median - 1:+.1%} {one.verdict}")
