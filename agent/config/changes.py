"""Differences between two configurations, for a reload: their text, and those that need a restart. Pure."""

import json
from typing import Any, Final, NamedTuple

from agent.config.config import SETTINGS, Config, LoadedConfig, Setting
from agent.errors import ConfigError

VALUE_CHARS: Final = 200
"""Longest text of a value in a log line [characters]; tables of rules can be long."""


class SettingChange(NamedTuple):
    """Setting whose value differs between two configurations."""

    setting: Setting
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.setting.key}: {_text(self.setting, self.before)} to {_text(self.setting, self.after)}"


def config_changes(before: Config, after: Config) -> tuple[SettingChange, ...]:
    """Return the settings that differ, in the order of the table of settings."""
    pairs = ((setting, getattr(before, setting.field), getattr(after, setting.field)) for setting in SETTINGS)
    return tuple(SettingChange(setting, old, new) for setting, old, new in pairs if old != new)


def check_reloadable(before: Config, loaded: LoadedConfig) -> None:
    """Check that a running agent can apply a configuration.

    Raises:
        ConfigError: A setting differs that only a restart can change; the text has all of them.
    """
    fixed = [
        f"{loaded.origins[change.setting.key].name}: {change}"
        if change.setting.key in loaded.origins
        else str(change)
        for change in config_changes(before, loaded.config)
        if change.setting.is_fixed
    ]
    if fixed:
        raise ConfigError(f"{'; '.join(fixed)}: only a restart of the agent applies this change; restart it")


def _text(setting: Setting, value: Any) -> str:
    """Return the text of a setting's value in a configuration file, cut to VALUE_CHARS.
    ``unset`` without value."""
    if value is None:
        return "unset"
    text = json.dumps(setting.kind.show(value), ensure_ascii=False)
    return text if len(text) <= VALUE_CHARS else f"{text[: VALUE_CHARS - 3]}..."
