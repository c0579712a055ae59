"""Size and cost of the record of a quiet day: 8 busy GPUs and 200 cgroups, simulated faster than real time.

``cd tests && PYTHONPATH=.. ../.venv/bin/python -m record_size --hours 24`` prints both, and how fast what-if
compares the record. ``--day`` chooses other days than the quiet one.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from golden import stories
from gpu_samples import gpu_sample, gpu_set
from paper import group_sample
from paper_gpus import PaperLog
from record_nodes import Step

from agent.engine.step import EngineState, StepOutcome, step
from agent.model.claim import DeviceRef
from agent.model.gpu import GpuField, GpuSample, NvmlReturnCode
from agent.model.machine_samples import PressureSample
from agent.model.pod_findings import PodsSample
from agent.model.reading import SourceSample
from agent.model.settings import EngineSettings
from agent.model.snapshot import CgroupSample, NativeCoreStats, Snapshot
from agent.model.time import NS, Instant
from agent.record.events import RecordedStep, SegmentHead, recorded_verdicts
from agent.record.segment_file import SegmentWriter, segment_path, segment_paths
from agent.record.what_if import compare_record

GPUS: Final = 8
GROUPS: Final = 200
LIMITED: Final = 60
"""Cgroups with a CPU limit, whose periods are counted."""
SEGMENT_S: Final = 6 * 3600


class Day(StrEnum):
    """Kind of a simulated day."""

    IDLE = "idle"
    """No reading changes."""
    QUIET = "quiet"
    """Everything runs, and nothing fails."""
    FAULTS = "faults"
    """Everything runs, and a GPU has a fault every two hours."""


def quiet_snapshots(seconds: int, seed: int = 1, *, idle: bool = False) -> Iterator[tuple[Snapshot, Instant]]:
    """Yield a snapshot for each heartbeat of a node on which nothing fails; ``idle``: no reading changes."""
    draw = random.Random(seed)
    node = stories.Host(EngineSettings("node-a"))
    node.next(3)
    base = node.snapshot()
    start_ns, now_ns, wall_s = node.now_ns, node.now_ns, 1_790_000_000.0
    groups = [
        group_sample(at, pod=f"{at // 2:08x}-0000-4000-8000-{at:012x}", container="main" * (at % 2))
        for at in range(1, GROUPS + 1)
    ]
    gpus = [gpu_sample(number=at, bus=f"0000:{at + 1:x}b:00.0") for at in range(GPUS)]
    names = {group.pod_uid: f"team-{at % 7}/train-{at}" for at, group in enumerate(groups)}
    uses = {
        group.pod_uid: (DeviceRef("gpu.example.com", "node-a", f"gpu-{at}"),)
        for at, group in enumerate(groups[:GPUS])
    }
    stalls, core = (0, 0, 0), NativeCoreStats()
    while now_ns - start_ns < seconds * NS:
        pause_ns = int(NS * (10 - draw.random())) + draw.randrange(10**6)
        now_ns, wall_s = now_ns + pause_ns, wall_s + pause_ns / NS
        now = Instant(now_ns, wall_s + draw.randrange(3) * 2.4e-7)
        passes = (now_ns - start_ns) // NS
        gpus = [
            _read(gpu, now_ns, passes, draw) if idle else _advance_readings(gpu, now_ns, passes, draw)
            for gpu in gpus
        ]
        groups = [
            _advance_counters(group, draw) if at < LIMITED and not idle and draw.random() < 0.9 else group
            for at, group in enumerate(groups)
        ]
        stalls = tuple(
            total + draw.randrange(most) for total, most in zip(stalls, (10**6, 9, 2000), strict=True)
        )
        core = replace(
            core,
            passes=passes,
            wakes=core.wakes + draw.randrange(2),
            reads=core.reads + 900 + draw.randrange(60),
            opens=core.opens + draw.randrange(40),
        )
        read = [_beat(source, now_ns, draw) for source in base.sources]
        assert base.machine is not None
        machine = replace(
            base.machine,
            pressure=PressureSample(*stalls),
            sources=tuple(source for source in read if source.name in stories.MACHINE),
        )
        pods = SourceSample(
            "pods", read[0].state, now_ns // (60 * NS) * 60 * NS, 60 * NS, 0, "", passes // 60, False
        )
        nvml = gpu_set(*gpus)
        nvml = replace(nvml, nvml=_beat(nvml.nvml, now_ns, draw), events=_beat(nvml.events, now_ns, draw))
        snapshot = replace(
            base,
            seq=base.seq + passes,
            groups=tuple(groups),
            core=core,
            gpus=nvml,
            machine=machine,
            log=replace(base.log, source=read[-1]) if base.log else None,
            pods=PodsSample(pods, uses, names),
            sources=(*read, nvml.nvml, nvml.events, pods),
        )
        yield snapshot, now


def _beat(source: SourceSample, now_ns: int, draw: random.Random) -> SourceSample:
    beat_ns = now_ns - draw.randrange(min(source.period_ns, 9 * NS))
    return source._replace(beat_ns=beat_ns, passes=beat_ns // source.period_ns)


FAULT_S: Final = 7200
"""Time between two faults of GPUs [s]."""
FAULTS: Final = (
    ({GpuField.TEMP: 95}, 300, 0),
    ({GpuField.PCIE_WIDTH: 8}, 1800, 0),
    ({GpuField.ECC_CORRECTABLE: 5000}, FAULT_S, 0),
    ({GpuField.CLOCK_REASONS: 8}, 600, 0),
    ({GpuField.RECOVERY_ACTION: 1}, 900, 0),
    ({}, 1200, NvmlReturnCode.LOST),
)
"""Readings, duration [s] and return code of NVML of each fault."""


def with_faults(snapshots: Iterator[tuple[Snapshot, Instant]]) -> Iterator[tuple[Snapshot, Instant]]:
    """Yield the snapshots, in which a GPU has a fault every two hours, and an XID in the kernel log."""
    kmsg, start_ns, begun = PaperLog(), 0, 0
    for snapshot, now in snapshots:
        assert snapshot.gpus is not None
        assert snapshot.log is not None
        start_ns = start_ns or now.mono_ns
        number, since_s = divmod((now.mono_ns - start_ns) // NS, FAULT_S)
        gpus = list(snapshot.gpus.gpus)
        readings, lasts_s, status = FAULTS[number % len(FAULTS)]
        gpu = gpus[number % len(gpus)]
        if number and since_s < lasts_s:
            gpus[gpu.index] = replace(gpu, readings={**gpu.readings, **readings}, status=status)
        if number > begun:
            bus = gpu.bus.removesuffix(".0")
            kmsg.write(f"NVRM: Xid (PCI:{bus}): 13, pid=7, name=python, failed", now.mono_ns)
            begun = number
        log = replace(snapshot.log, lines=(*snapshot.log.lines, *kmsg.lines()))
        yield replace(snapshot, gpus=replace(snapshot.gpus, gpus=tuple(gpus)), log=log), now


def _advance_readings(gpu: GpuSample, now_ns: int, passes: int, draw: random.Random) -> GpuSample:
    temp = gpu.readings[GpuField.TEMP]
    assert isinstance(temp, int)
    temp = min(74, max(52, temp + draw.choice((-1, 0, 0, 1))))
    throttled = gpu.readings[GpuField.SLOWED_SW_POWER]
    assert isinstance(throttled, int)
    readings = {
        **gpu.readings,
        GpuField.TEMP: temp,
        GpuField.MEM_TEMP: temp + 8 + draw.randrange(2),
        GpuField.MARGIN: 87 - temp,
        GpuField.UTILIZATION: draw.choice((0, 97, 98, 99, 100)),
        GpuField.CLOCK_REASONS: draw.choice((0, 4)),
        GpuField.SLOWED_SW_POWER: throttled + draw.randrange(10**8),
    }
    return replace(
        _read(gpu, now_ns, passes, draw), readings=readings, probe_p50_ns=350_000 + draw.randrange(60_000)
    )


def _read(gpu: GpuSample, now_ns: int, passes: int, draw: random.Random) -> GpuSample:
    return replace(gpu, passes=passes, slow_passes=passes // 10, beat_ns=now_ns - draw.randrange(NS))


def _advance_counters(group: CgroupSample, draw: random.Random) -> CgroupSample:
    periods, throttled = group.cpu_periods, group.cpu_throttled
    assert isinstance(periods, int)
    assert isinstance(throttled, int)
    return group._replace(
        cpu_periods=periods + 95 + draw.randrange(10), cpu_throttled=throttled + draw.randrange(3)
    )


def quiet_steps(seconds: int, seed: int = 1, day: Day = Day.QUIET) -> Iterator[Step]:
    """Yield the steps of a node, all published."""
    state = EngineState(EngineSettings("node-a"))
    snapshots = quiet_snapshots(seconds, seed, idle=day is Day.IDLE)
    for snapshot, now in with_faults(snapshots) if day is Day.FAULTS else snapshots:
        before = state
        state, report = step(before, snapshot, now)
        yield before, snapshot, report, StepOutcome.PUBLISHED


def write_quiet_day(directory: Path, seconds: int, day: Day = Day.QUIET) -> tuple[int, int, float, float]:
    """Write the record of a quiet node, one frame per step, with a segment every six hours.

    Returns bytes, steps, and the CPU time of step() and of the recorder's thread [s].
    """
    directory.mkdir(exist_ok=True)
    writer, size, count, spent_s = None, 0, 0, 0.0
    begun_ns = 0
    began_s = time.process_time()
    for before, snapshot, report, use in quiet_steps(seconds, day=day):
        start_s = time.process_time()
        if writer is None or report.at.mono_ns - begun_ns > SEGMENT_S * NS:
            if writer is not None:
                size += writer.size
                writer.close()
            begun_ns = report.at.mono_ns
            writer = SegmentWriter(segment_path(directory, count), SegmentHead("", "node-a", ""), before)
        writer.append([RecordedStep(snapshot, report.at, use, recorded_verdicts(report))])
        spent_s += time.process_time() - start_s
        count += 1
    assert writer is not None
    size += writer.size
    writer.close()
    return size, count, time.process_time() - began_s - spent_s, spent_s


def main() -> None:
    """Print size and cost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hours", type=float, default=24)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--day", type=Day, choices=list(Day), default=Day.QUIET)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.to or Path(temporary)
        size, count, step_s, record_s = write_quiet_day(directory, int(args.hours * 3600), args.day)
        began_s = time.process_time()
        compared = compare_record(segment_paths(directory), lambda settings: settings)
        compare_s = time.process_time() - began_s
    own_ms, rest_ms = 1e3 * record_s / count, 1e3 * step_s / count
    sys.stdout.write(
        f"{count} steps in {args.hours:g} h: {size / 2**20:.2f} MiB, {size / count:.0f} bytes a step\n"
        f"CPU per step: recorder {own_ms:.2f} ms, simulation and step() {rest_ms:.2f} ms\n"
        f"what-if: {compare_s:.2f} s of CPU, {compared.observed_s / 86_400 / compare_s * 60:.1f} node-days a "
        "minute and CPU\n"
    )


if __name__ == "__main__":
    main()
