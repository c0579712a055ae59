"""A single scan of the node without a daemon, for ``drahealth scan``."""

import select
import threading
import time
from typing import Final

from agent.config.config import Config
from agent.engine.step import initial_state, step
from agent.errors import ProbeError
from agent.model.report import Report
from agent.model.source import SourceState
from agent.model.time import NS
from agent.node.node_source import NODE_STOP_S, NodeSource, open_node, settings_of
from agent.system.timing import read_clocks

GAP_NS: Final = NS // 4
LIMIT_S: Final = 5.0
UNREAD: Final = (SourceState.STARTING, SourceState.STALLED)


def scan_once(config: Config) -> Report:
    """Return the health report of the node after two sampler passes 250 ms apart. Blocks up to 5 s.

    A GPU that does not answer in time is Unknown in the report; its thread may be abandoned, see
    :func:`agent.app.daemon.run`.

    Raises:
        ProbeError: The sampler did not finish two passes in 5 s because a read hangs in the kernel; names the
            sources that wait for the read.
    """
    node = open_node(config, settings_of(config), GAP_NS, declares=False)
    try:
        node.start()
        return _scan(config, node, node.start_host_read())
    finally:
        node.stop(NODE_STOP_S)


def _scan(config: Config, node: NodeSource, host: threading.Thread) -> Report:
    state, report = initial_state(settings_of(config)), None
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        select.select([node], [], [], GAP_NS / NS / 5)
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
        f"two passes were not finished in {LIMIT_S:g} s, a read hangs in the kernel: "
        f"no data from {', '.join(waiting) or 'any source'}"
    )


def _awaits_gpu(report: Report) -> bool:
    """Return True if a GPU that answers has not had its second sampler pass yet."""
    return any(
        source.passes < 2 and source.state in (SourceState.OK, SourceState.STARTING)
        for source in report.sources
        if source.name.startswith("gpu-")
    )
