"""Prepare and unprepare as a kubelet calls them: Google's gRPC and protobuf, over the unix socket."""

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S
from wire.claims import Serving
from wire.google import message_class
from wire.plugin import DRA, SHORT_S, Kubelet, claim, encoded, unknown_fields
from wire.serving import eventually

from agent.model.claim import Claim, ClaimDevice, ClaimRef
from agent.prepare.classify import Context, classify
from agent.prepare.errors import BadConfig, DriverError, TransientError
from agent.prepare.message import text, texts
from agent.prepare.wire import WireMode
from agent.serve.dra_plugin.in_flight import Kind
from agent.serve.dra_plugin.request_checks import CLAIMS_LIMIT, check_claims
from agent.serve.dra_plugin.result import PreparedDevice, check_prepared

PREPARE = f"/{DRA}.v1.DRAPlugin/NodePrepareResources"
UNPREPARE = f"/{DRA}.v1.DRAPlugin/NodeUnprepareResources"

both_versions = pytest.mark.parametrize("version", ["v1", "v1beta1"])


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path) as serving:
        yield serving


@pytest.fixture
def kubelet(serving: Serving) -> Iterator[Kubelet]:
    with Kubelet(serving.paths.service) as kubelet:
        yield kubelet


# --- what goes right ----------------------------------------------------------------------------------------


@both_versions
def test_a_prepared_claim_has_its_devices_and_no_error(kubelet: Kubelet, version: str) -> None:
    answer = kubelet.prepare(claim("a"), version=version)["uid-a"]
    (device,) = answer.devices
    assert answer.error == ""
    assert (list(device.request_names), device.pool_name, device.device_name) == (["r"], "pool", "a")
    assert list(device.cdi_device_ids) == ["example.com/gpu=uid-a"]


@both_versions
def test_an_unprepared_claim_has_no_error(serving: Serving, kubelet: Kubelet, version: str) -> None:
    assert kubelet.unprepare(claim("a"), version=version)["uid-a"].error == ""
    assert serving.claims.asked == [("unprepare", "a")]


def test_the_share_of_a_device_is_told_in_v1_and_unknown_to_v1beta1(
    serving: Serving, kubelet: Kubelet
) -> None:
    async def shared(kind: Kind, ref: ClaimRef) -> tuple[PreparedDevice, ...]:
        return (PreparedDevice((), "p", "d", (), "share-1"), PreparedDevice((), "p", "e"))

    serving.claims.behaviour["a"] = shared
    with_share, without = kubelet.prepare(claim("a"))["uid-a"].devices
    assert (with_share.share_id, without.HasField("share_id")) == ("share-1", False)
    for device in kubelet.prepare(claim("a"), version="v1beta1")["uid-a"].devices:
        assert unknown_fields(device) == []


def test_a_call_for_no_claims_is_answered_with_none(kubelet: Kubelet) -> None:
    assert kubelet.prepare() == {}


def test_every_claim_that_was_asked_for_is_in_the_answer(serving: Serving, kubelet: Kubelet) -> None:
    serving.claims.fail("bad", BadConfig("no such mode"))
    asked = [claim("good"), claim("bad"), claim("Wrong"), ("ns", "empty", "")]
    assert set(kubelet.prepare(*asked)) == {"uid-good", "uid-bad", "uid-Wrong", ""}
    assert set(kubelet.unprepare(*asked)) == {"uid-good", "uid-bad", "uid-Wrong", ""}


# --- what goes wrong ----------------------------------------------------------------------------------------


def test_every_text_names_all_that_failed(serving: Serving, kubelet: Kubelet) -> None:
    """The kubelet shows one of them, and nobody knows which."""
    serving.claims.fail("a", BadConfig("no such mode"))
    serving.claims.fail("b", TransientError("is busy", code="device.busy"))
    answers = kubelet.prepare(claim("a"), claim("b"), claim("c"))
    assert "class=bad-config code=config.invalid" in answers["uid-a"].error
    assert "ns/b (transient device.busy)" in answers["uid-a"].error
    assert "class=transient code=device.busy" in answers["uid-b"].error
    assert "ns/a (bad-config config.invalid)" in answers["uid-b"].error
    assert answers["uid-c"].error == ""


def test_the_same_facts_give_the_same_bytes_whatever_the_order(serving: Serving, kubelet: Kubelet) -> None:
    for name in ("a", "b", "c"):
        serving.claims.fail(name, BadConfig(f"no mode {name}"))
    names = [claim(name) for name in ("a", "b", "c")]
    first, second = kubelet.prepare(*names), kubelet.prepare(*reversed(names))
    assert {uid: one.error for uid, one in first.items()} == {uid: one.error for uid, one in second.items()}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(WireMode.NONE, []), (WireMode.ERROR_TYPE, [(3, 1)]), (WireMode.PERMANENT_ERROR, [(3, 1)])],
)
def test_the_class_goes_out_as_a_number_only_if_the_mode_says_so(
    tmp_path: Path, mode: WireMode, expected: list[tuple[int, int]]
) -> None:
    with Serving(tmp_path, wire=mode) as serving, Kubelet(serving.paths.service) as kubelet:
        serving.claims.fail("bad", BadConfig("no such mode"))
        serving.claims.fail("busy", TransientError("is busy"))
        answers = kubelet.prepare(claim("bad"), claim("busy"), claim("good"))
        assert unknown_fields(answers["uid-bad"]) == expected
        assert unknown_fields(answers["uid-busy"]) == []
        assert unknown_fields(answers["uid-good"]) == []
        assert unknown_fields(kubelet.unprepare(claim("bad"))["uid-bad"]) == []


def test_a_mistake_of_ours_is_that_claims_alone(
    serving: Serving, kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    async def stumble(kind: Kind, ref: ClaimRef) -> tuple[PreparedDevice, ...]:
        raise LookupError("not foreseen")

    serving.claims.behaviour["a"] = stumble
    answers = kubelet.prepare(claim("a"), claim("b"))
    assert "class=unknown" in answers["uid-a"].error
    assert answers["uid-b"].error == ""
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [LookupError]


def test_an_answer_that_no_kubelet_could_read_is_an_error_that_it_can(
    serving: Serving, kubelet: Kubelet
) -> None:
    async def endless(kind: Kind, ref: ClaimRef) -> tuple[PreparedDevice, ...]:
        return tuple(PreparedDevice((), "p" * 1000, f"d{n}") for n in range(5000))

    serving.claims.behaviour["a"] = endless
    answers = kubelet.prepare(claim("a"), claim("b"))
    assert "code=driver.bug.answer" in answers["uid-a"].error
    assert "bytes, and all of a call 4128768 at most" in answers["uid-a"].error
    assert [device.device_name for device in answers["uid-b"].devices] == ["b"]


@both_versions
@pytest.mark.parametrize("method", ["NodePrepareResources", "NodeUnprepareResources"])
def test_who_cannot_take_calls_is_unavailable_and_says_why(
    serving: Serving, kubelet: Kubelet, version: str, method: str
) -> None:
    serving.claims.refuses = "the driver's event loop has ended"
    with pytest.raises(grpc.RpcError) as raised:
        kubelet.raw(f"/{DRA}.{version}.DRAPlugin/{method}", b"")
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert raised.value.details() == "the driver's event loop has ended"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.text(max_size=90), st.integers(0, 2)), max_size=40))
def test_all_texts_of_a_call_are_those_that_each_would_be(facts: list[tuple[str, str, int]]) -> None:
    """Two claims of one name and different uids included."""
    verdicts = [
        classify(BadConfig(words, code=f"config.c{kind}"), Context(Claim("ns", name, f"u{n}"), {}))
        for n, (name, words, kind) in enumerate(facts)
    ]
    assert texts(verdicts) == [text(verdict, verdicts) for verdict in verdicts]


# --- time ---------------------------------------------------------------------------------------------------


def test_what_is_not_done_in_time_is_told_and_the_next_call_joins_it(
    serving: Serving, kubelet: Kubelet
) -> None:
    release = serving.claims.hold("slow")
    answers = kubelet.prepare(claim("quick"), claim("slow"), timeout_s=SHORT_S)
    assert answers["uid-quick"].error == ""
    assert "class=transient code=deadline" in answers["uid-slow"].error
    again = kubelet.prepare_soon(claim("slow"))
    assert not again.done()
    release.set_result(None)
    assert [device.device_name for device in again.result().claims["uid-slow"].devices] == ["slow"]
    assert serving.claims.asked.count(("prepare", "slow")) == 1


def test_a_kubelet_that_gives_up_does_not_end_the_work(serving: Serving, kubelet: Kubelet) -> None:
    release = serving.claims.hold("slow")
    call = kubelet.prepare_soon(claim("slow"))
    eventually(lambda: bool(serving.claims.asked), "it has begun")
    call.cancel()
    again = kubelet.prepare_soon(claim("slow"))
    release.set_result(None)
    assert again.result().claims["uid-slow"].error == ""
    assert serving.claims.asked == [("prepare", "slow")]


def test_the_same_claim_is_never_prepared_and_unprepared_at_once(tmp_path: Path) -> None:
    with Serving(tmp_path) as serving, Kubelet(serving.paths.service) as kubelet:
        release = serving.claims.hold("a")
        assert "code=deadline" in kubelet.prepare(claim("a"), timeout_s=SHORT_S)["uid-a"].error
        error = kubelet.unprepare(claim("a"), timeout_s=SHORT_S)["uid-a"].error
        assert "code=deadline" in error
        assert "its prepare before is not done yet" in error
        release.set_result(None)
        assert kubelet.unprepare(claim("a"))["uid-a"].error == ""
        assert kubelet.prepare(claim("a"))["uid-a"].error == ""
        assert serving.claims.asked == [("prepare", "a"), ("unprepare", "a"), ("prepare", "a")]
        assert serving.claims.at_once == 1


def test_the_claims_of_a_call_do_not_wait_for_each_other(serving: Serving, kubelet: Kubelet) -> None:
    met = asyncio.Barrier(3)

    async def meet(kind: Kind, ref: ClaimRef) -> tuple[PreparedDevice, ...]:
        await met.wait()
        return ()

    serving.claims.behaviour = dict.fromkeys(("a", "b", "c"), meet)
    answers = kubelet.prepare(claim("a"), claim("b"), claim("c"))
    assert [one.error for one in answers.values()] == ["", "", ""]


def test_the_end_waits_for_what_is_under_way(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    serving.thread.start()
    release = serving.claims.hold("slow")
    with Kubelet(serving.paths.service) as kubelet, ThreadPoolExecutor() as pool:
        call = kubelet.prepare_soon(claim("slow"))
        eventually(lambda: bool(serving.claims.asked), "it has begun")
        serving.plugin.finish_s = 10
        stopping = pool.submit(serving.thread.stop, 20)
        eventually(lambda: not serving.paths.registration.exists(), "the kubelet is told first")
        with pytest.raises(grpc.RpcError) as raised:
            kubelet.prepare(claim("late"))
        assert (raised.value.code(), raised.value.details()) == (
            grpc.StatusCode.UNAVAILABLE,
            "driver shutting down",
        )
        assert serving.paths.service.exists()
        release.set_result(None)
        assert call.result().claims["uid-slow"].error == ""
        assert stopping.result()
    assert not serving.paths.service.exists()


def test_an_end_that_is_cut_short_leaves_no_socket(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    serving.thread.start()
    release = serving.claims.hold("slow")
    with Kubelet(serving.paths.service) as kubelet:
        call = kubelet.prepare_soon(claim("slow"))
        eventually(lambda: bool(serving.claims.asked), "it has begun")
        serving.plugin.finish_s = 30
        assert not serving.thread.stop(timeout_s=0)
        eventually(lambda: not serving.paths.registration.exists(), "the end has begun")
        assert serving.thread.stop(PATIENCE_S)
        assert call.exception() is not None
    release.set_result(None)
    assert not serving.paths.service.exists()


def test_what_hangs_does_not_keep_the_end(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    serving.thread.start()
    release = serving.claims.hold("slow")
    with Kubelet(serving.paths.service) as kubelet:
        call = kubelet.prepare_soon(claim("slow"))
        eventually(lambda: bool(serving.claims.asked), "it has begun")
        assert serving.thread.stop(PATIENCE_S)
        assert call.exception().code() is grpc.StatusCode.UNAVAILABLE
    release.set_result(None)


# --- the door -----------------------------------------------------------------------------------------------

LONG = "a" * 64

WRONG = [
    (("ns", "c", ""), "request.uid", "uid: is empty"),
    (("ns", "c", LONG), "request.uid", "uid: is 64 bytes, limit 63"),
    (("ns", "c", "../../etc"), "request.uid", "uid: '../../etc' is not letters"),
    (("ns", "c", "a/b"), "request.uid", "uid: 'a/b' is not letters"),
    (("ns", "c", "a\x00b"), "request.uid", r"uid: 'a\x00b' is not letters"),
    (("ns", "c", "a\n"), "request.uid", r"uid: 'a\n' is not letters"),
    (("ns", "c", ".."), "request.uid", "uid: '..' is not letters"),
    (("", "c", "u"), "request.namespace", "namespace: is empty"),
    ((LONG, "c", "u"), "request.namespace", "namespace: is 64 bytes, limit 63"),
    (("a.b", "c", "u"), "request.namespace", "namespace: 'a.b' is not a DNS label"),
    (("ns", "", "u"), "request.name", "name: is empty"),
    (("ns", "a" * 254, "u"), "request.name", "name: is 254 bytes, limit 253"),
    (("ns", "A", "u"), "request.name", "name: 'A' is not a DNS subdomain"),
    (("ns", "a..b", "u"), "request.name", "name: 'a..b' is not a DNS subdomain"),
]


@pytest.mark.parametrize(("ref", "code", "words"), WRONG, ids=[words for _, _, words in WRONG])
def test_a_wrong_field_is_that_claims_error_and_is_named(
    serving: Serving, kubelet: Kubelet, ref: tuple[str, str, str], code: str, words: str
) -> None:
    for call in (kubelet.prepare, kubelet.unprepare):
        answers = call(claim("good"), ref)
        assert answers["uid-good"].error == ""
        assert f"code={code} " in answers[ref[2]].error
        assert words in answers[ref[2]].error
    assert {name for _, name in serving.claims.asked} == {"good"}


def test_one_uid_of_two_names_is_refused_and_both_are_named(serving: Serving, kubelet: Kubelet) -> None:
    answers = kubelet.prepare(claim("a", uid="u"), claim("b", uid="u"), claim("c"))
    assert "uid: 'u' is both 'ns/a' and 'ns/b'" in answers["u"].error
    assert serving.claims.asked == [("prepare", "c")]


def test_the_same_claim_twice_is_one(serving: Serving, kubelet: Kubelet) -> None:
    assert kubelet.prepare(claim("a"), claim("a"))["uid-a"].error == ""
    assert serving.claims.asked == [("prepare", "a")]


def test_more_claims_than_a_call_may_have_are_all_told_the_numbers(
    serving: Serving, kubelet: Kubelet
) -> None:
    answers = kubelet.prepare(*(claim(f"c{n}") for n in range(1500)))
    assert len(answers) == 1500
    assert all("claims: 1500 in one call, limit 1024" in one.error for one in answers.values())
    assert serving.claims.asked == []


def test_as_many_claims_as_a_call_may_have_with_the_longest_names(serving: Serving, kubelet: Kubelet) -> None:
    name = ".".join(["a" * 62] * 4)
    claims = [("n" * 63, f"{n:04d}{name[:249]}", f"{n:063d}") for n in range(CLAIMS_LIMIT)]
    assert {one.error for one in kubelet.prepare(*claims).values()} == {""}
    assert len(serving.claims.asked) == CLAIMS_LIMIT


def test_a_request_beyond_all_measure_is_refused_unread(serving: Serving, kubelet: Kubelet) -> None:
    for data, words in [
        (encoded(1, b"") * 5000, "NodePrepareResourcesRequest.claims: more than 4096 entries"),
        (bytes(600 << 10), "message is 614400 bytes, limit 524288; refused unread"),
    ]:
        with pytest.raises(grpc.RpcError) as raised:
            kubelet.raw(PREPARE, data)
        assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, words)
    assert kubelet.prepare(claim("a"))["uid-a"].error == ""


@pytest.mark.parametrize("path", [PREPARE, UNPREPARE])
@pytest.mark.parametrize(
    ("field", "words"),
    [
        (b"\x12\x05ab", "Request.claims.uid: ends 3 bytes after the message's 4"),
        (b"\x12\x02\xc3\x28", "Request.claims.uid: not UTF-8 at byte 0 of 2"),
        (b"\x10\x05", "Request.claims.uid: wire type 0, should be 2"),
        (
            b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            "Request.claims.name: a number of more than 10 bytes",
        ),
        (b"\x13", "Request.claims.uid: wire type 3 is none of protobuf's"),
    ],
)
def test_bytes_that_are_no_request_are_refused_with_their_place(
    serving: Serving, kubelet: Kubelet, path: str, field: bytes, words: str
) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        kubelet.raw(path, encoded(1, field))
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    assert words in (raised.value.details() or "")
    assert serving.claims.asked == []


def test_fields_of_a_newer_kubelet_are_kept_out_of_the_way(serving: Serving, kubelet: Kubelet) -> None:
    newer = (
        encoded(1, encoded(1, b"ns") + encoded(2, b"u") + encoded(3, b"c") + encoded(9, b"new")) + b"\x78\x05"
    )
    answer = message_class(f"{DRA}.v1", "NodePrepareResourcesResponse").FromString(
        kubelet.raw(PREPARE, newer)
    )
    assert answer.claims["u"].error == ""
    assert serving.claims.asked == [("prepare", "c")]


@given(st.lists(st.tuples(st.text(max_size=70), st.text(max_size=260), st.text(max_size=70)), max_size=8))
def test_every_uid_is_either_acted_upon_or_refused_and_none_is_both(refs: list[tuple[str, str, str]]) -> None:
    asked = check_claims(ClaimRef(*ref) for ref in refs)
    uids = [ref.uid for ref in asked.claims] + [ref.uid for ref, _ in asked.refused]
    assert sorted(uids) == sorted({uid for _, _, uid in refs})
    for ref in asked.claims:
        assert not {"/", "\\", "\0", "\n"} & set("".join(ref))
        assert Path("/x", ref.uid).parent == Path("/x")
    assert all(
        words.partition(":")[0] in {"uid", "name", "namespace", "claims"} for _, words in asked.refused
    )


# --- what a driver answers ----------------------------------------------------------------------------------

CLAIM = Claim(
    "ns",
    "c",
    "u",
    (
        ClaimDevice("gpu/big", "d", "pool", "gpu-0"),
        ClaimDevice("net", "d", "pool", "nic-0", "share-1"),
    ),
)


def prepared(**changes: object) -> PreparedDevice:
    return PreparedDevice((), "pool", "gpu-0", ("example.com/gpu=a",))._replace(**changes)  # type: ignore[arg-type]


def test_a_right_answer_is_taken_as_it_is() -> None:
    answer = [
        prepared(requests=("gpu",)),
        prepared(device="nic-0", cdi_ids=(), share_id="share-1"),
    ]
    assert check_prepared(CLAIM, answer) == tuple(answer)
    assert check_prepared(CLAIM, ()) == ()


def test_the_kubelet_is_told_the_request_without_the_alternative_that_was_taken() -> None:
    """Containers name the request: they do not know which alternative it came to."""
    answer = [prepared(requests=("gpu/big",)), prepared(requests=("gpu/big", "gpu"))]
    assert [one.requests for one in check_prepared(CLAIM, answer)] == [("gpu",), ("gpu",)]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "prepare returned NoneType, not a sequence of PreparedDevice"),
        ("gpu-0", "prepare returned str, not a sequence"),
        ({prepared()}, "prepare returned set, not a sequence"),
        ([("r", "pool", "gpu-0")], "prepare returned tuple among the devices"),
        ([prepared(device="gpu-1")], "pool/gpu-1: is no device of the claim"),
        ([prepared(pool="other")], "other/gpu-0: is no device of the claim"),
        ([prepared(requests=("",))], "pool/gpu-0: requests: one is empty"),
        ([prepared(requests=("net",))], "pool/gpu-0: requests: 'net' is none that the device was given to"),
        ([prepared(requests=("gpu/small",))], "requests: 'gpu/small' is none that the device was given to"),
        ([prepared(requests="gpu")], "pool/gpu-0: requests: 'gpu' is no tuple of texts"),
        ([prepared(cdi_ids=(1,))], "pool/gpu-0: cdi_ids: (1,) is no tuple of texts"),
        (
            [prepared(cdi_ids=("example.com/gpu",))],
            "cdi_ids: 'example.com/gpu' is not <vendor>/<class>=<name>",
        ),
        ([prepared(cdi_ids=("example.com=a",))], "cdi_ids: 'example.com=a' is not <vendor>/<class>=<name>"),
        ([prepared(cdi_ids=("1a/gpu=a",))], "cdi_ids: '1a/gpu=a' is not"),
        ([prepared(cdi_ids=("a/gpu=a\n",))], r"cdi_ids: 'a/gpu=a\n' is not"),
        ([prepared(share_id="share-2", device="nic-0")], "share_id: 'share-2' is none that the claim has"),
        ([prepared(share_id=7)], "pool/gpu-0: share_id: 7 is no text"),
        ([prepared(pool=b"pool")], "pool: b'pool' is no text"),
    ],
)
def test_a_wrong_answer_names_the_device_and_the_field(answer: object, words: str) -> None:
    with pytest.raises(DriverError) as raised:
        check_prepared(CLAIM, answer)
    assert raised.value.code == "driver.bug.answer"
    assert words in str(raised.value)


def test_two_devices_under_one_cdi_id_are_taken_and_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    answer = [prepared(), prepared(device="nic-0")]
    assert check_prepared(CLAIM, answer) == tuple(answer)
    (record,) = caplog.records
    assert "pool/gpu-0 and pool/nic-0 have the same first CDI id example.com/gpu=a" in record.getMessage()
