"""Counts that do not jitter: system calls by strace, instructions by callgrind, allocations.

All are of ``benchmarks/driver.c``, linked with the core as it stands in the checkout, on trees of files that
look alike everywhere. It is run with N and with 2N, and what the second run has more is divided by N.

Instructions are those of the core's own code: the C library picks its string functions by the processor, and
would make the count differ between machines. Calls into it, and into NVML, are counted beside them.
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
from agent.bench.result import Unmeasured
from agent.bench.trees import scratch, write_groups, write_knobs, write_machine, write_sysfs

GROUPS: Final = 100
CONTROLLERS: Final = 2
GPUS: Final = 8
DEVICES: Final = 128
POD: Final = "pod"
WRAPPED: Final = ("clock_gettime", "malloc", "calloc", "realloc")
MARK: Final = "getppid"
"""The system call before and after the work."""
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


class Uncountable(Unmeasured):
    """A tool failed, or what it said is not understood."""


@dataclass(frozen=True, slots=True)
class Work:
    """One part of the core, on one tree."""

    name: str
    mode: str
    groups: int = 0
    controllers: int = 0


WORKS: Final = (
    Work("pass", "pass"),
    Work("second", "second"),
    Work(f"second_{GROUPS}_groups", "second", GROUPS),
    Work(f"still_{GROUPS}_groups", "still", GROUPS),
    Work(f"sweep_{GROUPS}_groups", "sweep", GROUPS),
    Work("machine", "machine"),
    Work(f"machine_{CONTROLLERS}_controllers", "machine", controllers=CONTROLLERS),
    Work(f"minute_{CONTROLLERS}_controllers", "minute", controllers=CONTROLLERS),
    Work("uevent_of_no_interest", "uevent"),
    Work("knobs", "knobs"),
    Work(f"pass_{GPUS}_gpus", "gpus"),
    Work(f"minute_{GPUS}_gpus", "gpu_minute"),
    Work(f"encode_{DEVICES}_devices", "encode"),
)


@dataclass(frozen=True, slots=True)
class Driver:
    """A built driver, and where its trees are."""

    program: Path
    trees: Path
    nvml: FakeNvml

    def command(self, work: Work, times: int) -> list[str]:
        """Does the work ``times`` times."""
        machine = self.trees / f"machine{work.controllers}"
        on: dict[str, tuple[object, object]] = {
            "machine": (machine / "sys", machine / "proc"),
            "minute": (machine / "sys", machine / "proc"),
            "uevent": ("-", "-"),
            "knobs": (self.trees / "knobs", POD),
            "gpus": (self.nvml.library, self.nvml.scenario),
            "gpu_minute": (self.nvml.library, self.nvml.scenario),
            "encode": (DEVICES, "-"),
        }
        roots = on.get(work.mode, (self.trees / "sys", self.trees / f"cgroup{work.groups}"))
        return [str(self.program), work.mode, *map(str, roots), str(times)]


def compiler() -> str:
    """The C compiler that builds the driver: ``CC``, or gcc."""
    return os.environ.get("CC", "gcc")


def compiler_id() -> str:
    """Its name, version and target, the key of its baselines."""
    banner = _output([compiler(), "--version"]).splitlines()[0]
    kind = "clang" if "clang" in banner else "gcc"
    version = re.search(r"(\d+\.\d+\.\d+)", banner)
    return f"{kind} {version[1] if version else banner} {platform.machine()}"


def build(root: Path, where: Path) -> Driver:
    """Compile the driver with the flags that the shipped core is built with, and make its trees and GPUs.

    Args:
        root: The checkout.
        where: An empty directory that outlives the driver.
    """
    flags = runpy.run_path(str(root / "setup_build.py"))["CFLAGS"]
    program = where / "driver"
    flags += [f"-I{root / 'native/include'}", f"-I{root / 'native/src'}", "-D_GNU_SOURCE"]
    objects = where / "objects"
    objects.mkdir()

    def compiled(source: Path) -> str:
        made = str(objects / f"{source.stem}.o")
        _output([compiler(), *flags, "-c", str(source), "-o", made])
        return made

    sources = [root / "benchmarks/driver.c", *sorted((root / "native/src").rglob("*.c"))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(compiled, sources))
    wraps = [f"-Wl,--wrap={name}" for name in WRAPPED]
    _output([compiler(), *flags, *made, *wraps, "-o", str(program)])
    write_sysfs(where / "sys")
    write_knobs(where / "knobs", POD)
    for groups in {work.groups for work in WORKS}:
        write_groups(where / f"cgroup{groups}", groups)
    for controllers in {work.controllers for work in WORKS}:
        write_machine(where / f"machine{controllers}", controllers)
    return Driver(program, where, fake_nvml(where, GPUS))


def system_calls(driver: Driver, work: Work) -> dict[str, float]:
    """By name, for doing the work once; as strace saw them of the driver's thread, not of the fake NVML's."""
    log, times = driver.trees / "strace.log", REPEATS[work.mode]
    _output(["strace", "-qq", "-o", str(log), *driver.command(work, times)])
    names = re.findall(r"^(\w+)\(", log.read_text(errors="replace"), re.M)
    *_, first, last = (at for at, name in enumerate(names) if name == MARK)
    found = collections.Counter(names[first + 1 : last])
    return {name: found[name] / times for name in sorted(found)}


def allocations(driver: Driver, work: Work) -> int:
    """That the core asked for while it did the work many times."""
    said = _output(driver.command(work, REPEATS[work.mode]))
    return int(said.removeprefix("allocations "))


def instructions(driver: Driver, work: Work) -> tuple[float, float]:
    """Instructions of the core's own code for doing the work once, and calls from it into libraries."""
    once = REPEATS[work.mode]
    few, many = (_callgrind(driver, work, times) for times in (once, 2 * once))
    return (many[0] - few[0]) / once, (many[1] - few[1]) / once


def record(root: Path) -> tuple[str, Mapping[str, float]]:
    """The name of this compiler's table of baselines, and what is to stand in it."""
    with scratch() as where:
        driver = build(root, where)
        return f'instructions."{compiler_id()}"', baselines(driver)


def baselines(driver: Driver) -> dict[str, float]:
    """Instructions, and calls into libraries, by work."""
    found: dict[str, float] = {}
    for work in WORKS:
        own, calls = instructions(driver, work)
        found[work.name] = round(own)
        found[f"{work.name}_calls"] = calls
    return found


def _callgrind(driver: Driver, work: Work, times: int) -> tuple[int, int]:
    out = driver.trees / "callgrind.out"
    valgrind = [
        "valgrind",
        "--tool=callgrind",
        "--quiet",
        f"--callgrind-out-file={out}",
        "--compress-strings=no",
    ]
    _output([*valgrind, "--compress-pos=no", *driver.command(work, times)])
    return parse_callgrind(out.read_text(), str(driver.program))


def parse_callgrind(text: str, program: str) -> tuple[int, int]:
    """Own instructions of an object, and calls out of it, from callgrind's output without compression.

    A line after ``calls=`` is the cost inside the callee, and not the caller's own.
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


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except FileNotFoundError:
        raise Uncountable(f"{command[0]} is not installed") from None
    if done.returncode:
        raise Uncountable(f"{' '.join(command[:3])} ...: exit {done.returncode}: {done.stderr[-1000:]}")
    return done.stdout
