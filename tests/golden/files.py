"""Paths of the golden files, and directory trees of plain files to run cases on."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
INPUTS: Final = HERE / "inputs"
DOCUMENTS: Final = HERE / "documents"
STORIES: Final = HERE / "stories"
RELEASE: Final = HERE / "release_0_1"
SURFACE: Final = HERE / "surface"
MESSAGES: Final = HERE / "messages.json"
REPLIES: Final = HERE / "replies.json"
CONFORMANCE: Final = HERE / "conformance.json"
LINE_CHARS: Final = 110
DEPTH_MAX: Final = 5
WRITTEN_S: Final = 1_789_999_000
"""Modification time of every file of a tree [s since 1970]."""


def load(path: Path) -> Any:
    """Return the JSON value of a file."""
    return json.loads(path.read_text())


def store(path: Path, value: Any) -> None:
    """Write a JSON value as the next golden file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{_text(value, 0)}\n")


def _text(value: Any, depth: int) -> str:
    """Return a value as JSON: what fits on a line, or is deep inside, without line breaks."""
    line = json.dumps(value, ensure_ascii=False)
    if depth == DEPTH_MAX or len(line) <= LINE_CHARS or not isinstance(value, list | dict):
        return line
    if isinstance(value, list):
        parts = [_text(inner, depth + 1) for inner in value]
    else:
        parts = [f"{json.dumps(key)}: {_text(inner, depth + 1)}" for key, inner in value.items()]
    begin, end = "[]" if isinstance(value, list) else "{}"
    lines = ",\n".join(f"{' ' * (depth + 1)}{part}" for part in parts)
    return f"{begin}\n{lines}\n{' ' * depth}{end}"


def as_json(value: Any) -> Any:
    """Return a value as it is after a way through JSON."""
    return json.loads(json.dumps(value))


def list_golden_files(directory: Path) -> list[str]:
    """Return the names of the golden files of a directory, sorted."""
    return sorted(path.stem for path in directory.glob("*.json"))


@contextmanager
def temporary_root() -> Iterator[Path]:
    """Yield an empty directory whose path leaves room for the path of a socket."""
    with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory:
        yield Path(directory)


def plant(root: Path, tree: Mapping[str, str]) -> Path:
    """Write the files of a tree below a root; a path that ends in ``/`` is an empty directory."""
    for path, text in tree.items():
        file = root / path
        if path.endswith("/"):
            file.mkdir(parents=True, exist_ok=True)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            os.utime(file, (WRITTEN_S, WRITTEN_S))
    return root
