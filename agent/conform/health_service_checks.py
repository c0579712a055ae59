"""Conformance checks of the driver's health service: API versions, delay of lists, end of streams.

The module also has the conformance checks with several simulated kubelets at once: they reconnect,
disconnect or stop reading.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final

from agent.conform.outcomes import (
    CheckOutcome,
    describe_status,
    failed,
    format_count,
    format_seconds,
    join_first,
    not_run,
    passed,
    warned,
    worst_outcome,
)
from agent.conform.session_record import (
    PROPAGATION_S,
    SESSION_MAX_S,
    V1,
    V1ALPHA1,
    ApiVersionStreams,
    RawDeviceKey,
    SessionRecord,
    StoppedReader,
    StreamRecord,
    compare_streams,
    count_lists,
    effective_lease_s,
    ended_by_session,
    evaluate_streams,
    format_device,
    last_reports_at,
    reports_by_device,
)
from agent.model.socket_address import SOCKET_PATH_LIMIT

SOON_S: Final = 1.0
"""Delay of the first health list above which a check warns [s]."""
LATE_S: Final = 5.0
"""Delay of the first health list above which a check fails [s]."""
LISTS_PER_S: Final = 20
"""Number of health lists per second on one stream above which a check warns."""


def check_socket_path(session: SessionRecord) -> CheckOutcome:
    """Measures the length of the service socket's absolute path."""
    size = f"{session.socket}: {format_count(session.socket_size, 'byte')}"
    if session.socket_size > SOCKET_PATH_LIMIT:
        return failed(f"{size}, a socket's limit is {SOCKET_PATH_LIMIT}")
    return passed(size)


def check_v1(session: SessionRecord) -> CheckOutcome:
    """Opens a stream of /v1.DRAResourceHealth/NodeWatchResources."""
    return _check_version(session.version(V1), session.version(V1ALPHA1), warned)


def check_v1alpha1(session: SessionRecord) -> CheckOutcome:
    """Opens a stream of /v1alpha1.DRAResourceHealth/NodeWatchResources."""
    return _check_version(session.version(V1ALPHA1), session.version(V1), failed)


def _check_version(
    version: ApiVersionStreams, other: ApiVersionStreams, missing: Callable[[str], CheckOutcome]
) -> CheckOutcome:
    if version.has_lists:
        return passed(f"{format_count(count_lists(version), 'list')} received")
    if not version.is_unimplemented:
        return not_run("neither a list nor UNIMPLEMENTED: see health.unavailable and health.first_list")
    if other.is_unimplemented:
        return failed(f"not served (UNIMPLEMENTED), and neither is {other.version}")
    return missing(f"not served (UNIMPLEMENTED); {other.version} is")


def check_unavailable(session: SessionRecord) -> CheckOutcome:
    """Opens a stream of each version; if it ends without a list, opens it again 5 s later, as the kubelet
    does."""
    found = []
    for version in session.versions:
        refused = next((stream.ended for stream in version.streams if _is_refused(stream)), None)
        if refused is None:
            continue
        status = f"{version.version}: {describe_status(refused.status, refused.text)}"
        later = [stream for stream in version.streams if stream.opened_s >= refused.at_s]
        first = next((item for stream in later for item in stream.lists), None)
        if first is not None:
            found.append(warned(f"{status}; ready {format_seconds(first.received_s - refused.at_s)} later"))
        else:
            found.append(failed(f"{status}; opened again {format_count(len(later), 'time')}, never ready"))
    if not found and all(version.is_unimplemented for version in session.versions):
        return not_run("neither version is served: see health.v1 and health.v1alpha1")
    return worst_outcome(found, passed("no stream was refused"))


def _is_refused(stream: StreamRecord) -> bool:
    """Return True if the server refused a health stream: it ended before a list, and not as UNIMPLEMENTED."""
    end = stream.ended
    if end is None or stream.lists:
        return False
    return not (end.status == "UNIMPLEMENTED" or stream.goaway or ended_by_session(end))


def check_unknown_method(session: SessionRecord) -> CheckOutcome:
    """Calls a method that the health service does not have, and a method of a service that does not exist."""
    found = [
        warned(f"{result.method}: {describe_status(result.status, result.text)}")
        for result in session.unknown_methods
        if result.status != "UNIMPLEMENTED"
    ]
    if not session.unknown_methods:
        return not_run("no method was called")
    return worst_outcome(found, passed("UNIMPLEMENTED"))


def check_first_list(session: SessionRecord) -> CheckOutcome:
    """Measures the time from opening a stream to its first list."""
    found = []
    for version in session.versions:
        with_lists = next((stream for stream in version.streams if stream.lists), None)
        without_end = next((stream for stream in version.streams if stream.ended is None), None)
        if with_lists is not None:
            delay_s = with_lists.lists[0].received_s - with_lists.opened_s
            outcome = failed if delay_s > LATE_S else warned if delay_s > SOON_S else passed
            found.append(outcome(f"{version.version}: after {format_seconds(delay_s)}"))
        elif without_end is not None:
            waited_s = without_end.closed_s - without_end.opened_s
            found.append(failed(f"{version.version}: no list in {format_seconds(waited_s)}"))
    return worst_outcome(found, not_run("no stream stayed open: see health.unavailable and health.size"))


def check_all_devices_at_once(session: SessionRecord) -> CheckOutcome:
    """Searches for devices that first appear more than 1 s after the first list."""

    def find_late(stream: StreamRecord) -> Iterator[CheckOutcome]:
        began_s = stream.lists[0].received_s
        for key, reports in reports_by_device(stream).items():
            delay_s = reports[0][0] - began_s
            if delay_s > SOON_S:
                yield warned(f"{format_device(key)}: {format_seconds(delay_s)} after the first list")

    known = last_reports_at(session.main.streams, session.window_s)
    return evaluate_streams(session, find_late, passed(f"{format_count(len(known), 'device')} at once"))


def check_stream_stays_open(session: SessionRecord) -> CheckOutcome:
    """Waits for the server to end a stream after its first list."""
    with_lists = [
        (version, stream) for version in session.versions for stream in version.streams if stream.lists
    ]
    found = [
        failed(
            f"{version.version}: {describe_status(stream.ended.status, stream.ended.text)}, "
            f"after {format_seconds(stream.ended.at_s - stream.opened_s)}"
        )
        for version, stream in with_lists
        if stream.ended and not stream.goaway and not ended_by_session(stream.ended)
    ]
    if found or any(stream.ended is None for _, stream in with_lists):
        longest_s = max(stream.closed_s - stream.opened_s for _, stream in with_lists)
        return worst_outcome(found, passed(f"open for {format_seconds(longest_s)}"))
    return not_run("something else ended the streams: see health.goaway, health.size and health.rate")


def check_goaway(session: SessionRecord) -> CheckOutcome:
    """Searches for HTTP/2 GOAWAY on every connection with a stream, and for streams that it ended."""
    found = []
    for stream in session.streams:
        if stream.goaway:
            lasted = format_seconds(stream.closed_s - stream.opened_s)
            outcome = failed if stream.ended else warned
            effect = "its stream ended" if stream.ended else "its stream continued"
            status = describe_status("GOAWAY", stream.goaway)
            found.append(outcome(f"{status}, on a connection of {lasted}; {effect}"))
    if not any(stream.lists for stream in session.streams):
        return worst_outcome(found, not_run("no stream stayed open"))
    return worst_outcome(found, passed(f"none on {format_count(len(session.streams), 'stream')}"))


def check_list_rate(session: SessionRecord) -> CheckOutcome:
    """Counts the lists in each second of each stream. The first lists do not count if each has other devices,
    as a split list has."""

    def find_fast(stream: StreamRecord) -> Iterator[CheckOutcome]:
        lasted = format_seconds(stream.closed_s - stream.opened_s)
        times: list[float] = []
        known: set[RawDeviceKey] = set()
        for item in stream.lists:
            keys = {device.key for device in item.devices}
            if times or not keys or keys & known:
                times.append(item.received_s)
            known |= keys
        most = max((n - bisect_right(times, at_s - 1) for n, at_s in enumerate(times, 1)), default=0)
        if stream.ended and stream.ended.flooded:
            yield failed(f"{len(stream.lists):,} lists in {lasted}, over the limit of the recording")
        elif most > LISTS_PER_S:
            yield warned(f"{most:,} lists in a second")
        elif stream.ended and stream.ended.limit:
            limit = f"{stream.ended.limit} of a stream, which it reached after {lasted}"
            yield not_run(f"the session records {limit}: try a shorter --for")

    lists = format_count(count_lists(session.main), "list")
    return evaluate_streams(session, find_fast, passed(f"{lists} in {format_seconds(session.recorded_s)}"))


def check_versions_agree(session: SessionRecord) -> CheckOutcome:
    """Compares the last reports of v1 and v1alpha1 on each device."""
    first, second = session.version(V1).streams, session.version(V1ALPHA1).streams
    end_s = min(first[-1].closed_s, second[-1].closed_s)
    known = format_count(len(last_reports_at(first, end_s)), "device")
    return worst_outcome(compare_streams(first, second, end_s, V1, V1ALPHA1), passed(f"{known} alike"))


# --- several kubelets at once ------------------------------------------------------------------------------

CAUSAL_DELAY_S: Final = 0.25
"""Longest delay at which an event of the driver counts as the effect of the event before it [s]."""
UNUSUAL_FACTOR: Final = 2
"""A pause between health lists is unusual if it is longer than every other pause times this factor."""
PAUSES_MIN: Final = 3
"""Least number of other pauses between health lists for a pause to be called unusual."""
LONGER_FACTOR: Final = 3
"""Factor by which a longer session is recommended if no health list arrived while a reader had stopped."""
REOPENED: Final = {"cancel": "after a cancel", "close": "on a new connection"}
NOT_CONCURRENT: Final = "no two streams were open at a time: see health.unavailable"
STREAM_ENDED: Final = "a stream ended: see health.ends, health.goaway and health.rate"


def check_reconnect(session: SessionRecord) -> CheckOutcome:
    """Opens a stream on a new connection, cancels it and opens another on the same connection, three times.
    Each must report every device whose lease (health_check_timeout_seconds) still runs."""
    found, slowest_s = [], 0.0
    for reopening in session.reopenings:
        reopened, stream = REOPENED[reopening.after], reopening.stream
        missing, delay_s = _missing_devices(session.main, stream)
        slowest_s = max(slowest_s, delay_s)
        if missing and not stream.goaway:
            names = join_first(map(format_device, sorted(missing)))
            lasted, end = format_seconds(stream.closed_s - stream.opened_s), stream.ended
            status = f", ended: {describe_status(end.status, end.text)}" if end else ""
            found.append(failed(f"{reopened}: {names} missing after {lasted}{status}"))
        elif delay_s > SOON_S:
            found.append(warned(f"{reopened}: complete after {format_seconds(delay_s)}"))
    if not session.reopenings:
        return not_run("the first lists took all the time: see health.first_list")
    times = format_count(len(session.reopenings), "time")
    return worst_outcome(found, passed(f"{times}, complete after {format_seconds(slowest_s)} at most"))


def _missing_devices(main: ApiVersionStreams, stream: StreamRecord) -> tuple[set[RawDeviceKey], float]:
    """Return the devices that a reopened stream lacks, and the delay of the last device that it reports [s].

    The stream is expected to have the devices that the driver had reported before on the streams of the first
    simulated kubelet (``main``), if the kubelet could still use those reports at the end of ``stream``.
    """
    expected = {
        key
        for key, (at_s, device) in last_reports_at(main.streams, stream.opened_s).items()
        if at_s + effective_lease_s(device) > stream.closed_s
    }
    delay_s = 0.0
    for item in stream.lists:
        reported = expected & {device.key for device in item.devices}
        if reported:
            expected -= reported
            delay_s = item.received_s - stream.opened_s
    return expected, delay_s


def check_two_kubelets(session: SessionRecord) -> CheckOutcome:
    """Opens a second connection, and closes it before half of the session has passed.
    Compares the reports on both connections until then, and continues with the first."""
    leaver = session.second_kubelet
    first = _concurrent_stream(session.main, leaver)
    if leaver is None or first is None:
        return not_run(NOT_CONCURRENT)
    if first.ended or leaver.ended:
        return _check_mutual_end(session, first, leaver)
    left_s, waited_s = leaver.closed_s, leaver.closed_s - leaver.opened_s
    if not leaver.lists:
        if waited_s < first.lists[0].received_s - first.opened_s + SOON_S:
            return not_run(
                f"the second stream was open for {format_seconds(waited_s)}: too short, see health.first_list"
            )
        return failed(f"the second stream received nothing in {format_seconds(waited_s)}")
    found = list(compare_streams([first], [leaver], left_s, "the first", "the second"))
    after = _count_lists_between(first, left_s, first.closed_s)
    if not after and _count_lists_between(first, 0, left_s) > 1 and _all_leases_ended(first, left_s):
        remained_s = first.closed_s - left_s
        found.append(
            failed(
                f"the first stream received nothing in the {format_seconds(remained_s)} "
                "since the second closed"
            )
        )
    if not found and not after:
        return not_run(
            f"the first stream received no list in the {format_seconds(first.closed_s - left_s)} since the "
            f"second closed: {_longer_session(session)}"
        )
    known = format_count(len(last_reports_at([leaver], left_s)), "device")
    lists = format_count(after, "list")
    return worst_outcome(
        found, passed(f"{known} alike; the first stream received {lists} after the second closed")
    )


def _longer_session(session: SessionRecord) -> str:
    """Return the advice to record for LONGER_FACTOR times as long, as far as ``--for`` can be longer."""
    if session.window_s >= SESSION_MAX_S:
        return "longer than the longest --for"
    return f"try --for {min(LONGER_FACTOR * session.window_s, SESSION_MAX_S):.0f}s"


def _concurrent_stream(version: ApiVersionStreams, stream: StreamRecord | None) -> StreamRecord | None:
    """Return a stream with lists that was open when `stream` was opened; None: there is none."""
    if stream is None:
        return None
    return next(
        (
            other
            for other in version.streams
            if other.lists and other.opened_s <= stream.opened_s <= other.closed_s
        ),
        None,
    )


def _check_mutual_end(session: SessionRecord, first: StreamRecord, second: StreamRecord) -> CheckOutcome:
    if first.ended and not first.goaway and not ended_by_session(first.ended):
        others = [second, *(reopening.stream for reopening in session.reopenings)]
        events = [
            (at_s, event)
            for other in others
            for at_s, event in ((other.opened_s, "opened"), (other.closed_s, "closed"))
        ]
        before = (event for event in events if event[0] <= first.ended.at_s)
        at_s, event = max(before, default=(-CAUSAL_DELAY_S, ""))
        if first.ended.at_s - at_s < CAUSAL_DELAY_S:
            return failed(
                f"the first stream ended {format_seconds(first.ended.at_s - at_s)} after another {event}"
            )
    if second.ended and not second.goaway and not first.ended and not ended_by_session(second.ended):
        return failed(f"the second stream ended: {describe_status(second.ended.status, second.ended.text)}")
    return not_run(STREAM_ENDED)


def _all_leases_ended(stream: StreamRecord, since_s: float) -> bool:
    leases = [
        at_s + effective_lease_s(device) for at_s, device in last_reports_at([stream], since_s).values()
    ]
    return bool(leases) and max(leases) < stream.closed_s


def check_stopped_reader(session: SessionRecord) -> CheckOutcome:
    """Closes the HTTP/2 window of one connection for more than half of the time, then opens it again.
    Records the lists on the other connections meanwhile, and on this one afterwards."""
    stopped = session.stopped_reader
    others = [
        other
        for version in (session.main, session.other)
        if (other := _concurrent_stream(version, stopped.stream if stopped else None)) is not None
    ]
    if stopped is None:
        return not_run("its stream ended, or received no list: see health.ends and health.first_list")
    if not others:
        return not_run(NOT_CONCURRENT)
    if end := stopped.stream.ended:
        if stopped.stream.goaway or ended_by_session(end) or any(other.ended for other in others):
            return not_run(STREAM_ENDED)
        return warned(f"its stream was ended, {describe_status(end.status, end.text)}")
    unread_s = stopped.resumed_s - stopped.stopped_s
    for other in others:
        if (delayed_s := _delay_by_stopped_reader(other, stopped)) is not None:
            return failed(
                f"another stream received nothing for {format_seconds(delayed_s)}, "
                "until the stopped stream was read again"
            )
    if not all(_count_lists_between(other, stopped.stopped_s, stopped.resumed_s) for other in others):
        if any(other.ended for other in others):
            return not_run(STREAM_ENDED)
        return not_run(
            f"not every other stream received a list in {format_seconds(unread_s)}: "
            f"{_longer_session(session)}"
        )
    return _check_resumed_reader(stopped, others[0])


def _delay_by_stopped_reader(other: StreamRecord, stopped: StoppedReader) -> float | None:
    """Return how long `other` received no health list while another reader had stopped [s].
    None: not unusually long."""
    before = [item.received_s for item in other.lists if item.received_s < stopped.resumed_s]
    after = [item.received_s for item in other.lists if item.received_s >= stopped.resumed_s]
    if not before or not after or after[0] - stopped.resumed_s > CAUSAL_DELAY_S:
        return None
    pauses = [late - early for times in (before, after) for early, late in pairwise(times)]
    silent_s = after[0] - before[-1]
    if len(pauses) < PAUSES_MIN or silent_s <= UNUSUAL_FACTOR * max(pauses) + CAUSAL_DELAY_S:
        return None
    return silent_s


def _count_lists_between(stream: StreamRecord, since_s: float, until_s: float) -> int:
    return sum(since_s < item.received_s < until_s for item in stream.lists)


def _check_resumed_reader(stopped: StoppedReader, other: StreamRecord) -> CheckOutcome:
    end_s = min(other.closed_s, stopped.stream.closed_s)
    received = _count_lists_between(stopped.stream, stopped.resumed_s, end_s)
    by_other = _count_lists_between(other, stopped.resumed_s + PROPAGATION_S, end_s - PROPAGATION_S)
    if by_other and not received:
        return failed(
            f"received nothing after it resumed reading; the others received {format_count(by_other, 'list')}"
        )
    unread_s = stopped.resumed_s - stopped.stopped_s
    lists = format_count(received, "list")
    good = passed(f"the others missed nothing; this stream received {lists} after {format_seconds(unread_s)}")
    return worst_outcome(compare_streams([other], [stopped.stream], end_s, "the others", "this one"), good)
