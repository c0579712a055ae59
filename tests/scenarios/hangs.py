"""Scenarios with calls that hang, and with floods: their effect on other GPUs, memory and SIGTERM."""

from typing import Final

from scenarios.row import Row
from scenarios.steps import (
    also_info,
    also_unknown,
    healthy,
    info,
    kernel,
    memory_grows_less_than,
    nvml,
    repeat_until,
    stop_agent,
    unhealthy,
    unknown,
    wait_for_passes,
    xid_line,
)

DEADLINE: Final = "4s"
"""Deadline of a call, which a GPU that does not hang keeps, also on a busy machine."""
SHORT: Final = {"gpu": {"deadline": DEADLINE, "dead": "14s"}}
LONG: Final = {"gpu": {"deadline": DEADLINE, "dead": "1m"}}
SILENT: Final = "gpu.not_answering: nvmlDeviceGetFieldValues has not returned for more than "
NO_INIT: Final = "gpu.not_answering: nvmlInit has not returned for more than "
LOCKED: Final = "gpu.not_answering: "
ALL: Final = "gpu-0 gpu-1 gpu-2"
FLOOD_MIB: Final = 24.0

HANGS: Final = (
    Row(
        "a hanging GPU is Unknown, then Unhealthy, and recovers when it answers",
        (
            nvml("gpu 1 hang nvmlDeviceGetFieldValues"),
            unknown("gpu-1", SILENT),
            unhealthy("gpu-1", "gpu.not_answering: "),
            wait_for_passes(10, "gpu-2"),
            nvml("gpu 1 release"),
            healthy("gpu-1"),
        ),
        gpus=3,
        settings=SHORT,
    ),
    Row(
        "a hanging GPU does not delay the fault of another GPU",
        (
            nvml("gpu 0 hang all"),
            unknown("gpu-0", "gpu.not_answering: "),
            nvml("gpu 2 xid 48"),
            unhealthy("gpu-2", "gpu.xid.48: "),
            nvml("gpu 0 release"),
            healthy("gpu-0"),
        ),
        gpus=3,
        settings=LONG,
    ),
    Row(
        "a lock in the driver blocks all GPUs, and SIGTERM still stops the agent",
        (
            nvml("gpu 1 hang nvmlDeviceGetFieldValues lock"),
            unknown(ALL, LOCKED),
            stop_agent(),
        ),
        gpus=3,
        settings=LONG,
    ),
    Row(
        "a lock in the driver blocks all GPUs and is released",
        (
            nvml("gpu 1 hang nvmlDeviceGetFieldValues lock"),
            unknown(ALL, LOCKED),
            nvml("gpu 1 release"),
            healthy(ALL),
        ),
        gpus=3,
        settings=LONG,
    ),
    Row(
        "nvmlInit hangs and returns later",
        (
            unknown("gpu-0 gpu-1", "gpu."),
            also_unknown("gpu-0 gpu-1", NO_INIT),
            nvml("init hang 0s"),
            healthy("gpu-0 gpu-1"),
        ),
        gpus=2,
        setup=("init hang 600s",),
        settings=LONG | {"expect": {"gpus": 2}},
    ),
    Row(
        "nvmlInit hangs, and SIGTERM still stops the agent",
        (
            unknown("gpu-0 gpu-1", "gpu."),
            also_unknown("gpu-0 gpu-1", NO_INIT),
            stop_agent(),
        ),
        gpus=2,
        setup=("init hang 600s",),
        settings=LONG | {"expect": {"gpus": 2}},
    ),
)

FLOODS: Final = (
    Row(
        "10,000 XIDs a second from NVML do not hide a severe one",
        (
            nvml("gpu 0 xid 31"),
            info("gpu-0", "gpu.xid.31: "),
            memory_grows_less_than(
                FLOOD_MIB,
                nvml("storm gpu 0 xid 31 rate=10000 for=4s"),
                wait_for_passes(20, "gpu-1"),
                repeat_until("gpu 1 xid 48", "gpu-1", "gpu.xid.48: "),
                unhealthy("gpu-1", "gpu.xid.48: "),
                wait_for_passes(20, "gpu-1"),
                repeat_until("gpu 0 xid 79", "gpu-0", "gpu.xid.79: "),
                unhealthy("gpu-0", "gpu.xid.79: "),
                also_info("gpu-0", "gpu.xid.31: "),
            ),
        ),
        gpus=2,
    ),
    Row(
        "100,000 kernel log lines do not hide a severe one",
        (
            kernel(xid_line(31)),
            info("gpu-0", "gpu.xid.31: "),
            memory_grows_less_than(
                FLOOD_MIB,
                kernel(
                    *(xid_line(31, f"pid={pid}, name=python3, Ch {pid:08x}") for pid in range(1000)),
                    times=100,
                ),
                kernel(xid_line(79, gpu=1)),
                unhealthy("gpu-1", "gpu.xid.79: "),
                wait_for_passes(20),
                also_info("gpu-0", "gpu.xid.31: "),
            ),
        ),
        gpus=2,
    ),
)

TROUBLES: Final = (*HANGS, *FLOODS)
