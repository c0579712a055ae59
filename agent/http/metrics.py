"""Metrics of the agent in Prometheus' text format and in OpenMetrics, through prometheus_client.

A scrape is rendered from the newest report and snapshot: no metric is kept between scrapes, except the totals
of agent.http.agent_view. Families that change only with verdicts are rendered once per change: a
line of text costs prometheus_client several microseconds. Clients that scrape within a second share a text.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice, starmap
from operator import itemgetter
from typing import Any, Final, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from agent.health.gpu.rule_input import is_answering
from agent.http import metric_families as families
from agent.http.agent_view import AgentView, Totals
from agent.http.metric_families import DEVICES_MAX, STATES, FamilyKind, MetricFamily
from agent.model.gpu import GpuField, GpuSample, NvmlCosts
from agent.model.health import DeviceHealth, most_needed_first
from agent.model.history import STATE_OF_SEVERITY
from agent.model.reading import DURATION_BOUNDS_S, PassDurations, SourceState
from agent.model.report import Report
from agent.model.settings import GpuLimits
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant
from agent.version import VERSION

LABEL_MAX: Final = 128
"""Length to which label values from a device or a driver are cut [characters]."""
SHARED_NS: Final = NS
"""Time for which clients that scrape get the same rendered text [ns]."""
EOF: Final = b"# EOF\n"
"""Line that ends a text in OpenMetrics."""

_CLASSES: Final = {
    FamilyKind.COUNTER: CounterMetricFamily,
    FamilyKind.GAUGE: GaugeMetricFamily,
    FamilyKind.INFO: InfoMetricFamily,
    FamilyKind.STATE_SET: StateSetMetricFamily,
}
_rendered_fields: Final = itemgetter(
    *(
        DeviceHealth._fields.index(name)
        for name in ("driver", "pool", "device", "kind", "severity", "since", "causes", "attributes")
    )
)

_format_number: Final[Callable[[float], str]] = floatToGoString

Series = tuple[Sequence[str], Any]
"""Label values of one series and its value: a number, or of a state set the value of each state."""
Rows = tuple[MetricFamily, list[Series]]
"""Metric family with its series."""


class HttpConnectionCounts(NamedTuple):
    """Number of open, and of refused, connections of the HTTP server."""

    open: int = 0
    refused: int = 0


class Exposition(NamedTuple):
    """Metrics rendered as text, with the content type of the format."""

    text: bytes
    content_type: str


class _Scrape(NamedTuple):
    """Values of the agent that the metrics of one scrape are made from."""

    report: Report | None
    snapshot: Snapshot | None
    totals: Totals
    shown: tuple[DeviceHealth, ...]
    """Devices with series of their own."""


class _Metrics(Collector):
    """Collector that returns given metrics; prometheus_client's encoders expect such an object."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class MetricsRenderer:
    """Renderer of the agent's metrics as text for a scrape. Event loop only."""

    def __init__(
        self,
        view: AgentView,
        clock: Callable[[], Instant],
        server: Callable[[], HttpConnectionCounts] = HttpConnectionCounts,
    ) -> None:
        self._view = view
        self._clock = clock
        self._server = server
        self._process = ProcessCollector(registry=CollectorRegistry())
        self._devices: dict[str, tuple[object, bytes]] = {}
        """Text of DEVICE_FAMILIES by content type, with the values that it was rendered from."""
        self._templates: dict[str, tuple[object, _TextTemplate]] = {}
        """Template of all other families by content type, with the labels that it was rendered from."""
        self._shared: dict[str, tuple[int, int, Exposition]] = {}
        """Last exposition by content type, with the report's version and the time [ns]."""

    def render(self, accept: str) -> Exposition:
        """Return the metrics in the format that the header ``Accept`` of a request asks for."""
        encode, content_type = _choose_encoder(accept)
        now = self._clock()
        version, report = self._view.latest.peek()
        if (last := self._shared.get(content_type)) is not None:
            rendered_version, rendered_ns, exposition = last
            if rendered_version == version and now.mono_ns - rendered_ns < SHARED_NS:
                return exposition
        scrape = _Scrape(report, self._view.snapshot(), self._view.totals.read(), _shown_devices(report))
        rows = [*_time_rows(scrape), *self._agent_rows(scrape)]
        text = b"".join(
            (
                self._device_text(scrape, encode, content_type),
                self._filled_text(rows, encode, content_type),
                encode(_Metrics([_duration_metric(self._view.pass_durations())])).removesuffix(EOF),
                encode(self._process),
            )
        )
        exposition = Exposition(text, content_type)
        self._shared[content_type] = version, now.mono_ns, exposition
        return exposition

    # --- devices -------------------------------------------------------------------------------------------

    def _device_text(self, scrape: _Scrape, encode: Callable[[Collector], bytes], content_type: str) -> bytes:
        """Return the text of DEVICE_FAMILIES, rendered again only if a device's health or causes changed."""
        key = scrape.totals.version, list(map(_rendered_fields, scrape.shown))
        last = self._devices.get(content_type)
        if last is None or last[0] != key:
            text = encode(_Metrics(starmap(_metric, _device_rows(scrape)))).removesuffix(EOF)
            last = self._devices[content_type] = key, text
        return last[1]

    def _filled_text(
        self, rows: Sequence[Rows], encode: Callable[[Collector], bytes], content_type: str
    ) -> bytes:
        """Return the text of metric families in ``rows``, rendered again only if their labels have changed.

        Otherwise the new values are filled into the last text.
        """
        key = [(family.name, [labels for labels, _ in series]) for family, series in rows]
        last = self._templates.get(content_type)
        if last is None or last[0] != key:
            text = encode(_Metrics(starmap(_metric, rows))).removesuffix(EOF)
            last = self._templates[content_type] = key, _TextTemplate(text)
        return last[1].fill([value for _, series in rows for _, value in series])

    # --- agent ---------------------------------------------------------------------------------------------

    def _agent_rows(self, scrape: _Scrape) -> Iterator[Rows]:
        report, view, parts = scrape.report, self._view, self._view.parts()
        dropped: dict[str, int] = {}
        yield _rows(families.BUILD_INFO, [((VERSION, view.config().node_name), 1)])
        yield _rows(families.REPORTS, [((), view.latest.peek()[0])])
        if report is not None:
            yield _rows(families.REPORT_TIME, [((), report.at.wall_s)])
            dropped |= _dropped_device_series(report, scrape)
            yield from _report_rows(report, scrape.totals, dropped)
            yield from _core_rows(report)
        if scrape.snapshot is not None and (nvml := scrape.snapshot.gpus) is not None:
            limits, now_ns = GpuLimits(deadline_s=view.config().gpu_deadline_ns / NS), self._clock().mono_ns
            answering = [gpu for gpu in nvml.gpus if is_answering(gpu, limits, now_ns)]
            yield from _gpu_rows(nvml.driver, answering, scrape, dropped)
        if (costs := parts.nvml) is not None:
            yield from _nvml_rows(costs)
        yield from _stream_rows(view)
        yield _limit_series(families.PREPARES, _prepares(view.prepares()), families.CODES_MAX, dropped)
        if (reload := parts.config_reload) is not None:
            yield _rows(families.RELOAD_OK, [((), not reload.error)])
            yield _rows(families.RELOAD_TIME, [((), reload.at_wall_s)])
        if (cluster := parts.cluster) is not None:
            yield _rows(families.CLUSTER_LEASE, [((), cluster.is_held)])
            yield _rows(families.CLUSTER_REQUESTS, [((), cluster.requests)])
            yield _rows(families.CLUSTER_FAILURES, [((), cluster.failures)])
            yield _rows(families.CLUSTER_EVENTS, [((), cluster.events)])
            yield _rows(families.CLUSTER_RULES, [((), cluster.taint_rules)])
            if cluster.success_wall_s is not None:
                yield _rows(families.CLUSTER_SUCCESS, [((), cluster.success_wall_s)])
        if (nvsentinel := parts.nvsentinel) is not None:
            yield _rows(families.NVSENTINEL_EVENTS, [((), nvsentinel.events)])
            yield _rows(families.NVSENTINEL_FAILURES, [((), nvsentinel.failures)])
        if (lost := parts.lost_snapshots) is not None:
            yield _rows(families.RECORD_LOST, [((), lost)])
        yield _rows(families.WRITES_FAILED, [((file.name,), bool(file.error)) for file in parts.files])
        counts = self._server()
        yield _rows(families.HTTP_CONNECTIONS, [((), counts.open)])
        yield _rows(families.HTTP_REFUSED, [((), counts.refused)])
        yield _rows(families.DROPPED, [((name,), count) for name, count in dropped.items() if count])


class _TextTemplate:
    """Rendered text of metric families into whose lines new values are filled, while the labels stay."""

    def __init__(self, text: bytes) -> None:
        """Create a template from a text that prometheus_client has rendered; its values are dropped."""
        self._parts: list[str] = [""]
        for line in text.decode().removesuffix("\n").split("\n"):
            if line.startswith("#"):
                self._parts[-1] += f"{line}\n"
            else:
                self._parts[-1] += line[: line.rindex(" ") + 1]
                self._parts.append("\n")

    def fill(self, values: Iterable[float]) -> bytes:
        """Return the text with new values, one per series, in the order of the rendered text."""
        *parts, end = self._parts
        lines = [part + _format_number(value) for part, value in zip(parts, values, strict=True)]
        return ("".join(lines) + end).encode()


_PLAIN: Final = choose_encoder("")
_OPENMETRICS: Final = choose_encoder("application/openmetrics-text; version=1.0.0")


def _choose_encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """Return encoder and content type of one of two formats, whose texts all clients share.

    All names are valid in both formats, so that the client's wish for escaping does not matter.
    """
    try:
        _, content_type = choose_encoder(accept)
    except TypeError:  # it compares the version in the header as numbers, without a check that it is one
        return _PLAIN
    return _OPENMETRICS if content_type.startswith("application/openmetrics-text") else _PLAIN


def _rows(family: MetricFamily, series: Iterable[Series]) -> Rows:
    return family, list(series)


def _time_rows(scrape: _Scrape) -> Iterator[Rows]:
    """Yield the metric families of times (TIME_FAMILIES) with a series for each shown device.

    The present state counts until the report: a later report can end it at a time before that of the scrape.
    """
    shown, totals = scrape.shown, scrape.totals.devices
    until_ns = scrape.report.at.mono_ns if scrape.report else 0
    yield _rows(families.DEVICE_VERIFIED, ((device.key, device.verified.wall_s) for device in shown))
    known = [(device.key, found) for device in shown if (found := totals.get(device.key)) is not None]
    yield _rows(
        families.DEVICE_SECONDS,
        (
            ((*key, state), seconds)
            for key, found in known
            for state, seconds in found.seconds(until_ns).items()
        ),
    )


def _metric(family: MetricFamily, series: Iterable[tuple[Sequence[str], Any]]) -> Metric:
    """Convert a metric family and its series to the metric class of prometheus_client."""
    metric: Any = _CLASSES[family.kind](family.name, family.help, labels=family.labels)
    if family.kind is FamilyKind.INFO:
        for labels, _ in series:
            metric.add_metric(labels, {})
    else:
        for labels, value in series:
            metric.add_metric(labels, value)
    return metric  # type: ignore[no-any-return]


def _duration_metric(durations: Mapping[str, PassDurations]) -> Metric:
    """Return the metric with a histogram of durations for each source that has finished a pass (reading)."""
    family = families.SOURCE_DURATION
    metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    for source, found in durations.items():
        if any(found.counts):
            buckets = zip(map(floatToGoString, DURATION_BOUNDS_S), accumulate(found.counts), strict=True)
            metric.add_metric((source,), list(buckets), found.sum_s)
    return metric


def _limit_series(
    family: MetricFamily, series: Iterable[Series], limit: int, dropped: dict[str, int]
) -> Rows:
    """Return a metric family with its first ``limit`` series.

    The number of further series is added to `dropped`, by name of the series.
    """
    iterator = iter(series)
    rows = _rows(family, islice(iterator, limit))
    if rest := sum(1 for _ in iterator):
        dropped[family.series_name] = rest
    return rows


def _shown_devices(report: Report | None) -> tuple[DeviceHealth, ...]:
    """Return the devices that have series of their own: all, or the DEVICES_MAX in the worst state."""
    if report is None:
        return ()
    if len(report.devices) <= DEVICES_MAX:
        return report.devices
    return tuple(sorted(report.devices, key=lambda device: -device.severity)[:DEVICES_MAX])


def _device_rows(scrape: _Scrape) -> Iterator[Rows]:
    shown, totals = scrape.shown, scrape.totals.devices
    states = {
        severity: {str(key): key is state for key in STATES} for severity, state in STATE_OF_SEVERITY.items()
    }
    yield _rows(families.DEVICE_HEALTH, ((device.key, states[device.severity]) for device in shown))
    yield _rows(families.DEVICE_INFO, ((_identity(device), 1) for device in shown))
    yield _rows(families.DEVICE_FINDING, islice(_device_findings(shown), families.CAUSES_MAX))
    yield _rows(
        families.DEVICE_TRANSITIONS,
        (
            ((*device.key, state), known.transitions.get(state, 0))
            for device in shown
            if (known := totals.get(device.key)) is not None
            for state in STATES
        ),
    )
    losses = ((device.key, known.losses) for device in shown if (known := totals.get(device.key)) is not None)
    yield _rows(families.DEVICE_LOSSES, losses)
    yield _rows(families.DEVICE_SINCE, ((device.key, device.since.wall_s) for device in shown))


def _identity(device: DeviceHealth) -> tuple[str, ...]:
    known = dict(device.attributes)
    values = (device.kind, known.get("uuid", ""), known.get("pciBusId", ""), known.get("product", ""))
    return (*device.key, *(value[:LABEL_MAX] for value in values))


def _device_findings(shown: Iterable[DeviceHealth]) -> Iterator[Series]:
    """Yield one series per device and finding code above INFO, of the devices in the worst state first."""
    for device in sorted(shown, key=lambda device: -device.severity):
        seen = set()
        for cause in most_needed_first(device.causes):
            if cause.code not in seen:
                seen.add(cause.code)
                labels = (cause.code[:LABEL_MAX], cause.severity.name.lower(), str(cause.repair))
                yield (*device.key, *labels), 1


def _cause_count(device: DeviceHealth) -> int:
    return len({cause.code for cause in most_needed_first(device.causes)}) if device.causes else 0


def _dropped_device_series(report: Report, scrape: _Scrape) -> dict[str, int]:
    """Return the number of series of a report's devices that are left out, by name of the series."""
    shown_keys = {device.key for device in scrape.shown}
    hidden = [device for device in report.devices if device.key not in shown_keys]
    known = [found for device in hidden if (found := scrape.totals.devices.get(device.key)) is not None]
    shown_causes = min(families.CAUSES_MAX, sum(map(_cause_count, scrape.shown)))
    counts = {
        families.DEVICE_HEALTH: len(hidden) * len(STATES),
        families.DEVICE_INFO: len(hidden),
        families.DEVICE_FINDING: sum(map(_cause_count, report.devices)) - shown_causes,
        families.DEVICE_TRANSITIONS: len(known) * len(STATES),
        families.DEVICE_LOSSES: len(known),
        families.DEVICE_SINCE: len(hidden),
        families.DEVICE_VERIFIED: len(hidden),
        families.DEVICE_SECONDS: sum(len({*found.past_ns, found.state}) for found in known),
    }
    return {family.series_name: count for family, count in counts.items()}


def _report_rows(report: Report, totals: Totals, dropped: dict[str, int]) -> Iterator[Rows]:
    counts = Counter(STATE_OF_SEVERITY[device.severity] for device in report.devices)
    yield _rows(families.DEVICES, (((state,), counts[state]) for state in STATES))
    findings = Counter(
        (_scope(note.subject), note.cause.code[:LABEL_MAX], note.cause.severity.name.lower())
        for note in report.notes
    )
    yield _limit_series(families.FINDINGS, findings.most_common(), families.CODES_MAX, dropped)
    present = [source for source in report.sources if source.state is not SourceState.ABSENT]
    sources = present[: families.SOURCES_MAX]
    if hidden := len(present) - len(sources):
        dropped[families.SOURCE_UP.series_name] = hidden
    states = [((source.name,), source.state) for source in sources]
    yield _rows(families.SOURCE_UP, ((name, state is SourceState.OK) for name, state in states))
    yield _rows(families.SOURCE_STALLED, ((name, state is SourceState.STALLED) for name, state in states))
    yield _rows(families.SOURCE_STALLS, (((src.name,), totals.stalls.get(src.name, 0)) for src in sources))
    yield _rows(families.SOURCE_PASSES, (((source.name,), source.passes) for source in sources))
    yield _rows(families.SOURCE_FAILURES, (((source.name,), source.failures) for source in sources))
    at = report.at
    yield _rows(
        families.SOURCE_READ,
        (
            ((source.name,), at.wall_s - (at.mono_ns - source.beat_ns) / NS)
            for source in sources
            if source.beat_ns and source.passes
        ),
    )
    yield _rows(families.SOURCE_PERIOD, (((source.name,), source.period_ns / NS) for source in sources))


def _scope(subject: str) -> str:
    """Return ``node``, ``pod`` or ``driver``: the kind of object that a fault without a device concerns."""
    word = subject.partition(" ")[0]
    return word if word in {"pod", "driver"} else "node"


def _core_rows(report: Report) -> Iterator[Rows]:
    core = report.core
    for family, value in (
        (families.CORE_PASSES, core.passes),
        (families.CORE_WAKES, core.wakes),
        (families.CORE_READS, core.reads),
        (families.CORE_OPENS, core.opens),
        (families.CORE_OVERFLOWS, core.overflows),
        (families.CORE_DESCRIPTORS, core.descriptors),
        (families.CORE_WATCHES, core.watches),
        (families.CORE_MEMORY, core.kernel_bytes),
        (families.CGROUPS, report.groups),
        (families.CGROUPS_DROPPED, core.groups_dropped),
    ):
        yield _rows(family, [((), value)])


def _stream_rows(view: AgentView) -> Iterator[Rows]:
    sockets = view.subscribers()
    yield _rows(families.STREAM_SUBSCRIBERS, (((socket.socket,), socket.streams) for socket in sockets))
    yield _rows(families.STREAM_CONNECTIONS, (((socket.socket,), socket.connections) for socket in sockets))
    sent = [socket for socket in sockets if socket.lists is not None]
    yield _rows(families.STREAM_LISTS, (((counts.socket,), counts.lists) for counts in sent))
    yield _rows(families.STREAM_BYTES, (((counts.socket,), counts.sent_bytes) for counts in sent))


def _prepares(counts: Mapping[tuple[str, str, str], int]) -> list[Series]:
    return [
        ((driver, class_, code[:LABEL_MAX]), count)
        for (driver, class_, code), count in sorted(counts.items())
    ]


def _nvml_rows(costs: NvmlCosts) -> Iterator[Rows]:
    yield _rows(families.NVML_CPU, [((), costs.cpu_s)])
    yield _rows(families.NVML_SWITCHES, [((), costs.switches)])
    yield _rows(families.NVML_PERIOD, [((), costs.period_s)])
    yield _rows(families.NVML_CALLS, (((call.kind,), call.calls) for call in costs.calls))
    yield _rows(families.NVML_CALL_CPU, (((call.kind,), call.cpu_s) for call in costs.calls))
    yield _rows(families.NVML_CALL_TIME, (((call.kind,), call.duration_s) for call in costs.calls))


def _gpu_rows(
    driver: str, answering: Iterable[GpuSample], scrape: _Scrape, dropped: dict[str, int]
) -> Iterator[Rows]:
    """Yield the metric families of GPU readings, for GPUs whose UUID belongs to a shown device of the host.

    A GPU that does not answer has a counter of XIDs only: its last readings are out of date.

    Args:
        driver: Version of the NVIDIA driver.
    """
    if driver:
        yield _rows(families.DRIVER_INFO, [(("nvidia", driver[:LABEL_MAX]), 1)])
    gpu_devices = (device for device in scrape.shown if device.kind == "gpu" and not device.driver)
    names = {uuid: device.key for device in gpu_devices if (uuid := dict(device.attributes).get("uuid"))}
    gpus = [(names[gpu.uuid], gpu) for gpu in answering if gpu.uuid in names]
    for family, readings, factor in families.GPU_FAMILIES:
        yield _rows(
            family,
            (
                ((*key, reading.value) if reading.value else key, value * factor)
                for key, gpu in gpus
                for reading in readings
                if isinstance(value := gpu[reading.field], int)
            ),
        )
    yield _rows(
        families.GPU_NVLINKS,
        (
            (key, links.bit_count())
            for key, gpu in gpus
            if gpu.links and isinstance(links := gpu[GpuField.LINKS_UP], int)
        ),
    )
    xids = [
        ((*names[uuid], str(code)), times)
        for (uuid, code), times in scrape.totals.xids.items()
        if uuid in names
    ]
    yield _limit_series(families.GPU_XIDS, sorted(xids), families.CODES_MAX, dropped)
