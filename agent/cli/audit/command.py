"""``drahealth audit``: compares the cgroups of pods with the values that follow from the pods' objects."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.cli.exits import EXIT_OF_SEVERITY
from agent.cli.subcommand import Subcommand, add_output, add_settings, load_config, print_result
from agent.errors import ProbeError, UsageError
from agent.model.health import Severity
from agent.system.timing import read_clocks

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Mapping

    from agent.cgroup_audit.audit import QosDifferences
    from agent.cli.audit.text import AuditReport
    from agent.config.config import Config
    from agent.model.claim_sources import SourceAnswer

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
        help="output of 'kubectl get pods -A -o json' or yaml (default: the kubelet's pods API)",
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
    from agent.sources.machine_cgroup_facts import kubelet_counts_claims

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
        print(f"drahealth: {error}", file=sys.stderr)
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
    """Audit the cgroups of the selected pods.
    Without POD on the command line, audit those of the QoS classes, too.

    ``answer`` has the pod objects.
    """
    from agent.cli.audit.inputs import parse_pods, read_driver_cpus, select_pods
    from agent.cli.audit.text import AuditReport
    from agent.node.cgroup_audit import AuditPaths, CgroupAuditReport, audit_cgroups

    node_pods = parse_pods(answer, config.node_name, several_nodes=args.pods is not None)
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
        exclusive = read_driver_cpus(config, answer)
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
        result = replace(result, gaps=(*result.gaps, *exclusive.gaps))
    node = node_pods.node or config.node_name
    return AuditReport(node, answer, node_pods.invalid, result, now_s, in_full=args.pod is not None)


def _read_pods(args: Namespace, kubelet_dir: Path) -> SourceAnswer[Mapping[str, object]]:
    """Return the pod objects from ``--pods`` or the kubelet's pods API, or the reason why there are none."""
    if args.pods is not None:
        from agent.sources.kube_object_file import POD, read_objects

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
