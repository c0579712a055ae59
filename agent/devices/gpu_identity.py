"""Which GPU is ``gpu-3``: names that stay with a GPU over restarts, driver reloads and lost neighbours.

NVML numbers its GPUs by PCI address, anew each time it counts: with one GPU gone, those behind it move up. A
pod's claim says ``gpu-3`` and means a piece of hardware, so a number stays with a UUID as long as that is
known, and a GPU that is gone keeps its number until another takes its place.
"""

from collections.abc import Iterable, Sequence
from itertools import count

from agent.model.faults import KnownGpu
from agent.model.gpu import GpuSample


def assign_indices(
    known: Iterable[KnownGpu], samples: Sequence[GpuSample], expect: int | None, bus: Sequence[str] = ()
) -> tuple[KnownGpu, ...]:
    """The GPUs of this node by number, the missing ones among them.

    Args:
        known: As they were called last.
        samples: Those that NVML has counted since the agent started.
        expect: How many there must be; None: as many as there ever were.
        bus: PCI addresses of the machine's GPUs, for when nothing else is known.
    """
    roll = {gpu.number: gpu for gpu in known}
    if not roll and not samples:
        roll = {number: KnownGpu(number, "", address, "") for number, address in enumerate(bus)}
    if samples:  # NVML knows better than the bus, where a GPU may be another driver's
        buses = {sample.bus for sample in samples}
        roll = {number: gpu for number, gpu in roll.items() if gpu.uuid or gpu.bus in buses}
    present = _match(roll, samples)
    absent = [number for number in sorted(roll) if number not in present.values()]
    refitted = not present
    for sample in samples:
        if sample.index not in present:
            number = _place_of(sample, roll, absent, refitted=refitted)
            present[sample.index] = number
            absent = [other for other in absent if other != number]
    for sample in samples:
        number = present[sample.index]
        before = roll.get(number, KnownGpu(number, "", "", ""))
        roll[number] = before._replace(
            uuid=sample.uuid or before.uuid, bus=sample.bus or before.bus, name=sample.name or before.name
        )
    if expect is not None:
        for number in reversed(absent):
            if len(roll) > expect:
                del roll[number]
        free = (number for number in count() if number not in roll)
        while len(roll) < expect:
            number = next(free)
            roll[number] = KnownGpu(number, "", "", "")
    return tuple(roll[number] for number in sorted(roll))


def replaced(before: Iterable[KnownGpu], now: Iterable[KnownGpu]) -> frozenset[int]:
    """The numbers whose GPU is gone for good: another has its place, or nobody has."""
    uuids = {gpu.number: gpu.uuid for gpu in now}
    return frozenset(gpu.number for gpu in before if gpu.uuid and uuids.get(gpu.number, "") != gpu.uuid)


def _match(roll: dict[int, KnownGpu], samples: Iterable[GpuSample]) -> dict[int, int]:
    """Index to number, for the samples that are GPUs known by their UUID, or by their address alone."""
    by_uuid = {gpu.uuid: number for number, gpu in roll.items() if gpu.uuid}
    by_bus = {gpu.bus: number for number, gpu in roll.items() if gpu.bus}
    found: dict[int, int] = {}
    for sample in samples:
        number = by_uuid.get(sample.uuid)
        if number is None:
            number = by_bus.get(sample.bus)
            if number is not None and sample.uuid and roll[number].uuid:
                number = None  # another GPU in its slot
        if number is not None and number not in found.values():
            found[sample.index] = number
    return found


def _place_of(sample: GpuSample, roll: dict[int, KnownGpu], absent: Sequence[int], *, refitted: bool) -> int:
    """The number of a GPU that nobody has seen before.

    In the slot of one that is gone it is a replacement. Elsewhere it is one more, unless none of those known
    is there: then the whole machine was fitted anew, and the old ones will not come back.
    """
    for number in absent:
        if roll[number].bus and roll[number].bus == sample.bus:
            return number
    nameless = [number for number in absent if not roll[number].uuid and not roll[number].bus]
    if nameless:
        return sample.index if sample.index in nameless else nameless[0]
    if sample.index not in roll:
        return sample.index
    if absent and (refitted or not sample.uuid):
        return sample.index if sample.index in absent else absent[0]
    return next(number for number in count() if number not in roll)
