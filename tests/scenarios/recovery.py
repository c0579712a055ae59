"""Scenarios with the end of faults, and with restarts of the agent."""

from typing import Final

from scenarios.row import Row
from scenarios.steps import (
    SOURCE_OK,
    also_unhealthy,
    also_unknown,
    crash_process,
    expect_in_checkpoint,
    expect_log,
    healthy,
    kernel,
    never,
    nvml,
    reboot_machine,
    restart_agent,
    source,
    unhealthy,
    unknown,
    wait_for_passes,
    xid_line,
)

CURES: Final = (
    Row(
        "a crash of NVML keeps latched faults, and the kernel log reports new ones meanwhile",
        (
            nvml("gpu 0 xid 79"),
            unhealthy("gpu-0", "gpu.xid.79: "),
            healthy("gpu-1"),
            crash_process("crash segv"),
            also_unknown("gpu-0", "gpu.driver.process: the NVML process was killed by SIGSEGV"),
            unknown("gpu-1", "gpu.driver.process: "),
            kernel(xid_line(95, gpu=1)),
            unhealthy("gpu-1", "gpu.xid.95: "),
            source("nvml", SOURCE_OK),
            wait_for_passes(5),
            unhealthy("gpu-0", "gpu.xid.79: "),
            unhealthy("gpu-1", "gpu.xid.95: "),
            never("gpu.driver.reloaded"),
        ),
        gpus=2,
    ),
    Row(
        "a detected reset resolves a fault that needs one",
        (
            nvml("gpu 0 set ecc.dram.correctable.volatile=+5", "gpu 0 xid 46"),
            unhealthy("gpu-0", "gpu.xid.46: the GPU stopped making progress"),
            wait_for_passes(5),
            nvml("gpu 0 reset"),
            healthy("gpu-0"),
        ),
        gpus=2,
    ),
    Row(
        "a withdrawn recovery action resolves its fault",
        (
            nvml("gpu 0 set recovery_action=1", "gpu 0 xid 48"),
            unhealthy("gpu-0", "gpu."),
            also_unhealthy("gpu-0", "gpu.xid.48: "),
            wait_for_passes(5),
            nvml("gpu 0 set recovery_action=0"),
            healthy("gpu-0"),
        ),
        gpus=2,
    ),
    Row(
        "a pending remapping outlasts the recovery action",
        (
            nvml("gpu 0 set remap.pending=1", "gpu 0 xid 95"),
            unhealthy("gpu-0", "gpu.xid.95: "),
            wait_for_passes(120),
            nvml("gpu 0 reset"),
            healthy("gpu-0"),
        ),
    ),
    Row(
        "a reboot resolves a fault that needs one",
        (
            nvml("gpu 0 xid 79"),
            unhealthy("gpu-0", "gpu.xid.79: "),
            expect_in_checkpoint("gpu.xid.79", healed=False),
            reboot_machine(),
            expect_log("gpu-0 Unhealthy gpu.xid.79: "),  # for a second: clients may connect later
            healthy("gpu-0"),
        ),
        gpus=2,
    ),
    Row(
        "a GPU lost again after a reboot points to hardware",
        (
            nvml("gpu 0 xid 79"),
            unhealthy("gpu-0", "gpu.xid.79: "),
            expect_in_checkpoint("gpu.xid.79", healed=False),
            reboot_machine(),
            expect_log("gpu-0 Unhealthy gpu.xid.79: "),  # for a second: clients may connect later
            healthy("gpu-0"),
            nvml("gpu 0 xid 79"),
            unhealthy("gpu-0", "gpu.xid.79: the GPU no longer answers on PCIe: it recurred within 30 days"),
        ),
        gpus=2,
    ),
    Row(
        "a fault that needs a replacement outlasts a reboot",
        (
            nvml("gpu 0 set remap.failure=1", "gpu 0 xid 64"),
            unhealthy("gpu-0", "gpu."),
            also_unhealthy(
                "gpu-0", "gpu.xid.64: replacing a bad memory row or page failed: rows can no longer"
            ),
            expect_in_checkpoint("gpu.xid.64", cure="replace"),
            reboot_machine("gpu 0 set remap.failure=1"),
            unhealthy("gpu-0", "gpu."),
            also_unhealthy("gpu-0", "gpu.xid.64: "),
            wait_for_passes(20),
            reboot_machine("gpu 0 replace"),
            healthy("gpu-0"),
        ),
        gpus=2,
    ),
    Row(
        "a new fault restarts the probation",
        (
            nvml("gpu 0 set recovery_action=1"),
            unhealthy("gpu-0", "gpu.recovery_action: the driver requests: gpu reset"),
            nvml("gpu 0 set recovery_action=0"),
            wait_for_passes(10),
            nvml("gpu 0 set recovery_action=2"),
            unhealthy("gpu-0", "gpu.recovery_action: the driver requests: node reboot"),
            nvml("gpu 0 set recovery_action=0"),
            healthy("gpu-0"),
        ),
        settings={"gpu": {"probation": "12s"}},
    ),
)

# A driver that asks for nothing ends most of what was only announced in ten seconds; XID 79 waits for a boot.
RESTARTS: Final = (
    Row(
        "the agent is restarted during a latched fault",
        (
            nvml("gpu 0 set recovery_action=1", "gpu 0 xid 48"),
            unhealthy("gpu-0", "gpu."),
            also_unhealthy("gpu-0", "gpu.xid.48: "),
            expect_in_checkpoint("gpu.xid.48"),
            restart_agent("gpu 0 set recovery_action=1"),
            unhealthy("gpu-0", "gpu."),
            also_unhealthy("gpu-0", "gpu.xid.48: uncorrectable (two-bit) ECC error"),
        ),
        gpus=2,
    ),
    Row(
        "the agent is killed during a fault",
        (
            nvml("gpu 0 xid 79"),
            unhealthy("gpu-0", "gpu.xid.79: "),
            expect_in_checkpoint("gpu.xid.79"),
            restart_agent(kill=True),
            unhealthy("gpu-0", "gpu.xid.79: "),
            wait_for_passes(20),
        ),
        gpus=2,
    ),
    Row(
        "old log lines are not counted again after a restart",
        (
            kernel(xid_line(79)),
            unhealthy("gpu-0", "gpu.xid.79: "),
            expect_in_checkpoint("gpu.xid.79", times=1),
            restart_agent(),
            unhealthy("gpu-0", "gpu.xid.79: "),
            wait_for_passes(20),
            expect_in_checkpoint("gpu.xid.79", times=1),
        ),
        gpus=2,
    ),
    Row(
        "a corrupt checkpoint is reported and set aside",
        (
            nvml("gpu 0 set remap.failure=1"),
            unhealthy("gpu-0", "gpu.remap.failure: "),
            nvml("gpu 1 xid 62"),
            unhealthy("gpu-1", "gpu.xid.62: "),
            expect_in_checkpoint("gpu.xid.62"),
            restart_agent("gpu 0 set remap.failure=1", file='{"version": 1, "gpus": ['),
            expect_log("renamed to gpu-faults.json.corrupt-1"),
            unhealthy("gpu-0", "gpu.remap.failure: "),
            healthy("gpu-1"),
        ),
        gpus=2,
    ),
    Row(
        "a checkpoint of a later version is set aside",
        (
            nvml("gpu 0 xid 62"),
            unhealthy("gpu-0", "gpu.xid.62: "),
            expect_in_checkpoint("gpu.xid.62"),
            restart_agent(file='{"version": 99}'),
            expect_log("renamed to gpu-faults.json.newer-1"),
            healthy("gpu-0"),
        ),
        gpus=2,
    ),
)

RECOVERIES: Final = (*CURES, *RESTARTS)
