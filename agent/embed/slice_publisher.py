"""Publisher of a driver's ResourceSlices, with the taints of its devices.

The kubelet deletes the slices when it starts, and when the driver has been unregistered for half a minute. A
watch shows deletions and changes by other clients at once; without the permission to watch, slices are
compared every minute.
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

from agent.embed.devices import SliceDevice, count_taints, is_up_to_date, plan_slices
from agent.embed.monitor import Monitor
from agent.errors import ApiError, ApiUnreachableError, ConfigError
from agent.model.health import Taints
from agent.model.json_values import JsonObject
from agent.serve.kube_api.api_server import DRA_GROUP, NOT_FOUND, ApiServer, metadata_of, path_of
from agent.serve.kube_api.object_watch import ObjectWatch, WatchEvent, WatchEventKind, retry_after_s
from agent.system.output import get_logger
from agent.system.threads.thread_start import DaemonThread
from agent.system.timing import random_fraction

SLICES: Final = "resourceslices"
COMPARE_S: Final = 60.0
"""Interval of comparisons of the slices where they may not be watched [s]."""
CONFLICT, INVALID = 409, 422
ATTEMPTS: Final = 4
"""Largest number of attempts to write ResourceSlices that others change at the same time."""
RETRY_S: Final = 1.0
"""First pause after a failed comparison, or after others have changed the slices [s].

Each further failure or change within CALM_S doubles the pause.
"""
RETRY_MAX_S: Final = 60.0
CALM_S: Final = 120.0
"""Time without a change of the slices by others after which the pause is RETRY_S again [s]."""
STOP_S: Final = 2.0
"""Default timeout for the end of the publisher's threads [s]."""

log = get_logger(__name__)


class SlicePublisher:
    """Publisher of a driver's ResourceSlices on one node, with the monitor's taints. Thread-safe.

    The Node object owns the slices. They remain when the driver ends, for example during an update; see
    :meth:`delete`. They are first published after the monitor's first report. ``with`` starts and stops the
    threads that repair slices which others deleted or changed.

    The role needs, in ``resource.k8s.io``, the verbs ``list``, ``watch``, ``create``, ``update`` and
    ``delete`` of ``resourceslices``, and ``get`` of ``nodes``.
    """

    def __init__(self, api: ApiServer, monitor: Monitor, devices: Sequence[SliceDevice] = ()) -> None:
        """Create a publisher, and set it as the monitor's taint callback. Called before the monitor's start.

        Args:
            api: Client of the API server.
            monitor: Monitor of the driver; it names the driver and the node, and retries failed calls of
                :meth:`publish`.
            devices: All devices of the driver.

        Raises:
            ConfigError: A device is given twice, or `api` is no ApiServer.
            RuntimeError: The monitor was started already.
        """
        if not isinstance(api, ApiServer):
            raise ConfigError(f"argument api: {api!r} is not a drahealth.ApiServer")
        self._api = api
        self._driver = monitor.driver
        self._node = monitor.node
        self._devices = self._check_devices(devices)
        self._selector = f"spec.driver={self._driver},spec.nodeName={self._node}"
        self._writing = threading.RLock()
        """Lock that is held while ResourceSlices are read and written."""
        self._taints: Taints | None = None
        """Newest taints of the devices; None: the monitor has no report yet."""
        self._deleted = False
        self._accepted: dict[str, tuple[JsonObject, JsonObject]] = {}
        """Spec that was last written for each ResourceSlice, and the spec that the API server stored for it.

        They differ: API servers drop fields of features that are off.
        """
        self._versions: dict[str, str] = {}
        """Resource version of each ResourceSlice as this publisher knows it."""
        self._for_old_server = False
        self._has_dropped_taints = False
        self._state = threading.Condition()
        self._due = False
        """True: the ResourceSlices must be compared with the wanted ones."""
        self._replaced = False  # True: the driver has replaced its devices, so no pause delays a comparison
        self._stopping = False
        self._threads: list[DaemonThread] = []
        self._watch: ObjectWatch | None = None
        monitor.on_taints(self.publish)

    # --- publishing -----------------------------------------------------------------------------------------

    def publish(self, taints: Taints) -> None:
        """Publish all devices with these taints; this is the monitor's taint callback.

        Up-to-date slices are not written.

        Blocks up to 10 s for the connect and for each read of its calls.

        Raises:
            ApiForbiddenError: The role lacks a verb.
            ApiError: The API server refuses a slice.
            ApiUnreachableError: The API server is unreachable; some slices may have been published.
            OSError: See :meth:`ApiServer.call`.
        """
        with self._writing:
            self._taints = taints
            self._publish()

    def set_devices(self, devices: Sequence[SliceDevice]) -> None:
        """Replace all devices; the publisher's thread updates the slices. Never blocks on the API server.

        Raises:
            ConfigError: A device is given twice.
        """
        self._devices = self._check_devices(devices)
        with self._state:
            self._replaced = True
            self._state.notify_all()

    def delete(self) -> None:
        """Delete all slices of the driver on this node, for a driver that leaves the node.

        Afterwards nothing is published any more.

        Blocks and raises like :meth:`publish`.
        """
        with self._writing:
            self._deleted = True
            for name in self._existing_slices():
                self._delete(name)

    def _publish(self) -> None:
        """Write the ResourceSlices that differ from the wanted ones.

        After a conflict, all slices are read again first.
        """
        for attempt in range(ATTEMPTS):
            try:
                self._write_changes()
            except ApiError as error:
                if attempt == ATTEMPTS - 1 or not self._prepare_repeat(error):
                    raise
            else:
                return

    def _prepare_repeat(self, error: ApiError) -> bool:
        """Return whether to repeat a failed write of slices at once, possibly with other contents."""
        if error.status == NOT_FOUND:  # deleted by others meanwhile, or the version is served no longer
            self._api.invalidate_dra_version()
            return True
        if error.status == INVALID and not self._for_old_server and "taints" in str(error):
            self._for_old_server = True
            log.warning(
                "driver %s: the API server refused a ResourceSlice: %s; published without taints of effect "
                "None and with at most 4 taints per device, as API servers before 1.35 need",
                self._driver,
                error,
            )
            return True
        return error.status == CONFLICT

    def _write_changes(self) -> None:
        if self._taints is None or self._deleted:
            return
        existing = self._existing_slices()
        specs = {name: self._effective_spec(name, obj["spec"]) for name, obj in existing.items()}
        wanted = plan_slices(
            self._devices,
            self._taints,
            specs,
            driver=self._driver,
            node=self._node,
            version=self._api.dra_version(),
            for_old_server=self._for_old_server,
        )
        for name, spec in wanted.items():
            found = existing.get(name)
            if found is None:
                self._write("POST", self._path(), {"name": name, "ownerReferences": [self._owner()]}, spec)
            elif not is_up_to_date(specs[name], spec):
                self._write("PUT", self._path(name), found["metadata"], spec)
        for name in existing.keys() - wanted.keys():
            self._delete(name)

    def _existing_slices(self) -> dict[str, dict[str, Any]]:
        """Return the driver's ResourceSlices of this node that exist, by name."""
        items = self._api.list_objects(self._path(), self._selector).items
        found = {item["metadata"]["name"]: item for item in items}
        self._versions = {name: item["metadata"]["resourceVersion"] for name, item in found.items()}
        return found

    def _effective_spec(self, name: str, found: JsonObject) -> JsonObject:
        """Return the spec of a ResourceSlice, for the comparison with the wanted spec.

        If the found spec is the last written spec without fields that the API server dropped, the result is
        the written spec with the found pool: another instance of the driver may have raised its generation.
        """
        written, resulting = self._accepted.get(name, ({}, {}))
        is_accepted = {**found, "pool": None} == {**resulting, "pool": None}
        return {**written, "pool": found.get("pool")} if is_accepted else found

    def _write(self, method: str, path: str, metadata: JsonObject, spec: JsonObject) -> None:
        obj = {
            "apiVersion": f"{DRA_GROUP}/{self._api.dra_version()}",
            "kind": "ResourceSlice",
            "metadata": metadata,
            "spec": spec,
        }
        result = self._api.call(method, path, obj)
        name = metadata_of(result)["name"]
        self._versions[name] = result["metadata"]["resourceVersion"]
        self._accepted[name] = (spec, result["spec"])
        if count_taints(result["spec"]) < count_taints(spec) and not self._has_dropped_taints:
            self._has_dropped_taints = True
            log.warning(
                "driver %s: the API server dropped the taints of ResourceSlice %s: its feature gate "
                "DRADeviceTaints is off; the scheduler does not avoid devices with faults",
                self._driver,
                name,
            )

    def _delete(self, name: str) -> None:
        try:
            self._api.call("DELETE", self._path(name))
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
        self._versions.pop(name, None)
        self._accepted.pop(name, None)

    def _owner(self) -> JsonObject:
        """Return the owner reference to the Node; Kubernetes deletes ResourceSlices with their Node."""
        node = metadata_of(self._api.call("GET", path_of("api", "v1", "nodes", self._node)))
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "name": node["name"],
            "uid": node["uid"],
            "controller": True,
        }

    def _path(self, *name: str) -> str:
        return self._api.dra_path(SLICES, *name)

    def _check_devices(self, devices: Sequence[SliceDevice]) -> tuple[SliceDevice, ...]:
        names = Counter((device.pool or self._node, device.name) for device in devices)
        for (pool, name), count in names.items():
            if count > 1:
                raise ConfigError(f"device {name!r} of pool {pool!r} is given {count} times; give it once")
        return tuple(devices)

    # --- repair ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads that repair the slices. Never blocks.

        Raises:
            RuntimeError: The publisher was started before, or the kernel started no further thread.
        """
        with self._state:
            if self._threads or self._stopping:
                raise RuntimeError(
                    f"slice publisher of {self._driver}: can be started only once; create another one"
                )
            self._threads = [
                DaemonThread(function, name)
                for name, function in (("dh-slices", self._repair), ("dh-slices-watch", self._follow))
            ]
            for thread in self._threads:  # within the lock: stop() must not find a thread before its start
                thread.start()

    def stop(self, timeout_s: float = STOP_S) -> bool:
        """Stop the threads; the slices remain. Blocks up to ``timeout_s``.

        Returns:
            True if the threads have ended; False: a call of the API server continues and is abandoned.
        """
        with self._state:
            threads = [thread for thread in self._threads if thread.ident is not None]  # others did not start
            self._stopping = True
            self._state.notify_all()
            if self._watch is not None:
                self._watch.close()
        end_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _request_comparison(self) -> None:
        with self._state:
            self._due = True
            self._state.notify_all()

    def _repair(self) -> None:
        """Repair the ResourceSlices whenever another thread requests it, until the publisher is stopped.

        The pauses between repairs grow while other clients change the slices.
        """
        pause_s, logged, last_s = RETRY_S, "", -CALM_S
        while True:
            with self._state:
                self._state.wait_for(lambda: self._due or self._replaced or self._stopping)
                if self._stopping:
                    return
                is_repair, self._due, self._replaced = not self._replaced, False, False
            if is_repair:
                began_s = time.monotonic()
                pause_s = RETRY_S if began_s - last_s > CALM_S else min(2 * pause_s, RETRY_MAX_S)
                last_s = began_s
            failure, asked_s = "", 0.0
            try:
                with self._writing:
                    self._publish()
            except (ApiError, ApiUnreachableError, OSError) as error:
                failure, asked_s = str(error), retry_after_s(error)
                self._request_comparison()
            except Exception:  # a bug here must not end the repair of ResourceSlices
                failure = "internal error"
                if failure != logged:
                    log.exception(
                        "driver %s: ResourceSlices not compared: %s; will retry", self._driver, failure
                    )
                logged = failure
                self._request_comparison()
            if failure and failure != logged:
                log.warning(
                    "driver %s: ResourceSlices not compared with the API server: %s; changes are not "
                    "published; will retry",
                    self._driver,
                    failure,
                )
            logged = failure
            with self._state:
                wait_s = max(asked_s, pause_s * (0.5 + random_fraction()))
                self._state.wait_for(lambda: self._replaced or self._stopping, wait_s)

    def _follow(self) -> None:
        """Watch the ResourceSlices until the publisher is stopped.

        After each change by another client, the method requests a comparison of the slices.
        """
        logged = ""
        while True:
            try:
                watch = self._api.watch(self._path(), self._selector)
                with self._state:
                    if self._stopping:
                        return
                    self._watch = watch
                for event in watch:
                    if event.kind is not WatchEventKind.LISTED:  # the list precedes the watch itself
                        logged = ""
                    if self._is_foreign(event):
                        self._request_comparison()
            except (ApiError, ApiUnreachableError, OSError) as error:
                if str(error) != logged:
                    log.warning(
                        "driver %s: ResourceSlices cannot be watched at the API server: %s; they are "
                        "compared with it every %g s",
                        self._driver,
                        error,
                        COMPARE_S,
                    )
                logged = str(error)
            except Exception:  # a bug here must not end the comparisons
                log.exception("driver %s: watch of ResourceSlices: internal error; will retry", self._driver)
            with self._state:
                if self._state.wait_for(lambda: self._stopping, COMPARE_S):
                    return
            self._request_comparison()

    def _is_foreign(self, event: WatchEvent) -> bool:
        """Return whether a watch event shows a state of a ResourceSlice that this publisher does not know.

        Such a state is the result of a change by another client.
        """
        with self._writing:
            names = {obj["metadata"]["name"]: obj["metadata"]["resourceVersion"] for obj in event.objects}
            if event.kind is WatchEventKind.DELETED:
                return bool(names.keys() & self._versions.keys())
            if event.kind is WatchEventKind.LISTED:
                return names != self._versions
            return not names.items() <= self._versions.items()
