"""Client of the kubelet's pods API: lists or watches the pods of this Kubernetes node.

Kubernetes has the API since 1.36, with the feature gate PodsAPI, which is on by default since 1.37. A static
pod has the UID of its configuration; mirror pods are not listed. The kubelet ends a stream whose reader is a
hundred events behind. From 1.38 on it also limits the rate of new streams, with RESOURCE_EXHAUSTED: the watch
then waits as after any failure, and the agent lists the pods meanwhile.

Source: ``pods/v1alpha1/api.proto`` of k8s.io/kubelet; kubelet ``apis/pods/server.go`` as of 1.36 and 1.37.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final

from agent.config.config import PODS_API
from agent.model.claim_sources import Origin, Provenance, SourceAnswer
from agent.model.json_values import JsonObject
from agent.model.reading import Absence
from agent.model.time import Instant
from agent.serve.grpc.wire import FieldType, MessageSchema, SchemaField, read_by_schema
from agent.serve.kubelet.client import KubeletCallFailed, call_kubelet, stream_kubelet
from agent.system.threads.latest_value import LatestValue

# --- v1.Pod -------------------------------------------------------------------------------------------------
# Only the fields for claims, CPU, memory, hugepages and the state of a pod. Source:
# core/v1/generated.proto of k8s.io/api and meta/v1/generated.proto of k8s.io/apimachinery, 0.36 and 0.37.
# Field 3 of a node-allocatable status is of 1.36, 4 and 5 are of 1.37.

_OWNER: Final[MessageSchema] = {
    1: SchemaField("kind"),
    3: SchemaField("name"),
    4: SchemaField("uid"),
    5: SchemaField("apiVersion"),
    6: SchemaField("controller", FieldType.BOOL),
}
_METADATA: Final[MessageSchema] = {
    1: SchemaField("name"),
    3: SchemaField("namespace"),
    5: SchemaField("uid"),
    7: SchemaField("generation", FieldType.INTEGER),
    8: SchemaField("creationTimestamp", FieldType.TIME),
    9: SchemaField("deletionTimestamp", FieldType.TIME),
    11: SchemaField("labels", is_map=True),
    12: SchemaField("annotations", is_map=True),
    13: SchemaField("ownerReferences", _OWNER, repeated=True),
}
_RESOURCES: Final[MessageSchema] = {
    1: SchemaField("limits", FieldType.QUANTITY, is_map=True),
    2: SchemaField("requests", FieldType.QUANTITY, is_map=True),
    3: SchemaField("claims", {1: SchemaField("name"), 2: SchemaField("request")}, repeated=True),
}
_CONTAINER: Final[MessageSchema] = {
    1: SchemaField("name"),
    8: SchemaField("resources", _RESOURCES),
    24: SchemaField("restartPolicy"),
}
_SPEC: Final[MessageSchema] = {
    2: SchemaField("containers", _CONTAINER, repeated=True),
    10: SchemaField("nodeName"),
    20: SchemaField("initContainers", _CONTAINER, repeated=True),
    24: SchemaField("priorityClassName"),
    25: SchemaField("priority", FieldType.INTEGER),
    32: SchemaField("overhead", FieldType.QUANTITY, is_map=True),
    39: SchemaField(
        "resourceClaims",
        {
            1: SchemaField("name"),
            3: SchemaField("resourceClaimName"),
            4: SchemaField("resourceClaimTemplateName"),
        },
        repeated=True,
    ),
    40: SchemaField("resources", _RESOURCES),
    43: SchemaField("schedulingGroup", {1: SchemaField("podGroupName")}),
}
_STATE: Final[MessageSchema] = {
    1: SchemaField("waiting", {1: SchemaField("reason")}),
    2: SchemaField("running", {1: SchemaField("startedAt", FieldType.TIME)}),
    3: SchemaField("terminated", {1: SchemaField("exitCode", FieldType.INTEGER), 3: SchemaField("reason")}),
}
_CONTAINER_STATUS: Final[MessageSchema] = {
    1: SchemaField("name"),
    2: SchemaField("state", _STATE),
    8: SchemaField("containerID"),
    10: SchemaField("allocatedResources", FieldType.QUANTITY, is_map=True),
    11: SchemaField("resources", _RESOURCES),
}
_EXTENDED: Final[MessageSchema] = {
    1: SchemaField(
        "requestMappings",
        {1: SchemaField("containerName"), 2: SchemaField("resourceName"), 3: SchemaField("requestName")},
        repeated=True,
    ),
    2: SchemaField("resourceClaimName"),
}
_NODE_ALLOCATABLE: Final[MessageSchema] = {
    1: SchemaField("resourceClaimName"),
    2: SchemaField("containers", repeated=True),
    3: SchemaField("resources", FieldType.QUANTITY, is_map=True),
    4: SchemaField(
        "mapping", {1: SchemaField("name"), 2: SchemaField("quantity", FieldType.QUANTITY)}, repeated=True
    ),
    5: SchemaField(
        "overhead",
        {
            1: SchemaField("name"),
            2: SchemaField("perPod", FieldType.QUANTITY),
            3: SchemaField("perContainer", FieldType.QUANTITY),
        },
        repeated=True,
    ),
}
_CONDITION: Final[MessageSchema] = {
    1: SchemaField("type"),
    2: SchemaField("status"),
    4: SchemaField("lastTransitionTime", FieldType.TIME),
    5: SchemaField("reason"),
}
_STATUS: Final[MessageSchema] = {
    1: SchemaField("phase"),
    2: SchemaField("conditions", _CONDITION, repeated=True),
    7: SchemaField("startTime", FieldType.TIME),
    8: SchemaField("containerStatuses", _CONTAINER_STATUS, repeated=True),
    9: SchemaField("qosClass"),
    10: SchemaField("initContainerStatuses", _CONTAINER_STATUS, repeated=True),
    15: SchemaField(
        "resourceClaimStatuses", {1: SchemaField("name"), 2: SchemaField("resourceClaimName")}, repeated=True
    ),
    17: SchemaField("observedGeneration", FieldType.INTEGER),
    18: SchemaField("extendedResourceClaimStatus", _EXTENDED),
    19: SchemaField("allocatedResources", FieldType.QUANTITY, is_map=True),
    20: SchemaField("resources", _RESOURCES),
    21: SchemaField("nodeAllocatableResourceClaimStatuses", _NODE_ALLOCATABLE, repeated=True),
}
POD_SCHEMA: Final[MessageSchema] = {
    1: SchemaField("metadata", _METADATA),
    2: SchemaField("spec", _SPEC),
    3: SchemaField("status", _STATUS),
}


def decode_pod(data: bytes) -> Mapping[str, object]:
    """Decode a v1.Pod protobuf message to the object that its JSON would have.

    Raises ValueError with the field if it is not valid.
    """
    return {"apiVersion": "v1", "kind": "Pod", **read_by_schema(data, POD_SCHEMA, "pod")}


# --- the API -----------------------------------------------------------------------------------------------

SOCKET: Final = PODS_API
"""Path of the pods API's socket, relative to the kubelet's directory."""
LIST: Final = "/v1alpha1.Pods/ListPods"
WATCH: Final = "/v1alpha1.Pods/WatchPods"
PAUSES_S: Final = (1.0, 2.0, 5.0, 15.0, 30.0)
"""Pauses before the next stream after one, two, ... failures in a row [s]; the last one repeats."""
SYNC_S: Final = 60.0
"""Time that the kubelet may take to send all pods on a new stream [s]."""
DEBOUNCE_S: Final = 0.1
"""Time for which events of a stream are collected before the pods are published [s]."""
INVALID_MAX: Final = 16
"""Largest number of errors about invalid pods that an answer lists."""

ADDED: Final = 1
MODIFIED: Final = 2
DELETED: Final = 3
INITIAL_SYNC_COMPLETE: Final = 4

_PODS: Final[MessageSchema] = {1: SchemaField("pods", FieldType.BYTES, repeated=True)}
_EVENT: Final[MessageSchema] = {
    1: SchemaField("type", FieldType.INTEGER),
    2: SchemaField("pod", FieldType.BYTES),
}


async def list_pods(socket: Path, clock: Callable[[], Instant]) -> SourceAnswer[JsonObject]:
    """Return the pods of this Kubernetes node as JSON objects, or why the call failed.

    Args:
        socket: :data:`SOCKET` in the kubelet's directory.
        clock: Returns the time of the answer.
    """
    try:
        answer = read_by_schema(await call_kubelet(socket, LIST), _PODS, "the answer")
    except KubeletCallFailed as error:
        return SourceAnswer(Provenance(Origin.PODS_API, clock()), (), error.absence, error.why)
    except ValueError as error:
        return SourceAnswer(
            Provenance(Origin.PODS_API, clock()), (), Absence.UNREADABLE, f"{socket}: {error}"
        )
    pods: list[JsonObject] = []
    invalid: list[str] = []
    for number, data in enumerate(answer.get("pods", ())):
        try:
            pods.append(decode_pod(data))
        except ValueError as error:
            invalid.append(f"pod {number}: {error}")
    return SourceAnswer(Provenance(Origin.PODS_API, clock()), tuple(pods), invalid=_limit_texts(invalid))


class PodsWatcher:
    """Watcher that publishes the pods of this Kubernetes node; opens a new stream when one ends.

    Each published answer lists all pods. While no stream is open, the last answer remains, with its time
    and the error. A new stream publishes nothing before all its pods have arrived.
    """

    def __init__(
        self,
        socket: Path,
        latest: LatestValue[SourceAnswer[JsonObject]],
        clock: Callable[[], Instant],
        on_pods_changed: Callable[[], None] = lambda: None,
        retry_pauses_s: Sequence[float] = PAUSES_S,
        sync_s: float = SYNC_S,
    ) -> None:
        """Create the watcher.

        Args:
            socket: :data:`SOCKET` in the kubelet's directory.
            latest: Object that holds the newest answer, to which answers are published.
            clock: Returns the time of an answer.
            on_pods_changed: Called after an answer in which a pod is new, missing or in another phase.
            retry_pauses_s: Pauses as in :data:`PAUSES_S`; at least one.
            sync_s: Timeout until all pods of a new stream have arrived.
        """
        self._socket = socket
        self._latest = latest
        self._clock = clock
        self._changed = on_pods_changed
        self._pauses_s = retry_pauses_s
        self._sync_s = sync_s
        self._pods: Mapping[str, JsonObject] = {}
        self._provenance: Provenance | None = None
        self._synced = False
        self.is_current = False
        """True: the open stream has sent all pods. False: the newest answer may be out of date."""

    async def run(self) -> None:
        """Watch the pods and publish them until cancelled."""
        failures = 0
        while True:
            self._synced = False
            try:
                await self._follow()
            except KubeletCallFailed as error:
                self._publish_error(error.absence, error.why)
            except ValueError as error:
                self._publish_error(Absence.UNREADABLE, f"{self._socket}: {error}")
            except TimeoutError:
                why = f"{self._socket}: kubelet did not send all pods within {self._sync_s:g} s"
                self._publish_error(Absence.UNREADABLE, why)
            failures = 0 if self._synced else failures + 1
            await asyncio.sleep(self._pauses_s[min(failures, len(self._pauses_s) - 1)])

    async def _follow(self) -> None:
        """Process the events of one stream of the pods API until it ends.

        Raises KubeletCallFailed at the end, TimeoutError, or ValueError for an invalid event.
        """
        table: dict[str, JsonObject] = {}
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
                    event = read_by_schema(data, _EVENT, "the event")
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

    def _publish(self, table: Mapping[str, JsonObject], invalid: Iterable[str]) -> None:
        phases = _phases(self._pods)
        self._pods = dict(table)
        self._provenance = Provenance(Origin.PODS_API, self._clock())
        self._latest.publish(
            SourceAnswer(self._provenance, tuple(table.values()), invalid=_limit_texts(invalid))
        )
        self.is_current = self._synced
        if _phases(self._pods) != phases:
            self._changed()

    def _publish_error(self, absence: Absence, why: str) -> None:
        """Publish the last answer again, with the stream's error.

        Without an earlier answer, the error alone is published.
        """
        if self._provenance is None:
            self._latest.publish(SourceAnswer(Provenance(Origin.PODS_API, self._clock()), (), absence, why))
        else:
            self._latest.publish(SourceAnswer(self._provenance, tuple(self._pods.values()), invalid=(why,)))


def _apply(kind: int, data: bytes, table: dict[str, JsonObject], invalid: list[str]) -> None:
    """Apply one event of the pods API to the table of pods by UID.

    Args:
        kind: Number of the event's type.
        data: Encoded pod.
        table: Pods by UID, which is changed.
        invalid: Receives the error text of an invalid pod.
    """
    try:
        pod = decode_pod(data)
        uid = _uid(pod)
    except ValueError as error:
        invalid[INVALID_MAX - 1 :] = [f"event: {error}"]
        return
    if kind == DELETED:
        table.pop(uid, None)
    else:
        table[uid] = pod


def _phases(pods: Mapping[str, JsonObject]) -> Mapping[str, object]:
    status = {uid: pod.get("status") for uid, pod in pods.items()}
    return {
        uid: pod_status.get("phase") if isinstance(pod_status, Mapping) else None
        for uid, pod_status in status.items()
    }


def _uid(pod: JsonObject) -> str:
    metadata = pod.get("metadata")
    uid = metadata.get("uid") if isinstance(metadata, Mapping) else None
    if not uid:
        raise ValueError("a pod in the kubelet's answer has no metadata.uid")
    return str(uid)


def _limit_texts(invalid: Iterable[str]) -> tuple[str, ...]:
    errors = tuple(invalid)
    if len(errors) <= INVALID_MAX:
        return errors
    return (*errors[:INVALID_MAX], f"{len(errors) - INVALID_MAX} more errors")
