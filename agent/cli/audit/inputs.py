"""Input of ``drahealth audit``: the pods of this node, and the exclusive CPUs that drivers allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from agent.allocatable.pod_object import parse_pod
from agent.errors import ProbeError, UsageError, suggestion
from agent.model.declared import Declarations, DeclaredCpus
from agent.model.objects import Object
from agent.sources import declared

if TYPE_CHECKING:
    from agent.allocatable.pod import Pod
    from agent.config.config import Config
    from agent.model.claim_sources import SourceAnswer
    from agent.node.cgroup_audit import ExclusiveByPod

KUBECTL: Final = "kubectl get pods -A -o json --field-selector spec.nodeName=NODE"


# --- pods --------------------------------------------------------------------------------------------------


class NodePods(NamedTuple):
    """Pods of one node."""

    pods: tuple[Pod, ...]
    wrong: tuple[str, ...]
    """Pods whose objects cannot be used, each with the reason."""
    node: str = ""
    """Name of the node in the objects; empty if they have none."""


def parse_pods(answer: SourceAnswer[Object], node: str, *, of_many: bool) -> NodePods:
    """Return the pods of this node.

    Args:
        answer: Objects of pods.
        node: Name of this node. It is ignored if all objects belong to one node.
        of_many: True: the objects may belong to several nodes. False: the kubelet of this node sent them.

    Raises:
        UsageError: The objects belong to several nodes, but none to this node.
    """
    nodes = {name for obj in answer.items if (name := _node(obj))} if of_many else set()
    if len(nodes) > 1 and node not in nodes:
        near = suggestion(node, nodes)
        raise UsageError(
            f"--pods: pods of {len(nodes)} nodes, but none of {node!r}{near}\n"
            f"select a node with --node-name, or write the file with: {KUBECTL}"
        )
    selected = node if len(nodes) > 1 else "".join(nodes)
    pods, wrong = [], list(answer.invalid)
    for obj in answer.items:
        if selected and _node(obj) != selected:
            continue
        try:
            pods.append(parse_pod(obj))
        except ProbeError as error:
            wrong.append(str(error))
    return NodePods(tuple(pods), tuple(wrong), selected)


def select_pods(pods: Sequence[Pod], name: str | None, *, every: bool) -> tuple[Pod, ...]:
    """Return the pods to audit: the pod `name`; if None, active pods with claims or, if `every`, all.

    Raises:
        UsageError: No pod or more than one pod has the name.
    """
    if name is None:
        return tuple(pod for pod in pods if pod.active and (every or pod.claims or pod.grants))
    found = [pod for pod in pods if name in {str(pod), pod.name, pod.uid, pod.cgroup_uid}]
    if len(found) > 1:
        raise UsageError(f"{name!r} is the name of several pods: {', '.join(sorted(map(str, found)))}")
    if not found:
        known = [known_name for pod in pods for known_name in (str(pod), pod.name)]
        raise UsageError(f"no pod {name!r} among {len(pods)} of this node{suggestion(name, known)}")
    return tuple(found)


def _node(obj: Object) -> str:
    spec = obj.get("spec")
    name = spec.get("nodeName") if isinstance(spec, Mapping) else None
    return name if isinstance(name, str) else ""


# --- exclusive CPUs ----------------------------------------------------------------------------------------


class DriverCpus(NamedTuple):
    """Exclusive CPUs that drivers allocated to containers."""

    by_pod: ExclusiveByPod
    gaps: tuple[str, ...] = ()
    """Reasons why drivers may have allocated more CPUs than listed; empty: the list is complete."""


def read_driver_cpus(config: Config, pods: SourceAnswer[Mapping[str, object]]) -> DriverCpus:
    """Read the exclusive CPUs from files, because an audit needs no running agent.

    Drivers' files declare which CPUs are exclusive, the kubelet's checkpoint lists the claim that holds the
    CPUs, and the pod's object names the container that uses the claim.
    """
    try:
        files = declared.read_declarations(config.runtime_dir / declared.DIRECTORY, (), config.node_name)
    except ProbeError as error:
        return DriverCpus({}, _gaps(str(error)))
    wrong = _gaps(*(file.error for file in files))
    if not _has_exclusive(files):
        return DriverCpus({}, wrong)
    from agent.devices.consumers.consumer_map import consumer_map
    from agent.devices.consumers.exclusive_cpus import exclusive_cpus
    from agent.devices.consumers.kube_objects import pods_from
    from agent.model.claim_sources import SourceAnswers
    from agent.sources import kubelet_state

    checkpoint = config.kubelet_dir / kubelet_state.CLAIMS_FILE
    prepared = kubelet_state.read_checkpoint(checkpoint, pods.provenance.read)
    consumers = consumer_map(SourceAnswers(prepared=(prepared,), pods=(pods_from(pods),)))
    return DriverCpus(exclusive_cpus(consumers, files), (*wrong, *_gaps(prepared.reason)))


def _has_exclusive(files: Declarations) -> bool:
    kinds = (device.part for file in files for device in file.devices)
    return any(isinstance(kind, DeclaredCpus) and kind.exclusive for kind in kinds)


def _gaps(*reasons: str) -> tuple[str, ...]:
    return tuple(f"exclusive CPUs of drivers: {why}" for why in reasons if why)
