"""Clients of podresources and the pods API against servers with the kubelet's limits, errors and restarts."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from socket import AF_UNIX
from socket import socket as unix_socket
from typing import Any

import pytest
from patience import PATIENCE_S
from wire.kubelet_apis import (
    MIB,
    RATE_LIMIT,
    SLOW_CLIENT,
    STARTING,
    ListingApi,
    RefuseCall,
    WatchApi,
    deleted_event,
    event,
    listed_claim,
    listed_container,
    listed_pod,
    listed_pods,
    message_class,
    pod,
)

from agent.devices.consumers.kube_objects import parse_pods
from agent.model.claim import DeviceRef
from agent.model.claim_sources import (
    AllocatedDevice,
    Origin,
    PodResourcesClaim,
    PodResourcesContainer,
    PodResourcesPod,
    SourceAnswer,
)
from agent.model.reading import Absence
from agent.model.time import Instant
from agent.serve.grpc.channel import KUBELET_RESPONSE_LIMIT
from agent.serve.kubelet.client import PODRESOURCES_LIST as PODRESOURCES
from agent.serve.kubelet.client import list_podresources
from agent.serve.kubelet.pods_api import INVALID_MAX, PodsWatcher, list_pods
from agent.serve.kubelet.pods_api import LIST as PODS
from agent.system.threads.latest_value import LatestValue

NOW = Instant(5_000_000_000, 1_700_000_000.0)
READERS = [(list_podresources, PODRESOURCES), (list_pods, PODS)]
both = pytest.mark.parametrize(("read", "method"), READERS, ids=["podresources", "pods"])
Read = Callable[[Path, Callable[[], Instant]], Awaitable[SourceAnswer[Any]]]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer of a busy machine is late."""
    monkeypatch.setattr("agent.serve.kubelet.client.CALL_S", PATIENCE_S)


def clock() -> Instant:
    return NOW


def ask(read: Read, socket: Path) -> SourceAnswer[Any]:
    async def read_once() -> SourceAnswer[Any]:
        return await read(socket, clock)

    return asyncio.run(read_once())


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "kubelet.sock"


def empty() -> Any:
    return message_class("v1", "ListPodResourcesResponse")()


def pods_answer(*found: bytes) -> Any:
    return message_class("v1alpha1", "ListPodsResponse")(pods=found)


def use(name: str, share: str = "") -> AllocatedDevice:
    return AllocatedDevice(DeviceRef("gpu.example.com", "node-1", name), share_id=share)


# --- podresources ------------------------------------------------------------------------------------------


def test_containers_have_claims_with_all_their_devices(socket: Path) -> None:
    message = listed_pods(
        listed_pod(
            "train-0",
            listed_container("main", listed_claim("gpus", "gpu-0", "gpu-1"), listed_claim("nics")),
            listed_container("idle"),
        ),
        listed_pod("other"),
    )
    with ListingApi(socket, PODRESOURCES, lambda: message):
        answer = ask(list_podresources, socket)
    claims = (
        PodResourcesClaim("team-a", "gpus", (use("gpu-0"), use("gpu-1"))),
        PodResourcesClaim("team-a", "nics"),
    )
    assert answer.provenance == (Origin.PODRESOURCES, NOW, None)
    assert answer.items == (
        PodResourcesPod(
            "team-a", "train-0", (PodResourcesContainer("main", claims), PodResourcesContainer("idle"))
        ),
        PodResourcesPod("team-a", "other"),
    )


def test_accumulated_cdi_ids_do_not_change_device_identity(socket: Path) -> None:
    names = [f"gpu-{number}" for number in range(8)]
    message = listed_pods(listed_pod("p", listed_container("main", listed_claim("c", *names))))
    assert (
        len(message.pod_resources[0].containers[0].dynamic_resources[0].claim_resources[7].cdi_devices) == 8
    )
    with ListingApi(socket, PODRESOURCES, lambda: message):
        (found,) = ask(list_podresources, socket).items
    assert found.containers[0].claims[0].devices == tuple(map(use, names))


def test_share_id_is_kept_with_its_device(socket: Path) -> None:
    message = listed_pods(listed_pod("p", listed_container("main", listed_claim("c", "gpu-0", share="s-1"))))
    with ListingApi(socket, PODRESOURCES, lambda: message):
        (found,) = ask(list_podresources, socket).items
    assert found.containers[0].claims[0].devices == (use("gpu-0", "s-1"),)


def test_list_of_a_hundred_pods_with_four_devices_is_complete(socket: Path) -> None:
    message = listed_pods(
        *(
            listed_pod(
                f"p-{number}",
                listed_container(
                    "main", listed_claim(f"c-{number}", *(f"gpu-{number}-{device}" for device in range(4)))
                ),
            )
            for number in range(100)
        )
    )
    with ListingApi(socket, PODRESOURCES, lambda: message):
        answer = ask(list_podresources, socket)
    found = [
        (pod.name, use.device.device)
        for pod in answer.items
        for claim in pod.containers[0].claims
        for use in claim.devices
    ]
    assert found == [
        (f"p-{number}", f"gpu-{number}-{device}") for number in range(100) for device in range(4)
    ]


# --- the pods API ------------------------------------------------------------------------------------------


def test_pods_are_objects_as_kubectl_shows_them(socket: Path) -> None:
    with ListingApi(socket, PODS, lambda: pods_answer(pod("u-1", claims=["c"]), pod("u-2"))):
        answer = ask(list_pods, socket)
    assert answer.provenance == (Origin.PODS_API, NOW, None)
    known = parse_pods(answer)
    assert [item.ref.uid for item in known.items] == ["u-1", "u-2"]
    assert known.items[0].claims[0].claim == "c"


def test_unreadable_pod_does_not_hide_others(socket: Path) -> None:
    message = pods_answer(b"\x0a", *([pod("u")] * 2), *([b"\xff"] * 40))
    with ListingApi(socket, PODS, lambda: message):
        answer = ask(list_pods, socket)
    assert len(answer.items) == 2
    assert answer.invalid[0] == "pod 0: pod field 1: message ends inside a varint"
    assert (len(answer.invalid), answer.invalid[-1]) == (INVALID_MAX + 1, f"{41 - INVALID_MAX} more errors")


# --- both sockets ------------------------------------------------------------------------------------------


@both
def test_node_without_socket_is_absent(read: Read, method: str, socket: Path) -> None:
    answer = ask(read, socket)
    assert (answer.absence, answer.reason) == (Absence.ABSENT, f"{socket}: no such socket")


@both
def test_socket_without_server_is_unreadable(read: Read, method: str, socket: Path) -> None:
    with unix_socket(AF_UNIX) as dead:
        dead.bind(str(socket))
    answer = ask(read, socket)
    assert (answer.absence, answer.reason) == (Absence.UNREADABLE, f"{socket}: no process serves this socket")


@both
def test_file_that_is_no_socket_is_unreadable(read: Read, method: str, socket: Path) -> None:
    socket.touch()
    answer = ask(read, socket)
    assert (answer.absence, answer.reason) == (Absence.UNREADABLE, f"{socket}: is not a socket")


@both
def test_server_without_the_service_is_absent(read: Read, method: str, socket: Path) -> None:
    other = PODS if method == PODRESOURCES else PODRESOURCES
    with ListingApi(socket, other, empty):
        answer = ask(read, socket)
    assert answer.absence is Absence.ABSENT
    assert answer.reason.startswith(f"{socket}: UNIMPLEMENTED: ")


@both
def test_starting_kubelet_is_unreadable_with_reason(read: Read, method: str, socket: Path) -> None:
    def raise_starting() -> Any:
        raise STARTING

    with ListingApi(socket, method, raise_starting):
        answer = ask(read, socket)
    assert answer.absence is Absence.UNREADABLE
    assert answer.reason == f"{socket}: FAILED_PRECONDITION: Kubelet is initializing"


@both
def test_rate_limited_request_is_retried(read: Read, method: str, socket: Path) -> None:
    answers = iter([RATE_LIMIT, RATE_LIMIT, empty()])

    def message() -> Any:
        next_answer = next(answers)
        if isinstance(next_answer, RefuseCall):
            raise next_answer
        return next_answer

    with ListingApi(socket, method, message) as api:
        answer = ask(read, socket)
    assert (answer.absence, answer.items, api.calls) == (None, (), 3)


@both
def test_request_that_stays_rate_limited_fails(read: Read, method: str, socket: Path) -> None:
    def message() -> Any:
        raise RATE_LIMIT

    with ListingApi(socket, method, message):
        answer = ask(read, socket)
    assert answer.absence is Absence.UNREADABLE
    assert answer.reason == f"{socket}: RESOURCE_EXHAUSTED: rejected by rate limit"


@both
def test_invalid_message_is_unreadable(read: Read, method: str, socket: Path) -> None:
    with ListingApi(socket, method, lambda: pods_answer(b"\xff")) as api:
        api._answer = lambda: Bytes(b"\x0a\x7f")
        answer = ask(read, socket)
    assert answer.absence is Absence.UNREADABLE
    assert answer.reason == f"{socket}: the answer field 1: ends 127 bytes after the end of the message"


class Bytes(bytes):
    """Serve an invalid message."""

    def SerializeToString(self) -> bytes:
        return bytes(self)


@both
def test_answer_above_size_limit_is_refused_unread(read: Read, method: str, socket: Path) -> None:
    message = Bytes(bytes(KUBELET_RESPONSE_LIMIT + 1))
    with ListingApi(socket, method, lambda: message) as api:
        answer = ask(read, socket)
        assert api.calls == 1
    assert answer.absence is Absence.UNREADABLE
    assert (
        answer.reason
        == f"{socket}: the answer is {KUBELET_RESPONSE_LIMIT + 1} bytes, limit {KUBELET_RESPONSE_LIMIT}"
    )


def test_answer_within_limit_of_kubelet_clients_is_accepted(socket: Path) -> None:
    message = pods_answer(*(pod(f"u-{number}", size=MIB) for number in range(15)))
    with ListingApi(socket, PODS, lambda: message):
        answer = ask(list_pods, socket)
    assert len(answer.items) == 15
    assert answer.is_complete


# --- the watch ---------------------------------------------------------------------------------------------


class Watching:
    """Watch in this thread's loop, with its published answers."""

    def __init__(self, socket: Path, sync_s: float = PATIENCE_S) -> None:
        self.latest: LatestValue[SourceAnswer[Any]] = LatestValue()
        self.watch = PodsWatcher(socket, self.latest, self._clock, self._note, (0.02,), sync_s)
        self.changes = 0
        self._seconds = 0

    def _note(self) -> None:
        self.changes += 1

    def _clock(self) -> Instant:
        self._seconds += 1
        return Instant(self._seconds, float(self._seconds))

    async def until(self, condition: Callable[[SourceAnswer[Any]], bool]) -> SourceAnswer[Any]:
        """Return the first published answer for which the condition holds."""
        version = 0
        while True:
            version, answer = await self.latest.wait_newer(version)
            if condition(answer):
                return answer


def run_watch(socket: Path, story: Callable[[Watching, WatchApi], Awaitable[None]]) -> None:
    """Run a scenario while a watch runs."""

    async def run() -> None:
        watching = Watching(socket)
        task = asyncio.ensure_future(watching.watch.run())
        try:
            async with asyncio.timeout(PATIENCE_S):
                await story(watching, api)
        finally:
            task.cancel()
            await asyncio.wait({task})
        assert task.cancelled()

    with WatchApi(socket) as api:
        asyncio.run(run())


async def open_stream(api: WatchApi) -> Any:
    return await asyncio.to_thread(api.stream)


def uids(answer: SourceAnswer[Any]) -> list[str]:
    return sorted(item["metadata"]["uid"] for item in answer.items)


def send_events(stream: Any, *events: Any) -> None:
    for found_event in events:
        stream.put(found_event)


SYNCED = event("INITIAL_SYNC_COMPLETE")


def test_watch_follows_added_changed_and_removed_pods(socket: Path) -> None:
    async def story(watching: Watching, api: WatchApi) -> None:
        stream = await open_stream(api)
        send_events(stream, event("ADDED", pod("u-1")), event("ADDED", pod("u-2")), SYNCED)
        assert (await watching.until(lambda answer: uids(answer) == ["u-1", "u-2"])).is_complete
        send_events(
            stream,
            event("MODIFIED", pod("u-1", phase="Failed")),
            deleted_event("u-2"),
            event("ADDED", pod("u-3")),
        )
        answer = await watching.until(lambda answer: uids(answer) == ["u-1", "u-3"])
        assert parse_pods(answer).items[0].phase == "Failed"

    run_watch(socket, story)


def test_watch_reports_added_removed_and_phase_changes_only(socket: Path) -> None:
    async def story(watching: Watching, api: WatchApi) -> None:
        stream = await open_stream(api)
        assert not watching.watch.is_current
        send_events(stream, event("ADDED", pod("u-1", phase="Running")), SYNCED)
        await watching.until(lambda answer: uids(answer) == ["u-1"])
        assert (watching.changes, watching.watch.is_current) == (1, True)
        version, _ = watching.latest.peek()
        send_events(stream, event("MODIFIED", pod("u-1", phase="Running", size=1000)))
        await watching.latest.wait_newer(version)
        assert watching.changes == 1
        send_events(stream, event("MODIFIED", pod("u-1", phase="Succeeded")))
        await watching.until(lambda answer: answer.items[0]["status"]["phase"] == "Succeeded")
        assert watching.changes == 2
        send_events(stream, deleted_event("u-1"))
        await watching.until(lambda answer: not answer.items)
        assert watching.changes == 3
        send_events(stream, SLOW_CLIENT)
        await watching.until(lambda answer: bool(answer.invalid))
        assert (watching.changes, watching.watch.is_current) == (3, False)

    run_watch(socket, story)


def test_watch_publishes_nothing_before_the_initial_list_is_complete(socket: Path) -> None:
    async def story(watching: Watching, api: WatchApi) -> None:
        stream = await open_stream(api)
        send_events(stream, *(event("ADDED", pod(f"u-{number}")) for number in range(50)), SYNCED)
        _, first = await watching.latest.wait_newer(0)
        assert len(first.items) == 50

    run_watch(socket, story)


def test_pod_removed_while_disconnected_is_gone_after_reconnect(socket: Path) -> None:
    async def story(watching: Watching, api: WatchApi) -> None:
        stream = await open_stream(api)
        send_events(stream, event("ADDED", pod("u-1")), event("ADDED", pod("u-2")), SYNCED)
        before = await watching.until(lambda answer: len(answer.items) == 2)
        send_events(stream, SLOW_CLIENT)
        lost = await watching.until(lambda answer: bool(answer.invalid))
        assert uids(lost) == ["u-1", "u-2"]  # the old list, with its old time
        assert lost.provenance == before.provenance
        assert lost.invalid == (f"{socket}: RESOURCE_EXHAUSTED: watch client channel closed",)
        again = await open_stream(api)
        send_events(again, event("ADDED", pod("u-2")))
        send_events(again, SYNCED)
        answer = await watching.until(lambda answer: answer.is_complete and uids(answer) == ["u-2"])
        assert answer.provenance.read_at > before.provenance.read_at

    run_watch(socket, story)


def test_stream_broken_during_initial_list_replaces_nothing(socket: Path) -> None:
    async def story(watching: Watching, api: WatchApi) -> None:
        stream = await open_stream(api)
        send_events(stream, event("ADDED", pod("u-1")), SYNCED)
        await watching.until(lambda answer: uids(answer) == ["u-1"])
        send_events(stream, STARTING)
        again = await open_stream(api)
        send_events(again, event("ADDED", pod("u-9")), STARTING)
        send_events(await open_stream(api), event("ADDED", pod("u-3")), SYNCED)
        seen: list[list[str]] = []
        await watching.until(lambda answer: seen.append(uids(answer)) or uids(answer) == ["u-3"])
        assert ["u-9"] not in seen

    run_watch(socket, story)


def test_watch_waits_for_absent_kubelet(tmp_path: Path) -> None:
    socket = tmp_path / "pods-api.sock"

    async def run() -> None:
        watching = Watching(socket)
        task = asyncio.ensure_future(watching.watch.run())
        async with asyncio.timeout(PATIENCE_S):
            _, answer = await watching.latest.wait_newer(0)
            assert (answer.absence, answer.reason) == (Absence.ABSENT, f"{socket}: no such socket")
            with WatchApi(socket) as api:
                send_events(await open_stream(api), SYNCED)
                answer = await watching.until(lambda answer: answer.absence is None)
                assert (answer.items, answer.is_complete) == ((), True)  # a node without pods
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(run())


def test_watch_waits_out_a_rate_limit_and_keeps_the_pods(socket: Path) -> None:
    async def story(watching: Watching, api: WatchApi) -> None:
        send_events(await open_stream(api), event("ADDED", pod("u-1")), SYNCED, SLOW_CLIENT)
        await watching.until(lambda answer: bool(answer.invalid))
        for _ in range(2):
            send_events(await open_stream(api), RATE_LIMIT)
            answer = await watching.until(lambda answer: "RESOURCE_EXHAUSTED" in str(answer.invalid))
            assert (uids(answer), watching.watch.is_current) == (["u-1"], False)
        send_events(await open_stream(api), event("ADDED", pod("u-2")), SYNCED)
        assert (await watching.until(lambda answer: uids(answer) == ["u-2"])).is_complete

    run_watch(socket, story)


def test_watch_gives_up_on_kubelet_that_never_completes_its_list(socket: Path) -> None:
    async def run() -> None:
        watching = Watching(socket, sync_s=0.05)
        task = asyncio.ensure_future(watching.watch.run())
        with WatchApi(socket) as api:
            send_events(await open_stream(api), event("ADDED", pod("u")))
            answer = await watching.until(lambda answer: True)
            why = f"{socket}: kubelet did not send all pods within 0.05 s"
            assert (answer.items, answer.reason) == ((), why)
            await open_stream(api)  # the watch retries
            task.cancel()
            await asyncio.wait({task})

    asyncio.run(run())


def test_invalid_event_is_logged_and_watch_continues(socket: Path) -> None:
    async def story(watching: Watching, api: WatchApi) -> None:
        stream = await open_stream(api)
        nameless = message_class("core", "Pod")().SerializeToString()
        send_events(
            stream, event("ADDED", b"\xff"), event("ADDED", nameless), event("ADDED", pod("u")), SYNCED
        )
        answer = await watching.until(lambda answer: uids(answer) == ["u"])
        assert answer.invalid == (
            "event: pod: message ends inside a varint",
            "event: a pod in the kubelet's answer has no metadata.uid",
        )

    run_watch(socket, story)


def test_event_of_unknown_kind_changes_nothing(socket: Path) -> None:
    async def story(watching: Watching, api: WatchApi) -> None:
        stream = await open_stream(api)
        send_events(stream, event("UNSPECIFIED", pod("u-1")), event("ADDED", pod("u-2")), SYNCED)
        assert uids(await watching.until(lambda answer: answer.absence is None)) == ["u-2"]

    run_watch(socket, story)


def test_slow_reader_gets_newest_list_and_never_blocks_kubelet(socket: Path) -> None:
    async def story(watching: Watching, api: WatchApi) -> None:
        stream = await open_stream(api)
        send_events(stream, SYNCED)
        await watching.until(lambda answer: answer.absence is None)
        for number in range(2000):
            send_events(stream, event("MODIFIED", pod("u", phase=f"step {number}")))
        answer = await watching.until(
            lambda answer: bool(answer.items) and answer.items[0]["status"]["phase"] == "step 1999"
        )
        assert uids(answer) == ["u"]
        version, _ = watching.latest.peek()
        assert version < 1000  # events are coalesced: of 0.1 s each

    run_watch(socket, story)
