"""Search for a minimal script with the same violation: delta debugging of events, machine and times."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from msgspec.structs import replace

from agent.simulate.fault_model import FAULT_KINDS as KINDS
from agent.simulate.fault_model import QUIET_START_S, MachineSpec, NodeScript, ScriptEvent, parts_of

T = TypeVar("T")

TAIL_S: Final = 60
"""Time that a shrunk script runs after the violation [s]."""
Fails = Callable[[NodeScript], float | None]
"""Function that runs a script and returns the time of the searched violation [s]; None: it has none."""


def shrink(script: NodeScript, fails: Fails) -> NodeScript:
    """Return a shorter fault script with the same violation, from which no single event can be removed.

    Args:
        script: Fault script that violates an invariant.
        fails: Runs a script, and returns the time of a violation; called many times.
    """
    at_s = fails(script)
    if at_s is None:
        return script
    script = _until(script, at_s)
    whole = script
    events = minimal_subset(whole.events, lambda kept: fails(replace(whole, events=tuple(kept))) is not None)
    script = replace(script, events=tuple(events))
    for smaller in (_smaller_machines, _earlier_events, _shorter_events):
        script = _first_that_fails(script, smaller, fails)
    at_s = fails(script)
    return script if at_s is None else _until(script, at_s)


def minimal_subset(items: Sequence[T], is_enough: Callable[[list[T]], bool]) -> list[T]:
    """Return a part of `items` that passes `is_enough`, and of which no single item can be left out (ddmin).

    Args:
        is_enough: Tests a part, in the order of `items`; True for all of them.
    """
    kept, parts = list(items), 2
    while len(kept) >= 2:
        size = -(-len(kept) // parts)
        for begin in range(0, len(kept), size):
            rest = kept[:begin] + kept[begin + size :]
            if is_enough(rest):
                kept, parts = rest, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(len(kept), 2 * parts)
    return [] if len(kept) == 1 and is_enough([]) else kept


def _until(script: NodeScript, at_s: float) -> NodeScript:
    length = int(at_s) + TAIL_S
    events = tuple(event for event in script.events if event.at <= at_s)
    return replace(script, length=min(length, script.length), events=events)


def _first_that_fails(
    script: NodeScript, candidates: Callable[[NodeScript], Iterator[NodeScript]], fails: Fails
) -> NodeScript:
    """Replace a script by its first smaller form that still fails, until no form does; return the last."""
    while True:
        for candidate in candidates(script):
            if candidate != script and fails(candidate) is not None:
                script = candidate
                break
        else:
            return script


def _smaller_machines(script: NodeScript) -> Iterator[NodeScript]:
    machine = script.machine
    largest = {
        target: max(
            (event.target for event in script.events if KINDS[event.kind].target == target), default=-1
        )
        for target in ("gpu", "numa", "declared")
    }
    smallest = MachineSpec(
        gpus=largest["gpu"] + 1,
        model=machine.model,
        migs=machine.migs[: largest["gpu"] + 1],
        numa_nodes=max(largest["numa"] + 1, 1),
        cpus_per_node=2,
        pool_pages=machine.pool_pages,
        declares=largest["declared"] >= 0,
    )
    for candidate in (
        smallest,
        replace(machine, migs=()),
        replace(machine, gpus=smallest.gpus, migs=smallest.migs),
        replace(machine, cpus_per_node=2),
        replace(machine, declares=smallest.declares),
        replace(machine, pool_pages=0),
    ):
        if candidate.migs and len(candidate.migs) != candidate.gpus:
            continue
        if largest["declared"] < parts_of(candidate, "declared"):
            yield replace(script, machine=candidate)


def _earlier_events(script: NodeScript) -> Iterator[NodeScript]:
    """Yield the script with a shorter time before one event: removed, 60 s or 600 s, for each event."""
    for index, event in enumerate(script.events):
        before_s = script.events[index - 1].at if index else QUIET_START_S
        for gap_s in (0, 60, 600):
            earlier_s = event.at - before_s - gap_s
            if earlier_s > 0:
                moved = [replace(one, at=one.at - earlier_s) for one in script.events[index:]]
                length = max(script.length - earlier_s, 1)
                yield replace(script, events=(*script.events[:index], *moved), length=length)


def _shorter_events(script: NodeScript) -> Iterator[NodeScript]:
    for index, event in enumerate(script.events):
        for lasts in (1, 10, 60, 600):
            if 0 < lasts < event.lasts:
                shorter: ScriptEvent = replace(event, lasts=lasts)
                yield replace(script, events=(*script.events[:index], shorter, *script.events[index + 1 :]))
