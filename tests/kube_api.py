"""Fake API server over TLS for our client: claims, slices and nodes, as Kubernetes checks and answers them.

:mod:`go_driver.api_server` stores, validates and watches; this one adds TLS, tokens, the discovery of
versions, refusals, and an expired history.
"""

import base64
import json
import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from socket import SHUT_RDWR
from typing import Any, Final, NamedTuple, Self
from urllib.parse import urlsplit

import pytest
from go_driver.api_server import RESOURCE, SLICES, ApiError, ApiServer
from patience import PATIENCE_S

from agent.serve.kube_api.api_server import verb_and_resource

GROUP: Final = "/apis/resource.k8s.io"


class ApiCall(NamedTuple):
    """One request to the API server."""

    method: str
    target: str
    token: str


class FakeKubeApi(ApiServer):
    """API server on loopback with a certificate of its own, or plain HTTP without one."""

    def __init__(self, certificate: Path | None) -> None:
        super().__init__(lambda body: json.loads(body) if body else {})
        self.certificate = certificate
        self.versions: tuple[str, ...] = ("v1",)
        """Versions of resource.k8s.io that discovery shows."""
        self.calls: list[ApiCall] = []
        self.refuse: Callable[[ApiCall], ApiError | None] = lambda call: None
        """Returns the refusal of a call."""
        self.garbage: dict[str, Any] | None = None
        """Answer of another program to lists; None: the API server answers."""
        self.oldest = 0
        """Oldest version from which a watch may begin."""

    def __enter__(self) -> Self:
        super().__enter__()
        if self.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate, self.certificate.with_suffix(".key"))
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        return self

    @property
    def url(self) -> str:
        return super().url.replace("http:", "https:" if self.certificate else "http:")

    def admit(self, method: str, target: str, token: str) -> str:
        call = ApiCall(method, target, token)
        self.calls.append(call)
        if (error := self.refuse(call)) is not None:
            raise error
        if method == "PUT":
            target = target.removesuffix("/status")
        version = urlsplit(target).path.removeprefix(f"{GROUP}/").partition("/")[0]
        if not target.startswith(f"{GROUP}/"):
            return target
        if version not in self.versions:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        return target.replace(f"{GROUP}/{version}", RESOURCE)

    def get(self, path: str) -> dict[str, Any]:
        if path == GROUP and self.versions:
            names = [
                {"groupVersion": f"{GROUP[6:]}/{version}", "version": version} for version in self.versions
            ]
            return {"kind": "APIGroup", "apiVersion": "v1", "name": GROUP[6:], "versions": names}
        return super().get(path)

    def all_of(self, path: str, selector: Mapping[str, str]) -> dict[str, Any]:
        if self.garbage is not None:
            return self.garbage
        if path != f"{RESOURCE}/resourceclaims":
            return super().all_of(path, selector)
        with self._changed:
            items = [obj for name, obj in self._objects.items() if "/resourceclaims/" in name]
        kind = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimList"}
        return kind | {"metadata": {"resourceVersion": str(self.version)}, "items": items}

    def watch(self, path: str, selector: Mapping[str, str], query: Mapping[str, str]) -> Iterator[bytes]:
        if int(query.get("resourceVersion") or 0) < self.oldest:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            yield json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n"
            return
        yield from super().watch(path, selector, query)

    def break_streams(self) -> None:
        """Close all open connections, as a load balancer does."""
        with self._changed:
            connections = list(self._connections)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(SHUT_RDWR)

    def writes(self) -> list[str]:
        """Return the methods of all calls since the last time that change something."""
        found = [call.method for call in self.calls if call.method != "GET"]
        self.calls.clear()
        return found

    def all_slices(self) -> dict[str, dict[str, Any]]:
        """Return all slices by name."""
        with self._changed:
            return {
                path.rpartition("/")[2]: obj
                for path, obj in self._objects.items()
                if path.startswith(f"{SLICES}/")
            }


def write_kubeconfig(
    path: Path, server: FakeKubeApi, *, cluster: Mapping[str, Any] | None = None, **user: Any
) -> Path:
    """Write a kubeconfig for the server, with a second cluster and user that must not be used.

    Args:
        path: The file.
        server: The server of the current context.
        cluster: Other fields of the cluster; None removes a field.
        user: Fields of the user.
    """
    ca = base64.b64encode(server.certificate.read_bytes()).decode() if server.certificate else None
    here = {"server": server.url, "certificate-authority-data": ca, **(cluster or {})}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [
            {"name": "other", "cluster": {"server": "https://other:1"}},
            {"name": "c", "cluster": {key: value for key, value in here.items() if value is not None}},
        ],
        "users": [{"name": "other", "user": {"token": "other"}}, {"name": "u", "user": user}],
        "contexts": [
            {"name": "there", "context": {"cluster": "other", "user": "other"}},
            {"name": "here", "context": {"cluster": "c", "user": "u"}},
        ],
    }
    path.write_text(json.dumps(config))
    return path


def forbid(method: str, part: str) -> Callable[[ApiCall], ApiError | None]:
    """Return a refusal of a method on targets that contain a text, as a role without the verb causes."""

    def refuse(call: ApiCall) -> ApiError | None:
        if call.method != method or part not in call.target:
            return None
        verb, resource = verb_and_resource(method, call.target)
        return ApiError(403, "Forbidden", f'User "driver" cannot {verb} resource "{resource}"')

    return refuse


def make_certificate(path: Path) -> Path:
    """Make a self-signed certificate of a server at 127.0.0.1 and of the name kube-api; its key is next to
    it. Skips the test without openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed; it makes the certificate")
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=kube-api", "-addext", "subjectAltName=IP:127.0.0.1,DNS:kube-api", "-days", "1"]
    subprocess.run(
        [*command, "-keyout", path.with_suffix(".key"), "-out", path], check=True, capture_output=True
    )
    return path


@pytest.fixture
def patient_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer of a busy machine is late for clients of an API server."""
    monkeypatch.setattr("agent.serve.kube_api.api_server.TIMEOUT_S", PATIENCE_S)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificate of the fake API server."""
    return make_certificate(tmp_path_factory.mktemp("tls") / "server.crt")


@pytest.fixture
def kube_api(certificate: Path) -> Iterator[FakeKubeApi]:
    """Running fake API server over TLS."""
    with FakeKubeApi(certificate) as server:
        yield server
