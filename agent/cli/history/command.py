"""``drahealth history``: lists which pod used which device, and the device's state at the end."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.cli.output.terminal import style_of
from agent.cli.verb import Verb, add_output, add_settings, config_file_of, flags_of
from agent.config.config import load
from agent.config.values import parse_duration
from agent.errors import DrahealthError, PermissionDenied, UsageError, suggestion
from agent.model.health import Severity
from agent.model.time import NS

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.model.uses import DeviceUsage
    from agent.store.history import HistoryContent

MAX_SHOWN: Final = 40
"""Limit of lines in the table without ``--all``."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--pod", metavar="POD", help="only this pod: namespace/name, name or UID")
    parser.add_argument("--claim", metavar="CLAIM", help="only this claim: namespace/name, name or UID")
    parser.add_argument(
        "--device", metavar="DEVICE", help="only this device: driver/pool/name, pool/name or name"
    )
    parser.add_argument(
        "--since", metavar="TIME", help="only uses that continue or ended within this time, such as 1h"
    )
    parser.add_argument(
        "--bad", action="store_true", help="only uses during which the device was not always healthy"
    )
    parser.add_argument("--all", action="store_true", help=f"show all, not only the newest {MAX_SHOWN}")
    add_output(parser)
    add_settings(parser, "--state-dir")


def main(args: Namespace) -> int:
    from agent.cli.history.text import document, render, render_none
    from agent.node.pods.history_recorder import FILE

    now_s = time.time()
    since_s = now_s - _duration_s(args.since) if args.since is not None else None
    config = load(flags_of(args), os.environ, file=config_file_of(args), serves=False)
    path = config.state_dir / FILE
    record = _read(path)
    found = tuple(_select(args, (*record.running, *record.ended), since_s)) if record else ()
    if args.output == "json":
        print(json.dumps(document(found, path, record.left_s if record else 0), indent=2))
        return 0
    style = style_of(sys.stdout, args.color, os.environ)
    if record is None:
        print(render_none(path, style), end="")
    elif not found:
        print("no recorded use matches")
    else:
        shown = found if args.all else found[:MAX_SHOWN]
        hidden = len(found) - len(shown)
        print(render(shown, style, now_s=now_s, left_s=record.left_s, hidden=hidden), end="")
    return 0


def _duration_s(text: str) -> float:
    try:
        return parse_duration(text) / NS
    except ValueError as error:
        raise UsageError(f"--since: {error}\ntry 'drahealth history --help'") from None


def _read(path: Path) -> HistoryContent | None:
    """Return the recorded uses of devices in the file `path`; None: no such file."""
    from agent.store.files import CorruptFile
    from agent.store.history import read

    try:
        return read(path)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise PermissionDenied(f"{path}: {error.strerror}") from None
    except OSError as error:
        raise DrahealthError(f"{path}: {error.strerror}") from None
    except CorruptFile as error:
        raise DrahealthError(f"{path}: {error}") from None


def _select(args: Namespace, uses: Iterable[DeviceUsage], since_s: float | None) -> Iterator[DeviceUsage]:
    """Yield the recorded uses of devices that match the flags.

    Raises:
        UsageError: No recorded use has the given pod, claim or device; the text suggests a similar name.
    """
    from agent.cli.history.text import claim_names, device_names, pod_names

    found = tuple(uses)
    for kind, names_of in (("pod", pod_names), ("claim", claim_names), ("device", device_names)):
        if (name := getattr(args, kind)) is not None:
            found = _filter(kind, name, found, names_of)
    for use in found:
        is_recent = since_s is None or use.ended is None or use.ended.noticed_s >= since_s
        if is_recent and (use.worst.severity > Severity.INFO or not args.bad):
            yield use


def _filter(
    kind: str, name: str, uses: tuple[DeviceUsage, ...], names_of: Callable[[DeviceUsage], Iterator[str]]
) -> tuple[DeviceUsage, ...]:
    found = tuple(use for use in uses if name in names_of(use))
    if not found:
        known = {known_name for use in uses for known_name in names_of(use)}
        raise UsageError(f"no use of {kind} {name!r} is recorded{suggestion(name, known)}")
    return found


VERB = Verb(
    name="history",
    summary="list which pods used which devices, and the devices' state at the end",
    description=(
        "Lists the device usage that the agent has recorded, including pods that are gone. Reads a file and "
        "needs no running agent. Exits with 0 if the file was read, 64 if nothing is recorded for the given "
        "name, 70 if the file cannot be used, 75 if the agent keeps it locked for more than 2 s, 77 if this "
        "user may not read it."
    ),
    examples=(
        ("drahealth history --bad --since 24h", "pods with unhealthy devices in the last day"),
        ("drahealth history --pod team-a/train-0", "the devices that a pod used, even if it is gone"),
    ),
    add_arguments=add_arguments,
    main=main,
)
