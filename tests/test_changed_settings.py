"""Changed settings between two steps: faults stay, limits apply at once, and no device becomes Unknown."""

from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper import PaperNode, codes, device_of, node_sample, pool_sample
from paper_gpus import GpuNode

from agent.engine.step import with_settings
from agent.health.host.memory.edac import EdacState, ErrorTotal
from agent.health.host.memory.rules import MemoryRuleState
from agent.health.host.nic.state import NicPortCounters, NicRuleState, _NicPortState, _NicState
from agent.health.host.verdicts import HostRuleState
from agent.health.rate_window import CounterPoint, RateWindow, WindowedCounter
from agent.health.rules import CounterGrowth
from agent.health.state_updates import host_with_settings
from agent.model.cpuset import parse_cpus
from agent.model.declared_devices import DeclaredNicDevice
from agent.model.health import Health, XidOverride
from agent.model.settings import EngineSettings, GpuLimits, HostLimits
from agent.model.time import NS

CPU: Final = "cpu-node0"
POOL: Final = "hugepages-2mi-node0"
GIB_POOL: Final = "hugepages-1gi-node0"
THROTTLED: Final = "cpu.throttled.core"


def change(node: PaperNode, **settings: Any) -> None:
    """Change settings of the engine between two steps."""
    node.state = with_settings(node.state, replace(node.state.settings, **settings), node.now)


def change_gpu(node: GpuNode, **limits: Any) -> None:
    """Change limits of the GPU rules between two steps."""
    change(node, gpu=replace(node.state.settings.gpu, **limits))


def throttled_node(**settings: Any) -> PaperNode:
    """Return a node whose CPUs have been observed for two minutes, and then have 6 throttle events."""
    node = PaperNode(EngineSettings("node-a", **settings))
    node.states = {}
    node.nodes[0] = node_sample(core=0, package=0)
    node.next(120)
    node.nodes[0] = node_sample(core=6, package=0)
    return node


# --- limits -------------------------------------------------------------------------------------------------


def test_lower_limit_finds_a_fault_in_the_next_evaluation() -> None:
    node = throttled_node()
    assert codes(device_of(node.next(), CPU)) == []
    change(node, throttle_events=5)
    assert codes(device_of(node.evaluate(), CPU)) == [THROTTLED]


def test_higher_limit_clears_a_fault_as_usual() -> None:
    node = throttled_node(throttle_events=5)
    assert codes(device_of(node.next(), CPU)) == [THROTTLED]
    change(node, throttle_events=7)
    assert codes(device_of(node.evaluate(), CPU)) == [THROTTLED], "one clean pass never suffices"
    assert codes(device_of(node.next(3), CPU)) == []


def test_raised_fault_stays_until_a_shorter_window_is_full() -> None:
    node = throttled_node(throttle_events=5)
    node.next()
    change(node, throttle_window_s=20)
    assert codes(device_of(node.next(19), CPU)) == [THROTTLED], "the growth within 20 s is not known yet"
    assert codes(device_of(node.next(5), CPU)) == []


def test_longer_window_counts_earlier_events() -> None:
    node = throttled_node(throttle_window_s=120)
    node.next(30)
    change(node, throttle_events=6, throttle_window_s=600)
    assert codes(device_of(node.evaluate(), CPU)) == [THROTTLED]


def test_lease_of_the_next_report_is_the_changed_one() -> None:
    node = PaperNode()
    before = device_of(node.next(), CPU).timeout_s
    change(node, lease_s=90)
    assert device_of(node.evaluate(), CPU).timeout_s - before == 90 - 30


POINTS: Final = tuple(CounterPoint(at_s * NS, value) for value, at_s in enumerate((0, 600, 1200)))


def host_with_counters() -> HostRuleState:
    """Return the state of a host with one memory module and one NIC, whose counters have three points."""
    counter = WindowedCounter(POINTS, CounterGrowth(2, 1200.0))
    port = _NicPortState(0, counters=NicPortCounters(*5 * [counter]))
    nics = NicRuleState({DeclaredNicDevice("", "mlx5_0"): _NicState("mlx5_0", "", "", {1: port})}, read_ns=7)
    errors = EdacState(counters={(0, 0): ErrorTotal(5, POINTS)})
    return HostRuleState(memory=MemoryRuleState(errors=errors), nics=nics)


def windows_after(**limits: int) -> tuple[RateWindow, list[RateWindow]]:
    """Return the windows of the memory module, and of the NIC's counters, after changed limits."""
    after = EngineSettings("n", host=HostLimits(**limits))
    host = host_with_settings(host_with_counters(), EngineSettings("n"), after)
    (nic,) = host.nics.states.values()
    return host.memory.errors.counters[0, 0].window, [counter.window for counter in nic.ports[1].counters]


def test_shorter_windows_of_memory_and_nics_restart() -> None:
    assert windows_after(correctable_window_s=60) == (POINTS[-1:], 5 * [POINTS])
    assert windows_after(nic_link_window_s=60) == (POINTS, [POINTS[-1:], *4 * [POINTS]])
    assert windows_after(nic_error_window_s=60) == (POINTS, [POINTS, *4 * [POINTS[-1:]]])


def test_longer_windows_of_memory_and_nics_continue() -> None:
    longer = {"correctable_window_s": 7 * 86_400, "nic_link_window_s": 3600, "nic_error_window_s": 86_400}
    assert windows_after(**longer) == (POINTS, 5 * [POINTS])


# --- expectations -------------------------------------------------------------------------------------------


def test_removed_expectation_of_pages_accepts_the_present_size() -> None:
    node = PaperNode(EngineSettings("node-a", expect_pools={POOL: 12, GIB_POOL: 1}))
    node.pool(pool_sample(10))
    report = node.next()
    assert [device_of(report, name).health for name in (POOL, GIB_POOL)] == 2 * [Health.UNHEALTHY]
    change(node, expect_pools={})
    report = node.next(4)
    assert device_of(report, POOL).health is Health.HEALTHY
    assert GIB_POOL not in {device.device for device in report.devices}, "this machine has none"
    node.pool(pool_sample(9))
    assert device_of(node.next(), POOL).health is Health.UNHEALTHY, "10 pages were accepted"


def test_new_expectation_of_pages_applies_at_once() -> None:
    node = PaperNode()
    node.pool(pool_sample(10))
    assert device_of(node.next(), POOL).health is Health.HEALTHY
    change(node, expect_pools={POOL: 12})
    assert device_of(node.evaluate(), POOL).health is Health.UNHEALTHY


def test_shrunk_pool_stays_unhealthy_when_other_settings_change() -> None:
    node = PaperNode()
    node.pool(pool_sample(10))
    node.next()
    node.pool(pool_sample(8))
    node.next()
    change(node, lease_s=60, throttle_events=3)
    assert device_of(node.next(5), POOL).health is Health.UNHEALTHY


def test_removed_expectation_of_cpus_accepts_those_online() -> None:
    node = PaperNode(EngineSettings("node-a", expect_cpus=parse_cpus("0-3")))
    node.set_online("0-1")
    assert device_of(node.next(), CPU).health is Health.UNHEALTHY
    change(node, expect_cpus=None)
    assert device_of(node.next(4), CPU).health is Health.HEALTHY
    node.set_online("0")
    assert device_of(node.next(), CPU).health is Health.UNHEALTHY


def test_changed_expectation_of_gpus_adds_and_removes_missing_ones() -> None:
    node = GpuNode(2)
    change_gpu(node, expect=3)
    assert node.health("gpu-2") is Health.UNHEALTHY
    change_gpu(node, expect=None)
    assert {device.device for device in node.evaluate().devices if device.kind == "gpu"} == {"gpu-0", "gpu-1"}


# --- GPUs ---------------------------------------------------------------------------------------------------


def test_latched_fault_stays_when_settings_change() -> None:
    node = GpuNode()
    node.set_readings(0, recovery_action=1)
    node.xid(0, 48)
    before = node.codes()
    change_gpu(node, probation_s=300, correctable_errors=5, dead_s=90)
    assert node.codes() == before
    assert "gpu.xid.48" in before


def test_changed_severity_of_an_xid_applies_to_a_latched_fault() -> None:
    node = GpuNode()
    node.set_readings(0, remap_pending=1)
    node.xid(0, 48)
    node.rest(300)
    assert "gpu.xid.48" in node.codes()
    change_gpu(node, xids=((48, XidOverride.IGNORE),))
    node.rest(90)
    assert "gpu.xid.48" not in node.codes()


@pytest.mark.parametrize(("after_s", "ends_s"), [(10, 15), (600, 610)])
def test_probation_that_has_begun_gets_the_changed_end(after_s: int, ends_s: int) -> None:
    node = GpuNode(probation_s=60)
    node.lose(0)
    node.next(5)
    node.recover(0)
    node.rest(15)
    assert "(over; reported until" in node.verdict().message
    change_gpu(node, probation_s=after_s)
    began = node.now_ns
    text = node.verdict().message
    while node.health() is Health.UNHEALTHY:
        assert node.verdict().message == text, "one end, stated once"
        node.rest(1)
    assert (node.now_ns - began) / NS <= ends_s


def test_probation_removed_ends_a_begun_one() -> None:
    node = GpuNode(probation_s=600)
    node.lose(0)
    node.next(5)
    node.recover(0)
    node.rest(15)
    assert node.health() is Health.UNHEALTHY
    change_gpu(node, probation_s=0)
    node.rest(2)
    assert node.health() is Health.HEALTHY


def test_gpu_counter_with_a_shorter_window_keeps_the_fault_until_full() -> None:
    node = GpuNode(correctable_window_s=600, correctable_errors=5)
    node.rest(700)
    node.set_readings(0, ecc_correctable=9)
    node.next()
    assert node.codes() == ["gpu.ecc.correctable_rate"]
    change_gpu(node, correctable_window_s=120)
    node.rest(110)
    assert node.codes() == ["gpu.ecc.correctable_rate"]
    node.rest(60)
    assert node.codes() == []


# --- several changes ----------------------------------------------------------------------------------------

SETTINGS: Final = st.fixed_dictionaries(
    {
        "lease_s": st.sampled_from([9, 30, 600]),
        "throttle_events": st.integers(1, 20),
        "throttle_window_s": st.sampled_from([10, 60, 600]),
        "expect_cpus": st.none() | st.just(parse_cpus("0-1")),
        "expect_pools": st.just({}) | st.just({POOL: 10}),
        "host": st.builds(HostLimits, correctable_window_s=st.sampled_from([60, 3600])),
        "gpu": st.builds(
            GpuLimits,
            probation_s=st.sampled_from([0, 60, 600]),
            correctable_window_s=st.sampled_from([60, 3600]),
            dead_s=st.sampled_from([30, 60]),
        ),
    }
)


@given(st.lists(SETTINGS, min_size=1, max_size=4))
def test_no_change_of_settings_makes_a_device_of_a_sound_node_unhealthy(
    changes: list[dict[str, Any]],
) -> None:
    node = GpuNode()
    node.set_online("0-1")
    node.pool(pool_sample(10))
    names = [device.device for device in node.next(3).devices]
    for settings in changes:
        change(node, **settings)
        for report in (node.evaluate(), node.next(2)):
            assert [device.device for device in report.devices] == names
            assert {device.health for device in report.devices} == {Health.HEALTHY}
            assert not report.starting
