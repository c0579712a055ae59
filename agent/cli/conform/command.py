"""``drahealth conform``: checks a DRA driver for conformance by calling the driver as the kubelet does."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.cli.output.text import clean
from agent.cli.subcommand import Subcommand, add_output, print_result
from agent.config.config import KUBELET_DIR
from agent.config.values import S, format_duration, parse_duration
from agent.conform.session_record import SESSION_MAX_S, SESSION_MIN_S
from agent.errors import UsageError
from agent.system.files import absolute_path

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.conform.kubelet.prepare_session import PrepareOptions
    from agent.conform.kubelet.session import SessionOptions
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
        from agent.cli.conform.text import checks_document, render_checks, render_checks_markdown
        from agent.conform.check_table import CHECKS

        print_result(
            args,
            lambda: checks_document(CHECKS),
            lambda style: render_checks(CHECKS, style),
            lambda: render_checks_markdown(CHECKS),
        )
        return 0
    options = _session_options(args)
    import asyncio

    from agent.cli.conform.text import document, exit_of, render
    from agent.conform.check_table import run_checks
    from agent.conform.kubelet.session import run_session

    if options.prepare is not None:
        # as Ctrl-C: claims are unprepared before the end
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    session = run_session(options, lambda socket: _print_start(socket, options), _print_warning)
    record = asyncio.run(session)
    results = run_checks(record)
    print_result(args, lambda: document(record, results), lambda style: render(record, results, style))
    return exit_of(results)


def _print_start(socket: str, options: SessionOptions) -> None:
    if sys.stderr.isatty():
        duration = format_duration(options.window_s * S)
        print(f"recording {clean(socket)} for {duration}, press Ctrl-C to stop", file=sys.stderr)


def _print_warning(text: str) -> None:
    print(f"drahealth: {clean(text)}", file=sys.stderr)


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
        socket=_absolute(args.socket),
        plugin_dir=_absolute(args.plugin_dir),
        driver=args.driver or "",
        kubelet_dir=_absolute(args.kubelet_dir),
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
        cdi_dirs=tuple(map(_absolute, args.cdi_dirs)) or CDI_DIRS,
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

    found, claims = read_slices_and_claims(api)
    if not found:
        raise UsageError(f"--kubeconfig: the API server {api.url} has no ResourceSlice; does a driver run?")
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


def _absolute(path: Path | None) -> str:
    return absolute_path(path) if path is not None else ""


VERB = Subcommand(
    name="conform",
    summary="check the health service, registration and prepares of a DRA driver",
    description=(
        "Acts as a kubelet, 1.34 to 1.38, towards any DRA driver: opens health streams, calls "
        "GetInfo, reports that the driver is registered, and with --prepare prepares and unprepares claims. "
        "This is harmless to a driver in use, except with --refuse and --prepare; a kubelet may be attached "
        "at the same time. Exits with 0 if all checks that the options include passed, 1 with a warning, 2 "
        "with a failure, 3 if a check could not be run, 69 if the socket is not served."
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
