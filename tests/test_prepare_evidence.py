"""From exceptions to evidence: by type, number and mark, whatever library, however wrapped."""

import errno
import io
import re
import urllib.error
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pynvml
import pytest
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from patience import PATIENCE_S
from prepare_cases import ApiException, HTTPStatusError, Response, health_of, ref

from agent.model.prepare import ErrorClass, Operation, Scope
from agent.prepare.classify import device_verdict
from agent.prepare.doing import Doing, doing, done_by
from agent.prepare.errors import BadConfig, FailedDevice, PermanentError, TransientError
from agent.prepare.evidence import (
    GRPC_NAMES,
    NVML_NAMES,
    ClaimResult,
    DecodeError,
    DriverReportedError,
    Errno,
    GrpcStatus,
    Handled,
    HttpStatus,
    NvmlCode,
    Raised,
    Text,
    TimedOut,
    UnreadableCdiFile,
    WrongValue,
)
from agent.prepare.exceptions import CHAIN_MAX, FAILURES_MAX, failures
from agent.prepare.extract import read


def only(error: BaseException, operation: Operation | None = None) -> tuple[Any, ...]:
    """The evidence of what is one failure."""
    (chain,) = failures(error, operation)
    return chain


# --- each kind, and how it is told -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evidence", "told"),
    [
        (Errno(errno.ENOSPC, Operation.CDI, "/etc/cdi/a.json"), "errno ENOSPC while cdi"),
        (Errno(errno.EIO), "errno EIO"),
        (Errno(100_000), "errno 100000"),
        (NvmlCode(15), "NVML 15 (GPU_IS_LOST)"),
        (NvmlCode(77), "NVML 77 (unknown code)"),
        (GrpcStatus(14, "text"), "gRPC 14 (UNAVAILABLE)"),
        (GrpcStatus(-1), "gRPC -1 (unknown code)"),
        (HttpStatus(409, "Conflict", "text", kubernetes=True), "API 409 Conflict"),
        (HttpStatus(503), "HTTP 503"),
        (DecodeError("JSONDecodeError", "text", Operation.CONFIG), "JSONDecodeError while config"),
        (WrongValue("ValueError", "text"), "ValueError while config"),
        (UnreadableCdiFile("/etc/cdi/a.json", "text"), "CDI file /etc/cdi/a.json not understood"),
        (UnreadableCdiFile("", "text"), "CDI file not understood"),
        (device_verdict(ref("a"), health_of("a", "gpu.lost")),
         "health engine: gpu.example.com/node1/a Unhealthy, gpu.lost"),
        (TimedOut("TooSlowError", Operation.LOCK), "TooSlowError while lock"),
        (ClaimResult("Cancelled"), "Cancelled"),
        (Raised("KeyError", bug=True, text="'a'"), "exception KeyError"),
        (Text("anything"), "a text"),
        (DriverReportedError(ErrorClass.BAD_CONFIG, "config.invalid", "s"), "driver says bad-config, config.invalid"),
        (Handled(Errno(errno.ENOENT)), "errno ENOENT before"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_evidence_is_told_in_short(evidence: object, told: str) -> None:
    assert str(evidence) == told


def test_names_of_nvml_are_those_of_its_header() -> None:
    header = (Path(__file__).parents[1] / "native/src/gpu/nvml.h").read_text()
    found = {
        int(number): name.removeprefix("ERROR_")
        for name, number in re.findall(r"NVML_(SUCCESS|ERROR_\w+) = (\d+)", header)
    }
    assert dict(NVML_NAMES) == found


def test_names_of_grpc_are_those_of_both_libraries() -> None:
    assert {status.value: status.name for status in Status} == dict(enumerate(GRPC_NAMES))
    assert {status.value[0]: status.name for status in grpc.StatusCode} == dict(enumerate(GRPC_NAMES))


# --- libraries ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(NVML_NAMES.keys() - {0}))
def test_nvml_s_exceptions_are_known_by_their_number(code: int) -> None:
    assert only(pynvml.NVMLError(code)) == (NvmlCode(code),)


@pytest.mark.parametrize("status", Status)
def test_grpclib_s_exceptions_are_known_by_their_status(status: Status) -> None:
    assert only(GRPCError(status, "text")) == (GrpcStatus(status.value, "text"),)


def test_grpcio_s_exceptions_are_known_by_their_status(tmp_path: Path) -> None:
    with grpc.insecure_channel(f"unix:{tmp_path}/none") as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/a.B/C")(b"", timeout=PATIENCE_S)
    (evidence,) = only(caught.value)
    assert evidence.code == 14


def test_the_api_server_s_own_reason_is_read_from_its_answer() -> None:
    body = '{"kind": "Status", "reason": "Forbidden", "message": "may not", "code": 403}'
    said = HttpStatus(403, "Forbidden", "may not", kubernetes=True)
    assert only(ApiException(403, "phrase", body)) == (said,)
    assert only(HTTPStatusError(Response(403, body))) == (said,)


@pytest.mark.parametrize("body", ["[" * 100_000, "{", b"\xff", 7, "x" * 100_000, '"text"', "", None])
def test_an_answer_that_is_none_is_no_reason(body: object) -> None:
    assert only(ApiException(409, "Conflict", body)) == (HttpStatus(409, "Conflict", "", kubernetes=True),)


def test_another_server_is_not_the_api_server_unless_the_driver_says_so() -> None:
    error = HTTPStatusError(Response(403, "no", "Forbidden"))
    (evidence,) = only(error)
    assert (evidence.status, evidence.kubernetes) == (403, False)
    (evidence,) = only(error, Operation.API)
    assert (evidence.status, evidence.kubernetes) == (403, True)


def test_urllib_s_error_is_an_answer_though_it_is_an_oserror() -> None:
    error = urllib.error.HTTPError("http://10.0.0.1", 503, "Service Unavailable", Message(), io.BytesIO())
    (evidence,) = only(error)
    assert (evidence.status, evidence.reason) == (503, "Service Unavailable")
    error.close()


def test_pydantic_s_and_jsonschema_s_refusals_are_known_by_name() -> None:
    class ValidationError(ValueError):
        """As each library calls it."""

    assert only(ValidationError("pages: not an int")) == (
        DecodeError("ValidationError", "pages: not an int", None, refused=True),
    )


def test_a_driver_s_word_is_taken_as_a_whole() -> None:
    error = BadConfig("3 of 2", code="a.b", detail="more", requests=["r"], retry_after_s=5)
    assert only(error) == (DriverReportedError(ErrorClass.BAD_CONFIG, "a.b", "3 of 2", "more", ("r",), 5),)
    assert only(FailedDevice(ref("a"), "broken"))[0].device == ref("a")
    assert only(PermanentError("no", scope=Scope.DRIVER))[0].scope is Scope.DRIVER


def test_a_driver_s_word_counts_though_its_texts_are_none() -> None:
    class Forgetful(TransientError):
        def __init__(self) -> None:
            """Without its base's."""

    (word,) = only(Forgetful())
    assert (word.error_class, word.code, word.summary) == (ErrorClass.TRANSIENT, "driver.transient", "")
    (word,) = only(BadConfig(ValueError("3 of 2"), code=7, requests=[1]))  # type: ignore[arg-type, list-item]
    assert (word.summary, word.code, word.requests) == ("3 of 2", "7", ("1",))


def test_nvml_is_not_asked_for_the_text_of_its_own_error() -> None:
    """It may hang in the driver that failed."""

    class NVMLError(Exception):
        value = 15

        def __str__(self) -> str:
            raise AssertionError("asked")

    assert only(NVMLError()) == (NvmlCode(15),)


# --- what was being done -----------------------------------------------------------------------------------


def test_the_innermost_mark_stays() -> None:
    error = OSError(errno.ENOSPC, "full")
    with (
        pytest.raises(OSError, match="full"),
        doing(Operation.STATE),
        doing(Operation.CDI, Path("/etc/cdi/a")),
    ):
        raise error
    assert done_by(error) == Doing(Operation.CDI, "/etc/cdi/a")
    assert only(error) == (Errno(errno.ENOSPC, Operation.CDI, "/etc/cdi/a", "full"),)


def test_nothing_is_marked_that_did_not_pass() -> None:
    with doing(Operation.CDI):
        pass
    assert done_by(OSError()) is None


def test_an_exception_that_takes_no_mark_passes_all_the_same() -> None:
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
def test_where_a_file_is_tells_what_was_done_if_nobody_says(path: str, operation: Operation | None) -> None:
    error = OSError(errno.EIO, "no", path)
    assert only(error)[0].operation is operation
    assert only(error, Operation.API)[0].operation is (operation or Operation.API)
    with pytest.raises(OSError, match="no"), doing(Operation.STATE):
        raise error
    assert only(error)[0].operation is Operation.STATE


def test_a_mark_reaches_what_an_exception_came_from() -> None:
    """A wrapper that was raised in the block, from what was caught in the block."""
    error = wrapped(RuntimeError("not kept"), OSError(errno.EROFS, "no"))
    with pytest.raises(RuntimeError), doing(Operation.STATE):
        raise error
    assert only(error) == (
        Raised("RuntimeError", bug=False, text="not kept"),
        Errno(errno.EROFS, Operation.STATE, "", "no"),
    )


def test_only_values_are_the_user_s_while_parameters_are_read() -> None:
    config = Doing(Operation.CONFIG)
    for error in (ValueError("a"), KeyError("a"), IndexError("a"), TypeError("a")):
        assert isinstance(read(error, config), WrongValue)
        assert isinstance(read(error), Raised)
    for bug in (AttributeError("a"), NameError("a"), ZeroDivisionError(), AssertionError()):
        assert isinstance(read(bug, config), Raised)


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
def test_an_error_without_its_number_has_that_of_its_type(error: BaseException, number: int) -> None:
    assert only(error)[0].number == number


def test_an_oserror_that_is_only_a_text_has_no_number() -> None:
    assert only(OSError("cannot")) == (Raised("OSError", bug=False, text="cannot"),)
    assert only(OSError("a", "b")) == (Raised("OSError", bug=False, text="[Errno a] b"),)


def test_a_timeout_with_its_number_is_the_kernel_s() -> None:
    assert only(TimeoutError(errno.ETIMEDOUT, "timed out")) == (
        Errno(errno.ETIMEDOUT, None, "", "timed out"),
    )
    assert only(TimeoutError()) == (TimedOut("TimeoutError"),)


def test_a_name_of_bytes_is_a_name() -> None:
    assert only(OSError(errno.EIO, "no", b"/dev/\xff0"))[0].path == "/dev/�0"


def test_an_error_with_a_name_of_its_own_is_no_bug_of_the_language_s() -> None:
    class BankError(ValueError):
        """Somebody thought of it."""

    assert read(ValueError("a")) == Raised("ValueError", bug=True, text="a")
    assert read(BankError("a")) == Raised("BankError", bug=False, text="a")
    assert read(RuntimeError("a")) == Raised("RuntimeError", bug=False, text="a")


def test_an_exception_that_cannot_speak_says_nothing() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

        @property
        def status(self) -> int:
            raise RuntimeError("no number")

        def code(self) -> int:
            raise RuntimeError("no code")

    assert only(Mute()) == (Raised("Mute", bug=False, text=""),)


class Odd(NamedTuple):
    value: object = 15
    name: str = "UNAVAILABLE"


@pytest.mark.parametrize(
    "status", [True, "503", 99, 600, 200, None, Odd(), Odd((14,), "OTHER"), Odd(()), object()]
)
def test_a_number_that_means_nothing_is_none(status: object) -> None:
    error = Exception("a")
    error.status = status  # type: ignore[attr-defined]
    error.code = lambda: status  # type: ignore[attr-defined]
    assert isinstance(only(error)[0], Raised)


# --- several exceptions ------------------------------------------------------------------------------------


def wrapped(error: BaseException, cause: BaseException) -> BaseException:
    """As ``raise error from cause`` leaves it."""
    error.__cause__ = cause
    return error


def test_what_an_exception_came_from_is_evidence_of_the_same_failure() -> None:
    assert only(wrapped(RuntimeError("not written"), OSError(errno.ENOSPC, "full"))) == (
        Raised("RuntimeError", bug=False, text="not written"),
        Errno(errno.ENOSPC, None, "", "full"),
    )


def test_what_was_being_handled_is_marked_as_such() -> None:
    def fail() -> None:
        try:
            {}["cache"]
        except KeyError:
            raise RuntimeError("then")  # noqa: B904 - what is tested

    with pytest.raises(RuntimeError) as caught:
        fail()
    assert only(caught.value)[1] == Handled(Raised("KeyError", bug=True, text="'cache'"))
    caught.value.__suppress_context__ = True
    assert len(only(caught.value)) == 1


async def test_a_group_has_a_failure_for_each_member() -> None:
    async def fail(error: Exception) -> None:
        raise error

    async def both() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail, BadConfig("a"))
            nursery.start_soon(fail, OSError(errno.EIO, "b"))

    with pytest.raises(BaseExceptionGroup) as caught:
        await both()
    found = failures(caught.value)
    assert {type(chain[0]) for chain in found} == {DriverReportedError, Errno}


def test_a_mark_on_a_group_is_its_members_and_a_member_s_own_stays() -> None:
    own = OSError(errno.EIO, "a")
    with pytest.raises(OSError, match="a"), doing(Operation.DEVICE):
        raise own
    group = ExceptionGroup("both", [own, OSError(errno.EIO, "b")])
    with pytest.raises(ExceptionGroup), doing(Operation.CDI):
        raise group
    assert [chain[0].operation for chain in failures(group)] == [Operation.DEVICE, Operation.CDI]


def test_a_wrapper_of_a_group_is_evidence_of_each_member_s_failure() -> None:
    error = wrapped(TransientError("some failed"), ExceptionGroup("", [ValueError("a"), ValueError("b")]))
    assert [(chain[0].code, chain[1].text) for chain in failures(error)] == [
        ("driver.transient", "a"),
        ("driver.transient", "b"),
    ]


def test_circles_long_chains_and_deep_groups_come_to_an_end() -> None:
    circle = ValueError("a")
    wrapped(circle, wrapped(RuntimeError("b"), circle))
    assert len(only(circle)) == 2

    chain: BaseException = ValueError("end")
    for _ in range(1000):
        chain = wrapped(RuntimeError("link"), chain)
    assert 0 < len(only(chain)) <= CHAIN_MAX + 2

    deep: Exception = ValueError("a")
    for _ in range(1000):
        deep = ExceptionGroup("", [deep])
    assert len(failures(deep)) == 1

    wide = ExceptionGroup("", [ExceptionGroup("", [ValueError("a")] * 40)] * 40)
    assert len(failures(wide)) == FAILURES_MAX
