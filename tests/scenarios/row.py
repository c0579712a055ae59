"""Row of a scenario: its machine, the settings of the agent, and its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agents import HEALTHY, UNHEALTHY, UNKNOWN

if TYPE_CHECKING:
    from scenarios.stage import Stage

OK, INFO, DEGRADED, BLIND, SICK = range(5)
"""Severities of ``agent.sock``; BLIND is Unknown for the kubelet, SICK is Unhealthy."""
HEALTH: Final = (HEALTHY, HEALTHY, HEALTHY, UNKNOWN, UNHEALTHY)
"""Health that the kubelet gets, by severity."""
HEALTH_WORDS: Final = ("Unknown", "Healthy", "Unhealthy")
SEVERITY_WORDS: Final = ("ok", "info", "degraded", "unknown", "unhealthy")
BUSES: Final = [
    f"{domain:04x}:{bus}:00.0"
    for domain in (0, 1)
    for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
]
"""PCI addresses of the fake's GPUs."""
Settings = dict[str, dict[str, Any]]
SETTINGS: Final[Settings] = {
    "stream": {"heartbeat": "500ms"},
    "gpu": {"slow-period": "200ms", "probation": "1s"},
}


class Process(NamedTuple):
    """Running process, as in procfs."""

    name: str
    state: str = "S"
    stack: str = ""


class Step(NamedTuple):
    """One step of a row."""

    text: str
    play: Callable[[Stage], object]
    is_view: bool = False
    """Whether the step only checks a result."""


@dataclass(frozen=True)
class Row:
    """One scenario. Devices that no step names must be Healthy in the first list, and never change."""

    name: str
    steps: tuple[Step, ...]
    profile: str = "h100"
    gpus: int = 1
    branch: int = 580
    setup: tuple[str, ...] = ()
    """Commands for the fake before the agent starts."""
    settings: Settings = field(default_factory=dict)
    """Settings of the agent that override SETTINGS."""
    flags: tuple[str, ...] = ()
    """Command-line flags of the agent, after all others."""
    period: str = "100ms"
    library: bool = True
    """Whether the library exists when the agent starts."""
    nvswitches: int = 0
    processes: dict[int, Process] = field(default_factory=dict)
    """Processes from the beginning, by pid."""
    logged: tuple[str, ...] = ()
    """Kernel log lines from before the agent's start."""
    tries: int = 1
    """Number of plays of which one must pass, if a busy machine can miss a time limit of the agent's."""
    limit_s: float = 0.0
    """Time that the row needs until a result is seen, if more than a few seconds [s]."""

    def __str__(self) -> str:
        return self.name

    @property
    def file(self) -> str:
        """Configuration of the agent: SETTINGS, overridden by those of the row."""
        tables = {
            name: SETTINGS.get(name, {}) | self.settings.get(name, {}) for name in SETTINGS | self.settings
        }
        return "".join(
            f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in table.items())
            for name, table in tables.items()
        )


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
