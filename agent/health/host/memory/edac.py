"""Memory errors from EDAC: their location, their NUMA node, and their rate.

The kernel's EDAC drivers count errors per memory controller and, most of them, per module. Where a driver has
no counters, its lines in the kernel log are counted instead. EDAC does not name the NUMA node of a
controller; the NUMA node is inferred, or unknown.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.health.kernel_log.latch import next_line_counts
from agent.health.kernel_log.values import LogCode, LogFact, LogState
from agent.health.rate_window import RateWindow, appended, growth, growth_of
from agent.health.rules import Growth
from agent.model.cpuset import cpus_of
from agent.model.machine import DimmSample, MachineSample
from agent.model.reading import Missing, Reading, is_absent
from agent.model.settings import HostLimits
from agent.model.snapshot import NodeSample, Snapshot
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS, Instant

_SOCKET: Final = re.compile(r"(?:SrcID|Socket)#(\d{1,4})")
"""Socket number in labels of Intel's drivers: ``CPU_SrcID#0_MC#0_Chan#0_DIMM#0``, ``Ivy Bridge
SrcID#0_Ha#0``. Labels from firmware are ambiguous: ``P1-DIMMA1`` is on the first socket for one vendor, on
the second for another.
"""
_AMD: Final = re.compile(r"F[0-9A-F]{1,2}h(?:_M[0-9A-F]{1,2}h)?")
"""Labels of CPU memory controllers in the driver amd64_edac, ``F19h_M10h``; its labels for GPUs differ."""
_IN_PACKAGE: Final = "HBMC#"
"""Text in labels of high-bandwidth memory, which may be a NUMA node without CPUs that the label does not
name."""


def memory_nodes(machine: MachineSample) -> int:
    """Return the NUMA nodes that have memory, as a bit set."""
    if isinstance(machine.nodes_memory, int):
        return machine.nodes_memory
    return sum(1 << numa.node for numa in machine.numa if isinstance(numa.total_kib, int) and numa.total_kib)


class ControllerNodes:
    """NUMA nodes of memory controllers, as bit sets; None where they are unknown."""

    def __init__(self, machine: MachineSample, nodes: Iterable[NodeSample]) -> None:
        self._memory = memory_nodes(machine)
        self._amd = {
            sample.controller
            for sample in machine.dimms
            if sample.dimm is None and _AMD.fullmatch(sample.label)
        }
        self._sockets = self._nodes_of_sockets(machine, nodes) if machine.dimms else {}

    def _nodes_of_sockets(self, machine: MachineSample, nodes: Iterable[NodeSample]) -> dict[int, int]:
        """Return the NUMA nodes with memory as a bit set, by number of the CPU package (socket)."""
        package_of = {core.cpu: core.package for core in machine.cores}
        found: dict[int, int] = {}
        for node in nodes:
            if isinstance(node.cpus, Missing) or not self._memory >> node.node & 1:
                continue
            for package in {package_of.get(cpu) for cpu in cpus_of(node.cpus)}:
                if isinstance(package, int):
                    found[package] = found.get(package, 0) | 1 << node.node
        return found

    def controller_nodes(self, samples: Sequence[DimmSample]) -> int | None:
        """Return the NUMA nodes of a controller and its modules as a bit set, None if unknown; ``samples``
        has the modules first."""
        number = samples[0].controller
        if number in self._amd and self._memory.bit_count() > 1:
            # amd64_edac numbers controllers as the hardware does: by socket, on the first EPYC by die
            if len(self._amd) == self._memory.bit_count():
                return 1 << number if self._memory >> number & 1 else None
            return self._sockets.get(number) if len(self._amd) == len(self._sockets) else None
        # modules first: in old kernels the "Socket#" of a controller's name is a NUMA node's number
        return self.label_nodes(" ".join(sample.label for sample in samples))

    def label_nodes(self, label: str) -> int | None:
        """Return the NUMA nodes of a module as a bit set, inferred from its EDAC label; None if unknown."""
        if self._memory.bit_count() == 1:
            return self._memory
        match = _SOCKET.search(label)
        return self._sockets.get(int(match[1])) if match and _IN_PACKAGE not in label else None


_LOG_CODES: Final = (LogCode.EDAC_CORRECTED, LogCode.EDAC_UNCORRECTED)
_SOURCES: Final = frozenset({"edac", "memory", "cores"})
ModuleKey = tuple[int, int | None]
"""Controller number and module number; module None stands for the controller itself."""


class ErrorLocation(NamedTuple):
    """Memory errors of one location: a module, or a controller for errors that it attributes to no module."""

    name: str
    nodes: int | None
    """Bit set of the NUMA nodes to which the memory may belong; None: unknown."""
    uncorrectable: Reading
    """Uncorrectable errors since the EDAC driver was loaded; for lines of the kernel log, since boot."""
    correctable: Growth
    """Correctable errors within the window."""
    logged: bool = False
    """True if kernel-log lines are counted instead of EDAC counters."""


class MonotonicTotal(NamedTuple):
    """Sum of a counter's growth over all its resets, with the last raw value."""

    raw: int
    """Counter value at the last reading."""
    window: RateWindow
    """Window over the sum of the counter's growth."""


@dataclass(frozen=True, slots=True)
class EdacState:
    """Memory errors counted so far."""

    sources: tuple[SourceSample, ...] = ()
    """Samples of the sources that read the controllers and the NUMA nodes, to detect new readings."""
    log: LogState | None = None
    counters: Mapping[ModuleKey, MonotonicTotal] = field(default_factory=dict)
    """Counters of correctable errors, by controller and module."""
    lines: Mapping[str, RateWindow] = field(default_factory=dict)
    """Windows over log lines about correctable errors, by the module's label."""
    locations: tuple[ErrorLocation, ...] = ()


def next_edac_state(
    previous: EdacState, log: LogState, snapshot: Snapshot, limits: HostLimits, now: Instant
) -> EdacState:
    """Return the EDAC state after a snapshot; costs almost nothing until the controllers have been read
    again."""
    machine = snapshot.machine
    if machine is None or not is_read(machine, "edac"):
        return previous
    sources = tuple(source for source in machine.sources if source.name in _SOURCES)
    if sources == previous.sources and log is previous.log:
        return previous
    read_ns = next(source.beat_ns for source in sources if source.name == "edac")
    controllers = ControllerNodes(machine, snapshot.nodes)
    counting = {f"mc{sample.controller}" for sample in machine.dimms if not is_absent(sample.uncorrectable)}
    window_s = limits.correctable_window_s
    counters = _next_counters(previous.counters, machine.dimms, read_ns, window_s)
    facts = [fact for fact in log.select(*_LOG_CODES) if fact.location.partition(" ")[0] not in counting]
    lines = {
        fact.location: next_line_counts(
            previous.lines.get(fact.location, ()), fact, now.mono_ns, window_s * NS
        )
        for fact in facts
        if fact.code is LogCode.EDAC_CORRECTED
    }
    locations = (
        *_counter_locations(machine.dimms, counters, window_s, controllers),
        *_logged_locations(facts, lines, window_s, controllers),
    )
    return EdacState(sources, log, counters, lines, locations)


def is_read(machine: MachineSample | None, name: str) -> bool:
    """Return True if the source ``name`` of the machine has been read."""
    states = [source.state for source in machine.sources if source.name == name] if machine else []
    return any(state is not SourceState.STARTING for state in states)


# --- counters -------------------------------------------------------------------------------------------


def _next_counters(
    before: Mapping[ModuleKey, MonotonicTotal], dimms: Iterable[DimmSample], read_ns: int, window_s: int
) -> Mapping[ModuleKey, MonotonicTotal]:
    """Return the counters of correctable errors after a reading; a counter that cannot be read keeps its
    value."""
    found = dict(before)
    for sample in dimms:
        key, raw = (sample.controller, sample.dimm), sample.correctable
        if isinstance(raw, int):
            found[key] = _next_total(before.get(key), raw, read_ns, window_s * NS)
    return found


def _next_total(before: MonotonicTotal | None, raw: int, t_ns: int, window_ns: int) -> MonotonicTotal:
    """Return the total after a reading. A counter that fell was reset; errors between the two readings are
    unknown."""
    if before is None:
        return MonotonicTotal(raw, appended((), 0, t_ns, window_ns))
    total = before.window[-1].value + max(0, raw - before.raw)
    return MonotonicTotal(raw, appended(before.window, total, t_ns, window_ns))


# --- locations ------------------------------------------------------------------------------------------


def _counter_locations(
    dimms: Iterable[DimmSample],
    counters: Mapping[ModuleKey, MonotonicTotal],
    window_s: int,
    controllers: ControllerNodes,
) -> Iterator[ErrorLocation]:
    """Yield the errors of each module, then the errors that a controller cannot attribute to a module."""
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
    sample: DimmSample, counters: Mapping[ModuleKey, MonotonicTotal], window_s: int, nodes: int | None
) -> ErrorLocation:
    known = counters.get((sample.controller, sample.dimm))
    grown = growth_of(sample.correctable, known.window if known else (), window_s)
    return ErrorLocation(_name(sample), nodes, sample.uncorrectable, grown)


def _by_controller(dimms: Iterable[DimmSample]) -> Iterable[list[DimmSample]]:
    """Return the samples grouped by controller: its modules, then the controller itself."""
    found: dict[int, list[DimmSample]] = {}
    for sample in dimms:
        found.setdefault(sample.controller, []).append(sample)
    return [sorted(samples, key=lambda sample: sample.dimm is None) for samples in found.values()]


def _name(sample: DimmSample) -> str:
    if sample.dimm is None:
        return f"mc{sample.controller} ({sample.label})" if sample.label else f"mc{sample.controller}"
    return f"mc{sample.controller} {sample.label or sample.location or f'module {sample.dimm}'}"


def _without_modules(controller: ErrorLocation, modules: Iterable[ErrorLocation]) -> ErrorLocation:
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
    return controller._replace(uncorrectable=uncorrectable, correctable=Growth(events, span_s))


def _logged_locations(
    facts: Iterable[LogFact], lines: Mapping[str, RateWindow], window_s: int, controllers: ControllerNodes
) -> Iterator[ErrorLocation]:
    """Yield the errors of the locations that kernel-log lines name. The log holds all lines since boot, so
    the window is complete.
    """
    for fact in facts:
        grown, uncorrectable = Growth(0, 0.0), fact.times
        if fact.code is LogCode.EDAC_CORRECTED:
            grown, uncorrectable = growth(lines[fact.location], window_s), 0
        grown = grown._replace(span_s=float(window_s))
        yield ErrorLocation(
            fact.location, controllers.label_nodes(fact.location), uncorrectable, grown, logged=True
        )
