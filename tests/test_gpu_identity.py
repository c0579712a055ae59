"""Numbers of GPUs, which stay with the hardware."""

from agent.health.gpu.rule_state import assign_gpu_numbers
from agent.model.gpu import GpuSample
from agent.model.persistent_faults import KnownGpu

FOUR = tuple(KnownGpu(n, f"GPU-{n}", f"0000:{n}b:00.0", "H100") for n in range(4))


def sample(index: int, uuid: str = "", bus: str = "") -> GpuSample:
    return GpuSample(index, uuid, bus, "H100", "", 0, 1, 1, 1)


def samples(*numbers: int) -> list[GpuSample]:
    return [sample(index, f"GPU-{n}", f"0000:{n}b:00.0") for index, n in enumerate(numbers)]


def test_first_gpus_have_nvmls_numbers():
    assert assign_gpu_numbers((), samples(0, 1, 2, 3), None) == FOUR


def test_gpus_after_a_removed_one_keep_their_numbers():
    assert assign_gpu_numbers(FOUR, samples(0, 2, 3), None) == FOUR


def test_gpu_in_the_slot_of_a_removed_one_takes_its_number():
    new = sample(1, "GPU-new", "0000:1b:00.0")
    gpus = assign_gpu_numbers(FOUR, [*samples(0), new, sample(2, "GPU-2"), sample(3, "GPU-3")], None)
    assert [gpu.uuid for gpu in gpus] == ["GPU-0", "GPU-new", "GPU-2", "GPU-3"]


def test_additional_gpu_gets_the_next_number():
    gpus = assign_gpu_numbers(FOUR[:2], [*samples(0, 1), sample(2, "GPU-x", "0000:ff:00.0")], None)
    assert [(gpu.number, gpu.uuid) for gpu in gpus] == [(0, "GPU-0"), (1, "GPU-1"), (2, "GPU-x")]


def test_all_gpus_replaced_leaves_only_the_new_ones():
    new = [sample(n, f"GPU-new-{n}", f"0000:c{n}:00.0") for n in range(4)]
    assert [gpu.uuid for gpu in assign_gpu_numbers(FOUR, new, None)] == [f"GPU-new-{n}" for n in range(4)]


def test_lost_gpu_without_a_uuid_keeps_the_missing_number():
    lost = sample(1)
    gpus = assign_gpu_numbers(FOUR, [*samples(0), lost, sample(2, "GPU-2"), sample(3, "GPU-3")], None)
    assert gpus == FOUR


def test_gpus_without_nvml_are_counted_on_the_pci_bus():
    assert [gpu.bus for gpu in assign_gpu_numbers((), (), None, ["0000:1b:00.0", "0000:2b:00.0"])] == [
        "0000:1b:00.0",
        "0000:2b:00.0",
    ]


def test_gpus_from_nvml_take_the_numbers_from_the_bus():
    bus = assign_gpu_numbers((), (), None, ["0000:0b:00.0", "0000:1b:00.0"])
    assert assign_gpu_numbers(bus, samples(0, 1), None) == FOUR[:2]


def test_expected_gpus_that_are_missing_have_numbers():
    assert [gpu.number for gpu in assign_gpu_numbers((), samples(0), 3)] == [0, 1, 2]


def test_lower_expected_count_drops_only_missing_gpus():
    assert [gpu.uuid for gpu in assign_gpu_numbers(FOUR, samples(0, 2, 3), 3)] == ["GPU-0", "GPU-2", "GPU-3"]
    assert len(assign_gpu_numbers(FOUR, samples(0, 1, 2, 3), 1)) == 4


def test_new_gpu_waits_for_its_number_until_all_gpus_are_identified():
    new, unidentified = sample(0, "GPU-new", "0000:0b:00.0"), [sample(1), sample(2)]
    waiting = assign_gpu_numbers(FOUR[:2], [new, *unidentified], None, is_identifying=True)
    assert [gpu.uuid for gpu in waiting] == ["GPU-0", "GPU-1", ""]
    moved = [sample(1, "GPU-0", "0000:1b:00.0"), sample(2, "GPU-1", "0000:2b:00.0")]
    added = assign_gpu_numbers(waiting, [new, *moved], None)
    assert [gpu.uuid for gpu in added] == ["GPU-0", "GPU-1", "GPU-new"]
    replaced = assign_gpu_numbers(FOUR[:2], [new, *samples(0, 1)[1:]], None)
    assert [gpu.uuid for gpu in replaced] == ["GPU-new", "GPU-1"]


def test_new_gpu_next_to_an_unidentified_one_gets_an_additional_number():
    new = sample(0, "GPU-new", "0000:0b:00.0")
    gpus = assign_gpu_numbers(FOUR[:2], [new, sample(1)], None)
    assert [gpu.uuid for gpu in gpus] == ["GPU-0", "GPU-1", "GPU-new"]


def test_two_additional_gpus_at_once_get_different_numbers():
    new = [sample(n, f"GPU-new-{n}", f"0000:c{n}:00.0") for n in range(2)]
    gpus = assign_gpu_numbers(FOUR[:2], [*new, sample(2, "GPU-0"), sample(3, "GPU-1")], None)
    assert [gpu.uuid for gpu in gpus] == ["GPU-0", "GPU-1", "GPU-new-0", "GPU-new-1"]


def test_missing_gpu_loses_the_address_that_another_gpu_has_now():
    gpus = assign_gpu_numbers(FOUR[:3], [*samples(0), sample(1, "GPU-1", "0000:2b:00.0")], None)
    assert [gpu.bus for gpu in gpus] == ["0000:0b:00.0", "0000:2b:00.0", ""]


def test_lower_expected_count_drops_no_gpu_before_nvml_has_listed_all():
    assert assign_gpu_numbers(FOUR, (), 3, is_list_complete=False) == FOUR
    assert assign_gpu_numbers(FOUR, [*samples(0), sample(1), *samples(0, 1, 3)[2:]], 3) == FOUR
