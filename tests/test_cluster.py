"""Lease and conditions of the Node: written by one agent, rarely, whatever the API server and the clock
do."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster_agents import DRIVER, XID, SteppedAgent, device, report, report_without_gpus
from cluster_api import NAMESPACE, NODE, ClusterApi, Refusal, Request, documented_removal, granted_rights
from kube_api import patient_client
from patience import PATIENCE_S
from wire.serving import eventually

from agent.cluster.cluster_publisher import RETRY_MAX_S, ClusterPublisher, open_cluster_publisher
from agent.cluster.device_events import UNDECIDED_S
from agent.cluster.node_objects import (
    DURATION_S,
    KIND_CONDITIONS,
    MESSAGE_CHARS,
    UNKNOWN_S,
    decide_conditions,
    lease_name,
    load_identity,
)
from agent.config.api_access import ApiAccess
from agent.config.config import Config
from agent.devices.inventory import DeviceKind
from agent.errors import ConfigError, ResourceBusyError
from agent.model.health import DeviceHealth, Severity
from agent.model.reading import SourceState
from agent.serve.kube_api.api_server import ApiServer

__all__ = ["patient_client"]
pytestmark = pytest.mark.usefixtures("patient_client")
DEGRADED = ("gpu.ecc.correctable_rate", Severity.DEGRADED)
SILENT = ("gpu.silent", Severity.UNKNOWN)
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/drahealth-{NODE}"


@pytest.fixture
def api() -> Iterator[ClusterApi]:
    with ClusterApi() as server:
        yield server


def condition_of(api: ClusterApi, type_: str = "DRADevicesHealthy") -> tuple[str, str, str]:
    found = api.conditions()[type_]
    return found["status"], found["reason"], found["message"]


# --- content of conditions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "status", "reason", "message"),
    [
        ([device()], "True", "AllDevicesHealthy", "all devices are healthy"),
        ([device(), device("gpu-1", DEGRADED)], "True", "DevicesDegraded", "gpu-1: gpu.ecc.correctable_rate"),
        ([device("a", DEGRADED), device("b", SILENT)], "Unknown", "DevicesUnknown", "b: gpu.silent"),
        ([device("gpu-0", SILENT), device("gpu-1", XID)], "False", "DevicesUnhealthy", "gpu-1: gpu.xid.79"),
        (
            [device("a", XID, driver="gpu.example.com"), device("gpu-1", XID)],
            "False",
            "DevicesUnhealthy",
            "gpu.example.com/node-a/a: gpu.xid.79; gpu-1: gpu.xid.79",
        ),
        ([], "Unknown", "NoDevices", "the node has no known devices"),
    ],
)  # fmt: skip
def test_condition_follows_the_worst_device(
    devices: list[object], status: str, reason: str, message: str
) -> None:
    (found,) = decide_conditions(report(*devices), ())  # type: ignore[arg-type]
    assert found == ("DRADevicesHealthy", status, reason, message)


def test_condition_of_a_kind_exists_only_with_devices_of_the_kind() -> None:
    found = decide_conditions(
        report(device("cpu-node0", kind="cpu"), device("gpu-0", XID)), ("gpu", "cpu", "nic")
    )
    assert [(found_condition.type, found_condition.status) for found_condition in found] == [
        ("DRADevicesHealthy", "False"),
        ("DRACPUDevicesHealthy", "True"),
        ("DRAGPUDevicesHealthy", "False"),
    ]


@pytest.mark.parametrize(
    ("state", "passes", "status"),
    [
        (SourceState.STARTING, 0, "Unknown"),
        (SourceState.STALLED, 0, "Unknown"),
        (SourceState.STALLED, 1, "True"),
        (SourceState.ABSENT, 0, "True"),
    ],
)
def test_condition_is_unknown_until_nvml_lists_the_gpus(state: SourceState, passes: int, status: str) -> None:
    cpus = report_without_gpus(state, passes)
    found: dict[str, Any] = {"DRAGPUDevicesHealthy": {}, "DRANICDevicesHealthy": {}}
    decided = decide_conditions(cpus, ("gpu", "mig", "cpu", "nic"), found)
    expected = {"DRADevicesHealthy": status, "DRACPUDevicesHealthy": "True"}
    if status == "Unknown":
        expected["DRAGPUDevicesHealthy"] = status
        assert decided[0].message == "nvml: devices not listed yet"
    assert {found_condition.type: found_condition.status for found_condition in decided} == expected
    sick = replace(report(device("gpu-0", XID)), sources=cpus.sources)
    assert {condition.status for condition in decide_conditions(sick, ("gpu",), found)} == {"False"}


def test_condition_of_gpus_is_kept_while_nvml_does_not_list_them(api: ClusterApi) -> None:
    SteppedAgent(api, k8s_condition_kinds=("gpu",)).show(device("gpu-0", XID))
    agent = SteppedAgent(api, k8s_condition_kinds=("gpu",))
    agent.publisher.handle_report(report_without_gpus(SourceState.STALLED))
    types = ("DRADevicesHealthy", "DRAGPUDevicesHealthy")
    for seconds, status in ((UNKNOWN_S - 1, "False"), (20, "Unknown")):
        agent.run_for(seconds)
        assert {condition_of(api, type_)[0] for type_ in types} == {status}


NIC_DRIVER = "nic.example.com"
NIC_TEXT = f"{NIC_DRIVER}/{NODE}/nic-0: nic.missing"
UNDECLARED_TEXT = f"{NIC_DRIVER}: devices not declared yet"


def faulty_nic_agent(api: ClusterApi, *others: DeviceHealth, **settings: Any) -> SteppedAgent:
    """Return an agent that starts after a reboot; before it, a driver declared a faulty NIC."""
    settings |= {"k8s_condition_kinds": ("gpu", "nic"), "k8s_events": False}
    first = SteppedAgent(api, **settings)
    first.show(*others, device("nic-0", ("nic.missing", Severity.UNHEALTHY), kind="nic", driver=NIC_DRIVER))
    first.clock.advance(120)
    return SteppedAgent(api, clock=first.clock, **settings)


def test_condition_of_a_faulty_device_waits_for_its_declaration(api: ClusterApi) -> None:
    agent = faulty_nic_agent(api)
    types = ("DRADevicesHealthy", "DRANICDevicesHealthy")
    for seconds, expected in (
        (UNKNOWN_S - 1, ("False", "DevicesUnhealthy", NIC_TEXT)),
        (UNDECIDED_S - UNKNOWN_S - 10, ("Unknown", "DevicesUnknown", UNDECLARED_TEXT)),
    ):
        agent.run_for(seconds, lambda: [device()])
        assert {condition_of(api, type_) for type_ in types} == {expected}
    agent.run_for(30, lambda: [device()])
    assert condition_of(api)[0] == "True"
    assert "DRANICDevicesHealthy" not in api.conditions()


def test_declaration_wait_begins_when_the_api_server_answers(api: ClusterApi) -> None:
    settings = {"k8s_taint_rules": (NIC_DRIVER,), "drivers": (NIC_DRIVER,), "taint_quiet_s": 60}
    agent = faulty_nic_agent(api, **settings)
    (rule,) = api.objects_of("devicetaintrules")
    api.refuse = lambda request: Refusal(503, "ServiceUnavailable")
    agent.run_for(UNDECIDED_S + 100, lambda: [device()])
    api.refuse = lambda request: None
    agent.run_for(UNDECIDED_S - 10, lambda: [device()])
    assert condition_of(api) == ("Unknown", "DevicesUnknown", UNDECLARED_TEXT)
    assert api.objects_of("devicetaintrules") == [rule]
    agent.run_for(2 * RETRY_MAX_S, lambda: [device()])
    assert condition_of(api)[0] == "True"
    assert api.objects_of("devicetaintrules") == []


def test_condition_follows_at_once_when_the_driver_declares(api: ClusterApi) -> None:
    agent = faulty_nic_agent(api)
    agent.run_for(2 * UNKNOWN_S, lambda: [device()])
    agent.run_for(20, lambda: [device(), device("nic-0", kind="nic", driver=NIC_DRIVER)])
    assert condition_of(api)[0] == condition_of(api, "DRANICDevicesHealthy")[0] == "True"


def test_condition_without_devices_of_an_absent_driver_is_true_at_once(api: ClusterApi) -> None:
    agent = faulty_nic_agent(api, device("gpu-0", XID))
    agent.show(device("gpu-0"))
    assert condition_of(api)[0] == "False"
    assert condition_of(api, "DRAGPUDevicesHealthy")[0] == "True"


def test_condition_names_an_absent_driver_after_unhealthy_devices(api: ClusterApi) -> None:
    agent = faulty_nic_agent(api)
    agent.run_for(20, lambda: [device("gpu-0", XID)])
    assert condition_of(api)[::2] == ("False", f"gpu-0: gpu.xid.79; {UNDECLARED_TEXT}")
    agent.run_for(2 * UNKNOWN_S, lambda: [device("gpu-0")])
    assert condition_of(api)[::2] == ("Unknown", UNDECLARED_TEXT)


def test_condition_with_a_cut_message_waits_for_all_absent_drivers(api: ClusterApi) -> None:
    agent = faulty_nic_agent(api, *(device(f"gpu-{number}", XID) for number in range(90)))
    assert NIC_DRIVER not in condition_of(api)[2]
    agent.run_for(2 * UNKNOWN_S, lambda: [device("gpu-0")])
    assert condition_of(api)[::2] == ("Unknown", UNDECLARED_TEXT)


def test_condition_follows_at_once_when_nvml_finds_no_gpu(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    for state, status in ((SourceState.STARTING, "Unknown"), (SourceState.ABSENT, "True")):
        agent.publisher.handle_report(report_without_gpus(state))
        agent.run_for(20)
        assert condition_of(api)[0] == status


def test_every_kind_of_device_has_a_condition_type() -> None:
    assert set(KIND_CONDITIONS) == set(DeviceKind)


def test_starting_agent_decides_no_condition() -> None:
    assert decide_conditions(report(device(), starting=True), ("gpu",)) == ()


def test_message_of_many_devices_is_bounded_and_counts_nothing() -> None:
    many = [
        decide_conditions(report(*(device(f"gpu-{n}", XID) for n in range(count))), ())[0]
        for count in (90, 128)
    ]
    assert many[0].message == many[1].message
    assert len(many[0].message) <= MESSAGE_CHARS
    assert many[0].message.endswith("; and others")


def test_message_is_the_same_when_only_evidence_moves() -> None:
    texts = {decide_conditions(report(device("gpu-0", XID, evidence=f"{n} errors")), ()) for n in range(3)}
    assert len(texts) == 1


# --- writes -------------------------------------------------------------------------------------------------


def test_first_step_creates_the_lease_and_the_condition(api: ClusterApi) -> None:
    agent = SteppedAgent(api, k8s_events=False)
    agent.show(device("gpu-0", XID))
    assert condition_of(api) == ("False", "DevicesUnhealthy", "gpu-0: gpu.xid.79")
    lease = api.objects[LEASE]
    assert lease["spec"]["holderIdentity"] == "agent-1"
    assert lease["metadata"]["ownerReferences"][0]["uid"] == api.node["metadata"]["uid"]
    assert api.used == granted_rights({"lease", "conditions"}) - {
        right for right in api.rights if (right.verb, right.resource) == ("update", "leases")
    }


def test_agent_without_a_report_neither_takes_nor_renews_the_lease(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    agent.run_for(300)
    assert api.requests == []
    agent.show(device())
    agent.run_for(5)
    assert agent.publisher.status.is_held


def test_idle_agent_makes_one_request_in_ten_seconds(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    agent.run_for(30, lambda: [device()])
    api.requests.clear()
    agent.run_for(3600, lambda: [device()])
    puts = [request for request in api.requests if request.verb == "update"]
    others = [request for request in api.requests if request.verb != "update"]
    assert len(puts) == 360
    assert [other.method for other in others] == ["GET"] * 6  # the comparison every ten minutes


def test_transition_time_moves_with_the_status_only(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    agent.show(device("gpu-0", XID))
    first = api.conditions()["DRADevicesHealthy"]["lastTransitionTime"]
    agent.clock.advance(60)
    agent.show(device("gpu-0", XID), device("gpu-1", XID))
    assert condition_of(api)[2] == "gpu-0: gpu.xid.79; gpu-1: gpu.xid.79"
    assert api.conditions()["DRADevicesHealthy"]["lastTransitionTime"] == first
    agent.clock.step_wall(-86_400)
    agent.clock.advance(60)
    agent.show(device("gpu-0", XID))
    assert api.conditions()["DRADevicesHealthy"]["lastTransitionTime"] == first
    agent.clock.advance(60)
    agent.show(device())
    assert api.conditions()["DRADevicesHealthy"]["lastTransitionTime"] != first


@pytest.mark.parametrize("causes", [(), (XID,)], ids=["True", "False"])
def test_condition_is_unknown_after_a_minute_without_readings(
    api: ClusterApi, causes: tuple[Any, ...]
) -> None:
    agent = SteppedAgent(api, k8s_events=False)
    agent.show(device("gpu-0", *causes))
    before = condition_of(api)
    agent.run_for(UNKNOWN_S - 5, lambda: [device("gpu-0", SILENT)])
    assert condition_of(api) == before
    agent.run_for(20)  # without another report
    assert condition_of(api) == ("Unknown", "DevicesUnknown", "gpu-0: gpu.silent")
    agent.run_for(20, lambda: [device("gpu-0", *causes)])
    assert condition_of(api) == before


def test_restart_with_devices_that_are_read_late_moves_no_condition(api: ClusterApi) -> None:
    first = SteppedAgent(api, k8s_events=False)
    first.show(device("gpu-0", XID))
    since = api.conditions()["DRADevicesHealthy"]["lastTransitionTime"]
    second = SteppedAgent(api, clock=first.clock, k8s_events=False)
    second.run_for(UNKNOWN_S / 2, lambda: [device("gpu-0", SILENT)])
    second.run_for(2 * UNKNOWN_S, lambda: [device("gpu-0", XID)])
    assert condition_of(api)[0] == "False"
    assert api.conditions()["DRADevicesHealthy"]["lastTransitionTime"] == since


def test_unknown_times_that_are_apart_do_not_add_up(api: ClusterApi) -> None:
    agent = SteppedAgent(api, k8s_events=False)
    agent.show(device())
    for _ in range(3):
        agent.run_for(UNKNOWN_S / 2, lambda: [device("gpu-0", SILENT)])
        agent.run_for(20, lambda: [device()])
    assert condition_of(api)[0] == "True"
    assert [request.path for request in api.requests if request.path.endswith("/status")] == [
        f"/api/v1/nodes/{NODE}/status"
    ]


def test_flapping_device_writes_the_condition_once_in_ten_seconds(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    flaps = iter(range(10**6))
    agent.show(device())
    api.requests.clear()
    agent.run_for(600, lambda: [device("gpu-0", XID) if next(flaps) % 2 else device()])
    assert 0 < sum(request.path.endswith("/status") for request in api.requests) <= 61


def test_flapping_cause_that_no_condition_shows_costs_no_request(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    agent.show(device())
    api.requests.clear()
    flaps = iter(range(10**6))
    cause = ("gpu.throttle.power", Severity.INFO)
    agent.run_for(3600, lambda: [device("gpu-0", *([cause] if next(flaps) % 2 else []))])
    assert sum(request.method == "GET" for request in api.requests) <= 7  # the comparison every ten minutes


def test_restarted_agent_adopts_lease_and_condition_without_a_write(api: ClusterApi) -> None:
    first = SteppedAgent(api, k8s_events=False)
    first.show(device("gpu-0", XID))
    since = api.conditions()["DRADevicesHealthy"]["lastTransitionTime"]
    api.writes()
    first.clock.advance(5)
    second = SteppedAgent(api, clock=first.clock, k8s_events=False)
    second.show(device("gpu-0", XID))
    assert [write.verb for write in api.writes()] == ["update"]
    assert api.objects[LEASE]["spec"]["leaseTransitions"] == 0
    assert api.conditions()["DRADevicesHealthy"]["lastTransitionTime"] == since


def test_condition_that_others_removed_is_restored(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    agent.show(device())
    api.put(f"/api/v1/nodes/{NODE}", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
    agent.run_for(700, lambda: [device()])
    assert condition_of(api)[0] == "True"


def test_condition_of_a_kind_that_is_configured_no_longer_is_removed(api: ClusterApi) -> None:
    agent = SteppedAgent(api, k8s_condition_kinds=("gpu",))
    agent.show(device())
    api.set_condition("Ready", "True")
    assert set(api.conditions()) == {"DRADevicesHealthy", "DRAGPUDevicesHealthy", "Ready"}
    agent.clock.advance(20)
    agent.publisher.reconfigure(Config(node_name=NODE, k8s_enabled=True))
    agent.publisher.step()
    assert set(api.conditions()) == {"DRADevicesHealthy", "Ready"}


def test_documented_command_removes_the_conditions_of_the_agent_only(api: ClusterApi) -> None:
    agent = SteppedAgent(api, k8s_condition_kinds=("gpu",))
    agent.show(device("gpu-0", XID))
    api.set_condition("Ready", "True")
    client = ApiServer(ApiAccess(api.url))
    client.apply(f"/api/v1/nodes/{NODE}/status", documented_removal(NODE), manager="drahealth")
    assert set(api.conditions()) == {"Ready"}


def test_condition_of_another_manager_is_taken_over_with_a_warning(
    api: ClusterApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.set_condition("DRADevicesHealthy", "True", manager="kubectl-edit")
    SteppedAgent(api).show(device("gpu-0", XID))
    assert condition_of(api)[0] == "False"
    assert 'conflict with "kubectl-edit"' in caplog.text
    assert "taken over" in caplog.text


# --- one agent writes ---------------------------------------------------------------------------------------


def test_second_agent_writes_nothing_until_the_lease_ends(
    api: ClusterApi, caplog: pytest.LogCaptureFixture
) -> None:
    first = SteppedAgent(api)
    first.show(device())
    second = SteppedAgent(api, identity="agent-2", clock=first.clock)
    api.writes()
    for _ in range(6):
        first.publisher.step()
        second.show(device("gpu-0", XID))
        first.clock.advance(10)
    assert condition_of(api)[0] == "True"
    assert not second.publisher.status.is_held
    assert second.publisher.status.holder == "agent-1"
    assert caplog.text.count("held by another agent, agent-1") == 1
    second.run_for(DURATION_S + 20)  # the first has ended
    assert condition_of(api)[0] == "False"
    assert api.objects[LEASE]["spec"]["holderIdentity"] == "agent-2"
    assert api.objects[LEASE]["spec"]["leaseTransitions"] == 1


def test_agent_that_lost_its_lease_stops_to_write(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    agent.show(device())
    lease = api.objects[LEASE]
    api.put(LEASE, {**lease, "spec": {**lease["spec"], "holderIdentity": "agent-2"}})
    agent.clock.advance(10)
    agent.show(device("gpu-0", XID))
    assert condition_of(api)[0] == "True"
    assert agent.publisher.status.holder == "agent-2"


@pytest.mark.parametrize(("slow", "status"), [("GET", "other"), ("PATCH", "other"), ("", "False")])
def test_condition_is_not_written_after_the_lease_was_lost_meanwhile(
    api: ClusterApi, slow: str, status: str
) -> None:
    agent = SteppedAgent(api, k8s_events=False)
    agent.show(device())
    api.set_condition("DRADevicesHealthy", "other")
    agent.clock.advance(11)

    def lose_lease(request: Request) -> None:
        if request.method == slow and request.path.startswith("/api/v1/nodes"):
            agent.clock.advance(DURATION_S)
            lease = api.objects[LEASE]
            api.put(LEASE, {**lease, "spec": {**lease["spec"], "holderIdentity": "agent-2"}})

    api.refuse = lose_lease
    agent.show(device("gpu-0", XID))
    assert api.conditions()["DRADevicesHealthy"]["status"] == status
    assert agent.publisher.status.is_held is (not slow)


def test_clock_of_another_machine_does_not_end_its_lease(api: ClusterApi) -> None:
    first = SteppedAgent(api)
    first.clock.step_wall(-(10**6))
    first.show(device())
    second = SteppedAgent(api, identity="agent-2")
    second.show(device("gpu-0", XID))
    assert condition_of(api)[0] == "True"


def test_deleted_lease_is_created_again(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    agent.show(device())
    del api.objects[LEASE]
    agent.clock.advance(10)
    agent.publisher.step()
    assert api.objects[LEASE]["spec"]["holderIdentity"] == "agent-1"


def test_node_that_is_created_again_gets_new_objects(api: ClusterApi) -> None:
    agent = SteppedAgent(api, k8s_events=False, k8s_taint_rules=(DRIVER,))
    sick = device("gpu-0", XID, driver=DRIVER)
    agent.run_for(60, lambda: [sick])
    (rule,) = [path for path in api.objects if "/devicetaintrules/" in path]
    api.replace_node()
    assert LEASE not in api.objects
    assert rule not in api.objects
    agent.run_for(30, lambda: [sick])
    owner = {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": api.node["metadata"]["uid"]}
    for path in (LEASE, rule):
        assert api.objects[path]["metadata"]["ownerReferences"] == [owner]
    assert condition_of(api)[0] == "False"


def test_rule_of_a_former_release_gets_an_owner(api: ClusterApi) -> None:
    first = SteppedAgent(api, k8s_events=False, k8s_taint_rules=(DRIVER,))
    sick = device("gpu-0", XID, driver=DRIVER)
    first.show(sick)
    (path,) = [path for path in api.objects if "/devicetaintrules/" in path]
    rule = api.objects[path]
    metadata = {key: value for key, value in rule["metadata"].items() if key != "ownerReferences"}
    api.put(path, {**rule, "metadata": metadata})
    SteppedAgent(api, clock=first.clock, k8s_events=False, k8s_taint_rules=(DRIVER,)).show(sick)
    assert api.objects[path]["metadata"]["ownerReferences"][0]["name"] == NODE
    assert api.objects[path]["spec"] == rule["spec"]


def test_name_of_a_lease_is_valid_for_the_longest_node_name() -> None:
    names = {lease_name(".".join(["n" * 60] * 4) + end) for end in ("a", "b")}
    assert len(names) == 2
    assert all(len(name) <= 253 for name in names)


def test_identity_lasts_over_restarts(tmp_path: Path) -> None:
    first = load_identity(tmp_path, NODE)
    assert load_identity(tmp_path, NODE) == first
    (tmp_path / "cluster-writer").write_text("damaged")
    assert load_identity(tmp_path, NODE) not in {first, f"{NODE}_damaged"}


def test_identity_without_a_state_directory_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_identity(tmp_path / "missing", NODE).startswith(f"{NODE}_")
    assert "waits until the Lease that it holds now has expired" in caplog.text


@pytest.mark.parametrize("answer_s", [1.0, 5.0, 9.0])
def test_lease_is_renewed_while_a_slow_api_server_gets_many_objects(api: ClusterApi, answer_s: float) -> None:
    agent = SteppedAgent(api, k8s_taint_rules=(DRIVER,))
    storm = [device(f"gpu-{number:03}", XID, driver=DRIVER) for number in range(128)]
    renewals, ages = [0.0], []

    def answer_slowly(request: Request) -> None:
        agent.clock.advance(answer_s)
        if "/leases" in request.path:
            renewals.append(agent.clock.now.wall_s)
        elif request.method != "GET":
            ages.append(agent.clock.now.wall_s - renewals[-1])

    api.refuse = answer_slowly
    agent.run_for(7200, lambda: storm)
    assert max(ages) < DURATION_S - 10
    assert len(api.objects_of("devicetaintrules")) == 128
    assert len(api.objects_of("events")) >= 10


def test_agent_that_gets_the_lease_back_writes_at_once(api: ClusterApi) -> None:
    agent = SteppedAgent(api, k8s_events=False, k8s_taint_rules=(DRIVER,))
    sick = device("gpu-0", XID, driver=DRIVER)
    agent.show(sick)
    lease, (rule,) = api.objects[LEASE], [path for path in api.objects if "/devicetaintrules/" in path]
    api.put(LEASE, {**lease, "spec": {**lease["spec"], "holderIdentity": "agent-2"}})
    agent.run_for(10, lambda: [sick])
    del api.objects[rule]
    api.set_condition("DRADevicesHealthy", "True")
    agent.run_for(DURATION_S + 20, lambda: [sick])
    assert agent.publisher.status.is_held
    assert condition_of(api)[0] == "False"
    assert rule in api.objects


def test_end_of_the_agent_waits_for_one_request_only(api: ClusterApi) -> None:
    agent = SteppedAgent(api)

    def end_agent(request: Request) -> None:
        if "/events" in request.path:
            agent.publisher.close(0)

    api.refuse = end_agent
    agent.show(*(device(f"gpu-{number}", XID) for number in range(8)))
    assert len(api.objects_of("events")) == 1


# --- an API server that fails -------------------------------------------------------------------------------


def test_api_server_away_for_a_day_costs_one_attempt_a_minute(
    api: ClusterApi, caplog: pytest.LogCaptureFixture
) -> None:
    agent = SteppedAgent(api)
    agent.show(device())
    api.refuse = lambda request: Refusal(503, "ServiceUnavailable")
    api.requests.clear()
    caplog.clear()
    flaps = iter(range(10**9))
    agent.run_for(86_400, lambda: [device("gpu-0", XID) if next(flaps) % 2 else device()])
    assert len(api.requests) <= 86_400 / RETRY_MAX_S + 40
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 3
    api.refuse = lambda request: None
    api.requests.clear()
    agent.run_for(2 * RETRY_MAX_S, lambda: [device("gpu-1", XID)])
    assert condition_of(api) == ("False", "DevicesUnhealthy", "gpu-1: gpu.xid.79")
    assert sum(request.path.endswith("/status") for request in api.requests) == 1
    assert agent.publisher.status.error == ""


@pytest.mark.parametrize("status", [409, 429, 500, 503])
def test_refused_condition_is_written_later(api: ClusterApi, status: int) -> None:
    refused: list[Request] = []

    def refuse_twice(request: Request) -> Refusal | None:
        if not request.path.endswith("/status") or len(refused) == 2:
            return None
        refused.append(request)
        return Refusal(status, "Refused")

    api.refuse = refuse_twice
    agent = SteppedAgent(api)
    agent.show(device("gpu-0", XID))
    agent.run_for(30)
    assert len(refused) == 2
    assert condition_of(api)[0] == "False"
    assert agent.publisher.status.error == ""


@pytest.mark.parametrize(
    "garbage", [{}, [], {"kind": "Status", "metadata": {}}, {"kind": "Lease", "metadata": None}]
)
@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH"])
def test_answer_of_another_program_is_no_lease_and_no_node(
    api: ClusterApi, caplog: pytest.LogCaptureFixture, method: str, garbage: object
) -> None:
    agent = SteppedAgent(api, k8s_events=False)
    agent.show(device())
    api.garbage = lambda request: garbage if request.method == method else None
    agent.run_for(300, lambda: [device("gpu-0", XID)])
    assert len(caplog.records) <= 6
    api.garbage = lambda request: None
    agent.run_for(2 * RETRY_MAX_S, lambda: [device("gpu-1", XID)])
    assert agent.publisher.status.is_held
    assert agent.publisher.status.error == ""
    assert condition_of(api)[2] == "gpu-1: gpu.xid.79"


def test_retry_after_of_the_api_server_is_respected(api: ClusterApi) -> None:
    agent = SteppedAgent(api)
    api.refuse = lambda request: Refusal(429, "TooManyRequests", retry_after="120")
    agent.show(device())
    api.requests.clear()
    agent.run_for(119)
    assert api.requests == []
    agent.run_for(2)
    assert api.requests != []


def test_missing_right_is_named_and_stops_nothing_else(
    api: ClusterApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.rights = granted_rights({"lease"}) | {right for right in api.rights if right.resource == "nodes"}
    agent = SteppedAgent(api)
    agent.show(device())
    agent.run_for(60)
    assert agent.publisher.status.is_held
    assert "patch of nodes/status" in agent.publisher.status.error
    assert caplog.text.count("patch of nodes/status") == 1


def test_unknown_node_is_named(api: ClusterApi) -> None:
    del api.objects[f"/api/v1/nodes/{NODE}"]
    agent = SteppedAgent(api)
    agent.show(device())
    assert f"/api/v1/nodes/{NODE} not found" in agent.publisher.status.error


# --- thread and start ---------------------------------------------------------------------------------------


def test_thread_writes_after_a_changed_report_and_ends(api: ClusterApi, tmp_path: Path) -> None:
    config = Config(node_name=NODE, k8s_enabled=True, state_dir=tmp_path)
    publisher = ClusterPublisher(
        config, ApiServer(ApiAccess(api.url)), namespace=NAMESPACE, identity="a", jitter=lambda: 0.0
    )
    publisher.start()
    publisher.handle_report(report(device()))
    eventually(lambda: "DRADevicesHealthy" in api.conditions(), "condition is written")
    assert publisher.close(PATIENCE_S)


def test_enabled_without_an_api_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    config = Config(node_name=NODE, k8s_enabled=True, state_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"set k8s\.kubeconfig"):
        open_cluster_publisher(config)


def test_missing_kubeconfig_may_come_later(tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    config = Config(node_name=NODE, k8s_enabled=True, state_dir=tmp_path, k8s_kubeconfig=file)
    with pytest.raises(ResourceBusyError, match=f"file {file} does not exist yet"):
        open_cluster_publisher(config)
    file.write_text("")
    with pytest.raises(ConfigError, match=f"kubeconfig {file}: is empty"):
        open_cluster_publisher(config)


def test_kubeconfig_of_the_settings_is_used(api: ClusterApi, tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(
        f"current-context: c\nclusters: [{{name: c, cluster: {{server: '{api.url}'}}}}]\n"
        "contexts: [{name: c, context: {cluster: c}}]\n"
    )
    config = Config(
        node_name=NODE, k8s_enabled=True, state_dir=tmp_path, k8s_kubeconfig=file, k8s_namespace=NAMESPACE
    )
    publisher = open_cluster_publisher(config)
    publisher.handle_report(report(device()))
    publisher.step()
    assert condition_of(api)[0] == "True"
    assert publisher.status.lease == f"{NAMESPACE}/drahealth-{NODE}"
