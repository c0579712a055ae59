"""``--against``: comparison with another revision, in real repositories with a stub of the bench."""

import importlib.util
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from patience import PATIENCE_S
from wire.serving import eventually

from agent.bench.report import read_host
from agent.bench.result import MeasurementError
from agent.bench.revisions import (
    QUICK_TURNS,
    FigureComparison,
    RevisionComparison,
    compare_revisions,
    comparison_text,
    temporary_worktree,
)

ROOT: Final = Path(__file__).resolve().parents[1]
STUB: Final = """\
import json, os, pathlib, sys
suite = sys.argv[sys.argv.index("--suite") + 1]
if suite not in {suites}:
    sys.exit(2)
here = pathlib.Path(__file__).parents[2]
with open({log!r}, "a") as log:
    print({name!r}, suite, os.getcwd() == str(here), file=log)
made = lambda name, value: {{"metadata": {{"name": name, "unit": "second"}}, "runs": [{{"values": [value]}}]}}
print(json.dumps({{"benchmarks": [made("a.b", {value}), made("a." + {name!r}, 1.0)]}}))
"""
ENDLESS: Final = """\
import os, pathlib, time
parent = os.getppid()
try:
    pathlib.Path("{running}").touch()
    while os.getppid() == parent:
        time.sleep(0.05)
except KeyboardInterrupt:
    pathlib.Path("{interrupted}").touch()
"""
"""Bench that runs until it is interrupted or its parent ends."""


class Repository:
    """Git repository with a stub of the bench, in a commit and in the working tree."""

    def __init__(self, root: Path) -> None:
        self.root = root / "repository"
        self.log = root / "log"
        (self.root / "agent/bench").mkdir(parents=True)
        (self.root / "agent/__init__.py").touch()
        (self.root / "agent/bench/__init__.py").touch()
        (self.root / "pyproject.toml").write_text('[project]\nname = "agent"\nversion = "1"\n')
        self.git("init", "--quiet", "--initial-branch", "main")

    def bench(self, name: str, value: float, suites: tuple[str, ...] = ("a",)) -> None:
        """Write the stub of the working tree: its name, value and suites."""
        text = STUB.format(suites=set(suites), log=str(self.log), name=name, value=value)
        (self.root / "agent/bench/__main__.py").write_text(text)

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "--message", "m")

    def git(self, *arguments: str) -> str:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=self.root, check=True, capture_output=True, text=True)
        return done.stdout

    def turns(self) -> list[str]:
        return self.log.read_text().splitlines()

    def worktrees(self) -> int:
        return len(self.git("worktree", "list").splitlines())


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    made = Repository(tmp_path)
    made.bench("old", 1.0)
    made.commit()
    return made


def test_compare_revisions_alternates_runs_of_both_trees(repository: Repository) -> None:
    repository.bench("new", 2.0)
    found = compare_revisions(repository.root, "main", ["a"], turns=3)
    old, new = "old a True", "new a True"
    assert repository.turns() == [old, new, new, old] * 3
    (figure,) = found.figures
    assert (figure.key, figure.before, figure.after) == ("a.b", (1.0,) * 6, (2.0,) * 6)
    assert (figure.ratio.median, figure.verdict) == (2.0, "more")
    assert found.before.startswith("main (")
    assert found.skipped == ("a.new: only in this tree", f"a.old: only in {found.before}")
    assert repository.worktrees() == 1, "the worktree is removed"


def test_suite_missing_in_revision_is_skipped_and_named(repository: Repository) -> None:
    repository.bench("new", 2.0, ("a", "b"))
    found = compare_revisions(repository.root, "main", ["a", "b"], turns=1)
    assert f"suite b: not in {found.before}" in found.skipped
    assert not any("new b" in turn for turn in repository.turns())


def test_unknown_revision_raises_git_error(repository: Repository) -> None:
    with pytest.raises(MeasurementError, match=r"git rev-list in .*: fatal: bad revision 'nowhere'"):
        compare_revisions(repository.root, "nowhere", ["a"], turns=1)


def test_directory_outside_git_raises(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="not a git repository"):
        compare_revisions(tmp_path, "HEAD", ["a"], turns=1)


def test_revision_without_bench_raises_and_leaves_no_worktree(repository: Repository) -> None:
    shutil.rmtree(repository.root / "agent/bench")
    repository.commit()
    with (
        pytest.raises(MeasurementError, match="has no agent/bench"),
        temporary_worktree(repository.root, "HEAD"),
    ):
        raise AssertionError("the revision has no bench")
    assert repository.worktrees() == 1


def test_failed_run_raises_with_its_stderr(repository: Repository) -> None:
    (repository.root / "agent/bench/__main__.py").write_text("raise SystemExit('no such luck')")
    with pytest.raises(MeasurementError, match="no such luck"):
        compare_revisions(repository.root, "main", ["a"], turns=1)
    assert repository.worktrees() == 1


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_comparison_interrupts_run_and_removes_worktree(
    repository: Repository, signal_number: signal.Signals
) -> None:
    """The signal arrives while the bench of the revision runs; it is interrupted, too."""
    interrupted = repository.root.parent / "interrupted"
    running = repository.root.parent / "running"
    (repository.root / "agent/bench/__main__.py").write_text(
        ENDLESS.format(running=running, interrupted=interrupted)
    )
    repository.commit()
    call = f"compare_revisions(pathlib.Path({str(repository.root)!r}), 'HEAD', ['a'], 1)"
    handled = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))"
    program = (
        f"import pathlib, signal, sys; from agent.bench.revisions import compare_revisions; {handled}; {call}"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL, cwd=ROOT) as process:
        try:
            eventually(running.exists, "the measured bench runs")
            process.send_signal(signal_number)
            assert process.wait(timeout=PATIENCE_S) in {143, -signal.SIGINT}
        finally:
            process.kill()
    assert interrupted.exists()
    assert repository.worktrees() == 1


COMPARISONS: Final = 4
SLOWER: Final = """

_once = encode_health_lists


def encode_health_lists(entries: Sequence[WireHealth]) -> list[bytes]:
    for _ in range(4):
        _once(entries)
    return _once(entries)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Clone of this checkout with its core, and a branch ``slower``, which encodes five times."""
    for program in ("git", "gcc"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    root = tmp_path / "clone"

    def git(*arguments: str, at: Path = root) -> None:
        subprocess.run(["git", *arguments], cwd=at, check=True, capture_output=True)

    try:
        git("clone", "--quiet", "--shared", str(ROOT), str(root), at=tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this is no checkout: {error.stderr.decode()}")
    core = importlib.util.find_spec("agent.native._core")
    assert core is not None
    assert core.origin is not None
    shutil.copy(core.origin, root / "agent/native")
    git("branch", "unchanged")
    git("switch", "--quiet", "--create", "slower")
    file = root / "agent/native/health_encoder.py"
    file.write_text(file.read_text() + SLOWER)
    git("-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "--all", "--message", "slower")
    git("switch", "--quiet", "unchanged")
    return root


@pytest.mark.slow
def test_slower_revision_gets_verdict_only_for_changed_rows(checkout: Path) -> None:
    """Measure both revisions: the changed rows take less time in this tree, the others are equal.

    Another program may use the CPUs in one of the six pairs, so the comparison is repeated.
    """
    for _ in range(COMPARISONS):
        found = compare_revisions(checkout, "slower", ["encode"], QUICK_TURNS)
        changed = {figure.key: figure for figure in found.figures if figure.key.endswith(".core")}
        assert {*changed} == {"encode.8.core", "encode.128.core", "encode.1000.core"}
        assert not found.skipped
        unchanged = [figure for figure in found.figures if figure.key not in changed]
        assert unchanged
        verdicts = {figure.verdict for figure in changed.values()}
        most = max(max(figure.ratio.median, 1 / figure.ratio.median) for figure in unchanged)
        if (verdicts, most < 2) == ({"less"}, True):
            break
    assert (verdicts, most < 2) == ({"less"}, True), found


# --- statistics -------------------------------------------------------------------------------------------


def comparison_of(*ratios: float) -> FigureComparison:
    return FigureComparison("a.b", "s", (1.0,) * len(ratios), ratios)


def test_p_value_is_that_of_the_sign_test() -> None:
    assert comparison_of(1.1, 1.1, 1.1, 1.1, 1.1, 1.1).p_value == pytest.approx(2 / 64)
    assert comparison_of(1.1, 1.1, 1.1, 1.1, 1.1, 0.9).p_value == pytest.approx(14 / 64)
    assert comparison_of(1.1, 0.9).p_value == 1.0
    assert comparison_of(1.0, 1.0).p_value == 1.0, "equal pairs have no sign"


def test_verdict_needs_significance_and_three_percent() -> None:
    assert comparison_of(1.1, 1.1, 1.1, 1.1, 1.1, 1.1).verdict == "more"
    assert comparison_of(0.5, 0.6, 0.7, 0.8, 0.9, 0.95).verdict == "less"
    assert comparison_of(1.1, 1.1, 1.1, 1.1, 1.1).verdict == "", (
        "five equal signs occur by chance in 1 of 16 cases"
    )
    assert comparison_of(1.02, 1.02, 1.02, 1.02, 1.02, 1.02).verdict == ""


def test_comparison_text_states_figures_and_expected_chance_count() -> None:
    found = RevisionComparison(
        "main (5948652f)", 3, (comparison_of(*(1.1,) * 6), comparison_of(*(1.0,) * 6)), ("x: only in y",)
    )
    lines = comparison_text(read_host(), found).splitlines()
    assert lines[-1] == "x: only in y"
    assert "6 of 6" in lines[-5]
    assert lines[-2].startswith("1 of 2 figures differ")
