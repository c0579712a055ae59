"""What a driver tells the agent over its socket, and asks it: Google's gRPC and protobuf at the other end."""

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from patience import PATIENCE_S
from wire.google import described, message_class, watch_health
from wire.link import API, Driver, Serving, claim, message
from wire.serving import eventually

from agent.errors import Busy, ConfigError, PermissionDenied
from agent.model.claim import DeviceRef
from agent.model.taint import Effect, Taint, Taints
from agent.serve.driver_link.service import ASKING, DriverLinkService, NoRoom
from agent.serve.grpc.gen.driver_link.drahealth import v1
from agent.store.files import WriteError
from agent.system.threads.worker_pool import WAITING_MAX

COMES_S = 2.0
"""Nobody answers a call of this deadline, but it has come by then, on a busy machine too."""
CONTRACT = Path(__file__).parent / "wire" / "driver_link_contract.txt"

Status = grpc.StatusCode


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path) as serving:
        yield serving


@pytest.fixture
def driver(serving: Serving) -> Iterator[Driver]:
    with Driver(serving.socket) as driver:
        yield driver


def refusal(driver: Driver, method: str, **fields: Any) -> tuple[Status, str]:
    """How a call is refused."""
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
    """Everything that the other side may rely on, a line each."""
    file = described()[API]
    lines = set()
    for one in file.message_types_by_name.values():
        for field in one.fields:
            kind = field.message_type or field.enum_type
            words = [TYPES[field.type] if kind is None else kind.name]
            words += ["repeated"] if field.is_repeated else ["optional"] if field.has_presence else []
            of = field.containing_oneof
            words += [f"in {of.name}"] if of is not None and not of.name.startswith("_") else []
            lines.add(f"{one.name}.{field.name} = {field.number} {' '.join(words)}")
        lines.add(f"message {one.name}")
    for enum in file.enum_types_by_name.values():
        lines |= {f"{enum.name} {value.name} = {value.number}" for value in enum.values}
    for method in file.services_by_name["DriverLink"].methods:
        streams = "stream " if method.server_streaming else ""
        lines.add(f"rpc {method.name} {method.input_type.name} to {streams}{method.output_type.name}")
    return lines


def test_nothing_that_was_promised_is_gone_renumbered_or_renamed() -> None:
    assert sorted(set(CONTRACT.read_text().splitlines()) - contract()) == []


def test_what_is_promised_is_written_down() -> None:
    assert sorted(contract() - set(CONTRACT.read_text().splitlines())) == []


def test_the_methods_are_those_of_the_generated_server() -> None:
    generated = v1.DriverLinkBase().__mapping__()
    ours = DriverLinkService("d", lambda: pytest.fail("nobody calls")).__mapping__()
    assert {path: one.cardinality for path, one in ours.items()} == {
        path: one.cardinality for path, one in generated.items()
    }


# --- who pays -----------------------------------------------------------------------------------------------


def test_an_agent_that_no_driver_calls_imports_nothing_for_it() -> None:
    program = (
        "import sys, agent.serve.servers\n"
        "print([one for one in sys.modules if one.startswith('agent.prepare') or 'gen.driver_link' in one])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_link_is_opened_in_a_thread_when_the_driver_first_calls_and_once(serving: Serving) -> None:
    eventually(lambda: not link_threads(), "nobody has called, and those of other servers have ended")
    assert serving.opened == []
    with Driver(serving.socket) as driver, Driver(serving.socket) as other:
        calls = [one.soon("CheckClaims") for one in (driver, other) for _ in range(8)]
        for call in calls:
            assert list(call.result().answers) == []
    assert serving.opened == ["test.drahealth.example in dh-link-"]
    assert 0 < len(link_threads()) <= ASKING


def link_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("dh-link-")]


def test_a_link_that_cannot_be_opened_is_tried_again_by_the_next_call(
    serving: Serving, driver: Driver
) -> None:
    serving.open_fails = [ConfigError("a driver of 70 bytes can begin no key"), OSError(5, "I/O error", "/d")]
    assert refusal(driver, "CheckClaims") == (Status.UNAVAILABLE, "/d: I/O error")
    assert refusal(driver, "CheckClaims") == (
        Status.FAILED_PRECONDITION,
        "a driver of 70 bytes can begin no key",
    )
    assert list(driver.call("CheckClaims").answers) == []


# --- what goes right ----------------------------------------------------------------------------------------


def test_what_is_known_against_claims_is_answered_in_their_order(serving: Serving, driver: Driver) -> None:
    serving.link.against = {"b", "c"}
    answers = driver.call("CheckClaims", claims=[claim("c"), claim("a"), claim("b")]).answers
    assert [(one.uid, one.HasField("verdict")) for one in answers] == [("c", True), ("a", False), ("b", True)]
    assert answers[0].verdict.code == "config.invalid"
    assert "Other failing claims in this call: ns/b (bad-config config.invalid)." in answers[0].verdict.text
    assert "ns/c (bad-config" in answers[2].verdict.text


def test_how_prepares_ended_is_told_with_what_each_failed_of(serving: Serving, driver: Driver) -> None:
    lost = message("Evidence", nvml=message("NvmlReturn", code=15, device="gpu-0"))
    outcomes = [
        message("PrepareOutcome", claim=claim("a", "gpu-0"), failed=True, evidence=[lost]),
        message("PrepareOutcome", claim=claim("b", "gpu-1")),
        message("PrepareOutcome", claim=claim("c"), failed=True),
    ]
    answers = driver.call("ReportPrepare", step=1, outcomes=outcomes).answers
    assert [one.HasField("verdict") for one in answers] == [True, False, True]
    broken = answers[0].verdict
    assert (broken.error_class, broken.code) == (3, "gpu.lost")
    assert [(one.driver, one.pool, one.device) for one in broken.devices] == [
        ("test.drahealth.example", "p", "gpu-0")
    ]
    assert (broken.count, broken.first_s) == (0, 0.0), "nobody remembers it"
    ((method, ended),) = serving.link.asked
    assert method == "prepared"
    assert [one.evidence if one.evidence is None else len(one.evidence) for one in ended] == [1, None, 0]
    driver.call("ReportPrepare", step=2, outcomes=outcomes[1:2])
    assert serving.link.asked[-1] == ("unprepared", [ended[1]])


def test_4096_devices_are_declared_at_once_beside_the_loop(serving: Serving, driver: Driver) -> None:
    release = serving.link.hold("sync")
    with watch_health(serving.socket) as kubelet:
        kubelet.opened()
        call = driver.soon("SyncDevices", devices=[cpus(number) for number in range(4096)])
        eventually(lambda: len(serving.link.asked) == 1, "they are decoded")
        serving.publish(2)
        assert kubelet.next().devices[0].last_updated_time == 1_700_000_002
        assert not call.done()
        release.set()
        assert call.result() == message("SyncDevicesReply", devices=4096, judged=True)
    assert all(name.startswith("dh-link-") for name in serving.link.threads)


def test_a_request_of_the_longest_names_fits(serving: Serving, driver: Driver) -> None:
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


# --- who waits for whom -------------------------------------------------------------------------------------


def test_a_disk_that_hangs_under_a_declaration_delays_no_question_and_no_report(
    serving: Serving, driver: Driver
) -> None:
    release = serving.link.hold("sync")
    declared = driver.soon("SyncDevices")
    eventually(lambda: serving.link.asked == [("sync", [])], "it hangs")
    assert len(driver.call("CheckClaims", claims=[claim("a")]).answers) == 1
    assert driver.call("Classify", evidence=[message("Evidence", text="busy")]).verdict.code
    assert len(driver.call("ReportPrepare", step=1).answers) == 0
    assert not declared.done()
    release.set()
    assert declared.result().judged


def test_reports_are_taken_in_their_order_whether_or_not_anybody_waits(
    serving: Serving, driver: Driver
) -> None:
    release = serving.link.hold("prepared")
    calls = [driver.soon("ReportPrepare", step=1)]
    eventually(lambda: len(serving.link.asked) == 1, "the first is taken, and hangs")
    for uid in ("a", "b"):
        outcome = message("PrepareOutcome", claim=claim(uid))
        with pytest.raises(grpc.RpcError) as raised:
            driver.soon("ReportPrepare", timeout_s=COMES_S, step=1, outcomes=[outcome]).result()
        assert raised.value.code() is Status.DEADLINE_EXCEEDED
    calls[0].cancel()
    release.set()
    driver.call("ReportPrepare", step=2)
    uids = [[one.claim.uid for one in ended] for _, ended in serving.link.asked]
    assert uids == [[], ["a"], ["b"], []]


def test_who_leaves_while_it_waits_frees_its_place(serving: Serving, driver: Driver) -> None:
    release = serving.link.hold("sync")
    first = driver.soon("SyncDevices")
    eventually(lambda: len(serving.link.asked) == 1, "it hangs")
    waiting = [driver.soon("SyncDevices") for _ in range(WAITING_MAX)]
    eventually(
        lambda: ended(driver.soon("SyncDevices", timeout_s=COMES_S)) is Status.RESOURCE_EXHAUSTED,
        "all places are taken",
    )
    assert refusal(driver, "SyncDevices")[1] == "64 calls wait already, limit 64"
    for call in waiting:
        call.cancel()
    eventually(
        lambda: ended(driver.soon("SyncDevices", timeout_s=COMES_S)) is Status.DEADLINE_EXCEEDED,
        "one is free",
    )
    release.set()
    assert first.result().judged
    assert driver.call("SyncDevices", devices=[cpus(7)]).devices == 1


def ended(call: Any) -> Status:
    """With which status."""
    with pytest.raises(grpc.RpcError) as raised:
        call.result()
    return raised.value.code()


def test_the_end_waits_for_reports_that_have_come_but_for_no_disk(tmp_path: Path) -> None:
    with ExitStack() as stack:
        serving = stack.enter_context(Serving(tmp_path))
        driver = stack.enter_context(Driver(serving.socket))
        release = serving.link.hold("sync")
        declared = driver.soon("SyncDevices")
        eventually(lambda: len(serving.link.asked) == 1, "it hangs")
        driver.call("ReportPrepare", step=1)
        assert serving.thread.stop(PATIENCE_S), "it ends although a call hangs"
        with pytest.raises(grpc.RpcError) as raised:
            declared.result()
        assert raised.value.code() is Status.UNAVAILABLE
        assert raised.value.details() == "agent shutting down"
        release.set()
    eventually(lambda: not link_threads(), "all threads end")


# --- what goes wrong ----------------------------------------------------------------------------------------

FAILURES = [
    (ConfigError("device 'a': numa: 5000"), Status.INVALID_ARGUMENT, "device 'a': numa: 5000"),
    (Busy("/d/x.toml: not ours"), Status.FAILED_PRECONDITION, "/d/x.toml: not ours"),
    (NoRoom("2 devices and 4095 of other drivers"),
     Status.RESOURCE_EXHAUSTED, "2 devices and 4095 of other drivers"),
    (
        WriteError(Path("/d/x"), 7, 28, "No space left on device"),
        Status.RESOURCE_EXHAUSTED,
        "/d/x: 7 bytes could not be kept: No space left on device",
    ),
    (OSError(28, "No space left on device", "/d/x"),
     Status.RESOURCE_EXHAUSTED, "/d/x: No space left on device"),
    (OSError(5, "Input/output error", "/d/x"), Status.UNAVAILABLE, "/d/x: Input/output error"),
    (PermissionDenied("/d: may not write"), Status.UNAVAILABLE, "/d: may not write"),
    (LookupError("secret"), Status.INTERNAL, "LookupError; the agent's log has more"),
    (SystemExit(3), Status.INTERNAL, "SystemExit; the agent's log has more"),
    (ConfigError("ä" * 5000), Status.INVALID_ARGUMENT, "ä" * 510 + "..."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "status", "words"), FAILURES, ids=[str(type(one[0]).__name__) for one in FAILURES]
)
def test_whatever_fails_is_told_in_the_statuses_words_and_nothing_ends(
    serving: Serving, driver: Driver, error: BaseException, status: Status, words: str
) -> None:
    serving.link.fails["sync"] = error
    assert refusal(driver, "SyncDevices") == (status, words)
    assert list(driver.call("CheckClaims").answers) == []


def test_a_mistake_of_ours_is_in_the_log_once(
    serving: Serving, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    serving.link.fails["sync"] = serving.link.fails["check"] = LookupError("not foreseen")
    with caplog.at_level(logging.ERROR, logger="agent.serve.driver_link.service"):
        for method in ("SyncDevices", "CheckClaims", "SyncDevices"):
            assert refusal(driver, method)[0] is Status.INTERNAL
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [LookupError]


def test_a_request_above_the_limit_is_refused_unread(driver: Driver) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        driver.raw("CheckClaims", bytes(600 << 10))
    assert raised.value.code() is Status.RESOURCE_EXHAUSTED
    assert raised.value.details() == "message is 614400 bytes, limit 524288; refused unread"


def test_a_method_of_a_later_version_is_unimplemented(driver: Driver) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        driver.raw("PredictTheFuture", b"")
    assert raised.value.code() is Status.UNIMPLEMENTED


# --- taints -------------------------------------------------------------------------------------------------


def taints(*added: int) -> Taints:
    """Of two devices; the first has one for each time."""
    key = "test.drahealth.example/gpu.lost"
    sick = tuple(Taint(key, "", Effect.NO_SCHEDULE, one) for one in added)
    return Taints(
        {DeviceRef("d", "p", "b"): sick, DeviceRef("d", "p", "a"): (), DeviceRef("d", "o", "z"): ()}
    )


def test_taints_come_as_they_are_and_then_as_they_change(serving: Serving, driver: Driver) -> None:
    with driver.watch() as first, driver.watch() as second:
        first.opened()
        second.opened()
        serving.link.newest.publish(taints(1_700_000_000))
        for stream in (first, second):
            told = stream.next().devices
            assert [(one.pool, one.name, len(one.taints)) for one in told] == [
                ("o", "z", 0), ("p", "a", 0), ("p", "b", 1)
            ]  # fmt: skip
            (taint,) = told[2].taints
            assert (taint.key, taint.value) == ("test.drahealth.example/gpu.lost", "")
            assert (taint.effect, taint.time_added_s) == (2, 1_700_000_000)
        serving.link.newest.publish(taints())
        assert [len(one.taints) for one in first.next().devices] == [0, 0, 0]
    with driver.watch() as later:
        assert [len(one.taints) for one in later.next().devices] == [0, 0, 0]


def test_taints_that_nobody_could_read_in_one_message_lose_their_mildest(
    serving: Serving, driver: Driver
) -> None:
    sixteen = tuple(Taint(f"{'d' * 63}/{n:063d}", "v" * 63, Effect.NONE, 1) for n in range(16))
    with driver.watch() as stream:
        for count, left in [(384, 16), (385, 8), (4096, 1)]:
            devices = {DeviceRef("d", "p" * 253, f"{n:063d}"): sixteen for n in range(count)}
            serving.link.newest.publish(Taints(devices))
            told = stream.next()
            assert len(told.devices) == count
            assert {len(device.taints) for device in told.devices} == {left}
            assert [one.key for one in told.devices[0].taints] == [one.key for one in sixteen[:left]]
            assert told.ByteSize() < 4 << 20


def test_a_name_that_can_begin_no_key_ends_the_stream_with_the_reason(
    serving: Serving, driver: Driver
) -> None:
    serving.link.fails["taints"] = ConfigError("a driver of 70 bytes can begin no key")
    with driver.watch() as stream:
        stream.opened()
        with pytest.raises(grpc.RpcError) as raised:
            stream.next()
    assert raised.value.code() is Status.FAILED_PRECONDITION
    assert raised.value.details() == "a driver of 70 bytes can begin no key"


def test_streams_of_taints_are_no_subscribers_of_health(serving: Serving, driver: Driver) -> None:
    serving.link.newest.publish(taints())
    reply = message_class("drahealth.v1", "StatusReply")
    with driver.watch() as stream, watch_health(serving.socket) as kubelet:
        stream.next()
        kubelet.opened()
        with grpc.insecure_channel(f"unix:{serving.agent}") as channel:
            ask = channel.unary_unary("/drahealth.v1.Agent/Status", response_deserializer=reply.FromString)
            streams = {one.socket: one.streams for one in ask(b"", timeout=PATIENCE_S).subscribers}
    assert streams == {f"drivers/{serving.socket.name}": 1, "agent.sock": 0}
