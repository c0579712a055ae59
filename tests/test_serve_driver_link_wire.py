"""What a driver's requests mean, and which are refused: every limit of the proto file, with its words."""

import tracemalloc
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpclib.exceptions import GRPCError
from hypothesis import given
from hypothesis import strategies as st
from wire.google import described
from wire.link import API, METHODS, RecordingLink, claim, message
from wire.random_messages import messages

from agent.model.claim import Claim, ClaimDevice, DeviceRef
from agent.model.prepare import ErrorClass, Operation, PrepareVerdict, Scope
from agent.model.taint import Effect
from agent.prepare.classify import Context, classify_evidence
from agent.prepare.evidence import (
    DecodeError,
    DriverReportedError,
    Errno,
    Evidence,
    GrpcStatus,
    HttpStatus,
    NvmlCode,
    Text,
    TimedOut,
)
from agent.serve.driver_link import replies as wire
from agent.serve.driver_link import requests
from agent.serve.driver_link.requests import CLASSES, KINDS, LIMITS, OPERATIONS
from agent.serve.driver_link.service import Row
from agent.serve.grpc.gen.driver_link.drahealth import v1

UNARY = sorted(wire.METHODS)


def call(method: str, request: Any, link: RecordingLink | None = None) -> Any:
    """The reply to a request, as Google reads it. Raises GRPCError."""
    link = link or RecordingLink()
    data = wire.METHODS[method](request.SerializeToString(), "gpu.example.com", lambda: link)
    return message(METHODS[method].output_type.name).FromString(data)


def shown(*evidence: Any) -> tuple[Evidence, ...]:
    """What the link is given for this evidence."""
    link = RecordingLink()
    call("Classify", message("ClassifyRequest", evidence=evidence), link)
    ((_, (_, given)),) = link.asked
    return tuple(given)


# --- devices ------------------------------------------------------------------------------------------------

DEVICES = [
    (
        {"cpus": message("CpusPart", cpus="0-3", numa=0, exclusive=True), "lease_s": 20, "pool": "p"},
        Row("p", {"name": "d", "kind": "cpu", "lease": "20s", "cpus": "0-3", "numa": 0, "exclusive": True,
                  "isolated": False}),
    ),
    (
        {"cpus": message("CpusPart", cpus="0")},
        Row("", {"name": "d", "kind": "cpu", "cpus": "0", "exclusive": False, "isolated": False}),
    ),
    (
        {"hugepages": message("HugepagesPart", size="2Mi", pages=512)},
        Row("", {"name": "d", "kind": "hugepages", "size": "2Mi", "pages": 512, "numa": 0}),
    ),
    ({"memory": message("MemoryPart", numa=1)}, Row("", {"name": "d", "kind": "memory", "numa": 1})),
    (
        {"gpu": message("GpuPart", uuid="GPU-1", gi=0, ci=0)},
        Row("", {"name": "d", "kind": "gpu", "uuid": "GPU-1", "gi": 0, "ci": 0}),
    ),
    ({"gpu": message("GpuPart", pci="0000:3b:00.0")},
     Row("", {"name": "d", "kind": "gpu", "pci": "0000:3b:00.0"})),
    ({"pci": message("PciPart", address="a", driver="nvme")},
     Row("", {"name": "d", "kind": "pci", "address": "a", "driver": "nvme"})),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "row"), DEVICES, ids=[str(one[1].keys["kind"]) for one in DEVICES])
def test_a_device_has_the_keys_that_a_file_would_have_for_it(fields: dict[str, Any], row: Row) -> None:
    link = RecordingLink()
    request = message("SyncDevicesRequest", devices=[message("DeclaredDevice", name="d", **fields)])
    assert call("SyncDevices", request, link).devices == 1
    assert link.asked == [("sync", [row])]


def test_every_part_that_a_device_can_have_has_a_kind() -> None:
    part = described()[API].message_types_by_name["DeclaredDevice"].oneofs_by_name["part"]
    assert {field.name for field in part.fields} == set(KINDS)


def test_the_last_part_that_is_set_is_the_one_that_counts() -> None:
    link = RecordingLink()
    first, second = (
        message("SyncDevicesRequest", devices=[message("DeclaredDevice", name="d", **part)]).devices[0]
        for part in ({"cpus": message("CpusPart", cpus="0")}, {"pci": message("PciPart", address="a")})
    )
    both = first.SerializeToString() + second.SerializeToString()
    data = b"\x0a" + bytes([len(both)]) + both
    wire.sync(data, "d", lambda: link)
    assert link.asked == [("sync", [Row("", {"name": "d", "kind": "pci", "address": "a"})])]


# --- claims -------------------------------------------------------------------------------------------------


def test_a_claim_is_the_sockets_drivers_and_its_fingerprint_moves_with_what_was_sent() -> None:
    link = RecordingLink()
    sent = [claim("a", "gpu-0"), claim("b", "gpu-0", fingerprint="x"), claim("c", "gpu-0", fingerprint="y")]
    call("CheckClaims", message("CheckClaimsRequest", claims=sent), link)
    ((_, claims),) = link.asked
    assert claims[0] == Claim("ns", "a", "a", (ClaimDevice("r", "gpu.example.com", "p", "gpu-0"),))
    assert len({one.fingerprint for one in claims}) == 3


def test_without_a_claim_it_is_nobodys_error_that_is_classified() -> None:
    link = RecordingLink()
    reply = call("Classify", message("ClassifyRequest", evidence=[message("Evidence", text="x")]), link)
    assert link.asked == [("classify", (Claim("", "", ""), (Text("x"),)))]
    assert reply.verdict.code == "driver.error"


# --- evidence -----------------------------------------------------------------------------------------------

EVIDENCE: list[tuple[dict[str, Any], Evidence]] = [
    ({"errno": message("Errno", number=28, operation=2, path="/cdi/x", text="no space")},
     Errno(28, Operation.CDI, "/cdi/x", "no space")),
    ({"errno": message("Errno", number=28)}, Errno(28, None, "", "No space left on device")),
    ({"nvml": message("NvmlReturn", code=15, device="gpu-0")}, NvmlCode(15, "gpu-0")),
    ({"grpc": message("GrpcStatus", code=14, message="gone")}, GrpcStatus(14, "gone")),
    ({"http": message("HttpAnswer", status=409, reason="Conflict", message="m", kubernetes=True)},
     HttpStatus(409, "Conflict", "m", kubernetes=True)),
    ({"late": message("Late", by="context.DeadlineExceeded", operation=6, text="t")},
     TimedOut("context.DeadlineExceeded", Operation.LOCK, "t")),
    ({"late": message("Late")}, TimedOut("deadline")),
    ({"undecoded": message("Undecoded", by="strict\ndecoding", text="t")},
     DecodeError("strict decoding", "t", Operation.CONFIG)),
    ({"word": message("DriverWord", error_class=3, code="fpga.dead", summary="s", detail="d", device="x",
                      retry_after_s=2.5)},
     DriverReportedError(ErrorClass.FAILED_DEVICE, "fpga.dead", "s", "d", retry_after_s=2.5, device="x")),
    ({"word": message("DriverWord", error_class=2, summary="s")},
     DriverReportedError(ErrorClass.BAD_CONFIG, "config.invalid", "s")),
    ({"word": message("DriverWord", summary="s", code="x.y")}, Text("s")),
    ({"text": "something"}, Text("something")),
    ({"text": ""}, Text("")),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "piece"), EVIDENCE, ids=[str(one[1]) for one in EVIDENCE])
def test_each_piece_of_evidence_is_what_it_is_inside_a_driver(
    fields: dict[str, Any], piece: Evidence
) -> None:
    assert shown(message("Evidence", **fields)) == (piece,)


def test_parameters_that_could_not_be_read_are_the_users() -> None:
    undecoded = message("Evidence", undecoded=message("Undecoded", by="json", text="unknown field"))
    reply = call("Classify", message("ClassifyRequest", evidence=[undecoded]))
    assert (reply.verdict.error_class, reply.verdict.code) == (2, "config.decode")


def test_every_kind_of_evidence_and_every_number_of_an_enum_has_its_meaning() -> None:
    kinds = {next(iter(fields)) for fields, _ in EVIDENCE}
    assert kinds == set(described()[API].message_types_by_name["Evidence"].fields_by_name)
    assert set(CLASSES.values()) == set(ErrorClass)
    assert set(OPERATIONS.values()) == set(Operation)
    assert set(wire.EFFECTS) == set(Effect)


def test_what_a_later_version_says_is_left_out_or_zero() -> None:
    later = message("Evidence", errno=message("Errno", number=5, operation=77)).errno.SerializeToString()
    word = message("DriverWord", error_class=99, summary="s")
    unknown = b"\xfa\x06\x03new"  # field 111
    errno = b"\x0a" + bytes([len(later + unknown)]) + later + unknown
    request = b"\x12" + bytes([len(errno)]) + errno + unknown
    link = RecordingLink()
    wire.classify(request, "d", lambda: link)
    assert link.asked[0][1][1] == (Errno(5, None, "", "Input/output error"),)
    assert shown(message("Evidence", word=word)) == (Text("s"),)


LINES = st.text(st.characters(exclude_categories=("Cs",)), max_size=60) | st.sampled_from(
    ["a\nb", "\0", "\x1b[31m", "\u2028", "]"]
)


@given(st.sampled_from(["errno", "late", "undecoded", "word", "text", "http", "grpc", "nvml"]), LINES)
def test_whatever_a_text_holds_the_verdict_is_one_line(kind: str, line: str) -> None:
    given_texts: dict[str, Any] = {
        "errno": message("Errno", number=5, path=line, text=line),
        "late": message("Late", by=line, text=line),
        "undecoded": message("Undecoded", by=line, text=line),
        "word": message("DriverWord", error_class=4, code=line, summary=line, detail=line, device=line),
        "text": line,
        "http": message("HttpAnswer", status=500, reason=line, message=line),
        "grpc": message("GrpcStatus", code=2, message=line),
        "nvml": message("NvmlReturn", code=15, device=line),
    }
    evidence = [message("Evidence", **{kind: given_texts[kind]})]
    verdict = call("Classify", message("ClassifyRequest", claim=claim("u", "d"), evidence=evidence)).verdict
    for text in (verdict.text, verdict.summary, verdict.code, *verdict.evidence):
        assert text.isprintable()
    assert len(verdict.text.encode()) <= 1024
    assert len(verdict.summary) <= 200


# --- what is refused ----------------------------------------------------------------------------------------


def evidence_of(**fields: Any) -> Any:
    return message("ClassifyRequest", evidence=[message("Evidence", **fields)])


def check_of(*claims: Any) -> Any:
    return message("CheckClaimsRequest", claims=claims)


def report_of(*outcomes: dict[str, Any], step: int = 1) -> Any:
    return message(
        "ReportPrepareRequest", step=step, outcomes=[message("PrepareOutcome", **one) for one in outcomes]
    )


def sync_of(**fields: Any) -> Any:
    return message("SyncDevicesRequest", devices=[message("DeclaredDevice", **fields)])


TEXT = message("Evidence", text="x")
PART = {"pci": message("PciPart", address="a")}

LONG = [
    *(("errno", "Errno", name, {"number": 1}) for name in ("path", "text")),
    ("nvml", "NvmlReturn", "device", {"code": 1}),
    ("grpc", "GrpcStatus", "message", {"code": 1}),
    *(("http", "HttpAnswer", name, {"status": 400}) for name in ("reason", "message")),
    *(("late", "Late", name, {}) for name in ("by", "text")),
    *(("undecoded", "Undecoded", name, {}) for name in ("by", "text")),
    *(("word", "DriverWord", name, {}) for name in ("code", "summary", "detail", "device")),
]
"""Texts in evidence: the evidence's field and message, the text's, and what else must be set."""

INVALID = [
    # claims
    (check_of(claim("")), "claims[0].uid: is empty"),
    (check_of(claim("a"), claim("b"), claim("a")), "claims[2].uid: the same as claims[0]'s"),
    (check_of(message("PrepareClaim", uid="u", namespace="n" * 254)),
     "claims[0].namespace: 254 bytes, limit 253"),
    (check_of(message("PrepareClaim", uid="ä" * 127)), "claims[0].uid: 254 bytes, limit 253"),
    (check_of(message("PrepareClaim", uid="u", name="n" * 254)), "claims[0].name: 254 bytes, limit 253"),
    (check_of(claim("u", fingerprint="f" * 254)), "claims[0].fingerprint: 254 bytes, limit 253"),
    (check_of(claim("u", "d", "d" * 254)), "claims[0].devices[1].device: 254 bytes, limit 253"),
    (check_of(message("PrepareClaim", uid="u", name="\n" * 80)),
     "claims[0].name: '" + r"\n" * 64 + "' is not printable"),
    (check_of(claim("u", "d\x1b")), "claims[0].devices[0].device: 'd\\x1b' is not printable"),
    # classify
    (message("ClassifyRequest"), "evidence: 0 entries, at least 1"),
    (message("ClassifyRequest", claim=claim(""), evidence=[TEXT]), "claim.uid: is empty"),
    (message("ClassifyRequest", evidence=[TEXT, message("Evidence")]),
     "evidence[1].kind: none is set, or one that this agent does not know"),
    (evidence_of(text="x" * 4097), "evidence[0].text: 4097 bytes, limit 4096"),
    (evidence_of(errno=message("Errno")), "evidence[0].errno.number: 0 is not within 1 and 4095"),
    (evidence_of(errno=message("Errno", number=4096)),
     "evidence[0].errno.number: 4096 is not within 1 and 4095"),
    (evidence_of(nvml=message("NvmlReturn", code=1000)),
     "evidence[0].nvml.code: 1000 is not within 1 and 999"),
    (evidence_of(grpc=message("GrpcStatus", code=17)), "evidence[0].grpc.code: 17 is not within 1 and 16"),
    (evidence_of(http=message("HttpAnswer", status=200)),
     "evidence[0].http.status: 200 is not within 400 and 599"),
    (evidence_of(word=message("DriverWord", summary="ä" * 201)),
     "evidence[0].word.summary: 201 characters, limit 200"),
    (evidence_of(word=message("DriverWord", retry_after_s=-1)),
     "evidence[0].word.retry_after_s: -1.0 is not within 0 and 86400"),
    *(
        (evidence_of(**{kind: message(of, **{name: "x" * 5000}, **rest)}),
         f"evidence[0].{kind}.{name}: 5000 bytes, limit 4096")
        for kind, of, name, rest in LONG
    ),
    # a report
    (report_of(step=0), "step: STEP_UNSPECIFIED, or one that this agent does not know"),
    (report_of(step=3), "step: STEP_UNSPECIFIED, or one that this agent does not know"),
    (report_of({}), "outcomes[0].claim: is not set"),
    (report_of({"claim": claim("")}), "outcomes[0].claim.uid: is empty"),
    (report_of({"claim": claim("a")}, {"claim": claim("a")}),
     "outcomes[1].claim.uid: the same as outcomes[0].claim's"),
    (report_of({"claim": claim("a"), "evidence": [TEXT]}),
     "outcomes[0].evidence: 1 entries, limit 0 of what has not failed"),
    (report_of({"claim": claim("a"), "failed": True, "evidence": [message("Evidence")]}),
     "outcomes[0].evidence[0].kind: none is set, or one that this agent does not know"),
    # a declaration
    (sync_of(name="d"), "devices[0].part: none is set, or one that this agent does not know"),
    (sync_of(name="d" * 64, **PART), "devices[0].name: 64 bytes, limit 63"),
    (sync_of(name="d", pool="p" * 254, **PART), "devices[0].pool: 254 bytes, limit 253"),
    (sync_of(name="d", lease_s=-1, **PART), "devices[0].lease_s: -1 is not within 0 and 86399"),
]  # fmt: skip

TOO_MANY = [
    (check_of(*(claim(str(number)) for number in range(257))), "claims: 257 entries, limit 256"),
    (check_of(claim("a"), claim("b", *["d"] * 129)), "claims[1].devices: 129 entries, limit 128"),
    (message("ClassifyRequest", evidence=[TEXT] * 17), "evidence: 17 entries, limit 16"),
    (report_of(*({"claim": claim(str(number))} for number in range(257))),
     "outcomes: 257 entries, limit 256"),
    (report_of({"claim": claim("a"), "failed": True, "evidence": [TEXT] * 17}),
     "outcomes[0].evidence: 17 entries, limit 16"),
    (message("SyncDevicesRequest", devices=[message("DeclaredDevice")] * 4097),
     "devices: 4097 entries, limit 4096"),
]  # fmt: skip


def refusal(request: Any) -> tuple[str, str]:
    """How a request is refused; nothing was done of it."""
    link = RecordingLink()
    method = request.DESCRIPTOR.name.removesuffix("Request")
    with pytest.raises(GRPCError) as raised:
        call(method, request, link)
    assert link.asked == []
    return raised.value.status.name, raised.value.message or ""


@pytest.mark.parametrize(("request_", "words"), INVALID, ids=[one[1][:60] for one in INVALID])
def test_what_cannot_be_used_is_refused_with_its_place_and_the_limit(request_: Any, words: str) -> None:
    assert refusal(request_) == (grpc.StatusCode.INVALID_ARGUMENT.name, words)


@pytest.mark.parametrize(("request_", "words"), TOO_MANY, ids=[one[1] for one in TOO_MANY])
def test_too_many_are_refused_with_their_number(request_: Any, words: str) -> None:
    assert refusal(request_) == (grpc.StatusCode.RESOURCE_EXHAUSTED.name, words)


def test_every_limit_is_tried() -> None:
    tried = " ".join(words for _, words in INVALID + TOO_MANY)
    names = {name for limits in LIMITS.values() for name in limits}
    untried = {name for name in names if f"{name}: " not in tried}
    assert untried == {"request", "share_id"}, "which have one with the rest of a claim's device"
    assert len(set(LIMITS[v1.ClaimedDevice].values())) == 1


def test_the_densest_request_takes_little_memory_while_it_is_read() -> None:
    """An empty device is two bytes; what is made of it is over a hundred, and several are read at once."""
    dense = check_of(*(claim(str(number), *[""] * 128) for number in range(256)))
    for one in dense.claims:
        for device in one.devices:
            device.Clear()
    data = dense.SerializeToString()
    tracemalloc.start()
    try:
        assert len(requests.read_check(data, "d")) == 256
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16 << 20


@given(st.sampled_from(UNARY).flatmap(lambda name: messages(METHODS[name].input_type)))
def test_any_request_has_an_answer_or_is_refused_and_never_a_mistake_of_ours(request: Any) -> None:
    link = RecordingLink()
    method = request.DESCRIPTOR.name.removesuffix("Request")
    refused, reply = None, None
    try:
        reply = call(method, request, link)
    except GRPCError as error:
        refused = error
    if refused is not None:
        assert refused.status.name in {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
        assert refused.message
        assert link.asked == []
    else:
        assert len(link.asked) == 1
        if method in {"CheckClaims", "ReportPrepare"}:
            asked = request.claims if method == "CheckClaims" else [one.claim for one in request.outcomes]
            assert [one.uid for one in reply.answers] == [one.uid for one in asked]


# --- what is told -------------------------------------------------------------------------------------------


def test_a_verdict_is_told_with_all_that_is_known_of_it() -> None:
    verdict = PrepareVerdict(
        error_class=ErrorClass.FAILED_DEVICE,
        code="gpu.lost",
        scope=Scope.DEVICE,
        claim=Claim("ns", "c", "u").ref,
        summary="is lost",
        devices=(DeviceRef("d", "p", "gpu-0"),),
        evidence=("NVML 15 (GPU_IS_LOST)",),
        confidence=0.9,
        advice="reset it",
        retry_after_s=5.0,
        first_wall_s=1_700_000_000.5,
        count=3,
    )

    class Link(RecordingLink):
        def classify(self, claim: Claim, evidence: Any) -> PrepareVerdict:
            return verdict

    told = call("Classify", evidence_of(text="x"), Link()).verdict
    assert (told.error_class, told.code, told.summary, told.advice) == (3, "gpu.lost", "is lost", "reset it")
    assert told.text.startswith("[class=failed-device code=gpu.lost device=d/p/gpu-0 ")
    assert list(told.evidence) == ["NVML 15 (GPU_IS_LOST)"]
    assert (told.confidence, told.retry_after_s, told.count, told.first_s) == (0.9, 5.0, 3, 1_700_000_000.5)
    assert [(one.driver, one.pool, one.device) for one in told.devices] == [("d", "p", "gpu-0")]


def test_a_reply_that_no_client_could_read_names_fewer_devices() -> None:
    devices = [ClaimDevice("r", "d" * 63, "p" * 253, f"{number:063d}") for number in range(128)]
    context = Context(Claim("ns", "c", "u", tuple(devices)), {})
    verdict = classify_evidence([Text("x" * 5000)], context)

    class Link(RecordingLink):
        def unprepared(self, ended: Any) -> list[PrepareVerdict | None]:
            return [replace(verdict, claim=one.claim.ref) for one in ended]

    outcomes = [{"claim": claim(f"{number:0253d}"), "failed": True} for number in range(256)]
    for count, named in [(1, 128), (32, 128), (33, 64), (256, 16)]:
        reply = call("ReportPrepare", report_of(*outcomes[:count], step=2), Link())
        assert {len(one.verdict.devices) for one in reply.answers} == {named}
        assert reply.ByteSize() < 4 << 20
