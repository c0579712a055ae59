"""Driver that calls ``DriverLink`` by Google's gRPC and protobuf, and a fake handler for the agent."""

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from patience import PATIENCE_S

from agent.model.claim import Claim, ClaimRef
from agent.model.health import Taints
from agent.model.prepare import OtherDriverFailure, PrepareVerdict
from agent.model.report import Report
from agent.prepare.classify import PrepareContext, classify, classify_evidence
from agent.prepare.errors import BadConfigError
from agent.prepare.evidence import Evidence
from agent.serve.driver_link.handler_interface import (
    DeviceDeclaration,
    DriverCheckResult,
    DriverLinkHandler,
    ReportedClaimResult,
    SyncDevicesResult,
)
from agent.serve.grpc_servers import GrpcServers
from agent.system.threads.latest_value import LatestValue
from agent.system.threads.loop_thread import AsyncioThread
from wire.google import Watcher, load_descriptors, message_class
from wire.serving import DRIVER, ServerThread, current_report, device

API = "drahealth.v1.DriverLink"
METHODS = {item.name: item for item in load_descriptors()[API].services_by_name["DriverLink"].methods}


def message(kind: str, /, **fields: Any) -> Any:
    """Return a message of the API."""
    return message_class(API, kind)(**fields)


def claim(uid: str = "u", *devices: str, **fields: Any) -> Any:
    """Return a claim in the namespace ``ns`` whose name is its uid."""
    return message(
        "PrepareClaim",
        namespace="ns",
        name=uid,
        uid=uid,
        devices=[message("ClaimedDevice", request="r", pool="p", device=item) for item in devices],
        **fields,
    )


class RecordingHandler:
    """Handler that accepts everything, unless configured otherwise, and records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        """Method and arguments of each call, in order."""
        self.threads: list[str] = []
        """Name of the thread of each call."""
        self.errors: dict[str, BaseException] = {}
        """Exception to raise, by method."""
        self.holds: dict[str, threading.Event] = {}
        """Event to wait for, by method."""
        self.blocked_uids: set[str] = set()
        """Uids of claims that must not be prepared."""
        self.recorded: list[PrepareVerdict] = []
        """Verdicts on failed prepares of earlier calls."""
        self.elsewhere: dict[str, list[OtherDriverFailure]] = {}
        """Failures at other drivers of a pod, by the name of this driver's claim."""
        self.newest: LatestValue[Taints] = LatestValue()

    def hold(self, method: str) -> threading.Event:
        """Make a method block until the event is set, or the server ends."""
        return self.holds.setdefault(method, threading.Event())

    def release_all(self) -> None:
        """End all waits."""
        for holds in self.holds.values():
            holds.set()

    def sync(self, rows: Sequence[DeviceDeclaration]) -> SyncDevicesResult:
        """Record the declaration."""
        self._record("sync", list(rows))
        return SyncDevicesResult(len(rows), evaluated=True)

    def report_checks(self, results: Sequence[DriverCheckResult]) -> None:
        """Record the results."""
        self._record("report_checks", list(results))

    def check_claims(self, claims: Sequence[Claim]) -> list[PrepareVerdict | None]:
        """Return a verdict on each blocked claim."""
        self._record("check", list(claims))
        error = BadConfigError("no such mode")
        return [
            classify(error, PrepareContext(item, {})) if item.uid in self.blocked_uids else None
            for item in claims
        ]

    def classify(self, claim: Claim, evidence: Sequence[Evidence]) -> PrepareVerdict:
        """Classify like the PrepareFailureTracker without findings."""
        self._record("classify", (claim, tuple(evidence)))
        return classify_evidence(evidence, PrepareContext(claim, {}))

    def recorded_failures(self, uids: Iterable[str]) -> list[PrepareVerdict]:
        """Return the verdicts of ``recorded`` on the claims with these UIDs."""
        wanted = set(uids)
        return [verdict for verdict in self.recorded if verdict.claim.uid in wanted]

    def failures_at_other_drivers(self, claim: ClaimRef) -> list[OtherDriverFailure]:
        """Return the failures that a test sets for the claim's name."""
        return self.elsewhere.get(claim.name, [])

    def record_prepares(self, results: Sequence[ReportedClaimResult]) -> list[PrepareVerdict | None]:
        """Record the results."""
        return self._classify_all("prepared", results)

    def record_unprepares(self, results: Sequence[ReportedClaimResult]) -> list[PrepareVerdict | None]:
        """Record the results."""
        return self._classify_all("unprepared", results)

    @property
    def taints(self) -> LatestValue[Taints]:
        """Taints that the test publishes."""
        self._record("taints", None)
        return self.newest

    def _classify_all(
        self, method: str, results: Sequence[ReportedClaimResult]
    ) -> list[PrepareVerdict | None]:
        self._record(method, list(results))
        return [
            None
            if item.evidence is None
            else classify_evidence(item.evidence, PrepareContext(item.claim, {}))
            for item in results
        ]

    def _record(self, method: str, given: Any) -> None:
        self.calls.append((method, given))
        self.threads.append(threading.current_thread().name)
        if method in self.holds:
            self.holds[method].wait()
        if method in self.errors:
            raise self.errors[method]


class LinkServer(ServerThread):
    """Server of the agent's sockets with one driver's link."""

    def __init__(self, runtime_dir: Path) -> None:
        self.handler = RecordingHandler()
        self.opened: list[str] = []
        self.open_fails: list[Exception] = []
        self.latest: LatestValue[Report] = LatestValue()
        self.failures = []
        self.servers = GrpcServers(
            self.latest, runtime_dir=runtime_dir, drivers=[DRIVER], version="9.9.9", open_handler=self._open
        )
        self.socket, self.agent = self.servers.paths
        self.thread = AsyncioThread(self.servers.run, on_failure=self.failures.append)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.handler.release_all()
        super().__exit__(kind, error, trace)

    def publish(self, second: int) -> None:
        """Publish a report of one device, verified in that second."""
        self.latest.publish(current_report([device(verified=second)]))

    def _open(self, driver: str) -> DriverLinkHandler:
        self.opened.append(f"{driver} in {threading.current_thread().name.rstrip('0123456789')}")
        if self.open_fails:
            raise self.open_fails.pop()
        return self.handler


class Driver:
    """Client that calls the agent as a driver does."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self._channel = grpc.insecure_channel(f"unix:{socket}", [("grpc.use_local_subchannel_pool", 1)])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def call(self, method: str, **fields: Any) -> Any:
        """Return the reply. Raises grpc.RpcError."""
        return self.call_async(method, **fields).result()

    def call_async(self, method: str, timeout_s: float = PATIENCE_S, **fields: Any) -> Any:
        """Return the reply as a grpc.Future."""
        descriptor = METHODS[method]
        call = self._channel.unary_unary(
            f"/{API}/{method}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=message_class(API, descriptor.output_type.name).FromString,
        )
        return call.future(message(descriptor.input_type.name, **fields), timeout=timeout_s)

    def call_raw(self, method: str, data: bytes) -> bytes:
        """Send bytes as a request; return the bytes of the answer."""
        answer: bytes = self._channel.unary_unary(f"/{API}/{method}")(data, timeout=PATIENCE_S)
        return answer

    def watch(self) -> Watcher:
        """Open the stream of taints."""
        return Watcher(
            self.socket,
            f"/{API}/WatchTaints",
            message_class(API, "WatchTaintsRequest"),
            message_class(API, "DeviceTaints"),
        )
