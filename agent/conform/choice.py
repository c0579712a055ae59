"""Which of the files where registration sockets belong are the driver's that is judged.

The directory is everybody's: drivers of storage register there, too, and other drivers of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agent.conform.observed import Introduction
from agent.conform.verdicts import shorten
from agent.errors import UsageError, suggestion

PLUGIN_TYPE: Final = "DRAPlugin"
SUFFIX: Final = ".sock"


def choose(
    found: Sequence[Introduction], socket: str, driver: str, directory: str
) -> tuple[Introduction, ...]:
    """Those of the driver: what says so of itself, and what is named like it and says nothing.

    Where no plugin of the right type has introduced itself, all sockets are meant, and all files that are
    named like one.

    Args:
        found: Every file of the directory.
        socket: The service socket that was asked for; empty: none.
        driver: The driver that was asked for; empty: none.
        directory: For the error.

    Raises:
        UsageError: there are several drivers, or none of that name; lists those that there are.
    """
    plugins = [one for one in found if one.info is not None and one.info.type == PLUGIN_TYPE]
    names = sorted({one.info.name for one in plugins if one.info})
    known = ", ".join(repr(shorten(name)) for name in names) or "none"
    if driver:
        mine = _of(driver, found)
        if not mine:
            near = suggestion(driver, map(shorten, names))
            raise UsageError(f"{directory}: no driver {driver!r}{near}; there are: {known}")
        return mine
    here = {one.info.name for one in plugins if one.info and (one.info.endpoint or one.path) == socket}
    if len(here) == 1:
        return _of(here.pop(), found)
    if len(names) > 1:
        raise UsageError(f"{directory}: several drivers, choose one with --driver: {known}")
    if names:
        return _of(names[0], found)
    return tuple(one for one in found if one.is_socket or one.path.endswith(SUFFIX))


def _of(driver: str, found: Sequence[Introduction]) -> tuple[Introduction, ...]:
    return tuple(
        one for one in found if (one.info.name == driver if one.info else _is_named_like(driver, one.path))
    )


def _is_named_like(driver: str, path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.lstrip(".").startswith(driver) and name.endswith(SUFFIX)
