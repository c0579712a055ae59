"""Drivers that fail a check also disturb the tests' kubelet."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import grpc
import pytest
from kubelet import FakeKubelet, Pace
from kubelet.history import Changed, Cleared, HealthChanged, RegistrationFailed, StreamEnded
from kubelet_real.implementations import NewKubelet, implementations

from conform.faults import FAULTS
from conform.health_faults import AdvertisesUnservedHealth, EndsStreams, SendsOneList
from conform.list_faults import (
    ContradictoryDuplicate,
    LeaseOfThreeCenturies,
    ListOverTheLimit,
    TextInLatin1,
    TextWithATemperature,
)
from conform.registration_faults import GetInfoTooLate, RegistersTwice
from conform.running import REPETITIONS, ConformRun, Runs, concurrent_runs, conform_driver, repeated_run
from conform.servers import Driver

pytestmark = pytest.mark.timeout(1800)  # a repeated run waits for the others
POOL: Final = "node-a"
PACE: Final = replace(Pace.fast(), get_info_s=Pace().get_info_s)
"""Pace with the real deadline of GetInfo, which one of the drivers misses."""

Trouble = Callable[[FakeKubelet], bool]
Implementation = tuple[str, Callable[[str], NewKubelet]]


def expect_stream_end(*codes: grpc.StatusCode) -> Trouble:
    """Return a condition: a stream ended with such a status, and the kubelet forgot its devices."""

    def has_ended(kubelet: FakeKubelet) -> bool:
        ends = [entry.code for entry in kubelet.history.of(StreamEnded)]
        return any(code in ends for code in codes) and bool(kubelet.history.of(Cleared))

    return has_ended


def writes_at_every_list(kubelet: FakeKubelet) -> bool:
    """Return whether the kubelet wrote its file and searched pods at every list, without any change."""
    return len(kubelet.history.of(HealthChanged)) >= 4


def reported_and_expired(kubelet: FakeKubelet) -> bool:
    """Return whether a device was reported and then expired."""
    reported = bool(kubelet.history.of(Changed))
    return reported and kubelet.health(Driver.name, POOL, "gpu-0").health == "Unknown"


def not_registered(kubelet: FakeKubelet) -> bool:
    """Return whether a registration has failed."""
    return bool(kubelet.history.of(RegistrationFailed))


TROUBLE: Final[Mapping[type[Driver], Trouble]] = {
    TextInLatin1: expect_stream_end(grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN),
    ListOverTheLimit: expect_stream_end(grpc.StatusCode.RESOURCE_EXHAUSTED),
    EndsStreams: expect_stream_end(grpc.StatusCode.OK),
    AdvertisesUnservedHealth: expect_stream_end(grpc.StatusCode.UNIMPLEMENTED),
    SendsOneList: reported_and_expired,
    LeaseOfThreeCenturies: reported_and_expired,
    ContradictoryDuplicate: writes_at_every_list,
    TextWithATemperature: writes_at_every_list,
    GetInfoTooLate: not_registered,
    RegistersTwice: not_registered,
}


def _run_with_kubelet(faulty: type[Driver], trouble: Trouble) -> ConformRun:
    with (
        tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory,
        faulty(Path(directory)) as driver,
        FakeKubelet(Path(directory), version="1.37", pace=PACE) as kubelet,
    ):
        fault = FAULTS[faulty.__name__]
        run = repeated_run(
            partial(conform_driver, driver, for_s=fault.for_s), lambda run: run.results[fault.code] == "fail"
        )
        kubelet.wait_for(lambda: trouble(kubelet), f"trouble with {faulty.__name__}")
        return run


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    work = {
        faulty.__name__: partial(_run_with_kubelet, faulty, trouble) for faulty, trouble in TROUBLE.items()
    }
    with concurrent_runs(request, work) as started:
        yield started


@pytest.mark.parametrize("name", [faulty.__name__ for faulty in TROUBLE])
def test_driver_that_fails_also_disturbs_a_kubelet(runs: Runs, name: str) -> None:
    assert runs[name].result().results[FAULTS[name].code] == "fail"


REAL: Final = implementations("1.36", "1.37")[2:]


@pytest.mark.parametrize("implementation", REAL)
@pytest.mark.parametrize("faulty", TROUBLE, ids=lambda faulty: faulty.__name__)
def test_driver_that_fails_also_disturbs_a_real_kubelet(
    faulty: type[Driver], implementation: Implementation
) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory,
        faulty(Path(directory)),
        _kubelet(Path(directory), implementation) as kubelet,
    ):
        kubelet.wait_for(lambda: TROUBLE[faulty](kubelet), f"trouble with {faulty.__name__}")


@pytest.mark.parametrize("implementation", implementations("1.36", "1.37"))
def test_good_driver_does_not_disturb_a_kubelet(implementation: Implementation) -> None:
    for _ in range(REPETITIONS):  # the kubelet waits a second for GetInfo, a busy machine longer
        found = _troubles_of_a_good_driver(implementation)
        if not found:
            break
    assert found == []


def _troubles_of_a_good_driver(implementation: Implementation) -> list[str]:
    """Return the drivers of whose troubles the kubelet has one after four lists of a good driver."""
    with (
        tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory,
        Driver(Path(directory)) as driver,
        _kubelet(Path(directory), implementation) as kubelet,
    ):
        received_ns: set[int] = set()

        def has_four_lists() -> bool:
            device = kubelet.health(driver.name, POOL, "gpu-0")
            received_ns.update([device.updated_ns] if device.health == "Healthy" else [])
            return len(received_ns) >= 4

        kubelet.wait_for(has_four_lists, "four lists")
        return [faulty.__name__ for faulty, trouble in TROUBLE.items() if trouble(kubelet)]


def _kubelet(root: Path, implementation: Implementation) -> FakeKubelet:
    version, new = implementation
    return new(version)(root, version=version, pace=Pace.fast())
