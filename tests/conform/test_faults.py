"""Faults of drivers get their code and no other; a good driver passes all checks."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from agents import short_tmp

from agent.conform.check_table import run_checks
from agent.conform.kubelet import grpc_clients
from agent.conform.kubelet.session import SessionOptions, run_session
from conform import health_faults, kubelets_faults, list_faults, prepare_faults, registration_faults
from conform.faults import FAULTS, Fault
from conform.lists import ListedDevice
from conform.preparing import CLAIMS, DEVICE, MADE, RESTART, PreparingDriver
from conform.running import (
    TIMED,
    ConformRun,
    Runs,
    checked_run,
    concurrent_runs,
    conform,
    conform_driver,
    exit_code,
    repeated_run,
)
from conform.servers import Driver, Stream

__all__ = ["short_tmp"]

pytestmark = pytest.mark.timeout(1800)  # a repeated run waits for the others
THEMES: Final = (
    health_faults,
    list_faults,
    kubelets_faults,
    registration_faults,
    prepare_faults,
)  # importing them fills the table
GOOD: Final = {
    "good": Fault(Driver, {}, ("--refuse",), for_s=5),
    "good, with claims": Fault(PreparingDriver, {}, CLAIMS, for_s=5),
    "good, with all that can happen": Fault(
        PreparingDriver, {}, ("--refuse", *CLAIMS, *RESTART, "--remove-cdi", *DEVICE, *MADE), for_s=5
    ),
}


def _run(fault: Fault) -> ConformRun:
    with (
        tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory,
        fault.driver(Path(directory)) as driver,
    ):
        return conform_driver(driver, *fault.flags, for_s=fault.for_s)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """Start a run for each fault, and for the good drivers."""
    faults = {**GOOD, **FAULTS}
    with concurrent_runs(request, {name: partial(_run, fault) for name, fault in faults.items()}) as started:
        yield started


@pytest.mark.parametrize("name", GOOD)
def test_good_driver_passes_all_checks(runs: Runs, name: str) -> None:
    run = checked_run(runs, name, partial(_run, GOOD[name]), {})
    assert run.matches({}), run.not_passed
    assert {code for code, result in run.results.items() if result == "not run"} <= TIMED
    assert run.errors == ""
    assert run.code == exit_code(run)


@pytest.mark.parametrize("name", FAULTS)
def test_faulty_driver_fails_only_the_expected_checks(runs: Runs, name: str) -> None:
    expected = FAULTS[name].not_passed
    run = checked_run(runs, name, partial(_run, FAULTS[name]), expected)
    assert run.matches(expected), run.not_passed
    for code in expected:
        result = run.result(code)
        assert all(result[key] for key in ("saw", "why", "advice")), result
    assert run.code == exit_code(run)
    assert run.errors == ""


class _SendsEveryMinute(Driver):
    heartbeat_s = 60.0

    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        return [ListedDevice(lease_s=0)]


def test_check_without_enough_time_is_not_run() -> None:
    run = repeated_run(
        partial(_run, Fault(_SendsEveryMinute, {}, (), for_s=2)), lambda run: not run.not_passed
    )
    assert run.matches({}), run.not_passed
    assert run.code == exit_code(run)
    assert run.results["health.heartbeat"] == "not run"
    assert "--for" in run.observation("health.heartbeat"), "recommends a duration"
    assert run.results["registration.refused"] == "skipped"
    skipped = {code for code, result in run.results.items() if result == "skipped"}
    assert {code.partition(".")[0] for code in skipped} == {"registration", "prepare", "unprepare"}


def test_duration_is_the_recorded_time_if_all_streams_end_early() -> None:
    fault = FAULTS["ServesNoHealth"]
    run = _run(fault._replace(for_s=30))
    assert run.document["requestedSeconds"] == 30
    assert run.document["listenedSeconds"] < 30


class _CountsRegistrations(Driver):
    registrations = 0

    def notify(self, status: bytes) -> None:
        type(self).registrations += 1


def _verdicts(driver: Driver, on_begin: Callable[[str], None] = lambda socket: None) -> dict[str, str]:
    """Run a session of 2 s in this process; return the verdicts by code."""
    options = SessionOptions(
        socket="",
        plugin_dir=str(driver.registry),
        driver="",
        kubelet_dir=str(driver.root),
        window_s=2,
        refuse=False,
        notify=True,
    )
    record = asyncio.run(run_session(options, on_begin))
    return {result.check.code: result.verdict for result in run_checks(record)}


def test_stale_list_after_a_late_start_of_the_streams_fails(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claims are created for a minute before the streams are opened."""
    now_s = [1_760_000_000.0]

    class StaleDriver(Driver):
        def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
            return [ListedDevice(lease_s=8, at_s=int(now_s[0]) - 11)]

    monkeypatch.setattr(time, "time", lambda: now_s[0])
    with StaleDriver(short_tmp) as driver:
        results = repeated_run(
            lambda: _verdicts(driver, lambda socket: now_s.__setitem__(0, now_s[0] + 60)),
            lambda results: results["health.time.fresh"] != "not run",  # no list came in time
        )
    assert (results["health.time"], results["health.time.fresh"]) == ("pass", "fail")


def test_limit_of_recorded_devices_does_not_fail_the_driver(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = ("health.rate", "health.ends", "health.two_kubelets", "health.stopped_reader")

    def stopped_verdicts() -> set[str]:
        results = _verdicts(driver)
        return {results[code] for code in stopped}

    monkeypatch.setattr(grpc_clients, "DEVICES_LIMIT", 4)
    with Driver(short_tmp) as driver:
        # "not run" once each stream has two lists
        found = repeated_run(stopped_verdicts, lambda found: found == {"not run"})
    assert found == {"not run"}


def test_no_notify_does_not_register_the_driver() -> None:
    run = repeated_run(
        partial(_run, Fault(_CountsRegistrations, {}, ("--no-notify",), for_s=2)),
        lambda run: run.results["registration.again"] == "pass",
    )
    assert _CountsRegistrations.registrations == 0
    assert run.results["registration.notify"] == "skipped"
    assert run.results["registration.again"] == "pass"
    repeated_run(
        partial(_run, Fault(_CountsRegistrations, {}, (), for_s=2)),
        lambda _: _CountsRegistrations.registrations > 0,  # not if GetInfo was answered too late
    )
    assert _CountsRegistrations.registrations == 1


def test_every_check_has_a_driver_that_does_not_pass() -> None:
    codes = {check["code"] for check in conform("--checks").document["checks"]}
    assert codes == {fault.code for fault in FAULTS.values()}
