"""podresources and the pods API, asked as a kubelet serves them: with their traps, limits and restarts."""

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
    Refuse,
    WatchApi,
    event,
    gone,
    listed_claim,
    listed_container,
    listed_pod,
    listed_pods,
    message_class,
    pod,
)

from agent.devices.consumers.kube_objects import pods_from
from agent.model.claim import DeviceRef
from agent.model.claim_sources import DeviceUse, ListedClaim, ListedContainer, ListedPod, Origin, SourceAnswer
from agent.model.reading import Absence
from agent.model.time import Instant
from agent.serve.grpc.wide_channel import LIMIT
from agent.serve.kubelet.podresources import LIST as PODRESOURCES
from agent.serve.kubelet.podresources import list_podresources
from agent.serve.kubelet.pods_api import LIST as PODS
from agent.serve.kubelet.pods_api import WRONG_MAX, PodsWatch, list_pods
from agent.system.threads.latest import Latest

NOW = Instant(5_000_000_000, 1_700_000_000.0)
READERS = [(list_podresources, PODRESOURCES), (list_pods, PODS)]
both = pytest.mark.parametrize(("read", "method"), READERS, ids=["podresources", "pods"])
Read = Callable[[Path, Callable[[], Instant]], Awaitable[SourceAnswer[Any]]]


def clock() -> Instant:
    return NOW


def ask(read: Read, socket: Path) -> SourceAnswer[Any]:
    async def asked() -> SourceAnswer[Any]:
        return await read(socket, clock)

    return asyncio.run(asked())


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "kubelet.sock"


def empty() -> Any:
    return message_class("v1", "ListPodResourcesResponse")()


def pods_answer(*found: bytes) -> Any:
    return message_class("v1alpha1", "ListPodsResponse")(pods=found)


def use(name: str, share: str = "") -> DeviceUse:
    return DeviceUse(DeviceRef("gpu.example.com", "node-1", name), share_id=share)


# --- podresources ------------------------------------------------------------------------------------------


def test_containers_have_their_claims_and_these_all_their_devices(socket: Path) -> None:
    answer = listed_pods(
        listed_pod(
            "train-0",
            listed_container("main", listed_claim("gpus", "gpu-0", "gpu-1"), listed_claim("nics")),
            listed_container("idle"),
        ),
        listed_pod("other"),
    )
    with ListingApi(socket, PODRESOURCES, lambda: answer):
        told = ask(list_podresources, socket)
    claims = (
        ListedClaim("team-a", "gpus", (use("gpu-0"), use("gpu-1"))),
        ListedClaim("team-a", "nics"),
    )
    assert told.witness == (Origin.PODRESOURCES, NOW, None)
    assert told.items == (
        ListedPod("team-a", "train-0", (ListedContainer("main", claims), ListedContainer("idle"))),
        ListedPod("team-a", "other"),
    )


def test_cdi_ids_that_pile_up_make_no_device_another_ones(socket: Path) -> None:
    names = [f"gpu-{number}" for number in range(8)]
    answer = listed_pods(listed_pod("p", listed_container("main", listed_claim("c", *names))))
    assert len(answer.pod_resources[0].containers[0].dynamic_resources[0].claim_resources[7].cdi_devices) == 8
    with ListingApi(socket, PODRESOURCES, lambda: answer):
        (found,) = ask(list_podresources, socket).items
    assert found.containers[0].claims[0].devices == tuple(map(use, names))


def test_a_share_is_told_with_its_device(socket: Path) -> None:
    answer = listed_pods(listed_pod("p", listed_container("main", listed_claim("c", "gpu-0", share="s-1"))))
    with ListingApi(socket, PODRESOURCES, lambda: answer):
        (found,) = ask(list_podresources, socket).items
    assert found.containers[0].claims[0].devices == (use("gpu-0", "s-1"),)


def test_a_hundred_pods_of_four_devices_are_all_there(socket: Path) -> None:
    answer = listed_pods(
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
    with ListingApi(socket, PODRESOURCES, lambda: answer):
        told = ask(list_podresources, socket)
    found = [
        (pod.name, use.device.device)
        for pod in told.items
        for claim in pod.containers[0].claims
        for use in claim.devices
    ]
    assert found == [
        (f"p-{number}", f"gpu-{number}-{device}") for number in range(100) for device in range(4)
    ]


# --- the pods API ------------------------------------------------------------------------------------------


def test_pods_are_objects_as_kubectl_shows_them(socket: Path) -> None:
    with ListingApi(socket, PODS, lambda: pods_answer(pod("u-1", claims=["c"]), pod("u-2"))):
        told = ask(list_pods, socket)
    assert told.witness == (Origin.PODS_API, NOW, None)
    known = pods_from(told)
    assert [one.ref.uid for one in known.items] == ["u-1", "u-2"]
    assert known.items[0].claims[0].claim == "c"


def test_a_pod_that_cannot_be_read_does_not_hide_the_others(socket: Path) -> None:
    answer = pods_answer(b"\x0a", *([pod("u")] * 2), *([b"\xff"] * 40))
    with ListingApi(socket, PODS, lambda: answer):
        told = ask(list_pods, socket)
    assert len(told.items) == 2
    assert told.wrong[0] == "pod 0: pod: ends in the middle of a number"
    assert (len(told.wrong), told.wrong[-1]) == (WRONG_MAX + 1, f"{41 - WRONG_MAX} more")


# --- both --------------------------------------------------------------------------------------------------


@both
def test_a_node_without_the_socket_does_not_have_the_source(read: Read, method: str, socket: Path) -> None:
    told = ask(read, socket)
    assert (told.absence, told.why) == (Absence.ABSENT, f"{socket}: no such socket")


@both
def test_a_socket_that_nobody_serves_is_unreadable(read: Read, method: str, socket: Path) -> None:
    with unix_socket(AF_UNIX) as dead:
        dead.bind(str(socket))
    told = ask(read, socket)
    assert (told.absence, told.why) == (Absence.UNREADABLE, f"{socket}: nobody serves this socket")


@both
def test_what_is_no_socket_is_unreadable(read: Read, method: str, socket: Path) -> None:
    socket.touch()
    told = ask(read, socket)
    assert (told.absence, told.why) == (Absence.UNREADABLE, f"{socket}: is no socket")


@both
def test_a_server_of_something_else_does_not_have_the_source(read: Read, method: str, socket: Path) -> None:
    other = PODS if method == PODRESOURCES else PODRESOURCES
    with ListingApi(socket, other, empty):
        told = ask(read, socket)
    assert told.absence is Absence.ABSENT
    assert told.why.startswith(f"{socket}: UNIMPLEMENTED: ")


@both
def test_a_kubelet_that_is_starting_is_unreadable_and_says_so(read: Read, method: str, socket: Path) -> None:
    def starting() -> Any:
        raise STARTING

    with ListingApi(socket, method, starting):
        told = ask(read, socket)
    assert told.absence is Absence.UNREADABLE
    assert told.why == f"{socket}: FAILED_PRECONDITION: Kubelet is initializing"


@both
def test_a_kubelet_that_is_asked_too_much_is_asked_again(read: Read, method: str, socket: Path) -> None:
    answers = iter([RATE_LIMIT, RATE_LIMIT, empty()])

    def answer() -> Any:
        one = next(answers)
        if isinstance(one, Refuse):
            raise one
        return one

    with ListingApi(socket, method, answer) as api:
        told = ask(read, socket)
    assert (told.absence, told.items, api.calls) == (None, (), 3)


@both
def test_one_that_is_always_asked_too_much_is_given_up(read: Read, method: str, socket: Path) -> None:
    def answer() -> Any:
        raise RATE_LIMIT

    with ListingApi(socket, method, answer):
        told = ask(read, socket)
    assert told.absence is Absence.UNREADABLE
    assert told.why == f"{socket}: RESOURCE_EXHAUSTED: rejected by rate limit"


@both
def test_an_answer_that_is_no_such_message_is_unreadable(read: Read, method: str, socket: Path) -> None:
    with ListingApi(socket, method, lambda: pods_answer(b"\xff")) as api:
        api._answer = lambda: Bytes(b"\x0a\x7f")
        told = ask(read, socket)
    assert told.absence is Absence.UNREADABLE
    assert told.why == f"{socket}: the answer: field 1 ends 127 bytes after the message's 2"


class Bytes(bytes):
    """A message that is no message."""

    def SerializeToString(self) -> bytes:
        return bytes(self)


@both
def test_an_answer_above_the_limit_is_refused_unread(read: Read, method: str, socket: Path) -> None:
    answer = Bytes(bytes(LIMIT + 1))
    with ListingApi(socket, method, lambda: answer) as api:
        told = ask(read, socket)
        assert api.calls == 1
    assert told.absence is Absence.UNREADABLE
    assert told.why == f"{socket}: the answer is {LIMIT + 1} bytes, limit {LIMIT}"


def test_an_answer_that_the_kubelets_own_clients_take_is_taken(socket: Path) -> None:
    answer = pods_answer(*(pod(f"u-{number}", size=MIB) for number in range(15)))
    with ListingApi(socket, PODS, lambda: answer):
        told = ask(list_pods, socket)
    assert len(told.items) == 15
    assert told.is_whole


# --- the watch ---------------------------------------------------------------------------------------------


class Watching:
    """A watch in this thread's loop, and what it has told."""

    def __init__(self, socket: Path, sync_s: float = 20.0) -> None:
        self.latest: Latest[SourceAnswer[Any]] = Latest()
        self.watch = PodsWatch(socket, self.latest, self._clock, self._note, (0.02,), sync_s)
        self.changes = 0
        self._seconds = 0

    def _note(self) -> None:
        self.changes += 1

    def _clock(self) -> Instant:
        self._seconds += 1
        return Instant(self._seconds, float(self._seconds))

    async def until(self, claim: Callable[[SourceAnswer[Any]], bool]) -> SourceAnswer[Any]:
        """The first picture of which that is true."""
        version = 0
        while True:
            version, told = await self.latest.wait_newer(version)
            if claim(told):
                return told


def watched(socket: Path, story: Callable[[Watching, WatchApi], Awaitable[None]]) -> None:
    """Tells the story while a watch runs."""

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


async def opened(api: WatchApi) -> Any:
    return await asyncio.to_thread(api.stream)


def uids(told: SourceAnswer[Any]) -> list[str]:
    return sorted(one["metadata"]["uid"] for one in told.items)


def say(stream: Any, *events: Any) -> None:
    for one in events:
        stream.put(one)


SYNCED = event("INITIAL_SYNC_COMPLETE")


def test_pods_come_change_and_go(socket: Path) -> None:
    async def story(watching: Watching, api: WatchApi) -> None:
        stream = await opened(api)
        say(stream, event("ADDED", pod("u-1")), event("ADDED", pod("u-2")), SYNCED)
        assert (await watching.until(lambda told: uids(told) == ["u-1", "u-2"])).is_whole
        say(stream, event("MODIFIED", pod("u-1", phase="Failed")), gone("u-2"), event("ADDED", pod("u-3")))
        told = await watching.until(lambda told: uids(told) == ["u-1", "u-3"])
        assert pods_from(told).items[0].phase == "Failed"

    watched(socket, story)


def test_a_change_is_a_pod_that_comes_goes_or_gets_another_phase(socket: Path) -> None:
    async def story(watching: Watching, api: WatchApi) -> None:
        stream = await opened(api)
        assert not watching.watch.is_current
        say(stream, event("ADDED", pod("u-1", phase="Running")), SYNCED)
        await watching.until(lambda told: uids(told) == ["u-1"])
        assert (watching.changes, watching.watch.is_current) == (1, True)
        version, _ = watching.latest.peek()
        say(stream, event("MODIFIED", pod("u-1", phase="Running", size=1000)))
        await watching.latest.wait_newer(version)
        assert watching.changes == 1
        say(stream, event("MODIFIED", pod("u-1", phase="Succeeded")))
        await watching.until(lambda told: told.items[0]["status"]["phase"] == "Succeeded")
        assert watching.changes == 2
        say(stream, gone("u-1"))
        await watching.until(lambda told: not told.items)
        assert watching.changes == 3
        say(stream, SLOW_CLIENT)
        await watching.until(lambda told: bool(told.wrong))
        assert (watching.changes, watching.watch.is_current) == (3, False)

    watched(socket, story)


def test_nothing_is_told_before_all_pods_are_there(socket: Path) -> None:
    async def story(watching: Watching, api: WatchApi) -> None:
        stream = await opened(api)
        say(stream, *(event("ADDED", pod(f"u-{number}")) for number in range(50)), SYNCED)
        _, first = await watching.latest.wait_newer(0)
        assert len(first.items) == 50

    watched(socket, story)


def test_a_pod_that_was_removed_while_nobody_watched_is_gone(socket: Path) -> None:
    async def story(watching: Watching, api: WatchApi) -> None:
        stream = await opened(api)
        say(stream, event("ADDED", pod("u-1")), event("ADDED", pod("u-2")), SYNCED)
        before = await watching.until(lambda told: len(told.items) == 2)
        say(stream, SLOW_CLIENT)
        lost = await watching.until(lambda told: bool(told.wrong))
        assert uids(lost) == ["u-1", "u-2"]  # as old as it is, and said to be
        assert lost.witness == before.witness
        assert lost.wrong == (f"{socket}: RESOURCE_EXHAUSTED: watch client channel closed",)
        again = await opened(api)
        say(again, event("ADDED", pod("u-2")))
        say(again, SYNCED)
        told = await watching.until(lambda told: told.is_whole and uids(told) == ["u-2"])
        assert told.witness.read > before.witness.read

    watched(socket, story)


def test_a_stream_that_breaks_before_it_is_whole_replaces_nothing(socket: Path) -> None:
    async def story(watching: Watching, api: WatchApi) -> None:
        stream = await opened(api)
        say(stream, event("ADDED", pod("u-1")), SYNCED)
        await watching.until(lambda told: uids(told) == ["u-1"])
        say(stream, STARTING)
        again = await opened(api)
        say(again, event("ADDED", pod("u-9")), STARTING)
        say(await opened(api), event("ADDED", pod("u-3")), SYNCED)
        seen: list[list[str]] = []
        await watching.until(lambda told: seen.append(uids(told)) or uids(told) == ["u-3"])
        assert ["u-9"] not in seen

    watched(socket, story)


def test_a_kubelet_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    socket = tmp_path / "pods-api.sock"

    async def run() -> None:
        watching = Watching(socket)
        task = asyncio.ensure_future(watching.watch.run())
        async with asyncio.timeout(PATIENCE_S):
            _, told = await watching.latest.wait_newer(0)
            assert (told.absence, told.why) == (Absence.ABSENT, f"{socket}: no such socket")
            with WatchApi(socket) as api:
                say(await opened(api), SYNCED)
                told = await watching.until(lambda told: told.absence is None)
                assert (told.items, told.is_whole) == ((), True)  # a node without pods
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(run())


def test_a_kubelet_that_never_tells_all_is_not_waited_for(socket: Path) -> None:
    async def run() -> None:
        watching = Watching(socket, sync_s=0.05)
        task = asyncio.ensure_future(watching.watch.run())
        with WatchApi(socket) as api:
            say(await opened(api), event("ADDED", pod("u")))
            told = await watching.until(lambda told: True)
            assert (told.items, told.why) == ((), f"{socket}: has not told all pods within 0.05 s")
            await opened(api)  # it is asked again
            task.cancel()
            await asyncio.wait({task})

    asyncio.run(run())


def test_a_bad_event_is_told_of_and_the_watch_goes_on(socket: Path) -> None:
    async def story(watching: Watching, api: WatchApi) -> None:
        stream = await opened(api)
        nameless = message_class("core", "Pod")().SerializeToString()
        say(stream, event("ADDED", b"\xff"), event("ADDED", nameless), event("ADDED", pod("u")), SYNCED)
        told = await watching.until(lambda told: uids(told) == ["u"])
        assert told.wrong == (
            "an event: pod: ends in the middle of a number",
            "an event: pod.metadata.uid: is not there",
        )

    watched(socket, story)


def test_an_event_of_a_kind_that_nobody_knows_changes_nothing(socket: Path) -> None:
    async def story(watching: Watching, api: WatchApi) -> None:
        stream = await opened(api)
        say(stream, event("UNSPECIFIED", pod("u-1")), event("ADDED", pod("u-2")), SYNCED)
        assert uids(await watching.until(lambda told: told.absence is None)) == ["u-2"]

    watched(socket, story)


def test_who_looks_seldom_sees_the_last_and_the_kubelet_never_waits(socket: Path) -> None:
    async def story(watching: Watching, api: WatchApi) -> None:
        stream = await opened(api)
        say(stream, SYNCED)
        await watching.until(lambda told: told.absence is None)
        for number in range(2000):
            say(stream, event("MODIFIED", pod("u", phase=f"step {number}")))
        told = await watching.until(
            lambda told: bool(told.items) and told.items[0]["status"]["phase"] == "step 1999"
        )
        assert uids(told) == ["u"]
        version, _ = watching.latest.peek()
        assert version < 200  # events are gathered

    watched(socket, story)
