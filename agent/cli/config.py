"""``drahealth config``: shows the effective configuration, checks files, and writes the JSON schema of files.

The configuration is printed as a file with comments or as JSON. The schema is made from the table of
settings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent.cli.output.json import API_VERSION
from agent.cli.output.text import clean
from agent.cli.subcommand import (
    Subcommand,
    add_output,
    add_settings,
    load_with_origins_of,
    print_result,
    refuse_settings,
)
from agent.config.config import DEFAULT, SETTINGS, Config, Setting, ValueOriginKind, load_with_origins
from agent.errors import UsageError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent.cli.output.terminal import TextStyle
    from agent.config.config import LoadedConfig

COMMENT_COLUMN: Final = 40


def document(loaded: LoadedConfig) -> dict[str, Any]:
    """Return the effective configuration as JSON. Later versions only add keys."""
    return {
        "apiVersion": API_VERSION,
        "files": [str(path) for path in loaded.files],
        "settings": [
            {
                "key": setting.key,
                "value": _value(loaded, setting),
                "origin": {"kind": origin.kind, "name": origin.name},
                "reloads": not setting.is_fixed,
            }
            for setting in SETTINGS
            for origin in (loaded.origins.get(setting.key, DEFAULT),)
        ],
    }


def _value(loaded: LoadedConfig, setting: Setting) -> Any:
    value = getattr(loaded.config, setting.field)
    return None if value is None else setting.kind.show(value)


def render(loaded: LoadedConfig, style: TextStyle) -> str:
    """Return the effective configuration as a configuration file, with each value's origin as a comment."""
    lines: list[str] = []
    table = ""
    for setting in sorted(SETTINGS, key=_is_own_table):
        value, origin = _value(loaded, setting), loaded.origins.get(setting.key, DEFAULT)
        source = origin.name if origin.kind is not ValueOriginKind.DEFAULT else "default"
        comment = style.paint(f"# {clean(source)}", "dim")
        if _is_own_table(setting):
            lines += _own_tables(setting.key, value, comment)
            continue
        name = setting.key.removeprefix(f"{setting.key.rpartition('.')[0]}.")
        if (heading := setting.key.rpartition(".")[0]) != table:
            table = heading
            lines += ["", f"[{table}]"]
        entry = f"# {name} is not set" if value is None else f"{name} = {_toml(value)}"
        lines.append(
            f"{entry:{COMMENT_COLUMN}}{comment}" if len(entry) < COMMENT_COLUMN else f"{entry}  {comment}"
        )
    return "\n".join(lines[1:]) + "\n"


def _is_own_table(setting: Setting) -> bool:
    """Return whether the value of this setting is a separate TOML table, or an array of tables, in a file."""
    schema = setting.kind.schema
    return "object" in (schema["type"], schema.get("items", {}).get("type"))


def _own_tables(key: str, value: Any, comment: str) -> Iterator[str]:
    """Yield the lines of a TOML table, or of an array of tables, for the value of one setting."""
    tables, brackets = ([value], f"[{key}]") if isinstance(value, Mapping) else (value, f"[[{key}]]")
    if not any(tables):
        yield from ("", f"{f'# [{key}] is empty':{COMMENT_COLUMN}}{comment}")
        return
    for entries in tables:
        yield from ("", f"{brackets:{COMMENT_COLUMN}}{comment}")
        for name, entry in entries.items():
            yield f"{name} = {_toml(entry)}"


def _toml(value: Any) -> str:
    """Return a value in the syntax of TOML. Strings, numbers, booleans and lists have the syntax of JSON."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# --- the command -------------------------------------------------------------------------------------------


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
        help="with check: the only file to check; the environment has no effect",
    )
    add_output(parser)
    add_settings(parser)


def main(args: Namespace) -> int:
    if args.file is not None and args.action != "check":
        raise UsageError(f"FILE {args.file!r} is for 'drahealth config check'; name the file with --config")
    if args.action == "schema":
        print(json.dumps(config_schema(), indent=2))
        return 0
    if args.file is not None:
        refuse_settings(args, f"FILE {args.file!r}")
        loaded = load_with_origins({}, {}, file=Path(args.file), needs_runtime_dir=False)
    else:
        has_default = os.geteuid() == 0 or bool(os.environ.get("XDG_RUNTIME_DIR"))
        loaded = load_with_origins_of(args, needs_runtime_dir=has_default)
    if args.action == "check":
        loaded.config.check_web_config()
        files = [str(path) for path in loaded.files]
        named = ", ".join(files) or "no configuration file"
        checked = {"apiVersion": API_VERSION, "valid": True, "files": files}
        print_result(args, lambda: checked, lambda _: f"{named}: valid\n")
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


# --- JSON schema -------------------------------------------------------------------------------------------

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file, with the meaning, limits and default of each key."""
    schema: dict[str, Any] = {
        "$schema": DIALECT,
        "title": "Configuration of drahealth",
        **_table(),
    }
    defaults = Config(node_name="unset")
    for setting in SETTINGS:
        *tables, name = setting.key.split(".")
        place = schema
        for table in tables:
            place = place["properties"].setdefault(table, _table())
        place["properties"][name] = _leaf_schema(setting, defaults)
    return schema


def _table() -> dict[str, Any]:
    return {"type": "object", "properties": {}, "additionalProperties": False}


def _leaf_schema(setting: Setting, defaults: Config) -> dict[str, Any]:
    """Return the JSON schema of one setting."""
    leaf = {**setting.kind.schema, "description": setting.help}
    check = setting.check_limits
    if leaf.get("type") == "integer" and isinstance(check, partial):  # number_within()
        _, leaf["minimum"], leaf["maximum"] = check.args
    value = getattr(defaults, setting.field)
    if value is not None and setting.key != "agent.node-name":  # whose default is the host name
        leaf["default"] = setting.kind.show(value)
    return leaf
