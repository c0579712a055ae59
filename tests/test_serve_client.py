"""The client of the command line: against our servers, other people's, and impostors."""

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
from conform.frames import FrameServer
from hpack import Encoder
from patience import PATIENCE_S
from wire import raw
from wire.google import message_class
from wire.serving import DRIVER, Serving, at, device, eventually, report, sick

from agent.errors import AgentUnreachable, DrahealthError, PermissionDenied
from agent.model.health import Health, Severity
from agent.model.report import Report
from agent.model.status import AgentStatus
from agent.serve.agent_api.client import follow, status
from agent.serve.grpc.gen.health_v1alpha1 import v1alpha1

V1 = "v1.DRAResourceHealth"
V1ALPHA1 = "v1alpha1.DRAResourceHealth"
ENTRY = message_class("v1", "DeviceHealth")
RESPONSE = message_class("v1", "NodeWatchResourcesResponse")

Behaviour = Callable[[grpc.ServicerContext], Iterator[bytes]]


def entry(name: str, health: int = 1, message: str = "", *, timeout_s: int = 30) -> bytes:
    """A list of one device, as Google's protobuf writes it."""
    identifier = {"pool_name": "pool", "device_name": name}
    fields = {"health": health, "message": message, "health_check_timeout_seconds": timeout_s}
    return RESPONSE(devices=[ENTRY(device=identifier, **fields)]).SerializeToString()


@contextlib.contextmanager
def driver(path: Path, behaviour: Behaviour, service: str = V1, **options: Any) -> Iterator[Path]:
    """Somebody else's DRA driver: a grpcio server that sends the bytes it is told to."""
    method = grpc.unary_stream_rpc_method_handler(lambda _, context: behaviour(context))
    server = grpc.server(ThreadPoolExecutor(4), **options)
    handlers = grpc.method_handlers_generic_handler(service, {"NodeWatchResources": method})
    server.add_generic_rpc_handlers([handlers])
    server.add_insecure_port(f"unix:{path}")
    server.start()
    yield path
    server.stop(grace=0).wait()


def sends(*messages: bytes) -> Behaviour:
    """Sends these and keeps the stream open."""

    def behaviour(context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from messages
        gone = threading.Event()
        context.add_callback(gone.set)
        gone.wait(PATIENCE_S)

    return behaviour


def first(path: Path, count: int = 1) -> list[Report]:
    """The first reports of a socket."""

    async def main() -> list[Report]:
        reports = []
        async with contextlib.aclosing(follow(path)) as stream:
            async for one in stream:
                reports.append(one)
                if len(reports) == count:
                    return reports
        raise AssertionError("follow() ended by itself")

    return asyncio.run(main())


def refusal(path: Path, ask: Callable[[Path], object] = first) -> str:
    """What the error says about the peer, without the socket's name, with which it must begin."""
    with pytest.raises(DrahealthError) as raised:
        ask(path)
    assert type(raised.value) in (AgentUnreachable, PermissionDenied)
    prefix, _, text = str(raised.value).partition(": ")
    assert prefix == str(path)
    return text


def ask_status(path: Path) -> AgentStatus:
    return asyncio.run(status(path))


# --- our own servers


def test_an_agents_socket_gives_whole_reports(tmp_path: Path) -> None:
    with Serving(tmp_path) as serving:
        told = report([device("a"), sick("b")], second=3)
        serving.latest.publish(told)
        assert first(serving.agent) == [told]


def test_a_health_socket_of_ours_gives_merged_devices(tmp_path: Path) -> None:
    async def main(serving: Serving) -> list[Report]:
        serving.publish(device("b"), device("a"))
        reports = []
        async with contextlib.aclosing(follow(serving.health)) as stream:
            async for one in stream:
                reports.append(one)
                if len(reports) == 3:
                    break
                serving.publish(sick("b", f"cpu.offline: {len(reports)}"), device("a"))
        return reports

    with Serving(tmp_path) as serving:
        reports = asyncio.run(main(serving))
    states = [[(one.device, one.health, one.message) for one in told.devices] for told in reports]
    assert states == [
        [("a", Health.HEALTHY, ""), ("b", Health.HEALTHY, "")],
        [("a", Health.HEALTHY, ""), ("b", Health.UNHEALTHY, "cpu.offline: 1")],
        [("a", Health.HEALTHY, ""), ("b", Health.UNHEALTHY, "cpu.offline: 2")],
    ]
    assert reports[2].devices[0] == reports[1].devices[0], "what was not sent again was not touched"


def test_the_status_is_read(tmp_path: Path) -> None:
    with Serving(tmp_path) as serving:
        serving.publish(device("a"), sick("b"))
        told = ask_status(serving.agent)
    assert (told.version, told.pid, told.node, told.publications) == ("9.9.9", os.getpid(), "node-a", 1)
    assert told.at == at(1)
    assert [(one.severity, one.devices) for one in told.tallies] == [
        (Severity.UNHEALTHY, 1),
        (Severity.OK, 1),
    ]
    assert [one.socket for one in told.subscribers] == [f"drivers/{DRIVER}.sock", "agent.sock"]


@pytest.mark.parametrize("which", ["health", "agent"])
def test_an_agent_that_shuts_down_says_so(tmp_path: Path, which: str) -> None:
    with Serving(tmp_path) as serving:
        serving.publish(device("a"))
        path = getattr(serving, which)

        async def main() -> None:
            async with contextlib.aclosing(follow(path)) as stream:
                async for _ in stream:
                    await asyncio.to_thread(serving.thread.stop)

        assert refusal(path, lambda _: asyncio.run(main())) == "UNAVAILABLE: agent shutting down"


def test_leaving_a_stream_early_leaves_nothing_behind(tmp_path: Path) -> None:
    with Serving(tmp_path) as serving:
        serving.publish(device("a"))
        for _ in range(5):
            first(serving.health)
            first(serving.agent)
        eventually(
            lambda: {one.streams for one in ask_status(serving.agent).subscribers} == {0}, "all have left"
        )


# --- other people's drivers


@pytest.mark.parametrize("service", [V1, V1ALPHA1])
def test_a_driver_of_either_version_is_read(tmp_path: Path, service: str) -> None:
    with driver(tmp_path / "a.sock", sends(entry("gpu-0", 2, "XID 79")), service) as path:
        told = first(path)[0]
    assert [(one.pool, one.device, one.health, one.message) for one in told.devices] == [
        ("pool", "gpu-0", Health.UNHEALTHY, "XID 79")
    ]


def test_a_driver_on_plain_grpclib_is_read(tmp_path: Path) -> None:
    """Its answer to a method that it does not know has no content-type."""

    class Health1alpha1(v1alpha1.DraResourceHealthBase):
        async def node_watch_resources(
            self, node_watch_resources_request: v1alpha1.NodeWatchResourcesRequest
        ) -> AsyncIterator[v1alpha1.NodeWatchResourcesResponse]:
            yield v1alpha1.NodeWatchResourcesResponse().parse(entry("gpu-0", 2))

    async def main() -> Report:
        async with grpclib.server.Server([Health1alpha1()]) as server:
            await server.start(path=str(tmp_path / "a.sock"))
            async with contextlib.aclosing(follow(tmp_path / "a.sock")) as reports:
                return await anext(reports)

    assert [one.health for one in asyncio.run(main()).devices] == [Health.UNHEALTHY]


def test_partial_lists_are_merged_and_sorted(tmp_path: Path) -> None:
    with driver(tmp_path / "a.sock", sends(entry("b"), entry("a"), entry("b", 2))) as path:
        told = first(path, 3)[-1]
    assert [(one.device, one.health) for one in told.devices] == [
        ("a", Health.HEALTHY),
        ("b", Health.UNHEALTHY),
    ]


def test_healthy_with_a_message_is_degraded(tmp_path: Path) -> None:
    with driver(tmp_path / "a.sock", sends(entry("a", 1, "slow"))) as path:
        assert first(path)[0].devices[0].severity is Severity.DEGRADED


@pytest.mark.parametrize(("number", "as_read"), [(7, "7"), (-1, str((1 << 64) - 1))])
def test_a_health_that_nobody_knows_is_unknown_and_named(tmp_path: Path, number: int, as_read: str) -> None:
    with driver(tmp_path / "a.sock", sends(entry("a", number, "odd"))) as path:
        told = first(path)[0].devices[0]
    assert (told.health, told.severity) == (Health.UNKNOWN, Severity.UNKNOWN)
    assert told.message == f"peer says health {as_read}, which is none of 0, 1 and 2; odd"


def test_a_lease_that_runs_out_makes_a_device_unknown(tmp_path: Path) -> None:
    with driver(tmp_path / "a.sock", sends(entry("a", 1, timeout_s=1) + entry("b"))) as path:
        before, after = first(path, 2)
    assert [one.health for one in before.devices] == [Health.HEALTHY, Health.HEALTHY]
    assert [one.health for one in after.devices] == [Health.UNKNOWN, Health.HEALTHY]
    assert after.devices[0].message == "not confirmed within its lease of 1 s"


@pytest.mark.parametrize(("sent", "kept"), [(0, 30), (-5, 30), (20, 20), (1 << 62, 86_400)])
def test_a_lease_is_what_the_kubelet_makes_of_it(tmp_path: Path, sent: int, kept: int) -> None:
    with driver(tmp_path / "a.sock", sends(entry("a", timeout_s=sent))) as path:
        assert first(path)[0].devices[0].timeout_s == kept


def test_a_message_just_below_the_limit_is_read(tmp_path: Path) -> None:
    with driver(tmp_path / "a.sock", sends(entry("a", 1, "x" * ((4 << 20) - 100)))) as path:
        assert len(first(path)[0].devices[0].message) == (4 << 20) - 100


# --- impostors


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b"\x0a\x04\x2a\x02\xc3\x28", "devices.message: not UTF-8 at byte 0 of 2"),
        (b"\x0a\x05ab", "devices: ends 3 bytes after the message's 4"),
        (b"\x08\x05", "devices: wire type 0, should be 2"),
    ],
)
def test_what_is_no_list_is_an_error_that_says_where(tmp_path: Path, sent: bytes, text: str) -> None:
    with driver(tmp_path / "a.sock", sends(sent)) as path:
        assert refusal(path) == f"INTERNAL: NodeWatchResourcesResponse.{text}"


def test_a_message_above_the_limit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with driver(tmp_path / "a.sock", sends(b"\x0a" * ((4 << 20) + 1))) as path:
        assert refusal(path) == "RESOURCE_EXHAUSTED: message is 4194305 bytes, limit 4194304; refused unread"


def test_a_compressed_message_is_refused(tmp_path: Path) -> None:
    peer = driver(tmp_path / "a.sock", sends(entry("a", 1, "x" * 999)), compression=grpc.Compression.Gzip)
    with peer as path:
        assert refusal(path).startswith("INTERNAL: compressed messages are not supported")


def test_a_stream_that_ends_is_an_error(tmp_path: Path) -> None:
    with driver(tmp_path / "a.sock", lambda _: iter([entry("a")])) as path:
        assert refusal(path, lambda path: first(path, 2)) == "ended the stream"


def test_an_error_of_the_peer_is_passed_on(tmp_path: Path) -> None:
    def behaviour(context: grpc.ServicerContext) -> Iterator[bytes]:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")
        yield b""

    with driver(tmp_path / "a.sock", behaviour) as path:
        assert refusal(path) == "PERMISSION_DENIED: not you"


def test_a_server_of_something_else_is_named_as_such(tmp_path: Path) -> None:
    with driver(tmp_path / "a.sock", sends(), "other.Service") as path:
        assert refusal(path) == "serves neither drahealth.v1.Agent nor a DRA health API"
        assert refusal(path, ask_status).startswith("UNIMPLEMENTED: ")


@contextlib.contextmanager
def peer_that_says(path: Path, reply: bytes, *, after: bytes, hangs_up: bool) -> Iterator[Path]:
    """Takes one connection, reads until ``after`` was sent, replies, and hangs up or waits for that."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def impostor() -> None:
            peer, _ = listener.accept()
            with peer:
                received = b""
                while after not in received:
                    received += peer.recv(65_536)
                peer.sendall(reply)
                while not hangs_up and peer.recv(65_536):
                    pass

        thread = threading.Thread(target=impostor)
        thread.start()
        yield path
        thread.join()


def http2_peer(
    path: Path, frames: bytes, *, hangs_up: bool = False
) -> contextlib.AbstractContextManager[Path]:
    """A peer that sends these frames once it has the request's message."""
    request = raw.frame(raw.DATA, raw.END_STREAM, 1, raw.message())
    reply = raw.frame(raw.SETTINGS, 0, 0) + frames
    return peer_that_says(path, reply, after=request, hangs_up=hangs_up)


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(64)])
@pytest.mark.parametrize("ask", [first, ask_status])
def test_who_does_not_speak_http2_is_an_error(
    tmp_path: Path, reply: bytes, ask: Callable[[Path], object]
) -> None:
    with peer_that_says(tmp_path / "a.sock", reply, after=raw.PREFACE, hangs_up=True) as path:
        assert refusal(path, ask) == "closed the connection"


@pytest.mark.parametrize("ask", [first, ask_status])
def test_who_closes_the_connection_at_once_is_an_error(tmp_path: Path, ask: Callable[[Path], object]) -> None:
    with FrameServer(tmp_path / "a.sock", lambda peer: None):
        for _ in range(20):  # sometimes before it is used, sometimes while it is
            assert refusal(tmp_path / "a.sock", ask) == "closed the connection"


def response(*headers: tuple[str, str]) -> bytes:
    return raw.frame(raw.HEADERS, raw.END_HEADERS, 1, Encoder().encode(headers))


STATUS_OK = (":status", "200")
GRPC = ("content-type", "application/grpc")
OPENED = response(STATUS_OK, GRPC)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        (response(GRPC), "UNKNOWN: Received :status = 'none'"),
        (response(STATUS_OK, ("content-type", "text/html")), "UNKNOWN: Invalid content-type: 'text/html'"),
        (response((":status", "503"), GRPC), "UNAVAILABLE: Received :status = '503'"),
        (response(STATUS_OK, GRPC, ("grpc-status", "x")), "UNKNOWN: Invalid grpc-status: 'x'"),
        (response(STATUS_OK, GRPC, ("grpc-status", "5"), ("grpc-message", "%E9!")), "NOT_FOUND: \ufffd!"),
        (OPENED + raw.frame(raw.DATA, raw.END_STREAM, 1, b"\0\0"), "INTERNAL: stream ended in the middle"),
        (OPENED + raw.frame(raw.RST_STREAM, 0, 1, bytes(4)), "closed the connection"),
        (raw.frame(raw.GOAWAY, 0, 0, bytes(8)), "closed the connection"),
    ],
)
def test_who_speaks_http2_but_not_grpc_is_an_error(tmp_path: Path, frames: bytes, text: str) -> None:
    with http2_peer(tmp_path / "a.sock", frames) as path:
        assert refusal(path).startswith(text)


def test_random_frames_are_an_error_and_no_traceback(tmp_path: Path) -> None:
    chance = random.Random(4680)
    for number in range(60):
        frames = OPENED if number % 2 else b""
        for _ in range(4):
            payload = chance.randbytes(chance.randrange(30))
            frames += raw.frame(chance.randrange(11), chance.randrange(256), chance.randrange(3), payload)
        with http2_peer(tmp_path / f"{number}.sock", frames, hangs_up=True) as path:
            refusal(path)


@pytest.mark.parametrize("ask", [first, ask_status])
def test_nobody_there_is_an_error_that_says_so(tmp_path: Path, ask: Callable[[Path], object]) -> None:
    path = tmp_path / "a.sock"
    assert refusal(path, ask) == "no such socket; is the agent running?"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert refusal(path, ask) == "nobody serves this socket; is the agent running?"
    path = tmp_path / ("x" * 108)
    assert refusal(path, ask) == f"is {len(str(path))} bytes, a socket's limit is 107"
    assert refusal(tmp_path, ask) == "is no socket"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody without permission")
def test_a_socket_that_we_may_not_open_is_a_matter_of_permission() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory, Serving(Path(directory)) as serving:
        Path(directory).chmod(0o755)
        serving.agent.chmod(0o600)  # we stay in root's group
        os.seteuid(65_534)
        try:
            assert refusal(serving.agent) == "may not open this socket (Permission denied)"
        finally:
            os.seteuid(0)
