"""What a verb is, and the flags that several of them share."""

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
    """Command line and what it is for; ``--help`` starts with them."""
    add_arguments: Callable[[ArgumentParser], None]
    main: Callable[[Namespace], int]
    """Runs it; returns the exit code."""


def add_settings(parser: ArgumentParser, *flags: str) -> None:
    """``--config`` and these flags of :data:`agent.config.config.SETTINGS`, or all that have one."""
    group = parser.add_argument_group(
        "configuration", f"Each flag can also be given as DRAHEALTH_<FLAG>, or in {DEFAULT_FILE}."
    )
    add_config(group)
    for setting in SETTINGS:
        if not setting.flag or (flags and setting.flag not in flags):
            continue
        if setting.switch:
            # no default: a switch that was not given leaves the word to the environment and the file
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
    """``--config`` alone."""
    parser.add_argument(
        "--config", metavar="FILE", help=f"read this file (default: {DEFAULT_FILE}, if it exists)"
    )


def add_output(parser: ArgumentParser) -> None:
    """``-o`` and ``--color``."""
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="(default: table)")
    add_colour(parser)


def add_colour(parser: ArgumentParser) -> None:
    """``--color``."""
    parser.add_argument(
        "--color", choices=COLOURS, default="auto", help="colour the table (default: auto, on a terminal)"
    )


def flags_of(args: Namespace) -> dict[str, object]:
    """The settings that the command line gave, as :func:`agent.config.config.load` wants them."""
    return {name: value for name, value in vars(args).items() if name.startswith("--") and value is not None}


def config_file_of(args: Namespace) -> Path | None:
    """The configuration file that was asked for."""
    named = args.config if args.config is not None else os.environ.get(CONFIG_VARIABLE)
    return Path(named) if named else None


def agent_socket_of(args: Namespace) -> Path:
    """The socket of the agent that has this configuration."""
    return load_runtime_dir(flags_of(args), os.environ, file=config_file_of(args)) / "agent.sock"
