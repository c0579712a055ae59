"""Exact counts of an idle agent: wakeups of Python, and memory that evaluations retain.

The C core makes real passes at its shortest period, so that one minute of an agent at 10 Hz takes six
seconds. The engine loop runs on a mock clock.
"""

import contextlib
import gc
import os
import select
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Final

import trio
from trio.testing import MockClock

from agent.bench.file_trees import temporary_directory, write_cgroup_files, write_sysfs
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
