"""The health streams: one for each endpoint, opened again when it ends, and the effect of their messages.

It follows kubelet ``cm/dra/plugin/dra_plugin_manager.go`` and ``cm/dra/manager.go``.
"""

import queue
import threading
from typing import Any, Final

import grpc
from wire.google import message_class

from kubelet.claims import ClaimInfos
from kubelet.health import DeviceHealth, HealthCache, message_in_status, read_device
from kubelet.history import (
    Changed,
    Cleared,
    HealthChanged,
    History,
    Message,
    NotificationDropped,
    PodsNotified,
    StreamEnded,
    StreamOpened,
    StreamRefused,
)
from kubelet.pace import Pace
from kubelet.plugins import Plugin
from kubelet.versions import Version

NOTIFICATIONS: Final = 100


class HealthManager:
    """Manager that stores health lists in the cache and queues the affected pods for a sync."""

    def __init__(self, cache: HealthCache, claims: ClaimInfos, version: Version, history: History) -> None:
        self._cache = cache
        self._claims = claims
        self._version = version
        self._history = history
        self.crashed = False
        """The process was killed, so the end of a stream has no effect."""
        self.updates: queue.Queue[frozenset[str] | None] = queue.Queue(NOTIFICATIONS)
        """The uids of pods whose devices changed. Entries beyond the queue's size are dropped."""

    def update(self, driver: str, message: Any) -> None:
        """Store a health list and notify pods."""

        def record(changed: list[DeviceHealth]) -> None:
            for device in changed:
                text = message_in_status(device.message)
                self._history.add(Changed(driver, device.pool, device.device, device.health, text))
            self._history.add(HealthChanged(driver, len(changed)))

        # recorded before a test can see the new health
        devices = [read_device(entry, self._version) for entry in message.devices]
        changed = self._cache.update(driver, devices, record)
        names = {(device.pool, device.device) for device in changed}
        with self._claims.lock_infos() as infos:
            pods = frozenset(
                pod
                for info in infos.values()
                if any((device.pool, device.device) in names for device in info.drivers.get(driver, []))
                for pod in info.pods
            )
        if not pods:
            return
        try:
            self.updates.put_nowait(pods)
        except queue.Full:
            self._history.add(NotificationDropped(pods))
        else:
            self._history.add(PodsNotified(pods))

    def clear(self, driver: str) -> None:
        """Clear a driver's health after one of its streams has ended."""
        if not self.crashed:
            self._cache.clear(driver, lambda: self._history.add(Cleared(driver)))


class HealthStream:
    """Health stream of one endpoint, which a thread of its own reads."""

    def __init__(
        self,
        plugin: Plugin,
        service: str,
        manager: HealthManager,
        version: Version,
        pace: Pace,
        history: History,
    ) -> None:
        self.plugin = plugin
        self._service = service
        self._manager = manager
        self._version = version
        self._pace = pace
        self._history = history
        self._lock = threading.Lock()
        self._call: Any = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubelet-health", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Cancel the stream for good."""
        with self._lock:
            self._stopped.set()
            if self._call is not None:
                self._call.cancel()

    def join(self) -> None:
        """Wait until the stream has ended after :meth:`stop`."""
        self._thread.join()

    def _run(self) -> None:
        retry = True
        while retry and not self._stopped.is_set():
            retry = self._run_once()
            if retry:
                self._stopped.wait(self._pace.stream_retry_s)

    def _run_once(self) -> bool:
        """Open the stream and read it to its end. Returns whether to open it again."""
        plugin = self.plugin
        if not plugin.wait_usable():
            if not self._stopped.is_set():
                self._history.add(StreamRefused(plugin.driver, plugin.endpoint))
            return True
        package, _, service = self._service.partition(".")
        request = message_class(package, "NodeWatchResourcesRequest")
        response = message_class(package, "NodeWatchResourcesResponse")
        with self._lock:
            if self._stopped.is_set():
                return False
            try:
                self._call = plugin.channel.unary_stream(
                    f"/{package}.{service}/NodeWatchResources",
                    request_serializer=request.SerializeToString,
                    response_deserializer=response.FromString,
                )(request())
            except ValueError:  # grpcio raises it for a closed channel
                return False
            self._history.add(StreamOpened(plugin.driver, plugin.endpoint, self._service))
        code, details = grpc.StatusCode.OK, ""
        try:
            for message in self._call:
                self._history.add(Message(plugin.driver, plugin.endpoint, tuple(message.devices)))
                self._manager.update(plugin.driver, message)
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
        finally:
            self._manager.clear(plugin.driver)
        over = code is grpc.StatusCode.UNIMPLEMENTED and self._version.unimplemented_ends
        logged = not over and code is not grpc.StatusCode.OK
        self._history.add(StreamEnded(plugin.driver, plugin.endpoint, code, details, logged))
        return not over
