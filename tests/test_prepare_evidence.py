"""Evidence from exceptions: by type, number and mark, for any library, any nesting and another process."""

import copy
import errno
import io
import pickle
import re
import urllib.error
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from email.message import Message
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pynvml
import pytest
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from patience import PATIENCE_S
from prepare_cases import ONE, ApiException, HTTPStatusError, Response, health_of, ref

from agent.errors import ApiError, ApiForbiddenError, ConfigError
from agent.model.prepare import ErrorClass, Operation, Scope
from agent.prepare.classify import PrepareContext, classify, health_engine_evidence
from agent.prepare.errors import (
    BadConfigError,
    FailedDeviceError,
    PermanentError,
    PrepareError,
    RecordedOperation,
    TransientError,
    doing,
    recorded_operation,
)
from agent.prepare.evidence import (
    GRPC_NAMES,
    NVML_NAMES,
    DecodeFailure,
    DriverReportedError,
    EarlierException,
    ErrnoEvidence,
    ErrorText,
    GrpcStatus,
    HttpStatus,
    InterruptedPrepare,
    NvmlCode,
    OperationTimeout,
    UnclassifiedException,
    UnreadableCdiFile,
    WrongParameterValue,
)
from agent.prepare.extract_evidence import (
    CHAIN_LENGTH_MAX,
    FAILURES_MAX,
    extract_evidence,
    extract_evidence_chains,
)


def single_chain(error: BaseException, operation: Operation | None = None) -> tuple[Any, ...]:
    """Return the evidence of an error that is a single failure."""
    (chain,) = extract_evidence_chains(error, operation)
    return chain


# --- kinds of evidence and their texts----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evidence", "text"),
    [
        (ErrnoEvidence(errno.ENOSPC, Operation.CDI, "/etc/cdi/a.json"), "errno ENOSPC during cdi"),
        (ErrnoEvidence(errno.EIO), "errno EIO"),
        (ErrnoEvidence(100_000), "errno 100000"),
        (NvmlCode(15), "NVML 15 (GPU_IS_LOST)"),
        (NvmlCode(77), "NVML 77 (unknown code)"),
        (GrpcStatus(14, "text"), "gRPC 14 (UNAVAILABLE)"),
        (GrpcStatus(-1), "gRPC -1 (unknown code)"),
        (HttpStatus(409, "Conflict", "text", from_api_server=True), "API 409 Conflict"),
        (HttpStatus(503), "HTTP 503"),
        (DecodeFailure("JSONDecodeError", "text", Operation.CONFIG), "JSONDecodeError during config"),
        (WrongParameterValue("ValueError", "text"), "ValueError during config"),
        (UnreadableCdiFile("/etc/cdi/a.json", "text"), "CDI file /etc/cdi/a.json cannot be parsed"),
        (UnreadableCdiFile("", "text"), "CDI file cannot be parsed"),
        (health_engine_evidence(ref("a"), health_of("a", "gpu.lost")),
         "health engine: gpu.example.com/node1/a Unhealthy, gpu.lost"),
        (OperationTimeout("TooSlowError", Operation.LOCK), "TooSlowError during lock"),
        (InterruptedPrepare("Cancelled"), "Cancelled"),
        (UnclassifiedException("KeyError", is_programming_error=True, text="'a'"), "exception KeyError"),
        (ErrorText("anything"), "error text"),
        (DriverReportedError(ErrorClass.BAD_CONFIG, "config.invalid", "s"),
         "driver reports bad-config, config.invalid"),
        (EarlierException(ErrnoEvidence(errno.ENOENT)), "errno ENOENT, handled before"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_evidence_has_a_short_text(evidence: object, text: str) -> None:
    assert str(evidence) == text


def test_nvml_names_match_the_header() -> None:
    header = (Path(__file__).parents[1] / "native/src/gpu/nvml.h").read_text()
    found = {
        int(number): name.removeprefix("ERROR_")
        for name, number in re.findall(r"NVML_(SUCCESS|ERROR_\w+) = (\d+)", header)
    }
    assert dict(NVML_NAMES) == found


def test_grpc_names_match_both_libraries() -> None:
    assert {status.value: status.name for status in Status} == dict(enumerate(GRPC_NAMES))
    assert {status.value[0]: status.name for status in grpc.StatusCode} == dict(enumerate(GRPC_NAMES))


# --- libraries ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(NVML_NAMES.keys() - {0}))
def test_nvml_exception_is_found_by_its_number(code: int) -> None:
    assert single_chain(pynvml.NVMLError(code)) == (NvmlCode(code),)


@pytest.mark.parametrize("status", Status)
def test_grpclib_exception_is_found_by_its_status(status: Status) -> None:
    assert single_chain(GRPCError(status, "text")) == (GrpcStatus(status.value, "text"),)


def test_grpcio_exception_is_found_by_its_status(tmp_path: Path) -> None:
    with grpc.insecure_channel(f"unix:{tmp_path}/none") as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/a.B/C")(b"", timeout=PATIENCE_S)
    (evidence,) = single_chain(caught.value)
    assert evidence.code == 14


def test_api_server_reason_is_read_from_the_response() -> None:
    body = '{"kind": "Status", "reason": "Forbidden", "message": "may not", "code": 403}'
    expected = HttpStatus(403, "Forbidden", "may not", from_api_server=True)
    assert single_chain(ApiException(403, "phrase", body)) == (expected,)
    assert single_chain(HTTPStatusError(Response(403, body))) == (expected,)


@pytest.mark.parametrize("body", ["[" * 100_000, "{", b"\xff", 7, "x" * 100_000, '"text"', "", None])
def test_invalid_response_has_no_reason(body: object) -> None:
    assert single_chain(ApiException(409, "Conflict", body)) == (
        HttpStatus(409, "Conflict", "", from_api_server=True),
    )


def test_other_server_is_the_api_server_only_if_marked() -> None:
    error = HTTPStatusError(Response(403, "no", "Forbidden"))
    (evidence,) = single_chain(error)
    assert (evidence.status, evidence.from_api_server) == (403, False)
    (evidence,) = single_chain(error, Operation.API)
    assert (evidence.status, evidence.from_api_server) == (403, True)


def test_urllib_error_is_an_http_status_not_an_errno() -> None:
    error = urllib.error.HTTPError("http://10.0.0.1", 503, "Service Unavailable", Message(), io.BytesIO())
    (evidence,) = single_chain(error)
    assert (evidence.status, evidence.reason) == (503, "Service Unavailable")
    error.close()


def test_validation_errors_are_found_by_class_name() -> None:
    class ValidationError(ValueError):
        """Class name that several libraries use."""

    assert single_chain(ValidationError("pages: not an int")) == (
        DecodeFailure("ValidationError", "pages: not an int", None, rejected_by_type_check=True),
    )


def test_driver_error_is_read_completely() -> None:
    error = BadConfigError("3 of 2", code="a.b", detail="more", requests=["r"], retry_after_s=5)
    assert single_chain(error) == (
        DriverReportedError(ErrorClass.BAD_CONFIG, "a.b", "3 of 2", "more", ("r",), 5),
    )
    assert single_chain(FailedDeviceError(ref("a"), "broken"))[0].device == ref("a")
    assert single_chain(PermanentError("no", scope=Scope.DRIVER))[0].scope is Scope.DRIVER


def test_driver_error_without_texts_keeps_its_class() -> None:
    class Forgetful(TransientError):
        def __init__(self) -> None:
            """Skip the initialization of the base class."""

    (word,) = single_chain(Forgetful())
    assert (word.error_class, word.code, word.summary) == (ErrorClass.TRANSIENT, "driver.transient", "")
    (word,) = single_chain(BadConfigError(ValueError("3 of 2"), code=7, requests=[1]))  # type: ignore[arg-type, list-item]
    assert (word.summary, word.code, word.requests) == ("3 of 2", "7", ("1",))


def test_nvml_error_text_is_not_read() -> None:
    """Reading the text could hang in the failed NVIDIA driver."""

    class NVMLError(Exception):
        value = 15

        def __str__(self) -> str:
            raise AssertionError("asked")

    assert single_chain(NVMLError()) == (NvmlCode(15),)


# --- operations --------------------------------------------------------------------------------------------


def test_innermost_mark_stays() -> None:
    error = OSError(errno.ENOSPC, "full")
    with (
        pytest.raises(OSError, match="full"),
        doing(Operation.STATE),
        doing(Operation.CDI, Path("/etc/cdi/a")),
    ):
        raise error
    assert recorded_operation(error) == RecordedOperation(Operation.CDI, "/etc/cdi/a")
    assert single_chain(error) == (ErrnoEvidence(errno.ENOSPC, Operation.CDI, "/etc/cdi/a", "full"),)


def test_only_passing_exceptions_are_marked() -> None:
    with doing(Operation.CDI):
        pass
    assert recorded_operation(OSError()) is None


def test_exception_without_attributes_passes_unmarked() -> None:
    class Closed(Exception):
        def __setattr__(self, name: str, value: object) -> None:
            raise TypeError(name)

    with pytest.raises(Closed), doing(Operation.CDI):
        raise Closed


@pytest.mark.parametrize(
    ("path", "operation"),
    [
        ("/dev/nvidia0", Operation.DEVICE),
        ("/sys/bus/pci/devices/0000:3b:00.0/config", Operation.DEVICE),
        ("/sys/fs/cgroup/kubepods/cpuset.cpus", Operation.CGROUP),
        ("/etc/cdi/a.json", Operation.CDI),
        ("/run/cdi/a.json", Operation.CDI),
        ("/var/run/cdi/a.json", Operation.CDI),
        ("/var/lib/driver/state", None),
        ("/etc/cdible", None),
    ],
)
def test_path_determines_the_operation_without_a_mark(path: str, operation: Operation | None) -> None:
    error = OSError(errno.EIO, "no", path)
    assert single_chain(error)[0].operation is operation
    assert single_chain(error, Operation.API)[0].operation is (operation or Operation.API)
    with pytest.raises(OSError, match="no"), doing(Operation.STATE):
        raise error
    assert single_chain(error)[0].operation is Operation.STATE


def test_mark_applies_to_the_causes() -> None:
    """A wrapper that was raised in the block, from what was caught in the block."""
    error = chain_errors(RuntimeError("not kept"), OSError(errno.EROFS, "no"))
    with pytest.raises(RuntimeError), doing(Operation.STATE):
        raise error
    assert single_chain(error) == (
        UnclassifiedException("RuntimeError", is_programming_error=False, text="not kept"),
        ErrnoEvidence(errno.EROFS, Operation.STATE, "", "no"),
    )


def test_only_value_errors_count_as_bad_parameters() -> None:
    config = RecordedOperation(Operation.CONFIG)
    for error in (ValueError("a"), KeyError("a"), IndexError("a"), TypeError("a")):
        assert isinstance(extract_evidence(error, config), WrongParameterValue)
        assert isinstance(extract_evidence(error), UnclassifiedException)
    for bug in (AttributeError("a"), NameError("a"), ZeroDivisionError(), AssertionError()):
        assert isinstance(extract_evidence(bug, config), UnclassifiedException)


# --- numbers that are missing, types of the language -------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (ConnectionResetError("Connection lost"), errno.ECONNRESET),  # asyncio's own
        (ConnectionRefusedError(), errno.ECONNREFUSED),
        (BrokenPipeError(), errno.EPIPE),
        (PermissionError("no"), errno.EACCES),
        (FileNotFoundError("gone"), errno.ENOENT),
        (BlockingIOError(), errno.EAGAIN),
        (MemoryError(), errno.ENOMEM),
    ],
)
def test_oserror_without_errno_gets_the_errno_of_its_type(error: BaseException, number: int) -> None:
    assert single_chain(error)[0].number == number


def test_oserror_with_text_only_has_no_errno() -> None:
    assert single_chain(OSError("cannot")) == (
        UnclassifiedException("OSError", is_programming_error=False, text="cannot"),
    )
    assert single_chain(OSError("a", "b")) == (
        UnclassifiedException("OSError", is_programming_error=False, text="[Errno a] b"),
    )


def test_timeout_exception_with_an_errno_is_classified_by_the_errno() -> None:
    assert single_chain(TimeoutError(errno.ETIMEDOUT, "timed out")) == (
        ErrnoEvidence(errno.ETIMEDOUT, None, "", "timed out"),
    )
    assert single_chain(TimeoutError()) == (OperationTimeout("TimeoutError"),)


def test_filename_of_bytes_is_decoded() -> None:
    assert single_chain(OSError(errno.EIO, "no", b"/dev/\xff0"))[0].path == "/dev/�0"


def test_subclass_of_a_builtin_error_is_no_bug() -> None:
    class BankError(ValueError):
        """Error class of a driver."""

    assert extract_evidence(ValueError("a")) == UnclassifiedException(
        "ValueError", is_programming_error=True, text="a"
    )
    assert extract_evidence(BankError("a")) == UnclassifiedException(
        "BankError", is_programming_error=False, text="a"
    )
    assert extract_evidence(RuntimeError("a")) == UnclassifiedException(
        "RuntimeError", is_programming_error=False, text="a"
    )


def test_exception_with_broken_str_has_no_text() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

        @property
        def status(self) -> int:
            raise RuntimeError("no number")

        def code(self) -> int:
            raise RuntimeError("no code")

    assert single_chain(Mute()) == (UnclassifiedException("Mute", is_programming_error=False, text=""),)


class Odd(NamedTuple):
    value: object = 15
    name: str = "UNAVAILABLE"


@pytest.mark.parametrize(
    "status", [True, "503", 99, 600, 200, None, Odd(), Odd((14,), "OTHER"), Odd(()), object()]
)
def test_number_of_another_kind_is_ignored(status: object) -> None:
    error = Exception("a")
    error.status = status  # type: ignore[attr-defined]
    error.code = lambda: status  # type: ignore[attr-defined]
    assert isinstance(single_chain(error)[0], UnclassifiedException)


# --- several exceptions ------------------------------------------------------------------------------------


def chain_errors(error: BaseException, cause: BaseException) -> BaseException:
    """Return the error as ``raise error from cause`` leaves it."""
    error.__cause__ = cause
    return error


def test_cause_is_evidence_of_the_same_failure() -> None:
    assert single_chain(chain_errors(RuntimeError("not written"), OSError(errno.ENOSPC, "full"))) == (
        UnclassifiedException("RuntimeError", is_programming_error=False, text="not written"),
        ErrnoEvidence(errno.ENOSPC, None, "", "full"),
    )


def test_context_is_marked_as_handled_before() -> None:
    def fail() -> None:
        try:
            {}["cache"]
        except KeyError:
            raise RuntimeError("then")  # noqa: B904 - what is tested

    with pytest.raises(RuntimeError) as caught:
        fail()
    assert single_chain(caught.value)[1] == EarlierException(
        UnclassifiedException("KeyError", is_programming_error=True, text="'cache'")
    )
    caught.value.__suppress_context__ = True
    assert len(single_chain(caught.value)) == 1


async def test_group_has_one_failure_for_each_member() -> None:
    async def fail(error: Exception) -> None:
        raise error

    async def run_both() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail, BadConfigError("a"))
            nursery.start_soon(fail, OSError(errno.EIO, "b"))

    with pytest.raises(BaseExceptionGroup) as caught:
        await run_both()
    found = extract_evidence_chains(caught.value)
    assert {type(chain[0]) for chain in found} == {DriverReportedError, ErrnoEvidence}


def test_mark_of_a_group_applies_to_unmarked_members() -> None:
    own = OSError(errno.EIO, "a")
    with pytest.raises(OSError, match="a"), doing(Operation.DEVICE):
        raise own
    group = ExceptionGroup("both", [own, OSError(errno.EIO, "b")])
    with pytest.raises(ExceptionGroup), doing(Operation.CDI):
        raise group
    assert [chain[0].operation for chain in extract_evidence_chains(group)] == [
        Operation.DEVICE,
        Operation.CDI,
    ]


def test_wrapper_of_a_group_is_evidence_of_each_member() -> None:
    error = chain_errors(
        TransientError("some failed"), ExceptionGroup("", [ValueError("a"), ValueError("b")])
    )
    assert [(chain[0].code, chain[1].text) for chain in extract_evidence_chains(error)] == [
        ("driver.transient", "a"),
        ("driver.transient", "b"),
    ]


def test_cycles_long_chains_and_deep_groups_are_bounded() -> None:
    circle = ValueError("a")
    chain_errors(circle, chain_errors(RuntimeError("b"), circle))
    assert len(single_chain(circle)) == 2

    chain: BaseException = ValueError("end")
    for _ in range(1000):
        chain = chain_errors(RuntimeError("link"), chain)
    assert 0 < len(single_chain(chain)) <= CHAIN_LENGTH_MAX + 2

    deep: Exception = ValueError("a")
    for _ in range(1000):
        deep = ExceptionGroup("", [deep])
    assert len(extract_evidence_chains(deep)) == 1

    wide = ExceptionGroup("", [ExceptionGroup("", [ValueError("a")] * 40)] * 40)
    assert len(extract_evidence_chains(wide)) == FAILURES_MAX


# --- copies ------------------------------------------------------------------------------------------------

DEAD = FailedDeviceError(ref("gpu-0"), "no answer", code="gpu.dead")


@pytest.mark.parametrize(
    "error",
    [
        TransientError("busy", code="gpu.busy", retry_after_s=3, requests=["r"]),
        BadConfigError("3 of 2", detail="slots"),
        DEAD,
        PermanentError("no driver", scope=Scope.DRIVER),
        PrepareError(classify(BadConfigError("3 of 2"), PrepareContext(ONE)), "text"),
        ConfigError("10ms is below 100ms", key="agent.period"),
        ApiError(409, "Conflict", "changed", b"{}", retry_after_s=1),
        ApiForbiddenError(403, "Forbidden", "no", verb="list", resource="resourceslices"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("make", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_copy_of_an_exception_is_equal(error: Exception, make: Callable[[Exception], Exception]) -> None:
    made = make(error)
    assert (type(made), str(made), vars(made)) == (type(error), str(error), vars(error))


def prepare_in_worker() -> None:
    with doing(Operation.DEVICE, "gpu-0"):
        raise FailedDeviceError(ref("gpu-0"), "no answer", code="gpu.dead")


def test_exception_of_a_worker_process_does_not_break_its_pool() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for _ in range(2):
            error = pool.submit(prepare_in_worker).exception()
            assert isinstance(error, FailedDeviceError)
            assert (error.device, error.code, str(error)) == (DEAD.device, DEAD.code, str(DEAD))
            assert recorded_operation(error) == (Operation.DEVICE, "gpu-0")


# --- arguments ---------------------------------------------------------------------------------------------


def test_one_failed_request_needs_no_sequence() -> None:
    assert BadConfigError("3 of 2", requests="pages").requests == ("pages",)
    assert FailedDeviceError("gpu-0", "no answer", requests=["a", "b"]).requests == ("a", "b")


def test_exception_whose_attributes_raise_keeps_its_type_and_operation() -> None:
    class Keys(Exception):
        def __getattr__(self, name: str) -> object:
            raise KeyError(name)

    with pytest.raises(Keys) as raised, doing(Operation.DEVICE, "gpu-0"):
        raise Keys
    assert recorded_operation(raised.value) == (Operation.DEVICE, "gpu-0")
