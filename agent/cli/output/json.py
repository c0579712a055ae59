"""JSON documents of ``-o json``, ``apiVersion`` drahealth/v1. Pure.

Later versions only add keys. Times are RFC 3339 in UTC. Durations and sizes have their unit in the key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from agent.model.cleared_faults import NO_LOGIN_UID
from agent.model.health import Health, Severity
from agent.model.time import NS, Instant, rfc3339

if TYPE_CHECKING:
    from agent.model.cleared_faults import ClearedFault
    from agent.model.reading import SourceSample
    from agent.model.report import AgentStatus, Report
    from agent.sources.gpu_os_facts import ProcessFacts

API_VERSION: Final = "drahealth/v1"

KEY: Final = re.compile(r"(?P<key>\w+)(?P<optional>\?)?(?::(?P<path>[\w.]+))?")


class ObjectKeys:
    """Encoder of Python objects as JSON objects. A text lists the JSON keys, each with an attribute.

    Keys are written like kubectl's custom columns: ``key:attribute.path``, or ``key`` alone if the attribute
    has the same name in snake case. ``key?`` is null if its value is empty or zero. Values are encoded by
    their type. An attribute that ends with ``_s`` is a time, unless the key ends with ``Seconds``.
    """

    def __init__(self, keys: str, **encoders: Callable[[Any], Any]) -> None:
        """Parse `keys`, which are separated by spaces.

        `encoders` has the functions that encode the values of some keys, by key.
        """
        self._fields: list[tuple[str, Callable[[Any], Any], Callable[[Any], Any], bool]] = []
        for text in keys.split():
            found = KEY.fullmatch(text)
            assert found, f"{text!r} is not a JSON key with an attribute path"
            key = found["key"]
            path = found["path"] or re.sub(r"[A-Z]", lambda upper: f"_{upper[0].lower()}", key)
            is_time = path.endswith("_s") and not key.endswith("Seconds")
            encode = encoders.get(key, rfc3339 if is_time else encode_by_type)
            self._fields.append((key, attrgetter(path), encode, bool(found["optional"])))

    def __call__(self, value: object) -> dict[str, Any]:
        """Return `value` as a JSON object."""
        return {
            key: None if (part := read(value)) is None or (optional and not part) else encode(part)
            for key, read, encode, optional in self._fields
        }


def encode_by_type(value: Any) -> Any:
    """Return `value` as a JSON value. Its form follows from the type in Python."""
    match value:
        case Severity():
            return value.name.lower()
        case Health():
            return value.name.capitalize()
        case Instant():
            return rfc3339(value.wall_s)
        case tuple():
            return list(value)
        case _:
            return value


def encode_each(encode: Callable[[Any], Any]) -> Callable[[Iterable[Any]], list[Any]]:
    """Return an encoder of sequences that encodes each item with `encode`."""
    return lambda items: [encode(item) for item in items]


# --- shared by several documents ---------------------------------------------------------------------------

DEVICE_REF: Final = ObjectKeys("driver pool name:device")
POD_REF: Final = ObjectKeys("namespace? name? uid?")
CLAIM_REF: Final = ObjectKeys("namespace name uid?")
REMEDIATION: Final = ObjectKeys("effect value")
CAUSE: Final = ObjectKeys("code severity blame evidence advice since repair")
DEVICE: Final = ObjectKeys(
    """
    driver pool name:device kind health severity message since lastVerified:verified
    timeoutSeconds:timeout_s causes attributes repair
    """,
    causes=encode_each(CAUSE),
    attributes=dict,
)

# --- report and status -------------------------------------------------------------------------------------

RULE: Final = ObjectKeys("device code reason")
NOTE: Final = ObjectKeys("subject devices")
CLEARED_FAULT: Final = ObjectKeys(
    "device code at:at_wall_s uid pid loginUID:login_uid",
    loginUID=lambda uid: None if uid == NO_LOGIN_UID else uid,
)
REPORT: Final = ObjectKeys(
    "node at devices notes notApplicable notEvaluated cleared",
    devices=encode_each(DEVICE),
    notes=encode_each(lambda note: {**NOTE(note), **CAUSE(note.cause)}),
    notApplicable=encode_each(RULE),
    notEvaluated=encode_each(RULE),
    cleared=encode_each(CLEARED_FAULT),
)
CGROUPS: Final = ObjectKeys("dropped:groups_dropped unwatched")
PROCESS: Final = ObjectKeys(
    "name pid since:since_s cpuSeconds:cpu_s rssBytes threads", cpuSeconds=lambda seconds: round(seconds, 2)
)
STATUS: Final = ObjectKeys(
    """
    node version pid since:started_wall_s cpuSeconds:cpu_s rssBytes threads descriptors lastReport:at
    reports:publications devices:tallies repairs
    """,
    cpuSeconds=lambda seconds: round(seconds, 3),
    devices=lambda tallies: {encode_by_type(tally.severity): tally.devices for tally in tallies},
    repairs=lambda counts: {count.repair: count.devices for count in counts},
)
CORE: Final = ObjectKeys("passes wakes reads opens descriptors watches kernelBytes overflows")
SUBSCRIBER: Final = ObjectKeys("socket streams connections")
CLUSTER: Final = ObjectKeys(
    """
    lease holder isHeld requests failures error lastSuccess:success_wall_s events taintRules conditions
    maintenance
    """,
    lastSuccess=lambda wall_s: None if wall_s is None else rfc3339(wall_s),
    conditions=encode_each(ObjectKeys("type status reason")),
    maintenance=list,
)
NVSENTINEL: Final = ObjectKeys("socket events failures error")
NVML: Final = ObjectKeys(
    "cpuSeconds:cpu_s contextSwitches:switches periodSeconds:period_s calls",
    calls=encode_each(ObjectKeys("kind calls cpuSeconds:cpu_s durationSeconds:duration_s")),
)
CONFIG_RELOAD: Final = ObjectKeys("at:at_wall_s error changes", at=rfc3339)


def report_document(report: Report) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        **REPORT(report),
        "sources": [_source(source, report.at) for source in report.sources],
        "cgroups": {"watched": report.groups, **CGROUPS(report.core)},
    }


def process_documents(processes: Iterable[ProcessFacts]) -> list[dict[str, Any]]:
    """Return the processes of the agent and of GPU drivers as JSON, for the output of ``drahealth scan``."""
    return [PROCESS(process) for process in processes]


def status_document(status: AgentStatus) -> dict[str, Any]:
    """Return the agent's state (resource usage, sources, subscribers) as JSON."""
    parts = status.parts
    return {
        "apiVersion": API_VERSION,
        **STATUS(status),
        "sources": [_source(source, status.at) for source in status.sources],
        "core": CORE(status.core),
        "cgroups": {"watched": status.groups, **CGROUPS(status.core)},
        "subscribers": [SUBSCRIBER(subscriber) for subscriber in status.subscribers],
        "configReload": CONFIG_RELOAD(parts.config_reload) if parts.config_reload else None,
        "cluster": CLUSTER(parts.cluster) if parts.cluster else None,
        "nvsentinel": NVSENTINEL(parts.nvsentinel) if parts.nvsentinel else None,
        "lostSnapshots": parts.lost_snapshots,
        "files": [{"name": file.name, "error": file.error} for file in parts.files],
        "nvml": NVML(parts.nvml) if parts.nvml else None,
    }


def clear_document(cleared: Iterable[ClearedFault]) -> dict[str, Any]:
    """Return the faults that ``drahealth clear`` has cleared as JSON."""
    return {"apiVersion": API_VERSION, "cleared": [CLEARED_FAULT(fault) for fault in cleared]}


def _source(source: SourceSample, at: Instant | None) -> dict[str, Any]:
    read_s = at and source.beat_ns and at.wall_s - (at.mono_ns - source.beat_ns) / NS
    return {
        "name": source.name,
        "state": source.state,
        "lastRead": rfc3339(read_s) if read_s else None,
        "periodSeconds": source.period_ns / NS,
        "failures": source.failures,
        "detail": source.detail,
        "vital": source.vital,
    }
