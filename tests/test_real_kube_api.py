"""The client and the publisher of slices with Kubernetes' own API server and etcd."""

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import pytest
import yaml
from cluster_agents import XID, StepClock, device, report
from cluster_api import documented_removal
from kubelet.claims import allocated_claim
from patience import PATIENCE_S
from real_kube_api import RealKubeApi, real_kube_api
from wire.serving import eventually

import drahealth
from agent.cluster.cluster_publisher import ClusterPublisher
from agent.embed import slice_publisher
from agent.model.health import Health, Severity

ROOT: Final = Path(__file__).parents[1]
DRIVER, NODE = "card.example.com", "node-1"
CLAIMS: Final = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
SLICES: Final = "/apis/resource.k8s.io/v1/resourceslices"
ADMISSION: Final = ROOT / "deploy/helm/drahealth/templates/admissionpolicy.yaml"
CHART_RULES: Final = ROOT / "deploy/helm/drahealth/files/rules.yaml"
DEPLOYED: Final = ROOT / "examples/hostdev_driver/deploy.yaml"
TAINTS: Final = tuple(
    drahealth.Taint(f"{DRIVER}/cause-{number}", "7", effect, 1_700_000_000)
    for number, effect in enumerate(drahealth.Effect)
)


@pytest.fixture(scope="module", autouse=True)
def _patient() -> Iterator[None]:
    """No answer of a busy machine is late."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agent.serve.kube_api.api_server.TIMEOUT_S", PATIENCE_S)
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealKubeApi]:
    with real_kube_api(tmp_path_factory.mktemp("kube-api")) as server:
        server.create("/api/v1/nodes", "Node", NODE)
        yield server


def driver_rules() -> list[Mapping[str, Any]]:
    """Return the rules of the example's role."""
    (role,) = (obj for obj in yaml.safe_load_all(DEPLOYED.read_text()) if obj["kind"] == "ClusterRole")
    rules: list[Mapping[str, Any]] = role["rules"]
    return rules


@pytest.fixture(scope="module")
def access(server: RealKubeApi) -> drahealth.ApiAccess:
    """Access with the role of the example driver, and no more."""
    return server.service_account("driver", driver_rules())


def monitor_in(root: Path, driver: str = DRIVER) -> drahealth.Monitor:
    config = drahealth.Config(node_name=NODE)
    return drahealth.Monitor(driver, config=config, hardware=False, kubelet_dir=root)


@pytest.fixture
def publisher(
    server: RealKubeApi, access: drahealth.ApiAccess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[drahealth.SlicePublisher]:
    monkeypatch.setattr(slice_publisher, "RETRY_S", 0.1)
    devices = [
        drahealth.SliceDevice(f"card-{n}", attributes={"n": n}, capacity={"m": "1024Mi"}) for n in range(70)
    ]
    publisher = drahealth.SlicePublisher(drahealth.ApiServer(access), monitor_in(tmp_path), devices)
    with publisher:
        yield publisher
    publisher._deleted = False
    publisher.delete()
    assert not slices(server)


def slices(server: RealKubeApi, driver: str = DRIVER) -> list[dict[str, Any]]:
    found = server.admin.list_objects(SLICES, f"spec.driver={driver}").items
    return sorted(found, key=lambda obj: str(obj["metadata"]["name"]))


def taints_of(*names: str) -> drahealth.Taints:
    return drahealth.Taints({drahealth.DeviceRef(DRIVER, NODE, name): TAINTS for name in names})


def taint_effects_by_device(server: RealKubeApi) -> dict[str, list[str]]:
    devices = [device for obj in slices(server) for device in obj["spec"]["devices"]]
    return {
        condition["name"]: [taint["effect"] for taint in condition["taints"]]
        for condition in devices
        if condition.get("taints")
    }


def versions(server: RealKubeApi) -> list[str]:
    return [obj["metadata"]["resourceVersion"] for obj in slices(server)]


def test_slices_are_accepted_updated_and_left_alone(
    server: RealKubeApi, publisher: drahealth.SlicePublisher
) -> None:
    publisher.publish(drahealth.Taints())
    first, second = slices(server)
    assert [len(obj["spec"]["devices"]) for obj in (first, second)] == [64, 6]
    assert first["spec"]["pool"] == {"name": NODE, "generation": 1, "resourceSliceCount": 2}
    before = versions(server)
    publisher.publish(drahealth.Taints())
    assert versions(server) == before
    publisher.publish(taints_of("card-69"))
    assert taint_effects_by_device(server) == {"card-69": ["None", "NoSchedule", "NoExecute"]}
    assert versions(server)[0] == before[0]
    assert slices(server)[1]["spec"]["pool"]["generation"] == 1
    publisher.publish(drahealth.Taints())
    assert taint_effects_by_device(server) == {}


def test_taint_on_each_device_of_a_full_slice_is_accepted(
    server: RealKubeApi, publisher: drahealth.SlicePublisher
) -> None:
    publisher.publish(taints_of(*(f"card-{number}" for number in range(70))))
    assert len(taint_effects_by_device(server)) == 70


def test_second_publisher_takes_over_without_a_change(
    server: RealKubeApi, access: drahealth.ApiAccess, publisher: drahealth.SlicePublisher, tmp_path: Path
) -> None:
    publisher.set_devices([drahealth.SliceDevice("card-0", attributes={"n": 1})])
    publisher.publish(taints_of("card-0"))
    before = versions(server)
    device = drahealth.SliceDevice("card-0", attributes={"n": 1})
    other = drahealth.SlicePublisher(drahealth.ApiServer(access), monitor_in(tmp_path / "other"), [device])
    other.publish(taints_of("card-0"))
    assert versions(server) == before


def test_deleted_and_changed_slices_are_restored(
    server: RealKubeApi, publisher: drahealth.SlicePublisher
) -> None:
    publisher.publish(taints_of("card-0"))
    admin = server.admin
    admin.call("DELETE", f"{SLICES}?fieldSelector=spec.driver%3D{DRIVER}")
    eventually(lambda: len(slices(server)) == 2, "slices are published again")
    (changed, _) = slices(server)
    changed["spec"]["devices"][0]["taints"] = []
    admin.call("PUT", f"{SLICES}/{changed['metadata']['name']}", changed)
    eventually(lambda: "card-0" in taint_effects_by_device(server), "taint is published again")


def test_slices_are_repaired_after_a_restart_of_the_api_server(
    server: RealKubeApi, publisher: drahealth.SlicePublisher
) -> None:
    publisher.publish(drahealth.Taints())
    server.stop_server()
    with pytest.raises(drahealth.ApiUnreachableError, match="Connection refused"):
        publisher.publish(taints_of("card-0"))
    server.start_server()
    server.admin.call("DELETE", f"{SLICES}?fieldSelector=spec.driver%3D{DRIVER}")
    eventually(
        lambda: "card-0" in taint_effects_by_device(server), "slices are published again", 3 * PATIENCE_S
    )


def test_missing_verb_is_named_as_in_the_role(server: RealKubeApi, tmp_path: Path) -> None:
    rules = [rule for rule in driver_rules() if rule["resources"] != ["resourceslices"]]
    access = server.service_account("no-slices", rules)
    publisher = drahealth.SlicePublisher(drahealth.ApiServer(access), monitor_in(tmp_path))
    with pytest.raises(drahealth.ApiForbiddenError) as caught:
        publisher.publish(drahealth.Taints())
    assert (caught.value.verb, caught.value.resource) == ("list", "resourceslices.resource.k8s.io")
    assert 'cannot list resource "resourceslices"' in str(caught.value)


def test_role_of_the_example_has_no_verb_that_is_not_used(server: RealKubeApi, tmp_path: Path) -> None:
    """Without any one of its verbs the driver fails, or says that it cannot watch."""
    whole = [
        (rule["apiGroups"], rule["resources"], verb) for rule in driver_rules() for verb in rule["verbs"]
    ]
    for number, missing in enumerate(whole):
        rules = [
            {"apiGroups": groups, "resources": resources, "verbs": [verb]}
            for groups, resources, verb in whole
            if (groups, resources, verb) != missing
        ]
        driver = f"d{number}.example.com"
        api = drahealth.ApiServer(server.service_account(f"without-{number}", rules))
        monitor = monitor_in(tmp_path / str(number), driver)
        publisher = drahealth.SlicePublisher(api, monitor, [drahealth.SliceDevice("a")])
        with pytest.raises(drahealth.ApiForbiddenError) as caught:
            use_all_verbs(api, publisher, driver)
        assert caught.value.verb == missing[2], missing
        for obj in slices(server, driver):
            server.admin.call("DELETE", f"{SLICES}/{obj['metadata']['name']}")


def use_all_verbs(api: drahealth.ApiServer, publisher: drahealth.SlicePublisher, driver: str) -> None:
    """Make all calls of a driver."""
    with suppress(drahealth.TransientError):
        drahealth.ClaimReader(api, driver)(drahealth.ClaimRef("default", "missing", "uid-1"))
    publisher.publish(drahealth.Taints())
    publisher.set_devices([drahealth.SliceDevice("b")])
    publisher.publish(drahealth.Taints())
    publisher.delete()
    for _ in api.watch(SLICES, f"spec.driver={driver},spec.nodeName={NODE}"):
        pass


def test_claim_is_read_with_its_allocation(server: RealKubeApi, access: drahealth.ApiAccess) -> None:
    created = create_claim(server, "one")
    ref = drahealth.ClaimRef("default", "one", created["metadata"]["uid"])
    read = drahealth.ClaimReader(drahealth.ApiServer(access), DRIVER)
    assert [(device.request, device.device) for device in read(ref).devices] == [("it", "card-0")]
    server.admin.call("DELETE", f"{CLAIMS}/one")
    with pytest.raises(drahealth.TransientError) as caught:
        read(ref)
    assert caught.value.code == "claim.not_found"


def create_claim(server: RealKubeApi, name: str) -> dict[str, Any]:
    """Create a claim and write its allocation, as the scheduler does."""
    claim = allocated_claim(name, "", ("it", DRIVER, NODE, "card-0"), pods=[])
    del claim["metadata"]["uid"], claim["status"]["reservedFor"]
    claim["spec"] = {"devices": {"requests": [{"name": "it", "exactly": {"deviceClassName": "card"}}]}}
    created = server.admin.call("POST", CLAIMS, claim)
    return server.admin.call("PUT", f"{CLAIMS}/{name}/status", created | {"status": claim["status"]})


class Events:
    """Events of a watch, collected by a thread: kind and names."""

    def __init__(self, watch: drahealth.ObjectWatch) -> None:
        self.watch = watch
        self._events: SimpleQueue[tuple[str, list[str]]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for event in self.watch:
            self._events.put((str(event.kind), [obj["metadata"]["name"] for obj in event.objects]))

    def next(self) -> tuple[str, list[str]]:
        return self._events.get(timeout=3 * PATIENCE_S)

    def end(self) -> None:
        self.watch.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def test_watch_survives_a_restart_of_the_api_server(server: RealKubeApi) -> None:
    path = "/api/v1/namespaces/default/configmaps"

    def create(name: str) -> None:
        server.create(path, "ConfigMap", name)

    create("a")
    events = Events(server.admin.watch(path, "metadata.name!=kube-root-ca.crt"))
    assert events.next() == ("listed", ["a"])
    create("b")
    assert events.next() == ("changed", ["b"])
    server.stop_server()
    server.start_server()
    create("c")
    assert events.next() in (("changed", ["c"]), ("listed", ["a", "b"]), ("listed", ["a", "b", "c"]))
    server.admin.call("DELETE", f"{path}/b")
    found = events.next()
    while found[0] != "deleted":
        found = events.next()
    assert found == ("deleted", ["b"])
    events.end()


def test_expired_version_of_a_watch_is_410(server: RealKubeApi) -> None:
    path = "/api/v1/namespaces/default/configmaps"
    watch = server.admin.watch(path)
    with pytest.raises(drahealth.ApiError) as caught:
        next(watch._stream("1"))
    assert caught.value.status == 410


@pytest.mark.parametrize("version", ["v1beta2", "v1beta1"])
def test_beta_version_is_accepted(tmp_path: Path, version: str) -> None:
    flags = f"--runtime-config=resource.k8s.io/{version}=true,resource.k8s.io/v1=false"
    with real_kube_api(tmp_path, flags) as server:
        assert server.admin.dra_version() == version
        server.create("/api/v1/nodes", "Node", NODE)
        device = drahealth.SliceDevice("card-0", attributes={"n": 1}, capacity={"m": "1Gi"})
        publisher = drahealth.SlicePublisher(server.admin, monitor_in(tmp_path), [device])
        publisher.publish(taints_of("card-0"))
        (found,) = server.admin.list_objects(server.admin.dra_path("resourceslices")).items
        device_fields = found["spec"]["devices"][0]
        assert len((device_fields.get("basic") or device_fields)["taints"]) == 3
        before = found["metadata"]["resourceVersion"]
        publisher.publish(taints_of("card-0"))
        (found,) = server.admin.list_objects(server.admin.dra_path("resourceslices")).items
        assert found["metadata"]["resourceVersion"] == before
        publisher.publish(drahealth.Taints())
        assert "taints" not in json.dumps(
            server.admin.list_objects(server.admin.dra_path("resourceslices")).items[0]["spec"]
        )


def test_feature_gate_that_is_off_drops_taints_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with real_kube_api(tmp_path, "--feature-gates=DRADeviceTaints=false,DRADeviceTaintRules=false") as server:
        server.create("/api/v1/nodes", "Node", NODE)
        publisher = drahealth.SlicePublisher(
            server.admin, monitor_in(tmp_path), [drahealth.SliceDevice("card-0")]
        )
        for _ in range(2):
            publisher.publish(taints_of("card-0"))
        assert caplog.text.count("its feature gate DRADeviceTaints is off") == 1
        (found,) = slices(server)
        assert found["metadata"]["generation"] == 1


# --- the agent's own work: lease, conditions, events, rules of taints ---------------------------------------


def cluster_agent(
    server: RealKubeApi, access: drahealth.ApiAccess, node: str, clock: StepClock
) -> ClusterPublisher:
    """Return the publisher of an agent with a role of the chart, whose steps a test runs."""
    config = drahealth.Config(
        node_name=node,
        state_dir=server.directory / "none",
        k8s_enabled=True,
        k8s_taint_rules=(DRIVER,),
        taint_quiet_s=0,
    )
    return ClusterPublisher(
        config,
        drahealth.ApiServer(access),
        namespace="default",
        identity=f"{node}-agent",
        clock=clock,
        jitter=lambda: 0.5,
    )


def chart_rules() -> list[Mapping[str, Any]]:
    """Return all rules of the chart's roles; here the Lease is in the namespace ``default`` of a
    ClusterRole."""
    sections = yaml.safe_load(CHART_RULES.read_text())
    return [rule for by_feature in sections.values() for rules in by_feature.values() for rule in rules]


def run_steps(publisher: ClusterPublisher, clock: StepClock, steps: int) -> None:
    """Run steps with 10 s between them."""
    for _ in range(steps):
        publisher.step()
        clock.advance(10)


def test_health_is_written_with_the_rights_of_the_chart(server: RealKubeApi) -> None:
    node, clock = "cluster-node", StepClock()
    server.create("/api/v1/nodes", "Node", node)
    publisher = cluster_agent(server, server.service_account("agent", chart_rules()), node, clock)
    broken = device("gpu-0", XID, driver=DRIVER)._replace(pool=node)
    publisher.handle_report(report(broken))
    run_steps(publisher, clock, 2)
    assert publisher.status.error == ""

    admin = server.admin
    conditions = {
        condition["type"]: condition
        for condition in admin.call("GET", f"/api/v1/nodes/{node}")["status"]["conditions"]
    }
    found = conditions["DRADevicesHealthy"]
    assert (found["status"], found["reason"]) == ("False", "DevicesUnhealthy")
    lease = admin.call("GET", f"/apis/coordination.k8s.io/v1/namespaces/default/leases/drahealth-{node}")
    assert lease["spec"]["holderIdentity"] == f"{node}-agent"
    events = admin.list_objects("/api/v1/namespaces/default/events", f"involvedObject.name={node}").items
    assert [event["reason"] for event in events] == ["DeviceUnhealthy"]
    (rule,) = admin.list_objects(admin.dra_path("devicetaintrules")).items
    assert rule["spec"]["deviceSelector"] == {"driver": DRIVER, "pool": node, "device": "gpu-0"}

    successor = cluster_agent(server, server.service_account("agent-2", chart_rules()), node, clock)
    successor.handle_report(report(broken))
    run_steps(successor, clock, 2)
    (adopted,) = admin.list_objects(admin.dra_path("devicetaintrules")).items
    assert adopted["metadata"]["generation"] == rule["metadata"]["generation"]
    after = {
        condition["type"]: condition
        for condition in admin.call("GET", f"/api/v1/nodes/{node}")["status"]["conditions"]
    }
    assert after["DRADevicesHealthy"] == found

    successor.handle_report(report(broken._replace(health=Health.HEALTHY, severity=Severity.OK, causes=())))
    run_steps(successor, clock, 60)
    assert successor.status.error == ""
    after = {
        condition["type"]: condition
        for condition in admin.call("GET", f"/api/v1/nodes/{node}")["status"]["conditions"]
    }
    assert after["DRADevicesHealthy"]["status"] == "True"
    assert admin.list_objects(admin.dra_path("devicetaintrules")).items == []
    events = admin.list_objects("/api/v1/namespaces/default/events", f"involvedObject.name={node}").items
    assert sorted({event["reason"] for event in events}) == ["DeviceRecovered", "DeviceUnhealthy"]

    admin.apply(f"/api/v1/nodes/{node}/status", documented_removal(node), manager="drahealth")
    status = admin.call("GET", f"/api/v1/nodes/{node}")["status"]
    assert not any(condition["type"].startswith("DRA") for condition in status.get("conditions", ()))


def test_condition_of_another_manager_is_a_conflict_and_taken_over(
    server: RealKubeApi, caplog: pytest.LogCaptureFixture
) -> None:
    node, clock = "conflict-node", StepClock()
    server.create("/api/v1/nodes", "Node", node)
    entry = {"type": "DRADevicesHealthy", "status": "True", "reason": "Test", "message": "written by a test"}
    body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}, "status": {"conditions": [entry]}}
    server.admin.apply(f"/api/v1/nodes/{node}/status", body, manager="test")
    publisher = cluster_agent(server, server.access, node, clock)
    publisher.handle_report(report(device("gpu-0", XID, driver=DRIVER)._replace(pool=node)))
    run_steps(publisher, clock, 1)
    assert 'conflicts with "test"' in caplog.text
    (found,) = server.admin.call("GET", f"/api/v1/nodes/{node}")["status"]["conditions"]
    assert (found["status"], found["reason"]) == ("False", "DevicesUnhealthy")


def test_role_of_the_chart_has_no_verb_that_is_not_used(server: RealKubeApi) -> None:
    """Without any one of its verbs the agent names that verb."""
    whole = [(rule["apiGroups"], rule["resources"], verb) for rule in chart_rules() for verb in rule["verbs"]]
    for number, missing in enumerate(whole):
        node, clock = f"verb-node-{number}", StepClock()
        server.create("/api/v1/nodes", "Node", node)
        rules = [
            {"apiGroups": groups, "resources": resources, "verbs": [verb]}
            for groups, resources, verb in whole
            if (groups, resources, verb) != missing
        ]
        publisher = cluster_agent(
            server, server.service_account(f"agent-without-{number}", rules), node, clock
        )
        broken = device("gpu-0", XID, driver=DRIVER)._replace(pool=node)
        errors = []
        for sick in (True, False, True):
            causes = broken if sick else device("gpu-0", driver=DRIVER)._replace(pool=node)
            for _ in range(40):
                publisher.handle_report(report(causes))
                run_steps(publisher, clock, 1)
                errors.append(publisher.status.error)
        groups, (resource,), verb = missing
        expected = f"{verb} of {'.'.join(filter(None, (resource, *groups)))}"
        assert any(
            expected in error or f'cannot {verb} resource "{resource}"' in error for error in errors
        ), missing


def admission_objects(namespace: str, account: str) -> list[dict[str, Any]]:
    """Return the chart's admission policy and its binding for a service account."""
    text = ADMISSION.read_text()
    text = re.sub(r"^\{\{- (if|end).*\n?|^ *labels:\n *\{\{- include .*\n", "", text, flags=re.MULTILINE)
    text = text.replace('{{ include "drahealth.name" . }}', "drahealth")
    text = text.replace("{{ .Release.Namespace }}", namespace)
    text = text.replace('{{ include "drahealth.serviceAccount" . }}', account)
    return list(yaml.safe_load_all(text))


def pod_access(server: RealKubeApi, account: str, node: str) -> drahealth.ApiAccess:
    """Return the access of a pod on a node, with the token that the kubelet gets for it."""
    spec = {"serviceAccountName": account, "nodeName": node, "containers": [{"name": "a", "image": "a"}]}
    pod = server.create("/api/v1/namespaces/default/pods", "Pod", f"{account}-{node}", spec=spec)
    bound = {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": pod["metadata"]["name"],
        "uid": pod["metadata"]["uid"],
    }
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"boundObjectRef": bound},
    }
    path = f"/api/v1/namespaces/default/serviceaccounts/{account}/token"
    return server.access_with(server.admin.call("POST", path, request)["status"]["token"])


def test_admission_policy_restricts_a_pod_to_its_own_node(server: RealKubeApi) -> None:
    server.service_account("bound", chart_rules())
    for node in ("own-node", "other-node"):
        server.create("/api/v1/nodes", "Node", node)
    for obj in admission_objects("default", "bound"):
        resource = "validatingadmissionpolic" + ("ybindings" if obj["kind"].endswith("Binding") else "ies")
        server.admin.call("POST", f"/apis/admissionregistration.k8s.io/v1/{resource}", obj)
    access = pod_access(server, "bound", "own-node")
    client = drahealth.ApiServer(access)

    def apply(node: str, type_: str = "DRADevicesHealthy", **other: Any) -> None:
        entry = {"type": type_, "status": "True", "reason": "Test"}
        metadata = {"name": node, **other.pop("metadata", {})}
        status = {"conditions": [entry], **other}
        body = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}
        client.apply(f"/api/v1/nodes/{node}/status", body, manager="drahealth")

    def is_refused() -> bool:
        try:
            apply("other-node")
        except drahealth.ApiError as error:
            return "its own Node only" in str(error)
        return False

    eventually(is_refused, "the policy is in force", 3 * PATIENCE_S)
    with pytest.raises(drahealth.ApiError, match="begin with DRA"):
        apply("own-node", "Ready")
    for fields in (
        {"capacity": {"cpu": "8"}},
        {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}]},
    ):
        with pytest.raises(drahealth.ApiError, match="only the conditions"):
            apply("own-node", **fields)
    for field in ("labels", "annotations"):
        with pytest.raises(drahealth.ApiError, match="may change no labels"):
            apply("own-node", metadata={field: {"a": "b"}})
    apply("own-node")
    path = server.admin.dra_path("devicetaintrules", "r")
    taint = {"key": "example.com/a", "effect": "NoSchedule"}
    for node, selector, refusal in (
        ("other-node", {"driver": "d.example.com", "pool": "p", "device": "d"}, "label of its own node"),
        ("own-node", {}, "must select a driver, a pool and a device"),
        ("own-node", {"driver": "d.example.com", "pool": "p"}, "must select a driver, a pool and a device"),
    ):
        spec = {"deviceSelector": selector, "taint": taint}
        metadata = {"name": "r", "labels": {"drahealth.dev/node": node}}
        rule = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceTaintRule",
            "metadata": metadata,
            "spec": spec,
        }
        with pytest.raises(drahealth.ApiError, match=refusal):
            client.apply(path, rule, manager="drahealth")

    clock = StepClock()
    publisher = cluster_agent(server, access, "own-node", clock)
    for causes in ((XID,), ()):
        publisher.handle_report(report(device("gpu-0", *causes, driver=DRIVER)._replace(pool="own-node")))
        run_steps(publisher, clock, 3)
        assert publisher.status.error == ""
    assert publisher.status.taint_rules == 0
