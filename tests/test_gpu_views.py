"""What is remembered of GPUs for the rules: counters over their windows, links, instances, who is who."""

from dataclasses import replace

import pytest
from gpu_samples import ABSENT, ALL_UP, EIO, LIMITS, gpu_sample, gpu_set, pci_sample
from paper import cpus_sample
from paper_gpus import GpuNode

from agent.health.gpu.views import GONE_NS, GpuRuleState, gpu_devices, gpu_views, remember_gpus
from agent.health.rules import Growth
from agent.model.gpu import GpuField, GpuHost, GpuSample, MigSample, Status
from agent.model.reading import Reading
from agent.model.settings import GpuLimits
from agent.model.snapshot import Snapshot
from agent.model.source import SourceState
from agent.model.time import NS, Instant

REPLAY = GpuField.PCIE_REPLAY
WINDOW_S = 60


def snapshot(*gpus: GpuSample, host: GpuHost | None = None, state: SourceState = SourceState.OK) -> Snapshot:
    return Snapshot(0, cpus_sample(), gpus=gpu_set(*gpus, state=state), host=host or GpuHost())


def at(second: float) -> Instant:
    return Instant(int(second * NS), 1.7e9 + second)


def read_at(second: float, value: Reading, **attributes: object) -> tuple[Snapshot, Instant]:
    sample = gpu_sample({REPLAY: value}, beat_ns=int(second * NS), **attributes)
    return snapshot(sample), at(second)


def growth_after(*readings: tuple[float, Reading]) -> Growth:
    memory = GpuRuleState()
    for second, value in readings:
        seen, now = read_at(second, value)
        memory = remember_gpus(memory, seen, LIMITS, now)
    return gpu_views(memory, seen, LIMITS, now)[0].growth[REPLAY]


def test_a_gpu_is_found_on_the_bus_by_its_address_if_nvml_ever_counted_it() -> None:
    known = gpu_sample(number=0), gpu_sample(number=1)
    memory = remember_gpus(GpuRuleState(), snapshot(*known), LIMITS, at(1))
    functions = pci_sample(1, driver=""), pci_sample(7)
    views = gpu_views(memory, replace(snapshot(*known), pci=functions), LIMITS, at(2))
    assert [view.pci for view in views.values()] == [None, functions[0]]
    for pci in (None, EIO):
        views = gpu_views(memory, replace(snapshot(*known), pci=pci), LIMITS, at(2))
        assert [view.pci for view in views.values()] == [None, None]
    by_bus = snapshot(host=GpuHost(bus_gpus=(functions[0].address,)), state=SourceState.FAILING)
    memory = remember_gpus(GpuRuleState(), by_bus, LIMITS, at(1))
    [view] = gpu_views(memory, replace(by_bus, pci=functions), LIMITS, at(2)).values()
    assert view.pci is None


# --- counters -----------------------------------------------------------------------------------------------


def test_a_counter_is_judged_over_its_window_and_no_longer() -> None:
    assert growth_after((100, 5)) == Growth(0, 0.0)
    assert growth_after((100, 5), (130, 9)) == Growth(4, 30.0)
    assert growth_after((100, 5), (130, 9), (160, 9)) == Growth(4, 60.0)
    assert growth_after((100, 5), (130, 9), (160, 9), (191, 9)) == Growth(0, 60.0)


def test_a_counter_that_fell_begins_anew() -> None:
    assert growth_after((100, 50), (130, 3)) == Growth(0, 0.0)
    assert growth_after((100, 50), (130, 3), (140, 5)) == Growth(2, 10.0)


def test_what_cannot_be_read_has_grown_by_nothing_that_anybody_knows() -> None:
    assert growth_after((100, 5), (130, EIO)) == Growth(EIO, 0.0)
    assert growth_after((100, 5), (130, EIO), (140, 500)) == Growth(0, 0.0)
    assert growth_after((100, ABSENT)) == Growth(ABSENT, 0.0)


def test_the_same_pass_seen_twice_is_one_point() -> None:
    seen, now = read_at(100, 5)
    memory = remember_gpus(GpuRuleState(), seen, LIMITS, now)
    again = remember_gpus(memory, seen, LIMITS, at(101))
    assert again.past[0] is memory.past[0]
    assert len(again.past[0].histories[REPLAY]) == 1


def test_a_links_baseline_is_what_has_ever_been_up() -> None:
    memory = GpuRuleState()
    for second, links in ((100, 0b0011), (101, 0b0110), (102, 0)):
        sample = gpu_sample({GpuField.LINKS_UP: links}, beat_ns=second * NS)
        memory = remember_gpus(memory, snapshot(sample), LIMITS, at(second))
    assert memory.past[0].start.links_up == 0b0111


def test_a_gpu_that_is_lost_keeps_its_baseline_and_its_instances() -> None:
    migs = (MigSample(1, 0, "MIG-1"),)
    memory = remember_gpus(GpuRuleState(), snapshot(gpu_sample(migs=migs)), LIMITS, at(1000))
    lost = gpu_sample(readings={}, status=Status.LOST, migs=())
    after = remember_gpus(memory, snapshot(lost), LIMITS, at(1001))
    assert after.past[0].start.links_up == ALL_UP
    assert [device.name for device in gpu_devices(after)] == ["gpu-0", "gpu-0-mig-1-0"]


def test_another_gpu_in_its_place_has_a_baseline_of_its_own() -> None:
    first = gpu_sample({GpuField.ECC_MODE: 1}, migs=(MigSample(1, 0, "MIG-1"),))
    memory = remember_gpus(GpuRuleState(), snapshot(first), LIMITS, at(1000))
    other = gpu_sample({GpuField.LINKS_UP: 1, GpuField.ECC_MODE: 0}, uuid="GPU-other", beat_ns=1001 * NS)
    missing = remember_gpus(memory, snapshot(gpu_sample(number=1)), LIMITS, at(1001))
    after = remember_gpus(missing, snapshot(other), LIMITS, at(1001))
    assert (after.roll[0].number, after.roll[0].uuid) == (0, "GPU-other")
    assert (after.past[0].start.links_up, after.past[0].start.ecc) == (1, False)
    assert after.past[0].instances == ()


# --- instances ----------------------------------------------------------------------------------------------


def test_a_repartition_is_followed_and_old_instances_are_told_of_for_ten_minutes() -> None:
    node = GpuNode(migs={0: [(1, 0), (2, 0)]})
    node.partition(0, (2, 0), (5, 0), (6, 0))
    node.next()
    names = [device.device for device in node.look().devices if device.device.startswith("gpu-0")]
    assert names == ["gpu-0", "gpu-0-mig-1-0", "gpu-0-mig-2-0", "gpu-0-mig-5-0", "gpu-0-mig-6-0"]
    gone = node.now_says("gpu-0-mig-1-0")
    assert (gone.health.name, gone.message.split(":")[0]) == ("UNKNOWN", "gpu.mig.gone")
    assert node.codes("gpu-0-mig-5-0") == []
    node.rest(GONE_NS / NS - 15)
    assert node.codes("gpu-0-mig-1-0") == ["gpu.mig.gone"]
    node.rest(30)
    assert "gpu-0-mig-1-0" not in [device.device for device in node.look().devices]
    assert not [key for key in node.state.tracks if key[0] == "gpu-0-mig-1-0"]


def test_a_gpu_whose_partition_is_taken_away_is_whole_again() -> None:
    node = GpuNode(migs={0: [(1, 0)]})
    node.partition(0)
    node.next()
    assert node.codes("gpu-0-mig-1-0") == ["gpu.mig.gone"]
    assert node.codes("gpu-0") == []
    assert node.kept.gpus[0].migs == ()


def test_an_instance_that_is_made_anew_is_there_again_after_three_passes() -> None:
    node = GpuNode(migs={0: [(1, 0)]})
    node.partition(0)
    node.next(3)
    node.partition(0, (1, 0))
    node.next(4)
    assert node.codes("gpu-0-mig-1-0") == []


def test_the_instances_of_a_lost_gpu_stay_and_follow_it() -> None:
    node = GpuNode(migs={0: [(1, 0), (2, 0)]})
    node.lose(0)
    node.next()
    for name in ("gpu-0-mig-1-0", "gpu-0-mig-2-0"):
        assert node.codes(name) == ["gpu.lost"]
        assert dict(node.now_says(name).attributes)["parentUUID"] == "GPU-00000000"


def test_an_instance_is_named_by_its_own_uuid_and_its_parents() -> None:
    node = GpuNode(migs={0: [(1, 0)]})
    attributes = dict(node.now_says("gpu-0-mig-1-0").attributes)
    assert (attributes["uuid"], attributes["parentUUID"]) == ("MIG-0-1-0", "GPU-00000000")
    assert attributes["pciBusId"] == "0000:1b:00.0"


# --- who is who ---------------------------------------------------------------------------------------------


def test_one_lost_gpu_beside_seven_good_ones_is_the_only_one_that_suffers() -> None:
    node = GpuNode(8, migs={3: [(1, 0)]})
    before = node.now_says("gpu-3").attributes
    node.lose(3)
    node.next()
    report = node.look()
    sick = [device.device for device in report.devices if device.health.name != "HEALTHY"]
    assert sick == ["gpu-3", "gpu-3-mig-1-0"]
    assert node.now_says("gpu-3").attributes == before
    assert all(device.causes == () for device in report.devices if device.device not in sick)


def test_when_nvml_no_longer_counts_a_gpu_the_others_keep_their_names() -> None:
    node = GpuNode(4)
    del node.gpus[1]
    node.rest(20)
    assert node.codes("gpu-1") == ["gpu.missing"]
    assert [dict(node.now_says(f"gpu-{n}").attributes)["uuid"] for n in range(4)] == [
        f"GPU-{n:08x}" for n in range(4)
    ]


def test_gpus_of_the_bus_are_known_while_nvml_fails_and_are_the_same_afterwards() -> None:
    buses = ("0000:1b:00.0", "0000:2b:00.0")
    host = GpuHost(bus_gpus=buses)
    failing = snapshot(host=host, state=SourceState.FAILING)
    memory = remember_gpus(GpuRuleState(), failing, LIMITS, at(1))
    assert [(gpu.number, gpu.bus) for gpu in memory.roll] == [(0, buses[0]), (1, buses[1])]
    only_second = replace(gpu_sample(number=1), index=0)
    memory = remember_gpus(memory, snapshot(only_second, host=host), LIMITS, at(2))
    assert [(gpu.number, gpu.uuid) for gpu in memory.roll] == [(1, "GPU-00000001")]
    assert memory.samples[1] is only_second


def test_without_a_library_the_bus_has_no_gpus_for_us() -> None:
    host = GpuHost(bus_gpus=("0000:1b:00.0",))
    absent = snapshot(host=host, state=SourceState.ABSENT)
    assert remember_gpus(GpuRuleState(), absent, LIMITS, at(1)).roll == ()


def test_gpus_without_names_become_those_that_they_turn_out_to_be() -> None:
    nameless = [gpu_sample(number=n, uuid="", bus="", name="", passes=0) for n in range(3)]
    memory = remember_gpus(GpuRuleState(), snapshot(*nameless), LIMITS, at(1))
    named = [gpu_sample(number=n) for n in range(3)]
    for done in range(3):
        mixed = [*named[: done + 1], *nameless[done + 1 :]]
        memory = remember_gpus(memory, snapshot(*mixed), LIMITS, at(2 + done))
    assert [(gpu.number, gpu.uuid) for gpu in memory.roll] == [(n, f"GPU-{n:08x}") for n in range(3)]


def test_expected_gpus_that_nobody_has_seen_are_missing() -> None:
    node = GpuNode(1, expect=3)
    assert [node.codes(f"gpu-{n}") for n in range(3)] == [[], ["gpu.missing"], ["gpu.missing"]]


@pytest.mark.parametrize("seconds", [0.0, 3.0, 1e5])
def test_siblings_are_the_others_that_answer(seconds: float) -> None:
    gpus = [gpu_sample(number=n, probe_p50_ns=n + 1) for n in range(4)]
    gpus[3] = replace(gpus[3], status=Status.LOST)
    seen = snapshot(*gpus)
    memory = remember_gpus(GpuRuleState(), seen, GpuLimits(), at(1000 + seconds))
    views = gpu_views(memory, seen, GpuLimits(), at(1000 + seconds))
    assert [views[n].siblings_p50_ns for n in range(4)] == [(2, 3), (1, 3), (1, 2), (1, 2, 3)]
    assert views[0].gpu == gpus[0]
