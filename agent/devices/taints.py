"""Taints that a driver publishes for its devices, derived from their health. Pure.

A taint appears with its debounced cause, and disappears when the cause has been gone for the quiet time, so
that a flapping cause is published once. While a device is Unknown its taints stay, but evictions end.
agent.driver.taint_publisher publishes the taints; Kubernetes evicts pods.

Sources: KEP-5055; the keys are those of NVIDIA's driver where it has one.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.devices.taint_keys import MORE, UNMONITORED, TaintId, check_domain, taint_id
from agent.errors import ConfigError
from agent.model.claim import DeviceRef
from agent.model.health import Cause, DeviceHealth, Health, Severity
from agent.model.report import Report
from agent.model.taint import TAINTS_MAX, Effect, Taint, Taints
from agent.model.time import NS, Instant

UNKNOWN_NS: Final = 60 * NS
"""Time for which a device must be Unknown before it is tainted [ns]. A restart of the agent makes all devices
Unknown for a moment, which must not taint a fleet."""
QUIET_MAX_S: Final = 86_400
GONE: Final = "declared.gone"
"""Code of the cause of a device that its driver no longer declares."""

_EVICTED: Final = re.compile(r"[^\s*]+(\.\*)?")
_RANK: Final = {Effect.NONE: 0, Effect.NO_SCHEDULE: 1, Effect.NO_EXECUTE: 2}


@dataclass(frozen=True, slots=True)
class TaintPolicy:
    """Operator's policy for taints.

    Raises:
        ConfigError: A value is invalid; the text has the field, the value and the limit.
    """

    evict: frozenset[str] = frozenset()
    """Codes, ``gpu.xid.79``, or families, ``gpu.xid.*``, that evict the pods of a device which they make
    Unhealthy (``NoExecute``). Empty by default."""
    quiet_s: float = 60
    """Time for which a cause must be gone before its taint is removed [s]."""
    domain: str = ""
    """Domain of the taint keys; empty: the driver's name."""
    report_unknown: bool = True
    """Whether devices that are Unknown for a minute get the taint ``unmonitored`` with effect ``None``."""
    inform: bool = True
    """Whether taints of effect ``None``, for degraded and unmonitored devices, are published. API servers
    before 1.35 refuse a ResourceSlice with such a taint."""

    def __post_init__(self) -> None:
        evict: object = self.evict
        if not isinstance(evict, frozenset):
            raise ConfigError(f"{evict!r} is not a frozenset of codes", key="evict")
        for one in evict:
            if not (isinstance(one, str) and _EVICTED.fullmatch(one)):
                text = f"{one!r} is neither a code, such as gpu.xid.79, nor a family, such as gpu.xid.*"
                raise ConfigError(text, key="evict")
        quiet: object = self.quiet_s
        if not isinstance(quiet, int | float) or not 0 <= quiet <= QUIET_MAX_S:
            raise ConfigError(f"{quiet!r} s is not between 0 and {QUIET_MAX_S} s", key="quiet_s")
        if self.domain:
            check_domain(self.domain, "domain")

    def evicts(self, code: str) -> bool:
        """Return whether a cause that makes a device Unhealthy evicts its pods."""
        families = (one[:-1] for one in self.evict if one.endswith(".*"))
        return code in self.evict or any(code.startswith(family) for family in families)


class PublishedTaint(NamedTuple):
    """A published taint and the time since which it is no longer required."""

    taint: Taint
    cleared_ns: int | None = None
    """Monotonic time since which no cause requires the taint, or only a weaker effect [ns]; None:
    required."""

    @property
    def identity(self) -> TaintId:
        """Key and value of the taint."""
        return TaintId(self.taint.key, self.taint.value)


@dataclass(frozen=True, slots=True)
class TaintState:
    """Published taints of a driver, with the state that the next decision needs."""

    taints: Taints = field(default_factory=Taints)
    published: Mapping[DeviceRef, tuple[PublishedTaint, ...]] = field(default_factory=dict)
    """Taints by device, including those beyond the limit of sixteen."""
    unknown_ns: Mapping[DeviceRef, int] = field(default_factory=dict)
    """Monotonic time since which each Unknown device is Unknown [ns]."""
    due_ns: int | None = None
    """Monotonic time at which the next decision is due even without a new report [ns]; None: only with a new
    report."""

    @property
    def kept(self) -> Taints:
        """Taints to store for the next start, with the time of their first publication."""
        return Taints({ref: tuple(one.taint for one in held) for ref, held in self.published.items()})


def restore_taints(kept: Taints, driver: str, policy: TaintPolicy) -> TaintState:
    """Restore the state from stored taints, without those that the policy never publishes.

    Raises:
        ConfigError: The domain of the taint keys is invalid, see :func:`domain_of`.
    """
    domain = domain_of(driver, policy)
    held = {}
    for ref, taints in kept.devices.items():
        own = [PublishedTaint(taint) for taint in taints if _is_ours(taint, domain, policy)]
        if own and ref.driver == driver:
            held[ref] = tuple(sorted(own, key=_worst_first))
    return TaintState(Taints({ref: _published(own, domain) for ref, own in held.items()}), held)


def decide_taints(
    past: TaintState, report: Report, driver: str, policy: TaintPolicy, now: Instant
) -> TaintState:
    """Decide which taints to publish now.

    Args:
        past: Result of the last call or of :func:`restore_taints`.
        report: The newest report; one that is still starting changes nothing.
        driver: Driver whose devices get taints: its declared devices, or the host devices if it has none.
        policy: The policy, the same in every call.
        now: Time of the decision; durations use the monotonic clock.

    Raises:
        ConfigError: The domain of the taint keys is invalid, see :func:`domain_of`.
    """
    context = _Decision(domain_of(driver, policy), policy, now)
    if report.starting:
        return past
    found = {DeviceRef(driver, one.pool, one.device): one for one in devices_of(report, driver)}
    unknown = [ref for ref, device in found.items() if device.health is Health.UNKNOWN]
    unknown_ns = {ref: past.unknown_ns.get(ref, now.mono_ns) for ref in unknown}
    held = {}
    for ref in {**found, **past.published}:
        causes = found[ref].causes if ref in found else ()
        required = _required(causes, unknown_ns.get(ref), context)
        if after := _advance(past.published.get(ref, ()), required, context, blind=ref in unknown_ns):
            held[ref] = after
    devices = {ref: _published(held.get(ref, ()), context.domain) for ref in {**found, **held}}
    taints = past.taints if devices == past.taints.devices else Taints(devices)
    due = [*_quiet_deadlines(held, context), *_unknown_deadlines(unknown_ns, context)]
    return TaintState(taints, held, unknown_ns, min(due, default=None))


def domain_of(driver: str, policy: TaintPolicy) -> str:
    """Return the domain of the keys of a driver's taints.

    Raises:
        ConfigError: The domain is not a DNS subdomain of at most 253 characters.
    """
    if not policy.domain:
        check_domain(driver, "driver")
    return policy.domain or driver


# --- required taints ---------------------------------------------------------------------------------------


class _Decision(NamedTuple):
    """Inputs of one decision on taints that are the same for all devices."""

    domain: str
    policy: TaintPolicy
    now: Instant

    @property
    def reports_unknown(self) -> bool:
        return self.policy.report_unknown and self.policy.inform

    def quiet_until(self, gone_ns: int) -> int:
        return gone_ns + round(self.policy.quiet_s * NS)


def devices_of(report: Report, driver: str) -> Iterator[DeviceHealth]:
    """Yield the devices on a driver's health stream, without devices that the driver no longer declares."""
    owner = driver if driver in report.declaring else ""
    for device in report.devices:
        if device.driver == owner and all(cause.code != GONE for cause in device.causes):
            yield device


def _required(causes: Iterable[Cause], unknown_ns: int | None, context: _Decision) -> dict[TaintId, Effect]:
    """Return the required effect of each taint of a device; the strongest if several causes share a taint."""
    required: dict[TaintId, Effect] = {}
    for cause in causes:
        effect = _effect_of(cause, context.policy)
        if effect is not None:
            identity = taint_id(cause.code, context.domain)
            required[identity] = max(effect, required.get(identity, effect), key=_RANK.__getitem__)
    if unknown_ns is not None and context.reports_unknown and context.now.mono_ns >= unknown_ns + UNKNOWN_NS:
        required[TaintId(f"{context.domain}/{UNMONITORED}")] = Effect.NONE
    return required


def _effect_of(cause: Cause, policy: TaintPolicy) -> Effect | None:
    if cause.severity is Severity.UNHEALTHY:
        return Effect.NO_EXECUTE if policy.evicts(cause.code) else Effect.NO_SCHEDULE
    if cause.keep_away:
        return Effect.NO_SCHEDULE
    return Effect.NONE if cause.severity is Severity.DEGRADED and policy.inform else None


# --- published taints --------------------------------------------------------------------------------------


def _advance(
    before: Sequence[PublishedTaint], required: Mapping[TaintId, Effect], context: _Decision, *, blind: bool
) -> tuple[PublishedTaint, ...]:
    """Return one device's next taints, worst first, with ``more-causes`` if there are too many.

    Args:
        blind: Whether the device is Unknown.
    """
    if not before and not required:
        return ()
    more = TaintId(f"{context.domain}/{MORE}")
    causes = _step_all([one for one in before if one.identity != more], required, context, blind=blind)
    overflow = {more: Effect.NONE} if len(causes) > TAINTS_MAX and context.policy.inform else {}
    mores = _step_all([one for one in before if one.identity == more], overflow, context, blind=False)
    return tuple(sorted([*causes, *mores], key=_worst_first))


def _step_all(
    before: Iterable[PublishedTaint], required: Mapping[TaintId, Effect], context: _Decision, *, blind: bool
) -> list[PublishedTaint]:
    new = dict(required)
    after = []
    for one in before:
        called = new.pop(one.identity, None)
        if called is None and blind:  # the cause may persist, but an Unknown device evicts no pods
            called = min(one.taint.effect, Effect.NO_SCHEDULE, key=_RANK.__getitem__)
        if (stepped := _step(one, called, context)) is not None:
            after.append(stepped)
    return [*after, *(_begin(identity, effect, context.now) for identity, effect in new.items())]


def _step(one: PublishedTaint, called: Effect | None, context: _Decision) -> PublishedTaint | None:
    """Return the next state of a taint; None: the taint is removed.

    A stronger effect applies at once, a weaker effect or the removal after the quiet time.
    """
    effect = one.taint.effect
    if called is effect:
        return PublishedTaint(one.taint)
    if called is None or _RANK[called] < _RANK[effect]:
        gone_ns = context.now.mono_ns if one.cleared_ns is None else one.cleared_ns
        if context.now.mono_ns < context.quiet_until(gone_ns):
            return PublishedTaint(one.taint, gone_ns)
    return None if called is None else _begin(one.identity, called, context.now)


def _begin(identity: TaintId, effect: Effect, now: Instant) -> PublishedTaint:
    return PublishedTaint(Taint(identity.key, identity.value, effect, max(0, math.floor(now.wall_s))))


def _published(held: Sequence[PublishedTaint], domain: str) -> tuple[Taint, ...]:
    """Return the taints to publish: at most sixteen, or fifteen and ``more-causes``."""
    more = [one.taint for one in held if one.identity == TaintId(f"{domain}/{MORE}")]
    causes = [one.taint for one in held if one.taint not in more]
    return (*causes[: TAINTS_MAX - len(more)], *more)


def _worst_first(one: PublishedTaint) -> tuple[object, ...]:
    """Return a sort key: worst effect first, then the oldest, so that equal taints keep their place."""
    taint = one.taint
    return (-_RANK[taint.effect], taint.added_wall_s, taint.key, taint.value)


def _is_ours(taint: Taint, domain: str, policy: TaintPolicy) -> bool:
    prefix, _, name = taint.key.partition("/")
    allowed = policy.inform or taint.effect is not Effect.NONE
    return prefix == domain and allowed and (policy.report_unknown or name != UNMONITORED)


# --- time of the next decision -----------------------------------------------------------------------------


def _quiet_deadlines(
    held: Mapping[DeviceRef, tuple[PublishedTaint, ...]], context: _Decision
) -> Iterator[int]:
    for taints in held.values():
        for one in taints:
            if one.cleared_ns is not None:
                yield context.quiet_until(one.cleared_ns)


def _unknown_deadlines(unknown_ns: Mapping[DeviceRef, int], context: _Decision) -> Iterator[int]:
    for since_ns in unknown_ns.values():
        if context.reports_unknown and context.now.mono_ns < since_ns + UNKNOWN_NS:
            yield since_ns + UNKNOWN_NS
