"""Kubelet's calls to a DRA driver, by Google's gRPC and protobuf as independent implementation."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import pytest
from google.protobuf.unknown_fields import UnknownFieldSet
from patience import PATIENCE_S

from agent.serve.dra_plugin import service
from wire.google import message_class

DRA = "k8s.io.kubelet.pkg.apis.dra"
REGISTRATION = "/pluginregistration.Registration"

CALL_S = PATIENCE_S
"""Deadline of a call; transient failures are retried until shortly before it."""

ClaimRef = tuple[str, str, str]
"""Namespace, name and uid."""


def claim(name: str = "c", *, namespace: str = "ns", uid: str = "") -> ClaimRef:
    """Return a claim whose uid follows from its name, unless another is given."""
    return (namespace, name, uid or f"uid-{name}")


def answer_unfinished_claims_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make plugins of this process answer a call without a deadline after two seconds.

    On a busy machine, a client's deadline could end the call before the answer to its unfinished claims.
    """
    monkeypatch.setattr(service, "KUBELET_S", 4.0)


def refuse_waiting_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make plugins of this process refuse at once each claim that would wait for other claims.

    Otherwise such a claim gets its error 0.2 s before its call is answered, which a busy machine may miss.
    """
    monkeypatch.setattr(service, "REPORT_S", 2 * CALL_S)


class Kubelet:
    """Kubelet with one connection to one socket."""

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix:{socket}", [("grpc.use_local_subchannel_pool", 1)])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def prepare(
        self, *claims: ClaimRef, version: str = "v1", timeout_s: float | None = CALL_S
    ) -> Mapping[str, Any]:
        """Return the answers by uid. Raises grpc.RpcError."""
        return self._claims("NodePrepareResources", claims, version, timeout_s)

    def unprepare(
        self, *claims: ClaimRef, version: str = "v1", timeout_s: float | None = CALL_S
    ) -> Mapping[str, Any]:
        """Return the answers by uid. Raises grpc.RpcError."""
        return self._claims("NodeUnprepareResources", claims, version, timeout_s)

    def prepare_async(self, *claims: ClaimRef, timeout_s: float = CALL_S) -> Any:
        """Return the whole response as a grpc.Future."""
        method = "NodePrepareResources"
        request, call = self._call(f"{DRA}.v1", f"/{DRA}.v1.DRAPlugin/{method}", method)
        _fill(request, claims)
        return call.future(request, timeout=timeout_s)

    def get_info(self, timeout_s: float = PATIENCE_S) -> Any:
        """Return the plugin's answer to GetInfo."""
        package = "pluginregistration"
        request = message_class(package, "InfoRequest")()
        call = self._unary(f"{REGISTRATION}/GetInfo", message_class(package, "PluginInfo"))
        return call(request, timeout=timeout_s)

    def notify(self, registered: bool, error: str = "") -> Any:
        """Report the result of the registration."""
        package = "pluginregistration"
        status = message_class(package, "RegistrationStatus")(plugin_registered=registered, error=error)
        reply = message_class(package, "RegistrationStatusResponse")
        return self._unary(f"{REGISTRATION}/NotifyRegistrationStatus", reply)(status, timeout=PATIENCE_S)

    def call_raw(self, path: str, data: bytes) -> bytes:
        """Send bytes as a request; return the bytes of the answer."""
        answer: bytes = self._channel.unary_unary(path)(data, timeout=PATIENCE_S)
        return answer

    def _claims(
        self, method: str, claims: Iterable[ClaimRef], version: str, timeout_s: float | None
    ) -> Mapping[str, Any]:
        package = f"{DRA}.{version}"
        request, call = self._call(package, f"/{package}.DRAPlugin/{method}", method)
        _fill(request, claims)
        return dict(call(request, timeout=timeout_s).claims)

    def _call(self, package: str, path: str, method: str) -> tuple[Any, Any]:
        request = message_class(package, f"{method}Request")()
        return request, self._unary(path, message_class(package, f"{method}Response"))

    def _unary(self, path: str, reply: Any) -> Any:
        return self._channel.unary_unary(
            path,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply.FromString,
        )


def _fill(request: Any, claims: Iterable[ClaimRef]) -> None:
    for namespace, name, uid in claims:
        request.claims.add(namespace=namespace, name=name, uid=uid)


def unknown_fields(message: Any) -> list[tuple[int, Any]]:
    """Return number and value of the fields that the message type does not have."""
    return [(field.field_number, field.data) for field in UnknownFieldSet(message)]


def encode_field(number: int, data: bytes) -> bytes:
    """Encode a field of less than 128 bytes."""
    return bytes([number << 3 | 2, len(data)]) + data
