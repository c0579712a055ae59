"""Scenarios with the driver: lost GPUs, unusable NVML, reloads, missing GPUs, partitions."""

from typing import Final

from scenarios.row import Process, Row
from scenarios.steps import (
    SOURCE_FAILING,
    SOURCE_OK,
    also_unhealthy,
    bind_gpu,
    degraded,
    end_process,
    healthy,
    info,
    install_library,
    never,
    nvml,
    source,
    unhealthy,
    unknown,
    wait_for_passes,
    wait_for_rule,
)

ALL: Final = "gpu-0 gpu-1"
SEVEN: Final = "gpu-0 gpu-1 gpu-2 gpu-3 gpu-4 gpu-5 gpu-6"
FAIL: Final = ("gpu 0 fail all 1", "gpu 1 fail all 1")
ANSWER: Final = ("gpu 0 fail all 0", "gpu 1 fail all 0")
RELOADED: Final = "gpu.driver.reloaded: 1 time since the agent started"

ANSWERS: Final = (
    Row(
        "one of eight GPUs is lost",
        (
            nvml("gpu 3 lost"),
            unhealthy("gpu-3", "gpu."),
            also_unhealthy("gpu-3", "gpu.lost: NVML returned GPU_IS_LOST (15)"),
            also_unhealthy("gpu-3", "gpu.unavailable: "),
            wait_for_passes(10, "gpu-7"),
            nvml("gpu 3 back"),
            healthy("gpu-3"),
        ),
        gpus=8,
    ),
    Row(
        "a GPU that is lost before the agent starts",
        (unhealthy("gpu-1", "gpu.lost: "), wait_for_passes(10, "gpu-2")),
        gpus=3,
        setup=("gpu 1 lost",),
    ),
    Row(
        "the driver requires a reset of a GPU",
        (
            nvml("gpu 1 fail all 16"),
            unhealthy("gpu-1", "gpu.reset_required: NVML returned RESET_REQUIRED (16)"),
            nvml("gpu 1 fail all 0"),
            healthy("gpu-1"),
        ),
        gpus=2,
    ),
    Row(
        "a lost GPU that requires a reset before it answers",
        (
            nvml("gpu 0 lost"),
            unhealthy("gpu-0", "gpu."),
            nvml("gpu 0 fail all 16", "gpu 0 back"),
            also_unhealthy("gpu-0", "gpu.reset_required: NVML returned RESET_REQUIRED (16)"),
            wait_for_passes(3),
            nvml("gpu 0 fail all 0"),
            healthy("gpu-0"),
            never("gpu.nvlink.errors.unreadable"),
            never("gpu.ecc.uncorrectable.unreadable"),
        ),
        gpus=2,
        settings={"gpu": {"slow-period": "1m"}},
    ),
    Row(
        "readings fail with another return code",
        (
            nvml("gpu 0 fail nvmlDeviceGetFieldValues 999"),
            unknown("gpu-0", "gpu."),
            nvml("gpu 0 fail nvmlDeviceGetFieldValues 0"),
            healthy("gpu-0"),
        ),
        gpus=2,
    ),
    Row(
        "a GPU answers much more slowly than its siblings",
        (
            nvml("gpu 2 slow 60ms"),
            degraded("gpu-2", "gpu.probe.slow: readings take at least 50 ms, and 10 times as long as others"),
            nvml("gpu 2 slow 0s"),
            healthy("gpu-2"),
        ),
        gpus=4,
        settings={"gpu": {"slow-period": "1m"}},
        limit_s=60,
    ),
)

DRIVER: Final = (
    Row(
        "GPUs on the bus without a driver",
        (unknown(ALL, "gpu.driver.init: NVML cannot be used: DRIVER_NOT_LOADED (9)"),),
        gpus=2,
        setup=("init 9",),
    ),
    Row(
        "GPUs expected by the configuration without a driver",
        (unknown("gpu-0 gpu-1 gpu-2", "gpu.driver.init: NVML cannot be used: DRIVER_NOT_LOADED (9)"),),
        gpus=2,
        setup=("init 9",),
        settings={"expect": {"gpus": 3}},
    ),
    Row(
        "driver libraries updated while the old module is loaded",
        (
            unknown(ALL, "gpu.driver.mismatch: library and kernel module have different driver versions"),
            nvml("init 0"),
            healthy(ALL),
        ),
        gpus=2,
        setup=("init 18",),
    ),
    Row(
        "the library is installed after the agent's start, with expected GPUs",
        (
            unknown(ALL, "gpu.driver.init: NVML cannot be used: LIBRARY_NOT_FOUND (12)"),
            install_library(),
            healthy(ALL),
            source("nvml-events", SOURCE_OK),
            wait_for_passes(5),
            nvml("gpu 0 xid 48"),
            unhealthy("gpu-0", "gpu.xid.48: "),
        ),
        gpus=2,
        library=False,
        settings={"expect": {"gpus": 2}},
    ),
    Row(
        "the library is installed after the agent's start, without expected GPUs",
        (
            unknown(ALL, "gpu.driver.init: NVML cannot be used: LIBRARY_NOT_FOUND (12): "),
            install_library(),
            healthy(ALL),
        ),
        gpus=2,
        library=False,
    ),
    Row(
        "the driver is reloaded",
        (
            # the agent may open NVML again before it has read both GPUs: they fail longer than that
            nvml("init hang 600s", *FAIL, "reload driver=580.105.08", "init hang 0s"),
            unknown(ALL, "gpu.failing: NVML returned UNINITIALIZED (1)"),
            nvml(*ANSWER),
            info(ALL, RELOADED),
            source("nvml-events", SOURCE_OK),
            wait_for_passes(5),
            nvml("gpu 1 xid 48"),
            unhealthy("gpu-1", "gpu.xid.48: "),
        ),
        gpus=2,
    ),
    Row(
        "the driver is unloaded and loaded again",
        (
            nvml("init 9", "reload"),
            unknown(ALL, "gpu.driver.init: NVML cannot be used: DRIVER_NOT_LOADED (9)"),
            nvml("init 0"),
            info(ALL, RELOADED),
        ),
        gpus=2,
    ),
    Row(
        "one GPU fewer after a reload",
        (
            nvml("init 9", "reload gpus=7"),
            unknown(f"{SEVEN} gpu-7", "gpu."),  # failing, or without a driver if NVML was opened again
            nvml("init 0"),
            unhealthy("gpu-7", "gpu.missing: not among the 7 GPUs of NVML; 0000:df:00.0 is still on"),
            info(SEVEN, RELOADED),
            nvml("init 9", "reload gpus=8"),
            unknown(SEVEN, "gpu."),
            nvml("init 0"),
            info(f"{SEVEN} gpu-7", "gpu.driver.reloaded: 2 times since the agent started"),
        ),
        gpus=8,
    ),
    Row(
        "a GPU is assigned to a virtual machine and returned",
        (
            nvml("init 9", "reload gpus=7"),
            unknown(f"{SEVEN} gpu-7", "gpu."),
            bind_gpu(7, "vfio-pci"),
            nvml("init 0"),
            unhealthy(
                "gpu-7", "gpu.unbound: 0000:df:00.0 is assigned to a virtual machine: vfio-pci is bound to it"
            ),
            info(SEVEN, RELOADED),
            bind_gpu(7, "nvidia"),
            nvml("init 9", "reload gpus=8"),
            unknown(SEVEN, "gpu."),
            nvml("init 0"),
            info(f"{SEVEN} gpu-7", "gpu.driver.reloaded: 2 times since the agent started"),
        ),
        gpus=8,
    ),
    Row(
        "fewer GPUs than the configuration expects",
        (unhealthy("gpu-2", "gpu.missing: not among the 2 GPUs of NVML; 3 expected by configuration"),),
        gpus=2,
        settings={"expect": {"gpus": 3}},
    ),
    Row(
        "persistence mode is off",
        (
            nvml("gpu 0 set persistence=0"),
            info("gpu-0", "gpu.driver.persistence_off: persistence mode is off"),
        ),
    ),
    Row(
        "a failed wait for events is no verdict, and is retried",
        (
            nvml("wait 999"),
            source("nvml-events", SOURCE_FAILING),
            nvml("wait 0"),
            source("nvml-events", SOURCE_OK),
            nvml("gpu 1 xid 48"),
            unhealthy("gpu-1", "gpu.xid.48: "),
        ),
        gpus=2,
    ),
    Row(
        "driver 535 without the newer functions is healthy",
        (
            wait_for_passes(10),
            nvml("gpu 0 xid 79"),
            unhealthy("gpu-0", "gpu.xid.79: "),
        ),
        gpus=2,
        branch=535,
    ),
    Row(
        "a T4 without the newer readings is healthy",
        (wait_for_passes(10), nvml("gpu 0 xid 48"), unhealthy("gpu-0", "gpu.xid.48: ")),
        gpus=2,
        profile="t4",
    ),
    Row(
        "processes stuck in the driver in three samples",
        (degraded(ALL, "gpu.driver.stuck_process: stuck in the driver: python3 (4711)"),),
        gpus=2,
        processes={4711: Process("python3", "D", "[<0>] os_acquire_mutex+0x3f/0x50 [nvidia]\n")},
        limit_s=150,
    ),
    Row(
        "the fabric manager ends",
        (
            wait_for_rule("gpu-0", "gpu.fabric.manager"),
            end_process(4712),
            degraded(ALL, "gpu.fabric.manager: nv-fabricmanager was running, and is not any more"),
        ),
        gpus=2,
        limit_s=90,
        processes={4712: Process("nv-fabricmanager")},
    ),
)

PARTITIONS: Final = (
    Row(
        "a GPU is repartitioned while the agent runs",
        (
            wait_for_passes(5),
            nvml("gpu 0 mig 1g.5gb 1g.5gb"),
            unknown("gpu-0-mig-1-0 gpu-0-mig-2-0", "gpu.mig.gone: the MIG instance no longer exists"),
            healthy("gpu-0-mig-7-0 gpu-0-mig-8-0"),
            nvml("gpu 0 xid 48 gi=8 ci=0"),
            unhealthy("gpu-0-mig-8-0", "gpu.xid.48: "),
            info("gpu-0", "gpu.xid.48: instance 8/0: "),
        ),
        profile="a100",
        gpus=2,
        setup=("gpu 0 mig 3g.20gb 3g.20gb",),
    ),
    Row(
        "MIG is switched on and off",
        (
            nvml("gpu 1 mig 7g.40gb"),
            healthy("gpu-1-mig-0-0"),
            nvml("gpu 1 mig off"),
            unknown("gpu-1-mig-0-0", "gpu.mig.gone: the MIG instance no longer exists"),
        ),
        profile="a100",
        gpus=2,
    ),
)

WHOLE: Final = (*ANSWERS, *DRIVER, *PARTITIONS)
