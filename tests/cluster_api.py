"""API server of a cluster for the agent's work there: checks roles, bodies and owners of fields.

It has Nodes, Leases, Events and DeviceTaintRules over plain HTTP. A call needs the verb in a role, a body
must fit the published schema, and an update needs the newest version. Server-side apply owns conditions of a
Node by their type, and other objects as a whole.
"""

import json
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self
from urllib.parse import parse_qs, urlsplit

import jsonschema
import yaml

ROOT: Final = Path(__file__).parents[1]
RULES: Final = ROOT / "deploy/helm/drahealth/files/rules.yaml"
SCHEMAS: Final = ROOT / "tests/packages/schemas"
NODE: Final = "node-a"
NAMESPACE: Final = "drahealth"
COLLECTIONS: Final = {
    "nodes": "Node",
    "leases": "Lease",
    "events": "Event",
    "devicetaintrules": "DeviceTaintRule",
}
_PATH: Final = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<resource>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<part>status))?"
)
_VERBS: Final = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def documented_removal(node: str) -> dict[str, Any]:
    """Return the Node that the command in the documentation applies to remove the agent's conditions."""
    text = (ROOT / "docs/cluster.md").read_text()
    assert "kubectl apply --server-side --subresource=status --field-manager=drahealth -f -" in text
    (found,) = re.findall(r"^  echo '(.*)' \|$", text, re.MULTILINE)
    return dict(json.loads(found.replace("'$node'", node)))


class Request(NamedTuple):
    """One request to the server."""

    method: str
    path: str
    query: Mapping[str, str]
    body: Any

    @property
    def verb(self) -> str:
        """Verb as a role has it."""
        found = _PATH.fullmatch(self.path)
        return _VERBS.get(self.method) or ("get" if found and found["name"] else "list")


class Refusal(Exception):
    """Answer with an error status."""

    def __init__(self, status: int, reason: str, message: str = "", *, retry_after: str = "") -> None:
        super().__init__(message)
        self.status, self.reason, self.retry_after = status, reason, retry_after


class Right(NamedTuple):
    """Right that a rule grants."""

    verb: str
    group: str
    resource: str
    is_namespaced: bool
    """True: in the namespace of the release only."""


def granted_rights(features: Iterable[str] | None = None) -> frozenset[Right]:
    """Return the rights that the chart's roles grant for some features; None: for all."""
    sections = yaml.safe_load(RULES.read_text())
    return frozenset(
        Right(verb, group, resource, section == "namespaced")
        for section, by_feature in sections.items()
        for feature, rules in by_feature.items()
        if features is None or feature in features
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    )


@cache
def _validator(version: str, kind: str) -> jsonschema.Draft202012Validator | None:
    schemas = json.loads((SCHEMAS / f"kubernetes-{version}.json").read_text())
    if (definition := schemas["kinds"].get(kind)) is None:
        return None
    schema = {"$ref": f"#/definitions/{definition}", "definitions": schemas["definitions"]}
    return jsonschema.Draft202012Validator(schema)


class ClusterApi:
    """Server on loopback, as a context manager. Thread-safe. Stored objects are never modified."""

    def __init__(self, version: str = "1.37", rights: frozenset[Right] | None = None) -> None:
        """Create an API server; ``rights`` are those of the agent, None: those that the chart grants."""
        self.version = version
        self.rights = granted_rights() if rights is None else rights
        self.requests: list[Request] = []
        self.used: set[Right] = set()
        self.refuse: Callable[[Request], Refusal | None] = lambda request: None
        self.garbage: Callable[[Request], object] = lambda request: None
        """Returns the answer of another program to a request; None: the API server answers."""
        self.objects: dict[str, dict[str, Any]] = {}
        self._owners: dict[tuple[str, str], str] = {}
        """Manager of each condition of a Node, by path and type."""
        self._lock = threading.RLock()
        self._changes = 0
        self.put("/api/v1/nodes/node-a", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    # --- methods for tests ----------------------------------------------------------------------------------

    @property
    def node(self) -> dict[str, Any]:
        """The Node."""
        return self.objects[f"/api/v1/nodes/{NODE}"]

    def conditions(self) -> dict[str, dict[str, Any]]:
        """Return the conditions of the Node by type."""
        return {entry["type"]: entry for entry in self.node.get("status", {}).get("conditions", [])}

    def set_condition(self, type_: str, status: str, *, manager: str = "other", **fields: str) -> None:
        """Set a condition of the Node as another manager."""
        entry = {"type": type_, "status": status, **fields}
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": NODE},
            "status": {"conditions": [entry]},
        }
        self._apply_conditions(f"/api/v1/nodes/{NODE}", body, manager, is_forced=True)

    def replace_node(self) -> None:
        """Delete the Node and create it again; the garbage collector deletes what the former one owned."""
        former = self.node["metadata"]["uid"]
        for path, obj in list(self.objects.items()):
            if any(owner["uid"] == former for owner in obj["metadata"].get("ownerReferences", ())):
                del self.objects[path]
        self.put(f"/api/v1/nodes/{NODE}", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})

    def objects_of(self, resource: str) -> list[dict[str, Any]]:
        """Return all objects of a resource, in the order of their paths."""
        found = ((path, obj) for path, obj in self.objects.items() if f"/{resource}/" in path)
        return [obj for _, obj in sorted(found, key=lambda item: item[0])]

    def writes(self) -> list[Request]:
        """Return the requests that change something, and forget all requests."""
        with self._lock:
            found, self.requests = [request for request in self.requests if request.method != "GET"], []
        return found

    def put(self, path: str, obj: Mapping[str, Any]) -> dict[str, Any]:
        """Store an object with a new version."""
        with self._lock:
            self._changes += 1
            metadata = {"uid": str(uuid.uuid4()), **obj["metadata"], "resourceVersion": str(self._changes)}
            self.objects[path] = {**obj, "metadata": metadata}
            return self.objects[path]

    # --- requests -------------------------------------------------------------------------------------------

    def answer(self, request: Request, content_type: str) -> object:
        """Return the answer to a request. Raises Refusal."""
        with self._lock:
            self.requests.append(request)
            if (refusal := self.refuse(request)) is not None:
                raise refusal
            if (garbage := self.garbage(request)) is not None:
                return garbage
            found = _PATH.fullmatch(request.path)
            if found is None or found["resource"] not in COLLECTIONS or not self._is_served(found):
                raise Refusal(404, "NotFound", "the server could not find the requested resource")
            self._authorize(request.verb, found)
            match request.verb:
                case "get":
                    return self._find_object(request.path)
                case "list":
                    return self._list(request, found)
                case "create":
                    return self._create(request, found)
                case "update":
                    return self._update(request)
                case "delete":
                    uid = self._find_object(request.path)["metadata"]["uid"]
                    if request.body and request.body["preconditions"]["uid"] != uid:
                        raise Refusal(409, "Conflict", "the UID in the precondition does not match")
                    del self.objects[request.path]
                    return {"kind": "Status", "apiVersion": "v1", "status": "Success"}
                case _ if "apply" in content_type:
                    return self._apply(request, found)
                case _:
                    return self._merge(request)

    def _is_served(self, found: re.Match[str]) -> bool:
        group_version = "/".join(filter(None, (found["group"], found["version"])))
        return _validator(self.version, f"{group_version}/{COLLECTIONS[found['resource']]}") is not None

    def _authorize(self, verb: str, found: re.Match[str]) -> None:
        resource = "/".join(filter(None, (found["resource"], found["part"])))
        for is_namespaced in (False, True):
            right = Right(verb, found["group"] or "", resource, is_namespaced)
            if right in self.rights and (not is_namespaced or found["namespace"] == NAMESPACE):
                self.used.add(right)
                return
        raise Refusal(403, "Forbidden", f'User "agent" cannot {verb} resource "{resource}"')

    def _find_object(self, path: str) -> dict[str, Any]:
        if path not in self.objects:
            raise Refusal(404, "NotFound", f"{path} not found")
        return self.objects[path]

    def _list(self, request: Request, found: re.Match[str]) -> dict[str, Any]:
        wanted = dict(part.split("=") for part in request.query.get("labelSelector", "").split(",") if part)
        items = [
            {key: value for key, value in obj.items() if key not in {"apiVersion", "kind"}}
            for path, obj in sorted(self.objects.items())
            if path.startswith(f"{request.path}/")
            and wanted.items() <= obj["metadata"].get("labels", {}).items()
        ]
        kind = f"{COLLECTIONS[found['resource']]}List"
        return {"apiVersion": "v1", "kind": kind, "metadata": {"resourceVersion": "1"}, "items": items}

    def _check(self, body: Any) -> None:
        validator = _validator(self.version, f"{body['apiVersion']}/{body['kind']}")
        assert validator is not None
        errors = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(body)]
        if errors:
            raise Refusal(422, "Invalid", "; ".join(errors))

    def _create(self, request: Request, found: re.Match[str]) -> dict[str, Any]:
        self._check(request.body)
        namespace = request.body["metadata"].get("namespace", found["namespace"])
        if namespace != found["namespace"]:
            raise Refusal(400, "BadRequest", "the namespace of the object does not match that of the request")
        path = f"{request.path}/{request.body['metadata']['name']}"
        if path in self.objects:
            raise Refusal(409, "AlreadyExists", f"{path} already exists")
        return self.put(path, request.body)

    def _update(self, request: Request) -> dict[str, Any]:
        self._check(request.body)
        stored = self._find_object(request.path)
        if request.body["metadata"].get("resourceVersion") != stored["metadata"]["resourceVersion"]:
            raise Refusal(409, "Conflict", "the object has been modified")
        return self.put(request.path, request.body)

    def _merge(self, request: Request) -> dict[str, Any]:
        stored = self._find_object(request.path)
        merged = {**stored, **request.body, "metadata": stored["metadata"]}
        self._check(merged)
        return self.put(request.path, merged)

    def _apply(self, request: Request, found: re.Match[str]) -> dict[str, Any]:
        self._check(request.body)
        manager, is_forced = request.query["fieldManager"], request.query.get("force") == "true"
        if found["part"]:
            path = request.path.removesuffix("/status")
            return self._apply_conditions(path, request.body, manager, is_forced=is_forced)
        stored = self.objects.get(request.path)
        if stored is None:
            self._authorize("create", found)
        elif (
            self._manager(stored) != manager
            and stored.get("spec") != request.body.get("spec")
            and not is_forced
        ):
            raise Refusal(409, "Conflict", f"conflict with {self._manager(stored)!r}: .spec")
        fields = [{"manager": manager, "operation": "Apply"}]
        metadata = {**(stored or {}).get("metadata", {}), **request.body["metadata"], "managedFields": fields}
        return self.put(request.path, {**request.body, "metadata": metadata})

    @staticmethod
    def _manager(obj: Mapping[str, Any]) -> str:
        return str((obj["metadata"].get("managedFields") or [{}])[0].get("manager", ""))

    def _apply_conditions(
        self, path: str, body: Mapping[str, Any], manager: str, *, is_forced: bool
    ) -> dict[str, Any]:
        stored = self._find_object(path)
        before = {entry["type"]: entry for entry in stored.get("status", {}).get("conditions", [])}
        applied = {entry["type"]: entry for entry in body["status"]["conditions"]}
        for type_, entry in applied.items():
            owner = self._owners.get((path, type_), manager)
            if owner != manager and before.get(type_) != entry and not is_forced:
                raise Refusal(409, "Conflict", f'conflict with "{owner}": .status.conditions[type="{type_}"]')
            self._owners[path, type_] = manager
        kept = {
            type_: entry
            for type_, entry in before.items()
            if type_ in applied or self._owners.get((path, type_)) != manager
        }
        conditions = list({**kept, **applied}.values())
        return self.put(path, {**stored, "status": {**stored.get("status", {}), "conditions": conditions}})


def _handler_of(api: ClusterApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            request = Request(self.command, url.path, query, json.loads(data) if data else None)
            status, retry_after = 200, ""
            try:
                body = api.answer(request, self.headers.get("Content-Type", ""))
            except Refusal as refusal:
                status, retry_after = refusal.status, refusal.retry_after
                body = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": status}
                body |= {"reason": refusal.reason, "message": str(refusal)}
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            if retry_after:
                self.send_header("Retry-After", retry_after)
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

        def log_message(self, *_: object) -> None:
            """Suppress the access log."""

    return Handler
