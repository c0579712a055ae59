"""``@classified``: any handler, plain or async, function or method; and its claim, wherever it is given."""

import asyncio
import inspect
import re
from dataclasses import dataclass

import pytest
import trio
from prepare_samples import FakeEngine, claim

from agent.driver.prepare_failure_tracker import PrepareFailureTracker
from agent.errors import ConfigError
from agent.model.claim import Claim, ClaimRef
from agent.model.prepare import ErrorClass
from agent.prepare.error_tables import ErrorPattern
from agent.prepare.errors import BadConfigError, PrepareError
from agent.prepare.step_runners import classified

A = claim("a")
TRACKER = PrepareFailureTracker("gpu.example.com", None, FakeEngine())


@pytest.fixture
def tracker() -> PrepareFailureTracker:
    return PrepareFailureTracker("gpu.example.com", None, FakeEngine())


def test_decorated_function_keeps_its_metadata():
    @classified(TRACKER)
    def prepare(claim: Claim, *, dry: bool = False) -> list[str]:
        """Prepare."""
        return [claim.name, str(dry)]

    assert prepare(A, dry=True) == ["a", "True"]
    assert (prepare.__name__, prepare.__doc__) == ("prepare", "Prepare.")
    assert (
        str(inspect.signature(prepare))
        == "(claim: agent.model.claim.Claim, *, dry: bool = False) -> list[str]"
    )


def test_decorated_async_function_stays_async():
    @classified(TRACKER)
    async def prepare(claim: Claim) -> str:
        return claim.name

    assert inspect.iscoroutinefunction(prepare)
    assert asyncio.run(prepare(A)) == "a"
    assert trio.run(prepare, A) == "a"


@dataclass
class Monitor:
    """Anything with a tracker."""

    tracker: PrepareFailureTracker


def test_method_can_be_decorated_with_a_monitor(tracker):
    class Driver:
        @classified(Monitor(tracker))
        def prepare(self, claim: Claim) -> str:
            raise BadConfigError("no")

        @classified(Monitor(tracker))
        async def prepare_async(self, claim: Claim) -> str:
            raise BadConfigError("no")

    with pytest.raises(PrepareError):
        Driver().prepare(A)
    with pytest.raises(PrepareError):
        asyncio.run(Driver().prepare_async(claim=claim("b")))
    assert {outcome.claim for outcome in tracker.outcomes()} == {A.ref, claim("b").ref}


@dataclass
class Request:
    namespace: str
    name: str
    uid: str


def test_claim_function_gets_the_handler_arguments(tracker):
    @classified(tracker, get_claim=lambda request, **_: Claim(request.namespace, request.name, request.uid))
    def prepare(request: Request, *, reason: str) -> None:
        raise BadConfigError(reason)

    with pytest.raises(PrepareError, match="why not"):
        prepare(Request("team", "x", "u1"), reason="why not")
    assert tracker.outcomes()[0].claim == ClaimRef("team", "x", "u1")


@pytest.mark.parametrize(
    ("given", "error_text"),
    [
        (
            Request("team", "x", "u1"),
            "was given a Request, not a drahealth.Claim; pass classified(get_claim=...)",
        ),
        (A.ref, "was given a ClaimRef, not a drahealth.Claim"),
        ("x", "was given no claim, not a drahealth.Claim"),
    ],
)
def test_handler_without_a_claim_argument_raises_type_error(given, error_text):
    @classified(TRACKER)
    def prepare(request: object) -> None:
        pytest.fail("called without a claim")

    with pytest.raises(TypeError, match=re.escape(error_text)) as caught:
        prepare(given)
    assert "prepare()" in str(caught.value)


def test_decorator_without_a_monitor_raises_type_error():
    """Without the error a call of the handler would return a function, and prepare nothing."""
    for given in (lambda claim: None, None, "card.example.com"):
        with pytest.raises(TypeError, match=r"is not a monitor; write @drahealth\.classified\(monitor\)"):
            classified(given)


def test_handler_patterns_are_used(tracker):
    locked = ErrorPattern(re.compile("bank .* is locked"), "fpga.bank_locked", ErrorClass.PERMANENT)

    @classified(tracker, patterns=[locked])
    def prepare(claim: Claim) -> None:
        raise RuntimeError("bank 3 is locked")

    with pytest.raises(PrepareError, match=r"class=permanent code=fpga\.bank_locked"):
        prepare(A)


def test_pattern_that_is_not_compiled_is_refused():
    with pytest.raises(ConfigError, match=r"match must be re\.compile"):
        ErrorPattern("bank .* is locked", "fpga.bank_locked", ErrorClass.PERMANENT)
    with pytest.raises(ConfigError, match="and error_class an ErrorClass"):
        ErrorPattern(re.compile("bank"), ErrorClass.PERMANENT, "fpga.bank_locked")


def test_plain_handler_with_awaitable_result_fails(tracker):
    async def prepare(claim: Claim) -> None:
        pytest.fail("awaited")

    @classified(tracker)
    def plain(claim: Claim) -> object:
        return prepare(claim)

    with pytest.raises(PrepareError, match="define it with async def"):
        plain(A)
    assert tracker.outcomes()[0].verdict.error_class is ErrorClass.UNKNOWN


def test_twice_decorated_handler_is_classified_once(tracker):
    other = PrepareFailureTracker("gpu.example.com", None, FakeEngine())

    @classified(other)
    @classified(tracker)
    def prepare(claim: Claim) -> None:
        raise BadConfigError("no")

    with pytest.raises(PrepareError):
        prepare(A)
    assert len(tracker.outcomes()) == 1
    assert other.outcomes() == ()
