"""Kubernetes objects in files, in every form that kubectl writes; other content is refused with the right
command."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from other_user import become_other_user

from agent.devices.consumers.kube_objects import parse_workloads
from agent.errors import PermissionDeniedError, UsageError
from agent.model.claim_sources import Origin, WorkloadRef
from agent.model.json_values import JsonObject
from agent.model.time import Instant
from agent.sources.kubectl_files import (
    CLAIM,
    POD,
    parse_object_file,
    read_object_file,
    read_objects,
)
from agent.system.files import FileContent

NOW = Instant(5_000_000_000, 1_700_000_000.0)


def pod(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}


def without_kind(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}}


CLAIM_OBJECT = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "c"}}
SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}}


def objects_of(data: bytes, kind: str = POD) -> tuple[JsonObject, ...]:
    return parse_object_file(Path("objects"), FileContent(data, 1.0), kind, NOW).items


def names(document: object, kind: str = POD) -> list[Any]:
    found = objects_of(json.dumps(document).encode(), kind)
    return [obj["metadata"]["name"] for obj in found if isinstance(obj["metadata"], dict)]


@pytest.mark.parametrize(
    "document",
    [
        {"apiVersion": "v1", "kind": "List", "items": [pod("a"), CLAIM_OBJECT, pod("b")]},
        {
            "apiVersion": "v1",
            "kind": "PodList",
            "items": [without_kind("a"), without_kind("b")],
        },
        [pod("a"), SERVICE, pod("b")],
    ],
    ids=["kubectl get", "kubectl get --raw", "jq"],
)
def test_list_gives_objects_of_the_kind_in_order(document: object) -> None:
    assert names(document) == ["a", "b"]


def test_single_object_is_a_list_of_one() -> None:
    assert names(pod("a")) == ["a"]
    assert names(CLAIM_OBJECT, CLAIM) == ["c"]


def test_empty_list_is_valid() -> None:
    assert names({"kind": "List", "items": []}) == []
    assert names({"kind": "PodList", "items": None}) == []


def test_same_kind_of_another_group_is_ignored() -> None:
    other = {**CLAIM_OBJECT, "apiVersion": "example.com/v1"}
    with pytest.raises(UsageError, match=r"holds no ResourceClaim, but 1 ResourceClaim of example\.com/v1;"):
        objects_of(json.dumps(other).encode(), CLAIM)


@pytest.mark.parametrize(
    ("kind", "resource"),
    [("Job", "jobs"), ("ReplicaSet", "replicasets"), ("NetworkPolicy", "networkpolicies"), ("Gas", "gases")],
)
def test_resource_of_a_workload_follows_from_its_kind(kind: str, resource: str) -> None:
    metadata = {"namespace": "team-a", "name": "n", "uid": "u"}
    (found,) = parse_workloads([({"apiVersion": "batch/v1", "metadata": metadata}, kind)])
    assert found == WorkloadRef("batch", resource, "team-a", "n", "u")


@pytest.mark.parametrize(
    "broken",
    [{"metadata": {"name": "n", "uid": "u"}}, {"apiVersion": "v1"}, {"apiVersion": "v1", "metadata": 1}],
)
def test_object_without_an_identity_is_no_workload(broken: dict[str, Any]) -> None:
    assert parse_workloads([(broken, "Job")]) == ()


def test_byte_order_mark_is_ignored() -> None:
    assert objects_of(b"\xef\xbb\xbf" + json.dumps(pod("a")).encode()) == (pod("a"),)


def parse_error(path: Path, kind: str = POD) -> str:
    with pytest.raises(UsageError) as caught:
        read_objects(path, kind, NOW)
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "kind: List\nitems:\n- kind: Pod\n  metadata: {name: a}\n- kind: Pod\n  metadata: {name: b}\n",
        "kind: PodList\nitems:\n- metadata: {name: a}\n- metadata: {name: b}\n",
        "# of two\n---\nkind: Pod\nmetadata: {name: a}\n---\n---\nkind: Pod\nmetadata: {name: b}\n...\n",
        "- kind: Pod\n  metadata: {name: a}\n- kind: Service\n- kind: Pod\n  metadata: {name: b}\n",
    ],
    ids=["kubectl get", "kubectl get --raw", "documents", "yq"],
)
def test_yaml_and_json_give_the_same_objects(text: str) -> None:
    assert [obj["metadata"] for obj in objects_of(text.encode())] == [{"name": "a"}, {"name": "b"}]


@pytest.mark.parametrize(
    ("kind", "command"),
    [(POD, "kubectl get pods -A -o json"), (CLAIM, "kubectl get resourceclaims -A -o json")],
)
def test_invalid_yaml_is_refused_with_position_and_command(kind: str, command: str, tmp_path: Path) -> None:
    path = tmp_path / "pods.yaml"
    path.write_text("kind: List\nitems: [\n")
    place = "line 3, column 1: while parsing a flow node, did not find expected node content"
    assert parse_error(path, kind) == f"file {path}: {place}; create it with: {command}"


def test_yaml_parser_is_imported_only_for_yaml() -> None:
    program = (
        "import sys\n"
        "from agent.sources.kubectl_files import parse_all_objects as parse\n"
        "parse(b'{}'); before = 'yaml' in sys.modules\n"
        "parse(b'kind: Pod'); print(before, 'yaml' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"


@pytest.mark.parametrize(
    "text", ["", "   ", "---", "7", '{"kind":', "[7]", '{"kind":"List","items":{}}', "[" * 100_000]
)
def test_other_json_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "pods.json"
    path.write_text(text)
    assert parse_error(path).startswith(f"file {path}: ")


def test_file_of_other_kinds_is_refused_with_their_counts(tmp_path: Path) -> None:
    path = tmp_path / "pods.json"
    path.write_text(json.dumps([SERVICE, CLAIM_OBJECT, SERVICE]))
    assert f"{path}: holds no Pod, but 1 ResourceClaim, 2 Service; " in parse_error(path)


def test_absent_file_is_a_usage_error(tmp_path: Path) -> None:
    assert parse_error(tmp_path / "none.json") == f"{tmp_path / 'none.json'}: No such file or directory"


def test_objects_have_the_modification_time_of_their_file(tmp_path: Path) -> None:
    path = tmp_path / "claims.json"
    path.write_text(json.dumps(CLAIM_OBJECT))
    os.utime(path, (1_600_000_000, 1_600_000_000))
    answer = read_objects(path, CLAIM, NOW)
    assert answer.provenance == (Origin.CLAIMS_FILE, NOW, 1_600_000_000.0)
    assert answer.items == (CLAIM_OBJECT,)


def test_file_is_read_completely_before_parsing(tmp_path: Path) -> None:
    """So a time limit of the disk does not include parsing."""
    path = tmp_path / "pods.yaml"
    path.write_text("items: [")
    file = read_object_file(path)
    path.unlink()
    with pytest.raises(UsageError, match="line 2, column 1: "):
        parse_object_file(path, file, POD, NOW)


def test_unreadable_file_is_a_permission_error(tmp_path: Path) -> None:
    directory = tmp_path / "roots"
    directory.mkdir()
    (directory / "pods.json").write_text("{}")
    before = os.geteuid()
    directory.chmod(0)
    if before == 0:
        become_other_user()
    try:
        with pytest.raises(PermissionDeniedError, match=r"pods\.json: Permission denied"):
            read_objects(directory / "pods.json", POD, NOW)
    finally:
        os.seteuid(before)
        directory.chmod(0o700)
