"""Expected value of one cgroup setting for given amounts: accepted values and arithmetic.

If kubelet and runtimes round, or differ by version, several values are accepted, each with a note on its
origin. :mod:`agent.allocatable.expected` selects the amounts. Conversions are integers, truncated as
upstream's.

Source: kubelet v1.37.1, pkg/kubelet/cm (shares, quota, linear weight); github.com/opencontainers/cgroups
v0.0.7 (quadratic weight, systemd's round-up); kernel, mm/page_counter.c and mm/hugetlb_cgroup.c (pages).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from agent.allocatable.facts import CgroupDriver, NodeFacts
from agent.allocatable.pod import UnknownAmount
from agent.allocatable.quantity import ZERO, Quantity
from agent.allocatable.settings import SettingId, SettingKind, bytes_text, page_name
from agent.allocatable.sums import Amount
from agent.model.cgroup import NO_LIMIT

MIN_SHARES: Final = 2
MAX_SHARES: Final = 262_144
MIN_QUOTA_US: Final = 1000
_STEP_US: Final = 10_000
"""Granularity of a CPU quota set by systemd [us]: 1 % of a CPU, 10 ms of each second."""
_SECOND_US: Final = 1_000_000


def shares_of(milli: int) -> int:
    """Convert millicores to ``cpu.shares``."""
    return max(MIN_SHARES, min(milli * 1024 // 1000, MAX_SHARES))


def linear_weight(shares: int) -> int:
    """Convert shares to ``cpu.weight`` as the kubelet and older OCI runtimes do."""
    return 1 + (max(MIN_SHARES, min(shares, MAX_SHARES)) - 2) * 9999 // 262_142


def quadratic_weight(shares: int) -> int:
    """Convert shares to ``cpu.weight`` as runc 1.3.2 and crun 1.23 do: 1024 shares are the default of 100."""
    if shares <= MIN_SHARES:
        return 1
    if shares >= MAX_SHARES:
        return 10_000
    exponent = math.log2(shares)
    # The order of evaluation decides whether 1024 shares are 100 or 101.
    return math.ceil(math.pow(10, (exponent * exponent + 125 * exponent) / 612.0 - 7.0 / 34.0))


def quota_of(milli: int, period_us: int) -> int:
    """Convert millicores to a CFS quota [us]; 0: no quota, the file stays unchanged."""
    return max(milli * period_us // 1000, MIN_QUOTA_US) if milli else 0


def systemd_quota(quota_us: int, period_us: int) -> int:
    """Round a quota up as systemd does, to the next 10 ms of each second."""
    per_second = quota_us * _SECOND_US // period_us
    if per_second % _STEP_US == 0:
        return quota_us
    return (per_second // _STEP_US + 1) * _STEP_US * period_us // _SECOND_US


def whole_pages(limit_bytes: int, page_bytes: int) -> int:
    """Round a limit down to whole pages, as the kernel does."""
    return limit_bytes - limit_bytes % page_bytes


class AcceptedValue(NamedTuple):
    """Accepted value of a cgroup setting."""

    value: int
    note: str = ""
    """Origin or reason of the value; empty: the only value."""
    rounded: bool = False
    """Whether this is the rounded form of the first accepted value."""


@dataclass(frozen=True, slots=True)
class ExpectedSetting:
    """Expected value of one cgroup setting."""

    knob: SettingId
    accepted: tuple[AcceptedValue, ...]
    """Accepted values; the first is that of the kubelet's code. Empty: unknown."""
    arithmetic: str
    unknown: str = ""
    """Reason why the value is unknown."""
    explains: tuple[AcceptedValue, ...] = ()
    """Wrong values with a known reason."""
    over_us: int = 0
    """CFS period of a quota [us]; 0 for other settings."""


class RequestSums(NamedTuple):
    """Requested amount of a resource, with and without claims."""

    counted: Amount
    """Sum as the kubelet of this Kubernetes node computes it."""
    uncounted: Amount
    """Sum of a kubelet that does not count claims."""


def request_sums(add: Callable[[bool], Amount], facts: NodeFacts) -> RequestSums:
    """Compute the requested amount with and without claims. ``add`` is called with whether claims count."""
    return RequestSums(add(facts.counts_claims), add(False))


def unknown(knob: SettingId, why: str) -> ExpectedSetting:
    """Return the expected value of a cgroup setting that cannot be computed, with the reason."""
    return ExpectedSetting(knob, (), "", why)


# --- CPU time ----------------------------------------------------------------------------------------------


def cpu_weight(wanted: RequestSums, facts: NodeFacts, *, runtimes: bool = False) -> ExpectedSetting:
    """Return the expected CPU weight (v2) or shares (v1). ``runtimes``: True if the runtime, not the kubelet,
    writes the weight."""
    if isinstance(wanted.counted, UnknownAmount):
        return unknown(SettingId(SettingKind.WEIGHT), wanted.counted.why)
    expected = _weight(wanted.counted, facts, runtimes)
    if isinstance(wanted.uncounted, UnknownAmount):
        return expected
    return _explained(expected, _weight(wanted.uncounted, facts, runtimes).accepted)


def least_weight(why: str, facts: NodeFacts, *, runtimes: bool = False) -> ExpectedSetting:
    """Return the minimum CPU weight as the expected value, with its reason."""
    return _weighted(MIN_SHARES, why, facts, runtimes)


def _weight(amount: Amount, facts: NodeFacts, runtimes: bool) -> ExpectedSetting:
    if amount is None or isinstance(amount, UnknownAmount):
        return least_weight("no request", facts, runtimes=runtimes)
    return _weighted(shares_of(amount.total.milli), amount.text, facts, runtimes)


def _weighted(shares: int, text: str, facts: NodeFacts, runtimes: bool) -> ExpectedSetting:
    arithmetic = f"{text} -> shares {shares}"
    if facts.version == 1:
        return ExpectedSetting(SettingId(SettingKind.WEIGHT), (AcceptedValue(shares),), arithmetic)
    formulas = [(linear_weight(shares), "linear"), (quadratic_weight(shares), "quadratic")]
    if runtimes:  # newer runtimes use the quadratic formula
        formulas.reverse()
    if formulas[0][0] == formulas[1][0]:
        formulas = [(formulas[0][0], "")]
    options = tuple(AcceptedValue(weight, formula) for weight, formula in formulas)
    weights = " or ".join(f"{weight} ({formula})" if formula else str(weight) for weight, formula in formulas)
    return ExpectedSetting(SettingId(SettingKind.WEIGHT), options, f"{arithmetic} -> weight {weights}")


def cpu_quota(wanted: RequestSums, facts: NodeFacts, lifted: str, without: str) -> Iterable[ExpectedSetting]:
    """Yield the expected quota and, if there is one, the expected period.

    Args:
        wanted: CPU limit.
        facts: Facts of the node.
        lifted: Reason why there is no quota despite the limit; empty: none.
        without: Text if there is no limit.
    """
    knob, amount = SettingId(SettingKind.QUOTA), wanted.counted
    if not facts.enforces_quota:
        lifted = "the kubelet sets no quotas"
    if lifted:
        yield ExpectedSetting(knob, (AcceptedValue(NO_LIMIT),), f"no limit: {lifted}")
    elif isinstance(amount, UnknownAmount):
        yield unknown(knob, amount.why)
    elif amount is None or not amount.total:
        yield ExpectedSetting(knob, (AcceptedValue(NO_LIMIT),), without)
    else:
        options = _quotas(amount.total, facts)
        arithmetic = f"{amount.text} -> {options[0].value} us of {facts.period_us}"
        expected = ExpectedSetting(knob, options, arithmetic, over_us=facts.period_us)
        yield _explained(expected, _options(wanted.uncounted, lambda total: _quotas(total, facts)))
        yield ExpectedSetting(
            SettingId(SettingKind.PERIOD), (AcceptedValue(facts.period_us),), "the kubelet's period"
        )


def _quotas(amount: Quantity, facts: NodeFacts) -> tuple[AcceptedValue, ...]:
    exact = quota_of(amount.milli, facts.period_us)
    if facts.driver is not CgroupDriver.SYSTEMD:
        return (AcceptedValue(exact),)
    up = systemd_quota(exact, facts.period_us)
    return (
        (AcceptedValue(exact),)
        if up == exact
        else (AcceptedValue(exact), AcceptedValue(up, "systemd rounds up", rounded=True))
    )


# --- memory and pages --------------------------------------------------------------------------------------


def memory_limit(wanted: RequestSums, facts: NodeFacts, without: str) -> ExpectedSetting:
    """Return the expected memory limit. ``without``: text if there is no limit."""
    knob, amount = SettingId(SettingKind.MEMORY), wanted.counted
    if isinstance(amount, UnknownAmount):
        return unknown(knob, amount.why)
    if amount is None or not amount.total:
        return ExpectedSetting(knob, (AcceptedValue(NO_LIMIT),), without)
    options = _paged(amount.total, facts.page_bytes)
    expected = ExpectedSetting(knob, options, f"{amount.text} -> {options[0].value} bytes")
    return _explained(expected, _options(wanted.uncounted, lambda total: _paged(total, facts.page_bytes)))


def page_limits(size_kib: int, wanted: RequestSums) -> Iterable[ExpectedSetting]:
    """Yield the expected limits of hugepages of one size and of their reservations; 0 without a request."""
    amount = wanted.counted
    for kind in (SettingKind.PAGES, SettingKind.RESERVED):
        knob = SettingId(kind, size_kib)
        if isinstance(amount, UnknownAmount):
            yield unknown(knob, amount.why)
            continue
        options = _paged(amount.total if amount else ZERO, size_kib * 1024)
        text = amount.text if amount else f"no pages of {page_name(size_kib)} requested"
        expected = ExpectedSetting(knob, options, f"{text} -> {options[0].value} bytes")
        if wanted.uncounted is None:
            yield _explained(expected, (AcceptedValue(0),))
        else:
            yield _explained(
                expected, _options(wanted.uncounted, lambda total: _paged(total, size_kib * 1024))
            )


def _paged(amount: Quantity, page_bytes: int) -> tuple[AcceptedValue, ...]:
    exact, kept = amount.value, whole_pages(amount.value, page_bytes)
    if exact == kept:
        return (AcceptedValue(exact),)
    return (
        AcceptedValue(exact),
        AcceptedValue(kept, f"whole pages of {bytes_text(page_bytes)}", rounded=True),
    )


# --- known reasons of wrong values -------------------------------------------------------------------------


def _options(
    amount: Amount, options: Callable[[Quantity], tuple[AcceptedValue, ...]]
) -> tuple[AcceptedValue, ...]:
    return () if amount is None or isinstance(amount, UnknownAmount) else options(amount.total)


def _explained(expected: ExpectedSetting, uncounted: Iterable[AcceptedValue]) -> ExpectedSetting:
    """Add the values of a kubelet that does not count claims to the explained wrong values."""
    right = {option.value for option in expected.accepted}
    why = "the value of a kubelet that does not count claims"
    explains = tuple(AcceptedValue(one.value, why) for one in uncounted if one.value not in right)
    return replace(expected, explains=explains) if explains else expected
