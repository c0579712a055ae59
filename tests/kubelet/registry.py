"""Discovery of plugins: the kubelet watches the registration sockets and compares them with its plugins.

It follows kubelet ``pluginmanager/``. Each creation of a socket gets an identity, so a socket that was
removed and created again is a new plugin. The watcher only records sockets, and a loop compares them with
the plugins. Each socket has at most one running operation, in its own thread, with a backoff after a
failure.
"""

import stat
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import grpc
from wire.google import message_class

from kubelet.calls import REGISTRATION, CallFailed, Calls, close_channel, open_channel
from kubelet.history import History, Registered, RegistrationFailed
from kubelet.inotify import Inotify
from kubelet.pace import Pace


class Handler(Protocol):
    """Handler of plugins of type DRAPlugin. Each method raises ValueError with the reason of a rejection."""

    def validate(self, driver: str, endpoint: str, services: tuple[str, ...]) -> None: ...

    def register(self, driver: str, endpoint: str, services: tuple[str, ...]) -> None: ...

    def deregister(self, driver: str, endpoint: str) -> None: ...


class RegisteredPlugin(NamedTuple):
    """A registered plugin, found by its registration socket."""

    identity: uuid.UUID
    driver: str
    endpoint: str


@dataclass(slots=True)
class Operation:
    """The last registration or deregistration for a socket."""

    register: bool
    pending: bool = True
    wait_s: float = 0.0
    """The backoff after the last failure."""
    not_before_s: float = 0.0
    """The end of the backoff on the monotonic clock."""


class Registry:
    """The kubelet's plugin manager, for one kubelet process."""

    def __init__(self, directory: Path, handler: Handler, calls: Calls, pace: Pace, history: History) -> None:
        """Start to watch.

        Args:
            directory: ``plugins_registry``. It is created if missing.
            handler: Registers the plugins.
            calls: Tracks the calls of this kubelet process.
            pace: The kubelet's durations.
            history: Receives an entry for each event.
        """
        self._directory = directory
        self._handler = handler
        self._calls = calls
        self._pace = pace
        self._history = history
        self._lock = threading.Lock()
        self._desired: dict[Path, uuid.UUID] = {}
        self._actual: dict[Path, RegisteredPlugin] = {}
        self._notified: dict[Path, RegisteredPlugin] = {}
        self._operations: dict[Path, Operation] = {}
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._inotify = Inotify()
        self._walk(directory)
        self._watcher = threading.Thread(target=self._watch, name="kubelet-watcher", daemon=True)
        self._loop = threading.Thread(target=self._reconcile, name="kubelet-reconcile", daemon=True)
        self._watcher.start()
        self._loop.start()

    def end(self) -> None:
        """Stop the threads when the kubelet stops. Plugins are not deregistered. Calls must have ended
        before.
        """
        self._ended.set()
        self._inotify.stop()
        self._watcher.join()
        self._loop.join()
        self._inotify.close()
        for thread in self._threads:
            thread.join()

    def registered_plugins(self) -> set[tuple[str, str]]:
        """Return driver and endpoint of each registered plugin that was notified."""
        with self._lock:
            return {(plugin.driver, plugin.endpoint) for plugin in self._notified.values()}

    # --- the sockets ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while (events := self._inotify.wait()) is not None:
            for path, created in events:
                if created:
                    self._add_socket(path)
                else:
                    with self._lock:
                        self._desired.pop(path, None)

    def _add_socket(self, path: Path) -> None:
        try:
            mode = path.lstat().st_mode
        except OSError:  # gone again
            return
        if path.name.startswith("."):
            return
        if stat.S_ISDIR(mode):
            self._walk(path)
        elif stat.S_ISSOCK(mode):
            with self._lock:
                self._desired[path] = uuid.uuid4()

    def _walk(self, directory: Path) -> None:
        try:
            self._inotify.add(directory)
            inside = sorted(directory.iterdir())
        except OSError:  # gone again
            return
        for path in inside:
            if path.is_dir() and not path.is_symlink():
                self._walk(path)
            elif path.is_socket():
                self._add_socket(path)

    # --- the plugins ------------------------------------------------------------------------------------

    def _reconcile(self) -> None:
        while not self._ended.wait(self._pace.reconcile_s):
            with self._lock:
                actual, desired = dict(self._actual), dict(self._desired)
            for path, plugin in actual.items():
                if desired.get(path) != plugin.identity:
                    self._operate(path, register=False, work=lambda path=path: self._unregister(path))
            for path, identity in desired.items():
                if path not in actual:
                    self._operate(
                        path,
                        register=True,
                        work=lambda path=path, identity=identity: self._register(path, identity),
                    )

    def _operate(self, path: Path, *, register: bool, work: Callable[[], None]) -> None:
        """Start an operation, unless one runs for that socket or its backoff lasts."""
        with self._lock:
            last = self._operations.get(path)
            if last is not None and last.pending:
                return
            if last is not None and last.register is register and time.monotonic() < last.not_before_s:
                return
            wait_s = last.wait_s if last is not None and last.register is register else 0.0
            operation = self._operations[path] = Operation(register, wait_s=wait_s)
        thread = threading.Thread(
            target=self._run, args=(path, operation, work), name="kubelet-registration", daemon=True
        )
        self._threads = [thread for thread in self._threads if thread.is_alive()] + [thread]
        thread.start()

    def _run(self, path: Path, operation: Operation, work: Callable[[], None]) -> None:
        try:
            work()
        except (CallFailed, ValueError) as error:
            if not self._ended.is_set():
                self._history.add(RegistrationFailed(str(path), str(error)))
            with self._lock:
                operation.pending = False
                doubled_s = 2 * operation.wait_s or self._pace.backoff_first_s
                operation.wait_s = min(doubled_s, self._pace.backoff_limit_s)
                operation.not_before_s = time.monotonic() + operation.wait_s
        else:
            with self._lock:
                del self._operations[path]

    def _register(self, path: Path, identity: uuid.UUID) -> None:
        channel = open_channel(str(path), self._pace)
        try:
            self._register_over(channel, path, identity)
        finally:
            close_channel(channel)

    def _register_over(self, channel: grpc.Channel, path: Path, identity: uuid.UUID) -> None:
        try:
            self._calls.wait_ready(channel, self._pace.dial_s)
        except CallFailed as error:
            raise ValueError(
                f"RegisterPlugin error -- dial failed at socket {path}, err: failed to dial socket {path},"
                f" err: {error.details_text}"
            ) from error
        try:
            info = self._call(
                channel, "GetInfo", message_class(REGISTRATION, "InfoRequest")(), self._pace.get_info_s
            )
        except CallFailed as error:
            raise ValueError(
                "RegisterPlugin error -- failed to get plugin info using RPC GetInfo"
                f" at socket {path}, err: {error}"
            ) from error
        endpoint, services = info.endpoint or str(path), tuple(info.supported_versions)
        if info.type != "DRAPlugin":
            self._refuse(
                channel, path, f"no handler registered for plugin type: {info.type} at socket {path}"
            )
        try:
            self._handler.validate(info.name, endpoint, services)
        except ValueError as error:
            self._refuse(channel, path, f"plugin validation failed with err: {error}")
        try:
            self._handler.register(info.name, endpoint, services)
        except ValueError as error:
            reason = f"RegisterPlugin error -- plugin registration failed with err: {error}"
            self._notify(channel, reason)
            raise ValueError(reason) from None
        with self._lock:
            self._actual[path] = RegisteredPlugin(identity, info.name, endpoint)
        try:
            self._notify(channel, "")
        except CallFailed as error:
            self._unregister(path)
            raise ValueError(
                f"RegisterPlugin error -- failed to send registration status at socket {path}, err: {error}"
            ) from error
        self._history.add(Registered(info.name, endpoint, services))
        with self._lock:  # after the entry, so that a test that has seen this finds it
            if path in self._actual:
                self._notified[path] = self._actual[path]

    def _refuse(self, channel: grpc.Channel, path: Path, reason: str) -> None:
        """Notify the plugin. The kubelet's own error says that this failed, although it did not."""
        error = f"RegisterPlugin error -- {reason}"
        self._notify(channel, error)
        raise ValueError(f"RegisterPlugin error -- failed to send error at socket {path}, err: {error}")

    def _notify(self, channel: grpc.Channel, error: str) -> None:
        status = message_class(REGISTRATION, "RegistrationStatus")(plugin_registered=not error, error=error)
        self._call(channel, "NotifyRegistrationStatus", status, self._pace.notify_s)

    def _call(self, channel: grpc.Channel, method: str, request: object, timeout_s: float) -> object:
        return self._calls.call(channel, REGISTRATION, "Registration", method, request, timeout_s)

    def _unregister(self, path: Path) -> None:
        with self._lock:
            plugin = self._actual.pop(path, None)
            self._notified.pop(path, None)
        if plugin is not None:
            self._handler.deregister(plugin.driver, plugin.endpoint)
