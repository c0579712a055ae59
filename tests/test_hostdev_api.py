"""The example driver and the API server: claims from it, and ResourceSlices with taints to it."""

import errno
import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hostdev_driver.api import ApiError, ApiServer
from hostdev_driver.claims import ClaimApi
from hostdev_driver.slices import DEVICES_MAX, Publisher, devices_of
from hostdev_samples import DRIVER, NODE, REF, claim_object, host_of, paper

import drahealth
from agent.prepare.classify import PrepareContext, classify
from agent.prepare.errors import recorded_operation

__all__ = ["paper"]


# --- the API server --------------------------------------------------------------------------------------


@dataclass
class FakeApi:
    """Objects by path, behind a real HTTPS server; refuses as the API server does."""

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    refuse: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Status and reason of the next answers, by method."""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and token of each."""
    url: str = ""
    ca: Path = Path()
    version: int = 0

    def answer(self, method: str, target: str, body: Any) -> tuple[int, dict[str, Any]]:
        if method in self.refuse:
            status, reason = self.refuse[method]
            return status, {"kind": "Status", "reason": reason, "message": f"{reason} it is", "code": status}
        url = urlsplit(target)
        if method == "GET" and url.query:
            chosen = dict(word.split("=") for word in parse_qs(url.query)["fieldSelector"][0].split(","))
            items = [one for path, one in self.objects.items() if path.startswith(url.path + "/")]
            return 200, {
                "items": [
                    one for one in items if all(one["spec"][key[5:]] == word for key, word in chosen.items())
                ]
            }
        path = f"{url.path}/{body['metadata']['name']}" if method == "POST" else url.path
        there = self.objects.get(path)
        if method == "POST" and there is not None:
            return 409, {"reason": "AlreadyExists", "message": path}
        if method != "POST" and there is None:
            return 404, {"reason": "NotFound", "message": f"{path} not found"}
        if method == "DELETE":
            return 200, self.objects.pop(path)
        if method in {"POST", "PUT"}:
            if there and body["metadata"].get("resourceVersion") != there["metadata"]["resourceVersion"]:
                return 409, {"reason": "Conflict", "message": "the object has been modified"}
            self.version += 1
            body["metadata"]["resourceVersion"] = str(self.version)
            self.objects[path] = body
        return 200, self.objects[path]

    def slices(self) -> dict[str, Any]:
        return {
            path.rpartition("/")[2]: one for path, one in self.objects.items() if "resourceslices" in path
        }

    def writes(self) -> list[str]:
        """Methods that changed something since the last time."""
        found = [method for method, _, _ in self.calls if method != "GET"]
        self.calls.clear()
        return found


@contextmanager
def serving(fake: FakeApi, certificate: Path | None) -> Iterator[FakeApi]:
    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            fake.calls.append((self.command, self.path, self.headers.get("Authorization", "")))
            status, answer = fake.answer(self.command, self.path, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_DELETE = handle_any

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, certificate.with_suffix(".key"))
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        fake.url = f"{'https' if certificate else 'http'}://127.0.0.1:{server.server_address[1]}"
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a self-signed certificate of a server at 127.0.0.1."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    path = tmp_path_factory.mktemp("tls") / "server.crt"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1"]
    subprocess.run(
        [*command, "-keyout", path.with_suffix(".key"), "-out", path], check=True, capture_output=True
    )
    return path


@pytest.fixture
def fake(certificate: Path) -> Iterator[FakeApi]:
    node = {"metadata": {"name": NODE, "uid": "node-uid"}}
    with serving(FakeApi({f"/api/v1/nodes/{NODE}": node}, ca=certificate), certificate) as served:
        yield served


CLAIM_PATH = "/apis/resource.k8s.io/v1/namespaces/team-a/resourceclaims/train"


def test_claim_is_requested_by_name_with_the_current_token(tmp_path: Path, fake: FakeApi) -> None:
    fake.objects[CLAIM_PATH] = claim_object()
    token = tmp_path / "token"
    claims = ClaimApi(ApiServer(fake.url, fake.ca, token), DRIVER)
    for word in ("first", "second"):  # the kubelet renews it
        token.write_text(f"{word}\n")
        assert claims(REF).uid == "uid-1"
    assert fake.calls == [("GET", CLAIM_PATH, "Bearer first"), ("GET", CLAIM_PATH, "Bearer second")]


def test_missing_or_recreated_claim_is_transient(fake: FakeApi) -> None:
    claims = ClaimApi(ApiServer(fake.url, fake.ca), DRIVER)
    with pytest.raises(drahealth.TransientError) as caught:
        claims(REF)
    assert caught.value.code == "claim.not_found"
    fake.objects[CLAIM_PATH] = claim_object(uid="uid-2")
    with pytest.raises(drahealth.TransientError) as caught:
        claims(REF)
    assert caught.value.code == "claim.uid_mismatch"


@pytest.mark.parametrize(
    ("status", "reason", "code", "error_class"),
    [
        (401, "Unauthorized", "api.unauthorized", drahealth.ErrorClass.TRANSIENT),
        (403, "Forbidden", "api.forbidden", drahealth.ErrorClass.PERMANENT),
        (409, "Conflict", "api.conflict", drahealth.ErrorClass.TRANSIENT),
        (422, "Invalid", "api.invalid", drahealth.ErrorClass.PERMANENT),
        (429, "TooManyRequests", "api.429", drahealth.ErrorClass.TRANSIENT),
        (503, "ServiceUnavailable", "api.5xx", drahealth.ErrorClass.TRANSIENT),
    ],
)
def test_refusal_is_classified_by_status_and_reason(
    fake: FakeApi, status: int, reason: str, code: str, error_class: drahealth.ErrorClass
) -> None:
    fake.refuse = {"GET": (status, reason)}
    with pytest.raises(ApiError) as caught:
        ClaimApi(ApiServer(fake.url, fake.ca), DRIVER)(REF)
    assert (caught.value.status, caught.value.reason) == (status, reason)
    assert str(caught.value) == f"{status} {reason}: {reason} it is"
    verdict = classify(caught.value, PrepareContext(drahealth.Claim(*REF)))
    assert (verdict.code, verdict.error_class) == (code, error_class)
    assert verdict.summary == f"API server: {status} {reason}: {reason} it is"


def test_untrusted_api_server_is_rejected(fake: FakeApi) -> None:
    with pytest.raises(ssl.SSLCertVerificationError) as caught:
        ClaimApi(ApiServer(fake.url), DRIVER)(REF)
    mark = recorded_operation(caught.value)
    assert mark is not None
    assert mark.operation is drahealth.Operation.API
    assert not fake.calls


def test_unreachable_api_server_is_an_api_error(fake: FakeApi) -> None:
    with serving(FakeApi(), None) as gone:
        url = gone.url
    with pytest.raises(ConnectionRefusedError) as caught:
        ApiServer(url).call("GET", "/api")
    mark = recorded_operation(caught.value)
    assert mark is not None
    assert mark.operation is drahealth.Operation.API
    assert caught.value.errno == errno.ECONNREFUSED


@pytest.mark.parametrize("url", ["", "10.0.0.1:6443", "ftp://host", "https://"])
def test_invalid_url_is_an_operator_error(url: str) -> None:
    with pytest.raises(drahealth.ConfigError, match="is not a URL of an API server"):
        ApiServer(url)


# --- ResourceSlices --------------------------------------------------------------------------------------


def taints_of(**devices: drahealth.Taint) -> drahealth.Taints:
    return drahealth.Taints(
        {drahealth.DeviceRef(DRIVER, NODE, name.replace("_", "-")): (one,) for name, one in devices.items()}
    )


XID = drahealth.Taint(f"{DRIVER}/xid", "79", drahealth.Effect.NO_SCHEDULE, 1_700_000_000)


def test_slice_has_the_attributes_for_selectors(fake: FakeApi, paper: Path) -> None:
    Publisher(ApiServer(fake.url, fake.ca), DRIVER, host_of(paper)).publish(taints_of(gpu_3=XID))
    (name,) = fake.slices()
    one = fake.slices()[name]
    assert name == f"{NODE}-{DRIVER}-0"
    assert one["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": "node-uid", "controller": True}
    ]
    assert one["spec"]["pool"] == {"name": NODE, "generation": 1, "resourceSliceCount": 1}
    devices = {device.pop("name"): device for device in one["spec"]["devices"]}
    assert devices["hugepages-2mi-node0-0"] == {
        "attributes": {
            "kind": {"string": "hugepages"},
            "pageSize": {"string": "2Mi"},
            "numaNode": {"int": 0},
        },
        "capacity": {"pages": {"value": "512"}, "memory": {"value": "1Gi"}},
    }
    assert devices["cpus-node1-0"] == {
        "attributes": {"kind": {"string": "cpu"}, "numaNode": {"int": 1}},
        "capacity": {"cpus": {"value": "3"}},
    }
    assert devices["gpu-3"]["taints"] == [
        {"key": f"{DRIVER}/xid", "value": "79", "effect": "NoSchedule", "timeAdded": "2023-11-14T22:13:20Z"}
    ]
    assert not any("taints" in device for name, device in devices.items() if name != "gpu-3")


def test_unchanged_slices_stay_and_changed_ones_are_replaced(fake: FakeApi, paper: Path) -> None:
    publisher = Publisher(ApiServer(fake.url, fake.ca), DRIVER, host_of(paper))
    publisher.refresh()
    assert not fake.calls  # no devices were published yet
    publisher.publish(drahealth.Taints())
    assert fake.writes() == ["POST"]
    publisher.refresh()
    assert fake.writes() == []
    publisher.publish(taints_of(gpu_3=XID))
    assert fake.writes() == ["PUT"]
    fake.objects = {path: one for path, one in fake.objects.items() if "resourceslices" not in path}
    publisher.refresh()  # the kubelet wiped them when it started
    assert fake.writes() == ["POST"]
    (one,) = fake.slices().values()
    assert any("taints" in device for device in one["spec"]["devices"])


def test_only_device_changes_need_a_new_generation(fake: FakeApi, paper: Path) -> None:
    api = ApiServer(fake.url, fake.ca)

    def generation() -> int:
        (one,) = fake.slices().values()
        return int(one["spec"]["pool"]["generation"])

    Publisher(api, DRIVER, host_of(paper)).publish(drahealth.Taints())
    Publisher(api, DRIVER, host_of(paper)).publish(taints_of(gpu_3=XID))
    assert generation() == 1
    Publisher(api, DRIVER, host_of(paper, shares=2)).publish(taints_of(gpu_3=XID))
    assert generation() == 2


def test_slices_stay_within_the_limit_for_tainted_devices(fake: FakeApi, paper: Path) -> None:
    api = ApiServer(fake.url, fake.ca)
    other = {"metadata": {"name": "of-another"}, "spec": {"driver": "gpu.example.com", "nodeName": NODE}}
    fake.objects["/apis/resource.k8s.io/v1/resourceslices/of-another"] = other
    Publisher(api, DRIVER, host_of(paper, shares=150)).publish(taints_of(gpu_3=XID))
    ours = [one["spec"] for name, one in sorted(fake.slices().items()) if name != "of-another"]
    assert [len(spec["devices"]) for spec in ours] == [DEVICES_MAX, DEVICES_MAX, 150 + 3 - 2 * DEVICES_MAX]
    assert {spec["pool"]["resourceSliceCount"] for spec in ours} == {3}
    Publisher(api, DRIVER, host_of(paper)).publish(drahealth.Taints())
    left = fake.slices()
    assert left.keys() == {"of-another", f"{NODE}-{DRIVER}-0"}
    assert left[f"{NODE}-{DRIVER}-0"]["spec"]["pool"] == {
        "name": NODE,
        "generation": 2,
        "resourceSliceCount": 1,
    }


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_publish_error_is_raised_for_the_retry(fake: FakeApi, paper: Path, method: str) -> None:
    publisher = Publisher(ApiServer(fake.url, fake.ca), DRIVER, host_of(paper))
    fake.refuse = {method: (409, "Conflict")}
    with pytest.raises(ApiError):
        publisher.publish(drahealth.Taints())
    publisher.refresh()  # raises nothing
    fake.refuse = {}
    publisher.publish(drahealth.Taints())
    assert len(fake.slices()) == 1


def test_taints_of_other_drivers_are_ignored(paper: Path) -> None:
    taints = drahealth.Taints({drahealth.DeviceRef("gpu.example.com", NODE, "gpu-3"): (XID,)})
    assert not any("taints" in device for device in devices_of(host_of(paper), taints, DRIVER))
