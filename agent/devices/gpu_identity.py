"""Numbers of GPUs, stable over restarts, driver reloads and the loss of other GPUs.

NVML numbers GPUs by PCI address at each initialisation: if one GPU is lost, those behind it move up. A claim
for ``gpu-3`` means one piece of hardware, so a number stays with a UUID, and a lost GPU keeps its number
until another GPU replaces it.
"""

from collections.abc import Iterable, Sequence
from itertools import count

from agent.model.faults import KnownGpu
from agent.model.gpu import GpuSample


def assign_indices(
    known: Iterable[KnownGpu], samples: Sequence[GpuSample], expect: int | None, bus: Sequence[str] = ()
) -> tuple[KnownGpu, ...]:
    """Return the GPUs of this machine with their stable numbers, including missing GPUs.

    Args:
        known: GPUs with their previous numbers.
        samples: GPUs that NVML has listed since the agent started.
        expect: Expected number of GPUs; None: the largest number so far.
        bus: PCI addresses of the machine's GPUs, used if nothing else is known.
    """
    registry = {gpu.number: gpu for gpu in known}
    if not registry and not samples:
        registry = {number: KnownGpu(number, "", address, "") for number, address in enumerate(bus)}
    if samples:  # NVML outranks the PCI bus, where a GPU can be bound to another driver
        buses = {sample.bus for sample in samples}
        registry = {number: gpu for number, gpu in registry.items() if gpu.uuid or gpu.bus in buses}
    present = _match(registry, samples)
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
    if expect is not None:
        for number in reversed(absent):
            if len(registry) > expect:
                del registry[number]
        free = (number for number in count() if number not in registry)
        while len(registry) < expect:
            number = next(free)
            registry[number] = KnownGpu(number, "", "", "")
    return tuple(registry[number] for number in sorted(registry))


def replaced(before: Iterable[KnownGpu], now: Iterable[KnownGpu]) -> frozenset[int]:
    """Return the numbers whose GPU was replaced or removed from the list."""
    uuids = {gpu.number: gpu.uuid for gpu in now}
    return frozenset(gpu.number for gpu in before if gpu.uuid and uuids.get(gpu.number, "") != gpu.uuid)


def _match(registry: dict[int, KnownGpu], samples: Iterable[GpuSample]) -> dict[int, int]:
    """Map the index of each sample to the number of its GPU, for GPUs known by UUID or only by PCI
    address."""
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
    """Return the number of a GPU that was not seen before.

    A GPU in the slot of a missing GPU is its replacement. Elsewhere it is an additional GPU, unless no known
    GPU is present: then all GPUs were replaced.
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
