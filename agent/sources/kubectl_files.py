"""Reader of pods and ResourceClaims in a file that kubectl wrote, in JSON or YAML.

A file holds a List, one object, or a raw list of the API server; YAML may have several documents.
agent.devices.consumers.kube_objects interprets the objects.

The module also has the reader of kubeconfig files, which name API servers and their credentials.

Tokens and certificates are the supported kinds of credentials. A program that returns credentials (``exec``)
is not run, and a password is not sent: API servers have refused passwords since Kubernetes 1.19.
"""

import base64
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from agent.config.api_access import ApiAccess, pod_access
from agent.errors import ConfigError, PermissionDeniedError, UsageError
from agent.model.claim_sources import Origin, Provenance, SourceAnswer
from agent.model.json_values import JsonObject, get_mapping, get_mappings, get_text
from agent.model.time import Instant
from agent.system.files import FileContent, ReadError, StrPath, as_path, read_bounded

FILE_BYTES: Final = 256 << 20
"""Largest accepted file [bytes]: 5,000 complete pod objects are about 100 MiB."""
POD: Final = "Pod"
CLAIM: Final = "ResourceClaim"
_ORIGINS: Final = {POD: Origin.PODS_FILE, CLAIM: Origin.CLAIMS_FILE}
_GROUPS: Final = {POD: "v1", CLAIM: "resource.k8s.io/"}
_COMMANDS: Final = {POD: "kubectl get pods -A -o json", CLAIM: "kubectl get resourceclaims -A -o json"}


def read_objects(path: Path, kind: str, now: Instant) -> SourceAnswer[JsonObject]:
    """Read a file and parse its Kubernetes objects of one kind.

    Raises the errors of :func:`parse_object_file`.
    """
    return parse_object_file(path, read_object_file(path), kind, now)


def read_object_file(path: Path) -> FileContent:
    """Return the whole content of a file, at most FILE_BYTES. Blocks on the disk, or on the writer of a pipe.

    Raises:
        UsageError: The file is absent or unreadable.
        PermissionDeniedError: This user may not read the file.
    """
    try:
        return read_bounded(path, FILE_BYTES, is_input=True)
    except ReadError as error:
        raise (PermissionDeniedError if error.is_forbidden else UsageError)(str(error)) from None


class ObjectFileContent(NamedTuple):
    """Objects that a file from kubectl holds: those of the expected kind, and the others."""

    answer: SourceAnswer[JsonObject]
    others: tuple[tuple[JsonObject, str], ...]
    """Objects of all other kinds in the file, each with its kind."""


def parse_object_file(path: Path, content: FileContent, kind: str, now: Instant) -> SourceAnswer[JsonObject]:
    """Parse the Kubernetes objects of one kind in a file; objects of other kinds are ignored.

    Arguments and errors as :func:`parse_mixed_object_file`.
    """
    return parse_mixed_object_file(path, content, kind, now).answer


def parse_mixed_object_file(path: Path, content: FileContent, kind: str, now: Instant) -> ObjectFileContent:
    """Parse the Kubernetes objects in a file: those of one kind, and the others. 1,000 pods in YAML take 1 s.

    Args:
        path: Path of the file.
        content: Content of the file; its modification time is the age of the objects.
        kind: :data:`POD` or :data:`CLAIM`.
        now: Time of the read.

    Raises:
        UsageError: The file is neither JSON nor YAML, or holds only objects of other kinds.
    """
    try:
        objects = tuple(_typed_objects(content.data))
    except ValueError as error:
        raise UsageError(f"file {path}: {error}; create it with: {_COMMANDS[kind]}") from None
    found = tuple(obj for obj, its_kind in objects if its_kind == kind)
    others = tuple(pair for pair in objects if pair[1] != kind)
    if others and not found:
        counts = Counter(other[:64] or "without a kind" for _, other in others)
        held = ", ".join(f"{count} {other}" for other, count in sorted(counts.items()))
        raise UsageError(f"file {path}: holds no {kind}, but {held}; create it with: {_COMMANDS[kind]}")
    return ObjectFileContent(SourceAnswer(Provenance(_ORIGINS[kind], now, content.written_s), found), others)


def _typed_objects(data: bytes) -> Iterator[tuple[JsonObject, str]]:
    """Yield the Kubernetes objects in a JSON or YAML text, each with its kind."""
    for document in parse_documents(data):
        yield from _items(document)


def parse_all_objects(data: bytes) -> tuple[JsonObject, ...]:
    """Return the Kubernetes objects of all kinds in a JSON or YAML text.

    Raises ValueError if the text is neither, or holds no objects.
    """
    return tuple({"kind": kind, **obj} for obj, kind in _typed_objects(data))


def parse_documents(data: bytes) -> Sequence[object]:
    """Parse a text as one JSON document, or as YAML documents; empty documents are left out.

    Raises:
        ValueError: The data is neither JSON nor YAML, or holds no document.
    """
    text = data.removeprefix(b"\xef\xbb\xbf")
    if text.lstrip()[:1] not in {b"{", b"["}:  # kubectl's YAML never begins so
        from agent.sources.yaml_text import parse_yaml

        if documents := [document for document in parse_yaml(text) if document is not None]:
            return documents
        raise ValueError("is empty")
    try:
        return [msgspec.json.decode(text)]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("is not readable JSON: objects are nested too deeply") from None


def _items(document: object) -> Iterable[tuple[JsonObject, str]]:
    """Yield the Kubernetes objects of a document (one object, or a list), each with its kind.

    Objects of a raw list take the kind from the list.
    """
    items: object = document
    default = ""
    if isinstance(document, dict):
        kind = str(document.get("kind"))
        if not kind.endswith("List"):
            items = [document]
        else:
            items, default = document.get("items"), kind.removesuffix("List")
            items = [] if items is None else items
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError("holds neither an object nor a list of objects")
    for item in items:
        yield item, _kind(item, default)


def _kind(obj: JsonObject, default: str) -> str:
    """Return the kind of a Kubernetes object.

    ``Pod of example.com/v1`` if the kind belongs to another API group than expected.

    Args:
        default: Kind of an object that names none.
    """
    kind, version = obj.get("kind", default), obj.get("apiVersion")
    kind = kind if isinstance(kind, str) else ""
    group = _GROUPS.get(kind)
    if group is None or version is None or str(version).startswith(group):
        return kind
    return f"{kind} of {version}"


KUBECONFIG_BYTES: Final = 1 << 20

# --- kubeconfig --------------------------------------------------------------------------------------------

DEFAULT_FILE: Final = Path(".kube/config")
"""Path of the kubeconfig below the home directory that kubectl reads without a flag or variable."""
UNSUPPORTED: Final = {
    "exec": "a program for credentials",
    "auth-provider": "an authentication provider",
    "username": "a password",
}
"""Kinds of credentials that are refused, by their key in a kubeconfig's user."""


def find_api_access(kubeconfig: StrPath | None = None, environ: Mapping[str, str] = os.environ) -> ApiAccess:
    """Return the access to the API server of the pod's cluster, or of the current context of a kubeconfig.

    Args:
        kubeconfig: A kubeconfig file; None: in a pod its service account, elsewhere the first file of
            ``$KUBECONFIG``, or ``~/.kube/config``.
        environ: Environment variables; replaced in tests.

    Raises:
        ConfigError: The file is missing or cannot be used, or no access is configured.
        PermissionDeniedError: This user may not read the file.
    """
    if (path := as_path("kubeconfig", kubeconfig)) is not None:
        return read_kubeconfig(path)
    if (access := pod_access(environ)) is not None:
        return access
    first, *_ = [name for name in environ.get("KUBECONFIG", "").split(os.pathsep) if name] or [""]
    default = Path(environ.get("HOME", "")) / DEFAULT_FILE
    if first or default.exists():
        return read_kubeconfig(Path(first) if first else default)
    raise ConfigError(
        "no API server is configured: not in a pod (KUBERNETES_SERVICE_HOST and _PORT are not set), "
        f"KUBECONFIG is not set, and {default} does not exist"
    )


def read_kubeconfig(path: Path) -> ApiAccess:
    """Read the access of the current context of a kubeconfig file. Blocks on the disk.

    Raises:
        ConfigError: The file is missing, is not a kubeconfig, or has a kind of credentials that is not known.
        PermissionDeniedError: This user may not read the file.
    """
    try:
        data = read_bounded(path, KUBECONFIG_BYTES).data
    except ReadError as error:
        raise (PermissionDeniedError if error.is_forbidden else ConfigError)(str(error)) from None
    try:
        return _access(_only_document(data), path.parent)
    except ValueError as error:  # also a ConfigError on the URL
        raise ConfigError(f"kubeconfig {path}: {error}") from None


def _only_document(data: bytes) -> JsonObject:
    documents = parse_documents(data)
    if len(documents) != 1 or not isinstance(documents[0], Mapping):
        raise ValueError("the file is not a kubeconfig: it must have one YAML document, a mapping")
    return documents[0]


def _access(config: JsonObject, directory: Path) -> ApiAccess:
    name = get_text(config, "current-context", "")
    if not name:
        raise ValueError("current-context: is missing; choose one with: kubectl config use-context NAME")
    context = _find_named(config, "contexts", "context", name)
    cluster = _find_named(config, "clusters", "cluster", get_text(context, "cluster", "context"))
    user_name = get_text(context, "user", "context")
    user = _find_named(config, "users", "user", user_name) if user_name else {}
    for key, kind in UNSUPPORTED.items():
        if user.get(key):
            raise ValueError(
                f"user {user_name!r}: {key}: {kind} is not supported; use a tokenFile or a client certificate"
            )
    if cluster.get("proxy-url"):
        raise ValueError("cluster: proxy-url: is not supported; use the API server's own address")
    ca_file = get_text(cluster, "certificate-authority", "cluster")
    token_file = get_text(user, "tokenFile", "user")
    certificate, files = _client_certificate(user, directory)
    return ApiAccess(
        get_text(cluster, "server", "cluster"),
        ca_file=directory / ca_file if ca_file else None,
        ca_data=_decode_field(cluster, "certificate-authority-data").decode("ascii", "backslashreplace"),
        token_file=directory / token_file if token_file else None,
        token=get_text(user, "token", "user"),
        client_certificate=certificate,
        client_certificate_files=files,
        server_name=get_text(cluster, "tls-server-name", "cluster"),
        insecure=cluster.get("insecure-skip-tls-verify") is True,
    )


def _find_named(config: JsonObject, section: str, key: str, name: str) -> JsonObject:
    """Return a named entry in a section of a kubeconfig.

    Args:
        section: ``clusters``, ``users`` or ``contexts``.
        key: Key of the entry's content: ``cluster``, ``user`` or ``context``.
    """
    entries: Sequence[JsonObject] = get_mappings(config, section, "")
    for entry in entries:
        if entry.get("name") == name:
            return get_mapping(entry, key, section)
    raise ValueError(f"section {section}: has no {key} named {name!r}")


def _decode_field(parent: JsonObject, key: str) -> bytes:
    try:
        return base64.b64decode(get_text(parent, key, ""), validate=True)
    except ValueError:
        raise ValueError(f"key {key}: the value is not base64") from None


def _client_certificate(user: JsonObject, directory: Path) -> tuple[bytes, tuple[Path, ...]]:
    """Return the client certificate and key of a kubeconfig's user: as PEM, or as the paths of two files.

    Both results are empty if the user has no certificate.

    Files are returned by name, so that the client of the API server reads them again after a rotation.

    Data in the kubeconfig take precedence over files, as in kubectl.

    Args:
        directory: Directory of the kubeconfig, to which the paths of files are relative.
    """
    parts, files = [], []
    for key in ("client-certificate", "client-key"):
        part = _decode_field(user, f"{key}-data")
        if not part and (name := get_text(user, key, "user")):
            try:
                part = read_bounded(directory / name, KUBECONFIG_BYTES).data
                files.append(directory / name)
            except ReadError as error:
                raise ValueError(f"user: {key}: {error}") from None
        parts.append(part)
    if any(parts) and not all(parts):
        raise ValueError("user: only one of client-certificate and client-key is given; set both")
    if len(files) == len(parts):
        return b"", tuple(files)
    return b"\n".join(parts) if all(parts) else b"", ()
