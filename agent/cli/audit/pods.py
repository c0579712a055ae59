"""Which pods ``drahealth audit`` is about: of a file or the kubelet, of this node, those that were meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from agent.allocatable.pod_object import parse_pod
from agent.errors import ProbeError, UsageError, suggestion
from agent.model.objects import Object

if TYPE_CHECKING:
    from agent.allocatable.pod import Pod
    from agent.model.claim_sources import SourceAnswer

WRITE: Final = "kubectl get pods -A -o json --field-selector spec.nodeName=NODE"


class Listed(NamedTuple):
    """The pods of one node, as far as they can be read."""

    pods: tuple[Pod, ...]
    wrong: tuple[str, ...]
    """Pods that cannot be, with the reason."""
    node: str = ""
    """That the objects name; empty: they name none."""


def parse_pods(told: SourceAnswer[Object], node: str, *, of_many: bool) -> Listed:
    """The pods of this node.

    Args:
        told: Objects, of whichever node.
        node: The name of this one. Where all objects are of one node, that is meant, whatever its name.
        of_many: They may be of several nodes.

    Raises:
        UsageError: They are of several, and none is of this one.
    """
    nodes = {name for obj in told.items if (name := _node(obj))} if of_many else set()
    if len(nodes) > 1 and node not in nodes:
        near = suggestion(node, nodes)
        names = f"{len(nodes)} nodes, and none of {node!r}{near}"
        raise UsageError(f"--pods: pods of {names}\nsay which with --node-name, or write it with: {WRITE}")
    meant = node if len(nodes) > 1 else "".join(nodes)
    pods, wrong = [], list(told.wrong)
    for obj in told.items:
        if meant and _node(obj) != meant:
            continue
        try:
            pods.append(parse_pod(obj))
        except ProbeError as error:
            wrong.append(str(error))
    return Listed(tuple(pods), tuple(wrong), meant)


def choose(pods: Sequence[Pod], named: str | None, *, every: bool) -> tuple[Pod, ...]:
    """Those to judge: the one that was named, or all that run and have claims, or all that run.

    Raises:
        UsageError: There is none of that name, or several.
    """
    if named is None:
        return tuple(pod for pod in pods if pod.active and (every or pod.claims or pod.grants))
    found = [pod for pod in pods if named in {str(pod), pod.name, pod.uid, pod.cgroup_uid}]
    if len(found) > 1:
        raise UsageError(f"{named!r} may be any of {', '.join(sorted(map(str, found)))}")
    if not found:
        known = [word for pod in pods for word in (str(pod), pod.name)]
        raise UsageError(f"no pod {named!r} among {len(pods)} of this node{suggestion(named, known)}")
    return tuple(found)


def _node(obj: Object) -> str:
    spec = obj.get("spec")
    name = spec.get("nodeName") if isinstance(spec, Mapping) else None
    return name if isinstance(name, str) else ""
