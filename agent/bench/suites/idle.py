"""Cost of an idle agent: 10 Hz, 500 cgroups, 8 GPUs, one subscriber, and no changes.

CPU time is the scheduler's account of each thread (schedstat); wakeups are voluntary context switches. Both
include the threads that live from the start to the end of the measurement, also those of the process that
calls NVML.

Suite ``startup``: the start-up time and memory of imports, ``drahealth --help``, and agents without and with
GPUs until their first message.

Each program is a process; programs run in turns. The lower bound is an interpreter that does nothing; that of
an agent's memory is an interpreter with the libraries that an agent uses.
"""

import asyncio
import contextlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from agent.bench.file_trees import real_or_file_tree, temporary_directory
from agent.bench.idle_counts import START_IMPORTS
from agent.bench.peers import load_peers, measure_cost, measure_peers
from agent.bench.processes import (
    CHECK_S,
    HEALTH_METHOD,
    SAMPLER,
    UNIT_ENVIRONMENT,
    FakeNvmlUnavailable,
    ProcessError,
    ProcessRun,
    StartedProcess,
    ThreadUsage,
    agent_socket,
    cpu_percent,
    drahealth_program,
    driver_socket,
    lower_bound_or_none,
    read_memory,
    read_resident_bytes,
    read_threads,
    run_program,
    start_agent,
    start_subscriber,
    write_gpu_scenario,
)
from agent.bench.result import (
    MeasurementError,
    ResultRow,
    ResultTable,
    RunSize,
    SuiteOutcome,
    Unit,
    find_checkout,
    find_reason,
    row_from_samples,
    rows_from_latencies,
    seconds_from_ns,
)
from agent.bench.timing import MedianInterval
from agent.model.report import AgentStatus
from agent.serve.agent_api.client import fetch_status

GROUPS: Final = 500
GPUS: Final = 8
PERIOD_MS: Final = 100
LOWER_BOUND: Final = "lower bound: bare timerfd threads of the same period: one, with GPUs two processes"
ONE_TIMER: Final = "  of that, the thread that used less"
READY_S: Final = 60.0
NEW_GROUP_S: Final = 120.0
"""Time after a cgroup's creation in which the agent reads all of its counters in each sweep [s]."""
LABELS: Final = {
    SAMPLER: "the C sampler",
    "C": "all other C threads",
    "nvml": "the process that calls NVML",
    "main": "the Trio thread",
    "I/O": "the asyncio thread",
    "Python": "all other Python threads",
}


def run(run_size: RunSize) -> SuiteOutcome:
    """Measure CPU, wakeups, memory, descriptors and system calls of an agent without changes."""
    outcome = SuiteOutcome()
    with (
        temporary_directory() as directory,
        real_or_file_tree(GROUPS) as (tree, reason),
        lower_bound_or_none(outcome, "idle", "timer", PERIOD_MS) as sampler_bound,
        lower_bound_or_none(outcome, "idle", "timer", PERIOD_MS) as nvml_bound,
    ):
        if reason:
            outcome.skipped.append(f"idle: {reason}; measured on {tree.backend}")
        flags = ["--period", f"{PERIOD_MS}ms", "--cgroupfs-root", str(tree.cgroupfs)]
        flags += ["--kubelet-cgroup-root", tree.kubelet_root]
        environment: Mapping[str, str] = {}
        try:
            fake = write_gpu_scenario(directory, GPUS)
        except FakeNvmlUnavailable as unavailable:
            outcome.skipped.append(f"idle: without GPUs: {unavailable}")
        else:
            flags += ["--nvml-library", str(fake.library)]
            environment = fake.environment
        wanted = (sampler_bound, nvml_bound) if environment else (sampler_bound,)
        bounds = [program.pid for program in wanted if program]
        with (
            start_agent(directory, flags, environment=environment) as agent,
            start_subscriber(driver_socket(directory), HEALTH_METHOD, "$^", agent) as client,
        ):
            pid = agent.pid
            client.wait(lambda line: "found" in line)
            _wait_for_watches(agent)
            time.sleep(run_size.settle_s)
            agent.require_running()
            client.discard_lines()
            before, bounds_before = read_threads(pid), [read_threads(bound) for bound in bounds]
            start_ns = time.monotonic_ns()
            time.sleep(run_size.idle_s)
            agent.require_running()
            after, bounds_after = read_threads(pid), [read_threads(bound) for bound in bounds]
            duration_s = (time.monotonic_ns() - start_ns) / 1e9
            heartbeats = client.discard_lines()
            timers = [
                cpu_percent(old, new, duration_s)
                for old, new in zip(bounds_before, bounds_after, strict=True)
            ]
            rows = _cpu_rows(before, after, timers, duration_s)
            if run_size.settle_s < NEW_GROUP_S:  # a key without a budget
                rows[0] = replace(rows[0], key="idle.cpu.new", label=f"{rows[0].label}; all cgroups are new")
            rows.append(_row("heartbeats", "heartbeats in this time", heartbeats, "1"))
            rows += _heartbeat_rows(before, after, heartbeats)
            rows += _memory_rows(pid)
            rows.insert(-3, _library_row("idle.rss.floor"))
            agent_cost = measure_cost(pid, before, after, duration_s) if run_size.peers else None
            rows += _call_rows(run_size, outcome, pid)
            # last: the answer costs the agent some memory
            rows += _status_rows(asyncio.run(fetch_status(agent_socket(directory))))
        title = (
            f"{duration_s:.0f} s without changes; period {PERIOD_MS} ms, {GROUPS} cgroups, "
            f"{GPUS if environment else 0} GPUs, {tree.backend}"
        )
        notes = (
            "one subscriber of a driver's socket; a heartbeat every 9 to 10 s",
            client.library,
        )
        outcome.tables.append(ResultTable(title, tuple(rows), LOWER_BOUND if bounds else "", notes=notes))
        if agent_cost and (root := find_checkout()):
            measure_peers(load_peers(root), run_size, outcome, agent_cost)
    return outcome


def _row(key: str, label: str, value: float, unit: Unit) -> ResultRow:
    return row_from_samples(f"idle.{key}", label, (value,), unit)


def count_inotify_watches(pid: int) -> int:
    """Count the inotify watches of a process in /proc."""
    count = 0
    for file in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the process closed it
            count += file.read_text().count("inotify wd:")
    return count


def _wait_for_watches(agent: StartedProcess) -> None:
    """Wait until the agent watches all cgroups: at least a watch per pod, and a constant number."""
    deadline, before = time.monotonic() + READY_S, -1
    while (current := count_inotify_watches(agent.pid)) < GROUPS // 2 or current != before:
        agent.require_running()
        if time.monotonic() > deadline:
            raise ProcessError(
                f"agent: {current} inotify watches after {READY_S:g} s: too few, or not constant"
            )
        before = current
        time.sleep(0.1)


def _cpu_rows(
    before: Mapping[int, ThreadUsage],
    after: Mapping[int, ThreadUsage],
    timers: Sequence[float],
    duration_s: float,
) -> list[ResultRow]:
    """Return CPU time and wakeups by thread; ``timers`` has the CPU time of each bare timer thread [%]."""
    cpu: dict[str, float] = {}
    wakeups: dict[str, float] = {}
    for tid in before.keys() & after.keys():
        old, new = before[tid], after[tid]
        cpu[new.name] = cpu.get(new.name, 0.0) + (new.run_ns - old.run_ns) / duration_s / 1e7
        wakeups[new.name] = wakeups.get(new.name, 0.0) + (new.wakeups - old.wakeups) * 60 / duration_s
    total = _row("cpu", "CPU, % of one core", cpu_percent(before, after, duration_s), "%")
    rows = [total]
    rows += [_row(f"cpu.{name}", f"  of that, {LABELS[name]}", cpu[name], "%") for name in sorted(cpu)]
    if timers:
        factor = total.max / sum(timers)
        rows[0] = replace(total, ratio=MedianInterval(factor, factor, factor))
        rows.append(_row("cpu.floor", LOWER_BOUND, sum(timers), "%"))
        rows.append(_row("cpu.floor.one", ONE_TIMER, min(timers), "%"))
    label = "wakeups per minute, {}"
    rows += [
        _row(f"wakeups.{name}", label.format(LABELS[name]), wakeups[name], "1") for name in sorted(wakeups)
    ]
    return rows


def _heartbeat_rows(
    before: Mapping[int, ThreadUsage], after: Mapping[int, ThreadUsage], heartbeats: int
) -> list[ResultRow]:
    """Return the wakeups of the Python threads of an idle agent per heartbeat.

    They include wakeups by Python's interpreter, and by answers of the subscriber.
    """
    wakeups = dict.fromkeys(("main", "I/O", "Python"), 0)
    for tid in before.keys() & after.keys():
        if (name := after[tid].name) in wakeups:
            wakeups[name] += after[tid].wakeups - before[tid].wakeups
    return [
        _row(f"beat.{name}", f"  wakeups of {LABELS[name]} per heartbeat", number / heartbeats, "1")
        for name, number in wakeups.items()
        if heartbeats
    ]


_STRACE_LINE: Final = re.compile(r"^ *[\d.]+ +[\d.]+ +\d+ +(\d+) +(?:\d+ +)?(\w+)$", re.M)
CALLS_SHOWN: Final = 5


def _call_rows(run_size: RunSize, outcome: SuiteOutcome, pid: int) -> list[ResultRow]:
    """Count, with strace, the system calls of all threads for each polling pass of the C sampler."""
    if not run_size.strace_s:
        return []
    if shutil.which("strace") is None:
        outcome.skipped.append("idle: system calls: strace is not installed")
        return []
    command = ["timeout", "--signal=INT", f"{run_size.strace_s}", "strace", "-f", "-c", "-p", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    counts = {name: int(calls) for calls, name in _STRACE_LINE.findall(done.stderr) if name != "total"}
    if not counts:
        outcome.skipped.append(f"idle: strace: {find_reason(done.stderr)}")
        return []
    passes = run_size.strace_s * 1000 / PERIOD_MS
    rows = [_row("calls", "system calls per pass, all threads", sum(counts.values()) / passes, "1")]
    most_frequent = sorted(counts, key=lambda name: -counts[name])[:CALLS_SHOWN]
    return rows + [
        _row(f"calls.{name}", f"  of that, {name}", counts[name] / passes, "1") for name in most_frequent
    ]


LIBRARIES: Final = """
from agent.system.deferred_modules import defer_modules
defer_modules()
import argparse, ctypes.util, dataclasses, json, logging, sqlite3, tomllib
import asyncio, grpclib.server, msgspec, trio
from agent.native import _core
asyncio.run(asyncio.sleep(0))
trio.run(trio.sleep, 0)
sqlite3.connect(":memory:").execute("SELECT 1").close()
"""
"""Program that loads the libraries of an agent and does nothing."""


def _library_row(key: str) -> ResultRow:
    """Measure the memory of an interpreter with the agent's libraries and the environment of the unit."""
    label = "  lower bound: the interpreter and the agent's libraries"
    return row_from_samples(key, label, (_measure_libraries(),), "B")


@cache
def _measure_libraries() -> int:
    return run_program(LIBRARIES, environment=UNIT_ENVIRONMENT).end_rss


def _memory_rows(pid: int) -> list[ResultRow]:
    rss, pss = read_memory(pid)
    return [
        _row("rss", "RSS", rss, "B"),
        _row("pss", "PSS", pss, "B"),
        _row("descriptors", "open descriptors", len(os.listdir(f"/proc/{pid}/fd")), "1"),
        _row("watches", "inotify watches", count_inotify_watches(pid), "1"),
    ]


def _status_rows(status: AgentStatus) -> list[ResultRow]:
    return [
        _row("kernel", "kernel memory of these, estimated by the agent", status.core.kernel_bytes, "B"),
        _row("groups", "cgroups watched, reported by the agent", status.groups, "1"),
        _row("passes", "passes at the newest report, reported by the agent", status.core.passes, "1"),
        _row("wakes", "  of these, passes that woke Python", status.core.wakes, "1"),
        _row("reads", "  reads in total", status.core.reads, "1"),
        _row("opens", "  opens in total", status.core.opens, "1"),
    ]


# --- suite startup -----------------------------------------------------------------------------------------

PROGRAMS: Final = {
    "floor": ("lower bound: an interpreter that does nothing", "pass"),
    "import": ("import drahealth: the library of drivers", "import drahealth"),
    "help": ("drahealth --help", drahealth_program("--help")),
    "psutil": ("import psutil", "import psutil"),
    "grpc": ("import grpc: grpcio, which the agent does not use", "import grpc"),
}
IMPORTS_SHOWN: Final = 8
_IMPORT: Final = re.compile(r"^import time: +(\d+) \| +\d+ \|  *(\S+)$", re.M)


def run_startup(run_size: RunSize) -> SuiteOutcome:
    """Measure the start-up time and memory of each program, and the slowest imports."""
    outcome = SuiteOutcome()
    programs = dict(PROGRAMS)
    if importlib.util.find_spec("grpc") is None:
        del programs["grpc"]
        outcome.skipped.append("startup: grpcio is not installed")
    runs: dict[str, list[ProcessRun]] = {key: [] for key in programs}
    for _ in range(run_size.starts):
        for key, (_, code) in programs.items():
            runs[key].append(run_program(code))
    labels = {key: label for key, (label, _) in programs.items()}
    times = {key: [process.took_ns for process in processes] for key, processes in runs.items()}
    rows = rows_from_latencies("startup", labels, dict(times))
    section = "a process from start to end"
    outcome.tables.append(ResultTable("time", rows, labels["floor"], section=section))
    sizes = [
        row_from_samples(f"startup.{key}.rss", labels[key], [process.peak_rss for process in processes], "B")
        for key, processes in runs.items()
    ]
    outcome.tables.append(ResultTable("peak memory (RSS)", tuple(sizes), section=section))
    outcome.tables.append(_measure_agent_starts(run_size, outcome))
    if run_size.imports:
        outcome.tables.append(_measure_imports())
    else:
        outcome.skipped.append("startup: imports: skipped by --quick")
    return outcome


ANY: Final = "$^"
GPU: Final = r"gpu-\d+"


def _measure_agent_starts(run_size: RunSize, outcome: SuiteOutcome) -> ResultTable:
    """Measure starts of agents without and with GPUs, in turns, and their memory after the first list."""
    starts: dict[int, list[_AgentStart]] = {0: [], GPUS: []}
    for _ in range(run_size.starts):
        for gpus in list(starts):
            try:
                starts[gpus].append(_start_once(gpus))
            except FakeNvmlUnavailable as unavailable:
                outcome.skipped.append(f"startup: without GPUs: {unavailable}")
                del starts[gpus]
    rows: list[ResultRow] = []
    for gpus, runs in starts.items():
        key, of = (f"startup.{gpus}gpus", f", {gpus} GPUs") if gpus else ("startup", "")
        ready, first = ([run.ready_ns for run in runs], [run.first_list_ns for run in runs])
        label = "process start to a subscriber's first list"
        rows += [
            row_from_samples(f"{key}.ready", f"process start to READY=1{of}", seconds_from_ns(ready), "s"),
            row_from_samples(f"{key}.list", f"{label}{of}", seconds_from_ns(first), "s"),
            row_from_samples(
                f"{key}.agent.rss", f"RSS after the first list{of}", [run.rss for run in runs], "B"
            ),
        ]
    rows.append(_library_row("startup.agent.rss.floor"))
    notes = (f"{starts[0][0].library}, started before the agent and waiting for the socket",)
    return ResultTable("drahealth run", tuple(rows), notes=notes)


class _AgentStart(NamedTuple):
    """One start of an agent."""

    ready_ns: int
    """Duration until READY=1."""
    first_list_ns: int
    """Duration until a subscriber received a list with all devices."""
    rss: int
    library: str
    """gRPC library of the subscriber."""


def _start_once(gpus: int) -> _AgentStart:
    """Start an agent with `gpus` GPUs of the fake NVML and stop it after its first list.

    Raises:
        FakeNvmlUnavailable: The fake NVML cannot be built.
    """
    with temporary_directory() as directory, contextlib.ExitStack() as stack:
        flags = ["--cgroupfs-root", str(directory / "none")]
        environment = {"NOTIFY_SOCKET": str(directory / "notify")}
        if gpus:
            fake = write_gpu_scenario(directory, gpus)
            flags += ["--nvml-library", str(fake.library)]
            environment |= fake.environment
        notify = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        notify.bind(environment["NOTIFY_SOCKET"])
        notify.settimeout(CHECK_S)
        marker = GPU if gpus else ANY
        client = stack.enter_context(start_subscriber(driver_socket(directory), HEALTH_METHOD, marker))
        start_ns = time.monotonic_ns()
        client.server = agent = stack.enter_context(start_agent(directory, flags, environment=environment))
        ready_ns = _wait_for_ready(notify, agent) - start_ns
        first = client.wait(lambda line: "found" in line and len(set(line["found"])) >= gpus)
        return _AgentStart(ready_ns, first["t_ns"] - start_ns, read_resident_bytes(agent.pid), client.library)


def _wait_for_ready(notify: socket.socket, agent: StartedProcess) -> int:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            datagram = notify.recv(4096)
        except TimeoutError:
            agent.require_running()
            continue
        if b"READY=1" in datagram.split(b"\n"):
            return time.monotonic_ns()
    raise ProcessError(f"agent: no READY=1 within {READY_S:g} s")


def _measure_imports() -> ResultTable:
    """Measure the import time of each module in one start, with -X importtime."""
    command = [sys.executable, "-X", "importtime", "-c", START_IMPORTS["run"]]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise MeasurementError(f"imports: exit status {completed.returncode}", completed.stderr)
    own_us = {name: int(us) for us, name in _IMPORT.findall(completed.stderr)}
    slowest = sorted(own_us, key=lambda name: -own_us[name])[:IMPORTS_SHOWN]
    rows: list[ResultRow] = [
        row_from_samples("startup.imports", f"all {len(own_us)} modules", [sum(own_us.values()) / 1e6], "s"),
        *(row_from_samples(f"startup.imports.{name}", name, [own_us[name] / 1e6], "s") for name in slowest),
    ]
    notes = ("one run with -X importtime, which slows imports; times exclude imported modules",)
    return ResultTable("imports of drahealth run, slowest first", tuple(rows), notes=notes)
