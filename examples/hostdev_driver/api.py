"""The few calls of the API server that the driver needs, over the standard library's HTTPS.

Everything here blocks, at most for its timeout per step; drahealth calls it in threads of its own. Errors are
raised as they are: drahealth knows of what kind an HTTP status or a refused connection is.
"""

import http.client
import json
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

import agent

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S: Final = 10.0
"""Of connecting, and of each wait for more [s]; the kubelet waits 45 s for a prepare."""
ANSWER_BYTES: Final = 4 << 20


class ApiError(Exception):
    """The API server refused. drahealth reads the attributes: other clients' exceptions have the same."""

    def __init__(self, status: int, reason: str, message: str, body: bytes) -> None:
        super().__init__(f"{status} {reason}: {message}" if message else f"{status} {reason}")
        self.status = status
        """Of HTTP."""
        self.reason = reason
        """The API server's word, ``NotFound``; else HTTP's."""
        self.body = body
        """The whole answer: the ``Status`` object, if it is one."""


class ApiServer:
    """One API server. Each call has a connection of its own, so that any thread may call.

    Args:
        url: ``https://host:port``.
        ca: File with the certificates that it is known by; None: those of the system.
        token: File with the bearer token, read anew for each call since it is renewed; None: no token.
    """

    def __init__(self, url: str, ca: Path | None = None, token: Path | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise agent.ConfigError(f"{url!r} is no URL of an API server, such as https://10.0.0.1:6443")
        self._host, self._port = parts.hostname, parts.port
        self._tls = ssl.create_default_context(cafile=ca) if parts.scheme == "https" else None
        self._token = token

    @classmethod
    def of_cluster(cls) -> "ApiServer":
        """The one that a pod is told of.

        Raises:
            ConfigError: This is no pod.
        """
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{word}", "") for word in ("HOST", "PORT"))
        if not host or not port:
            raise agent.ConfigError(
                "KUBERNETES_SERVICE_HOST and _PORT are not set: not in a pod? see --api-server"
            )
        address = f"[{host}]" if ":" in host else host
        return cls(f"https://{address}:{port}", SERVICE_ACCOUNT / "ca.crt", SERVICE_ACCOUNT / "token")

    def call(self, method: str, path: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
        """One call.

        Raises:
            ApiError: It answered with another status than 2xx.
            OSError: It cannot be reached, or did not answer in time.
            http.client.HTTPException, json.JSONDecodeError: What answers is no API server.
        """
        with agent.doing(agent.Operation.API, path):
            status, reason, data = self._exchange(method, path, body)
            if 200 <= status < 300:
                return _object(data)
            raise _refusal(status, reason, data)

    def _exchange(self, method: str, path: str, body: Mapping[str, object] | None) -> tuple[int, str, bytes]:
        headers = {"Accept": "application/json", "User-Agent": "hostdev-driver"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token.read_text().strip()}"
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        connection = self._connect()
        try:
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.reason, answer.read(ANSWER_BYTES)
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        return http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=self._tls)


def path_of(*parts: str) -> str:
    """A path below the root, whatever is in the names."""
    return "".join(f"/{quote(part, safe='')}" for part in parts)


def _object(data: bytes) -> dict[str, Any]:
    found = json.loads(data)
    if not isinstance(found, dict):
        raise json.JSONDecodeError("no object", data[:64].decode(errors="replace"), 0)
    return found


def _refusal(status: int, reason: str, data: bytes) -> ApiError:
    try:
        told = _object(data)
    except ValueError:
        told = {}
    return ApiError(status, str(told.get("reason") or reason), str(told.get("message") or ""), data)
