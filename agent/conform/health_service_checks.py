"""Conformance checks of the driver's health service: API versions, delay of lists, end of streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from agent.conform.outcomes import (
    CheckOutcome,
    describe_status,
    failed,
    format_count,
    format_seconds,
    not_run,
    passed,
    warned,
    worst_outcome,
)
from agent.conform.session_record import V1, V1ALPHA1, ApiVersionStreams, SessionRecord, StreamRecord
from agent.conform.stream_queries import (
    compare_streams,
    count_lists,
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
        first = next((item for stream in version.streams for item in stream.lists), None)
        if first is not None:
            found.append(warned(f"{status}; ready {format_seconds(first.received_s - refused.at_s)} later"))
        else:
            found.append(
                failed(f"{status}; opened {format_count(len(version.streams), 'time')}, never ready")
            )
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

    def late(stream: StreamRecord) -> Iterator[CheckOutcome]:
        began_s = stream.lists[0].received_s
        for key, reports in reports_by_device(stream).items():
            delay_s = reports[0][0] - began_s
            if delay_s > SOON_S:
                yield warned(f"{format_device(key)}: {format_seconds(delay_s)} after the first list")

    known = last_reports_at(session.main.streams, session.window_s)
    return evaluate_streams(session, late, passed(f"{format_count(len(known), 'device')} at once"))


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
    """Counts the lists of each stream per second."""

    def fast(stream: StreamRecord) -> Iterator[CheckOutcome]:
        lasted_s = max(stream.closed_s - stream.opened_s, SOON_S)
        number = f"{format_count(len(stream.lists), 'list')} in {format_seconds(lasted_s)}"
        if stream.ended and stream.ended.flooded:
            yield failed(f"{number}, over the limit of the recording")
        elif len(stream.lists) / lasted_s > LISTS_PER_S:
            yield warned(number)

    lists = format_count(count_lists(session.main), "list")
    return evaluate_streams(session, fast, passed(f"{lists} in {format_seconds(session.recorded_s)}"))


def check_versions_agree(session: SessionRecord) -> CheckOutcome:
    """Compares the last reports of v1 and v1alpha1 on each device."""
    first, second = session.version(V1).streams, session.version(V1ALPHA1).streams
    end_s = min(first[-1].closed_s, second[-1].closed_s)
    known = format_count(len(last_reports_at(first, end_s)), "device")
    return worst_outcome(compare_streams(first, second, end_s, V1, V1ALPHA1), passed(f"{known} alike"))
