"""Sessions of linked drivers: opening, order of taints and reports, shutdown. With a minimal core."""

import fcntl
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import kubelet_files
import msgspec
import pytest
import trio
from claim_samples import listed_prepared, source_answers
from paper import PaperNode
from patience import PATIENCE_S
from prepare_samples import health
from wire.serving import eventually

from agent.config.config import DRIVERS, Config
from agent.devices.consumers.consumer_map import build_consumer_map
from agent.driver.merged_snapshot_source import HostAndDriverSource
from agent.driver.prepare_failure_tracker import PrepareFailureTracker
from agent.driver.session import DriverSession
from agent.driver.sessions import DriverSessions
from agent.engine.loop import ReportHub
from agent.model.claim import Claim, ClaimDevice, ClaimRef, DeviceRef
from agent.model.consumers import ConsumerMap
from agent.model.declared_devices import Declarations, DeclaredFile, DeclaredOtherDevice, DriverDevice
from agent.model.health import DeviceHealth, Effect, Health, Severity
from agent.model.prepare import DriverFault, ErrorClass, Operation, PrepareVerdict
from agent.model.report import Report
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant
from agent.prepare.error_tables import ErrorPattern
from agent.prepare.evidence import DecodeFailure, DriverReportedError, ErrnoEvidence, ErrorText
from agent.serve.driver_link.handler_interface import DeviceDeclaration, ReportedClaimResult, TooManyDevices
from agent.sources.declaration_file import read_declarations
from agent.store.driver_files import LEDGER_FILE, load_ledger
from agent.system.timing import read_clocks

A: Final = "a.example.com"
B: Final = "b.example.com"
NODE: Final = "node-1"
DEAD: Final = DriverReportedError(ErrorClass.FAILED_DEVICE, "fpga.dead", "no answer", device="dev-0")


class Host:
    """Host source with a snapshot that a test sets."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.snapshot: Snapshot | None = PaperNode().snapshot()
        self.opened: list[HostAndDriverSource] = []
        """Sources that wake the descriptor, also from threads that outlive the test."""

    def fileno(self) -> int:
        return self.descriptor

    def clear(self) -> None:
        os.eventfd_read(self.descriptor)

    def read(self) -> Snapshot | None:
        return self.snapshot

    def is_woken(self) -> bool:
        """Return whether the source was woken since the last call."""
        try:
            self.clear()
        except BlockingIOError:
            return False
        return True


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    for source in made.opened:
        source.close()
    os.close(made.descriptor)


def open_source(host: Host) -> HostAndDriverSource:
    source = HostAndDriverSource()
    source.open(host)
    host.opened.append(source)
    return source


def fault(driver: str, number: int = 1) -> DriverFault:
    """Return a fault of the driver's only device."""
    claim = ClaimRef("ns", "a", "u")
    return DriverFault(number, DeviceRef(driver, NODE, "dev-0"), "fpga.dead", "", "", 1.0, claim)


# --- snapshots for the core --------------------------------------------------------------------------------


def test_driver_fault_wakes_the_core_and_is_in_the_next_snapshot(host: Host) -> None:
    source = open_source(host)
    assert source.read() is host.snapshot
    source.set_driver_faults(A, [fault(A)])
    assert host.is_woken()
    assert [snapshot.driver_faults for snapshot in (source.read(), host.snapshot) if snapshot] == [
        (fault(A),),
        (),
    ]


def test_each_driver_replaces_only_its_own_faults(host: Host) -> None:
    source = open_source(host)
    source.set_driver_faults(A, [fault(A)])
    source.set_driver_faults(B, [fault(B), fault(B, 2)])
    source.set_driver_faults(A, [])
    found = source.read()
    assert found is not None
    assert found.driver_faults == (fault(B), fault(B, 2))


def test_snapshot_before_the_hosts_first_is_none(host: Host) -> None:
    host.snapshot = None
    source = open_source(host)
    source.set_driver_faults(A, [fault(A)])
    assert source.read() is None


def test_closed_source_wakes_no_descriptor(host: Host) -> None:
    source = open_source(host)
    source.close()
    source.set_driver_faults(A, [fault(A)])
    assert not host.is_woken()


# --- an agent with a minimal core --------------------------------------------------------------------------


class _Session(DriverSession):
    """Session that records the published report at each update of its taints, and runs once."""

    runs = False

    def __init__(
        self, published: list[Report | None], driver: str, config: Config, hub: ReportHub, **rest: Any
    ) -> None:
        self._published, self._report_hub = published, hub
        super().__init__(driver, config, hub, **rest)

    def update_taints(self, report: Report, now: Instant) -> None:
        self._published.append(self._report_hub.report)
        super().update_taints(report, now)

    async def run(self) -> None:
        assert not self.runs
        self.runs = True
        await super().run()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a failed prepare wait as long as a busy machine needs for the core and for the disk."""
    monkeypatch.setattr("agent.driver.prepare_failure_tracker.DELIVERY_S", PATIENCE_S)
    monkeypatch.setitem(PrepareFailureTracker.__init__.__kwdefaults__, "taint_wait_s", PATIENCE_S)
    monkeypatch.setattr("agent.driver.ledger_writer.MAX_DISK_WAIT_S", PATIENCE_S)


class Agent:
    """Hub, source and sessions of an agent with two drivers.

    Each driver declares a device; or both declare none, and serve one host device.
    """

    def __init__(self, directory: Path, host: Host, *, declares: bool = True) -> None:
        self.host = host
        self.hub = ReportHub()
        self.source = open_source(host)
        self.config = Config(node_name=NODE, runtime_dir=directory, state_dir=directory / "state")
        self.declarations: Declarations = ()
        self.made: list[str] = []
        self.fails: list[Exception] = []
        self.held: dict[str, threading.Event] = {}
        """Event that the opening of a driver's session waits for."""
        self.declares = declares
        self.published: list[Report | None] = []
        """Published report at each update of a session's taints."""
        self.consumers: ConsumerMap | None = None
        self.sessions = DriverSessions(
            [A, B], self.config.state_dir, self.hub, self._make, consumer_map=lambda: self.consumers
        )

    def _make(self, driver: str, state_dir: Path) -> DriverSession:
        self.made.append(driver)
        if driver in self.held:
            assert self.held[driver].wait(PATIENCE_S)
        if self.fails:
            raise self.fails.pop()
        return _Session(
            self.published,
            driver,
            self.config,
            self.hub,
            state_dir=state_dir,
            declarations=lambda: self.declarations,
            on_faults=self.source.set_driver_faults,
            on_checks=self.source.set_reported_checks,
            other_failures=self.sessions.failures_at_other_drivers,
            clock=read_clocks,
        )

    def evaluate(self) -> Report:
        """Return the report of the core: each device is dead if its driver reported so."""
        snapshot = self.source.read()
        assert snapshot is not None
        dead = {fault.device.driver for fault in snapshot.driver_faults if not fault.expired_wall_s}
        if not self.declares:
            return Report(NODE, read_clocks(), (self.device("", dead=bool(dead)),))
        devices = [self.device(driver, dead=driver in dead) for driver in (A, B)]
        return Report(NODE, read_clocks(), tuple(devices), declaring=(A, B), declarations=self.declarations)

    def read_declarations(self) -> None:
        """Read the drivers' declaration files."""
        directory = self.config.runtime_dir / "devices.d"
        self.declarations = read_declarations(directory, self.declarations, NODE)

    def device(self, driver: str, *, dead: bool) -> DeviceHealth:
        causes = [("fpga.dead", Severity.UNHEALTHY)] if dead else []
        return health(*causes, device="dev-0", driver_reported=True)._replace(driver=driver)

    def publish(self) -> None:
        """Publish a report like the daemon."""
        report = self.evaluate()
        self.sessions.update_taints(report, report.at)
        self.hub.publish(report)
        self.hub.handle_evaluation(report)

    async def core(self) -> None:
        """Publish a report at each wake."""
        while True:
            await trio.lowlevel.wait_readable(self.source.fileno())
            self.source.clear()
            self.publish()

    @asynccontextmanager
    async def run_core(self) -> AsyncIterator[None]:
        """Run the core and the sessions, after a first report."""
        self.publish()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.core)
            nursery.start_soon(self.sessions.run)
            yield
            nursery.cancel_scope.cancel()


@pytest.fixture
def agent(tmp_path: Path, host: Host) -> Agent:
    return Agent(tmp_path, host)


def claim(driver: str, name: str = "a") -> Claim:
    """Return a claim of the driver's only device."""
    return Claim("ns", name, f"uid-{name}", devices=(ClaimDevice("r", driver, NODE, "dev-0"),))


def record_failures(session: DriverSession, driver: str, *names: str) -> list[PrepareVerdict | None]:
    return session.record_prepares(
        [ReportedClaimResult(claim(driver, name), (DEAD,)) for name in names or ("a",)]
    )


# --- opening -----------------------------------------------------------------------------------------------


def test_only_sessions_with_saved_state_are_restored(agent: Agent) -> None:
    agent.sessions.restore()
    assert agent.made == []
    (agent.config.state_dir / DRIVERS / B).mkdir(parents=True)
    agent.sessions.restore()
    assert agent.made == [B]


def test_reloaded_configuration_reaches_open_and_opening_sessions(agent: Agent) -> None:
    agent.sessions.open(A)
    agent.held[B] = threading.Event()
    opening = threading.Thread(target=agent.sessions.open, args=(B,))
    opening.start()
    eventually(lambda: B in agent.made, "the session is being opened")
    pattern = ErrorPattern(re.compile("odd"), "fpga.odd", ErrorClass.TRANSIENT)
    agent.sessions.reconfigure(Config(node_name=NODE, prepare_patterns=(pattern,)))
    agent.held[B].set()
    opening.join(PATIENCE_S)
    evidence = ErrorText("odd")
    for driver in (A, B):
        session = agent.sessions.open(driver)
        assert session.classify(claim(driver), [evidence]).code == "fpga.odd"


@pytest.mark.usefixtures("patient")
def test_saved_faults_are_in_the_first_snapshot(agent: Agent, host: Host) -> None:
    record_failures(agent.sessions.open(A), A)
    record_failures(agent.sessions.open(B), B)
    again = Agent(agent.config.runtime_dir, host)
    again.sessions.restore()
    assert [device.health for device in again.evaluate().devices] == [Health.UNHEALTHY, Health.UNHEALTHY]


def test_first_call_opens_the_only_session_of_a_driver(agent: Agent) -> None:
    agent.held[A] = threading.Event()
    found: list[DriverSession] = []
    threads = [threading.Thread(target=lambda: found.append(agent.sessions.open(A))) for _ in range(8)]
    for thread in threads:
        thread.start()
    agent.held[A].set()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert agent.made == [A]


def test_failed_opening_is_retried_by_the_next_call(agent: Agent) -> None:
    agent.fails = [OSError(5, "Input/output error")]
    with pytest.raises(OSError, match="Input/output error"):
        agent.sessions.open(A)
    assert agent.sessions.open(A) is agent.sessions.open(A)


def test_failed_restore_does_not_stop_the_start(agent: Agent) -> None:
    for driver in (A, B):
        (agent.config.state_dir / DRIVERS / driver).mkdir(parents=True)
    agent.fails = [OSError(5, "Input/output error")]
    agent.sessions.restore()
    assert agent.made == [A, B]


async def test_hung_opening_delays_no_other_driver_and_no_report(agent: Agent) -> None:
    agent.held[A] = threading.Event()
    thread = threading.Thread(target=agent.sessions.open, args=(A,))
    thread.start()
    async with agent.run_core():
        other = await trio.to_thread.run_sync(agent.sessions.open, B)
        [verdict] = await trio.to_thread.run_sync(record_failures, other, B)
        assert verdict is not None
        assert verdict.code == "fpga.dead"
        agent.held[A].set()
        await trio.to_thread.run_sync(thread.join)
        opened_late = agent.sessions.open(A)
        await eventually_async(lambda: opened_late.taints.peek()[0] == 1)


async def eventually_async(condition: Callable[[], bool]) -> None:
    await trio.to_thread.run_sync(eventually, condition, "it becomes true")


async def test_new_session_gets_the_current_report(agent: Agent) -> None:
    async with agent.run_core():
        session = await trio.to_thread.run_sync(agent.sessions.open, A)
        await eventually_async(lambda: session.taints.peek()[0] == 1)
    taints = session.taints.peek()[1]
    assert taints is not None
    assert dict(taints.devices) == {DeviceRef(A, NODE, "dev-0"): ()}


async def test_session_opened_before_the_loop_runs(agent: Agent) -> None:
    session = agent.sessions.open(A)
    async with agent.run_core():
        await eventually_async(lambda: session.taints.peek()[0] == 1)


def test_session_can_be_opened_after_the_loop_has_ended(agent: Agent) -> None:
    async def run() -> None:
        async with agent.run_core():
            pass

    trio.run(run)
    [verdict] = record_failures(agent.sessions.open(A), A)
    assert verdict is not None
    assert verdict.code == "fpga.dead"


# --- order -------------------------------------------------------------------------------------------------


def test_taints_are_decided_before_the_report_is_published(agent: Agent) -> None:
    agent.sessions.open(A)
    for _ in range(2):
        before = agent.hub.report
        agent.publish()
        assert agent.published[-1] is before
        assert agent.hub.report is not before


@pytest.mark.usefixtures("patient")
async def test_failed_prepare_returns_after_health_and_taint_are_published(
    agent: Agent,
) -> None:
    async with agent.run_core():
        session = await trio.to_thread.run_sync(agent.sessions.open, A)
        [verdict] = await trio.to_thread.run_sync(record_failures, session, A)
        found = session.health_of(DeviceRef(A, NODE, "dev-0"))
        assert found is not None
        assert found.health is Health.UNHEALTHY
        assert verdict is not None
        assert (verdict.code, verdict.count) == ("fpga.dead", 1)
        assert is_tainted(session), "without the pauses between two messages"
        await eventually_async((agent.config.state_dir / DRIVERS / A / "taints.json").exists)


def is_tainted(session: DriverSession) -> bool:
    _, taints = session.taints.peek()
    return taints is not None and bool(taints.devices[DeviceRef(A, NODE, "dev-0")])


@pytest.mark.usefixtures("patient")
async def test_faults_of_two_concurrent_drivers_are_both_reported(agent: Agent) -> None:
    async def report(driver: str) -> None:
        session = await trio.to_thread.run_sync(agent.sessions.open, driver)
        await trio.to_thread.run_sync(record_failures, session, driver)

    async with agent.run_core():
        async with trio.open_nursery() as nursery:
            for driver in (A, B):
                nursery.start_soon(report, driver)
        published = agent.hub.report
        assert published is not None
        assert [device.health for device in published.devices] == [Health.UNHEALTHY, Health.UNHEALTHY]


async def test_next_successful_prepare_makes_the_device_healthy(agent: Agent) -> None:
    async with agent.run_core():
        session = await trio.to_thread.run_sync(agent.sessions.open, A)
        await trio.to_thread.run_sync(record_failures, session, A)
        assert session.record_prepares([ReportedClaimResult(claim(A, "b"), None)]) == [None]
        ref = DeviceRef(A, NODE, "dev-0")
        await eventually_async(lambda: agent.hub.health_of(ref).health is Health.HEALTHY)  # type: ignore[union-attr]


# --- health of a session----------------------------------------------------------------------------------


def test_unhealthy_device_blocks_its_claims_while_the_core_is_up(agent: Agent) -> None:
    session = agent.sessions.open(A)
    unhealthy = health(("gpu.xid.79", Severity.UNHEALTHY), device="dev-0")._replace(driver=A)
    now = read_clocks()
    assert not session.is_up
    assert session.check_claims([claim(A)]) == [None]
    agent.hub.publish(Report(NODE, now, (unhealthy,), declaring=(A,)))
    [verdict] = session.check_claims([claim(A)])
    assert verdict is not None
    assert verdict.code == "gpu.xid.79"
    assert session.is_up
    old = replace(now, mono_ns=now.mono_ns - (agent.config.lease_s + 1) * NS)
    agent.hub.publish(Report(NODE, old, (unhealthy,), declaring=(A,)))
    assert session.check_claims([claim(A, "b")]) == [None]


def test_host_devices_count_until_the_driver_declares_its_own(agent: Agent) -> None:
    session = agent.sessions.open(A)
    unhealthy = health(("gpu.xid.79", Severity.UNHEALTHY), device="dev-0")._replace(driver="")
    agent.hub.publish(Report(NODE, read_clocks(), (unhealthy,), declaring=(B,)))
    [verdict] = session.check_claims([claim(A)])
    assert verdict is not None
    assert (verdict.code, verdict.devices) == ("gpu.xid.79", (DeviceRef(A, NODE, "dev-0"),))
    agent.hub.publish(Report(NODE, read_clocks(), (unhealthy,), declaring=(A,)))
    assert session.check_claims([claim(A, "b")]) == [None]


@pytest.mark.usefixtures("patient")
async def test_failed_prepare_of_host_device_returns_after_health_and_taint(
    tmp_path: Path, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(tmp_path, host, declares=False)
    async with agent.run_core():
        session = await trio.to_thread.run_sync(agent.sessions.open, A)
        await trio.to_thread.run_sync(record_failures, session, A)
        found = session.health_of(DeviceRef(A, NODE, "dev-0"))
        assert found is not None
        assert found.health is Health.UNHEALTHY
        assert is_tainted(session)
        again = claim(A, "b")
        assert session.check_claims([again]) == [None], "only a prepare can show whether the fault has passed"
    assert "fault not delivered" not in caplog.text


async def test_device_without_verdict_is_not_waited_for(
    tmp_path: Path, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(tmp_path, host, declares=False)
    named = DEAD._replace(device="dev-9")
    of_other = replace(claim(A), devices=(ClaimDevice("r", A, NODE, "dev-9"),))
    async with agent.run_core():
        session = await trio.to_thread.run_sync(agent.sessions.open, A)
        result = ReportedClaimResult(of_other, (named,))
        [verdict] = await trio.to_thread.run_sync(session.record_prepares, [result])
        assert verdict is not None
        assert verdict.devices == (DeviceRef(A, NODE, "dev-9"),)
    assert "fault not delivered" not in caplog.text


def test_devices_broken_together_are_waited_for_once(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    agent.publish()
    record_failures(agent.sessions.open(A), A, "a", "b", "c")  # without a core
    assert [record.message for record in caplog.records if "fault not delivered" in record.message] == [
        f"device {A}/{NODE}/dev-0: fault not delivered to all health streams within 1.5 s; the prepare returns"  # noqa: E501
    ]


def other_failures(agent: Agent, driver: str, name: str) -> list[tuple[str, str]]:
    found = agent.sessions.failures_at_other_drivers(driver, claim(driver, name).ref)
    return [(entry.driver, entry.verdict.claim.name) for entry in found]


def test_failures_of_one_pods_drivers_are_known_to_each_other(agent: Agent) -> None:
    """Claims a and b are of one pod, claim c is of another one; claim d has devices of both drivers."""
    of_pods = [
        listed_prepared("uid-a", pods=["p"]),
        listed_prepared("uid-b", pods=["p"]),
        listed_prepared("uid-c", pods=["q"]),
    ]
    first, second = agent.sessions.open(A), agent.sessions.open(B)
    first.record_prepares([ReportedClaimResult(claim(A, name), (ErrorText("no"),)) for name in "ad"])
    second.record_prepares([ReportedClaimResult(claim(B, name), (ErrorText("no"),)) for name in "bcd"])
    assert other_failures(agent, A, "a") == [], "the pods are not known yet"
    assert other_failures(agent, A, "d") == [(B, "d")]
    agent.consumers = build_consumer_map(source_answers(checkpoint=of_pods))
    assert other_failures(agent, A, "a") == [(B, "b")]
    assert other_failures(agent, B, "b") == [(A, "a")]
    assert other_failures(agent, B, "c") == []
    second.record_prepares([ReportedClaimResult(claim(B, "b"), None)])
    assert other_failures(agent, A, "a") == []


def test_blocked_claim_has_the_verdict_of_its_failed_prepare(agent: Agent) -> None:
    session = agent.sessions.open(A)
    session.record_prepares([ReportedClaimResult(claim(A), (DecodeFailure("json", "no", Operation.CONFIG),))])
    session.record_prepares([ReportedClaimResult(claim(A, "b"), (ErrorText("no"),))])
    assert session.check_claims([claim(A), claim(A, "b")]) == [*session.recorded_failures(["uid-a"]), None]
    assert [verdict.code for verdict in session.recorded_failures(["uid-a", "uid-x"])] == ["config.decode"]


def test_unprepare_is_released_for_a_device_named_only_by_the_call(agent: Agent) -> None:
    session = agent.sessions.open(A)
    unhealthy = health(("gpu.xid.79", Severity.UNHEALTHY), device="dev-0")._replace(driver=A)
    agent.hub.publish(Report(NODE, read_clocks(), (unhealthy,), declaring=(A,)))
    busy = (ErrnoEvidence(16, None, "", "Device or resource busy"),)
    assert session.record_unprepares([ReportedClaimResult(claim(A), busy)]) == [None]
    [verdict] = session.record_unprepares([ReportedClaimResult(replace(claim(A, "b"), devices=()), busy)])
    assert verdict is not None


@pytest.mark.parametrize("declares", [False, True])
def test_failed_unprepare_before_declarations_uses_no_host_device(
    tmp_path: Path, host: Host, declares: bool
) -> None:
    """The host's device of the same name can be another one, and Unhealthy."""
    agent = Agent(tmp_path, host, declares=declares)
    agent.config = msgspec.structs.replace(agent.config, kubelet_dir=tmp_path)
    of_driver = {A: {"Devices": [kubelet_files.device("dev-0", pool=NODE)]}}
    prepared = kubelet_files.claim("uid-a", name="a", namespace="ns", drivers=of_driver)
    (tmp_path / "dra_manager_state").write_bytes(kubelet_files.checkpoint([prepared]))
    owner = A if declares else ""
    unhealthy = health(("gpu.xid.79", Severity.UNHEALTHY), device="dev-0")._replace(driver=owner)
    agent.hub.publish(Report(NODE, read_clocks(), (unhealthy,), declaring=(A,) if declares else ()))
    failed = ReportedClaimResult(Claim("ns", "a", "uid-a"), (ErrorText("no"),))
    [verdict] = agent.sessions.open(A).record_unprepares([failed])
    assert (verdict is None) == declares, "the kubelet retries, unless the driver's own device is broken"


def test_successful_unprepare_ends_the_claim(agent: Agent) -> None:
    session = agent.sessions.open(A)
    record_failures(session, A)
    assert session.record_unprepares([ReportedClaimResult(claim(A), None)]) == [None]
    agent.sessions.close(shutdown_time_in(PATIENCE_S))
    ledger, _ = load_ledger(agent.config.state_dir / DRIVERS / A, A)
    assert [bool(claim.unprepared_wall_s) for claim in ledger.claims.values()] == [True]


def test_devices_are_not_evaluated_before_a_report_has_them(agent: Agent) -> None:
    session = agent.sessions.open(A)
    own = health(device="dev-0")._replace(driver="")
    agent.hub.publish(Report(NODE, read_clocks(), (own,)))
    assert session.sync([]) == (0, False)
    agent.read_declarations()
    report = Report(NODE, read_clocks(), (own,), declaring=(A,), declarations=agent.declarations)
    agent.hub.publish(report)
    agent.hub.handle_evaluation(report)
    assert session.sync([]) == (0, True)
    assert session.sync(rows(0)) == (1, False)
    agent.read_declarations()
    agent.publish()
    assert session.sync(rows(0)) == (1, True)


def rows(numa: int, name: str = "dev-0") -> list[DeviceDeclaration]:
    """Return the declaration of one device, the memory of a NUMA node."""
    return [DeviceDeclaration("", {"name": name, "kind": "memory", "numa": numa})]


def test_other_hardware_is_not_evaluated_by_the_report_before(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.driver.session.FIRST_VERDICTS_S", 0.0)
    session = agent.sessions.open(A)
    session.sync(rows(0))
    agent.read_declarations()
    agent.publish()
    assert session.sync(rows(0)) == (1, True)
    assert session.sync(rows(1)) == (1, False)
    agent.read_declarations()
    agent.hub.handle_evaluation(agent.evaluate())  # not published: it shows nothing new
    assert session.sync(rows(1)) == (1, True)


def active_faults(agent: Agent) -> list[str]:
    snapshot = agent.source.read()
    assert snapshot is not None
    return [fault.device.device for fault in snapshot.driver_faults if not fault.expired_wall_s]


@pytest.mark.parametrize("is_removed_before", [False, True])
def test_driver_fault_ends_when_its_device_is_declared_with_other_hardware(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, *, is_removed_before: bool
) -> None:
    monkeypatch.setattr("agent.driver.session.FIRST_VERDICTS_S", 0.0)
    session = agent.sessions.open(A)
    for declared in (rows(0), [*rows(0), *rows(1, "dev-1")]):
        session.sync(declared)
        agent.read_declarations()
    record_failures(session, A, "a")
    assert active_faults(agent) == ["dev-0"]
    if is_removed_before:
        session.sync(rows(1, "dev-1"))
        agent.read_declarations()
    session.sync(rows(0))
    agent.read_declarations()
    assert active_faults(agent) == ["dev-0"], "the hardware is the same"
    if is_removed_before:
        session.sync([])
        agent.read_declarations()
    session.sync(rows(1))
    assert active_faults(agent) == []
    record_failures(session, A, "a")
    assert active_faults(agent) == ["dev-0"], "a fault of the new hardware"


async def test_configuration_applies_to_every_driver(agent: Agent) -> None:
    pattern = ErrorPattern(re.compile("bank_locked"), "fpga.bank_locked", ErrorClass.PERMANENT)
    settings = {"taint_evict": frozenset({"gpu.xid.79"}), "prepare_patterns": (pattern,)}
    agent.config = msgspec.structs.replace(agent.config, **settings)
    session = agent.sessions.open(A)
    assert session.classify(claim(A), [ErrorText("bank_locked: 3")]).code == "fpga.bank_locked"
    unhealthy = health(("gpu.xid.79", Severity.UNHEALTHY), device="dev-0")._replace(driver=A)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(agent.sessions.run)
        now = read_clocks()
        agent.sessions.update_taints(Report(NODE, now, (unhealthy,), declaring=(A,)), now)
        await eventually_async(lambda: is_tainted(session))
        nursery.cancel_scope.cancel()
    _, taints = session.taints.peek()
    assert taints is not None
    assert [taint.effect for taint in taints.devices[DeviceRef(A, NODE, "dev-0")]] == [Effect.NO_EXECUTE]


def test_too_many_devices_of_all_drivers_are_rejected_with_numbers(agent: Agent) -> None:
    others = [DriverDevice(B, NODE, f"d-{number}", DeclaredOtherDevice(), 0) for number in range(4095)]
    agent.declarations = (
        DeclaredFile(A, (DriverDevice(A, NODE, "before", DeclaredOtherDevice(), 0),)),
        DeclaredFile(B, tuple(others)),
    )
    session = agent.sessions.open(A)
    rows = [
        DeviceDeclaration("", {"name": f"m-{number}", "kind": "memory", "numa": 0}) for number in range(2)
    ]
    with pytest.raises(TooManyDevices, match="declares 2 devices, other drivers 4095, limit 4096 in total"):
        session.sync(rows)
    assert session.sync(rows[:1]).devices == 1


# --- shutdown ----------------------------------------------------------------------------------------------


@contextmanager
def hanging_disk(agent: Agent, driver: str) -> Iterator[None]:
    """Block the writer of the driver's ledger until the context ends."""
    directory = agent.config.state_dir / DRIVERS / driver
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{LEDGER_FILE}.new").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def shutdown_time_in(seconds: float) -> float:
    """Return a time of the shutdown's clock."""
    return read_clocks().mono_ns / NS + seconds


def test_close_saves_pending_changes(agent: Agent) -> None:
    session = agent.sessions.open(A)
    session.record_prepares([ReportedClaimResult(claim(A), None)])
    assert agent.sessions.close(shutdown_time_in(PATIENCE_S)) == []
    assert (agent.config.state_dir / DRIVERS / A / LEDGER_FILE).exists()


def test_close_names_the_driver_of_a_hung_disk(agent: Agent) -> None:
    with hanging_disk(agent, A):
        for driver in (A, B):
            agent.sessions.open(driver).record_prepares([ReportedClaimResult(claim(driver), None)])
        assert f"ledger writer of {A}" in agent.sessions.close(shutdown_time_in(0.5))
        eventually((agent.config.state_dir / DRIVERS / B / LEDGER_FILE).exists, "the other ledger is saved")
    assert agent.sessions.close(shutdown_time_in(PATIENCE_S)) == []


def test_report_during_close_is_saved_when_the_disk_answers(agent: Agent) -> None:
    agent.publish()
    with hanging_disk(agent, A):
        thread = threading.Thread(target=record_failures, args=(agent.sessions.open(A), A))
        thread.start()
        eventually(agent.host.is_woken, "the core is woken without the disk")
        agent.source.close()
        assert agent.sessions.close(shutdown_time_in(0)) == [f"ledger writer of {A}"]
    thread.join()
    assert agent.sessions.close(shutdown_time_in(PATIENCE_S)) == []
    assert "fpga.dead" in (agent.config.state_dir / DRIVERS / A / LEDGER_FILE).read_text()
