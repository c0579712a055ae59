"""``drahealth history``: lists changes in health and uses of devices, and computes availability."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from agent.cli.subcommand import Subcommand, add_output, add_settings, load_config, print_result
from agent.config.values import parse_duration
from agent.errors import DrahealthError, PermissionDeniedError, UsageError, suggestion
from agent.model.health import Severity
from agent.model.history import ClockReading
from agent.model.settings import HISTORY_FILE
from agent.model.time import NS
from agent.system.files import may_exist

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.cli.output.terminal import TextStyle
    from agent.health.availability_statistics import VerdictSpan
    from agent.model.claim import DeviceRef
    from agent.model.device_usage import PodDeviceUsage
    from agent.model.history import StoredVerdicts
    from agent.store.history_file import HistoryContent

T = TypeVar("T")

MAX_SHOWN: Final = 40
"""Largest number of lines in each table without ``--all``."""


def add_arguments(parser: ArgumentParser) -> None:
    views = parser.add_mutually_exclusive_group()
    views.add_argument("--changes", action="store_true", help="only the changes of verdicts on devices")
    views.add_argument("--uses", action="store_true", help="only the uses of devices by pods")
    views.add_argument(
        "--summary", action="store_true", help="the availability and the faults of each device, and the rules"
    )
    views.add_argument(
        "--flapping",
        action="store_true",
        help="as --summary, only devices that stopped being usable 3 times within an hour",
    )
    parser.add_argument("--pod", metavar="POD", help="only uses by this pod: namespace/name, name or UID")
    parser.add_argument(
        "--claim", metavar="CLAIM", help="only uses by this claim: namespace/name, name or UID"
    )
    parser.add_argument(
        "--device", metavar="DEVICE", help="only this device: driver/pool/name, pool/name or name"
    )
    parser.add_argument(
        "--since",
        metavar="TIME",
        help="only changes, and uses that continue or ended, within this time, such as 1h or 7d",
    )
    parser.add_argument(
        "--bad",
        action="store_true",
        help="only changes to a worse state than Healthy, and uses during which the device was not always "
        "healthy",
    )
    parser.add_argument("--all", action="store_true", help=f"show all, not only the newest {MAX_SHOWN}")
    add_output(parser, None, "csv", note="; csv only with --changes, --uses, --summary or --flapping")
    add_settings(parser, "--state-dir", "--procfs-root")


def main(args: Namespace) -> int:
    _check_views(args)
    now_s = time.time()
    age_s = _duration_s(args.since) if args.since is not None else None
    config = load_config(args)
    path = config.state_dir / HISTORY_FILE
    named = [(kind, getattr(args, kind)) for kind in ("device", "pod", "claim")]
    for kind, name in named if not may_exist(path) else ():
        if name is not None:
            raise UsageError(f"nothing is recorded of {kind} {name!r}: history file {path} does not exist")
    if args.summary or args.flapping:
        _print_summary(args, path, _Now(now_s, age_s, config.procfs_root))
    else:
        _print_lists(args, path, _Now(now_s, age_s, config.procfs_root))
    return 0


class _Now(NamedTuple):
    """Time at which the command runs, and the largest age of the records that the command shows."""

    wall_s: float
    age_s: float | None
    procfs_root: Path

    @property
    def since_s(self) -> float | None:
        """Start of the shown part of the history [s since 1970]; None: the whole history is shown."""
        return None if self.age_s is None else self.wall_s - self.age_s

    def clocks(self) -> ClockReading:
        from agent.sources.gpu_os_facts import read_boot_id
        from agent.system.timing import read_boot_clock

        return ClockReading(self.wall_s, read_boot_clock(), read_boot_id(self.procfs_root))


def _check_views(args: Namespace) -> None:
    """Raise UsageError if the flags contradict each other."""
    hint = "\ntry 'drahealth history --help'"
    views = [name for name in ("changes", "uses", "summary", "flapping") if getattr(args, name)]
    for name in ("pod", "claim"):
        if getattr(args, name) is not None and views and not args.uses:
            raise UsageError(
                f"--{name} selects uses of devices and cannot be combined with --{views[0]}; omit one of "
                f"them{hint}"
            )
    if args.bad and (args.summary or args.flapping):
        raise UsageError(
            f"--bad selects changes and uses and cannot be combined with --{views[0]}; omit one of them{hint}"
        )
    if args.output == "csv" and not views:
        raise UsageError(f"-o csv is one table: add --changes, --uses, --summary or --flapping{hint}")


# --- lists -------------------------------------------------------------------------------------------------


def _print_lists(args: Namespace, path: Path, now: _Now) -> None:
    """Print the changes of the verdicts on devices and the uses of devices, or the part that flags select."""
    from agent.cli.history.text import (
        change_document,
        changes_csv,
        document,
        render,
        render_changes,
        render_none,
        uses_csv,
    )
    from agent.health.availability_statistics import ObservedTimeAxis, listed_changes, verdict_spans
    from agent.store.history_file import read_history, read_verdicts

    wants_uses, of_pods = not args.changes, args.pod is not None or args.claim is not None
    wants_changes = not args.uses and not of_pods
    record = _read_history(path, read_history) if wants_uses or args.device is not None else None
    verdicts = _read_history(path, read_verdicts) if wants_changes or args.device is not None else None
    devices = _selected_devices(args.device, record, verdicts)
    uses = tuple(_matching_uses(args, record, devices, now.since_s)) if wants_uses and record else ()
    timeline = ObservedTimeAxis(verdicts.periods if verdicts else (), now.clocks())
    changes: list[VerdictSpan] = []
    if wants_changes and verdicts:
        found = listed_changes(verdict_spans(verdicts, timeline), now.since_s)
        changes = [row for row in found if _is_selected(row.change.device, devices) and _is_bad(args, row)]
    if args.output == "csv":
        sys.stdout.write(changes_csv(changes, timeline) if args.changes else uses_csv(uses))
        return

    def as_document() -> dict[str, Any]:
        written_s = [record.last_write_s] if record else []
        written_s += [period.ended_s for period in verdicts.periods] if verdicts else []
        left_s = max(written_s, default=0.0)
        listed = [change_document(change, timeline) for change in changes]
        return {
            **document(uses if wants_uses else None, path, left_s),
            **({} if args.uses else {"changes": listed}),
        }

    def text(style: TextStyle) -> str:
        if record is None and verdicts is None:
            return render_none(path, style)
        tables = []
        if changes:
            newest = changes if args.all else changes[:MAX_SHOWN]
            tables.append(render_changes(newest, style, hidden=len(changes) - len(newest)))
        if uses and record:
            shown = uses if args.all else uses[:MAX_SHOWN]
            hidden = len(uses) - len(shown)
            tables.append(render(shown, style, now_s=now.wall_s, left_s=record.last_write_s, hidden=hidden))
        return "\n".join(tables) or _no_entry(args, wants_changes, wants_uses)

    print_result(args, as_document, text)


def _no_entry(args: Namespace, wants_changes: bool, wants_uses: bool) -> str:
    kinds = [name for name, is_wanted in (("change", wants_changes), ("use", wants_uses)) if is_wanted]
    entries = " or ".join(kinds)
    is_filtered = args.pod or args.claim or args.device or args.since or args.bad
    return f"no recorded {entries} matches\n" if is_filtered else f"no {entries} is recorded yet\n"


def _is_bad(args: Namespace, span: VerdictSpan) -> bool:
    from agent.cli.history.text import SEVERITIES

    return not args.bad or SEVERITIES[span.verdict.state] > Severity.INFO


# --- availability ------------------------------------------------------------------------------------------


def _print_summary(args: Namespace, path: Path, now: _Now) -> None:
    """Print the availability of devices, and a table of the health rules that had findings."""
    from agent.cli.history.text import render_none, render_summary, summary_csv, summary_document
    from agent.health.availability_statistics import ObservedTimeAxis, summarize, verdict_spans
    from agent.store.history_file import read_history, read_verdicts

    verdicts = _read_history(path, read_verdicts)
    record = _read_history(path, read_history) if args.device is not None else None
    timeline = ObservedTimeAxis(verdicts.periods if verdicts else (), now.clocks())
    spans = verdict_spans(verdicts, timeline) if verdicts else {}
    devices = _selected_devices(args.device, record, verdicts)
    selected = {device: known for device, known in spans.items() if _is_selected(device, devices)}
    summary = summarize(selected, timeline, now.since_s)
    if args.flapping:
        flapping = {device.device for device in summary.devices if device.is_flapping}
        selected = {device: known for device, known in selected.items() if device in flapping}
        summary = summarize(selected, timeline, now.since_s)
    if args.output == "csv":
        sys.stdout.write(summary_csv(summary))
        return

    def text(style: TextStyle) -> str:
        if verdicts is None or not spans:
            return render_none(path, style)
        if not summary.devices:
            return "no device flaps\n" if args.flapping else "no recorded device matches\n"
        return render_summary(summary, style)

    print_result(args, lambda: summary_document(summary, path), text)


# --- selection ---------------------------------------------------------------------------------------------


def _duration_s(text: str) -> float:
    try:
        return parse_duration(text) / NS
    except ValueError as error:
        raise UsageError(f"--since: {error}\ntry 'drahealth history --help'") from None


def _read_history(path: Path, read: Callable[[Path], T]) -> T | None:
    """Return what the function `read` reads from the history file `path`; None: there is no such file."""
    from agent.store.state_files import UnusableFile

    try:
        return read(path)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise PermissionDeniedError(f"history file {path}: cannot be read: {error.strerror}") from None
    except OSError as error:
        raise DrahealthError(f"history file {path}: cannot be read: {error.strerror}") from None
    except UnusableFile as error:
        raise DrahealthError(f"history file {path}: {error}") from None


def _all_uses(record: HistoryContent | None) -> tuple[PodDeviceUsage, ...]:
    return (*record.running, *record.ended) if record else ()


def _selected_devices(
    name: str | None, record: HistoryContent | None, verdicts: StoredVerdicts | None
) -> frozenset[DeviceRef] | None:
    """Return the devices with the name in ``--device``; None: without the flag, all devices are selected.

    Raises:
        UsageError: Nothing is recorded of a device with that name; the text suggests a similar name.
    """
    from agent.cli.history.text import device_names

    if name is None or (record is None and verdicts is None):
        return None
    devices = {use.device for use in _all_uses(record)}
    devices |= {change.device for change in (verdicts.changes if verdicts else ())}
    names = {device: device_names(device) for device in devices}
    return frozenset(_with_name(f"nothing is recorded of device {name!r}", name, names))


def _is_selected(device: DeviceRef, devices: frozenset[DeviceRef] | None) -> bool:
    return devices is None or device in devices


def _matching_uses(
    args: Namespace,
    record: HistoryContent,
    devices: frozenset[DeviceRef] | None,
    since_s: float | None,
) -> Iterator[PodDeviceUsage]:
    """Yield the uses of `devices` that match ``--pod``, ``--claim``, ``--since`` and ``--bad``.

    `devices` is None if all devices are selected.

    Raises:
        UsageError: No recorded use has the given pod or claim; the text suggests a similar name.
    """
    from agent.cli.history.text import claim_names, pod_names

    found = {use.id: use for use in _all_uses(record)}
    for kind, names_of in (("pod", pod_names), ("claim", claim_names)):
        if (name := getattr(args, kind)) is not None:
            names = {id_: names_of(use) for id_, use in found.items()}
            ids = _with_name(f"no use of {kind} {name!r} is recorded", name, names)
            found = {id_: found[id_] for id_ in ids}
    for use in found.values():
        is_recent = since_s is None or use.ended is None or use.ended.noticed_s >= since_s
        is_bad = use.worst.severity > Severity.INFO or not args.bad
        if is_recent and is_bad and _is_selected(use.device, devices):
            yield use


def _with_name(problem: str, name: str, names: Mapping[T, Iterable[str]]) -> list[T]:
    """Return the keys of `names` whose values contain `name`.

    Raises:
        UsageError: No value contains `name`; the error text is `problem` and a similar name.
    """
    known = {key: set(own) for key, own in names.items()}
    found = [key for key, own in known.items() if name in own]
    if not found:
        raise UsageError(f"{problem}{suggestion(name, set().union(*known.values()))}")
    return found


VERB = Subcommand(
    name="history",
    summary="list changes of verdicts and which pods used which devices; compute availability",
    description=(
        "Lists what the agent has recorded: how the verdicts on devices changed, and which pod used which "
        "device, including pods that are gone. --summary computes the availability of each device. Reads a "
        "file and needs no running agent. Exits with 0 if the file was read, 64 if nothing is recorded for "
        "the given name, 70 if the file cannot be used, 75 if the agent keeps it locked for more than 2 s, "
        "77 if this user may not read it."
    ),
    examples=(
        ("drahealth history --device gpu-3 --since 7d", "what happened to a device, and which pods it had"),
        ("drahealth history --summary --since 30d", "the availability and the faults of all devices"),
    ),
    add_arguments=add_arguments,
    main=main,
)
