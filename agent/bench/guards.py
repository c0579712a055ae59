"""``--check``: compares the exact figures of the agent with the budgets of ``benchmarks/budgets.toml``.

Such a comparison is called a guard. Counts must equal their budgets. A count below its budget fails, too, so
that the budget is lowered and the count cannot rise again unnoticed. Instructions may differ by 0.5 %, and a
ratio of times may exceed its budget by 5 %, or more next to other programs, which change it. Absolute times
depend on the machine and have no guards.

The module also has the exact counts of system calls (strace), instructions (callgrind) and allocations of
the C core.

All counts are those of ``benchmarks/driver.c``, linked with the C core of the checkout, on file trees that
are equal on every machine. For instructions the driver runs N and 2N times; the difference is divided by N.

Instructions are those of the core's own code, because the C library selects its string functions by processor
and would make the count differ between machines. Calls into the C library and NVML are counted separately.
"""

import collections
import contextlib
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from agent.bench import idle_counts
from agent.bench.file_trees import (
    real_or_file_tree,
    temporary_directory,
    write_cgroup_files,
    write_cgroup_limits,
    write_machine_files,
    write_sysfs,
)
from agent.bench.processes import FakeNvml, FakeNvmlUnavailable, write_gpu_scenario
from agent.bench.result import BUDGETS_FILE, MeasurementError, load_budgets
from agent.bench.suites import poll
from agent.bench.suites.report_path import health_entries
from agent.bench.syscall_counts import (
    CORE_WAKES,
    HEARTBEAT_THREADS,
    PUBLICATION_CLIENTS,
    count_heartbeat_waits,
    count_publication_calls,
    count_publication_opcodes,
    measure_publication_ratio,
)
from agent.bench.timing import Contender, MedianInterval, paired_ratio, time_contenders
from agent.native.health_encoder import encode_health_lists

GROUPS: Final = 100
CONTROLLERS: Final = 2
GPUS: Final = 8
DEVICES: Final = 128
POD: Final = "pod"
WRAPPED: Final = ("clock_gettime", "malloc", "calloc", "realloc")
MARKER_CALL: Final = "getppid"
"""System call that ``benchmarks/driver.c`` makes before and after a workload, to mark its begin and end."""


class CountError(MeasurementError):
    """A compiler, strace or valgrind is missing or failed."""


@dataclass(frozen=True, slots=True)
class CoreWorkload:
    """Part of the C core that ``benchmarks/driver.c`` runs, and its file tree."""

    name: str
    """Name of the workload: its key in ``benchmarks/budgets.toml``."""
    mode: str
    """First argument of ``benchmarks/driver.c``, which selects the part of the C core."""
    repeats: int
    """Number of runs of the workload that are counted together."""
    groups: int = 0
    """Number of cgroups in the file tree that the workload reads."""
    controllers: int = 0
    """Number of memory controllers (EDAC) in the file tree that the workload reads."""


WORKLOADS: Final = (
    CoreWorkload("pass", "pass", 100),
    CoreWorkload("second", "second", 10),
    CoreWorkload(f"second_{GROUPS}_groups", "second", 10, GROUPS),
    CoreWorkload(f"still_{GROUPS}_groups", "still", 1, GROUPS),
    CoreWorkload(f"resync_{GROUPS}_groups", "resync", 1, GROUPS),
    CoreWorkload(f"sweep_{GROUPS}_groups", "sweep", 5, GROUPS),
    CoreWorkload(f"opens_{GROUPS}_groups", "opens", 5, GROUPS),
    CoreWorkload("machine", "machine", 100),
    CoreWorkload(f"machine_{CONTROLLERS}_controllers", "machine", 100, controllers=CONTROLLERS),
    CoreWorkload(f"minute_{CONTROLLERS}_controllers", "minute", 5, controllers=CONTROLLERS),
    CoreWorkload("uevent_of_no_interest", "uevent", 100),
    CoreWorkload("knobs", "knobs", 100),
    CoreWorkload(f"pass_{GPUS}_gpus", "gpus", 100),
    CoreWorkload(f"minute_{GPUS}_gpus", "gpu_minute", 2),
    CoreWorkload(f"encode_{DEVICES}_devices", "encode", 20),
)


@dataclass(frozen=True, slots=True)
class CoreBenchmarkProgram:
    """Built program of ``benchmarks/driver.c``, and the directory of its file trees."""

    program: Path
    trees: Path
    nvml: FakeNvml

    def command(self, workload: CoreWorkload, times: int) -> list[str]:
        """Return the command line with which ``benchmarks/driver.c`` runs the workload ``times`` times."""
        machine = self.trees / f"machine{workload.controllers}"
        roots_by_mode: dict[str, tuple[object, object]] = {
            "resync": (self.trees / "sys", self.trees / f"kubelet{workload.groups}"),
            "machine": (machine / "sys", machine / "proc"),
            "minute": (machine / "sys", machine / "proc"),
            "uevent": ("-", "-"),
            "knobs": (self.trees / "knobs", POD),
            "gpus": (self.nvml.library, self.nvml.scenario),
            "gpu_minute": (self.nvml.library, self.nvml.scenario),
            "encode": (DEVICES, "-"),
        }
        roots = roots_by_mode.get(
            workload.mode, (self.trees / "sys", self.trees / f"cgroup{workload.groups}")
        )
        return [str(self.program), workload.mode, *map(str, roots), str(times)]


def compiler() -> str:
    """Return the C compiler that builds ``benchmarks/driver.c``: ``$CC``, or gcc."""
    return os.environ.get("CC", "gcc")


def compiler_id() -> str:
    """Return name, version and machine of the compiler, such as ``gcc 12.2.0 x86_64``.

    The counts of instructions in ``benchmarks/budgets.toml`` are stored under this text.
    """
    banner = _run_command([compiler(), "--version"]).splitlines()[0]
    kind = "clang" if "clang" in banner else "gcc"
    version = re.search(r"(\d+\.\d+\.\d+)", banner)
    return f"{kind} {version[1] if version else banner} {platform.machine()}"


def build_driver(root: Path, directory: Path) -> CoreBenchmarkProgram:
    """Compile ``benchmarks/driver.c`` with the flags of the shipped core, and write its input files.

    They are file trees, and the scenario of GPUs for the fake NVML.

    Args:
        root: Checkout.
        directory: Empty directory that exists as long as the driver is used.
    """
    flags = runpy.run_path(str(root / "setup_build.py"))["CFLAGS"]
    program = directory / "driver"
    flags += [f"-I{root / 'native/include'}", f"-I{root / 'native/src'}", "-D_GNU_SOURCE"]
    objects = directory / "objects"
    objects.mkdir()

    def compile_object(source: Path) -> str:
        compiled_objects = str(objects / f"{source.stem}.o")
        _run_command([compiler(), *flags, "-c", str(source), "-o", compiled_objects])
        return compiled_objects

    sources = [root / "benchmarks/driver.c", *sorted((root / "native/src").rglob("*.c"))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled_objects = list(pool.map(compile_object, sources))
    wraps = [f"-Wl,--wrap={name}" for name in WRAPPED]
    _run_command([compiler(), *flags, *compiled_objects, *wraps, "-o", str(program)])
    write_sysfs(directory / "sys")
    write_cgroup_limits(directory / "knobs", POD)
    for groups in {workload.groups for workload in WORKLOADS}:
        write_cgroup_files(directory / f"cgroup{groups}", groups)
        write_cgroup_files(directory / f"kubelet{groups}", groups, "/kubelet")
    for controllers in {workload.controllers for workload in WORKLOADS}:
        write_machine_files(directory / f"machine{controllers}", controllers)
    return CoreBenchmarkProgram(program, directory, write_gpu_scenario(directory, GPUS))


def count_system_calls(driver: CoreBenchmarkProgram, workload: CoreWorkload) -> dict[str, float]:
    """Count the system calls that ``benchmarks/driver.c`` makes in one run of the workload, by their name."""
    log, times = driver.trees / "strace.log", workload.repeats
    _run_command(["strace", "-qq", "-o", str(log), *driver.command(workload, times)])
    names = re.findall(r"^(\w+)\(", log.read_text(errors="replace"), re.M)
    *_, first, last = (index for index, name in enumerate(names) if name == MARKER_CALL)
    result = collections.Counter(names[first + 1 : last])
    return {name: result[name] / times for name in sorted(result)}


def count_allocations(driver: CoreBenchmarkProgram, workload: CoreWorkload) -> int:
    """Count the memory allocations of the C core in all runs of the workload."""
    output = _run_command(driver.command(workload, workload.repeats))
    return int(output.removeprefix("allocations "))


def count_instructions(driver: CoreBenchmarkProgram, workload: CoreWorkload) -> tuple[float, float]:
    """Count the C core's own instructions, and its calls into libraries, for one run of the workload."""
    once = workload.repeats
    few, many = (_callgrind(driver, workload, times) for times in (once, 2 * once))
    return (many[0] - few[0]) / once, (many[1] - few[1]) / once


def measure_compiler_baselines(root: Path) -> tuple[str, Mapping[str, float]]:
    """Count the instructions of all workloads of the C core, for the installed C compiler.

    Returns the name and the values of the compiler's table in ``benchmarks/budgets.toml``.
    """
    with temporary_directory() as directory:
        driver = build_driver(root, directory)
        return f'instructions."{compiler_id()}"', measure_baselines(driver)


def measure_baselines(driver: CoreBenchmarkProgram) -> dict[str, float]:
    """Count the instructions of each workload of the C core, and its calls into libraries.

    Returns the counts by the name of the workload.
    """
    result: dict[str, float] = {}
    for workload in WORKLOADS:
        own, calls = count_instructions(driver, workload)
        result[workload.name] = round(own)
        result[f"{workload.name}_calls"] = calls
    return result


def _callgrind(driver: CoreBenchmarkProgram, workload: CoreWorkload, times: int) -> tuple[int, int]:
    out = driver.trees / "callgrind.out"
    valgrind = ["valgrind", "--tool=callgrind", "--quiet", f"--callgrind-out-file={out}"]
    _run_command([*valgrind, "--compress-strings=no", "--compress-pos=no", *driver.command(workload, times)])
    return parse_callgrind(out.read_text(), str(driver.program))


def parse_callgrind(text: str, program: str) -> tuple[int, int]:
    """Sum a program's own instructions and its calls into libraries from callgrind's uncompressed output.

    The line after ``calls=`` has the cost of the called function, which is not part of the caller's own cost.
    """
    own = calls = 0
    inside = outward = skip = False
    for line in text.splitlines():
        if line.startswith("ob="):
            inside = line[3:] == program
        elif line.startswith("fn="):
            outward = False
        elif line.startswith("cob="):
            outward = line[4:] != program
        elif line.startswith("calls="):
            if inside and outward:
                calls += int(line[6:].split()[0])
            outward, skip = False, True
        elif line and line[0] in "0123456789+-*":
            if inside and not skip:
                own += int(line.split()[1])
            skip = False
    return own, calls


def _run_command(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except FileNotFoundError:
        raise CountError(f"program {command[0]} is not installed; instructions cannot be counted") from None
    if done.returncode:
        raise CountError(f"command {' '.join(command[:3])} ...: exit status {done.returncode}", done.stderr)
    return done.stdout


# --- the guards --------------------------------------------------------------------------------------------

INSTRUCTION_TOLERANCE: Final = 0.005
"""Relative tolerance of instruction counts."""
OPCODE_TOLERANCE: Final = 0.02
"""Relative tolerance of opcode counts, which differ between maintenance releases of Python."""
RATIO_TOLERANCE: Final = 0.05
"""Relative amount by which a ratio may exceed its budget."""
RATIO_TRIES: Final = 4  # attempts per ratio: other processes may disturb some of them
OTHERS_MAX: Final = 0.2
"""Largest use of the CPUs by other programs during a measured ratio that may miss its budget [CPUs]."""
COUNT_TRIES: Final = 4
"""Attempts per count of the system calls or wakeups of several threads: on a busy machine one wait can become
two, or a lock can be contended. What the agent's code adds is in each count."""
ROUNDS: Final = 60
LIMIT_S: Final = 2.5
WORKLOADS_BY_NAME: Final = {workload.name: workload for workload in WORKLOADS}
QUIET_EVALUATION: Final = "quiet_look"
WAKEUP_COUNTERS: Final[Mapping[str, Callable[[], int]]] = {
    "quiet_passes": idle_counts.count_sampler_wakes,
    "quiet_minute": idle_counts.count_evaluations,
    "pass_8_gpus": idle_counts.count_nvml_wakes,
}
OPCODE_COUNTERS: Final[Mapping[str, Callable[[str], int]]] = {
    **dict.fromkeys(idle_counts.CHANGE_GPUS, idle_counts.count_change_opcodes),
    **dict.fromkeys(PUBLICATION_CLIENTS, count_publication_opcodes),
}
MESSAGE_DEVICES: Final = {f"health_{devices}_devices": devices for devices in (8, 128, 1000)}


class GuardedRatio(NamedTuple):
    """Ratio of two times, for which ``--check`` enforces a limit.

    The times are those of two ways to read the machine's files and cgroups.
    """

    groups: int
    """Number of cgroups that both contenders read."""
    timed: str = "core"
    reference: str = "floor"
    """Contender whose time is the denominator of the ratio; ``sum``: :func:`poll.sum_of_halves`."""


RATIOS: Final = {
    "poll.pass.warm.core": GuardedRatio(0),
    "poll.groups100.warm.core": GuardedRatio(100),
    "poll.groups500.warm.core": GuardedRatio(500),
    "poll.groups1000.warm.core": GuardedRatio(1000),
    "poll.groups100.half_to_its_calls": GuardedRatio(100, "half", "half_floor"),
    "poll.groups100.half_to_sum": GuardedRatio(100, "half", "sum"),
    "poll.groups100.core_to_openat": GuardedRatio(100, "core", "opens_floor"),
    "poll.groups100.core_to_python": GuardedRatio(100, "core", "good"),
    "poll.groups500.core_to_python": GuardedRatio(500, "core", "good"),
}
"""Guarded ratios by key, which is that of the result row if a suite has one.
Keys with ``situ`` (one pass after a pause) are left out, because the pauses take minutes."""


PUBLICATION_RATIOS: Final = {"publish.64.frames": 64}
"""Number of clients of guarded ratios of the suite ``publish``, by key of the result row."""


class GuardResult(NamedTuple):
    """Result of comparing one guarded figure with its budget."""

    value: str
    """Measured figure, or the reason why there is none if ``met`` is None."""
    budget: str
    met: bool | None


class GuardContext:
    """Data that all guards (comparisons of a figure with its budget) share.

    They are the checkout under test, its budgets, and ``benchmarks/driver.c``, which is built on first use.
    """

    def __init__(self, root: Path, budgets: Mapping[str, Any], directory: Path) -> None:
        self._root = root
        self._budgets = budgets
        self._directory = directory

    @cached_property
    def driver(self) -> CoreBenchmarkProgram:
        """Program that is built from ``benchmarks/driver.c`` and the C core of the checkout."""
        return build_driver(self._root, self._directory)

    @cached_property
    def heartbeat_waits(self) -> Mapping[str, float]:
        """Waits of each Python thread of an idle agent per heartbeat, counted on first use."""
        return count_heartbeat_waits()

    def forget_counts(self) -> None:
        """Count again what all guards share, on the next use."""
        self.__dict__.pop("heartbeat_waits", None)

    def budget(self, kind: str, name: str) -> Any:
        """Return the budget of a benchmark figure. Raises MeasurementError if it has none."""
        try:
            return self._budgets[kind][name]
        except KeyError:
            raise MeasurementError(f"{BUDGETS_FILE}: [{kind}] has no budget for {name}; add one") from None

    def budget_of_python(self, kind: str, python: str) -> Mapping[str, float]:
        """Return the budgets in the table `kind` of the budgets file for a version of Python; empty: none."""
        by_python: Mapping[str, Mapping[str, float]] = self._budgets.get(kind, {})
        return by_python.get(python, {})

    def baselines(self) -> Mapping[str, float]:
        """Return the recorded counts of CPU instructions for the installed C compiler; empty: unknown."""
        by_compiler: Mapping[str, Mapping[str, float]] = self._budgets.get("instructions", {})
        return by_compiler.get(compiler_id(), {})


class BudgetedFigure(NamedTuple):
    """Reference to one benchmark figure that has a budget, which ``--check`` enforces."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}.{self.name}"

    def check(self, context: GuardContext) -> GuardResult:
        """Measure this benchmark figure and compare it with its budget.

        Raises:
            MeasurementError: An installed tool failed, or the figure has no budget.
        """
        tools = [compiler() if tool == "cc" else tool for tool in KINDS[self.kind].tools]
        missing = [tool for tool in tools if shutil.which(tool) is None]
        if missing:
            return GuardResult(f"{missing[0]} is not installed", "", None)
        kind = KINDS[self.kind]
        result = kind.check(context, self.name)
        for _ in range(kind.tries - 1):
            if result.met is not False:
                break
            context.forget_counts()
            result = kind.check(context, self.name)
        return result


class GuardKind(NamedTuple):
    """Way to measure the figures in one table of ``benchmarks/budgets.toml``, such as ``system_calls``."""

    tools: tuple[str, ...]
    """Programs that the measurement needs; ``cc`` stands for the C compiler."""
    names: Sequence[str]
    """Names of the guards, which are the keys of the table in ``benchmarks/budgets.toml``."""
    check: Callable[[GuardContext, str], GuardResult]
    tries: int = 1
    """Largest number of measurements; only a miss in each of them is a miss."""


def _check_system_calls(context: GuardContext, name: str) -> GuardResult:
    measured, budget = (
        count_system_calls(context.driver, WORKLOADS_BY_NAME[name]),
        context.budget("system_calls", name),
    )
    return GuardResult(_format_calls(measured), _format_calls(budget), measured == budget)


def _format_calls(calls: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number:g}" for name, number in calls.items()) or "none"


def _check_instructions(context: GuardContext, name: str) -> GuardResult:
    own, calls = count_instructions(context.driver, WORKLOADS_BY_NAME[name])
    value = _format_instructions(own, calls)
    baselines = context.baselines()
    if not baselines:
        reason = f"no baselines for {compiler_id()} in {BUDGETS_FILE}; --record writes them"
        return GuardResult(f"{value}: {reason}", "", None)
    if name not in baselines:
        raise MeasurementError(
            f'{BUDGETS_FILE}: [instructions."{compiler_id()}"] has no workload {name}; run --record'
        )
    budget, budget_calls = baselines[name], baselines[f"{name}_calls"]
    met = abs(own - budget) <= INSTRUCTION_TOLERANCE * budget and calls == budget_calls
    return GuardResult(value, _format_instructions(budget, budget_calls), met)


def _format_instructions(own: float, calls: float) -> str:
    return f"{own:,.0f} in the core, {calls:,g} calls into libraries"


def _check_allocations(context: GuardContext, name: str) -> GuardResult:
    blocks = (
        idle_counts.count_retained_blocks()
        if name == QUIET_EVALUATION
        else count_allocations(context.driver, WORKLOADS_BY_NAME[name])
    )
    return _exact_result(blocks, context.budget("allocations", name))


def _check_wakeups(context: GuardContext, name: str) -> GuardResult:
    try:
        return _exact_result(WAKEUP_COUNTERS[name](), context.budget("wakeups", name))
    except FakeNvmlUnavailable as error:
        return GuardResult(str(error), "", None)


def _check_heartbeat_waits(context: GuardContext, name: str) -> GuardResult:
    budget = context.budget("heartbeat_waits", name)
    try:
        return _exact_result(context.heartbeat_waits[name], budget)
    except FakeNvmlUnavailable as error:
        return GuardResult(str(error), "", None)


def _check_publication_calls(context: GuardContext, name: str) -> GuardResult:
    measured, budget = count_publication_calls(name), context.budget("publication_calls", name)
    return GuardResult(_format_calls(measured), _format_calls(budget), measured == budget)


def _check_modules(context: GuardContext, name: str) -> GuardResult:
    measured, budget = idle_counts.count_modules(name), context.budget("modules", name)
    return GuardResult(f"{measured:,g}", f"at most {budget:,g}", measured <= budget)


def _check_opcodes(context: GuardContext, name: str) -> GuardResult:
    """Compare the number of Python opcodes that the agent executes for one change with its budget.

    Each version of Python has its own budget.
    """
    try:
        measured = OPCODE_COUNTERS[name](name)
    except FakeNvmlUnavailable as error:
        return GuardResult(str(error), "", None)
    python = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
    budget = context.budget_of_python("opcodes", python).get(name)
    if budget is None:
        return GuardResult(f"{measured:,g}: no budget for {python} in {BUDGETS_FILE}", "", None)
    met = abs(measured - budget) <= OPCODE_TOLERANCE * budget
    return GuardResult(f"{measured:,g}", f"{budget:,g}", met)


def _check_message_bytes(context: GuardContext, name: str) -> GuardResult:
    measured = sum(len(message) for message in encode_health_lists(health_entries(MESSAGE_DEVICES[name])))
    return _exact_result(measured, context.budget("bytes", name))


def _exact_result(measured: float, budget: float) -> GuardResult:
    return GuardResult(f"{measured:,g}", f"{budget:,g}", measured == budget)


def _check_ratio(context: GuardContext, name: str) -> GuardResult:
    """Compare a ratio of times with its budget.

    Other programs on the machine widen the confidence interval of the median ratio. The check fails only if
    the whole interval is above the limit. They also take the caches from both contenders, which changes the
    ratio itself: an attempt next to them can meet the budget, and cannot miss it.
    """
    budget = float(context.budget("ratio", name))
    limit = budget * (1 + RATIO_TOLERANCE)
    if name in PUBLICATION_RATIOS:
        reference, measure = "floor", partial(measure_publication_ratio, PUBLICATION_RATIOS[name])
    else:
        reference, measure = RATIOS[name].reference, partial(_measure_ratio, RATIOS[name])
    measured: list[MedianInterval] = []
    others: list[float] = []
    while len(measured) < RATIO_TRIES and all(ratio.median > limit for ratio in measured):
        ratio, used = _measure_next_to_others(measure)
        measured.append(ratio)
        others.append(used)
    best = min(measured, key=lambda ratio: ratio.median)
    value = f"{best.median:.2f}x {reference} [{best.low:.2f}, {best.high:.2f}]"
    is_met = best.low <= limit
    if not is_met and min(others) > OTHERS_MAX:
        return GuardResult(f"{value}, while other programs used {min(others):.1f} CPUs", "", None)
    if not is_met and reference == "good":
        bound = _measure_ratio(RATIOS[name]._replace(timed="floor"))
        if bound.low > limit:  # no reader of these files can meet the limit on this CPU
            return GuardResult(f"{value}; the bare system calls take {bound.median:.2f}x", "", None)
    return GuardResult(value, f"{budget:.2f}x, or {RATIO_TOLERANCE:.0%} over", is_met)


def _measure_next_to_others(measure: Callable[[], MedianInterval]) -> tuple[MedianInterval, float]:
    """Return a measured ratio, and how many CPUs other programs used meanwhile."""
    start_s, own_s, busy_s = time.monotonic(), sum(os.times()[:4]), _busy_s()
    measured = measure()
    others_s = _busy_s() - busy_s - (sum(os.times()[:4]) - own_s)
    return measured, max(0.0, others_s) / (time.monotonic() - start_s)


def _busy_s() -> float:
    """Return the time in which the machine's CPUs were busy, including stolen time, since the boot [s]."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def _measure_ratio(guarded: GuardedRatio) -> MedianInterval:
    with poll.raised_descriptor_limit(), contextlib.ExitStack() as stack:
        tree = stack.enter_context(real_or_file_tree(guarded.groups))[0] if guarded.groups else None
        sampler = poll.open_sampler(tree)
        stack.callback(sampler.stop, 1.0)
        if tree:
            sampler.run_sweep()
            files = poll.sweep_files(tree, poll.read_snapshot(sampler))
            contenders = poll.cgroup_contenders(tree, sampler, files, stack)
        else:
            contenders = [
                Contender("core", "", sampler.run_pass),
                Contender("floor", "", lambda: sampler.run_lower_bound(sweep=False)),
            ]
        references = {"core", "none"} if guarded.reference == "sum" else {guarded.reference}
        compared = [contender for contender in contenders if contender.key in {guarded.timed, *references}]
        timed = time_contenders(compared, rounds=ROUNDS, limit_s=LIMIT_S).timed
        if guarded.reference == "sum":
            timed["sum"] = poll.sum_of_halves(timed)
        return paired_ratio(timed[guarded.timed], timed[guarded.reference])


BUILD_TOOLS: Final = ("cc", "gcc", "make")
"""Tools that build ``benchmarks/driver.c`` and the fake NVML that it loads."""
KINDS: Final[Mapping[str, GuardKind]] = {
    "bytes": GuardKind((), tuple(MESSAGE_DEVICES), _check_message_bytes),
    "allocations": GuardKind(BUILD_TOOLS, (*WORKLOADS_BY_NAME, QUIET_EVALUATION), _check_allocations),
    "system_calls": GuardKind(
        (*BUILD_TOOLS, "strace"), tuple(WORKLOADS_BY_NAME), _check_system_calls, COUNT_TRIES
    ),
    "instructions": GuardKind((*BUILD_TOOLS, "valgrind"), tuple(WORKLOADS_BY_NAME), _check_instructions),
    "wakeups": GuardKind((), tuple(WAKEUP_COUNTERS), _check_wakeups, COUNT_TRIES),
    "modules": GuardKind((), tuple(idle_counts.START_IMPORTS), _check_modules),
    "opcodes": GuardKind((), tuple(OPCODE_COUNTERS), _check_opcodes),
    "heartbeat_waits": GuardKind(
        ("gcc", "make", "strace"), (*HEARTBEAT_THREADS, CORE_WAKES), _check_heartbeat_waits, COUNT_TRIES
    ),
    "publication_calls": GuardKind(
        ("strace",), tuple(PUBLICATION_CLIENTS), _check_publication_calls, COUNT_TRIES
    ),
    "ratio": GuardKind((), (*RATIOS, *PUBLICATION_RATIOS), _check_ratio),
}
"""Kinds of guards in the order in which they are checked: quick ones first."""


def select_guards(names: Sequence[str] = ()) -> tuple[BudgetedFigure, ...]:
    """Return the guards (figures with a budget) to check: all of them, or those with the given names.

    A name is that of one guard, such as ``bytes.health_8_devices``. The name of a table, such as
    ``system_calls``, selects all of its guards.

    Raises:
        LookupError: A name matches no guard.
    """
    all_guards = tuple(BudgetedFigure(kind, name) for kind in KINDS for name in KINDS[kind].names)
    for name in names:
        if name not in KINDS and name not in map(str, all_guards):
            raise LookupError(
                f"no guard {name!r}; there are {', '.join(KINDS)}, and TABLE.NAME, see {BUDGETS_FILE}"
            )
    return tuple(guard for guard in all_guards if not names or guard.kind in names or str(guard) in names)


WIDTH: Final = 100
VERDICTS: Final = {True: "ok", False: "MISS", None: "--"}


def run_check(root: Path, guards: Sequence[BudgetedFigure]) -> bool:
    """Compare the figures of a checkout with their budgets; print each result as soon as it is known.

    Returns:
        True: no figure missed its budget. A figure that cannot be measured on this machine is printed and
        does not count as missed.

    Raises:
        MeasurementError: A tool failed, or a budget is missing.
    """
    missed, unmeasured = [], 0
    with temporary_directory() as directory:
        context = GuardContext(root, load_budgets(root), directory)
        for guard in guards:
            result = guard.check(context)
            missed += [str(guard)] if result.met is False else []
            unmeasured += result.met is None
            print(format_guard(guard, result), flush=True)
    summary = f"{len(guards)} guards: {len(guards) - len(missed) - unmeasured} hold, {len(missed)} missed"
    summary += f", {unmeasured} not measured" if unmeasured else ""
    print(f"\n{summary}{': ' if missed else ''}{', '.join(missed)}")
    return not missed


def format_guard(guard: BudgetedFigure, result: GuardResult) -> str:
    """Format the comparison of a figure with its budget: ``ok    bytes.health_8_devices    376``.

    The text also has the budget if it differs from the figure.
    """
    budget = f"; budget {result.budget}" if result.budget and result.budget != result.value else ""
    text = f"{VERDICTS[result.met]:4}  {guard!s:36}  {result.value}{budget}"
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * 8)
