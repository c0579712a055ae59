"""Messages of a service to its service manager: ready, status, watchdog, stopping (sd_notify(3)).

The protocol only; the daemon decides when to send what. Nothing here blocks, and nothing raises: a manager
that does not listen must not stop the agent.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import MutableMapping

STATUS_MAX_BYTES: Final = 2048  # systemd drops a datagram of more than 4,096 bytes (NOTIFY_BUFFER_MAX) whole


class Notifier:
    """Connection to one service manager; without a manager, every method does nothing. Thread-safe. Never
    blocks."""

    def __init__(self, address: str | None, watchdog_s: float | None = None) -> None:
        """Create the connection.

        Args:
            address: ``NOTIFY_SOCKET``: a path, or ``@name`` for an abstract socket. None: no manager.
            watchdog_s: The manager kills the service after this time without ``watchdog()``; call it at
                least twice as often. None: no watchdog.
        """
        self.watchdog_s: Final = watchdog_s
        self._socket: socket.socket | None = None
        self._address = ""
        if address is not None:
            self._address = "\0" + address[1:] if address.startswith("@") else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> Notifier:
        """Read and **remove** what the manager set, so that no child process can notify in our name.

        A socket of another kind (``vsock:``) and a watchdog for another process are ignored.
        """
        address = environ.pop("NOTIFY_SOCKET", "")
        limit_us = environ.pop("WATCHDOG_USEC", "")
        pid = environ.pop("WATCHDOG_PID", str(os.getpid()))
        watched = limit_us.isdecimal() and int(limit_us) > 0 and pid == str(os.getpid())
        if not address.startswith(("/", "@")):
            return cls(None)
        return cls(address, int(limit_us) / 1e6 if watched else None)

    def ready(self) -> None:
        """Report that start-up is finished: units ordered after ours may start."""
        self._send(b"READY=1")

    def status(self, text: str) -> None:
        """Report one line of text for ``systemctl status``."""
        line = " ".join(text.split()).encode("utf-8", "replace")[:STATUS_MAX_BYTES]
        self._send(b"STATUS=" + line.decode("utf-8", "ignore").encode())

    def watchdog(self) -> None:
        """Report that the agent works. Call it only where a stalled agent would stop the calls."""
        self._send(b"WATCHDOG=1")

    def stopping(self) -> None:
        """Report that shutdown has begun."""
        self._send(b"STOPPING=1")

    def _send(self, message: bytes) -> None:
        if self._socket is None:
            return
        with suppress(OSError, ValueError):  # full, gone, denied; a path that is too long or has a NUL
            # The address each time, not connect(2): the manager makes a new socket when it re-executes.
            self._socket.sendto(message, self._address)
