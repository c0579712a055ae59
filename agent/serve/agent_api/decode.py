"""Conversion of decoded ``drahealth.v1`` messages to a Report or an AgentStatus. Pure."""

from typing import Final, TypeVar

from agent.model.cleared_faults import ClearedFault, ClearResult
from agent.model.health import Cause, DeviceHealth, Health, NonDeviceCause, NotApplicable, Severity
from agent.model.report import (
    AgentStatus,
    ClusterCondition,
    ClusterStatus,
    ConfigReload,
    NvmlCallCost,
    NvmlCosts,
    RepairCount,
    Report,
    SentinelStatus,
    SeverityCount,
    SocketSubscriberCounts,
)
from agent.model.snapshot import NativeCoreStats
from agent.model.source_state import SourceSample
from agent.model.time import Instant
from agent.serve.agent_api.encode import BLAMES, REFUSALS, REPAIRS, STATES
from agent.serve.grpc.gen.agent.drahealth import v1

E = TypeVar("E")

_HEALTH_OF: Final = {int(health): health for health in Health}
_SEVERITY_OF: Final = {int(severity): severity for severity in Severity}
_BLAME_OF: Final = {number: blame for blame, number in BLAMES.items()}
_REPAIR_OF: Final = {number: repair for repair, number in REPAIRS.items()}
_REFUSAL_OF: Final = {number: refusal for refusal, number in REFUSALS.items()}
_STATE_OF: Final = {number: state for state, number in STATES.items()}


def decode_report(message: v1.Report) -> Report:
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


def decode_clear_reply(reply: v1.ClearReply) -> ClearResult:
    """Convert a decoded ClearReply message to a ClearResult.

    Raises ValueError if the kind of the refusal is unknown.
    """
    number = int(reply.refusal)
    refusal = _enum_value(_REFUSAL_OF, number, "ClearReply.refusal") if number else None
    return ClearResult(0, tuple(map(_cleared_fault_of, reply.cleared)), refusal=refusal, reason=reply.reason)


def _cleared_fault_of(record: v1.ClearedFault) -> ClearedFault:
    return ClearedFault(
        record.device, record.code, record.at_wall_s, record.uid, record.pid, record.login_uid
    )


def decode_status(reply: v1.StatusReply) -> AgentStatus:
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
        config_reload=_config_reload_of(reply.config_reload) if reply.config_reload.at_wall_s else None,
        cluster=_cluster_of(reply.cluster) if reply.cluster.lease else None,
        nvsentinel=_nvsentinel_of(reply.nvsentinel) if reply.nvsentinel.socket else None,
        nvml=_nvml_of(reply.nvml) if reply.nvml.period_s else None,
    )


def _nvsentinel_of(state: v1.SentinelStatus) -> SentinelStatus:
    return SentinelStatus(state.socket, state.events, state.failures, state.error)


def _nvml_of(costs: v1.NvmlCosts) -> NvmlCosts:
    calls = (NvmlCallCost(call.kind, call.calls, call.cpu_s, call.duration_s) for call in costs.calls)
    return NvmlCosts(costs.cpu_s, costs.switches, costs.period_s, tuple(calls))


def _cluster_of(cluster: v1.ClusterStatus) -> ClusterStatus:
    return ClusterStatus(
        lease=cluster.lease,
        holder=cluster.holder,
        is_held=cluster.is_held,
        requests=cluster.requests,
        failures=cluster.failures,
        error=cluster.error,
        success_wall_s=cluster.success_wall_s or None,
        conditions=tuple(
            ClusterCondition(condition.type, condition.status, condition.reason)
            for condition in cluster.conditions
        ),
        maintenance=tuple(cluster.maintenance),
        events=cluster.events,
        taint_rules=cluster.taint_rules,
    )


def _config_reload_of(reload: v1.ConfigReload) -> ConfigReload:
    return ConfigReload(reload.at_wall_s, reload.error, tuple(reload.changes))


def _instant_of(instant: v1.Instant) -> Instant:
    return Instant(instant.mono_ns, instant.wall_s)


def _cause_of(cause: v1.Cause) -> Cause:
    return Cause(
        code=cause.code,
        severity=_severity_of(cause.severity),
        blame=_enum_value(_BLAME_OF, cause.blame, "Cause.blame"),
        evidence=cause.evidence,
        advice=cause.advice,
        since=_instant_of(cause.since),
        repair=_enum_value(_REPAIR_OF, cause.repair, "Cause.repair"),
    )


def _device_of(device: v1.Device) -> DeviceHealth:
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


def _skipped_rule_of(rule: v1.SkippedRule) -> NotApplicable:
    return NotApplicable(rule.device, rule.code, rule.reason)


def _source_of(source: v1.Source) -> SourceSample:
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


def _core_of(core: v1.Core) -> NativeCoreStats:
    return NativeCoreStats(**{name: getattr(core, name) for name in NativeCoreStats.__slots__})


def _severity_of(number: int) -> Severity:
    return _enum_value(_SEVERITY_OF, number, "severity")


def _enum_value(table: dict[int, E], number: int, field: str) -> E:
    if int(number) not in table:
        raise ValueError(f"{field}: {int(number)} is unknown; must be one of {', '.join(map(str, table))}")
    return table[int(number)]
