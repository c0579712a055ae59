"""Reload of the configuration while the agent runs: read, checked and applied as a whole, or not at all.

The module also compares two configurations. It returns the differences as text, and those that need a
restart. Pure.
"""

import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import trio

from agent.config.config import SETTINGS, Config, LoadedConfig, Setting
from agent.errors import ConfigError, DrahealthError
from agent.model.report import ConfigReload
from agent.serve.sd_notify import SystemdNotifier
from agent.system.output import get_logger
from agent.system.threads.thread_start import ThreadStartError
from agent.system.threads.trio_calls import call_in_thread

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
        ConfigError: A setting that only a restart can change differs; the text names all such settings.
    """
    fixed = [
        f"{origin.name}: {change}" if (origin := loaded.origins.get(change.setting.key)) else str(change)
        for change in config_changes(before, loaded.config)
        if change.setting.is_fixed
    ]
    if fixed:
        raise ConfigError(f"{'; '.join(fixed)}: only a restart of the agent applies this change; restart it")


def _text(setting: Setting, value: Any) -> str:
    """Return a setting's value as text of a configuration file, cut to VALUE_CHARS; ``unset`` for None."""
    if value is None:
        return "unset"
    shown = setting.kind.show(value)
    if setting.key == "check":  # arguments of a command may be passwords, and many programs read the log
        shown = [{**check, "command": check["command"][:1]} for check in shown]
    text = json.dumps(shown, ensure_ascii=False)
    return text if len(text) <= VALUE_CHARS else f"{text[: VALUE_CHARS - 3]}..."


# --- the reload --------------------------------------------------------------------------------------------

READ_S: Final = 10.0
"""Longest time to read the configuration files [s]; a hung disk must not leave systemd waiting."""

log = get_logger(__name__)


class ConfigReloader:
    """Component that reads, checks and applies a changed configuration on request.

    Only the core thread may use the object, except for :attr:`last`.
    """

    def __init__(
        self,
        config: Config,
        load: Callable[[], LoadedConfig],
        apply: Callable[[Config], None],
        notifier: SystemdNotifier,
        wall_clock: Callable[[], float],
    ) -> None:
        """Create the reloader.

        Args:
            config: Configuration in effect.
            load: Loads the configuration; called in a thread. Raises DrahealthError.
            apply: Applies a checked configuration; must not block or fail.
            notifier: Notified of the begin and the end of a reload.
            wall_clock: Returns the current time [s since 1970].
        """
        self._config = config
        self._load = load
        self._apply = apply
        self._notifier = notifier
        self._wall_clock = wall_clock
        self._requested = trio.Event()
        self._is_reading = False
        """True: the thread that reads the configuration files was started and has not returned.
        No second one starts, even if the disk hangs."""
        self.last: ConfigReload | None = None
        """Result of the last reload of the configuration; None: there was none. Thread-safe."""

    def request(self) -> None:
        """Request a reload of the configuration. Requests during a reload cause one further reload."""
        self._requested.set()

    async def run(self) -> None:
        """Reload the configuration at each request, until cancelled."""
        while True:
            await self._requested.wait()
            self._requested = trio.Event()
            self._notifier.reloading()
            changes: tuple[str, ...] = ()
            refusal = ""
            try:
                changes = tuple(map(str, await self._reload()))
            except (DrahealthError, OSError, ThreadStartError) as error:
                refusal = str(error)
            if refusal:
                log.error("configuration: not reloaded: %s; the configuration in effect stays", refusal)
            else:
                log.info("configuration: reloaded: %s", "; ".join(changes) or "no setting has changed")
            self.last = ConfigReload(self._wall_clock(), refusal, changes)
            self._notifier.ready()

    async def _reload(self) -> tuple[SettingChange, ...]:
        """Read, check and apply the configuration; return the changed settings."""
        if self._is_reading:
            raise ConfigError("the previous reload is still reading the configuration files; check the disk")
        loaded = None
        self._is_reading = True  # here: the thread may begin later than READ_S
        with trio.move_on_after(READ_S):
            try:
                loaded = await call_in_thread(self._read, "dh-reload")
            except ThreadStartError:
                self._is_reading = False
                raise
        if loaded is None:
            raise ConfigError(f"the configuration files were not read within {READ_S:g} s; check the disk")
        check_reloadable(self._config, loaded)
        changes = config_changes(self._config, loaded.config)
        if changes:
            self._apply(loaded.config)
            self._config = loaded.config
        return changes

    def _read(self) -> LoadedConfig:
        try:
            return self._load()
        finally:
            self._is_reading = False
