"""The desk: the order of things, what a restart leaves, and that neither disk nor engine holds it up."""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prepare_paper import DRIVER, NOW, PaperEngine, claim, health, ref

from agent.driver.prepare_tracker import PrepareTracker
from agent.model.claim import Claim
from agent.model.health import Severity
from agent.model.prepare import DriverFault, ErrorClass, PrepareVerdict
from agent.prepare.driver_faults import LIMIT_S
from agent.prepare.errors import BadConfig, FailedDevice, PermanentError, PrepareError, TransientError
from agent.prepare.evidence import Errno
from agent.store.prepares import FILE, load

A, B = claim("a"), claim("b")
DEAD = FailedDevice("gpu-0", "no answer", code="fpga.dead")


class Clock:
    """A wall clock that is set by hand."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@dataclass
class Office:
    """A driver's state directory, its engine and its clock; and a desk for each of its lives."""

    directory: Path | None
    engine: PaperEngine = field(default_factory=PaperEngine)
    clock: Clock = field(default_factory=Clock)
    desks: list[PrepareTracker] = field(default_factory=list)

    def open(self, version: str = "1", engine: PaperEngine | None = None) -> PrepareTracker:
        """A desk as after a start of the driver."""
        used = engine or self.engine
        desk = PrepareTracker(DRIVER, self.directory, used, version=version, clock=self.clock)
        self.desks.append(desk)
        return desk

    def kept(self) -> dict[str, PrepareVerdict | None]:
        """What is in the file, by the claim's name."""
        book, problem = load(self.directory, DRIVER)
        assert problem == ""
        return {one.outcome.claim.name: one.outcome.verdict for one in book.claims.values()}


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    made = Office(tmp_path / "state")
    yield made
    for desk in made.desks:
        desk.close(10)


def fails(desk: PrepareTracker, error: Exception, of: Claim = A) -> PrepareVerdict:
    return desk.failed(of, desk.judge(of, error))


def until(claim: Callable[[], object]) -> None:
    """Waits for what a thread does; the test's own time limit ends it."""
    while not claim():
        time.sleep(0.005)


# --- order -------------------------------------------------------------------------------------------------


@dataclass
class Witness(PaperEngine):
    """Looks at the file whenever it is told something."""

    directory: Path = Path()
    seen: list[tuple[DriverFault, ...]] = field(default_factory=list)

    def tell(self, faults: Sequence[DriverFault]) -> None:
        self.seen.append(load(self.directory, DRIVER)[0].told.faults)
        super().tell(faults)


def test_a_broken_device_is_on_the_disk_then_told_then_waited_for_then_returned(office):
    engine = Witness(directory=office.directory)
    said = fails(office.open(engine=engine), DEAD)
    assert engine.events == ["tell", "wait"]
    assert engine.seen == [engine.told]
    (fault,) = engine.told
    assert (fault.device, fault.code, fault.evidence) == (ref(), "fpga.dead", "no answer")
    assert office.kept() == {"a": said}


def test_a_failure_is_on_the_disk_when_its_caller_hears_of_it(office):
    said = fails(office.open(), BadConfig("no"))
    assert office.kept() == {"a": said}
    assert office.engine.events == []


def test_what_the_engine_holds_unhealthy_is_the_cause_and_nothing_is_told(office):
    office.engine.known = {ref(): health(("gpu.xid.79", Severity.UNHEALTHY))}
    said = fails(office.open(), OSError(errno.EIO, "Input/output error"))
    assert (said.error_class, said.code) == (ErrorClass.FAILED_DEVICE, "gpu.xid.79")
    assert office.engine.told == ()


def test_a_success_is_written_soon_and_by_a_thread_that_ends(office):
    desk = office.open()
    before = set(threading.enumerate())
    desk.succeeded(A)
    until(lambda: office.kept() == {"a": None})
    until(lambda: set(threading.enumerate()) <= before)


def test_what_is_not_yet_written_is_written_at_the_end(office):
    desk = office.open()
    desk.succeeded(A)
    desk.unprepared(A.ref)
    assert desk.close(10)
    assert load(office.directory, DRIVER)[0].claims[A.uid].over_wall_s == NOW


def test_claims_that_fail_at_once_are_all_kept(office):
    desk = office.open()
    claims = [claim(str(number)) for number in range(12)]
    threads = [threading.Thread(target=fails, args=(desk, BadConfig("no"), one)) for one in claims]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(office.kept()) == {one.name for one in claims}


# --- answers -----------------------------------------------------------------------------------------------


def test_the_same_question_gets_the_same_text_after_a_restart(office):
    first = fails(office.open(), BadConfig("mode 'x' is none of a, b"))
    again = office.open().cached_failure(A)
    assert isinstance(again, PrepareError)
    assert again.verdict == first
    assert "mode 'x' is none of a, b" in again.text


def test_a_new_version_of_the_driver_is_asked_anew(office):
    fails(office.open("1"), PermanentError("no such kernel"))
    assert office.open("1").cached_failure(A)
    assert office.open("2").cached_failure(A) is None


def test_a_failed_device_is_answered_from_memory_until_something_else_is_known_of_it(office):
    office.engine.known = {ref(): health(("gpu.xid.79", Severity.UNHEALTHY))}
    fails(office.open(), RuntimeError("no"))
    desk = office.open()
    assert desk.cached_failure(A)
    office.engine.known = {ref(): health()}
    assert desk.cached_failure(A) is None


def test_a_device_that_only_the_driver_found_broken_is_answered_for_until_the_kubelet_comes_again(office):
    desk = office.open()
    fails(desk, DEAD)
    assert desk.cached_failure(A)
    office.clock.now += 60
    assert desk.cached_failure(A) is None


def test_outcomes_are_told_the_newest_first(office):
    desk = office.open()
    desk.succeeded(A)
    office.clock.now += 1
    fails(desk, BadConfig("no"), B)
    assert [outcome.claim for outcome in desk.outcomes()] == [B.ref, A.ref]


# --- refusals, before anything is tried --------------------------------------------------------------------


def test_nothing_that_is_known_against_a_claim_is_no_refusal(office):
    assert office.open().known_blocker(A) is None
    assert not office.directory.exists(), "nothing is remembered of the question"


def test_what_was_refused_for_good_is_refused_again(office):
    desk = office.open()
    said = fails(desk, BadConfig("no such mode"))
    assert desk.known_blocker(A) == said
    assert desk.known_blocker(B) is None


def test_what_may_have_passed_is_no_refusal(office):
    desk = office.open()
    fails(desk, TransientError("busy"))
    assert desk.known_blocker(A) is None


def test_an_unhealthy_device_is_a_refusal_which_is_remembered_as_a_failure(office):
    office.engine.known = {ref(): health(("gpu.xid.79", Severity.UNHEALTHY))}
    desk = office.open()
    said = desk.known_blocker(A)
    assert said is not None
    assert (said.error_class, said.code, said.devices) == (
        ErrorClass.FAILED_DEVICE,
        "gpu.xid.79",
        (ref(),),
    )
    assert [one.verdict for one in desk.outcomes()] == [said]
    assert desk.known_blocker(A) == said, "from memory: it counts tries"
    assert office.engine.told == ()
    office.engine.known = {ref(): health()}
    assert desk.known_blocker(A) is None


def test_what_an_earlier_prepare_found_of_a_device_stops_no_other_claim(office):
    desk = office.open()
    fails(desk, DEAD)
    office.engine.known = {ref(): health(("fpga.dead", Severity.UNHEALTHY), told=True)}
    assert desk.known_blocker(B) is None


def test_an_engine_that_is_down_refuses_nothing(office):
    office.engine.known = {ref(): health(("gpu.xid.79", Severity.UNHEALTHY))}
    office.engine.is_up = False
    assert office.open().known_blocker(A) is None


def test_evidence_from_elsewhere_is_judged_like_an_exception(office):
    desk = office.open()
    ours = desk.judge(A, OSError(errno.ENOSPC, "No space left on device"))
    theirs = desk.judge(A, [Errno(errno.ENOSPC, None, "", "No space left on device")])
    assert (ours.error_class, ours.code) == (theirs.error_class, theirs.code)


# --- devices that are broken by the driver's word ----------------------------------------------------------


def test_the_next_prepare_that_succeeds_excuses_the_device(office):
    desk = office.open()
    fails(desk, DEAD)
    office.clock.now += 70
    desk.succeeded(B)
    assert [fault.excused_wall_s for fault in office.engine.told] == [NOW + 70]


def test_time_excuses_it_although_nobody_prepares_anything(office):
    desk = office.open()
    fails(desk, DEAD)
    office.clock.now += LIMIT_S - 0.05
    desk.succeeded(claim("c", "gpu-1"))  # of another device: the desk looks at its clock again
    assert [fault.excused_wall_s for fault in office.engine.told] == [0]
    office.clock.now += 0.05
    until(lambda: office.engine.told[0].excused_wall_s)
    assert [fault.excused_wall_s for fault in desk.told()] == [NOW + LIMIT_S]


def test_a_restart_remembers_what_was_told(office):
    fails(office.open(), DEAD)
    assert office.open().told() == office.engine.told


def test_the_engine_of_a_new_life_is_told_what_is_remembered_and_when_it_is_over(office):
    fails(office.open(), DEAD)
    office.clock.now += LIMIT_S - 0.05
    engine = PaperEngine()
    office.open(engine=engine)
    assert [(fault.code, fault.excused_wall_s) for fault in engine.told] == [("fpga.dead", 0)]
    office.clock.now += 0.05
    until(lambda: engine.told[0].excused_wall_s)  # although nobody prepares anything


def no_answer(of: Claim) -> FailedDevice:
    return FailedDevice(of.devices[0].device, "no answer", code="fpga.dead")


def test_several_failures_are_all_told_before_any_is_waited_for(office):
    office.engine.known = {ref(): health(), ref("gpu-1"): health(device="gpu-1")}
    desk, other = office.open(), claim("b", "gpu-1")
    said = [desk.note_failed(of, desk.judge(of, no_answer(of))) for of in (A, other)]
    desk.wait_delivered(said)
    assert office.engine.events == ["tell", "tell", "wait"]


def test_a_fault_that_is_taken_back_is_no_evidence_while_the_engine_still_holds_it(office):
    @dataclass
    class Slow(PaperEngine):
        """Has heard of the fault, and not yet that it is excused."""

        def tell(self, faults: Sequence[DriverFault]) -> None:
            super().tell([fault._replace(excused_wall_s=0) for fault in faults])

        def wait_delivered(self, faults: Sequence[DriverFault], timeout_s: float) -> bool:
            return True

    engine = Slow()
    desk = office.open(engine=engine)
    fails(desk, DEAD)
    assert fails(desk, TransientError("busy")).code == "fpga.dead"  # the device is Unhealthy
    office.clock.now += 1
    desk.succeeded(A)
    assert fails(desk, TransientError("busy")).error_class is ErrorClass.TRANSIENT
    fails(desk, DEAD)
    assert [(fault.number, fault.excused_wall_s) for fault in desk.told()] == [(2, 0)]


def test_two_instances_know_what_the_other_found(office):
    old, new = office.open(engine=PaperEngine()), office.open()
    fails(old, DEAD)
    fails(new, BadConfig("no"), B)
    assert [fault.code for fault in office.engine.told] == ["fpga.dead"]
    assert {outcome.claim.name for outcome in new.outcomes()} == {"a", "b"}


# --- an unprepare ------------------------------------------------------------------------------------------


def test_an_unprepare_of_a_device_that_the_driver_finds_dead_succeeds(office, caplog):
    desk = office.open()
    desk.succeeded(A)
    assert desk.unprepare_failed(A.ref, DEAD) is None
    assert [fault.code for fault in office.engine.told] == ["fpga.dead"]
    assert "claim team/a could not be unprepared, and is let go" in caplog.text
    kept = load(office.directory, DRIVER)[0].claims[A.uid]
    assert (kept.outcome.verdict.code, kept.over_wall_s) == ("fpga.dead", NOW)


def test_an_unprepare_of_a_device_that_is_held_unhealthy_succeeds_whatever_it_raised(office):
    desk = office.open()
    desk.succeeded(A)
    office.engine.known = {ref(): health(("gpu.lost", Severity.UNHEALTHY))}
    assert desk.unprepare_failed(A.ref, ValueError("bug")) is None


def test_an_unprepare_of_devices_that_are_well_says_why_it_failed_and_is_remembered(office):
    desk = office.open()
    desk.succeeded(A)
    said = desk.unprepare_failed(A.ref, OSError(errno.EBUSY, "Device or resource busy"))
    assert said.error_class is ErrorClass.TRANSIENT
    assert office.kept() == {"a": said}
    assert desk.cached_failure(A) is None


def test_an_unprepare_of_a_claim_that_nobody_knows_is_judged_by_what_it_raised(office):
    said = office.open().unprepare_failed(A.ref, RuntimeError("no"))
    assert said.error_class is ErrorClass.UNKNOWN


def test_devices_are_known_by_their_claim_after_a_restart(office):
    office.open().succeeded(A)
    assert office.desks[0].close(10)
    office.engine.known = {ref(): health(("gpu.lost", Severity.UNHEALTHY))}
    assert office.open().unprepare_failed(A.ref, RuntimeError("no")) is None


# --- disks and engines that do not answer ------------------------------------------------------------------


def hang(directory: Path) -> Path:
    """Whoever writes there waits until somebody reads."""
    directory.mkdir(exist_ok=True)
    hanging = directory / f"{FILE}.new"
    os.mkfifo(hanging)
    return hanging


def let_go(hanging: Path) -> None:
    os.close(os.open(hanging, os.O_RDONLY | os.O_NONBLOCK))  # a FIFO cannot be synced: that write fails


def test_a_disk_that_hangs_holds_up_one_failure_for_a_while_and_no_other(office, caplog):
    desk = office.open()
    hanging = hang(office.directory)
    fails(desk, DEAD)
    assert office.engine.events == ["tell", "wait"]  # the order goes on without the disk
    for number in range(5):
        fails(desk, BadConfig("no"), claim(str(number)))
    assert [record.levelno for record in caplog.records if "not written within" in record.message] == [
        logging.WARNING
    ]
    assert not desk.close(0.05)
    let_go(hanging)
    assert desk.close(10)
    assert set(office.kept()) == {"a", "0", "1", "2", "3", "4"}


def test_a_disk_that_takes_nothing_is_told_of_once(office, caplog):
    office.directory.write_text("in the way")
    desk = office.open()
    caplog.clear()
    for number in range(5):
        assert fails(desk, BadConfig("no"), claim(str(number))).count == 1
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{office.directory / FILE}: ")
    assert warnings[0].endswith("; how prepares end is forgotten when the driver ends")
    assert not desk.close(10)
    assert desk.cached_failure(claim("3"))


def test_a_file_that_cannot_be_used_is_set_aside_and_told_of(office, caplog):
    office.directory.mkdir()
    (office.directory / FILE).write_bytes(b"{")
    assert office.open().outcomes() == ()
    assert "set aside as prepares.json.corrupt-1" in caplog.text


def test_nothing_is_kept_without_a_directory_which_is_said_once(caplog):
    caplog.set_level(logging.INFO)
    office = Office(None)
    desk = office.open()
    before = set(threading.enumerate())
    fails(desk, BadConfig("no"))
    assert desk.cached_failure(A)
    assert set(threading.enumerate()) <= before
    assert desk.close(0)
    said = [record for record in caplog.records if "is forgotten when the driver ends" in record.message]
    assert [record.levelno for record in said] == [logging.INFO]


def test_an_engine_that_is_down_is_not_waited_for(office):
    office.engine.is_up = False
    fails(office.open(), DEAD)
    assert office.engine.events == ["tell"]


def test_an_engine_that_is_down_keeps_nobody_from_being_tried(office):
    office.engine.known = {ref(): health(("gpu.xid.79", Severity.UNHEALTHY))}
    desk = office.open()
    fails(desk, RuntimeError("no"))
    assert desk.cached_failure(A)
    office.engine.is_up = False
    assert desk.cached_failure(A) is None
    assert desk.judge(A, RuntimeError("no")).error_class is ErrorClass.UNKNOWN
    assert desk.unprepare_failed(A.ref, RuntimeError("no"))


def test_what_the_engine_finds_after_the_driver_was_wrong_about_it_counts(office):
    desk = office.open()
    fails(desk, DEAD)
    desk.succeeded(A)
    office.engine.known = {ref(): health(("fpga.dead", Severity.UNHEALTHY))}
    assert desk.judge(A, RuntimeError("no")).code == "fpga.dead"


def test_an_engine_that_does_not_hear_is_told_of(office, caplog):
    office.engine.hears = False
    assert fails(office.open(), DEAD).code == "fpga.dead"
    assert f"{ref()}: not everybody heard of it within" in caplog.text


def test_a_desk_that_is_closed_still_keeps_what_comes(office):
    desk = office.open()
    assert desk.close(10)
    fails(desk, BadConfig("no"))
    assert set(office.kept()) == {"a"}


def test_where_an_exception_came_from_that_nobody_knows_is_in_the_log_once(office, caplog):
    desk, of = office.open(), claim("a")
    for _ in range(2):
        try:
            {}["bank"]
        except KeyError as error:
            desk.failed(of, desk.judge(of, error), error)
    (record,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert "code=driver.bug.key_error" in record.getMessage()
    assert record.exc_info[0] is KeyError
