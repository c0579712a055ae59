"""Kubernetes' own API server with etcd, alone: no kubelet, no controllers, no scheduler.

The program is that of ``make test-node``, which builds it. Both processes listen on loopback, and end with
this one.
"""

import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest
from node_real.programs import BINARIES
from patience import PATIENCE_S
from reserved_ports import reserved_port
from wire.serving import eventually

import drahealth

PROGRAM: Final = BINARIES / "kubernetes"
START_S: Final = 5 * PATIENCE_S
ADMIN_TOKEN: Final = "admin-token"
RBAC: Final = "/apis/rbac.authorization.k8s.io/v1"


class RealKubeApi:
    """API server; :attr:`admin` is a client that may do everything.

    Args:
        directory: Directory of its files.
        ports: Ports of etcd, of its peers, and of the API server.
        flags: Further flags of the API server.
    """

    def __init__(self, directory: Path, ports: Sequence[int], *flags: str) -> None:
        self.directory = directory
        self._flags = flags
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._etcd, self._peer, self._port = ports

    @property
    def access(self) -> drahealth.ApiAccess:
        """Access of an administrator."""
        return self.access_with(ADMIN_TOKEN)

    def access_with(self, token: str) -> drahealth.ApiAccess:
        """Return the access with a token."""
        ca = self.directory / "pki/apiserver.crt"
        return drahealth.ApiAccess(f"https://127.0.0.1:{self._port}", ca_file=ca, token=token)

    @property
    def admin(self) -> drahealth.ApiServer:
        """Client of an administrator."""
        return drahealth.ApiServer(self.access)

    def start(self) -> None:
        """Start etcd and the API server, and wait until it is ready."""
        d = self.directory
        (d / "tokens.csv").write_text(f'{ADMIN_TOKEN},admin,admin,"system:masters"\n')
        (d / "pki").mkdir()
        key = ["openssl", "genrsa", "-out", str(d / "pki/sa.key"), "2048"]
        subprocess.run(key, check=True, capture_output=True)
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd, self._peer))
        self._spawn(
            "etcd", "--data-dir", str(d / "etcd"), "--unsafe-no-fsync", f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
        )  # fmt: skip
        self.start_server()

    def start_server(self) -> None:
        """Start the API server, also after :meth:`stop_server`."""
        d = self.directory
        self._spawn(
            "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{self._etcd}", f"--secure-port={self._port}",
            "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1",
            "--service-cluster-ip-range=10.96.0.0/24", f"--cert-dir={d}/pki",
            f"--token-auth-file={d}/tokens.csv", "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={d}/pki/sa.key",
            f"--service-account-signing-key-file={d}/pki/sa.key", "--endpoint-reconciler-type=none",
            *self._flags,
        )  # fmt: skip
        eventually(self._is_ready, "kube-apiserver: ready", START_S)

    def stop_server(self) -> None:
        """Kill the API server; etcd keeps its data."""
        process = self._processes.pop("kube-apiserver")
        process.kill()
        process.wait(PATIENCE_S)

    def stop(self) -> None:
        """End both processes."""
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_S)

    def create(self, path: str, kind: str, name: str, **fields: Any) -> dict[str, Any]:
        """Create an object as administrator."""
        version = path.removeprefix("/apis/").removeprefix("/api/").split("/namespaces/")[0]
        group_version = version.rpartition("/")[0]
        obj = {"apiVersion": group_version, "kind": kind, "metadata": {"name": name}, **fields}
        return self.admin.call("POST", path, obj)

    def service_account(self, name: str, rules: list[Mapping[str, Any]]) -> drahealth.ApiAccess:
        """Return the access of a new service account with the rules of a role."""
        accounts = "/api/v1/namespaces/default/serviceaccounts"
        self.create(accounts, "ServiceAccount", name)
        self.create(f"{RBAC}/clusterroles", "ClusterRole", name, rules=rules)
        subject = {"kind": "ServiceAccount", "name": name, "namespace": "default"}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
        self.create(
            f"{RBAC}/clusterrolebindings", "ClusterRoleBinding", name, roleRef=role, subjects=[subject]
        )
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = self.admin.call("POST", f"{accounts}/{name}/token", request)["status"]["token"]
        access = self.access_with(token)
        eventually(lambda: self._is_allowed(access, rules[0]), f"role of {name}", START_S)
        return access

    def _is_allowed(self, access: drahealth.ApiAccess, rule: Mapping[str, Any]) -> bool:
        """Return whether the API server knows a rule of a new role, of which it learns by a watch."""
        wanted = {"verb": rule["verbs"][0], "group": rule["apiGroups"][0], "resource": rule["resources"][0]}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": wanted},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        return bool(drahealth.ApiServer(access).call("POST", path, review)["status"]["allowed"])

    def _spawn(self, program: str, *flags: str) -> None:
        with (self.directory / f"{program}.log").open("ab") as log:
            self._processes[program] = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", str(PROGRAM), program, *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _is_ready(self) -> bool:
        for name, process in self._processes.items():
            text = (self.directory / f"{name}.log").read_text(errors="replace")
            assert process.poll() is None, f"{name} ended with {process.returncode}:\n{text[-4000:]}"
        with suppress(drahealth.ConfigError, drahealth.ApiError, drahealth.ApiUnreachableError):
            self.admin.open_stream("/readyz").close()
            return True
        return False


@contextmanager
def real_kube_api(directory: Path, *flags: str) -> Iterator[RealKubeApi]:
    """Run an API server with etcd. Skips the test where the program is not built."""
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} does not exist; make test-node builds it")
    with reserved_port() as etcd, reserved_port() as peer, reserved_port() as port:
        server = RealKubeApi(directory, (etcd, peer, port), *flags)
        try:
            server.start()
            yield server
        finally:
            server.stop()
