"""A whole plugin inside a driver: asyncio's, Trio's, or neither, as a kubelet sees it."""

import asyncio
import fcntl
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import trio
import trio.testing
from embedded.process_state import event_loop_policy
from embedding import DRIVER, NODE, broken_log_handler, patient, until
from patience import PATIENCE_S
from wire.google import names, watch_health
from wire.plugin import (
    DRA,
    Kubelet,
    answer_unfinished_claims_soon,
    claim,
    encode_field,
    refuse_waiting_claims,
)
from wire.raw import DATA, END_STREAM, RawClient, frame, message, request_headers
from wire.serving import device, eventually, report

from agent.cli.main import main as drahealth
from agent.config.config import Config
from agent.embed.callback_runner import DriverCallbackRunner
from agent.embed.checks import degraded, unhealthy
from agent.embed.devices import Device
from agent.embed.monitor import Monitor
from agent.embed.plugin import PluginServer
from agent.errors import ConfigError
from agent.model.claim import Claim, ClaimDevice, ClaimRef
from agent.model.health import Finding, Health, Taints
from agent.model.report import Report
from agent.prepare.errors import BadConfigError, DriverError, FailedDeviceError, TransientError
from agent.prepare.step_runners import classified
from agent.serve.dra_plugin.instance_locks import FILE
from agent.serve.dra_plugin.prepared_devices import PreparedDevice
from agent.system.threads.latest_value import LatestValue

__all__ = ["patient"]
pytestmark = pytest.mark.usefixtures("patient")

KUBELETS = ThreadPoolExecutor(max_workers=4, thread_name_prefix="kubelet")
"""Threads of kubelets, for drivers that need the test's own thread."""


def claim_of(asked: ClaimRef) -> Claim:
    """Return a claim of the API server with one device."""
    return Claim(*asked, devices=(ClaimDevice("r", DRIVER, NODE, "gpu-0"),))


def prepared_devices(of: Claim) -> list[PreparedDevice]:
    return [
        PreparedDevice(pool=device.pool, device=device.device, cdi_ids=(f"example.com/gpu={of.uid}",))
        for device in of.devices
    ]


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
        return prepared_devices(of)

    def unprepare(self, asked: ClaimRef) -> None:
        self.unprepared.append(asked.name)
        if behaviour := self.behaviour.get(asked.name):
            behaviour()


def error_raiser(error: BaseException) -> Callable[[], object]:
    def behave() -> object:
        raise error

    return behave


def library_threads() -> set[threading.Thread]:
    """Return all threads of the library, also those of other tests."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("dh-")}


def threads(name: str, ignored: Collection[threading.Thread] = ()) -> int:
    """Return the number of threads with this name, without those of other tests that are `ignored`."""
    return sum(thread.name == name for thread in threading.enumerate() if thread not in ignored)


@pytest.fixture
def kubelet_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # short: a socket's path is 107 bytes at most
        (Path(directory) / "plugins_registry").mkdir()
        yield Path(directory)


@pytest.fixture
def monitor(kubelet_dir: Path) -> Iterator[Monitor]:
    with new_monitor(kubelet_dir) as monitor:
        yield monitor


def new_monitor(kubelet_dir: Path, config: Config | None = None) -> Monitor:
    monitor = Monitor(DRIVER, hardware=False, state_dir=kubelet_dir / "state", config=config)
    monitor.add(Device("gpu-0", pool=NODE))
    monitor.check(every_s=0.1, timeout_s=PATIENCE_S)(is_well)
    return monitor


def is_well(device: Device) -> bool:
    return True


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def server(monitor: Monitor, driver: Driver, kubelet_dir: Path) -> Iterator[PluginServer]:
    with PluginServer(monitor, driver, get_claim=claim_of, kubelet_dir=kubelet_dir) as server:
        yield server


@contextmanager
def serve_driver(
    monitor: Monitor,
    driver: Any,
    kubelet_dir: Path,
    claims: Callable[[ClaimRef], Any] = claim_of,
    **options: Any,
) -> Iterator[Kubelet]:
    """Serve a driver, and yield a kubelet that calls it."""
    with (
        PluginServer(monitor, driver, get_claim=claims, kubelet_dir=kubelet_dir, **options) as server,
        Kubelet(server.paths.service) as kubelet,
    ):
        yield kubelet


@pytest.fixture
def kubelet(server: PluginServer) -> Iterator[Kubelet]:
    with Kubelet(server.paths.service) as kubelet:
        yield kubelet


# --- answers to the kubelet ---------------------------------------------------------------------------------


def test_claim_is_fetched_prepared_and_unprepared(driver: Driver, kubelet: Kubelet) -> None:
    (device,) = kubelet.prepare(claim("a"))["uid-a"].devices
    assert (device.pool_name, device.device_name) == (NODE, "gpu-0")
    assert list(device.cdi_device_ids) == ["example.com/gpu=uid-a"]
    assert kubelet.unprepare(claim("a"))["uid-a"].error == ""
    assert kubelet.unprepare(claim("never-seen"))["uid-never-seen"].error == ""
    assert (driver.prepared, driver.unprepared) == (["a"], ["a", "never-seen"])


def test_health_and_prepares_use_the_same_device_names(
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


def test_each_failure_is_classified_and_recorded(monitor: Monitor, driver: Driver, kubelet: Kubelet) -> None:
    driver.behaviour = {
        "bad": error_raiser(BadConfigError("no such mode")),
        "bug": error_raiser(KeyError("mode")),
        "busy": error_raiser(TransientError("is busy", retry_after_s=3600)),
    }
    answers = kubelet.prepare(claim("bad"), claim("bug"), claim("busy"), claim("good"))
    assert "class=bad-config code=config.invalid" in answers["uid-bad"].error
    assert "class=unknown code=driver.bug.key_error" in answers["uid-bug"].error
    assert "class=transient code=driver.transient" in answers["uid-busy"].error
    assert answers["uid-good"].error == ""
    outcomes = {outcome.claim.name: outcome.verdict for outcome in monitor.tracker.outcomes()}
    assert {name: verdict and str(verdict.error_class) for name, verdict in outcomes.items()} == {
        "bad": "bad-config",
        "bug": "unknown",
        "busy": "transient",
        "good": None,
    }


def test_cached_failure_is_answered_without_calling_the_driver(driver: Driver, kubelet: Kubelet) -> None:
    driver.behaviour["bad"] = error_raiser(BadConfigError("no such mode"))
    first, second = (kubelet.prepare(claim("bad"))["uid-bad"].error for _ in range(2))
    assert first == second
    assert driver.prepared == ["bad"]


def test_transient_failure_is_retried_within_the_call(driver: Driver, kubelet: Kubelet) -> None:
    left = [TransientError("is busy"), TransientError("is still busy")]

    def behave() -> None:
        if left:
            raise left.pop()

    driver.behaviour["a"] = behave
    assert kubelet.prepare(claim("a"))["uid-a"].error == ""
    assert driver.prepared == ["a", "a", "a"]


def test_failed_device_is_unhealthy_before_the_kubelet_gets_the_error(
    monitor: Monitor, driver: Driver, server: PluginServer
) -> None:
    """On one connection the order of frames is the order of delivery."""
    until(monitor, "gpu-0", Health.HEALTHY)
    driver.behaviour["a"] = error_raiser(FailedDeviceError("gpu-0", "it smokes"))
    request = encode_field(1, encode_field(1, b"ns") + encode_field(2, b"uid-a") + encode_field(3, b"a"))
    with RawClient(server.paths.service) as client:
        client.call(1)
        client.next_of(DATA, 1)
        client.headers(3, request_headers(f"/{DRA}.v1.DRAPlugin/NodePrepareResources"))
        client.send(frame(DATA, END_STREAM, 3, message(request)))
        frames = []
        while not frames or frames[-1][0] != 3:
            found = client.next_frame()
            assert found is not None
            if found[0] == DATA:
                frames.append((found[2], b"it smokes" in found[3]))
    assert (1, True) in frames
    assert frames[-1] == (3, True)


def test_failed_device_is_tainted_before_the_kubelet_gets_the_error(kubelet_dir: Path) -> None:
    published: list[set[str]] = []
    driver, monitor = Driver(), new_monitor(kubelet_dir)
    monitor.tracker._taint_wait_s = PATIENCE_S  # above the limit of the configuration
    monitor.on_taints(lambda taints: published.append(tainted_devices(taints)))
    driver.behaviour["a"] = error_raiser(FailedDeviceError("gpu-0", "it smokes"))
    with monitor, serve_driver(monitor, driver, kubelet_dir) as kubelet:
        until(monitor, "gpu-0", Health.HEALTHY)
        eventually(lambda: published, "the first call, which no later one may follow at once")
        assert "it smokes" in kubelet.prepare(claim("a"))["uid-a"].error
        assert published[-1] == {"gpu-0"}


def test_hung_taint_callback_delays_the_error_within_its_limit(
    kubelet_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    driver, monitor = Driver(), new_monitor(kubelet_dir, Config(node_name=NODE, taint_wait_s=0.1))
    monitor.on_taints(lambda taints: release.wait())
    driver.behaviour["a"] = error_raiser(FailedDeviceError("gpu-0", "it smokes"))
    try:
        with monitor, serve_driver(monitor, driver, kubelet_dir) as kubelet:
            until(monitor, "gpu-0", Health.HEALTHY)
            assert "it smokes" in kubelet.prepare(claim("a"))["uid-a"].error
            assert f"device {DRIVER}/{NODE}/gpu-0: taint not published within 0.1 s" in caplog.text
            release.set()
    finally:
        release.set()


class Link:
    """Health check of a link; its next periodic run is an hour away."""

    def __init__(self) -> None:
        self.states = ["up"]
        """Results of the next runs; the last one stays."""
        self.runs = 0

    def __call__(self, device: Device) -> Finding | None:
        self.runs += 1
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return None if state == "up" else unhealthy("card.link", f"link is {state}, not up")


def checked_monitor(kubelet_dir: Path, link: Link) -> Monitor:
    monitor = Monitor(DRIVER, hardware=False, state_dir=kubelet_dir / "state")
    monitor.add(Device("gpu-0", pool=NODE))
    monitor.check(every_s=3600, timeout_s=PATIENCE_S, raise_after=3, name="link")(link)
    return monitor


def test_fault_that_the_engine_is_about_to_find_is_in_the_first_text(
    kubelet_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link, driver = Link(), Driver()

    def break_link() -> None:
        link.states = ["down"]
        raise KeyError("speed")

    driver.behaviour["a"] = break_link
    monitor = checked_monitor(kubelet_dir, link)
    with monitor, serve_driver(monitor, driver, kubelet_dir) as kubelet:
        until(monitor, "gpu-0", Health.HEALTHY)
        first, second = (kubelet.prepare(claim("a"))["uid-a"].error for _ in range(2))
    assert "class=failed-device code=card.link" in first
    assert first == second
    assert "driver.bug.key_error" not in caplog.text


def test_unconfirmed_fault_of_a_check_keeps_the_failures_class(kubelet_dir: Path) -> None:
    link, driver = Link(), Driver()

    def disturb_link() -> None:
        link.states = ["down", "down", "up"]
        raise KeyError("speed")

    driver.behaviour["a"] = disturb_link
    monitor = checked_monitor(kubelet_dir, link)
    with monitor, serve_driver(monitor, driver, kubelet_dir) as kubelet:
        until(monitor, "gpu-0", Health.HEALTHY)
        assert "code=driver.bug.key_error" in kubelet.prepare(claim("a"))["uid-a"].error
        assert link.states == ["up"], "the check ran until the fault was not confirmed"
        assert until(monitor, "gpu-0", Health.HEALTHY)


def tainted_devices(taints: Taints) -> set[str]:
    return {ref.device for ref, device_taints in taints.devices.items() if device_taints}


def test_dead_device_does_not_block_the_unprepare(monitor: Monitor, driver: Driver, kubelet: Kubelet) -> None:
    kubelet.prepare(claim("a"))
    driver.behaviour["a"] = error_raiser(FailedDeviceError("gpu-0", "it smokes"))
    assert kubelet.unprepare(claim("a"))["uid-a"].error == ""
    driver.behaviour["b"] = error_raiser(TransientError("is busy"))
    kubelet.prepare(claim("c"))
    driver.behaviour["c"] = error_raiser(OSError("no idea"))
    assert kubelet.unprepare(claim("b"))["uid-b"].error != "", "the ledger has no dead device of it"


def test_verdict_of_the_handler_is_kept(monitor: Monitor, kubelet_dir: Path) -> None:
    class Judging(Driver):
        @classified(monitor)
        def prepare(self, of: Claim) -> Sequence[PreparedDevice]:
            self.prepared.append(of.name)
            raise BadConfigError("no such mode", code="config.conflict")

    driver = Judging()
    with serve_driver(monitor, driver, kubelet_dir) as kubelet:
        assert "code=config.conflict" in kubelet.prepare(claim("a"))["uid-a"].error
    (outcome,) = monitor.tracker.outcomes()
    assert outcome.verdict is not None
    assert outcome.verdict.count == 1, "and judged once"


# --- bad claims, bad answers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "code=driver.bug.answer"),
        ([PreparedDevice(pool=NODE, device="gpu-7")], f"{NODE}/gpu-7: is not a device of the claim"),
        (
            [PreparedDevice(pool=NODE, device="gpu-0", cdi_ids=("gpu-0",))],
            "'gpu-0' is not <vendor>/<class>=<name>",
        ),
    ],
)
def test_invalid_answer_is_a_driver_bug(
    monitor: Monitor, kubelet_dir: Path, answer: object, words: str
) -> None:
    class DriverWithInvalidAnswer(Driver):
        def prepare(self, of: Claim) -> Any:
            return answer

    with serve_driver(monitor, DriverWithInvalidAnswer(), kubelet_dir) as kubelet:
        error = kubelet.prepare(claim("a"))["uid-a"].error
    assert "class=unknown code=driver.bug.answer" in error
    assert words in error


def test_exceptions_of_the_claims_function_are_classified(
    monitor: Monitor, driver: Driver, kubelet_dir: Path
) -> None:
    def fetch(asked: ClaimRef) -> Claim:
        if asked.name == "refused":
            raise TransientError("rate limit", code="api.429", retry_after_s=3600)
        if asked.name == "other":
            return claim_of(asked._replace(uid="another"))
        return "no claim"  # type: ignore[return-value]

    with serve_driver(monitor, driver, kubelet_dir, fetch, serialize=False) as kubelet:
        answers = kubelet.prepare(claim("refused"), claim("other"), claim("wrong"))
    assert "class=transient code=api.429" in answers["uid-refused"].error
    assert "class=transient code=" in answers["uid-other"].error
    assert "function `get_claim` returned str, not a Claim" in answers["uid-wrong"].error
    assert driver.prepared == []


class HttpError(Exception):
    """Exception of an HTTP client that knows nothing of Kubernetes."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the server answered {status}")
        self.status_code = status


def refuse_connection() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        urllib.request.urlopen(f"http://127.0.0.1:{unused.getsockname()[1]}/")  # it does not listen


async def refuse_async_connection() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        await asyncio.open_connection("127.0.0.1", unused.getsockname()[1])


async def refuse_all_addresses() -> None:
    """Fail as asyncio does for a host with several addresses."""
    raise OSError("Multiple exceptions: [Errno 111] Connect call failed ('::1', 1), [Errno 111] Connect call")


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (error_raiser(HttpError(404)), "claim.not_found"),
        (error_raiser(HttpError(429)), "api.429"),
        (error_raiser(HttpError(503)), "api.5xx"),
        (error_raiser(TimeoutError()), "api.timeout"),
        (error_raiser(ConnectionResetError()), "api.unreachable"),
        (error_raiser(socket.gaierror(-2, "Name or service not known")), "api.unreachable"),
        (refuse_connection, "api.unreachable"),
        (refuse_async_connection, "api.unreachable"),
        (refuse_all_addresses, "api.unreachable"),
    ],
)
def test_failed_fetch_is_classified_as_a_call_of_the_api_server(
    monitor: Monitor, driver: Driver, kubelet_dir: Path, failure: Callable[[], Any], code: str
) -> None:
    def fetch(asked: ClaimRef) -> Any:
        return failure() if asked.name == "unread" else claim_of(asked)

    driver.behaviour["bad"] = error_raiser(BadConfigError("ends the retries"))
    with serve_driver(monitor, driver, kubelet_dir, fetch) as kubelet:
        error = kubelet.prepare(claim("unread"), claim("bad"))["uid-unread"].error
    assert f"class=transient code={code} " in error


def test_failed_fetch_with_a_missing_permission_is_permanent(
    monitor: Monitor, driver: Driver, kubelet_dir: Path
) -> None:
    with serve_driver(monitor, driver, kubelet_dir, lambda _: error_raiser(HttpError(403))()) as kubelet:
        assert "class=permanent code=api.forbidden " in kubelet.prepare(claim("a"))["uid-a"].error


def test_exception_in_get_claim_is_classified_as_a_driver_bug(
    monitor: Monitor, driver: Driver, kubelet_dir: Path
) -> None:
    with serve_driver(
        monitor, driver, kubelet_dir, lambda _: error_raiser(KeyError("metadata"))()
    ) as kubelet:
        assert "class=unknown code=driver.bug.key_error" in kubelet.prepare(claim("a"))["uid-a"].error


def test_transient_fetch_failure_is_retried(monitor: Monitor, driver: Driver, kubelet_dir: Path) -> None:
    left = [TransientError("conflict", code="api.conflict"), TransientError("timeout", code="api.timeout")]

    def fetch(asked: ClaimRef) -> Claim:
        if left:
            raise left.pop()
        return claim_of(asked)

    with serve_driver(monitor, driver, kubelet_dir, fetch) as kubelet:
        assert kubelet.prepare(claim("a"))["uid-a"].error == ""


def test_failed_fetch_is_retried_while_a_device_of_the_claim_is_unhealthy(kubelet_dir: Path) -> None:
    """The read of a claim fails by itself: it does not need the devices of the last prepare."""
    link, driver = Link(), Driver()
    failures: list[Exception | None] = [None, HttpError(503), None]

    def break_link() -> None:
        link.states = ["down"]
        raise KeyError("speed")

    def fetch(asked: ClaimRef) -> Claim:
        if (error := failures.pop(0)) is not None:
            raise error
        return claim_of(asked)

    driver.behaviour["a"] = break_link
    monitor = checked_monitor(kubelet_dir, link)
    with monitor, serve_driver(monitor, driver, kubelet_dir, fetch) as kubelet:
        until(monitor, "gpu-0", Health.HEALTHY)
        for _ in range(2):
            assert "class=failed-device code=card.link" in kubelet.prepare(claim("a"))["uid-a"].error
    assert failures == [], "the claim was read again after the failure"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration()])
def test_no_handler_ends_the_server(
    driver: Driver, server: PluginServer, kubelet: Kubelet, error: Any
) -> None:
    driver.behaviour["a"] = error_raiser(error)
    text = kubelet.prepare(claim("a"))["uid-a"].error
    assert "class=unknown code=driver." in text
    assert type(error).__name__ in text
    assert kubelet.prepare(claim("b"))["uid-b"].error == ""
    assert server.failure is None


# --- order of calls -----------------------------------------------------------------------------------------


def test_driver_is_called_for_one_claim_at_a_time(monitor: Monitor, driver: Driver, kubelet: Kubelet) -> None:
    inside = threading.Semaphore(1)

    def behave() -> None:
        assert inside.acquire(blocking=False), "it is alone"
        time.sleep(0)
        inside.release()

    names = [f"c{n}" for n in range(20)]
    driver.behaviour = dict.fromkeys(names, behave)
    for call in (kubelet.prepare, kubelet.unprepare):
        assert {answer.error for answer in call(*map(claim, names)).values()} == {""}


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let many tries of a prepare fit into the deadline of its call."""
    monkeypatch.setattr("agent.prepare.step_runners.MAX_PAUSE_S", 0.1)


@pytest.mark.usefixtures("short_pauses")
def test_claim_waiting_for_a_retry_releases_the_lock(driver: Driver, kubelet: Kubelet) -> None:
    holders = ["b"]

    def fail_on_overlap() -> None:
        if holders:
            raise TransientError(f"is still held by {holders}", code="cpu.overlap")

    driver.behaviour = {"a": fail_on_overlap, "b": holders.clear}
    waiting = kubelet.prepare_async(claim("a"))
    eventually(lambda: len(driver.prepared) > 1, "it is tried again")
    assert not waiting.done()
    assert kubelet.unprepare(claim("b"))["uid-b"].error == ""
    assert waiting.result().claims["uid-a"].error == ""


def test_failed_claim_ends_the_retries_of_the_others(driver: Driver, kubelet: Kubelet) -> None:
    """The pod cannot start: a retry would only delay the error that says what to change."""
    driver.behaviour = {
        "bad": error_raiser(BadConfigError("no such mode")),
        "busy": error_raiser(TransientError("is busy", code="cpu.overlap")),
    }
    answers = kubelet.prepare(claim("busy"), claim("good"), claim("bad"))
    assert answers["uid-good"].error == ""
    assert "class=transient code=cpu.overlap" in answers["uid-busy"].error, "not the end of the call's time"
    assert "ns/bad (bad-config config.invalid)" in answers["uid-busy"].error
    assert "class=bad-config code=config.invalid" in answers["uid-bad"].error


def test_invalid_claim_of_a_call_ends_the_retries_of_the_others(driver: Driver, kubelet: Kubelet) -> None:
    driver.behaviour["busy"] = error_raiser(TransientError("is busy", code="cpu.overlap"))
    answers = kubelet.prepare(claim("busy"), ClaimRef("ns", "", "uid-nameless"))
    assert "code=cpu.overlap" in answers["uid-busy"].error
    assert "name: is empty" in answers["uid-nameless"].error


def test_failure_in_a_fetch_ends_with_the_other_claims(
    monitor: Monitor, driver: Driver, kubelet_dir: Path
) -> None:
    def fetch(asked: ClaimRef) -> Claim:
        if asked.name == "unread":
            raise TransientError("too many requests", code="api.429")
        return claim_of(asked)

    driver.behaviour["bad"] = error_raiser(BadConfigError("no such mode"))
    with serve_driver(monitor, driver, kubelet_dir, fetch) as kubelet:
        answers = kubelet.prepare(claim("unread"), claim("bad"))
    assert "code=api.429" in answers["uid-unread"].error


@pytest.mark.usefixtures("short_pauses")
def test_claim_is_retried_for_a_call_whose_other_claims_succeed(driver: Driver, kubelet: Kubelet) -> None:
    """Another call with a failed claim shares the run, and does not end it."""
    release = threading.Event()

    def fail_on_overlap() -> None:
        if not release.is_set():
            raise TransientError("is busy", code="cpu.overlap")

    driver.behaviour = {"busy": fail_on_overlap, "bad": error_raiser(BadConfigError("no such mode"))}
    waiting = kubelet.prepare_async(claim("busy"), claim("good"))
    eventually(lambda: "busy" in driver.prepared, "the first try")
    other = kubelet.prepare_async(claim("busy"), claim("bad"))
    eventually(lambda: "bad" in driver.prepared, "the failure of the other call")
    tries = driver.prepared.count("busy")
    eventually(lambda: driver.prepared.count("busy") > tries + 1, "further tries")
    release.set()
    assert {claim.error for claim in waiting.result().claims.values()} == {""}
    assert other.result().claims["uid-busy"].error == ""


def test_unfetchable_claim_delays_no_other(monitor: Monitor, driver: Driver, kubelet_dir: Path) -> None:
    release = threading.Event()

    def fetch(asked: ClaimRef) -> Claim:
        if asked.name == "slow":
            release.wait()
        return claim_of(asked)

    with serve_driver(monitor, driver, kubelet_dir, fetch) as kubelet:
        slow = kubelet.prepare_async(claim("slow"))
        assert kubelet.prepare(claim("a"))["uid-a"].error == ""
        release.set()
        assert slow.result().claims["uid-slow"].error == ""


def test_lock_timeout_is_an_unrecorded_error(
    monitor: Monitor, driver: Driver, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    driver.behaviour["slow"] = release.wait
    slow = kubelet.prepare_async(claim("slow"))
    eventually(lambda: driver.prepared == ["slow"], "it has begun")
    with monkeypatch.context() as patches:
        refuse_waiting_claims(patches)
        for call in (kubelet.prepare, kubelet.unprepare):
            error = call(claim("next"))["uid-next"].error
            assert "class=transient code=deadline" in error
            assert "earlier prepares or unprepares of this driver still hang" in error
    assert monitor.tracker.outcomes() == ()
    assert (driver.prepared, driver.unprepared) == (["slow"], [])
    release.set()
    assert slow.result().claims["uid-slow"].error == ""
    assert kubelet.prepare(claim("next"))["uid-next"].error == ""


def test_lock_of_another_instance_times_out_until_released(
    monitor: Monitor,
    driver: Driver,
    server: PluginServer,
    kubelet: Kubelet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (server.paths.plugin_dir / FILE).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with monkeypatch.context() as patches:
            refuse_waiting_claims(patches)
            error = kubelet.prepare(claim("a"))["uid-a"].error
        assert "class=transient code=lock.timeout" in error
        assert (driver.prepared, monitor.tracker.outcomes()) == ([], ())
        waiting = kubelet.prepare_async(claim("a"))
        fcntl.flock(other, fcntl.LOCK_UN)
        assert waiting.result().claims["uid-a"].error == ""


def test_uncreatable_lock_file_is_an_unrecorded_error(
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
            raise BadConfigError("no such mode")
        return prepared_devices(of)

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


def test_asyncio_functions_run_in_the_drivers_loop(kubelet_dir: Path) -> None:
    driver = AsyncDriver(lambda: asyncio.sleep(0))

    async def main() -> None:
        monitor = new_monitor(kubelet_dir)
        server = PluginServer(monitor, driver, get_claim=driver.claims, kubelet_dir=kubelet_dir)
        async with monitor, server:
            loop = asyncio.get_running_loop()
            assert await loop.run_in_executor(KUBELETS, whole_life, server.paths.service) == WHOLE_LIFE

    asyncio.run(main())
    assert driver.threads == {threading.get_ident()}


async def test_trio_functions_run_in_the_drivers_loop(kubelet_dir: Path) -> None:
    driver = AsyncDriver(trio.lowlevel.checkpoint)
    monitor = new_monitor(kubelet_dir)
    server = PluginServer(monitor, driver, get_claim=driver.claims, kubelet_dir=kubelet_dir)
    async with monitor, server:
        assert await trio.to_thread.run_sync(whole_life, server.paths.service) == WHOLE_LIFE
    assert driver.threads == {threading.get_ident()}


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_exit_of_an_async_function_ends_no_driver(error: BaseException) -> None:
    async def exits() -> None:
        raise error

    async def main(pool: ThreadPoolExecutor) -> None:
        runner = DriverCallbackRunner()
        with pytest.raises(DriverError, match=f"raised {type(error).__name__}, which ends a process"):
            await asyncio.wrap_future(pool.submit(runner.call, exits))

    with ThreadPoolExecutor() as pool:
        asyncio.run(main(pool))
        trio.run(main_of_trio, exits)


async def main_of_trio(exits: Callable[[], object]) -> None:
    runner = DriverCallbackRunner()
    with pytest.raises(DriverError, match="which ends a process"):
        await trio.to_thread.run_sync(runner.call, exits)


def test_async_functions_without_a_loop_get_a_new_one(kubelet_dir: Path) -> None:
    driver = AsyncDriver(lambda: asyncio.sleep(0))
    with (
        new_monitor(kubelet_dir) as monitor,
        PluginServer(monitor, driver, get_claim=driver.claims, kubelet_dir=kubelet_dir) as server,
    ):
        assert whole_life(server.paths.service) == WHOLE_LIFE
    assert threading.get_ident() not in driver.threads


def test_plain_functions_run_in_claim_threads_in_any_program(kubelet_dir: Path, driver: Driver) -> None:
    driver.behaviour["bad"] = error_raiser(BadConfigError("no such mode"))

    async def main() -> None:
        monitor = new_monitor(kubelet_dir)
        async with (
            monitor,
            PluginServer(monitor, driver, get_claim=claim_of, kubelet_dir=kubelet_dir) as server,
        ):
            loop = asyncio.get_running_loop()
            assert await loop.run_in_executor(KUBELETS, whole_life, server.paths.service) == WHOLE_LIFE

    asyncio.run(main())
    assert driver.threads == {"dh-prepare"}


async def test_cancelled_trio_driver_unregisters(kubelet_dir: Path, driver: Driver) -> None:
    monitor = new_monitor(kubelet_dir)
    server = PluginServer(monitor, driver, get_claim=claim_of, kubelet_dir=kubelet_dir)
    with trio.CancelScope() as scope:
        async with monitor, server:
            assert server.paths.registration.exists()
            scope.cancel()
            await trio.sleep_forever()
    assert not server.paths.registration.exists()
    assert not server.paths.service.exists()


def test_blocked_asyncio_loop_delays_neither_health_nor_answers(
    kubelet_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_unfinished_claims_soon(monkeypatch)
    release = threading.Event()

    class Blocking(AsyncDriver):
        begun = False

        async def prepare(self, of: Claim) -> Sequence[PreparedDevice]:
            self.begun = True
            release.wait()  # noqa: ASYNC251, RUF100  # on purpose: it holds up its whole loop
            return prepared_devices(of)

    driver = Blocking(lambda: asyncio.sleep(0))

    def life(socket: Path) -> None:
        with Kubelet(socket) as kubelet, watch_health(socket) as watcher:
            watcher.next()
            call = kubelet.prepare_async(claim("a"))
            eventually(lambda: driver.begun, "the prepare blocks the loop")
            for _ in range(3):
                watcher.next()  # a check of every 100 ms goes on, and so do its verdicts
            assert "code=deadline" in kubelet.prepare(claim("a"), timeout_s=None)["uid-a"].error
            assert not call.done()
            release.set()
            assert call.result().claims["uid-a"].error == ""

    async def main() -> None:
        monitor = new_monitor(kubelet_dir)
        turning = [0]

        @monitor.check(every_s=0.1, timeout_s=PATIENCE_S, raise_after=1, clear_after=1)
        def turns(device: Device) -> object:
            turning[0] += 1
            return degraded("test.turns", f"turn {turning[0]}")

        async with (
            monitor,
            PluginServer(monitor, driver, get_claim=driver.claims, kubelet_dir=kubelet_dir) as server,
        ):
            await asyncio.get_running_loop().run_in_executor(KUBELETS, life, server.paths.service)

    asyncio.run(main())


def test_driver_with_an_ended_loop_is_unavailable(kubelet_dir: Path, monitor: Monitor) -> None:
    driver = AsyncDriver(lambda: asyncio.sleep(0))
    server = PluginServer(monitor, driver, get_claim=driver.claims, kubelet_dir=kubelet_dir)

    async def forgets_to_stop() -> None:
        server.start()

    for run in (lambda: asyncio.run(forgets_to_stop()), lambda: trio.run(forgets_to_stop)):
        run()
        with Kubelet(server.paths.service) as kubelet, pytest.raises(grpc.RpcError) as raised:
            kubelet.prepare(claim("a"))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert raised.value.details() == "the driver's event loop has ended"
        assert server.stop(PATIENCE_S)


def test_loop_end_during_a_prepare_is_transient() -> None:
    begun = threading.Event()

    async def wait_forever() -> None:
        begun.set()
        await asyncio.Event().wait()

    async def main(pool: ThreadPoolExecutor) -> Any:
        host = DriverCallbackRunner()
        call = pool.submit(host.call, wait_forever)
        await asyncio.to_thread(begun.wait)
        return call

    with ThreadPoolExecutor() as pool:
        error = asyncio.run(main(pool)).exception()
    assert isinstance(error, TransientError)
    assert error.code == "driver.cancelled"


def test_loop_close_during_a_prepare_is_transient() -> None:
    begun = threading.Event()

    async def wait_forever() -> None:
        begun.set()
        await asyncio.get_running_loop().create_future()

    async def main(pool: ThreadPoolExecutor) -> Any:
        call = pool.submit(DriverCallbackRunner().call, wait_forever)
        await asyncio.to_thread(begun.wait)
        return call

    loop = asyncio.new_event_loop()
    with ThreadPoolExecutor() as pool:
        call = loop.run_until_complete(main(pool))
        loop.close()
        error = call.exception(PATIENCE_S)
    assert isinstance(error, TransientError)
    assert error.code == "driver.shutting_down"


def test_loop_close_just_before_a_prepare_is_transient() -> None:
    class ClosedLoop(asyncio.SelectorEventLoop):
        """Loop that is closed after the thread of the prepare has found that it runs."""

        def is_running(self) -> bool:
            return super().is_running() or self.is_closed()

    async def make_runner() -> DriverCallbackRunner:
        return DriverCallbackRunner()

    with closing(ClosedLoop()) as loop:
        runner = loop.run_until_complete(make_runner())
    with pytest.raises(TransientError, match="the driver's event loop has ended") as raised:
        runner.call(asyncio.sleep, 0)
    assert raised.value.code == "driver.shutting_down"


# --- the end, and failure -----------------------------------------------------------------------------------


def test_stop_during_start_leaves_no_server(monitor: Monitor, driver: Driver, kubelet_dir: Path) -> None:
    before = library_threads()
    for number in range(20):
        server = PluginServer(monitor, driver, get_claim=claim_of, kubelet_dir=kubelet_dir)
        starting = KUBELETS.submit(server.start)
        time.sleep(number * 0.0002)
        assert server.stop(PATIENCE_S)
        with suppress(RuntimeError):  # it was stopped before it was ready
            starting.result(PATIENCE_S)
        assert server.stop(PATIENCE_S)
        assert threads("dh-io", before) == 0
        assert not server.paths.registration.exists()


async def test_second_enter_is_rejected_and_ends_nothing(server: PluginServer) -> None:
    with pytest.raises(RuntimeError, match="the plugin server runs already"):
        async with server:
            pass
    with Kubelet(server.paths.service) as kubelet:
        assert kubelet.prepare(claim("a"))["uid-a"].error == ""


async def test_trio_program_with_hung_threads_can_stop_the_server(kubelet_dir: Path, driver: Driver) -> None:
    release = threading.Event()
    limiter = trio.to_thread.current_default_thread_limiter()
    with trio.fail_after(PATIENCE_S):
        async with (
            new_monitor(kubelet_dir) as monitor,
            PluginServer(monitor, driver, get_claim=claim_of, kubelet_dir=kubelet_dir) as server,
        ):
            async with trio.open_nursery() as nursery:
                for _ in range(int(limiter.total_tokens)):
                    nursery.start_soon(partial(trio.to_thread.run_sync, release.wait, abandon_on_cancel=True))
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            assert limiter.available_tokens == 0
    release.set()
    assert not server.paths.service.exists()


def test_repeatedly_cancelled_asyncio_program_stops_the_server(kubelet_dir: Path, driver: Driver) -> None:
    async def main(monitor: Monitor) -> None:
        server = PluginServer(monitor, driver, get_claim=claim_of, kubelet_dir=kubelet_dir)
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


def test_server_starts_and_stops_repeatedly(server: PluginServer, driver: Driver) -> None:
    for _ in range(3):
        assert server.stop(PATIENCE_S)
        assert server.stop()
        assert not server.paths.registration.exists()
        server.start()
        with pytest.raises(RuntimeError, match="the plugin server runs already"):
            server.start()
        with Kubelet(server.paths.service) as kubelet:
            assert kubelet.prepare(claim("a"))["uid-a"].error == ""


def test_running_calls_finish_before_the_stop(server: PluginServer, driver: Driver, kubelet: Kubelet) -> None:
    release = threading.Event()
    driver.behaviour["a"] = release.wait
    call = kubelet.prepare_async(claim("a"))
    eventually(lambda: driver.prepared == ["a"], "it has begun")
    stopping = KUBELETS.submit(server.stop)
    eventually(lambda: not server.paths.registration.exists(), "the registration is removed first")
    release.set()
    assert call.result().claims["uid-a"].error == ""
    assert stopping.result()


def test_claim_after_the_stop_does_not_begin(server: PluginServer, driver: Driver, kubelet: Kubelet) -> None:
    before, release = library_threads(), threading.Event()
    driver.behaviour["slow"] = release.wait
    slow = kubelet.prepare_async(claim("slow"))
    eventually(lambda: driver.prepared == ["slow"], "it has begun")
    late = kubelet.prepare_async(claim("late"))
    eventually(lambda: threads("dh-prepare", before) == 2, "it is under way")
    stopping = KUBELETS.submit(server.stop)
    eventually(lambda: not server.paths.registration.exists(), "the end has begun")
    release.set()
    assert slow.result().claims["uid-slow"].error == ""
    assert "code=driver.shutting_down" in late.result().claims["uid-late"].error
    assert stopping.result()
    assert driver.prepared == ["slow"]


@pytest.mark.parametrize("run", [asyncio.run, lambda coroutine: trio.run(lambda: coroutine)])
def test_stop_in_the_drivers_loop_is_rejected_in_favor_of_aclose(
    kubelet_dir: Path, run: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.embed.monitor.CHECKS_STOP_S", PATIENCE_S)
    driver = Driver()

    async def main() -> None:
        monitor = new_monitor(kubelet_dir)
        server = PluginServer(monitor, driver, get_claim=claim_of, kubelet_dir=kubelet_dir)
        assert server.stop(), "there is nothing to stop"
        monitor.start()
        server.start()
        with pytest.raises(RuntimeError, match=r"stop\(\) blocks the driver's own loop; use 'await"):
            server.stop()
        assert server.paths.registration.exists()
        assert await server.aclose()
        assert await server.aclose()
        assert server.stop()
        assert not server.paths.registration.exists()
        assert await monitor.aclose()

    run(main())


def test_state_is_saved_below_the_kubelets_directory(
    kubelet_dir: Path, driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kubelet's directory is given once, to the monitor."""
    driver.behaviour["a"] = error_raiser(BadConfigError("no such mode"))
    with (
        Monitor(DRIVER, hardware=False, kubelet_dir=kubelet_dir) as monitor,
        PluginServer(monitor, driver, get_claim=claim_of) as server,
        Kubelet(server.paths.service) as kubelet,
    ):
        assert server.paths.service == kubelet_dir / "plugins" / DRIVER / "dra.sock"
        assert "code=config.invalid" in kubelet.prepare(claim("a"))["uid-a"].error
    assert drahealth(["prepares", "--kubelet-dir", str(kubelet_dir), "-o", "json"]) == 2
    (found,) = json.loads(capsys.readouterr().out)["claims"]
    assert found["name"] == "a"


def test_hung_driver_is_abandoned_and_not_called_again(
    server: PluginServer, driver: Driver, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.embed.plugin.END_S", PATIENCE_S - 0.5)  # the call has half a second
    before, release = library_threads(), threading.Event()

    def behave() -> None:
        release.wait()
        raise TransientError("is busy")

    driver.behaviour["a"] = behave
    call = kubelet.prepare_async(claim("a"))
    eventually(lambda: driver.prepared == ["a"], "it has begun")
    assert not server.stop(PATIENCE_S), "the thread of the prepare was abandoned"
    assert call.exception().code() is grpc.StatusCode.UNAVAILABLE
    release.set()
    eventually(lambda: not threads("dh-prepare", before), "it has given up")
    assert driver.prepared == ["a"]


def test_abandoned_prepare_does_not_go_on_after_the_next_start(
    monitor: Monitor, driver: Driver, kubelet_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.embed.plugin.END_S", PATIENCE_S - 0.5)  # the call has half a second
    before, release, fetched = library_threads(), threading.Event(), list[str]()

    def fetch(asked: ClaimRef) -> Claim:
        fetched.append(asked.name)
        release.wait(PATIENCE_S)
        return claim_of(asked)

    server = PluginServer(monitor, driver, get_claim=fetch, kubelet_dir=kubelet_dir)
    with server:
        with Kubelet(server.paths.service) as kubelet:
            call = kubelet.prepare_async(claim("a"))
            eventually(lambda: fetched == ["a"], "the claim is being read")
            assert not server.stop(PATIENCE_S)
            assert call.exception() is not None
        server.start()
        with Kubelet(server.paths.service) as kubelet:
            assert kubelet.unprepare(claim("a"))["uid-a"].error == ""
        release.set()
        eventually(lambda: not threads("dh-prepare", before), "the abandoned prepare has ended")
    assert (driver.prepared, driver.unprepared) == ([], ["a"])


class ManualMonitor(Monitor):
    """Monitor whose reports a test publishes."""

    def subscribe(self) -> LatestValue[Report]:
        self.latest = super().subscribe()
        return self.latest


def test_failed_server_calls_on_error_and_ends_nothing_else(driver: Driver, kubelet_dir: Path) -> None:
    failures: list[BaseException] = []
    with ManualMonitor(DRIVER, hardware=False, state_dir=None) as monitor:
        server = PluginServer(
            monitor, driver, get_claim=claim_of, kubelet_dir=kubelet_dir, on_error=failures.append
        )
        server.start()

        def has_failed() -> bool:
            # again each time: the monitor's own report may have replaced the one that cannot be encoded
            monitor.latest.publish(report([device("gpu-0"), device("gpu-0")]))
            return bool(failures)

        eventually(has_failed, "on_error is called")
        assert failures == [server.failure]
        assert "twice" in str(server.failure)
        assert not server.paths.registration.exists()
        assert monitor.failure is None
        assert server.stop(PATIENCE_S)
        with server, Kubelet(server.paths.service) as kubelet:
            assert server.failure is None
            assert kubelet.prepare(claim("a"))["uid-a"].error == ""


def test_start_error_is_raised_and_leaves_nothing(monitor: Monitor, driver: Driver, tmp_path: Path) -> None:
    before = library_threads()
    with pytest.raises(ConfigError, match="does not exist; in a pod, mount it from the host"):
        PluginServer(
            monitor, driver, get_claim=claim_of, kubelet_dir=Path(tempfile.mkdtemp(dir="/tmp"))
        ).start()
    with pytest.raises(ConfigError, match="is relative; give argument kubelet_dir an absolute path"):
        PluginServer(monitor, driver, get_claim=claim_of, kubelet_dir=Path("kubelet"))
    eventually(lambda: library_threads() <= before, "no thread is left")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"get_claim": None}, "argument get_claim: None is not a function"),
        ({"driver": object()}, r"argument driver\.prepare: None is not a function"),
        ({"monitor": "gpu.example.com"}, r"argument monitor: 'gpu\.example\.com' is not a Monitor"),
        ({"wire": "none"}, "argument wire: 'none' is not a WireMode"),
        ({"on_status": 3}, "argument on_status: 3 is not a function"),
        ({"on_error": 3}, "argument on_error: 3 is not a function"),
        ({"on_status": 0}, "argument on_status: 0 is not a function"),
        ({"on_error": ""}, "argument on_error: '' is not a function"),
    ],
)
def test_wrong_argument_of_the_server_is_refused(
    monitor: Monitor, driver: Driver, arguments: dict[str, Any], reason: str
) -> None:
    given = {"monitor": monitor, "driver": driver, "get_claim": claim_of} | arguments
    with pytest.raises(ConfigError, match=reason):
        PluginServer(**given)


def test_registration_status_reaches_the_driver(monitor: Monitor, driver: Driver, kubelet_dir: Path) -> None:
    statuses: list[tuple[bool, str]] = []
    server = PluginServer(
        monitor,
        driver,
        get_claim=claim_of,
        kubelet_dir=kubelet_dir,
        on_status=lambda registered, error: statuses.append((registered, error)),
    )
    with server, Kubelet(server.paths.registration) as kubelet:
        kubelet.notify(False, "name is taken")
        kubelet.notify(True)
    assert statuses == [(False, "name is taken"), (True, "")]


def test_process_state_is_unchanged(monitor: Monitor, driver: Driver, kubelet_dir: Path) -> None:
    def state() -> tuple[object, ...]:
        signals = tuple(signal.getsignal(number) for number in signal.valid_signals())
        logging_ = (
            tuple(logging.getLogger().handlers),
            logging.getLogger("agent").handlers,
            logging.root.level,
        )
        return (signals, logging_, type(event_loop_policy()), sys.getswitchinterval())

    before = state()
    with serve_driver(monitor, driver, kubelet_dir) as kubelet:
        kubelet.prepare(claim("a"))
        assert state() == before
    assert state() == before


def test_server_with_an_unstarted_monitor_is_rejected(kubelet_dir: Path, driver: Driver) -> None:
    """The server would register, with every device Unknown."""
    server = PluginServer(new_monitor(kubelet_dir), driver, get_claim=claim_of)
    with pytest.raises(RuntimeError, match="the monitor does not run; start it first"):
        server.start()
    assert not server.paths.registration.exists()


# --- the loop of a plain program ----------------------------------------------------------------------------


def test_run_ends_on_sigterm_and_restores_the_handlers(kubelet_dir: Path, driver: Driver) -> None:
    monitor = new_monitor(kubelet_dir)
    server = PluginServer(monitor, driver, get_claim=claim_of, kubelet_dir=kubelet_dir)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    def end() -> None:
        eventually(lambda: server.paths.registration.exists(), "the driver is registered")
        os.kill(os.getpid(), signal.SIGTERM)

    ending = threading.Thread(target=end)
    ending.start()
    server.run()
    ending.join()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert not [path for path in kubelet_dir.rglob("*") if path.is_socket()]
    assert not monitor.is_up


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_ends_on_a_signal_that_another_thread_receives(
    kubelet_dir: Path, driver: Driver, number: signal.Signals
) -> None:
    """The kernel then interrupts no system call of the main thread, as for a signal just before the call."""
    server = PluginServer(new_monitor(kubelet_dir), driver, get_claim=claim_of, kubelet_dir=kubelet_dir)

    def end() -> None:
        eventually(lambda: server.paths.registration.exists(), "the driver is registered")
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
        signal.pthread_kill(threading.get_ident(), number)

    before = signal.signal(signal.SIGUSR2, lambda *_: None), signal.set_wakeup_fd(-1)
    ending = threading.Thread(target=end)
    ending.start()
    try:
        server.run()
    finally:
        ending.join()
        signal.signal(signal.SIGUSR2, before[0])
        assert signal.set_wakeup_fd(before[1]) == -1
    assert not [path for path in kubelet_dir.rglob("*") if path.is_socket()]


def test_run_raises_the_failure_of_the_server(kubelet_dir: Path, driver: Driver) -> None:
    server = PluginServer(new_monitor(kubelet_dir), driver, get_claim=claim_of, kubelet_dir=kubelet_dir)
    failure = OSError("no descriptors")

    def fail() -> None:
        eventually(lambda: server.paths.registration.exists(), "the driver is registered")
        server._fail(failure)

    failing = threading.Thread(target=fail)
    failing.start()
    with pytest.raises(RuntimeError, match="plugin server failed") as caught:
        server.run()
    failing.join()
    assert caught.value.__cause__ is failure
    assert not [path for path in kubelet_dir.rglob("*") if path.is_socket()]


def test_logging_handler_that_raises_ends_no_server(
    monitor: Monitor, driver: Driver, server: PluginServer, kubelet: Kubelet
) -> None:
    driver.behaviour["a"] = error_raiser(BadConfigError("3 of 2"))
    with broken_log_handler(logging.DEBUG):
        server.paths.service.unlink()  # the server logs a warning, and creates the socket again
        eventually(lambda: server.paths.service.exists(), "the socket exists again")
        assert "[class=bad-config code=config.invalid " in kubelet.prepare(claim("a"))["uid-a"].error
    assert server.failure is None


@pytest.mark.parametrize("run", [asyncio.run, lambda coroutine: trio.run(lambda: coroutine)])
def test_with_in_an_event_loop_is_rejected_in_favor_of_async_with(
    monitor: Monitor, driver: Driver, kubelet_dir: Path, run: Callable[[Any], None]
) -> None:
    server = PluginServer(monitor, driver, get_claim=claim_of, kubelet_dir=kubelet_dir)

    async def main() -> None:
        with pytest.raises(RuntimeError, match="write 'async with' instead"):
            server.__enter__()

    run(main())
    assert not server.paths.registration.exists()


def test_run_outside_the_main_thread_is_refused(kubelet_dir: Path, driver: Driver) -> None:
    server = PluginServer(new_monitor(kubelet_dir), driver, get_claim=claim_of, kubelet_dir=kubelet_dir)
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="only the main thread"):
        pool.submit(server.run).result()
