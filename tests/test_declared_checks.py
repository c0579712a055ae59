"""Checks of drivers, and faults that drivers report while they prepare claims."""

from dataclasses import replace
from typing import Final

import pytest
from paper import PaperNode, codes, device_of

from agent.devices.taints import TaintPolicy, TaintState, decide_taints
from agent.engine.step import initial_state
from agent.health.declared.driver_reports import (
    FAILED_DEVICE,
    STORED_MAX,
    conditions_to_store,
    health_check_sources,
)
from agent.health.state_machine import CLEAN_MIN_NS, Condition, ConditionPhase
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.cpuset import parse_cpus
from agent.model.declared_devices import (
    DeclaredCpuDevice,
    DeclaredFile,
    DeclaredOtherDevice,
    DeclaredPart,
    DriverCheckSample,
    DriverDevice,
)
from agent.model.health import Blame, Finding, Health, Repair, Severity
from agent.model.persistent_faults import PersistentState
from agent.model.prepare import DriverFault
from agent.model.reading import SourceState
from agent.model.report import Report
from agent.model.settings import EngineSettings, RuleOverride
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant
from agent.serve.health.service import devices_of_socket
from agent.store.gpu_fault_file import decode_gpu_faults, encode_gpu_faults

DRIVER: Final = "a.example.com"
STUCK: Final = Finding("fw.stuck", Severity.UNHEALTHY, "firmware does not answer", "reset it")
CLAIM: Final = ClaimRef("default", "claim-a", "uid-a")


class Node(PaperNode):
    """Node of an embedding driver, with one device and the results of its checks."""

    def __init__(self, part: DeclaredPart | None = None) -> None:
        super().__init__()
        self.part = part or DeclaredOtherDevice()
        self.checks: dict[str, DriverCheckSample] = {}
        self.faults: tuple[DriverFault, ...] = ()
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
        """End a check of dev-0 and return the next report."""
        self.wait(1)
        self.end_check(finding, unread, name=name, raise_after=raise_after, clear_after=clear_after)
        return self.next()

    def end_check(self, finding: Finding | None, unread: str = "", *, name: str, **counts: int) -> None:
        before = self.checks.get(name)
        self.checks[name] = DriverCheckSample(
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

    def fail(self, number: int = 1, code: str = "driver.failed_device", *, expired: bool = False) -> Report:
        """Report a driver fault of dev-0 and evaluate the node."""
        device = DeviceRef(DRIVER, "node-a", "dev-0")
        reported_wall_s = next(
            (known.reported_wall_s for known in self.faults if known.number == number), self.wall_s
        )
        expired_wall_s = self.wall_s if expired else 0.0
        fault = DriverFault(number, device, code, "link down", "", reported_wall_s, CLAIM, expired_wall_s)
        self.faults = (*(known for known in self.faults if known.number != number), fault)
        return self.evaluate()

    def snapshot(self) -> Snapshot:
        devices = tuple(DriverDevice(DRIVER, "node-a", name, self.part, 0) for name in self.devices)
        return replace(
            super().snapshot(),
            declared=(DeclaredFile(DRIVER, devices),),
            checks=tuple(self.checks.values()),
            driver_faults=self.faults,
        )


def health_and_codes(report: Report) -> tuple[Health, list[str]]:
    device = device_of(report, "dev-0")
    return device.health, codes(device)


# --- checks ------------------------------------------------------------------------------------------------


def test_device_without_check_is_unknown() -> None:
    assert health_and_codes(Node().next()) == (Health.UNKNOWN, ["declared.unchecked"])


def test_device_with_clean_check_is_healthy() -> None:
    assert health_and_codes(Node().check()) == (Health.HEALTHY, [])


def test_check_finding_keeps_its_text_and_blames_driver() -> None:
    device = device_of(Node().check(STUCK), "dev-0")
    assert device.health is Health.UNHEALTHY
    assert device.message == "fw.stuck: firmware does not answer. Advice: reset it"
    assert device.causes[0].blame is Blame.DRIVER


def test_check_finding_sets_the_repair_of_the_device() -> None:
    assert device_of(Node().check(STUCK), "dev-0").repair is Repair.NONE
    found = device_of(Node().check(STUCK._replace(repair=Repair.RESET_DEVICE)), "dev-0")
    assert (found.causes[0].repair, found.repair) == (Repair.RESET_DEVICE, Repair.RESET_DEVICE)


def test_driver_fault_sets_the_repair_of_the_device() -> None:
    node = Node()
    device = DeviceRef(DRIVER, "node-a", "dev-0")
    node.faults = (
        DriverFault(1, device, "fw.stuck", "?", "", node.wall_s, CLAIM, repair=Repair.REBOOT_NODE),
    )
    assert device_of(node.next(), "dev-0").repair is Repair.REBOOT_NODE


def test_check_finding_is_raised_after_configured_passes() -> None:
    node = Node()
    assert health_and_codes(node.check())[0] is Health.HEALTHY
    healths = [health_and_codes(node.check(STUCK, raise_after=3, clear_after=4))[0] for _ in range(3)]
    assert healths == [Health.HEALTHY, Health.HEALTHY, Health.UNHEALTHY]
    healths = [health_and_codes(node.check(raise_after=3, clear_after=4))[0] for _ in range(4)]
    assert healths == [Health.UNHEALTHY] * 3 + [Health.HEALTHY]


def test_elapsed_time_does_not_replace_clear_count() -> None:
    node = Node()
    node.check(STUCK, clear_after=4)
    for _ in range(3):
        node.wait(100)
        assert health_and_codes(node.check(clear_after=4))[0] is Health.UNHEALTHY
    assert health_and_codes(node.check(clear_after=4))[0] is Health.HEALTHY


def test_evaluations_without_new_pass_do_not_count() -> None:
    node = Node()
    node.check()
    node.check(STUCK, raise_after=2)
    assert health_and_codes(node.next(5))[0] is Health.HEALTHY
    assert health_and_codes(node.check(STUCK, raise_after=2))[0] is Health.UNHEALTHY


def test_new_code_of_check_replaces_previous_code() -> None:
    node = Node()
    node.check(STUCK)
    node.check(STUCK._replace(code="fw.old", severity=Severity.DEGRADED))
    node.wait(CLEAN_MIN_NS / NS)
    report = node.check(STUCK._replace(code="fw.old", severity=Severity.DEGRADED))
    assert health_and_codes(report) == (Health.HEALTHY, ["fw.old"])


def test_unread_check_is_unknown_and_keeps_earlier_cause() -> None:
    node = Node()
    node.check(STUCK)
    report = node.check(unread="no answer within 2 s")
    assert health_and_codes(report) == (Health.UNHEALTHY, ["fw.stuck", "check.firmware.unreadable"])
    other = Node()
    other.check()
    report = other.check(unread="no answer within 2 s")
    assert health_and_codes(report) == (Health.UNKNOWN, ["check.firmware.unreadable"])
    assert "no answer within 2 s" in device_of(report, "dev-0").message


def test_two_checks_are_independent() -> None:
    node = Node()
    node.check(STUCK, name="firmware")
    for _ in range(3):
        assert health_and_codes(node.check(name="heat")) == (Health.UNHEALTHY, ["fw.stuck"])


def test_check_adds_causes_to_those_of_host_part() -> None:
    node = Node(DeclaredCpuDevice(parse_cpus("1"), 0, exclusive=False, isolated=False))
    node.check(STUCK._replace(severity=Severity.DEGRADED))
    node.set_online("0")
    assert health_and_codes(node.next()) == (Health.UNHEALTHY, ["cpu.offline", "fw.stuck"])


def test_device_is_verified_when_its_oldest_check_ended() -> None:
    node = Node()
    first = device_of(node.check(), "dev-0").verified
    assert device_of(node.next(3), "dev-0").verified == first
    assert device_of(node.check(), "dev-0").verified.mono_ns > first.mono_ns


def test_unfinished_check_does_not_make_device_healthy() -> None:
    node = Node()
    node.end_check(None, name="firmware", raise_after=1, clear_after=1)
    node.checks["firmware"] = node.checks["firmware"]._replace(passes=0)
    assert not any(device.device == "dev-0" for device in node.next().devices)
    assert health_and_codes(node.next(3)) == (Health.UNKNOWN, ["declared.unseen"])


def test_check_that_stalls_is_unknown_with_its_limit() -> None:
    node = Node()
    node.check()
    device = device_of(node.next(20), "dev-0")
    assert codes(device) == ["source.stalled"]
    assert device.causes[0].evidence == "check.firmware: no pass for more than 15 s"


@pytest.mark.parametrize("pause_s", [20, 300])
def test_slow_check_does_not_stall_while_the_agent_is_stopped(pause_s: float) -> None:
    node = Node()
    node.check()
    node.next(3)
    node.wait(pause_s)
    assert health_and_codes(node.next(4)) == (Health.HEALTHY, []), "the check takes some seconds"
    assert health_and_codes(node.check()) == (Health.HEALTHY, [])


@pytest.mark.parametrize("pauses", [1, 9])
def test_check_that_hangs_stalls_although_the_agent_was_stopped(pauses: int) -> None:
    node = Node()
    node.check()
    for _ in range(pauses):
        node.wait(20)
        node.evaluate()
    assert health_and_codes(node.next(15)) == (Health.UNKNOWN, ["source.stalled"])


def restart_driver(node: Node, boot_id: str = "boot-1") -> Report:
    """Let the next driver start with the stored state, before its checks have run."""
    kept = decode_gpu_faults(encode_gpu_faults(node.state.checkpoint))
    node.state = initial_state(node.state.settings, saved=kept, boot_id=boot_id)
    for name, sample in node.checks.items():
        node.checks[name] = sample._replace(passes=0, finding=None, beat_ns=node.now_ns)
    return node.next()


@pytest.mark.parametrize(
    "part", [None, DeclaredCpuDevice(parse_cpus("1"), 0, exclusive=False, isolated=False)]
)
def test_check_finding_survives_a_restart_of_the_driver(part: DeclaredPart | None) -> None:
    node = Node(part)
    restart_driver(node)
    for _ in range(3):
        report = node.check(STUCK, raise_after=3, clear_after=2)
    cause = device_of(report, "dev-0").causes[0]
    restart_driver(node)
    node.next(10)
    report = node.check(STUCK, raise_after=3, clear_after=2)
    assert device_of(report, "dev-0").causes == (cause,), "at once, and since it began"
    restart_driver(node)
    assert health_and_codes(node.check(None, raise_after=3, clear_after=2))[0] is Health.UNHEALTHY
    assert health_and_codes(node.check(None, raise_after=3, clear_after=2)) == (Health.HEALTHY, [])
    assert node.state.checkpoint.conditions == ()


@pytest.mark.parametrize(
    "part", [None, DeclaredCpuDevice(parse_cpus("1"), 0, exclusive=False, isolated=False)]
)
def test_stored_check_fault_counts_before_the_first_result(part: DeclaredPart | None) -> None:
    node = Node(part)
    restart_driver(node)
    cause = device_of(node.check(STUCK), "dev-0").causes[0]
    expected = Health.UNHEALTHY, ["fw.stuck", "declared.unseen"]
    report = restart_driver(node)
    assert health_and_codes(report) == expected
    assert device_of(report, "dev-0").causes[0] == cause
    assert health_and_codes(node.next(30)) == expected, "the first run hangs"


def test_stored_degraded_check_fault_is_unknown_before_the_first_result() -> None:
    node = Node()
    restart_driver(node)
    node.check(STUCK._replace(severity=Severity.DEGRADED))
    assert not [device for device in restart_driver(node).devices if device.device == "dev-0"]
    assert health_and_codes(node.next(5)) == (Health.UNKNOWN, ["declared.unseen", "fw.stuck"])


def test_restarts_do_not_prolong_the_probation_of_a_check() -> None:
    node = Node()
    rule = RuleOverride("fw.stuck", probation_s=600)
    node.state = replace(node.state, settings=EngineSettings("node-a", rules=(rule,)))
    restart_driver(node)
    node.check(STUCK)
    node.wait(CLEAN_MIN_NS / NS)
    node.check()
    node.wait(CLEAN_MIN_NS / NS)
    ended_ns, cause = node.now_ns, device_of(node.check(), "dev-0").causes[0]
    for _ in range(3):
        node.wait(100)
        restart_driver(node)
        assert device_of(node.check(), "dev-0").causes == (cause,)
    assert cause.evidence.count("(over; reported until ") == 1
    node.wait(600 - (node.now_ns - ended_ns) / NS)
    node.check()
    assert health_and_codes(node.check()) == (Health.HEALTHY, [])


@pytest.mark.parametrize("boot_id", ["boot-2", ""])
def test_check_finding_of_another_boot_is_not_restored(boot_id: str) -> None:
    node = Node()
    restart_driver(node)
    node.check(STUCK)
    restart_driver(node, boot_id)
    assert health_and_codes(node.check(STUCK, raise_after=3)) == (Health.HEALTHY, [])


def test_finding_of_a_removed_check_ends_with_the_restart() -> None:
    node = Node()
    restart_driver(node)
    node.check(STUCK)
    node.checks.clear()
    restart_driver(node)
    assert health_and_codes(node.check(None, name="other")) == (Health.HEALTHY, [])
    assert node.state.checkpoint.conditions == ()


def test_stored_check_findings_are_limited_to_the_most_severe() -> None:
    conditions: dict[tuple[str, str], Condition] = {}
    for number in range(STORED_MAX + 50):
        severity = Severity.UNHEALTHY if number >= 50 else Severity.DEGRADED
        finding = STUCK._replace(severity=severity)
        conditions[f"check:a/b/dev-{number}", "firmware/fw.stuck"] = Condition(
            ConditionPhase.RAISED, finding, Instant(1, 2.0), 1, 1, 1
        )
    stored = conditions_to_store(conditions)
    assert len(stored) == STORED_MAX
    assert {fault.severity for fault in stored} == {Severity.UNHEALTHY}
    memory = PersistentState(conditions=stored)
    assert decode_gpu_faults(encode_gpu_faults(memory)) == memory


def test_check_is_reported_as_source() -> None:
    report = Node().check(unread="no answer within 2 s")
    source = next(source for source in report.sources if source.name == "check.firmware")
    assert (source.state, source.detail) == ("failing", "no answer within 2 s")


def test_embedding_driver_never_gets_host_devices() -> None:
    node = Node()
    node.devices = ()
    assert not devices_of_socket(node.next(), DRIVER)
    assert devices_of_socket(node.next(), "b.example.com")


# --- faults that the driver reports -------------------------------------------------------------------------


def test_driver_fault_is_unhealthy_with_driver_text() -> None:
    node = Node()
    node.check()
    device = device_of(node.fail(), "dev-0")
    assert (device.health, codes(device)) == (Health.UNHEALTHY, ["driver.failed_device"])
    assert device.message.startswith("driver.failed_device: link down")
    assert device.causes[0].blame is Blame.DRIVER


def test_clean_check_alone_does_not_end_driver_fault() -> None:
    node = Node()
    node.check()
    node.fail()
    assert [health_and_codes(node.check())[0] for _ in range(5)] == [Health.UNHEALTHY] * 5


def test_good_prepare_before_check_does_not_end_driver_fault() -> None:
    node = Node()
    node.check()
    node.fail()
    assert health_and_codes(node.fail(expired=True))[0] is Health.UNHEALTHY
    assert health_and_codes(node.check())[0] is Health.HEALTHY


def test_check_with_finding_does_not_end_driver_fault() -> None:
    node = Node()
    node.check()
    node.fail()
    node.check(STUCK)
    assert codes(device_of(node.fail(expired=True), "dev-0")) == ["fw.stuck", "driver.failed_device"]
    node.check()
    assert health_and_codes(node.check())[0] is Health.HEALTHY


def test_ended_driver_fault_does_not_return_with_another() -> None:
    node = Node()
    node.check()
    node.fail()
    node.check()
    node.fail(expired=True)
    assert health_and_codes(node.next())[0] is Health.HEALTHY
    assert health_and_codes(node.check(STUCK)) == (Health.UNHEALTHY, ["fw.stuck"])


def test_unchecked_device_is_unknown_again_after_good_prepare() -> None:
    node = Node()
    node.next()
    assert health_and_codes(node.fail()) == (Health.UNHEALTHY, ["driver.failed_device", "declared.unchecked"])
    node.next()
    node.fail(expired=True)
    assert health_and_codes(node.next())[0] is Health.UNKNOWN


def test_fault_expired_before_start_is_not_reported() -> None:
    node = Node()
    node.fail(expired=True)
    assert health_and_codes(node.check()) == (Health.HEALTHY, [])


def test_fault_that_survived_restart_is_reported_at_once() -> None:
    node = Node()
    node.faults = ()
    node.end_check(None, name="firmware", raise_after=1, clear_after=1)
    node.read()
    assert health_and_codes(node.fail())[0] is Health.UNHEALTHY


def test_same_code_of_rule_and_driver_is_reported_once() -> None:
    node = Node()
    node.check(STUCK)
    assert health_and_codes(node.fail(code="fw.stuck")) == (Health.UNHEALTHY, ["fw.stuck"])


def test_unread_check_below_raise_count_does_not_end_fault() -> None:
    node = Node()
    node.check(raise_after=3)
    node.fail()
    node.check(unread="no answer within 2 s", raise_after=3)
    assert health_and_codes(node.fail(expired=True)) == (Health.UNHEALTHY, ["driver.failed_device"])
    assert health_and_codes(node.check(raise_after=3))[0] is Health.HEALTHY


def test_pending_check_finding_does_not_end_driver_fault() -> None:
    node = Node()
    node.check(raise_after=3)
    node.fail()
    node.check(STUCK, raise_after=3)
    assert health_and_codes(node.fail(expired=True)) == (Health.UNHEALTHY, ["driver.failed_device"])
    assert health_and_codes(node.check(STUCK, raise_after=3))[0] is Health.UNHEALTHY
    assert health_and_codes(node.check(raise_after=3))[0] is Health.HEALTHY


def test_degraded_check_finding_ends_driver_fault() -> None:
    node = Node()
    node.check(raise_after=3)
    node.fail()
    node.check(STUCK._replace(severity=Severity.DEGRADED), raise_after=3)
    assert health_and_codes(node.fail(expired=True))[0] is Health.HEALTHY


def test_check_before_report_does_not_end_driver_fault() -> None:
    node = Node()
    node.check()
    node.fail()
    node.fail(expired=True)
    assert health_and_codes(node.next(3))[0] is Health.UNHEALTHY
    assert health_and_codes(node.check())[0] is Health.HEALTHY


def test_one_clean_check_ends_driver_fault_for_good() -> None:
    node = Node()
    node.check()
    node.fail()
    node.check()
    node.check(STUCK)
    assert health_and_codes(node.fail(expired=True)) == (Health.UNHEALTHY, ["fw.stuck"])


def test_reused_fault_number_inherits_no_state() -> None:
    """Two instances reported a first fault each, so one of the two faults was renumbered."""
    node = Node()
    node.check()
    node.fail()
    first = node.faults
    node.fail(expired=True)
    node.check()
    node.wait(5)
    node.faults = ()
    node.fail(1, "fw.lost")
    theirs = node.faults
    node.faults = (*theirs, *(fault._replace(number=2, expired_wall_s=node.wall_s) for fault in first))
    assert health_and_codes(node.evaluate()) == (Health.UNHEALTHY, ["fw.lost"])
    node.check()
    assert health_and_codes(node.fail(1, "fw.lost", expired=True))[0] is Health.HEALTHY


def test_renumbered_fault_stays_the_same() -> None:
    node = Node()
    node.check()
    device = device_of(node.fail(), "dev-0")
    node.check()
    node.faults = tuple(fault._replace(number=7) for fault in node.faults)
    assert device_of(node.evaluate(), "dev-0").causes == device.causes
    node.faults = tuple(fault._replace(expired_wall_s=node.wall_s) for fault in node.faults)
    assert health_and_codes(node.evaluate())[0] is Health.HEALTHY


def test_fault_of_undeclared_device_schedules_no_evaluation() -> None:
    node = Node()
    node.devices = ()
    node.next()
    node.fail()
    node.fail(expired=True)
    assert node.state.due_ns is None
    assert "dev-0" not in [device.device for device in node.next().devices]


def test_two_faults_of_a_device_end_separately() -> None:
    node = Node()
    node.check()
    node.fail(1, "fw.stuck")
    node.wait(1)
    node.fail(2, "fw.lost")
    node.check()
    assert health_and_codes(node.fail(1, "fw.stuck", expired=True)) == (Health.UNHEALTHY, ["fw.lost"])
    assert health_and_codes(node.fail(2, "fw.lost", expired=True)) == (Health.HEALTHY, [])


def test_driver_faults_are_marked_and_check_findings_are_not() -> None:
    node = Node()
    node.check(STUCK)
    causes = device_of(node.fail(), "dev-0").causes
    assert [(cause.code, cause.driver_reported) for cause in causes] == [
        ("fw.stuck", False),
        ("driver.failed_device", True),
    ]


def test_redeclared_device_keeps_driver_fault() -> None:
    node = Node()
    node.check()
    node.fail()
    node.devices = ()
    assert health_and_codes(node.next()) == (Health.UNHEALTHY, ["driver.failed_device", "declared.gone"])
    node.devices = ("dev-0",)
    node.next()
    assert health_and_codes(node.check()) == (Health.UNHEALTHY, ["driver.failed_device"])
    assert health_and_codes(node.fail(expired=True))[0] is Health.HEALTHY


def test_repeated_driver_fault_needs_new_check() -> None:
    node = Node()
    node.check()
    node.fail(1)
    node.check()
    node.wait(1)
    node.faults = ()
    node.fail(2)
    assert health_and_codes(node.fail(2, expired=True))[0] is Health.UNHEALTHY
    assert health_and_codes(node.check())[0] is Health.HEALTHY


def test_cleared_device_schedules_its_next_evaluation() -> None:
    node = Node()
    node.check()
    node.fail()
    assert node.state.due_ns is None
    node.fail(expired=True)
    assert node.state.due_ns == node.now_ns + NS


def test_device_with_driver_fault_has_normal_lease() -> None:
    faulty, other = Node(), Node()
    leases = []
    for node in (faulty, other):
        node.check()
        if node is faulty:
            node.fail()
        node.next()
        node.wait(600)
        leases.append([device_of(node.next(), "dev-0").timeout_s for _ in range(3)])
    assert leases[0] == leases[1]


def test_removed_device_with_a_driver_fault_stays_unhealthy() -> None:
    node = Node()
    node.check()
    node.fail()
    node.devices = ()
    assert health_and_codes(node.next()) == (Health.UNHEALTHY, ["driver.failed_device", "declared.gone"])


def test_driver_advice_is_used_if_present() -> None:
    node = Node()
    node.check()
    assert device_of(node.fail(), "dev-0").message.endswith(f"Advice: {FAILED_DEVICE.advice}")
    node.faults = (node.faults[0]._replace(advice="reseat it", reported_wall_s=node.wall_s + 1),)
    assert device_of(node.evaluate(), "dev-0").message.endswith("Advice: reseat it")


def test_host_rules_count_like_checks() -> None:
    node = Node(DeclaredCpuDevice(parse_cpus("1"), 0, exclusive=False, isolated=False))
    node.next()
    node.fail()
    node.set_online("0")
    node.next()
    assert health_and_codes(node.fail(expired=True)) == (
        Health.UNHEALTHY,
        ["cpu.offline", "driver.failed_device"],
    )
    node.set_online("0-1")
    assert health_and_codes(node.next(5)) == (Health.HEALTHY, [])

    node.wait(1)
    node.fail(2)
    node.next()
    node.set_online("0")
    node.next()
    assert health_and_codes(node.fail(2, expired=True)) == (Health.UNHEALTHY, ["cpu.offline"])


# --- checks that restart, and end --------------------------------------------------------------------------


def test_restarted_check_does_not_make_device_healthy() -> None:
    node = Node()
    node.check(STUCK)
    node.checks["firmware"] = node.checks["firmware"]._replace(passes=0, finding=None)
    assert health_and_codes(node.next()) == (Health.UNKNOWN, ["declared.unseen"])
    assert health_and_codes(node.next()) == (Health.UNKNOWN, ["declared.unseen"])
    assert health_and_codes(node.check())[0] is Health.HEALTHY


def test_check_restart_between_evaluations_continues_count() -> None:
    node = Node()
    for _ in range(20):
        node.check(raise_after=3)
    node.check(STUCK, raise_after=3)
    node.checks.clear()
    node.wait(1)
    healths = [health_and_codes(node.check(STUCK, raise_after=3))[0] for _ in range(2)]
    assert healths == [Health.HEALTHY, Health.UNHEALTHY]


def test_removed_check_removes_its_findings() -> None:
    node = Node()
    node.check(STUCK, name="firmware", clear_after=3)
    node.check(name="heat", clear_after=3)
    del node.checks["firmware"]
    assert health_and_codes(node.next()) == (Health.HEALTHY, [])
    node.checks.clear()
    assert health_and_codes(node.next()) == (Health.UNKNOWN, ["declared.unchecked"])


def test_unread_pass_between_bad_passes_keeps_their_count() -> None:
    node = Node()
    node.check(raise_after=2)
    passes = [(STUCK, ""), (None, "no answer"), (STUCK, "")]
    healths = [health_and_codes(node.check(finding, unread, raise_after=2))[0] for finding, unread in passes]
    assert healths == [Health.HEALTHY, Health.HEALTHY, Health.UNHEALTHY]


def test_unread_pass_between_good_passes_resets_their_count() -> None:
    node = Node()
    node.check(STUCK, clear_after=3)
    for finding, unread in ((None, ""), (None, ""), (None, "no answer"), (None, ""), (None, "")):
        assert health_and_codes(node.check(finding, unread, clear_after=3))[0] is not Health.HEALTHY
    assert "fw.stuck" not in health_and_codes(node.check(clear_after=3))[1]


def test_info_finding_keeps_device_healthy_and_is_not_sent() -> None:
    for severity in (Severity.OK, Severity.INFO):
        device = device_of(Node().check(STUCK._replace(severity=severity)), "dev-0")
        assert (device.health, device.message) == (Health.HEALTHY, "")


def test_same_code_of_two_checks_is_two_separate_causes() -> None:
    node = Node()
    node.check(STUCK, name="firmware")
    assert health_and_codes(node.check(STUCK, name="heat")) == (Health.UNHEALTHY, ["fw.stuck", "fw.stuck"])
    assert health_and_codes(node.check(name="firmware"))[0] is Health.UNHEALTHY
    node.check(name="firmware")
    assert health_and_codes(node.next()) == (Health.UNHEALTHY, ["fw.stuck"])
    node.check(name="heat")
    assert health_and_codes(node.check(name="heat")) == (Health.HEALTHY, [])


@pytest.mark.parametrize("code", ["a/b", "!", "firmware/x", "declared.unchecked", "cpu.offline", "\u00e4 b"])
def test_any_code_is_reported_unchanged_and_clears(code: str) -> None:
    node = Node(DeclaredCpuDevice(parse_cpus("1"), 0, exclusive=False, isolated=False))
    shown = "check.firmware.unreadable" if code == "!" else code
    assert health_and_codes(node.check(STUCK._replace(code=code))) == (Health.UNHEALTHY, [shown])
    node.check()
    assert health_and_codes(node.check()) == (Health.HEALTHY, [])


def test_finding_without_advice_has_none() -> None:
    message = device_of(Node().check(STUCK._replace(advice="")), "dev-0").message
    assert message == "fw.stuck: firmware does not answer"


def test_host_part_keeps_check_finding_until_next_pass() -> None:
    node = Node(DeclaredCpuDevice(parse_cpus("1"), 0, exclusive=False, isolated=False))
    for _ in range(5):
        node.check(STUCK)
    node.checks["firmware"] = node.checks["firmware"]._replace(passes=0, finding=None)
    assert [health_and_codes(node.next()) for _ in range(4)] == [(Health.UNHEALTHY, ["fw.stuck"])] * 4
    node.check()
    assert health_and_codes(node.check()) == (Health.HEALTHY, [])


def test_redeclared_device_drops_check_findings() -> None:
    node = Node(DeclaredCpuDevice(parse_cpus("1"), 0, exclusive=False, isolated=False))
    node.check(STUCK)
    node.part = DeclaredCpuDevice(parse_cpus("0"), 0, exclusive=False, isolated=False)
    assert health_and_codes(node.check()) == (Health.HEALTHY, [])


def test_check_source_has_worst_state_and_oldest_time() -> None:
    def sample(name: str, unread: str, passes: int, beat_ns: int) -> DriverCheckSample:
        return DriverCheckSample("link", f"{DRIVER}/node-a/{name}", None, unread, passes, beat_ns, NS, 1, 1)

    well, first, bad = sample("a", "", 9, 100), sample("b", "", 0, 50), sample("c", "hung", 7, 70)
    (source,) = health_check_sources([well, bad], Instant(0, 0.0))
    assert (source.state, source.beat_ns, source.passes) == (SourceState.FAILING, 70, 7)
    assert (source.detail, source.vital) == ("hung", False)
    (source,) = health_check_sources([well, first], Instant(0, 0.0))
    assert (source.state, source.beat_ns, source.passes) == (SourceState.OK, 50, 0)
    (source,) = health_check_sources([first], Instant(0, 0.0))
    assert source.state is SourceState.STARTING


def test_undeliverable_device_is_unknown_until_available() -> None:
    node = Node()
    node.check()
    device = DeviceRef(DRIVER, "node-a", "dev-0")
    unknown = DriverFault(
        1, device, "api.forbidden", "403", "", node.wall_s, CLAIM, health=Health.UNKNOWN, keep_away=False
    )
    node.faults = (unknown,)
    found = device_of(node.evaluate(), "dev-0")
    assert (found.health, found.severity, codes(found)) == (
        Health.UNKNOWN,
        Severity.UNKNOWN,
        ["api.forbidden"],
    )
    assert not found.causes[0].keep_away
    node.check()
    node.faults = (unknown._replace(expired_wall_s=node.wall_s),)
    assert health_and_codes(node.check()) == (Health.HEALTHY, [])


def test_gpu_driver_fault_of_one_prepare_reaches_all_its_devices() -> None:
    node = Node()
    node.devices = tuple(f"dev-{number}" for number in range(8))
    node.check()
    fault = DriverFault(
        1, DeviceRef(DRIVER, "node-a", "dev-3"), "gpu.driver.mismatch", "570 and 580", "", node.wall_s, CLAIM,
        health=Health.UNKNOWN,
    )  # fmt: skip
    node.faults = (fault,)
    report = node.evaluate()
    found = {name: device_of(report, name) for name in node.devices}
    for device in found.values():
        (cause,) = [cause for cause in device.causes if cause.code == "gpu.driver.mismatch"]
        assert (device.health, cause.keep_away) == (Health.UNKNOWN, True)
    state = decide_taints(TaintState(), report, DRIVER, TaintPolicy(), Instant(NS, 1.0))
    taints = {ref.device: {taint.key for taint in held} for ref, held in state.taints.devices.items()}
    assert taints == {name: {f"{DRIVER}/gpu.driver.mismatch"} for name in node.devices}
    node.faults = (fault._replace(code="driver.failed_device"),)
    report = node.evaluate()
    assert "driver.failed_device" in codes(device_of(report, "dev-3"))
    assert "driver.failed_device" not in codes(device_of(report, "dev-4"))


def test_taint_of_a_failed_prepare_joins_the_cause_of_a_check() -> None:
    node = Node()
    node.check(Finding("gpu.driver.mismatch", Severity.UNKNOWN, "570 and 580"))
    device = DeviceRef(DRIVER, "node-a", "dev-0")
    node.faults = (
        DriverFault(1, device, "gpu.driver.mismatch", "?", "", node.wall_s, CLAIM, health=Health.UNKNOWN),
    )
    (cause,) = device_of(node.evaluate(), "dev-0").causes
    assert (cause.evidence, cause.driver_reported, cause.keep_away) == ("570 and 580", False, True)


def test_known_fault_stays_while_device_is_undeliverable() -> None:
    node = Node()
    node.check(STUCK)
    device = DeviceRef(DRIVER, "node-a", "dev-0")
    node.faults = (DriverFault(1, device, "fw.stuck", "?", "", node.wall_s, CLAIM, health=Health.UNKNOWN),)
    assert health_and_codes(node.evaluate()) == (Health.UNHEALTHY, ["fw.stuck"])
