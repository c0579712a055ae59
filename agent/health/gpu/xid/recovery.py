"""The recovery action: what the driver itself says must be done to a GPU.

Read as NVML field 230 (driver 565 and later) and told in the text of XID 154. Owns the numbers, their names
and the advice; whether a reading makes a GPU unhealthy is the rules' to say.
"""

from enum import IntEnum
from typing import Final


class RecoveryAction(IntEnum):
    """The numbers of NVML's ``nvmlGpuRecoveryAction_t``.

    A number that is not listed is a newer driver's: ``RecoveryAction(9)`` is a member of its own, never NONE.
    """

    NONE = 0
    GPU_RESET = 1
    NODE_REBOOT = 2
    DRAIN_P2P = 3
    DRAIN_AND_RESET = 4
    RECOVER_IMEX_DOMAIN = 5
    BUS_RESET = 6
    SYSTEM_REBOOT = 7

    @classmethod
    def _missing_(cls, value: object) -> "RecoveryAction | None":
        if not isinstance(value, int):
            return None
        member = int.__new__(cls, value)
        member._name_ = f"ACTION_{value}"
        member._value_ = value
        return member

    @property
    def text(self) -> str:
        """For people: ``drain and reset``."""
        return self.name.lower().replace("_", " ")

    @property
    def advice(self) -> str:
        """What to do about it; empty if nothing is to be done."""
        return ADVICE.get(self, f"look up recovery action {self.value} in the driver's NVML manual")


ADVICE: Final[dict[RecoveryAction, str]] = {
    RecoveryAction.NONE: "",
    RecoveryAction.GPU_RESET: "drain the GPU and reset it (nvidia-smi --gpu-reset)",
    RecoveryAction.NODE_REBOOT: "drain and reboot the node",
    RecoveryAction.DRAIN_P2P: "stop the workloads that reach this GPU over NVLink or PCIe peer access",
    RecoveryAction.DRAIN_AND_RESET: "let no new work onto the GPU; when its work has ended, reset it",
    RecoveryAction.RECOVER_IMEX_DOMAIN: "restart the IMEX domain that the node belongs to",
    RecoveryAction.BUS_RESET: "drain the GPU and reset its PCIe slot, or reboot the node",
    RecoveryAction.SYSTEM_REBOOT: "drain the node and power-cycle the whole system",
}
