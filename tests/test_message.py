"""What the kubelet is told in words: one line, code first, as short as it keeps it, never half a letter."""

from hypothesis import given
from hypothesis import strategies as st

from agent.health.message import LIMIT, cut, message
from agent.model.health import Blame, Cause, Severity
from agent.model.time import Instant

anything = st.text(max_size=2000)


def cause(code: str, severity: Severity, evidence: str = "facts", advice: str = "") -> Cause:
    return Cause(code, severity, Blame.HARDWARE, evidence, advice, Instant(0, 0.0))


def test_nothing_wrong_is_nothing_to_say() -> None:
    assert message([]) == ""


def test_info_is_not_for_the_wire() -> None:
    info = cause("a.note", Severity.INFO)
    assert message([info]) == ""
    assert message([cause("b.bad", Severity.DEGRADED), info]) == "b.bad: facts"


def test_codes_come_first_the_worst_leads_and_its_advice_ends_the_line() -> None:
    bad = cause("a.bad", Severity.UNHEALTHY, "1 of 2", "mend it")
    meh = cause("b.meh", Severity.DEGRADED, "3 of 4", "look at it")
    assert message([bad, meh]) == "a.bad: 1 of 2; b.meh: 3 of 4. Advice: mend it"


def test_the_limit_is_the_kubelets() -> None:
    assert LIMIT == 1024


def test_what_fits_exactly_is_not_cut() -> None:
    assert cut("x" * LIMIT) == "x" * LIMIT
    assert cut("x" * (LIMIT + 1)) == "x" * (LIMIT - 3) + "..."


def test_a_letter_is_never_cut_through() -> None:
    assert cut("äääx", 7) == "äääx"
    assert cut("ääääx", 8) == "ää..."
    assert cut("x" * 1020 + "🦀🦀") == "x" * 1020 + "..."


def test_a_lone_surrogate_does_not_reach_the_wire() -> None:
    assert cut("a\udc80b") == "a?b"


@given(anything, st.integers(3, 1100))
def test_a_cut_text_is_valid_short_and_begins_like_the_whole(text: str, limit: int) -> None:
    done = cut(text, limit)
    assert len(done.encode()) <= limit
    whole = text.encode("utf-8", "replace").decode()
    assert done == whole or (done.endswith("...") and whole.startswith(done[:-3]))


@given(anything, anything)
def test_the_code_of_the_worst_survives_any_evidence(evidence: str, advice: str) -> None:
    said = message([cause("a.bad", Severity.UNHEALTHY, evidence, advice)])
    assert said.startswith("a.bad: ")
    assert len(said.encode()) <= LIMIT
