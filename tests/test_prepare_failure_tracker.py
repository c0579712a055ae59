"""Prepare tracker: order of steps, state after a restart, and bounded waits for disk and engine."""

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import kubelet_files
import pytest
from held_lock import held_lock
from patience import PATIENCE_S
from prepare_samples import DRIVER, NOW, FakeEngine, claim, health, ref

from agent.driver.ledger_writer import MAX_DISK_WAIT_S
from agent.driver.prepare_failure_tracker import PrepareFailureTracker
from agent.model.claim import Claim, ClaimDevice, DeviceRef
from agent.model.health import Severity
from agent.model.prepare import DriverFault, ErrorClass, PrepareVerdict
from agent.prepare.errors import (
    BadConfigError,
    FailedDeviceError,
    PermanentError,
    PrepareError,
    TransientError,
)
from agent.prepare.evidence import ErrnoEvidence
from agent.prepare.failure_kinds import NEGATIVE_CACHE_S
from agent.prepare.prepare_ledger import FAULT_LIMIT_S
from agent.store.driver_files import LEDGER_FILE, load_ledger

A, B = claim("a"), claim("b")
DEAD = FailedDeviceError("gpu-0", "no answer", code="fpga.dead")


class Clock:
    """A wall clock that is set by hand."""

    def __init__(self) -> None:
        self.now = NOW
        self.step_s = 0.0
        """Step by which the wall clock was set forward [s]."""

    def __call__(self) -> float:
        return self.now + self.step_s

    def monotonic(self) -> float:
        """Return the monotonic time, which a step of the wall clock does not change."""
        return self.now - NOW


@dataclass
class DriverRuns:
    """State directory, engine and clock of a driver, with a tracker for each of its runs."""

    directory: Path | None
    engine: FakeEngine = field(default_factory=FakeEngine)
    clock: Clock = field(default_factory=Clock)
    claims_file: Path | None = None
    trackers: list[PrepareFailureTracker] = field(default_factory=list)

    def open(self, version: str = "1", engine: FakeEngine | None = None) -> PrepareFailureTracker:
        """Return a tracker like after a start of the driver."""
        used = engine or self.engine
        tracker = PrepareFailureTracker(
            DRIVER,
            self.directory,
            used,
            version=version,
            claims_file=self.claims_file,
            clock=self.clock,
            monotonic=self.clock.monotonic,
        )
        self.trackers.append(tracker)
        return tracker

    def saved_verdicts(self) -> dict[str, PrepareVerdict | None]:
        """Return the verdicts in the file, by the claim's name."""
        book, problem = load_ledger(self.directory, DRIVER)
        assert problem == ""
        return {claim.outcome.claim.name: claim.outcome.verdict for claim in book.claims.values()}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No write of a busy machine is late. A test of a late write sets the limit of the product."""
    monkeypatch.setattr("agent.driver.ledger_writer.MAX_DISK_WAIT_S", PATIENCE_S)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[DriverRuns]:
    made = DriverRuns(tmp_path / "state")
    yield made
    for tracker in made.trackers:
        tracker.close(PATIENCE_S)


def ledger_threads() -> set[threading.Thread]:
    """Return the threads that read and write ledgers, also those of former tests."""
    return {thread for thread in threading.enumerate() if thread.name == "dh-ledger"}


def fails(tracker: PrepareFailureTracker, error: Exception, of: Claim = A) -> PrepareVerdict:
    return tracker.record_failure_and_wait(of, tracker.classify(of, error))


def until(condition: Callable[[], object]) -> None:
    """Wait until a thread makes a condition true; the test's own time limit ends the wait."""
    while not condition():
        time.sleep(0.005)


# --- order -------------------------------------------------------------------------------------------------


@dataclass
class ReadingEngine(FakeEngine):
    """Engine that reads the ledger's file at every report."""

    directory: Path = Path()
    seen: list[tuple[DriverFault, ...]] = field(default_factory=list)

    def report_faults(self, faults: Sequence[DriverFault]) -> None:
        self.seen.append(load_ledger(self.directory, DRIVER)[0].driver_faults.faults)
        super().report_faults(faults)


def test_broken_device_is_saved_reported_delivered_and_tainted(driver):
    engine = ReadingEngine(directory=driver.directory)
    verdict = fails(driver.open(engine=engine), DEAD)
    assert engine.events == ["report", "wait", "taint"]
    assert engine.seen == [engine.faults]
    (fault,) = engine.faults
    assert (fault.device, fault.code, fault.evidence) == (ref(), "fpga.dead", "no answer")
    assert driver.saved_verdicts() == {"a": verdict}


def test_failure_is_saved_before_the_call_returns(driver):
    verdict = fails(driver.open(), BadConfigError("no"))
    assert driver.saved_verdicts() == {"a": verdict}
    assert driver.engine.events == []


@pytest.mark.parametrize("kind", [BadConfigError, PermanentError])
def test_page_size_that_does_not_exist_touches_no_device(driver, kind):
    both = claim("a", "gpu-0", "gpu-1")
    verdict = fails(driver.open(), kind("no 16Gi", code="mem.hugepages.size_unsupported"), both)
    assert (verdict.error_class, verdict.health, verdict.taint) == (ErrorClass.BAD_CONFIG, None, None)
    assert driver.engine.faults == ()


def test_unhealthy_device_is_the_cause_and_no_fault_is_reported(driver):
    driver.engine.known = {ref(): health(("gpu.xid.79", Severity.UNHEALTHY))}
    verdict = fails(driver.open(), OSError(errno.EIO, "Input/output error"))
    assert (verdict.error_class, verdict.code) == (ErrorClass.FAILED_DEVICE, "gpu.xid.79")
    assert driver.engine.faults == ()


def test_success_is_saved_soon_by_a_thread_that_ends(driver):
    tracker = driver.open()
    before = ledger_threads()
    tracker.record_success(A)
    until(lambda: driver.saved_verdicts() == {"a": None})
    until(lambda: ledger_threads() <= before)


def test_close_saves_unsaved_changes(driver):
    tracker = driver.open()
    tracker.record_success(A)
    tracker.unprepared(A.ref)
    assert tracker.close(PATIENCE_S)
    assert load_ledger(driver.directory, DRIVER)[0].claims[A.uid].unprepared_wall_s == NOW


def test_concurrent_failures_are_all_saved(driver):
    tracker = driver.open()
    claims = [claim(str(number)) for number in range(12)]
    threads = [
        threading.Thread(target=fails, args=(tracker, BadConfigError("no"), found_claim))
        for found_claim in claims
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(driver.saved_verdicts()) == {claim.name for claim in claims}


# --- answers -----------------------------------------------------------------------------------------------


def test_same_request_gets_the_same_text_after_a_restart(driver):
    first = fails(driver.open(), BadConfigError("mode 'x' is not one of a, b"))
    again = driver.open().cached_failure(A)
    assert isinstance(again, PrepareError)
    assert again.verdict == first
    assert "mode 'x' is not one of a, b" in again.text


def test_new_driver_version_ignores_cached_failures(driver):
    fails(driver.open("1"), PermanentError("no such kernel"))
    assert driver.open("1").cached_failure(A)
    assert driver.open("2").cached_failure(A) is None


def test_failed_device_is_cached_until_its_health_changes(driver):
    driver.engine.known = {ref(): health(("gpu.xid.79", Severity.UNHEALTHY))}
    fails(driver.open(), RuntimeError("no"))
    tracker = driver.open()
    assert tracker.cached_failure(A)
    driver.engine.known = {ref(): health()}
    assert tracker.cached_failure(A) is None


def test_driver_reported_fault_is_cached_for_60_s_only(driver):
    tracker = driver.open()
    fails(tracker, DEAD)
    assert tracker.cached_failure(A)
    driver.clock.now += 60
    assert tracker.cached_failure(A) is None


@pytest.mark.parametrize("error", [BadConfigError("no such mode"), PermanentError("no IOMMU")])
def test_claim_prepared_on_the_device_ends_a_cached_failure(driver, error):
    tracker = driver.open()
    tracker.record_success(B)
    driver.clock.now += 1
    fails(tracker, error)
    assert tracker.cached_failure(A), "an earlier success shows nothing"
    driver.clock.now += 1
    tracker.record_success(B)
    assert tracker.cached_failure(A) is None
    assert tracker.close(PATIENCE_S)
    assert driver.open().cached_failure(A) is None


def test_claim_prepared_on_another_device_keeps_bad_config_cached(driver):
    tracker, other = driver.open(), claim("b", "gpu-1")
    fails(tracker, BadConfigError("no such mode"))
    driver.clock.now += 1
    tracker.record_success(other)
    assert tracker.cached_failure(A)


def test_write_to_a_read_only_disk_is_tried_at_each_prepare(driver):
    tracker = driver.open()
    verdict = fails(tracker, OSError(errno.EROFS, "Read-only file system", "/var/run/cdi/gpu.json"))
    assert (verdict.error_class, verdict.code) == (ErrorClass.PERMANENT, "cdi.write")
    assert tracker.cached_failure(A) is None


def test_any_prepared_claim_ends_a_fault_of_the_driver(driver):
    tracker = driver.open()
    fails(tracker, DEAD)
    fails(tracker, PermanentError("damaged", code="state.checkpoint_corrupt"), claim("d", "gpu-2"))
    driver.clock.now += 1
    tracker.record_success(claim("c", "gpu-1"))
    assert {fault.code: bool(fault.expired_wall_s) for fault in driver.engine.faults} == {
        "state.checkpoint_corrupt": True,
        "fpga.dead": False,
    }


def test_outcomes_are_sorted_newest_first(driver):
    tracker = driver.open()
    tracker.record_success(A)
    driver.clock.now += 1
    fails(tracker, BadConfigError("no"), B)
    assert [outcome.claim for outcome in tracker.outcomes()] == [B.ref, A.ref]


# --- faults that the engine is about to find --------------------------------------------------------------


def classify_by_newer(tracker: PrepareFailureTracker, error: Exception, of: Claim = A) -> PrepareVerdict:
    return tracker.classify_by_newer_health(of, tracker.classify(of, error), error)


@pytest.mark.parametrize("error", [KeyError("bank"), TransientError("busy")])
def test_fault_found_after_the_failure_is_its_cause(driver, error):
    driver.engine.newer = {ref(): health(("gpu.xid.79", Severity.UNHEALTHY))}
    verdict = classify_by_newer(driver.open(), error)
    assert (verdict.error_class, verdict.code) == (ErrorClass.FAILED_DEVICE, "gpu.xid.79")


def test_failure_of_healthy_devices_keeps_its_class(driver):
    assert classify_by_newer(driver.open(), KeyError("bank")).code == "driver.bug.key_error"
    assert driver.engine.evaluated == [[ref()]]


@pytest.mark.parametrize("error", [BadConfigError("no"), PermanentError("no"), DEAD])
def test_failure_with_a_proven_cause_waits_for_no_evaluation(driver, error):
    classify_by_newer(driver.open(), error)
    assert driver.engine.evaluated == []


def test_claim_without_devices_waits_for_no_evaluation(driver):
    classify_by_newer(driver.open(), KeyError("bank"), Claim("team", "a", "uid-a"))
    assert driver.engine.evaluated == []


def test_stopped_engine_is_not_waited_for(driver):
    driver.engine.is_up = False
    classify_by_newer(driver.open(), KeyError("bank"))
    assert driver.engine.evaluated == []


def test_failed_unprepare_uses_the_newer_health(driver):
    driver.engine.newer = {ref(): health(("gpu.lost", Severity.UNHEALTHY))}
    tracker = driver.open()
    tracker.record_success(A)
    assert tracker.unprepare_failed(A.ref, KeyError("bank")) is None


# --- failures that other drivers of a pod name --------------------------------------------------------------


def test_recent_failures_are_the_last_results_only(driver):
    tracker = driver.open()
    for name in "abc":
        fails(tracker, BadConfigError("no"), claim(name))
    tracker.record_success(claim("b"))
    tracker.unprepared(claim("c").ref)
    tracker.record_success(claim("d"))
    tracker.unprepare_failed(claim("d").ref, RuntimeError("no"))
    known = ["uid-d", "uid-c", "uid-b", "uid-a", "uid-x"]
    assert [verdict.claim.name for verdict in tracker.recent_failures(known)] == ["a"]
    driver.clock.now += 901
    assert tracker.recent_failures(known) == []


def test_recorded_failures_have_no_limit_of_age(driver):
    tracker = driver.open()
    for name in "abc":
        fails(tracker, BadConfigError("no"), claim(name))
    tracker.record_success(claim("b"))
    tracker.unprepared(claim("c").ref)
    driver.clock.now += 901
    known = tracker.recorded_failures(["uid-c", "uid-b", "uid-x", "uid-a"])
    assert [verdict.claim.name for verdict in known] == ["c", "a"]


# --- known blockers, before a prepare --------------------------------------------------------------------


def test_claim_without_known_cause_has_no_blocker(driver):
    assert driver.open().known_blocker(A) is None
    assert not driver.directory.exists(), "a query is not recorded"


def test_cached_failure_is_a_blocker(driver):
    tracker = driver.open()
    verdict = fails(tracker, BadConfigError("no such mode"))
    assert tracker.known_blocker(A) == verdict
    assert tracker.known_blocker(B) is None


def test_transient_failure_is_no_blocker(driver):
    tracker = driver.open()
    fails(tracker, TransientError("busy"))
    assert tracker.known_blocker(A) is None


def test_unhealthy_device_is_a_blocker_recorded_as_failure(driver):
    driver.engine.known = {ref(): health(("gpu.xid.79", Severity.UNHEALTHY))}
    tracker = driver.open()
    verdict = tracker.known_blocker(A)
    assert verdict is not None
    assert (verdict.error_class, verdict.code, verdict.devices) == (
        ErrorClass.FAILED_DEVICE,
        "gpu.xid.79",
        (ref(),),
    )
    assert [outcome.verdict for outcome in tracker.outcomes()] == [verdict]
    assert tracker.known_blocker(A) == verdict, "the cached failure: no try is counted"
    assert driver.engine.faults == ()
    driver.engine.known = {ref(): health()}
    assert tracker.known_blocker(A) is None


def test_driver_reported_fault_blocks_no_other_claim(driver):
    tracker = driver.open()
    fails(tracker, DEAD)
    driver.engine.known = {ref(): health(("fpga.dead", Severity.UNHEALTHY), driver_reported=True)}
    assert tracker.known_blocker(B) is None


def test_engine_down_means_no_blocker(driver):
    driver.engine.known = {ref(): health(("gpu.xid.79", Severity.UNHEALTHY))}
    driver.engine.is_up = False
    assert driver.open().known_blocker(A) is None


def test_evidence_is_classified_like_an_exception(driver):
    tracker = driver.open()
    of_exception = tracker.classify(A, OSError(errno.ENOSPC, "No space left on device"))
    of_evidence = tracker.classify(A, [ErrnoEvidence(errno.ENOSPC, None, "", "No space left on device")])
    assert (of_exception.error_class, of_exception.code) == (of_evidence.error_class, of_evidence.code)


# --- driver-reported faults ----------------------------------------------------------------------------


def test_next_successful_prepare_clears_the_fault(driver):
    tracker = driver.open()
    fails(tracker, DEAD)
    driver.clock.now += 70
    tracker.record_success(B)
    assert [fault.expired_wall_s for fault in driver.engine.faults] == [NOW + 70]


def test_fault_expires_without_another_prepare(driver):
    tracker = driver.open()
    fails(tracker, DEAD)
    driver.clock.now += FAULT_LIMIT_S - 0.05
    tracker.record_success(claim("c", "gpu-1"))  # of another device: the tracker reads its clock again
    assert [fault.expired_wall_s for fault in driver.engine.faults] == [0]
    driver.clock.now += 0.05
    until(lambda: driver.engine.faults[0].expired_wall_s)
    assert [fault.expired_wall_s for fault in tracker.driver_faults()] == [NOW + FAULT_LIMIT_S]


@pytest.mark.parametrize("step_s", [-7200.0, -30.0, 7200.0])
def test_fault_of_this_run_expires_in_time_although_the_clock_was_set(driver, step_s):
    tracker = driver.open()
    fails(tracker, DEAD)
    driver.clock.step_s = step_s
    tracker.record_success(claim("c", "gpu-1"))
    driver.clock.now += FAULT_LIMIT_S - 0.05
    tracker.unprepared(claim("c", "gpu-1").ref)
    tracker.close(PATIENCE_S)  # written, and merged with the file
    assert [fault.expired_wall_s for fault in tracker.driver_faults()] == [0]
    driver.clock.now += 0.05
    assert [fault.expired_wall_s for fault in tracker.driver_faults()] == [driver.clock()]


@pytest.mark.parametrize("step_s", [-7200.0, 7200.0])
def test_failure_of_this_run_is_cached_in_time_although_the_clock_was_set(driver, step_s):
    tracker = driver.open()
    fails(tracker, BadConfigError("no such mode"))
    driver.clock.step_s = step_s
    assert tracker.cached_failure(A)
    driver.clock.now += NEGATIVE_CACHE_S[ErrorClass.BAD_CONFIG]
    assert tracker.cached_failure(A) is None


def test_success_after_the_clock_was_set_back_ends_the_cached_failure(driver):
    tracker = driver.open()
    fails(tracker, BadConfigError("no such mode"))
    assert tracker.cached_failure(A)
    driver.clock.step_s = -7200.0
    driver.clock.now += 1
    tracker.record_success(B)
    assert tracker.cached_failure(A) is None


def test_faults_survive_a_restart(driver):
    fails(driver.open(), DEAD)
    assert driver.open().driver_faults() == driver.engine.faults


def test_engine_after_restart_gets_saved_faults_and_their_expiry(driver):
    fails(driver.open(), DEAD)
    driver.clock.now += FAULT_LIMIT_S - 0.05
    engine = FakeEngine()
    driver.open(engine=engine)
    assert [(fault.code, fault.expired_wall_s) for fault in engine.faults] == [("fpga.dead", 0)]
    driver.clock.now += 0.05
    until(lambda: engine.faults[0].expired_wall_s)  # without another prepare


def no_answer(of: Claim) -> FailedDeviceError:
    return FailedDeviceError(of.devices[0].device, "no answer", code="fpga.dead")


def test_several_failures_are_all_reported_before_the_wait(driver):
    driver.engine.known = {ref(): health(), ref("gpu-1"): health(device="gpu-1")}
    tracker, other = driver.open(), claim("b", "gpu-1")
    verdict = [tracker.record_failure(of, tracker.classify(of, no_answer(of))) for of in (A, other)]
    tracker.wait_delivered(verdict)
    assert driver.engine.events == ["report", "report", "wait", "taint"]


def test_cleared_fault_is_no_evidence_while_the_engine_still_has_it(driver):
    @dataclass
    class Slow(FakeEngine):
        """Engine that has the fault, but not yet its end."""

        def report_faults(self, faults: Sequence[DriverFault]) -> None:
            super().report_faults([fault._replace(expired_wall_s=0) for fault in faults])

        def wait_delivered(self, faults: Sequence[DriverFault], timeout_s: float) -> bool:
            return True

    engine = Slow()
    tracker = driver.open(engine=engine)
    fails(tracker, DEAD)
    assert fails(tracker, TransientError("busy")).code == "fpga.dead"  # the device is Unhealthy
    driver.clock.now += 1
    tracker.record_success(A)
    assert fails(tracker, TransientError("busy")).error_class is ErrorClass.TRANSIENT
    fails(tracker, DEAD)
    assert [(fault.number, fault.expired_wall_s) for fault in tracker.driver_faults()] == [(2, 0)]


def test_two_instances_share_their_faults_and_outcomes(driver):
    old, new = driver.open(engine=FakeEngine()), driver.open()
    fails(old, DEAD)
    fails(new, BadConfigError("no"), B)
    assert [fault.code for fault in driver.engine.faults] == ["fpga.dead"]
    assert {outcome.claim.name for outcome in new.outcomes()} == {"a", "b"}


# --- an unprepare ------------------------------------------------------------------------------------------


def test_unprepare_of_a_device_reported_dead_succeeds(driver, caplog):
    tracker = driver.open()
    tracker.record_success(A)
    assert tracker.unprepare_failed(A.ref, DEAD) is None
    assert [fault.code for fault in driver.engine.faults] == ["fpga.dead"]
    assert "the claim is released, because a device is broken" in caplog.text
    kept = load_ledger(driver.directory, DRIVER)[0].claims[A.uid]
    assert (kept.outcome.verdict.code, kept.unprepared_wall_s) == ("fpga.dead", NOW)


def test_unprepare_of_an_unhealthy_device_succeeds_despite_any_error(driver):
    tracker = driver.open()
    tracker.record_success(A)
    driver.engine.known = {ref(): health(("gpu.lost", Severity.UNHEALTHY))}
    assert tracker.unprepare_failed(A.ref, ValueError("bug")) is None


def test_unprepare_of_healthy_devices_fails_with_a_recorded_verdict(driver):
    tracker = driver.open()
    tracker.record_success(A)
    verdict = tracker.unprepare_failed(A.ref, OSError(errno.EBUSY, "Device or resource busy"))
    assert verdict.error_class is ErrorClass.TRANSIENT
    assert driver.saved_verdicts() == {"a": verdict}
    assert tracker.cached_failure(A) is None


def test_unprepare_of_an_unknown_claim_is_classified_by_its_error(driver):
    verdict = driver.open().unprepare_failed(A.ref, RuntimeError("no"))
    assert verdict.error_class is ErrorClass.UNKNOWN


def test_unprepare_of_an_unknown_claim_finds_its_devices_in_the_checkpoint(driver, tmp_path):
    """The claim was prepared before the driver used drahealth, or its result did not reach the agent."""
    driver.claims_file = tmp_path / "dra_manager_state"
    given = {DRIVER: {"Devices": [kubelet_files.device(ref().device, pool=ref().pool)]}, "b.example.com": {}}
    prepared = kubelet_files.claim(A.uid, name=A.name, namespace=A.namespace, drivers=given)
    driver.claims_file.write_bytes(kubelet_files.checkpoint([prepared]))
    driver.engine.known = {ref(): health(("gpu.lost", Severity.UNHEALTHY))}
    tracker = driver.open()
    assert tracker.unprepare_failed(claim("b").ref, RuntimeError("no")), "the kubelet has no such claim"
    assert tracker.unprepare_failed(A.ref, RuntimeError("no")) is None
    driver.claims_file.unlink()
    assert tracker.unprepare_failed(claim("c").ref, RuntimeError("no"))


def test_devices_of_a_claim_survive_a_restart(driver):
    driver.open().record_success(A)
    assert driver.trackers[0].close(PATIENCE_S)
    driver.engine.known = {ref(): health(("gpu.lost", Severity.UNHEALTHY))}
    assert driver.open().unprepare_failed(A.ref, RuntimeError("no")) is None


# --- disks and engines that do not answer ------------------------------------------------------------------


def hang(directory: Path) -> BinaryIO:
    """Hold the lock of the ledger's temporary file, so that its writer waits until the result is closed."""
    directory.mkdir(exist_ok=True)
    return held_lock(directory / f"{LEDGER_FILE}.new")


def test_hung_disk_delays_only_the_first_failure(driver, caplog, monkeypatch):
    tracker = driver.open()
    monkeypatch.setattr("agent.driver.ledger_writer.MAX_DISK_WAIT_S", MAX_DISK_WAIT_S)
    hanging = hang(driver.directory)
    fails(tracker, DEAD)
    assert driver.engine.events == ["report", "wait", "taint"]  # the order goes on without the disk
    for number in range(5):
        fails(tracker, BadConfigError("no"), claim(str(number)))
    assert [record.levelno for record in caplog.records if "not written within" in record.message] == [
        logging.WARNING
    ]
    assert not tracker.close(0.05)
    hanging.close()
    assert tracker.close(PATIENCE_S)
    assert set(driver.saved_verdicts()) == {"a", "0", "1", "2", "3", "4"}


def test_write_error_is_logged_once(driver, caplog):
    driver.directory.write_text("a file")
    tracker = driver.open()
    caplog.clear()
    for number in range(5):
        assert fails(tracker, BadConfigError("no"), claim(str(number))).count == 1
    warnings = [
        record.message
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("agent.driver.")
    ]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{driver.directory / LEDGER_FILE}: ")
    assert warnings[0].endswith("; prepare results are kept in memory only and are lost on restart")
    assert tracker.close(PATIENCE_S), "the writer does not hang"
    assert tracker.cached_failure(claim("3"))


def test_close_saves_what_could_not_be_written_before(driver):
    driver.directory.write_text("a file")
    tracker = driver.open()
    fails(tracker, BadConfigError("no"))
    driver.directory.unlink()
    assert tracker.close(PATIENCE_S)
    assert set(driver.saved_verdicts()) == {"a"}


def test_device_named_by_an_index_leaves_the_file_readable(driver):
    tracker = driver.open()
    index = DeviceRef(DRIVER, "node-1", 3)
    tracker.record_success(replace(B, devices=(ClaimDevice("r", *index),)))
    fails(tracker, FailedDeviceError(index, "no answer", code="gpu.dead"))
    assert tracker.close(PATIENCE_S)
    assert set(driver.saved_verdicts()) == {"a", "b"}
    assert [fault.device for fault in driver.open().driver_faults()] == [DeviceRef(DRIVER, "node-1", "3")]


def test_corrupt_file_is_set_aside_and_logged(driver, caplog):
    driver.directory.mkdir()
    (driver.directory / LEDGER_FILE).write_bytes(b"{")
    assert driver.open().outcomes() == ()
    assert "renamed to prepares.json.corrupt-1" in caplog.text


def test_without_directory_nothing_is_saved_which_is_logged_once(caplog):
    caplog.set_level(logging.INFO)
    driver = DriverRuns(None)
    tracker = driver.open()
    before = ledger_threads()
    fails(tracker, BadConfigError("no"))
    assert tracker.cached_failure(A)
    assert ledger_threads() <= before
    assert tracker.close(0)
    verdict = [record for record in caplog.records if "are lost on restart" in record.message]
    assert [record.levelno for record in verdict] == [logging.INFO]


def test_engine_down_is_not_waited_for(driver):
    driver.engine.is_up = False
    fails(driver.open(), DEAD)
    assert driver.engine.events == ["report"]


def test_engine_down_disables_the_cache_of_failed_devices(driver):
    driver.engine.known = {ref(): health(("gpu.xid.79", Severity.UNHEALTHY))}
    tracker = driver.open()
    fails(tracker, RuntimeError("no"))
    assert tracker.cached_failure(A)
    driver.engine.is_up = False
    assert tracker.cached_failure(A) is None
    assert tracker.classify(A, RuntimeError("no")).error_class is ErrorClass.UNKNOWN
    assert tracker.unprepare_failed(A.ref, RuntimeError("no"))


def test_engine_cause_counts_after_the_driver_cleared_the_same_code(driver):
    tracker = driver.open()
    fails(tracker, DEAD)
    tracker.record_success(A)
    driver.engine.known = {ref(): health(("fpga.dead", Severity.UNHEALTHY))}
    assert tracker.classify(A, RuntimeError("no")).code == "fpga.dead"


def test_undelivered_health_is_logged(driver, caplog):
    driver.engine.delivers = False
    assert fails(driver.open(), DEAD).code == "fpga.dead"
    assert f"device {ref()}: fault not delivered to all health streams within" in caplog.text


def test_taint_of_a_device_that_the_engine_blames_is_waited_for(driver):
    driver.engine.known = {ref(): health(("gpu.xid.79", Severity.UNHEALTHY))}
    fails(driver.open(), RuntimeError("no"))
    assert driver.engine.events == ["taint"]


@pytest.mark.parametrize("error", [BadConfigError("no"), TransientError("busy"), RuntimeError("no")])
def test_failure_without_a_broken_device_waits_for_no_taint(driver, error):
    fails(driver.open(), error)
    assert "taint" not in driver.engine.events


def test_unpublished_taint_is_logged(driver, caplog):
    driver.engine.publishes = False
    assert fails(driver.open(), DEAD).code == "fpga.dead"
    assert f"device {ref()}: taint not published within 2 s; the prepare returns" in caplog.text


def test_closed_tracker_still_saves_changes(driver):
    tracker = driver.open()
    assert tracker.close(PATIENCE_S)
    fails(tracker, BadConfigError("no"))
    assert set(driver.saved_verdicts()) == {"a"}


def test_traceback_of_an_unknown_failure_is_logged_once(driver, caplog):
    tracker, of = driver.open(), claim("a")
    for _ in range(2):
        try:
            {}["bank"]
        except KeyError as error:
            tracker.record_failure_and_wait(of, tracker.classify(of, error), error)
    (record,) = [
        found_record
        for found_record in caplog.records
        if found_record.levelname == "WARNING" and found_record.name.startswith("agent.driver.")
    ]
    assert "code=driver.bug.key_error" in record.getMessage()
    assert record.exc_info[0] is KeyError
