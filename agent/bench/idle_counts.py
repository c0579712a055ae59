"""Exact counts of an agent's Python: wakeups and memory while idle, opcodes for one change, loaded modules.

A pass is one reading of all polled files. The C core makes real passes at its shortest period, so that the
passes of one minute at 10 Hz take six seconds. The engine loop runs on a mock clock. The opcodes for a change
are those from the wake by the eventfd to the encoded message.
"""

import contextlib
import gc
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, Final

import trio

from agent.bench.file_trees import (
    CgroupTree,
    shrink_pool,
    temporary_directory,
    write_cgroup_files,
    write_machine_files,
    write_sysfs,
)
from agent.bench.processes import write_gpu_scenario
from agent.bench.result import MeasurementError
from agent.bench.suites.report_path import declare_cpus, snapshot_time
from agent.config.config import Config
from agent.engine.loop import EngineLoop, LoopTiming, SnapshotSource
from agent.engine.step import EngineState, step
from agent.health.gpu.rule_state import gpu_wakes
from agent.health.host.verdicts import sampler_wakes
from agent.model.declared_devices import Declarations
from agent.model.machine_samples import LogSample, MachineSample
from agent.model.reading import SourceSample, SourceState
from agent.model.report import Report
from agent.model.settings import EngineSettings, GpuLimits
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant
from agent.native.gpu_watch import GpuWatch, GpuWatchOptions
from agent.native.machine_watch import MachineWatch
from agent.native.sampler import Sampler, SamplerOptions
from agent.serve.agent_api.encode import encode_report
from agent.serve.grpc_servers import encode_device_health
from agent.serve.health.service import HealthFeed

GROUPS: Final = 10
PERIOD_NS: Final = NS // 100
PASSES: Final = 600
"""Number of passes of the C core in one minute at 10 Hz."""
STALL_S: Final = 60.0
"""Time without a pass after which the sampler counts as stalled [s]; a busy machine may stop all for 15 s."""
EVALUATIONS: Final = 100
COUNTS: Final = 5
TICK_S: Final = 0.02
"""More than one tick of the kernel's clock, within which two passes have the same time [s]."""
FRESH_S: Final = 1.0
"""Longest time from the begin of a pass to its evaluation [s]; a source of 2 s would be stalled."""
COUNT_TRIES: Final = 10
WARM_UP_S: Final = 65  # all devices are healthy by then, and no heartbeat is due


class CountDelayed(MeasurementError):
    """Error: opcodes cannot be counted, because passes took so long that the engine would wait."""


class SamplerStalled(MeasurementError):
    """Error: wakeups cannot be counted, because the C sampler reads no files or does not wake its reader."""


def count_sampler_wakes(passes: int = PASSES) -> int:
    """Return how often a running C sampler wakes its reader while the polled files do not change.

    The sampler makes ``passes`` passes (readings of the polled files). They include many sweeps (readings of
    all cgroups) and full resyncs (readings of every file).
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


def count_nvml_wakes() -> int:
    """Return how often threads wake while the C core reads each of eight unchanged GPUs once.

    The GPUs are those of the fake NVML.

    Raises:
        FakeNvmlUnavailable: The fake NVML cannot be built.
    """
    with temporary_directory() as root:
        fake = write_gpu_scenario(root, 8)
        program = f"from agent.bench.idle_counts import _print_nvml_wakes as p; p({str(fake.library)!r})"
        return int(run_python(["-c", program], fake.environment))


def _print_nvml_wakes(library: str) -> None:
    """Print the number of wakes for one reading of all GPUs: the lowest of several half seconds.

    The lowest number is used because a busy machine causes more wakes.
    """
    options = GpuWatchOptions(library=library, sysfs_root=Path(os.devnull), period_ns=NS // 20)
    watch = GpuWatch(options, os.eventfd(0, os.EFD_NONBLOCK))
    watch.start()
    fewest, before = sys.maxsize, (0, 0)
    for _ in range(20):
        time.sleep(0.5)
        sample, switches = watch.read(), watch.costs().switches
        now = (switches, sample.gpus[0].passes if sample and sample.gpus else 0)
        if now[1] - before[1] >= COUNTS:
            fewest = min(fewest, round((now[0] - before[0]) / (now[1] - before[1])))
        if fewest == 1:
            break
        before = now
    print(fewest)
    watch.stop(STALL_S)


def count_evaluations() -> int:
    """Count the evaluations of the engine loop in a minute without changes, with the default timing."""
    source = _IdleSource()
    try:
        from trio.testing import MockClock  # loads pytest if it is installed

        return trio.run(_count_minute, source, clock=MockClock(autojump_threshold=0))
    finally:
        os.close(source.fileno())


def count_retained_blocks() -> float:
    """Return how many blocks of Python's allocator each evaluation without changes retains.

    A separate process counts them, because other threads of this process may allocate and free blocks.
    """
    program = "from agent.bench.idle_counts import _print_retained_blocks as p; p()"
    return float(run_python(["-c", program]))


def _print_retained_blocks() -> None:
    """Count the retained blocks in this process; print the median of several counts."""
    with _open_sampler() as sampler:
        sampler.run_pass()
        now = snapshot_time(_read_snapshot(sampler))
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
        print(median(count_growth() for _ in range(COUNTS)) / EVALUATIONS)


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
    """Source of snapshots that never wakes its reader.

    All snapshots are equal except for the times of their heartbeats.
    """

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
    loop = _engine_loop(source, _mock_time, _discard)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(loop.run)
        await trio.sleep(WARM_UP_S)
        before = source.reads
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    return source.reads - before


def _engine_loop(
    source: SnapshotSource, clock: Callable[[], Instant], publish: Callable[[Report], None]
) -> EngineLoop:
    """Return an engine loop with the default timing, which stores nothing and has no watchdog."""
    config = Config(node_name="bench")
    return EngineLoop(
        source=source,
        state=EngineState(EngineSettings("bench")),
        timing=LoopTiming(config.heartbeat_s, config.coalesce_ns, watchdog_s=None),
        clock=clock,
        publish=publish,
        save_state=_discard,
        notify_watchdog=lambda: None,
        jitter=lambda: 0.0,
    )


def _discard(_: object) -> None:
    """Accept a report of the engine loop and ignore it."""


CGROUP_EVENT: Final = "cgroup_event"
HEARTBEAT: Final = "heartbeat_8_gpus"
CHANGE_GPUS: Final[Mapping[str, int]] = {"change": 0, "change_8_gpus": 8, CGROUP_EVENT: 0, HEARTBEAT: 8}
"""Number of GPUs in each workload of count_change_opcodes(), which declares as many CPUs, too."""
_DEFER: Final = "from agent.system.deferred_modules import defer_modules; defer_modules(); "
START_IMPORTS: Final = {
    "run": f"{_DEFER}import agent.cli.main, agent.cli.run, agent.app.daemon",
    "drahealth": "import drahealth",
    "driver": "import drahealth; drahealth.Monitor, drahealth.PluginServer",
    "nvml_process": f"{_DEFER}import agent.node.nvml_process_main",
}
"""Import statements of each process that count_modules() measures, by name of the process."""
_WARM_UP: Final = 3


def count_modules(name: str) -> int:
    """Return the number of modules whose code runs in one process of START_IMPORTS.

    Modules that Python loads at its start are not counted.
    """
    program = (
        f"import sys; before = set(sys.modules); {START_IMPORTS[name]}; "
        "loaded = [type(module).__name__ for name, module in sys.modules.items() if name not in before]; "
        "print(len(loaded) - loaded.count('DeferredModule'))"
    )
    return int(run_python(["-c", program]))


def count_change_opcodes(name: str) -> int:
    """Return the number of Python opcodes that the agent executes when a hugepage pool shrinks.

    The count ends with the message for the kubelet. In the workload CGROUP_EVENT, a container runs out of
    memory instead, and the count ends with the report for clients of the agent's socket. In the workload
    HEARTBEAT, nothing changes, and everything is evaluated as at a heartbeat. A separate process counts the
    opcodes, because a process that has loaded the fake NVML keeps its GPUs.

    Raises:
        CountDelayed: The machine was too busy in each of several tries.
        FakeNvmlUnavailable: The workload has GPUs, and the fake NVML cannot be built.
    """
    for _ in range(COUNT_TRIES):
        if printed := _run_workload(name):
            return int(printed)
    raise CountDelayed(f"opcodes.{name}: a pass took over {FRESH_S:g} s in each of {COUNT_TRIES} tries")


def _run_workload(name: str) -> str:
    """Count opcodes once in a new process; return the printed number, or nothing if the count was delayed."""
    gpus = CHANGE_GPUS[name]
    with temporary_directory() as root:
        environment: Mapping[str, str] = {}
        library = ""
        if gpus:
            fake = write_gpu_scenario(root, gpus)
            environment, library = fake.environment, str(fake.library)
        arguments = f"{str(root)!r}, {library!r}, {gpus}, {name!r}"
        program = f"from agent.bench.idle_counts import _print_opcodes as p; p({arguments})"
        return run_python(["-c", program], environment).strip()


def run_python(arguments: list[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a Python program that can import the modules of this checkout, and return its output."""
    command = [sys.executable, *arguments]
    variables = {**os.environ, "PYTHONHASHSEED": "0", **(environment or {})}
    completed = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, cwd=_ROOT)
    if completed.returncode:
        raise MeasurementError(f"Python: {arguments[-1]!r} failed", completed.stderr)
    return completed.stdout


_ROOT: Final = Path(__file__).resolve().parents[2]


def _print_opcodes(root: str, library: str, gpus: int, name: str) -> None:
    """Count Python's opcodes for one workload in this process; print the number unless it was delayed."""
    with contextlib.suppress(CountDelayed):
        print(_count_workload(root, library, gpus, name))


def _count_workload(root: str, library: str, gpus: int, name: str) -> int:
    """Return the number of Python's opcodes for one workload. Raises CountDelayed."""
    is_event, is_heartbeat = name == CGROUP_EVENT, name == HEARTBEAT
    directory = Path(root)
    write_sysfs(directory / "sys")
    write_machine_files(directory, 0)
    tree = write_cgroup_files(directory / "cgroup", GROUPS if is_event else 0)
    roots = SamplerOptions(sysfs_root=directory / "sys", cgroupfs_root=tree.cgroupfs, period_ns=PERIOD_NS)
    sampler = Sampler(replace(roots, wakes=sampler_wakes(1, 60)))
    machine = MachineWatch(directory / "sys", directory / "proc", sampler.fileno())
    options = GpuWatchOptions(library=library, sysfs_root=directory / "sys", wakes=gpu_wakes(GpuLimits()))
    watch = GpuWatch(options, sampler.fileno()) if gpus else None
    declarations: Declarations = ()
    passed_s = math.inf

    def read() -> Snapshot:
        sampled, memory, devices = sampler.read(), machine.read(), watch.read() if watch else None
        assert sampled is not None
        assert memory is not None
        if devices is not None:  # nothing waits for events here
            events = devices.events._replace(state=SourceState.OK, beat_ns=devices.nvml.beat_ns)
            devices = replace(devices, events=events)
        of_gpus = (devices.nvml, devices.events) if devices else ()
        return Snapshot(  # as the node source does it
            seq=sampled.seq,
            cpus=sampled.cpus,
            nodes=sampled.nodes,
            throttle=sampled.throttle,
            pools=sampled.pools,
            groups=sampled.groups,
            core=sampled.core,
            gpus=devices,
            log=LogSample((), _log_source(memory)),
            machine=memory,
            declared=declarations,
            sources=(*sampled.sources, *memory.sources, *of_gpus),
        )

    def run_passes() -> None:
        nonlocal passed_s
        passed_s = time.monotonic()
        if is_event:  # the thread of the sampler waits for events
            _wait_for_pass(sampler)
        else:
            sampler.run_pass()
        machine.run_pass()
        if watch:
            time.sleep(TICK_S)
            watch.run_pass()

    def require_fresh_passes() -> None:
        if time.monotonic() - passed_s > FRESH_S:
            raise CountDelayed(f"a pass took over {FRESH_S:g} s")

    feed, reports = HealthFeed(encode_device_health), list[Report]()

    def publish(report: Report) -> None:
        reports.append(report)
        if is_event:
            b"".join(encode_report(report))
        else:
            feed.pending_messages(feed.publish(report.devices) - 1)

    if is_event:
        sampler.start()
    run_passes()
    declarations = declare_cpus(read(), gpus) if gpus else ()
    source = _SnapshotReader(sampler, read)
    loop = _engine_loop(source, lambda: snapshot_time(source.newest), publish)
    for _ in range(1 + _WARM_UP):
        run_passes()
        require_fresh_passes()
        _evaluate(loop, is_woken=False)
    before = len(reports)
    if is_event:
        sampler.clear()
        _kill_container(tree)
        if not _wait_readable(sampler, STALL_S):
            raise SamplerStalled(
                f"C sampler: an event of a cgroup did not wake the reader within {STALL_S:g} s"
            )
    else:
        if not is_heartbeat:
            shrink_pool(directory / "sys")
        run_passes()
    require_fresh_passes()
    opcodes = count_opcodes(partial(_evaluate, loop, is_woken=not is_heartbeat))
    assert len(reports) - before == (not is_heartbeat), "the evaluation must publish the change"
    assert len(reports[-1].notes) == is_event
    sampler.stop(STALL_S)
    return opcodes


class _SnapshotReader:
    """Source of snapshots whose eventfd is that of the sampler, and which keeps the newest snapshot."""

    def __init__(self, sampler: Sampler, read: Callable[[], Snapshot]) -> None:
        self._sampler = sampler
        self._read = read
        self.newest = read()

    def fileno(self) -> int:
        return self._sampler.fileno()

    def clear(self) -> None:
        self._sampler.clear()

    def read(self) -> Snapshot:
        self.newest = self._read()
        return self.newest


def _evaluate(loop: EngineLoop, *, is_woken: bool) -> None:
    """Evaluate once in the engine loop; it needs no event loop as long as no source is stalled."""
    with contextlib.suppress(StopIteration):
        loop.evaluate(sys.maxsize, is_woken=is_woken).send(None)


def _wait_for_pass(sampler: Sampler) -> None:
    """Wait until a running sampler has finished a further pass."""
    before, deadline = _read_snapshot(sampler).core.passes, time.monotonic() + STALL_S
    while _read_snapshot(sampler).core.passes == before:
        if time.monotonic() > deadline:
            raise SamplerStalled(f"C sampler: made no pass within {STALL_S:g} s")
        time.sleep(PERIOD_NS / NS)


def _kill_container(tree: CgroupTree) -> None:
    """Count an OOM kill in the files of a container and its pod, in the order of the kernel."""
    uid, container = next(group for group in tree.groups if group[1])
    for group in (container, ""):
        path = tree.path("v2", uid, group) / "memory.events"
        text = path.read_bytes().replace(b"oom_kill 0", b"oom_kill 1")
        with path.open("r+b", buffering=0) as file:  # as in cgroupfs, no reader sees an empty file
            file.write(text)


def _log_source(memory: MachineSample) -> SourceSample:
    beat_ns = max(source.beat_ns for source in memory.sources)
    return SourceSample("kmsg", SourceState.OK, beat_ns, NS, 0, "", passes=1, vital=False)


def count_opcodes(function: Callable[[], object]) -> int:
    """Return the number of opcodes that a call of `function` executes."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
    return count
