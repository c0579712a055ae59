"""``--against REF``: comparison of this checkout with another git revision, as a report that fails no check.

The revision is checked out into a temporary worktree, its C core is built, and its own benchmarks run. Result
rows with the same key are compared. Each run is a process; runs alternate in the order A B B A, so that drift
of the machine affects both revisions alike. A pair is a run of A and the adjacent run of B; a sign test over
all pairs decides whether the difference is significant.
"""

import contextlib
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from agent.bench import report
from agent.bench.report import FigureMedian, HostFacts, align_columns, host_facts, markdown_table, wrap_line
from agent.bench.result import MeasurementError, Unit, format_value
from agent.bench.timing import MedianInterval, median_interval

FULL_TURNS: Final = 5
QUICK_TURNS: Final = 3  # six pairs: with fewer, even pairs of equal sign are not significant
MIN_CHANGE: Final = 0.03
"""Smallest relative change that counts; less may come from the code layout that the linker chose."""
P_MAX: Final = 0.05
STOP_TIMEOUT_S: Final = 20.0
UNKNOWN_SUITE: Final = 2  # argparse's exit status
BUILD: Final = ("-c", "import setuptools; setuptools.setup()", "--quiet", "build_ext", "--inplace")


Medians = Mapping[str, tuple[Unit, tuple[float, ...]]]
"""Unit of a figure and its median in each run, by key of the result row."""


class FigureComparison(NamedTuple):
    """Medians of one benchmark figure from all runs of both revisions."""

    key: str
    unit: Unit
    before: tuple[float, ...]
    """Median of each run of the other revision; values with the same index in ``after`` form a pair."""
    after: tuple[float, ...]

    @property
    def medians(self) -> tuple[float, float]:
        """Median of the figure over all runs of the other revision, and over all runs of this checkout."""
        return statistics.median(self.before), statistics.median(self.after)

    @property
    def pair_ratios(self) -> tuple[float, ...]:
        """Ratio of this checkout to the other revision, for each pair of runs."""
        return tuple(after / before for before, after in zip(self.before, self.after, strict=True))

    @property
    def ratio(self) -> MedianInterval:
        """Median of the ratios of all pairs of runs, with its confidence interval."""
        return median_interval(self.pair_ratios)

    @property
    def p_value(self) -> float:
        """Two-sided p-value of the sign test over the pairs of runs."""
        signs = [ratio > 1 for ratio in self.pair_ratios if ratio != 1]
        fewer = min(sum(signs), len(signs) - sum(signs))
        tail: float = sum(math.comb(len(signs), k) for k in range(fewer + 1)) / 2 ** len(signs)
        return min(1.0, 2 * tail)

    @property
    def verdict(self) -> str:
        """Direction of the figure's change, ``less`` or ``more``; empty if the change is not significant."""
        change = self.ratio.median - 1
        if self.p_value > P_MAX or abs(change) < MIN_CHANGE:
            return ""
        return "more" if change > 0 else "less"


class RevisionComparison(NamedTuple):
    """Result of comparing this checkout with another git revision."""

    before: str
    """Name and commit of the other revision: ``main (5948652)``."""
    turns: int
    """Number of A B B A sequences; each has two pairs."""
    figures: tuple[FigureComparison, ...]
    skipped: tuple[str, ...]
    """Suites and figures that only one of the two revisions has."""


def compare_revisions(root: Path, ref: str, suites: Sequence[str], turns: int) -> RevisionComparison:
    """Run the suites of the checkout ``root`` and of its revision ``ref`` in turns; return the comparison.

    Raises:
        MeasurementError: The revision does not exist or does not build, or no figure is in both.
    """
    figures: list[FigureComparison] = []
    skipped: list[str] = []
    with temporary_worktree(root, ref) as (other, name):
        _build_core(other, name)
        for suite in suites:
            print(f"measuring {suite}, {2 * turns} pairs ...", file=sys.stderr, flush=True)
            before, after = _run_in_turns(other, root, suite, turns)
            if not before:
                skipped.append(f"suite {suite}: not in {name}")
                continue
            figures += (
                FigureComparison(key, unit, medians, after[key][1])
                for key, (unit, medians) in before.items()
                if key in after
            )
            only = (f"{key}: only in this tree" for key in after if key not in before)
            skipped += [*only, *(f"{key}: only in {name}" for key in before if key not in after)]
    if not figures:
        raise MeasurementError(
            f"--against {ref}: no figure is in both revisions: {'; '.join(skipped) or 'both have none'}"
        )
    return RevisionComparison(name, turns, tuple(figures), tuple(skipped))


@contextlib.contextmanager
def temporary_worktree(root: Path, ref: str) -> Iterator[tuple[Path, str]]:
    """Check out another revision into a temporary worktree; yield its path and its name.

    Raises:
        MeasurementError: The revision does not exist, or it has no benchmarks.
    """
    commit = _run_git(root, "rev-list", "--max-count=1", "--end-of-options", ref, "--")
    name = ref if commit.startswith(ref) else f"{ref} ({commit[:8]})"
    with tempfile.TemporaryDirectory(prefix="drahealth-bench-") as directory:
        tree = Path(directory, "tree")
        try:
            _run_git(root, "worktree", "add", "--quiet", "--detach", str(tree), commit)
            if not (tree / "agent/bench/__main__.py").exists():
                raise MeasurementError(f"--against {name}: this revision has no agent/bench; use a later one")
            yield tree, name
        finally:
            with contextlib.suppress(MeasurementError):
                _run_git(root, "worktree", "remove", "--force", str(tree))


def _run_git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise MeasurementError("--against: git is not installed") from None
    if done.returncode:
        raise MeasurementError(f"--against: git {arguments[0]} in {root}", done.stderr)
    return done.stdout.strip()


def _build_core(tree: Path, name: str) -> None:
    print(f"building the core of {name} ...", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, *BUILD], cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MeasurementError(f"--against {name}: the C core of this revision does not build", done.stderr)


def _run_in_turns(before: Path, after: Path, suite: str, turns: int) -> tuple[Medians, Medians]:
    runs: dict[Path, list[Mapping[str, FigureMedian]]] = {before: [], after: []}
    for tree in (before, after, after, before) * turns:
        runs[tree].append(_run_suite(tree, suite))
        if not runs[before][0]:
            break
    return _medians_by_figure(runs[before]), _medians_by_figure(runs[after])


def _medians_by_figure(turns: Sequence[Mapping[str, FigureMedian]]) -> Medians:
    """Return the unit and the medians of each benchmark figure that every run has."""
    if not turns:
        return {}
    return {
        key: (figure.unit, tuple(turn[key].median for turn in turns))
        for key, figure in turns[0].items()
        if all(key in turn for turn in turns)
    }


def _run_suite(tree: Path, suite: str) -> Mapping[str, FigureMedian]:
    """Run one suite of the checkout ``tree`` once, with --quick, in a new process; return its figures.

    Returns an empty mapping if the checkout has no such suite.
    """
    command = [sys.executable, "-m", "agent.bench", "--quick", "--json", "--suite", suite]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    pipe = subprocess.PIPE
    # in its own session: this process forwards Ctrl-C once, so that the child can stop its children
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as child:
        try:
            out, err = child.communicate()
        except BaseException:
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=STOP_TIMEOUT_S)
            child.kill()
            raise
    if child.returncode == UNKNOWN_SUITE:
        return {}
    if child.returncode:
        raise MeasurementError(f"suite {suite} in {tree}: exit status {child.returncode}", err)
    return report.decode_figures(out)


COMPARISON_HEADINGS: Final = ("", "before", "this tree", "change", "95 % interval", "more in", "p", "")


def comparison_text(host: HostFacts, comparison: RevisionComparison) -> str:
    """Return the comparison of two revisions as aligned text."""
    lines = [
        line for fact in (*host_facts(host), comparison_title(comparison)) for line in wrap_line(fact, "")
    ]
    lines += ["", *align_columns([COMPARISON_HEADINGS, *map(_comparison_cells, comparison.figures)]), ""]
    lines += [line for remark in _comparison_remarks(comparison) for line in wrap_line(remark, "")]
    return "\n".join(lines) + "\n"


def comparison_markdown(host: HostFacts, comparison: RevisionComparison) -> str:
    """Return the comparison of two revisions as Markdown."""
    lines = [f"- {line}" for line in (*host_facts(host), comparison_title(comparison))]
    lines += ["", *markdown_table([COMPARISON_HEADINGS, *map(_comparison_cells, comparison.figures)])]
    lines += ["", *(f"- {remark}" for remark in _comparison_remarks(comparison))]
    return "\n".join(lines) + "\n"


def comparison_title(comparison: RevisionComparison) -> str:
    """Return a line that states the other revision and the order of runs."""
    return f"before: {comparison.before}; {2 * comparison.turns} pairs of quick runs, in the order A B B A"


def _comparison_cells(figure: FigureComparison) -> tuple[str, ...]:
    before, after = figure.medians
    low, middle, high = figure.ratio
    return (
        figure.key,
        format_value(before, figure.unit),
        format_value(after, figure.unit),
        f"{middle - 1:+.1%}",
        f"[{low - 1:+.1%}, {high - 1:+.1%}]",
        f"{sum(ratio > 1 for ratio in figure.pair_ratios)} of {len(figure.pair_ratios)}",
        f"{figure.p_value:.3f}",
        figure.verdict,
    )


def _comparison_remarks(comparison: RevisionComparison) -> Iterator[str]:
    differ = [figure for figure in comparison.figures if figure.verdict]
    yield (
        f"{len(differ)} of {len(comparison.figures)} figures differ (at least {MIN_CHANGE:.0%}; sign test, "
        f"p <= {P_MAX:g}); about {P_MAX * len(comparison.figures):.1f} would differ by chance"
    )
    yield from comparison.skipped
