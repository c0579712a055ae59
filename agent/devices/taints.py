"""Decision which taints a DRA driver publishes for its devices, from their health.

A taint appears with its fault, and disappears when the fault has been gone for ``TaintPolicy.quiet_s``, so
that a flapping fault is published once. While a device is Unknown, or not listed yet, its taints stay, but no
longer evict pods.
agent.driver.taint_callback_publisher publishes the taints.

Sources: KEP-5055; the keys are those of NVIDIA's driver where it has one.

The module also has the keys and values of device taints, derived from the code of a fault.

A key is ``<domain>/<name>``: a domain of at most 253 characters, a name of at most 63.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.errors import ConfigError
from agent.model.claim import DeviceRef
from agent.model.health import TAINTS_MAX, Cause, DeviceHealth, Effect, Health, Severity, Taint, Taints
from agent.model.reading import unlisted_sources
from agent.model.report import Report
from agent.model.time import NS, Instant, with_present_clock

UNMONITORED: Final = "unmonitored"
"""Name in the taint key for a device that has been Unknown for a minute."""
MORE_CAUSES: Final = "more-causes"
"""Name in the taint key for a device that has more faults than it may have taints."""
DOMAIN_CHARS: Final = 253
NAME_CHARS: Final = 63
"""Largest length of the name in a taint's key, and of a taint's value [characters]."""

_DOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME: Final = re.compile(rf"(?=.{{1,{NAME_CHARS}}}\Z)[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_ILLEGAL: Final = re.compile(r"[^-A-Za-z0-9_.]")
_NUMBERED: Final = (
    (re.compile(r"gpu\.xid\.([0-9]{1,9})"), "xid"),
    (re.compile(r"gpu\.fabric\.sxid\.([0-9]{1,9})"), "sxid"),  # SXid numbers are not XIDs
)
"""Patterns of finding codes whose number becomes the taint's value, each with the name in the taint key."""
_NAMED: Final = {"gpu.lost": "gpu-lost"}
RESERVED_NAMES: Final = frozenset(
    {UNMONITORED, MORE_CAUSES, *_NAMED.values(), *(name for _, name in _NUMBERED)}
)
"""Names in taint keys with a fixed meaning; a finding code that equals such a name gets another name."""


class TaintId(NamedTuple):
    """Key and value of a taint; a device has at most one taint with the same key and value."""

    key: str
    value: str = ""


def taint_id(code: str, domain: str) -> TaintId:
    """Return key and value of the taint for a fault with this code, such as ``gpu.xid.79``.

    The name in the key is NVIDIA's name for the fault, if there is one, else the code. If the code is not a
    valid name, the name in the key is a part of the code with a hash.
    """
    for pattern, name in _NUMBERED:
        if match := pattern.fullmatch(code):
            return TaintId(f"{domain}/{name}", match[1])
    return TaintId(f"{domain}/{_NAMED.get(code) or _taint_name(code)}")


def validate_domain(domain: str, config_key: str) -> None:
    """Raise ConfigError if a domain is not valid in a taint's key."""
    if len(domain) > DOMAIN_CHARS:
        text = f"{domain!r} is {len(domain)} characters, limit {DOMAIN_CHARS}; shorten it"
        raise ConfigError(text, key=config_key)
    if not _DOMAIN.fullmatch(domain):
        raise ConfigError(f"{domain!r} is not a DNS subdomain, such as gpu.example.com", key=config_key)


def _taint_name(code: str) -> str:
    if _NAME.fullmatch(code) and code not in RESERVED_NAMES:
        return code
    digest = hashlib.sha256(code.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    head = _ILLEGAL.sub("-", code)[: NAME_CHARS - len(digest) - 1].strip("-_.")
    return f"{head}-{digest}" if head else digest


# --- decisions on taints -----------------------------------------------------------------------------------

UNKNOWN_NS: Final = 60 * NS
"""Time for which a device must be Unknown before it gets a taint [ns].
An agent's restart makes all devices Unknown for a moment."""
QUIET_MAX_S: Final = 86_400
UNDECLARED_CODE: Final = "declared.gone"
"""Code of the fault of a device that its driver no longer declares."""

_EVICTED: Final = re.compile(r"[^\s*]+(\.\*)?")
_RANK: Final = {Effect.NONE: 0, Effect.NO_SCHEDULE: 1, Effect.NO_EXECUTE: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaintPolicy:
    """Operator's policy: which faults of devices become which taints.
    Raises ConfigError if a value is invalid.
    """

    evict: frozenset[str] = frozenset()
    """Codes (``gpu.xid.79``) or families (``gpu.xid.*``) of faults that evict pods (``NoExecute``).

    They evict pods from a device that they make Unhealthy.
    """
    quiet_s: float = 60
    """Time for which a fault must be gone before its taint is removed [s]."""
    domain: str = ""
    """Domain of the taints' keys; empty: the name of the driver."""
    report_unknown: bool = True
    """True: a device that is Unknown for a minute gets the taint ``unmonitored`` with effect ``None``."""
    inform: bool = True
    """True: taints with effect ``None`` are published, for degraded and unmonitored devices.
    API servers before 1.35 refuse a ResourceSlice with such a taint."""

    def __post_init__(self) -> None:
        evict: object = self.evict
        if not isinstance(evict, frozenset):
            raise ConfigError(f"{evict!r} is not a frozenset of finding codes", key="evict")
        for code in evict:
            if not (isinstance(code, str) and _EVICTED.fullmatch(code)):
                text = f"{code!r} is neither a code, such as gpu.xid.79, nor a family, such as gpu.xid.*"
                raise ConfigError(text, key="evict")
        quiet: object = self.quiet_s
        if not isinstance(quiet, int | float) or not 0 <= quiet <= QUIET_MAX_S:
            raise ConfigError(f"{quiet!r} s is not between 0 and {QUIET_MAX_S} s", key="quiet_s")
        if self.domain:
            validate_domain(self.domain, "domain")

    def evicts(self, code: str) -> bool:
        """Return True if a fault with this code evicts pods from a device that the fault makes Unhealthy."""
        families = (pattern[:-1] for pattern in self.evict if pattern.endswith(".*"))
        return code in self.evict or any(code.startswith(family) for family in families)


class PublishedTaint(NamedTuple):
    """A published taint of a device, and the time since which no fault requires it."""

    taint: Taint
    cleared_ns: int | None = None
    """Monotonic time since which no fault requires the taint, or only a weaker effect [ns].

    None: a fault requires it.
    """
    added_ns: int = 0
    """Monotonic time of the decision on the taint [ns]; 0: a former run of the agent decided on it."""

    @property
    def identity(self) -> TaintId:
        """Key and value of the published taint."""
        return TaintId(self.taint.key, self.taint.value)


@dataclass(frozen=True, slots=True)
class TaintState:
    """Taints that one driver publishes now, and the times at which the taints must be decided again."""

    taints: Taints = field(default_factory=Taints)
    published: Mapping[DeviceRef, tuple[PublishedTaint, ...]] = field(default_factory=dict)
    """All taints by device, worst first; ``taints`` has those of them to publish, up to sixteen a device."""
    unknown_ns: Mapping[DeviceRef, int] = field(default_factory=dict)
    """Monotonic time since which each Unknown device is Unknown [ns]."""
    due_ns: int | None = None
    """Monotonic time at which the next decision is due [ns]; None: when a new report arrives."""

    @property
    def stored_taints(self) -> Taints:
        """Taints to store on disk. :func:`restore_taints` restores the state from them after a restart."""
        return Taints({ref: tuple(taint.taint for taint in held) for ref, held in self.published.items()})


def restore_taints(kept: Taints, driver: str, policy: TaintPolicy) -> TaintState:
    """Restore the state of a driver's taints from stored taints.

    Taints of other drivers, and taints that the policy excludes, are left out.

    Raises ConfigError if the domain of the taint keys is invalid.
    """
    domain = taint_domain(driver, policy)
    held = {}
    for ref, taints in kept.devices.items():
        own = [PublishedTaint(taint) for taint in taints if _is_ours(taint, domain, policy)]
        if own and ref.driver == driver:
            held[ref] = tuple(sorted(own, key=_worst_first_key))
    return TaintState(Taints({ref: _taints_to_publish(own, domain) for ref, own in held.items()}), held)


def decide_taints(
    past: TaintState, report: Report, driver: str, policy: TaintPolicy, now: Instant
) -> TaintState:
    """Decide which taints a driver publishes now.

    Args:
        past: Result of the last call or of :func:`restore_taints`.
        report: The newest report; a report with ``starting`` changes nothing.
        driver: Driver whose devices get taints: its declared devices, or the host devices if it has none.
        policy: The policy, the same in every call.
        now: Time of the decision.

    Raises ConfigError: the domain of the taint keys is invalid.
    """
    context = _DecisionContext(taint_domain(driver, policy), policy, now)
    if report.starting:
        return past
    found = {DeviceRef(driver, seen.pool, seen.device): seen for seen in reported_devices(report, driver)}
    unknown = [ref for ref, device in found.items() if device.health is Health.UNKNOWN]
    unknown_ns = {ref: past.unknown_ns.get(ref, now.mono_ns) for ref in unknown}
    is_listed = driver in report.declaring or not unlisted_sources(report.sources)
    uncertain = unknown_ns.keys() | (set() if is_listed else past.published.keys() - found.keys())
    held = {}
    for ref in {**found, **past.published}:
        causes = found[ref].causes if ref in found else ()
        required = _required_effects(causes, unknown_ns.get(ref), context)
        if after := _next_taints(past.published.get(ref, ()), required, context, is_unknown=ref in uncertain):
            held[ref] = after
    devices = {ref: _taints_to_publish(held.get(ref, ()), context.domain) for ref in {**found, **held}}
    taints = past.taints if devices == past.taints.devices else Taints(devices)
    due = [*_quiet_deadlines(held, context), *_unknown_deadlines(unknown_ns, context)]
    return TaintState(taints, held, unknown_ns, min(due, default=None))


def taint_domain(driver: str, policy: TaintPolicy) -> str:
    """Return the domain of the keys of a driver's taints: the policy's domain, else the driver's name.

    Raises ConfigError if the driver's name is not a DNS subdomain of at most 253 characters.
    """
    if not policy.domain:
        validate_domain(driver, "driver")
    return policy.domain or driver


class _DecisionContext(NamedTuple):
    """Inputs of :func:`decide_taints` that are equal for all devices."""

    domain: str
    policy: TaintPolicy
    now: Instant

    @property
    def reports_unknown(self) -> bool:
        return self.policy.report_unknown and self.policy.inform

    def quiet_until(self, gone_ns: int) -> int:
        return gone_ns + round(self.policy.quiet_s * NS)


def reported_devices(report: Report, driver: str) -> Iterator[DeviceHealth]:
    """Yield the devices in a driver's health stream, without devices that the driver no longer declares."""
    owner = driver if driver in report.declaring else ""
    for device in report.devices:
        if device.driver == owner and all(cause.code != UNDECLARED_CODE for cause in device.causes):
            yield device


def _required_effects(
    causes: Iterable[Cause], unknown_ns: int | None, context: _DecisionContext
) -> dict[TaintId, Effect]:
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


def _next_taints(
    before: Sequence[PublishedTaint],
    required: Mapping[TaintId, Effect],
    context: _DecisionContext,
    *,
    is_unknown: bool,
) -> tuple[PublishedTaint, ...]:
    """Return the taints of one device after a decision, worst first.

    If the device has too many taints, the taint ``more-causes`` is added.
    """
    if not before and not required:
        return ()
    more = TaintId(f"{context.domain}/{MORE_CAUSES}")
    causes = _step_taints(
        [taint for taint in before if taint.identity != more], required, context, is_unknown=is_unknown
    )
    overflow = {more: Effect.NONE} if len(causes) > TAINTS_MAX and context.policy.inform else {}
    mores = _step_taints([old for old in before if old.identity == more], overflow, context, is_unknown=False)
    return tuple(sorted([*causes, *mores], key=_worst_first_key))


def _step_taints(
    before: Iterable[PublishedTaint],
    required: Mapping[TaintId, Effect],
    context: _DecisionContext,
    *,
    is_unknown: bool,
) -> list[PublishedTaint]:
    new = dict(required)
    after = []
    for taint in before:
        called = new.pop(taint.identity, None)
        if called is None and is_unknown:  # the cause may persist, but an Unknown device evicts no pods
            called = min(taint.taint.effect, Effect.NO_SCHEDULE, key=_RANK.__getitem__)
        if (stepped := _step_taint(taint, called, context)) is not None:
            after.append(stepped)
    return [*after, *(_new_taint(identity, effect, context.now) for identity, effect in new.items())]


def _step_taint(
    published: PublishedTaint, required: Effect | None, context: _DecisionContext
) -> PublishedTaint | None:
    """Return the state of a published taint after a decision. None: the taint must be removed.

    A stronger effect applies at once; a weaker effect and the removal apply after ``TaintPolicy.quiet_s``.
    """
    published = _with_present_time(published, context.now)
    effect = published.taint.effect
    if required is effect:
        return published._replace(cleared_ns=None)
    if required is None or _RANK[required] < _RANK[effect]:
        gone_ns = context.now.mono_ns if published.cleared_ns is None else published.cleared_ns
        if context.now.mono_ns < context.quiet_until(gone_ns):
            return published._replace(cleared_ns=gone_ns)
    return None if required is None else _new_taint(published.identity, required, context.now)


def _with_present_time(published: PublishedTaint, now: Instant) -> PublishedTaint:
    """Return a taint with the time of its decision by the present clock, which NTP may have set since."""
    if not published.added_ns:
        return published
    added = with_present_clock(Instant(published.added_ns, published.taint.added_wall_s), now)
    return published._replace(taint=published.taint._replace(added_wall_s=_added_s(added)))


def _added_s(at: Instant) -> int:
    """Return the time of a decision on a taint, as a taint has it [s since 1970]."""
    return max(0, math.floor(at.wall_s))


def _new_taint(identity: TaintId, effect: Effect, now: Instant) -> PublishedTaint:
    taint = Taint(identity.key, identity.value, effect, _added_s(now))
    return PublishedTaint(taint, added_ns=now.mono_ns)


def _taints_to_publish(held: Sequence[PublishedTaint], domain: str) -> tuple[Taint, ...]:
    """Return the published taints of a device: up to sixteen, or fifteen and the taint ``more-causes``."""
    more = [taint.taint for taint in held if taint.identity == TaintId(f"{domain}/{MORE_CAUSES}")]
    causes = [taint.taint for taint in held if taint.taint not in more]
    return (*causes[: TAINTS_MAX - len(more)], *more)


def _worst_first_key(published: PublishedTaint) -> tuple[object, ...]:
    taint = published.taint
    return (-_RANK[taint.effect], taint.added_wall_s, taint.key, taint.value)


def _is_ours(taint: Taint, domain: str, policy: TaintPolicy) -> bool:
    prefix, _, name = taint.key.partition("/")
    allowed = policy.inform or taint.effect is not Effect.NONE
    return prefix == domain and allowed and (policy.report_unknown or name != UNMONITORED)


def _quiet_deadlines(
    held: Mapping[DeviceRef, tuple[PublishedTaint, ...]], context: _DecisionContext
) -> Iterator[int]:
    for taints in held.values():
        for taint in taints:
            if taint.cleared_ns is not None:
                yield context.quiet_until(taint.cleared_ns)


def _unknown_deadlines(unknown_ns: Mapping[DeviceRef, int], context: _DecisionContext) -> Iterator[int]:
    for since_ns in unknown_ns.values():
        if context.reports_unknown and context.now.mono_ns < since_ns + UNKNOWN_NS:
            yield since_ns + UNKNOWN_NS
