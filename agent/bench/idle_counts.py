"""Exact counts of an idle agent: wakeups of Python, and memory that evaluations retain.

The C core makes real passes at its shortest period, so that one minute of an agent at 10 Hz takes six
seconds. The engine loop runs on a mock clock; the waits of a heartbeat are those of a whole agent.
"""

import contextlib
import gc
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Final

import trio
from trio.testing import MockClock

from agent.bench.file_trees import temporary_directory, write_cgroup_files, write_sysfs
from agent.bench.processes import driver_socket, start_agent
from agent.bench.result import MeasurementError
from agent.config.config import Config
from agent.engine.loop import EngineLoop, LoopTiming
from agent.engine.step import EngineState, step
from agent.health.host.catalog import sampler_wakes
from agent.model.settings import EngineSettings
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant
from agent.native.sampler import Sampler, SamplerOptions

GROUPS: Final = 10
PERIOD_NS: Final = NS // 100
PASSES: Final = 600
"""Number of passes of the C core in one minute at 10 Hz."""
STALL_S: Final = 10.0
EVALUATIONS: Final = 100
COUNTS: Final = 5
WARM_UP_S: Final = 65  # all devices are healthy by then, and no heartbeat is due


class SamplerStalled(MeasurementError):
    """The C sampler makes no passes, or the first does not wake its reader; wakeups cannot be counted."""


def count_sampler_wakes(passes: int = PASSES) -> int:
    """Return how often a running C sampler wakes its reader in ``passes`` passes over unchanged files.

    These passes include many cgroup sweeps and full resyncs.
    """
    with _open_sampler() as sampler:
        sampler.start()
        if not _wait_readable(sampler, STALL_S):
            raise SamplerStalled(f"C sampler: its first pass did not wake the reader within {STALL_S:g} s")
        sampler.clear()
        first, wakes_seen = _read_snapshot(sampler).core.passes, 0
        made, deadline = 0, time.monotonic() + STALL_S
        while made < passes:
            before, made = made, _read_snapshot(sampler).core.passes - first
            if made > before:
                deadline = time.monotonic() + STALL_S
            elif time.monotonic() > deadline:
                raise SamplerStalled(
                    f"C sampler: made {made} of {passes} passes, then none within {STALL_S:g} s"
                )
            if _wait_readable(sampler, 0.05):
                wakes_seen += 1
                sampler.clear()
        return wakes_seen


def count_evaluations() -> int:
    """Count the evaluations of the engine loop in a quiet minute, with the default timing of an agent."""
    source = _IdleSource()
    try:
        return trio.run(_count_minute, source, clock=MockClock(autojump_threshold=0))
    finally:
        os.close(source.fileno())


HEARTBEATS: Final = 12
HEARTBEAT_THREADS: Final = ("core", "io")
"""Threads whose waits are counted: the core thread (Trio) and the I/O thread (asyncio)."""
_WAIT: Final = re.compile(r"(?:epoll_p?wait2?|p?poll|p?select[6]?|clock_nanosleep)\(")
_NO_WAIT: Final = re.compile(r", 0(?:, NULL, 8)?\) +=")
_CORE_BEAT: Final = re.compile(r"sendto\(.* = 1$")
"""Pattern of the system call with which the core thread wakes the I/O thread: it sends a byte."""
_IO_BEAT: Final = re.compile(r"recvfrom\(.* = 1$")
"""Pattern of the system call with which the I/O thread receives that byte."""


def count_heartbeat_waits() -> Mapping[str, float]:
    """Count how often each thread of HEARTBEAT_THREADS waits in the kernel per heartbeat of an agent without
    clients. Waits for Python's interpreter lock are not counted.

    The result is the median over HEARTBEATS, since the machine may delay an agent so that it reads again.

    Raises:
        SamplerStalled: The agent has too few heartbeats.
    """
    with temporary_directory() as root:
        tree = write_cgroup_files(root / "cgroup", GROUPS)
        flags = ["--cgroupfs-root", str(tree.cgroupfs)]
        with start_agent(root, flags, config='[stream]\nheartbeat = "250ms"\n') as pid:
            deadline = time.monotonic() + STALL_S
            while not driver_socket(root).exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            command = ["strace", "-ff", "-qq", "-o", str(root / "strace"), "-p", str(pid)]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as tracer:
                try:
                    return _read_heartbeat_waits(root, pid, tracer)
                finally:
                    tracer.terminate()


def _read_heartbeat_waits(root: Path, pid: int, tracer: "subprocess.Popen[bytes]") -> Mapping[str, float]:
    """Return the waits per heartbeat of the process `pid`, whose system calls strace writes to `root`."""
    deadline = time.monotonic() + STALL_S + HEARTBEATS
    while time.monotonic() < deadline:
        time.sleep(0.25)
        if tracer.poll() is not None:
            raise MeasurementError(
                f"strace: ended with status {tracer.returncode}; it may not trace the agent"
            )
        by_thread = {file.suffix: file.read_text(errors="replace") for file in root.glob("strace.*")}
        core = _waits_between(_CORE_BEAT, by_thread.pop(f".{pid}", ""))
        io = max((_waits_between(_IO_BEAT, text) for text in by_thread.values()), key=len, default=[])
        if min(len(core), len(io)) >= HEARTBEATS:
            return {"core": median(core), "io": median(io)}
    raise SamplerStalled(f"agent: fewer than {HEARTBEATS} heartbeats in {STALL_S + HEARTBEATS:g} s")


def _waits_between(beat: re.Pattern[str], text: str) -> list[int]:
    """Return the number of waits between each two heartbeats in the system calls of a thread."""
    counts: list[int] = []
    for line in text.splitlines():
        if beat.match(line):
            counts.append(0)
        elif counts and _WAIT.match(line) and not _NO_WAIT.search(line):
            counts[-1] += 1
    return counts[:-1]


def count_retained_blocks() -> float:
    """Return how many blocks of Python's allocator each quiet evaluation retains.

    The result is the median of several counts, because unrelated blocks may be freed during one of them.
    """
    with _open_sampler() as sampler:
        sampler.run_pass()
        now = Instant(max(source.beat_ns for source in _read_snapshot(sampler).sources), 1.7e9)
        state = EngineState(EngineSettings("bench"))

        def evaluate_repeatedly() -> None:
            nonlocal state
            for _ in range(EVALUATIONS):
                state, _ = step(state, _read_snapshot(sampler), now)
            gc.collect()

        def count_growth() -> int:
            before = sys.getallocatedblocks()
            evaluate_repeatedly()
            return sys.getallocatedblocks() - before - 1  # `before` itself is a block

        evaluate_repeatedly()
        return median(count_growth() for _ in range(COUNTS)) / EVALUATIONS


@contextlib.contextmanager
def _open_sampler() -> Iterator[Sampler]:
    with temporary_directory() as root:
        write_sysfs(root / "sys")
        tree = write_cgroup_files(root / "cgroup", GROUPS)
        options = SamplerOptions(
            sysfs_root=root / "sys",
            cgroupfs_root=tree.cgroupfs,
            period_ns=PERIOD_NS,
            sweep_ns=10 * PERIOD_NS,
            resync_ns=20 * PERIOD_NS,
            wakes=sampler_wakes(
                EngineSettings("bench").throttle_events, EngineSettings("bench").throttle_window_s
            ),
        )
        sampler = Sampler(options)
        try:
            yield sampler
        finally:
            sampler.stop(1.0)


def _read_snapshot(sampler: Sampler) -> Snapshot:
    snapshot = sampler.read()
    assert snapshot is not None, "the sampler was started or made a pass"
    return snapshot


def _wait_readable(sampler: Sampler, within_s: float) -> bool:
    return bool(select.select([sampler], [], [], within_s)[0])


class _IdleSource:
    """Snapshot source that never wakes its reader; all snapshots are equal but for their heartbeats."""

    def __init__(self) -> None:
        with _open_sampler() as sampler:
            sampler.run_pass()
            self._snapshot = _read_snapshot(sampler)
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.reads = 0

    def fileno(self) -> int:
        return self._fd

    def clear(self) -> None:
        """Do nothing, since this source never wakes its reader."""

    def read(self) -> Snapshot:
        self.reads += 1
        beat_ns = _mock_time().mono_ns
        sources = tuple(source._replace(beat_ns=beat_ns) for source in self._snapshot.sources)
        return replace(self._snapshot, sources=sources)


def _mock_time() -> Instant:
    return Instant(int(trio.current_time() * NS), 1.7e9 + trio.current_time())


async def _count_minute(source: _IdleSource) -> int:
    config = Config(node_name="bench")
    loop = EngineLoop(
        source=source,
        state=EngineState(EngineSettings("bench")),
        timing=LoopTiming(config.heartbeat_s, config.coalesce_ns, watchdog_s=None),
        clock=_mock_time,
        publish=_discard,
        save_state=_discard,
        notify_watchdog=lambda: None,
        jitter=lambda: 0.0,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(loop.run)
        await trio.sleep(WARM_UP_S)
        before = source.reads
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    return source.reads - before


def _discard(_: object) -> None:
    """Ignore the argument."""
