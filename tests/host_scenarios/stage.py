"""Agent with its subscribers, and the time from a cause to the message.

Google's gRPC subscribes to the kubelet's API on each driver's socket, and ``drahealth watch -o json`` to the
rest on ``agent.sock``. The tests state the expected messages.
"""

import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import psutil
from agents import DRIVER, Agent
from wire.google import names, watch_health

from host_scenarios.figures import Figure, Figures
from host_scenarios.subscribers import HEALTH_WORDS, Document, Follower, Kubelet, cause_text, device_of

OWNER: Final = "b.example.com"
"""Driver that declares devices; DRIVER's socket serves the host's own."""
NEWCOMER: Final = "c.example.com"
LATE: Final = "d.example.com"
"""Driver that has no declaration until the one test about its first."""
"""Driver without declared devices at first."""
DRIVERS: Final = (DRIVER, OWNER, NEWCOMER, LATE)
FAST: Final = ("--period", "100ms", "--node-name", "node")
STREAM: Final = '[stream]\nheartbeat = "500ms"\n'
_ID: Final = re.compile(r"\b[0-9a-f]{8}[-0-9a-f]{24,}\b")


class Cause(NamedTuple):
    """Event that a test causes."""

    signal: str
    how: str
    at_ns: int


class Stage:
    """Agent with three drivers and its subscribers; all end with the context."""

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
        """Start the agent; ``declared`` is what OWNER declares from the beginning."""
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self._figures = figures
        self._cause: Cause | None = None
        self._followed_ns: dict[tuple[str, str], int] = {}
        """Time of arrival of the last document with an expected health, by name and driver of the device."""
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
                    wrapper=within,
                )
            )
            self.follower = Follower(self.agent)
            opening.callback(self.follower.close)
            sockets = self.agent.directory / "run/drivers"
            self.kubelets = {
                name: Kubelet(opening.enter_context(watch_health(sockets / f"{name}.sock")))
                for name in DRIVERS
            }
            self.follower.wait_for(
                _is_read, "a document from all sources, so that the test's causes are changes"
            )
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

    # --- causes ---------------------------------------------------------------------------------------

    def declare(self, text: str, driver: str = OWNER) -> None:
        """Write a driver's declaration under another name, then rename it, as drivers should."""
        directory = self.directory / "run/devices.d"
        directory.mkdir(parents=True, exist_ok=True)
        new = directory / f".{driver}.toml"
        new.write_text(f"version = 1\n{text}")
        new.chmod(0o644)
        new.rename(directory / f"{driver}.toml")

    def remove_declaration(self, driver: str) -> None:
        """Remove the driver's file."""
        (self.directory / f"run/devices.d/{driver}.toml").unlink()

    def cause(self, signal: str, how: str, at_ns: int = 0) -> Cause:
        """Record an event that follows now or happened at ``at_ns``; the next message is attributed to it."""
        for kubelet in self.kubelets.values():
            kubelet.catch_up()
        self._cause = Cause(signal, how, at_ns or time.monotonic_ns())
        return self._cause

    def resume_cause(self, cause: Cause) -> None:
        """Attribute the next message to an earlier event."""
        self._cause = cause

    # --- expected messages ---------------------------------------------------------------------------------

    def expect_health(self, name: str, health: int, text: str, driver: str = "", also: str = "") -> None:
        """Wait until kubelet and ``drahealth watch`` receive this health of a device.

        Args:
            name: Name of the device.
            health: Health in the kubelet's API.
            text: Beginning of the message, code and evidence; empty: no message.
            driver: Driver that declares the device; empty: the host's own device.
            also: Text further back in the message.
        """
        expected = f"{HEALTH_WORDS[health]} {name}: {text!r}"
        kubelet = self.kubelets[driver or DRIVER]
        since_ns = self._cause.at_ns if self._cause else self._followed_ns.get((name, driver), 0)

        def matches() -> bool:
            found = kubelet.entries.get(name)
            return (
                found is not None
                and found.health == health
                and found.message.startswith(text)
                and also in found.message
                and bool(text) == bool(found.message)
            )

        kubelet.wait_for(matches, expected)
        published = kubelet.entries[name]
        verdict, _, _ = published.message.partition(". Advice: ")
        self._figure(time.monotonic_ns(), f"{HEALTH_WORDS[health]} {name}" + (f": {verdict}" if text else ""))

        def matches(document: Document) -> bool:
            device = device_of(document, name, driver)
            return device is not None and (device["health"], device["message"]) == (
                HEALTH_WORDS[health],
                published.message,
            )

        # not the newest document: the message may have changed since the kubelet got it
        self._followed_ns[name, driver], _ = self.follower.first(matches, expected, since_ns)

    def expect_cause(self, name: str, severity: str, text: str, more_s: float = 0) -> None:
        """Wait until ``agent.sock`` reports a cause of the host's device with this code and beginning of its
        evidence.
        """

        def matches(document: Document) -> bool:
            device = device_of(document, name)
            return device is not None and any(
                cause["severity"] == severity and cause_text(cause).startswith(text)
                for cause in device["causes"]
            )

        since_ns = self._cause.at_ns if self._cause else 0
        at_ns, _ = self.follower.first(matches, f"{severity} {text} of {name}", since_ns, more_s)
        self._figure(at_ns, f"`drahealth watch` alone: {severity} {name}: {text}")

    def expect_note(self, subject: str, text: str, also: str = "") -> Document:
        """Wait until ``agent.sock`` reports a note on the subject with this code and beginning of its
        evidence, and ``also`` in the evidence.
        """

        def entries_about(document: Document) -> list[Document]:
            return [
                note
                for note in document["notes"]
                if note["subject"] == subject
                and cause_text(note).startswith(text)
                and also in note["evidence"]
            ]

        since_ns = self._cause.at_ns if self._cause else 0
        description = f"a note on {subject}: {text}"
        at_ns, document = self.follower.first(lambda entry: bool(entries_about(entry)), description, since_ns)
        note = entries_about(document)[0]
        self._figure(at_ns, f"`drahealth watch` alone: note on {subject}: {cause_text(note)}")
        return note

    def device_names(self, driver: str) -> set[str]:
        """Return the names of all devices in the first message to a new subscriber of the driver's socket."""
        with watch_health(self.directory / f"run/drivers/{driver}.sock") as newcomer:
            return set(names(newcomer.next()))

    def resident_mib(self) -> float:
        """Return the agent's resident memory."""
        return float(psutil.Process(self.agent.pid).memory_info().rss) / (1 << 20)

    def _figure(self, received_ns: int, message: str) -> None:
        """Record the time of the first message since the cause."""
        if self._cause is not None:
            signal, how, at_ns = self._cause
            took_s = (received_ns - at_ns) / 1e9
            short = _ID.sub(lambda found: f"{found[0][:8]}...", message).replace(f"{self.directory}/", "")
            self._figures.append(Figure(signal, how, took_s, short))
            self._cause = None


def _is_read(document: Document) -> bool:
    """Return whether each source was read or is absent: on a busy machine the first document comes before."""
    return all(source["state"] not in {"starting", "stalled"} for source in document["sources"])
