"""``@classified``: any handler, plain or async, function or method; and its claim, wherever it is given."""

import asyncio
import inspect
import re
from dataclasses import dataclass

import pytest
import trio
from prepare_paper import PaperEngine, claim

from agent.driver.prepare_tracker import PrepareTracker
from agent.model.claim import Claim, ClaimRef
from agent.model.prepare import ErrorClass
from agent.prepare.decorator import classified
from agent.prepare.errors import BadConfig, PrepareError
from agent.prepare.patterns import Pattern

A = claim("a")
DESK = PrepareTracker("gpu.example.com", None, PaperEngine())


@pytest.fixture
def desk() -> PrepareTracker:
    return PrepareTracker("gpu.example.com", None, PaperEngine())


def test_a_function_stays_what_it_is():
    @classified(DESK)
    def prepare(claim: Claim, *, dry: bool = False) -> list[str]:
        """Prepares."""
        return [claim.name, str(dry)]

    assert prepare(A, dry=True) == ["a", "True"]
    assert (prepare.__name__, prepare.__doc__) == ("prepare", "Prepares.")
    assert (
        str(inspect.signature(prepare))
        == "(claim: agent.model.claim.Claim, *, dry: bool = False) -> list[str]"
    )


def test_an_async_function_stays_one():
    @classified(DESK)
    async def prepare(claim: Claim) -> str:
        return claim.name

    assert inspect.iscoroutinefunction(prepare)
    assert asyncio.run(prepare(A)) == "a"
    assert trio.run(prepare, A) == "a"


@dataclass
class Monitor:
    """Anything with a tracker."""

    tracker: PrepareTracker


def test_a_method_prepares_and_a_monitor_has_the_desk(desk):
    class Driver:
        @classified(Monitor(desk))
        def prepare(self, claim: Claim) -> str:
            raise BadConfig("no")

        @classified(Monitor(desk))
        async def prepare_async(self, claim: Claim) -> str:
            raise BadConfig("no")

    with pytest.raises(PrepareError):
        Driver().prepare(A)
    with pytest.raises(PrepareError):
        asyncio.run(Driver().prepare_async(claim=claim("b")))
    assert {outcome.claim for outcome in desk.outcomes()} == {A.ref, claim("b").ref}


@dataclass
class Request:
    namespace: str
    name: str
    uid: str


def test_the_claim_can_be_made_of_what_the_handler_is_given(desk):
    @classified(desk, claim=lambda request, **_: Claim(request.namespace, request.name, request.uid))
    def prepare(request: Request, *, reason: str) -> None:
        raise BadConfig(reason)

    with pytest.raises(PrepareError, match="why not"):
        prepare(Request("team", "x", "u1"), reason="why not")
    assert desk.outcomes()[0].claim == ClaimRef("team", "x", "u1")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            Request("team", "x", "u1"),
            "was given a Request, not an agent.Claim; classified(claim=...) can make",
        ),
        (A.ref, "was given a ClaimRef, not an agent.Claim"),
        ("x", "was given no claim, not an agent.Claim"),
    ],
)
def test_what_is_no_claim_is_a_mistake_that_is_named(given, words):
    @classified(DESK)
    def prepare(request: object) -> None:
        pytest.fail("called without a claim")

    with pytest.raises(TypeError, match=re.escape(words)) as caught:
        prepare(given)
    assert "prepare()" in str(caught.value)


def test_patterns_of_a_handler_are_looked_at(desk):
    locked = Pattern(re.compile("bank .* is locked"), "fpga.bank_locked", ErrorClass.PERMANENT)

    @classified(desk, patterns=[locked])
    def prepare(claim: Claim) -> None:
        raise RuntimeError("bank 3 is locked")

    with pytest.raises(PrepareError, match=r"class=permanent code=fpga\.bank_locked"):
        prepare(A)


def test_a_plain_handler_whose_result_must_be_awaited_is_no_success(desk):
    async def prepare(claim: Claim) -> None:
        pytest.fail("nobody awaits it")

    @classified(desk)
    def plain(claim: Claim) -> object:
        return prepare(claim)

    with pytest.raises(PrepareError, match="an async one must be an async def"):
        plain(A)
    assert desk.outcomes()[0].verdict.error_class is ErrorClass.UNKNOWN


def test_a_handler_that_is_decorated_twice_is_judged_once(desk):
    other = PrepareTracker("gpu.example.com", None, PaperEngine())

    @classified(other)
    @classified(desk)
    def prepare(claim: Claim) -> None:
        raise BadConfig("no")

    with pytest.raises(PrepareError):
        prepare(A)
    assert len(desk.outcomes()) == 1
    assert other.outcomes() == ()
