"""``--check`` finds what makes the agent dearer: copies of this tree, each with one mistake in it.

Each is a line that somebody might write. The check runs on the changed sources as it does in any checkout,
and is asked only for the guards that ought to notice.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from patience import PATIENCE_S

from agent.bench.against import BUILD
from agent.bench.counts import compiler

ROOT: Final = Path(__file__).resolve().parents[1]
COPIED: Final = ("agent", "benchmarks", "native", "pyproject.toml", "setup_build.py")
LEFT: Final = shutil.ignore_patterns("__pycache__", "build", "tests", "fuzz")


class Mistake(NamedTuple):
    """One place of a file, and what stands there instead."""

    file: str
    place: str
    instead: str
    missed: tuple[str, ...]
    """Guards that must notice."""
    is_built: bool = False
    """Whether the module itself must be built of the changed sources: the guards run it live."""


MISTAKES: Final = {
    "an extra open per file": Mistake(
        "native/src/core/files.c",
        "        n = pread(f->fd,",
        '        close(openat(s->sysfs_fd, ".", O_RDONLY));\n        n = pread(f->fd,',
        ("system_calls.pass", "instructions.pass"),
    ),
    "every byte is parsed, changed or not": Mistake(
        "native/src/core/files.c",
        "if (f->seen && !f->err && (uint32_t)n == f->len && !memcmp(buf, f->last, f->len))",
        "if (f->err)",
        ("instructions.pass",),
    ),
    "every answer of a GPU is taken, changed or not": Mistake(
        "native/src/gpu/gpu_batch.c",
        "            return false;\n    return true;\n}\n\nstatic void keep(",
        "            return false;\n    return false;\n}\n\nstatic void keep(",
        ("instructions.pass_8_gpus",),
    ),
    "a look at the clock per answer of a GPU": Mistake(
        "native/src/gpu/gpu_batch.c",
        "        s->batch[i].valueType = NO_TYPE;\n",
        "        s->batch[i].valueType = NO_TYPE;\n        s->batch[i].timestamp = (long long)dh_now_ns();\n",
        ("instructions.pass_8_gpus",),
    ),
    "what stands still is swept as often as what moves": Mistake(
        "native/src/cgroup/cgroups.c",
        "#define WHOLE_SWEEPS 6\n",
        "#define WHOLE_SWEEPS 1\n",
        ("system_calls.still_100_groups",),
    ),
    "an allocation per pass": Mistake(
        "native/src/core/sampler.c",
        "    s->now_ns = dh_now_ns();\n    s->resync = ",
        "    void *volatile log = malloc(64);\n\n    free(log);\n"
        "    s->now_ns = dh_now_ns();\n    s->resync = ",
        ("allocations.pass",),
    ),
    "a Python wakeup per tick": Mistake(
        "native/src/core/sampler.c",
        "    if (s->first)\n        s->wake = true;\n",
        "    s->wake = true;\n",
        ("system_calls.pass", "wakeups.quiet_passes"),
        is_built=True,
    ),
    "Python looks every second": Mistake(
        "agent/engine/loop.py",
        "        until_ns = self._owed_ns()\n",
        "        until_ns = min(self._owed_ns(), self._clock().mono_ns + NS)\n",
        ("wakeups.quiet_minute",),
    ),
    "a look that keeps something": Mistake(
        "agent/engine/step.py",
        "    settings = state.settings\n    began = ",
        "    step.__annotations__[str(len(step.__annotations__))] = object()\n"
        "    settings = state.settings\n    began = ",
        ("allocations.quiet_look",),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_that_makes_the_agent_dearer_is_found_and_named(mistake: Mistake, tmp_path: Path) -> None:
    for tool in (compiler(), "strace", "valgrind"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    make(tmp_path, mistake)
    done = check(tmp_path, mistake.missed)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(f"{len(mistake.missed)} missed: {', '.join(mistake.missed)}")


def make(tree: Path, mistake: Mistake) -> None:
    """A copy of this checkout with the mistake in it."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=LEFT)
        else:
            shutil.copy2(ROOT / name, tree)
    text = (tree / mistake.file).read_text()
    assert text.count(mistake.place) == 1, f"{mistake.file} has changed: make the mistake elsewhere"
    (tree / mistake.file).write_text(text.replace(mistake.place, mistake.instead))
    if mistake.is_built:
        subprocess.run([sys.executable, *BUILD], cwd=tree, check=True, capture_output=True)


def check(tree: Path, guards: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "agent.bench", "--check", *guards]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    return subprocess.run(
        command,
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE_S,
        check=False,
    )
