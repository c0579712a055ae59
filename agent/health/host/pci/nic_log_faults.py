"""Faults of NICs that the kernel log reports: from facts of one PCI function to faults with a severity."""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from agent.health.kernel_log.facts import KernelLogCode, KernelLogFact
from agent.model.health import Severity

NIC_CODES: Final = (
    KernelLogCode.NIC_HEALTH,
    KernelLogCode.NIC_HARDWARE,
    KernelLogCode.NIC_COMMAND,
    KernelLogCode.EFA,
    KernelLogCode.NIC_POWER,
    KernelLogCode.NIC_MODULE,
    KernelLogCode.NIC_REGISTER,
)
"""Codes of kernel-log lines about a NIC that mlx5_core and efa write."""
STOPPED_CODES: Final = frozenset(
    {
        KernelLogCode.NIC_HEALTH,
        KernelLogCode.NIC_HARDWARE,
        KernelLogCode.NIC_COMMAND,
        KernelLogCode.EFA,
    }
)
"""Codes of faults with which a NIC has stopped. They stay for a day, or until the driver has recovered it."""
HELD_FOR_A_DAY: Final = STOPPED_CODES | {KernelLogCode.NIC_POWER, KernelLogCode.NIC_MODULE}
"""Codes of kernel-log lines that report a state, which lasts until another line ends it, or for a day.

Lines of other codes report single events.
"""


class NicFault(NamedTuple):
    """Fault of a NIC that a kernel-log fact reports."""

    fact: KernelLogFact
    severity: Severity
    text: str


_MODULE_SEVERITIES: Final = {
    "error": Severity.DEGRADED,
    "unplugged": Severity.INFO,
    "disabled": Severity.INFO,
}


def nic_faults(facts: Mapping[KernelLogCode, KernelLogFact]) -> Iterator[NicFault]:
    """Yield the faults that the facts about one NIC report.

    Args:
        facts: Newest fact of each code that still counts; a line that states an end (recovered, plugged,
            sufficient power) ends the fault before it.
    """
    health = facts.get(KernelLogCode.NIC_HEALTH)
    recovered_ns = health.last.mono_ns if health and health.values[0] == "recovered" else -1
    for code, fact in facts.items():
        if code in STOPPED_CODES and fact.last.mono_ns <= recovered_ns:
            continue
        match code:
            case KernelLogCode.NIC_HEALTH:
                yield NicFault(fact, Severity.UNHEALTHY, fact.values[1])
            case KernelLogCode.NIC_HARDWARE | KernelLogCode.NIC_COMMAND | KernelLogCode.EFA:
                yield NicFault(fact, Severity.UNHEALTHY, fact.values[0])
            case KernelLogCode.NIC_POWER if fact.values[0] == "insufficient":
                power = f" ({fact.values[1]})" if fact.values[1] else ""
                yield NicFault(fact, Severity.DEGRADED, f"insufficient power in its slot{power}")
            case KernelLogCode.NIC_MODULE if fact.values[0] in _MODULE_SEVERITIES:
                yield NicFault(fact, _MODULE_SEVERITIES[fact.values[0]], fact.values[1])
            case KernelLogCode.NIC_REGISTER:
                yield NicFault(fact, Severity.INFO, f"a register access failed: {fact.values[0]}")
            case KernelLogCode.TX_TIMEOUT:
                yield NicFault(fact, Severity.DEGRADED, f"a transmit queue of {fact.values[0]} hung")
            case _:
                pass
