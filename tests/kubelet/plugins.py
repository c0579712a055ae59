"""The plugins that are registered, each with its one connection, and what follows when a driver has none.

Source: kubelet ``cm/dra/plugin/dra_plugin_manager.go``. Not here: how plugins are found (``registry.py``),
what their health streams say (``streams.py``), what they are called for (``prepare.py``).
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
    """One endpoint of a driver. Its connection is made at once, and again whenever it is lost."""

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
        """The DRAPlugin service that is called, as it was advertised."""
        self.advertised = tuple(services)
        self.connected = False
        """Kept by the manager, under its lock."""
        self.channel = open_channel(endpoint, pace)
        """For prepare, unprepare and health."""
        self._calls = calls
        self._pace = pace
        self._on_connection = on_connection
        self._state = threading.Condition()
        self._connectivity = grpc.ChannelConnectivity.IDLE
        self._closed = False

    def connect(self) -> None:
        """Begins to connect; needed once."""
        self.channel.subscribe(self._on_state, try_to_connect=True)

    def close(self) -> None:
        """Ends the connection and all that goes on over it."""
        with self._state:
            self._closed = True
            was_ready = self._connectivity is grpc.ChannelConnectivity.READY
            self._connectivity = grpc.ChannelConnectivity.SHUTDOWN
            self._state.notify_all()
        self.channel.unsubscribe(self._on_state)
        close_channel(self.channel)
        if was_ready:
            self._on_connection(False)

    def usable(self) -> bool:
        """Blocks until there is a connection or it is known that there can be none now.

        As a call of grpc-go does that is not told to wait: sent when connected, refused while gRPC waits to
        try again.
        """
        undecided = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)
        with self._state:
            self._state.wait_for(lambda: self._connectivity not in undecided)
            return self._connectivity is grpc.ChannelConnectivity.READY

    def call(self, method: str, request: Any) -> Any:
        """Calls a method of the DRAPlugin service.

        Raises:
            CallFailed: the call as a whole failed.
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
            self._nudge()

    def _nudge(self) -> None:
        """gRPC rests once a connection is lost, until somebody wants it again."""

        def nothing(_: grpc.ChannelConnectivity) -> None:
            pass

        with self._state:
            if not self._closed:
                self.channel.subscribe(nothing, try_to_connect=True)
                self.channel.unsubscribe(nothing)


class Stream(Protocol):
    """The health stream of a plugin."""

    plugin: Plugin

    def stop(self) -> None: ...

    def join(self) -> None: ...


class Plugins:
    """Of all drivers, in the order in which they were registered."""

    def __init__(
        self,
        root: Path,
        calls: Calls,
        pace: Pace,
        history: History,
        open_stream: Callable[[Plugin], Stream | None],
        *,
        distrusts: bool,
    ) -> None:
        """
        Args:
            root: The kubelet's directory.
            calls: Those of this life of the kubelet.
            pace: Its durations.
            history: Where it is noted what happens.
            open_stream: Begins to follow a plugin's health, where that is to be.
            distrusts: Whether names and endpoints are checked, as kubelets after 1.37 will.
        """
        self._root = root
        self._calls = calls
        self._pace = pace
        self._history = history
        self._open_stream = open_stream
        self._distrusts = distrusts
        self._lock = threading.RLock()
        self._plugins: dict[str, list[Plugin]] = {}
        self._streams: list[Stream] = []
        self._wipes: dict[str, threading.Timer] = {}
        self._ended = False
        history.add(SlicesWiped(""))  # nobody is registered yet, and may never be

    def all(self) -> list[Plugin]:
        """Those that are registered now."""
        with self._lock:
            return [plugin for plugins in self._plugins.values() for plugin in plugins]

    def get(self, driver: str) -> Plugin:
        """The one to be called: the newest that is connected, else the newest.

        Raises:
            ValueError: there is none. The words are the kubelet's.
        """
        with self._lock:
            plugins = self._plugins.get(driver, [])
            if not plugins:
                raise ValueError(f"DRA driver {driver} is not registered")
            return next((plugin for plugin in reversed(plugins) if plugin.connected), plugins[-1])

    def validate(self, driver: str, endpoint: str, services: Sequence[str]) -> None:
        """Whether a plugin could be registered.

        Raises:
            ValueError: why it is not. The words are the kubelet's, but for those about names and endpoints.
        """
        if self._distrusts:
            check_driver(driver)
            check_endpoint(endpoint, self._root)
        try:
            plugin_service(services)
        except ValueError as error:
            raise ValueError(
                f"invalid supported gRPC versions of DRA driver plugin {driver} at endpoint {endpoint}:"
                f" {error}"
            ) from None

    def register(self, driver: str, endpoint: str, services: Sequence[str]) -> None:
        """Adds a plugin, opens its health stream and begins to connect to it.

        Raises:
            ValueError: why it is not. The words are the kubelet's.
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
        """Removes a plugin, if it is there, and ends its connection."""
        with self._lock:
            plugins = self._plugins.get(driver, [])
            gone = [plugin for plugin in plugins if plugin.endpoint == endpoint]
            for plugin in gone:
                plugins.remove(plugin)
                self._history.add(Deregistered(driver, endpoint))
            if not plugins:
                self._plugins.pop(driver, None)
            if gone:
                self._sync(driver)
        for plugin in gone:
            self._close(plugin)

    def end(self) -> None:
        """With the kubelet: ends all connections; nothing is wiped any more."""
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
        """Its slices are to be wiped in a while, unless one of its endpoints is connected."""
        if self._ended or any(plugin.connected for plugin in self._plugins.get(driver, [])):
            if timer := self._wipes.pop(driver, None):
                timer.cancel()
        elif driver not in self._wipes:  # else the first time goes on to count
            timer = threading.Timer(self._pace.wipe_s, self._wipe, [driver])
            timer.daemon = True
            self._wipes[driver] = timer
            timer.start()

    def _wipe(self, driver: str) -> None:
        with self._lock:
            if self._wipes.pop(driver, None) is not None and not self._ended:
                self._history.add(SlicesWiped(driver))


def check_driver(driver: str) -> None:
    """A DNS subdomain in any case, of at most 63 characters, as kubelets after 1.37 will insist.

    Raises:
        ValueError: it is none.
    """
    if not driver:
        raise ValueError("invalid DRA driver name: Required value")
    if len(driver) > 63:
        raise ValueError(f"invalid DRA driver name: Too long: {len(driver)} bytes, may not be more than 63")
    if not re.fullmatch(rf"{LABEL}(\.{LABEL})*", driver.lower()):
        raise ValueError(f"invalid DRA driver name {driver!r}: no lowercase RFC 1123 subdomain")


def check_endpoint(endpoint: str, root: Path) -> None:
    """An absolute path that fits a socket and, once it is cleaned, is inside the kubelet's directory.

    Raises:
        ValueError: it is none.
    """
    if not endpoint:
        raise ValueError("empty DRA plugin endpoint")
    if not endpoint.startswith("/"):
        raise ValueError(f"DRA plugin endpoint {endpoint} must be an absolute path")
    if len(os.fsencode(endpoint)) >= SOCKET_LIMIT:  # with the NUL behind it
        raise ValueError(f"DRA plugin endpoint {endpoint} is longer than {SOCKET_LIMIT - 1} bytes")
    if Path(os.path.normpath(root)) not in Path(os.path.normpath(endpoint)).parents:
        raise ValueError(f"DRA plugin endpoint {endpoint} is not inside {root}")
