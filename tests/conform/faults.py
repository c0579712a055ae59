"""What can be wrong with a driver, and what ``drahealth conform`` must say of it.

:func:`fails` and :func:`warns` put a driver into :data:`FAULTS`, with every check that is to blame it: its
own, and those that cannot but notice, too. The faults stand by theme, in ``health_faults.py`` and beside it.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeVar

from conform.servers import Driver

D = TypeVar("D", bound=type[Driver])


class Fault(NamedTuple):
    """A bad driver and its due."""

    driver: type[Driver]
    blamed: Mapping[str, str]
    """Result by code, of each check that does not pass; the one that it is about comes first."""
    flags: tuple[str, ...]
    """More of the command."""
    for_s: int
    """How long it is listened to."""

    @property
    def code(self) -> str:
        """The check that it is about."""
        return next(iter(self.blamed))


FAULTS: Final[dict[str, Fault]] = {}
"""By the name of the driver."""

FOR_S: Final = 3


def fails(
    code: str, *flags: str, also: Mapping[str, str] | None = None, for_s: int = FOR_S
) -> Callable[[D], D]:
    """A driver that fails that check."""
    return _fault({code: "fail"} | dict(also or {}), flags, for_s)


def warns(
    code: str, *flags: str, also: Mapping[str, str] | None = None, for_s: int = FOR_S
) -> Callable[[D], D]:
    """A driver that gets a warning from that check."""
    return _fault({code: "warn"} | dict(also or {}), flags, for_s)


def _fault(blamed: Mapping[str, str], flags: tuple[str, ...], for_s: int) -> Callable[[D], D]:
    def note(driver: D) -> D:
        assert driver.__name__ not in FAULTS, f"two drivers are called {driver.__name__}"
        FAULTS[driver.__name__] = Fault(driver, blamed, flags, for_s)
        return driver

    return note
