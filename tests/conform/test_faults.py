"""Each fault is called by its code, and nothing else is blamed for it. A good driver passes everything."""

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from conform import health_faults, kubelets_faults, list_faults, registration_faults
from conform.faults import FAULTS, Fault
from conform.lists import Told
from conform.running import TIMED, Runs, Said, at_once, conform, conform_driver, seen
from conform.servers import Driver, Stream

THEMES: Final = (
    health_faults,
    list_faults,
    kubelets_faults,
    registration_faults,
)  # importing them fills the table
GOOD: Final = Fault(Driver, {}, ("--refuse",), for_s=5)


def _run(fault: Fault) -> Said:
    with (
        tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory,
        fault.driver(Path(directory)) as driver,
    ):
        return conform_driver(driver, *fault.flags, for_s=fault.for_s)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """One for each fault, and for none."""
    faults = {"good": GOOD, **FAULTS}
    with at_once(request, {name: partial(_run, fault) for name, fault in faults.items()}) as begun:
        yield begun


@pytest.mark.parametrize("name", ["good"])
def test_a_good_driver_passes_everything(runs: Runs, name: str) -> None:
    said = seen(runs, name, partial(_run, GOOD), {})
    assert said.says({}), said.blamed
    assert {code for code, result in said.results.items() if result == "not run"} <= TIMED
    assert said.errors == ""
    assert said.code == exit_code(said)


def exit_code(said: Said) -> int:
    """By the worst of its results."""
    return 2 if "fail" in said.blamed.values() else 1 if said.blamed else 0


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_called_by_its_code_and_nothing_else_is_blamed(runs: Runs, name: str) -> None:
    due = FAULTS[name].blamed
    said = seen(runs, name, partial(_run, FAULTS[name]), due)
    assert said.says(due), said.blamed
    for code in due:
        found = said.result(code)
        assert all(found[word] for word in ("saw", "why", "advice")), found
    assert said.code == exit_code(said)
    assert said.errors == ""


class _SpeaksEveryMinute(Driver):
    heartbeat_s = 60.0

    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        return [Told(lease_s=0)]


def test_what_there_was_no_time_to_see_is_neither_passed_nor_blamed() -> None:
    said = _run(Fault(_SpeaksEveryMinute, {}, (), for_s=2))
    assert (said.code, said.blamed) == (0, {})
    assert said.results["health.heartbeat"] == "not run"
    assert "--for" in said.saw("health.heartbeat"), "how long it would take"
    assert said.results["registration.refused"] == "not run"


def test_every_check_has_a_driver_that_does_not_pass_it() -> None:
    codes = {check["code"] for check in conform("--checks").document["checks"]}
    assert codes == {fault.code for fault in FAULTS.values()}
