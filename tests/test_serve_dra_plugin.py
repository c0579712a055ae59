"""Prepare and unprepare as a kubelet calls them: Google's gRPC and protobuf, over the unix socket."""

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S
from wire.claims import DriverInstance
from wire.google import message_class
from wire.plugin import (
    DRA,
    Kubelet,
    answer_unfinished_claims_soon,
    claim,
    encode_field,
    refuse_waiting_claims,
    unknown_fields,
)
from wire.serving import eventually

from agent.model.claim import Claim, ClaimDevice, ClaimRef
from agent.prepare.classify import PrepareContext, classify
from agent.prepare.errors import BadConfigError, DriverError, TransientError
from agent.prepare.kubelet_message import kubelet_text, kubelet_texts
from agent.serve.dra_plugin import service
from agent.serve.dra_plugin.prepared_devices import (
    CLAIMS_LIMIT,
    PreparedDevice,
    WireMode,
    validate_claims,
    validate_prepared_devices,
)
from agent.serve.dra_plugin.service import ClaimOperation
from agent.system.threads import worker_threads

PREPARE = f"/{DRA}.v1.DRAPlugin/NodePrepareResources"
UNPREPARE = f"/{DRA}.v1.DRAPlugin/NodeUnprepareResources"

both_versions = pytest.mark.parametrize("version", ["v1", "v1beta1"])


@pytest.fixture
def driver_instance(tmp_path: Path) -> Iterator[DriverInstance]:
    with DriverInstance(tmp_path) as driver_instance:
        yield driver_instance


@pytest.fixture
def kubelet(driver_instance: DriverInstance) -> Iterator[Kubelet]:
    with Kubelet(driver_instance.paths.service) as kubelet:
        yield kubelet


# --- success ------------------------------------------------------------------------------------------------


@both_versions
def test_prepared_claim_has_devices_and_no_error(kubelet: Kubelet, version: str) -> None:
    answer = kubelet.prepare(claim("a"), version=version)["uid-a"]
    (device,) = answer.devices
    assert answer.error == ""
    assert (list(device.request_names), device.pool_name, device.device_name) == (["r"], "pool", "a")
    assert list(device.cdi_device_ids) == ["example.com/gpu=uid-a"]


@both_versions
def test_unprepared_claim_has_no_error(
    driver_instance: DriverInstance, kubelet: Kubelet, version: str
) -> None:
    assert kubelet.unprepare(claim("a"), version=version)["uid-a"].error == ""
    assert driver_instance.claims.calls == [("unprepare", "a")]


def test_share_id_is_sent_in_v1_and_not_in_v1beta1(driver_instance: DriverInstance, kubelet: Kubelet) -> None:
    async def prepare_shared(kind: ClaimOperation, ref: ClaimRef) -> tuple[PreparedDevice, ...]:
        return (
            PreparedDevice(pool="p", device="d", share_id="share-1"),
            PreparedDevice(pool="p", device="e"),
        )

    driver_instance.claims.behaviour["a"] = prepare_shared
    with_share, without = kubelet.prepare(claim("a"))["uid-a"].devices
    assert (with_share.share_id, without.HasField("share_id")) == ("share-1", False)
    for device in kubelet.prepare(claim("a"), version="v1beta1")["uid-a"].devices:
        assert unknown_fields(device) == []


def test_call_without_claims_has_empty_answer(kubelet: Kubelet) -> None:
    assert kubelet.prepare() == {}


def test_every_claim_of_the_request_is_in_the_answer(
    driver_instance: DriverInstance, kubelet: Kubelet
) -> None:
    driver_instance.claims.fail("bad", BadConfigError("no such mode"))
    claims = [claim("good"), claim("bad"), claim("Wrong"), ("ns", "empty", "")]
    assert set(kubelet.prepare(*claims)) == {"uid-good", "uid-bad", "uid-Wrong", ""}
    assert set(kubelet.unprepare(*claims)) == {"uid-good", "uid-bad", "uid-Wrong", ""}


# --- failures -----------------------------------------------------------------------------------------------


def test_every_error_text_names_all_failed_claims(driver_instance: DriverInstance, kubelet: Kubelet) -> None:
    """The kubelet shows any one of them."""
    driver_instance.claims.fail("a", BadConfigError("no such mode"))
    driver_instance.claims.fail("b", TransientError("is busy", code="device.busy"))
    answers = kubelet.prepare(claim("a"), claim("b"), claim("c"))
    assert "class=bad-config code=config.invalid" in answers["uid-a"].error
    assert "ns/b (transient device.busy)" in answers["uid-a"].error
    assert "class=transient code=device.busy" in answers["uid-b"].error
    assert "ns/a (bad-config config.invalid)" in answers["uid-b"].error
    assert answers["uid-c"].error == ""


def test_error_texts_are_independent_of_the_order_of_claims(
    driver_instance: DriverInstance, kubelet: Kubelet
) -> None:
    for name in ("a", "b", "c"):
        driver_instance.claims.fail(name, BadConfigError(f"no mode {name}"))
    names = [claim(name) for name in ("a", "b", "c")]
    first, second = kubelet.prepare(*names), kubelet.prepare(*reversed(names))
    assert {uid: answer.error for uid, answer in first.items()} == {
        uid: answer.error for uid, answer in second.items()
    }


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(WireMode.NONE, []), (WireMode.ERROR_TYPE, [(3, 1)]), (WireMode.PERMANENT_ERROR, [(3, 1)])],
)
def test_error_class_number_is_sent_only_in_its_modes(
    tmp_path: Path, mode: WireMode, expected: list[tuple[int, int]]
) -> None:
    with (
        DriverInstance(tmp_path, wire=mode) as driver_instance,
        Kubelet(driver_instance.paths.service) as kubelet,
    ):
        driver_instance.claims.fail("bad", BadConfigError("no such mode"))
        driver_instance.claims.fail("busy", TransientError("is busy"))
        answers = kubelet.prepare(claim("bad"), claim("busy"), claim("good"))
        assert unknown_fields(answers["uid-bad"]) == expected
        assert unknown_fields(answers["uid-busy"]) == []
        assert unknown_fields(answers["uid-good"]) == []
        assert unknown_fields(kubelet.unprepare(claim("bad"))["uid-bad"]) == []


def test_internal_error_fails_only_its_claim(
    driver_instance: DriverInstance, kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    async def raise_error(kind: ClaimOperation, ref: ClaimRef) -> tuple[PreparedDevice, ...]:
        raise LookupError("not foreseen")

    driver_instance.claims.behaviour["a"] = raise_error
    answers = kubelet.prepare(claim("a"), claim("b"))
    assert "class=unknown" in answers["uid-a"].error
    assert answers["uid-b"].error == ""
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [LookupError]


def test_too_large_answer_becomes_an_error_of_its_claim(
    driver_instance: DriverInstance, kubelet: Kubelet
) -> None:
    async def prepare_many(kind: ClaimOperation, ref: ClaimRef) -> tuple[PreparedDevice, ...]:
        return tuple(PreparedDevice(pool="p" * 1000, device=f"d{n}") for n in range(5000))

    driver_instance.claims.behaviour["a"] = prepare_many
    answers = kubelet.prepare(claim("a"), claim("b"))
    assert "code=driver.bug.answer" in answers["uid-a"].error
    assert "bytes, limit 4128768 for all claims of a call" in answers["uid-a"].error
    assert [device.device_name for device in answers["uid-b"].devices] == ["b"]


@both_versions
@pytest.mark.parametrize("method", ["NodePrepareResources", "NodeUnprepareResources"])
def test_unavailable_handler_answers_unavailable_with_reason(
    driver_instance: DriverInstance, kubelet: Kubelet, version: str, method: str
) -> None:
    driver_instance.claims.unavailable = "the driver's event loop has ended"
    with pytest.raises(grpc.RpcError) as raised:
        kubelet.call_raw(f"/{DRA}.{version}.DRAPlugin/{method}", b"")
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert raised.value.details() == "the driver's event loop has ended"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.text(max_size=90), st.integers(0, 2)), max_size=40))
def test_kubelet_texts_equal_kubelet_text_of_each_verdict(facts: list[tuple[str, str, int]]) -> None:
    """This holds for two claims of one name and different UIDs, too."""
    verdicts = [
        classify(BadConfigError(text, code=f"config.c{kind}"), PrepareContext(Claim("ns", name, f"u{n}"), {}))
        for n, (name, text, kind) in enumerate(facts)
    ]
    assert kubelet_texts(verdicts) == [kubelet_text(verdict, verdicts) for verdict in verdicts]


# --- time ---------------------------------------------------------------------------------------------------


def test_unfinished_claim_has_deadline_error_and_next_call_joins_it(
    driver_instance: DriverInstance, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_unfinished_claims_soon(monkeypatch)
    release = driver_instance.claims.hold("slow")
    answers = kubelet.prepare(claim("quick"), claim("slow"), timeout_s=None)
    assert answers["uid-quick"].error == ""
    assert "class=transient code=deadline" in answers["uid-slow"].error
    second_call = kubelet.prepare_async(claim("slow"))
    assert kubelet.prepare(claim("later"))["uid-later"].error == "", "the second call has arrived before it"
    assert not second_call.done()
    release.set_result(None)
    assert [device.device_name for device in second_call.result().claims["uid-slow"].devices] == ["slow"]
    assert driver_instance.claims.calls.count(("prepare", "slow")) == 1


@pytest.mark.parametrize(("timeout_s", "most_s"), [(None, service.KUBELET_S), (2000.0, 2000.0)])
def test_claims_of_a_call_have_its_deadline_or_the_kubelets(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch, timeout_s: float | None, most_s: float
) -> None:
    found_s: list[float] = []

    def budget_s(stream: object) -> float:
        found_s.append(original(stream))
        return found_s[-1]

    original = service._budget_s
    monkeypatch.setattr(service, "_budget_s", budget_s)
    assert kubelet.prepare(claim("a"), timeout_s=timeout_s)["uid-a"].error == ""
    assert most_s - service.MARGIN_S - PATIENCE_S < found_s[0] <= most_s - service.MARGIN_S


def test_cancelled_call_does_not_end_the_run(driver_instance: DriverInstance, kubelet: Kubelet) -> None:
    release = driver_instance.claims.hold("slow")
    call = kubelet.prepare_async(claim("slow"))
    eventually(lambda: bool(driver_instance.claims.calls), "the run has begun")
    call.cancel()
    second_call = kubelet.prepare_async(claim("slow"))
    assert kubelet.prepare(claim("later"))["uid-later"].error == "", "the second call has arrived before it"
    release.set_result(None)
    assert second_call.result().claims["uid-slow"].error == ""
    assert driver_instance.claims.calls == [("prepare", "slow"), ("prepare", "later")]


def test_claim_is_never_prepared_and_unprepared_concurrently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DriverInstance(tmp_path) as driver_instance, Kubelet(driver_instance.paths.service) as kubelet:
        release = driver_instance.claims.hold("a")
        answer_unfinished_claims_soon(monkeypatch)
        assert "code=deadline" in kubelet.prepare(claim("a"), timeout_s=None)["uid-a"].error
        refuse_waiting_claims(monkeypatch)
        error = kubelet.unprepare(claim("a"))["uid-a"].error
        monkeypatch.undo()
        assert "code=deadline" in error
        assert "the claim's previous prepare is not done yet" in error
        release.set_result(None)
        assert kubelet.unprepare(claim("a"))["uid-a"].error == ""
        assert kubelet.prepare(claim("a"))["uid-a"].error == ""
        assert driver_instance.claims.calls == [("prepare", "a"), ("unprepare", "a"), ("prepare", "a")]
        assert driver_instance.claims.maximum_running == 1


def test_claims_of_a_call_run_concurrently(driver_instance: DriverInstance, kubelet: Kubelet) -> None:
    barrier = asyncio.Barrier(3)

    async def wait_for_others(kind: ClaimOperation, ref: ClaimRef) -> tuple[PreparedDevice, ...]:
        await barrier.wait()
        return ()

    driver_instance.claims.behaviour = dict.fromkeys(("a", "b", "c"), wait_for_others)
    answers = kubelet.prepare(claim("a"), claim("b"), claim("c"))
    assert [answer.error for answer in answers.values()] == ["", "", ""]


def test_shutdown_waits_for_open_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_threads, "SHUTDOWN_S", PATIENCE_S)  # the disk may be slow
    driver_instance = DriverInstance(tmp_path)
    driver_instance.thread.start(PATIENCE_S)
    release = driver_instance.claims.hold("slow")
    with Kubelet(driver_instance.paths.service) as kubelet, ThreadPoolExecutor() as pool:
        call = kubelet.prepare_async(claim("slow"))
        eventually(lambda: bool(driver_instance.claims.calls), "the run has begun")
        driver_instance.plugin.drain_s = 2 * PATIENCE_S
        stopping = pool.submit(driver_instance.thread.stop, 3 * PATIENCE_S)
        refusals: list[grpc.RpcError] = []

        def is_refused() -> bool:
            try:
                kubelet.prepare(claim("late"))  # accepted until the registration socket is removed
            except grpc.RpcError as error:
                refusals.append(error)
            return bool(refusals)

        eventually(is_refused, "calls are refused")
        assert not driver_instance.paths.registration.exists()
        assert (refusals[0].code(), refusals[0].details()) == (
            grpc.StatusCode.UNAVAILABLE,
            "driver shutting down",
        )
        assert driver_instance.paths.service.exists()
        release.set_result(None)
        assert call.result().claims["uid-slow"].error == ""
        assert stopping.result()
    assert not driver_instance.paths.service.exists()


def test_interrupted_shutdown_leaves_no_socket(tmp_path: Path) -> None:
    driver_instance = DriverInstance(tmp_path)
    driver_instance.thread.start(PATIENCE_S)
    release = driver_instance.claims.hold("slow")
    with Kubelet(driver_instance.paths.service) as kubelet:
        call = kubelet.prepare_async(claim("slow"))
        eventually(lambda: bool(driver_instance.claims.calls), "the run has begun")
        driver_instance.plugin.drain_s = 30
        assert not driver_instance.thread.stop(timeout_s=0)
        eventually(lambda: not driver_instance.paths.registration.exists(), "the shutdown has begun")
        assert driver_instance.thread.stop(PATIENCE_S)
        assert call.exception() is not None
    release.set_result(None)
    eventually(lambda: not driver_instance.paths.service.exists(), "the socket is removed")


def test_hanging_call_does_not_delay_shutdown(tmp_path: Path) -> None:
    driver_instance = DriverInstance(tmp_path)
    driver_instance.thread.start(PATIENCE_S)
    release = driver_instance.claims.hold("slow")
    with Kubelet(driver_instance.paths.service) as kubelet:
        call = kubelet.prepare_async(claim("slow"))
        eventually(lambda: bool(driver_instance.claims.calls), "the run has begun")
        assert driver_instance.thread.stop(PATIENCE_S)
        assert call.exception().code() is grpc.StatusCode.UNAVAILABLE
    release.set_result(None)


# --- request checks -----------------------------------------------------------------------------------------

LONG = "a" * 64

WRONG = [
    (("ns", "c", ""), "request.uid", "uid: is empty"),
    (("ns", "c", LONG), "request.uid", "uid: 64 bytes, limit 63"),
    (("ns", "c", "../../etc"), "request.uid", "uid: '../../etc' is not letters"),
    (("ns", "c", "a/b"), "request.uid", "uid: 'a/b' is not letters"),
    (("ns", "c", "a\x00b"), "request.uid", r"uid: 'a\x00b' is not letters"),
    (("ns", "c", "a\n"), "request.uid", r"uid: 'a\n' is not letters"),
    (("ns", "c", ".."), "request.uid", "uid: '..' is not letters"),
    (("", "c", "u"), "request.namespace", "namespace: is empty"),
    ((LONG, "c", "u"), "request.namespace", "namespace: 64 bytes, limit 63"),
    (("a.b", "c", "u"), "request.namespace", "namespace: 'a.b' is not a DNS label"),
    (("ns", "", "u"), "request.name", "name: is empty"),
    (("ns", "a" * 254, "u"), "request.name", "name: 254 bytes, limit 253"),
    (("ns", "A", "u"), "request.name", "name: 'A' is not a DNS subdomain"),
    (("ns", "a..b", "u"), "request.name", "name: 'a..b' is not a DNS subdomain"),
]


@pytest.mark.parametrize(("ref", "code", "text"), WRONG, ids=[text for _, _, text in WRONG])
def test_invalid_field_is_named_in_error_of_its_claim(
    driver_instance: DriverInstance, kubelet: Kubelet, ref: tuple[str, str, str], code: str, text: str
) -> None:
    for call in (kubelet.prepare, kubelet.unprepare):
        answers = call(claim("good"), ref)
        assert answers["uid-good"].error == ""
        assert f"code={code} " in answers[ref[2]].error
        assert text in answers[ref[2]].error
    assert {name for _, name in driver_instance.claims.calls} == {"good"}


def test_uid_with_two_names_is_refused_with_both_names(
    driver_instance: DriverInstance, kubelet: Kubelet
) -> None:
    answers = kubelet.prepare(claim("a", uid="u"), claim("b", uid="u"), claim("c"))
    assert "uid: 'u' is the uid of both 'ns/a' and 'ns/b'" in answers["u"].error
    assert driver_instance.claims.calls == [("prepare", "c")]


def test_duplicate_claim_is_prepared_once(driver_instance: DriverInstance, kubelet: Kubelet) -> None:
    assert kubelet.prepare(claim("a"), claim("a"))["uid-a"].error == ""
    assert driver_instance.claims.calls == [("prepare", "a")]


def test_too_many_claims_are_all_refused_with_the_numbers(
    driver_instance: DriverInstance, kubelet: Kubelet
) -> None:
    answers = kubelet.prepare(*(claim(f"c{n}") for n in range(1500)))
    assert len(answers) == 1500
    assert all("claims: 1500 in one call, limit 1024" in answer.error for answer in answers.values())
    assert driver_instance.claims.calls == []


def test_maximum_of_claims_with_longest_names_is_prepared(
    driver_instance: DriverInstance, kubelet: Kubelet
) -> None:
    name = ".".join(["a" * 62] * 4)
    claims = [("n" * 63, f"{n:04d}{name[:249]}", f"{n:063d}") for n in range(CLAIMS_LIMIT)]
    assert {answer.error for answer in kubelet.prepare(*claims).values()} == {""}
    assert len(driver_instance.claims.calls) == CLAIMS_LIMIT


def test_too_large_request_is_refused_unread(driver_instance: DriverInstance, kubelet: Kubelet) -> None:
    for data, text in [
        (
            encode_field(1, b"") * 5000,
            "NodePrepareResourcesRequest.claims: more than 4096 entries; send fewer",
        ),
        (bytes(600 << 10), "message is 614400 bytes, limit 524288; refused unread"),
    ]:
        with pytest.raises(grpc.RpcError) as raised:
            kubelet.call_raw(PREPARE, data)
        assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, text)
    assert kubelet.prepare(claim("a"))["uid-a"].error == ""


@pytest.mark.parametrize("path", [PREPARE, UNPREPARE])
@pytest.mark.parametrize(
    ("field", "text"),
    [
        (b"\x12\x05ab", "Request.claims.uid: ends 3 bytes after the end of the message"),
        (b"\x12\x02\xc3\x28", "Request.claims.uid: not UTF-8 at byte 0 of 2"),
        (b"\x10\x05", "Request.claims.uid: wire type is 0, must be 2"),
        (
            b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            "Request.claims.name: varint is longer than 5 bytes",
        ),
        (b"\x13", "Request.claims.uid: wire type 3 is not valid"),
    ],
)
def test_invalid_request_is_refused_with_place(
    driver_instance: DriverInstance, kubelet: Kubelet, path: str, field: bytes, text: str
) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        kubelet.call_raw(path, encode_field(1, field))
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    assert text in (raised.value.details() or "")
    assert driver_instance.claims.calls == []


def test_unknown_fields_of_a_newer_kubelet_are_ignored(
    driver_instance: DriverInstance, kubelet: Kubelet
) -> None:
    newer = (
        encode_field(
            1,
            encode_field(1, b"ns") + encode_field(2, b"u") + encode_field(3, b"c") + encode_field(9, b"new"),
        )
        + b"\x78\x05"
    )
    answer = message_class(f"{DRA}.v1", "NodePrepareResourcesResponse").FromString(
        kubelet.call_raw(PREPARE, newer)
    )
    assert answer.claims["u"].error == ""
    assert driver_instance.claims.calls == [("prepare", "c")]


@given(st.lists(st.tuples(st.text(max_size=70), st.text(max_size=260), st.text(max_size=70)), max_size=8))
def test_check_claims_returns_every_uid_once(refs: list[tuple[str, str, str]]) -> None:
    claims = validate_claims(ClaimRef(*ref) for ref in refs)
    uids = [ref.uid for ref in claims.claims] + [ref.uid for ref, _ in claims.refused]
    assert sorted(uids) == sorted({uid for _, _, uid in refs})
    for ref in claims.claims:
        assert not {"/", "\\", "\0", "\n"} & set("".join(ref))
        assert Path("/x", ref.uid).parent == Path("/x")
    assert all(text.partition(":")[0] in {"uid", "name", "namespace", "claims"} for _, text in claims.refused)


# --- checks of the driver's answer --------------------------------------------------------------------------

CLAIM = Claim(
    "ns",
    "c",
    "u",
    devices=(
        ClaimDevice("gpu/big", "d", "pool", "gpu-0"),
        ClaimDevice("net", "d", "pool", "nic-0", "share-1"),
    ),
)


def prepared_device(**changes: object) -> PreparedDevice:
    device = PreparedDevice(pool="pool", device="gpu-0", cdi_ids=("example.com/gpu=a",))
    return replace(device, **changes)  # type: ignore[arg-type]


def test_valid_answer_is_returned_unchanged() -> None:
    answer = [
        prepared_device(requests=("gpu",)),
        prepared_device(device="nic-0", cdi_ids=(), share_id="share-1"),
    ]
    assert validate_prepared_devices(CLAIM, answer) == tuple(answer)
    assert validate_prepared_devices(CLAIM, ()) == ()


def test_request_is_returned_without_its_alternative() -> None:
    """Containers name the request: they do not know the chosen alternative."""
    answer = [prepared_device(requests=("gpu/big",)), prepared_device(requests=("gpu/big", "gpu"))]
    assert [answer.requests for answer in validate_prepared_devices(CLAIM, answer)] == [("gpu",), ("gpu",)]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, "prepare returned NoneType, not a sequence of PreparedDevice"),
        ("gpu-0", "prepare returned str, not a sequence"),
        ({prepared_device()}, "prepare returned set, not a sequence"),
        ([("r", "pool", "gpu-0")], "prepare returned tuple among the devices"),
        ([prepared_device(device="gpu-1")], "pool/gpu-1: is not a device of the claim"),
        ([prepared_device(pool="other")], "other/gpu-0: is not a device of the claim"),
        ([prepared_device(requests=("",))], "pool/gpu-0: requests: contains an empty name"),
        ([prepared_device(requests=("net",))], "pool/gpu-0: requests: the device is not allocated to 'net'"),
        ([prepared_device(requests=("gpu/small",))], "requests: the device is not allocated to 'gpu/small'"),
        ([prepared_device(requests="gpu")], "pool/gpu-0: requests: 'gpu' is not a tuple of strings"),
        ([prepared_device(cdi_ids=(1,))], "pool/gpu-0: cdi_ids: (1,) is not a tuple of strings"),
        (
            [prepared_device(cdi_ids=("example.com/gpu",))],
            "cdi_ids: 'example.com/gpu' is not <vendor>/<class>=<name>",
        ),
        (
            [prepared_device(cdi_ids=("example.com=a",))],
            "cdi_ids: 'example.com=a' is not <vendor>/<class>=<name>",
        ),
        ([prepared_device(cdi_ids=("1a/gpu=a",))], "cdi_ids: '1a/gpu=a' is not"),
        ([prepared_device(cdi_ids=("a/gpu=a\n",))], r"cdi_ids: 'a/gpu=a\n' is not"),
        ([prepared_device(share_id="share-2", device="nic-0")], "share_id: the claim has no share 'share-2'"),
        ([prepared_device(share_id=7)], "pool/gpu-0: share_id: 7 is not a string"),
        ([prepared_device(pool=b"pool")], "pool: b'pool' is not a string"),
    ],
)
def test_invalid_answer_error_names_device_and_field(answer: object, text: str) -> None:
    with pytest.raises(DriverError) as raised:
        validate_prepared_devices(CLAIM, answer)
    assert raised.value.code == "driver.bug.answer"
    assert text in str(raised.value)


def test_two_devices_with_one_cdi_id_are_accepted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    answer = [prepared_device(), prepared_device(device="nic-0")]
    assert validate_prepared_devices(CLAIM, answer) == tuple(answer)
    (record,) = caplog.records
    text = "devices pool/gpu-0 and pool/nic-0 have the same first CDI id example.com/gpu=a"
    assert text in record.getMessage()
