"""The floors that are programs: ``benchmarks/floor.c``, compiled where there is a compiler."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agent.bench.budgets import checkout
from agent.bench.processes import Child, running
from agent.bench.result import Unmeasured
from agent.bench.trees import scratch

SOURCE: Final = "benchmarks/floor.c"


class NoFloor(Exception):
    """It cannot be had here; the text says why."""


@contextlib.contextmanager
def floor(*arguments: object) -> Iterator[Child]:
    """The program with these arguments, which listens, until the end of the block.

    Raises:
        NoFloor: This is no checkout, or there is no compiler.
    """
    root = checkout()
    if root is None:
        raise NoFloor("the floors in C are in the checkout only")
    if shutil.which("gcc") is None:
        raise NoFloor("the floors in C need gcc")
    with scratch() as directory:
        program = _build(root, directory)
        with running([str(program), *map(str, arguments)]) as child:
            child.wait(lambda line: "ready" in line)
            yield child


def _build(root: Path, directory: Path) -> Path:
    program = directory / "floor"
    command = ["gcc", "-std=c11", "-O2", "-D_GNU_SOURCE", str(root / SOURCE), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        raise Unmeasured(f"{SOURCE}: {built.stderr[-1000:]}")
    return program
