"""``drahealth conform``: checks a DRA driver for conformance by calling the driver as the kubelet does."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent.cli.output.json import API_VERSION, ObjectKeys
from agent.cli.output.text import (
    GAP,
    Badge,
    RowText,
    TableCell,
    TextTable,
    advice,
    clean,
    format_count,
    markdown_table,
    wrap,
)
from agent.cli.subcommand import Subcommand, add_output, print_result
from agent.config.config import KUBELET_DIR
from agent.config.values import S, format_duration, parse_duration
from agent.conform.outcomes import CheckVerdict
from agent.conform.session_record import SESSION_MAX_S, SESSION_MIN_S
from agent.errors import UsageError
from agent.model.time import format_age
from agent.system.files import absolute_path

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.cli.output.terminal import TextStyle
    from agent.conform.check_table import CheckResult, ConformCheck
    from agent.conform.kubelet.prepare_session import PrepareOptions
    from agent.conform.kubelet.session import SessionOptions
    from agent.conform.session_record import SessionRecord
    from agent.model.json_values import JsonObject
    from agent.serve.kube_api.api_server import ApiServer

CDI_DIRS: Final = ("/var/run/cdi", "/etc/cdi")
"""Directories in which container runtimes search for CDI files."""
PREPARE_FLAGS: Final = {
    "claims": "--claims",
    "bad_claims": "--bad-claims",
    "devices": "--device",
    "slices": "--slices",
    "kubeconfig": "--kubeconfig",
    "node_name": "--node-name",
    "claim_command": "--claim-command",
    "restart_command": "--restart-command",
    "device_command": "--device-command",
    "cdi_dirs": "--cdi-dir",
    "remove_cdi": "--remove-cdi",
}
"""Flags of the command line that are only possible with --prepare, by attribute of the arguments."""
SLICES_COMMAND: Final = "kubectl get resourceslices,resourceclaims -A -o json"
HELP: Final = "try 'drahealth conform --help'"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--socket",
        metavar="PATH",
        type=Path,
        help="service socket of the driver (default: the registered one)",
    )
    parser.add_argument(
        "--plugin-dir",
        metavar="DIR",
        type=Path,
        help="also check registration, in the kubelet's plugins_registry or a directory like it",
    )
    parser.add_argument("--driver", metavar="NAME", help="the driver to check, if several are registered")
    parser.add_argument(
        "--kubelet-dir",
        metavar="DIR",
        type=Path,
        default=KUBELET_DIR,
        help=f"directory that must contain the endpoints (default: {KUBELET_DIR})",
    )
    parser.add_argument(
        "--for",
        dest="window",
        metavar="TIME",
        default="40s",
        help=f"how long to record, {SESSION_MIN_S}s to {SESSION_MAX_S // 60}m "
        "(default: 40s, more than the default lease)",
    )
    parser.add_argument(
        "--refuse",
        action="store_true",
        help="report a failed registration to the driver once; some drivers exit then: not for production",
    )
    parser.add_argument(
        "--no-notify",
        dest="notify",
        action="store_false",
        help="do not report to the driver that it is registered: without a kubelet, some drivers then begin "
        "their work and publish ResourceSlices",
    )
    _add_prepare_arguments(parser)
    parser.add_argument("--checks", action="store_true", help="list the checks instead; needs no driver")
    add_output(parser, markdown_with="--checks")


def _add_prepare_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group(
        "claims", "The driver reads the claims itself, so they must exist. All are unprepared at the end."
    )
    group.add_argument("--prepare", action="store_true", help="also prepare and unprepare claims")
    group.add_argument(
        "--claims", metavar="FILE", type=Path, help="allocated ResourceClaims that no pod uses, JSON or YAML"
    )
    group.add_argument(
        "--bad-claims",
        metavar="FILE",
        type=Path,
        help="allocated ResourceClaims that the driver must refuse (default: claims that do not exist)",
    )
    group.add_argument(
        "--device",
        dest="devices",
        metavar="POOL/NAME",
        action="append",
        default=[],
        help="make a claim for this device, which no pod may use; repeatable",
    )
    group.add_argument(
        "--slices",
        metavar="FILE",
        type=Path,
        help="make claims for free devices of these ResourceSlices, JSON or YAML; claims in the file hold "
        "theirs",
    )
    group.add_argument(
        "--kubeconfig",
        metavar="FILE",
        type=Path,
        help="create and delete claims at this API server; without --slices and --device for free devices of "
        "its ResourceSlices",
    )
    group.add_argument(
        "--node-name",
        metavar="NAME",
        default="",
        help="node whose ResourceSlices count, if there are several (default: this host's name)",
    )
    group.add_argument(
        "--claim-command",
        metavar="CMD",
        default="",
        help="'CMD create' and 'CMD delete' create and delete the claim on their standard input, of --device "
        "and --slices",
    )
    group.add_argument(
        "--restart-command", metavar="CMD", default="", help="restart the driver with this command"
    )
    group.add_argument(
        "--device-command",
        metavar="CMD",
        default="",
        help="'CMD remove' and 'CMD restore' remove and restore the devices of the claims",
    )
    group.add_argument(
        "--cdi-dir",
        dest="cdi_dirs",
        metavar="DIR",
        type=Path,
        action="append",
        default=[],
        help=f"directory of CDI files; repeatable (default: {' and '.join(CDI_DIRS)})",
    )
    group.add_argument(
        "--remove-cdi",
        action="store_true",
        help="remove the CDI files of the claims before a restart, as a reboot does; needs --restart-command",
    )


def main(args: Namespace) -> int:
    if args.checks:
        from agent.conform.check_table import CHECKS

        print_result(
            args,
            lambda: {"apiVersion": API_VERSION, "checks": [CHECK(check) for check in CHECKS]},
            lambda style: render_checks(CHECKS, style),
            lambda: render_checks_markdown(CHECKS),
        )
        return 0
    options = _session_options(args)
    import asyncio

    from agent.conform.check_table import run_checks
    from agent.conform.kubelet.session import run_session

    if options.prepare is not None:
        # as Ctrl-C: claims are unprepared before the end
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    session = run_session(
        options,
        lambda socket: _print_start(socket, options),
        lambda text: print(f"drahealth: {clean(text)}", file=sys.stderr),
    )
    record = asyncio.run(session)
    results = run_checks(record)
    print_result(args, lambda: document(record, results), lambda style: render(record, results, style))
    return exit_of(results)


def _print_start(socket: str, options: SessionOptions) -> None:
    if sys.stderr.isatty():
        duration = format_duration(options.window_s * S)
        print(f"recording {clean(socket)} for {duration}, press Ctrl-C to stop", file=sys.stderr)


def _session_options(args: Namespace) -> SessionOptions:
    """Return the options of the test session with the driver, from the command line.

    Raises:
        UsageError: The flags contradict each other, or one is missing or out of range.
    """
    from agent.conform.kubelet.session import SessionOptions

    if args.output == "markdown":
        raise UsageError(f"-o markdown is only possible with --checks\n{HELP}")
    if args.socket is None and args.plugin_dir is None:
        raise UsageError(f"no driver is given: use --socket, --plugin-dir, or both\n{HELP}")
    if args.plugin_dir is None and (args.driver is not None or args.refuse):
        flag = "--refuse" if args.refuse else "--driver"
        raise UsageError(f"{flag} needs --plugin-dir\n{HELP}")
    if args.refuse and not args.notify:
        raise UsageError(f"--refuse and --no-notify exclude each other\n{HELP}")
    if args.plugin_dir is None and not args.notify:
        raise UsageError(f"--no-notify needs --plugin-dir\n{HELP}")
    try:
        window_s = parse_duration(args.window) / S
    except ValueError as error:
        raise UsageError(f"--for: {error}") from None
    if not SESSION_MIN_S <= window_s <= SESSION_MAX_S:
        raise UsageError(f"--for: {args.window} is not between {SESSION_MIN_S}s and {SESSION_MAX_S // 60}m")
    return SessionOptions(
        socket=_absolute_text(args.socket),
        plugin_dir=_absolute_text(args.plugin_dir),
        driver=args.driver or "",
        kubelet_dir=_absolute_text(args.kubelet_dir),
        window_s=window_s,
        refuse=args.refuse,
        notify=args.notify,
        prepare=_prepare_options(args),
    )


def _prepare_options(args: Namespace) -> PrepareOptions | None:
    """Return the options for preparing claims, with the content of claim files; None without ``--prepare``.

    Raises:
        UsageError: The flags contradict each other, or a file cannot be used.
        PermissionDeniedError: A file may not be read.
    """
    from agent.conform.kubelet.prepare_session import PrepareOptions

    given = (name for name in PREPARE_FLAGS if getattr(args, name))
    if not args.prepare:
        if (name := next(given, None)) is not None:
            raise UsageError(f"{PREPARE_FLAGS[name]} needs --prepare\n{HELP}")
        return None
    if args.plugin_dir is None:
        raise UsageError(f"--prepare needs --plugin-dir, where the driver's name is registered\n{HELP}")
    if not (args.claims or args.devices or args.slices or args.kubeconfig):
        raise UsageError(f"--prepare needs claims: use --claims, --device, --slices or --kubeconfig\n{HELP}")
    if args.claim_command and not (args.devices or args.slices):
        raise UsageError(f"--claim-command needs --device or --slices\n{HELP}")
    if args.claim_command and args.kubeconfig:
        raise UsageError(f"--claim-command and --kubeconfig exclude each other\n{HELP}")
    if args.remove_cdi and not args.restart_command:
        raise UsageError(f"--remove-cdi needs --restart-command: a reboot also restarts the driver\n{HELP}")
    slices, other_claims, api = _read_slices(args)
    return PrepareOptions(
        slices=slices,
        other_claims=other_claims,
        node=args.node_name or os.uname().nodename.lower(),
        api=api,
        claims=_read_claims(args.claims),
        bad_claims=_read_claims(args.bad_claims),
        devices=tuple(map(_parse_device, args.devices)),
        claim_command=args.claim_command,
        device_command=args.device_command,
        restart_command=args.restart_command,
        cdi_dirs=tuple(map(_absolute_text, args.cdi_dirs)) or CDI_DIRS,
        remove_cdi=args.remove_cdi,
    )


def _read_slices(
    args: Namespace,
) -> tuple[tuple[JsonObject, ...], tuple[JsonObject, ...], ApiServer | None]:
    """Return ResourceSlices, claims and the API server for the preparation of claims.

    The test prepares devices of these slices. The claims hold devices that are already in use. The test
    creates its own claims at the API server; None: it creates no claims there.

    Raises:
        UsageError: The file of slices cannot be used, or has no slice.
        PermissionDeniedError: The file may not be read.
        ConfigError, ApiError, ApiUnreachableError: The API server cannot be used.
    """
    api = None
    if args.kubeconfig is not None:
        from agent.serve.kube_api.api_server import ApiServer
        from agent.sources.kubectl_files import find_api_access

        api = ApiServer(find_api_access(args.kubeconfig))
    if args.slices is not None:
        from agent.sources.kubectl_files import parse_all_objects, read_object_file

        try:
            objects = parse_all_objects(read_object_file(args.slices).data)
        except ValueError as error:
            raise UsageError(f"file {args.slices}: {error}; create it with: {SLICES_COMMAND}") from None
        slices = tuple(obj for obj in objects if obj.get("kind") == "ResourceSlice")
        if not slices:
            raise UsageError(f"file {args.slices}: holds no ResourceSlice; create it with: {SLICES_COMMAND}")
        return slices, tuple(obj for obj in objects if obj.get("kind") == "ResourceClaim"), api
    if api is None or args.devices:
        return (), (), api
    from agent.conform.kubelet.api_claims import read_slices_and_claims

    driver = args.driver or ""
    found, claims = read_slices_and_claims(api, driver)
    if not found:
        wanted = f"ResourceSlice of driver {driver}" if driver else "ResourceSlice"
        raise UsageError(f"--kubeconfig: the API server {api.url} has no {wanted}; does a driver run?")
    return tuple(found), tuple(claims), api


def _read_claims(path: Path | None) -> tuple[JsonObject, ...]:
    if path is None:
        return ()
    from agent.sources.kubectl_files import CLAIM, read_objects
    from agent.system.timing import read_clocks

    if not (found := read_objects(path, CLAIM, read_clocks()).items):
        raise UsageError(f"file {path}: holds no claim")
    return found


def _parse_device(text: str) -> tuple[str, str]:
    pool, slash, name = text.rpartition("/")
    if not (pool and slash and name):
        raise UsageError(f"--device: {text!r} is not POOL/NAME\n{HELP}")
    return pool, name


def _absolute_text(path: Path | None) -> str:
    return absolute_path(path) if path is not None else ""


# --- results -----------------------------------------------------------------------------------------------

VERDICT_BADGES: Final = {
    CheckVerdict.FAIL: Badge("✖", "x", "fail", "red"),
    CheckVerdict.WARN: Badge("▲", "!", "warn", "yellow"),
    CheckVerdict.PASS: Badge("●", "+", "pass", "green"),
    CheckVerdict.NOT_RUN: Badge("◌", "?", "not run", "magenta"),
    CheckVerdict.SKIPPED: Badge("○", "-", "skipped", "dim"),
}
"""Sign, word and colour of each verdict of a conformance check, worst first."""

EXITS: Final = {
    CheckVerdict.FAIL: 2,
    CheckVerdict.WARN: 1,
    CheckVerdict.NOT_RUN: 3,
    CheckVerdict.PASS: 0,
    CheckVerdict.SKIPPED: 3,
}
"""Exit code by verdict; the first verdict that any check has decides."""

PROFILE: Final = "drahealth-conform/1"
"""Name and version of a profile's set of checks.
The number rises with each change of the set, so that an older result is never taken for a newer one."""
KUBELET: Final = "1.38"
"""Version of the newest kubelet whose behaviour the conformance checks describe."""
AREAS: Final = {
    "health": ("socket", "health"),
    "registration": ("registration",),
    "prepare": ("prepare", "unprepare"),
}
"""Areas of a conformance profile, with the first parts of the codes of their checks."""
BADGE_COLOURS: Final = {0: "brightgreen", 1: "yellow", 2: "red", 3: "lightgrey"}
"""Colour of the profile's badge by exit code of the command."""

GROUPS: Final = {
    "socket": "The service socket",
    "health": "The health stream",
    "registration": "Registration",
    "prepare": "Prepare",
    "unprepare": "Unprepare",
}
"""Titles in the list of conformance checks, by the first part of the check's code."""

PREFACE: Final = """\
# Conformance checks for DRA drivers

All checks of `drahealth conform`, which acts as a kubelet towards any DRA driver. This page is the
output of `drahealth conform --checks -o markdown`.

```
drahealth conform --socket /var/lib/kubelet/plugins/gpu.example.com/dra.sock
drahealth conform --plugin-dir /var/lib/kubelet/plugins_registry --driver gpu.example.com
```

The first command checks health only, on any socket that serves it: a driver's, or an agent's
`drivers/<driver>.sock`. The second finds the driver by its registration, and checks that, too. It records for
40 s unless `--for` is given, which is longer than a device's default lease in the kubelet; for longer leases,
the result states the time to use.

Without `--prepare` the checks are harmless to a driver in use: they open health streams, call GetInfo,
report that the driver is registered, and prepare no claims. If a kubelet is attached, the driver has two
clients. The exception is `--refuse`, which reports a failed registration once; some drivers exit then.

A check passes, warns, fails, is not run because there was nothing to look at, or is skipped because the
options exclude it; the reason is stated. Neither counts as passed. The exit code is 0 if all checks that the
options include passed, 1 with a warning, 2 with a failure, 3 if a check could not be run, 64 for an invalid
command line, 69 if the socket is not served or the API server has an error, 77 if the socket may not be
opened or the API server refuses a call, 78 if the kubeconfig is invalid. `-o json` prints all results for
programs.

Without a kubelet on the node, some drivers wait for their registration before they begin their work. The
report that the driver is registered then starts them, and they publish ResourceSlices. `--no-notify` leaves
this report out.

The checks apply to kubelets 1.34 to 1.38, unless a text names a release.

## Claims

```
drahealth conform --plugin-dir /var/lib/kubelet/plugins_registry --prepare --claims claims.yaml
```

`--prepare` prepares and unprepares claims after the health streams were recorded. A kubelet sends a driver
only the name and the UID of a claim; the driver reads the claim itself, usually from the API server. So the
claims must exist, with their allocation:

* `--claims FILE` has allocated ResourceClaims, in JSON or YAML. Claims that are reserved for a pod are
  refused, since unprepare would take the devices from the pod. An allocation without a pod can be written
  by an administrator: `kubectl create -f claim.yaml`, then `kubectl replace --subresource=status -f
  allocated-claim.yaml`.
* `--kubeconfig FILE` makes claims for two free devices of the driver's ResourceSlices, creates them with
  their allocation at the API server, and deletes them at the end. The user of the file needs `list` of
  `resourceslices` and of all `resourceclaims`, `create` and `delete` of `resourceclaims` in the namespace
  `default`, and `update` of `resourceclaims/status`: an administrator. Tokens and certificates are used, not
  programs for credentials.
* `--slices FILE` chooses the devices from ResourceSlices that were saved with `kubectl get
  resourceslices,resourceclaims -A -o json`. Free is a device without a taint that keeps pods off, that no
  claim of the file holds and that shares no counters. If the slices are of several nodes, `--node-name`
  names the node.
* `--device POOL/NAME`, repeatable, names a device that no pod uses.
* Without `--kubeconfig`, `--claim-command CMD` creates the claims of `--slices` and `--device`: `CMD create`
  gets the claim as JSON on its standard input and may print the created one, whose UID then counts; `CMD
  delete` gets the same claim later. Without both the driver must know the claim in another way.

Two claims with devices of the driver show more than one. `--bad-claims FILE` has allocated claims that the
driver must refuse, such as claims with invalid parameters; without it, claims that do not exist are used. A
driver on the Go package kubeletplugin fails the whole call for those, which is a warning, because the
package reads the claims before the driver sees them.

Everything that was prepared is unprepared at the end, also after an error or Ctrl-C, and claims that were
made are deleted. What needs more is asked for by flags:

* `--restart-command CMD` restarts the driver and ends when the old process has ended: `systemctl restart
  gpu-driver`.
* `--remove-cdi` removes the CDI files that the first prepare wrote, before a restart, as a reboot does.
  `--cdi-dir DIR`, repeatable, is where the CDI files are (default: /var/run/cdi and /etc/cdi).
* `--device-command CMD` removes the devices of the claims (`CMD remove`) and restores them (`CMD restore`).
"""


def exit_of(results: Iterable[CheckResult]) -> int:
    """Return the exit code for the worst verdict in `results`."""
    verdicts = {result.verdict for result in results}
    return next(code for verdict, code in EXITS.items() if verdict in verdicts)


def render(record: SessionRecord, results: Sequence[CheckResult], style: TextStyle) -> str:
    """Return the results of the conformance checks as text, worst first.

    Warnings and failures have advice, and the effect that they have on a kubelet.
    """
    socket = clean(record.socket or "no service socket")
    duration = _recorded_text(record)
    table = TextTable()
    for verdict in (CheckVerdict.FAIL, CheckVerdict.WARN, CheckVerdict.PASS):
        badge = VERDICT_BADGES[verdict]
        for result in (result for result in results if result.verdict is verdict):
            text = [RowText(clean(result.observation))]
            if verdict is not CheckVerdict.PASS:
                text += [RowText(result.check.why, ("dim",)), advice(result.check.advice, style)]
            word = TableCell(badge.word, (badge.colour,))
            table.add(result.check.code, word, sign=badge.coloured_sign(style), text=text)
    lines = [f"{style.paint(socket, 'bold')}{GAP}{duration}", "", *table.lines(style)]
    for verdict in (CheckVerdict.NOT_RUN, CheckVerdict.SKIPPED):
        lines += _reason_lines(results, verdict, style)
    return "\n".join([*lines, "", _summary_line(results, style)]) + "\n"


def _recorded_text(record: SessionRecord) -> str:
    if not record.window_s:
        return "no connection"
    recorded, requested = format_age(record.recorded_s), format_age(record.window_s)
    return f"recorded for {recorded}" if recorded == requested else f"recorded for {recorded} of {requested}"


def _reason_lines(results: Sequence[CheckResult], verdict: CheckVerdict, style: TextStyle) -> Iterator[str]:
    """Yield the lines about the conformance checks with the verdict `verdict`.

    Checks with the same reason share one text.
    """
    results = [result for result in results if result.verdict is verdict]
    badge = VERDICT_BADGES[verdict]
    for reason in dict.fromkeys(result.observation for result in results):
        codes = ", ".join(result.check.code for result in results if result.observation == reason)
        first, *rest = wrap(f"{badge.word}, {clean(reason)}: {codes}", style, first="  ", rest="    ")
        yield f"{badge.coloured_sign(style)} {first[2:]}"
        yield from rest


def _counts(results: Sequence[CheckResult]) -> dict[CheckVerdict, int]:
    return {verdict: sum(result.verdict is verdict for result in results) for verdict in CheckVerdict}


def _summary_line(results: Sequence[CheckResult], style: TextStyle) -> str:
    counts = _counts(results)
    texts = {
        CheckVerdict.PASS: f"{counts[CheckVerdict.PASS]} passed",
        CheckVerdict.WARN: format_count(counts[CheckVerdict.WARN], "warning"),
        CheckVerdict.FAIL: f"{counts[CheckVerdict.FAIL]} failed",
        CheckVerdict.NOT_RUN: f"{counts[CheckVerdict.NOT_RUN]} not run",
        CheckVerdict.SKIPPED: f"{counts[CheckVerdict.SKIPPED]} skipped",
    }
    parts = [
        style.paint(text, VERDICT_BADGES[verdict].colour)
        for verdict, text in texts.items()
        if counts[verdict]
    ]
    return f"{format_count(len(results), 'check')}: {', '.join(parts)}"


RESULT: Final = ObjectKeys("code:check.code result:verdict title:check.title saw:observation why:check.why")


def document(record: SessionRecord, results: Sequence[CheckResult]) -> dict[str, Any]:
    """Return the results of the conformance checks as JSON. Later versions only add keys."""
    counts = _counts(results)
    findings = (CheckVerdict.WARN, CheckVerdict.FAIL)
    return {
        "apiVersion": API_VERSION,
        "socket": record.socket or None,
        "pluginDir": record.directory.path if record.directory else None,
        "listenedSeconds": round(record.recorded_s, 1),
        "requestedSeconds": record.window_s,
        "summary": {
            "checks": len(results),
            "passed": counts[CheckVerdict.PASS],
            "warned": counts[CheckVerdict.WARN],
            "failed": counts[CheckVerdict.FAIL],
            "notRun": counts[CheckVerdict.NOT_RUN],
            "skipped": counts[CheckVerdict.SKIPPED],
        },
        "profile": profile(results),
        "badge": badge(results),
        "results": [
            {**RESULT(result), "advice": result.check.advice if result.verdict in findings else None}
            for result in results
        ],
    }


def profile(results: Iterable[CheckResult]) -> dict[str, Any] | None:
    """Return the conformance profile: the areas (as "health") in which a driver passed all checks that ran.

    If a check was not run for lack of data, its area is excluded. If the options skip a check, its area is
    not excluded, and the code of the check is listed. None: no area qualifies.
    """
    results = list(results)
    areas, skipped = [], []
    for area, heads in AREAS.items():
        members = [result for result in results if result.check.code.partition(".")[0] in heads]
        verdicts = {result.verdict for result in members}
        if CheckVerdict.PASS in verdicts and verdicts <= {CheckVerdict.PASS, CheckVerdict.SKIPPED}:
            areas.append(area)
            skipped += [result.check.code for result in members if result.verdict is CheckVerdict.SKIPPED]
    if not areas:
        return None
    text = f"{PROFILE}: {', '.join([f'kubelet {KUBELET}', *areas])}"
    return {"name": PROFILE, "kubelet": KUBELET, "areas": areas, "skipped": skipped, "text": text}


def badge(results: Iterable[CheckResult]) -> dict[str, Any]:
    """Return the conformance profile (the areas that passed) in the JSON format of a shields.io badge."""
    results = list(results)
    found, code = profile(results), exit_of(results)
    message = found["text"].partition(": ")[2] if found else "no profile"
    return {
        "schemaVersion": 1,
        "label": PROFILE,
        "message": message,
        "color": BADGE_COLOURS[code] if found else BADGE_COLOURS[max(code, 2)],
    }


# --- the list of checks ------------------------------------------------------------------------------------


def _checks_by_title(checks: Iterable[ConformCheck]) -> Iterable[tuple[str, list[ConformCheck]]]:
    for head, members in groupby(checks, key=lambda check: check.code.partition(".")[0]):
        yield GROUPS[head], list(members)


def render_checks(checks: Iterable[ConformCheck], style: TextStyle) -> str:
    """Return the list of conformance checks as text: what a driver must do, how that is checked, and why."""
    table = TextTable()
    for title, members in _checks_by_title(checks):
        table.add_lines(["", style.paint(title, "bold")])
        for check in members:
            details = (RowText(text, ("dim",)) for text in (check.method, check.why))
            table.add(check.code, text=[RowText(check.title), *details])
    return "\n".join(list(table.lines(style))[1:]) + "\n"


def render_checks_markdown(checks: Iterable[ConformCheck]) -> str:
    """Return the list of conformance checks as the Markdown page docs/conform.md."""
    parts = [PREFACE]
    for title, members in _checks_by_title(checks):
        parts.append(f"## {title}\n")
        titles = ["code", "property of a good driver", "method", "effect on a kubelet", "what to do"]
        cells = ((f"`{check.code}`", check.title, check.method, check.why, check.advice) for check in members)
        parts.append(markdown_table([titles, *cells]))
    return "\n".join(parts)


CHECK: Final = ObjectKeys("code title looksAt:method why advice")


VERB = Subcommand(
    name="conform",
    summary="check the health service, registration and prepares of a DRA driver",
    description=(
        "Acts as a kubelet, 1.34 to 1.38, towards any DRA driver: opens health streams, calls "
        "GetInfo, reports that the driver is registered, and with --prepare prepares and unprepares claims. "
        "This is harmless to a driver that a kubelet uses, except with --refuse and --prepare. Exits "
        "with 0 if all checks that the options include passed, 1 with a warning, 2 with a failure, 3 if a "
        "check could not be run, 69 if the socket is not served, 77 if access is denied."
    ),
    examples=(
        ("drahealth conform --socket /var/lib/kubelet/plugins/gpu.example.com/dra.sock", "health only"),
        (
            "drahealth conform --plugin-dir /var/lib/kubelet/plugins_registry --driver gpu.example.com",
            "registration and health",
        ),
    ),
    add_arguments=add_arguments,
    main=main,
)
