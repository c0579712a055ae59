"""The health service in a driver's own grpclib server, read as a kubelet of either version reads it."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from agents import HEALTHY, UNHEALTHY, UNKNOWN, short_tmp, stream_end
from embedding import DriverServer, until
from patience import PATIENCE_S
from test_embed_monitor import BAD, BrokenClock, fault, hardware, monitor_of, sysfs, wait_until_failed
from wire.google import Watcher, names, watch_health
from wire.raw import RawClient
from wire.serving import eventually

from agent.embed.devices import Device
from agent.embed.monitor import Monitor
from agent.model.health import Finding, Health
from agent.node.pods.queries import query_report

__all__ = ["hardware", "short_tmp", "sysfs"]


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    """Return a running monitor with a healthy device."""
    made = monitor_of()
    made.add(Device("d-0"))
    made.check(every_s=0.1, timeout_s=PATIENCE_S, devices="d-*", name="well")(lambda _: None)
    with made:
        until(made, "d-0", Health.HEALTHY)
        yield made


@pytest.fixture
def driver_server(monitor: Monitor, short_tmp: Path) -> Iterator[DriverServer]:
    with DriverServer(short_tmp / "dra.sock", monitor.health_service(), monitor.codec) as made:
        yield made


def wait_for_health(watcher: Watcher, name: str, health: int, code: str = "") -> None:
    """Read the stream until a device has this health and cause."""
    while True:
        for entry in watcher.next().devices:
            if entry.device.device_name == name and entry.health == health and entry.message.startswith(code):
                return


@pytest.mark.parametrize("version", ["v1", "v1alpha1"])
def test_full_list_comes_first_then_changes(
    monitor: Monitor, driver_server: DriverServer, version: str
) -> None:
    answer: list[Finding | None] = [None]
    monitor.check(every_s=0.1, timeout_s=PATIENCE_S, devices="x-0", raise_after=1, clear_after=1, name="x")(
        lambda _: answer[0]
    )
    with watch_health(driver_server.path, version) as kubelet:
        first = kubelet.next()
        assert names(first) == ["d-0"]
        assert first.devices[0].device.pool_name == "node-a"
        assert first.devices[0].health == HEALTHY
        monitor.add(Device("x-0"))
        wait_for_health(kubelet, "x-0", HEALTHY)
        answer[0] = BAD
        wait_for_health(kubelet, "x-0", UNHEALTHY, "demo.bad: 1 of 2. Advice: replace it")
        answer[0] = None
        wait_for_health(kubelet, "x-0", HEALTHY)
        monitor.remove("x-0")
        wait_for_health(kubelet, "x-0", UNKNOWN, "declared.gone")


def test_devices_verified_again_are_sent_again(driver_server: DriverServer) -> None:
    with watch_health(driver_server.path) as kubelet:
        first, second = kubelet.next(), kubelet.next()
        assert names(second) == ["d-0"]
        assert second.devices[0].last_updated_time >= first.devices[0].last_updated_time


def test_stream_that_its_client_ends_leaves_no_log_line(
    monitor: Monitor, short_tmp: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.node.pods.queries.SOCKET_TIMEOUT_S", PATIENCE_S)
    caplog.set_level(logging.INFO)
    service = monitor.health_service()
    with DriverServer(short_tmp / "dra.sock", service, monitor.codec) as driver_server:
        with watch_health(driver_server.path) as kubelet:
            kubelet.next()
        assert asyncio.run(query_report(driver_server.path)).devices
        eventually(lambda: service.streams == 0, "the streams have ended")
    assert [record.name for record in caplog.records if record.name.startswith("grpclib")] == []


def test_supported_services_are_the_served_ones(monitor: Monitor) -> None:
    assert monitor.supported_services == ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
    served = {path.split("/")[1] for path in monitor.health_service().__mapping__()}
    assert served == set(monitor.supported_services)


def test_host_devices_are_not_on_the_drivers_stream(hardware: dict[str, object], short_tmp: Path) -> None:
    with monitor_of(**hardware) as monitor:
        assert monitor.wait_ready(PATIENCE_S)
        assert monitor.report is not None
        assert {device.driver for device in monitor.report.devices} == {""}
        with (
            DriverServer(short_tmp / "dra.sock", monitor.health_service(), monitor.codec) as driver_server,
            watch_health(driver_server.path) as kubelet,
        ):
            kubelet.wait_opened()
            monitor.add(Device("d-0"))
            assert names(kubelet.next()) == ["d-0"]


def test_failed_core_is_unknown_on_the_stream_at_once(short_tmp: Path) -> None:
    clock = BrokenClock()
    monitor = monitor_of(clock=clock)
    monitor.add(Device("d-0"))
    monitor.check(every_s=0.1, timeout_s=PATIENCE_S, name="well")(lambda _: None)
    with (
        monitor,
        DriverServer(short_tmp / "dra.sock", monitor.health_service(), monitor.codec) as driver_server,
        watch_health(driver_server.path) as kubelet,
    ):
        wait_for_health(kubelet, "d-0", HEALTHY)
        clock.broken = True
        wait_until_failed(monitor)
        wait_for_health(kubelet, "d-0", UNKNOWN, "agent.failed: OSError")


def test_streams_end_with_the_monitor_and_no_more_begin(
    monitor: Monitor, driver_server: DriverServer
) -> None:
    with watch_health(driver_server.path) as watcher, watch_health(driver_server.path, "v1alpha1") as other:
        for kubelet in (watcher, other):
            assert names(kubelet.next()) == ["d-0"]
        assert monitor.stop(PATIENCE_S)
        gone = (grpc.StatusCode.UNAVAILABLE, "health monitor stopped")
        assert (stream_end(watcher), stream_end(other)) == (gone, gone)
        with watch_health(driver_server.path) as late:
            assert stream_end(late) == gone


def test_service_of_a_stopped_monitor_begins_no_stream(monitor: Monitor, short_tmp: Path) -> None:
    monitor.stop()
    with (
        DriverServer(short_tmp / "dra.sock", monitor.health_service(), monitor.codec) as driver_server,
        watch_health(driver_server.path) as kubelet,
    ):
        assert stream_end(kubelet) == (grpc.StatusCode.UNAVAILABLE, "health monitor stopped")


def test_two_servers_in_two_loops_have_separate_services(
    monitor: Monitor, driver_server: DriverServer, short_tmp: Path
) -> None:
    service = monitor.health_service()
    with (
        DriverServer(short_tmp / "other.sock", service, monitor.codec) as other,
        watch_health(driver_server.path) as watcher,
        watch_health(other.path) as two,
    ):
        assert names(watcher.next()) == names(two.next()) == ["d-0"]
        assert service.streams == 1
    eventually(lambda: service.streams == 0, "the stream has ended")


def test_ended_services_are_no_subscribers_of_the_monitor(monitor: Monitor, short_tmp: Path) -> None:
    subscribers = len(monitor._hub._subscribers)
    for number in range(3):
        with (
            DriverServer(
                short_tmp / f"{number}.sock", monitor.health_service(), monitor.codec
            ) as driver_server,
            watch_health(driver_server.path) as kubelet,
        ):
            assert names(kubelet.next()) == ["d-0"]
    assert (len(monitor._hub._subscribers), len(monitor._services)) == (subscribers, 0)


def test_failed_device_is_on_the_stream_before_the_prepare_ends(
    monitor: Monitor, driver_server: DriverServer
) -> None:
    with watch_health(driver_server.path) as kubelet:
        assert names(kubelet.next()) == ["d-0"]
        monitor.report_faults([fault("d-0")])
        assert monitor.wait_delivered([fault("d-0")], PATIENCE_S)
        wait_for_health(kubelet, "d-0", UNHEALTHY, "demo.dead: it does not answer")


def test_unread_stream_delays_nothing(monitor: Monitor, driver_server: DriverServer) -> None:
    with (
        RawClient(driver_server.path, window=0) as unread,
        watch_health(driver_server.path) as kubelet,
    ):
        unread.call()
        unread.next_headers()
        monitor.report_faults([fault("d-0")])
        assert monitor.wait_delivered([fault("d-0")], PATIENCE_S)
        wait_for_health(kubelet, "d-0", UNHEALTHY, "demo.dead: it does not answer")
