"""Health stream as a kubelet sees it: Google's gRPC and protobuf, over the unix socket."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from patience import PATIENCE_S
from wire.google import Watcher, message_class, names, watch_health
from wire.serving import DRIVER, LEASE_S, Serving, at, connections, device, eventually, report, unhealthy

from agent.model.health import Health, Severity
from agent.node.pods.queries import query_report
from agent.serve.agent_api.client import watch_reports

TESTS = Path(__file__).parent


@pytest.fixture
def agent_server(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path) as agent_server:
        yield agent_server


@pytest.fixture(params=["v1", "v1alpha1"])
def kubelet(agent_server: Serving, request: pytest.FixtureRequest) -> Iterator[Watcher]:
    with watch_health(agent_server.health, request.param) as watcher:
        yield watcher


def facts(response: Any) -> list[tuple[str, str, int, int, int, str]]:
    """Return all values of a list, in the order of the fields."""
    return [
        (
            entry.device.pool_name,
            entry.device.device_name,
            entry.health,
            entry.last_updated_time,
            entry.health_check_timeout_seconds,
            entry.message,
        )
        for entry in response.devices
    ]


def streams(agent_server: Serving) -> int:
    """Return the number of streams of the driver's socket, from the agent's status."""
    request, reply = (message_class("drahealth.v1", name) for name in ("StatusRequest", "StatusReply"))
    with grpc.insecure_channel(f"unix:{agent_server.agent}") as channel:
        call = channel.unary_unary(
            "/drahealth.v1.Agent/Status",
            request_serializer=request.SerializeToString,
            response_deserializer=reply.FromString,
        )
        subscribers = call(request(), timeout=PATIENCE_S).subscribers
    return int(next(entry.streams for entry in subscribers if DRIVER in entry.socket))


def test_first_list_has_all_devices_and_fields(agent_server: Serving, kubelet: Watcher) -> None:
    unknown = device("c", health=Health.UNKNOWN, severity=Severity.UNKNOWN, message="cpu.unreadable: EIO")
    agent_server.publish(device("a"), unhealthy("b", "cpu.offline: größer", verified=2), unknown)
    assert facts(kubelet.next()) == [
        ("node-a", "a", 1, int(at(1).wall_s), LEASE_S, ""),
        ("node-a", "b", 2, int(at(2).wall_s), LEASE_S, "cpu.offline: größer"),
        ("node-a", "c", 0, int(at(1).wall_s), LEASE_S, "cpu.unreadable: EIO"),
    ]


def test_stream_opens_before_the_first_report(agent_server: Serving, kubelet: Watcher) -> None:
    kubelet.wait_opened()
    agent_server.publish(device("a"))
    assert names(kubelet.next()) == ["a"]


def test_later_stream_gets_full_list_at_once(agent_server: Serving) -> None:
    agent_server.publish(device("a"), device("b"))
    with watch_health(agent_server.health) as first:
        assert names(first.next()) == ["a", "b"]
        agent_server.publish(device("a"), device("b", verified=2))
        assert names(first.next()) == ["b"]
        with watch_health(agent_server.health) as second:
            assert names(second.next()) == ["a", "b"]


def leases(response: Any) -> list[int]:
    return [entry.health_check_timeout_seconds for entry in response.devices]


def test_leases_differ_from_those_of_the_stream_before(agent_server: Serving) -> None:
    """For a kubelet that crashed and kept its file, the first list is a change."""
    agent_server.publish(device("a"), device("b"))
    for stream, lease in enumerate([LEASE_S, LEASE_S + 2, LEASE_S]):
        with watch_health(agent_server.health) as kubelet:
            assert leases(kubelet.next()) == [lease, lease]
            agent_server.publish(device("a", verified=stream + 2), device("b"))
            assert leases(kubelet.next()) == [lease], "no second change in the same stream"
        eventually(lambda: streams(agent_server) == 0, "the stream has ended")


def test_stream_has_the_leases_of_one_that_is_open(agent_server: Serving) -> None:
    """The kubelet has one record for both instances of a driver; other leases would be changes for ever."""
    agent_server.publish(device("a"))
    with watch_health(agent_server.health) as other:
        with watch_health(agent_server.health) as former:
            assert leases(other.next()) == leases(former.next()) == [LEASE_S]
        eventually(lambda: streams(agent_server) == 1, "the former stream has ended")
        with watch_health(agent_server.health) as newer:
            assert leases(newer.next()) == [LEASE_S]
    eventually(lambda: streams(agent_server) == 0, "all streams have ended")
    with watch_health(agent_server.health) as kubelet:
        assert leases(kubelet.next()) == [LEASE_S + 2]


def test_stream_after_a_crash_with_an_observer_has_other_leases(agent_server: Serving) -> None:
    """`drahealth watch` has a stream open when the kubelet crashes; its end changes no later leases."""

    async def main() -> None:
        for _ in range(2):
            async with contextlib.aclosing(watch_reports(agent_server.health)) as observed:
                with watch_health(agent_server.health) as kubelet:
                    assert leases(kubelet.next()) == [LEASE_S]
                    await anext(observed)
                eventually(lambda: streams(agent_server) == 1, "the kubelet's stream has ended")
                with watch_health(agent_server.health) as kubelet:
                    assert leases(kubelet.next()) == [LEASE_S + 2]
            eventually(lambda: streams(agent_server) == 0, "all streams have ended")

    agent_server.publish(device("a"))
    asyncio.run(main())


def test_streams_opened_before_a_list_have_the_same_leases(agent_server: Serving) -> None:
    """One of them opened next to a stream that has ended, the other one after that end."""
    agent_server.publish(device("a"))
    with watch_health(agent_server.health) as former:
        former.next()
        agent_server.latest.publish(report([device("a")]))  # too old for a new stream
        first = watch_health(agent_server.health)
        first.wait_opened()
    with first:
        eventually(lambda: streams(agent_server) == 1, "the former stream has ended")
        with watch_health(agent_server.health) as second:
            second.wait_opened()
            agent_server.publish(device("a", verified=2))
            assert leases(first.next()) == leases(second.next())


def test_stream_without_a_list_changes_no_later_lease(agent_server: Serving) -> None:
    """The kubelet still has the leases of the stream before."""
    with watch_health(agent_server.health) as empty:
        empty.wait_opened()
    eventually(lambda: streams(agent_server) == 0, "the stream has ended")
    agent_server.publish(device("a"))
    with watch_health(agent_server.health) as kubelet:
        assert leases(kubelet.next()) == [LEASE_S]


def test_stream_that_its_client_ends_leaves_no_log_line(
    agent_server: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    agent_server.publish(device())
    with watch_health(agent_server.health) as kubelet:
        kubelet.next()
    eventually(lambda: streams(agent_server) == 0, "the kubelet's stream has ended")
    assert asyncio.run(query_report(agent_server.health)).devices
    eventually(lambda: streams(agent_server) == 0, "the stream of explain has ended")
    assert [record.name for record in caplog.records if record.name.startswith("grpclib")] == []


def test_short_streams_do_not_prevent_different_leases(agent_server: Serving) -> None:
    agent_server.publish(device("a"))
    with watch_health(agent_server.health) as kubelet:
        before = leases(kubelet.next())
        for _ in range(2):
            with watch_health(agent_server.health) as visitor:
                visitor.next()
            eventually(lambda: streams(agent_server) == 1, "the visitor's stream has ended")
    eventually(lambda: streams(agent_server) == 0, "the kubelet's stream has ended")
    with watch_health(agent_server.health) as kubelet:
        assert leases(kubelet.next()) != before


def test_no_lease_is_longer_than_a_day(agent_server: Serving, kubelet: Watcher) -> None:
    agent_server.publish(device("a", timeout_s=1 << 40))
    assert leases(kubelet.next()) == [86_400]


def test_changed_device_is_sent(agent_server: Serving, kubelet: Watcher) -> None:
    agent_server.publish(device("a"), device("b"))
    kubelet.next()
    agent_server.publish(device("a"), unhealthy("b"))
    assert facts(kubelet.next()) == [("node-a", "b", 2, int(at(1).wall_s), LEASE_S, "cpu.offline: CPU 1")]


def test_heartbeat_has_only_devices_that_were_read_again(agent_server: Serving, kubelet: Watcher) -> None:
    agent_server.publish(device("a"), device("b"), device("c"))
    kubelet.next()
    agent_server.publish(device("a", verified=2), device("b"), device("c", verified=2))
    assert names(kubelet.next()) == ["a", "c"]


def test_report_without_changes_sends_nothing(agent_server: Serving, kubelet: Watcher) -> None:
    agent_server.publish(device("a"))
    kubelet.next()
    agent_server.publish(device("a"))
    agent_server.publish(device("a", verified=2))
    assert facts(kubelet.next())[0][3] == int(at(2).wall_s)
    assert kubelet.pending_count() == 0


def test_empty_report_keeps_the_stream_open(agent_server: Serving, kubelet: Watcher) -> None:
    agent_server.publish()
    kubelet.wait_opened()
    agent_server.publish(device("a"))
    assert names(kubelet.next()) == ["a"]


def test_shutdown_ends_stream_with_reason(agent_server: Serving, kubelet: Watcher) -> None:
    agent_server.publish(device("a"))
    kubelet.next()
    assert agent_server.thread.stop(PATIENCE_S)
    with pytest.raises(grpc.RpcError) as raised:
        kubelet.next()
    assert (raised.value.code(), raised.value.details()) == (
        grpc.StatusCode.UNAVAILABLE,
        "agent shutting down",
    )


def test_shutdown_before_first_report_ends_stream_with_reason(
    agent_server: Serving, kubelet: Watcher
) -> None:
    kubelet.wait_opened()
    assert agent_server.thread.stop(PATIENCE_S)
    with pytest.raises(grpc.RpcError) as raised:
        kubelet.next()
    assert raised.value.details() == "agent shutting down"


def test_list_above_1_mib_is_sent_in_parts(agent_server: Serving, kubelet: Watcher) -> None:
    devices = [device(f"gpu-{n}", message="x" * 1024) for n in range(4000)]
    agent_server.publish(*devices)
    parts = []
    while sum(len(part.devices) for part in parts) < len(devices):
        parts.append(kubelet.next())
    assert [name for part in parts for name in names(part)] == [entry.device for entry in devices]
    assert all(part.ByteSize() <= 1 << 20 for part in parts)
    assert len(parts) > 1
    agent_server.publish(*devices[:-1], unhealthy("gpu-3999"))
    assert names(kubelet.next()) == ["gpu-3999"]


def test_invalid_report_is_passed_to_the_owner(tmp_path: Path) -> None:
    agent_server = Serving(tmp_path)
    agent_server.thread.start(PATIENCE_S)
    with watch_health(agent_server.health) as kubelet:
        kubelet.wait_opened()
        agent_server.publish(device("a"), device("a"))
        eventually(lambda: bool(agent_server.failures), "the owner has the error")
        with pytest.raises(grpc.RpcError) as raised:
            kubelet.next()
    assert "names device 'a' of pool 'node-a' twice" in str(agent_server.failures[0])
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert agent_server.thread.stop(PATIENCE_S)
    assert not agent_server.health.exists()


@pytest.mark.parametrize("shared", [False, True], ids=["64-connections", "one-connection"])
def test_64_subscribers_get_the_same_lists(agent_server: Serving, shared: bool) -> None:
    agent_server.publish(device("a"), device("b"))
    watchers = [
        watch_health(agent_server.health, "v1" if n % 2 else "v1alpha1", shared=shared) for n in range(64)
    ]
    try:
        assert {tuple(names(watcher.next())) for watcher in watchers} == {("a", "b")}
        assert streams(agent_server) == 64
        for second in range(2, 12):
            agent_server.publish(device("a"), device("b", verified=second))
        last = int(at(11).wall_s)
        for watcher in watchers:
            while facts(received := watcher.next())[0][3] < last:
                assert names(received) == ["b"]
    finally:
        for watcher in watchers:
            watcher.__exit__(None, None, None)
    eventually(lambda: streams(agent_server) == 0, "all streams have ended")


def test_100_reconnects_leave_no_stream_or_descriptor(agent_server: Serving) -> None:
    agent_server.publish(device("a"))
    with watch_health(agent_server.health) as bystander:
        bystander.next()
        for _ in range(100):
            with watch_health(agent_server.health) as watcher:
                assert names(watcher.next()) == ["a"]
        eventually(lambda: streams(agent_server) == 1, "all streams have ended")
        eventually(lambda: connections(agent_server.health) == 1, "all their descriptors are closed")
        agent_server.publish(device("a", verified=2))
        assert names(bystander.next()) == ["a"]


def test_end_of_one_stream_repeats_all_devices_on_the_others(agent_server: Serving) -> None:
    """The kubelet forgets the health of a driver when the stream of one of its instances ends."""
    agent_server.publish(device("a"), unhealthy("b"))
    with watch_health(agent_server.health) as newer:
        first = facts(newer.next())
        with watch_health(agent_server.health) as older:
            older.next()
            agent_server.publish(device("a", verified=2), unhealthy("b"))
            assert names(newer.next()) == ["a"]
        for _ in range(2):  # once more, for a kubelet that forgets late
            again = facts(newer.next())
            assert [fact[:3] for fact in again] == [fact[:3] for fact in first]
        agent_server.publish(device("a", verified=3), unhealthy("b"))
        assert names(newer.next()) == ["a"], "repeats end"


READER = """
import sys
from wire.raw import DATA, RawClient, frame, message, request_headers, WINDOW_UPDATE
import struct

# reads lists and prints the last byte of each, as a client that keeps its windows open
with RawClient(sys.argv[1]) as client:
    client.call()
    body = b""
    while True:
        _, data = client.next_of(DATA, 1)
        client.send(b"".join(frame(WINDOW_UPDATE, 0, n, struct.pack(">I", len(data))) for n in (0, 1)))
        body += data
        while len(body) >= 5 and len(body) >= 5 + int.from_bytes(body[1:5], "big"):
            size = 5 + int.from_bytes(body[1:5], "big")
            print(body[size - 8 : size].decode(), flush=True)
            body = body[size:]
"""


@pytest.fixture
def reader(agent_server: Serving) -> Iterator["subprocess.Popen[str]"]:
    """Start a client in another process, which has read the first list."""
    agent_server.publish(device("a", message=f"{0:08d}"))
    process = subprocess.Popen(
        [sys.executable, "-c", READER, str(agent_server.health)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
    )
    assert process.stdout
    with process, process.stdout:
        assert process.stdout.readline() == f"{0:08d}\n"
        yield process
        process.kill()


def large_list(number: int) -> list[Any]:
    """Return about 60 kB of devices; the last bytes of the list contain its number."""
    devices = [device(f"gpu-{n}", verified=number, message="x" * 200) for n in range(250)]
    return [*devices, device("last", verified=number, message=f"{number:08d}")]


def test_stopped_reader_delays_no_stream_and_resumes_with_newest(
    agent_server: Serving, reader: "subprocess.Popen[str]"
) -> None:
    total = 400
    reader.send_signal(signal.SIGSTOP)
    with watch_health(agent_server.health) as healthy:
        healthy.next()
        for number in range(1, total + 1):
            agent_server.publish(*large_list(number))
            while healthy.next().devices[-1].message != f"{number:08d}":
                pass
    reader.send_signal(signal.SIGCONT)
    assert reader.stdout
    read = []
    while not read or read[-1] < total:
        read.append(int(reader.stdout.readline()))
    assert read == sorted(read)
    assert len(read) < total / 2, "the reader skips lists"


def test_killed_reader_leaves_no_stream_or_descriptor(
    agent_server: Serving, reader: "subprocess.Popen[str]"
) -> None:
    with watch_health(agent_server.health) as healthy:
        healthy.next()
        assert streams(agent_server) == 2
        eventually(lambda: connections(agent_server.health) == 2, "both connections are listed")
        reader.kill()
        reader.wait()
        eventually(lambda: streams(agent_server) == 1, "its stream has ended")
        eventually(lambda: connections(agent_server.health) == 1, "its descriptor is closed")
        agent_server.publish(device("a", verified=2))
        assert names(healthy.next()) == ["a"]


def test_reader_killed_while_stopped_leaves_no_stream(
    agent_server: Serving, reader: "subprocess.Popen[str]"
) -> None:
    reader.send_signal(signal.SIGSTOP)
    for number in range(1, 50):
        agent_server.publish(*large_list(number))
    reader.kill()
    reader.wait()
    eventually(lambda: streams(agent_server) == 0, "its stream has ended")


def test_busy_stream_does_not_starve_other_calls(agent_server: Serving) -> None:
    """The status answers while a publisher never rests and readers take all they can."""
    with watch_health(agent_server.health) as greedy:
        for number in range(1, 300):
            agent_server.publish(*large_list(number))
            if number % 100 == 0:
                assert streams(agent_server) == 1
        while greedy.next().devices[-1].message != f"{299:08d}":
            pass
