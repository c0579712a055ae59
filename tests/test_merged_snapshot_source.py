"""Driver source: the host's snapshot with the reports of drivers."""

import os
import select
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from agent.driver.merged_snapshot_source import HostAndDriverSource, UnmonitoredHostSource
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.cleared_faults import ClearRequest, Operator
from agent.model.declared_devices import (
    Declarations,
    DeclaredFile,
    DeclaredOtherDevice,
    DriverCheckSample,
    DriverDevice,
)
from agent.model.health import Finding, Severity
from agent.model.prepare import DriverFault
from agent.model.snapshot import Snapshot

DRIVER = "demo.example.com"
BAD = Finding("demo.bad", Severity.UNHEALTHY, "1 of 2")


def declared_device(name: str) -> DriverDevice:
    return DriverDevice(DRIVER, "node-a", name, DeclaredOtherDevice(), 0)


def sample(name: str, **changes: object) -> DriverCheckSample:
    blank = DriverCheckSample("link", declared_device(name).subject, None, "", 0, 1, 10**9, 3, 3)
    return blank._replace(**changes)  # type: ignore[arg-type]


def fault(name: str) -> DriverFault:
    claim = ClaimRef("default", "c", "u-1")
    return DriverFault(
        1, DeviceRef(DRIVER, "node-a", name), "demo.dead", "it does not answer", "", 1.0, claim
    )


class Host(UnmonitoredHostSource):
    """Host source with a snapshot that a test sets."""

    snapshot: Snapshot | None = None

    def __init__(self) -> None:
        super().__init__()
        self.declared: list[Declarations] = []

    def read(self) -> Snapshot | None:  # type: ignore[override]
        return self.snapshot


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    made.snapshot = replace(UnmonitoredHostSource.read(made), seq=7)
    yield made
    made.close()


@pytest.fixture
def source(host: Host) -> HostAndDriverSource:
    made = HostAndDriverSource(DRIVER)
    made.open(host, host.declared.append)
    made.clear()
    return made


def is_awake(source: HostAndDriverSource) -> bool:
    return bool(select.select([source.fileno()], [], [], 0)[0])


def test_driver_reports_are_part_of_the_host_snapshot(source: HostAndDriverSource) -> None:
    source.declare([declared_device("d-0")], [sample("d-0")])
    source.set_driver_faults(DRIVER, [fault("d-0")])
    found = source.read()
    assert found is not None
    assert found.seq == 7
    assert found.declared == (DeclaredFile(DRIVER, (declared_device("d-0"),)),)
    assert found.checks == (sample("d-0"),)
    assert found.driver_faults == (fault("d-0"),)


def test_read_returns_none_before_the_first_host_snapshot(source: HostAndDriverSource, host: Host) -> None:
    source.declare([declared_device("d-0")])
    host.snapshot = None
    assert source.read() is None


def test_empty_source_has_no_sources_and_devices() -> None:
    empty = UnmonitoredHostSource()
    found = empty.read()
    assert (found.sources, found.nodes, found.pools, found.gpus) == ((), (), (), None)
    empty.close()


@pytest.mark.parametrize(
    "report",
    [
        lambda source: source.declare([declared_device("d-1")]),
        lambda source: source.set_driver_faults(DRIVER, [fault("d-0")]),
        lambda source: source.update_check_sample(sample("d-0", finding=BAD, passes=1), wake=True),
    ],
)
def test_every_driver_report_wakes_the_core(source: HostAndDriverSource, report: object) -> None:
    source.declare([declared_device("d-0")], [sample("d-0")])
    source.clear()
    assert not is_awake(source)
    report(source)  # type: ignore[operator]
    assert is_awake(source)


def test_only_reports_whose_sender_waits_are_urgent_until_read(source: HostAndDriverSource) -> None:
    source.declare([declared_device("a")], [sample("a")])
    source.update_check_sample(sample("a", passes=1), wake=True)
    assert not source.is_urgent
    for report in (
        lambda: source.set_driver_faults(DRIVER, [fault("a")]),
        lambda: source.set_clear_requests([ClearRequest(1, "a", "", Operator(0, 1))]),
        source.request_evaluation,
    ):
        report()
        assert source.is_urgent
        source.read()
        assert not source.is_urgent


def test_sample_without_wake_is_read_later(source: HostAndDriverSource) -> None:
    source.declare([declared_device("d-0")], [sample("d-0")])
    source.clear()
    source.update_check_sample(sample("d-0", passes=2), wake=False)
    assert not is_awake(source)
    found = source.read()
    assert found is not None
    assert found.checks == (sample("d-0", passes=2),)


def test_sample_of_an_ended_check_is_ignored(source: HostAndDriverSource) -> None:
    source.declare([declared_device("d-0")], [sample("d-0")])
    source.declare([], removed_checks=[(declared_device("d-0").subject, "link")])
    source.clear()
    source.update_check_sample(sample("d-0", finding=BAD), wake=True)
    found = source.read()
    assert found is not None
    assert found.checks == ()
    assert not is_awake(source)


def test_replaced_device_starts_with_a_new_sample(source: HostAndDriverSource) -> None:
    source.declare([declared_device("d-0")], [sample("d-0")])
    source.update_check_sample(sample("d-0", finding=BAD, passes=3), wake=True)
    source.declare(
        [declared_device("d-0")],
        new_checks=[sample("d-0")],
        removed_checks=[(declared_device("d-0").subject, "link")],
    )
    found = source.read()
    assert found is not None
    assert found.checks == (sample("d-0"),)


def test_report_before_open_is_read_after_it(host: Host) -> None:
    source = HostAndDriverSource(DRIVER)
    source.declare([declared_device("d-0")])
    source.set_driver_faults(DRIVER, [fault("d-0")])
    source.open(host, host.declared.append)
    found = source.read()
    assert found is not None
    assert (found.driver_faults, len(found.declared[0].devices)) == ((fault("d-0"),), 1)


def test_host_gets_the_declared_devices(source: HostAndDriverSource, host: Host) -> None:
    source.declare([declared_device("d-0")])
    assert [len(files[0].devices) for files in host.declared] == [0, 1]


def test_report_after_close_writes_to_no_descriptor(source: HostAndDriverSource) -> None:
    source.close()
    reading, writing = os.pipe()  # may reuse the number of the host's descriptor
    source.set_driver_faults(DRIVER, [fault("d-0")])
    source.declare([declared_device("d-0")])
    assert not select.select([reading], [], [], 0)[0]
    os.close(reading)
    os.close(writing)
    with pytest.raises(RuntimeError, match="not open"):
        source.read()


def test_reports_of_many_threads_are_all_read(source: HostAndDriverSource) -> None:
    names = [f"d-{number}" for number in range(8)]
    source.declare(map(declared_device, names), map(sample, names))

    def add_samples(name: str) -> None:
        for passes in range(1, 201):
            source.update_check_sample(sample(name, passes=passes), wake=True)

    threads = [threading.Thread(target=add_samples, args=[name]) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = source.read()
    assert found is not None
    assert [check.passes for check in found.checks] == [200] * 8
    assert is_awake(source)
