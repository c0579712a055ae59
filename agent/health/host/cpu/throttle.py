"""How fast thermal-throttle counters grow, those of a NUMA node's CPUs and of declared ones."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from agent.health.rate_window import Counter, read_again
from agent.model.cpuset import CpuSet, cpus_of
from agent.model.declared import DeclaredCpus
from agent.model.reading import NEVER_READ, Absence, Missing, Reading
from agent.model.snapshot import Snapshot, ThrottleSample


class Throttled(NamedTuple):
    """The throttle counters of some CPUs."""

    read_ns: int = -1
    """When they were read last."""
    core: Counter = Counter()
    package: Counter = Counter()


class Watched(NamedTuple):
    """Those of declared CPUs."""

    cpus: CpuSet
    throttled: Throttled


def throttled_after(
    before: Throttled, core: Reading, package: Reading, read_ns: int, window_s: int
) -> Throttled:
    """The counters after they were read; the same if they are of the same reading."""
    if before.read_ns == read_ns:
        return before
    return Throttled(
        read_ns,
        read_again(before.core, core, read_ns, window_s),
        read_again(before.package, package, read_ns, window_s),
    )


def watch(
    before: Mapping[str, Watched], snapshot: Snapshot, read_ns: int, window_s: int
) -> Iterator[tuple[str, Watched]]:
    """The counters of declared CPUs. A device that is declared anew, of other CPUs, begins anew."""
    if not snapshot.throttle:
        return
    of_cpu = {sample.cpu: sample for sample in snapshot.throttle}
    for file in snapshot.declared:
        for device in file.devices:
            if not isinstance(device.what, DeclaredCpus):
                continue
            cpus = device.what.cpus
            known = before.get(device.subject)
            if known is None or known.cpus != cpus:
                known = Watched(cpus, Throttled())
            if known.throttled.read_ns != read_ns:
                core, package = _counts(cpus, of_cpu)
                known = Watched(cpus, throttled_after(known.throttled, core, package, read_ns, window_s))
            yield device.subject, known


def _counts(cpus: CpuSet, of_cpu: Mapping[int, ThrottleSample]) -> tuple[Reading, Reading]:
    """As for a node: of cores the sum; of the package, which all its CPUs count, the largest."""
    mine = [of_cpu[cpu] for cpu in cpus_of(cpus) if cpu in of_cpu]
    return _together((one.core for one in mine), sum), _together((one.package for one in mine), max)


def _together(counters: Iterable[Reading], how: Callable[[list[int]], int]) -> Reading:
    """Those that are there as one; if one of them can no longer be read, so is that."""
    known: list[int] = []
    for counter in counters:
        if not isinstance(counter, Missing):
            known.append(counter)
        elif counter.absence is Absence.UNREADABLE:
            return counter
    return how(known) if known else NEVER_READ
