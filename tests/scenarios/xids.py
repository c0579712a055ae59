"""Scenarios with latched faults: XIDs, SXids and other events, on GPUs and on MIG instances."""

from typing import Final

from agents import TRIES

from scenarios.row import BUSES, Row
from scenarios.steps import (
    also_info,
    degraded,
    expect_in_checkpoint,
    info,
    kernel,
    never,
    nvml,
    nvml_and_kernel,
    unhealthy,
    wait_for_passes,
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
            nvml_and_kernel(["gpu 0 xid 48"], xid_line(48)),
            unhealthy("gpu-0", "gpu.xid.48: "),
            wait_for_passes(10),
            expect_in_checkpoint("gpu.xid.48", times=1),
        ),
    ),
    Row(
        "XID 45 after XID 48 is only a consequence",
        (
            nvml_and_kernel(
                ["gpu 0 xid 48", "gpu 0 xid 45"],
                xid_line(48),
                xid_line(45, "pid=1234, name=python3, Ch 00000001 caused by previous Xid 48"),
            ),
            unhealthy("gpu-0", "gpu.xid.48: "),
            also_info("gpu-0", "gpu.xid.45: a channel was cleaned up after another fault: after XID 48"),
        ),
    ),
    Row(
        "a GPU falls off the bus, in a line that is not an XID",
        (
            kernel(f"NVRM: GPU {BUSES[2]}: GPU has fallen off the bus."),
            unhealthy("gpu-2", "gpu.xid.79: the GPU no longer answers on PCIe"),
        ),
        gpus=4,
    ),
    Row(
        "a workload's fault is INFO, and the GPU stays healthy",
        (
            nvml_and_kernel(
                ["gpu 0 xid 31"], xid_line(31, "pid=1234, name=python3, Ch 8, MMU Fault: ENGINE GRAPHICS")
            ),
            info("gpu-0", "gpu.xid.31: memory page fault"),
        ),
    ),
    Row(
        "a contained memory error, and a storm of them",
        (
            nvml("gpu 0 xid 94"),
            degraded("gpu-0", "gpu.xid.94: contained memory error: only its program was affected"),
            nvml(*["gpu 0 xid 94"] * 9),
            unhealthy(
                "gpu-0",
                "gpu.xid.94: contained memory error: only its program was affected: it recurs",
            ),
        ),
    ),
    Row(
        "a conditional XID follows the recovery action",
        (
            nvml("gpu 0 xid 159"),
            info("gpu-0", "gpu.xid.159: fault of the coherent interface: no recovery action is requested"),
            nvml("gpu 0 set recovery_action=4"),
            unhealthy("gpu-0", "gpu."),
        ),
    ),
    Row(
        "an unlisted XID on a driver without recovery action",
        (
            kernel(xid_line(998, "of a driver to come")),
            degraded("gpu-0", "gpu.xid.998: "),
        ),
        branch=535,
    ),
    Row(
        "XID 154 by its text, on a driver without the field",
        (
            kernel(xid_line(154, TO_REBOOT)),
            unhealthy(
                "gpu-0", "gpu.xid.154: the driver requests a recovery action: recovery action: node reboot"
            ),
        ),
        branch=535,
    ),
    Row(
        "XID 154 while the field reports otherwise",
        (
            kernel(xid_line(154, TO_REBOOT)),
            info("gpu-0", "gpu.xid.154: the driver requests a recovery action: recovery action: none"),
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
        "a fault of one switch link affects all GPUs with links",
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
        "a switch shuts down, in a line without severity",
        (
            kernel(f"{SWITCH}10006, TSENSE OVERT Threshold reached. Shutting Down"),
            unhealthy(BOTH, "gpu.fabric.sxid.10006: the switch shuts down: too hot: "),
        ),
        gpus=2,
    ),
    Row(
        "companions of a switch's line are not counted",
        (
            kernel(
                f"{SWITCH}20034, Fatal, Link 30 LTSSM Fault Up",
                f"{SWITCH}20034, Severity 1 Engine instance 30 Sub-engine instance 00",
                f"{SWITCH}20034, Data {{0x00000001, 0x00000000, 0x00000000, 0x00000000}}",
            ),
            degraded(BOTH, "gpu.fabric.sxid.20034: "),
            wait_for_passes(10),
            expect_in_checkpoint("gpu.fabric.sxid.20034", times=1),
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
        "a configured severity outranks the table",
        (
            nvml("gpu 0 xid 48", "gpu 0 xid 31"),
            unhealthy("gpu-0", "gpu.xid.31: memory page fault: unhealthy by configuration"),
            wait_for_passes(10),
            never("gpu.xid.48"),
        ),
        settings={"gpu.xids": {"31": "unhealthy", "48": "ignore"}},
    ),
    Row(
        "a GPU that the driver could not initialize",
        (
            kernel(f"NVRM: GPU {BUSES[0]}: RmInitAdapter failed! (0x62:0xffff:1863)"),
            unhealthy("gpu-0", "gpu.init_failed: the driver could not initialize the GPU"),
        ),
        gpus=2,
    ),
    Row(
        "the driver cannot determine which links are up",
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
        "log lines from before the agent's start count",
        # stays unresolved however long the start takes
        (unhealthy("gpu-0", "gpu.xid.79: the GPU no longer answers on PCIe"),),
        gpus=2,
        logged=(xid_line(79),),
    ),
    Row(
        "log lines written by a process are ignored",
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
    Row("contained poison", (nvml("gpu 0 event 0x1000"), degraded("gpu-0", "gpu.poison.contained: "))),
    Row(
        "bad memory could not be retired",
        (nvml("gpu 0 event 0x800"), unhealthy("gpu-0", "gpu.retirement.failed: ")),
    ),
    Row("bad memory was retired", (nvml("gpu 0 event 0x400"), info("gpu-0", "gpu.retirement: "))),
    Row("a storm of correctable errors", (nvml("gpu 0 event 0x200"), degraded("gpu-0", "gpu.ecc.storm: "))),
)

INSTANCES: Final = (
    Row(
        "a fault of a partitioned GPU affects all its instances",
        (nvml("gpu 0 xid 48"), unhealthy(f"gpu-0 {PARTS}", "gpu.xid.48: ")),
        **PARTED,
    ),
    Row(
        "an NVML fault of an instance affects that instance",
        (
            nvml("gpu 0 xid 48 gi=1 ci=0"),
            unhealthy("gpu-0-mig-1-0", "gpu.xid.48: "),
            info("gpu-0", "gpu.xid.48: instance 1/0: "),
        ),
        **PARTED,
    ),
    Row(
        "a kernel log fault of an instance affects that instance",
        (
            kernel(xid_line(48, gi=" GPU-I:02 GPU-CI:00")),
            unhealthy("gpu-0-mig-2-0", "gpu.xid.48: "),
            info("gpu-0", "gpu.xid.48: instance 2/0: "),
        ),
        **PARTED,
    ),
    Row(
        "a line without instance waits for NVML to name it",
        (
            kernel(xid_line(48)),
            nvml("gpu 0 xid 48 gi=1 ci=0"),
            unhealthy("gpu-0-mig-1-0", "gpu.xid.48: "),
            wait_for_passes(20),
        ),
        **PARTED,
        tries=TRIES,  # it waits for a second
    ),
    Row(
        "findings of a partitioned GPU hold for its instances",
        (
            nvml("gpu 0 set recovery_action=1"),
            unhealthy(f"gpu-0 {PARTS}", "gpu.recovery_action: the driver requests: gpu reset"),
        ),
        **PARTED,
    ),
)

ANNOUNCED: Final = (*XIDS, *EVENTS, *INSTANCES)
