"""Configuration: precedence of values, and errors that name the origin, the value and the limit."""

import os
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from other_user import become_other_user

import drahealth
from agent.config.config import (
    SETTINGS,
    Config,
    LoadedConfig,
    ValueOrigin,
    ValueOriginKind,
    load,
    load_runtime_dir,
    load_with_origins,
    read_config,
)
from agent.config.values import format_duration, format_size, parse_duration, parse_size
from agent.errors import ConfigError, PermissionDeniedError
from agent.model.health import Severity, XidOverride
from agent.model.prepare import ErrorClass
from agent.model.settings import CustomCheck, RuleOverride
from agent.model.socket_address import ListenAddress
from agent.prepare.error_tables import ErrorPattern

REFERENCE = Path(__file__).parent.parent / "docs" / "configuration.md"

EVERYTHING = r"""
[agent]
node-name = "worker-7"
drivers = ["gpu.example.com", "cpu.example.com"]
period = "250ms"
log-format = "json"
runtime-dir = "/run/elsewhere"
state-dir = "/var/elsewhere"

[http]
listen = ["localhost:9999", "unix:/run/elsewhere/http.sock"]
web-config = "/etc/web.yml"

[roots]
sysfs = "/host/sys"
procfs = "/host/proc"
cgroupfs = "/host/cgroup"
kubelet-cgroup = "kubelet"
nvml-library = "/opt/nvidia/libnvidia-ml.so.1"
kmsg = "/host/kmsg"
kmsg-any-facility = true

[stream]
heartbeat = "5s"
lease = "20s"
coalesce = "0s"

[cgroups]
sweep = "1m"
resync = "1h"
max-groups = 10
held-memory = "512KiB"
throttled-percent = 50
throttled-window = "2m"

[pods]
kubelet-dir = "/var/lib/other"
period = "2m"
audit = "0s"

[expect]
cpus = "0-3,8"
gpus = 8

[expect.hugepages]
hugepages-2mi-node0 = 512
hugepages-1gi-node1 = 0

[throttle]
events = 3
window = "30s"

[errors]
correctable = 10
window = "12h"

[nic]
errors = 50
error-window = "30m"
link-downs = 2
link-window = "5m"

[pressure]
percent = 20
window = "5m"

[gpu]
watch = false
process = false
slow-period = "30s"
cpu-budget = "3ms"
deadline = "2s"
dead = "3m"
probation = "10m"
correctable-errors = 50
correctable-window = "2h"

[gpu.xids]
31 = "ignore"
"63" = "unhealthy"

[[rules]]
code = "gpu.ecc.*"
device = "gpu-3"
severity = "info"

[[rules]]
code = "cpu.throttled.core"
limit = 5

[[check]]
name = "fabric"
command = ["/opt/checks/fabric", "--all"]
devices = "gpu-*"
period = "5m"

[history]
rows = 50
age = "24h"

[record]
dir = "/var/lib/drahealth/record"
size = "64MiB"
age = "48h"

[k8s]
enabled = true
kubeconfig = "/etc/drahealth/kubeconfig"
namespace = "monitoring"
condition-kinds = ["gpu", "nic"]
events = false
taint-rules = ["gpu.example.com"]

[nvsentinel]
socket = "/run/connector.sock"
remediate = true

[taints]
evict = ["gpu.xid.79", "mem.*", "gpu.mismatch", "nic.*", "gpu.no_device", "a.b"]
quiet = "2m"
tell-unknown = false  # verbatim
inform = false
wait = "500ms"

[[prepare.patterns]]
match = 'bank \d+ is locked'
code = "fpga.bank_locked"
class = "transient"
summary = "the bank is in use"

[[prepare.patterns]]
match = "no such bitstream"
code = "fpga.bitstream"
class = "bad-config"
"""


A_PATTERN = "[[prepare.patterns]]\nmatch = 'x'\ncode = 'a.b'\nclass = 'transient'\n"


A_POOL = "hugepages-2mi-node0 = 512\n"


class Setup:
    """Configuration file in a temporary directory."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "config.toml"

    def load(self, text: str = "", flags: dict[str, object] | None = None, **environ: str) -> Config:
        """Load with this file, these flags and these variables, named without ``DRAHEALTH_``."""
        self.file.write_text(text)
        variables = {f"DRAHEALTH_{k}": v for k, v in environ.items()}
        return load(flags or {}, variables, file=self.file, needs_runtime_dir=False)

    def refusal(self, text: str = "", flags: dict[str, object] | None = None, **environ: str) -> str:
        """Return the error text, with ``FILE`` for the path of the file."""
        with pytest.raises(ConfigError) as caught:
            self.load(text, flags, **environ)
        return str(caught.value).replace(str(self.file), "FILE")


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


@pytest.fixture
def drop_root():
    """Run the test as a user without privileges, even if root runs the tests."""
    before = os.geteuid()
    if before == 0:
        become_other_user()
    yield
    os.seteuid(before)


@pytest.fixture
def locked_directory(tmp_path):
    tmp_path.chmod(0)
    yield tmp_path
    tmp_path.chmod(0o700)


# --- precedence --------------------------------------------------------------------------------------


def test_empty_file_gives_the_defaults(setup):
    assert setup.load() == Config(node_name=os.uname().nodename.lower())


def test_every_key_of_the_file_sets_its_field(setup):
    assert setup.load(EVERYTHING) == Config(
        node_name="worker-7",
        drivers=("gpu.example.com", "cpu.example.com"),
        period_ns=250_000_000,
        log_format="json",
        web_config=Path("/etc/web.yml"),
        listen=(ListenAddress("127.0.0.1", 9999), ListenAddress("", path="/run/elsewhere/http.sock")),
        runtime_dir=Path("/run/elsewhere"),
        state_dir=Path("/var/elsewhere"),
        sysfs_root=Path("/host/sys"),
        procfs_root=Path("/host/proc"),
        cgroupfs_root=Path("/host/cgroup"),
        kubelet_cgroup_root="/kubelet",
        nvml_library="/opt/nvidia/libnvidia-ml.so.1",
        kmsg=Path("/host/kmsg"),
        kmsg_any_facility=True,
        heartbeat_s=5,
        lease_s=20,
        coalesce_ns=0,
        sweep_ns=60 * 10**9,
        resync_ns=3600 * 10**9,
        group_max=10,
        held_bytes=512 << 10,
        throttled_percent=50,
        throttled_window_s=120,
        kubelet_dir=Path("/var/lib/other"),
        pods_period_ns=120 * 10**9,
        pods_audit_ns=0,
        correctable_errors=10,
        correctable_window_s=43_200,
        nic_errors=50,
        nic_error_window_s=1800,
        nic_link_downs=2,
        nic_link_window_s=300,
        pressure_percent=20,
        pressure_window_s=300,
        expect_cpus=0b1_0000_1111,
        expect_pools={"hugepages-2mi-node0": 512, "hugepages-1gi-node1": 0},
        throttle_events=3,
        throttle_window_s=30,
        expect_gpus=8,
        gpu_watch=False,
        gpu_process=False,
        gpu_slow_ns=30 * 10**9,
        gpu_cpu_ns=3 * 10**6,
        gpu_deadline_ns=2 * 10**9,
        gpu_dead_ns=180 * 10**9,
        gpu_probation_ns=600 * 10**9,
        gpu_correctable_errors=50,
        gpu_correctable_window_s=7200,
        gpu_xids={31: XidOverride.IGNORE, 63: XidOverride.UNHEALTHY},
        checks=(CustomCheck("fabric", ("/opt/checks/fabric", "--all"), "gpu-*", 300),),
        rules=(
            RuleOverride("gpu.ecc.*", "gpu-3", severity=Severity.INFO),
            RuleOverride("cpu.throttled.core", limit=5),
        ),
        history_rows=50,
        history_age_s=86_400,
        k8s_enabled=True,
        k8s_kubeconfig=Path("/etc/drahealth/kubeconfig"),
        k8s_namespace="monitoring",
        k8s_condition_kinds=("gpu", "nic"),
        k8s_events=False,
        k8s_taint_rules=("gpu.example.com",),
        nvsentinel_socket=Path("/run/connector.sock"),
        nvsentinel_remediate=True,
        record_dir=Path("/var/lib/drahealth/record"),
        record_size=64 << 20,
        record_age_s=172_800,
        prepare_patterns=(
            ErrorPattern(
                re.compile(r"bank \d+ is locked"),
                "fpga.bank_locked",
                ErrorClass.TRANSIENT,
                "the bank is in use",
                0.5,
            ),
            ErrorPattern(re.compile("no such bitstream"), "fpga.bitstream", ErrorClass.BAD_CONFIG, "", 0.5),
        ),
        taint_evict=frozenset({"gpu.xid.79", "mem.*", "gpu.mismatch", "nic.*", "gpu.no_device", "a.b"}),
        taint_quiet_s=120,
        taint_unknown=False,
        taint_inform=False,
        taint_wait_s=0.5,
    )


def test_full_example_has_every_key():
    for setting in SETTINGS:
        table, _, name = setting.key.rpartition(".")
        assert re.search(
            rf"^\[{table}\]\n([^\[].*\n)*{name} = |^\[?\[{setting.key}\]", EVERYTHING, re.MULTILINE
        )


def test_flag_wins_over_variable_and_variable_over_file(setup):
    text = '[agent]\nperiod = "3s"'
    assert setup.load(text).period_ns == 3 * 10**9
    assert setup.load(text, PERIOD="2s").period_ns == 2 * 10**9
    assert setup.load(text, {"--period": "1s"}, PERIOD="2s").period_ns == 10**9


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.flag], ids=lambda s: s.flag)
def test_every_flag_has_an_equivalent_variable(setup, setting):
    values = {
        "--driver": "gpu.example.com",
        "--period": "20ms",
        "--node-name": "worker-8",
        "--log-format": "json",
        "--listen": "localhost",
    }
    value = "1" if setting.is_switch else values.get(setting.flag, "/some/where")
    given = [value] if setting.is_repeatable else True if setting.is_switch else value
    by_flag = setup.load(flags={setting.flag: given})
    by_variable = setup.load(**{setting.variable.removeprefix("DRAHEALTH_"): value})
    assert by_flag == by_variable != setup.load()


@pytest.mark.parametrize(("text", "on"), [("1", True), ("true", True), ("0", False), ("false", False)])
def test_switch_variable_accepts_1_0_true_false(setup, text, on):
    assert setup.load(KMSG_ANY_FACILITY=text).kmsg_any_facility is on


def test_environment_variable_switches_off_a_setting_of_the_file(setup):
    assert not setup.load("[roots]\nkmsg-any-facility = true", KMSG_ANY_FACILITY="0").kmsg_any_facility


def test_variable_holds_several_drivers(setup):
    assert setup.load(DRIVER="a.example.com, b.example.com c").drivers == (
        "a.example.com",
        "b.example.com",
        "c",
    )


def test_drivers_given_as_flags_replace_those_of_the_file(setup):
    text = '[agent]\ndrivers = ["a.example.com"]'
    assert setup.load(text, {"--driver": ["b.example.com"]}).drivers == ("b.example.com",)


def test_empty_variable_counts_as_unset(setup):
    assert setup.load(PERIOD="") == setup.load()


def test_unknown_variable_is_refused_with_suggestion(setup):
    words = "environment variable DRAHEALTH_PERIODE: there is no such setting; did you mean 'PERIOD'?"
    assert setup.refusal(PERIODE="1s") == words
    assert setup.refusal(ZZZ="1") == "environment variable DRAHEALTH_ZZZ: there is no such setting"
    assert setup.load(ZZZ="", RUN_ARGS="--period 1s", CONFIG="/none") == setup.load()


def test_variables_of_a_custom_check_are_no_settings_in_its_command(setup):
    assert setup.load(CHECK="fabric", NODE="node-1", DEVICE="gpu-0") == setup.load()
    assert "DRAHEALTH_NODE: there is no such setting" in setup.refusal(NODE="node-1")


def test_relative_path_is_resolved_from_working_directory(setup):
    assert setup.load(flags={"--sysfs-root": "fake/../sys"}).sysfs_root == Path.cwd() / "sys"


def test_kubelet_cgroup_root_may_lack_its_first_slash(setup):
    assert (
        setup.load(flags={"--kubelet-cgroup-root": "kubelet.slice/"}).kubelet_cgroup_root == "/kubelet.slice"
    )
    assert setup.load(flags={"--kubelet-cgroup-root": "/"}).kubelet_cgroup_root == "/"


def test_library_without_slash_is_left_to_the_dynamic_linker(setup):
    assert setup.load(flags={"--nvml-library": "libfake.so"}).nvml_library == "libfake.so"
    assert setup.load(flags={"--nvml-library": "./libfake.so"}).nvml_library == str(Path.cwd() / "libfake.so")


def test_default_state_dir_persists_unless_runtime_dir_is_set(setup):
    assert Config(node_name="n").state_dir == Path("/var/lib/drahealth")
    assert Config(node_name="n", runtime_dir=Path("/tmp/x")).state_dir == Path("/tmp/x/state")
    assert setup.load(flags={"--runtime-dir": "/tmp/x"}).state_dir == Path("/tmp/x/state")
    flags = {"--runtime-dir": "/tmp/x", "--state-dir": "/var/lib/drahealth"}
    assert setup.load(flags=flags).state_dir == Path("/var/lib/drahealth")


def test_longer_period_raises_default_slow_period(setup):
    assert setup.load('[agent]\nperiod = "1m"').gpu_slow_ns == 60 * 10**9
    assert setup.load('[agent]\nperiod = "2s"').gpu_slow_ns == 10 * 10**9


def test_longer_period_raises_default_windows_of_counters(setup):
    config = setup.load('[agent]\nperiod = "1h"')
    windows = [config.throttle_window_s, config.throttled_window_s, config.nic_error_window_s]
    assert [*windows, config.nic_link_window_s] == [7200, 7200, 7200, 7200]
    assert setup.load('[agent]\nperiod = "30s"').throttle_window_s == 60
    assert setup.load('[agent]\nperiod = "45s"').throttle_window_s == 90
    assert setup.load('[cgroups]\nsweep = "1m"').throttled_window_s == 120


def test_shorter_period_raises_default_cpu_budget(setup):
    assert setup.load("").gpu_cpu_ns == 2 * 10**6
    assert setup.load('[agent]\nperiod = "2s"').gpu_cpu_ns == 2 * 10**6
    assert setup.load('[agent]\nperiod = "100ms"').gpu_cpu_ns == 20 * 10**6
    assert setup.load('[agent]\nperiod = "100ms"\n[gpu]\ncpu-budget = "1ms"').gpu_cpu_ns == 10**6
    assert setup.load('[gpu]\ncpu-budget = "0s"').gpu_cpu_ns == 0


@given(st.integers(3, 86399))
def test_shorter_lease_lowers_default_heartbeat(lease):
    config = read_config(_file_with(f'[stream]\nlease = "{lease}s"'))
    assert config.lease_s == lease
    assert config.heartbeat_s == min(10, lease / 3)


def _file_with(text: str) -> Path:
    path = Path(os.environ["HYPOTHESIS_CONFIG"])
    path.write_text(text)
    return path


@pytest.fixture(scope="module", autouse=True)
def _hypothesis_file(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYPOTHESIS_CONFIG", str(tmp_path_factory.mktemp("hypothesis") / "config.toml"))
        yield


# --- the file ----------------------------------------------------------------------------------------------


def test_absent_default_file_is_ignored(tmp_path):
    default = tmp_path / "config.toml"
    assert load({}, {}, default_file=default, needs_runtime_dir=False).period_ns == 10**9
    default.write_text('[agent]\nperiod = "2s"')
    assert load({}, {}, default_file=default, needs_runtime_dir=False).period_ns == 2 * 10**9


def test_absent_requested_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"/none.toml: No such file or directory"):
        load({}, {}, file=tmp_path / "none.toml")


def test_unreadable_file_is_permission_denied_requested_or_default(locked_directory, drop_root):
    secret = locked_directory / "config.toml"
    for file in ({"file": secret}, {"default_file": secret}):
        with pytest.raises(PermissionDeniedError, match=r"config.toml: Permission denied"):
            load({}, {"XDG_RUNTIME_DIR": "/run/user/1"}, **file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[agent]\nperiod = \n", "FILE:2: not valid TOML: invalid value"),
        ("[agent]\n\nperiod 1\n", "FILE:3: not valid TOML: expected '=' after a key in a key/value pair"),
        ("[agent", "FILE:1: not valid TOML: expected ']' at the end of a table declaration"),
        ("[agent]\nperiod = '''\n", "FILE:3: not valid TOML: expected \"'''\""),
    ],
)
def test_invalid_toml_is_refused_with_line(setup, text, words):
    assert setup.refusal(text) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"[throttle]\nevents = {'1' * 4301}\n", "FILE:2: line is 4310 bytes, limit 4096; split it"),
        (
            f"[throttle]\nevents = {'[' * 2000}",
            "FILE: arrays or tables are nested too deeply; remove brackets",
        ),
        (
            f"[agent]\nperiod = {'[' * 33}{']' * 33}\n",
            "FILE: arrays or tables are nested more than 32 deep, the limit; remove brackets or dots",
        ),
        (f"agent = 0x{'f' * 4000}", "FILE: agent: integer has 16000 bits, limit 64; write a smaller one"),
        (
            f"[agent]\ndrivers = [0x{'f' * 17}]",
            "FILE: drivers: integer has 68 bits, limit 64; write a smaller one",
        ),
        (f"a{'.a' * 2048} = 1", "FILE:1: line is 4101 bytes, limit 4096; split it"),
        (f"[agent]\nperiod{'.a' * 64} = 1", "FILE:2: dotted key has over 64 parts, the limit; shorten it"),
        (
            f"[agent]\nx = {{ 'b' {'. a' * 64} = 1 }}",
            "FILE:2: dotted key has over 64 parts, the limit; shorten it",
        ),
        ("#\n" * (1 << 17) + "#", "configuration file FILE: file is 262145 bytes, limit 262144"),
    ],
    ids=[
        "digits",
        "brackets",
        "few brackets",
        "hexadecimal digits",
        "integer in a list",
        "line",
        "dotted key",
        "inline key",
        "size",
    ],
)
def test_file_that_costs_too_much_is_refused(setup, text, words):
    assert setup.refusal(text) == words


@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_file_that_never_ends_is_refused(tmp_path, kind):
    file = tmp_path / "config.toml"
    if kind == "FIFO":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"config\.toml: is not a regular file"):
        load({}, {}, file=file)


def test_more_than_64_drivers_are_refused(setup):
    drivers = [f"d{number}.example.com" for number in range(30_000)]
    assert setup.load(DRIVER=",".join(drivers[:64])).drivers == tuple(drivers[:64])
    with pytest.raises(ConfigError, match="30000 drivers are given, limit 64; name fewer drivers"):
        setup.load(DRIVER=",".join(drivers))


def test_byte_order_mark_of_an_editor_is_ignored(setup):
    setup.file.write_bytes(b'\xef\xbb\xbf[agent]\nperiod = "2s"\n')
    assert load({}, {}, file=setup.file, needs_runtime_dir=False).period_ns == 2_000_000_000


def test_binary_file_is_refused_with_byte_offset(setup):
    setup.file.write_bytes(b"[agent]\n\xff")
    with pytest.raises(ConfigError, match="byte 8 is not UTF-8"):
        load({}, {}, file=setup.file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[agent]\nperid = "1s"', "agent.perid: no such setting; did you mean 'period'?"),
        ("[streem]", "streem: no such setting; did you mean 'stream'?"),
        ('period = "1s"', "period: no such setting; did you mean 'agent.period'?"),
        (
            '[cgroups]\nheartbeat = "1s"',
            "cgroups.heartbeat: no such setting; did you mean 'stream.heartbeat'?",
        ),
        ("[zzz]", "zzz: no such setting"),
        ("agent = 1", "agent: 1 is not a table; write [agent]"),
        (
            "[agent]\nperiod = 1",
            "agent.period: 1 is not a duration; write a number and its unit, such as 100ms or 1s",
        ),
        (
            "[k8s]\ncondition-kinds = 'gpu'",
            "k8s.condition-kinds: 'gpu' is not a list of names; write it in brackets, as in ['a', 'b']",
        ),
        (
            "[agent]\ndrivers = [1]",
            "agent.drivers: [1] is not a list of names; write it in brackets, as in ['a', 'b']",
        ),
        (
            '[agent]\ndrivers = "a,b"',
            "agent.drivers: 'a,b' is not a list of names; write it in brackets, as in ['a', 'b']",
        ),
        (
            "[throttle]\nevents = true",
            "throttle.events: True is not a whole number; write digits without quotes",
        ),
        (
            "[throttle]\nevents = 1.5",
            "throttle.events: 1.5 is not a whole number; write digits without quotes",
        ),
        (
            '[throttle]\nwindow = "1500ms"',
            "throttle.window: '1500ms' is not a whole number of seconds; write a value such as 30s or 5m",
        ),
        ("[roots]\nsysfs = 1", "roots.sysfs: 1 is not a string; put it in quotes"),
        ('[roots]\nsysfs = ""', "roots.sysfs: '' is not a path; write the path of a file or directory"),
        ('[expect]\ncpus = "3-1"', "expect.cpus: CPU range '3-1' is empty or exceeds CPU 8191, the limit"),
        (
            '[expect]\nhugepages = "512"',
            "expect.hugepages: '512' is not a table of hugepage devices and their number of pages",
        ),
        (
            "[expect.hugepages]\nhugepages-2mi-node0 = '5'",
            "expect.hugepages: hugepage device hugepages-2mi-node0: pages: '5' is not a whole number; "
            "write digits without quotes",
        ),
        ("[expect]\ngpus = '8'", "expect.gpus: '8' is not a whole number; write digits without quotes"),
        (
            "[gpu]\nwatch = 'true'",
            "gpu.watch: 'true' is neither true nor false; write one of them without quotes",
        ),
        ("[gpu]\nwatch = 1", "gpu.watch: 1 is neither true nor false; write one of them without quotes"),
        ("[gpu]\ndeadlin = '1s'", "gpu.deadlin: no such setting; did you mean 'deadline'?"),
        ("[gpu]\nxids = [31]", "gpu.xids: [31] is not a table of XIDs and their severities"),
        ("[gpu.xids]\nx31 = 'ignore'", "gpu.xids: 'x31' is not an XID; write its number, such as 31"),
        ("[gpu.xids]\n031 = 'ignore'", "gpu.xids: '031' is not an XID; write its number, such as 31"),
        (
            "[gpu.xids]\n31 = 'ignored'",
            "gpu.xids: XID 31: severity 'ignored' is not one of ignore, info, degraded, unhealthy",
        ),
        (
            "[gpu.xids]\n31 = true",
            "gpu.xids: XID 31: severity True is not one of ignore, info, degraded, unhealthy",
        ),
        (
            "[roots]\nnvml-library = ''",
            "roots.nvml-library: '' is not the name or path of a library, such as libnvidia-ml.so.1",
        ),
        (
            "[taints]\nevict = 'gpu.xid.79'",
            "taints.evict: 'gpu.xid.79' is not a list of finding codes, such as ['gpu.lost']",
        ),
        (
            "[taints]\nevict = ['gpu *']",
            "taints.evict: 'gpu *' is neither a code, such as gpu.xid.79, nor a family, such as gpu.xid.*",
        ),
        (
            "[taints]\nevict = ['gpu.lost', 'gpu.xdi.79']",
            "taints.evict: no fault has the code 'gpu.xdi.79'; did you mean 'gpu.xid.79'?",
        ),
        (
            "[taints]\nevict = ['gpu.xids.*']",
            "taints.evict: no fault has the code 'gpu.xids.*'; did you mean 'gpu.xid.*'?",
        ),
        (
            "[taints]\nevict = ['lost']",
            "taints.evict: no fault has the code 'lost'; did you mean 'gpu.lost'?",
        ),
        (
            "[agent]\nlog-format = 'jsn'",
            "agent.log-format: log format 'jsn' is not one of text, json; did you mean 'json'?",
        ),
        (
            "[http]\nlisten = 'localhost'",
            "http.listen: 'localhost' is not a list of addresses, such as ['localhost:14680']",
        ),
        (
            "[http]\nlisten = [':9100']",
            "http.listen: address ':9100' has a port only; write localhost:9100, "
            "or 0.0.0.0:9100 for all addresses of the host",
        ),
        (
            "[http]\nlisten = ['node-7:80']",
            "http.listen: address 'node-7:80': 'node-7' is neither localhost nor an IP address; host names "
            "are not "
            "resolved",
        ),
        (
            '[http]\nlisten = ["a\\u0000b:80"]',
            "http.listen: address 'a\\x00b:80': 'a\\x00b' is neither localhost nor an IP address; host names "
            "are not resolved",
        ),
        (
            "[[rules]]\ncode = 'cpu.offline'\nseverity = [1]",
            "rules: rule 1: severity: a list is not one of info, degraded, unhealthy; or set off",
        ),
        ("[http]\nlisten = ['[::1]:65536']", "http.listen: 65536 is over the limit of 65535"),
        (
            "[http]\nlisten = ['::1']",
            "http.listen: '::1' is not an address; write localhost:14680, [::1]:14680 or unix:/path",
        ),
        (
            "[http]\nlisten = ['127.0.0.1', 'localhost:14680']",
            "http.listen: address 127.0.0.1:14680 is given 2 times; give it once",
        ),
        (
            "[[rules]]\ncode = 'cpu.offlin'\noff = true",
            "rules: rule 1: code: no rule that can be changed has the code 'cpu.offlin'; "
            "did you mean 'cpu.offline'?",
        ),
        (
            "[rules]\ncode = 'cpu.offline'",
            "rules: {'code': 'cpu.offline'} is not a list of rules; begin each rule with [[rules]]",
        ),
        (
            "[taints]\ninform = 'no'",
            "taints.inform: 'no' is neither true nor false; write one of them without quotes",
        ),
        (
            "[prepare.patterns]\nmatch = 'x'",
            "prepare.patterns: {'match': 'x'} is not a list of error patterns; "
            "begin each with [[prepare.patterns]]",
        ),
        ("[[prepare]]", "prepare: [{}] is not a table; write [prepare]"),
        (
            "[prepare]\npatterns = ['x']",
            "prepare.patterns: pattern 1: 'x' is not a table of match, code, class, summary",
        ),
        ("[[prepare.pattern]]", "prepare.pattern: no such setting; did you mean 'patterns'?"),
        (
            f"{A_PATTERN}{A_PATTERN}sumary = 'y'",
            "prepare.patterns: pattern 2: unknown key 'sumary'; did you mean 'summary'?",
        ),
        (
            f"{A_PATTERN}[[prepare.patterns]]",
            "prepare.patterns: pattern 2: match is missing; each pattern needs match, code and class",
        ),
        (
            "[[prepare.patterns]]\nmatch = 5\ncode = 'a.b'\nclass = 'transient'",
            "prepare.patterns: pattern 1: match: 5 is not a string; put it in quotes",
        ),
        (
            A_PATTERN.replace("transient", "transiet"),
            "prepare.patterns: pattern 1: class 'transiet' is not one of "
            "unknown, transient, bad-config, failed-device, permanent; did you mean 'transient'?",
        ),
        (
            A_PATTERN.replace("'x'", "'x('"),
            "prepare.patterns: pattern 1: match 'x(' is not a regular expression: missing ), unterminated "
            "subpattern at position 1",
        ),
    ],
)
def test_unknown_or_invalid_setting_is_refused_by_name(setup, text, words):
    assert setup.refusal(text) == f"FILE: {words}"


def test_error_about_a_long_value_keeps_its_beginning_and_end(setup):
    lines = "\n".join(["x" * 4000] * 60)
    refusal = setup.refusal(f"[agent]\nlog-format = '''{lines}'''")
    assert refusal.startswith("FILE: agent.log-format: log format 'xxx")
    assert refusal.endswith("xxx' is not one of text, json")
    assert len(refusal) < 2100


# --- embedding programs -------------------------------------------------------------------------------


def test_embedding_program_reads_one_file_and_no_environment(setup, monkeypatch):
    monkeypatch.setenv("DRAHEALTH_PERIOD", "2s")
    monkeypatch.setenv("DRAHEALTH_OF_ANOTHER_PROGRAM", "1")
    setup.file.write_text(A_PATTERN)
    (pattern,) = drahealth.read_config(setup.file).prepare_patterns
    assert pattern.code == "a.b"
    assert read_config(setup.file).period_ns == 10**9


@pytest.mark.usefixtures("drop_root")
def test_embedding_program_needs_no_runtime_dir(monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert read_config(Path(os.devnull)).node_name == os.uname().nodename.lower()


def test_embedding_program_gets_errors_with_file_and_key(setup):
    setup.file.write_text(f"{A_PATTERN}clas = 'x'")
    with pytest.raises(drahealth.ConfigError) as caught:
        read_config(setup.file)
    assert str(caught.value).startswith(f"{setup.file}: prepare.patterns: pattern 1: unknown key 'clas'")
    with pytest.raises(drahealth.ConfigError, match=r"none.toml: No such file or directory"):
        read_config(setup.file.with_name("none.toml"))


# --- limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[agent]\nperiod = "9999us"', "agent.period: 9999us is below the limit of 10ms"),
        ('[agent]\nperiod = "3601s"', "agent.period: 3601s is over the limit of 1h"),
        ('[stream]\nlease = "2s"', "stream.lease: 2s is below the limit of 3s"),
        ('[stream]\nlease = "24h"', "stream.lease: 24h is over the limit of 86399s"),
        (
            '[stream]\nheartbeat = "11s"',
            "stream.heartbeat: 11s is over a third of stream.lease (30s); lower it",
        ),
        ('[stream]\nheartbeat = "0s"', "stream.heartbeat: 0s is below the limit of 100ms"),
        ('[stream]\ncoalesce = "11s"', "stream.coalesce: 11s is over the limit of 10s"),
        (
            '[agent]\nnode-name = "rack-1/a"\n[k8s]\nenabled = true',
            "agent.node-name: 'rack-1/a' names no Node, which [k8s] and [nvsentinel] need; "
            "write it without /",
        ),
        (
            '[agent]\nnode-name = "rack-1/a"\n[nvsentinel]\nsocket = "/run/connector.sock"',
            "agent.node-name: 'rack-1/a' names no Node, which [k8s] and [nvsentinel] need; "
            "write it without /",
        ),
        ('[cgroups]\nsweep = "99ms"', "cgroups.sweep: 99ms is below the limit of 100ms"),
        ('[cgroups]\nresync = "25h"', "cgroups.resync: 25h is over the limit of 24h"),
        ("[cgroups]\nmax-groups = 0", "cgroups.max-groups: 0 is below the limit of 1"),
        ("[cgroups]\nmax-groups = 16385", "cgroups.max-groups: 16385 is over the limit of 16384"),
        ('[cgroups]\nheld-memory = "33MiB"', "cgroups.held-memory: 33MiB is over the limit of 32MiB"),
        ("[cgroups]\nthrottled-percent = 101", "cgroups.throttled-percent: 101 is over the limit of 100"),
        ('[cgroups]\nthrottled-window = "9s"', "cgroups.throttled-window: 9s is below the limit of 10s"),
        ('[pods]\nperiod = "999ms"', "pods.period: 999ms is below the limit of 1s"),
        ('[pods]\naudit = "9s"', "pods.audit: 9s is below the limit of 10s"),
        ('[pods]\naudit = "25h"', "pods.audit: 25h is over the limit of 24h"),
        ("[history]\nrows = 100001", "history.rows: 100001 is over the limit of 100000"),
        ('[history]\nage = "59m"', "history.age: 59m is below the limit of 1h"),
        ("[errors]\ncorrectable = 0", "errors.correctable: 0 is below the limit of 1"),
        ('[errors]\nwindow = "169h"', "errors.window: 169h is over the limit of 168h"),
        ("[nic]\nlink-downs = 0", "nic.link-downs: 0 is below the limit of 1"),
        ('[nic]\nerror-window = "30s"', "nic.error-window: 30s is below the limit of 1m"),
        ("[pressure]\npercent = 0", "pressure.percent: 0 is below the limit of 1"),
        ('[pressure]\nwindow = "2h"', "pressure.window: 2h is over the limit of 1h"),
        ("[throttle]\nevents = 0", "throttle.events: 0 is below the limit of 1"),
        ('[throttle]\nwindow = "0s"', "throttle.window: 0s is below the limit of 2s"),
        (
            '[agent]\nperiod = "31s"\n[throttle]\nwindow = "60s"',
            "throttle.window: 1m is shorter than two of agent.period (31s); raise it",
        ),
        (
            '[cgroups]\nsweep = "1m"\nthrottled-window = "119s"',
            "cgroups.throttled-window: 119s is shorter than two of cgroups.sweep (1m); raise it",
        ),
        (
            '[gpu]\nslow-period = "2m"\n[nic]\nlink-window = "3m"',
            "nic.link-window: 3m is shorter than two of gpu.slow-period (2m); raise it",
        ),
        ('[cgroups]\nthrottled-window = "121m"', "cgroups.throttled-window: 121m is over the limit of 2h"),
        ('[throttle]\nwindow = "25h"', "throttle.window: 25h is over the limit of 24h"),
        ("[expect]\ngpus = 33", "expect.gpus: 33 is over the limit of 32"),
        ('[gpu]\nslow-period = "99ms"', "gpu.slow-period: 99ms is below the limit of 100ms"),
        ('[gpu]\nslow-period = "999ms"', "gpu.slow-period: 999ms is below agent.period (1s); raise it"),
        ('[gpu]\ndeadline = "99ms"', "gpu.deadline: 99ms is below the limit of 100ms"),
        ('[gpu]\ndeadline = "601s"', "gpu.deadline: 601s is over the limit of 10m"),
        (
            '[gpu]\ndeadline = "60s"\ndead = "60s"',
            "gpu.dead: 1m is not longer than gpu.deadline (1m); raise it",
        ),
        ('[gpu]\ndead = "25h"', "gpu.dead: 25h is over the limit of 24h"),
        ('[gpu]\nprobation = "25h"', "gpu.probation: 25h is over the limit of 24h"),
        ("[gpu]\ncorrectable-errors = 0", "gpu.correctable-errors: 0 is below the limit of 1"),
        ('[gpu]\ncorrectable-window = "0s"', "gpu.correctable-window: 0s is below the limit of 1s"),
        ("[gpu.xids]\n1000 = 'info'", "gpu.xids: 1000 is over the limit of 999"),
        ('[taints]\nquiet = "25h"', "taints.quiet: 25h is over the limit of 24h"),
        ('[taints]\nwait = "11s"', "taints.wait: 11s is over the limit of 10s"),
        (65 * A_PATTERN, "prepare.patterns: 65 patterns, limit 64; remove some"),
        (
            A_PATTERN.replace("'x'", f"'{257 * 'x'}'"),
            "prepare.patterns: pattern 1: match is 257 characters long, limit 256; shorten it",
        ),
        (
            A_PATTERN.replace("'x'", "'a.*b.*c.*d'"),
            "prepare.patterns: pattern 1: match 'a.*b.*c.*d' has 3 repeats such as * and +, limit 2",
        ),
        (
            "[expect.hugepages]\nhugepages-2mi-node0 = -1",
            "expect.hugepages: hugepage device hugepages-2mi-node0: pages: -1 is below the limit of 0",
        ),
        (
            "[expect.hugepages]\nhugepages-2048ki-node0 = 1",
            "expect.hugepages: 'hugepages-2048ki-node0' is not a hugepage device; "
            "write 'hugepages-2mi-node0'",
        ),
        (
            "[expect.hugepages]\n2mi = 1",
            "expect.hugepages: '2mi' is not a hugepage device, such as hugepages-2mi-node0",
        ),
        (
            f'[roots]\nsysfs = "/{200 * "x"}"',
            f"roots.sysfs: path '/{200 * 'x'}' is 201 bytes long, limit 200; use a shorter path",
        ),
        (
            '[roots]\nkubelet-cgroup = "/a/../.."',
            "roots.kubelet-cgroup: cgroup '/a/../..' is outside the cgroup tree; write it without '..'",
        ),
    ],
)
def test_value_out_of_range_is_refused_with_value_and_limit(setup, text, words):
    assert setup.refusal(text) == f"FILE: {words}"


def test_limits_are_inclusive(setup):
    assert setup.load('[agent]\nperiod = "10ms"').period_ns == 10_000_000
    assert setup.load('[agent]\nperiod = "1h"').period_ns == 3600 * 10**9
    assert setup.load('[stream]\nlease = "30s"\nheartbeat = "10s"').heartbeat_s == 10


def test_error_names_the_flag_or_variable_of_the_value(setup):
    assert setup.refusal(flags={"--period": "5ms"}) == "--period: 5ms is below the limit of 10ms"
    assert setup.refusal(PERIOD="5ms") == "DRAHEALTH_PERIOD: 5ms is below the limit of 10ms"
    assert setup.refusal(PERIOD="fast").startswith("DRAHEALTH_PERIOD: 'fast' is not a duration")
    words = "DRAHEALTH_KMSG_ANY_FACILITY: 'yes' is neither true nor false; write one of them without quotes"
    assert setup.refusal(KMSG_ANY_FACILITY="yes") == words


def test_directly_constructed_config_is_checked():
    with pytest.raises(ConfigError, match=r"^agent.period: 1ms is below the limit of 10ms$") as caught:
        Config(node_name="worker-7", period_ns=1_000_000)
    assert caught.value.key == "agent.period"


def test_nan_is_out_of_range():
    with pytest.raises(ConfigError, match=r"stream.heartbeat"):
        Config(node_name="worker-7", heartbeat_s=float("nan"))


@pytest.mark.parametrize("name", ["gpu.example.com", "a", "a-b.c", 63 * "a"])
def test_driver_name_is_a_dns_subdomain(setup, name):
    assert setup.load(flags={"--driver": [name]}).drivers == (name,)


@pytest.mark.parametrize("name", ["", "GPU", "a_b", "-a", "a-", "a..b", ".", "a/b", "..", "a\n"])
def test_invalid_dns_subdomain_is_refused_as_driver_name(setup, name):
    assert setup.refusal(flags={"--driver": [name]}).startswith(
        f"--driver: driver name {name!r} is not a DNS"
    )


def test_driver_name_has_at_most_63_bytes(setup):
    assert "is 64 bytes long, limit 63" in setup.refusal(flags={"--driver": [64 * "a"]})


def test_duplicate_driver_is_refused(setup):
    assert (
        setup.refusal(flags={"--driver": ["a", "b", "a"]})
        == "--driver: driver 'a' is given 2 times; give it once"
    )


@pytest.mark.parametrize("name", ["worker-7", "worker-7.example.com", "rack-3/worker-7"])
def test_valid_pool_name_is_accepted_as_node_name(setup, name):
    assert setup.load(flags={"--node-name": name}).node_name == name


@pytest.mark.parametrize("name", ["", "Worker", "a_b", "a//b", "/a", "a/"])
def test_invalid_pool_name_is_refused_as_node_name(setup, name):
    assert setup.refusal(flags={"--node-name": name}).startswith(
        f"--node-name: pool name {name!r} is not valid: it must be"
    )


# --- the runtime directory ---------------------------------------------------------------------------------

NO_AGENT: Final = Path("/proc/self/no-agent")
"""Directory of root's agent for tests in which root runs none; /run/drahealth may have one."""


def test_client_needs_runtime_dir_but_no_valid_node_name():
    flags = {"--runtime-dir": "/run/here"}
    assert load_runtime_dir(flags, {"DRAHEALTH_NODE_NAME": "not_a_name"}) == Path("/run/here")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_runtime_dir_of_root_is_below_run():
    assert load_runtime_dir({}, {"XDG_RUNTIME_DIR": "/run/user/0"}) == Path("/run/drahealth")


@pytest.mark.usefixtures("drop_root")
def test_runtime_dir_of_user_is_below_xdg_runtime_dir():
    variables = {"XDG_RUNTIME_DIR": "/run/user/1"}
    assert load_runtime_dir({}, variables, system_dir=NO_AGENT) == Path("/run/user/1/drahealth")


@pytest.mark.usefixtures("drop_root")
def test_user_without_xdg_runtime_dir_must_set_runtime_dir():
    for needs_one in (partial(load_runtime_dir, system_dir=NO_AGENT), load):
        with pytest.raises(ConfigError, match=r"XDG_RUNTIME_DIR is not set; set it with --runtime-dir"):
            needs_one({}, {})


@pytest.fixture
def users_directory(drop_root):
    """Directory of an ordinary user, as which the test runs."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


@pytest.mark.parametrize("environ", [True, False], ids=["with XDG_RUNTIME_DIR", "without"])
def test_user_without_an_agent_gets_the_directory_of_roots_agent(users_directory, environ):
    variables = {"XDG_RUNTIME_DIR": str(users_directory)} if environ else {}
    system = users_directory / "system"
    system.mkdir()
    (system / "agent.sock").touch()
    assert load_runtime_dir({}, variables, system_dir=system) == system


def test_user_with_an_agent_gets_its_directory(users_directory):
    system, own = users_directory / "system", users_directory / "drahealth"
    for directory in (system, own):
        directory.mkdir()
        (directory / "agent.sock").touch()
    assert load_runtime_dir({}, {"XDG_RUNTIME_DIR": str(users_directory)}, system_dir=system) == own


def test_user_without_permission_gets_the_directory_of_roots_agent(users_directory):
    system = users_directory / "system"
    system.mkdir(mode=0)
    found = load_runtime_dir({}, {"XDG_RUNTIME_DIR": str(users_directory)}, system_dir=system)
    system.chmod(0o700)
    assert found == system


@pytest.mark.usefixtures("drop_root")
def test_scan_by_user_needs_no_runtime_dir():
    assert load({}, {"DRAHEALTH_NODE_NAME": "n"}, needs_runtime_dir=False).node_name == "n"


# --- durations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ns"),
    [("0s", 0), ("1ns", 1), ("10us", 10_000), ("100ms", 10**8), ("1.5s", 1_500_000_000), ("2m", 120 * 10**9),
     (" 1 h ", 3600 * 10**9), ("7d", 7 * 86400 * 10**9)],
)  # fmt: skip
def test_duration_is_a_number_and_a_unit(text, ns):
    assert parse_duration(text) == ns


@pytest.mark.parametrize(
    "text", ["", "1", "s", "-1s", "1e3s", "1 s s", "1m30s", "0x1s", "٣s", "inf s", 1, None, "1w"]
)
def test_other_text_is_no_duration(text):
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


def test_duration_of_a_float_is_formatted_in_whole_units():
    assert format_duration(1.001 * 10**9) == "1001ms"


@given(st.integers(0, 10**18))
def test_formatted_duration_parses_back(ns):
    text = format_duration(ns)
    if re.fullmatch(r"[0-9]{1,12}[a-z]+", text):  # longer numbers are refused
        assert parse_duration(text) == ns


# --- drop-ins and origins ------------------------------------------------------------------------------


class DropIns:
    """Default file and its drop-ins in a temporary directory."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "config.toml"
        self.directory = directory / "config.d"
        self.directory.mkdir()

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.directory / f"{name}.toml").write_text(text)

    def load(self, flags: dict[str, object] | None = None, **environ: str) -> LoadedConfig:
        return load_with_origins(
            flags or {},
            {"XDG_RUNTIME_DIR": "/run/user/1", **{f"DRAHEALTH_{k}": v for k, v in environ.items()}},
            default_file=self.file,
        )

    def refusal(self) -> str:
        with pytest.raises(ConfigError) as caught:
            self.load()
        return str(caught.value).replace(str(self.directory), "D").replace(str(self.file), "FILE")


@pytest.fixture
def drop_ins(tmp_path: Path) -> DropIns:
    return DropIns(tmp_path)


def test_drop_ins_replace_values_in_the_order_of_their_names(drop_ins):
    drop_ins.file.write_text('[throttle]\nevents = 1\n[pods]\nperiod = "5s"')
    drop_ins.write(b="[throttle]\nevents = 3", a="[throttle]\nevents = 2\n[pressure]\npercent = 20")
    config = drop_ins.load().config
    assert (config.throttle_events, config.pressure_percent, config.pods_period_ns) == (3, 20, 5 * 10**9)


def test_drop_ins_merge_tables_and_join_patterns_newest_first(drop_ins):
    drop_ins.file.write_text(
        '[gpu.xids]\n31 = "ignore"\n63 = "info"\n[expect.hugepages]\n' + A_POOL + A_PATTERN
    )
    drop_ins.write(a='[gpu.xids]\n63 = "degraded"\n' + A_PATTERN.replace("a.b", "c.d"))
    config = drop_ins.load().config
    assert config.gpu_xids == {31: XidOverride.IGNORE, 63: XidOverride.DEGRADED}
    assert config.expect_pools == {"hugepages-2mi-node0": 512}
    assert [pattern.code for pattern in config.prepare_patterns] == ["c.d", "a.b"]


def test_drop_ins_join_rules_in_their_order(drop_ins):
    drop_ins.file.write_text('[[rules]]\ncode = "cpu.smt"\noff = true')
    drop_ins.write(a='[[rules]]\ncode = "cpu.smt"\noff = false')
    assert [rule.off for rule in drop_ins.load().config.rules] == [True, False]


def test_patterns_of_all_files_together_are_limited(drop_ins):
    drop_ins.write(a=40 * A_PATTERN, b=40 * A_PATTERN)
    assert drop_ins.refusal() == "D/a.toml, D/b.toml: prepare.patterns: 80 patterns, limit 64; remove some"


def test_other_files_of_the_drop_in_directory_are_ignored(drop_ins):
    for name in ("a.toml.bak", ".a.toml", "README"):
        (drop_ins.directory / name).write_text("[wrong]\nkey = 1")
    assert drop_ins.load().files == ()


def test_drop_ins_do_not_apply_to_a_requested_file(drop_ins):
    drop_ins.write(a="[throttle]\nevents = 2")
    drop_ins.file.write_text("")
    assert load({}, {"XDG_RUNTIME_DIR": "/run/user/1"}, file=drop_ins.file).throttle_events == 10


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[throttle]\nevents = 0", "D/a.toml: throttle.events: 0 is below the limit of 1"),
        ("[throttle]\nwrong = 0", "D/a.toml: throttle.wrong: no such setting"),
        ("[throttle]\nevents = ", "D/a.toml:2: not valid TOML: invalid value"),
        (
            '[stream]\nlease = "3s"',
            "FILE: stream.heartbeat: 10s is over a third of stream.lease (3s); lower it",
        ),
    ],
    ids=["limit", "unknown", "syntax", "together"],
)
def test_error_of_a_drop_in_names_its_file(drop_ins, text, words):
    drop_ins.file.write_text('[stream]\nheartbeat = "10s"')
    drop_ins.write(a=text)
    assert drop_ins.refusal() == words


def test_too_many_drop_ins_are_refused(drop_ins):
    drop_ins.write(**{f"f{number}": "" for number in range(65)})
    assert drop_ins.refusal() == "configuration directory D: 65 files, limit 64; merge some"


@pytest.fixture
def locked_drop_ins():
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # other users may enter /tmp
        directory = Path(name)
        directory.chmod(0o755)
        files = DropIns(directory)
        files.directory.chmod(0)
        yield files
        files.directory.chmod(0o700)


def test_unreadable_drop_in_directory_is_permission_denied(locked_drop_ins, drop_root):
    with pytest.raises(PermissionDeniedError, match=r"config\.d: Permission denied"):
        locked_drop_ins.load()


def test_each_value_has_its_origin(drop_ins):
    drop_ins.file.write_text('[gpu.xids]\n31 = "ignore"')
    drop_ins.write(a='[gpu.xids]\n32 = "ignore"', b="[throttle]\nevents = 2")
    loaded = drop_ins.load({"--period": "2s"}, NODE_NAME="n")
    file, a, b = drop_ins.file, *(str(drop_ins.directory / f"{name}.toml") for name in "ab")
    assert loaded.origins == {
        "gpu.xids": ValueOrigin(ValueOriginKind.FILE, f"{file}, {a}"),
        "throttle.events": ValueOrigin(ValueOriginKind.FILE, b),
        "agent.node-name": ValueOrigin(ValueOriginKind.VARIABLE, "DRAHEALTH_NODE_NAME"),
        "agent.period": ValueOrigin(ValueOriginKind.FLAG, "--period"),
    }
    assert list(map(str, loaded.files)) == [str(file), a, b]


# --- the reference -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.key)
def test_reference_documents_every_setting(setting):
    table, _, name = setting.key.rpartition(".")
    text = REFERENCE.read_text()
    assert f"[{table}]" in text or f"[[{setting.key}]]" in text
    key = re.escape(setting.key)
    assert re.search(rf"^(# )?({re.escape(name)} *=|\[{key}\]|\[\[{key}\]\])", text, re.MULTILINE)
    if setting.flag:
        assert f"`{setting.flag}`" in text
        assert f"`{setting.variable}`" in text


def test_reference_example_is_valid_and_equals_the_defaults(setup):
    """It shows each key with its default; keys without a default are commented out."""
    assert setup.load(example()) == setup.load()


def test_reference_pattern_is_valid_when_uncommented(setup):
    _, commented = example().split("# [[prepare.patterns]]")
    text = "[[prepare.patterns]]" + re.sub(r"^# ", "", commented, flags=re.MULTILINE)
    (pattern,) = setup.load(text).prepare_patterns
    assert pattern.matches("bank 3 is locked")
    assert pattern.summary


def test_reference_rule_is_valid_when_uncommented(setup):
    _, commented = example().split("# [[rules]]")
    (rule,) = setup.load(
        "[[rules]]" + re.sub(r"^# ", "", commented.partition("\n\n")[0], flags=re.MULTILINE)
    ).rules
    assert None not in (rule.off, rule.severity, rule.probation_s, rule.limit)
    assert rule.device


def example() -> str:
    (found,) = re.findall(r"```toml\n(.*?)```", REFERENCE.read_text(), re.DOTALL)
    return found


# --- sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), (0, 0), ("1KiB", 1024), (" 4 MiB ", 4 << 20), ("2GiB", 2 << 30)]
)
def test_size_is_a_whole_number_and_its_unit(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "4", 4, "4MB", "4 mib", "1.5MiB", "-1MiB", "MiB", "4MiB 1KiB", "9999999999999KiB", True]
)
def test_other_text_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="is not a size; write a whole number and its unit, such as 4MiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0"), (1000, "1000"), (1536, "1536"), (3 << 10, "3KiB"), (4 << 20, "4MiB")]
)
def test_size_is_shown_in_its_largest_unit(size: int, text: str) -> None:
    assert format_size(size) == text
