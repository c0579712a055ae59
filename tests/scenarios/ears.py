"""What agents were heard to say, on both of their sockets: each device's history, and what it must hold."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import Any, NamedTuple

from agents import HEALTHY, Agent

from scenarios.row import HEALTH, HEALTH_WORDS, INFO, SEVERITY_WORDS


class Heard(NamedTuple):
    """What the kubelet is told of a device."""

    life: int
    """By which agent of the row."""
    health: int
    message: str


class Told(NamedTuple):
    """What ``agent.sock`` says of a device."""

    life: int
    severity: int
    causes: tuple[tuple[int, str], ...]
    """Severity, and code and evidence; worst first."""


class Ears:
    """One kubelet and one reader of ``agent.sock``, through all agents of a row."""

    def __init__(self, limit_s: float, note: Callable[[str], None]) -> None:
        """Args: the latest by which something must be seen [s]; who takes down what is heard."""
        self._limit_s = limit_s
        self._note = note
        self._watchers = ExitStack()
        self._open: tuple[Any, Any] | None = None
        self._heard: dict[str, list[Heard]] = {}
        self._told: dict[str, list[Told]] = {}
        self._seen: dict[str, tuple[int, int]] = {}
        """How far each device's histories have been looked at."""
        self._expected: dict[str, list[int]] = {}
        self._life = 0
        self.picture: Any = None
        """The newest."""

    def open(self, agent: Agent) -> None:
        """Listen to this agent. Returns when both sockets have said something."""
        self._life += 1
        self.picture = None
        self._open = (
            self._watchers.enter_context(agent.kubelet()),
            self._watchers.enter_context(agent.onlooker()),
        )
        self.until(self._has_begun, "the first list and picture")

    def _has_begun(self) -> bool:
        listed = any(entries[-1].life == self._life for entries in self._heard.values())
        return listed and self.picture is not None

    def close(self) -> None:
        """Listen to nobody."""
        self._open = None
        self._watchers.close()

    # --- waiting -------------------------------------------------------------------------------------------

    def until(self, claim: Callable[[], bool], what: str) -> None:
        """Listens until the claim is true."""
        deadline_s = time.monotonic() + self._limit_s
        while True:
            self._listen()
            if claim():
                return
            assert time.monotonic() < deadline_s, f"not within {self._limit_s:g} s: {what}"
            time.sleep(0.02)

    def see(self, names: Sequence[str], severity: int, text: str) -> None:
        """On both sockets: that verdict on each of them, and ``text`` first of all that is said."""
        for name in names:
            self._expected.setdefault(name, []).append(HEALTH[severity])
        left = list(names)

        def all_seen() -> bool:
            left[:] = [name for name in left if not self._is_seen(name, severity, text)]
            return not left

        self.until(all_seen, f"{' '.join(names)} {SEVERITY_WORDS[severity]} {text}")

    def know(self, names: Sequence[str], severity: int, text: str) -> None:
        """On ``agent.sock``: such a cause among those of each of them."""

        def known() -> bool:
            last = [self._told[name][-1] for name in names if name in self._told]
            return len(last) == len(names) and all(
                told.life == self._life and any(s == severity and t.startswith(text) for s, t in told.causes)
                for told in last
            )

        self.until(known, f"{' '.join(names)}, among others: {SEVERITY_WORDS[severity]} {text}")

    def source(self, name: str) -> Any:
        """A source in the newest picture; None if it has none of that name."""
        return next((one for one in self.picture.sources if one.name == name), None)

    def never(self, text: str) -> None:
        """No cause of any device has ever begun with this."""
        self._listen()
        said = [
            (name, one) for name, told in self._told.items() for verdict in told for _, one in verdict.causes
        ]
        assert not [one for one in said if one[1].startswith(text)], f"somebody had {text}"

    # --- the order of it all -------------------------------------------------------------------------------

    def settle_beginning(self) -> None:
        """Something is about to be done: whom nobody has looked for yet was Healthy before it."""
        for name in self._heard:
            self._expected.setdefault(name, [HEALTHY])

    def as_expected(self) -> None:
        """Every device went through just those healths that were looked for, in that order."""
        self._listen()
        self.settle_beginning()
        for name, entries in self._heard.items():
            heard = list(_collapsed(entry.health for entry in entries))
            expected = list(_collapsed(iter(self._expected[name])))
            assert heard == expected, f"{name} was {_words(heard)}, expected {_words(expected)}"

    # --- listening -----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._open is None:
            return
        kubelet, onlooker = self._open
        while kubelet.pending():
            for entry in kubelet.next().devices:
                self._hear(entry.device.device_name, Heard(self._life, entry.health, entry.message))
        while onlooker.pending():
            self.picture = onlooker.next()
            for device in self.picture.devices:
                assert all(cause.code and cause.evidence and cause.advice for cause in device.causes), device
                causes = ((cause.severity, f"{cause.code}: {cause.evidence}") for cause in device.causes)
                self._be_told(device.name, Told(self._life, device.severity, tuple(causes)))

    def _hear(self, name: str, heard: Heard) -> None:
        entries = self._heard.setdefault(name, [])
        if not entries or entries[-1] != heard:
            entries.append(heard)
            self._note(f"< {name} {HEALTH_WORDS[heard.health]} {heard.message}")

    def _be_told(self, name: str, told: Told) -> None:
        entries = self._told.setdefault(name, [])
        if not entries or entries[-1] != told:
            entries.append(told)
            causes = "; ".join(f"{SEVERITY_WORDS[severity]} {text}" for severity, text in told.causes)
            self._note(f"    {name} is {SEVERITY_WORDS[told.severity]}: {causes or '-'}")

    def _is_seen(self, name: str, severity: int, text: str) -> bool:
        def heard(one: Heard) -> bool:
            said = one.message.startswith(text) if severity > INFO else not one.message
            return one.life == self._life and one.health == HEALTH[severity] and said

        def told(one: Told) -> bool:
            first = one.causes[0][1] if one.causes else ""
            said = first.startswith(text) and bool(first) == bool(text)
            return one.life == self._life and one.severity == severity and said

        from_heard, from_told = self._seen.get(name, (0, 0))
        by_kubelet = _index(self._heard.get(name, []), from_heard, heard)
        by_onlooker = _index(self._told.get(name, []), from_told, told)
        if by_kubelet is None or by_onlooker is None:
            return False
        self._seen[name] = by_kubelet, by_onlooker
        return True


def _index(entries: Sequence[Any], start: int, claim: Callable[[Any], bool]) -> int | None:
    return next((at for at in range(start, len(entries)) if claim(entries[at])), None)


def _collapsed(values: Iterator[int]) -> Iterator[int]:
    return (value for value, _ in groupby(values))


def _words(healths: Sequence[int]) -> str:
    return " → ".join(HEALTH_WORDS[health] for health in healths)
