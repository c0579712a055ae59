"""What can be wrong with hugepage pools."""

from typing import Final

from agent.devices.inventory import size_name
from agent.health.catalogue import Rule
from agent.health.host.pool_view import PoolView, persistent_pages
from agent.health.rules import FINE, Answer, Unreadable
from agent.model.health import Blame, Finding, Severity
from agent.model.reading import Missing
from agent.model.wake import Field


def pool_shrunk(view: PoolView) -> Answer:
    """The pool has fewer pages than at start, or than configured.

    Source: ``nr_hugepages`` less ``surplus_hugepages`` [pages].
    """
    pages = persistent_pages(view.pool) if view.pool else 0
    if isinstance(pages, Missing):
        what = "surplus_hugepages" if view.pool and isinstance(view.pool.nr, int) else "nr_hugepages"
        return Unreadable(what, pages)
    if isinstance(view.expected, Missing):
        return Unreadable("pool size at start", view.expected)
    if pages >= view.expected:
        return FINE
    size = size_name(view.size_kib)
    found = f"{pages} pages of {size}" if view.pool else f"no pool of {size} pages"
    evidence = f"{found}, {view.expected} {'configured' if view.configured else 'at start'}"
    return Finding("mem.hugepages.pool_shrunk", Severity.UNHEALTHY, evidence)


POOL_RULES: Final = (
    Rule(
        code="mem.hugepages.pool_shrunk",
        severity=Severity.UNHEALTHY,
        blame=Blame.CONFIGURATION,
        source="hugepages",
        reads=(Field.POOL_NR, Field.POOL_SURPLUS),
        threshold="fewer persistent pages than at start, or than configured",
        why="claims were promised pages that are no longer there",
        advice="write the number back to nr_hugepages and read it; if it stays short, free memory or reboot",
        judge=pool_shrunk,
        try_it="echo 0 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
    ),
)
