"""What wakes the core inside a driver: the host's sources, if they are watched, and what the driver says.

Any thread may say something; the core reads all of it in one piece, with the newest of the host. Nothing here
judges it.
"""

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from agent.engine.loop import Source
from agent.model.check import CheckSample
from agent.model.declared import Declarations, Declared, DeclaredFile
from agent.model.prepare import DriverFault
from agent.model.reading import NEVER_READ
from agent.model.snapshot import CpuSample, Snapshot

_NOBODY_LOOKS: Final = CpuSample(NEVER_READ, NEVER_READ, NEVER_READ)

CheckKey = tuple[str, str]
"""Subject of a device, and name of a check."""


class BareSource:
    """A host that nobody looks at: nothing is read, and only the driver wakes the core."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor that becomes readable when the driver said something."""
        return self._fd

    def clear(self) -> None:
        """Take note of the wake, before :meth:`read`."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def read(self) -> Snapshot:
        """A host with nothing that is known of it."""
        return Snapshot(0, _NOBODY_LOOKS)

    def close(self) -> None:
        """Gives the descriptor back."""
        os.close(self._fd)


class DriverSource:
    """What a driver says, added to what its host does.

    All that is said is whole: it replaces what was said before. Something may be said before the source is
    opened, and is read then; once it is closed, nobody is woken any more.
    """

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self._host: Source | None = None
        self._tell_host: Callable[[Declarations], None] | None = None
        self._lock = threading.Lock()
        self._declared: Declarations = (DeclaredFile(driver, ()),)
        self._checks: dict[CheckKey, CheckSample] = {}
        self._told: tuple[DriverFault, ...] = ()

    def open(self, host: Source, tell_host: Callable[[Declarations], None] | None = None) -> None:
        """Goes on top of the host's sources.

        Args:
            host: Its descriptor is an eventfd, and stays the host's.
            tell_host: Takes what is declared, for a host that has to look for it.
        """
        with self._lock:
            self._host, self._tell_host = host, tell_host
            if tell_host is not None:
                tell_host(self._declared)

    def close(self) -> None:
        """Lets go of the host, whose descriptor may be somebody else's from now on."""
        with self._lock:
            self._host = self._tell_host = None

    # --- the core's ----------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """The descriptor that becomes readable when something that a rule can see has changed."""
        return self._opened.fileno()

    def clear(self) -> None:
        """Take note of the wake, before :meth:`read`."""
        self._opened.clear()

    def read(self) -> Snapshot | None:
        """The newest of everything, or None if the host has nothing yet."""
        snapshot = self._opened.read()
        if snapshot is None:
            return None
        with self._lock:
            checks = tuple(self._checks.values())
            return replace(snapshot, declared=self._declared, checks=checks, told=self._told)

    # --- from any thread -----------------------------------------------------------------------------------

    def declare(
        self,
        devices: Iterable[Declared],
        begun: Iterable[CheckSample] = (),
        ended: Iterable[CheckKey] = (),
    ) -> None:
        """The driver's devices from now on, in one piece with what becomes of their checks.

        Args:
            devices: All of them.
            begun: What is said of checks until their first look is over.
            ended: Checks of which nothing is said any more.
        """
        with self._lock:
            for key in ended:
                self._checks.pop(key, None)
            for sample in begun:
                self._checks[sample.subject, sample.check] = sample
            self._declared = (DeclaredFile(self._driver, tuple(devices)),)
            if self._tell_host is not None:
                self._tell_host(self._declared)
            self._wake()

    def note(self, sample: CheckSample, *, wake: bool) -> None:
        """A look of a check is over. Nobody is woken for what only counts, or for a check that has ended."""
        with self._lock:
            key = sample.subject, sample.check
            if key in self._checks:
                self._checks[key] = sample
                if wake:
                    self._wake()

    def tell(self, faults: Iterable[DriverFault]) -> None:
        """All devices that the driver found broken."""
        with self._lock:
            self._told = tuple(faults)
            self._wake()

    @property
    def _opened(self) -> Source:
        host = self._host
        if host is None:
            raise RuntimeError("the source is not open")
        return host

    def _wake(self) -> None:
        if self._host is not None:
            os.eventfd_write(self._host.fileno(), 1)
