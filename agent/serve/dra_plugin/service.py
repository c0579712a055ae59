"""Service of the kubelet's DRA plugin API, v1 and v1beta1, which prepares and unprepares claims.

Every claim of a request gets an answer of its own. Each error text names all failed claims, because the
kubelet shows only one error. A whole call fails only if the request is not valid, or with UNAVAILABLE while
the driver cannot prepare claims.

The module also tracks the runs, which are prepares and unprepares in progress. A claim has at most one run at
a time, which repeated calls of the kubelet share.

The kubelet repeats a call after its timeout, while the driver may still work on the first one. So a run
continues after the call that started it has ended, and the next call for the claim waits for the same run. A
run for which no call waits is not retried after a failure.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from types import ModuleType
from typing import Any, Final, Protocol

import grpclib.const
import grpclib.server
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.model.claim import ClaimRef
from agent.model.prepare import PrepareVerdict
from agent.prepare.errors import DriverError, PrepareError, TransientError
from agent.prepare.kubelet_message import kubelet_texts
from agent.serve.dra_plugin.prepared_devices import (
    PreparedDevice,
    WireMode,
    encode_error_class,
    validate_claims,
)
from agent.serve.grpc.gen.dra_v1.k8s.io.kubelet.pkg.apis.dra import v1
from agent.serve.grpc.gen.dra_v1beta1.k8s.io.kubelet.pkg.apis.dra import v1beta1
from agent.serve.grpc.hardened import HardenedStream, send_shared_message
from agent.serve.grpc.wire import message_field
from agent.system.output import LogRateLimiter, get_logger

RUNS_LIMIT: Final = 256
"""Largest number of prepares and unprepares in progress, each in a thread: only a hung driver reaches it."""

log = get_logger(__name__)

ClaimOutcome = tuple[PreparedDevice, ...] | PrepareVerdict
"""Outcome of a run: the prepared devices, no devices after an unprepare, or the verdict on a failure."""


class ClaimOperation(StrEnum):
    """Operation of the driver on a claim: prepare or unprepare."""

    PREPARE = "prepare"
    UNPREPARE = "unprepare"


ClaimRunner = Callable[
    [ClaimOperation, ClaimRef, float, threading.Event], Awaitable[tuple[PreparedDevice, ...]]
]
"""Function that prepares or unprepares one claim. Its last arguments are the event loop's time until which it
may wait for other claims, and an event that is set while no call waits for the run. Raises PrepareError."""

ClassifyFailure = Callable[[ClaimRef, Exception], PrepareVerdict]
"""Function that returns the verdict on a failure of a claim that the driver's code did not raise."""


@dataclass(slots=True, eq=False)
class _ClaimRun:
    """Prepare or unprepare of one claim, which is in progress or waits for an earlier run of the claim."""

    operation: ClaimOperation
    ref: ClaimRef
    before: "_ClaimRun | None"
    """Earlier run of the claim for which this run waits; None: this run does not wait."""
    calls: int = 0
    """Number of the kubelet's calls that wait for the run."""
    unawaited: threading.Event = field(default_factory=threading.Event)
    """Set while no call waits for the run, so that it makes no further tries."""
    task: "asyncio.Task[ClaimOutcome]" = field(init=False)

    def unfinished_run(self) -> "_ClaimRun | None":
        """Return the newest unfinished run of the claim; None: all its runs are finished.

        The result is this run or an earlier one.
        """
        run: _ClaimRun | None = self
        while run is not None and run.task.done():
            run = run.before
        return run


class InFlightClaims:
    """Prepares and unprepares in progress in one driver instance, at most one per claim at a time.

    Used only in the event loop.
    """

    def __init__(self, runner: ClaimRunner, classify: ClassifyFailure) -> None:
        self._runner = runner
        self._classify = classify
        self._last: dict[str, _ClaimRun] = {}
        self._of_task: dict[asyncio.Task[ClaimOutcome], _ClaimRun] = {}
        self._slots = asyncio.Semaphore(RUNS_LIMIT)
        self._log_limit = LogRateLimiter()

    @property
    def tasks(self) -> set["asyncio.Task[ClaimOutcome]"]:
        """Tasks of all unfinished runs."""
        return set(self._of_task)

    def join_or_start(
        self, operation: ClaimOperation, ref: ClaimRef, until_s: float
    ) -> "asyncio.Task[ClaimOutcome]":
        """Return the task of the claim's prepare or unprepare; start one if none is in progress.

        A new prepare first waits for a running unprepare of the claim, and vice versa, until ``until_s`` (the
        event loop's time). The run itself has no time limit. The task never raises an exception. The caller
        calls :meth:`leave` when it no longer waits for the run.
        """
        run = self._last.get(ref.uid)
        if run is None or (run.operation, run.ref) != (operation, ref):
            run = self._start(operation, ref, run, until_s)
        run.calls += 1
        run.unawaited.clear()
        return run.task

    def leave(self, task: "asyncio.Task[ClaimOutcome]") -> None:
        """End a caller's wait for the run of ``task``.

        Without any caller the run continues, but is not retried after a failure.
        """
        run = self._of_task.get(task)
        if run is not None:  # else the run is finished
            run.calls -= 1
            if not run.calls:
                run.unawaited.set()

    def _start(
        self, operation: ClaimOperation, ref: ClaimRef, before: _ClaimRun | None, until_s: float
    ) -> _ClaimRun:
        run = _ClaimRun(operation, ref, before)
        run.task = asyncio.create_task(self._run(run, until_s))
        run.task.add_done_callback(lambda _: self._forget(run))
        self._last[ref.uid] = self._of_task[run.task] = run
        return run

    def _forget(self, run: _ClaimRun) -> None:
        """Stop tracking a claim's run that has ended; track its earlier run again if that is unfinished."""
        del self._of_task[run.task]
        if self._last.get(run.ref.uid) is run:
            holder = run.unfinished_run()
            if holder is None:
                del self._last[run.ref.uid]
            else:
                self._last[run.ref.uid] = holder

    async def _run(self, run: _ClaimRun, until_s: float) -> ClaimOutcome:
        try:
            await self._begin(run, until_s)
            try:
                return await self._runner(run.operation, run.ref, until_s, run.unawaited)
            finally:
                self._slots.release()
        except PrepareError as error:
            return error.verdict
        except TransientError as error:
            return self._classify(run.ref, error)
        except Exception as error:  # an internal error fails only this claim
            log.exception(
                "claim %s: %s failed: internal error; reported to the kubelet", run.ref, run.operation
            )
            return self._classify(run.ref, error)

    async def _begin(self, run: _ClaimRun, until_s: float) -> None:
        """Wait until the claim's earlier runs have ended, and fewer than RUNS_LIMIT claims are in progress.

        Raises TransientError if the wait lasts until `until_s`.
        """
        while run.before is not None and (holder := run.before.unfinished_run()) is not None:
            done, _ = await asyncio.wait({holder.task}, timeout=_left_s(until_s))
            if not done:
                raise TransientError(
                    f"the claim's previous {holder.operation} is not done yet", code="deadline"
                )
        try:
            async with asyncio.timeout(_left_s(until_s)):
                await self._slots.acquire()
        except TimeoutError:
            if count := self._log_limit.tick():
                log.warning(
                    "claims: %d claims are in progress, the limit; %d more timed out while waiting; the "
                    "driver may hang",
                    RUNS_LIMIT, count,
                )  # fmt: skip
            raise TransientError(
                f"limit of {RUNS_LIMIT} claims at a time reached; none finished in time", code="deadline"
            ) from None
        run.before = None


def _left_s(until_s: float) -> float:
    return max(0.0, until_s - asyncio.get_running_loop().time())


# --- the service -------------------------------------------------------------------------------------------

KUBELET_S: Final = 45.0
"""Timeout of a prepare or unprepare call if the kubelet's request has none [s]."""
MARGIN_S: Final = 2.0
"""Time before a call's timeout at which the call is answered [s]; unfinished claims get an error."""
REPORT_S: Final = 0.2
"""Time before a call is answered at which a claim that still waits for other claims fails [s]."""

ENTRIES_LIMIT: Final = 4096
"""Largest number of claims of a request that is decoded; above CLAIMS_LIMIT each claim gets an error."""
ANSWER_LIMIT: Final = (4 << 20) - (64 << 10)
"""Maximum size of the answers of all claims of a call [bytes]; the kubelet reads at most 4 MiB."""


class SizeLimitedDraPluginStream(HardenedStream):
    """gRPC stream for requests of at most 512 KiB: 1,024 claims with the longest names."""

    limit = 512 << 10


class ClaimHandler(Protocol):
    """Interface to the driver's code that prepares and unprepares claims.

    Its methods are called in the event loop, which they must not block.
    """

    async def run(
        self, operation: ClaimOperation, ref: ClaimRef, until_s: float, unawaited: threading.Event
    ) -> tuple[PreparedDevice, ...]:
        """Prepare or unprepare a claim; return its devices. Raises PrepareError.

        May wait for other claims until ``until_s``, a time of the event loop. A transient failure is not
        retried while ``unawaited`` is set, which means that no call of the kubelet waits for the claim.
        """

    def classify(self, ref: ClaimRef, error: Exception) -> PrepareVerdict:
        """Return error class and code for a claim's failure outside the driver's code."""

    def unavailable_reason(self) -> str:
        """Return the reason why no claim can be prepared now; empty: claims can be prepared."""


class DraPluginService:
    """gRPC service of the DRA plugin API, v1 and v1beta1, on a driver's service socket.

    Args:
        claims: Handler of the claims.
        wire: Encoding of an error's class in the answers.
    """

    def __init__(self, claims: ClaimHandler, wire: WireMode = WireMode.NONE) -> None:
        self._claims = claims
        self._in_flight = InFlightClaims(claims.run, claims.classify)
        self._wire = wire
        self._calls: set[asyncio.Task[Any]] = set()
        self._closed = ""
        self._log_limit = LogRateLimiter()

    def __mapping__(self) -> dict[str, grpclib.const.Handler]:
        """Return the handlers of the DRA plugin API's methods by gRPC path, for grpclib."""
        mapping: dict[str, grpclib.const.Handler] = {}
        for module in (v1, v1beta1):
            for path, handler in module.DraPluginBase().__mapping__().items():
                unprepare = path.endswith("UnprepareResources")
                operation = ClaimOperation.UNPREPARE if unprepare else ClaimOperation.PREPARE
                mapping[path] = handler._replace(func=partial(self._serve, operation, module))
        return mapping

    async def close(self, reason: str, timeout_s: float) -> bool:
        """Refuse new calls with ``reason``; return whether all calls and runs ended within `timeout_s`."""
        self._closed = reason
        if unfinished := self._calls | self._in_flight.tasks:
            await asyncio.wait(unfinished, timeout=timeout_s)
        return not (self._calls or self._in_flight.tasks)

    async def _serve(
        self, operation: ClaimOperation, module: ModuleType, stream: "grpclib.server.Stream[Any, bytes]"
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
            answer = self._encode(operation, module, await self._outcomes(operation, claims, until_s))
            await send_shared_message(stream, answer)
        finally:
            self._calls.discard(task)

    async def _outcomes(
        self, operation: ClaimOperation, claims: Iterable[ClaimRef], until_s: float
    ) -> dict[ClaimRef, ClaimOutcome]:
        """Run the operation on all claims of a request; return the outcome of each claim.

        A claim that is not finished at ``until_s`` gets an error. Once a claim has failed, its pod cannot
        start, so the other claims are no longer retried.
        """
        validated = validate_claims(claims)
        outcomes: dict[ClaimRef, ClaimOutcome] = {
            ref: self._claims.classify(ref, DriverError(error, code=f"request.{error.partition(':')[0]}"))
            for ref, error in validated.refused
        }
        runs = {
            ref: self._in_flight.join_or_start(operation, ref, until_s - REPORT_S) for ref in validated.claims
        }
        if runs:
            await self._wait(runs.values(), until_s, has_failed=bool(outcomes))
        for ref, task in runs.items():
            if task.done() and not task.cancelled():
                outcomes[ref] = task.result()
            else:
                late = f"{operation} not finished in time; it continues, and a later call returns its result"
                outcomes[ref] = self._claims.classify(ref, TransientError(late, code="deadline"))
                if count := self._log_limit.tick():
                    log.warning("claim %s: %s; %d claims timed out", ref, late, count)
        return outcomes

    async def _wait(
        self, tasks: Iterable[asyncio.Task[ClaimOutcome]], until_s: float, *, has_failed: bool
    ) -> None:
        """Wait for the runs of claims until ``until_s``.

        When one run has failed, no run is retried any more. ``has_failed`` means that a run has failed
        before.
        """
        tasks = list(tasks)
        awaited = list(tasks)

        def leave_all() -> None:
            while awaited:
                self._in_flight.leave(awaited.pop())

        def leave_others(task: asyncio.Task[ClaimOutcome]) -> None:
            if not task.cancelled() and isinstance(task.result(), PrepareVerdict):
                leave_all()

        for task in tasks:
            task.add_done_callback(leave_others)
        if has_failed:
            leave_all()
        try:
            await asyncio.wait(tasks, timeout=until_s - asyncio.get_running_loop().time())
        finally:  # also if the kubelet has cancelled its call
            leave_all()

    def _encode(
        self, operation: ClaimOperation, module: ModuleType, outcomes: Mapping[ClaimRef, ClaimOutcome]
    ) -> bytes:
        """Encode the response of a prepare or unprepare: an answer for each claim, by UID of the claim.

        betterproto does not know the field of the error class, which is appended to the encoded answer.
        """
        verdicts = {ref: outcome for ref, outcome in outcomes.items() if isinstance(outcome, PrepareVerdict)}
        answers = {ref: _encode_devices(module, found) for ref, found in outcomes.items()
                   if not isinstance(found, PrepareVerdict)}  # fmt: skip
        while sum(map(len, answers.values())) > ANSWER_LIMIT:
            largest = max(answers, key=lambda ref: len(answers[ref]))
            size = len(answers.pop(largest))
            error = f"the driver's answer is {size} bytes, limit {ANSWER_LIMIT} for all claims of a call"
            verdicts[largest] = self._claims.classify(largest, DriverError(error, code="driver.bug.answer"))
        for (ref, verdict), text in zip(
            verdicts.items(), kubelet_texts(list(verdicts.values())), strict=True
        ):
            log.debug("claim %s: %s failed: %s", ref, operation, text)
            if operation is ClaimOperation.UNPREPARE:
                answers[ref] = bytes(module.NodeUnprepareResourceResponse(error=text))
            else:
                message = module.NodePrepareResourceResponse(error=text)
                answers[ref] = bytes(message) + encode_error_class(verdict.error_class, self._wire)
        return b"".join(
            message_field(1, message_field(1, ref.uid.encode()) + message_field(2, answers[ref]))
            for ref in outcomes
        )


def _encode_devices(module: ModuleType, devices: Sequence[PreparedDevice]) -> bytes:
    """Encode the answer for a prepared claim; without devices, the answer for an unprepared claim."""
    shares = "share_id" in module.Device.__dataclass_fields__  # v1beta1 has no share_id
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
    request = stream._stream
    assert isinstance(request, HardenedStream)
    left_s = KUBELET_S if request.deadline is None else request.deadline.time_remaining()
    return left_s - min(MARGIN_S, left_s / 2)
