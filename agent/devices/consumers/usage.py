"""Tracking of usages of devices: which usages began, changed or ended since the last update.

A usage is one device used by one pod through one claim. A usage ends when the complete answers of all its
sources no longer list it, when its pod has ended, or when a new claim has the same name as the claim of the
usage.

The module also has the devices that pods on this Kubernetes node certainly use now, from the consumer map.

A pod uses a device if the device is prepared for the pod on this node, or the kubelet lists it for the pod. A
reservation alone does not count.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol

from agent.devices.consumers.consumer_queries import USE_ON_THIS_NODE, containers_using_device, has_device
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import Origin, PodRef
from agent.model.consumers import ClaimConsumerEdge, ClaimView, ConsumerMap, DeviceEdge
from agent.model.device_usage import DeviceState, PodDeviceUsage, StoredUsages, UsageEnd, UsageEndKind
from agent.model.settings import TRACKED_USAGES_MAX
from agent.model.time import NS, Instant

CONTAINERS_MAX: Final = 16
"""Largest number of containers that are listed for one pod's use of a device."""
MAYBE_MAX: Final = 4
"""Largest number of possible pod names that are listed for one use of a device."""

USE_SOURCE_RANKS: Final[Mapping[Origin, int]] = {
    Origin.CHECKPOINT: 0,
    Origin.PODRESOURCES: 1,
    Origin.DRIVER: 2,
    Origin.CLAIMS_FILE: 3,
}
"""Rank of each source as proof that a pod uses a device on this node; 0 is the strongest proof."""

UsageKey = tuple[str, str, DeviceRef]
"""Identity of one pod's use of a device: (pod, claim, device).

Pod and claim are UIDs; if the UID is unknown, they are ``<namespace>/<name>``.
"""


class CurrentUse(NamedTuple):
    """One pod's current use of one device.

    The fields are those of :class:`agent.model.device_usage.PodDeviceUsage`.
    """

    pod: PodRef
    claim: ClaimRef
    device: DeviceRef
    sources: tuple[Origin, ...]
    requests: tuple[str, ...]
    containers: tuple[str, ...]
    owner: str
    maybe: tuple[str, ...]
    may_be_duplicate: bool
    """True: the pod has no UID, and may be the same as another pod of the claim, which has a UID."""


class HasUsageIdentity(Protocol):
    """Record with the fields that identify a pod's use of a device: the pod, the claim and the device."""

    @property
    def pod(self) -> PodRef: ...
    @property
    def claim(self) -> ClaimRef: ...
    @property
    def device(self) -> DeviceRef: ...


def usage_key(use: HasUsageIdentity) -> UsageKey:
    """Return the identity of one pod's use of a device, with UIDs where they are known."""
    return (use.pod.uid or str(use.pod), use.claim.uid or str(use.claim), use.device)


def usage_keys_with_names(use: HasUsageIdentity) -> Iterator[UsageKey]:
    """Yield the identities of a device's use in which names replace the UID of the pod, the claim or both."""
    pods = [use.pod.uid, str(use.pod)] if use.pod.uid and use.pod.name else [use.pod.uid or str(use.pod)]
    claims = [use.claim.uid, str(use.claim)] if use.claim.uid else [str(use.claim)]
    keys = [(pod, claim, use.device) for pod in pods for claim in claims]
    yield from keys[1:]


def current_uses(known: ConsumerMap) -> Mapping[UsageKey, CurrentUse]:
    """Return all current uses of devices by pods, by the identity of the use."""
    return {usage_key(use): use for claim in known.claims.values() for use in _uses_of_claim(known, claim)}


def _uses_of_claim(known: ConsumerMap, claim: ClaimView) -> Iterator[CurrentUse]:
    by_device: dict[DeviceRef, list[DeviceEdge]] = {}
    for device_edge in claim.devices:
        by_device.setdefault(device_edge.use.device, []).append(device_edge)
    given = {device: edges for device, edges in by_device.items() if has_device(claim, device, edges)}
    by_pod: dict[PodRef, list[ClaimConsumerEdge]] = {}
    for edge in claim.consumers:
        if edge.consumer.pod and edge.relation in USE_ON_THIS_NODE:
            by_pod.setdefault(edge.consumer.pod, []).append(edge)
    names = tuple(str(pod) for pod in by_pod if not pod.uid)
    for pod, of_pod in by_pod.items():
        doubtful = not pod.uid and len(names) < len(by_pod)
        obj = known.pods[pod].known
        owner = str(obj.controller or "") if obj else ""
        named = [container for container in claim.containers if container.pod == pod]
        proof = _strongest_origin(of_pod)
        for device, of_device in given.items():
            requests = {request for usage in of_device for request in usage.use.requests}
            containers = containers_using_device(claim, named, of_device)
            yield CurrentUse(
                pod=pod,
                claim=claim.ref,
                device=device,
                sources=tuple(sorted({proof, _strongest_origin(of_device)})),
                requests=tuple(sorted(requests)),
                containers=tuple(container.name for container in containers)[:CONTAINERS_MAX],
                owner=owner,
                maybe=() if pod.name else names[:MAYBE_MAX],
                may_be_duplicate=doubtful,
            )


def _strongest_origin(edges: list[ClaimConsumerEdge] | list[DeviceEdge]) -> Origin:
    return min((edge.provenance.origin for edge in edges), key=USE_SOURCE_RANKS.__getitem__)


# --- usage over time ---------------------------------------------------------------------------------------


class ActiveUsage(NamedTuple):
    """Tracked usage of a device by a pod, with the time at which a source last listed it.

    The usage has not ended.
    """

    use: PodDeviceUsage
    seen: Instant | None
    """Time at which a source last listed the usage; None: not since the agent started."""


@dataclass(frozen=True, slots=True)
class UsageState:
    """Usages of devices that are tracked, kept from one update to the next."""

    agent_run_id: str
    """Unique id of this run of the agent, which begins the ids of its usages."""
    begun_count: int = 0
    """Number of usages of devices that began in this run of the agent."""
    running: Mapping[UsageKey, ActiveUsage] = field(default_factory=dict)
    """Usages that have not ended, by (pod, claim, device)."""
    ended: frozenset[UsageKey] = frozenset()
    """Ended usages that a source still lists; they do not begin again."""
    complete: frozenset[Origin] = frozenset()
    """Sources whose last answer was complete: a usage that they list for the first time began since then."""
    last_written_s: float = 0.0
    """Time of the last write by the previous run of the agent [s since 1970]."""
    dropped: int = 0
    """Number of usages beyond :data:`agent.model.settings.TRACKED_USAGES_MAX`, which are not tracked."""


class UsageUpdate(NamedTuple):
    """Result of one update of the tracked usages of devices."""

    usages: UsageState
    changed: tuple[PodDeviceUsage, ...]
    """Usages of devices that began, changed or ended in the update."""
    merged: tuple[str, ...]
    """Ids of usages that the update merged into another usage."""


def update_usages(
    state: UsageState, known: ConsumerMap, state_of: Callable[[DeviceRef], DeviceState], now: Instant
) -> UsageUpdate:
    """Update the tracked usages of devices from the current consumer map: new usages begin, others continue
    or end.

    Args:
        state_of: Function that returns the current state of a device.
    """
    observed = _observe(known, state_of, now, state.last_written_s)
    running, merged = _match_usages(state.running, observed.in_use_now)
    over = {
        key for key in state.ended if key in observed.in_use_now or Origin.CHECKPOINT not in observed.complete
    }
    names, without_name = _keys_by_name(running, observed.in_use_now), _claims_without_pod_name(running)
    after = {
        key: _next_usage(previous, observed.in_use_now.get(key), observed)
        for key, previous in running.items()
    }
    begun = dropped = 0
    for key, current in observed.in_use_now.items():
        if key in running or key in over or key in names or current.may_be_duplicate:
            continue
        if not current.pod.uid and (str(current.claim), current.device) in without_name:
            continue
        if len(after) >= TRACKED_USAGES_MAX:
            dropped += 1
            continue
        begun += 1
        id_ = f"{state.agent_run_id}-{state.begun_count + begun}"
        after[key] = _next_usage(_new_usage(id_, current, observed, state.complete), current, observed)
    before = {usage.use.id: usage.use for usage in state.running.values()}
    ended = {key for key, use in after.items() if use.use.ended}
    return UsageUpdate(
        replace(
            state,
            begun_count=state.begun_count + begun,
            running={key: use for key, use in after.items() if key not in ended},
            ended=frozenset(over | (ended & observed.in_use_now.keys())),
            complete=observed.complete,
            dropped=dropped,
        ),
        tuple(usage.use for usage in after.values() if usage.use != before.get(usage.use.id)),
        merged,
    )


def resume_usages(state: UsageState, stored: StoredUsages) -> UsageState:
    """Add the usages of devices that an earlier run of the agent stored.

    A usage that both runs have is merged into one.
    """
    running = {usage_key(use): ActiveUsage(use, None) for use in stored.running}
    for key, mine in state.running.items():
        theirs = running.get(key)
        running[key] = ActiveUsage(merge_usages(theirs.use, mine.use), mine.seen) if theirs else mine
    return replace(
        state,
        running=running,
        ended=state.ended | set(map(usage_key, stored.ended)),
        last_written_s=stored.last_written_s,
    )


class _UpdateInputs(NamedTuple):
    """Inputs of one update of the tracked usages that are equal for all usages."""

    in_use_now: Mapping[UsageKey, CurrentUse]
    endings: Mapping[str, UsageEndKind]
    """End of each pod that has ended, failed or succeeded, by pod UID."""
    claims: Mapping[tuple[str, str], str]
    """UID of each claim in use, by (namespace, name)."""
    complete: frozenset[Origin]
    state_of: Callable[[DeviceRef], DeviceState]
    now: Instant
    left_s: float


def _observe(
    known: ConsumerMap, state_of: Callable[[DeviceRef], DeviceState], now: Instant, left_s: float
) -> _UpdateInputs:
    in_use_now = current_uses(known)
    endings = {
        ref.uid: UsageEndKind.FAILED if view.known.phase == "Failed" else UsageEndKind.SUCCEEDED
        for ref, view in known.pods.items()
        if ref.uid and view.known and view.known.has_ended
    }
    claims = {
        (use.claim.namespace, use.claim.name): use.claim.uid for use in in_use_now.values() if use.claim.uid
    }
    return _UpdateInputs(in_use_now, endings, claims, known.complete, state_of, now, left_s)


def _new_usage(
    id_: str, current: CurrentUse, observed: _UpdateInputs, complete_before: frozenset[Origin]
) -> ActiveUsage:
    state = observed.state_of(current.device)
    use = PodDeviceUsage(
        id=id_,
        pod=current.pod,
        claim=current.claim,
        device=current.device,
        began=observed.now,
        before=not complete_before.issuperset(current.sources),
        state=state,
        worst=state,
        sources=current.sources,
        requests=current.requests,
        containers=current.containers,
        owner=current.owner,
        maybe=current.maybe,
    )
    return ActiveUsage(use, observed.now)


def _next_usage(previous: ActiveUsage, current: CurrentUse | None, observed: _UpdateInputs) -> ActiveUsage:
    """Return the state of a tracked usage after an update.

    Args:
        current: The usage as sources list it now; None: no source lists it.
    """
    use = _with_current_use(previous.use, current) if current else previous.use
    seen = observed.now if current else previous.seen
    ending = observed.endings.get(use.pod.uid) or (
        None if current else _ending_without_report(previous, observed)
    )
    if ending is None or seen is not None:  # else it ended before this run of the agent, in an unknown state
        state = observed.state_of(use.device)
        use = replace(use, state=state, worst=_worse(use.worst, state)) if state != use.state else use
    if ending is not None:
        use = replace(use, ended=_usage_end(ending, use, seen, observed))
    return ActiveUsage(use, seen)


def _with_current_use(use: PodDeviceUsage, current: CurrentUse) -> PodDeviceUsage:
    """Update a tracked usage of a device from the answers of sources now.

    Values that sources no longer report stay.
    """
    pod = current.pod if current.pod.name or not use.pod.name else use.pod
    return replace(
        use,
        pod=pod,
        claim=current.claim,
        sources=min(use.sources, current.sources, key=_weakest_source_rank),
        requests=current.requests or use.requests,
        containers=tuple(dict.fromkeys((*use.containers, *current.containers)))[:CONTAINERS_MAX],
        owner=current.owner or use.owner,
        maybe=() if pod.name else current.maybe or use.maybe,
    )


def _weakest_source_rank(sources: tuple[Origin, ...]) -> int:
    return max(map(USE_SOURCE_RANKS.__getitem__, sources))


def _worse(first: DeviceState, later: DeviceState) -> DeviceState:
    return later if later.severity > first.severity else first


def _ending_without_report(previous: ActiveUsage, observed: _UpdateInputs) -> UsageEndKind | None:
    """Return how a tracked usage of a device that sources no longer list has ended.

    None: the usage may continue.
    """
    claim = previous.use.claim
    uid = observed.claims.get((claim.namespace, claim.name), claim.uid)
    if claim.uid and uid != claim.uid:
        return UsageEndKind.REPLACED
    if not observed.complete.issuperset(previous.use.sources):
        return None
    return UsageEndKind.RELEASED if previous.seen else UsageEndKind.AWAY


def _usage_end(
    ending: UsageEndKind, use: PodDeviceUsage, seen: Instant | None, observed: _UpdateInputs
) -> UsageEnd:
    now = observed.now
    if seen is None:
        return UsageEnd(ending, observed.left_s, now.wall_s, max(0.0, observed.left_s - use.began.wall_s))
    if use.resumed:
        return UsageEnd(ending, seen.wall_s, now.wall_s, max(0.0, now.wall_s - use.began.wall_s))
    return UsageEnd(ending, seen.wall_s, now.wall_s, (now.mono_ns - use.began.mono_ns) / NS)


def _match_usages(
    running: Mapping[UsageKey, ActiveUsage], in_use_now: Mapping[UsageKey, CurrentUse]
) -> tuple[dict[UsageKey, ActiveUsage], tuple[str, ...]]:
    """Match the tracked usages of devices with those that sources list now.

    A tracked usage can lack the UID of its pod or claim, which the listed one has.

    Returns the tracked usages by their new identity, and the ids of usages that were merged into another one.
    """
    found, merged = dict(running), []
    for key, use in in_use_now.items():
        for lesser in usage_keys_with_names(use):
            if lesser in in_use_now or lesser not in found:
                continue
            theirs, mine = found.pop(lesser), found.get(key)
            found[key] = ActiveUsage(merge_usages(theirs.use, mine.use), mine.seen) if mine else theirs
            if mine:
                merged.append(mine.use.id)
    return found, tuple(merged)


def merge_usages(first: PodDeviceUsage, later: PodDeviceUsage) -> PodDeviceUsage:
    """Return the usage `later` with the id and the begin of the record `first` of the same usage."""
    ended = later.ended
    if ended and first.id != later.id:
        ended = ended._replace(lasted_s=max(0.0, ended.noticed_s - first.began.wall_s))
    return replace(
        later,
        id=first.id,
        began=first.began,
        before=first.before,
        resumed=first.resumed,
        worst=_worse(first.worst, later.worst),
        sources=min(first.sources, later.sources, key=_weakest_source_rank),
        ended=ended,
    )


def _keys_by_name(
    running: Mapping[UsageKey, ActiveUsage], in_use_now: Mapping[UsageKey, CurrentUse]
) -> frozenset[UsageKey]:
    """Return the identities of all tracked usages with names instead of UIDs.

    A source without UIDs lists a usage under such an identity.
    """
    if all(use.pod.uid and use.claim.uid for use in in_use_now.values()):
        return frozenset()
    return frozenset(lesser for usage in running.values() for lesser in usage_keys_with_names(usage.use))


def _claims_without_pod_name(running: Mapping[UsageKey, ActiveUsage]) -> frozenset[tuple[str, DeviceRef]]:
    """Return (claim name, device) of usages whose pod is known by UID only.

    A pod that a source lists by name alone can be one of these pods.
    """
    state = (usage.use for usage in running.values())
    return frozenset((str(use.claim), use.device) for use in state if use.pod.uid and not use.pod.name)
