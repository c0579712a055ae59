"""Ports of loopback that belong to a test also while its server is down."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

PORTS: Final = range(21_000, 21_400)
"""Ports below the kernel's range for clients."""


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port on which no process listens, and which no other test gets until the context ends.

    An abstract Unix socket reserves it. Such a name belongs to a network namespace, as a port does, and ends
    with its process.
    """
    for port in PORTS:
        with socket.socket(socket.AF_UNIX) as reservation, socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                reservation.bind(f"\0drahealth-test-port-{port}")
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            probe.close()
            yield port
            return
    raise AssertionError(f"ports {PORTS.start} to {PORTS.stop - 1} are all in use")
