"""Parser of kernel-log lines about the host: code, location and values of a line.

:mod:`agent.health.kernel_log.facts` selects the lines. The values of a line, by code:

    machine check of any kind          the bank, and its status in hexadecimal; none without a bank
    hardware error, corrected or not   the firmware's severity
    soft lockup                        duration [s], and the task, ``python3:1234``
    RCU stall                          the flavour, ``rcu_preempt``
    hung task                          duration [s]
    OOM kill                           the constraint, ``memcg``; the killed task and its cgroup
    hardware section, OOM victim       none
    memory failure                     the outcome, ``Recovered``, and the kind of page
    EDAC                               number of errors that the line stands for
    AER                                the layer, ``Physical Layer``; none if firmware reported it
    PCI fault, NVMe                    the event
    read-only                          the filesystem's type, ``EXT4``
    hugepages                          number of pages requested and allocated
    I/O error, NVMe path               the error, ``critical medium``; what the kernel does with the request
    RAID                               ``failed`` if the array lost its data, else ``degraded``
    beyond the end                     the task; empty in old kernels
    filesystem                         the filesystem's type, or ``journal``
    NFS                                ``down``, ``up`` or ``locks lost``
    panic, oops, peermem               the reason
    table full                         none
    interface held                     number of users
    libnccl                            none
    NIC health                         ``failed`` or ``recovered``, and the text
    NIC hardware, command, register    the text
    NIC power                          ``insufficient`` or ``sufficient``, and the watts
    NIC module                         ``error``, ``unplugged`` or ``plugged``, and the text
    EFA, NIC heat                      the text
    transmit timeout                   the interface and the driver
"""

import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from agent.health.gpu.xid.log_lines import normal_pci_address
from agent.health.kernel_log.facts import (
    HOST_PATTERNS_BY_CODE,
    KernelLogCode,
    LateExpression,
    LazyLinePattern,
)


class HostLogLine(NamedTuple):
    """Parsed kernel-log line about a fault of the host: its code, location and values."""

    code: KernelLogCode
    location: str
    """Faulty part, in the form that KernelLogCode defines for the code; empty: unknown."""
    values: tuple[str, ...] = ()
    """Values that the module's docstring lists for the code."""


_Match = re.Match[str]
_Parsed = tuple[str, tuple[str, ...]] | None
"""Location and values in a kernel-log line; None: the line matches its pattern but reports no fault."""

TEXT_MAX: Final = 1024
"""Number of characters of a line that are parsed: twice what the native kernel-log reader keeps."""
_UNITS_KIB: Final = {"KiB": 1, "MiB": 1 << 10, "GiB": 1 << 20}
_NAMELESS: Final = frozenset({"", "unknown memory", "any memory"})
"""Labels in EDAC's lines for a memory module that EDAC cannot name."""

_BANK: Final = LateExpression(r": Machine Check.* Bank ([0-9]{1,4}): ([0-9a-f]{16})\b")
_AMD_BANK: Final = LateExpression(r"\) MC([0-9]{1,4})_STATUS\[[^\]]*\]: 0x([0-9a-f]{16})\b")
_STUCK: Final = LateExpression(r"stuck for ([0-9]{1,9})s! \[(.*)\]")
_HUNG: Final = LateExpression(r"INFO: task (.*):[0-9]+ blocked .*?for more than ([0-9]{1,9}) seconds")
_OOM: Final = LateExpression(
    r"oom-kill:constraint=CONSTRAINT_([A-Z_]{1,20}),"
    r"(?:.*?,(?:oom_memcg=([^,]*)|global_oom\b))?(?:.*?,task_memcg=([^,]*))?(?:.*?,task=([^,]*))?"
)
PCI_ADDRESS: Final = LateExpression(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""Regular expression of a PCI address as sysfs writes it, the location of facts about PCI devices."""
_ALREADY: Final = "already poisoned"
_MODULE: Final = LateExpression(r": ([0-9]{1,9}) [CU]E (?:.* )?on (.*?) ?(?:\(|$)")
_LAYER: Final = LateExpression(r", type=([^,]*),")
_SIZE: Final = LateExpression(r"[0-9]{1,6}(?:\.[0-9]{1,2})?")


def _number_part(kind: str, number: str, *values: str) -> _Parsed:
    """Return the location of a kernel-log line as the kind with a number, such as ``cpu3``, and the line's
    values. None if the number has six digits or more, which means that the line is damaged."""
    return (f"{kind}{int(number)}", values) if len(number) < 6 else None


def _parse_machine_check(match: _Match, text: str) -> _Parsed:
    if match.re.groups == 1:  # the line names no CPU
        return "", ()
    bank = _BANK.search(text) or _AMD_BANK.search(text)
    return _number_part("cpu", match[1], *bank.groups() if bank else ())


def _parse_deferred(match: _Match, text: str) -> _Parsed:
    parsed = _parse_machine_check(match, text)
    return ("", parsed[1]) if parsed else None  # the CPU only reports the error


def _parse_hardware_error(_: _Match, text: str) -> _Parsed:
    return "", (text.rpartition(": ")[2].strip(),)


def _parse_soft_lockup(match: _Match, text: str) -> _Parsed:
    stuck = _STUCK.search(text)
    return _number_part("cpu", match[1], *stuck.groups() if stuck else ())


_LOCKED: Final = LateExpression(r"(?:NMI )?watchdog: (?:CPU[0-9]+: )?Watchdog detected")


def _parse_hard_lockup(match: _Match, text: str) -> _Parsed:
    if not _LOCKED.match(text):
        return None
    return _number_part("cpu", match.groups()[-2])


_STALLED: Final = LateExpression(r"(?:rcu: )?INFO: rcu_[a-z_]+ (?:self-)?detected (?:expedited )?stall")


def _parse_rcu_stall(match: _Match, text: str) -> _Parsed:
    if not _STALLED.match(text):
        return None
    return "", (match[1],)


def _parse_hung_task(_: _Match, text: str) -> _Parsed:
    hung = _HUNG.match(text)
    return (hung[1], (hung[2],)) if hung else None


_OLD_LIMIT: Final = LateExpression(r"Task in (.*) killed as a result of limit of (.*)")
_OLD_KILL: Final = LateExpression(r"(?:Memory cgroup o|O)ut of memory: Kill process [0-9]+ \((.*)\)")


def _parse_oom_kill(_: _Match, text: str) -> _Parsed:
    """Parse the kernel-log line of an OOM kill. The kernel may have cut off the end of the line. None if a
    cgroup's limit caused the kill but the cgroup's name is missing."""
    if limit := _OLD_LIMIT.match(text):
        return _unescape(limit[2].strip()), ("memcg", "", _unescape(limit[1]))
    if killed := _OLD_KILL.match(text):
        return "", ("none", killed[1], "")
    found = _OOM.match(text)
    if found is None or (found[1] == "MEMCG" and not found[2]):
        return None
    return _unescape(found[2] or ""), (found[1].lower(), found[4] or "", _unescape(found[3] or ""))


def _parse_oom_victim(_: _Match, text: str) -> _Parsed:
    found = _OLD_KILL.match(text)
    return (found[1], ()) if found else None


def _unescape(cgroup: str) -> str:
    """Return the path of a cgroup with systemd's escape sequence for a backslash replaced by a backslash."""
    return cgroup.replace("\\x5c", "\\")


def _parse_memory_failure(match: _Match, _: str) -> _Parsed:
    """Parse the kernel-log line about a page with a hardware error; None: the page was already out of use."""
    return None if match[2].startswith(_ALREADY) else ("", (match[3], match[2]))


def _parse_edac(match: _Match, text: str) -> _Parsed:
    found = _MODULE.search(text)
    label = found[2] if found else ""
    parsed = _number_part("mc", match[1], *found.groups()[:1] if found else ())
    return parsed if parsed is None or label in _NAMELESS else (f"{parsed[0]} {label}", parsed[1])


def _parse_aer(match: _Match, text: str) -> _Parsed:
    layer = _LAYER.search(text)
    return normal_pci_address(match[2]), layer.groups() if layer else ()


def _parse_pci_fault(match: _Match, text: str) -> _Parsed:
    """Parse a line about a PCI device's fault: ``nvme 0000:3b:00.0: AER: device recovery failed``."""
    event = text[match.end(2) + 2 :].split(": ", 1)[-1].removeprefix("DPC ")
    return normal_pci_address(match[2]), (re.split(r",| \(", event, maxsplit=1)[0],)


def _parse_nvme(match: _Match, text: str) -> _Parsed:
    event = re.split("[;:,]", text[match.end(1) + 2 :], maxsplit=1)[0]
    if match.re.groups == 5 and not event.startswith(("Removing after ", "Disabling device after ")):
        return None
    return _number_part("nvme", match[1], "I/O timeout" if event.startswith("I/O ") else event)


_SHUT_DOWN: Final = LateExpression(r"Shutting down filesystem|Filesystem has been shut down")
_TYPES: Final = LateExpression(r"(EXT[234]|XFS|BTRFS|FAT|F2FS)(?:-fs)? ")


def _filesystem_type(text: str) -> str:
    found = _TYPES.match(text)
    return found[1] if found else ""


def _parse_read_only(match: _Match, text: str) -> _Parsed:
    kind = _filesystem_type(text)
    if not kind or (kind == "XFS" and match.re.groups == 4 and not _SHUT_DOWN.search(text)):
        return None
    return match.groups()[match[1].startswith(kind)].rstrip(":"), (kind,)


_METADATA: Final = LateExpression(
    r"XFS \([^)]*\): (?:.*: )?"
    r"(?:metadata I/O error|Metadata (?:corruption|CRC error) detected|Internal error |Corruption detected)"
)
_JOURNAL: Final = LateExpression(
    r"(?:Aborting journal on device|JBD2: Error -[0-9]+ detected when updating journal superblock for) "
    r"(dm-[0-9]+|[^ -]+)(?:-[0-9]+)?\.?$"
)
"""Line of a journal. Its name is the device and, if a file is the journal, the number of the file's inode."""


def _parse_filesystem(match: _Match, text: str) -> _Parsed:
    if text.startswith("XFS") and not _METADATA.match(text):
        return None
    if kind := _filesystem_type(text):
        return match[1].rstrip(":"), (kind,)
    journal = _JOURNAL.match(text)
    return (journal[1].rstrip("."), ("journal",)) if journal else None


_PARTITION: Final = LateExpression(r"(?P<letters>(?:sd|vd|hd|xvd)[a-z]+)[0-9]+|(?P<digits>.*[0-9])p[0-9]+")
_PATH_OF: Final = r"(nvme[0-9]+)c[0-9]+(n[0-9]+)"
_IO_ERROR: Final = LateExpression(
    r"(?:blk_update_request: |print_req_error: )?"
    r"(I/O|critical medium|critical target|timeout|recoverable transport|protection|device offline) error, "
    r"dev ([^,]*),"
)
_REMOVABLE: Final = LateExpression(r"(?:fd|sr)[0-9]+")


def _disk(device: str) -> str:
    """Return the name of the disk that a partition, or a path to an NVMe disk, belongs to.

    ``nvme0c1n1p2`` is on ``nvme0n1``.
    """
    found = _PARTITION.fullmatch(device)
    return re.sub(_PATH_OF, r"\1\2", (found["letters"] or found["digits"]) if found else device)


def _parse_io_error(_: _Match, text: str) -> _Parsed:
    """Parse the kernel-log line about a disk's I/O error; None: the error is not a fault of the disk. Errors
    without a fault of the disk are a missing medium, a reservation of another node, no space, and an
    unsupported operation."""
    buffer = re.match(r"Buffer I/O error on dev ([^,]*),", text)
    found = _IO_ERROR.match(text)
    kind, device = ("I/O", buffer[1]) if buffer else (found[1], found[2]) if found else ("", "?")
    return None if _REMOVABLE.fullmatch(device) or not kind else (_disk(device), (kind,))


def _parse_nvme_path(match: _Match, text: str) -> _Parsed:
    found = re.match(r"block (nvme[^ :]*): no (?:usable|available) path - (.*)", text)
    return (_disk(found[1]), (found[2],)) if found else None


_ARRAY: Final = LateExpression(r"md/(?:raid[0-9]*|linear):?(md[^:]*|dm-[0-9]+|[^:]+):?$")


def _parse_raid(match: _Match, text: str) -> _Parsed:
    """Parse the kernel-log line about a RAID array that lost a disk. In lines about RAID 0 and linear arrays,
    no colon follows the array's name."""
    array = _ARRAY.match(f"md/{match[1]}")
    if array is None:
        return None
    if match.re.groups == 2:  # "Cannot continue operation"
        return array[1], ("failed",)
    return f"{array[1]} {match[2]}", ("failed" if " failing array" in text else "degraded",)


_BEYOND: Final = LateExpression(
    r"(?:(.{0,15}): )?attempt to access beyond end of device(?:\\x0a|\n)?(?:([^ :]+): rw=)?"
)


def _parse_beyond_end(_: _Match, text: str) -> _Parsed:
    """Parse the kernel-log line about an access behind the end of a disk. A task's name has at most 15
    characters."""
    found = _BEYOND.match(text)
    task = found[1] or "" if found else ""
    if found is None or ": " in task or task in {"kernel", "audit"}:
        return None
    return found[2] or "", (task,)


def _parse_nfs(match: _Match, text: str) -> _Parsed:
    if match.re.groups < 4:
        return ("", ("locks lost",)) if "4_reclaim_open_state: Lock" in text else None
    if match[1] not in {"nfs:", "lockd:", "nfsacl:"}:
        return None
    if match[3] == "OK" and not match[4].strip():
        return match[2], ("up",)
    return (match[2], ("down",)) if match[4].startswith(" responding, ") else None


_OOPS: Final = LateExpression(
    r"BUG: (?:unable to handle |[Kk]ernel NULL pointer |kernel stack |stack guard page |KASAN: |KFENCE: |"
    r"Bad (?:page|rss-counter) )|(?:Oops:|Internal error:|general protection fault[,:]).*\[#|kernel BUG at |"
    r"Unable to handle kernel (?:NULL pointer|paging request|access|read|write|execute|unknown)"
)


_ADDRESS: Final = r"(?:[:,]| at| at virtual address) [0-9a-f]{4,}\b| \[#"


def _parse_oops(_: _Match, text: str) -> _Parsed:
    if not _OOPS.match(text):
        return None
    return "", (re.split(_ADDRESS, text, maxsplit=1)[0],)


def _parse_table_full(_: _Match, text: str) -> _Parsed:
    found = re.match(
        r"(nf_conntrack): (?:nf_conntrack: )?table full|VFS: (file-max) limit [0-9]+ reached", text
    )
    return (found[1] or found[2], ()) if found else None


def _parse_netdev_held(match: _Match, text: str) -> _Parsed:
    users = re.search(r"Usage count = ([0-9]{1,9})", text)
    return match[1], (users[1] if users else "",)


_NCCL: Final = LateExpression(
    r"(?:traps: )?((?:(?!: )[^\[]){1,15})\[[0-9]+\]:? "
    r"(?:segfault at |general protection fault |trap [a-z ]+ ).* in libnccl[^ /]*\.so"
)


def _parse_nccl(_: _Match, text: str) -> _Parsed:
    found = _NCCL.match(text)
    return (found[1], ()) if found else None


_MLX5: Final = LateExpression(
    r"mlx5_core [^ ]+: (?:[a-zA-Z0-9_]+:[0-9]+:(?:\(pid [0-9]+\):)? ?)?(.*)", re.DOTALL
)
_COMMAND: Final = LateExpression(
    r"(?:cmd\[[0-9]+\]: )?([A-Z0-9_]+|unknown command opcode)\(0x[0-9a-f]+\) "
    r"(?:timeout\. |Async, timeout\. |canceled on out of queue timeout)"
)
_HEALTH: Final = LateExpression(
    r"(device's health compromised|health recovery f(?:ailed|low aborted)|health re[cv]overy succee?ded)"
    r"|Health issue observed, ([^,]*), severity\(([0-9])\)"
)
_NOTICE: Final = 5
"""Severity of a message that is no error, as of syslog."""
_POWER: Final = LateExpression(r"(Detected in|PCIe slot advertised )sufficient power[^(]*(?:\(([0-9]+W)\))?")
_MODULE_EVENT: Final = LateExpression(r"Port module event(\[error\])?: module [0-9]+, (.*)")


def _nic_text(text: str) -> str:
    """Return the text of an mlx5_core kernel-log line without the address, the function and the PID."""
    found = _MLX5.match(text)
    return found[1] if found else ""


def _parse_nic_health(match: _Match, text: str) -> _Parsed:
    found = _HEALTH.match(_nic_text(text))
    if found is None or (found[3] and int(found[3]) >= _NOTICE):
        return None
    what = found[1] or found[2]
    state = "recovered" if " succe" in what else "failed"
    return normal_pci_address(match[1]), (state, what)


_HEAT: Final = LateExpression(
    r"(?:Health issue observed, |synd 0x10: )(High temperature)(?:, severity\([0-4]\)|$)"
    r"|(High temperature) on sensors with bit set "
)


def _parse_nic_heat(match: _Match, text: str) -> _Parsed:
    found = _HEAT.match(_nic_text(text))
    return (normal_pci_address(match[1]), (found[1] or found[2],)) if found else None


def _parse_nic_hardware(match: _Match, text: str) -> _Parsed:
    """Parse the kernel-log line about an error that a NIC's firmware reports by a syndrome (error number).
    None for an extended syndrome, which only adds a detail to another line."""
    found = re.match(r"synd 0x[0-9a-f]+: (.*)", _nic_text(text))
    return (normal_pci_address(match[1]), (found[1].strip().rstrip("."),)) if found else None


def _parse_nic_command(match: _Match, text: str) -> _Parsed:
    found = _COMMAND.match(_nic_text(text))
    return (normal_pci_address(match[1]), (f"{found[1]} not answered",)) if found else None


def _parse_nic_register(match: _Match, text: str) -> _Parsed:
    found = re.match(r"ACCESS_REG\(0x[0-9a-f]+\) .*failed, status ([a-z ]+)", _nic_text(text))
    return (normal_pci_address(match[1]), (found[1],)) if found else None


def _parse_nic_power(match: _Match, text: str) -> _Parsed:
    found = _POWER.match(_nic_text(text))
    if found is None:
        return None
    state = "insufficient" if found[1] == "Detected in" else "sufficient"
    return normal_pci_address(match[1]), (state, found[2] or "")


def _parse_nic_module(match: _Match, text: str) -> _Parsed:
    found = _MODULE_EVENT.match(_nic_text(text))
    if found is None:
        return None
    event = found[2].strip()
    state = "error" if found[1] else event.rpartition(" ")[2]
    parsed = normal_pci_address(match[1]), (state, event)
    return parsed if state in {"error", "plugged", "unplugged", "disabled"} else None


_EFA: Final = LateExpression(
    r"(?:efa ([0-9a-f:.]+)(?: [^ :]+)?|infiniband ((?:rdma|efa)[^ :]+)): "
    r"(Wait for completion \(polling\) timeout|Admin queue is closed|Device isn't ready|"
    r"Reset indication didn't turn|The device (?:sent a completion but|didn't send))"
)
_RDMA_NAME: Final = LateExpression(r"rdma(?:P([0-9]{1,5}))?p([0-9]{1,3})s([0-9]{1,2})(?:f([0-7]))?")


def _parse_efa(_: _Match, text: str) -> _Parsed:
    """Parse a kernel-log line about an EFA (AWS network adapter). The device name that udev gives an EFA
    contains the numbers of its PCI address in decimal."""
    found = _EFA.match(text)
    if found is None:
        return None
    name = _RDMA_NAME.fullmatch(found[2] or "")
    location = found[2] or normal_pci_address(found[1])
    if name:
        domain, bus, slot, function = (int(number or 0) for number in name.groups())
        location = f"{domain:04x}:{bus:02x}:{slot:02x}.{function}"
    return location, (found[3],)


_WATCHDOG: Final = LateExpression(r"NETDEV WATCHDOG: ([^ ]+) \(([^)]*)\): transmit queue .*timed out")
_NAMED_NETDEV: Final = LateExpression(
    r"([a-z0-9_-]+) ([^ ]+) ([^ ]+): (?:NETDEV WATCHDOG: CPU: [0-9]+: transmit queue .*timed out|TX timeout)"
)


def _parse_tx_timeout(_: _Match, text: str) -> _Parsed:
    """Parse the kernel-log line about a hanging transmit queue. The location of the fault is the PCI address,
    or else the network interface."""
    if found := _WATCHDOG.match(text):
        return found[1], (found[1], found[2])
    if (found := _NAMED_NETDEV.match(text)) is None:
        return None
    address = normal_pci_address(found[2])
    return (address if PCI_ADDRESS.fullmatch(address) else found[3]), (found[3], found[1])


_SECTION: Final = LateExpression(
    r"\{[0-9]+\}\[Hardware Error\]: +section_type: (.*?)(?: error)?(?: section)?\s*$"
)


def _parse_hardware_section(_: _Match, text: str) -> _Parsed:
    found = _SECTION.match(text)
    return (found[1], ()) if found else None


def _parse_hugepages_short(match: _Match, _: str) -> _Parsed:
    requested, size, unit, *node, allocated, _rest = match.groups()
    if unit not in _UNITS_KIB or not _SIZE.fullmatch(size):
        return None
    location = [str(int(float(size) * _UNITS_KIB[unit])), *(f"node{number}" for number in node)]
    return " ".join(location), (requested, allocated)


_LineParser = Callable[[_Match, str], _Parsed]
_PARSERS: Final[Mapping[KernelLogCode, _LineParser]] = {
    KernelLogCode.MACHINE_CHECK: _parse_machine_check,
    KernelLogCode.MACHINE_CHECK_DEFERRED: _parse_deferred,
    KernelLogCode.MACHINE_CHECK_CORRECTED: _parse_machine_check,
    KernelLogCode.HARDWARE_ERROR: _parse_hardware_error,
    KernelLogCode.HARDWARE_ERROR_CORRECTED: _parse_hardware_error,
    KernelLogCode.SOFT_LOCKUP: _parse_soft_lockup,
    KernelLogCode.HARD_LOCKUP: _parse_hard_lockup,
    KernelLogCode.RCU_STALL: _parse_rcu_stall,
    KernelLogCode.HUNG_TASK: _parse_hung_task,
    KernelLogCode.OOM_KILL: _parse_oom_kill,
    KernelLogCode.MEMORY_FAILURE: _parse_memory_failure,
    KernelLogCode.EDAC_CORRECTED: _parse_edac,
    KernelLogCode.EDAC_UNCORRECTED: _parse_edac,
    KernelLogCode.NVME: _parse_nvme,
    KernelLogCode.READ_ONLY: _parse_read_only,
    KernelLogCode.HARDWARE_SECTION: _parse_hardware_section,
    KernelLogCode.OOM_VICTIM: _parse_oom_victim,
    KernelLogCode.NVME_PATH: _parse_nvme_path,
    KernelLogCode.IO_ERROR: _parse_io_error,
    KernelLogCode.RAID: _parse_raid,
    KernelLogCode.BEYOND_END: _parse_beyond_end,
    KernelLogCode.FILESYSTEM: _parse_filesystem,
    KernelLogCode.NFS: _parse_nfs,
    KernelLogCode.PANIC: lambda _, text: ("", (text.removeprefix("Kernel panic - not syncing: ").strip(),)),
    KernelLogCode.OOPS: _parse_oops,
    KernelLogCode.TABLE_FULL: _parse_table_full,
    KernelLogCode.NETDEV_HELD: _parse_netdev_held,
    KernelLogCode.PEERMEM: lambda match, _: ("", (match[2].strip(),)),
    KernelLogCode.NCCL: _parse_nccl,
    KernelLogCode.NIC_HEAT: _parse_nic_heat,
    KernelLogCode.NIC_HEALTH: _parse_nic_health,
    KernelLogCode.NIC_HARDWARE: _parse_nic_hardware,
    KernelLogCode.NIC_COMMAND: _parse_nic_command,
    KernelLogCode.NIC_REGISTER: _parse_nic_register,
    KernelLogCode.NIC_POWER: _parse_nic_power,
    KernelLogCode.NIC_MODULE: _parse_nic_module,
    KernelLogCode.EFA: _parse_efa,
    KernelLogCode.TX_TIMEOUT: _parse_tx_timeout,
    KernelLogCode.HUGEPAGES_SHORT: _parse_hugepages_short,
    KernelLogCode.AER_CORRECTED: _parse_aer,
    KernelLogCode.AER_FATAL: _parse_aer,
    KernelLogCode.AER_NONFATAL: _parse_aer,
    KernelLogCode.PCI_FAULT: _parse_pci_fault,
}
_PATTERN_TABLE: Final = tuple(
    (LazyLinePattern(pattern), code)
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
