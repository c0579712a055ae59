"""Limit of the kernel for paths of unix sockets."""

from typing import Final

PATH_LIMIT: Final = 107
"""Longest path: sizeof(sockaddr_un.sun_path) without the terminating NUL [bytes]."""
