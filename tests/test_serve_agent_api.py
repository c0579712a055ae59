"""``drahealth.v1.Agent`` on ``agent.sock``: complete reports, and the state of the agent."""

import errno
import os
import select
import struct
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from patience import PATIENCE_S
from wire.google import Watcher, message_class, watch_health
from wire.raw import DATA, V1, WINDOW_UPDATE, RawClient, frame
from wire.serving import DRIVER, Serving, at, device, eventually, report, unhealthy

from agent.engine.loop import ClearRequestQueue
from agent.model.cleared_faults import ClearedFault, ClearResult
from agent.model.health import Blame, Cause, Repair, Severity
from agent.model.reading import SourceSample, SourceState
from agent.model.report import Report
from agent.model.snapshot import NativeCoreStats
from agent.serve.agent_api.encode import REPAIRS
from agent.system.process_stat import ProcessStat

WATCH = "/drahealth.v1.Agent/Watch"
REPORT = message_class("drahealth.v1", "Report")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
"""Resolution of the kernel's CPU times, so that sums of floating-point seconds compare exactly."""
WINDOW = (1 << 31) - 1
"""Largest possible window, so that a slow reader does not delay the server."""


@pytest.fixture
def agent_server(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path) as agent_server:
        yield agent_server


def watch(agent_server: Serving) -> Watcher:
    return Watcher(agent_server.agent, WATCH, message_class("drahealth.v1", "WatchRequest"), REPORT)


def status(agent_server: Serving) -> Any:
    reply = message_class("drahealth.v1", "StatusReply")
    with grpc.insecure_channel(f"unix:{agent_server.agent}") as channel:
        call = channel.unary_unary("/drahealth.v1.Agent/Status", response_deserializer=reply.FromString)
        return call(b"", timeout=PATIENCE_S)


def full_report() -> Report:
    source = SourceSample("cpus", SourceState.FAILING, 5, 10**9, 2, "online: EIO", 7)
    degraded = device("b", severity=Severity.DEGRADED, message="cpu.throttled: 12 events")
    return replace(
        report([device("a"), degraded, unhealthy("c"), unhealthy("d")], second=4),
        sources=(source,),
        core=NativeCoreStats(passes=11, kernel_bytes=4096),
        groups=3,
    )


def test_every_report_is_complete(agent_server: Serving) -> None:
    with watch(agent_server) as watcher:
        watcher.wait_opened()
        for second in (1, 2):
            agent_server.latest.publish(report([device("a"), device("b", verified=second)], second=second))
            message = watcher.next()
            assert [entry.name for entry in message.devices] == ["a", "b"]
            assert message.at.mono_ns == at(second).mono_ns


def test_stalled_watcher_does_not_keep_an_old_report(agent_server: Serving) -> None:
    class TracedReport(Report):
        """Report whose end can be observed: those of the base class have no weak references."""

    with RawClient(agent_server.agent, window=0) as client, RawClient(agent_server.agent) as other:
        old = TracedReport(node="node-a", at=at(1), devices=(device("a"),))
        is_kept = weakref.ref(old)
        agent_server.latest.publish(old)
        for caller in (client, other):
            caller.call(path=WATCH)
        other.next_of(DATA, 1)
        del old
        agent_server.latest.publish(report([device("a")], second=2))
        other.next_of(DATA, 1)
        eventually(lambda: is_kept() is None, "the end of the report")


def test_late_watcher_gets_newest_report_at_once(agent_server: Serving) -> None:
    for second in (1, 2, 3):
        agent_server.latest.publish(report([device("a")], second=second))
    with watch(agent_server) as watcher:
        assert watcher.next().at.mono_ns == at(3).mono_ns


def test_all_watchers_get_complete_reports_and_the_last(agent_server: Serving) -> None:
    watchers = [watch(agent_server) for _ in range(8)]
    try:
        for watcher in watchers:
            watcher.wait_opened()
        for second in range(1, 51):
            agent_server.latest.publish(report([device(f"d{n}") for n in range(20)], second=second))
        for watcher in watchers:
            while (message := watcher.next()).at.mono_ns != at(50).mono_ns:
                assert len(message.devices) == 20
    finally:
        for watcher in watchers:
            watcher.__exit__(None, None, None)


def test_encoding_a_report_delays_no_kubelet_stream(agent_server: Serving) -> None:
    """The order of arrival is that of the kernel's epoll, which does not depend on when the test reads it."""
    with (
        RawClient(agent_server.agent, window=WINDOW) as watcher,
        RawClient(agent_server.health, window=WINDOW) as kubelet,
        select.epoll() as ready,
    ):
        for client, path in ((watcher, WATCH), (kubelet, V1)):
            client.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", WINDOW - 65_535)))
            client.call(path=path)
            assert client.next_headers()[":status"] == "200"
            ready.register(client.sock, select.EPOLLIN | select.EPOLLET)

        def first(second: int) -> int:
            """Return the descriptor of the client that receives that second's report first."""
            status(agent_server)  # after its answer, the server has sent everything before
            while ready.poll(0):
                pass
            # enough devices that the report takes far longer than the list
            agent_server.publish(*(device(f"d{n}", verified=second) for n in range(3000)))
            for client in (watcher, kubelet):
                assert select.select([client.sock], [], [], PATIENCE_S)[0]
            (descriptor, _), *_ = ready.poll()
            for client in (watcher, kubelet):
                whole_message(client)
            return descriptor

        assert {first(second) for second in range(1, 11)} == {kubelet.sock.fileno()}


def whole_message(client: RawClient) -> bytes:
    """Return the next message, of any number of frames."""
    _, data = client.next_of(DATA, 1)
    while len(data) < 5 + int.from_bytes(data[1:5], "big"):
        data += client.next_of(DATA, 1)[1]
    return data[5:]


def test_status_counts_streams_of_each_socket(agent_server: Serving) -> None:
    def counts() -> dict[str, int]:
        return {entry.socket: entry.streams for entry in status(agent_server).subscribers}

    health = f"drivers/{DRIVER}.sock"
    assert counts() == {health: 0, "agent.sock": 0}
    with (
        watch(agent_server) as first_watcher,
        watch_health(agent_server.health) as second_watcher,
        watch_health(agent_server.health) as third_watcher,
    ):
        for watcher in (first_watcher, second_watcher, third_watcher):
            watcher.wait_opened()
        assert counts() == {health: 2, "agent.sock": 1}
    eventually(lambda: counts() == {health: 0, "agent.sock": 0}, "all streams have ended")


def test_status_has_values_of_the_process(agent_server: Serving) -> None:
    process = psutil.Process()
    reply = status(agent_server)
    assert (reply.version, reply.pid) == ("9.9.9", os.getpid())
    assert reply.started_wall_s == pytest.approx(process.create_time())
    assert reply.cpu_s > 0
    assert round(reply.cpu_s * TICKS_PER_S) <= round(sum(process.cpu_times()[:2]) * TICKS_PER_S)
    assert reply.rss_bytes > 1 << 20
    assert reply.threads >= 2
    assert reply.descriptors >= 5


def test_status_without_descriptors_is_unavailable_with_the_reason(
    agent_server: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Path) -> ProcessStat:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/proc/self/stat")

    monkeypatch.setattr("agent.serve.agent_api.service.read_process_stat", fail)
    with pytest.raises(grpc.RpcError) as caught:
        status(agent_server)
    assert (caught.value.code(), caught.value.details()) == (
        grpc.StatusCode.UNAVAILABLE,
        "status of the agent's process: cannot be read: [Errno 24] Too many open files: '/proc/self/stat'",
    )
    assert "Traceback" not in caplog.text


def test_status_before_first_report_has_no_devices(agent_server: Serving) -> None:
    reply = status(agent_server)
    assert (reply.node, reply.publications, len(reply.tallies)) == ("", 0, 0)


def test_status_summarizes_newest_report(agent_server: Serving) -> None:
    agent_server.latest.publish(report())
    agent_server.latest.publish(full_report())
    reply = status(agent_server)
    assert (reply.node, reply.publications, reply.at.mono_ns) == ("node-a", 2, at(4).mono_ns)
    tallies = [(tally.severity, tally.devices) for tally in reply.tallies]
    assert tallies == [(int(Severity.UNHEALTHY), 2), (int(Severity.DEGRADED), 1), (int(Severity.OK), 1)]
    assert (reply.sources[0].detail, reply.sources[0].failures) == ("online: EIO", 2)
    assert (reply.core.passes, reply.core.kernel_bytes, reply.groups) == (11, 4096, 3)


def test_status_counts_devices_by_repair(agent_server: Serving) -> None:
    repairs = [Repair.NONE, Repair.RESET_DEVICE, Repair.REBOOT_NODE, Repair.RESET_DEVICE]
    cause = Cause("a.b", Severity.UNHEALTHY, Blame.HARDWARE, "", "", at(1))
    agent_server.latest.publish(
        Report(
            "node-a",
            at(1),
            tuple(
                device(f"d{n}", causes=(replace(cause, repair=repair),)) for n, repair in enumerate(repairs)
            ),
        )
    )
    found = [(count.repair, count.devices) for count in status(agent_server).repairs]
    assert found == [(REPAIRS[Repair.REBOOT_NODE], 1), (REPAIRS[Repair.RESET_DEVICE], 2)]


def test_shutdown_ends_stream_with_reason(agent_server: Serving) -> None:
    with watch(agent_server) as watcher:
        watcher.wait_opened()
        assert agent_server.thread.stop(PATIENCE_S)
        with pytest.raises(grpc.RpcError) as raised:
            watcher.next()
        assert raised.value.details() == "agent shutting down"


def clear(agent_server: Serving) -> grpc.RpcError:
    """Return the error of a request to clear the faults of a device."""
    request = message_class("drahealth.v1", "ClearRequest")(device="gpu-0")
    with (
        grpc.insecure_channel(f"unix:{agent_server.agent}") as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary("/drahealth.v1.Agent/Clear")(request.SerializeToString(), timeout=PATIENCE_S)
    return caught.value


def test_clear_before_first_report_is_unavailable(tmp_path: Path) -> None:
    with Serving(tmp_path, clear_requests=ClearRequestQueue(lambda _: None)) as agent_server:
        assert clear(agent_server).code() is grpc.StatusCode.UNAVAILABLE


def test_clear_that_the_engine_does_not_answer_is_withdrawn(tmp_path: Path) -> None:
    seen: list[int] = []
    queue = ClearRequestQueue(lambda requests: seen.append(len(requests)))
    with Serving(tmp_path, clear_requests=queue) as agent_server:
        agent_server.publish(device("gpu-0"))
        error = clear(agent_server)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "no fault was cleared; try again" in str(error.details())
        assert status(agent_server).publications == 1
    assert seen == [1, 0]


class AcceptedRequest(Future[ClearResult]):
    """Request that takes effect, and that the engine answers when the service tries to withdraw it."""

    def submit(self, *_: object) -> Future[ClearResult]:
        """Let the request take effect."""
        self.set_running_or_notify_cancel()
        return self

    def cancel(self) -> bool:
        """Answer the request."""
        withdrawn = super().cancel()
        if not self.done():
            self.set_result(ClearResult(1, (ClearedFault("gpu-0", "gpu.xid.79", 1.0, 0, 1),)))
        return withdrawn


def test_clear_that_takes_effect_at_its_limit_is_answered(tmp_path: Path) -> None:
    with Serving(tmp_path, clear_requests=AcceptedRequest()) as agent_server:
        agent_server.publish(device("gpu-0"))
        with grpc.insecure_channel(f"unix:{agent_server.agent}") as channel:
            call = channel.unary_unary(
                "/drahealth.v1.Agent/Clear",
                request_serializer=message_class("drahealth.v1", "ClearRequest").SerializeToString,
                response_deserializer=message_class("drahealth.v1", "ClearReply").FromString,
            )
            reply = call(message_class("drahealth.v1", "ClearRequest")(device="gpu-0"), timeout=PATIENCE_S)
    assert [fault.code for fault in reply.cleared] == ["gpu.xid.79"]


def test_clear_without_an_engine_is_unimplemented(agent_server: Serving) -> None:
    assert clear(agent_server).code() is grpc.StatusCode.UNIMPLEMENTED
