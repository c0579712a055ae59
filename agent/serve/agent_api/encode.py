"""Encoder of the agent's own messages: a Report or an AgentStatus as bytes of ``drahealth.v1``. Pure.

:mod:`~agent.serve.agent_api.decode` returns an equal value: the command line shows everything that the
agent knows, not a summary. Only ``declaring`` is left out, which sockets need and readers see in the
devices.

A report is sent at every change. betterproto takes half a millisecond for a device, this encoder some
microseconds.
"""

from collections.abc import Iterator
from typing import Final

from agent.model.health import Blame, Cause, DeviceHealth, NotApplicable, Note
from agent.model.report import AgentStatus, Report
from agent.model.snapshot import CoreStats
from agent.model.source import SourceSample, SourceState
from agent.model.time import Instant
from agent.serve.grpc.wire.writer import double, message, number, text, texts

# The model's enums are text; the messages' enums are numbers.
BLAMES: Final = {
    Blame.HARDWARE: 1,
    Blame.DRIVER: 2,
    Blame.WORKLOAD: 3,
    Blame.CONFIGURATION: 4,
    Blame.AGENT: 5,
}
STATES: Final = {
    SourceState.OK: 1,
    SourceState.ABSENT: 2,
    SourceState.FAILING: 3,
    SourceState.STALLED: 4,
    SourceState.STARTING: 5,
}
_NEVER: Final = Instant(0, 0.0)


def encode_report(report: Report) -> Iterator[bytes]:
    """Yield the encoded Report message in chunks; a thousand devices take 15 ms in all."""
    yield text(1, report.node)
    yield message(2, _instant(report.at))
    for device in report.devices:
        yield message(3, _device(device))
    for note in report.notes:
        yield message(4, _note(note))
    for rule in report.not_applicable:
        yield message(5, _skipped_rule(rule))
    for rule in report.not_evaluated:
        yield message(6, _skipped_rule(rule))
    for source in report.sources:
        yield message(7, _source(source))
    yield message(8, _core(report.core))
    yield number(9, report.groups)


def encode_status(status: AgentStatus) -> bytes:
    """Return the encoded StatusReply message."""
    tallies = (number(1, tally.severity) + number(2, tally.devices) for tally in status.tallies)
    subscribers = (text(1, entry.socket) + number(2, entry.streams) for entry in status.subscribers)
    return b"".join(
        (
            text(1, status.version),
            number(2, status.pid),
            double(3, status.started_wall_s),
            double(4, status.cpu_s),
            number(5, status.rss_bytes),
            number(6, status.threads),
            number(7, status.descriptors),
            text(8, status.node),
            message(9, _instant(status.at or _NEVER)),
            number(10, status.publications),
            *(message(11, tally) for tally in tallies),
            *(message(12, _source(source)) for source in status.sources),
            message(13, _core(status.core)),
            number(14, status.groups),
            *(message(15, entry) for entry in subscribers),
        )
    )


def _instant(instant: Instant) -> bytes:
    return number(1, instant.mono_ns) + double(2, instant.wall_s)


def _device(device: DeviceHealth) -> bytes:
    return b"".join(
        (
            text(1, device.pool),
            text(2, device.device),
            text(3, device.kind),
            number(4, device.health),
            number(5, device.severity),
            text(6, device.message),
            message(7, _instant(device.since)),
            message(8, _instant(device.verified)),
            number(9, device.timeout_s),
            *(message(10, _cause(cause)) for cause in device.causes),
            *(message(11, text(1, name) + text(2, value)) for name, value in device.attributes),
            text(12, device.driver),
        )
    )


def _cause(cause: Cause) -> bytes:
    return b"".join(
        (
            text(1, cause.code),
            number(2, cause.severity),
            number(3, BLAMES[cause.blame]),
            text(4, cause.evidence),
            text(5, cause.advice),
            message(6, _instant(cause.since)),
        )
    )


def _note(note: Note) -> bytes:
    return text(1, note.subject) + message(2, _cause(note.cause)) + texts(3, note.devices)


def _skipped_rule(rule: NotApplicable) -> bytes:
    return text(1, rule.device) + text(2, rule.code) + text(3, rule.reason)


def _source(source: SourceSample) -> bytes:
    return b"".join(
        (
            text(1, source.name),
            number(2, STATES[source.state]),
            number(3, source.beat_ns),
            number(4, source.period_ns),
            number(5, source.failures),
            text(6, source.detail),
            number(7, source.passes),
            number(
                8, not source.vital
            ),  # inverted: for nearly all sources the value is zero, which is not sent
            number(9, source.limit_ns),
        )
    )


def _core(core: CoreStats) -> bytes:
    return b"".join(
        (
            number(1, core.passes),
            number(2, core.wakes),
            number(3, core.reads),
            number(4, core.opens),
            number(5, core.descriptors),
            number(6, core.watches),
            number(7, core.kernel_bytes),
            number(8, core.groups_dropped),
            number(9, core.overflows),
            number(10, core.unwatched),
        )
    )
