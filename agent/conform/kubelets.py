"""Checks of several kubelets at once: one that comes again, one that leaves, one that does not read."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from agent.conform.observed import Key, Observed, Stopped, Stream, Watch
from agent.conform.stream_queries import JUST_S, differences, is_ours, known_at, lease_of, name_of
from agent.conform.verdicts import (
    Judgement,
    count,
    failed,
    listed,
    not_run,
    passed,
    said,
    seconds,
    warned,
    worst,
)

SOON_S: Final = 1.0
AT_ONCE_S: Final = 0.25
"""What happens so shortly after something else happens because of it [s]."""
UNUSUAL: Final = 2
"""How many times as long as all others a pause has to be to show something..."""
REGULAR: Final = 3
"""...and how many others there have to be."""
LONGER: Final = 3
"""How many times as long to listen where nothing was said meanwhile."""
AFTER: Final = {"cancel": "after a cancel", "close": "on a new connection"}
ALONE: Final = "no two streams were open at a time: see health.unavailable"
BY_THEMSELVES: Final = "streams end by themselves: see health.ends and health.goaway"


def reconnect(seen: Observed) -> Judgement:
    """Three times a stream is opened on a new connection, cancelled, and another opened on the same one. Each
    has to tell of every device that somebody else believes in."""
    found, slowest_s = [], 0.0
    for reopening in seen.reopenings:
        how, stream = AFTER[reopening.after], reopening.stream
        missing, took_s = _completed(seen.main, stream)
        slowest_s = max(slowest_s, took_s)
        if missing and not stream.goaway:
            names, lasted_s = listed(map(name_of, sorted(missing))), stream.closed_s - stream.opened_s
            end = f", ended: {said(stream.ended.status, stream.ended.text)}" if stream.ended else ""
            found.append(failed(f"{how}: {names} missing after {seconds(lasted_s)}{end}"))
        elif took_s > SOON_S:
            found.append(warned(f"{how}: whole after {seconds(took_s)}"))
    if not seen.reopenings:
        return not_run("the first lists took all the time: see health.first_list")
    times = count(len(seen.reopenings), "time")
    return worst(found, passed(f"{times}, whole after {seconds(slowest_s)} at most"))


def _completed(main: Watch, stream: Stream) -> tuple[set[Key], float]:
    """The devices that the stream should have told of and has not, and how long it took for the others [s].

    It should tell of those that the main watch knew of when it began, and still believed in when it ended.
    """
    expected = {
        key
        for key, (at_s, device) in known_at(main.streams, stream.opened_s).items()
        if at_s + lease_of(device) > stream.closed_s
    }
    took_s = 0.0
    for one in stream.lists:
        told = expected & {device.key for device in one.devices}
        if told:
            expected -= told
            took_s = one.at_s - stream.opened_s
    return expected, took_s


def two_kubelets(seen: Observed) -> Judgement:
    """Two connections listen, and one is closed before the half of the time is over. What both have heard by
    then is compared, and the other is listened to further."""
    leaver = seen.leaver
    first = _beside(seen.main, leaver)
    if leaver is None or first is None:
        return not_run(ALONE)
    if first.ended or leaver.ended:
        return _cut_off(seen, first, leaver)
    left_s, waited_s = leaver.closed_s, leaver.closed_s - leaver.opened_s
    if not leaver.lists:
        if waited_s < first.lists[0].at_s - first.opened_s + SOON_S:
            return not_run(
                f"the second one was there for {seconds(waited_s)}: too short, see health.first_list"
            )
        return failed(f"the second one heard nothing in {seconds(waited_s)}")
    found = list(differences([first], [leaver], left_s, "the first", "the second"))
    after = _heard(first, left_s, first.closed_s)
    if not after and _heard(first, 0, left_s) > 1 and _all_ended(first, left_s):
        stays_s = first.closed_s - left_s
        found.append(failed(f"the first one heard nothing in the {seconds(stays_s)} since the second left"))
    known = count(len(known_at([leaver], left_s)), "device")
    return worst(found, passed(f"{known} alike; the one that stayed heard {count(after, 'list')} more"))


def _beside(watch: Watch, stream: Stream | None) -> Stream | None:
    """The stream of the watch that was open when the other was opened, and had something to hear."""
    if stream is None:
        return None
    beside = (one for one in watch.streams if one.opened_s <= stream.opened_s <= one.closed_s)
    return next((one for one in beside if one.lists), None)


def _cut_off(seen: Observed, first: Stream, leaver: Stream) -> Judgement:
    """Which of them has ended the other, if one has. There are more that come and go than the second one."""
    if first.ended and not first.goaway and not is_ours(first.ended):
        others = [leaver, *(one.stream for one in seen.reopenings)]
        events = [
            (at_s, what) for one in others for at_s, what in ((one.opened_s, "came"), (one.closed_s, "left"))
        ]
        before = (event for event in events if event[0] <= first.ended.at_s)
        at_s, what = max(before, default=(-AT_ONCE_S, ""))
        if first.ended.at_s - at_s < AT_ONCE_S:
            return failed(
                f"the first one's stream ended {seconds(first.ended.at_s - at_s)} after another {what}"
            )
    if leaver.ended and not leaver.goaway and not first.ended and not is_ours(leaver.ended):
        return failed(f"the second one's stream ended: {said(leaver.ended.status, leaver.ended.text)}")
    return not_run(BY_THEMSELVES)


def _all_ended(stream: Stream, since_s: float) -> bool:
    """Whether every lease that was told by then has ended before the stream."""
    leases = [at_s + lease_of(device) for at_s, device in known_at([stream], since_s).values()]
    return bool(leases) and max(leases) < stream.closed_s


def stopped_reader(seen: Observed) -> Judgement:
    """A connection leaves no room to send for over half of the time, then does again. It is listened to what
    the others hear meanwhile, and what this one hears in the end."""
    stopped = seen.stopped
    others = [_beside(watch, stopped.stream if stopped else None) for watch in (seen.main, seen.other)]
    heard = [one for one in others if one is not None]
    if stopped is None or not heard:
        return not_run(ALONE)
    if end := stopped.stream.ended:
        if stopped.stream.goaway or any(other.ended for other in heard):
            return not_run(BY_THEMSELVES)
        return warned(f"its stream was ended, {said(end.status, end.text)}")
    unread_s = stopped.resumed_s - stopped.stopped_s
    for other in heard:
        if (delayed_s := _delayed(other, stopped)) is not None:
            return failed(
                f"another heard nothing for {seconds(delayed_s)}, and at once when this one read again"
            )
    if not all(_heard(other, stopped.stopped_s, stopped.resumed_s) for other in heard):
        longer_s = LONGER * seen.window_s
        return not_run(
            f"not all were told something in these {seconds(unread_s)}: --for {longer_s:.0f}s may do"
        )
    return _caught_up(stopped, heard[0])


def _delayed(other: Stream, stopped: Stopped) -> float | None:
    """For how long the other heard nothing until the reader read again [s]; None: not unusually long."""
    before = [one.at_s for one in other.lists if one.at_s < stopped.resumed_s]
    after = [one.at_s for one in other.lists if one.at_s >= stopped.resumed_s]
    if not before or not after or after[0] - stopped.resumed_s > AT_ONCE_S:
        return None
    pauses = [late - early for times in (before, after) for early, late in pairwise(times)]
    silent_s = after[0] - before[-1]
    if len(pauses) < REGULAR or silent_s <= UNUSUAL * max(pauses) + AT_ONCE_S:
        return None
    return silent_s


def _heard(stream: Stream, since_s: float, until_s: float) -> int:
    return sum(since_s < one.at_s < until_s for one in stream.lists)


def _caught_up(stopped: Stopped, other: Stream) -> Judgement:
    """Whether the reader knows in the end what the other does."""
    end_s = min(other.closed_s, stopped.stream.closed_s)
    mine = _heard(stopped.stream, stopped.resumed_s, end_s)
    theirs = _heard(other, stopped.resumed_s + JUST_S, end_s - JUST_S)
    if theirs and not mine:
        return failed(f"it heard nothing when it read again, the others {count(theirs, 'list')}")
    unread_s = stopped.resumed_s - stopped.stopped_s
    well = passed(f"the others heard all; this one {count(mine, 'list')} after {seconds(unread_s)}")
    return worst(differences([other], [stopped.stream], end_s, "the others", "this one"), well)
