"""The kubelet's DRA plugin API: prepare and unprepare claims, v1 and v1beta1, from one implementation.

A claim's failure is told in that claim's answer, and every claim that was asked for is in the answer: the
kubelet shows one of them, so each text names all that failed. A call as a whole fails only if its bytes are
no request, or while the driver can take none (UNAVAILABLE).
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Final, Protocol

import grpclib.const
import grpclib.server
from betterproto import encode_varint
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.model.claim import ClaimRef
from agent.model.prepare import PrepareVerdict
from agent.prepare.errors import DriverError, TransientError
from agent.prepare.message import texts
from agent.prepare.wire import WireMode, extension
from agent.serve.dra_plugin.in_flight import InFlightClaims, Kind, Outcome
from agent.serve.dra_plugin.request_checks import check_claims
from agent.serve.dra_plugin.result import PreparedDevice
from agent.serve.grpc.gen.dra_v1.k8s.io.kubelet.pkg.apis.dra import v1
from agent.serve.grpc.gen.dra_v1beta1.k8s.io.kubelet.pkg.apis.dra import v1beta1
from agent.serve.grpc.hardened import Stream
from agent.system.rate_limit import RateLimiter

KUBELET_S: Final = 45.0
"""How long the kubelet waits for an answer, if it does not say [s]."""
MARGIN_S: Final = 2.0
"""How long before that the answer goes out, whatever is not done [s]..."""
LAST_S: Final = 0.2
"""...of which this is for what waited in vain to say so itself [s]."""

ENTRIES_LIMIT: Final = 4096
"""Claims in a request that are read at all. Each that is read gets an answer; see also
:data:`~agent.serve.dra_plugin.request_checks.CLAIMS_LIMIT`."""
ANSWER_LIMIT: Final = (4 << 20) - (64 << 10)
"""What all claims' answers may take together [bytes]; the kubelet reads no message above 4 MiB."""

log = logging.getLogger(__name__)


class RequestStream(Stream):
    """A request of up to 512 KiB: 1,024 claims, each with the longest names that there can be."""

    limit = 512 << 10


class Claims(Protocol):
    """Who prepares them. Called in the server's loop, which it must not block."""

    async def run(self, kind: Kind, ref: ClaimRef, until_s: float) -> tuple[PreparedDevice, ...]:
        """Prepares or unprepares a claim; takes as long as it takes, once it need not wait for other claims.

        For these it waits until ``until_s`` at most, as the loop's time. Raises PrepareError.
        """

    def judge(self, ref: ClaimRef, error: Exception) -> PrepareVerdict:
        """Of what kind a failure is that the driver has not seen."""

    def refusal(self) -> str:
        """Why nothing can be prepared now, in words; empty: it can."""


class DraPlugin:
    """The service of a driver's socket.

    Args:
        claims: Who prepares them.
        wire: Whether an error's class goes out as a number, too.
    """

    def __init__(self, claims: Claims, wire: WireMode = WireMode.NONE) -> None:
        self._claims = claims
        self._runs = InFlightClaims(claims.run, claims.judge)
        self._wire = wire
        self._calls: set[asyncio.Task[Any]] = set()
        self._closed = ""
        self._complaints = RateLimiter()

    def __mapping__(self) -> dict[str, grpclib.const.Handler]:
        """The methods by path, as grpclib asks for them; paths and types are the generated code's."""
        mapping: dict[str, grpclib.const.Handler] = {}
        for module in (v1, v1beta1):
            for path, handler in module.DraPluginBase().__mapping__().items():
                kind = Kind.UNPREPARE if path.endswith("UnprepareResources") else Kind.PREPARE
                mapping[path] = handler._replace(func=partial(self._serve, kind, module))
        return mapping

    async def close(self, reason: str, timeout_s: float) -> bool:
        """Takes no call any more, and waits for the answers of those that are under way.

        Returns:
            Whether all have been answered.
        """
        self._closed = reason
        if self._calls:
            await asyncio.wait(self._calls, timeout=timeout_s)
        return not self._calls

    async def _serve(
        self, kind: Kind, module: ModuleType, stream: "grpclib.server.Stream[Any, bytes]"
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            until_s = asyncio.get_running_loop().time() + _budget_s(stream)
            request = await stream.recv_message()
            assert request is not None  # a request that ends without a body is the empty one
            if reason := self._closed or self._claims.refusal():
                raise GRPCError(Status.UNAVAILABLE, reason)
            claims = [ClaimRef(one.namespace, one.name, one.uid) for one in request.claims]
            await stream.send_message(self._encode(kind, module, await self._outcomes(kind, claims, until_s)))
        finally:
            self._calls.discard(task)

    async def _outcomes(
        self, kind: Kind, claims: Iterable[ClaimRef], until_s: float
    ) -> dict[ClaimRef, Outcome]:
        """How each claim ended, or that it has not."""
        asked = check_claims(claims)
        outcomes: dict[ClaimRef, Outcome] = {
            ref: self._claims.judge(ref, DriverError(wrong, code=f"request.{wrong.partition(':')[0]}"))
            for ref, wrong in asked.refused
        }
        runs = {ref: self._runs.join(kind, ref, until_s - LAST_S) for ref in asked.claims}
        if runs:
            await asyncio.wait(runs.values(), timeout=until_s - asyncio.get_running_loop().time())
        for ref, task in runs.items():
            if task.done() and not task.cancelled():
                outcomes[ref] = task.result()
            else:
                late = f"the {kind} was not finished in time; it goes on, for a later call to find done"
                outcomes[ref] = self._claims.judge(ref, TransientError(late, code="deadline"))
                if count := self._complaints.tick():
                    log.warning("claim %s: %s; so it was %d times", ref, late, count)
        return outcomes

    def _encode(self, kind: Kind, module: ModuleType, outcomes: Mapping[ClaimRef, Outcome]) -> bytes:
        """The response: a map of answers by uid.

        By hand, because an answer may end with a field that the generated message does not have.
        """
        verdicts = {ref: one for ref, one in outcomes.items() if isinstance(one, PrepareVerdict)}
        answers = {ref: _encode_devices(module, one) for ref, one in outcomes.items()
                   if not isinstance(one, PrepareVerdict)}  # fmt: skip
        while sum(map(len, answers.values())) > ANSWER_LIMIT:
            largest = max(answers, key=lambda ref: len(answers[ref]))
            size = len(answers.pop(largest))
            wrong = f"the driver's answer takes {size} bytes, and all of a call {ANSWER_LIMIT} at most"
            verdicts[largest] = self._claims.judge(largest, DriverError(wrong, code="driver.bug.answer"))
        for (ref, verdict), said in zip(verdicts.items(), texts(list(verdicts.values())), strict=True):
            log.debug("%s of claim %s failed: %s", kind, ref, said)
            if kind is Kind.UNPREPARE:
                answers[ref] = bytes(module.NodeUnprepareResourceResponse(error=said))
            else:
                message = module.NodePrepareResourceResponse(error=said)
                answers[ref] = bytes(message) + extension(verdict.error_class, self._wire)
        return b"".join(_field(1, _field(1, ref.uid.encode()) + _field(2, answers[ref])) for ref in outcomes)


def _encode_devices(module: ModuleType, devices: Sequence[PreparedDevice]) -> bytes:
    """The answer for a claim that succeeded; of an unprepare it is empty, and so are its bytes."""
    shares = "share_id" in module.Device.__dataclass_fields__  # which v1beta1 does not have
    return bytes(
        module.NodePrepareResourceResponse(
            [
                module.Device(
                    request_names=list(one.requests),
                    pool_name=one.pool,
                    device_name=one.device,
                    cdi_device_ids=list(one.cdi_ids),
                    **({"share_id": one.share_id} if shares and one.share_id else {}),
                )
                for one in devices
            ]
        )
    )


def _field(number: int, data: bytes) -> bytes:
    """One field of bytes, as protobuf has it."""
    return bytes([number << 3 | 2]) + encode_varint(len(data)) + data


def _budget_s(stream: "grpclib.server.Stream[Any, Any]") -> float:
    left_s = KUBELET_S if stream.deadline is None else stream.deadline.time_remaining()
    return left_s - min(MARGIN_S, left_s / 2)
