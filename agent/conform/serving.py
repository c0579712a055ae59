"""Checks of the service itself: which versions there are, how soon they speak, and how they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from agent.conform.observed import V1, V1ALPHA1, Observed, Stream, Watch
from agent.conform.stream_queries import (
    differences,
    is_ours,
    known_at,
    lists_of,
    name_of,
    over_streams,
    tellings,
)
from agent.conform.verdicts import Judgement, count, failed, not_run, passed, said, seconds, warned, worst
from agent.model.sockets import PATH_LIMIT

SOON_S: Final = 1.0
LATE_S: Final = 5.0
LISTS_PER_S: Final = 20


def socket_path(seen: Observed) -> Judgement:
    """The length of the service socket's absolute path is read."""
    size = f"{seen.socket}: {count(seen.socket_size, 'byte')}"
    if seen.socket_size > PATH_LIMIT:
        return failed(f"{size}, a socket's limit is {PATH_LIMIT}")
    return passed(size)


def serves_v1(seen: Observed) -> Judgement:
    """/v1.DRAResourceHealth/NodeWatchResources is opened."""
    return _serves(seen.watch(V1), seen.watch(V1ALPHA1), warned)


def serves_v1alpha1(seen: Observed) -> Judgement:
    """/v1alpha1.DRAResourceHealth/NodeWatchResources is opened."""
    return _serves(seen.watch(V1ALPHA1), seen.watch(V1), failed)


def _serves(watch: Watch, other: Watch, missing: Callable[[str], Judgement]) -> Judgement:
    if watch.told:
        return passed(f"{count(lists_of(watch), 'list')} heard")
    if not watch.unimplemented:
        return not_run("neither a list nor UNIMPLEMENTED: see health.unavailable and health.first_list")
    if other.unimplemented:
        return failed(f"UNIMPLEMENTED, and so is {other.version}")
    return missing(f"UNIMPLEMENTED; {other.version} is not")


def unavailable(seen: Observed) -> Judgement:
    """Each version is opened; where that ends without a list, again 5 s later, as the kubelet does."""
    found = []
    for watch in seen.watches:
        refused = next((one.ended for one in watch.streams if _is_refused(one)), None)
        if refused is None:
            continue
        how = f"{watch.version}: {said(refused.status, refused.text)}"
        first = next((one for stream in watch.streams for one in stream.lists), None)
        if first is not None:
            found.append(warned(f"{how}; ready {seconds(first.at_s - refused.at_s)} later"))
        else:
            found.append(failed(f"{how}; opened {count(len(watch.streams), 'time')}, never ready"))
    return worst(found, passed("no stream was turned away"))


def _is_refused(stream: Stream) -> bool:
    """Whether it ended before it said anything; not because there is none, and not by our side."""
    end = stream.ended
    if end is None or stream.lists:
        return False
    return not (end.status == "UNIMPLEMENTED" or stream.goaway or is_ours(end))


def unknown_method(seen: Observed) -> Judgement:
    """A method that the health service does not have is called, and a service that nobody has."""
    found = [
        warned(f"{answer.what}: {said(answer.status, answer.text)}")
        for answer in seen.unknown
        if answer.status != "UNIMPLEMENTED"
    ]
    return worst(found, passed("UNIMPLEMENTED"))


def first_list(seen: Observed) -> Judgement:
    """The time from opening a stream to its first list is measured."""
    found = []
    for watch in seen.watches:
        told = next((one for one in watch.streams if one.lists), None)
        silent = next((one for one in watch.streams if one.ended is None), None)
        if told is not None:
            took_s = told.lists[0].at_s - told.opened_s
            judge = failed if took_s > LATE_S else warned if took_s > SOON_S else passed
            found.append(judge(f"{watch.version}: after {seconds(took_s)}"))
        elif silent is not None:
            found.append(failed(f"{watch.version}: none in {seconds(silent.closed_s - silent.opened_s)}"))
    return worst(found, not_run("no stream stayed open: see health.unavailable and health.size"))


def whole(seen: Observed) -> Judgement:
    """Devices are looked for that are told of for the first time over 1 s after the first list."""

    def late(stream: Stream) -> Iterator[Judgement]:
        began_s = stream.lists[0].at_s
        for key, told in tellings(stream).items():
            after_s = told[0][0] - began_s
            if after_s > SOON_S:
                yield warned(f"{name_of(key)}: {seconds(after_s)} after the first list")

    known = known_at(seen.main.streams, seen.window_s)
    return over_streams(seen, late, passed(f"{count(len(known), 'device')} at once"))


def ends(seen: Observed) -> Judgement:
    """It is waited for streams to end by themselves once they have told something."""
    told = [(watch, one) for watch in seen.watches for one in watch.streams if one.lists]
    found = [
        failed(
            f"{watch.version}: {said(one.ended.status, one.ended.text)}, "
            f"after {seconds(one.ended.at_s - one.opened_s)}"
        )
        for watch, one in told
        if one.ended and not one.goaway and not is_ours(one.ended)
    ]
    if found or any(one.ended is None for _, one in told):
        longest_s = max(one.closed_s - one.opened_s for _, one in told)
        return worst(found, passed(f"open for {seconds(longest_s)}"))
    return not_run("something else ended them: see health.goaway, health.size and health.rate")


def goaway(seen: Observed) -> Judgement:
    """HTTP/2 GOAWAY is looked for on every connection with a stream, and whether that ended the stream."""
    found = [
        (failed if one.ended else warned)(
            f"{said('GOAWAY', one.goaway)}, on a connection of {seconds(one.closed_s - one.opened_s)}; "
            f"{'its stream ended' if one.ended else 'its stream went on'}"
        )
        for one in seen.streams
        if one.goaway
    ]
    return worst(found, passed(f"none on {count(len(seen.streams), 'stream')}"))


def rate(seen: Observed) -> Judgement:
    """The lists of a stream are counted."""

    def fast(stream: Stream) -> Iterator[Judgement]:
        lasted_s = max(stream.closed_s - stream.opened_s, SOON_S)
        number = f"{count(len(stream.lists), 'list')} in {seconds(lasted_s)}"
        if stream.ended and stream.ended.flooded:
            yield failed(f"{number}, more than are remembered here")
        elif len(stream.lists) / lasted_s > LISTS_PER_S:
            yield warned(number)

    lists = count(lists_of(seen.main), "list")
    return over_streams(seen, fast, passed(f"{lists} in {seconds(seen.window_s)}"))


def versions_agree(seen: Observed) -> Judgement:
    """What v1 and v1alpha1 have told of each device when the listening ends is compared."""
    one, other = seen.watch(V1).streams, seen.watch(V1ALPHA1).streams
    end_s = min(one[-1].closed_s, other[-1].closed_s)
    known = count(len(known_at(one, end_s)), "device")
    return worst(differences(one, other, end_s, V1, V1ALPHA1), passed(f"{known} alike"))
