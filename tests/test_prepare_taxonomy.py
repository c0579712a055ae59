"""The table of failures: each row is reached by what a driver really raises, and says what follows."""

from pathlib import Path

import pytest
from prepare_cases import CASES, Case, raised_error

from agent.model.health import Effect, Health
from agent.model.prepare import ErrorClass, Operation, Scope
from agent.prepare import error_tables
from agent.prepare.classify import PrepareContext, classify
from agent.prepare.error_tables import BUILTIN_PATTERNS
from agent.prepare.errors import (
    BadConfigError,
    DriverError,
    FailedDeviceError,
    PermanentError,
    TransientError,
)
from agent.prepare.evidence_scores import APPLICATION_XIDS
from agent.prepare.failure_kinds import (
    DEFAULT_KINDS,
    FAILURE_KINDS,
    FAMILY,
    RetryCondition,
    failure_kind,
    is_dotted_code,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code} {case.error_class}")
def test_exception_of_a_driver_reaches_its_row(case: Case, tmp_path: Path) -> None:
    verdict = classify(raised_error(case.act, tmp_path), PrepareContext(case.claim))
    row = failure_kind(case.code, case.error_class)
    assert (verdict.code, verdict.error_class) == (case.code, case.error_class)
    assert (verdict.scope, verdict.health, verdict.sticky_s) == (row.scope, row.health, row.cached_s)
    assert verdict.advice == row.advice
    assert (verdict.taint is None) == (row.taint is None)


def test_every_row_except_the_engines_is_reached() -> None:
    reached = {
        (row.code, row.error_class) for case in CASES for row in [failure_kind(case.code, case.error_class)]
    }
    unreached = {(row.code, row.error_class) for row in FAILURE_KINDS} - reached
    assert unreached == {
        ("device.unhealthy", ErrorClass.FAILED_DEVICE)
    }  # needs an engine: test_prepare_classify


def test_code_is_unique_per_class_and_each_class_has_a_default() -> None:
    keys = [(row.code, row.error_class) for row in FAILURE_KINDS]
    assert len(keys) == len(set(keys))
    assert set(DEFAULT_KINDS) == set(ErrorClass)


@pytest.mark.parametrize("row", FAILURE_KINDS, ids=lambda row: f"{row.code} {row.error_class}")
def test_every_row_has_advice(row) -> None:
    assert is_dotted_code(row.code.removesuffix(FAMILY))
    assert row.explanation
    assert row.advice
    assert "\n" not in row.explanation + row.advice


@pytest.mark.parametrize("row", FAILURE_KINDS, ids=lambda row: f"{row.code} {row.error_class}")
def test_only_failed_device_rows_are_unhealthy(row) -> None:
    assert (row.health is Health.UNHEALTHY) == (row.error_class is ErrorClass.FAILED_DEVICE)
    assert (row.scope is Scope.DEVICE and row.taint is not None) == (
        row.error_class is ErrorClass.FAILED_DEVICE
    )
    if row.taint is not None:  # eviction is the operator's to choose
        assert row.taint.effect is Effect.NO_SCHEDULE


def test_only_kinds_that_no_claim_can_cause_touch_devices() -> None:
    others = (row for row in FAILURE_KINDS if row.error_class is not ErrorClass.FAILED_DEVICE)
    assert {row.code for row in others if row.health is not None or row.taint} == {
        "gpu.driver.init",
        "gpu.driver.mismatch",
        "state.checkpoint_corrupt",
        "state.version_newer",
        "backend.unreachable",
    }


@pytest.mark.parametrize("row", FAILURE_KINDS, ids=lambda row: f"{row.code} {row.error_class}")
def test_only_lasting_classes_are_cached(row) -> None:
    lasts = {
        ErrorClass.BAD_CONFIG: 600,
        ErrorClass.PERMANENT: 60,
        ErrorClass.FAILED_DEVICE: 86_400,
    }
    retried = {("cdi.write", ErrorClass.PERMANENT), ("state.write", ErrorClass.PERMANENT)}
    assert row.cached_s == (0 if (row.code, row.error_class) in retried else lasts.get(row.error_class, 0))
    assert (row.retry is RetryCondition.NEVER) == (row.error_class is ErrorClass.BAD_CONFIG)


def test_default_rows_match_the_driver_exceptions() -> None:
    words = {
        ErrorClass.UNKNOWN: DriverError,
        ErrorClass.TRANSIENT: TransientError,
        ErrorClass.BAD_CONFIG: BadConfigError,
        ErrorClass.FAILED_DEVICE: FailedDeviceError,
        ErrorClass.PERMANENT: PermanentError,
    }
    assert {kind: row.code for kind, row in DEFAULT_KINDS.items()} == {
        kind: word.default_code for kind, word in words.items()
    }


def test_exact_code_comes_before_its_family() -> None:
    assert failure_kind("gpu.xid.79", ErrorClass.FAILED_DEVICE).code == "gpu.xid.*"
    assert failure_kind("gpu.xid.31", ErrorClass.TRANSIENT).code == "gpu.xid.31"
    assert failure_kind("fpga.bank_locked", ErrorClass.TRANSIENT) is DEFAULT_KINDS[ErrorClass.TRANSIENT]


def test_program_xids_have_rows() -> None:
    for code in APPLICATION_XIDS:
        row = failure_kind(code, ErrorClass.TRANSIENT)
        assert (row.code, row.health, row.taint) == (code, None, None)


def test_every_code_of_the_tables_has_a_row() -> None:
    meanings = {
        *(meaning for table in error_tables.ERRNO_MEANINGS.values() for meaning in table.values()),
        *error_tables.NVML_MEANINGS.values(),
        *error_tables.GRPC_MEANINGS.values(),
        *error_tables.API_REASON_MEANINGS.values(),
        *error_tables.API_STATUS_MEANINGS.values(),
        *((code, ErrorClass.TRANSIENT) for code in error_tables.TIMEOUT_CODES.values()),
        *((pattern.code, pattern.error_class) for pattern in BUILTIN_PATTERNS),
    }
    assert {meaning for meaning in meanings if failure_kind(*meaning) is DEFAULT_KINDS[meaning[1]]} == set()


def test_every_operation_has_a_table() -> None:
    assert set(error_tables.ERRNO_MEANINGS) == set(Operation)


@pytest.mark.parametrize("text", ["gpu.xid.79", "deadline", "api.5xx", "a-b.c_d"])
def test_valid_code_is_accepted(text: str) -> None:
    assert is_dotted_code(text)


@pytest.mark.parametrize(
    "text", ["", "Gpu.Lost", "gpu..lost", ".gpu", "gpu.", "gpu lost", "gpu.lost\n", "ä.b", "a" * 101]
)
def test_invalid_code_is_rejected(text: str) -> None:
    assert not is_dotted_code(text)
