"""What the kernel log could not tell: a hole in it is a note on the node.

Whoever is silent in the log is well only if all of it was read; so it is said when it was not.
"""

from typing import Final

from agent.health.catalog import Rule
from agent.health.host.node.state import NodeView
from agent.health.host.node.words import LASTING_HELD_S
from agent.health.kernel_log.silence import silence
from agent.health.rules import RuleResult
from agent.health.words import at_least, duration
from agent.model.health import Blame, Finding, Severity


def records_lost(view: NodeView) -> RuleResult:
    """Records of the kernel log were overwritten before the agent could read them.

    Source: the numbers of the records in ``/dev/kmsg``, which have gaps then.
    """
    if not view.lost:
        return silence(view.log_state)
    records = f"{at_least(view.lost)} record{'s' if view.lost > 1 else ''}"
    evidence = f"{records} of the kernel log, overwritten before the agent could read"
    return Finding("node.log.lost", Severity.INFO, evidence)


LOG_RULES: Final = (
    Rule(
        code="node.log.lost",
        severity=Severity.INFO,
        blame=Blame.CONFIGURATION,
        source="kmsg",
        threshold=f"a record in the last {duration(LASTING_HELD_S)}",
        why="a fault that the log alone tells of, an XID or a machine check, may have been among them",
        advice="dmesg shows who floods the log: silence it, or boot the kernel with a larger log_buf_len",
        judge=records_lost,
        try_it=r"printf '6,1,1,-;one\n6,9,9,-;two\n' > /tmp/log; drahealth run --kmsg /tmp/log",
    ),
)
