"""Which pods and containers there are, by their cgroups: names of nobody, but who is there is surely there.

From what the native core has read already. A pod has the UID that the kubelet has for it: a static pod
that of its configuration.
"""

from typing import Final

from agent.model.claim_sources import LiveContainer, LivePod, Origin, Provenance, SourceAnswer
from agent.model.reading import Absence, Missing, Reading
from agent.model.snapshot import GroupKind, Snapshot
from agent.model.source import SourceState
from agent.model.time import Instant

SOURCE: Final = "cgroups"


def live_pods(snapshot: Snapshot, now: Instant) -> SourceAnswer[LivePod]:
    """The pods that have a cgroup, or why nobody knows.

    Args:
        snapshot: Of the native core.
        now: When that was taken.
    """
    witness = Provenance(Origin.CGROUPS, now)
    source = next((one for one in snapshot.sources if one.name == SOURCE), None)
    if source is None or source.state is SourceState.ABSENT:
        return SourceAnswer(witness, (), Absence.ABSENT, source.detail if source else "nobody reads cgroups")
    if source.state in {SourceState.STARTING, SourceState.STALLED}:
        return SourceAnswer(witness, (), Absence.UNREADABLE, f"the source of cgroups is {source.state}")
    running: dict[str, bool | None] = {}
    containers: dict[str, list[LiveContainer]] = {}
    for group in snapshot.groups:
        if group.kind is GroupKind.POD:
            running[group.pod_uid] = _is_running(group.populated)
        else:
            found = LiveContainer(group.container, _is_running(group.populated))
            containers.setdefault(group.pod_uid, []).append(found)
    pods = tuple(
        LivePod(uid, running.get(uid), tuple(sorted(containers.get(uid, ()), key=lambda one: one.id)))
        for uid in sorted({*running, *containers})
    )
    wrong = []
    if source.state is SourceState.FAILING:
        wrong.append(f"some cgroups cannot be read: {source.detail}")
    if snapshot.core.groups_dropped:
        wrong.append(f"{snapshot.core.groups_dropped} cgroups find no room in the table")
    return SourceAnswer(witness, pods, wrong=tuple(wrong))


def _is_running(populated: Reading) -> bool | None:
    return None if isinstance(populated, Missing) else populated > 0
