"""Configuration of the agent: read from flags, environment variables and TOML files, and validated.

Each entry of ``SETTINGS`` describes one setting. Flags win over variables, variables over the files, a
drop-in over the files before it, the files over the defaults. An unknown key or a value out of range is an
error: an agent with a misread configuration would report wrong health to the kubelet.

agent.config.files reads the files, agent.config.value_kinds and agent.config.values convert and check single
values.
"""

import math
import os
import re
from collections.abc import Callable, Container, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from agent.config import value_kinds as kinds
from agent.config.files import DEFAULT_FILE, read_config_files
from agent.config.value_kinds import ValueKind
from agent.config.values import (
    HOUR,
    MS,
    SWITCH_VALUES,
    S,
    check_device_kinds,
    check_driver_names,
    check_hugepage_pools,
    check_library_length,
    check_listen_addresses,
    check_log_format,
    check_namespace,
    check_node_name,
    check_path_length,
    check_xids,
    duration_within,
    format_duration,
    number_within,
    seconds_within,
    size_within,
    split_values,
    unless_zero,
)
from agent.errors import ConfigError, suggestion
from agent.model.cpuset import CpuSet
from agent.model.health import XidOverride
from agent.model.settings import CustomCheck, RuleOverride
from agent.model.socket_address import ListenAddress
from agent.system.files import StrPath, as_path

if TYPE_CHECKING:
    from agent.prepare.error_tables import ErrorPattern

RUNTIME_DIR: Final = Path("/run/drahealth")
STATE_DIR: Final = Path("/var/lib/drahealth")
KUBELET_DIR: Final = Path("/var/lib/kubelet")
"""Directory of a kubelet that was started without --root-dir."""
CHECKPOINT: Final = "dra_manager_state"
"""The kubelet's checkpoint file of prepared claims, relative to the kubelet's directory."""
PODS_API: Final = "pods-api/pods-api.sock"
"""Socket of the kubelet's pods API, relative to the kubelet's directory."""
DRIVERS: Final = "drivers"
"""Name of the subdirectory for drivers, in the runtime directory (sockets) and in the state directory."""
PREFIX: Final = "DRAHEALTH_"
CONFIG_VARIABLE: Final = "DRAHEALTH_CONFIG"
"""Environment variable with the path of the configuration file."""
SERVICE_LINK: Final = re.compile(r"DRAHEALTH_(\w+_)?(SERVICE_(HOST|PORT)|PORT)(_|$)")
FOREIGN_VARIABLES: Final = frozenset({CONFIG_VARIABLE, "DRAHEALTH_RUN_ARGS"})
"""Environment variables that begin with ``DRAHEALTH_`` and are no settings."""
CHECK_VARIABLES: Final = frozenset({"DRAHEALTH_CHECK", "DRAHEALTH_NODE", "DRAHEALTH_DEVICE"})
"""Environment variables of a custom check's command, which may call drahealth."""


LEASE_MAX_S: Final = 86_399
"""Longest lease, the time for which the kubelet accepts a health message [s]: one day less a second.
The agent sometimes adds this second, so that two messages differ."""
WEEK_S: Final = 7 * 86_400
YEAR_S: Final = 365 * 86_400
GROUPS_MAX: Final = 16_384
"""Upper limit of watched cgroups: more would exceed the memory limit of the systemd unit."""
HELD_MAX: Final = 32 << 20
"""Upper limit of kernel memory for descriptors of cgroup files [bytes].

It counts towards the memory limit of the systemd unit.
"""
RECORD_MAX: Final = 1 << 40
"""Upper limit of the size of a record of snapshots [bytes]."""
GPUS_MAX: Final = 32
"""Largest number of GPUs that the C core watches."""


class Setting(NamedTuple):
    """Setting of the agent: its key in a file, flag, variable, and how its value is parsed and checked."""

    key: str
    """Key of the setting in a file: ``agent.period`` is ``period`` in the table ``[agent]``."""
    field: str
    """Name of the field in :class:`Config` that holds the setting's value."""
    kind: ValueKind
    """Kind of the value: its parser, its form in a file, and its JSON schema."""
    check_limits: Callable[[Any], None] = lambda _: None
    """Function that raises ValueError, with value and limit in its text, if a value is out of range."""
    flag: str = ""
    """Command-line flag; empty: the setting can only be set in the file."""
    metavar: str = ""
    help: str = ""
    """Meaning of the setting, for ``--help`` and the JSON schema."""
    is_repeatable: bool = False
    """True: the setting's flag may be repeated, and its variable may hold several values."""
    is_switch: bool = False
    """True: the setting is a boolean whose flag takes no value; its variable is 1, 0, true or false."""
    is_fixed: bool = False
    """True: only a restart of the agent applies a change of the setting; a reload refuses it."""

    @property
    def parse(self) -> Callable[[object], object]:
        """Function that converts the value in file, variable or flag to the type of the field in Config.

        It raises ValueError or TypeError.
        """
        return self.kind.parse

    @property
    def variable(self) -> str:
        """Name of the setting's environment variable, e.g. ``DRAHEALTH_PERIOD``."""
        return PREFIX + self.flag.removeprefix("--").replace("-", "_").upper()


SETTINGS: Final = (
    Setting("agent.drivers", "drivers", kinds.NAMES, check_driver_names, "--driver", "NAME",
            "serve the kubelet's health API for this DRA driver; may be given again", is_repeatable=True,
            is_fixed=True),
    Setting("agent.node-name", "node_name", kinds.TEXT, check_node_name, "--node-name", "NAME",
            "the DRA pool of the node's devices (default: the host name)", is_fixed=True),
    Setting("agent.period", "period_ns", kinds.DURATION, duration_within(10 * MS, HOUR), "--period", "TIME",
            "how often the node is checked, 10ms to 1h (default: 1s)", is_fixed=True),
    Setting("agent.runtime-dir", "runtime_dir", kinds.PATH, flag="--runtime-dir", metavar="DIR",
            help="directory of the sockets (default: /run/drahealth; not root: $XDG_RUNTIME_DIR/drahealth)",
            is_fixed=True),
    Setting("agent.state-dir", "state_dir", kinds.PATH, flag="--state-dir", metavar="DIR",
            help="directory of state kept over restarts (default: /var/lib/drahealth, or state/ in another "
            "--runtime-dir)", is_fixed=True),
    Setting("agent.log-format", "log_format", kinds.LOG_FORMAT, check_log_format, "--log-format", "FORMAT",
            "format of the log, text or json (default: text)", is_fixed=True),
    Setting("http.listen", "listen", kinds.ADDRESSES, check_listen_addresses, "--listen", "ADDRESS",
            "serve metrics and reports over HTTP at this ADDRESS[:PORT] or unix:PATH; may be given again "
            "(default port: 14680)", is_repeatable=True, is_fixed=True),
    Setting("http.web-config", "web_config", kinds.PATH, flag="--web-config", metavar="FILE",
            help="TLS and passwords of the HTTP server, in the form of Prometheus' web configuration",
            is_fixed=True),
    Setting("roots.sysfs", "sysfs_root", kinds.PATH, check_path_length, "--sysfs-root", "DIR",
            "where sysfs is mounted (default: /sys)", is_fixed=True),
    Setting("roots.procfs", "procfs_root", kinds.PATH, check_path_length, "--procfs-root", "DIR",
            "where procfs is mounted (default: /proc)", is_fixed=True),
    Setting("roots.cgroupfs", "cgroupfs_root", kinds.PATH, check_path_length, "--cgroupfs-root", "DIR",
            "where the cgroup tree or trees are mounted (default: /sys/fs/cgroup)", is_fixed=True),
    Setting("roots.kubelet-cgroup", "kubelet_cgroup_root", kinds.CGROUP, check_path_length,
            "--kubelet-cgroup-root", "GROUP", "the kubelet's own --cgroup-root (default: /)", is_fixed=True),
    Setting("roots.nvml-library", "nvml_library", kinds.LIBRARY, check_library_length, "--nvml-library",
            "LIBRARY", "NVIDIA's management library, a name or a path (default: libnvidia-ml.so.1)",
            is_fixed=True),
    Setting("roots.kmsg", "kmsg", kinds.PATH, check_path_length, "--kmsg", "FILE",
            "the kernel log (default: /dev/kmsg)", is_fixed=True),
    Setting("roots.kmsg-any-facility", "kmsg_any_facility", kinds.SWITCH, flag="--kmsg-any-facility",
            help="also accept kernel log lines written by processes: for tests", is_switch=True,
            is_fixed=True),
    Setting("stream.lease", "lease_s", kinds.SECONDS, seconds_within(3, LEASE_MAX_S),
            help="how long the kubelet may use a verdict"),
    Setting("stream.heartbeat", "heartbeat_s", kinds.FRACTIONAL_SECONDS, seconds_within(0.1, 60),
            help="interval at which verified devices are sent again, at most a third of the lease"),
    Setting("stream.coalesce", "coalesce_ns", kinds.DURATION, duration_within(0, 10 * S),
            help="time within which changes are collected and sent together"),
    Setting("cgroups.sweep", "sweep_ns", kinds.DURATION, duration_within(100 * MS, HOUR),
            help="interval at which counters without kernel events are read", is_fixed=True),
    Setting("cgroups.resync", "resync_ns", kinds.DURATION, duration_within(100 * MS, 24 * HOUR),
            help="interval at which all files are read again, with or without events", is_fixed=True),
    Setting("cgroups.max-groups", "group_max", kinds.COUNT, number_within(1, GROUPS_MAX),
            help="limit of watched cgroups of pods and containers", is_fixed=True),
    Setting("cgroups.held-memory", "held_bytes", kinds.SIZE, size_within(0, HELD_MAX),
            help="limit of kernel memory for open cgroup files; 0: no file stays open", is_fixed=True),
    Setting("cgroups.throttled-percent", "throttled_percent", kinds.COUNT, number_within(1, 100),
            help="share of throttled CPU periods above which a container counts as throttled"),
    Setting("cgroups.throttled-window", "throttled_window_s", kinds.SECONDS, seconds_within(10, 7200),
            help="window of cgroups.throttled-percent, at least two sweeps"),
    Setting("pods.kubelet-dir", "kubelet_dir", kinds.PATH, flag="--kubelet-dir", metavar="DIR",
            help="where the kubelet has its files and sockets (default: /var/lib/kubelet)", is_fixed=True),
    Setting("pods.period", "pods_period_ns", kinds.DURATION, duration_within(S, HOUR),
            help="interval at which all sources of pods are read again, even without a change"),
    Setting("pods.audit", "pods_audit_ns", kinds.DURATION, unless_zero(duration_within(10 * S, 24 * HOUR)),
            help="interval of the audit of pods with claims; 0s: never"),
    Setting("expect.cpus", "expect_cpus", kinds.CPUS,
            help="CPUs that must be online; default: those online at the first start since boot"),
    Setting("expect.hugepages", "expect_pools", kinds.POOLS, check_hugepage_pools,
            help="expected pages by hugepage device; default: their number at the first start since boot"),
    Setting("expect.gpus", "expect_gpus", kinds.COUNT, number_within(0, GPUS_MAX),
            help="expected number of GPUs; default: all that the node ever had"),
    Setting("throttle.events", "throttle_events", kinds.COUNT, number_within(1, 1_000_000),
            help="number of thermal-throttle events that makes the CPUs of a NUMA node degraded"),
    Setting("throttle.window", "throttle_window_s", kinds.SECONDS, seconds_within(2, 86400),
            help="window of throttle.events, at least two periods"),
    Setting("errors.correctable", "correctable_errors", kinds.COUNT, number_within(1, 1_000_000),
            help="number of correctable errors that makes a memory module or CPU degraded"),
    Setting("errors.window", "correctable_window_s", kinds.SECONDS, seconds_within(1, WEEK_S),
            help="window of errors.correctable"),
    Setting("pressure.percent", "pressure_percent", kinds.COUNT, number_within(1, 100),
            help="share of time, spent waiting for memory or I/O by all tasks, that makes the node degraded"),
    Setting("pressure.window", "pressure_window_s", kinds.SECONDS, seconds_within(10, 3600),
            help="window of pressure.percent"),
    Setting("nic.errors", "nic_errors", kinds.COUNT, number_within(1, 1_000_000),
            help="number of symbol errors, or of damaged packets, that makes a port degraded"),
    Setting("nic.error-window", "nic_error_window_s", kinds.SECONDS, seconds_within(60, 86400),
            help="window of nic.errors, at least twice gpu.slow-period"),
    Setting("nic.link-downs", "nic_link_downs", kinds.COUNT, number_within(1, 1000),
            help="number of link losses that makes a port degraded"),
    Setting("nic.link-window", "nic_link_window_s", kinds.SECONDS, seconds_within(60, 86400),
            help="window of nic.link-downs, at least twice gpu.slow-period"),
    Setting("gpu.watch", "gpu_watch", kinds.SWITCH, help="whether GPUs are monitored", is_fixed=True),
    Setting("gpu.process", "gpu_process", kinds.SWITCH,
            help="whether a separate process calls NVML", is_fixed=True),
    Setting("gpu.slow-period", "gpu_slow_ns", kinds.DURATION, duration_within(100 * MS, HOUR),
            help="interval of slow readings, at least a period", is_fixed=True),
    Setting("gpu.cpu-budget", "gpu_cpu_ns", kinds.DURATION, duration_within(0, S),
            help="limit of CPU time per second of GPU readings, which a longer period keeps; 0s: no limit",
            is_fixed=True),
    Setting("gpu.deadline", "gpu_deadline_ns", kinds.DURATION, duration_within(100 * MS, 600 * S),
            help="duration of an NVML call after which its GPU is Unknown", is_fixed=True),
    Setting("gpu.dead", "gpu_dead_ns", kinds.DURATION, duration_within(100 * MS, 24 * HOUR),
            help="duration of an NVML call after which its GPU is Unhealthy, more than gpu.deadline"),
    Setting("gpu.probation", "gpu_probation_ns", kinds.DURATION, duration_within(0, 24 * HOUR),
            help="time for which a GPU stays Unhealthy after its fault has ended"),
    Setting("gpu.correctable-errors", "gpu_correctable_errors", kinds.COUNT, number_within(1, 1_000_000),
            help="number of correctable memory errors that makes a GPU degraded"),
    Setting("gpu.correctable-window", "gpu_correctable_window_s", kinds.SECONDS, seconds_within(1, 86400),
            help="window of gpu.correctable-errors"),
    Setting("gpu.xids", "gpu_xids", kinds.XIDS, check_xids,
            help="severities of XIDs that replace those in the catalog"),
    Setting("rules", "rules", kinds.RULES,
            help="changes of rules by code and device: off, severity, probation and limit"),
    Setting("check", "checks", kinds.CHECKS,
            help="checks of devices, or of the node, by commands: exit code 0 is OK, 1 a fault"),
    Setting("history.rows", "history_rows", kinds.COUNT, number_within(0, 100_000),
            help="number of verdict changes and ended uses to keep; 0: nothing is recorded", is_fixed=True),
    Setting("history.age", "history_age_s", kinds.SECONDS, seconds_within(3600, YEAR_S),
            help="how long changes of verdicts, and ended uses, are kept", is_fixed=True),
    Setting("record.dir", "record_dir", kinds.PATH, check_path_length, "--record-dir", "DIR",
            "record the snapshots that verdicts are derived from, for drahealth replay (default: none)"),
    Setting("record.size", "record_size", kinds.SIZE, size_within(1 << 20, RECORD_MAX),
            help="largest size of all recorded segments; the oldest are deleted"),
    Setting("record.age", "record_age_s", kinds.SECONDS, seconds_within(3600, YEAR_S),
            help="how long segments are kept"),
    Setting("k8s.enabled", "k8s_enabled", kinds.SWITCH,
            help="whether the devices' health is written to the API server", is_fixed=True),
    Setting("k8s.kubeconfig", "k8s_kubeconfig", kinds.PATH,
            help="kubeconfig of the agent; default: the service account of its pod", is_fixed=True),
    Setting("k8s.namespace", "k8s_namespace", kinds.TEXT, check_namespace,
            help="namespace of the node's lease; default: that of the pod, else drahealth", is_fixed=True),
    Setting("k8s.condition-kinds", "k8s_condition_kinds", kinds.NAMES, check_device_kinds,
            help="kinds of devices with a condition of their own on the Node"),
    Setting("k8s.events", "k8s_events", kinds.SWITCH,
            help="whether faults of devices are written as events of the Node and of pods"),
    Setting("k8s.taint-rules", "k8s_taint_rules", kinds.NAMES, check_driver_names,
            help="drivers that publish no taints: their Unhealthy devices get DeviceTaintRules"),
    Setting("nvsentinel.socket", "nvsentinel_socket", kinds.PATH, check_path_length,
            help="socket of NVSentinel's platform connector, which gets health events (default: none)",
            is_fixed=True),
    Setting("nvsentinel.remediate", "nvsentinel_remediate", kinds.SWITCH,
            help="whether NVSentinel may act on these events; false: it stores them", is_fixed=True),
    Setting("prepare.patterns", "prepare_patterns", kinds.PATTERNS,
            help="texts of prepare errors and their classes"),
    Setting("taints.evict", "taint_evict", kinds.CODES,
            help="codes, or families such as gpu.xid.*, whose faults evict pods"),
    Setting("taints.quiet", "taint_quiet_s", kinds.SECONDS, seconds_within(0, 86400),
            help="time for which a cause must be gone before its taint is removed"),
    Setting("taints.tell-unknown", "taint_unknown", kinds.SWITCH,
            help="taint devices that are Unknown for a minute"),
    Setting("taints.inform", "taint_inform", kinds.SWITCH, help="publish taints of effect None"),
    Setting("taints.wait", "taint_wait_s", kinds.FRACTIONAL_SECONDS, seconds_within(0, 10),
            help="time for which an embedded driver's error about a failed device waits for the taint"),
)  # fmt: skip


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of the agent. The values are validated when an instance is created.

    Raises:
        ConfigError: A field is out of its limits; ``key`` names the setting.
    """

    node_name: str
    """Name of the DRA pool with this machine's own devices; by default the host name."""
    period_ns: int = S
    """Interval between two reads of the kernel files about the whole machine [ns]."""
    sweep_ns: int = 10 * S
    """Interval between two reads of the cgroup counters for which the kernel sends no notification [ns]."""
    resync_ns: int = 300 * S
    """Interval between two reads of all cgroup files, including those with notifications [ns]."""
    group_max: int = 4096
    """Limit of watched cgroups of pods and containers."""
    held_bytes: int = 4 << 20
    """Limit of kernel memory for descriptors of cgroup files that stay open between two reads [bytes]."""
    sysfs_root: Path = Path("/sys")
    procfs_root: Path = Path("/proc")
    cgroupfs_root: Path = Path("/sys/fs/cgroup")
    kubelet_cgroup_root: str = "/"
    """The kubelet's --cgroup-root, relative to ``cgroupfs_root``."""
    nvml_library: str = "libnvidia-ml.so.1"
    """NVML library: a name for the dynamic linker, or a path."""
    kmsg: Path = Path("/dev/kmsg")
    kmsg_any_facility: bool = False
    """Whether kernel log lines written by processes count as the kernel's own."""
    runtime_dir: Path = RUNTIME_DIR
    state_dir: Path = Path()
    """Directory of state kept over restarts. Default: :data:`STATE_DIR`, or ``state`` in a runtime directory
    other than :data:`RUNTIME_DIR`, so that a second agent does not use the state of the node's own."""
    log_format: str = "text"
    """Format of the log: ``text`` or ``json``."""
    drivers: tuple[str, ...] = ()
    listen: tuple[ListenAddress, ...] = ()
    """Addresses of the HTTP server; empty: there is no HTTP server."""
    web_config: Path | None = None
    """File with TLS and passwords of the HTTP server; None: neither."""
    heartbeat_s: float = 10
    """Interval at which the health of verified devices is sent again [s]."""
    lease_s: int = 30
    """Time for which the kubelet accepts a health message [s]; default: the kubelet's own."""
    coalesce_ns: int = 100 * MS
    """Debounce: changes within this time after the first are sent together [ns]."""
    kubelet_dir: Path = KUBELET_DIR
    pods_period_ns: int = 60 * S
    """Interval between two queries for which pods use which devices, even without changes [ns]."""
    pods_audit_ns: int = 300 * S
    """Interval between two audits of the cgroups of pods with claims [ns]; 0: never."""
    expect_cpus: CpuSet | None = None
    """CPUs that must be online; None: the CPUs that are online at the first start since boot."""
    expect_pools: dict[str, int] = msgspec.field(default_factory=dict)
    """Expected pages by hugepage device; for other devices: their pages at the first start since boot."""
    throttle_events: int = 10
    """Limit of thermal-throttle events of a NUMA node within ``throttle_window_s``."""
    throttle_window_s: int = 60
    throttled_percent: int = 25
    """Limit of the share of CFS periods in which a container was throttled [%]."""
    throttled_window_s: int = 60
    correctable_errors: int = 24
    """Limit of correctable errors of a memory module or CPU within ``correctable_window_s``."""
    correctable_window_s: int = 86_400
    pressure_percent: int = 10
    """Limit of the share of ``pressure_window_s`` in which all tasks of the machine waited [%]."""
    pressure_window_s: int = 60
    nic_errors: int = 120
    """Limit of symbol errors, and of receive errors, of a NIC's port within ``nic_error_window_s``."""
    nic_error_window_s: int = 3600
    nic_link_downs: int = 3
    """Limit of times that the link of a NIC's port goes down within ``nic_link_window_s``."""
    nic_link_window_s: int = 600
    expect_gpus: int | None = None
    """Expected number of GPUs; None: all that the node ever had."""
    gpu_watch: bool = True
    """True: the agent watches GPUs."""
    gpu_process: bool = True
    """True: NVML is called by a process of its own. False: by threads of the agent's process."""
    gpu_slow_ns: int = 10 * S
    """Interval between two reads of GPU fields that seldom change [ns]; at least ``period_ns``."""
    gpu_cpu_ns: int = 2 * MS
    """CPU time per second of the threads that read GPUs [ns]; 0: no limit.

    To keep within it, the agent prolongs the time between two passes to at most 10 s. With a ``period_ns``
    below 1 s, the default grows with the number of passes per second.
    """
    gpu_deadline_ns: int = 5 * S
    """Time limit of an NVML call, after which the GPU is Unknown [ns]."""
    gpu_dead_ns: int = 60 * S
    """Time without an answer after which a GPU is Unhealthy [ns]; longer than ``gpu_deadline_ns``."""
    gpu_probation_ns: int = 60 * S
    """Time without a new fault for which a recovered GPU stays Unhealthy [ns]."""
    gpu_correctable_errors: int = 1000
    """Limit of correctable memory errors of a GPU within ``gpu_correctable_window_s``."""
    gpu_correctable_window_s: int = 3600
    gpu_xids: dict[int, XidOverride] = msgspec.field(default_factory=dict)
    """Severities that the operator sets for XIDs, by XID number."""
    rules: tuple[RuleOverride, ...] = ()
    """Changes of rules by the operator, by code and device."""
    checks: tuple[CustomCheck, ...] = ()
    """Checks that the operator configures as commands."""
    history_rows: int = 10_000
    """Number of ended device uses that are kept; 0: no history is written."""
    history_age_s: int = 30 * 86_400
    """Age up to which ended device uses are kept [s]."""
    record_dir: Path | None = None
    """Directory of the record of snapshots; None: no snapshots are recorded."""
    record_size: int = 256 << 20
    """Largest size of all segment files of the record together [bytes]."""
    record_age_s: int = 30 * 86_400
    """Age up to which segment files of the record are kept [s]."""
    k8s_enabled: bool = False
    """Whether the devices' health is written to the API server."""
    k8s_kubeconfig: Path | None = None
    """Kubeconfig with the access to the API server; None: the service account of the agent's pod."""
    k8s_namespace: str = ""
    """Namespace of the node's Lease; empty: that of the agent's pod, else ``drahealth``."""
    k8s_condition_kinds: tuple[str, ...] = ()
    """Kinds of devices that have a condition of their own on the Node."""
    k8s_events: bool = True
    """Whether faults of devices are events of the Node and of the pods that use them."""
    k8s_taint_rules: tuple[str, ...] = ()
    """Drivers whose Unhealthy devices get DeviceTaintRules, because the drivers publish no taints."""
    nvsentinel_socket: Path | None = None
    """Socket of NVSentinel's platform connector; None: no events are sent."""
    nvsentinel_remediate: bool = False
    """Whether NVSentinel may cordon, drain and repair the node because of these events."""
    prepare_patterns: tuple["ErrorPattern", ...] = ()
    """Patterns of prepare errors set by the operator; matched before the built-in patterns."""
    taint_evict: frozenset[str] = frozenset()
    """Codes and code families whose taints evict pods (``NoExecute``)."""
    taint_quiet_s: int = 60
    """Time for which the cause of a taint must be absent before the taint is removed [s]."""
    taint_unknown: bool = True
    """Whether Unknown devices are tainted ``unmonitored``, effect ``None``."""
    taint_inform: bool = True
    """True: taints of effect ``None`` are published for drivers' devices."""
    taint_wait_s: float = 2.0
    """Longest time for which an embedded driver's error about a failed device waits for its taint [s]."""

    def __post_init__(self) -> None:
        if self.state_dir == Path():
            default = STATE_DIR if self.runtime_dir == RUNTIME_DIR else self.runtime_dir / "state"
            msgspec.structs.force_setattr(self, "state_dir", default)
        for setting in SETTINGS:
            value = getattr(self, setting.field)
            if value is not None:
                try:
                    setting.check_limits(value)
                except ValueError as error:
                    raise ConfigError(str(error), key=setting.key) from None
        if self.heartbeat_s * 3 > self.lease_s:
            heartbeat, lease = format_duration(self.heartbeat_s * S), format_duration(self.lease_s * S)
            raise ConfigError(
                f"{heartbeat} is over a third of stream.lease ({lease}); lower it", key="stream.heartbeat"
            )
        if self.nvsentinel_remediate and self.nvsentinel_socket is None:
            raise ConfigError(
                "true has no effect without nvsentinel.socket; set the socket", key="nvsentinel.remediate"
            )
        if (self.k8s_enabled or self.nvsentinel_socket is not None) and "/" in self.node_name:
            text = f"{self.node_name!r} names no Node, which [k8s] and [nvsentinel] need; write it without /"
            raise ConfigError(text, key="agent.node-name")
        if self.gpu_slow_ns < self.period_ns:
            slow, period = format_duration(self.gpu_slow_ns), format_duration(self.period_ns)
            raise ConfigError(f"{slow} is below agent.period ({period}); raise it", key="gpu.slow-period")
        if self.gpu_dead_ns <= self.gpu_deadline_ns:
            dead, deadline = format_duration(self.gpu_dead_ns), format_duration(self.gpu_deadline_ns)
            raise ConfigError(
                f"{dead} is not longer than gpu.deadline ({deadline}); raise it", key="gpu.dead"
            )

    def check_web_config(self) -> None:
        """Raise ConfigError if a web configuration is set without an HTTP address, which the agent needs."""
        if self.web_config is not None and not self.listen:
            raise ConfigError(
                f"{self.web_config} has no effect without an address; set http.listen with --listen, or "
                "remove http.web-config",
                key="http.web-config",
            )


COUNTER_WINDOWS: Final = {
    "throttle_window_s": "period_ns",
    "throttled_window_s": "sweep_ns",
    "nic_error_window_s": "gpu_slow_ns",
    "nic_link_window_s": "gpu_slow_ns",
}
"""Windows in which rules count the growth of a counter, with the interval at which the counter is read."""


def _with_usable_windows(config: Config, given: Container[str]) -> Config:
    """Return a configuration in which each counter is read twice within its window at least.

    Default windows grow with the interval of the reads. A rule whose window is shorter never counts an event.

    Args:
        given: Fields that the operator set.

    Raises:
        ConfigError: A window that the operator set is too short.
    """
    settings = {setting.field: setting for setting in SETTINGS}
    grown: dict[str, int] = {}
    for field, interval_field in COUNTER_WINDOWS.items():
        interval = max([interval_field, "period_ns"], key=lambda name: getattr(config, name))
        needed_s = math.ceil(2 * getattr(config, interval) / S)
        window_s = getattr(config, field)
        if window_s >= needed_s:
            continue
        if field in given:
            interval_text = format_duration(getattr(config, interval))
            raise ConfigError(
                f"{format_duration(window_s * S)} is shorter than two of {settings[interval].key} "
                f"({interval_text}); raise it",
                key=settings[field].key,
            )
        grown[field] = needed_s
    return msgspec.structs.replace(config, **grown) if grown else config


# --- loading -----------------------------------------------------------------------------------------------


class ValueOriginKind(StrEnum):
    """Kind of the place that the value of a setting comes from: a default, a file, a variable or a flag."""

    DEFAULT = "default"
    FILE = "file"
    VARIABLE = "variable"
    FLAG = "flag"


class ValueOrigin(NamedTuple):
    """Place that the value of a setting comes from, such as a line of a file or a flag."""

    kind: ValueOriginKind
    name: str = ""
    """Path of the file, or several separated by commas; name of the variable or flag; empty: the default."""

    def in_error(self, key: str) -> str:
        """Return the place as text for an error message.

        The text contains the setting's `key` if the place, such as a file, has several values.
        """
        return f"{self.name}: {key}" if self.kind is ValueOriginKind.FILE else self.name or key


DEFAULT: Final = ValueOrigin(ValueOriginKind.DEFAULT)


class LoadedConfig(NamedTuple):
    """Configuration of the agent, with the place that each of its values comes from."""

    config: Config
    origins: Mapping[str, ValueOrigin]
    """Origins by key of the setting; a key that is missing has its default."""
    files: tuple[Path, ...]
    """Paths of the configuration files that were read."""


def load(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    file: Path | None = None,
    default_file: Path = DEFAULT_FILE,
    needs_runtime_dir: bool = True,
) -> Config:
    """Load the configuration of this process; see :func:`load_with_origins`."""
    return load_with_origins(
        flags, environ, file=file, default_file=default_file, needs_runtime_dir=needs_runtime_dir
    ).config


def load_with_origins(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    file: Path | None = None,
    default_file: Path = DEFAULT_FILE,
    needs_runtime_dir: bool = True,
) -> LoadedConfig:
    """Load the configuration of this process from flags, environment and files.

    Args:
        flags: Values of the command line by flag, e.g. ``--period``.
        environ: The environment; an empty variable counts as unset.
        file: File given by the operator, which must exist and is the only one; None: ``default_file`` and
            the drop-ins next to it, which need not exist.
        needs_runtime_dir: True: a missing runtime directory is an error, because the caller serves sockets.

    Raises:
        ConfigError: A value is not valid; the text has the flag, the variable, or the file and key.
        PermissionDeniedError: This user may not read a file.
    """
    given, files = _collect_values(flags, environ, file, default_file)
    fields = {field: value for field, (value, _) in given.items()}
    if needs_runtime_dir and "runtime_dir" not in fields:
        fields["runtime_dir"] = _default_runtime_dir(environ)
    if "lease_s" in fields:
        fields.setdefault("heartbeat_s", min(10, fields["lease_s"] / 3))
    if "period_ns" in fields:
        fields.setdefault("gpu_slow_ns", max(10 * S, fields["period_ns"]))
        fields.setdefault("gpu_cpu_ns", max(2 * MS, min(2 * MS * S // max(fields["period_ns"], 1), S)))
    fields.setdefault("node_name", os.uname().nodename.lower())
    try:
        config = _with_usable_windows(Config(**fields), fields)
    except ConfigError as error:
        field = next(s.field for s in SETTINGS if s.key == error.key)
        _, origin = given.get(field, (None, DEFAULT))
        raise ConfigError(f"{origin.in_error(error.key)}: {error.text}") from None
    origins = {setting.key: given[setting.field][1] for setting in SETTINGS if setting.field in given}
    return LoadedConfig(config, origins, files)


def read_config(file: StrPath) -> Config:
    """Load the configuration from one file only, for a driver that embeds drahealth and has its own flags.

    Raises:
        ConfigError: A value is not valid; the text has the file and the key.
        PermissionDeniedError: This user may not read the file.
    """
    return load({}, {}, file=as_path("file", file), needs_runtime_dir=False)


def load_runtime_dir(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    file: Path | None = None,
    default_file: Path = DEFAULT_FILE,
    system_dir: Path = RUNTIME_DIR,
) -> Path:
    """Return the runtime directory of the agent that a command connects to.

    This is the directory that :func:`load` would set. There is one exception: if this user's default
    directory has no agent, the result is `system_dir`, the directory of root's agent. In this case
    `system_dir` must have an agent, or this user may not read `system_dir`.

    Arguments and errors are those of :func:`load`, but the limits of other settings are not checked.
    """
    given, _ = _collect_values(flags, environ, file, default_file)
    if "runtime_dir" in given:
        directory: Path = given["runtime_dir"][0]
        return directory
    try:
        own = _default_runtime_dir(environ)
    except ConfigError:
        if _has_agent_socket(system_dir):
            return system_dir
        raise
    return own if _has_agent_socket(own) or not _has_agent_socket(system_dir) else system_dir


def _has_agent_socket(runtime_dir: Path) -> bool:
    """Return whether this directory has the socket of an agent; True also if this user may not see that."""
    try:
        (runtime_dir / "agent.sock").stat()
    except PermissionError:
        return True  # the connection fails with this reason
    except OSError:
        return False
    return True


def _default_runtime_dir(environ: Mapping[str, str]) -> Path:
    if os.geteuid() == 0:
        return RUNTIME_DIR
    if xdg := environ.get("XDG_RUNTIME_DIR"):
        return Path(xdg, "drahealth")
    raise ConfigError(
        "runtime directory: no default, because this user is not root and XDG_RUNTIME_DIR is not set; "
        "set it with --runtime-dir"
    )


def _collect_values(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None, default_file: Path
) -> tuple[dict[str, tuple[Any, ValueOrigin]], tuple[Path, ...]]:
    """Return the values of the settings that are set, with their origins, and the paths of the read files."""
    given: dict[str, tuple[Any, ValueOrigin]] = {}

    def take(setting: Setting, value: object, origin: ValueOrigin) -> None:
        try:
            parsed = setting.parse(value)
            merge = setting.kind.merge
            if merge is not None and setting.field in given:
                before, place = given[setting.field]
                origin = origin._replace(name=f"{place.name}, {origin.name}")
                parsed = merge(before, parsed)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{origin.in_error(setting.key)}: {error}") from None
        given[setting.field] = parsed, origin

    _check_variables(environ)
    read = read_config_files(file, default_file)
    for path, table in read:
        for setting, value in _known_settings(table, path):
            take(setting, value, ValueOrigin(ValueOriginKind.FILE, str(path)))
    for setting in SETTINGS:
        if not setting.flag:
            continue
        if text := environ.get(setting.variable):
            origin = ValueOrigin(ValueOriginKind.VARIABLE, setting.variable)
            take(setting, _value_of_variable(setting, text), origin)
        if setting.flag in flags:
            take(setting, flags[setting.flag], ValueOrigin(ValueOriginKind.FLAG, setting.flag))
    return given, tuple(path for path, _ in read)


def _value_of_variable(setting: Setting, text: str) -> object:
    if setting.is_switch:
        return SWITCH_VALUES.get(text, text)
    return split_values(text) if setting.is_repeatable else text


def _check_variables(environ: Mapping[str, str]) -> None:
    known = {setting.variable for setting in SETTINGS if setting.flag} | FOREIGN_VARIABLES
    known |= CHECK_VARIABLES if "DRAHEALTH_CHECK" in environ else set()
    for name, value in environ.items():
        # a Service named drahealth adds its address to the environment of every pod in its namespace
        if name.startswith(PREFIX) and value and name not in known and not SERVICE_LINK.match(name):
            names = [variable.removeprefix(PREFIX) for variable in known]
            near = suggestion(name.removeprefix(PREFIX), names)
            raise ConfigError(f"environment variable {name}: there is no such setting{near}")


def _known_settings(
    table: Mapping[str, Any], path: Path, prefix: str = ""
) -> Iterator[tuple[Setting, object]]:
    """Yield the known settings in the configuration file `path`, each with its value.

    `table` is the part of the parsed file whose keys begin with `prefix`.

    Raises:
        ConfigError: A key is not known.
    """
    below = [s for s in SETTINGS if s.key.startswith(prefix)]
    known = {s.key[len(prefix) :].partition(".")[0] for s in below}
    for name, value in table.items():
        key = prefix + name
        if setting := next((s for s in below if s.key == key), None):
            yield setting, value
        elif name not in known:
            elsewhere = next((s.key for s in SETTINGS if s.key.endswith(f".{name}")), None)
            hint = f"; did you mean {elsewhere!r}?" if elsewhere else suggestion(name, known)
            raise ConfigError(f"{path}: {key}: no such setting{hint}")
        elif not isinstance(value, Mapping):
            raise ConfigError(f"{path}: {key}: {value!r} is not a table; write [{key}]")
        else:
            yield from _known_settings(value, path, f"{key}.")
