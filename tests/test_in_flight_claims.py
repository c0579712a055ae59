"""In-flight runs: one run per claim at a time for any number of calls, and not one thread for each call."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable

import pytest
from patience import PATIENCE_S

from agent.model.claim import Claim, ClaimRef
from agent.model.prepare import PrepareVerdict
from agent.prepare.classify import PrepareContext, classify
from agent.serve.dra_plugin.prepared_devices import PreparedDevice
from agent.serve.dra_plugin.service import RUNS_LIMIT, ClaimOperation, ClaimOutcome, InFlightClaims


class HangingDriver:
    """Driver that does not answer until it is released; counts its calls by claim."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.calls: list[tuple[ClaimOperation, str]] = []
        self.running: dict[str, int] = {}
        self.unawaited: dict[str, threading.Event] = {}
        self.maximum = 0

    async def run_claim(
        self, kind: ClaimOperation, ref: ClaimRef, until_s: float, unawaited: threading.Event
    ) -> tuple[PreparedDevice, ...]:
        self.unawaited[ref.uid] = unawaited
        self.calls.append((kind, ref.uid))
        self.running[ref.uid] = self.running.get(ref.uid, 0) + 1
        self.maximum = max(self.maximum, self.running[ref.uid])
        try:
            await self.released.wait()
        finally:
            self.running[ref.uid] -= 1
        return ()


def classify_failure(ref: ClaimRef, error: Exception) -> PrepareVerdict:
    return classify(error, PrepareContext(Claim(*ref), {}))


def ref(uid: str = "u") -> ClaimRef:
    return ClaimRef("ns", "c", uid)


def now() -> float:
    return asyncio.get_running_loop().time()


def summary(outcome: ClaimOutcome) -> str:
    assert isinstance(outcome, PrepareVerdict)
    return f"{outcome.code}: {outcome.summary}"


def run(test: Callable[[HangingDriver, InFlightClaims], Awaitable[None]]) -> None:
    async def main() -> None:
        driver = HangingDriver()
        await test(driver, InFlightClaims(driver.run_claim, classify_failure))

    asyncio.run(main())


def test_timed_out_run_keeps_hanging_run_in_front() -> None:
    async def test(driver: HangingDriver, runs: InFlightClaims) -> None:
        hanging = runs.join_or_start(ClaimOperation.PREPARE, ref(), now())
        for _ in range(3):
            timed_out = await runs.join_or_start(ClaimOperation.UNPREPARE, ref(), now())
            assert summary(timed_out).startswith("deadline: the claim's previous prepare is not done yet")
            assert runs.join_or_start(ClaimOperation.PREPARE, ref(), now() + PATIENCE_S) is hanging
        driver.released.set()
        assert await hanging == ()
        assert await runs.join_or_start(ClaimOperation.UNPREPARE, ref(), now() + PATIENCE_S) == ()
        assert driver.calls == [(ClaimOperation.PREPARE, "u"), (ClaimOperation.UNPREPARE, "u")]

    run(test)


def test_run_behind_timed_out_run_waits_for_hanging_run() -> None:
    async def test(driver: HangingDriver, runs: InFlightClaims) -> None:
        hanging = runs.join_or_start(ClaimOperation.PREPARE, ref(), now())
        timed_out = runs.join_or_start(ClaimOperation.UNPREPARE, ref(), now())
        waiting = runs.join_or_start(ClaimOperation.PREPARE, ref(), now() + PATIENCE_S)
        await timed_out
        await asyncio.sleep(0.01)
        assert not waiting.done()
        assert driver.calls == [(ClaimOperation.PREPARE, "u")]
        driver.released.set()
        assert (await hanging, await waiting) == ((), ())
        assert driver.maximum == 1

    run(test)


def test_run_is_unawaited_while_no_call_waits() -> None:
    async def test(driver: HangingDriver, runs: InFlightClaims) -> None:
        first, second = (
            runs.join_or_start(ClaimOperation.PREPARE, ref(), now() + PATIENCE_S) for _ in range(2)
        )
        await asyncio.sleep(0)
        unawaited = driver.unawaited["u"]
        seen = [unawaited.is_set()]
        for task in (first, second):
            runs.leave(task)
            seen.append(unawaited.is_set())
        runs.join_or_start(ClaimOperation.PREPARE, ref(), now() + PATIENCE_S)
        assert [*seen, unawaited.is_set()] == [False, False, True, False]
        driver.released.set()
        await first
        runs.leave(first)

    run(test)


def test_hanging_driver_is_called_up_to_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(driver: HangingDriver, runs: InFlightClaims) -> None:
        hanging = [
            runs.join_or_start(ClaimOperation.PREPARE, ref(f"u-{number}"), now())
            for number in range(RUNS_LIMIT)
        ]
        timed_out = [
            runs.join_or_start(ClaimOperation.PREPARE, ref(f"v-{number}"), now()) for number in range(10)
        ]
        texts = {summary(outcome) for outcome in await asyncio.gather(*timed_out)}
        assert texts == {f"deadline: limit of {RUNS_LIMIT} claims at a time reached; none finished in time"}
        assert len(driver.calls) == RUNS_LIMIT
        driver.released.set()
        assert set(await asyncio.gather(*hanging)) == {()}
        assert await runs.join_or_start(ClaimOperation.PREPARE, ref("v-0"), now() + PATIENCE_S) == ()

    caplog.set_level(logging.WARNING, "agent.serve.dra_plugin.service")
    run(test)
    logged = [
        record.getMessage() for record in caplog.records if record.name == "agent.serve.dra_plugin.service"
    ]
    assert logged == [
        f"claims: {RUNS_LIMIT} claims are in progress, the limit; 1 more timed out while waiting; "
        "the driver may hang"
    ]
