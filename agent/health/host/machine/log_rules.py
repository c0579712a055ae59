"""Health rules for faults of the whole machine that only the kernel log reports: disks, filesystems, network,
the kernel itself, and drivers of accelerators and NICs.

A NIC that a driver declares has the same findings as a device, in agent.health.host.pci.
"""

from collections.abc import Iterable
from functools import partial
from typing import Final

from agent.health.host.machine.rules import format_line_count, format_newest_names
from agent.health.host.machine.state import (
    CORRECTED_WINDOW_S,
    FAULT_HELD_S,
    LASTING_FAULT_HELD_S,
    MachineRuleInput,
)
from agent.health.host.pci.state import HELD_FOR_A_DAY, NicFault, nic_faults
from agent.health.kernel_log.facts import KernelLogCode, KernelLogFact, earliest_line, no_log_lines_result
from agent.health.rules import Rule, RuleResult, format_duration
from agent.model.health import Blame, Finding, Repair, Severity


def _finding(
    view: MachineRuleInput,
    code: str,
    severity: Severity,
    facts: Iterable[KernelLogFact],
    names: Iterable[str],
) -> RuleResult:
    """Return the finding of a rule about kernel-log lines, whose evidence lists the affected objects.

    Without ``facts``, return the result for a kernel log without such lines.

    Args:
        facts: Faults that lines of the kernel log report, and that the rule reports.
        names: Name of the affected disk, process or interface, one for each of ``facts``.
    """
    facts = tuple(facts)
    if not facts:
        return no_log_lines_result(view.log_state)
    name_of = dict(zip(facts, names, strict=True)).__getitem__
    evidence = f"{format_newest_names(facts, name_of)}; {format_line_count(facts)}"
    return Finding(code, severity, evidence, since=earliest_line(facts))


def _with_value(facts: Iterable[KernelLogFact]) -> list[str]:
    return [f"{fact.location}: {fact.values[0]}" for fact in facts]


def detect_io_error(view: MachineRuleInput) -> RuleResult:
    """A disk failed reads or writes.

    Source: lines of the kernel log, from the block layer.
    """
    facts = view.recent(FAULT_HELD_S, KernelLogCode.IO_ERROR)
    names = [f"{fact.location}: {fact.values[0]} error" for fact in facts]
    return _finding(view, "node.io_error", Severity.DEGRADED, facts, names)


def detect_lost_nvme_path(view: MachineRuleInput) -> RuleResult:
    """An NVMe disk could not be reached over any of its paths.

    Source: lines of the kernel log, from NVMe multipath.
    """
    facts = view.recent(FAULT_HELD_S, KernelLogCode.NVME_PATH)
    return _finding(view, "node.nvme.path", Severity.DEGRADED, facts, _with_value(facts))


def detect_raid_fault(view: MachineRuleInput) -> RuleResult:
    """A RAID array lost a disk; unhealthy if the array failed with it.

    Source: lines of the kernel log, from md.
    """
    facts = sorted(
        view.recent(LASTING_FAULT_HELD_S, KernelLogCode.RAID), key=lambda fact: fact.values[0] != "failed"
    )
    worst = any(fact.values[0] == "failed" for fact in facts)
    severity = Severity.UNHEALTHY if worst else Severity.DEGRADED
    return _finding(view, "node.raid", severity, facts, _with_value(facts))


def detect_access_beyond_end(view: MachineRuleInput) -> RuleResult:
    """Something read or wrote behind the end of a disk: the disk shrank, or a filesystem has wrong sizes.

    Source: lines of the kernel log, from the block layer.
    """
    facts = view.recent(FAULT_HELD_S, KernelLogCode.BEYOND_END)
    names = [fact.location or fact.values[0] or "a disk" for fact in facts]
    return _finding(view, "node.beyond_end", Severity.DEGRADED, facts, names)


def detect_filesystem_error(view: MachineRuleInput) -> RuleResult:
    """A filesystem found an error in its own data, or could not write it.

    Source: lines of the kernel log, from ext4, XFS and Btrfs.
    """
    facts = view.recent(LASTING_FAULT_HELD_S, KernelLogCode.FILESYSTEM)
    names = [f"{fact.values[0]} on {fact.location}" for fact in facts]
    return _finding(view, "node.filesystem", Severity.DEGRADED, facts, names)


def detect_nfs_fault(view: MachineRuleInput) -> RuleResult:
    """An NFS server does not answer, or file locks on it were lost.

    Source: lines of the kernel log, from the NFS client; a line that the server is OK ends it.
    """
    facts = [fact for fact in view.recent(LASTING_FAULT_HELD_S, KernelLogCode.NFS) if fact.values[0] != "up"]
    recent = set(view.recent(FAULT_HELD_S, KernelLogCode.NFS))
    facts = [fact for fact in facts if fact.location or fact in recent]
    names = [f"{fact.location} not responding" if fact.location else "file locks lost" for fact in facts]
    return _finding(view, "node.nfs", Severity.DEGRADED, facts, names)


def detect_oops(view: MachineRuleInput) -> RuleResult:
    """The kernel had a fault inside itself (an oops), or a panic.

    Source: lines of the kernel log.
    """
    facts = view.recent(LASTING_FAULT_HELD_S, KernelLogCode.PANIC, KernelLogCode.OOPS)
    return _finding(view, "node.oops", Severity.DEGRADED, facts, [fact.values[0] for fact in facts])


def detect_full_table(view: MachineRuleInput) -> RuleResult:
    """A table of the kernel is full: tracked connections, or open files.

    Source: lines of the kernel log.
    """
    facts = view.recent(FAULT_HELD_S, KernelLogCode.TABLE_FULL)
    return _finding(view, "node.table_full", Severity.DEGRADED, facts, [fact.location for fact in facts])


def detect_held_interface(view: MachineRuleInput) -> RuleResult:
    """A network interface could not be removed because something still holds it.

    Source: lines of the kernel log, "unregister_netdevice: waiting for ...".
    """
    facts = view.recent(FAULT_HELD_S, KernelLogCode.NETDEV_HELD)
    return _finding(view, "node.netdev_held", Severity.DEGRADED, facts, [fact.location for fact in facts])


def detect_hanging_queue(view: MachineRuleInput) -> RuleResult:
    """A transmit queue of a network interface hung.

    Source: lines of the kernel log, from the network watchdog and drivers.
    """
    facts = view.recent(FAULT_HELD_S, KernelLogCode.TX_TIMEOUT)
    names = [f"{fact.values[0]} ({fact.values[1]})" for fact in facts]
    return _finding(view, "node.tx_timeout", Severity.DEGRADED, facts, names)


def detect_peermem_error(view: MachineRuleInput) -> RuleResult:
    """The module for RDMA to GPU memory reported an error.

    Source: lines of the kernel log, from nvidia-peermem.
    """
    facts = view.recent(FAULT_HELD_S, KernelLogCode.PEERMEM)
    return _finding(view, "node.peermem", Severity.DEGRADED, facts, [fact.values[0] for fact in facts])


def detect_nccl_crash(view: MachineRuleInput) -> RuleResult:
    """A process crashed in libnccl.

    Source: lines of the kernel log about segmentation faults.
    """
    facts = view.recent(FAULT_HELD_S, KernelLogCode.NCCL)
    return _finding(view, "node.nccl", Severity.INFO, facts, [fact.location for fact in facts])


def detect_nic_fault(view: MachineRuleInput) -> RuleResult:
    """The driver of a ConnectX NIC or an EFA reported a fault of the NIC.

    Source: lines of the kernel log, from mlx5_core and efa.
    """
    held = view.recent(LASTING_FAULT_HELD_S, *HELD_FOR_A_DAY)
    held += view.recent(FAULT_HELD_S, KernelLogCode.NIC_HEAT)
    facts = (*held, *view.recent(CORRECTED_WINDOW_S, KernelLogCode.NIC_REGISTER))
    faults: list[NicFault] = []
    for location in dict.fromkeys(fact.location for fact in facts):
        faults += nic_faults({fact.code: fact for fact in facts if fact.location == location})
    if not faults:
        return no_log_lines_result(view.log_state)
    faults.sort(key=lambda fault: -fault.severity)
    names = [f"{fault.fact.location}: {fault.text}" for fault in faults]
    return _finding(view, "node.nic", faults[0].severity, (fault.fact for fault in faults), names)


def detect_fault_of_unlisted_gpu(view: MachineRuleInput) -> RuleResult:
    """The kernel log reports faults of a GPU that NVML does not list, so that the report has no such device.

    Source: lines of the kernel log about XIDs, lost GPUs and failed initializations, by PCI address.
    """
    if not view.unlisted_gpus:
        return no_log_lines_result(view.log_state)
    evidence = f"NVML lists no GPU at {', '.join(view.unlisted_gpus)}"
    return Finding("node.gpu", Severity.DEGRADED, evidence)


_MOMENT: Final = f"a line in the last {format_duration(FAULT_HELD_S)}"
_DAY: Final = f"a line in the last {format_duration(LASTING_FAULT_HELD_S)}"
_log_rule = partial(
    Rule,
    severity=Severity.DEGRADED,
    blame=Blame.HARDWARE,
    repair=Repair.INSPECT_HARDWARE,
    source="kmsg",
    threshold=_MOMENT,
)
"""Constructor of a ``Rule`` for kernel-log lines; defaults: severity ``degraded``, blame on the hardware."""


def _write(text: str) -> str:
    return f"echo '<3>{text}' > /dev/kmsg"


MACHINE_LOG_RULES: Final = (
    _log_rule(
        code="node.io_error",
        why="data on the disk may be lost, and what waits for it hangs",
        advice="check the disk with smartctl or nvme smart-log, its cable and slot; replace it",
        evaluate=detect_io_error,
        try_it=_write("I/O error, dev sda, sector 2048 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2"),
    ),
    _log_rule(
        code="node.nvme.path",
        why="I/O to the disk waits or fails until a path is back",
        advice="check the controllers with nvme list-subsys, and the network to a remote disk",
        evaluate=detect_lost_nvme_path,
        try_it=_write("block nvme0n1: no available path - failing I/O"),
    ),
    _log_rule(
        code="node.raid",
        repair=Repair.REPLACE_HARDWARE,
        severity=Severity.UNHEALTHY,
        threshold=f"{_DAY}; degraded while the array works without the disk",
        why="the data is lost when the next disk fails, or is lost already",
        advice="see /proc/mdstat and mdadm --detail; replace the disk and rebuild the array",
        evaluate=detect_raid_fault,
        try_it=_write("md/raid0md0: Disk failure on nvme0n1p1 detected, failing array."),
    ),
    _log_rule(
        code="node.beyond_end",
        repair=Repair.NONE,
        why="the filesystem or the partition table does not fit the disk, and reads return errors",
        advice="compare the sizes of the disk, the partition and the filesystem; check the filesystem",
        evaluate=detect_access_beyond_end,
        try_it=_write("attempt to access beyond end of device"),
    ),
    _log_rule(
        code="node.filesystem",
        threshold=_DAY,
        why="files may be damaged; the filesystem becomes read-only or is shut down with the next error",
        advice="drain the node, check the filesystem (e2fsck, xfs_repair, btrfs scrub), and its disk",
        evaluate=detect_filesystem_error,
        try_it=_write("EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2: comm ls: reading"),
    ),
    _log_rule(
        code="node.nfs",
        repair=Repair.NONE,
        blame=Blame.CONFIGURATION,
        threshold=f"{_DAY}, and no later line that the server is OK",
        why="processes that use its files hang and cannot be killed, or get errors",
        advice="check the NFS server and the network to it; pods that hang end when it answers",
        evaluate=detect_nfs_fault,
        try_it=_write("nfs: server nfs-1 not responding, still trying"),
    ),
    _log_rule(
        code="node.oops",
        repair=Repair.REBOOT_NODE,
        blame=Blame.DRIVER,
        threshold=_DAY,
        why="the kernel ended a task in the middle of its work: locks may stay held, data may be damaged",
        advice="the trace in the kernel log names the module; reboot the node, update the module or kernel",
        evaluate=detect_oops,
        try_it=_write("BUG: unable to handle page fault for address: ffffa26487064230"),
    ),
    _log_rule(
        code="node.table_full",
        repair=Repair.NONE,
        blame=Blame.CONFIGURATION,
        why="new connections are dropped, or no process can open files",
        advice="find what fills it (conntrack -S, /proc/sys/fs/file-nr); raise its limit with sysctl",
        evaluate=detect_full_table,
        try_it=_write("nf_conntrack: nf_conntrack: table full, dropping packet"),
    ),
    _log_rule(
        code="node.netdev_held",
        repair=Repair.NONE,
        blame=Blame.DRIVER,
        why="network namespaces cannot be removed; new pods may not start",
        advice="if the lines repeat, reboot the node; a leaked reference is a bug of the kernel",
        evaluate=detect_held_interface,
        try_it=_write("unregister_netdevice: waiting for lo to become free. Usage count = 1"),
    ),
    _log_rule(
        code="node.tx_timeout",
        why="the interface sent nothing for seconds; its driver resets it",
        advice="check cable, firmware and the lines before it in the kernel log; reset the NIC",
        evaluate=detect_hanging_queue,
        try_it=_write("NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 0 timed out"),
    ),
    _log_rule(
        code="node.nic",
        severity=Severity.UNHEALTHY,
        threshold=f"{_DAY}, about registers in the last {format_duration(CORRECTED_WINDOW_S)}; "
        "degraded or info for modules, power and registers",
        why="the NIC has stopped, or works worse than it should",
        advice="read its driver's lines in the kernel log; reset the NIC, update its firmware, replace it",
        evaluate=detect_nic_fault,
        try_it=_write("mlx5_core 0000:3b:00.0: synd 0x8: unrecoverable hardware error"),
    ),
    _log_rule(
        code="node.gpu",
        repair=Repair.REBOOT_NODE,
        threshold="a fault above info at a PCI address, until NVML lists a GPU there",
        why="no check covers the GPU, and the node has a GPU less than it should",
        advice="check lspci and the NVRM lines in the kernel log; reboot; reseat or replace the GPU",
        evaluate=detect_fault_of_unlisted_gpu,
        try_it='echo "NVRM: Xid (PCI:0000:fb:00): 79, GPU has fallen off the bus." > /dev/kmsg',
    ),
    _log_rule(
        code="node.peermem",
        repair=Repair.RELOAD_DRIVER,
        blame=Blame.DRIVER,
        why="RDMA to GPU memory may fail; a few lines when a process is killed are harmless",
        advice="if the lines repeat, reload nvidia-peermem or restart the workload; use DMA-BUF instead",
        evaluate=detect_peermem_error,
        try_it=_write("nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context"),
    ),
    _log_rule(
        code="node.nccl",
        repair=Repair.NONE,
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        why="the job has ended; often another node's GPU or NIC failed first",
        advice="look for faults of GPUs, NVLinks and NICs on all nodes of the job; update NCCL",
        evaluate=detect_nccl_crash,
        try_it=_write(
            "python3[4711]: segfault at 7f797fe00000 ip 00007f7c7ac69996 sp 00007f7c12fd7c30 error 4 "
            "in libnccl.so.2[7f7c7ac00000+d3d3000]"
        ),
    ),
)
