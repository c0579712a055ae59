"""Events of the Node and of pods: one per fault, few while a device flaps, bounded in a storm."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from claim_samples import known_pod, listed_prepared, source_answers
from cluster_agents import DRIVER, XID, SteppedAgent, device
from cluster_api import NODE, ClusterApi, Refusal, Request
from kube_api import patient_client

from agent.cluster.device_events import (
    COMBINE_MESSAGES,
    COMBINED,
    EVENT_S,
    MESSAGE_CHARS,
    NODE_BURST,
    OBJECT_BURST,
    UNDECIDED_S,
    DeviceEvent,
    EventObject,
    EventRecorder,
    TokenBucket,
)
from agent.cluster.node_objects import MAINTENANCE_TYPES, UNKNOWN_S
from agent.config.api_access import ApiAccess
from agent.devices.consumers.consumer_map import build_consumer_map
from agent.model.claim import DeviceRef
from agent.model.claim_sources import AllocatedDevice
from agent.model.consumers import ConsumerMap
from agent.model.health import Severity
from agent.model.time import NS, Instant
from agent.serve.kube_api.api_server import ApiServer

__all__ = ["patient_client"]
pytestmark = pytest.mark.usefixtures("patient_client")
LOST = ("gpu.lost", Severity.UNHEALTHY)
SILENT = ("gpu.silent", Severity.UNKNOWN)
DEGRADED = ("gpu.ecc.correctable_rate", Severity.DEGRADED)


@pytest.fixture
def api() -> Iterator[ClusterApi]:
    with ClusterApi() as server:
        yield server


def users_of(*names: str, phase: str = "Running") -> ConsumerMap:
    """Return the map of a node on which one pod uses each device."""
    claims = [
        listed_prepared(f"c-{name}", AllocatedDevice(DeviceRef(DRIVER, NODE, name), ()), pods=[f"p-{name}"])
        for name in names
    ]
    pods = [known_pod(f"p-{name}", f"claim-c-{name}", phase=phase) for name in names]
    return build_consumer_map(source_answers(checkpoint=claims, pods_api=pods))


def events(api: ClusterApi, kind: str = "Node") -> list[dict[str, Any]]:
    """Return the events of objects of a kind."""
    return [obj for obj in api.objects_of("events") if obj["involvedObject"]["kind"] == kind]


def reasons(api: ClusterApi, kind: str = "Node") -> list[tuple[str, int]]:
    return sorted((event["reason"], event["count"]) for event in events(api, kind))


def event_writes(api: ClusterApi) -> int:
    """Return the number of requests that wrote events."""
    return sum("/events" in request.path for request in api.requests)


# --- content of events --------------------------------------------------------------------------------------


def test_fault_is_one_event_of_the_node_with_code_and_advice(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    agent.run_for(600, lambda: [device("gpu-0", XID, evidence="off the bus"), device("gpu-1")])
    (event,) = events(api)
    assert (event["type"], event["reason"], event["count"]) == ("Warning", "DeviceUnhealthy", 1)
    assert event["message"] == (
        "[gpu.xid.79] gpu-0 is Unhealthy: off the bus. Advice: reset the GPU (repair: reset-device)"
    )
    assert event["involvedObject"]["uid"] == api.node["metadata"]["uid"]
    assert event["metadata"]["namespace"] == "default"
    assert event["source"] == {"component": "drahealth", "host": NODE}
    assert (event["reportingComponent"], event["reportingInstance"]) == ("drahealth", NODE)  # for the policy


def test_pod_that_uses_the_device_has_an_event_of_its_own(api: ClusterApi) -> None:
    agent = SteppedAgent(api, drivers=(DRIVER,))
    agent.consumers = users_of("gpu-0", "gpu-1")
    agent.show(device("gpu-0", XID), device("gpu-1"))
    (event,) = events(api, "Pod")
    assert event["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": "team-a",
        "name": "pod-p-gpu-0",
        "uid": "p-gpu-0",
    }
    assert event["message"].startswith("[gpu.xid.79] device gpu-0 of this pod is Unhealthy: ")
    assert event["metadata"]["namespace"] == "team-a"


def test_pod_that_begins_to_use_a_device_with_a_fault_has_an_event(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    broken = device("gpu-0", XID, driver=DRIVER)
    agent.show(broken)
    assert events(api, "Pod") == []
    agent.consumers = users_of("gpu-0")
    agent.run_for(20, lambda: [broken])
    assert reasons(api, "Pod") == [("DeviceUnhealthy", 1)]


def test_ended_pod_and_degraded_device_cause_no_event_of_a_pod(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    agent.consumers = users_of("gpu-0", phase="Succeeded")
    agent.show(device("gpu-0", XID, driver=DRIVER))
    agent.consumers = users_of("gpu-1")
    agent.run_for(20, lambda: [device("gpu-1", DEGRADED, driver=DRIVER)])
    assert events(api, "Pod") == []
    assert ("DeviceDegraded", 1) in reasons(api)


def test_unknown_device_has_an_event_after_a_minute(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    agent.run_for(UNKNOWN_S - 10, lambda: [device("gpu-0", SILENT)])
    assert events(api) == []
    agent.run_for(30, lambda: [device("gpu-0", SILENT)])
    assert reasons(api) == [("DeviceUnknown", 1)]


def test_recovered_device_has_one_event(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    agent.show(device("gpu-0", XID))
    agent.run_for(600, lambda: [device("gpu-0")])
    assert reasons(api) == [("DeviceRecovered", 1), ("DeviceUnhealthy", 1)]


def test_events_can_be_turned_off(api: ClusterApi) -> None:
    agent = SteppedAgent(api, k8s_events=False)
    agent.run_for(60, lambda: [device("gpu-0", XID)])
    assert events(api) == []


# --- limits -------------------------------------------------------------------------------------------------


def test_flapping_device_has_one_event_per_code_in_five_minutes(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    agent.consumers = users_of("gpu-0")
    flaps = iter(range(10**6))
    hours = 2
    agent.run_for(
        hours * 3600, lambda: [device("gpu-0", *((XID, LOST) if next(flaps) % 2 else ()), driver=DRIVER)]
    )
    for kind, codes in (("Node", 2), ("Pod", 2)):
        found = events(api, kind)
        warnings = sum(event["count"] for event in found if event["type"] == "Warning")
        assert 0 < warnings <= codes * (hours * 3600 / EVENT_S + 1)
    recoveries = sum(event["count"] for event in events(api) if event["type"] == "Normal")
    assert 0 < recoveries <= hours * 3600 / EVENT_S + 1
    assert len(events(api)) <= 4  # repetitions are counted up


def test_storm_of_128_devices_is_bounded(api: ClusterApi) -> None:
    names = [f"gpu-{number:03}" for number in range(128)]
    agent = SteppedAgent(api)
    agent.consumers = users_of(*names)
    storm = [device(name, XID, driver=DRIVER) for name in names]
    agent.show(*storm)
    assert event_writes(api) == NODE_BURST
    agent.run_for(3600, lambda: storm)
    of_node = events(api)
    assert sum(event["count"] for event in of_node) <= OBJECT_BURST + 12
    assert len(of_node) == COMBINE_MESSAGES
    assert sum(event["message"].startswith(COMBINED) for event in of_node) == 1
    assert len(events(api, "Pod")) == 128  # each pod has its event, the last after some minutes
    assert event_writes(api) <= NODE_BURST + 3600 / 3


def test_api_server_away_for_a_day_gets_the_newest_faults_once(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    agent.show(device("gpu-0"))
    api.refuse = lambda request: Refusal(503, "ServiceUnavailable")
    flaps = iter(range(10**9))
    agent.run_for(86_400, lambda: [device("gpu-0", XID) if next(flaps) % 2 else device("gpu-0")])
    api.refuse = lambda request: None
    agent.run_for(300, lambda: [device("gpu-0"), device("gpu-1", LOST)])
    assert [event["message"][:17] for event in events(api)] == ["[gpu.lost] gpu-1 "]


def test_event_that_the_api_server_forgot_is_created_again(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    agent.show(device("gpu-0", XID))
    for path in [path for path in api.objects if "/events/" in path]:
        del api.objects[path]
    agent.run_for(EVENT_S, lambda: [device("gpu-0")])
    agent.run_for(60, lambda: [device("gpu-0", XID)])
    assert ("DeviceUnhealthy", 1) in reasons(api)


@pytest.mark.parametrize("status", [429, 500])
def test_refused_event_is_written_later(api: ClusterApi, status: int) -> None:
    refused: list[Request] = []

    def refuse_twice(request: Request) -> Refusal | None:
        if "/events" not in request.path or len(refused) == 2:
            return None
        refused.append(request)
        return Refusal(status, "Refused")

    api.refuse = refuse_twice
    agent = SteppedAgent(api)
    agent.run_for(60, lambda: [device("gpu-0", XID)])
    assert len(refused) == 2
    assert reasons(api) == [("DeviceUnhealthy", 1)]


def test_pod_in_a_namespace_that_ends_stops_no_other_event(
    api: ClusterApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.refuse = lambda request: (
        Refusal(403, "Forbidden", "namespace is being terminated") if "/team-a/" in request.path else None
    )
    agent = SteppedAgent(api)
    agent.consumers = users_of("gpu-0")
    agent.run_for(60, lambda: [device("gpu-0", XID, driver=DRIVER), device("gpu-1", LOST)])
    assert reasons(api) == [("DeviceUnhealthy", 1), ("DeviceUnhealthy", 1)]
    assert "event of pod team-a/pod-p-gpu-0" in caplog.text
    assert sum("/team-a/" in request.path for request in api.requests) == 1


@pytest.mark.parametrize("status", [400, 404, 409, 422, 500])
def test_refused_event_of_a_pod_stops_no_other_event(api: ClusterApi, status: int) -> None:
    api.refuse = lambda request: Refusal(status, "Refused") if "/team-a/" in request.path else None
    agent = SteppedAgent(api)
    agent.consumers = users_of("gpu-0", "gpu-1", "gpu-2")
    sick = [device(f"gpu-{number}", XID, driver=DRIVER) for number in range(3)]
    agent.show(*sick)
    assert len(events(api)) == 3
    assert events(api, "Pod") == []
    api.refuse = lambda request: None
    agent.run_for(60, lambda: sick)
    assert len(events(api, "Pod")) == (3 if status in {409, 500} else 0)


@pytest.mark.parametrize("status", [409, 500])
def test_refused_event_of_the_node_stops_no_event_of_a_pod(api: ClusterApi, status: int) -> None:
    api.refuse = lambda request: (
        Refusal(status, "Refused") if request.path.endswith("/namespaces/default/events") else None
    )
    agent = SteppedAgent(api)
    agent.consumers = users_of("gpu-0", "gpu-1")
    sick = [device(f"gpu-{number}", XID, driver=DRIVER) for number in range(2)]
    agent.show(*sick)
    assert (len(events(api, "Pod")), events(api)) == (2, [])
    api.refuse = lambda request: None
    agent.run_for(60, lambda: sick)
    assert (len(events(api, "Pod")), len(events(api))) == (2, 2)


def test_missing_right_for_events_loses_no_event(api: ClusterApi) -> None:
    rights = api.rights
    api.rights = frozenset(right for right in rights if right.resource != "events")
    agent = SteppedAgent(api)
    agent.consumers = users_of("gpu-0")
    agent.run_for(60, lambda: [device("gpu-0", XID, driver=DRIVER)])
    assert events(api, "Pod") == []
    api.rights = rights
    agent.run_for(120, lambda: [device("gpu-0", XID, driver=DRIVER)])
    assert (len(events(api, "Pod")), len(events(api))) == (1, 1)


def test_events_before_a_failure_are_not_repeated_after_a_restart(api: ClusterApi, tmp_path: Path) -> None:
    api.refuse = lambda request: (
        Refusal(503, "ServiceUnavailable") if len(events(api)) == 5 and "/events" in request.path else None
    )
    sick = [device(f"gpu-{number}", XID) for number in range(8)]
    first = SteppedAgent(api, state_dir=tmp_path)
    first.show(*sick)
    assert len(events(api)) == 5
    api.refuse = lambda request: None
    first.clock.advance(1)
    second = SteppedAgent(api, state_dir=tmp_path, clock=first.clock)
    second.run_for(60, lambda: sick)
    assert reasons(api) == [("DeviceUnhealthy", 1)] * 8


def test_events_that_wait_for_a_limit_cost_no_request(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    storm = [device(f"gpu-{number:03}", XID) for number in range(128)]
    agent.run_for(60, lambda: storm)
    api.requests.clear()
    agent.run_for(3600, lambda: storm)
    written = event_writes(api)
    assert 0 < written <= 12
    assert sum(request.method == "GET" for request in api.requests) <= written + 6


def test_restarted_agent_repeats_no_event(api: ClusterApi, tmp_path: Path) -> None:
    first = SteppedAgent(api, state_dir=tmp_path)
    first.consumers = users_of("gpu-0")
    sick = [device("gpu-0", XID, driver=DRIVER), device("gpu-1", SILENT)]
    first.run_for(120, lambda: sick)
    assert reasons(api) == [("DeviceUnhealthy", 1), ("DeviceUnknown", 1)]
    second = SteppedAgent(api, state_dir=tmp_path, clock=first.clock)
    second.consumers = first.consumers
    second.clock.step_wall(-86_400)
    second.run_for(900, lambda: sick)
    assert reasons(api) == [("DeviceUnhealthy", 1), ("DeviceUnknown", 1)]
    assert reasons(api, "Pod") == [("DeviceUnhealthy", 1)]
    second.run_for(60, lambda: [device("gpu-0", driver=DRIVER), device("gpu-1", SILENT)])
    assert ("DeviceRecovered", 1) in reasons(api)


def test_restart_of_agent_or_driver_ends_no_fault(api: ClusterApi, tmp_path: Path) -> None:
    first = SteppedAgent(api, state_dir=tmp_path)
    first.consumers = users_of("gpu-0")
    sick, silent = device("gpu-0", XID, driver=DRIVER), device("gpu-0", SILENT, driver=DRIVER)
    first.run_for(2 * EVENT_S, lambda: [sick])
    second = SteppedAgent(api, state_dir=tmp_path, clock=first.clock)
    second.run_for(30, list)  # the driver has not declared its device yet
    second.run_for(30, lambda: [silent])
    second.run_for(30, lambda: [sick])  # the pods are not known yet
    second.consumers = first.consumers
    second.run_for(2 * EVENT_S, lambda: [sick])
    assert reasons(api) == [("DeviceUnhealthy", 1)]
    assert reasons(api, "Pod") == [("DeviceUnhealthy", 1)]
    second.run_for(30, list)
    second.run_for(30, lambda: [device("gpu-0", driver=DRIVER)])
    assert reasons(api) == [("DeviceRecovered", 1), ("DeviceUnhealthy", 1)]


def test_fault_of_a_device_that_is_gone_for_long_is_forgotten(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    sick = device("gpu-0", XID, driver=DRIVER)
    agent.show(sick)
    agent.run_for(2 * UNDECIDED_S, list)
    agent.run_for(30, lambda: [sick])
    assert reasons(api) == [("DeviceUnhealthy", 2)]


NO_UTF8 = b'[[[["Node","n","u",""],["","p","gpu-0"],"gpu\xaelost"],1.0,true]]'


@pytest.mark.parametrize("content", [b'[[["Node"]]]', NO_UTF8])
def test_damaged_file_of_events_costs_one_repetition(
    api: ClusterApi, tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cluster-events.json").write_bytes(content)
    agent = SteppedAgent(api, state_dir=tmp_path)
    assert f"{tmp_path}/cluster-events.json: " in caplog.text
    agent.run_for(60, lambda: [device("gpu-0", XID)])
    assert reasons(api) == [("DeviceUnhealthy", 1)]


def test_missing_file_of_events_is_not_logged(
    api: ClusterApi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SteppedAgent(api, state_dir=tmp_path)
    assert "events of the former run" not in caplog.text


def test_step_of_the_clock_causes_no_event(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    agent.show(device("gpu-0", XID))
    for seconds in (86_400 * 365, -86_400 * 400):
        agent.clock.step_wall(seconds)
        agent.run_for(60, lambda: [device("gpu-0", XID)])
    assert reasons(api) == [("DeviceUnhealthy", 1)]


# --- maintenance --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("condition", MAINTENANCE_TYPES)
def test_fault_during_maintenance_is_an_event_once_it_ends(api: ClusterApi, condition: str) -> None:
    agent = SteppedAgent(api)
    agent.show(device("gpu-0"))
    api.set_condition(condition, "True")
    agent.run_for(600, lambda: [device("gpu-0", XID), device("gpu-1", LOST)])
    assert events(api) == []
    assert agent.publisher.status.maintenance == (condition,)
    assert api.conditions()["DRADevicesHealthy"]["status"] == "False"
    api.set_condition(condition, "False")
    agent.run_for(120, lambda: [device("gpu-0"), device("gpu-1", LOST)])
    assert [event["message"][:17] for event in events(api)] == ["[gpu.lost] gpu-1 "]


def test_planned_maintenance_suppresses_no_event(api: ClusterApi) -> None:
    api.set_condition("MaintenancePlanned", "True")
    agent = SteppedAgent(api)
    agent.show(device("gpu-0", XID))
    assert reasons(api) == [("DeviceUnhealthy", 1)]


# --- recorder -----------------------------------------------------------------------------------------------


def test_long_message_and_long_name_are_shortened(api: ClusterApi) -> None:
    recorder = EventRecorder(ApiServer(ApiAccess(api.url)), NODE)
    obj = EventObject("Pod", "p" * 253, "uid", "team-a")
    recorder.record(DeviceEvent(obj, "Warning", "DeviceUnhealthy", "m" * 5000), Instant(NS, 1.0))
    (event,) = api.objects_of("events")
    assert len(event["message"]) == MESSAGE_CHARS
    assert len(event["metadata"]["name"]) <= 253


def test_bucket_refills_with_time_up_to_its_burst() -> None:
    bucket = TokenBucket(2, 10.0)
    for _ in range(2):
        assert bucket.has_token(Instant(0, 0.0))
        bucket.take()
    assert not bucket.has_token(Instant(9 * NS, 0.0))
    assert bucket.has_token(Instant(11 * NS, 0.0))
    bucket.take()
    assert not bucket.has_token(Instant(11 * NS, 0.0))
    assert bucket.has_token(Instant(1000 * NS, 0.0))
    bucket.take()
    bucket.take()
    assert not bucket.has_token(Instant(1000 * NS, 0.0))
