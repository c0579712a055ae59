"""Calls that do not return, and floods: what they do to other GPUs, to memory and to the agent's end."""

from typing import Final

from scenarios.row import Row
from scenarios.steps import (
    also_info,
    also_unknown,
    ended,
    grown_less_than,
    healthy,
    info,
    kernel,
    looked,
    nvml,
    unhealthy,
    unknown,
    xid_line,
)

SHORT: Final = {"gpu": {"deadline": "1s", "dead": "3s"}}
SILENT: Final = "gpu.not_answering: nvmlDeviceGetFieldValues not answered for more than 1 s"
LOCKED: Final = "gpu.not_answering: "
ALL: Final = "gpu-0 gpu-1 gpu-2"
FLOOD_MIB: Final = 24.0

HANGS: Final = (
    Row(
        "a GPU that hangs is Unknown, then Unhealthy, and taken back when it answers",
        (
            nvml("gpu 1 hang nvmlDeviceGetFieldValues"),
            unknown("gpu-1", SILENT),
            unhealthy("gpu-1", "gpu.not_answering: "),
            looked(10, "gpu-2"),
            nvml("gpu 1 release"),
            healthy("gpu-1"),
        ),
        gpus=3,
        settings=SHORT,
    ),
    Row(
        "a GPU that hangs does not keep another's fault from being told",
        (
            nvml("gpu 0 hang all"),
            unknown("gpu-0", "gpu.not_answering: "),
            nvml("gpu 2 xid 48"),
            unhealthy("gpu-2", "gpu.xid.48: "),
            nvml("gpu 0 release"),
            healthy("gpu-0"),
        ),
        gpus=3,
        settings={"gpu": {"deadline": "1s", "dead": "1m"}},
    ),
    Row(
        "a lock inside the driver holds them all, each by its own deadline; SIGTERM ends it all the same",
        (
            nvml("gpu 1 hang nvmlDeviceGetFieldValues lock"),
            unknown(ALL, LOCKED),
            ended(),
        ),
        gpus=3,
        settings={"gpu": {"deadline": "1s", "dead": "1m"}},
    ),
    Row(
        "a lock inside the driver that is let go",
        (
            nvml("gpu 1 hang nvmlDeviceGetFieldValues lock"),
            unknown(ALL, LOCKED),
            nvml("gpu 1 release"),
            healthy(ALL),
        ),
        gpus=3,
        settings={"gpu": {"deadline": "1s", "dead": "1m"}},
    ),
    Row(
        "NVML that hangs while it is opened, and answers after all",
        (
            unknown("gpu-0 gpu-1", "gpu."),
            also_unknown("gpu-0 gpu-1", "gpu.not_answering: nvmlInit not answered for more than 1 s"),
            healthy("gpu-0 gpu-1"),
        ),
        gpus=2,
        setup=("init hang 8s",),
        settings={"gpu": {"deadline": "1s", "dead": "1m"}, "expect": {"gpus": 2}},
    ),
    Row(
        "NVML that hangs while it is opened; SIGTERM ends it all the same",
        (
            unknown("gpu-0 gpu-1", "gpu."),
            also_unknown("gpu-0 gpu-1", "gpu.not_answering: nvmlInit not answered for more than 1 s"),
            ended(),
        ),
        gpus=2,
        setup=("init hang 600s",),
        settings={"gpu": {"deadline": "1s", "dead": "1m"}, "expect": {"gpus": 2}},
    ),
)

FLOODS: Final = (
    Row(
        "10,000 XIDs a second from NVML, and the one that matters among them",
        (
            nvml("gpu 0 xid 31"),
            info("gpu-0", "gpu.xid.31: "),
            grown_less_than(
                FLOOD_MIB,
                nvml("storm gpu 0 xid 31 rate=10000 for=4s"),
                looked(20, "gpu-1"),
                nvml("gpu 1 xid 48"),
                unhealthy("gpu-1", "gpu.xid.48: "),
                looked(20, "gpu-1"),
                nvml("gpu 0 xid 79"),
                unhealthy("gpu-0", "gpu.xid.79: "),
                also_info("gpu-0", "gpu.xid.31: "),
            ),
        ),
        gpus=2,
    ),
    Row(
        "100,000 lines of the kernel log, and the one that matters behind them",
        (
            kernel(xid_line(31)),
            info("gpu-0", "gpu.xid.31: "),
            grown_less_than(
                FLOOD_MIB,
                kernel(
                    *(xid_line(31, f"pid={pid}, name=python3, Ch {pid:08x}") for pid in range(1000)),
                    times=100,
                ),
                kernel(xid_line(79, gpu=1)),
                unhealthy("gpu-1", "gpu.xid.79: "),
                looked(20),
                also_info("gpu-0", "gpu.xid.31: "),
            ),
        ),
        gpus=2,
    ),
)

TROUBLES: Final = (*HANGS, *FLOODS)
