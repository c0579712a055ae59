"""Client of the command line: against our servers, drivers of other vendors, and invalid servers."""

import asyncio
import contextlib
import os
import random
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpclib.server
import pytest
from conform.frames import FrameServer, Peer
from grpclib.const import Cardinality
from grpclib.exceptions import StreamTerminatedError
from hpack import Encoder
from other_user import become_other_user
from patience import PATIENCE_S
from wire import raw
from wire.google import message_class
from wire.serving import DRIVER, Serving, at, device, eventually, report, unhealthy

from agent.errors import AgentUnreachable, DrahealthError, PermissionDeniedError
from agent.model.health import Health, Severity
from agent.model.report import AgentStatus, Report
from agent.serve.agent_api import client
from agent.serve.agent_api.client import clear_faults, fetch_status, first_report, watch_reports
from agent.serve.grpc.channel import RawChannel
from agent.serve.grpc.gen.health_v1alpha1 import v1alpha1

V1 = "v1.DRAResourceHealth"
V1ALPHA1 = "v1alpha1.DRAResourceHealth"
ENTRY = message_class("v1", "DeviceHealth")
RESPONSE = message_class("v1", "NodeWatchResourcesResponse")

Behaviour = Callable[[grpc.ServicerContext], Iterator[bytes]]


def entry(name: str, health: int = 1, message: str = "", *, timeout_s: int = 30) -> bytes:
    """Return a list of one device, encoded by Google's protobuf."""
    identifier = {"pool_name": "pool", "device_name": name}
    fields = {"health": health, "message": message, "health_check_timeout_seconds": timeout_s}
    return RESPONSE(devices=[ENTRY(device=identifier, **fields)]).SerializeToString()


@contextlib.contextmanager
def driver(path: Path, behaviour: Behaviour, service: str = V1, **options: Any) -> Iterator[Path]:
    """Serve a DRA driver of another vendor: a grpcio server that sends the given bytes."""
    method = grpc.unary_stream_rpc_method_handler(lambda _, context: behaviour(context))
    server = grpc.server(ThreadPoolExecutor(4), **options)
    handlers = grpc.method_handlers_generic_handler(service, {"NodeWatchResources": method})
    server.add_generic_rpc_handlers([handlers])
    server.add_insecure_port(f"unix:{path}")
    server.start()
    yield path
    server.stop(grace=0).wait()


def sends(*messages: bytes) -> Behaviour:
    """Return a behaviour that sends these messages and keeps the stream open."""

    def behaviour(context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from messages
        cancelled = threading.Event()
        context.add_callback(cancelled.set)
        cancelled.wait(PATIENCE_S)

    return behaviour


def first(path: Path, count: int = 1) -> list[Report]:
    """Return the first reports of a socket."""

    async def main() -> list[Report]:
        reports = []
        async with contextlib.aclosing(watch_reports(path)) as stream:
            async for item in stream:
                reports.append(item)
                if len(reports) == count:
                    return reports
        raise AssertionError("watch_reports() ended by itself")

    return asyncio.run(main())


def test_call_that_ends_early_leaves_no_cancellation_in_its_task(tmp_path: Path) -> None:
    async def call(path: Path, timeout_s: float | None) -> int:
        channel = RawChannel(str(path))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await channel.connect()
                request = channel.request("/a/b", Cardinality.UNARY_STREAM, bytes, bytes, timeout=timeout_s)
                with contextlib.suppress(TimeoutError, StreamTerminatedError):
                    async with request as stream:
                        await stream.send_message(b"", end=True)
                        await stream.recv_message()
        finally:
            channel.close()
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    def closes_the_connection(peer: Peer) -> None:
        peer.handshake()
        peer.next_call()

    def never_answers(peer: Peer) -> None:
        peer.handshake()
        peer.read_silently()

    for behaviour, timeout_s in ((never_answers, 0.05), (closes_the_connection, None)):
        path = tmp_path / f"{behaviour.__name__}.sock"
        with FrameServer(path, behaviour):
            assert asyncio.run(call(path, timeout_s)) == 0


CLOSED = "the server closed the connection before its answer was complete"


def refusal(path: Path, call: Callable[[Path], object] = first) -> str:
    """Return the text of the error without the socket, with which it must begin."""
    with pytest.raises(DrahealthError) as raised:
        call(path)
    assert type(raised.value) in (AgentUnreachable, PermissionDeniedError)
    prefix, _, text = str(raised.value).partition(": ")
    assert prefix == f"socket {path}"
    return text


@pytest.fixture(autouse=True)
def patient_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "STATUS_TIMEOUT_S", PATIENCE_S)


def read_status(path: Path) -> AgentStatus:
    return asyncio.run(fetch_status(path))


# --- our own servers


def test_agent_socket_yields_complete_reports(tmp_path: Path) -> None:
    with Serving(tmp_path) as agent_server:
        received = report([device("a"), unhealthy("b")], second=3)
        agent_server.latest.publish(received)
        assert first(agent_server.agent) == [received]


def test_health_socket_yields_merged_devices(tmp_path: Path) -> None:
    async def main(agent_server: Serving) -> list[Report]:
        agent_server.publish(device("b"), device("a"))
        reports = []
        async with contextlib.aclosing(watch_reports(agent_server.health)) as stream:
            async for item in stream:
                reports.append(item)
                if len(reports) == 3:
                    break
                agent_server.publish(unhealthy("b", f"cpu.offline: {len(reports)}"), device("a"))
        return reports

    with Serving(tmp_path) as agent_server:
        reports = asyncio.run(main(agent_server))
    states = [[(item.device, item.health, item.message) for item in received.devices] for received in reports]
    assert states == [
        [("a", Health.HEALTHY, ""), ("b", Health.HEALTHY, "")],
        [("a", Health.HEALTHY, ""), ("b", Health.UNHEALTHY, "cpu.offline: 1")],
        [("a", Health.HEALTHY, ""), ("b", Health.UNHEALTHY, "cpu.offline: 2")],
    ]
    assert reports[2].devices[0] == reports[1].devices[0], "a device that was not sent again is unchanged"


def test_status_is_decoded(tmp_path: Path) -> None:
    with Serving(tmp_path) as agent_server:
        agent_server.latest.publish(report([device("a"), unhealthy("b")]))
        received = read_status(agent_server.agent)
    assert (received.version, received.pid, received.node, received.publications) == (
        "9.9.9",
        os.getpid(),
        "node-a",
        1,
    )
    assert received.at == at(1)
    assert [(item.severity, item.devices) for item in received.tallies] == [
        (Severity.UNHEALTHY, 1),
        (Severity.OK, 1),
    ]
    assert [item.socket for item in received.subscribers] == [f"drivers/{DRIVER}.sock", "agent.sock"]


@pytest.mark.parametrize("which", ["health", "agent"])
def test_shutdown_of_agent_is_reported(tmp_path: Path, which: str) -> None:
    with Serving(tmp_path) as agent_server:
        agent_server.publish(device("a"))
        path = getattr(agent_server, which)

        async def main() -> None:
            async with contextlib.aclosing(watch_reports(path)) as stream:
                async for _ in stream:
                    await asyncio.to_thread(agent_server.thread.stop)

        assert refusal(path, lambda _: asyncio.run(main())) == "UNAVAILABLE: agent shutting down"


@contextlib.contextmanager
def slow_proxy(path: Path, target: Path, chunk: int, pause: Callable[[], None]) -> Iterator[Path]:
    """Serve a socket that passes one connection on: the server's bytes in chunks, with a pause after each."""

    def upload(client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)

    def run() -> None:
        with (
            contextlib.suppress(OSError),
            listener.accept()[0] as client,
            socket.socket(socket.AF_UNIX) as server,
        ):
            server.connect(str(target))
            uploading = threading.Thread(target=upload, args=(client, server), daemon=True)
            uploading.start()
            while data := server.recv(chunk):
                client.sendall(data)
                pause()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield path


class LateLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock a test sets forward, as after a callback or a pause that took so long."""

    late_s = 0.0

    def time(self) -> float:
        return super().time() + self.late_s


def test_report_that_arrives_slowly_is_read(tmp_path: Path) -> None:
    """Longer than both timeouts in all, without a pause as long as one of them."""

    def pause() -> None:
        loop.late_s += PATIENCE_S / 4
        has_run = threading.Event()
        with contextlib.suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(has_run.set)
        while not (has_run.wait(0.05) or loop.is_closed()):
            pass

    with Serving(tmp_path) as agent_server, contextlib.closing(LateLoop()) as loop:
        agent_server.publish(*(device(f"device-{number}") for number in range(300)))
        with slow_proxy(tmp_path / "slow.sock", agent_server.agent, 400, pause) as slow:
            reading = first_report(slow, first_byte_s=PATIENCE_S, silence_s=PATIENCE_S)
            found = loop.run_until_complete(reading)
        assert loop.late_s > 2 * PATIENCE_S, "a fixed timeout would have ended it"
    assert len(found.devices) == 300


def test_block_of_the_own_event_loop_is_no_pause_of_the_server(tmp_path: Path) -> None:
    async def main() -> Report:
        reading = asyncio.ensure_future(
            first_report(agent_server.agent, first_byte_s=PATIENCE_S, silence_s=PATIENCE_S)
        )
        await asyncio.sleep(0)  # until the first wait for the server has begun
        loop.late_s = 2 * PATIENCE_S
        return await reading

    with Serving(tmp_path) as agent_server, contextlib.closing(LateLoop()) as loop:
        agent_server.publish(device("a"))
        assert len(loop.run_until_complete(main()).devices) == 1


@pytest.mark.parametrize("begins", [False, True])
def test_server_that_stops_sending_is_a_timeout(tmp_path: Path, begins: bool) -> None:
    def answer() -> None:
        with listener.accept()[0] as client:
            client.sendall(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))  # empty SETTINGS
            while client.recv(1 << 16):
                pass

    path = tmp_path / "silent.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=answer)
        if begins:
            thread.start()
        with pytest.raises(TimeoutError):
            asyncio.run(first_report(path, first_byte_s=PATIENCE_S if begins else 0.1, silence_s=0.1))
        if begins:
            thread.join(PATIENCE_S)


def test_abandoned_stream_is_closed(tmp_path: Path) -> None:
    with Serving(tmp_path) as agent_server:
        agent_server.publish(device("a"))
        for _ in range(5):
            first(agent_server.health)
            first(agent_server.agent)
        eventually(
            lambda: {item.streams for item in read_status(agent_server.agent).subscribers} == {0},
            "all streams have ended",
        )


# --- drivers of other vendors


@pytest.mark.parametrize("service", [V1, V1ALPHA1])
def test_driver_of_either_version_is_read(tmp_path: Path, service: str) -> None:
    with driver(tmp_path / "a.sock", sends(entry("gpu-0", 2, "XID 79")), service) as path:
        received = first(path)[0]
    assert [(item.pool, item.device, item.health, item.message) for item in received.devices] == [
        ("pool", "gpu-0", Health.UNHEALTHY, "XID 79")
    ]


def test_driver_on_plain_grpclib_is_read(tmp_path: Path) -> None:
    """Its answer to an unknown method has no content-type."""

    class Health1alpha1(v1alpha1.DraResourceHealthBase):
        async def node_watch_resources(
            self, node_watch_resources_request: v1alpha1.NodeWatchResourcesRequest
        ) -> AsyncIterator[v1alpha1.NodeWatchResourcesResponse]:
            yield v1alpha1.NodeWatchResourcesResponse().parse(entry("gpu-0", 2))

    async def main() -> Report:
        async with grpclib.server.Server([Health1alpha1()]) as server:
            await server.start(path=str(tmp_path / "a.sock"))
            async with contextlib.aclosing(watch_reports(tmp_path / "a.sock")) as reports:
                return await anext(reports)

    assert [item.health for item in asyncio.run(main()).devices] == [Health.UNHEALTHY]


def test_partial_lists_are_merged_and_sorted(tmp_path: Path) -> None:
    with driver(tmp_path / "a.sock", sends(entry("b"), entry("a"), entry("b", 2))) as path:
        received = first(path, 3)[-1]
    assert [(item.device, item.health) for item in received.devices] == [
        ("a", Health.HEALTHY),
        ("b", Health.UNHEALTHY),
    ]


def test_healthy_device_with_message_is_degraded(tmp_path: Path) -> None:
    with driver(tmp_path / "a.sock", sends(entry("a", 1, "slow"))) as path:
        assert first(path)[0].devices[0].severity is Severity.DEGRADED


@pytest.mark.parametrize(("number", "shown"), [(7, "7"), (-1, str((1 << 64) - 1))])
def test_unknown_health_number_is_unknown_with_the_number(tmp_path: Path, number: int, shown: str) -> None:
    with driver(tmp_path / "a.sock", sends(entry("a", number, "odd"))) as path:
        received = first(path)[0].devices[0]
    assert (received.health, received.severity) == (Health.UNKNOWN, Severity.UNKNOWN)
    assert received.message == f"the driver reports health {shown}, must be 0, 1 or 2; odd"


def test_device_becomes_unknown_when_its_lease_ends(tmp_path: Path) -> None:
    with driver(tmp_path / "a.sock", sends(entry("a", 1, timeout_s=1) + entry("b"))) as path:
        before, after = first(path, 2)
    assert [item.health for item in before.devices] == [Health.HEALTHY, Health.HEALTHY]
    assert [item.health for item in after.devices] == [Health.UNKNOWN, Health.HEALTHY]
    assert after.devices[0].message == "not confirmed within its lease of 1 s"


@pytest.mark.parametrize(("sent", "expected"), [(0, 30), (-5, 30), (20, 20), (1 << 62, 86_400)])
def test_lease_is_limited_as_by_the_kubelet(tmp_path: Path, sent: int, expected: int) -> None:
    with driver(tmp_path / "a.sock", sends(entry("a", timeout_s=sent))) as path:
        assert first(path)[0].devices[0].timeout_s == expected


def test_message_just_below_the_limit_is_read(tmp_path: Path) -> None:
    with driver(tmp_path / "a.sock", sends(entry("a", 1, "x" * ((4 << 20) - 100)))) as path:
        assert len(first(path)[0].devices[0].message) == (4 << 20) - 100


# --- invalid servers


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b"\x0a\x04\x2a\x02\xc3\x28", "devices.message: not UTF-8 at byte 0 of 2"),
        (b"\x0a\x05ab", "devices: ends 3 bytes after the end of the message"),
        (b"\x08\x05", "devices: wire type is 0, must be 2"),
    ],
)
def test_invalid_list_raises_with_place(tmp_path: Path, sent: bytes, text: str) -> None:
    with driver(tmp_path / "a.sock", sends(sent)) as path:
        assert refusal(path) == f"INTERNAL: NodeWatchResourcesResponse.{text}"


def test_message_above_the_limit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with driver(tmp_path / "a.sock", sends(b"\x0a" * ((4 << 20) + 1))) as path:
        assert refusal(path) == "RESOURCE_EXHAUSTED: message is 4194305 bytes, limit 4194304; refused unread"


def test_compressed_message_is_refused(tmp_path: Path) -> None:
    peer = driver(tmp_path / "a.sock", sends(entry("a", 1, "x" * 999)), compression=grpc.Compression.Gzip)
    with peer as path:
        assert refusal(path).startswith("INTERNAL: compressed messages are not supported")


def test_end_of_stream_is_an_error(tmp_path: Path) -> None:
    with driver(tmp_path / "a.sock", lambda _: iter([entry("a")])) as path:
        assert refusal(path, lambda path: first(path, 2)) == (
            "the server ended the stream of health reports; it may be shutting down"
        )


def test_error_of_the_server_is_passed_on(tmp_path: Path) -> None:
    def behaviour(context: grpc.ServicerContext) -> Iterator[bytes]:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")
        yield b""

    with driver(tmp_path / "a.sock", behaviour) as path:
        assert refusal(path) == "PERMISSION_DENIED: not you"


def test_server_of_another_api_is_an_error(tmp_path: Path) -> None:
    with driver(tmp_path / "a.sock", sends(), "other.Service") as path:
        assert refusal(path) == (
            "its server has neither drahealth.v1.Agent nor a DRA health API; choose another socket"
        )
        assert refusal(path, read_status).startswith("UNIMPLEMENTED: ")


@contextlib.contextmanager
def replying_peer(path: Path, reply: bytes, *, after: bytes, disconnects: bool) -> Iterator[Path]:
    """Accept one connection, read until ``after`` was received, reply, and disconnect or wait for that."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                received = b""
                while after not in received:
                    received += peer.recv(65_536)
                peer.sendall(reply)
                while not disconnects and peer.recv(65_536):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield path
        thread.join()


def http2_peer(
    path: Path, http2_frames: bytes, *, disconnects: bool = False
) -> contextlib.AbstractContextManager[Path]:
    """Serve a peer that sends these frames once it has the request's message."""
    request = raw.frame(raw.DATA, raw.END_STREAM, 1, raw.message())
    reply = raw.frame(raw.SETTINGS, 0, 0) + http2_frames
    return replying_peer(path, reply, after=request, disconnects=disconnects)


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(64)])
@pytest.mark.parametrize("call", [first, read_status])
def test_server_without_http2_is_an_error(
    tmp_path: Path, reply: bytes, call: Callable[[Path], object]
) -> None:
    with replying_peer(tmp_path / "a.sock", reply, after=raw.PREFACE, disconnects=True) as path:
        assert refusal(path, call) == CLOSED


@pytest.mark.parametrize("call", [first, read_status])
def test_immediately_closed_connection_is_an_error(tmp_path: Path, call: Callable[[Path], object]) -> None:
    with FrameServer(tmp_path / "a.sock", lambda peer: None):
        for _ in range(20):  # sometimes before the connection is used, sometimes during its use
            assert refusal(tmp_path / "a.sock", call) == CLOSED


def test_clear_without_an_answer_says_that_faults_may_be_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clear(path: Path) -> object:
        return asyncio.run(clear_faults(path, "gpu-3", ""))

    unknown = "; the faults may be cleared: 'drahealth explain gpu-3' shows it"
    with FrameServer(tmp_path / "a.sock", lambda peer: None):
        assert refusal(tmp_path / "a.sock", clear) == CLOSED + unknown
    monkeypatch.setattr(client, "STATUS_TIMEOUT_S", 0.05)
    with FrameServer(tmp_path / "b.sock", lambda peer: peer.read_silently()):
        assert refusal(tmp_path / "b.sock", clear) == "no answer from the agent within 0.05 s" + unknown


def response(*headers: tuple[str, str]) -> bytes:
    return raw.frame(raw.HEADERS, raw.END_HEADERS, 1, Encoder().encode(headers))


STATUS_OK = (":status", "200")
GRPC = ("content-type", "application/grpc")
OPENED = response(STATUS_OK, GRPC)


@pytest.mark.parametrize(
    ("http2_frames", "text"),
    [
        (response(GRPC), "UNKNOWN: Received :status = 'none'"),
        (response(STATUS_OK, ("content-type", "text/html")), "UNKNOWN: Invalid content-type: 'text/html'"),
        (response((":status", "503"), GRPC), "UNAVAILABLE: Received :status = '503'"),
        (response(STATUS_OK, GRPC, ("grpc-status", "x")), "UNKNOWN: Invalid grpc-status: 'x'"),
        (response(STATUS_OK, GRPC, ("grpc-status", "5"), ("grpc-message", "%E9!")), "NOT_FOUND: \ufffd!"),
        (
            OPENED + raw.frame(raw.DATA, raw.END_STREAM, 1, b"\0\0"),
            "INTERNAL: the gRPC stream ended in the middle",
        ),
        (OPENED + raw.frame(raw.RST_STREAM, 0, 1, bytes(4)), CLOSED),
        (raw.frame(raw.GOAWAY, 0, 0, bytes(8)), CLOSED),
    ],
)
def test_http2_server_without_grpc_is_an_error(tmp_path: Path, http2_frames: bytes, text: str) -> None:
    with http2_peer(tmp_path / "a.sock", http2_frames) as path:
        assert refusal(path).startswith(text)


def test_random_frames_are_an_error(tmp_path: Path) -> None:
    rng = random.Random(4680)
    for number in range(60):
        http2_frames = OPENED if number % 2 else b""
        for _ in range(4):
            payload = rng.randbytes(rng.randrange(30))
            http2_frames += raw.frame(rng.randrange(11), rng.randrange(256), rng.randrange(3), payload)
        with http2_peer(tmp_path / f"{number}.sock", http2_frames, disconnects=True) as path:
            refusal(path)


@pytest.mark.parametrize("call", [first, read_status])
def test_missing_server_is_an_error_with_reason(tmp_path: Path, call: Callable[[Path], object]) -> None:
    path = tmp_path / "a.sock"
    assert refusal(path, call) == "no such socket; is the agent running?"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    assert refusal(path, call) == "no process serves this socket; is the agent running?"
    path = tmp_path / ("x" * 108)
    assert refusal(path, call) == f"path is {len(str(path))} bytes, limit 107 for a unix socket"
    assert refusal(tmp_path, call) == "is not a socket"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user without permission")
def test_socket_without_permission_raises_permission_denied() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory, Serving(Path(directory)) as agent_server:
        Path(directory).chmod(0o755)
        agent_server.agent.chmod(0o600)  # we stay in root's group
        become_other_user()
        try:
            assert refusal(agent_server.agent) == "cannot be opened: Permission denied; run as root"
        finally:
            os.seteuid(0)
