"""Which GPU is which: numbers stay with the hardware."""

from agent.devices.gpu_identity import assign_indices
from agent.model.faults import KnownGpu
from agent.model.gpu import GpuSample

FOUR = tuple(KnownGpu(n, f"GPU-{n}", f"0000:{n}b:00.0", "H100") for n in range(4))


def sample(index: int, uuid: str = "", bus: str = "") -> GpuSample:
    return GpuSample(index, uuid, bus, "H100", "", 0, 1, 1, 1)


def samples(*numbers: int) -> list[GpuSample]:
    return [sample(index, f"GPU-{n}", f"0000:{n}b:00.0") for index, n in enumerate(numbers)]


def test_the_first_count_gives_nvmls_numbers():
    assert assign_indices((), samples(0, 1, 2, 3), None) == FOUR


def test_those_behind_a_gpu_that_is_gone_keep_their_numbers():
    assert assign_indices(FOUR, samples(0, 2, 3), None) == FOUR


def test_a_gpu_in_the_slot_of_one_that_is_gone_takes_its_number():
    new = sample(1, "GPU-new", "0000:1b:00.0")
    roll = assign_indices(FOUR, [*samples(0), new, sample(2, "GPU-2"), sample(3, "GPU-3")], None)
    assert [gpu.uuid for gpu in roll] == ["GPU-0", "GPU-new", "GPU-2", "GPU-3"]


def test_one_more_gpu_is_one_more_number():
    roll = assign_indices(FOUR[:2], [*samples(0, 1), sample(2, "GPU-x", "0000:ff:00.0")], None)
    assert [(gpu.number, gpu.uuid) for gpu in roll] == [(0, "GPU-0"), (1, "GPU-1"), (2, "GPU-x")]


def test_a_machine_fitted_anew_has_only_its_new_gpus():
    new = [sample(n, f"GPU-new-{n}", f"0000:c{n}:00.0") for n in range(4)]
    assert [gpu.uuid for gpu in assign_indices(FOUR, new, None)] == [f"GPU-new-{n}" for n in range(4)]


def test_a_gpu_that_was_lost_before_anybody_asked_its_name_has_the_number_of_the_one_that_lacks():
    lost = sample(1)
    roll = assign_indices(FOUR, [*samples(0), lost, sample(2, "GPU-2"), sample(3, "GPU-3")], None)
    assert roll == FOUR


def test_without_nvml_the_bus_says_how_many_there_are():
    assert [gpu.bus for gpu in assign_indices((), (), None, ["0000:1b:00.0", "0000:2b:00.0"])] == [
        "0000:1b:00.0",
        "0000:2b:00.0",
    ]


def test_nvmls_gpus_take_the_places_that_the_bus_gave():
    bus = assign_indices((), (), None, ["0000:0b:00.0", "0000:1b:00.0"])
    assert assign_indices(bus, samples(0, 1), None) == FOUR[:2]


def test_expected_gpus_that_are_not_there_are_on_the_roll():
    assert [gpu.number for gpu in assign_indices((), samples(0), 3)] == [0, 1, 2]


def test_a_smaller_expectation_forgets_the_missing_and_never_the_present():
    assert [gpu.uuid for gpu in assign_indices(FOUR, samples(0, 2, 3), 3)] == ["GPU-0", "GPU-2", "GPU-3"]
    assert len(assign_indices(FOUR, samples(0, 1, 2, 3), 1)) == 4
