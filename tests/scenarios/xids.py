"""What is only announced: XIDs by both ways, SXids, NVML's other events, on whole GPUs and on instances."""

from typing import Final

from scenarios.row import BUSES, Row
from scenarios.steps import (
    also_info,
    degraded,
    info,
    kept,
    kernel,
    looked,
    never,
    nvml,
    unhealthy,
    xid_line,
)

NETIR: Final = "NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x00000000 0x00000000 0x00000000)"
BENIGN: Final = "RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x00000004 0x00000100 0x00000001 0x00000000)"
RESETTING: Final = "RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x00000004 0x00000040 0x00000001 0x00000000)"
TO_REBOOT: Final = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
SWITCH: Final = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): "
BOTH: Final = "gpu-0 gpu-1"
PARTS: Final = "gpu-0-mig-1-0 gpu-0-mig-2-0"
PARTED: Final = {"profile": "a100", "gpus": 2, "setup": ("gpu 0 mig 3g.20gb 3g.20gb",)}

XIDS: Final = (
    Row(
        "XID 48 by NVML",
        (nvml("gpu 0 xid 48"), unhealthy("gpu-0", "gpu.xid.48: uncorrectable (two-bit) ECC error")),
        gpus=2,
    ),
    Row(
        "XID 48 by the kernel log",
        (
            kernel(xid_line(48, "pid=1234, name=python3, DBE (double bit error)", gpu=1)),
            unhealthy("gpu-1", "gpu.xid.48: uncorrectable (two-bit) ECC error"),
        ),
        gpus=2,
    ),
    Row(
        "XID 48 by both is one fault",
        (
            nvml("gpu 0 xid 48"),
            kernel(xid_line(48)),
            unhealthy("gpu-0", "gpu.xid.48: "),
            looked(10),
            kept("gpu.xid.48", times=1),
        ),
    ),
    Row(
        "48, and then 45 that only cleans up after it",
        (
            nvml("gpu 0 xid 48", "gpu 0 xid 45"),
            kernel(
                xid_line(48), xid_line(45, "pid=1234, name=python3, Ch 00000001 caused by previous Xid 48")
            ),
            unhealthy("gpu-0", "gpu.xid.48: "),
            also_info("gpu-0", "gpu.xid.45: a channel was cleaned up after another fault: after XID 48"),
        ),
    ),
    Row(
        "a GPU falls off the bus, in a line that is no XID",
        (
            kernel(f"NVRM: GPU {BUSES[2]}: GPU has fallen off the bus."),
            unhealthy("gpu-2", "gpu.xid.79: the GPU no longer answers on PCIe"),
        ),
        gpus=4,
    ),
    Row(
        "a workload's own fault is known, and makes nobody sick",
        (
            nvml("gpu 0 xid 31"),
            kernel(xid_line(31, "pid=1234, name=python3, Ch 8, MMU Fault: ENGINE GRAPHICS")),
            info("gpu-0", "gpu.xid.31: memory page fault"),
        ),
    ),
    Row(
        "a contained memory error, and a storm of them",
        (
            nvml("gpu 0 xid 94"),
            degraded("gpu-0", "gpu.xid.94: contained memory error: only its program was hurt"),
            nvml(*["gpu 0 xid 94"] * 9),
            unhealthy(
                "gpu-0",
                "gpu.xid.94: contained memory error: only its program was hurt: it comes again and again",
            ),
        ),
    ),
    Row(
        "a conditional XID waits for the driver's demand",
        (
            nvml("gpu 0 xid 159"),
            info("gpu-0", "gpu.xid.159: fault of the coherent interface: no recovery action is asked for"),
            nvml("gpu 0 set recovery_action=4"),
            unhealthy("gpu-0", "gpu."),
        ),
    ),
    Row(
        "a code that no table has, on a driver that cannot say more",
        (
            kernel(xid_line(998, "of a driver to come")),
            degraded("gpu-0", "gpu.xid.998: "),
        ),
        branch=535,
    ),
    Row(
        "154 by its text, where the driver has no field for it",
        (
            kernel(xid_line(154, TO_REBOOT)),
            unhealthy(
                "gpu-0", "gpu.xid.154: the driver asks for a recovery action: recovery action: node reboot"
            ),
        ),
        branch=535,
    ),
    Row(
        "154 by its text, where the field says otherwise",
        (
            kernel(xid_line(154, TO_REBOOT)),
            info("gpu-0", "gpu.xid.154: the driver asks for a recovery action: recovery action: none"),
        ),
    ),
    Row(
        "an NVLink 5 line that is fatal",
        (
            kernel(xid_line(149, NETIR)),
            unhealthy("gpu-0", "gpu.xid.149: NVLink down, or its error rate too high: "),
        ),
    ),
    Row(
        "NVLink 5 lines by their error status",
        (
            kernel(xid_line(145, BENIGN)),
            info("gpu-0", "gpu.xid.145: NVLink RLW fault: "),
            kernel(xid_line(145, RESETTING)),
            unhealthy("gpu-0", "gpu.xid.145: NVLink RLW fault: "),
        ),
    ),
    Row(
        "a fault of one switch's link is everybody's who has links",
        (
            kernel(f"{SWITCH}20034, Fatal, Link 30 LTSSM Fault Up"),
            degraded(
                BOTH,
                "gpu.fabric.sxid.20034: link training fault while up: NVSwitch 3 at 0000:c1:00.0, link 30",
            ),
        ),
        gpus=2,
    ),
    Row(
        "a fault of the whole fabric",
        (
            kernel(f"{SWITCH}12020, Fatal, Link 30 egress sequence id error"),
            unhealthy(BOTH, "gpu.fabric.sxid.12020: egress sequence id error: "),
        ),
        gpus=2,
    ),
    Row(
        "a switch corrects an error",
        (
            kernel(f"{SWITCH}11012, Non-fatal, Link 30 ecc"),
            info(BOTH, "gpu.fabric.sxid.11012: "),
        ),
        gpus=2,
    ),
    Row(
        "what the operator makes of a code outranks the table",
        (
            nvml("gpu 0 xid 48", "gpu 0 xid 31"),
            unhealthy("gpu-0", "gpu.xid.31: memory page fault: unhealthy by configuration"),
            looked(10),
            never("gpu.xid.48"),
        ),
        settings={"gpu.xids": {"31": "unhealthy", "48": "ignore"}},
    ),
    Row(
        "a GPU that the driver could not initialise",
        (
            kernel(f"NVRM: GPU {BUSES[0]}: RmInitAdapter failed! (0x62:0xffff:1863)"),
            unhealthy("gpu-0", "gpu.init_failed: the driver could not initialise the GPU"),
        ),
        gpus=2,
    ),
    Row(
        "links that cannot be found out",
        (
            kernel("NVRM: knvlinkDiscoverPostRxDetLinks_GH100: Getting peer0's postRxDetLinkMask failed!"),
            degraded("gpu-0", "gpu.nvlink.setup_failed: "),
        ),
    ),
    Row(
        "a program with another driver library",
        (
            kernel(
                "NVRM: API mismatch: the client has the version 570.86.15, but\\x0a"
                "NVRM: this kernel module has the version 570.86.10.  Please"
            ),
            info(BOTH, "gpu.driver.api_mismatch: "),
        ),
        gpus=2,
    ),
    Row(
        "lines of before the agent's start count",
        # which nothing has mended, however long the start takes
        (unhealthy("gpu-0", "gpu.xid.79: the GPU no longer answers on PCIe"),),
        gpus=2,
        logged=(xid_line(79),),
    ),
    Row(
        "a line that a process wrote is nobody's word",
        (
            kernel(xid_line(79, gpu=1), priority=12),
            kernel(xid_line(48)),
            unhealthy("gpu-0", "gpu.xid.48: "),
        ),
        gpus=2,
    ),
)

EVENTS: Final = (
    Row(
        "NVML announces that a GPU is not available",
        (nvml("gpu 0 event 0x4000"), unhealthy("gpu-0", "gpu.unavailable: ")),
        gpus=2,
    ),
    Row("bad data that got out", (nvml("gpu 0 event 0x2000"), unhealthy("gpu-0", "gpu.poison.fatal: "))),
    Row(
        "bad data that was kept in", (nvml("gpu 0 event 0x1000"), degraded("gpu-0", "gpu.poison.contained: "))
    ),
    Row(
        "bad memory could not be retired",
        (nvml("gpu 0 event 0x800"), unhealthy("gpu-0", "gpu.retirement.failed: ")),
    ),
    Row("bad memory was retired", (nvml("gpu 0 event 0x400"), info("gpu-0", "gpu.retirement: "))),
    Row("a storm of correctable errors", (nvml("gpu 0 event 0x200"), degraded("gpu-0", "gpu.ecc.storm: "))),
)

INSTANCES: Final = (
    Row(
        "a whole-GPU fault on a partitioned GPU hits all its instances",
        (nvml("gpu 0 xid 48"), unhealthy(f"gpu-0 {PARTS}", "gpu.xid.48: ")),
        **PARTED,
    ),
    Row(
        "a fault that names an instance hits that one",
        (
            nvml("gpu 0 xid 48 gi=1 ci=0"),
            unhealthy("gpu-0-mig-1-0", "gpu.xid.48: "),
            info("gpu-0", "gpu.xid.48: instance 1/0: "),
        ),
        **PARTED,
    ),
    Row(
        "the same by the kernel log",
        (
            kernel(xid_line(48, gi=" GPU-I:02 GPU-CI:00")),
            unhealthy("gpu-0-mig-2-0", "gpu.xid.48: "),
            info("gpu-0", "gpu.xid.48: instance 2/0: "),
        ),
        **PARTED,
    ),
    Row(
        "a line that names none waits for NVML, which does",
        (
            kernel(xid_line(48)),
            nvml("gpu 0 xid 48 gi=1 ci=0"),
            unhealthy("gpu-0-mig-1-0", "gpu.xid.48: "),
            looked(20),
        ),
        **PARTED,
    ),
    Row(
        "what can be read of a partitioned GPU holds for its instances",
        (
            nvml("gpu 0 set recovery_action=1"),
            unhealthy(f"gpu-0 {PARTS}", "gpu.recovery_action: the driver asks for: gpu reset"),
        ),
        **PARTED,
    ),
)

ANNOUNCED: Final = (*XIDS, *EVENTS, *INSTANCES)
