"""What a row is: the machine that it needs, the settings of the agent, and its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agents import HEALTHY, UNHEALTHY, UNKNOWN

if TYPE_CHECKING:
    from scenarios.stage import Stage

OK, INFO, DEGRADED, BLIND, SICK = range(5)
"""Severities of ``agent.sock``; BLIND is what the kubelet calls Unknown, SICK Unhealthy."""
HEALTH: Final = (HEALTHY, HEALTHY, HEALTHY, UNKNOWN, UNHEALTHY)
"""What the kubelet hears, by severity."""
HEALTH_WORDS: Final = ("Unknown", "Healthy", "Unhealthy")
SEVERITY_WORDS: Final = ("ok", "info", "degraded", "unknown", "unhealthy")
BUSES: Final = [
    f"{domain:04x}:{bus}:00.0"
    for domain in (0, 1)
    for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
]
"""Where the fake has its GPUs."""
Settings = dict[str, dict[str, Any]]
SETTINGS: Final[Settings] = {
    "stream": {"heartbeat": "500ms"},
    "gpu": {"slow-period": "200ms", "probation": "1s"},
}


class Process(NamedTuple):
    """Somebody who runs, as procfs has it."""

    name: str
    state: str = "S"
    stack: str = ""


class Step(NamedTuple):
    """One line of a row."""

    text: str
    play: Callable[[Stage], object]
    is_view: bool = False
    """It only looks."""


@dataclass(frozen=True)
class Row:
    """One scenario. Devices that no step names must be Healthy in the first list, and never change."""

    name: str
    steps: tuple[Step, ...]
    profile: str = "h100"
    gpus: int = 1
    branch: int = 580
    setup: tuple[str, ...] = ()
    """What the fake is told before the agent asks it for the first time."""
    settings: Settings = field(default_factory=dict)
    """Of the agent, over SETTINGS."""
    flags: tuple[str, ...] = ()
    """Of the agent, behind all others."""
    period: str = "100ms"
    library: bool = True
    """Whether it is there when the agent starts."""
    nvswitches: int = 0
    processes: dict[int, Process] = field(default_factory=dict)
    """Who runs from the beginning, by pid."""
    logged: tuple[str, ...] = ()
    """What the kernel logged before the agent starts."""
    limit_s: float = 0.0
    """How long it takes by itself until something is seen, if that is more than a few seconds."""

    def __str__(self) -> str:
        return self.name

    @property
    def file(self) -> str:
        """The agent's configuration: SETTINGS, and over them those of the row."""
        tables = {
            name: SETTINGS.get(name, {}) | self.settings.get(name, {}) for name in SETTINGS | self.settings
        }
        return "".join(
            f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in table.items())
            for name, table in tables.items()
        )


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
