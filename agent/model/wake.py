"""Which readings wake the core, and from which growth on: data that the rules give to the sources."""

from enum import Enum, auto
from typing import NamedTuple

from agent.model.gpu import GpuField


class Field(Enum):
    """What the sampler reads and a rule may look at. The names are the native core's."""

    CPU_ONLINE = auto()
    CPU_ISOLATED = auto()
    NODE_CPUS = auto()
    NODE_THROTTLE_CORE = auto()
    NODE_THROTTLE_PACKAGE = auto()
    POOL_NR = auto()
    POOL_FREE = auto()
    POOL_RESERVED = auto()
    POOL_SURPLUS = auto()
    POOL_OVERCOMMIT = auto()
    GROUP_SET = auto()
    GROUP_POPULATED = auto()
    GROUP_FROZEN = auto()
    GROUP_MEM_HIGH = auto()
    GROUP_MEM_MAX = auto()
    GROUP_MEM_OOM = auto()
    GROUP_MEM_OOM_KILL = auto()
    GROUP_MEM_FAILCNT = auto()
    GROUP_CPU_PERIODS = auto()
    GROUP_CPU_THROTTLED = auto()
    GROUP_CPUS = auto()
    GROUP_HT_EVENTS = auto()
    GROUP_HT_RSVD_FAILED = auto()


class Wake(NamedTuple):
    """Wake the core when ``field`` changes or, with a threshold, has grown by it within the window.

    A field that becomes readable or unreadable always counts as changed.
    """

    field: Field
    threshold: int = 0
    window_ns: int = 0


class GpuWakeMode(Enum):
    """When a reading of a GPU wakes the core. The names are the native core's."""

    CHANGE = auto()
    """Any change."""
    RISE = auto()
    """It has grown by ``threshold`` within the window."""
    OVER = auto()
    """It reached the reading of field ``limit``, or came back below it."""
    BELOW = auto()
    """It fell below ``threshold``, or came back."""
    BITS = auto()
    """One of the bits of ``threshold`` changed."""


class GpuWake(NamedTuple):
    """Wake the core for a reading of a GPU. One that becomes readable or unreadable always does."""

    field: GpuField
    mode: GpuWakeMode = GpuWakeMode.CHANGE
    threshold: int = 0
    window_ns: int = 0
    limit: GpuField | None = None
