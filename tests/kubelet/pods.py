"""Pods: when the kubelet looks at one, and what it does then. Each has a worker that looks and rests.

Source: kubelet ``kubelet.go`` and ``pod_workers.go``. Left out: everything but claims. A pod runs as soon as
its claims are prepared, and its containers end at once when it is deleted.
"""

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kubelet.claims import ClaimInfo, ClaimInfos
from kubelet.events import Recorder
from kubelet.health import HealthCache
from kubelet.history import History, PodSynced, UnprepareFailed
from kubelet.pace import Pace
from kubelet.prepare import Preparer
from kubelet.status import ResourceHealth, allocated_resources
from kubelet.versions import Version

FAILED: Final = "FailedPrepareDynamicResources"


@dataclass(frozen=True, slots=True)
class Pod:
    """What a user asked for."""

    uid: str
    claims: Mapping[str, str]
    """ResourceClaims by the names that the pod gives them."""
    containers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What each container uses: ``<pod's name of a claim>`` or ``<that>/<request>``."""
    namespace: str = "default"

    @property
    def names(self) -> list[str]:
        """Of its ResourceClaims."""
        return list(self.claims.values())


@dataclass(frozen=True, slots=True)
class PodStatus:
    """What the kubelet last wrote of a pod. It is not written when something runs out, only when it looks."""

    phase: str = "Pending"
    resources: Mapping[str, Mapping[str, tuple[ResourceHealth, ...]]] = field(default_factory=dict)
    """``allocatedResourcesStatus`` of each container, by the name of the entry."""


@dataclass(slots=True)
class Existing:
    """A pod in the cluster; outlives the kubelet."""

    pod: Pod
    status: PodStatus = PodStatus()
    sandbox: bool = False
    """It has one: nothing is prepared for it any more."""
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class Means:
    """What a worker works with."""

    preparer: Preparer
    infos: ClaimInfos
    cache: HealthCache
    recorder: Recorder
    history: History
    pace: Pace
    version: Version
    health_on: bool
    gone: Callable[[str], None]
    """Called with the uid of a pod that has ended."""


class Worker:
    """Of one pod, in one life of the kubelet."""

    def __init__(self, existing: Existing, means: Means, seed: int) -> None:
        self._existing = existing
        self._means = means
        self._dice = random.Random(seed)
        self._wake = threading.Condition()
        self._news = True
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="kubelet-pod", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Something happened to the pod: it is looked at now, or once more when that has been done."""
        with self._wake:
            self._news = True
            self._wake.notify_all()

    def end(self) -> None:
        """With the kubelet."""
        with self._wake:
            self._ended = True
            self._wake.notify_all()

    def join(self) -> None:
        """Blocks until it has ended."""
        self._thread.join()

    def _run(self) -> None:
        rest_s = 0.0
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._news or self._ended, rest_s)
                if self._ended:
                    return
                self._news = False
            if not self._existing.deleted:
                self._sync()
                rest_s = self._dice.uniform(*self._means.pace.resync_s)
            elif self._terminate():
                return
            else:
                rest_s = self._dice.uniform(*self._means.pace.unprepare_retry_s)

    def _sync(self) -> None:
        pod, means = self._existing.pod, self._means
        if not self._existing.sandbox:
            try:
                means.preparer.prepare(pod.uid, pod.namespace, pod.names)
            except ValueError as error:
                if not self._ended:
                    text = f"Failed to prepare dynamic resources: prepare dynamic resources: {error}"
                    means.recorder.warn(pod.uid, FAILED, text)
            else:
                self._existing.sandbox = True
        if self._ended:
            return
        phase = "Running" if self._existing.sandbox else "Pending"
        self._existing.status = PodStatus(phase, self._resources() if means.health_on else {})
        means.history.add(PodSynced(pod.uid, phase))

    def _resources(self) -> dict[str, dict[str, tuple[ResourceHealth, ...]]]:
        pod, means = self._existing.pod, self._means
        with means.infos.locked() as infos:
            claims: dict[str, ClaimInfo] = {
                ours: infos[pod.namespace, name]
                for ours, name in pod.claims.items()
                if (pod.namespace, name) in infos
            }
            return {
                container: allocated_resources(
                    uses, claims, means.cache, messages=means.version.reads_message
                )
                for container, uses in pod.containers.items()
                if uses
            }

    def _terminate(self) -> bool:
        """Unprepares the pod's claims. Whether that is done."""
        pod, means = self._existing.pod, self._means
        try:
            means.preparer.unprepare(pod.uid, pod.namespace, pod.names)
        except ValueError as error:
            if not self._ended:
                means.history.add(UnprepareFailed(pod.uid, str(error)))  # a log line; no event
            return False
        means.gone(pod.uid)
        return True
