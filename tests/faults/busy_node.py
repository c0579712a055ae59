"""Node under load: pods and faults that come and go, subscribers, and a driver whose prepares fail.

Everything is drawn from one random seed, so that a run can be repeated.
"""

import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc
from agents import DRIVER
from audit_samples import CONTAINER, CONTAINER_KNOBS, POD_KNOBS, systemd_path, v2_tree, write_cgroup
from explain_node import prepared_claim
from kubelet_files import checkpoint
from patience import PATIENCE_S
from scenarios.machine_files import MachineFiles
from scenarios.row import BUSES, Row
from scenarios.steps import xid_line
from wire.google import Watcher, message_class, watch_health

from agent.sources import kubelet_files

REPOSITORY: Final = Path(__file__).parents[2]
GPUS: Final = 8
BROKEN_GPU: Final = GPUS - 1
"""GPU to which nothing random happens."""
PODS_MAX: Final = 24
BAD_CONFIG: Final = 2
LINK: Final = "drahealth.v1.DriverLink"
XIDS: Final = (13, 31, 43, 48, 63, 79, 94, 119)


class BusyNode:
    """Files and clients of a node with GPUs. Each method does one random thing to the agent."""

    def __init__(self, directory: Path, seed: int, prepared_claims: int) -> None:
        """Write the node's files.

        Args:
            directory: Directory of a short path, because sockets are made in it.
            seed: Seed of the random events.
            prepared_claims: Number of different claims whose prepare fails; then their names come again.
        """
        self.directory = directory
        self.random = random.Random(seed)
        self.machine = MachineFiles(Row("busy", (), gpus=GPUS), directory)
        self.claims = 0
        self.prepares = 0
        self._prepared_claims = prepared_claims
        self._pods: dict[str, int] = {}
        self._watchers: list[Watcher] = []
        (directory / "kubelet").mkdir()
        v2_tree(directory / "cgroup", (), burstable=1)

    @property
    def flags(self) -> list[str]:
        """Flags of the agent of this node."""
        return [
            *self.machine.flags,
            *("--runtime-dir", str(self.directory / "run"), "--state-dir", str(self.directory / "state")),
            *("--kubelet-dir", str(self.directory / "kubelet"), "--node-name", "node-1"),
            *("--driver", DRIVER, "--table", "never", "--period", "100ms"),
        ]

    @property
    def environ(self) -> dict[str, str]:
        """Environment of the node's agent: code of this checkout, settings of the systemd unit."""
        return self.machine.environ | {"PYTHONMALLOC": "malloc", "PYTHONPATH": str(REPOSITORY)}

    @property
    def agent_socket(self) -> Path:
        """Socket of the agent for operators."""
        return self.directory / "run" / "agent.sock"

    @property
    def driver_socket(self) -> Path:
        """Socket of the agent for the driver."""
        return self.directory / "run" / "drivers" / f"{DRIVER}.sock"

    def one_event(self) -> None:
        """Do something that happens on a node."""
        self.random.choices(
            (self.change_pods, self.break_a_gpu, self.log_an_xid, self.resize_pool, self.fail_a_prepare),
            weights=(4, 4, 2, 1, 3),
        )[0]()

    # --- pods ------------------------------------------------------------------------------------------

    def change_pods(self) -> None:
        """Start or stop some pods: their claims in the kubelet's checkpoint, and their cgroups."""
        for _ in range(self.random.randint(1, 4)):
            if len(self._pods) >= PODS_MAX or (self._pods and self.random.random() < 0.5):
                uid = self.random.choice(sorted(self._pods))
                del self._pods[uid]
                shutil.rmtree(self.directory / "cgroup" / systemd_path(uid), ignore_errors=True)
            else:
                self.claims += 1
                uid = f"{self.claims:08x}-0000-4000-8000-00000000beac"
                self._pods[uid] = self.claims
                write_cgroup(self.directory / "cgroup", systemd_path(uid), POD_KNOBS)
                write_cgroup(self.directory / "cgroup", systemd_path(uid, CONTAINER), CONTAINER_KNOBS)
        rows = [
            prepared_claim(f"claim-{number}", f"gpu-{number % GPUS}", pods=[uid])
            for uid, number in self._pods.items()
        ]
        path = self.directory / "kubelet" / kubelet_files.CLAIMS_FILE
        new = path.with_suffix(".new")
        new.write_bytes(checkpoint(rows))
        new.rename(path)

    # --- faults ----------------------------------------------------------------------------------------

    def break_a_gpu(self) -> None:
        """Let NVML report a fault or its end, hang for a moment, or crash."""
        gpu = self.random.randrange(BROKEN_GPU)
        xid = self.random.choice(XIDS)
        commands = {
            f"gpu {gpu} xid {xid}": 8,
            f"gpu {gpu} lost": 2,
            f"gpu {gpu} back": 8,
            f"gpu {gpu} reset": 8,
            f"gpu {gpu} hang all 2s": 1,
            f"gpu {gpu} set temperature={self.random.randint(30, 92)}": 4,
            "crash segv": 1,
        }
        command = self.random.choices(list(commands), list(commands.values()))[0]
        with suppress(ValueError, OSError):  # the process that calls NVML has just crashed
            self.machine.fake.send(command)

    def log_an_xid(self) -> None:
        """Write an XID into the kernel log."""
        self.machine.kernel(xid_line(self.random.choice(XIDS), gpu=self.random.randrange(BROKEN_GPU)))

    def resize_pool(self) -> None:
        """Change the size of the hugepage pool."""
        self.machine.sysfs.resize(self.random.choice((0, 4, 8, 8, 8)))

    def aer(self) -> None:
        """Count PCIe errors of a GPU."""
        bus = self.random.choice(BUSES[:GPUS])
        self.machine.sysfs.write(f"bus/pci/devices/{bus}/aer_dev_correctable", f"TOTAL_ERR_COR {self.claims}")

    # --- driver ----------------------------------------------------------------------------------------

    def fail_a_prepare(self) -> str:
        """Report a failed prepare; returns the claim's UID once the agent has answered; empty: no answer."""
        self.prepares += 1
        uid = f"c-{self.prepares % self._prepared_claims}"
        evidence = self._message(
            "Evidence",
            driver_error=self._message("DriverReportedError", error_class=BAD_CONFIG, summary="no such mode"),
        )
        claim = self._message(
            "PrepareClaim",
            namespace="ns", name=uid, uid=uid,
            devices=[self._message("ClaimedDevice", request="r", pool="node-1", device="gpu-0")],
        )  # fmt: skip
        outcome = self._message("PrepareOutcome", claim=claim, failed=True, evidence=[evidence])
        return uid if self._call("ReportPrepare", step=1, outcomes=[outcome]) else ""

    def _message(self, kind: str, **fields: Any) -> Any:
        return message_class(LINK, kind)(**fields)

    def _call(self, method: str, **fields: Any) -> bool:
        """Call the agent as a driver; returns False if it does not answer."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"unix:{self.driver_socket}", options) as channel:
            call: Callable[..., Any] = channel.unary_unary(
                f"/{LINK}/{method}",
                request_serializer=lambda request: request.SerializeToString(),
                response_deserializer=message_class(LINK, f"{method}Reply").FromString,
            )
            try:
                call(self._message(f"{method}Request", **fields), timeout=PATIENCE_S)
            except grpc.RpcError:
                return False
        return True

    # --- subscribers -----------------------------------------------------------------------------------

    def change_subscribers(self) -> None:
        """Open or close some streams of health and reports."""
        for _ in range(self.random.randint(1, 3)):
            if len(self._watchers) >= 12 or (self._watchers and self.random.random() < 0.5):
                self._watchers.pop(self.random.randrange(len(self._watchers))).__exit__(None, None, None)
            elif self.random.random() < 0.3:
                request, report = (message_class("drahealth.v1", name) for name in ("WatchRequest", "Report"))
                self._watchers.append(
                    Watcher(self.agent_socket, "/drahealth.v1.Agent/Watch", request, report)
                )
            else:
                version = self.random.choice(("v1", "v1alpha1"))
                self._watchers.append(watch_health(self.driver_socket, version))
        for watcher in self._watchers:
            while watcher.pending_count():
                with suppress(grpc.RpcError):  # the stream has ended
                    watcher.next()

    def close_subscribers(self) -> None:
        """Close all streams."""
        while self._watchers:
            self._watchers.pop().__exit__(None, None, None)
