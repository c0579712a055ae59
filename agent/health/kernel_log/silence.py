"""What it is worth that the kernel log says nothing: as much as its reader."""

from collections.abc import Mapping
from typing import Final

from agent.health.rules import OK, RuleNotApplicable, RuleNotEvaluated, RuleResult
from agent.model.log import LogSample
from agent.model.source import SourceState

_WORTH: Final[Mapping[SourceState, RuleResult]] = {
    SourceState.ABSENT: RuleNotApplicable("no kernel log"),
    SourceState.FAILING: RuleNotApplicable("the kernel log cannot be read"),
    SourceState.STARTING: RuleNotEvaluated("the kernel log is still being read"),
    SourceState.OK: OK,
    SourceState.STALLED: OK,  # that nobody looks is told by other means
}


def reader_state(log: LogSample | None) -> SourceState:
    """How the reader of the kernel log is doing."""
    return log.source.state if log else SourceState.ABSENT


def silence(reader: SourceState) -> RuleResult:
    """The answer of a rule that the log alone could tell of something."""
    return _WORTH[reader]
