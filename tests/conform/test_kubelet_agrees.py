"""What conform fails a driver for is trouble at the tests' kubelet, too: both look at the same one."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import grpc
import pytest
from kubelet import FakeKubelet, Pace
from kubelet.history import Changed, Cleared, Message, RegistrationFailed, StreamEnded

from conform.faults import FAULTS
from conform.health_faults import PromisesHealth, SaysGoodbye, SaysItOnce
from conform.list_faults import (
    LeaseOfThreeCenturies,
    ListOverTheLimit,
    TextInLatin1,
    TextWithATemperature,
    ToldTwiceInContradiction,
)
from conform.registration_faults import IntroducesItselfLate, RegistersTwice
from conform.running import Runs, Said, at_once, conform_driver
from conform.servers import Driver

POOL: Final = "node-a"

Trouble = Callable[[FakeKubelet], bool]


def ended(*codes: grpc.StatusCode) -> Trouble:
    """A stream has ended so, and all that was known with it."""

    def claim(kubelet: FakeKubelet) -> bool:
        ends = [entry.code for entry in kubelet.history.of(StreamEnded)]
        return any(code in ends for code in codes) and bool(kubelet.history.of(Cleared))

    return claim


def restless(kubelet: FakeKubelet) -> bool:
    """With every list its file is written, and pods would be told, though nothing happens."""
    return len(kubelet.history.of(Message)) >= 4 and kubelet.cache.saves >= 4


def heard_and_forgotten(kubelet: FakeKubelet) -> bool:
    """What was heard is not believed any more."""
    heard = bool(kubelet.history.of(Changed))
    return heard and kubelet.health(Driver.name, POOL, "gpu-0").health == "Unknown"


def not_registered(kubelet: FakeKubelet) -> bool:
    """A registration has failed."""
    return bool(kubelet.history.of(RegistrationFailed))


TROUBLE: Final[Mapping[type[Driver], Trouble]] = {
    TextInLatin1: ended(grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN),
    ListOverTheLimit: ended(grpc.StatusCode.RESOURCE_EXHAUSTED),
    SaysGoodbye: ended(grpc.StatusCode.OK),
    PromisesHealth: ended(grpc.StatusCode.UNIMPLEMENTED),
    SaysItOnce: heard_and_forgotten,
    LeaseOfThreeCenturies: heard_and_forgotten,
    ToldTwiceInContradiction: restless,
    TextWithATemperature: restless,
    IntroducesItselfLate: not_registered,
    RegistersTwice: not_registered,
}


def _both(bad: type[Driver], trouble: Trouble) -> Said:
    with (
        tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory,
        bad(Path(directory)) as driver,
        FakeKubelet(Path(directory), version="1.37", pace=Pace.fast()) as kubelet,
    ):
        said = conform_driver(driver, for_s=FAULTS[bad.__name__].for_s)
        kubelet.wait_for(lambda: trouble(kubelet), f"trouble with {bad.__name__}")
        return said


@pytest.fixture(scope="module")
def looks(request: pytest.FixtureRequest) -> Iterator[Runs]:
    work = {bad.__name__: partial(_both, bad, trouble) for bad, trouble in TROUBLE.items()}
    with at_once(request, work) as begun:
        yield begun


@pytest.mark.parametrize("name", [bad.__name__ for bad in TROUBLE])
def test_what_is_failed_is_trouble_at_a_kubelet(looks: Runs, name: str) -> None:
    assert looks[name].result().results[FAULTS[name].code] == "fail"


def test_a_good_driver_is_no_trouble() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory,
        Driver(Path(directory)) as driver,
        FakeKubelet(Path(directory), version="1.37", pace=Pace.fast()) as kubelet,
    ):
        kubelet.wait_for(lambda: len(kubelet.history.of(Message)) >= 4, "four lists")
        assert kubelet.health(driver.name, POOL, "gpu-0").health == "Healthy"
        assert not any(trouble(kubelet) for trouble in TROUBLE.values())
