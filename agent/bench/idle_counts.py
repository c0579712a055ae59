"""How often Python wakes, and what it keeps, while nothing changes: exact counts, by clocks of their own.

The C core's passes are real, at its shortest period, so that a minute of an agent at 10 Hz is over in six
seconds. The decision core's minutes pass on a clock that jumps.
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

from agent.bench.result import Unmeasured
from agent.bench.trees import scratch, write_groups, write_sysfs
from agent.config.config import Config
from agent.engine.loop import EngineLoop, Timing
from agent.engine.step import State, step
from agent.health.host.catalog import wakes
from agent.model.settings import Settings
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant
from agent.native.sampler import Sampler, SamplerOptions

GROUPS: Final = 10
PERIOD_NS: Final = NS // 100
PASSES: Final = 600
"""A minute of them at 10 Hz."""
STILL_S: Final = 10.0
LOOKS: Final = 100
COUNTS: Final = 5
SETTLED_S: Final = 65  # it knows by then that all is well, and no heartbeat is due just now


class StandsStill(Unmeasured):
    """The sampler makes no passes, or wakes nobody at its first: its silence says nothing."""


def sampler_wakes(passes: int = PASSES) -> int:
    """How often a live sampler wakes its reader in so many passes over files that do not change.

    It sweeps its groups, and reads everything anew, many times within.
    """
    with _sampler() as sampler:
        sampler.start()
        if not _readable(sampler, STILL_S):
            raise StandsStill(f"sampler: its first publication woke nobody in {STILL_S:g} s")
        sampler.clear()
        first, woken = _read(sampler).core.passes, 0
        made, deadline = 0, time.monotonic() + STILL_S
        while made < passes:
            before, made = made, _read(sampler).core.passes - first
            if made > before:
                deadline = time.monotonic() + STILL_S
            elif time.monotonic() > deadline:
                raise StandsStill(f"sampler: {made} passes of {passes}, then none in {STILL_S:g} s")
            if _readable(sampler, 0.05):
                woken += 1
                sampler.clear()
        return woken


def core_looks() -> int:
    """How often the decision core looks in a quiet minute, with the timing that an agent has by default."""
    quiet = _Quiet()
    try:
        return trio.run(_quiet_minute, quiet, clock=MockClock(autojump_threshold=0))
    finally:
        os.close(quiet.fileno())


def blocks_kept() -> float:
    """Blocks of Python's allocator that each of many quiet looks keeps.

    The median of several counts: what was there before may be freed in any one of them.
    """
    with _sampler() as sampler:
        sampler.run_pass()
        now = Instant(max(source.beat_ns for source in _read(sampler).sources), 1.7e9)
        state = State(Settings("bench"))

        def looks() -> None:
            nonlocal state
            for _ in range(LOOKS):
                state, _ = step(state, _read(sampler), now)
            gc.collect()

        def kept() -> int:
            before = sys.getallocatedblocks()
            looks()
            return sys.getallocatedblocks() - before - 1  # `before` is one itself

        looks()
        return median(kept() for _ in range(COUNTS)) / LOOKS


@contextlib.contextmanager
def _sampler() -> Iterator[Sampler]:
    with scratch() as root:
        write_sysfs(root / "sys")
        tree = write_groups(root / "cgroup", GROUPS)
        options = SamplerOptions(
            sysfs_root=root / "sys",
            cgroupfs_root=tree.cgroupfs,
            period_ns=PERIOD_NS,
            sweep_ns=10 * PERIOD_NS,
            resync_ns=20 * PERIOD_NS,
            wakes=wakes(Settings("bench").throttle_events, Settings("bench").throttle_window_s),
        )
        sampler = Sampler(options)
        try:
            yield sampler
        finally:
            sampler.stop(1.0)


def _read(sampler: Sampler) -> Snapshot:
    snapshot = sampler.read()
    assert snapshot is not None, "it has been started, or has made a pass"
    return snapshot


def _readable(sampler: Sampler, within_s: float) -> bool:
    return bool(select.select([sampler], [], [], within_s)[0])


class _Quiet:
    """A source that wakes nobody: what it read first, beating by the clock that jumps."""

    def __init__(self) -> None:
        with _sampler() as sampler:
            sampler.run_pass()
            self._snapshot = _read(sampler)
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.looks = 0

    def fileno(self) -> int:
        return self._fd

    def clear(self) -> None:
        """There is never a wake to take note of."""

    def read(self) -> Snapshot:
        self.looks += 1
        beat_ns = _clock().mono_ns
        sources = tuple(source._replace(beat_ns=beat_ns) for source in self._snapshot.sources)
        return replace(self._snapshot, sources=sources)


def _clock() -> Instant:
    return Instant(int(trio.current_time() * NS), 1.7e9 + trio.current_time())


async def _quiet_minute(quiet: _Quiet) -> int:
    config = Config(node_name="bench")
    core = EngineLoop(
        source=quiet,
        state=State(Settings("bench")),
        timing=Timing(config.heartbeat_s, config.coalesce_ns, watchdog_s=None),
        clock=_clock,
        publish=_nothing,
        remember=_nothing,
        alive=lambda: None,
        jitter=lambda: 0.0,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(core.run)
        await trio.sleep(SETTLED_S)
        before = quiet.looks
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    return quiet.looks - before


def _nothing(_: object) -> None:
    """Nobody listens."""
