"""What can be wrong with memory: errors of its modules, and pages that were taken out for such."""

from collections.abc import Sequence
from typing import Final

from agent.health.catalog import Rule
from agent.health.host.memory.edac import ErrorPlace
from agent.health.host.memory.state import MemoryView
from agent.health.rules import OK, RuleNotApplicable, RuleNotEvaluated, RuleResult, Unreadable, lacking
from agent.health.words import at_least, duration
from agent.model.health import Blame, Finding, Severity
from agent.model.reading import Missing, Reading, is_absent
from agent.model.settings import HostLimits

PLACES_TOLD: Final = 4
"""More are counted, lest a message is nothing but names."""
NOT_YET: Final = RuleNotEvaluated("not read yet")
NOT_THERE: Final = RuleNotEvaluated("the NUMA node has no memory")
NO_COUNTERS: Final = RuleNotApplicable("no EDAC counters")
TRY_SYSFS: Final = "in a copy of sysfs (--sysfs-root), "
_LIMITS: Final = HostLimits()


def _told(bad: Sequence[tuple[ErrorPlace, str]]) -> str:
    texts = [
        f"{place.name}: {what}" + ("" if place.nodes is not None else " (its NUMA node is not known)")
        for place, what in bad[:PLACES_TOLD]
    ]
    if len(bad) > PLACES_TOLD:
        texts.append(f"and {len(bad) - PLACES_TOLD} more")
    return ", ".join(texts)


def ecc_uncorrectable(view: MemoryView) -> RuleResult:
    """A memory module has lost data since its EDAC driver was loaded, or its counters were reset.

    Source: ``edac/mc/mc*/ue_count`` and ``dimm_ue_count`` of its modules [count]; without them, lines of
    EDAC in the kernel log.
    """
    if not view.edac_read:
        return NOT_YET
    bad = []
    for place in view.places:
        count = place.uncorrectable
        if isinstance(count, int) and count:
            noun = "error" if count == 1 else "errors"
            since = "in the kernel log" if place.logged else "since the EDAC driver was loaded"
            bad.append((place, f"{at_least(count)} uncorrectable {noun} {since}"))
    if bad:
        return Finding("mem.ecc.uncorrectable", Severity.UNHEALTHY, _told(bad))
    for place in view.places:
        if isinstance(place.uncorrectable, Missing) and not is_absent(place.uncorrectable):
            return Unreadable(f"ue_count of {place.name}", place.uncorrectable)
    return OK if view.places else NO_COUNTERS


def ecc_correctable_rate(view: MemoryView) -> RuleResult:
    """A memory module is corrected more often than the limit allows, within the window.

    Source: ``edac/mc/mc*/ce_count`` and ``dimm_ce_count`` of its modules [count], their growth; without them,
    lines of EDAC in the kernel log.
    """
    if not view.edac_read:
        return NOT_YET
    if not view.places:
        return NO_COUNTERS
    limit, window_s = view.correctable_errors, view.correctable_window_s
    counted = [(place, *place.correctable) for place in view.places]
    what = f"at least {limit} correctable errors in {duration(window_s)}"
    bad = [(place, what) for place, events, _ in counted if isinstance(events, int) and events >= limit]
    if bad:
        return Finding("mem.ecc.correctable_rate", Severity.DEGRADED, _told(bad))
    for place, events, _ in counted:
        if isinstance(events, Missing) and not is_absent(events):
            return Unreadable(f"ce_count of {place.name}", events)
    if any(isinstance(events, int) and span_s < window_s for _, events, span_s in counted):
        return RuleNotEvaluated(f"needs {duration(window_s)} of history")
    return OK


def poisoned(view: MemoryView) -> RuleResult:
    """Pages had hardware errors: the kernel took them out, and killed who used them.

    Where it does not count them by NUMA node (before Linux 6.4), they are every node's.

    Source: ``node<N>/memory_failure/total`` [pages]; else ``HardwareCorrupted`` of ``/proc/meminfo`` [KiB],
    and lines of memory failure in the kernel log.
    """
    if view.machine is None:
        return NOT_YET
    if view.numa is None:
        return NOT_THERE
    pages = view.numa.poisoned
    if is_absent(pages):
        return _poisoned_somewhere(view, view.machine.corrupted_kib)
    if isinstance(pages, Missing):
        return Unreadable("memory_failure/total", pages)
    if not pages:
        return OK
    noun = "page" if pages == 1 else "pages"
    return Finding("mem.poisoned", Severity.UNHEALTHY, f"{at_least(pages)} {noun} with hardware errors")


def _poisoned_somewhere(view: MemoryView, kib: Reading) -> RuleResult:
    lines = view.failures
    what = ""
    if isinstance(kib, int) and kib:
        what = f"{at_least(kib)} KiB with hardware errors"
    elif lines:
        what = f"{at_least(lines)} {'line' if lines == 1 else 'lines'} of memory failure in the kernel log"
    if what:
        where = "" if view.alone else ", on a NUMA node that the kernel does not tell"
        return Finding("mem.poisoned", Severity.UNHEALTHY, what + where)
    if isinstance(kib, int):
        return OK
    return lacking("HardwareCorrupted", kib, "no count of bad pages")


ERROR_RULES: Final = (
    Rule(
        code="mem.ecc.uncorrectable",
        severity=Severity.UNHEALTHY,
        blame=Blame.HARDWARE,
        source="edac",
        threshold="1 error since the EDAC driver was loaded, or its counters were reset",
        why="data was lost, and a module that has lost data once does so again",
        advice="drain the node, replace the module; a reboot, or 1 to mc<N>/reset_counters, ends the count",
        judge=ecc_uncorrectable,
        try_it=TRY_SYSFS + "write 1 to devices/system/edac/mc/mc0/ue_count",
    ),
    Rule(
        code="mem.poisoned",
        severity=Severity.UNHEALTHY,
        blame=Blame.HARDWARE,
        source="memory",
        threshold="1 page since boot",
        why="a process was killed for it, or will be; in a page of the kernel the next access is a panic",
        advice="drain the node, find the module in the kernel log (EDAC, machine checks), replace it",
        judge=poisoned,
        try_it=TRY_SYSFS + "write 1 to devices/system/node/node0/memory_failure/total",
    ),
    Rule(
        code="mem.ecc.correctable_rate",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="edac",
        threshold=f"{_LIMITS.correctable_errors} errors of one module in "
        f"{duration(_LIMITS.correctable_window_s)} (errors.correctable, errors.window)",
        why="a module that is corrected so often may soon fail beyond correction",
        advice="replace the module at the next occasion",
        judge=ecc_correctable_rate,
        counter=True,
        window_s=_LIMITS.correctable_window_s,
        try_it=TRY_SYSFS + f"add {_LIMITS.correctable_errors} to devices/system/edac/mc/mc0/ce_count",
    ),
)
