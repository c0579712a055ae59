"""Classification of prepares: the ranking of evidence, rule by rule."""

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from prepare_cases import (
    CASES,
    ONE,
    SLOW,
    TWO,
    WITH_PARAMETERS,
    Case,
    bad_json,
    claim_of,
    during_operation,
    health_of,
    nvml,
    os_error_raiser,
    prepare_context,
    raised_error,
    ref,
    unknown_value,
)
from private_mounts import within_mounts

from agent.embed.devices import Device
from agent.health.verdict import kubelet_message
from agent.model.claim import ClaimConfig
from agent.model.health import Effect, Health, Repair, Severity
from agent.model.prepare import ErrorClass, FaultTaint, Operation, PrepareVerdict, Scope
from agent.prepare.classify import (
    EVIDENCE_MAX,
    PrepareContext,
    classify,
    classify_evidence,
    classify_unhealthy_devices,
)
from agent.prepare.error_tables import parse_patterns
from agent.prepare.errors import (
    BadConfigError,
    DriverError,
    FailedDeviceError,
    PermanentError,
    PrepareError,
    TransientError,
    doing,
)
from agent.prepare.evidence import ErrnoEvidence, ErrorText, HealthEngineEvidence, HttpStatus, NvmlCode
from agent.prepare.extract_evidence import CHAIN_LENGTH_MAX, extract_evidence_chains
from agent.prepare.failure_kinds import USER_CODES
from agent.prepare.kubelet_message import SUMMARY_CHARS, kubelet_text

U, T, B, F, P = ErrorClass
LASTING = {B, F, P}
NOWHERE = Path("/nonexistent")
XID = health_of("gpu-0", "gpu.xid.79", "GPU has fallen off the bus")


def chain_errors(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


# --- verdicts of the health engine ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA initialization failed"),
        ValueError("no bar"),
        TransientError("busy"),
        DriverError("no idea"),
        TimeoutError(),
        OSError(errno.EIO, "Input/output error", "/dev/nvidia0"),
        OSError(errno.ENOSPC, "full", "/etc/cdi/a.json"),
    ],
)
def test_unhealthy_device_is_the_cause_whatever_the_exception(error: Exception) -> None:
    verdict = classify(error, prepare_context(TWO, XID))
    assert (verdict.error_class, verdict.code) == (F, "gpu.xid.79")
    assert verdict.devices == (ref("gpu-0"),)
    assert verdict.evidence[0] == "health engine: gpu.example.com/node1/gpu-0 Unhealthy, gpu.xid.79"
    assert len(verdict.evidence) == 2  # the exception is evidence, too


def test_prepare_error_has_the_text_of_the_health_message() -> None:
    verdict = classify(RuntimeError("no"), prepare_context(ONE, XID))
    assert kubelet_message(XID.causes) == f"{verdict.code}: {verdict.summary}. Advice: {verdict.advice}"
    assert verdict == replace(
        classify_unhealthy_devices(prepare_context(ONE, XID)) or verdict, evidence=verdict.evidence
    )


def test_failed_device_is_unhealthy_with_a_taint() -> None:
    verdict = classify_unhealthy_devices(prepare_context(ONE, XID))
    assert verdict is not None
    assert (verdict.health, verdict.scope) == (Health.UNHEALTHY, Scope.DEVICE)
    assert verdict.taint == FaultTaint(Effect.NO_SCHEDULE, "79")
    other = classify_unhealthy_devices(prepare_context(ONE, health_of("gpu-0", "gpu.fabric.sxid.20034")))
    assert other is not None
    assert other.taint == FaultTaint(Effect.NO_SCHEDULE, "20034")
    assert verdict.requests == ("r-gpu-0",)


def test_driver_report_of_an_unhealthy_device_gives_the_engine_cause() -> None:
    verdict = classify(FailedDeviceError("gpu-0", "no answer", code="fw.stuck"), prepare_context(ONE, XID))
    assert (verdict.code, verdict.summary) == ("gpu.xid.79", "GPU has fallen off the bus")
    assert "driver reports failed-device, fw.stuck" in verdict.evidence
    both = replace(ONE, devices=(*ONE.devices, ONE.devices[0]._replace(request="b")))
    named = FailedDeviceError("gpu-0", "no answer", requests=["b"])
    assert classify(named, prepare_context(both, XID)).requests == ("b",)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadConfigError("3 of 2"), "config.invalid"),
        (PermanentError("no IOMMU"), "driver.permanent"),
        (raised_error(during_operation(Operation.CONFIG, bad_json), NOWHERE), "config.decode"),
        (raised_error(os_error_raiser(errno.EROFS, Operation.CDI), NOWHERE), "cdi.write"),
    ],
)
def test_stronger_evidence_stays_and_the_device_is_mentioned(error: BaseException, code: str) -> None:
    verdict = classify(error, prepare_context(ONE, XID))
    assert verdict.code == code
    assert verdict.error_class in {B, P}
    assert verdict.detail == ""
    assert "health engine: gpu.example.com/node1/gpu-0 Unhealthy, gpu.xid.79" in verdict.evidence


def test_weak_evidence_of_bad_config_is_no_proof() -> None:
    assert (
        classify(raised_error(unknown_value, NOWHERE), prepare_context(WITH_PARAMETERS, XID)).error_class is F
    )


@pytest.mark.parametrize("severity", [Severity.DEGRADED, Severity.UNKNOWN, Severity.INFO])
def test_healthy_device_is_never_the_cause(severity: Severity) -> None:
    context = prepare_context(ONE, health_of("gpu-0", "cpu.throttled.core", severity=severity))
    assert classify(RuntimeError("no"), context).error_class is U
    assert classify_unhealthy_devices(context) is None


def test_device_of_another_claim_is_never_the_cause() -> None:
    context = PrepareContext(ONE, {ref("gpu-7"): health_of("gpu-7", "gpu.lost")})
    assert classify(RuntimeError("no"), context).error_class is U


def test_unhealthy_device_without_cause_counts() -> None:
    verdict = classify_unhealthy_devices(
        prepare_context(ONE, health_of("gpu-0")._replace(health=Health.UNHEALTHY))
    )
    assert verdict is not None
    assert (verdict.error_class, verdict.code) == (F, "device.unhealthy")


def test_unhealthy_devices_are_named_in_sorted_order() -> None:
    lost = health_of("gpu-1", "gpu.lost", "no answer")
    verdict = classify_unhealthy_devices(prepare_context(claim_of("gpu-1", "gpu-0", "gpu-2"), lost, XID))
    assert verdict is not None
    assert (verdict.code, verdict.devices) == ("gpu.xid.79", (ref("gpu-0"), ref("gpu-1")))
    assert verdict.detail == "gpu.example.com/node1/gpu-1: gpu.lost: no answer"


@pytest.mark.parametrize("name", ["gpu-0", "gpu-1", "gpu-2"])
def test_unhealthy_device_named_by_the_driver_is_blamed_first(
    name: str,
) -> None:
    claim, engine = claim_of("gpu-0", "gpu-1", "gpu-2"), {"gpu-0": "gpu.lost", "gpu-1": "gpu.xid.79"}
    known = [health_of(device, code) for device, code in engine.items()]
    verdict = classify(FailedDeviceError(name, "no answer", code="fw.stuck"), prepare_context(claim, *known))
    assert (verdict.code, verdict.devices) == (engine.get(name, "fw.stuck"), (ref(name),))
    assert verdict.requests == (f"r-{name}",)
    others = [f"{ref(health)} is also Unhealthy: {engine[health]}" for health in engine if health != name]
    assert verdict.detail == "; ".join(others)


def test_driver_fault_gives_the_same_text_before_and_after_the_engine() -> None:
    error = FailedDeviceError("gpu-1", "no answer", code="fw.stuck", detail="3 tries")
    first = classify(error, prepare_context(TWO, XID, health_of("gpu-1")))
    again = classify(error, prepare_context(TWO, XID, health_of("gpu-1", "fw.stuck", first.summary)))
    assert kubelet_text(again) == kubelet_text(first)
    assert "3 tries; gpu.example.com/node1/gpu-0 is also Unhealthy: gpu.xid.79." in kubelet_text(first)


def test_faults_of_several_devices_give_a_stable_text() -> None:
    errors = [
        FailedDeviceError(name, "no answer", code="fw.stuck", detail="d") for name in ("gpu-1", "gpu-0")
    ]
    first = classify(ExceptionGroup("", errors), prepare_context(TWO))
    held = [health_of(name, "fw.stuck", first.summary) for name in ("gpu-0", "gpu-1")]
    assert kubelet_text(classify(ExceptionGroup("", errors), prepare_context(TWO, *held))) == kubelet_text(
        first
    )


def test_driver_detail_is_not_mixed_with_the_engine_cause() -> None:
    error = FailedDeviceError("gpu-0", "no answer", code="fw.stuck", detail="3 tries")
    assert classify(error, prepare_context(ONE, XID)).detail == ""


def test_worst_cause_counts_in_any_order() -> None:
    stalled = health_of("gpu-0", "source.stalled", severity=Severity.UNKNOWN)
    verdict = classify_unhealthy_devices(
        prepare_context(ONE, XID._replace(causes=stalled.causes + XID.causes))
    )
    assert verdict is not None
    assert verdict.code == "gpu.xid.79"


def test_verdict_has_the_worst_repair_of_the_unhealthy_devices() -> None:
    causes = tuple(
        replace(XID.causes[0], repair=repair) for repair in (Repair.RESET_DEVICE, Repair.REBOOT_NODE)
    )
    verdict = classify_unhealthy_devices(prepare_context(ONE, XID._replace(causes=causes)))
    assert verdict is not None
    assert verdict.repair is Repair.REBOOT_NODE


def test_unhealthy_device_without_causes_has_the_repair_of_the_kind() -> None:
    verdict = classify_unhealthy_devices(prepare_context(ONE, XID._replace(causes=())))
    assert verdict is not None
    assert (verdict.code, verdict.repair) == ("device.unhealthy", Repair.INSPECT_HARDWARE)


def test_last_state_of_a_stopped_engine_is_ignored() -> None:
    assert classify_unhealthy_devices(prepare_context(ONE, XID, engine_up=False)) is None
    assert classify(RuntimeError("no"), prepare_context(ONE, XID, engine_up=False)).error_class is U
    evidence = HealthEngineEvidence(ref("gpu-0"), Health.UNHEALTHY, "gpu.lost")
    assert classify_evidence([evidence], PrepareContext(ONE, engine_up=False)).error_class is F


def test_device_of_two_requests_fails_both_requests() -> None:
    twice = replace(ONE, devices=(*ONE.devices, ONE.devices[0]._replace(request="admin", admin=True)))
    for verdict in (
        classify(raised_error(nvml(15), NOWHERE), PrepareContext(twice)),
        classify(FailedDeviceError("gpu-0", "broken"), PrepareContext(twice)),
        classify(RuntimeError("no"), prepare_context(twice, XID)),
    ):
        assert (verdict.error_class, verdict.devices) == (F, (ref("gpu-0"),))
        assert verdict.requests == ("admin", "r-gpu-0")


def test_operator_may_make_a_program_xid_unhealthy() -> None:
    verdict = classify_unhealthy_devices(prepare_context(ONE, health_of("gpu-0", "gpu.xid.31")))
    assert verdict is not None
    assert verdict.error_class is F


def test_stopped_engine_blames_no_device() -> None:
    verdict = classify(RuntimeError("no"), PrepareContext(ONE, engine_up=False))
    assert (verdict.error_class, verdict.health) == (U, None)
    assert verdict.evidence == ("exception RuntimeError", "health engine is down")


# --- errors of drivers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["gpu-1", "node1/gpu-1", "gpu.example.com/node1/gpu-1", ref("gpu-1"), TWO.devices[1], Device("gpu-1")],
)
def test_driver_report_overrides_a_healthy_engine_state(
    name: object,
) -> None:
    error = FailedDeviceError(name, "no answer in 3 tries", code="fw.stuck")  # type: ignore[arg-type]
    verdict = classify(error, prepare_context(TWO, health_of("gpu-0"), health_of("gpu-1")))
    assert (verdict.error_class, verdict.code, verdict.devices) == (F, "fw.stuck", (ref("gpu-1"),))
    assert (verdict.health, verdict.requests, verdict.confidence) == (Health.UNHEALTHY, ("r-gpu-1",), 1.0)


def test_two_broken_devices_keep_their_own_texts() -> None:
    verdict = classify(FailedDeviceError("gpu-1", "no answer", code="fw.stuck"), prepare_context(TWO, XID))
    assert (verdict.code, verdict.devices) == ("fw.stuck", (ref("gpu-1"),))
    assert verdict.detail == "gpu.example.com/node1/gpu-0 is also Unhealthy: gpu.xid.79"


def test_device_outside_the_claim_is_not_blamed() -> None:
    verdict = classify(FailedDeviceError("gpu-9", "broken"), PrepareContext(ONE))
    assert (verdict.error_class, verdict.health, verdict.taint) == (U, None, None)
    assert "the claim has no device 'gpu-9'" in verdict.evidence


def test_device_ref_counts_for_this_driver_only() -> None:
    parent = ref("gpu-0")
    assert classify(FailedDeviceError(parent, "broken"), PrepareContext(claim_of("mig-1"))).devices == (
        parent,
    )
    assert classify(FailedDeviceError(parent, "broken"), PrepareContext(claim_of())).devices == (parent,)
    others = parent._replace(driver="net.example.com")
    verdict = classify(FailedDeviceError(others, "broken"), PrepareContext(ONE))
    assert (verdict.error_class, verdict.health) == (U, None)
    assert "net.example.com/node1/gpu-0 belongs to another driver" in verdict.evidence


def test_device_name_in_two_pools_blames_neither() -> None:
    other = replace(ONE, devices=(*ONE.devices, ONE.devices[0]._replace(pool="node2")))
    assert classify(FailedDeviceError("gpu-0", "broken"), PrepareContext(other)).health is None
    assert (
        classify(FailedDeviceError("node2/gpu-0", "broken"), PrepareContext(other)).devices[0].pool == "node2"
    )


def test_program_xid_is_never_a_device_failure() -> None:
    verdict = classify(FailedDeviceError("gpu-0", "XID 31", code="gpu.xid.31"), PrepareContext(ONE))
    assert (verdict.error_class, verdict.code, verdict.health, verdict.taint) == (T, "gpu.xid.31", None, None)


def test_invalid_driver_code_is_replaced_and_noted() -> None:
    verdict = classify(BadConfigError("no", code="Bad Code"), PrepareContext(ONE))
    assert verdict.code == "config.invalid"
    assert "code 'Bad Code' is not a dotted code" in verdict.evidence


def test_driver_texts_are_not_normalized() -> None:
    error = BadConfigError("asked for 10s at 0xdeadbeef", detail="d", requests=["b", "a"], retry_after_s=7)
    verdict = classify(error, PrepareContext(TWO))
    assert (verdict.summary, verdict.detail) == ("asked for 10s at 0xdeadbeef", "d")
    assert (verdict.requests, verdict.retry_after_s) == (("a", "b"), 7)


def test_earlier_verdict_is_kept() -> None:
    first = classify(BadConfigError("3 of 2"), PrepareContext(ONE))
    error = PrepareError(first, kubelet_text(first))
    assert classify(error, prepare_context(ONE, XID)) is first
    assert classify(chain_errors(RuntimeError("wrapped"), error), PrepareContext(ONE)) is first
    first = classify(TransientError("busy"), PrepareContext(ONE))
    assert classify(PrepareError(first, kubelet_text(first)), prepare_context(ONE, XID)) is first


# --- proof of lasting classes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [ValueError("a"), KeyError("a"), TypeError("a"), IndexError(), AttributeError("a")]
)
def test_python_error_is_a_driver_bug(error: Exception) -> None:
    verdict = classify(error, PrepareContext(WITH_PARAMETERS))
    assert (verdict.error_class, verdict.scope, verdict.sticky_s) == (U, Scope.DRIVER, 0)
    assert verdict.code.startswith("driver.bug.")


def test_wrong_value_is_bad_config_only_in_parameters() -> None:
    error = ValueError("pages: 3, limit 2")
    assert classify(error, PrepareContext(ONE)).error_class is U
    assert classify(error, PrepareContext(ONE, operation=Operation.DEVICE)).error_class is U
    with pytest.raises(ValueError, match="limit 2"), doing(Operation.CONFIG):
        raise error
    verdict = classify(error, PrepareContext(ONE))
    assert (verdict.error_class, verdict.summary) == (B, "parameters: pages: 3, limit 2")


def test_rejected_value_is_no_bad_config_without_parameters() -> None:
    error = raised_error(unknown_value, NOWHERE)
    assert classify(error, PrepareContext(WITH_PARAMETERS)).error_class is B
    assert classify(error, PrepareContext(ONE)).error_class is U
    assert classify(error, PrepareContext(WITH_PARAMETERS, operation=Operation.DEVICE)).error_class is U


@pytest.mark.parametrize("operation", [None, *Operation])
def test_errno_is_never_a_failed_device_or_bad_config(operation: Operation | None) -> None:
    lasting = set()
    for number in errno.errorcode:
        verdict = classify_evidence([ErrnoEvidence(number, operation)], PrepareContext(ONE))
        assert verdict.error_class in {U, T, P}
        assert (verdict.health, verdict.taint) == (None, None)
        lasting |= {number} if verdict.error_class is P else set()
    writes = operation in {Operation.CDI, Operation.STATE}
    assert lasting == ({errno.EROFS, errno.EACCES, errno.EPERM} if writes else set())


def test_unwritable_cdi_file_does_not_make_a_device_unhealthy() -> None:
    for number in (errno.EROFS, errno.ENOSPC):
        verdict = classify(OSError(number, "no", "/etc/cdi/a.json"), prepare_context(ONE, health_of("gpu-0")))
        assert (verdict.code, verdict.health, verdict.taint) == ("cdi.write", None, None)


def test_lost_gpu_of_several_is_blamed_only_if_named() -> None:
    error = raised_error(nvml(15), NOWHERE)
    verdict = classify(error, PrepareContext(TWO))
    assert (verdict.error_class, verdict.health) == (T, None)
    assert "the evidence does not name which of 2 devices failed" in verdict.evidence
    with pytest.raises(type(error)), doing(Operation.DEVICE, "gpu-1"):
        raise error
    verdict = classify(error, PrepareContext(TWO))
    assert (verdict.error_class, verdict.devices) == (F, (ref("gpu-1"),))


def test_lost_gpu_outside_the_claim_blames_no_device() -> None:
    for name, error_class in (("gpu-7", T), ("/dev/nvidia0", F), ("gpu-0", F)):
        error = raised_error(nvml(15), NOWHERE)
        with pytest.raises(type(error)), doing(Operation.DEVICE, name):
            raise error
        verdict = classify(error, PrepareContext(ONE))
        assert (verdict.error_class, verdict.devices) == (error_class, (ref("gpu-0"),))
        assert ("'gpu-7' is not a device of the claim" in verdict.evidence) == (name == "gpu-7")


@given(st.text(max_size=400))
def test_text_of_an_unknown_exception_is_never_lasting(text: str) -> None:
    assert classify(RuntimeError(text), PrepareContext(WITH_PARAMETERS)).error_class in {U, T}
    assert classify_evidence([ErrorText(text)], PrepareContext(WITH_PARAMETERS)).error_class in {U, T}


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.error_class not in LASTING], ids=lambda case: case.code
)
def test_transient_or_unknown_failure_leaves_the_device_health(case, tmp_path: Path) -> None:
    verdict = classify(raised_error(case.act, tmp_path), PrepareContext(case.claim))
    assert verdict.health is not Health.UNHEALTHY
    assert verdict.sticky_s == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code} {case.error_class}")
def test_repetition_does_not_change_the_class(case, tmp_path: Path) -> None:
    context = PrepareContext(case.claim)
    first = classify(raised_error(case.act, tmp_path), context)
    again = classify(raised_error(case.act, tmp_path), context)
    assert (first, kubelet_text(first)) == (again, kubelet_text(again))


def test_only_the_engine_makes_a_device_unhealthy_in_place() -> None:
    """Classify the same exception before and after the device recovered."""
    error = RuntimeError("no")
    assert classify(error, prepare_context(ONE, XID)).error_class is F
    assert classify(error, prepare_context(ONE, health_of("gpu-0"))).error_class is U


# --- ranking of evidence -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (chain_errors(RuntimeError("not written"), OSError(errno.ENOSPC, "full")), "os.enospc"),
        (chain_errors(TransientError("later", code="a.b"), ValueError("x")), "a.b"),
        (chain_errors(TransientError("later", code="a.b"), BadConfigError("x")), "a.b"),
        (chain_errors(TransientError("later", code="a.b"), OSError(errno.EROFS, "no", "/etc/cdi/a")), "a.b"),
        (chain_errors(DriverError("no", code="a.b"), OSError(errno.EROFS, "no", "/etc/cdi")), "cdi.write"),
        (chain_errors(DriverError("no", code="a.b"), OSError(errno.EBUSY, "no")), "a.b"),
        (
            chain_errors(FailedDeviceError("gpu-9", "no"), OSError(errno.EBUSY, "no", "/dev/nvidia0")),
            "device.busy",
        ),
        (chain_errors(ValueError("x"), KeyError("y")), "driver.bug.value_error"),
        (chain_errors(TimeoutError(), OSError(errno.EROFS, "no", "/etc/cdi/a")), "cdi.write"),
        (
            chain_errors(RuntimeError("no space left on device"), FileNotFoundError(errno.ENOENT, "no")),
            "text.no_space",
        ),
    ],
)
def test_strongest_evidence_of_a_failure_decides(error: BaseException, code: str) -> None:
    assert classify(error, PrepareContext(ONE)).code == code


def test_handled_exception_is_not_the_cause() -> None:
    error = RuntimeError("no luck")
    error.__context__ = FileNotFoundError(errno.ENOENT, "no")
    verdict = classify(error, PrepareContext(ONE))
    assert (verdict.code, verdict.error_class) == ("driver.exception.runtime_error", U)
    assert verdict.evidence == ("exception RuntimeError", "errno ENOENT, handled before")


def test_handled_exception_is_never_lasting() -> None:
    error = RuntimeError("no luck")
    error.__context__ = BadConfigError("x")
    assert classify(error, PrepareContext(ONE)).error_class is U
    for before in (
        TransientError("busy"),
        PrepareError(classify(TransientError("busy"), PrepareContext(ONE)), ""),
    ):
        error.__context__ = before
        assert classify(error, PrepareContext(ONE)).error_class is U
    error.__context__ = OSError(errno.ENOSPC, "full", "/etc/cdi/a")
    assert classify(error, PrepareContext(ONE)).code == "cdi.write"
    other = OSError(errno.EBUSY, "busy")
    other.__context__ = error.__context__
    assert classify(other, PrepareContext(ONE)).code == "os.ebusy", "what came last shows as much"


ORDER = [
    FailedDeviceError("gpu-0", "broken", code="fw.stuck"),
    BadConfigError("3 of 2"),
    PermanentError("no IOMMU"),
    ValueError("bug"),
    TransientError("busy"),
]


@pytest.mark.parametrize("start", range(len(ORDER)))
def test_worst_of_several_failures_is_reported(start: int) -> None:
    worst = classify(ORDER[start], PrepareContext(ONE))
    group = ExceptionGroup("", ORDER[start:])
    assert classify(group, PrepareContext(ONE)).code == worst.code
    assert set(worst.evidence) < set(classify(group, PrepareContext(ONE)).evidence) or start == len(ORDER) - 1


@given(st.permutations([*ORDER, OSError(errno.EIO, "a"), TimeoutError(), RuntimeError("b")]))
def test_order_of_child_failures_does_not_change_the_text(errors: list[Exception]) -> None:
    expected = classify(ExceptionGroup("", sorted(errors, key=repr)), PrepareContext(TWO))
    verdict = classify(ExceptionGroup("", errors), PrepareContext(TWO))
    assert (verdict, kubelet_text(verdict)) == (expected, kubelet_text(expected))


def test_same_fault_of_two_devices_names_both() -> None:
    errors = [FailedDeviceError(name, "broken", code="fw.stuck") for name in ("gpu-1", "gpu-0")]
    verdict = classify(ExceptionGroup("", errors), PrepareContext(TWO))
    assert verdict.devices == (ref("gpu-0"), ref("gpu-1"))
    assert verdict.requests == ("r-gpu-0", "r-gpu-1")


def test_different_faults_of_two_devices_name_both() -> None:
    errors = [FailedDeviceError("gpu-1", "no", code="fw.a"), FailedDeviceError("gpu-0", "no", code="fw.b")]
    verdict = classify(ExceptionGroup("", errors), PrepareContext(TWO))
    assert (verdict.code, verdict.devices) == ("fw.a", (ref("gpu-1"),))
    assert verdict.detail == f"{ref('gpu-0')} is also broken: fw.b"
    more = [FailedDeviceError("gpu-0", "no", code="fw.c"), *errors]
    assert classify(ExceptionGroup("", more), PrepareContext(TWO)).detail == verdict.detail
    verdict = classify(ExceptionGroup("", [errors[0], RuntimeError("no")]), prepare_context(TWO, XID))
    assert (verdict.code, verdict.detail) == ("fw.a", f"{ref('gpu-0')} is also Unhealthy: gpu.xid.79")


def test_stronger_failure_of_a_class_is_reported() -> None:
    errors = [
        raised_error(during_operation(Operation.CONFIG, bad_json), NOWHERE),
        BadConfigError("3 of 2", code="fpga.banks"),
    ]
    assert classify(BaseExceptionGroup("", errors), PrepareContext(ONE)).code == "fpga.banks"


def test_driver_sets_the_scope_of_a_permanent_failure() -> None:
    assert classify(PermanentError("no"), PrepareContext(ONE)).scope is Scope.NODE
    assert classify(PermanentError("no", scope=Scope.DRIVER), PrepareContext(ONE)).scope is Scope.DRIVER


def test_failure_without_requests_fails_all_requests() -> None:
    errors = [FailedDeviceError("gpu-0", "no", requests=["r-gpu-0"]), FailedDeviceError("gpu-1", "no")]
    assert classify(ExceptionGroup("", errors), PrepareContext(TWO)).requests == ("r-gpu-0", "r-gpu-1")


async def test_members_of_a_group_are_classified_one_by_one() -> None:
    async def fail(error: Exception) -> None:
        raise error

    async def run_both() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail, TransientError("busy"))
            nursery.start_soon(fail, BadConfigError("3 of 2"))

    with pytest.raises(ExceptionGroup) as caught:
        await run_both()
    assert classify(caught.value, PrepareContext(ONE)).summary == "3 of 2"


def test_evidence_can_be_given_without_an_exception() -> None:
    engine = HealthEngineEvidence(ref("gpu-0"), Health.UNHEALTHY, "gpu.lost", "no answer")
    assert classify_evidence([NvmlCode(19), engine], PrepareContext(ONE)).code == "gpu.lost"
    assert classify_evidence([engine], PrepareContext(ONE)).code == "gpu.lost"
    assert (
        classify_evidence([engine._replace(health=Health.HEALTHY), NvmlCode(19)], PrepareContext(ONE)).code
        == "gpu.busy"
    )
    assert classify_evidence([], PrepareContext(ONE)).error_class is U


def test_api_server_reason_overrides_the_status_number() -> None:
    answer = HttpStatus(403, "Timeout", from_api_server=True)
    assert classify_evidence([answer], PrepareContext(ONE)).code == "api.timeout"


def test_nvml_error_without_a_number_is_an_unknown_exception() -> None:
    class NVMLError(Exception):
        value = "lost"

    assert classify(NVMLError(), PrepareContext(ONE)).code == "driver.exception.nvml_error"


def test_chain_of_handled_exceptions_is_bounded() -> None:
    error, other = RuntimeError("a"), RuntimeError("b")
    error.__context__, other.__context__ = other, error
    assert classify(error, PrepareContext(ONE)).evidence == (
        "exception RuntimeError",
        "exception RuntimeError, handled before",
    )
    first = error
    for _ in range(1000):
        error.__context__ = error = RuntimeError("c")
    assert len(extract_evidence_chains(first)[0]) <= CHAIN_LENGTH_MAX + 1


# --- content of a verdict ----------------------------------------------------------------------------------


def test_verdict_names_claim_requests_and_devices() -> None:
    verdict = classify(BadConfigError("3 of 2"), PrepareContext(claim_of("b", "a")))
    assert verdict.claim == ONE.ref
    assert verdict.devices == (ref("a"), ref("b"))  # those that were to be prepared
    assert verdict.requests == ("r-a", "r-b")


def test_verdict_names_only_devices_of_the_failed_requests() -> None:
    claim = replace(TWO, devices=(*TWO.devices, TWO.devices[0]._replace(request="alt/b", device="gpu-2")))
    for error in (BadConfigError("3 of 2", requests=["r-gpu-1"]), PermanentError("no", requests=["r-gpu-1"])):
        verdict = classify(error, PrepareContext(claim))
        assert (verdict.devices, verdict.requests) == ((ref("gpu-1"),), ("r-gpu-1",))
    verdict = classify(BadConfigError("3 of 2", requests=["alt"]), PrepareContext(claim))
    assert verdict.devices == (ref("gpu-2"),)
    verdict = classify(BadConfigError("no such request", requests=["other"]), PrepareContext(claim))
    assert verdict.devices == ()
    mismatch = PermanentError("570 and 580", code="gpu.driver.mismatch", requests=["r-gpu-0"])
    verdict = classify(mismatch, PrepareContext(claim))
    assert (verdict.devices, verdict.health) == ((ref("gpu-0"),), Health.UNKNOWN)


@pytest.mark.parametrize("requests", [("r-gpu-1",), ()])
@pytest.mark.parametrize("act", [lambda: json.loads("{"), lambda: int("many")], ids=["decode", "value"])
def test_wrong_parameters_name_only_devices_with_parameters(
    act: Callable[[], object], requests: tuple[str, ...]
) -> None:
    claim = claim_of("gpu-0", "gpu-1", configs=(ClaimConfig("FromClaim", requests, {"mode": "many"}),))
    with pytest.raises(ValueError) as caught, doing(Operation.CONFIG):  # noqa: PT011  # of either function
        act()
    verdict = classify(caught.value, PrepareContext(claim))
    assert verdict.error_class is ErrorClass.BAD_CONFIG
    expected = requests or ("r-gpu-0", "r-gpu-1")
    assert verdict.requests == expected
    assert verdict.devices == tuple(ref(request.removeprefix("r-")) for request in expected)


@pytest.mark.parametrize("code", sorted(USER_CODES))
def test_code_of_a_user_error_is_bad_config_in_any_lasting_class(code: str) -> None:
    pattern = {"match": "no luck", "code": code, "class": "failed-device"}
    for error in (
        PermanentError("no luck", code=code),
        FailedDeviceError("gpu-0", "no luck", code=code),
        RuntimeError("no luck"),
    ):
        verdict = classify(error, PrepareContext(ONE, patterns=parse_patterns([pattern])))
        assert (verdict.error_class, verdict.code) == (B, code)
        assert (verdict.health, verdict.taint) == (None, None)
        assert "the claim causes this code, neither a device nor the node" in verdict.evidence


def test_text_that_quotes_the_user_touches_no_device() -> None:
    verdict = classify(ValueError("unknown mode 'driver/library version mismatch'"), PrepareContext(ONE))
    assert (verdict.error_class, verdict.code) == (T, "gpu.driver.mismatch")
    assert (verdict.health, verdict.taint) == (None, None)
    proven = classify(raised_error(nvml(18), NOWHERE), PrepareContext(ONE))
    assert (proven.health, proven.taint) == (Health.UNKNOWN, FaultTaint(Effect.NO_SCHEDULE))


def test_claim_without_devices_is_classified() -> None:
    verdict = classify(raised_error(nvml(15), NOWHERE), PrepareContext(claim_of()))
    assert (verdict.error_class, verdict.devices, verdict.requests) == (T, (), ())


def test_failure_without_text_has_the_summary_of_its_row() -> None:
    assert (
        classify(TransientError(""), PrepareContext(ONE)).summary == "the driver reported a temporary failure"
    )


@given(
    st.text(max_size=3000),
    st.text(max_size=3000),
    st.sampled_from([TransientError, BadConfigError, RuntimeError]),
)
def test_summary_is_one_short_line(summary: str, detail: str, kind: type[Exception]) -> None:
    error = kind(summary) if kind is RuntimeError else kind(summary, detail=detail)  # type: ignore[call-arg]
    verdict = classify(error, PrepareContext(ONE))
    assert 0 < len(verdict.summary) <= SUMMARY_CHARS
    assert verdict.summary.isprintable()
    assert verdict.detail.isprintable()
    assert len(verdict.evidence) <= EVIDENCE_MAX


def test_text_of_an_unknown_exception_is_stable() -> None:
    class Bank:
        """Object whose text has its address."""

    def fail() -> PrepareVerdict:
        number = random.randrange(10**6, 10**7)
        error = RuntimeError(f"{Bank()} pid {number} at 0x7f3a{number:08x} after {number / 1e6:.3f}s")
        return classify(error, PrepareContext(ONE))

    first, second = fail(), fail()
    assert first == second
    assert kubelet_text(first) == kubelet_text(second)


EACH = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from prepare_cases import CASES, SLOW, TWO, PrepareContext, health_of, prepare_context, raised_error
from agent.prepare.classify import classify
from agent.prepare.kubelet_message import kubelet_texts
errors = [raised_error(case.act, Path("/nonexistent")) for case in CASES if case.act not in SLOW]
for context in (PrepareContext(TWO), prepare_context(TWO, health_of("gpu-1", "gpu.lost"), health_of("gpu-0", "fw.stuck"))):
    verdicts = [classify(error, context) for error in (*errors, BaseExceptionGroup("", errors))]
    print(*kubelet_texts(verdicts), *(verdict.evidence for verdict in verdicts), sep="\\n")
"""  # noqa: E501


def test_text_does_not_depend_on_hash_order() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", EACH, Path(__file__).parent],
            capture_output=True, text=True, check=True, env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1", "4711")
    }  # fmt: skip
    assert len(outputs) == 1
    assert "class=failed-device code=fw.stuck" in outputs.pop()


def test_foreign_strerror_text_is_normalized() -> None:
    error = OSError(errno.EBUSY, "held by pid 4711", "/dev/nvidia0")
    summary = "EBUSY (held by pid <number>) while using the device: /dev/nvidia0"
    assert classify(error, PrepareContext(ONE)).summary == summary
    error = OSError(errno.ENOSPC, "full", "/etc/cdi/tmpk3j2h1x8")
    assert (
        classify(error, PrepareContext(ONE)).summary
        == "ENOSPC (full) while writing a CDI file: /etc/cdi/<name>"
    )
    answer = HttpStatus(503, "down since 10:04:04")
    assert classify_evidence([answer], PrepareContext(ONE)).summary == "HTTP: 503 down since <time>"


@given(st.lists(st.sampled_from([*CASES]), min_size=1, max_size=4))
def test_any_group_of_failures_reports_one_of_them(cases: list[Case]) -> None:
    errors = [raised_error(case.act, NOWHERE) for case in cases if case.act not in SLOW]
    codes = {classify(error, PrepareContext(TWO)).code for error in errors}
    assert not errors or classify(BaseExceptionGroup("", errors), PrepareContext(TWO)).code in codes


# --- real filesystems --------------------------------------------------------------------------------------

WRITE = """
import sys
from pathlib import Path
from agent.model.claim import Claim
from agent.model.prepare import Operation
from agent.prepare.classify import PrepareContext, classify
from agent.prepare.errors import doing
try:
    with doing(Operation.CDI):
        Path(sys.argv[1], "gpu.json").write_bytes(b"x" * 1_000_000)
except OSError as error:
    verdict = classify(error, PrepareContext(Claim("ns", "a", "uid")))
    print(verdict.code, verdict.error_class, verdict.summary.partition(" ")[0])
"""


@pytest.mark.parametrize(
    ("options", "output"),
    [("size=64k", "cdi.write transient ENOSPC"), ("ro", "cdi.write permanent EROFS")],
)
def test_full_or_read_only_filesystem_is_classified(tmp_path: Path, options: str, output: str) -> None:
    mounted = within_mounts('mount -t tmpfs -o "$2" none "$1"', tmp_path, options)
    command = [*mounted, sys.executable, "-c", WRITE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (output, "")


# --- patterns of the operator ------------------------------------------------------------------------------


@pytest.mark.parametrize("nvml", [999, 17])
def test_unknown_nvml_code_is_no_fact(nvml: int) -> None:
    patterns = parse_patterns([{"match": "fan", "code": "gpu.fan", "class": "failed-device"}])
    verdict = classify_evidence(
        [NvmlCode(nvml), ErrorText("the fan is stuck")], PrepareContext(ONE, patterns=patterns)
    )
    assert (verdict.code, verdict.error_class) == ("gpu.fan", ErrorClass.FAILED_DEVICE)


def test_unclassified_http_status_leaves_the_decision_to_a_pattern() -> None:
    patterns = parse_patterns([{"match": "no quota", "code": "fpga.quota", "class": "bad-config"}])
    verdict = classify_evidence(
        [HttpStatus(418, message="no quota left")], PrepareContext(ONE, patterns=patterns)
    )
    assert (verdict.code, verdict.error_class) == ("fpga.quota", ErrorClass.BAD_CONFIG)
