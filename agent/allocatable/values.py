"""What one knob should say, once it is known what was asked for: the values to accept, and the arithmetic.

Where kubelet and runtimes round, or differ by version, several values are accepted, each with a word on whose
it is. Who asks for what is in :mod:`agent.allocatable.expected`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from agent.allocatable.arithmetic import (
    MIN_SHARES,
    linear_weight,
    quadratic_weight,
    quota_of,
    shares_of,
    systemd_quota,
    whole_pages,
)
from agent.allocatable.facts import CgroupDriver, NodeFacts
from agent.allocatable.knobs import Knob, KnobId, bytes_text, page_name
from agent.allocatable.pod import Unsaid
from agent.allocatable.quantity import ZERO, Quantity
from agent.allocatable.sums import Amount
from agent.model.cgroup import NO_LIMIT


class Option(NamedTuple):
    """A value that a file may have."""

    value: int
    note: str = ""
    """Whose it is, where there are others; or why it is as it is."""
    rounded: bool = False
    """It is what becomes of the first when that is written."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What one knob should say."""

    knob: KnobId
    accepted: tuple[Option, ...]
    """The first is what the kubelet's code comes to. Empty: nobody knows."""
    arithmetic: str
    unknown: str = ""
    """Why nobody knows."""
    explains: tuple[Option, ...] = ()
    """Values that are wrong, but whose reason is known."""
    over_us: int = 0
    """Of a quota: the period that it is counted over; else 0."""


class RequestSums(NamedTuple):
    """What was asked for."""

    amount: Amount
    """As the kubelet at hand adds it..."""
    uncounted: Amount
    """...and as one does that does not count claims."""


def asked(add: Callable[[bool], Amount], facts: NodeFacts) -> RequestSums:
    """Both sums. ``add`` is told whether claims count."""
    return RequestSums(add(facts.counts_claims), add(False))


def unknown(knob: KnobId, why: str) -> Expected:
    """Nobody can say."""
    return Expected(knob, (), "", why)


# --- CPU time ----------------------------------------------------------------------------------------------


def cpu_weight(wanted: RequestSums, facts: NodeFacts, *, runtimes: bool = False) -> Expected:
    """``cpu.weight``, in v1 ``cpu.shares``. ``runtimes``: the runtime writes it, not the kubelet."""
    if isinstance(wanted.amount, Unsaid):
        return unknown(KnobId(Knob.WEIGHT), wanted.amount.why)
    expected = _weight(wanted.amount, facts, runtimes)
    if isinstance(wanted.uncounted, Unsaid):
        return expected
    return _explained(expected, _weight(wanted.uncounted, facts, runtimes).accepted)


def least_weight(why: str, facts: NodeFacts, *, runtimes: bool = False) -> Expected:
    """The weight of who asks for nothing, or whose class gets nothing."""
    return _weighted(MIN_SHARES, why, facts, runtimes)


def _weight(amount: Amount, facts: NodeFacts, runtimes: bool) -> Expected:
    if amount is None or isinstance(amount, Unsaid):
        return least_weight("nothing asked for", facts, runtimes=runtimes)
    return _weighted(shares_of(amount.total.milli), amount.text, facts, runtimes)


def _weighted(shares: int, text: str, facts: NodeFacts, runtimes: bool) -> Expected:
    arithmetic = f"{text} -> shares {shares}"
    if facts.version == 1:
        return Expected(KnobId(Knob.WEIGHT), (Option(shares),), arithmetic)
    formulas = [(linear_weight(shares), "linear"), (quadratic_weight(shares), "quadratic")]
    if runtimes:  # the newer ones are quadratic
        formulas.reverse()
    if formulas[0][0] == formulas[1][0]:
        formulas = [(formulas[0][0], "")]
    options = tuple(Option(weight, formula) for weight, formula in formulas)
    told = " or ".join(f"{weight} ({formula})" if formula else str(weight) for weight, formula in formulas)
    return Expected(KnobId(Knob.WEIGHT), options, f"{arithmetic} -> weight {told}")


def cpu_quota(wanted: RequestSums, facts: NodeFacts, lifted: str, without: str) -> Iterable[Expected]:
    """Quota; and the period, if there is a quota.

    Args:
        wanted: The limit.
        facts: Of the node.
        lifted: Why there is no quota whatever the limit; empty: there may be one.
        without: What to say if there is no limit.
    """
    knob, amount = KnobId(Knob.QUOTA), wanted.amount
    if not facts.enforces_quota:
        lifted = "the kubelet enforces no quota"
    if lifted:
        yield Expected(knob, (Option(NO_LIMIT),), f"no limit: {lifted}")
    elif isinstance(amount, Unsaid):
        yield unknown(knob, amount.why)
    elif amount is None or not amount.total:
        yield Expected(knob, (Option(NO_LIMIT),), without)
    else:
        options = _quotas(amount.total, facts)
        arithmetic = f"{amount.text} -> {options[0].value} us of {facts.period_us}"
        expected = Expected(knob, options, arithmetic, over_us=facts.period_us)
        yield _explained(expected, _options(wanted.uncounted, lambda total: _quotas(total, facts)))
        yield Expected(KnobId(Knob.PERIOD), (Option(facts.period_us),), "the kubelet's period")


def _quotas(amount: Quantity, facts: NodeFacts) -> tuple[Option, ...]:
    exact = quota_of(amount.milli, facts.period_us)
    if facts.driver is not CgroupDriver.SYSTEMD:
        return (Option(exact),)
    up = systemd_quota(exact, facts.period_us)
    return (Option(exact),) if up == exact else (Option(exact), Option(up, "systemd rounds up", rounded=True))


# --- memory and pages --------------------------------------------------------------------------------------


def memory_limit(wanted: RequestSums, facts: NodeFacts, without: str) -> Expected:
    """The limit of memory. ``without`` is said if there is none."""
    knob, amount = KnobId(Knob.MEMORY), wanted.amount
    if isinstance(amount, Unsaid):
        return unknown(knob, amount.why)
    if amount is None or not amount.total:
        return Expected(knob, (Option(NO_LIMIT),), without)
    options = _paged(amount.total, facts.page_bytes)
    expected = Expected(knob, options, f"{amount.text} -> {options[0].value} bytes")
    return _explained(expected, _options(wanted.uncounted, lambda total: _paged(total, facts.page_bytes)))


def page_limits(size_kib: int, wanted: RequestSums) -> Iterable[Expected]:
    """The limits of hugepages of one size, and of reservations of them: without being asked for, none."""
    amount = wanted.amount
    for kind in (Knob.PAGES, Knob.RESERVED):
        knob = KnobId(kind, size_kib)
        if isinstance(amount, Unsaid):
            yield unknown(knob, amount.why)
            continue
        options = _paged(amount.total if amount else ZERO, size_kib * 1024)
        text = amount.text if amount else f"no pages of {page_name(size_kib)} asked for"
        expected = Expected(knob, options, f"{text} -> {options[0].value} bytes")
        if wanted.uncounted is None:
            yield _explained(expected, (Option(0),))
        else:
            yield _explained(
                expected, _options(wanted.uncounted, lambda total: _paged(total, size_kib * 1024))
            )


def _paged(amount: Quantity, page_bytes: int) -> tuple[Option, ...]:
    exact, kept = amount.value, whole_pages(amount.value, page_bytes)
    if exact == kept:
        return (Option(exact),)
    return (Option(exact), Option(kept, f"in whole pages of {bytes_text(page_bytes)}", rounded=True))


# --- what explains a wrong value ---------------------------------------------------------------------------


def _options(amount: Amount, options: Callable[[Quantity], tuple[Option, ...]]) -> tuple[Option, ...]:
    return () if amount is None or isinstance(amount, Unsaid) else options(amount.total)


def _explained(expected: Expected, uncounted: Iterable[Option]) -> Expected:
    """With the values that a kubelet writes that does not count claims."""
    right = {option.value for option in expected.accepted}
    why = "as if the kubelet did not count claims"
    explains = tuple(Option(one.value, why) for one in uncounted if one.value not in right)
    return replace(expected, explains=explains) if explains else expected
