"""Clients of the agents of a row, on both sockets: the history of each device, and checks of it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import Any, Final, NamedTuple

from agents import HEALTHY, Agent

from scenarios.row import HEALTH, HEALTH_WORDS, INFO, SEVERITY_WORDS

UNREAD_GPU: Final = "gpu.unseen: "
STALLED: Final = "source.stalled: "
"""Cause of devices while a thread of the agent does not run for 2 s, as on a busy machine; no row expects it.
"""
SOURCE_OK, SOURCE_STARTING = 1, 5


class ListedEntry(NamedTuple):
    """Entry of a device in a list for the kubelet."""

    agent_number: int
    """Number of the agent in the row."""
    health: int
    message: str


class ReportedEntry(NamedTuple):
    """Entry of a device in a report on ``agent.sock``."""

    agent_number: int
    severity: int
    causes: tuple[tuple[int, str], ...]
    """Causes as severity, and code with evidence; worst first."""


class Clients:
    """Kubelet and reader of ``agent.sock`` for all agents of a row."""

    def __init__(self, limit_s: float, note: Callable[[str], None], *, gpus: int, until_read: bool) -> None:
        """Create clients that wait at most ``limit_s`` for a result, and ``note`` each entry.

        ``gpus``: number of GPUs that NVML lists when an agent starts. ``until_read``: whether an agent begins
        with the first pass over all GPUs, however long it takes; entries before it are left out.
        """
        self._gpus = gpus
        self._limit_s = limit_s
        self._note = note
        self._until_read = until_read
        self._unread: set[str] = set()
        """Devices whose entries were all left out since the agent's start."""
        self._watchers = ExitStack()
        self._open: tuple[Any, Any] | None = None
        self._listed: dict[str, list[ListedEntry]] = {}
        self._reported: dict[str, list[ReportedEntry]] = {}
        self._seen: dict[str, tuple[int, int]] = {}
        """Positions up to which each device's two histories were checked."""
        self._expected: dict[str, list[int]] = {}
        self._acted: dict[str, int] = {}
        """Position of each device's newest reported entry before the last action."""
        self._agent_number = 0
        self.report: Any = None
        """Newest report."""

    def open(self, agent: Agent) -> None:
        """Connect to an agent. Returns when both sockets have sent a message, and all GPUs are read."""
        self._agent_number += 1
        self._unread.clear()
        self.report = None
        self._open = (
            self._watchers.enter_context(agent.kubelet()),
            self._watchers.enter_context(agent.watch_reports()),
        )
        self.until(self._has_begun, "the first list and report")

    def _has_begun(self) -> bool:
        listed, reported = self._current_devices(self._listed), self._current_devices(self._reported)
        if not listed or self.report is None:
            return False
        nvml, events = self.source("nvml"), self.source("nvml-events")
        if self._until_read and nvml is not None:
            gpus = {f"gpu-{number}" for number in range(self._gpus)}
            if nvml.state == SOURCE_STARTING or (nvml.state == SOURCE_OK and not gpus <= listed & reported):
                return False
        return not self._unread and (events is None or events.state != SOURCE_STARTING)

    def _current_devices(self, entries: Mapping[str, Sequence[ListedEntry | ReportedEntry]]) -> set[str]:
        """Return the devices with an entry of the agent that runs."""
        return {name for name, found in entries.items() if found[-1].agent_number == self._agent_number}

    def close(self) -> None:
        """Close both connections."""
        self._open = None
        self._watchers.close()

    # --- waiting -------------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], bool], description: str, *, pause_s: float = 0.02) -> None:
        """Read messages until the condition is true, with a pause [s] between two reads."""
        deadline_s = time.monotonic() + self._limit_s
        while True:
            self._read()
            if condition():
                return
            assert time.monotonic() < deadline_s, f"not within {self._limit_s:g} s: {description}"
            time.sleep(pause_s)

    def see(self, names: Sequence[str], severity: int, text: str) -> None:
        """Wait on both sockets for a verdict on each device whose first cause begins with ``text``."""
        for name in names:
            self._expected.setdefault(name, []).append(HEALTH[severity])
        left = list(names)

        def all_seen() -> bool:
            left[:] = [name for name in left if not self._is_seen(name, severity, text)]
            return not left

        self.until(all_seen, f"{' '.join(names)} {SEVERITY_WORDS[severity]} {text}")

    def know(self, names: Sequence[str], severity: int, text: str, *, briefly: bool = False) -> None:
        """Wait on ``agent.sock`` for a cause of each device, among any others.

        ``briefly``: whether the cause counts that a device has had since the last action and has no more.
        """

        def is_known() -> bool:
            return all(self.has_cause(name, severity, text, briefly=briefly) for name in names)

        self.until(is_known, f"{' '.join(names)}, among others: {SEVERITY_WORDS[severity]} {text}")

    def has_cause(self, name: str, severity: int, text: str, *, briefly: bool = False) -> bool:
        """Return whether a device has a cause, or ``briefly`` has had it since the last action."""
        entries = self._reported.get(name, [])
        return any(
            entry.agent_number == self._agent_number
            and any(s == severity and t.startswith(text) for s, t in entry.causes)
            for entry in (entries[self._acted.get(name, 0) :] if briefly else entries[-1:])
        )

    def note_action(self) -> None:
        """Note which entries came before an action."""
        self._acted = {name: len(entries) - 1 for name, entries in self._reported.items()}

    def source(self, name: str) -> Any:
        """Return a source of the newest report; None if it has none of that name."""
        return next((source for source in self.report.sources if source.name == name), None)

    def never(self, text: str) -> None:
        """Check that no cause of any device ever began with this text."""
        self._read()
        found = [
            (name, cause)
            for name, entries in self._reported.items()
            for entry in entries
            for _, cause in entry.causes
            if cause.startswith(text)
        ]
        assert not found, f"unexpected cause {text}: {found}"

    # --- order of reports ----------------------------------------------------------------------------------

    def settle_beginning(self) -> None:
        """Expect Healthy before an action for every device that no step has named yet."""
        for name in self._listed:
            self._expected.setdefault(name, [HEALTHY])

    def check_order(self) -> None:
        """Check that every device went through exactly the expected healths, in order."""
        self._read()
        self.settle_beginning()
        for name, entries in self._listed.items():
            healths = list(_collapse_repeats(entry.health for entry in entries))
            expected = list(_collapse_repeats(iter(self._expected[name])))
            assert healths == expected, f"{name} was {_words(healths)}, expected {_words(expected)}"

    # --- reading -------------------------------------------------------------------------------------------

    def _read(self) -> None:
        if self._open is None:
            return
        kubelet, reader = self._open
        while kubelet.pending_count():
            for entry in kubelet.next().devices:
                self._add_listed(
                    entry.device.device_name, ListedEntry(self._agent_number, entry.health, entry.message)
                )
        while reader.pending_count():
            self.report = reader.next()
            for device in self.report.devices:
                assert all(cause.code and cause.evidence and cause.advice for cause in device.causes), device
                causes = ((cause.severity, f"{cause.code}: {cause.evidence}") for cause in device.causes)
                self._add_reported(
                    device.name, ReportedEntry(self._agent_number, device.severity, tuple(causes))
                )

    def _add_listed(self, name: str, entry: ListedEntry) -> None:
        entries = self._listed.get(name, [])
        if self._is_left_out(name, entries, entry.message):
            return
        self._listed[name] = entries
        if not entries or entries[-1] != entry:
            entries.append(entry)
            self._note(f"< {name} {HEALTH_WORDS[entry.health]} {entry.message}")

    def _add_reported(self, name: str, entry: ReportedEntry) -> None:
        entries = self._reported.get(name, [])
        if self._is_left_out(name, entries, entry.causes[0][1] if entry.causes else ""):
            return
        self._reported[name] = entries
        if not entries or entries[-1] != entry:
            entries.append(entry)
            causes = "; ".join(f"{SEVERITY_WORDS[severity]} {text}" for severity, text in entry.causes)
            self._note(f"    {name} is {SEVERITY_WORDS[entry.severity]}: {causes or '-'}")

    def _is_left_out(
        self, name: str, entries: Sequence[ListedEntry | ReportedEntry], first_cause: str
    ) -> bool:
        if first_cause.startswith(STALLED):
            self._note(f"! {name} {first_cause}")
            return True
        begins = not entries or entries[-1].agent_number != self._agent_number
        if self._until_read and begins and first_cause.startswith(UNREAD_GPU):
            self._unread.add(name)
            return True
        self._unread.discard(name)
        return False

    def _is_seen(self, name: str, severity: int, text: str) -> bool:
        def is_listed(entry: ListedEntry) -> bool:
            matches = entry.message.startswith(text) if severity > INFO else not entry.message
            return entry.agent_number == self._agent_number and entry.health == HEALTH[severity] and matches

        def is_reported(entry: ReportedEntry) -> bool:
            first = entry.causes[0][1] if entry.causes else ""
            matches = first.startswith(text) and bool(first) == bool(text)
            return entry.agent_number == self._agent_number and entry.severity == severity and matches

        listed_start, reported_start = self._seen.get(name, (0, 0))
        listed = _index(self._listed.get(name, []), listed_start, is_listed)
        reported = _index(self._reported.get(name, []), reported_start, is_reported)
        if listed is None or reported is None:
            return False
        self._seen[name] = listed, reported
        return True


def _index(entries: Sequence[Any], start: int, condition: Callable[[Any], bool]) -> int | None:
    return next((at for at in range(start, len(entries)) if condition(entries[at])), None)


def _collapse_repeats(values: Iterator[int]) -> Iterator[int]:
    return (value for value, _ in groupby(values))


def _words(healths: Sequence[int]) -> str:
    return " → ".join(HEALTH_WORDS[health] for health in healths)
