"""The links of drivers, and the way of their word to the core. That is of a few lines, the rest is real."""

import fcntl
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import trio
from paper import PaperNode
from patience import PATIENCE_S
from prepare_paper import health
from wire.serving import eventually

from agent.config import DRIVERS, Config
from agent.driver.link import DriverSession
from agent.driver.links import LinkedSource, Links
from agent.driver.report_hub import ReportHub
from agent.model.claim import Claim, ClaimDevice, ClaimRef, DeviceRef
from agent.model.declared import Declarations, Declared, DeclaredFile, DeclaredOther
from agent.model.health import DeviceHealth, Health, Severity
from agent.model.prepare import DriverFault, ErrorClass, PrepareVerdict
from agent.model.report import Report
from agent.model.snapshot import Snapshot
from agent.model.taint import Effect
from agent.model.time import NS, Instant
from agent.prepare.evidence import DriverReportedError, Errno, Text
from agent.prepare.patterns import Pattern
from agent.serve.driver_link.service import HandlerGone, NoRoom, Row
from agent.store.prepares import FILE, load
from agent.system.clock import read_clocks

A: Final = "a.example.com"
B: Final = "b.example.com"
NODE: Final = "node-1"
DEAD: Final = DriverReportedError(ErrorClass.FAILED_DEVICE, "fpga.dead", "no answer", device="dev-0")


class Host:
    """The host's sources: a descriptor, and a picture once somebody has looked."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.picture: Snapshot | None = PaperNode().snapshot()

    def fileno(self) -> int:
        return self.descriptor

    def clear(self) -> None:
        os.eventfd_read(self.descriptor)

    def read(self) -> Snapshot | None:
        return self.picture

    def is_woken(self) -> bool:
        """Whether somebody woke it since the last time."""
        try:
            self.clear()
        except BlockingIOError:
            return False
        return True


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    os.close(made.descriptor)


def fault(driver: str, number: int = 1) -> DriverFault:
    """Of the driver's only device."""
    claim = ClaimRef("ns", "a", "u")
    return DriverFault(number, DeviceRef(driver, NODE, "dev-0"), "fpga.dead", "", "", 1.0, claim)


# --- what the core reads -----------------------------------------------------------------------------------


def test_what_a_driver_found_broken_wakes_the_core_and_is_in_its_next_picture(host: Host) -> None:
    source = LinkedSource(host)
    assert source.read() is host.picture
    source.tell(A, [fault(A)])
    assert host.is_woken()
    assert [one.told for one in (source.read(), host.picture) if one] == [(fault(A),), ()]


def test_each_driver_replaces_its_own_word_alone(host: Host) -> None:
    source = LinkedSource(host)
    source.tell(A, [fault(A)])
    source.tell(B, [fault(B), fault(B, 2)])
    source.tell(A, [])
    found = source.read()
    assert found is not None
    assert found.told == (fault(B), fault(B, 2))


def test_before_the_host_was_looked_at_there_is_no_picture_whoever_says_what(host: Host) -> None:
    host.picture = None
    source = LinkedSource(host)
    source.tell(A, [fault(A)])
    assert source.read() is None


def test_nobody_wakes_a_descriptor_that_may_be_another_by_now(host: Host) -> None:
    source = LinkedSource(host)
    source.close()
    source.tell(A, [fault(A)])
    assert not host.is_woken()


# --- an agent on paper, with its links ---------------------------------------------------------------------


class _Link(DriverSession):
    """The real one, which notes what everybody could read when it took a report, and runs once."""

    runs = False

    def __init__(
        self, taken: list[Report | None], driver: str, config: Config, board: ReportHub, **rest: Any
    ) -> None:
        self._taken, self._everybody = taken, board
        super().__init__(driver, config, board, **rest)

    def take(self, report: Report, now: Instant) -> None:
        self._taken.append(self._everybody.report)
        super().take(report, now)

    async def run(self) -> None:
        assert not self.runs
        self.runs = True
        await super().run()


class Agent:
    """Board, source and links of an agent with two drivers that declare a device each; a core if one runs."""

    def __init__(self, directory: Path, host: Host, *, declares: bool = True) -> None:
        self.host = host
        self.board = ReportHub()
        self.source = LinkedSource(host)
        self.config = Config(node_name=NODE, runtime_dir=directory, state_dir=directory / "state")
        self.declarations: Declarations = ()
        self.made: list[str] = []
        self.fails: list[Exception] = []
        self.held: dict[str, threading.Event] = {}
        """By driver: what the opening of its link waits for."""
        self.declares = declares
        self.taken: list[Report | None] = []
        """What everybody could read when a link took a newer report."""
        self.links = Links([A, B], self.config.state_dir, self.board, self._make)

    def _make(self, driver: str, state_dir: Path) -> DriverSession:
        self.made.append(driver)
        if driver in self.held:
            assert self.held[driver].wait(PATIENCE_S)
        if self.fails:
            raise self.fails.pop()
        return _Link(
            self.taken,
            driver,
            self.config,
            self.board,
            state_dir=state_dir,
            declarations=lambda: self.declarations,
            tell=self.source.tell,
            clock=read_clocks,
        )

    def look(self) -> Report:
        """What the core says now: each device is dead if its driver says so."""
        snapshot = self.source.read()
        assert snapshot is not None
        dead = {one.device.driver for one in snapshot.told if not one.excused_wall_s}
        devices = [self.device(driver, dead=driver in dead) for driver in (A, B)]
        declaring = (A, B) if self.declares else ()
        return Report(NODE, read_clocks(), tuple(devices), declaring=declaring)

    def device(self, driver: str, *, dead: bool) -> DeviceHealth:
        if not self.declares:
            return health(device="dev-0")._replace(driver="")
        causes = [("fpga.dead", Severity.UNHEALTHY)] if dead else []
        return health(*causes, device="dev-0", told=True)._replace(driver=driver)

    def say(self) -> None:
        """As the core does when something changed."""
        report = self.look()
        self.links.take(report, report.at)

    async def core(self) -> None:
        """Says something each time that it is woken."""
        while True:
            await trio.lowlevel.wait_readable(self.source.fileno())
            self.source.clear()
            self.say()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """With a core that has looked once, and the links."""
        self.say()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.core)
            nursery.start_soon(self.links.run)
            yield
            nursery.cancel_scope.cancel()


@pytest.fixture
def agent(tmp_path: Path, host: Host) -> Agent:
    return Agent(tmp_path, host)


def claim(driver: str, name: str = "a") -> Claim:
    """Of the driver's only device."""
    return Claim("ns", name, f"uid-{name}", (ClaimDevice("r", driver, NODE, "dev-0"),))


def failed(link: DriverSession, driver: str, *names: str) -> list[PrepareVerdict | None]:
    return link.prepared([HandlerGone(claim(driver, name), (DEAD,)) for name in names or ("a",)])


# --- opening -----------------------------------------------------------------------------------------------


def test_only_links_with_a_memory_are_opened_at_the_start(agent: Agent) -> None:
    agent.links.restore()
    assert agent.made == []
    (agent.config.state_dir / DRIVERS / B).mkdir(parents=True)
    agent.links.restore()
    assert agent.made == [B]


def test_what_was_found_broken_in_an_earlier_life_is_in_the_first_picture(agent: Agent, host: Host) -> None:
    failed(agent.links.open(A), A)
    failed(agent.links.open(B), B)
    again = Agent(agent.config.runtime_dir, host)
    again.links.restore()
    assert [one.health for one in again.look().devices] == [Health.UNHEALTHY, Health.UNHEALTHY]


def test_whoever_calls_first_opens_the_link_and_there_is_but_one(agent: Agent) -> None:
    agent.held[A] = threading.Event()
    found: list[DriverSession] = []
    threads = [threading.Thread(target=lambda: found.append(agent.links.open(A))) for _ in range(8)]
    for thread in threads:
        thread.start()
    agent.held[A].set()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert agent.made == [A]


def test_an_opening_that_fails_is_tried_again_by_the_next_call(agent: Agent) -> None:
    agent.fails = [OSError(5, "Input/output error")]
    with pytest.raises(OSError, match="Input/output error"):
        agent.links.open(A)
    assert agent.links.open(A) is agent.links.open(A)


def test_an_opening_that_fails_at_the_start_keeps_no_agent_from_starting(agent: Agent) -> None:
    for driver in (A, B):
        (agent.config.state_dir / DRIVERS / driver).mkdir(parents=True)
    agent.fails = [OSError(5, "Input/output error")]
    agent.links.restore()
    assert agent.made == [A, B]


async def test_an_opening_that_hangs_holds_up_no_other_driver_and_no_report(agent: Agent) -> None:
    agent.held[A] = threading.Event()
    thread = threading.Thread(target=agent.links.open, args=(A,))
    thread.start()
    async with agent.running():
        other = await trio.to_thread.run_sync(agent.links.open, B)
        [said] = await trio.to_thread.run_sync(failed, other, B)
        assert said is not None
        assert said.code == "fpga.dead"
        agent.held[A].set()
        await trio.to_thread.run_sync(thread.join)
        well = agent.links.open(A)
        await eventually_async(lambda: well.taints.peek()[0] == 1)


async def eventually_async(claim: Callable[[], bool]) -> None:
    await trio.to_thread.run_sync(eventually, claim, "it comes true")


async def test_a_link_gets_the_report_that_was_there_before_it(agent: Agent) -> None:
    async with agent.running():
        link = await trio.to_thread.run_sync(agent.links.open, A)
        await eventually_async(lambda: link.taints.peek()[0] == 1)
    taints = link.taints.peek()[1]
    assert taints is not None
    assert dict(taints.devices) == {DeviceRef(A, NODE, "dev-0"): ()}


async def test_a_link_from_before_the_loop_runs_like_any_other(agent: Agent) -> None:
    link = agent.links.open(A)
    async with agent.running():
        await eventually_async(lambda: link.taints.peek()[0] == 1)


def test_a_link_can_be_opened_when_the_loop_has_ended(agent: Agent) -> None:
    async def run() -> None:
        async with agent.running():
            pass

    trio.run(run)
    [said] = failed(agent.links.open(A), A)
    assert said is not None
    assert said.code == "fpga.dead"


# --- the order ---------------------------------------------------------------------------------------------


def test_taints_are_decided_before_anybody_can_read_the_report(agent: Agent) -> None:
    agent.links.open(A)
    for _ in range(2):
        before = agent.board.report
        agent.say()
        assert agent.taken[-1] is before
        assert agent.board.report is not before


async def test_who_reports_a_broken_device_returns_when_it_is_unhealthy_and_its_taint_decided(
    agent: Agent,
) -> None:
    async with agent.running():
        link = await trio.to_thread.run_sync(agent.links.open, A)
        [said] = await trio.to_thread.run_sync(failed, link, A)
        found = link.health_of(DeviceRef(A, NODE, "dev-0"))
        assert found is not None
        assert found.health is Health.UNHEALTHY
        assert said is not None
        assert (said.code, said.count) == ("fpga.dead", 1)
        await eventually_async(lambda: is_tainted(link))
        await eventually_async((agent.config.state_dir / DRIVERS / A / "taints.json").exists)


def is_tainted(link: DriverSession) -> bool:
    _, taints = link.taints.peek()
    return taints is not None and bool(taints.devices[DeviceRef(A, NODE, "dev-0")])


async def test_two_drivers_at_once_are_both_heard(agent: Agent) -> None:
    async def report(driver: str) -> None:
        link = await trio.to_thread.run_sync(agent.links.open, driver)
        await trio.to_thread.run_sync(failed, link, driver)

    async with agent.running():
        async with trio.open_nursery() as nursery:
            for driver in (A, B):
                nursery.start_soon(report, driver)
        said = agent.board.report
        assert said is not None
        assert [one.health for one in said.devices] == [Health.UNHEALTHY, Health.UNHEALTHY]


async def test_the_next_prepare_that_goes_well_makes_it_healthy_again(agent: Agent) -> None:
    async with agent.running():
        link = await trio.to_thread.run_sync(agent.links.open, A)
        await trio.to_thread.run_sync(failed, link, A)
        assert link.prepared([HandlerGone(claim(A, "b"), None)]) == [None]
        of = DeviceRef(A, NODE, "dev-0")
        await eventually_async(lambda: agent.board.health_of(of).health is Health.HEALTHY)  # type: ignore[union-attr]


# --- what a link knows -------------------------------------------------------------------------------------


def test_a_device_that_is_unhealthy_is_known_against_its_claims_while_the_core_speaks(agent: Agent) -> None:
    link = agent.links.open(A)
    sick = health(("gpu.xid.79", Severity.UNHEALTHY), device="dev-0")._replace(driver=A)
    now = read_clocks()
    assert not link.is_up
    assert link.check([claim(A)]) == [None]
    agent.board.publish(Report(NODE, now, (sick,), declaring=(A,)))
    [said] = link.check([claim(A)])
    assert said is not None
    assert said.code == "gpu.xid.79"
    assert link.is_up
    old = replace(now, mono_ns=now.mono_ns - (agent.config.lease_s + 1) * NS)
    agent.board.publish(Report(NODE, old, (sick,), declaring=(A,)))
    assert link.check([claim(A, "b")]) == [None]


def test_until_a_driver_declares_devices_the_hosts_own_are_what_its_claims_are_of(agent: Agent) -> None:
    link = agent.links.open(A)
    sick = health(("gpu.xid.79", Severity.UNHEALTHY), device="dev-0")._replace(driver="")
    agent.board.publish(Report(NODE, read_clocks(), (sick,), declaring=(B,)))
    [said] = link.check([claim(A)])
    assert said is not None
    assert (said.code, said.devices) == ("gpu.xid.79", (DeviceRef(A, NODE, "dev-0"),))
    agent.board.publish(Report(NODE, read_clocks(), (sick,), declaring=(A,)))
    assert link.check([claim(A, "b")]) == [None]


async def test_of_a_device_that_nobody_declares_nothing_is_awaited(
    tmp_path: Path, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(tmp_path, host, declares=False)
    async with agent.running():
        link = await trio.to_thread.run_sync(agent.links.open, A)
        await trio.to_thread.run_sync(failed, link, A)
    assert "not everybody heard" not in caplog.text


def test_devices_that_were_broken_together_are_waited_for_once(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    agent.say()
    failed(agent.links.open(A), A, "a", "b", "c")  # no core says anything
    assert [record.message for record in caplog.records if "not everybody" in record.message] == [
        f"{A}/{NODE}/dev-0: not everybody heard of it within 1.5 s"
    ]


def test_an_unprepare_is_let_go_for_a_device_that_is_known_from_the_call_alone(agent: Agent) -> None:
    link = agent.links.open(A)
    sick = health(("gpu.xid.79", Severity.UNHEALTHY), device="dev-0")._replace(driver=A)
    agent.board.publish(Report(NODE, read_clocks(), (sick,), declaring=(A,)))
    busy = (Errno(16, None, "", "Device or resource busy"),)
    assert link.unprepared([HandlerGone(claim(A), busy)]) == [None]
    [said] = link.unprepared([HandlerGone(replace(claim(A, "b"), devices=()), busy)])
    assert said is not None


def test_an_unprepare_that_went_well_ends_the_claim(agent: Agent) -> None:
    link = agent.links.open(A)
    failed(link, A)
    assert link.unprepared([HandlerGone(claim(A), None)]) == [None]
    agent.links.close(in_s(10))
    book, _ = load(agent.config.state_dir / DRIVERS / A, A)
    assert [bool(one.over_wall_s) for one in book.claims.values()] == [True]


def test_until_the_report_tells_of_the_drivers_devices_none_of_them_is_judged(agent: Agent) -> None:
    link = agent.links.open(A)
    own = health(device="dev-0")._replace(driver="")
    agent.board.publish(Report(NODE, read_clocks(), (own,)))
    assert link.sync([]) == (0, False)
    agent.board.publish(Report(NODE, read_clocks(), (own,), declaring=(A,)))
    assert link.sync([]) == (0, True)
    rows = [Row("", {"name": "dev-0", "kind": "memory", "numa": 0})]
    assert link.sync(rows) == (1, False)
    agent.say()
    assert link.sync(rows) == (1, True)


async def test_what_the_operator_configures_counts_for_every_driver(agent: Agent) -> None:
    pattern = Pattern(re.compile("bank_locked"), "fpga.bank_locked", ErrorClass.PERMANENT)
    told = {"taint_evict": frozenset({"gpu.xid.79"}), "prepare_patterns": (pattern,)}
    agent.config = msgspec.structs.replace(agent.config, **told)
    link = agent.links.open(A)
    assert link.classify(claim(A), [Text("bank_locked: 3")]).code == "fpga.bank_locked"
    sick = health(("gpu.xid.79", Severity.UNHEALTHY), device="dev-0")._replace(driver=A)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(agent.links.run)
        now = read_clocks()
        agent.links.take(Report(NODE, now, (sick,), declaring=(A,)), now)
        await eventually_async(lambda: is_tainted(link))
        nursery.cancel_scope.cancel()
    _, taints = link.taints.peek()
    assert taints is not None
    assert [one.effect for one in taints.devices[DeviceRef(A, NODE, "dev-0")]] == [Effect.NO_EXECUTE]


def test_more_devices_than_others_leave_room_for_are_refused_with_the_numbers(agent: Agent) -> None:
    others = [Declared(B, NODE, f"d-{number}", DeclaredOther(), 0) for number in range(4095)]
    agent.declarations = (
        DeclaredFile(A, (Declared(A, NODE, "before", DeclaredOther(), 0),)),
        DeclaredFile(B, tuple(others)),
    )
    link = agent.links.open(A)
    rows = [Row("", {"name": f"m-{number}", "kind": "memory", "numa": 0}) for number in range(2)]
    with pytest.raises(NoRoom, match="2 devices and 4095 of other drivers, limit 4096"):
        link.sync(rows)
    assert link.sync(rows[:1]).devices == 1


# --- the end -----------------------------------------------------------------------------------------------


@contextmanager
def hanging_disk(agent: Agent, driver: str) -> Iterator[None]:
    """Whoever writes down the driver's prepares waits, until the context ends."""
    directory = agent.config.state_dir / DRIVERS / driver
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{FILE}.new").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def in_s(seconds: float) -> float:
    """By the clock of the end."""
    return read_clocks().mono_ns / NS + seconds


def test_the_end_writes_what_can_wait(agent: Agent) -> None:
    link = agent.links.open(A)
    link.prepared([HandlerGone(claim(A), None)])
    assert agent.links.close(in_s(10)) == []
    assert (agent.config.state_dir / DRIVERS / A / FILE).exists()


def test_the_end_waits_for_no_disk_and_says_whose_it_is(agent: Agent) -> None:
    with hanging_disk(agent, A):
        for driver in (A, B):
            agent.links.open(driver).prepared([HandlerGone(claim(driver), None)])
        assert f"what writes the prepares of {A}" in agent.links.close(in_s(0.5))
        eventually((agent.config.state_dir / DRIVERS / B / FILE).exists, "the other's are kept")
    assert agent.links.close(in_s(10)) == []


def test_a_report_that_is_under_way_at_the_end_counts_when_the_disk_comes_back(agent: Agent) -> None:
    agent.say()
    with hanging_disk(agent, A):
        thread = threading.Thread(target=failed, args=(agent.links.open(A), A))
        thread.start()
        eventually(agent.host.is_woken, "the core is told, without the disk")
        agent.source.close()
        assert agent.links.close(in_s(0)) == [f"what writes the prepares of {A}"]
    thread.join()
    assert agent.links.close(in_s(10)) == []
    assert "fpga.dead" in (agent.config.state_dir / DRIVERS / A / FILE).read_text()
