"""The fake kubelet: its lives, and what outlives them."""

import queue
import random
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from patience import PATIENCE_S

from kubelet.calls import Calls
from kubelet.claims import ClaimInfo, ClaimInfos
from kubelet.events import Event, EventStore, Recorder
from kubelet.health import DeviceHealth, HealthCache
from kubelet.history import History, UnprepareFailed
from kubelet.pace import Clock, Pace
from kubelet.plugins import Plugin, Plugins
from kubelet.pods import Existing, Means, Pod, PodStatus, Worker
from kubelet.prepare import Preparer
from kubelet.registry import Registry
from kubelet.streams import HealthManager, HealthStream
from kubelet.versions import VERSIONS

T = TypeVar("T")


class FakeKubelet:
    """A kubelet as a DRA plugin meets it. It lives while it is entered.

    What the cluster has outlives it: pods and their sandboxes, ResourceClaims, events. So does its directory.
    Its own memory does not, and is made anew by :meth:`restart`.
    """

    def __init__(
        self,
        root: Path,
        *,
        version: str = "1.36",
        pace: Pace | None = None,
        health: bool | None = None,
        distrusts: bool = False,
        seed: int = 0,
    ) -> None:
        """
        Args:
            root: Its directory, ``/var/lib/kubelet``; made if it is not there.
            version: One of :data:`kubelet.versions.VERSIONS`.
            pace: Its durations; the real ones if none are given.
            health: The feature gate ResourceHealthStatus, if it is not to be as that version has it.
            distrusts: Refuses names and endpoints as kubelets after 1.37 will.
            seed: Of all that is random.
        """
        self.root = root
        self.version = VERSIONS[version]
        self.pace = pace if pace is not None else Pace()
        self.health_on = self.version.health_on if health is None else health
        self.distrusts = distrusts
        self.clock = Clock()
        """Of leases and events; a test may put it forward."""
        self.history = History()
        """Everything that it saw and did, over all its lives."""
        self.claims: dict[tuple[str, str], Mapping[str, Any]] = {}
        """ResourceClaim objects by namespace and name; see :meth:`add_claim`."""
        self.store = EventStore(self.clock.now_ns, self.history)
        self.pods: dict[str, Existing] = {}
        self.dice = random.Random(seed)
        self._life: _Life | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._life is not None:
            self.stop()

    # --- its life ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins a life."""
        assert self._life is None, "it runs already"
        self.root.mkdir(parents=True, exist_ok=True)
        self._life = _Life(self)

    def stop(self, *, graceful: bool = True) -> None:
        """Ends it. A crash differs in what it leaves behind: the health it knew of stays in its file."""
        life, self._life = self._alive, None
        life.end(graceful=graceful)

    def restart(self, *, graceful: bool = True) -> None:
        """Ends it and begins another."""
        self.stop(graceful=graceful)
        self.start()

    # --- the cluster ------------------------------------------------------------------------------------

    def add_claim(self, claim: Mapping[str, Any]) -> None:
        """A ResourceClaim object is in the API server; see :func:`kubelet.claims.allocated_claim`."""
        self.claims[claim["metadata"]["namespace"], claim["metadata"]["name"]] = claim

    def run_pod(self, pod: Pod) -> None:
        """A pod is bound to this node. Does not wait for anything."""
        existing = self.pods[pod.uid] = Existing(pod)
        if self._life is not None:
            self._life.follow(existing)

    def sync_pod(self, pod: Pod) -> None:
        """Something else happened to it: the kubelet looks at it, and so tries again what failed."""
        self._alive.workers[pod.uid].wake()

    def delete_pod(self, pod: Pod) -> None:
        """A user deletes it. While the kubelet is down it is gone at once; else once it is unprepared."""
        self.pods[pod.uid].deleted = True
        if self._life is None:
            del self.pods[pod.uid]
        else:
            self.sync_pod(pod)

    def pod_status(self, pod: Pod) -> PodStatus:
        """What the kubelet last wrote of it.

        Raises:
            KeyError: it is gone.
        """
        return self.pods[pod.uid].status

    @property
    def events(self) -> list[Event]:
        """Of pods: those that have not expired."""
        return self.store.all()

    def events_of(self, pod: Pod) -> list[Event]:
        """Of that pod."""
        return [event for event in self.events if event.pod == pod.uid]

    # --- what it knows ----------------------------------------------------------------------------------

    @property
    def plugins(self) -> list[Plugin]:
        """Those that are registered."""
        return self._alive.plugins.all()

    @property
    def cache(self) -> HealthCache:
        """What it believes of devices."""
        return self._alive.cache

    def health(self, driver: str, pool: str, device: str) -> DeviceHealth:
        """What it believes of a device, now."""
        return self.cache.get(driver, pool, device)

    def claim_info(self, name: str, namespace: str = "default") -> ClaimInfo | None:
        """What it has noted of a claim; None: nothing."""
        with self._alive.infos.locked() as infos:
            return infos.get((namespace, name))

    # --- calls at once, and waiting ---------------------------------------------------------------------

    def prepare_pod(self, pod: Pod) -> None:
        """Prepares its claims in this thread, once and without an event.

        Raises:
            ValueError: what the event would say behind "prepare dynamic resources".
        """
        existing = self.pods.setdefault(pod.uid, Existing(pod))
        self._alive.preparer.prepare(pod.uid, pod.namespace, pod.names)
        existing.sandbox = True

    def unprepare_pod(self, pod: Pod) -> None:
        """Unprepares them, likewise.

        Raises:
            ValueError: what went wrong.
        """
        self._alive.preparer.unprepare(pod.uid, pod.namespace, pod.names)
        self.pods.pop(pod.uid, None)

    def wait_for(self, claim: Callable[[], T], what: str, timeout_s: float = PATIENCE_S) -> T:
        """Returns what the claim gives once that is true.

        Raises:
            AssertionError: it did not come true in time.
        """
        return self.history.wait(claim, what, timeout_s)

    def wait_registered(self, driver: str, *, count: int = 1) -> list[Plugin]:
        """Returns the driver's plugins once there are so many, each of them connected and told so."""

        def registered() -> list[Plugin] | None:
            found = [plugin for plugin in self.plugins if plugin.driver == driver]
            told = self._alive.registry.registered()
            ready = all(one.connected and (driver, one.endpoint) in told for one in found)
            return found if ready and len(found) == count else None

        return self.wait_for(registered, f"{count} connected plugins of {driver}")

    def wait_health(self, driver: str, pool: str, device: str, health: str) -> DeviceHealth:
        """Returns what is believed of a device once that is so."""

        def so() -> DeviceHealth | None:
            found = self.health(driver, pool, device)
            return found if found.health == health else None

        return self.wait_for(so, f"{driver}/{pool}/{device} {health}")

    def wait_running(self, pod: Pod) -> PodStatus:
        """Returns the status of a pod once its claims are prepared."""

        def running() -> PodStatus | None:
            status = self.pod_status(pod)
            return status if status.phase == "Running" else None

        return self.wait_for(running, f"pod {pod.uid} running")

    def wait_gone(self, pod: Pod) -> None:
        """Returns once a deleted pod is unprepared and gone."""
        self.wait_for(lambda: pod.uid not in self.pods, f"pod {pod.uid} gone")

    @property
    def _alive(self) -> "_Life":
        assert self._life is not None, "it does not run"
        return self._life


class _Life:
    """One process of the kubelet."""

    def __init__(self, kubelet: FakeKubelet) -> None:
        self._kubelet = kubelet
        self._ended = threading.Event()
        self._calls = Calls()
        self.workers: dict[str, Worker] = {}
        self._all_workers: list[Worker] = []
        pace, history, now_ns = kubelet.pace, kubelet.history, kubelet.clock.now_ns
        self.infos = ClaimInfos(kubelet.root / "dra_manager_state")
        self.cache = HealthCache(kubelet.root / "dra_health_state", now_ns)
        self._manager = HealthManager(self.cache, self.infos, kubelet.version, history)
        self.plugins = Plugins(
            kubelet.root, self._calls, pace, history, self._open_stream, distrusts=kubelet.distrusts
        )
        dice = random.Random(kubelet.dice.random())
        self.preparer = Preparer(self.plugins, self.infos, kubelet.claims, history, dice)
        self._means = Means(
            preparer=self.preparer,
            infos=self.infos,
            cache=self.cache,
            recorder=Recorder(kubelet.store, now_ns),
            history=history,
            pace=pace,
            version=kubelet.version,
            health_on=kubelet.health_on,
            gone=self._gone,
        )
        self._threads = [
            threading.Thread(target=self._pass_on_updates, name="kubelet-updates", daemon=True),
            threading.Thread(target=self._seek_inactive, name="kubelet-inactive", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        for existing in list(kubelet.pods.values()):
            self.follow(existing)
        self.registry = Registry(kubelet.root / "plugins_registry", self.plugins, self._calls, pace, history)

    def follow(self, existing: Existing) -> None:
        """A pod gets its worker."""
        worker = Worker(existing, self._means, self._kubelet.dice.randrange(1 << 30))
        self.workers[existing.pod.uid] = worker
        self._all_workers.append(worker)

    def end(self, *, graceful: bool) -> None:
        """Ends all of it, the connections included."""
        self._manager.crashed = not graceful
        self._ended.set()
        for worker in self._all_workers:
            worker.end()
        self._calls.end()
        self.registry.end()
        self.plugins.end()
        with suppress(queue.Full):  # then nobody waits for more
            self._manager.updates.put_nowait(None)
        for thread in [*self._threads, *self._all_workers]:
            thread.join()

    def _open_stream(self, plugin: Plugin) -> HealthStream | None:
        kubelet = self._kubelet
        service = kubelet.version.health_service(plugin.advertised)
        if service is None or not kubelet.health_on:
            return None
        return HealthStream(plugin, service, self._manager, kubelet.version, kubelet.pace, kubelet.history)

    def _pass_on_updates(self) -> None:
        while not self._ended.is_set():
            for uid in self._manager.updates.get() or ():
                if worker := self.workers.get(uid):
                    worker.wake()

    def _seek_inactive(self) -> None:
        """Claims of pods that were deleted while there was no kubelet."""
        while not self._ended.wait(self._kubelet.pace.inactive_s):
            found: dict[tuple[str, str], list[str]] = {}
            with self.infos.locked() as infos:
                for (namespace, name), info in infos.items():
                    for pod in info.pods - self._kubelet.pods.keys():
                        found.setdefault((pod, namespace), []).append(name)
            for (pod, namespace), names in found.items():
                try:
                    self.preparer.unprepare(pod, namespace, names)
                except ValueError as error:
                    if not self._ended.is_set():
                        self._kubelet.history.add(UnprepareFailed(pod, str(error)))

    def _gone(self, pod: str) -> None:
        self.workers.pop(pod, None)
        self._kubelet.pods.pop(pod, None)
