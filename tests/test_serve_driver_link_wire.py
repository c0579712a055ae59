"""Requests of a driver: how each is decoded, and which are refused, with every limit of the proto file."""

import tracemalloc
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpclib.exceptions import GRPCError
from hypothesis import given
from hypothesis import strategies as st
from prepare_cases import ONE
from wire.google import load_descriptors
from wire.link import API, METHODS, RecordingHandler, claim, message
from wire.random_messages import messages

from agent.model.claim import Claim, ClaimDevice, ClaimRef, DeviceRef
from agent.model.health import Effect, Finding, Health, Repair, Severity
from agent.model.prepare import ErrorClass, Operation, OtherDriverFailure, PrepareVerdict, Scope
from agent.prepare.classify import PrepareContext, classify_evidence
from agent.prepare.evidence import (
    ConnectionFailure,
    DecodeFailure,
    DriverReportedError,
    ErrnoEvidence,
    ErrorText,
    Evidence,
    GrpcStatus,
    HttpStatus,
    NvmlCode,
    OperationTimeout,
    UnreadableCdiFile,
)
from agent.serve.agent_api.encode import REPAIRS as AGENT_REPAIRS
from agent.serve.driver_link import methods, requests
from agent.serve.driver_link.handler_interface import DeviceDeclaration, DriverCheckResult
from agent.serve.driver_link.requests import ERROR_CLASSES, KIND_OF_PART, LIMITS, OPERATIONS
from agent.serve.grpc.gen.driver_link.drahealth import v1

UNARY = sorted(methods.METHODS)


def call(method: str, request: Any, handler: RecordingHandler | None = None) -> Any:
    """Return the reply to a request, decoded by Google's protobuf. Raises GRPCError."""
    handler = handler or RecordingHandler()
    data = methods.METHODS[method](request.SerializeToString(), "gpu.example.com", lambda: handler)
    return message(METHODS[method].output_type.name).FromString(data)


def evidence_given_for(*evidence: Any) -> tuple[Evidence, ...]:
    """Return the evidence that the handler receives for these messages."""
    handler = RecordingHandler()
    call("Classify", message("ClassifyRequest", evidence=evidence), handler)
    ((_, (_, given)),) = handler.calls
    return tuple(given)


# --- devices ------------------------------------------------------------------------------------------------

DEVICES = [
    (
        {"cpus": message("CpusPart", cpus="0-3", numa=0, exclusive=True), "lease_s": 20, "pool": "p"},
        DeviceDeclaration(
            "p",
            {
                "name": "d",
                "kind": "cpu",
                "lease": "20s",
                "cpus": "0-3",
                "numa": 0,
                "exclusive": True,
                "isolated": False,
            },
        ),
    ),
    (
        {"cpus": message("CpusPart", cpus="0")},
        DeviceDeclaration(
            "", {"name": "d", "kind": "cpu", "cpus": "0", "exclusive": False, "isolated": False}
        ),
    ),
    (
        {"hugepages": message("HugepagesPart", size="2Mi", pages=512)},
        DeviceDeclaration("", {"name": "d", "kind": "hugepages", "size": "2Mi", "pages": 512, "numa": 0}),
    ),
    (
        {"memory": message("MemoryPart", numa=1)},
        DeviceDeclaration("", {"name": "d", "kind": "memory", "numa": 1}),
    ),
    (
        {"gpu": message("GpuPart", uuid="GPU-1", gi=0, ci=0)},
        DeviceDeclaration("", {"name": "d", "kind": "gpu", "uuid": "GPU-1", "gi": 0, "ci": 0}),
    ),
    (
        {"gpu": message("GpuPart", pci="0000:3b:00.0")},
        DeviceDeclaration("", {"name": "d", "kind": "gpu", "pci": "0000:3b:00.0"}),
    ),
    (
        {"pci": message("PciPart", address="a", driver="nvme")},
        DeviceDeclaration("", {"name": "d", "kind": "pci", "address": "a", "driver": "nvme"}),
    ),
    (
        {"nic": message("NicPart", rdma="mlx5_0")},
        DeviceDeclaration("", {"name": "d", "kind": "nic", "rdma": "mlx5_0"}),
    ),
]


@pytest.mark.parametrize(
    ("fields", "declaration"), DEVICES, ids=[str(item[1].keys["kind"]) for item in DEVICES]
)
def test_declared_device_has_the_keys_of_a_declaration_file(
    fields: dict[str, Any], declaration: DeviceDeclaration
) -> None:
    handler = RecordingHandler()
    request = message("SyncDevicesRequest", devices=[message("DeclaredDevice", name="d", **fields)])
    assert call("SyncDevices", request, handler).devices == 1
    assert handler.calls == [("sync", [declaration])]


def test_every_device_part_has_a_kind() -> None:
    part = load_descriptors()[API].message_types_by_name["DeclaredDevice"].oneofs_by_name["part"]
    assert {field.name for field in part.fields} == set(KIND_OF_PART)


def test_last_part_of_merged_devices_counts() -> None:
    handler = RecordingHandler()
    first, second = (
        message("SyncDevicesRequest", devices=[message("DeclaredDevice", name="d", **part)]).devices[0]
        for part in ({"cpus": message("CpusPart", cpus="0")}, {"pci": message("PciPart", address="a")})
    )
    both = first.SerializeToString() + second.SerializeToString()
    data = b"\x0a" + bytes([len(both)]) + both
    methods.handle_sync_devices(data, "d", lambda: handler)
    assert handler.calls == [("sync", [DeviceDeclaration("", {"name": "d", "kind": "pci", "address": "a"})])]


def test_device_with_checks_needs_no_part() -> None:
    handler = RecordingHandler()
    device = message("DeclaredDevice", name="d", checks=["link", "memory"])
    call("SyncDevices", message("SyncDevicesRequest", devices=[device]), handler)
    assert handler.calls == [("sync", [DeviceDeclaration("", {"name": "d", "checks": ["link", "memory"]})])]


# --- results of checks --------------------------------------------------------------------------------------

DOWN = {"code": "card.link", "evidence": "down", "advice": "reset it"}
OUTCOMES: list[tuple[dict[str, Any], Finding | None, str]] = [
    ({"no_fault": message("NoFault")}, None, ""),
    ({"no_result": "hangs"}, None, "hangs"),
    ({"no_result": ""}, None, "the driver gave no reason"),
    ({}, None, "the driver gave no reason"),
    *(
        ({"finding": message("CheckFinding", severity=number, repair=2, **DOWN)},
         Finding("card.link", severity, "down", "reset it", repair=Repair.RESET_DEVICE), "")
        for number, severity in enumerate(
            (Severity.UNKNOWN, Severity.DEGRADED, Severity.UNKNOWN, Severity.UNHEALTHY, Severity.UNKNOWN)
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "finding", "reason"), OUTCOMES)
def test_check_result_without_known_outcome_is_never_no_fault(
    fields: dict[str, Any], finding: Finding | None, reason: str
) -> None:
    handler = RecordingHandler()
    call("ReportChecks", results_of(run=4, age_s=1.5, **fields), handler)
    ((_, [found]),) = handler.calls
    assert found == DriverCheckResult("c", "", "d", finding, reason, 5.0, 15.0, 1.5, 3, 3, 4)


def test_check_result_keeps_the_driver_settings() -> None:
    handler = RecordingHandler()
    call("ReportChecks", results_of(pool="p", lease_s=60, raise_after=1, clear_after=2), handler)
    call("ReportChecks", results_of(every_s=0.1), handler)
    ((_, [given]), (_, [fast])) = handler.calls
    assert (given.pool, given.lease_s, given.raise_after, given.clear_after) == ("p", 60.0, 1, 2)
    assert fast.lease_s == 2.0


# --- claims -------------------------------------------------------------------------------------------------


def test_claim_has_driver_of_the_socket_and_own_fingerprint() -> None:
    handler = RecordingHandler()
    sent = [claim("a", "gpu-0"), claim("b", "gpu-0", fingerprint="x"), claim("c", "gpu-0", fingerprint="y")]
    call("CheckClaims", message("CheckClaimsRequest", claims=sent), handler)
    ((_, claims),) = handler.calls
    assert claims[0] == Claim("ns", "a", "a", devices=(ClaimDevice("r", "gpu.example.com", "p", "gpu-0"),))
    assert len({item.fingerprint for item in claims}) == 3


def test_claim_device_has_share_and_admin_access() -> None:
    handler = RecordingHandler()
    devices = [message("ClaimedDevice", device="gpu-0", share_id="s", admin_access=True)]
    call("CheckClaims", check_of(message("PrepareClaim", uid="u", devices=devices)), handler)
    ((_, [received]),) = handler.calls
    assert received.devices == (ClaimDevice("", "gpu.example.com", "", "gpu-0", "s", admin=True),)


def test_classify_without_claim_uses_empty_claim() -> None:
    handler = RecordingHandler()
    reply = call("Classify", message("ClassifyRequest", evidence=[message("Evidence", text="x")]), handler)
    assert handler.calls == [("classify", (Claim("", "", ""), (ErrorText("x"),)))]
    assert reply.verdict.code == "driver.error"


# --- evidence -----------------------------------------------------------------------------------------------

EVIDENCE: list[tuple[dict[str, Any], Evidence]] = [
    ({"errno": message("Errno", number=28, operation=2, path="/cdi/x", text="no space")},
     ErrnoEvidence(28, Operation.CDI, "/cdi/x", "no space")),
    ({"errno": message("Errno", number=28)}, ErrnoEvidence(28, None, "", "No space left on device")),
    ({"errno": message("Errno", number=30, path="/etc/cdi/x.json", text="read-only")},
     ErrnoEvidence(30, Operation.CDI, "/etc/cdi/x.json", "read-only")),
    ({"nvml": message("NvmlReturn", code=15, device="gpu-0")}, NvmlCode(15, "gpu-0")),
    ({"grpc": message("GrpcStatus", code=14, message="gone")}, GrpcStatus(14, "gone")),
    ({"http": message("HttpStatus", status=409, reason="Conflict", message="m", kubernetes=True)},
     HttpStatus(409, "Conflict", "m", from_api_server=True)),
    ({"timeout": message("Timeout", by="context.DeadlineExceeded", operation=6, text="t")},
     OperationTimeout("context.DeadlineExceeded", Operation.LOCK, "t")),
    ({"timeout": message("Timeout")}, OperationTimeout("deadline")),
    ({"decode_error": message("DecodeError", by="strict\ndecoding", text="t")},
     DecodeFailure("strict decoding", "t", Operation.CONFIG)),
    ({"decode_error": message("DecodeError", by="json", text="t", requests=["pages"])},
     DecodeFailure("json", "t", Operation.CONFIG, requests=("pages",))),
    ({"driver_error": message("DriverReportedError", error_class=3, code="fpga.dead", summary="s", detail="d",
                              device="x", retry_after_s=2.5)},
     DriverReportedError(ErrorClass.FAILED_DEVICE, "fpga.dead", "s", "d", retry_after_s=2.5, device="x")),
    ({"driver_error": message("DriverReportedError", error_class=2, summary="s")},
     DriverReportedError(ErrorClass.BAD_CONFIG, "config.invalid", "s")),
    ({"driver_error": message("DriverReportedError", error_class=2, summary="s", requests=["a", "b/c"])},
     DriverReportedError(ErrorClass.BAD_CONFIG, "config.invalid", "s", requests=("a", "b/c"))),
    ({"driver_error": message("DriverReportedError", summary="s", code="x.y")}, ErrorText("s")),
    ({"operation_failure": message("OperationFailure", by="json.SyntaxError", operation=3, text="/s: no {")},
     DecodeFailure("json.SyntaxError", "/s: no {", Operation.STATE)),
    ({"operation_failure": message("OperationFailure", by="json.SyntaxError", operation=2, text="no {")},
     UnreadableCdiFile("", "no {")),
    ({"operation_failure": message("OperationFailure", by="x509.HostnameError", operation=5, text="not b")},
     ConnectionFailure("x509.HostnameError", "not b", Operation.API)),
    ({"operation_failure": message("OperationFailure", by="net.ParseError", operation=3, text="bad MAC")},
     ErrorText("bad MAC")),
    ({"operation_failure": message("OperationFailure", by="fpga.Locked", operation=5, text="bank 3")},
     ErrorText("bank 3")),
    ({"text": "something"}, ErrorText("something")),
    ({"text": ""}, ErrorText("")),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), EVIDENCE, ids=[str(item[1]) for item in EVIDENCE])
def test_evidence_message_becomes_evidence(fields: dict[str, Any], expected: Evidence) -> None:
    assert evidence_given_for(message("Evidence", **fields)) == (expected,)


def test_evidence_of_an_unknown_kind_does_not_refuse_the_other_results() -> None:
    handler = RecordingHandler()
    unknown = message("Evidence").FromString(b"\xa2\x06\x01x")  # field 100, of a newer driver
    failed = {"claim": claim("a"), "failed": True, "evidence": [unknown, TEXT]}
    call(
        "ReportPrepare",
        report_of(failed, {"claim": claim("b"), "failed": True, "evidence": [unknown]}),
        handler,
    )
    ((_, results),) = handler.calls
    assert [(result.claim.uid, result.evidence) for result in results] == [
        ("a", (ErrorText(TEXT.text),)),
        ("b", ()),
    ]


def test_decode_error_is_classified_as_bad_config() -> None:
    decode_error = message("Evidence", decode_error=message("DecodeError", by="json", text="unknown field"))
    reply = call("Classify", message("ClassifyRequest", evidence=[decode_error]))
    assert (reply.verdict.error_class, reply.verdict.code) == (2, "config.decode")


@pytest.mark.parametrize(
    ("by", "operation", "code"),
    [
        ("json.UnmarshalTypeError", v1.Operation.STATE, "state.checkpoint_corrupt"),
        ("x509.CertificateInvalidError", v1.Operation.API, "api.unreachable"),
        ("tls.alert", v1.Operation.API, "api.unreachable"),
        ("json.SyntaxError", v1.Operation.CDI, "cdi.malformed"),
        ("net.DNSError", v1.Operation.DEVICE, "os.unconnected"),
        ("fpga.Locked", v1.Operation.DEVICE, "driver.error"),
    ],
)
def test_typed_error_of_an_operation_is_classified(by: str, operation: int, code: str) -> None:
    failure = message("OperationFailure", by=by, operation=operation, text="no: 2026-11-21T10:04:04Z")
    verdict = call("Classify", evidence_of(operation_failure=failure)).verdict
    assert verdict.code == code
    assert verdict.summary.endswith("no: <time>")


def test_every_evidence_kind_and_enum_number_is_mapped() -> None:
    kinds = {next(iter(fields)) for fields, _ in EVIDENCE}
    assert kinds == set(load_descriptors()[API].message_types_by_name["Evidence"].fields_by_name)
    assert set(ERROR_CLASSES.values()) == set(ErrorClass)
    assert set(OPERATIONS.values()) == set(Operation)
    assert set(methods.EFFECTS) == set(Effect)


def test_unknown_fields_and_enum_numbers_are_ignored_or_zero() -> None:
    later = message("Evidence", errno=message("Errno", number=5, operation=77)).errno.SerializeToString()
    error = message("DriverReportedError", error_class=99, summary="s")
    unknown = b"\xfa\x06\x03new"  # field 111
    errno = b"\x0a" + bytes([len(later + unknown)]) + later + unknown
    request = b"\x12" + bytes([len(errno)]) + errno + unknown
    handler = RecordingHandler()
    methods.handle_classify(request, "d", lambda: handler)
    assert handler.calls[0][1][1] == (ErrnoEvidence(5, None, "", "Input/output error"),)
    assert evidence_given_for(message("Evidence", driver_error=error)) == (ErrorText("s"),)


LINES = st.text(st.characters(exclude_categories=("Cs",)), max_size=60) | st.sampled_from(
    ["a\nb", "\0", "\x1b[31m", "\u2028", "]"]
)


@given(
    st.sampled_from(
        [
            "errno",
            "timeout",
            "decode_error",
            "driver_error",
            "text",
            "http",
            "grpc",
            "nvml",
            "operation_failure",
        ]
    ),
    LINES,
)
def test_verdict_is_one_line_for_any_text(kind: str, line: str) -> None:
    texts: dict[str, Any] = {
        "errno": message("Errno", number=5, path=line, text=line),
        "timeout": message("Timeout", by=line, text=line),
        "decode_error": message("DecodeError", by=line, text=line),
        "driver_error": message(
            "DriverReportedError", error_class=4, code=line, summary=line, detail=line, device=line
        ),
        "text": line,
        "http": message("HttpStatus", status=500, reason=line, message=line),
        "grpc": message("GrpcStatus", code=2, message=line),
        "nvml": message("NvmlReturn", code=15, device=line),
        "operation_failure": message("OperationFailure", by=line, operation=3, text=line),
    }
    evidence = [message("Evidence", **{kind: texts[kind]})]
    verdict = call("Classify", message("ClassifyRequest", claim=claim("u", "d"), evidence=evidence)).verdict
    for text in (verdict.text, verdict.summary, verdict.code, *verdict.evidence):
        assert text.isprintable()
    assert len(verdict.text.encode()) <= 1024
    assert len(verdict.summary) <= 200


# --- invalid requests ---------------------------------------------------------------------------------------


def evidence_of(**fields: Any) -> Any:
    return message("ClassifyRequest", evidence=[message("Evidence", **fields)])


def check_of(*claims: Any) -> Any:
    return message("CheckClaimsRequest", claims=claims)


def report_of(*outcomes: dict[str, Any], step: int = 1) -> Any:
    return message(
        "ReportPrepareRequest", step=step, outcomes=[message("PrepareOutcome", **item) for item in outcomes]
    )


def sync_of(**fields: Any) -> Any:
    return message("SyncDevicesRequest", devices=[message("DeclaredDevice", **fields)])


def results_of(**fields: Any) -> Any:
    result = message("CheckResult", **{"check": "c", "device": "d", "every_s": 5, **fields})
    return message("ReportChecksRequest", results=[result])


TEXT = message("Evidence", text="x")
PART = {"pci": message("PciPart", address="a")}

LONG = [
    *(("errno", "Errno", name, {"number": 1}) for name in ("path", "text")),
    ("nvml", "NvmlReturn", "device", {"code": 1}),
    ("grpc", "GrpcStatus", "message", {"code": 1}),
    *(("http", "HttpStatus", name, {"status": 400}) for name in ("reason", "message")),
    *(("timeout", "Timeout", name, {}) for name in ("by", "text")),
    *(("decode_error", "DecodeError", name, {}) for name in ("by", "text")),
    *(("driver_error", "DriverReportedError", name, {}) for name in ("code", "summary", "detail", "device")),
]
"""Texts in evidence: oneof field and message, field of the text, and other fields to set."""

NO_EVIDENCE = (
    "evidence: 0 entries with one of errno, nvml, grpc, http, timeout, decode_error, driver_error, "
    "operation_failure, text; must be at least 1"
)

INVALID = [
    # claims
    (check_of(claim("")), "claims[0].uid: is empty; set the claim's UID"),
    (check_of(claim("a"), claim("b"), claim("a")),
     "claims[2].uid: same as claims[0].uid; list each claim once"),
    (check_of(message("PrepareClaim", uid="u", namespace="n" * 254)),
     "claims[0].namespace: 254 bytes, limit 253"),
    (check_of(message("PrepareClaim", uid="ä" * 127)), "claims[0].uid: 254 bytes, limit 253"),
    (check_of(message("PrepareClaim", uid="u", name="n" * 254)), "claims[0].name: 254 bytes, limit 253"),
    (check_of(claim("u", fingerprint="f" * 254)), "claims[0].fingerprint: 254 bytes, limit 253"),
    (check_of(claim("u", "d", "d" * 254)), "claims[0].devices[1].device: 254 bytes, limit 253"),
    (check_of(message("PrepareClaim", uid="u", name="\n" * 80)),
     "claims[0].name: '" + r"\n" * 64 + "' has unprintable characters"),
    (check_of(claim("u", "d\x1b")), "claims[0].devices[0].device: 'd\\x1b' has unprintable characters"),
    # classify
    (message("ClassifyRequest"), NO_EVIDENCE),
    (message("ClassifyRequest", evidence=[message("Evidence")]), NO_EVIDENCE),
    (message("ClassifyRequest", claim=claim(""), evidence=[TEXT]),
     "claim.uid: is empty; set the claim's UID"),
    (evidence_of(text="x" * 4097), "evidence[0].text: 4097 bytes, limit 4096"),
    (evidence_of(errno=message("Errno")), "evidence[0].errno.number: 0 is not within 1 and 4095"),
    (evidence_of(errno=message("Errno", number=4096)),
     "evidence[0].errno.number: 4096 is not within 1 and 4095"),
    (evidence_of(nvml=message("NvmlReturn", code=1000)),
     "evidence[0].nvml.code: 1000 is not within 1 and 999"),
    (evidence_of(grpc=message("GrpcStatus", code=17)), "evidence[0].grpc.code: 17 is not within 1 and 16"),
    (evidence_of(http=message("HttpStatus", status=200)),
     "evidence[0].http.status: 200 is not within 400 and 599"),
    (evidence_of(driver_error=message("DriverReportedError", retry_after_s=-1)),
     "evidence[0].driver_error.retry_after_s: -1.0 is not within 0 and 86400"),
    *(
        (evidence_of(**{kind: message(message_name, **{name: "x" * 5000}, **rest)}),
         f"evidence[0].{kind}.{name}: 5000 bytes, limit 4096")
        for kind, message_name, name, rest in LONG
    ),
    # a report
    (report_of(step=0), "step: not set, or unknown to this agent; set STEP_PREPARE or STEP_UNPREPARE"),
    (report_of(step=3), "step: not set, or unknown to this agent; set STEP_PREPARE or STEP_UNPREPARE"),
    (report_of({}), "outcomes[0].claim: not set; every result needs its claim"),
    (report_of({"claim": claim("")}), "outcomes[0].claim.uid: is empty; set the claim's UID"),
    (report_of({"claim": claim("a")}, {"claim": claim("a")}),
     "outcomes[1].claim.uid: same as outcomes[0].claim.uid; list each claim once"),
    (report_of({"claim": claim("a"), "evidence": [TEXT]}),
     "outcomes[0].evidence: 1 entries, must be 0 unless failed is true"),
    # a declaration
    (sync_of(name="d"),
     "devices[0].part: not set, or unknown to this agent; set one of cpus, hugepages, memory, gpu, pci, nic, "
     "or checks"),
    (sync_of(name="d" * 64, **PART), "devices[0].name: 64 bytes, limit 63"),
    (sync_of(name="d", pool="p" * 254, **PART), "devices[0].pool: 254 bytes, limit 253"),
    (sync_of(name="d", lease_s=-1, **PART), "devices[0].lease_s: -1 is not within 0 and 86399"),
    # results of checks
    (results_of(check="c" * 64), "results[0].check: 64 bytes, limit 63"),
    (results_of(pool="p" * 254), "results[0].pool: 254 bytes, limit 253"),
    (results_of(device="d" * 64), "results[0].device: 64 bytes, limit 63"),
    (results_of(every_s=0.05), "results[0].every_s: 0.05 is not within 0.1 and 3600"),
    (results_of(lease_s=86_401), "results[0].lease_s: 86401.0 is not within 0 and 86400"),
    (results_of(age_s=-1), "results[0].age_s: -1.0 is not within 0 and 1000000000.0"),
    (results_of(raise_after=1001), "results[0].raise_after: 1001 is not within 0 and 1000"),
    (results_of(clear_after=-1), "results[0].clear_after: -1 is not within 0 and 1000"),
    (results_of(run=-1), f"results[0].run: -1 is not within 0 and {1 << 62}"),
    (results_of(no_result="x" * 4097), "results[0].no_result: 4097 bytes, limit 4096"),
    *(
        (results_of(finding=message("CheckFinding", **{name: "x" * (limit + 1)})),
         f"results[0].finding.{name}: {limit + 1} bytes, limit {limit}")
        for name, limit in (("code", 100), ("evidence", 4096), ("advice", 4096))
    ),
    # requests in evidence
    *(
        (evidence_of(driver_error=message("DriverReportedError", error_class=2, requests=["a", name])),
         f"evidence[0].driver_error.requests[1]: {shown} is not the name of a request, "
         "1 to 253 printable bytes")
        for name, shown in (("", "''"), ("a\nb", r"'a\nb'"), ("x" * 254, f"'{'x' * 64}'"))
    ),
]  # fmt: skip

TOO_MANY = [
    (check_of(*(claim(str(number)) for number in range(257))), "claims: 257 entries, limit 256"),
    (check_of(claim("a"), claim("b", *["d"] * 129)), "claims[1].devices: 129 entries, limit 128"),
    (message("ClassifyRequest", evidence=[TEXT] * 17), "evidence: 17 entries, limit 16"),
    (evidence_of(decode_error=message("DecodeError", requests=["r"] * 129)),
     "evidence[0].decode_error.requests: 129 entries, limit 128"),
    (report_of(*({"claim": claim(str(number))} for number in range(257))),
     "outcomes: 257 entries, limit 256"),
    (message("ReportPrepareRequest", step=1, blocked_uids=["u"] * 257),
     "blocked_uids: 257 entries, limit 256"),
    (report_of({"claim": claim("a"), "failed": True, "evidence": [TEXT] * 17}),
     "outcomes[0].evidence: 17 entries, limit 16"),
    (message("SyncDevicesRequest", devices=[message("DeclaredDevice")] * 4097),
     "devices: 4097 entries, limit 4096"),
    (sync_of(name="d", checks=["c"] * 9), "devices[0].checks: 9 entries, limit 8"),
    (message("ReportChecksRequest", results=[message("CheckResult")] * 4097),
     "results: 4097 entries, limit 4096"),
]  # fmt: skip


def refusal(request: Any) -> tuple[str, str]:
    """Return status and text of a refused request, which must have no effect."""
    handler = RecordingHandler()
    method = request.DESCRIPTOR.name.removesuffix("Request")
    with pytest.raises(GRPCError) as raised:
        call(method, request, handler)
    assert handler.calls == []
    return raised.value.status.name, raised.value.message or ""


@pytest.mark.parametrize(("request_", "text"), INVALID, ids=[item[1][:60] for item in INVALID])
def test_invalid_request_is_refused_with_place_and_limit(request_: Any, text: str) -> None:
    assert refusal(request_) == (grpc.StatusCode.INVALID_ARGUMENT.name, text)


def test_report_with_a_long_summary_keeps_its_class() -> None:
    error = message("DriverReportedError", error_class=3, device="gpu-0", summary="bank 3\n" + "ä" * 300)
    found = classify_evidence(
        evidence_given_for(message("Evidence", driver_error=error)), PrepareContext(ONE)
    )
    assert (found.error_class, found.health) == (ErrorClass.FAILED_DEVICE, Health.UNHEALTHY)
    assert found.summary == "bank 3 " + "ä" * 190 + "..."


@pytest.mark.parametrize(("request_", "text"), TOO_MANY, ids=[item[1] for item in TOO_MANY])
def test_too_many_entries_are_refused_with_the_number(request_: Any, text: str) -> None:
    assert refusal(request_) == (grpc.StatusCode.RESOURCE_EXHAUSTED.name, text)


def test_every_limit_has_a_case() -> None:
    tested = " ".join(text for _, text in INVALID + TOO_MANY)
    names = {name for limits in LIMITS.values() for name in limits}
    untested = {name for name in names if f"{name}: " not in tested}
    assert untested == {"request", "share_id"}, "tested with the other fields of a claim's device"
    assert len(set(LIMITS[v1.ClaimedDevice].values())) == 1


def test_largest_request_takes_little_memory() -> None:
    """An empty device is two bytes; the decoded device is over a hundred, and several requests are read at
    once.
    """
    dense = check_of(*(claim(str(number), *[""] * 128) for number in range(256)))
    for item in dense.claims:
        for device in item.devices:
            device.Clear()
    data = dense.SerializeToString()
    tracemalloc.start()
    try:
        assert len(requests.decode_check_claims(data, "d")) == 256
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16 << 20


@given(st.sampled_from(UNARY).flatmap(lambda name: messages(METHODS[name].input_type)))
def test_any_request_is_answered_or_refused(request: Any) -> None:
    handler = RecordingHandler()
    method = request.DESCRIPTOR.name.removesuffix("Request")
    refused, reply = None, None
    try:
        reply = call(method, request, handler)
    except GRPCError as error:
        refused = error
    if refused is not None:
        assert refused.status.name in {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
        assert refused.message
        assert handler.calls == []
    else:
        assert len(handler.calls) == 1
        if method in {"CheckClaims", "ReportPrepare"}:
            claims = request.claims if method == "CheckClaims" else [item.claim for item in request.outcomes]
            assert [item.uid for item in reply.answers] == [item.uid for item in claims]


# --- replies ------------------------------------------------------------------------------------------------


def test_verdict_is_encoded_with_all_fields() -> None:
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
        repair=Repair.REBOOT_NODE,
    )

    class FixedVerdict(RecordingHandler):
        def classify(self, claim: Claim, evidence: Any) -> PrepareVerdict:
            return verdict

    received = call("Classify", evidence_of(text="x"), FixedVerdict()).verdict
    assert (received.error_class, received.code, received.summary, received.advice) == (
        3,
        "gpu.lost",
        "is lost",
        "reset it",
    )
    assert received.text.startswith("[class=failed-device code=gpu.lost device=d/p/gpu-0 ")
    assert list(received.evidence) == ["NVML 15 (GPU_IS_LOST)"]
    assert (received.confidence, received.retry_after_s, received.count, received.first_s) == (
        0.9,
        5.0,
        3,
        1_700_000_000.5,
    )
    assert [(item.driver, item.pool, item.device) for item in received.devices] == [("d", "p", "gpu-0")]
    assert received.repair == v1.DeviceRepair.REBOOT_NODE


def test_texts_name_failures_at_other_drivers_of_the_pod() -> None:
    handler = RecordingHandler()
    failure = PrepareVerdict(ErrorClass.BAD_CONFIG, "nic.mtu", Scope.CLAIM, ClaimRef("ns", "n", "n"), "no")
    handler.elsewhere["a"] = [OtherDriverFailure("nic.example.com", failure)]
    handler.blocked_uids = {"a"}
    named = " Failing claims of the pod's other drivers: ns/n (nic.example.com bad-config nic.mtu)."
    outcome = {"claim": claim("a"), "failed": True}
    texts = [
        call("ReportPrepare", report_of(outcome, step=step), handler).answers[0].verdict.text
        for step in (v1.Step.PREPARE, v1.Step.UNPREPARE)
    ]
    texts.append(call("CheckClaims", check_of(claim("a")), handler).answers[0].verdict.text)
    assert [text.endswith(named) for text in texts] == [True, False, True]


def test_texts_name_claims_that_the_driver_did_not_try() -> None:
    failed = {"claim": claim("b"), "failed": True, "evidence": [message("Evidence", text="no link")]}
    both = [{**failed, "claim": claim("a")}, failed]
    handler = RecordingHandler()
    first = call("ReportPrepare", report_of(*both), handler).answers
    verdict = classify_evidence([ErrorText("no link")], PrepareContext(Claim("ns", "a", "a")))
    handler.recorded = [verdict, replace(verdict, claim=ClaimRef("ns", "c", "c"))]
    request = report_of(failed)
    request.blocked_uids.extend(["a", "b", "never-failed"])
    second = call("ReportPrepare", request, handler).answers
    assert [answer.uid for answer in second] == ["b", "a"]
    texts = {answer.uid: answer.verdict.text for answer in first}
    assert {answer.uid: answer.verdict.text for answer in second} == texts
    assert texts["a"].endswith("Other failing claims in this call: ns/b (unknown driver.error).")


def test_repairs_have_the_same_numbers_in_both_apis() -> None:
    assert {repair.name: number for repair, number in AGENT_REPAIRS.items()} == {
        repair.name: int(repair) for repair in v1.DeviceRepair
    }
    assert list(methods.REPAIRS) == list(Repair)


def test_reply_names_fewer_devices_to_stay_below_4_mib() -> None:
    devices = [ClaimDevice("r", "d" * 63, "p" * 253, f"{number:063d}") for number in range(128)]
    context = PrepareContext(Claim("ns", "c", "u", devices=tuple(devices)), {})
    verdict = classify_evidence([ErrorText("x" * 5000)], context)

    class FixedVerdict(RecordingHandler):
        def record_unprepares(self, ended: Any) -> list[PrepareVerdict | None]:
            return [replace(verdict, claim=item.claim.ref) for item in ended]

    outcomes = [{"claim": claim(f"{number:0253d}"), "failed": True} for number in range(256)]
    for count, named in [(1, 128), (32, 128), (33, 64), (256, 16)]:
        reply = call("ReportPrepare", report_of(*outcomes[:count], step=2), FixedVerdict())
        assert {len(item.verdict.devices) for item in reply.answers} == {named}
        assert reply.ByteSize() < 4 << 20
