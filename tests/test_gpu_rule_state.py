"""State of GPUs for the rules: windows of counters, links, instances, and identity."""

from dataclasses import replace
from typing import Final

import pytest
from gpu_samples import ABSENT, ALL_UP, EIO, LIMITS, gpu_sample, gpu_set, pci_sample
from paper import cpus_sample
from paper_gpus import GpuNode

from agent.health.gpu.rule_state import REMOVED_NS, GpuRuleState, gpu_devices, gpu_views, next_gpu_rule_state
from agent.health.rules import CounterGrowth
from agent.model.gpu import GpuField, GpuOsSample, GpuSample, MigSample, NvmlReturnCode
from agent.model.reading import Reading, SourceState
from agent.model.settings import GpuLimits
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant

REPLAY = GpuField.PCIE_REPLAY
WINDOW_S = 60


def snapshot(
    *gpus: GpuSample, host: GpuOsSample | None = None, state: SourceState = SourceState.OK, err: int = 0
) -> Snapshot:
    nvml = gpu_set(*gpus, state=state, err=err)
    return Snapshot(0, cpus_sample(), gpus=nvml, host=host or GpuOsSample())


def at(second: float) -> Instant:
    return Instant(int(second * NS), 1.7e9 + second)


def read_at(second: float, value: Reading, **attributes: object) -> tuple[Snapshot, Instant]:
    sample = gpu_sample({REPLAY: value}, beat_ns=int(second * NS), **attributes)
    return snapshot(sample), at(second)


def growth_after(*readings: tuple[float, Reading]) -> CounterGrowth:
    state = GpuRuleState()
    for second, value in readings:
        seen, now = read_at(second, value)
        state = next_gpu_rule_state(state, seen, LIMITS, now)
    return gpu_views(state, seen, LIMITS, now)[0].growth[REPLAY]


def test_pci_function_is_matched_only_for_gpus_listed_by_nvml() -> None:
    known = gpu_sample(number=0), gpu_sample(number=1)
    state = next_gpu_rule_state(GpuRuleState(), snapshot(*known), LIMITS, at(1))
    functions = pci_sample(1, driver=""), pci_sample(7)
    views = gpu_views(state, replace(snapshot(*known), pci=functions), LIMITS, at(2))
    assert [view.pci_function for view in views.values()] == [None, functions[0]]
    for pci in (None, EIO):
        views = gpu_views(state, replace(snapshot(*known), pci=pci), LIMITS, at(2))
        assert [view.pci_function for view in views.values()] == [None, None]
    by_bus = snapshot(host=GpuOsSample(bus_gpus=(functions[0].address,)), state=SourceState.FAILING)
    state = next_gpu_rule_state(GpuRuleState(), by_bus, LIMITS, at(1))
    [view] = gpu_views(state, replace(by_bus, pci=functions), LIMITS, at(2)).values()
    assert view.pci_function is None


# --- counters -----------------------------------------------------------------------------------------------


def test_growth_covers_only_the_window() -> None:
    assert growth_after((100, 5)) == CounterGrowth(0, 0.0)
    assert growth_after((100, 5), (130, 9)) == CounterGrowth(4, 30.0)
    assert growth_after((100, 5), (130, 9), (160, 9)) == CounterGrowth(4, 60.0)
    assert growth_after((100, 5), (130, 9), (160, 9), (191, 9)) == CounterGrowth(0, 60.0)


def test_decreased_counter_has_no_growth_in_its_window() -> None:
    assert growth_after((100, 50), (130, 3)) == CounterGrowth(0, 60.0)
    assert growth_after((100, 50), (130, 3), (140, 5)) == CounterGrowth(2, 60.0)


def test_unreadable_counter_has_unknown_growth() -> None:
    assert growth_after((100, 5), (130, EIO)) == CounterGrowth(EIO, 0.0)
    assert growth_after((100, 5), (130, EIO), (140, 500)) == CounterGrowth(0, 0.0)
    assert growth_after((100, ABSENT)) == CounterGrowth(ABSENT, 0.0)


def test_same_pass_twice_is_one_point_of_window() -> None:
    seen, now = read_at(100, 5)
    state = next_gpu_rule_state(GpuRuleState(), seen, LIMITS, now)
    again = next_gpu_rule_state(state, seen, LIMITS, at(101))
    assert again.per_gpu[0] is state.per_gpu[0]
    assert len(again.per_gpu[0].windows[REPLAY]) == 1


def test_link_baseline_contains_every_link_ever_up() -> None:
    state = GpuRuleState()
    for second, links in ((100, 0b0011), (101, 0b0110), (102, 0)):
        sample = gpu_sample({GpuField.LINKS_UP: links}, beat_ns=second * NS)
        state = next_gpu_rule_state(state, snapshot(sample), LIMITS, at(second))
    assert state.per_gpu[0].seen.links_up == 0b0111


def test_lost_gpu_keeps_baseline_and_instances() -> None:
    migs = (MigSample(1, 0, "MIG-1"),)
    state = next_gpu_rule_state(GpuRuleState(), snapshot(gpu_sample(migs=migs)), LIMITS, at(1000))
    lost = gpu_sample(readings={}, status=NvmlReturnCode.LOST, migs=())
    after = next_gpu_rule_state(state, snapshot(lost), LIMITS, at(1001))
    assert after.per_gpu[0].seen.links_up == ALL_UP
    assert [device.name for device in gpu_devices(after)] == ["gpu-0", "gpu-0-mig-1-0"]


def test_replacement_gpu_has_its_own_baseline() -> None:
    first = gpu_sample({GpuField.ECC_MODE: 1}, migs=(MigSample(1, 0, "MIG-1"),))
    state = next_gpu_rule_state(GpuRuleState(), snapshot(first), LIMITS, at(1000))
    other = gpu_sample({GpuField.LINKS_UP: 1, GpuField.ECC_MODE: 0}, uuid="GPU-other", beat_ns=1001 * NS)
    missing = next_gpu_rule_state(state, snapshot(gpu_sample(number=1)), LIMITS, at(1001))
    after = next_gpu_rule_state(missing, snapshot(other), LIMITS, at(1001))
    assert (after.registry[0].number, after.registry[0].uuid) == (0, "GPU-other")
    assert (after.per_gpu[0].seen.links_up, after.per_gpu[0].seen.ecc) == (1, False)
    assert after.per_gpu[0].instances == ()


# --- instances ----------------------------------------------------------------------------------------------


def test_removed_instances_are_reported_for_ten_minutes() -> None:
    node = GpuNode(migs={0: [(1, 0), (2, 0)]})
    node.partition(0, (2, 0), (5, 0), (6, 0))
    node.next()
    names = [device.device for device in node.evaluate().devices if device.device.startswith("gpu-0")]
    assert names == ["gpu-0", "gpu-0-mig-1-0", "gpu-0-mig-2-0", "gpu-0-mig-5-0", "gpu-0-mig-6-0"]
    gone = node.verdict("gpu-0-mig-1-0")
    assert (gone.health.name, gone.message.split(":")[0]) == ("UNKNOWN", "gpu.mig.gone")
    assert node.codes("gpu-0-mig-5-0") == []
    node.rest(REMOVED_NS / NS - 15)
    assert node.codes("gpu-0-mig-1-0") == ["gpu.mig.gone"]
    node.rest(30)
    assert "gpu-0-mig-1-0" not in [device.device for device in node.evaluate().devices]
    assert not [key for key in node.state.conditions if key[0] == "gpu-0-mig-1-0"]


def test_gpu_without_partitions_is_whole_again() -> None:
    node = GpuNode(migs={0: [(1, 0)]})
    node.partition(0)
    node.next()
    assert node.codes("gpu-0-mig-1-0") == ["gpu.mig.gone"]
    assert node.codes("gpu-0") == []
    assert node.checkpoint.gpus[0].migs == ()


def test_recreated_instance_clears_after_three_passes() -> None:
    node = GpuNode(migs={0: [(1, 0)]})
    node.partition(0)
    node.next(3)
    node.partition(0, (1, 0))
    node.next(4)
    assert node.codes("gpu-0-mig-1-0") == []


def test_instances_of_lost_gpu_inherit_its_cause() -> None:
    node = GpuNode(migs={0: [(1, 0), (2, 0)]})
    node.lose(0)
    node.next()
    for name in ("gpu-0-mig-1-0", "gpu-0-mig-2-0"):
        assert node.codes(name) == ["gpu.lost"]
        assert dict(node.verdict(name).attributes)["parentUUID"] == "GPU-00000000"


def test_instance_has_its_uuid_and_parent_uuid() -> None:
    node = GpuNode(migs={0: [(1, 0)]})
    attributes = dict(node.verdict("gpu-0-mig-1-0").attributes)
    assert (attributes["uuid"], attributes["parentUUID"]) == ("MIG-0-1-0", "GPU-00000000")
    assert attributes["pciBusId"] == "0000:1b:00.0"


# --- identity -----------------------------------------------------------------------------------------------


def test_lost_gpu_does_not_affect_seven_healthy_ones() -> None:
    node = GpuNode(8, migs={3: [(1, 0)]})
    before = node.verdict("gpu-3").attributes
    node.lose(3)
    node.next()
    report = node.evaluate()
    sick = [device.device for device in report.devices if device.health.name != "HEALTHY"]
    assert sick == ["gpu-3", "gpu-3-mig-1-0"]
    assert node.verdict("gpu-3").attributes == before
    assert all(device.causes == () for device in report.devices if device.device not in sick)


def test_missing_gpu_does_not_rename_other_gpus() -> None:
    node = GpuNode(4)
    del node.gpus[1]
    node.rest(20)
    assert node.codes("gpu-1") == ["gpu.missing"]
    assert [dict(node.verdict(f"gpu-{n}").attributes)["uuid"] for n in range(4)] == [
        f"GPU-{n:08x}" for n in range(4)
    ]


def test_gpus_from_bus_keep_numbers_when_nvml_recovers() -> None:
    buses = ("0000:1b:00.0", "0000:2b:00.0")
    host = GpuOsSample(bus_gpus=buses)
    failing = snapshot(host=host, state=SourceState.FAILING)
    state = next_gpu_rule_state(GpuRuleState(), failing, LIMITS, at(1))
    assert [(gpu.number, gpu.bus) for gpu in state.registry] == [(0, buses[0]), (1, buses[1])]
    only_second = replace(gpu_sample(number=1), index=0)
    state = next_gpu_rule_state(state, snapshot(only_second, host=host), LIMITS, at(2))
    assert [(gpu.number, gpu.uuid) for gpu in state.registry] == [(1, "GPU-00000001")]
    assert state.samples[1] is only_second


UNLOADED: Final = [(SourceState.ABSENT, 0), (SourceState.ABSENT, 12), (SourceState.FAILING, 12)]
"""States of the library that cannot be loaded, and NVML's return code."""


@pytest.mark.parametrize(("state", "err"), UNLOADED)
def test_gpus_without_library_count_if_bound_to_nvidia(state: SourceState, err: int) -> None:
    host = GpuOsSample(bus_gpus=("0000:1b:00.0", "0000:2b:00.0"), bound_gpus=("0000:2b:00.0",))
    failed = snapshot(host=host, state=state, err=err)
    found = next_gpu_rule_state(GpuRuleState(), failed, LIMITS, at(1))
    assert [(gpu.number, gpu.bus) for gpu in found.registry] == [(0, "0000:2b:00.0")]
    both = replace(host, bound_gpus=host.bus_gpus)
    found = next_gpu_rule_state(found, snapshot(host=both, state=state, err=err), LIMITS, at(2))
    assert [(gpu.number, gpu.bus) for gpu in found.registry] == [(0, "0000:2b:00.0"), (1, "0000:1b:00.0")]
    none = replace(host, bound_gpus=())
    found = next_gpu_rule_state(found, snapshot(host=none, state=state, err=err), LIMITS, at(3))
    assert found.registry == ()


def test_opening_library_counts_only_gpus_bound_to_nvidia() -> None:
    host = GpuOsSample(bus_gpus=("0000:1b:00.0", "0000:2b:00.0"), bound_gpus=("0000:2b:00.0",))
    found = next_gpu_rule_state(
        GpuRuleState(), snapshot(host=host, state=SourceState.STARTING), LIMITS, at(1)
    )
    assert [gpu.bus for gpu in found.registry] == ["0000:2b:00.0"]


def test_driver_not_loaded_counts_gpus_without_driver() -> None:
    host = GpuOsSample(bus_gpus=("0000:1b:00.0",))
    failed = snapshot(host=host, state=SourceState.FAILING, err=9)
    assert len(next_gpu_rule_state(GpuRuleState(), failed, LIMITS, at(1)).registry) == 1


def test_gpus_without_uuid_keep_numbers_once_identified() -> None:
    nameless = [gpu_sample(number=n, uuid="", bus="", name="", passes=0) for n in range(3)]
    state = next_gpu_rule_state(GpuRuleState(), snapshot(*nameless), LIMITS, at(1))
    named = [gpu_sample(number=n) for n in range(3)]
    for done in range(3):
        mixed = [*named[: done + 1], *nameless[done + 1 :]]
        state = next_gpu_rule_state(state, snapshot(*mixed), LIMITS, at(2 + done))
    assert [(gpu.number, gpu.uuid) for gpu in state.registry] == [(n, f"GPU-{n:08x}") for n in range(3)]


def test_expected_gpus_that_were_never_listed_are_missing() -> None:
    node = GpuNode(1, expect=3)
    assert [node.codes(f"gpu-{n}") for n in range(3)] == [[], ["gpu.missing"], ["gpu.missing"]]


@pytest.mark.parametrize("seconds", [0.0, 3.0, 1e5])
def test_siblings_are_other_gpus_that_answer(seconds: float) -> None:
    gpus = [gpu_sample(number=n, probe_p50_ns=n + 1) for n in range(4)]
    gpus[3] = replace(gpus[3], status=NvmlReturnCode.LOST)
    seen = snapshot(*gpus)
    state = next_gpu_rule_state(GpuRuleState(), seen, GpuLimits(), at(1000 + seconds))
    views = gpu_views(state, seen, GpuLimits(), at(1000 + seconds))
    assert [views[n].siblings_p50_ns for n in range(4)] == [(2, 3), (1, 3), (1, 2), (1, 2, 3)]
    assert views[0].sample == gpus[0]
