"""Reader of kubeconfig files, which name API servers and their credentials.

Of the kinds of credentials it knows tokens and certificates. A program that returns credentials (``exec``) is
not run, and a password is not sent: API servers have refused passwords since Kubernetes 1.19.
"""

import base64
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from agent.config.api_access import ApiAccess, pod_access
from agent.errors import ConfigError, PermissionDeniedError
from agent.model.json_values import JsonObject, get_mapping, get_mappings, get_text
from agent.sources.kube_object_file import parse_documents
from agent.system.files import ReadError, read_bounded
from agent.system.paths import StrPath, as_path

FILE_BYTES: Final = 1 << 20
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
        data = read_bounded(path, FILE_BYTES).data
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
    context = _named(config, "contexts", "context", name)
    cluster = _named(config, "clusters", "cluster", get_text(context, "cluster", "context"))
    user_name = get_text(context, "user", "context")
    user = _named(config, "users", "user", user_name) if user_name else {}
    for key, kind in UNSUPPORTED.items():
        if user.get(key):
            raise ValueError(
                f"user {user_name!r}: {key}: {kind} is not supported; use a token: kubectl create token"
            )
    if cluster.get("proxy-url"):
        raise ValueError("cluster: proxy-url: is not supported; use the API server's own address")
    ca_file = get_text(cluster, "certificate-authority", "cluster")
    token_file = get_text(user, "tokenFile", "user")
    certificate, files = _client_certificate(user, directory)
    return ApiAccess(
        get_text(cluster, "server", "cluster"),
        ca_file=directory / ca_file if ca_file else None,
        ca_data=_decoded(cluster, "certificate-authority-data").decode(),
        token_file=directory / token_file if token_file else None,
        token=get_text(user, "token", "user"),
        client_certificate=certificate,
        client_certificate_files=files,
        server_name=get_text(cluster, "tls-server-name", "cluster"),
        insecure=cluster.get("insecure-skip-tls-verify") is True,
    )


def _named(config: JsonObject, section: str, key: str, name: str) -> JsonObject:
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


def _decoded(parent: JsonObject, key: str) -> bytes:
    try:
        return base64.b64decode(get_text(parent, key, ""), validate=True)
    except ValueError:
        raise ValueError(f"key {key}: the value is not base64") from None


def _client_certificate(user: JsonObject, directory: Path) -> tuple[bytes, tuple[Path, ...]]:
    """Return certificate and key of a kubeconfig's user as PEM, or their two files; empty: it has none.

    Files are returned by name, so that the client of the API server reads them again after a rotation.

    Data in the kubeconfig take precedence over files, as in kubectl.

    Args:
        directory: Directory of the kubeconfig, to which the paths of files are relative.
    """
    parts, files = [], []
    for key in ("client-certificate", "client-key"):
        part = _decoded(user, f"{key}-data")
        if not part and (name := get_text(user, key, "user")):
            try:
                part = read_bounded(directory / name, FILE_BYTES).data
                files.append(directory / name)
            except ReadError as error:
                raise ValueError(f"user: {key}: {error}") from None
        parts.append(part)
    if any(parts) and not all(parts):
        raise ValueError("user: only one of client-certificate and client-key is given; set both")
    if len(files) == len(parts):
        return b"", tuple(files)
    return b"\n".join(parts) if all(parts) else b"", ()
