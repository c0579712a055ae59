"""Faults of drivers, and the results that ``drahealth conform`` must give for them.

:func:`fails` and :func:`warns` register a driver in :data:`FAULTS`, with every check that it must not pass:
its own, and others that necessarily notice it. The faults are in the ``*_faults.py`` modules, by theme.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeVar

from conform.servers import Driver

D = TypeVar("D", bound=type[Driver])


class Fault(NamedTuple):
    """Driver with a fault, and its expected results."""

    driver: type[Driver]
    not_passed: Mapping[str, str]
    """Result by code of each check that must not pass; the check of the fault is first."""
    flags: tuple[str, ...]
    """Additional flags of the command."""
    for_s: int
    """Duration of the session [s]."""

    @property
    def code(self) -> str:
        """Code of the check of the fault."""
        return next(iter(self.not_passed))


FAULTS: Final[dict[str, Fault]] = {}
"""Faults by the driver's name."""

FOR_S: Final = 3


def fails(
    code: str, *flags: str, also: Mapping[str, str] | None = None, for_s: int = FOR_S
) -> Callable[[D], D]:
    """Return a decorator for a driver that fails that check."""
    return _fault({code: "fail"} | dict(also or {}), flags, for_s)


def warns(
    code: str, *flags: str, also: Mapping[str, str] | None = None, for_s: int = FOR_S
) -> Callable[[D], D]:
    """Return a decorator for a driver that gets a warning from that check."""
    return _fault({code: "warn"} | dict(also or {}), flags, for_s)


def _fault(not_passed: Mapping[str, str], flags: tuple[str, ...], for_s: int) -> Callable[[D], D]:
    def register(driver: D) -> D:
        assert driver.__name__ not in FAULTS, f"two drivers are named {driver.__name__}"
        FAULTS[driver.__name__] = Fault(driver, not_passed, flags, for_s)
        return driver

    return register
