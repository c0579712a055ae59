"""Consumer map: pods and containers of each device, with all conflicts between sources."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from claim_samples import (
    DRIVER,
    answer,
    device,
    group_reservation,
    job_reservation,
    known_claim,
    known_pod,
    listed_claim,
    listed_pod,
    listed_prepared,
    pod_reservation,
    provenance,
    ref,
    source_answers,
    use,
)

from agent.devices.consumers.consumer_map import build_consumer_map
from agent.devices.consumers.consumer_queries import (
    affected_pods,
    claims_by_name,
    group_members,
    pods_by_name,
    refused_pods,
)
from agent.devices.consumers.kube_objects import KubeletsRefusingPod
from agent.devices.consumers.usage import current_uses
from agent.model.claim import ClaimRef
from agent.model.claim_sources import (
    ConsumerKind,
    ContainerCgroup,
    ContainerClaim,
    ContainerObject,
    Origin,
    PodCgroup,
    PodClaim,
    PodObject,
    PodRef,
    SourceAnswer,
    SourceAnswers,
)
from agent.model.consumers import ConflictKind, ConsumerMap, ContainerUse, MissingSource, Relation
from agent.model.reading import Absence

POD = PodRef("team-a", "pod-p", "p")


def affected_names(consumers: ConsumerMap, gpu: str = "gpu-0") -> list[tuple[str, bool]]:
    """Return the pods that a device affects, each with whether that is sure."""
    return [(str(pod.pod.ref), pod.is_certain) for pod in affected_pods(consumers, device(gpu))]


def conflict_kinds(consumers: ConsumerMap) -> list[ConflictKind]:
    return [conflict.kind for conflict in consumers.conflicts]


# --- from a device to its pods -----------------------------------------------------------------------------


def test_device_leads_to_its_claim_pod_and_container() -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("c", use("gpu-0", "gpus"), pods=["p"])],
            pods_api=[known_pod("p", "claim-c")],
        )
    )
    (pod,) = affected_pods(consumers, device())
    assert pod.pod.ref == POD
    assert pod.claim == ref("c")
    assert pod.is_certain
    assert pod.containers == (ContainerUse("main", is_certain=True),)
    assert {edge.provenance.origin for edge in pod.edges} == {Origin.CHECKPOINT, Origin.PODS_API}
    assert pod.pod.known == known_pod("p", "claim-c")


def test_checkpoint_alone_gives_pod_uids_without_names() -> None:
    consumers = build_consumer_map(
        source_answers(checkpoint=[listed_prepared("c", use(), pods=["p-1", "p-2"])])
    )
    assert affected_names(consumers) == [("pod p-1", True), ("pod p-2", True)]
    assert [affected_pod.containers for affected_pod in affected_pods(consumers, device())] == [(), ()]


def test_podresources_alone_gives_pod_names_without_uids() -> None:
    consumers = build_consumer_map(
        source_answers(podresources=[listed_pod("train-0", listed_claim("gpus", use()))])
    )
    (pod,) = affected_pods(consumers, device())
    assert (pod.pod.ref, pod.claim) == (PodRef("team-a", "train-0"), ClaimRef("team-a", "gpus", ""))
    assert pod.is_certain
    assert all(edge.by_name for edge in pod.edges)


def test_name_and_uid_without_a_pod_object_are_two_pods() -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("c", use(), pods=["p"])],
            podresources=[listed_pod("pod-p", listed_claim("claim-c", use()))],
        )
    )
    assert affected_names(consumers) == [("pod p", True), ("team-a/pod-p", True)]
    assert set(consumers.claims) == {ref("c")}  # matched with the checkpoint's claim by name


def test_reservation_ties_a_pod_name_to_its_uid() -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("c", use(), pods=["p"])],
            podresources=[listed_pod("pod-p", listed_claim("claim-c", use()))],
            claims_file=[known_claim("c", use(), reserved=[pod_reservation("p")])],
        )
    )
    assert affected_names(consumers) == [("team-a/pod-p", True)]


def test_device_without_a_claim_affects_no_pod() -> None:
    consumers = build_consumer_map(
        source_answers(checkpoint=[listed_prepared("c", use("gpu-1"), pods=["p"])])
    )
    assert affected_pods(consumers, device("gpu-0")) == ()


def test_pod_with_two_claims_of_a_device_is_listed_for_each() -> None:
    claims = [listed_prepared("c-1", use(), pods=["p"]), listed_prepared("c-2", use(), pods=["p"])]
    consumers = build_consumer_map(source_answers(checkpoint=claims))
    assert [affected_pod.claim.uid for affected_pod in affected_pods(consumers, device())] == ["c-1", "c-2"]


# --- certain and possible uses -----------------------------------------------------------------------------


def test_pod_known_by_a_reservation_alone_is_unsure() -> None:
    consumers = build_consumer_map(
        source_answers(claims_file=[known_claim("c", use(), reserved=[pod_reservation("p")])])
    )
    assert affected_names(consumers) == [("team-a/pod-p", False)]


def test_pod_that_only_names_a_prepared_claim_is_unsure() -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("c", use(), pods=["p"])],
            pods_api=[known_pod("p", "claim-c"), known_pod("q", "claim-c", phase="Pending")],
        )
    )
    assert affected_names(consumers) == [("team-a/pod-p", True), ("team-a/pod-q", False)]


def test_claim_that_waits_for_its_driver_affects_pods_unsurely() -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("c", pods=["p"], waiting=(DRIVER,))],
            claims_file=[known_claim("c", use(), reserved=[pod_reservation("p")])],
        )
    )
    assert affected_names(consumers) == [("team-a/pod-p", False)]
    assert consumers.claims[ref("c")].waiting == (DRIVER,)


def test_claim_with_a_skipped_driver_affects_its_pods_surely() -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("c", pods=["p"], skipped=(DRIVER,))],
            claims_file=[known_claim("c", use())],
        )
    )
    assert affected_names(consumers) == [("pod p", True)]


def test_claim_known_from_a_driver_alone_affects_no_pod() -> None:
    consumers = build_consumer_map(source_answers(driver=[listed_prepared("c", use())]))
    assert consumers.devices == {device(): (ref("c"),)}
    assert affected_names(consumers) == []


# --- pod groups and others ---------------------------------------------------------------------------------


def test_group_members_are_unsure_unless_the_claim_is_prepared() -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("c", use(), pods=["p"])],
            pods_file=[
                known_pod("p", "claim-c", group="workers"),
                known_pod("q", "claim-c", group="workers", node="node-2"),
                known_pod("r", group="workers"),  # names no claim
                known_pod("s", group="others"),
            ],
            claims_file=[known_claim("c", use(), reserved=[group_reservation("workers")])],
        )
    )
    assert affected_names(consumers) == [("team-a/pod-p", True), ("team-a/pod-q", False)]
    assert [pod.ref.uid for pod in group_members(consumers, ref("c"), "workers")] == ["p", "q"]


def test_group_member_with_unnamed_claims_is_unsure() -> None:
    template = (PodClaim("gpus", "", template=True),)
    consumers = build_consumer_map(
        source_answers(
            pods_api=[known_pod("p", group="workers", claims=template)],
            claims_file=[known_claim("c", use(), reserved=[group_reservation("workers")])],
        )
    )
    (pod,) = affected_pods(consumers, device())
    assert (pod.pod.ref.uid, pod.is_certain, pod.group) == ("p", False, "workers")


def test_uid_of_a_group_is_not_matched_with_a_pod() -> None:
    consumers = build_consumer_map(
        source_answers(
            pods_api=[known_pod("g", "claim-x")],
            claims_file=[
                known_claim(
                    "c", use(), reserved=[group_reservation("workers", "g"), job_reservation("j", "g")]
                )
            ],
        )
    )
    reserved_for = {edge.consumer for edge in consumers.claims[ref("c")].consumers}
    assert {(reservation.kind, reservation.resource) for reservation in reserved_for} == {
        (ConsumerKind.POD_GROUP, "podgroups.scheduling.k8s.io"),
        (ConsumerKind.OTHER, "jobs.batch"),
    }
    assert all(reference.pod is None for reference in reserved_for)
    assert affected_names(consumers) == []


def test_each_of_300_reservations_is_an_edge() -> None:
    reserved = [pod_reservation(f"p-{number}") for number in range(300)] + [
        group_reservation("workers"),
        job_reservation("train"),
    ]
    consumers = build_consumer_map(source_answers(claims_file=[known_claim("c", use(), reserved=reserved)]))
    assert len(consumers.claims[ref("c")].consumers) == 302
    assert len(affected_pods(consumers, device())) == 300


# --- containers --------------------------------------------------------------------------------------------


def two_request_claim(*containers: tuple[str, str]) -> SourceAnswers:
    """Return answers with a claim of two requests and a pod whose containers name the given requests."""
    return source_answers(
        checkpoint=[listed_prepared("c", use("gpu-0", "big"), use("gpu-1", "small"), pods=["p"])],
        pods_api=[
            known_pod(
                "p",
                claims=(PodClaim("mine", "claim-c"),),
                containers=tuple(
                    ContainerObject(name, (ContainerClaim("mine", request),)) for name, request in containers
                ),
            )
        ],
        podresources=[
            listed_pod("pod-p", listed_claim("claim-c", use("gpu-0"), use("gpu-1")), container="one")
        ],
    )


def test_containers_use_only_the_devices_of_their_requests() -> None:
    consumers = build_consumer_map(two_request_claim(("one", "big"), ("two", "small/model-x"), ("three", "")))
    (big,) = affected_pods(consumers, device("gpu-0"))
    (small,) = affected_pods(consumers, device("gpu-1"))
    assert big.containers == (ContainerUse("one", is_certain=True), ContainerUse("three", is_certain=True))
    assert small.containers == (ContainerUse("three", is_certain=True), ContainerUse("two", is_certain=True))


def test_container_from_podresources_alone_is_unsure() -> None:
    listing = [listed_pod("p", listed_claim("c", use("gpu-0"), use("gpu-1")))]
    (pod,) = affected_pods(build_consumer_map(source_answers(podresources=listing)), device())
    assert pod.containers == (ContainerUse("main", is_certain=False),)


def test_container_of_a_claim_with_one_device_is_sure() -> None:
    consumers = build_consumer_map(source_answers(podresources=[listed_pod("p", listed_claim("c", use()))]))
    assert affected_pods(consumers, device())[0].containers == (ContainerUse("main", is_certain=True),)


@pytest.mark.parametrize(("source", "is_certain"), [("checkpoint", True), ("driver", False)])
def test_device_without_requests_serves_all_of_them_in_the_checkpoint(source: str, is_certain: bool) -> None:
    """The kubelet gives such a device to each container with the claim; a driver's list may lack requests."""
    claims: Any = {source: [listed_prepared("c", use("gpu-0"), use("gpu-1"), pods=["p"])]}
    consumers = build_consumer_map(
        source_answers(
            **claims,
            pods_api=[
                known_pod(
                    "p",
                    claims=(PodClaim("mine", "claim-c"),),
                    containers=(ContainerObject("main", (ContainerClaim("mine", "big"),)),),
                )
            ],
        )
    )
    assert affected_pods(consumers, device())[0].containers == (ContainerUse("main", is_certain),)


@pytest.mark.parametrize(
    ("name", "pods", "is_certain"),
    [
        ("pod-p-mine-x7k2b", ["p"], True),
        ("pod-p-mine-x7k2b", ["q"], False),
        ("pod-p-mine-too-x7k2b", ["p"], False),
        ("shared", ["p"], False),
    ],
)
def test_claim_from_a_template_is_known_by_its_generated_name(
    name: str, pods: list[str], is_certain: bool
) -> None:
    """The kubelet's Pod object lacks the name."""
    of_template = PodClaim("mine", "", template=True)
    container = ContainerObject("main", (ContainerClaim("mine", ""),))
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("c", use("gpu-0", "a"), use("gpu-1", "b"), name=name, pods=pods)],
            podresources=[listed_pod("pod-p", listed_claim(name, use("gpu-0"), use("gpu-1")))],
            pods_api=[known_pod("p", claims=(of_template,), containers=(container,), lacks_claim_names=True)],
        )
    )
    found = {pod.pod.ref.uid: pod.containers for pod in affected_pods(consumers, device())}
    assert found["p"] == (ContainerUse("main", is_certain=is_certain),)


LONG_POD = "training-of-a-language-model-with-many-nodes-worker-17"
"""Name of a pod with 54 characters."""


def users_in_long_pod(*prepared_names: str, claims: Sequence[str]) -> Mapping[str, tuple[ContainerUse, ...]]:
    """Return the containers that use gpu-0 of the first prepared claim; each has the name of its claim."""
    held = [
        listed_prepared(
            f"c{at}", use(f"gpu-{2 * at}", "a"), use(f"gpu-{2 * at + 1}", "b"), name=name, pods=["p"]
        )
        for at, name in enumerate(prepared_names)
    ]
    pod = known_pod(
        "p",
        name=LONG_POD,
        claims=tuple(PodClaim(claim, "", template=True) for claim in claims),
        containers=tuple(ContainerObject(claim, (ContainerClaim(claim, ""),)) for claim in claims),
        lacks_claim_names=True,
    )
    consumers = build_consumer_map(source_answers(checkpoint=held, pods_api=[pod]))
    return {user.pod.ref.uid: user.containers for user in affected_pods(consumers, device())}


@pytest.mark.parametrize(
    ("claim", "name"),
    [  # by the code of Kubernetes 1.34 to 1.37: pkg/controller/resourceclaim/controller.go
        ("g", f"{LONG_POD}-g-x7k2b"),
        ("gpu", "training-of-a-language-model-with-many-nodes-worker--gpx7k2b"),
        ("accelerators", "training-of-a-language-model-with-many-nodes--acceleratox7k2b"),
    ],
)
def test_shortened_generated_name_names_the_claim(claim: str, name: str) -> None:
    assert users_in_long_pod(name, claims=[claim]) == {"p": (ContainerUse(claim, is_certain=True),)}


def test_claims_with_equal_shortened_names_stay_unknown() -> None:
    begin = "training-of-a-language-model-with-many-nodes--accelerato"
    claims = ["accelerators", "acceleratorx"]
    assert users_in_long_pod(f"{begin}x7k2b", f"{begin}q4zzt", claims=claims) == {"p": ()}
    assert users_in_long_pod(f"{begin}x7k2b", claims=claims) == {"p": ()}


@pytest.mark.parametrize("unseen", ["waiting", "skipped"])
@pytest.mark.parametrize(
    ("requests", "containers"),
    [
        (("big",), (ContainerUse("worker", is_certain=True),)),
        ((), (ContainerUse("viewer", is_certain=True), ContainerUse("worker", is_certain=True))),
    ],
)
def test_only_device_that_is_seen_does_not_serve_other_requests(
    unseen: str, requests: tuple[str, ...], containers: tuple[ContainerUse, ...]
) -> None:
    more: Any = {unseen: ("nic.example.com",)}
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("c", use("gpu-0", *requests), pods=["p"], **more)],
            pods_api=[
                known_pod(
                    "p",
                    claims=(PodClaim("mine", "claim-c"),),
                    containers=(
                        ContainerObject("worker", (ContainerClaim("mine", "big"),)),
                        ContainerObject("viewer", (ContainerClaim("mine", "nic"),)),
                    ),
                )
            ],
        )
    )
    assert affected_pods(consumers, device())[0].containers == containers
    names = tuple(container.name for container in containers)
    assert [use.containers for use in current_uses(consumers).values()] == [names]


# --- running pods -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("live", "running"),
    [
        ([PodCgroup("p", True)], True),
        ([PodCgroup("p", False)], False),
        ([PodCgroup("p", None)], None),
        ([PodCgroup("q", True)], False),
        (None, None),
    ],
    ids=["runs", "empty", "unreadable", "no cgroup", "unknown"],
)
def test_running_state_of_a_pod_follows_from_its_cgroup(
    live: list[PodCgroup] | None, running: bool | None
) -> None:
    consumers = build_consumer_map(
        source_answers(checkpoint=[listed_prepared("c", use(), pods=["p"])], live=live)
    )
    assert consumers.pods[PodRef(uid="p")].running is running


def test_incomplete_cgroups_leave_the_running_state_unknown() -> None:
    consumers = build_consumer_map(
        SourceAnswers(
            prepared=source_answers(checkpoint=[listed_prepared("c", use(), pods=["p"])]).prepared,
            live=(answer(Origin.CGROUPS, (), invalid=("3 cgroups exceed the limit",)),),
        )
    )
    assert consumers.pods[PodRef(uid="p")].running is None


def test_running_state_of_a_pod_without_uid_is_unknown() -> None:
    consumers = build_consumer_map(
        source_answers(podresources=[listed_pod("p", listed_claim("c", use()))], live=[PodCgroup("x", True)])
    )
    assert consumers.pods[PodRef("team-a", "p")].running is None


def test_static_pod_and_its_mirror_are_one_pod() -> None:
    mirror = known_pod("0badcafe", name="etcd-node-1", mirror_uid="m")
    static = known_pod("0badcafe", name="etcd-node-1")
    live = [PodCgroup("0badcafe", True, (ContainerCgroup("id", True),))]
    consumers = build_consumer_map(source_answers(pods_api=[static], pods_file=[mirror], live=live))
    (view,) = pods_by_name(consumers, "team-a", "etcd-node-1")
    assert view.ref.uid == "0badcafe"
    assert view.running
    assert view.live == (ContainerCgroup("id", True),)
    assert [origin.origin for _, origin in view.objects] == [Origin.PODS_API, Origin.PODS_FILE]
    assert consumers.conflicts == ()


def test_reservation_for_a_mirror_pod_affects_the_static_pod() -> None:
    consumers = build_consumer_map(
        source_answers(
            pods_file=[known_pod("0badcafe", "claim-c", name="web", mirror_uid="m")],
            claims_file=[known_claim("c", use(), reserved=[pod_reservation("m", "web")])],
        )
    )
    assert [affected_pod.pod.ref for affected_pod in affected_pods(consumers, device())] == [
        PodRef("team-a", "web", "0badcafe")
    ]


# --- from pods to devices ----------------------------------------------------------------------------------


def test_pod_leads_to_its_claims_and_their_devices() -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("c-1", use("gpu-0"), use("gpu-1"), pods=["p"])],
            pods_api=[known_pod("p", "claim-c-1", "claim-none")],
        )
    )
    (pod,) = pods_by_name(consumers, "team-a", "pod-p")
    assert {claim: [edge.use.device for edge in consumers.claims[claim].devices] for claim in pod.claims} == {
        ref("c-1"): [device("gpu-0"), device("gpu-1")],
        ClaimRef("team-a", "claim-none", ""): [],  # unknown to all sources
    }
    (claim,) = claims_by_name(consumers, "team-a", "claim-c-1")
    assert {edge.relation for edge in claim.consumers} == {Relation.PREPARED, Relation.NAMED}


# --- conflicts ---------------------------------------------------------------------------------------------


def test_agreeing_sources_have_no_conflict() -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("c", use("gpu-0", "big"), use("gpu-1"), pods=["p"])],
            driver=[listed_prepared("c", use("gpu-1"), use("gpu-0"))],
            podresources=[listed_pod("pod-p", listed_claim("claim-c", use("gpu-1"), use("gpu-0")))],
            pods_api=[known_pod("p", "claim-c")],
            claims_file=[known_claim("c", use("gpu-0"), use("gpu-1"), reserved=[pod_reservation("p")])],
        )
    )
    assert consumers.conflicts == ()


def test_conflict_about_devices_names_each_source() -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("c", use("gpu-1"), pods=["p"])],
            claims_file=[known_claim("c", use("gpu-0"))],
        )
    )
    (conflict,) = consumers.conflicts
    assert (conflict.kind, conflict.subject) == (
        ConflictKind.DEVICES,
        f"claim team-a/claim-c, driver {DRIVER}",
    )
    assert [(assertion.provenance.origin, assertion.text) for assertion in conflict.assertions] == [
        (Origin.CHECKPOINT, "node-1/gpu-1"),
        (Origin.CLAIMS_FILE, "node-1/gpu-0"),
    ]
    assert affected_names(consumers, "gpu-0") == [("pod p", False)]
    assert affected_names(consumers, "gpu-1") == [("pod p", True)]


def test_driver_without_an_answer_on_a_claim_is_no_conflict() -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("c", use("nic-0", driver="nic.example.com"), waiting=(DRIVER,))],
            claims_file=[known_claim("c", use("gpu-0"), use("nic-0", driver="nic.example.com"))],
        )
    )
    assert consumers.conflicts == ()


def test_recreated_claim_is_two_claims_and_a_conflict() -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("old", use("gpu-0"), pods=["p"], name="gpus")],
            claims_file=[known_claim("new", use("gpu-1"), name="gpus")],
        )
    )
    assert [claim.ref.uid for claim in claims_by_name(consumers, "team-a", "gpus")] == ["new", "old"]
    assert conflict_kinds(consumers) == [ConflictKind.CLAIM_UIDS]
    assert [assertion.text for assertion in consumers.conflicts[0].assertions] == ["UID old", "UID new"]
    assert affected_names(consumers, "gpu-1") == []


def test_origin_is_complete_only_if_all_its_answers_are() -> None:
    complete = answer(Origin.DRIVER, [listed_prepared("c-1", use("gpu-0"))])
    failed = answer(Origin.DRIVER, (), absence=Absence.UNREADABLE, reason="Input/output error")
    assert build_consumer_map(SourceAnswers(prepared=(complete,))).complete == {Origin.DRIVER}
    assert build_consumer_map(SourceAnswers(prepared=(complete, failed))).complete == frozenset()


def test_ambiguous_claim_name_means_the_claim_the_kubelet_holds() -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("old", use("gpu-0"), pods=["p"], name="gpus")],
            podresources=[listed_pod("pod-p", listed_claim("gpus", use("gpu-0")))],
            claims_file=[known_claim("new", use("gpu-1"), name="gpus")],
        )
    )
    assert [edge.claim.uid for edge in consumers.claims[ref("old", "gpus")].containers] == ["old"]


def test_claim_of_deleted_pod_is_not_prepared_for_new_pod_of_its_name() -> None:
    """Case: a pod was deleted by force and created again with its claim. The kubelet holds the old claim, and
    podresources lists it for the new pod by name."""
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("old", use("gpu-0"), pods=["p-1"], name="gpus")],
            podresources=[listed_pod("web-0", listed_claim("gpus", use("gpu-0")))],
            pods_api=[known_pod("p-2", "gpus", name="web-0", phase="Pending")],
        )
    )
    assert affected_names(consumers) == [("pod p-1", True), ("team-a/web-0", False)]
    assert {use.pod.uid for use in current_uses(consumers).values()} == {"p-1"}


def test_listed_pod_of_two_namesakes_is_the_one_with_the_claim() -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("old", use("gpu-0"), pods=["p-1"], name="gpus")],
            podresources=[listed_pod("web-0", listed_claim("gpus", use("gpu-0")))],
            pods_api=[known_pod("p-1", "gpus", name="web-0"), known_pod("p-2", name="web-0")],
        )
    )
    assert [(pod.pod.ref.uid, pod.is_certain) for pod in affected_pods(consumers, device())] == [
        ("p-1", True)
    ]


def test_pending_pod_proves_no_use_without_a_checkpoint() -> None:
    listing = [listed_pod("web-0", listed_claim("gpus", use("gpu-0")))]
    for phase, is_certain in (("Pending", False), ("Running", True)):
        pods = [known_pod("p-2", "gpus", name="web-0", phase=phase)]
        consumers = build_consumer_map(source_answers(podresources=listing, pods_api=pods))
        assert affected_names(consumers) == [("team-a/web-0", is_certain)]


def test_pod_of_a_recreated_claim_has_the_devices_of_the_new_one() -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("old", use("gpu-0"), pods=["p-1"], name="gpus")],
            pods_api=[known_pod("p-2", "gpus", name="web-0", phase="Pending")],
            claims_file=[
                known_claim("new", use("gpu-1"), name="gpus", reserved=[pod_reservation("p-2", "web-0")])
            ],
        )
    )
    assert affected_names(consumers, "gpu-0") == [("pod p-1", True)]
    assert affected_names(consumers, "gpu-1") == [("team-a/web-0", False)]


@pytest.mark.parametrize("pods", [["p-1"], []])
def test_pending_pod_of_a_recreated_claim_is_refused_while_the_old_is_held(pods: list[str]) -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("old", use("gpu-0"), pods=pods, name="gpus")],
            pods_api=[known_pod("p-2", "gpus", name="web-0", phase="Pending")],
            claims_file=[
                known_claim("new", use("gpu-1"), name="gpus", reserved=[pod_reservation("p-2", "web-0")])
            ],
        )
    )
    (risk,) = (refused_pod for refused_pod in refused_pods(consumers) if refused_pod.is_pending)
    assert (risk.pod.uid, risk.claim.uid) == ("p-2", "new")
    assert risk.reason == "the kubelet still has an older claim of this name, with UID old"


def test_ambiguous_claim_name_without_a_checkpoint_stays_a_name() -> None:
    consumers = build_consumer_map(
        source_answers(
            podresources=[listed_pod("pod-p", listed_claim("gpus", use("gpu-0")))],
            claims_file=[known_claim("c-1", name="gpus"), known_claim("c-2", name="gpus")],
        )
    )
    assert consumers.devices == {device(): (ClaimRef("team-a", "gpus", ""),)}


def test_pod_name_with_two_uids_is_two_pods_and_a_conflict() -> None:
    consumers = build_consumer_map(
        source_answers(pods_api=[known_pod("p-2", name="web-0")], pods_file=[known_pod("p-1", name="web-0")])
    )
    assert conflict_kinds(consumers) == [ConflictKind.POD_UIDS]
    assert len(pods_by_name(consumers, "team-a", "web-0")) == 2


def test_uid_with_two_names_is_one_object_and_a_conflict() -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("c", use(), name="now")],
            claims_file=[known_claim("c", use(), name="then")],
            pods_api=[known_pod("p", name="now")],
            pods_file=[known_pod("p", name="then")],
        )
    )
    assert conflict_kinds(consumers) == [ConflictKind.CLAIM_NAMES, ConflictKind.POD_NAMES]
    assert set(consumers.claims) == {ref("c", "now")}
    assert set(consumers.pods) == {PodRef("team-a", "now", "p")}


def test_claim_prepared_for_a_pod_that_does_not_name_it_is_a_conflict() -> None:
    checkpoint = [listed_prepared("c", use(), pods=["p"])]
    consumers = build_consumer_map(
        source_answers(checkpoint=checkpoint, pods_api=[known_pod("p", "claim-x")])
    )
    (conflict,) = consumers.conflicts
    assert conflict.kind is ConflictKind.NOT_NAMED
    assert [assertion.text for assertion in conflict.assertions] == [
        "prepared for the pod",
        "the pod names claim-x",
    ]
    assert affected_names(consumers) == [("team-a/pod-p", True)]  # the checkpoint's edge stays


# --- missing sources ----------------------------------------------------------------------------------------


def test_missing_sources_are_listed_with_their_reason() -> None:
    absent = SourceAnswer[PodObject](provenance(Origin.PODS_API), (), Absence.ABSENT, "no such socket")
    incomplete = answer(
        Origin.CLAIMS_FILE, [known_claim("c", use())], 2, invalid=("item 3: metadata: is no object",)
    )
    consumers = build_consumer_map(SourceAnswers(pods=(absent,), claims=(incomplete,)))
    assert consumers.missing_sources == (
        MissingSource(provenance(Origin.PODS_API), Absence.ABSENT, "no such socket"),
        MissingSource(
            provenance(Origin.CLAIMS_FILE, 2), Absence.UNREADABLE, "item 3: metadata: is no object"
        ),
    )
    assert consumers.devices == {device(): (ref("c"),)}


def test_no_answers_give_an_empty_map() -> None:
    assert build_consumer_map(SourceAnswers()) == ConsumerMap()


# --- after a reboot ----------------------------------------------------------------------------------------


def test_pod_without_its_reservation_would_be_refused() -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("c", use(), pods=["p", "q"])],
            pods_api=[known_pod("p", "claim-c"), known_pod("q", "claim-c")],
            claims_file=[known_claim("c", use(), reserved=[pod_reservation("q")])],
        )
    )
    (risk,) = refused_pods(consumers)
    assert (risk.pod, risk.claim, risk.kubelets) == (POD, ref("c"), KubeletsRefusingPod.ALL)


def test_group_member_would_be_refused_by_kubelets_without_groups() -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("c", use(), pods=["p"])],
            pods_api=[known_pod("p", "claim-c", group="workers")],
            claims_file=[known_claim("c", use(), reserved=[group_reservation("workers")])],
        )
    )
    assert [pod.kubelets for pod in refused_pods(consumers)] == [KubeletsRefusingPod.WITHOUT_GROUPS]


def test_pod_of_another_node_is_not_refused() -> None:
    consumers = build_consumer_map(
        source_answers(
            pods_file=[known_pod("p", "claim-c")], claims_file=[known_claim("c", use(), reserved=[])]
        )
    )
    assert refused_pods(consumers) == ()


def test_claim_without_an_object_has_no_refusals() -> None:
    consumers = build_consumer_map(source_answers(checkpoint=[listed_prepared("c", use(), pods=["p"])]))
    assert refused_pods(consumers) == ()


def test_pod_of_a_recreated_claim_would_be_refused() -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("old", use(), pods=["p"], name="gpus")],
            claims_file=[known_claim("new", use(), name="gpus", reserved=[pod_reservation("p")])],
        )
    )
    (risk,) = refused_pods(consumers)
    assert risk.reason == "the claim with this name now has UID new; the kubelet holds old"


def test_ended_pod_of_a_recreated_claim_is_not_refused() -> None:
    consumers = build_consumer_map(
        source_answers(
            checkpoint=[listed_prepared("old", use(), pods=["p"], name="gpus")],
            pods_api=[known_pod("p", "gpus", phase="Succeeded")],
            claims_file=[known_claim("new", use(), name="gpus")],
        )
    )
    assert refused_pods(consumers) == ()
