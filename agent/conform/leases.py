"""Checks of leases: how long the kubelet may believe a verdict, and whether it is told again in time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from agent.conform.observed import MOST_S, Observed, Stream
from agent.conform.stream_queries import (
    DEFAULT_LEASE_S,
    OVERFLOW_S,
    entries,
    lease_of,
    lists_of,
    name_of,
    over_streams,
    steps,
    tellings,
)
from agent.conform.verdicts import Judgement, Verdict, count, failed, not_run, passed, seconds, warned

SHORT_S: Final = 2
LONG_S: Final = 86_400
MARGIN_S: Final = 5
"""What to listen for beyond a lease [s]."""
ENDED_BY_LEASE: Final = (1, 2)
"""Healthy and Unhealthy. Unknown stays what it is, whether or not it is told again."""


def heartbeat(seen: Observed) -> Judgement:
    """The time between two tellings of a device, and since the last, is compared with its lease."""
    kept: list[float] = []
    waiting: list[float] = []

    def gaps(stream: Stream) -> Iterator[Judgement]:
        for key, told in tellings(stream).items():
            ends = [*(at_s for at_s, _ in told[1:]), stream.closed_s]
            for (at_s, device), end_s in zip(told, ends, strict=True):
                if device.health not in ENDED_BY_LEASE or device.lease_s > OVERFLOW_S:
                    continue
                lease_s, gap_s = lease_of(device), end_s - at_s
                words = f"{name_of(key)}: {seconds(gap_s)} without a word, its lease is {lease_s:,.0f} s"
                if gap_s > lease_s:
                    yield failed(words)
                elif len(told) == 1:
                    waiting.append(lease_s)
                elif gap_s > lease_s / 2:
                    yield warned(words)
                else:
                    kept.append(gap_s)

    judged = over_streams(seen, gaps, passed(""))
    if judged.verdict is not Verdict.PASS:
        return judged
    if not kept:
        return not_run(_undecided(waiting) if waiting else "every device is Unknown, and none can become so")
    some = f"; {_undecided(waiting)}" if waiting else ""
    return passed(f"again after {seconds(max(kept))} at most{some}")


def _undecided(leases: list[float]) -> str:
    enough_s = max(leases) + MARGIN_S
    what = f"told once, with leases of up to {max(leases):,.0f} s"
    return (
        f"{what}: --for {enough_s:.0f}s would do" if enough_s <= MOST_S else f"{what}: nobody waits so long"
    )


def lease(seen: Observed) -> Judgement:
    """Each health_check_timeout_seconds is read."""

    def odd(stream: Stream) -> Iterator[Judgement]:
        for key, lease_s in dict.fromkeys((device.key, device.lease_s) for device in entries(stream)):
            words = f"{name_of(key)}: {lease_s:,} s"
            if lease_s > OVERFLOW_S:
                yield failed(f"{words}, more than {OVERFLOW_S:,} s")
            elif lease_s > LONG_S or lease_s < 0 or 0 < lease_s <= SHORT_S:
                yield warned(words)

    told = {device.lease_s for stream in seen.main.streams for device in entries(stream)}
    if not told:
        return not_run("no device was told of")
    words = f"{min(told):,} s" if len(told) == 1 else f"{min(told):,} to {max(told):,} s"
    return over_streams(seen, odd, passed(words if min(told) else f"{words}; 0 is {DEFAULT_LEASE_S} s"))


def stable_lease(seen: Observed) -> Judgement:
    """Each lease is compared with that of the list before. One that changes after a gap longer than itself
    does not count: a kubelet must be made to see a change then."""

    def moved(stream: Stream) -> Iterator[Judgement]:
        for key, (before_s, before), (at_s, after) in steps(stream):
            if before.lease_s != after.lease_s and at_s - before_s <= lease_of(before):
                yield warned(f"{name_of(key)}: {before.lease_s:,} s, then {after.lease_s:,} s")

    return over_streams(seen, moved, passed(f"the same in {count(lists_of(seen.main), 'list')}"))
