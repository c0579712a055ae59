"""Hardened servers against hostile, broken or stuck peers: other clients notice nothing."""

import asyncio
import contextlib
import itertools
import os
import random
import resource
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpclib.server
import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from h2.config import H2Configuration
from h2.connection import H2Connection
from hyperframe.frame import PingFrame
from patience import PATIENCE_S
from wire.google import message_class, names, watch_health
from wire.raw import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    RawClient,
    frame,
    message,
    request_headers,
)
from wire.serving import Serving, at, connections, device, eventually

from agent.serve import grpc_servers
from agent.serve.agent_api.service import STATUS, WATCH
from agent.serve.grpc import hardened, server
from agent.serve.grpc.hardened import (
    CONTROL_FRAMES_BURST,
    CONTROL_FRAMES_PER_S,
    REQUEST_LIMIT,
    REQUESTS_LIMIT,
    USER_REQUESTS_LIMIT,
    ControlFrameBudget,
    OpenRequestBytes,
    TooManyControlFrames,
    UnsentMessages,
)
from agent.serve.grpc.server import REQUEST_COUNT_LIMIT, HardenedServer
from agent.serve.grpc_servers import AGENT_SOCKET, encode_device_health
from agent.serve.health.service import HealthPublisher, HealthService
from agent.serve.sockets import CONNECTION_LIMIT, PeerCredentials, UnixListener, connection_limit
from agent.system.threads.latest_value import LatestValue

ALTSVC = 0xA
PRIORITY_UPDATE = 0x10
REFUSED_STREAM = 7
CANCEL = 8
ENHANCE_YOUR_CALM = 11
UNKNOWN_FIELD = b"\x7a\x01x"
UNIMPLEMENTED = "12"


@pytest.fixture
def agent_server(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path) as agent_server:
        agent_server.publish(device())
        yield agent_server


def next_device_names(client: RawClient, stream: int = 1) -> list[str]:
    """Return the device names of the stream's next list, which must fit into one frame."""
    _, data = client.next_of(DATA, stream)
    return names(message_class("v1", "NodeWatchResourcesResponse").FromString(data[5:]))


def read_to_the_end(client: RawClient) -> None:
    """Wait until the server has closed the connection."""
    with contextlib.suppress(ConnectionError):
        while client.next_frame() is not None:
            pass


def still_serves(agent_server: Serving) -> bool:
    with watch_health(agent_server.health) as watcher:
        return names(watcher.next()) == ["cpu-node0"]


# --- frames and headers that grpclib does not expect


@pytest.mark.parametrize("kind", [0x42, PRIORITY_UPDATE, 0xFF])
def test_frame_of_unknown_type_is_ignored(agent_server: Serving, kind: int) -> None:
    with RawClient(agent_server.health) as client:
        client.send(frame(kind, 0xFF, 0, b"\0\0\0\1u=1"))
        client.call()
        assert next_device_names(client) == ["cpu-node0"]
        client.send(frame(kind, 0, 1, b"anything"))
        client.call(stream=3)
        assert next_device_names(client, 3) == ["cpu-node0"]


@pytest.mark.parametrize(
    "header",
    [
        (b"x-name", "Zoë".encode()),
        (b"x-bytes", b"\xff\xfe\x80"),
        (b"x-n\xc3\xa4me", b"1"),
        (b"user-agent", b"\xe9"),
        (b"x-key-bin", b"no base64!"),
        (b"x-key-bin", b"\xff"),
        (b"grpc-previous-rpc-attempts", b"\xff"),
    ],
)
def test_unread_headers_may_have_any_value(agent_server: Serving, header: tuple[bytes, bytes]) -> None:
    with RawClient(agent_server.health) as client:
        client.headers(1, [*request_headers(), header])
        client.send(frame(DATA, END_STREAM, 1, message()))
        assert next_device_names(client) == ["cpu-node0"]


@pytest.mark.parametrize("name", [b":method", b":path"])
def test_request_without_a_pseudo_header_is_reset(
    agent_server: Serving, caplog: pytest.LogCaptureFixture, name: bytes
) -> None:
    with RawClient(agent_server.health) as client:
        client.headers(1, [header for header in request_headers() if header[0] != name])
        assert client.next_of(RST_STREAM, 1) == (0, b"\0\0\0\1")  # PROTOCOL_ERROR
        client.call(stream=3)
        assert client.next_headers(3)[":status"] == "200"
    ours = (server.__name__, hardened.__name__, "grpclib", "asyncio")  # not those of earlier tests' threads
    assert [record for record in caplog.records if record.name.startswith(ours)] == []


@pytest.mark.parametrize("authority", [b"localhost", b"%2Frun%2Fa.sock", b"", None])
def test_any_authority_is_accepted(agent_server: Serving, authority: bytes | None) -> None:
    headers = [header for header in request_headers() if header[0] != b":authority"]
    with RawClient(agent_server.health) as client:
        client.headers(1, headers if authority is None else [*headers, (b":authority", authority)])
        client.send(frame(DATA, END_STREAM, 1, message()))
        assert next_device_names(client) == ["cpu-node0"]


@pytest.mark.parametrize(
    "path", ["/v1.DRAResourceHealth/Other", "/v2.DRAResourceHealth/NodeWatchResources", "*"]
)
def test_unknown_method_is_unimplemented(agent_server: Serving, path: str) -> None:
    with RawClient(agent_server.health) as client:
        client.call(path=path)
        trailers = client.next_headers()
        assert (trailers["grpc-status"], trailers["content-type"]) == (UNIMPLEMENTED, "application/grpc")


@pytest.mark.parametrize("missing", [b":method", b":path"])
def test_request_without_method_or_path_is_reset(
    agent_server: Serving, missing: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with RawClient(agent_server.health) as client:
        client.headers(1, [header for header in request_headers() if header[0] != missing])
        client.next_of(RST_STREAM, 1)
        client.call(stream=3)
        assert next_device_names(client, 3) == ["cpu-node0"]


@pytest.mark.parametrize("timeout", [b"soon", b"-1S", b"", b"123456789S", b"9" * 400 + b"H"])
def test_invalid_timeout_is_refused(agent_server: Serving, timeout: bytes) -> None:
    with RawClient(agent_server.health) as client:
        client.headers(1, [*request_headers(), (b"grpc-timeout", timeout)])
        trailers = client.next_headers()
        assert (trailers["grpc-status"], trailers["grpc-message"]) == ("2", "Invalid grpc-timeout header")


def next_status(client: RawClient) -> str:
    """Return the gRPC status of the next request that ends, with or without a message."""
    return client.next_headers().get("grpc-status") or client.next_headers()["grpc-status"]


@pytest.mark.parametrize("timeout", [b"1n", b"0S", b"999u", b"20m"])
def test_deadline_before_the_request_is_handled_is_deadline_exceeded(
    agent_server: Serving, timeout: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode_slowly(headers: object) -> object:
        time.sleep(0.03)
        return decode_metadata(headers)

    decode_metadata = grpclib.server.decode_metadata  # type: ignore[attr-defined]
    monkeypatch.setattr(grpclib.server, "decode_metadata", decode_slowly)
    with RawClient(agent_server.health) as client:
        client.headers(1, [*request_headers(), (b"grpc-timeout", timeout)])
        assert next_status(client) == "4"
    assert [record for record in caplog.records if record.exc_info] == []


def test_deadline_is_kept(agent_server: Serving) -> None:
    with RawClient(agent_server.health) as client:
        began_s = time.monotonic()
        client.headers(1, [*request_headers(), (b"grpc-timeout", b"1S")])
        client.send(frame(DATA, END_STREAM, 1, message()))
        assert next_status(client) == "4"
        assert time.monotonic() - began_s > 0.9, "the deadline has not passed"


def test_earliest_of_several_deadlines_is_kept(agent_server: Serving) -> None:
    with RawClient(agent_server.health) as client:
        timeouts = [(b"grpc-timeout", value) for value in (b"99999999H", b"1m")]
        client.headers(1, [*request_headers(), *timeouts])
        assert next_status(client) == "4"


# --- requests


def test_end_of_stream_without_body_is_the_empty_request(agent_server: Serving) -> None:
    with RawClient(agent_server.health) as client:
        client.headers(1, request_headers(), flags=END_HEADERS | END_STREAM)
        assert next_device_names(client) == ["cpu-node0"]
        client.headers(3, request_headers())
        client.send(frame(DATA, END_STREAM, 3))
        assert next_device_names(client, 3) == ["cpu-node0"]


def test_empty_frame_in_a_request_is_ignored(agent_server: Serving) -> None:
    with RawClient(agent_server.health) as client:
        client.headers(1, request_headers())
        for part in (b"", b"\0\0", b"", b"\0\0\0"):
            client.send(frame(DATA, 0, 1, part))
        assert next_device_names(client) == ["cpu-node0"]


def test_client_that_never_ends_its_side_is_served(agent_server: Serving) -> None:
    with RawClient(agent_server.health) as client:
        client.headers(1, request_headers())
        client.send(frame(DATA, 0, 1, message()))
        assert next_device_names(client) == ["cpu-node0"]


def test_compressed_request_is_unimplemented(agent_server: Serving) -> None:
    with RawClient(agent_server.health) as client:
        client.headers(1, [*request_headers(), (b"grpc-encoding", b"gzip")])
        client.send(frame(DATA, END_STREAM, 1, message(b"\x1f\x8b", compressed=1)))
        trailers = client.next_headers()
        assert trailers["grpc-status"] == UNIMPLEMENTED
        assert "compressed messages are not supported" in trailers["grpc-message"]


def test_uncompressed_request_with_grpc_encoding_is_served(agent_server: Serving) -> None:
    with RawClient(agent_server.health) as client:
        client.headers(1, [*request_headers(), (b"grpc-encoding", b"gzip")])
        client.send(frame(DATA, END_STREAM, 1, message()))
        assert next_device_names(client) == ["cpu-node0"]


def test_request_above_the_limit_is_refused_with_the_numbers(agent_server: Serving) -> None:
    with RawClient(agent_server.health) as client:
        client.headers(1, request_headers())
        client.send(frame(DATA, 0, 1, struct.pack(">BI", 0, 200 << 20)))
        trailers = client.next_headers()
        assert trailers["grpc-status"] == "8"
        assert trailers["grpc-message"] == "message is 209715200 bytes, limit 65536; refused unread"


def test_request_at_the_limit_is_read(agent_server: Serving) -> None:
    unknown_field = b"\x7a" + b"\xfc\xff\x03" + bytes(REQUEST_LIMIT - 4)
    assert len(unknown_field) == REQUEST_LIMIT
    body = message(unknown_field)
    with RawClient(agent_server.health) as client:
        client.headers(1, request_headers())
        for start in range(0, 60_000, 15_000):
            client.send(frame(DATA, 0, 1, body[start : start + 15_000]))
        client.next_of(WINDOW_UPDATE, 1)  # the bytes so far have been read
        client.send(frame(DATA, END_STREAM, 1, body[60_000:]))
        assert next_device_names(client) == ["cpu-node0"]


def test_unfinished_requests_are_limited_in_memory(agent_server: Serving) -> None:
    """Each of a hundred streams of 128 connections may have begun a request; lists are still served."""
    header = struct.pack(">BI", 0, REQUEST_LIMIT)
    maximum = USER_REQUESTS_LIMIT // REQUEST_LIMIT
    with RawClient(agent_server.health) as client:
        streams = range(1, 2 * maximum + 3, 2)
        for stream in streams:
            client.headers(stream, request_headers())
            client.send(frame(DATA, 0, stream, header))
        trailers = client.next_headers(streams[-1])
        assert trailers["grpc-status"] == "8"
        assert trailers["grpc-message"] == (
            f"message is 65536 bytes, and other requests of uid {os.geteuid()} hold 3145728 bytes, limit "
            "3145728 for a user; refused unread; retry later"
        )
        assert still_serves(agent_server)
        client.send(frame(RST_STREAM, 0, 1, struct.pack(">I", CANCEL)))
        client.call(streams[-1] + 2)
        assert next_device_names(client, streams[-1] + 2) == ["cpu-node0"]
        client.headers(streams[-1] + 4, request_headers())
        client.send(frame(DATA, END_STREAM, streams[-1] + 4, message(UNKNOWN_FIELD)))
        assert next_device_names(client, streams[-1] + 4) == ["cpu-node0"]


def test_requests_on_all_sockets_are_limited_in_memory(agent_server: Serving) -> None:
    first, other = (server.memory for _, _, server in agent_server.servers._served)
    full = [OpenRequestBytes(first._sockets) for _ in range(4)]
    for memory in full:
        assert memory.reserve(1, USER_REQUESTS_LIMIT) == ""
        assert memory.reserve(2, REQUESTS_LIMIT - USER_REQUESTS_LIMIT) == ""
    assert other.reserve(1, 1) == "requests on all sockets hold 16777216 bytes, limit 16777216 together"
    assert other.reserve(1, 0) == ""
    full[0].release(2, 1)
    assert first.reserve(1, 1) == ""


def test_requests_of_all_users_are_limited_in_memory() -> None:
    memory = OpenRequestBytes()
    assert memory.reserve(1, USER_REQUESTS_LIMIT) == ""
    assert "other requests of uid 1 hold 3145728 bytes" in memory.reserve(1, 1)
    assert memory.reserve(2, REQUESTS_LIMIT - USER_REQUESTS_LIMIT) == "", "the rest is for other users"
    assert memory.reserve(3, 1) == "other requests hold 4194304 bytes, limit 4194304 together"
    memory.release(1, USER_REQUESTS_LIMIT)
    assert memory.reserve(3, 1) == ""


def test_request_whose_message_does_not_arrive_is_ended(agent_server: Serving, monkeypatch) -> None:
    with RawClient(agent_server.health) as client:
        client.call(1)
        assert next_device_names(client) == ["cpu-node0"]
        monkeypatch.setattr(hardened, "RECEIVE_S", 0.05)
        for stream, part in ((3, b""), (5, b"\0\0"), (7, b"\0\0\0\0\5ab")):
            client.headers(stream, request_headers())
            client.send(frame(DATA, 0, stream, part) if part else b"")
            trailers = client.next_headers(stream)
            assert trailers["grpc-status"] == "4"
            assert trailers["grpc-message"] == (
                "the message of the request has not arrived within 0.05 s; send it at once"
            )
        agent_server.publish(device(verified=2))
        assert next_device_names(client) == ["cpu-node0"], "a request with its message stays"


def test_peer_that_exceeds_the_window_is_disconnected(agent_server: Serving) -> None:
    """The whole connection's window is 64 KiB - 1; exceeding it ends the connection."""
    with RawClient(agent_server.health) as client:
        first = client.next_frame()
        assert first is not None
        settings = dict(struct.iter_unpack(">HI", first[3]))
        assert settings.get(INITIAL_WINDOW_SIZE, 65_535) == 65_535
        client.headers(1, request_headers())
        client.send(frame(DATA, 0, 1, message()))  # the handler reads only this
        assert next_device_names(client) == ["cpu-node0"]
        client.send(frame(DATA, 0, 1, bytes(16_000)) * 5)
        read_to_the_end(client)
    assert still_serves(agent_server)


@pytest.mark.parametrize("part", [b"\0", b"\0\0\0\0", b"\0\0\0\0\5ab", b"\0\0\0\0\5"])
def test_truncated_request_is_an_error(agent_server: Serving, part: bytes) -> None:
    with RawClient(agent_server.health) as client:
        client.headers(1, request_headers())
        client.send(frame(DATA, END_STREAM, 1, part))
        trailers = client.next_headers()
        assert trailers["grpc-status"] == "13"
        assert trailers["grpc-message"] == "the gRPC stream ended in the middle of a message"


def test_request_that_is_not_protobuf_is_an_error(agent_server: Serving) -> None:
    with RawClient(agent_server.health) as client:
        client.headers(1, request_headers())
        client.send(frame(DATA, END_STREAM, 1, message(b"\xff")))
        trailers = client.next_headers()
        assert trailers["grpc-status"] == "13"
        assert trailers["grpc-message"].startswith("the request: message ends inside a varint")


# --- connections


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\0" * 64,
        PREFACE + frame(DATA, 0, 1, b"x"),
        PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff"),
        PREFACE + frame(SETTINGS, 0, 0, b"odd"),
        PREFACE + frame(SETTINGS, 0, 0) + b"\xff\xff\xff\0\0\0\0\0\1",
        PREFACE + frame(SETTINGS, 0, 0) + frame(WINDOW_UPDATE, 0, 0, bytes(4)),
        PREFACE + frame(SETTINGS, 0, 0) + frame(GOAWAY, 0, 0, bytes(8)),
    ],
    ids=["http1", "zeros", "idle-stream", "bad-hpack", "bad-settings", "huge-frame", "zero-window", "goaway"],
)
def test_garbage_ends_only_its_own_connection(agent_server: Serving, garbage: bytes) -> None:
    with RawClient(agent_server.health) as bystander:
        bystander.call()
        assert next_device_names(bystander) == ["cpu-node0"]
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(str(agent_server.health))
            sock.sendall(garbage)
            while sock.recv(65_536):
                pass
        agent_server.publish(device(verified=2))
        assert next_device_names(bystander) == ["cpu-node0"]


def test_h2_buffers_received_bytes_where_hardened_reads_them() -> None:
    """Overlong frames are refused by this private buffer of h2."""
    connection = H2Connection(H2Configuration(client_side=False))
    connection.initiate_connection()
    connection.receive_data(PREFACE + b"\xff\xff\xff\0")
    assert connection.incoming_buffer._data == b"\xff\xff\xff\0"


def test_leaked_connections_give_way_to_new_ones_idle_first(
    agent_server: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as stack:
        leaked = []
        for _ in range(CONNECTION_LIMIT):
            leaked.append(stack.enter_context(RawClient(agent_server.health)))
            leaked[-1].next_frame()  # accepted; the queue holds fewer than the limit
        leaked[0].call()
        assert next_device_names(leaked[0]) == ["cpu-node0"]
        eventually(lambda: connections(agent_server.health) == CONNECTION_LIMIT, "all are listed")
        assert still_serves(agent_server)
        read_to_the_end(leaked[1])
        (logged,) = [record.getMessage() for record in caplog.records if record.name == server.__name__]
        assert logged.startswith(
            f"{agent_server.health}: limit of {CONNECTION_LIMIT} connections reached: closed 1 connections, "
        )
        agent_server.publish(device(verified=2))
        assert next_device_names(leaked[0]) == ["cpu-node0"], "a connection with a stream stays"


def test_connections_with_streams_stay_and_new_ones_are_refused(agent_server: Serving) -> None:
    with contextlib.ExitStack() as stack:
        busy = []
        for _ in range(CONNECTION_LIMIT):
            busy.append(stack.enter_context(RawClient(agent_server.health)))
            busy[-1].call()
            assert next_device_names(busy[-1]) == [
                "cpu-node0"
            ]  # accepted; the queue holds fewer than the limit
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(PATIENCE_S)
                sock.connect(str(agent_server.health))
                with contextlib.suppress(ConnectionResetError):
                    while sock.recv(65_536):
                        pass
        eventually(
            lambda: connections(agent_server.health) == CONNECTION_LIMIT, "refused connections are closed"
        )
        agent_server.publish(device(verified=2))
        assert [next_device_names(client) for client in busy] == [["cpu-node0"]] * CONNECTION_LIMIT
        busy[0].sock.close()
        eventually(
            lambda: connections(agent_server.health) == CONNECTION_LIMIT - 1, "one connection has ended"
        )
        assert still_serves(agent_server)


def test_user_with_most_connections_gives_way_to_another(agent_server: Serving, monkeypatch) -> None:
    users = itertools.chain([1] * CONNECTION_LIMIT, itertools.repeat(2))
    monkeypatch.setattr(server, "peer_credentials", lambda _: PeerCredentials(1, next(users)))
    with contextlib.ExitStack() as stack:
        busy = []
        for _ in range(CONNECTION_LIMIT):
            busy.append(stack.enter_context(RawClient(agent_server.health)))
            busy[-1].call()
            assert next_device_names(busy[-1]) == [
                "cpu-node0"
            ]  # accepted; the queue holds fewer than the limit
        assert still_serves(agent_server)
        read_to_the_end(busy[-1])


def test_connection_whose_requests_have_ended_is_idle(agent_server: Serving) -> None:
    with contextlib.ExitStack() as stack:
        called = []
        for _ in range(CONNECTION_LIMIT):
            called.append(stack.enter_context(RawClient(agent_server.agent)))
            called[-1].call(path=STATUS)
            while "grpc-status" not in called[-1].next_headers():
                pass
        with RawClient(agent_server.agent) as client:
            client.call(path=STATUS)
            assert client.next_headers()[":status"] == "200"
        read_to_the_end(called[0])


def client_with_stream(path: Path) -> RawClient:
    """Return a client with an open stream, connected again if the server's limit was too short for it."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, EOFError):
            client = stack.enter_context(RawClient(path))
            client.call()
            assert next_device_names(client) == ["cpu-node0"]
            stack.pop_all()
            return client


def test_idle_connection_is_closed_after_its_time(agent_server: Serving, monkeypatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_S", 5.0)
    monkeypatch.setattr(server, "IDLE_S", 0.05)
    with RawClient(agent_server.health) as idle, client_with_stream(agent_server.health) as client:
        _, payload = idle.next_of(GOAWAY, 0)
        assert struct.unpack(">II", payload) == (0, 0)
        read_to_the_end(idle)
        agent_server.publish(device(verified=2))
        assert next_device_names(client) == ["cpu-node0"], "a connection with a request stays"
        client.send(frame(RST_STREAM, 0, 1, struct.pack(">I", CANCEL)))
        client.next_of(GOAWAY, 0)


def test_client_without_handshake_is_disconnected(agent_server: Serving, monkeypatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_S", 1.0)
    with client_with_stream(agent_server.health) as client, socket.socket(socket.AF_UNIX) as silent:
        silent.settimeout(PATIENCE_S)
        silent.connect(str(agent_server.health))
        with contextlib.suppress(ConnectionResetError):
            while silent.recv(65_536):
                pass
        agent_server.publish(device(verified=2))
        assert next_device_names(client) == ["cpu-node0"]


def test_silent_clients_are_logged_once_a_minute(agent_server: Serving, monkeypatch, caplog) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_S", 1.0)
    with caplog.at_level("INFO"), contextlib.ExitStack() as clients:
        silent = [clients.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
        for client in silent:
            client.settimeout(PATIENCE_S)
            client.connect(str(agent_server.health))
        for client in silent:
            with contextlib.suppress(ConnectionResetError):
                while client.recv(65_536):
                    pass
    assert caplog.text.count("no HTTP/2 preface") == 1


@pytest.mark.parametrize(
    ("descriptors", "sockets", "limit"),
    [(1024, 2, 128), (1024, 9, 56), (64, 2, 16), (16, 40, 4), (resource.RLIM_INFINITY, 2, 128)],
)
def test_connection_limit_leaves_half_of_the_descriptors(monkeypatch, descriptors, sockets, limit) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert connection_limit(sockets) == limit


# --- messages that wait for clients -------------------------------------------------------------------------


class _WriteBuffer:
    """Write buffer of a connection."""

    def __init__(self, size: int) -> None:
        self._size = size

    def get_write_buffer_size(self) -> int:
        return self._size


class _WaitingStream:
    """Stream that waits for its client, as far as UnsentMessages uses it."""

    def __init__(self, buffered: int = 0, uid: int = 0) -> None:
        self.error: GRPCError | None = None
        self.uid = uid
        self.write_buffer = _WriteBuffer(buffered)

    def end_unread(self, error: GRPCError) -> None:
        self.error = error


def test_unsent_messages_above_the_limit_end_the_longest_wait() -> None:
    asyncio.run(_fill_with_messages())


async def _fill_with_messages() -> None:
    unsent = UnsentMessages(100)
    first, second, third, fourth = (_WaitingStream() for _ in range(4))
    shared = bytes(40)
    unsent.add(first, shared)
    unsent.add(second, shared)
    unsent.add(third, bytes(60))
    assert [stream.error for stream in (first, second, third)] == [None] * 3, "equal objects count once"
    unsent.add(fourth, bytes(30))
    assert first.error is not None
    assert first.error.status is Status.RESOURCE_EXHAUSTED
    assert "take 130 bytes, limit 100" in str(first.error.message)
    assert second.error is not None, "the message was still held"
    assert (third.error, fourth.error) == (None, None)


def test_unsent_messages_count_write_buffers_and_end_of_waits() -> None:
    asyncio.run(_fill_write_buffers())


async def _fill_write_buffers() -> None:
    unsent = UnsentMessages(100)
    first, second, third = _WaitingStream(), _WaitingStream(50), _WaitingStream()
    unsent.add(first, bytes(60))
    unsent.discard(first)
    unsent.add(second, bytes(30))
    assert (first.error, second.error) == (None, None)
    unsent.add(third, bytes(30))
    assert second.error is not None
    assert third.error is None, "a single message is never refused"


def test_reader_of_the_user_with_most_unsent_bytes_is_ended_first() -> None:
    asyncio.run(_fill_with_messages_of_two_users())


async def _fill_with_messages_of_two_users() -> None:
    unsent = UnsentMessages(100)
    patient, *greedy = (_WaitingStream(uid=uid) for uid in (1, 2, 2, 2))
    unsent.add(patient, bytes(20))
    for stream in greedy:
        unsent.add(stream, bytes(35))
    assert [stream.error is None for stream in (patient, *greedy)] == [True, False, True, True]


def test_stalled_readers_of_different_reports_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stream of a client that reads nothing holds another report of a megabyte."""
    monkeypatch.setattr(grpc_servers, "UnsentMessages", partial(UnsentMessages, 4 << 20))
    many = [device(f"cpu-node{number}", message="x" * 500) for number in range(2000)]
    with Serving(tmp_path) as agent_server:
        with RawClient(agent_server.agent) as client:
            begun, trailers = set[int](), dict[int, dict[str, str]]()

            def read_headers() -> None:
                received = client.next_frame()
                assert received is not None
                if received[0] == HEADERS:
                    headers = dict(client.decode_headers(received[3]))
                    begun.add(received[2])
                    if "grpc-status" in headers:
                        trailers[received[2]] = headers

            for number in range(12):
                agent_server.publish(*(health._replace(verified=at(number + 2)) for health in many))
                client.call(2 * number + 1, path=WATCH)
                while 2 * number + 1 not in begun:
                    read_headers()
            while 1 not in trailers:
                read_headers()
            assert trailers[1]["grpc-status"] == "8"
            assert "limit 4194304; connect again" in trailers[1]["grpc-message"]
        agent_server.publish(device(verified=99))
        assert still_serves(agent_server)


def status_of(client: RawClient, stream: int) -> tuple[str, str]:
    """Return status and text of a stream whose client reads no message."""
    headers = client.next_headers(stream)
    while "grpc-status" not in headers:
        headers = client.next_headers(stream)
    return headers["grpc-status"], headers["grpc-message"]


def test_stalled_reader_of_several_lists_holds_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The health of 2,000 devices is four lists of a megabyte, of which the first one waits."""
    monkeypatch.setattr(grpc_servers, "UnsentMessages", partial(UnsentMessages, 6 << 20))
    many = [device(f"cpu-node{number}", message="x" * 2000) for number in range(2000)]
    with Serving(tmp_path) as agent_server, RawClient(agent_server.health, window=0) as client:
        for number in range(2):
            agent_server.publish(*(health._replace(verified=at(number + 2)) for health in many))
            client.call(2 * number + 1)
            if not number:
                client.next_headers(1)
                with RawClient(agent_server.health) as reader:  # the stream before has got its lists, too
                    reader.call()
                    reader.next_of(DATA, 1)
        assert status_of(client, 1)[0] == "8"


def test_request_that_is_reset_at_once_releases_its_window(agent_server: Serving) -> None:
    """Four such requests would fill the connection's window."""
    with RawClient(agent_server.health) as client:
        for stream in range(1, 81, 2):
            header = client.encode_headers(stream, request_headers()) + frame(DATA, 0, stream, bytes(16_000))
            client.send(header + frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL)))
            if stream % 6 == 5:  # half of the window is released at once
                client.next_of(WINDOW_UPDATE, 0)
        client.call(81)
        assert next_device_names(client, 81) == ["cpu-node0"]


def test_leaked_requests_are_limited(agent_server: Serving, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(RawClient(agent_server.health)) for _ in range(REQUEST_COUNT_LIMIT // 64)
        ]
        for client in clients:
            for stream in range(1, 128, 2):
                client.call(stream)
                assert next_device_names(client, stream) == ["cpu-node0"]
        more = itertools.count(129, 2)
        assert not any(is_served(clients[0], next(more)) for _ in range(20))
        (logged,) = [record.getMessage() for record in caplog.records if record.name == server.__name__]
        assert logged.startswith(
            f"{agent_server.health}: limit of {REQUEST_COUNT_LIMIT} requests reached; refused or ended 1 "
        )
        agent_server.publish(device(verified=2))
        assert next_device_names(clients[-1], 127) == ["cpu-node0"]
        clients[0].send(frame(RST_STREAM, 0, 1, struct.pack(">I", CANCEL)))
        eventually(lambda: is_served(clients[0], next(more)), "one request is accepted")
        reset_stream = next(more)
        header = clients[0].encode_headers(reset_stream, request_headers()) + frame(
            DATA, END_STREAM, reset_stream, message()
        )
        clients[0].send(
            header + frame(RST_STREAM, 0, reset_stream, struct.pack(">I", CANCEL))
        )  # before the server refuses it
        assert not is_served(clients[0], next(more))
    with RawClient(agent_server.health) as client:
        streams = itertools.count(1, 2)
        for _ in range(64):
            eventually(lambda: is_served(client, next(streams)), "the other clients have ended")


def test_user_with_most_requests_gives_way_to_another(agent_server: Serving, monkeypatch) -> None:
    users = itertools.chain([1] * (REQUEST_COUNT_LIMIT // 64), itertools.repeat(2))
    monkeypatch.setattr(server, "peer_credentials", lambda _: PeerCredentials(1, next(users)))
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(RawClient(agent_server.health)) for _ in range(REQUEST_COUNT_LIMIT // 64)
        ]
        for client in clients:
            for stream in range(1, 128, 2):
                client.call(stream)
                assert next_device_names(client, stream) == ["cpu-node0"]
        assert not is_served(clients[0], 129)
        assert still_serves(agent_server)
        ended = clients[0].next_headers(127)
        assert ended["grpc-status"] == "8"
        assert ended["grpc-message"].startswith(f"limit of {REQUEST_COUNT_LIMIT} requests reached, and uid 1")


def is_served(client: RawClient, stream: int) -> bool:
    """Return whether the server answers a request, and does not refuse it as one too many."""
    client.call(stream)
    while (received := client.next_frame()) is not None:
        if received[2] == stream and received[0] == RST_STREAM:
            assert struct.unpack(">I", received[3]) == (ENHANCE_YOUR_CALM,)
        if received[2] == stream:
            return received[0] != RST_STREAM
    raise EOFError("the connection ended")


def test_random_frames_end_only_their_own_connection(agent_server: Serving) -> None:
    rng = random.Random(4680)
    with RawClient(agent_server.health) as bystander:
        bystander.call()
        next_device_names(bystander)
        for _ in range(60):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(agent_server.health))
                sock.sendall(PREFACE + frame(SETTINGS, 0, 0))
                for _ in range(5):
                    payload = rng.randbytes(rng.randrange(40))
                    try:
                        sock.sendall(frame(rng.randrange(12), rng.randrange(256), rng.randrange(4), payload))
                    except OSError:  # already disconnected
                        break
        agent_server.publish(device(verified=2))
        assert next_device_names(bystander) == ["cpu-node0"]


def test_list_above_the_window_continues_when_there_is_room(agent_server: Serving) -> None:
    """The server sends exactly what the window allows, and the rest when the client has made room."""
    with RawClient(agent_server.health, window=300) as client:
        client.call()
        _, first = client.next_of(DATA, 1)
        agent_server.publish(device(verified=2, message="x" * 900))
        _, data = client.next_of(DATA, 1)
        assert len(data) == 300 - len(first)
        client.send(frame(PING, 0, 0, bytes(8)))
        received = client.next_frame()
        assert received is not None
        assert received[0] == PING, "no data come before the answer"
        client.send(frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 1 << 16)))
        while len(data) < 5 + int.from_bytes(data[1:5], "big"):
            data += client.next_of(DATA, 1)[1]
        assert message_class("v1", "NodeWatchResourcesResponse").FromString(data[5:]).devices[0].message
        agent_server.publish(device(verified=3))
        assert next_device_names(client) == ["cpu-node0"]


def test_reset_stream_does_not_end_other_streams(agent_server: Serving) -> None:
    with RawClient(agent_server.health) as client:
        for stream in (1, 3):
            client.call(stream)
            assert next_device_names(client, stream) == ["cpu-node0"]
        client.send(frame(RST_STREAM, 0, 1, struct.pack(">I", CANCEL)))
        client.send(frame(PING, 0, 0, bytes(8)))
        client.next_of(PING, 0)  # the reset has been read
        for second in range(2, 5):
            agent_server.publish(device(verified=second))
            while (received := client.next_frame()) is not None and received[0] != DATA:
                pass
            assert received is not None
            assert received[2] == 3


def stuck_client(path: Path) -> RawClient:
    """Return a client with large windows that reads nothing, so that its server's write buffer stays full."""
    client = RawClient(path, window=(1 << 31) - 1)
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", (1 << 31) - 1 - 65_535)))
    client.call()
    client.next_of(HEADERS, 1)
    return client


def many_devices(verified: int) -> list:
    return [device(f"gpu-{n}", verified=verified, message="x" * 900) for n in range(400)]


def test_stuck_peer_does_not_keep_its_connection_open(agent_server: Serving) -> None:
    with stuck_client(agent_server.health) as client:
        for second in range(4):
            agent_server.publish(*many_devices(second))
        eventually(lambda: connections(agent_server.health) == 1, "the connection is listed")
        client.send(frame(GOAWAY, 0, 0, bytes(8)))
        eventually(lambda: connections(agent_server.health) == 0, "the server's end is closed")


def test_stuck_peer_that_sends_no_more_is_disconnected(agent_server: Serving) -> None:
    """asyncio closes such a connection only after its write buffer is sent."""
    (driver,) = (entry for name, _, entry in agent_server.servers._served if name != AGENT_SOCKET)
    seconds = itertools.count(2)
    with stuck_client(agent_server.health) as client:
        (only,) = driver.connections

        def is_stuck() -> bool:
            agent_server.publish(*many_devices(next(seconds)))
            return only.transport.get_write_buffer_size() > 0

        eventually(is_stuck, "data wait in the server's write buffer")
        client.sock.shutdown(socket.SHUT_WR)
        eventually(lambda: connections(agent_server.health) == 0, "the server's end is closed")


def test_peer_that_pings_without_reading_is_disconnected(agent_server: Serving) -> None:
    def flood(client: RawClient) -> None:
        while True:
            client.send(frame(PING, 0, 0, bytes(8)) * 4096)

    with RawClient(agent_server.health) as client, pytest.raises(ConnectionError):
        flood(client)


def goaway_of(client: RawClient, flood: bytes) -> int:
    """Send until the server ends the connection, and read at the same time; return the code of its GOAWAY."""

    def send() -> None:
        with contextlib.suppress(OSError):
            while True:
                client.send(flood)

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    _, payload = client.next_of(GOAWAY, 0)
    client.sock.close()
    sending.join(PATIENCE_S)
    return int(struct.unpack(">II", payload)[1])


@pytest.mark.parametrize("kind", ["ping", "settings", "window", "reset", "empty", "unknown", "altsvc"])
def test_flood_of_control_frames_ends_with_enhance_your_calm(
    agent_server: Serving, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    floods = {
        "ping": frame(PING, 0, 0, bytes(8)) * 64,
        "settings": frame(SETTINGS, 0, 0) * 64,
        "window": frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)) * 64,
        "reset": frame(RST_STREAM, 0, 1, struct.pack(">I", CANCEL)) * 64,
        "empty": frame(DATA, 0, 3) * 64,
        "unknown": frame(0x42, 0, 0) * 64,
        "altsvc": frame(ALTSVC, 0, 0, b"\0\1ab") * 64,
    }
    with watch_health(agent_server.health) as other, RawClient(agent_server.health) as client:
        assert names(other.next()) == ["cpu-node0"]
        client.call()
        next_device_names(client)
        client.headers(3, request_headers())
        assert goaway_of(client, floods[kind]) == ENHANCE_YOUR_CALM
        agent_server.publish(device(verified=9))
        assert names(other.next()) == ["cpu-node0"]
    assert caplog.text.count("control frames (PING, RST_STREAM and others) and refused requests exceed") == 1


def test_refused_requests_end_with_enhance_your_calm(agent_server: Serving) -> None:
    """A client may also make the server reset streams without end."""
    incomplete = [header for header in request_headers() if header[0] != b":path"]
    with RawClient(agent_server.health) as client:
        streams = itertools.count(1, 2)
        while True:
            with contextlib.suppress(BrokenPipeError):  # the server has closed the connection
                client.send(b"".join(client.encode_headers(next(streams), incomplete) for _ in range(64)))
            kinds = Counter[int]()
            while kinds[RST_STREAM] < 64 and not kinds[GOAWAY]:
                received = client.next_frame()
                assert received is not None
                kinds[received[0]] += 1
            if kinds[GOAWAY]:
                break
        assert struct.unpack(">II", received[3])[1] == ENHANCE_YOUR_CALM
    assert still_serves(agent_server)


def test_requests_that_are_reset_at_once_end_with_enhance_your_calm(agent_server: Serving) -> None:
    """A client may open and reset any number of streams without ever having many open."""
    with RawClient(agent_server.health) as client:
        client.next_frame()  # SETTINGS: its acknowledgement must not be sent in the middle of the flood
        cancel = struct.pack(">I", CANCEL)
        flood = b"".join(
            client.encode_headers(stream, request_headers()) + frame(RST_STREAM, 0, stream, cancel)
            for stream in range(1, 8001, 2)
        )
        assert goaway_of(client, flood) == ENHANCE_YOUR_CALM


def test_control_frames_at_the_allowed_rate_are_handled() -> None:
    now_s, exceeded = 0.0, list[bool]()
    budget = ControlFrameBudget(lambda: exceeded.append(True), lambda: now_s)
    for _ in range(20_000):
        assert budget.charge_frame(lambda frame: frame, 1.0, PingFrame(0)) is not None
        now_s += 1 / CONTROL_FRAMES_PER_S
    assert not exceeded
    with pytest.raises(TooManyControlFrames):
        budget.charge_frame(lambda frame: frame, 2.0 * CONTROL_FRAMES_BURST, PingFrame(0))
    assert exceeded == [True]


def test_stuck_peers_do_not_delay_shutdown(tmp_path: Path) -> None:
    with Serving(tmp_path) as agent_server:
        agent_server.publish(*many_devices(0))
        with (
            stuck_client(agent_server.health),
            stuck_client(agent_server.health),
            watch_health(agent_server.health) as healthy,
        ):
            for second in range(1, 4):
                agent_server.publish(*many_devices(second))
            healthy.next()
            assert agent_server.thread.stop(PATIENCE_S)
    assert not agent_server.health.exists()


def test_idle_connection_gets_goaway_at_shutdown(tmp_path: Path) -> None:
    """From Python 3.12 on, the loop's own server would wait for such connections."""
    with Serving(tmp_path) as agent_server, RawClient(agent_server.health) as idle:
        while (received := idle.next_frame()) is not None and received[:2] != (SETTINGS, ACK):
            pass  # the server has accepted the connection
        assert agent_server.thread.stop(PATIENCE_S)
        idle.next_of(GOAWAY, 0)
        assert idle.next_frame() is None


def test_streams_end_before_goaway_at_shutdown(tmp_path: Path) -> None:
    with Serving(tmp_path) as agent_server, RawClient(agent_server.health) as client:
        client.call()
        client.next_headers()
        assert agent_server.thread.stop(PATIENCE_S)
        trailers = client.next_headers()
        assert (trailers["grpc-status"], trailers["grpc-message"]) == ("14", "agent shutting down")
        client.next_of(GOAWAY, 0)


def test_client_can_write_until_it_closes_at_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose write fails may drop the status of its streams unread, as grpcio does."""
    monkeypatch.setattr(server, "GRACE_S", PATIENCE_S)
    with Serving(tmp_path) as agent_server, RawClient(agent_server.health) as client:
        client.call()
        client.next_headers()
        stop = threading.Thread(target=agent_server.thread.stop, args=(PATIENCE_S,))
        stop.start()
        client.next_of(GOAWAY, 0)
        for _ in range(2000):
            client.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)))
        client.sock.close()
        stop.join(PATIENCE_S)
        assert not stop.is_alive()


def test_request_during_shutdown_is_refused_as_safe_to_retry(tmp_path: Path) -> None:
    async def main() -> bytes:
        listener = UnixListener(tmp_path / "a.sock")
        server = HardenedServer(
            [HealthService(HealthPublisher(LatestValue(), encode_device_health, ["a"]).subscribers_of("a"))]
        )
        await server.listen(listener.sock)
        client = await asyncio.to_thread(RawClient, tmp_path / "a.sock")
        await asyncio.to_thread(client.next_frame)
        for connection in server.connections:
            connection.requests.refuse(GRPCError(Status.UNAVAILABLE, "over"))
        client.call()
        _, payload = await asyncio.to_thread(client.next_of, RST_STREAM, 1)
        client.sock.close()
        await server.stop("over")
        await server.stop("over")
        listener.close()
        return payload

    assert asyncio.run(main()) == struct.pack(">I", REFUSED_STREAM)


def test_servers_run_in_any_loop_and_end_with_their_task(tmp_path: Path) -> None:
    agent_server = Serving(tmp_path)

    async def main() -> None:
        ready = asyncio.Event()
        task = asyncio.create_task(agent_server.servers.run(ready.set))
        await ready.wait()
        agent_server.publish(device())
        with watch_health(agent_server.health) as watcher:
            assert names(await asyncio.to_thread(watcher.next)) == ["cpu-node0"]
            task.cancel()
            await asyncio.wait([task], timeout=PATIENCE_S)
            assert task.cancelled()

    asyncio.run(main())
    assert not agent_server.health.exists()
