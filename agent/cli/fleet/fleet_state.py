"""State of all nodes, as a Prometheus server reports it that scrapes the agents.

The module also has the client of the server's query API. The client uses only the standard library, and works
with every server that has the same API.
"""

from __future__ import annotations

import base64
import math
import os
import re
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote, urlencode, urlsplit

import msgspec

from agent.config.api_access import without_login
from agent.errors import ApiError, ApiUnreachableError, ConfigError, UsageError
from agent.model.health import Severity
from agent.model.time import WALL_MAX_S
from agent.serve.kube_api.api_server import client_tls_context
from agent.system.files import open_input
from agent.version import VERSION

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S: Final = 60.0
"""Timeout of the connect and of each read [s]; Prometheus ends a query after two minutes itself."""
ANSWER_BYTES: Final = 256 << 20
"""Largest accepted answer of a Prometheus server [bytes]."""
TOKEN_BYTES: Final = 65_536
OK_STATUS: Final = 200


class MetricSample(NamedTuple):
    """Sample of one series in the answer to a query."""

    labels: dict[str, str]
    value: float


class _QuerySeries(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


class _Vector(msgspec.Struct):
    result: list[_QuerySeries] = []


class _Answer(msgspec.Struct, rename={"error_type": "errorType"}):
    """Answer of Prometheus' query API."""

    status: str
    data: _Vector = msgspec.field(default_factory=_Vector)
    error_type: str = ""
    error: str = ""
    warnings: list[str] = []


class PrometheusClient:
    """Client of one Prometheus server. Calls block up to 60 s for the connect and for each read."""

    def __init__(self, url: str, *, token_file: Path | None = None, ca_file: Path | None = None) -> None:
        """Create a client; nothing is called yet.

        Args:
            url: ``http://`` or ``https://`` with host, and optionally user, password, port and path.
            token_file: File with a bearer token; None: none is sent.
            ca_file: CA certificates that sign the server's; None: those of this machine.

        Raises:
            ConfigError: The URL or a file cannot be used.
        """
        shown = without_login(url)
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:  # which quotes a part of a password such as a/b
            reason = error if shown == url else "write special characters of the password as in %2F"
            raise ConfigError(f"Prometheus {shown!r}: not a valid URL: {reason}") from None
        self._host = parts.hostname or " "
        is_host = " " not in self._host and self._host.isprintable()  # as http.client requires it
        if parts.scheme not in ("http", "https") or not is_host or parts.query or parts.fragment:
            raise ConfigError(f"Prometheus {shown!r}: not a URL of a server, such as http://prometheus:9090")
        self._port = port or (443 if parts.scheme == "https" else 80)  # else http.client takes ::1 as port 1
        self._path = f"{parts.path.rstrip('/')}/api/v1/query"
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        """URL of the server, without user and password."""
        self.warnings: dict[str, None] = {}
        """Warnings in the answers, such as of a store that did not answer, in the order of their arrival."""
        self._tls: ssl.SSLContext | None = None
        self._headers = {
            "Accept": "application/json",
            "Content-Type": "application/x-www-form-urlencoded",
            "User-Agent": f"drahealth/{VERSION}",
        }
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(os.fsencode(login)).decode()}"
        if ca_file is not None and parts.scheme == "http":
            raise ConfigError(f"Prometheus {self.url}: --ca-file has no effect without https:// in the URL")
        file = token_file
        try:
            if token_file is not None:
                self._headers["Authorization"] = f"Bearer {_read_token(token_file)}"
            file = ca_file
            if parts.scheme == "https":
                self._tls = client_tls_context(ca_file)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"Prometheus {self.url}: file {file} cannot be used: {reason}") from None

    def query(self, query: str) -> list[MetricSample]:
        """Return the newest samples of a query.

        Raises:
            ApiUnreachableError: The server is unreachable or not trusted, did not answer in time, or sent no
                answer of Prometheus.
            ApiError: The server refused the query.
        """
        connection = self._connection()
        try:
            connection.request("POST", self._path, urlencode({"query": query}), self._headers)
            response = connection.getresponse()
            data = response.read(ANSWER_BYTES + 1)
        except (OSError, HTTPException, ValueError) as error:  # ValueError: a host that is no name in DNS
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ApiUnreachableError(f"Prometheus {self.url}: query not answered: {reason}") from None
        finally:
            connection.close()
        if len(data) > ANSWER_BYTES:
            limit = ANSWER_BYTES >> 20
            raise ApiUnreachableError(
                f"Prometheus {self.url}: the answer is over {limit} MiB, the limit; select fewer nodes with "
                "--select"
            )
        try:
            answer = msgspec.json.decode(data, type=_Answer)
            samples = [MetricSample(series.metric, float(series.value[1])) for series in answer.data.result]
        except (ValueError, RecursionError):  # msgspec.DecodeError and UnicodeDecodeError are ValueErrors
            is_ok = response.status == OK_STATUS
            text = "another format" if is_ok else f"{response.status} {response.reason}"
            cause = "user, password or token" if response.status in (401, 403) else "the path of the URL"
            raise ApiUnreachableError(
                f"Prometheus {self.url}: the server did not answer as the query API: {text}; check {cause}"
            ) from None
        if answer.status != "success":
            raise ApiError(
                response.status, answer.error_type, f"Prometheus {self.url}: query refused: {answer.error}"
            )
        self.warnings |= dict.fromkeys(answer.warnings)
        return [sample for sample in samples if math.isfinite(sample.value)]

    def _connection(self) -> HTTPConnection:
        if self._tls is not None:
            return HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=self._tls)
        return HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)


def _read_token(path: Path) -> str:
    """Return the token in a file; raises OSError, or ValueError if it cannot be a token."""
    with open(path, encoding="ascii", opener=open_input) as file:
        token = file.read(TOKEN_BYTES).strip()
    if len(token.split()) != 1 or not token.isprintable():
        raise ValueError("the file must have one line with a token, without blanks")
    return token


# --- state of the fleet ------------------------------------------------------------------------------------

STATE: Final = "drahealth_device_health"
"""Name of the metric with the health of devices, and of its label with the state (OpenMetrics state set)."""
SEVERITIES: Final = {
    "healthy": Severity.OK,
    "info": Severity.INFO,
    "degraded": Severity.DEGRADED,
    "unknown": Severity.UNKNOWN,
    "unhealthy": Severity.UNHEALTHY,
}
FLAPS: Final = 3
"""Number of times within an hour that a device must stop being usable to count as flapping."""
SILENT: Final = "1h"
"""Time since the last scrape up to which a missing agent counts as silent; later it counts as removed."""
REPORT_S: Final = 180.0
"""Largest age of an agent's newest report [s]: three of the longest heartbeats."""
_MATCHER: Final = r'[a-zA-Z_][a-zA-Z0-9_]*(=|!=|=~|!~)"([^"\\\n]|\\.)*"'
_SELECT: Final = re.compile(rf"{_MATCHER}(,{_MATCHER})*")
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")

Query = Callable[[str], list[MetricSample]]


class FleetDeviceId(NamedTuple):
    """Identity of a device in the fleet: its Kubernetes node, and its driver, pool and name."""

    node: str
    driver: str
    pool: str
    device: str

    @property
    def name(self) -> str:
        """Name of the device in tables: ``<driver>/<device>``, or only the name of a host device."""
        return f"{self.driver}/{self.device}" if self.driver else self.device


class SickDeviceCause(NamedTuple):
    """Cause of the state of a device on some node: finding code, severity and repair."""

    code: str
    severity: Severity
    repair: str


class SickDevice(NamedTuple):
    """Device that is not healthy."""

    device: FleetDeviceId
    severity: Severity
    since_s: float
    """Time since which the device has its present state [s since 1970]; 0: not known."""
    causes: tuple[SickDeviceCause, ...]


class FiringRule(NamedTuple):
    """Health rule that has findings at present, with the affected nodes and number of affected devices."""

    code: str
    severity: Severity
    """Worst severity of the rule's findings."""
    nodes: tuple[str, ...]
    devices: int
    """Number of devices with a finding of the rule; 0: only notes about nodes and pods."""


class FleetGroup(NamedTuple):
    """Devices of one node or of one driver that are not healthy."""

    name: str
    by_severity: Mapping[Severity, int]
    newest_s: float
    """Time of the newest change of state of these devices [s since 1970]; 0: not known."""
    codes: tuple[str, ...]
    """Finding codes of these devices; the code of most devices comes first."""


class Fleet(NamedTuple):
    """State of all nodes."""

    nodes: tuple[str, ...]
    silent: tuple[str, ...]
    """Nodes without a report of the last REPORT_S, whose agents were scraped within the last hour."""
    devices: Mapping[Severity, int]
    """Number of devices in each state of health, of all nodes."""
    sick: tuple[SickDevice, ...]
    """Devices that are not healthy: worst first, then newest first."""
    flapping: tuple[tuple[FleetDeviceId, int], ...]
    """Devices that stopped being usable at least three times within an hour, with that number."""
    rules: tuple[FiringRule, ...]
    versions: tuple[tuple[str, str, int], ...]
    """Versions of agents and of drivers, as (name, version, number of nodes)."""


def check_select(text: str) -> str:
    """Check that `text` has PromQL label matchers, such as ``cluster="a"``, and return it.

    The matchers are added to all queries. Raises UsageError if they are not valid.
    """
    if text and not _SELECT.fullmatch(text):
        raise UsageError(f'--select {text!r}: not matchers of labels, such as cluster="a",job=~"dra.*"')
    return text


def check_label(name: str) -> str:
    """Check that `name` is a valid label name, and return it; raises UsageError."""
    if not _LABEL.fullmatch(name):
        raise UsageError(f"--node-label {name!r}: not the name of a label, such as instance or node")
    return name


def read_fleet(query: Query, node_label: str, select: str) -> Fleet:
    """Return the state of all nodes.

    Args:
        query: Returns the samples of a query in PromQL.
        node_label: Label that names the node.
        select: Matchers of labels that all series must have; empty: none.
    """

    def series(name: str, *matchers: str) -> str:
        chosen = ",".join(filter(None, [*matchers, select]))
        return f"{name}{{{chosen}}}" if chosen else name

    build, report = series("drahealth_build_info"), series("drahealth_report_timestamp_seconds")
    is_sick = f'{STATE}!="healthy"'
    sick = f"({series(STATE, is_sick)} == 1)"
    since = f"{series(f'{STATE}_since_timestamp_seconds')} and ignoring ({STATE}) {sick}"
    lost = series("drahealth_device_losses_total")
    place = f"{node_label}, driver, pool, device"
    flaps = f"round(sum by ({place}) (increase({lost}[1h]))) >= {FLAPS}"
    named = series("drahealth_build_info", 'node_name!=""')
    gone = (  # an instance that is the address of a pod changes with each update of the agent
        f"count by ({node_label}) (max_over_time({build}[{SILENT}]) unless on ({node_label}) {build} "
        f"unless on (node_name) {named})"
    )
    findings = series("drahealth_device_finding", 'severity!="info"')
    notes = f"{series('drahealth_findings')} > 0"
    drivers = f"count by (name, version) ({series('drahealth_driver_info')})"
    counts = f"sum by ({STATE}) ({series(STATE)})"

    agents, ages = query(build), query(f"timestamp({report}) - {report}")
    if ages and not any(_node(age, node_label) for age in ages):
        known = ", ".join(sorted(ages[0].labels))
        raise UsageError(f"--node-label {node_label}: no agent has this label; name one of {known}")
    nodes = {_node(age, node_label) for age in ages if age.value <= REPORT_S}
    causes = _causes(query(findings), node_label)
    since_of = {
        _device(sample, node_label): sample.value
        for sample in query(since)
        if 0 <= sample.value <= WALL_MAX_S
    }
    return Fleet(
        nodes=tuple(sorted(nodes)),
        silent=tuple(sorted({_node(agent, node_label) for agent in (*agents, *query(gone))} - nodes)),
        devices={SEVERITIES[sample.labels[STATE]]: int(sample.value) for sample in query(counts)
                 if sample.labels.get(STATE) in SEVERITIES},
        sick=_sick_devices(query(sick), causes, since_of, node_label),
        flapping=tuple(
            sorted(
                ((_device(sample, node_label), int(sample.value)) for sample in query(flaps)),
                key=lambda item: (-item[1], item[0]),
            )
        ),
        rules=_firing_rules(causes, query(notes), node_label),
        versions=(
            *_rank_versions(Counter(("drahealth", agent.labels.get("version", "")) for agent in agents)),
            *_rank_versions(
                {(sample.labels.get("name", ""), sample.labels.get("version", "")): int(sample.value)
                 for sample in query(drivers)}
            ),
        ),
    )  # fmt: skip


def _node(sample: MetricSample, node_label: str) -> str:
    return sample.labels.get(node_label, "")


def _device(sample: MetricSample, node_label: str) -> FleetDeviceId:
    names = (sample.labels.get(name, "") for name in ("driver", "pool", "device"))
    return FleetDeviceId(_node(sample, node_label), *names)


def _rank_versions(counts: Mapping[tuple[str, str], int]) -> list[tuple[str, str, int]]:
    ranked = sorted(counts.items(), key=lambda item: (item[0][0], -item[1], item[0][1]))
    return [(name, version, number) for (name, version), number in ranked]


def _severity(sample: MetricSample) -> Severity:
    return SEVERITIES.get(sample.labels.get("severity", ""), Severity.UNKNOWN)


def _causes(findings: Iterable[MetricSample], node_label: str) -> dict[FleetDeviceId, list[SickDeviceCause]]:
    found: dict[FleetDeviceId, list[SickDeviceCause]] = {}
    for row in findings:
        cause = SickDeviceCause(row.labels.get("code", ""), _severity(row), row.labels.get("repair", ""))
        found.setdefault(_device(row, node_label), []).append(cause)
    for causes in found.values():
        causes.sort(key=lambda cause: (-cause.severity, cause.code))
    return found


def _sick_devices(
    samples: Iterable[MetricSample],
    causes: Mapping[FleetDeviceId, Sequence[SickDeviceCause]],
    since_of: Mapping[FleetDeviceId, float],
    node_label: str,
) -> tuple[SickDevice, ...]:
    found = []
    for sample in samples:
        device = _device(sample, node_label)
        severity = SEVERITIES.get(sample.labels.get(STATE, ""), Severity.UNKNOWN)
        found.append(SickDevice(device, severity, since_of.get(device, 0.0), tuple(causes.get(device, ()))))
    return tuple(sorted(found, key=lambda sick: (-sick.severity, -sick.since_s, sick.device)))


def _firing_rules(
    causes: Mapping[FleetDeviceId, Sequence[SickDeviceCause]], notes: Iterable[MetricSample], node_label: str
) -> tuple[FiringRule, ...]:
    """Return the rules with findings, those with the worst severity first, then those on the most nodes."""
    severities: dict[str, Severity] = {}
    nodes: dict[str, set[str]] = {}
    devices: Counter[str] = Counter()

    def add(code: str, severity: Severity, node: str) -> None:
        severities[code] = max(severity, severities.get(code, Severity.OK))
        nodes.setdefault(code, set()).add(node)

    for device, found in causes.items():
        for cause in found:
            add(cause.code, cause.severity, device.node)
            devices[cause.code] += 1
    for note in notes:
        if _severity(note) > Severity.INFO:
            add(note.labels.get("code", ""), _severity(note), _node(note, node_label))
    rules = (
        FiringRule(code, severity, tuple(sorted(nodes[code])), devices[code])
        for code, severity in severities.items()
    )
    return tuple(sorted(rules, key=lambda rule: (-rule.severity, -len(rule.nodes), rule.code)))


def group_sick_devices(
    sick: Iterable[SickDevice], name_of: Callable[[FleetDeviceId], str]
) -> list[FleetGroup]:
    """Return devices that are not healthy in groups with the same name, such as the name of their node.

    `name_of` returns the name for a device. Groups with the most unhealthy devices are first.
    """
    members: dict[str, list[SickDevice]] = {}
    for device in sick:
        members.setdefault(name_of(device.device), []).append(device)
    groups = [
        FleetGroup(
            name,
            Counter(device.severity for device in devices),
            max(device.since_s for device in devices),
            tuple(code for code, _ in Counter(c.code for dev in devices for c in dev.causes).most_common()),
        )
        for name, devices in members.items()
    ]
    order = (Severity.UNHEALTHY, Severity.UNKNOWN, Severity.DEGRADED)
    return sorted(
        groups,
        key=lambda group: (*(-group.by_severity.get(sev, 0) for sev in order), -group.newest_s, group.name),
    )
