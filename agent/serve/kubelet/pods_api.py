"""Pods of this Kubernetes node, from the kubelet's pods API: listed once, or watched.

The API exists from 1.36 on, behind the gate PodsAPI, which is on by default from 1.37 on. A static pod has
the UID of its configuration here, and mirror pods are not listed. A watcher must keep up: the kubelet ends
a stream that is a hundred events behind. So events are processed as they arrive.

Source: ``pods/v1alpha1/api.proto`` of k8s.io/kubelet; kubelet ``apis/pods/server.go`` as of 1.36 and 1.37.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final

from agent.config.config import PODS_API
from agent.model.claim_sources import Origin, Provenance, SourceAnswer
from agent.model.objects import Object
from agent.model.reading import Absence
from agent.model.time import Instant
from agent.serve.grpc.wire.reader import MessageShape, ShapeField, ValueKind, read_shape
from agent.serve.kubelet.api import NoAnswer, call_kubelet, stream_kubelet
from agent.system.threads.latest import Latest

# --- v1.Pod -------------------------------------------------------------------------------------------------
# Only the fields for the pod's use of claims, its CPU, memory and hugepages, and its state. Source:
# core/v1/generated.proto of k8s.io/api and meta/v1/generated.proto of k8s.io/apimachinery, 0.36 and 0.37.
# Field 3 of a node-allocatable status is of 1.36, 4 and 5 are of 1.37.

_OWNER: Final[MessageShape] = {
    1: ShapeField("kind"),
    3: ShapeField("name"),
    4: ShapeField("uid"),
    5: ShapeField("apiVersion"),
    6: ShapeField("controller", ValueKind.BOOL),
}
_METADATA: Final[MessageShape] = {
    1: ShapeField("name"),
    3: ShapeField("namespace"),
    5: ShapeField("uid"),
    8: ShapeField("creationTimestamp", ValueKind.TIME),
    9: ShapeField("deletionTimestamp", ValueKind.TIME),
    11: ShapeField("labels", is_map=True),
    12: ShapeField("annotations", is_map=True),
    13: ShapeField("ownerReferences", _OWNER, repeated=True),
}
_RESOURCES: Final[MessageShape] = {
    1: ShapeField("limits", ValueKind.QUANTITY, is_map=True),
    2: ShapeField("requests", ValueKind.QUANTITY, is_map=True),
    3: ShapeField("claims", {1: ShapeField("name"), 2: ShapeField("request")}, repeated=True),
}
_CONTAINER: Final[MessageShape] = {
    1: ShapeField("name"),
    8: ShapeField("resources", _RESOURCES),
    24: ShapeField("restartPolicy"),
}
_SPEC: Final[MessageShape] = {
    2: ShapeField("containers", _CONTAINER, repeated=True),
    10: ShapeField("nodeName"),
    20: ShapeField("initContainers", _CONTAINER, repeated=True),
    32: ShapeField("overhead", ValueKind.QUANTITY, is_map=True),
    39: ShapeField(
        "resourceClaims",
        {
            1: ShapeField("name"),
            3: ShapeField("resourceClaimName"),
            4: ShapeField("resourceClaimTemplateName"),
        },
        repeated=True,
    ),
    40: ShapeField("resources", _RESOURCES),
    43: ShapeField("schedulingGroup", {1: ShapeField("podGroupName")}),
}
_STATE: Final[MessageShape] = {
    1: ShapeField("waiting", {1: ShapeField("reason")}),
    2: ShapeField("running", {1: ShapeField("startedAt", ValueKind.TIME)}),
    3: ShapeField("terminated", {1: ShapeField("exitCode", ValueKind.INTEGER), 3: ShapeField("reason")}),
}
_CONTAINER_STATUS: Final[MessageShape] = {
    1: ShapeField("name"),
    2: ShapeField("state", _STATE),
    8: ShapeField("containerID"),
    10: ShapeField("allocatedResources", ValueKind.QUANTITY, is_map=True),
    11: ShapeField("resources", _RESOURCES),
}
_EXTENDED: Final[MessageShape] = {
    1: ShapeField(
        "requestMappings",
        {1: ShapeField("containerName"), 2: ShapeField("resourceName"), 3: ShapeField("requestName")},
        repeated=True,
    ),
    2: ShapeField("resourceClaimName"),
}
_NODE_ALLOCATABLE: Final[MessageShape] = {
    1: ShapeField("resourceClaimName"),
    2: ShapeField("containers", repeated=True),
    3: ShapeField("resources", ValueKind.QUANTITY, is_map=True),
    4: ShapeField(
        "mapping", {1: ShapeField("name"), 2: ShapeField("quantity", ValueKind.QUANTITY)}, repeated=True
    ),
    5: ShapeField(
        "overhead",
        {
            1: ShapeField("name"),
            2: ShapeField("perPod", ValueKind.QUANTITY),
            3: ShapeField("perContainer", ValueKind.QUANTITY),
        },
        repeated=True,
    ),
}
_STATUS: Final[MessageShape] = {
    1: ShapeField("phase"),
    7: ShapeField("startTime", ValueKind.TIME),
    8: ShapeField("containerStatuses", _CONTAINER_STATUS, repeated=True),
    9: ShapeField("qosClass"),
    10: ShapeField("initContainerStatuses", _CONTAINER_STATUS, repeated=True),
    15: ShapeField(
        "resourceClaimStatuses", {1: ShapeField("name"), 2: ShapeField("resourceClaimName")}, repeated=True
    ),
    18: ShapeField("extendedResourceClaimStatus", _EXTENDED),
    19: ShapeField("allocatedResources", ValueKind.QUANTITY, is_map=True),
    20: ShapeField("resources", _RESOURCES),
    21: ShapeField("nodeAllocatableResourceClaimStatuses", _NODE_ALLOCATABLE, repeated=True),
}
POD: Final[MessageShape] = {
    1: ShapeField("metadata", _METADATA),
    2: ShapeField("spec", _SPEC),
    3: ShapeField("status", _STATUS),
}


def read_pod(data: bytes) -> Mapping[str, object]:
    """Decode a v1.Pod message to an object as in its JSON.

    Raises:
        ValueError: The data are not a v1.Pod; names the place.
    """
    return {"apiVersion": "v1", "kind": "Pod", **read_shape(data, POD, "pod")}


# --- the API -----------------------------------------------------------------------------------------------

SOCKET: Final = PODS_API
"""Path of the socket in the kubelet's directory."""
LIST: Final = "/v1alpha1.Pods/ListPods"
WATCH: Final = "/v1alpha1.Pods/WatchPods"
PAUSES_S: Final = (1.0, 2.0, 5.0, 15.0, 30.0)
"""Pauses before each further attempt to watch; the last for all that follow [s]."""
SYNC_S: Final = 60.0
"""Time that the kubelet may take to send all pods of a new stream [s]."""
DEBOUNCE_S: Final = 0.1
"""Time for which events are collected before the pods are published [s]."""
INVALID_MAX: Final = 16

ADDED: Final = 1
MODIFIED: Final = 2
DELETED: Final = 3
INITIAL_SYNC_COMPLETE: Final = 4

_PODS: Final[MessageShape] = {1: ShapeField("pods", ValueKind.BYTES, repeated=True)}
_EVENT: Final[MessageShape] = {
    1: ShapeField("type", ValueKind.INTEGER),
    2: ShapeField("pod", ValueKind.BYTES),
}


async def list_pods(socket: Path, clock: Callable[[], Instant]) -> SourceAnswer[Object]:
    """Return the pods of this Kubernetes node as objects, or the reason why the pods are not known.

    Args:
        socket: :data:`SOCKET` in the kubelet's directory.
        clock: Clock for the time of the answer.
    """
    try:
        answer = read_shape(await call_kubelet(socket, LIST), _PODS, "the answer")
    except NoAnswer as error:
        return SourceAnswer(Provenance(Origin.PODS_API, clock()), (), error.absence, error.why)
    except ValueError as error:
        return SourceAnswer(
            Provenance(Origin.PODS_API, clock()), (), Absence.UNREADABLE, f"{socket}: {error}"
        )
    pods: list[Object] = []
    invalid: list[str] = []
    for number, data in enumerate(answer.get("pods", ())):
        try:
            pods.append(read_pod(data))
        except ValueError as error:
            invalid.append(f"pod {number}: {error}")
    return SourceAnswer(Provenance(Origin.PODS_API, clock()), tuple(pods), invalid=_limited(invalid))


class PodsWatch:
    """Watcher of the pods of this Kubernetes node, across restarts of the kubelet and streams that it ends.

    Each published answer is complete. Without a stream the last answer remains, with its time and the
    error. A new stream publishes nothing before all pods have arrived.
    """

    def __init__(
        self,
        socket: Path,
        latest: Latest[SourceAnswer[Object]],
        clock: Callable[[], Instant],
        changed: Callable[[], None] = lambda: None,
        pauses_s: Sequence[float] = PAUSES_S,
        sync_s: float = SYNC_S,
    ) -> None:
        """Create the watcher.

        Args:
            socket: :data:`SOCKET` in the kubelet's directory.
            latest: Receives the answers.
            clock: Clock for the time of an answer.
            changed: Called after an answer in which a pod was added, removed, or changed its phase.
            pauses_s: Pauses before each further attempt; at least one.
            sync_s: Timeout of the first complete answer of a stream.
        """
        self._socket = socket
        self._latest = latest
        self._clock = clock
        self._changed = changed
        self._pauses_s = pauses_s
        self._sync_s = sync_s
        self._pods: Mapping[str, Object] = {}
        self._provenance: Provenance | None = None
        self._synced = False
        self.is_current = False
        """Whether a stream has sent all pods, so that the newest answer is the current state."""

    async def run(self) -> None:
        """Watch the pods and publish them until cancelled."""
        failures = 0
        while True:
            self._synced = False
            try:
                await self._follow()
            except NoAnswer as error:
                self._publish_error(error.absence, error.why)
            except ValueError as error:
                self._publish_error(Absence.UNREADABLE, f"{self._socket}: {error}")
            except TimeoutError:
                why = f"{self._socket}: did not send all pods within {self._sync_s:g} s"
                self._publish_error(Absence.UNREADABLE, why)
            failures = 0 if self._synced else failures + 1
            await asyncio.sleep(self._pauses_s[min(failures, len(self._pauses_s) - 1)])

    async def _follow(self) -> None:
        """Process the events of one stream to its end. Raises NoAnswer, TimeoutError, or ValueError for a
        wrong event."""
        table: dict[str, Object] = {}
        invalid: list[str] = []
        pending: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()

        def publish() -> None:
            nonlocal pending
            pending = None
            self._publish(table, invalid)

        try:
            async with (
                asyncio.timeout(self._sync_s) as limit,
                aclosing(stream_kubelet(self._socket, WATCH)) as events,
            ):
                async for data in events:
                    event = read_shape(data, _EVENT, "the event")
                    kind = event.get("type", 0)
                    if kind == INITIAL_SYNC_COMPLETE:
                        self._synced = True
                        limit.reschedule(None)
                    elif kind in {ADDED, MODIFIED, DELETED}:
                        _apply(kind, event.get("pod", b""), table, invalid)
                    if self._synced and pending is None:
                        pending = loop.call_later(DEBOUNCE_S, publish)
        finally:
            if pending is not None:
                pending.cancel()
                self._publish(table, invalid)
            self.is_current = False

    def _publish(self, table: Mapping[str, Object], invalid: Iterable[str]) -> None:
        phases = _phases(self._pods)
        self._pods = dict(table)
        self._provenance = Provenance(Origin.PODS_API, self._clock())
        self._latest.publish(SourceAnswer(self._provenance, tuple(table.values()), invalid=_limited(invalid)))
        self.is_current = self._synced
        if _phases(self._pods) != phases:
            self._changed()

    def _publish_error(self, absence: Absence, why: str) -> None:
        """Publish the last answer with the error; if there is none, the reason of its absence."""
        if self._provenance is None:
            self._latest.publish(SourceAnswer(Provenance(Origin.PODS_API, self._clock()), (), absence, why))
        else:
            self._latest.publish(SourceAnswer(self._provenance, tuple(self._pods.values()), invalid=(why,)))


def _apply(kind: int, data: bytes, table: dict[str, Object], invalid: list[str]) -> None:
    """Apply one event to the table of pods. A deleted pod may have only names and UID."""
    try:
        pod = read_pod(data)
        uid = _uid(pod)
    except ValueError as error:
        invalid[INVALID_MAX - 1 :] = [f"an event: {error}"]
        return
    if kind == DELETED:
        table.pop(uid, None)
    else:
        table[uid] = pod


def _phases(pods: Mapping[str, Object]) -> Mapping[str, object]:
    status = {uid: pod.get("status") for uid, pod in pods.items()}
    return {
        uid: pod_status.get("phase") if isinstance(pod_status, Mapping) else None
        for uid, pod_status in status.items()
    }


def _uid(pod: Object) -> str:
    metadata = pod.get("metadata")
    uid = metadata.get("uid") if isinstance(metadata, Mapping) else None
    if not uid:
        raise ValueError("pod.metadata.uid: missing")
    return str(uid)


def _limited(invalid: Iterable[str]) -> tuple[str, ...]:
    errors = tuple(invalid)
    if len(errors) <= INVALID_MAX:
        return errors
    return (*errors[:INVALID_MAX], f"{len(errors) - INVALID_MAX} more")
