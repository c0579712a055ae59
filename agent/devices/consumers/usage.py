"""From one look to the next: which uses of devices began, which changed, which ended.

A use ends when those who told of it say all that they have to say, and do not tell of it; when its pod has
ended; or when another claim has taken the place of its own. Where somebody could not be heard, nothing ends.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from agent.devices.consumers.in_use import CONTAINERS_MAX, RANKS, InUse, Key, in_use, key_of, lesser_keys
from agent.model.claim import DeviceRef
from agent.model.claim_sources import Origin
from agent.model.consumers import ConsumerMap
from agent.model.time import NS, Instant
from agent.model.use_limits import RUNNING_MAX
from agent.model.uses import DeviceState, DeviceUsage, Ending, Kept, UsageEnd


class ActiveUsage(NamedTuple):
    """A use that has not ended."""

    use: DeviceUsage
    seen: Instant | None
    """When somebody last told of it; None: nobody has since the agent is here."""


@dataclass(frozen=True, slots=True)
class Uses:
    """All that is in use, as of one look."""

    life: str
    """Of the agent: like no other's."""
    begun: int = 0
    """Uses that it saw begin."""
    running: Mapping[Key, ActiveUsage] = field(default_factory=dict)
    over: frozenset[Key] = frozenset()
    """Those that ended, though somebody told of them still: they do not begin again."""
    whole: frozenset[Origin] = frozenset()
    """Who said all that there was to say: what these tell anew has begun since."""
    left_s: float = 0.0
    """When the agent before this one last wrote [s since 1970]."""
    left_out: int = 0
    """Uses beyond :data:`agent.model.use_limits.RUNNING_MAX`, which nobody follows."""


class Step(NamedTuple):
    """What one look made of them."""

    uses: Uses
    changed: tuple[DeviceUsage, ...]
    """Those that began, changed or ended."""
    merged: tuple[str, ...]
    """Ids of those that turned out to be others."""


def follow(
    uses: Uses, known: ConsumerMap, state_of: Callable[[DeviceRef], DeviceState], now: Instant
) -> Step:
    """The uses as of now.

    Args:
        known: Who uses what, made of all sources; one that could not be heard is no part of ``known.whole``.
        state_of: How a device is, :func:`agent.devices.consumers.driver_names.states`.
    """
    look = _look(known, state_of, now, uses.left_s)
    running, merged = _recognized(uses.running, look.told)
    over = {key for key in uses.over if key in look.told or Origin.CHECKPOINT not in look.whole}
    names, nameless = _names_of(running, look.told), _nameless(running)
    after = {key: _next(was, look.told.get(key), look) for key, was in running.items()}
    begun = left_out = 0
    for key, one in look.told.items():
        if key in running or key in over or key in names or one.doubtful:
            continue
        if not one.pod.uid and (str(one.claim), one.device) in nameless:
            continue
        if len(after) >= RUNNING_MAX:
            left_out += 1
            continue
        begun += 1
        id_ = f"{uses.life}-{uses.begun + begun}"
        after[key] = _next(_begun(id_, one, look, uses.whole), one, look)
    was_known = {one.use.id: one.use for one in uses.running.values()}
    ended = {key for key, one in after.items() if one.use.ended}
    return Step(
        replace(
            uses,
            begun=uses.begun + begun,
            running={key: one for key, one in after.items() if key not in ended},
            over=frozenset(over | (ended & look.told.keys())),
            whole=look.whole,
            left_out=left_out,
        ),
        tuple(one.use for one in after.values() if one.use != was_known.get(one.use.id)),
        merged,
    )


def resume(uses: Uses, kept: Kept) -> Uses:
    """Goes on with what an earlier agent has left. What both have seen is one use."""
    running = {key_of(use): ActiveUsage(use, None) for use in kept.running}
    for key, mine in uses.running.items():
        theirs = running.get(key)
        running[key] = ActiveUsage(_joined(theirs.use, mine.use), mine.seen) if theirs else mine
    return replace(uses, running=running, over=uses.over | set(map(key_of, kept.over)), left_s=kept.left_s)


# --- one use -----------------------------------------------------------------------------------------------


class _Look(NamedTuple):
    """All that one look shows."""

    told: Mapping[Key, InUse]
    endings: Mapping[str, Ending]
    """Pods that have ended, by UID."""
    claims: Mapping[tuple[str, str], str]
    """UIDs of the claims that are in use, by namespace and name."""
    whole: frozenset[Origin]
    state_of: Callable[[DeviceRef], DeviceState]
    now: Instant
    left_s: float


def _look(
    known: ConsumerMap, state_of: Callable[[DeviceRef], DeviceState], now: Instant, left_s: float
) -> _Look:
    told = in_use(known)
    endings = {
        ref.uid: Ending.FAILED if view.known.phase == "Failed" else Ending.SUCCEEDED
        for ref, view in known.pods.items()
        if ref.uid and view.known and view.known.has_ended
    }
    claims = {(one.claim.namespace, one.claim.name): one.claim.uid for one in told.values() if one.claim.uid}
    return _Look(told, endings, claims, known.whole, state_of, now, left_s)


def _begun(id_: str, one: InUse, look: _Look, whole_before: frozenset[Origin]) -> ActiveUsage:
    state = look.state_of(one.device)
    use = DeviceUsage(
        id=id_,
        pod=one.pod,
        claim=one.claim,
        device=one.device,
        began=look.now,
        before=not whole_before.issuperset(one.told_by),
        state=state,
        worst=state,
        told_by=one.told_by,
        requests=one.requests,
        containers=one.containers,
        owner=one.owner,
        maybe=one.maybe,
    )
    return ActiveUsage(use, look.now)


def _next(was: ActiveUsage, one: InUse | None, look: _Look) -> ActiveUsage:
    """A use one look later.

    Args:
        one: What is told of it now; None: nothing.
    """
    use = _better_known(was.use, one) if one else was.use
    seen = look.now if one else was.seen
    ending = look.endings.get(use.pod.uid) or (None if one else _ending(was, look))
    if (
        ending is None or seen is not None
    ):  # else it ended while nobody looked, and in which state nobody knows
        use = _in_state(use, look.state_of(use.device))
    if ending is not None:
        use = replace(use, ended=_ended(ending, use, seen, look))
    return ActiveUsage(use, seen)


def _better_known(use: DeviceUsage, one: InUse) -> DeviceUsage:
    """With all that was told so far: what nobody tells any more was so all the same."""
    pod = one.pod if one.pod.name or not use.pod.name else use.pod
    return replace(
        use,
        pod=pod,
        claim=one.claim,
        told_by=min(use.told_by, one.told_by, key=_weakest),
        requests=one.requests or use.requests,
        containers=tuple(dict.fromkeys((*use.containers, *one.containers)))[:CONTAINERS_MAX],
        owner=one.owner or use.owner,
        maybe=() if pod.name else one.maybe or use.maybe,
    )


def _weakest(told_by: tuple[Origin, ...]) -> int:
    return max(map(RANKS.__getitem__, told_by))


def _in_state(use: DeviceUsage, state: DeviceState) -> DeviceUsage:
    return replace(use, state=state, worst=_worse(use.worst, state)) if state != use.state else use


def _worse(first: DeviceState, later: DeviceState) -> DeviceState:
    return later if later.severity > first.severity else first


def _ending(was: ActiveUsage, look: _Look) -> Ending | None:
    """How a use ended that nobody tells of; None: perhaps it did not."""
    claim = was.use.claim
    uid = look.claims.get((claim.namespace, claim.name), claim.uid)
    if claim.uid and uid != claim.uid:
        return Ending.REPLACED
    if not look.whole.issuperset(was.use.told_by):
        return None
    return Ending.RELEASED if was.seen else Ending.AWAY


def _ended(ending: Ending, use: DeviceUsage, seen: Instant | None, look: _Look) -> UsageEnd:
    now = look.now
    if seen is None:
        return UsageEnd(ending, look.left_s, now.wall_s, max(0.0, look.left_s - use.began.wall_s))
    if use.resumed:
        return UsageEnd(ending, seen.wall_s, now.wall_s, max(0.0, now.wall_s - use.began.wall_s))
    return UsageEnd(ending, seen.wall_s, now.wall_s, (now.mono_ns - use.began.mono_ns) / NS)


# --- which use is which ------------------------------------------------------------------------------------


def _recognized(
    running: Mapping[Key, ActiveUsage], told: Mapping[Key, InUse]
) -> tuple[dict[Key, ActiveUsage], tuple[str, ...]]:
    """The uses that go on, under a UID if that is known by now; and the ids of those that are another one."""
    found, merged = dict(running), []
    for key, one in told.items():
        for lesser in lesser_keys(one):
            if lesser in told or lesser not in found:
                continue
            theirs, mine = found.pop(lesser), found.get(key)
            found[key] = ActiveUsage(_joined(theirs.use, mine.use), mine.seen) if mine else theirs
            if mine:
                merged.append(mine.use.id)
    return found, tuple(merged)


def _joined(first: DeviceUsage, later: DeviceUsage) -> DeviceUsage:
    """Two that are one: as the first began, and as the later is."""
    return replace(
        later,
        id=first.id,
        began=first.began,
        before=first.before,
        resumed=first.resumed,
        worst=_worse(first.worst, later.worst),
        told_by=min(first.told_by, later.told_by, key=_weakest),
    )


def _names_of(running: Mapping[Key, ActiveUsage], told: Mapping[Key, InUse]) -> frozenset[Key]:
    """The names of uses of which more is known: where somebody tells names alone, these are no new uses."""
    if all(one.pod.uid and one.claim.uid for one in told.values()):
        return frozenset()
    return frozenset(lesser for one in running.values() for lesser in lesser_keys(one.use))


def _nameless(running: Mapping[Key, ActiveUsage]) -> frozenset[tuple[str, DeviceRef]]:
    """Claims, by name, and devices that pods use whose UIDs alone are known: a name that turns up once nobody
    tells UIDs may be one of theirs."""
    uses = (one.use for one in running.values())
    return frozenset((str(use.claim), use.device) for use in uses if use.pod.uid and not use.pod.name)
