"""Fake API server for client-go: ResourceClaims, ResourceSlices, nodes and events, over plain HTTP.

It supports list, watch (also with ``sendInitialEvents``), create, update, merge patch and delete, and
refuses missing and existing objects, version conflicts and invalid taints. It has no other API versions than
resource.k8s.io/v1, no lists in patches and no authorization. A resource version is the number of the last
change.
"""

import json
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, NamedTuple, Self
from urllib.parse import parse_qs, urlsplit

from go_driver.objects import Decode

RESOURCE: Final = "/apis/resource.k8s.io/v1"
SLICES: Final = f"{RESOURCE}/resourceslices"
KINDS: Final = {
    "resourceslices": "ResourceSlice",
    "resourceclaims": "ResourceClaim",
    "nodes": "Node",
    "events": "Event",
}
EFFECTS: Final = ("None", "NoSchedule", "NoExecute")
DEVICES_MAX, TAINTED_MAX = 128, 64
INITIAL_EVENTS_END: Final = "k8s.io/initial-events-end"


class ApiError(Exception):
    """HTTP error with a status, a reason and a message."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class Change(NamedTuple):
    """One change of an object, as watches get it."""

    kind: str
    """ADDED, MODIFIED, DELETED."""
    path: str
    object: dict[str, Any]
    at_s: float
    """Time of the change on the monotonic clock [s]."""


class ApiServer:
    """Server on loopback, as a context manager. Thread-safe. Stored objects are never modified."""

    def __init__(self, decode: Decode) -> None:
        """
        Args:
            decode: Decodes the body of a request into an object.
        """
        self.decode = decode
        self._changed = threading.Condition()
        self._objects: dict[str, dict[str, Any]] = {}
        self._changes: list[Change] = []
        self._ended = False
        self._connections: set[socket.socket] = set()

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = False  # so that server_close() waits for them
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            for connection in self._connections:
                with suppress(OSError):  # closed by the client already
                    connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def admit(self, method: str, target: str, token: str) -> str:
        """Return the target of a request: its path with the query. A subclass may record it, replace it, or
        refuse it with an ApiError."""
        return target

    # --- methods for tests --------------------------------------------------------------------------------

    def add_node(self, name: str) -> None:
        """Add a node."""
        self._store("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})

    def add_claim(self, claim: Mapping[str, Any]) -> None:
        """Add a ResourceClaim; see :func:`kubelet.claims.allocated_claim`."""
        namespace = claim["metadata"]["namespace"]
        self._store(f"{RESOURCE}/namespaces/{namespace}/resourceclaims", json.loads(json.dumps(claim)))

    def slices(self, driver: str) -> list[dict[str, Any]]:
        """Return the slices of a driver, sorted by name."""
        with self._changed:
            found = sorted(item for item in self._objects.items() if item[0].startswith(f"{SLICES}/"))
        return [obj for _, obj in found if obj["spec"]["driver"] == driver]

    @property
    def version(self) -> int:
        """Resource version of the last change."""
        with self._changed:
            return len(self._changes)

    def published_slices(self, driver: str, since: int) -> list[Change]:
        """Return all changes by which a driver created or updated a slice after a change, in order."""
        with self._changed:
            changes = [change for change in self._changes[since:] if change.kind != "DELETED"]
        slices = [change for change in changes if change.path.startswith(f"{SLICES}/")]
        return [change for change in slices if change.object["spec"]["driver"] == driver]

    def wipe(self, driver: str) -> None:
        """Delete a driver's slices, as a kubelet does at its start or when the driver is gone."""
        for obj in self.slices(driver):
            self.delete(f"{SLICES}/{obj['metadata']['name']}", {})

    # --- verbs --------------------------------------------------------------------------------------------

    def get(self, path: str) -> dict[str, Any]:
        """Return one object."""
        with self._changed:
            if path not in self._objects:
                name, kind = path.rpartition("/")[2], path.split("/")[-2]
                raise ApiError(404, "NotFound", f'{kind} "{name}" not found')
            return self._objects[path]

    def all_of(self, path: str, selector: Mapping[str, str]) -> dict[str, Any]:
        """Return all objects of a collection that match a field selector."""
        with self._changed:
            items = [obj for _, obj in self._select_objects(path, selector)]
            return {
                "apiVersion": "resource.k8s.io/v1",
                "kind": f"{KINDS[path.rpartition('/')[2]]}List",
                "metadata": {"resourceVersion": str(len(self._changes))},
                "items": items,
            }

    def create(self, path: str, new: dict[str, Any]) -> dict[str, Any]:
        """Add an object to a collection, with its own or a generated name."""
        meta = new["metadata"]
        if "name" not in meta:
            meta["name"] = f"{meta['generateName']}{uuid.uuid4().hex[:5]}"
        with self._changed:
            if f"{path}/{meta['name']}" in self._objects:
                raise ApiError(409, "AlreadyExists", f"{path}/{meta['name']} already exists")
            return self._store(path, new)

    def update(self, path: str, new: dict[str, Any]) -> dict[str, Any]:
        """Replace an object; its resource version must be the newest."""
        with self._changed:
            stored = self.get(path)
            if new["metadata"].get("resourceVersion") != stored["metadata"]["resourceVersion"]:
                raise ApiError(409, "Conflict", "the object has been modified")
            return self._store(path.rpartition("/")[0], new)

    def delete(self, path: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Delete an object if it meets the preconditions."""
        with self._changed:
            stored = self.get(path)
            for key, expected in (options.get("preconditions") or {}).items():
                if stored["metadata"][key] != expected:
                    raise ApiError(409, "Conflict", f"{key} is {stored['metadata'][key]}, not {expected}")
            del self._objects[path]
            self._notify("DELETED", path, stored)
            return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def delete_all(self, path: str, selector: Mapping[str, str]) -> dict[str, Any]:
        """Delete all objects of a collection that match a field selector."""
        with self._changed:
            for found, obj in self._select_objects(path, selector):
                del self._objects[found]
                self._notify("DELETED", found, obj)
            return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def patch(self, path: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Merge a change into an object."""
        with self._changed:
            return self._store(path.rpartition("/")[0], _apply_merge_patch(self.get(path), change))

    def watch(self, path: str, selector: Mapping[str, str], query: Mapping[str, str]) -> Iterator[bytes]:
        """Yield watch events of a collection as JSON lines: initial objects if requested, then changes."""
        since = query.get("resourceVersion", "")
        initial = query.get("sendInitialEvents") == "true"
        with self._changed:
            sent_count = len(self._changes)
            if initial or since in {"", "0"}:
                lines = [_event("ADDED", obj) for _, obj in self._select_objects(path, selector)]
            else:
                lines, sent_count = [], int(since)
            if initial:
                meta = {"resourceVersion": str(sent_count), "annotations": {INITIAL_EVENTS_END: "true"}}
                kind = KINDS[path.rpartition("/")[2]]
                end = {"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": meta}
                lines.append(_event("BOOKMARK", end))
        yield from lines
        while (changes := self._wait_changes_after(sent_count)) is not None:
            for change in changes:
                if change.path.startswith(f"{path}/") and _has(change.object, selector):
                    yield _event(change.kind, change.object)
            sent_count += len(changes)

    def _wait_changes_after(self, sent_count: int) -> list[Change] | None:
        """Wait for changes after the first ``sent_count``. None: the server stops."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._changes) > sent_count)
            return None if self._ended else self._changes[sent_count:]

    # --- storage ------------------------------------------------------------------------------------------

    def _store(self, collection: str, new: dict[str, Any]) -> dict[str, Any]:
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        if collection == SLICES:
            _check_slice(new["spec"].get("devices", []), now)
        meta = new["metadata"]
        path = f"{collection}/{meta['name']}"
        with self._changed:
            meta.setdefault("uid", str(uuid.uuid4()))
            meta.setdefault("creationTimestamp", now)
            meta["resourceVersion"] = str(len(self._changes) + 1)
            kind = "MODIFIED" if path in self._objects else "ADDED"
            self._objects[path] = new
            self._notify(kind, path, new)
        return new

    def _notify(self, kind: str, path: str, obj: dict[str, Any]) -> None:
        shown = obj | {"metadata": obj["metadata"] | {"resourceVersion": str(len(self._changes) + 1)}}
        self._changes.append(Change(kind, path, shown, time.monotonic()))
        self._changed.notify_all()

    def _select_objects(self, path: str, selector: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
        found = [item for item in self._objects.items() if item[0].startswith(f"{path}/")]
        return sorted(item for item in found if _has(item[1], selector))

    # --- connections --------------------------------------------------------------------------------------

    def add_connection(self, connection: socket.socket) -> None:
        """Remember an open connection."""
        with self._changed:
            self._connections.add(connection)

    def remove_connection(self, connection: socket.socket) -> None:
        """Forget a closed connection."""
        with self._changed:
            self._connections.discard(connection)


def _check_slice(devices: list[dict[str, Any]], now: str) -> None:
    """Validate devices and taints; set the time of taints without one."""
    limit = TAINTED_MAX if any(device.get("taints") for device in devices) else DEVICES_MAX
    if len(devices) > limit:
        raise ApiError(422, "Invalid", f"spec.devices: Too many: {len(devices)}: must have at most {limit}")
    for device in devices:
        for taint in device.get("taints") or []:
            if taint["effect"] not in EFFECTS:
                raise ApiError(
                    422, "Invalid", f"spec.devices.taints.effect: {taint['effect']!r}: not supported"
                )
            taint.setdefault("timeAdded", now)


def _apply_merge_patch(old: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with the members of a merge patch; None removes a member."""
    merged = dict(old)
    for key, value in change.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _apply_merge_patch(merged.get(key, {}), value) if isinstance(value, dict) else value
    return merged


def _has(obj: Mapping[str, Any], selector: Mapping[str, str]) -> bool:
    """Return whether fields such as ``spec.nodeName`` have these values."""
    for field, expected in selector.items():
        value: Any = obj
        for key in field.split("."):
            value = value.get(key, "")
        if value != expected:
            return False
    return True


def _event(kind: str, obj: Mapping[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


def _status(error: ApiError) -> dict[str, Any]:
    """Return the Status object of an error."""
    failure = {"status": "Failure", "reason": error.reason, "message": str(error)}
    return {"apiVersion": "v1", "kind": "Status", "code": error.status} | failure


def _handler_of(api: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            api.add_connection(self.connection)

        def finish(self) -> None:
            api.remove_connection(self.connection)
            super().finish()

        def handle(self) -> None:
            with suppress(ConnectionError, ssl.SSLError):  # a killed client, one that does not trust it
                super().handle()

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                url = urlsplit(api.admit(self.command, self.path, self.headers.get("Authorization", "")))
            except ApiError as error:
                self.reply(error.status, _status(error))
                return
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            selector = dict(
                expected.split("=") for expected in query.get("fieldSelector", "").split(",") if expected
            )
            if query.get("watch") == "true":
                self.stream(api.watch(url.path, selector, query))
            else:
                self.reply(*self.ask(url.path, selector, body))

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

        def ask(self, path: str, selector: Mapping[str, str], body: bytes) -> tuple[int, dict[str, Any]]:
            try:
                return 200, self.do(path, selector, api.decode(body))
            except ApiError as error:
                return error.status, _status(error)

        def do(self, path: str, selector: Mapping[str, str], body: dict[str, Any]) -> dict[str, Any]:
            collection = path.rpartition("/")[2] in KINDS and path.startswith(("/api/v1/", RESOURCE))
            match self.command:
                case "GET":
                    return api.all_of(path, selector) if collection else api.get(path)
                case "POST" if collection:
                    return api.create(path, body)
                case "PUT":
                    return api.update(path, body)
                case "PATCH":
                    return api.patch(path, body)
                case "DELETE" if collection:
                    return api.delete_all(path, selector)
                case "DELETE":
                    return api.delete(path, body)
            raise ApiError(405, "MethodNotAllowed", f"{self.command} {path}")

        def reply(self, status: int, found: dict[str, Any]) -> None:
            data = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def stream(self, lines: Iterator[bytes]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for line in lines:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: object) -> None:
            """Suppress the access log."""

    return Handler
