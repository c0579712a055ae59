"""TLS and passwords of the HTTP server, in the form of Prometheus' web configuration."""

import asyncio
import base64
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import bcrypt
import pytest
from agents import short_tmp
from http_agents import FakeAgent, serve_app
from http_client import get
from patience import PATIENCE_S
from prometheus import Prometheus
from starlette.responses import PlainTextResponse
from wire.serving import eventually, report

from agent.errors import ConfigError
from agent.http.web_config import (
    PEER_CHECKS_MAX,
    RETRY_S,
    BasicAuthentication,
    WebConfig,
    WebConfigFile,
    read_web_config,
)

__all__ = ["short_tmp"]

PASSWORD = "s3cret:colon"
USERS = f"basic_auth_users:\n  ops: {bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()}\n"
TLS = "tls_server_config:\n  cert_file: tls.crt\n  key_file: tls.key\n"


def write_certificate(directory: Path, name: str = "tls") -> None:
    """Write a new certificate for 127.0.0.1 that signs itself, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    files = directory / name
    request = (
        f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN=node-7 -addext subjectAltName=IP:127.0.0.1 -keyout {files}.key.new -out {files}.crt.new"
    )
    subprocess.run(request.split(), check=True, capture_output=True)
    for suffix in ("key", "crt"):
        (directory / f"{name}.{suffix}.new").rename(directory / f"{name}.{suffix}")


def web_file(directory: Path, text: str) -> Path:
    path = directory / "web.yml"
    path.write_text(text)
    return path


def authorization(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def served_certificate(address: tuple[str, int]) -> bytes:
    """Return the certificate that a server shows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(address) as plain, context.wrap_socket(plain) as secure:
        found = secure.getpeercert(binary_form=True)
        assert found
        return found


def status_line(address: tuple[str, int], context: ssl.SSLContext) -> bytes:
    """Return the begin of the answer to a request; empty: the server refused the handshake."""
    try:
        with (
            socket.create_connection(address, PATIENCE_S) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
        ):
            secure.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return secure.recv(12)
    except (ssl.SSLError, ConnectionError):
        return b""


def test_request_needs_the_right_user_and_password(short_tmp: Path) -> None:
    with serve_app(FakeAgent().app, web_config=web_file(short_tmp, USERS)) as server:
        address = server.addresses[0]
        refused = get(address, "/healthz")
        assert (refused.status, refused.headers["www-authenticate"]) == (401, "Basic")
        for user, password in (("ops", "wrong"), ("other", PASSWORD), ("ops", "")):
            assert get(address, "/metrics", authorization(user, password)).status == 401
        assert get(address, "/metrics", {"Authorization": "Basic !"}).status == 401
        for _ in range(2):
            assert get(address, "/healthz", authorization("ops", PASSWORD)).status == 200


class Peer(NamedTuple):
    """Client of an application with passwords."""

    host: str | None
    password: str
    user: str = "ops"

    async def status(self, app: BasicAuthentication) -> int:
        """Request the application, and return the status of the answer."""
        header = authorization(self.user, self.password)["Authorization"].encode()
        client = None if self.host is None else (self.host, 1)
        scope = {"type": "http", "client": client, "headers": [(b"authorization", header)]}
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, None, send)  # type: ignore[arg-type]
        return int(sent[0]["status"])


def test_check_of_an_unknown_user_has_the_highest_cost_of_a_known_one(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = []

    def check(password: bytes, expected: bytes) -> bool:
        costs.append(expected[4:6])
        return checkpw(password, expected)

    checkpw = bcrypt.checkpw
    monkeypatch.setattr("agent.http.web_config.bcrypt.checkpw", check)
    monkeypatch.setattr("agent.http.web_config.REFUSAL_S", 0)
    other = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(6)).decode()
    web = WebConfigFile(web_file(short_tmp, f"{USERS}  other: {other}\n"))
    app = BasicAuthentication(PlainTextResponse("ok"), web)
    for user in ("ops", "other", "unknown"):
        assert asyncio.run(Peer("10.0.0.9", "wrong", user).status(app)) == 401
    assert costs == [b"04", b"06", b"06"]


@pytest.mark.parametrize("host", ["10.0.0.9", "2001:db8::{}", None])
def test_wrong_passwords_of_one_address_hold_a_limited_place_in_the_queue(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, host: str | None
) -> None:
    monkeypatch.setattr("agent.http.web_config.REFUSAL_S", 0)
    app = BasicAuthentication(PlainTextResponse("ok"), WebConfigFile(web_file(short_tmp, USERS)))
    attempts = [Peer(host and host.format(number), f"wrong {number}") for number in range(20)]

    async def attempt_twice() -> None:
        for _ in range(2):
            peers = [*attempts, Peer("10.0.0.10", PASSWORD)]
            *refused, other = await asyncio.gather(*(peer.status(app) for peer in peers))
            assert Counter(refused) == {401: PEER_CHECKS_MAX, 429: len(attempts) - PEER_CHECKS_MAX}
            assert other == 200

    asyncio.run(attempt_twice())


def test_changed_passwords_and_certificates_need_no_restart(short_tmp: Path) -> None:
    write_certificate(short_tmp)
    path = web_file(short_tmp, TLS)
    with serve_app(FakeAgent().app, web_config=path) as server:
        first = served_certificate(server.addresses[0])
        write_certificate(short_tmp)
        second = served_certificate(server.addresses[0])
        assert first != second
        path.write_text("tls_server_config: 5\n")
        assert served_certificate(server.addresses[0]) == second
    path.write_text(USERS)
    with serve_app(FakeAgent().app, web_config=path) as server:
        path.write_text("basic_auth_users: {}\n")
        assert get(server.addresses[0], "/healthz").status == 200


@pytest.mark.parametrize("begin", ["", "basic_auth_users:\n", "http_server_config: {http2: true}\n"])
def test_begin_of_a_rewritten_file_opens_no_server(short_tmp: Path, begin: str) -> None:
    path = web_file(short_tmp, USERS)
    with serve_app(FakeAgent().app, web_config=path) as server:
        path.write_text(begin)
        assert get(server.addresses[0], "/healthz").status == 401
        path.write_text("basic_auth_users: {}\n")
        assert get(server.addresses[0], "/healthz").status == 200


def test_begin_of_a_rewritten_file_drops_no_client_certificates(short_tmp: Path) -> None:
    write_certificate(short_tmp)
    text = f"{TLS}  client_ca_file: tls.crt\n  client_auth_type: RequireAndVerifyClientCert\n"
    path = web_file(short_tmp, text)
    context = ssl.create_default_context(cafile=str(short_tmp / "tls.crt"))
    with serve_app(FakeAgent().app, web_config=path) as server:
        path.write_text(TLS)
        assert status_line(server.addresses[0], context) == b""
        path.write_text(f"{TLS}  client_auth_type: NoClientCert\n")
        assert status_line(server.addresses[0], context) == b"HTTP/1.1 200"


def test_file_that_changes_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = web_file(tmp_path, USERS)
    contents = [USERS.replace("ops", "second"), USERS.replace("ops", "third")]

    def read_and_replace(file: Path) -> WebConfig:
        found = read_web_config(file)
        if contents:
            new = tmp_path / "new.yml"
            new.write_text(contents.pop(0))
            new.rename(path)
        return found

    monkeypatch.setattr("agent.http.web_config.read_web_config", read_and_replace)
    web = WebConfigFile(path)
    for _ in range(3):
        web.read()
    assert list(web.read().users) == ["third"]


def test_refused_file_is_read_again_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The missing file of a certificate is in no list of known files."""
    path, now_s = web_file(tmp_path, TLS), [0.0]
    write_certificate(tmp_path)
    web = WebConfigFile(path, clock=lambda: now_s[0])
    first = web.read().tls
    path.write_text(TLS.replace("tls.", "new."))
    for _ in range(3):
        assert web.read().tls is first
        now_s[0] += RETRY_S
    assert caplog.text.count("No such file or directory") == 1
    write_certificate(tmp_path, "new")
    now_s[0] += RETRY_S
    assert web.read().tls is not first


def test_prometheus_scrapes_with_tls_and_password(short_tmp: Path) -> None:
    write_certificate(short_tmp)
    fake = FakeAgent()
    fake.publish(report())
    scrape = {
        "scheme": "https",
        "tls_config": {"ca_file": str(short_tmp / "tls.crt")},
        "basic_auth": {"username": "ops", "password": PASSWORD},
    }
    with serve_app(fake.app, web_config=web_file(short_tmp, TLS + USERS)) as server:
        host, port = server.addresses[0]
        with Prometheus(short_tmp, [f"{host}:{port}"], scrape=scrape) as prometheus:
            prometheus.wait_for("drahealth_build_info and on () (up == 1)")


def test_changed_keys_of_tls_apply_to_new_connections(short_tmp: Path) -> None:
    write_certificate(short_tmp)
    path = web_file(short_tmp, TLS)
    context = ssl.create_default_context(cafile=str(short_tmp / "tls.crt"))
    with serve_app(FakeAgent().app, web_config=path) as server:
        assert status_line(server.addresses[0], context) == b"HTTP/1.1 200"
        client = "  client_ca_file: tls.crt\n  client_auth_type: RequireAndVerifyClientCert\n"
        path.write_text(f"{TLS}{client}  min_version: TLS13\n")
        assert status_line(server.addresses[0], context) == b""
        context.load_cert_chain(short_tmp / "tls.crt", short_tmp / "tls.key")
        assert status_line(server.addresses[0], context) == b"HTTP/1.1 200"
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        assert status_line(server.addresses[0], context) == b""


def test_closing_connections_with_tls_hinder_no_new_one(short_tmp: Path) -> None:
    """Hypercorn closes each twice, after which asyncio's transport of TLS has lost its protocol."""
    write_certificate(short_tmp)
    context = ssl.create_default_context(cafile=str(short_tmp / "tls.crt"))
    answers = list[bytes]()

    def request() -> None:
        for _ in range(15):
            answers.append(status_line(address, context))

    with serve_app(FakeAgent().app, web_config=web_file(short_tmp, TLS)) as server:
        address = server.addresses[0]
        clients = [threading.Thread(target=request) for _ in range(6)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
    assert answers == [b"HTTP/1.1 200"] * 90


def test_clients_without_a_handshake_count_as_connections(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_certificate(short_tmp)
    monkeypatch.setattr("agent.http.server.HANDSHAKE_S", PATIENCE_S)
    with serve_app(FakeAgent().app, web_config=web_file(short_tmp, TLS)) as server, ExitStack() as clients:
        address = server.addresses[0]
        for _ in range(server.connections_max):
            clients.enter_context(socket.create_connection(address))
        eventually(lambda: server.connections == server.connections_max, "all connections accepted")
        assert served_certificate(address)
        assert server.refused == 1
        clients.close()
        eventually(lambda: server.connections == 0, "the end of all connections")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("basic_auth_user: {}", "basic_auth_user: does not exist.* did you mean 'basic_auth_users'"),
        (
            "basic_auth_users: {ops: secret}",
            "user ops: the value is not the bcrypt hash of a password; create it with htpasswd -B",
        ),
        ("basic_auth_users: {ops: $2b$31$" + "." * 53 + "}", "ops: cost 31 is not within .* 4 to 12"),
        ("basic_auth_users: {ops: $2b$03$" + "." * 53 + "}", "ops: cost 03 is not within .* 4 to 12"),
        ("basic_auth_users: {ops: $2b$04$" + "a" * 53 + "}", "ops: the value is not the bcrypt hash"),
        ("tls_server_config: {cert_file: a}", "cert_file and key_file are both needed"),
        ("tls_server_config: {cert_file: a, key_file: b}", "a: cannot be used: No such file or directory"),
        ("tls_server_config: {cert: a}", "tls_server_config.cert: does not exist"),
        ("tls_server_config: {cert_file: a, key_file: b, min_version: TLS10}", "'TLS10' is not one of TLS12"),
        (
            "tls_server_config: {cert_file: a, key_file: b, min_version: [TLS12]}",
            "min_version: .* is not one of",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAndVerifyClientCert}",
            "client_ca_file needs a client_auth_type that verifies certificates, and the reverse",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, min_version: TLS13, max_version: TLS12}",
            "min_version: TLS13 is over max_version",
        ),
        ("http_server_config: {http2: 1}", "http_server_config.http2: 1 is neither true nor false"),
        ("- a", "the file is not a table"),
        ("a: [", "line 2, column 1"),
    ],
)
def test_invalid_web_configuration_is_refused_with_its_key(tmp_path: Path, text: str, words: str) -> None:
    path = web_file(tmp_path, text)
    with pytest.raises(ConfigError, match=rf"^http.web-config: file {path}: .*{words}"):
        read_web_config(path)


@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt"])
def test_pipe_in_place_of_a_certificate_is_refused(name: str, short_tmp: Path) -> None:
    """An open of the pipe would wait for a writer."""
    write_certificate(short_tmp)
    shutil.copy(short_tmp / "tls.crt", short_tmp / "ca.crt")
    (short_tmp / name).unlink()
    os.mkfifo(short_tmp / name)
    text = f"{TLS}  client_ca_file: ca.crt\n  client_auth_type: RequireAndVerifyClientCert\n"
    with pytest.raises(ConfigError, match=f"file {short_tmp}/{name}: cannot be used: is not a regular file"):
        read_web_config(web_file(short_tmp, text))


def test_client_needs_a_certificate_of_the_authority(short_tmp: Path) -> None:
    write_certificate(short_tmp)
    write_certificate(short_tmp, "client")
    text = f"{TLS}  client_ca_file: client.crt\n  client_auth_type: RequireAndVerifyClientCert\n"
    with serve_app(FakeAgent().app, web_config=web_file(short_tmp, text)) as server:
        context = ssl.create_default_context(cafile=str(short_tmp / "tls.crt"))
        assert status_line(server.addresses[0], context) == b""
        context.load_cert_chain(short_tmp / "client.crt", short_tmp / "client.key")
        assert status_line(server.addresses[0], context) == b"HTTP/1.1 200"
