"""What the kernel asks of a unix socket's path, whoever makes the socket, and whoever judges one."""

from typing import Final

PATH_LIMIT: Final = 107
"""sizeof(sockaddr_un.sun_path) less the terminating NUL [bytes]."""
