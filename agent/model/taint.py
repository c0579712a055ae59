"""Device taints (KEP-5055): a driver publishes them so that the scheduler avoids an unhealthy device."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from agent.model.claim import DeviceRef

TAINTS_MAX: Final = 16
"""Largest number of taints on one device; the API server rejects more."""
SLICE_DEVICES_MAX: Final = 128
"""Largest number of devices in a ResourceSlice without taints."""
TAINTED_SLICE_DEVICES_MAX: Final = 64
"""Largest number of devices in a ResourceSlice with at least one taint."""


class Effect(StrEnum):
    """Effect of a taint, spelled as in the Kubernetes API."""

    NONE = "None"
    """The taint informs operators; pods are neither kept away nor evicted."""
    NO_SCHEDULE = "NoSchedule"
    NO_EXECUTE = "NoExecute"
    """Kubernetes evicts pods that use the device and do not tolerate the taint."""


class Taint(NamedTuple):
    """One taint of a device."""

    key: str
    """Key of the taint in the form of a label name, ``<driver>/<cause>``."""
    value: str
    """Value of the taint in the form of a label value; may be empty."""
    effect: Effect
    added_wall_s: int
    """Time when the taint was first published [s since 1970].

    Tolerations count from this time, so it stays until the taint's key, value or effect changes.
    """

    @property
    def identity(self) -> tuple[str, str, Effect]:
        """Key, value and effect: the taint without its time."""
        return (self.key, self.value, self.effect)


@dataclass(frozen=True, slots=True)
class Taints:
    """Taints of all devices of a driver: the complete set, which replaces any earlier set."""

    devices: Mapping[DeviceRef, tuple[Taint, ...]] = field(default_factory=dict)
    """Taints of every device of the driver, worst first, at most :data:`TAINTS_MAX` each."""

    def slice_limit(self, pool: str) -> int:
        """Return how many devices a ResourceSlice of a pool may have: 128, or 64 if one has a taint."""
        tainted = any(taints for device, taints in self.devices.items() if device.pool == pool)
        return TAINTED_SLICE_DEVICES_MAX if tainted else SLICE_DEVICES_MAX
