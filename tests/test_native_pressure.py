"""The machine watch on the real kernel's pressure files: totals, triggers, and their wakes."""

import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from machine import memory_pressure
from patience import PATIENCE_S

from agent.model.machine_samples import MachineSample
from agent.model.reading import SourceState
from agent.model.time import NS
from agent.native.machine_watch import MachineWatch

PRESSURE = Path("/proc/pressure")
TRIGGER = b"full 100000 2000000\0"
TRIGGER_US, TRIGGER_WINDOW_S = 100_000, 2
HOUR = 3600 * NS

pytestmark = pytest.mark.skipif(not PRESSURE.exists(), reason="this kernel has no pressure stall information")


@contextmanager
def watch(*, started: bool) -> Iterator[tuple[MachineWatch, int]]:
    """Yield a watch with passes an hour apart, and its eventfd."""
    wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    machine = MachineWatch(Path("/sys"), Path("/proc"), wake, HOUR, HOUR, HOUR)
    try:
        if started:
            machine.start()
            assert is_readable(wake, select.POLLIN, PATIENCE_S)
            os.eventfd_read(wake)
        else:
            machine.run_pass()
        yield machine, wake
    finally:
        assert machine.stop(PATIENCE_S)
        os.close(wake)


def is_readable(fd: int, event: int, within_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(within_s * 1000))


def read(machine: MachineWatch) -> MachineSample:
    sample = machine.read()
    assert sample is not None
    return sample


def totals(name: str) -> list[int]:
    """Return the kernel's totals: some, full [us]."""
    return [int(line.rpartition("total=")[2]) for line in (PRESSURE / name).read_text().splitlines()]


def own_trigger(name: str) -> int:
    """Open a trigger as the watch does."""
    try:
        fd = os.open(PRESSURE / name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        pytest.skip(f"may not open {PRESSURE / name}: {e.strerror}")
    try:
        os.write(fd, TRIGGER)
    except OSError as e:
        os.close(fd)
        pytest.skip(f"no trigger on {PRESSURE / name}: {e.strerror}")
    return fd


def wait_for_trigger(fd: int, event: int, within_s: float) -> None:
    """Wait until a trigger fires. If it does not, skip unless the pressure was enough in some window.

    While other tests keep all CPUs busy, not all tasks wait for memory.
    """
    before_us, begun_s = totals("memory")[1], time.monotonic()
    if is_readable(fd, event, within_s):
        return
    waited_us, took_s = totals("memory")[1] - before_us, time.monotonic() - begun_s
    assert waited_us < took_s / TRIGGER_WINDOW_S * TRIGGER_US, "no notification"
    pytest.skip(f"all waited for memory for {waited_us} us in {took_s:.0f} s: too little")


def test_pressure_totals_equal_the_kernels() -> None:
    line_of = {"cpu": 0, "memory": 1, "io": 1}  # some, or full
    before = [totals(name)[line] for name, line in line_of.items()]
    with watch(started=False) as (machine, _):
        sample = read(machine)
    after = [totals(name)[line] for name, line in line_of.items()]
    seen = [sample.pressure.cpu_some, sample.pressure.memory_full, sample.pressure.io_full]
    for low, total, high in zip(before, seen, after, strict=True):
        assert isinstance(total, int)
        assert low <= total <= high
    source = next(source for source in sample.sources if source.name == "pressure")
    assert (source.state, source.detail) == (SourceState.OK, "")


def test_real_memory_pressure_wakes_between_passes(tmp_path: Path) -> None:
    """The watch wakes when a trigger of the test fires too; no pass of the watch is due for an hour."""
    with watch(started=True) as (machine, wake):
        first = read(machine).pressure
        own = own_trigger("memory")
        try:
            with memory_pressure(tmp_path):
                wait_for_trigger(own, select.POLLPRI, 20)
                while read(machine).pressure.memory_full < first.memory_full + TRIGGER_US:  # type: ignore[operator]
                    # the storage trigger may fire earlier, and wakes too
                    wait_for_trigger(wake, select.POLLIN, PATIENCE_S)
                    os.eventfd_read(wake)
        finally:
            os.close(own)
