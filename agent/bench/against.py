"""``--against REF``: this tree and another revision of it, measured in turns. It reports, and gates nothing.

The revision is checked out beside, with a core of its own, and measured by the bench that it had; rows of
the same name are compared. Each turn is a process, in the order A B B A, so that a drift of the machine meets
both alike. A pair is an A and the B beside it; the sign test asks how often one of them was the slower.
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

from agent.bench import pyperf
from agent.bench.pyperf import Figure
from agent.bench.result import Unit, Unmeasured
from agent.bench.timing import Interval, interval

FULL_TURNS: Final = 5
QUICK_TURNS: Final = 3  # six pairs: with fewer not even all of one sign would show anything
SHOWS_FROM: Final = 0.03
"""A smaller difference may come from where the linker put the code."""
P_MAX: Final = 0.05
END_S: Final = 20.0
UNKNOWN_SUITE: Final = 2  # argparse's exit status
BUILD: Final = ("-c", "import setuptools; setuptools.setup()", "--quiet", "build_ext", "--inplace")


Medians = Mapping[str, tuple[Unit, tuple[float, ...]]]
"""Of each figure, one of each turn."""


class Compared(NamedTuple):
    """One figure, before and after."""

    key: str
    unit: Unit
    before: tuple[float, ...]
    """The median of each turn; those of the same place are a pair."""
    after: tuple[float, ...]

    @property
    def medians(self) -> tuple[float, float]:
        """Before and after, over all turns."""
        return statistics.median(self.before), statistics.median(self.after)

    @property
    def pairs(self) -> tuple[float, ...]:
        """After to before, of each pair."""
        return tuple(after / before for before, after in zip(self.before, self.after, strict=True))

    @property
    def ratio(self) -> Interval:
        """Of the pairs."""
        return interval(self.pairs)

    @property
    def p(self) -> float:
        """That so many pairs would differ the same way by chance, if nothing had changed: two-sided."""
        signs = [pair > 1 for pair in self.pairs if pair != 1]
        fewer = min(sum(signs), len(signs) - sum(signs))
        tail: float = sum(math.comb(len(signs), k) for k in range(fewer + 1)) / 2 ** len(signs)
        return min(1.0, 2 * tail)

    @property
    def verdict(self) -> str:
        """``less`` or ``more``; empty if no difference shows."""
        change = self.ratio.median - 1
        if self.p > P_MAX or abs(change) < SHOWS_FROM:
            return ""
        return "more" if change > 0 else "less"


class Comparison(NamedTuple):
    """Two revisions."""

    before: str
    """What the revision was called, and what it is: ``main (5948652)``."""
    turns: int
    """Of A B B A: there are twice as many pairs."""
    figures: tuple[Compared, ...]
    skipped: tuple[str, ...]
    """What only one of the two has."""


def against(root: Path, ref: str, suites: Sequence[str], turns: int) -> Comparison:
    """Measure both, one suite after the other.

    Raises:
        Unmeasured: No such revision, it does not build, or the two have nothing in common.
    """
    figures: list[Compared] = []
    skipped: list[str] = []
    with worktree(root, ref) as (other, name):
        _build(other, name)
        for suite in suites:
            print(f"measuring {suite}, {2 * turns} pairs ...", file=sys.stderr, flush=True)
            before, after = _measure(other, root, suite, turns)
            if not before:
                skipped.append(f"suite {suite}: not in {name}")
                continue
            figures += (
                Compared(key, unit, medians, after[key][1])
                for key, (unit, medians) in before.items()
                if key in after
            )
            only = (f"{key}: only in this tree" for key in after if key not in before)
            skipped += [*only, *(f"{key}: only in {name}" for key in before if key not in after)]
    if not figures:
        raise Unmeasured(f"--against {ref}: nothing to compare; {'; '.join(skipped) or 'no figure'}")
    return Comparison(name, turns, tuple(figures), tuple(skipped))


@contextlib.contextmanager
def worktree(root: Path, ref: str) -> Iterator[tuple[Path, str]]:
    """Another revision's files, in a directory that is gone afterwards, and what to call it.

    Raises:
        Unmeasured: There is no such revision, or it has no bench.
    """
    commit = _git(root, "rev-list", "--max-count=1", "--end-of-options", ref, "--")
    name = ref if commit.startswith(ref) else f"{ref} ({commit[:8]})"
    with tempfile.TemporaryDirectory(prefix="drahealth-bench-") as directory:
        tree = Path(directory, "tree")
        try:
            _git(root, "worktree", "add", "--quiet", "--detach", str(tree), commit)
            if not (tree / "agent/bench/__main__.py").exists():
                raise Unmeasured(f"--against {name}: that revision has no python -m agent.bench")
            yield tree, name
        finally:
            with contextlib.suppress(Unmeasured):
                _git(root, "worktree", "remove", "--force", str(tree))


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise Unmeasured("--against: git is not installed") from None
    if done.returncode:
        raise Unmeasured(f"--against: git {arguments[0]} in {root}: {done.stderr.strip()}")
    return done.stdout.strip()


def _build(tree: Path, name: str) -> None:
    print(f"building the core of {name} ...", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, *BUILD], cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unmeasured(f"--against {name}: its core does not build: {done.stderr[-2000:]}")


def _measure(before: Path, after: Path, suite: str, turns: int) -> tuple[Medians, Medians]:
    found: dict[Path, list[Mapping[str, Figure]]] = {before: [], after: []}
    for tree in (before, after, after, before) * turns:
        found[tree].append(_turn(tree, suite))
        if not found[before][0]:
            break
    return _together(found[before]), _together(found[after])


def _together(turns: Sequence[Mapping[str, Figure]]) -> Medians:
    """Of each figure that every turn has."""
    if not turns:
        return {}
    return {
        key: (figure.unit, tuple(turn[key].median for turn in turns))
        for key, figure in turns[0].items()
        if all(key in turn for turn in turns)
    }


def _turn(tree: Path, suite: str) -> Mapping[str, Figure]:
    """One quick run in a process of its own; empty if that tree has no such suite."""
    command = [sys.executable, "-m", "agent.bench", "--quick", "--json", "--suite", suite]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    pipe = subprocess.PIPE
    # in a session of its own: Ctrl-C is ours to pass on, once, so that it can end what it started
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as child:
        try:
            out, err = child.communicate()
        except BaseException:
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=END_S)
            child.kill()
            raise
    if child.returncode == UNKNOWN_SUITE:
        return {}
    if child.returncode:
        raise Unmeasured(f"{suite} in {tree}: exit {child.returncode}: {err[-2000:]}")
    return pyperf.read(out)
