"""Memory errors that the kernel's EDAC drivers report: their location, NUMA node and rate.

Most EDAC drivers count errors per memory controller and per memory module. If a driver has no counters, its
lines in the kernel log are counted instead. EDAC does not report the NUMA node of a memory controller. The
NUMA node is inferred, or unknown.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from agent.health.kernel_log.facts import KernelLogCode, KernelLogFact, KernelLogState
from agent.health.kernel_log.latch import next_line_window
from agent.health.rate_window import (
    RateWindow,
    append_reading,
    counter_growth,
    repeat_last_value,
    window_growth,
)
from agent.health.rules import CounterGrowth
from agent.model.cpuset import cpu_numbers
from agent.model.machine_samples import DimmSample, MachineSample
from agent.model.reading import Missing, Reading, SourceSample, SourceState, is_absent
from agent.model.settings import HostLimits
from agent.model.snapshot import NumaCpuSample, Snapshot
from agent.model.time import NS, Instant

_SOCKET: Final = re.compile(r"(?:SrcID|Socket)#(\d{1,4})")
"""Socket number in module labels of Intel's EDAC drivers: ``CPU_SrcID#0_MC#0_Chan#0_DIMM#0``, ``Ivy Bridge
SrcID#0_Ha#0``. Labels from firmware are ambiguous: vendors count the sockets of ``P1-DIMMA1`` from 0 or 1."""
_AMD: Final = re.compile(r"F[0-9A-F]{1,2}h(?:_M[0-9A-F]{1,2}h)?")
"""Controller names of the driver amd64_edac for memory of CPUs, ``F19h_M10h``; for memory of GPUs they
differ."""
_IN_PACKAGE: Final = "HBMC#"
"""Text in labels of high-bandwidth memory, whose NUMA node may have no CPUs and is not named by the label."""


def numa_nodes_with_memory(machine: MachineSample) -> int:
    """Return the numbers of the NUMA nodes that have memory, as a bit set."""
    if isinstance(machine.nodes_memory, int):
        return machine.nodes_memory
    return sum(
        1 << numa.numa_node for numa in machine.numa if isinstance(numa.total_kib, int) and numa.total_kib
    )


class ControllerNumaNodes:
    """Mapping of memory controllers and memory modules to NUMA nodes, inferred because EDAC does not report
    it."""

    def __init__(
        self, machine: MachineSample, nodes: Iterable[NumaCpuSample], having_memory: Iterable[int]
    ) -> None:
        """Create the mapping.

        Args:
            having_memory: NUMA nodes that have memory or had some since the agent's start. A node whose
                memory is offline keeps its controllers, and so their errors.
        """
        self._memory = sum(1 << node for node in having_memory)
        self._amd = {
            sample.controller
            for sample in machine.dimms
            if sample.dimm is None and _AMD.fullmatch(sample.label)
        }
        self._sockets = self._nodes_of_sockets(machine, nodes) if machine.dimms else {}

    def _nodes_of_sockets(self, machine: MachineSample, nodes: Iterable[NumaCpuSample]) -> dict[int, int]:
        """Return the NUMA nodes with memory that belong to each socket, as bit sets by socket number."""
        package_of = {core.cpu: core.package for core in machine.cores}
        found: dict[int, int] = {}
        for node in nodes:
            if isinstance(node.cpus, Missing) or not self._memory >> node.numa_node & 1:
                continue
            for package in {package_of.get(cpu) for cpu in cpu_numbers(node.cpus)}:
                if isinstance(package, int):
                    found[package] = found.get(package, 0) | 1 << node.numa_node
        return found

    def controller_nodes(self, samples: Sequence[DimmSample]) -> int | None:
        """Return the NUMA nodes of a memory controller as a bit set; None: they are not known.

        Args:
            samples: Samples of the controller: those of its modules, then that of the controller itself.
        """
        number = samples[0].controller
        if number in self._amd and self._memory.bit_count() > 1:
            # amd64_edac numbers controllers as the hardware does: by socket, on the first EPYC by die
            if len(self._amd) == self._memory.bit_count():
                return 1 << number if self._memory >> number & 1 else None
            return self._sockets.get(number) if len(self._amd) == len(self._sockets) else None
        # modules first: in old kernels the "Socket#" of a controller's name is a NUMA node's number
        return self.label_nodes(" ".join(sample.label for sample in samples))

    def label_nodes(self, label: str) -> int | None:
        """Return the NUMA nodes of a memory module as a bit set, inferred from its EDAC label; None: not
        known."""
        if self._memory.bit_count() == 1:
            return self._memory
        match = _SOCKET.search(label)
        return self._sockets.get(int(match[1])) if match and _IN_PACKAGE not in label else None


_LOG_CODES: Final = (KernelLogCode.EDAC_CORRECTED, KernelLogCode.EDAC_UNCORRECTED)
_SOURCES: Final = frozenset({"edac", "memory", "cores"})
ModuleKey = tuple[int, int | None]
"""Number of a memory controller and number of its module; module None: the controller itself."""


class MemoryErrorCounts(NamedTuple):
    """Memory errors of one location: a memory module, or a controller. A controller has the errors that
    belong to none of its modules."""

    name: str
    """Controller and label of the module: ``mc0 CPU_SrcID#0_MC#0_Chan#0_DIMM#0``."""
    numa_nodes: int | None
    """NUMA nodes to which the memory may belong, as a bit set; None: unknown."""
    uncorrectable: Reading
    """Uncorrectable errors since the EDAC driver was loaded; for lines of the kernel log, since boot."""
    correctable: CounterGrowth
    """Correctable errors within the window."""
    logged: bool = False
    """True: kernel-log lines are counted, because the EDAC driver has no counters."""
    since: Instant | None = None
    """Time of the first kernel-log line about the location; None: the EDAC driver's counters are read
    instead.
    """


class ErrorTotal(NamedTuple):
    """Total of the correctable errors of one location. It does not decrease when the counter is reset."""

    raw: int
    """Value of the EDAC driver's counter at the last reading."""
    window: RateWindow
    """Window over the total: growth of the counter since its first reading, without falls at resets."""


class EdacState(NamedTuple):
    """Memory errors counted so far, carried from one evaluation to the next."""

    sources: tuple[SourceSample, ...] = ()
    """Samples of the sources that read the controllers and the NUMA nodes, to detect new readings."""
    log: KernelLogState | None = None
    counters: Mapping[ModuleKey, ErrorTotal] = {}
    """Totals of correctable errors, by controller and module."""
    lines: Mapping[str, RateWindow] = {}
    """Windows over the number of kernel-log lines about correctable errors, by memory location."""
    locations: tuple[MemoryErrorCounts, ...] = ()
    read_ns: int = 0
    """CLOCK_MONOTONIC of the newest reading of the controllers that is in ``counters`` [ns]. Later readings,
    up to that of ``sources``, had the same values."""


def unchanged_edac_state(previous: EdacState, snapshot: Snapshot) -> EdacState:
    """Return the memory errors after a snapshot with the same readings as in the last evaluation."""
    sources = _edac_sources(snapshot.machine) if snapshot.machine else ()
    return previous if sources == previous.sources else previous._replace(sources=sources)


def _edac_sources(machine: MachineSample) -> tuple[SourceSample, ...]:
    return tuple([source for source in machine.sources if source.name in _SOURCES])


def _read_ns(sources: Iterable[SourceSample]) -> int:
    return next((source.beat_ns for source in sources if source.name == "edac"), 0)


def next_edac_state(
    previous: EdacState,
    log: KernelLogState,
    snapshot: Snapshot,
    limits: HostLimits,
    now: Instant,
    having_memory: Iterable[int],
) -> EdacState:
    """Return the memory errors after a snapshot (the newest readings). The same object is returned until the
    memory controllers have been read again.

    Args:
        having_memory: NUMA nodes that have memory or had some since the agent's start.
    """
    machine = snapshot.machine
    if machine is None or not has_edac_been_read(machine):
        return previous
    sources = _edac_sources(machine)
    if sources == previous.sources and log is previous.log:
        return previous
    read_ns = _read_ns(sources)
    controllers = ControllerNumaNodes(machine, snapshot.nodes, having_memory)
    counting = {f"mc{sample.controller}" for sample in machine.dimms if not is_absent(sample.uncorrectable)}
    window_s = limits.correctable_window_s
    counters = _next_counters(previous, machine.dimms, read_ns, window_s)
    facts = [fact for fact in log.select(*_LOG_CODES) if fact.location.partition(" ")[0] not in counting]
    lines = {
        fact.location: next_line_window(
            previous.lines.get(fact.location, ()), fact, now.mono_ns, window_s * NS
        )
        for fact in facts
        if fact.code is KernelLogCode.EDAC_CORRECTED
    }
    locations = (
        *_counter_locations(machine.dimms, counters, window_s, controllers),
        *_logged_locations(facts, lines, window_s, controllers),
    )
    return EdacState(sources, log, counters, lines, locations, read_ns)


def has_source_been_read(machine: MachineSample | None, name: str) -> bool:
    """Return True if the machine has the source ``name`` and the first pass (reading) of it has finished."""
    states = [source.state for source in machine.sources if source.name == name] if machine else []
    return any(state is not SourceState.STARTING for state in states)


def has_edac_been_read(machine: MachineSample | None) -> bool:
    """Return True if EDAC's counters and the CPU packages, which give the NUMA nodes, have been read."""
    # the sources of a pass are published one by one; before, an error would count for all NUMA nodes
    states = {source.name: source.state for source in _edac_sources(machine)} if machine else {}
    return "edac" in states and SourceState.STARTING not in states.values()


def _next_counters(
    previous: EdacState, dimms: Iterable[DimmSample], read_ns: int, window_s: int
) -> Mapping[ModuleKey, ErrorTotal]:
    """Return the totals of correctable memory errors after a reading of EDAC's counters. If a counter cannot
    be read, its total stays as it is."""
    found, window_ns = dict(previous.counters), window_s * NS
    stored_ns, repeated_ns = previous.read_ns, _read_ns(previous.sources)
    for sample in dimms:
        key, raw = (sample.controller, sample.dimm), sample.correctable
        if isinstance(raw, int):
            known = found.get(key)
            if known and known.window[-1].t_ns == stored_ns < repeated_ns:
                known = known._replace(window=repeat_last_value(known.window, repeated_ns, window_ns))
            found[key] = _next_total(known, raw, read_ns, window_ns)
    return found


def _next_total(before: ErrorTotal | None, raw: int, t_ns: int, window_ns: int) -> ErrorTotal:
    """Return the total of correctable errors of a location after a reading of its counter. If the counter is
    lower than before, it was reset, and nothing is added to the total."""
    if before is None:
        return ErrorTotal(raw, append_reading((), 0, t_ns, window_ns))
    total = before.window[-1].value + max(0, raw - before.raw)
    return ErrorTotal(raw, append_reading(before.window, total, t_ns, window_ns))


def _counter_locations(
    dimms: Iterable[DimmSample],
    counters: Mapping[ModuleKey, ErrorTotal],
    window_s: int,
    controllers: ControllerNumaNodes,
) -> Iterator[MemoryErrorCounts]:
    """Yield the memory errors that EDAC counters show, for each memory module and each controller. The errors
    of a controller are the errors that belong to none of its modules."""
    for samples in _by_controller(dimms):
        nodes = controllers.controller_nodes(samples)
        locations = [
            _location(sample, counters, window_s, nodes) for sample in samples if _has_counter(sample)
        ]
        if locations and samples[-1].dimm is None and _has_counter(samples[-1]):
            locations[-1] = _without_modules(locations[-1], locations[:-1])
        yield from locations


def _has_counter(sample: DimmSample) -> bool:
    return not (is_absent(sample.uncorrectable) and is_absent(sample.correctable))


def _location(
    sample: DimmSample, counters: Mapping[ModuleKey, ErrorTotal], window_s: int, nodes: int | None
) -> MemoryErrorCounts:
    known = counters.get((sample.controller, sample.dimm))
    grown = counter_growth(sample.correctable, known.window if known else (), window_s)
    return MemoryErrorCounts(_name(sample), nodes, sample.uncorrectable, grown)


def _by_controller(dimms: Iterable[DimmSample]) -> Iterable[list[DimmSample]]:
    """Return the EDAC samples grouped by controller: first the samples of its modules, then that of the
    controller."""
    found: dict[int, list[DimmSample]] = {}
    for sample in dimms:
        found.setdefault(sample.controller, []).append(sample)
    return [sorted(samples, key=lambda sample: sample.dimm is None) for samples in found.values()]


def _name(sample: DimmSample) -> str:
    if sample.dimm is None:
        return f"mc{sample.controller} ({sample.label})" if sample.label else f"mc{sample.controller}"
    return f"mc{sample.controller} {sample.label or sample.location or f'module {sample.dimm}'}"


def _without_modules(
    controller: MemoryErrorCounts, modules: Iterable[MemoryErrorCounts]
) -> MemoryErrorCounts:
    uncorrectable, (events, span_s) = controller.uncorrectable, controller.correctable
    for module in modules:
        if isinstance(uncorrectable, int) and isinstance(module.uncorrectable, int):
            uncorrectable -= module.uncorrectable
        if isinstance(events, int) and isinstance(module.correctable.events, int):
            events -= module.correctable.events
    if isinstance(uncorrectable, int):
        uncorrectable = max(0, uncorrectable)  # counters are not read at the same time
    if isinstance(events, int):
        events = max(0, events)
    return controller._replace(uncorrectable=uncorrectable, correctable=CounterGrowth(events, span_s))


def _logged_locations(
    facts: Iterable[KernelLogFact],
    lines: Mapping[str, RateWindow],
    window_s: int,
    controllers: ControllerNumaNodes,
) -> Iterator[MemoryErrorCounts]:
    """Yield the memory errors of the locations that kernel-log lines name. The log has all lines since boot,
    so the growth of their number is known for the whole window."""
    for fact in facts:
        grown, uncorrectable = CounterGrowth(0, 0.0), fact.times
        if fact.code is KernelLogCode.EDAC_CORRECTED:
            grown, uncorrectable = window_growth(lines[fact.location], window_s), 0
        grown = grown._replace(span_s=float(window_s))
        yield MemoryErrorCounts(
            fact.location,
            controllers.label_nodes(fact.location),
            uncorrectable,
            grown,
            logged=True,
            since=fact.since,
        )
