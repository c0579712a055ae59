"""What was read of a cgroup, as the comparison wants it."""

from collections.abc import Mapping
from typing import Final

from agent.allocatable.knobs import Knob, KnobId
from agent.allocatable.verdicts import Actual
from agent.model.cgroup import CgroupKnobs
from agent.model.reading import Reading

GONE: Final = Actual(vanished=True)


def actual_of(knobs: CgroupKnobs | None, changed_s: float | None) -> Actual:
    """One cgroup.

    Args:
        knobs: What it is set to; None: it is not there, at a second look either.
        changed_s: Since something of it was started or resized [s]; None: long ago, or nobody knows.
    """
    if knobs is None:
        return GONE
    values: dict[KnobId, Reading] = {
        KnobId(Knob.WEIGHT): knobs.weight,
        KnobId(Knob.QUOTA): knobs.quota_us,
        KnobId(Knob.PERIOD): knobs.period_us,
        KnobId(Knob.MEMORY): knobs.memory,
        KnobId(Knob.CPUS): knobs.cpus,
        KnobId(Knob.EFFECTIVE): knobs.effective,
        **_pages(knobs),
    }
    return Actual(values, knobs.controllers, changed_s=changed_s)


def _pages(knobs: CgroupKnobs) -> Mapping[KnobId, Reading]:
    found: dict[KnobId, Reading] = {}
    for page in knobs.pages:
        found[KnobId(Knob.PAGES, page.size_kib)] = page.max
        found[KnobId(Knob.RESERVED, page.size_kib)] = page.rsvd_max
    return found
