"""Configuration: one frozen value, read strictly from flags, environment and one TOML file.

``SETTINGS`` is the whole of it: each row names a setting's place in the file, its field, its limits and, if
it has one, its flag; the command line, the environment (``DRAHEALTH_`` and the flag's name) and the reference
in docs/configuration.md follow from the rows. Flags win over the environment, the environment over the file,
the file over the defaults. What is not understood is refused with its name, and what is out of range with the
number and the limit: an agent with a misread configuration would tell the kubelet lies.

How single values are read and checked is in agent.config.values; what a setting does is nobody's business
here, and the defaults of the roots are the kernel's and the kubelet's.
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
    SWITCH_WORDS,
    S,
    check_drivers,
    check_library,
    check_node_name,
    check_pools,
    check_root,
    check_xids,
    duration_within,
    format_duration,
    number_within,
    parse_duration,
    read_cgroup_root,
    read_count,
    read_cpus,
    read_drivers,
    read_library,
    read_path,
    read_pools,
    read_switch,
    read_text,
    read_whole_seconds,
    read_xids,
    seconds_within,
    split_words,
    unless_zero,
)
from agent.errors import ConfigError, PermissionDenied, suggestion
from agent.model.cpuset import CpuSet
from agent.model.health import XidOverride

if TYPE_CHECKING:
    from agent.prepare.patterns import Pattern

DEFAULT_FILE: Final = Path("/etc/drahealth/config.toml")
RUNTIME_DIR: Final = Path("/run/drahealth")
STATE_DIR: Final = Path("/var/lib/drahealth")
KUBELET_DIR: Final = Path("/var/lib/kubelet")
"""The kubelet's own, unless it was started with another --root-dir."""
CHECKPOINT: Final = "dra_manager_state"
PODS_API: Final = "pods-api/pods-api.sock"
"""The kubelet's record of claims, and its pods API, in its directory: known to those, too, who only look
whether there is one."""
DRIVERS: Final = "drivers"
"""What is each driver's, below the runtime directory (its socket) and the state directory (its memory)."""
PREFIX: Final = "DRAHEALTH_"
CONFIG_VARIABLE: Final = "DRAHEALTH_CONFIG"
"""The file, for the command line."""
SERVICE_LINK: Final = re.compile(r"DRAHEALTH_(\w+_)?(SERVICE_(HOST|PORT)|PORT)(_|$)")
FOREIGN_VARIABLES: Final = frozenset({CONFIG_VARIABLE, "DRAHEALTH_RUN_ARGS"})
"""Not ours to read: the command line's, and what the systemd unit puts behind ``drahealth run``."""


LEASE_MAX_S: Final = 86_399
"""A day, less the second that is added to a lease now and then to make a message differ from the last."""
WEEK_S: Final = 7 * 86_400
YEAR_S: Final = 365 * 86_400
GROUPS_MAX: Final = 16_384
"""Many times what a node can run. The native core takes more, the unit's memory limit does not."""
GPUS_MAX: Final = 32
"""What the native core watches at most."""


class Setting(NamedTuple):
    """One thing an operator can set."""

    key: str
    """Its place in the file: ``agent.period`` is ``period`` in ``[agent]``."""
    field: str
    """Of Config."""
    read: Callable[[object], object]
    """The value of file, environment or flag to the field's; ValueError or TypeError if it is none."""
    check: Callable[[Any], None] = lambda _: None
    """Raises ValueError, with the number and the limit, if the field may not hold the value."""
    flag: str = ""
    """Without a flag it can be set in the file only."""
    metavar: str = ""
    help: str = ""
    many: bool = False
    """The flag may be given again, and its variable hold several values; all of them count."""
    switch: bool = False
    """The flag takes no value and means true; its variable says 1, 0, true or false."""

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.flag.removeprefix("--").replace("-", "_").upper()


def _read_patterns(value: object) -> tuple["Pattern", ...]:
    from agent.prepare.patterns import read_patterns  # 4 ms that only who has patterns should pay

    return read_patterns(value)


def _read_evict(value: object) -> frozenset[str]:
    from agent.devices.taints import TaintPolicy  # likewise

    try:
        return TaintPolicy(evict=frozenset(read_drivers(value))).evict
    except ConfigError as error:
        raise ValueError(error.text) from None
    except TypeError:
        raise TypeError(f"{value!r} is no list of codes") from None


SETTINGS: Final = (
    Setting("agent.drivers", "drivers", read_drivers, check_drivers, "--driver", "NAME",
            "serve the kubelet's health API for this DRA driver; may be given again", many=True),
    Setting("agent.node.node_source-name", "node_name", read_text, check_node_name, "--node-name", "NAME",
            "the DRA pool of the node's devices (default: the host name)"),
    Setting("agent.period", "period_ns", parse_duration, duration_within(10 * MS, HOUR), "--period", "TIME",
            "how often the node is looked at, 10ms to 1h (default: 1s)"),
    Setting("agent.runtime-dir", "runtime_dir", read_path, flag="--runtime-dir", metavar="DIR",
            help="directory of the sockets (default: /run/drahealth; not root: $XDG_RUNTIME_DIR/drahealth)"),
    Setting("agent.state-dir", "state_dir", read_path, flag="--state-dir", metavar="DIR",
            help="directory of what outlives the agent (default: /var/lib/drahealth, or state/ in another "
            "--runtime-dir)"),
    Setting("roots.sysfs", "sysfs_root", read_path, check_root, "--sysfs-root", "DIR",
            "where sysfs is mounted (default: /sys)"),
    Setting("roots.procfs", "procfs_root", read_path, check_root, "--procfs-root", "DIR",
            "where procfs is mounted (default: /proc)"),
    Setting("roots.cgroupfs", "cgroupfs_root", read_path, check_root, "--cgroupfs-root", "DIR",
            "where the cgroup tree or trees are mounted (default: /sys/fs/cgroup)"),
    Setting("roots.kubelet-cgroup", "kubelet_cgroup_root", read_cgroup_root, check_root,
            "--kubelet-cgroup-root", "GROUP", "the kubelet's own --cgroup-root (default: /)"),
    Setting("roots.nvml-library", "nvml_library", read_library, check_library, "--nvml-library", "LIBRARY",
            "NVIDIA's management library, a name or a path (default: libnvidia-ml.so.1)"),
    Setting("roots.kmsg", "kmsg", read_path, check_root, "--kmsg", "FILE",
            "the kernel log (default: /dev/kmsg)"),
    Setting("roots.kmsg-any-facility", "kmsg_any_facility", read_switch, flag="--kmsg-any-facility",
            help="believe what processes wrote into the kernel log, too: for tests", switch=True),
    Setting("stream.lease", "lease_s", read_whole_seconds, seconds_within(3, LEASE_MAX_S)),
    Setting("stream.heartbeat", "heartbeat_s", lambda v: parse_duration(v) / S, seconds_within(0.1, 60)),
    Setting("stream.coalesce", "coalesce_ns", parse_duration, duration_within(0, 10 * S)),
    Setting("cgroups.sweep", "sweep_ns", parse_duration, duration_within(100 * MS, HOUR)),
    Setting("cgroups.resync", "resync_ns", parse_duration, duration_within(100 * MS, 24 * HOUR)),
    Setting("cgroups.max-groups", "group_max", read_count, number_within(1, GROUPS_MAX)),
    Setting("cgroups.throttled-percent", "throttled_percent", read_count, number_within(1, 100)),
    Setting("cgroups.throttled-window", "throttled_window_s", read_whole_seconds, seconds_within(10, 3600)),
    Setting("pods.kubelet-dir", "kubelet_dir", read_path, flag="--kubelet-dir", metavar="DIR",
            help="where the kubelet has its files and sockets (default: /var/lib/kubelet)"),
    Setting("pods.period", "pods_period_ns", parse_duration, duration_within(S, HOUR)),
    Setting("pods.audit", "pods_audit_ns", parse_duration,
            unless_zero(duration_within(10 * S, 24 * HOUR))),
    Setting("expect.cpus", "expect_cpus", read_cpus),
    Setting("expect.hugepages", "expect_pools", read_pools, check_pools),
    Setting("expect.gpus", "expect_gpus", read_count, number_within(0, GPUS_MAX)),
    Setting("throttle.events", "throttle_events", read_count, number_within(1, 1_000_000)),
    Setting("throttle.window", "throttle_window_s", read_whole_seconds, seconds_within(1, 86400)),
    Setting("errors.correctable", "correctable_errors", read_count, number_within(1, 1_000_000)),
    Setting("errors.window", "correctable_window_s", read_whole_seconds, seconds_within(1, WEEK_S)),
    Setting("pressure.percent", "pressure_percent", read_count, number_within(1, 100)),
    Setting("pressure.window", "pressure_window_s", read_whole_seconds, seconds_within(10, 3600)),
    Setting("gpu.watch", "gpu_watch", read_switch),
    Setting("gpu.slow-period", "gpu_slow_ns", parse_duration, duration_within(100 * MS, HOUR)),
    Setting("gpu.deadline", "gpu_deadline_ns", parse_duration, duration_within(100 * MS, 600 * S)),
    Setting("gpu.dead", "gpu_dead_ns", parse_duration, duration_within(100 * MS, 24 * HOUR)),
    Setting("gpu.probation", "gpu_probation_ns", parse_duration, duration_within(0, 24 * HOUR)),
    Setting("gpu.correctable-errors", "gpu_correctable_errors", read_count, number_within(1, 1_000_000)),
    Setting("gpu.correctable-window", "gpu_correctable_window_s", read_whole_seconds,
            seconds_within(1, 86400)),
    Setting("gpu.xids", "gpu_xids", read_xids, check_xids),
    Setting("history.rows", "history_rows", read_count, number_within(0, 100_000)),
    Setting("history.age", "history_age_s", read_whole_seconds, seconds_within(3600, YEAR_S)),
    Setting("prepare.patterns", "prepare_patterns", _read_patterns),
    Setting("taints.evict", "taint_evict", _read_evict),
    Setting("taints.quiet", "taint_quiet_s", read_whole_seconds, seconds_within(0, 86400)),
    Setting("taints.tell-unknown", "taint_tell_unknown", read_switch),
    Setting("taints.inform", "taint_inform", read_switch),
)  # fmt: skip


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the agent is told. Checked when it is made, wherever the values come from.

    Raises:
        ConfigError: A field is out of its limits; ``key`` names it.
    """

    node_name: str
    """The pool of the node's own devices."""
    period_ns: int = S
    """Between two passes over the node's global files [ns]."""
    sweep_ns: int = 10 * S
    """Every cgroup's silent counters are read once in this time [ns]."""
    resync_ns: int = 300 * S
    """Everything, what the kernel would notify of too, is read once in this time [ns]."""
    group_max: int = 4096
    """Cgroups of pods and containers that are watched at most."""
    sysfs_root: Path = Path("/sys")
    procfs_root: Path = Path("/proc")
    cgroupfs_root: Path = Path("/sys/fs/cgroup")
    kubelet_cgroup_root: str = "/"
    """The kubelet's --cgroup-root, relative to ``cgroupfs_root``."""
    nvml_library: str = "libnvidia-ml.so.1"
    """A name for the dynamic linker, or a path."""
    kmsg: Path = Path("/dev/kmsg")
    kmsg_any_facility: bool = False
    """What processes wrote into the kernel log counts as the kernel's own."""
    runtime_dir: Path = RUNTIME_DIR
    state_dir: Path = Path()
    """Of what outlives the agent. Unless given: :data:`STATE_DIR`, or ``state`` in a runtime directory other
    than :data:`RUNTIME_DIR`, so that a second agent does not take the memory of the node's own."""
    drivers: tuple[str, ...] = ()
    heartbeat_s: float = 10
    """Devices that were verified again are sent again this often [s]."""
    lease_s: int = 30
    """How long the kubelet may believe a message [s]; the kubelet's own default."""
    coalesce_ns: int = 100 * MS
    """Changes that follow one within this time are sent together [ns]."""
    kubelet_dir: Path = KUBELET_DIR
    pods_period_ns: int = 60 * S
    """Everybody is asked who uses which device once in this time, whether or not something changed [ns]."""
    pods_audit_ns: int = 300 * S
    """Cgroups of pods with claims are compared with what they should say once in this time [ns]; 0: never."""
    expect_cpus: CpuSet | None = None
    """CPUs that must be online; None: those that are when the agent starts."""
    expect_pools: dict[str, int] = msgspec.field(default_factory=dict)
    """Device to pages that its pool must hold; a pool not named: as many as when the agent starts."""
    throttle_events: int = 10
    """Thermal-throttle events of a NUMA node within ``throttle_window_s`` that are too many."""
    throttle_window_s: int = 60
    throttled_percent: int = 25
    """A container that was throttled in more of its CPU periods within ``throttled_window_s`` is slow [%]."""
    throttled_window_s: int = 60
    correctable_errors: int = 24
    """Correctable errors of a memory module or a CPU within ``correctable_window_s`` that are too many."""
    correctable_window_s: int = 86_400
    pressure_percent: int = 10
    """The node stalls when all its tasks waited for so much of ``pressure_window_s`` [%]."""
    pressure_window_s: int = 60
    expect_gpus: int | None = None
    """GPUs that there must be; None: as many as when the agent starts."""
    gpu_watch: bool = True
    """Whether GPUs are looked for at all."""
    gpu_slow_ns: int = 10 * S
    """What seldom changes is read of a GPU once in this time [ns]; at least a period."""
    gpu_deadline_ns: int = 5 * S
    """A call of NVML that takes longer is not answered: the GPU is Unknown [ns]."""
    gpu_dead_ns: int = 60 * S
    """A GPU that has not answered for so long is Unhealthy [ns]; more than the deadline."""
    gpu_probation_ns: int = 60 * S
    """A GPU that has recovered is held Unhealthy for so long without a new fault [ns]."""
    gpu_correctable_errors: int = 1000
    """Correctable memory errors of a GPU within ``gpu_correctable_window_s`` that are too many."""
    gpu_correctable_window_s: int = 3600
    gpu_xids: dict[int, XidOverride] = msgspec.field(default_factory=dict)
    """XIDs that the operator judges otherwise."""
    history_rows: int = 10_000
    """Ended uses of devices that are kept; 0: none, and nothing is written."""
    history_age_s: int = 30 * 86_400
    """And for so long [s]."""
    prepare_patterns: tuple["Pattern", ...] = ()
    """Texts of prepare errors that the operator knows; looked at before those that are built in."""
    taint_evict: frozenset[str] = frozenset()
    """Codes and families of them that evict pods (``NoExecute``)."""
    taint_quiet_s: int = 60
    """How long a cause must be gone before its taint goes [s]."""
    taint_tell_unknown: bool = True
    """Devices that are Unknown are tainted ``unmonitored``, effect ``None``."""
    taint_inform: bool = True
    """Taints of effect ``None`` are called for."""

    def __post_init__(self) -> None:
        if self.state_dir == Path():
            ours = STATE_DIR if self.runtime_dir == RUNTIME_DIR else self.runtime_dir / "state"
            msgspec.structs.force_setattr(self, "state_dir", ours)
        for setting in SETTINGS:
            value = getattr(self, setting.field)
            if value is not None:
                try:
                    setting.check(value)
                except ValueError as error:
                    raise ConfigError(str(error), key=setting.key) from None
        if self.heartbeat_s * 3 > self.lease_s:
            heartbeat, lease = format_duration(self.heartbeat_s * S), format_duration(self.lease_s * S)
            raise ConfigError(f"{heartbeat} is over a third of the lease of {lease}", key="stream.heartbeat")
        if self.gpu_slow_ns < self.period_ns:
            slow, period = format_duration(self.gpu_slow_ns), format_duration(self.period_ns)
            raise ConfigError(f"{slow} is below the period of {period}", key="gpu.slow-period")
        if self.gpu_dead_ns <= self.gpu_deadline_ns:
            dead, deadline = format_duration(self.gpu_dead_ns), format_duration(self.gpu_deadline_ns)
            raise ConfigError(f"{dead} is not over the deadline of {deadline}", key="gpu.dead")


# --- loading: which value wins, and whose it was ----------------------------------------------------------


def load(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    file: Path | None = None,
    default_file: Path = DEFAULT_FILE,
    serves: bool = True,
) -> Config:
    """The configuration of this process.

    Args:
        flags: What the command line gave: flag, e.g. ``--period``, to value.
        environ: The environment; a variable that is empty counts as unset.
        file: The file that was asked for, which must exist; otherwise ``default_file``, which need not.
        serves: Sockets will be made, so there must be a directory for them.

    Raises:
        ConfigError: names the flag, variable or file and key, and what is wrong with the value.
        PermissionDenied: The file may not be read.
    """
    given = _gather(flags, environ, file, default_file)
    fields = {field: value for field, (value, _) in given.items()}
    if serves and "runtime_dir" not in fields:
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


def read_config(file: Path) -> Config:
    """The configuration of one file and nothing else: for a program that embeds, whose flags and environment
    are its own.

    Raises:
        ConfigError: names the file, the key, and what is wrong with the value.
        PermissionDenied: The file may not be read.
    """
    return load({}, {}, file=file, serves=False)


def load_runtime_dir(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    file: Path | None = None,
    default_file: Path = DEFAULT_FILE,
) -> Path:
    """Where an agent with this configuration has its sockets: for those who only talk to it.

    Args and errors are those of :func:`load`; the limits of other settings are not looked at.
    """
    given = _gather(flags, environ, file, default_file)
    return given["runtime_dir"][0] if "runtime_dir" in given else _default_runtime_dir(environ)


def _default_runtime_dir(environ: Mapping[str, str]) -> Path:
    if os.geteuid() == 0:
        return RUNTIME_DIR
    if xdg := environ.get("XDG_RUNTIME_DIR"):
        return Path(xdg, "drahealth")
    raise ConfigError("not root and no XDG_RUNTIME_DIR: say where the sockets are with --runtime-dir")


def _gather(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None, default_file: Path
) -> dict[str, tuple[Any, str]]:
    """Field to the value that wins, and the words for where it came from."""
    given: dict[str, tuple[Any, str]] = {}

    def take(setting: Setting, value: object, origin: str) -> None:
        try:
            given[setting.field] = setting.read(value), origin
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{origin}: {error}") from None

    _check_variables(environ)
    path = file or default_file
    for setting, value in _settings_of(_read(path, must_exist=file is not None), path):
        take(setting, value, f"{path}: {setting.key}")
    for setting in SETTINGS:
        if not setting.flag:
            continue
        if value := environ.get(setting.variable):
            take(setting, _of_variable(setting, value), setting.variable)
        if setting.flag in flags:
            take(setting, flags[setting.flag], setting.flag)
    return given


def _of_variable(setting: Setting, text: str) -> object:
    """A variable's text as the file or the flag would have it."""
    if setting.switch:
        return SWITCH_WORDS.get(text, text)
    return split_words(text) if setting.many else text


def _check_variables(environ: Mapping[str, str]) -> None:
    known = {setting.variable for setting in SETTINGS if setting.flag} | FOREIGN_VARIABLES
    for name, value in environ.items():
        # a Service named drahealth puts its address into the environment of every pod beside it
        if name.startswith(PREFIX) and value and name not in known and not SERVICE_LINK.match(name):
            hint = suggestion(name.removeprefix(PREFIX), [one.removeprefix(PREFIX) for one in known])
            raise ConfigError(f"{name}: no such variable{hint}")


def _read(path: Path, *, must_exist: bool) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError as error:
        if not must_exist:
            return {}
        raise ConfigError(f"{path}: {error.strerror}") from None
    except PermissionError as error:
        raise PermissionDenied(f"{path}: {error.strerror}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is no UTF-8") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # tomllib says "what (at line 2, column 5)", or "what (at end of document)"
        what, _, where = str(error).rpartition(" (at ")
        found = re.match(r"line (\d+)", where)
        line = found[1] if found else str(text.count("\n") + 1)
        raise ConfigError(f"{path}:{line}: {what[:1].lower()}{what[1:]}") from None


def _settings_of(table: Mapping[str, Any], path: Path, prefix: str = "") -> Iterator[tuple[Setting, object]]:
    """The settings a parsed file holds, each with its value.

    Raises:
        ConfigError: A key is no setting's.
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
            raise ConfigError(f"{path}: {key}: {value!r} is no table; write [{key}]")
        else:
            yield from _settings_of(value, path, f"{key}.")
