"""Every verb with ``-o json`` on fixed trees of files, with fixed answers of the kubelet and of the agent."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import fake_nvml
import grpc
import verdict_samples as samples
from patience import PATIENCE_S
from verdict_samples import SimulatedNode

from agent.cli.main import main
from agent.model.claim import DeviceRef
from agent.model.history import GONE
from agent.model.settings import UsageHistoryLimits
from agent.store.history_file import HistoryFile
from golden.compare import VOLATILE, mask_keys
from golden.files import INPUTS, MESSAGES, RELEASE, load, plant, temporary_root

NOW_S: Final = 1_790_000_000.0
"""Wall clock of every command that runs in this process [s since 1970]."""
DRIVER: Final = "gpu.example.com"
NIC: Final = "nic.example.com"
POD: Final = "0f3c7a52-4a4e-4a52-9f0e-5d3a6f1b2c3d"
AGENT: Final = "/drahealth.v1.Agent"
HEALTH: Final = "/v1.DRAResourceHealth/NodeWatchResources"
SCAN_CLOCK: Final = frozenset({"at", "since", "lastRead", "lastVerified"})
"""Keys of a scan's times: the C core stamps them, or a process of its own."""

LOST_CLOCK: Final = SCAN_CLOCK | {"failures"}
"""Volatile keys of a scan with a lost GPU: the core counts its failed reads until the scan ends."""

Place = Callable[[Path], Iterator[None]]


class Case(NamedTuple):
    """One command line, and the node that it runs on."""

    place: "Callable[[Path], Any]"
    """Context manager that prepares the node below a root, and serves its sockets."""
    argv: tuple[str, ...]
    """``{root}`` stands for the root."""
    volatile: frozenset[str] = frozenset()
    """Keys whose values differ from run to run."""
    process: bool = False
    """The command runs in a process of its own: the library that it loads stays loaded."""


# --- running a command -------------------------------------------------------------------------------------


def run(argv: list[str]) -> tuple[int, str, str]:
    """Run a command line in this process at NOW_S; return exit code, output and complaints.

    An audit that waits for the kubelet takes no time; the clock then shows a later time.
    """
    out, err = io.StringIO(), io.StringIO()
    now_s = [NOW_S]
    limits = dict.fromkeys(("SOCKET_TIMEOUT_S", "DISK_TIMEOUT_S"), PATIENCE_S)  # the machine may be busy
    with (
        patch.dict(os.environ, _environ(), clear=True),
        patch("time.time", lambda: now_s[-1]),
        patch("agent.cli.audit.command._wait_for_rewrite", lambda: now_s.append(NOW_S + 61)),
        patch("agent.serve.agent_api.client.STATUS_TIMEOUT_S", PATIENCE_S),
        patch.multiple("agent.node.pods.queries", **limits),
        patch.multiple("agent.cli.explain.sources", **limits),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = main(argv)
    return code, out.getvalue(), err.getvalue()


def run_process(argv: list[str], **environ: str) -> tuple[int, str, str]:
    """Run a command line in a process of its own; return exit code, output and complaints.

    A scan that did not read the GPUs in time, on a busy machine, is repeated.
    """
    command = [sys.executable, "-m", "agent", *argv]
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * PATIENCE_S,
            env={**_environ(), **environ},
        )
        if _has_read_gpus(done.stdout) or time.monotonic() > deadline_s:
            return done.returncode, done.stdout, done.stderr


def _has_read_gpus(output: str) -> bool:
    """Return False if a source of GPUs is in its first pass in this document."""
    sources = json.loads(output).get("sources", []) if output else []
    return not any(
        source["state"] == "starting" and source["name"].startswith(("nvml", "gpu-")) for source in sources
    )


def _environ() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("DRAHEALTH_")}


def result(case: Case) -> dict[str, Any]:
    """Run a case; return its exit code, its document, and whether it complained."""
    with temporary_root() as root, case.place(root):
        argv = [word.format(root=root) for word in case.argv]
        environ = {"FAKE_NVML": str(root / "scenario")}
        code, out, err = run_process(argv, **environ) if case.process else run(argv)
        out = out.replace(str(root), "<root>")
    if "Traceback" in err:
        raise AssertionError(f"{' '.join(argv)}: {err}")
    document = json.loads(out) if out else None
    return {
        "exit": code,
        "complains": bool(err),
        "document": _without_host(mask_keys(document, case.volatile)),
    }


def _without_host(document: Any) -> Any:
    """Mask the source that depends on the host of the test: the kernel's device events."""
    for source in (document or {}).get("sources", []):
        if source.get("name") == "uevents":
            source.update(state=VOLATILE, detail=VOLATILE, failures=VOLATILE)
    return document


# --- places ------------------------------------------------------------------------------------------------


class Answers(grpc.GenericRpcHandler):
    """A server that answers each method with fixed bytes; a stream sends its bytes and stays open."""

    def __init__(self, unary: Mapping[str, bytes], streams: Mapping[str, bytes]) -> None:
        self._unary = unary
        self._streams = streams

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a method, or None for UNIMPLEMENTED."""
        method = handler_call_details.method
        if method in self._unary:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: self._unary[method])
        if method in self._streams:
            return grpc.unary_stream_rpc_method_handler(
                lambda request, context: self._stream(method, context)
            )
        return None

    def _stream(self, method: str, context: Any) -> Iterator[bytes]:
        yield self._streams[method]
        while context.is_active():
            time.sleep(0.005)


@contextmanager
def serve_answers(socket: Path, unary: Mapping[str, bytes], streams: Mapping[str, bytes]) -> Iterator[None]:
    """Serve fixed answers on a unix socket."""
    socket.parent.mkdir(parents=True, exist_ok=True)
    server = grpc.server(ThreadPoolExecutor(4), handlers=[Answers(unary, streams)])
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


@contextmanager
def empty_node(root: Path) -> Iterator[None]:
    """Leave the node without a file."""
    yield


def node(overlay: Mapping[str, str] | None = None) -> Any:
    """Return a place: a node of two NUMA nodes, four CPUs and two pods, as files; changed by an overlay."""

    @contextmanager
    def plant_node(root: Path) -> Iterator[None]:
        plant(root, {**load(INPUTS / "scan.json"), **(overlay or {})})
        yield

    return plant_node


def gpus(branch: int, *scenario: str) -> Any:
    """Return a place: the same node with GPUs of the fake NVML."""

    @contextmanager
    def plant_node(root: Path) -> Iterator[None]:
        plant(root, load(INPUTS / "scan.json"))
        (root / "scenario").write_text("".join(f"{line}\n" for line in scenario))
        (root / "nvml.so").symlink_to(fake_nvml.library(branch))
        yield

    return plant_node


def agent_messages() -> dict[str, str]:
    """Return the messages that an agent of an earlier release sent, in hex."""
    messages: dict[str, str] = load(MESSAGES)
    return messages


@contextmanager
def serve_old_agent(root: Path) -> Iterator[None]:
    """Serve an agent's sockets, which answer as an earlier release did."""
    sent = agent_messages()
    report, status = bytes.fromhex(sent["report"]), bytes.fromhex(sent["status"])
    health = bytes.fromhex(sent["health.0"])
    with (
        serve_answers(root / "run/agent.sock", {f"{AGENT}/Status": status}, {f"{AGENT}/Watch": report}),
        serve_answers(root / f"run/drivers/{DRIVER}.sock", {}, {HEALTH: health}),
    ):
        yield


@contextmanager
def serve_new_agent(root: Path) -> Iterator[None]:
    """Serve the socket of an agent that has no report yet."""
    status = bytes.fromhex(agent_messages()["status.new"])
    with serve_answers(root / "run/agent.sock", {f"{AGENT}/Status": status}, {}):
        yield


@contextmanager
def serve_old_driver(root: Path) -> Iterator[None]:
    """Serve the socket of a driver with only the older version of the kubelet's API."""
    health = bytes.fromhex(agent_messages()["health.0"])
    with serve_answers(root / "dra.sock", {}, {HEALTH.replace("v1", "v1alpha1"): health}):
        yield


def release_files(root: Path) -> None:
    """Put the files of the release before where drivers and agent have them."""
    places = {
        "prepares.json": f"kubelet/plugins/{DRIVER}/drahealth/prepares.json",
        "taints.json": f"kubelet/plugins/{DRIVER}/drahealth/taints.json",
        "prepares-nic.json": f"state/drivers/{NIC}/prepares.json",
        "history.sqlite": "state/history.sqlite",
    }
    for name, place in places.items():
        file = root / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((RELEASE / name).read_bytes())
        os.utime(file, (NOW_S - 60, NOW_S - 60))


@contextmanager
def node_with_history(root: Path) -> Iterator[None]:
    """Write the history of a week in which a GPU failed and flapped."""
    gpu, other = DeviceRef("", "node-1", "gpu-3"), DeviceRef("", "node-1", "gpu-4")
    node = SimulatedNode(wall_s=NOW_S - 7 * 86_400)
    node.start((gpu, samples.HEALTHY), (other, samples.HOT))
    node.follow((samples.HEALTHY, 86_400), (samples.LOST, 7200), device=gpu)
    node.stop(600)
    node.reboot()
    node.start((gpu, samples.HEALTHY))
    node.follow((samples.HEALTHY, 86_400), *[(samples.STALLED, 60), (samples.HEALTHY, 300)] * 4, device=gpu)
    node.follow((GONE, 3600), device=other)
    node.run(NOW_S - node.wall_s - 60)
    file = HistoryFile(root / "state/history.sqlite", UsageHistoryLimits())
    file.write_verdicts(node.periods, node.changes, NOW_S, delete_by_age=False)
    yield


@contextmanager
def node_of_last_release(root: Path) -> Iterator[None]:
    """Write the files of the last release; no process runs."""
    release_files(root)
    yield


def node_to_explain(*served: str) -> Any:
    """Return a place: a node with a kubelet, drivers and pods; ``agent`` and ``kubelet`` may be served."""

    @contextmanager
    def plant_node(root: Path) -> Iterator[None]:
        inputs = load(INPUTS / "explain.json")
        plant(root, inputs["tree"])
        release_files(root)
        with ExitStack() as stack:
            if "agent" in served:
                stack.enter_context(serve_old_agent(root))
            if "kubelet" in served:
                kubelet = root / "kubelet"
                listed = {"/v1.PodResourcesLister/List": bytes.fromhex(inputs["podresources"])}
                pods = {"/v1alpha1.Pods/ListPods": bytes.fromhex(inputs["pods"])}
                stack.enter_context(serve_answers(kubelet / "pod-resources/kubelet.sock", listed, {}))
                stack.enter_context(serve_answers(kubelet / "pods-api/pods-api.sock", pods, {}))
            yield

    return plant_node


def node_to_audit(overlay: Mapping[str, str] | None = None) -> Any:
    """Return a place: a node whose pods have cgroups of plain files."""

    @contextmanager
    def plant_node(root: Path) -> Iterator[None]:
        plant(root, {**load(INPUTS / "audit.json"), **(overlay or {})})
        yield

    return plant_node


@contextmanager
def write_patterns(root: Path) -> Iterator[None]:
    """Write a configuration with error patterns of the operator."""
    plant(root, load(INPUTS / "classify.json")["tree"])
    yield


# --- command lines -----------------------------------------------------------------------------------------

JSON: Final = ("-o", "json")
SCAN: Final = (
    *("scan", *JSON, "--node-name", "node-1", "--sysfs-root", "{root}/sys", "--procfs-root", "{root}/proc"),
    *("--cgroupfs-root", "{root}/cgroup", "--kmsg", "{root}/no-kmsg"),
)
NO_GPUS: Final = ("--nvml-library", "{root}/none.so")
GPUS: Final = ("--nvml-library", "{root}/nvml.so")
RUNTIME: Final = (*JSON, "--runtime-dir", "{root}/run")
PLACES: Final = (
    *(*RUNTIME, "--kubelet-dir", "{root}/kubelet", "--state-dir", "{root}/state"),
    *("--cgroupfs-root", "{root}/cgroup"),
)
AUDIT: Final = (
    *(*RUNTIME, "--kubelet-dir", "{root}/kubelet", "--cgroupfs-root", "{root}/cgroup"),
    *("--sysfs-root", "{root}/sys", "--procfs-root", "{root}/proc", "--node-name", "n1"),
)
PREPARES: Final = (*JSON, "--kubelet-dir", "{root}/kubelet", "--state-dir", "{root}/state")
HISTORY: Final = (*JSON, "--state-dir", "{root}/state")
OBSERVED: Final = (*HISTORY, "--procfs-root", "{root}/proc")
KUBELET: Final = {
    "proc/meminfo": "MemTotal:       67108864 kB\nSwapTotal:       8388608 kB\n",
    "proc/77/comm": "kubelet\n",
    "proc/77/cmdline": "/usr/bin/kubelet\0--config=/etc/kubelet.yaml\0--system-reserved=memory=1Gi\0",
    "proc/77/root/etc/kubelet.yaml": "kind: KubeletConfiguration\nmemorySwap: {swapBehavior: LimitedSwap}\n"
    "memoryThrottlingFactor: 0.9\nmemoryReservationPolicy: TieredReservation\n",
}
"""Process of a kubelet that sets memory QoS and swap limits."""
SICK: Final = {
    "sys/devices/system/cpu/online": "0-2\n",
    "sys/devices/system/node/node1/memory1/state": "offline\n",
    "sys/devices/system/node/node1/memory_failure/total": "16\n",
    "sys/devices/system/edac/mc/mc1/ue_count": "2\n",
    "sys/devices/system/edac/mc/mc1/dimm0/dimm_ue_count": "2\n",
    "sys/devices/system/edac/mc/mc0/ce_count": "torn\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "800000\n",
    "sys/devices/system/node/node0/hugepages/hugepages-1048576kB/nr_hugepages": "torn\n",
    "proc/cmdline": "ro hugepagesz=2M hugepages=64 isolcpus=2\n",
}
"""A node on which much is wrong from the start."""


def _explain(*words: str) -> tuple[str, ...]:
    return ("explain", *words, *PLACES)


def _classify(*words: str) -> Case:
    return Case(empty_node, ("classify", *words, *JSON))


def _cases() -> dict[str, Case]:
    whole, kubelet, dead = node_to_explain("agent", "kubelet"), node_to_explain("kubelet"), node_to_explain()
    files = ("--pods", "{root}/pods.json", "--claims", "{root}/claims.json")
    everything = ("--pods", "{root}/all.json")
    good = ("--pods", "{root}/good.json")
    cases = {
        "scan": Case(node(), (*SCAN, *NO_GPUS), SCAN_CLOCK),
        "scan-expect": Case(node(), (*SCAN, *NO_GPUS, "--config", "{root}/expect.toml"), SCAN_CLOCK),
        "scan-sick": Case(node(SICK), (*SCAN, *NO_GPUS), SCAN_CLOCK),
        "scan-nothing": Case(empty_node, (*SCAN, *NO_GPUS), SCAN_CLOCK),
        "scan-gpus": Case(
            gpus(
                580,
                "profile h100 gpus=4",
                "gpu 0 set recovery_action=1 temperature=91 clocks.reasons=64",
                "gpu 1 mig 3g.40gb 1g.10gb",
                "gpu 2 set ecc.dram.uncorrectable.volatile=3 remap.pending=1 pcie.width=8",
            ),
            (*SCAN, *GPUS, "--backend", "both"),
            SCAN_CLOCK,
            process=True,
        ),
        "scan-gpu-lost": Case(
            gpus(535, "profile a100 gpus=2", "gpu 1 lost"), (*SCAN, *GPUS), LOST_CLOCK, process=True
        ),
        "scan-pynvml": Case(
            gpus(570, "profile t4 gpus=2"), (*SCAN, *GPUS, "--backend", "pynvml"), SCAN_CLOCK, process=True
        ),
        "status": Case(serve_old_agent, ("status", *RUNTIME)),
        "status-new": Case(serve_new_agent, ("status", *RUNTIME)),
        "status-nothing": Case(empty_node, ("status", *RUNTIME)),
        "watch-once": Case(serve_old_agent, ("watch", "--once", *RUNTIME)),
        "watch-driver": Case(
            serve_old_agent, ("watch", "--once", *JSON, f"{{root}}/run/drivers/{DRIVER}.sock")
        ),
        "watch-old-driver": Case(serve_old_driver, ("watch", "--once", *JSON, "{root}/dra.sock")),
        "explain-device": Case(whole, _explain(f"{DRIVER}/node-1/gpu-1")),
        "explain-device-well": Case(whole, _explain(f"{DRIVER}/node-1/gpu-0")),
        "explain-device-ambiguous": Case(whole, _explain("gpu-0")),
        "explain-device-cdi": Case(whole, _explain("example.com/gpu=gpu-2")),
        "explain-device-host": Case(whole, _explain("hugepages-2mi-node0")),
        "explain-device-nic": Case(whole, _explain(f"{NIC}/node-1/nic-0")),
        "explain-claim": Case(whole, _explain("claim", "team-a/gpus")),
        "explain-claim-uid": Case(whole, _explain("claim", "c-shared")),
        "explain-claim-objects": Case(whole, (*_explain("claim", "team-a/gpus"), *files)),
        "explain-claim-old": Case(whole, _explain("claim", "old")),
        "explain-pod": Case(whole, _explain("pod", "team-a/train-0")),
        "explain-pod-uid": Case(whole, _explain("pod", POD)),
        "explain-pod-gone": Case(whole, _explain("pod", "team-a/train-2")),
        "explain-pod-objects": Case(whole, (*_explain("pod", "team-a/waits"), *files)),
        "explain-pod-kubelet-only": Case(kubelet, _explain("pod", "team-a/infer-0")),
        "explain-device-files-only": Case(dead, _explain("gpu-1")),
        "explain-objects-only": Case(dead, ("explain", "claim", "shared", *JSON, *files)),
        "explain-all": Case(whole, (*_explain("--all"), *files)),
        "explain-all-objects-only": Case(dead, ("explain", "--all", *JSON, *files)),
        "explain-unknown": Case(whole, _explain("pod", "team-a/train-9")),
        "explain-nothing": Case(empty_node, _explain("gpu-0")),
        "audit-good": Case(node_to_audit(), ("audit", *AUDIT, *good)),
        "audit": Case(node_to_audit(), ("audit", *AUDIT, *everything)),
        "audit-all": Case(node_to_audit(), ("audit", "--all", *AUDIT, *everything)),
        "audit-pod": Case(node_to_audit(), ("audit", "default/q", *AUDIT, *everything)),
        "audit-young": Case(node_to_audit(), ("audit", "young", *AUDIT, *everything)),
        "audit-gone": Case(node_to_audit(), ("audit", "r", *AUDIT, *everything)),
        "audit-kubelet": Case(node_to_audit(KUBELET), ("audit", *AUDIT, *good)),
        "audit-old-kubelet": Case(node_to_audit(), ("audit", "--kubelet-version", "1.36.2", *AUDIT, *good)),
        "audit-nothing": Case(empty_node, ("audit", *AUDIT)),
        "prepares": Case(node_of_last_release, ("prepares", *PREPARES)),
        "prepares-driver": Case(node_of_last_release, ("prepares", "--driver", NIC, *PREPARES)),
        "prepares-claim": Case(node_of_last_release, ("prepares", "team-a/gpus", *PREPARES)),
        "prepares-unknown": Case(node_of_last_release, ("prepares", "team-a/none", *PREPARES)),
        "prepares-none": Case(empty_node, ("prepares", *PREPARES)),
        "prepares-codes": Case(empty_node, ("prepares", "--codes", *JSON)),
        "prepares-codes-config": Case(empty_node, ("prepares", "--codes", "config", *JSON)),
        "history": Case(node_of_last_release, ("history", *HISTORY)),
        "history-bad": Case(node_of_last_release, ("history", "--bad", *HISTORY)),
        "history-since": Case(node_of_last_release, ("history", "--since", "2h", *HISTORY)),
        "history-pod": Case(node_of_last_release, ("history", "--pod", "team-a/train-2", *HISTORY)),
        "history-device": Case(node_of_last_release, ("history", "--device", "node-1/gpu-1", *HISTORY)),
        "history-claim": Case(node_of_last_release, ("history", "--claim", "c-3", *HISTORY)),
        "history-unknown": Case(node_of_last_release, ("history", "--claim", "none", *HISTORY)),
        "history-changes": Case(node_with_history, ("history", "--changes", *OBSERVED)),
        "history-changes-since": Case(node_with_history, ("history", "--since", "6d", *OBSERVED)),
        "history-summary": Case(node_with_history, ("history", "--summary", *OBSERVED)),
        "history-flapping": Case(node_with_history, ("history", "--flapping", "--since", "7d", *OBSERVED)),
        "history-none": Case(empty_node, ("history", *HISTORY)),
        "checks": Case(empty_node, ("checks", *JSON)),
        "checks-xid": Case(empty_node, ("checks", "gpu.xid.79", *JSON)),
        "checks-unlisted": Case(empty_node, ("checks", "gpu.xid.9999", *JSON)),
        "checks-unreadable": Case(empty_node, ("checks", "mem.hugepages.pool_shrunk.unreadable", *JSON)),
        "checks-word": Case(empty_node, ("checks", "nvlink", *JSON)),
        "conform-checks": Case(empty_node, ("conform", "--checks", *JSON)),
        "conform-unserved": Case(
            empty_node, ("conform", "--socket", "{root}/none.sock", "--for", "2s", *JSON)
        ),
        "classify-pattern": Case(
            write_patterns, ("classify", "bank 3 is locked", "--config", "{root}/config.toml", *JSON)
        ),
    }
    for number, words in enumerate(load(INPUTS / "classify.json")["errors"]):
        cases[f"classify-{number:02}"] = _classify(*words)
    return cases


CASES: Final = _cases()
"""Cases by the name of their golden file."""
