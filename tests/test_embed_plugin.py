"""A whole plugin inside a driver: asyncio's, Trio's, or neither, as a kubelet sees it."""

import asyncio
import fcntl
import json
import logging
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import trio
import trio.testing
from embedding import DRIVER, NODE, until
from patience import PATIENCE_S
from wire.google import names, watch_health
from wire.plugin import DRA, SHORT_S, Kubelet, claim, encoded
from wire.raw import DATA, END_STREAM, RawClient, frame, message, request_headers
from wire.serving import device, eventually, report

from agent.cli.main import main as drahealth
from agent.embed.callback_runner import CallbackRunner
from agent.embed.checks import degraded
from agent.embed.devices import Device
from agent.embed.monitor import Monitor
from agent.embed.plugin import PluginServer
from agent.errors import ConfigError
from agent.model.claim import Claim, ClaimDevice, ClaimRef
from agent.model.health import Health
from agent.model.report import Report
from agent.prepare.decorator import classified
from agent.prepare.errors import BadConfig, FailedDevice, TransientError
from agent.serve.dra_plugin.result import PreparedDevice
from agent.serve.dra_plugin.serialize_lock import FILE
from agent.system.threads.latest import Latest

KUBELETS = ThreadPoolExecutor(max_workers=4, thread_name_prefix="kubelet")
"""For a kubelet beside a driver that owns the test's own thread."""


def claim_of(asked: ClaimRef) -> Claim:
    """As the API server has it: one device for each."""
    return Claim(*asked, devices=(ClaimDevice("r", DRIVER, NODE, "gpu-0"),))


def prepared(of: Claim) -> list[PreparedDevice]:
    return [PreparedDevice((), one.pool, one.device, (f"example.com/gpu={of.uid}",)) for one in of.devices]


class Driver:
    """Plain functions; a claim's name says what is to happen to it."""

    def __init__(self) -> None:
        self.prepared: list[str] = []
        self.unprepared: list[str] = []
        self.threads: set[str] = set()
        self.behaviour: dict[str, Callable[[], object]] = {}

    def prepare(self, of: Claim) -> Sequence[PreparedDevice]:
        self.prepared.append(of.name)
        self.threads.add(threading.current_thread().name)
        if behaviour := self.behaviour.get(of.name):
            behaviour()
        return prepared(of)

    def unprepare(self, asked: ClaimRef) -> None:
        self.unprepared.append(asked.name)
        if behaviour := self.behaviour.get(asked.name):
            behaviour()


def raising(error: BaseException) -> Callable[[], object]:
    def behave() -> object:
        raise error

    return behave


def ours() -> set[threading.Thread]:
    """All threads of the library, of other tests too."""
    return {one for one in threading.enumerate() if one.name.startswith("dh-")}


def threads(name: str) -> int:
    return sum(one.name == name for one in threading.enumerate())


@pytest.fixture
def kubelet_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # short: a socket's path is 107 bytes at most
        (Path(directory) / "plugins_registry").mkdir()
        yield Path(directory)


@pytest.fixture
def monitor(kubelet_dir: Path) -> Iterator[Monitor]:
    with new_monitor(kubelet_dir) as monitor:
        yield monitor


def new_monitor(kubelet_dir: Path) -> Monitor:
    monitor = Monitor(DRIVER, hardware=False, state_dir=kubelet_dir / "state")
    monitor.add(Device("gpu-0", pool=NODE))
    monitor.check(every=0.1, timeout=5)(well)
    return monitor


def well(device: Device) -> bool:
    return True


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def server(monitor: Monitor, driver: Driver, kubelet_dir: Path) -> Iterator[PluginServer]:
    with PluginServer(monitor, driver, claims=claim_of, kubelet_dir=kubelet_dir) as server:
        yield server


@contextmanager
def serving(
    monitor: Monitor,
    driver: Any,
    kubelet_dir: Path,
    claims: Callable[[ClaimRef], Any] = claim_of,
    **options: Any,
) -> Iterator[Kubelet]:
    """A server of that driver, and a kubelet that calls it."""
    with (
        PluginServer(monitor, driver, claims=claims, kubelet_dir=kubelet_dir, **options) as server,
        Kubelet(server.paths.service) as kubelet,
    ):
        yield kubelet


@pytest.fixture
def kubelet(server: PluginServer) -> Iterator[Kubelet]:
    with Kubelet(server.paths.service) as kubelet:
        yield kubelet


# --- what a kubelet sees ------------------------------------------------------------------------------------


def test_a_claim_is_fetched_prepared_and_unprepared(driver: Driver, kubelet: Kubelet) -> None:
    (device,) = kubelet.prepare(claim("a"))["uid-a"].devices
    assert (device.pool_name, device.device_name) == (NODE, "gpu-0")
    assert list(device.cdi_device_ids) == ["example.com/gpu=uid-a"]
    assert kubelet.unprepare(claim("a"))["uid-a"].error == ""
    assert kubelet.unprepare(claim("never-seen"))["uid-never-seen"].error == ""
    assert (driver.prepared, driver.unprepared) == (["a"], ["a", "never-seen"])


def test_health_and_prepares_share_one_connection_each_under_the_same_names(
    monitor: Monitor, server: PluginServer, kubelet: Kubelet
) -> None:
    until(monitor, "gpu-0", Health.HEALTHY)
    (device,) = kubelet.prepare(claim("a"))["uid-a"].devices
    for version in ("v1", "v1alpha1"):
        with watch_health(server.paths.service, version) as watcher:
            (entry,) = watcher.next().devices
            assert (entry.device.pool_name, entry.device.device_name) == (
                device.pool_name,
                device.device_name,
            )
            assert entry.health == 1


def test_each_failure_is_judged_and_remembered(monitor: Monitor, driver: Driver, kubelet: Kubelet) -> None:
    driver.behaviour = {
        "bad": raising(BadConfig("no such mode")),
        "bug": raising(KeyError("mode")),
        "busy": raising(TransientError("is busy", retry_after_s=3600)),
    }
    answers = kubelet.prepare(claim("bad"), claim("bug"), claim("busy"), claim("good"))
    assert "class=bad-config code=config.invalid" in answers["uid-bad"].error
    assert "class=unknown code=driver.bug.key_error" in answers["uid-bug"].error
    assert "class=transient code=driver.transient" in answers["uid-busy"].error
    assert answers["uid-good"].error == ""
    outcomes = {one.claim.name: one.verdict for one in monitor.tracker.outcomes()}
    assert {name: verdict and str(verdict.error_class) for name, verdict in outcomes.items()} == {
        "bad": "bad-config",
        "bug": "unknown",
        "busy": "transient",
        "good": None,
    }


def test_what_can_never_be_is_answered_without_asking_the_driver_again(
    driver: Driver, kubelet: Kubelet
) -> None:
    driver.behaviour["bad"] = raising(BadConfig("no such mode"))
    first, second = (kubelet.prepare(claim("bad"))["uid-bad"].error for _ in range(2))
    assert first == second
    assert driver.prepared == ["bad"]


def test_what_passes_is_tried_again_within_the_call(driver: Driver, kubelet: Kubelet) -> None:
    left = [TransientError("is busy"), TransientError("is still busy")]

    def behave() -> None:
        if left:
            raise left.pop()

    driver.behaviour["a"] = behave
    assert kubelet.prepare(claim("a"))["uid-a"].error == ""
    assert driver.prepared == ["a", "a", "a"]


def test_a_failed_device_is_unhealthy_on_the_stream_before_the_kubelet_has_the_error(
    monitor: Monitor, driver: Driver, server: PluginServer
) -> None:
    """On one connection, as the kubelet has it, the order of the frames is that of the telling."""
    until(monitor, "gpu-0", Health.HEALTHY)
    driver.behaviour["a"] = raising(FailedDevice("gpu-0", "it smokes"))
    request = encoded(1, encoded(1, b"ns") + encoded(2, b"uid-a") + encoded(3, b"a"))
    with RawClient(server.paths.service) as client:
        client.call(1)
        client.next_of(DATA, 1)
        client.headers(3, request_headers(f"/{DRA}.v1.DRAPlugin/NodePrepareResources"))
        client.send(frame(DATA, END_STREAM, 3, message(request)))
        told = []
        while not told or told[-1][0] != 3:
            found = client.next_frame()
            assert found is not None
            if found[0] == DATA:
                told.append((found[2], b"it smokes" in found[3]))
    assert (1, True) in told
    assert told[-1] == (3, True)


def test_a_dead_device_never_keeps_a_pod_from_ending(
    monitor: Monitor, driver: Driver, kubelet: Kubelet
) -> None:
    kubelet.prepare(claim("a"))
    driver.behaviour["a"] = raising(FailedDevice("gpu-0", "it smokes"))
    assert kubelet.unprepare(claim("a"))["uid-a"].error == ""
    driver.behaviour["b"] = raising(TransientError("is busy"))
    kubelet.prepare(claim("c"))
    driver.behaviour["c"] = raising(OSError("no idea"))
    assert kubelet.unprepare(claim("b"))["uid-b"].error != "", "of it nobody knows a dead device"


def test_a_handler_that_judges_itself_is_believed(monitor: Monitor, kubelet_dir: Path) -> None:
    class Judging(Driver):
        @classified(monitor)
        def prepare(self, of: Claim) -> Sequence[PreparedDevice]:
            self.prepared.append(of.name)
            raise BadConfig("no such mode", code="config.conflict")

    driver = Judging()
    with serving(monitor, driver, kubelet_dir) as kubelet:
        assert "code=config.conflict" in kubelet.prepare(claim("a"))["uid-a"].error
    (outcome,) = monitor.tracker.outcomes()
    assert outcome.verdict is not None
    assert outcome.verdict.count == 1, "and judged once"


# --- bad claims, bad answers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "code=driver.bug.answer"),
        ([PreparedDevice((), NODE, "gpu-7")], f"{NODE}/gpu-7: is no device of the claim"),
        ([PreparedDevice((), NODE, "gpu-0", ("gpu-0",))], "'gpu-0' is not <vendor>/<class>=<name>"),
    ],
)
def test_a_wrong_answer_is_the_drivers_bug(
    monitor: Monitor, kubelet_dir: Path, answer: object, words: str
) -> None:
    class Wrong(Driver):
        def prepare(self, of: Claim) -> Any:
            return answer

    with serving(monitor, Wrong(), kubelet_dir) as kubelet:
        error = kubelet.prepare(claim("a"))["uid-a"].error
    assert "class=unknown code=driver.bug.answer" in error
    assert words in error


def test_what_the_claims_raise_is_judged_too(monitor: Monitor, driver: Driver, kubelet_dir: Path) -> None:
    def fetch(asked: ClaimRef) -> Claim:
        if asked.name == "refused":
            raise TransientError("asked too much", code="api.429", retry_after_s=3600)
        if asked.name == "other":
            return claim_of(asked._replace(uid="another"))
        return "no claim"  # type: ignore[return-value]

    with serving(monitor, driver, kubelet_dir, fetch, serialize=False) as kubelet:
        answers = kubelet.prepare(claim("refused"), claim("other"), claim("wrong"), timeout_s=SHORT_S)
    assert "class=transient code=api.429" in answers["uid-refused"].error
    assert "class=transient code=" in answers["uid-other"].error
    assert "claims returned str, not a Claim" in answers["uid-wrong"].error
    assert driver.prepared == []


def test_a_claim_that_cannot_be_fetched_for_a_moment_is_fetched_again(
    monitor: Monitor, driver: Driver, kubelet_dir: Path
) -> None:
    left = [TransientError("conflict", code="api.conflict"), TransientError("timeout", code="api.timeout")]

    def fetch(asked: ClaimRef) -> Claim:
        if left:
            raise left.pop()
        return claim_of(asked)

    with serving(monitor, driver, kubelet_dir, fetch) as kubelet:
        assert kubelet.prepare(claim("a"))["uid-a"].error == ""


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration()])
def test_no_handler_ends_the_server(
    driver: Driver, server: PluginServer, kubelet: Kubelet, error: Any
) -> None:
    driver.behaviour["a"] = raising(error)
    text = kubelet.prepare(claim("a"))["uid-a"].error
    assert "class=unknown code=driver." in text
    assert type(error).__name__ in text
    assert kubelet.prepare(claim("b"))["uid-b"].error == ""
    assert server.failure is None


# --- turns --------------------------------------------------------------------------------------------------


def test_the_driver_is_called_for_one_claim_at_a_time(
    monitor: Monitor, driver: Driver, kubelet: Kubelet
) -> None:
    inside = threading.Semaphore(1)

    def behave() -> None:
        assert inside.acquire(blocking=False), "it is alone"
        time.sleep(0)
        inside.release()

    names = [f"c{n}" for n in range(20)]
    driver.behaviour = dict.fromkeys(names, behave)
    for call in (kubelet.prepare, kubelet.unprepare):
        assert {one.error for one in call(*map(claim, names)).values()} == {""}


def test_a_claim_that_waits_for_a_release_does_not_hold_it_up(driver: Driver, kubelet: Kubelet) -> None:
    holders = ["b"]

    def overlap() -> None:
        if holders:
            raise TransientError(f"is still held by {holders}", code="cpu.overlap")

    driver.behaviour = {"a": overlap, "b": holders.clear}
    waiting = kubelet.prepare_soon(claim("a"))
    eventually(lambda: len(driver.prepared) > 1, "it is tried again")
    assert not waiting.done()
    assert kubelet.unprepare(claim("b"))["uid-b"].error == ""
    assert waiting.result().claims["uid-a"].error == ""


def test_a_claim_that_cannot_be_fetched_holds_up_no_other(
    monitor: Monitor, driver: Driver, kubelet_dir: Path
) -> None:
    release = threading.Event()

    def fetch(asked: ClaimRef) -> Claim:
        if asked.name == "slow":
            release.wait()
        return claim_of(asked)

    with serving(monitor, driver, kubelet_dir, fetch) as kubelet:
        slow = kubelet.prepare_soon(claim("slow"))
        assert kubelet.prepare(claim("a"))["uid-a"].error == ""
        release.set()
        assert slow.result().claims["uid-slow"].error == ""


def test_whose_turn_does_not_come_is_told_so_and_nobody_remembers_it(
    monitor: Monitor, driver: Driver, kubelet: Kubelet
) -> None:
    release = threading.Event()
    driver.behaviour["slow"] = release.wait
    slow = kubelet.prepare_soon(claim("slow"))
    eventually(lambda: driver.prepared == ["slow"], "it has begun")
    for call in (kubelet.prepare, kubelet.unprepare):
        error = call(claim("next"), timeout_s=SHORT_S)["uid-next"].error
        assert "class=transient code=deadline" in error
        assert "what came before it was not done in time" in error
    assert monitor.tracker.outcomes() == ()
    assert (driver.prepared, driver.unprepared) == (["slow"], [])
    release.set()
    assert slow.result().claims["uid-slow"].error == ""
    assert kubelet.prepare(claim("next"))["uid-next"].error == ""


def test_another_instance_has_the_turn_and_then_lets_it_go(
    monitor: Monitor, driver: Driver, server: PluginServer, kubelet: Kubelet
) -> None:
    with (server.paths.plugin_dir / FILE).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        error = kubelet.prepare(claim("a"), timeout_s=SHORT_S)["uid-a"].error
        assert "class=transient code=lock.timeout" in error
        assert (driver.prepared, monitor.tracker.outcomes()) == ([], ())
        waiting = kubelet.prepare_soon(claim("a"))
        fcntl.flock(other, fcntl.LOCK_UN)
        assert waiting.result().claims["uid-a"].error == ""


def test_a_lock_file_that_cannot_be_made_fails_the_claim_and_nobody_remembers_it(
    monitor: Monitor, driver: Driver, server: PluginServer, kubelet: Kubelet
) -> None:
    (server.paths.plugin_dir / FILE).mkdir()
    for call in (kubelet.prepare, kubelet.unprepare):
        assert "EISDIR" in call(claim("a"))["uid-a"].error
    assert (driver.prepared, driver.unprepared, monitor.tracker.outcomes()) == ([], [], ())


# --- hosts --------------------------------------------------------------------------------------------------


class AsyncDriver:
    """Async functions, of whichever loop; says in which thread they ran."""

    def __init__(self, checkpoint: Callable[[], Any]) -> None:
        self.threads: set[int] = set()
        self._checkpoint = checkpoint

    async def claims(self, asked: ClaimRef) -> Claim:
        await self._note()
        return claim_of(asked)

    async def prepare(self, of: Claim) -> Sequence[PreparedDevice]:
        await self._note()
        if of.name == "bad":
            raise BadConfig("no such mode")
        return prepared(of)

    async def unprepare(self, asked: ClaimRef) -> None:
        await self._note()

    async def _note(self) -> None:
        await self._checkpoint()
        self.threads.add(threading.get_ident())


def whole_life(socket: Path) -> tuple[str, str, str, list[str]]:
    """Prepare, a failure, unprepare, health: from a kubelet's thread."""
    with Kubelet(socket) as kubelet, watch_health(socket) as watcher:
        return (
            kubelet.prepare(claim("a"))["uid-a"].error,
            kubelet.prepare(claim("bad"))["uid-bad"].error[:17],
            kubelet.unprepare(claim("a"))["uid-a"].error,
            names(watcher.next()),
        )


WHOLE_LIFE = ("", "[class=bad-config", "", ["gpu-0"])


def test_an_asyncio_drivers_functions_run_in_its_own_loop(kubelet_dir: Path) -> None:
    driver = AsyncDriver(lambda: asyncio.sleep(0))

    async def main() -> None:
        monitor = new_monitor(kubelet_dir)
        server = PluginServer(monitor, driver, claims=driver.claims, kubelet_dir=kubelet_dir)
        async with monitor, server:
            loop = asyncio.get_running_loop()
            assert await loop.run_in_executor(KUBELETS, whole_life, server.paths.service) == WHOLE_LIFE

    asyncio.run(main())
    assert driver.threads == {threading.get_ident()}


async def test_a_trio_drivers_functions_run_in_its_own_loop(kubelet_dir: Path) -> None:
    driver = AsyncDriver(trio.lowlevel.checkpoint)
    monitor = new_monitor(kubelet_dir)
    server = PluginServer(monitor, driver, claims=driver.claims, kubelet_dir=kubelet_dir)
    async with monitor, server:
        assert await trio.to_thread.run_sync(whole_life, server.paths.service) == WHOLE_LIFE
    assert driver.threads == {threading.get_ident()}


def test_async_functions_without_a_loop_get_one_of_their_own(kubelet_dir: Path) -> None:
    driver = AsyncDriver(lambda: asyncio.sleep(0))
    with (
        new_monitor(kubelet_dir) as monitor,
        PluginServer(monitor, driver, claims=driver.claims, kubelet_dir=kubelet_dir) as server,
    ):
        assert whole_life(server.paths.service) == WHOLE_LIFE
    assert threading.get_ident() not in driver.threads


def test_plain_functions_run_in_threads_of_ours_whatever_the_host(kubelet_dir: Path, driver: Driver) -> None:
    driver.behaviour["bad"] = raising(BadConfig("no such mode"))

    async def main() -> None:
        monitor = new_monitor(kubelet_dir)
        async with monitor, PluginServer(monitor, driver, claims=claim_of, kubelet_dir=kubelet_dir) as server:
            loop = asyncio.get_running_loop()
            assert await loop.run_in_executor(KUBELETS, whole_life, server.paths.service) == WHOLE_LIFE

    asyncio.run(main())
    assert driver.threads == {"dh-prepare"}


async def test_a_trio_driver_that_is_cancelled_takes_leave_of_the_kubelet(
    kubelet_dir: Path, driver: Driver
) -> None:
    monitor = new_monitor(kubelet_dir)
    server = PluginServer(monitor, driver, claims=claim_of, kubelet_dir=kubelet_dir)
    with trio.CancelScope() as scope:
        async with monitor, server:
            assert server.paths.registration.exists()
            scope.cancel()
            await trio.sleep_forever()
    assert not server.paths.registration.exists()
    assert not server.paths.service.exists()


def test_health_flows_and_the_kubelet_is_answered_while_an_asyncio_driver_blocks_its_own_loop(
    kubelet_dir: Path,
) -> None:
    release = threading.Event()

    class Blocking(AsyncDriver):
        async def prepare(self, of: Claim) -> Sequence[PreparedDevice]:
            release.wait()  # noqa: ASYNC251, RUF100  # on purpose: it holds up its whole loop
            return prepared(of)

    driver = Blocking(lambda: asyncio.sleep(0))

    def life(socket: Path) -> None:
        with Kubelet(socket) as kubelet, watch_health(socket) as watcher:
            watcher.next()
            call = kubelet.prepare_soon(claim("a"))
            for _ in range(3):
                watcher.next()  # a check of every 100 ms goes on, and so do its verdicts
            assert "code=deadline" in kubelet.prepare(claim("a"), timeout_s=SHORT_S)["uid-a"].error
            assert not call.done()
            release.set()
            assert call.result().claims["uid-a"].error == ""

    async def main() -> None:
        monitor = new_monitor(kubelet_dir)
        turning = [0]

        @monitor.check(every=0.1, timeout=5, raise_after=1, clear_after=1)
        def turns(device: Device) -> object:
            turning[0] += 1
            return degraded("test.turns", f"turn {turning[0]}")

        async with (
            monitor,
            PluginServer(monitor, driver, claims=driver.claims, kubelet_dir=kubelet_dir) as server,
        ):
            await asyncio.get_running_loop().run_in_executor(KUBELETS, life, server.paths.service)

    asyncio.run(main())


def test_a_driver_whose_loop_has_ended_is_unavailable(kubelet_dir: Path, monitor: Monitor) -> None:
    driver = AsyncDriver(lambda: asyncio.sleep(0))
    server = PluginServer(monitor, driver, claims=driver.claims, kubelet_dir=kubelet_dir)

    async def forgets_to_stop() -> None:
        server.start()

    for run in (lambda: asyncio.run(forgets_to_stop()), lambda: trio.run(forgets_to_stop)):
        run()
        with Kubelet(server.paths.service) as kubelet, pytest.raises(grpc.RpcError) as raised:
            kubelet.prepare(claim("a"))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert raised.value.details() == "the driver's event loop has ended"
        assert server.stop(PATIENCE_S)


def test_a_loop_that_ends_in_the_middle_of_a_prepare_is_a_passing_failure() -> None:
    begun = threading.Event()

    async def never() -> None:
        begun.set()
        await asyncio.Event().wait()

    async def main(pool: ThreadPoolExecutor) -> Any:
        host = CallbackRunner()
        call = pool.submit(host.call, never)
        await asyncio.to_thread(begun.wait)
        return call

    with ThreadPoolExecutor() as pool:
        error = asyncio.run(main(pool)).exception()
    assert isinstance(error, TransientError)
    assert error.code == "driver.cancelled"


def test_a_loop_that_is_closed_over_a_prepare_and_cancels_nothing_is_a_passing_failure_too() -> None:
    begun = threading.Event()

    async def never() -> None:
        begun.set()
        await asyncio.get_running_loop().create_future()

    async def main(pool: ThreadPoolExecutor) -> Any:
        call = pool.submit(CallbackRunner().call, never)
        await asyncio.to_thread(begun.wait)
        return call

    loop = asyncio.new_event_loop()
    with ThreadPoolExecutor() as pool:
        call = loop.run_until_complete(main(pool))
        loop.close()
        error = call.exception(PATIENCE_S)
    assert isinstance(error, TransientError)
    assert error.code == "driver.shutting_down"


# --- the end, and failure -----------------------------------------------------------------------------------


def test_who_stops_it_while_it_starts_leaves_nothing_that_serves(
    monitor: Monitor, driver: Driver, kubelet_dir: Path
) -> None:
    for number in range(20):
        server = PluginServer(monitor, driver, claims=claim_of, kubelet_dir=kubelet_dir)
        starting = KUBELETS.submit(server.start)
        time.sleep(number * 0.0002)
        assert server.stop(PATIENCE_S)
        with suppress(RuntimeError):  # it was stopped before it was ready
            starting.result(PATIENCE_S)
        assert server.stop(PATIENCE_S)
        assert threads("dh-io") == 0
        assert not server.paths.registration.exists()


async def test_to_enter_it_again_is_refused_and_ends_nothing(server: PluginServer) -> None:
    with pytest.raises(RuntimeError, match="is started already"):
        async with server:
            pass
    with Kubelet(server.paths.service) as kubelet:
        assert kubelet.prepare(claim("a"))["uid-a"].error == ""


async def test_a_trio_program_whose_threads_all_hang_still_ends_it(kubelet_dir: Path, driver: Driver) -> None:
    release = threading.Event()
    limiter = trio.to_thread.current_default_thread_limiter()
    with trio.fail_after(PATIENCE_S):
        async with (
            new_monitor(kubelet_dir) as monitor,
            PluginServer(monitor, driver, claims=claim_of, kubelet_dir=kubelet_dir) as server,
        ):
            async with trio.open_nursery() as nursery:
                for _ in range(int(limiter.total_tokens)):
                    nursery.start_soon(partial(trio.to_thread.run_sync, release.wait, abandon_on_cancel=True))
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            assert limiter.available_tokens == 0
    release.set()
    assert not server.paths.service.exists()


def test_an_asyncio_program_that_is_cancelled_again_and_again_still_ends_it_first(
    kubelet_dir: Path, driver: Driver
) -> None:
    async def main(monitor: Monitor) -> None:
        server = PluginServer(monitor, driver, claims=claim_of, kubelet_dir=kubelet_dir)
        up = asyncio.Event()

        async def serve() -> None:
            try:
                async with server:
                    up.set()
                    await asyncio.Event().wait()
            finally:
                assert not server.paths.service.exists()

        serving = asyncio.create_task(serve())
        await up.wait()
        while not serving.done():
            serving.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await serving

    with new_monitor(kubelet_dir) as monitor:
        asyncio.run(main(monitor))


def test_it_starts_and_stops_any_number_of_times(server: PluginServer, driver: Driver) -> None:
    for _ in range(3):
        assert server.stop(PATIENCE_S)
        assert server.stop()
        assert not server.paths.registration.exists()
        server.start()
        with pytest.raises(RuntimeError, match="is started already"):
            server.start()
        with Kubelet(server.paths.service) as kubelet:
            assert kubelet.prepare(claim("a"))["uid-a"].error == ""


def test_what_is_under_way_is_finished_first(server: PluginServer, driver: Driver, kubelet: Kubelet) -> None:
    release = threading.Event()
    driver.behaviour["a"] = release.wait
    call = kubelet.prepare_soon(claim("a"))
    eventually(lambda: driver.prepared == ["a"], "it has begun")
    stopping = KUBELETS.submit(server.stop, 10)
    eventually(lambda: not server.paths.registration.exists(), "the kubelet is told first")
    release.set()
    assert call.result().claims["uid-a"].error == ""
    assert stopping.result()


def test_a_claim_whose_turn_comes_after_the_end_is_not_begun(
    server: PluginServer, driver: Driver, kubelet: Kubelet
) -> None:
    release = threading.Event()
    driver.behaviour["slow"] = release.wait
    slow = kubelet.prepare_soon(claim("slow"))
    eventually(lambda: driver.prepared == ["slow"], "it has begun")
    late = kubelet.prepare_soon(claim("late"))
    eventually(lambda: threads("dh-prepare") == 2, "it is under way")
    stopping = KUBELETS.submit(server.stop, 10)
    eventually(lambda: not server.paths.registration.exists(), "the end has begun")
    release.set()
    assert slow.result().claims["uid-slow"].error == ""
    assert "code=driver.shutting_down" in late.result().claims["uid-late"].error
    assert stopping.result()
    assert driver.prepared == ["slow"]


@pytest.mark.parametrize("run", [asyncio.run, lambda coroutine: trio.run(lambda: coroutine)])
def test_a_loop_cannot_stop_what_needs_it_to_end_and_has_aclose_for_that(
    kubelet_dir: Path, run: Callable[[Any], None]
) -> None:
    driver = Driver()

    async def main() -> None:
        monitor = new_monitor(kubelet_dir)
        server = PluginServer(monitor, driver, claims=claim_of, kubelet_dir=kubelet_dir)
        assert server.stop(), "there is nothing to stop"
        monitor.start()
        server.start()
        with pytest.raises(RuntimeError, match=r"stop\(\) would block the driver's own loop: use 'await"):
            server.stop()
        assert server.paths.registration.exists()
        assert await server.aclose()
        assert await server.aclose()
        assert server.stop()
        assert not server.paths.registration.exists()
        assert await monitor.aclose()

    run(main())


def test_what_is_remembered_is_where_the_kubelets_directory_is(
    kubelet_dir: Path, driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is said once: to the monitor."""
    driver.behaviour["a"] = raising(BadConfig("no such mode"))
    with (
        Monitor(DRIVER, hardware=False, kubelet_dir=kubelet_dir) as monitor,
        PluginServer(monitor, driver, claims=claim_of) as server,
        Kubelet(server.paths.service) as kubelet,
    ):
        assert server.paths.service == kubelet_dir / "plugins" / DRIVER / "dra.sock"
        assert "code=config.invalid" in kubelet.prepare(claim("a"))["uid-a"].error
    assert drahealth(["prepares", "--kubelet-dir", str(kubelet_dir), "-o", "json"]) == 2
    (found,) = json.loads(capsys.readouterr().out)["claims"]
    assert found["name"] == "a"


def test_a_driver_that_hangs_is_left_behind_and_is_not_called_again(
    server: PluginServer, driver: Driver, kubelet: Kubelet
) -> None:
    release = threading.Event()

    def behave() -> None:
        release.wait()
        raise TransientError("is busy")

    driver.behaviour["a"] = behave
    call = kubelet.prepare_soon(claim("a"))
    eventually(lambda: driver.prepared == ["a"], "it has begun")
    assert server.stop(2)
    assert call.exception().code() is grpc.StatusCode.UNAVAILABLE
    release.set()
    eventually(lambda: not threads("dh-prepare"), "it has given up")
    assert driver.prepared == ["a"]


class Telling(Monitor):
    """A monitor whose reports can be told from outside."""

    def subscribe(self) -> Latest[Report]:
        self.latest = super().subscribe()
        return self.latest


def test_a_server_that_fails_says_so_and_ends_nothing_else(driver: Driver, kubelet_dir: Path) -> None:
    failures: list[BaseException] = []
    with Telling(DRIVER, hardware=False, state_dir=None) as monitor:
        server = PluginServer(
            monitor, driver, claims=claim_of, kubelet_dir=kubelet_dir, on_error=failures.append
        )
        server.start()
        monitor.latest.publish(report([device("gpu-0"), device("gpu-0")]))  # which no kubelet can be told
        eventually(lambda: bool(failures), "the driver is told")
        assert failures == [server.failure]
        assert "twice" in str(server.failure)
        assert not server.paths.registration.exists()
        assert monitor.failure is None
        assert server.stop(PATIENCE_S)
        with server, Kubelet(server.paths.service) as kubelet:
            assert server.failure is None
            assert kubelet.prepare(claim("a"))["uid-a"].error == ""


def test_what_cannot_be_served_is_raised_and_leaves_nothing(
    monitor: Monitor, driver: Driver, tmp_path: Path
) -> None:
    before = ours()
    with pytest.raises(ConfigError, match="no such directory; is it the one that the kubelet watches"):
        PluginServer(monitor, driver, claims=claim_of, kubelet_dir=Path(tempfile.mkdtemp(dir="/tmp"))).start()
    with pytest.raises(ConfigError, match="is relative; --kubelet-dir takes an absolute path"):
        PluginServer(monitor, driver, claims=claim_of, kubelet_dir=Path("kubelet"))
    eventually(lambda: ours() <= before, "no thread is left")


def test_the_registration_status_reaches_the_driver(
    monitor: Monitor, driver: Driver, kubelet_dir: Path
) -> None:
    said: list[tuple[bool, str]] = []
    server = PluginServer(
        monitor,
        driver,
        claims=claim_of,
        kubelet_dir=kubelet_dir,
        on_status=lambda registered, error: said.append((registered, error)),
    )
    with server, Kubelet(server.paths.registration) as kubelet:
        kubelet.notify(False, "name is taken")
        kubelet.notify(True)
    assert said == [(False, "name is taken"), (True, "")]


def test_nothing_of_the_process_is_changed(monitor: Monitor, driver: Driver, kubelet_dir: Path) -> None:
    def state() -> tuple[object, ...]:
        signals = tuple(signal.getsignal(number) for number in signal.valid_signals())
        logging_ = (
            tuple(logging.getLogger().handlers),
            logging.getLogger("agent").handlers,
            logging.root.level,
        )
        return (signals, logging_, type(asyncio.get_event_loop_policy()), sys.getswitchinterval())

    before = state()
    with serving(monitor, driver, kubelet_dir) as kubelet:
        kubelet.prepare(claim("a"))
        assert state() == before
    assert state() == before


def test_a_server_whose_monitor_was_never_started_is_refused(kubelet_dir: Path, driver: Driver) -> None:
    """It would register, and say of every device that nobody knows."""
    server = PluginServer(new_monitor(kubelet_dir), driver, claims=claim_of)
    with pytest.raises(RuntimeError, match="start the monitor first"):
        server.start()
    assert not server.paths.registration.exists()
