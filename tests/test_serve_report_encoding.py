"""Encoding of Report and AgentStatus: equal after decoding, and readable by Google's protobuf."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire.google import message_class
from wire.serving import at, device

from agent.model.cleared_faults import NO_LOGIN_UID, ClearedFault, ClearRefusal, ClearResult
from agent.model.health import (
    Blame,
    Cause,
    DeviceHealth,
    Health,
    NonDeviceCause,
    NotApplicable,
    Repair,
    Severity,
)
from agent.model.reading import SourceSample, SourceState
from agent.model.report import (
    AgentStatus,
    PartsStatus,
    RepairCount,
    Report,
    SeverityCount,
    SocketSubscriberCounts,
    StateFile,
)
from agent.model.snapshot import NativeCoreStats
from agent.model.time import Instant
from agent.serve.agent_api.client import decode_clear_reply, decode_report, decode_status
from agent.serve.agent_api.encode import (
    BLAMES,
    REPAIRS,
    STATES,
    encode_clear_reply,
    encode_report,
    encode_status,
)
from agent.serve.grpc.codec import Codec
from agent.serve.grpc.gen.agent.drahealth import v1

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
COUNT = st.integers(0, (1 << 63) - 1)
SMALL = st.integers(0, 1 << 40)
INSTANT = st.builds(Instant, COUNT, st.floats(0, 1e12))
SEVERITY = st.sampled_from(Severity)
REPAIR = st.sampled_from(Repair)
CAUSE = st.builds(Cause, TEXT, SEVERITY, st.sampled_from(Blame), TEXT, TEXT, INSTANT, repair=REPAIR)
CORE = st.builds(NativeCoreStats, *[SMALL] * len(NativeCoreStats.__slots__))
SOURCE = st.builds(
    SourceSample,
    *(TEXT, st.sampled_from(SourceState), COUNT, COUNT, SMALL, TEXT, SMALL, st.booleans(), COUNT),
)
RULE = st.builds(NotApplicable, TEXT, TEXT, TEXT)


def few_of(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(strategy, max_size=3).map(tuple)


DEVICE = st.builds(
    DeviceHealth,
    *(TEXT, TEXT, TEXT, st.sampled_from(Health), SEVERITY, TEXT, INSTANT, INSTANT, SMALL, few_of(CAUSE)),
    few_of(st.tuples(TEXT, TEXT)),
    TEXT,
)
CLEARED = st.builds(
    ClearedFault, TEXT, TEXT, st.floats(0, 1e12), SMALL, SMALL, st.integers(NO_LOGIN_UID, 1 << 32)
)
NOTE = st.builds(NonDeviceCause, TEXT, CAUSE, few_of(TEXT))
REPORT = st.builds(
    Report,
    *(TEXT, INSTANT, few_of(DEVICE), few_of(NOTE), few_of(RULE), few_of(RULE), few_of(SOURCE), CORE, SMALL),
    cleared=few_of(CLEARED),
)
STATUS = st.builds(
    AgentStatus,
    *(TEXT, SMALL, st.floats(0, 1e12), st.floats(0, 1e9), SMALL, SMALL, SMALL, TEXT, INSTANT),
    *(
        st.integers(1, 1 << 40),
        few_of(st.builds(SeverityCount, SEVERITY, SMALL)),
        few_of(SOURCE),
        CORE,
        SMALL,
    ),
    few_of(st.builds(SocketSubscriberCounts, TEXT, SMALL, SMALL, st.none() | SMALL, SMALL)),
    few_of(st.builds(RepairCount, REPAIR, SMALL)),
    st.builds(
        PartsStatus,
        *[st.none()] * 4,
        st.none() | SMALL,
        few_of(st.builds(StateFile, st.sampled_from(("faults", "history")), TEXT)),
    ),
)


def note(device: str) -> NonDeviceCause:
    cause = Cause("pod.oom", Severity.DEGRADED, Blame.WORKLOAD, "", "", at(1))
    return NonDeviceCause("pod a", cause, (device,))


def encode_whole(report: Report) -> bytes:
    return b"".join(encode_report(report))


@given(REPORT)
def test_decoded_report_equals_encoded_report(report: Report) -> None:
    assert decode_report(Codec().decode(encode_whole(report), v1.Report)) == report


@given(STATUS)
def test_decoded_status_equals_encoded_status(status: AgentStatus) -> None:
    assert decode_status(Codec().decode(encode_status(status), v1.StatusReply)) == status


@given(REPORT)
def test_google_protobuf_encodes_report_to_the_same_bytes(report: Report) -> None:
    data = encode_whole(report)
    assert message_class("drahealth.v1", "Report").FromString(data).SerializeToString() == data


@given(STATUS)
def test_google_protobuf_encodes_status_to_the_same_bytes(status: AgentStatus) -> None:
    data = encode_status(status)
    assert message_class("drahealth.v1", "StatusReply").FromString(data).SerializeToString() == data


def test_status_before_first_report_has_no_time() -> None:
    status = AgentStatus("1", 2, 3.0, 4.0, 5, 6, 7, subscribers=(SocketSubscriberCounts("agent.sock", 0),))
    assert decode_status(v1.StatusReply().parse(encode_status(status))) == status
    assert status.at is None


def test_invalid_unicode_is_replaced() -> None:
    report = Report("node-a", at(1), (device("a", message="\udcff is not a string"),), (note("\udcff"),))
    read = message_class("drahealth.v1", "Report").FromString(encode_whole(report))
    assert (read.devices[0].message, read.notes[0].devices) == ("? is not a string", ["?"])


def test_google_protobuf_reads_joined_chunks_as_one_report() -> None:
    cause = Cause(
        "cpu.offline", Severity.UNHEALTHY, Blame.HARDWARE, "CPU 1 is offline", "bring it back", at(2)
    )
    cause = replace(cause, repair=Repair.REBOOT_NODE)
    gpu = device("b")._replace(attributes=(("uuid", "GPU-1"), ("numaNode", "0")))
    report = Report("node-a", at(3), (device("a", causes=(cause,)), gpu), groups=7)
    message = message_class("drahealth.v1", "Report").FromString(encode_whole(report))
    assert [item.name for item in message.devices] == ["a", "b"]
    assert (message.node, message.groups, message.at.mono_ns) == ("node-a", 7, at(3).mono_ns)
    assert message.devices[0].causes[0].evidence == "CPU 1 is offline"
    assert message.devices[0].causes[0].repair == message.devices[0].repair == REPAIRS[Repair.REBOOT_NODE]
    assert message.devices[1].repair == REPAIRS[Repair.NONE] == 0
    assert [(item.name, item.value) for item in message.devices[1].attributes] == list(gpu.attributes)


def test_source_without_new_fields_is_vital() -> None:
    (source,) = decode_report(v1.Report(sources=[v1.Source(state=v1.SourceState.OK)])).sources
    assert (source.vital, source.limit_ns) == (True, 0)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (NativeCoreStats.__slots__, v1.Core),
        (tuple(name.replace("vital", "dispensable") for name in SourceSample._fields), v1.Source),
        (SocketSubscriberCounts._fields, v1.Subscribers),
    ],
)
def test_message_has_every_field_of_the_model(model: tuple[str, ...], message: type) -> None:
    assert set(model) == {field.name for field in fields(message)}


def test_enums_of_model_and_messages_agree() -> None:
    assert {int(item): item.name for item in Health} == {item.value: item.name for item in v1.Health}
    assert {int(item): item.name for item in Severity} == {item.value: item.name for item in v1.Severity}
    assert {item.name for item in Blame} | {"UNSPECIFIED"} == {item.name for item in v1.Blame}
    assert {item.name for item in SourceState} | {"UNSPECIFIED"} == {item.name for item in v1.SourceState}
    assert {blame.name: v1.Blame(number).name for blame, number in BLAMES.items()} == {
        blame.name: blame.name for blame in Blame
    }
    assert {repair.name: number for repair, number in REPAIRS.items()} == {
        item.name: item.value for item in v1.Repair
    }
    assert list(REPAIRS) == list(Repair)
    assert {state.name: v1.SourceState(number).name for state, number in STATES.items()} == {
        state.name: state.name for state in SourceState
    }


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (
            v1.Report(devices=[v1.Device(health=v1.Health(2), severity=v1.Severity.try_value(9))]),
            "severity: 9 is unknown",
        ),
        (v1.Report(devices=[v1.Device(health=v1.Health.try_value(7))]), "Device.health: 7 is unknown"),
        (v1.Report(notes=[v1.Note(cause=v1.Cause())]), "Cause.blame: 0 is unknown"),
        (
            v1.Report(notes=[v1.Note(cause=v1.Cause(blame=v1.Blame(1), repair=v1.Repair.try_value(99)))]),
            "Cause.repair: 99 is unknown",
        ),
        (v1.Report(sources=[v1.Source()]), "Source.state: 0 is unknown"),
    ],
)
def test_unknown_enum_value_raises_with_field_name(message: v1.Report, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        decode_report(Codec().decode(bytes(message), v1.Report))


@given(few_of(CLEARED), st.none() | st.sampled_from(ClearRefusal), TEXT)
def test_clear_reply_is_equal_after_decoding(
    cleared: tuple[ClearedFault, ...], refusal: ClearRefusal | None, reason: str
) -> None:
    result = ClearResult(0, cleared, refusal=refusal, reason=reason)
    assert decode_clear_reply(v1.ClearReply().parse(encode_clear_reply(result))) == result
