"""What the kernel log says of a node's hardware: disks, PCI devices, and errors of a part without a name.

Notes on the node. CPUs and memory modules that are named have rules of their own, and so have the PCI devices
that drivers declare.
"""

from typing import Final

from agent.health.catalog import Rule
from agent.health.host.node.state import CORRECTED_WINDOW_S, NodeView
from agent.health.host.node.words import HELD_S, LASTING_HELD_S, lines_of, named
from agent.health.kernel_log.silence import silence
from agent.health.kernel_log.values import LogCode
from agent.health.rules import RuleNotEvaluated, RuleResult
from agent.health.words import duration
from agent.model.health import Blame, Finding, Severity

CORRECTED_ERRORS: Final = 100
"""Nobody publishes a limit. A sound link has some in a day; one that sheds more than one a minute is bad."""
_PCI_WORDS: Final = {LogCode.AER_FATAL: "fatal error", LogCode.AER_NONFATAL: "uncorrected error"}


def nvme(view: NodeView) -> RuleResult:
    """An NVMe controller has not answered, was reset, or was given up.

    Source: lines of the kernel log, of the nvme driver.
    """
    facts = view.recent(HELD_S, LogCode.NVME)
    if not facts:
        return silence(view.log_state)
    evidence = f"{named([f'{fact.place}: {fact.values[0]}' for fact in facts])}; {lines_of(facts)}"
    return Finding("node.nvme", Severity.DEGRADED, evidence)


def read_only(view: NodeView) -> RuleResult:
    """After an error the kernel made a filesystem read-only, or shut it down.

    Source: lines of the kernel log, of ext4, XFS, Btrfs and FAT.
    """
    facts = view.recent(LASTING_HELD_S, LogCode.READ_ONLY)
    if not facts:
        return silence(view.log_state)
    evidence = named([f"{fact.values[0]} on {fact.place}" for fact in facts])
    return Finding("node.read_only", Severity.DEGRADED, evidence)


def pci(view: NodeView) -> RuleResult:
    """A PCI device had an error that could not be corrected, or its link went down.

    Source: lines of the kernel log, of AER, DPC and hot-plug.
    """
    facts = view.recent(HELD_S, LogCode.AER_FATAL, LogCode.AER_NONFATAL, LogCode.PCI_FAULT)
    if not facts:
        return silence(view.log_state)
    worst_first = sorted(facts, key=lambda fact: fact.code is not LogCode.AER_FATAL)
    words = [f"{fact.place}: {_PCI_WORDS.get(fact.code) or fact.values[0]}" for fact in worst_first]
    return Finding("node.pci", Severity.DEGRADED, f"{named(words)}; {lines_of(facts)}")


def pci_corrected(view: NodeView) -> RuleResult:
    """PCI links correct errors more often than the limit allows.

    Source: lines of the kernel log, of AER, and how many come within an hour. The kernel leaves some out.
    """
    grown = view.corrected
    if isinstance(grown.events, int) and grown.events >= CORRECTED_ERRORS:
        facts = view.recent(CORRECTED_WINDOW_S, LogCode.AER_CORRECTED)
        often = f"at least {CORRECTED_ERRORS} in {duration(CORRECTED_WINDOW_S)}"
        evidence = f"corrected PCIe errors: {often}, of {named([fact.place for fact in facts])}"
        return Finding("node.pci.corrected", Severity.INFO, evidence)
    if grown.span_s < CORRECTED_WINDOW_S:
        return RuleNotEvaluated(f"needs {duration(CORRECTED_WINDOW_S)} of history")
    return silence(view.log_state)


def machine_check(view: NodeView) -> RuleResult:
    """The hardware has reported an error, and no line of that time says of which part.

    Source: lines of the kernel log, of machine checks and of firmware.
    """
    uncorrected = [fact for fact in view.unexplained if fact.code is LogCode.HARDWARE_ERROR]
    if uncorrected:
        evidence = f"an uncorrected error of a part that is not named; {lines_of(uncorrected)}"
        return Finding("node.machine_check", Severity.DEGRADED, evidence)
    if view.unexplained:
        evidence = f"errors of a part that is not named; {lines_of(view.unexplained)}"
        return Finding("node.machine_check", Severity.INFO, evidence)
    return silence(view.log_state)


HARDWARE_RULES: Final = (
    Rule(
        code="node.nvme",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="kmsg",
        threshold=f"a line in the last {duration(HELD_S)}",
        why="whatever is on that disk waits, and is lost if the controller does not come back",
        advice="run nvme smart-log on it; check its firmware, its slot and its power saving; replace it",
        judge=nvme,
        try_it="echo '<4>nvme nvme0: I/O 12 QID 3 timeout, aborting' > /dev/kmsg",
    ),
    Rule(
        code="node.read_only",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="kmsg",
        threshold=f"a line in the last {duration(LASTING_HELD_S)}",
        why="nothing can be written there any more: logs, images, state of pods",
        advice="look for its disk in the kernel log; drain the node, check the filesystem, replace the disk",
        judge=read_only,
        try_it="echo '<2>EXT4-fs (sda1): Remounting filesystem read-only' > /dev/kmsg",
    ),
    Rule(
        code="node.pci",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="kmsg",
        threshold=f"a line in the last {duration(HELD_S)}",
        why="a transfer was lost, or the device with all that it held",
        advice="lspci -s names the device; reseat it, check risers and cables, update its firmware",
        judge=pci,
        try_it="echo '<3>nvme 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal)' > /dev/kmsg",
    ),
    Rule(
        code="node.pci.corrected",
        severity=Severity.INFO,
        blame=Blame.HARDWARE,
        source="kmsg",
        threshold=f"{CORRECTED_ERRORS} lines in {duration(CORRECTED_WINDOW_S)}",
        why="nothing is lost, but each costs a second transfer, and a link that gets worse fails in the end",
        advice="reseat the device, check risers and cables; compare with other slots",
        judge=pci_corrected,
        try_it="for i in $(seq 100); do echo '<4>nvme 0000:3b:00.0: PCIe Bus Error: severity=Corrected, "
        "type=Physical Layer' > /dev/kmsg; done",
        counter=True,
        window_s=CORRECTED_WINDOW_S,
    ),
    Rule(
        code="node.machine_check",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="kmsg",
        threshold=f"a line in the last {duration(LASTING_HELD_S)}",
        why="some part of the machine makes errors; those that were corrected are no harm yet",
        advice="the next lines of the kernel log say more, and the event log of the BMC; replace that part",
        judge=machine_check,
        try_it="echo '<2>{1}[Hardware Error]: event severity: recoverable' > /dev/kmsg",
    ),
)
