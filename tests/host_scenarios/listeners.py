"""Who listens to an agent: a client of the kubelet's API, and ``drahealth watch``. They judge nothing."""

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

from agents import HEALTHY, UNHEALTHY, UNKNOWN, Agent
from patience import PATIENCE_S
from wire.google import Watcher

HEALTH_WORDS: Final = {UNKNOWN: "Unknown", HEALTHY: "Healthy", UNHEALTHY: "Unhealthy"}
Document = dict[str, Any]


class Follower:
    """``drahealth watch -o json`` on the agent's socket, and all of its documents, each with its arrival."""

    def __init__(self, agent: Agent) -> None:
        command = [sys.executable, "-m", "agent", "watch", "-o", "json", str(agent.agent_socket)]
        self._log = agent.directory / "watch.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=agent.environ)
        self._lines: queue.Queue[tuple[int, bytes]] = queue.Queue()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        self._heard: list[tuple[int, Document]] = []

    def close(self) -> None:
        """Ends it."""
        with self._process:
            self._process.kill()
            self._thread.join()

    def hear(self, claim: Callable[[Document], bool], what: str) -> Document:
        """The newest document, if the claim is true of it, or the next of which it is."""
        self._catch_up()
        return self.first(claim, what, self._heard[-1][0] if self._heard else 0)[1]

    def first(
        self, claim: Callable[[Document], bool], what: str, since_ns: int, more_s: float = 0
    ) -> tuple[int, Document]:
        """The first document since that time of which the claim is true, and when it came.

        Args:
            more_s: How much longer than usual it may take [s].
        """
        deadline_s = time.monotonic() + PATIENCE_S + more_s
        self._catch_up()
        at = next((i for i, (at_ns, _) in enumerate(self._heard) if at_ns >= since_ns), len(self._heard))
        while True:
            for found in self._heard[at:]:
                if claim(found[1]):
                    return found
            at = len(self._heard)
            left_s = deadline_s - time.monotonic()
            heard = json.dumps(self.newest, indent=1) if self._heard else self._log.read_text()
            assert left_s > 0, f"never: {what}; but {heard}"
            with suppress(queue.Empty):
                self._take(self._lines.get(timeout=left_s))

    @property
    def newest(self) -> Document:
        """What it said last."""
        self._catch_up()
        return self._heard[-1][1]

    def _catch_up(self) -> None:
        while not self._lines.empty():
            self._take(self._lines.get())

    def _take(self, line: tuple[int, bytes]) -> None:
        self._heard.append((line[0], json.loads(line[1])))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put((time.monotonic_ns(), line))


class Kubelet:
    """What a kubelet knows: the newest entry of each device. Not every list names all of them."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self.entries: dict[str, Any] = {}

    def hear(self, claim: Callable[[], bool], what: str) -> None:
        """Returns when the claim about the entries is true."""
        deadline_s = time.monotonic() + PATIENCE_S
        self.catch_up()
        while not claim():
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, "\n".join([f"not within {PATIENCE_S} s: {what}; but", *self._words()])
            with suppress(queue.Empty):
                self._take(self._watcher.next(left_s))

    def catch_up(self) -> None:
        """Takes all that has come."""
        while self._watcher.pending():
            self._take(self._watcher.next())

    def _words(self) -> Iterator[str]:
        return (f"{HEALTH_WORDS[one.health]} {name}: {one.message}" for name, one in self.entries.items())

    def _take(self, message: Any) -> None:
        self.entries |= {one.device.device_name: one for one in message.devices}


def device_of(document: Document, name: str, driver: str = "") -> Document | None:
    """The verdict on a device."""
    return next((one for one in document["devices"] if (one["name"], one["driver"]) == (name, driver)), None)


def source_of(document: Document, name: str) -> Document:
    """How one source is doing."""
    return next(one for one in document["sources"] if one["name"] == name)


def words_of(cause: Document) -> str:
    """Code and evidence of a cause, or of a note."""
    return f"{cause['code']}: {cause['evidence']}"
