"""``drahealth audit``: whether the cgroups of pods say what Kubernetes promised them."""

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
from agent.system.clock import read_clocks

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Mapping

    from agent.model.claim_sources import SourceAnswer


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "pod", metavar="POD", nargs="?", help="one pod in full: its name, namespace/name or UID"
    )
    parser.add_argument("--all", action="store_true", help="every pod that runs, not only those with claims")
    parser.add_argument(
        "--pods",
        metavar="FILE",
        type=Path,
        help="pods as 'kubectl get pods -A -o json' or yaml writes them (default: the kubelet is asked)",
    )
    parser.add_argument(
        "--kubelet-version",
        metavar="VERSION",
        default="",
        help="before 1.37 what claims give is not expected in cgroups (default: it is)",
    )
    add_output(parser)
    add_settings(
        parser,
        *("--node-name", "--sysfs-root", "--cgroupfs-root", "--kubelet-cgroup-root"),
        *("--kubelet-dir", "--runtime-dir"),
    )


def main(args: Namespace) -> int:
    from agent.cli.audit.cpus import read_driver_cpus
    from agent.cli.audit.pods import choose, parse_pods
    from agent.cli.audit.text import Shown, exit_of, render
    from agent.node.cgroup_audit import Audit, Places, audit
    from agent.sources.node_facts import counts_claims

    config = load(flags_of(args), os.environ, file=config_file_of(args), serves=False)
    try:
        counts_claims(args.kubelet_version)
    except ValueError as error:
        raise UsageError(f"--kubelet-version: {error}") from None
    told = _told(args, config.kubelet_dir)
    listed = parse_pods(told, config.node_name, of_many=args.pods is not None)
    now_s = time.time()
    if told.absence is not None:
        found = Audit(None)
    else:
        chosen = choose(listed.pods, args.pod, every=args.all)
        places = Places(
            config.sysfs_root,
            config.cgroupfs_root,
            config.kubelet_cgroup_root,
            config.kubelet_dir,
            args.kubelet_version,
        )
        own = read_driver_cpus(config, told)
        try:
            found = audit(
                places,
                listed.pods,
                chosen,
                now_s,
                classes=args.pod is None,
                complete=not listed.wrong,
                by_drivers=own.given,
            )
        except ProbeError as error:  # what could not be read is not known
            print(f"drahealth: {error}", file=sys.stderr)
            return EXIT_OF_SEVERITY[Severity.UNKNOWN]
        found = replace(found, gaps=(*found.gaps, *own.gaps))
    shown = Shown(
        listed.node or config.node_name, told, listed.wrong, found, now_s, whole=args.pod is not None
    )
    if args.output == "json":
        from agent.cli.audit.document import document

        print(json.dumps(document(shown), indent=2))
    else:
        print(render(shown, style_of(sys.stdout, args.color, os.environ)), end="")
    return exit_of(shown)


def _told(args: Namespace, kubelet_dir: Path) -> SourceAnswer[Mapping[str, object]]:
    """The objects of pods, or why there are none."""
    if args.pods is not None:
        from agent.sources.kube_objects import POD, read_objects

        return read_objects(args.pods, POD, read_clocks())
    import asyncio

    from agent.serve.kubelet.pods_api import SOCKET, list_pods

    return asyncio.run(list_pods(kubelet_dir / SOCKET, read_clocks))


VERB = Verb(
    name="audit",
    summary="whether the cgroups of pods say what Kubernetes promised them",
    description=(
        "Compares the cgroups of pods that have claims with what follows from the pods' objects: CPU weight "
        "and quota, memory, hugepages, CPUs, with the arithmetic. Changes nothing. Exits with 0 if all is as "
        "promised, 1 if something is not, 3 if nothing was found but something could not be judged, such as "
        "a container that started within the last 30 s, or no pod's object was to be had."
    ),
    examples=(
        ("drahealth audit", "the pods with claims, as the kubelet's pods API tells them"),
        ("drahealth audit ml/train-0 --pods pods.json", "one pod, every knob, by what kubectl wrote"),
    ),
    add_arguments=add_arguments,
    main=main,
)
