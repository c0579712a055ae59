"""The map against any words: no edge invented, none lost, and the order in which they came does not matter.

What the map should hold is worked out here once more, by pairs and without it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from claims_paper import (
    NAMESPACE,
    at,
    for_group,
    for_job,
    for_pod,
    known_claim,
    known_pod,
    listed,
    listed_claim,
    prepared,
    use,
)
from hypothesis import given
from hypothesis import strategies as st

from agent.devices.consumers.affected import affected, refusals
from agent.devices.consumers.consumer_map import consumer_map
from agent.model.claim import ClaimRef
from agent.model.claim_sources import (
    ConsumerKind,
    LivePod,
    Origin,
    PodRef,
    Provenance,
    SourceAnswer,
    SourceAnswers,
)
from agent.model.consumers import ConsumerEdge, ConsumerMap, ContainerEdge, DeviceEdge, Relation

T = TypeVar("T")

# few of each, so that they meet; names and UIDs apart, so that they clash
UIDS = st.sampled_from(["c-1", "c-2", "c-3"])
CLAIMS = st.sampled_from(["gpus", "nics"])
PODS = st.sampled_from(["p-1", "p-2", "p-3"])
NAMES = st.sampled_from(["web-0", "web-1"])
GROUPS = st.sampled_from(["workers", "others"])
USES = st.lists(
    st.builds(use, st.sampled_from(["gpu-0", "gpu-1"]), st.sampled_from(["big", "small"])), max_size=3
)
RESERVED = st.lists(
    st.one_of(
        st.builds(for_pod, PODS, NAMES),
        st.builds(for_group, GROUPS, PODS),  # a group with a pod's UID, too
        st.builds(for_job, NAMES, PODS),
    ),
    max_size=4,
)


@st.composite
def tells(draw: st.DrawFn, origins: Sequence[Origin], item: Any) -> tuple[SourceAnswer[Any], ...]:
    """Some sources of one kind."""
    return tuple(
        SourceAnswer(
            Provenance(draw(st.sampled_from(origins)), at(second), draw(st.sampled_from([None, 3.0]))),
            tuple(draw(st.lists(item, max_size=4))),
        )
        for second in range(draw(st.integers(0, 2)))
    )


PREPARED = st.builds(
    lambda uid, name, uses, pods: prepared(uid, *uses, name=name, pods=pods),
    UIDS,
    CLAIMS,
    USES,
    st.lists(PODS),
)
LISTED = st.builds(
    lambda pod, claims: listed(pod, *claims),
    NAMES,
    st.lists(st.builds(lambda name, uses: listed_claim(name, *uses), CLAIMS, USES), max_size=2),
)
KNOWN_POD = st.builds(
    lambda uid, name, claims, group: known_pod(uid, *claims, name=name, group=group),
    PODS,
    NAMES,
    st.lists(CLAIMS, unique=True),
    st.sampled_from(["", "workers"]),
)
KNOWN_CLAIM = st.builds(
    lambda uid, name, uses, reserved: known_claim(uid, *uses, name=name, reserved=reserved),
    UIDS,
    CLAIMS,
    USES,
    RESERVED,
)
HEARD = st.builds(
    SourceAnswers,
    prepared=tells([Origin.CHECKPOINT, Origin.DRIVER], PREPARED),
    listed=tells([Origin.PODRESOURCES], LISTED),
    pods=tells([Origin.PODS_API, Origin.PODS_FILE], KNOWN_POD),
    claims=tells([Origin.CLAIMS_FILE], KNOWN_CLAIM),
    live=tells([Origin.CGROUPS], st.builds(LivePod, PODS, st.sampled_from([True, False, None]))),
)

Saying = tuple[object, ...]


def said(heard: SourceAnswers) -> tuple[set[Saying], set[Saying], set[Saying]]:
    """What was said: claims and devices, claims and consumers, claims and containers. Each claim by what it
    was called by: a UID if there was one."""
    devices: set[Saying] = set()
    consumers: set[Saying] = set()
    containers: set[Saying] = set()
    for told in heard.prepared:
        for claim in told.items:
            devices |= {(claim.ref.uid, one, told.witness) for one in claim.devices}
            consumers |= {(claim.ref.uid, "pod", uid, told.witness) for uid in claim.pods}
    for told in heard.claims:
        for claim in told.items:
            devices |= {(claim.ref.uid, one, told.witness) for one in claim.devices}
            consumers |= {(claim.ref.uid, one.kind, one.uid, told.witness) for one in claim.reserved}
    for told in heard.listed:
        for pod in told.items:
            for container in pod.containers:
                for one in container.claims:
                    devices |= {(one.name, each, told.witness) for each in one.devices}
                    consumers.add((one.name, "pod", pod.name, told.witness))
                    containers.add((one.name, pod.name, container.name, None, told.witness))
    for told in heard.pods:
        for pod in told.items:
            consumers |= {(one.claim, "pod", pod.ref.uid, told.witness) for one in pod.claims}
            containers |= {(one.claim, pod.ref.uid, "main", (), told.witness) for one in pod.claims}
    return devices, consumers, containers


def shown(known: ConsumerMap) -> tuple[set[Saying], set[Saying], set[Saying]]:
    """The same of a map; what was said by name is put back to names."""
    devices: set[Saying] = set()
    consumers: set[Saying] = set()
    containers: set[Saying] = set()
    for claim in known.claims.values():
        for edge in claim.devices:
            devices.add((_called(edge), edge.use, edge.witness))
        for edge in claim.consumers:
            who = edge.consumer.name if edge.relation is Relation.LISTED else edge.consumer.uid
            consumers.add((_called(edge), edge.consumer.kind, who, edge.witness))
        for edge in claim.containers:
            pod = edge.pod.name if edge.requests is None else edge.pod.uid
            containers.add((_called(edge), pod, edge.container, edge.requests, edge.witness))
    return devices, consumers, containers


def _called(edge: DeviceEdge | ConsumerEdge | ContainerEdge) -> str:
    return edge.claim.name if edge.by_name else edge.claim.uid


@given(HEARD)
def test_no_edge_is_invented_and_none_is_lost(heard: SourceAnswers) -> None:
    assert shown(consumer_map(heard)) == said(heard)


@given(HEARD)
def test_a_name_becomes_a_uid_only_where_somebody_said_that_they_belong_together(
    heard: SourceAnswers,
) -> None:
    claims = {one.ref for told in (*heard.prepared, *heard.claims) for one in told.items}
    pods = {one.ref for told in heard.pods for one in told.items}
    pods |= {
        PodRef(NAMESPACE, one.name, one.uid)
        for told in heard.claims
        for claim in told.items
        for one in claim.reserved
        if one.kind is ConsumerKind.POD
    }
    known = consumer_map(heard)
    assert all(ref in claims or not ref.uid for ref in known.claims)
    assert all(ref in pods or not (ref.uid and ref.name) for ref in known.pods)


@given(HEARD, st.randoms(use_true_random=False))
def test_the_order_of_what_was_said_does_not_matter(heard: SourceAnswers, dice: Any) -> None:
    def mixed(items: Sequence[T]) -> tuple[T, ...]:
        return tuple(dice.sample(items, len(items)))

    other = SourceAnswers(
        *(
            mixed([replace(told, items=mixed(told.items)) for told in kind])
            for kind in (heard.prepared, heard.listed, heard.pods, heard.claims, heard.live)
        )
    )
    one, another = consumer_map(heard), consumer_map(other)
    assert one == another
    assert [*one.claims] == [*another.claims]
    assert [*one.pods] == [*another.pods]
    assert refusals(one) == refusals(another)


@given(HEARD)
def test_said_twice_is_said_once(heard: SourceAnswers) -> None:
    twice = SourceAnswers(
        heard.prepared * 2, heard.listed * 2, heard.pods * 2, heard.claims * 2, heard.live * 2
    )
    assert consumer_map(twice) == consumer_map(heard)


@given(HEARD)
def test_whom_a_device_surely_hurts_somebody_here_has_prepared_it_for(heard: SourceAnswers) -> None:
    known = consumer_map(heard)
    uids = {uid for told in heard.prepared for claim in told.items for uid in claim.pods}
    names = {pod.name for told in heard.listed for pod in told.items}
    for device in known.devices:
        for one in affected(known, device):
            assert not one.sure or one.pod.ref.uid in uids or one.pod.ref.name in names
            assert one.claim in known.devices[device]


@given(HEARD)
def test_the_map_leads_from_everywhere_to_everywhere(heard: SourceAnswers) -> None:
    known = consumer_map(heard)
    for claim in known.claims.values():
        for edge in claim.devices:
            assert claim.ref in known.devices[edge.use.device]
        for consumer in claim.consumers:
            if consumer.consumer.pod:
                assert claim.ref in known.pods[consumer.consumer.pod].claims
    for pod in known.pods.values():
        assert all(ref in known.claims for ref in pod.claims)
    grouped = {(group, ref) for group, refs in known.groups.items() for ref in refs}
    assert grouped == {
        ((one.ref.namespace, one.group), ref)
        for ref, pod in known.pods.items()
        for one, _ in pod.objects
        if one.group
    }
    for conflict in known.conflicts:
        assert known.claims.keys() & conflict.claims or known.pods.keys() & conflict.pods


def test_five_thousand_pods_and_ten_thousand_claims_make_a_map() -> None:
    pods = [known_pod(f"p-{n}", f"claim-c-{2 * n}", f"claim-c-{2 * n + 1}") for n in range(5000)]
    claims = [prepared(f"c-{n}", use(f"gpu-{n}"), pods=[f"p-{n // 2}"]) for n in range(10_000)]
    listing = [
        listed(f"pod-p-{n}", listed_claim(f"claim-c-{2 * n}", use(f"gpu-{2 * n}"))) for n in range(5000)
    ]
    known = consumer_map(
        SourceAnswers(
            prepared=(SourceAnswer(Provenance(Origin.CHECKPOINT, at(1)), tuple(claims)),),
            listed=(SourceAnswer(Provenance(Origin.PODRESOURCES, at(2)), tuple(listing)),),
            pods=(SourceAnswer(Provenance(Origin.PODS_API, at(3)), tuple(pods)),),
        )
    )
    assert (len(known.claims), len(known.pods), len(known.devices)) == (10_000, 5000, 10_000)
    assert known.conflicts == ()
    (one,) = affected(known, use("gpu-9998").device)
    assert (one.pod.ref.uid, one.claim) == ("p-4999", ClaimRef(NAMESPACE, "claim-c-9998", "c-9998"))
    assert refusals(known) == ()
