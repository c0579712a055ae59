"""The fake kubelet: its processes, and the state that outlives each process."""

import queue
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from patience import PATIENCE_S

from kubelet.calls import Calls
from kubelet.claims import ClaimInfo, ClaimInfos
from kubelet.events import Event, EventStore, Recorder
from kubelet.health import DeviceHealth, HealthCache
from kubelet.history import History, UnprepareFailed
from kubelet.pace import Clock, Pace
from kubelet.plugins import Plugin, Plugins
from kubelet.pods import Pod, PodPreparer, PodRecord, PodStatus, Worker, WorkerContext
from kubelet.prepare import Preparer
from kubelet.registry import Registry
from kubelet.status import ResourceHealth, allocated_resources
from kubelet.streams import HealthManager, HealthStream
from kubelet.versions import VERSIONS

T = TypeVar("T")


class FakeKubelet:
    """A kubelet as a DRA plugin sees it. It runs inside a ``with`` block.

    Pods, their sandboxes, ResourceClaims, events and the kubelet's directory survive :meth:`restart`. The
    kubelet's memory does not.
    """

    def __init__(
        self,
        root: Path,
        *,
        version: str = "1.36",
        pace: Pace | None = None,
        health: bool | None = None,
        seed: int = 0,
    ) -> None:
        """Args:
        root: The kubelet's directory, ``/var/lib/kubelet``. It is created if missing.
        version: One of :data:`kubelet.versions.VERSIONS`.
        pace: The kubelet's durations. Default: those of the real kubelet.
        health: Overrides that version's default for the feature gate ResourceHealthStatus.
        seed: Seeds every random choice.
        """
        self.root = root
        self.version = VERSIONS[version]
        self.pace = pace if pace is not None else Pace()
        self.health_on = self.version.health_on if health is None else health
        self.clock = Clock()
        """Used for leases and events. A test may advance it."""
        self.history = History()
        """Everything that this kubelet observed and did, across restarts."""
        self.claims: dict[tuple[str, str], Mapping[str, Any]] = {}
        """ResourceClaim objects by namespace and name. :meth:`add_claim` adds one."""
        self.store = EventStore(self.clock.now_ns, self.history)
        self.pods: dict[str, PodRecord] = {}
        self.rng = random.Random(seed)
        self._process: KubeletProcess | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.stop()

    # --- start and stop ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the kubelet."""
        assert self._process is None, "the kubelet runs already"
        self.root.mkdir(parents=True, exist_ok=True)
        self._process = self._new_process()

    def stop(self, *, graceful: bool = True) -> None:
        """Stop the kubelet.

        Args:
            graceful: The cancelled streams clear the health file before the process ends. That is a race:
                of 16 real kubelets that got SIGTERM, one cleared it. After a crash (``False``) the file
                keeps the last known health.
        """
        process, self._process = self._running, None
        process.end(graceful=graceful)

    def restart(self, *, graceful: bool = True) -> None:
        """Stop the kubelet and start it again."""
        self.stop(graceful=graceful)
        self.start()

    # --- the cluster ------------------------------------------------------------------------------------

    def add_claim(self, condition: Mapping[str, Any]) -> None:
        """Add a ResourceClaim object to the API server. See :func:`kubelet.claims.allocated_claim`."""
        self.claims[condition["metadata"]["namespace"], condition["metadata"]["name"]] = condition

    def run_pod(self, pod: Pod) -> None:
        """Bind a pod to this node and return at once."""
        record = self.pods[pod.uid] = PodRecord(pod)
        if self._process is not None:
            self._process.start_worker(record)

    def sync_pod(self, pod: Pod) -> None:
        """Make the kubelet sync a pod now. The kubelet then retries what failed."""
        self._running.workers[pod.uid].wake()

    def delete_pod(self, pod: Pod) -> None:
        """Delete a pod. With the kubelet stopped the pod is gone at once, else after its unprepare."""
        self.pods[pod.uid].deleted = True
        if self._process is None:
            del self.pods[pod.uid]
        else:
            self.sync_pod(pod)

    def pod_status(self, pod: Pod) -> PodStatus:
        """Return the status that the kubelet wrote last.

        Raises:
            KeyError: the pod is gone.
        """
        return self.pods[pod.uid].status

    @property
    def events(self) -> list[Event]:
        """The pod events that have not expired."""
        return self.store.all()

    def events_of(self, pod: Pod) -> list[Event]:
        """Return the events of one pod."""
        return [event for event in self.events if event.pod == pod.uid]

    def pass_time(self, seconds: float) -> None:
        """Let leases and events grow older."""
        self.clock.advance(seconds)

    # --- the kubelet's state ----------------------------------------------------------------------------

    @property
    def plugins(self) -> list[Plugin]:
        """The registered plugins."""
        return list(self._running.plugins)

    @property
    def cache(self) -> HealthCache:
        """The cache of device health."""
        return self._running.cache

    def health(self, driver: str, pool: str, device: str) -> DeviceHealth:
        """Return the current health of a device."""
        return self.cache.get(driver, pool, device)

    def claim_info(self, name: str, namespace: str = "default") -> ClaimInfo | None:
        """Return the stored state of a claim, or None without one."""
        return self._running.claim_info(namespace, name)

    # --- direct calls, and waiting ----------------------------------------------------------------------

    def prepare_pod(self, pod: Pod) -> None:
        """Prepare a pod's claims once in this thread, without writing an event.

        Raises:
            ValueError: the text that an event would contain after "prepare dynamic resources".
        """
        record = self.pods.setdefault(pod.uid, PodRecord(pod))
        self._running.preparer.prepare(pod.uid, pod.namespace, pod.names)
        record.sandbox = True

    def unprepare_pod(self, pod: Pod) -> None:
        """Unprepare a pod's claims once in this thread.

        Raises:
            ValueError: the call failed.
        """
        self._running.preparer.unprepare(pod.uid, pod.namespace, pod.names)
        self.pods.pop(pod.uid, None)

    def wait_for(self, condition: Callable[[], T], event: str, timeout_s: float = PATIENCE_S) -> T:
        """Wait until a condition is true and return its value.

        Raises:
            AssertionError: the condition did not become true in time.
        """
        return self.history.wait(condition, event, timeout_s)

    def wait_registered(self, driver: str, *, count: int = 1) -> list[Plugin]:
        """Wait until a driver has that many plugins, each connected and notified of its registration."""

        def registered_plugins() -> list[Plugin] | None:
            found = [plugin for plugin in self.plugins if plugin.driver == driver]
            notified = self._running.notified_plugins()
            ready = all(plugin.connected and (driver, plugin.endpoint) in notified for plugin in found)
            return found if ready and len(found) == count else None

        return self.wait_for(registered_plugins, f"{count} connected plugins of {driver}")

    def wait_health(self, driver: str, pool: str, device: str, health: str) -> DeviceHealth:
        """Wait until a device has that health."""

        def matches() -> DeviceHealth | None:
            found = self.health(driver, pool, device)
            return found if found.health == health else None

        return self.wait_for(matches, f"{driver}/{pool}/{device} {health}")

    def wait_running(self, pod: Pod) -> PodStatus:
        """Wait until a pod's claims are prepared and return its status."""

        def running_status() -> PodStatus | None:
            status = self.pod_status(pod)
            return status if status.phase == "Running" else None

        return self.wait_for(running_status, f"pod {pod.uid} running")

    def wait_gone(self, pod: Pod) -> None:
        """Wait until a deleted pod is unprepared and gone."""
        self.wait_for(lambda: pod.uid not in self.pods, f"pod {pod.uid} gone")

    @property
    def _running(self) -> "KubeletProcess":
        assert self._process is not None, "the kubelet does not run"
        return self._process

    def _new_process(self) -> "KubeletProcess":
        return _FakeProcess(self)


class KubeletProcess(Protocol):
    """One process of the kubelet, as :class:`FakeKubelet` uses it."""

    workers: dict[str, Worker]

    @property
    def plugins(self) -> Sequence[Any]:
        """The registered plugins."""

    @property
    def cache(self) -> Any:
        """The cache of device health."""

    @property
    def preparer(self) -> PodPreparer:
        """Prepares claims in the caller's thread."""

    def notified_plugins(self) -> set[tuple[str, str]]:
        """Return driver and endpoint of each plugin that was notified of its registration."""

    def claim_info(self, namespace: str, name: str) -> ClaimInfo | None:
        """Return the stored state of a claim, or None without one."""

    def start_worker(self, record: PodRecord) -> None:
        """Start the worker of a pod."""

    def end(self, *, graceful: bool) -> None:
        """End the process and its workers."""


class _FakeProcess:
    """One process of the fake kubelet."""

    def __init__(self, kubelet: FakeKubelet) -> None:
        self._kubelet = kubelet
        self._ended = threading.Event()
        self._calls = Calls()
        self.workers: dict[str, Worker] = {}
        self._all_workers: list[Worker] = []
        pace, history, now_ns = kubelet.pace, kubelet.history, kubelet.clock.now_ns
        self.infos = ClaimInfos(kubelet.root / "dra_manager_state")
        self.cache = HealthCache(kubelet.root / "dra_health_state", now_ns, kubelet.version.device_limit)
        self._manager = HealthManager(self.cache, self.infos, kubelet.version, history)
        self._plugins = Plugins(
            kubelet.root,
            self._calls,
            pace,
            history,
            self._open_stream,
            validates_input=kubelet.version.validates_input,
        )
        rng = random.Random(kubelet.rng.random())
        self.preparer = Preparer(self._plugins, self.infos, kubelet.claims, history, kubelet.version, rng)
        self._context = WorkerContext(
            preparer=self.preparer,
            recorder=Recorder(kubelet.store, now_ns, pace),
            history=history,
            pace=pace,
            resources=self._resources,
            on_gone=self._remove_pod,
        )
        self._threads = [
            threading.Thread(target=self._forward_updates, name="kubelet-updates", daemon=True),
            threading.Thread(target=self._unprepare_deleted, name="kubelet-inactive", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        for record in list(kubelet.pods.values()):
            self.start_worker(record)
        self.registry = Registry(kubelet.root / "plugins_registry", self._plugins, self._calls, pace, history)

    @property
    def plugins(self) -> Sequence[Plugin]:
        """The registered plugins."""
        return self._plugins.all()

    def notified_plugins(self) -> set[tuple[str, str]]:
        """Return driver and endpoint of each plugin that was notified of its registration."""
        return self.registry.registered_plugins()

    def claim_info(self, namespace: str, name: str) -> ClaimInfo | None:
        """Return the stored state of a claim, or None without one."""
        with self.infos.lock_infos() as infos:
            return infos.get((namespace, name))

    def start_worker(self, record: PodRecord) -> None:
        """Start the worker of a pod."""
        worker = Worker(record, self._context, self._kubelet.rng.randrange(1 << 30))
        self.workers[record.pod.uid] = worker
        self._all_workers.append(worker)

    def end(self, *, graceful: bool) -> None:
        """Stop all threads and close all connections."""
        self._manager.crashed = not graceful
        self._ended.set()
        for worker in self._all_workers:
            worker.end()
        self._calls.end()
        self.registry.end()
        self._plugins.end()
        with suppress(queue.Full):  # a full queue: the updates thread is not blocked in get()
            self._manager.updates.put_nowait(None)
        for thread in [*self._threads, *self._all_workers]:
            thread.join()

    def _resources(self, pod: Pod) -> dict[str, dict[str, tuple[ResourceHealth, ...]]]:
        if not self._kubelet.health_on:
            return {}
        with self.infos.lock_infos() as infos:
            claims = {
                local_name: infos[pod.namespace, name]
                for local_name, name in pod.claims.items()
                if (pod.namespace, name) in infos
            }
            messages = self._kubelet.version.reads_message
            return {
                container: allocated_resources(uses, claims, self.cache, messages=messages)
                for container, uses in pod.containers.items()
                if uses
            }

    def _open_stream(self, plugin: Plugin) -> HealthStream | None:
        kubelet = self._kubelet
        service = kubelet.version.health_service(plugin.advertised)
        if service is None or not kubelet.health_on:
            return None
        return HealthStream(plugin, service, self._manager, kubelet.version, kubelet.pace, kubelet.history)

    def _forward_updates(self) -> None:
        while not self._ended.is_set():
            for uid in self._manager.updates.get() or ():
                if worker := self.workers.get(uid):
                    worker.wake()

    def _unprepare_deleted(self) -> None:
        """Unprepare the claims of pods that were deleted while the kubelet was stopped."""
        while not self._ended.wait(self._kubelet.pace.inactive_s):
            found: dict[tuple[str, str], list[str]] = {}
            with self.infos.lock_infos() as infos:
                for (namespace, name), info in infos.items():
                    for pod in info.pods - self._kubelet.pods.keys():
                        found.setdefault((pod, namespace), []).append(name)
            for (pod, namespace), names in found.items():
                try:
                    self.preparer.unprepare(pod, namespace, names)
                except ValueError as error:
                    if not self._ended.is_set():
                        self._kubelet.history.add(UnprepareFailed(pod, str(error)))

    def _remove_pod(self, pod: str) -> None:
        self.workers.pop(pod, None)
        self._kubelet.pods.pop(pod, None)
