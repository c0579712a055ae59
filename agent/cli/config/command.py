"""``drahealth config``: shows the effective configuration, checks files, and writes their JSON schema."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from agent.cli.config.text import document, render
from agent.cli.subcommand import Subcommand, add_output, add_settings, load_with_origins_of, print_result
from agent.config.config import load_with_origins
from agent.errors import UsageError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "action",
        metavar="ACTION",
        nargs="?",
        choices=("show", "check", "schema"),
        default="show",
        help="show: the value of each setting and its origin; check: check the files; schema: JSON schema of "
        "a file (default: show)",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="with check: the only file to check, without environment and flags",
    )
    add_output(parser)
    add_settings(parser)


def main(args: Namespace) -> int:
    if args.file is not None and args.action != "check":
        raise UsageError(f"FILE {args.file!r} is for 'drahealth config check'; name the file with --config")
    if args.action == "schema":
        from agent.config.schema import config_schema

        print(json.dumps(config_schema(), indent=2))
        return 0
    if args.file is not None:
        loaded = load_with_origins({}, {}, file=Path(args.file), needs_runtime_dir=False)
    else:
        has_default = os.geteuid() == 0 or bool(os.environ.get("XDG_RUNTIME_DIR"))
        loaded = load_with_origins_of(args, needs_runtime_dir=has_default)
    if args.action == "check":
        files = [str(path) for path in loaded.files]
        named = ", ".join(files) or "no configuration file"
        print_result(args, lambda: {"valid": True, "files": files}, lambda _: f"{named}: valid\n")
        return 0
    print_result(args, lambda: document(loaded), lambda style: render(loaded, style))
    return 0


VERB = Subcommand(
    name="config",
    summary="show, check or describe the configuration",
    description=(
        "Shows the configuration that an agent with these flags, this environment and these files would "
        "have, with the origin of each value; as text in the form of a configuration file. 'check' checks "
        "the files, or one FILE alone, and exits with 78 if a value is invalid. 'schema' prints the JSON "
        "schema of a file, for editors."
    ),
    examples=(
        ("drahealth config", "the value of each setting, and where it comes from"),
        ("drahealth config check new.toml", "check a file before it replaces another"),
    ),
    add_arguments=add_arguments,
    main=main,
)
