"""Address and credentials of a Kubernetes API server."""

import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from agent.errors import ConfigError
from agent.system.files import StrPath

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Directory of a pod's service account: its token and the CA of the API server."""


def without_login(url: str) -> str:
    """Return a URL for texts: ``...`` replaces all before the host if there may be a user and a password."""
    login, at, server = url.rpartition("@")
    return f"...{at}{server}" if login else url


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """Address and credentials of an API server. Files are read at each call, because they are rotated.

    Raises:
        ConfigError: The URL cannot be that of an API server.
    """

    url: str
    """``https://host:port``, or ``http://`` for a local proxy."""
    _: KW_ONLY
    ca_file: StrPath | None = None
    """File with the CA certificates of the API server; None: they are in ``ca_data``."""
    ca_data: str = ""
    """CA certificates in PEM; empty, and no ``ca_file``: the CA certificates of this machine are used."""
    token_file: StrPath | None = None
    """File with the bearer token; None: the token is in ``token``."""
    token: str = field(default="", repr=False)
    """Bearer token; empty: no token."""
    client_certificate: bytes = field(default=b"", repr=False)
    """Certificate of the user with its key, in PEM; empty: no certificate."""
    client_certificate_files: tuple[StrPath, ...] = ()
    """Files with the user's certificate and with its key; empty: both are in ``client_certificate``."""
    server_name: str = ""
    """Name in the API server's certificate; empty: the host of the URL."""
    insecure: bool = False
    """Whether the API server's certificate is not verified."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number
            is_valid = False
        if not is_valid:
            raise ConfigError(
                f"{without_login(self.url)!r} is not a URL of an API server, such as https://10.0.0.1:6443"
            ) from None


def pod_access(environ: Mapping[str, str] = os.environ) -> ApiAccess | None:
    """Return the API server's address and the credentials of the pod's service account.

    None: this process does not run in a pod.
    """
    host, port = (environ.get(f"KUBERNETES_SERVICE_{word}", "") for word in ("HOST", "PORT"))
    if not host or not port:
        return None
    address = f"[{host}]" if ":" in host else host
    return ApiAccess(
        f"https://{address}:{port}", ca_file=SERVICE_ACCOUNT / "ca.crt", token_file=SERVICE_ACCOUNT / "token"
    )
