"""Admission policies: that of the example driver agrees with the types that decode the parameters, and that
of the agent restricts a pod to the objects of its own node.

cel-go, the engine of the API server, evaluates the rules (``tests/admission``); the tests that need it are
skipped without Go.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from go_driver.module import SETTINGS
from hostdev_driver.parameters import KINDS, VERSION

from agent.prepare.claim_parser import check_parameters
from agent.sources.yaml_text import parse_yaml

ROOT: Final = Path(__file__).parents[1]
PROGRAM: Final = ROOT / "tests" / "admission"
POLICY_FILE: Final = ROOT / "examples" / "hostdev_driver" / "admission.yaml"
AGENT_FILE: Final = ROOT / "deploy" / "kubernetes" / "drahealth-cluster.yaml"
CHART_FILE: Final = ROOT / "deploy" / "helm" / "drahealth" / "templates" / "admissionpolicy.yaml"
NODE: Final = "node-a"
DRIVER: Final = VERSION.partition("/")[0]
ABSENT: Final = object()


def api_object(kind: str, **fields: object) -> dict[str, Any]:
    return {"apiVersion": VERSION, "kind": kind, **fields}


PARAMETERS: Final[Mapping[str, object]] = {
    "pages": api_object("HugepagesParameters", pages=3),
    "no field": api_object("HugepagesParameters"),
    "all pages": api_object("HugepagesParameters", pages=None, size=""),
    "size": api_object("HugepagesParameters", size="1Gi"),
    "no pages": api_object("HugepagesParameters", pages=0),
    "negative pages": api_object("HugepagesParameters", pages=-1),
    "half a page": api_object("HugepagesParameters", pages=1.5),
    "pages as text": api_object("HugepagesParameters", pages="3"),
    "pages as a boolean": api_object("HugepagesParameters", pages=True),
    "size without a unit": api_object("HugepagesParameters", size="2"),
    "size in bytes": api_object("HugepagesParameters", size=2_097_152),
    "size of zero": api_object("HugepagesParameters", size="0Mi"),
    "size with a fraction": api_object("HugepagesParameters", size="1.5Gi"),
    "size of two lines": api_object("HugepagesParameters", size="2Mi\n"),
    "size that is null": api_object("HugepagesParameters", size=None),
    "unknown field": api_object("HugepagesParameters", page=3),
    "field of another kind": api_object("HugepagesParameters", cpus="0"),
    "CPUs": api_object("CpuParameters", cpus="0-3,8", exclusive=False),
    "all CPUs": api_object("CpuParameters", cpus=None),
    "CPUs as a number": api_object("CpuParameters", cpus=3),
    "CPUs as a list": api_object("CpuParameters", cpus=[0, 1]),
    "exclusive as text": api_object("CpuParameters", exclusive="yes"),
    "exclusive that is null": api_object("CpuParameters", exclusive=None),
    "CPUs with a typo": api_object("CpuParameters", cpu="0"),
    "GPU": api_object("GpuParameters"),
    "GPU with a field": api_object("GpuParameters", mig=True),
    "unknown kind": api_object("HugepageParameters"),
    "kind that is a number": {"apiVersion": VERSION, "kind": 1},
    "no kind": {"apiVersion": VERSION, "pages": 3},
    "another version": {**api_object("CpuParameters"), "apiVersion": f"{DRIVER}/v2"},
    "no version": {"kind": "CpuParameters"},
    "empty object": {},
    "list": [api_object("CpuParameters")],
    "text": "CpuParameters",
    "null": None,
    "absent": ABSENT,
}


def config(parameters: object, driver: str = DRIVER) -> dict[str, Any]:
    opaque = {"driver": driver} if parameters is ABSENT else {"driver": driver, "parameters": parameters}
    return {"opaque": opaque}


def request(resource: str, *configs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of an admission request that creates an object with these configurations."""
    kinds = {"resourceclaims": "ResourceClaim", "resourceclaimtemplates": "ResourceClaimTemplate",
             "deviceclasses": "DeviceClass"}  # fmt: skip
    devices = {"config": list(configs)} if configs else {}
    specs = {"resourceclaims": {"devices": devices}, "resourceclaimtemplates": {"spec": {"devices": devices}},
             "deviceclasses": devices}  # fmt: skip
    obj = {"apiVersion": "resource.k8s.io/v1", "kind": kinds[resource], "spec": specs[resource]}
    return {"request": {"resource": {"resource": resource}}, "object": obj}


RESOURCES: Final = ("resourceclaims", "resourceclaimtemplates", "deviceclasses")


@pytest.fixture(scope="module")
def policy() -> Mapping[str, Any]:
    """Return the policy; the file's second object is its binding."""
    found: Any = parse_yaml(POLICY_FILE.read_bytes())
    return found[0]


Evaluate = Callable[[Sequence[Mapping[str, Any]]], list[list[str]]]
EvaluatePolicy = Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], list[list[str]]]


@pytest.fixture(scope="module")
def evaluate_policy(tmp_path_factory: pytest.TempPathFactory) -> EvaluatePolicy:
    """Return a function that evaluates a policy's validations for some requests."""
    if shutil.which("go") is None:
        pytest.skip("Go is not installed: the rules are not evaluated")
    binary, environ = tmp_path_factory.mktemp("admission") / "admission", os.environ | SETTINGS
    download = _run(["go", "mod", "download"], environ)
    if download.returncode != 0:
        pytest.skip(f"Go modules cannot be downloaded: {download.stderr.strip().splitlines()[-1]}")
    build = _run(["go", "build", "-o", str(binary), "."], environ)
    assert build.returncode == 0, build.stderr

    def evaluate(policy: Mapping[str, Any], requests: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        rules = {key: policy["spec"][key] for key in ("variables", "validations")}
        done = _run([str(binary)], environ, json.dumps({**rules, "requests": requests}))
        assert done.returncode == 0, done.stderr
        results: list[list[str]] = json.loads(done.stdout)
        texts = {text for result in results for text in result}
        assert texts <= {"true", "false"}, "an error of an expression refuses every object"
        return results

    return evaluate


@pytest.fixture(scope="module")
def evaluate(policy: Mapping[str, Any], evaluate_policy: EvaluatePolicy) -> Evaluate:
    """Return a function that evaluates the validations of the example's policy for some requests."""
    return lambda requests: evaluate_policy(policy, requests)


def _run(
    command: Sequence[str], environ: Mapping[str, str], text: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=PROGRAM, env=dict(environ), input=text, capture_output=True, text=True, check=False
    )


def is_decodable(obj: Mapping[str, Any]) -> bool:
    return all(check.error is None for check in check_parameters(obj, KINDS, DRIVER))


# --- file --------------------------------------------------------------------------------------------------


def test_policy_covers_all_objects_with_parameters(policy: Mapping[str, Any]) -> None:
    found: Any = parse_yaml(POLICY_FILE.read_bytes())
    [rule] = policy["spec"]["matchConstraints"]["resourceRules"]
    assert (policy["kind"], policy["spec"]["failurePolicy"]) == ("ValidatingAdmissionPolicy", "Fail")
    assert (rule["apiGroups"], sorted(rule["resources"])) == (["resource.k8s.io"], sorted(RESOURCES))
    assert found[1]["kind"] == "ValidatingAdmissionPolicyBinding"
    assert found[1]["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
    assert all(validation["message"].isprintable() for validation in policy["spec"]["validations"])


def test_policy_lists_the_kinds_and_fields_of_the_types(policy: Mapping[str, Any]) -> None:
    """Also without Go, a new field of a type needs a change of the policy."""
    rules = "\n".join(validation["expression"] for validation in policy["spec"]["validations"])
    lists = [sorted(re.findall(r"'(\w+)'", found)) for found in re.findall(r" in \[([^]]*)\]", rules)]
    kinds = {name.rpartition("/")[2]: kind for name, kind in KINDS.items()}
    fields = [
        ["apiVersion", "kind", *(field.name for field in msgspec.structs.fields(kind))]
        for kind in kinds.values()
    ]
    assert sorted(lists) == sorted(map(sorted, [list(kinds), *fields]))
    assert f"== '{VERSION}'" in rules


# --- rules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resource", RESOURCES)
def test_policy_refuses_objects_that_the_types_cannot_decode(evaluate: Evaluate, resource: str) -> None:
    requests = {name: request(resource, config(value)) for name, value in PARAMETERS.items()}
    results = evaluate(list(requests.values()))
    allowed = {name: set(result) == {"true"} for name, result in zip(requests, results, strict=True)}
    assert allowed == {
        name: is_decodable(found_request["object"]) for name, found_request in requests.items()
    }
    assert set(allowed.values()) == {True, False}


@pytest.mark.parametrize("resource", RESOURCES)
def test_policy_ignores_other_drivers_and_objects_without_parameters(
    evaluate: Evaluate, resource: str
) -> None:
    wrong = config({"any": "thing"}, "gpu.example.com")
    good = config(api_object("CpuParameters"))
    requests = [request(resource), request(resource, {}), request(resource, wrong, good)]
    assert [set(result) for result in evaluate(requests)] == [{"true"}] * 3
    assert (
        "false"
        in evaluate([request(resource, good, config(api_object("GpuParameters", mig=True)), wrong)])[0]
    )


def test_policy_names_one_reason_for_each_mistake(evaluate: Evaluate) -> None:
    names = ("unknown kind", "unknown field", "no pages", "size without a unit", "CPUs as a number")
    results = evaluate([request("resourceclaims", config(PARAMETERS[name])) for name in names])
    assert [result.count("false") for result in results] == [1] * len(names)


# --- policy of the agent -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def agent_policy() -> Mapping[str, Any]:
    objects: Any = parse_yaml(AGENT_FILE.read_bytes())
    (found,) = (obj for obj in objects if obj["kind"] == "ValidatingAdmissionPolicy")
    return dict(found)


def node_update(
    changed: Mapping[str, Any], *, absent: str = "", name: str = NODE, part: str = "status"
) -> dict[str, Any]:
    """Return the variables of an update of a Node's status, by the agent on NODE.

    Args:
        changed: Fields of a part of the Node that the update changes.
        absent: Field of this part that the update removes.
        name: Name of the updated Node.
        part: Part of the Node: ``status`` or ``metadata``.
    """
    metadata = {"name": name, "labels": {"a": "b"}, "managedFields": [], "resourceVersion": "1"}
    status = {
        "capacity": {"cpu": "4"},
        "conditions": [{"type": "Ready", "status": "True"}, {"type": "DRADevicesHealthy", "status": "True"}],
        "images": [{"names": ["a"], "sizeBytes": 1}],
    }
    before: dict[str, Any] = {"metadata": metadata, "status": status}
    after = {key: value for key, value in {**before[part], **changed}.items() if key != absent}
    return write_request("nodes", {**before, part: after}, before)


def write_request(
    resource: str, after: Mapping[str, Any] | None, before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the variables of a request of the agent on NODE that creates, updates or deletes an object."""
    user = {"extra": {"authentication.kubernetes.io/node-name": [NODE]}}
    request = {"resource": {"resource": resource}, "userInfo": user}
    return {"request": request, "object": after, "oldObject": before}


def lease(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"holderIdentity": "a"}}


def event(kind: str = "Pod", name: str = "train-0", **changed: str) -> dict[str, Any]:
    """Return an event of the agent on NODE about an object."""
    obj = {"apiVersion": "v1", "kind": kind, "name": name}
    reporter = {"reportingComponent": "drahealth", "reportingInstance": NODE}
    return {"metadata": {"name": "e"}, "involvedObject": obj, **reporter, **changed}


READY: Final = {"type": "Ready", "status": "True"}
ALLOWED_UPDATES: Final = (
    node_update({}),
    node_update({"conditions": [READY, {"type": "DRADevicesHealthy", "status": "False"}]}),
    node_update({"conditions": [READY]}),
    node_update({"managedFields": [{"manager": "drahealth"}], "resourceVersion": "2"}, part="metadata"),
    write_request("leases", lease(f"drahealth-{NODE}")),
    write_request("leases", lease(f"drahealth-{NODE}"), lease(f"drahealth-{NODE}")),
    write_request("events", event()),
    write_request("events", event("Node", NODE), event("Node", NODE)),
)
REFUSED_UPDATES: Final = (
    (node_update({}, name="node-b"), "own Node only"),
    (node_update({"conditions": []}), "begin with DRA"),
    (node_update({"capacity": {"cpu": "8"}}), "only the conditions"),
    (node_update({"allocatable": {"cpu": "4"}}), "only the conditions"),
    (node_update({"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}]}), "only the conditions"),
    (node_update({}, absent="images"), "only the conditions"),
    (node_update({"futureField": True}), "only the conditions"),
    (node_update({"labels": {"a": "c"}}, part="metadata"), "no labels"),
    (node_update({}, absent="labels", part="metadata"), "no labels"),
    (node_update({"annotations": {"a": "b"}}, part="metadata"), "no labels"),
    (node_update({"finalizers": ["a/b"]}, part="metadata"), "no labels"),
    (write_request("leases", lease("drahealth-node-b")), "own node only"),
    (write_request("leases", None, lease("drahealth-node-b")), "own node only"),
    (write_request("leases", {"metadata": {"generateName": "drahealth-"}}), "own node only"),
    (write_request("events", event("Node", "node-b")), "own Node and of pods"),
    (write_request("events", event("Deployment", NODE)), "own Node and of pods"),
    (write_request("events", event(reportingInstance="node-b")), "reports itself"),
    (write_request("events", event(reportingComponent="kubelet")), "reports itself"),
    (write_request("events", event(), event(reportingComponent="kubelet")), "reports itself"),
    (write_request("events", None, event(reportingInstance="node-b")), "reports itself"),
)


def test_agent_may_write_only_objects_of_its_own_node(
    agent_policy: Mapping[str, Any], evaluate_policy: EvaluatePolicy
) -> None:
    messages = [validation["message"] for validation in agent_policy["spec"]["validations"]]
    results = evaluate_policy(agent_policy, [*ALLOWED_UPDATES, *(update for update, _ in REFUSED_UPDATES)])
    refusals = [
        [message for message, text in zip(messages, result, strict=True) if text == "false"]
        for result in results
    ]
    count = len(ALLOWED_UPDATES)
    assert refusals[:count] == [[]] * count
    for found, (_, expected) in zip(refusals[count:], REFUSED_UPDATES, strict=True):
        assert len(found) == 1
        assert expected in found[0]


def test_chart_and_manifest_have_the_same_rules(agent_policy: Mapping[str, Any]) -> None:
    text = " ".join(CHART_FILE.read_text().split())
    for variable in (*agent_policy["spec"]["variables"], *agent_policy["spec"]["validations"]):
        assert variable["expression"] in text
        assert variable.get("message", "") in text
