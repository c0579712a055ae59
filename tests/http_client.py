"""HTTP client for the agent's HTTP server, over TCP and unix sockets."""

import http.client
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from patience import PATIENCE_S

Address = tuple[str, int] | Path
"""Host and port, or the path of a unix socket."""


class Answer(NamedTuple):
    """Answer to a request."""

    status: int
    headers: Mapping[str, str]
    text: str


class _Connection(http.client.HTTPConnection):
    """Connection to a TCP address or a unix socket."""

    def __init__(self, address: Address) -> None:
        super().__init__("localhost", timeout=PATIENCE_S)
        self._address = address

    def connect(self) -> None:
        self.sock = connect(self._address)


def connect(address: Address, *, source: str = "", **options: int) -> socket.socket:
    """Return a connected socket; `options` may have ``receive_buffer`` [bytes].

    ``source`` is the address of this end; empty: the kernel chooses.
    """
    is_unix = isinstance(address, Path)
    sock = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET)
    if "receive_buffer" in options:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options["receive_buffer"])
    sock.settimeout(PATIENCE_S)
    try:
        if source:
            sock.bind((source, 0))
        sock.connect(str(address) if is_unix else address)
    except BaseException:
        sock.close()
        raise
    return sock


def get(address: Address, path: str, headers: Mapping[str, str] | None = None) -> Answer:
    """Send a GET request and return the answer."""
    connection = _Connection(address)
    try:
        connection.request("GET", path, headers=dict(headers or {}))
        answer = connection.getresponse()
        names = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, names, answer.read().decode())
    finally:
        connection.close()
