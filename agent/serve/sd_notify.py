"""Messages of the agent to systemd (sd_notify(3)): ready, reloading, status, watchdog, stopping.

The caller decides when to send which message. Sending never blocks and never raises an exception, because a
service manager that does not read them must not stop the agent. The next message repeats a state (ready,
reloading, stopping) that could not be sent.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import MutableMapping

STATUS_MAX_BYTES: Final = 2048  # systemd drops a datagram of more than 4,096 bytes (NOTIFY_BUFFER_MAX)


class SystemdNotifier:
    """Sender of messages to systemd; without NOTIFY_SOCKET it sends nothing. Thread-safe. Never blocks."""

    def __init__(self, address: str | None, watchdog_s: float | None = None) -> None:
        """Create the sender.

        Args:
            address: Value of ``NOTIFY_SOCKET``: a path, or ``@name`` for an abstract socket. None: no
                manager.
            watchdog_s: Time without a call of ``watchdog()`` after which the manager kills the service
                [s]. None: the manager has no watchdog.
        """
        self.watchdog_s: Final = watchdog_s
        self._socket: socket.socket | None = None
        self._address = ""
        self._unsent = b""
        """State that could not be sent; empty: none."""
        if address is not None:
            self._address = "\0" + address[1:] if address.startswith("@") else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> SystemdNotifier:
        """Return a sender for systemd's environment variables, and remove these variables.

        As a result, no child process inherits them.

        An address that is no unix socket (``vsock:``) and a watchdog of another process are ignored.
        """
        address = environ.pop("NOTIFY_SOCKET", "")
        limit_us = environ.pop("WATCHDOG_USEC", "")
        pid = environ.pop("WATCHDOG_PID", str(os.getpid()))
        watched = limit_us.isdecimal() and int(limit_us) > 0 and pid == str(os.getpid())
        if not address.startswith(("/", "@")):
            return cls(None)
        return cls(address, int(limit_us) / 1e6 if watched else None)

    def ready(self) -> None:
        """Report that the agent has started, or that a reload has ended.

        systemd may then start the units that wait for the agent.
        """
        self._send_state(b"READY=1")

    def reloading(self) -> None:
        """Report that a reload of the configuration has begun; :meth:`ready` reports its end."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        # one datagram: systemd reads both together
        self._send_state(b"RELOADING=1\nMONOTONIC_USEC=%d" % now_us)

    def status(self, text: str) -> None:
        """Send a text for ``systemctl status``; it is shortened to one line of STATUS_MAX_BYTES."""
        line = " ".join(text.split()).encode("utf-8", "replace")[:STATUS_MAX_BYTES]
        self._send(b"STATUS=" + line.decode("utf-8", "ignore").encode())

    def watchdog(self) -> None:
        """Restart systemd's watchdog timeout.

        Only the engine loop may call this method, so that systemd detects a hang of the loop.
        """
        self._send(b"WATCHDOG=1")

    def stopping(self) -> None:
        """Report to systemd that the agent's shutdown has begun."""
        self._send_state(b"STOPPING=1")

    def _send_state(self, message: bytes) -> None:
        self._unsent = message
        self._send()

    def _send(self, *messages: bytes) -> None:
        if self._socket is None:
            return
        # a full queue, no listener, no permission, or an address that is no valid path
        with suppress(OSError, ValueError):
            # Not connect(2): the manager makes a new socket when it re-executes.
            for message in filter(None, (self._unsent, *messages)):
                self._socket.sendto(message, self._address)
                if message is self._unsent:
                    self._unsent = b""
