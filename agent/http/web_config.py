"""Web configuration: TLS and basic authentication, in the form of Prometheus' web configuration files.

The file, certificates and key are read again when they change: new passwords and all keys of TLS apply to new
connections without a restart. A file that becomes invalid is logged, and the last valid content stays in
effect.
"""

import asyncio
import base64
import binascii
import hashlib
import ipaddress
import os
import re
import ssl
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, NamedTuple

import bcrypt
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agent.config.values import parse_bool
from agent.errors import ConfigError, suggestion
from agent.sources.yaml_text import parse_yaml
from agent.system.files import ReadError, read_bounded, read_credentials
from agent.system.output import get_logger

FILE_BYTES: Final = 64 << 10
"""Largest accepted web configuration [bytes]."""
USERS_MAX: Final = 64
COST_MIN: Final = 4
COST_MAX: Final = 12
"""Largest accepted cost of a bcrypt hash: one check takes 0.3 s, during which all clients wait."""
RETRY_S: Final = 10.0
"""Pause before a refused web configuration is read again although no known file has changed [s]."""
REFUSAL_S: Final = 0.5
"""Pause after a wrong password [s], so that attempts to guess passwords cost at most a tenth of a core."""
PEER_CHECKS_MAX: Final = 8
"""Largest number of waiting password checks of one client address: the HTTP/2 streams of a connection.

With more, a first login from another address would wait for all attempts to guess passwords.
"""
PASSED_MAX: Final = 64
"""Largest number of accepted passwords that are remembered as hashes, because a check takes 60 ms."""

_HASH: Final = re.compile(r"\$2[aby]\$([0-9]{2})\$[./A-Za-z0-9]{21}[.Oeu][./A-Za-z0-9]{31}")
_UNKNOWN_USER_HASH: Final = b"$2b$%b$QOauhQNbBCuQDKes6eFzPeMqBSjb7Mr5DUmpZ/VcEd00UAV/LDeSi"
"""Hash that is checked for an unknown user, with the highest cost of a known one, so that the answer takes as
long."""
_REFUSAL_HEADERS: Final = {
    HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": "Basic"},
    HTTPStatus.TOO_MANY_REQUESTS: {"Retry-After": "1"},
}
_VERSIONS: Final = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_CLIENT_AUTH: Final = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_TLS_KEYS: Final = frozenset(
    {"cert_file", "key_file", "client_auth_type", "client_ca_file", "min_version", "max_version"}
)

log = get_logger(__name__)


class WebConfig(NamedTuple):
    """Content of a web configuration file: TLS, users with their passwords' hashes."""

    tls: ssl.SSLContext | None
    users: Mapping[str, bytes]
    """bcrypt hashes of passwords by user; empty: no authentication."""
    files: tuple[Path, ...]
    """Paths of the files that were read: the web configuration, certificates and keys."""
    switched_off: frozenset[str] = frozenset()
    """Keys whose values switch a protection off: ``basic_auth_users`` and ``client_auth_type``."""


class WebConfigFile:
    """Web configuration file that is read again when it or a file named in it changes. Event loop only."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the web configuration file. Raises ConfigError if it is not valid.

        Args:
            clock: Returns the time on a clock that never goes back [s].
        """
        self._path = path
        self._clock = clock
        self._current, self._seen = _read_settled(path)
        self._refusal = ""
        self._retry_s = 0.0

    def read(self) -> WebConfig:
        """Return the newest valid web configuration; its files are read again if one has changed."""
        seen = _file_states(self._current.files)
        if seen != self._seen or (self._refusal and self._clock() >= self._retry_s):
            self._seen = seen
            self._update()
        return self._current

    def _update(self) -> None:
        try:
            config, seen = _read_settled(self._path)
        except ConfigError as error:
            self._refuse(str(error))
            return
        if reason := _lost_protection(self._current, config):
            self._refuse(reason)
            return
        self._current, self._seen, self._refusal = config, seen, ""
        log.info(
            "http.web-config: file %s or one that it names has changed; the new content is in effect",
            self._path,
        )

    def _refuse(self, reason: str) -> None:
        self._retry_s = self._clock() + RETRY_S  # of its files only those of the valid content are known
        if reason != self._refusal:
            log.warning(
                "http.web-config: changed content not applied: %s; the earlier content stays in effect",
                reason,
            )
        self._refusal = reason


def _read_settled(path: Path) -> tuple[WebConfig, tuple[object, ...]]:
    """Read a web configuration, and the states that its files had before the read. Raises ConfigError.

    A state that was read after the content could hide a change between the two reads.
    """
    config = read_web_config(path)
    while True:
        seen, files = _file_states(config.files), config.files
        config = read_web_config(path)
        if config.files == files:
            return config, seen


def _lost_protection(before: WebConfig, after: WebConfig) -> str:
    """Return why a changed web configuration is refused; empty: it is not.

    A program that rewrites the file may have written only its beginning, which is valid but lacks TLS or
    the users.
    """
    if (before.tls is None) != (after.tls is None):
        return "TLS is switched on and off by a restart of the agent only"
    if before.users and not after.users and "basic_auth_users" not in after.switched_off:
        return "it has no users; write 'basic_auth_users: {}' to serve without passwords"
    if before.tls is None or after.tls is None or before.tls.verify_mode is ssl.CERT_NONE:
        return ""
    if after.tls.verify_mode is ssl.CERT_NONE and "client_auth_type" not in after.switched_off:
        return "it has no client_auth_type; write 'client_auth_type: NoClientCert' to verify no certificates"
    return ""


def read_web_config(path: Path) -> WebConfig:
    """Read a web configuration file, and the certificates that it names.

    Raises:
        ConfigError: A file is unreadable or invalid, or a key is not known; the text has file and key.
    """
    try:
        documents = parse_yaml(read_bounded(path, FILE_BYTES).data)
    except ReadError as error:
        raise ConfigError(f"file {path}: cannot be read: {error.reason}", key="http.web-config") from None
    except ValueError as error:
        raise ConfigError(f"file {path}: {error}", key="http.web-config") from None
    try:
        content = _table(documents[0] if documents else None, "the file")
        _check_keys(content, "", {"tls_server_config", "http_server_config", "basic_auth_users"})
        server = _table(content.get("http_server_config"), "http_server_config")
        _check_keys(server, "http_server_config.", {"http2"})
        try:
            http2 = parse_bool(server.get("http2", True))
        except TypeError as error:
            raise TypeError(f"http_server_config.http2: {error}") from None
        tls, files = _tls_context(content.get("tls_server_config"), path.parent, http2=http2)
        users = _users(_table(content.get("basic_auth_users"), "basic_auth_users"))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"file {path}: {error}", key="http.web-config") from None
    is_off = {
        "basic_auth_users": content.get("basic_auth_users") == {},
        "client_auth_type": (content.get("tls_server_config") or {}).get("client_auth_type")
        == "NoClientCert",
    }
    return WebConfig(tls, users, (path, *files), frozenset(key for key, is_set in is_off.items() if is_set))


def _table(value: object, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TypeError(f"{name} is not a table of keys and values")
    return value


def _check_keys(table: Mapping[str, Any], prefix: str, known: Collection[str]) -> None:
    for key in table:
        if key not in known:
            raise ValueError(
                f"key {prefix}{key}: does not exist or is not supported{suggestion(str(key), known)}"
            )


def _tls_context(
    value: object, directory: Path, *, http2: bool
) -> tuple[ssl.SSLContext | None, tuple[Path, ...]]:
    """Return the TLS context for the value of ``tls_server_config``, and the files that it was made from.

    Paths in the value are relative to ``directory``. The context is None if there is no value.
    """
    if value is None:
        return None, ()
    prefix = "tls_server_config."
    table = _table(value, "tls_server_config")
    _check_keys(table, prefix, _TLS_KEYS)
    certificate, key = (_path(table, name, directory) for name in ("cert_file", "key_file"))
    if certificate is None or key is None:
        raise ValueError(f"{prefix}cert_file and key_file are both needed for TLS; set both")
    authority = _path(table, "client_ca_file", directory)
    mode = _choice(table, "client_auth_type", _CLIENT_AUTH, "NoClientCert")
    if (mode is ssl.CERT_NONE) != (authority is None):
        raise ValueError(
            f"{prefix}client_ca_file needs a client_auth_type that verifies certificates, and the reverse; "
            "set both"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _choice(table, "min_version", _VERSIONS, "TLS12")
    context.maximum_version = _choice(table, "max_version", _VERSIONS, "TLS13")
    if context.minimum_version > context.maximum_version:
        raise ValueError(f"{prefix}min_version: TLS13 is over max_version (TLS12); lower it")
    context.set_alpn_protocols(["h2", "http/1.1"] if http2 else ["http/1.1"])
    files = [path for path in (certificate, key, authority) if path is not None]
    try:
        for path in files:
            read_credentials(path)
        context.load_cert_chain(certificate, key, password=_refuse_password)
        if authority is not None:
            context.load_verify_locations(authority)
            context.verify_mode = mode
    except OSError as error:  # ssl.SSLError is one
        place = error.filename or f"{certificate}, {key}"
        raise ValueError(f"{prefix[:-1]}: file {place}: cannot be used: {error.strerror or error}") from None
    return context, tuple(files)


def _refuse_password() -> str:
    raise ValueError("tls_server_config.key_file: the key has a passphrase; remove it")


def _path(table: Mapping[str, Any], key: str, directory: Path) -> Path | None:
    """Return the path in a key, relative to a directory; None: the key is missing or empty."""
    value = table.get(key) or None
    if value is not None and not isinstance(value, str):
        raise TypeError(f"tls_server_config.{key}: {value!r} is not the path of a file; put it in quotes")
    return None if value is None else directory / value


def _choice(table: Mapping[str, Any], key: str, choices: Mapping[str, Any], default: str) -> Any:
    name = table.get(key) or default
    if not isinstance(name, str) or name not in choices:
        raise ValueError(f"tls_server_config.{key}: {name!r} is not one of {', '.join(choices)}")
    return choices[name]


def _users(table: Mapping[str, Any]) -> dict[str, bytes]:
    if len(table) > USERS_MAX:
        raise ValueError(f"basic_auth_users: {len(table)} users, limit {USERS_MAX}; name fewer")
    users = {}
    for user, value in table.items():
        found = _HASH.fullmatch(value) if isinstance(value, str) else None
        if found is None or ":" in user:
            raise ValueError(
                f"basic_auth_users: user {user}: the value is not the bcrypt hash of a password; create it "
                "with htpasswd -B"
            )
        if not COST_MIN <= int(found[1]) <= COST_MAX:
            raise ValueError(
                f"basic_auth_users: user {user}: cost {found[1]} is not within the limits of {COST_MIN} to "
                f"{COST_MAX}; make the hash with htpasswd -B -C {COST_MAX}"
            )
        users[user] = value.encode()
    return users


def _file_states(paths: Collection[Path]) -> tuple[object, ...]:
    """Return inode, time and size of each file, or the error: a difference shows that a file was changed."""
    states: list[object] = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError as error:
            states.append(error.errno)
        else:
            states.append((status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(states)


class BasicAuthentication:
    """ASGI application that passes a request with the right user and password to another application."""

    def __init__(self, app: ASGIApp, web: WebConfigFile) -> None:
        self._app = app
        self._web = web
        self._lock = asyncio.Lock()
        self._checks: Counter[str] = Counter()
        """Number of password checks that run or wait, by address of the client."""
        self._passed: dict[bytes, None] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        users = self._web.read().users
        if not users:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            status = await self._check(users, scope)
            if status == HTTPStatus.OK:
                await self._app(scope, receive, send)
                return
            answer = PlainTextResponse(f"{status.phrase}\n", status, _REFUSAL_HEADERS[status])
            await answer(scope, receive, send)

    async def _check(self, users: Mapping[str, bytes], scope: Scope) -> HTTPStatus:
        """Return OK if user and password of a request are right; else the status of the refusal."""
        credentials = _credentials(scope)
        if credentials is None:
            return HTTPStatus.UNAUTHORIZED
        user, password = credentials
        expected = users.get(user)
        known = hashlib.sha256(b"%b\0%b\0%b" % (user.encode(), password, expected or b"")).digest()
        if known in self._passed:
            return HTTPStatus.OK
        peer = _peer_network(scope)
        if self._checks[peer] >= PEER_CHECKS_MAX:
            return HTTPStatus.TOO_MANY_REQUESTS
        self._checks[peer] += 1
        unknown = _UNKNOWN_USER_HASH % max(hashed[4:6] for hashed in users.values())
        try:
            return await self._check_in_turn(password, expected, known, unknown)
        finally:
            self._checks[peer] -= 1
            if not self._checks[peer]:
                del self._checks[peer]

    async def _check_in_turn(
        self, password: bytes, expected: bytes | None, known: bytes, unknown: bytes
    ) -> HTTPStatus:
        async with self._lock:
            if known in self._passed:  # the request before this one had the same password
                return HTTPStatus.OK
            if bcrypt.checkpw(password[:72], expected or unknown) and expected is not None:
                if len(self._passed) >= PASSED_MAX:
                    self._passed.clear()
                self._passed[known] = None
                return HTTPStatus.OK
            await asyncio.sleep(REFUSAL_S)
        return HTTPStatus.UNAUTHORIZED


def _peer_network(scope: Scope) -> str:
    """Return the client's IPv4 address, or the first 64 bits of its IPv6 address.

    An IPv6 client may have all addresses that begin with these bits.
    """
    host = str((scope.get("client") or ("",))[0])
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a unix socket
        return ""
    return host if address.version == 4 else address.packed[:8].hex()


def _credentials(scope: Scope) -> tuple[str, bytes] | None:
    """Return user and password of the header ``Authorization``; None: it is missing or invalid."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, encoded = value.partition(b" ")
            try:
                user, colon, password = base64.b64decode(encoded, validate=True).partition(b":")
                return (user.decode(), password) if colon and scheme.lower() == b"basic" else None
            except (binascii.Error, UnicodeDecodeError):
                return None
    return None
