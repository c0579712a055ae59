"""Check that the C files of the core call each other in one direction only.

Usage: ``python tools/c_call_cycles.py [FOLDER]``. Prints one line. Exits with 1 if the calls between files
form a cycle, and names the files and one call of each step.

The check reads definitions and calls with regular expressions, so it relies on the layout of this code: a
definition begins in the first column, and its braces stand in the first column of their own lines. Calls of
an inline function or a macro in a header count as calls of the file that uses it. Taking the address of a
function is no call.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1] / "native" / "src"

_NOISE: Final = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
_FUNCTION: Final = re.compile(
    r"^(?P<head>[A-Za-z_][\w \t\n*()]*?)\b(?P<name>\w+)\((?P<parameters>[^;{}]*?)\)\s*\n\{\n(?P<body>.*?)^\}",
    re.MULTILINE | re.DOTALL,
)
_MACRO: Final = re.compile(
    r"^[ \t]*#define (?P<name>\w+)\([^)]*\)(?P<body>(?:[^\n]*\\\n)*[^\n]*)", re.MULTILINE
)
_CALL: Final = re.compile(r"\b([A-Za-z_]\w*)\s*\(")


class Function(NamedTuple):
    """One function or function-like macro."""

    file: str
    name: str
    is_static: bool
    calls: frozenset[str]


class Call(NamedTuple):
    """One call from a file to another."""

    caller: Function
    callee: Function

    def __str__(self) -> str:
        return f"{self.caller.file}: {self.caller.name}() calls {self.callee.name}() of {self.callee.file}"


def functions_of(file: str, text: str) -> Iterator[Function]:
    """Yield the functions and function-like macros that a file defines."""
    text = _NOISE.sub(" ", text)
    for found in _MACRO.finditer(text):
        yield Function(file, found["name"], True, frozenset(_CALL.findall(found["body"])))
    for found in _FUNCTION.finditer(_MACRO.sub("", text)):
        is_static = "static" in found["head"].split()
        yield Function(file, found["name"], is_static, frozenset(_CALL.findall(found["body"])))


def calls_between(sources: Mapping[str, str]) -> list[Call]:
    """Return one call for each pair of ``.c`` files of which the first calls the second."""
    functions = [function for file in sorted(sources) for function in functions_of(file, sources[file])]
    local = {(function.file, function.name): function for function in functions}
    shared = {
        function.name: function
        for function in functions
        if not function.is_static or function.file.endswith(".h")
    }

    def callees(file: str, names: frozenset[str], passed: frozenset[str]) -> Iterator[Function]:
        for name in sorted(names - passed):
            callee = local.get((file, name)) or shared.get(name)
            if callee is None:
                continue
            if callee.file.endswith(".h"):
                yield from callees(callee.file, callee.calls, passed | {name})
            else:
                yield callee

    pairs: dict[tuple[str, str], Call] = {}
    for caller in functions:
        if caller.file.endswith(".h"):
            continue
        for callee in callees(caller.file, caller.calls, frozenset()):
            if callee.file != caller.file:
                pairs.setdefault((caller.file, callee.file), Call(caller, callee))
    return [pairs[pair] for pair in sorted(pairs)]


def call_cycle(sources: Mapping[str, str]) -> list[Call]:
    """Return the calls of one cycle between files, in order; an empty list if there is none.

    Args:
        sources: Text by file name.
    """
    out: dict[str, list[Call]] = {}
    for call in calls_between(sources):
        out.setdefault(call.caller.file, []).append(call)
    finished: set[str] = set()

    def search(file: str, path: list[Call]) -> list[Call]:
        for start, call in enumerate(path):
            if call.caller.file == file:
                return path[start:]
        if file in finished:
            return []
        for call in out.get(file, ()):
            cycle = search(call.callee.file, [*path, call])
            if cycle:
                return cycle
        finished.add(file)
        return []

    for file in sorted(out):
        cycle = search(file, [])
        if cycle:
            return cycle
    return []


def read_sources(folder: Path) -> dict[str, str]:
    """Return the text of every ``.c`` and ``.h`` file below a folder, by its path there."""
    files = sorted([*folder.rglob("*.c"), *folder.rglob("*.h")])
    return {str(file.relative_to(folder)): file.read_text("utf-8") for file in files}


def main(folder: Path) -> int:
    """Check one folder, print the result, and return the exit code."""
    sources = read_sources(folder)
    files = sum(file.endswith(".c") for file in sources)
    cycle = call_cycle(sources)
    if cycle:
        line = "call cycle: " + "; ".join(map(str, cycle))
    elif files:
        line = f"{files} C files, {len(calls_between(sources))} pairs of caller and callee, no call cycle"
    else:
        line = "no C files"
    sys.stdout.write(f"{folder.name}: {line}\n")
    return int(bool(cycle) or not files)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT))
