"""DeviceTaintRules: one per Unhealthy device, never for more than one device, and only the agent's own."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from cluster_agents import DRIVER, XID, SteppedAgent, device, report, report_without_gpus
from cluster_api import NODE, ClusterApi, Refusal, granted_rights
from kube_api import patient_client

from agent.cluster.device_events import UNDECIDED_S
from agent.cluster.taint_rules import (
    MANAGED_BY,
    NODE_LABEL,
    REFUSALS_MAX,
    VERSIONS,
    WRITES_MAX,
    check_rule,
    node_label,
    rule_name,
)
from agent.model.claim import DeviceRef
from agent.model.health import DeviceHealth, Severity
from agent.model.reading import SourceState
from agent.model.time import rfc3339

__all__ = ["patient_client"]
pytestmark = pytest.mark.usefixtures("patient_client")
QUIET_S = 60
SICK = ("gpu-0", XID)


@pytest.fixture
def api() -> Iterator[ClusterApi]:
    with ClusterApi() as server:
        yield server


def agent_of(api: ClusterApi, *drivers: str, **settings: Any) -> SteppedAgent:
    """Return an agent that makes rules for the drivers, by default for DRIVER."""
    return SteppedAgent(
        api, k8s_taint_rules=drivers or (DRIVER,), taint_quiet_s=QUIET_S, k8s_events=False, **settings
    )


def declared_device(name: str = "gpu-0", *causes: tuple[str, Severity]) -> DeviceHealth:
    return device(name, *causes, driver=DRIVER)


def rules(api: ClusterApi) -> dict[str, tuple[str, str, str]]:
    """Return key, value and effect of each rule by the device of its selector."""
    return {
        rule["spec"]["deviceSelector"]["device"]: (
            rule["spec"]["taint"]["key"],
            rule["spec"]["taint"].get("value", ""),
            rule["spec"]["taint"]["effect"],
        )
        for rule in api.objects_of("devicetaintrules")
    }


def foreign_rule(name: str, device_name: str, *, manager: str, **labels: str) -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceTaintRule",
        "metadata": {"name": name, "labels": labels, "managedFields": [{"manager": manager}]},
        "spec": {
            "deviceSelector": {"driver": DRIVER, "pool": NODE, "device": device_name},
            "taint": {"key": f"{DRIVER}/admin", "effect": "NoSchedule", "timeAdded": "2026-01-01T00:00:00Z"},
        },
    }


OWN_LABELS = {MANAGED_BY: "drahealth", NODE_LABEL: NODE}
PATH = "/apis/resource.k8s.io/v1/devicetaintrules"


def test_unhealthy_device_has_a_taint_rule_that_selects_only_it(api: ClusterApi) -> None:
    agent = agent_of(api)
    agent.show(declared_device(*SICK), declared_device("gpu-1"), device("gpu-2", XID))
    (rule,) = api.objects_of("devicetaintrules")
    assert rule["spec"] == {
        "deviceSelector": {"driver": DRIVER, "pool": NODE, "device": "gpu-0"},
        "taint": {
            "key": f"{DRIVER}/xid",
            "value": "79",
            "effect": "NoSchedule",
            "timeAdded": rfc3339(agent.clock.now.wall_s),
        },
    }
    assert rule["metadata"]["labels"] == OWN_LABELS
    assert agent.publisher.status.taint_rules == 1


def test_host_device_of_a_served_driver_has_a_rule(api: ClusterApi) -> None:
    agent_of(api, drivers=(DRIVER,)).show(device(*SICK))
    assert set(rules(api)) == {"gpu-0"}


def test_driver_that_is_neither_served_nor_declaring_has_no_rule(api: ClusterApi) -> None:
    agent_of(api).show(device(*SICK))
    assert rules(api) == {}


def test_evicting_code_makes_a_rule_that_evicts(api: ClusterApi) -> None:
    agent_of(api, taint_evict=frozenset({"gpu.xid.*"})).show(declared_device(*SICK))
    assert rules(api) == {"gpu-0": (f"{DRIVER}/xid", "79", "NoExecute")}


def test_degraded_or_unknown_device_has_no_rule(api: ClusterApi) -> None:
    agent_of(api).run_for(
        300,
        lambda: [
            declared_device("a", ("gpu.silent", Severity.UNKNOWN)),
            declared_device("b", ("x.y", Severity.DEGRADED)),
        ],
    )
    assert rules(api) == {}


def test_rule_is_removed_after_the_quiet_time(api: ClusterApi) -> None:
    agent = agent_of(api)
    agent.show(declared_device(*SICK))
    agent.run_for(QUIET_S - 10, lambda: [declared_device()])
    assert set(rules(api)) == {"gpu-0"}
    agent.run_for(30, lambda: [declared_device()])
    assert rules(api) == {}
    assert agent.publisher.status.taint_rules == 0


def test_flapping_device_keeps_its_rule_without_a_write(api: ClusterApi) -> None:
    agent = agent_of(api)
    flaps = iter(range(10**6))
    agent.show(declared_device(*SICK))
    api.requests.clear()
    agent.run_for(1800, lambda: [declared_device(*(SICK if next(flaps) % 2 else ("gpu-0",)))])
    assert set(rules(api)) == {"gpu-0"}
    assert [
        request for request in api.requests if request.method != "GET" and "taintrules" in request.path
    ] == []


def test_rule_is_written_once_when_the_wall_clock_is_set(api: ClusterApi) -> None:
    agent = agent_of(api)
    agent.clock.step_wall(-400 * 86_400)
    agent.show(declared_device(*SICK))
    api.writes()
    agent.clock.step_wall(400 * 86_400)
    added = rfc3339(agent.clock.now.wall_s)
    agent.run_for(1800, lambda: [declared_device(*SICK)])
    assert len([write for write in api.writes() if "taintrules" in write.path]) == 1
    assert [rule["spec"]["taint"]["timeAdded"] for rule in api.objects_of("devicetaintrules")] == [added]


def test_restarted_agent_adopts_its_rules(api: ClusterApi) -> None:
    first = agent_of(api)
    first.show(declared_device(*SICK), declared_device("gpu-1", XID))
    added = {rule["metadata"]["name"]: rule["spec"] for rule in api.objects_of("devicetaintrules")}
    first.clock.advance(3600)
    second = agent_of(api, clock=first.clock)
    api.writes()
    second.show(declared_device(*SICK), declared_device("gpu-1"))
    assert [write for write in api.writes() if "taintrules" in write.path] == []
    assert {rule["metadata"]["name"]: rule["spec"] for rule in api.objects_of("devicetaintrules")} == added
    second.run_for(QUIET_S + 20, lambda: [declared_device(*SICK), declared_device("gpu-1")])
    assert set(rules(api)) == {"gpu-0"}


def test_rule_of_a_gpu_not_listed_by_nvml_after_a_restart_is_kept(api: ClusterApi) -> None:
    first = agent_of(api, drivers=(DRIVER,))
    first.show(device(*SICK))
    second = agent_of(api, clock=first.clock, drivers=(DRIVER,))
    for state, expected in ((SourceState.STALLED, {"gpu-0"}), (SourceState.ABSENT, set())):
        second.publisher.handle_report(report_without_gpus(state))
        second.run_for(QUIET_S + 20)
        assert set(rules(api)) == expected


def test_rules_of_a_driver_that_has_not_declared_yet_are_kept(api: ClusterApi) -> None:
    first = agent_of(api)
    first.show(declared_device(*SICK))
    second = agent_of(api, clock=first.clock)
    second.run_for(600, lambda: [device("gpu-0")])
    assert set(rules(api)) == {"gpu-0"}


def test_rules_of_a_served_driver_wait_for_declarations_after_a_reboot(api: ClusterApi) -> None:
    first = agent_of(api, drivers=(DRIVER,))
    first.show(declared_device(*SICK), declared_device("gpu-3"))
    (before,) = api.objects_of("devicetaintrules")
    for _ in range(2):  # the second agent ends before the driver starts, too
        later = agent_of(api, drivers=(DRIVER,), clock=first.clock)
        later.run_for(300, lambda: [device("gpu-0"), device("gpu-3", XID)])
        assert api.objects_of("devicetaintrules") == [before]
    later.run_for(300, lambda: [declared_device(*SICK), declared_device("gpu-3"), device("gpu-3", XID)])
    assert api.objects_of("devicetaintrules") == [before]


def test_healthy_driver_gets_no_rule_of_a_host_device_after_a_reboot(api: ClusterApi) -> None:
    first = agent_of(api, drivers=(DRIVER,))
    first.show(declared_device("gpu-0"))
    second = agent_of(api, drivers=(DRIVER,), clock=first.clock)
    second.run_for(UNDECIDED_S - 10, lambda: [device(*SICK)])
    assert rules(api) == {}
    second.run_for(30, lambda: [device(*SICK)])
    assert set(rules(api)) == {"gpu-0"}


def test_driver_whose_declaration_ended_has_rules_of_host_devices(api: ClusterApi) -> None:
    first = agent_of(api, drivers=(DRIVER,))
    first.show(declared_device("gpu-0"))
    first.publisher.handle_report(replace(report(device("gpu-0")), declaring=(DRIVER,)))
    first.run_for(20)
    agent_of(api, drivers=(DRIVER,), clock=first.clock).show(device(*SICK))
    assert set(rules(api)) == {"gpu-0"}


def test_rules_of_a_driver_that_is_configured_no_longer_are_removed(api: ClusterApi) -> None:
    first = agent_of(api)
    first.show(declared_device(*SICK))
    agent_of(api, "other.example.com", clock=first.clock).show(declared_device(*SICK))
    assert rules(api) == {}


def test_rules_of_others_are_left_alone(api: ClusterApi, caplog: pytest.LogCaptureFixture) -> None:
    for name, manager, labels in (
        ("admin", "kubectl", {}),
        ("copied-labels", "kubectl", OWN_LABELS),
        ("other-node", "drahealth", {**OWN_LABELS, NODE_LABEL: "node-b"}),
    ):
        api.put(f"{PATH}/{name}", foreign_rule(name, "gpu-7", manager=manager, **labels))
    agent_of(api).run_for(1200, lambda: [declared_device()])
    assert len(api.objects_of("devicetaintrules")) == 3
    assert caplog.text.count("copied-labels: has the labels of this agent, and was made by others") == 1


def test_rule_that_others_changed_or_deleted_is_handled(
    api: ClusterApi, caplog: pytest.LogCaptureFixture
) -> None:
    agent = agent_of(api)
    agent.show(declared_device(*SICK))
    (path,) = (path for path in api.objects if "/devicetaintrules/" in path)
    del api.objects[path]
    agent.run_for(700, lambda: [declared_device(*SICK)])
    assert set(rules(api)) == {"gpu-0"}
    name = rule_name(DeviceRef(DRIVER, NODE, "gpu-1"))
    api.put(f"{PATH}/{name}", foreign_rule(name, "gpu-1", manager="kubectl"))
    agent.show(declared_device(*SICK), declared_device("gpu-1", XID))
    assert rules(api)["gpu-1"] == (f"{DRIVER}/admin", "", "NoSchedule")
    assert f"{name}: was changed by others" in caplog.text


def test_rule_that_others_made_is_never_deleted(api: ClusterApi) -> None:
    name = rule_name(DeviceRef(DRIVER, NODE, "gpu-1"))
    api.put(f"{PATH}/{name}", foreign_rule(name, "gpu-1", manager="kubectl"))
    agent = agent_of(api)
    agent.run_for(60, lambda: [declared_device(*SICK), declared_device("gpu-1", XID)])
    replaced = f"{PATH}/{rule_name(DeviceRef(DRIVER, NODE, 'gpu-0'))}"
    del api.objects[replaced]
    api.put(replaced, foreign_rule(replaced.rpartition("/")[2], "gpu-0", manager="kubectl"))
    agent.run_for(900, lambda: [declared_device(), declared_device("gpu-1")])
    assert rules(api) == dict.fromkeys(("gpu-0", "gpu-1"), (f"{DRIVER}/admin", "", "NoSchedule"))
    assert agent.publisher.status.taint_rules == 0
    assert agent.publisher.status.error == ""


@pytest.mark.parametrize(
    ("kubernetes", "version"), [("1.37", "v1"), ("1.36", "v1beta2"), ("1.34", "v1alpha3")]
)
def test_rules_have_the_best_version_of_the_api_server(kubernetes: str, version: str) -> None:
    with ClusterApi(kubernetes) as api:
        agent_of(api).show(declared_device(*SICK))
        (rule,) = api.objects_of("devicetaintrules")
        assert rule["apiVersion"] == f"resource.k8s.io/{version}"
    assert version in VERSIONS


def test_api_server_without_rules_is_named(api: ClusterApi) -> None:
    api.refuse = lambda request: Refusal(404, "NotFound") if "taintrules" in request.path else None
    agent = agent_of(api)
    agent.show(declared_device(*SICK))
    assert "turn on its feature gate DRADeviceTaintRules" in agent.publisher.status.error


def test_version_that_ends_with_an_update_is_replaced(api: ClusterApi) -> None:
    agent = agent_of(api)
    agent.show(declared_device(*SICK))
    api.version = "1.36"
    agent.run_for(60, lambda: [declared_device(*SICK), declared_device("gpu-1", XID)])
    versions = {rule["apiVersion"] for rule in api.objects_of("devicetaintrules")}
    assert "resource.k8s.io/v1beta2" in versions


def test_version_that_ends_while_rules_are_unchanged_is_replaced(api: ClusterApi) -> None:
    agent = agent_of(api)
    agent.show(declared_device(*SICK))
    api.version = "1.36"
    agent.run_for(700, lambda: [declared_device(*SICK)])
    versions = {rule["apiVersion"] for rule in api.objects_of("devicetaintrules")}
    assert "resource.k8s.io/v1beta2" in versions
    assert agent.publisher.status.failures == 0


def test_rule_is_deleted_after_its_version_was_away(api: ClusterApi) -> None:
    agent = agent_of(api)
    agent.show(declared_device(*SICK))
    api.refuse = lambda request: Refusal(404, "") if "taintrules" in request.path else None
    agent.run_for(QUIET_S + 20, lambda: [declared_device()])
    assert agent.publisher.status.taint_rules == 1
    api.refuse = lambda request: None
    agent.run_for(120, lambda: [declared_device()])
    assert rules(api) == {}
    assert agent.publisher.status.taint_rules == 0


def test_storm_of_128_devices_is_written_in_parts(api: ClusterApi) -> None:
    agent = agent_of(api)
    storm = [declared_device(f"gpu-{number:03}", XID) for number in range(128)]
    agent.show(*storm)
    assert len(rules(api)) == WRITES_MAX
    agent.run_for(60, lambda: storm)
    assert len(rules(api)) == 128
    agent.run_for(600, lambda: [declared_device(f"gpu-{number:03}") for number in range(128)])
    assert rules(api) == {}


@pytest.mark.parametrize("status", [429, 500, 503])
def test_refused_rule_is_written_later(api: ClusterApi, status: int) -> None:
    refusals = iter([Refusal(status, "Refused")] * 2)
    api.refuse = lambda request: next(refusals, None) if request.method == "PATCH" else None
    agent_of(api).run_for(60, lambda: [declared_device(*SICK)])
    assert set(rules(api)) == {"gpu-0"}


@pytest.mark.parametrize("status", [400, 403, 422, 500])
def test_refused_rules_stop_no_other_rule(api: ClusterApi, status: int) -> None:
    names = [f"gpu-{number:03}" for number in range(WRITES_MAX + 8)]
    refused = {rule_name(DeviceRef(DRIVER, NODE, name)) for name in names[:-4]}
    api.refuse = lambda request: (
        Refusal(status, "Refused") if request.path.rpartition("/")[2] in refused else None
    )
    agent = agent_of(api)
    agent.show(*(declared_device(name, XID) for name in names))
    assert sum("/devicetaintrules/" in request.path for request in api.requests) == REFUSALS_MAX
    agent.run_for(1800, lambda: [declared_device(name, XID) for name in names])
    assert set(rules(api)) == set(names[-4:])
    assert agent.publisher.status.error.startswith(f"taint rules: {status}")
    agent.run_for(300, lambda: [declared_device(name) for name in names])
    assert rules(api) == {}
    assert agent.publisher.status.error == ""


def test_driver_added_again_keeps_no_old_taint(api: ClusterApi) -> None:
    agent = agent_of(api)
    agent.show(declared_device(*SICK))
    with_driver, without = agent.config, msgspec.structs.replace(agent.config, k8s_taint_rules=())
    agent.publisher.reconfigure(without)
    agent.run_for(60, lambda: [declared_device(*SICK)])
    assert rules(api) == {}
    agent.run_for(1200, lambda: [declared_device()])
    agent.publisher.reconfigure(with_driver)
    agent.run_for(20, lambda: [declared_device()])
    assert rules(api) == {}
    agent.show(declared_device(*SICK))
    (rule,) = api.objects_of("devicetaintrules")
    assert rule["spec"]["taint"]["timeAdded"] == rfc3339(int(agent.clock.now.wall_s))


def test_agent_that_holds_the_lease_again_writes_no_old_taint(api: ClusterApi) -> None:
    agent = agent_of(api)
    agent.show(declared_device(*SICK))
    lease_s = api.objects_of("leases")[0]["spec"]["leaseDurationSeconds"]
    agent.clock.advance(2 * lease_s)
    other = agent_of(api, clock=agent.clock, identity="agent-2")
    other.show(declared_device())
    other.run_for(2 * QUIET_S, lambda: [declared_device()])
    assert rules(api) == {}
    agent.run_for(10, lambda: [declared_device()])
    other.clock.advance(2 * lease_s)
    agent.run_for(20, lambda: [declared_device()])
    assert agent.publisher.status.is_held
    assert rules(api) == {}


@pytest.mark.parametrize(
    "selector",
    [
        None,
        {},
        {"driver": DRIVER},
        {"driver": DRIVER, "pool": NODE},
        {"driver": DRIVER, "pool": NODE, "device": ""},
        {"pool": NODE, "device": "gpu-0"},
    ],
)
def test_rule_that_could_match_other_devices_is_refused(selector: dict[str, str] | None) -> None:
    with pytest.raises(ValueError, match="not sent: its selector"):
        check_rule({"metadata": {"name": "r"}, "spec": {"deviceSelector": selector}})


def test_device_without_a_pool_is_never_sent(api: ClusterApi) -> None:
    agent = agent_of(api)
    agent.publisher.handle_report(report(declared_device(*SICK)._replace(pool="")))
    agent.publisher.step()
    assert rules(api) == {}
    assert agent.publisher.status.error == "taint rules: internal error"


def test_long_node_name_has_a_valid_label() -> None:
    name = ".".join(["n" * 60] * 4)
    assert len(node_label(name)) <= 63
    assert len(rule_name(DeviceRef(DRIVER, name, "d" * 63))) <= 253


@pytest.mark.parametrize("kubernetes", ["1.34", "1.35", "1.36", "1.37"])
def test_agent_uses_exactly_the_rights_of_its_roles(kubernetes: str) -> None:
    with ClusterApi(kubernetes) as api:
        agent = SteppedAgent(api, k8s_taint_rules=(DRIVER,), taint_quiet_s=0)
        agent.show(declared_device(*SICK))
        agent.run_for(400, lambda: [declared_device()])
        agent.run_for(400, lambda: [declared_device(*SICK)])
        agent.run_for(400, lambda: [declared_device()])
        assert agent.publisher.status.failures == 0  # each body fits the schema of that version
        assert api.used == granted_rights()
