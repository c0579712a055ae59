"""Input of ``drahealth audit``: the pods of this node, and the exclusive CPUs that drivers allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from agent.cgroup_audit.pod_parser import parse_pod
from agent.errors import ProbeError, UsageError, suggestion
from agent.model.claim_sources import Origin
from agent.model.declared_devices import DeclaredCpuDevice
from agent.model.json_values import JsonObject
from agent.sources import declaration_directory

if TYPE_CHECKING:
    from agent.cgroup_audit.pod_model import Pod
    from agent.config.config import Config
    from agent.model.claim_sources import SourceAnswer
    from agent.node.cgroup_audit import ExclusiveCpusByPod

KUBECTL: Final = "kubectl get pods -A -o json --field-selector spec.nodeName=NODE"


# --- pods --------------------------------------------------------------------------------------------------


class NodePods(NamedTuple):
    """Pods of one Kubernetes node, parsed from their API objects."""

    pods: tuple[Pod, ...]
    invalid: tuple[str, ...]
    """Pods whose objects cannot be used, each with the reason."""
    node: str = ""
    """Name of the Kubernetes node in the pod objects; empty if they have none."""


def parse_pods(answer: SourceAnswer[JsonObject], node: str, *, several_nodes: bool) -> NodePods:
    """Return the pods of this Kubernetes node, parsed from pod objects.

    Args:
        answer: Pod objects.
        node: Name of this node. It is ignored if all pod objects belong to one node.
        several_nodes: True: the pods may belong to several nodes. False: the kubelet of this node sent them.

    Raises:
        UsageError: The pods belong to several nodes, but none to this node.
    """
    nodes = {name for obj in answer.items if (name := _node(obj))} if several_nodes else set()
    if len(nodes) > 1 and node not in nodes:
        near = suggestion(node, nodes)
        raise UsageError(
            f"--pods: the file has pods of {len(nodes)} nodes, but none of node {node!r}{near}\n"
            f"select a node with --node-name, or write the file with: {KUBECTL}"
        )
    selected = node if len(nodes) > 1 else "".join(nodes)
    pods, wrong = [], list(answer.invalid)
    from_kubelet = answer.provenance.origin is Origin.PODS_API
    for obj in answer.items:
        if selected and _node(obj) != selected:
            continue
        try:
            pods.append(parse_pod(obj, from_kubelet=from_kubelet))
        except ProbeError as error:
            wrong.append(str(error))
    return NodePods(tuple(pods), tuple(wrong), selected)


def select_pods(pods: Sequence[Pod], name: str | None, *, include_all: bool) -> tuple[Pod, ...]:
    """Return the pod `name`; if None, the active pods with claims or, if `include_all`, all active pods.

    Raises:
        UsageError: No pod or more than one pod has the name.
    """
    if name is None:
        return tuple(
            pod for pod in pods if pod.is_active and (include_all or pod.claims or pod.claim_resources)
        )
    found = [pod for pod in pods if name in {str(pod), pod.name, pod.uid, pod.cgroup_uid}]
    if len(found) > 1:
        raise UsageError(
            f"{name!r} is the name of several pods; use one of {', '.join(sorted(map(str, found)))}"
        )
    if not found:
        known = [known_name for pod in pods for known_name in (str(pod), pod.name)]
        raise UsageError(f"no pod {name!r} among the {len(pods)} pods of this node{suggestion(name, known)}")
    return tuple(found)


def _node(obj: JsonObject) -> str:
    spec = obj.get("spec")
    name = spec.get("nodeName") if isinstance(spec, Mapping) else None
    return name if isinstance(name, str) else ""


# --- exclusive CPUs ----------------------------------------------------------------------------------------


class DriverExclusiveCpus(NamedTuple):
    """CPUs that DRA drivers allocated to containers for exclusive use."""

    by_pod: ExclusiveCpusByPod
    gaps: tuple[str, ...] = ()
    """Reasons why `by_pod` may lack CPUs; empty: it is complete."""


def read_driver_cpus(config: Config, pods: SourceAnswer[Mapping[str, object]]) -> DriverExclusiveCpus:
    """Return the CPUs that drivers allocated exclusively. Reads files only: an audit needs no running agent.

    Drivers' files declare which CPUs are exclusive, the kubelet's checkpoint lists the claim that holds the
    CPUs, and the pod's object names the container that uses the claim.
    """
    try:
        files = declaration_directory.read_declarations(
            config.runtime_dir / declaration_directory.DIRECTORY, (), config.node_name
        )
    except ProbeError as error:
        return DriverExclusiveCpus({}, _exclusive_gaps(str(error)))
    wrong = _exclusive_gaps(*(file.error for file in files))
    parts = (device.part for file in files for device in file.devices)
    if not any(isinstance(part, DeclaredCpuDevice) and part.exclusive for part in parts):
        return DriverExclusiveCpus({}, wrong)
    from agent.devices.consumers.consumer_map import build_consumer_map
    from agent.devices.consumers.exclusive_cpus import exclusive_cpus
    from agent.devices.consumers.kube_objects import parse_pods
    from agent.model.claim_sources import SourceAnswers
    from agent.sources import kubelet_state

    checkpoint = config.kubelet_dir / kubelet_state.CLAIMS_FILE
    prepared = kubelet_state.read_claims_checkpoint(checkpoint, pods.provenance.read_at)
    consumers = build_consumer_map(SourceAnswers(prepared=(prepared,), pods=(parse_pods(pods),)))
    return DriverExclusiveCpus(exclusive_cpus(consumers, files), (*wrong, *_exclusive_gaps(prepared.reason)))


def _exclusive_gaps(*reasons: str) -> tuple[str, ...]:
    return tuple(f"exclusive CPUs of drivers: {why}" for why in reasons if why)
