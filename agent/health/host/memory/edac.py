"""Memory errors as their rules see them: where they were counted, on which NUMA node, and how fast.

The kernel's EDAC drivers count per controller and, most of them, per module. Where they count nothing, the
lines that they wrote to the kernel log are counted instead.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.health.host.memory.edac_nodes import ControllerNodes
from agent.health.kernel_log.counts import times_told
from agent.health.kernel_log.values import LogCode, LogFact, LogPast
from agent.health.rate_window import RateWindow, appended, growth, growth_of
from agent.health.rules import Growth
from agent.model.machine import DimmSample, MachineSample
from agent.model.reading import Reading, is_absent
from agent.model.settings import HostLimits
from agent.model.snapshot import Snapshot
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS, Instant

_LINES: Final = (LogCode.EDAC_CORRECTED, LogCode.EDAC_UNCORRECTED)
_LOOKED_AT: Final = frozenset({"edac", "memory", "cores"})
Place = tuple[int, int | None]
"""Numbers of the controller and the module."""


class ErrorPlace(NamedTuple):
    """Where errors are counted: a module, or what a controller cannot put down to one."""

    name: str
    nodes: int | None
    """Bit set of the NUMA nodes it serves, or one of which it serves; None: nobody knows."""
    uncorrectable: Reading
    """Since the EDAC driver was loaded; of the log, since boot."""
    correctable: Growth
    """Within the window."""
    logged: bool = False
    """Counted by lines of the kernel log."""


class Total(NamedTuple):
    """A counter that somebody may reset. That takes back nothing of what it has counted."""

    raw: int
    """As it was read last."""
    history: RateWindow
    """Of its sum over all resets."""


@dataclass(frozen=True, slots=True)
class EdacPast:
    """What is remembered of memory errors."""

    looked: tuple[SourceSample, ...] = ()
    """When the controllers were read last, and what tells on which NUMA node they are."""
    log: LogPast | None = None
    counters: Mapping[Place, Total] = field(default_factory=dict)
    """Of correctable errors."""
    lines: Mapping[str, RateWindow] = field(default_factory=dict)
    """How often lines told of such, by what they call the module."""
    places: tuple[ErrorPlace, ...] = ()


def remember_errors(
    past: EdacPast, log: LogPast, snapshot: Snapshot, limits: HostLimits, now: Instant
) -> EdacPast:
    """The past after a snapshot. Costs next to nothing until the controllers have been read again."""
    machine = snapshot.machine
    if machine is None or not is_read(machine, "edac"):
        return past
    looked = tuple(source for source in machine.sources if source.name in _LOOKED_AT)
    if looked == past.looked and log is past.log:
        return past
    read_ns = next(source.beat_ns for source in looked if source.name == "edac")
    where = ControllerNodes(machine, snapshot.nodes)
    counting = {f"mc{one.controller}" for one in machine.dimms if not is_absent(one.uncorrectable)}
    window_s = limits.correctable_window_s
    counters = _grown(past.counters, machine.dimms, read_ns, window_s)
    facts = [fact for fact in log.of(*_LINES) if fact.place.partition(" ")[0] not in counting]
    lines = {
        fact.place: times_told(past.lines.get(fact.place, ()), fact, now.mono_ns, window_s * NS)
        for fact in facts
        if fact.code is LogCode.EDAC_CORRECTED
    }
    places = (*_counted(machine.dimms, counters, window_s, where), *_logged(facts, lines, window_s, where))
    return EdacPast(looked, log, counters, lines, places)


def is_read(machine: MachineSample | None, name: str) -> bool:
    """Whether one of the machine's sources has been read."""
    states = [source.state for source in machine.sources if source.name == name] if machine else []
    return any(state is not SourceState.STARTING for state in states)


# --- histories ------------------------------------------------------------------------------------------


def _grown(
    before: Mapping[Place, Total], dimms: Iterable[DimmSample], read_ns: int, window_s: int
) -> Mapping[Place, Total]:
    """The counters after they were read; one that cannot be read now is kept as it was."""
    found = dict(before)
    for sample in dimms:
        place, raw = (sample.controller, sample.dimm), sample.correctable
        if isinstance(raw, int):
            found[place] = _counted_on(before.get(place), raw, read_ns, window_s * NS)
    return found


def _counted_on(before: Total | None, raw: int, t_ns: int, window_ns: int) -> Total:
    """A counter that fell was reset: what happened meanwhile nobody knows."""
    if before is None:
        return Total(raw, appended((), 0, t_ns, window_ns))
    total = before.history[-1].value + max(0, raw - before.raw)
    return Total(raw, appended(before.history, total, t_ns, window_ns))


# --- places ---------------------------------------------------------------------------------------------


def _counted(
    dimms: Iterable[DimmSample], counters: Mapping[Place, Total], window_s: int, where: ControllerNodes
) -> Iterator[ErrorPlace]:
    """Modules, then what their controller cannot put down to one of them."""
    for samples in _by_controller(dimms):
        nodes = where.of_controller(samples)
        places = [_place(sample, counters, window_s, nodes) for sample in samples if _counts(sample)]
        if places and samples[-1].dimm is None and _counts(samples[-1]):
            places[-1] = _rest(places[-1], places[:-1])
        yield from places


def _counts(sample: DimmSample) -> bool:
    return not (is_absent(sample.uncorrectable) and is_absent(sample.correctable))


def _place(
    sample: DimmSample, counters: Mapping[Place, Total], window_s: int, nodes: int | None
) -> ErrorPlace:
    known = counters.get((sample.controller, sample.dimm))
    grown = growth_of(sample.correctable, known.history if known else (), window_s)
    return ErrorPlace(_name(sample), nodes, sample.uncorrectable, grown)


def _by_controller(dimms: Iterable[DimmSample]) -> Iterable[list[DimmSample]]:
    """Each controller's modules, then itself."""
    found: dict[int, list[DimmSample]] = {}
    for sample in dimms:
        found.setdefault(sample.controller, []).append(sample)
    return [sorted(samples, key=lambda sample: sample.dimm is None) for samples in found.values()]


def _name(sample: DimmSample) -> str:
    if sample.dimm is None:
        return f"mc{sample.controller} ({sample.label})" if sample.label else f"mc{sample.controller}"
    return f"mc{sample.controller} {sample.label or sample.location or f'module {sample.dimm}'}"


def _rest(controller: ErrorPlace, modules: Iterable[ErrorPlace]) -> ErrorPlace:
    uncorrectable, (events, span_s) = controller.uncorrectable, controller.correctable
    for module in modules:
        if isinstance(uncorrectable, int) and isinstance(module.uncorrectable, int):
            uncorrectable -= module.uncorrectable
        if isinstance(events, int) and isinstance(module.correctable.events, int):
            events -= module.correctable.events
    if isinstance(uncorrectable, int):
        uncorrectable = max(0, uncorrectable)  # they are not read at the same moment
    if isinstance(events, int):
        events = max(0, events)
    return controller._replace(uncorrectable=uncorrectable, correctable=Growth(events, span_s))


def _logged(
    facts: Iterable[LogFact], lines: Mapping[str, RateWindow], window_s: int, where: ControllerNodes
) -> Iterator[ErrorPlace]:
    """Of lines the log has all since boot: they need no history."""
    for fact in facts:
        grown, lost = Growth(0, 0.0), fact.times
        if fact.code is LogCode.EDAC_CORRECTED:
            grown, lost = growth(lines[fact.place], window_s), 0
        grown = grown._replace(span_s=float(window_s))
        yield ErrorPlace(fact.place, where.of_label(fact.place), lost, grown, logged=True)
