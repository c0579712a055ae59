"""What an agent costs that has nothing to do: 10 Hz, 500 cgroups, one subscriber, and nothing changes.

CPU time is the scheduler's own account of each thread (schedstat); wakeups are voluntary context switches.
Both are of the threads that live from the begin to the end of the measurement.
"""

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from agent.bench.effort import Effort
from agent.bench.lower_bound import NoFloor, floor
from agent.bench.processes import HEALTH_METHOD, Silence, agent, agent_socket, health_socket, subscriber
from agent.bench.result import Outcome, Row, Table, Unit, row_of
from agent.bench.timing import Interval
from agent.bench.trees import scratch, some_tree
from agent.model.status import AgentStatus
from agent.serve.agent_api.client import status

GROUPS: Final = 500
PERIOD_MS: Final = 100
FLOOR: Final = "floor: a bare timerfd thread of the same period"
READY_S: Final = 60.0
STILL_S: Final = 120.0
"""For so long a cgroup is new, and each of its counters read in every sweep."""
SAMPLER: Final = "dh-sampler"
LABELS: Final = {
    SAMPLER: "the C sampler",
    "C": "all other C threads",
    "main": "the Trio thread",
    "I/O": "the asyncio thread",
}


class Thread(NamedTuple):
    """One thread's account at one moment."""

    name: str
    run_ns: int
    wakeups: int


def run(effort: Effort) -> Outcome:
    """CPU, wakeups, memory, descriptors, and system calls."""
    outcome = Outcome()
    with scratch() as directory, some_tree(GROUPS) as (tree, why), _floor(outcome) as bare:
        if why:
            outcome.skipped.append(f"idle: {why}; measured on {tree.backend}")
        flags = ["--period", f"{PERIOD_MS}ms", "--cgroupfs-root", str(tree.cgroupfs)]
        flags += ["--kubelet-cgroup-root", tree.kubelet_root]
        with (
            agent(directory, flags) as pid,
            subscriber(health_socket(directory), HEALTH_METHOD, "$^") as client,
        ):
            client.wait(lambda line: "found" in line)
            _wait_for_watches(pid)
            time.sleep(effort.settle_s)
            client.seen()
            before, bare_before = threads(pid), threads(bare) if bare else {}
            start_ns = time.monotonic_ns()
            time.sleep(effort.idle_s)
            after, bare_after = threads(pid), threads(bare) if bare else {}
            lasted_s = (time.monotonic_ns() - start_ns) / 1e9
            heartbeats = client.seen()
            rows = _cpu_rows(before, after, _share(bare_before, bare_after, lasted_s), lasted_s)
            if effort.settle_s < STILL_S:  # no budget is meant for this
                rows[0] = replace(rows[0], key="idle.cpu.new", label=f"{rows[0].label}; all cgroups are new")
            rows.append(_one("heartbeats", "heartbeats in this time", heartbeats, "1"))
            rows += _memory_rows(pid)
            rows += _call_rows(effort, outcome, pid)
            # last: to answer costs the agent an import, 20 ms and some memory
            rows += _own_rows(asyncio.run(status(agent_socket(directory))))
        title = f"{lasted_s:.0f} s of nothing; period {PERIOD_MS} ms, {GROUPS} cgroups, {tree.backend}"
        notes = (
            "one subscriber of a driver's socket; a heartbeat every 9 to 10 s",
            client.library,
        )
        outcome.tables.append(Table(title, tuple(rows), FLOOR if bare else "", notes=notes))
    return outcome


@contextlib.contextmanager
def _floor(outcome: Outcome) -> Iterator[int | None]:
    """The pid of the floor, or None and why."""
    with contextlib.ExitStack() as stack:
        try:
            pid = stack.enter_context(floor("timer", PERIOD_MS)).pid
        except NoFloor as why:
            outcome.skipped.append(f"idle: {why}")
            pid = None
        yield pid


def _one(key: str, label: str, value: float, unit: Unit) -> Row:
    return row_of(f"idle.{key}", label, (value,), unit)


def watches(pid: int) -> int:
    """inotify watches of a process, as the kernel counts them."""
    number = 0
    for file in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            number += file.read_text().count("inotify wd:")
    return number


def _wait_for_watches(pid: int) -> None:
    """Until every group has been found: each pod has a watch at least, and no more come."""
    deadline, before = time.monotonic() + READY_S, -1
    while (now := watches(pid)) < GROUPS // 2 or now != before:
        if time.monotonic() > deadline:
            raise Silence(f"the agent has {now} inotify watches after {READY_S:g} s")
        before = now
        time.sleep(0.1)


def threads(pid: int) -> Mapping[int, Thread]:
    """Every thread of a process."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = dict(
            line.split(":\t") for line in (task / "status").read_text().splitlines() if ":\t" in line
        )
        run_ns = int((task / "schedstat").read_text().split()[0])
        name = _job(fields["Name"], is_main=task.name == str(pid))
        found[int(task.name)] = Thread(name, run_ns, int(fields["voluntary_ctxt_switches"]))
    return found


def _job(name: str, *, is_main: bool) -> str:
    """The key of :data:`LABELS` for a thread."""
    if name.startswith("dh-"):
        return name if name == SAMPLER else "C"
    return "main" if is_main else "I/O"


def _share(before: Mapping[int, Thread], after: Mapping[int, Thread], lasted_s: float) -> float:
    """CPU of all threads [% of one core]."""
    both = before.keys() & after.keys()
    return sum(after[tid].run_ns - before[tid].run_ns for tid in both) / lasted_s / 1e7


def _cpu_rows(
    before: Mapping[int, Thread], after: Mapping[int, Thread], bare: float, lasted_s: float
) -> list[Row]:
    share: dict[str, float] = {}
    wakeups: dict[str, float] = {}
    for tid in before.keys() & after.keys():
        old, new = before[tid], after[tid]
        share[new.name] = share.get(new.name, 0.0) + (new.run_ns - old.run_ns) / lasted_s / 1e7
        wakeups[new.name] = wakeups.get(new.name, 0.0) + (new.wakeups - old.wakeups) * 60 / lasted_s
    total = _one("cpu", "CPU, % of one core", _share(before, after, lasted_s), "%")
    rows = [total]
    rows += [_one(f"cpu.{name}", f"  of that, {LABELS[name]}", share[name], "%") for name in sorted(share)]
    if bare:
        times = total.max / bare
        rows[0] = replace(total, ratio=Interval(times, times, times))
        rows.append(_one("cpu.floor", FLOOR, bare, "%"))
    label = "wakeups per minute, {}"
    rows += [
        _one(f"wakeups.{name}", label.format(LABELS[name]), wakeups[name], "1") for name in sorted(wakeups)
    ]
    return rows


_COUNTED: Final = re.compile(r"^ *[\d.]+ +[\d.]+ +\d+ +(\d+) +(?:\d+ +)?(\w+)$", re.M)
CALLS_SHOWN: Final = 5


def _call_rows(effort: Effort, outcome: Outcome, pid: int) -> list[Row]:
    """System calls of all threads per pass of the sampler, as strace counts them."""
    if not effort.strace_s:
        return []
    if shutil.which("strace") is None:
        outcome.skipped.append("idle: system calls are counted with strace, which is not installed")
        return []
    command = ["timeout", "--signal=INT", f"{effort.strace_s}", "strace", "-f", "-c", "-p", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    counts = {name: int(calls) for calls, name in _COUNTED.findall(done.stderr) if name != "total"}
    if not counts:
        outcome.skipped.append(f"idle: strace: {done.stderr.strip()[-200:]}")
        return []
    passes = effort.strace_s * 1000 / PERIOD_MS
    rows = [_one("calls", "system calls per pass, all threads", sum(counts.values()) / passes, "1")]
    most = sorted(counts, key=lambda name: -counts[name])[:CALLS_SHOWN]
    return rows + [_one(f"calls.{name}", f"  of that, {name}", counts[name] / passes, "1") for name in most]


def _memory_rows(pid: int) -> list[Row]:
    process = Path(f"/proc/{pid}")
    lines = (process / "smaps_rollup").read_text().splitlines()
    kib = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
    return [
        _one("rss", "RSS", kib["Rss:"] * 1024, "B"),
        _one("pss", "PSS", kib["Pss:"] * 1024, "B"),
        _one("descriptors", "open descriptors", len(os.listdir(process / "fd")), "1"),
        _one("watches", "inotify watches", watches(pid), "1"),
    ]


def _own_rows(state: AgentStatus) -> list[Row]:
    return [
        _one("kernel", "kernel memory of these, the agent's estimate", state.core.kernel_bytes, "B"),
        _one("groups", "cgroups watched, says the agent", state.groups, "1"),
        _one("passes", "passes at its newest report, says the agent", state.core.passes, "1"),
        _one("wakes", "  of these woke Python", state.core.wakes, "1"),
        _one("reads", "  reads in all", state.core.reads, "1"),
        _one("opens", "  opens in all", state.core.opens, "1"),
    ]
