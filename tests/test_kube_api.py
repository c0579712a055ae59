"""The client of the API server: credentials, calls, typed errors, versions, lists and watches."""

import base64
import errno
import itertools
import json
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from go_driver.api_server import ApiError as Refusal
from kube_api import (
    FakeKubeApi,
    certificate,
    forbid,
    kube_api,
    make_certificate,
    patient_client,
    write_kubeconfig,
)
from kubelet.claims import allocated_claim
from patience import PATIENCE_S
from wire.serving import eventually

import drahealth
from agent.prepare.classify import PrepareContext, classify
from agent.prepare.errors import recorded_operation
from agent.serve.kube_api.api_server import verb_and_resource
from agent.serve.kube_api.object_watch import RETRY_AFTER_MAX_S, ObjectList, ObjectWatch, OpenStream

__all__ = ["certificate", "kube_api", "patient_client"]
pytestmark = pytest.mark.usefixtures("patient_client")

DRIVER, NODE = "card.example.com", "node-1"
REF = drahealth.ClaimRef("team-a", "train", "uid-1")
CLAIM = allocated_claim("train", "uid-1", ("it", DRIVER, NODE, "card-0"), pods=[], namespace="team-a")
CLAIM_PATH = "/apis/resource.k8s.io/v1/namespaces/team-a/resourceclaims/train"
NODES = "/api/v1/nodes"


def client(server: FakeKubeApi, **access: Any) -> drahealth.ApiServer:
    return drahealth.ApiServer(drahealth.ApiAccess(server.url, **{"ca_file": server.certificate, **access}))


# --- credentials ---------------------------------------------------------------------------------------


def test_pod_uses_the_token_and_the_ca_of_its_service_account(tmp_path: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443", "KUBECONFIG": "/none"}
    access = drahealth.find_api_access(environ=environ)
    assert access.url == "https://[fd00::1]:443"
    assert str(access.ca_file) == "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    assert str(access.token_file) == "/var/run/secrets/kubernetes.io/serviceaccount/token"


def test_renewed_token_is_used_by_the_next_call(tmp_path: Path, kube_api: FakeKubeApi) -> None:
    kube_api.add_node(NODE)
    token = tmp_path / "token"
    api = client(kube_api, token_file=token)
    for text in ("first", "second"):
        token.write_text(f"{text}\n")
        api.call("GET", f"{NODES}/{NODE}")
    assert [call.token for call in kube_api.calls] == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize("kind", ["token", "token_file"])
@pytest.mark.parametrize("text", ["first\nsecond", "first\u2026", "first\x00"])
def test_invalid_token_is_refused_and_not_shown(
    tmp_path: Path, kube_api: FakeKubeApi, kind: str, text: str
) -> None:
    (tmp_path / "token").write_text(text)
    api = client(kube_api, **{kind: {"token": text, "token_file": tmp_path / "token"}[kind]})
    with pytest.raises(drahealth.ApiUnreachableError, match="is not one line of ASCII text") as failure:
        api.call("GET", f"{NODES}/{NODE}")
    assert "first" not in str(failure.value)
    assert (str(tmp_path) in str(failure.value)) == (kind == "token_file")
    assert kube_api.calls == []


def test_block_of_yaml_is_a_token_without_its_newline(kube_api: FakeKubeApi) -> None:
    kube_api.add_node(NODE)
    client(kube_api, token="mine\n").call("GET", f"{NODES}/{NODE}")
    assert kube_api.calls[-1].token == "Bearer mine"


def test_ca_file_that_is_gone_is_named(tmp_path: Path, certificate: Path, kube_api: FakeKubeApi) -> None:
    (tmp_path / "ca.crt").write_bytes(certificate.read_bytes())
    api = drahealth.ApiServer(drahealth.ApiAccess(kube_api.url, ca_file=tmp_path / "ca.crt"))
    (tmp_path / "ca.crt").unlink()
    with pytest.raises(drahealth.ApiUnreachableError, match=r"/ca\.crt: No such file or directory$"):
        api.call("GET", f"{NODES}/{NODE}")


def test_certificates_without_key_identifiers_are_accepted(
    tmp_path: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of managed clusters, which OpenSSL refuses if it is strict, as Python is from 3.13 on."""
    create = ssl.create_default_context

    def create_strict(**files: Any) -> ssl.SSLContext:
        context = create(**files)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    no_identifier = ("-addext", "subjectKeyIdentifier=none", "-addext", "authorityKeyIdentifier=none")
    openssl("req", "-x509", *key, "-subj", "/CN=ca", *no_identifier, "-keyout", "ca.key", "-out", "ca.crt")
    openssl("req", *key, "-subj", "/CN=kube-api", "-keyout", "server.key", "-out", "server.csr")
    (tmp_path / "extensions").write_text("subjectAltName=IP:127.0.0.1\n")
    signed_by = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "extensions")
    openssl("x509", "-req", "-in", "server.csr", *signed_by, "-out", "server.crt")
    monkeypatch.setattr(ssl, "create_default_context", create_strict)
    with FakeKubeApi(tmp_path / "server.crt") as server:
        server.add_node(NODE)
        api = client(server, ca_file=tmp_path / "ca.crt")
        assert api.call("GET", f"{NODES}/{NODE}")["metadata"]["name"] == NODE


def test_renewed_ca_file_is_used_by_the_next_call(
    tmp_path: Path, certificate: Path, kube_api: FakeKubeApi
) -> None:
    kube_api.add_node(NODE)
    ca = make_certificate(tmp_path / "ca.crt")
    os.utime(ca, (1, 1))
    api = drahealth.ApiServer(drahealth.ApiAccess(kube_api.url, ca_file=ca))
    ca.write_bytes(certificate.read_bytes())
    os.utime(ca, (2, 2))
    assert api.call("GET", f"{NODES}/{NODE}")["metadata"]["name"] == NODE


def kubeconfig(
    tmp_path: Path, server: FakeKubeApi, *, cluster: Mapping[str, Any] = {}, user: Mapping[str, Any] = {}
) -> Path:
    return write_kubeconfig(tmp_path / "kubeconfig", server, cluster=cluster, **user)


@pytest.mark.parametrize("source", ["token", "tokenFile"])
def test_kubeconfig_names_server_ca_and_token(tmp_path: Path, kube_api: FakeKubeApi, source: str) -> None:
    kube_api.add_node(NODE)
    (tmp_path / "my-token").write_text("mine")
    path = kubeconfig(tmp_path, kube_api, user={source: {"token": "mine", "tokenFile": "my-token"}[source]})
    for access in (
        drahealth.find_api_access(path),
        drahealth.find_api_access(environ={"KUBECONFIG": f"{path}:/missing"}),
    ):
        drahealth.ApiServer(access).call("GET", f"{NODES}/{NODE}")
        assert kube_api.calls[-1].token == "Bearer mine"
        assert "mine" not in repr(access) or source == "tokenFile"


def test_kubeconfig_in_the_home_directory_is_the_default(tmp_path: Path, kube_api: FakeKubeApi) -> None:
    (tmp_path / ".kube").mkdir()
    kubeconfig(tmp_path, kube_api).rename(tmp_path / ".kube/config")
    assert drahealth.find_api_access(environ={"HOME": str(tmp_path)}).url == kube_api.url
    with pytest.raises(drahealth.ConfigError, match="no API server is configured: not in a pod"):
        drahealth.find_api_access(environ={"HOME": "/nonexistent"})


def test_server_name_of_the_kubeconfig_is_verified(tmp_path: Path, kube_api: FakeKubeApi) -> None:
    kube_api.add_node(NODE)
    good = kubeconfig(tmp_path, kube_api, cluster={"tls-server-name": "kube-api"})
    assert drahealth.ApiServer(drahealth.find_api_access(good)).call("GET", f"{NODES}/{NODE}")
    bad = kubeconfig(tmp_path, kube_api, cluster={"tls-server-name": "other"})
    with pytest.raises(drahealth.ApiUnreachableError, match="certificate is not valid for 'other'"):
        drahealth.ApiServer(drahealth.find_api_access(bad)).call("GET", f"{NODES}/{NODE}")
    unverified = {"certificate-authority-data": None, "insecure-skip-tls-verify": True}
    insecure = kubeconfig(tmp_path, kube_api, cluster=unverified)
    assert drahealth.ApiServer(drahealth.find_api_access(insecure)).call("GET", f"{NODES}/{NODE}")


def test_client_certificate_of_the_kubeconfig_is_sent(
    tmp_path: Path, certificate: Path, kube_api: FakeKubeApi
) -> None:
    kube_api.add_node(NODE)
    context = kube_api._server.socket.context  # type: ignore[attr-defined]
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(certificate)
    path = f"{NODES}/{NODE}"
    data = {
        "client-certificate-data": base64.b64encode(certificate.read_bytes()).decode(),
        "client-key": str(certificate.with_suffix(".key")),
    }
    access = drahealth.find_api_access(kubeconfig(tmp_path, kube_api, user=data))
    assert drahealth.ApiServer(access).call("GET", path)["metadata"]["name"] == NODE
    with pytest.raises(drahealth.ApiUnreachableError):
        drahealth.ApiServer(drahealth.find_api_access(kubeconfig(tmp_path, kube_api))).call("GET", path)
    half = kubeconfig(tmp_path, kube_api, user={"client-key": str(certificate.with_suffix(".key"))})
    with pytest.raises(drahealth.ConfigError, match="only one of client-certificate and client-key is given"):
        drahealth.find_api_access(half)


@pytest.mark.parametrize("suffix", ["", "-data"])
def test_client_key_with_a_passphrase_is_refused_without_a_prompt(
    tmp_path: Path, certificate: Path, kube_api: FakeKubeApi, suffix: str
) -> None:
    key = tmp_path / "client.key"
    command = ["openssl", "pkcs8", "-topk8", "-passout", "pass:x", "-in", certificate.with_suffix(".key")]
    subprocess.run([*command, "-out", key], check=True, capture_output=True)
    files = {"client-certificate": certificate, "client-key": key}
    user = {
        f"{name}{suffix}": base64.b64encode(file.read_bytes()).decode() if suffix else str(file)
        for name, file in files.items()
    }
    access = drahealth.find_api_access(kubeconfig(tmp_path, kube_api, user=user))
    with pytest.raises(drahealth.ConfigError, match="the client's key has a passphrase; remove it"):
        drahealth.ApiServer(access)


def test_renewed_client_certificate_is_used_by_the_next_call(
    tmp_path: Path, certificate: Path, kube_api: FakeKubeApi
) -> None:
    kube_api.add_node(NODE)
    context = kube_api._server.socket.context  # type: ignore[attr-defined]
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(certificate)
    expired = make_certificate(tmp_path / "client.crt")
    for file in (expired, expired.with_suffix(".key")):
        os.utime(file, (1, 1))
    user = {"client-certificate": "client.crt", "client-key": "client.key"}
    api = drahealth.ApiServer(drahealth.find_api_access(kubeconfig(tmp_path, kube_api, user=user)))
    with pytest.raises(drahealth.ApiUnreachableError):
        api.call("GET", f"{NODES}/{NODE}")
    expired.write_bytes(certificate.read_bytes())
    with pytest.raises(drahealth.ApiUnreachableError):  # the key is not replaced yet
        api.call("GET", f"{NODES}/{NODE}")
    expired.with_suffix(".key").write_bytes(certificate.with_suffix(".key").read_bytes())
    assert api.call("GET", f"{NODES}/{NODE}")["metadata"]["name"] == NODE


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://[fd00::1]", ("fd00::1", 443)),
        ("http://[::1]", ("::1", 80)),
        ("https://[::1]:6443", ("::1", 6443)),
        ("https://kube-api", ("kube-api", 443)),
    ],
)
def test_url_without_a_port_has_that_of_its_scheme(url: str, expected: tuple[str, int]) -> None:
    connection = drahealth.ApiServer(drahealth.ApiAccess(url))._connect()
    assert (connection.host, connection.port) == expected


def test_damaged_token_file_is_an_unreachable_api_server(tmp_path: Path, kube_api: FakeKubeApi) -> None:
    token = tmp_path / "token"
    token.write_bytes(b"\xff\xfe")
    with pytest.raises(drahealth.ApiUnreachableError):
        client(kube_api, token_file=token).call("GET", f"{NODES}/{NODE}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "is not a kubeconfig"),
        ("{", "is not JSON"),
        ("a: [", "line 2, column 1: while parsing"),
        ("{}", "current-context: is missing"),
        ('{"current-context": "x"}', "contexts: has no context named 'x'"),
    ],
)
def test_unusable_kubeconfig_is_an_operator_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(drahealth.ConfigError, match=message) as caught:
        drahealth.find_api_access(path)
    assert str(caught.value).startswith(f"kubeconfig {path}: ")


def test_ca_data_with_a_comment_in_another_script_are_used(
    tmp_path: Path, certificate: Path, kube_api: FakeKubeApi
) -> None:
    kube_api.add_node(NODE)
    data = "# Főtanúsítvány\n".encode() + certificate.read_bytes()
    cluster = {"certificate-authority-data": base64.b64encode(data).decode()}
    access = drahealth.find_api_access(kubeconfig(tmp_path, kube_api, cluster=cluster))
    assert drahealth.ApiServer(access).call("GET", f"{NODES}/{NODE}")["metadata"]["name"] == NODE
    cluster = {"certificate-authority-data": base64.b64encode(b"\xff").decode()}
    access = drahealth.find_api_access(kubeconfig(tmp_path, kube_api, cluster=cluster))
    with pytest.raises(drahealth.ConfigError, match="certificates cannot be used: "):
        drahealth.ApiServer(access)


def test_unsupported_credentials_are_named(tmp_path: Path, kube_api: FakeKubeApi) -> None:
    path = kubeconfig(tmp_path, kube_api, user={"exec": {"command": "aws"}})
    with pytest.raises(
        drahealth.ConfigError, match=r"user 'u': exec: .* use a tokenFile or a client certificate"
    ):
        drahealth.find_api_access(path)


@pytest.mark.parametrize("url", ["", "10.0.0.1:6443", "ftp://host", "https://", "https://host:port"])
def test_invalid_url_is_an_operator_error(url: str) -> None:
    with pytest.raises(drahealth.ConfigError, match="is not a URL of an API server"):
        drahealth.ApiAccess(url)


def test_error_texts_have_no_password_of_the_url() -> None:
    with pytest.raises(drahealth.ConfigError, match=r"^'\.\.\.@host' is not a URL"):
        drahealth.ApiAccess("ftp://user:s3/cret@host")
    api = drahealth.ApiServer(drahealth.ApiAccess("http://user:s3cret@127.0.0.1:1/path"))
    assert api.url == "...@127.0.0.1:1/path"
    with pytest.raises(drahealth.ApiUnreachableError) as raised:
        api.call("GET", "/version")
    assert "s3cret" not in str(raised.value)


def test_missing_ca_file_is_an_operator_error() -> None:
    access = drahealth.ApiAccess("https://127.0.0.1:1", ca_file="/missing/ca.crt")
    with pytest.raises(drahealth.ConfigError, match=r"certificates cannot be used: .*No such file"):
        drahealth.ApiServer(access)


@pytest.mark.parametrize("key", ["ca_file", "client_certificate_files", "token_file"])
def test_pipe_in_place_of_credentials_is_refused(key: str, tmp_path: Path, kube_api: FakeKubeApi) -> None:
    """An open of the pipe would wait for a writer."""
    os.mkfifo(tmp_path / "fifo")
    value = (tmp_path / "fifo",) * 2 if key == "client_certificate_files" else tmp_path / "fifo"
    with pytest.raises((drahealth.ConfigError, OSError), match=r"is not a regular file: '.*/fifo'"):
        client(kube_api, **{key: value}).call("GET", f"{NODES}/{NODE}")


# --- claims and errors -----------------------------------------------------------------------------------


def test_claim_is_read_by_its_name(kube_api: FakeKubeApi) -> None:
    kube_api.add_claim(CLAIM)
    claim = drahealth.ClaimReader(client(kube_api), DRIVER)(REF)
    assert (claim.ref, [device.device for device in claim.devices]) == (REF, ["card-0"])
    assert [call.target for call in kube_api.calls] == ["/apis/resource.k8s.io", CLAIM_PATH]


def test_missing_or_recreated_claim_is_transient(kube_api: FakeKubeApi) -> None:
    read = drahealth.ClaimReader(client(kube_api), DRIVER)
    with pytest.raises(drahealth.TransientError) as caught:
        read(REF)
    assert caught.value.code == "claim.not_found"
    kube_api.add_claim(CLAIM)
    with pytest.raises(drahealth.TransientError) as caught:
        read(REF._replace(uid="uid-2"))
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
    kube_api: FakeKubeApi, status: int, reason: str, code: str, error_class: drahealth.ErrorClass
) -> None:
    api = client(kube_api)
    api.dra_version()
    kube_api.refuse = lambda call: Refusal(status, reason, f"{reason} it is")
    with pytest.raises(drahealth.ApiError, match=f"{status} {reason}: .*{reason} it is") as caught:
        drahealth.ClaimReader(api, DRIVER)(REF)
    assert (caught.value.status, caught.value.reason) == (status, reason)
    verdict = classify(caught.value, PrepareContext(drahealth.Claim(*REF)))
    assert (verdict.code, verdict.error_class) == (code, error_class)
    assert verdict.summary == f"API server: {status} {reason}: {reason} it is"


def test_forbidden_call_names_the_verb_and_the_resource(kube_api: FakeKubeApi) -> None:
    kube_api.refuse = forbid("GET", "resourceclaims")
    with pytest.raises(drahealth.ApiForbiddenError) as caught:
        drahealth.ClaimReader(client(kube_api), DRIVER)(REF)
    assert (caught.value.verb, caught.value.resource) == ("get", "resourceclaims.resource.k8s.io")
    assert str(caught.value) == (
        '403 Forbidden: get of resourceclaims.resource.k8s.io: User "driver" cannot get resource '
        '"resourceclaims.resource.k8s.io"; check that the role has this verb'
    )


def test_forbidden_apply_names_the_verb_that_the_role_lacks(kube_api: FakeKubeApi) -> None:
    lacking = 'User "driver" cannot create resource "things" in API group "g.io" at the cluster scope'
    kube_api.refuse = lambda call: Refusal(403, "Forbidden", lacking)
    with pytest.raises(drahealth.ApiForbiddenError, match="403 Forbidden: create of things") as caught:
        client(kube_api).apply("/apis/g.io/v1/things/a", {"kind": "Thing"}, manager="m")
    assert caught.value.verb == "create"


def test_refusal_by_a_webhook_has_no_advice_about_the_role(kube_api: FakeKubeApi) -> None:
    refusal = 'admission webhook "w" denied the request: containers cannot run as root'
    kube_api.refuse = lambda call: Refusal(403, "Forbidden", refusal)
    with pytest.raises(drahealth.ApiForbiddenError) as caught:
        client(kube_api).call("POST", "/api/v1/namespaces/a/events", {})
    assert str(caught.value) == f"403 Forbidden: create of events: {refusal}"


def test_error_of_several_lines_is_one_line(kube_api: FakeKubeApi) -> None:
    kube_api.refuse = lambda call: Refusal(409, "Conflict", "1 conflict:\n- .spec\n")
    with pytest.raises(drahealth.ApiError) as caught:
        client(kube_api).call("GET", "/api/v1/nodes/n")
    assert str(caught.value) == "409 Conflict: 1 conflict: - .spec"


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/api/v1/nodes/n", ("get", "nodes")),
        ("GET", "/api/v1/namespaces/a", ("get", "namespaces")),
        ("GET", "/api/v1/namespaces", ("list", "namespaces")),
        ("GET", "/api/v1/namespaces/a/pods?limit=5", ("list", "pods")),
        ("GET", "/apis/g.io/v1/things?watch=true&limit=5", ("watch", "things.g.io")),
        ("POST", "/apis/g.io/v1/things", ("create", "things.g.io")),
        ("PUT", "/apis/g.io/v1/namespaces/a/things/b/status", ("update", "things/status.g.io")),
        ("DELETE", "/apis/g.io/v1/things/b", ("delete", "things.g.io")),
        ("GET", "/apis/g.io", ("get", "/apis/g.io")),
    ],
)
def test_verb_and_resource_of_a_call_are_those_of_a_role(
    method: str, path: str, expected: tuple[str, str]
) -> None:
    assert verb_and_resource(method, path) == expected


def test_untrusted_api_server_is_unreachable(kube_api: FakeKubeApi) -> None:
    with pytest.raises(drahealth.ApiUnreachableError, match="self-signed certificate") as caught:
        drahealth.ApiServer(drahealth.ApiAccess(kube_api.url)).call("GET", "/api")
    assert isinstance(caught.value.__cause__, ssl.SSLCertVerificationError)
    assert not kube_api.calls


def test_unreachable_api_server_is_a_transient_failure() -> None:
    with socket.socket() as reserved:  # not listening, so that no other program gets the port
        reserved.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        with pytest.raises(drahealth.ApiUnreachableError, match=f"{url}: Connection refused") as caught:
            drahealth.ClaimReader(drahealth.ApiServer(drahealth.ApiAccess(url)), DRIVER)(REF)
    mark = recorded_operation(caught.value)
    assert mark is not None
    assert mark.operation is drahealth.Operation.API
    verdict = classify(caught.value, PrepareContext(drahealth.Claim(*REF)))
    assert (verdict.code, verdict.error_class) == ("api.unreachable", drahealth.ErrorClass.TRANSIENT)
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)
    assert caught.value.__cause__.errno == errno.ECONNREFUSED


def test_answer_of_another_server_is_no_api_server(kube_api: FakeKubeApi) -> None:
    kube_api.get = lambda path: ["no object"]  # type: ignore[assignment, return-value, method-assign]
    with pytest.raises(drahealth.ApiUnreachableError, match=r"is no object, but b'.*is this an API server"):
        client(kube_api).call("GET", "/healthz")


# --- versions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("served", "expected"),
    [(("v1", "v1beta2"), "v1"), (("v1beta1", "v1beta2", "v9"), "v1beta2"), (("v1beta1",), "v1beta1")],
)
def test_best_served_version_is_used(kube_api: FakeKubeApi, served: tuple[str, ...], expected: str) -> None:
    kube_api.versions = served
    kube_api.add_claim(CLAIM | {"apiVersion": f"resource.k8s.io/{expected}"})
    assert drahealth.ClaimReader(client(kube_api), DRIVER)(REF).ref == REF
    assert f"/{expected}/" in kube_api.calls[-1].target


def test_version_is_read_again_after_an_update_of_the_cluster(kube_api: FakeKubeApi) -> None:
    kube_api.versions = ("v1beta1",)
    kube_api.add_claim(CLAIM)
    read = drahealth.ClaimReader(client(kube_api), DRIVER)
    read(REF)
    kube_api.versions = ("v1",)
    with pytest.raises(drahealth.TransientError, match="has no claim"):
        read(REF)
    assert read(REF).ref == REF


def test_cluster_without_claims_is_named(kube_api: FakeKubeApi) -> None:
    kube_api.versions = ()
    with pytest.raises(drahealth.ApiError, match=r"serves none of resource\.k8s\.io"):
        client(kube_api).dra_version()
    with pytest.raises(drahealth.ApiError) as caught:
        drahealth.ClaimReader(client(kube_api), DRIVER)(REF)
    verdict = classify(caught.value, PrepareContext(drahealth.Claim(*REF)))
    assert verdict.code == "api.5xx"


def test_closed_discovery_means_the_newest_version(kube_api: FakeKubeApi) -> None:
    kube_api.refuse = lambda call: Refusal(403, "Forbidden", "no") if call.target.endswith("k8s.io") else None
    assert client(kube_api).dra_version() == "v1"


# --- lists and watches ------------------------------------------------------------------------------------


def test_list_has_the_objects_of_all_pages(kube_api: FakeKubeApi) -> None:
    item = {"metadata": {"name": "n", "resourceVersion": "1"}}
    pages = {
        "": {"kind": "NodeList", "apiVersion": "v1", "metadata": {"continue": "next"}, "items": [item]},
        "next": {"kind": "NodeList", "apiVersion": "v1", "metadata": {"resourceVersion": "7"}, "items": None},
    }
    kube_api.all_of = lambda path, selector: pages[  # type: ignore[method-assign]
        "next" if "continue=next" in kube_api.calls[-1].target else ""
    ]
    found = client(kube_api).list_objects(NODES)
    assert found.items == [{"kind": "Node", "apiVersion": "v1", **item}]
    assert found.resource_version == "7"


@pytest.mark.parametrize(
    "garbage",
    [
        {},
        {"kind": "Status", "metadata": {}},
        {"kind": "NodeList", "metadata": None, "items": []},
        {"kind": "NodeList", "items": {"a": "b"}},
        {"kind": "NodeList", "items": [1]},
        {"kind": "NodeList", "items": [{"metadata": {"name": "n"}}]},
    ],
)
def test_list_of_another_program_is_not_an_empty_list(kube_api: FakeKubeApi, garbage: dict[str, Any]) -> None:
    kube_api.garbage = garbage
    with pytest.raises(drahealth.ApiUnreachableError, match="is this an API server"):
        client(kube_api).list_objects(NODES)


@pytest.mark.parametrize(("asked_s", "expected"), [(45.0, 45.0), (1e9, RETRY_AFTER_MAX_S)])
def test_retry_after_of_the_api_server_delays_a_watch(asked_s: float, expected: float) -> None:
    waits: list[float | None] = []

    class Closed(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            self.set()
            return True

    class BusyServer:
        url = "https://127.0.0.1:1"

        def list_objects(self, path: str, field_selector: str = "") -> ObjectList:
            raise drahealth.ApiError(429, "TooManyRequests", "", retry_after_s=asked_s)

        def open_stream(self, path: str) -> OpenStream:
            raise NotImplementedError

    watch = ObjectWatch(BusyServer(), NODES)
    watch._closed = Closed()
    assert list(watch) == []
    assert waits == [expected]


class Follower:
    """Thread that collects the events of a watch as (kind, names)."""

    def __init__(self, watch: ObjectWatch) -> None:
        self.watch = watch
        self.failure: BaseException | None = None
        self._events: SimpleQueue[tuple[str, list[str]]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for event in self.watch:
                names = sorted(obj["metadata"]["name"] for obj in event.objects)
                self._events.put((str(event.kind), names))
        except drahealth.DrahealthError as error:
            self.failure = error

    def next(self) -> tuple[str, list[str]]:
        return self._events.get(timeout=PATIENCE_S)

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def follower(kube_api: FakeKubeApi, monkeypatch: pytest.MonkeyPatch) -> Iterator[Follower]:
    monkeypatch.setattr("agent.serve.kube_api.object_watch.RETRY_S", 0.01)
    kube_api.add_node("a")
    follower = Follower(client(kube_api).watch(NODES))
    assert follower.next() == ("listed", ["a"])
    yield follower
    follower.watch.close()
    follower.join()


def streams(server: FakeKubeApi) -> list[str]:
    return [call.target for call in server.calls if "watch=true" in call.target]


def test_watch_lists_and_then_yields_changes(kube_api: FakeKubeApi, follower: Follower) -> None:
    kube_api.add_node("b")
    assert follower.next() == ("changed", ["b"])
    kube_api.delete(f"{NODES}/a", {})
    assert follower.next() == ("deleted", ["a"])


def test_interrupted_watch_resumes_without_a_second_list(kube_api: FakeKubeApi, follower: Follower) -> None:
    eventually(lambda: len(streams(kube_api)) == 1, "first stream")
    kube_api.add_node("b")
    assert follower.next() == ("changed", ["b"])
    kube_api.break_streams()
    kube_api.add_node("c")
    assert follower.next() == ("changed", ["c"])
    assert "resourceVersion=2" in streams(kube_api)[-1]


def test_expired_watch_lists_again(kube_api: FakeKubeApi, follower: Follower) -> None:
    eventually(lambda: len(streams(kube_api)) == 1, "first stream")
    kube_api.refuse = lambda call: Refusal(503, "ServiceUnavailable", "no list before b is in it")
    kube_api.oldest = 2  # applies also to the first stream, if it is not open yet
    kube_api.break_streams()
    kube_api.add_node("b")
    kube_api.refuse = lambda call: None
    assert follower.next() == ("listed", ["a", "b"])


def test_bookmark_moves_the_version_of_a_watch(
    kube_api: FakeKubeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.serve.kube_api.object_watch.RETRY_S", 0.01)
    bookmark = {"type": "BOOKMARK", "object": {"kind": "Node", "metadata": {"resourceVersion": "41"}}}
    kube_api.watch = lambda path, selector, query: iter(  # type: ignore[method-assign]
        [json.dumps(bookmark).encode() + b"\n"]
    )
    follower = Follower(client(kube_api).watch(NODES))
    eventually(lambda: any("resourceVersion=41" in target for target in streams(kube_api)), "resumption")
    follower.watch.close()
    follower.join()


def test_watch_continues_on_a_connection_that_the_server_will_close(
    kube_api: FakeKubeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy announces that it will close the connection, which then releases its socket."""
    handler = kube_api._server.RequestHandlerClass
    monkeypatch.setattr(handler, "protocol_version", "HTTP/1.0")
    kube_api.add_node("a")
    follower = Follower(client(kube_api).watch(NODES))
    assert follower.next() == ("listed", ["a"])
    eventually(lambda: len(streams(kube_api)) == 1, "stream")
    follower.watch.close()
    follower.join()
    assert follower.failure is None


def test_closed_watch_ends_while_it_waits(kube_api: FakeKubeApi, follower: Follower) -> None:
    eventually(lambda: len(streams(kube_api)) == 1, "stream")
    follower.watch.close()
    follower.join()
    assert follower.failure is None


def test_forbidden_watch_ends_with_the_missing_verb(kube_api: FakeKubeApi) -> None:
    kube_api.refuse = forbid("GET", "watch=true")
    follower = Follower(client(kube_api).watch(NODES))
    follower.join()
    assert isinstance(follower.failure, drahealth.ApiForbiddenError)
    assert (follower.failure.verb, follower.failure.resource) == ("watch", "nodes")


def test_unreachable_server_is_tried_until_it_answers(
    kube_api: FakeKubeApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agent.serve.kube_api.object_watch.RETRY_S", 0.01)
    kube_api.refuse = lambda call: Refusal(503, "ServiceUnavailable", "starting")
    follower = Follower(client(kube_api).watch(NODES))
    eventually(lambda: len(kube_api.calls) > 2, "several attempts")
    kube_api.add_node("a")
    kube_api.refuse = lambda call: None
    assert follower.next() == ("listed", ["a"])
    follower.watch.close()
    follower.join()
    texts = [
        record.getMessage() for record in caplog.records if record.name.startswith("agent.serve.kube_api.")
    ]
    assert texts == ["watch of /api/v1/nodes: interrupted: 503 ServiceUnavailable: starting; will resume"]


class PauseRecorder(threading.Event):
    """Flag of a closed watch that records the pauses and ends the watch after some."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.pauses: list[float] = []
        self._count = count

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout or 0.0)
        if len(self.pauses) == self._count:
            self.set()
        return self.is_set()


@pytest.mark.parametrize(("lasting_s", "longest_s"), [(300.0, 1.5), (0.1, 45.0)])
def test_pauses_of_a_quiet_watch_grow_only_after_short_streams(
    kube_api: FakeKubeApi, monkeypatch: pytest.MonkeyPatch, lasting_s: float, longest_s: float
) -> None:
    clock = itertools.count(0.0, lasting_s)
    kube_api.watch = lambda path, selector, query: iter(())  # type: ignore[method-assign]
    watch = ObjectWatch(client(kube_api), NODES, clock=lambda: next(clock))
    recorder = watch._closed = PauseRecorder(8)
    assert [event.kind for event in watch] == ["listed"]
    assert max(recorder.pauses) <= longest_s
    assert (max(recorder.pauses) > 10.0) == (longest_s > 10.0)
