"""Subscribers of an agent: a client of the kubelet's API, and ``drahealth watch``."""

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
    """``drahealth watch -o json`` on the agent's socket, with its documents and their times of arrival."""

    def __init__(self, agent: Agent) -> None:
        command = [sys.executable, "-m", "agent", "watch", "-o", "json", str(agent.agent_socket)]
        self._log = agent.directory / "watch.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=agent.environ)
        self._lines: queue.Queue[tuple[int, bytes]] = queue.Queue()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        self._documents: list[tuple[int, Document]] = []

    def close(self) -> None:
        """End the process."""
        with self._process:
            self._process.kill()
            self._thread.join()

    def wait_for(self, condition: Callable[[Document], bool], description: str) -> Document:
        """Return the newest document if the condition holds for it, or the next one for which it does."""
        self._catch_up()
        return self.first(condition, description, self._documents[-1][0] if self._documents else 0)[1]

    def first(
        self, condition: Callable[[Document], bool], description: str, since_ns: int, more_s: float = 0
    ) -> tuple[int, Document]:
        """Return the first document since ``since_ns`` for which the condition holds, and its arrival time.

        Args:
            more_s: Time to wait in addition to the usual limit [s].
        """
        deadline_s = time.monotonic() + PATIENCE_S + more_s
        self._catch_up()
        at = next(
            (i for i, (at_ns, _) in enumerate(self._documents) if at_ns >= since_ns), len(self._documents)
        )
        while True:
            for found in self._documents[at:]:
                if condition(found[1]):
                    return found
            at = len(self._documents)
            left_s = deadline_s - time.monotonic()
            published = json.dumps(self.newest, indent=1) if self._documents else self._log.read_text()
            assert left_s > 0, f"never: {description}; but {published}"
            with suppress(queue.Empty):
                self._take(self._lines.get(timeout=left_s))

    @property
    def newest(self) -> Document:
        """Newest document."""
        self._catch_up()
        return self._documents[-1][1]

    def _catch_up(self) -> None:
        while not self._lines.empty():
            self._take(self._lines.get())

    def _take(self, line: tuple[int, bytes]) -> None:
        self._documents.append((line[0], json.loads(line[1])))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put((time.monotonic_ns(), line))


class Kubelet:
    """State of a kubelet: the newest entry of each device. Not every message names all devices."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self.entries: dict[str, Any] = {}

    def wait_for(self, condition: Callable[[], bool], description: str) -> None:
        """Wait until the claim about the entries holds."""
        deadline_s = time.monotonic() + PATIENCE_S
        self.catch_up()
        while not condition():
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, "\n".join(
                [f"not within {PATIENCE_S} s: {description}; but", *self._entries_text()]
            )
            with suppress(queue.Empty):
                self._take(self._watcher.next(left_s))

    def catch_up(self) -> None:
        """Process all pending messages."""
        while self._watcher.pending_count():
            self._take(self._watcher.next())

    def _entries_text(self) -> Iterator[str]:
        return (
            f"{HEALTH_WORDS[entry.health]} {name}: {entry.message}" for name, entry in self.entries.items()
        )

    def _take(self, message: Any) -> None:
        self.entries |= {device.device.device_name: device for device in message.devices}


def device_of(document: Document, name: str, driver: str = "") -> Document | None:
    """Return the verdict on a device."""
    return next(
        (entry for entry in document["devices"] if (entry["name"], entry["driver"]) == (name, driver)), None
    )


def source_of(document: Document, name: str) -> Document:
    """Return the state of a source."""
    return next(source for source in document["sources"] if source["name"] == name)


def cause_text(cause: Document) -> str:
    """Return code and evidence of a cause or note."""
    return f"{cause['code']}: {cause['evidence']}"
