"""Who uses what, from all that sources say: nothing invented, nothing lost, nothing decided between them."""

import pytest
from claims_paper import (
    DRIVER,
    device,
    for_group,
    for_job,
    for_pod,
    heard,
    known_claim,
    known_pod,
    listed,
    listed_claim,
    prepared,
    ref,
    told,
    use,
    witness,
)

from agent.devices.consumers.affected import (
    affected,
    claims_named,
    members,
    pods_named,
    refusals,
)
from agent.devices.consumers.consumer_map import consumer_map
from agent.devices.consumers.reservations import Kubelets
from agent.model.claim import ClaimRef
from agent.model.claim_sources import (
    ConsumerKind,
    Container,
    ContainerClaim,
    KnownPod,
    LiveContainer,
    LivePod,
    Origin,
    PodClaim,
    PodRef,
    SourceAnswer,
    SourceAnswers,
)
from agent.model.consumers import ConflictKind, ConsumerMap, ContainerUse, MissingSource, Relation
from agent.model.reading import Absence

POD = PodRef("team-a", "pod-p", "p")


def names(known: ConsumerMap, gpu: str = "gpu-0") -> list[tuple[str, bool]]:
    """Whom a sick device hurts, and whether that is sure."""
    return [(str(one.pod.ref), one.sure) for one in affected(known, device(gpu))]


def kinds(known: ConsumerMap) -> list[ConflictKind]:
    return [one.kind for one in known.conflicts]


# --- from a device to its pods -----------------------------------------------------------------------------


def test_the_whole_way_from_a_device_to_the_owner_of_a_pod() -> None:
    known = consumer_map(
        heard(
            checkpoint=[prepared("c", use("gpu-0", "gpus"), pods=["p"])],
            pods_api=[known_pod("p", "claim-c")],
        )
    )
    (one,) = affected(known, device())
    assert one.pod.ref == POD
    assert one.claim == ref("c")
    assert one.sure
    assert one.containers == (ContainerUse("main", sure=True),)
    assert {edge.witness.origin for edge in one.edges} == {Origin.CHECKPOINT, Origin.PODS_API}
    assert one.pod.known == known_pod("p", "claim-c")


def test_the_checkpoint_alone_tells_uids_and_no_names() -> None:
    known = consumer_map(heard(checkpoint=[prepared("c", use(), pods=["p-1", "p-2"])]))
    assert names(known) == [("pod p-1", True), ("pod p-2", True)]
    assert [one.containers for one in affected(known, device())] == [(), ()]


def test_podresources_alone_tells_names_and_no_uids() -> None:
    known = consumer_map(heard(podresources=[listed("train-0", listed_claim("gpus", use()))]))
    (one,) = affected(known, device())
    assert (one.pod.ref, one.claim) == (PodRef("team-a", "train-0"), ClaimRef("team-a", "gpus", ""))
    assert one.sure
    assert all(edge.by_name for edge in one.edges)


def test_without_a_pod_object_name_and_uid_are_not_taken_for_one_pod() -> None:
    known = consumer_map(
        heard(
            checkpoint=[prepared("c", use(), pods=["p"])],
            podresources=[listed("pod-p", listed_claim("claim-c", use()))],
        )
    )
    assert names(known) == [("pod p", True), ("team-a/pod-p", True)]
    assert set(known.claims) == {ref("c")}  # the claim is the checkpoint's, by its name


def test_a_reservation_tells_which_uid_a_name_has() -> None:
    known = consumer_map(
        heard(
            checkpoint=[prepared("c", use(), pods=["p"])],
            podresources=[listed("pod-p", listed_claim("claim-c", use()))],
            claims_file=[known_claim("c", use(), reserved=[for_pod("p")])],
        )
    )
    assert names(known) == [("team-a/pod-p", True)]


def test_a_device_that_nobody_has_hurts_nobody() -> None:
    known = consumer_map(heard(checkpoint=[prepared("c", use("gpu-1"), pods=["p"])]))
    assert affected(known, device("gpu-0")) == ()


def test_a_pod_of_several_claims_is_told_once_for_each() -> None:
    claims = [prepared("c-1", use(), pods=["p"]), prepared("c-2", use(), pods=["p"])]
    known = consumer_map(heard(checkpoint=claims))
    assert [one.claim.uid for one in affected(known, device())] == ["c-1", "c-2"]


# --- what is sure, and what may be -------------------------------------------------------------------------


def test_a_reservation_alone_is_no_use_on_this_node() -> None:
    known = consumer_map(heard(claims_file=[known_claim("c", use(), reserved=[for_pod("p")])]))
    assert names(known) == [("team-a/pod-p", False)]


def test_a_pod_that_names_a_claim_may_wait_for_it() -> None:
    known = consumer_map(
        heard(
            checkpoint=[prepared("c", use(), pods=["p"])],
            pods_api=[known_pod("p", "claim-c"), known_pod("q", "claim-c", phase="Pending")],
        )
    )
    assert names(known) == [("team-a/pod-p", True), ("team-a/pod-q", False)]


def test_before_its_driver_has_answered_a_claim_has_its_devices_on_paper() -> None:
    known = consumer_map(
        heard(
            checkpoint=[prepared("c", pods=["p"], waiting=(DRIVER,))],
            claims_file=[known_claim("c", use(), reserved=[for_pod("p")])],
        )
    )
    assert names(known) == [("team-a/pod-p", False)]
    assert known.claims[ref("c")].waiting == (DRIVER,)


def test_a_driver_that_is_not_asked_gives_its_devices_all_the_same() -> None:
    known = consumer_map(
        heard(
            checkpoint=[prepared("c", pods=["p"], skipped=(DRIVER,))],
            claims_file=[known_claim("c", use())],
        )
    )
    assert names(known) == [("pod p", True)]


def test_a_driver_knows_its_claim_and_nobody_who_uses_it() -> None:
    known = consumer_map(heard(driver=[prepared("c", use())]))
    assert known.devices == {device(): (ref("c"),)}
    assert names(known) == []


# --- pod groups and others ---------------------------------------------------------------------------------


def test_members_of_a_group_may_be_hurt_and_those_that_are_prepared_surely_are() -> None:
    known = consumer_map(
        heard(
            checkpoint=[prepared("c", use(), pods=["p"])],
            pods_file=[
                known_pod("p", "claim-c", group="workers"),
                known_pod("q", "claim-c", group="workers", node="node-2"),
                known_pod("r", group="workers"),  # names no claim
                known_pod("s", group="others"),
            ],
            claims_file=[known_claim("c", use(), reserved=[for_group("workers")])],
        )
    )
    assert names(known) == [("team-a/pod-p", True), ("team-a/pod-q", False)]
    assert [pod.ref.uid for pod in members(known, ref("c"), "workers")] == ["p", "q"]


def test_a_member_whose_claims_have_no_names_yet_may_have_it() -> None:
    template = (PodClaim("gpus", "", template=True),)
    known = consumer_map(
        heard(
            pods_api=[known_pod("p", group="workers", claims=template)],
            claims_file=[known_claim("c", use(), reserved=[for_group("workers")])],
        )
    )
    (one,) = affected(known, device())
    assert (one.pod.ref.uid, one.sure, one.group) == ("p", False, "workers")


def test_a_groups_uid_is_never_a_pods() -> None:
    known = consumer_map(
        heard(
            pods_api=[known_pod("g", "claim-x")],
            claims_file=[known_claim("c", use(), reserved=[for_group("workers", "g"), for_job("j", "g")])],
        )
    )
    consumers = {edge.consumer for edge in known.claims[ref("c")].consumers}
    assert {(one.kind, one.resource) for one in consumers} == {
        (ConsumerKind.POD_GROUP, "podgroups.scheduling.k8s.io"),
        (ConsumerKind.OTHER, "jobs.batch"),
    }
    assert all(one.pod is None for one in consumers)
    assert names(known) == []


def test_three_hundred_reservations_are_three_hundred_edges() -> None:
    reserved = [for_pod(f"p-{number}") for number in range(300)] + [for_group("workers"), for_job("train")]
    known = consumer_map(heard(claims_file=[known_claim("c", use(), reserved=reserved)]))
    assert len(known.claims[ref("c")].consumers) == 302
    assert len(affected(known, device())) == 300


# --- containers --------------------------------------------------------------------------------------------


def pod_of(*containers: tuple[str, str]) -> SourceAnswers:
    """A claim of two requests, and a pod whose containers name those."""
    return heard(
        checkpoint=[prepared("c", use("gpu-0", "big"), use("gpu-1", "small"), pods=["p"])],
        pods_api=[
            known_pod(
                "p",
                claims=(PodClaim("mine", "claim-c"),),
                containers=tuple(
                    Container(name, (ContainerClaim("mine", request),)) for name, request in containers
                ),
            )
        ],
        podresources=[listed("pod-p", listed_claim("claim-c", use("gpu-0"), use("gpu-1")), container="one")],
    )


def test_containers_use_the_devices_of_their_requests_though_podresources_lists_all() -> None:
    known = consumer_map(pod_of(("one", "big"), ("two", "small/model-x"), ("three", "")))
    (big,) = affected(known, device("gpu-0"))
    (small,) = affected(known, device("gpu-1"))
    assert big.containers == (ContainerUse("one", sure=True), ContainerUse("three", sure=True))
    assert small.containers == (ContainerUse("three", sure=True), ContainerUse("two", sure=True))


def test_of_podresources_alone_a_container_may_use_any_device_of_its_claim() -> None:
    listing = [listed("p", listed_claim("c", use("gpu-0"), use("gpu-1")))]
    (one,) = affected(consumer_map(heard(podresources=listing)), device())
    assert one.containers == (ContainerUse("main", sure=False),)


def test_a_claim_of_one_device_leaves_no_choice() -> None:
    known = consumer_map(heard(podresources=[listed("p", listed_claim("c", use()))]))
    assert affected(known, device())[0].containers == (ContainerUse("main", sure=True),)


def test_a_device_whose_request_nobody_knows_is_for_any() -> None:
    known = consumer_map(
        heard(
            checkpoint=[prepared("c", use("gpu-0"), use("gpu-1"), pods=["p"])],
            pods_api=[
                known_pod(
                    "p",
                    claims=(PodClaim("mine", "claim-c"),),
                    containers=(Container("main", (ContainerClaim("mine", "big"),)),),
                )
            ],
        )
    )
    assert affected(known, device())[0].containers == (ContainerUse("main", sure=True),)


# --- who is there ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("live", "running"),
    [
        ([LivePod("p", True)], True),
        ([LivePod("p", False)], False),
        ([LivePod("p", None)], None),
        ([LivePod("q", True)], False),
        (None, None),
    ],
    ids=["runs", "empty", "unreadable", "no cgroup", "nobody says"],
)
def test_cgroups_say_whether_a_pod_runs(live: list[LivePod] | None, running: bool | None) -> None:
    known = consumer_map(heard(checkpoint=[prepared("c", use(), pods=["p"])], live=live))
    assert known.pods[PodRef(uid="p")].running is running


def test_of_cgroups_that_were_not_all_seen_nobody_is_gone() -> None:
    known = consumer_map(
        SourceAnswers(
            prepared=heard(checkpoint=[prepared("c", use(), pods=["p"])]).prepared,
            live=(told(Origin.CGROUPS, (), wrong=("3 cgroups find no room",)),),
        )
    )
    assert known.pods[PodRef(uid="p")].running is None


def test_a_pod_without_a_uid_is_not_taken_for_gone() -> None:
    known = consumer_map(
        heard(podresources=[listed("p", listed_claim("c", use()))], live=[LivePod("x", True)])
    )
    assert known.pods[PodRef("team-a", "p")].running is None


def test_a_static_pod_is_the_one_of_its_configuration_and_not_its_mirror() -> None:
    mirror = known_pod("0badcafe", name="etcd-node-1", mirror_uid="m")
    static = known_pod("0badcafe", name="etcd-node-1")
    live = [LivePod("0badcafe", True, (LiveContainer("id", True),))]
    known = consumer_map(heard(pods_api=[static], pods_file=[mirror], live=live))
    (view,) = pods_named(known, "team-a", "etcd-node-1")
    assert view.ref.uid == "0badcafe"
    assert view.running
    assert view.live == (LiveContainer("id", True),)
    assert [origin.origin for _, origin in view.objects] == [Origin.PODS_API, Origin.PODS_FILE]
    assert known.conflicts == ()


def test_a_mirrors_uid_leads_to_the_static_pod() -> None:
    known = consumer_map(
        heard(
            pods_file=[known_pod("0badcafe", "claim-c", name="web", mirror_uid="m")],
            claims_file=[known_claim("c", use(), reserved=[for_pod("m", "web")])],
        )
    )
    assert [one.pod.ref for one in affected(known, device())] == [PodRef("team-a", "web", "0badcafe")]


# --- the reverse questions ---------------------------------------------------------------------------------


def test_a_pod_leads_to_its_claims_and_these_to_their_devices() -> None:
    known = consumer_map(
        heard(
            checkpoint=[prepared("c-1", use("gpu-0"), use("gpu-1"), pods=["p"])],
            pods_api=[known_pod("p", "claim-c-1", "claim-none")],
        )
    )
    (pod,) = pods_named(known, "team-a", "pod-p")
    assert {one: [edge.use.device for edge in known.claims[one].devices] for one in pod.claims} == {
        ref("c-1"): [device("gpu-0"), device("gpu-1")],
        ClaimRef("team-a", "claim-none", ""): [],  # nobody knows it
    }
    (claim,) = claims_named(known, "team-a", "claim-c-1")
    assert {edge.relation for edge in claim.consumers} == {Relation.PREPARED, Relation.NAMED}


# --- conflicts ---------------------------------------------------------------------------------------------


def test_sources_that_agree_are_no_conflict() -> None:
    known = consumer_map(
        heard(
            checkpoint=[prepared("c", use("gpu-0", "big"), use("gpu-1"), pods=["p"])],
            driver=[prepared("c", use("gpu-1"), use("gpu-0"))],
            podresources=[listed("pod-p", listed_claim("claim-c", use("gpu-1"), use("gpu-0")))],
            pods_api=[known_pod("p", "claim-c")],
            claims_file=[known_claim("c", use("gpu-0"), use("gpu-1"), reserved=[for_pod("p")])],
        )
    )
    assert known.conflicts == ()


def test_other_devices_than_the_scheduler_gave_are_shown_with_who_says_so() -> None:
    known = consumer_map(
        heard(
            checkpoint=[prepared("c", use("gpu-1"), pods=["p"])], claims_file=[known_claim("c", use("gpu-0"))]
        )
    )
    (conflict,) = known.conflicts
    assert (conflict.kind, conflict.subject) == (
        ConflictKind.DEVICES,
        f"claim team-a/claim-c, driver {DRIVER}",
    )
    assert [(one.witness.origin, one.text) for one in conflict.assertions] == [
        (Origin.CHECKPOINT, "node-1/gpu-1"),
        (Origin.CLAIMS_FILE, "node-1/gpu-0"),
    ]
    assert names(known, "gpu-0") == [("pod p", False)]
    assert names(known, "gpu-1") == [("pod p", True)]


def test_a_driver_that_says_nothing_of_a_claim_contradicts_nobody() -> None:
    known = consumer_map(
        heard(
            checkpoint=[prepared("c", use("nic-0", driver="nic.example.com"), waiting=(DRIVER,))],
            claims_file=[known_claim("c", use("gpu-0"), use("nic-0", driver="nic.example.com"))],
        )
    )
    assert known.conflicts == ()


def test_a_claim_that_was_made_anew_is_two_and_a_conflict() -> None:
    known = consumer_map(
        heard(
            checkpoint=[prepared("old", use("gpu-0"), pods=["p"], name="gpus")],
            claims_file=[known_claim("new", use("gpu-1"), name="gpus")],
        )
    )
    assert [claim.ref.uid for claim in claims_named(known, "team-a", "gpus")] == ["new", "old"]
    assert kinds(known) == [ConflictKind.CLAIM_UIDS]
    assert [one.text for one in known.conflicts[0].assertions] == ["UID old", "UID new"]
    assert names(known, "gpu-1") == []


def test_of_several_who_are_asked_alike_all_must_have_told_all() -> None:
    whole = told(Origin.DRIVER, [prepared("c-1", use("gpu-0"))])
    silent = told(Origin.DRIVER, (), absence=Absence.UNREADABLE, why="Input/output error")
    assert consumer_map(SourceAnswers(prepared=(whole,))).whole == {Origin.DRIVER}
    assert consumer_map(SourceAnswers(prepared=(whole, silent))).whole == frozenset()


def test_a_name_of_two_claims_means_the_one_that_the_kubelet_holds() -> None:
    known = consumer_map(
        heard(
            checkpoint=[prepared("old", use("gpu-0"), pods=["p"], name="gpus")],
            podresources=[listed("pod-p", listed_claim("gpus", use("gpu-0")))],
            claims_file=[known_claim("new", use("gpu-1"), name="gpus")],
        )
    )
    assert [edge.claim.uid for edge in known.claims[ref("old", "gpus")].containers] == ["old"]


def test_a_name_that_nobody_can_place_stays_a_name() -> None:
    known = consumer_map(
        heard(
            podresources=[listed("pod-p", listed_claim("gpus", use("gpu-0")))],
            claims_file=[known_claim("c-1", name="gpus"), known_claim("c-2", name="gpus")],
        )
    )
    assert known.devices == {device(): (ClaimRef("team-a", "gpus", ""),)}


def test_a_pod_of_two_uids_is_two_and_a_conflict() -> None:
    known = consumer_map(
        heard(pods_api=[known_pod("p-2", name="web-0")], pods_file=[known_pod("p-1", name="web-0")])
    )
    assert kinds(known) == [ConflictKind.POD_UIDS]
    assert len(pods_named(known, "team-a", "web-0")) == 2


def test_a_uid_of_two_names_is_one_and_a_conflict() -> None:
    known = consumer_map(
        heard(
            checkpoint=[prepared("c", use(), name="now")],
            claims_file=[known_claim("c", use(), name="then")],
            pods_api=[known_pod("p", name="now")],
            pods_file=[known_pod("p", name="then")],
        )
    )
    assert kinds(known) == [ConflictKind.CLAIM_NAMES, ConflictKind.POD_NAMES]
    assert set(known.claims) == {ref("c", "now")}
    assert set(known.pods) == {PodRef("team-a", "now", "p")}


def test_a_claim_that_was_prepared_for_a_pod_that_does_not_name_it_is_a_conflict() -> None:
    checkpoint = [prepared("c", use(), pods=["p"])]
    known = consumer_map(heard(checkpoint=checkpoint, pods_api=[known_pod("p", "claim-x")]))
    (conflict,) = known.conflicts
    assert conflict.kind is ConflictKind.NOT_NAMED
    assert [one.text for one in conflict.assertions] == ["prepared for the pod", "the pod names claim-x"]
    assert names(known) == [("team-a/pod-p", True)]  # and the checkpoint is not overruled


# --- what nobody could say ---------------------------------------------------------------------------------


def test_what_is_missing_is_said_with_its_reason() -> None:
    nothing = SourceAnswer[KnownPod](witness(Origin.PODS_API), (), Absence.ABSENT, "no such socket")
    half = told(Origin.CLAIMS_FILE, [known_claim("c", use())], 2, wrong=("item 3: metadata: is no object",))
    known = consumer_map(SourceAnswers(pods=(nothing,), claims=(half,)))
    assert known.gaps == (
        MissingSource(witness(Origin.PODS_API), Absence.ABSENT, "no such socket"),
        MissingSource(witness(Origin.CLAIMS_FILE, 2), Absence.UNREADABLE, "item 3: metadata: is no object"),
    )
    assert known.devices == {device(): (ref("c"),)}


def test_nothing_heard_is_nothing_known() -> None:
    assert consumer_map(SourceAnswers()) == ConsumerMap()


# --- after a reboot ----------------------------------------------------------------------------------------


def test_pods_whose_reservation_is_gone_are_a_risk() -> None:
    known = consumer_map(
        heard(
            checkpoint=[prepared("c", use(), pods=["p", "q"])],
            pods_api=[known_pod("p", "claim-c"), known_pod("q", "claim-c")],
            claims_file=[known_claim("c", use(), reserved=[for_pod("q")])],
        )
    )
    (risk,) = refusals(known)
    assert (risk.pod, risk.claim, risk.kubelets) == (POD, ref("c"), Kubelets.ALL)


def test_pods_of_a_group_are_a_risk_with_kubelets_that_know_none() -> None:
    known = consumer_map(
        heard(
            checkpoint=[prepared("c", use(), pods=["p"])],
            pods_api=[known_pod("p", "claim-c", group="workers")],
            claims_file=[known_claim("c", use(), reserved=[for_group("workers")])],
        )
    )
    assert [one.kubelets for one in refusals(known)] == [Kubelets.WITHOUT_GROUPS]


def test_a_pod_that_is_not_here_is_no_risk() -> None:
    known = consumer_map(
        heard(pods_file=[known_pod("p", "claim-c")], claims_file=[known_claim("c", use(), reserved=[])])
    )
    assert refusals(known) == ()


def test_without_the_claims_object_nobody_can_say() -> None:
    known = consumer_map(heard(checkpoint=[prepared("c", use(), pods=["p"])]))
    assert refusals(known) == ()


def test_a_claim_that_was_made_anew_would_be_refused_its_pod() -> None:
    known = consumer_map(
        heard(
            checkpoint=[prepared("old", use(), pods=["p"], name="gpus")],
            claims_file=[known_claim("new", use(), name="gpus", reserved=[for_pod("p")])],
        )
    )
    (risk,) = refusals(known)
    assert risk.why == "the claim of this name has UID new now; the kubelet holds old"


def test_a_pod_that_has_ended_is_refused_nothing_though_its_claim_was_made_anew() -> None:
    known = consumer_map(
        heard(
            checkpoint=[prepared("old", use(), pods=["p"], name="gpus")],
            pods_api=[known_pod("p", "gpus", phase="Succeeded")],
            claims_file=[known_claim("new", use(), name="gpus")],
        )
    )
    assert refusals(known) == ()
