"""One scan of this machine without a daemon, for ``drahealth scan``."""

import select
import threading
import time
from dataclasses import replace
from typing import Final

from agent.config.config import Config
from agent.engine.step import EngineState, initial_state, step
from agent.errors import ProbeError
from agent.health.state_machine import ConditionPhase
from agent.model.reading import GPU_LIBRARY, SourceState, sources_in_state
from agent.model.report import Report
from agent.model.time import NS
from agent.node.node_source import SOURCES_STOP_S, NodeSource, engine_settings, open_node_source
from agent.system.timing import read_clocks

PASS_GAP_NS: Final = NS // 4
LIMIT_S: Final = 5.0
"""Limit for all reads of a scan [s], except the wait for the process that calls NVML to start."""
NVML_START_LIMIT_S: Final = 15.0
"""Limit for the start of the process that calls NVML, which takes seconds on a busy machine [s]."""
CONFIRM_PASSES: Final = 3
"""Number of readings after which most rules count a fault that they find."""
CONFIRM_S: Final = 2.0
"""Longest wait for these readings [s]."""
NVML: Final = (GPU_LIBRARY, "nvml-events")
UNREAD: Final = (SourceState.STARTING, SourceState.STALLED)


def scan_once(config: Config) -> Report:
    """Read all devices of this machine twice, 250 ms apart, and return the health report.

    If a rule finds a fault that it counts only after several readings, up to three readings are made.

    Blocks up to 5 s, and up to 20 s while the process that calls NVML starts. A GPU that does not answer in
    time is Unknown in the report, and the thread that reads it is abandoned. If NVML has not listed the GPUs
    in time, the report may have no GPUs, see :func:`agent.model.reading.unlisted_sources`.

    Raises:
        ProbeError: A read hangs in the kernel for 5 s; the text has the sources without data.
    """
    node = open_node_source(config, engine_settings(config), PASS_GAP_NS, reads_declarations=False)
    try:
        node.start()
        return _scan(config, node, node.start_single_read())
    finally:
        node.stop(SOURCES_STOP_S)


def _scan(config: Config, node: NodeSource, host: threading.Thread) -> Report:
    state, report = initial_state(engine_settings(config)), None
    began_s = time.monotonic()
    deadline = began_s + LIMIT_S
    while time.monotonic() < deadline:
        select.select([node], [], [], PASS_GAP_NS / NS / 5)
        node.clear()
        snapshot = node.read()
        if snapshot is None:
            continue
        gpus = snapshot.gpus
        if gpus and gpus.nvml.state is SourceState.STARTING and not gpus.call_ns:  # NVML was not called yet
            deadline = min(time.monotonic(), began_s + NVML_START_LIMIT_S) + LIMIT_S
        state, report = step(state, snapshot, read_clocks())
        state = replace(state, stalled={})  # a scan that was late has no time for three more passes
        is_read = report.core.passes >= 2 and not host.is_alive() and not _awaits_gpu(report)
        is_read = is_read and not _awaits_confirmation(state, report)
        # if this thread was late, its snapshot is old although no source hangs; the next one is not
        if is_read and not report.starting and not any(sources_in_state(report.sources, SourceState.STALLED)):
            return report
    if report is not None and report.core.passes >= 2:
        return report
    waiting = [source.name for source in report.sources if source.state in UNREAD] if report else []
    raise ProbeError(
        f"scan: this machine was not read twice within {LIMIT_S:g} s, because a read hangs in the kernel; "
        f"no data from: {', '.join(waiting) or 'any source'}"
    )


def _awaits_confirmation(state: EngineState, report: Report) -> bool:
    """Return whether the next readings may confirm a fault that was found."""
    return any(
        condition.phase is ConditionPhase.PENDING
        and condition.last_pass - condition.run_start_pass < CONFIRM_PASSES - 1
        and report.at.mono_ns - condition.since.mono_ns < CONFIRM_S * NS
        for condition in state.conditions.values()
    )


def _awaits_gpu(report: Report) -> bool:
    """Return whether the scan must wait: NVML has not listed the GPUs, or a GPU was not read twice yet."""
    return any(
        source.state is SourceState.STARTING
        if source.name in NVML
        else source.name.startswith("gpu-")
        and source.passes < 2
        and source.state in (SourceState.OK, SourceState.STARTING)
        for source in report.sources
    )
