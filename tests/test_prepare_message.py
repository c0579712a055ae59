"""Text for the kubelet: one line, all that matters fits, and equal facts give equal bytes."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepare_cases import ONE, TWO, claim_of, health_of, prepare_context, ref

from agent.model.claim import Claim, ClaimDevice, ClaimRef, DeviceRef
from agent.model.prepare import ErrorClass, OtherDriverFailure, PrepareVerdict, Scope
from agent.prepare.classify import PrepareContext, classify, classify_unhealthy_devices
from agent.prepare.errors import BadConfigError, FailedDeviceError, TransientError
from agent.prepare.kubelet_message import CONSEQUENCE_TEXTS, MAX_MESSAGE_BYTES, kubelet_text, kubelet_texts

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


def test_text_matches_the_documented_format() -> None:
    verdict = classify_unhealthy_devices(
        prepare_context(ONE, health_of("gpu-0", "gpu.xid.79", "GPU fell off the bus"))
    )
    assert verdict is not None
    other = classify(
        BadConfigError("no profile 9g.90gb", code="gpu.mig.profile_invalid"),
        PrepareContext(claim_of("gpu-1", name="claim-b")),
    )
    assert kubelet_text(verdict, [other, verdict]) == (
        "[class=failed-device code=gpu.xid.79 device=gpu.example.com/node1/gpu-0 request=r-gpu-0 "
        "retry=after-repair] GPU fell off the bus; the device is Unhealthy, its taint is offered. "
        "Other failing claims in this call: ns/claim-b (bad-config gpu.mig.profile_invalid)."
    )


def test_detail_comes_between_consequence_and_other_claims() -> None:
    verdict = verdict_of(detail="bank 3 of 8")
    assert kubelet_text(verdict, [verdict_of("claim-b")]) == (
        "[class=transient code=a.b retry=later] 1 of 2; the kubelet retries. bank 3 of 8. "
        "Other failing claims in this call: ns/claim-b (transient a.b)."
    )


def test_long_names_with_different_ends_stay_distinct() -> None:
    verdicts = [verdict_of("n" * 230 + f"-{number:04}") for number in range(100)]
    lines = kubelet_texts(verdicts)
    assert lines == [kubelet_text(verdict, verdicts) for verdict in verdicts]
    for line in lines:
        ends = re.findall(r"[:,] ns/n+\.\.\.n+-(000\d) \(transient a\.b\)", line)
        assert len(set(ends)) == len(ends) == 4
        assert line.endswith(" and 95 more.")


def test_summary_has_no_full_stop_but_keeps_its_cut_mark() -> None:
    assert "] 1 of 2; the kubelet retries." in kubelet_text(verdict_of(summary="1 of 2."))
    assert "] 1 of...; the kubelet retries." in kubelet_text(verdict_of(summary="1 of..."))


def test_failed_device_of_another_claim_is_named() -> None:
    other = classify(
        FailedDeviceError("gpu-1", "broken", code="fw.stuck"),
        PrepareContext(replace(TWO, name="claim-b", uid="b")),
    )
    assert "ns/claim-b (failed-device fw.stuck device=gpu.example.com/node1/gpu-1)." in kubelet_text(
        verdict_of(), [other]
    )


@pytest.mark.parametrize("error_class", ErrorClass)
def test_every_class_has_a_consequence(error_class: ErrorClass) -> None:
    line = kubelet_text(verdict_of(error_class=error_class))
    assert CONSEQUENCE_TEXTS[error_class] in line
    found = HEAD.fullmatch(line)
    assert found
    assert found["class"] == error_class


def test_counts_and_times_do_not_change_the_text() -> None:
    verdict = verdict_of(detail="more")
    later = replace(verdict, count=17, first_wall_s=1.0, last_wall_s=99.0, confidence=0.3, evidence=("x",),
                    retry_after_s=9.5)  # fmt: skip
    assert kubelet_text(verdict) == kubelet_text(later)


@given(
    st.permutations([f"claim-{letter}" for letter in "bcdef"]), st.permutations(["gpu-0", "gpu-1", "gpu-2"])
)
def test_order_of_maps_does_not_change_the_text(claims: list[str], devices: list[str]) -> None:
    verdict = verdict_of(devices=tuple(map(ref, devices)), requests=tuple(devices))
    ordered = verdict_of(devices=tuple(map(ref, sorted(devices))), requests=tuple(sorted(devices)))
    assert kubelet_text(verdict, [verdict_of(claim) for claim in claims]) == kubelet_text(
        ordered, [verdict_of(claim) for claim in sorted(claims)]
    )


def failures_elsewhere(*failures: tuple[str, str]) -> list[OtherDriverFailure]:
    return [OtherDriverFailure(driver, verdict_of(claim)) for driver, claim in failures]


def test_failures_at_other_drivers_follow_those_of_the_call() -> None:
    others = failures_elsewhere(("nic.example.com", "claim-n"), ("cpu.example.com", "claim-c"))
    first, second = kubelet_texts(
        [verdict_of("claim-a"), verdict_of("claim-b")],
        lambda claim: others if claim.name == "claim-a" else [],
    )
    assert first.endswith(
        "Other failing claims in this call: ns/claim-b (transient a.b). Failing claims of the pod's other"
        " drivers: ns/claim-c (cpu.example.com transient a.b), ns/claim-n (nic.example.com transient a.b)."
    )
    assert second.endswith("Other failing claims in this call: ns/claim-a (transient a.b).")
    assert first == kubelet_texts([verdict_of("claim-a"), verdict_of("claim-b")], lambda _: others[::-1])[0]


def test_many_failures_at_other_drivers_leave_room_for_the_summary() -> None:
    pool, device = "p" * 253, "d" * 63
    devices = tuple(DeviceRef("x" * 63, pool, f"{device[:-1]}{digit}") for digit in range(3))
    verdicts = [
        replace(verdict_of(f"{'c' * 250}{number}"), devices=devices, code="c" * 100, summary="s" * 200,
                requests=("r" * 63, "q" * 63))
        for number in range(3)
    ]  # fmt: skip
    others = failures_elsewhere(*(("x" * 63, f"{'n' * 250}{number}") for number in range(9)))
    for line in kubelet_texts(verdicts, lambda _: others):
        assert len(line.encode()) <= MAX_MESSAGE_BYTES
        assert "] " + "s" * 90 in line
        assert " and 1 more. Failing claims of the pod's other drivers: " in line
        assert line.endswith(" and 8 more.")


def test_each_text_names_all_other_failed_claims() -> None:
    verdicts = [verdict_of(claim) for claim in ("claim-a", "claim-b", "claim-c")]
    for verdict in verdicts:
        line = kubelet_text(verdict, verdicts).partition("Other failing claims")[2]
        assert all((str(other.claim) in line) == (other is not verdict) for other in verdicts)


def test_recreated_claim_of_the_same_name_is_another_claim() -> None:
    old, new = verdict_of("claim-a"), verdict_of("claim-a")
    new = replace(new, claim=new.claim._replace(uid="another"))
    line = kubelet_texts([old, new])
    assert line == [kubelet_text(old, [old, new]), kubelet_text(new, [old, new])]
    assert line[0].endswith("Other failing claims in this call: ns/claim-a (transient a.b).")


def test_claims_that_do_not_fit_are_counted() -> None:
    devices = tuple(DeviceRef("gpu.example.com", "node1", f"gpu-{number:02}") for number in range(64))
    others = [verdict_of(f"claim-{number:03}") for number in range(200)]
    line = kubelet_text(verdict_of(devices=devices, summary="s" * 200, detail="d" * 600), others)
    found = HEAD.fullmatch(line)
    assert found
    assert re.fullmatch(r"(gpu\.example\.com/node1/gpu-\d\d,?)+ and 5\d more", found["device"])
    assert re.search(r"claim-000 \(transient a\.b\), .* and 1\d\d more\.$", line)
    assert len(line.encode()) <= MAX_MESSAGE_BYTES


def test_other_claims_and_devices_fill_the_room() -> None:
    claims = [verdict_of(f"claim-{number:02}") for number in range(60)]
    for line in kubelet_texts(claims):
        named = len(re.findall(r"ns/claim-\d\d \(transient a\.b\)", line))
        assert line.endswith(f" and {59 - named} more.")
        next_entry = len(", ns/claim-00 (transient a.b)")
        assert MAX_MESSAGE_BYTES - next_entry < len(line.encode()) <= MAX_MESSAGE_BYTES
    pool = "ip-10-0-130-22.eu-central-1.compute.internal"
    devices = tuple(DeviceRef("gpu.example.com", pool, f"gpu-{number}") for number in range(8))
    line = kubelet_text(verdict_of(devices=devices, requests=("gpus",)))
    assert all(str(device) in line for device in devices)


def test_several_broken_devices_are_counted_among_those_of_their_request() -> None:
    devices = (*(ClaimDevice("gpus", *ref(f"gpu-{number}")) for number in range(8)),)
    claim = Claim("ns", "claim-a", "uid-a", devices=(*devices, ClaimDevice("nic", *ref("nic-0"))))
    broken = [health_of(name, "gpu.xid.79", "fell off the bus") for name in ("gpu-1", "gpu-6")]
    verdict = classify_unhealthy_devices(prepare_context(claim, *broken))
    assert verdict is not None
    text = " request=gpus retry=after-repair] fell off the bus; 2 of 8 devices are Unhealthy, their taints"
    assert text in kubelet_text(verdict)
    assert "; 2 devices are Unhealthy, " in kubelet_text(replace(verdict, request_devices=0))
    device = classify_unhealthy_devices(prepare_context(claim, broken[0]))
    assert device is not None
    assert "; the device is Unhealthy, its taint is offered." in kubelet_text(device)


def test_detail_is_cut_before_the_summary() -> None:
    others = [verdict_of("claim-b")]
    line = kubelet_text(verdict_of(detail="d" * 5000), others)
    assert len(line.encode()) == MAX_MESSAGE_BYTES
    assert line.endswith("ddd... Other failing claims in this call: ns/claim-b (transient a.b).")
    assert "1 of 2; the kubelet retries." in line
    line = kubelet_text(verdict_of(summary="ä" * 5000, detail="d" * 50), others)
    assert line.endswith(
        "ää...; the kubelet retries. Other failing claims in this call: ns/claim-b (transient a.b)."
    )


def test_longest_names_leave_room_for_the_summary() -> None:
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
    line = kubelet_text(verdict, others)
    assert len(line.encode()) <= MAX_MESSAGE_BYTES
    assert "] " + "s" * 90 in line
    assert " and 2 more" in line


def test_driver_text_cannot_close_the_bracket() -> None:
    line = kubelet_text(verdict_of(code="a] b", requests=("r = 1, [x]",), summary="a\nb"))
    assert line == "[class=transient code=a)_b request=r___1__(x) retry=later] a b; the kubelet retries."


def test_driver_error_keeps_its_numbers() -> None:
    error = TransientError("8 pages of 2Mi free on node 0, 12 needed.", code="mem.hugepages.insufficient")
    assert kubelet_text(classify(error, PrepareContext(ONE))) == (
        "[class=transient code=mem.hugepages.insufficient device=gpu.example.com/node1/gpu-0 request=r-gpu-0 "
        "retry=after-release] 8 pages of 2Mi free on node 0, 12 needed; the kubelet retries."
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
def test_any_verdict_gives_one_short_valid_line(
    verdict: PrepareVerdict, others: list[PrepareVerdict]
) -> None:
    line = kubelet_text(verdict, others)
    assert len(line.encode()) <= MAX_MESSAGE_BYTES
    assert line.isprintable()
    assert line.startswith(f"[class={verdict.error_class} code=")
    found = HEAD.fullmatch(line)
    assert found
    assert bool(found["device"]) == bool(verdict.devices)
    assert ("Other failing claims in this call: " in line) or all(
        other.claim == verdict.claim for other in others
    )
    assert line == kubelet_text(verdict, list(reversed(others)))


def test_failure_to_fix_does_not_announce_a_retry() -> None:
    line = kubelet_text(verdict_of(code="gpu.driver.mismatch", summary="570 and 580"))
    assert "retry=after-fix" in line
    assert line.endswith("570 and 580; the node or its driver must be fixed.")
