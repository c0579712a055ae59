"""Answers of claim sources, written by hand, for tests of the consumer map."""

from collections.abc import Iterable
from typing import Any, TypeVar

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import (
    AllocatedDevice,
    ClaimObject,
    ConsumerKind,
    ContainerClaim,
    ContainerObject,
    Origin,
    PodCgroup,
    PodClaim,
    PodObject,
    PodRef,
    PodResourcesClaim,
    PodResourcesContainer,
    PodResourcesPod,
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
    """Return the instant of a second."""
    return Instant(second * NS, 1_700_000_000.0 + second)


def provenance(origin: Origin, second: int = 1, written_s: float | None = None) -> Provenance:
    """Return the provenance of an answer that was read at that second."""
    return Provenance(origin, at(second), written_s)


def answer(origin: Origin, items: Iterable[T], second: int = 1, **more: Any) -> SourceAnswer[T]:
    """Return a source's answer."""
    return SourceAnswer(provenance(origin, second), tuple(items), **more)


def device(name: str = "gpu-0", *, driver: str = DRIVER) -> DeviceRef:
    """Return a device of the pool node-1."""
    return DeviceRef(driver, "node-1", name)


def use(name: str = "gpu-0", *requests: str, driver: str = DRIVER) -> AllocatedDevice:
    """Return a device of a claim, allocated for the given requests."""
    return AllocatedDevice(device(name, driver=driver), requests)


def ref(uid: str, name: str = "") -> ClaimRef:
    """Return a claim reference; the default name is made from the UID."""
    return ClaimRef(NAMESPACE, name or f"claim-{uid}", uid)


def listed_prepared(
    uid: str, *uses: AllocatedDevice, pods: Iterable[str] = (), name: str = "", **more: Any
) -> PreparedClaim:
    """Return a claim as the checkpoint or a driver lists it."""
    return PreparedClaim(ref(uid, name), uses, tuple(pods), **more)


def listed_pod(pod: str, *claims: PodResourcesClaim, container: str = "main") -> PodResourcesPod:
    """Return a pod with one container, as podresources lists it."""
    return PodResourcesPod(NAMESPACE, pod, (PodResourcesContainer(container, claims),))


def listed_claim(name: str, *uses: AllocatedDevice) -> PodResourcesClaim:
    """Return a claim as podresources lists it."""
    return PodResourcesClaim(NAMESPACE, name, uses)


def known_pod(uid: str, *claims: str, name: str = "", **more: Any) -> PodObject:
    """Return a pod object whose only container uses all requests of the claims."""
    named = tuple(PodClaim(f"its-{claim}", claim) for claim in claims)
    container = ContainerObject("main", tuple(ContainerClaim(claim.name) for claim in named), f"id-{uid}")
    default: dict[str, Any] = {"phase": "Running", "claims": named, "containers": (container,)}
    return PodObject(PodRef(NAMESPACE, name or f"pod-{uid}", uid), **{**default, **more})


def known_claim(
    uid: str, *uses: AllocatedDevice, reserved: Iterable[Reservation] = (), name: str = "", **more: Any
) -> ClaimObject:
    """Return an allocated claim object."""
    return ClaimObject(ref(uid, name), True, uses, tuple(reserved), **more)


def pod_reservation(uid: str, name: str = "") -> Reservation:
    """Return a reservation for a pod."""
    return Reservation(ConsumerKind.POD, "", "pods", name or f"pod-{uid}", uid)


def group_reservation(name: str, uid: str = "g") -> Reservation:
    """Return a reservation for a pod group."""
    return Reservation(ConsumerKind.POD_GROUP, "scheduling.k8s.io", "podgroups", name, uid)


def job_reservation(name: str, uid: str = "j") -> Reservation:
    """Return a reservation for a kind of object that the agent does not know."""
    return Reservation(ConsumerKind.OTHER, "batch", "jobs", name, uid)


def source_answers(
    *,
    checkpoint: Iterable[PreparedClaim] = (),
    driver: Iterable[PreparedClaim] = (),
    podresources: Iterable[PodResourcesPod] = (),
    pods_api: Iterable[PodObject] = (),
    pods_file: Iterable[PodObject] = (),
    claims_file: Iterable[ClaimObject] = (),
    live: Iterable[PodCgroup] | None = None,
) -> SourceAnswers:
    """Return the answers of the sources that have items, each read at another second."""
    checkpoints = [answer(Origin.CHECKPOINT, checkpoint, 1)] if checkpoint else []
    drivers = [answer(Origin.DRIVER, driver, 2)] if driver else []
    return SourceAnswers(
        prepared=(*checkpoints, *drivers),
        listed=(answer(Origin.PODRESOURCES, podresources, 3),) if podresources else (),
        pods=tuple(
            answer(origin, pods, second)
            for origin, pods, second in ((Origin.PODS_API, pods_api, 4), (Origin.PODS_FILE, pods_file, 5))
            if pods
        ),
        claims=(answer(Origin.CLAIMS_FILE, claims_file, 6),) if claims_file else (),
        live=(answer(Origin.CGROUPS, live, 7),) if live is not None else (),
    )
