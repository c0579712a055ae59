"""Client of one Kubernetes API server over HTTPS, on the standard library.

Every call opens a connection: a driver makes a few calls for each prepare, and idle connections would outlive
credentials and API servers. All functions block, up to TIMEOUT_S for the connect and for each read; async
programs call them in threads.

The module also has the reader of the ResourceClaims that the kubelet names in a prepare.
"""

import os
import re
import ssl
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from agent.config.api_access import ApiAccess, without_login
from agent.errors import LACKING_VERB, ApiError, ApiForbiddenError, ApiUnreachableError, ConfigError
from agent.model.claim import Claim, ClaimRef
from agent.model.json_values import JsonObject
from agent.model.prepare import Operation
from agent.prepare.claim_parser import parse_claim
from agent.prepare.errors import TransientError, doing
from agent.serve.kube_api.object_watch import ObjectList, ObjectWatch, OpenStream, is_stored
from agent.system.files import StrPath, read_credentials
from agent.version import VERSION

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

TIMEOUT_S: Final = 10.0
"""Timeout of the connect and of each read [s]; the kubelet waits 45 s for a prepare."""
ANSWER_BYTES: Final = 64 << 20
"""Largest accepted answer [bytes]; a page of 500 of the largest objects that etcd usually has is smaller."""
PAGE_OBJECTS: Final = 500
"""Number of objects that one page of a list has."""
DRA_GROUP: Final = "resource.k8s.io"
DRA_VERSIONS: Final = ("v1", "v1beta2", "v1beta1")
"""Versions of the API group ``resource.k8s.io`` that drahealth knows, best first."""
NOT_FOUND: Final = 404
NOT_SERVED: Final = 503
"""HTTP status of the error for an API group that the server lacks; 404 would mean a missing object."""
FORBIDDEN: Final = 403
SERVER_WIDE: Final = frozenset({401, 429, 503, 504})
"""HTTP statuses that concern all calls, not the object of one call: expired credentials, or overload."""

_RESOURCE: Final = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/[^/]+(?:/namespaces/[^/]+(?=/))?/(?P<resource>[^/?]+)"
    r"(?P<name>/[^/?]+)?(?P<part>/[^/?]+)?(?:\?(?P<query>.*))?"
)
_MERGE_PATCH: Final = "application/merge-patch+json"
_APPLY_PATCH: Final = "application/apply-patch+yaml"  # JSON is YAML; apply-patch+json is not in all releases
_VERBS: Final = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class ApiServer:
    """HTTPS client of one Kubernetes API server. Thread-safe.

    Calls block up to 10 s for the connect and for each read.
    """

    def __init__(self, access: ApiAccess) -> None:
        """Create a client; it connects at the first call.

        Raises:
            ConfigError: The CA file or a certificate cannot be used.
        """
        self._access = access
        parts = urlsplit(access.url)
        self._is_tls, self._prefix = parts.scheme == "https", parts.path.rstrip("/")
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._is_tls else 80)  # else http.client takes ::1 as port 1
        self._version = ""
        self.requests = 0
        """Number of requests since the client was created; exact with one thread."""
        self._tls_lock = threading.Lock()
        self._tls: ssl.SSLContext | None = None
        self._tls_files: list[tuple[int, int]] = []
        """Times of the last change and inodes of the files from which the TLS context was made."""
        try:
            self._tls_context()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(f"API server {self.url}: certificates cannot be used: {error}") from error

    @property
    def url(self) -> str:
        """URL of the API server for texts, without a user and password."""
        return without_login(self._access.url)

    # --- calls --------------------------------------------------------------------------------------------

    def call(self, method: str, path: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Call the API server and return the object in its answer.

        Args:
            method: ``GET``, ``POST``, ``PUT``, ``PATCH`` (a merge patch) or ``DELETE``.
            path: Path of the object or list, with its query; see :func:`path_of`.
            body: Object to send; None: no body.

        Raises:
            ApiForbiddenError: The role lacks the verb, or an admission policy denies the object.
            ApiError: Another answer with an error status.
            ApiUnreachableError: The server is unreachable or not trusted, or did not answer in time.
            OSError: The token's file cannot be read.
        """
        return self._call(method, path, body, _MERGE_PATCH if method == "PATCH" else "application/json")

    def apply(
        self, path: str, obj: Mapping[str, object], *, manager: str, force: bool = False
    ) -> dict[str, Any]:
        """Apply an object by server-side apply, and return the object that results.

        Args:
            path: Path of the object, or of its part ``status``; see :func:`path_of`.
            obj: The fields that the manager owns, with ``apiVersion``, ``kind`` and ``metadata.name``. Fields
                that only this manager owned and that are missing now are removed.
            manager: Name of the field manager.
            force: True: take fields over that other managers own. False: such a field is a conflict, 409.

        Raises the errors of :meth:`call`.
        """
        query = urlencode({"fieldManager": manager, "force": str(force).lower()})
        return self._call("PATCH", f"{path}?{query}", obj, _APPLY_PATCH)

    def _call(
        self, method: str, path: str, body: Mapping[str, object] | None, content_type: str
    ) -> dict[str, Any]:
        with doing(Operation.API, path):
            data = b"" if body is None else msgspec.json.encode(body)
            connection = self._open(method, path, data, content_type)
            try:
                return self._receive(connection, method, path)
            finally:
                connection.close()

    def list_objects(self, path: str, field_selector: str = "", label_selector: str = "") -> ObjectList:
        """Return all objects of a list of the API server, read in pages.

        Raises the errors of :meth:`call`.
        """
        items: list[dict[str, Any]] = []
        query = {
            "fieldSelector": field_selector,
            "labelSelector": label_selector,
            "limit": str(PAGE_OBJECTS),
            "continue": "",
        }
        while True:
            chosen = urlencode({key: value for key, value in query.items() if value})
            page = self.call("GET", f"{path}?{chosen}")
            metadata, kind, found = page.get("metadata", {}), str(page["kind"]), page.get("items") or []
            if not kind.endswith("List") or not isinstance(found, list) or not all(map(is_stored, found)):
                raise ApiUnreachableError(
                    f"API server {self.url}: answer to {path} is no list of objects, but of kind {kind}; "
                    "is this an API server?"
                )
            common = {"apiVersion": page.get("apiVersion"), "kind": kind.removesuffix("List")}
            items += [common | item for item in found]  # items of a list lack both
            if not (following := metadata.get("continue")):
                return ObjectList(items, str(metadata.get("resourceVersion", "")))
            query["continue"] = str(following)

    def watch(self, path: str, field_selector: str = "") -> ObjectWatch:
        """Return a watch of the objects of a list, which resumes after interruptions."""
        return ObjectWatch(self, path, field_selector)

    # --- versions of the group resource.k8s.io ------------------------------------------------------------

    def dra_version(self) -> str:
        """Return the best version of ``resource.k8s.io`` that both the API server and drahealth support.

        The version is read at the first call, and again after :meth:`invalidate_dra_version`.

        Raises:
            ApiError: The API server has no known version, or refused the call.
            ApiUnreachableError, OSError: See :meth:`call`.
        """
        if not self._version:
            with doing(Operation.API, f"/apis/{DRA_GROUP}"):
                self._version = self._read_dra_version()
        return self._version

    def _read_dra_version(self) -> str:
        try:
            group = self.call("GET", f"/apis/{DRA_GROUP}")
            served = {version.get("version") for version in group.get("versions") or []}
        except ApiForbiddenError:  # discovery is closed here; v1 is in all supported releases
            return DRA_VERSIONS[0]
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            served = set()
        for version in DRA_VERSIONS:
            if version in served:
                return version
        names = ", ".join(sorted(map(str, served))) or "none"
        raise ApiError(
            NOT_SERVED,
            "NotServed",
            f"the API server serves {names} of {DRA_GROUP}; drahealth needs one of "
            f"{', '.join(DRA_VERSIONS)}: Kubernetes 1.32 or later with DynamicResourceAllocation",
        )

    def invalidate_dra_version(self) -> None:
        """Read the version of ``resource.k8s.io`` again at its next use, after an update of the cluster."""
        self._version = ""

    def dra_path(self, *parts: str) -> str:
        """Return a path in ``resource.k8s.io``, the API group of claims and slices.

        Raises the errors of :meth:`dra_version`.
        """
        return path_of("apis", DRA_GROUP, self.dra_version(), *parts)

    # --- connections ----------------------------------------------------------------------------------------

    def open_stream(self, path: str) -> OpenStream:
        """Return the open answer to a GET whose body has no end; the caller closes it.

        Raises the errors of :meth:`call`.
        """
        with doing(Operation.API, path):
            connection = self._open("GET", path, b"")
            used = connection.sock
            try:
                answer = connection.getresponse()
                refused = answer.read(ANSWER_BYTES) if answer.status != 200 else None
            except (OSError, _protocol_error()) as error:
                connection.close()
                raise self._unreachable_error(error) from error
            if refused is not None:
                connection.close()
                raise _refusal("GET", path, answer, refused)
            return OpenStream(connection, used, answer)

    def _open(
        self, method: str, path: str, data: bytes, content_type: str = "application/json"
    ) -> "HTTPConnection":
        """Connect to the API server and send a request; return the connection for reading the answer."""
        headers = {"Accept": "application/json", "User-Agent": f"drahealth/{VERSION}"}
        file = self._access.token_file
        token = self._access.token if file is None else read_credentials(file).decode(errors="replace")
        if file is not None or token:
            token = token.strip()
            if not (token and token.isascii() and token.isprintable()):  # http.client quotes it in its error
                place = "" if file is None else f" in file {os.fspath(file)}"
                raise ApiUnreachableError(
                    f"API server {self.url}: token{place} is not one line of ASCII text"
                )
            headers["Authorization"] = f"Bearer {token}"
        if data:
            headers["Content-Type"] = content_type
        try:
            self.requests += 1
            connection = self._connect()
            try:
                connection.request(method, self._prefix + path, data or None, headers)
            except BaseException:
                connection.close()
                raise
        except (OSError, ValueError, _protocol_error()) as error:  # ValueError: a certificate in a bad file
            raise self._unreachable_error(error) from error
        return connection

    def _receive(self, connection: "HTTPConnection", method: str, path: str) -> dict[str, Any]:
        try:
            answer = connection.getresponse()
            data = answer.read(ANSWER_BYTES + 1)
        except (OSError, _protocol_error()) as error:
            raise self._unreachable_error(error) from error
        if len(data) > ANSWER_BYTES:
            raise ApiUnreachableError(
                f"API server {self.url}: answer to {path} is more than {ANSWER_BYTES} bytes"
            )
        if not 200 <= answer.status < 300:
            raise _refusal(method, path, answer, data)
        try:
            return _decode_answer(data)
        except ValueError as error:
            raise ApiUnreachableError(
                f"API server {self.url}: answer to {path} is no object, but {data[:64]!r}; "
                "is this an API server?"
            ) from error

    def _connect(self) -> "HTTPConnection":
        from http.client import HTTPConnection, HTTPSConnection

        context = self._tls_context()
        if context is None:
            return HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        if not self._access.server_name:
            return HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=context)
        connection = HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        connection.connect()
        connection.sock = context.wrap_socket(connection.sock, server_hostname=self._access.server_name)
        return connection

    def _tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS context of connections; None: the API server's URL is not HTTPS.

        The context is created again after a file of the CA or of the client certificate has changed.
        """
        if not self._is_tls:
            return None
        access = self._access
        with self._tls_lock:
            states = map(os.stat, _certificate_files(access))
            files = [(state.st_mtime_ns, state.st_ino) for state in states]
            if self._tls is None or files != self._tls_files:
                self._tls, self._tls_files = _make_context(access), files
            return self._tls

    def _unreachable_error(self, error: Exception) -> ApiUnreachableError:
        reason = getattr(error, "verify_message", "") or getattr(error, "strerror", "") or str(error)
        file = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        return ApiUnreachableError(f"API server {self.url}: {file}{reason or type(error).__name__}")


def path_of(*parts: str) -> str:
    """Return a URL path from its parts, each quoted."""
    return "".join(f"/{quote(part, safe='')}" for part in parts)


def metadata_of(obj: dict[str, Any]) -> Any:
    """Return the metadata of an object that the API server has stored.

    Raises:
        ApiUnreachableError: The answer is not such an object, for example because another program sent it.
    """
    if not is_stored(obj):
        raise ApiUnreachableError(
            f"API server: answer of kind {obj.get('kind')} has no name or no version; is this an API server?"
        )
    return obj["metadata"]


def verb_and_resource(method: str, path: str) -> tuple[str, str]:
    """Return verb and resource of a call as they are written in a role.

    Example: ``list`` and ``resourceslices.resource.k8s.io``.
    """
    found = _RESOURCE.fullmatch(path)
    if found is None:
        return method.lower(), path
    group, query = found["group"], found["query"] or ""
    verb = _VERBS.get(method) or ("get" if found["name"] else "watch" if "watch=" in query else "list")
    return verb, f"{found['resource']}{found['part'] or ''}{f'.{group}' if group else ''}"


def _refusal(method: str, path: str, response: "HTTPResponse", data: bytes) -> ApiError:
    """Return the exception for an answer of the API server whose status is not 2xx."""
    status = response.status
    try:
        answer: JsonObject = _decode_object(data)
    except ValueError:
        answer = {}
    reason, message = str(answer.get("reason") or response.reason), str(answer.get("message") or "")
    if status == FORBIDDEN:
        verb, resource = verb_and_resource(method, path)
        if named := LACKING_VERB.search(message):  # an apply also needs create
            verb = named[1]
        return ApiForbiddenError(status, reason, message, data, verb=verb, resource=resource)
    delay = response.getheader("Retry-After") or ""
    retry_after_s = float(delay) if delay.isascii() and delay.isdigit() else None  # a date is not used
    return ApiError(status, reason, message, data, retry_after_s=retry_after_s)


def _decode_object(data: bytes) -> dict[str, Any]:
    """Decode a JSON object. Raises ValueError if the data are no JSON, or another value."""
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except RecursionError:
        raise ValueError("objects are nested too deeply") from None


def _decode_answer(data: bytes) -> dict[str, Any]:
    """Decode an object or a list of the API server, which has a kind. Raises ValueError for other data."""
    answer = _decode_object(data)
    is_object = isinstance(answer.get("kind"), str) and isinstance(answer.get("metadata", {}), dict)
    if not is_object:
        raise ValueError("the data have no kind, or metadata of another form")
    return answer


def _certificate_files(access: ApiAccess) -> tuple[StrPath, ...]:
    """Return the files with the CA certificates and the client certificate of an API access."""
    return (*(() if access.ca_file is None else (access.ca_file,)), *access.client_certificate_files)


def client_tls_context(ca_file: StrPath | None, ca_data: str = "") -> ssl.SSLContext:
    """Return the TLS context of a client that trusts these CA certificates; without any, the system's.

    Raises OSError or ValueError if a certificate cannot be used.
    """
    context = ssl.create_default_context(cafile=ca_file, cadata=ca_data or None)
    # Python 3.13 and later refuse certificates without key identifiers, which managed clusters have
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _make_context(access: ApiAccess) -> ssl.SSLContext:
    """Return the TLS context for the CA and the certificate of an API access.

    Raises OSError or ValueError if a certificate cannot be used.
    """
    for file in _certificate_files(access):
        read_credentials(file)
    context = client_tls_context(access.ca_file, access.ca_data)
    if access.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if access.client_certificate_files:
        certificate, key = access.client_certificate_files
        context.load_cert_chain(certificate, key, password=_refuse_passphrase)
    elif access.client_certificate:
        fd = os.memfd_create("drahealth-certificate")  # ssl reads only files; this one is on no disk
        try:
            os.write(fd, access.client_certificate)
            context.load_cert_chain(f"/proc/self/fd/{fd}", password=_refuse_passphrase)
        finally:
            os.close(fd)
    return context


def _refuse_passphrase() -> str:
    """Raise ValueError instead of letting OpenSSL ask for the passphrase of a key on the terminal."""
    raise ValueError("the client's key has a passphrase; remove it")


def _protocol_error() -> type[Exception]:
    """Return the base class of http.client's exceptions; http.client is imported only in this call."""
    from http.client import HTTPException

    return HTTPException


# --- reader of claims --------------------------------------------------------------------------------------

CLAIMS: Final = "resourceclaims"


class ClaimReader:
    """Function that reads claims from the API server, for ``get_claim`` of a plugin server. Thread-safe.

    Blocks up to 10 s for the connect and for each read.
    """

    def __init__(self, api: ApiServer, driver: str) -> None:
        """Create a reader of claims with the devices of one driver. Raises ConfigError: no ApiServer."""
        if not isinstance(api, ApiServer):
            raise ConfigError(f"argument api: {api!r} is not a drahealth.ApiServer")
        self._api = api
        self._driver = driver

    def __call__(self, ref: ClaimRef) -> Claim:
        """Read a claim from the API server, and return its present state.

        Raises:
            TransientError: The claim does not exist (code ``claim.not_found``); or see
                :func:`drahealth.parse_claim`.
            BadConfigError: See :func:`drahealth.parse_claim`.
            ApiForbiddenError, ApiError, ApiUnreachableError, OSError: See :meth:`ApiServer.call`.
        """
        path = self._api.dra_path("namespaces", ref.namespace, CLAIMS, ref.name)
        try:
            obj = self._api.call("GET", path)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            self._api.invalidate_dra_version()  # the version may be gone instead of the claim
            raise TransientError(f"the API server has no claim {ref}", code="claim.not_found") from None
        return parse_claim(obj, self._driver, ref)
