"""Parser of kernel-log lines about the host: code, location and values of a line.

:mod:`agent.health.kernel_log.patterns` selects the lines. The values of a line, by code:

    machine check, corrected or not    the bank, and its status in hexadecimal; none without a bank
    hardware error, corrected or not   the firmware's severity
    soft lockup                        duration [s], and the task, ``python3:1234``
    RCU stall                          the flavour, ``rcu_preempt``
    hung task                          duration [s]
    OOM kill                           the constraint, ``memcg``; the killed task and its cgroup
    memory failure                     the outcome, ``Recovered``, and the kind of page
    EDAC                               number of errors that the line stands for
    AER                                the layer, ``Physical Layer``; none if firmware reported it
    PCI fault, NVMe                    the event
    read-only                          the filesystem's type, ``EXT4``
    hugepages                          number of pages requested and allocated
"""

import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from agent.health.gpu.xid.log_lines import normal_pci_address
from agent.health.kernel_log.facts import KernelLogCode
from agent.health.kernel_log.patterns import HOST_PATTERNS_BY_CODE, compile_pattern


class HostLogLine(NamedTuple):
    """Parsed kernel-log line about a fault of the host."""

    code: KernelLogCode
    location: str
    """Faulty part, in the form that KernelLogCode defines for the code; empty: unknown."""
    values: tuple[str, ...] = ()
    """Values that the module's docstring lists for the code."""


_Match = re.Match[str]
_Parsed = tuple[str, tuple[str, ...]] | None
"""Location and values; None: the line matches the pattern but reports no fault."""

TEXT_MAX: Final = 1024
"""Number of characters of a line that are parsed: twice what the native kernel-log reader keeps."""
_UNITS_KIB: Final = {"KiB": 1, "MiB": 1 << 10, "GiB": 1 << 20}
_NAMELESS: Final = frozenset({"", "unknown memory", "any memory"})
"""Labels by which EDAC says that it does not know the memory module."""

_BANK: Final = re.compile(r": Machine Check.* Bank ([0-9]{1,4}): ([0-9a-f]{16})\b")
_AMD_BANK: Final = re.compile(r"\) MC([0-9]{1,4})_STATUS\[[^\]]*\]: 0x([0-9a-f]{16})\b")
_STUCK: Final = re.compile(r"stuck for ([0-9]{1,9})s! \[(.*)\]")
_HUNG: Final = re.compile(r"INFO: task (.*):[0-9]+ blocked .*?for more than ([0-9]{1,9}) seconds")
_OOM: Final = re.compile(
    r"oom-kill:constraint=CONSTRAINT_([A-Z_]{1,20}),"
    r"(?:.*?,(?:oom_memcg=([^,]*)|global_oom\b))?(?:.*?,task_memcg=([^,]*))?(?:.*?,task=([^,]*))?"
)
_ALREADY: Final = "already poisoned"
_MODULE: Final = re.compile(r": ([0-9]{1,9}) [CU]E (?:.* )?on (.*?) ?\(")
_LAYER: Final = re.compile(r", type=([^,]*),")
_SIZE: Final = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,2})?")


def _numbered(kind: str, number: str, *values: str) -> _Parsed:
    """Return a numbered location such as ``cpu3``, and the values; None if the number has six digits or
    more."""
    return (f"{kind}{int(number)}", values) if len(number) < 6 else None


def _machine_check(match: _Match, text: str) -> _Parsed:
    if match.re.groups == 1:  # the line names no CPU
        return "", ()
    bank = _BANK.search(text) or _AMD_BANK.search(text)
    return _numbered("cpu", match[1], *bank.groups() if bank else ())


def _hardware_error(_: _Match, text: str) -> _Parsed:
    return "", (text.rpartition(": ")[2].strip(),)


def _soft_lockup(match: _Match, text: str) -> _Parsed:
    stuck = _STUCK.search(text)
    return _numbered("cpu", match[1], *stuck.groups() if stuck else ())


def _hard_lockup(match: _Match, _: str) -> _Parsed:
    return _numbered("cpu", match.groups()[-2])


def _rcu_stall(match: _Match, _: str) -> _Parsed:
    return "", (match[1],)


def _hung_task(_: _Match, text: str) -> _Parsed:
    hung = _HUNG.match(text)
    return (hung[1], (hung[2],)) if hung else None


def _oom_kill(_: _Match, text: str) -> _Parsed:
    """Parse an OOM kill, whose line may be cut; None if a cgroup's limit caused the kill but its name is
    missing."""
    found = _OOM.match(text)
    if found is None or (found[1] == "MEMCG" and not found[2]):
        return None
    return _unescaped(found[2] or ""), (found[1].lower(), found[4] or "", _unescaped(found[3] or ""))


def _unescaped(cgroup: str) -> str:
    """Replace the escape sequence that systemd writes for a backslash in names."""
    return cgroup.replace("\\x5c", "\\")


def _memory_failure(match: _Match, _: str) -> _Parsed:
    """Parse a memory failure; None for a page that the kernel had already taken out of use."""
    return None if match[2].startswith(_ALREADY) else ("", (match[3], match[2]))


def _edac(match: _Match, text: str) -> _Parsed:
    found = _MODULE.search(text)
    label = found[2] if found else ""
    parsed = _numbered("mc", match[1], *found.groups()[:1] if found else ())
    return parsed if parsed is None or label in _NAMELESS else (f"{parsed[0]} {label}", parsed[1])


def _aer(match: _Match, text: str) -> _Parsed:
    layer = _LAYER.search(text)
    return normal_pci_address(match[2]), layer.groups() if layer else ()


def _pci_fault(match: _Match, text: str) -> _Parsed:
    """Parse a PCI fault, for example ``nvme 0000:3b:00.0: AER: device recovery failed``."""
    event = text[match.end(2) + 2 :].split(": ", 1)[-1]
    return normal_pci_address(match[2]), (event.partition(",")[0],)


def _nvme(match: _Match, text: str) -> _Parsed:
    event = re.split("[;:,]", text[match.end(1) + 2 :], maxsplit=1)[0]
    return _numbered("nvme", match[1], "I/O timeout" if event.startswith("I/O ") else event)


def _read_only(match: _Match, text: str) -> _Parsed:
    return match[1].rstrip(":"), (re.split("[ -]", text, maxsplit=1)[0],)


def _hugepages_short(match: _Match, _: str) -> _Parsed:
    requested, size, unit, *node, allocated, _rest = match.groups()
    if unit not in _UNITS_KIB or not _SIZE.fullmatch(size):
        return None
    location = [str(int(float(size) * _UNITS_KIB[unit])), *(f"node{number}" for number in node)]
    return " ".join(location), (requested, allocated)


_LineParser = Callable[[_Match, str], _Parsed]
_PARSERS: Final[Mapping[KernelLogCode, _LineParser]] = {
    KernelLogCode.MACHINE_CHECK: _machine_check,
    KernelLogCode.MACHINE_CHECK_CORRECTED: _machine_check,
    KernelLogCode.HARDWARE_ERROR: _hardware_error,
    KernelLogCode.HARDWARE_ERROR_CORRECTED: _hardware_error,
    KernelLogCode.SOFT_LOCKUP: _soft_lockup,
    KernelLogCode.HARD_LOCKUP: _hard_lockup,
    KernelLogCode.RCU_STALL: _rcu_stall,
    KernelLogCode.HUNG_TASK: _hung_task,
    KernelLogCode.OOM_KILL: _oom_kill,
    KernelLogCode.MEMORY_FAILURE: _memory_failure,
    KernelLogCode.EDAC_CORRECTED: _edac,
    KernelLogCode.EDAC_UNCORRECTED: _edac,
    KernelLogCode.NVME: _nvme,
    KernelLogCode.READ_ONLY: _read_only,
    KernelLogCode.HUGEPAGES_SHORT: _hugepages_short,
    KernelLogCode.AER_CORRECTED: _aer,
    KernelLogCode.AER_FATAL: _aer,
    KernelLogCode.AER_NONFATAL: _aer,
    KernelLogCode.PCI_FAULT: _pci_fault,
}
_PATTERN_TABLE: Final = tuple(
    (compile_pattern(pattern), code)
    for code, patterns in HOST_PATTERNS_BY_CODE.items()
    for pattern in patterns
)


def parse_host_line(text: str) -> HostLogLine | None:
    """Parse a message of the kernel log; return None if it reports no fault of the host.

    Args:
        text: Message from /dev/kmsg without the prefix; characters after TEXT_MAX are ignored.
    """
    text = text[:TEXT_MAX]
    for pattern, code in _PATTERN_TABLE:
        if match := pattern.match(text):
            parsed = _PARSERS[code](match, text)
            return HostLogLine(code, *parsed) if parsed else None
    return None
