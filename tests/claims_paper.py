"""What sources say of claims, on paper: tests write it down and ask the map."""

from collections.abc import Iterable
from typing import Any, TypeVar

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import (
    ConsumerKind,
    Container,
    ContainerClaim,
    DeviceUse,
    KnownClaim,
    KnownPod,
    ListedClaim,
    ListedContainer,
    ListedPod,
    LivePod,
    Origin,
    PodClaim,
    PodRef,
    PreparedClaim,
    Provenance,
    Reservation,
    SourceAnswer,
    SourceAnswers,
)
from agent.model.time import NS, Instant

T = TypeVar("T")

DRIVER = "gpu.example.com"
NAMESPACE = "team-a"


def at(second: int) -> Instant:
    """A moment."""
    return Instant(second * NS, 1_700_000_000.0 + second)


def witness(origin: Origin, second: int = 1, written_s: float | None = None) -> Provenance:
    """Somebody who was asked at that second."""
    return Provenance(origin, at(second), written_s)


def told(origin: Origin, items: Iterable[T], second: int = 1, **more: Any) -> SourceAnswer[T]:
    """All that one says."""
    return SourceAnswer(witness(origin, second), tuple(items), **more)


def device(name: str = "gpu-0", *, driver: str = DRIVER) -> DeviceRef:
    """Of the node's pool."""
    return DeviceRef(driver, "node-1", name)


def use(name: str = "gpu-0", *requests: str, driver: str = DRIVER) -> DeviceUse:
    """A device of a claim, for those requests of it."""
    return DeviceUse(device(name, driver=driver), requests)


def ref(uid: str, name: str = "") -> ClaimRef:
    """A claim; named after its UID unless it is said otherwise."""
    return ClaimRef(NAMESPACE, name or f"claim-{uid}", uid)


def prepared(
    uid: str, *uses: DeviceUse, pods: Iterable[str] = (), name: str = "", **more: Any
) -> PreparedClaim:
    """A claim in the checkpoint, or of a driver."""
    return PreparedClaim(ref(uid, name), uses, tuple(pods), **more)


def listed(pod: str, *claims: ListedClaim, container: str = "main") -> ListedPod:
    """A pod in podresources with one container."""
    return ListedPod(NAMESPACE, pod, (ListedContainer(container, claims),))


def listed_claim(name: str, *uses: DeviceUse) -> ListedClaim:
    """A claim in podresources."""
    return ListedClaim(NAMESPACE, name, uses)


def known_pod(uid: str, *claims: str, name: str = "", **more: Any) -> KnownPod:
    """A pod object whose only container uses these claims, each as a whole."""
    of = tuple(PodClaim(f"its-{claim}", claim) for claim in claims)
    container = Container("main", tuple(ContainerClaim(one.name) for one in of), f"id-{uid}")
    default: dict[str, Any] = {"phase": "Running", "claims": of, "containers": (container,)}
    return KnownPod(PodRef(NAMESPACE, name or f"pod-{uid}", uid), **{**default, **more})


def known_claim(
    uid: str, *uses: DeviceUse, reserved: Iterable[Reservation] = (), name: str = "", **more: Any
) -> KnownClaim:
    """A claim object that is allocated."""
    return KnownClaim(ref(uid, name), True, uses, tuple(reserved), **more)


def for_pod(uid: str, name: str = "") -> Reservation:
    """A reservation for a pod."""
    return Reservation(ConsumerKind.POD, "", "pods", name or f"pod-{uid}", uid)


def for_group(name: str, uid: str = "g") -> Reservation:
    """A reservation for a pod group."""
    return Reservation(ConsumerKind.POD_GROUP, "scheduling.k8s.io", "podgroups", name, uid)


def for_job(name: str, uid: str = "j") -> Reservation:
    """A reservation for what nobody here knows."""
    return Reservation(ConsumerKind.OTHER, "batch", "jobs", name, uid)


def heard(
    *,
    checkpoint: Iterable[PreparedClaim] = (),
    driver: Iterable[PreparedClaim] = (),
    podresources: Iterable[ListedPod] = (),
    pods_api: Iterable[KnownPod] = (),
    pods_file: Iterable[KnownPod] = (),
    claims_file: Iterable[KnownClaim] = (),
    live: Iterable[LivePod] | None = None,
) -> SourceAnswers:
    """What was heard, each at a second of its own; of a source with nothing to say nothing."""
    checkpoints = [told(Origin.CHECKPOINT, checkpoint, 1)] if checkpoint else []
    drivers = [told(Origin.DRIVER, driver, 2)] if driver else []
    return SourceAnswers(
        prepared=(*checkpoints, *drivers),
        listed=(told(Origin.PODRESOURCES, podresources, 3),) if podresources else (),
        pods=tuple(
            told(origin, pods, second)
            for origin, pods, second in ((Origin.PODS_API, pods_api, 4), (Origin.PODS_FILE, pods_file, 5))
            if pods
        ),
        claims=(told(Origin.CLAIMS_FILE, claims_file, 6),) if claims_file else (),
        live=(told(Origin.CGROUPS, live, 7),) if live is not None else (),
    )
