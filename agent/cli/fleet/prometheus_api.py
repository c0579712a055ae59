"""Client of the query API of a Prometheus server, or of one with the same API, on the standard library."""

from __future__ import annotations

import base64
import math
import ssl
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote, urlencode, urlsplit

import msgspec

from agent.errors import ApiError, ApiUnreachableError, ConfigError
from agent.version import VERSION

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S: Final = 60.0
"""Timeout of the connect and of each read [s]; Prometheus ends a query after two minutes itself."""
ANSWER_BYTES: Final = 256 << 20
"""Largest accepted answer of a Prometheus server [bytes]."""
TOKEN_BYTES: Final = 65_536
OK_STATUS: Final = 200


class MetricSample(NamedTuple):
    """Sample of one series in the answer to a query."""

    labels: dict[str, str]
    value: float


class _QuerySeries(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


class _Vector(msgspec.Struct):
    result: list[_QuerySeries] = []


class _Answer(msgspec.Struct, rename={"error_type": "errorType"}):
    """Answer of Prometheus' query API."""

    status: str
    data: _Vector = msgspec.field(default_factory=_Vector)
    error_type: str = ""
    error: str = ""
    warnings: list[str] = []


class PrometheusServer:
    """Client of one Prometheus server. Calls block up to 60 s for the connect and for each read."""

    def __init__(self, url: str, *, token_file: Path | None = None, ca_file: Path | None = None) -> None:
        """Create a client; nothing is called yet.

        Args:
            url: ``http://`` or ``https://`` with host, and optionally user, password, port and path.
            token_file: File with a bearer token; None: none is sent.
            ca_file: CA certificates that sign the server's; None: those of this machine.

        Raises:
            ConfigError: The URL or a file cannot be used.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"Prometheus {url!r}: not a valid URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"Prometheus {url!r}: not a URL of a server, such as http://prometheus:9090")
        self._host, self._port = parts.hostname, port
        self._path = f"{parts.path.rstrip('/')}/api/v1/query"
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        """URL of the server, without user and password."""
        self.warnings: dict[str, None] = {}
        """Warnings in the answers, such as of a store that did not answer, in the order of their arrival."""
        self._tls: ssl.SSLContext | None = None
        self._headers = {
            "Accept": "application/json",
            "Content-Type": "application/x-www-form-urlencoded",
            "User-Agent": f"drahealth/{VERSION}",
        }
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        file = token_file
        try:
            if token_file is not None:
                self._headers["Authorization"] = f"Bearer {_read_token(token_file)}"
            file = ca_file
            if parts.scheme == "https":
                self._tls = ssl.create_default_context(cafile=ca_file)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"Prometheus {self.url}: file {file} cannot be used: {reason}") from None

    def query(self, query: str) -> list[MetricSample]:
        """Return the newest samples of a query.

        Raises:
            ApiUnreachableError: The server is unreachable or not trusted, did not answer in time, or sent no
                answer of Prometheus.
            ApiError: The server refused the query.
        """
        connection = self._connection()
        try:
            connection.request("POST", self._path, urlencode({"query": query}), self._headers)
            response = connection.getresponse()
            data = response.read(ANSWER_BYTES + 1)
        except (OSError, HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ApiUnreachableError(f"Prometheus {self.url}: query not answered: {reason}") from None
        finally:
            connection.close()
        if len(data) > ANSWER_BYTES:
            limit = ANSWER_BYTES >> 20
            raise ApiUnreachableError(
                f"Prometheus {self.url}: the answer is over {limit} MiB, the limit; select fewer nodes with "
                "--select"
            )
        try:
            answer = msgspec.json.decode(data, type=_Answer)
        except (msgspec.DecodeError, RecursionError):
            is_ok = response.status == OK_STATUS
            text = "another format" if is_ok else f"{response.status} {response.reason}"
            raise ApiUnreachableError(
                f"Prometheus {self.url}: the server did not answer as the query API: {text}; check the path "
                "of the URL"
            ) from None
        if answer.status != "success":
            raise ApiError(
                response.status, answer.error_type, f"Prometheus {self.url}: query refused: {answer.error}"
            )
        self.warnings |= dict.fromkeys(answer.warnings)
        samples = (MetricSample(series.metric, float(series.value[1])) for series in answer.data.result)
        return [sample for sample in samples if math.isfinite(sample.value)]

    def _connection(self) -> HTTPConnection:
        if self._tls is not None:
            return HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=self._tls)
        return HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)


def _read_token(path: Path) -> str:
    """Return the token in a file; raises OSError, or ValueError if it cannot be a token."""
    with path.open(encoding="ascii") as file:
        token = file.read(TOKEN_BYTES).strip()
    if len(token.split()) != 1 or not token.isprintable():
        raise ValueError("the file must have one line with a token, without blanks")
    return token
