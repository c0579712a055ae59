"""What an audit of one pod leaves to be told: promises that are not kept, and risks, in words that stay."""

from collections.abc import Iterator
from typing import Final

from agent.allocatable.evaluate import JudgedPod
from agent.allocatable.knobs import Knob, page_name
from agent.allocatable.verdicts import CONCERNS, Compared
from agent.model.pods import PodFinding, Resource

RESOURCES: Final = {
    Knob.WEIGHT: Resource.CPU,
    Knob.QUOTA: Resource.CPU,
    Knob.PERIOD: Resource.CPU,
    Knob.CPUS: Resource.CPU,
    Knob.EFFECTIVE: Resource.CPU,
    Knob.MEMORY: Resource.MEMORY,
    Knob.PAGES: Resource.HUGEPAGES,
    Knob.RESERVED: Resource.HUGEPAGES,
}
"""What each knob gives or keeps back."""
_OF_CPUS: Final = ("claim.starved", "cpus.")
"""So begin the codes of risks that are about CPUs alone; the others follow from all that claims give."""


def findings_of(judged: JudgedPod) -> Iterator[PodFinding]:
    """Everything that is wrong with a pod, knob by knob, and then what can go wrong.

    What matches, and what nobody can know yet, is left out.
    """
    uid = judged.pod.cgroup_uid
    for one in judged.compared:
        if one.verdict in CONCERNS:
            what, size_kib = one.knob
            code, who = f"cgroup.{one.verdict}", one.group.container
            yield PodFinding(uid, who, code, _evidence(one), "", RESOURCES[what], size_kib)
    for risk in judged.risks:
        resource = Resource.CPU if risk.code.startswith(_OF_CPUS) else None
        yield PodFinding(uid, risk.container, risk.code, risk.what, risk.advice, resource)


def _evidence(compared: Compared) -> str:
    knob = compared.knob
    size = f"{page_name(knob.size_kib)} " if knob.size_kib else ""
    return f"{size}{knob.knob}: {compared.why}"
