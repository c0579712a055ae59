"""Record the golden files again, with the code of this checkout.

Usage, in ``tests/``: ``../.venv/bin/python -m golden.make [PART ...]``, with parts such as ``documents``.

Run it in a checkout of the release whose behaviour is to be kept, or after an intended change of behaviour.
Then read the diff.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from golden import commands, conformance, files, messages, release, stories, surface
from golden.compare import without_prose
from golden.files import as_json


def store(path: Path, value: Any) -> None:
    """Write a golden file, without its texts for people."""
    files.store(path, without_prose(as_json(value)))


def _documents() -> None:
    for name, case in commands.CASES.items():
        store(files.DOCUMENTS / f"{name}.json", commands.result(case))


def _stories() -> None:
    for name in stories.STORIES:
        store(files.STORIES / f"{name}.json", stories.steps(name))


def _surface() -> None:
    for name, read in surface.SURFACE.items():
        store(files.SURFACE / f"{name}.json", read())


def _messages() -> None:
    store(files.MESSAGES, messages.encode_messages())
    replies = {"replies": messages.replies(), "refusals": messages.refusals(), "lines": messages.lines()}
    store(files.REPLIES, replies)


PARTS: Final[Mapping[str, Callable[[], None]]] = {
    "messages": _messages,
    "release": release.write_release,
    "documents": _documents,
    "stories": _stories,
    "conformance": lambda: store(files.CONFORMANCE, conformance.documents()),
    "surface": _surface,
}
"""Parts in the order of recording: documents need messages and files, stories need documents."""


def main(names: list[str]) -> int:
    """Record the parts of these names, or all; return the exit code."""
    if unknown := set(names) - set(PARTS):
        sys.stderr.write(f"{', '.join(sorted(unknown))}: none of {', '.join(PARTS)}\n")
        return 64
    for name, record in PARTS.items():
        if name in names or not names:
            record()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
