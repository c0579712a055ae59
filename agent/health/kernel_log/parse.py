"""What a line of the kernel log says of the host.

Owns the parsing of texts; which lines are looked for is agent.health.kernel_log.patterns, and what a line
means for a device is the rules' to say. Beside its place a line keeps a few words for its rule:

    machine check, corrected or not    the bank, and its status in hexadecimal; nothing, if it has none
    hardware error, likewise           the firmware's word for how bad it is
    soft lockup                        how long [s], and the task, ``python3:1234``
    RCU stall                          the flavour, ``rcu_preempt``
    hung task                          how long [s]
    OOM kill                           the constraint, ``memcg``; the task that was killed, and its cgroup
    memory failure                     how it ended, ``Recovered``, and what the page was
    EDAC                               how many errors the line stands for
    AER                                the layer, ``Physical Layer``; nothing, if firmware told it
    PCI fault, NVMe                    what happened
    read-only                          the filesystem's kind, ``EXT4``
    hugepages                          how many pages were asked for, and how many there are
"""

import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from agent.health.gpu.xid.lines import normal_bus
from agent.health.kernel_log.pattern import compile_pattern
from agent.health.kernel_log.patterns import HOST
from agent.health.kernel_log.values import LogCode


class HostLine(NamedTuple):
    """A line that is about the host."""

    code: LogCode
    place: str
    """In the form that LogCode gives it."""
    values: tuple[str, ...] = ()


_Match = re.Match[str]
_Words = tuple[str, tuple[str, ...]] | None
"""A place and values; None: it looks like such a line and is none."""

TEXT_MAX: Final = 1024  # twice what the reader keeps
_UNITS_KIB: Final = {"KiB": 1, "MiB": 1 << 10, "GiB": 1 << 20}
_NAMELESS: Final = frozenset({"", "unknown memory", "any memory"})
"""What EDAC says where it knows no module."""

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


def _named(kind: str, number: str, *values: str) -> _Words:
    """``cpu3``; no such thing has a number with more digits."""
    return (f"{kind}{int(number)}", values) if len(number) < 6 else None


def _machine_check(match: _Match, text: str) -> _Words:
    if match.re.groups == 1:  # no CPU in it
        return "", ()
    bank = _BANK.search(text) or _AMD_BANK.search(text)
    return _named("cpu", match[1], *bank.groups() if bank else ())


def _hardware_error(_: _Match, text: str) -> _Words:
    return "", (text.rpartition(": ")[2].strip(),)


def _soft_lockup(match: _Match, text: str) -> _Words:
    stuck = _STUCK.search(text)
    return _named("cpu", match[1], *stuck.groups() if stuck else ())


def _hard_lockup(match: _Match, _: str) -> _Words:
    return _named("cpu", match.groups()[-2])


def _rcu_stall(match: _Match, _: str) -> _Words:
    return "", (match[1],)


def _hung_task(_: _Match, text: str) -> _Words:
    hung = _HUNG.match(text)
    return (hung[1], (hung[2],)) if hung else None


def _oom_kill(_: _Match, text: str) -> _Words:
    """The end of the line may be missing; without its cgroup, a kill by one is nobody's."""
    found = _OOM.match(text)
    if found is None or (found[1] == "MEMCG" and not found[2]):
        return None
    return _unescaped(found[2] or ""), (found[1].lower(), found[4] or "", _unescaped(found[3] or ""))


def _unescaped(cgroup: str) -> str:
    """With the backslashes that systemd puts into names."""
    return cgroup.replace("\\x5c", "\\")


def _memory_failure(match: _Match, _: str) -> _Words:
    """Of a page that is out of use already, nothing new is told."""
    return None if match[2].startswith(_ALREADY) else ("", (match[3], match[2]))


def _edac(match: _Match, text: str) -> _Words:
    found = _MODULE.search(text)
    label = found[2] if found else ""
    words = _named("mc", match[1], *found.groups()[:1] if found else ())
    return words if words is None or label in _NAMELESS else (f"{words[0]} {label}", words[1])


def _aer(match: _Match, text: str) -> _Words:
    layer = _LAYER.search(text)
    return normal_bus(match[2]), layer.groups() if layer else ()


def _pci_fault(match: _Match, text: str) -> _Words:
    """``nvme 0000:3b:00.0: AER: device recovery failed``."""
    what = text[match.end(2) + 2 :].split(": ", 1)[-1]
    return normal_bus(match[2]), (what.partition(",")[0],)


def _nvme(match: _Match, text: str) -> _Words:
    what = re.split("[;:,]", text[match.end(1) + 2 :], maxsplit=1)[0]
    return _named("nvme", match[1], "I/O timeout" if what.startswith("I/O ") else what)


def _read_only(match: _Match, text: str) -> _Words:
    return match[1].rstrip(":"), (re.split("[ -]", text, maxsplit=1)[0],)


def _hugepages_short(match: _Match, _: str) -> _Words:
    asked, size, unit, *node, got, _rest = match.groups()
    if unit not in _UNITS_KIB or not _SIZE.fullmatch(size):
        return None
    where = [str(int(float(size) * _UNITS_KIB[unit])), *(f"node{number}" for number in node)]
    return " ".join(where), (asked, got)


_Parser = Callable[[_Match, str], _Words]
_PARSERS: Final[Mapping[LogCode, _Parser]] = {
    LogCode.MACHINE_CHECK: _machine_check,
    LogCode.MACHINE_CHECK_CORRECTED: _machine_check,
    LogCode.HARDWARE_ERROR: _hardware_error,
    LogCode.HARDWARE_ERROR_CORRECTED: _hardware_error,
    LogCode.SOFT_LOCKUP: _soft_lockup,
    LogCode.HARD_LOCKUP: _hard_lockup,
    LogCode.RCU_STALL: _rcu_stall,
    LogCode.HUNG_TASK: _hung_task,
    LogCode.OOM_KILL: _oom_kill,
    LogCode.MEMORY_FAILURE: _memory_failure,
    LogCode.EDAC_CORRECTED: _edac,
    LogCode.EDAC_UNCORRECTED: _edac,
    LogCode.NVME: _nvme,
    LogCode.READ_ONLY: _read_only,
    LogCode.HUGEPAGES_SHORT: _hugepages_short,
    LogCode.AER_CORRECTED: _aer,
    LogCode.AER_FATAL: _aer,
    LogCode.AER_NONFATAL: _aer,
    LogCode.PCI_FAULT: _pci_fault,
}
_TABLE: Final = tuple(
    (compile_pattern(pattern), code) for code, patterns in HOST.items() for pattern in patterns
)


def parse(text: str) -> HostLine | None:
    """What a message of the kernel log says of the host; None: nothing, or it is about something else.

    Args:
        text: As /dev/kmsg gives it, without the prefix. What stands behind 1,024 characters is not looked at.
    """
    text = text[:TEXT_MAX]
    for pattern, code in _TABLE:
        if match := pattern.match(text):
            words = _PARSERS[code](match, text)
            return HostLine(code, *words) if words else None
    return None
