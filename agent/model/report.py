"""Report on the Kubernetes node, and status of the agent's process."""

from dataclasses import dataclass, field
from typing import NamedTuple

from agent.model.cleared_faults import ClearedFault, ClearResult
from agent.model.declared_devices import Declarations
from agent.model.gpu import NvmlCosts
from agent.model.health import DeviceHealth, NonDeviceCause, NotApplicable, Repair, Severity
from agent.model.reading import SourceSample
from agent.model.snapshot import NativeCoreStats
from agent.model.time import Instant


@dataclass(frozen=True, slots=True)
class Report:
    """Complete health of the Kubernetes node's devices at one moment. A report replaces all earlier ones."""

    node: str
    at: Instant
    devices: tuple[DeviceHealth, ...] = ()
    """Health of the CPUs, GPUs with their MIG instances, memory, hugepages by size, then declared devices."""
    notes: tuple[NonDeviceCause, ...] = ()
    not_applicable: tuple[NotApplicable, ...] = ()
    not_evaluated: tuple[NotApplicable, ...] = ()
    """Rules that were not evaluated yet, because they need earlier samples to compare with."""
    sources: tuple[SourceSample, ...] = ()
    core: NativeCoreStats = field(default_factory=NativeCoreStats)
    groups: int = 0
    """Number of watched cgroups of pods and containers."""
    declaring: tuple[str, ...] = ()
    """Drivers with a declaration file since the agent started, even an invalid one; their sockets report only
    declared devices."""
    declarations: Declarations = ()
    """Contents of the declaration files that were evaluated."""
    cleared: tuple[ClearedFault, ...] = ()
    """Latched faults that operators cleared within a day, the oldest first."""
    clear_results: tuple[ClearResult, ...] = ()
    """Answers to the requests to clear faults that this evaluation handled."""
    starting: bool = False
    """True: the report is incomplete, since a source is in its first pass. False: complete."""
    is_full: bool = True
    """True: everything was evaluated. False: only GPUs and parts of the host with changes or faults."""


class SocketSubscriberCounts(NamedTuple):
    """Number of health streams and connections that are open on one socket."""

    socket: str
    """Path of the socket, relative to the agent's runtime directory."""
    streams: int
    connections: int = 0
    lists: int | None = None
    """Device lists sent on the socket's health streams since the agent's start; None: no health streams."""
    sent_bytes: int = 0
    """Size of the device lists sent on the socket's health streams since the agent's start [bytes]."""


class SeverityCount(NamedTuple):
    """Number of devices with one severity."""

    severity: Severity
    devices: int


class RepairCount(NamedTuple):
    """Number of devices that need one repair."""

    repair: Repair
    devices: int


class ConfigReload(NamedTuple):
    """Result of a reload of the configuration."""

    at_wall_s: float
    """Time at which the reload of the configuration ended [s since 1970]."""
    error: str = ""
    """Reason why the earlier configuration stays in effect; empty: the reload succeeded."""
    changes: tuple[str, ...] = ()
    """Settings that changed, with both values: ``throttle.events: 10 to 5``."""


class WrittenNodeCondition(NamedTuple):
    """Condition of the Node that the agent has written."""

    type: str
    status: str
    """``True``, ``False`` or ``Unknown``."""
    reason: str


class ClusterStatus(NamedTuple):
    """Status of what the agent writes to the API server: Node conditions, events, DeviceTaintRules."""

    lease: str
    """Lease of the node, ``<namespace>/<name>``."""
    holder: str = ""
    """Identity of the agent that holds the lease; empty: not known, or none does."""
    is_held: bool = False
    """True: this agent holds the lease, and writes. False: it writes nothing."""
    requests: int = 0
    """Requests since the agent started."""
    failures: int = 0
    """Failed attempts since the agent started."""
    error: str = ""
    """Error of the last attempt; empty: all work has succeeded."""
    success_wall_s: float | None = None
    """Time of the last success [s since 1970]; None: there was none."""
    conditions: tuple[WrittenNodeCondition, ...] = ()
    events: int = 0
    """Events, and repetitions of events, that were written since the agent started."""
    taint_rules: int = 0
    """Number of the node's DeviceTaintRules that the agent keeps."""
    maintenance: tuple[str, ...] = ()
    """Conditions of the Node with which it is drained or maintained now (KEP-5683), when it was last read."""


class SentinelStatus(NamedTuple):
    """Status of the health events that the agent sends to NVSentinel's platform connector."""

    socket: str
    """Path of the platform connector's socket."""
    events: int = 0
    """Events that were sent since the agent started."""
    failures: int = 0
    """Failed calls since the agent started."""
    error: str = ""
    """Error of the last call; empty: it succeeded, or there was none."""


class StateFile(NamedTuple):
    """File or directory in which the agent stores its state, and the result of the last write."""

    name: str
    """``faults`` (GPU faults and the machine's values at start), ``history`` or ``record``."""
    error: str = ""
    """Error of the last write; empty: it succeeded, or there was none."""


class PartsStatus(NamedTuple):
    """Status of parts of the agent that no report describes."""

    config_reload: ConfigReload | None = None
    """Last reload of the configuration; None: none since the start."""
    cluster: ClusterStatus | None = None
    """Status of writes to the API server; None: ``k8s.enabled`` is false."""
    nvsentinel: SentinelStatus | None = None
    """State of the events to NVSentinel; None: ``nvsentinel.socket`` is not set."""
    nvml: NvmlCosts | None = None
    """Costs of the calls to NVML; None: NVML is not called."""
    lost_snapshots: int | None = None
    """Number of snapshots that were not recorded, since the recorder's start; None: none are recorded."""
    files: tuple[StateFile, ...] = ()
    """Files of faults, history and record; those that the configuration turns off are left out."""


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """State of the agent's process, with data from its newest report."""

    version: str
    pid: int
    started_wall_s: float
    """Time when the agent's process started [s since 1970]."""
    cpu_s: float
    """User and system time of the process since its start [s]."""
    rss_bytes: int
    threads: int
    descriptors: int
    """Number of open file descriptors of the process."""
    node: str = ""
    """Kubernetes node name. Empty before the first report, as are all fields below except ``subscribers``."""
    at: Instant | None = None
    """Time of the newest report."""
    publications: int = 0
    """Number of reports that the agent has published since its start."""
    tallies: tuple[SeverityCount, ...] = ()
    """Number of devices by severity, worst severity first; severities without devices are left out."""
    sources: tuple[SourceSample, ...] = ()
    core: NativeCoreStats = field(default_factory=NativeCoreStats)
    groups: int = 0
    """Number of watched cgroups of pods and containers."""
    subscribers: tuple[SocketSubscriberCounts, ...] = ()
    """Number of open health streams by socket, including sockets without streams."""
    repairs: tuple[RepairCount, ...] = ()
    """Number of devices in the newest report by repair, worst first; devices that need none are left out."""
    parts: PartsStatus = field(default_factory=PartsStatus)
