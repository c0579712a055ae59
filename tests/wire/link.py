"""A driver's calls of ``DriverLink``, by Google's gRPC and protobuf, and what stands in for the agent."""

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from patience import PATIENCE_S

from agent.model.claim import Claim
from agent.model.prepare import PrepareVerdict
from agent.model.report import Report
from agent.model.taint import Taints
from agent.prepare.classify import Context, classify, classify_evidence
from agent.prepare.errors import BadConfig
from agent.prepare.evidence import Evidence
from agent.serve.driver_link.service import HandlerGone, Link, Row, Synced
from agent.serve.servers import Servers
from agent.system.threads.latest import Latest
from agent.system.threads.loop_thread import IoThread
from wire.google import Watcher, described, message_class
from wire.serving import DRIVER, InThread, device, report

API = "drahealth.v1.DriverLink"
METHODS = {one.name: one for one in described()[API].services_by_name["DriverLink"].methods}


def message(kind: str, /, **fields: Any) -> Any:
    """A message of the API."""
    return message_class(API, kind)(**fields)


def claim(uid: str = "u", *devices: str, **fields: Any) -> Any:
    """A claim in the namespace ``ns``, called as its uid."""
    return message(
        "PrepareClaim",
        namespace="ns",
        name=uid,
        uid=uid,
        devices=[message("ClaimedDevice", request="r", pool="p", device=one) for one in devices],
        **fields,
    )


class RecordingLink:
    """Says yes to everything, unless told otherwise, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        """Method and what was given, in order."""
        self.threads: list[str] = []
        """In which each was done."""
        self.fails: dict[str, BaseException] = {}
        """By method: what it raises."""
        self.held: dict[str, threading.Event] = {}
        """By method: what it waits for."""
        self.against: set[str] = set()
        """Uids that something is known against."""
        self.newest: Latest[Taints] = Latest()

    def hold(self, method: str) -> threading.Event:
        """That method takes until the event is set, or the server is left."""
        return self.held.setdefault(method, threading.Event())

    def let_go(self) -> None:
        """Nothing takes long any more."""
        for held in self.held.values():
            held.set()

    def sync(self, rows: Sequence[Row]) -> Synced:
        """Declares."""
        self._ask("sync", list(rows))
        return Synced(len(rows), judged=True)

    def check(self, claims: Sequence[Claim]) -> list[PrepareVerdict | None]:
        """What is known."""
        self._ask("check", list(claims))
        wrong = BadConfig("no such mode")
        return [classify(wrong, Context(one, {})) if one.uid in self.against else None for one in claims]

    def classify(self, claim: Claim, evidence: Sequence[Evidence]) -> PrepareVerdict:
        """As the desk does, knowing of no device."""
        self._ask("classify", (claim, tuple(evidence)))
        return classify_evidence(evidence, Context(claim, {}))

    def prepared(self, ended: Sequence[HandlerGone]) -> list[PrepareVerdict | None]:
        """Likewise."""
        return self._ended("prepared", ended)

    def unprepared(self, ended: Sequence[HandlerGone]) -> list[PrepareVerdict | None]:
        """Likewise."""
        return self._ended("unprepared", ended)

    @property
    def taints(self) -> Latest[Taints]:
        """What the test publishes."""
        self._ask("taints", None)
        return self.newest

    def _ended(self, method: str, ended: Sequence[HandlerGone]) -> list[PrepareVerdict | None]:
        self._ask(method, list(ended))
        return [
            None if one.evidence is None else classify_evidence(one.evidence, Context(one.claim, {}))
            for one in ended
        ]

    def _ask(self, method: str, given: Any) -> None:
        self.asked.append((method, given))
        self.threads.append(threading.current_thread().name)
        if method in self.held:
            self.held[method].wait()
        if method in self.fails:
            raise self.fails[method]


class Serving(InThread):
    """The agent's sockets, one driver's link among them."""

    def __init__(self, runtime_dir: Path) -> None:
        self.link = RecordingLink()
        self.opened: list[str] = []
        self.open_fails: list[Exception] = []
        self.latest: Latest[Report] = Latest()
        self.failures = []
        self.servers = Servers(
            self.latest, runtime_dir=runtime_dir, drivers=[DRIVER], version="9.9.9", link=self._open
        )
        self.socket, self.agent = self.servers.paths
        self.thread = IoThread(self.servers.run, on_failure=self.failures.append)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.link.let_go()
        super().__exit__(kind, error, trace)

    def publish(self, second: int) -> None:
        """A report of one device, verified in that second."""
        self.latest.publish(report([device(verified=second)], second=second))

    def _open(self, driver: str) -> Link:
        self.opened.append(f"{driver} in {threading.current_thread().name.rstrip('0123456789')}")
        if self.open_fails:
            raise self.open_fails.pop()
        return self.link


class Driver:
    """Calls the agent as a driver does."""

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
        """The reply. Raises grpc.RpcError."""
        return self.soon(method, **fields).result()

    def soon(self, method: str, timeout_s: float = PATIENCE_S, **fields: Any) -> Any:
        """The same, as a grpc.Future."""
        of = METHODS[method]
        call = self._channel.unary_unary(
            f"/{API}/{method}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=message_class(API, of.output_type.name).FromString,
        )
        return call.future(message(of.input_type.name, **fields), timeout=timeout_s)

    def raw(self, method: str, data: bytes) -> bytes:
        """Sends bytes as a request; returns those of the answer."""
        answer: bytes = self._channel.unary_unary(f"/{API}/{method}")(data, timeout=PATIENCE_S)
        return answer

    def watch(self) -> Watcher:
        """The stream of taints."""
        return Watcher(
            self.socket,
            f"/{API}/WatchTaints",
            message_class(API, "WatchTaintsRequest"),
            message_class(API, "DeviceTaints"),
        )
