"""The decision core: ``step()`` quiet and with a change, and the decoding of snapshots.

The devices are CPUs of this machine, as a driver declares them; the groups are files that look like cgroups,
since how they were read makes no difference here. There is no floor to a decision: the ratios are to a quiet
step.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from agent.bench.effort import Effort
from agent.bench.result import Outcome, Table, rows_of
from agent.bench.suites.poll import open_sampler, read
from agent.bench.timing import Contender, race
from agent.bench.trees import scratch, write_groups
from agent.engine.step import State, step
from agent.model.declared import Declarations, Declared, DeclaredCpus, DeclaredFile
from agent.model.settings import Settings
from agent.model.snapshot import Snapshot
from agent.model.time import Instant

DRIVER: Final = "bench.drahealth.example"
DEVICES: Final = (8, 128, 1000)
GROUPS: Final = (100, 1000)


def run(effort: Effort) -> Outcome:
    """step() with 8, 128 and 1,000 devices; it, and what reads for it, with 100 and 1,000 groups."""
    outcome = Outcome()
    sampler = open_sampler(None)
    alone = read(sampler)
    sampler.stop(1.0)
    for number in DEVICES:
        snapshot = replace(alone, declared=declarations(alone, number))
        _measure(effort, outcome, f"devices{number}", snapshot, None)
    for number in GROUPS:
        with scratch() as directory:
            grouped = open_sampler(write_groups(directory, number))
            _measure(effort, outcome, f"groups{number}", read(grouped), grouped.read)
            grouped.stop(1.0)
    return outcome


def _measure(
    effort: Effort, outcome: Outcome, key: str, snapshot: Snapshot, decode: Callable[[], object] | None
) -> None:
    now = now_of(snapshot)
    state, report = step(State(Settings("bench")), snapshot, now)
    shrunk = changed(snapshot)
    assert step(state, shrunk, now)[1].devices != report.devices, "the change must show in a verdict"
    contenders = [
        Contender("quiet", "quiet: step, nothing changed", lambda: step(state, snapshot, now)),
        Contender("change", "change: step, a CPU and who declares it go", lambda: step(state, shrunk, now)),
    ]
    if decode:
        contenders.append(Contender("decode", "decode: Sampler.read, copied, nothing changed", decode))
    timed = race(contenders, rounds=effort.warm_rounds, limit_s=effort.warm_limit_s)
    labels = {one.key: one.label for one in contenders}
    rows = rows_of(f"decide.{key}", labels, timed, "quiet")
    title = f"{len(report.devices)} devices, {len(snapshot.groups)} cgroups"
    outcome.tables.append(Table(title, rows, labels["quiet"], section="one look: a snapshot is judged"))
    outcome.reference_ns += timed.reference


def now_of(snapshot: Snapshot) -> Instant:
    """A time at which a snapshot is new."""
    return Instant(max(source.beat_ns for source in snapshot.sources), 1.7e9)


def declarations(snapshot: Snapshot, number: int) -> Declarations:
    """So many devices of one driver: the first is the machine's lowest CPU, all others are its highest."""
    online = online_of(snapshot)
    lowest, highest = online & -online, 1 << online.bit_length() - 1
    devices = (
        Declared(
            DRIVER, "node", f"cpu-{place}", DeclaredCpus(highest if place else lowest, None, False, False), 0
        )
        for place in range(number)
    )
    return (DeclaredFile(DRIVER, tuple(devices)),)


def changed(snapshot: Snapshot) -> Snapshot:
    """The same machine with its lowest CPU gone."""
    online = online_of(snapshot)
    return replace(snapshot, cpus=snapshot.cpus._replace(online=online & (online - 1)))


def online_of(snapshot: Snapshot) -> int:
    """The set of CPUs that are online."""
    online = snapshot.cpus.online
    assert isinstance(online, int), "this machine tells which CPUs are online"
    return online
