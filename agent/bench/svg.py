"""As much of SVG as a plot needs: axes with ticks, lines, and text that stays text.

No background is painted, and the colours are set by class, so that a plot is read on light paper and on dark.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final, NamedTuple

# fmt: off
COLOURS: Final = (
    "#0969da", "#57606a", "#1a7f37", "#9a6700", "#cf222e", "#8250df", "#1b7c83", "#bf3989", "#24292f",
)
DARK: Final = (
    "#58a6ff", "#9ea7b3", "#3fb950", "#d29922", "#ff7b72", "#bc8cff", "#39c5cf", "#f778ba", "#e6edf3",
)
# fmt: on
GREY: Final = 1
CHAR_PX: Final = 6.1  # of the letters at 11 px, a little more than their mean
LOG_FROM: Final = 8
"""An axis whose end is so many times its begin is logarithmic."""
MANY_DECADES: Final = 100
"""From here on, ticks are powers of ten alone."""

_LIGHT: Final = ("#24292f", "#57606a", "#8c959f")
_NIGHT: Final = ("#e6edf3", "#9ea7b3", "#6e7681")
_SANS: Final = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def _rules(ink: Sequence[str], colours: Sequence[str]) -> str:
    title, text, line = ink
    rules = [f"text{{fill:{text}}}.title{{fill:{title}}}.axis,.grid{{stroke:{line}}}"]
    rules += [f".s{n}{{stroke:{colour}}}.f{n}{{fill:{colour}}}" for n, colour in enumerate(colours)]
    return "".join(rules)


STYLE: Final = (
    f"text{{font:11px {_SANS}}}.title{{font-weight:600;font-size:12px}}.grid{{stroke-opacity:.3}}"
    "path,line{fill:none;stroke-width:1}.curve{stroke-width:1.6}.budget{stroke-dasharray:4 3}"
    f"{_rules(_LIGHT, COLOURS)}@media (prefers-color-scheme:dark){{{_rules(_NIGHT, DARK)}}}"
)


class Axis(NamedTuple):
    """Maps values to pixels."""

    low: float
    high: float
    begin: float
    """Pixel of ``low``; that of ``high`` is :attr:`end`, which may be the smaller one."""
    end: float
    is_log: bool
    grain: float = 1.0
    """What ticks are round in: 2 MiB is a round number of bytes."""

    def at(self, value: float) -> float:
        """The pixel of a value."""
        low, high, here = self.low, self.high, value
        if self.is_log:
            low, high, here = math.log(low), math.log(high), math.log(value)
        return self.begin + (here - low) / (high - low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Round values within, few enough to be labelled: 1, 2 and 5 times powers of ten, or the powers."""
        low, high = self.low / self.grain, self.high / self.grain
        if self.is_log:
            steps = (1, 2, 5) if high / low <= MANY_DECADES else (1,)
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            values = [step * 10.0**power for power in powers for step in steps]
        else:
            step = _round_step((high - low) / 5)
            values = [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
        return [value * self.grain for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def axis_over(values: Sequence[float], begin: float, end: float, grain: float = 1.0) -> Axis:
    """An axis that holds all of these: logarithmic where they are positive and far apart, else from 0."""
    low, high = min(values), max(values)
    if low > 0 and high / low >= LOG_FROM:
        return Axis(low * 0.9, high * 1.1, begin, end, is_log=True, grain=grain)
    return Axis(0.0, high * 1.05 or 1.0, begin, end, is_log=False, grain=grain)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough)


def text(x: float, y: float, what: str, *, anchor: str = "start", kind: str = "") -> str:
    """``anchor``: of ``start``, ``middle`` and ``end``, what lies at x."""
    of_kind = f' class="{kind}"' if kind else ""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.0f}" y="{y:.0f}"{at}{of_kind}>{escape(what, quote=False)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight one."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def dot(x: float, y: float, colour: int, radius: float = 2.5) -> str:
    """A filled circle."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="f{colour}"/>'


def curve(points: Iterable[tuple[float, float]], colour: int) -> str:
    """Straight from point to point."""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{path}" class="curve s{colour}"/>'


def steps(points: Iterable[tuple[float, float]], colour: int) -> str:
    """To the right, then up, from point to point."""
    (x, y), *rest = points
    path = f"M{x:.1f} {y:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in rest)
    return f'<path d="{path}" class="curve s{colour}"/>'


def picture(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A whole file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">\n<title>{escape(title, quote=False)}</title>\n'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )
