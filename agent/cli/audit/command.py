"""``drahealth audit``: compares the cgroups of pods with the values that follow from the pods' objects.

The command reads the pods of this node, and the exclusive CPUs that drivers allocated to them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from agent.cgroup_audit.pod_parser import parse_pod
from agent.cli.output.text import clean, format_count
from agent.cli.subcommand import (
    EXIT_OF_SEVERITY,
    Subcommand,
    add_output,
    add_settings,
    load_config,
    print_result,
)
from agent.errors import ProbeError, UsageError, suggestion
from agent.model.claim_sources import Origin
from agent.model.declared_devices import DeclaredCpuDevice
from agent.model.health import Severity
from agent.model.json_values import JsonObject
from agent.model.reading import Absence
from agent.sources import declaration_file
from agent.sources.kubelet_files import CLAIMS_FILE, read_claims_checkpoint
from agent.system.timing import read_clocks

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.cgroup_audit.audit import QosDifferences
    from agent.cgroup_audit.pod_model import Pod
    from agent.cli.audit.text import AuditReport
    from agent.config.config import Config
    from agent.model.claim_sources import PreparedClaim, SourceAnswer
    from agent.node.cgroup_audit import ExclusiveCpusByPod

SECOND_AUDIT: Final = (
    "drahealth: QoS classes and kubepods: a setting differs from its expected value; auditing again in a "
    "minute, because the kubelet rewrites them once a minute"
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "pod", metavar="POD", nargs="?", help="show one pod in full: name, namespace/name or UID"
    )
    parser.add_argument(
        "--all", action="store_true", help="audit every running pod, not only pods with claims"
    )
    parser.add_argument(
        "--pods",
        metavar="FILE",
        type=Path,
        help="output of 'kubectl get pods -A -o json' or yaml, - for standard input (default: the kubelet's "
        "pods API)",
    )
    parser.add_argument(
        "--kubelet-version",
        metavar="VERSION",
        default="",
        help="before 1.37, resources of claims are not expected in cgroups (default: 1.37 or later)",
    )
    parser.add_argument(
        "--kubelet-config",
        metavar="FILE",
        type=Path,
        help="the kubelet's configuration in effect: its endpoint configz, or a KubeletConfiguration "
        "(default: from the files and flags of its process)",
    )
    add_output(parser)
    add_settings(
        parser,
        *("--node-name", "--sysfs-root", "--procfs-root", "--cgroupfs-root", "--kubelet-cgroup-root"),
        *("--kubelet-dir", "--runtime-dir"),
    )


def main(args: Namespace) -> int:
    from agent.cli.audit.text import document, exit_of, render
    from agent.sources.cgroup_facts import kubelet_counts_claims

    config = load_config(args)
    try:
        kubelet_counts_claims(args.kubelet_version)
    except ValueError as error:
        raise UsageError(f"--kubelet-version: {error}") from None
    answer = _read_pods(args, config.kubelet_dir)
    try:
        report = _audit(args, config, answer)
        if differences := report.audit.qos_differences:
            print(SECOND_AUDIT, file=sys.stderr)
            _wait_for_rewrite()
            if args.pods is None:  # a file keeps its content, and may be a pipe
                answer = _read_pods(args, config.kubelet_dir)
            report = _audit(args, config, answer, differences)
    except ProbeError as error:
        print(f"drahealth: {clean(str(error))}", file=sys.stderr)
        return EXIT_OF_SEVERITY[Severity.UNKNOWN]
    print_result(args, lambda: document(report), lambda style: render(report, style))
    return exit_of(report)


def _wait_for_rewrite() -> None:
    """Wait until the kubelet has rewritten the cgroups of the QoS classes, which it does once a minute.
    Blocks for a minute."""
    from agent.cgroup_audit.audit import QOS_REWRITE_S

    time.sleep(QOS_REWRITE_S + 1)


def _audit(
    args: Namespace,
    config: Config,
    answer: SourceAnswer[Mapping[str, object]],
    earlier_qos: QosDifferences | None = None,
) -> AuditReport:
    """Audit the cgroups of the selected pods, and those of the QoS classes if the command line has no POD.

    `answer` has the pod objects, or the reason why they could not be read.
    """
    from agent.cli.audit.text import AuditReport
    from agent.node.cgroup_audit import AuditPaths, CgroupAuditReport, audit_cgroups

    prepared = read_claims_checkpoint(config.kubelet_dir / CLAIMS_FILE, answer.provenance.read_at)
    claim_users = {uid for claim in prepared.items for uid in claim.pods}
    node_pods = parse_pods(answer, config.node_name, claim_users, several_nodes=args.pods is not None)
    now_s = time.time()
    if answer.absence is not None:
        result = CgroupAuditReport(None)
    else:
        selected = select_pods(node_pods.pods, args.pod, include_all=args.all)
        paths = AuditPaths(
            config.sysfs_root,
            config.cgroupfs_root,
            config.kubelet_cgroup_root,
            config.kubelet_dir,
            args.kubelet_version,
            config.procfs_root,
            args.kubelet_config,
        )
        exclusive = read_driver_cpus(config, answer, prepared)
        result = audit_cgroups(
            paths,
            node_pods.pods,
            selected,
            now_s,
            with_qos_classes=args.pod is None,
            all_listed=not node_pods.invalid,
            driver_cpus=exclusive.by_pod,
            earlier_qos=earlier_qos,
        )
        gaps = (*result.gaps, *exclusive.gaps)
        if args.pods is None and args.pod is None and prepared.absence is Absence.UNREADABLE:
            gaps += (f"pods with claims for extended resources: {prepared.reason}",)
        result = replace(result, gaps=gaps)
    node = node_pods.node or config.node_name
    return AuditReport(node, answer, node_pods.invalid, result, now_s, in_full=args.pod is not None)


def _read_pods(args: Namespace, kubelet_dir: Path) -> SourceAnswer[Mapping[str, object]]:
    """Return the pod objects from the file of ``--pods`` or the kubelet's pods API, or why there are none."""
    if args.pods is not None:
        from agent.sources.kubectl_files import POD, read_objects

        return read_objects(args.pods, POD, read_clocks())
    import asyncio

    from agent.serve.kubelet.pods_api import SOCKET, list_pods

    return asyncio.run(list_pods(kubelet_dir / SOCKET, read_clocks))


VERB = Subcommand(
    name="audit",
    summary="compare the cgroups of pods with the values that follow from the pod specs",
    description=(
        "Compares the cgroups of pods that have claims with the values that follow from the pods' objects "
        "and the kubelet's configuration: CPU weight and quota, memory, swap, hugepages, CPUs, OOM scores; "
        "shows the arithmetic. Changes nothing. Exits with 0 if all values are as expected, 1 if one is not, "
        "3 if none is wrong but some could not be evaluated, for example because a container started within "
        "the last 30 s or no pod objects are available."
    ),
    examples=(
        ("drahealth audit", "pods with claims, from the kubelet's pods API"),
        (
            "drahealth audit ml/train-0 --pods pods.json",
            "every cgroup setting of one pod, from kubectl's output",
        ),
    ),
    add_arguments=add_arguments,
    main=main,
)


# --- input -------------------------------------------------------------------------------------------------

KUBECTL: Final = "kubectl get pods -A -o json --field-selector spec.nodeName=NODE"


# --- pods --------------------------------------------------------------------------------------------------


class NodePods(NamedTuple):
    """Pods of one Kubernetes node, parsed from their API objects."""

    pods: tuple[Pod, ...]
    invalid: tuple[str, ...]
    """Pods whose objects cannot be used, each with the reason."""
    node: str = ""
    """Name of the Kubernetes node in the pod objects; empty if they have none."""


def parse_pods(
    answer: SourceAnswer[JsonObject], node: str, claim_users: Container[str], *, several_nodes: bool
) -> NodePods:
    """Return the pods of this Kubernetes node, parsed from pod objects.

    Args:
        answer: Pod objects.
        node: Name of this node. It is ignored if all pod objects belong to one node.
        claim_users: UIDs of pods with prepared claims.
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
            pods.append(parse_pod(obj, from_kubelet=from_kubelet, claim_users=claim_users))
        except ProbeError as error:
            wrong.append(str(error))
    return NodePods(tuple(pods), tuple(wrong), selected)


def select_pods(pods: Sequence[Pod], name: str | None, *, include_all: bool) -> tuple[Pod, ...]:
    """Return the pod with the name `name`.

    If `name` is None, return the active pods with claims; with `include_all`, return all active pods.

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
        known_pods = format_count(len(pods), "pod")
        raise UsageError(f"no pod {name!r} among the {known_pods} of this node{suggestion(name, known)}")
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


def read_driver_cpus(
    config: Config, pods: SourceAnswer[Mapping[str, object]], prepared: SourceAnswer[PreparedClaim]
) -> DriverExclusiveCpus:
    """Return the CPUs that drivers allocated to containers for exclusive use.

    The function uses files only, because an audit needs no running agent. Drivers' files declare which CPUs
    are exclusive. The kubelet's checkpoint, `prepared`, lists the claim that holds the CPUs. The pod's object
    names the container that uses the claim.
    """
    try:
        files = declaration_file.read_declarations(
            config.runtime_dir / declaration_file.DIRECTORY, (), config.node_name
        )
    except ProbeError as error:
        return DriverExclusiveCpus({}, _exclusive_gaps(str(error)))
    wrong = _exclusive_gaps(*(file.error for file in files))
    parts = (device.part for file in files for device in file.devices)
    if not any(isinstance(part, DeclaredCpuDevice) and part.exclusive for part in parts):
        return DriverExclusiveCpus({}, wrong)
    from agent.devices.consumers.consumer_map import build_consumer_map
    from agent.devices.consumers.consumer_queries import exclusive_cpus
    from agent.devices.consumers.kube_objects import parse_pods
    from agent.model.claim_sources import SourceAnswers

    consumers = build_consumer_map(SourceAnswers(prepared=(prepared,), pods=(parse_pods(pods),)))
    return DriverExclusiveCpus(exclusive_cpus(consumers, files), (*wrong, *_exclusive_gaps(prepared.reason)))


def _exclusive_gaps(*reasons: str) -> tuple[str, ...]:
    return tuple(f"exclusive CPUs of drivers: {why}" for why in reasons if why)
