"""What ends a fault: the driver's silence, a reset that was seen, a new boot, time; and what does not."""

import pytest
from gpu_samples import H100
from paper_gpus import OLD_DRIVER, SECOND_BOOT, THIRD_BOOT, GpuNode

from agent.model.gpu import GpuEvent, Status
from agent.model.health import Blame, Health, Severity
from agent.model.source import SourceState
from agent.model.time import NS

UNTIL_RESET = (46, 62, 64)
UNTIL_REBOOT = (79, 54)
H100_LINKS = (1 << 18) - 1


def seconds_until_healthy(node: GpuNode, name: str = "gpu-0", limit_s: int = 300) -> int:
    """How long the device stays what it is, to the second."""
    start_ns = node.now_ns
    while node.health(name) is not Health.HEALTHY:
        assert node.now_ns - start_ns < limit_s * NS, f"{name} is not healthy after {limit_s} s"
        node.rest(1)
    return round((node.now_ns - start_ns) / NS)


# --- the driver asks for nothing ----------------------------------------------------------------------------


def test_a_driver_that_asks_for_nothing_heals_after_ten_seconds_and_then_comes_the_probation() -> None:
    node = GpuNode()
    node.xid(0, 48)
    node.look()
    node.rest(9)
    assert not any(fault.healed for fault in node.state.gpus.log.faults.values())
    assert 10 + 60 <= 9 + seconds_until_healthy(node) <= 10 + 60 + 5


def test_ten_seconds_count_from_the_last_time() -> None:
    node = GpuNode()
    for _ in range(5):
        node.xid(0, 48)
        node.look()
        node.rest(8)
    assert not any(fault.healed for fault in node.state.gpus.log.faults.values())


@pytest.mark.parametrize("pending", ["remap_pending", "remap_failure"])
def test_while_a_row_waits_nothing_heals(pending: str) -> None:
    node = GpuNode()
    node.answer(0, **{pending: 1})
    node.xid(0, 48)
    node.rest(600)
    assert "gpu.xid.48" in node.codes()
    node.reset(0)
    node.answer(0, **{pending: 0})
    assert seconds_until_healthy(node) <= 10 + 60 + 5


def test_while_the_driver_asks_for_something_nothing_heals() -> None:
    node = GpuNode()
    node.answer(0, recovery_action=1)
    node.xid(0, 48)
    node.rest(3600)
    assert node.codes() == ["gpu.recovery_action", "gpu.xid.48"]
    node.reset(0)
    assert 60 <= seconds_until_healthy(node) <= 66


def test_a_driver_that_cannot_be_asked_has_not_said_none() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.xid(0, 48)
    node.rest(3600)
    assert node.health() is Health.UNHEALTHY


def test_silence_of_before_the_fault_says_nothing_of_it() -> None:
    node = GpuNode()
    node.xid(0, 119)
    node.hang(0)
    node.rest(40)
    assert not any(fault.healed for fault in node.state.gpus.log.faults.values())
    node.return_from_hang(0)
    node.rest(2)
    assert all(fault.healed for fault in node.state.gpus.log.faults.values())


# --- probation ----------------------------------------------------------------------------------------------


def test_a_new_fault_in_probation_is_raised_at_once_and_all_starts_over() -> None:
    node = GpuNode()
    node.xid(0, 48)
    node.look()
    node.rest(40)
    (fault,) = node.state.gpus.log.faults.values()
    assert fault.healed, "in probation"
    node.xid(0, 95)
    assert node.codes()[0] in ("gpu.xid.48", "gpu.xid.95")
    assert 70 <= seconds_until_healthy(node) <= 76


def test_the_same_fault_in_probation_is_counted_as_another_burst() -> None:
    node = GpuNode()
    node.xid(0, 48)
    node.look()
    node.rest(75)
    node.xid(0, 48)
    node.look()
    (fault,) = node.state.gpus.log.faults.values()
    assert (fault.times, len(fault.bursts), fault.healed) == (1, 2, None)
    assert 70 <= seconds_until_healthy(node) <= 76


def test_a_condition_that_comes_and_goes_does_not_make_the_verdict_flap() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.xid(0, 94)
    assert node.cause("gpu.xid.94").severity is Severity.DEGRADED
    for pending in (1, 0, 1, 0):
        node.answer(0, remap_pending=pending)
        node.rest(4)
        assert node.cause("gpu.xid.94").severity is Severity.UNHEALTHY
    assert 50 <= seconds_until_healthy(node) <= 66
    assert node.cause("gpu.xid.94").severity is Severity.DEGRADED


# --- a reset ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", UNTIL_RESET)
def test_what_only_a_reset_ends_does_not_end_because_the_driver_is_silent(code: int) -> None:
    node = GpuNode()
    node.xid(0, code)
    node.rest(3600)
    assert node.health() is Health.UNHEALTHY


@pytest.mark.parametrize("code", UNTIL_RESET)
def test_volatile_counters_that_fell_are_a_reset(code: int) -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.answer(0, ecc_correctable=7)
    node.next()
    node.xid(0, code)
    node.next(2)
    node.reset(0)
    assert seconds_until_healthy(node) <= 66


@pytest.mark.parametrize("code", UNTIL_RESET)
def test_an_action_that_is_no_longer_asked_for_was_done(code: int) -> None:
    node = GpuNode()
    node.xid(0, code)
    node.answer(0, recovery_action=1)
    node.rest(20)
    node.answer(0, recovery_action=0)
    assert seconds_until_healthy(node) <= 66


@pytest.mark.parametrize("code", UNTIL_RESET)
def test_a_driver_that_came_anew_has_reset_every_gpu(code: int) -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.xid(0, code)
    node.rest(20)
    node.reload()
    assert seconds_until_healthy(node) <= 66


def test_a_fault_of_after_the_reload_is_not_ended_by_it() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.reload()
    node.next(3)
    node.xid(0, 46)
    node.rest(300)
    assert node.health() is Health.UNHEALTHY


def test_a_driver_that_no_longer_asks_for_the_reset_has_had_it() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.xid(0, 46)
    node.lose(0, Status.RESET_REQUIRED)
    node.rest(20)
    node.find(0, OLD_DRIVER)
    assert seconds_until_healthy(node) <= 66


def test_the_reset_of_one_gpu_ends_nothing_of_another() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    for number in (0, 1):
        node.answer(number, ecc_correctable=7)
        node.xid(number, 46)
    node.next(2)
    node.reset(1)
    assert seconds_until_healthy(node, "gpu-1") <= 66
    assert node.health("gpu-0") is Health.UNHEALTHY


def test_what_all_gpus_share_ends_when_the_last_was_reset() -> None:
    node = GpuNode(2)
    for number in (0, 1):
        node.answer(number, ecc_correctable=7)
    node.next()
    node.log("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up")
    node.next()
    node.reset(0)
    node.rest(200)
    assert node.codes("gpu-0") == node.codes("gpu-1") == ["gpu.fabric.sxid.20034"]
    node.reset(1)
    node.rest(15)
    assert node.codes("gpu-0") == node.codes("gpu-1") == []


def test_what_came_before_the_agent_ends_by_the_drivers_word() -> None:
    for code in (*UNTIL_RESET, 48):
        node = GpuNode()
        node.restart()
        node.line(0, code)
        node.restart(away_s=3600)
        node.rest(90)
        assert node.health() is Health.HEALTHY, code


# --- a boot -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", UNTIL_REBOOT)
def test_what_only_a_boot_ends_no_reset_ends(code: int) -> None:
    node = GpuNode()
    node.answer(0, ecc_correctable=7)
    node.next()
    node.xid(0, code)
    node.next()
    node.reset(0)
    node.reload()
    node.rest(3600)
    assert node.health() is Health.UNHEALTHY
    node.restart()
    node.rest(3600)
    assert node.health() is Health.UNHEALTHY
    node.restart(boot_id=SECOND_BOOT, away_s=120)
    assert node.health() is Health.UNHEALTHY, "it has its probation before it"
    assert 60 <= seconds_until_healthy(node) <= 66


def test_a_gpu_that_fell_off_the_bus_in_two_boots_is_suspected_of_its_hardware() -> None:
    node = GpuNode()
    node.xid(0, 79)
    first = node.cause("gpu.xid.79")
    node.restart(boot_id=SECOND_BOOT, away_s=20 * 86_400)
    node.rest(3600)
    assert node.health() is Health.HEALTHY
    node.xid(0, 79)
    again = node.cause("gpu.xid.79")
    assert (first.blame, again.blame) == (Blame.HARDWARE, Blame.HARDWARE)
    assert "reseat or replace" in again.advice
    assert "reseat or replace" not in first.advice
    assert again.evidence != first.evidence


def test_after_thirty_days_it_is_chance_again() -> None:
    node = GpuNode()
    node.xid(0, 79)
    first = node.cause("gpu.xid.79")
    node.restart(boot_id=SECOND_BOOT, away_s=31 * 86_400)
    node.rest(3600)
    node.xid(0, 79)
    again = node.cause("gpu.xid.79")
    assert (again.evidence, again.advice) == (first.evidence, first.advice)


def test_a_boot_in_which_nothing_happened_is_not_counted() -> None:
    node = GpuNode()
    node.xid(0, 79)
    node.look()
    node.restart(boot_id=SECOND_BOOT, away_s=60)
    node.rest(100)
    node.restart(boot_id=THIRD_BOOT, away_s=60)
    node.rest(100)
    node.xid(0, 79)
    node.look()
    (fault,) = node.state.gpus.log.faults.values()
    assert fault.earlier_boots == 1


# --- time ---------------------------------------------------------------------------------------------------


def test_what_is_only_worth_knowing_is_told_for_ten_minutes() -> None:
    node = GpuNode()
    node.xid(0, 13)
    node.look()
    node.rest(590)
    assert node.codes() == ["gpu.xid.13"]
    node.rest(20)
    assert node.codes() == []


def test_a_storm_of_correctable_errors_is_told_for_ten_minutes_after_its_last() -> None:
    node = GpuNode()
    node.tell(0, GpuEvent.SINGLE_BIT_ECC_STORM)
    node.look()
    node.rest(500)
    node.tell(0, GpuEvent.SINGLE_BIT_ECC_STORM)
    node.look()
    node.rest(500)
    assert node.codes() == ["gpu.ecc.storm"]
    node.rest(110)
    assert node.codes() == []


def test_links_that_are_all_up_again_end_what_brought_them_down() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.answer(0, links_up=0b1)
    node.xid(0, 155)
    node.rest(300)
    assert node.health() is Health.UNHEALTHY
    node.answer(0, links_up=H100_LINKS)
    assert seconds_until_healthy(node) <= 90


def test_nothing_heals_while_nobody_can_ask_the_library() -> None:
    node = GpuNode()
    node.xid(0, 48)
    node.look()
    node.nvml = node.nvml._replace(state=SourceState.FAILING)
    node.lose(0, Status.UNINITIALIZED)
    node.rest(3600)
    assert node.health() is Health.UNHEALTHY
    node.nvml = node.nvml._replace(state=SourceState.OK)
    node.find(0, H100)
    assert seconds_until_healthy(node) <= 10 + 60 + 30
