"""Conformance checks with several simulated kubelets at once: they reconnect, disconnect or stop reading."""

from __future__ import annotations

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
    ApiVersionStreams,
    RawDeviceKey,
    SessionRecord,
    StoppedReader,
    StreamRecord,
)
from agent.conform.stream_queries import (
    PROPAGATION_S,
    compare_streams,
    effective_lease_s,
    ended_by_session,
    format_device,
    last_reports_at,
)

SOON_S: Final = 1.0
"""Delay of a health list above which a check warns [s]."""
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
ENDED_BY_SERVER: Final = "the server ends streams: see health.ends and health.goaway"


def check_reconnect(session: SessionRecord) -> CheckOutcome:
    """Opens a stream on a new connection, cancels it and opens another on the same connection, three times.
    Each must report every device whose lease (health_check_timeout_seconds) still runs."""
    found, slowest_s = [], 0.0
    for reopening in session.reopenings:
        reopened, stream = REOPENED[reopening.after], reopening.stream
        missing, delay_s = _missing_devices(session.main, stream)
        slowest_s = max(slowest_s, delay_s)
        if missing and not stream.goaway:
            names, lasted_s = (
                join_first(map(format_device, sorted(missing))),
                stream.closed_s - stream.opened_s,
            )
            end = (
                f", ended: {describe_status(stream.ended.status, stream.ended.text)}" if stream.ended else ""
            )
            found.append(failed(f"{reopened}: {names} missing after {format_seconds(lasted_s)}{end}"))
        elif delay_s > SOON_S:
            found.append(warned(f"{reopened}: complete after {format_seconds(delay_s)}"))
    if not session.reopenings:
        return not_run("the first lists took all the time: see health.first_list")
    times = format_count(len(session.reopenings), "time")
    return worst_outcome(found, passed(f"{times}, complete after {format_seconds(slowest_s)} at most"))


def _missing_devices(main: ApiVersionStreams, stream: StreamRecord) -> tuple[set[RawDeviceKey], float]:
    """Return the devices that a reopened stream lacks, and the delay of the last device that it reports [s].

    Expected are the devices that the driver had reported before on the streams of the first simulated kubelet
    (``main``), if the kubelet could still use those reports at the end of ``stream``.
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
        longer_s = LONGER_FACTOR * session.window_s
        return not_run(
            f"the first stream received no list in the {format_seconds(first.closed_s - left_s)} since the "
            f"second closed: try --for {longer_s:.0f}s"
        )
    known = format_count(len(last_reports_at([leaver], left_s)), "device")
    lists = format_count(after, "list")
    return worst_outcome(
        found, passed(f"{known} alike; the first stream received {lists} after the second closed")
    )


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
    return not_run(ENDED_BY_SERVER)


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
    if stopped is None or not others:
        return not_run(NOT_CONCURRENT)
    if end := stopped.stream.ended:
        if stopped.stream.goaway or any(other.ended for other in others):
            return not_run(ENDED_BY_SERVER)
        return warned(f"its stream was ended, {describe_status(end.status, end.text)}")
    unread_s = stopped.resumed_s - stopped.stopped_s
    for other in others:
        if (delayed_s := _delay_by_stopped_reader(other, stopped)) is not None:
            return failed(
                f"another stream received nothing for {format_seconds(delayed_s)}, "
                "until the stopped stream was read again"
            )
    if not all(_count_lists_between(other, stopped.stopped_s, stopped.resumed_s) for other in others):
        longer_s = LONGER_FACTOR * session.window_s
        return not_run(
            f"not every other stream received a list in {format_seconds(unread_s)}: try --for {longer_s:.0f}s"
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
