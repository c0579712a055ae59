"""GPUs, polled: one pass of the core over the fast fields, the bare NVML calls of it, and pynvml.

The fake NVML answers from memory within 0.2 us, where a driver needs 10 us to 1 ms: what is left is what each
caller adds to it. A process that has loaded it keeps its number of GPUs, so each number has one to itself.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Final, ParamSpec

from agent.bench.effort import Effort
from agent.bench.gpu_baselines import GoodGpus, PlainGpus, Values, fast_values, wanted_of
from agent.bench.nvml import NoLibrary, fake_nvml
from agent.bench.result import Outcome, Table, Unequal, rows_of
from agent.bench.timing import Contender, race
from agent.bench.trees import scratch
from agent.model.gpu import GpuField, GpuSet
from agent.model.time import NS
from agent.native.gpus import Gpus, GpusOptions
from agent.sources.nvml import session

P = ParamSpec("P")

REAL: Final = "libnvidia-ml.so.1"
HOUR_NS: Final = 3600 * NS
SETTLING: Final = 3
"""Passes until nothing is asked for that is not there, and no slow field is due."""
MOVING: Final = frozenset({GpuField.TEMP, GpuField.MARGIN, GpuField.MEM_TEMP, GpuField.CLOCK_REASONS})
"""What of a real GPU changes between two readings."""
FLOOR: Final = "floor: bare NVML calls"
NOTES: Final = (
    "core and floor include one call from Python each (0.2 us)",
    "what the core adds is its watch over each call, and the record that readers copy",
)


def run(effort: Effort, outcome: Outcome) -> None:
    """The fake at several numbers of GPUs, and the driver's own library where there is one."""
    for number in effort.gpus:
        with scratch() as directory:
            try:
                fake = fake_nvml(directory, number)
            except NoLibrary as why:
                outcome.skipped.append(f"poll: GPUs of the fake NVML: {why}")
                break
            outcome.take(_alone(measure, effort, str(fake.library), fake.scenario))
    outcome.take(_alone(measure_real, effort))


def _alone(measured: Callable[P, Outcome], *args: P.args, **kwargs: P.kwargs) -> Outcome:
    """Measure in a process that has loaded nothing yet."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measured, *args, **kwargs).result()


def measure_real(effort: Effort) -> Outcome:
    """All GPUs of this machine, or why there are none."""
    with watch(REAL) as gpus:
        found = read(gpus)
    if found.gpus:
        return measure(effort, REAL, None)
    outcome = Outcome()
    outcome.skipped.append(f"poll: GPUs of this machine: {found.nvml.detail or 'there are none'}")
    return outcome


def measure(effort: Effort, library: str, scenario: Path | None) -> Outcome:
    """All GPUs of a library; with a scenario, which nothing in this process may have loaded, the fake's."""
    if scenario:
        os.environ["FAKE_NVML"] = str(scenario)
    outcome = Outcome()
    with watch(library) as gpus, session(library) as nvml:
        seen = read(gpus)
        core = fast_values(seen.gpus)
        wanted = [wanted_of(gpu) for gpu in seen.gpus]
        good, plain = GoodGpus(nvml.binding, wanted), PlainGpus(nvml.binding, wanted)
        for reader in (good, plain):
            check_equal(core, reader(), frozenset() if scenario else MOVING)
        calls = check_calls(gpus.run_pass(), gpus.run_floor())
        pynvml = f"pynvml {version('nvidia-ml-py')}"
        contenders = [
            Contender("core", "core: dh_gpus_pass", gpus.run_pass),
            Contender("floor", FLOOR, gpus.run_floor),
            Contender("good", f"good {pynvml}: handles kept, all fields in one call", good),
            Contender("plain", f"plain {pynvml}: a handle each time, a call for each value", plain),
        ]
        timed = race(contenders, rounds=effort.warm_rounds, limit_s=effort.warm_limit_s)
    labels = {one.key: one.label for one in contenders}
    number = len(seen.gpus)
    kind, what = ("gpus", "fake NVML") if scenario else ("real_gpus", seen.gpus[0].name)
    section = f"pass over GPUs, {what}, driver {seen.driver}; warm, back to back"
    rows = rows_of(f"poll.{kind}{number}.warm", labels, timed, "floor")
    equal = f"{len(core)} values equal in core, good and plain; {calls} NVML calls in core, floor and good"
    outcome.tables.append(Table(f"{number} GPUs", rows, FLOOR, (equal, *NOTES), section))
    outcome.reference_ns += timed.reference
    return outcome


@contextmanager
def watch(library: str) -> Iterator[Gpus]:
    """A watch without threads that has made its first passes."""
    fd = os.eventfd(0, os.EFD_CLOEXEC)
    gpus = Gpus(GpusOptions(library=library, slow_ns=HOUR_NS, retry_ns=HOUR_NS), fd)
    try:
        for _ in range(SETTLING):
            gpus.run_pass()
        yield gpus
    finally:
        gpus.stop(0)
        os.close(fd)


def read(gpus: Gpus) -> GpuSet:
    """What the last pass found."""
    found = gpus.read()
    assert found is not None, "watch() makes the first pass"
    return found


def check_calls(core: int, floor: int) -> int:
    """How many both make. Raises Unequal unless they make as many."""
    if core != floor:
        raise Unequal(f"GPUs: the core makes {core} calls of NVML, the floor {floor}")
    return core


def check_equal(core: Values, other: Values, moving: frozenset[GpuField]) -> None:
    """Raises Unequal, naming the first value that differs and does not move by itself."""
    for index, field in sorted(core.keys() | other.keys()):
        mine, theirs = core.get((index, field)), other.get((index, field))
        if mine != theirs and (field not in moving or None in {mine, theirs}):
            raise Unequal(f"gpu-{index}: {field.value}: the core read {mine}, pynvml {theirs}")
