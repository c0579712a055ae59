"""What ``drahealth conform`` found, as a table and as a document. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from agent.cli.output.document import API_VERSION
from agent.cli.output.text import GAP, Look, clean, format_age, format_count, wrap
from agent.conform.verdicts import Verdict

if TYPE_CHECKING:
    from agent.cli.output.terminal import Style
    from agent.conform.observed import Observed
    from agent.conform.results import Result

LOOKS: Final = {
    Verdict.FAIL: Look("✖", "x", "fail", "red"),
    Verdict.WARN: Look("▲", "!", "warn", "yellow"),
    Verdict.PASS: Look("●", "+", "pass", "green"),
    Verdict.NOT_RUN: Look("◌", "?", "not run", "magenta"),
}
"""The worst first, as they are listed."""


EXITS: Final = {Verdict.FAIL: 2, Verdict.WARN: 1, Verdict.PASS: 0, Verdict.NOT_RUN: 3}
"""The first that there is decides. Where nothing could be judged, nothing is known to be well."""


def exit_of(results: Iterable[Result]) -> int:
    """What to exit with."""
    verdicts = {result.verdict for result in results}
    return next(code for verdict, code in EXITS.items() if verdict in verdicts)


def render(seen: Observed, results: Sequence[Result], style: Style) -> str:
    """The worst first, each that is not well with the kubelet's side of it and what to do."""
    head = clean(seen.socket or "no service socket")
    heard = f"listened for {format_age(seen.window_s)}" if seen.window_s else "nobody to listen to"
    lines = [f"{style.paint(head, 'bold')}{GAP}{heard}", ""]
    width = max(len(result.check.code) for result in results)
    for verdict in (Verdict.FAIL, Verdict.WARN, Verdict.PASS):
        for result in results:
            if result.verdict is verdict:
                lines += _row(result, width, style)
    lines += _unjudged([one for one in results if one.verdict is Verdict.NOT_RUN], style)
    return "\n".join([*lines, "", _sum(results, style)]) + "\n"


def _row(result: Result, width: int, style: Style) -> Iterator[str]:
    look = LOOKS[result.verdict]
    sign = style.paint(look.sign if style.unicode else look.ascii, look.colour)
    indent = " " * (2 + width + len(GAP) + len(look.word) + len(GAP))
    first, *rest = wrap(clean(result.saw), style, first=indent, rest=indent) or [indent]
    lead = f"{sign} {result.check.code:{width}}{GAP}{style.paint(look.word, look.colour)}{GAP}"
    yield lead + first[len(indent) :]
    yield from rest
    if result.verdict is not Verdict.PASS:
        arrow = "→ " if style.unicode else "> "
        yield from wrap(result.check.why, style, first=indent, rest=indent, paint=("dim",))
        yield from wrap(arrow + result.check.advice, style, first=indent, rest=indent + "  ", paint=("cyan",))


def _unjudged(results: Sequence[Result], style: Style) -> Iterator[str]:
    """Those that were not run, by the reason."""
    look = LOOKS[Verdict.NOT_RUN]
    sign = style.paint(look.sign if style.unicode else look.ascii, look.colour)
    for reason in dict.fromkeys(result.saw for result in results):
        codes = ", ".join(result.check.code for result in results if result.saw == reason)
        first, *rest = wrap(f"not run, {clean(reason)}: {codes}", style, first="  ", rest="    ")
        yield f"{sign} {first[2:]}"
        yield from rest


def _sum(results: Sequence[Result], style: Style) -> str:
    numbers = {verdict: sum(one.verdict is verdict for one in results) for verdict in Verdict}
    parts = [
        (f"{numbers[Verdict.PASS]} passed", numbers[Verdict.PASS], Verdict.PASS),
        (format_count(numbers[Verdict.WARN], "warning"), numbers[Verdict.WARN], Verdict.WARN),
        (f"{numbers[Verdict.FAIL]} failed", numbers[Verdict.FAIL], Verdict.FAIL),
        (f"{numbers[Verdict.NOT_RUN]} not run", numbers[Verdict.NOT_RUN], Verdict.NOT_RUN),
    ]
    said = ", ".join(style.paint(text, LOOKS[verdict].colour) for text, number, verdict in parts if number)
    return f"{format_count(len(results), 'check')}: {said}"


def document(seen: Observed, results: Sequence[Result]) -> dict[str, Any]:
    """All of it for programs. Keys are only ever added."""
    return {
        "apiVersion": API_VERSION,
        "socket": seen.socket or None,
        "pluginDir": seen.directory.path if seen.directory else None,
        "listenedSeconds": seen.window_s,
        "summary": {
            "checks": len(results),
            "passed": sum(one.verdict is Verdict.PASS for one in results),
            "warned": sum(one.verdict is Verdict.WARN for one in results),
            "failed": sum(one.verdict is Verdict.FAIL for one in results),
            "notRun": sum(one.verdict is Verdict.NOT_RUN for one in results),
        },
        "results": [
            {
                "code": result.check.code,
                "result": result.verdict,
                "title": result.check.title,
                "saw": result.saw,
                "why": result.check.why,
                "advice": result.check.advice if result.verdict in (Verdict.WARN, Verdict.FAIL) else None,
            }
            for result in results
        ],
    }
