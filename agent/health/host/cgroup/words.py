"""What the rules of cgroups have in common: a pod is told of once, and limits are told in bytes."""

from collections.abc import Callable
from functools import wraps

from agent.health.host.cgroup.view import GroupView
from agent.health.rules import OK, RuleResult
from agent.model.cgroup import NO_LIMIT
from agent.model.health import Finding
from agent.model.reading import Reading


def once(judge: Callable[[GroupView], RuleResult]) -> Callable[[GroupView], RuleResult]:
    """A pod is told of only what none of its containers is: most of what they do counts there, too."""

    @wraps(judge)
    def judge_once(view: GroupView) -> RuleResult:
        answer = judge(view)
        if not isinstance(answer, Finding):
            return answer
        told = any(isinstance(judge(container), Finding) for container in view.containers)
        return OK if told else answer

    return judge_once


def _bytes(value: int) -> str:
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= factor and value % factor == 0:
            return f"{value // factor} {unit}"
    return f"{value} B"


def limit_text(*limits: Reading) -> str:
    """The lowest of the limits that there are, in brackets: `` (limit 8 MiB)``. Empty if there is none."""
    finite = [limit for limit in limits if isinstance(limit, int) and limit != NO_LIMIT]
    return f" (limit {_bytes(min(finite))})" if finite else ""
