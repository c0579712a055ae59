"""``drahealth explain``: affected pods from any combination of sources, with the source of each fact."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agents import short_tmp
from explain_node import (
    GROUP,
    Node,
    claim_object,
    pod_object,
    podresources_answer,
    pods_answer,
    prepared_claim,
    reservations,
    silent_servers,
)
from hung_file import hung_file
from kubelet_files import DRIVER
from patience import PATIENCE_S
from prepare_samples import claim as driver_claim
from prepare_samples import verdict
from wire.kubelet_apis import message_class
from wire.kubelet_apis import pod as kubelet_pod

from agent.cli.explain.build import explain
from agent.cli.explain.model import SourcePaths
from agent.cli.explain.sources import query_all_sources
from agent.cli.explain.text import CONSEQUENCES, render
from agent.cli.output.terminal import TextStyle
from agent.model.claim import DeviceRef
from agent.model.claim_sources import Origin
from agent.model.health import Effect, Taint, Taints
from agent.model.prepare import ErrorClass
from agent.prepare import prepare_ledger as ledgers
from agent.prepare.prepare_ledger import PrepareLedger
from agent.serve.kubelet import client, pods_api
from agent.sources import kubelet_files
from agent.store import driver_files

__all__ = ["short_tmp"]

SOCKET_S, DISK_S = 2.0, 5.0
"""Times that the command waits for sources that hang; for others the tests let it wait longer."""

XID = replace(verdict(ErrorClass.FAILED_DEVICE, "gpu.xid.79"), summary="off the bus", advice="reboot")


def set_limits(monkeypatch: pytest.MonkeyPatch, *, socket_s: float, disk_s: float) -> None:
    """Set how long the command waits for a socket and for a file."""
    for module in ("agent.cli.explain.sources", "agent.node.pods.queries"):
        monkeypatch.setattr(f"{module}.SOCKET_TIMEOUT_S", socket_s)
        monkeypatch.setattr(f"{module}.DISK_TIMEOUT_S", disk_s)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command wait for a server of the test as long as a busy machine needs."""
    set_limits(monkeypatch, socket_s=PATIENCE_S, disk_s=PATIENCE_S)


@pytest.fixture
def node(short_tmp: Path, capsys: pytest.CaptureFixture[str]) -> Node:
    return Node(short_tmp, capsys)


@pytest.fixture
def train(node: Node) -> Node:
    """One pod with two devices; the kubelet has one of them as Unhealthy."""
    node.write_checkpoint(prepared_claim("gpus", "gpu-0", "gpu-1", pods=["u-1"]))
    node.health_state("Unhealthy", "gpu-0", message="XID 79")
    return node


def affected_pods(document: dict) -> list[tuple[str | None, str | None, bool]]:
    return [(pod["pod"]["name"], pod["pod"]["uid"], pod["sure"]) for pod in document["hurt"]]


# --- explanations from files -------------------------------------------------------------------------------


def test_claim_and_pod_files_alone_explain_a_device(node: Node) -> None:
    claims = node.write_objects("c.json", claim_object("gpus", "gpu-0", reserved_for=reservations("u-1")))
    pods = node.write_objects("p.json", pod_object("pod-u-1", "gpus", uid="u-1", owner="train"))
    code, out, err = node.run_bare("gpu-0", "--claims", claims, "--pods", pods)
    assert (code, err) == (3, "")
    assert "? team-a/gpus  team-a/pod-u-1  main        Job train  pods-file, claims-file\n" in out
    assert "Unknown: no source reports its health" in out


def test_files_of_objects_limit_node_sources_to_flags(train: Node) -> None:
    claims = train.write_objects("c.json", claim_object("gpus", "gpu-0", reserved_for=reservations("u-1")))
    code, out, _ = train.run_bare("gpu-0", "--claims", claims, "-o", "json")
    assert [source["source"] for source in json.loads(out)["sources"]] == ["claims-file"]
    code, out, _ = train.run_bare(
        "gpu-0", "--claims", claims, "--kubelet-dir", str(train.kubelet), "-o", "json"
    )
    assert code == 2
    sources = [source["source"] for source in json.loads(out)["sources"]]
    assert {"checkpoint", "health-state", "podresources", "pods-api", "claims-file"} <= set(sources)
    assert "agent" not in sources


@pytest.mark.parametrize("flag", ["--pods", "--claims"])
def test_missing_file_of_objects_is_a_usage_error(node: Node, flag: str) -> None:
    code, out, err = node.run_bare("gpu-0", flag, str(node.root / "none.json"))
    assert (code, out) == (64, "")
    assert f"{node.root / 'none.json'}: No such file or directory" in err


def test_two_files_on_standard_input_are_refused(node: Node) -> None:
    code, _, err = node.run_bare("gpu-0", "--pods", "-", "--claims", "-")
    assert code == 64
    assert "--pods and --claims: only one of them can be standard input" in err


def test_pods_in_a_pipe_have_no_timeout(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe of a shell, ``<(kubectl get pods)``, is as slow as its writer."""
    set_limits(monkeypatch, socket_s=PATIENCE_S, disk_s=0)
    with open(node.write_objects("p.json", pod_object("waits")), "rb") as file:
        _, out, _ = node.run_bare("pod", "waits", "--pods", f"/dev/fd/{file.fileno()}")
    assert "pod team-a/waits" in out


def test_mixed_reservations_are_all_named(node: Node) -> None:
    other = {"apiGroup": "example.com", "resource": "jobs", "name": "nightly", "uid": "x-1"}
    claims = node.write_objects(
        "c.json", claim_object("gpus", "gpu-0", reserved_for=[GROUP, *reservations("u-1"), other])
    )
    pods = node.write_objects("p.json", pod_object("worker", "gpus", uid="u-2", group="workers"))
    code, out, _ = node.run_bare("gpu-0", "--claims", claims, "--pods", pods)
    assert code == 3
    assert "used by 0 pods, 2 more may use the device, through 1 claim\n" in out
    assert "pod group workers" in next(line for line in out.splitlines() if "team-a/worker" in line)
    assert "team-a/gpus is reserved for pod group workers (claims-file)" in out
    assert "team-a/gpus is reserved for jobs.example.com nightly (claims-file)" in out


def test_reservations_without_a_pod_are_named_as_orphaned(node: Node) -> None:
    held = [GROUP, {**GROUP, "name": "gone"}, *reservations("u-1", "u-2")]
    claims = node.write_objects("c.json", claim_object("gpus", "gpu-0", reserved_for=held))
    pods = node.write_objects(
        "p.json", pod_object("w", uid="u-9", group="workers"), pod_object("x", uid="u-1")
    )
    _, out, _ = node.run_bare("claim", "gpus", "--claims", claims, "--pods", pods)
    assert "orphaned?     1 pod, pod group gone: no pod in --pods matches\n" in out
    _, out, _ = node.run_bare("claim", "gpus", "--claims", claims, "--pods", pods, "-o", "json")
    assert [orphan["name"] for orphan in json.loads(out)["claims"][0]["orphans"]] == ["gone", "pod-u-2"]
    _, out, _ = node.run_bare("claim", "gpus", "--claims", claims)
    assert "orphaned" not in out  # the kubelet knows the pods of its own node


def workload(kind: str, name: str, uid: str, version: str) -> dict[str, Any]:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"namespace": "team-a", "name": name, "uid": uid},
    }


def test_reservations_without_their_workload_are_named_as_orphaned(node: Node) -> None:
    def entry(group: str, resource: str, name: str, uid: str) -> dict[str, str]:
        return {"apiGroup": group, "resource": resource, "name": name, "uid": uid}

    held = [
        entry("batch", "jobs", "nightly", "j-1"),
        entry("batch", "jobs", "gone", "j-2"),
        entry("apps", "deployments", "web", "d-old"),  # created again since
        entry("example.com", "trainings", "unknown", "t-1"),  # no object of the kind is given
        *reservations("u-1"),
    ]
    claims = node.write_objects("c.json", claim_object("gpus", "gpu-0", reserved_for=held))
    objects = (
        pod_object("x", uid="u-1"),
        workload("Job", "nightly", "j-1", "batch/v1"),
        workload("Job", "gone", "j-2", "other.example.com/v1"),
        workload("Deployment", "web", "d-new", "apps/v1"),
    )
    pods = node.write_objects("p.json", *objects)
    _, out, _ = node.run_bare("claim", "gpus", "--claims", claims, "--pods", pods)
    assert "orphaned?     jobs gone, deployments web: no object in --pods matches\n" in out
    assert "pods-file: 1 pod, 3 other objects" in out
    _, out, _ = node.run_bare("claim", "gpus", "--claims", claims, "--pods", pods, "-o", "json")
    assert [orphan["uid"] for orphan in json.loads(out)["claims"][0]["orphans"]] == ["j-2", "d-old"]


def test_pod_group_whose_object_is_given_is_not_orphaned(node: Node) -> None:
    claims = node.write_objects("c.json", claim_object("gpus", "gpu-0", reserved_for=[GROUP]))
    group = workload("PodGroup", "workers", "g-1", "scheduling.k8s.io/v1alpha2")
    for objects, is_orphaned in (((), True), ((group,), False)):
        pods = node.write_objects("p.json", pod_object("x", uid="u-1"), *objects)
        _, out, _ = node.run_bare("claim", "gpus", "--claims", claims, "--pods", pods)
        assert ("orphaned?" in out) is is_orphaned


def test_unreleased_fields_are_shown_and_ignored(node: Node) -> None:
    claim = claim_object("gpus", "gpu-0")
    claim["spec"] = {"reservedFor": {"apiGroup": "batch", "resource": "jobs", "name": "train", "uid": "j"}}
    claim["status"]["allocation"]["reservedForAnyPod"] = True
    _, out, _ = node.run_bare("claim", "gpus", "--claims", node.write_objects("c.json", claim))
    assert "reserved for  no consumer (claims-file)\n" in out
    assert "meant for     jobs train, any pod: ignored by every kubelet (claims-file)\n" in out


def test_pod_group_uid_does_not_match_a_pod(node: Node) -> None:
    claims = node.write_objects("c.json", claim_object("gpus", "gpu-0", reserved_for=[GROUP]))
    pods = node.write_objects("p.json", pod_object("stranger", uid="g-1"))
    _, out, _ = node.run_bare("claim", "team-a/gpus", "--claims", claims, "--pods", pods)
    assert "stranger" not in out
    assert "reserved for  pod group workers (claims-file)" in out


def test_too_many_reservations_are_counted(node: Node) -> None:
    many = reservations(*(f"u-{number}" for number in range(300)))
    claims = node.write_objects("c.json", claim_object("gpus", "gpu-0", reserved_for=many))
    _, out, _ = node.run_bare("claim", "team-a/gpus", "--claims", claims)
    assert "300 pods; 300 entries, more than the API server accepts (claims-file)" in out


def test_claim_without_allocation_is_marked(node: Node) -> None:
    claims = node.write_objects("c.json", claim_object("gpus"))
    code, out, _ = node.run_bare("claim", "gpus", "--claims", claims)
    assert code == 3
    assert "not allocated; no consumer (claims-file)" in out
    assert "no pod of the claim is known" in out


def test_pod_without_claims_is_ok_and_with_unknown_claim_unknown(node: Node) -> None:
    pods = node.write_objects("p.json", pod_object("plain"))
    code, out, _ = node.run_bare("pod", "team-a/plain", "--pods", pods)
    assert code == 0
    assert "the pod refers to no claim\n" in out
    pods = node.write_objects("p.json", pod_object("waits", "gpus"))
    code, out, _ = node.run_bare("pod", "team-a/waits", "--pods", pods)
    assert code == 3


# --- names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["gpu.example.com/node-1/gpu-0", "node-1/gpu-0", "gpu-0", "example.com/gpu=gpu-0"]
)
def test_device_is_found_by_each_of_its_four_names(train: Node, name: str) -> None:
    code, document = train.document(name)
    assert code == 2
    assert [device["name"] for device in document["devices"]] == ["gpu-0"]


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["gpu-00"], "no device 'gpu-00' is known; did you mean 'gpu-0'?"),
        (["pod", "team-a/x"], "no pod 'team-a/x' is known"),
        (["claim", "team-a/gpu"], "no claim 'team-a/gpu' is known; did you mean 'team-a/gpus'?"),
        (["pod"], "no pod is given; write: drahealth explain pod NAMESPACE/NAME"),
        (["pods", "a/b"], "object kind 'pods' is not one of pod, claim; did you mean 'pod'?"),
        (["a", "b", "c"], "3 arguments are given; name one device, pod or claim"),
    ],
)
def test_unknown_name_is_refused_with_a_suggestion(train: Node, argv: list[str], error: str) -> None:
    code, out, err = train.explain(*argv)
    assert (code, out) == (64, "")
    assert err.startswith(f"drahealth: {error}\n")


def test_unknown_name_lists_unavailable_sources(train: Node) -> None:
    _, _, err = train.explain("pod", "team-a/x")
    for socket in ("run/agent.sock", client.PODRESOURCES_SOCKET, pods_api.SOCKET):
        assert f"not available: {'agent' if 'agent' in socket else ''}" in err
        assert socket in err


def test_ambiguous_name_lists_all_matches(node: Node) -> None:
    node.write_checkpoint(prepared_claim("a", "gpu-0"))
    (node.run_dir / "drivers").mkdir(parents=True)
    node.health_state("Healthy", "gpu-0", "gpu-1")
    other = json.loads((node.kubelet / kubelet_files.HEALTH_FILE).read_text())
    other["nic.example.com"] = {
        "Devices": {"n/gpu-0": {"PoolName": "n", "DeviceName": "gpu-0", "LastUpdated": ""}}
    }
    other["nic.example.com"]["Devices"]["n/gpu-0"]["LastUpdated"] = "2026-11-21T10:00:00Z"
    (node.kubelet / kubelet_files.HEALTH_FILE).write_text(json.dumps(other))
    code, _, err = node.explain("gpu-0")
    assert code == 64
    assert (
        "'gpu-0' matches 2 devices: gpu.example.com/node-1/gpu-0, nic.example.com/n/gpu-0; use a full name"
        in err
    )
    assert node.explain("n/gpu-0")[0] == 3


# --- from the node -----------------------------------------------------------------------------------------


def test_pod_with_prepared_claim_is_affected_for_sure(train: Node) -> None:
    with train.sockets(
        podresources_answer(("pod-u-1", "gpus", ["gpu-0", "gpu-1"])), pods_answer(("u-1", ["gpus"]))
    ):
        code, document = train.document("gpu-0")
        _, out, _ = train.explain("gpu-0")
    assert code == 2
    assert affected_pods(document) == [("pod-u-1", "u-1", True)]
    assert document["hurt"][0]["containers"] == [{"name": "main", "sure": True}]
    assert {source["source"] for source in document["hurt"][0]["toldBy"]} == {
        "checkpoint",
        "podresources",
        "pods-api",
    }
    assert "used by 1 pod, through 1 claim\n" in out
    assert "Unhealthy: only the kubelet has this health\n" in out
    assert "kubelet  Unhealthy: XID 79, updated" in out


def test_healthy_in_the_kubelet_alone_is_unknown(node: Node) -> None:
    node.health_state("Healthy", "gpu-0")
    code, out, _ = node.explain("gpu-0")
    assert code == 3
    assert "Unknown: no source reports its health\n" in out
    assert "Healthy, updated" in out


def test_each_edge_has_its_source_and_time(train: Node) -> None:
    with train.sockets(podresources_answer(("pod-u-1", "gpus", ["gpu-0"])), pods_answer(("u-1", ["gpus"]))):
        _, document = train.document("claim", "team-a/gpus")
    (claim,) = document["claims"]
    edges = [*claim["devices"], *claim["consumers"], *claim["containers"]]
    assert {edge["source"] for edge in edges} == {"checkpoint", "podresources", "pods-api"}
    assert all(edge["read"] for edge in edges)
    assert {edge["source"] for edge in edges if edge["written"]} == {"checkpoint"}
    assert {edge["source"] for edge in edges if edge["byName"]} == {"podresources", "pods-api"}


def test_healthy_in_the_kubelet_of_a_used_device_is_unknown(node: Node) -> None:
    node.write_checkpoint(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
    node.health_state("Healthy", "gpu-0")
    code, out, _ = node.explain("gpu-0")
    assert code == 3
    assert "Healthy, updated" in out


def test_pod_shows_its_claims_devices_and_prepares(train: Node) -> None:
    now_s = time.time()
    ref = driver_claim("gpus", "gpu-0")
    ledger, _ = ledgers.with_failure(
        PrepareLedger(), replace(ref, namespace="team-a", uid="c-gpus"), "", XID, now_s - 3600, "1.2"
    )
    train.driver_stores(ledger, now_s)
    with train.sockets(podresources_answer(), pods_answer(("u-1", ["gpus"]))):
        code, out, _ = train.explain("pod", "team-a/pod-u-1")
    assert code == 2
    assert "pod team-a/pod-u-1  uid u-1, Running" in out
    assert "claim team-a/gpus  uid c-gpus" in out
    assert "✖ gpu.example.com/node-1/gpu-0  Unhealthy" in out
    assert "◌ gpu.example.com/node-1/gpu-1  Unknown" in out
    assert "prepare     gpu.example.com: failed-device, gpu.xid.79: off the bus (1 time, first 60m ago" in out
    assert "; reboot" in out


def test_driver_fault_is_shown_with_its_claim(node: Node) -> None:
    now_s = time.time()
    ledger, _ = ledgers.with_failure(
        PrepareLedger(), driver_claim("gpus", "gpu-0"), "", XID, now_s - 300, "1.2"
    )
    node.driver_stores(ledger, now_s)
    code, out, _ = node.explain("gpu-0")
    assert code == 3
    assert "found broken  gpu.xid.79: off the bus (5m ago, while preparing team/gpus)" in out
    assert "no known pod uses the device" in out


def test_offered_taint_and_its_absence_are_shown(train: Node) -> None:
    state = train.kubelet / "plugins" / DRIVER / "drahealth"
    state.mkdir(parents=True)
    taint = Taint(f"{DRIVER}/gpu.xid.79", "", Effect.NO_EXECUTE, int(time.time()) - 60)
    driver_files.save_taints(
        state / driver_files.TAINTS_FILE, Taints({DeviceRef(DRIVER, "node-1", "gpu-0"): (taint,)})
    )
    _, out, _ = train.explain("gpu-0")
    assert f"taint    {DRIVER}/gpu.xid.79=:NoExecute, offered for " in out
    _, out, _ = train.explain("gpu-1")
    assert "taint    none is offered\n" in out
    assert train.document("gpu-1")[1]["devices"][0]["taints"] == []


def test_claim_prepared_by_the_driver_alone_affects_no_pod(node: Node) -> None:
    now_s = time.time()
    node.driver_stores(
        ledgers.with_success(PrepareLedger(), driver_claim("gpus", "gpu-0"), "", now_s - 5, "1.2"), now_s
    )
    _, document = node.document("gpu-0")
    (claim,) = document["claims"]
    assert [(device["source"], device["relation"]) for device in claim["devices"]] == [("driver", "prepared")]
    assert claim["prepares"][0]["state"] == "prepared"
    assert document["hurt"] == []


def test_name_and_uid_of_maybe_one_pod_stay_two_pods(train: Node) -> None:
    with train.sockets(podresources_answer(("train-0", "gpus", ["gpu-0", "gpu-1"])), pods_answer()):
        _, document = train.document("gpu-0")
        _, out, _ = train.explain("pod", "team-a/train-0")
    assert sorted(affected_pods(document), key=str) == [("train-0", None, True), (None, "u-1", True)]
    assert {pod["uid"]: pod["maybe"] for pod in document["pods"]} == {
        None: [{"namespace": None, "name": None, "uid": "u-1"}],
        "u-1": [{"namespace": "team-a", "name": "train-0", "uid": None}],
    }
    assert "team-a/train-0 (UID not known) and pod u-1 (name not known) share a claim" in out


def test_many_maybe_same_pods_are_counted_not_paired(node: Node) -> None:
    """A kubelet without the pods API has names in one source and UIDs in another."""
    numbers = range(100)
    node.write_checkpoint(prepared_claim("all", "switch", pods=[f"u-{n}" for n in numbers]))
    node.health_state("Unhealthy", "switch")
    with node.sockets(
        podresources_answer(*((f"pod-{n}", "all", ["switch"]) for n in numbers)), pods_answer()
    ):
        _, out, _ = node.explain("switch")
        _, alone, _ = node.explain("pod", "pod-7")
    (line,) = (line for line in out.splitlines() if "same pod?" in line)
    assert "100 pods (UID not known) and 100 pods (name not known) share a claim" in line
    assert "team-a/pod-7 (UID not known) and 100 pods (name not known)" in alone


def test_pod_that_a_new_sandbox_would_refuse_is_a_risk(train: Node) -> None:
    claims = train.write_objects(
        "c.json", claim_object("gpus", "gpu-0", "gpu-1", reserved_for=reservations("u-2"))
    )
    pods = train.write_objects("p.json", pod_object("pod-u-1", "gpus", uid="u-1"))
    _, out, _ = train.explain("gpu-0", "--claims", claims, "--pods", pods)
    assert "risk" in out
    assert "team-a/pod-u-1 would be refused team-a/gpus if its sandbox were created again" in out


def test_conflicting_sources_are_both_shown(train: Node) -> None:
    claims = train.write_objects(
        "c.json", claim_object("gpus", "gpu-0", "gpu-7", reserved_for=reservations("u-1"))
    )
    code, out, _ = train.explain("claim", "team-a/gpus", "--claims", claims)
    assert code == 2
    (line,) = (line for line in out.splitlines() if line.lstrip().startswith("conflict"))
    assert "checkpoint: node-1/gpu-0, node-1/gpu-1" in line
    assert "claims-file: node-1/gpu-0, node-1/gpu-7" in line


def test_recreated_claim_of_one_name_is_two_claims(train: Node) -> None:
    claims = train.write_objects(
        "c.json", claim_object("gpus", "gpu-9", uid="c-new", reserved_for=reservations("u-1"))
    )
    _, out, _ = train.explain("claim", "team-a/gpus", "--claims", claims)
    assert "claim team-a/gpus  uid c-gpus" in out
    assert "claim team-a/gpus  uid c-new" in out
    assert "conflict" in out


def test_pod_created_again_may_use_the_old_device_only(train: Node) -> None:
    def pods() -> Any:
        return message_class("v1alpha1", "ListPodsResponse")(
            pods=[kubelet_pod("u-2", "train-0", claims=["gpus"], phase="Pending")]
        )

    with train.sockets(podresources_answer(("train-0", "gpus", ["gpu-0", "gpu-1"])), pods):
        _, document = train.document("gpu-0")
    assert affected_pods(document) == [(None, "u-1", True), ("train-0", "u-2", False)]


# --- missing sources ---------------------------------------------------------------------------------------

KUBELET = {
    "checkpoint": kubelet_files.CLAIMS_FILE,
    "health-state": kubelet_files.HEALTH_FILE,
    "podresources": client.PODRESOURCES_SOCKET,
    "pods-api": pods_api.SOCKET,
}


@pytest.mark.parametrize("source", KUBELET)
def test_missing_source_costs_only_its_own_content(train: Node, source: str) -> None:
    with train.sockets(podresources_answer(("pod-u-1", "gpus", ["gpu-0"])), pods_answer(("u-1", ["gpus"]))):
        (train.kubelet / KUBELET[source]).unlink()
        code, document = train.document("gpu-0")
        _, out, _ = train.explain("gpu-0")
    results = {source["source"]: source for source in document["sources"]}
    assert results[source]["absence"] == "absent"
    assert results[source]["costs"] == CONSEQUENCES[source]
    assert all(results[other]["absence"] is None for other in KUBELET if other != source)
    assert affected_pods(document)[0][2] is True
    assert code == (3 if source == "health-state" else 2)
    assert f"{source}: {CONSEQUENCES[source]} ({train.kubelet / KUBELET[source]}: " in out


@pytest.mark.parametrize("source", ["checkpoint", "health-state"])
def test_corrupt_kubelet_file_costs_only_its_own_content(train: Node, source: str) -> None:
    (train.kubelet / KUBELET[source]).write_text("{")
    with train.sockets(podresources_answer(("pod-u-1", "gpus", ["gpu-0"])), pods_answer(("u-1", ["gpus"]))):
        _, document = train.document("gpu-0")
    results = {source["source"]: source for source in document["sources"]}
    assert results[source]["absence"] == "unreadable"
    assert affected_pods(document)


def test_corrupt_driver_file_is_named(train: Node) -> None:
    train.driver_stores(PrepareLedger(), time.time())
    (file,) = train.kubelet.glob("plugins/*/drahealth/prepares.json")
    file.write_text("{")
    _, out, _ = train.explain("gpu-0")
    assert f"prepares: {CONSEQUENCES['prepares']} ({file}: " in out


def test_unlistable_directory_is_unreadable_not_empty(train: Node) -> None:
    plugins = train.kubelet / "plugins"
    plugins.rmdir()
    plugins.symlink_to(plugins)
    _, document = train.document("gpu-0")
    results = {source["source"]: source for source in document["sources"]}
    assert results["prepares"]["absence"] == results["taints"]["absence"] == "unreadable"
    why = f"directory of drivers {plugins}: cannot be listed: Too many levels of symbolic links"
    assert (results["prepares"]["why"], results["prepares"]["place"]) == (why, str(plugins))


def test_silent_sockets_time_out_in_parallel(train: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources that hang are queried in parallel, with a limit of two seconds each."""
    set_limits(monkeypatch, socket_s=SOCKET_S, disk_s=PATIENCE_S)
    hung = [
        train.run_dir / "agent.sock",
        train.run_dir / "drivers" / "gpu.example.com.sock",
        train.kubelet / client.PODRESOURCES_SOCKET,
        train.kubelet / pods_api.SOCKET,
    ]
    with silent_servers(*hung):
        code, document = train.document("gpu-0")
    assert code == 2
    assert affected_pods(document) == [(None, "u-1", True)]
    late = {
        source["place"]
        for source in document["sources"]
        if source["why"] and source["why"].endswith("within 2 s")
    }
    assert late == {str(path) for path in hung}


def test_hung_file_times_out_alone(train: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result lacks only the file, after five seconds."""
    set_limits(monkeypatch, socket_s=PATIENCE_S, disk_s=DISK_S)
    released = threading.Event()
    with ExitStack() as stack:
        try:
            stack.enter_context(hung_file(train.kubelet / kubelet_files.CLAIMS_FILE, released.is_set))
        except OSError as error:
            pytest.skip(f"no FUSE here: {error}")
        stack.callback(released.set)
        with train.sockets(
            podresources_answer(("pod-u-1", "gpus", ["gpu-0"])), pods_answer(("u-1", ["gpus"]))
        ):
            code, document = train.document("gpu-0")
    results = {source["source"]: source for source in document["sources"]}
    assert code == 2
    assert results["checkpoint"]["why"].endswith(": no answer within 5 s")
    assert affected_pods(document) == [("pod-u-1", "u-1", True)]


def test_node_without_any_source_is_unreachable(node: Node) -> None:
    code, out, err = node.explain("gpu-0")
    assert (code, out) == (69, "")
    assert err.startswith("drahealth: no source on this node answered:\n")
    for source in (*KUBELET, "agent"):
        assert f"\n  {source}: " in err


def test_every_source_has_a_consequence_text() -> None:
    origins = {str(origin) for origin in Origin} - {"driver", "pods-file"}
    assert set(CONSEQUENCES) == origins | {"agent", "driver socket", "prepares", "taints", "history"}


# --- many pods ---------------------------------------------------------------------------------------------


def test_shared_device_affects_all_hundred_pods(node: Node) -> None:
    numbers = range(100)
    own = [
        prepared_claim(f"own-{n}", *(f"gpu-{n}-{of}" for of in range(4)), pods=[f"u-{n}"]) for n in numbers
    ]
    node.write_checkpoint(*own, prepared_claim("all", "switch", pods=[f"u-{n}" for n in numbers]))
    node.health_state("Unhealthy", "switch", message="link down")
    with node.sockets(
        podresources_answer(*((f"pod-u-{n}", "all", ["switch"]) for n in numbers)),
        pods_answer(*((f"u-{n}", [f"own-{n}", "all"]) for n in numbers)),
    ):
        code, document = node.document("switch")
        _, out, _ = node.explain("switch")
        _, entry = node.document("gpu-42-3")
        _, pod = node.document("pod", "team-a/pod-u-42")
    assert code == 2
    assert sorted(affected_pods(document)) == sorted((f"pod-u-{n}", f"u-{n}", True) for n in numbers)
    assert out.count("• team-a/all") == 100
    assert affected_pods(entry) == [("pod-u-42", "u-42", True)]
    assert [len({d["name"] for d in claim["devices"]}) for claim in pod["claims"]] == [1, 4]
    assert pod["severity"] == "unhealthy"


# --- text --------------------------------------------------------------------------------------------------


def test_message_with_control_characters_is_cleaned(train: Node) -> None:
    train.health_state("Unhealthy", "gpu-0", message="\x1b[2J\nno")
    _, out, _ = train.explain("gpu-0")
    assert "\x1b" not in out
    assert "\ufffd[2J" in out


def test_file_with_control_characters_is_cleaned(node: Node) -> None:
    odd = "u\x1b[2J"
    claims = node.write_objects(
        "c.json", claim_object("gpus", "gpu-0\x07", uid=odd, reserved_for=reservations(odd))
    )
    pods = node.write_objects("p.json", pod_object("pod\x1b", "gpus", uid=odd, group="g\x1b", owner="j\x1b"))
    for argv in (["gpu-0\x07"], ["claim", odd], ["pod", odd]):
        _, out, err = node.run_bare(*argv, "--claims", claims, "--pods", pods)
        assert err == ""
        assert "\x1b" not in out
        assert "\x07" not in out


def test_claim_not_created_yet_is_shown_at_its_pod(node: Node) -> None:
    pod = pod_object("waits")
    pod["spec"]["resourceClaims"] = [{"name": "gpus", "resourceClaimTemplateName": "one-gpu"}]
    code, out, _ = node.run_bare("pod", "waits", "--pods", node.write_objects("p.json", pod))
    assert code == 3
    assert "  claim gpus is not created yet, or not needed\n" in out
    assert "no claim of the pod is known\n" in out
    _, out, _ = node.run_bare("pod", "waits", "--pods", node.write_objects("p.json", pod), "-o", "json")
    (obj,) = json.loads(out)["pods"][0]["objects"]
    assert obj["claims"] == [{"name": "gpus", "claim": None}]


def kubelets_pod(*, template: bool = False, extended: str = "") -> Callable[[], Any]:
    """Return an answer of the pods API: a running pod, whose claims' names the kubelet's copy lacks."""
    found = message_class("core", "Pod")()
    found.metadata.name, found.metadata.namespace, found.metadata.uid = "train", "team-a", "u-1"
    found.spec.nodeName, found.status.phase = "node-1", "Running"
    container = found.spec.containers.add(name="main", image="")
    if template:
        found.spec.resourceClaims.add(name="x")
    if extended:
        container.resources.limits[extended].string = "1"
    return lambda: message_class("v1alpha1", "ListPodsResponse")(pods=[found.SerializeToString()])


def test_claim_name_that_the_kubelet_lacks_is_not_called_uncreated(train: Node) -> None:
    with train.sockets(podresources_answer(), kubelets_pod(template=True)):
        _, out, _ = train.explain("pod", "train")
    assert "claim x: its name is not in the pods API, but in the API server (--pods)" in out
    assert "not created yet" not in out
    assert "conflict" not in out


@pytest.mark.parametrize(
    ("resource", "conflicts"),
    [
        ("gpu.example.com/gpu", 0),
        ("deviceclass.resource.kubernetes.io/gpu", 0),
        ("requests.example.com/gpu", 1),
        ("cpu", 1),
        ("", 1),
    ],
)
def test_claim_of_an_extended_resource_is_no_conflict(train: Node, resource: str, conflicts: int) -> None:
    with train.sockets(podresources_answer(), kubelets_pod(extended=resource)):
        _, document = train.document("pod", "train")
    assert [conflict["kind"] for conflict in document["conflicts"]] == ["not-named"] * conflicts


def pending_pod(node_name: str = "node-1") -> dict[str, Any]:
    """Return a pending pod that names the claim gpus."""
    found = pod_object("new", "gpus", uid="u-9")
    found["spec"]["nodeName"], found["status"]["phase"] = node_name, "Pending"
    return found


@pytest.mark.parametrize(
    ("place", "reserved_for", "refused"),
    [("node-1", "u-2", True), ("node-1", "u-9", False), ("elsewhere", "u-2", False)],
)
def test_pending_pod_without_a_reservation_is_a_risk(
    node: Node, monkeypatch: pytest.MonkeyPatch, place: str, reserved_for: str, refused: bool
) -> None:
    monkeypatch.setenv("DRAHEALTH_NODE_NAME", "node-1")
    claims = node.write_objects(
        "c.json", claim_object("gpus", "gpu-0", reserved_for=reservations(reserved_for))
    )
    flags = ("--claims", claims, "--pods", node.write_objects("p.json", pending_pod(place)))
    _, out, _ = node.explain("pod", "new", *flags)
    text = "team-a/new is refused team-a/gpus by the kubelet, and stays pending: the claim is not reserved"
    assert (text in " ".join(out.split())) is refused


def failed_prepare(node: Node) -> None:
    """Store a failed prepare of the claim gpus, by gpu-0."""
    now_s = time.time()
    ref = replace(driver_claim("gpus", "gpu-0"), namespace="team-a", uid="c-gpus")
    ledger, _ = ledgers.with_failure(PrepareLedger(), ref, "", XID, now_s - 60, "1.2")
    node.driver_stores(ledger, now_s)


def test_device_of_a_failed_prepare_is_shown_at_its_pod(node: Node) -> None:
    failed_prepare(node)
    node.write_checkpoint(prepared_claim("gpus", pods=["u-1"]))
    node.health_state("Unhealthy", "gpu-0", message="XID 79")
    code, out, _ = node.explain("pod", "u-1")
    assert code == 2
    assert "✖ gpu.example.com/node-1/gpu-0  Unhealthy" in out
    assert "its prepare failed" in out


def test_claim_known_from_a_failed_prepare_alone_is_shown(node: Node) -> None:
    failed_prepare(node)
    for name in ("team-a/gpus", "c-gpus"):
        code, out, _ = node.explain("claim", name)
        assert code == 3
        assert "claim team-a/gpus  uid c-gpus" in out
        assert "gpu.example.com/node-1/gpu-0" in out
        assert "prepare    gpu.example.com: failed-device, gpu.xid.79: off the bus" in out
        assert "no pod of the claim is known" in out


# --- all claims --------------------------------------------------------------------------------------------


def busy_node(node: Node) -> tuple[str, ...]:
    """Create a node with a sick device, a shared one, a failed prepare, and claims of another node."""
    node.write_checkpoint(
        prepared_claim("gpus", "gpu-0", "gpu-1", pods=["u-1"]),
        prepared_claim("nics", "nic-0", pods=["u-1", "u-2"]),
    )
    node.health_state("Unhealthy", "gpu-0", message="XID 79")
    now_s = time.time()
    ref = replace(driver_claim("late", "gpu-5"), namespace="team-a", uid="c-late")
    ledger, _ = ledgers.with_failure(PrepareLedger(), ref, "", XID, now_s - 60, "1.2")
    node.driver_stores(ledger, now_s)
    job = {"apiGroup": "batch", "resource": "jobs", "name": "nightly", "uid": "j-9"}
    claims = node.write_objects(
        "c.json",
        claim_object("nics", "nic-0", reserved_for=[*reservations("u-1", "u-2"), GROUP, job]),
        claim_object("elsewhere", "gpu-7", reserved_for=reservations("u-7")),
    )
    return ("--claims", claims, *node.flags)


def all_rows(out: str) -> list[list[str]]:
    """Return the lines of the table, each as its cells after the sign."""
    lines = out.split("\n\n")[1].splitlines()
    starts = [lines[0].index(title) for title in lines[0].split()]
    ends = [*starts[1:], None]
    return [[line[a:b].strip() for a, b in zip(starts, ends, strict=True)] for line in lines[1:]]


def test_all_claims_have_a_line_for_each_consumer(node: Node) -> None:
    flags = busy_node(node)
    with node.sockets(podresources_answer(), pods_answer(("u-1", ["gpus", "nics"]), ("u-2", ["nics"]))):
        code, out, _ = node.run_bare("--all", *flags)
        document = json.loads(node.run_bare("--all", *flags, "-o", "json")[1])
    device = f"{DRIVER}/node-1"
    assert code == 2
    assert document["claimsElsewhere"] == 1
    assert out.startswith("3 claims, 5 consumers, 4 devices: 1 Unhealthy, 3 Unknown\n")
    assert all_rows(out) == [
        ["team-a/gpus", "team-a/pod-u-1", "prepared", "", f"{device}/gpu-0, gpu-1", "Unhealthy"],
        [
            "team-a/late",
            "no consumer is known",
            "",
            "",
            f"{device}/gpu-5",
            "Unknown; prepare fails (gpu.xid.79)",
        ],
        ["team-a/nics", "team-a/pod-u-1", "prepared", "", f"{device}/nic-0", "Unknown"],
        ["team-a/nics", "team-a/pod-u-2", "prepared", "", f"{device}/nic-0", "Unknown"],
        ["team-a/nics", "jobs.batch nightly", "reserved", "", f"{device}/nic-0", "Unknown"],
        ["team-a/nics", "pod group workers", "reserved", "", f"{device}/nic-0", "Unknown"],
    ]
    assert "  elsewhere  1 claim that no source on this node has: left out\n" in out
    assert "checkpoint: 2 claims" in out


def test_all_claims_are_a_document_of_all_objects(node: Node) -> None:
    flags = busy_node(node)
    with node.sockets(podresources_answer(), pods_answer(("u-1", ["gpus", "nics"]), ("u-2", ["nics"]))):
        code, out, _ = node.run_bare("--all", *flags, "-o", "json")
    document = json.loads(out)
    assert (code, document["kind"], document["severity"]) == (2, "all", "unhealthy")
    assert [claim["name"] for claim in document["claims"]] == ["gpus", "late", "nics"]
    assert [pod["uid"] for pod in document["pods"]] == ["u-1", "u-2"]
    assert [device["name"] for device in document["devices"]] == ["gpu-0", "gpu-1", "gpu-5", "nic-0"]
    assert {(pod["device"]["name"], pod["pod"]["uid"]) for pod in document["hurt"]} == {
        ("gpu-0", "u-1"),
        ("gpu-1", "u-1"),
        ("nic-0", "u-1"),
        ("nic-0", "u-2"),
    }


def test_all_claims_of_files_alone_are_listed(node: Node) -> None:
    claims = node.write_objects(
        "c.json", claim_object("a", "gpu-0"), claim_object("b", reserved_for=reservations("u-1"))
    )
    code, out, _ = node.run_bare("--all", "--claims", claims)
    assert code == 3
    assert [row[:2] for row in all_rows(out)] == [
        ["team-a/a", "no consumer is known"],
        ["team-a/b", "team-a/pod-u-1"],
    ]


def test_all_without_claims_is_ok_unless_a_source_is_unreadable(node: Node) -> None:
    node.write_checkpoint()
    node.health_state("Healthy", "gpu-0")
    code, out, _ = node.explain("--all")
    assert (code, out.splitlines()[0]) == (0, "no claim on this node is known")
    (node.kubelet / kubelet_files.CLAIMS_FILE).write_text("torn")
    assert node.explain("--all")[0] == 3


def test_all_names_orphans_with_their_claim(node: Node) -> None:
    claims = node.write_objects("c.json", claim_object("gpus", "gpu-0", reserved_for=reservations("u-1")))
    pods = node.write_objects("p.json", pod_object("other", uid="u-9"))
    _, out, _ = node.run_bare("--all", "--claims", claims, "--pods", pods)
    assert "orphaned?  team-a/gpus: 1 pod: no pod in --pods matches\n" in out


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--all", "gpu-0"], "--all explains all claims; leave out 'gpu-0'"),
        ([], "no device, pod or claim is given"),
    ],
)
def test_all_takes_no_name_and_a_name_is_needed_otherwise(node: Node, argv: list[str], error: str) -> None:
    code, out, err = node.run_bare(*argv)
    assert (code, out) == (64, "")
    assert error in err


def test_device_text_fits_an_ascii_terminal(node: Node) -> None:
    node.write_checkpoint(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
    node.health_state("Unhealthy", "gpu-0", message="word " * 60)
    answers = asyncio.run(query_all_sources(SourcePaths(kubelet_dir=node.kubelet)))
    text = render(explain("device", "gpu-0", answers), TextStyle(unicode=False, width=80))
    assert text.isascii()
    described = [line for line in text.splitlines() if "word" in line]
    assert len(described) > 3
    assert max(map(len, described)) < 80


@pytest.mark.parametrize("subject", [("pod", "u-1"), ("claim", "gpus")])
def test_pod_and_claim_text_fits_the_terminal(node: Node, subject: tuple[str, str]) -> None:
    node.write_checkpoint(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
    pods = node.write_objects("p.json", pod_object("train", "gpus", uid="u-1", owner="a-job-of-many-letters"))
    answers = asyncio.run(query_all_sources(SourcePaths(kubelet_dir=node.kubelet, pods=Path(pods))))
    text = render(explain(*subject, answers), TextStyle(width=70))
    assert "from checkpoint, pods-file" in " ".join(text.split())
    assert max(len(line) for line in text.split("\n  sources  ")[0].splitlines()) < 70


@pytest.mark.parametrize("letters", [5, 12, 18, 20, 24, 30, 48, 52, 80])
def test_heading_of_a_long_name_splits_no_word(node: Node, letters: int) -> None:
    name = "c" * letters
    uid = "0f3c6e1a-1234-5678-9abc-def012345678"
    claims = node.write_objects("c.json", claim_object(name, "gpu-0", uid=uid))
    answers = asyncio.run(query_all_sources(SourcePaths(claims=Path(claims))))
    lines = render(explain("claim", name, answers), TextStyle(width=70)).splitlines()
    assert lines[0].startswith(f"claim team-a/{name}")
    assert lines[0] == lines[0].rstrip()
    assert f"uid {uid}, from claims-file" in " ".join(" ".join(lines[:2]).split())


def test_lists_below_a_claim_fit_the_terminal(node: Node) -> None:
    group = {"resource": "podgroups", "apiGroup": "a.b", "uid": "u"}
    users = [{**group, "name": f"{'g' * letters}-1"} for letters in range(1, 30)]
    claims = node.write_objects("c.json", claim_object("gpus", "gpu-0", reserved_for=users))
    answers = asyncio.run(query_all_sources(SourcePaths(claims=Path(claims))))
    for width in range(60, 80):
        lines = render(explain("claim", "gpus", answers), TextStyle(width=width)).splitlines()
        listed = lines[next(n for n, line in enumerate(lines) if "reserved for" in line) :]
        assert max(len(line) for line in listed if "podgroups" in line) < width
