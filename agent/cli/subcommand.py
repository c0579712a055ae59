"""Description of a subcommand (verb) of ``drahealth``, and the flags that several verbs share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from agent.cli.output.terminal import COLOURS, style_of
from agent.config.config import CONFIG_VARIABLE, SETTINGS, load_runtime_dir, load_with_origins
from agent.config.files import DEFAULT_FILE, DROP_INS
from agent.errors import UsageError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace, _ActionsContainer

    from agent.cli.output.terminal import TextStyle
    from agent.config.config import Config, LoadedConfig


class Subcommand(NamedTuple):
    """Subcommand of ``drahealth``, such as ``scan``: its help texts, arguments and main function."""

    name: str
    summary: str
    description: str
    examples: tuple[tuple[str, str], ...]
    """Command lines, each with its purpose; ``--help`` starts with them."""
    add_arguments: Callable[[ArgumentParser], None]
    main: Callable[[Namespace], int]
    """Function that runs the subcommand with its arguments and returns the exit code."""


def add_settings(parser: ArgumentParser, *flags: str) -> None:
    """Add ``--config`` and the settings with the given `flags` to the parser; without `flags`, all."""
    group = parser.add_argument_group(
        "configuration", f"Each flag can also be set by a variable DRAHEALTH_<FLAG>, or in {DEFAULT_FILE}."
    )
    add_config(group)
    for setting in SETTINGS:
        if not setting.flag or (flags and setting.flag not in flags):
            continue
        if setting.is_switch:
            # no default: without the switch the environment and the file decide
            group.add_argument(
                setting.flag, dest=setting.flag, action="store_const", const=True, help=setting.help
            )
        else:
            group.add_argument(
                setting.flag,
                dest=setting.flag,  # as agent.config.config.load() names them
                action="append" if setting.is_repeatable else "store",
                metavar=setting.metavar,
                help=setting.help,
            )


def add_config(parser: _ActionsContainer) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"the only configuration file (default: {DEFAULT_FILE} and {DROP_INS}/*.toml next to it)",
    )


def add_output(parser: ArgumentParser, markdown_with: str | None = None, *more: str, note: str = "") -> None:
    """Add ``-o`` and ``--color``, with the format ``markdown`` unless `markdown_with` is None.

    `markdown_with` is the flag that ``-o markdown`` requires; empty: none. `more` has further formats, and
    `note` explains them in the help text.
    """
    formats = ("table", "json", *more) if markdown_with is None else ("table", "json", "markdown", *more)
    note = f"; markdown only with {markdown_with}" if markdown_with else note
    parser.add_argument(
        "-o", "--output", choices=formats, default="table", help=f"output format{note} (default: table)"
    )
    add_colour(parser)


def add_colour(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--color", choices=COLOURS, default="auto", help="use colours (default: auto, on a terminal only)"
    )


def print_result(
    args: Namespace,
    document: Callable[[], Mapping[str, Any]],
    text: Callable[[TextStyle], str],
    markdown: Callable[[], str] = str,
) -> None:
    """Print a result on standard output in the format of ``-o``: JSON document, Markdown or text."""
    if args.output == "json":
        import json

        print(json.dumps(document(), indent=2))
    elif args.output == "markdown":
        print(markdown(), end="")
    else:
        print(text(style_of(sys.stdout, args.color, os.environ)), end="")


def flags_of(args: Namespace) -> dict[str, object]:
    """Return the values of settings on the command line, by flag such as ``--period``."""
    return {name: value for name, value in vars(args).items() if name.startswith("--") and value is not None}


def config_file_of(args: Namespace) -> Path | None:
    """Return the configuration file from ``--config`` or the environment; None if neither names one.

    Raises:
        UsageError: ``--config`` is empty, for example from an unset variable in a script.
    """
    if args.config == "":
        raise UsageError("--config: the path is empty; name a file or omit the flag")
    path = args.config if args.config is not None else os.environ.get(CONFIG_VARIABLE)
    return Path(path) if path else None


def load_config(args: Namespace, *, needs_runtime_dir: bool = False) -> Config:
    """Load the configuration from the command line, the environment and the configuration file."""
    return load_with_origins_of(args, needs_runtime_dir=needs_runtime_dir).config


def load_with_origins_of(args: Namespace, *, needs_runtime_dir: bool = False) -> LoadedConfig:
    """Load the configuration like :func:`load_config`, with the origin of each value."""
    return load_with_origins(
        flags_of(args), os.environ, file=config_file_of(args), needs_runtime_dir=needs_runtime_dir
    )


def agent_socket_of(args: Namespace) -> Path:
    """Return the path of the socket that an agent with this configuration serves."""
    return load_runtime_dir(flags_of(args), os.environ, file=config_file_of(args)) / "agent.sock"
