"""The agent's own messages: a Report or an AgentStatus to ``drahealth.v1`` and back. Pure.

Back and forth gives the same value again: the command line shows what the agent knows, not a summary of it.
Left out is what the sockets need to know, and whoever reads them finds in the devices: who declares any.
"""

from functools import lru_cache
from typing import Final, TypeVar

import betterproto

from agent.model.health import Blame, Cause, DeviceHealth, Health, NotApplicable, Note, Severity
from agent.model.report import Report
from agent.model.snapshot import CoreStats
from agent.model.source import SourceSample, SourceState
from agent.model.status import AgentStatus, Subscribers, Tally
from agent.model.time import Instant
from agent.serve.rpc.gen.agent.drahealth import v1

E = TypeVar("E")

# Our enums are text where theirs are numbers, so the two pairs are written out.
BLAMES: Final = {
    Blame.HARDWARE: v1.Blame.HARDWARE,
    Blame.DRIVER: v1.Blame.DRIVER,
    Blame.WORKLOAD: v1.Blame.WORKLOAD,
    Blame.CONFIGURATION: v1.Blame.CONFIGURATION,
    Blame.AGENT: v1.Blame.AGENT,
}
STATES: Final = {
    SourceState.OK: v1.SourceState.OK,
    SourceState.ABSENT: v1.SourceState.ABSENT,
    SourceState.FAILING: v1.SourceState.FAILING,
    SourceState.STALLED: v1.SourceState.STALLED,
    SourceState.STARTING: v1.SourceState.STARTING,
}
_NEVER: Final = Instant(0, 0.0)
_DEVICES_TAG: Final = b"\x1a"  # field 3 of Picture, length-delimited
_SOURCES_TAG: Final = b"\x3a"  # field 7 of Picture, length-delimited
_BEAT_TAG: Final = b"\x18"  # field 3 of Source, varint
_PASSES_TAG: Final = b"\x38"  # field 7 of Source, varint
_HEALTH_OF: Final = {int(health): health for health in Health}
_SEVERITY_OF: Final = {int(severity): severity for severity in Severity}
_BLAME_OF: Final[dict[int, Blame]] = {int(number): blame for blame, number in BLAMES.items()}
_STATE_OF: Final[dict[int, SourceState]] = {int(number): state for state, number in STATES.items()}


def encode_header(report: Report) -> bytes:
    """The whole picture but its devices: what moves all the time, and what seldom does."""
    moving = v1.Picture(
        node=report.node,
        at=_instant(report.at),
        core=_core(report.core),
        groups=report.groups,
    )
    sources = b"".join(map(_encode_source, report.sources))
    notes = b"".join(map(_encode_note, report.notes))
    unjudged = _encode_unjudged(report.not_applicable, report.not_evaluated)
    return bytes(moving) + sources + notes + unjudged


def _encode_source(source: SourceSample) -> bytes:
    """A picture of one source. As with devices, only what moves all the time is encoded each time."""
    beat = _BEAT_TAG + betterproto.encode_varint(source.beat_ns)
    passes = _PASSES_TAG + betterproto.encode_varint(source.passes)
    parts = _steady(source._replace(beat_ns=0, passes=0)) + beat + passes
    return _SOURCES_TAG + betterproto.encode_varint(len(parts)) + parts


@lru_cache(maxsize=128)  # more than there are sources, with one for each GPU
def _steady(source: SourceSample) -> bytes:
    return bytes(_source(source))


@lru_cache(maxsize=1024)
def _encode_note(note: Note) -> bytes:
    return bytes(
        v1.Picture(notes=[v1.Note(subject=note.subject, cause=_cause(note.cause), devices=[*note.devices])])
    )


@lru_cache(maxsize=8)
def _encode_unjudged(
    not_applicable: tuple[NotApplicable, ...], not_evaluated: tuple[NotApplicable, ...]
) -> bytes:
    return bytes(
        v1.Picture(
            not_applicable=[_unjudged(rule) for rule in not_applicable],
            not_evaluated=[_unjudged(rule) for rule in not_evaluated],
        )
    )


def warm_up() -> None:
    """Encodes a picture of nothing: betterproto's first of each message takes it 10 to 30 ms."""
    never = Cause("", Severity.INFO, Blame.AGENT, "", "", _NEVER)
    device = DeviceHealth(
        "", "", "", Health.UNKNOWN, Severity.UNKNOWN, "", _NEVER, _NEVER, 0, (never,), (("", ""),), ""
    )
    source = SourceSample("", SourceState.ABSENT, 0, 0, 0, "")
    encode_header(Report("", _NEVER, notes=(Note("", never),), sources=(source,)))
    encode_device(device)


def encode_device(device: DeviceHealth) -> bytes:
    """A picture of one device and nothing else; the bytes of several pictures make one.

    betterproto takes half a millisecond for a device. Between two pictures little changes but when a
    device was verified, so that is encoded apart: the parts of one message, set end to end, are it.
    """
    parts = _settled(device._replace(verified=_NEVER)) + _verified(device.verified)
    return _DEVICES_TAG + betterproto.encode_varint(len(parts)) + parts


@lru_cache(maxsize=8192)  # more than there are devices: of one that is too small nothing is found again
def _settled(device: DeviceHealth) -> bytes:
    """All of a device that holds still while it is well, or is ill in the same way."""
    return bytes(
        v1.Device(
            pool=device.pool,
            name=device.device,
            kind=device.kind,
            health=v1.Health(device.health),
            severity=v1.Severity(device.severity),
            message=device.message,
            since=_instant(device.since),
            timeout_s=device.timeout_s,
            causes=[_cause(cause) for cause in device.causes],
            attributes=[v1.Attribute(name=name, value=value) for name, value in device.attributes],
            driver=device.driver,
        )
    )


@lru_cache(maxsize=64)  # devices of one source are verified together
def _verified(at: Instant) -> bytes:
    return bytes(v1.Device(verified=_instant(at)))


def report_of(picture: v1.Picture) -> Report:
    """The report that a picture was made of.

    Raises:
        ValueError: it holds a number that none of our enums has; says which field.
    """
    return Report(
        node=picture.node,
        at=_instant_of(picture.at),
        devices=tuple(_device_of(device) for device in picture.devices),
        notes=tuple(Note(note.subject, _cause_of(note.cause), tuple(note.devices)) for note in picture.notes),
        not_applicable=tuple(_unjudged_of(rule) for rule in picture.not_applicable),
        not_evaluated=tuple(_unjudged_of(rule) for rule in picture.not_evaluated),
        sources=tuple(_source_of(source) for source in picture.sources),
        core=_core_of(picture.core),
        groups=picture.groups,
    )


def reply_of(status: AgentStatus) -> v1.StatusReply:
    """The status as a message."""
    return v1.StatusReply(
        version=status.version,
        pid=status.pid,
        started_wall_s=status.started_wall_s,
        cpu_s=status.cpu_s,
        rss_bytes=status.rss_bytes,
        threads=status.threads,
        descriptors=status.descriptors,
        node=status.node,
        at=_instant(status.at or _NEVER),
        publications=status.publications,
        tallies=[
            v1.Tally(severity=v1.Severity(tally.severity), devices=tally.devices) for tally in status.tallies
        ],
        sources=[_source(source) for source in status.sources],
        core=_core(status.core),
        groups=status.groups,
        subscribers=[v1.Subscribers(socket=one.socket, streams=one.streams) for one in status.subscribers],
    )


def status_of(reply: v1.StatusReply) -> AgentStatus:
    """The status that a message was made of.

    Raises:
        ValueError: as :func:`report_of`.
    """
    return AgentStatus(
        version=reply.version,
        pid=reply.pid,
        started_wall_s=reply.started_wall_s,
        cpu_s=reply.cpu_s,
        rss_bytes=reply.rss_bytes,
        threads=reply.threads,
        descriptors=reply.descriptors,
        node=reply.node,
        at=_instant_of(reply.at) if reply.publications else None,
        publications=reply.publications,
        tallies=tuple(Tally(_severity_of(tally.severity), tally.devices) for tally in reply.tallies),
        sources=tuple(_source_of(source) for source in reply.sources),
        core=_core_of(reply.core),
        groups=reply.groups,
        subscribers=tuple(Subscribers(one.socket, one.streams) for one in reply.subscribers),
    )


def _instant(instant: Instant) -> v1.Instant:
    return v1.Instant(mono_ns=instant.mono_ns, wall_s=instant.wall_s)


def _instant_of(instant: v1.Instant) -> Instant:
    return Instant(instant.mono_ns, instant.wall_s)


def _cause(cause: Cause) -> v1.Cause:
    return v1.Cause(
        code=cause.code,
        severity=v1.Severity(cause.severity),
        blame=v1.Blame(BLAMES[cause.blame]),
        evidence=cause.evidence,
        advice=cause.advice,
        since=_instant(cause.since),
    )


def _cause_of(cause: v1.Cause) -> Cause:
    return Cause(
        code=cause.code,
        severity=_severity_of(cause.severity),
        blame=_known(_BLAME_OF, cause.blame, "Cause.blame"),
        evidence=cause.evidence,
        advice=cause.advice,
        since=_instant_of(cause.since),
    )


def _device_of(device: v1.Device) -> DeviceHealth:
    return DeviceHealth(
        pool=device.pool,
        device=device.name,
        kind=device.kind,
        health=_known(_HEALTH_OF, device.health, "Device.health"),
        severity=_severity_of(device.severity),
        message=device.message,
        since=_instant_of(device.since),
        verified=_instant_of(device.verified),
        timeout_s=device.timeout_s,
        causes=tuple(_cause_of(cause) for cause in device.causes),
        attributes=tuple((attribute.name, attribute.value) for attribute in device.attributes),
        driver=device.driver,
    )


def _unjudged(rule: NotApplicable) -> v1.Unjudged:
    return v1.Unjudged(device=rule.device, code=rule.code, reason=rule.reason)


def _unjudged_of(rule: v1.Unjudged) -> NotApplicable:
    return NotApplicable(rule.device, rule.code, rule.reason)


def _source(source: SourceSample) -> v1.Source:
    return v1.Source(
        name=source.name,
        state=v1.SourceState(STATES[source.state]),
        beat_ns=source.beat_ns,
        period_ns=source.period_ns,
        failures=source.failures,
        detail=source.detail,
        passes=source.passes,
        dispensable=not source.vital,  # so that a zero, which is not sent, is what nearly all are
        limit_ns=source.limit_ns,
    )


def _source_of(source: v1.Source) -> SourceSample:
    return SourceSample(
        name=source.name,
        state=_known(_STATE_OF, source.state, "Source.state"),
        beat_ns=source.beat_ns,
        period_ns=source.period_ns,
        failures=source.failures,
        detail=source.detail,
        passes=source.passes,
        vital=not source.dispensable,
        limit_ns=source.limit_ns,
    )


def _core(core: CoreStats) -> v1.Core:
    return v1.Core(**{name: getattr(core, name) for name in CoreStats.__slots__})


def _core_of(core: v1.Core) -> CoreStats:
    return CoreStats(**{name: getattr(core, name) for name in CoreStats.__slots__})


def _severity_of(number: int) -> Severity:
    return _known(_SEVERITY_OF, number, "severity")


def _known(table: dict[int, E], number: int, field: str) -> E:
    if int(number) not in table:
        raise ValueError(f"{field} is {int(number)}, which is none of {', '.join(map(str, table))}")
    return table[int(number)]
