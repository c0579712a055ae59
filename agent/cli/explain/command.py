"""``drahealth explain``: who is hurt by a device, and why a pod or a claim is as it is."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.cli.exits import EXIT_OF_SEVERITY
from agent.cli.output.terminal import style_of
from agent.cli.verb import Verb, add_output, add_settings, config_file_of, flags_of
from agent.config.config import RUNTIME_DIR, load, load_runtime_dir
from agent.errors import ConfigError, UsageError, suggestion

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.cli.explain.places import Places

HELP: Final = "try 'drahealth explain --help'"
KINDS: Final = ("pod", "claim")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "what",
        metavar="DEVICE | pod POD | claim CLAIM",
        nargs="+",
        help="a device: driver/pool/name, pool/name, name or CDI id; a pod or a claim: namespace/name or UID",
    )
    parser.add_argument(
        "--pods",
        metavar="FILE",
        type=Path,
        help="pods as 'kubectl get pods -A -o json' or yaml shows them; of the node then nothing is "
        "asked but what is named by a flag",
    )
    parser.add_argument(
        "--claims",
        metavar="FILE",
        type=Path,
        help="claims as 'kubectl get resourceclaims -A -o json' or yaml shows them; likewise",
    )
    add_output(parser)
    add_settings(
        parser, "--kubelet-dir", "--runtime-dir", "--state-dir", "--cgroupfs-root", "--kubelet-cgroup-root"
    )


def main(args: Namespace) -> int:
    kind, word = _subject(args.what)
    places = _places(args)
    import asyncio

    from agent.cli.explain.document import document
    from agent.cli.explain.facts import explain, severity_of
    from agent.cli.explain.sources import gather
    from agent.cli.explain.text import render

    with _no_collector():
        explained = explain(kind, word, asyncio.run(gather(places)))
    if args.output == "json":
        print(json.dumps(document(explained), indent=2))
    else:
        print(render(explained, style_of(sys.stdout, args.color, os.environ)), end="")
    return EXIT_OF_SEVERITY[severity_of(explained)]


@contextmanager
def _no_collector() -> Iterator[None]:
    """Cycles are not looked for: in what is read there are none, and with thousands of pods that is nearly
    half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _subject(words: list[str]) -> tuple[str, str]:
    """What is asked for, and its name."""
    match words:
        case [kind] if kind in KINDS:
            raise UsageError(f"which {kind}? drahealth explain {kind} NAMESPACE/NAME\n{HELP}")
        case [name]:
            return "device", name
        case [kind, name] if kind in KINDS:
            return kind, name
        case [kind, _]:
            raise UsageError(f"{kind!r} is none of {', '.join(KINDS)}{suggestion(kind, KINDS)}\n{HELP}")
        case _:
            raise UsageError(f"{len(words)} words, one device, pod or claim at a time\n{HELP}")


def _places(args: Namespace) -> Places:
    """Where to look. With files of objects it is about them, and about those places that are named beside."""
    from agent.cli.explain.places import Places

    flags, file = flags_of(args), config_file_of(args)
    config = load(flags, os.environ, file=file, serves=False)
    offline = args.pods is not None or args.claims is not None
    runtime_dir = state_dir = None
    if not offline or "--runtime-dir" in flags:
        try:
            runtime_dir = load_runtime_dir(flags, os.environ, file=file)
        except ConfigError:  # a user without a place of one's own: then the node's agent
            runtime_dir = RUNTIME_DIR
    if not offline or flags.keys() & {"--state-dir", "--runtime-dir"}:
        state_dir = config.state_dir
    kubelet_dir = config.kubelet_dir if not offline or "--kubelet-dir" in flags else None
    cgroupfs_root = config.cgroupfs_root if not offline or "--cgroupfs-root" in flags else None
    return Places(
        runtime_dir,
        kubelet_dir,
        state_dir,
        args.pods,
        args.claims,
        cgroupfs_root,
        config.kubelet_cgroup_root,
    )


VERB = Verb(
    name="explain",
    summary="who is hurt by a device, and why a pod or a claim is as it is",
    description=(
        "Asks everybody on the node who knows something, at the same time, a socket for 2 s at most and a "
        "file for 5 s: the agent and its record, the kubelet, the cgroups, the drivers; and says who said "
        "what. Exits with 0 if the worst device concerned is healthy, 1 if it is degraded, 2 if it is "
        "unhealthy, 3 if it is unknown; 64 if nothing of that name is known, 69 if nobody says anything."
    ),
    examples=(
        ("drahealth explain gpu.example.com/node-1/gpu-3", "how it is, and whom it hurts"),
        ("drahealth explain pod team-a/train-0", "its claims, their devices, what the kubelet shows"),
    ),
    add_arguments=add_arguments,
    main=main,
)
