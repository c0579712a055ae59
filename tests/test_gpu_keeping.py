"""What outlives the agent: faults go on over a restart, some over a boot, none to another GPU."""

from dataclasses import replace

import pytest
from paper import device_of
from paper_gpus import FIRST_BOOT, OLD_DRIVER, SECOND_BOOT, THIRD_BOOT, GpuNode

from agent.health.gpu.faults.checkpoint import KEPT_MAX, keep, restore
from agent.model.faults import Cure, FaultMemory, KeptFault, KnownGpu
from agent.model.gpu import WHOLE_GPU, Status
from agent.model.health import Health, Severity, XidOverride
from agent.model.settings import GpuLimits
from agent.model.source import SourceState
from agent.model.time import Instant
from agent.store.faults import SIZE_MAX, decode, encode

INSTANCES = ("gpu-0-mig-1-0", "gpu-0-mig-2-0")


def told(node: GpuNode, name: str = "gpu-0") -> object:
    """What somebody outside sees of a device, but for when it was verified."""
    device = node.now_says(name)
    causes = [(cause, round(cause.since.wall_s)) for cause in device.causes if cause.severity > Severity.INFO]
    return (
        device.health,
        device.message,
        round(device.since.wall_s),
        [(replace(cause, since=Instant(0, 0.0)), since_s) for cause, since_s in causes],
    )


# --- the same boot ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("away_s", [0.1, 5.0, 7200.0])
@pytest.mark.parametrize("code", [48, 62, 79, 119])
def test_an_agent_that_restarts_in_the_middle_of_a_fault_says_the_same_at_once(
    code: int, away_s: float
) -> None:
    node = GpuNode()
    node.rest(3)
    node.answer(0, recovery_action=1)
    node.xid(0, code)
    node.rest(30)
    before = told(node)
    node.restart(away_s=away_s, looks=False)
    first = node.look()
    assert device_of(first, "gpu-0").health is Health.UNHEALTHY
    assert told(node)[:1] == before[:1]
    node.next()
    assert [c.since.wall_s for c in node.now_says().causes if c.code == f"gpu.xid.{code}"] == pytest.approx(
        [since for cause, since in before[3] if cause.code == f"gpu.xid.{code}"], abs=1
    )


def test_the_first_words_of_a_restarted_agent_are_the_last_of_the_one_before() -> None:
    node = GpuNode()
    node.rest(100)
    node.xid(0, 79)
    node.rest(20)
    before = told(node)
    node.restart()
    assert told(node) == before


def test_what_was_bad_for_several_reasons_is_not_less_so_after_a_restart() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    for _ in range(2):
        node.xid(0, 94)
        node.rest(100)
    before = node.now_says()
    assert before.health is Health.UNHEALTHY, "it comes again and again"
    node.restart()
    assert (node.now_says().message, node.health()) == (before.message, Health.UNHEALTHY)
    node.rest(1000)
    assert (node.now_says().message, node.health()) == (before.message, Health.UNHEALTHY)


def test_a_switchs_line_is_judged_as_it_was() -> None:
    node = GpuNode()
    node.rest(1)
    node.log("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 11004, Fatal, something without a port")
    before = told(node)
    assert node.health() is Health.UNHEALTHY
    node.restart()
    node.rest(100)
    assert told(node) == before


def test_a_second_boots_fault_is_suspected_of_the_hardware_after_a_restart_too() -> None:
    node = GpuNode()
    node.xid(0, 79)
    node.look()
    node.restart(boot_id=SECOND_BOOT, away_s=20 * 86_400)
    node.rest(100)
    node.xid(0, 79)
    before = node.cause("gpu.xid.79").advice
    node.restart()
    assert node.cause("gpu.xid.79").advice == before


def test_old_lines_do_not_raise_what_is_over() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.answer(0, ecc_correctable=5)
    node.next()
    node.xid(0, 46)
    node.rest(20)
    node.reset(0)
    node.rest(100)
    assert node.codes() == []
    for _ in range(3):
        node.restart(away_s=60)
        node.rest(30)
        assert node.codes() == []


def test_lines_of_while_it_was_away_do() -> None:
    node = GpuNode()
    node.rest(5)
    node.line(0, 79)
    node.restart()
    assert node.codes() == ["gpu.xid.79"]
    assert node.times(0, 79) == 1


def test_the_same_fault_again_while_it_was_away_raises_what_was_over() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.answer(0, ecc_correctable=5)
    node.next()
    node.xid(0, 46)
    node.next()
    node.reset(0)
    node.rest(100)
    assert node.codes() == []
    node.line(0, 46)
    node.restart(away_s=30)
    assert node.codes() == ["gpu.xid.46"]


def test_a_restart_in_probation_is_no_amnesty() -> None:
    node = GpuNode()
    node.xid(0, 48)
    node.look()
    node.rest(30)
    assert node.health() is Health.UNHEALTHY
    node.restart()
    assert node.health() is Health.UNHEALTHY
    node.rest(75)
    assert node.health() is Health.HEALTHY
    node.restart()
    assert (node.health(), node.codes()) == (Health.HEALTHY, [])


def test_an_old_line_that_nvml_had_given_to_an_instance_does_not_become_the_whole_gpus() -> None:
    node = GpuNode(migs={0: [(1, 0), (2, 0)]})
    node.answer(0, recovery_action=1)
    node.xid(0, 48, 1, 0)
    node.rest(10)
    node.restart()
    node.reset(0)
    assert "gpu.xid.48" in node.codes(INSTANCES[0])
    assert "gpu.xid.48" not in node.codes(INSTANCES[1])
    assert node.cause("gpu.xid.48").severity is Severity.INFO


def test_a_line_that_the_last_life_had_no_time_to_count_is_its_events_and_no_news() -> None:
    node = GpuNode(migs={0: [(1, 0), (2, 0)]})
    node.event(0, 46, 1, 0)
    node.look()
    node.line(0, 46)
    node.restart()
    assert node.times(0, 46) == 1
    assert [node.health(name) for name in INSTANCES] == [Health.UNHEALTHY, Health.HEALTHY]


def test_instances_are_known_before_nvml_is() -> None:
    node = GpuNode(migs={0: [(1, 0), (2, 0)]})
    node.xid(0, 79)
    node.event(1, 46)
    node.rest(5)
    since = node.cause("gpu.xid.79", INSTANCES[1]).since.wall_s
    node.restart(looks=False)
    node.nvml = node.nvml._replace(state=SourceState.STARTING, passes=0)
    node.look()
    assert [node.health(name) for name in INSTANCES] == [Health.UNHEALTHY] * 2
    assert node.cause("gpu.xid.79", INSTANCES[1]).since.wall_s == pytest.approx(since, abs=0.01)


def test_a_reset_while_the_agent_was_away_is_found_by_the_drivers_word() -> None:
    node = GpuNode()
    node.answer(0, recovery_action=1)
    node.xid(0, 46)
    node.rest(20)
    node.reset(0)
    node.restart(away_s=120)
    assert node.health() is Health.UNHEALTHY
    node.rest(80)
    assert node.health() is Health.HEALTHY


# --- another boot, another GPU ------------------------------------------------------------------------------


def beyond_repair() -> GpuNode:
    node = GpuNode()
    node.answer(0, remap_failure=1)
    node.xid(0, 64)
    node.rest(5)
    return node


def test_what_only_a_replacement_mends_survives_boots() -> None:
    node = beyond_repair()
    before = node.cause("gpu.xid.64")
    for boot in (SECOND_BOOT, THIRD_BOOT):
        node.restart(boot_id=boot, away_s=86_400)
        after = node.cause("gpu.xid.64")
        assert (after.evidence, after.advice, after.severity) == (
            before.evidence,
            before.advice,
            before.severity,
        )
        assert after.since.wall_s == pytest.approx(before.since.wall_s, abs=1)
        node.rest(3600)
        assert node.health() is Health.UNHEALTHY


def test_a_boot_in_which_nvml_does_not_open_forgets_nothing() -> None:
    node = beyond_repair()
    node.restart(boot_id=SECOND_BOOT, looks=False)
    node.nvml = node.nvml._replace(state=SourceState.STARTING, passes=0)
    node.library |= {"call": "nvmlInit_v2", "call_ns": node.now_ns}
    node.rest(100)
    assert node.kept.faults[0].cure is Cure.REPLACE
    node.nvml = node.nvml._replace(state=SourceState.OK)
    node.library |= {"call": "", "call_ns": 0}
    node.restart(boot_id=THIRD_BOOT)
    assert "gpu.xid.64" in node.codes()


@pytest.mark.parametrize("boot_id", ["", SECOND_BOOT])
def test_another_gpu_in_its_place_does_not_inherit_it(boot_id: str) -> None:
    node = beyond_repair()
    node.change(0, uuid="GPU-new", serial="new")
    node.reset(0)
    node.answer(0, remap_failure=0)
    node.restart(boot_id=boot_id, looks=False)
    if boot_id == "":
        assert node.kmsg is not None
        node.kmsg.forget()
    node.next()
    assert (node.health(), node.codes()) == (Health.HEALTHY, [])
    assert dict(node.now_says().attributes)["uuid"] == "GPU-new"
    node.rest(5)
    assert [one for one in node.kept.faults if not one.healed] == []


def test_the_operators_word_ends_what_only_a_replacement_would() -> None:
    node = beyond_repair()
    node.settings = replace(node.settings, gpu=GpuLimits(xids=((64, XidOverride.IGNORE),)))
    node.answer(0, remap_failure=0)
    node.restart()
    node.rest(80)
    assert (node.health(), node.codes()) == (Health.HEALTHY, [])


def test_a_fault_goes_with_its_gpu_to_another_slot() -> None:
    node = beyond_repair()
    one, other = node.gpus[0], node.gpus[1]
    node.gpus[0] = replace(other, index=0, bus=one.bus)
    node.gpus[1] = replace(one, index=1, bus=other.bus)
    node.restart(boot_id=SECOND_BOOT)
    assert dict(node.now_says("gpu-0").attributes)["uuid"] == one.uuid
    assert "gpu.xid.64" in node.codes("gpu-0")
    assert node.codes("gpu-1") == []


def test_without_a_boot_id_nothing_is_taken_for_cured_by_a_boot() -> None:
    node = GpuNode()
    node.xid(0, 79)
    node.look()
    node.boot_id = ""
    node.restart()
    node.rest(300)
    assert node.health() is Health.UNHEALTHY


@pytest.mark.parametrize("step_s", [-86_400.0, 86_400.0])
def test_a_wall_clock_that_steps_while_nobody_looks_changes_no_verdict(step_s: float) -> None:
    steady, stepped = GpuNode(readings=OLD_DRIVER), GpuNode(readings=OLD_DRIVER)
    for node in (steady, stepped):
        node.xid(0, 94)
        node.rest(100)
        node.xid(0, 79)
        node.rest(100)
    stepped.wall_s += step_s
    for node in (steady, stepped):
        node.restart(away_s=60)
    for _ in range(10):
        assert told(steady)[:2] == told(stepped)[:2]
        steady.rest(60)
        stepped.rest(60)


# --- the file -----------------------------------------------------------------------------------------------


def test_counts_alone_are_the_only_thing_that_moves_in_the_file() -> None:
    node = GpuNode()
    node.xid(0, 79)
    node.look()
    before = node.kept
    node.rest(60)
    assert node.kept is before
    node.xid(0, 79)
    node.look()
    assert node.kept != before


def test_what_is_only_worth_knowing_is_not_in_the_file() -> None:
    node = GpuNode()
    node.xid(0, 13)
    node.xid(1, 79)
    node.look()
    assert [one.code for one in node.kept.faults] == ["gpu.xid.79"]


def test_the_file_is_never_larger_than_it_may_be() -> None:
    node = GpuNode(15, readings=OLD_DRIVER)
    text = "x" * 200
    for burst in range(16):
        for number in range(15):
            for code in range(1000, 1064):
                node.line(number, code, f"pid={burst}, name=python, {text}")
        node.look()
        node.wait(61)
    assert len(node.kept.faults) == KEPT_MAX
    assert len(encode(node.kept)) < SIZE_MAX


def test_a_gpu_without_a_name_has_no_place_in_the_file() -> None:
    node = GpuNode(1)
    node.change(0, uuid="", bus="", name="")
    fresh = GpuNode(1)
    fresh.gpus = node.gpus
    fresh.restart()
    assert fresh.kept.gpus[-1].uuid != ""


def kept_fault(**fields: object) -> KeptFault:
    plain = KeptFault(
        uuid="GPU-0", code="gpu.xid.79", gi=WHOLE_GPU, ci=WHOLE_GPU, times=1, first_wall_s=1e9,
        last_wall_s=1e9, log_us=1, boot_id=FIRST_BOOT, cure=Cure.REBOOT, healed=False, evidence="",
        advice="", severity=4,
    )  # fmt: skip
    return plain._replace(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"code": "gpu.xid."},
        {"code": "gpu.xid.many"},
        {"code": "gpu.fabric.sxid.²"},
        {"code": "gpu.lost"},
        {"code": "cpu.offline"},
        {"code": ""},
        {"uuid": "GPU-of-another-node"},
    ],
)
def test_what_this_version_does_not_know_is_left_out(fields: dict[str, object]) -> None:
    memory = FaultMemory((KnownGpu(0, "GPU-0", "", ""),), (kept_fault(**fields),))
    restored = restore(decode(encode(memory)), FIRST_BOOT, GpuLimits(), Instant(10**12, 1.7e9))
    assert (restored.faults.faults, restored.tracks) == ({}, {})


@pytest.mark.parametrize("wall_s", [-1e300, 0.0, 1e18, 1e300])
def test_times_that_cannot_be_are_survived(wall_s: float) -> None:
    memory = FaultMemory(
        (KnownGpu(0, "GPU-0", "", ""),),
        (kept_fault(first_wall_s=wall_s, last_wall_s=wall_s, bursts_wall_s=(wall_s,)),),
    )
    now = Instant(10**12, 1.7e9)
    restored = restore(decode(encode(memory)), FIRST_BOOT, GpuLimits(), now)
    (fault,) = restored.faults.faults.values()
    assert 0 <= fault.first.wall_s <= now.wall_s
    assert keep(restored.faults, {}, memory.gpus, {}).gpus == memory.gpus


def test_a_lost_gpu_is_not_forgotten_by_the_file() -> None:
    node = GpuNode()
    node.lose(0)
    node.xid(0, 79)
    node.rest(5)
    node.restart(looks=False)
    node.change(0, uuid="", bus="", name="", serial="", status=Status.LOST)
    node.next()
    assert node.codes("gpu-0")[:1] in (["gpu.lost"], ["gpu.xid.79"])
    assert dict(node.now_says("gpu-0").attributes)["uuid"] == "GPU-00000000"
