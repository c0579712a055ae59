"""An agent, who listens to it, and the clock between a cause and what they hear.

Two strangers listen: on each driver's socket Google's gRPC reads the kubelet's API, and on ``agent.sock`` a
``drahealth watch -o json`` reads everything else. What they must hear is said by the tests.
"""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import psutil
from agents import DRIVER, Agent
from wire.google import names, watch_health
from wire.serving import eventually

from host_scenarios.figures import Figure, Figures
from host_scenarios.listeners import HEALTH_WORDS, Document, Follower, Kubelet, device_of, words_of

OWNER: Final = "b.example.com"
"""A driver that declares devices; DRIVER's socket serves the host's own."""
NEWCOMER: Final = "c.example.com"
"""One that declares none at first."""
DRIVERS: Final = (DRIVER, OWNER, NEWCOMER)
FAST: Final = ("--period", "100ms", "--node-name", "node")
STREAM: Final = '[stream]\nheartbeat = "500ms"\n'
_ID: Final = re.compile(r"\b[0-9a-f]{8}[-0-9a-f]{24,}\b")


class Cause(NamedTuple):
    """Something that happened."""

    signal: str
    how: str
    at_ns: int


class Stage:
    """An agent with three drivers, and everybody who listens to it. Leaving ends them all."""

    def __init__(
        self,
        directory: Path,
        figures: Figures,
        *flags: str,
        config: str = "",
        environ: dict[str, str] | None = None,
        within: Sequence[str] = (),
        declared: str = "",
    ) -> None:
        """Args beyond those of an agent: what OWNER declares from the beginning."""
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self._figures = figures
        self._cause: Cause | None = None
        if declared:
            self.declare(declared)
        others = [word for name in DRIVERS[1:] for word in ("--driver", name)]
        with ExitStack() as opening:
            self.agent = opening.enter_context(
                Agent(
                    directory,
                    *(*FAST, *others, *flags),
                    config=STREAM + config,
                    environ=environ,
                    within=within,
                )
            )
            self.follower = Follower(self.agent)
            opening.callback(self.follower.close)
            sockets = self.agent.directory / "run/drivers"
            self.kubelets = {
                name: Kubelet(opening.enter_context(watch_health(sockets / f"{name}.sock")))
                for name in DRIVERS
            }
            self.follower.hear(bool, "the first document")
            self._open = opening.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                assert "Traceback" not in self.agent.log, self.agent.log
                assert self.agent.process.poll() is None, self.agent.log
        finally:
            self._open.close()

    # --- what is done ---------------------------------------------------------------------------------------

    def declare(self, text: str, driver: str = OWNER) -> None:
        """The driver says what its devices are, as a driver should: under another name first."""
        directory = self.directory / "run/devices.d"
        directory.mkdir(parents=True, exist_ok=True)
        new = directory / f".{driver}.toml"
        new.write_text(f"version = 1\n{text}")
        new.chmod(0o644)
        new.rename(directory / f"{driver}.toml")

    def recant(self, driver: str) -> None:
        """Its file is removed."""
        (self.directory / f"run/devices.d/{driver}.toml").unlink()

    def cause(self, signal: str, how: str, at_ns: int = 0) -> Cause:
        """Something is about to happen, or happened at that time: what is heard next, comes of it."""
        for kubelet in self.kubelets.values():
            kubelet.catch_up()
        self._cause = Cause(signal, how, at_ns or time.monotonic_ns())
        return self._cause

    def recall(self, cause: Cause) -> None:
        """What is known next comes of something that happened long ago."""
        self._cause = cause

    # --- what is heard --------------------------------------------------------------------------------------

    def hears(self, name: str, health: int, text: str, driver: str = "", also: str = "") -> None:
        """The kubelet hears this of a device, and whoever watches the agent hears it too.

        Args:
            name: The device's.
            health: As the kubelet knows it.
            text: What the message begins with, code and evidence; empty: there is none.
            driver: That has declared it; empty: it is the host's own.
            also: Words of the message that stand further back.
        """
        words = f"{HEALTH_WORDS[health]} {name}: {text!r}"
        kubelet = self.kubelets[driver or DRIVER]

        def says() -> bool:
            found = kubelet.entries.get(name)
            return (
                found is not None
                and found.health == health
                and found.message.startswith(text)
                and also in found.message
                and bool(text) == bool(found.message)
            )

        kubelet.hear(says, words)
        heard = kubelet.entries[name]
        verdict, _, _ = heard.message.partition(". Advice: ")
        self._figure(time.monotonic_ns(), f"{HEALTH_WORDS[health]} {name}" + (f": {verdict}" if text else ""))

        def told(document: Document) -> bool:
            device = device_of(document, name, driver)
            return device is not None and (device["health"], device["message"]) == (
                HEALTH_WORDS[health],
                heard.message,
            )

        self.follower.hear(told, words)

    def knows(self, name: str, severity: str, text: str, more_s: float = 0) -> None:
        """Among what ``agent.sock`` tells of the host's device is this: code, and how the evidence begins."""

        def told(document: Document) -> bool:
            device = device_of(document, name)
            return device is not None and any(
                cause["severity"] == severity and words_of(cause).startswith(text)
                for cause in device["causes"]
            )

        since_ns = self._cause.at_ns if self._cause else 0
        at_ns, _ = self.follower.first(told, f"{severity} {text} of {name}", since_ns, more_s)
        self._figure(at_ns, f"`drahealth watch` alone: {severity} {name}: {text}")

    def notes(self, subject: str, text: str) -> Document:
        """A note on this subject, with this code and evidence, is told on ``agent.sock``."""

        def about(document: Document) -> list[Document]:
            return [
                note
                for note in document["notes"]
                if note["subject"] == subject and words_of(note).startswith(text)
            ]

        since_ns = self._cause.at_ns if self._cause else 0
        what = f"a note on {subject}: {text}"
        at_ns, document = self.follower.first(lambda one: bool(about(one)), what, since_ns)
        note = about(document)[0]
        self._figure(at_ns, f"`drahealth watch` alone: note on {subject}: {words_of(note)}")
        return note

    def lists(self, driver: str) -> set[str]:
        """What a kubelet that comes to the driver's socket now is told of: the names of all its devices."""
        with watch_health(self.directory / f"run/drivers/{driver}.sock") as newcomer:
            return set(names(newcomer.next()))

    def resident_mib(self) -> float:
        """The agent's resident memory."""
        return float(psutil.Process(self.agent.pid).memory_info().rss) / (1 << 20)

    def _figure(self, heard_ns: int, heard: str) -> None:
        """The first that is heard of a cause is what it took."""
        if self._cause is not None:
            signal, how, at_ns = self._cause
            took_s = (heard_ns - at_ns) / 1e9
            short = _ID.sub(lambda found: f"{found[0][:8]}...", heard).replace(f"{self.directory}/", "")
            self._figures.append(Figure(signal, how, took_s, short))
            self._cause = None


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process stands still until the end."""
    process = psutil.Process(pid)
    process.suspend()
    try:
        eventually(lambda: process.status() == psutil.STATUS_STOPPED, "it stands still")
        yield
    finally:
        process.resume()
