"""Message for the kubelet: one line, code first, truncated at the kubelet's limit between characters."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from agent.health.verdict import MAX_MESSAGE_BYTES, kubelet_message, truncate_utf8
from agent.model.health import Blame, Cause, Repair, Severity
from agent.model.time import Instant

anything = st.text(max_size=2000)


def cause(code: str, severity: Severity, evidence: str = "facts", advice: str = "") -> Cause:
    return Cause(code, severity, Blame.HARDWARE, evidence, advice, Instant(0, 0.0))


def test_message_without_causes_is_empty() -> None:
    assert kubelet_message([]) == ""


def test_message_omits_info() -> None:
    info = cause("a.note", Severity.INFO)
    assert kubelet_message([info]) == ""
    assert kubelet_message([cause("b.bad", Severity.DEGRADED), info]) == "b.bad: facts"


def test_message_lists_codes_worst_first_and_ends_with_advice() -> None:
    bad = cause("a.bad", Severity.UNHEALTHY, "1 of 2", "mend it")
    meh = cause("b.meh", Severity.DEGRADED, "3 of 4", "check it")
    assert kubelet_message([bad, meh]) == "a.bad: 1 of 2; b.meh: 3 of 4. Advice: mend it"


def test_message_ends_with_the_advice_for_the_worst_repair() -> None:
    """The table of devices and the page show it, too."""
    mild = cause("a.bad", Severity.UNHEALTHY, "1 of 2", "restart the driver")
    hard = replace(cause("b.bad", Severity.UNHEALTHY, "3 of 4", "reboot"), repair=Repair.REBOOT_NODE)
    note = replace(cause("c.meh", Severity.DEGRADED, "5 of 6", "replace"), repair=Repair.REPLACE_HARDWARE)
    assert kubelet_message([mild, hard, note]).endswith("c.meh: 5 of 6. Advice: reboot")


def test_message_limit_is_that_of_the_kubelet() -> None:
    assert MAX_MESSAGE_BYTES == 1024


def test_text_of_exactly_the_limit_is_not_truncated() -> None:
    assert truncate_utf8("x" * MAX_MESSAGE_BYTES) == "x" * MAX_MESSAGE_BYTES
    assert truncate_utf8("x" * (MAX_MESSAGE_BYTES + 1)) == "x" * (MAX_MESSAGE_BYTES - 3) + "..."


def test_truncation_keeps_characters_whole() -> None:
    assert truncate_utf8("äääx", 7) == "äääx"
    assert truncate_utf8("ääääx", 8) == "ää..."
    assert truncate_utf8("x" * 1020 + "🦀🦀") == "x" * 1020 + "..."


def test_lone_surrogate_is_replaced() -> None:
    assert truncate_utf8("a\udc80b") == "a?b"


@given(anything, st.integers(3, 1100))
def test_truncated_text_is_a_valid_prefix_within_the_limit(text: str, limit: int) -> None:
    done = truncate_utf8(text, limit)
    assert len(done.encode()) <= limit
    whole = text.encode("utf-8", "replace").decode()
    assert done == whole or (done.endswith("...") and whole.startswith(done[:-3]))


@given(anything, anything)
def test_code_of_the_worst_cause_survives_any_evidence(evidence: str, advice: str) -> None:
    text = kubelet_message([cause("a.bad", Severity.UNHEALTHY, evidence, advice)])
    assert text.startswith("a.bad: ")
    assert len(text.encode()) <= MAX_MESSAGE_BYTES
