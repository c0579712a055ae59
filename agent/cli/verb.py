"""The type of a verb, and the flags that several verbs share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from agent.cli.output.terminal import COLOURS
from agent.config.config import CONFIG_VARIABLE, DEFAULT_FILE, SETTINGS, load_runtime_dir

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace, _ActionsContainer


class Verb(NamedTuple):
    """One subcommand."""

    name: str
    summary: str
    description: str
    examples: tuple[tuple[str, str], ...]
    """Command lines, each with its purpose; ``--help`` starts with them."""
    add_arguments: Callable[[ArgumentParser], None]
    main: Callable[[Namespace], int]
    """Runs the verb and returns the exit code."""


def add_settings(parser: ArgumentParser, *flags: str) -> None:
    """Add ``--config`` and `flags` of :data:`agent.config.config.SETTINGS`; without `flags`, all."""
    group = parser.add_argument_group(
        "configuration", f"Each flag can also be set by a variable DRAHEALTH_<FLAG>, or in {DEFAULT_FILE}."
    )
    add_config(group)
    for setting in SETTINGS:
        if not setting.flag or (flags and setting.flag not in flags):
            continue
        if setting.switch:
            # no default: without the switch the environment and the file decide
            group.add_argument(
                setting.flag, dest=setting.flag, action="store_const", const=True, help=setting.help
            )
        else:
            group.add_argument(
                setting.flag,
                dest=setting.flag,  # as agent.config.config.load() names them
                action="append" if setting.many else "store",
                metavar=setting.metavar,
                help=setting.help,
            )


def add_config(parser: _ActionsContainer) -> None:
    """Add the flag ``--config`` to the parser."""
    parser.add_argument(
        "--config", metavar="FILE", help=f"configuration file (default: {DEFAULT_FILE}, if it exists)"
    )


def add_output(parser: ArgumentParser) -> None:
    """Add the flags ``-o`` and ``--color`` to the parser."""
    parser.add_argument(
        "-o", "--output", choices=("table", "json"), default="table", help="output format (default: table)"
    )
    add_colour(parser)


def add_colour(parser: ArgumentParser) -> None:
    """Add the flag ``--color`` to the parser."""
    parser.add_argument(
        "--color", choices=COLOURS, default="auto", help="use colours (default: auto, on a terminal only)"
    )


def flags_of(args: Namespace) -> dict[str, object]:
    """Return the settings on the command line, as :func:`agent.config.config.load` takes them."""
    return {name: value for name, value in vars(args).items() if name.startswith("--") and value is not None}


def config_file_of(args: Namespace) -> Path | None:
    """Return the configuration file from ``--config`` or the environment; None if neither names one."""
    path = args.config if args.config is not None else os.environ.get(CONFIG_VARIABLE)
    return Path(path) if path else None


def agent_socket_of(args: Namespace) -> Path:
    """Return the socket of the agent that runs with this configuration."""
    return load_runtime_dir(flags_of(args), os.environ, file=config_file_of(args)) / "agent.sock"
