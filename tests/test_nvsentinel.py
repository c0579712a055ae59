"""Events for NVSentinel: what they say, when they are sent, and that another implementation decodes them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import pytest
from agents import short_tmp
from cluster_agents import XID, StepClock, device, report, report_without_gpus
from cluster_api import NODE
from patience import PATIENCE_S
from wire.google import message_class
from wire.serving import eventually

from agent.cluster.sentinel_publisher import DEVICE_S, DEVICES_FILE, MISSING_S, RETRY_MAX_S, SentinelPublisher
from agent.config.config import Config
from agent.errors import ConfigError
from agent.model.health import DeviceHealth, Repair, Severity
from agent.model.reading import SourceState
from agent.model.time import NS
from agent.serve.platform_connector import ACTIONS, health_event

METHOD = "HealthEventOccurredV1"
STORE_ONLY, EXECUTE = 2, 1
SICK = ("gpu-0", XID)
__all__ = ["short_tmp"]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer of a busy machine is late."""
    monkeypatch.setattr("agent.serve.platform_connector.SEND_S", PATIENCE_S)


class PlatformConnector:
    """Server of NVSentinel's API by grpcio, which decodes with Google's protobuf."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.calls: list[Any] = []
        self.refusal: grpc.StatusCode | None = None

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(2)
        self._server = grpc.server(self._pool)
        handler = grpc.unary_unary_rpc_method_handler(
            self._receive,
            request_deserializer=message_class("datamodels", "HealthEvents").FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )
        service = grpc.method_handlers_generic_handler("datamodels.PlatformConnector", {METHOD: handler})
        self._server.add_generic_rpc_handlers((service,))
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(None).wait(PATIENCE_S)
        self._pool.shutdown()

    def _receive(self, request: Any, context: grpc.ServicerContext) -> Any:
        if self.refusal is not None:
            context.abort(self.refusal, "not now")
        self.calls.append(request)
        return message_class("datamodels", "Nothing")()

    def events(self) -> list[Any]:
        """Return the events of all calls, and forget them."""
        found = [event for call in self.calls for event in call.events]
        self.calls.clear()
        return found


@pytest.fixture
def connector(short_tmp: Path) -> Iterator[PlatformConnector]:
    with PlatformConnector(short_tmp / "connector.sock") as server:
        yield server


def publisher_of(
    connector: PlatformConnector, clock: StepClock, *, remediate: bool = False, state_dir: Path | None = None
) -> SentinelPublisher:
    return SentinelPublisher(
        connector.socket, NODE, remediate=remediate, state_dir=state_dir, clock=clock, jitter=lambda: 0.5
    )


def test_first_report_sends_every_device_in_one_call(connector: PlatformConnector) -> None:
    clock = StepClock()
    publisher = publisher_of(connector, clock)
    gpu = device(*SICK)._replace(
        message="gpu.xid.79: lost", attributes=(("uuid", "GPU-1"), ("pciBusId", "0000:41:00.0"))
    )
    publisher.handle_report(report(gpu, device("cpu-node0", kind="cpu")))
    publisher.step()
    assert len(connector.calls) == 1
    cpu, sick = connector.events()
    assert (sick.is_fatal, sick.is_healthy, list(sick.error_code)) == (True, False, ["gpu.xid.79"])
    assert (sick.agent, sick.component_class, sick.check_name) == ("drahealth", "GPU", "DRADeviceHealth")
    assert (sick.node_name, sick.message, sick.recommended_action) == (NODE, "gpu.xid.79: lost", 2)
    assert [(event.entity_type, event.entity_value) for event in sick.entities_impacted] == [
        ("GPU_UUID", "GPU-1"),
        ("PCI", "0000:41:00.0"),
        ("DRA_DEVICE", f"{NODE}/gpu-0"),
    ]
    assert sick.generated_timestamp.seconds == int(clock.now.wall_s)
    assert dict(sick.metadata) == {"severity": "unhealthy", "kind": "gpu"}
    assert (cpu.is_fatal, cpu.is_healthy, cpu.recommended_action) == (False, True, 0)
    assert {event.processing_strategy for event in (cpu, sick)} == {STORE_ONLY}
    assert (publisher.status.events, publisher.status.error) == (2, "")


def test_remediation_is_executed_only_if_asked(connector: PlatformConnector) -> None:
    publisher = publisher_of(connector, StepClock(), remediate=True)
    publisher.handle_report(report(device(*SICK)))
    publisher.step()
    assert [event.processing_strategy for event in connector.events()] == [EXECUTE]


def test_degraded_and_unknown_devices_are_neither_fatal_nor_healthy() -> None:
    for severity in (Severity.DEGRADED, Severity.UNKNOWN):
        event = health_event(device("a", ("x.y", severity)), NODE, (), 1.0, remediate=False)
        assert (event.is_fatal, event.is_healthy) == (False, False)


def test_every_repair_has_an_action() -> None:
    assert set(ACTIONS) == set(Repair)


def test_unchanged_device_is_not_sent_again(connector: PlatformConnector) -> None:
    clock = StepClock()
    publisher = publisher_of(connector, clock)
    for evidence in ("1 error", "2 errors"):
        publisher.handle_report(report(device(*SICK, evidence=evidence)))
        publisher.step()
        clock.advance(3600)
    assert len(connector.events()) == 1


def test_recovered_and_removed_devices_are_sent_as_healthy(connector: PlatformConnector) -> None:
    clock = StepClock()
    publisher = publisher_of(connector, clock)
    for devices in ([device(*SICK), device("gpu-1", XID)], [device("gpu-0")], [device("gpu-0")]):
        publisher.handle_report(report(*devices))
        publisher.step()
        clock.advance(60)
    assert [(len(call.events), [event.is_healthy for event in call.events]) for call in connector.calls] == [
        (2, [False, False]),
        (2, [True, True]),
    ]


@pytest.mark.parametrize("restarts", [False, True])
def test_replaced_gpu_ends_the_fault_of_the_former_gpu(
    connector: PlatformConnector, tmp_path: Path, restarts: bool
) -> None:
    clock = StepClock()
    publisher = publisher_of(connector, clock, state_dir=tmp_path)
    publisher.handle_report(report(device(*SICK)._replace(attributes=(("uuid", "GPU-OLD"),))))
    publisher.step()
    connector.events()
    clock.advance(60)
    publisher.handle_report(report(device(*SICK)))  # the lost GPU has no UUID now
    publisher.step()
    assert not any(event.is_healthy for event in connector.events())
    clock.advance(60)
    if restarts:
        publisher = publisher_of(connector, clock, state_dir=tmp_path)
        publisher.handle_report(report(device("gpu-1")))  # the GPU is not reported yet
        publisher.step()
        assert [event.entities_impacted[-1].entity_value for event in connector.events()] == [f"{NODE}/gpu-1"]
    publisher.handle_report(report(device("gpu-0")._replace(attributes=(("uuid", "GPU-NEW"),))))
    clock.advance(60)
    publisher.step()
    first = [
        (event.is_healthy, event.entities_impacted[0].entity_value)
        for event in connector.events()
        if event.entities_impacted[0].entity_type == "GPU_UUID"
    ]
    assert first == [(True, "GPU-OLD"), (True, "GPU-NEW")]
    assert (tmp_path / DEVICES_FILE).read_bytes() == b"[]"


def test_device_removed_before_a_restart_is_healthy_after_ten_minutes(
    connector: PlatformConnector, tmp_path: Path
) -> None:
    clock = StepClock()
    publisher = publisher_of(connector, clock, state_dir=tmp_path)
    publisher.handle_report(report(device(*SICK), device("gpu-1", XID)))
    publisher.step()
    connector.events()
    publisher = publisher_of(connector, clock, state_dir=tmp_path)
    publisher.handle_report(report(device("gpu-1", XID)))
    assert publisher.step() == MISSING_S
    assert [event.is_healthy for event in connector.events()] == [False]
    for pause_s, healthy in ((MISSING_S - 1, []), (1, [f"{NODE}/gpu-0"]), (3600, [])):
        clock.advance(pause_s)
        publisher.step()
        events = connector.events()
        assert all(event.is_healthy for event in events)
        assert [event.entities_impacted[-1].entity_value for event in events] == healthy
    assert b"gpu-0" not in (tmp_path / DEVICES_FILE).read_bytes()


def test_gpu_not_listed_by_nvml_after_a_restart_keeps_its_fault(
    connector: PlatformConnector, tmp_path: Path
) -> None:
    clock = StepClock()
    publisher = publisher_of(connector, clock, state_dir=tmp_path)
    publisher.handle_report(report(device(*SICK)))
    publisher.step()
    publisher = publisher_of(connector, clock, state_dir=tmp_path)
    connector.events()
    healthy = {SourceState.STALLED: [], SourceState.ABSENT: [True]}
    for state, sent in healthy.items():
        publisher.handle_report(report_without_gpus(state))
        publisher.step()
        clock.advance(MISSING_S)
        publisher.step()
        events = [
            event for event in connector.events() if "gpu-0" in event.entities_impacted[-1].entity_value
        ]
        assert [event.is_healthy for event in events] == sent


def test_flapping_device_is_sent_once_in_half_a_minute(connector: PlatformConnector) -> None:
    clock = StepClock()
    publisher = publisher_of(connector, clock)
    for number in range(600):
        publisher.handle_report(report(device(*(SICK if number % 2 else ("gpu-0",)))))
        publisher.step()
        clock.advance(1)
    assert 0 < len(connector.events()) <= 600 / DEVICE_S + 1


def test_unknown_device_is_sent_after_a_minute(connector: PlatformConnector) -> None:
    clock = StepClock()
    publisher = publisher_of(connector, clock)
    unknown = device("gpu-0", ("source.stalled", Severity.UNKNOWN))

    def sent_after(shown: DeviceHealth, seconds: float) -> list[bool]:
        """Return whether the devices of the events are healthy, once a device was shown for some time."""
        publisher.handle_report(report(shown))
        publisher.step()
        clock.advance(seconds)
        publisher.step()
        return [event.is_healthy for event in connector.events()]

    assert sent_after(device(*SICK), 59) == [False]
    assert sent_after(unknown, 59) == []
    assert sent_after(device(*SICK), 59) == []  # the fault of before has lasted
    assert sent_after(unknown, 60) == [False]
    assert sent_after(device("gpu-0"), 60) == [True]


def test_healthy_event_leaves_out_the_entities_of_a_faulty_device(connector: PlatformConnector) -> None:
    clock, names = StepClock(), (("uuid", "GPU-1"), ("pciBusId", "0000:41:00.0"))
    publisher = publisher_of(connector, clock)
    host, fault = device("gpu-0")._replace(attributes=names), ("gpu.lost", Severity.UNHEALTHY)
    sick = device("gpu-0", fault)._replace(attributes=names)
    declared = sick._replace(driver="gpu.example.com", device="card")

    def show_and_read(*devices: DeviceHealth) -> list[list[str]]:
        """Return the entities of each healthy event about these devices."""
        publisher.handle_report(report(*devices))
        publisher.step()
        clock.advance(DEVICE_S)
        healthy = [event for event in connector.events() if event.is_healthy]
        return [[entity.entity_type for entity in event.entities_impacted] for event in healthy]

    every = ["GPU_UUID", "PCI", "DRA_DEVICE"]
    assert show_and_read(sick, declared) == []
    assert show_and_read(host, declared) == [["DRA_DEVICE"]]  # the driver still reports the fault
    assert show_and_read(sick, declared) == []
    assert show_and_read(sick) == [["DRA_DEVICE"]]  # a device that its driver no longer declares
    assert show_and_read(host) == [every]


def test_healthy_event_after_a_restart_spares_hardware_of_restored_fault(
    connector: PlatformConnector, tmp_path: Path
) -> None:
    clock, uuid = StepClock(), (("uuid", "GPU-1"),)
    host = device("gpu-0")._replace(attributes=uuid)
    declared = device("card", XID, driver="gpu.example.com")._replace(attributes=uuid)
    publisher = publisher_of(connector, clock, state_dir=tmp_path)
    publisher.handle_report(report(host, declared))
    publisher.step()
    connector.events()
    publisher = publisher_of(connector, clock, state_dir=tmp_path)
    publisher.handle_report(report(host))  # the driver has not declared its device again yet
    publisher.step()
    (event,) = connector.events()
    assert event.is_healthy
    assert [entity.entity_type for entity in event.entities_impacted] == ["DRA_DEVICE"]


def test_faults_end_under_the_former_name_of_the_node(connector: PlatformConnector, tmp_path: Path) -> None:
    clock, uuid = StepClock(), (("uuid", "GPU-1"),)
    sick = device(*SICK)._replace(attributes=uuid)
    of_driver = device("card", XID, driver="gpu.example.com")._replace(pool="rack-1", attributes=uuid)
    publisher = SentinelPublisher(
        connector.socket, "old", remediate=False, state_dir=tmp_path, clock=clock, jitter=lambda: 0.5
    )
    publisher.handle_report(report(sick._replace(pool="old"), of_driver))
    publisher.step()
    connector.events()
    publisher = publisher_of(connector, clock, state_dir=tmp_path)
    publisher.handle_report(report(sick, of_driver))
    for seconds in (0, MISSING_S):
        clock.advance(seconds)
        publisher.step()
    assert [
        (event.node_name, event.is_healthy, [entity.entity_value for entity in event.entities_impacted])
        for event in connector.events()
    ] == [
        (NODE, False, ["GPU-1", f"{NODE}/gpu-0"]),
        ("old", True, ["GPU-1", "gpu.example.com/rack-1/card"]),
        (NODE, False, ["GPU-1", "gpu.example.com/rack-1/card"]),
        ("old", True, ["GPU-1", "old/gpu-0"]),
    ]


def test_absent_connector_gets_the_newest_state_once(
    short_tmp: Path, caplog: pytest.LogCaptureFixture
) -> None:
    connector, clock = PlatformConnector(short_tmp / "connector.sock"), StepClock()
    publisher = publisher_of(connector, clock)
    end_ns = clock.now.mono_ns + 3600 * NS
    attempts = 0
    while clock.now.mono_ns < end_ns:
        publisher.handle_report(report(device(*(SICK if attempts % 2 else ("gpu-0",)))))
        clock.advance(publisher.step())
        attempts += 1
    assert attempts <= 3600 / RETRY_MAX_S + 10
    assert caplog.text.count("no platform connector answers") == 1
    with connector:
        publisher.handle_report(report(device("gpu-1", XID)))
        clock.advance(2 * RETRY_MAX_S)
        publisher.step()
        (event,) = connector.events()
    assert event.entities_impacted[0].entity_value == f"{NODE}/gpu-1"
    assert publisher.status.error == ""


def test_refused_events_are_sent_later(connector: PlatformConnector) -> None:
    clock = StepClock()
    publisher = publisher_of(connector, clock)
    connector.refusal = grpc.StatusCode.RESOURCE_EXHAUSTED
    publisher.handle_report(report(device(*SICK)))
    pause_s = publisher.step()
    assert "RESOURCE_EXHAUSTED not now" in publisher.status.error
    connector.refusal = None
    clock.advance(pause_s)
    publisher.step()
    assert len(connector.events()) == 1


def test_thread_sends_a_change_and_ends(connector: PlatformConnector) -> None:
    publisher = SentinelPublisher(connector.socket, NODE, remediate=False)
    publisher.start()
    publisher.handle_report(report(device(*SICK)))
    eventually(lambda: bool(connector.calls), "event arrives")
    assert publisher.close(PATIENCE_S)


def test_remediation_without_a_socket_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has no effect without nvsentinel\.socket"):
        Config(node_name=NODE, nvsentinel_remediate=True)
