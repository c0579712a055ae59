"""drahealth inside whole drivers: programs of Trio, of asyncio and of threads, as a kubelet meets them.

The programs are those in ``tests/embedded``, which docs/embedding.md shows pieces of. What must hold in any
kind of program is tried in all three, within the test's own process.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import betterproto
import grpc
import pytest
import trio
from agents import TRIES, PlainSysfs, short_tmp
from embedded import threaded_driver
from embedded.process_state import process_state
from embedding import patient
from grpc_tools import protoc
from kube_api import FakeKubeApi, certificate, kube_api, write_kubeconfig
from kubelet import FakeKubelet, Pace, Pod, allocated_claim
from kubelet.history import Called
from kubelet_real.implementations import implementations
from machine import machine_lock
from patience import PATIENCE_S
from wire.google import PROTO, message_class, names, watch_health
from wire.plugin import Kubelet, claim
from wire.serving import eventually, stacks_of_threads

import drahealth
from agent.model.time import Instant

__all__ = ["certificate", "kube_api", "patient", "short_tmp"]

EMBEDDED: Final = Path(__file__).parent / "embedded"
NODE: Final = "node-a"
CARD: Final = "card.example.com"
PAGES: Final = "pages.example.com"
SLOW: Final = re.compile(r"^Executing <.*> took [12]?\d\.\d+ seconds\n", re.MULTILINE)
"""Lines of asyncio, whose development mode calls a callback slow from 0.1 s on."""
LATE: Final = re.compile(
    r"^.*(: not (read|written) within | not delivered to all health streams within | not published within "
    r"|: no result: no answer within | did not stop ).*\n",
    re.MULTILINE,
)
"""Lines of drahealth about a disk, a thread or a check that took longer than a limit of seconds."""


# --- whole drivers ------------------------------------------------------------------------------------------


class Program:
    """A driver as a process of its own. Leaving kills it if it still lives."""

    def __init__(self, root: Path, name: str, *args: str, path: Path = EMBEDDED) -> None:
        self.errors = root / "stderr"
        paths = (path, EMBEDDED, EMBEDDED.parent, EMBEDDED.parents[1])
        environ = os.environ | {"NODE_NAME": NODE, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        patient = ("-m", "driver_scenarios.patient", str(EMBEDDED / name))
        command = [sys.executable, "-X", "dev", "-W", "error", *patient, str(root), *args]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=errors, env=environ)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            sys.stderr.write(self.errors.read_text())
        self.process.kill()
        self.process.wait()

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Send the driver a signal; return its exit code and standard error, once it has ended.

        Not the lines SLOW, up to 30 s, and LATE, which a busy machine causes.
        """
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S), LATE.sub("", SLOW.sub("", self.errors.read_text()))


@pytest.fixture
def root(short_tmp: Path) -> Path:
    """The kubelet's directory, with two cards in it and a place for claims."""
    for directory in ("plugins_registry", "claims", "held"):
        (short_tmp / directory).mkdir()
    for card in ("card-0", "card-1"):
        (short_tmp / card).write_text("up\n")
    return short_tmp


@pytest.fixture(params=implementations("1.36", "1.37"))
def kubelet(request: pytest.FixtureRequest, root: Path) -> Iterator[FakeKubelet]:
    version, new = request.param
    with new(version)(root, version=version, pace=Pace.fast()) as kubelet:
        yield kubelet


def allocate(
    root: Path, name: str, device: str, driver: str = CARD, parameters: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a claim with an allocated device, and write the file that the driver reads."""
    opaque = {"driver": driver, "parameters": parameters}
    config = [{"source": "FromClaim", "requests": [], "opaque": opaque}] if parameters else []
    found = allocated_claim(name, f"uid-{name}", ("it", driver, NODE, device), pods=[name], config=config)
    (root / "claims" / f"{name}.json").write_text(json.dumps(found))
    return found


def run_pod(
    kubelet: FakeKubelet, name: str, device: str, driver: str = CARD, parameters: dict[str, Any] | None = None
) -> Pod:
    """Run a pod with a claim of the same name."""
    kubelet.add_claim(allocate(kubelet.root, name, device, driver, parameters))
    pod = Pod(name, {"it": name}, {"main": ("it",)})
    kubelet.run_pod(pod)
    return pod


def wait_for_pod_message(kubelet: FakeKubelet, pod: Pod, health: str) -> str:
    """Return the message of a pod's only device, once the pod's status has the device with this health."""

    def find_messages() -> list[str]:
        entries = kubelet.pod_status(pod).resources.get("main", {}).get("claim:it", ())
        return [f"{entry.message}." for entry in entries if entry.health == health]

    return kubelet.wait_for(find_messages, f"{health} in the status of {pod.uid}")[0][:-1]


def assert_nothing_left(root: Path) -> None:
    """Assert that no socket and no file of an instance is left."""
    assert [path for path in root.rglob("*") if path.is_socket() or path.name.startswith("instance-")] == []


def test_trio_program_prepares_checks_and_ends_in_its_own_loop(root: Path, kubelet: FakeKubelet) -> None:
    with Program(root, "trio_driver.py") as driver:
        kubelet.wait_registered(CARD)
        pod = run_pod(kubelet, "a", "card-0")
        kubelet.wait_running(pod)
        assert json.loads((root / "cdi" / f"{CARD}-card_uid-a.json").read_text())["kind"] == f"{CARD}/card"
        assert wait_for_pod_message(kubelet, pod, "Healthy") == ""
        (root / "card-0").write_text("down\n")
        assert wait_for_pod_message(kubelet, pod, "Unhealthy") == "card.link: link is down, not up"
        (root / "card-0").write_text("up\n")
        assert wait_for_pod_message(kubelet, pod, "Healthy") == ""
        kubelet.wait_health(CARD, NODE, "card-1", "Healthy")
        kubelet.delete_pod(pod)
        kubelet.wait_gone(pod)
        assert list((root / "cdi").iterdir()) == []
        assert driver.end() == (0, "")
        assert_nothing_left(root)


def test_trio_program_handles_ctrl_c_itself(root: Path, kubelet: FakeKubelet) -> None:
    with Program(root, "trio_driver.py") as driver:
        kubelet.wait_registered(CARD)
        code, errors = driver.end(signal.SIGINT)
        assert code == 1
        assert "| KeyboardInterrupt" in errors, "Trio raises it, and the program does not catch it"
        assert_nothing_left(root)


@pytest.mark.slow
def test_health_is_sent_while_an_asyncio_loop_blocks_for_30_s(root: Path, kubelet: FakeKubelet) -> None:
    with Program(root, "asyncio_driver.py") as driver:
        [plugin] = kubelet.wait_registered(CARD)
        for card in ("card-0", "card-1"):
            kubelet.wait_health(CARD, NODE, card, "Healthy")
        given = {"apiVersion": f"{CARD}/v1", "kind": "CardParameters", "flash_s": 30}
        pod = run_pod(kubelet, "a", "card-0", parameters=given)
        (root / "card-1").write_text("down\n")
        kubelet.wait_health(CARD, NODE, "card-1", "Unhealthy")
        with Kubelet(root / "plugins_registry" / f"{CARD}-reg.sock") as other:
            assert other.get_info().name == CARD
        with watch_health(Path(plugin.endpoint)) as watcher:
            assert sorted(names(watcher.next())) == ["card-0", "card-1"]

        received_ns: set[int] = set()

        def is_verified_again() -> bool:
            device = kubelet.health(CARD, NODE, "card-0")
            assert device.health == "Healthy"
            received_ns.add(device.updated_ns)
            return len(received_ns) >= 2

        kubelet.wait_for(is_verified_again, "card-0 is verified again and again", 29)
        assert kubelet.history.of(Called) == [], "the driver is at it, all this time"
        kubelet.wait_for(lambda: kubelet.history.of(Called), "an answer within the kubelet's 45 s")
        [call] = kubelet.history.of(Called)
        assert (call.error, call.response.claims["uid-a"].error) == ("", "")
        assert call.took_s >= 30
        kubelet.wait_running(pod)
        assert wait_for_pod_message(kubelet, pod, "Healthy") == ""
        code, errors = driver.end()
        assert code == 0
        # asyncio's own word; on a busy machine also of other steps, which it calls slow from 0.1 s on
        took = re.compile(r"Executing <(.*)> took (\d+\.\d+) seconds")
        slow = [found for line in errors.splitlines() if (found := took.fullmatch(line))]
        assert len(slow) == len(errors.splitlines()), errors
        [held] = [found for found in slow if float(found[2]) >= 30]
        assert "agent/embed/callback_runner.py" in held[1]
        assert_nothing_left(root)


def test_invalid_parameters_are_named_in_the_pods_event(root: Path, kubelet: FakeKubelet) -> None:
    with Program(root, "asyncio_driver.py") as driver:
        kubelet.wait_registered(CARD)
        given = {"apiVersion": f"{CARD}/v1", "kind": "CardParameters", "flash_s": 300}
        pod = run_pod(kubelet, "a", "card-0", parameters=given)
        [event] = kubelet.wait_for(lambda: kubelet.events_of(pod), "an event")
        assert "class=bad-config code=config.decode" in event.message
        assert "flash_s 300 is not within 0 and 40" in event.message
        assert driver.end() == (0, "")


def config_of(root: Path) -> PlainSysfs:
    """Write a machine of plain files for the driver of hugepages, and the configuration that names it."""
    (root / "cgroup").mkdir()
    (root / "kmsg").touch()
    sysfs = PlainSysfs(root / "sys")
    roots = {"sysfs": sysfs.root, "cgroupfs": root / "cgroup", "kmsg": root / "kmsg"}
    lines = [f'{key} = "{value}"' for key, value in roots.items()]
    agent_ = f'[agent]\nnode-name = "{NODE}"\nperiod = "20ms"\n'
    (root / "config.toml").write_text("\n".join([agent_, "[gpu]", "watch = false", "[roots]", *lines]))
    return sysfs


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_plain_program_ends_on_a_signal_and_removes_its_sockets(
    root: Path, kubelet: FakeKubelet, number: signal.Signals
) -> None:
    sysfs = config_of(root)
    with Program(root, "threaded_driver.py") as driver:
        kubelet.wait_registered(PAGES)
        kubelet.wait_health(PAGES, NODE, "pages-0", "Healthy")
        pod = run_pod(kubelet, "a", "pages-0", PAGES)
        kubelet.wait_running(pod)
        assert (root / "held" / "uid-a").read_text() == "a"
        sysfs.resize(4)
        assert "mem.hugepages.pool_shrunk" in wait_for_pod_message(kubelet, pod, "Unhealthy")
        second = run_pod(kubelet, "b", "pages-0", PAGES)
        [event] = kubelet.wait_for(lambda: kubelet.events_of(second), "an event")
        assert "class=failed-device code=mem.hugepages.pool_shrunk" in event.message
        eventually(lambda: "'effect': 'NoSchedule'" in driver.errors.read_text(), "the taint is offered")
        code, log = driver.end(number)
        assert code == 0
        assert "Traceback" not in log
        assert_nothing_left(root)


def test_driver_with_all_its_work_at_the_api_server(
    root: Path, kubelet: FakeKubelet, kube_api: FakeKubeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver reads claims from the API server, writes slices with taints, and ends on SIGTERM."""
    assert len((EMBEDDED / "cluster_driver.py").read_text().splitlines()) <= 60
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(root / "kubeconfig", kube_api, token="driver")))
    kube_api.add_node(NODE)
    for name, device in (("a", "card-0"), ("b", "card-1")):
        kube_api.add_claim(allocate(root, name, device))

    def tainted_devices() -> list[str]:
        devices = [device for obj in kube_api.slices(CARD) for device in obj["spec"]["devices"]]
        return [device["name"] for device in devices if device.get("taints")]

    with Program(root, "cluster_driver.py") as driver:
        kubelet.wait_registered(CARD)
        pod = run_pod(kubelet, "a", "card-0")
        wait_for_pod_message(kubelet, pod, "Healthy")
        kubelet.wait_for(lambda: kube_api.slices(CARD), "slice")
        (root / "card-1").write_text("down\n")
        failed = run_pod(kubelet, "b", "card-1")
        [event] = kubelet.wait_for(lambda: kubelet.events_of(failed), "an event")
        assert "class=failed-device code=card.link" in event.message
        kubelet.wait_for(lambda: tainted_devices() == ["card-1"], "taint")  # the prepare waits 2 s for it
        kube_api.wipe(CARD)
        kubelet.wait_for(lambda: tainted_devices() == ["card-1"], "slice is published again")
        code, errors = driver.end()
        assert (code, "Traceback" in errors, "Warning" in errors) == (0, False, False), errors
    assert_nothing_left(root)
    assert tainted_devices() == ["card-1"]
    assert {call.token for call in kube_api.calls} == {"Bearer driver"}


@pytest.mark.usefixtures("patient")
def test_threaded_program_leaves_nothing_after_its_stop(root: Path, kubelet: FakeKubelet) -> None:
    config_of(root)
    before = set(threading.enumerate())
    monitor, server = threaded_driver.build(root)
    with monitor, server:
        kubelet.wait_registered(PAGES)
        kubelet.wait_running(run_pod(kubelet, "a", "pages-0", PAGES))
    assert_nothing_left(root)
    kubelet.stop()
    # Trio keeps a thread that has nothing to do for ten seconds
    eventually(lambda: set(threading.enumerate()) <= before, "no thread is left")


# --- a driver with a server of its own ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def generated_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the kubelet's proto files with protoc, as a driver's author does."""
    out = tmp_path_factory.mktemp("generated")
    plugin = Path(sys.executable).with_name("protoc-gen-grpclib_python")
    options = [f"--proto_path={PROTO}", f"--python_out={out}", f"--grpclib_python_out={out}"]
    files = ["dra/v1/dra_v1.proto", "plugin_registration/v1/plugin_registration_v1.proto"]
    assert protoc.main(["protoc", f"--plugin=protoc-gen-grpclib_python={plugin}", *options, *files]) == 0
    return out


def test_own_server_serves_health_next_to_its_own_messages(
    root: Path, kubelet: FakeKubelet, generated_code: Path
) -> None:
    with Program(root, "own_server_driver.py", path=generated_code) as driver:
        kubelet.wait_registered(CARD)
        pod = run_pod(kubelet, "a", "card-0")
        kubelet.wait_running(pod)
        (root / "card-0").write_text("down\n")
        assert wait_for_pod_message(kubelet, pod, "Unhealthy") == "card.link: link is down, not up"
        wrong = run_pod(kubelet, "wrong", "card-0", parameters={"mode": "fast"})
        [event] = kubelet.wait_for(lambda: kubelet.events_of(wrong), "an event")
        assert "class=bad-config code=config.invalid" in event.message
        assert "the claim has 1" in event.message
        gone = allocate(root, "gone", "card-0")
        (root / "claims" / "gone.json").unlink()
        kubelet.add_claim(gone)
        lost = Pod("gone", {"it": "gone"}, {"main": ("it",)})
        kubelet.run_pod(lost)
        [event] = kubelet.wait_for(lambda: kubelet.events_of(lost), "an event")
        assert "ResourceClaim gone: FileNotFoundError" in event.message, "not the whole call"
        kubelet.delete_pod(pod)
        kubelet.wait_gone(pod)
        code, errors = driver.end()
        assert (code, errors) == (-signal.SIGTERM, ""), "the program has no handler"


@dataclass(eq=False, repr=False)
class Own(betterproto.Message):
    """A message of a driver's own, of kinds that none of ours has."""

    numbers: list[int] = betterproto.uint32_field(1)  # noqa: RUF009
    data: bytes = betterproto.bytes_field(2)


def test_codec_encodes_messages_of_the_drivers_services() -> None:
    codec = drahealth.Monitor(CARD, hardware=False, state_dir=None).codec
    own = Own(numbers=[1, 300], data=b"\xff")
    assert codec.decode(codec.encode(own, Own), Own) == own
    message = message_class("pluginregistration", "PluginInfo")(name=CARD)
    assert codec.decode(codec.encode(message, type(message)), type(message)) == message
    assert codec.encode(b"encoded already", Own) == b"encoded already"


# --- handlers without a plugin server -----------------------------------------------------------------------


def test_verdicts_of_a_decorated_handler_are_listed_after_the_end(root: Path) -> None:
    (root / "card-1").write_text("training\n")
    allocate(root, "good", "card-0")
    allocate(root, "asks-too-much", "card-0", parameters={"mode": "fast"})
    allocate(root, "early", "card-1")
    for number in range(TRIES):
        again = root / f"again-{number}"
        shutil.copytree(root, again, ignore=shutil.ignore_patterns("again-*"))
        with Program(again, "classified_driver.py", "good", "asks-too-much", "early") as driver:
            assert driver.process.wait(PATIENCE_S) == 0
            errors = driver.errors.read_text()
        if not LATE.search(errors):  # the disk of a busy machine may take longer than the ledger waits
            break
    assert errors == ""
    listed = prepares(again)
    assert listed["default/good"]["verdict"] is None
    verdicts = {name: entry["verdict"] for name, entry in listed.items() if entry["verdict"]}
    assert {
        name: (verdict["class"], verdict["code"], verdict["count"]) for name, verdict in verdicts.items()
    } == {
        "default/asks-too-much": ("bad-config", "config.invalid", 1),
        "default/early": ("transient", "card.training", 1),
    }


def prepares(root: Path) -> dict[str, Any]:
    """Return the output of ``drahealth prepares``, by claim."""
    command = [sys.executable, "-m", "agent", "prepares", "--kubelet-dir", str(root)]
    done = subprocess.run([*command, "-o", "json"], capture_output=True, text=True, check=False)
    return {f"{claim['namespace']}/{claim['name']}": claim for claim in json.loads(done.stdout)["claims"]}


# --- kinds of programs --------------------------------------------------------------------------------------


class BrokenClock:
    """A clock that can break."""

    broken = False

    def __call__(self) -> Instant:
        if self.broken:
            raise OSError(5, "the clock has failed")
        return Instant(time.monotonic_ns(), time.time())


class Cards:
    """A driver that has nothing to do; a claim called ``hangs`` hangs, in the way that is given."""

    def __init__(self, *, driver: str = CARD, hang: Callable[[], Any] | None = None) -> None:
        self.driver = driver
        self.begun = threading.Event()
        self._hang = hang

    def claim(self, ref: drahealth.ClaimRef) -> drahealth.Claim:
        return drahealth.Claim(*ref, devices=(drahealth.ClaimDevice("it", self.driver, NODE, "card-0"),))

    def prepare(self, of: drahealth.Claim) -> Any:
        if of.name == "hangs" and self._hang is not None:
            self.begun.set()
            return self._hang()
        return [drahealth.PreparedDevice(pool=device.pool, device=device.device) for device in of.devices]

    def unprepare(self, ref: drahealth.ClaimRef) -> None:
        """Do nothing: there is no state to undo."""


Part = drahealth.Monitor | drahealth.PluginServer
States = list[dict[str, Any]]
"""Process states in the program's loop: before, within and after."""


def run_in_trio(parts: Sequence[Part], act: Callable[[], object]) -> States:
    states: States = []

    async def main() -> None:
        states.append(process_state())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            async with AsyncExitStack() as stack:
                for part in parts:
                    await stack.enter_async_context(part)
                await trio.to_thread.run_sync(act)
                states.append(process_state())
            nursery.cancel_scope.cancel()
        states.append(process_state())

    trio.run(main)
    return states


def run_in_asyncio(parts: Sequence[Part], act: Callable[[], object]) -> States:
    states: States = []

    async def main() -> None:
        states.append(process_state())
        async with AsyncExitStack() as stack:
            for part in parts:
                await stack.enter_async_context(part)
            await asyncio.to_thread(act)
            states.append(process_state())
        states.append(process_state())

    asyncio.run(main())
    return states


def run_in_threads(parts: Sequence[Part], act: Callable[[], object]) -> States:
    states = [process_state()]
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(part)
        act()
        states.append(process_state())
    return [*states, process_state()]


Host = Callable[[Sequence[Part], Callable[[], object]], States]
HOSTS: Final[dict[str, Host]] = {"trio": run_in_trio, "asyncio": run_in_asyncio, "threads": run_in_threads}


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr("agent.system.threads.worker_threads.SHUTDOWN_S", PATIENCE_S)
    return HOSTS[request.param]


def monitor_of(root: Path, driver: str = CARD, **changes: Any) -> drahealth.Monitor:
    """Return a monitor without hardware and with a healthy card, with these changes."""
    given = {"config": drahealth.Config(node_name=NODE, heartbeat_s=0.5), "hardware": False} | changes
    monitor = drahealth.Monitor(driver, kubelet_dir=root, **given)
    monitor.add(drahealth.Device("card-0"))
    monitor.check(every_s=0.1, timeout_s=PATIENCE_S, name="well")(lambda _: None)
    return monitor


def server_of(monitor: drahealth.Monitor, cards: Cards | None = None) -> drahealth.PluginServer:
    cards = cards or Cards(driver=monitor.driver)
    return drahealth.PluginServer(monitor, cards, get_claim=cards.claim)


def health_of(monitor: drahealth.Monitor) -> drahealth.Health | None:
    found = monitor.health_of(drahealth.DeviceRef(monitor.driver, NODE, "card-0"))
    return found and found.health


@pytest.mark.parametrize("hardware", [False, True])
def test_process_state_is_unchanged(host: Host, root: Path, hardware: bool) -> None:
    monitor = monitor_of(root, hardware=hardware)
    server = server_of(monitor)

    def whole_life() -> None:
        with Kubelet(server.paths.service) as kubelet, watch_health(server.paths.service) as watcher:
            assert kubelet.prepare(claim("a"))["uid-a"].error == ""
            assert names(watcher.next()) == ["card-0"]
            assert kubelet.unprepare(claim("a"))["uid-a"].error == ""

    with machine_lock():  # of tests that take a CPU of this process offline
        before, within, after = host([monitor, server], whole_life)
    assert within == before
    assert after == before
    assert_nothing_left(root)


def test_core_failure_is_logged_and_the_driver_continues(host: Host, root: Path) -> None:
    clock, failures = BrokenClock(), list[BaseException]()
    monitor = monitor_of(root, clock=clock, on_error=failures.append)
    server = server_of(monitor)

    def life() -> None:
        with Kubelet(server.paths.service) as kubelet, watch_health(server.paths.service) as watcher:
            eventually(lambda: health_of(monitor) is drahealth.Health.HEALTHY, "it is well")
            clock.broken = True
            while not (entry := watcher.next().devices[0]).message.startswith("agent.failed: OSError"):
                assert entry.health in (0, 1)  # Unknown, while the check of a busy machine has no result
            assert entry.health == 0
            assert kubelet.prepare(claim("a"))["uid-a"].error == ""
            eventually(lambda: bool(failures), "on_error is called")

    host([monitor, server], life)
    assert [monitor.failure] == failures
    assert isinstance(monitor.failure, OSError)


def test_two_monitors_in_one_process_are_independent(
    host: Host, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.embed.monitor.CHECKS_STOP_S", PATIENCE_S)  # a check may run at the stop
    drivers = ("one.example.com", "other.example.com")
    monitors = [monitor_of(root, driver) for driver in drivers]
    servers = [server_of(monitor) for monitor in monitors]

    def life() -> None:
        for monitor, server in zip(monitors, servers, strict=True):
            eventually(lambda found=monitor: health_of(found) is drahealth.Health.HEALTHY, "it is well")
            with Kubelet(server.paths.registration) as kubelet, watch_health(server.paths.service) as watcher:
                assert kubelet.get_info().name == monitor.driver
                assert names(watcher.next()) == ["card-0"]
            assert monitor.report is not None
            assert {device.driver for device in monitor.report.devices} == {monitor.driver}
        assert monitors[0].stop(PATIENCE_S)
        assert monitors[1].is_up

    host([*monitors, *servers], life)
    assert_nothing_left(root)


async def _for_ever_in_trio() -> None:
    await trio.sleep_forever()


async def _for_ever_in_asyncio() -> None:
    await asyncio.Event().wait()


def test_stop_does_not_wait_for_hung_checks_and_prepares(
    host: Host, root: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.embed.plugin.END_S", PATIENCE_S - 1.5)  # hung calls have the rest
    for method in (drahealth.PluginServer.stop, drahealth.PluginServer.aclose, drahealth.PluginServer._stop):
        monkeypatch.setattr(method, "__defaults__", (PATIENCE_S,))
    before = threading.enumerate()
    monitor = monitor_of(root)
    looking = threading.Barrier(3)

    @monitor.check(every_s=0.1, timeout_s=0.1)
    def plain(_: drahealth.Device) -> None:
        looking.wait()
        gate.wait()

    @monitor.check(every_s=0.1, timeout_s=0.1)
    async def in_core(_: drahealth.Device) -> None:
        await trio.to_thread.run_sync(looking.wait)
        await trio.to_thread.run_sync(gate.wait)  # cannot be cancelled

    in_loop = {run_in_trio: _for_ever_in_trio, run_in_asyncio: _for_ever_in_asyncio}
    cards = Cards(hang=in_loop.get(host, gate.wait))
    server = server_of(monitor, cards)
    ended = []

    def life() -> None:
        kubelet = stack.enter_context(Kubelet(server.paths.service))
        ended.append(kubelet.prepare_async(claim("hangs"), timeout_s=3 * PATIENCE_S))
        looking.wait(PATIENCE_S)
        assert cards.begun.wait(PATIENCE_S)

    with ExitStack() as stack:
        host([monitor, server], life)
        assert not gate.is_set()
        assert ended[0].exception().code() is grpc.StatusCode.UNAVAILABLE
        assert_nothing_left(root)
        assert not monitor.stop(), "it says that something was left behind"
        gate.set()
        looking.abort()  # a check that began again meanwhile ends, too
        eventually(lambda: not stacks_of_threads("dh-", before), lambda: stacks_of_threads("dh-", before))


# --- programs that end without a stop -----------------------------------------------------------------------

CARELESS: Final = """
import asyncio, gc, sys, time
from pathlib import Path
import trio
import drahealth

class Cards:
    def claim(self, ref):
        device = drahealth.ClaimDevice("it", "card.example.com", "node-a", "card-0")
        return drahealth.Claim(*ref, devices=(device,))
    def prepare(self, claim):
        time.sleep(3600)
    def unprepare(self, ref):
        pass

root, hardware, end = Path(sys.argv[1]), sys.argv[2] == "True", sys.argv[3]
config = drahealth.Config(node_name="node-a")
monitor = drahealth.Monitor("card.example.com", config=config, hardware=hardware, kubelet_dir=root)
monitor.add(drahealth.Device("card-0"), drahealth.Device("card-1"))
monitor.check(every_s=0.1, timeout_s=0.1, devices="card-0", name="hangs")(lambda device: time.sleep(3600))
monitor.check(every_s=0.1, timeout_s=60, devices="card-1", name="well")(lambda device: None)
server = drahealth.PluginServer(monitor, Cards(), get_claim=Cards().claim)

def start():
    monitor.start()
    server.start()
    assert monitor.wait_ready(60)
    print("up", flush=True)
    sys.stdin.readline()

async def start_in_loop():
    start()

{"asyncio": lambda: asyncio.run(start_in_loop()), "trio": lambda: trio.run(start_in_loop)}.get(end, start)()
if end == "raises":
    raise LookupError("the driver's own")
if end == "exits":
    sys.exit(3)
if end == "forgets":
    del monitor, server
    gc.collect()
"""


@contextlib.contextmanager
def start_careless_driver(root: Path, end: str, hardware: bool) -> Iterator[subprocess.Popen[str]]:
    """Start a driver with a health check that hangs, and call a prepare that hangs."""
    command = [sys.executable, "-W", "error", "-c", CARELESS, str(root), str(hardware), end]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process,
        Kubelet(root / "plugins" / CARD / "dra.sock") as kubelet,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            kubelet.prepare_async(claim("a"))
            yield process
        finally:
            process.kill()


def log_lines(errors: str) -> list[str]:
    """Return the lines of standard error without warnings of a hung check and of a busy machine."""
    lines = LATE.sub("", errors).splitlines()
    return [line for line in lines if not line.startswith("health check hangs of device card-0: ")]


@pytest.mark.parametrize("hardware", [False, True])
@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("returns", 0, ""),
        ("asyncio", 0, ""),
        ("trio", 0, ""),
        ("forgets", 0, ""),
        ("exits", 3, ""),
        ("raises", 1, "LookupError: the driver's own"),
    ],
)
def test_program_without_stop_ends_all_the_same(
    root: Path, end: str, code: int, words: str, hardware: bool
) -> None:
    with start_careless_driver(root, end, hardware) as process:
        _, errors = process.communicate("\n", timeout=PATIENCE_S)
        assert process.returncode == code
        assert log_lines(errors)[-1:] == ([words] if words else [])
        assert errors.count("Traceback") == (1 if words else 0)
    with (
        monitor_of(root) as monitor,
        server_of(monitor) as server,
        Kubelet(server.paths.service) as again,
    ):
        assert again.prepare(claim("a"))["uid-a"].error == "", "the sockets that it left are replaced"


@pytest.mark.parametrize("hardware", [False, True])
def test_program_without_a_handler_ends_by_the_signal(root: Path, hardware: bool) -> None:
    with start_careless_driver(root, "returns", hardware) as process:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, log_lines(errors)) == (-signal.SIGTERM, [])


# --- state of the process -----------------------------------------------------------------------------------

WATCHED: Final = """
import sys, time
sys.path.insert(0, sys.argv[2])
from embedded.process_state import process_state

before = process_state()
import drahealth
drahealth.Monitor
assert process_state() == before

FORKS = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}
sys.addaudithook(lambda event, arguments: event in FORKS and begun.append(f"{event} {arguments!r}"))
begun, looks = [], []
monitor = drahealth.Monitor("card.example.com", hardware=sys.argv[1] == "True", state_dir=None)
monitor.add(drahealth.Device("card-0"))
monitor.check(every_s=0.1, timeout_s=60, name="well")(looks.append)
with monitor:
    while len(looks) < 20:
        time.sleep(0.01)
assert process_state() == before
assert not begun, begun
"""


@pytest.mark.parametrize("hardware", [False, True])
def test_import_changes_nothing_and_starts_no_process(hardware: bool) -> None:
    command = [sys.executable, "-W", "error", "-c", WATCHED, str(hardware), str(EMBEDDED.parent)]
    with machine_lock():  # of tests that take a CPU of this process offline
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, LATE.sub("", done.stderr)) == (0, "")


FORKED: Final = """
import os, sys, time
import drahealth

def monitor(**hardware):
    return drahealth.Monitor("card.example.com", state_dir=None, **hardware)

def last_pass_ns():
    return next(source.beat_ns for source in before.report.sources if source.name == "cpus")

CONFIG = drahealth.Config(node_name="n", heartbeat_s=0.5, gpu_watch=False)

with monitor(config=CONFIG) as before:
    assert before.wait_ready(60)
    if (child := os.fork()) == 0:
        with monitor(hardware=False) as fresh:
            states = [before.is_up, before.stop(), fresh.wait_ready(60), fresh.is_up]
        os._exit(0 if states == [False, True, True, True] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    child_ended_ns, end_s = time.monotonic_ns(), time.monotonic() + 60
    while last_pass_ns() < child_ended_ns + 1_000_000_000:
        assert time.monotonic() < end_s, "the child has stopped the monitor of its parent"
        time.sleep(0.05)
"""


def test_forked_child_needs_its_own_monitor_and_cannot_stop_the_parents() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED],  # of fork() with threads
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, LATE.sub("", done.stderr)) == (0, "")


CREATED_BEFORE_FORK: Final = """
import os, signal, sys, time
from pathlib import Path
import drahealth

DRIVER, directory = "card.example.com", Path(sys.argv[1])

def monitor():
    made = drahealth.Monitor(
        DRIVER, config=drahealth.Config(node_name="n"), hardware=False, state_dir=directory
    )
    made.add(drahealth.Device("card-0"))
    return made

def prepare(monitor, uid, error):
    @drahealth.classified(monitor)
    def handler(claim):
        raise error

    device = drahealth.ClaimDevice("r", DRIVER, "n", "card-0")
    try:
        handler(drahealth.Claim("ns", "claim", uid, devices=(device,)))
    except drahealth.PrepareError:
        pass

with monitor() as first:
    prepare(first, "uid-1", drahealth.FailedDeviceError(drahealth.DeviceRef(DRIVER, "n", "card-0"), "down"))
before = monitor()  # its ledger has an open fault
if (child := os.fork()) == 0:
    signal.alarm(90)  # a child that hangs ends
    before.start()
    prepare(before, "uid-2", drahealth.BadConfigError("no such mode"))
    before.stop(60)
    os._exit(0 if "uid-2" in (directory / "prepares.json").read_text() else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_monitor_created_before_a_fork_saves_its_ledger(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", CREATED_BEFORE_FORK, tmp_path / "state"],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,  # the stop alone may take PATIENCE_S if the ledger is not written
        check=False,
    )
    assert (done.returncode, LATE.sub("", done.stderr)) == (0, "")


FORKED_DURING_AN_UPDATE: Final = """
import os, signal, sys, threading, time
from agent.driver.ledger_writer import LedgerWriter

def update_slowly(ledger, now_s):
    updating.set()
    time.sleep(0.5)  # the fork begins meanwhile
    return ledger, None

updating = threading.Event()
writer = LedgerWriter("card.example.com", None, "1", time.time, lambda: None)
thread = threading.Thread(target=writer.update, args=(update_slowly,), daemon=True)
thread.start()
updating.wait()
if (child := os.fork()) == 0:
    signal.alarm(60)  # a child that waits for the lock for ever ends
    writer.update(lambda ledger, now_s: (ledger, None))
    os._exit(0)
thread.join()
writer.update(lambda ledger, now_s: (ledger, None))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_child_forked_during_an_update_of_the_ledger_can_update_it() -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED_DURING_AN_UPDATE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)
    assert (done.returncode, LATE.sub("", done.stderr)) == (0, "")


# --- the guide ----------------------------------------------------------------------------------------------

GUIDE: Final = EMBEDDED.parents[1] / "docs" / "embedding.md"
SHOWN: Final = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", SHOWN, ids=range(len(SHOWN)))
def test_all_code_of_the_guide_is_tested(block: str) -> None:
    drivers = [path.read_text() for path in EMBEDDED.glob("*_driver.py")]
    depths = [textwrap.indent(block, " " * depth) for depth in range(0, 20, 4)]
    assert any(found in driver for found in depths for driver in drivers), block


def test_guide_names_only_existing_names() -> None:
    text = GUIDE.read_text()
    for name in set(re.findall(r"\bdrahealth\.([a-z_]+|[A-Z]\w+)\b", text)):
        assert hasattr(drahealth, name), name
    for name in set(re.findall(r"\bmonitor\.([a-z_]+)", text)):
        assert hasattr(drahealth.Monitor, name), name
    for file in re.findall(r"\]\(([^)]+)\)", text):
        assert (GUIDE.parent / file.partition("#")[0]).exists(), file
