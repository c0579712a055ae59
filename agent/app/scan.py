"""One scan of this machine without a daemon, for ``drahealth scan``."""

import select
import threading
import time
from typing import Final

from agent.config.config import Config
from agent.engine.step import initial_state, step
from agent.errors import ProbeError
from agent.model.report import Report
from agent.model.source_state import SourceState
from agent.model.time import NS
from agent.node.node_source import SOURCES_STOP_S, NodeSource, engine_settings, open_node_source
from agent.system.timing import read_clocks

PASS_GAP_NS: Final = NS // 4
LIMIT_S: Final = 5.0
UNREAD: Final = (SourceState.STARTING, SourceState.STALLED)


def scan_once(config: Config) -> Report:
    """Read all devices of this machine twice, 250 ms apart, and return the health report. Blocks up to 5 s.

    A GPU that does not answer in time is Unknown in the report, and the thread that reads it is abandoned.

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
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        select.select([node], [], [], PASS_GAP_NS / NS / 5)
        node.clear()
        snapshot = node.read()
        if snapshot is None:
            continue
        state, report = step(state, snapshot, read_clocks())
        is_host_read = not host.is_alive()
        if not report.starting and report.core.passes >= 2 and not _awaits_gpu(report) and is_host_read:
            return report
    if report is not None and report.core.passes >= 2:
        return report
    waiting = [source.name for source in report.sources if source.state in UNREAD] if report else []
    raise ProbeError(
        f"scan: this machine was not read twice within {LIMIT_S:g} s, because a read hangs in the kernel; "
        f"no data from: {', '.join(waiting) or 'any source'}"
    )


def _awaits_gpu(report: Report) -> bool:
    """Return whether the scan must wait: a GPU that answers has not been read twice yet."""
    return any(
        source.passes < 2 and source.state in (SourceState.OK, SourceState.STARTING)
        for source in report.sources
        if source.name.startswith("gpu-")
    )
