"""What a driver itself knows of its devices: its own checks, and what its prepares found."""

from dataclasses import replace
from typing import Final

import pytest
from paper import PaperNode, codes, device_of

from agent.health.declared.checks import check_sources
from agent.health.declared.driver_faults import TOLD
from agent.health.state_machine import CLEAN_MIN_NS
from agent.model.check import CheckSample
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.cpuset import parse_cpus
from agent.model.declared import Declared, DeclaredCpus, DeclaredFile, DeclaredOther, What
from agent.model.health import Blame, Finding, Health, Severity
from agent.model.prepare import DriverFault
from agent.model.report import Report
from agent.model.snapshot import Snapshot
from agent.model.source import SourceState
from agent.model.time import NS
from agent.serve.health.feed import devices_for

DRIVER: Final = "a.example.com"
STUCK: Final = Finding("fw.stuck", Severity.UNHEALTHY, "firmware does not answer", "reset it")
CLAIM: Final = ClaimRef("default", "claim-a", "uid-a")


class Node(PaperNode):
    """A node inside a driver: one device, with what the driver's checks of it found."""

    def __init__(self, what: What | None = None) -> None:
        super().__init__()
        self.what = what or DeclaredOther()
        self.checks: dict[str, CheckSample] = {}
        self.told: tuple[DriverFault, ...] = ()
        self.devices = ("dev-0",)

    def check(
        self,
        finding: Finding | None = None,
        unread: str = "",
        *,
        name: str = "firmware",
        raise_after: int = 1,
        clear_after: int = 1,
    ) -> Report:
        """A check of dev-0 ends; what is said then."""
        self.wait(1)
        self.ended(finding, unread, name=name, raise_after=raise_after, clear_after=clear_after)
        return self.next()

    def ended(self, finding: Finding | None, unread: str = "", *, name: str, **counts: int) -> None:
        before = self.checks.get(name)
        self.checks[name] = CheckSample(
            name,
            f"{DRIVER}/node-a/dev-0",
            finding,
            unread,
            before.passes + 1 if before else 1,
            self.now_ns,
            5 * NS,
            counts["raise_after"],
            counts["clear_after"],
        )

    def fail(self, number: int = 1, code: str = "driver.failed_device", *, excused: bool = False) -> Report:
        """The driver says that dev-0 is broken."""
        device = DeviceRef(DRIVER, "node-a", "dev-0")
        told_wall_s = next((one.told_wall_s for one in self.told if one.number == number), self.wall_s)
        excused_wall_s = self.wall_s if excused else 0.0
        fault = DriverFault(number, device, code, "link down", "", told_wall_s, CLAIM, excused_wall_s)
        self.told = (*(one for one in self.told if one.number != number), fault)
        return self.look()

    def snapshot(self) -> Snapshot:
        devices = tuple(Declared(DRIVER, "node-a", name, self.what, 0) for name in self.devices)
        return replace(
            super().snapshot(),
            declared=(DeclaredFile(DRIVER, devices),),
            checks=tuple(self.checks.values()),
            told=self.told,
        )


def said(report: Report) -> tuple[Health, list[str]]:
    device = device_of(report, "dev-0")
    return device.health, codes(device)


# --- checks ------------------------------------------------------------------------------------------------


def test_a_device_that_nobody_checks_is_unknown() -> None:
    assert said(Node().next()) == (Health.UNKNOWN, ["declared.unchecked"])


def test_a_device_whose_check_finds_nothing_is_healthy() -> None:
    assert said(Node().check()) == (Health.HEALTHY, [])


def test_what_a_check_finds_is_said_in_its_words_and_blamed_on_the_driver() -> None:
    device = device_of(Node().check(STUCK), "dev-0")
    assert device.health is Health.UNHEALTHY
    assert device.message == "fw.stuck: firmware does not answer. Advice: reset it"
    assert device.causes[0].blame is Blame.DRIVER


def test_a_check_is_believed_after_as_many_looks_as_it_asks() -> None:
    node = Node()
    assert said(node.check())[0] is Health.HEALTHY
    healths = [said(node.check(STUCK, raise_after=3, clear_after=4))[0] for _ in range(3)]
    assert healths == [Health.HEALTHY, Health.HEALTHY, Health.UNHEALTHY]
    healths = [said(node.check(raise_after=3, clear_after=4))[0] for _ in range(4)]
    assert healths == [Health.UNHEALTHY] * 3 + [Health.HEALTHY]


def test_no_time_takes_the_place_of_a_clear_count() -> None:
    node = Node()
    node.check(STUCK, clear_after=4)
    for _ in range(3):
        node.wait(100)
        assert said(node.check(clear_after=4))[0] is Health.UNHEALTHY
    assert said(node.check(clear_after=4))[0] is Health.HEALTHY


def test_looks_of_the_core_are_no_looks_of_the_check() -> None:
    node = Node()
    node.check()
    node.check(STUCK, raise_after=2)
    assert said(node.next(5))[0] is Health.HEALTHY
    assert said(node.check(STUCK, raise_after=2))[0] is Health.UNHEALTHY


def test_another_code_of_the_same_check_replaces_the_first() -> None:
    node = Node()
    node.check(STUCK)
    node.check(STUCK._replace(code="fw.old", severity=Severity.DEGRADED))
    node.wait(CLEAN_MIN_NS / NS)
    report = node.check(STUCK._replace(code="fw.old", severity=Severity.DEGRADED))
    assert said(report) == (Health.HEALTHY, ["fw.old"])


def test_a_check_that_cannot_look_makes_the_device_unknown_and_keeps_what_was_known() -> None:
    node = Node()
    node.check(STUCK)
    report = node.check(unread="no answer within 2 s")
    assert said(report) == (Health.UNHEALTHY, ["fw.stuck", "check.firmware.unreadable"])
    other = Node()
    other.check()
    report = other.check(unread="no answer within 2 s")
    assert said(report) == (Health.UNKNOWN, ["check.firmware.unreadable"])
    assert "no answer within 2 s" in device_of(report, "dev-0").message


def test_two_checks_know_nothing_of_each_other() -> None:
    node = Node()
    node.check(STUCK, name="firmware")
    for _ in range(3):
        assert said(node.check(name="heat")) == (Health.UNHEALTHY, ["fw.stuck"])


def test_a_check_of_a_part_of_the_host_adds_to_what_the_host_says() -> None:
    node = Node(DeclaredCpus(parse_cpus("1"), 0, exclusive=False, isolated=False))
    node.check(STUCK._replace(severity=Severity.DEGRADED))
    node.online("0")
    assert said(node.next()) == (Health.UNHEALTHY, ["cpu.offline", "fw.stuck"])


def test_a_device_is_verified_when_its_last_check_has_ended() -> None:
    node = Node()
    first = device_of(node.check(), "dev-0").verified
    assert device_of(node.next(3), "dev-0").verified == first
    assert device_of(node.check(), "dev-0").verified.mono_ns > first.mono_ns


def test_a_check_that_never_ended_makes_nothing_healthy() -> None:
    node = Node()
    node.ended(None, name="firmware", raise_after=1, clear_after=1)
    node.checks["firmware"] = node.checks["firmware"]._replace(passes=0)
    assert not any(device.device == "dev-0" for device in node.next().devices)
    assert said(node.next(3)) == (Health.UNKNOWN, ["declared.unseen"])


def test_a_check_is_told_of_as_a_source() -> None:
    report = Node().check(unread="no answer within 2 s")
    source = next(source for source in report.sources if source.name == "check.firmware")
    assert (source.state, source.detail) == ("failing", "no answer within 2 s")


def test_a_driver_that_we_are_part_of_is_never_told_of_the_hosts_devices() -> None:
    node = Node()
    node.devices = ()
    assert not devices_for(node.next(), DRIVER)
    assert devices_for(node.next(), "b.example.com")


# --- what its prepares found -------------------------------------------------------------------------------


def test_a_device_that_its_driver_found_broken_is_unhealthy_with_the_drivers_words() -> None:
    node = Node()
    node.check()
    device = device_of(node.fail(), "dev-0")
    assert (device.health, codes(device)) == (Health.UNHEALTHY, ["driver.failed_device"])
    assert device.message.startswith("driver.failed_device: link down")
    assert device.causes[0].blame is Blame.DRIVER


def test_a_good_check_alone_does_not_contradict_the_driver() -> None:
    node = Node()
    node.check()
    node.fail()
    assert [said(node.check())[0] for _ in range(5)] == [Health.UNHEALTHY] * 5


def test_a_good_prepare_alone_does_not_end_it_before_somebody_has_looked() -> None:
    node = Node()
    node.check()
    node.fail()
    assert said(node.fail(excused=True))[0] is Health.UNHEALTHY
    assert said(node.check())[0] is Health.HEALTHY


def test_a_look_that_finds_something_does_not_end_it() -> None:
    node = Node()
    node.check()
    node.fail()
    node.check(STUCK)
    assert codes(device_of(node.fail(excused=True), "dev-0")) == ["fw.stuck", "driver.failed_device"]
    node.check()
    assert said(node.check())[0] is Health.HEALTHY


def test_what_is_over_does_not_come_back_with_another_fault() -> None:
    node = Node()
    node.check()
    node.fail()
    node.check()
    node.fail(excused=True)
    assert said(node.next())[0] is Health.HEALTHY
    assert said(node.check(STUCK)) == (Health.UNHEALTHY, ["fw.stuck"])


def test_a_device_that_nobody_checks_is_unknown_again_after_a_good_prepare() -> None:
    node = Node()
    node.next()
    assert said(node.fail()) == (Health.UNHEALTHY, ["driver.failed_device", "declared.unchecked"])
    node.next()
    node.fail(excused=True)
    assert said(node.next())[0] is Health.UNKNOWN


def test_what_was_over_before_we_began_is_not_told_again() -> None:
    node = Node()
    node.fail(excused=True)
    assert said(node.check()) == (Health.HEALTHY, [])


def test_a_fault_that_outlived_a_restart_is_told_at_once() -> None:
    node = Node()
    node.told = ()
    node.ended(None, name="firmware", raise_after=1, clear_after=1)
    node.read()
    assert said(node.fail())[0] is Health.UNHEALTHY


def test_the_health_engine_having_the_same_code_says_it_once() -> None:
    node = Node()
    node.check(STUCK)
    assert said(node.fail(code="fw.stuck")) == (Health.UNHEALTHY, ["fw.stuck"])


def test_a_look_that_could_not_be_had_does_not_end_it_though_nobody_is_alarmed_yet() -> None:
    node = Node()
    node.check(raise_after=3)
    node.fail()
    node.check(unread="no answer within 2 s", raise_after=3)
    assert said(node.fail(excused=True)) == (Health.UNHEALTHY, ["driver.failed_device"])
    assert said(node.check(raise_after=3))[0] is Health.HEALTHY


def test_a_look_that_found_something_does_not_end_it_though_it_is_not_believed_yet() -> None:
    node = Node()
    node.check(raise_after=3)
    node.fail()
    node.check(STUCK, raise_after=3)
    assert said(node.fail(excused=True)) == (Health.UNHEALTHY, ["driver.failed_device"])
    assert said(node.check(STUCK, raise_after=3))[0] is Health.UNHEALTHY
    assert said(node.check(raise_after=3))[0] is Health.HEALTHY


def test_a_look_that_may_have_found_a_flaw_ends_it_for_the_device_can_be_used() -> None:
    node = Node()
    node.check(raise_after=3)
    node.fail()
    node.check(STUCK._replace(severity=Severity.DEGRADED), raise_after=3)
    assert said(node.fail(excused=True))[0] is Health.HEALTHY


def test_a_look_of_before_it_was_told_does_not_end_it() -> None:
    node = Node()
    node.check()
    node.fail()
    node.fail(excused=True)
    assert said(node.next(3))[0] is Health.UNHEALTHY
    assert said(node.check())[0] is Health.HEALTHY


def test_what_was_found_well_once_ends_it_whatever_is_found_later() -> None:
    node = Node()
    node.check()
    node.fail()
    node.check()
    node.check(STUCK)
    assert said(node.fail(excused=True)) == (Health.UNHEALTHY, ["fw.stuck"])


def test_a_number_that_is_another_faults_now_hands_nothing_on_to_it() -> None:
    """Two instances told of a fault each, and both were their first: one of them has another number now."""
    node = Node()
    node.check()
    node.fail()
    first = node.told
    node.fail(excused=True)
    node.check()
    node.wait(5)
    node.told = ()
    node.fail(1, "fw.lost")
    theirs = node.told
    node.told = (*theirs, *(one._replace(number=2, excused_wall_s=node.wall_s) for one in first))
    assert said(node.look()) == (Health.UNHEALTHY, ["fw.lost"])
    node.check()
    assert said(node.fail(1, "fw.lost", excused=True))[0] is Health.HEALTHY


def test_a_fault_that_is_given_another_number_stays_the_same() -> None:
    node = Node()
    node.check()
    device = device_of(node.fail(), "dev-0")
    node.check()
    node.told = tuple(one._replace(number=7) for one in node.told)
    assert device_of(node.look(), "dev-0").causes == device.causes
    node.told = tuple(one._replace(excused_wall_s=node.wall_s) for one in node.told)
    assert said(node.look())[0] is Health.HEALTHY


def test_what_is_told_of_a_device_that_nobody_declares_wakes_nobody() -> None:
    node = Node()
    node.devices = ()
    node.next()
    node.fail()
    node.fail(excused=True)
    assert node.state.due_ns is None
    assert "dev-0" not in [device.device for device in node.next().devices]


def test_two_faults_of_a_device_are_over_one_by_one() -> None:
    node = Node()
    node.check()
    node.fail(1, "fw.stuck")
    node.wait(1)
    node.fail(2, "fw.lost")
    node.check()
    assert said(node.fail(1, "fw.stuck", excused=True)) == (Health.UNHEALTHY, ["fw.lost"])
    assert said(node.fail(2, "fw.lost", excused=True)) == (Health.HEALTHY, [])


def test_what_a_driver_tells_is_marked_and_what_a_check_finds_is_not() -> None:
    node = Node()
    node.check(STUCK)
    causes = device_of(node.fail(), "dev-0").causes
    assert [(cause.code, cause.told) for cause in causes] == [
        ("fw.stuck", False),
        ("driver.failed_device", True),
    ]


def test_a_device_that_goes_and_comes_back_is_still_broken_by_its_drivers_word() -> None:
    node = Node()
    node.check()
    node.fail()
    node.devices = ()
    assert said(node.next()) == (Health.UNHEALTHY, ["driver.failed_device", "declared.gone"])
    node.devices = ("dev-0",)
    node.next()
    assert said(node.check()) == (Health.UNHEALTHY, ["driver.failed_device"])
    assert said(node.fail(excused=True))[0] is Health.HEALTHY


def test_told_again_between_two_looks_it_must_be_looked_at_again() -> None:
    node = Node()
    node.check()
    node.fail(1)
    node.check()
    node.wait(1)
    node.told = ()
    node.fail(2)
    assert said(node.fail(2, excused=True))[0] is Health.UNHEALTHY
    assert said(node.check())[0] is Health.HEALTHY


def test_an_excused_device_is_looked_at_again_though_nobody_wakes_us() -> None:
    node = Node()
    node.check()
    node.fail()
    assert node.state.due_ns is None
    node.fail(excused=True)
    assert node.state.due_ns == node.now_ns + NS


def test_a_device_that_is_told_of_has_the_lease_of_any_other() -> None:
    told, other = Node(), Node()
    leases = []
    for node in (told, other):
        node.check()
        if node is told:
            node.fail()
        node.next()
        node.wait(600)
        leases.append([device_of(node.next(), "dev-0").timeout_s for _ in range(3)])
    assert leases[0] == leases[1]


def test_advice_is_the_drivers_if_it_has_any() -> None:
    node = Node()
    node.check()
    assert device_of(node.fail(), "dev-0").message.endswith(f"Advice: {TOLD.advice}")
    node.told = (node.told[0]._replace(advice="reseat it", told_wall_s=node.wall_s + 1),)
    assert device_of(node.look(), "dev-0").message.endswith("Advice: reseat it")


def test_what_the_host_finds_counts_as_what_a_check_finds_does() -> None:
    node = Node(DeclaredCpus(parse_cpus("1"), 0, exclusive=False, isolated=False))
    node.next()
    node.fail()
    node.online("0")
    node.next()
    assert said(node.fail(excused=True)) == (Health.UNHEALTHY, ["cpu.offline", "driver.failed_device"])
    node.online("0-1")
    assert said(node.next(5)) == (Health.HEALTHY, [])

    node.wait(1)
    node.fail(2)
    node.next()
    node.online("0")
    node.next()
    assert said(node.fail(2, excused=True)) == (Health.UNHEALTHY, ["cpu.offline"])


# --- checks that begin anew, and end -----------------------------------------------------------------------


def test_a_check_that_begins_anew_between_two_looks_of_the_core_makes_nothing_healthy() -> None:
    node = Node()
    node.check(STUCK)
    node.checks["firmware"] = node.checks["firmware"]._replace(passes=0, finding=None)
    assert said(node.next()) == (Health.UNKNOWN, ["declared.unseen"])
    assert said(node.next()) == (Health.UNKNOWN, ["declared.unseen"])
    assert said(node.check())[0] is Health.HEALTHY


def test_a_check_that_begins_anew_unseen_counts_on() -> None:
    node = Node()
    for _ in range(20):
        node.check(raise_after=3)
    node.check(STUCK, raise_after=3)
    node.checks.clear()
    node.wait(1)
    healths = [said(node.check(STUCK, raise_after=3))[0] for _ in range(2)]
    assert healths == [Health.HEALTHY, Health.UNHEALTHY]


def test_a_check_that_is_taken_away_takes_what_it_found_with_it() -> None:
    node = Node()
    node.check(STUCK, name="firmware", clear_after=3)
    node.check(name="heat", clear_after=3)
    del node.checks["firmware"]
    assert said(node.next()) == (Health.HEALTHY, [])
    node.checks.clear()
    assert said(node.next()) == (Health.UNKNOWN, ["declared.unchecked"])


def test_silence_between_two_bad_looks_neither_counts_nor_starts_anew() -> None:
    node = Node()
    node.check(raise_after=2)
    looks = [(STUCK, ""), (None, "no answer"), (STUCK, "")]
    healths = [said(node.check(finding, unread, raise_after=2))[0] for finding, unread in looks]
    assert healths == [Health.HEALTHY, Health.HEALTHY, Health.UNHEALTHY]


def test_silence_between_good_looks_starts_their_count_anew() -> None:
    node = Node()
    node.check(STUCK, clear_after=3)
    for finding, unread in ((None, ""), (None, ""), (None, "no answer"), (None, ""), (None, "")):
        assert said(node.check(finding, unread, clear_after=3))[0] is not Health.HEALTHY
    assert "fw.stuck" not in said(node.check(clear_after=3))[1]


def test_a_word_leaves_a_device_healthy_and_is_not_on_the_wire() -> None:
    for severity in (Severity.OK, Severity.INFO):
        device = device_of(Node().check(STUCK._replace(severity=severity)), "dev-0")
        assert (device.health, device.message) == (Health.HEALTHY, "")


def test_two_checks_with_the_same_code_are_two_causes_each_over_for_itself() -> None:
    node = Node()
    node.check(STUCK, name="firmware")
    assert said(node.check(STUCK, name="heat")) == (Health.UNHEALTHY, ["fw.stuck", "fw.stuck"])
    assert said(node.check(name="firmware"))[0] is Health.UNHEALTHY
    node.check(name="firmware")
    assert said(node.next()) == (Health.UNHEALTHY, ["fw.stuck"])
    node.check(name="heat")
    assert said(node.check(name="heat")) == (Health.HEALTHY, [])


@pytest.mark.parametrize("code", ["a/b", "!", "firmware/x", "declared.unchecked", "cpu.offline", "\u00e4 b"])
def test_whatever_a_code_is_it_is_said_as_it_is_and_goes_when_it_is_over(code: str) -> None:
    node = Node(DeclaredCpus(parse_cpus("1"), 0, exclusive=False, isolated=False))
    shown = "check.firmware.unreadable" if code == "!" else code
    assert said(node.check(STUCK._replace(code=code))) == (Health.UNHEALTHY, [shown])
    node.check()
    assert said(node.check()) == (Health.HEALTHY, [])


def test_a_finding_without_advice_has_none() -> None:
    message = device_of(Node().check(STUCK._replace(advice="")), "dev-0").message
    assert message == "fw.stuck: firmware does not answer"


def test_a_part_of_the_host_keeps_what_a_check_found_until_that_has_looked_anew() -> None:
    node = Node(DeclaredCpus(parse_cpus("1"), 0, exclusive=False, isolated=False))
    for _ in range(5):
        node.check(STUCK)
    node.checks["firmware"] = node.checks["firmware"]._replace(passes=0, finding=None)
    assert [said(node.next()) for _ in range(4)] == [(Health.UNHEALTHY, ["fw.stuck"])] * 4
    node.check()
    assert said(node.check()) == (Health.HEALTHY, [])


def test_what_is_another_device_now_keeps_nothing_that_a_check_found_before() -> None:
    node = Node(DeclaredCpus(parse_cpus("1"), 0, exclusive=False, isolated=False))
    node.check(STUCK)
    node.what = DeclaredCpus(parse_cpus("0"), 0, exclusive=False, isolated=False)
    assert said(node.check()) == (Health.HEALTHY, [])


def test_a_check_is_as_good_a_source_as_its_worst_device_and_as_late_as_its_latest() -> None:
    def sample(name: str, unread: str, passes: int, beat_ns: int) -> CheckSample:
        return CheckSample("link", f"{DRIVER}/node-a/{name}", None, unread, passes, beat_ns, NS, 1, 1)

    well, first, bad = sample("a", "", 9, 100), sample("b", "", 0, 50), sample("c", "hung", 7, 70)
    (source,) = check_sources([well, bad])
    assert (source.state, source.beat_ns, source.passes) == (SourceState.FAILING, 70, 7)
    assert (source.detail, source.vital) == ("hung", False)
    (source,) = check_sources([well, first])
    assert (source.state, source.beat_ns, source.passes) == (SourceState.OK, 50, 0)
    (source,) = check_sources([first])
    assert source.state is SourceState.STARTING


def test_a_device_that_its_driver_cannot_hand_out_is_unknown_until_it_can() -> None:
    node = Node()
    node.check()
    device = DeviceRef(DRIVER, "node-a", "dev-0")
    unknown = DriverFault(
        1, device, "api.forbidden", "403", "", node.wall_s, CLAIM, health=Health.UNKNOWN, keep_away=False
    )
    node.told = (unknown,)
    found = device_of(node.look(), "dev-0")
    assert (found.health, found.severity, codes(found)) == (
        Health.UNKNOWN,
        Severity.UNKNOWN,
        ["api.forbidden"],
    )
    assert not found.causes[0].keep_away
    node.check()
    node.told = (unknown._replace(excused_wall_s=node.wall_s),)
    assert said(node.check()) == (Health.HEALTHY, [])


def test_what_is_known_to_be_broken_stays_so_though_its_driver_cannot_tell() -> None:
    node = Node()
    node.check(STUCK)
    device = DeviceRef(DRIVER, "node-a", "dev-0")
    node.told = (DriverFault(1, device, "fw.stuck", "?", "", node.wall_s, CLAIM, health=Health.UNKNOWN),)
    assert said(node.look()) == (Health.UNHEALTHY, ["fw.stuck"])
