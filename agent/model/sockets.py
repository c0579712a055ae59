"""Kernel limit on the path length of unix sockets."""

from typing import Final

SOCKET_PATH_LIMIT: Final = 107
"""Longest path of a unix socket: sizeof(sockaddr_un.sun_path) without the terminating NUL [bytes]."""
