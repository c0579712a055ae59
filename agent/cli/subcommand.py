"""Description of a subcommand (verb) of ``drahealth``, the flags that several verbs share, and the exit
codes.

An exit code shows the severity of a device, or the class of an error. 0 to 3 are the codes of Nagios
plugins, so that ``drahealth scan`` can be used as one; with ``--exit-style npd`` its codes are those of
node-problem-detector's custom plugins. 64 to 78 are those of sysexits.h, 128 and above those of a shell for
signals.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from errno import EADDRNOTAVAIL, EDQUOT, EIO, ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agent.cli.output.terminal import COLOURS, style_of
from agent.config.config import CONFIG_VARIABLE, SETTINGS, load_runtime_dir, load_with_origins
from agent.config.files import DEFAULT_FILE, DROP_INS
from agent.errors import (
    LACK_ERRNOS,
    AgentUnreachable,
    ApiError,
    ApiForbiddenError,
    ApiUnreachableError,
    ConfigError,
    DrahealthError,
    FaultStillPresent,
    OutputError,
    OutputPipeClosed,
    PermissionDeniedError,
    ResourceBusyError,
    UsageError,
)
from agent.model.health import Severity
from agent.model.reading import unlisted_sources

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace, _ActionsContainer

    from agent.cli.output.terminal import TextStyle
    from agent.config.config import Config, LoadedConfig
    from agent.model.reading import SourceSample


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
    """Add the flags ``-o`` and ``--color``. The format ``markdown`` needs a `markdown_with` that is not None.

    `markdown_with` is the flag that ``-o markdown`` requires; empty: no flag is required. `more` has further
    formats, and `note` explains them in the help text.
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


def refuse_settings(args: Namespace, argument: str) -> None:
    """Raise UsageError if the command line sets what the command does not use with `argument`."""
    given = {"--config": args.config, **flags_of(args)}
    if unused := [name for name, value in given.items() if value is not None]:
        kind = argument.partition(" ")[0]
        raise UsageError(f"{argument} needs no settings; leave out {kind}, or {', '.join(unused)}")


def config_file_of(args: Namespace) -> Path | None:
    """Return the configuration file from ``--config`` or the environment; None if neither names one."""
    path = args.config if args.config is not None else os.environ.get(CONFIG_VARIABLE)
    return Path(path) if path else None


def load_config(args: Namespace) -> Config:
    """Load the configuration from the command line, the environment and the configuration file."""
    return load_with_origins_of(args).config


def load_with_origins_of(args: Namespace, *, needs_runtime_dir: bool = False) -> LoadedConfig:
    """Load the configuration like :func:`load_config`, with the origin of each value."""
    return load_with_origins(
        flags_of(args), os.environ, file=config_file_of(args), needs_runtime_dir=needs_runtime_dir
    )


def agent_socket_of(args: Namespace) -> Path:
    """Return the path of the socket that an agent with this configuration serves."""
    return load_runtime_dir(flags_of(args), os.environ, file=config_file_of(args)) / "agent.sock"


# --- exit codes --------------------------------------------------------------------------------------------

EXIT_OF_SEVERITY: Final = {
    Severity.OK: 0,
    Severity.INFO: 0,
    Severity.DEGRADED: 1,
    Severity.UNHEALTHY: 2,
    Severity.UNKNOWN: 3,
}

EXIT_OF_SEVERITY_NPD: Final = {
    Severity.OK: 0,
    Severity.INFO: 0,
    Severity.DEGRADED: 0,  # the device can be used, and a condition of the node would say that it cannot
    Severity.UNHEALTHY: 1,
    Severity.UNKNOWN: 2,
}

INTERNAL: Final = 70
RETRY_LATER: Final = 75
NOT_ALLOWED: Final = 77
PASSING_ERRNOS: Final = LACK_ERRNOS | {EADDRNOTAVAIL, EDQUOT, EIO, ENOSPC}
"""Errnos of failures that can pass: a ConfigError that they cause has the exit code RETRY_LATER."""

EXIT_OF_ERROR: Final[tuple[tuple[type[BaseException], int], ...]] = (
    (UsageError, 64),
    (AgentUnreachable, 69),
    (ApiForbiddenError, NOT_ALLOWED),
    (ApiError, 69),
    (ApiUnreachableError, 69),
    (OutputPipeClosed, 141),
    (OutputError, 74),
    (ResourceBusyError, RETRY_LATER),
    (FaultStillPresent, RETRY_LATER),
    (PermissionDeniedError, NOT_ALLOWED),
    (PermissionError, NOT_ALLOWED),
    (ConfigError, 78),
    (DrahealthError, INTERNAL),
    (KeyboardInterrupt, 130),
)
"""Exit code by exception class; the first match counts.

Other exceptions are bugs: INTERNAL with a traceback.
"""


class UnreadablePath(NamedTuple):
    """File or directory that could not be read, with the reason and the exit code of the command."""

    path: Path
    reason: str
    exit_code: int


def exit_of_severities(
    severities: Iterable[Severity],
    codes: Mapping[Severity, int] = EXIT_OF_SEVERITY,
    *,
    sources: Iterable[SourceSample] = (),
) -> int:
    """Return the exit code for the worst of `severities`; if there are none, the exit code for UNKNOWN.

    If one of `sources` has not listed its devices yet, the devices count as UNKNOWN.
    """
    missing = [Severity.UNKNOWN for _ in unlisted_sources(sources)]
    return codes[max((*severities, *missing), default=Severity.UNKNOWN)]
