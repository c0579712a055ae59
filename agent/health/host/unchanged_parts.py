"""Parts of the host that a change does not concern: the results of their rules stay as they are.

An evaluation of a change runs the rules of those parts whose input has changed. The results of the other
parts are reused until the next full evaluation, which is at most one heartbeat later. A part is reused only
if time alone changes none of its results: none of its devices has a finding or waits for history, and its
counters do not grow. Counters are then not read; at the next evaluation of the part they count as read in
between, with the same values.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from operator import attrgetter
from typing import Final, NamedTuple

from agent.devices.inventory import DeviceKind
from agent.health.evaluation import CachedOkResults, Conditions, Subject
from agent.health.host.machine.state import PRESSURE_SOURCE
from agent.health.host.verdicts import HOST_RULES, MACHINE_SUBJECT, HostRuleState
from agent.health.kernel_log.facts import KernelLogCode
from agent.health.rate_window import RateWindow
from agent.model.reading import source_name
from agent.model.settings import EngineSettings
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant

_state: Final = attrgetter("state")
_beat_ns: Final = attrgetter("beat_ns")
_COUNTER_SOURCES: Final[Mapping[str, str]] = {DeviceKind.CPU: "throttle", DeviceKind.MEMORY: "edac"}
"""Source of the counters of a part of the host. The rules' state takes them over after its next pass only."""


class PartResults(NamedTuple):
    """Input of the rules of one part of the host, and what their results, which are reused, depend on."""

    inputs: tuple[object, ...]
    subjects: frozenset[Subject]
    due_ns: int | None
    """Monotonic time at which the part must be evaluated again [ns]; None: no such time."""


class HostResults(NamedTuple):
    """Parts of the host whose results the next evaluation can reuse, and the input that all parts share."""

    shared: tuple[object, ...] = ()
    parts: Mapping[str, PartResults] = {}
    """Results by part: the kind of the devices, or MACHINE_SUBJECT."""
    beats_ns: Mapping[str, int] = {}
    """Time of the last pass of each source in the last evaluation [ns]."""


class HostInputs(NamedTuple):
    """Input of the rules of the host in one evaluation."""

    shared: tuple[object, ...]
    """Values whose change concerns all parts."""
    parts: Mapping[str, tuple[object, ...]]
    beats_ns: Mapping[str, int]
    """Time of the last pass of each source [ns]."""


def host_inputs(snapshot: Snapshot, settings: EngineSettings) -> HostInputs:
    """Return the input of the rules of each part of the host; no parts if the machine's state is not read."""
    machine, log = snapshot.machine, snapshot.log
    if machine is None:
        return HostInputs((), {}, {})
    sources = snapshot.sources
    beats_ns = dict(zip(map(source_name, sources), map(_beat_ns, sources), strict=True))
    shared = (
        settings,
        tuple(beats_ns),
        tuple(map(_state, machine.sources)),
        (log.lines, log.lost, log.is_complete, log.source.state) if log else None,
        snapshot.declared,
    )
    nodes = snapshot.nodes
    return HostInputs(
        shared,
        {
            DeviceKind.CPU: (snapshot.cpus, nodes, snapshot.throttle, machine.cores, machine.smt_active),
            DeviceKind.MEMORY: (
                *(nodes, machine.dimms, machine.numa, machine.cores),
                *(machine.nodes_online, machine.nodes_memory, machine.corrupted_kib),
            ),
            DeviceKind.HUGEPAGES: (snapshot.pools, machine.surplus_failed),
            MACHINE_SUBJECT: (machine.cores, machine.pressure, beats_ns.get(PRESSURE_SOURCE)),
        },
        beats_ns,
    )


def unchanged_parts(
    results: HostResults, inputs: HostInputs, conditions: Conditions, now: Instant
) -> frozenset[str]:
    """Return the parts of the host whose results are still valid.

    Args:
        results: Results of the last evaluation.
        conditions: Raised and pending faults after the last evaluation. Parts that have any are evaluated
            again.
    """
    if not results.parts or results.shared != inputs.shared:
        return frozenset()
    faulty, found = {subject for subject, _ in conditions}, []
    for part, values in inputs.parts.items():
        known = results.parts.get(part)
        if (
            known is not None
            and known.inputs == values
            and (known.due_ns is None or now.mono_ns < known.due_ns)
            and faulty.isdisjoint(known.subjects)
        ):
            found.append(part)
    return frozenset(found)


def next_host_results(
    before: HostResults,
    inputs: HostInputs,
    unchanged: Set[str],
    host: HostRuleState,
    cached_ok: Mapping[Subject, CachedOkResults],
    settings: EngineSettings,
    now: Instant,
) -> HostResults:
    """Return the parts of the host whose results the next evaluation can reuse.

    Args:
        before: Results of the last evaluation.
        unchanged: Parts whose results this evaluation reused.
        host: State of the host's rules after this evaluation.
        cached_ok: Rule results without findings of this evaluation.
    """
    parts: dict[str, PartResults] = {}
    for part, values in inputs.parts.items():
        if part in unchanged:
            parts[part] = before.parts[part]
            continue
        if part in _COUNTER_SOURCES and not _are_counters_read(before, inputs, part):
            continue
        subjects = _subjects(host, part)
        results = [cached_ok[subject] for subject in subjects if subject in cached_ok]
        counters = _counters(host, part, settings)
        if len(results) < len(subjects) or _has_log_facts(host, part) or any(map(_has_grown, counters)):
            continue
        due_in_ns = min((ns for result in results for ns in result.due_in_ns), default=None)
        due = [] if due_in_ns is None else [now.mono_ns + due_in_ns]
        for window, length_s in counters:
            full_ns = window[0].t_ns + length_s * NS
            if full_ns > window[-1].t_ns:  # rules, also those of declared devices, wait for a longer history
                due.append(full_ns)
        parts[part] = PartResults(values, subjects, min(due, default=None))
    return HostResults(inputs.shared, parts, inputs.beats_ns)


def _are_counters_read(before: HostResults, inputs: HostInputs, part: str) -> bool:
    """Return whether the rules' state has the counters of this evaluation."""
    source, known = _COUNTER_SOURCES[part], before.parts.get(part)
    is_new = inputs.beats_ns.get(source) != before.beats_ns.get(source)
    return is_new or (known is not None and known.inputs == inputs.parts[part])


def due_times(results: HostResults, parts: Iterable[str]) -> Iterator[int]:
    """Yield the times at which parts of the host whose results were reused must be evaluated [ns]."""
    for part in parts:
        if (due_ns := results.parts[part].due_ns) is not None:
            yield due_ns


def _subjects(host: HostRuleState, part: str) -> frozenset[Subject]:
    """Return the devices of a part of the host."""
    if part not in HOST_RULES:
        return frozenset({MACHINE_SUBJECT})
    return frozenset(device.subject for device in host.devices if device.kind == part)


class _Counter(NamedTuple):
    """Recent readings of a counter, and the length of the window that rules evaluate [s]."""

    window: RateWindow
    length_s: int


def _counters(host: HostRuleState, part: str, settings: EngineSettings) -> list[_Counter]:
    """Return the counters that the rules of a part of the host evaluate, except those that cannot be read."""
    windows: list[RateWindow] = []
    length_s = settings.throttle_window_s
    if part == DeviceKind.CPU:
        throttled = [known.throttled for known in host.cpus.declared_throttle.values()]
        throttled += host.cpus.node_throttle.values()
        windows = [counter.window for counters in throttled for counter in (counters.core, counters.package)]
    elif part == DeviceKind.MEMORY:
        length_s = settings.host.correctable_window_s
        windows = [total.window for total in host.memory.errors.counters.values()]
    return [_Counter(window, length_s) for window in windows if window]


def _has_grown(counter: _Counter) -> bool:
    return counter.window[0].value != counter.window[-1].value


def _has_log_facts(host: HostRuleState, part: str) -> bool:
    """Return whether the kernel log has reported errors of a part of the host whose age or number counts."""
    match part:
        case DeviceKind.CPU:
            return bool(host.cpus.log_facts.began)
        case DeviceKind.MEMORY:
            return bool(host.memory.errors.lines)
        case DeviceKind.HUGEPAGES:
            return False
        case _:
            return bool(host.machine.unnamed or host.kernel_log.select(KernelLogCode.AER_CORRECTED))
