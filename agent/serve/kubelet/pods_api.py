"""Pods of this node, as the kubelet's pods API tells them: asked for once, or watched.

There from 1.36 on, behind the gate PodsAPI, which is on by default from 1.37 on. Static pods have the UID of
their configuration here, and no mirror pods are told of. Who watches must keep up: the kubelet ends the
stream of one who is a hundred events behind. So events are taken in as they come, whoever looks at them.

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
from agent.serve.grpc.wire.shapes import Kind, Part, Shape, read_shape
from agent.serve.kubelet.api import NoAnswer, ask, listen
from agent.serve.kubelet.pod_message import read_pod
from agent.system.threads.latest import Latest

SOCKET: Final = PODS_API
"""In the kubelet's directory."""
LIST: Final = "/v1alpha1.Pods/ListPods"
WATCH: Final = "/v1alpha1.Pods/WatchPods"
PAUSES_S: Final = (1.0, 2.0, 5.0, 15.0, 30.0)
"""Before each further attempt to watch; the last for all that follow."""
SYNC_S: Final = 60.0
"""How long the kubelet may take to tell all pods of a new stream."""
GATHER_S: Final = 0.1
"""How long events are gathered before the picture is told anew."""
WRONG_MAX: Final = 16

ADDED: Final = 1
MODIFIED: Final = 2
DELETED: Final = 3
INITIAL_SYNC_COMPLETE: Final = 4

_PODS: Final[Shape] = {1: Part("pods", Kind.BYTES, many=True)}
_EVENT: Final[Shape] = {1: Part("type", Kind.NUMBER), 2: Part("pod", Kind.BYTES)}


async def list_pods(socket: Path, clock: Callable[[], Instant]) -> SourceAnswer[Object]:
    """The pods of this node as objects, or why nobody knows.

    Args:
        socket: :data:`SOCKET` in the kubelet's directory.
        clock: Read when the answer is there.
    """
    try:
        answer = read_shape(await ask(socket, LIST), _PODS, "the answer")
    except NoAnswer as error:
        return SourceAnswer(Provenance(Origin.PODS_API, clock()), (), error.absence, error.why)
    except ValueError as error:
        return SourceAnswer(
            Provenance(Origin.PODS_API, clock()), (), Absence.UNREADABLE, f"{socket}: {error}"
        )
    pods: list[Object] = []
    wrong: list[str] = []
    for number, data in enumerate(answer.get("pods", ())):
        try:
            pods.append(read_pod(data))
        except ValueError as error:
            wrong.append(f"pod {number}: {error}")
    return SourceAnswer(Provenance(Origin.PODS_API, clock()), tuple(pods), wrong=_few(wrong))


class PodsWatch:
    """Follows the pods of this node, through restarts of the kubelet and streams that it ends.

    Each picture is whole. While there is no stream the last one stays, as old as it is, and says what is
    wrong. Of a stream that begins anew nothing is told before all pods are there.
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
        """
        Args:
            socket: :data:`SOCKET` in the kubelet's directory.
            latest: Where the pictures go.
            clock: When a picture was true.
            changed: Called after a picture in which a pod has come, gone, or got another phase.
            pauses_s: Before each further attempt; at least one.
            sync_s: How long to wait for all pods of a new stream.
        """
        self._socket = socket
        self._latest = latest
        self._clock = clock
        self._changed = changed
        self._pauses_s = pauses_s
        self._sync_s = sync_s
        self._pods: Mapping[str, Object] = {}
        self._witness: Provenance | None = None
        self._synced = False
        self.is_current = False
        """Whether there is a stream that has told all pods: the newest picture is how it is now."""

    async def run(self) -> None:
        """Runs until it is cancelled."""
        failures = 0
        while True:
            self._synced = False
            try:
                await self._follow()
            except NoAnswer as error:
                self._tell_lost(error.absence, error.why)
            except ValueError as error:
                self._tell_lost(Absence.UNREADABLE, f"{self._socket}: {error}")
            except TimeoutError:
                why = f"{self._socket}: has not told all pods within {self._sync_s:g} s"
                self._tell_lost(Absence.UNREADABLE, why)
            failures = 0 if self._synced else failures + 1
            await asyncio.sleep(self._pauses_s[min(failures, len(self._pauses_s) - 1)])

    async def _follow(self) -> None:
        """One stream to its end. Raises NoAnswer, TimeoutError, or ValueError for what is no event."""
        table: dict[str, Object] = {}
        wrong: list[str] = []
        telling: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()

        def tell() -> None:
            nonlocal telling
            telling = None
            self._tell(table, wrong)

        try:
            async with (
                asyncio.timeout(self._sync_s) as limit,
                aclosing(listen(self._socket, WATCH)) as events,
            ):
                async for data in events:
                    event = read_shape(data, _EVENT, "the event")
                    kind = event.get("type", 0)
                    if kind == INITIAL_SYNC_COMPLETE:
                        self._synced = True
                        limit.reschedule(None)
                    elif kind in {ADDED, MODIFIED, DELETED}:
                        _take(kind, event.get("pod", b""), table, wrong)
                    if self._synced and telling is None:
                        telling = loop.call_later(GATHER_S, tell)
        finally:
            if telling is not None:
                telling.cancel()
                self._tell(table, wrong)
            self.is_current = False

    def _tell(self, table: Mapping[str, Object], wrong: Iterable[str]) -> None:
        phases = _phases(self._pods)
        self._pods = dict(table)
        self._witness = Provenance(Origin.PODS_API, self._clock())
        self._latest.publish(SourceAnswer(self._witness, tuple(table.values()), wrong=_few(wrong)))
        self.is_current = self._synced
        if _phases(self._pods) != phases:
            self._changed()

    def _tell_lost(self, absence: Absence, why: str) -> None:
        """The last picture with what is wrong; without one, that there is none."""
        if self._witness is None:
            self._latest.publish(SourceAnswer(Provenance(Origin.PODS_API, self._clock()), (), absence, why))
        else:
            self._latest.publish(SourceAnswer(self._witness, tuple(self._pods.values()), wrong=(why,)))


def _take(kind: int, data: bytes, table: dict[str, Object], wrong: list[str]) -> None:
    """One event into the table. Of a pod that is gone only names and UID are sure to be there."""
    try:
        pod = read_pod(data)
        uid = _uid(pod)
    except ValueError as error:
        wrong[WRONG_MAX - 1 :] = [f"an event: {error}"]
        return
    if kind == DELETED:
        table.pop(uid, None)
    else:
        table[uid] = pod


def _phases(pods: Mapping[str, Object]) -> Mapping[str, object]:
    status = {uid: pod.get("status") for uid, pod in pods.items()}
    return {uid: one.get("phase") if isinstance(one, Mapping) else None for uid, one in status.items()}


def _uid(pod: Object) -> str:
    metadata = pod.get("metadata")
    uid = metadata.get("uid") if isinstance(metadata, Mapping) else None
    if not uid:
        raise ValueError("pod.metadata.uid: is not there")
    return str(uid)


def _few(wrong: Iterable[str]) -> tuple[str, ...]:
    all_of_it = tuple(wrong)
    if len(all_of_it) <= WRONG_MAX:
        return all_of_it
    return (*all_of_it[:WRONG_MAX], f"{len(all_of_it) - WRONG_MAX} more")
