"""Report and status as the JSON documents of ``-o json``, ``apiVersion`` drahealth/v1. Pure.

Keys are only ever added. Times are RFC 3339 in UTC, durations and sizes carry their unit in the key.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from agent.model.health import Cause, DeviceHealth, NotApplicable, Severity
from agent.model.report import Report
from agent.model.snapshot import CoreStats
from agent.model.source import SourceSample
from agent.model.status import AgentStatus
from agent.model.time import NS, Instant, rfc3339

if TYPE_CHECKING:
    from agent.sources.processes import ProcessFacts

API_VERSION: Final = "drahealth/v1"


def report_document(report: Report) -> dict[str, Any]:
    """The whole report."""
    return {
        "apiVersion": API_VERSION,
        "node": report.node,
        "at": rfc3339(report.at.wall_s),
        "devices": [device_document(device) for device in report.devices],
        "notes": [
            {"subject": note.subject, "devices": list(note.devices), **cause_document(note.cause)}
            for note in report.notes
        ],
        "notApplicable": _rules(report.not_applicable),
        "notEvaluated": _rules(report.not_evaluated),
        "sources": [_source(source, report.at) for source in report.sources],
        "cgroups": _cgroups(report.groups, report.core),
    }


def process_documents(processes: Iterable[ProcessFacts]) -> list[dict[str, Any]]:
    """What ``scan`` adds to the report."""
    return [
        {
            "name": process.name,
            "pid": process.pid,
            "since": rfc3339(process.since_s),
            "cpuSeconds": round(process.cpu_s, 2),
            "rssBytes": process.rss_bytes,
            "threads": process.threads,
        }
        for process in processes
    ]


def status_document(status: AgentStatus) -> dict[str, Any]:
    """The agent itself and how many devices are how well."""
    return {
        "apiVersion": API_VERSION,
        "node": status.node,
        "version": status.version,
        "pid": status.pid,
        "since": rfc3339(status.started_wall_s),
        "cpuSeconds": round(status.cpu_s, 3),
        "rssBytes": status.rss_bytes,
        "threads": status.threads,
        "descriptors": status.descriptors,
        "lastReport": rfc3339(status.at.wall_s) if status.at else None,
        "reports": status.publications,
        "devices": {_lower(tally.severity): tally.devices for tally in status.tallies},
        "sources": [_source(source, status.at) for source in status.sources],
        "core": _core(status.core),
        "cgroups": _cgroups(status.groups, status.core),
        "subscribers": [{"socket": one.socket, "streams": one.streams} for one in status.subscribers],
    }


def _lower(severity: Severity) -> str:
    return severity.name.lower()


def device_document(device: DeviceHealth) -> dict[str, Any]:
    """One device."""
    return {
        "driver": device.driver,  # empty: the host's own
        "pool": device.pool,
        "name": device.device,
        "kind": device.kind,
        "health": device.health.name.capitalize(),
        "severity": _lower(device.severity),
        "message": device.message,
        "since": rfc3339(device.since.wall_s),
        "lastVerified": rfc3339(device.verified.wall_s),
        "timeoutSeconds": device.timeout_s,
        "causes": [cause_document(cause) for cause in device.causes],
        "attributes": dict(device.attributes),
    }


def cause_document(cause: Cause) -> dict[str, Any]:
    """Why a device is not simply healthy."""
    return {
        "code": cause.code,
        "severity": _lower(cause.severity),
        "blame": cause.blame,
        "evidence": cause.evidence,
        "advice": cause.advice,
        "since": rfc3339(cause.since.wall_s),
    }


def _rules(rules: Iterable[NotApplicable]) -> list[dict[str, str]]:
    return [{"device": rule.device, "code": rule.code, "reason": rule.reason} for rule in rules]


def _source(source: SourceSample, at: Instant | None) -> dict[str, Any]:
    read = at and source.beat_ns and at.wall_s - (at.mono_ns - source.beat_ns) / NS
    return {
        "name": source.name,
        "state": source.state,
        "lastRead": rfc3339(read) if read else None,
        "periodSeconds": source.period_ns / NS,
        "failures": source.failures,
        "detail": source.detail,
        "vital": source.vital,
    }


def _cgroups(groups: int, core: CoreStats) -> dict[str, int]:
    return {"watched": groups, "dropped": core.groups_dropped, "unwatched": core.unwatched}


def _core(core: CoreStats) -> dict[str, int]:
    return {
        "passes": core.passes,
        "wakes": core.wakes,
        "reads": core.reads,
        "opens": core.opens,
        "descriptors": core.descriptors,
        "watches": core.watches,
        "kernelBytes": core.kernel_bytes,
        "overflows": core.overflows,
    }
