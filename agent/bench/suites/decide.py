"""Time of the engine: ``step()`` without and with a change, and the decoding of snapshots.

The devices are CPUs of this machine, declared by a driver; the cgroups are files that look like cgroups,
because their origin has no effect on the engine. An evaluation has no lower bound; ratios are to a
step without a change.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from agent.bench.file_trees import temporary_directory, write_cgroup_files
from agent.bench.result import ResultTable, SuiteOutcome, rows_from_race
from agent.bench.run_size import RunSize
from agent.bench.suites.poll import open_sampler, read_snapshot
from agent.bench.timing import Contender, time_contenders
from agent.engine.step import EngineState, step
from agent.model.declared_devices import Declarations, DeclaredCpuDevice, DeclaredFile, DriverDevice
from agent.model.settings import EngineSettings
from agent.model.snapshot import Snapshot
from agent.model.time import Instant

DRIVER: Final = "bench.drahealth.example"
DEVICES: Final = (8, 128, 1000)
GROUPS: Final = (100, 1000)


def run(run_size: RunSize) -> SuiteOutcome:
    """Time step() with 8, 128 and 1,000 devices, and step() and decoding with 100 and 1,000 cgroups."""
    outcome = SuiteOutcome()
    sampler = open_sampler(None)
    base = read_snapshot(sampler)
    sampler.stop(1.0)
    for count in DEVICES:
        snapshot = replace(base, declared=declare_cpus(base, count))
        _measure(run_size, outcome, f"devices{count}", snapshot, None)
    for count in GROUPS:
        with temporary_directory() as directory:
            sampler = open_sampler(write_cgroup_files(directory, count))
            _measure(run_size, outcome, f"groups{count}", read_snapshot(sampler), sampler.read)
            sampler.stop(1.0)
    return outcome


def _measure(
    run_size: RunSize,
    outcome: SuiteOutcome,
    key: str,
    snapshot: Snapshot,
    decode: Callable[[], object] | None,
) -> None:
    now = snapshot_time(snapshot)
    state, report = step(EngineState(EngineSettings("bench")), snapshot, now)
    changed_snapshot = without_lowest_cpu(snapshot)
    assert step(state, changed_snapshot, now)[1].devices != report.devices, "the change must affect a verdict"
    contenders = [
        Contender("quiet", "quiet: step, nothing changed", lambda: step(state, snapshot, now)),
        Contender(
            "change", "change: step, a declared CPU goes offline", lambda: step(state, changed_snapshot, now)
        ),
    ]
    if decode:
        contenders.append(Contender("decode", "decode: Sampler.read, nothing changed", decode))
    timed = time_contenders(contenders, rounds=run_size.warm_rounds, limit_s=run_size.warm_limit_s)
    rows = rows_from_race(f"decide.{key}", timed, "quiet")
    title = f"{len(report.devices)} devices, {len(snapshot.groups)} cgroups"
    outcome.tables.append(
        ResultTable(title, rows, contenders[0].label, section="one evaluation of a snapshot")
    )
    outcome.reference_ns += timed.reference


def snapshot_time(snapshot: Snapshot) -> Instant:
    """Return a time for an evaluation at which no source of the snapshot counts as stalled."""
    return Instant(max(source.beat_ns for source in snapshot.sources), 1.7e9)


def declare_cpus(snapshot: Snapshot, count: int) -> Declarations:
    """Declare ``count`` devices of one driver: the first is the lowest online CPU, all others the highest."""
    online = online_cpus(snapshot)
    lowest, highest = online & -online, 1 << online.bit_length() - 1
    devices = (
        DriverDevice(
            DRIVER,
            "node",
            f"cpu-{index}",
            DeclaredCpuDevice(highest if index else lowest, None, False, False),
            0,
        )
        for index in range(count)
    )
    return (DeclaredFile(DRIVER, tuple(devices)),)


def without_lowest_cpu(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with the lowest CPU offline."""
    online = online_cpus(snapshot)
    return replace(snapshot, cpus=snapshot.cpus._replace(online=online & (online - 1)))


def online_cpus(snapshot: Snapshot) -> int:
    """Return the bit mask of online CPUs."""
    online = snapshot.cpus.online
    assert isinstance(online, int), "the online CPUs must be readable"
    return online
