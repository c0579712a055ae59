"""``drahealth audit``: compares the cgroups of pods with the values that follow from the pods' objects."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from agent.cli.exits import EXIT_OF_SEVERITY
from agent.cli.output.terminal import style_of
from agent.cli.verb import Verb, add_output, add_settings, config_file_of, flags_of
from agent.config.config import load
from agent.errors import ProbeError, UsageError
from agent.model.health import Severity
from agent.system.timing import read_clocks

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Mapping

    from agent.model.claim_sources import SourceAnswer


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "pod", metavar="POD", nargs="?", help="show one pod in full: name, namespace/name or UID"
    )
    parser.add_argument(
        "--all", action="store_true", help="audit every running pod, not only those with claims"
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
    add_output(parser)
    add_settings(
        parser,
        *("--node-name", "--sysfs-root", "--cgroupfs-root", "--kubelet-cgroup-root"),
        *("--kubelet-dir", "--runtime-dir"),
    )


def main(args: Namespace) -> int:
    from agent.cli.audit.inputs import parse_pods, read_driver_cpus, select_pods
    from agent.cli.audit.text import AuditReport, document, exit_of, render
    from agent.node.cgroup_audit import CgroupComparisonResult, NodePaths, audit
    from agent.sources.node_facts import counts_claims

    config = load(flags_of(args), os.environ, file=config_file_of(args), serves=False)
    try:
        counts_claims(args.kubelet_version)
    except ValueError as error:
        raise UsageError(f"--kubelet-version: {error}") from None
    answer = _read_pods(args, config.kubelet_dir)
    node_pods = parse_pods(answer, config.node_name, of_many=args.pods is not None)
    now_s = time.time()
    if answer.absence is not None:
        result = CgroupComparisonResult(None)
    else:
        selected = select_pods(node_pods.pods, args.pod, every=args.all)
        paths = NodePaths(
            config.sysfs_root,
            config.cgroupfs_root,
            config.kubelet_cgroup_root,
            config.kubelet_dir,
            args.kubelet_version,
        )
        exclusive = read_driver_cpus(config, answer)
        try:
            result = audit(
                paths,
                node_pods.pods,
                selected,
                now_s,
                classes=args.pod is None,
                complete=not node_pods.wrong,
                by_drivers=exclusive.by_pod,
            )
        except ProbeError as error:
            print(f"drahealth: {error}", file=sys.stderr)
            return EXIT_OF_SEVERITY[Severity.UNKNOWN]
        result = replace(result, gaps=(*result.gaps, *exclusive.gaps))
    node = node_pods.node or config.node_name
    report = AuditReport(node, answer, node_pods.wrong, result, now_s, whole=args.pod is not None)
    if args.output == "json":
        print(json.dumps(document(report), indent=2))
    else:
        print(render(report, style_of(sys.stdout, args.color, os.environ)), end="")
    return exit_of(report)


def _read_pods(args: Namespace, kubelet_dir: Path) -> SourceAnswer[Mapping[str, object]]:
    """Return the pod objects that ``audit`` compares; without any, the answer has the reason."""
    if args.pods is not None:
        from agent.sources.kube_objects import POD, read_objects

        return read_objects(args.pods, POD, read_clocks())
    import asyncio

    from agent.serve.kubelet.pods_api import SOCKET, list_pods

    return asyncio.run(list_pods(kubelet_dir / SOCKET, read_clocks))


VERB = Verb(
    name="audit",
    summary="compare the cgroups of pods with the values that follow from the pod specs",
    description=(
        "Compares the cgroups of pods that have claims with the values that follow from the pods' objects: "
        "CPU weight and quota, memory, hugepages, CPUs; shows the arithmetic. Changes nothing. Exits with 0 "
        "if all values are as expected, 1 if one is not, 3 if none is wrong but some could not be evaluated, "
        "for example because a container started within the last 30 s or no pod objects are available."
    ),
    examples=(
        ("drahealth audit", "pods with claims, from the kubelet's pods API"),
        ("drahealth audit ml/train-0 --pods pods.json", "every knob of one pod, from kubectl's output"),
    ),
    add_arguments=add_arguments,
    main=main,
)
