"""The command ``drahealth``: builds the parser from the verbs, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Final, NoReturn

from agent.cli.exits import EXIT_OF_ERROR, INTERNAL
from agent.cli.verb import Verb
from agent.errors import ReaderGone, UsageError, root_of, suggestion
from agent.system.output import say_last
from agent.version import VERSION

VERBS: Final = {
    "run": "run",
    "scan": "scan.command",
    "watch": "watch",
    "status": "status",
    "explain": "explain.command",
    "audit": "audit.command",
    "prepares": "prepares.command",
    "history": "history.command",
    "classify": "prepares.classify",
    "checks": "checks.command",
    "conform": "conform.command",
}
"""Modules of this package by verb, each with its ``VERB``. A command line loads only the module of its
verb."""

DESCRIPTION: Final = "Tells the truth about a node's devices: one verdict each, with its evidence."
EXAMPLES: Final = (
    ("drahealth scan", "look at this node once"),
    ("drahealth run --driver gpu.example.com", "run the agent for a DRA driver"),
)
MISTAKE: Final = "drahealth: this is a mistake in drahealth; please report it with the lines above"


class Parser(argparse.ArgumentParser):
    """argparse with examples first, suggestions, and errors that are raised: exit code 2 means unhealthy."""

    examples: tuple[tuple[str, str], ...] = ()

    def format_help(self) -> str:
        width = max((len(command) for command, _ in self.examples), default=0)
        lines = [f"  {command:{width}}  {what}\n" for command, what in self.examples]
        return f"examples:\n{''.join(lines)}\n{super().format_help()}"

    def error(self, message: str) -> NoReturn:
        # argparse has suggestions of its own from 3.14 on; this is for the ones before.
        if found := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            known = re.findall(r"[\w-]+", found[2])
            message = f"{found[1]!r} is none of {', '.join(known)}{suggestion(found[1], known)}"
        raise UsageError(f"{message}\ntry '{self.prog} --help'")


def verb_of(name: str) -> Verb:
    """One of :data:`VERBS`."""
    verb: Verb = import_module(f"agent.cli.{VERBS[name]}").VERB
    return verb


def build_parser(names: Iterable[str] = VERBS) -> tuple[Parser, dict[str, Parser]]:
    """The parser of the command, and those of its verbs, or of some."""
    parser = Parser(prog="drahealth", description=DESCRIPTION, allow_abbrev=False)
    parser.examples = EXAMPLES
    parser.add_argument("--version", action="version", version=f"drahealth {VERSION}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    parsers: dict[str, Parser] = {}
    for verb in map(verb_of, names):
        sub = verbs.add_parser(verb.name, help=verb.summary, description=verb.description, allow_abbrev=False)
        sub.examples = verb.examples
        verb.add_arguments(sub)
        parsers[verb.name] = sub
    return parser, parsers


def parse(argv: Sequence[str]) -> tuple[Verb, argparse.Namespace]:
    """The verb and its arguments.

    Raises:
        UsageError: names what is not understood and, if something is near, what was probably meant.
    """
    named = [word for word in argv[:1] if word in VERBS]
    parser, parsers = build_parser(named or VERBS)
    args, unknown = parser.parse_known_args(argv)
    sub = parsers[args.verb]
    if unknown:
        word = next((w for w in unknown if w.startswith("-")), unknown[0]).partition("=")[0]
        flags = re.findall(r"--[a-z-]+", sub.format_usage())
        sub.error(f"{word!r} is no argument of {args.verb}{suggestion(word, flags)}")
    return verb_of(args.verb), args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    try:
        try:
            verb, args = parse(sys.argv[1:] if argv is None else argv)
            code = verb.main(args)
        except SystemExit as done:  # --help and --version
            code = done.code if isinstance(done.code, int) else 0
        sys.stdout.flush()
    except BaseException as error:
        return complain(error)
    return code


def complain(error: BaseException, say: Callable[[str], None] = say_last) -> int:
    """Says what went wrong, on standard error if not elsewhere, and returns the exit code for it."""
    culprit = root_of(error)
    for kind, code in EXIT_OF_ERROR:
        if isinstance(culprit, kind):
            if isinstance(culprit, Exception) and not isinstance(culprit, ReaderGone):
                say(f"drahealth: {culprit}")
            return code
    say("".join(traceback.format_exception(error)) + MISTAKE)
    return INTERNAL
