"""The polling core: the machine's own files, sweeps over 10 to 1,000 cgroups, and GPUs.

Warm: back to back, what a profiler would show. In situ: one pass after 100 ms of sleep, which is what an
agent at 10 Hz pays: caches are cold, and everything costs two to nine times as much.
"""

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Final

from agent.bench.baselines import (
    File,
    GoodReader,
    PlainReader,
    Values,
    flat,
    machine_files,
    machine_values,
    psutil_machine,
    sweep_files,
    sweep_values,
)
from agent.bench.effort import PAUSE_S, Effort
from agent.bench.result import Outcome, Table, Unequal, rows_of
from agent.bench.suites import poll_gpus
from agent.bench.timing import Contender, race
from agent.bench.trees import Tree, some_tree
from agent.model.snapshot import Snapshot
from agent.model.time import NS
from agent.native.sampler import Sampler, SamplerOptions

SYSFS: Final = Path("/sys")
COLD_LIMIT_S: Final = 60.0
FLOOR: Final = "floor: bare system calls"
CALL: Final = "core and floor include one call from Python each (0.2 us)"
DESCRIPTOR_KIB: Final = 4.4  # kernel memory behind a descriptor that was read once: its seq_file buffer


def run(effort: Effort) -> Outcome:
    """The machine and its cgroups warm and in situ, GPUs warm."""
    outcome = Outcome()
    _machine(effort, outcome)
    for number in effort.groups:
        with some_tree(number) as (tree, why):
            if why:
                outcome.skipped.append(f"poll: {why}; measured on {tree.backend}")
            _groups(effort, outcome, tree)
    poll_gpus.run(effort, outcome)
    return outcome


def open_sampler(tree: Tree | None) -> Sampler:
    """A sampler that does nothing by the clock within a benchmark, after its first pass."""
    sampler = Sampler(
        SamplerOptions(
            sysfs_root=SYSFS,
            cgroupfs_root=tree.cgroupfs if tree else Path("/nonexistent"),
            kubelet_cgroup_root=tree.kubelet_root if tree else "/",
            period_ns=NS // 100,
            sweep_ns=3600 * NS,
            resync_ns=3600 * NS,
        )
    )
    sampler.run_pass()
    return sampler


def read(sampler: Sampler) -> Snapshot:
    """The snapshot of a sampler that has made a pass."""
    snapshot = sampler.read()
    assert snapshot is not None, "open_sampler() makes the first pass"
    return snapshot


def check_equal(what: str, core: Values, other: Values) -> None:
    """Raises Unequal, naming the first value that differs."""
    for key in sorted(core.keys() | other.keys()):
        if core.get(key) != other.get(key):
            raise Unequal(f"{what}: {'/'.join(key)}: the core read {core.get(key)}, Python {other.get(key)}")


def _machine(effort: Effort, outcome: Outcome) -> None:
    files = machine_files(SYSFS)
    with closing(GoodReader(files)) as good:
        sampler = open_sampler(None)
        plain = PlainReader(files)
        before = read(sampler)
        sampler.run_pass()
        snapshot = read(sampler)
        reads = snapshot.core.reads - before.core.reads
        check_reads("global pass", reads, sampler.run_floor(sweep=False), len(files))
        for reader in (good, plain):
            check_equal("global pass", machine_values(snapshot), reader())
        contenders = [
            Contender("core", "core: dh_sampler_pass", sampler.run_pass),
            Contender("floor", FLOOR, lambda: sampler.run_floor(sweep=False)),
            Contender("good", "good Python: kept descriptors, pread, int", good),
            Contender("plain", "plain Python: open, read, parse", plain),
            Contender(
                "psutil",
                f"psutil {version('psutil')}: CPU count, times, memory; not these files",
                psutil_machine,
            ),
        ]
        notes = [f"{len(files)} values equal in core, good and plain Python; {reads} reads each", CALL]
        _both(effort, outcome, "pass", f"global pass, {len(files)} files, /sys", "", contenders, notes)
        sampler.stop(1.0)


def check_reads(what: str, core: int, floor: int, files: int) -> None:
    """Raises Unequal unless core, floor and Python read the same number of files."""
    if not core == floor == files:
        raise Unequal(f"{what}: the core reads {core} files, the floor {floor}, Python {files}")


def _groups(effort: Effort, outcome: Outcome, tree: Tree) -> None:
    sampler = open_sampler(tree)
    before = read(sampler)
    if len(before.groups) != len(tree.groups):
        raise Unequal(f"sweep: {len(tree.groups)} groups were made, the core found {len(before.groups)}")
    files = sweep_files(tree, before)
    machine = machine_files(SYSFS)
    sampler.run_sweep()
    snapshot = read(sampler)
    reads = snapshot.core.reads - before.core.reads
    check_reads("sweep", reads, sampler.run_floor(sweep=True) - len(machine), len(files))
    plain = PlainReader(files)
    if (found := len(plain())) != len(files):
        raise Unequal(f"sweep: {len(files)} files have only {found} names, so not all would be compared")
    values = flat(plain())
    check_equal("sweep", sweep_values(snapshot, values), values)

    def pass_and_sweep() -> None:
        sampler.run_pass()
        sampler.run_sweep()

    contenders = [
        Contender("core", "core: a pass, and a sweep with openat", pass_and_sweep),
        Contender("floor", FLOOR, lambda: sampler.run_floor(sweep=True)),
    ]
    notes = [
        f"{len(values)} values equal; {reads} opens and reads, and the {len(machine)} of the global pass"
    ]
    number = len(tree.groups)
    with _limit_raised(len(files) + 256):
        good = _good(files, outcome, number)
        if good:
            check_equal("sweep", values, flat(good()))
            kib = len(files) * DESCRIPTOR_KIB
            label = f"good Python: {len(files)} kept descriptors ({kib / 1024:.1f} MiB of kernel memory)"
            contenders.append(Contender("good", label, good))
        contenders.append(Contender("plain", "plain Python: open, read, parse", plain))
        notes += [
            "psutil and pynvml know no cgroups",
            "both Pythons without the files of the global pass",
            CALL,
        ]
        section = f"global pass and sweep, {tree.backend}"
        _both(effort, outcome, f"groups{number}", section, f"{number} cgroups, ", contenders, notes)
        if good:
            good.close()
    sampler.stop(1.0)


def _good(files: Sequence[File], outcome: Outcome, number: int) -> GoodReader | None:
    try:
        return GoodReader(files)
    except OSError as error:
        outcome.skipped.append(f"poll: good Python over {number} cgroups: {os.strerror(error.errno or 0)}")
        return None


@contextmanager
def _limit_raised(descriptors: int) -> Iterator[None]:
    """Within it, this process may have so many descriptors, as far as the hard limit lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = descriptors if hard == resource.RLIM_INFINITY else min(descriptors, hard)
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _both(
    effort: Effort,
    outcome: Outcome,
    key: str,
    section: str,
    what: str,
    contenders: list[Contender],
    notes: list[str],
) -> None:
    labels = {one.key: one.label for one in contenders}
    warm = race(contenders, rounds=effort.warm_rounds, limit_s=effort.warm_limit_s)
    cold_ones = contenders if effort.cold_baselines else contenders[:2]
    cold = race(cold_ones, rounds=effort.cold_rounds, limit_s=COLD_LIMIT_S, pause_s=PAUSE_S)
    outcome.reference_ns += warm.reference
    for name, timed, when in (("warm", warm, "warm, back to back"), ("situ", cold, "in situ, 100 ms apart")):
        rows = rows_of(f"poll.{key}.{name}", labels, timed, "floor")
        outcome.tables.append(Table(f"{what}{when}", rows, FLOOR, tuple(notes), section))
