"""The kubelet's DRA plugin API: prepare and unprepare claims, v1 and v1beta1, from one implementation.

A claim's failure is reported in that claim's answer, and every claim of the request has an answer: the
kubelet shows one of them, so each text names all failures. A call as a whole fails only if its bytes are
not a valid request, or while the driver accepts none (UNAVAILABLE).
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Final, Protocol

import grpclib.const
import grpclib.server
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.model.claim import ClaimRef
from agent.model.prepare import PrepareVerdict
from agent.prepare.errors import DriverError, TransientError
from agent.prepare.message import kubelet_texts
from agent.serve.dra_plugin.in_flight import ClaimOutcome, InFlightClaims, RunKind
from agent.serve.dra_plugin.request_checks import check_claims
from agent.serve.dra_plugin.result import PreparedDevice, WireMode, extension
from agent.serve.grpc.gen.dra_v1.k8s.io.kubelet.pkg.apis.dra import v1
from agent.serve.grpc.gen.dra_v1beta1.k8s.io.kubelet.pkg.apis.dra import v1beta1
from agent.serve.grpc.hardened import HardenedStream
from agent.serve.grpc.wire.writer import message as encode_message
from agent.system.timing import RateLimiter

KUBELET_S: Final = 45.0
"""Timeout that is assumed for a call if the kubelet sends none [s]."""
MARGIN_S: Final = 2.0
"""Time before the timeout at which the answer is sent, with the claims finished by then [s]."""
REPORT_S: Final = 0.2
"""Part of MARGIN_S in which a run that waited in vain for other claims reports its own error [s]."""

ENTRIES_LIMIT: Final = 4096
"""Maximum number of claims of a request that are read. Each gets an answer; see also
:data:`~agent.serve.dra_plugin.request_checks.CLAIMS_LIMIT`."""
ANSWER_LIMIT: Final = (4 << 20) - (64 << 10)
"""Maximum size of all claims' answers together [bytes]; the kubelet reads no message above 4 MiB."""

log = logging.getLogger(__name__)


class RequestStream(HardenedStream):
    """Stream of requests of up to 512 KiB: 1,024 claims, each with the longest names."""

    limit = 512 << 10


class ClaimHandler(Protocol):
    """Handler that prepares claims. Called in the server's loop, which it must not block."""

    async def run(self, kind: RunKind, ref: ClaimRef, until_s: float) -> tuple[PreparedDevice, ...]:
        """Prepare or unprepare a claim; takes as long as the driver does, after waiting for other claims.

        That wait ends at ``until_s``, a time of the loop. Raises PrepareError.
        """

    def classify(self, ref: ClaimRef, error: Exception) -> PrepareVerdict:
        """Classify a failure of a claim outside of the driver's code."""

    def unavailable_reason(self) -> str:
        """Return the reason why no claim can be prepared now; empty: claims can be prepared."""


class DraPluginService:
    """DRA plugin service, v1 and v1beta1, on a driver's socket.

    Args:
        claims: Handler of the claims.
        wire: Encoding in which the class of an error is also sent as a number.
    """

    def __init__(self, claims: ClaimHandler, wire: WireMode = WireMode.NONE) -> None:
        self._claims = claims
        self._in_flight = InFlightClaims(claims.run, claims.classify)
        self._wire = wire
        self._calls: set[asyncio.Task[Any]] = set()
        self._closed = ""
        self._log_limit = RateLimiter()

    def __mapping__(self) -> dict[str, grpclib.const.Handler]:
        """Return the handlers of the methods by path, for grpclib; paths and types are those of the generated
        code."""
        mapping: dict[str, grpclib.const.Handler] = {}
        for module in (v1, v1beta1):
            for path, handler in module.DraPluginBase().__mapping__().items():
                kind = RunKind.UNPREPARE if path.endswith("UnprepareResources") else RunKind.PREPARE
                mapping[path] = handler._replace(func=partial(self._serve, kind, module))
        return mapping

    async def close(self, reason: str, timeout_s: float) -> bool:
        """Accept no more calls, and wait for the answers of the open ones.

        Returns:
            True if all open calls have been answered, False if `timeout_s` ran out.
        """
        self._closed = reason
        if self._calls:
            await asyncio.wait(self._calls, timeout=timeout_s)
        return not self._calls

    async def _serve(
        self, kind: RunKind, module: ModuleType, stream: "grpclib.server.Stream[Any, bytes]"
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            until_s = asyncio.get_running_loop().time() + _budget_s(stream)
            request = await stream.recv_message()
            assert request is not None  # a request that ends without a body is the empty one
            if reason := self._closed or self._claims.unavailable_reason():
                raise GRPCError(Status.UNAVAILABLE, reason)
            claims = [ClaimRef(claim.namespace, claim.name, claim.uid) for claim in request.claims]
            await stream.send_message(self._encode(kind, module, await self._outcomes(kind, claims, until_s)))
        finally:
            self._calls.discard(task)

    async def _outcomes(
        self, kind: RunKind, claims: Iterable[ClaimRef], until_s: float
    ) -> dict[ClaimRef, ClaimOutcome]:
        """Return the outcome of each claim; for a claim that is not finished by then, an error."""
        validated = check_claims(claims)
        outcomes: dict[ClaimRef, ClaimOutcome] = {
            ref: self._claims.classify(ref, DriverError(error, code=f"request.{error.partition(':')[0]}"))
            for ref, error in validated.refused
        }
        runs = {ref: self._in_flight.join(kind, ref, until_s - REPORT_S) for ref in validated.claims}
        if runs:
            await asyncio.wait(runs.values(), timeout=until_s - asyncio.get_running_loop().time())
        for ref, task in runs.items():
            if task.done() and not task.cancelled():
                outcomes[ref] = task.result()
            else:
                late = (
                    f"the {kind} was not finished in time; it continues, and a later call returns its result"
                )
                outcomes[ref] = self._claims.classify(ref, TransientError(late, code="deadline"))
                if count := self._log_limit.tick():
                    log.warning("claim %s: %s; %d such claims", ref, late, count)
        return outcomes

    def _encode(self, kind: RunKind, module: ModuleType, outcomes: Mapping[ClaimRef, ClaimOutcome]) -> bytes:
        """Encode the response: a map of answers by uid.

        Encoded without betterproto, because an answer may end with a field that the generated message does
        not have.
        """
        verdicts = {ref: outcome for ref, outcome in outcomes.items() if isinstance(outcome, PrepareVerdict)}
        answers = {ref: _encode_devices(module, one) for ref, one in outcomes.items()
                   if not isinstance(one, PrepareVerdict)}  # fmt: skip
        while sum(map(len, answers.values())) > ANSWER_LIMIT:
            largest = max(answers, key=lambda ref: len(answers[ref]))
            size = len(answers.pop(largest))
            error = f"the driver's answer is {size} bytes, limit {ANSWER_LIMIT} for all claims of a call"
            verdicts[largest] = self._claims.classify(largest, DriverError(error, code="driver.bug.answer"))
        for (ref, verdict), text in zip(
            verdicts.items(), kubelet_texts(list(verdicts.values())), strict=True
        ):
            log.debug("claim %s: %s failed: %s", ref, kind, text)
            if kind is RunKind.UNPREPARE:
                answers[ref] = bytes(module.NodeUnprepareResourceResponse(error=text))
            else:
                message = module.NodePrepareResourceResponse(error=text)
                answers[ref] = bytes(message) + extension(verdict.error_class, self._wire)
        return b"".join(
            encode_message(1, encode_message(1, ref.uid.encode()) + encode_message(2, answers[ref]))
            for ref in outcomes
        )


def _encode_devices(module: ModuleType, devices: Sequence[PreparedDevice]) -> bytes:
    """Encode the answer for a claim that succeeded; the answer for an unprepare is empty."""
    shares = "share_id" in module.Device.__dataclass_fields__  # which v1beta1 does not have
    return bytes(
        module.NodePrepareResourceResponse(
            [
                module.Device(
                    request_names=list(device.requests),
                    pool_name=device.pool,
                    device_name=device.device,
                    cdi_device_ids=list(device.cdi_ids),
                    **({"share_id": device.share_id} if shares and device.share_id else {}),
                )
                for device in devices
            ]
        )
    )


def _budget_s(stream: "grpclib.server.Stream[Any, Any]") -> float:
    left_s = KUBELET_S if stream.deadline is None else stream.deadline.time_remaining()
    return left_s - min(MARGIN_S, left_s / 2)
