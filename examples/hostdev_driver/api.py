"""Calls of the API server that the driver needs, over the standard library's HTTPS.

Everything here blocks up to its timeout per step; drahealth calls it in threads of its own. Errors are raised
unchanged: drahealth classifies HTTP statuses and refused connections.
"""

import http.client
import json
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

import drahealth

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S: Final = 10.0
"""Timeout of the connect and of each read [s]; the kubelet waits 45 s for a prepare."""
ANSWER_BYTES: Final = 4 << 20


class ApiError(Exception):
    """Error answer of the API server, with the attributes that other clients' exceptions have, too."""

    def __init__(self, status: int, reason: str, message: str, body: bytes) -> None:
        super().__init__(f"{status} {reason}: {message}" if message else f"{status} {reason}")
        self.status = status
        """HTTP status."""
        self.reason = reason
        """Reason of the API server's Status, ``NotFound``; else the phrase of the HTTP status."""
        self.body = body
        """Complete answer, normally a ``Status`` object."""


class ApiServer:
    """Client of one API server with a connection per call. Thread-safe.

    Args:
        url: ``https://host:port``.
        ca: File with the CA certificates; None: those of the system.
        token: File with the bearer token, read at each call because it is rotated; None: no token.
    """

    def __init__(self, url: str, ca: Path | None = None, token: Path | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise drahealth.ConfigError(
                f"{url!r} is not a URL of an API server, such as https://10.0.0.1:6443"
            )
        self._host, self._port = parts.hostname, parts.port
        self._tls = ssl.create_default_context(cafile=ca) if parts.scheme == "https" else None
        self._token = token

    @classmethod
    def of_cluster(cls) -> "ApiServer":
        """Return the client of the pod's cluster.

        Raises:
            ConfigError: The process does not run in a pod.
        """
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{word}", "") for word in ("HOST", "PORT"))
        if not host or not port:
            raise drahealth.ConfigError(
                "KUBERNETES_SERVICE_HOST and _PORT are not set: not in a pod? see --api-server"
            )
        address = f"[{host}]" if ":" in host else host
        return cls(f"https://{address}:{port}", SERVICE_ACCOUNT / "ca.crt", SERVICE_ACCOUNT / "token")

    def call(self, method: str, path: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Call the API server and return the object in its answer.

        Raises:
            ApiError: The answer has another status than 2xx.
            OSError: The server is unreachable, or did not answer in time.
            http.client.HTTPException, json.JSONDecodeError: The answer is not from an API server.
        """
        with drahealth.doing(drahealth.Operation.API, path):
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
    """Return a URL path with quoted parts."""
    return "".join(f"/{quote(part, safe='')}" for part in parts)


def _object(data: bytes) -> dict[str, Any]:
    found = json.loads(data)
    if not isinstance(found, dict):
        raise json.JSONDecodeError("no object", data[:64].decode(errors="replace"), 0)
    return found


def _refusal(status: int, reason: str, data: bytes) -> ApiError:
    try:
        status_object = _object(data)
    except ValueError:
        status_object = {}
    return ApiError(
        status, str(status_object.get("reason") or reason), str(status_object.get("message") or ""), data
    )
