"""Addresses of listening sockets, and the kernel's limit on the path length of unix sockets."""

from typing import Final, NamedTuple

SOCKET_PATH_LIMIT: Final = 107
"""Longest path of a unix socket: sizeof(sockaddr_un.sun_path) without the terminating NUL [bytes]."""


class ListenAddress(NamedTuple):
    """Address of a listening socket: an IP address and a port, or the path of a unix socket."""

    host: str
    """IP address to listen on; empty: the address is a unix socket."""
    port: int = 0
    path: str = ""
    """Path of the unix socket; empty: the address is an IP address and port."""

    @property
    def is_local(self) -> bool:
        """True: only processes of this machine can connect to the socket."""
        return bool(self.path) or self.host == "::1" or self.host.startswith("127.")

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
