"""Exact counts: system calls by strace, instructions by callgrind, allocations.

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

from agent.bench.nvml import FakeNvml, fake_nvml
from agent.bench.result import MeasurementError
from agent.bench.trees import scratch, write_groups, write_knobs, write_machine, write_sysfs

GROUPS: Final = 100
CONTROLLERS: Final = 2
GPUS: Final = 8
DEVICES: Final = 128
POD: Final = "pod"
WRAPPED: Final = ("clock_gettime", "malloc", "calloc", "realloc")
MARKER_CALL: Final = "getppid"
"""System call that the driver makes before and after the workload."""
REPEATS: Final = {
    "pass": 100,
    "second": 10,
    "still": 1,
    "sweep": 5,
    "machine": 100,
    "minute": 5,
    "uevent": 100,
    "knobs": 100,
    "gpus": 100,
    "gpu_minute": 2,
    "encode": 20,
}


class CountError(MeasurementError):
    """A tool failed or its output is not understood."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload of the driver program: one part of the C core, run on one file tree."""

    name: str
    mode: str
    groups: int = 0
    controllers: int = 0


WORKLOADS: Final = (
    Workload("pass", "pass"),
    Workload("second", "second"),
    Workload(f"second_{GROUPS}_groups", "second", GROUPS),
    Workload(f"still_{GROUPS}_groups", "still", GROUPS),
    Workload(f"sweep_{GROUPS}_groups", "sweep", GROUPS),
    Workload("machine", "machine"),
    Workload(f"machine_{CONTROLLERS}_controllers", "machine", controllers=CONTROLLERS),
    Workload(f"minute_{CONTROLLERS}_controllers", "minute", controllers=CONTROLLERS),
    Workload("uevent_of_no_interest", "uevent"),
    Workload("knobs", "knobs"),
    Workload(f"pass_{GPUS}_gpus", "gpus"),
    Workload(f"minute_{GPUS}_gpus", "gpu_minute"),
    Workload(f"encode_{DEVICES}_devices", "encode"),
)


@dataclass(frozen=True, slots=True)
class DriverProgram:
    """Built driver program (``benchmarks/driver.c``) and the directory of its file trees."""

    program: Path
    trees: Path
    nvml: FakeNvml

    def command(self, workload: Workload, times: int) -> list[str]:
        """Return the command that runs the workload ``times`` times."""
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
    """Return the C compiler that builds the driver: ``$CC``, or gcc."""
    return os.environ.get("CC", "gcc")


def compiler_id() -> str:
    """Return name, version and target of the compiler: the key of its baselines."""
    banner = _run([compiler(), "--version"]).splitlines()[0]
    kind = "clang" if "clang" in banner else "gcc"
    version = re.search(r"(\d+\.\d+\.\d+)", banner)
    return f"{kind} {version[1] if version else banner} {platform.machine()}"


def build(root: Path, directory: Path) -> DriverProgram:
    """Compile the driver program with the flags of the shipped core, and write its file trees and GPU
    scenario.

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
        _run([compiler(), *flags, "-c", str(source), "-o", compiled_objects])
        return compiled_objects

    sources = [root / "benchmarks/driver.c", *sorted((root / "native/src").rglob("*.c"))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled_objects = list(pool.map(compiled, sources))
    wraps = [f"-Wl,--wrap={name}" for name in WRAPPED]
    _run([compiler(), *flags, *compiled_objects, *wraps, "-o", str(program)])
    write_sysfs(directory / "sys")
    write_knobs(directory / "knobs", POD)
    for groups in {workload.groups for workload in WORKLOADS}:
        write_groups(directory / f"cgroup{groups}", groups)
    for controllers in {workload.controllers for workload in WORKLOADS}:
        write_machine(directory / f"machine{controllers}", controllers)
    return DriverProgram(program, directory, fake_nvml(directory, GPUS))


def system_calls(driver: DriverProgram, workload: Workload) -> dict[str, float]:
    """Count the system calls of the driver's thread for one run of the workload, by name."""
    log, times = driver.trees / "strace.log", REPEATS[workload.mode]
    _run(["strace", "-qq", "-o", str(log), *driver.command(workload, times)])
    names = re.findall(r"^(\w+)\(", log.read_text(errors="replace"), re.M)
    *_, first, last = (index for index, name in enumerate(names) if name == MARKER_CALL)
    result = collections.Counter(names[first + 1 : last])
    return {name: result[name] / times for name in sorted(result)}


def allocations(driver: DriverProgram, workload: Workload) -> int:
    """Count the core's allocations in many runs of the workload."""
    output = _run(driver.command(workload, REPEATS[workload.mode]))
    return int(output.removeprefix("allocations "))


def instructions(driver: DriverProgram, workload: Workload) -> tuple[float, float]:
    """Count the core's own instructions and its calls into libraries for one run of the workload."""
    once = REPEATS[workload.mode]
    few, many = (_callgrind(driver, workload, times) for times in (once, 2 * once))
    return (many[0] - few[0]) / once, (many[1] - few[1]) / once


def record(root: Path) -> tuple[str, Mapping[str, float]]:
    """Measure the baselines of this compiler; return the name of their table and its values."""
    with scratch() as directory:
        driver = build(root, directory)
        return f'instructions."{compiler_id()}"', baselines(driver)


def baselines(driver: DriverProgram) -> dict[str, float]:
    """Count instructions and calls into libraries of all workloads."""
    result: dict[str, float] = {}
    for workload in WORKLOADS:
        own, calls = instructions(driver, workload)
        result[workload.name] = round(own)
        result[f"{workload.name}_calls"] = calls
    return result


def _callgrind(driver: DriverProgram, workload: Workload, times: int) -> tuple[int, int]:
    out = driver.trees / "callgrind.out"
    valgrind = [
        "valgrind",
        "--tool=callgrind",
        "--quiet",
        f"--callgrind-out-file={out}",
        "--compress-strings=no",
    ]
    _run([*valgrind, "--compress-pos=no", *driver.command(workload, times)])
    return parse_callgrind(out.read_text(), str(driver.program))


def parse_callgrind(text: str, program: str) -> tuple[int, int]:
    """Sum an object's own instructions and its calls to other objects in callgrind's uncompressed output.

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


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except FileNotFoundError:
        raise CountError(f"{command[0]} is not installed") from None
    if done.returncode:
        raise CountError(f"{' '.join(command[:3])} ...: exit {done.returncode}: {done.stderr[-1000:]}")
    return done.stdout
