"""Client of the agent's API, and of any DRA driver's health API, for the command line.

Used only in the event loop.

Whatever a server sends, the result is a Report, an AgentStatus, or an exception with the socket and the
problem.

The module also has the conversion of decoded ``drahealth.v1`` messages to a Report or an AgentStatus. The
conversion functions are pure.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import betterproto
from grpclib.const import Cardinality, Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from agent.errors import AgentUnreachable, FaultStillPresent, PermissionDeniedError, UsageError
from agent.model.cleared_faults import ClearedFault, ClearRefusal, ClearResult
from agent.model.gpu import NvmlCallCost, NvmlCosts
from agent.model.health import Cause, DeviceHealth, Health, NonDeviceCause, NotApplicable, Severity
from agent.model.reading import SourceSample
from agent.model.report import (
    AgentStatus,
    ClusterStatus,
    ConfigReload,
    PartsStatus,
    RepairCount,
    Report,
    SentinelStatus,
    SeverityCount,
    SocketSubscriberCounts,
    StateFile,
    WrittenNodeCondition,
)
from agent.model.snapshot import NativeCoreStats
from agent.model.time import NS, Instant
from agent.serve.agent_api.encode import BLAMES, REFUSALS, REPAIRS, STATES
from agent.serve.grpc.channel import UnixChannel
from agent.serve.grpc.gen.agent.drahealth import v1 as agent_v1
from agent.serve.grpc.gen.health_v1 import v1
from agent.serve.grpc.hardened import OBSERVER_HEADER
from agent.serve.health.service import METHODS
from agent.serve.sockets import NO_SERVER, NO_SOCKET, connection_failure_reason
from agent.system.timing import read_clocks

E = TypeVar("E")

_HEALTH_OF: Final = {int(health): health for health in Health}
_SEVERITY_OF: Final = {int(severity): severity for severity in Severity}
_BLAME_OF: Final = {number: blame for blame, number in BLAMES.items()}
_REPAIR_OF: Final = {number: repair for repair, number in REPAIRS.items()}
_REFUSAL_OF: Final = {number: refusal for refusal, number in REFUSALS.items()}
_STATE_OF: Final = {number: state for state, number in STATES.items()}


def decode_report(message: agent_v1.Report) -> Report:
    """Convert a decoded Report message to a Report.

    Raises ValueError with the field if an enum value is unknown.
    """
    return Report(
        node=message.node,
        at=_instant_of(message.at),
        devices=tuple(_device_of(device) for device in message.devices),
        notes=tuple(
            NonDeviceCause(note.subject, _cause_of(note.cause), tuple(note.devices)) for note in message.notes
        ),
        not_applicable=tuple(_skipped_rule_of(rule) for rule in message.not_applicable),
        not_evaluated=tuple(_skipped_rule_of(rule) for rule in message.not_evaluated),
        sources=tuple(_source_of(source) for source in message.sources),
        core=_core_of(message.core),
        groups=message.groups,
        cleared=tuple(map(_cleared_fault_of, message.cleared)),
    )


def decode_clear_reply(reply: agent_v1.ClearReply) -> ClearResult:
    """Convert a decoded ClearReply message to a ClearResult.

    Raises ValueError if the kind of the refusal is unknown.
    """
    number = int(reply.refusal)
    refusal = _enum_value(_REFUSAL_OF, number, "ClearReply.refusal") if number else None
    return ClearResult(0, tuple(map(_cleared_fault_of, reply.cleared)), refusal=refusal, reason=reply.reason)


def _cleared_fault_of(record: agent_v1.ClearedFault) -> ClearedFault:
    return ClearedFault(
        record.device, record.code, record.at_wall_s, record.uid, record.pid, record.login_uid
    )


def decode_status(reply: agent_v1.StatusReply) -> AgentStatus:
    """Convert a decoded StatusReply message to an AgentStatus.

    Raises ValueError with the field if an enum value is unknown.
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
        tallies=tuple(SeverityCount(_severity_of(tally.severity), tally.devices) for tally in reply.tallies),
        sources=tuple(_source_of(source) for source in reply.sources),
        core=_core_of(reply.core),
        groups=reply.groups,
        subscribers=tuple(
            SocketSubscriberCounts(
                entry.socket, entry.streams, entry.connections, entry.lists, entry.sent_bytes
            )
            for entry in reply.subscribers
        ),
        repairs=tuple(
            RepairCount(_enum_value(_REPAIR_OF, count.repair, "RepairCount.repair"), count.devices)
            for count in reply.repairs
        ),
        parts=_parts_of(reply),
    )


def _parts_of(reply: agent_v1.StatusReply) -> PartsStatus:
    reload, sent = reply.config_reload, reply.nvsentinel
    return PartsStatus(
        ConfigReload(reload.at_wall_s, reload.error, tuple(reload.changes)) if reload.at_wall_s else None,
        _cluster_of(reply.cluster) if reply.cluster.lease else None,
        SentinelStatus(sent.socket, sent.events, sent.failures, sent.error) if sent.socket else None,
        _nvml_of(reply.nvml) if reply.nvml.period_s else None,
        reply.lost_snapshots,
        tuple(StateFile(file.name, file.error) for file in reply.files),
    )


def _nvml_of(costs: agent_v1.NvmlCosts) -> NvmlCosts:
    calls = (NvmlCallCost(call.kind, call.calls, call.cpu_s, call.duration_s) for call in costs.calls)
    return NvmlCosts(costs.cpu_s, costs.switches, costs.period_s, tuple(calls))


def _cluster_of(cluster: agent_v1.ClusterStatus) -> ClusterStatus:
    return ClusterStatus(
        lease=cluster.lease,
        holder=cluster.holder,
        is_held=cluster.is_held,
        requests=cluster.requests,
        failures=cluster.failures,
        error=cluster.error,
        success_wall_s=cluster.success_wall_s or None,
        conditions=tuple(
            WrittenNodeCondition(condition.type, condition.status, condition.reason)
            for condition in cluster.conditions
        ),
        maintenance=tuple(cluster.maintenance),
        events=cluster.events,
        taint_rules=cluster.taint_rules,
    )


def _instant_of(instant: agent_v1.Instant) -> Instant:
    return Instant(instant.mono_ns, instant.wall_s)


def _cause_of(cause: agent_v1.Cause) -> Cause:
    return Cause(
        code=cause.code,
        severity=_severity_of(cause.severity),
        blame=_enum_value(_BLAME_OF, cause.blame, "Cause.blame"),
        evidence=cause.evidence,
        advice=cause.advice,
        since=_instant_of(cause.since),
        repair=_enum_value(_REPAIR_OF, cause.repair, "Cause.repair"),
    )


def _device_of(device: agent_v1.Device) -> DeviceHealth:
    return DeviceHealth(
        pool=device.pool,
        device=device.name,
        kind=device.kind,
        health=_enum_value(_HEALTH_OF, device.health, "Device.health"),
        severity=_severity_of(device.severity),
        message=device.message,
        since=_instant_of(device.since),
        verified=_instant_of(device.verified),
        timeout_s=device.timeout_s,
        causes=tuple(_cause_of(cause) for cause in device.causes),
        attributes=tuple((attribute.name, attribute.value) for attribute in device.attributes),
        driver=device.driver,
    )


def _skipped_rule_of(rule: agent_v1.SkippedRule) -> NotApplicable:
    return NotApplicable(rule.device, rule.code, rule.reason)


def _source_of(source: agent_v1.Source) -> SourceSample:
    return SourceSample(
        name=source.name,
        state=_enum_value(_STATE_OF, source.state, "Source.state"),
        beat_ns=source.beat_ns,
        period_ns=source.period_ns,
        failures=source.failures,
        detail=source.detail,
        passes=source.passes,
        vital=not source.dispensable,
        limit_ns=source.limit_ns,
    )


def _core_of(core: agent_v1.Core) -> NativeCoreStats:
    return NativeCoreStats(**{name: getattr(core, name) for name in NativeCoreStats.__slots__})


def _severity_of(number: int) -> Severity:
    return _enum_value(_SEVERITY_OF, number, "severity")


def _enum_value(table: dict[int, E], number: int, field: str) -> E:
    if int(number) not in table:
        raise ValueError(f"{field}: {int(number)} is unknown; must be one of {', '.join(map(str, table))}")
    return table[int(number)]


# --- the client --------------------------------------------------------------------------------------------

DEFAULT_LEASE_S: Final = 30
"""Lease that the kubelet gives a device whose timeout is not positive [s]."""

LONGEST_LEASE_S: Final = 86_400
"""Longest lease of a device that the client accepts [s]; a longer one is shortened to it."""

HEALTHS: Final[dict[int, Health]] = {int(health): health for health in Health}

# The health API has no severity; HEALTHY with a message is DEGRADED.
SEVERITIES: Final = {
    Health.UNKNOWN: Severity.UNKNOWN,
    Health.HEALTHY: Severity.OK,
    Health.UNHEALTHY: Severity.UNHEALTHY,
}


class StreamHealth:
    """Current health of all devices, merged from the device lists of a health stream as the kubelet does.

    A device that a list omits keeps its last health until its lease (``health_check_timeout_seconds``) ends,
    and is Unknown from then on. No device is ever removed.
    """

    def __init__(self) -> None:
        self._devices: dict[tuple[str, str], DeviceHealth] = {}

    def update(self, response: v1.NodeWatchResourcesResponse, now: Instant) -> None:
        """Merge a device list that was received at ``now``; a device's last entry in the list counts."""
        for entry in response.devices:
            key = (entry.device.pool_name, entry.device.device_name)
            self._devices[key] = _merge_entry(entry, self._devices.get(key), now)

    def expire(self, now: Instant) -> None:
        """Set devices to Unknown whose lease (validity of their last health) has ended."""
        for key, device in self._devices.items():
            if device.health is not Health.UNKNOWN and _expiry_ns(device) <= now.mono_ns:
                self._devices[key] = device._replace(
                    health=Health.UNKNOWN,
                    severity=Severity.UNKNOWN,
                    message=f"not confirmed within its lease of {device.timeout_s} s",
                    since=now,
                )

    def expires_in_s(self, now: Instant) -> float | None:
        """Return the time until the health of the next device expires [s]; None: no health can expire."""
        leases = [
            _expiry_ns(device) for device in self._devices.values() if device.health is not Health.UNKNOWN
        ]
        return max(0, min(leases) - now.mono_ns) / NS if leases else None

    def report(self, now: Instant) -> Report:
        """Return a Report with the devices only, sorted by pool and name."""
        devices = sorted(self._devices.values(), key=lambda device: (device.pool, device.device))
        return Report(node="", at=now, devices=tuple(devices))


def _expiry_ns(device: DeviceHealth) -> int:
    return device.verified.mono_ns + device.timeout_s * NS


def _merge_entry(entry: v1.DeviceHealth, before: DeviceHealth | None, now: Instant) -> DeviceHealth:
    health, message = HEALTHS.get(int(entry.health)), entry.message
    if health is None:  # the kubelet also treats it as Unknown
        health = Health.UNKNOWN
        message = f"the driver reports health {int(entry.health)}, must be 0, 1 or 2; {message}".removesuffix(
            "; "
        )
    lease_s = entry.health_check_timeout_seconds
    device = DeviceHealth(
        pool=entry.device.pool_name,
        device=entry.device.device_name,
        kind="",
        health=health,
        severity=Severity.DEGRADED if health is Health.HEALTHY and message else SEVERITIES[health],
        message=message,
        since=now,
        verified=Instant(now.mono_ns, float(entry.last_updated_time)),
        timeout_s=min(lease_s, LONGEST_LEASE_S) if lease_s > 0 else DEFAULT_LEASE_S,
    )
    if before and (before.health, before.message) == (health, message):
        return device._replace(since=before.since)
    return device


M = TypeVar("M", bound=betterproto.Message)

STATUS_TIMEOUT_S: Final = 5.0
"""Timeout for the answer to :func:`fetch_status` [s]."""
SILENCE_S: Final = 3.0
"""Longest pause of a server that has begun to answer [s]: it may encode a report on a busy machine."""
PAUSE_SLICES: Final = 10
"""Number of parts in which a pause of the server is measured. A block of this process's event loop, which
decodes other answers meanwhile, counts as one part, however long it takes."""
TRANSFER_S: Final = 60.0
"""Longest time for the transfer of one report, even if the server never pauses for long [s]."""


async def watch_reports(socket: Path, channel: UnixChannel | None = None) -> AsyncGenerator[Report]:
    """Yield the current report of a socket, and each later one, without end.

    From an agent's own socket these are complete reports. From a driver's socket, which serves the health
    API v1 or v1alpha1, they hold only the devices of :class:`StreamHealth`, without causes. ``channel``, if
    given, is the connection to use, which is closed at the end.

    Raises:
        AgentUnreachable: No process serves the socket, or its server stopped, serves none of these APIs, or
            sent an invalid message.
        PermissionDeniedError: This process may not open the socket.
    """
    with _errors_with_socket(socket):
        channel = channel or UnixChannel(os.fspath(socket))
        try:
            for reports in (
                _agent_reports(channel),
                *(_health_reports(channel, method) for method in METHODS),
            ):
                async with contextlib.aclosing(reports):
                    try:
                        async for report in reports:
                            yield report
                    except GRPCError as error:
                        if error.status is Status.UNIMPLEMENTED:
                            continue
                        raise
                raise AgentUnreachable(
                    f"socket {socket}: the server ended the stream of health reports; it may be shutting down"
                )
            raise AgentUnreachable(
                f"socket {socket}: its server has neither drahealth.v1.Agent nor a DRA health API; choose "
                "another socket"
            )
        finally:
            channel.close()


async def first_report(socket: Path, *, first_byte_s: float, silence_s: float = SILENCE_S) -> Report:
    """Return the current report of a socket, with time limits on the pauses of its transfer.

    A report of thousands of devices takes seconds on a busy machine. With one fixed timeout, a server that
    still sends would be taken for a hung server.

    Args:
        socket: Socket as in :func:`watch_reports`, whose errors are raised.
        first_byte_s: Time in which the server must send its first byte [s].
        silence_s: Longest pause between its bytes afterwards [s].

    Raises:
        TimeoutError: The server sends nothing for one of these times, or no report within TRANSFER_S.
    """
    channel = UnixChannel(os.fspath(socket))
    async with contextlib.aclosing(watch_reports(socket, channel)) as reports:
        reading = asyncio.ensure_future(anext(reports))
        try:
            end_s = time.monotonic() + TRANSFER_S
            received, pause_s, slices = 0, first_byte_s, 0
            while slices < PAUSE_SLICES and time.monotonic() < end_s:
                await asyncio.wait({reading}, timeout=pause_s / PAUSE_SLICES)
                if reading.done():
                    return reading.result()
                slices += 1
                if channel.received_bytes != received:
                    received, pause_s, slices = channel.received_bytes, silence_s, 0
            raise TimeoutError
        finally:
            reading.cancel()
            await asyncio.wait({reading})


async def fetch_status(socket: Path) -> AgentStatus:
    """Return the status of the agent that serves a socket.

    Raises:
        AgentUnreachable: No process serves the socket, or it sent no valid answer within
            :data:`STATUS_TIMEOUT_S`.
        PermissionDeniedError: This process may not open the socket.
    """
    with _errors_with_socket(socket):
        channel = UnixChannel(os.fspath(socket))
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                stub = agent_v1.AgentStub(channel)
                return decode_status(await stub.status(agent_v1.StatusRequest()))
        finally:
            channel.close()


async def clear_faults(socket: Path, device: str, code: str) -> tuple[ClearedFault, ...]:
    """Ask an agent to clear the remembered faults of a device; return the cleared faults.

    Args:
        socket: Path of the agent's socket.
        device: Name of the device as the operator gives it.
        code: Code of the one fault to clear; empty: clear all remembered faults of the device.

    Raises:
        UsageError: The device is not known, has no such fault, or the fault is not remembered and so
            cannot be cleared: it ends when readings no longer show it.
        FaultStillPresent: A reading still shows a fault of the device.
        AgentUnreachable: No agent serves the socket, or it gave no valid answer.
        PermissionDeniedError: This process may not open the socket, or runs neither as root nor as the agent.
    """
    effect = f"; the faults may be cleared: 'drahealth explain {device}' shows it"
    with _errors_with_socket(socket, effect):
        channel = UnixChannel(os.fspath(socket))
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                stub = agent_v1.AgentStub(channel)
                names = (os.fsencode(name).decode(errors="replace") for name in (device, code))
                result = decode_clear_reply(await stub.clear(agent_v1.ClearRequest(*names)))
        except GRPCError as error:
            if error.status is Status.INVALID_ARGUMENT:
                raise UsageError(error.message) from None
            if error.status is Status.PERMISSION_DENIED:
                raise PermissionDeniedError(
                    f"socket {socket}: permission denied by the agent: {error.message}"
                ) from None
            raise
        finally:
            channel.close()
    if result.refusal is None:
        return result.cleared
    if result.refusal is ClearRefusal.STILL_PRESENT:
        raise FaultStillPresent(result.reason)
    raise UsageError(result.reason)


async def _agent_reports(channel: UnixChannel) -> AsyncGenerator[Report]:
    call = channel.request(
        "/drahealth.v1.Agent/Watch", Cardinality.UNARY_STREAM, agent_v1.WatchRequest, agent_v1.Report
    )
    async with call as stream:
        await stream.send_message(agent_v1.WatchRequest(), end=True)
        async for message in stream:
            yield decode_report(message)


async def _health_reports(channel: UnixChannel, method: str) -> AsyncGenerator[Report]:
    request, response = v1.NodeWatchResourcesRequest, v1.NodeWatchResourcesResponse
    marks = {OBSERVER_HEADER: "1"}
    call = channel.request(method, Cardinality.UNARY_STREAM, request, response, metadata=marks)
    merged = StreamHealth()
    async with call as stream:
        await stream.send_message(v1.NodeWatchResourcesRequest(), end=True)
        async for message in _messages_or_expiry(stream, merged):
            if message is not None:
                merged.update(message, read_clocks())
            merged.expire(read_clocks())
            yield merged.report(read_clocks())


async def _messages_or_expiry(
    stream: Any, merged: StreamHealth
) -> AsyncIterator[v1.NodeWatchResourcesResponse | None]:
    """Yield each message of a health stream; yield None when a device's health expires without a message."""
    reading = asyncio.ensure_future(stream.recv_message())
    try:
        while True:
            done, _ = await asyncio.wait({reading}, timeout=merged.expires_in_s(read_clocks()))
            if not done:
                yield None
            elif (response := reading.result()) is None:
                return
            else:
                yield response
                reading = asyncio.ensure_future(stream.recv_message())
    finally:
        reading.cancel()
        await asyncio.wait({reading})


@contextlib.contextmanager
def _errors_with_socket(socket: Path, effect: str = "") -> Iterator[None]:
    """Convert connection errors in a ``with`` block to AgentUnreachable or PermissionDeniedError.

    The text of the new exception names the socket.

    Args:
        effect: Effect that the request may have without an answer, for the end of the text.
    """
    try:
        yield
    except PermissionError as error:
        raise PermissionDeniedError(
            f"socket {socket}: cannot be opened: {error.strerror}; run as root"
        ) from None
    except TimeoutError:
        raise AgentUnreachable(
            f"socket {socket}: no answer from the agent within {STATUS_TIMEOUT_S:g} s{effect}"
        ) from None
    except OSError as error:
        why = connection_failure_reason(socket, error)
        hint = "; is the agent running?" if why in {NO_SOCKET, NO_SERVER} else ""
        raise AgentUnreachable(f"socket {socket}: {why}{hint}") from None
    except GRPCError as error:
        raise AgentUnreachable(f"socket {socket}: {error.status.name}: {error.message}") from None
    except (StreamTerminatedError, ProtocolError):
        raise AgentUnreachable(
            f"socket {socket}: the server closed the connection before its answer was complete{effect}"
        ) from None
    except ValueError as error:
        raise AgentUnreachable(f"socket {socket}: invalid answer: {error}") from None
