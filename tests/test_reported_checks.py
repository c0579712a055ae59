"""Results of checks that drivers report over their sockets: their leases, and their way to the engine."""

import select
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from paper import PaperNode, codes, device_of
from paper_gpus import GpuNode

from agent.driver.check_results import RESULTS_MAX, ReportedChecks
from agent.driver.merged_snapshot_source import HostAndDriverSource, UnmonitoredHostSource
from agent.driver.session import declaration_text, write_declaration
from agent.engine.step import initial_state, step
from agent.errors import ConfigError
from agent.model.cpuset import parse_cpus
from agent.model.declared_devices import (
    DeclaredCpuDevice,
    DeclaredFile,
    DeclaredGpuDevice,
    DeclaredOtherDevice,
    DeclaredPart,
    DriverCheckSample,
    DriverDevice,
)
from agent.model.health import Finding, Health, Severity
from agent.model.persistent_faults import PersistentState
from agent.model.reading import SourceState
from agent.model.report import Report
from agent.model.settings import EngineSettings
from agent.model.snapshot import Snapshot
from agent.model.time import NS
from agent.serve.driver_link.handler_interface import DeviceDeclaration, DriverCheckResult
from agent.sources.declaration_file import parse_declaration, read_declarations

DRIVER = "card.example.com"
DOWN = Finding("card.link", Severity.UNHEALTHY, "link is down, not up")
CPU = DeclaredCpuDevice(parse_cpus("1"), 0, exclusive=False, isolated=False)
EXPIRED = (Health.UNKNOWN, ["check.link.expired"])


def result(finding: Finding | None = None, no_result: str = "", **changes: object) -> DriverCheckResult:
    blank = DriverCheckResult("link", "", "card-0", finding, no_result, 5.0, 15.0, 0.0, 1, 1, 0)
    return blank._replace(**changes)  # type: ignore[arg-type]


class Node(PaperNode):
    """Node with one declared device, whose driver reports a check over its socket."""

    def __init__(self, part: DeclaredPart | None = None, checks: tuple[str, ...] = ("link",)) -> None:
        super().__init__()
        self.part = part or DeclaredOtherDevice()
        self.checks = checks
        self.is_declared = True
        self.samples: Sequence[DriverCheckSample] = ()
        self.wakes: list[bool] = []
        self.state = initial_state(EngineSettings("node-a"), saved=PersistentState(), boot_id="boot-1")
        self._connect()

    def _connect(self) -> None:
        self.reported = ReportedChecks(DRIVER, "node-a", self._take, clock_ns=lambda: self.now_ns)

    def _take(self, driver: str, samples: Sequence[DriverCheckSample], wake: bool) -> None:
        assert driver == DRIVER
        self.samples = samples
        self.wakes.append(wake)

    def report(self, *results: DriverCheckResult) -> Report:
        """Report results, a second after the last report, and evaluate the node."""
        self.wait(1)
        self.reported.report(results)
        return self.next()

    def restart(self) -> None:
        """Restart the agent: it has its checkpoint, and no results."""
        saved = self.state.checkpoint
        self.state = initial_state(EngineSettings("node-a"), saved=saved, boot_id="boot-1")
        self.samples = ()
        self._connect()

    def snapshot(self) -> Snapshot:
        device = DriverDevice(DRIVER, "node-a", "card-0", self.part, 0, self.checks)
        declared = (DeclaredFile(DRIVER, (device,) if self.is_declared else ()),)
        return replace(super().snapshot(), declared=declared, checks=tuple(self.samples))


def health_and_codes(report: Report) -> tuple[Health, list[str]]:
    device = device_of(report, "card-0")
    return device.health, codes(device)


PARTS = pytest.mark.parametrize("part", [None, CPU], ids=["only checks", "cpus"])


# --- the engine ---------------------------------------------------------------------------------------------


@PARTS
def test_reported_check_decides_the_health_of_its_device(part: DeclaredPart | None) -> None:
    node = Node(part)
    assert health_and_codes(node.report(result())) == (Health.HEALTHY, [])
    assert health_and_codes(node.report(result(DOWN))) == (Health.UNHEALTHY, ["card.link"])
    node.report(result())
    assert health_and_codes(node.report(result())) == (Health.HEALTHY, [])


@PARTS
def test_check_that_stops_is_unknown_when_its_lease_ends(part: DeclaredPart | None) -> None:
    node = Node(part)
    node.report(result())
    assert health_and_codes(node.next(13)) == (Health.HEALTHY, [])
    assert node.state.due_ns is not None
    assert node.state.due_ns <= node.samples[0].beat_ns + 15 * NS + 1, "the engine wakes by itself"
    report = node.next(3)
    assert health_and_codes(report) == EXPIRED
    assert device_of(report, "card-0").causes[0].evidence == "no result of the driver for more than 15 s"
    source = next(source for source in report.sources if source.name == f"check.{DRIVER}/link")
    assert source.state is SourceState.FAILING


def test_check_result_for_former_hardware_of_a_device_does_not_count() -> None:
    node = Node(CPU)
    assert health_and_codes(node.report(result())) == (Health.HEALTHY, [])
    node.part = CPU._replace(cpus=parse_cpus("0"))
    assert health_and_codes(node.next()) == (Health.UNKNOWN, ["declared.unseen"])
    assert health_and_codes(node.next(3)) == EXPIRED
    node.report(result())
    assert health_and_codes(node.next(2)) == (Health.HEALTHY, [])


def test_result_about_a_removed_device_does_not_count_for_other_hardware() -> None:
    node = Node(CPU)
    assert health_and_codes(node.report(result(lease_s=3600.0))) == (Health.HEALTHY, [])
    node.is_declared = False
    assert health_and_codes(node.next()) == (Health.UNKNOWN, ["declared.gone"])
    node.is_declared, node.part = True, CPU._replace(cpus=parse_cpus("0"))
    node.next()
    assert health_and_codes(node.next(3)) == EXPIRED
    for is_declared in (False, True):  # now without a change of the hardware
        node.is_declared = is_declared
        node.next()
    assert health_and_codes(node.next(3)) == EXPIRED
    node.report(result())
    assert health_and_codes(node.next(2)) == (Health.HEALTHY, [])


def test_result_about_a_removed_device_counts_for_the_same_hardware() -> None:
    node = Node(CPU)
    node.report(result(lease_s=3600.0))
    for is_declared in (False, True):
        node.is_declared = is_declared
        node.next()
    assert health_and_codes(node.next(2)) == (Health.HEALTHY, [])


@PARTS
@pytest.mark.parametrize("pause_s", [15, 60, 300])
def test_lease_of_a_result_does_not_end_while_the_agent_is_stopped(
    part: DeclaredPart | None, pause_s: float
) -> None:
    node = Node(part)
    node.report(result())
    node.wait(pause_s)
    assert health_and_codes(node.next()) == (Health.HEALTHY, []), "newer results are not read yet"
    assert health_and_codes(node.report(result())) == (Health.HEALTHY, [])
    assert health_and_codes(node.next(16)) == EXPIRED


def test_lease_of_a_result_ends_after_the_agent_was_stopped() -> None:
    node = Node()
    node.report(result())
    node.wait(60)
    assert health_and_codes(node.next(14)) == (Health.HEALTHY, [])
    assert node.state.due_ns is not None
    assert node.state.due_ns - node.now_ns <= 3 * NS, "the engine wakes by itself"
    assert health_and_codes(node.next(3)) == EXPIRED


def test_lease_of_a_result_ends_on_a_busy_machine() -> None:
    node = Node()
    report = node.report(result())
    end_ns = node.now_ns + 2 * 15 * NS
    while health_and_codes(report) != EXPIRED:
        assert node.now_ns <= end_ns, "twice the lease"
        assert node.state.due_ns is not None
        node.wait(min(10, (node.state.due_ns - node.now_ns) / NS) + 1.5)
        report = node.evaluate()


def test_result_whose_lease_had_ended_stays_expired_over_a_pause() -> None:
    node = Node()
    node.report(result())
    assert health_and_codes(node.next(20)) == EXPIRED
    node.wait(60)
    assert health_and_codes(node.next(2)) == EXPIRED


@PARTS
def test_result_after_an_ended_lease_counts_again(part: DeclaredPart | None) -> None:
    node = Node(part)
    node.report(result(raise_after=3, clear_after=3))
    assert health_and_codes(node.next(20)) == EXPIRED
    node.report(result(raise_after=3, clear_after=3))
    assert health_and_codes(node.next(2)) == (Health.HEALTHY, [])


@PARTS
def test_fault_of_a_check_that_stops_stays(part: DeclaredPart | None) -> None:
    node = Node(part)
    node.report(result(DOWN))
    health, found = health_and_codes(node.next(60))
    assert (health, found) == (Health.UNHEALTHY, ["card.link", "check.link.expired"])


@PARTS
def test_declared_check_without_any_result_is_unknown_after_two_seconds(part: DeclaredPart | None) -> None:
    node = Node(part)
    first = node.next()
    assert [device.device for device in first.devices if device.driver == DRIVER] == []
    report = node.next(3)
    assert health_and_codes(report) == EXPIRED
    assert device_of(report, "card-0").causes[0].evidence == "the driver has not reported a result"


@PARTS
def test_check_added_to_a_device_is_not_healthy_without_result(part: DeclaredPart | None) -> None:
    node = Node(part)
    node.report(result())
    node.next(3)
    node.report(result())
    node.checks = ("link", "memory")
    assert health_and_codes(node.next())[0] is Health.UNKNOWN
    node.report(result(), result(check="memory"))
    assert health_and_codes(node.next(2)) == (Health.HEALTHY, [])


@PARTS
def test_restarted_agent_is_not_healthy_before_a_result(part: DeclaredPart | None) -> None:
    node = Node(part)
    node.report(result(DOWN))
    node.restart()
    node.next()
    health, found = health_and_codes(node.next(3))
    assert (health, found) == (Health.UNHEALTHY, ["card.link", "check.link.expired"])
    node.report(result(run=9))
    node.report(result(run=10))
    assert health_and_codes(node.next(2)) == (Health.HEALTHY, [])


def test_result_of_an_undeclared_check_has_no_effect() -> None:
    node = Node(CPU, checks=())
    report = node.report(result(DOWN), result(DOWN, device="card-9"))
    assert health_and_codes(report) == (Health.HEALTHY, [])
    assert not [source for source in report.sources if source.name.startswith("check.")]


def test_result_with_an_age_ends_its_lease_earlier() -> None:
    node = Node()
    node.report(result(age_s=10.0))
    assert health_and_codes(node.next(3)) == (Health.HEALTHY, [])
    assert health_and_codes(node.next(4)) == EXPIRED


def test_checks_of_two_drivers_with_one_name_are_two_sources() -> None:
    node = Node()
    node.reported.report([result()])
    other = node.samples[0]._replace(subject="other.example.com/node-a/x-0", no_result_reason="hangs")
    snapshot = replace(node.snapshot(), checks=(*node.samples, other))
    files = [DriverDevice("other.example.com", "node-a", "x-0", DeclaredOtherDevice(), 0, ("link",))]
    declared = (*snapshot.declared, DeclaredFile("other.example.com", tuple(files)))
    _, report = step(node.state, replace(snapshot, declared=declared), node.now)
    states = {source.name: source.state for source in report.sources if source.name.startswith("check.")}
    assert states == {
        f"check.{DRIVER}/link": SourceState.OK,
        "check.other.example.com/link": SourceState.FAILING,
    }


# --- counting and waking ------------------------------------------------------------------------------------


def test_repeated_result_of_one_run_is_counted_once() -> None:
    node = Node()
    for _ in range(5):
        report = node.report(result(DOWN, run=7, raise_after=2))
    assert health_and_codes(report) == (Health.HEALTHY, [])
    assert health_and_codes(node.report(result(DOWN, run=8, raise_after=2)))[0] is Health.UNHEALTHY


def test_first_run_of_a_restarted_driver_counts_as_another_run() -> None:
    """A broken device that crashes its driver before the second run becomes Unhealthy nevertheless."""
    node = Node()
    first = result(DOWN, run=1, raise_after=2, lease_s=60.0)
    node.report(first)
    node.wait(10)
    assert health_and_codes(node.report(first._replace(age_s=11.0))) == (Health.HEALTHY, []), "sent again"
    assert health_and_codes(node.report(first))[0] is Health.UNHEALTHY


@pytest.mark.parametrize(
    "late",
    [
        result(run=7, age_s=6.0),
        result(run=7, every_s=60.0),  # its request was handled late: no age shows that it is older
        result(run=0, age_s=6.0),
    ],
    ids=["older", "handled late", "without numbers"],
)
def test_late_result_of_an_earlier_run_does_not_replace_the_newest(late: DriverCheckResult) -> None:
    node = Node()
    assert health_and_codes(node.report(result(DOWN, run=8)))[0] is Health.UNHEALTHY
    before = node.samples
    for _ in range(2):
        assert health_and_codes(node.report(late)) == (Health.UNHEALTHY, ["card.link"])
    assert node.samples == before


def test_result_of_a_later_run_counts_although_the_stored_one_came_late() -> None:
    node = Node()
    node.report(result(run=8, every_s=0.1))
    node.report(result(DOWN, run=9, age_s=1.5, every_s=0.1))
    assert health_and_codes(node.next())[0] is Health.UNHEALTHY


def test_restarted_driver_replaces_the_result_of_a_higher_run() -> None:
    node = Node()
    node.report(result(run=8))
    assert health_and_codes(node.report(result(DOWN, run=1)))[0] is Health.UNHEALTHY


OK = result(raise_after=3, clear_after=3)
BAD = result(DOWN, raise_after=3, clear_after=3)
NONE = result(no_result="no answer", raise_after=3, clear_after=3)


@pytest.mark.parametrize(
    ("reports", "health"),
    [
        ([[BAD], [OK, BAD]], Health.HEALTHY),
        ([[BAD], [OK, BAD], [BAD, BAD]], Health.UNHEALTHY),
        ([[BAD], [NONE, BAD], [BAD]], Health.UNHEALTHY),
        ([[BAD], [NONE, OK, BAD]], Health.HEALTHY),
        ([[BAD], [BAD, BAD]], Health.UNHEALTHY),
        ([[OK], [NONE], [OK, NONE]], Health.HEALTHY),
        ([[BAD], [BAD], [BAD], [OK], [BAD, OK]], Health.UNHEALTHY),
        ([[BAD], [BAD], [BAD], [OK], [OK, OK]], Health.HEALTHY),
    ],
)
def test_runs_between_two_evaluations_are_counted_by_their_results(
    reports: list[list[DriverCheckResult]], health: Health
) -> None:
    node = Node()
    node.report(OK)
    for results in reports:
        report = node.report(*results)
    assert health_and_codes(report)[0] is health


def test_runs_with_other_evidence_of_one_fault_are_counted() -> None:
    node = Node()
    for number in range(3):
        found = DOWN._replace(evidence=f"{number} errors")
        report = node.report(result(found, raise_after=3))
    assert health_and_codes(report)[0] is Health.UNHEALTHY


def test_runs_without_result_make_the_device_unknown_after_enough_runs() -> None:
    node = Node()
    node.report(result())
    hang = result(no_result="no answer after 2.37 s", raise_after=2)
    assert health_and_codes(node.report(hang)) == (Health.HEALTHY, [])
    report = node.report(hang)
    assert health_and_codes(report) == (Health.UNKNOWN, ["check.link.unreadable"])
    text = "no answer after <duration>"
    assert device_of(report, "card-0").causes[0].evidence == text, "numbers that vary are masked"


def test_results_wake_the_engine_only_while_they_can_change_health() -> None:
    node = Node()
    for run in range(1, 6):
        node.reported.report([result(run=run, raise_after=1, clear_after=2)])
    assert node.wakes == [True, True, False, False, False]
    node.wait(20)
    node.reported.report([result(run=6, raise_after=1, clear_after=2)])
    assert node.wakes[-1], "the lease had ended"


def test_kept_results_are_limited_to_the_newest() -> None:
    node = Node()
    node.reported.report([result(device="first")])
    for start in range(0, RESULTS_MAX, 4096):
        node.reported.report([result(device=f"d-{start + number}") for number in range(4096)])
    assert len(node.samples) == RESULTS_MAX
    assert node.samples[0].subject.endswith("/d-0")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (result(check="Link"), "results[1]: 'Link' is not a DNS label"),
        (result(device="a/b"), "results[1]: 'a/b' is not a DNS label"),
        (result(DOWN._replace(code="link")), "results[1]: finding code 'link' is not a dotted code"),
    ],
)
def test_wrong_result_refuses_the_whole_report(wrong: DriverCheckResult, text: str) -> None:
    node = Node()
    with pytest.raises(ConfigError) as raised:
        node.reported.report([result(), wrong])
    assert str(raised.value).startswith(text)
    assert node.samples == ()


def test_source_of_the_agent_adds_reported_checks_to_snapshots() -> None:
    host, source, node = UnmonitoredHostSource(), HostAndDriverSource(), Node()
    source.open(host)
    source.clear()
    node.reported.report([result()])
    for wake in (False, True):
        source.set_reported_checks(DRIVER, node.samples, wake=wake)
        assert bool(select.select([host], [], [], 0)[0]) is wake
    found = source.read()
    assert found is not None
    assert found.checks == tuple(node.samples)
    source.close()
    host.close()


# --- the declaration file -----------------------------------------------------------------------------------


def test_declared_checks_are_read_back_from_the_file(tmp_path: Path) -> None:
    rows = (
        DeviceDeclaration("", {"name": "card-0", "checks": ["link", "memory"]}),
        DeviceDeclaration("", {"name": "cpu-1", "kind": "cpu", "cpus": "1", "checks": ["load"]}),
    )
    write_declaration(tmp_path, DRIVER, "node-a", rows)
    [file] = read_declarations(tmp_path, (), "node-a")
    assert file.error == ""
    assert [(device.name, type(device.part), device.checks) for device in file.devices] == [
        ("card-0", DeclaredOtherDevice, ("link", "memory")),
        ("cpu-1", DeclaredCpuDevice, ("load",)),
    ]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"checks": "link"}, "checks: 'link' is not a list"),
        ({"checks": ["a", "a"]}, "checks: a, a: name each check once"),
        ({"checks": ["A"]}, "checks: 'A' is not a DNS label, such as link-up"),
        ({"checks": [f"c-{number}" for number in range(9)]}, "checks: 9 checks, limit 8"),
        ({"checks": []}, "required key 'kind' is missing"),
        ({"checks": ["link"], "cpus": "1"}, "unknown key 'cpus' of a device without kind"),
    ],
)
def test_wrong_checks_of_a_device_are_refused(keys: dict[str, object], text: str) -> None:
    data = declaration_text(DRIVER, [DeviceDeclaration("", {"name": "card-0", **keys})])
    with pytest.raises(ConfigError) as raised:
        parse_declaration(data, DRIVER, "node-a")
    assert str(raised.value).removeprefix("device 1 (card-0): ").startswith(text)


# --- GPUs ---------------------------------------------------------------------------------------------------


class CardNode(GpuNode):
    """Node with a GPU that a driver declares as its device, with a check."""

    samples: Sequence[DriverCheckSample] = ()
    is_declared = False
    gpu = 0
    """Index of the declared GPU."""
    bus = ""
    """PCI address of the declared GPU, if it is not that of the index."""
    checks: tuple[str, ...] = ("link",)
    """Checks that the driver reports over its socket."""

    def declare(self) -> None:
        """Start the agent again in a boot with an ID, and declare the GPU from now on."""
        self.state = initial_state(self.settings, saved=PersistentState(), boot_id="boot-1")
        self.is_declared = True
        self.reported = ReportedChecks(DRIVER, "node-a", self._take, clock_ns=lambda: self.now_ns)

    def _take(self, _: str, samples: Sequence[DriverCheckSample], wake: bool) -> None:
        self.samples = samples

    def snapshot(self) -> Snapshot:
        part = DeclaredGpuDevice(self.bus or self.gpus[self.gpu].bus, "", -1, -1)
        device = DriverDevice(DRIVER, "node-a", "card-0", part, 0, self.checks)
        declared = (DeclaredFile(DRIVER, (device,)),) if self.is_declared else ()
        return replace(super().snapshot(), declared=declared, checks=tuple(self.samples))


def test_declared_gpu_is_not_healthy_without_a_valid_result() -> None:
    node = CardNode()
    node.declare()
    assert not [device for device in node.next().devices if device.device == "card-0"]
    assert health_and_codes(node.next(3)) == EXPIRED
    node.reported.report([result()])
    node.next()
    assert health_and_codes(node.next(2)) == (Health.HEALTHY, [])
    assert health_and_codes(node.next(15)) == EXPIRED


def embedded_sample(node: CardNode, passes: int) -> DriverCheckSample:
    """Return the sample of a check that an embedded monitor runs."""
    subject = f"{DRIVER}/node-a/card-0"
    return DriverCheckSample("hang", subject, None, "", passes, node.now_ns, 60 * NS, 1, 1)


def test_declared_gpu_is_unknown_until_its_embedded_check_has_a_result() -> None:
    node = CardNode()
    node.checks, node.samples = (), [embedded_sample(node, 0)]
    node.declare()
    assert not [device for device in node.next().devices if device.device == "card-0"]
    for _ in range(3):
        assert health_and_codes(node.next(3)) == (Health.UNKNOWN, ["declared.unseen"])
    node.samples = [embedded_sample(node, 1)]
    assert health_and_codes(node.next()) == (Health.HEALTHY, [])


def test_fault_of_a_declared_gpu_is_reported_before_its_check_has_a_result() -> None:
    node = CardNode()
    node.checks, node.samples, node.bus = (), [embedded_sample(node, 0)], "0000:ff:00.0"
    node.declare()
    node.next()
    assert health_and_codes(node.next(3)) == (Health.UNHEALTHY, ["gpu.not_found"])


def test_result_about_former_gpu_of_a_redeclared_device_does_not_count() -> None:
    node = CardNode()
    node.declare()
    node.reported.report([result()])
    assert health_and_codes(node.next(5)) == (Health.HEALTHY, [])
    node.gpu = 1
    assert health_and_codes(node.next()) == (Health.UNKNOWN, ["declared.unseen"])
    assert health_and_codes(node.next(3)) == EXPIRED
    node.reported.report([result()])
    node.next()
    assert health_and_codes(node.next(2)) == (Health.HEALTHY, [])


def test_restored_check_fault_of_a_gpu_is_kept_until_nvml_answers() -> None:
    node = CardNode()
    node.declare()
    node.reported.report([result(DOWN)])
    assert health_and_codes(node.next())[0] is Health.UNHEALTHY
    node.state = initial_state(node.settings, saved=node.state.checkpoint, boot_id="boot-1")
    nvml, node.samples = node.nvml, ()
    node.nvml = nvml._replace(state=SourceState.STARTING)
    node.next()
    node.nvml = nvml
    node.reported.report([result(DOWN, raise_after=3)])
    assert health_and_codes(node.next(2)) == (Health.UNHEALTHY, ["card.link"])
