"""Wake conditions: changes of readings at which the native core wakes the engine loop. The rules define
them."""

from enum import Enum, auto
from typing import NamedTuple

from agent.model.gpu import GpuField


class SamplerField(Enum):
    """Reading that the native core can watch. NODE: NUMA node; POOL: hugepage pool; GROUP: cgroup.

    The names are the native core's."""

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


class WakeCondition(NamedTuple):
    """Wake condition: ``field`` changes; with a threshold: ``field`` grows by it within the window.

    A field that becomes readable or unreadable always wakes the engine.
    """

    field: SamplerField
    threshold: int = 0
    window_ns: int = 0


class GpuWakeMode(Enum):
    """Change of a GPU reading that wakes the engine. The names are the native core's."""

    CHANGE = auto()
    """The engine wakes if the reading changed."""
    RISE = auto()
    """The engine wakes if the reading grew by ``threshold`` within the window, or its counter was reset."""
    OVER = auto()
    """The engine wakes if the reading reached the reading of the field ``limit``, or fell below it again."""
    BELOW = auto()
    """The engine wakes if the reading fell below ``threshold``, or rose to it again."""
    BITS = auto()
    """The engine wakes if one of the reading's bits that are set in ``threshold`` changed."""


class GpuWakeCondition(NamedTuple):
    """Wake condition of a GPU reading. A reading that becomes readable or unreadable always wakes the
    engine."""

    field: GpuField
    mode: GpuWakeMode = GpuWakeMode.CHANGE
    threshold: int = 0
    window_ns: int = 0
    limit: GpuField | None = None
