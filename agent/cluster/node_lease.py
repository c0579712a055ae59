"""Kubernetes Lease of a node: only the agent that holds it writes the node's health to the API server.

The Lease is also the sign that the agent lives, since the conditions of a Node have no heartbeat. All
durations are on the monotonic clock: the times in a Lease come from clocks of other machines.
"""

import hashlib
import logging
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from agent.errors import ApiError
from agent.model.json_values import JsonObject
from agent.model.time import NS, Instant
from agent.serve.kube_api.api_server import NOT_FOUND, ApiServer, metadata_of, path_of
from agent.store.state_files import StateWriteError, write_and_rename
from agent.system.files import ReadError, read_bounded

RENEW_S: Final = 10.0
"""Interval of renewals of the node's Lease [s], the same as that of the kubelet's own Lease."""
DURATION_S: Final = 40
"""Time after the last renewal of the Lease from which another agent may take it [s]."""
HELD_S: Final = 30
"""Time after the last renewal for which the agent itself counts the Lease as held [s]. A request that begins
then ends before another agent may take the Lease."""
DURATION_MAX_S: Final = 600
"""Longest duration that is respected in the Lease of another agent [s]."""
CONFLICT: Final = 409
NAME_CHARS: Final = 253
IDENTITY_FILE: Final = "cluster-writer"
"""File in the state directory with the agent's identity as holder of the Lease.

The directory belongs to one agent at a time, so that an agent after a restart holds the Lease at once.
"""

log = logging.getLogger(__name__)


def load_identity(state_dir: Path, node: str) -> str:
    """Return the identity of the agent that owns a state directory; a new one without a usable file.

    Blocks on the disk. Without a file that can be written, the identity lasts until the agent ends.
    """
    path = state_dir / IDENTITY_FILE
    try:
        text = read_bounded(path, 128).data.decode("ascii").strip()
        return f"{node}_{uuid.UUID(text)}"
    except (ReadError, ValueError):
        made = uuid.uuid4()
    data = f"{made}\n".encode()
    try:
        write_and_rename(path, data, temporary=path.with_name(f".{path.name}.new"), mode=0o600)
    except (OSError, StateWriteError) as error:
        log.warning(
            "cluster: lease holder file %s: not written: %s; after a restart the agent waits until the "
            "Lease that it holds now has expired",
            path,
            error,
        )
    return f"{node}_{made}"


def lease_name(node: str) -> str:
    """Return the name of a node's Lease: ``drahealth-<node>``; for a long name its beginning and a hash."""
    name = f"drahealth-{node}"
    if len(name) <= NAME_CHARS:
        return name
    digest = hashlib.sha256(node.encode()).hexdigest()[:16]
    return f"{name[: NAME_CHARS - 17].rstrip('-.')}-{digest}"


class NodeLease:
    """Kubernetes Lease of one node, renewed or acquired by :meth:`renew`. For one thread."""

    def __init__(self, api: ApiServer, *, node: str, namespace: str, identity: str) -> None:
        """Create the client of the Lease; the API server is not called yet.

        ``identity`` is that of this agent.
        """
        self.name = lease_name(node)
        self.namespace = namespace
        self.holder = ""
        """Identity of the Lease's holder in the last answer; empty: not known, or it has none."""
        self._api = api
        self._identity = identity
        self._collection = path_of("apis", "coordination.k8s.io", "v1", "namespaces", namespace, "leases")
        self._object: dict[str, Any] | None = None
        """Lease object as this agent has last written it; None: not known, or another agent holds it."""
        self._held_until_ns = 0
        self._observed: tuple[object, ...] = ()
        """Holder, renewal time and resource version of another agent's Lease, when they last changed."""
        self._observed_ns = 0

    def is_held(self, now: Instant) -> bool:
        """Return whether this agent holds the node's Lease now."""
        return now.mono_ns < self._held_until_ns

    def renew(self, now: Instant, read_owner: Callable[[], JsonObject]) -> bool:
        """Renew the Lease, or take it if it is free or expired; return whether this agent holds it.

        Args:
            now: Current time.
            read_owner: Returns the owner reference to the Node, with which a new Lease is deleted;
                raises the errors of the API server.

        Raises:
            ApiError, ApiUnreachableError, OSError: See :meth:`ApiServer.call`.
        """
        known, self._object = self._object, None  # after a failure, the Lease is read again
        if known is not None and self._try_write(known, now):
            return True
        found = self._read()
        if found is None:
            return self._try_create(now, read_owner())
        holder = str(self._spec(found).get("holderIdentity") or "")
        if holder in {"", self._identity} or self._has_expired(found, now):
            if self._try_write(found, now):
                return True
            holder = ""  # another agent was faster; the next renewal reads who
        self._note_holder(holder)
        self._held_until_ns = 0
        return False

    def _read(self) -> dict[str, Any] | None:
        try:
            found = self._api.call("GET", f"{self._collection}{path_of(self.name)}")
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return None
        metadata_of(found)
        return found

    def _try_create(self, now: Instant, owner: JsonObject) -> bool:
        metadata = {"name": self.name, "ownerReferences": [owner]}
        return self._send("POST", self._collection, {"metadata": metadata}, now)

    def _try_write(self, found: dict[str, Any], now: Instant) -> bool:
        return self._send("PUT", f"{self._collection}{path_of(self.name)}", found, now)

    def _send(self, method: str, path: str, found: dict[str, Any], now: Instant) -> bool:
        """Write the Lease with this agent as its holder; False: it was changed or deleted meanwhile."""
        before = self._spec(found)
        is_new_holder = before.get("holderIdentity") != self._identity
        stamp = datetime.fromtimestamp(now.wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        transitions = before.get("leaseTransitions")
        transitions = transitions if isinstance(transitions, int) else 0
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": DURATION_S,
            "acquireTime": stamp if is_new_holder else before.get("acquireTime") or stamp,
            "renewTime": stamp,
            "leaseTransitions": transitions + (is_new_holder and method == "PUT"),
        }
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": spec}
        try:
            written = self._api.call(method, path, body | {"metadata": found["metadata"]})
        except ApiError as error:
            if error.status in {CONFLICT, NOT_FOUND} and not (method == "POST" and error.status == NOT_FOUND):
                return False
            raise
        metadata_of(written)
        self._object = written
        self._held_until_ns = now.mono_ns + HELD_S * NS
        self._note_holder(self._identity)
        return True

    def _has_expired(self, found: dict[str, Any], now: Instant) -> bool:
        """Return whether another agent's Lease has expired: it has not changed for its duration.

        The duration is measured on this agent's clock.
        """
        spec = self._spec(found)
        observed = (
            spec.get("holderIdentity"),
            spec.get("renewTime"),
            found["metadata"].get("resourceVersion"),
        )
        if observed != self._observed:
            self._observed, self._observed_ns = observed, now.mono_ns
        duration = spec.get("leaseDurationSeconds")
        limit_s = min(duration, DURATION_MAX_S) if isinstance(duration, int) else DURATION_S
        return now.mono_ns - self._observed_ns >= limit_s * NS

    def _note_holder(self, holder: str) -> None:
        if holder == self.holder:
            return
        if holder == self._identity:
            log.info(
                "lease %s/%s: held by this agent; it writes to the API server", self.namespace, self.name
            )
        elif holder:
            log.warning(
                "lease %s/%s: held by another agent, %s; this agent writes nothing to the API server until "
                "it holds the lease",
                self.namespace,
                self.name,
                holder,
            )
        self.holder = holder

    @staticmethod
    def _spec(found: dict[str, Any]) -> dict[str, Any]:
        spec = found.get("spec")
        return spec if isinstance(spec, dict) else {}
