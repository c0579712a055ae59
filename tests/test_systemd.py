"""deploy/drahealth.service: its text for systemd-analyze, and its work under a real systemd.

One boot of this machine's own systemd as PID 1 of a container (systemd-nspawn, the host's /usr, an empty
/etc and /run) serves all tests of the second kind: a probe unit records each step in a file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import agents
import fake_nvml
import pytest
from agents import Agent, short_tmp
from hung_file import hung_file
from machine import why_no_kernel_log
from patience import PATIENCE_S
from wire.serving import eventually

from agent.cli.subcommand import EXIT_OF_ERROR
from agent.config.config import HELD_MAX, Config
from agent.errors import ConfigError, PermissionDeniedError, ResourceBusyError, UsageError
from agent.serve.sockets import CONNECTION_LIMIT

REPOSITORY = Path(__file__).parent.parent
UNIT = REPOSITORY / "deploy" / "drahealth.service"
CHECKS_DROP_IN = REPOSITORY / "deploy" / "drahealth.service.d" / "custom-checks.conf"
DRIVER = "test.drahealth.example"
COMMAND_PATH = "/opt/drahealth/bin/drahealth"
GPUS = "--nvml-library /opt/nvml/libnvidia-ml.so.1"
__all__ = ["short_tmp"]

# --- the unit as text ---------------------------------------------------------------------------------------


@pytest.fixture
def installed_unit(tmp_path: Path) -> Path:
    """Return the unit with a command that exists on this machine, which systemd-analyze checks."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(COMMAND_PATH, sys.executable))
    return unit


def analyze(*arguments: str | Path) -> str:
    """Return the output of systemd-analyze; it exits with 1 if it has an objection."""
    completed = subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout + completed.stderr


def test_unit_is_valid_for_systemd(installed_unit: Path) -> None:
    """Older versions do not know two keys of systemd 254."""
    unknown = re.compile(r".*: Unknown key .*'(RestartSteps|RestartMaxDelaySec)' in section .*, ignoring\.")
    complaints = analyze("verify", "--man=no", installed_unit).splitlines()
    version = int(analyze("--version").split()[1])
    assert len(complaints) == (2 if version < 254 else 0), complaints
    assert all(unknown.fullmatch(line) for line in complaints), complaints


def test_drop_in_for_later_versions_sends_one_signal(installed_unit: Path) -> None:
    drop_in = (UNIT.parent / f"{UNIT.name}.d" / "notify-reload.conf").read_text()
    assert re.findall(r"^[^#\n].*$", drop_in, re.MULTILINE) == [
        "[Service]",
        "Type=notify-reload",
        "ExecReload=",  # else systemd would send the signal, and run the unit's command, too
    ]
    version = int(analyze("--version").split()[1])
    if version < 253:
        pytest.skip("systemd before 253 does not know notify-reload")
    (installed_unit.parent / f"{installed_unit.name}.d").mkdir()
    (installed_unit.parent / f"{installed_unit.name}.d" / "notify-reload.conf").write_text(drop_in)
    assert "notify-reload" not in analyze("verify", "--man=no", installed_unit)


def test_drop_in_for_metrics_allows_ip_to_named_addresses_only(installed_unit: Path) -> None:
    drop_in = (UNIT.parent / f"{UNIT.name}.d" / "http.conf").read_text()
    assert re.findall(r"^[^#\n].*$", drop_in, re.MULTILINE) == [
        "[Service]",
        "Environment=DRAHEALTH_LISTEN=localhost:14680",
        "RestrictAddressFamilies=AF_INET AF_INET6",
        "IPAddressAllow=localhost",
    ]
    before = analyze("verify", "--man=no", installed_unit)
    (installed_unit.parent / f"{installed_unit.name}.d").mkdir()
    (installed_unit.parent / f"{installed_unit.name}.d" / "http.conf").write_text(drop_in)
    assert analyze("verify", "--man=no", installed_unit) == before


def test_drop_in_for_the_api_server_allows_ip_to_named_addresses_only(installed_unit: Path) -> None:
    drop_in = (UNIT.parent / f"{UNIT.name}.d" / "cluster.conf").read_text()
    assert re.findall(r"^[^#\n].*$", drop_in, re.MULTILINE) == [
        "[Service]",
        "RestrictAddressFamilies=AF_INET AF_INET6",
        "IPAddressAllow=localhost",
    ]
    before = analyze("verify", "--man=no", installed_unit)
    (installed_unit.parent / f"{installed_unit.name}.d").mkdir()
    (installed_unit.parent / f"{installed_unit.name}.d" / "cluster.conf").write_text(drop_in)
    assert analyze("verify", "--man=no", installed_unit) == before


def setting(name: str) -> str:
    """Return the value of a setting of the unit."""
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)
    return str(value)


def test_unit_restarts_always_except_after_permanent_errors() -> None:
    codes = dict(EXIT_OF_ERROR)
    permanent = {codes[error] for error in (UsageError, PermissionDeniedError, ConfigError)}
    assert {int(code) for code in setting("RestartPreventExitStatus").split()} == permanent
    assert codes[ResourceBusyError] not in permanent
    assert (setting("Restart"), setting("StartLimitIntervalSec")) == ("on-failure", "0")


def test_descriptor_limit_allows_full_sockets_of_many_drivers() -> None:
    assert int(setting("LimitNOFILE")) >= 16 * CONNECTION_LIMIT + 1024


def test_limits_of_the_unit_allow_the_cgroup_files_that_stay_open() -> None:
    others = 256 + 128  # DH_CG_OTHER_FDS of the core, in the half that is not for connections
    per_file = 4096 + 512  # dh_open_file_bytes() of the core
    assert (int(setting("LimitNOFILE")) // 2 - others) * per_file >= Config(node_name="node").held_bytes
    agent_mib, nvml_mib = 71, 256
    assert int(setting("MemoryMax").removesuffix("M")) >= agent_mib + nvml_mib + (HELD_MAX >> 20)


def test_invalid_line_in_the_unit_is_found(installed_unit: Path) -> None:
    installed_unit.write_text(installed_unit.read_text().replace("WatchdogSec=30", "WatchdogSeconds=30"))
    assert "WatchdogSeconds" in analyze("verify", "--man=no", installed_unit)


def test_sandbox_is_below_the_exposure_threshold(installed_unit: Path) -> None:
    printed = analyze("security", "--offline=true", "--threshold=16", "--no-pager", installed_unit)
    assert "Overall exposure level" in printed


def allowed_system_calls() -> set[str]:
    """Return the system calls that the unit's filter allows, as the machine's systemd reads its groups."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")

    def members(name: str) -> set[str]:
        if not name.startswith("@"):
            return {name}
        lines = (line.strip() for line in analyze("syscall-filter", name).splitlines()[1:])
        return set().union(*(members(line) for line in lines if line and not line.startswith("#")))

    allowed = members("@default")
    for line in re.findall(r"^SystemCallFilter=(.*)$", UNIT.read_text(), re.MULTILINE):
        calls = set().union(*map(members, line.removeprefix("~").split()))
        allowed = allowed - calls if line.startswith("~") else allowed | calls
    return allowed


def test_filter_allows_no_call_that_the_agent_never_makes() -> None:
    dangerous = {"add_key", "bpf", "io_uring_setup", "mknodat", "mount", "ptrace", "setns", "setuid", "shmat"}
    dangerous |= {"chown", "process_vm_readv", "sched_setscheduler", "syslog", "unshare", "userfaultfd"}
    assert not dangerous & allowed_system_calls()


def test_filter_allows_every_call_of_an_agent_at_work(short_tmp: Path) -> None:
    """The agent has GPUs in a process of their own, clients, declarations, a history, and lost sockets.

    The agent has no capability, as in the unit.
    """
    allowed = allowed_system_calls()
    trace = short_tmp / "trace"
    without_capabilities = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    tracer = [*without_capabilities, "strace", "-f", "-qq", "-e", "signal=none", "-o", str(trace)]
    if None in map(shutil.which, ("setpriv", "strace")):
        pytest.skip("setpriv or strace is not installed")
    if subprocess.run([*tracer, "true"], check=False).returncode != 0:
        pytest.skip("strace may not trace, or setpriv may not drop capabilities")
    flags = ["--nvml-library", str(fake_nvml.library()), "--node-name", "traced"]
    with Agent(short_tmp, *flags, wrapper=tracer, expect="gpu-0 ") as agent:
        run = short_tmp / "run"
        for verb in (["status"], ["watch", "--once"], ["history"]):
            command = [sys.executable, "-m", "agent", *verb, "--runtime-dir", str(run)]
            subprocess.run(command, capture_output=True, check=False, cwd=REPOSITORY)
        (run / "devices.d" / f"{agents.DRIVER}.toml").write_text("version = 1\n")
        (run / "agent.sock").unlink()
        agent.wait_for_log("was removed by another process; created again")
        os.kill(int((run / "agent.lock").read_text()), signal.SIGTERM)
        assert agent.process.wait(PATIENCE_S) == 0
    called = set(re.findall(r"^[0-9]+ +([a-z_0-9]+)\(", trace.read_text(), re.MULTILINE))
    assert {"memfd_create", "capget", "accept4", "inotify_add_watch", "fsync"} <= called
    # SQLite gives a journal of root to the owner of its file, here root too, and goes on if that is refused
    assert called - {"fchown"} <= allowed


def test_unit_uses_the_allocator_that_gives_memory_back() -> None:
    assert setting("Environment") == "PYTHONMALLOC=malloc"


def test_sandbox_allows_unix_and_netlink_sockets_only() -> None:
    assert setting("RestrictAddressFamilies").split() == ["AF_UNIX", "AF_NETLINK"]


def test_sigterm_handler_is_installed_before_ready(tmp_path: Path) -> None:
    """systemd may stop a unit as soon as it is up; death by SIGTERM would be a failure and leave sockets.

    The window is too short to hit on purpose, so the order of the system calls is checked.
    """
    tracer = ["strace", "-f", "-qq", "-e", "trace=sendto,rt_sigaction", "-o", str(tmp_path / "trace")]
    if shutil.which("strace") is None or subprocess.run([*tracer, "true"], check=False).returncode != 0:
        pytest.skip("strace is not installed or may not trace")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(PATIENCE_S)
        agent = [sys.executable, "-m", "agent", "run", "--runtime-dir", str(tmp_path / "run")]
        environ = os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        with subprocess.Popen(
            [*tracer, *agent], cwd=REPOSITORY, env=environ, start_new_session=True
        ) as traced:
            try:
                while b"READY=1" not in manager.recv(4096):
                    pass
                (child,) = Path(f"/proc/{traced.pid}/task/{traced.pid}/children").read_text().split()
                os.kill(int(child), signal.SIGTERM)
                assert traced.wait(PATIENCE_S) == 0
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(traced.pid, signal.SIGKILL)
                raise
    trace = (tmp_path / "trace").read_text()
    handler = re.search(r"rt_sigaction\(SIGTERM, \{sa_handler=0x", trace)
    assert handler is not None
    assert handler.start() < trace.index('"READY=1')


# --- the running unit ---------------------------------------------------------------------------------------

# Run by the container's systemd in this order. Each waits for its condition; the boot as a whole has a time
# limit. `changed` waits until a property of the unit has another value.
PROBE = r"""#!/bin/bash
cd /results
PATH=/opt/drahealth/bin:$PATH
show() { systemctl show drahealth -p "$1" --value; }
facts() {
    systemctl show drahealth -p ActiveState -p SubState -p Result -p StatusText -p NRestarts -p WatchdogUSec \
        -p ExecMainCode -p ExecMainStatus -p MainPID -p MemoryMax -p TasksMax -p LimitNOFILE >"$1"
}
changed() { while [ "$(show "$1")" = "$2" ]; do sleep 0.05; done; }

changed StatusText "first pass over the node has not finished"
facts 1-started
cat "/proc/$(show MainPID)/status" >1-process
cd /run/drahealth
stat -c '%a %U %n' "$PWD" "$PWD"/drivers agent.sock drivers/*.sock >/results/1-sockets
cd /results
/opt/drahealth/bin/drahealth status -o json >1-status 2>1-status-err
echo $? >1-status-rc
until /opt/drahealth/bin/drahealth watch --once | grep -q 'gpu-0 *Healthy'; do sleep 0.05; done
until grep -qs '"vbios"' 1-report; do /opt/drahealth/bin/drahealth watch --once -o json >1-report; done
until [ -e /var/lib/drahealth/gpu-faults.json ]; do sleep 0.05; done
show DeviceAllow >1-devices
find /var/lib/drahealth -printf '%M %U %P\n' >1-state

# A reload: the command only sends the signal, as with Type=notify.
show MainPID >1-pid
mkdir -p /etc/drahealth/config.d
printf '[throttle]\nevents = 5\n' >/etc/drahealth/config.d/10-test.toml
systemctl reload drahealth
until /opt/drahealth/bin/drahealth status | grep -q 'throttle.events: 10 to 5'; do sleep 0.05; done
changed ActiveState reloading
facts 1-reloaded
rm -r /etc/drahealth/config.d

# A frozen agent: systemd must miss its watchdog, end it and start another.
mkdir -p /etc/systemd/system/drahealth.service.d
printf '[Service]\nWatchdogSec=10\nRestartSec=0\nTimeoutStopSec=60\n' \
    >/etc/systemd/system/drahealth.service.d/soon.conf
systemctl daemon-reload
systemctl restart drahealth
kill -STOP "$(show MainPID)"
changed NRestarts 0
systemctl start drahealth
facts 2-restarted

echo 'version = 1' >/run/drahealth/devices.d/a.example.com.toml
systemctl stop drahealth
facts 3-stopped
find /run/drahealth -type s -o -name '*.toml' >3-left

# A locked runtime directory is retried until it is free.
printf '[Service]\nRestartSec=0\n' >/etc/systemd/system/drahealth.service.d/soon.conf
systemctl daemon-reload
mkdir -p /run/drahealth
exec 9>/run/drahealth/agent.lock
flock 9
systemctl start --no-block drahealth
until [ "$(show NRestarts)" -ge 7 ]; do sleep 0.05; done  # more than systemd's own limit of 5 in 10 s
exec 9>&-
until [ "$(show ActiveState)" = active ]; do sleep 0.05; done
facts 4-free
systemctl stop drahealth

# Bad configuration is not retried.
printf '[Service]\nEnvironment=DRAHEALTH_PERIOD=1ms\n' >/etc/systemd/system/drahealth.service.d/soon.conf
systemctl daemon-reload
systemctl start drahealth
facts 5-misconfigured

# A check by a command, without and with the drop-in that allows it another user and a cgroup.
rm /etc/systemd/system/drahealth.service.d/soon.conf
mkdir -p /etc/drahealth/config.d
printf '[[check]]\nname = "rights"\nperiod = "1s"\ncommand = ["/bin/sh", "-c", "%s"]\n' \
    'id -u; grep ^0:: /proc/self/cgroup; sleep 999 & exit 1' >/etc/drahealth/config.d/20-check.toml
checked() {
    until drahealth watch --once -o json >"$1"; grep -q "$2" "$1"; do sleep 0.1; done
}
systemctl daemon-reload
systemctl start drahealth
checked 7-refused 'may not run it as user'
systemctl stop drahealth
cp /opt/test/custom-checks.conf /etc/systemd/system/drahealth.service.d/
systemctl daemon-reload
systemctl start drahealth
checked 7-checked '"custom.rights"'
cat "/sys/fs/cgroup$(show ControlGroup)/cgroup.subtree_control" >7-controllers 2>/dev/null
systemctl stop drahealth
facts 7-stopped
rm /etc/systemd/system/drahealth.service.d/custom-checks.conf /etc/drahealth/config.d/20-check.toml

if [ -e /opt/test/can-hang ]; then
# A thread that SIGKILL does not end, as in a GPU driver that hangs.
hung() { cat /proc/"$1"/task/*/wchan | grep -q request_wait_answer; }
printf '[Service]\nEnvironment=DRAHEALTH_KMSG=/opt/hung\nTimeoutStopSec=1\n' \
    >/etc/systemd/system/drahealth.service.d/soon.conf
systemctl daemon-reload
systemctl start drahealth
pid="$(show MainPID)"
until hung "$pid"; do sleep 0.05; done
systemctl stop drahealth
facts 6-stuck
printf '[Service]\nTimeoutStopSec=1\n' >/etc/systemd/system/drahealth.service.d/soon.conf
systemctl daemon-reload
systemctl start drahealth
facts 6-second
cat "/proc/$pid/status" >6-remains
systemctl stop drahealth
touch released
while [ -e "/proc/$pid" ]; do sleep 0.05; done
fi

journalctl --no-pager -o short-monotonic -u drahealth >journal 2>&1
touch finished
systemctl poweroff
"""
PROBE_UNIT = """
[Unit]
After=drahealth.service
[Service]
Type=oneshot
ExecStart=/opt/test/probe
StandardOutput=journal+console
"""
COMMAND = """#!/bin/sh
export LD_LIBRARY_PATH=/opt/python/lib PYTHONPATH=/opt/repository:/opt/packages PYTHONDONTWRITEBYTECODE=1
exec {python} -m agent "$@"
"""


def why_no_container() -> str | None:
    if os.geteuid() != 0:
        return "a container with systemd needs root"
    if shutil.which("systemd-nspawn") is None:
        return "systemd-nspawn is not installed"
    if not Path("/usr/lib/systemd/systemd").exists():
        return "systemd is not installed"
    return None


def has_kmsg() -> bool:
    """Return whether the machine has a kernel log for the container; systemd-nspawn makes none."""
    return not why_no_kernel_log(os.O_RDONLY)


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def left_behind() -> set[Path]:
    """Return the two groups that systemd-nspawn --keep-unit makes next to its process, and their children."""
    hybrid = ["/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified"]
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    groups = [
        Path(path) for root in (["/sys/fs/cgroup"] if unified else hybrid) for path, _, _ in os.walk(root)
    ]
    return {group for group in groups if not {"payload", "supervisor"}.isdisjoint(group.parts)}


def is_removed(group: Path) -> bool:
    """Remove a group; return False while it has processes, if only such that are ending."""
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the probe's records, after the container has ended."""
    if reason := why_no_container():
        pytest.skip(reason)
    base = tmp_path_factory.mktemp("nspawn")
    units, results, packages = base / "units", base / "results", sysconfig.get_path("purelib")
    for directory in (units / "multi-user.target.wants", results, base / "opt"):
        directory.mkdir(parents=True)
    shutil.copy(UNIT, units)
    (units / "probe.service").write_text(PROBE_UNIT)
    if not has_kmsg():
        (units / f"{UNIT.name}.d").mkdir()
        (units / f"{UNIT.name}.d" / "no-kernel-log.conf").write_text("[Service]\nStandardInput=null\n")
    for name in (UNIT.name, "probe.service"):
        (units / "multi-user.target.wants" / name).symlink_to(f"../{name}")
    # ProtectHome= hides a Python that lives in a home directory, so it is bound elsewhere.
    shared = sys.base_prefix in ("/usr", "/usr/local")
    python = os.path.realpath(sys.executable)
    inside = python if shared else python.replace(sys.base_prefix, "/opt/python", 1)
    write_program(base / "bin" / "drahealth", COMMAND.format(python=inside))
    write_program(base / "opt" / "probe", PROBE)
    shutil.copy(CHECKS_DROP_IN, base / "opt")
    environment = base / "drahealth.default"
    environment.write_text(f'DRAHEALTH_RUN_ARGS="--driver {DRIVER} --node-name probed {GPUS}"\n')

    hanging = base / "hung"
    hanging.touch()

    before = left_behind()
    command = [
        "systemd-nspawn", "--directory=/", "--volatile=yes", "--boot", "--register=no", "--keep-unit",
        "--private-network", "--capability=CAP_SYSLOG", "--console=pipe",
        f"--machine=drahealth-test-{os.getpid()}",
        f"--bind-ro={units}:/run/systemd/system", f"--bind-ro={base}/bin:{Path(COMMAND_PATH).parent}",
        f"--bind-ro={base}/opt:/opt/test", f"--bind={results}:/results",
        f"--bind-ro={environment}:/etc/default/drahealth", f"--bind={hanging}:/opt/hung",
        f"--bind-ro={fake_nvml.library().parent}:/opt/nvml", *(["--bind=/dev/kmsg"] if has_kmsg() else []),
        f"--bind-ro={REPOSITORY}:/opt/repository", f"--bind-ro={packages}:/opt/packages",
        *([] if shared else [f"--bind-ro={sys.base_prefix}:/opt/python"]),
    ]  # fmt: skip
    with ExitStack() as stack:
        with suppress(OSError):  # the probe then skips that step
            stack.enter_context(hung_file(hanging, (results / "released").exists))
            (base / "opt" / "can-hang").touch()
        container = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            console, _ = container.communicate(timeout=8 * PATIENCE_S)  # a boot, and two dozen starts
        except subprocess.TimeoutExpired:
            container.terminate()  # systemd-nspawn powers the container off
            console, _ = container.communicate(timeout=PATIENCE_S)
        finally:
            for group in sorted(left_behind() - before, reverse=True):  # children first
                with suppress(AssertionError):  # it belongs to another container that runs now
                    eventually(partial(is_removed, group), f"{group} is removed", 5.0)
    failed = re.search(r"^Failed to .*", console, re.MULTILINE)  # a message of systemd-nspawn, not of systemd
    if failed and not any(results.iterdir()):
        pytest.skip(f"systemd-nspawn cannot boot here: {failed[0]}")
    journal = results / "journal"
    assert (results / "finished").exists(), console + (journal.read_text() if journal.exists() else "")
    return results


def facts(results: Path, step: str) -> dict[str, str]:
    lines = (results / step).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def fields(text: str) -> dict[str, str]:
    """Return the fields of /proc/PID/status by name."""
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def test_service_is_active_with_its_limits(results: Path) -> None:
    started = facts(results, "1-started")
    assert (started["ActiveState"], started["SubState"], started["NRestarts"]) == ("active", "running", "0")
    assert started["WatchdogUSec"] == "30s"
    assert (started["MemoryMax"], started["TasksMax"]) == (str(384 << 20), "64")
    assert started["LimitNOFILE"] == "4096"


def test_systemctl_status_shows_device_summary(results: Path) -> None:
    assert re.match(r"\d+ devices?: ", facts(results, "1-started")["StatusText"])


def test_sockets_exist_when_the_service_is_up(results: Path) -> None:
    assert (results / "1-sockets").read_text().splitlines() == [
        "750 root /run/drahealth",
        "750 root /run/drahealth/drivers",
        "660 root agent.sock",
        f"660 root drivers/{DRIVER}.sock",
    ]


def test_reload_applies_a_drop_in_without_a_restart(results: Path) -> None:
    reloaded = facts(results, "1-reloaded")
    assert (reloaded["ActiveState"], reloaded["SubState"], reloaded["NRestarts"]) == (
        "active",
        "running",
        "0",
    )
    assert reloaded["MainPID"] == (results / "1-pid").read_text().strip()


def test_agent_answers_in_the_sandbox(results: Path) -> None:
    # 0 to 3: the health of this machine's devices does not matter
    assert int((results / "1-status-rc").read_text()) <= 3, (results / "1-status-err").read_text()
    assert json.loads((results / "1-status").read_text())["node"] == "probed"


def test_process_has_no_capability(results: Path) -> None:
    process = fields((results / "1-process").read_text())
    assert {int(process[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapInh", "CapAmb")} == {0}
    assert process["NoNewPrivs"] == "1"
    assert process["Seccomp"] == "2"


def sources(results: Path) -> dict[str, str]:
    report = json.loads((results / "1-report").read_text())
    return {source["name"]: source["state"] for source in report["sources"]}


def test_gpus_are_read_in_the_sandbox(results: Path) -> None:
    """The C core and pynvml read the GPU: only pynvml's inventory has the VBIOS."""
    report = json.loads((results / "1-report").read_text())
    (gpu,) = (device for device in report["devices"] if device["kind"] == "gpu")
    assert gpu["health"] == "Healthy"
    assert gpu["attributes"]["product"] == "NVIDIA H100 80GB HBM3"
    assert gpu["attributes"]["vbios"]
    assert {sources(results)[name] for name in ("nvml", "gpu-0")} == {"ok"}


def test_kernel_log_is_read_in_the_sandbox(results: Path) -> None:
    if not has_kmsg():
        pytest.skip("this machine has no /dev/kmsg to read")
    assert sources(results)["kmsg"] == "ok"


def test_device_events_are_received_in_the_sandbox(results: Path) -> None:
    assert sources(results)["uevents"] == "ok"


def test_only_gpus_and_kernel_log_devices_are_allowed(results: Path) -> None:
    allowed = (results / "1-devices").read_text().split("\n")
    assert {"char-195 rw", "char-nvidia-caps r", "/dev/kmsg r"} <= set(allowed)
    assert setting("DevicePolicy") == "closed"


def test_state_is_readable_by_root_only(results: Path) -> None:
    lines = (results / "1-state").read_text().splitlines()
    state = {line for line in lines if not line.endswith(".new")}  # a file that is being written
    files = {f"-rw------- 0 {name}" for name in ("agent.lock", "gpu-faults.json")}
    history = {f"-rw------- 0 history.sqlite{end}" for end in ("", "-journal", ".observed")}
    assert state - history == {"drwx------ 0 ", *files}


def test_frozen_agent_is_restarted_by_the_watchdog(results: Path) -> None:
    restarted = facts(results, "2-restarted")
    assert restarted["ActiveState"] == "active"
    assert int(restarted["NRestarts"]) >= 1
    assert "Watchdog timeout" in (results / "journal").read_text()


def test_service_stops_cleanly_and_keeps_declarations(results: Path) -> None:
    stopped = facts(results, "3-stopped")
    assert (stopped["ActiveState"], stopped["Result"]) == ("inactive", "success")
    assert (stopped["ExecMainCode"], stopped["ExecMainStatus"]) == ("1", "0")  # CLD_EXITED
    assert (results / "3-left").read_text() == "/run/drahealth/devices.d/a.example.com.toml\n"


def test_locked_runtime_directory_is_retried_until_free(results: Path) -> None:
    free = facts(results, "4-free")
    assert free["ActiveState"] == "active"
    assert int(free["NRestarts"]) >= 7
    assert "status=75/TEMPFAIL" in (results / "journal").read_text()


def test_bad_configuration_is_not_retried(results: Path) -> None:
    failed = facts(results, "5-misconfigured")
    assert (failed["ActiveState"], failed["Result"], failed["NRestarts"]) == ("failed", "exit-code", "0")
    assert failed["ExecMainStatus"] == "78"


def test_unkillable_thread_does_not_prevent_stop_and_new_start(results: Path) -> None:
    if not (results / "6-stuck").exists():
        pytest.skip("a file that hangs needs FUSE, and the right to mount it")
    stuck, second = facts(results, "6-stuck"), facts(results, "6-second")
    assert (stuck["ActiveState"], stuck["Result"]) == ("failed", "timeout")
    assert "still around after final SIGKILL" in (results / "journal").read_text()
    assert (second["ActiveState"], second["SubState"]) == ("active", "running")
    assert fields((results / "6-remains").read_text())["State"] == "Z (zombie)"


def custom_check(results: Path, step: str) -> tuple[str, str]:
    """Return the code and the evidence of the note of the custom check."""
    notes = json.loads((results / step).read_text())["notes"]
    return next((note["code"], note["evidence"]) for note in notes if note["code"].startswith("custom."))


def test_unit_alone_runs_no_command_as_another_user(results: Path) -> None:
    code, evidence = custom_check(results, "7-refused")
    assert code == "custom.rights.unknown"
    assert "Operation not permitted; the agent may not run it as user 65534" in evidence


def test_drop_in_runs_commands_as_another_user_in_a_cgroup(results: Path) -> None:
    code, evidence = custom_check(results, "7-checked")
    uid, cgroup = evidence.split()
    assert (code, uid) == ("custom.rights", "65534")
    assert re.fullmatch(r"0::/.*drahealth\.service/check-rights-\d+", cgroup)
    assert facts(results, "7-stopped")["Result"] == "success"
    if (results / "7-controllers").read_text():  # cgroup v1 has them otherwise
        assert (results / "7-controllers").read_text().split() == ["memory", "pids"]


def test_drop_in_for_checks_is_valid_for_systemd(installed_unit: Path) -> None:
    (installed_unit.parent / f"{installed_unit.name}.d").mkdir()
    shutil.copy(CHECKS_DROP_IN, installed_unit.parent / f"{installed_unit.name}.d")
    assert "custom-checks.conf" not in analyze("verify", "--man=no", installed_unit)
