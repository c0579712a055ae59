"""What ends a fault, what does not, and what is remembered from one agent to the next."""

from typing import Final

from scenarios.row import Row
from scenarios.steps import (
    also_unhealthy,
    healthy,
    kept,
    kernel,
    logged,
    looked,
    nvml,
    rebooted,
    restarted,
    unhealthy,
    xid_line,
)

CURES: Final = (
    Row(
        "a reset that was seen ends what a reset mends",
        (
            nvml("gpu 0 set ecc.dram.correctable.volatile=+5", "gpu 0 xid 46"),
            unhealthy("gpu-0", "gpu.xid.46: the GPU stopped making progress"),
            looked(5),
            nvml("gpu 0 reset"),
            healthy("gpu-0"),
        ),
        gpus=2,
    ),
    Row(
        "the driver that asks for nothing more ends what it had asked for",
        (
            nvml("gpu 0 set recovery_action=1", "gpu 0 xid 48"),
            unhealthy("gpu-0", "gpu."),
            also_unhealthy("gpu-0", "gpu.xid.48: "),
            looked(5),
            nvml("gpu 0 set recovery_action=0"),
            healthy("gpu-0"),
        ),
        gpus=2,
    ),
    Row(
        "a row that waits for its reset outlasts the driver's word",
        (
            nvml("gpu 0 set remap.pending=1", "gpu 0 xid 95"),
            unhealthy("gpu-0", "gpu.xid.95: "),
            looked(120),
            nvml("gpu 0 reset"),
            healthy("gpu-0"),
        ),
    ),
    Row(
        "a boot ends what a boot mends",
        (
            nvml("gpu 0 xid 79"),
            unhealthy("gpu-0", "gpu.xid.79: "),
            kept("gpu.xid.79", healed=False),
            rebooted(),
            unhealthy("gpu-0", "gpu.xid.79: "),
            healthy("gpu-0"),
        ),
        gpus=2,
    ),
    Row(
        "a GPU that is lost again after a boot is broken",
        (
            nvml("gpu 0 xid 79"),
            unhealthy("gpu-0", "gpu.xid.79: "),
            kept("gpu.xid.79", healed=False),
            rebooted(),
            unhealthy("gpu-0", "gpu.xid.79: "),
            healthy("gpu-0"),
            nvml("gpu 0 xid 79"),
            unhealthy("gpu-0", "gpu.xid.79: the GPU no longer answers on PCIe: it came back within a day"),
        ),
        gpus=2,
    ),
    Row(
        "what only another GPU mends outlasts a boot, until there is another",
        (
            nvml("gpu 0 set remap.failure=1", "gpu 0 xid 64"),
            unhealthy("gpu-0", "gpu."),
            also_unhealthy(
                "gpu-0", "gpu.xid.64: replacing a bad memory row or page failed: rows can no longer"
            ),
            kept("gpu.xid.64", cure="replace"),
            rebooted("gpu 0 set remap.failure=1"),
            unhealthy("gpu-0", "gpu."),
            also_unhealthy("gpu-0", "gpu.xid.64: "),
            looked(20),
            rebooted("gpu 0 replace"),
            healthy("gpu-0"),
        ),
        gpus=2,
    ),
    Row(
        "a new fault breaks a probation, which then begins anew",
        (
            nvml("gpu 0 set recovery_action=1"),
            unhealthy("gpu-0", "gpu.recovery_action: the driver asks for: gpu reset"),
            nvml("gpu 0 set recovery_action=0"),
            looked(30),
            nvml("gpu 0 set recovery_action=2"),
            unhealthy("gpu-0", "gpu.recovery_action: the driver asks for: node reboot"),
            nvml("gpu 0 set recovery_action=0"),
            healthy("gpu-0"),
        ),
        settings={"gpu": {"probation": "6s"}},
    ),
)

# A driver that asks for nothing ends most of what was only announced in ten seconds; XID 79 waits for a boot.
RESTARTS: Final = (
    Row(
        "the agent is restarted in the middle of a fault that nobody can read again",
        (
            nvml("gpu 0 set recovery_action=1", "gpu 0 xid 48"),
            unhealthy("gpu-0", "gpu."),
            also_unhealthy("gpu-0", "gpu.xid.48: "),
            restarted("gpu 0 set recovery_action=1"),
            unhealthy("gpu-0", "gpu."),
            also_unhealthy("gpu-0", "gpu.xid.48: uncorrectable (two-bit) ECC error"),
        ),
        gpus=2,
    ),
    Row(
        "the agent is killed in the middle of a fault",
        (
            nvml("gpu 0 xid 79"),
            unhealthy("gpu-0", "gpu.xid.79: "),
            kept("gpu.xid.79"),
            restarted(kill=True),
            unhealthy("gpu-0", "gpu.xid.79: "),
            looked(20),
        ),
        gpus=2,
    ),
    Row(
        "the log's old lines are not counted again after a restart",
        (
            kernel(xid_line(79)),
            unhealthy("gpu-0", "gpu.xid.79: "),
            kept("gpu.xid.79", times=1),
            restarted(),
            unhealthy("gpu-0", "gpu.xid.79: "),
            looked(20),
            kept("gpu.xid.79", times=1),
        ),
        gpus=2,
    ),
    Row(
        "a file of faults that makes no sense is told of, set aside and survived",
        (
            nvml("gpu 0 set remap.failure=1"),
            unhealthy("gpu-0", "gpu.remap.failure: "),
            nvml("gpu 1 xid 62"),
            unhealthy("gpu-1", "gpu.xid.62: "),
            kept("gpu.xid.62"),
            restarted("gpu 0 set remap.failure=1", file='{"version": 1, "gpus": ['),
            logged("set aside as gpu-faults.json.corrupt-1"),
            unhealthy("gpu-0", "gpu.remap.failure: "),
            healthy("gpu-1"),
        ),
        gpus=2,
    ),
    Row(
        "a file of faults that a later version wrote is set aside as well",
        (
            nvml("gpu 0 xid 62"),
            unhealthy("gpu-0", "gpu.xid.62: "),
            kept("gpu.xid.62"),
            restarted(file='{"version": 99}'),
            logged("set aside as gpu-faults.json.newer-1"),
            healthy("gpu-0"),
        ),
        gpus=2,
    ),
)

RECOVERIES: Final = (*CURES, *RESTARTS)
