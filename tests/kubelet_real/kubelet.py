"""The real kubelet with the interface of :class:`kubelet.FakeKubelet`.

Registration, connections, health streams, claims and events are the work of the kubelet's own code. The pod
workers are those of the fake kubelet, and the API server is ours. The durations are the kubelet's own, except
those of the pod workers. What the kubelet does is read from its log and its API requests.
"""

import base64
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import grpc
from go_driver.api_server import SLICES, ApiServer
from kubelet import FakeKubelet, Pace, Pod, PreparedDevice, ResourceHealth
from kubelet.calls import DRA_PACKAGES
from kubelet.claims import ClaimInfo
from kubelet.events import Event, EventStore
from kubelet.fake import KubeletProcess
from kubelet.health import DeviceHealth
from kubelet.history import (
    Called,
    Changed,
    Cleared,
    Connected,
    Deregistered,
    Disconnected,
    HealthChanged,
    History,
    NotificationDropped,
    PodsNotified,
    Registered,
    RegistrationFailed,
    SlicesWiped,
    StreamEnded,
    StreamOpened,
    StreamRefused,
    UnprepareFailed,
)
from kubelet.pace import NS
from kubelet.pods import PodRecord, Worker, WorkerContext
from kubelet.versions import HEALTH_V1ALPHA1, PLUGIN_SERVICES, plugin_service
from patience import PATIENCE_S
from wire.google import message_class

from kubelet_real.program import ProcessEndedError, Program

NODE: Final = "node-1"
PERIOD_S: Final = 60.0
"""The longest time between two actions of the kubelet: the search for claims whose pods are gone."""

# Texts of the kubelet's log.
BACKOFF: Final = re.compile(
    r'Operation for "(?P<socket>.*)" failed\. No retries permitted until .*\. Error: (?P<error>.*)', re.DOTALL
)
STATUS: Final = re.compile(r"rpc error: code = (\w+) desc = (.*)", re.DOTALL)


class RealKubelet(FakeKubelet):
    """The real kubelet. It runs inside a ``with`` block."""

    def __init__(self, root: Path, *, binary: Path, version: str, pace: Pace | None = None) -> None:
        """Args:
        root: The kubelet's directory, ``/var/lib/kubelet``.
        binary: The compiled program of that version.
        version: 1.36 or 1.37.
        pace: Only ``resync_s`` and ``unprepare_retry_s`` have an effect.
        """
        own, fast = Pace(), pace if pace is not None else Pace.fast()
        super().__init__(
            root,
            version=version,
            pace=replace(own, resync_s=fast.resync_s, unprepare_retry_s=fast.unprepare_retry_s),
        )
        self.binary = binary
        self.api = _Cluster(self.history, self.store)
        self.updates: list[tuple[int, Sequence[str]]] = []
        """Times when the DRA manager requested syncs, on the monotonic clock [ns], with UIDs of pods."""

    def start(self) -> None:
        """Start the API server if it does not run, and the kubelet."""
        self.api.open()
        super().start()

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self.api.close()

    def add_claim(self, condition: Mapping[str, Any]) -> None:
        """Add a ResourceClaim object to the API server."""
        super().add_claim(condition)
        self.api.add_claim(condition)

    def pass_time(self, seconds: float) -> None:
        """Wait, because the kubelet reads the time itself."""
        time.sleep(seconds)

    def wait_for(
        self, condition: Callable[[], Any], event: str, timeout_s: float = PATIENCE_S + PERIOD_S
    ) -> Any:
        """Wait as the fake kubelet does, and for the longest period of the real one in addition."""
        return super().wait_for(condition, event, timeout_s)

    def _new_process(self) -> KubeletProcess:
        return _RealProcess(self)


class _Cluster(ApiServer):
    """API server that records events and the deletion of ResourceSlices."""

    def __init__(self, history: History, store: EventStore) -> None:
        super().__init__(_decode)
        self._history = history
        self._store_events = store
        self._open = False

    def open(self) -> None:
        """Start the server once."""
        if not self._open:
            self.__enter__()
            self._open = True

    def close(self) -> None:
        """Stop the server if it runs."""
        if self._open:
            self.__exit__(None, None, None)

    def delete_all(self, path: str, selector: Mapping[str, str]) -> dict[str, Any]:
        if path == SLICES:
            self._history.add(SlicesWiped(selector.get("spec.driver", "")))
        return super().delete_all(path, selector)

    def _notify(self, kind: str, path: str, obj: dict[str, Any]) -> None:
        super()._notify(kind, path, obj)
        if "/events/" in path:
            now_ns = time.time_ns()
            pod, count = obj["involvedObject"]["uid"], obj["count"]
            self._store_events.write(path, Event(pod, obj["reason"], obj["message"], count, now_ns, now_ns))


def _decode(body: bytes) -> dict[str, Any]:
    return dict(json.loads(body)) if body else {}


class RealPlugin(NamedTuple):
    """A registered plugin."""

    driver: str
    endpoint: str
    advertised: tuple[str, ...]
    connected: bool

    @property
    def service(self) -> str:
        """The DRAPlugin service that the kubelet calls."""
        return plugin_service(self.advertised)


class _RealProcess:
    """One process of the real kubelet."""

    def __init__(self, kubelet: RealKubelet) -> None:
        self._kubelet = kubelet
        self._history = kubelet.history
        self._services: dict[tuple[str, str], tuple[str, ...]] = {}
        self._connected: set[tuple[str, str]] = set()
        self._ends: list[StreamEnded] = []
        self._watching = threading.Event()
        self._requests: dict[tuple[str, str], tuple[tuple[str, ...], float]] = {}
        """The claims of the newest request to an endpoint, and its time."""
        self._health = self._read_health()
        self._health_services: dict[tuple[str, str], str] = {}
        self.workers: dict[str, Worker] = {}
        self._all_workers: list[Worker] = []
        self._program = Program(
            kubelet.binary,
            kubelet.root,
            *("--node", NODE, "--server", kubelet.api.url, "--pods", ",".join(kubelet.pods)),
            on_event=self._on_event,
        )
        assert self._watching.wait(PATIENCE_S), "the kubelet does not watch its plugins"
        self._context = WorkerContext(
            preparer=self,
            recorder=self,
            history=kubelet.history,
            pace=kubelet.pace,
            resources=self._resources,
            on_gone=self._remove_pod,
        )
        for record in list(kubelet.pods.values()):
            self.start_worker(record)

    @property
    def plugins(self) -> Sequence[RealPlugin]:
        """The registered plugins."""
        return [
            RealPlugin(*key, services, key in self._connected) for key, services in self._services.items()
        ]

    @property
    def cache(self) -> Self:
        """The cache of device health: :meth:`get`."""
        return self

    @property
    def preparer(self) -> Self:
        """Prepares claims in the caller's thread: :meth:`prepare`, :meth:`unprepare`."""
        return self

    def notified_plugins(self) -> set[tuple[str, str]]:
        """Return the registered plugins: the kubelet keeps no others, and logs no notification."""
        return set(self._services)

    def start_worker(self, record: PodRecord) -> None:
        """Start the worker of a pod."""
        worker = Worker(record, self._context, self._kubelet.rng.randrange(1 << 30))
        self.workers[record.pod.uid] = worker
        self._all_workers.append(worker)

    def end(self, *, graceful: bool) -> None:
        """End the program and the workers."""
        for worker in self._all_workers:
            worker.end()
        self._program.end(graceful=graceful)
        for worker in self._all_workers:
            worker.join()

    # --- commands -----------------------------------------------------------------------------------------

    def get(self, driver: str, pool: str, device: str) -> DeviceHealth:
        """Return the current health of a device."""
        found = self._program.call("health", Driver=driver, Pool=pool, Device=device)
        received = datetime.fromisoformat(found["LastUpdated"])
        received_ns = round(received.timestamp() * NS) if found["Health"] != "Unknown" else 0
        lease_ns = found["HealthCheckTimeout"]
        return DeviceHealth(pool, device, found["Health"], received_ns, lease_ns, found["Message"])

    def claim_info(self, namespace: str, name: str) -> ClaimInfo | None:
        """Return the stored state of a claim, or None without one."""
        try:
            [found] = self._program.call(
                "claims", Pod=pod_object("", namespace, {name: name}, {"main": (name,)})
            )
        except ProcessEndedError:
            raise
        except ValueError:
            return None
        return claim_info(found)

    def prepare(self, pod: str, namespace: str, claims: Sequence[str]) -> None:
        """Prepare the claims of a pod."""
        active = [{"metadata": {"uid": uid}} for uid in {*self._kubelet.pods, pod}]
        given = pod_object(pod, namespace, {name: name for name in claims}, {})
        _run_without_prefix(
            "prepare dynamic resources: ", lambda: self._program.call("prepare", Pod=given, Pods=active)
        )

    def unprepare(self, pod: str, namespace: str, claims: Sequence[str]) -> None:
        """Unprepare the claims of a pod."""
        given = pod_object(pod, namespace, {name: name for name in claims}, {})
        _run_without_prefix(
            "unprepare dynamic resources: ", lambda: self._program.call("unprepare", Pod=given)
        )

    def warn(self, pod: str, reason: str, message: str) -> None:
        """Record a Warning event for a pod."""
        self._program.call("event", Pod=pod_object(pod, "default", {}, {}), Reason=reason, Message=message)

    def _resources(self, pod: Pod) -> dict[str, dict[str, tuple[ResourceHealth, ...]]]:
        try:
            given = pod_object(pod.uid, pod.namespace, pod.claims, pod.containers)
            statuses = self._program.call("status", Pod=given)
        except ProcessEndedError:  # the pod's worker ends too
            return {}
        return {name: found for name, found in resources_of(statuses).items() if pod.containers[name]}

    def _remove_pod(self, pod: str) -> None:
        self.workers.pop(pod, None)
        self._kubelet.pods.pop(pod, None)

    # --- reports ------------------------------------------------------------------------------------------

    def _on_event(self, report: Mapping[str, Any]) -> None:
        match report["event"]:
            case "registered":
                key, services = (report["driver"], report["endpoint"]), tuple(report["services"] or ())
                self._history.add(Registered(*key, services))  # before a test can see the plugin
                self._services[key] = services
            case "deregistered":
                self._services.pop((report["driver"], report["endpoint"]), None)
                self._history.add(Deregistered(report["driver"], report["endpoint"]))
            case "update":
                self._kubelet.updates.append((report["at_ns"], report["pods"]))
                for uid in report["pods"]:
                    if worker := self.workers.get(uid):
                        worker.wake()
            case "log":
                self._on_log(report["message"], report["values"], report.get("error") or "")

    def _on_log(self, message: str, values: Mapping[str, Any], error: str) -> None:
        add = self._history.add
        endpoint = (values.get("driverName", ""), values.get("endpoint", ""))
        driver = values.get("pluginName", "")
        match message:
            case "The desired_state_of_world populator (plugin watcher) starts":
                self._watching.set()
            case "Connection changed":
                (self._connected.add if values["connected"] else self._connected.discard)(endpoint)
                add((Connected if values["connected"] else Disconnected)(*endpoint))
            case "Starting WatchResources stream":
                self._health_services[endpoint] = values.get(
                    "healthService", HEALTH_V1ALPHA1
                )  # 1.36 has only that
            case "NodeWatchResources stream initiated successfully":
                add(StreamOpened(*endpoint, self._health_services[endpoint]))
            case "NodeWatchResources RPC call failed":
                add(StreamRefused(*endpoint))
            case "Error receiving from WatchResources stream":
                self._ends.append(StreamEnded(driver, "", *_status(error), True))
            case (
                "Stopping health monitoring due to context cancellation"
                | "Driver does not support WatchResources"
            ):
                self._ends.append(StreamEnded(driver, "", *_status(values["reason"]), False))
            case "Stream ended with EOF":
                self._ends.append(StreamEnded(driver, "", grpc.StatusCode.OK, "", False))
            case "WatchResources health stream has ended":  # after the cache was cleared
                ended = self._ends.pop(0)
                self._health.pop(ended.driver, None)
                add(Cleared(ended.driver))
                add(ended)
            case "Health info changed, checking affected pods":
                self._find_changes(driver)
                add(HealthChanged(driver, values["changedDevicesCount"]))
            case "Calling NodePrepareResources rpc" | "Calling NodeUnprepareResource rpc":
                # the request of an unprepare has the same fields
                request = _message("NodePrepareResourcesRequest", values["request"])
                self._requests[endpoint] = tuple(claim.uid for claim in request.claims), time.monotonic()
            case "Done calling NodePrepareResources rpc" | "Done calling NodeUnprepareResources rpc":
                method = message.split()[2]
                services = plugin_service(self._services.get(endpoint, PLUGIN_SERVICES))
                claims, start_s = self._requests[endpoint]
                took_s = time.monotonic() - start_s
                answer = _message(f"{method}Response", values["response"]) if values["response"] else None
                add(Called(method, *endpoint, services, claims, values["err"] or "", answer, took_s))
            case "Sending health update notification for pods":
                add(PodsNotified(frozenset(values["pods"])))
            case "DRA health update channel is full, discarding pod update notification":
                add(NotificationDropped(frozenset(values["pods"])))
            case "Unpreparing pod resources in reconcile loop failed, will retry":
                add(UnprepareFailed(values["podUID"], values["err"]))
            case _ if failed := BACKOFF.fullmatch(message):
                add(RegistrationFailed(failed["socket"], failed["error"]))

    def _find_changes(self, driver: str) -> None:
        """Record the devices that differ between the kubelet's health file and its previous content."""
        before, now = self._health, self._read_health()
        self._health = now
        for key, device in now.get(driver, {}).items():
            if device != before.get(driver, {}).get(key):
                self._history.add(Changed(driver, *key, device[0], device[1]))
        for pool, name in before.get(driver, {}).keys() - now.get(driver, {}).keys():
            self._history.add(Changed(driver, pool, name, "Unknown", ""))

    def _read_health(self) -> dict[str, dict[tuple[str, str], tuple[str, str, int]]]:
        """Read health, message and lease of each device, by driver, pool and name."""
        try:
            stored = json.loads((self._kubelet.root / "dra_health_state").read_bytes())
        except FileNotFoundError:
            return {}
        return {
            driver: {
                (device["PoolName"], device["DeviceName"]): (
                    device["Health"],
                    device["Message"],
                    device["HealthCheckTimeout"],
                )
                for device in kept["Devices"].values()
            }
            for driver, kept in stored.items()
        }


def _run_without_prefix(prefix: str, call: Callable[[], object]) -> None:
    """Run a command and raise its error without the prefix that the kubelet must give it."""
    try:
        call()
    except ProcessEndedError:
        raise
    except ValueError as error:
        text = str(error)
        raise ValueError(
            text.removeprefix(prefix) if text.startswith(prefix) else f"no prefix: {text}"
        ) from None


def _message(name: str, wire: str) -> Any:
    """Return a message of the DRAPlugin service that the kubelet logged."""
    return message_class(DRA_PACKAGES["v1.DRAPlugin"], name).FromString(base64.b64decode(wire))


def _status(text: str) -> tuple[grpc.StatusCode, str]:
    """Return the status of a gRPC error, by its text."""
    found = STATUS.fullmatch(text)
    if found is None:
        return grpc.StatusCode.UNKNOWN, text
    code = "CANCELLED" if found[1] == "Canceled" else re.sub(r"(?<!^)([A-Z])", r"_\1", found[1]).upper()
    return grpc.StatusCode[code], found[2]


def claim_info(kept: Mapping[str, Any]) -> ClaimInfo:
    """Return the state of a claim that the program reports."""
    drivers = {
        driver: list(map(_device, state["Devices"] or ())) for driver, state in kept["DriverState"].items()
    }
    pods = set(kept["PodUIDs"])
    return ClaimInfo(kept["Namespace"], kept["ClaimName"], kept["ClaimUID"], pods, drivers, kept["Prepared"])


def resources_of(
    statuses: Sequence[Mapping[str, Any]] | None,
) -> dict[str, dict[str, tuple[ResourceHealth, ...]]]:
    """Return the health in the container statuses that the program reports, by container and entry."""
    return {
        status["name"]: {
            entry["name"]: tuple(
                ResourceHealth(resource["resourceID"], resource["health"], resource.get("message", ""))
                for resource in entry["resources"]
            )
            for entry in status.get("allocatedResourcesStatus", ())
        }
        for status in statuses or ()
    }


def _device(kept: Mapping[str, Any]) -> PreparedDevice:
    return PreparedDevice(
        kept["PoolName"],
        kept["DeviceName"],
        tuple(kept["RequestNames"] or ()),
        tuple(kept["CDIDeviceIDs"] or ()),
        kept["ShareID"] or "",
    )


def pod_object(
    uid: str, namespace: str, claims: Mapping[str, str], containers: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Return a pod's object for the program."""
    uses = {
        name: [dict(zip(("name", "request"), use.split("/", 1), strict=False)) for use in used]
        for name, used in containers.items()
    }
    return {
        "metadata": {"namespace": namespace, "name": f"pod-{uid}", "uid": uid},
        "spec": {
            "resourceClaims": [{"name": name, "resourceClaimName": claim} for name, claim in claims.items()],
            "containers": [{"name": name, "resources": {"claims": used}} for name, used in uses.items()],
        },
    }
