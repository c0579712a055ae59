"""JSON schema of the configuration file, made from the table of settings. Pure."""

from functools import partial
from typing import Any, Final

from agent.config.config import SETTINGS, Config, Setting

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
        place["properties"][name] = _leaf(setting, defaults)
    return schema


def _table() -> dict[str, Any]:
    return {"type": "object", "properties": {}, "additionalProperties": False}


def _leaf(setting: Setting, defaults: Config) -> dict[str, Any]:
    """Return the JSON schema of one setting."""
    leaf = {**setting.kind.schema, "description": setting.help}
    check = setting.check_limits
    if leaf.get("type") == "integer" and isinstance(check, partial):  # number_within()
        _, leaf["minimum"], leaf["maximum"] = check.args
    value = getattr(defaults, setting.field)
    if value is not None and setting.key != "agent.node-name":  # whose default is the host name
        leaf["default"] = setting.kind.show(value)
    return leaf
