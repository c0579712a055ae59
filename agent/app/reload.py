"""Reload of the configuration while the agent runs: read, checked and applied as a whole, or not at all."""

import logging
from collections.abc import Callable
from typing import Final

import trio

from agent.config.changes import SettingChange, check_reloadable, config_changes
from agent.config.config import Config, LoadedConfig
from agent.errors import ConfigError, DrahealthError
from agent.model.report import ConfigReload
from agent.serve.sd_notify import SystemdNotifier
from agent.system.threads.thread_start import ThreadStartError
from agent.system.threads.trio_calls import call_in_thread

READ_S: Final = 10.0
"""Longest time to read the configuration files [s]; a hung disk must not leave systemd waiting."""

log = logging.getLogger(__name__)


class ConfigReloader:
    """Reader and checker of a changed configuration, on request. Core thread only, except :attr:`last`."""

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
        """True: the thread that reads the configuration files has not returned.
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
        with trio.move_on_after(READ_S):
            loaded = await call_in_thread(self._read, "dh-reload")
        if loaded is None:
            raise ConfigError(f"the configuration files were not read within {READ_S:g} s; check the disk")
        check_reloadable(self._config, loaded)
        changes = config_changes(self._config, loaded.config)
        if changes:
            self._apply(loaded.config)
            self._config = loaded.config
        return changes

    def _read(self) -> LoadedConfig:
        self._is_reading = True
        try:
            return self._load()
        finally:
            self._is_reading = False
