"""A driver as a process of its own. Nothing is judged here."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from patience import PATIENCE_S
from wire.serving import eventually

ROOT: Final = Path(__file__).parents[2]


class Program:
    """``python -m <module>``; :meth:`close` kills it if it still lives."""

    def __init__(self, module: str, *flags: str, log_file: Path, within: Sequence[str] = ()) -> None:
        """
        Args:
            module: The program.
            flags: Its arguments.
            log_file: Of both its outputs; made anew.
            within: A command that becomes what its arguments say: namespaces of its own.
        """
        self.log_file = log_file
        path = os.pathsep.join(map(str, (ROOT, ROOT / "examples", ROOT / "tests")))
        environ = {k: v for k, v in os.environ.items() if k not in {"NODE_NAME", "POD_UID"}}
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [*within, sys.executable, "-m", module, *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ | {"PYTHONPATH": path},
            )

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self.log_file.read_text()

    def said(self, what: str) -> list[dict[str, Any]]:
        """Its lines of JSON that are about this; those that are not yet whole come later."""
        lines = [line for line in self.log.splitlines(keepends=True) if line.startswith("{")]
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [one for one in found if one["what"] == what]

    def logs(self, words: str) -> None:
        """Returns when it has written these words."""
        eventually(lambda: words in self.log, f"{words!r} in the log")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signals it; returns its exit code, negative if the signal ended it, once it has ended."""
        self._process.send_signal(number)
        return self._process.wait(PATIENCE_S)

    def stand_still(self) -> None:
        """It does nothing until :meth:`go_on`."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """As before."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kills it, if it lives."""
        self._process.kill()
        self._process.wait()
