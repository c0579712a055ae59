"""Scenarios with readings of a GPU: recovery action, memory, links, fabric, PCIe, heat and power."""

from typing import Final

from scenarios.row import Row
from scenarios.steps import (
    aer,
    also_degraded,
    also_unhealthy,
    degraded,
    healthy,
    info,
    never,
    nvml,
    unhealthy,
    unknown,
    wait_for_passes,
)

DEMANDS: Final = (
    Row(
        "the driver requests a reset, then withdraws it",
        (
            nvml("gpu 0 set recovery_action=1"),
            unhealthy("gpu-0", "gpu.recovery_action: the driver requests: gpu reset"),
            nvml("gpu 0 set recovery_action=0"),
            healthy("gpu-0"),
        ),
    ),
    Row(
        "an event reports a recovery action before the next pass",
        (
            nvml("gpu 0 set recovery_action=2", "gpu 0 event 0x8000"),
            unhealthy("gpu-0", "gpu.recovery_action: the driver requests: node reboot"),
        ),
        period="40s",
        settings={"gpu": {"slow-period": "40s"}},
    ),
    Row(
        "a recovery action of a newer driver is not none",
        (
            nvml("gpu 0 set recovery_action=9"),
            unhealthy("gpu-0", "gpu.recovery_action: the driver requests: action 9"),
        ),
    ),
    Row(
        "an unreadable recovery action is not none",
        (
            nvml("gpu 0 fail field 230 999"),
            unknown("gpu-0", "gpu.recovery_action.unreadable: "),
            nvml("gpu 0 fail field 230 0"),
            healthy("gpu-0"),
        ),
    ),
)

MEMORY: Final = (
    Row(
        "uncorrectable errors contained by the driver",
        (
            nvml("gpu 0 set ecc.dram.uncorrectable.volatile=+2"),
            degraded(
                "gpu-0", "gpu.ecc.uncorrectable: 2 uncorrectable errors in DRAM since the driver was loaded"
            ),
            nvml("gpu 0 reset"),
            healthy("gpu-0"),
        ),
    ),
    Row(
        "uncorrectable errors on a driver without recovery action",
        (
            nvml("gpu 0 set ecc.sram.uncorrectable.volatile=+1"),
            unhealthy(
                "gpu-0", "gpu.ecc.uncorrectable: 1 uncorrectable error in SRAM since the driver was loaded"
            ),
        ),
        branch=535,
    ),
    Row(
        "uncorrectable SRAM errors that only the counters by source show",
        (
            nvml("gpu 0 set ecc.sram.parity.volatile=+1"),
            degraded("gpu-0", "gpu.ecc.uncorrectable: 1 uncorrectable error in SRAM (parity) since"),
            nvml("gpu 0 reset"),
            healthy("gpu-0"),
            nvml("gpu 0 set ecc.sram.secded.volatile=+1"),
            degraded("gpu-0", "gpu.ecc.uncorrectable: 1 uncorrectable error in SRAM (SEC-DED) since"),
        ),
    ),
    Row(
        "lifetime errors from before the driver's load do not count",
        (
            nvml("gpu 0 set ecc.dram.uncorrectable.aggregate=7 ecc.sram.correctable.aggregate=9"),
            wait_for_passes(10),
            nvml("gpu 0 set ecc.dram.uncorrectable.volatile=+1"),
            degraded("gpu-0", "gpu.ecc.uncorrectable: 1 uncorrectable error in DRAM"),
        ),
    ),
    Row(
        "SRAM errors above the vendor's limit",
        (nvml("gpu 0 set ecc.sram.threshold=1"), unhealthy("gpu-0", "gpu.ecc.sram_threshold: ")),
    ),
    Row(
        "correctable errors at and above the budget",
        (
            nvml("gpu 0 set ecc.dram.correctable.volatile=+99"),
            wait_for_passes(10),
            nvml("gpu 0 set ecc.sram.correctable.volatile=+1"),
            degraded("gpu-0", "gpu.ecc.correctable_rate: correctable memory errors: at least 100 in 2 min"),
        ),
        settings={"gpu": {"correctable-errors": 100, "correctable-window": "2m"}},
    ),
    Row(
        "a bad row waits for a reset",
        (
            nvml("gpu 0 set remap.pending=1"),
            degraded("gpu-0", "gpu.remap.pending: a row remapping waits for a reset"),
            nvml("gpu 0 reset"),
            healthy("gpu-0"),
        ),
    ),
    Row(
        "a bad row without a spare outlasts a reset",
        (
            nvml("gpu 0 set remap.failure=1"),
            unhealthy("gpu-0", "gpu.remap.failure: a bad memory row could not be remapped"),
            nvml("gpu 0 reset"),
            wait_for_passes(30),
        ),
    ),
    Row(
        "retired pages of a T4",
        (
            nvml("gpu 0 set retired.sbe=20 retired.dbe=39"),
            wait_for_passes(10),
            nvml("gpu 0 set retired.dbe=40"),
            degraded("gpu-0", "gpu.retired.pages: 60 pages retired, the limit is 60"),
        ),
        profile="t4",
    ),
    Row(
        "a page of a T4 waits for the next load of the driver",
        (
            nvml("gpu 0 set retired.pending=1"),
            degraded("gpu-0", "gpu.retired.pending: a page retirement waits for a reset"),
        ),
        profile="t4",
    ),
    Row(
        "ECC will be off after the next reset",
        (
            nvml("gpu 0 set ecc.mode_pending=0"),
            info("gpu-0", "gpu.ecc.off: ECC will be off after the next reset"),
        ),
    ),
    Row(
        "ECC off from the start makes no reading unreadable",
        (info("gpu-0", "gpu.ecc.off: ECC is off"), wait_for_passes(10)),
        setup=("gpu 0 set ecc.mode=0 ecc.mode_pending=0",),
    ),
)

LINKS: Final = (
    Row(
        "an NVLink goes down; a link that was never up is no fault",
        (
            wait_for_passes(10),
            nvml("gpu 0 set nvlink.4.state=0"),
            unhealthy("gpu-0", "gpu.nvlink.down: NVLink 4 down, up before: 0-16"),
            nvml("gpu 0 set nvlink.4.state=1"),
            healthy("gpu-0"),
        ),
        gpus=2,
        setup=("gpu 0 set nvlink.17.state=0",),
    ),
    Row(
        "an NVLink replays",
        (
            nvml("gpu 0 set nvlink.4.replay=+1"),
            degraded(
                "gpu-0",
                "gpu.nvlink.errors: NVLink replays: at least 1 in 10 min (reported until 10 min after the "
                "last, or a reset); since the driver was loaded",
            ),
        ),
        profile="a100",
    ),
    Row(
        "NVLink CRC errors at and above the vendor's limit",
        (
            nvml("gpu 0 set nvlink.4.crc_flit=+5999"),
            wait_for_passes(10),
            nvml("gpu 0 set nvlink.4.crc_flit=+1"),
            degraded("gpu-0", "gpu.nvlink.errors: NVLink CRC errors: at least 6000 in 1 min"),
        ),
        branch=570,
    ),
    Row(
        "an NVLink 5 was given up",
        (
            nvml("gpu 0 set nvlink.4.recoveries_failed=+1"),
            degraded(
                "gpu-0", "gpu.nvlink.recovery_failed: NVLink recoveries that failed: at least 1 in 10 min"
            ),
        ),
        setup=tuple(f"gpu 0 set nvlink.{link}.recoveries_failed=0" for link in range(18)),
    ),
    Row(
        "registration with the fabric ends with an error",
        (nvml("gpu 0 set fabric.status=999"), unhealthy("gpu-0", "gpu.fabric.status: ")),
    ),
    Row(
        "registration with the fabric does not finish",
        (
            nvml("gpu 0 set fabric.state=2"),
            unhealthy("gpu-0", "gpu.fabric.state: registration with the fabric does not finish"),
        ),
        gpus=2,
        limit_s=100,
    ),
    Row(
        "the fabric has a bad route",
        (
            nvml("gpu 0 set fabric.health=0x19a"),
            unhealthy("gpu-0", "gpu.fabric.health: a route is unhealthy"),
            nvml("gpu 0 set fabric.health=0x1aa"),
            healthy("gpu-0"),
        ),
    ),
    Row(
        "the fabric has less bandwidth",
        (
            nvml("gpu 0 set fabric.health=0x1a9"),
            degraded("gpu-0", "gpu.fabric.health: bandwidth is degraded"),
        ),
    ),
    Row(
        "NVSwitches without a fabric manager",
        (
            degraded(
                "gpu-0 gpu-1",
                "gpu.fabric.manager: nv-fabricmanager is not running, and the machine has NVSwitches",
            ),
            wait_for_passes(5),
        ),
        gpus=2,
        nvswitches=4,
    ),
    Row(
        "lost lanes of PCIe",
        (
            nvml("gpu 0 set pcie.width=8"),
            degraded("gpu-0", "gpu.pcie.width: 8 of 16 lanes"),
            nvml("gpu 0 set pcie.width=16"),
            healthy("gpu-0"),
        ),
    ),
    Row(
        "a low PCIe generation counts only under load",
        (
            nvml("gpu 0 set pcie.gen=1"),
            wait_for_passes(20),
            nvml("gpu 0 set utilization.gpu=90"),
            degraded("gpu-0", "gpu.pcie.gen: generation 1 of 5 under load"),
        ),
        limit_s=60,
    ),
    Row(
        "PCIe replays at and above the vendor's limit",
        (
            nvml("gpu 0 set pcie.replay=+8"),
            wait_for_passes(10),
            nvml("gpu 0 set pcie.replay=+1"),
            degraded("gpu-0", "gpu.pcie.replay: PCIe replays: at least 9 in 1 min"),
        ),
    ),
    Row(
        "PCIe errors that the kernel counts",
        (
            aer("correctable", "COR", 99),
            wait_for_passes(10),
            aer("correctable", "COR", 100),
            degraded("gpu-0", "gpu.pcie.aer.correctable: correctable PCIe errors: at least 100 in 1 min"),
            aer("nonfatal", "NONFATAL", 1),
            also_degraded("gpu-0", "gpu.pcie.aer.nonfatal: non-fatal PCIe errors: at least 1 in 10 min"),
            aer("fatal", "FATAL", 1),
            unhealthy("gpu-0", "gpu.pcie.aer.fatal: fatal PCIe errors: at least 1 in 10 min"),
        ),
        gpus=2,
    ),
)

HEAT: Final = (
    Row(
        "a GPU at its temperature limit",
        (
            nvml("gpu 0 set temperature=88"),
            wait_for_passes(10),
            nvml("gpu 0 set temperature=91"),
            degraded("gpu-0", "gpu.thermal.over_limit: at or above the slowdown limit of 89 C"),
        ),
    ),
    Row(
        "no temperature margin left",
        (
            nvml("gpu 0 set temperature.margin=0"),
            degraded("gpu-0", "gpu.thermal.over_limit: no margin left"),
        ),
    ),
    Row(
        "hot memory",
        (
            nvml("gpu 0 set temperature.memory=97"),
            degraded("gpu-0", "gpu.thermal.memory: at or above the memory's limit of 95 C"),
        ),
    ),
    Row(
        "thermal slowdown by the time counters of driver 580",
        (
            nvml("gpu 0 set throttle.hw_thermal=+5900000000"),
            wait_for_passes(10),
            nvml("gpu 0 set throttle.hw_thermal=+100000000"),
            degraded(
                "gpu-0",
                "gpu.thermal.slowdown: clocks reduced by the hardware because of heat for at least "
                "10 % of 1 min",
            ),
        ),
    ),
    Row(
        "thermal slowdown by the driver, with the time counters of driver 575",
        (
            nvml("gpu 0 set throttle.sw_thermal=+6000000000"),
            degraded(
                "gpu-0",
                "gpu.thermal.slowdown: clocks reduced by the driver because of heat for at least "
                "10 % of 1 min",
            ),
        ),
        branch=575,
    ),
    Row(
        "thermal slowdown by clock reasons, on driver 570 without time counters",
        (
            nvml("gpu 0 set power.smoothing=60000000000 throttle.hw_thermal=+6000000000"),
            wait_for_passes(20),
            never("gpu.thermal"),
            nvml("gpu 0 set clocks.reasons=0x40"),
            degraded("gpu-0", "gpu.thermal.slowdown: clocks are reduced by the hardware because of heat"),
        ),
        branch=570,
    ),
    Row(
        "the power brake by the time counters of driver 580",
        (
            nvml("gpu 0 set throttle.power_brake=+6000000000"),
            degraded(
                "gpu-0",
                "gpu.power.brake: clocks reduced by the external power brake for at least 10 % of 1 min",
            ),
        ),
    ),
    Row(
        "the power brake on a driver without time counters",
        (
            nvml("gpu 0 set clocks.reasons=0x88"),
            degraded("gpu-0", "gpu.power.brake: clocks are reduced by the external power brake"),
        ),
        branch=535,
    ),
    Row(
        "clocks reduced by the hardware for another reason",
        (
            nvml("gpu 0 set clocks.reasons=8"),
            degraded("gpu-0", "gpu.power.slowdown: clocks are reduced by the hardware, not because of heat"),
        ),
    ),
    Row(
        "low clocks of an idle GPU are no finding",
        (
            nvml("gpu 0 set clocks.reasons=1 pstate=8 pcie.gen=1 power.usage=20000"),
            wait_for_passes(20),
            nvml("gpu 0 lost"),
            also_unhealthy("gpu-0", "gpu.lost: NVML returned GPU_IS_LOST (15)"),
            unhealthy("gpu-0", "gpu."),
        ),
    ),
)

SIGNALS: Final = (*DEMANDS, *MEMORY, *LINKS, *HEAT)
