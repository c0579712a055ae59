"""Exact counts of system calls (strace), instructions (callgrind) and allocations of the C core.

All counts are those of ``benchmarks/driver.c``, linked with the C core of the checkout, on file trees that
are equal on every machine. For instructions the driver runs N and 2N times; the difference is divided by N.

Instructions are those of the core's own code, because the C library selects its string functions by processor
and would make the count differ between machines. Calls into the C library and NVML are counted separately.
"""

import collections
import os
import platform
import re
import runpy
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.bench.fake_nvml import FakeNvml, write_gpu_scenario
from agent.bench.file_trees import (
    temporary_directory,
    write_cgroup_files,
    write_cgroup_limits,
    write_machine_files,
    write_sysfs,
)
from agent.bench.result import MeasurementError

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
        """Return the command line with which the program runs the workload ``times`` times."""
        machine = self.trees / f"machine{workload.controllers}"
        roots_by_mode: dict[str, tuple[object, object]] = {
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

    def compiled(source: Path) -> str:
        compiled_objects = str(objects / f"{source.stem}.o")
        _run_command([compiler(), *flags, "-c", str(source), "-o", compiled_objects])
        return compiled_objects

    sources = [root / "benchmarks/driver.c", *sorted((root / "native/src").rglob("*.c"))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled_objects = list(pool.map(compiled, sources))
    wraps = [f"-Wl,--wrap={name}" for name in WRAPPED]
    _run_command([compiler(), *flags, *compiled_objects, *wraps, "-o", str(program)])
    write_sysfs(directory / "sys")
    write_cgroup_limits(directory / "knobs", POD)
    for groups in {workload.groups for workload in WORKLOADS}:
        write_cgroup_files(directory / f"cgroup{groups}", groups)
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
    """Count instructions for this compiler; return name and values of their table in budgets.toml."""
    with temporary_directory() as directory:
        driver = build_driver(root, directory)
        return f'instructions."{compiler_id()}"', measure_baselines(driver)


def measure_baselines(driver: CoreBenchmarkProgram) -> dict[str, float]:
    """Count instructions and calls into libraries of all workloads, by workload name."""
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

    A line after ``calls=`` is the cost inside the callee; the caller's own cost excludes it.
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
        raise CountError(
            f"command {' '.join(command[:3])} ...: exit status {done.returncode}: {done.stderr[-1000:]}"
        )
    return done.stdout
