"""What the core reads inside a driver: the host's snapshot and what the driver says, in one piece."""

import os
import select
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from agent.embed.source import BareSource, DriverSource
from agent.model.check import CheckSample
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.declared import Declarations, Declared, DeclaredFile, DeclaredOther
from agent.model.health import Finding, Severity
from agent.model.prepare import DriverFault
from agent.model.snapshot import Snapshot

DRIVER = "demo.example.com"
BAD = Finding("demo.bad", Severity.UNHEALTHY, "1 of 2")


def declared(name: str) -> Declared:
    return Declared(DRIVER, "node-a", name, DeclaredOther(), 0)


def sample(name: str, **changes: object) -> CheckSample:
    blank = CheckSample("link", declared(name).subject, None, "", 0, 1, 10**9, 3, 3)
    return blank._replace(**changes)  # type: ignore[arg-type]


def fault(name: str) -> DriverFault:
    claim = ClaimRef("default", "c", "u-1")
    return DriverFault(
        1, DeviceRef(DRIVER, "node-a", name), "demo.dead", "it does not answer", "", 1.0, claim
    )


class Host(BareSource):
    """A host that has something to be read, once it has looked."""

    snapshot: Snapshot | None = None

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Declarations] = []

    def read(self) -> Snapshot | None:  # type: ignore[override]
        return self.snapshot


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    made.snapshot = replace(BareSource.read(made), seq=7)
    yield made
    made.close()


@pytest.fixture
def source(host: Host) -> DriverSource:
    made = DriverSource(DRIVER)
    made.open(host, host.told.append)
    made.clear()
    return made


def is_awake(source: DriverSource) -> bool:
    return bool(select.select([source.fileno()], [], [], 0)[0])


def test_the_drivers_words_come_with_the_hosts_snapshot(source: DriverSource) -> None:
    source.declare([declared("d-0")], [sample("d-0")])
    source.tell([fault("d-0")])
    found = source.read()
    assert found is not None
    assert found.seq == 7
    assert found.declared == (DeclaredFile(DRIVER, (declared("d-0"),)),)
    assert found.checks == (sample("d-0"),)
    assert found.told == (fault("d-0"),)


def test_as_long_as_the_host_has_nothing_there_is_nothing(source: DriverSource, host: Host) -> None:
    source.declare([declared("d-0")])
    host.snapshot = None
    assert source.read() is None


def test_a_host_that_nobody_looks_at_has_no_sources_and_no_devices() -> None:
    bare = BareSource()
    found = bare.read()
    assert (found.sources, found.nodes, found.pools, found.gpus) == ((), (), (), None)
    bare.close()


@pytest.mark.parametrize(
    "say",
    [
        lambda source: source.declare([declared("d-1")]),
        lambda source: source.tell([fault("d-0")]),
        lambda source: source.note(sample("d-0", finding=BAD, passes=1), wake=True),
    ],
)
def test_whatever_the_driver_says_wakes_the_core(source: DriverSource, say: object) -> None:
    source.declare([declared("d-0")], [sample("d-0")])
    source.clear()
    assert not is_awake(source)
    say(source)  # type: ignore[operator]
    assert is_awake(source)


def test_a_look_that_only_counts_wakes_nobody_and_is_read_all_the_same(source: DriverSource) -> None:
    source.declare([declared("d-0")], [sample("d-0")])
    source.clear()
    source.note(sample("d-0", passes=2), wake=False)
    assert not is_awake(source)
    found = source.read()
    assert found is not None
    assert found.checks == (sample("d-0", passes=2),)


def test_a_check_that_has_ended_says_nothing_any_more(source: DriverSource) -> None:
    source.declare([declared("d-0")], [sample("d-0")])
    source.declare([], ended=[(declared("d-0").subject, "link")])
    source.clear()
    source.note(sample("d-0", finding=BAD), wake=True)
    found = source.read()
    assert found is not None
    assert found.checks == ()
    assert not is_awake(source)


def test_a_device_in_the_place_of_another_begins_anew(source: DriverSource) -> None:
    source.declare([declared("d-0")], [sample("d-0")])
    source.note(sample("d-0", finding=BAD, passes=3), wake=True)
    source.declare([declared("d-0")], begun=[sample("d-0")], ended=[(declared("d-0").subject, "link")])
    found = source.read()
    assert found is not None
    assert found.checks == (sample("d-0"),)


def test_what_is_said_before_the_start_is_read_after_it(host: Host) -> None:
    source = DriverSource(DRIVER)
    source.declare([declared("d-0")])
    source.tell([fault("d-0")])
    source.open(host, host.told.append)
    found = source.read()
    assert found is not None
    assert (found.told, len(found.declared[0].devices)) == ((fault("d-0"),), 1)


def test_the_host_learns_what_to_look_for(source: DriverSource, host: Host) -> None:
    source.declare([declared("d-0")])
    assert [len(said[0].devices) for said in host.told] == [0, 1]


def test_who_speaks_after_the_end_writes_to_nobodys_descriptor(source: DriverSource) -> None:
    source.close()
    reading, writing = os.pipe()  # what may have taken the number of the host's
    source.tell([fault("d-0")])
    source.declare([declared("d-0")])
    assert not select.select([reading], [], [], 0)[0]
    os.close(reading)
    os.close(writing)
    with pytest.raises(RuntimeError, match="not open"):
        source.read()


def test_words_of_many_threads_are_all_heard(source: DriverSource) -> None:
    names = [f"d-{number}" for number in range(8)]
    source.declare(map(declared, names), map(sample, names))

    def look(name: str) -> None:
        for passes in range(1, 201):
            source.note(sample(name, passes=passes), wake=True)

    threads = [threading.Thread(target=look, args=[name]) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = source.read()
    assert found is not None
    assert [one.passes for one in found.checks] == [200] * 8
    assert is_awake(source)
