"""Commands that a run of conform executes, and that call functions of the test."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

POLL_S: Final = 0.02
SCRIPT: Final = """\
#!/bin/sh
cat > "{root}/input"
touch "{root}/ask-$1"
while [ -e "{root}/ask-$1" ]; do sleep 0.05; done
"""
"""Script that writes its standard input to a file, and waits for the end of the function of its argument."""


class Actions:
    """Script ``{root}/act``, which calls a function by name with its standard input, while entered.

    Args:
        root: Directory of the script.
        functions: Functions by name.
    """

    def __init__(self, root: Path, functions: Mapping[str, Callable[[str], object]]) -> None:
        self._root = root
        self._functions = functions
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        script = root / "act"
        script.write_text(SCRIPT.format(root=root))
        script.chmod(0o755)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(POLL_S):
            for path in self._root.glob("ask-*"):
                self._functions[path.name.removeprefix("ask-")]((self._root / "input").read_text())
                path.unlink()
