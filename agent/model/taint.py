"""Taints: what a driver publishes of a sick device, so that the scheduler keeps away (KEP-5055)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from agent.model.claim import DeviceRef

TAINTS_MAX: Final = 16
"""Per device; the API server refuses more."""
SLICE_DEVICES_MAX: Final = 128
"""Devices in one ResourceSlice, if none of them is tainted..."""
TAINTED_SLICE_DEVICES_MAX: Final = 64
"""...and if one is."""


class Effect(StrEnum):
    """What a taint does. Spelled as the API does."""

    NONE = "None"
    """Tells, and does nothing."""
    NO_SCHEDULE = "NoSchedule"
    NO_EXECUTE = "NoExecute"
    """Pods that use the device are evicted, unless they tolerate it."""


class Taint(NamedTuple):
    """One reason to keep away from a device."""

    key: str
    """A label's name, ``<driver>/<cause>``."""
    value: str
    """A label's value; may be empty."""
    effect: Effect
    added_wall_s: int
    """When it was first published [s since 1970]: tolerations count from there, so it never moves while the
    rest is the same."""

    @property
    def identity(self) -> tuple[str, str, Effect]:
        """All but when."""
        return (self.key, self.value, self.effect)


@dataclass(frozen=True, slots=True)
class Taints:
    """The taints of a driver's devices, whole each time; the newest wins."""

    devices: Mapping[DeviceRef, tuple[Taint, ...]] = field(default_factory=dict)
    """Every device of the driver, most with none; at most :data:`TAINTS_MAX` each, the worst first."""

    def slice_limit(self, pool: str) -> int:
        """How many devices a ResourceSlice of the pool may hold: any taint in a slice halves it."""
        tainted = any(taints for device, taints in self.devices.items() if device.pool == pool)
        return TAINTED_SLICE_DEVICES_MAX if tainted else SLICE_DEVICES_MAX
