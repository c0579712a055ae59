"""Tracker of pods that use devices: on real files, sockets and inotify."""

import asyncio
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from agents import short_tmp
from audit_samples import CONTAINER, CONTAINER_KNOBS, kep_pod, sysfs_tree, systemd_path, v2_tree, write_cgroup
from cgroup_audit_pods import UID
from claim_samples import known_pod, listed_prepared, source_answers, use
from explain_node import Node as Kubelet
from explain_node import podresources_answer, pods_answer, prepared_claim, silent_servers
from hung_file import hung_file
from kubelet_files import DRIVER
from no_threads import no_threads
from patience import PATIENCE_S
from wire.kubelet_apis import ListingApi, WatchApi, event, message_class
from wire.kubelet_apis import pod as pod_bytes
from wire.serving import Serving, connections, descriptors, device, eventually, fail_once, report, unhealthy

from agent.config.config import Config
from agent.devices.consumers.consumer_map import build_consumer_map
from agent.devices.consumers.consumer_queries import with_embedding_drivers
from agent.model.claim import DeviceRef
from agent.model.consumers import ConsumerMap
from agent.model.device_usage import DeviceState
from agent.model.health import Blame, Cause, DeviceHealth, Health, Severity
from agent.model.reading import SourceState
from agent.model.report import Report
from agent.model.settings import HISTORY_FILE, UsageHistoryLimits
from agent.model.time import NS, Instant
from agent.node.pods.kubelet_watch import KubeletDirWatcher, PodList
from agent.node.pods.poller import AUDIT_DELAY_S, LINES_MAX, PodPoller, PodsSourceState, impact_lines
from agent.node.pods.tracker import MapRecorder, PodTracker
from agent.node.pods.usage_recorder import UsageRecorder
from agent.serve.agent_api.client import first_report
from agent.serve.kubelet import pods_api
from agent.sources import kubelet_files
from agent.store.history_file import HistoryContent, HistoryFile, read_history
from agent.system.threads.worker_threads import DISK_TIMEOUT_S, SOCKET_TIMEOUT_S, HungGuard, LatestJob
from agent.system.timing import read_clocks

__all__ = ["short_tmp"]
NODE: Final = "node-1"
LOGGERS: Final = ("agent.node.pods.", "agent.system.threads.")


def limit_answers(monkeypatch: pytest.MonkeyPatch, socket_s: float, disk_s: float) -> None:
    """Set the longest time that the tracker waits for sockets and disks [s]."""
    monkeypatch.setattr("agent.node.pods.queries.SOCKET_TIMEOUT_S", socket_s)
    monkeypatch.setattr("agent.node.pods.queries.DISK_TIMEOUT_S", disk_s)
    monkeypatch.setattr("agent.node.pods.kubelet_watch.DISK_TIMEOUT_S", disk_s)
    monkeypatch.setattr("agent.serve.kubelet.client.CALL_S", socket_s)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer of a busy machine is late. Tests of late answers set the limits of the product."""
    limit_answers(monkeypatch, 2 * PATIENCE_S, 2 * PATIENCE_S)
    monkeypatch.setitem(first_report.__kwdefaults__, "silence_s", PATIENCE_S)


def ref(name: str) -> DeviceRef:
    return DeviceRef(DRIVER, NODE, name)


def healthy(name: str, driver: str = DRIVER) -> DeviceHealth:
    return device(name, driver=driver, pool=NODE)


def unhealthy_device(name: str, driver: str = DRIVER, health: Health = Health.UNHEALTHY) -> DeviceHealth:
    cause = Cause("gpu.xid.79", Severity.UNHEALTHY, Blame.HARDWARE, "fell off", "replace it", read_clocks())
    return device(name, driver=driver, pool=NODE, health=health, severity=Severity.UNHEALTHY, causes=(cause,))


class RunningTracker:
    """Running tracker with a count of its wakes and its log lines."""

    def __init__(
        self, config: Config, log: pytest.LogCaptureFixture, record: MapRecorder | None = None
    ) -> None:
        self.tracker = PodTracker(config, clock=read_clocks, record=record)
        self.wakes = 0
        self._log = log

    def _wake(self) -> None:
        self.wakes += 1

    @contextmanager
    def run(self) -> Iterator[None]:
        self.tracker.start(self._wake)
        try:
            yield
        finally:
            assert self.tracker.stop(PATIENCE_S)

    @property
    def state(self) -> SourceState | None:
        sample = self.tracker.sample
        return sample.source.state if sample else None

    @property
    def detail(self) -> str:
        sample = self.tracker.sample
        return sample.source.detail if sample else ""

    @property
    def passes(self) -> int:
        sample = self.tracker.sample
        return sample.source.passes if sample else 0

    @property
    def uses(self) -> dict[str, list[str]]:
        sample = self.tracker.sample
        return (
            {uid: [entry.device for entry in found] for uid, found in sample.uses.items()} if sample else {}
        )

    @property
    def names(self) -> Mapping[str, str]:
        sample = self.tracker.sample
        return sample.names if sample else {}

    @property
    def lines(self) -> list[str]:
        return [record.message for record in self._log.records if record.name.startswith(LOGGERS)]

    def take(self, *devices: DeviceHealth) -> None:
        self.tracker.handle_report(report(devices))

    def until_uses(self, expected: dict[str, list[str]]) -> None:
        eventually(lambda: self.uses == expected, f"{expected} are used")

    def until_state(self, state: SourceState) -> None:
        eventually(lambda: self.state is state, f"the source is {state}")


@pytest.fixture
def kubelet(short_tmp: Path, capsys: pytest.CaptureFixture[str]) -> Kubelet:
    return Kubelet(short_tmp, capsys)


def config_of(kubelet: Kubelet, **changes: Any) -> Config:
    roots = {"cgroupfs_root": kubelet.root / "cgroup", "sysfs_root": kubelet.root / "sys"}
    places = {"runtime_dir": kubelet.run_dir, "state_dir": kubelet.state, "kubelet_dir": kubelet.kubelet}
    return Config(node_name=NODE, **{**roots, **places, **changes})


MakeTracker = Callable[..., RunningTracker]


@pytest.fixture
def make_tracker(kubelet: Kubelet, caplog: pytest.LogCaptureFixture) -> MakeTracker:
    caplog.set_level(logging.INFO, "agent")

    def make(record: MapRecorder | None = None, **changes: Any) -> RunningTracker:
        return RunningTracker(config_of(kubelet, **changes), caplog, record)

    return make


@pytest.fixture
def tracker(make_tracker: MakeTracker) -> Iterator[RunningTracker]:
    """Tracker on a node whose kubelet has prepared nothing yet."""
    made = make_tracker()
    with made.run():
        yield made


# --- uses of devices ---------------------------------------------------------------------------------


def test_claims_prepared_before_start_are_known(kubelet: Kubelet, make_tracker: MakeTracker) -> None:
    kubelet.write_checkpoint(prepared_claim("gpus", "gpu-0", "gpu-1", pods=["u-1"]))
    tracker = make_tracker()
    with tracker.run():
        tracker.until_uses({"u-1": ["gpu-0", "gpu-1"]})
        assert tracker.state is SourceState.OK


def test_claim_prepared_later_is_noticed_at_once(kubelet: Kubelet, make_tracker: MakeTracker) -> None:
    kubelet.write_checkpoint()
    tracker = make_tracker()
    with tracker.run():
        tracker.until_state(SourceState.OK)
        kubelet.write_checkpoint(prepared_claim("gpus", "gpu-0", pods=["u-1", "u-2"]))
        tracker.until_uses({"u-1": ["gpu-0"], "u-2": ["gpu-0"]})
        kubelet.write_checkpoint()
        tracker.until_uses({})


def test_pod_names_and_owners_come_from_any_source_that_has_them(
    kubelet: Kubelet, make_tracker: MakeTracker
) -> None:
    kubelet.write_checkpoint(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
    tracker = make_tracker()
    with kubelet.sockets(podresources_answer(), pods_answer(("u-1", ["gpus"]))), tracker.run():
        tracker.until_uses({"u-1": ["gpu-0"]})
        eventually(lambda: tracker.names == {"u-1": "team-a/pod-u-1"}, "its name is known")


def test_ended_pod_is_noticed_without_checkpoint_write(kubelet: Kubelet, make_tracker: MakeTracker) -> None:
    kubelet.write_checkpoint(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
    phases: list[str] = []

    def note(known: ConsumerMap, _report: Report, _now: Instant) -> None:
        phases.extend(view.known.phase for view in known.pods.values() if view.known)

    tracker = make_tracker(record=note)
    tracker.take(healthy("gpu-0"))
    with WatchApi(kubelet.kubelet / pods_api.SOCKET) as api, tracker.run():
        stream = api.stream()
        for wire_event in (event("ADDED", pod_bytes("u-1", claims=["gpus"])), event("INITIAL_SYNC_COMPLETE")):
            stream.put(wire_event)
        eventually(lambda: tracker.names == {"u-1": "team-a/pod-u-1"}, "its name is known")
        stream.put(event("MODIFIED", pod_bytes("u-1", claims=["gpus"], phase="Succeeded")))
        eventually(lambda: phases[-1:] == ["Succeeded"], "it has ended")


def test_reserved_claim_is_not_in_use(kubelet: Kubelet, make_tracker: MakeTracker) -> None:
    kubelet.write_checkpoint(
        prepared_claim("other", "gpu-0", pods=["u-1"]), prepared_claim("gpus", pods=["u-2"])
    )
    tracker = make_tracker()
    with kubelet.sockets(podresources_answer(), pods_answer(("u-2", ["gpus"]))), tracker.run():
        tracker.until_uses({"u-1": ["gpu-0"]})


def test_poll_without_change_does_not_wake_the_core(kubelet: Kubelet, make_tracker: MakeTracker) -> None:
    kubelet.write_checkpoint(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
    tracker = make_tracker(pods_period_ns=10**9)
    with tracker.run():
        tracker.until_uses({"u-1": ["gpu-0"]})
        eventually(lambda: tracker.wakes == 1, "the core is woken")
        passes = tracker.passes
        eventually(lambda: tracker.passes >= passes + 2, "two more polls")
        assert tracker.wakes == 1


QUIET_NODE: Final = """
import sys, time
from pathlib import Path
from agent.system.timing import read_clocks
from agent.config.config import Config
from agent.node.pods.tracker import PodTracker
watch = PodTracker(Config(node_name="n", kubelet_dir=Path(sys.argv[1])), clock=read_clocks)
before = set(sys.modules)
watch.start(lambda: None)
while watch.sample is None:
    time.sleep(0.01)
ended = watch.stop(60)
print(watch.sample.source.state, ended, sorted(name for name in set(sys.modules) - before))
"""


def test_node_without_kubelet_claims_imports_nothing(kubelet: Kubelet) -> None:
    command = [sys.executable, "-c", QUIET_NODE, str(kubelet.kubelet)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (done.stdout, done.stderr) == ("absent True []\n", "")


def test_replaced_kubelet_directory_is_followed(kubelet: Kubelet, make_tracker: MakeTracker) -> None:
    kubelet.write_checkpoint(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
    tracker = make_tracker()
    with tracker.run():
        tracker.until_uses({"u-1": ["gpu-0"]})
        kubelet.kubelet.rename(kubelet.root / "before")
        kubelet.kubelet.mkdir()
        tracker.until_uses({})
        kubelet.write_checkpoint(prepared_claim("gpus", "gpu-1", pods=["u-2"]))
        tracker.until_uses({"u-2": ["gpu-1"]})


def test_symbolic_link_to_directory_is_polled(tmp_path: Path) -> None:
    link = tmp_path / "kubelet"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()

    async def watch() -> list[bool]:
        link.symlink_to("a")
        watcher = KubeletDirWatcher(link, HungGuard(), lambda: None)
        changes = [await watcher.check_for_change(), watcher.is_watched, await watcher.check_for_change()]
        link.unlink()
        link.symlink_to("b")
        changes += [await watcher.check_for_change(), await watcher.check_for_change()]
        watcher.close()
        return changes

    assert asyncio.run(watch()) == [True, False, False, True, False]


def test_directory_that_epoll_cannot_watch_is_polled_and_watched_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's watches of epoll are used up for a moment (fs.epoll.max_user_watches)."""
    raised = fail_once(monkeypatch, asyncio.SelectorEventLoop, "add_reader")

    async def watch() -> list[bool]:
        with closing(KubeletDirWatcher(tmp_path, HungGuard(), lambda: None)) as watcher:
            changes = [await watcher.check_for_change(), watcher.is_watched]
            return [*changes, await watcher.check_for_change(), watcher.is_watched]

    before = inotifies()
    assert asyncio.run(watch()) == [True, False, False, True]
    assert raised
    assert inotifies() <= before


@contextmanager
def mount_ext4(root: Path, state: Path) -> Iterator[Path]:
    """File system that reuses the inode of a removed directory."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    image = state / "image"
    with image.open("wb") as file:
        file.truncate(8 << 20)
    root.mkdir()
    for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(root)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(done.stderr.strip())
    try:
        yield root
    finally:
        subprocess.run(["umount", "-l", root], check=True)


def made_again(path: Path) -> None:
    """Replace a directory by one with the same inode."""
    before = path.stat().st_ino
    path.rmdir()
    path.mkdir()
    assert path.stat().st_ino == before, "the inode is reused"


def test_new_directory_with_same_inode_is_watched_again(tmp_path: Path) -> None:
    async def watch(path: Path) -> tuple[bool, bool]:
        changed = asyncio.Event()
        with closing(KubeletDirWatcher(path, HungGuard(), changed.set)) as watcher:
            await watcher.check_for_change()
            made_again(path)
            async with asyncio.timeout(PATIENCE_S):
                await changed.wait()
                await watcher.check_for_change()
                changed.clear()
                os.close(os.open(path / "file", os.O_CREAT | os.O_WRONLY))
                await changed.wait()
            return watcher.is_watched, await watcher.check_for_change()

    with mount_ext4(tmp_path / "root", tmp_path) as root:
        kubelet = root / "kubelet"
        kubelet.mkdir()
        assert asyncio.run(watch(kubelet)) == (True, False)


def inotifies() -> set[str]:
    """Return this process's inotify descriptors."""
    return {number for number, what in descriptors() if what == "anon_inode:inotify"}


def test_stop_leaves_no_descriptor_open(kubelet: Kubelet, make_tracker: MakeTracker) -> None:
    kubelet.write_checkpoint()
    before = inotifies()
    with make_tracker().run():
        eventually(lambda: not inotifies() <= before, "something is watched")
    assert inotifies() <= before


# --- failures ---------------------------------------------------------------------------------------


def test_unreadable_directory_is_reported_and_retried(
    kubelet: Kubelet, make_tracker: MakeTracker, tmp_path: Path
) -> None:
    """No file system allows such a path."""
    tracker = make_tracker(kubelet_dir=tmp_path / ("k" * 256), pods_period_ns=10**9)
    with tracker.run():
        tracker.until_state(SourceState.FAILING)
        eventually(lambda: tracker.passes >= 2, "it goes on")
    assert "File name too long" in tracker.detail
    assert "mistake" not in tracker.detail


def test_internal_error_is_logged_once_and_polling_goes_on(
    kubelet: Kubelet, make_tracker: MakeTracker
) -> None:
    kubelet.write_checkpoint(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
    tracker = make_tracker(pods_period_ns=10**9)
    with tracker.run():
        devices = (unhealthy_device("gpu-0"),)
        tracker.tracker.handle_report(Report(NODE, read_clocks(), devices, declaring=None))  # type: ignore[arg-type]
        tracker.until_state(SourceState.FAILING)
        eventually(lambda: tracker.passes >= 6, "three polls")
        assert tracker.uses == {"u-1": ["gpu-0"]}
        tracker.take(unhealthy_device("gpu-0", health=Health.UNKNOWN))
        eventually(lambda: tracker.state is SourceState.OK and len(tracker.lines) == 2, "it goes on")
    assert tracker.lines[0] == "pod tracker: poll failed: internal error; the last known uses of devices stay"


def test_poll_without_free_thread_is_a_failure_and_no_bug(
    kubelet: Kubelet, make_tracker: MakeTracker
) -> None:
    kubelet.write_checkpoint(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
    tracker = make_tracker(pods_period_ns=10**9)
    with tracker.run():
        tracker.until_uses({"u-1": ["gpu-0"]})
        with no_threads():
            tracker.until_state(SourceState.FAILING)
            assert tracker.detail == "can't start new thread: dh-pods-file; will retry"
            assert tracker.uses == {"u-1": ["gpu-0"]}
        tracker.until_state(SourceState.OK)
    assert not [line for line in tracker.lines if "internal error" in line]


def test_query_without_free_thread_is_retried() -> None:
    async def ask() -> str:
        patience = HungGuard()
        with no_threads(), pytest.raises(RuntimeError):
            await patience.run("file", str, 1)
        return await patience.run("file", lambda: "read", PATIENCE_S)

    assert asyncio.run(ask()) == "read"


def test_recording_without_free_thread_is_retried() -> None:
    taken: list[int] = []
    handing = LatestJob(taken.append)
    with no_threads(), pytest.raises(RuntimeError):
        handing.submit(1)
    handing.submit(2)
    eventually(lambda: taken == [2], "the newest is taken")


def test_unreadable_checkpoint_keeps_last_known_uses(kubelet: Kubelet, make_tracker: MakeTracker) -> None:
    kubelet.write_checkpoint(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
    tracker = make_tracker()
    file = kubelet.kubelet / kubelet_files.CLAIMS_FILE
    with tracker.run():
        tracker.until_uses({"u-1": ["gpu-0"]})
        file.write_bytes(file.read_bytes()[:-20])  # half of the file
        tracker.until_state(SourceState.FAILING)
        assert tracker.detail.startswith(f"claims checkpoint {file}: is not JSON: ")
        assert tracker.uses == {"u-1": ["gpu-0"]}
        kubelet.write_checkpoint(prepared_claim("gpus", "gpu-1", pods=["u-1"]))
        tracker.until_uses({"u-1": ["gpu-1"]})
        assert tracker.state is SourceState.OK


def test_claims_above_the_limit_are_reported(
    kubelet: Kubelet, make_tracker: MakeTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubelet_files, "CLAIMS_MAX", 1)  # thousands of claims would take the test's time
    kubelet.write_checkpoint(
        *(prepared_claim(f"c-{number}", "gpu-0", pods=[f"u-{number}"]) for number in range(3))
    )
    tracker = make_tracker()
    file = kubelet.kubelet / kubelet_files.CLAIMS_FILE
    with tracker.run():
        tracker.until_uses({"u-0": ["gpu-0"]})
        assert (tracker.state, tracker.detail) == (
            SourceState.FAILING,
            f"claims checkpoint {file}: has 3 claims, of which 2 exceed a limit: 1 claims, 1048576 bytes of "
            "a claim, 131072 pods and devices of all claims; the pods of 2 claims are not known",
        )


def test_fifo_instead_of_checkpoint_does_not_block(kubelet: Kubelet, make_tracker: MakeTracker) -> None:
    file = kubelet.kubelet / kubelet_files.CLAIMS_FILE
    os.mkfifo(file)
    tracker = make_tracker()
    with tracker.run():
        tracker.until_state(SourceState.FAILING)
        assert tracker.detail == f"{file}: is not a regular file"


def test_hung_checkpoint_costs_only_its_own_answer(
    kubelet: Kubelet, make_tracker: MakeTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_answers(monkeypatch, SOCKET_TIMEOUT_S, DISK_TIMEOUT_S)
    held, before = threading.Event(), set(threading.enumerate())
    file = kubelet.kubelet / kubelet_files.CLAIMS_FILE
    file.touch()
    tracker = make_tracker(pods_period_ns=10**9)
    with ExitStack() as stack:
        try:
            stack.enter_context(hung_file(file, held.is_set))
        except OSError as error:
            pytest.skip(f"no FUSE, or nothing may be mounted: {error}")
        stack.enter_context(tracker.run())
        tracker.until_state(SourceState.FAILING)
        assert tracker.detail == f"{file}: no answer within 5 s"
        passes = tracker.passes
        eventually(lambda: tracker.passes >= passes + 2, "it is not waited for twice")

        def reading_threads() -> list[str]:
            return [
                thread.name for thread in set(threading.enumerate()) - before if thread.name == "dh-pods-file"
            ]

        # other files are read in such threads, too, but these threads end
        eventually(
            lambda: len(reading_threads()) == 1, lambda: f"one hung thread, not {len(reading_threads())}"
        )
        held.set()


def test_silent_pods_api_costs_only_pod_names(
    kubelet: Kubelet, make_tracker: MakeTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_answers(monkeypatch, SOCKET_TIMEOUT_S, 2 * PATIENCE_S)
    kubelet.write_checkpoint(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
    socket = kubelet.kubelet / pods_api.SOCKET
    tracker = make_tracker()
    with silent_servers(socket), tracker.run():
        tracker.until_uses({"u-1": ["gpu-0"]})
        assert (tracker.state, tracker.detail) == (
            SourceState.FAILING,
            f"{socket}: no answer within 2 s",
        )


def test_pod_names_stay_known_while_the_pods_api_is_absent(
    kubelet: Kubelet, make_tracker: MakeTracker
) -> None:
    """The tracker also has the name of a pod without devices, because a note may be about it."""
    kubelet.write_checkpoint()
    tracker = make_tracker()
    with ExitStack() as stack:
        with kubelet.sockets(podresources_answer(), pods_answer(("u-1", []), ("u-2", []))):
            stack.enter_context(tracker.run())
            eventually(lambda: len(tracker.names) == 2, "the names are known")
        kubelet.write_checkpoint(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
        tracker.until_uses({"u-1": ["gpu-0"]})
        assert tracker.names == {"u-1": "team-a/pod-u-1", "u-2": "team-a/pod-u-2"}
        with kubelet.sockets(podresources_answer(), pods_answer(("u-1", []))):
            kubelet.write_checkpoint()
            eventually(lambda: tracker.names == {"u-1": "team-a/pod-u-1"}, "a gone pod is forgotten")


def test_stop_is_immediate_while_sources_hang(kubelet: Kubelet, make_tracker: MakeTracker) -> None:
    kubelet.write_checkpoint()
    tracker = make_tracker(pods_period_ns=10**9)
    socket = kubelet.kubelet / pods_api.SOCKET
    with silent_servers(socket):
        tracker.tracker.start(lambda: None)
        eventually(lambda: connections(socket) == 2, "the list of pods is asked for, and the watch")
        assert tracker.tracker.stop(PATIENCE_S)  # half of the time that an answer may take here


def test_stop_before_start_returns_true(make_tracker: MakeTracker) -> None:
    assert make_tracker().tracker.stop(0)


def test_restarted_kubelet_is_followed(kubelet: Kubelet, make_tracker: MakeTracker) -> None:
    kubelet.write_checkpoint(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
    tracker = make_tracker(pods_period_ns=10**9)
    with tracker.run():
        for uid in ("u-2", "u-3"):
            with kubelet.sockets(podresources_answer(), pods_answer(("u-1", ["gpus"]), (uid, []))):
                eventually(lambda uid=uid: uid in tracker.names, "the pods API answers")  # type: ignore[misc]
            ended = tracker.passes + 2  # the next one may have begun before
            eventually(lambda ended=ended: tracker.passes >= ended, "it is gone")  # type: ignore[misc]
            assert tracker.names == {"u-1": "team-a/pod-u-1", uid: f"team-a/pod-{uid}"}
        tracker.until_uses({"u-1": ["gpu-0"]})


# --- affected pods -----------------------------------------------------------------------------------------


def pods_api_of_job(uid: str, claim: str, owner: str) -> Callable[[], Any]:
    """Return an answer of the pods API with a pod of a Job."""
    found = message_class("core", "Pod")()
    found.metadata.name, found.metadata.namespace, found.metadata.uid = "train-0", "team-a", uid
    found.metadata.ownerReferences.add(
        apiVersion="batch/v1", kind="Job", name=owner, uid="j-1", controller=True
    )
    found.spec.nodeName, found.status.phase = NODE, "Running"
    found.spec.resourceClaims.add(name="mine", resourceClaimName=claim)
    found.spec.containers.add(name="main", image="").resources.claims.add(name="mine")
    answer = message_class("v1alpha1", "ListPodsResponse")(pods=[found.SerializeToString()])
    return lambda: answer


def test_unhealthy_device_logs_its_pod_in_one_line(kubelet: Kubelet, make_tracker: MakeTracker) -> None:
    kubelet.write_checkpoint(prepared_claim("gpus", "gpu-3", pods=["u-1"]))
    tracker = make_tracker()
    with (
        kubelet.sockets(podresources_answer(), pods_api_of_job("u-1", "gpus", "train")),
        tracker.run(),
    ):
        tracker.take(healthy("gpu-3"), healthy("gpu-4"))
        tracker.until_uses({"u-1": ["gpu-3"]})
        eventually(lambda: tracker.names == {"u-1": "team-a/train-0"}, "its name is known")
        tracker.take(unhealthy_device("gpu-3"), unhealthy_device("gpu-4"))
        eventually(lambda: len(tracker.lines) == 1, "a line")
        tracker.take(healthy("gpu-3"), healthy("gpu-4"))
        eventually(lambda: len(tracker.lines) == 2, "another")
    name = f"{DRIVER}/{NODE}/gpu-3"
    who = "team-a/train-0 (Job train, claim team-a/gpus: container main)"
    assert tracker.lines == [
        f"{name} is Unhealthy (gpu.xid.79): affects {who}",
        f"{name} is Healthy again; used by {who}",
    ]


def test_ended_pod_is_not_affected() -> None:
    """Its claim is still prepared: the kubelet unprepares later."""
    over = known_pod("u-1", "claim-c", phase="Failed")
    for pods, lines in (([over], 0), ([], 1)):
        answers = source_answers(checkpoint=[listed_prepared("c", use("gpu-3"), pods=["u-1"])], pods_api=pods)
        assert (
            len(
                impact_lines(
                    build_consumer_map(answers), {ref("gpu-3"): unhealthy_device("gpu-3")}, {}
                ).not_healthy
            )
            == lines
        )


def test_device_of_served_driver_without_declarations_is_the_hosts(
    kubelet: Kubelet, make_tracker: MakeTracker
) -> None:
    kubelet.write_checkpoint(prepared_claim("gpus", "gpu-3", pods=["u-1"]))
    tracker = make_tracker(drivers=(DRIVER,))
    with tracker.run():
        tracker.take(unhealthy_device("gpu-3", driver=""))
        eventually(lambda: len(tracker.lines) == 1, "a line")
    line = f"{DRIVER}/{NODE}/gpu-3 is Unhealthy (gpu.xid.79): affects pod u-1 (claim team-a/gpus)"
    assert tracker.lines == [line]


def test_device_of_unserved_driver_is_not_the_hosts(kubelet: Kubelet, make_tracker: MakeTracker) -> None:
    kubelet.write_checkpoint(prepared_claim("gpus", "gpu-3", pods=["u-1"]))
    tracker = make_tracker()
    with tracker.run():
        tracker.take(unhealthy_device("gpu-3", driver=""))
        passes = tracker.passes
        eventually(lambda: tracker.passes > passes, "a round later")
    assert tracker.lines == []


def test_new_user_of_unhealthy_device_is_logged(kubelet: Kubelet, make_tracker: MakeTracker) -> None:
    kubelet.write_checkpoint()
    tracker = make_tracker()
    with tracker.run():
        tracker.take(unhealthy_device("gpu-3"))
        tracker.until_state(SourceState.OK)
        kubelet.write_checkpoint(prepared_claim("gpus", "gpu-3", pods=["u-1"]))
        eventually(lambda: len(tracker.lines) == 1, "a line")


def test_unhealthy_device_of_unused_claim_is_logged_once_used(
    kubelet: Kubelet, make_tracker: MakeTracker
) -> None:
    kubelet.write_checkpoint(prepared_claim("gpus", "gpu-3"))
    noted: list[object] = []
    tracker = make_tracker(lambda *what: noted.append(what))
    with tracker.run():
        tracker.take(unhealthy_device("gpu-3"))
        eventually(lambda: bool(noted), "a round with the report")
        assert tracker.lines == []
        kubelet.write_checkpoint(prepared_claim("gpus", "gpu-3", pods=["u-1"]))
        eventually(lambda: len(tracker.lines) == 1, "a line")


def test_changes_of_a_thousand_devices_are_limited_to_few_lines(
    kubelet: Kubelet, make_tracker: MakeTracker
) -> None:
    names = [f"gpu-{number}" for number in range(1000)]
    kubelet.write_checkpoint(*(prepared_claim(f"c-{name}", name, pods=[f"u-{name}"]) for name in names))
    tracker = make_tracker()
    with tracker.run():
        tracker.take(*map(unhealthy_device, names))
        eventually(lambda: bool(tracker.lines), "lines")
    assert len(tracker.lines) == LINES_MAX + 1
    assert (
        tracker.lines[-1]
        == f"{1000 - LINES_MAX} more devices in use have changed their health; run drahealth explain to see them"  # noqa: E501
    )


def test_many_pods_of_one_device_are_cut_to_few_names(kubelet: Kubelet, make_tracker: MakeTracker) -> None:
    kubelet.write_checkpoint(prepared_claim("gpus", "gpu-3", pods=[f"u-{number:02}" for number in range(16)]))
    tracker = make_tracker()
    with tracker.run():
        tracker.take(unhealthy_device("gpu-3"))
        eventually(lambda: bool(tracker.lines), "a line")
    assert tracker.lines[0].endswith("pod u-03 (claim team-a/gpus), and 12 more")


# --- drivers that embed drahealth --------------------------------------------------------------------------


@contextmanager
def embedding_driver(kubelet: Kubelet) -> Iterator[Serving]:
    """Serve the socket of a driver that embeds drahealth in the driver's plugin directory."""
    plugin = kubelet.kubelet / "plugins" / DRIVER
    (plugin / "drahealth").mkdir(parents=True, exist_ok=True)
    with Serving(kubelet.root / "e") as agent_server:
        (plugin / "dra.sock").symlink_to(agent_server.health)
        yield agent_server


def read_recorded(kubelet: Kubelet) -> HistoryContent:
    path = kubelet.state / HISTORY_FILE
    return read_history(path, wait_s=PATIENCE_S) if path.exists() else HistoryContent((), (), 0.0)


LOST = unhealthy("gpu-0", "gpu.xid.79: 1 time")._replace(pool=NODE)


@pytest.mark.parametrize("drivers", [(), (DRIVER,)])
def test_pod_evicted_for_a_device_of_an_embedding_driver_is_recorded(
    kubelet: Kubelet, make_tracker: MakeTracker, drivers: tuple[str, ...]
) -> None:
    """This holds, too, if the agent serves the driver's name and reports host devices under it."""
    kubelet.write_checkpoint(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
    history = HistoryFile(kubelet.state / HISTORY_FILE, UsageHistoryLimits())
    recorder = UsageRecorder(history, limits=UsageHistoryLimits(), drivers=drivers)
    tracker = make_tracker(recorder.record, drivers=drivers)
    with embedding_driver(kubelet) as driver, tracker.run():
        driver.publish(device("gpu-0", pool=NODE))
        tracker.take(healthy("cpu-node0", driver=""))
        healthy_use = [DeviceState(Health.HEALTHY, Severity.OK)]
        eventually(
            lambda: [use.state for use in read_recorded(kubelet).running] == healthy_use,
            "the use is recorded",
        )
        driver.publish(LOST)
        kubelet.write_checkpoint()
        eventually(lambda: bool(read_recorded(kubelet).ended), "the end is recorded")
    (use,) = read_recorded(kubelet).ended
    assert use.state == DeviceState(Health.UNHEALTHY, Severity.UNHEALTHY, "", LOST.message)


def test_driver_that_does_not_answer_keeps_its_logged_health(
    kubelet: Kubelet, make_tracker: MakeTracker
) -> None:
    kubelet.write_checkpoint(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
    noted: list[Report] = []
    tracker = make_tracker(lambda _known, report, _now: noted.append(report))
    with tracker.run():
        with embedding_driver(kubelet) as driver:
            driver.publish(LOST)
            tracker.take()
            eventually(lambda: len(tracker.lines) == 1, "a line")
        (kubelet.kubelet / "plugins" / DRIVER / "dra.sock").unlink()
        tracker.take(healthy("cpu-node0", driver=""))
        eventually(
            lambda: noted and [entry.device for entry in noted[-1].devices] == ["cpu-node0"],
            "the driver is away",
        )
        with embedding_driver(kubelet) as driver:
            driver.publish(device("gpu-0", pool=NODE))
            tracker.take()
            eventually(lambda: len(tracker.lines) == 2, "another line")
    name, pod = f"{DRIVER}/{NODE}/gpu-0", "pod u-1 (claim team-a/gpus)"
    assert tracker.lines == [
        f"{name} is Unhealthy: affects {pod}",
        f"{name} is Healthy again; used by {pod}",
    ]


def test_driver_without_a_used_device_is_not_read(kubelet: Kubelet, make_tracker: MakeTracker) -> None:
    kubelet.write_checkpoint()
    noted: list[Report] = []
    tracker = make_tracker(lambda _known, report, _now: noted.append(report))
    with embedding_driver(kubelet) as driver, tracker.run():
        driver.publish(LOST)
        tracker.take()
        eventually(lambda: bool(noted), "a poll with the report")
    assert noted[-1].devices == ()


def test_health_of_a_driver_replaces_an_unknown_verdict_only() -> None:
    unknown = healthy("gpu-0")._replace(health=Health.UNKNOWN, severity=Severity.UNKNOWN)
    of_agent = report([unknown, unhealthy_device("gpu-1"), healthy("cpu-node0", driver="")])
    sent = [device(name, pool=NODE) for name in ("gpu-0", "gpu-1", "gpu-2")]
    found = {device.key: device for device in with_embedding_drivers(of_agent, {DRIVER: sent}).devices}
    assert {key[2]: entry.health for key, entry in found.items()} == {
        "gpu-0": Health.HEALTHY,
        "gpu-1": Health.UNHEALTHY,
        "gpu-2": Health.HEALTHY,
        "cpu-node0": Health.HEALTHY,
    }
    assert [key[0] for key in found] == [DRIVER, DRIVER, "", DRIVER]


# --- recording ----------------------------------------------------------------------------------------


class Noted(NamedTuple):
    known: ConsumerMap
    report: Report
    now: Instant


def test_every_map_is_recorded_with_the_newest_report(kubelet: Kubelet, make_tracker: MakeTracker) -> None:
    kubelet.write_checkpoint(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
    noted: list[Noted] = []
    tracker = make_tracker(lambda *what: noted.append(Noted(*what)))
    with tracker.run():
        tracker.take(unhealthy_device("gpu-0"))
        eventually(lambda: bool(noted), "something is noted")
        tracker.take(healthy("gpu-0"))
        eventually(lambda: noted[-1].report.devices[0].health is Health.HEALTHY, "the newest is")
    assert ref("gpu-0") in noted[-1].known.devices


def test_hung_or_failing_recorder_does_not_stop_polling(kubelet: Kubelet, make_tracker: MakeTracker) -> None:
    let_go = threading.Event()
    entered: list[int] = []

    def record(*_: object) -> None:
        entered.append(threading.get_ident())
        let_go.wait()
        raise ValueError("a disk")

    kubelet.write_checkpoint(prepared_claim("gpus", "gpu-0", pods=["u-1"]))
    tracker = make_tracker(record)
    with tracker.run():
        try:
            tracker.take(unhealthy_device("gpu-0"))
            eventually(lambda: bool(tracker.lines), "a line")
            kubelet.write_checkpoint(prepared_claim("gpus", "gpu-1", pods=["u-1"]))
            tracker.until_uses({"u-1": ["gpu-1"]})
            assert len(entered) == 1
        finally:
            let_go.set()
        eventually(lambda: len(entered) >= 2, "the newest is handed over when it is back")
    assert any(line.startswith("history: uses of devices not recorded") for line in tracker.lines)


# --- audit of cgroups --------------------------------------------------------------------------------------


def its_pod(uid: str = UID, ident: str = CONTAINER) -> Any:
    """Return the pod of audit_samples.walk() as the pods API lists it."""
    found = message_class("core", "Pod")()
    found.metadata.name, found.metadata.namespace, found.metadata.uid = "p", "default", uid
    found.status.phase, found.status.qosClass = "Running", "Burstable"
    found.spec.resourceClaims.add(name="x", resourceClaimName="p-cpus")
    container = found.spec.containers.add(name="c1", image="")
    for resource, (request, limit) in {"cpu": ("2", "9"), "memory": ("2Gi", "9Gi")}.items():
        container.resources.requests[resource].string = request
        container.resources.limits[resource].string = limit
    state = found.status.containerStatuses.add(name="c1", containerID=f"containerd://{ident}")
    state.state.running.startedAt.seconds = 1_700_000_000
    return found


@contextmanager
def pods_api_listing(kubelet: Kubelet, pods: Sequence[Any]) -> Iterator[None]:
    """Serve the pods API, which lists these pods."""

    def answer() -> Any:
        return message_class("v1alpha1", "ListPodsResponse")(pods=[pod.SerializeToString() for pod in pods])

    with ListingApi(kubelet.kubelet / pods_api.SOCKET, pods_api.LIST, answer):
        yield


@pytest.fixture
def audited_kubelet(kubelet: Kubelet) -> Kubelet:
    """Node with a pod whose cgroups are below the expected allocation."""
    sysfs_tree(kubelet.root / "sys")
    v2_tree(kubelet.root / "cgroup", [kep_pod()], 274)
    write_cgroup(kubelet.root / "cgroup", systemd_path(UID), {"cpu.weight": 79})
    weak = {**CONTAINER_KNOBS, "cpu.weight": 79, "memory.max": 1 << 30}
    write_cgroup(kubelet.root / "cgroup", systemd_path(UID, CONTAINER), weak)
    return kubelet


def found_by(tracker: RunningTracker) -> list[tuple[str, str, str]]:
    sample = tracker.tracker.sample
    return (
        [(finding.pod_uid, finding.container, finding.code) for finding in sample.findings] if sample else []
    )


def test_cgroup_below_expected_allocation_is_found(
    audited_kubelet: Kubelet, make_tracker: MakeTracker
) -> None:
    tracker = make_tracker()
    with pods_api_listing(audited_kubelet, [its_pod()]), tracker.run():
        eventually(lambda: bool(found_by(tracker)), "a finding")
        assert found_by(tracker) == [(UID, "c1", "cgroup.lower")]
        assert tracker.tracker.sample is not None
        (found,) = tracker.tracker.sample.findings
    assert found.evidence.startswith("memory limit: 1Gi, expected at least 9Gi: ")


def test_reloaded_audit_interval_starts_and_ends_audits(
    audited_kubelet: Kubelet, make_tracker: MakeTracker
) -> None:
    tracker = make_tracker(pods_audit_ns=0, pods_period_ns=3600 * 10**9)
    with pods_api_listing(audited_kubelet, [its_pod()]), tracker.run():
        eventually(lambda: tracker.passes >= 1, "a poll")
        tracker.tracker.reconfigure(config_of(audited_kubelet, pods_audit_ns=10 * 10**9))
        eventually(lambda: bool(found_by(tracker)), "a finding, without the wait for an hour")
        tracker.tracker.reconfigure(config_of(audited_kubelet, pods_audit_ns=0))
        eventually(lambda: not found_by(tracker), "no audit would end it")


def test_findings_of_removed_pod_are_dropped(audited_kubelet: Kubelet, make_tracker: MakeTracker) -> None:
    tracker, pods = make_tracker(pods_period_ns=10**9), [its_pod()]
    with pods_api_listing(audited_kubelet, pods), tracker.run():
        eventually(lambda: bool(found_by(tracker)), "a finding")
        pods.clear()
        eventually(lambda: not found_by(tracker), "it is forgotten")


def test_findings_stay_while_pods_api_is_unreadable(
    audited_kubelet: Kubelet, make_tracker: MakeTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = make_tracker(pods_period_ns=10**9)
    with ExitStack() as stack:
        with pods_api_listing(audited_kubelet, [its_pod()]):
            stack.enter_context(tracker.run())
            eventually(lambda: bool(found_by(tracker)), "a finding")
        limit_answers(monkeypatch, SOCKET_TIMEOUT_S, 2 * PATIENCE_S)
        with deaf_again(audited_kubelet.kubelet / pods_api.SOCKET):
            tracker.until_state(SourceState.FAILING)
            assert found_by(tracker) == [(UID, "c1", "cgroup.lower")]


@contextmanager
def deaf_again(socket: Path) -> Iterator[None]:
    """MakeTracker a used socket never answer."""
    socket.unlink(missing_ok=True)
    with silent_servers(socket):
        yield


def test_audit_without_pods_api_is_skipped_with_detail(kubelet: Kubelet, make_tracker: MakeTracker) -> None:
    kubelet.write_checkpoint()
    tracker = make_tracker()
    with tracker.run():
        tracker.until_state(SourceState.OK)
    socket = kubelet.kubelet / pods_api.SOCKET
    assert tracker.detail == f"cgroups are not audited: {socket}: no such socket"


def test_audit_disabled_in_configuration_is_not_run(
    audited_kubelet: Kubelet, make_tracker: MakeTracker
) -> None:
    tracker = make_tracker(pods_audit_ns=0, pods_period_ns=10**9)
    with pods_api_listing(audited_kubelet, [its_pod()]), tracker.run():
        eventually(lambda: tracker.passes >= 2, "two polls")
        assert (found_by(tracker), tracker.detail) == ([], "")


class Clock:
    """Clock that only the test advances."""

    def __init__(self) -> None:
        self._began = read_clocks()
        self.later_s = 0.0

    def __call__(self) -> Instant:
        return Instant(self._began.mono_ns + int(self.later_s * NS), self._began.wall_s + self.later_s)


def poller_of(config: Config, clock: Clock) -> PodPoller:
    return PodPoller(config, clock, HungGuard(), PodList(config.kubelet_dir, clock, lambda: None))


async def polled_and_audited(poller: PodPoller) -> PodsSourceState:
    await poller.poll(None)
    found = await poller.audit_if_due(None)
    assert found is not None, "it was time for an audit"
    return found


def test_quiet_pod_is_audited_again_soon(audited_kubelet: Kubelet) -> None:
    pod, clock = its_pod(), Clock()
    pod.status.containerStatuses[0].state.running.startedAt.seconds = int(clock().wall_s) - 5
    with pods_api_listing(audited_kubelet, [pod]):
        poller = poller_of(config_of(audited_kubelet), clock)
        first = asyncio.run(polled_and_audited(poller))
        assert poller.next_due_in_s() == AUDIT_DELAY_S
        clock.later_s = AUDIT_DELAY_S
        second = asyncio.run(polled_and_audited(poller))
        assert poller.next_due_in_s() == 60
    assert [len(entry.uses[2]) for entry in (first, second) if entry.uses] == [0, 1]


def test_audit_follows_the_start_of_a_container_not_of_its_pod(audited_kubelet: Kubelet) -> None:
    pods, clock = [its_pod()], Clock()
    with pods_api_listing(audited_kubelet, pods):
        poller = poller_of(config_of(audited_kubelet, pods_period_ns=3600 * NS), clock)
        asyncio.run(polled_and_audited(poller))
        assert poller.next_due_in_s() == 300
        clock.later_s = 100
        pods.append(its_pod("another", "e" * 64))
        (container,) = pods[1].status.containerStatuses
        container.ClearField("state")
        asyncio.run(poller.poll(None))
        assert poller.next_due_in_s() == 200, "the image is still pulled"
        clock.later_s = 150
        container.state.running.startedAt.seconds = int(clock().wall_s)
        asyncio.run(poller.poll(None))
        assert poller.next_due_in_s() == AUDIT_DELAY_S
        clock.later_s = 150 + AUDIT_DELAY_S
        asyncio.run(polled_and_audited(poller))
        asyncio.run(poller.poll(None))
        assert poller.next_due_in_s() == 300


def test_pod_with_a_prepared_claim_for_an_extended_resource_is_audited(audited_kubelet: Kubelet) -> None:
    pod, clock = its_pod(), Clock()
    pod.spec.ClearField("resourceClaims")
    audited_kubelet.write_checkpoint(prepared_claim("c", "gpu-0", pods=[UID]))
    with pods_api_listing(audited_kubelet, [pod]):
        poller = poller_of(config_of(audited_kubelet, pods_period_ns=3600 * NS), clock)
        state = asyncio.run(polled_and_audited(poller))
        assert poller.next_due_in_s() == 300
    assert state.uses
    assert [use.code for use in state.uses[2]] == ["cgroup.lower"]


def test_overdue_audit_does_not_shorten_wait_for_pods_api(
    audited_kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    poller = poller_of(config_of(audited_kubelet), clock)
    with pods_api_listing(audited_kubelet, [its_pod()]):
        asyncio.run(polled_and_audited(poller))
    clock.later_s = 600
    limit_answers(monkeypatch, SOCKET_TIMEOUT_S, 2 * PATIENCE_S)
    with deaf_again(audited_kubelet.kubelet / pods_api.SOCKET):
        asyncio.run(poller.poll(None))
        assert asyncio.run(poller.audit_if_due(None)) is None
    assert poller.next_due_in_s() == 60


def test_findings_stay_while_kubelet_restarts_until_next_audit(
    audited_kubelet: Kubelet,
) -> None:
    audited_kubelet.write_checkpoint()
    clock, found = Clock(), []
    poller = poller_of(config_of(audited_kubelet), clock)
    with pods_api_listing(audited_kubelet, [its_pod()]):
        asyncio.run(polled_and_audited(poller))
    assert not (audited_kubelet.kubelet / pods_api.SOCKET).exists()
    for later_s in (0, 299, 300):
        clock.later_s = later_s
        outcome = asyncio.run(poller.poll(None))
        assert outcome.uses
        found.append([use.code for use in outcome.uses[2]])
        assert asyncio.run(poller.audit_if_due(None)) is None
    assert found == [["cgroup.lower"], ["cgroup.lower"], []]
