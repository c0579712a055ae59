"""``drahealth version``: shows the versions of drahealth, of its libraries, and of the system."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from typing import TYPE_CHECKING, Any

from agent.cli.output.json import API_VERSION
from agent.cli.subcommand import Subcommand, add_output, print_result
from agent.version import VERSION

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    add_output(parser)


def main(args: Namespace) -> int:
    def text(_: object) -> str:
        facts = document()
        return f"drahealth {VERSION}, Python {facts['python']}, Linux {facts['kernel']}, {facts['machine']}\n"

    print_result(args, document, text)
    return 0


def document() -> dict[str, Any]:
    """Return the versions as JSON. Later versions only add keys."""
    kernel = os.uname()
    return {
        "apiVersion": API_VERSION,
        "version": VERSION,
        "python": platform.python_version(),
        "kernel": kernel.release,
        "machine": kernel.machine,
        "libraries": library_versions(),
    }


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that drahealth requires, by name.

    Libraries that are not installed are left out.
    """
    try:
        required = metadata.requires("drahealth") or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return {}
    found = {}
    for requirement in required:
        match = re.match(r"[\w.-]+", requirement)
        if match is None or "extra ==" in requirement:
            continue
        try:
            found[match[0]] = metadata.version(match[0])
        except metadata.PackageNotFoundError:
            continue
    return found


VERB = Subcommand(
    name="version",
    summary="show the version of drahealth",
    description=(
        "Shows the version of drahealth, of Python and of the kernel; as JSON also of the libraries, for "
        "reports of bugs. 'drahealth --version' shows the version of drahealth only."
    ),
    examples=(
        ("drahealth version", "in one line"),
        ("drahealth version -o json | jq .libraries", "the versions of the libraries"),
    ),
    add_arguments=add_arguments,
    main=main,
)
