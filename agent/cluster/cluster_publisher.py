"""Publisher of the devices' health to the API server, in a thread that no other part of the agent waits for.

The thread keeps the newest report only, and compares it with what the API server has: an API server that is
away for a day costs one attempt a minute, and gets the newest state once it is back. Only the agent that
holds the node's Lease object writes.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from agent.cluster.device_events import (
    UNDECIDED_S,
    EventObject,
    EventRecorder,
    SavedEvent,
    SentDeviceEvents,
    WantedEvent,
)
from agent.cluster.node_objects import (
    CONFLICT,
    RENEW_S,
    AgentLease,
    NodeCondition,
    UnknownDelay,
    active_maintenance,
    are_on_node,
    conditions_by_type,
    decide_conditions,
    load_identity,
    node_status_patch,
)
from agent.cluster.taint_rules import TaintRules
from agent.config.api_access import SERVICE_ACCOUNT, ApiAccess, pod_access
from agent.config.config import Config
from agent.devices.taints import TaintPolicy
from agent.errors import ApiError, ApiUnreachableError, ConfigError, ResourceBusyError
from agent.model.consumers import ConsumerMap
from agent.model.json_values import JsonObject
from agent.model.reading import Absence, unlisted_sources
from agent.model.report import ClusterStatus, Report, WrittenNodeCondition
from agent.model.time import NS, Instant
from agent.serve.kube_api.api_server import FORBIDDEN, NOT_FOUND, SERVER_WIDE, ApiServer, metadata_of, path_of
from agent.sources.kubectl_files import read_kubeconfig
from agent.store.state_files import write_and_rename
from agent.system.files import ReadError, may_exist, read_bounded
from agent.system.output import LogRateLimiter, get_logger
from agent.system.threads.thread_start import DaemonThread
from agent.system.timing import random_fraction, read_clocks

MANAGER: Final = "drahealth"
"""Name of the agent as field manager of objects in the API server, and as source of its events."""
DEFAULT_NAMESPACE: Final = "drahealth"
"""Namespace of the node's Lease if neither the configuration nor a service account names one."""
START_S: Final = 5.0
"""Largest random delay of the first call of the API server [s], as all agents may start together."""
DEBOUNCE_S: Final = 1.0
"""Delay after a changed report [s], so that several changes are written together."""
WRITE_S: Final = 10.0
"""Shortest time between two writes of the Node's conditions [s], also while a device flaps."""
RESYNC_S: Final = 600.0
"""Interval at which the agent verifies its objects in the API server although no report changed [s]:
other clients may have deleted them."""
RETRY_S: Final = 1.0
"""Pause after the first failed call of the API server, doubled after each further failure [s].
The pause is multiplied by a random number from 0.5 to 1.5."""
RETRY_MAX_S: Final = 60.0
"""Longest pause after failed calls of the API server, before the random factor [s]."""
EVENTS_S: Final = 10.0
"""Interval at which the agent writes due Kubernetes events although no report changed [s]: pods change."""
EVENTS_FILE: Final = "cluster-events.json"
"""Name of the file in the state directory with the events that a restart of the agent must not repeat."""
EVENTS_BYTES: Final = 4 << 20
"""Largest size of the events file that the agent reads [bytes]."""
LASTING: Final = frozenset({400, 413, 422})
"""HTTP statuses with which an event is given up: another attempt would get the same answer."""
LASTING_OF_POD: Final = frozenset({FORBIDDEN, NOT_FOUND})
"""Further such statuses of a pod's event: its namespace is being deleted, or has no quota left."""
RULES_S: Final = 5.0
"""Shortest time between two comparisons of the DeviceTaintRules with the report [s]."""
MAINTENANCE_S: Final = 60.0
"""Interval at which the Node is read while events wait for the end of its maintenance [s]."""

log = get_logger(__name__)


class TaskIntervals(NamedTuple):
    """Times from one run of a task at the API server to its next run."""

    idle_s: float
    """Time to the next run of the task if no report changes [s]."""
    changed_s: float = 0.0
    """Time to the next run of the task if a report changes [s]; at most ``idle_s``."""


class _ClusterTask:
    """Task at the API server with its own retries: if one task lacks a permission, the others still run."""

    def __init__(self, name: str, run: Callable[[Instant], TaskIntervals]) -> None:
        self.name = name
        self.run = run
        self.failures = 0
        self.error = ""
        """Error of the last run; empty: it succeeded, or had nothing to do."""
        self.logged = ""
        """Error of the last run that called the API server; empty: it succeeded."""
        self.due_ns = 0
        self.earliest_ns = 0
        """Time before which a changed report does not run the task [ns]."""


class ClusterPublisher:
    """Publisher of one node's health, with a thread. Thread-safe, except :meth:`step`."""

    def __init__(
        self,
        config: Config,
        api: ApiServer,
        *,
        namespace: str,
        identity: str,
        consumer_map: Callable[[], ConsumerMap | None] = lambda: None,
        clock: Callable[[], Instant] = read_clocks,
        jitter: Callable[[], float] = random_fraction,
    ) -> None:
        """Create the publisher; nothing is called yet.

        Args:
            config: Configuration of the agent.
            api: Client of the API server, for this publisher alone.
            namespace: Namespace of the node's Lease.
            identity: Identity of this agent; see :func:`load_identity`.
            consumer_map: Returns which pods use which devices; None: not known yet.
            clock: Returns the current time.
            jitter: Returns a random number from 0 to 1.
        """
        self._config = config
        self._api = api
        self._consumer_map = consumer_map
        self._clock = clock
        self._jitter = jitter
        self._node = config.node_name
        self._node_path = path_of("api", "v1", "nodes", self._node)
        self._lease = AgentLease(api, node=self._node, namespace=namespace, identity=identity)
        self._changed = threading.Condition()
        # --- guarded by the condition ---
        self._report: Report | None = None
        self._seen: object = None
        self._is_changed = False
        self._stopping = False
        # --- used by the thread only ---
        self._lease_task = _ClusterTask("lease", self._renew_lease)
        self._tasks = (
            self._lease_task,
            _ClusterTask("conditions", self._apply_conditions),
            _ClusterTask("events", self._record_events),
            _ClusterTask("taint rules", self._sync_taint_rules),
        )
        self._taint_rules = TaintRules(api, self._node, MANAGER, self._ensure_lease)
        self._rules_listed_ns: int | None = None
        self._compare_node_ns = 0
        """Time of the next comparison of unchanged conditions with the Node [ns]."""
        self._events = SentDeviceEvents()
        self._events_path = config.state_dir / EVENTS_FILE
        self._events.restore(_load_events(self._events_path), clock())
        self._first_held_ns = float("inf")
        """Time at which this agent held the Lease for the first time [ns]; infinite: it has not held it."""
        self._recorder = EventRecorder(api, self._node)
        self._unsaved = LogRateLimiter(lambda: clock().mono_ns / NS)
        self._lost_events = LogRateLimiter(lambda: clock().mono_ns / NS)
        self._node_conditions: Mapping[str, JsonObject] = {}
        self._unknown_delay = UnknownDelay()
        self._node_uid = ""
        self._node_is_fresh = False
        """True: the Node was read in this step."""
        self._failed_calls = 0
        self._success_wall_s: float | None = None
        self._status = self._new_status()
        self._thread = DaemonThread(self._run, "dh-cluster")

    # --- called by the core ---------------------------------------------------------------------------------

    @property
    def status(self) -> ClusterStatus:
        """State of the publisher after the last run of its tasks. Never blocks."""
        return self._status

    def handle_report(self, report: Report) -> None:
        """Store a published report; changed devices or unlisted sources wake the thread. Never blocks."""
        if report.starting:
            return
        seen = (
            unlisted_sources(report.sources),
            report.declaring,
            [
                (device.key, device.health, device.severity, [cause.code for cause in device.causes])
                for device in report.devices
            ],
        )
        with self._changed:
            self._report = report
            if seen != self._seen:
                self._seen = seen
                self._mark_changed()

    def reconfigure(self, config: Config) -> None:
        """Apply a reloaded configuration. Never blocks."""
        with self._changed:
            self._config = config
            self._mark_changed()

    def start(self) -> None:
        """Start the publisher's thread."""
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Stop the publisher's thread. Blocks up to ``timeout_s``.

        The conditions stay on the Node, so that an update of the agent changes nothing.

        Returns:
            True if the thread has ended; False: a call of the API server continues and is abandoned.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _mark_changed(self) -> None:
        self._is_changed = True
        self._changed.notify_all()

    # --- thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = START_S * self._jitter()
        with self._changed:
            self._changed.wait_for(lambda: self._stopping, pause_s)
        while True:
            pause_s = self.step()
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._is_changed, pause_s)
                if not self._stopping and self._is_changed:
                    self._changed.wait_for(lambda: self._stopping, DEBOUNCE_S)
                if self._stopping:
                    return

    def step(self) -> float:
        """Run the tasks at the API server that are due; return the time until the next is due [s].
        Called by the publisher's thread or by a test. Blocks up to 10 s for each connect and each read."""
        with self._changed:
            is_changed, self._is_changed = self._is_changed, False
        self._node_is_fresh = False
        if is_changed:
            self._run_tasks_soon()
        for task in self._tasks:
            now = self._clock()
            if self._stopping:
                break
            if self._may_run(task, now) and task.due_ns <= now.mono_ns:
                self._run_task(task, now)
        self._status = self._new_status()
        now = self._clock()
        due_ns = min(task.due_ns for task in self._tasks if self._may_run(task, now))
        return max(0.0, (due_ns - now.mono_ns) / NS)

    def _may_run(self, task: _ClusterTask, now: Instant) -> bool:
        return task is self._lease_task or self._lease.is_held(now)

    def _ensure_lease(self) -> bool:
        """Renew the Lease if that is due; return whether a task may write a further object now.

        A task can have many objects to write, to an API server that answers slowly.
        """
        now = self._clock()
        if self._lease_task.due_ns <= now.mono_ns:
            self._run_task(self._lease_task, now)
            self._status = self._new_status()
        return self._lease.is_held(now) and not self._stopping

    def _run_task(self, task: _ClusterTask, now: Instant) -> None:
        pause, failure, asked_s = TaskIntervals(0.0), "", 0.0
        requests = self._api.requests
        try:
            pause = task.run(now)
        except ApiError as error:
            failure, asked_s = str(error), error.retry_after_s or 0.0
        except (ApiUnreachableError, OSError) as error:
            failure = str(error)
        except Exception:  # a bug here must end neither the thread nor the agent
            failure = "internal error"
            if failure != task.logged:
                log.exception("cluster: task %s: internal error; will retry", task.name)
        task.error = failure
        if failure:
            pause = self._handle_failure(task, failure, asked_s)
        elif self._api.requests > requests:
            if task.logged:
                log.info("cluster: task %s: succeeded after %d failures", task.name, task.failures)
            task.failures, task.logged = 0, ""
            self._success_wall_s = now.wall_s
        task.due_ns = now.mono_ns + round(pause.idle_s * NS)
        task.earliest_ns = now.mono_ns + round(pause.changed_s * NS)

    def _handle_failure(self, task: _ClusterTask, failure: str, asked_s: float) -> TaskIntervals:
        pause_s = min(RETRY_S * 2 ** min(task.failures, 10), RETRY_MAX_S) * (0.5 + self._jitter())
        task.failures += 1
        self._failed_calls += 1
        if failure != task.logged:
            log.warning("cluster: task %s: failed: %s; will retry", task.name, failure)
            task.logged = failure
        pause_s = max(pause_s, min(asked_s, RESYNC_S))
        return TaskIntervals(pause_s, pause_s)

    def _new_status(self) -> ClusterStatus:
        now = self._clock()
        failing = [task for task in self._tasks if task.error]
        return ClusterStatus(
            lease=f"{self._lease.namespace}/{self._lease.name}",
            holder=self._lease.holder,
            is_held=self._lease.is_held(now),
            requests=self._api.requests,
            failures=self._failed_calls,
            error=f"{failing[0].name}: {failing[0].error}" if failing else "",
            success_wall_s=self._success_wall_s,
            conditions=tuple(
                WrittenNodeCondition(name, str(entry.get("status")), str(entry.get("reason")))
                for name, entry in sorted(self._node_conditions.items())
                if name.startswith("DRA")
            ),
            maintenance=active_maintenance(self._node_conditions),
            events=self._recorder.sent,
            taint_rules=self._taint_rules.count,
        )

    # --- tasks ----------------------------------------------------------------------------------------------

    def _renew_lease(self, now: Instant) -> TaskIntervals:
        report = self._report
        if report is None:  # the Lease shows that an agent evaluates the devices, and not only runs
            return TaskIntervals(RETRY_S)
        if not self._node_uid:
            self._read_node()
        drivers = (file.driver for file in report.declarations)
        if (declaring := self._undeclared(report, now).union(drivers)) != self._lease.declaring:
            self._lease.declaring = declaring
            self._run_tasks_soon()
        was_held = self._lease.is_held(now)
        if self._lease.renew(now, self._read_owner) and not was_held:  # others may have written meanwhile
            self._first_held_ns = min(self._first_held_ns, now.mono_ns)
            self._compare_all()
        return TaskIntervals(RENEW_S)

    def _read_owner(self) -> JsonObject:
        """Read the Node, and return the owner reference to it for a new Lease.

        The Node is read, because a missing Lease can mean that the Node was deleted and created again.
        """
        self._read_node()
        return self._node_owner()

    def _node_owner(self) -> JsonObject:
        """Return the owner reference to the Node; Kubernetes deletes the agent's objects with their Node."""
        return {"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": self._node_uid}

    def _undeclared(self, report: Report, now: Instant) -> frozenset[str]:
        """Return the drivers of the agent's former run that may not have declared their devices again yet.

        UNDECIDED_S after this agent first held the Lease, such a driver counts as one that declares no more
        devices. Before that, the API server may be away, and the kubelet cannot start the driver's pod.
        """
        if now.mono_ns - self._first_held_ns >= UNDECIDED_S * NS:
            return frozenset()
        return self._lease.declaring.difference(report.declaring)

    def _compare_all(self) -> None:
        """Make all tasks compare their objects with those in the API server as soon as the tasks may run."""
        self._rules_listed_ns, self._compare_node_ns = None, 0
        self._run_tasks_soon()

    def _run_tasks_soon(self) -> None:
        for task in self._tasks[1:]:
            task.due_ns = min(task.due_ns, task.earliest_ns)

    def _apply_conditions(self, now: Instant) -> TaskIntervals:
        report, config = self._report, self._config
        if report is None:
            return TaskIntervals(RESYNC_S)
        wanted, due_s = self._wanted_conditions(report, config, now)
        if now.mono_ns < self._compare_node_ns and are_on_node(wanted, self._node_conditions):
            return TaskIntervals(_shorter_pause((self._compare_node_ns - now.mono_ns) / NS, due_s))
        self._read_node()
        wanted, due_s = self._wanted_conditions(report, config, now)
        resync_s = RESYNC_S * (0.9 + 0.2 * self._jitter())
        self._compare_node_ns = now.mono_ns + round(resync_s * NS)
        if are_on_node(wanted, self._node_conditions):
            return TaskIntervals(_shorter_pause(resync_s, due_s))
        body = node_status_patch(wanted, self._node_conditions, self._node, now.wall_s)
        path = f"{self._node_path}/status"
        if not self._ensure_lease():  # the Node may have been read for as long as the Lease lasts
            return TaskIntervals(0.0)
        try:
            node = self._api.apply(path, body, manager=MANAGER)
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            log.warning("cluster: conditions of Node %s: %s; taken over from that manager", self._node, error)
            if not self._ensure_lease():
                return TaskIntervals(0.0)
            node = self._api.apply(path, body, manager=MANAGER, force=True)
        self._store_node(node)
        return TaskIntervals(_shorter_pause(resync_s, due_s), WRITE_S)

    def _wanted_conditions(
        self, report: Report, config: Config, now: Instant
    ) -> tuple[tuple[NodeCondition, ...], float | None]:
        undeclared = self._undeclared(report, now)
        decided = decide_conditions(report, config.k8s_condition_kinds, self._node_conditions, undeclared)
        return self._unknown_delay.delay_unknown(decided, self._node_conditions, now.mono_ns)

    def _record_events(self, now: Instant) -> TaskIntervals:
        report, config = self._report, self._config
        if report is None or not config.k8s_events:
            return TaskIntervals(EVENTS_S)
        node = EventObject("Node", self._node, self._node_uid)
        wanted = self._events.due(report, self._consumer_map(), config.drivers, node, now)
        due = [candidate for candidate in wanted if self._recorder.may_record(candidate.event.object, now)]
        if not due:
            return TaskIntervals(EVENTS_S)
        self._read_node()
        if active_maintenance(self._node_conditions):
            return TaskIntervals(MAINTENANCE_S, MAINTENANCE_S)
        try:
            self._write_events(due, now)
        finally:
            self._save_events(now)
        return TaskIntervals(EVENTS_S)

    def _write_events(self, due: Iterable[WantedEvent], now: Instant) -> None:
        """Write the events that the limits allow. The refusal of one object's event stops no other event.

        Raises:
            ApiError: The first refusal of an event that another attempt may write.
            ApiUnreachableError, OSError: See :meth:`ApiServer.call`.
        """
        refusals: dict[str, ApiError] = {}
        for key, event in due:
            obj = event.object
            if not self._ensure_lease():
                break
            if obj.namespace in refusals or not self._recorder.may_record(obj, now):
                continue  # stays due: events of other objects may still be allowed
            try:
                self._recorder.record(event, now)
            except ApiError as error:
                if error.status in LASTING or (obj.kind == "Pod" and error.status in LASTING_OF_POD):
                    self._log_lost_event(obj, error)
                elif error.status in SERVER_WIDE or error.status == FORBIDDEN:
                    raise
                else:  # such as a webhook of the namespace
                    refusals[obj.namespace] = error
                    continue
            self._events.mark_sent(key, now)
        for refusal in refusals.values():
            raise refusal

    def _save_events(self, now: Instant) -> None:
        path, data = self._events_path, msgspec.json.encode(self._events.events_to_save(now))
        try:
            write_and_rename(path, data, temporary=path.with_name(f".{path.name}.new"), mode=0o600)
        except OSError as error:
            if self._unsaved.tick():
                log.warning(
                    "cluster: file of sent events %s: not written: %s; a restart repeats events",
                    path,
                    error.strerror,
                )

    def _sync_taint_rules(self, now: Instant) -> TaskIntervals:
        report, config = self._report, self._config
        if self._rules_listed_ns is None or not config.k8s_taint_rules:  # the Lease was lost, or no rules
            self._taint_rules.invalidate_taints()
        if report is None or not (config.k8s_taint_rules or self._taint_rules.count):
            return TaskIntervals(RESYNC_S)
        if self._rules_listed_ns is None or now.mono_ns - self._rules_listed_ns >= RESYNC_S * NS:
            self._taint_rules.invalidate_rules()
            self._rules_listed_ns = now.mono_ns
        evict, quiet_s = config.taint_evict, config.taint_quiet_s
        # a DeviceTaintRule never has the effect None
        policy = TaintPolicy(evict=evict, quiet_s=quiet_s, report_unknown=False, inform=False)
        due_s = self._taint_rules.sync(
            report,
            config.k8s_taint_rules,
            config.drivers,
            policy,
            now,
            owner=self._node_owner(),
            undeclared=self._undeclared(report, now),
        )
        pause_s = RESYNC_S if due_s is None else min(max(due_s, RULES_S), RESYNC_S)
        return TaskIntervals(pause_s, min(pause_s, RULES_S))

    def _log_lost_event(self, obj: EventObject, error: ApiError) -> None:
        if count := self._lost_events.tick():
            log.warning(
                "cluster: event of %s %s not written: %s; %d such events are lost",
                obj.kind.lower(),
                f"{obj.namespace}/{obj.name}".lstrip("/"),
                error,
                count,
            )

    def _read_node(self) -> None:
        """Read the Node object, unless it was read in this :meth:`step`.

        Raises the errors of :meth:`ApiServer.call`.
        """
        if not self._node_is_fresh:
            self._store_node(self._api.call("GET", self._node_path))

    def _store_node(self, node: dict[str, Any]) -> None:
        before, self._node_uid = self._node_uid, str(metadata_of(node).get("uid", ""))
        if before not in {"", self._node_uid}:
            log.info("cluster: Node %s: was deleted and created again; all objects are compared", self._node)
            self._compare_all()
        self._node_conditions = conditions_by_type(node)
        self._node_is_fresh = True


def _shorter_pause(pause_s: float, due_s: float | None) -> float:
    return pause_s if due_s is None else min(pause_s, due_s)


def _load_events(path: Path) -> list[SavedEvent]:
    """Return the events of the agent's former run; none if the file is missing or unusable.

    Without the file, the agent repeats the events of lasting faults after its restart.
    """
    try:
        return msgspec.json.decode(read_bounded(path, EVENTS_BYTES).data, type=list[SavedEvent])
    except (ReadError, ValueError, RecursionError) as error:  # msgspec raises UnicodeDecodeError, too
        if not (isinstance(error, ReadError) and error.absence is Absence.ABSENT):
            log.warning(
                "cluster: events of the former run: %s: %s; events of lasting faults are sent again",
                path,
                error.reason if isinstance(error, ReadError) else error,
            )
        return []


def open_cluster_publisher(
    config: Config, consumer_map: Callable[[], ConsumerMap | None] = lambda: None
) -> ClusterPublisher:
    """Create the publisher to the API server, for ``k8s.enabled``. Blocks on the disk.

    Args:
        config: Configuration of the agent.
        consumer_map: Returns which pods use which devices; None: not known yet.

    Raises:
        ConfigError: No access to an API server is configured, or it cannot be used.
        ResourceBusyError: The kubeconfig does not exist yet.
        PermissionDeniedError: This user may not read the kubeconfig.
    """
    api = ApiServer(_api_access(config))
    namespace = config.k8s_namespace or _pod_namespace() or DEFAULT_NAMESPACE
    identity = load_identity(config.state_dir, config.node_name)
    return ClusterPublisher(config, api, namespace=namespace, identity=identity, consumer_map=consumer_map)


def _api_access(config: Config) -> ApiAccess:
    """Return address and credentials of the API server, from a kubeconfig or the pod's service account.
    A user's own kubeconfig is not a default: it may have more rights than the agent needs."""
    if (file := config.k8s_kubeconfig) is not None:
        if not may_exist(file):  # the node may join its cluster later: systemd has to start the agent again
            raise ResourceBusyError(f"k8s.kubeconfig: file {file} does not exist yet; create it")
        return read_kubeconfig(file)
    if (access := pod_access()) is not None:
        return access
    raise ConfigError(
        "true, but no API server is configured: not in a pod (KUBERNETES_SERVICE_HOST is not set); "
        "set k8s.kubeconfig",
        key="k8s.enabled",
    )


def _pod_namespace() -> str:
    """Return the namespace of the pod; empty: not in a pod."""
    try:
        return read_bounded(SERVICE_ACCOUNT / "namespace", 253).data.decode("ascii", "replace").strip()
    except ReadError:
        return ""
