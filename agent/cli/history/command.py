"""``drahealth history``: lists which pod used which device, and the device's health when the use ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.cli.verb import Subcommand, add_output, add_settings, load_config, print_result
from agent.config.values import parse_duration
from agent.errors import DrahealthError, PermissionDeniedError, UsageError, suggestion
from agent.model.health import Severity
from agent.model.settings import HISTORY_FILE
from agent.model.time import NS

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.cli.output.terminal import TextStyle
    from agent.model.device_usage import PodDeviceUsage
    from agent.store.history_file import HistoryContent

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

    now_s = time.time()
    since_s = now_s - _duration_s(args.since) if args.since is not None else None
    config = load_config(args)
    path = config.state_dir / HISTORY_FILE
    record = _read_history(path)
    found = tuple(_matching_uses(args, (*record.running, *record.ended), since_s)) if record else ()

    def text(style: TextStyle) -> str:
        if record is None:
            return render_none(path, style)
        if not found:
            return "no recorded use matches\n"
        shown = found if args.all else found[:MAX_SHOWN]
        hidden = len(found) - len(shown)
        return render(shown, style, now_s=now_s, left_s=record.last_write_s, hidden=hidden)

    print_result(args, lambda: document(found, path, record.last_write_s if record else 0), text)
    return 0


def _duration_s(text: str) -> float:
    try:
        return parse_duration(text) / NS
    except ValueError as error:
        raise UsageError(f"--since: {error}\ntry 'drahealth history --help'") from None


def _read_history(path: Path) -> HistoryContent | None:
    """Return the recorded uses of devices by pods from the history file `path`; None: no such file."""
    from agent.store.history_file import read_history
    from agent.store.state_files import UnusableFile

    try:
        return read_history(path)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise PermissionDeniedError(f"history file {path}: cannot be read: {error.strerror}") from None
    except OSError as error:
        raise DrahealthError(f"history file {path}: cannot be read: {error.strerror}") from None
    except UnusableFile as error:
        raise DrahealthError(f"history file {path}: {error}") from None


def _matching_uses(
    args: Namespace, uses: Iterable[PodDeviceUsage], since_s: float | None
) -> Iterator[PodDeviceUsage]:
    """Yield the uses of devices that match ``--pod``, ``--claim``, ``--device``, ``--since`` and ``--bad``.

    Raises:
        UsageError: No recorded use has the given pod, claim or device; the text suggests a similar name.
    """
    from agent.cli.history.text import claim_names, device_names, pod_names

    found = tuple(uses)
    for kind, names_of in (("pod", pod_names), ("claim", claim_names), ("device", device_names)):
        if (name := getattr(args, kind)) is not None:
            found = _uses_by_name(kind, name, found, names_of)
    for use in found:
        is_recent = since_s is None or use.ended is None or use.ended.noticed_s >= since_s
        if is_recent and (use.worst.severity > Severity.INFO or not args.bad):
            yield use


def _uses_by_name(
    kind: str,
    name: str,
    uses: tuple[PodDeviceUsage, ...],
    names_of: Callable[[PodDeviceUsage], Iterator[str]],
) -> tuple[PodDeviceUsage, ...]:
    found = tuple(use for use in uses if name in names_of(use))
    if not found:
        known = {known_name for use in uses for known_name in names_of(use)}
        raise UsageError(f"no use of {kind} {name!r} is recorded{suggestion(name, known)}")
    return found


VERB = Subcommand(
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
