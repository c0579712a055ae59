"""Parsing of pod objects: identity, resources of claims, QoS class, refused objects."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from cgroup_audit_pods import UID, claim, container, pod, pod_object, resources, sidecar
from kubernetes_samples import POD, pod_json

from agent.cgroup_audit.pod_model import (
    ClaimResources,
    ContainerClaimRef,
    ContainerRole,
    QosClass,
    UnfinishedResize,
    UnknownAmount,
    compute_qos_class,
    parse_quantity,
)
from agent.cgroup_audit.pod_parser import parse_pod
from agent.errors import ProbeError
from agent.serve.kubelet.pods_api import POD_SCHEMA, decode_pod

CPU_2 = {"cpu": parse_quantity("2")}
NONE: dict[str, Any] = {}


# --- identity ----------------------------------------------------------------------------------------------


def test_containers_are_listed_in_start_order() -> None:
    parsed_pod = pod(container("app"), init=[container("first"), sidecar("proxy"), container("last")])
    assert [(container.name, container.role) for container in parsed_pod.containers] == [
        ("first", ContainerRole.INIT),
        ("proxy", ContainerRole.SIDECAR),
        ("last", ContainerRole.INIT),
        ("app", ContainerRole.APP),
    ]


def test_container_has_runtime_id_start_and_allocation() -> None:
    state = {
        "name": "app",
        "containerID": "containerd://9b1d",
        "state": {"running": {"startedAt": "2026-09-01T12:00:00Z"}},
        "allocatedResources": {"cpu": "2", "example.com/gpu": "1"},
    }
    (app,) = pod(container("app"), containerStatuses=[state]).containers
    assert (app.runtime, app.id, app.started_wall_s, app.granted_requests) == (
        "containerd",
        "9b1d",
        1788264000.0,
        CPU_2,
    )


def test_container_not_started_has_no_id_and_no_time() -> None:
    state = {"name": "app", "containerID": "", "state": {"waiting": {"reason": "ContainerCreating"}}}
    (app,) = pod(container("app"), containerStatuses=[state]).containers
    assert (app.runtime, app.id, app.started_wall_s, app.granted_requests) == ("", "", None, None)


def test_cgroup_uid_of_a_mirror_pod_is_that_of_its_static_pod() -> None:
    obj = pod_object(container("etcd"))
    obj["metadata"]["annotations"] = {
        "kubernetes.io/config.hash": "d41d8cd98f00b204e9800998ecf8427e",
        "kubernetes.io/config.mirror": "d41d8cd98f00b204e9800998ecf8427e",
        "kubernetes.io/config.source": "file",
    }
    parsed_pod = parse_pod(obj)
    assert (parsed_pod.uid, parsed_pod.cgroup_uid) == (UID, "d41d8cd98f00b204e9800998ecf8427e")


def test_pod_with_only_the_config_hash_of_another_has_its_own_cgroup() -> None:
    """A pod that was copied from a static pod keeps the annotation; the kubelet ignores it."""
    obj = pod_object(container("etcd"))
    obj["metadata"]["annotations"] = {"kubernetes.io/config.hash": "d41d8cd98f00b204e9800998ecf8427e"}
    parsed_pod = parse_pod(obj)
    assert (parsed_pod.cgroup_uid, parsed_pod.is_critical) == (UID, False)


def test_cgroup_uid_of_a_normal_pod_is_its_uid() -> None:
    assert pod(container("app")).cgroup_uid == UID


def test_pod_claims_have_the_names_of_the_claim_objects() -> None:
    obj = pod_object(
        container("app"),
        resourceClaimStatuses=[{"name": "made", "resourceClaimName": "p-made-x7k2"}],
        extendedResourceClaimStatus={"resourceClaimName": "p-extended-resources-1"},
    )
    obj["spec"]["resourceClaims"] = [
        {"name": "given", "resourceClaimName": "shared-gpu"},
        {"name": "made", "resourceClaimTemplateName": "gpu"},
        {"name": "later", "resourceClaimTemplateName": "gpu"},
    ]
    assert parse_pod(obj).claims == ("shared-gpu", "p-made-x7k2", "later", "p-extended-resources-1")


def test_container_refers_to_claims_and_requests_of_the_pod() -> None:
    obj = container("app")
    obj["resources"]["claims"] = [{"name": "gpu", "request": "one"}, {"name": "cpus"}]
    (app,) = pod(obj).containers
    assert app.claims == (ContainerClaimRef("gpu", "one"), ContainerClaimRef("cpus", ""))


def test_ended_pod_is_not_active() -> None:
    assert [pod(container("a"), phase=phase).is_active for phase in ("Running", "Succeeded", "Failed")] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("conditions", "resize"),
    [
        ([], None),
        ([{"type": "PodResizePending", "status": "False"}], None),
        (
            [{"type": "PodResizePending", "status": "True", "reason": "Deferred"}],
            UnfinishedResize(True, "Deferred", None),
        ),
        (
            [
                {
                    "type": "PodResizeInProgress",
                    "status": "True",
                    "lastTransitionTime": "1970-01-01T00:00:09Z",
                },
                {"type": "Ready", "status": "True"},
            ],
            UnfinishedResize(False, "", 9.0),
        ),
        (
            [
                {"type": "PodResizeInProgress", "status": "True"},
                {"type": "PodResizePending", "status": "True", "reason": "Infeasible"},
            ],
            UnfinishedResize(True, "Infeasible", None),
        ),
    ],
)
def test_pending_resize_outranks_a_resize_in_progress(
    conditions: list[object], resize: UnfinishedResize
) -> None:
    assert pod(container("app"), conditions=conditions).resize == resize


@pytest.mark.parametrize(
    ("generation", "observed", "resize"),
    [
        (3, 3, None),
        (3, 0, None),  # a kubelet that does not track generations
        (4, 3, UnfinishedResize(True, "the status is older than the spec", None)),
    ],
)
def test_spec_newer_than_the_status_counts_as_pending_resize(
    generation: int, observed: int, resize: UnfinishedResize | None
) -> None:
    obj = pod_object(container("app"), observedGeneration=observed)
    obj["metadata"]["generation"] = generation
    assert parse_pod(obj).resize == resize


def test_pending_resize_in_the_kubelets_pod_is_found() -> None:
    found = parse_pod(decode_pod(POD), from_kubelet=True)
    assert found.resize == UnfinishedResize(True, "Deferred", 1_700_000_020.0)


class RecordedObject(dict[str, Any]):
    """JSON object that records the path of each field that is read from it."""

    def __init__(self, values: Mapping[str, Any], path: str, read: set[str]) -> None:
        self._path, self._read = path, read
        super().__init__({key: self._wrap(item, f"{path}{key}.") for key, item in values.items()})

    def _wrap(self, item: Any, path: str) -> Any:
        if isinstance(item, dict):
            return RecordedObject(item, path, self._read)
        return [self._wrap(inner, path) for inner in item] if isinstance(item, list) else item

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(f"{self._path}{key}")
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._read.add(f"{self._path}{key}")
        return super().__getitem__(key)


def is_decoded(path: str) -> bool:
    """Return whether the schema of the kubelet's pods has a field; a key of a map counts as one."""
    schema: Any = POD_SCHEMA
    for name in path.split("."):
        found = next((field for field in schema.values() if field.name == name), None)
        if found is None or found.is_map:
            return found is not None
        schema = found.kind
    return True


def test_each_field_that_the_parser_reads_is_decoded_from_the_kubelet() -> None:
    read: set[str] = set()
    parse_pod(RecordedObject(pod_json(), "", read))
    assert {"status.conditions.reason", "spec.initContainers.restartPolicy"} <= read
    grant = "status.nodeAllocatableResourceClaimStatuses"
    of_the_kep = {f"{grant}.direct", f"{grant}.overhead.perPodReference"}
    of_the_kep |= {f"{grant}.overhead.perContainerReference"}
    assert {path for path in read - {"kind"} if not is_decoded(path)} <= of_the_kep


def test_extended_resource_claim_of_the_kubelets_pod_has_unknown_amounts() -> None:
    obj = pod_object(container("app", "example.com/gpu=1", "example.com/gpu=1"), phase="Running")
    del obj["status"]["nodeAllocatableResourceClaimStatuses"]
    assert parse_pod(obj, from_kubelet=True).claim_resources == ()
    found = parse_pod(obj, from_kubelet=True, claim_users={UID})
    assert isinstance(found.claim_resources, UnknownAmount)
    assert "drahealth audit --pods FILE" in found.claim_resources.reason


# --- resources of claims -----------------------------------------------------------------------------------


def test_claim_amounts_of_three_versions_parse_alike() -> None:
    """Kubernetes 1.36, the text of KEP-5517, and Kubernetes 1.37 as released."""
    head = {"resourceClaimName": "cpus", "containers": ["c1"]}
    shapes = [
        {**head, "resources": {"cpu": "2"}},
        {**head, "direct": [{"name": "cpu", "quantity": "2"}]},
        {**head, "mapping": [{"name": "cpu", "quantity": "2"}]},
    ]
    grants = {json.dumps(shape): pod(container("c1"), claims=[shape]).claim_resources for shape in shapes}
    assert list(grants.values()) == [(ClaimResources("cpus", ("c1",), CPU_2, NONE, NONE),)] * 3


@pytest.mark.parametrize("keys", [("perPod", "perContainer"), ("perPodReference", "perContainerReference")])
def test_overhead_counts_per_pod_and_per_container(keys: tuple[str, str]) -> None:
    entry = {
        "resourceClaimName": "gpu",
        "containers": ["c1"],
        "overhead": [{"name": "cpu", keys[0]: "1", keys[1]: "500m"}, {"name": "memory", keys[1]: "1Gi"}],
    }
    (grant,) = parsed_grants(entry)
    half, whole = parse_quantity("500m"), parse_quantity("1")
    assert (grant.shared, grant.per_pod) == ({}, {"cpu": whole})
    assert grant.per_container == {"cpu": half, "memory": parse_quantity("1Gi")}
    assert grant.amount_for_pod("cpu") == grant.amount_for_container("c1", "cpu") == whole + half
    assert grant.amount_for_container("c2", "cpu") is grant.amount_for_pod("hugepages-2Mi") is None


def parsed_grants(entry: dict[str, object]) -> tuple[ClaimResources, ...]:
    grants = pod(container("c1"), claims=[entry]).claim_resources
    assert not isinstance(grants, UnknownAmount)
    return grants


def test_newest_form_of_claim_amounts_takes_precedence() -> None:
    entry = {**claim("cpus", "c1", "cpu=2"), "resources": {"cpu": "2"}, "direct": []}
    assert parsed_grants(entry)[0].shared == CPU_2


def test_other_resources_and_unknown_fields_of_a_claim_are_ignored() -> None:
    entry = {**claim("gpu", "c1", "cpu=2 ephemeral-storage=lots"), "devices": 3}
    assert parsed_grants(entry)[0].shared == CPU_2


def test_claim_amounts_in_unknown_form_are_unknown() -> None:
    grants = pod(
        container("c1"), claims=[{"resourceClaimName": "cpus", "amounts": {"cpu": "2"}}]
    ).claim_resources
    assert isinstance(grants, UnknownAmount)
    assert "claim cpus" in grants.reason


def test_claim_amounts_without_a_status_are_unknown() -> None:
    obj = pod_object(container("c1"))
    del obj["status"]
    assert parse_pod(obj).claim_resources == ()
    obj["spec"]["resourceClaims"] = [{"name": "cpus", "resourceClaimTemplateName": "cpus"}]
    assert isinstance(parse_pod(obj).claim_resources, UnknownAmount)


# --- QoS class ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resources", "qos"),
    [
        ([("", "")], QosClass.BEST_EFFORT),
        ([("cpu=0 memory=0", "")], QosClass.BEST_EFFORT),
        ([("cpu=1", "")], QosClass.BURSTABLE),
        ([("cpu=1 memory=1Gi", "cpu=1 memory=1Gi")], QosClass.GUARANTEED),
        ([("cpu=1 memory=1Gi", "cpu=1000m memory=1024Mi")], QosClass.GUARANTEED),
        ([("cpu=1 memory=1Gi", "cpu=2 memory=1Gi")], QosClass.BURSTABLE),
        ([("cpu=1", "cpu=1")], QosClass.BURSTABLE),
        ([("cpu=1 memory=1Gi", "cpu=1 memory=1Gi"), ("", "")], QosClass.BURSTABLE),
        ([("hugepages-2Mi=4Mi", "hugepages-2Mi=4Mi")], QosClass.BEST_EFFORT),
    ],
)
def test_qos_class_follows_from_requests_and_limits(resources: list[tuple[str, str]], qos: QosClass) -> None:
    parsed_pod = pod(*(container(f"c{number}", *both) for number, both in enumerate(resources)))
    assert compute_qos_class(parsed_pod) is parsed_pod.qos is qos


def test_qos_class_counts_init_containers_and_no_claims() -> None:
    guaranteed = container("a", "cpu=1 memory=1Gi", "cpu=1 memory=1Gi")
    assert pod(guaranteed, init=[container("b")]).qos is QosClass.BURSTABLE
    assert pod(container("a"), claims=[claim("cpus", "a", "cpu=2 memory=1Gi")]).qos is QosClass.BEST_EFFORT


def test_pod_level_resources_alone_determine_the_qos_class() -> None:
    level = resources("cpu=1 memory=1Gi", "cpu=1 memory=1Gi")
    assert pod(container("a", "cpu=1"), level=level).qos is QosClass.GUARANTEED
    assert pod(container("a", "cpu=1"), level={}).qos is QosClass.BURSTABLE


def test_qos_class_from_the_status_takes_precedence() -> None:
    parsed_pod = pod(container("a", "cpu=1"), qosClass="BestEffort")
    assert (parsed_pod.reported_qos, parsed_pod.qos, compute_qos_class(parsed_pod)) == (
        QosClass.BEST_EFFORT,
        QosClass.BEST_EFFORT,
        QosClass.BURSTABLE,
    )


# --- refused objects ---------------------------------------------------------------------------------------


def test_yaml_numbers_are_accepted_as_quantities() -> None:
    app = {"name": "app", "resources": {"requests": {"cpu": 0.5, "memory": 1024}}}
    (parsed,) = pod(app).containers
    assert parsed.requests == {"cpu": parse_quantity("500m"), "memory": parse_quantity("1Ki")}


def test_invalid_quantity_of_another_resource_is_ignored() -> None:
    assert pod(container("app", "example.com/gpu=some cpu=2")).containers[0].requests == CPU_2


def changed_object(**changes: object) -> dict[str, Any]:
    """Return a pod object with other values at some paths: ``spec__containers`` is spec.containers."""
    obj = pod_object(container("app"))
    for path, value in changes.items():
        *parents, last = path.split("__")
        at = obj
        for parent in parents:
            at = at[parent]
        at[last] = value
    return obj


@pytest.mark.parametrize(
    ("obj", "text"),
    [
        ({"kind": "Node"}, "'Node' is not a Pod"),
        ({}, "pod without a name: metadata.name: None is not a name"),
        (changed_object(metadata=[]), "metadata: is a list, not an object"),
        (changed_object(metadata__uid=""), "pod 'p': metadata.uid: '' is not a name"),
        (changed_object(metadata__name="a b"), "metadata.name: 'a b' is not a name"),
        (changed_object(spec__containers=[]), "spec.containers: is empty"),
        (
            changed_object(spec__containers=[], spec__initContainers=[container("first")]),
            "spec.containers: is empty",
        ),
        (
            changed_object(status__containerStatuses=[{"name": ["app"]}]),
            "status.containerStatuses.name: is a list, not text",
        ),
        (
            changed_object(status__resourceClaimStatuses=[{"name": {}}]),
            "status.resourceClaimStatuses.name: is an object, not text",
        ),
        (
            changed_object(status__conditions=[{"type": [], "status": "True"}]),
            "status.conditions.type: is a list, not text",
        ),
        (changed_object(spec__containers={}), "spec.containers: is not a list of objects"),
        (changed_object(spec__containers=[{"name": 3}]), "spec.containers[0].name: 3 is not a name"),
        (changed_object(spec__overhead={"cpu": "lots"}), "spec.overhead.cpu: 'lots' is not a quantity"),
        (changed_object(spec__overhead={"cpu": True}), "spec.overhead.cpu: True is not a quantity"),
        (changed_object(spec__overhead={"cpu": None}), "spec.overhead.cpu: None is not a quantity"),
        (changed_object(spec__overhead={"memory": "-1Gi"}), "spec.overhead.memory: '-1Gi' is negative"),
        (
            changed_object(status__qosClass="Best"),
            "status.qosClass: 'Best' is none of Guaranteed, Burstable, BestEffort",
        ),
        (
            changed_object(
                status__conditions=[
                    {"type": "PodResizePending", "status": "True", "lastTransitionTime": "now"}
                ]
            ),
            "status.conditions[PodResizePending].lastTransitionTime: 'now' is not a time",
        ),
        (
            changed_object(
                status__conditions=[
                    {
                        "type": "PodResizePending",
                        "status": "True",
                        "lastTransitionTime": "2026-09-01T12:00:00",
                    }
                ]
            ),
            "has no time zone",
        ),
        (
            changed_object(
                status__nodeAllocatableResourceClaimStatuses=[{"resourceClaimName": "c", "mapping": [{}]}]
            ),
            "status.nodeAllocatableResourceClaimStatuses[0].mapping.name: None is not a name",
        ),
        (
            changed_object(
                status__nodeAllocatableResourceClaimStatuses=[
                    {"resourceClaimName": "c", "mapping": [{"name": "cpu"}]}
                ]
            ),
            "status.nodeAllocatableResourceClaimStatuses[0].mapping.cpu: None is not a quantity",
        ),
        (
            changed_object(
                status__nodeAllocatableResourceClaimStatuses=[
                    {"resourceClaimName": "c", "overhead": [{"name": "cpu"}]}
                ]
            ),
            "'cpu' has neither perPod nor perContainer",
        ),
        (
            changed_object(
                status__nodeAllocatableResourceClaimStatuses=[
                    {"resourceClaimName": "c", "resources": {}, "containers": "c1"}
                ]
            ),
            "containers: is not a list of names",
        ),
    ],
)
def test_invalid_pod_is_refused_with_the_path_of_the_field(obj: dict[str, Any], text: str) -> None:
    with pytest.raises(ProbeError) as raised:
        parse_pod(obj)
    assert text in str(raised.value)
