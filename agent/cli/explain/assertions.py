"""What was said of single devices, claims and pods, to be found by what they are. Pure.

Sorted once for a whole answer: of thousands of devices and pods nobody should look through all for each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TypeVar

from agent.cli.explain.words import AGENT, ClaimFacts, DeviceFacts, Gathered, PodFacts, Verdict
from agent.devices.consumers.driver_names import mirrored
from agent.devices.consumers.reservations import standing, unmatched
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import Origin, PodRef
from agent.model.consumers import ConsumerMap, PodView
from agent.model.health import Note

K = TypeVar("K")
V = TypeVar("V")


class Said:
    """All of it."""

    def __init__(self, told: Gathered, known: ConsumerMap) -> None:
        """
        Args:
            told: By everybody.
            known: What follows of who uses what.
        """
        self._known = known
        self._by_agent = _by_agent(told)
        self._by_driver = {
            DeviceRef(driver, one.pool, one.device): Verdict(one, stream.socket)
            for driver, stream in told.streams.items()
            for one in stream.report.devices
        }
        self._beliefs = {one.device: one for one in reversed(told.beliefs)}
        self._taints = told.taints
        self._broken = _gathered((one.device, one) for one in told.broken)
        self._records = _gathered((one.outcome.claim.uid, one) for one in told.records)
        notes = told.report.notes if told.report else ()
        self._notes_of_devices = _gathered((name, note) for note in notes for name in note.devices)
        self._notes_of_pods = _gathered((pod_of(note), note) for note in notes)
        saved = [one.items for one in told.heard.pods if one.witness.origin is Origin.PODS_FILE]
        self._standing = standing(chain.from_iterable(saved)) if saved else None
        uses = [(claim, view.ref) for view in known.pods.values() for claim in view.claims]
        self._without_names = _gathered(use for use in uses if not use[1].name)
        self._without_uids = _gathered(use for use in uses if not use[1].uid)

    def of_device(self, ref: DeviceRef) -> DeviceFacts:
        """What was said of a device."""
        told = self._by_driver.get(ref)
        tainted = self._taints.get(ref.driver)
        return DeviceFacts(
            ref,
            verdict=self._by_agent.get(ref) or told,
            told=told,
            belief=self._beliefs.get(ref),
            taints=None if tainted is None else tainted.get(ref, ()),
            broken=self._broken.get(ref, ()),
            notes=self._notes_of_devices.get(str(ref), ()),
        )

    def of_claim(self, ref: ClaimRef) -> ClaimFacts:
        """What was said of a claim."""
        view = self._known.claims[ref]
        # the kubelet has the pods of its own node, so of those that it does not have nothing follows
        orphans = unmatched(view.objects[0][0], self._standing) if view.objects and self._standing else None
        return ClaimFacts(view, self._records.get(ref.uid, ()), orphans)

    def of_pod(self, ref: PodRef) -> PodFacts:
        """What was said of a pod."""
        view = self._known.pods[ref]
        notes = self._notes_of_pods.get(ref.uid, ()) if ref.uid else ()
        return PodFacts(view, maybe=self._maybe(view), notes=notes)

    def _maybe(self, pod: PodView) -> tuple[PodRef, ...]:
        """Pods that have a claim of this one's, and of which just that is known that of this one is not."""
        if pod.ref.name and pod.ref.uid:
            return ()
        others = self._without_names if pod.ref.name else self._without_uids
        found = [others.get(claim, ()) for claim in pod.claims]
        return found[0] if len(found) == 1 else tuple(dict.fromkeys(chain.from_iterable(found)))


def mirrors(told: Gathered) -> dict[DeviceRef, DeviceRef]:
    """Devices of drivers that are the host's own by another name, each with that."""
    if told.report is None:
        return {}
    known = {DeviceRef(*one.key) for one in told.report.devices}
    declaring = {ref.driver for ref in known}
    served = {driver for driver, stream in told.streams.items() if stream.of_agent}
    found = {ref: mirrored(ref, known=known, declaring=declaring, served=served) for ref in streamed(told)}
    return {ref: host for ref, host in found.items() if host}


def streamed(told: Gathered) -> Iterator[DeviceRef]:
    """The devices of which drivers' sockets tell."""
    for driver, stream in told.streams.items():
        yield from (DeviceRef(driver, one.pool, one.device) for one in stream.report.devices)


# --- notes -------------------------------------------------------------------------------------------------


def pod_of(note: Note) -> str:
    """UID of the pod that a note is about; empty: it is about none."""
    what, _, rest = note.subject.partition(" ")
    return rest.partition(" ")[0] if what == "pod" else ""


def container_of(note: Note, pod: PodView) -> str:
    """The container that a note about a pod is about: its name, or its id; empty: it is about the pod."""
    ident = note.subject.partition(" container ")[2]
    names = {one.id: one.name for obj, _ in pod.objects for one in obj.containers}
    return names.get(ident, ident)


# --- sorted ------------------------------------------------------------------------------------------------


def _by_agent(told: Gathered) -> Mapping[DeviceRef, Verdict]:
    """What the agent says; of the host's devices also under the names that drivers have for them."""
    own = {DeviceRef(*one.key): Verdict(one, AGENT) for one in told.report.devices} if told.report else {}
    return own | {ref: own[host] for ref, host in mirrors(told).items()}


def _gathered(pairs: Iterable[tuple[K, V]]) -> Mapping[K, tuple[V, ...]]:
    found: dict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return {key: tuple(values) for key, values in found.items()}
