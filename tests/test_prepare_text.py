"""What the kubelet is told: one line, what matters survives, and the same facts are the same bytes."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepare_cases import ONE, TWO, claim_of, health_of, holding, ref

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.prepare import ErrorClass, PrepareVerdict, Scope
from agent.prepare.classify import Context, classify, judge_devices
from agent.prepare.errors import BadConfig, FailedDevice, TransientError
from agent.prepare.message import FOLLOWS, LIMIT, text, texts

HEAD = re.compile(
    r"\[class=(?P<class>[a-z-]+) code=(?P<code>[^ \]]+)"
    r"(?: device=(?P<device>[^\]]+?))?(?: request=(?P<request>[^\]]+?))?"
    r" retry=(?P<retry>[a-z-]+)\] (?P<rest>.+)"
)
WORDS = st.text(max_size=400)


def verdict_of(
    claim: str = "claim-a", error_class: ErrorClass = ErrorClass.TRANSIENT, **more: object
) -> PrepareVerdict:
    base = PrepareVerdict(error_class, "a.b", Scope.CLAIM, ClaimRef("ns", claim, f"uid-{claim}"), "1 of 2")
    return replace(base, **more)  # type: ignore[arg-type]


def test_the_line_is_that_of_the_contract() -> None:
    verdict = judge_devices(holding(ONE, health_of("gpu-0", "gpu.xid.79", "GPU fell off the bus")))
    assert verdict is not None
    other = classify(
        BadConfig("no profile 9g.90gb", code="gpu.mig.profile_invalid"),
        Context(claim_of("gpu-1", name="claim-b")),
    )
    assert text(verdict, [other, verdict]) == (
        "[class=failed-device code=gpu.xid.79 device=gpu.example.com/node1/gpu-0 request=r-gpu-0 "
        "retry=after-repair] GPU fell off the bus; the device is Unhealthy, its taint is offered. "
        "Other failing claims in this call: ns/claim-b (bad-config gpu.mig.profile_invalid)."
    )


def test_a_detail_stands_between_what_follows_and_the_others() -> None:
    verdict = verdict_of(detail="bank 3 of 8")
    assert text(verdict, [verdict_of("claim-b")]) == (
        "[class=transient code=a.b retry=later] 1 of 2; it is tried again. bank 3 of 8. "
        "Other failing claims in this call: ns/claim-b (transient a.b)."
    )


def test_long_names_that_differ_at_their_ends_are_told_apart_and_counted() -> None:
    verdicts = [verdict_of("n" * 230 + f"-{number:04}") for number in range(100)]
    lines = texts(verdicts)
    assert lines == [text(verdict, verdicts) for verdict in verdicts]
    ends = re.compile(r": ns/n+\.\.\.n+-(000[01]) \(transient a\.b\) and 98 more\.$")
    assert all(map(ends.search, lines))


def test_a_summary_ends_without_a_full_stop_but_one_that_was_cut_says_so() -> None:
    assert "] 1 of 2; it is tried again." in text(verdict_of(summary="1 of 2."))
    assert "] 1 of...; it is tried again." in text(verdict_of(summary="1 of..."))


def test_a_device_that_failed_another_claim_is_named() -> None:
    other = classify(
        FailedDevice("gpu-1", "broken", code="fw.stuck"), Context(replace(TWO, name="claim-b", uid="b"))
    )
    assert "ns/claim-b (failed-device fw.stuck device=gpu.example.com/node1/gpu-1)." in text(
        verdict_of(), [other]
    )


@pytest.mark.parametrize("error_class", ErrorClass)
def test_every_class_says_what_follows(error_class: ErrorClass) -> None:
    said = text(verdict_of(error_class=error_class))
    assert FOLLOWS[error_class] in said
    found = HEAD.fullmatch(said)
    assert found
    assert found["class"] == error_class


def test_neither_counts_nor_times_change_a_byte() -> None:
    verdict = verdict_of(detail="more")
    later = replace(verdict, count=17, first_wall_s=1.0, last_wall_s=99.0, confidence=0.3, evidence=("x",),
                    retry_after_s=9.5)  # fmt: skip
    assert text(verdict) == text(later)


@given(
    st.permutations([f"claim-{letter}" for letter in "bcdef"]), st.permutations(["gpu-0", "gpu-1", "gpu-2"])
)
def test_the_order_of_maps_changes_no_byte(claims: list[str], devices: list[str]) -> None:
    verdict = verdict_of(devices=tuple(map(ref, devices)), requests=tuple(devices))
    ordered = verdict_of(devices=tuple(map(ref, sorted(devices))), requests=tuple(sorted(devices)))
    assert text(verdict, [verdict_of(claim) for claim in claims]) == text(
        ordered, [verdict_of(claim) for claim in sorted(claims)]
    )


def test_each_failing_claim_names_all_the_others_but_not_itself() -> None:
    verdicts = [verdict_of(claim) for claim in ("claim-a", "claim-b", "claim-c")]
    for verdict in verdicts:
        said = text(verdict, verdicts).partition("Other failing claims")[2]
        assert all((str(other.claim) in said) == (other is not verdict) for other in verdicts)


def test_a_claim_that_was_made_anew_under_its_name_is_another() -> None:
    old, new = verdict_of("claim-a"), verdict_of("claim-a")
    new = replace(new, claim=new.claim._replace(uid="another"))
    said = texts([old, new])
    assert said == [text(old, [old, new]), text(new, [old, new])]
    assert said[0].endswith("Other failing claims in this call: ns/claim-a (transient a.b).")


def test_too_many_are_counted() -> None:
    devices = tuple(DeviceRef("gpu.example.com", "node1", f"gpu-{number:02}") for number in range(64))
    others = [verdict_of(f"claim-{number:03}") for number in range(200)]
    said = text(verdict_of(devices=devices, summary="s" * 200, detail="d" * 600), others)
    found = HEAD.fullmatch(said)
    assert found
    assert re.fullmatch(r"(gpu\.example\.com/node1/gpu-\d\d,?)+ and 5\d more", found["device"])
    assert re.search(r"claim-000 \(transient a\.b\), .* and 1\d\d more\.$", said)
    assert len(said.encode()) <= LIMIT


def test_a_long_detail_goes_first_then_the_summary() -> None:
    others = [verdict_of("claim-b")]
    said = text(verdict_of(detail="d" * 5000), others)
    assert len(said.encode()) == LIMIT
    assert said.endswith("ddd... Other failing claims in this call: ns/claim-b (transient a.b).")
    assert "1 of 2; it is tried again." in said
    said = text(verdict_of(summary="ä" * 5000, detail="d" * 50), others)
    assert said.endswith(
        "ää...; it is tried again. Other failing claims in this call: ns/claim-b (transient a.b)."
    )


def test_names_as_long_as_kubernetes_lets_them_be_leave_room_for_the_summary() -> None:
    pool, device = "p" * 253, "d" * 63
    devices = tuple(DeviceRef("x" * 63, pool, f"{device[:-1]}{digit}") for digit in range(3))
    long = ClaimRef("n" * 63, "c" * 253, "uid")
    others = [
        replace(verdict_of(), claim=long._replace(uid=str(n)), code="c" * 100, devices=devices,
                error_class=ErrorClass.FAILED_DEVICE)
        for n in range(3)
    ]  # fmt: skip
    verdict = verdict_of(
        error_class=ErrorClass.FAILED_DEVICE, code="c" * 100, devices=devices,
        requests=tuple(f"{'r' * 63}/{'s' * 60}{n}" for n in range(4)), summary="s" * 200,
    )  # fmt: skip
    said = text(verdict, others)
    assert len(said.encode()) <= LIMIT
    assert "] " + "s" * 90 in said
    assert " and 2 more" in said


def test_what_a_driver_writes_ends_no_bracket() -> None:
    said = text(verdict_of(code="a] b", requests=("r = 1, [x]",), summary="a\nb"))
    assert said == "[class=transient code=a)_b request=r___1__(x) retry=later] a b; it is tried again."


def test_a_driver_s_error_is_told_with_its_arithmetic() -> None:
    error = TransientError("8 pages of 2Mi free on node 0, 12 needed.", code="mem.hugepages.insufficient")
    assert text(classify(error, Context(ONE))) == (
        "[class=transient code=mem.hugepages.insufficient device=gpu.example.com/node1/gpu-0 request=r-gpu-0 "
        "retry=after-release] 8 pages of 2Mi free on node 0, 12 needed; it is tried again."
    )


VERDICTS = st.builds(
    lambda error_class, words, devices, requests, uid: PrepareVerdict(
        error_class, words[0], Scope.CLAIM, ClaimRef(words[1], words[2], uid), words[3],
        requests=tuple(requests), devices=tuple(DeviceRef(*device) for device in devices), detail=words[4],
    ),
    st.sampled_from(ErrorClass),
    st.tuples(WORDS, WORDS, WORDS, WORDS, WORDS),
    st.lists(st.tuples(WORDS, WORDS, WORDS), max_size=4),
    st.lists(WORDS, max_size=4),
    st.sampled_from("abc"),
)  # fmt: skip


@given(VERDICTS, st.lists(VERDICTS, max_size=4))
def test_whatever_goes_in_one_short_valid_line_comes_out(
    verdict: PrepareVerdict, others: list[PrepareVerdict]
) -> None:
    said = text(verdict, others)
    assert len(said.encode()) <= LIMIT
    assert said.isprintable()
    assert said.startswith(f"[class={verdict.error_class} code=")
    found = HEAD.fullmatch(said)
    assert found
    assert bool(found["device"]) == bool(verdict.devices)
    assert ("Other failing claims in this call: " in said) or all(
        other.claim == verdict.claim for other in others
    )
    assert said == text(verdict, list(reversed(others)))


def test_what_somebody_must_mend_is_not_promised_to_pass_by_itself() -> None:
    said = text(verdict_of(code="gpu.driver.mismatch", summary="570 and 580"))
    assert "retry=after-fix" in said
    assert said.endswith("570 and 580; the node or its driver must be mended.")
