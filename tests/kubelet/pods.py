"""Syncs of pods: their times and their actions. Each pod has a worker thread.

It follows kubelet ``kubelet.go`` and ``pod_workers.go`` for claims only. A pod runs as soon as its claims
are prepared, and its containers end at once when it is deleted.
"""

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kubelet.history import History, PodSynced, UnprepareFailed
from kubelet.pace import Pace
from kubelet.status import ResourceHealth

FAILED: Final = "FailedPrepareDynamicResources"


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod as the API server has it."""

    uid: str
    claims: Mapping[str, str]
    """ResourceClaims by the pod's local names for them."""
    containers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The claims that each container uses: ``<local name>`` or ``<local name>/<request>``."""
    namespace: str = "default"

    @property
    def names(self) -> list[str]:
        """The names of the pod's ResourceClaims."""
        return list(self.claims.values())


@dataclass(frozen=True, slots=True)
class PodStatus:
    """The status that the kubelet wrote last. An expired lease changes it only at the next sync."""

    phase: str = "Pending"
    resources: Mapping[str, Mapping[str, tuple[ResourceHealth, ...]]] = field(default_factory=dict)
    """``allocatedResourcesStatus`` of each container, by the entry's name."""


@dataclass(slots=True)
class PodRecord:
    """A pod in the cluster. It survives a restart of the kubelet."""

    pod: Pod
    status: PodStatus = PodStatus()
    sandbox: bool = False
    """Whether the pod has a sandbox. The kubelet prepares no claims for it any more then."""
    deleted: bool = False


class PodPreparer(Protocol):
    """Interface that prepares and unprepares the claims of a pod, by UID, namespace and claim names.

    Each method raises ValueError with the kubelet's text, without its prefix "prepare dynamic resources".
    """

    def prepare(self, pod: str, namespace: str, claims: Sequence[str]) -> None: ...

    def unprepare(self, pod: str, namespace: str, claims: Sequence[str]) -> None: ...


class EventRecorder(Protocol):
    """Interface that records a Warning event for a pod: its UID, the reason and the message."""

    def warn(self, pod: str, reason: str, message: str) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The objects that every worker uses."""

    preparer: PodPreparer
    recorder: EventRecorder
    history: History
    pace: Pace
    resources: Callable[[Pod], Mapping[str, Mapping[str, tuple[ResourceHealth, ...]]]]
    """Returns ``allocatedResourcesStatus`` of a pod's containers."""
    on_gone: Callable[[str], None]
    """Called with the uid of a pod that has ended."""


class Worker:
    """Worker that syncs one pod while one kubelet process runs."""

    def __init__(self, record: PodRecord, context: WorkerContext, seed: int) -> None:
        self._record = record
        self._context = context
        self._rng = random.Random(seed)
        self._wake = threading.Condition()
        self._pending = True
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="kubelet-pod", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Sync the pod now, or once more after a running sync."""
        with self._wake:
            self._pending = True
            self._wake.notify_all()

    def end(self) -> None:
        """End the worker when the kubelet stops."""
        with self._wake:
            self._ended = True
            self._wake.notify_all()

    def join(self) -> None:
        """Wait until the worker has ended."""
        self._thread.join()

    def _run(self) -> None:
        wait_s = 0.0
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._pending or self._ended, wait_s)
                if self._ended:
                    return
                self._pending = False
            if not self._record.deleted:
                self._sync()
                wait_s = self._rng.uniform(*self._context.pace.resync_s)
            elif self._terminate():
                return
            else:
                wait_s = self._rng.uniform(*self._context.pace.unprepare_retry_s)

    def _sync(self) -> None:
        pod, context = self._record.pod, self._context
        if not self._record.sandbox:
            try:
                context.preparer.prepare(pod.uid, pod.namespace, pod.names)
            except ValueError as error:
                if not self._ended:
                    text = f"Failed to prepare dynamic resources: prepare dynamic resources: {error}"
                    context.recorder.warn(pod.uid, FAILED, text)
            else:
                self._record.sandbox = True
        if self._ended:
            return
        phase = "Running" if self._record.sandbox else "Pending"
        self._record.status = PodStatus(phase, context.resources(pod))
        context.history.add(PodSynced(pod.uid, phase))

    def _terminate(self) -> bool:
        """Unprepare the pod's claims and return whether that succeeded."""
        pod, context = self._record.pod, self._context
        try:
            context.preparer.unprepare(pod.uid, pod.namespace, pod.names)
        except ValueError as error:
            if not self._ended:
                context.history.add(UnprepareFailed(pod.uid, str(error)))  # the kubelet only logs it
            return False
        context.on_gone(pod.uid)
        return True
