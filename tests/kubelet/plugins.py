"""The registered plugins, each with one connection, and the deletion of ResourceSlices after a disconnect.

It follows kubelet ``cm/dra/plugin/dra_plugin_manager.go``. ``registry.py`` finds the plugins,
``streams.py`` reads their health streams and ``prepare.py`` calls them.
"""

import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import grpc

from kubelet.calls import DRA_PACKAGES, Calls, close_channel, open_channel
from kubelet.history import Connected, Deregistered, Disconnected, History, SlicesWiped
from kubelet.pace import Pace
from kubelet.versions import plugin_service

LABEL: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SOCKET_LIMIT: Final = 108


class Plugin:
    """One endpoint of a driver. It connects at once, and again after each disconnect."""

    def __init__(
        self,
        driver: str,
        endpoint: str,
        services: Sequence[str],
        calls: Calls,
        pace: Pace,
        on_connection: Callable[[bool], None],
    ) -> None:
        self.driver = driver
        self.endpoint = endpoint
        self.service = plugin_service(services)
        """The DRAPlugin service that the kubelet calls, as advertised."""
        self.advertised = tuple(services)
        self.connected = False
        """Written by the manager, under the manager's lock."""
        self.channel = open_channel(endpoint, pace)
        """Used for prepare, unprepare and health."""
        self._calls = calls
        self._pace = pace
        self._on_connection = on_connection
        self._state = threading.Condition()
        self._connectivity = grpc.ChannelConnectivity.IDLE
        self._closed = False

    def connect(self) -> None:
        """Start to connect. Called once."""
        self.channel.subscribe(self._on_state, try_to_connect=True)

    def close(self) -> None:
        """Close the connection and end its calls."""
        with self._state:
            self._closed = True
            was_ready = self._connectivity is grpc.ChannelConnectivity.READY
            self._connectivity = grpc.ChannelConnectivity.SHUTDOWN
            self._state.notify_all()
        self.channel.unsubscribe(self._on_state)
        close_channel(self.channel)
        if was_ready:
            self._on_connection(False)

    def wait_usable(self) -> bool:
        """Wait until the channel is connected or in backoff, and return whether it is connected.

        grpc-go does the same for a call without WaitForReady: it sends the call on a connected channel and
        rejects it during the backoff.
        """
        undecided = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)
        with self._state:
            self._state.wait_for(lambda: self._connectivity not in undecided)
            return self._connectivity is grpc.ChannelConnectivity.READY

    def call(self, method: str, request: Any) -> Any:
        """Call a method of the DRAPlugin service.

        Raises:
            CallFailed: the call failed as a whole.
        """
        package = DRA_PACKAGES[self.service]
        return self._calls.call(self.channel, package, "DRAPlugin", method, request, self._pace.call_s)

    def _on_state(self, connectivity: grpc.ChannelConnectivity) -> None:
        ready = grpc.ChannelConnectivity.READY
        with self._state:
            if self._closed:
                return
            before, self._connectivity = self._connectivity, connectivity
            self._state.notify_all()
        if (before is ready) is not (connectivity is ready):
            self._on_connection(connectivity is ready)
        if connectivity is grpc.ChannelConnectivity.IDLE and before is not connectivity:
            self._reconnect()

    def _reconnect(self) -> None:
        """Make gRPC connect again: after a disconnect the channel stays idle until it is used."""

        def ignore_state(_: grpc.ChannelConnectivity) -> None:
            pass

        with self._state:
            if not self._closed:
                self.channel.subscribe(ignore_state, try_to_connect=True)
                self.channel.unsubscribe(ignore_state)


class PluginStream(Protocol):
    """The health stream of a plugin."""

    plugin: Plugin

    def stop(self) -> None: ...

    def join(self) -> None: ...


class Plugins:
    """The plugins of all drivers, in the order of their registration."""

    def __init__(
        self,
        root: Path,
        calls: Calls,
        pace: Pace,
        history: History,
        open_stream: Callable[[Plugin], PluginStream | None],
        *,
        validates_input: bool,
    ) -> None:
        """Args:
        root: The kubelet's directory.
        calls: Tracks the calls of this kubelet process.
        pace: The kubelet's durations.
        history: Receives an entry for each event.
        open_stream: Opens a plugin's health stream. Returns None where the kubelet opens none.
        validates_input: Check names and endpoints as kubelets from 1.38 on.
        """
        self._root = root
        self._calls = calls
        self._pace = pace
        self._history = history
        self._open_stream = open_stream
        self._validates_input = validates_input
        self._lock = threading.RLock()
        self._plugins: dict[str, list[Plugin]] = {}
        self._streams: list[PluginStream] = []
        self._wipes: dict[str, threading.Timer] = {}
        self._ended = False
        history.add(SlicesWiped(""))  # no plugin is registered yet, and none may follow

    def all(self) -> list[Plugin]:
        """Return the plugins that are registered now."""
        with self._lock:
            return [plugin for plugins in self._plugins.values() for plugin in plugins]

    def get(self, driver: str) -> Plugin:
        """Return the plugin to call: the newest connected one, else the newest.

        Raises:
            ValueError: the driver has none. The text is the kubelet's.
        """
        with self._lock:
            plugins = self._plugins.get(driver, [])
            if not plugins:
                raise ValueError(f"DRA driver {driver} is not registered")
            return next((plugin for plugin in reversed(plugins) if plugin.connected), plugins[-1])

    def validate(self, driver: str, endpoint: str, services: Sequence[str]) -> None:
        """Check whether a plugin could be registered.

        Raises:
            ValueError: it could not. The text is the kubelet's, except for names and endpoints.
        """
        if self._validates_input:
            check_driver(driver)
            connect_endpoint(endpoint, self._root)
        try:
            plugin_service(services)
        except ValueError as error:
            raise ValueError(
                f"invalid supported gRPC versions of DRA driver plugin {driver} at endpoint {endpoint}:"
                f" {error}"
            ) from None

    def register(self, driver: str, endpoint: str, services: Sequence[str]) -> None:
        """Add a plugin, open its health stream and start to connect.

        Raises:
            ValueError: the plugin was rejected. The text is the kubelet's.
        """
        self.validate(driver, endpoint, services)
        with self._lock:
            plugins = self._plugins.setdefault(driver, [])
            if any(plugin.endpoint == endpoint for plugin in plugins):
                raise ValueError(f"endpoint {endpoint} already registered for DRA driver plugin {driver}")

            def on_connection(connected: bool) -> None:
                self._on_connection(plugin, connected)

            plugin = Plugin(driver, endpoint, services, self._calls, self._pace, on_connection)
            plugins.append(plugin)
            self._sync(driver)
            if stream := self._open_stream(plugin):
                self._streams.append(stream)
        plugin.connect()

    def deregister(self, driver: str, endpoint: str) -> None:
        """Remove a plugin if it is registered, and close its connection."""
        with self._lock:
            plugins = self._plugins.get(driver, [])
            removed = [plugin for plugin in plugins if plugin.endpoint == endpoint]
            for plugin in removed:
                plugins.remove(plugin)
                self._history.add(Deregistered(driver, endpoint))
            if not plugins:
                self._plugins.pop(driver, None)
            if removed:
                self._sync(driver)
        for plugin in removed:
            self._close(plugin)

    def end(self) -> None:
        """Close all connections when the kubelet stops. Slices are not wiped afterwards."""
        with self._lock:
            self._ended = True
            for timer in self._wipes.values():
                timer.cancel()
            plugins = self.all()
            streams = list(self._streams)
        for plugin in plugins:
            self._close(plugin)
        for stream in streams:
            stream.join()

    def _close(self, plugin: Plugin) -> None:
        for stream in self._streams:
            if stream.plugin is plugin:
                stream.stop()
        plugin.close()

    def _on_connection(self, plugin: Plugin, connected: bool) -> None:
        with self._lock:
            plugin.connected = connected
            entry = Connected if connected else Disconnected
            self._history.add(entry(plugin.driver, plugin.endpoint))
            self._sync(plugin.driver)

    def _sync(self, driver: str) -> None:
        """Schedule the deletion of a driver's slices, or cancel it while one of its endpoints is
        connected.
        """
        if self._ended or any(plugin.connected for plugin in self._plugins.get(driver, [])):
            if timer := self._wipes.pop(driver, None):
                timer.cancel()
        elif driver not in self._wipes:  # a running timer keeps its start
            timer = threading.Timer(self._pace.wipe_s, self._wipe, [driver])
            timer.daemon = True
            self._wipes[driver] = timer
            timer.start()

    def _wipe(self, driver: str) -> None:
        with self._lock:
            if self._wipes.pop(driver, None) is not None and not self._ended:
                self._history.add(SlicesWiped(driver))


def check_driver(driver: str) -> None:
    """Check for a DNS subdomain of at most 63 characters in any case, as kubelets from 1.38 on.

    Raises:
        ValueError: the name is invalid.
    """
    if not driver:
        raise ValueError("invalid DRA driver name: Required value")
    if len(driver) > 63:
        raise ValueError(f"invalid DRA driver name: Too long: {len(driver)} bytes, may not be more than 63")
    if not re.fullmatch(rf"{LABEL}(\.{LABEL})*", driver.lower()):
        raise ValueError(f"invalid DRA driver name {driver!r}: no lowercase RFC 1123 subdomain")


def connect_endpoint(endpoint: str, root: Path) -> None:
    """Check for an absolute path that fits a socket address and is inside the kubelet's directory.

    Raises:
        ValueError: the path is invalid.
    """
    if not endpoint:
        raise ValueError("empty DRA plugin endpoint")
    if not endpoint.startswith("/"):
        raise ValueError(f"DRA plugin endpoint {endpoint} must be an absolute path")
    if len(os.fsencode(endpoint)) >= SOCKET_LIMIT:  # the limit includes the final NUL
        raise ValueError(f"DRA plugin endpoint {endpoint} is longer than {SOCKET_LIMIT - 1} bytes")
    if Path(os.path.normpath(root)) not in Path(os.path.normpath(endpoint)).parents:
        raise ValueError(f"DRA plugin endpoint {endpoint} is not inside {root}")
