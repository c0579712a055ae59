"""``drahealth history``: which pod used which device, and how the device was when that ended."""

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
    from agent.store.history import Record

SHOWN: Final = 40
"""Uses that a table has, unless all are asked for."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--pod", metavar="POD", help="of this pod alone: namespace/name, name or UID")
    parser.add_argument("--claim", metavar="CLAIM", help="of this claim alone, likewise")
    parser.add_argument(
        "--device", metavar="DEVICE", help="of this device alone: driver/pool/name, pool/name or name"
    )
    parser.add_argument("--since", metavar="TIME", help="what goes on, or ended within this time, such as 1h")
    parser.add_argument(
        "--bad", action="store_true", help="those whose device was not simply healthy all the time"
    )
    parser.add_argument("--all", action="store_true", help=f"all of them, not only the newest {SHOWN}")
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
    found = tuple(_chosen(args, (*record.running, *record.ended), since_s)) if record else ()
    if args.output == "json":
        print(json.dumps(document(found, path, record.left_s if record else 0), indent=2))
        return 0
    style = style_of(sys.stdout, args.color, os.environ)
    if record is None:
        print(render_none(path, style), end="")
    elif not found:
        print("nothing of that is recorded")
    else:
        shown = found if args.all else found[:SHOWN]
        hidden = len(found) - len(shown)
        print(render(shown, style, now_s=now_s, left_s=record.left_s, hidden=hidden), end="")
    return 0


def _duration_s(text: str) -> float:
    try:
        return parse_duration(text) / NS
    except ValueError as error:
        raise UsageError(f"--since: {error}\ntry 'drahealth history --help'") from None


def _read(path: Path) -> Record | None:
    """The record; None: there is none."""
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


def _chosen(args: Namespace, uses: Iterable[DeviceUsage], since_s: float | None) -> Iterator[DeviceUsage]:
    """Those that are asked for.

    Raises:
        UsageError: There is nothing of a name that was given; with what was probably meant.
    """
    from agent.cli.history.find import claim_names, device_names, pod_names

    found = tuple(uses)
    for what, names_of in (("pod", pod_names), ("claim", claim_names), ("device", device_names)):
        if (word := getattr(args, what)) is not None:
            found = _named(what, word, found, names_of)
    for use in found:
        is_late = since_s is None or use.ended is None or use.ended.noticed_s >= since_s
        if is_late and (use.worst.severity > Severity.INFO or not args.bad):
            yield use


def _named(
    what: str, word: str, uses: tuple[DeviceUsage, ...], names_of: Callable[[DeviceUsage], Iterator[str]]
) -> tuple[DeviceUsage, ...]:
    found = tuple(use for use in uses if word in names_of(use))
    if not found:
        known = {name for use in uses for name in names_of(use)}
        raise UsageError(f"of {what} {word!r} nothing is recorded{suggestion(word, known)}")
    return found


VERB = Verb(
    name="history",
    summary="which pod used which device, and how that was when it ended",
    description=(
        "Lists what the agent has recorded, and the kubelet forgets when a pod is gone. Reads a file, and "
        "needs no agent. Exits with 0 if it could be read, 64 if it has nothing of what was named, 70 if it "
        "cannot be used, 75 if the agent is writing for over 2 s, 77 if this user may not read it."
    ),
    examples=(
        ("drahealth history --bad --since 24h", "whose devices were not healthy in the last day"),
        ("drahealth history --pod team-a/train-0", "what a pod had that is gone"),
    ),
    add_arguments=add_arguments,
    main=main,
)
