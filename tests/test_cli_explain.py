"""``drahealth explain``: who is hurt, from whatever there is, and who says so."""

import asyncio
import json
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from agents import short_tmp
from explain_node import (
    GROUP,
    Node,
    claim_object,
    deaf,
    listing,
    pod_object,
    pods_answer,
    prepared_claim,
    reserved,
)
from hung_file import hung_file
from kubelet_files import DRIVER
from prepare_paper import claim as driver_claim
from prepare_paper import verdict

from agent.cli.explain.facts import explain
from agent.cli.explain.places import Places
from agent.cli.explain.sources import gather
from agent.cli.explain.text import render
from agent.cli.explain.words import COSTS
from agent.cli.output.terminal import Style
from agent.model.claim import DeviceRef
from agent.model.claim_sources import Origin
from agent.model.prepare import ErrorClass
from agent.model.taint import Effect, Taint, Taints
from agent.prepare import ledger as books
from agent.prepare.ledger import PrepareLedger
from agent.serve.kubelet import podresources, pods_api
from agent.sources import kubelet_checkpoint, kubelet_health
from agent.store import taints

__all__ = ["short_tmp"]

XID = replace(verdict(ErrorClass.FAILED_DEVICE, "gpu.xid.79"), summary="off the bus", advice="reboot")


@pytest.fixture
def node(short_tmp: Path, capsys: pytest.CaptureFixture[str]) -> Node:
    return Node(short_tmp, capsys)


@pytest.fixture
def train(node: Node) -> Node:
    """One pod with two devices; the kubelet believes one of them sick."""
    node.prepared(prepared_claim("gpus", "gpu-0", "gpu-1", pods=["u-1"]))
    node.believes("Unhealthy", "gpu-0", message="XID 79")
    return node


def pods_of(document: dict) -> list[tuple[str | None, str | None, bool]]:
    return [(one["pod"]["name"], one["pod"]["uid"], one["sure"]) for one in document["hurt"]]


# --- from files alone --------------------------------------------------------------------------------------


def test_a_claim_file_and_a_pod_file_are_enough(node: Node) -> None:
    claims = node.saved("c.json", claim_object("gpus", "gpu-0", reserved_for=reserved("u-1")))
    pods = node.saved("p.json", pod_object("pod-u-1", "gpus", uid="u-1", owner="train"))
    code, out, err = node.bare("gpu-0", "--claims", claims, "--pods", pods)
    assert (code, err) == (3, "")
    assert "? team-a/gpus  team-a/pod-u-1  main        Job train  pods-file, claims-file\n" in out
    assert "Unknown: nobody judges it" in out


def test_with_files_nothing_of_the_node_is_asked_but_what_is_named(train: Node) -> None:
    claims = train.saved("c.json", claim_object("gpus", "gpu-0", reserved_for=reserved("u-1")))
    code, out, _ = train.bare("gpu-0", "--claims", claims, "-o", "json")
    assert [one["source"] for one in json.loads(out)["sources"]] == ["claims-file"]
    code, out, _ = train.bare("gpu-0", "--claims", claims, "--kubelet-dir", str(train.kubelet), "-o", "json")
    assert code == 2
    asked = [one["source"] for one in json.loads(out)["sources"]]
    assert {"checkpoint", "health-state", "podresources", "pods-api", "claims-file"} <= set(asked)
    assert "agent" not in asked


@pytest.mark.parametrize("flag", ["--pods", "--claims"])
def test_a_file_that_is_none_is_the_callers_mistake(node: Node, flag: str) -> None:
    code, out, err = node.bare("gpu-0", flag, str(node.root / "none.json"))
    assert (code, out) == (64, "")
    assert f"{node.root / 'none.json'}: No such file or directory" in err


def test_a_mixed_reservation_names_pods_groups_and_others(node: Node) -> None:
    other = {"apiGroup": "example.com", "resource": "jobs", "name": "nightly", "uid": "x-1"}
    claims = node.saved(
        "c.json", claim_object("gpus", "gpu-0", reserved_for=[GROUP, *reserved("u-1"), other])
    )
    pods = node.saved("p.json", pod_object("worker", "gpus", uid="u-2", group="workers"))
    code, out, _ = node.bare("gpu-0", "--claims", claims, "--pods", pods)
    assert code == 3
    assert "used by 0 pods, 2 others may, through 1 claim\n" in out
    assert "pod group workers" in next(line for line in out.splitlines() if "team-a/worker" in line)
    assert "team-a/gpus is reserved for pod group workers (claims-file)" in out
    assert "team-a/gpus is reserved for jobs.example.com nightly (claims-file)" in out


def test_reservations_behind_which_nobody_stands_are_named(node: Node) -> None:
    held = [GROUP, {**GROUP, "name": "gone"}, *reserved("u-1", "u-2")]
    claims = node.saved("c.json", claim_object("gpus", "gpu-0", reserved_for=held))
    pods = node.saved("p.json", pod_object("w", uid="u-9", group="workers"), pod_object("x", uid="u-1"))
    _, out, _ = node.bare("claim", "gpus", "--claims", claims, "--pods", pods)
    assert "orphaned?     1 pod, pod group gone: none of the pods of --pods is behind that\n" in out
    _, out, _ = node.bare("claim", "gpus", "--claims", claims, "--pods", pods, "-o", "json")
    assert [one["name"] for one in json.loads(out)["claims"][0]["orphans"]] == ["gone", "pod-u-2"]
    _, out, _ = node.bare("claim", "gpus", "--claims", claims)
    assert "orphaned" not in out  # the kubelet knows the pods of its own node


def test_the_fields_that_no_release_has_are_told_and_change_nothing(node: Node) -> None:
    claim = claim_object("gpus", "gpu-0")
    claim["spec"] = {"reservedFor": {"apiGroup": "batch", "resource": "jobs", "name": "train", "uid": "j"}}
    claim["status"]["allocation"]["reservedForAnyPod"] = True
    _, out, _ = node.bare("claim", "gpus", "--claims", node.saved("c.json", claim))
    assert "reserved for  nobody (claims-file)\n" in out
    assert "meant for     jobs train, any pod: no kubelet looks at that (claims-file)\n" in out


def test_the_uid_of_a_group_is_never_a_pods(node: Node) -> None:
    claims = node.saved("c.json", claim_object("gpus", "gpu-0", reserved_for=[GROUP]))
    pods = node.saved("p.json", pod_object("stranger", uid="g-1"))
    _, out, _ = node.bare("claim", "team-a/gpus", "--claims", claims, "--pods", pods)
    assert "stranger" not in out
    assert "reserved for  pod group workers (claims-file)" in out


def test_more_reservations_than_there_may_be_are_counted(node: Node) -> None:
    many = reserved(*(f"u-{number}" for number in range(300)))
    claims = node.saved("c.json", claim_object("gpus", "gpu-0", reserved_for=many))
    _, out, _ = node.bare("claim", "team-a/gpus", "--claims", claims)
    assert "300 pods; 300 entries, more than the API server takes (claims-file)" in out


def test_a_claim_that_is_not_allocated_says_so(node: Node) -> None:
    claims = node.saved("c.json", claim_object("gpus"))
    code, out, _ = node.bare("claim", "gpus", "--claims", claims)
    assert code == 3
    assert "not allocated; nobody (claims-file)" in out
    assert "no pod of it is known" in out


def test_a_pod_that_names_no_claim_is_well_and_one_of_which_that_is_not_seen_is_unknown(node: Node) -> None:
    pods = node.saved("p.json", pod_object("plain"))
    code, out, _ = node.bare("pod", "team-a/plain", "--pods", pods)
    assert code == 0
    assert "it names no claim\n" in out
    pods = node.saved("p.json", pod_object("waits", "gpus"))
    code, out, _ = node.bare("pod", "team-a/waits", "--pods", pods)
    assert code == 3


# --- what is meant -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word", ["gpu.example.com/node-1/gpu-0", "node-1/gpu-0", "gpu-0", "example.com/gpu=gpu-0"]
)
def test_a_device_may_be_named_in_four_ways(train: Node, word: str) -> None:
    code, document = train.document(word)
    assert code == 2
    assert [one["name"] for one in document["devices"]] == ["gpu-0"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["gpu-00"], "no device 'gpu-00' is known; did you mean 'gpu-0'?"),
        (["pod", "team-a/x"], "no pod 'team-a/x' is known"),
        (["claim", "team-a/gpu"], "no claim 'team-a/gpu' is known; did you mean 'team-a/gpus'?"),
        (["pod"], "which pod? drahealth explain pod NAMESPACE/NAME"),
        (["pods", "a/b"], "'pods' is none of pod, claim; did you mean 'pod'?"),
        (["a", "b", "c"], "3 words, one device, pod or claim at a time"),
    ],
)
def test_what_is_not_there_or_means_nothing_is_told_with_what_may_be_meant(
    train: Node, argv: list[str], words: str
) -> None:
    code, out, err = train.explain(*argv)
    assert (code, out) == (64, "")
    assert err.startswith(f"drahealth: {words}\n")


def test_who_could_not_be_asked_is_named_where_nothing_was_found(train: Node) -> None:
    _, _, err = train.explain("pod", "team-a/x")
    for socket in ("run/agent.sock", podresources.SOCKET, pods_api.SOCKET):
        assert f"not to be had: {'agent' if 'agent' in socket else ''}" in err
        assert socket in err


def test_a_name_of_several_is_not_one_of_them(node: Node) -> None:
    node.prepared(prepared_claim("a", "gpu-0"))
    (node.run_dir / "drivers").mkdir(parents=True)
    node.believes("Healthy", "gpu-0", "gpu-1")
    other = json.loads((node.kubelet / kubelet_health.NAME).read_text())
    other["nic.example.com"] = {
        "Devices": {"n/gpu-0": {"PoolName": "n", "DeviceName": "gpu-0", "LastUpdated": ""}}
    }
    other["nic.example.com"]["Devices"]["n/gpu-0"]["LastUpdated"] = "2026-11-21T10:00:00Z"
    (node.kubelet / kubelet_health.NAME).write_text(json.dumps(other))
    code, _, err = node.explain("gpu-0")
    assert code == 64
    assert "'gpu-0' is 2 devices: gpu.example.com/node-1/gpu-0, nic.example.com/n/gpu-0; say which" in err
    assert node.explain("n/gpu-0")[0] == 3


# --- from the node -----------------------------------------------------------------------------------------


def test_the_pod_is_surely_hurt_where_the_kubelet_prepared_for_it(train: Node) -> None:
    with train.sockets(listing(("pod-u-1", "gpus", ["gpu-0", "gpu-1"])), pods_answer(("u-1", ["gpus"]))):
        code, document = train.document("gpu-0")
        _, out, _ = train.explain("gpu-0")
    assert code == 2
    assert pods_of(document) == [("pod-u-1", "u-1", True)]
    assert document["hurt"][0]["containers"] == [{"name": "main", "sure": True}]
    assert {one["source"] for one in document["hurt"][0]["toldBy"]} == {
        "checkpoint",
        "podresources",
        "pods-api",
    }
    assert "used by 1 pod, through 1 claim\n" in out
    assert "Unhealthy: nobody else than the kubelet says so\n" in out
    assert "believes Unhealthy: XID 79, heard" in out


def test_that_the_kubelet_believes_a_device_healthy_is_no_verdict(node: Node) -> None:
    node.believes("Healthy", "gpu-0")
    code, out, _ = node.explain("gpu-0")
    assert code == 3
    assert "Unknown: nobody judges it\n" in out
    assert "believes Healthy, heard" in out


def test_each_edge_says_who_told_it_and_when(train: Node) -> None:
    with train.sockets(listing(("pod-u-1", "gpus", ["gpu-0"])), pods_answer(("u-1", ["gpus"]))):
        _, document = train.document("claim", "team-a/gpus")
    (claim,) = document["claims"]
    edges = [*claim["devices"], *claim["consumers"], *claim["containers"]]
    assert {edge["source"] for edge in edges} == {"checkpoint", "podresources", "pods-api"}
    assert all(edge["read"] for edge in edges)
    assert {edge["source"] for edge in edges if edge["written"]} == {"checkpoint"}
    assert {edge["source"] for edge in edges if edge["byName"]} == {"podresources", "pods-api"}


def test_healthy_as_the_kubelet_once_wrote_is_no_knowledge_of_now(node: Node) -> None:
    node.prepared(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
    node.believes("Healthy", "gpu-0")
    code, out, _ = node.explain("gpu-0")
    assert code == 3
    assert "believes Healthy, heard" in out


def test_a_pod_shows_its_claims_devices_and_how_prepares_ended(train: Node) -> None:
    now_s = time.time()
    ref = driver_claim("gpus", "gpu-0")
    book, _ = books.failed(
        PrepareLedger(), replace(ref, namespace="team-a", uid="c-gpus"), "", XID, now_s - 3600, "1.2"
    )
    train.remembers(book, now_s)
    with train.sockets(listing(), pods_answer(("u-1", ["gpus"]))):
        code, out, _ = train.explain("pod", "team-a/pod-u-1")
    assert code == 2
    assert "pod team-a/pod-u-1  uid u-1, Running" in out
    assert "claim team-a/gpus  uid c-gpus" in out
    assert "✖ gpu.example.com/node-1/gpu-0  Unhealthy" in out
    assert "◌ gpu.example.com/node-1/gpu-1  Unknown" in out
    assert "prepare     gpu.example.com: failed-device, gpu.xid.79: off the bus (1 time, first 60m ago" in out
    assert "; reboot" in out


def test_a_device_that_a_driver_found_broken_is_told_with_its_claim(node: Node) -> None:
    now_s = time.time()
    book, _ = books.failed(PrepareLedger(), driver_claim("gpus", "gpu-0"), "", XID, now_s - 300, "1.2")
    node.remembers(book, now_s)
    code, out, _ = node.explain("gpu-0")
    assert code == 3
    assert "found broken  gpu.xid.79: off the bus (5m ago, while preparing team/gpus)" in out
    assert "nobody is known to use it" in out


def test_a_taint_that_is_offered_is_told_and_so_is_that_there_is_none(train: Node) -> None:
    keep = train.kubelet / "plugins" / DRIVER / "drahealth"
    keep.mkdir(parents=True)
    taint = Taint(f"{DRIVER}/gpu.xid.79", "", Effect.NO_EXECUTE, int(time.time()) - 60)
    taints.save(keep / taints.FILE, Taints({DeviceRef(DRIVER, "node-1", "gpu-0"): (taint,)}))
    _, out, _ = train.explain("gpu-0")
    assert f"taint    {DRIVER}/gpu.xid.79=:NoExecute, offered for " in out
    _, out, _ = train.explain("gpu-1")
    assert "taint    none is offered\n" in out
    assert train.document("gpu-1")[1]["devices"][0]["taints"] == []


def test_what_a_driver_holds_prepared_is_its_word_alone(node: Node) -> None:
    now_s = time.time()
    node.remembers(
        books.succeeded(PrepareLedger(), driver_claim("gpus", "gpu-0"), "", now_s - 5, "1.2"), now_s
    )
    _, document = node.document("gpu-0")
    (claim,) = document["claims"]
    assert [(one["source"], one["relation"]) for one in claim["devices"]] == [("driver", "prepared")]
    assert claim["prepares"][0]["state"] == "prepared"
    assert document["hurt"] == []


def test_a_name_and_a_uid_that_may_be_one_pod_stay_two_and_that_is_said(train: Node) -> None:
    with train.sockets(listing(("train-0", "gpus", ["gpu-0", "gpu-1"])), pods_answer()):
        _, document = train.document("gpu-0")
        _, out, _ = train.explain("pod", "team-a/train-0")
    assert sorted(pods_of(document), key=str) == [("train-0", None, True), (None, "u-1", True)]
    assert {one["uid"]: one["maybe"] for one in document["pods"]} == {
        None: [{"namespace": None, "name": None, "uid": "u-1"}],
        "u-1": [{"namespace": "team-a", "name": "train-0", "uid": None}],
    }
    assert "team-a/train-0, whose UID nobody tells, and pod u-1, whose name nobody tells" in out


def test_of_many_that_may_be_the_same_not_every_pair_is_told(node: Node) -> None:
    """A kubelet without the pods API tells names in one place and UIDs in another."""
    numbers = range(100)
    node.prepared(prepared_claim("all", "switch", pods=[f"u-{n}" for n in numbers]))
    node.believes("Unhealthy", "switch")
    with node.sockets(listing(*((f"pod-{n}", "all", ["switch"]) for n in numbers)), pods_answer()):
        _, out, _ = node.explain("switch")
        _, alone, _ = node.explain("pod", "pod-7")
    (line,) = (line for line in out.splitlines() if "the same?" in line)
    assert "100 pods, whose UID nobody tells, and 100 pods, whose name nobody tells, have a claim" in line
    assert "team-a/pod-7, whose UID nobody tells, and 100 pods, whose name nobody tells" in alone


def test_who_would_be_refused_after_a_reboot_is_a_risk(train: Node) -> None:
    claims = train.saved("c.json", claim_object("gpus", "gpu-0", "gpu-1", reserved_for=reserved("u-2")))
    pods = train.saved("p.json", pod_object("pod-u-1", "gpus", uid="u-1"))
    _, out, _ = train.explain("gpu-0", "--claims", claims, "--pods", pods)
    assert "risk" in out
    assert "team-a/pod-u-1 would be refused team-a/gpus if its sandbox were made again" in out


def test_sources_that_differ_are_both_shown(train: Node) -> None:
    claims = train.saved("c.json", claim_object("gpus", "gpu-0", "gpu-7", reserved_for=reserved("u-1")))
    code, out, _ = train.explain("claim", "team-a/gpus", "--claims", claims)
    assert code == 2
    (line,) = (line for line in out.splitlines() if line.lstrip().startswith("conflict"))
    assert "checkpoint: node-1/gpu-0, node-1/gpu-1" in line
    assert "claims-file: node-1/gpu-0, node-1/gpu-7" in line


def test_a_claim_made_anew_under_its_name_is_two_claims(train: Node) -> None:
    claims = train.saved("c.json", claim_object("gpus", "gpu-9", uid="c-new", reserved_for=reserved("u-1")))
    _, out, _ = train.explain("claim", "team-a/gpus", "--claims", claims)
    assert "claim team-a/gpus  uid c-gpus" in out
    assert "claim team-a/gpus  uid c-new" in out
    assert "conflict" in out


# --- what is missing ---------------------------------------------------------------------------------------

KUBELET = {
    "checkpoint": kubelet_checkpoint.NAME,
    "health-state": kubelet_health.NAME,
    "podresources": podresources.SOCKET,
    "pods-api": pods_api.SOCKET,
}


@pytest.mark.parametrize("source", KUBELET)
def test_without_any_one_source_the_others_still_answer(train: Node, source: str) -> None:
    with train.sockets(listing(("pod-u-1", "gpus", ["gpu-0"])), pods_answer(("u-1", ["gpus"]))):
        (train.kubelet / KUBELET[source]).unlink()
        code, document = train.document("gpu-0")
        _, out, _ = train.explain("gpu-0")
    accounts = {one["source"]: one for one in document["sources"]}
    assert accounts[source]["absence"] == "absent"
    assert accounts[source]["costs"] == COSTS[source]
    assert all(accounts[other]["absence"] is None for other in KUBELET if other != source)
    assert pods_of(document)[0][2] is True
    assert code == (3 if source == "health-state" else 2)
    assert f"{source}: {COSTS[source]} ({train.kubelet / KUBELET[source]}: " in out


@pytest.mark.parametrize("source", ["checkpoint", "health-state"])
def test_a_file_that_is_broken_costs_what_it_would_have_said(train: Node, source: str) -> None:
    (train.kubelet / KUBELET[source]).write_text("{")
    with train.sockets(listing(("pod-u-1", "gpus", ["gpu-0"])), pods_answer(("u-1", ["gpus"]))):
        _, document = train.document("gpu-0")
    accounts = {one["source"]: one for one in document["sources"]}
    assert accounts[source]["absence"] == "unreadable"
    assert pods_of(document)


def test_a_drivers_file_that_is_broken_is_named(train: Node) -> None:
    train.remembers(PrepareLedger(), time.time())
    (file,) = train.kubelet.glob("plugins/*/drahealth/prepares.json")
    file.write_text("{")
    _, out, _ = train.explain("gpu-0")
    assert f"prepares: {COSTS['prepares']} ({file}: " in out


def test_a_directory_that_cannot_be_listed_is_not_an_empty_one(train: Node) -> None:
    plugins = train.kubelet / "plugins"
    plugins.rmdir()
    plugins.symlink_to(plugins)
    _, document = train.document("gpu-0")
    accounts = {one["source"]: one for one in document["sources"]}
    assert accounts["prepares"]["absence"] == accounts["taints"]["absence"] == "unreadable"
    assert accounts["prepares"]["why"] == f"{plugins}: Too many levels of symbolic links"


def test_whoever_never_answers_holds_nobody_up(train: Node) -> None:
    """Those that hang are asked at the same time; their limits are two seconds each."""
    hung = [
        train.run_dir / "agent.sock",
        train.run_dir / "drivers" / "gpu.example.com.sock",
        train.kubelet / podresources.SOCKET,
        train.kubelet / pods_api.SOCKET,
    ]
    with deaf(*hung):
        code, document = train.document("gpu-0")
    assert code == 2
    assert pods_of(document) == [(None, "u-1", True)]
    late = {one["place"] for one in document["sources"] if one["why"] and one["why"].endswith("within 2 s")}
    assert late == {str(path) for path in hung}


def test_a_disk_that_hangs_holds_nobody_up(train: Node) -> None:
    """It costs what stands on it, after five seconds; the rest is told."""
    released = threading.Event()
    with ExitStack() as stack:
        try:
            stack.enter_context(hung_file(train.kubelet / kubelet_checkpoint.NAME, released.is_set))
        except OSError as error:
            pytest.skip(f"no FUSE here: {error}")
        stack.callback(released.set)
        with train.sockets(listing(("pod-u-1", "gpus", ["gpu-0"])), pods_answer(("u-1", ["gpus"]))):
            code, document = train.document("gpu-0")
    accounts = {one["source"]: one for one in document["sources"]}
    assert code == 2
    assert accounts["checkpoint"]["why"].endswith(": no answer within 5 s")
    assert pods_of(document) == [("pod-u-1", "u-1", True)]


def test_a_node_on_which_nobody_says_anything_is_not_reachable(node: Node) -> None:
    code, out, err = node.explain("gpu-0")
    assert (code, out) == (69, "")
    assert err.startswith("drahealth: nobody says anything:\n")
    for source in (*KUBELET, "agent"):
        assert f"\n  {source}: " in err


def test_every_source_has_words_for_what_is_lost_without_it() -> None:
    asked = {str(one) for one in Origin} - {"driver", "pods-file"}
    assert set(COSTS) == asked | {"agent", "driver socket", "prepares", "taints", "history"}


# --- many --------------------------------------------------------------------------------------------------


def test_a_hundred_pods_of_four_devices_and_one_for_all(node: Node) -> None:
    numbers = range(100)
    own = [
        prepared_claim(f"own-{n}", *(f"gpu-{n}-{of}" for of in range(4)), pods=[f"u-{n}"]) for n in numbers
    ]
    node.prepared(*own, prepared_claim("all", "switch", pods=[f"u-{n}" for n in numbers]))
    node.believes("Unhealthy", "switch", message="link down")
    with node.sockets(
        listing(*((f"pod-u-{n}", "all", ["switch"]) for n in numbers)),
        pods_answer(*((f"u-{n}", [f"own-{n}", "all"]) for n in numbers)),
    ):
        code, document = node.document("switch")
        _, out, _ = node.explain("switch")
        _, one = node.document("gpu-42-3")
        _, pod = node.document("pod", "team-a/pod-u-42")
    assert code == 2
    assert sorted(pods_of(document)) == sorted((f"pod-u-{n}", f"u-{n}", True) for n in numbers)
    assert out.count("• team-a/all") == 100
    assert pods_of(one) == [("pod-u-42", "u-42", True)]
    assert [len({d["name"] for d in claim["devices"]}) for claim in pod["claims"]] == [1, 4]
    assert pod["severity"] == "unhealthy"


# --- text --------------------------------------------------------------------------------------------------


def test_what_a_peer_says_cannot_move_the_cursor(train: Node) -> None:
    train.believes("Unhealthy", "gpu-0", message="\x1b[2J\nno")
    _, out, _ = train.explain("gpu-0")
    assert "\x1b" not in out
    assert "\ufffd[2J" in out


def test_what_a_file_says_cannot_either(node: Node) -> None:
    odd = "u\x1b[2J"
    claims = node.saved("c.json", claim_object("gpus", "gpu-0\x07", uid=odd, reserved_for=reserved(odd)))
    pods = node.saved("p.json", pod_object("pod\x1b", "gpus", uid=odd, group="g\x1b", owner="j\x1b"))
    for argv in (["gpu-0\x07"], ["claim", odd], ["pod", odd]):
        _, out, err = node.bare(*argv, "--claims", claims, "--pods", pods)
        assert err == ""
        assert "\x1b" not in out
        assert "\x07" not in out


def test_a_claim_that_was_not_made_yet_is_told_of_its_pod(node: Node) -> None:
    pod = pod_object("waits")
    pod["spec"]["resourceClaims"] = [{"name": "gpus", "resourceClaimTemplateName": "one-gpu"}]
    code, out, _ = node.bare("pod", "waits", "--pods", node.saved("p.json", pod))
    assert code == 3
    assert "  its claim gpus was not made yet, or is not needed\n" in out
    assert "no claim of it is known\n" in out


def test_the_output_is_ascii_where_the_terminal_is_and_fits_it(node: Node) -> None:
    node.prepared(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
    node.believes("Unhealthy", "gpu-0", message="word " * 60)
    told = asyncio.run(gather(Places(kubelet_dir=node.kubelet)))
    text = render(explain("device", "gpu-0", told), Style(unicode=False, width=80))
    assert text.isascii()
    described = [line for line in text.splitlines() if "word" in line]
    assert len(described) > 3
    assert max(map(len, described)) < 80


@pytest.mark.parametrize("words", [("pod", "u-1"), ("claim", "gpus")])
def test_no_line_about_a_pod_or_a_claim_is_wider_than_the_terminal(
    node: Node, words: tuple[str, str]
) -> None:
    node.prepared(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
    pods = node.saved("p.json", pod_object("train", "gpus", uid="u-1", owner="a-job-of-many-letters"))
    told = asyncio.run(gather(Places(kubelet_dir=node.kubelet, pods=Path(pods))))
    text = render(explain(*words, told), Style(width=70))
    assert "told by checkpoint, pods-file" in " ".join(text.split())
    assert max(len(line) for line in text.split("\n  sources  ")[0].splitlines()) < 70
