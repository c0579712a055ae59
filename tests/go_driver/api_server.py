"""The API server as client-go meets it: ResourceClaims, ResourceSlices and nodes, over plain HTTP.

It lists, watches (with ``sendInitialEvents``, too), creates, updates and deletes; it refuses what is gone,
there already, made of an old version, or no valid taint. Not here: other versions than resource.k8s.io/v1,
patches, who may do what. A resource version is the number of the last change.
"""

import json
import socket
import threading
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
KINDS: Final = {"resourceslices": "ResourceSlice", "resourceclaims": "ResourceClaim", "nodes": "Node"}
EFFECTS: Final = ("None", "NoSchedule", "NoExecute")
DEVICES_MAX, TAINTED_MAX = 128, 64
INITIAL_EVENTS_END: Final = "k8s.io/initial-events-end"


class Refused(Exception):
    """An answer that is none. Its text is the message."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class Change(NamedTuple):
    """What watches are told."""

    kind: str
    """ADDED, MODIFIED, DELETED."""
    path: str
    object: dict[str, Any]


class ApiServer:
    """Listens on loopback while it is entered. Any thread may call any method; nobody changes an object."""

    def __init__(self, decode: Decode) -> None:
        """
        Args:
            decode: Makes an object of a request's body.
        """
        self.decode = decode
        self._news = threading.Condition()
        self._objects: dict[str, dict[str, Any]] = {}
        self._changes: list[Change] = []
        self._ended = False
        self._connections: set[socket.socket] = set()

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = False  # and so they are waited for
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        with self._news:
            self._ended = True
            self._news.notify_all()
            for connection in self._connections:
                with suppress(OSError):  # the other side was faster
                    connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    # --- what tests do and see --------------------------------------------------------------------------

    def add_node(self, name: str) -> None:
        """There is a node."""
        self._store("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})

    def add_claim(self, claim: Mapping[str, Any]) -> None:
        """There is a ResourceClaim; see :func:`kubelet.claims.allocated_claim`."""
        namespace = claim["metadata"]["namespace"]
        self._store(f"{RESOURCE}/namespaces/{namespace}/resourceclaims", json.loads(json.dumps(claim)))

    def slices(self, driver: str) -> list[dict[str, Any]]:
        """What a driver has published, in the order of the names."""
        with self._news:
            found = sorted(item for item in self._objects.items() if item[0].startswith(f"{SLICES}/"))
        return [one for _, one in found if one["spec"]["driver"] == driver]

    @property
    def version(self) -> int:
        """Of the last change."""
        with self._news:
            return len(self._changes)

    def published(self, driver: str, since: int) -> list[dict[str, Any]]:
        """Every slice that a driver has created or updated after that change, in this order."""
        with self._news:
            changes = [one for one in self._changes[since:] if one.kind != "DELETED"]
        slices = [one.object for one in changes if one.path.startswith(f"{SLICES}/")]
        return [one for one in slices if one["spec"]["driver"] == driver]

    def wipe(self, driver: str) -> None:
        """As a kubelet does that starts, or whose driver is gone: deletes the driver's slices."""
        for one in self.slices(driver):
            self.delete(f"{SLICES}/{one['metadata']['name']}", {})

    # --- verbs ------------------------------------------------------------------------------------------

    def get(self, path: str) -> dict[str, Any]:
        """One object."""
        with self._news:
            if path not in self._objects:
                name, kind = path.rpartition("/")[2], path.split("/")[-2]
                raise Refused(404, "NotFound", f'{kind} "{name}" not found')
            return self._objects[path]

    def all_of(self, path: str, selector: Mapping[str, str]) -> dict[str, Any]:
        """All objects of a collection whose fields have these values."""
        with self._news:
            items = [one for _, one in self._selected(path, selector)]
            return {
                "apiVersion": "resource.k8s.io/v1",
                "kind": f"{KINDS[path.rpartition('/')[2]]}List",
                "metadata": {"resourceVersion": str(len(self._changes))},
                "items": items,
            }

    def create(self, path: str, new: dict[str, Any]) -> dict[str, Any]:
        """A new object of a collection, under a name of its own or one that is made up."""
        meta = new["metadata"]
        if "name" not in meta:
            meta["name"] = f"{meta['generateName']}{uuid.uuid4().hex[:5]}"
        with self._news:
            if f"{path}/{meta['name']}" in self._objects:
                raise Refused(409, "AlreadyExists", f"{path}/{meta['name']} already exists")
            return self._store(path, new)

    def update(self, path: str, new: dict[str, Any]) -> dict[str, Any]:
        """Another version of an object; the one that it was made of must be the newest."""
        with self._news:
            there = self.get(path)
            if new["metadata"].get("resourceVersion") != there["metadata"]["resourceVersion"]:
                raise Refused(409, "Conflict", "the object has been modified")
            return self._store(path.rpartition("/")[0], new)

    def delete(self, path: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """An object is gone, if it is the one that is meant."""
        with self._news:
            there = self.get(path)
            for key, word in (options.get("preconditions") or {}).items():
                if there["metadata"][key] != word:
                    raise Refused(409, "Conflict", f"{key} is {there['metadata'][key]}, not {word}")
            del self._objects[path]
            self._tell("DELETED", path, there)
            return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def watch(self, path: str, selector: Mapping[str, str], query: Mapping[str, str]) -> Iterator[bytes]:
        """Lines of JSON about the objects of a collection: those that are there, if asked; then changes."""
        since = query.get("resourceVersion", "")
        initial = query.get("sendInitialEvents") == "true"
        with self._news:
            seen = len(self._changes)
            if initial or since in {"", "0"}:
                lines = [_event("ADDED", one) for _, one in self._selected(path, selector)]
            else:
                lines, seen = [], int(since)
            if initial:
                meta = {"resourceVersion": str(seen), "annotations": {INITIAL_EVENTS_END: "true"}}
                kind = KINDS[path.rpartition("/")[2]]
                end = {"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": meta}
                lines.append(_event("BOOKMARK", end))
        yield from lines
        while (changes := self._after(seen)) is not None:
            for change in changes:
                if change.path.startswith(f"{path}/") and _has(change.object, selector):
                    yield _event(change.kind, change.object)
            seen += len(changes)

    def _after(self, seen: int) -> list[Change] | None:
        """Blocks until there are more changes than so many. None: the server ends."""
        with self._news:
            self._news.wait_for(lambda: self._ended or len(self._changes) > seen)
            return None if self._ended else self._changes[seen:]

    # --- what is kept -----------------------------------------------------------------------------------

    def _store(self, collection: str, new: dict[str, Any]) -> dict[str, Any]:
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        if collection == SLICES:
            _check_slice(new["spec"].get("devices", []), now)
        meta = new["metadata"]
        path = f"{collection}/{meta['name']}"
        with self._news:
            meta.setdefault("uid", str(uuid.uuid4()))
            meta.setdefault("creationTimestamp", now)
            meta["resourceVersion"] = str(len(self._changes) + 1)
            kind = "MODIFIED" if path in self._objects else "ADDED"
            self._objects[path] = new
            self._tell(kind, path, new)
        return new

    def _tell(self, kind: str, path: str, one: dict[str, Any]) -> None:
        shown = one | {"metadata": one["metadata"] | {"resourceVersion": str(len(self._changes) + 1)}}
        self._changes.append(Change(kind, path, shown))
        self._news.notify_all()

    def _selected(self, path: str, selector: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
        found = [item for item in self._objects.items() if item[0].startswith(f"{path}/")]
        return sorted(item for item in found if _has(item[1], selector))

    # --- connections ------------------------------------------------------------------------------------

    def opened(self, connection: socket.socket) -> None:
        """Somebody has connected."""
        with self._news:
            self._connections.add(connection)

    def closed(self, connection: socket.socket) -> None:
        """And is gone."""
        with self._news:
            self._connections.discard(connection)


def _check_slice(devices: list[dict[str, Any]], now: str) -> None:
    """What the API server says of devices and their taints; it dates those that have no date."""
    limit = TAINTED_MAX if any(device.get("taints") for device in devices) else DEVICES_MAX
    if len(devices) > limit:
        raise Refused(422, "Invalid", f"spec.devices: Too many: {len(devices)}: must have at most {limit}")
    for device in devices:
        for taint in device.get("taints") or []:
            if taint["effect"] not in EFFECTS:
                raise Refused(
                    422, "Invalid", f"spec.devices.taints.effect: {taint['effect']!r}: not supported"
                )
            taint.setdefault("timeAdded", now)


def _has(one: Mapping[str, Any], selector: Mapping[str, str]) -> bool:
    """Whether its fields, such as ``spec.nodeName``, have these values."""
    for field, word in selector.items():
        value: Any = one
        for key in field.split("."):
            value = value.get(key, "")
        if value != word:
            return False
    return True


def _event(kind: str, one: Mapping[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": one}).encode() + b"\n"


def _handler_of(api: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            api.opened(self.connection)

        def finish(self) -> None:
            api.closed(self.connection)
            super().finish()

        def handle(self) -> None:
            with suppress(ConnectionError):  # who has ended says no goodbye
                super().handle()

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = urlsplit(self.path)
            query = {key: words[0] for key, words in parse_qs(url.query).items()}
            selector = dict(word.split("=") for word in query.get("fieldSelector", "").split(",") if word)
            if query.get("watch") == "true":
                self.stream(api.watch(url.path, selector, query))
            else:
                self.reply(*self.ask(url.path, selector, body))

        do_GET = do_POST = do_PUT = do_DELETE = answer

        def ask(self, path: str, selector: Mapping[str, str], body: bytes) -> tuple[int, dict[str, Any]]:
            try:
                return 200, self.do(path, selector, api.decode(body))
            except Refused as error:
                said = {"status": "Failure", "reason": error.reason, "message": str(error)}
                return error.status, {"apiVersion": "v1", "kind": "Status", "code": error.status} | said

        def do(self, path: str, selector: Mapping[str, str], body: dict[str, Any]) -> dict[str, Any]:
            collection = path.rpartition("/")[2] in KINDS and path.startswith(("/api/v1/", RESOURCE))
            match self.command:
                case "GET":
                    return api.all_of(path, selector) if collection else api.get(path)
                case "POST" if collection:
                    return api.create(path, body)
                case "PUT":
                    return api.update(path, body)
                case "DELETE":
                    return api.delete(path, body)
            raise Refused(405, "MethodNotAllowed", f"{self.command} {path}")

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
            """Says nothing."""

    return Handler
