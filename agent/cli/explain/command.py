"""``drahealth explain``: shows which pods a device affects, and the state of a pod's or claim's devices."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.cli.subcommand import (
    EXIT_OF_SEVERITY,
    Subcommand,
    add_output,
    add_settings,
    config_file_of,
    flags_of,
    load_config,
    print_result,
)
from agent.config.config import RUNTIME_DIR, load_runtime_dir
from agent.errors import ConfigError, UsageError, suggestion

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.cli.explain.model import SourcePaths

HELP: Final = "try 'drahealth explain --help'"
KINDS: Final = ("pod", "claim")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "what",
        metavar="DEVICE | pod POD | claim CLAIM",
        nargs="*",
        help="device: driver/pool/name, pool/name, name or CDI id; pod or claim: namespace/name, name or UID",
    )
    parser.add_argument(
        "--all", action="store_true", help="all claims on the node, with a line for each consumer"
    )
    parser.add_argument(
        "--pods",
        metavar="FILE",
        type=Path,
        help="output of 'kubectl get pods -A -o json' or yaml, also of 'pods,jobs,deployments' or other "
        "workloads, - for standard input; of the sources on the node, then only those that a flag names are "
        "read",
    )
    parser.add_argument(
        "--claims",
        metavar="FILE",
        type=Path,
        help="output of 'kubectl get resourceclaims -A -o json' or yaml, as --pods",
    )
    add_output(parser)
    add_settings(
        parser, "--kubelet-dir", "--runtime-dir", "--state-dir", "--cgroupfs-root", "--kubelet-cgroup-root"
    )


def main(args: Namespace) -> int:
    kind, name = _kind_and_name(args.what, is_all=args.all)
    if args.pods == args.claims == Path("-"):
        raise UsageError(f"--pods and --claims: only one of them can be standard input\n{HELP}")
    paths = _source_paths(args)
    import asyncio

    from agent.cli.explain.build import ALL, explain, explain_all, severity_of
    from agent.cli.explain.document import document
    from agent.cli.explain.sources import query_all_sources
    from agent.cli.explain.text import render

    with _gc_disabled():
        answers = asyncio.run(query_all_sources(paths))
        explanation = explain_all(answers) if kind == ALL else explain(kind, name, answers)
    print_result(args, lambda: document(explanation), lambda style: render(explanation, style))
    return EXIT_OF_SEVERITY[severity_of(explanation)]


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Disable Python's garbage collection in a ``with`` block.

    The collection would take half of the command's time and free no memory.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _kind_and_name(words: list[str], *, is_all: bool) -> tuple[str, str]:
    """Return the kind (device, pod or claim) and the name of the object to explain, from arguments `words`.

    With ``--all``, the kind is ``all`` and the name is empty.
    """
    if is_all and words:
        raise UsageError(f"--all explains all claims; leave out {' '.join(words)!r}\n{HELP}")
    match words:
        case [] if is_all:
            return "all", ""
        case []:
            raise UsageError(f"no device, pod or claim is given, and not --all\n{HELP}")
        case [kind] if kind in KINDS:
            raise UsageError(f"no {kind} is given; write: drahealth explain {kind} NAMESPACE/NAME\n{HELP}")
        case [name]:
            return "device", name
        case [kind, name] if kind in KINDS:
            return kind, name
        case [kind, _]:
            raise UsageError(
                f"object kind {kind!r} is not one of {', '.join(KINDS)}{suggestion(kind, KINDS)}\n{HELP}"
            )
        case _:
            raise UsageError(f"{len(words)} arguments are given; name one device, pod or claim\n{HELP}")


def _source_paths(args: Namespace) -> SourcePaths:
    """Return the paths of the files and sockets that the command reads.

    With ``--pods`` or ``--claims``, return only the paths that a flag names.
    """
    from agent.cli.explain.model import SourcePaths

    flags, file = flags_of(args), config_file_of(args)
    config = load_config(args)
    offline = args.pods is not None or args.claims is not None
    runtime_dir = state_dir = None
    if not offline or "--runtime-dir" in flags:
        try:
            runtime_dir = load_runtime_dir(flags, os.environ, file=file)
        except ConfigError:  # a user without a runtime directory: use the node's agent
            runtime_dir = RUNTIME_DIR
    if not offline or flags.keys() & {"--state-dir", "--runtime-dir"}:
        state_dir = config.state_dir
    kubelet_dir = config.kubelet_dir if not offline or "--kubelet-dir" in flags else None
    cgroupfs_root = config.cgroupfs_root if not offline or "--cgroupfs-root" in flags else None
    return SourcePaths(
        runtime_dir,
        kubelet_dir,
        state_dir,
        args.pods,
        args.claims,
        cgroupfs_root,
        config.kubelet_cgroup_root,
        config.node_name,
    )


VERB = Subcommand(
    name="explain",
    summary="show which pods a device affects, or the devices of a pod or claim",
    description=(
        "Reads all sources on the node in parallel, with a timeout of 2 s for a socket and 5 s for a file: "
        "the agent and its history, the kubelet, cgroups, drivers; and names the source of each fact. With "
        "--all it lists all claims on the node with their consumers, the worst devices first. Exits "
        "with 0 if the worst device concerned is healthy, 1 if it is degraded, 2 if it is unhealthy, 3 if it "
        "is unknown; 64 if the name is not known, 69 if no source answers, 77 in place of both if this user "
        "may not read some sources."
    ),
    examples=(
        ("drahealth explain gpu.example.com/node-1/gpu-3", "health of a device, and the pods that use it"),
        ("drahealth explain pod team-a/train-0", "the claims and devices of a pod"),
    ),
    add_arguments=add_arguments,
    main=main,
)
