"""The audit of pods with claims, as it is repeated while the agent runs: objects come in, findings go out.

What an audit compares is agent.node.cgroup_audit's; what is made of its findings the rules'.
"""

from collections.abc import Sequence
from typing import NamedTuple

from agent.allocatable.findings import findings_of
from agent.allocatable.pod_object import parse_pod
from agent.allocatable.verdicts import Verdict
from agent.errors import PermissionDenied, ProbeError
from agent.model.objects import Object
from agent.model.pods import PodFinding
from agent.node.cgroup_audit import Given, Places, audit


class Audited(NamedTuple):
    """What one audit found."""

    findings: tuple[PodFinding, ...] = ()
    quiet: bool = False
    """Something is wrong, but too soon after a start or a resize to tell."""
    trouble: str = ""
    """Why nothing could be looked at; then nothing was found, and nothing is known to be right."""
    unread: tuple[str, ...] = ()
    """Pods that could not be judged, with the reason."""


def audit_pods_once(
    places: Places, objects: Sequence[Object], by_drivers: Given, now_wall_s: float
) -> Audited:
    """One audit of the pods that run and have claims. Blocks on the kernel.

    Args:
        places: Where to look.
        objects: All pods of the node, v1.Pods.
        by_drivers: CPUs that drivers gave to containers.
        now_wall_s: When that is [s since 1970].
    """
    pods, unread = [], []
    for obj in objects:
        try:
            pods.append(parse_pod(obj))
        except ProbeError as error:
            unread.append(str(error))
    chosen = [pod for pod in pods if pod.active and (pod.claims or pod.grants)]
    if not chosen:
        return Audited(unread=tuple(unread))
    try:
        found = audit(places, pods, chosen, now_wall_s, classes=False, by_drivers=by_drivers)
    except (ProbeError, PermissionDenied) as error:
        return Audited(trouble=str(error))
    if found.facts is None:
        return Audited(trouble="; ".join(found.gaps))
    return Audited(
        tuple(finding for judged in found.pods for finding in findings_of(judged)),
        any(one.verdict is Verdict.QUIET for judged in found.pods for one in judged.compared),
        unread=(*unread, *found.unread),
    )
