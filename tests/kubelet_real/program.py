"""The Go program as a process: commands to it, its answers, and its reports."""

import itertools
import json
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from patience import PATIENCE_S

CALL_S: Final = 45.0 + PATIENCE_S
"""Limit of one command: the kubelet waits for a driver up to 45 s."""


class ProcessEndedError(ValueError):
    """A command had no answer when the program ended."""


class Program:
    """A running program. Thread-safe."""

    def __init__(self, binary: Path, root: Path, *flags: str, on_event: Callable[[Mapping[str, Any]], None]):
        """Start the program and wait until it runs.

        Args:
            binary: Path of the compiled program.
            root: The kubelet's directory. The program's stderr is kept there.
            flags: Further flags.
            on_event: Called in a thread with each report, in order.
        """
        self._stderr = root / "kubelet-stderr"
        with self._stderr.open("a") as stderr:
            self._process = subprocess.Popen(
                [str(binary), "--root", str(root), *flags],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._on_event = on_event
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[int, queue.SimpleQueue[Mapping[str, Any] | None]] = {}
        self._over = False
        self._started = threading.Event()
        self._reader = threading.Thread(target=self._read, name="kubelet-real", daemon=True)
        self._reader.start()
        assert self._started.wait(PATIENCE_S), f"the kubelet did not start: {self._stderr.read_text()}"

    def call(self, verb: str, **arguments: Any) -> Any:
        """Run a command and return its result.

        Raises:
            ValueError: the kubelet's code returned an error, with its text.
            ProcessEndedError: the program ended.
        """
        answers: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        with self._lock:
            if self._over:
                raise ProcessEndedError("the kubelet has ended")
            number = next(self._ids)
            self._waiting[number] = answers
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps({"ID": number, "Do": verb, **arguments}) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise ProcessEndedError("the kubelet has ended") from None
        answer = answers.get(timeout=CALL_S)
        if answer is None:
            raise ProcessEndedError("the kubelet has ended")
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer.get("result")

    def end(self, *, graceful: bool) -> None:
        """End the program: by SIGTERM, as systemd stops a kubelet, or by SIGKILL.

        Raises:
            AssertionError: the program had ended by itself.
        """
        crash = self._process.poll()
        self._process.send_signal(signal.SIGTERM if graceful else signal.SIGKILL)
        self._process.wait(PATIENCE_S)
        self._reader.join()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        with suppress(BrokenPipeError):  # part of a command was not read
            self._process.stdin.close()
        assert crash is None, f"the kubelet ended with {crash}: {self._stderr.read_text()}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith("\n"):  # the program was killed within a line
                break
            report = json.loads(line)
            if "id" in report:
                with self._lock:
                    answers = self._waiting.pop(report["id"])
                answers.put(report)
            elif report["event"] == "started":
                self._started.set()
            else:
                self._on_event(report)
        self._started.set()
        with self._lock:
            self._over = True
            for answers in self._waiting.values():
                answers.put(None)
