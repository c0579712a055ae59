"""One look at the node, without a daemon: what ``drahealth scan`` shows."""

import select
import threading
import time
from typing import Final

from agent.config.config import Config
from agent.engine.step import begin, step
from agent.errors import ProbeError
from agent.model.report import Report
from agent.model.source import SourceState
from agent.model.time import NS
from agent.node.node_source import Node
from agent.node.open import NODE_STOP_S, open_node, settings_of
from agent.system.clock import read_clocks

GAP_NS: Final = NS // 4
LIMIT_S: Final = 5.0
UNREAD: Final = (SourceState.STARTING, SourceState.STALLED)


def scan_once(config: Config) -> Report:
    """Two passes 250 ms apart. A GPU that does not answer in time is in the report, and Unknown; its thread
    may be left behind, see :func:`agent.app.daemon.run`.

    Raises:
        ProbeError: the sampler did not finish two passes in 5 s; a read hangs in the kernel. Names the
            sources that wait for it.
    """
    node = open_node(config, settings_of(config), GAP_NS, declares=False)
    try:
        node.start()
        return _look(config, node, node.look_at_host())
    finally:
        node.stop(NODE_STOP_S)


def _look(config: Config, node: Node, host: threading.Thread) -> Report:
    state, report = begin(settings_of(config)), None
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        select.select([node], [], [], GAP_NS / NS / 5)
        node.clear()
        snapshot = node.read()
        if snapshot is None:
            continue
        state, report = step(state, snapshot, read_clocks())
        is_host_seen = not host.is_alive()
        if not report.starting and report.core.passes >= 2 and not _waits(report) and is_host_seen:
            return report
    if report is not None and report.core.passes >= 2:
        return report
    waiting = [source.name for source in report.sources if source.state in UNREAD] if report else []
    raise ProbeError(
        f"two passes were not finished in {LIMIT_S:g} s, a read hangs in the kernel: "
        f"no word of {', '.join(waiting) or 'any source'}"
    )


def _waits(report: Report) -> bool:
    """Whether a GPU that answers has still to be looked at for the second time."""
    return any(
        source.passes < 2 and source.state in (SourceState.OK, SourceState.STARTING)
        for source in report.sources
        if source.name.startswith("gpu-")
    )
