"""A driver's calls to the agent over its socket, with Google's gRPC and protobuf at the driver's end."""

import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from patience import PATIENCE_S
from wire.google import load_descriptors, message_class, watch_health
from wire.link import API, Driver, LinkServer, claim, message
from wire.raw import DATA, END_STREAM, RawClient, frame, request_headers
from wire.raw import message as raw_message
from wire.serving import eventually

from agent.errors import ConfigError, PermissionDeniedError, ResourceBusyError
from agent.model.claim import DeviceRef
from agent.model.health import Effect, Taint, Taints
from agent.serve import grpc_servers
from agent.serve.driver_link.handler_interface import TooManyDevices
from agent.serve.driver_link.service import QUERY_THREADS, DriverLinkService
from agent.serve.grpc.gen.driver_link.drahealth import v1
from agent.serve.grpc.hardened import UnsentMessages
from agent.store.state_files import StateWriteError
from agent.system.threads.worker_threads import QUEUE_MAX

ARRIVAL_S = 2.0
"""Deadline of a call that gets no answer; the call may arrive later on a busy machine."""
CONTRACT = Path(__file__).parent / "wire" / "driver_link_contract.txt"

Status = grpc.StatusCode


@pytest.fixture
def link_server(tmp_path: Path) -> Iterator[LinkServer]:
    with LinkServer(tmp_path) as link_server:
        yield link_server


@pytest.fixture
def driver(link_server: LinkServer) -> Iterator[Driver]:
    with Driver(link_server.socket) as driver:
        yield driver


def refusal(driver: Driver, method: str, **fields: Any) -> tuple[Status, str]:
    """Return status and text of a refused call."""
    with pytest.raises(grpc.RpcError) as raised:
        driver.call(method, **fields)
    return raised.value.code(), raised.value.details() or ""


def cpus(number: int) -> Any:
    return message("DeclaredDevice", name=f"cpus-{number}", cpus=message("CpusPart", cpus=str(number)))


# --- the contract -------------------------------------------------------------------------------------------

TYPES = {
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_DOUBLE: "double",
}


def contract() -> set[str]:
    """Return everything that the other side may rely on, a line each."""
    file = load_descriptors()[API]
    lines = set()
    for message_type in file.message_types_by_name.values():
        for field in message_type.fields:
            kind = field.message_type or field.enum_type
            text = [TYPES[field.type] if kind is None else kind.name]
            text += ["repeated"] if field.is_repeated else ["optional"] if field.has_presence else []
            oneof = field.containing_oneof
            text += [f"in {oneof.name}"] if oneof is not None and not oneof.name.startswith("_") else []
            lines.add(f"{message_type.name}.{field.name} = {field.number} {' '.join(text)}")
        lines.add(f"message {message_type.name}")
    for enum in file.enum_types_by_name.values():
        lines |= {f"{enum.name} {value.name} = {value.number}" for value in enum.values}
    for method in file.services_by_name["DriverLink"].methods:
        streams = "stream " if method.server_streaming else ""
        lines.add(f"rpc {method.name} {method.input_type.name} to {streams}{method.output_type.name}")
    return lines


def test_contract_of_the_api_is_still_fulfilled() -> None:
    assert sorted(set(CONTRACT.read_text().splitlines()) - contract()) == []


def test_contract_file_contains_the_whole_api() -> None:
    assert sorted(contract() - set(CONTRACT.read_text().splitlines())) == []


def test_methods_equal_those_of_the_generated_server() -> None:
    generated = v1.DriverLinkBase().__mapping__()
    served = DriverLinkService("d", lambda: pytest.fail("unexpected call")).__mapping__()
    assert {path: handler.cardinality for path, handler in served.items()} == {
        path: handler.cardinality for path, handler in generated.items()
    }


# --- cost --------------------------------------------------------------------------------------------------


def test_agent_without_driver_calls_imports_no_prepare_modules() -> None:
    program = (
        "import sys, agent.serve.grpc_servers\n"
        "print([one for one in sys.modules if one.startswith('agent.prepare') or 'gen.driver_link' in one])"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert completed.stdout == "[]\n"


def test_handler_is_opened_once_in_a_thread_at_the_first_call(link_server: LinkServer) -> None:
    eventually(lambda: not link_threads(), "no call was made, and threads of other servers have ended")
    assert link_server.opened == []
    with Driver(link_server.socket) as driver, Driver(link_server.socket) as other:
        calls = [caller.call_async("CheckClaims") for caller in (driver, other) for _ in range(8)]
        for call in calls:
            assert list(call.result().answers) == []
    assert link_server.opened == ["test.drahealth.example in dh-link-"]
    assert 0 < len(link_threads()) <= QUERY_THREADS


def link_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dh-link-")]


def test_failed_opening_of_handler_is_retried_by_the_next_call(
    link_server: LinkServer, driver: Driver
) -> None:
    link_server.open_fails = [
        ConfigError("a driver of 70 bytes can begin no key"),
        OSError(5, "I/O error", "/d"),
    ]
    assert refusal(driver, "CheckClaims") == (Status.UNAVAILABLE, "/d: I/O error")
    assert refusal(driver, "CheckClaims") == (
        Status.FAILED_PRECONDITION,
        "a driver of 70 bytes can begin no key",
    )
    assert list(driver.call("CheckClaims").answers) == []


# --- success ------------------------------------------------------------------------------------------------


def test_check_claims_answers_in_the_order_of_the_request(link_server: LinkServer, driver: Driver) -> None:
    link_server.handler.blocked_uids = {"b", "c"}
    answers = driver.call("CheckClaims", claims=[claim("c"), claim("a"), claim("b")]).answers
    assert [(answer.uid, answer.HasField("verdict")) for answer in answers] == [
        ("c", True),
        ("a", False),
        ("b", True),
    ]
    assert answers[0].verdict.code == "config.invalid"
    assert "Other failing claims in this call: ns/b (bad-config config.invalid)." in answers[0].verdict.text
    assert "ns/c (bad-config" in answers[2].verdict.text


def test_report_prepare_returns_verdicts_of_failed_claims(link_server: LinkServer, driver: Driver) -> None:
    evidence = message("Evidence", nvml=message("NvmlReturn", code=15, device="gpu-0"))
    outcomes = [
        message("PrepareOutcome", claim=claim("a", "gpu-0"), failed=True, evidence=[evidence]),
        message("PrepareOutcome", claim=claim("b", "gpu-1")),
        message("PrepareOutcome", claim=claim("c"), failed=True),
    ]
    answers = driver.call("ReportPrepare", step=1, outcomes=outcomes).answers
    assert [answer.HasField("verdict") for answer in answers] == [True, False, True]
    verdict = answers[0].verdict
    assert (verdict.error_class, verdict.code) == (3, "gpu.lost")
    assert [(device.driver, device.pool, device.device) for device in verdict.devices] == [
        ("test.drahealth.example", "p", "gpu-0")
    ]
    assert (verdict.count, verdict.first_s) == (0, 0.0), "failures are not recorded"
    ((method, error_status),) = link_server.handler.calls
    assert method == "prepared"
    assert [
        status.evidence if status.evidence is None else len(status.evidence) for status in error_status
    ] == [
        1,
        None,
        0,
    ]
    driver.call("ReportPrepare", step=2, outcomes=outcomes[1:2])
    assert link_server.handler.calls[-1] == ("unprepared", [error_status[1]])


def test_declaring_4096_devices_does_not_block_health_streams(
    link_server: LinkServer, driver: Driver
) -> None:
    release = link_server.handler.hold("sync")
    with watch_health(link_server.socket) as kubelet:
        kubelet.wait_opened()
        call = driver.call_async("SyncDevices", devices=[cpus(number) for number in range(4096)])
        eventually(lambda: len(link_server.handler.calls) == 1, "the devices are decoded")
        link_server.publish(2)
        assert kubelet.next().devices[0].last_updated_time == 1_700_000_002
        assert not call.done()
        release.set()
        assert call.result() == message("SyncDevicesReply", devices=4096, evaluated=True)
    assert all(name.startswith("dh-link-") for name in link_server.handler.threads)


def test_request_with_longest_names_fits(link_server: LinkServer, driver: Driver) -> None:
    name = "n" * 253
    claims = [
        message(
            "PrepareClaim",
            namespace=name,
            name=name,
            uid=f"{number:0253d}",
            devices=[message("ClaimedDevice", request=name)],
        )
        for number in range(256)
    ]
    assert len(driver.call("CheckClaims", claims=claims).answers) == 256


# --- concurrency -------------------------------------------------------------------------------------------


def test_hanging_declaration_delays_no_check_and_no_report(link_server: LinkServer, driver: Driver) -> None:
    release = link_server.handler.hold("sync")
    declared = driver.call_async("SyncDevices")
    eventually(lambda: link_server.handler.calls == [("sync", [])], "the declaration hangs")
    assert len(driver.call("CheckClaims", claims=[claim("a")]).answers) == 1
    assert driver.call("Classify", evidence=[message("Evidence", text="busy")]).verdict.code
    assert len(driver.call("ReportPrepare", step=1).answers) == 0
    assert not declared.done()
    release.set()
    assert declared.result().evaluated


def test_abandoned_reports_are_recorded_in_order(link_server: LinkServer, driver: Driver) -> None:
    release = link_server.handler.hold("prepared")
    calls = [driver.call_async("ReportPrepare", step=1)]
    eventually(lambda: len(link_server.handler.calls) == 1, "the first report hangs")
    for uid in ("a", "b"):
        outcome = message("PrepareOutcome", claim=claim(uid))
        calls.append(driver.call_async("ReportPrepare", step=1, outcomes=[outcome]))
        driver.call("CheckClaims")  # arrives after it
    for call in calls:
        call.cancel()
    driver.call("CheckClaims")  # arrives after the end of all of them
    release.set()
    driver.call("ReportPrepare", step=2)
    reports = [given for method, given in link_server.handler.calls if method != "check"]
    assert [[result.claim.uid for result in report] for report in reports] == [[], ["a"], ["b"], []]


def test_cancelled_call_leaves_the_queue(link_server: LinkServer, driver: Driver) -> None:
    release = link_server.handler.hold("sync")
    first = driver.call_async("SyncDevices")
    eventually(lambda: len(link_server.handler.calls) == 1, "the declaration hangs")
    waiting = [driver.call_async("SyncDevices") for _ in range(QUEUE_MAX)]
    eventually(
        lambda: (
            error_status(driver.call_async("SyncDevices", timeout_s=ARRIVAL_S)) is Status.RESOURCE_EXHAUSTED
        ),
        "the queue is full",
    )
    assert refusal(driver, "SyncDevices")[1] == "worker pool dh-link: 64 calls wait already, limit 64"
    for call in waiting:
        call.cancel()
    eventually(
        lambda: (
            error_status(driver.call_async("SyncDevices", timeout_s=ARRIVAL_S)) is Status.DEADLINE_EXCEEDED
        ),
        "the queue has room",
    )
    release.set()
    assert first.result().evaluated
    assert driver.call("SyncDevices", devices=[cpus(7)]).devices == 1


def error_status(call: Any) -> Status:
    """Return the status of a failed call."""
    with pytest.raises(grpc.RpcError) as raised:
        call.result()
    return raised.value.code()


def test_shutdown_waits_for_reports_and_not_for_hanging_disk(tmp_path: Path) -> None:
    with ExitStack() as stack:
        link_server = stack.enter_context(LinkServer(tmp_path))
        driver = stack.enter_context(Driver(link_server.socket))
        release = link_server.handler.hold("sync")
        declared = driver.call_async("SyncDevices")
        eventually(lambda: len(link_server.handler.calls) == 1, "the declaration hangs")
        driver.call("ReportPrepare", step=1)
        assert link_server.thread.stop(PATIENCE_S), "the server ends although a call hangs"
        with pytest.raises(grpc.RpcError) as raised:
            declared.result()
        assert raised.value.code() is Status.UNAVAILABLE
        assert raised.value.details() == "agent shutting down"
        release.set()
    eventually(lambda: not link_threads(), "all threads end")


# --- failures -----------------------------------------------------------------------------------------------

FAILURES = [
    (ConfigError("device 'a': numa: 5000"), Status.INVALID_ARGUMENT, "device 'a': numa: 5000"),
    (ResourceBusyError("/d/x.toml: not ours"), Status.FAILED_PRECONDITION, "/d/x.toml: not ours"),
    (TooManyDevices("2 devices and 4095 of other drivers"),
     Status.RESOURCE_EXHAUSTED, "2 devices and 4095 of other drivers"),
    (
        StateWriteError(Path("/d/x"), 7, 28, "No space left on device"),
        Status.RESOURCE_EXHAUSTED,
        "/d/x: 7 bytes could not be written: No space left on device",
    ),
    (OSError(28, "No space left on device", "/d/x"),
     Status.RESOURCE_EXHAUSTED, "/d/x: No space left on device"),
    (OSError(5, "Input/output error", "/d/x"), Status.UNAVAILABLE, "/d/x: Input/output error"),
    (PermissionDeniedError("/d: may not write"), Status.UNAVAILABLE, "/d: may not write"),
    (LookupError("secret"), Status.INTERNAL, "internal error: LookupError; see the agent's log"),
    (SystemExit(3), Status.INTERNAL, "internal error: SystemExit; see the agent's log"),
    (ConfigError("ä" * 5000), Status.INVALID_ARGUMENT, "ä" * 510 + "..."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "status", "text"), FAILURES, ids=[str(type(failure[0]).__name__) for failure in FAILURES]
)
def test_handler_error_becomes_its_status_and_service_continues(
    link_server: LinkServer, driver: Driver, error: BaseException, status: Status, text: str
) -> None:
    link_server.handler.errors["sync"] = error
    assert refusal(driver, "SyncDevices") == (status, text)
    assert list(driver.call("CheckClaims").answers) == []


def test_internal_error_is_logged_once(
    link_server: LinkServer, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    link_server.handler.errors["sync"] = link_server.handler.errors["check"] = LookupError("not foreseen")
    with caplog.at_level(logging.ERROR, logger="agent.serve.driver_link.service"):
        for method in ("SyncDevices", "CheckClaims", "SyncDevices"):
            assert refusal(driver, method)[0] is Status.INTERNAL
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [LookupError]


def test_request_above_the_limit_is_refused_unread(driver: Driver) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        driver.call_raw("CheckClaims", bytes(600 << 10))
    assert raised.value.code() is Status.RESOURCE_EXHAUSTED
    assert raised.value.details() == "message is 614400 bytes, limit 524288; refused unread"


def test_method_of_a_later_version_is_unimplemented(driver: Driver) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        driver.call_raw("PredictTheFuture", b"")
    assert raised.value.code() is Status.UNIMPLEMENTED


# --- drivers that do not read -------------------------------------------------------------------------------


@pytest.fixture
def unsent_64_kib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let messages that wait for clients take 64 KiB; to be used before the server starts."""
    monkeypatch.setattr(grpc_servers, "UnsentMessages", partial(UnsentMessages, 64 << 10))


def read_status(client: RawClient, stream: int) -> tuple[str, str]:
    """Return status and text of a call that has ended."""
    headers = client.next_headers(stream)
    while "grpc-status" not in headers:
        headers = client.next_headers(stream)
    return headers["grpc-status"], headers["grpc-message"]


@pytest.mark.usefixtures("unsent_64_kib")
def test_stalled_taint_streams_above_the_limit_end_the_longest_wait(tmp_path: Path) -> None:
    with LinkServer(tmp_path) as link_server, RawClient(link_server.socket, window=0) as client:
        for number in range(3):
            refs = [DeviceRef("d", "p" * 253, f"{index:063d}") for index in range(100)]
            link_server.handler.newest.publish(Taints(dict.fromkeys(refs, taints(number + 1).devices[B])))
            client.call(2 * number + 1, f"/{API}/WatchTaints")
            if not number:
                client.next_headers(1)
            with RawClient(link_server.socket) as reader:  # the stream before has got the message, too
                reader.call(path=f"/{API}/WatchTaints")
                reader.next_of(DATA, 1)
        status, text = read_status(client, 1)
        assert status == "8"
        assert "limit 65536; connect again" in text


@pytest.mark.usefixtures("unsent_64_kib")
def test_unread_replies_above_the_limit_end_the_longest_wait(tmp_path: Path) -> None:
    with LinkServer(tmp_path) as link_server, RawClient(link_server.socket, window=0) as client:
        link_server.handler.blocked_uids = {f"{number:04d}" for number in range(64)}
        claims = [claim(uid) for uid in sorted(link_server.handler.blocked_uids)]
        request = message("CheckClaimsRequest", claims=claims).SerializeToString()
        for stream in range(1, 17, 2):
            client.headers(stream, request_headers(f"/{API}/CheckClaims"))
            client.send(frame(DATA, END_STREAM, stream, raw_message(request)))
        status, text = read_status(client, 1)
        assert status == "8"
        assert "limit 65536; connect again" in text


def test_stalled_taint_stream_does_not_keep_old_taints(link_server: LinkServer) -> None:
    class TracedTaints(Taints):
        """Taints whose end can be observed: those of the base class have no weak references."""

    with RawClient(link_server.socket, window=0) as client, RawClient(link_server.socket) as other:
        old = TracedTaints(taints(1).devices)
        is_kept = weakref.ref(old)
        link_server.handler.newest.publish(old)
        for caller in (client, other):
            caller.call(path=f"/{API}/WatchTaints")
        other.next_of(DATA, 1)
        del old
        link_server.handler.newest.publish(taints(2))
        other.next_of(DATA, 1)
        eventually(lambda: is_kept() is None, "the end of the taints")


# --- taints -------------------------------------------------------------------------------------------------

B = DeviceRef("d", "p", "b")


def taints(*added: int) -> Taints:
    """Return taints of two devices; the first has one for each time."""
    key = "test.drahealth.example/gpu.lost"
    taints_of_b = tuple(Taint(key, "", Effect.NO_SCHEDULE, added_s) for added_s in added)
    return Taints({B: taints_of_b, DeviceRef("d", "p", "a"): (), DeviceRef("d", "o", "z"): ()})


def test_watch_taints_sends_current_taints_and_changes(link_server: LinkServer, driver: Driver) -> None:
    with driver.watch() as first, driver.watch() as second:
        first.wait_opened()
        second.wait_opened()
        link_server.handler.newest.publish(taints(1_700_000_000))
        for stream in (first, second):
            received = stream.next().devices
            assert [(device.pool, device.name, len(device.taints)) for device in received] == [
                ("o", "z", 0), ("p", "a", 0), ("p", "b", 1)
            ]  # fmt: skip
            (taint,) = received[2].taints
            assert (taint.key, taint.value) == ("test.drahealth.example/gpu.lost", "")
            assert (taint.effect, taint.time_added_s) == (2, 1_700_000_000)
        link_server.handler.newest.publish(taints())
        assert [len(device.taints) for device in first.next().devices] == [0, 0, 0]
    with driver.watch() as later:
        assert [len(device.taints) for device in later.next().devices] == [0, 0, 0]


def test_too_many_taints_are_reduced_to_the_worst(link_server: LinkServer, driver: Driver) -> None:
    sixteen = tuple(Taint(f"{'d' * 63}/{n:063d}", "v" * 63, Effect.NONE, 1) for n in range(16))
    with driver.watch() as stream:
        for count, remaining in [(384, 16), (385, 8), (4096, 1)]:
            devices = {DeviceRef("d", "p" * 253, f"{n:063d}"): sixteen for n in range(count)}
            link_server.handler.newest.publish(Taints(devices))
            received = stream.next()
            assert len(received.devices) == count
            assert {len(device.taints) for device in received.devices} == {remaining}
            assert [taint.key for taint in received.devices[0].taints] == [
                taint.key for taint in sixteen[:remaining]
            ]
            assert received.ByteSize() < 4 << 20


def test_driver_name_without_valid_key_ends_stream_with_reason(
    link_server: LinkServer, driver: Driver
) -> None:
    link_server.handler.errors["taints"] = ConfigError("a driver of 70 bytes can begin no key")
    with driver.watch() as stream:
        stream.wait_opened()
        with pytest.raises(grpc.RpcError) as raised:
            stream.next()
    assert raised.value.code() is Status.FAILED_PRECONDITION
    assert raised.value.details() == "a driver of 70 bytes can begin no key"


def test_taint_streams_do_not_count_as_health_subscribers(link_server: LinkServer, driver: Driver) -> None:
    link_server.handler.newest.publish(taints())
    reply = message_class("drahealth.v1", "StatusReply")
    with driver.watch() as stream, watch_health(link_server.socket) as kubelet:
        stream.next()
        kubelet.wait_opened()
        with grpc.insecure_channel(f"unix:{link_server.agent}") as channel:
            call = channel.unary_unary("/drahealth.v1.Agent/Status", response_deserializer=reply.FromString)
            streams = {
                subscriber.socket: subscriber.streams
                for subscriber in call(b"", timeout=PATIENCE_S).subscribers
            }
    assert streams == {f"drivers/{link_server.socket.name}": 1, "agent.sock": 0}
