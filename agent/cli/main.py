"""The command ``drahealth``: builds the parser of its subcommands, and maps errors to exit codes."""

from __future__ import annotations

import argparse
import errno
import re
import resource
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any, Final, NoReturn

from agent.cli.output.terminal import terminal_width
from agent.cli.output.text import clean
from agent.cli.subcommand import EXIT_OF_ERROR, INTERNAL, PASSING_ERRNOS, RETRY_LATER, Subcommand
from agent.errors import ConfigError, OutputPipeClosed, UsageError, suggestion, unwrap_error, without_middle
from agent.system.output import print_last_error
from agent.version import VERSION

VERBS: Final = {
    "run": "run",
    "scan": "scan",
    "watch": "watch",
    "status": "status",
    "explain": "explain.command",
    "clear": "clear",
    "audit": "audit.command",
    "record": "record",
    "replay": "replay",
    "what-if": "what_if",
    "prepares": "prepares.command",
    "history": "history.command",
    "fleet": "fleet.command",
    "classify": "prepares.classify",
    "checks": "checks.command",
    "conform": "conform",
    "new-driver": "new_driver.command",
    "bundle": "bundle",
    "config": "config",
    "completion": "completion",
    "version": "version",
}
"""Module of each subcommand, relative to this package. A command loads only the module of its subcommand."""

DESCRIPTION: Final = "Monitors the health of a Kubernetes node's devices, with evidence for each verdict."
EXAMPLES: Final = (
    ("drahealth scan", "check this node once"),
    ("drahealth run --driver gpu.example.com", "run the agent for a DRA driver"),
)
BUG: Final = "drahealth: this is a bug in drahealth; please report it with the lines above"


class HelpFormatter(argparse.HelpFormatter):
    """Formatter of help texts as wide as the terminal.

    argparse creates one for each argument. Its own function for the width is in ``shutil``, which imports
    three modules for compression.
    """

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"width": terminal_width() - 2, **options})


class CommandParser(argparse.ArgumentParser):
    """Argument parser that prints examples first and suggests similar names.

    It raises UsageError, because argparse's own exit code 2 means that a device is unhealthy.
    """

    examples: tuple[tuple[str, str], ...] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpFormatter, **options})

    def format_help(self) -> str:
        width = max((len(command) for command, _ in self.examples), default=0)
        lines = [f"  {command:{width}}  {purpose}\n" for command, purpose in self.examples]
        return f"examples:\n{''.join(lines)}\n{super().format_help()}"

    def error(self, message: str) -> NoReturn:
        # argparse suggests names itself from Python 3.14 on.
        if found := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            known = re.findall(r"[\w-]+", found[2])
            message = f"{found[1]!r} is not one of {', '.join(known)}{suggestion(found[1], known)}"
        raise UsageError(f"{message}\ntry '{self.prog} --help'")


def load_verb(name: str) -> Subcommand:
    """Import and return the subcommand `name`, a key of :data:`VERBS`."""
    verb: Subcommand = import_module(f"agent.cli.{VERBS[name]}").VERB
    return verb


def build_parser(names: Iterable[str] = VERBS) -> tuple[CommandParser, dict[str, CommandParser]]:
    """Return the parser of ``drahealth``, and the parsers of the subcommands in `names`, by subcommand."""
    parser = CommandParser(prog="drahealth", description=DESCRIPTION, allow_abbrev=False)
    parser.examples = EXAMPLES
    parser.add_argument("--version", action="version", version=f"drahealth {VERSION}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    parsers: dict[str, CommandParser] = {}
    for verb in map(load_verb, names):
        sub = verbs.add_parser(verb.name, help=verb.summary, description=verb.description, allow_abbrev=False)
        sub.examples = verb.examples
        verb.add_arguments(sub)
        parsers[verb.name] = sub
    return parser, parsers


def parse(argv: Sequence[str]) -> tuple[Subcommand, argparse.Namespace]:
    """Parse the command line `argv`; return the subcommand and its arguments.

    Raises:
        UsageError: An argument is not valid; the text suggests a similar one.
    """
    if argv and argv[0] == "help":
        named = list(argv[1:2])
        argv = named if named and named[0] not in VERBS else [*named, "--help"]
    first = [word for word in argv[:1] if word in VERBS]
    parser, parsers = build_parser(first or VERBS)
    if argv and argv[0].startswith("-") and argv[0] not in {"-h", "--help", "--version"}:
        parser.error(f"{argv[0]!r} is not an argument of drahealth; write a verb first, then its flags")
    args, unknown = parser.parse_known_args(argv)
    sub = parsers[args.verb]
    if unknown and first:  # positional arguments on both sides of a flag
        args, unknown = sub.parse_known_intermixed_args(argv[1:], argparse.Namespace(verb=args.verb))
    if unknown:
        word = next((w for w in unknown if w.startswith("-")), unknown[0]).partition("=")[0]
        flags = re.findall(r"--[a-z-]+", sub.format_usage())
        sub.error(f"{word!r} is not an argument of drahealth {args.verb}{suggestion(word, flags)}")
    for before, word in pairwise(argv):
        found = re.fullmatch("(--[a-z-]+)=|", word)
        if found and (flag := found[1] or before) not in vars(args):  # a setting has a parser of its own
            sub.error(f"the value after {flag!r} is empty; write a value or omit the argument")
    return load_verb(args.verb), args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (None: that of the process) and return its exit code."""
    try:
        try:
            verb, args = parse(sys.argv[1:] if argv is None else argv)
            code = verb.main(args)
        except SystemExit as done:  # --help and --version
            code = done.code if isinstance(done.code, int) else 0
        sys.stdout.flush()
    except BaseException as error:
        return report_error(error)
    return code


def report_error(error: BaseException, write: Callable[[str], None] = print_last_error) -> int:
    """Print the text of `error` with the function `write`, and return the exit code for the error.

    Each line of the text is cleaned of characters that a terminal might obey, and shortened. A bug is printed
    with a traceback. A lack of file descriptors, threads or memory is no bug: its text names the limit.
    """

    def show(text: str) -> None:
        write("\n".join(clean(without_middle(line)) for line in text.split("\n")))

    root = unwrap_error(error)
    for kind, code in EXIT_OF_ERROR:
        if isinstance(root, kind):
            if isinstance(root, Exception) and not isinstance(root, OutputPipeClosed):
                show(f"drahealth: {root}")
            return RETRY_LATER if isinstance(root, ConfigError) and _is_passing(root) else code
    if lack := missing_resource(error) or missing_resource(root.__cause__):
        show(f"drahealth: {lack}")
        return INTERNAL
    show("".join(traceback.format_exception(error)) + BUG)
    return INTERNAL


def _is_passing(error: BaseException | None) -> bool:
    """Return whether a system call whose failure can pass caused an error: systemd starts the agent again."""
    while error is not None and getattr(error, "errno", 0) not in PASSING_ERRNOS:
        error = error.__cause__ or error.__context__
    return error is not None


def missing_resource(error: BaseException | None) -> str:
    """Return a text on the resource that the kernel refused to this process, with the limit and its setting.

    Empty: `error` has another reason. If `error` is a group of errors, one of them has another reason.
    """
    if isinstance(error, BaseExceptionGroup):
        lacks = [missing_resource(exception) for exception in error.exceptions]
        return lacks[0] if all(lacks) else ""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"too many open files: this process may open {limit} (RLIMIT_NOFILE); raise it with "
            "LimitNOFILE= in the unit, or ulimit -n"
        )
    if isinstance(error, OSError) and error.errno == errno.ENFILE:
        return "too many open files on this machine; raise the sysctl fs.file-max, or stop what leaks files"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return (
            "the kernel started no further thread: a limit of tasks or of memory is reached; raise it with "
            "TasksMax= in the unit, the container's limit of pids, or ulimit -u"
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "no space left: on a disk, or for watches of files; raise the sysctl fs.epoll.max_user_watches"
    if isinstance(error, MemoryError) or getattr(error, "errno", 0) in {errno.ENOMEM, errno.ENOBUFS}:
        return "out of memory: raise MemoryMax= in the unit, or the container's limit of memory"
    return ""
