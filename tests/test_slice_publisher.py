"""The publisher of ResourceSlices: contents, generations, conflicts, repairs, and the order of a fault."""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from embedding import patient
from go_driver.api_server import SLICES, _check_slice
from go_driver.api_server import ApiError as Refusal
from kube_api import ApiCall, FakeKubeApi, certificate, forbid, kube_api, patient_client
from no_threads import no_threads
from patience import PATIENCE_S
from wire.serving import eventually

import drahealth
from agent.embed import slice_publisher
from agent.embed.devices import slice_base_name

__all__ = ["certificate", "kube_api", "patient", "patient_client"]
pytestmark = pytest.mark.usefixtures("patient_client")

DRIVER, NODE = "card.example.com", "node-1"
NAME = f"{NODE}-{DRIVER}"
XID = drahealth.Taint(f"{DRIVER}/xid", "79", drahealth.Effect.NO_SCHEDULE, 1_700_000_000)
CARDS = tuple(drahealth.SliceDevice(f"card-{number}") for number in range(3))


@pytest.fixture
def api(kube_api: FakeKubeApi) -> drahealth.ApiServer:
    kube_api.add_node(NODE)
    return drahealth.ApiServer(drahealth.ApiAccess(kube_api.url, ca_file=kube_api.certificate))


@pytest.fixture
def monitor(tmp_path: Path) -> drahealth.Monitor:
    return monitor_in(tmp_path)


def monitor_in(root: Path) -> drahealth.Monitor:
    config = drahealth.Config(node_name=NODE, taint_wait_s=10.0)  # the API server may be slow
    return drahealth.Monitor(DRIVER, config=config, hardware=False, kubelet_dir=root)


def taints_of(*names: str, taint: drahealth.Taint = XID, pool: str = NODE) -> drahealth.Taints:
    return drahealth.Taints({drahealth.DeviceRef(DRIVER, pool, name): (taint,) for name in names})


def tainted_devices(kube_api: FakeKubeApi) -> list[str]:
    slices = kube_api.all_slices().values()
    return [device["name"] for obj in slices for device in obj["spec"]["devices"] if device.get("taints")]


# --- contents ----------------------------------------------------------------------------------------------


def test_slice_has_devices_owner_and_taints(
    api: drahealth.ApiServer, monitor: drahealth.Monitor, kube_api: FakeKubeApi
) -> None:
    device = drahealth.SliceDevice(
        "card-0",
        attributes={"kind": "card", "numaNode": 0, "fast": True, "firmware": {"version": "1.2.0"}},
        capacity={"memory": "16Gi", "slots": 4},
        fields={"allowMultipleAllocations": True},
    )
    drahealth.SlicePublisher(api, monitor, [device]).publish(taints_of("card-0"))
    ((name, found),) = kube_api.all_slices().items()
    assert (name, found["apiVersion"], found["kind"]) == (f"{NAME}-0", "resource.k8s.io/v1", "ResourceSlice")
    uid = kube_api.get(f"/api/v1/nodes/{NODE}")["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": uid, "controller": True}
    assert found["metadata"]["ownerReferences"] == [owner]
    assert found["spec"] == {
        "driver": DRIVER,
        "nodeName": NODE,
        "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
        "devices": [
            {
                "name": "card-0",
                "attributes": {
                    "kind": {"string": "card"},
                    "numaNode": {"int": 0},
                    "fast": {"bool": True},
                    "firmware": {"version": "1.2.0"},
                },
                "capacity": {"memory": {"value": "16Gi"}, "slots": {"value": "4"}},
                "allowMultipleAllocations": True,
                "taints": [
                    {
                        "key": f"{DRIVER}/xid",
                        "value": "79",
                        "effect": "NoSchedule",
                        "timeAdded": "2023-11-14T22:13:20Z",
                    }
                ],
            }
        ],
    }


def test_publisher_or_reader_without_an_api_server_is_refused(monitor: drahealth.Monitor) -> None:
    creators: tuple[Callable[..., object], ...] = (drahealth.SlicePublisher, drahealth.ClaimReader)
    for create in creators:
        with pytest.raises(drahealth.ConfigError, match=r"argument api: None is not a drahealth\.ApiServer"):
            create(None, monitor)


def test_oldest_version_has_the_fields_of_a_device_in_basic(
    api: drahealth.ApiServer, monitor: drahealth.Monitor, kube_api: FakeKubeApi
) -> None:
    kube_api.versions = ("v1beta1",)
    publisher = drahealth.SlicePublisher(
        api, monitor, [drahealth.SliceDevice("card-0", capacity={"slots": 4})]
    )
    publisher.publish(taints_of("card-0"))
    publisher.publish(drahealth.Taints())
    (found,) = kube_api.all_slices().values()
    assert found["apiVersion"] == "resource.k8s.io/v1beta1"
    assert found["spec"]["devices"] == [{"name": "card-0", "basic": {"capacity": {"slots": {"value": "4"}}}}]
    assert found["spec"]["pool"]["generation"] == 1


def test_only_changed_slices_are_written(
    api: drahealth.ApiServer, monitor: drahealth.Monitor, kube_api: FakeKubeApi
) -> None:
    devices = [drahealth.SliceDevice(f"card-{number}") for number in range(65)]
    publisher = drahealth.SlicePublisher(api, monitor, devices)
    publisher.publish(drahealth.Taints())
    assert kube_api.writes() == ["POST", "POST"]
    publisher.publish(drahealth.Taints())
    assert kube_api.writes() == []
    publisher.publish(taints_of("card-64"))
    assert kube_api.writes() == ["PUT"]
    assert tainted_devices(kube_api) == ["card-64"]


def generations(kube_api: FakeKubeApi) -> set[tuple[str, int, int]]:
    """Return name, generation and number of slices of all pools."""
    pools = [obj["spec"]["pool"] for obj in kube_api.all_slices().values()]
    return {(pool["name"], pool["generation"], pool["resourceSliceCount"]) for pool in pools}


def test_changed_devices_raise_the_generation_and_taints_do_not(
    api: drahealth.ApiServer, monitor: drahealth.Monitor, kube_api: FakeKubeApi
) -> None:
    publisher = drahealth.SlicePublisher(api, monitor, CARDS)
    publisher.publish(drahealth.Taints())
    publisher.publish(taints_of("card-1"))
    assert generations(kube_api) == {(NODE, 1, 1)}
    publisher.set_devices([drahealth.SliceDevice(f"card-{number}") for number in range(150)])
    publisher.publish(taints_of("card-1"))
    assert generations(kube_api) == {(NODE, 2, 3)}
    assert [len(obj["spec"]["devices"]) for _, obj in sorted(kube_api.all_slices().items())] == [64, 64, 22]
    publisher.set_devices(CARDS)
    publisher.publish(drahealth.Taints())
    assert generations(kube_api) == {(NODE, 3, 1)}
    assert kube_api.all_slices().keys() == {f"{NAME}-0"}


def test_partial_publication_is_completed_with_a_new_generation(
    api: drahealth.ApiServer, monitor: drahealth.Monitor, kube_api: FakeKubeApi
) -> None:
    publisher = drahealth.SlicePublisher(api, monitor, [drahealth.SliceDevice(f"c-{n}") for n in range(65)])
    publisher.publish(drahealth.Taints())
    publisher.set_devices([drahealth.SliceDevice(f"d-{n}") for n in range(65)])
    kube_api.refuse = forbid("PUT", f"{NAME}-1")
    with pytest.raises(drahealth.ApiForbiddenError):
        publisher.publish(drahealth.Taints())
    kube_api.refuse = lambda call: None
    publisher.publish(drahealth.Taints())
    assert generations(kube_api) == {(NODE, 3, 2)}


def test_pools_have_generations_of_their_own(
    api: drahealth.ApiServer, monitor: drahealth.Monitor, kube_api: FakeKubeApi
) -> None:
    shelf = drahealth.SliceDevice("card-0", pool="shelf")
    publisher = drahealth.SlicePublisher(api, monitor, [CARDS[0], shelf])
    publisher.publish(taints_of("card-0", pool="shelf"))
    publisher.set_devices([CARDS[1], shelf])
    publisher.publish(taints_of("card-0", pool="shelf"))
    assert generations(kube_api) == {(NODE, 2, 1), ("shelf", 1, 1)}
    assert tainted_devices(kube_api) == ["card-0"]
    publisher.set_devices([shelf])
    publisher.publish(drahealth.Taints())
    assert generations(kube_api) == {("shelf", 1, 1)}


def test_driver_without_devices_has_an_empty_slice(
    api: drahealth.ApiServer, monitor: drahealth.Monitor, kube_api: FakeKubeApi
) -> None:
    drahealth.SlicePublisher(api, monitor).publish(drahealth.Taints())
    assert [obj["spec"]["devices"] for obj in kube_api.all_slices().values()] == [[]]


def test_slices_of_other_drivers_and_nodes_stay(
    api: drahealth.ApiServer, monitor: drahealth.Monitor, kube_api: FakeKubeApi
) -> None:
    others = {"of-driver": ("gpu.example.com", NODE), "of-node": (DRIVER, "node-2")}
    for name, (driver, node) in others.items():
        spec = {"driver": driver, "nodeName": node, "devices": []}
        kube_api.create(SLICES, {"metadata": {"name": name}, "spec": spec})
    publisher = drahealth.SlicePublisher(api, monitor, CARDS)
    publisher.publish(drahealth.Taints())
    assert kube_api.all_slices().keys() == {*others, f"{NAME}-0"}
    publisher.delete()
    assert kube_api.all_slices().keys() == set(others)
    publisher.publish(drahealth.Taints())
    assert kube_api.all_slices().keys() == set(others)


def test_long_names_of_slices_differ_by_pool() -> None:
    node = "n" * 63 + "." + "o" * 63 + "." + "p" * 63 + ".q"
    names = {slice_base_name("d" * 63, node, pool) for pool in (node, "a", "b")}
    assert len(names) == 3
    assert max(map(len, names)) <= 240


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "Not A Label"}, "Not A Label"),
        ({"name": "c", "pool": "Not A Pool"}, "device 'c': pool: pool name 'Not A Pool' is not valid"),
        ({"name": "c", "attributes": {"a": 1.5}}, "attribute 'a': 1.5 is not a string, number or boolean"),
        ({"name": "c", "capacity": {"a": True}}, "capacity 'a': True is not a quantity"),
        ({"name": "c", "capacity": {"a": "16GB"}}, "device 'c': capacity 'a': '16GB' is not a quantity"),
        ({"name": "c", "fields": {"taints": []}}, "fields: 'taints' is set by drahealth"),
    ],
)
def test_invalid_slice_device_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(drahealth.ConfigError, match=message):
        drahealth.SliceDevice(**fields)


def test_device_that_is_given_twice_is_refused(api: drahealth.ApiServer, monitor: drahealth.Monitor) -> None:
    with pytest.raises(drahealth.ConfigError, match="'card-0' of pool 'node-1' is given 2 times"):
        drahealth.SlicePublisher(api, monitor, [CARDS[0], CARDS[0]])


def test_attribute_or_taint_that_is_gone_is_removed(
    api: drahealth.ApiServer, monitor: drahealth.Monitor, kube_api: FakeKubeApi
) -> None:
    device = drahealth.SliceDevice("card-0", attributes={"speed": 1})
    publisher = drahealth.SlicePublisher(api, monitor, [device])
    publisher.publish(taints_of("card-0"))
    publisher.publish(drahealth.Taints())
    assert tainted_devices(kube_api) == []
    publisher.set_devices(CARDS[:1])
    publisher.publish(drahealth.Taints())
    assert [obj["spec"]["devices"] for obj in kube_api.all_slices().values()] == [[{"name": "card-0"}]]


def test_quantity_that_the_api_server_shortens_is_no_difference(
    api: drahealth.ApiServer,
    monitor: drahealth.Monitor,
    kube_api: FakeKubeApi,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shorten(devices: list[dict[str, Any]], now: str) -> None:
        devices[0]["capacity"]["memory"]["value"] = "1Gi"

    monkeypatch.setattr("go_driver.api_server._check_slice", shorten)
    device = drahealth.SliceDevice("card-0", capacity={"memory": "1024Mi"})
    publisher = drahealth.SlicePublisher(api, monitor, [device])
    for _ in range(2):
        publisher.publish(drahealth.Taints())
    assert kube_api.writes() == ["POST"]


@pytest.mark.parametrize("field", ["nodeAllocatableResourceMappings", "nodeAllocatableResources"])
def test_shortened_quantity_of_allocatable_resources_is_no_difference(
    api: drahealth.ApiServer,
    monitor: drahealth.Monitor,
    kube_api: FakeKubeApi,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    field: str,
) -> None:
    def shorten(devices: list[dict[str, Any]], now: str) -> None:
        devices[0][field]["memory"]["mapping"]["deviceMultiplier"] = "1Gi"

    monkeypatch.setattr("go_driver.api_server._check_slice", shorten)
    device = drahealth.SliceDevice(
        "card-0", fields={field: {"memory": {"mapping": {"deviceMultiplier": "1024Mi"}}}}
    )
    for publishing in (monitor, monitor_in(tmp_path / "restarted")):
        drahealth.SlicePublisher(api, publishing, [device]).publish(drahealth.Taints())
    assert kube_api.writes() == ["POST"]


def test_two_instances_do_not_rewrite_shortened_quantities_in_turn(
    api: drahealth.ApiServer,
    monitor: drahealth.Monitor,
    kube_api: FakeKubeApi,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def shorten(devices: list[dict[str, Any]], now: str) -> None:
        capacity = devices[0]["capacity"]
        short = {"1024Mi": "1Gi", "1000": "1k", "512Mi": "512Mi"}
        capacity["memory"]["value"] = short.get(capacity["memory"]["value"], "1Gi")
        capacity["slots"]["value"] = short.get(capacity["slots"]["value"], "1k")

    monkeypatch.setattr("go_driver.api_server._check_slice", shorten)
    device = drahealth.SliceDevice("card-0", capacity={"memory": "1024Mi", "slots": {"value": 1000}})
    first = drahealth.SlicePublisher(api, monitor, [device])
    second = drahealth.SlicePublisher(api, monitor_in(tmp_path / "second"), [device])
    for publisher in (first, second, first, second):
        publisher.publish(drahealth.Taints())
    assert kube_api.writes() == ["POST"]
    first.set_devices([drahealth.SliceDevice("card-0", capacity={"memory": "512Mi", "slots": 1000})])
    first.publish(drahealth.Taints())
    assert kube_api.writes() == ["PUT"]
    assert generations(kube_api) == {(NODE, 2, 1)}


# --- API servers that refuse or change ------------------------------------------------------------------


def test_conflict_is_resolved_by_reading_again(
    api: drahealth.ApiServer, monitor: drahealth.Monitor, kube_api: FakeKubeApi
) -> None:
    publisher = drahealth.SlicePublisher(api, monitor, CARDS)
    publisher.publish(drahealth.Taints())
    conflicts = ["PUT", "PUT"]

    def change_first(call: ApiCall) -> None:
        if call.method in conflicts:
            conflicts.remove(call.method)
            found = json.loads(json.dumps(kube_api.get(f"{SLICES}/{NAME}-0")))
            found["metadata"]["labels"] = {"changed": str(len(conflicts))}
            kube_api.update(f"{SLICES}/{NAME}-0", found)

    kube_api.refuse = change_first
    publisher.publish(taints_of("card-0"))
    assert not conflicts
    assert tainted_devices(kube_api) == ["card-0"]
    assert kube_api.get(f"{SLICES}/{NAME}-0")["metadata"]["labels"] == {"changed": "0"}


def test_slice_that_others_create_first_is_updated(
    api: drahealth.ApiServer, monitor: drahealth.Monitor, kube_api: FakeKubeApi, tmp_path: Path
) -> None:
    other = drahealth.SlicePublisher(api, monitor_in(tmp_path / "other"), CARDS[:1])

    def create_first(call: ApiCall) -> None:
        if call.method == "POST":
            kube_api.refuse = lambda call: None
            other.publish(drahealth.Taints())

    kube_api.refuse = create_first
    drahealth.SlicePublisher(api, monitor, CARDS).publish(drahealth.Taints())
    assert generations(kube_api) == {(NODE, 2, 1)}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_failed_publication_is_raised_for_the_retry(
    api: drahealth.ApiServer, monitor: drahealth.Monitor, kube_api: FakeKubeApi, method: str
) -> None:
    publisher = drahealth.SlicePublisher(api, monitor, CARDS)
    kube_api.refuse = lambda call: Refusal(409, "Conflict", "no") if call.method == method else None
    with pytest.raises(drahealth.ApiError, match="409 Conflict"):
        publisher.publish(drahealth.Taints())
    kube_api.refuse = lambda call: None
    publisher.publish(drahealth.Taints())
    assert len(kube_api.all_slices()) == 1


def test_old_api_server_gets_only_taints_that_it_accepts(
    api: drahealth.ApiServer,
    monitor: drahealth.Monitor,
    kube_api: FakeKubeApi,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def check(devices: list[dict[str, Any]], now: str) -> None:
        for device in devices:
            for taint in device.get("taints", []):
                if taint["effect"] == "None":
                    raise Refusal(422, "Invalid", "spec.devices[0].taints[0].effect: Unsupported value")
        _check_slice(devices, now)

    monkeypatch.setattr("go_driver.api_server._check_slice", check)
    publisher = drahealth.SlicePublisher(api, monitor, CARDS)
    informing = XID._replace(effect=drahealth.Effect.NONE)
    taints = taints_of("card-0", taint=informing).devices | taints_of("card-1").devices
    publisher.publish(drahealth.Taints(taints))
    assert tainted_devices(kube_api) == ["card-1"]
    assert "published without taints of effect None" in caplog.text


def test_dropped_taints_are_logged_and_not_written_again(
    api: drahealth.ApiServer,
    monitor: drahealth.Monitor,
    kube_api: FakeKubeApi,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def drop_devices(devices: list[dict[str, Any]], now: str) -> None:
        for device in devices:
            device.pop("taints", None)
            device.pop("consumesCounters", None)

    monkeypatch.setattr("go_driver.api_server._check_slice", drop_devices)
    device = drahealth.SliceDevice("card-0", fields={"consumesCounters": [{"counterSet": "x"}]})
    publisher = drahealth.SlicePublisher(api, monitor, [device])
    for _ in range(3):
        publisher.publish(taints_of("card-0"))
    assert kube_api.writes() == ["POST"]
    assert caplog.text.count("its feature gate DRADeviceTaints is off") == 1
    assert generations(kube_api) == {(NODE, 1, 1)}


def test_two_instances_do_not_rewrite_dropped_fields_in_turn(
    api: drahealth.ApiServer,
    monitor: drahealth.Monitor,
    kube_api: FakeKubeApi,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def drop_field(devices: list[dict[str, Any]], now: str) -> None:
        devices[0].pop("bindsToNode", None)

    monkeypatch.setattr("go_driver.api_server._check_slice", drop_field)
    device = drahealth.SliceDevice("card-0", fields={"bindsToNode": True})
    first = drahealth.SlicePublisher(api, monitor, [device])
    second = drahealth.SlicePublisher(api, monitor_in(tmp_path / "second"), [device])
    for publisher in (first, second, first, second, first):
        publisher.publish(drahealth.Taints())
    assert kube_api.writes() == ["POST", "PUT"]
    assert generations(kube_api) == {(NODE, 2, 1)}


# --- repair ------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_publisher, "RETRY_S", 0.01)
    monkeypatch.setattr(slice_publisher, "RETRY_MAX_S", 0.01)
    monkeypatch.setattr(slice_publisher, "COMPARE_S", 0.01)
    monkeypatch.setattr("agent.serve.kube_api.object_watch.RETRY_S", 0.01)


Started = Callable[..., drahealth.SlicePublisher]


@pytest.fixture
def running_publisher(
    quick: None, api: drahealth.ApiServer, monitor: drahealth.Monitor, kube_api: FakeKubeApi
) -> Iterator[drahealth.SlicePublisher]:
    with drahealth.SlicePublisher(api, monitor, CARDS) as publisher:
        publisher.publish(taints_of("card-0"))
        eventually(lambda: any("watch=true" in call.target for call in kube_api.calls), "watch")
        yield publisher
    assert publisher.stop(PATIENCE_S)


def test_slices_that_the_kubelet_deletes_return(
    running_publisher: drahealth.SlicePublisher, kube_api: FakeKubeApi
) -> None:
    for _ in range(2):
        kube_api.wipe(DRIVER)
        eventually(lambda: tainted_devices(kube_api) == ["card-0"], "slices are published again")


def test_slices_that_others_change_are_restored(
    running_publisher: drahealth.SlicePublisher, kube_api: FakeKubeApi
) -> None:
    found = json.loads(json.dumps(kube_api.get(f"{SLICES}/{NAME}-0")))
    found["spec"]["devices"] = []
    kube_api.update(f"{SLICES}/{NAME}-0", found)
    eventually(lambda: tainted_devices(kube_api) == ["card-0"], "devices are published again")


def test_new_devices_are_published_without_a_change_of_taints(
    running_publisher: drahealth.SlicePublisher, kube_api: FakeKubeApi
) -> None:
    running_publisher.set_devices(CARDS[:1])
    eventually(lambda: generations(kube_api) == {(NODE, 2, 1)}, "new generation")


def test_new_devices_do_not_wait_for_the_pause_between_repairs(
    api: drahealth.ApiServer,
    monitor: drahealth.Monitor,
    kube_api: FakeKubeApi,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slice_publisher, "RETRY_S", 3600.0)
    monkeypatch.setattr(slice_publisher, "RETRY_MAX_S", 3600.0)
    with drahealth.SlicePublisher(api, monitor, CARDS) as publisher:
        publisher.publish(drahealth.Taints())
        for count, generation in ((2, 2), (1, 3), (0, 4)):
            publisher.set_devices(CARDS[:count])
            eventually(lambda: generations(kube_api) == {(NODE, generation, 1)}, f"{count} devices")  # noqa: B023
    assert publisher.stop(PATIENCE_S)


def test_only_changes_by_others_cause_a_comparison(
    api: drahealth.ApiServer, monitor: drahealth.Monitor, kube_api: FakeKubeApi
) -> None:
    publisher = drahealth.SlicePublisher(api, monitor, CARDS)
    publisher.publish(drahealth.Taints())
    own = kube_api.get(f"{SLICES}/{NAME}-0")
    changed = own | {"metadata": own["metadata"] | {"resourceVersion": "999"}}
    gone = own | {"metadata": own["metadata"] | {"name": "other"}}
    kinds = drahealth.WatchEventKind
    foreign = {
        (kind, name): publisher._is_foreign(drahealth.WatchEvent(kind, objects))
        for kind, name, objects in (
            (kinds.LISTED, "own", (own,)),
            (kinds.LISTED, "none", ()),
            (kinds.LISTED, "more", (own, gone)),
            (kinds.CHANGED, "own", (own,)),
            (kinds.CHANGED, "changed", (changed,)),
            (kinds.CHANGED, "new", (gone,)),
            (kinds.DELETED, "own", (own,)),
            (kinds.DELETED, "unknown", (gone,)),
        )
    }
    assert {key for key, value in foreign.items() if not value} == {
        (kinds.LISTED, "own"),
        (kinds.CHANGED, "own"),
        (kinds.DELETED, "unknown"),
    }


def test_slices_are_compared_periodically_without_the_verb_watch(
    quick: None,
    api: drahealth.ApiServer,
    monitor: drahealth.Monitor,
    kube_api: FakeKubeApi,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kube_api.refuse = forbid("GET", "watch=true")
    with drahealth.SlicePublisher(api, monitor, CARDS) as publisher:
        publisher.publish(drahealth.Taints())
        kube_api.wipe(DRIVER)
        eventually(lambda: len(kube_api.all_slices()) == 1, "slices are published again")
        refused = len([call for call in kube_api.calls if "watch=true" in call.target])
        eventually(
            lambda: len([call for call in kube_api.calls if "watch=true" in call.target]) > refused + 1,
            "further attempts to watch",
        )
    assert caplog.text.count("watch of resourceslices.resource.k8s.io") == 1
    assert "they are compared with it every" in caplog.text


def test_repair_is_tried_until_the_api_server_answers(
    running_publisher: drahealth.SlicePublisher, kube_api: FakeKubeApi, caplog: pytest.LogCaptureFixture
) -> None:
    kube_api.refuse = lambda call: (
        Refusal(503, "ServiceUnavailable", "away") if call.method == "POST" else None
    )
    kube_api.wipe(DRIVER)
    eventually(lambda: [call.method for call in kube_api.calls].count("POST") > 2, "several attempts")
    kube_api.refuse = lambda call: None
    eventually(lambda: tainted_devices(kube_api) == ["card-0"], "slices are published again")
    assert caplog.text.count("ResourceSlices not compared with the API server: 503") == 1


def test_retry_after_of_the_api_server_delays_the_repair(
    api: drahealth.ApiServer, monitor: drahealth.Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = drahealth.SlicePublisher(api, monitor, CARDS)
    publisher.publish(drahealth.Taints())
    waits: list[float | None] = []

    class State(threading.Condition):
        def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:  # type: ignore[override]
            if timeout is not None:
                waits.append(timeout)
                publisher._stopping = True
            return predicate()

    def refuse(*_: object) -> None:
        raise drahealth.ApiError(429, "TooManyRequests", "", retry_after_s=45)

    monkeypatch.setattr(api, "list_objects", refuse)
    publisher._state = State()
    publisher._due = True
    thread = threading.Thread(target=publisher._repair)
    thread.start()
    thread.join(PATIENCE_S)
    assert waits == [45]


@pytest.mark.parametrize(
    "garbage",
    [
        {},
        {"kind": "ResourceSliceList", "items": ["a"]},
        {
            "kind": "ResourceSliceList",
            "metadata": {"resourceVersion": "1"},
            "items": [{"metadata": {"name": "a", "resourceVersion": "1"}}],
        },
    ],
)
def test_repair_continues_after_answers_of_another_program(
    running_publisher: drahealth.SlicePublisher, kube_api: FakeKubeApi, garbage: dict[str, Any]
) -> None:
    kube_api.garbage = garbage
    kube_api.calls.clear()
    kube_api.break_streams()
    running_publisher.set_devices(CARDS[:1])
    eventually(lambda: len([call for call in kube_api.calls if "watch" not in call.target]) > 2, "attempts")
    assert not [call for call in kube_api.calls if call.method == "DELETE"]
    kube_api.garbage = None
    kube_api.wipe(DRIVER)
    eventually(lambda: tainted_devices(kube_api) == ["card-0"], "slices are published again")


def test_stop_ends_both_threads_and_keeps_the_slices(
    quick: None, api: drahealth.ApiServer, monitor: drahealth.Monitor, kube_api: FakeKubeApi
) -> None:
    publisher = drahealth.SlicePublisher(api, monitor, CARDS)
    earlier = set(threading.enumerate())
    with publisher:
        publisher.publish(drahealth.Taints())
        threads = [
            thread
            for thread in threading.enumerate()
            if thread.name.startswith("dh-slices") and thread not in earlier
        ]
        assert len(threads) == 2
        assert publisher.stop(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert len(kube_api.all_slices()) == 1
    with pytest.raises(RuntimeError, match="can be started only once"):
        publisher.start()


def test_stop_after_a_start_without_threads_has_nothing_to_end(
    api: drahealth.ApiServer, monitor: drahealth.Monitor
) -> None:
    publisher = drahealth.SlicePublisher(api, monitor, CARDS)
    with no_threads(), pytest.raises(RuntimeError, match="can't start new thread: dh-slices"):
        publisher.start()
    assert publisher.stop(PATIENCE_S)


# --- with a monitor ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
def test_taint_is_published_before_a_failed_device_is_answered(
    api: drahealth.ApiServer, monitor: drahealth.Monitor, kube_api: FakeKubeApi
) -> None:
    """The scheduler must not choose the device for the pod's next attempt."""
    monitor.tracker._taint_wait_s = PATIENCE_S  # above the limit of the configuration
    monitor.add(drahealth.Device("card-0"))
    monitor.check(every_s=0.1, timeout_s=PATIENCE_S, name="link")(lambda device: None)
    claim = drahealth.Claim(
        "default", "one", "uid-1", devices=(drahealth.ClaimDevice("it", DRIVER, NODE, "card-0"),)
    )

    @drahealth.classified(monitor)
    def prepare(claim: drahealth.Claim) -> None:
        raise drahealth.FailedDeviceError("card-0", "link is down, not up", code="card.link")

    with drahealth.SlicePublisher(api, monitor, CARDS[:1]), monitor:
        assert monitor.wait_ready(PATIENCE_S)
        eventually(lambda: len(kube_api.all_slices()) == 1, "first publication")
        with pytest.raises(drahealth.PrepareError) as caught:
            prepare(claim)
        assert tainted_devices(kube_api) == ["card-0"]
    assert caught.value.verdict.code == "card.link"


def test_hanging_api_server_delays_the_error_and_does_not_prevent_it(
    api: drahealth.ApiServer, tmp_path: Path, kube_api: FakeKubeApi
) -> None:
    config = drahealth.Config(node_name=NODE, taint_wait_s=0.2)
    monitor = drahealth.Monitor(DRIVER, config=config, hardware=False, kubelet_dir=tmp_path)
    monitor.add(drahealth.Device("card-0"))
    monitor.check(every_s=0.1, timeout_s=PATIENCE_S, name="link")(lambda device: None)
    release = threading.Event()

    def hang(call: ApiCall) -> None:
        release.wait()

    @drahealth.classified(monitor)
    def prepare(claim: drahealth.Claim) -> None:
        raise drahealth.FailedDeviceError("card-0", "link is down, not up", code="card.link")

    claim = drahealth.Claim(
        "default", "one", "uid-1", devices=(drahealth.ClaimDevice("it", DRIVER, NODE, "card-0"),)
    )
    drahealth.SlicePublisher(api, monitor, CARDS[:1])
    with monitor:
        assert monitor.wait_ready(PATIENCE_S)
        eventually(lambda: len(kube_api.all_slices()) == 1, "first publication")
        kube_api.refuse = hang
        with suppress(drahealth.PrepareError):
            prepare(claim)
        assert not tainted_devices(kube_api)
        release.set()
        eventually(lambda: tainted_devices(kube_api) == ["card-0"], "taint is published later")


def test_publisher_is_created_before_the_start_of_the_monitor(
    api: drahealth.ApiServer, monitor: drahealth.Monitor
) -> None:
    with monitor, pytest.raises(RuntimeError, match="on_taints\\(\\) was called after start"):
        drahealth.SlicePublisher(api, monitor)


def test_logger_of_the_package_is_quiet_while_slices_are_in_order(
    running_publisher: drahealth.SlicePublisher, caplog: pytest.LogCaptureFixture
) -> None:
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
