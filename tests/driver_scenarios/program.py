"""A driver as a process of its own."""

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
    """Process of ``python -m <module>``; :meth:`close` kills it."""

    def __init__(self, module: str, *flags: str, log_file: Path, within: Sequence[str] = ()) -> None:
        """Start the program.

        Args:
            module: Module of the program.
            flags: Arguments of the program.
            log_file: File for both outputs, truncated.
            within: Command that executes its arguments, such as unshare.
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
                env=environ | {"PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"},
            )

    @property
    def log(self) -> str:
        """Output so far."""
        return self.log_file.read_text()

    def records(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the complete JSON lines of these kinds."""
        lines = [line for line in self.log.splitlines(keepends=True) if line.startswith("{")]
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [child for child in found if child["what"] in kinds]

    def logs(self, words: str) -> None:
        """Wait until the output has a text."""
        eventually(lambda: words in self.log, f"{words!r} in the log")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit code, negative if the signal ended the program."""
        self._process.send_signal(number)
        try:
            return self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)  # Python prints the stacks of all threads
            self._process.wait(PATIENCE_S)
            raise AssertionError(f"the program did not end after {number.name}:\n{self.log}") from None

    def pause(self) -> None:
        """Stop the process until :meth:`resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a paused process."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the process, if it runs."""
        self._process.kill()
        self._process.wait()
