"""Kernel-log lines about the host, as Linux 5.4 to 6.18 write them, with their parsed form."""

from typing import Final

from agent.health.kernel_log.parse import HostLine
from agent.health.kernel_log.values import LogCode

POD: Final = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0f3c.slice"
MCE: Final = "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: "
AMD: Final = "[Hardware Error]: CPU:6 (19:1:1) MC27_STATUS["
LAYER: Final = "type=Physical Layer, (Receiver ID)"
OOM: Final = "oom-kill:constraint="
EDAC: Final = "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0"
DIMM: Final = "mc0 CPU_SrcID#0_MC#0_Chan#1_DIMM#0"

CASES: Final[list[tuple[str, HostLine]]] = [
    # --- machine checks: bit 61 of the status means uncorrected
    (MCE + "be00000000800400", HostLine(LogCode.MACHINE_CHECK, "cpu3", ("5", "be00000000800400"))),
    (MCE + "f200000000800400", HostLine(LogCode.MACHINE_CHECK, "cpu3", ("5", "f200000000800400"))),
    (MCE.replace("Check: 0", "Check Exception: 7") + "a000000000800400",
     HostLine(LogCode.MACHINE_CHECK, "cpu3", ("5", "a000000000800400"))),
    (MCE + "e600000000020408", HostLine(LogCode.MACHINE_CHECK, "cpu3", ("5", "e600000000020408"))),
    (MCE + "8c00004000010091", HostLine(LogCode.MACHINE_CHECK_CORRECTED, "cpu3", ("5", "8c00004000010091"))),
    (MCE + "d400004000010091", HostLine(LogCode.MACHINE_CHECK_CORRECTED, "cpu3", ("5", "d400004000010091"))),
    (MCE + "cut", HostLine(LogCode.MACHINE_CHECK_CORRECTED, "cpu3")),
    ("mce: [Hardware Error]: Machine check events logged", HostLine(LogCode.MACHINE_CHECK_CORRECTED, "")),
    (AMD + "-|UE|MiscV|AddrV|PCC|TCC|SyndV|-|-|-]: 0xbea0000000000108",
     HostLine(LogCode.MACHINE_CHECK, "cpu6", ("27", "bea0000000000108"))),
    (AMD + "Over|CE|MiscV|-|-|-|SyndV|UECC|-|-]: 0xd82000000002080b",
     HostLine(LogCode.MACHINE_CHECK_CORRECTED, "cpu6", ("27", "d82000000002080b"))),
    (AMD + "-|-|MiscV|AddrV|-|-|SyndV|-|Deferred|-]: 0x9c2030000000011b",
     HostLine(LogCode.MACHINE_CHECK_CORRECTED, "cpu6", ("27", "9c2030000000011b"))),
    # --- reports of firmware
    ("{1}[Hardware Error]: event severity: fatal", HostLine(LogCode.HARDWARE_ERROR, "", ("fatal",))),
    ("{12}[Hardware Error]: event severity: recoverable",
     HostLine(LogCode.HARDWARE_ERROR, "", ("recoverable",))),
    ("{2}[Hardware Error]: event severity: corrected",
     HostLine(LogCode.HARDWARE_ERROR_CORRECTED, "", ("corrected",))),
    # --- locked-up CPUs
    ("watchdog: BUG: soft lockup - CPU#7 stuck for 26s! [kworker/u16:2:4812]",
     HostLine(LogCode.SOFT_LOCKUP, "cpu7", ("26", "kworker/u16:2:4812"))),
    ("watchdog: BUG: soft lockup - CPU#7 stuck for a while", HostLine(LogCode.SOFT_LOCKUP, "cpu7")),
    ("watchdog: Watchdog detected hard LOCKUP on cpu 3", HostLine(LogCode.HARD_LOCKUP, "cpu3")),
    ("watchdog: CPU28: Watchdog detected hard LOCKUP on cpu 29", HostLine(LogCode.HARD_LOCKUP, "cpu29")),
    ("NMI watchdog: Watchdog detected hard LOCKUP on cpu 27", HostLine(LogCode.HARD_LOCKUP, "cpu27")),
    ("rcu: INFO: rcu_sched self-detected stall on CPU", HostLine(LogCode.RCU_STALL, "", ("rcu_sched",))),
    ("rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:",
     HostLine(LogCode.RCU_STALL, "", ("rcu_preempt",))),
    ("rcu: INFO: rcu_preempt detected expedited stalls on CPUs/tasks: { 3-... } 5443 jiffies s: 49",
     HostLine(LogCode.RCU_STALL, "", ("rcu_preempt",))),
    # --- tasks
    ("INFO: task python3:1234 blocked for more than 122 seconds.",
     HostLine(LogCode.HUNG_TASK, "python3", ("122",))),
    ("INFO: task kworker/0:1:99 blocked for more than 245 seconds.",
     HostLine(LogCode.HUNG_TASK, "kworker/0:1", ("245",))),
    ("INFO: task tokio rt w 1:7 blocked for more than 120 seconds.",
     HostLine(LogCode.HUNG_TASK, "tokio rt w 1", ("120",))),
    ("INFO: task dd:456 blocked in I/O wait for more than 122 seconds.",
     HostLine(LogCode.HUNG_TASK, "dd", ("122",))),
    # --- memory that ran out
    (f"{OOM}CONSTRAINT_MEMCG,nodemask=(null),cpuset=cri-a.scope,mems_allowed=0-1,oom_memcg={POD},"
     f"task_memcg={POD}/cri-a.scope,task=python3,pid=1234,uid=0",
     HostLine(LogCode.OOM_KILL, POD, ("memcg", "python3", f"{POD}/cri-a.scope"))),
    (f"{OOM}CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/a\\x5cx2db,"
     "task_memcg=/a\\x5cx2db,task=sh,pid=1,uid=0",
     HostLine(LogCode.OOM_KILL, r"/a\x2db", ("memcg", "sh", r"/a\x2db"))),
    (f"{OOM}CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
     "task_memcg=/user.slice,task=node,pid=5678,uid=1000",
     HostLine(LogCode.OOM_KILL, "", ("none", "node", "/user.slice"))),
    (f"{OOM}CONSTRAINT_CPUSET,nodemask=(null),cpuset=c,mems_allowed=1,global_oom,task_memcg=/c,task=a,oom_memcg=/,pid=1",
     HostLine(LogCode.OOM_KILL, "", ("cpuset", "a", "/c"))),
    (f"{OOM}CONSTRAINT_NONE,nodemask=(null)", HostLine(LogCode.OOM_KILL, "", ("none", "", ""))),
    (f"{OOM}CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/kubepods/bur",
     HostLine(LogCode.OOM_KILL, "/kubepods/bur", ("memcg", "", ""))),
    # --- memory with errors
    ("Memory failure: 0x40fa6: recovery action for dirty LRU page: Recovered",
     HostLine(LogCode.MEMORY_FAILURE, "", ("Recovered", "dirty LRU page"))),
    ("Memory failure: 0x1a2b3c: recovery action for reserved kernel page: Ignored",
     HostLine(LogCode.MEMORY_FAILURE, "", ("Ignored", "reserved kernel page"))),
    (EDAC + " (channel:1 slot:0 page:0x12345 offset:0x0 grain:32 syndrome:0x0 -  OVERFLOW area:DRAM)",
     HostLine(LogCode.EDAC_CORRECTED, DIMM, ("1",))),
    ("EDAC MC3: 5 CE on mc#3csrow#3channel#0 (csrow:3 channel:0 page:0x702c09 offset:0x680 grain:64)",
     HostLine(LogCode.EDAC_CORRECTED, "mc3 mc#3csrow#3channel#0", ("5",))),
    ("EDAC MC0: 1 UE Multi-bit ECC on unknown memory (node:0 card:1 page:0x1000093 offset:0xc00 grain:1)",
     HostLine(LogCode.EDAC_UNCORRECTED, "mc0", ("1",))),
    ("EDAC MC0: 1 UE unknown on unknown memory ( page:0x116c60 offset:0x0 grain:1 - APEI location: )",
     HostLine(LogCode.EDAC_UNCORRECTED, "mc0", ("1",))),
    ("EDAC MC1: 1 UE memory scrub error on DIMM_A1 or DIMM_A2 (channel:2 page:0x0)",
     HostLine(LogCode.EDAC_UNCORRECTED, "mc1 DIMM_A1 or DIMM_A2", ("1",))),
    (EDAC.replace("CE", "UE") + " (channel:1 slot:0 page:0x12345 offset:0x0 grain:32)",
     HostLine(LogCode.EDAC_UNCORRECTED, DIMM, ("1",))),
    ("EDAC MC1: 1 CE cut", HostLine(LogCode.EDAC_CORRECTED, "mc1")),
    # --- PCI
    (f"pcieport 0000:00:1c.5: AER: PCIe Bus Error: severity=Corrected, {LAYER}",
     HostLine(LogCode.AER_CORRECTED, "0000:00:1c.5", ("Physical Layer",))),
    (f"nvidia 0000:3b:00.0: PCIe Bus Error: severity=Correctable, {LAYER}",
     HostLine(LogCode.AER_CORRECTED, "0000:3b:00.0", ("Physical Layer",))),
    ("nvme 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer, (ID)",
     HostLine(LogCode.AER_NONFATAL, "0000:3b:00.0", ("Transaction Layer",))),
    ("pci 10000:E1:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Inaccessible, (ID)",
     HostLine(LogCode.AER_FATAL, "10000:e1:00.0", ("Inaccessible",))),
    ("tg3 0000:04:00.0: AER: aer_uncor_severity: 0x000ef030",
     HostLine(LogCode.AER_NONFATAL, "0000:04:00.0")),
    ("pcieport 0000:00:01.0: pciehp: Slot(3): Link Down",
     HostLine(LogCode.PCI_FAULT, "0000:00:01.0", ("Slot(3): Link Down",))),
    ("pcieport 0000:00:01.0: pciehp: Slot(0-4): Card not present",
     HostLine(LogCode.PCI_FAULT, "0000:00:01.0", ("Slot(0-4): Card not present",))),
    ("pcieport 0000:00:01.4: DPC: containment event, status:0x1f01 source:0x0000",
     HostLine(LogCode.PCI_FAULT, "0000:00:01.4", ("containment event",))),
    ("pcieport 0000:00:1c.0: AER: device recovery failed",
     HostLine(LogCode.PCI_FAULT, "0000:00:1c.0", ("device recovery failed",))),
    ("nvme 0002:01:00.0: Unable to change power state from D3cold to D0, device inaccessible",
     HostLine(LogCode.PCI_FAULT, "0002:01:00.0", ("Unable to change power state from D3cold to D0",))),
    # --- disks and filesystems
    ("nvme nvme0: I/O 12 QID 3 timeout, aborting", HostLine(LogCode.NVME, "nvme0", ("I/O timeout",))),
    ("nvme nvme0: I/O tag 12 (400c) opcode 0x9 (Admin Cmd) QID 0 timeout, reset controller",
     HostLine(LogCode.NVME, "nvme0", ("I/O timeout",))),
    ("nvme nvme12: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10",
     HostLine(LogCode.NVME, "nvme12", ("controller is down",))),
    ("nvme nvme0: Device not ready; aborting reset, CSTS=0x3",
     HostLine(LogCode.NVME, "nvme0", ("Device not ready",))),
    ("nvme nvme0: Removing after probe failure status: -19",
     HostLine(LogCode.NVME, "nvme0", ("Removing after probe failure status",))),
    ("nvme nvme0: Disabling device after reset failure: -19",
     HostLine(LogCode.NVME, "nvme0", ("Disabling device after reset failure",))),
    ("EXT4-fs (sda1): Remounting filesystem read-only", HostLine(LogCode.READ_ONLY, "sda1", ("EXT4",))),
    ("XFS (dm-0): Log I/O Error (0x2) detected at xlog_ioend_work+0x60/0xb0 [xfs] (fs/xfs/xfs_log.c:1377).  "
     "Shutting down filesystem.", HostLine(LogCode.READ_ONLY, "dm-0", ("XFS",))),
    ("XFS (nvme0n1p2): I/O Error Detected. Shutting down filesystem",
     HostLine(LogCode.READ_ONLY, "nvme0n1p2", ("XFS",))),
    ("BTRFS info (device sdf): forced readonly", HostLine(LogCode.READ_ONLY, "sdf", ("BTRFS",))),
    ("BTRFS info (device vdc: state EA): forced readonly", HostLine(LogCode.READ_ONLY, "vdc", ("BTRFS",))),
    ("FAT-fs (sda1): Filesystem has been set read-only", HostLine(LogCode.READ_ONLY, "sda1", ("FAT",))),
    # --- hugepages at boot
    ("HugeTLB: allocating 16 of page size 1.00 GiB failed.  Only allocated 12 hugepages.",
     HostLine(LogCode.HUGEPAGES_SHORT, "1048576", ("16", "12"))),
    ("HugeTLB: allocating 4096 of page size 2.00 MiB failed node1.  Only allocated 17 hugepages.",
     HostLine(LogCode.HUGEPAGES_SHORT, "2048 node1", ("4096", "17"))),
    ("HugeTLB: allocating 8 of page size 64.0 KiB failed.  Only allocated 0 hugepages.",
     HostLine(LogCode.HUGEPAGES_SHORT, "64", ("8", "0"))),
]  # fmt: skip

SILENT: Final = [
    "",
    "mce: CPU0: Thermal monitoring enabled (TM1)",
    "mce: [Hardware Error]: PROCESSOR 0:50654 TIME 1700000000 SOCKET 0 APIC 0 microcode 2000065",
    "mce: [Hardware Error]: CPU 1234567: Machine Check: 0 Bank 5: be00000000800400",
    "[Hardware Error]: event severity: fatal",  # of the previous boot
    "{1}[Hardware Error]: event severity: info",
    "{1}[Hardware Error]:  Error 0, type: corrected",
    "BERT: Error records from previous boot:",
    "rcu: \t4-....: (5249 ticks this GP) idle=51e4/1/0x4000000000000000 softirq=309/309 fqs=2563",
    "INFO: task dd:7 is blocked on a mutex likely owned by task python3:8.",
    "INFO: task nobody blocked for more than 120 seconds.",  # verbatim
    "Memory cgroup out of memory: Killed process 1234 (python3) total-vm:31763532kB, anon-rss:13928044kB",
    "Out of memory: Killed process 5678 (node) total-vm:2345678kB, anon-rss:1234567kB",
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0",
    "oom-kill:constraint=",
    "Memory failure: 0x40fa6: already hardware poisoned",
    "Memory failure: 0x40fa6: recovery action for already poisoned page: Failed",
    "Memory failure: 0x40fa6: Killing mca-recover:1296 due to hardware memory corruption",
    "EDAC MC0: Giving out device to module skx_edac controller Skylake Socket#0 IMC#0: DEV 0000:85:0a.0",
    "EDAC MC1234567: 1 CE on x (page:0x0)",
    "pcieport 0000:00:1c.5: AER: Corrected error received: 0000:3b:00.0",
    "pcieport 0000:00:1c.5: AER: enabled with IRQ 122",
    "pcieport 0000:00:01.0: pciehp: Slot(3): Card present",
    "pcieport 0000:00:01.0: pciehp: Slot(3): Link Up",
    "nvme nvme0: Shutdown timeout set to 8 seconds",
    "nvme nvme0: I/O 12 QID 3 complete",
    "nvme nvme1234567: controller is down",
    "EXT4-fs (sda1): mounted filesystem with ordered data mode. Opts: (null)",
    "XFS (dm-0): Please unmount the filesystem and rectify the problem(s)",
    "BTRFS: error (device sdf) in __btrfs_free_extent:3216: errno=-28 No space left",
    "HugeTLB: registered 2.00 MiB page size, pre-allocated 0 pages",
    "HugeTLB: allocating 8 of page size many KiB failed.  Only allocated 0 hugepages.",
    "HugeTLB: allocating 8 of page size 2.00 EiB failed.  Only allocated 0 hugepages.",
    "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
    "python[7]: watchdog: BUG: soft lockup - CPU#7 stuck for 26s! [a:1]",
]
