"""Every call of the C library that fails once: no crash, and no device that is Healthy without being read."""

import contextlib
import errno
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import trio
from agents import DRIVER, Agent, PlainSysfs, run_command, short_tmp
from explain_node import Node as Kubelet
from explain_node import podresources_answer, pods_answer, prepared_claim
from http_agents import listening_agent
from http_client import get
from kubelet import FakeKubelet, Pace
from kubelet_files import checkpoint
from own_process import run_in_own_process
from patience import PATIENCE_S
from reserved_ports import reserved_port
from scenarios.machine_files import MachineFiles
from scenarios.row import Row
from test_embed_processes import (
    NODE,
    PAGES,
    Program,
    assert_nothing_left,
    config_of,
    run_pod,
    wait_for_pod_message,
)
from wire.serving import descriptors, eventually

from agent.config.config import Config
from agent.engine.step import initial_state, step
from agent.errors import ProbeError
from agent.model.gpu import NvmlSample
from agent.model.health import Health
from agent.model.reading import SourceState
from agent.model.report import Report
from agent.model.time import NS
from agent.node import nvml_process
from agent.node.node_source import NodeSource, engine_settings, open_node_source
from agent.node.nvml_process import NvmlProcess
from agent.node.pods import tracker
from agent.node.pods.tracker import PodTracker
from agent.serve.kubelet import pods_api
from agent.sources.kubelet_files import CLAIMS_FILE
from agent.system.timing import read_clocks
from faults.failing_node import POOL, CallOrder, FailingNode, library, node

__all__ = ["library", "node", "short_tmp"]
pytestmark = pytest.mark.timeout(3600)  # hundreds of processes one after the other


def cases_of(calls: Mapping[str, tuple[int, ...]]) -> list[Any]:
    """Return a case of a test for each kind of calls and each of its errors."""
    return [
        pytest.param(call, error, id=f"{call} {errno.errorcode[error]}")
        for call in calls
        for error in calls[call]
    ]


CALLS: Final = {
    "open": (errno.EIO, errno.EACCES, errno.EMFILE, errno.ENOMEM, errno.EINTR),
    "read": (errno.EIO, errno.ENODEV, errno.ENOMEM, errno.EINTR),
    "write": (errno.ENOSPC, errno.EIO, errno.EDQUOT),
    "fsync": (errno.EIO, errno.ENOSPC),
    "rename": (errno.EIO, errno.EACCES, errno.ENOSPC),
    "socket": (errno.EMFILE, errno.ENOBUFS, errno.EACCES),
    "bind": (errno.EADDRINUSE, errno.EACCES),
    "listen": (errno.EADDRINUSE,),
    "setsockopt": (errno.ENOBUFS, errno.EPERM),
    "getsockopt": (errno.ENOBUFS,),
    "connect": (errno.ECONNREFUSED, errno.EAGAIN),
    "accept": (errno.ECONNABORTED, errno.EMFILE, errno.ENOMEM),
    "send": (errno.EPIPE, errno.ENOBUFS, errno.EAGAIN),
    "recv": (errno.ECONNRESET, errno.ENOBUFS, errno.ENOMEM),
    "epoll": (errno.ENOMEM, errno.ENOSPC),
    "inotify": (errno.EMFILE, errno.ENOSPC),
    "mmap": (errno.ENOMEM,),
    "thread": (errno.EAGAIN,),
}
CASES: Final = cases_of(CALLS)
RUN_CALLS: Final = {
    **CALLS,
    "open": (errno.EMFILE,),
    "read": (errno.EIO,),
    "epoll": (errno.ENOSPC,),
    "inotify": (errno.ENOSPC,),
}
"""Failed calls of an agent. The errors of frequent calls are few, because each is a start of an agent."""
RUN_CASES: Final = cases_of(RUN_CALLS)
RUN_CALLS_MAX: Final = 40
"""Number of calls of a kind that fail in an agent, which maps memory as long as it runs."""
RUN_FREQUENT: Final = {"open", "read", "send", "recv", "epoll"}
"""Kinds of calls that an agent makes as long as it runs."""
RUN_FREQUENT_MAX: Final = 20
"""Number of calls of a frequent kind that fail in an agent."""
CODES: Final = {0, 1, 2, 3, 69, 70, 74, 75, 77, 78}
"""Exit codes of docs/configuration.md that a failed call may cause; a signal is a negative one."""


def numbers() -> Iterator[int]:
    """Yield 1, 2, 3... for the calls of a kind; a loop ends it after the last call."""
    yield from range(1, 2000)
    raise AssertionError("2000 calls, and no end")


def healths_of(document: dict[str, Any]) -> dict[str, str]:
    """Return the health of each device in a report."""
    return {device["name"]: device["health"] for device in document["devices"]}


def check_devices(document: dict[str, Any], where: str) -> None:
    """Assert that the pool with too few pages is not Healthy, and no device is missing without a reason."""
    healths = healths_of(document)
    assert healths.get(POOL) != "Healthy", where
    assert POOL in healths or any(source["state"] != "ok" for source in document["sources"]), where


@pytest.mark.parametrize(("call", "error"), CASES)
def test_scan_with_a_failed_call_neither_crashes_nor_lies(node: FailingNode, call: str, error: int) -> None:
    for number in numbers():
        done = run_command("scan", "-o", "json", *node.flags, env=node.environ(call, number, error))
        failed = node.failed_call()
        where = f"{call} {number} ({failed}): exit code {done.returncode}: {done.stderr}"
        assert done.returncode in CODES - {0, 1}, where
        if done.stdout:
            check_devices(json.loads(done.stdout), where)
        else:
            assert done.stderr.count("drahealth: ") == 1, where
        if not failed:
            assert done.returncode == 2, where
            return


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    """Yield an address of which no other test makes use between two agents of a test."""
    with reserved_port() as port:
        yield "127.0.0.1", port


@pytest.mark.parametrize(("call", "error"), RUN_CASES)
def test_run_with_a_failed_call_neither_crashes_nor_lies_and_recovers(
    node: FailingNode, address: tuple[str, int], call: str, error: int
) -> None:
    flags = ["--runtime-dir", str(node.root / "run"), "--driver", DRIVER, "--table", "never"]
    flags += ["--listen", f"{address[0]}:{address[1]}"]
    log_file = node.mark.with_name("log")
    for number in numbers():
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "agent", "run", *flags, *node.flags],
                env=node.environ(call, number, error), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            documents = reports_until_unhealthy(process, node.root / "run/agent.sock", f"{call} {number}")
            eventually(partial(answers_or_has_ended, process, address), f"{call} {number}: an HTTP answer")
            process.send_signal(signal.SIGTERM)
            code = process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()
        failed = node.failed_call()
        where = f"{call} {number} ({failed}): exit code {code}: {log_file.read_text()}"
        assert code in CODES, where
        for document in documents:
            check_devices(document, where)
        if not documents or healths_of(documents[-1]).get(POOL) != "Unhealthy":
            assert failed, where
            assert "drahealth: " in log_file.read_text(), where
        if not failed or number == (RUN_FREQUENT_MAX if call in RUN_FREQUENT else RUN_CALLS_MAX):
            return


def answers_or_has_ended(process: "subprocess.Popen[bytes]", address: tuple[str, int]) -> bool:
    """Return whether an agent answers over HTTP; one that ends by itself closes its HTTP server first."""
    return process.poll() is not None or status_of(address, "/healthz") == 200


def reports_until_unhealthy(
    process: "subprocess.Popen[bytes]", socket: Path, where: str
) -> list[dict[str, Any]]:
    """Return the reports of an agent until the pool is Unhealthy again, or the agent has ended."""
    documents: list[dict[str, Any]] = []

    def is_unhealthy_or_over() -> bool:
        if process.poll() is not None:
            return True
        command = [sys.executable, "-m", "agent", "watch", "--once", "-o", "json", str(socket)]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.stdout:
            documents.append(json.loads(done.stdout))
        return bool(documents) and healths_of(documents[-1]).get(POOL) == "Unhealthy"

    eventually(is_unhealthy_or_over, lambda: f"{where}: an Unhealthy pool; last report: {documents[-1:]}")
    return documents


# --- the HTTP server ---------------------------------------------------------------------------------------

HTTP_CALLS: Final = {
    "accept": (errno.ECONNABORTED, errno.EMFILE, errno.EAGAIN),
    "recv": (errno.ECONNRESET, errno.ENOMEM, errno.EINTR, errno.EAGAIN),
    "send": (errno.EPIPE, errno.ECONNRESET, errno.ENOBUFS, errno.EINTR, errno.EAGAIN),
    "epoll": (errno.ENOMEM, errno.ENOSPC),
    "open": (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES),
    "read": (errno.EIO,),
}
HTTP_CASES: Final = cases_of(HTTP_CALLS)
HTTP_PATHS: Final = ("/healthz", "/metrics", "/", "/api/v1/report")


class OrderedAgent(NamedTuple):
    """Agent that serves HTTP, and the order to fail a call of its threads."""

    agent: Agent
    address: tuple[str, int]
    order: CallOrder


@pytest.fixture(scope="module")
def http_agent(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OrderedAgent]:
    directory = tmp_path_factory.mktemp("http")
    order, sysfs = CallOrder(directory / "order"), PlainSysfs(directory / "sys")
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for name, value in order.environ(library, Path("/")).items():
            patch.setenv(name, value)
        agent, port = stack.enter_context(listening_agent(directory, sysfs, "--nvml-library", "/nonexistent"))
        patch.undo()
        address = "127.0.0.1", port
        eventually(lambda: status_of(address, "/readyz") == 200, "a report")
        yield OrderedAgent(agent, address, order)
        assert agent.end() == 0


def status_of(address: tuple[str, int], path: str) -> int:
    """Return the status of an HTTP answer; 0: the connection was closed before the end of the answer."""
    try:
        return get(address, path).status
    except (ConnectionError, http.client.HTTPException):
        return 0


def newest_report(address: tuple[str, int]) -> str:
    """Return the time of the newest report."""
    return str(json.loads(get(address, "/api/v1/report").text)["at"])


@pytest.mark.parametrize(("call", "error"), HTTP_CASES)
def test_http_server_with_a_failed_call_disconnects_at_most_and_recovers(
    http_agent: OrderedAgent, call: str, error: int
) -> None:
    agent, address, order = http_agent
    for number in numbers():
        if call in {"open", "read"}:  # the texts of a report are made once
            last = newest_report(address)
            eventually(lambda last=last: newest_report(address) != last, "the next report")
        logged, where = len(agent.log), f"{call} {number}"
        order.give(call, number, error, thread=order.tcp_thread)
        found = {status_of(address, path) for path in HTTP_PATHS}
        counted = order.withdraw()
        assert found <= {200, 0}, where
        assert [status_of(address, path) for path in HTTP_PATHS] == [200] * len(HTTP_PATHS), where
        assert "Traceback" not in agent.log[logged:], where
        if counted < number:
            return


# --- the process that calls NVML ---------------------------------------------------------------------------

NVML_PROGRAM: Final = "drahealth-nvml"
AGENT_PROGRAM: Final = Path(sys.executable).name
NVML_CALLS: Final = {
    (NVML_PROGRAM, "open"): (errno.EMFILE, errno.EACCES),
    (NVML_PROGRAM, "read"): (errno.EIO,),
    (NVML_PROGRAM, "stat"): (errno.ENOMEM,),
    (NVML_PROGRAM, "mmap"): (errno.ENOMEM,),
    (NVML_PROGRAM, "thread"): (errno.EAGAIN,),
    (NVML_PROGRAM, "recv"): (errno.ECONNRESET, errno.EINTR),
    (NVML_PROGRAM, "send"): (errno.EPIPE,),
    (AGENT_PROGRAM, "stat"): (errno.EACCES, errno.ENOMEM),
    (AGENT_PROGRAM, "socket"): (errno.EMFILE,),
    (AGENT_PROGRAM, "memfd"): (errno.ENFILE,),
    (AGENT_PROGRAM, "dup"): (errno.EMFILE,),
    (AGENT_PROGRAM, "mmap"): (errno.ENOMEM,),
    (AGENT_PROGRAM, "spawn"): (errno.EAGAIN, errno.ENOMEM),
    (AGENT_PROGRAM, "send"): (errno.EPIPE,),
}
"""Failed calls of the process that calls NVML, and of the agent that starts this process."""
NVML_CASES: Final = [
    pytest.param(program, call, error, id=f"{program} {call} {errno.errorcode[error]}")
    for program, call in NVML_CALLS
    for error in NVML_CALLS[program, call]
]
NVML_CALLS_MAX: Final = 8
"""Number of calls of a kind that fail; the process reads files as long as it runs."""
NVML_HEALTH: Final = {"gpu-0": Health.HEALTHY, "gpu-1": Health.UNHEALTHY}


@pytest.mark.parametrize(("program", "call", "error"), NVML_CASES)
def test_nvml_process_with_a_failed_call_never_lies_and_recovers(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, call: str, error: int
) -> None:
    for name, value in CallOrder(tmp_path / "order").environ(library, tmp_path).items():
        monkeypatch.setenv(name, value)
    run_in_own_process(fail_calls_of_nvml_process, tmp_path, program, call, error)


def fail_calls_of_nvml_process(directory: str, program: str, call: str, error: str) -> None:
    """Fail the calls of a kind one after the other, each at the start of another process that calls NVML."""
    nvml_process.BACKOFF_S = (0.05,)  # type: ignore[misc]
    nvml_process.FIRST_PASS_S = PATIENCE_S  # type: ignore[misc]
    uncaught: list[object] = []
    threading.excepthook = uncaught.append
    machine = MachineFiles(Row("", (), gpus=2), Path(directory))
    machine.fake.scenario.write_text("profile h100 gpus=2\ngpu 1 set remap.failure=1\n")  # without a socket
    os.environ |= machine.environ
    watched = WatchedNode(machine, Path(directory))

    async def fail_calls() -> None:
        await watched.until(lambda _: True, "the first verdicts")
        order, opened = CallOrder(Path(directory) / "order"), len(descriptors())
        for number in range(1, NVML_CALLS_MAX + 1):
            where, last = f"{program}: {call} {number}", watched.pid
            order.give(call, number, int(error), program=program)
            if last:  # the last failed call may have ended it just now
                os.kill(last, signal.SIGKILL)
            gpus = await watched.until(lambda _, last=last: watched.pid not in (0, last), where)
            with contextlib.suppress(ProbeError, OSError):  # the call that fails may be one of this
                await trio.to_thread.run_sync(watched.nvml.read_inventory)
            watched.nvml.request_count()
            gpus = await watched.until(
                lambda now, passes=gpus.nvml.passes: now.nvml.passes > passes, f"{where}: another pass"
            )
            counted = order.withdraw()
            assert gpus.generation == 1, f"{where}: no driver was reloaded"
            assert not uncaught, where
            eventually(lambda: len(descriptors()) <= opened, f"{where}: {opened} descriptors")
            if counted < number:
                return

    trio.run(watched.run, fail_calls)


def healths(report: Report) -> dict[str, Health]:
    """Return the health of each GPU in a report."""
    return {device.device: device.health for device in report.devices if device.kind == "gpu"}


class WatchedNode:
    """Sources of a machine with GPUs, whose verdicts are checked in each evaluation."""

    def __init__(self, machine: MachineFiles, directory: Path) -> None:
        (directory / "run").mkdir()
        (machine.sysfs.root / "module/nvidia").mkdir(parents=True)
        self._config = Config(
            node_name="node",
            sysfs_root=machine.sysfs.root,
            procfs_root=machine.procfs,
            cgroupfs_root=directory / "cgroup",
            kmsg=machine.log,
            nvml_library=str(directory / "libnvidia-ml.so.1"),
            runtime_dir=directory / "run",
            period_ns=NS // 20,
            gpu_slow_ns=NS // 10,
        )
        settings = engine_settings(self._config)
        self._node: NodeSource = open_node_source(
            self._config, settings, self._config.period_ns, reads_declarations=True
        )
        self._state = initial_state(settings)
        assert isinstance(self._node._gpus, NvmlProcess)
        self.nvml = self._node._gpus
        self.nvml._options = replace(self.nvml._options, retry_ns=NS // 5)

    @property
    def pid(self) -> int:
        """Process that calls NVML; 0: none runs."""
        return self.nvml._child.pid if self.nvml._child else 0

    async def run(self, main: Callable[[], Awaitable[None]]) -> None:
        """Run `main` while the sources are read."""
        self._node.start()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._node.run_watchers)
            await main()
            nursery.cancel_scope.cancel()
        assert self._node.stop(PATIENCE_S) == []

    async def until(self, condition: Callable[[NvmlSample], bool], what: str) -> NvmlSample:
        """Evaluate until all GPUs are read, have the right verdicts, and meet a condition.

        Fails for a false verdict, or one without a reason.
        """
        end_s = time.monotonic() + PATIENCE_S
        while True:
            with trio.move_on_after(0.02):
                await trio.lowlevel.wait_readable(self._node.fileno())
            self._node.clear()
            snapshot = self._node.read()
            if snapshot is None:
                continue
            self._state, report = step(self._state, snapshot, read_clocks())
            for device in report.devices if not report.starting else ():
                false = {"gpu-0": Health.UNHEALTHY, "gpu-1": Health.HEALTHY}.get(device.device)
                assert device.health is not false, (what, device)
                assert device.causes or device.health is not Health.UNKNOWN, (what, device)
            gpus = snapshot.gpus
            assert gpus is not None
            is_read = gpus.nvml.state is SourceState.OK and not gpus.nvml.detail and not gpus.process
            if is_read and not report.starting and healths(report) == NVML_HEALTH and condition(gpus):
                return gpus
            assert time.monotonic() < end_s, (what, report.devices, snapshot.gpus)


# --- the thread that tracks pods ---------------------------------------------------------------------------

POD_CALLS: Final = {
    "open": (errno.EMFILE, errno.EACCES, errno.EIO),
    "stat": (errno.ENOMEM, errno.EACCES),
    "read": (errno.EIO, errno.ENOMEM),
    "socket": (errno.EMFILE,),
    "connect": (errno.ECONNREFUSED, errno.EAGAIN),
    "send": (errno.EPIPE, errno.ENOBUFS),
    "recv": (errno.ECONNRESET, errno.EINTR),
    "epoll": (errno.ENOSPC, errno.EMFILE),
    "inotify": (errno.EMFILE, errno.ENOSPC),
    "thread": (errno.EAGAIN,),
}
POD_CASES: Final = cases_of(POD_CALLS)
POD_CALLS_MAX: Final = 8
"""Number of calls of a kind that fail; the thread polls as long as it runs."""
POD_CLAIMS: Final = tuple(prepared_claim("gpus", device, pods=["u-1"]) for device in ("gpu-0", "gpu-1"))
POD_USES: Final = ({"u-1": ["gpu-0"]}, {"u-1": ["gpu-1"]})


@pytest.mark.parametrize(("call", "error"), POD_CASES)
def test_pod_tracker_with_a_failed_call_never_lies_and_recovers(
    library: Path,
    short_tmp: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    error: int,
) -> None:
    kubelet = Kubelet(short_tmp, capsys)
    kubelet.write_checkpoint(POD_CLAIMS[0])
    with kubelet.sockets(podresources_answer(), pods_answer(("u-1", ["gpus"]))):
        for name, value in CallOrder(short_tmp / "order").environ(library, kubelet.kubelet).items():
            monkeypatch.setenv(name, value)
        run_in_own_process(fail_calls_of_pod_tracker, short_tmp, call, error)


def fail_calls_of_pod_tracker(directory: str, call: str, error: str) -> None:
    """Fail the calls of a kind one after the other, each in another tracker from its start on."""
    tracker.RETRY_S = tracker.MIN_PAUSE_S = 0.05  # type: ignore[misc]
    pods_api.PAUSES_S = (0.05,)  # type: ignore[misc]
    uncaught: list[object] = []
    threading.excepthook = uncaught.append
    root, files = Path(directory), [Path(directory) / name for name in ("first", "second")]
    for file, claim in zip(files, POD_CLAIMS, strict=True):
        file.write_bytes(checkpoint([claim]))
    config = Config(
        node_name="node-1",
        cgroupfs_root=root / "cgroup",
        sysfs_root=root / "sys",
        runtime_dir=root / "run",
        state_dir=root / "state",
        kubelet_dir=root / "kubelet",
        pods_period_ns=NS,
        pods_audit_ns=0,
    )
    order = CallOrder(root / "order")
    for number in range(1, POD_CALLS_MAX + 1):
        where, opened = f"{call} {number}", len(descriptors())
        (root / "kubelet" / CLAIMS_FILE).write_bytes(files[0].read_bytes())
        pods = PodTracker(config, clock=read_clocks)
        order.give(call, number, int(error), thread=-threading.get_native_id())
        pods.start(lambda: None)
        until_uses(pods, [{}], POD_USES[0], where)
        shutil.copy(files[1], root / "new")
        (root / "new").replace(root / "kubelet" / CLAIMS_FILE)
        until_uses(pods, [POD_USES[0]], POD_USES[1], where)
        eventually(lambda pods=pods: pods.sample.names == {"u-1": "team-a/pod-u-1"}, f"{where}: its name")
        assert pods.stop(PATIENCE_S), where
        counted = order.withdraw()
        assert not uncaught, (where, uncaught)
        eventually(lambda opened=opened: len(descriptors()) <= opened, f"{where}: {opened} descriptors")
        if counted < number:
            assert number > 1, f"{call}: no call was intercepted"
            return


def until_uses(
    pods: PodTracker, before: list[dict[str, list[str]]], expected: dict[str, list[str]], where: str
) -> None:
    """Wait until the uses of devices are the expected ones and their source is OK; meanwhile those before."""

    def is_expected() -> bool:
        sample = pods.sample
        if sample is None:
            return False
        uses = {uid: [ref.device for ref in refs] for uid, refs in sample.uses.items()}
        assert uses == expected or uses in before, (where, sample)
        assert uses == expected or sample.source.state is not SourceState.OK or uses, (where, sample)
        return uses == expected and sample.source.state is SourceState.OK

    eventually(is_expected, lambda: f"{where}: {expected}: {pods.sample}")


# --- a driver that embeds drahealth ------------------------------------------------------------------------

DRIVER_CALLS: Final = {
    "open": (errno.EMFILE,),
    "read": (errno.EIO,),
    "write": (errno.ENOSPC,),
    "fsync": (errno.EIO,),
    "rename": (errno.ENOSPC,),
    "socket": (errno.EMFILE,),
    "listen": (errno.EADDRINUSE,),
    "setsockopt": (errno.ENOBUFS,),
    "accept": (errno.EMFILE,),
    "inotify": (errno.ENOSPC,),
}
"""Failed calls of a driver. Not transfers: grpcio, the fake kubelet's client, waits for a minute if a
connection is lost right after it was made."""
DRIVER_CASES: Final = cases_of(DRIVER_CALLS)
DRIVER_CALLS_MAX: Final = 8
"""Number of calls of a kind that fail in a driver, from its start on."""


@pytest.mark.parametrize(("call", "error"), DRIVER_CASES)
def test_driver_with_a_failed_call_ends_at_its_start_or_reports_a_fault(
    library: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    """A driver that ends is started again by the kubelet; one that runs must not stay without health."""
    for number in range(1, DRIVER_CALLS_MAX + 1):
        with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as name:
            root, mark = Path(name), Path(name) / "failed"
            for directory in ("plugins_registry", "claims", "held"):
                (root / directory).mkdir()
            sysfs = config_of(root)
            order = {
                "FAIL_CALL": f"{call}:{number}:{error}",
                "FAIL_BELOW": f"{root}/",
                "FAIL_MARK": str(mark),
            }
            with FakeKubelet(root, version="1.36", pace=Pace.fast()) as kubelet:
                with monkeypatch.context() as patch:
                    for variable, value in {"LD_PRELOAD": str(library), **order}.items():
                        patch.setenv(variable, value)
                    program = Program(root, "threaded_driver.py")
                with program as driver:
                    eventually(
                        partial(is_registered_or_over, kubelet, driver), f"{call} {number}: registered"
                    )
                    if kubelet.plugins:
                        kubelet.wait_health(PAGES, NODE, "pages-0", "Healthy")
                        pod = run_pod(kubelet, "a", "pages-0", PAGES)
                        kubelet.wait_running(pod)
                        sysfs.resize(4)
                        assert "mem.hugepages" in wait_for_pod_message(kubelet, pod, "Unhealthy")
                        code, _ = driver.end()
                        assert code == 0, driver.errors.read_text()
                        assert_nothing_left(root)
                    else:
                        assert driver.process.returncode == 1, driver.errors.read_text()
                        assert "Error: " in driver.errors.read_text()
            if not mark.exists():
                assert number > 1, f"{call}: no call was intercepted"
                return


def is_registered_or_over(kubelet: FakeKubelet, driver: Program) -> bool:
    """Return whether the kubelet has registered a driver, or its process has ended."""
    return bool(kubelet.plugins) or driver.process.poll() is not None
