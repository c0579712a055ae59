"""Properties of the consumer map for random answers of its sources.

facts_of_answers() computes the expected content of the map independently, as a set of tuples.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from claim_samples import (
    NAMESPACE,
    at,
    group_reservation,
    job_reservation,
    known_claim,
    known_pod,
    listed_claim,
    listed_pod,
    listed_prepared,
    pod_reservation,
    use,
)
from hypothesis import given
from hypothesis import strategies as st

from agent.devices.consumers.consumer_map import build_consumer_map
from agent.devices.consumers.consumer_queries import affected_pods, refused_pods
from agent.devices.consumers.usage import current_uses
from agent.model.claim import ClaimRef
from agent.model.claim_sources import (
    ConsumerKind,
    Origin,
    PodCgroup,
    PodRef,
    Provenance,
    SourceAnswer,
    SourceAnswers,
)
from agent.model.consumers import ClaimConsumerEdge, ConsumerMap, ContainerEdge, DeviceEdge

T = TypeVar("T")

# few values, so that objects collide; names and UIDs are independent, so that they conflict
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
        st.builds(pod_reservation, PODS, NAMES),
        st.builds(group_reservation, GROUPS, PODS),  # also groups with a pod's UID
        st.builds(job_reservation, NAMES, PODS),
    ),
    max_size=4,
)


@st.composite
def source_answers_of(draw: st.DrawFn, origins: Sequence[Origin], item: Any) -> tuple[SourceAnswer[Any], ...]:
    """Draw up to two answers of sources of one kind."""
    return tuple(
        SourceAnswer(
            Provenance(draw(st.sampled_from(origins)), at(second), draw(st.sampled_from([None, 3.0]))),
            tuple(draw(st.lists(item, max_size=4))),
        )
        for second in range(draw(st.integers(0, 2)))
    )


PREPARED = st.builds(
    lambda uid, name, uses, pods: listed_prepared(uid, *uses, name=name, pods=pods),
    UIDS,
    CLAIMS,
    USES,
    st.lists(PODS),
)
LISTED = st.builds(
    lambda pod, claims: listed_pod(pod, *claims),
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
ANSWERS = st.builds(
    SourceAnswers,
    prepared=source_answers_of([Origin.CHECKPOINT, Origin.DRIVER], PREPARED),
    listed=source_answers_of([Origin.PODRESOURCES], LISTED),
    pods=source_answers_of([Origin.PODS_API, Origin.PODS_FILE], KNOWN_POD),
    claims=source_answers_of([Origin.CLAIMS_FILE], KNOWN_CLAIM),
    live=source_answers_of(
        [Origin.CGROUPS], st.builds(PodCgroup, PODS, st.sampled_from([True, False, None]))
    ),
)

Fact = tuple[object, ...]


def facts_of_answers(answers: SourceAnswers) -> tuple[set[Fact], set[Fact], set[Fact]]:
    """Return the pairs of claims with devices, consumers and containers in the answers.

    A claim is its UID if the answer has one, otherwise its name."""
    devices: set[Fact] = set()
    consumers: set[Fact] = set()
    containers: set[Fact] = set()
    for answer in answers.prepared:
        for claim in answer.items:
            devices |= {(claim.ref.uid, device, answer.provenance) for device in claim.devices}
            consumers |= {(claim.ref.uid, "pod", uid, answer.provenance) for uid in claim.pods}
    for answer in answers.claims:
        for claim in answer.items:
            devices |= {(claim.ref.uid, device, answer.provenance) for device in claim.devices}
            consumers |= {(claim.ref.uid, user.kind, user.uid, answer.provenance) for user in claim.reserved}
    for answer in answers.listed:
        for pod in answer.items:
            for container in pod.containers:
                for entry in container.claims:
                    devices |= {(entry.name, each, answer.provenance) for each in entry.devices}
                    consumers.add((entry.name, "pod", pod.name, answer.provenance))
                    containers.add((entry.name, pod.name, container.name, None, answer.provenance))
    for answer in answers.pods:
        for pod in answer.items:
            consumers |= {(claim.claim, "pod", pod.ref.uid, answer.provenance) for claim in pod.claims}
            containers |= {(claim.claim, pod.ref.uid, "main", (), answer.provenance) for claim in pod.claims}
    return devices, consumers, containers


def facts_of_map(known: ConsumerMap) -> tuple[set[Fact], set[Fact], set[Fact]]:
    """Return the same pairs of a map; an edge that was matched by name has the name."""
    devices: set[Fact] = set()
    consumers: set[Fact] = set()
    containers: set[Fact] = set()
    for claim in known.claims.values():
        for edge in claim.devices:
            devices.add((_ref_text(edge), edge.use, edge.provenance))
        for edge in claim.consumers:
            is_listed = edge.provenance.origin is Origin.PODRESOURCES
            who = edge.consumer.name if is_listed else edge.consumer.uid
            consumers.add((_ref_text(edge), edge.consumer.kind, who, edge.provenance))
        for edge in claim.containers:
            pod = edge.pod.name if edge.requests is None else edge.pod.uid
            containers.add((_ref_text(edge), pod, edge.container, edge.requests, edge.provenance))
    return devices, consumers, containers


def _ref_text(edge: DeviceEdge | ClaimConsumerEdge | ContainerEdge) -> str:
    return edge.claim.name if edge.by_name else edge.claim.uid


@given(ANSWERS)
def test_map_has_exactly_the_edges_of_the_answers(answers: SourceAnswers) -> None:
    assert facts_of_map(build_consumer_map(answers)) == facts_of_answers(answers)


@given(ANSWERS)
def test_name_gets_a_uid_only_if_a_source_has_both(
    answers: SourceAnswers,
) -> None:
    claims = {item.ref for answer in (*answers.prepared, *answers.claims) for item in answer.items}
    pods = {item.ref for answer in answers.pods for item in answer.items}
    pods |= {
        PodRef(NAMESPACE, user.name, user.uid)
        for answer in answers.claims
        for claim in answer.items
        for user in claim.reserved
        if user.kind is ConsumerKind.POD
    }
    known = build_consumer_map(answers)
    assert all(ref in claims or not ref.uid for ref in known.claims)
    assert all(ref in pods or not (ref.uid and ref.name) for ref in known.pods)


@given(ANSWERS, st.randoms(use_true_random=False))
def test_order_of_answers_and_items_does_not_matter(answers: SourceAnswers, random: Any) -> None:
    def shuffle(items: Sequence[T]) -> tuple[T, ...]:
        return tuple(random.sample(items, len(items)))

    shuffled = SourceAnswers(
        *(
            shuffle([replace(answer, items=shuffle(answer.items)) for answer in kind])
            for kind in (answers.prepared, answers.listed, answers.pods, answers.claims, answers.live)
        )
    )
    known, other_map = build_consumer_map(answers), build_consumer_map(shuffled)
    assert known == other_map
    assert [*known.claims] == [*other_map.claims]
    assert [*known.pods] == [*other_map.pods]
    assert refused_pods(known) == refused_pods(other_map)


@given(ANSWERS)
def test_repeated_answers_give_the_same_map(answers: SourceAnswers) -> None:
    twice = SourceAnswers(
        answers.prepared * 2, answers.listed * 2, answers.pods * 2, answers.claims * 2, answers.live * 2
    )
    assert build_consumer_map(twice) == build_consumer_map(answers)


@given(ANSWERS)
def test_surely_affected_pod_has_a_prepared_or_listed_claim(answers: SourceAnswers) -> None:
    known = build_consumer_map(answers)
    uids = {uid for answer in answers.prepared for claim in answer.items for uid in claim.pods}
    names = {pod.name for answer in answers.listed for pod in answer.items}
    for device in known.devices:
        for pod in affected_pods(known, device):
            assert not pod.is_certain or pod.pod.ref.uid in uids or pod.pod.ref.name in names
            assert pod.claim in known.devices[device]


@given(ANSWERS)
def test_no_pod_uses_a_claim_that_the_kubelet_has_for_others(answers: SourceAnswers) -> None:
    checkpoints = [answer for answer in answers.prepared if answer.provenance.origin is Origin.CHECKPOINT]
    held = {claim.ref.uid for answer in checkpoints for claim in answer.items}
    used = {
        (claim.ref.uid, uid) for answer in answers.prepared for claim in answer.items for uid in claim.pods
    }
    for entry in current_uses(build_consumer_map(answers)).values():
        assert entry.claim.uid not in held or not entry.pod.uid or (entry.claim.uid, entry.pod.uid) in used


@given(ANSWERS)
def test_indexes_of_the_map_are_consistent(answers: SourceAnswers) -> None:
    known = build_consumer_map(answers)
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
        ((obj.ref.namespace, obj.group), ref)
        for ref, pod in known.pods.items()
        for obj, _ in pod.objects
        if obj.group
    }
    for conflict in known.conflicts:
        assert known.claims.keys() & conflict.claims or known.pods.keys() & conflict.pods


def test_map_of_5000_pods_and_10000_claims_is_complete() -> None:
    pods = [known_pod(f"p-{n}", f"claim-c-{2 * n}", f"claim-c-{2 * n + 1}") for n in range(5000)]
    claims = [listed_prepared(f"c-{n}", use(f"gpu-{n}"), pods=[f"p-{n // 2}"]) for n in range(10_000)]
    listing = [
        listed_pod(f"pod-p-{n}", listed_claim(f"claim-c-{2 * n}", use(f"gpu-{2 * n}"))) for n in range(5000)
    ]
    known = build_consumer_map(
        SourceAnswers(
            prepared=(SourceAnswer(Provenance(Origin.CHECKPOINT, at(1)), tuple(claims)),),
            listed=(SourceAnswer(Provenance(Origin.PODRESOURCES, at(2)), tuple(listing)),),
            pods=(SourceAnswer(Provenance(Origin.PODS_API, at(3)), tuple(pods)),),
        )
    )
    assert (len(known.claims), len(known.pods), len(known.devices)) == (10_000, 5000, 10_000)
    assert known.conflicts == ()
    (pod,) = affected_pods(known, use("gpu-9998").device)
    assert (pod.pod.ref.uid, pod.claim) == ("p-4999", ClaimRef(NAMESPACE, "claim-c-9998", "c-9998"))
    assert refused_pods(known) == ()
