"""Simulated fleet with faults: ``python -m agent.simulate --nodes N --days D --seed S``.

Exit status: 0 if all invariants hold; 1 if one is violated, and a shortened fault script is printed; 2 for
invalid options; 70 if a process was killed; 74 if the output could not be written, 141 if its reader closed
it; 130 after Ctrl-C.

The module also searches for a minimal fault script that still violates the invariant: delta debugging of
events, machine and times.
"""

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Final, TypeVar

from msgspec.structs import replace

from agent.errors import ConfigError, OutputError, OutputPipeClosed
from agent.simulate.fault_model import (
    DAY_S,
    DAYS_MAX,
    FAULT_KINDS,
    QUIET_START_S,
    MachineSpec,
    NodeScript,
    ScriptEvent,
    encode_script,
    parts_of,
    random_script,
    read_script,
)
from agent.simulate.invariants import INVARIANTS
from agent.simulate.node_run import NodeResult, NodeRun
from agent.system.output import print_last_error
from agent.system.threads.thread_start import end_with_parent

T = TypeVar("T")

TAIL_S: Final = 60
"""Time that a shrunk script runs after the violation [s]."""
Fails = Callable[[NodeScript], float | None]
"""Function that runs a script and returns the time of the searched violation [s]; None: it has none."""


def shrink(script: NodeScript, fails: Fails) -> NodeScript:
    """Return a shorter fault script with the same violation, from which no single event can be removed.

    Args:
        script: Fault script that violates an invariant.
        fails: Runs a script, and returns the time of a violation; None: no violation. Called many times.
    """
    at_s = fails(script)
    if at_s is None:
        return script
    script = _cut_script(script, at_s)
    whole = script
    events = minimal_subset(whole.events, lambda kept: fails(replace(whole, events=tuple(kept))) is not None)
    script = replace(script, events=tuple(events))
    for smaller in (_smaller_machines, _earlier_events, _shorter_events):
        script = _first_that_fails(script, smaller, fails)
    at_s = fails(script)
    return script if at_s is None else _cut_script(script, at_s)


def minimal_subset(items: Sequence[T], is_enough: Callable[[list[T]], bool]) -> list[T]:
    """Return a part of `items` that passes `is_enough`, and of which no single item can be left out (ddmin).

    Args:
        is_enough: Returns whether a part, in the order of `items`, is enough; True for all `items`.
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


def _cut_script(script: NodeScript, at_s: float) -> NodeScript:
    length = int(at_s) + TAIL_S
    events = tuple(event for event in script.events if event.at <= at_s)
    return replace(script, length=min(length, script.length), events=events)


def _first_that_fails(
    script: NodeScript, candidates: Callable[[NodeScript], Iterator[NodeScript]], fails: Fails
) -> NodeScript:
    """Replace a fault script by smaller ones for as long as a smaller one still violates an invariant.

    ``candidates`` yields smaller forms of a script. Returns the script that has no smaller form that fails.
    """
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
            (event.target for event in script.events if FAULT_KINDS[event.kind].target == target), default=-1
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
    """Yield variants of a fault script in which one event and all later ones begin earlier.

    Each event is moved to 0 s, 60 s or 600 s after the event before.
    """
    for index, event in enumerate(script.events):
        before_s = script.events[index - 1].at if index else QUIET_START_S
        for gap_s in (0, 60, 600):
            earlier_s = event.at - before_s - gap_s
            if earlier_s > 0:
                moved = [replace(event, at=event.at - earlier_s) for event in script.events[index:]]
                length = max(script.length - earlier_s, 1)
                yield replace(script, events=(*script.events[:index], *moved), length=length)


def _shorter_events(script: NodeScript) -> Iterator[NodeScript]:
    for index, event in enumerate(script.events):
        for lasts in (1, 10, 60, 600):
            if 0 < lasts < event.lasts:
                shorter: ScriptEvent = replace(event, lasts=lasts)
                yield replace(script, events=(*script.events[:index], shorter, *script.events[index + 1 :]))


# --- the command -------------------------------------------------------------------------------------------

PROGRAM: Final = "python -m agent.simulate"
UNREAD: Final = 128 + signal.SIGPIPE
NODES_MAX: Final = 1_000_000
CHUNKS_PER_PROCESS: Final = 2
"""Nodes that wait for each process, so that it never idles."""


def main(arguments: list[str] | None = None) -> int:
    """Simulate a fleet, or one node by a fault script; return the exit status."""
    try:
        args = _parse_arguments(arguments)
        if args.script:
            return _run_script(read_script(args.script), args.save)
        return _run_fleet(args)
    except BrokenProcessPool:
        print_last_error(f"{PROGRAM}: a process was killed; lower --jobs if memory is short")
        return os.EX_SOFTWARE
    except OutputPipeClosed:
        return UNREAD
    except (ConfigError, OutputError) as error:
        print_last_error(f"{PROGRAM}: {error}")
        return 2 if isinstance(error, ConfigError) else os.EX_IOERR


def _parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    kinds = "\n".join(
        f"  {kind.name:18} {kind.per_year:8.3g} a year for each {kind.target:8} ({kind.source})"
        for kind in FAULT_KINDS.values()
    )
    invariants = "\n".join(f"  {name}: {text}" for name, text in INVARIANTS.items())
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Runs the agent's decisions on simulated nodes with faults, and checks invariants.",
        epilog=f"invariants:\n{invariants}\n\nevents:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=100, help="number of nodes (default: 100)")
    parser.add_argument("--days", type=float, default=30.0, help="simulated time (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="seed of all random numbers (default: 1)")
    parser.add_argument("--rate-factor", type=float, default=1.0, help="factor for all rates (default: 1)")
    parser.add_argument("--jobs", type=int, help="number of processes (default: one for each CPU)")
    parser.add_argument("--script", type=Path, metavar="FILE", help="run one script instead of a fleet")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write the shortened script of a violation to a file, too"
    )
    args = parser.parse_args(arguments)
    if not 1 <= args.nodes <= NODES_MAX:
        parser.error(f"--nodes: {args.nodes} is not from 1 to {NODES_MAX}")
    if not 0 < args.days <= DAYS_MAX:
        parser.error(f"--days: {args.days:g} is not between 0 and {DAYS_MAX}")
    if not 1e-6 <= args.rate_factor <= 1e6:
        parser.error(f"--rate-factor: {args.rate_factor:g} is not from 0.000001 to 1000000")
    if args.jobs is not None and not 1 <= args.jobs <= 1024:
        parser.error(f"--jobs: {args.jobs} is not from 1 to 1024")
    return args


def _run_script(script: NodeScript, save: Path | None) -> int:
    result = NodeRun(script).run()
    if result.violation is None:
        events = f"{len(script.events)} events, {result.evaluations} evaluations"
        print(f"{script.length} s, {events}: no violation")
        return 0
    print(result.violation, file=sys.stderr)
    _print_violation(script, result, save)
    return 1


def _run_fleet(args: argparse.Namespace) -> int:
    began_s = time.monotonic()
    sums, kinds = NodeResult(), Counter[str]()
    jobs = min(args.jobs or len(os.sched_getaffinity(0)), args.nodes)
    for done, (node, result) in enumerate(_results(args, jobs), 1):
        sums.device_s += result.device_s
        sums.evaluations += result.evaluations
        sums.skipped += result.skipped
        sums.checks += result.checks
        kinds.update(result.kinds)
        _show_progress(done, args.nodes)
        if result.violation is not None:
            print(f"node {node} of seed {args.seed}: {result.violation}", file=sys.stderr)
            script = random_script(args.seed, node, args.days, args.rate_factor)
            _print_violation(script, result, args.save)
            return 1
    sums.kinds = kinds
    _print_sums(sums, args, time.monotonic() - began_s)
    return 0


def _run_node(seed: int, node: int, days: float, rate_factor: float) -> NodeResult:
    return NodeRun(random_script(seed, node, days, rate_factor)).run()


def _results(args: argparse.Namespace, jobs: int) -> Iterator[tuple[int, NodeResult]]:
    """Yield number and result of each simulated node, in the order in which their runs end."""
    rest = (args.days, args.rate_factor)
    if jobs == 1:
        for node in range(args.nodes):
            yield node, _run_node(args.seed, node, *rest)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), end_with_parent) as pool:
        waiting: dict[Future[NodeResult], int] = {}
        nodes = iter(range(args.nodes))
        try:
            while True:
                for node in islice(nodes, CHUNKS_PER_PROCESS * jobs - len(waiting)):
                    waiting[pool.submit(_run_node, args.seed, node, *rest)] = node
                if not waiting:
                    return
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=waiting.__getitem__):
                    yield waiting.pop(future), future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty() and total > 1:
        filled = 30 * done // total
        end = "\n" if done == total else ""
        print(f"\r[{'#' * filled:30}] {done}/{total} nodes", end=end, file=sys.stderr, flush=True)


def _print_violation(script: NodeScript, result: NodeResult, save: Path | None) -> None:
    """Shorten the fault script that violated an invariant, and print it."""
    violation = result.violation
    assert violation is not None

    def fails(candidate: NodeScript) -> float | None:
        found = NodeRun(candidate).run().violation
        same = found is not None and found.invariant == violation.invariant
        return found.t_ns / 1e9 if found is not None and same else None

    shorter = shrink(script, fails)
    found = NodeRun(shorter).run().violation
    text = encode_script(replace(shorter, note=str(found or violation)))
    print(text, end="")
    if save is not None:
        try:
            save.write_text(text, encoding="utf-8")
        except OSError as error:  # standard output has the script, and the status stays that of a violation
            print_last_error(f"{PROGRAM}: file {save}: cannot be written: {error.strerror}")


def _print_sums(sums: NodeResult, args: argparse.Namespace, elapsed_s: float) -> None:
    events = sum(sums.kinds.values())
    print(
        f"{args.nodes} nodes, {args.nodes * args.days:g} node-days, {sums.device_s:.3g} device-seconds, "
        f"{events} events: no violation"
    )
    print(
        f"{sums.evaluations} evaluations, {sums.skipped} heartbeats computed, {sums.checks} checks in "
        f"{elapsed_s:.0f} s: {sums.device_s / elapsed_s / DAY_S:.3g} device-days a second"
    )
    for name, count in sorted(sums.kinds.items(), key=lambda item: (-item[1], item[0])):
        print(f"  {count:6} {name}")
