"""A node with its control plane: etcd, API server, controllers, scheduler, containerd, kubelet.

All run in a mount and a network namespace of their own, with their files in one directory, and in cgroups of
their own. The paths are those of any node (``/var/lib/kubelet``, ``/run``), so agent, drivers and pods run
unchanged. The end of the context kills everything in the cgroups and removes them; the namespaces, with their
mounts and addresses, end with their last process.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pytest
import yaml
from driver_scenarios.program import Program
from machine import CGROUPFS, hugetlb_for_v1, kubepods_tree, unified_root
from patience import PATIENCE_S
from wire.serving import eventually

from agent.config.api_access import ApiAccess
from agent.errors import ApiError
from agent.serve.kube_api.api_server import ApiServer

START_S: Final = 10 * PATIENCE_S
"""Limit of the control plane's start: minutes on a small machine."""
WAIT_S: Final = 3 * PATIENCE_S
"""Limit of a wait for an object: taints are removed a minute after their cause."""
NODE: Final = "node-1"
GO_DRIVER: Final = "godev.drahealth.example.com"
SERVICE_IP: Final = "10.96.0.1"
"""Address of the API server for pods, the first of the services."""
NODE_IP: Final = "10.100.0.1"
POD_NET: Final = "10.200.0.0/24"
ADMIN_TOKEN: Final = "admin-token"
KUBELET_TOKEN: Final = "kubelet-token"
ROOT: Final = Path(__file__).parents[2]

# Values that the kubelet wants; it would write them for the whole machine.
TUNABLES: Final = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}

# Directories of the node, in its own directory, and where its namespace has them.
MOUNTS: Final = {
    "run": "/run",
    "kubelet": "/var/lib/kubelet",
    "log": "/var/log",
    "drahealth": "/var/lib/drahealth",
}

# Mounts the hierarchy of hugetlb. The kernel refuses while removed groups of cgroup v2 have the controller.
MOUNT_HUGETLB: Final = "timeout 20 sh -c 'until mount -t cgroup -o hugetlb cgroup $0; do sleep 0.1; done'"

# Removes the node's groups of that hierarchy, whose processes are gone. The hierarchy ends with a mount that
# ends when it has no groups; the kernel needs a moment for their removal.
REMOVE_HUGETLB: Final = """
mkdir -p "$1"
{mount_hugetlb} "$1" || exit 0
[ ! -e "$1$2" ] || timeout 20 sh -c 'until find "$0" -depth -type d -delete; do sleep 0.1; done' "$1$2"
umount "$1"
"""

REMOVALS: Final = 30

# The cgroup v1 hierarchies, with that of hugetlb where cgroup v2 can spare it, replace those of the machine.
NAMESPACE: Final = """
set -eu
cd "$1"
shift
ip link set lo up
ip address add {service}/32 dev lo
ip address add {node}/32 dev lo
{mounts}
{tunables}
if [ ! -e /sys/fs/cgroup/cgroup.controllers ]; then
    mount -t tmpfs tmpfs cgroups
    for one in /sys/fs/cgroup/*; do
        if [ -L "$one" ]; then cp -P "$one" cgroups; continue; fi
        mountpoint -q "$one" || continue
        mkdir "cgroups/${{one##*/}}"
        mount --bind "$one" "cgroups/${{one##*/}}"
    done
    if [ ! -e cgroups/hugetlb ]; then
        mkdir cgroups/hugetlb
        {mount_hugetlb} cgroups/hugetlb || rmdir cgroups/hugetlb
    fi
    mount --move cgroups /sys/fs/cgroup
    [ ! -e /sys/fs/cgroup/hugetlb ] || mkdir "/sys/fs/cgroup/hugetlb$1"
fi
echo 1 >/proc/sys/net/ipv4/ip_forward
echo ready
exec sleep infinity
"""

KUBECONFIG: Final = """
apiVersion: v1
kind: Config
clusters: [{{name: node, cluster: {{server: "https://{ip}:443", certificate-authority: {ca}}}}}]
users: [{{name: me, user: {{token: {token}}}}}]
contexts: [{{name: me, context: {{cluster: node, user: me}}}}]
current-context: me
"""

CONTAINERD: Final = """
version = 3
root = "{directory}/containerd"
state = "/run/containerd"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "{snapshotter}"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "node.local/pause:1"
[plugins.'io.containerd.cri.v1.runtime']
  disable_apparmor = true
  restrict_oom_score_adj = {restrict}
  disable_hugetlb_controller = {without_hugetlb}
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = "{binaries}/runc"
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{binaries}"]
    conf_dir = "{directory}/cni"
    use_internal_loopback = true
"""

CNI: Final = {
    "cniVersion": "1.0.0",
    "name": "node",
    "plugins": [
        {
            "type": "ptp",
            "ipam": {
                "type": "host-local",
                "dataDir": "/run/cni-addresses",
                "ranges": [[{"subnet": POD_NET}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
    ],
}


class UnixApi(ApiServer):
    """Client of the API server through ``kubectl proxy``, whose socket is reachable from other namespaces."""

    def __init__(self, path: Path) -> None:
        super().__init__(ApiAccess("http://localhost"))
        self.path = path

    def _connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("localhost", timeout=PATIENCE_S)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(PATIENCE_S)
        try:
            connection.sock.connect(str(self.path))
        except OSError:
            connection.close()
            raise
        return connection

    def watch(self, path: str) -> Iterator[dict[str, Any]]:
        """Yield an object and every later version of it, as soon as the API server sends it."""
        parent, _, name = path.rpartition("/")
        connection = self._connect()
        try:
            connection.request("GET", f"{parent}?watch=1&fieldSelector=metadata.name%3D{name}")
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            while line := answer.readline():
                yield json.loads(line)["object"]
        finally:
            connection.close()

    def wait(self, path: str, condition: Callable[[dict[str, Any]], bool], event: str) -> dict[str, Any]:
        """Return an object as soon as a condition holds for it; fails with its last version."""
        deadline = time.monotonic() + WAIT_S
        last: dict[str, Any] = {}
        while time.monotonic() < deadline:
            with suppress(TimeoutError):  # no new version for a while
                for last in self.watch(path):
                    if condition(last):
                        return last
                    if time.monotonic() > deadline:
                        break
        raise AssertionError(f"{path}: not {event}: {json.dumps(last.get('status', last), indent=1)}")

    def get(self, path: str) -> dict[str, Any] | None:
        """Return an object, None if it does not exist."""
        try:
            return self.call("GET", path)
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    def delete(self, path: str, *, grace_s: int | None = None) -> None:
        """Delete an object, and wait until it is gone."""
        found = self.get(path)
        if found is None:
            return
        uid = found["metadata"]["uid"]
        self.call("DELETE", path, {} if grace_s is None else {"gracePeriodSeconds": grace_s})
        eventually(
            lambda: (now := self.get(path)) is None or now["metadata"]["uid"] != uid,
            f"{path} deleted",
            WAIT_S,
        )


class RealNode:
    """A running node. Skips the test where the machine does not allow one."""

    def __init__(self, directory: Path, binaries: Path) -> None:
        self.directory = directory
        self.binaries = binaries
        self.programs: dict[str, subprocess.Popen[bytes]] = {}
        self.api = UnixApi(directory / "api.sock")
        self.times: dict[str, float] = {}
        """Durations of the start [s]."""
        self._stack = ExitStack()

    # --- context ------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if os.geteuid():
            pytest.skip("a node needs root")
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self) -> None:
        began = time.monotonic()
        v2 = unified_root()
        if v2 is None:
            pytest.skip("no cgroup v2 here, alone or with v1")
        v1 = [] if v2 == CGROUPFS else [
            path.name for path in CGROUPFS.iterdir() if not path.is_symlink() and (path / "tasks").exists()
        ]  # fmt: skip
        if self._mounts_hugetlb:
            self._stack.enter_context(hugetlb_for_v1(v2))
        tree = self._stack.enter_context(kubepods_tree(*v1))
        self.cgroup_root = tree.cgroup_root
        top = v2 / tree.cgroup_root.strip("/")
        self._programs_group = top / "programs"
        self._programs_group.mkdir()
        for hierarchy in tree.roots[1:]:
            _copy_cpuset(hierarchy, hierarchy / tree.cgroup_root.strip("/"))
        if self._mounts_hugetlb:
            self._stack.callback(self._remove_hugetlb)
        self._stack.callback(self._kill_all, top)
        self._make_files()
        self._enter_namespaces()
        self._start_control_plane()
        self.times["API server"] = time.monotonic() - began
        self.start_containerd()
        self._import_images()
        self.start_kubelet()
        self.api.wait(f"/api/v1/nodes/{NODE}", is_ready, "Ready")
        self.times["node Ready"] = time.monotonic() - began

    def _kill_all(self, top: Path) -> None:
        """Kill all processes of the node, with those of its containers, and wait for their end."""
        (top / "cgroup.kill").write_text("1")
        for program in self.programs.values():
            program.wait(PATIENCE_S)
        events = top / "cgroup.events"
        eventually(lambda: "populated 0" in events.read_text(), "no process left in the cgroups")

    # --- namespaces and processes -------------------------------------------------------------------------

    def _enter_namespaces(self) -> None:
        mounts = [f"mkdir -p {inside}; mount --bind {name} {inside}" for name, inside in MOUNTS.items()]
        tunables = [f"mount --bind tunables/{Path(name).name} /proc/sys/{name}" for name in TUNABLES]
        script = NAMESPACE.format(
            service=SERVICE_IP, node=NODE_IP, mounts="\n".join(mounts), tunables="\n".join(tunables),
            mount_hugetlb=MOUNT_HUGETLB,
        )  # fmt: skip
        holder = self._popen(
            "namespaces",
            ["unshare", "-m", "-n", "sh", "-c", script, "sh", str(self.directory), self.cgroup_root],
        )
        log = self.directory / "logs" / "namespaces"

        def is_up() -> bool:
            if holder.poll() is not None:
                pytest.skip(f"no namespaces of a node here: {log.read_text().strip()}")
            return log.read_text().endswith("ready\n")

        eventually(is_up, "namespaces")

    @property
    def within(self) -> list[str]:
        """Command that executes its arguments in the namespaces and cgroups, until this process ends."""
        holder = self.programs["namespaces"].pid
        enter = ["nsenter", f"--target={holder}", "-m", "-n", f"--wd={ROOT}", "--"]
        return [*self._join_group_command, *enter]

    @property
    def _join_group_command(self) -> list[str]:
        procs = self._programs_group / "cgroup.procs"
        return ["setpriv", "--pdeathsig=KILL", "sh", "-c", f'echo $$ >{procs}; exec "$@"', "sh"]

    def _popen(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.directory / "logs" / name).open("ab") as log:
            program = subprocess.Popen(
                [*self._join_group_command, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.programs[name] = program
        return program

    def spawn(self, name: str, *command: str) -> None:
        """Start a program in the node's namespaces; its output is added to a log of its name."""
        self._popen(name, [*self.within[len(self._join_group_command) :], *command])

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """End a program."""
        program = self.programs.pop(name)
        program.send_signal(number)
        program.wait(PATIENCE_S)

    def run(self, *command: str, text: str | None = None, codes: tuple[int, ...] = (0,)) -> str:
        """Return what a command prints in the namespaces; fails for other exit codes than ``codes``."""
        done = subprocess.run(
            [*self.within, *command], input=text, capture_output=True, text=True, check=False
        )
        assert done.returncode in codes, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def kubectl(self, *arguments: str, text: str | None = None) -> str:
        """Return the output of kubectl as administrator."""
        config = str(self.directory / "admin.conf")
        return self.run(self._kubernetes, "kubectl", "--kubeconfig", config, *arguments, text=text)

    def drahealth(self, *arguments: str, codes: tuple[int, ...] = (0,)) -> Any:
        """Return the JSON that the command line prints on the node."""
        root = f"DRAHEALTH_KUBELET_CGROUP_ROOT={self.cgroup_root}"
        command = ("env", root, sys.executable, "-m", "agent", *arguments, "-o", "json")
        return json.loads(self.run(*command, codes=codes))

    def log(self, name: str) -> str:
        """Return the output of a program."""
        return (self.directory / "logs" / name).read_text(errors="replace")

    def program(self, module: str, *flags: str) -> Program:
        """Start a Python module in the node's namespaces; the caller ends it."""
        return Program(module, *flags, log_file=self.directory / "logs" / module, within=self.within)

    # --- files ----------------------------------------------------------------------------------------------

    def _make_files(self) -> None:
        d = self.directory
        for name in (
            *MOUNTS,
            "bin",
            "logs",
            "tunables",
            "cgroups",
            "pki",
            "cni",
            "etcd",
            "containerd",
            "manifests",
        ):
            (d / name).mkdir()
        (d / "bin" / "kubelet").symlink_to(self._kubernetes)  # the audit finds its process by this name
        for name, value in TUNABLES.items():
            (d / "tunables" / Path(name).name).write_text(f"{value}\n")
        (d / "cni" / "node.conflist").write_text(json.dumps(CNI))
        (d / "tokens.csv").write_text(
            f'{ADMIN_TOKEN},admin,admin,"system:masters"\n'
            f'{KUBELET_TOKEN},system:node:{NODE},kubelet,"system:nodes"\n'
        )
        ca = d / "pki" / "apiserver.crt"
        for user, token in (("admin", ADMIN_TOKEN), ("kubelet", KUBELET_TOKEN)):
            (d / f"{user}.conf").write_text(KUBECONFIG.format(ip=SERVICE_IP, ca=ca, token=token))
        subprocess.run(
            ["openssl", "genrsa", "-out", str(d / "pki" / "sa.key"), "2048"], check=True, capture_output=True
        )
        (d / "kubelet.yaml").write_text(yaml.safe_dump(self._kubelet_config()))

    def _kubelet_config(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self.cgroup_root,
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "failCgroupV1": False,
            "failSwapOn": False,
            "resolvConf": "",
            "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "nodeStatusUpdateFrequency": "5s",
        }

    # --- programs -------------------------------------------------------------------------------------------

    @property
    def _kubernetes(self) -> str:
        return str(self.binaries / "kubernetes")

    def _start_control_plane(self) -> None:
        d = self.directory
        admin = str(d / "admin.conf")
        self.spawn("etcd", self._kubernetes, "etcd", "--data-dir", str(d / "etcd"), "--unsafe-no-fsync")
        self.spawn(
            "kube-apiserver", self._kubernetes, "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379", "--secure-port=443", "--bind-address=0.0.0.0",
            f"--advertise-address={NODE_IP}", "--service-cluster-ip-range=10.96.0.0/24",
            f"--cert-dir={d}/pki", f"--token-auth-file={d}/tokens.csv", "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={d}/pki/sa.key",
            f"--service-account-signing-key-file={d}/pki/sa.key",
        )  # fmt: skip
        self._wait_for("kube-apiserver", lambda: (d / "pki" / "apiserver.crt").exists(), "its certificate")
        proxy = ("kubectl", "--kubeconfig", admin, "proxy", f"--unix-socket={self.api.path}")
        self.spawn("proxy", self._kubernetes, *proxy)
        self._wait_for("kube-apiserver", self._is_serving, "ready")
        self.spawn(
            "kube-controller-manager", self._kubernetes, "kube-controller-manager",
            f"--kubeconfig={admin}", "--leader-elect=false", "--bind-address=127.0.0.1",
            f"--service-account-private-key-file={d}/pki/sa.key", f"--root-ca-file={d}/pki/apiserver.crt",
        )  # fmt: skip
        scheduler = (f"--kubeconfig={admin}", "--leader-elect=false", "--bind-address=127.0.0.1")
        self.spawn("kube-scheduler", self._kubernetes, "kube-scheduler", *scheduler)

    def _is_serving(self) -> bool:
        try:
            connection = self.api._connect()
            try:
                connection.request("GET", "/readyz")
                return connection.getresponse().status == 200
            finally:
                connection.close()
        except OSError:
            return False

    def start_containerd(self, *, hugetlb: bool = False) -> None:
        """Start containerd. Its default is to set no hugetlb limits of containers."""
        config = self.directory / "containerd.toml"
        config.write_text(
            CONTAINERD.format(
                directory=self.directory, binaries=self.binaries, snapshotter="overlayfs",
                restrict=json.dumps(not may_lower_oom_score()), without_hugetlb=json.dumps(not hugetlb),
            )
        )  # fmt: skip
        path = f"PATH={self.binaries}:{os.environ['PATH']}"
        self.spawn("containerd", "env", path, str(self.binaries / "containerd"), "--config", str(config))
        self._wait_for("containerd", self._containerd_answers, "an answer")

    def _containerd_answers(self) -> bool:
        return (
            subprocess.run([*self.within, *self._ctr, "version"], capture_output=True, check=False).returncode
            == 0
        )

    @property
    def _ctr(self) -> tuple[str, ...]:
        return (str(self.binaries / "ctr"), "-n", "k8s.io")

    def _import_images(self) -> None:
        for image in ("pause", "host"):
            file = str(self.binaries / f"{image}.tar")
            self.run(*self._ctr, "images", "import", file)

    def start_kubelet(self) -> None:
        """Start the kubelet."""
        d = self.directory
        self.spawn(
            "kubelet", "env", f"PATH={self.binaries}:{os.environ['PATH']}", f"{d}/bin/kubelet", "kubelet",
            f"--config={d}/kubelet.yaml", f"--kubeconfig={d}/kubelet.conf",
            f"--hostname-override={NODE}", f"--node-ip={NODE_IP}",
        )  # fmt: skip

    def start_agent(self) -> None:
        """Start the agent with the drivers of the examples, and wait for its first verdicts."""
        identity = ("--node-name", NODE, "--kubelet-cgroup-root", self.cgroup_root, "--table", "never")
        config = self.directory / "agent.toml"
        config.write_text('[pods]\naudit = "10s"\n')
        files = ("--config", str(config))
        self.spawn("agent", sys.executable, "-m", "agent", "run", "--driver", GO_DRIVER, *identity, *files)
        self._wait_for("agent", (self.directory / "run" / "drahealth" / "agent.sock").exists, "its socket")

    def has_hugetlb(self) -> bool:
        """Return whether pods can have hugetlb limits."""
        v1 = "[ -e /sys/fs/cgroup/hugetlb ]"
        v2 = "grep -qsw hugetlb /sys/fs/cgroup/cgroup.controllers"
        return self.run("sh", "-c", f"{v1} || {v2} && echo yes || true") == "yes\n"

    def _wait_for(self, name: str, condition: Callable[[], bool], event: str) -> None:
        def holds() -> bool:
            ended = self.programs[name].poll()
            assert ended is None, f"{name} ended with {ended}:\n{self.log(name)[-4000:]}"
            return condition()

        eventually(holds, f"{name}: {event}", START_S)

    @property
    def _mounts_hugetlb(self) -> bool:
        """Whether the node has a v1 hierarchy of hugetlb that the machine has not."""
        return unified_root() != CGROUPFS and not (CGROUPFS / "hugetlb").exists()

    def _remove_hugetlb(self) -> None:
        """Remove the node's cgroups of the hierarchy that it mounted, and the hierarchy.

        A container that systemd starts meanwhile mounts all hierarchies, and keeps them until it ends.
        """
        script = REMOVE_HUGETLB.format(mount_hugetlb=MOUNT_HUGETLB)
        command = [
            "unshare",
            "-m",
            "sh",
            "-euc",
            script,
            "sh",
            str(self.directory / "hugetlb"),
            self.cgroup_root,
        ]

        for _ in range(REMOVALS):
            subprocess.run(command, check=True)
            with suppress(AssertionError):
                eventually(lambda: hugetlb_hierarchy() == 0, "no hierarchy of hugetlb", 1)
                return
            if is_hugetlb_mounted():
                return
        raise AssertionError("the cgroup v1 hierarchy of hugetlb, which the node mounted, remains")


def hugetlb_hierarchy() -> int:
    """Return the number of the cgroup v1 hierarchy that has hugetlb, 0 without one."""
    rows = [line.split() for line in Path("/proc/cgroups").read_text().splitlines()]
    return next((int(row[1]) for row in rows if row[0] == "hugetlb"), 0)


def is_hugetlb_mounted() -> bool:
    """Return whether a process has a mount of the cgroup v1 hierarchy of hugetlb."""
    for mounts in Path("/proc").glob("[0-9]*/mounts"):
        with suppress(OSError):  # the process has ended
            lines = [line.split() for line in mounts.read_text().splitlines()]
            if any(kind == "cgroup" and "hugetlb" in options.split(",") for _, _, kind, options, *_ in lines):
                return True
    return False


def is_ready(node: Mapping[str, Any]) -> bool:
    """Return whether a node or pod is Ready."""
    conditions = node.get("status", {}).get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def may_lower_oom_score() -> bool:
    """Return whether this process has CAP_SYS_RESOURCE."""
    status = Path("/proc/self/status").read_text()
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> 24 & 1)


def _copy_cpuset(hierarchy: Path, group: Path) -> None:
    """Give a new v1 cpuset the CPUs and memory nodes of the hierarchy; it has none at first."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (group / name).exists():
            (group / name).write_text((hierarchy / name).read_text())
