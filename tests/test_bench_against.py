"""``--against``: another revision beside this tree. Real repositories of a bench that is told what to say."""

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

from agent.bench import versus
from agent.bench.against import QUICK_TURNS, Compared, Comparison, against, worktree
from agent.bench.host import host
from agent.bench.result import Unmeasured

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
    pathlib.Path("{told}").touch()
"""
"""A bench that ends when it is told to, or with the one that measures it."""


class Repository:
    """With a stub of a bench, in a commit and in the working tree."""

    def __init__(self, root: Path) -> None:
        self.root = root / "repository"
        self.log = root / "log"
        (self.root / "agent/bench").mkdir(parents=True)
        (self.root / "agent/__init__.py").touch()
        (self.root / "agent/bench/__init__.py").touch()
        (self.root / "pyproject.toml").write_text('[project]\nname = "agent"\nversion = "1"\n')
        self.git("init", "--quiet", "--initial-branch", "main")

    def bench(self, name: str, value: float, suites: tuple[str, ...] = ("a",)) -> None:
        """What the bench of the working tree finds from now on."""
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


def test_both_are_measured_in_turns_each_in_its_own_tree(repository: Repository) -> None:
    repository.bench("new", 2.0)
    found = against(repository.root, "main", ["a"], turns=3)
    old, new = "old a True", "new a True"
    assert repository.turns() == [old, new, new, old] * 3
    (figure,) = found.figures
    assert (figure.key, figure.before, figure.after) == ("a.b", (1.0,) * 6, (2.0,) * 6)
    assert (figure.ratio.median, figure.verdict) == (2.0, "more")
    assert found.before.startswith("main (")
    assert found.skipped == ("a.new: only in this tree", f"a.old: only in {found.before}")
    assert repository.worktrees() == 1, "it is removed"


def test_a_suite_that_the_revision_has_not_is_named_and_not_measured_again(repository: Repository) -> None:
    repository.bench("new", 2.0, ("a", "b"))
    found = against(repository.root, "main", ["a", "b"], turns=1)
    assert f"suite b: not in {found.before}" in found.skipped
    assert not any("new b" in turn for turn in repository.turns())


def test_a_revision_that_git_does_not_know_is_refused(repository: Repository) -> None:
    with pytest.raises(Unmeasured, match=r"git rev-list in .*: fatal: bad revision 'nowhere'"):
        against(repository.root, "nowhere", ["a"], turns=1)


def test_what_is_no_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unmeasured, match="not a git repository"):
        against(tmp_path, "HEAD", ["a"], turns=1)


def test_a_revision_without_a_bench_is_refused_and_leaves_no_worktree(repository: Repository) -> None:
    shutil.rmtree(repository.root / "agent/bench")
    repository.commit()
    with pytest.raises(Unmeasured, match="has no python -m"), worktree(repository.root, "HEAD"):
        raise AssertionError("there is nothing to measure")
    assert repository.worktrees() == 1


def test_a_bench_that_fails_is_told_with_its_last_words(repository: Repository) -> None:
    (repository.root / "agent/bench/__main__.py").write_text("raise SystemExit('no such luck')")
    with pytest.raises(Unmeasured, match="no such luck"):
        against(repository.root, "main", ["a"], turns=1)
    assert repository.worktrees() == 1


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_comparison_leaves_no_worktree(repository: Repository, how: signal.Signals) -> None:
    """While the bench of the revision runs, which is told, too."""
    told = repository.root.parent / "told"
    running = repository.root.parent / "running"
    (repository.root / "agent/bench/__main__.py").write_text(ENDLESS.format(running=running, told=told))
    repository.commit()
    call = f"against(pathlib.Path({str(repository.root)!r}), 'HEAD', ['a'], 1)"
    handled = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))"
    program = f"import pathlib, signal, sys; from agent.bench.against import against; {handled}; {call}"
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL, cwd=ROOT) as process:
        try:
            eventually(running.exists, "what is measured runs")
            process.send_signal(how)
            assert process.wait(timeout=PATIENCE_S) in {143, -signal.SIGINT}
        finally:
            process.kill()
    assert told.exists()
    assert repository.worktrees() == 1


SLOWER: Final = """

_once = encode_health


def encode_health(entries: Sequence[WireHealth]) -> list[bytes]:
    for _ in range(4):
        _once(entries)
    return _once(entries)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone of this checkout with its core, and a branch ``slower``, which encodes five times."""
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
    file = root / "agent/native/encode.py"
    file.write_text(file.read_text() + SLOWER)
    git("-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "--all", "--message", "slower")
    git("switch", "--quiet", "unchanged")
    return root


def test_a_revision_that_is_slower_is_told_from_one_that_is_not(checkout: Path) -> None:
    """Builds it, and measures both: what was changed takes less here, and what was not stays what it was."""
    found = against(checkout, "slower", ["encode"], QUICK_TURNS)
    changed = {one.key: one for one in found.figures if one.key.endswith(".core")}
    assert {*changed} == {"encode.8.core", "encode.128.core", "encode.1000.core"}
    assert {one.verdict for one in changed.values()} == {"less"}
    same = [one for one in found.figures if one.key not in changed]
    assert same
    assert all(max(one.ratio.median, 1 / one.ratio.median) < 2 for one in same)
    assert not found.skipped


# --- statistics -------------------------------------------------------------------------------------------


def compared(*ratios: float) -> Compared:
    return Compared("a.b", "s", (1.0,) * len(ratios), ratios)


def test_the_sign_test_asks_how_often_chance_would_differ_so() -> None:
    assert compared(1.1, 1.1, 1.1, 1.1, 1.1, 1.1).p == pytest.approx(2 / 64)
    assert compared(1.1, 1.1, 1.1, 1.1, 1.1, 0.9).p == pytest.approx(14 / 64)
    assert compared(1.1, 0.9).p == 1.0
    assert compared(1.0, 1.0).p == 1.0, "equal pairs have no sign"


def test_a_verdict_needs_enough_pairs_of_one_sign_and_three_percent() -> None:
    assert compared(1.1, 1.1, 1.1, 1.1, 1.1, 1.1).verdict == "more"
    assert compared(0.5, 0.6, 0.7, 0.8, 0.9, 0.95).verdict == "less"
    assert compared(1.1, 1.1, 1.1, 1.1, 1.1).verdict == "", "five of a sign happen once in sixteen times"
    assert compared(1.02, 1.02, 1.02, 1.02, 1.02, 1.02).verdict == ""


def test_what_was_found_is_said_with_what_chance_would_do() -> None:
    found = Comparison(
        "main (5948652f)", 3, (compared(*(1.1,) * 6), compared(*(1.0,) * 6)), ("x: only in y",)
    )
    lines = versus.text(host(), found).splitlines()
    assert lines[-1] == "x: only in y"
    assert "6 of 6" in lines[-6]
    assert lines[-3].startswith("1 of 2 figures differ")
