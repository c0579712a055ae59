"""A node for ``drahealth explain``: files and sockets of the kubelet, drivers' files, files of objects."""

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kubelet_files import DRIVER, checkpoint, claim, device
from wire.kubelet_apis import (
    ListingApi,
    listed_claim,
    listed_container,
    listed_pod,
    listed_pods,
    message_class,
    pod,
)

from agent.cli.main import main
from agent.prepare.prepare_ledger import PrepareLedger
from agent.serve.kubelet import client, pods_api
from agent.sources import kubelet_files
from agent.store import driver_files

GROUP = {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "workers", "uid": "g-1"}


def results(*devices: str, request: str = "gpus") -> list[dict[str, str]]:
    """Return the results of a claim's allocation."""
    return [{"request": request, "driver": DRIVER, "pool": "node-1", "device": device} for device in devices]


def reservations(*pods: str) -> list[dict[str, str]]:
    """Return reservations for pods with these UIDs."""
    return [{"resource": "pods", "name": f"pod-{uid}", "uid": uid} for uid in pods]


def claim_object(name: str, *devices: str, uid: str = "", reserved_for: Sequence[Any] = ()) -> dict[str, Any]:
    """Return a ResourceClaim; without devices it is not allocated."""
    allocation = {"allocation": {"devices": {"results": results(*devices)}}} if devices else {}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": "team-a", "name": name, "uid": uid or f"c-{name}"},
        "status": {**allocation, "reservedFor": list(reserved_for)},
    }


def pod_object(name: str, *claims: str, uid: str = "", group: str = "", owner: str = "") -> dict[str, Any]:
    """Return a Pod whose only container uses these claims."""
    owners = [{"apiVersion": "batch/v1", "kind": "Job", "name": owner, "uid": "j-1", "controller": True}]
    scheduling = {"schedulingGroup": {"podGroupName": group}} if group else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": "team-a",
            "name": name,
            "uid": uid or f"u-{name}",
            "ownerReferences": owners if owner else [],
        },
        "spec": {
            "nodeName": "node-1",
            "resourceClaims": [{"name": f"n-{claim}", "resourceClaimName": claim} for claim in claims],
            "containers": [
                {"name": "main", "resources": {"claims": [{"name": f"n-{claim}"} for claim in claims]}}
            ],
            **scheduling,
        },
        "status": {"phase": "Running"},
    }


@dataclass
class Node:
    """Directories of a node, all below one directory."""

    root: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def kubelet(self) -> Path:
        return self.root / "kubelet"

    @property
    def run_dir(self) -> Path:
        return self.root / "run"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def cgroups(self) -> Path:
        return self.root / "cgroup"

    def __post_init__(self) -> None:
        for directory in ("pod-resources", "pods-api", "plugins"):
            (self.kubelet / directory).mkdir(parents=True)

    # --- content ---------------------------------------------------------------------------------------

    def write_checkpoint(self, *claims: dict[str, Any]) -> None:
        """Write the kubelet's checkpoint."""
        (self.kubelet / kubelet_files.CLAIMS_FILE).write_bytes(checkpoint(claims))

    def health_state(
        self, health: str, *devices: str, message: str = "", updated: str = "2026-11-21T10:00:00Z"
    ) -> None:
        """Write the kubelet's health of devices."""
        found = {
            f"node-1/{name}": {
                "PoolName": "node-1",
                "DeviceName": name,
                "Health": health,
                "LastUpdated": updated,
                "HealthCheckTimeout": 30_000_000_000,
                "Message": message,
            }
            for name in devices
        }
        (self.kubelet / kubelet_files.HEALTH_FILE).write_text(json.dumps({DRIVER: {"Devices": found}}))

    def runs(self, uid: str, *containers: str, running: bool = True) -> None:
        """Create the cgroups of a pod and its containers, in version 2."""
        pod = self.cgroups / "kubepods" / "burstable" / f"pod{uid}"
        for group in (pod, *(pod / container for container in containers)):
            group.mkdir(parents=True, exist_ok=True)
            (group / "cgroup.events").write_text(f"populated {running:d}\nfrozen 0\n")

    def driver_stores(self, ledger: PrepareLedger, now_s: float, driver: str = DRIVER) -> None:
        """Write the ledger of a driver that embeds drahealth."""
        driver_files.save_ledger(
            self.kubelet / "plugins" / driver / "drahealth", driver, "1.2", ledger, now_s
        )

    def write_objects(self, name: str, *objects: dict[str, Any]) -> str:
        """Write a file of objects and return its path."""
        path = self.root / name
        path.write_text(json.dumps({"kind": "List", "items": objects}))
        return str(path)

    @contextmanager
    def sockets(self, listed: Callable[[], Any], pods: Callable[[], Any]) -> Iterator[None]:
        """Serve podresources and the pods API."""
        with (
            ListingApi(self.kubelet / client.PODRESOURCES_SOCKET, client.PODRESOURCES_LIST, listed),
            ListingApi(self.kubelet / pods_api.SOCKET, pods_api.LIST, pods),
        ):
            yield

    # --- the command -----------------------------------------------------------------------------------

    @property
    def flags(self) -> list[str]:
        paths = {
            "--kubelet-dir": self.kubelet,
            "--runtime-dir": self.run_dir,
            "--state-dir": self.state,
            "--cgroupfs-root": self.cgroups,
        }
        return [word for flag, path in paths.items() for word in (flag, str(path))]

    def explain(self, *argv: str) -> tuple[int, str, str]:
        """Run the command on this node; return exit code, output and errors."""
        return self.run_bare(*argv, *self.flags)

    def run_bare(self, *argv: str) -> tuple[int, str, str]:
        """Run the command with these arguments alone; return exit code, output and errors."""
        code = main(["explain", *argv])
        return code, *self.capsys.readouterr()

    def document(self, *argv: str) -> tuple[int, Any]:
        """Run the command on this node; return exit code and document."""
        code, out, err = self.explain(*argv, "-o", "json")
        assert err == ""
        return code, json.loads(out)


def podresources_answer(*pods: tuple[str, str, Sequence[str]]) -> Callable[[], Any]:
    """Return an answer of podresources: pods by name, each with a claim and its devices."""
    return lambda: listed_pods(
        *(
            listed_pod(name, listed_container("main", listed_claim(claim, *devices)))
            for name, claim, devices in pods
        )
    )


def pods_answer(*pods: tuple[str, Sequence[str]]) -> Callable[[], Any]:
    """Return an answer of the pods API: pods by UID, each with claims; their names are ``pod-<uid>``."""
    return lambda: message_class("v1alpha1", "ListPodsResponse")(
        pods=[pod(uid, claims=list(claims)) for uid, claims in pods]
    )


def prepared_claim(name: str, *devices: str, pods: Sequence[str] = (), uid: str = "") -> dict[str, Any]:
    """Return a claim of the checkpoint."""
    return claim(
        uid or f"c-{name}",
        name=name,
        pods=pods,
        drivers={DRIVER: {"Devices": [device(found_device) for found_device in devices]}},
    )


@contextmanager
def silent_servers(*paths: Path) -> Iterator[None]:
    """Serve sockets that accept connections and never answer."""
    with ExitStack() as stack:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(str(path))
            server.listen()
        yield
