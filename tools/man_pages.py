"""Manual pages, made from the parsers of the command line and the table of settings.

Usage: ``python tools/man_pages.py DIRECTORY``. Writes ``drahealth.1``, one page per subcommand, such as
``drahealth-run.1``, and ``drahealth.toml.5``, for packages of distributions.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from agent.cli.main import DESCRIPTION, EXAMPLES, VERBS, build_parser, load_verb
from agent.config.config import SETTINGS, Config
from agent.config.files import DEFAULT_FILE, DROP_INS
from agent.version import VERSION

MANUAL = "drahealth"


def pages() -> dict[str, str]:
    """Return the text of each page by file name."""
    parser, parsers = build_parser()
    found = {"drahealth.1": program_page(parser)}
    for name in VERBS:
        verb = load_verb(name)
        body = [
            *_section("SYNOPSIS", _synopsis(parsers[name])),
            *_section("DESCRIPTION", [escaped(verb.description)]),
            *_section("OPTIONS", _options(parsers[name])),
            *_section("EXAMPLES", _examples(verb.examples)),
            *_section("SEE ALSO", [r"\fBdrahealth\fR(1), \fBdrahealth.toml\fR(5)"]),
        ]
        found[f"drahealth-{name}.1"] = _page(f"drahealth-{name}", 1, verb.summary, body)
    found["drahealth.toml.5"] = settings_page()
    return found


def program_page(parser: argparse.ArgumentParser) -> str:
    """Return the page of the program, with its subcommands."""
    verbs = [
        line
        for name in VERBS
        for line in (".TP", rf"\fBdrahealth\-{escaped(name)}\fR(1)", escaped(load_verb(name).summary))
    ]
    body = [
        *_section("SYNOPSIS", _synopsis(parser)),
        *_section("DESCRIPTION", [escaped(DESCRIPTION)]),
        *_section("COMMANDS", verbs),
        *_section("EXAMPLES", _examples(EXAMPLES)),
        *_section("FILES", [".TP", rf"\fI{escaped(str(DEFAULT_FILE))}\fR", r"See \fBdrahealth.toml\fR(5)."]),
    ]
    return _page("drahealth", 1, "monitor the health of a Kubernetes node's devices", body)


def settings_page() -> str:
    """Return the page of the configuration file, with every setting and its default."""
    defaults = Config(node_name="unset")
    lines: list[str] = []
    table = ""
    for setting in SETTINGS:
        heading, _, name = setting.key.rpartition(".")
        if heading != table:
            table = heading
            lines.append(f'.SS "[{escaped(heading)}]"' if heading else '.SS "Other tables"')
        value = getattr(defaults, setting.field)
        lines += [".TP", rf"\fB{escaped(name)}\fR", escaped(setting.help)]
        if value is not None and setting.key != "agent.node-name":
            shown = json.dumps(setting.kind.show(value))
            lines += [".br", f"Default: {escaped(shown)}"]
        if keys := setting.kind.schema.get("items", {}).get("properties"):
            lines += [".br", f"Keys of an entry: {escaped(', '.join(keys))}"]
        if setting.is_fixed:
            lines += [".br", "A change needs a restart."]
    description = (
        f"The agent reads {DEFAULT_FILE} and then {DEFAULT_FILE.parent / DROP_INS}/*.toml in the order of "
        "their names; a later file replaces values of an earlier one. 'drahealth config' prints the value of "
        "each setting with its origin."
    )
    body = [
        *_section("DESCRIPTION", [escaped(description)]),
        *_section("SETTINGS", lines),
        *_section("SEE ALSO", [r"\fBdrahealth\-config\fR(1)"]),
    ]
    return _page("drahealth.toml", 5, "configuration of drahealth", body)


def escaped(text: str) -> str:
    """Return a text for roff, in which a backslash, a hyphen and a leading dot have other meanings."""
    text = text.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq")
    return rf"\&{text}" if text.startswith(".") else text


def _page(name: str, section: int, summary: str, body: list[str]) -> str:
    head = [
        f'.TH "{escaped(name.upper())}" "{section}" "" "drahealth {VERSION}" "{MANUAL}"',
        ".SH NAME",
        rf"{escaped(name)} \- {escaped(summary)}",
    ]
    return "\n".join([*head, *body]) + "\n"


def _section(title: str, lines: list[str]) -> list[str]:
    return [f'.SH "{title}"', *lines] if lines else []


def _synopsis(parser: argparse.ArgumentParser) -> list[str]:
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    return [escaped(usage)]


def _options(parser: argparse.ArgumentParser) -> list[str]:
    lines: list[str] = []
    for group in parser._action_groups:
        if group.description and group._group_actions:
            lines += [f'.SS "{escaped(group.title or "")}"', escaped(group.description)]
        lines += [line for action in group._group_actions for line in _option(action)]
    return lines


def _option(action: argparse.Action) -> Iterator[str]:
    value = action.metavar if isinstance(action.metavar, str) else ""
    if action.choices and not value:
        value = "|".join(map(str, action.choices))
    elif not value and action.nargs != 0:
        value = action.dest.upper()
    names = ", ".join(rf"\fB{escaped(name)}\fR" for name in action.option_strings)
    yield ".TP"
    yield " ".join(filter(None, (names, rf"\fI{escaped(value)}\fR" if value else "")))
    yield escaped(action.help or "")


def _examples(examples: tuple[tuple[str, str], ...]) -> list[str]:
    return [
        line
        for command, purpose in examples
        for line in (".TP", rf"\fB{escaped(command)}\fR", escaped(purpose))
    ]


def write(directory: Path, texts: Mapping[str, str]) -> None:
    """Write the pages into a directory, which is created."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/man_pages.py DIRECTORY")
    write(Path(sys.argv[1]), pages())
