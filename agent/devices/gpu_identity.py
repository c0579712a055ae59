"""Stable numbers of GPUs, as in ``gpu-3``: unchanged by restarts, driver reloads and the loss of other GPUs.

NVML's own numbers change when a GPU is lost. Here a number stays with the GPU's UUID, and a lost GPU keeps
its number until another GPU replaces it.
"""

from collections.abc import Iterable, Sequence
from itertools import count

from agent.model.gpu import GpuSample
from agent.model.persistent_faults import KnownGpu


def assign_gpu_numbers(
    known: Iterable[KnownGpu],
    samples: Sequence[GpuSample],
    expected_count: int | None,
    bus_addresses: Sequence[str] = (),
) -> tuple[KnownGpu, ...]:
    """Return the GPUs of this machine with their stable numbers, including missing GPUs.

    Args:
        known: GPUs with their previous numbers.
        samples: GPUs that NVML has listed since the agent started.
        expected_count: Expected number of GPUs; None: the largest number so far.
        bus_addresses: PCI addresses of the machine's GPUs, used only while neither ``known`` nor ``samples``
            has a GPU that NVML listed.
    """
    registry = {gpu.number: gpu for gpu in known}
    if not samples and not any(gpu.uuid for gpu in registry.values()):
        _add_gpus_on_bus(registry, bus_addresses)
    if samples:  # NVML outranks the PCI bus, where a GPU can be bound to another driver
        buses = {sample.bus for sample in samples}
        registry = {number: gpu for number, gpu in registry.items() if gpu.uuid or gpu.bus in buses}
    present = _match_known_gpus(registry, samples)
    absent = [number for number in sorted(registry) if number not in present.values()]
    all_replaced = not present
    for sample in samples:
        if sample.index not in present:
            number = _new_number(sample, registry, absent, all_replaced=all_replaced)
            present[sample.index] = number
            absent = [other for other in absent if other != number]
    for sample in samples:
        number = present[sample.index]
        before = registry.get(number, KnownGpu(number, "", "", ""))
        registry[number] = before._replace(
            uuid=sample.uuid or before.uuid, bus=sample.bus or before.bus, name=sample.name or before.name
        )
    if expected_count is not None:
        for number in reversed(absent):
            if len(registry) > expected_count:
                del registry[number]
        free = (number for number in count() if number not in registry)
        while len(registry) < expected_count:
            number = next(free)
            registry[number] = KnownGpu(number, "", "", "")
    return tuple(registry[number] for number in sorted(registry))


def replaced_gpu_numbers(before: Iterable[KnownGpu], now: Iterable[KnownGpu]) -> frozenset[int]:
    """Return the stable numbers of GPUs that now belong to another GPU than before, or to none.

    Only numbers count whose GPU had a UUID before.
    """
    uuids = {gpu.number: gpu.uuid for gpu in now}
    return frozenset(gpu.number for gpu in before if gpu.uuid and uuids.get(gpu.number, "") != gpu.uuid)


def _add_gpus_on_bus(registry: dict[int, KnownGpu], bus_addresses: Iterable[str]) -> None:
    """Add the GPUs that the PCI bus lists and the registry lacks.
    The driver binds to GPUs one after another."""
    known = {gpu.bus for gpu in registry.values()}
    free = (number for number in count() if number not in registry or not registry[number].bus)
    for address in bus_addresses:
        if address not in known:
            number = next(free)
            registry[number] = KnownGpu(number, "", address, "")


def _match_known_gpus(registry: dict[int, KnownGpu], samples: Iterable[GpuSample]) -> dict[int, int]:
    by_uuid = {gpu.uuid: number for number, gpu in registry.items() if gpu.uuid}
    by_bus = {gpu.bus: number for number, gpu in registry.items() if gpu.bus}
    found: dict[int, int] = {}
    for sample in samples:
        number = by_uuid.get(sample.uuid)
        if number is None:
            number = by_bus.get(sample.bus)
            if number is not None and sample.uuid and registry[number].uuid:
                number = None  # another GPU in its slot
        if number is not None and number not in found.values():
            found[sample.index] = number
    return found


def _new_number(
    sample: GpuSample, registry: dict[int, KnownGpu], absent: Sequence[int], *, all_replaced: bool
) -> int:
    """Return the stable number for a GPU that has none yet.

    A GPU at the PCI address of a missing GPU is its replacement. Elsewhere it is an additional GPU, unless no
    known GPU is present: then all GPUs were replaced.
    """
    for number in absent:
        if registry[number].bus and registry[number].bus == sample.bus:
            return number
    unidentified = [number for number in absent if not registry[number].uuid and not registry[number].bus]
    if unidentified:
        return sample.index if sample.index in unidentified else unidentified[0]
    if sample.index not in registry:
        return sample.index
    if absent and (all_replaced or not sample.uuid):
        return sample.index if sample.index in absent else absent[0]
    return next(number for number in count() if number not in registry)
