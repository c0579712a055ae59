"""Configuration of the agent: read from flags, environment variables and one TOML file, and validated.

Each entry of ``SETTINGS`` describes one setting. Flags win over variables, variables over the file, the file
over the defaults. An unknown key or a value out of range is an error: an agent with a misread
configuration would report wrong health to the kubelet.

agent.config.values parses and checks single values.
"""

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from agent.config.values import (
    HOUR,
    MS,
    SWITCH_VALUES,
    S,
    check_driver_names,
    check_hugepage_pools,
    check_library_length,
    check_node_name,
    check_path_length,
    check_xids,
    duration_within,
    format_duration,
    number_within,
    parse_bool,
    parse_cgroup_root,
    parse_count,
    parse_cpu_list,
    parse_driver_names,
    parse_duration,
    parse_hugepage_pools,
    parse_library,
    parse_path,
    parse_string,
    parse_whole_seconds,
    parse_xid_overrides,
    seconds_within,
    split_values,
    unless_zero,
)
from agent.errors import ConfigError, PermissionDeniedError, suggestion
from agent.model.cpuset import CpuSet
from agent.model.health import XidOverride
from agent.model.reading import Absence
from agent.system.files import ReadError, read_bounded
from agent.system.paths import StrPath, as_path

if TYPE_CHECKING:
    from agent.prepare.error_patterns import ErrorPattern

FILE_BYTES: Final = 256 << 10
"""Largest accepted configuration file [bytes]."""
LINE_BYTES: Final = 4096
"""Longest accepted line of it [bytes]: the time to read a dotted key grows with the square of its length."""
DEFAULT_FILE: Final = Path("/etc/drahealth/config.toml")
RUNTIME_DIR: Final = Path("/run/drahealth")
STATE_DIR: Final = Path("/var/lib/drahealth")
KUBELET_DIR: Final = Path("/var/lib/kubelet")
"""Directory of a kubelet that was started without --root-dir."""
CHECKPOINT: Final = "dra_manager_state"
"""The kubelet's checkpoint file of prepared claims, relative to the kubelet's directory."""
PODS_API: Final = "pods-api/pods-api.sock"
"""Socket of the kubelet's pods API, relative to the kubelet's directory."""
DRIVERS: Final = "drivers"
"""Subdirectory of the runtime directory (drivers' sockets) and of the state directory (drivers' state)."""
PREFIX: Final = "DRAHEALTH_"
CONFIG_VARIABLE: Final = "DRAHEALTH_CONFIG"
"""Environment variable with the path of the configuration file."""
SERVICE_LINK: Final = re.compile(r"DRAHEALTH_(\w+_)?(SERVICE_(HOST|PORT)|PORT)(_|$)")
FOREIGN_VARIABLES: Final = frozenset({CONFIG_VARIABLE, "DRAHEALTH_RUN_ARGS"})
"""Environment variables that are no settings; the command line or the systemd unit reads them."""


LEASE_MAX_S: Final = 86_399
"""Longest lease [s]: one day, less a second that is sometimes added so that two messages differ."""
WEEK_S: Final = 7 * 86_400
YEAR_S: Final = 365 * 86_400
GROUPS_MAX: Final = 16_384
"""Upper limit of watched cgroups: more would exceed the memory limit of the systemd unit."""
GPUS_MAX: Final = 32
"""Largest number of GPUs that the native core watches."""


class Setting(NamedTuple):
    """Setting of the agent: key in the file, flag, variable, and how its value is parsed and checked."""

    key: str
    """Key in the file: ``agent.period`` is ``period`` in ``[agent]``."""
    field: str
    """Name of the field in :class:`Config` that holds the value."""
    parse: Callable[[object], object]
    """Converts the value in file, variable or flag to the field's type; raises ValueError or TypeError."""
    check_limits: Callable[[Any], None] = lambda _: None
    """Raises ValueError, with value and limit in its text, if the value is out of range."""
    flag: str = ""
    """Command-line flag; empty: the setting can only be set in the file."""
    metavar: str = ""
    help: str = ""
    is_repeatable: bool = False
    """Whether the flag may be repeated and the variable may hold several values."""
    is_switch: bool = False
    """Whether the setting is a boolean whose flag takes no value; its variable is 1, 0, true or false."""

    @property
    def variable(self) -> str:
        """Name of the setting's environment variable, e.g. ``DRAHEALTH_PERIOD``."""
        return PREFIX + self.flag.removeprefix("--").replace("-", "_").upper()


def _read_patterns(value: object) -> tuple["ErrorPattern", ...]:
    from agent.prepare.error_patterns import parse_patterns  # 4 ms, only if configured

    return parse_patterns(value)


def _read_evict(value: object) -> frozenset[str]:
    from agent.devices.taints import TaintPolicy  # imported only if configured

    try:
        return TaintPolicy(evict=frozenset(parse_driver_names(value))).evict
    except ConfigError as error:
        raise ValueError(error.text) from None
    except TypeError:
        raise TypeError(f"{value!r} is not a list of codes") from None


SETTINGS: Final = (
    Setting("agent.drivers", "drivers", parse_driver_names, check_driver_names, "--driver", "NAME",
            "serve the kubelet's health API for this DRA driver; may be given again", is_repeatable=True),
    Setting("agent.node-name", "node_name", parse_string, check_node_name, "--node-name", "NAME",
            "the DRA pool of the node's devices (default: the host name)"),
    Setting("agent.period", "period_ns", parse_duration, duration_within(10 * MS, HOUR), "--period", "TIME",
            "how often the node is checked, 10ms to 1h (default: 1s)"),
    Setting("agent.runtime-dir", "runtime_dir", parse_path, flag="--runtime-dir", metavar="DIR",
            help="directory of the sockets (default: /run/drahealth; not root: $XDG_RUNTIME_DIR/drahealth)"),
    Setting("agent.state-dir", "state_dir", parse_path, flag="--state-dir", metavar="DIR",
            help="directory of state kept over restarts (default: /var/lib/drahealth, or state/ in another "
            "--runtime-dir)"),
    Setting("roots.sysfs", "sysfs_root", parse_path, check_path_length, "--sysfs-root", "DIR",
            "where sysfs is mounted (default: /sys)"),
    Setting("roots.procfs", "procfs_root", parse_path, check_path_length, "--procfs-root", "DIR",
            "where procfs is mounted (default: /proc)"),
    Setting("roots.cgroupfs", "cgroupfs_root", parse_path, check_path_length, "--cgroupfs-root", "DIR",
            "where the cgroup tree or trees are mounted (default: /sys/fs/cgroup)"),
    Setting("roots.kubelet-cgroup", "kubelet_cgroup_root", parse_cgroup_root, check_path_length,
            "--kubelet-cgroup-root", "GROUP", "the kubelet's own --cgroup-root (default: /)"),
    Setting("roots.nvml-library", "nvml_library", parse_library, check_library_length, "--nvml-library",
            "LIBRARY", "NVIDIA's management library, a name or a path (default: libnvidia-ml.so.1)"),
    Setting("roots.kmsg", "kmsg", parse_path, check_path_length, "--kmsg", "FILE",
            "the kernel log (default: /dev/kmsg)"),
    Setting("roots.kmsg-any-facility", "kmsg_any_facility", parse_bool, flag="--kmsg-any-facility",
            help="also accept kernel log lines written by processes: for tests", is_switch=True),
    Setting("stream.lease", "lease_s", parse_whole_seconds, seconds_within(3, LEASE_MAX_S)),
    Setting("stream.heartbeat", "heartbeat_s", lambda v: parse_duration(v) / S, seconds_within(0.1, 60)),
    Setting("stream.coalesce", "coalesce_ns", parse_duration, duration_within(0, 10 * S)),
    Setting("cgroups.sweep", "sweep_ns", parse_duration, duration_within(100 * MS, HOUR)),
    Setting("cgroups.resync", "resync_ns", parse_duration, duration_within(100 * MS, 24 * HOUR)),
    Setting("cgroups.max-groups", "group_max", parse_count, number_within(1, GROUPS_MAX)),
    Setting("cgroups.throttled-percent", "throttled_percent", parse_count, number_within(1, 100)),
    Setting("cgroups.throttled-window", "throttled_window_s", parse_whole_seconds, seconds_within(10, 3600)),
    Setting("pods.kubelet-dir", "kubelet_dir", parse_path, flag="--kubelet-dir", metavar="DIR",
            help="where the kubelet has its files and sockets (default: /var/lib/kubelet)"),
    Setting("pods.period", "pods_period_ns", parse_duration, duration_within(S, HOUR)),
    Setting("pods.audit", "pods_audit_ns", parse_duration,
            unless_zero(duration_within(10 * S, 24 * HOUR))),
    Setting("expect.cpus", "expect_cpus", parse_cpu_list),
    Setting("expect.hugepages", "expect_pools", parse_hugepage_pools, check_hugepage_pools),
    Setting("expect.gpus", "expect_gpus", parse_count, number_within(0, GPUS_MAX)),
    Setting("throttle.events", "throttle_events", parse_count, number_within(1, 1_000_000)),
    Setting("throttle.window", "throttle_window_s", parse_whole_seconds, seconds_within(1, 86400)),
    Setting("errors.correctable", "correctable_errors", parse_count, number_within(1, 1_000_000)),
    Setting("errors.window", "correctable_window_s", parse_whole_seconds, seconds_within(1, WEEK_S)),
    Setting("pressure.percent", "pressure_percent", parse_count, number_within(1, 100)),
    Setting("pressure.window", "pressure_window_s", parse_whole_seconds, seconds_within(10, 3600)),
    Setting("nic.errors", "nic_errors", parse_count, number_within(1, 1_000_000)),
    Setting("nic.error-window", "nic_error_window_s", parse_whole_seconds, seconds_within(60, 86400)),
    Setting("nic.link-downs", "nic_link_downs", parse_count, number_within(1, 1000)),
    Setting("nic.link-window", "nic_link_window_s", parse_whole_seconds, seconds_within(60, 86400)),
    Setting("gpu.watch", "gpu_watch", parse_bool),
    Setting("gpu.process", "gpu_process", parse_bool),
    Setting("gpu.slow-period", "gpu_slow_ns", parse_duration, duration_within(100 * MS, HOUR)),
    Setting("gpu.deadline", "gpu_deadline_ns", parse_duration, duration_within(100 * MS, 600 * S)),
    Setting("gpu.dead", "gpu_dead_ns", parse_duration, duration_within(100 * MS, 24 * HOUR)),
    Setting("gpu.probation", "gpu_probation_ns", parse_duration, duration_within(0, 24 * HOUR)),
    Setting("gpu.correctable-errors", "gpu_correctable_errors", parse_count, number_within(1, 1_000_000)),
    Setting("gpu.correctable-window", "gpu_correctable_window_s", parse_whole_seconds,
            seconds_within(1, 86400)),
    Setting("gpu.xids", "gpu_xids", parse_xid_overrides, check_xids),
    Setting("history.rows", "history_rows", parse_count, number_within(0, 100_000)),
    Setting("history.age", "history_age_s", parse_whole_seconds, seconds_within(3600, YEAR_S)),
    Setting("prepare.patterns", "prepare_patterns", _read_patterns),
    Setting("taints.evict", "taint_evict", _read_evict),
    Setting("taints.quiet", "taint_quiet_s", parse_whole_seconds, seconds_within(0, 86400)),
    Setting("taints.tell-unknown", "taint_unknown", parse_bool),
    Setting("taints.inform", "taint_inform", parse_bool),
    Setting("taints.wait", "taint_wait_s", lambda v: parse_duration(v) / S, seconds_within(0, 10)),
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
    drivers: tuple[str, ...] = ()
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
    """CPUs that must be online; None: the CPUs that are online when the agent starts."""
    expect_pools: dict[str, int] = msgspec.field(default_factory=dict)
    """Expected pages by hugepage device; for other devices: the pages they have when the agent starts."""
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
    """Expected number of GPUs; None: the number when the agent starts."""
    gpu_watch: bool = True
    """Whether GPUs are watched."""
    gpu_process: bool = True
    """Whether NVML is called by a process of its own; False: by threads of this process."""
    gpu_slow_ns: int = 10 * S
    """Interval between two reads of GPU fields that seldom change [ns]; at least ``period_ns``."""
    gpu_deadline_ns: int = 5 * S
    """Time limit of an NVML call, after which the GPU is Unknown [ns]."""
    gpu_dead_ns: int = 60 * S
    """Time without an answer after which a GPU is Unhealthy [ns]; longer than the deadline."""
    gpu_probation_ns: int = 60 * S
    """Time without a new fault for which a recovered GPU stays Unhealthy [ns]."""
    gpu_correctable_errors: int = 1000
    """Limit of correctable memory errors of a GPU within ``gpu_correctable_window_s``."""
    gpu_correctable_window_s: int = 3600
    gpu_xids: dict[int, XidOverride] = msgspec.field(default_factory=dict)
    """Severities that the operator sets for XIDs, by XID number."""
    history_rows: int = 10_000
    """Number of ended device uses that are kept; 0: no history is written."""
    history_age_s: int = 30 * 86_400
    """Age up to which ended device uses are kept [s]."""
    prepare_patterns: tuple["ErrorPattern", ...] = ()
    """Patterns of prepare errors set by the operator; matched before the built-in patterns."""
    taint_evict: frozenset[str] = frozenset()
    """Codes and code families whose taints evict pods (``NoExecute``)."""
    taint_quiet_s: int = 60
    """Time for which the cause of a taint must be absent before the taint is removed [s]."""
    taint_unknown: bool = True
    """Whether Unknown devices are tainted ``unmonitored``, effect ``None``."""
    taint_inform: bool = True
    """Whether taints of effect ``None`` are published."""
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
        if self.gpu_slow_ns < self.period_ns:
            slow, period = format_duration(self.gpu_slow_ns), format_duration(self.period_ns)
            raise ConfigError(f"{slow} is below agent.period ({period}); raise it", key="gpu.slow-period")
        if self.gpu_dead_ns <= self.gpu_deadline_ns:
            dead, deadline = format_duration(self.gpu_dead_ns), format_duration(self.gpu_deadline_ns)
            raise ConfigError(
                f"{dead} is not longer than gpu.deadline ({deadline}); raise it", key="gpu.dead"
            )


# --- loading -----------------------------------------------------------------------------------------------


def load(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    file: Path | None = None,
    default_file: Path = DEFAULT_FILE,
    needs_runtime_dir: bool = True,
) -> Config:
    """Load the configuration of this process from flags, environment and file.

    Args:
        flags: Values of the command line by flag, e.g. ``--period``.
        environ: The environment; an empty variable counts as unset.
        file: File given by the operator, which must exist; None: ``default_file``, which need not exist.
        needs_runtime_dir: True: a missing runtime directory is an error, because the caller serves sockets.

    Raises:
        ConfigError: A value is not valid; the text has the flag, the variable, or the file and key.
        PermissionDeniedError: This user may not read the file.
    """
    given = _collect_values(flags, environ, file, default_file)
    fields = {field: value for field, (value, _) in given.items()}
    if needs_runtime_dir and "runtime_dir" not in fields:
        fields["runtime_dir"] = _default_runtime_dir(environ)
    if "lease_s" in fields:
        fields.setdefault("heartbeat_s", min(10, fields["lease_s"] / 3))
    if "period_ns" in fields:
        fields.setdefault("gpu_slow_ns", max(10 * S, fields["period_ns"]))
    fields.setdefault("node_name", os.uname().nodename.lower())
    try:
        return Config(**fields)
    except ConfigError as error:
        field = next(s.field for s in SETTINGS if s.key == error.key)
        _, origin = given.get(field, (None, error.key))
        raise ConfigError(f"{origin}: {error.text}") from None


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

    That is the directory that :func:`load` would set. A user whose own default has no agent gets that of
    root's agent, ``system_dir``, if one is there or this user may not see whether it is.

    Arguments and errors are those of :func:`load`, but the limits of other settings are not checked.
    """
    given = _collect_values(flags, environ, file, default_file)
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
    """Return whether an agent has served this directory, or this user may not look."""
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
) -> dict[str, tuple[Any, str]]:
    """Return the value of each field that is set, with its origin (flag, variable, or file and key)."""
    given: dict[str, tuple[Any, str]] = {}

    def take(setting: Setting, value: object, origin: str) -> None:
        try:
            given[setting.field] = setting.parse(value), origin
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{origin}: {error}") from None

    _check_variables(environ)
    path = file or default_file
    for setting, value in _known_settings(_read_toml(path, must_exist=file is not None), path):
        take(setting, value, f"{path}: {setting.key}")
    for setting in SETTINGS:
        if not setting.flag:
            continue
        if value := environ.get(setting.variable):
            take(setting, _value_of_variable(setting, value), setting.variable)
        if setting.flag in flags:
            take(setting, flags[setting.flag], setting.flag)
    return given


def _value_of_variable(setting: Setting, text: str) -> object:
    if setting.is_switch:
        return SWITCH_VALUES.get(text, text)
    return split_values(text) if setting.is_repeatable else text


def _check_variables(environ: Mapping[str, str]) -> None:
    known = {setting.variable for setting in SETTINGS if setting.flag} | FOREIGN_VARIABLES
    for name, value in environ.items():
        # a Service named drahealth adds its address to the environment of every pod in its namespace
        if name.startswith(PREFIX) and value and name not in known and not SERVICE_LINK.match(name):
            names = [variable.removeprefix(PREFIX) for variable in known]
            near = suggestion(name.removeprefix(PREFIX), names)
            raise ConfigError(f"environment variable {name}: there is no such setting{near}")


def _read_toml(path: Path, *, must_exist: bool) -> dict[str, Any]:
    try:
        data = b"" if path == Path(os.devnull) else read_bounded(path, FILE_BYTES).data
    except ReadError as error:
        if error.absence is Absence.ABSENT and not must_exist:
            return {}
        refusal = PermissionDeniedError if error.is_forbidden else ConfigError
        raise refusal(f"configuration file {path}: {error.reason}") from None
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration file {path}: byte {error.start} is not UTF-8") from None
    for number, line in enumerate(data.split(b"\n"), 1):
        if len(line) > LINE_BYTES:
            raise ConfigError(f"{path}:{number}: line is {len(line)} bytes, limit {LINE_BYTES}; split it")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # tomllib: "<problem> (at line 2, column 5)", or "<problem> (at end of document)"
        problem, _, where = str(error).rpartition(" (at ")
        found = re.match(r"line (\d+)", where)
        line_number = found[1] if found else str(text.count("\n") + 1)
        raise ConfigError(f"{path}:{line_number}: {problem[:1].lower()}{problem[1:]}") from None
    except RecursionError:
        raise ConfigError(f"{path}: arrays or tables are nested too deeply; remove brackets") from None


def _known_settings(
    table: Mapping[str, Any], path: Path, prefix: str = ""
) -> Iterator[tuple[Setting, object]]:
    """Yield the settings in the parsed file `path`, each with its value; `table` is the part with `prefix`.

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
            raise ConfigError(f"{path}: {key}: {_shown(value)} is not a table; write [{key}]")
        else:
            yield from _known_settings(value, path, f"{key}.")


def _shown(value: object) -> str:
    """Return a value for an error text; Python refuses the decimal digits of a very large number."""
    try:
        return f"{value!r}"
    except ValueError:
        return "a very large number"
