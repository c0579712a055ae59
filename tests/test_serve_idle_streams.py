"""Health streams that the event loop lends to the thread that publishes: whole frames in order, within the
windows, also when a socket takes only a part and when the peer sends something meanwhile.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S
from wire.google import message_class, names, watch_health
from wire.raw import ACK, DATA, GOAWAY, PING, RST_STREAM, WINDOW_UPDATE, RawClient, frame
from wire.serving import DRIVER, Serving, at, connections, device, eventually

from agent.model.health import DeviceHealth
from agent.native.idle_streams import MESSAGE_LIMIT, IdleStreamRow, IdleStreamTable, SentToStream
from agent.serve.grpc import hardened
from agent.serve.grpc.hardened import message_frames
from agent.serve.grpc.idle_streams import IdleStreams
from agent.serve.grpc_servers import encode_device_health
from agent.serve.health.service import HealthService

FRAME_SIZE = 16_384
HUGE_WINDOW = (1 << 31) - 1


# --- the table ---------------------------------------------------------------------------------------------


class Pipe:
    """Two connected sockets: the table sends to one, the test reads the other."""

    def __init__(self, size: int = 1 << 20) -> None:
        self.server, self.client = socket.socketpair()
        self.server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        self.client.setblocking(False)

    def read(self) -> bytes:
        """Return all bytes that have arrived."""
        data = bytearray()
        while True:
            try:
                data += self.client.recv(1 << 20)
            except BlockingIOError:
                return bytes(data)

    def close(self) -> None:
        self.server.close()
        self.client.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def add(
    table: IdleStreamTable, pipe: Pipe, *, room: int = HUGE_WINDOW, group: int = 0, number: int = 1
) -> IdleStreamRow:
    """Add stream 7 of a connection to a table."""
    return table.add(
        descriptor=pipe.server.fileno(), stream_id=7, frame_size=FRAME_SIZE, room=room, group=group,
        number=number,
    )  # fmt: skip


@pytest.mark.parametrize("size", [1, 255, 16_378, 16_379, 16_380, 2 * FRAME_SIZE - 5, 100_000, MESSAGE_LIMIT])
def test_sent_bytes_equal_the_frames_of_the_event_loop(pipe: Pipe, size: int) -> None:
    message = bytes(n % 251 for n in range(size))
    table = IdleStreamTable()
    row = add(table, pipe)
    assert table.send(message, group=0, since=1, number=2) == 1
    assert pipe.read() == message_frames(message, 7, FRAME_SIZE)
    assert table.remove(row) == SentToStream(2, size + 5, 1, b"", 0)


def test_publication_without_message_counts_and_sends_nothing(pipe: Pipe) -> None:
    table = IdleStreamTable()
    row = add(table, pipe, room=0)
    assert table.send(b"", group=0, since=1, number=2) == 1
    assert pipe.read() == b""
    assert table.remove(row) == SentToStream(2, 0, 0, b"", 0)


@pytest.mark.parametrize("changes", [{"room": 8}, {"group": 2}, {"number": 0}, {"number": 2}])
def test_stream_that_must_not_get_a_message_stays_as_it_was(pipe: Pipe, changes: dict[str, int]) -> None:
    table = IdleStreamTable()
    row = add(table, pipe, **changes)
    assert table.send(b"list", group=0, since=1, number=2) == 0
    assert pipe.read() == b""
    assert table.remove(row).size == 0


def test_room_of_windows_is_used_up_to_the_last_byte(pipe: Pipe) -> None:
    table = IdleStreamTable()
    row = add(table, pipe, room=18)
    assert [table.send(b"list", group=0, since=n, number=n + 1) for n in (1, 2, 3)] == [1, 1, 0]
    assert pipe.read() == 2 * message_frames(b"list", 7, FRAME_SIZE)
    assert table.remove(row) == SentToStream(3, 18, 2, b"", 0)


def test_message_above_the_limit_is_not_sent(pipe: Pipe) -> None:
    table = IdleStreamTable()
    add(table, pipe)
    assert table.send(bytes(MESSAGE_LIMIT + 1), group=0, since=1, number=2) == 0
    assert pipe.read() == b""
    assert table.count_behind(2) == 1


def test_part_that_a_socket_takes_is_reported_with_its_rest() -> None:
    pipe = Pipe(size=20_000)
    table, message = IdleStreamTable(), bytes(200_000)
    row = add(table, pipe)
    assert table.send(message, group=0, since=1, number=2) == 1
    assert table.is_behind(row, 2)
    assert table.count_behind(2) == 1
    assert table.send(b"next", group=0, since=2, number=3) == 0, "a frame is not complete"
    sent = table.remove(row)
    frames = message_frames(message, 7, FRAME_SIZE)
    assert 0 < sent.unsent < len(frames)
    assert sent.cut_message is message
    assert pipe.read() == frames[: -sent.unsent]
    assert (sent.number, sent.size, sent.lists) == (2, len(message) + 5, 1)
    pipe.close()


def test_socket_that_takes_nothing_leaves_the_stream_as_it_was() -> None:
    pipe = Pipe(size=5_000)
    pipe.server.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            pipe.server.send(bytes(1000))
    table = IdleStreamTable()
    row = add(table, pipe)
    assert table.send(b"list", group=0, since=1, number=2) == 0
    assert table.remove(row) == SentToStream(1, 0, 0, b"", 0)
    pipe.close()


def test_closed_peer_leaves_the_stream_as_it_was_and_no_signal(pipe: Pipe) -> None:
    table = IdleStreamTable()
    add(table, pipe)
    pipe.client.close()
    assert table.send(b"list", group=0, since=1, number=2) == 0


def test_removed_streams_leave_the_others_in_the_table() -> None:
    pipes = [Pipe() for _ in range(20)]
    table = IdleStreamTable()
    rows = [add(table, pipe, group=n % 2) for n, pipe in enumerate(pipes)]
    for n in (0, 19, 7):
        table.remove(rows[n])
    assert len(table) == 17
    assert table.send(b"even", group=0, since=1, number=2) == 9
    assert table.send(b"odd", group=1, since=1, number=2) == 8
    removed = {0, 7, 19}
    for n, pipe in enumerate(pipes):
        message = b"odd" if n % 2 else b"even"
        assert pipe.read() == (b"" if n in removed else message_frames(message, 7, FRAME_SIZE))
        pipe.close()
    for n, row in enumerate(rows):
        if n not in removed:
            assert table.remove(row).number == 2
    assert not table.has_group(0)
    assert not table.has_group(1)


# --- the server --------------------------------------------------------------------------------------------


@pytest.fixture
def agent_server(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path) as agent_server:
        agent_server.publish(device("first"))
        yield agent_server


def lent_streams(agent_server: Serving) -> IdleStreams:
    """Return the lent streams of the driver's socket."""
    (service,) = (service for name, service, _ in agent_server.servers._served if DRIVER in name)
    assert isinstance(service, HealthService)
    return service.subscribers._lent


def lent_count(agent_server: Serving) -> int:
    """Return how many streams of the driver's socket are lent; the event loop has ended its change of them.

    While the event loop has the lock, a thread that publishes leaves the sending to it.
    """
    lent = lent_streams(agent_server)
    with lent.lock:
        return len(lent.table)


def wait_lent(agent_server: Serving, count: int = 1) -> None:
    eventually(lambda: lent_count(agent_server) == count, f"{count} streams are lent")


@contextmanager
def stopped_loop(agent_server: Serving) -> Iterator[asyncio.AbstractEventLoop]:
    """Block the thread of the servers' event loop in a ``with`` block; yields the loop."""
    loop = agent_server.thread._loop
    assert loop is not None
    is_blocked, may_continue = threading.Event(), threading.Event()

    def block() -> None:
        is_blocked.set()
        assert may_continue.wait(PATIENCE_S)

    loop.call_soon_threadsafe(block)
    assert is_blocked.wait(PATIENCE_S)
    try:
        yield loop
    finally:
        may_continue.set()


class Lists:
    """Reader of the lists of one stream, which checks that the bytes are whole frames."""

    def __init__(self, client: RawClient, stream: int = 1) -> None:
        self._client = client
        self._stream = stream
        self._data = bytearray()
        self.size = 0
        """Size of all data of all streams that were read."""
        self.kinds: set[int] = set()
        """Types of the frames that were read."""

    def next(self) -> bytes:
        """Return the next list."""
        while len(self._data) < 5 or len(self._data) < 5 + int.from_bytes(self._data[1:5], "big"):
            assert self.read_frame() is not None, "the connection ended"
        end = 5 + int.from_bytes(self._data[1:5], "big")
        assert self._data[0] == 0
        message = bytes(self._data[5:end])
        del self._data[:end]
        return message

    def read_frame(self) -> tuple[int, int, int, bytes] | None:
        """Read a frame and keep its data; None: the connection has ended."""
        received = self._client.next_frame()
        if received is not None:
            kind, _, stream, payload = received
            self.kinds.add(kind)
            if kind == DATA:
                self.size += len(payload)
                self._data += payload if stream == self._stream else b""
        return received

    def ping(self) -> None:
        """Send a ping, and read all that comes before its answer."""
        self._client.send(frame(PING, 0, 0, bytes(8)))
        while (received := self.read_frame()) != (PING, ACK, 0, bytes(8)):
            assert received is not None


def device_times(message: bytes) -> list[int]:
    """Return the times of a list's devices."""
    response = message_class("v1", "NodeWatchResourcesResponse").FromString(message)
    return [entry.last_updated_time for entry in response.devices]


def credit(size: int) -> bytes:
    """Return the frames that enlarge the windows of the connection and of stream 1."""
    return b"".join(frame(WINDOW_UPDATE, 0, n, struct.pack(">I", size)) for n in (0, 1))


@contextmanager
def subscriber(agent_server: Serving, lent_before: int = 0) -> Iterator[tuple[RawClient, Lists]]:
    """Open a stream with large windows, and read its first list."""
    with RawClient(agent_server.health, window=1 << 24) as client:
        client.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 24)))
        client.call()
        lists = Lists(client)
        lists.next()
        wait_lent(agent_server, lent_before + 1)
        yield client, lists


def test_publishing_thread_sends_while_the_event_loop_is_blocked(agent_server: Serving) -> None:
    with watch_health(agent_server.health) as watcher:
        assert names(watcher.next()) == ["first"]
        wait_lent(agent_server)
        with stopped_loop(agent_server):
            for second in range(2, 6):
                agent_server.publish(device("first", verified=second))
                assert watcher.next().devices[0].last_updated_time == int(at(second).wall_s)
        eventually(lambda: agent_server.latest.is_delivered(), "the event loop has the last report")
        agent_server.publish(device("first", verified=9))
        assert watcher.next().devices[0].last_updated_time == int(at(9).wall_s)
        assert watcher.pending_count() == 0


def test_failed_sending_at_once_is_repeated_by_the_event_loop(tmp_path: Path) -> None:
    publisher, failures = threading.get_ident(), []

    def encode(devices: Sequence[DeviceHealth], extra_s: int) -> list[bytes]:
        if threading.get_ident() == publisher:
            failures.append(MemoryError())
            raise failures[-1]
        return encode_device_health(devices, extra_s)

    with Serving(tmp_path, encode_list=encode) as agent_server:
        agent_server.publish(device("first"))
        with subscriber(agent_server) as (_, lists):
            agent_server.publish(device("first", verified=2))
            assert device_times(lists.next()) == [int(at(2).wall_s)]
    assert len(failures) == 1


def test_counts_of_lists_include_those_of_the_publishing_thread(agent_server: Serving) -> None:
    with subscriber(agent_server) as (_, lists), stopped_loop(agent_server):
        before = agent_server.servers.subscribers()[0]
        agent_server.publish(device("first", verified=2))
        size = len(lists.next())
        after = agent_server.servers.subscribers()[0]
        assert (after.lists, after.sent_bytes) == ((before.lists or 0) + 1, before.sent_bytes + size)


def test_device_without_new_reading_is_not_sent_by_the_publishing_thread(agent_server: Serving) -> None:
    with watch_health(agent_server.health) as watcher:
        assert names(watcher.next()) == ["first"]
        agent_server.publish(device("first"), device("other"))
        assert names(watcher.next()) == ["other"]
        wait_lent(agent_server)
        with stopped_loop(agent_server):
            agent_server.publish(device("first"), device("other"))
            agent_server.publish(device("first"), device("other", verified=2))
            assert names(watcher.next()) == ["other"]
        assert watcher.pending_count() == 0


def test_windows_are_kept_and_newest_list_follows_their_opening(agent_server: Serving) -> None:
    granted = 4 * 1024
    with RawClient(agent_server.health, window=granted) as client:
        client.call()
        lists = Lists(client)
        lists.next()
        wait_lent(agent_server)
        with stopped_loop(agent_server):
            for second in range(2, 12):
                agent_server.publish(device("first", verified=second, message="x" * 1000))
        times = [device_times(lists.next())[0] for _ in range(3)]
        assert times == [int(at(second).wall_s) for second in (2, 3, 4)]
        for second in range(12, 20):
            lists.ping()
            assert lists.size <= granted
            client.send(credit(1100))
            granted += 1100
            assert device_times(lists.next()) == [int(at(second - 1).wall_s)]
            agent_server.publish(device("first", verified=second, message="x" * 1000))


def large_devices(second: int) -> list[DeviceHealth]:
    """Return devices whose list has about 120 kB."""
    return [device(f"gpu-{n}", verified=second, message="x" * 1000) for n in range(120)]


def test_frames_stay_whole_when_the_socket_takes_a_part(agent_server: Serving) -> None:
    """A client that does not read gets the rest of the cut frame before anything else."""
    with subscriber(agent_server) as (client, lists):
        with stopped_loop(agent_server):
            for second in range(2, 8):
                agent_server.publish(*large_devices(second))
            client.send(frame(PING, 0, 0, b"12345678"))
            client.headers(3, [(b":method", b"POST")])  # refused with a reset
        seconds = [1]
        while seconds[-1] < 7:
            (time_s,) = set(device_times(lists.next()))
            seconds.append(time_s - int(at(0).wall_s))
        assert seconds == sorted(set(seconds))
        assert len(seconds) < 7, "the socket was full"
        while not {PING, RST_STREAM} <= lists.kinds:
            assert lists.read_frame() is not None


def connection(agent_server: Serving) -> Any:
    """Return the server's side of the only connection to the driver's socket."""
    (server,) = (server for name, _, server in agent_server.servers._served if DRIVER in name)
    (only,) = server.connections
    return only


def publish_until_cut(agent_server: Serving) -> int:
    """Publish large lists until a socket takes only a part; return the second of the last one.

    The event loop must be blocked, and the client must not read.
    """
    table, second = lent_streams(agent_server).table, 1
    while not table.count_behind(table._array[0].number):
        second += 1
        agent_server.publish(*large_devices(second))
    return second


def test_goaway_follows_the_rest_of_a_cut_frame(
    agent_server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardened, "GRACE_S", PATIENCE_S)  # the reader may be slow
    with subscriber(agent_server) as (_, lists):
        with stopped_loop(agent_server) as loop:
            loop.call_soon_threadsafe(connection(agent_server).send_goaway)
            last = publish_until_cut(agent_server)
        for second in range(2, last + 1):
            assert set(device_times(lists.next())) == {int(at(second).wall_s)}
        size = lists.size
        while lists.read_frame() is not None:
            assert lists.size == size
        assert GOAWAY in lists.kinds


def test_stream_is_not_lent_while_data_wait_for_its_socket(agent_server: Serving) -> None:
    """A client that reads again must first get what the event loop still has for it."""
    with subscriber(agent_server) as (client, lists):
        with stopped_loop(agent_server):
            last = publish_until_cut(agent_server)
        eventually(lambda: agent_server.latest.is_delivered(), "the event loop has the report")
        with stopped_loop(agent_server):
            assert lent_count(agent_server) == 0
            client.drain()
            agent_server.publish(*large_devices(last + 1))
            assert client.drain() == 0
        for second in range(2, last + 2):
            assert set(device_times(lists.next())) == {int(at(second).wall_s)}
        agent_server.publish(*large_devices(last + 2))
        lists.next()
        wait_lent(agent_server)


def test_reset_stream_gets_nothing_more(agent_server: Serving) -> None:
    with watch_health(agent_server.health) as other:
        other.next()
        with subscriber(agent_server, lent_before=1) as (client, lists):
            client.send(frame(RST_STREAM, 0, 1, struct.pack(">I", 8)))
            wait_lent(agent_server, 1)
            size = lists.size
            agent_server.publish(device("first", verified=2))
            assert names(other.next()) == ["first"]
            lists.ping()
            assert lists.size == size


def test_peer_that_closes_while_its_stream_is_lent_is_forgotten(agent_server: Serving) -> None:
    with watch_health(agent_server.health) as other:
        other.next()
        with RawClient(agent_server.health) as client:
            client.call()
            Lists(client).next()
            wait_lent(agent_server, 2)
            with stopped_loop(agent_server):
                client.sock.close()
                agent_server.publish(device("first", verified=2))
                assert names(other.next()) == ["first"]
        wait_lent(agent_server, 1)
        eventually(lambda: connections(agent_server.health) == 1, "the connection is closed")
        agent_server.publish(device("first", verified=3))
        assert names(other.next()) == ["first"]


def test_lists_for_a_closed_connection_leave_no_log_line(
    agent_server: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio would log each write but the first ones."""
    with RawClient(agent_server.health) as client:
        for stream in range(1, 20, 2):
            client.call(stream)
        eventually(lambda: agent_server.servers.subscribers()[0].lists == 10, "all streams have a list")
        with stopped_loop(agent_server):
            client.sock.close()
            agent_server.publish(device("first", verified=2))
    eventually(lambda: connections(agent_server.health) == 0, "the connection is closed")
    assert caplog.messages == []


def test_two_streams_of_a_connection_share_its_window(agent_server: Serving) -> None:
    """The connection's window has room for one large list, and each stream's window for many."""
    with RawClient(agent_server.health, window=1 << 24) as client:
        client.call(1)
        client.call(3)
        lists = Lists(client)
        lists.next()
        wait_lent(agent_server)
        for second in range(2, 6):
            agent_server.publish(device("first", verified=second, message="x" * 40_000))
            eventually(lambda: agent_server.latest.is_delivered(), "the event loop has the report")
        lists.ping()
        assert 40_000 < lists.size <= 65_535


def test_busy_peers_get_whole_lists_in_order(agent_server: Serving) -> None:
    """Clients ping and enlarge their windows by small steps while reports are published without a pause."""
    total = 300
    results: list[list[int]] = []

    def read() -> None:
        with RawClient(agent_server.health, window=4_000) as client:
            client.call()
            lists, seconds = Lists(client), [0]
            while seconds[-1] < total:
                (time_s,) = device_times(lists.next())
                seconds.append(time_s - int(at(0).wall_s))
                client.send(frame(PING, 0, 0, bytes(8)) + credit(200))
            results.append(seconds)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for second in range(2, total + 1):
        agent_server.publish(device("first", verified=second))
    for reader in readers:
        reader.join(PATIENCE_S)
    assert len(results) == len(readers)
    assert all(seconds == sorted(set(seconds)) for seconds in results)
