"""What the core may cost, in counts that do not jitter. No times: those are the machine's.

The budgets stand in ``benchmarks/budgets.toml``. A count that fell is a failure too: lower the budget, so
that it cannot rise again unseen.
"""

import select
import shutil
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from agent.bench import counts
from agent.bench.budgets import FILE
from agent.bench.counts import WORKS, Driver, Work
from agent.bench.suites.encode import entries_of
from agent.bench.trees import scratch, write_groups, write_sysfs
from agent.health.host.catalogue import wakes
from agent.model.time import NS
from agent.native.encode import encode_health
from agent.native.sampler import Sampler, SamplerOptions

ROOT: Final = Path(__file__).resolve().parents[1]
BUDGETS: Final[dict[str, Any]] = tomllib.loads((ROOT / FILE).read_text())
TOLERANCE: Final = 0.005
QUIET_PASSES: Final = 50

by_work = pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)


def needs(tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    needs(counts.compiler())
    with scratch() as where:
        yield counts.build(ROOT, where)


@by_work
def test_the_system_calls_are_those_of_the_budget(driver: Driver, work: Work) -> None:
    needs("strace")
    assert counts.system_calls(driver, work) == BUDGETS["system_calls"][work.name]


@by_work
def test_nothing_is_allocated(driver: Driver, work: Work) -> None:
    assert counts.allocations(driver, work) == 0


@by_work
def test_the_instructions_are_those_of_the_baseline(driver: Driver, work: Work) -> None:
    needs("valgrind")
    own, calls = counts.instructions(driver, work)
    baseline = BUDGETS["instructions"].get(counts.compiler_id())
    if baseline is None:
        pytest.skip(
            f"no baseline for {counts.compiler_id()}: {work.name} takes {own:.0f} instructions and "
            f"{calls:.0f} calls into the C library; python -m agent.bench --record keeps them"
        )
    assert own == pytest.approx(baseline[work.name], rel=TOLERANCE)
    assert calls == baseline[f"{work.name}_calls"]


@pytest.mark.parametrize("devices", [8, 128, 1000])
def test_a_health_list_has_the_bytes_of_the_budget(devices: int) -> None:
    messages = encode_health(entries_of(devices))
    assert [len(message) for message in messages] == [BUDGETS["bytes"][f"health_{devices}_devices"]]


def test_quiet_passes_wake_no_python() -> None:
    """A live sampler at its shortest period, over groups that it sweeps all the time."""
    with scratch() as root:
        write_sysfs(root / "sys")
        tree = write_groups(root / "cgroup", 10)
        sampler = Sampler(
            SamplerOptions(
                sysfs_root=root / "sys",
                cgroupfs_root=tree.cgroupfs,
                period_ns=NS // 100,
                sweep_ns=NS // 10,
                resync_ns=NS // 5,
                wakes=wakes(throttle_events=10, throttle_window_s=60),
            )
        )
        try:
            sampler.start()
            assert readable(sampler, 5.0), "the first publication wakes"
            sampler.clear()
            first = passes(sampler)
            deadline = time.monotonic() + 10
            while passes(sampler) < first + QUIET_PASSES:
                assert not readable(sampler, 0.05), "a pass that changed nothing woke Python"
                assert time.monotonic() < deadline, "the sampler stands still"
        finally:
            sampler.stop(1.0)


def test_a_change_does_wake_python() -> None:
    """So that the silence above is not that of a broken descriptor."""
    with scratch() as root:
        write_sysfs(root / "sys")
        options = SamplerOptions(
            sysfs_root=root / "sys", cgroupfs_root=root, period_ns=NS // 100, wakes=wakes(10, 60)
        )
        sampler = Sampler(options)
        try:
            sampler.start()
            assert readable(sampler, 5.0)
            sampler.clear()
            pool = root / "sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages"
            with pool.open("r+b", buffering=0) as file:
                file.write(b"7\n")
            assert readable(sampler, 5.0)
        finally:
            sampler.stop(1.0)


def readable(sampler: Sampler, within_s: float) -> bool:
    return bool(select.select([sampler], [], [], within_s)[0])


def passes(sampler: Sampler) -> int:
    snapshot = sampler.read()
    return snapshot.core.passes if snapshot else 0
