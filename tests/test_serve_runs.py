"""Of each claim one thing at a time, however many calls come and go; and not one thread for each of them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from agent.model.claim import Claim, ClaimRef
from agent.model.prepare import PrepareVerdict
from agent.prepare.classify import Context, classify
from agent.serve.dra_plugin.in_flight import RUNS_LIMIT, InFlightClaims, Kind, Outcome
from agent.serve.dra_plugin.result import PreparedDevice


class Hanging:
    """A driver that does not answer until it is let go; counts its calls by claim."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.calls: list[tuple[Kind, str]] = []
        self.at_once: dict[str, int] = {}
        self.most = 0

    async def work(self, kind: Kind, ref: ClaimRef, until_s: float) -> tuple[PreparedDevice, ...]:
        self.calls.append((kind, ref.uid))
        self.at_once[ref.uid] = self.at_once.get(ref.uid, 0) + 1
        self.most = max(self.most, self.at_once[ref.uid])
        try:
            await self.go.wait()
        finally:
            self.at_once[ref.uid] -= 1
        return ()


def judge(ref: ClaimRef, error: Exception) -> PrepareVerdict:
    return classify(error, Context(Claim(*ref), {}))


def ref(uid: str = "u") -> ClaimRef:
    return ClaimRef("ns", "c", uid)


def now() -> float:
    return asyncio.get_running_loop().time()


def summary(outcome: Outcome) -> str:
    assert isinstance(outcome, PrepareVerdict)
    return f"{outcome.code}: {outcome.summary}"


def run(test: Callable[[Hanging, InFlightClaims], Awaitable[None]]) -> None:
    async def main() -> None:
        driver = Hanging()
        await test(driver, InFlightClaims(driver.work, judge))

    asyncio.run(main())


def test_what_waited_in_vain_does_not_let_the_next_one_past_what_hangs() -> None:
    async def test(driver: Hanging, runs: InFlightClaims) -> None:
        hangs = runs.join(Kind.PREPARE, ref(), now())
        for _ in range(3):
            vain = await runs.join(Kind.UNPREPARE, ref(), now())
            assert summary(vain).startswith("deadline: its prepare before is not done yet")
            assert runs.join(Kind.PREPARE, ref(), now() + 10) is hangs
        driver.go.set()
        assert await hangs == ()
        assert await runs.join(Kind.UNPREPARE, ref(), now() + 10) == ()
        assert driver.calls == [(Kind.PREPARE, "u"), (Kind.UNPREPARE, "u")]

    run(test)


def test_who_waits_behind_one_that_gives_up_still_waits_for_what_hangs() -> None:
    async def test(driver: Hanging, runs: InFlightClaims) -> None:
        hangs = runs.join(Kind.PREPARE, ref(), now())
        vain = runs.join(Kind.UNPREPARE, ref(), now())
        patient = runs.join(Kind.PREPARE, ref(), now() + 10)
        await vain
        await asyncio.sleep(0.01)
        assert not patient.done()
        assert driver.calls == [(Kind.PREPARE, "u")]
        driver.go.set()
        assert (await hangs, await patient) == ((), ())
        assert driver.most == 1

    run(test)


def test_a_driver_that_hangs_is_called_for_so_many_claims_and_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(driver: Hanging, runs: InFlightClaims) -> None:
        hang = [runs.join(Kind.PREPARE, ref(f"u-{number}"), now()) for number in range(RUNS_LIMIT)]
        vain = [runs.join(Kind.PREPARE, ref(f"v-{number}"), now()) for number in range(10)]
        texts = {summary(one) for one in await asyncio.gather(*vain)}
        assert texts == {f"deadline: {RUNS_LIMIT} others were not done in time"}
        assert len(driver.calls) == RUNS_LIMIT
        driver.go.set()
        assert set(await asyncio.gather(*hang)) == {()}
        assert await runs.join(Kind.PREPARE, ref("v-0"), now() + 10) == ()

    caplog.set_level(logging.WARNING, "agent.serve.dra_plugin.in_flight")
    run(test)
    assert [record.getMessage() for record in caplog.records] == [
        f"{RUNS_LIMIT} claims are being worked on, 1 more waited in vain; does the driver hang?"
    ]
