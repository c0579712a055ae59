"""Table of the metric families of ``/metrics``. docs/metrics.md is generated from it.

Names follow Prometheus' conventions: base units, ``_total`` for counters, ``_info`` for identities, no label
for the node, which Prometheus adds from the target.
"""

from enum import StrEnum
from typing import Final, NamedTuple

from agent.model.gpu import GpuField
from agent.model.history import RecordedState
from agent.model.reading import DURATION_BOUNDS_S

DEVICES_MAX: Final = 1024
"""Largest number of devices that have series of their own; of more, the devices in the worst state."""
CAUSES_MAX: Final = 4096
"""Largest number of series of ``drahealth_device_finding``; of more, the severest findings."""
CODES_MAX: Final = 256
"""Largest number of series of a family that has a series for each code."""
SOURCES_MAX: Final = 256
"""Largest number of the agent's sources that have series of their own."""

STATES: Final = (
    RecordedState.HEALTHY,
    RecordedState.DEGRADED,
    RecordedState.UNKNOWN,
    RecordedState.UNHEALTHY,
)
DEVICE: Final = ("driver", "pool", "device")


class FamilyKind(StrEnum):
    """Type of a metric family in OpenMetrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"
    STATE_SET = "stateset"


class MetricFamily(NamedTuple):
    """Metric family: name, type, labels and help of series in ``/metrics``."""

    name: str
    """Name of the family without the suffix of its type, such as ``_total``."""
    kind: FamilyKind
    labels: tuple[str, ...]
    help: str
    limit: str
    """Largest number of series on a node, as text for docs/metrics.md."""

    @property
    def series_name(self) -> str:
        """Name of the family's series, as in a query: with the suffix of its type."""
        suffix = {FamilyKind.COUNTER: "_total", FamilyKind.INFO: "_info"}.get(self.kind, "")
        return self.name + suffix

    @property
    def series_labels(self) -> tuple[str, ...]:
        """Names of the series' labels; a state set has a last label with the name of the family."""
        return (*self.labels, self.name) if self.kind is FamilyKind.STATE_SET else self.labels


_PER_DEVICE: Final = f"devices, at most {DEVICES_MAX}"
_PER_STATE: Final = f"4 per device, at most {4 * DEVICES_MAX}"
_PER_SOURCE: Final = f"sources, at most {SOURCES_MAX}"
_PER_CODE: Final = f"at most {CODES_MAX}"
_PER_SOCKET: Final = "drivers, at most 64, and 1"
_PER_GPU: Final = "GPUs, at most 32"


def _gauge(name: str, help_: str, limit: str = "1", *labels: str) -> MetricFamily:
    return MetricFamily(f"drahealth_{name}", FamilyKind.GAUGE, labels, help_, limit)


def _counter(name: str, help_: str, limit: str = "1", *labels: str) -> MetricFamily:
    return MetricFamily(f"drahealth_{name}", FamilyKind.COUNTER, labels, help_, limit)


def _info(name: str, help_: str, limit: str, *labels: str) -> MetricFamily:
    return MetricFamily(f"drahealth_{name}", FamilyKind.INFO, labels, help_, limit)


# --- devices -----------------------------------------------------------------------------------------------

DEVICE_HEALTH: Final = MetricFamily(
    "drahealth_device_health",
    FamilyKind.STATE_SET,
    DEVICE,
    "Health of a device: 1 for its state, 0 for the others. The driver of a host device is empty.",
    _PER_STATE,
)
DEVICE_INFO: Final = _info(
    "device",
    "Identity of a device.",
    _PER_DEVICE,
    *DEVICE,
    "kind",
    "uuid",
    "pci_bus_id",
    "product",
)
DEVICE_FINDING: Final = _gauge(
    "device_finding",
    "Cause of a device's health, 1 while it is reported.",
    f"causes, at most {CAUSES_MAX}",
    *DEVICE,
    "code",
    "severity",
    "repair",
)
DEVICE_TRANSITIONS: Final = _counter(
    "device_transitions",
    "Changes of a device to a state since the agent started.",
    _PER_STATE,
    *DEVICE,
    "to",
)
DEVICE_LOSSES: Final = _counter(
    "device_losses",
    "Changes of a device from healthy or degraded to unknown or unhealthy since the agent started.",
    _PER_DEVICE,
    *DEVICE,
)
DEVICE_SINCE: Final = _gauge(
    "device_health_since_timestamp_seconds",
    "Time of the last change of a device's health, severity or message.",
    _PER_DEVICE,
    *DEVICE,
)
DEVICE_VERIFIED: Final = _gauge(
    "device_last_verified_timestamp_seconds",
    "Time at which all sources of a device had last been read; for a GPU that does not answer, time of the "
    "last evaluation.",
    _PER_DEVICE,
    *DEVICE,
)
DEVICE_SECONDS: Final = _counter(
    "device_health_seconds",
    "Time that a device was in a state since the agent started; states that it never had are left out.",
    _PER_STATE,
    *DEVICE,
    "state",
)
DEVICES: Final = _gauge("devices", "Number of devices in a state, without a limit.", "4", "state")

# --- findings, sources, streams, prepares ------------------------------------------------------------------

FINDINGS: Final = _gauge(
    "findings",
    "Reported faults that concern a pod, the node or a driver, by code. Faults of a pod's cgroups, also "
    "those of audits, have scope pod.",
    _PER_CODE,
    "scope",
    "code",
    "severity",
)
SOURCE_UP: Final = _gauge(
    "source_up",
    "1: the source's last pass read everything. 0: it fails, is stalled, or has not finished a pass. "
    "A source that the machine does not have is left out.",
    _PER_SOURCE,
    "source",
)
SOURCE_STALLED: Final = _gauge(
    "source_stalled", "1: no pass of the source has finished for too long.", _PER_SOURCE, "source"
)
SOURCE_STALLS: Final = _counter(
    "source_stalls",
    "Times that the source stalled since the agent started.",
    _PER_SOURCE,
    "source",
)
SOURCE_PASSES: Final = _counter("source_passes", "Finished passes of the source.", _PER_SOURCE, "source")
SOURCE_FAILURES: Final = _counter("source_failures", "Failed reads of the source.", _PER_SOURCE, "source")
SOURCE_READ: Final = _gauge(
    "source_last_pass_timestamp_seconds",
    "Time at the end of the source's last finished pass.",
    _PER_SOURCE,
    "source",
)
SOURCE_PERIOD: Final = _gauge(
    "source_period_seconds", "Time between two passes of the source.", _PER_SOURCE, "source"
)
SOURCE_DURATION: Final = MetricFamily(
    "drahealth_source_pass_seconds",
    FamilyKind.HISTOGRAM,
    ("source",),
    "Durations of the source's passes. Sources that wait for events, and custom checks, have none. "
    "Source nvml: passes over one GPU each, in kernel ticks of 1 to 10 ms, since the start of its process.",
    f"{len(DURATION_BOUNDS_S) + 2} per source, at most {16 * (len(DURATION_BOUNDS_S) + 2)}",
)
STREAM_SUBSCRIBERS: Final = _gauge("stream_subscribers", "Open health streams.", _PER_SOCKET, "socket")
STREAM_CONNECTIONS: Final = _gauge("stream_connections", "Open connections.", _PER_SOCKET, "socket")
STREAM_LISTS: Final = _counter(
    "stream_lists_sent", "Device lists sent on health streams.", _PER_SOCKET, "socket"
)
STREAM_BYTES: Final = _counter(
    "stream_sent_bytes",
    "Bytes of device lists sent on health streams, without framing.",
    _PER_SOCKET,
    "socket",
)
PREPARES: Final = _counter(
    "prepares",
    "Prepares of claims that a driver reported since the agent started, by class and code of the error; "
    "class ok: no error.",
    _PER_CODE,
    "driver",
    "class",
    "code",
)

# --- GPUs --------------------------------------------------------------------------------------------------

DRIVER_INFO: Final = _info("driver", "Version of the GPU driver.", "1", "name", "version")
GPU_XIDS: Final = _counter(
    "gpu_xids",
    "GPU errors (XIDs) that NVML reported since the agent started.",
    _PER_CODE,
    *DEVICE,
    "xid",
)
NVML_CPU: Final = _counter("nvml_cpu_seconds", "CPU time of the threads that read GPUs through NVML.")
NVML_SWITCHES: Final = _counter("nvml_context_switches", "Context switches of the threads that read GPUs.")
NVML_PERIOD: Final = _gauge(
    "nvml_period_seconds",
    "Longest time between two passes over a GPU that is in force, because of gpu.cpu-budget.",
)
_PER_CALL: Final = "kinds of calls, at most 20"
NVML_CALLS: Final = _counter(
    "nvml_measured_calls",
    "NVML calls whose costs were measured: those of about two passes per gpu.slow-period, and all calls "
    "that open the library or wait for events.",
    _PER_CALL,
    "call",
)
NVML_CALL_CPU: Final = _counter(
    "nvml_measured_calls_cpu_seconds", "CPU time of the measured NVML calls.", _PER_CALL, "call"
)
NVML_CALL_TIME: Final = _counter(
    "nvml_measured_calls_seconds",
    "Duration of the measured NVML calls; for nvmlEventSetWait also the time until an event.",
    _PER_CALL,
    "call",
)
GPU_NVLINKS: Final = _gauge("gpu_nvlinks_up", "Active NVLinks of a GPU.", _PER_GPU, *DEVICE)


class GpuReading(NamedTuple):
    """Reading of a GPU that becomes one series of a metric family."""

    field: GpuField
    value: str = ""
    """Value of the family's last label in this series; empty: the family has no label for the reading."""


class GpuFamily(NamedTuple):
    """Metric family whose series are readings of GPUs. A reading that a GPU does not have is left out."""

    family: MetricFamily
    readings: tuple[GpuReading, ...]
    factor: float = 1.0
    """Factor from the unit of the GPU's readings to the unit of the family."""


def _gpu(
    kind: FamilyKind, name: str, help_: str, label: str, factor: float = 1.0, **fields: str
) -> GpuFamily:
    readings = tuple(
        GpuReading(GpuField[key.upper()], value if label else "") for key, value in fields.items()
    )
    labels = (*DEVICE, label) if label else DEVICE
    limit = f"{len(readings)} per GPU, at most {32 * len(readings)}"
    return GpuFamily(MetricFamily(f"drahealth_gpu_{name}", kind, labels, help_, limit), readings, factor)


_GAUGE, _COUNTER = FamilyKind.GAUGE, FamilyKind.COUNTER
GPU_FAMILIES: Final = (
    _gpu(_GAUGE, "temperature_celsius", "Temperature.", "sensor", temp="gpu", mem_temp="memory"),
    _gpu(_GAUGE, "temperature_margin_celsius", "Margin to the thermal limit.", "", margin=""),
    _gpu(_GAUGE, "utilization_ratio", "Share of time in which a kernel ran.", "", 0.01, utilization=""),
    _gpu(
        _COUNTER,
        "throttled_seconds",
        "Time of clock throttling.",
        "cause",
        1e-9,
        slowed_sw_power="software_power",
        slowed_sw_thermal="software_thermal",
        slowed_hw_thermal="hardware_thermal",
        slowed_hw_brake="hardware_power_brake",
    ),
    _gpu(
        _COUNTER,
        "ecc_errors",
        "ECC errors of all memories since the driver was loaded.",
        "type",
        ecc_correctable="correctable",
        ecc_uncorrectable="uncorrectable",
    ),
    _gpu(
        _GAUGE,
        "remapped_rows",
        "Memory rows remapped because of errors.",
        "cause",
        remap_correctable="correctable",
        remap_uncorrectable="uncorrectable",
    ),
    _gpu(_GAUGE, "row_remap_pending", "1: a remap of rows needs a reset of the GPU.", "", remap_pending=""),
    _gpu(_GAUGE, "row_remap_failed", "1: a remap of rows failed.", "", remap_failure=""),
    _gpu(
        _GAUGE,
        "retired_pages",
        "Memory pages retired because of errors (GPUs before Ampere).",
        "cause",
        retired_sbe="single_bit",
        retired_dbe="double_bit",
    ),
    _gpu(_COUNTER, "pcie_replays", "PCIe replays.", "", pcie_replay=""),
    _gpu(
        _COUNTER,
        "pcie_errors",
        "PCIe errors (AER) since boot.",
        "type",
        aer_correctable="correctable",
        aer_nonfatal="nonfatal",
        aer_fatal="fatal",
    ),
    _gpu(
        _GAUGE,
        "pcie_link_lanes",
        "Lanes of the PCIe link.",
        "link",
        pcie_width="current",
        pcie_width_max="maximum",
    ),
    _gpu(
        _GAUGE,
        "pcie_link_generation",
        "Generation of the PCIe link.",
        "link",
        pcie_gen="current",
        pcie_gen_max="maximum",
    ),
    _gpu(
        _COUNTER,
        "nvlink_errors",
        "Errors of all NVLinks of the GPU.",
        "type",
        link_replay="replay",
        link_recovery="recovery",
        link_recovery_failed="recovery_failed",
        link_crc="crc",
        link_receive_errors="receive",
        link_effective_errors="effective",
        link_symbol_errors="symbol",
    ),
)

# --- agent -------------------------------------------------------------------------------------------------

BUILD_INFO: Final = _info("build", "Version of the agent, and name of its node.", "1", "version", "node_name")
REPORTS: Final = _counter("reports", "Published reports.")
REPORT_TIME: Final = _gauge("report_timestamp_seconds", "Time of the newest report.")
RELOAD_OK: Final = _gauge(
    "config_last_reload_successful",
    "1: the last reload of the configuration succeeded. Left out before the first reload.",
)
RELOAD_TIME: Final = _gauge(
    "config_last_reload_timestamp_seconds", "Time of the last reload of the configuration."
)
CLUSTER_LEASE: Final = _gauge(
    "cluster_lease_held",
    "1: this agent holds the node's lease and writes to the API server. Left out without k8s.enabled.",
)
CLUSTER_REQUESTS: Final = _counter("cluster_requests", "Requests to the API server.")
CLUSTER_FAILURES: Final = _counter("cluster_failures", "Failed attempts to write to the API server.")
CLUSTER_EVENTS: Final = _counter(
    "cluster_events", "Events of the Node and of pods, and repetitions of them, that were written."
)
CLUSTER_RULES: Final = _gauge("cluster_taint_rules", "DeviceTaintRules of the node that the agent keeps.")
CLUSTER_SUCCESS: Final = _gauge(
    "cluster_last_success_timestamp_seconds", "Time of the last successful work at the API server."
)
NVSENTINEL_EVENTS: Final = _counter(
    "nvsentinel_events", "Health events sent to NVSentinel's platform connector."
)
NVSENTINEL_FAILURES: Final = _counter(
    "nvsentinel_failures", "Failed calls of NVSentinel's platform connector."
)
RECORD_LOST: Final = _counter(
    "record_lost_snapshots", "Snapshots that were not recorded. Left out without record.dir."
)
WRITES_FAILED: Final = _gauge(
    "file_write_failed",
    "1: the last write of one of the agent's files failed: of GPU faults, history or record.",
    "3",
    "file",
)
CORE_PASSES: Final = _counter("core_passes", "Finished passes of the C core.")
CORE_WAKES: Final = _counter("core_wakes", "Times that the C core woke the engine loop.")
CORE_READS: Final = _counter("core_reads", "File reads of the C core.")
CORE_OPENS: Final = _counter("core_opens", "Files opened by the C core.")
CORE_OVERFLOWS: Final = _counter("core_inotify_overflows", "Overflows of the kernel's inotify queue.")
CORE_DESCRIPTORS: Final = _gauge("core_descriptors", "Open file descriptors of the C core.")
CORE_WATCHES: Final = _gauge("core_inotify_watches", "inotify watches of the C core.")
CORE_MEMORY: Final = _gauge(
    "core_kernel_memory_bytes", "Kernel memory of the C core's descriptors and watches, estimated."
)
CGROUPS: Final = _gauge("cgroups_watched", "Watched cgroups of pods and containers.")
CGROUPS_DROPPED: Final = _gauge("cgroups_dropped", "Cgroups that are not watched because of max-groups.")
HTTP_CONNECTIONS: Final = _gauge("http_connections", "Open connections of the HTTP server.")
HTTP_REFUSED: Final = _counter(
    "http_connections_refused", "Connections that the HTTP server closed because of its limit."
)
DROPPED: Final = _gauge(
    "metrics_dropped_series",
    "Series that are left out because a family has reached its limit.",
    "families with a limit",
    "family",
)

DEVICE_FAMILIES: Final = (
    DEVICE_HEALTH,
    DEVICE_INFO,
    DEVICE_FINDING,
    DEVICE_TRANSITIONS,
    DEVICE_LOSSES,
    DEVICE_SINCE,
)
"""Metric families of devices whose values change only with a verdict."""
TIME_FAMILIES: Final = (DEVICE_VERIFIED, DEVICE_SECONDS)
"""Metric families of devices whose values change with time."""
AGENT_FAMILIES: Final = (
    DEVICES,
    FINDINGS,
    SOURCE_UP,
    SOURCE_STALLED,
    SOURCE_STALLS,
    SOURCE_PASSES,
    SOURCE_FAILURES,
    SOURCE_READ,
    SOURCE_PERIOD,
    SOURCE_DURATION,
    STREAM_SUBSCRIBERS,
    STREAM_CONNECTIONS,
    STREAM_LISTS,
    STREAM_BYTES,
    PREPARES,
    DRIVER_INFO,
    GPU_XIDS,
    GPU_NVLINKS,
    NVML_CPU,
    NVML_SWITCHES,
    NVML_PERIOD,
    NVML_CALLS,
    NVML_CALL_CPU,
    NVML_CALL_TIME,
    *(gpu.family for gpu in GPU_FAMILIES),
    BUILD_INFO,
    REPORTS,
    REPORT_TIME,
    RELOAD_OK,
    RELOAD_TIME,
    CLUSTER_LEASE,
    CLUSTER_REQUESTS,
    CLUSTER_FAILURES,
    CLUSTER_EVENTS,
    CLUSTER_RULES,
    CLUSTER_SUCCESS,
    NVSENTINEL_EVENTS,
    NVSENTINEL_FAILURES,
    RECORD_LOST,
    WRITES_FAILED,
    CORE_PASSES,
    CORE_WAKES,
    CORE_READS,
    CORE_OPENS,
    CORE_OVERFLOWS,
    CORE_DESCRIPTORS,
    CORE_WATCHES,
    CORE_MEMORY,
    CGROUPS,
    CGROUPS_DROPPED,
    HTTP_CONNECTIONS,
    HTTP_REFUSED,
    DROPPED,
)
FAMILIES: Final = (*DEVICE_FAMILIES, *TIME_FAMILIES, *AGENT_FAMILIES)
