"""Which taints a driver should publish of its devices, from what is said of their health. Pure.

A taint comes with its cause, which has been debounced by then, and leaves when the cause has been gone for a
quiet time: what flaps is published once. While nobody can look at a device nothing leaves it, but evictions
stop. How taints are published is agent.driver.taint_publisher's; that pods are evicted, Kubernetes'.

Sources: KEP-5055; the keys are those of NVIDIA's driver where it has one.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.devices.taint_keys import MORE, UNMONITORED, Spot, check_domain, spot_of
from agent.errors import ConfigError
from agent.model.claim import DeviceRef
from agent.model.health import Cause, DeviceHealth, Health, Severity
from agent.model.report import Report
from agent.model.taint import TAINTS_MAX, Effect, Taint, Taints
from agent.model.time import NS, Instant

UNKNOWN_NS: Final = 60 * NS
"""A restart of the agent makes every device Unknown for a moment, and must not taint a fleet."""
QUIET_MAX_S: Final = 86_400
GONE: Final = "declared.gone"
"""Cause of a device that its driver no longer has."""

_EVICTED: Final = re.compile(r"[^\s*]+(\.\*)?")
_RANK: Final = {Effect.NONE: 0, Effect.NO_SCHEDULE: 1, Effect.NO_EXECUTE: 2}


@dataclass(frozen=True, slots=True)
class TaintPolicy:
    """What an operator decides about taints.

    Raises:
        ConfigError: a value is not what it may be; with the field, the value and the limit.
    """

    evict: frozenset[str] = frozenset()
    """Codes, ``gpu.xid.79``, or families of them, ``gpu.xid.*``, that evict the pods of a device which they
    make Unhealthy (``NoExecute``). None, unless somebody says so."""
    quiet_s: float = 60
    """How long a cause must be gone before its taint goes [s]."""
    domain: str = ""
    """What keys begin with; empty: the driver's name."""
    tell_unknown: bool = True
    """Taint devices ``unmonitored`` that are Unknown for a minute; effect ``None``."""
    inform: bool = True
    """Publish taints of effect ``None``: of degraded and of unmonitored devices. API servers before 1.35
    refuse a ResourceSlice that has one."""

    def __post_init__(self) -> None:
        evict: object = self.evict
        if not isinstance(evict, frozenset):
            raise ConfigError(f"{evict!r} is no frozenset of codes", key="evict")
        for one in evict:
            if not (isinstance(one, str) and _EVICTED.fullmatch(one)):
                text = f"{one!r} is neither a code, such as gpu.xid.79, nor a family, such as gpu.xid.*"
                raise ConfigError(text, key="evict")
        quiet: object = self.quiet_s
        if not isinstance(quiet, int | float) or not 0 <= quiet <= QUIET_MAX_S:
            raise ConfigError(f"{quiet!r} s is not within 0 and {QUIET_MAX_S} s", key="quiet_s")
        if self.domain:
            check_domain(self.domain, "domain")

    def evicts(self, code: str) -> bool:
        """Whether pods are to leave a device that this makes Unhealthy."""
        families = (one[:-1] for one in self.evict if one.endswith(".*"))
        return code in self.evict or any(code.startswith(family) for family in families)


class Held(NamedTuple):
    """A taint through time."""

    taint: Taint
    gone_ns: int | None = None
    """Since when nothing calls for it, or only for a weaker effect [ns]; None: it is called for."""

    @property
    def spot(self) -> Spot:
        """Which it is."""
        return Spot(self.taint.key, self.taint.value)


@dataclass(frozen=True, slots=True)
class TaintPast:
    """What is published, and what has to be known to go on from there."""

    taints: Taints = field(default_factory=Taints)
    held: Mapping[DeviceRef, tuple[Held, ...]] = field(default_factory=dict)
    """Of each device that has any, also those that find no room among its sixteen."""
    unknown_ns: Mapping[DeviceRef, int] = field(default_factory=dict)
    """Since when each device that is Unknown is so [ns]."""
    due_ns: int | None = None
    """When to decide again though nothing was reported; None: no time is running."""

    @property
    def kept(self) -> Taints:
        """What the next life is to know: when each taint was published first."""
        return Taints({ref: tuple(one.taint for one in held) for ref, held in self.held.items()})


def restore(kept: Taints, driver: str, policy: TaintPolicy) -> TaintPast:
    """Goes on from what an earlier life kept; what this policy would never publish is left out.

    Raises:
        ConfigError: as :func:`domain_of`.
    """
    domain = domain_of(driver, policy)
    held = {}
    for ref, taints in kept.devices.items():
        own = [Held(taint) for taint in taints if _is_ours(taint, domain, policy)]
        if own and ref.driver == driver:
            held[ref] = tuple(sorted(own, key=_worst_first))
    return TaintPast(Taints({ref: _published(own, domain) for ref, own in held.items()}), held)


def decide(past: TaintPast, report: Report, driver: str, policy: TaintPolicy, now: Instant) -> TaintPast:
    """What is to be published now.

    Args:
        past: As the last call returned it, or :func:`restore`.
        report: The newest; one that is still starting changes nothing.
        driver: Whose devices: those that it declared, or the host's own if it declares none.
        policy: The same in every call.
        now: The time of this decision; durations are measured on its first clock.

    Raises:
        ConfigError: as :func:`domain_of`.
    """
    terms = _Terms(domain_of(driver, policy), policy, now)
    if report.starting:
        return past
    found = {DeviceRef(driver, one.pool, one.device): one for one in devices_of(report, driver)}
    unknown = [ref for ref, device in found.items() if device.health is Health.UNKNOWN]
    unknown_ns = {ref: past.unknown_ns.get(ref, now.mono_ns) for ref in unknown}
    held = {}
    for ref in {**found, **past.held}:
        causes = found[ref].causes if ref in found else ()
        calls = _calls(causes, unknown_ns.get(ref), terms)
        if after := _advance(past.held.get(ref, ()), calls, terms, blind=ref in unknown_ns):
            held[ref] = after
    devices = {ref: _published(held.get(ref, ()), terms.domain) for ref in {**found, **held}}
    taints = past.taints if devices == past.taints.devices else Taints(devices)
    due = [*_ends_of_quiet(held, terms), *_ends_of_patience(unknown_ns, terms)]
    return TaintPast(taints, held, unknown_ns, min(due, default=None))


def domain_of(driver: str, policy: TaintPolicy) -> str:
    """What the keys of a driver's taints begin with.

    Raises:
        ConfigError: it is no DNS subdomain of at most 253 characters.
    """
    if not policy.domain:
        check_domain(driver, "driver")
    return policy.domain or driver


# --- what is called for ------------------------------------------------------------------------------------


class _Terms(NamedTuple):
    """What all devices have in common in one decision."""

    domain: str
    policy: TaintPolicy
    now: Instant

    @property
    def tells_unknown(self) -> bool:
        return self.policy.tell_unknown and self.policy.inform

    def quiet_until(self, gone_ns: int) -> int:
        return gone_ns + round(self.policy.quiet_s * NS)


def devices_of(report: Report, driver: str) -> Iterator[DeviceHealth]:
    """As the driver's health stream tells them, without those that it no longer has."""
    whose = driver if driver in report.declaring else ""
    for device in report.devices:
        if device.driver == whose and all(cause.code != GONE for cause in device.causes):
            yield device


def _calls(causes: Iterable[Cause], unknown_ns: int | None, terms: _Terms) -> dict[Spot, Effect]:
    """The effects that are called for; the strongest, where several causes share a taint."""
    calls: dict[Spot, Effect] = {}
    for cause in causes:
        effect = _effect_of(cause, terms.policy)
        if effect is not None:
            spot = spot_of(cause.code, terms.domain)
            calls[spot] = max(effect, calls.get(spot, effect), key=_RANK.__getitem__)
    if unknown_ns is not None and terms.tells_unknown and terms.now.mono_ns >= unknown_ns + UNKNOWN_NS:
        calls[Spot(f"{terms.domain}/{UNMONITORED}")] = Effect.NONE
    return calls


def _effect_of(cause: Cause, policy: TaintPolicy) -> Effect | None:
    if cause.severity is Severity.UNHEALTHY:
        return Effect.NO_EXECUTE if policy.evicts(cause.code) else Effect.NO_SCHEDULE
    if cause.keep_away:
        return Effect.NO_SCHEDULE
    return Effect.NONE if cause.severity is Severity.DEGRADED and policy.inform else None


# --- what is held ------------------------------------------------------------------------------------------


def _advance(
    before: Sequence[Held], calls: Mapping[Spot, Effect], terms: _Terms, *, blind: bool
) -> tuple[Held, ...]:
    """One device's taints, worst first, with the word that there are more if they are too many.

    Args:
        blind: The device is Unknown.
    """
    if not before and not calls:
        return ()
    more = Spot(f"{terms.domain}/{MORE}")
    causes = _stepped([one for one in before if one.spot != more], calls, terms, blind=blind)
    told = {more: Effect.NONE} if len(causes) > TAINTS_MAX and terms.policy.inform else {}
    mores = _stepped([one for one in before if one.spot == more], told, terms, blind=False)
    return tuple(sorted([*causes, *mores], key=_worst_first))


def _stepped(
    before: Iterable[Held], calls: Mapping[Spot, Effect], terms: _Terms, *, blind: bool
) -> list[Held]:
    new = dict(calls)
    after = []
    for one in before:
        called = new.pop(one.spot, None)
        if called is None and blind:  # nobody has seen that it is over, nor that anybody must leave
            called = min(one.taint.effect, Effect.NO_SCHEDULE, key=_RANK.__getitem__)
        if (stepped := _step(one, called, terms)) is not None:
            after.append(stepped)
    return [*after, *(_begin(spot, effect, terms.now) for spot, effect in new.items())]


def _step(one: Held, called: Effect | None, terms: _Terms) -> Held | None:
    """A taint grows worse at once; it goes, or becomes a weaker one, after the quiet time."""
    effect = one.taint.effect
    if called is effect:
        return Held(one.taint)
    if called is None or _RANK[called] < _RANK[effect]:
        gone_ns = terms.now.mono_ns if one.gone_ns is None else one.gone_ns
        if terms.now.mono_ns < terms.quiet_until(gone_ns):
            return Held(one.taint, gone_ns)
    return None if called is None else _begin(one.spot, called, terms.now)


def _begin(spot: Spot, effect: Effect, now: Instant) -> Held:
    return Held(Taint(spot.key, spot.value, effect, max(0, math.floor(now.wall_s))))


def _published(held: Sequence[Held], domain: str) -> tuple[Taint, ...]:
    """At most sixteen; where one says that there are more, fifteen and that one."""
    more = [one.taint for one in held if one.spot == Spot(f"{domain}/{MORE}")]
    causes = [one.taint for one in held if one.taint not in more]
    return (*causes[: TAINTS_MAX - len(more)], *more)


def _worst_first(one: Held) -> tuple[object, ...]:
    """Then the oldest: one that has found room keeps it among its equals."""
    taint = one.taint
    return (-_RANK[taint.effect], taint.added_wall_s, taint.key, taint.value)


def _is_ours(taint: Taint, domain: str, policy: TaintPolicy) -> bool:
    prefix, _, name = taint.key.partition("/")
    told = policy.inform or taint.effect is not Effect.NONE
    return prefix == domain and told and (policy.tell_unknown or name != UNMONITORED)


# --- when to decide again ----------------------------------------------------------------------------------


def _ends_of_quiet(held: Mapping[DeviceRef, tuple[Held, ...]], terms: _Terms) -> Iterator[int]:
    for taints in held.values():
        for one in taints:
            if one.gone_ns is not None:
                yield terms.quiet_until(one.gone_ns)


def _ends_of_patience(unknown_ns: Mapping[DeviceRef, int], terms: _Terms) -> Iterator[int]:
    for since_ns in unknown_ns.values():
        if terms.tells_unknown and terms.now.mono_ns < since_ns + UNKNOWN_NS:
            yield since_ns + UNKNOWN_NS
