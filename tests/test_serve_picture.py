"""A Report or an AgentStatus survives the wire unchanged, and Google's protobuf reads the same."""

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire.google import message_class
from wire.serving import at, device

from agent.model.health import Blame, Cause, DeviceHealth, Health, NotApplicable, Note, Severity
from agent.model.report import Report
from agent.model.snapshot import CoreStats
from agent.model.source import SourceSample, SourceState
from agent.model.status import AgentStatus, Subscribers, Tally
from agent.model.time import Instant
from agent.serve.agent_api.decode import report_of, status_of
from agent.serve.agent_api.encode import BLAMES, STATES, picture, status_reply
from agent.serve.grpc.codec import Codec
from agent.serve.grpc.gen.agent.drahealth import v1

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
COUNT = st.integers(0, (1 << 63) - 1)
SMALL = st.integers(0, 1 << 40)
INSTANT = st.builds(Instant, COUNT, st.floats(0, 1e12))
SEVERITY = st.sampled_from(Severity)
CAUSE = st.builds(Cause, TEXT, SEVERITY, st.sampled_from(Blame), TEXT, TEXT, INSTANT)
CORE = st.builds(CoreStats, *[SMALL] * len(CoreStats.__slots__))
SOURCE = st.builds(
    SourceSample,
    *(TEXT, st.sampled_from(SourceState), COUNT, COUNT, SMALL, TEXT, SMALL, st.booleans(), COUNT),
)
RULE = st.builds(NotApplicable, TEXT, TEXT, TEXT)


def few(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(strategy, max_size=3).map(tuple)


DEVICE = st.builds(
    DeviceHealth,
    *(TEXT, TEXT, TEXT, st.sampled_from(Health), SEVERITY, TEXT, INSTANT, INSTANT, SMALL, few(CAUSE)),
    few(st.tuples(TEXT, TEXT)),
    TEXT,
)
NOTE = st.builds(Note, TEXT, CAUSE, few(TEXT))
REPORT = st.builds(
    Report, TEXT, INSTANT, few(DEVICE), few(NOTE), few(RULE), few(RULE), few(SOURCE), CORE, SMALL
)
STATUS = st.builds(
    AgentStatus,
    *(TEXT, SMALL, st.floats(0, 1e12), st.floats(0, 1e9), SMALL, SMALL, SMALL, TEXT, INSTANT),
    *(st.integers(1, 1 << 40), few(st.builds(Tally, SEVERITY, SMALL)), few(SOURCE), CORE, SMALL),
    few(st.builds(Subscribers, TEXT, SMALL)),
)


def note(device: str) -> Note:
    cause = Cause("pod.oom", Severity.DEGRADED, Blame.WORKLOAD, "", "", at(1))
    return Note("pod a", cause, (device,))


def encoded(report: Report) -> bytes:
    return b"".join(picture(report))


@settings(max_examples=60, deadline=None)
@given(REPORT)
def test_a_report_is_the_same_after_the_wire(report: Report) -> None:
    assert report_of(Codec().decode(encoded(report), v1.Picture)) == report


@settings(max_examples=60, deadline=None)
@given(STATUS)
def test_a_status_is_the_same_after_the_wire(status: AgentStatus) -> None:
    assert status_of(Codec().decode(status_reply(status), v1.StatusReply)) == status


@settings(max_examples=60, deadline=None)
@given(REPORT)
def test_google_writes_the_same_bytes_of_a_picture(report: Report) -> None:
    data = encoded(report)
    assert message_class("drahealth.v1", "Picture").FromString(data).SerializeToString() == data


@settings(max_examples=60, deadline=None)
@given(STATUS)
def test_google_writes_the_same_bytes_of_a_status(status: AgentStatus) -> None:
    data = status_reply(status)
    assert message_class("drahealth.v1", "StatusReply").FromString(data).SerializeToString() == data


def test_a_status_before_the_first_report_says_so() -> None:
    status = AgentStatus("1", 2, 3.0, 4.0, 5, 6, 7, subscribers=(Subscribers("agent.sock", 0),))
    assert status_of(v1.StatusReply().parse(status_reply(status))) == status
    assert status.at is None


def test_what_is_no_unicode_is_told_all_the_same() -> None:
    report = Report("node-a", at(1), (device("a", message="\udcff is no text"),), (note("\udcff"),))
    read = message_class("drahealth.v1", "Picture").FromString(encoded(report))
    assert (read.devices[0].message, read.notes[0].devices) == ("? is no text", ["?"])


def test_google_reads_the_pieces_of_a_picture_as_one() -> None:
    cause = Cause(
        "cpu.offline", Severity.UNHEALTHY, Blame.HARDWARE, "CPU 1 is offline", "bring it back", at(2)
    )
    gpu = device("b")._replace(attributes=(("uuid", "GPU-1"), ("numaNode", "0")))
    report = Report("node-a", at(3), (device("a", causes=(cause,)), gpu), groups=7)
    picture = message_class("drahealth.v1", "Picture").FromString(encoded(report))
    assert [one.name for one in picture.devices] == ["a", "b"]
    assert (picture.node, picture.groups, picture.at.mono_ns) == ("node-a", 7, at(3).mono_ns)
    assert picture.devices[0].causes[0].evidence == "CPU 1 is offline"
    assert [(one.name, one.value) for one in picture.devices[1].attributes] == list(gpu.attributes)


def test_a_source_of_an_agent_that_did_not_know_better_is_vital() -> None:
    (source,) = report_of(v1.Picture(sources=[v1.Source(state=v1.SourceState.OK)])).sources
    assert (source.vital, source.limit_ns) == (True, 0)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (CoreStats.__slots__, v1.Core),
        (tuple(name.replace("vital", "dispensable") for name in SourceSample._fields), v1.Source),
        (Subscribers._fields, v1.Subscribers),
    ],
)
def test_no_field_is_forgotten(model: tuple[str, ...], message: type) -> None:
    assert set(model) == {field.name for field in fields(message)}


def test_the_enums_are_complete_and_mean_the_same() -> None:
    assert {int(one): one.name for one in Health} == {one.value: one.name for one in v1.Health}
    assert {int(one): one.name for one in Severity} == {one.value: one.name for one in v1.Severity}
    assert {one.name for one in Blame} | {"UNSPECIFIED"} == {one.name for one in v1.Blame}
    assert {one.name for one in SourceState} | {"UNSPECIFIED"} == {one.name for one in v1.SourceState}
    assert {blame.name: v1.Blame(number).name for blame, number in BLAMES.items()} == {
        b.name: b.name for b in Blame
    }
    assert {state.name: v1.SourceState(number).name for state, number in STATES.items()} == {
        state.name: state.name for state in SourceState
    }


@pytest.mark.parametrize(
    ("picture", "field"),
    [
        (
            v1.Picture(devices=[v1.Device(health=v1.Health(2), severity=v1.Severity.try_value(9))]),
            "severity is 9",
        ),
        (v1.Picture(devices=[v1.Device(health=v1.Health.try_value(7))]), "Device.health is 7"),
        (v1.Picture(notes=[v1.Note(cause=v1.Cause())]), "Cause.blame is 0"),
        (v1.Picture(sources=[v1.Source()]), "Source.state is 0"),
    ],
)
def test_a_number_that_we_do_not_know_is_an_error_that_names_it(picture: v1.Picture, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        report_of(Codec().decode(bytes(picture), v1.Picture))
