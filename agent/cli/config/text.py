"""Output of ``drahealth config``: the effective configuration as a file with comments, or JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from agent.cli.output.json import API_VERSION
from agent.cli.output.text import clean
from agent.config.config import DEFAULT, SETTINGS, ValueOriginKind

if TYPE_CHECKING:
    from agent.cli.output.terminal import TextStyle
    from agent.config.config import LoadedConfig, Setting, ValueOrigin

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
    """Return the effective configuration as a configuration file, with the origins as comments."""
    lines: list[str] = []
    table = ""
    for setting in sorted(SETTINGS, key=_is_own_table):
        value, origin = _value(loaded, setting), loaded.origins.get(setting.key, DEFAULT)
        comment = style.paint(f"# {clean(_origin_text(origin))}", "dim")
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


def _origin_text(origin: ValueOrigin) -> str:
    return origin.name if origin.kind is not ValueOriginKind.DEFAULT else "default"


def _is_own_table(setting: Setting) -> bool:
    """Return whether a file has a table, or an array of tables, for the value of this setting."""
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
    """Return a value as TOML: its strings, numbers, booleans and lists are those of JSON."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
