"""HTTP server of the agent: probes, report, sockets, limits of connections, and what it needs."""

import asyncio
import errno
import itertools
import json
import os
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, PlainSysfs, short_tmp
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, StreamEnded
from h2.settings import SettingCodes
from hpack import Encoder
from http_agents import ANY_PORT, FakeAgent, running_report, serve_app
from http_client import connect, get
from patience import PATIENCE_S
from wire.raw import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    RawClient,
    frame,
)
from wire.serving import eventually, fail_once, is_served, report

from agent.errors import ConfigError, ResourceBusyError
from agent.http import server as http_server
from agent.http.agent_view import SILENT_HEARTBEATS
from agent.http.app import COMMENT_S, RenderTurns
from agent.http.server import (
    CONTROL_FRAMES_BURST,
    IDLE_S,
    RECEIVE_NEW,
    RECEIVE_PER_S,
    RECEIVE_SHARED,
    RECEIVE_STEP,
    REQUEST_BYTES,
    HttpServer,
    PacedReader,
    ReceiveBudget,
)
from agent.model.reading import SourceState
from agent.model.socket_address import ListenAddress
from agent.model.time import NS, Instant
from agent.serve.sockets import BACKLOG, PeerCredentials, UnixListener

__all__ = ["short_tmp"]

HTTP_PACKAGES = {"starlette", "hypercorn", "prometheus_client", "jinja2", "bcrypt", "agent.http"}


@pytest.fixture
def fake() -> FakeAgent:
    return FakeAgent()


def test_report_on_a_unix_socket_equals_that_of_the_agent(short_tmp: Path) -> None:
    sysfs, path = PlainSysfs(short_tmp / "sys"), short_tmp / "run" / "http.sock"
    with Agent(short_tmp, "--sysfs-root", str(sysfs.root), "--listen", f"unix:{path}") as agent:
        assert get(path, "/readyz")[::2] == (200, "ok\n")
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        shown = get(path, "/api/v1/report")
        assert shown.headers["content-type"] == "application/json"
        devices = {device["name"]: device["health"] for device in json.loads(shown.text)["devices"]}
        assert devices["cpu-node0"] == "Healthy"
        assert get(path, "/nothing").status == 404
        assert agent.end() == 0
        is_abandoned = "the HTTP thread did not stop within 0.2 s" in agent.log  # of a busy machine
        assert is_abandoned or not path.exists()
        assert "Traceback" not in agent.log


def test_agent_without_listen_imports_nothing_of_the_http_server() -> None:
    code = f"import agent.app.daemon, agent.cli.run, sys\nprint(sorted({HTTP_PACKAGES!r} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


@pytest.mark.parametrize("package", ["starlette", "hypercorn"])
def test_missing_extra_is_an_error_that_names_package_and_extra(short_tmp: Path, package: str) -> None:
    """A package of this name that cannot be imported precedes the installed one."""
    text = f"raise ModuleNotFoundError(name={package!r})\n"
    (short_tmp / f"{package}.py").write_text(text)
    run = short_tmp / "run"
    ended = subprocess.run(
        [sys.executable, "-m", "agent", "run", "--runtime-dir", str(run), "--listen", "localhost"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": str(short_tmp)},
        check=False,
    )
    assert ended.returncode == 78
    assert f"the package {package} is not installed; install drahealth[http]" in ended.stderr
    assert not list(run.glob("*.sock"))


def test_web_config_without_an_address_is_refused(short_tmp: Path) -> None:
    run = short_tmp / "run"
    ended = subprocess.run(
        [sys.executable, "-m", "agent", "run", "--runtime-dir", str(run), "--web-config", "/etc/web.yml"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 78
    assert "http.web-config: /etc/web.yml has no effect without an address" in ended.stderr
    assert not list(run.glob("*.sock"))


def test_second_server_on_an_address_is_refused(fake: FakeAgent, short_tmp: Path) -> None:
    unix = ListenAddress("", path=str(short_tmp / "http.sock"))
    with serve_app(fake.app, ANY_PORT, unix) as server:
        _, port = server.addresses[0]
        with pytest.raises(
            ResourceBusyError, match=rf"http.listen: address 127.0.0.1:{port}: another process"
        ):
            HttpServer([ListenAddress("127.0.0.1", port)], fake.app)
        with pytest.raises(ResourceBusyError, match="another process serves it; stop that process"):
            HttpServer([unix], fake.app)


def test_removed_socket_file_is_created_again(fake: FakeAgent, short_tmp: Path) -> None:
    path = short_tmp / "run" / "http.sock"
    with serve_app(fake.app, ListenAddress("", path=str(path)), check_s=0.01):
        for _ in range(2):
            path.unlink()
            eventually(lambda: is_served(path), "a server at the path")
            assert get(path, "/healthz").status == 200
        path.parent.rename(short_tmp / "moved")  # at once: the server creates a missing file each moment
        eventually(path.is_socket, "the socket's file and directory")
    assert not path.exists()


def test_created_socket_that_cannot_be_served_is_created_once_more(
    fake: FakeAgent, short_tmp: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = short_tmp / "http.sock"
    with serve_app(fake.app, ListenAddress("", path=str(path)), check_s=0.01):
        raised = fail_once(monkeypatch, HttpServer, "_start")
        path.unlink()
        eventually(lambda: f"socket {path}: was removed" in caplog.text, "served again")
        assert raised
        assert get(path, "/healthz").status == 200


def test_event_loop_forgets_a_socket_that_cannot_listen(fake: FakeAgent, short_tmp: Path) -> None:
    class FullSocket(socket.socket):
        def listen(self, backlog: int = 0, /) -> None:
            if backlog == BACKLOG:
                raise OSError(errno.ENOBUFS, "no buffers")
            super().listen(backlog)

    async def start() -> bool:
        server = HttpServer([ListenAddress("", path=str(short_tmp / "http.sock"))], fake.app)
        (listener,) = server._listeners
        assert isinstance(listener, UnixListener)
        listener.sock = FullSocket(fileno=listener.sock.detach())
        descriptor = listener.sock.fileno()
        try:
            with pytest.raises(OSError, match="no buffers"):
                await server._start(listener)
            return asyncio.get_running_loop().remove_reader(descriptor)
        finally:
            server.close()

    assert not asyncio.run(start())


def test_http2_connection_answers_more_than_a_thousand_requests(fake: FakeAgent) -> None:
    """At its own limit, Hypercorn would accept a request and answer no further one."""
    fake.view.latest.publish(report(second=100))
    with serve_app(fake.app) as server, connect(server.addresses[0]) as client:
        h2 = H2Connection()
        h2.initiate_connection()
        ended = 0
        for number in range(1100):
            headers = [(":method", "GET"), (":scheme", "http"), (":path", "/healthz"), (":authority", "x")]
            h2.send_headers(h2.get_next_available_stream_id(), headers, end_stream=True)
            client.sendall(h2.data_to_send())
            while ended <= number:
                received = client.recv(1 << 16)
                assert received, "the connection ended"
                events = h2.receive_data(received)
                assert not any(isinstance(event, ConnectionTerminated) for event in events)
                ended += sum(isinstance(event, StreamEnded) for event in events)


def test_address_of_another_machine_is_refused(fake: FakeAgent) -> None:
    with pytest.raises(ConfigError, match=r"192.0.2.1:80: cannot listen .* choose another address"):
        HttpServer([ListenAddress("192.0.2.1", 80)], fake.app)


def test_socket_in_a_directory_of_all_users_is_refused(fake: FakeAgent, short_tmp: Path) -> None:
    short_tmp.chmod(0o777)
    with pytest.raises(ConfigError, match="all users may write to it"):
        HttpServer([ListenAddress("", path=str(short_tmp / "http.sock"))], fake.app)


def test_probes_show_a_missing_and_an_old_report(fake: FakeAgent) -> None:
    with serve_app(fake.app) as server:
        address = server.addresses[0]
        assert get(address, "/healthz").status == 200
        assert get(address, "/readyz").status == get(address, "/api/v1/report").status == 503
        fake.view.latest.publish(running_report(100))
        assert get(address, "/readyz").status == 200
        fake.now = Instant(131 * NS, 0.0)
        assert SILENT_HEARTBEATS * 10 < 31
        for path in ("/healthz", "/readyz"):
            answer = get(address, path)
            assert (answer.status, answer.text) == (503, "the newest health report is 31 s old, limit 30 s\n")
        fake.view.latest.publish(running_report(131))
        assert get(address, "/healthz").status == 200


def test_probe_fails_without_a_report_long_after_the_start(fake: FakeAgent) -> None:
    with serve_app(fake.app) as server:
        address = server.addresses[0]
        fake.now = Instant(220 * NS, 0.0)
        assert get(address, "/healthz").status == 200
        fake.now = Instant(221 * NS, 0.0)
        answer = get(address, "/healthz")
        assert (answer.status, answer.text) == (503, "no health report 121 s after the start, limit 120 s\n")
        fake.view.latest.publish(running_report(221))
        assert get(address, "/healthz").status == 200


def test_probes_fail_while_a_vital_source_is_stalled_only(fake: FakeAgent) -> None:
    sound = running_report(100)
    (cpus,) = sound.sources
    hung = cpus._replace(state=SourceState.STALLED, beat_ns=NS)
    with serve_app(fake.app) as server:
        for sources, text in (
            ((cpus, hung._replace(name="nvml", vital=False)), "ok\n"),
            ((cpus, hung._replace(name="groups")), "vital sources are stalled: groups\n"),
            ((hung._replace(state=SourceState.ABSENT),), "vital sources are stalled: all\n"),
            ((cpus,), "ok\n"),
        ):
            fake.view.latest.publish(replace(sound, sources=sources))
            for path in ("/healthz", "/readyz"):
                answer = get(server.addresses[0], path)
                assert (answer.status, answer.text) == (200 if text == "ok\n" else 503, text)


def test_silent_connections_give_way_to_new_ones_and_are_counted(fake: FakeAgent) -> None:
    with serve_app(fake.app) as server, ExitStack() as clients:
        address = server.addresses[0]
        for _ in range(server.connections_max):
            clients.enter_context(connect(address))
        eventually(lambda: server.connections == server.connections_max, "all connections accepted")
        assert get(address, "/healthz").status == 200
        assert server.refused == 1
        eventually(lambda: server.connections == server.connections_max - 1, "the end of the last one")


async def answer_and_wait(scope: Any, receive: Any, send: Any) -> None:
    """Application whose response never ends, except for the path ``/short``."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] != "/short":
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        await asyncio.Event().wait()
    await send({"type": "http.response.body", "body": b"done"})


def begin_response(client: socket.socket, path: str = "/") -> bytes:
    """Send a request, and return the begin of the response."""
    client.sendall(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode())
    return client.recv(1 << 16)


def is_open(client: socket.socket) -> bool:
    """Return True if the server has not closed a connection; data that have arrived are dropped."""
    client.setblocking(False)
    with suppress(ConnectionError):
        try:
            while client.recv(1 << 16):
                pass
        except BlockingIOError:
            return True
    return False


def test_flood_of_one_address_ends_no_connection_of_another() -> None:
    with serve_app(answer_and_wait, connections_max=8) as server, ExitStack() as clients:
        address = server.addresses[0]
        silent, busy = (clients.enter_context(connect(address, source="127.0.0.2")) for _ in range(2))
        assert begin_response(busy)
        for number in range(40):
            flood = clients.enter_context(connect(address))
            if number % 2:
                begin_response(flood)
        eventually(lambda: server.refused >= 34 and server.connections == 8, "the end of the others")
        assert is_open(busy)
        assert b"200" in begin_response(silent, "/short")


def test_flood_of_one_uid_ends_no_connection_of_another(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uids = itertools.chain([1, 1], itertools.repeat(2))
    monkeypatch.setattr(
        http_server, "peer_credentials", lambda _: PeerCredentials(1, next(uids)), raising=False
    )
    path = short_tmp / "http.sock"
    address = ListenAddress("", path=str(path))
    with serve_app(answer_and_wait, address, connections_max=8) as server, ExitStack() as clients:
        silent, busy = (clients.enter_context(connect(path)) for _ in range(2))
        eventually(lambda: server.connections == 2, "accepted connections")
        assert begin_response(busy)
        for _ in range(40):
            clients.enter_context(connect(path))
        eventually(lambda: server.refused >= 34 and server.connections == 8, "the end of the others")
        assert is_open(busy)
        assert b"200" in begin_response(silent, "/short")


def test_full_server_ends_connections_without_a_response_first() -> None:
    with serve_app(answer_and_wait, connections_max=3) as server, ExitStack() as clients:
        address = server.addresses[0]
        busy = clients.enter_context(connect(address))
        assert begin_response(busy)
        silent = [clients.enter_context(connect(address)) for _ in range(2)]
        eventually(lambda: server.connections == 3, "accepted connections")
        assert b"200" in begin_response(clients.enter_context(connect(address)), "/short")
        assert is_open(busy)
        assert sum(map(is_open, silent)) == 1


def test_unread_documents_of_the_client_with_most_bytes_end_first(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uids = iter([1, 2, 2])
    monkeypatch.setattr(
        http_server, "peer_credentials", lambda _: PeerCredentials(1, next(uids)), raising=False
    )

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": memoryview(bytes(1 << 20))})

    path = short_tmp / "http.sock"
    with (
        serve_app(app, ListenAddress("", path=str(path)), unsent_limit=5 << 19) as server,
        ExitStack() as clients,
    ):
        patient, *greedy = opened = [clients.enter_context(connect(path)) for _ in range(3)]
        for client in opened:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert client.recv(1)
        eventually(lambda: server.connections == 2, "the end of one connection")
        sizes = [len(read_until_end(client)) for client in (patient, *greedy)]
        assert [size > 1 << 20 for size in sizes] == [True, False, True]


def test_sockets_of_grpc_and_http_share_half_of_the_descriptors(short_tmp: Path) -> None:
    path = short_tmp / "http.sock"
    wrapper = ("sh", "-c", 'ulimit -n 132; exec "$@"', "sh")
    with Agent(short_tmp, "--listen", f"unix:{path}", wrapper=wrapper) as agent, ExitStack() as clients:
        for file in (path, agent.health_socket):  # two of three sockets
            for _ in range(23):
                clients.enter_context(connect(file))
        eventually(lambda: "limit of 22 open connections reached" in agent.log, "an ended client")
        eventually(lambda: f"{agent.health_socket}: limit of 22 connections" in agent.log, "an ended client")


def test_unread_documents_above_the_limit_end_the_longest_wait(short_tmp: Path) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        document = memoryview(bytes(1 << 20))  # one of its own for each client
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for begin in range(0, len(document), 1 << 15):
            part = document[begin : begin + (1 << 15)]
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    path = short_tmp / "http.sock"

    def request() -> socket.socket:
        client = clients.enter_context(connect(path))
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert client.recv(1)
        return client

    address = ListenAddress("", path=str(path))
    with serve_app(app, address, unsent_limit=5 << 19) as server, ExitStack() as clients:
        first, *others = [request() for _ in range(3)]
        eventually(lambda: server.connections == 2, "the end of one connection")
        assert len(read_until_end(first)) < 1 << 20
        assert all(len(read_until_end(client)) > 1 << 20 for client in others)


def read_until_end(client: socket.socket) -> bytes:
    """Return all that a server still sends until it closes the connection."""
    received = bytearray()
    with suppress(ConnectionResetError):
        while data := client.recv(1 << 20):
            received += data
    return bytes(received)


def test_client_that_does_not_read_is_disconnected() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})

    with serve_app(app, unsent_s=1) as server, connect(server.addresses[0], receive_buffer=4096) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(1)
        eventually(lambda: server.connections == 0, "the end of the connection")


def send_no_request(_: H2Connection) -> None:
    """Send the begin of HTTP/2 only."""


def reset_stream(client: H2Connection) -> None:
    """Request a stream and reset it, as a browser does whose page is closed."""
    client.send_headers(1, http2_request("/events"), end_stream=True)
    client.reset_stream(1)


def leave_window_closed(client: H2Connection) -> None:
    """Request what the client then does not accept."""
    client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
    client.send_headers(1, http2_request("/metrics"), end_stream=True)


def http2_request(path: str) -> list[tuple[str, str]]:
    return [(":method", "GET"), (":path", path), (":scheme", "http"), (":authority", "x")]


@pytest.mark.parametrize("begin", [send_no_request, reset_stream, leave_window_closed])
def test_http2_connection_without_progress_is_closed(
    fake: FakeAgent, begin: Callable[[H2Connection], None]
) -> None:
    fake.publish(report())
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    begin(client)
    options = {"idle_s": 0.2, "check_s": 0.05}
    with serve_app(fake.app, **options) as server, connect(server.addresses[0]) as connection:
        with suppress(ConnectionError):  # on a busy machine the server may close it before the request
            connection.sendall(client.data_to_send())
            while connection.recv(65_536):
                pass
        eventually(lambda: server.connections == 0, "the end of the connection")


def test_client_of_a_unix_socket_that_does_not_read_is_disconnected(short_tmp: Path) -> None:
    async def respond_endlessly(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": bytes(65_536), "more_body": True})

    path = short_tmp / "http.sock"
    with serve_app(respond_endlessly, ListenAddress("", path=str(path)), idle_s=0.2, check_s=0.05) as server:

        def is_answered_and_closed() -> bool:
            """Return False if the server closed the connection before the request of a slow client."""
            with connect(path) as client, suppress(ConnectionError):
                client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                if client.recv(1):
                    eventually(lambda: server.connections == 0, "the end of the connection")
                    return True
            return False

        eventually(is_answered_and_closed, "an answer")


def test_event_stream_sends_parts_within_the_idle_time() -> None:
    assert IDLE_S > 2 * COMMENT_S


def test_request_with_non_ascii_bytes_ends_the_connection_unlogged(
    fake: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    config = H2Configuration(client_side=True, header_encoding=None, normalize_outbound_headers=False)
    with serve_app(fake.app) as server:
        for field in (b":path", b":method"):
            client = H2Connection(config)
            client.initiate_connection()
            request = {b":method": b"GET", b":path": b"/", b":scheme": b"http", b":authority": b"x"}
            client.send_headers(1, list((request | {field: b"/\xff"}).items()), end_stream=True)
            with connect(server.addresses[0]) as connection:
                connection.sendall(client.data_to_send())
                read_until_end(connection)
        assert get(server.addresses[0], "/healthz").status == 200
    assert not caplog.records


@pytest.mark.parametrize(
    "upgrade",
    [
        {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "A"},
        {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"},
    ],
    ids=["h2c", "websocket"],
)
def test_request_to_upgrade_is_answered_as_any_other(
    fake: FakeAgent, caplog: pytest.LogCaptureFixture, upgrade: dict[str, str]
) -> None:
    with serve_app(fake.app) as server:
        assert get(server.addresses[0], "/healthz", upgrade).status == 200
    assert not caplog.records


def test_http2_tunnel_is_refused(short_tmp: Path, fake: FakeAgent, caplog: pytest.LogCaptureFixture) -> None:
    path = short_tmp / "http.sock"
    tunnel = [(":method", "CONNECT"), (":protocol", "websocket"), *http2_request("/healthz")[1:]]
    with serve_app(fake.app, ListenAddress("", path=str(path))), RawClient(path) as client:
        client.headers(1, [(name.encode(), text.encode()) for name, text in tunnel])
        client.next_of(RST_STREAM, 1)
        client.headers(3, [(a.encode(), b.encode()) for a, b in http2_request("/healthz")])
        assert client.next_headers(3)[":status"] == "200"
    assert not caplog.records


def test_data_for_an_answered_request_are_ignored(
    short_tmp: Path, fake: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    path = short_tmp / "http.sock"
    request = [(b":method", b"POST"), *((a.encode(), b.encode()) for a, b in http2_request("/healthz")[1:])]
    with serve_app(fake.app, ListenAddress("", path=str(path))), RawClient(path) as client:
        client.headers(1, request)
        assert client.next_headers()[":status"] == "405"
        while client.next_of(DATA, 1)[0] != END_STREAM:
            pass
        client.send(frame(DATA, 0, 1, b"late") + frame(PING, 0, 0, b"the last"))
        assert client.next_of(PING, 0) == (ACK, b"the last")
    assert not caplog.records


def test_http2_priorities_are_ignored(fake: FakeAgent) -> None:
    """A client may prioritize more streams than Hypercorn's tree has room for."""
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    for stream in range(3, 4003, 2):
        client.prioritize(stream, depends_on=stream - 2)
    client.send_headers(1, http2_request("/healthz"), end_stream=True)
    with serve_app(fake.app) as server, connect(server.addresses[0]) as connection:
        connection.sendall(client.data_to_send())
        events = list[Any]()
        while not any(isinstance(event, StreamEnded) for event in events):
            events = client.receive_data(connection.recv(65_536))


def endless_reader(budget: ReceiveBudget) -> PacedReader:
    """Return a reader of a new connection whose client has sent more than it may."""
    source: Any = asyncio.StreamReader()
    source.feed_data(bytes(4 * RECEIVE_SHARED))
    return PacedReader(source, lambda: False, budget)


async def read_now(paced: PacedReader) -> int:
    """Return the number of bytes that a connection reads until it has to wait."""
    received = 0

    async def read_all() -> None:
        nonlocal received
        while True:
            received += len(await paced.read(1 << 16))

    paced.is_too_fast = False
    reading = asyncio.create_task(read_all())
    for _ in range(4 * RECEIVE_SHARED // RECEIVE_STEP):
        await asyncio.sleep(0)
        if paced.is_too_fast:
            break
    assert reading.cancel()
    await asyncio.wait({reading})
    return received


def test_client_that_sends_without_end_has_to_wait() -> None:
    async def read() -> int:
        return await read_now(endless_reader(ReceiveBudget(clock=lambda: 0.0)))

    most = RECEIVE_NEW + RECEIVE_SHARED
    assert most <= asyncio.run(read()) <= most + RECEIVE_STEP


def test_new_connections_share_one_burst() -> None:
    async def connect_often() -> list[int]:
        budget = ReceiveBudget(clock=lambda: 0.0)
        return [await read_now(endless_reader(budget)) for _ in range(100)]

    first, *others = asyncio.run(connect_often())
    assert first >= RECEIVE_SHARED
    assert max(others) <= RECEIVE_NEW + RECEIVE_STEP


def test_rate_of_all_connections_is_half_their_own_and_half_shared() -> None:
    async def read_for_a_second() -> None:
        now_s = 0.0
        budget = ReceiveBudget(clock=lambda: now_s)
        budget.connections = 2
        first, second = (endless_reader(budget) for _ in range(2))
        await read_now(first)
        await read_now(second)
        now_s = 0.25
        received = [await read_now(first), await read_now(second)]
        for rate, expected in zip(received, (RECEIVE_PER_S * 3 / 16, RECEIVE_PER_S / 16), strict=True):
            assert abs(rate - expected) <= 2 * RECEIVE_STEP

    asyncio.run(read_for_a_second())


def test_documents_are_rendered_with_pauses_for_other_requests() -> None:
    async def render() -> None:
        times = iter((0.0, 3600.0, 3600.0))  # the first document takes an hour
        turns = RenderTurns(clock=lambda: next(times))
        begun: list[int] = []

        async def take_turn(number: int) -> None:
            async with turns.turn():
                begun.append(number)

        tasks = [asyncio.create_task(take_turn(number)) for number in range(2)]
        for _ in range(100):  # steps in which other requests are answered
            await asyncio.sleep(0)
        assert begun == [0]
        for task in tasks:
            task.cancel()

    asyncio.run(render())


# --- floods ------------------------------------------------------------------------------------------------

ENHANCE_YOUR_CALM = 0xB


class CountingApp:
    """Application that answers each request after its body, and counts the requests."""

    def __init__(self) -> None:
        self.requests = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests += 1
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


def raw_request(encoder: Encoder, stream: int, flags: int) -> bytes:
    headers = [(name.encode(), text.encode()) for name, text in http2_request("/healthz")]
    return frame(HEADERS, END_HEADERS | flags, stream, encoder.encode(headers))


def resets(count: int) -> bytes:
    """Return requests that are reset at once."""
    encoder, cancel = Encoder(), struct.pack(">I", 8)
    return b"".join(
        raw_request(encoder, stream, END_STREAM) + frame(RST_STREAM, 0, stream, cancel)
        for stream in range(1, 2 * count, 2)
    )


FLOODS = {
    "resets": resets,
    "pings": lambda count: count * frame(PING, 0, 0, bytes(8)),
    "settings": lambda count: count * frame(SETTINGS, 0, 0),
    "empty_data": lambda count: raw_request(Encoder(), 1, 0) + count * frame(DATA, 0, 1),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=list(FLOODS))
def test_control_frames_above_the_limit_end_with_enhance_your_calm(
    short_tmp: Path, caplog: pytest.LogCaptureFixture, flood: Callable[[int], bytes]
) -> None:
    path = short_tmp / "http.sock"
    with serve_app(CountingApp(), ListenAddress("", path=str(path))) as server:
        with RawClient(path) as client:
            client.send(flood(CONTROL_FRAMES_BURST // 2) + frame(PING, 0, 0, b"the last"))
            while client.next_of(PING, 0) != (ACK, b"the last"):
                pass
        assert not caplog.records
        with RawClient(path) as client:
            client.next_frame()  # SETTINGS: its acknowledgement must not be sent after the end
            client.send(flood(4 * CONTROL_FRAMES_BURST))
            _, payload = client.next_of(GOAWAY, 0)
            assert struct.unpack_from(">I", payload, 4) == (ENHANCE_YOUR_CALM,)
            with suppress(ConnectionResetError):  # the server has not read all
                assert client.next_frame() is None
        assert get(path, "/healthz").status == 200
        eventually(lambda: server.connections == 0, "the end of all connections")
    (record,) = caplog.records
    assert record.getMessage().startswith("http: closed 1 connections: their clients reset requests, ping")


FLOOD = """
import os, socket, sys, time
from contextlib import suppress
port, is_held, data = int(sys.argv[1]), sys.argv[2] == "held", bytes.fromhex(sys.stdin.read())
clients = []
while True:
    clients.append(socket.socket())
    with suppress(OSError):
        clients[-1].connect(("127.0.0.1", port))
        clients[-1].setblocking(False)
        clients[-1].send(data)
    os.write(1, b"c")
    if len(clients) == 64:
        if is_held:
            time.sleep(3600)
        clients.pop(0).close()
"""
"""Program that sends the same data on 64 connections, which it holds, or replaces one by one."""


@contextmanager
def flood_server(port: int, data: bytes, mode: str) -> Iterator["subprocess.Popen[str]"]:
    """Flood a server from another process, whose output has a character for each connection."""
    command = [sys.executable, "-c", FLOOD, str(port), mode]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(data.hex())
            process.stdin.close()
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("mode", ["held", "reconnecting"])
def test_flood_of_resets_begins_few_requests_and_probes_are_answered(mode: str) -> None:
    app, begin_s = CountingApp(), time.monotonic()
    with serve_app(app) as server:
        address = server.addresses[0]
        with flood_server(address[1], PREFACE + frame(SETTINGS, 0, 0) + resets(2000), mode) as process:
            assert process.stdout is not None
            assert len(process.stdout.read(64)) == 64, "no flood"
            for _ in range(8):
                assert get(address, "/healthz").status == 200
            process.kill()
            connections = 64 + len(process.stdout.read())
    at_once = RECEIVE_SHARED + (connections + 8) * (RECEIVE_NEW + RECEIVE_STEP)
    assert app.requests * REQUEST_BYTES <= at_once + RECEIVE_PER_S * (time.monotonic() - begin_s)


def test_full_server_closes_the_client_that_sends_too_fast() -> None:
    """The other client has made no progress for longer."""
    with serve_app(CountingApp(), connections_max=2) as server, ExitStack() as clients:
        address = server.addresses[0]
        silent = clients.enter_context(connect(address))
        eventually(lambda: server.connections == 1, "an accepted connection")
        fast = clients.enter_context(connect(address))
        fast.setblocking(False)
        fast.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
        with suppress(BlockingIOError):
            while True:
                fast.send(bytes(1 << 16))
        eventually(
            lambda: any(connection.paced.is_too_fast for connection in server._connections.values()),
            "a pause",
        )
        assert get(address, "/").status == 200
        assert server.refused == 1
        silent.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert silent.recv(1)
