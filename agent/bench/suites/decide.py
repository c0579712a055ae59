"""The decision core: ``step()`` quiet and with a change, and the decoding of snapshots.

The devices are those of this machine; the groups are files that look like cgroups, since how they were read
makes no difference here. There is no floor to a decision: the ratios are to a quiet step.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from agent.bench.effort import Effort
from agent.bench.result import Outcome, Table, rows_of
from agent.bench.suites.poll import open_sampler, read
from agent.bench.timing import Contender, race
from agent.bench.trees import scratch, write_groups
from agent.model.settings import Settings
from agent.model.snapshot import Snapshot
from agent.model.time import Instant
from agent.pipeline import State, step

GROUPS: Final = (100, 1000)


def run(effort: Effort) -> Outcome:
    """step() and Decoder.snapshot() with 0, 100 and 1,000 groups."""
    outcome = Outcome()
    sampler = open_sampler(None)
    _measure(effort, outcome, read(sampler), sampler.read)
    sampler.stop(1.0)
    for number in GROUPS:
        with scratch() as directory:
            grouped = open_sampler(write_groups(directory, number))
            _measure(effort, outcome, read(grouped), grouped.read)
            grouped.stop(1.0)
    return outcome


def _measure(effort: Effort, outcome: Outcome, snapshot: Snapshot, decode: Callable[[], object]) -> None:
    now = Instant(max(source.beat_ns for source in snapshot.sources), 1.7e9)
    state, report = step(State(Settings("bench")), snapshot, now)
    shrunk = _changed(snapshot)
    assert step(state, shrunk, now)[1].devices != report.devices, "the change must show in a verdict"
    contenders = [
        Contender("quiet", "step, nothing changed", lambda: step(state, snapshot, now)),
        Contender("change", "step, one device changes its health", lambda: step(state, shrunk, now)),
        Contender("decode", "Sampler.read: copy and decode, nothing changed", decode),
    ]
    timed = race(contenders, rounds=effort.warm_rounds, limit_s=effort.warm_limit_s)
    labels = {one.key: one.label for one in contenders}
    rows = rows_of(f"decide.groups{len(snapshot.groups)}", labels, timed, "quiet")
    title = f"{len(report.devices)} devices, {len(snapshot.groups)} cgroups"
    outcome.tables.append(Table(title, rows, labels["quiet"]))
    outcome.reference_ns += timed.reference


def _changed(snapshot: Snapshot) -> Snapshot:
    """The same machine with its first CPU gone."""
    online = snapshot.cpus.online
    assert isinstance(online, int), "this machine tells which CPUs are online"
    return replace(snapshot, cpus=snapshot.cpus._replace(online=online & (online - 1)))
