"""A pod's object is read as far as cgroups follow from it; what it does not say is said to be unsaid."""

import json
from typing import Any

import pytest
from enforce_pods import UID, asked, claim, container, pod, pod_object, sidecar

from agent.allocatable.pod import ContainerClaim, Grant, Qos, Resize, Role, Unsaid, computed_qos
from agent.allocatable.pod_object import parse_pod
from agent.allocatable.quantity import parse_quantity
from agent.errors import ProbeError

CPU_2 = {"cpu": parse_quantity("2")}
NONE: dict[str, Any] = {}


# --- who it is ---------------------------------------------------------------------------------------------


def test_containers_are_in_the_order_in_which_they_start() -> None:
    mine = pod(container("app"), init=[container("first"), sidecar("proxy"), container("last")])
    assert [(one.name, one.role) for one in mine.containers] == [
        ("first", Role.INIT),
        ("proxy", Role.SIDECAR),
        ("last", Role.INIT),
        ("app", Role.APP),
    ]


def test_a_container_is_found_by_its_runtimes_id() -> None:
    state = {
        "name": "app",
        "containerID": "containerd://9b1d",
        "state": {"running": {"startedAt": "2026-09-01T12:00:00Z"}},
        "allocatedResources": {"cpu": "2", "example.com/gpu": "1"},
    }
    (app,) = pod(container("app"), containerStatuses=[state]).containers
    assert (app.runtime, app.id, app.started_wall_s, app.allocated) == (
        "containerd",
        "9b1d",
        1788264000.0,
        CPU_2,
    )


def test_a_container_that_was_not_started_has_no_id_and_no_time() -> None:
    state = {"name": "app", "containerID": "", "state": {"waiting": {"reason": "ContainerCreating"}}}
    (app,) = pod(container("app"), containerStatuses=[state]).containers
    assert (app.runtime, app.id, app.started_wall_s, app.allocated) == ("", "", None, None)


@pytest.mark.parametrize(
    "annotations",
    [
        {"kubernetes.io/config.hash": "d41d8cd98f00b204e9800998ecf8427e"},
        {
            "kubernetes.io/config.mirror": "d41d8cd98f00b204e9800998ecf8427e",
            "kubernetes.io/config.source": "file",
        },
    ],
)
def test_the_cgroup_of_a_static_pod_is_named_by_its_hash(annotations: dict[str, str]) -> None:
    """Its mirror on the API server has a uid of its own."""
    obj = pod_object(container("etcd"))
    obj["metadata"]["annotations"] = annotations
    mine = parse_pod(obj)
    assert (mine.uid, mine.cgroup_uid) == (UID, "d41d8cd98f00b204e9800998ecf8427e")


def test_any_other_pod_has_its_own_uid() -> None:
    assert pod(container("app")).cgroup_uid == UID


def test_claims_have_the_name_of_the_claim_not_that_within_the_pod() -> None:
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


def test_a_container_names_claims_of_the_pod() -> None:
    obj = container("app")
    obj["resources"]["claims"] = [{"name": "gpu", "request": "one"}, {"name": "cpus"}]
    (app,) = pod(obj).containers
    assert app.claims == (ContainerClaim("gpu", "one"), ContainerClaim("cpus", ""))


def test_a_pod_that_is_over_does_not_count() -> None:
    assert [pod(container("a"), phase=phase).active for phase in ("Running", "Succeeded", "Failed")] == [
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
            Resize(True, "Deferred", None),
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
            Resize(False, "", 9.0),
        ),
        (
            [
                {"type": "PodResizeInProgress", "status": "True"},
                {"type": "PodResizePending", "status": "True", "reason": "Infeasible"},
            ],
            Resize(True, "Infeasible", None),
        ),
    ],
)
def test_a_resize_that_waits_outranks_one_that_is_under_way(conditions: list[object], resize: Resize) -> None:
    assert pod(container("app"), conditions=conditions).resize == resize


# --- what claims give it -----------------------------------------------------------------------------------


def test_the_three_shapes_of_a_claims_amounts_say_the_same() -> None:
    """1.36; the text of KEP-5517; 1.37 as released."""
    head = {"resourceClaimName": "cpus", "containers": ["c1"]}
    shapes = [
        {**head, "resources": {"cpu": "2"}},
        {**head, "direct": [{"name": "cpu", "quantity": "2"}]},
        {**head, "mapping": [{"name": "cpu", "quantity": "2"}]},
    ]
    grants = {json.dumps(one): pod(container("c1"), claims=[one]).grants for one in shapes}
    assert list(grants.values()) == [(Grant("cpus", ("c1",), CPU_2, NONE, NONE),)] * 3


@pytest.mark.parametrize("keys", [("perPod", "perContainer"), ("perPodReference", "perContainerReference")])
def test_overhead_is_for_the_pod_for_each_container_or_both(keys: tuple[str, str]) -> None:
    entry = {
        "resourceClaimName": "gpu",
        "containers": ["c1"],
        "overhead": [{"name": "cpu", keys[0]: "1", keys[1]: "500m"}, {"name": "memory", keys[1]: "1Gi"}],
    }
    (grant,) = parsed_grants(entry)
    half, one = parse_quantity("500m"), parse_quantity("1")
    assert (grant.mapping, grant.per_pod) == ({}, {"cpu": one})
    assert grant.per_container == {"cpu": half, "memory": parse_quantity("1Gi")}
    assert grant.to_pod("cpu") == grant.to_container("c1", "cpu") == one + half
    assert grant.to_container("c2", "cpu") is grant.to_pod("hugepages-2Mi") is None


def parsed_grants(entry: dict[str, object]) -> tuple[Grant, ...]:
    grants = pod(container("c1"), claims=[entry]).grants
    assert not isinstance(grants, Unsaid)
    return grants


def test_the_newest_shape_counts_and_nothing_twice() -> None:
    entry = {**claim("cpus", "c1", "cpu=2"), "resources": {"cpu": "2"}, "direct": []}
    assert parsed_grants(entry)[0].mapping == CPU_2


def test_amounts_of_other_resources_and_newer_fields_are_passed_over() -> None:
    entry = {**claim("gpu", "c1", "cpu=2 ephemeral-storage=lots"), "devices": 3}
    assert parsed_grants(entry)[0].mapping == CPU_2


def test_a_claim_in_a_shape_that_nobody_knows_is_unsaid_not_zero() -> None:
    grants = pod(container("c1"), claims=[{"resourceClaimName": "cpus", "amounts": {"cpu": "2"}}]).grants
    assert isinstance(grants, Unsaid)
    assert "claim cpus" in grants.why


def test_without_a_status_the_amounts_of_claims_are_unsaid() -> None:
    obj = pod_object(container("c1"))
    del obj["status"]
    assert parse_pod(obj).grants == ()
    obj["spec"]["resourceClaims"] = [{"name": "cpus", "resourceClaimTemplateName": "cpus"}]
    assert isinstance(parse_pod(obj).grants, Unsaid)


# --- its class ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resources", "qos"),
    [
        ([("", "")], Qos.BEST_EFFORT),
        ([("cpu=0 memory=0", "")], Qos.BEST_EFFORT),
        ([("cpu=1", "")], Qos.BURSTABLE),
        ([("cpu=1 memory=1Gi", "cpu=1 memory=1Gi")], Qos.GUARANTEED),
        ([("cpu=1 memory=1Gi", "cpu=1000m memory=1024Mi")], Qos.GUARANTEED),
        ([("cpu=1 memory=1Gi", "cpu=2 memory=1Gi")], Qos.BURSTABLE),
        ([("cpu=1", "cpu=1")], Qos.BURSTABLE),
        ([("cpu=1 memory=1Gi", "cpu=1 memory=1Gi"), ("", "")], Qos.BURSTABLE),
        ([("hugepages-2Mi=4Mi", "hugepages-2Mi=4Mi")], Qos.BEST_EFFORT),
    ],
)
def test_requests_and_limits_make_the_class(resources: list[tuple[str, str]], qos: Qos) -> None:
    mine = pod(*(container(f"c{number}", *both) for number, both in enumerate(resources)))
    assert computed_qos(mine) is mine.qos is qos


def test_init_containers_count_and_claims_do_not() -> None:
    guaranteed = container("a", "cpu=1 memory=1Gi", "cpu=1 memory=1Gi")
    assert pod(guaranteed, init=[container("b")]).qos is Qos.BURSTABLE
    assert pod(container("a"), claims=[claim("cpus", "a", "cpu=2 memory=1Gi")]).qos is Qos.BEST_EFFORT


def test_what_is_asked_for_the_pod_as_a_whole_decides_alone() -> None:
    level = asked("cpu=1 memory=1Gi", "cpu=1 memory=1Gi")
    assert pod(container("a", "cpu=1"), level=level).qos is Qos.GUARANTEED
    assert pod(container("a", "cpu=1"), level={}).qos is Qos.BURSTABLE


def test_the_kubelet_goes_by_the_class_that_was_stated() -> None:
    mine = pod(container("a", "cpu=1"), qosClass="BestEffort")
    assert (mine.stated_qos, mine.qos, computed_qos(mine)) == (
        Qos.BEST_EFFORT,
        Qos.BEST_EFFORT,
        Qos.BURSTABLE,
    )


# --- what is wrong with it ---------------------------------------------------------------------------------


def test_numbers_of_yaml_are_quantities() -> None:
    app = {"name": "app", "resources": {"requests": {"cpu": 0.5, "memory": 1024}}}
    (parsed,) = pod(app).containers
    assert parsed.requests == {"cpu": parse_quantity("500m"), "memory": parse_quantity("1Ki")}


def test_resources_that_cgroups_do_not_know_may_be_anything() -> None:
    assert pod(container("app", "example.com/gpu=some cpu=2")).containers[0].requests == CPU_2


def wrong(**changes: object) -> dict[str, Any]:
    """An object with something else at some places: ``spec__containers`` is the containers."""
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
        ({"kind": "Node"}, "'Node' is no Pod"),
        ({}, "pod without a name: metadata.name: None is no name"),
        (wrong(metadata=[]), "metadata: is a list, no object"),
        (wrong(metadata__uid=""), "pod 'p': metadata.uid: '' is no name"),
        (wrong(metadata__name="a b"), "metadata.name: 'a b' is no name"),
        (wrong(spec__containers=[]), "spec.containers: is empty"),
        (wrong(spec__containers={}), "spec.containers: is no list of objects"),
        (wrong(spec__containers=[{"name": 3}]), "spec.containers[0].name: 3 is no name"),
        (wrong(spec__overhead={"cpu": "lots"}), "spec.overhead.cpu: 'lots' is no quantity"),
        (wrong(spec__overhead={"cpu": True}), "spec.overhead.cpu: is no quantity"),
        (wrong(spec__overhead={"cpu": None}), "spec.overhead.cpu: is no quantity"),
        (wrong(spec__overhead={"memory": "-1Gi"}), "spec.overhead.memory: '-1Gi' is less than nothing"),
        (
            wrong(status__qosClass="Best"),
            "status.qosClass: 'Best' is none of Guaranteed, Burstable, BestEffort",
        ),
        (
            wrong(
                status__conditions=[
                    {"type": "PodResizePending", "status": "True", "lastTransitionTime": "now"}
                ]
            ),
            "status.conditions[PodResizePending].lastTransitionTime: 'now' is no time",
        ),
        (
            wrong(
                status__conditions=[
                    {
                        "type": "PodResizePending",
                        "status": "True",
                        "lastTransitionTime": "2026-09-01T12:00:00",
                    }
                ]
            ),
            "names no time zone",
        ),
        (
            wrong(status__nodeAllocatableResourceClaimStatuses=[{"resourceClaimName": "c", "mapping": [{}]}]),
            "status.nodeAllocatableResourceClaimStatuses[0].mapping.name: None is no name",
        ),
        (
            wrong(
                status__nodeAllocatableResourceClaimStatuses=[
                    {"resourceClaimName": "c", "mapping": [{"name": "cpu"}]}
                ]
            ),
            "status.nodeAllocatableResourceClaimStatuses[0].mapping.cpu: is no quantity",
        ),
        (
            wrong(
                status__nodeAllocatableResourceClaimStatuses=[
                    {"resourceClaimName": "c", "overhead": [{"name": "cpu"}]}
                ]
            ),
            "'cpu' has neither perPod nor perContainer",
        ),
        (
            wrong(
                status__nodeAllocatableResourceClaimStatuses=[
                    {"resourceClaimName": "c", "resources": {}, "containers": "c1"}
                ]
            ),
            "containers: is no list of names",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_place(obj: dict[str, Any], text: str) -> None:
    with pytest.raises(ProbeError) as raised:
        parse_pod(obj)
    assert text in str(raised.value)
