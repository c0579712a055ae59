"""Pressure: the history of how long tasks have waited for CPUs, memory and disks.

Of memory and disks counts when all tasks waited at once, and nobody got on. For CPUs a whole node knows no
such thing: there counts when some task did.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Final

from agent.health.rate_window import RateWindow, appended
from agent.health.rules import Growth
from agent.model.machine import MachineSample, PressureSample
from agent.model.reading import NEVER_READ, Missing, Reading
from agent.model.time import NS

SOURCE: Final = "pressure"
RESOURCES: Final = ("cpu", "memory", "io")
"""As the files below ``/proc/pressure`` are called."""


Stalls = Mapping[str, RateWindow]
"""By resource, the totals [us]; over two windows, for readings may come a whole window apart."""


def remember_stalls(past: Stalls, machine: MachineSample | None, window_s: int) -> Stalls:
    """The histories after a look. Costs nothing until the files have been read again."""
    if machine is None:
        return {}
    t_ns = next((source.beat_ns for source in machine.sources if source.name == SOURCE), 0)
    if all(points and points[-1].t_ns == t_ns for points in (past.get(name) for name in RESOURCES)):
        return past
    return {
        name: appended(past.get(name, ()), waited(machine.pressure, name), t_ns, 2 * window_s * NS)
        for name in RESOURCES
    }


def waited(pressure: PressureSample, resource: str) -> Reading:
    """The total that is judged: of memory and disks, all tasks waited; of CPUs, some did [us]."""
    totals = {"cpu": pressure.cpu_some, "memory": pressure.memory_full, "io": pressure.io_full}
    return totals[resource]


def stalled(stalls: Stalls, machine: MachineSample | None, resource: str, window_s: int) -> Growth:
    """How long was waited in the window before the last reading [us].

    Unlike events, time that is waited is spread over the time between two readings. So of what came over the
    window's begin the part counts that lies in it.
    """
    total_us = waited(machine.pressure, resource) if machine else NEVER_READ
    history = stalls.get(resource, ())
    if isinstance(total_us, Missing):
        return Growth(total_us, 0.0)
    if not history:
        return Growth(0, 0.0)
    end_ns, total_us = history[-1]
    span_s = (end_ns - history[0].t_ns) / NS
    before_us = _total_at(history, end_ns - window_s * NS)
    return Growth(total_us - before_us, min(span_s, float(window_s)))


def _total_at(history: RateWindow, t_ns: int) -> int:
    """The total at a moment: between two readings in proportion, before the first as at the first."""
    for left, right in pairwise(history):
        if left.t_ns <= t_ns < right.t_ns:
            share_us = (right.value - left.value) * (t_ns - left.t_ns) // (right.t_ns - left.t_ns)
            return left.value + share_us
    return history[0].value
