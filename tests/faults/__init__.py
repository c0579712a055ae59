"""Faults that tests inject into the agent and drivers: what is injected, the promise, and the test."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple
from xml.etree import ElementTree

TABLE: Final = Path(__file__).with_name("faults.txt")
PAGE: Final = TABLE.parents[2] / "docs/reliability.md"
FIGURES: Final = Path(__file__).with_name("figures.json")
"""Figures of the last runs, by name: ``soak``, ``kills``, and of each test of a fault ``seconds`` and
``seen_by``."""
FIGURES_TITLE: Final = "## Long runs"
NOT_MEASURED: Final = "not measured"
"""Text for a test that was added after the last run."""
GRPCIO: Final = "grpcio client"
SOCKET_CLIENT: Final = "socket client"
OTHER_PROCESS: Final = "other process"
OBSERVERS: Final = (GRPCIO, SOCKET_CLIENT, OTHER_PROCESS, "test")
"""Observers of a test's result, the most independent first: grpcio is not the agent's library."""
OBSERVER_PROPERTY: Final = "seen_by"
"""Property of each test in pytest's JUnit file, one of OBSERVERS."""


class Fault(NamedTuple):
    """One injected fault."""

    theme: str
    injected: str
    promise: str
    test: str
    """File below tests/ and function: ``test_daemon.py::test_...``."""


def read_faults() -> list[Fault]:
    """Return all faults of the table, in its order."""
    lines = TABLE.read_text("utf-8").splitlines()
    return [Fault(*(cell.strip() for cell in line.split("|"))) for line in lines if not line.startswith("#")]


def read_figures() -> dict[str, dict[str, Any]]:
    """Return the saved figures of the long runs."""
    figures: dict[str, dict[str, Any]] = json.loads(FIGURES.read_text("utf-8")) if FIGURES.exists() else {}
    return figures


def save_runs(seconds: dict[str, float], observers: dict[str, str]) -> None:
    """Replace the saved times of the tests [s], and what saw their results."""
    _save({"seconds": seconds, "seen_by": observers})


def save_figures(run: str, figures: dict[str, Any]) -> None:
    """Replace the saved figures of one long run, and their section of docs/reliability.md."""
    PAGE.write_text(with_figures(PAGE.read_text("utf-8"), _save({run: figures})), "utf-8")


def _save(new: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Replace some of the saved figures; return all of them."""
    saved = read_figures() | new
    FIGURES.write_text(json.dumps(saved, indent=2) + "\n", "utf-8")
    return saved


def with_figures(page: str, figures: dict[str, dict[str, Any]]) -> str:
    """Return docs/reliability.md with other figures of the long runs and the same faults.

    `page`: docs/reliability.md, which has figures.
    """
    before, _, after = page.partition(FIGURES_TITLE)
    _, _, faults = after.partition("\n## ")
    return "\n".join([before + FIGURES_TITLE, "", *_figure_lines(figures), "", f"## {faults}"])


def read_results(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Return the outcomes of tests by the name in the table, from pytest's JUnit files.

    An outcome is ``passed``, ``skipped``, ``failure`` or ``error``; a test with parameters has several.
    """
    outcomes = defaultdict(list)
    for test, case in _test_cases(paths):
        marks = [child.tag for child in case if child.tag in {"skipped", "failure", "error"}]
        outcomes[test].append(marks[0] if marks else "passed")
    return outcomes


def read_seconds(paths: Iterable[Path]) -> dict[str, float]:
    """Return the longest time of each test by the name in the table [s], from pytest's JUnit files."""
    seconds: dict[str, float] = defaultdict(float)
    for test, case in _test_cases(paths):
        seconds[test] = max(seconds[test], float(case.get("time", "0")))
    return seconds


def read_observers(paths: Iterable[Path]) -> dict[str, str]:
    """Return what saw the result of each test by the name in the table, from pytest's JUnit files."""
    found = defaultdict(set)
    for test, case in _test_cases(paths):
        found[test] |= {
            item.get("value", "") for item in case.iter("property") if item.get("name") == OBSERVER_PROPERTY
        }
    return {test: most_independent(observers) for test, observers in found.items()}


def most_independent(observers: set[str]) -> str:
    """Return the most independent of some observers; none: the test itself."""
    return next((name for name in OBSERVERS if name in observers), OBSERVERS[-1])


def _test_cases(paths: Iterable[Path]) -> Iterator[tuple[str, ElementTree.Element]]:
    """Yield the cases of tests in pytest's JUnit files, with the name of the test in the table."""
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            file = case.get("classname", "").removeprefix("tests.").replace(".", "/")
            yield f"{file}.py::{case.get('name', '').partition('[')[0]}", case


def unproven_faults(faults: list[Fault], results: dict[str, list[str]]) -> list[str]:
    """Return the rows whose test did not run, was skipped, or failed in any case."""
    problems = []
    for fault in faults:
        outcomes = results.get(fault.test, [])
        if failed := {"failure", "error"} & set(outcomes):
            problems.append(f"{fault.injected}: {', '.join(sorted(failed))}: {fault.test}")
        elif "passed" not in outcomes:
            problems.append(f"{fault.injected}: {'skipped' if outcomes else 'did not run'}: {fault.test}")
    return problems


def markdown(faults: list[Fault], figures: dict[str, dict[str, Any]]) -> str:
    """Return docs/reliability.md."""
    lines = [
        "# Reliability",
        "",
        f"Each of these {len(faults)} faults is injected by a test, which shows the promise. Generated from",
        "`tests/faults/faults.txt` with `make reliability`, which runs these tests, and fails for a row",
        "whose test failed, was skipped or did not run. The promise was kept within the time of the whole",
        "test in the last run, which starts agents, waits for leases, or fails hundreds of calls one after",
        "the other. It was seen by one of these, which the run records, the most independent first:",
        "",
        "* grpcio client: a gRPC client of another implementation than the agent's",
        "* socket client: another client on a socket, such as one of HTTP or of raw frames",
        "* other process: a process that the test started, by its output, its files or its end",
        "* test: the test itself, which calls a part of the agent, or uses a node that earlier tests started",
    ]
    seconds, observers = figures.get("seconds", {}), figures.get("seen_by", {})
    if figures:
        lines += ["", FIGURES_TITLE, "", *_figure_lines(figures)]
    for theme in dict.fromkeys(fault.theme for fault in faults):
        title = theme[0].upper() + theme[1:]
        lines += ["", f"## {title}", "", "| fault | promise | within | seen by | test |"]
        lines += ["|---|---|---|---|---|"]
        lines += [
            f"| {fault.injected} | {fault.promise} | {_shown_time(seconds.get(fault.test))} | "
            f"{observers.get(fault.test, NOT_MEASURED)} | `{fault.test}` |"
            for fault in faults
            if fault.theme == theme
        ]
    return "\n".join(lines) + "\n"


def _shown_time(seconds: float | None) -> str:
    """Return the time of a test as text; None: not measured."""
    if seconds is None:
        return NOT_MEASURED
    return "0.1 s" if seconds < 0.1 else f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _figure_lines(figures: dict[str, dict[str, Any]]) -> Iterable[str]:
    """Yield a table of the long runs."""
    yield "An agent on a node with 8 GPUs, whose pods, faults, subscribers and failed prepares come and go."
    yield "Memory, descriptors and threads are read every half minute, while the load pauses, after the first"
    yield "quarter of the run. Descriptors include files of cgroups, which stay open while a pod runs: their"
    yield "number follows that of the pods. The heap of the C library grows in the first ten minutes to the"
    yield "largest use at one time; afterwards a tenth of it is free at rest. mallinfo2() in an agent under"
    yield "this load: 40 to 43 MiB of 45 in use, the same after 5 and after 17 minutes."
    yield "tracemalloc: 31.3 MiB of Python's objects after 2.5, 5.5 and 8.5 minutes, the same within 34 KiB:"
    yield "so only the C library's heap around them grows."
    yield ""
    yield "| command | length | result |"
    yield "|---|---|---|"
    if soak := figures.get("soak"):
        grown = ", ".join(f"{name} {soak[f'{name}_growth']:+g}" for name in ("descriptors", "threads"))
        memory = f"{soak['rss_first_mib']} to {soak['rss_last_mib']} MiB, {soak['rss_slope_mib_h']:+g} MiB/h"
        length = f"{soak['seconds'] / 60:.0f} min, {soak['events']} events"
        yield f"| `make soak` | {length} | resident memory {memory}; {grown} |"
    if kills := figures.get("kills"):
        yield (
            f"| `make kills` | {kills['seconds'] / 60:.0f} min, {kills['kills']} SIGKILLs | "
            f"{kills['prepares']} prepares, {kills['usages']} uses and {kills['changes']} changes of "
            f"verdicts recorded, {kills['lost']} lost |"
        )
