"""Checks of ``drahealth conform``: each verdict of each check, from records as values."""

import struct

import pytest
from conform_records import (
    BAD_1,
    BAD_2,
    CLAIM_FILES,
    DEVICES,
    GHOST,
    INFER,
    INFO,
    KIND,
    KUBELET_DIR,
    LATE,
    OK,
    SOCKET,
    TRAIN,
    UNIMPLEMENTED,
    WALL_S,
    both_versions,
    cdi_file,
    device,
    ended_stream,
    health_list,
    prepare_call,
    registration,
    session_record,
    session_with_claims,
    session_with_file,
    session_with_registrations,
    silent_stream,
    stream,
    unprepare_call,
    version_records,
)
from hypothesis import given
from hypothesis import strategies as st
from wire.google import message_class

from agent.conform.answer_decoders import DEVICES_LIMIT, FIELDS_LIMIT, decode_health_list
from agent.conform.check_table import CHECKS, run_checks
from agent.conform.kubelet.session import choose_driver_files
from agent.conform.outcomes import ITEMS_SHOWN, format_seconds, join_first, not_run, skipped
from agent.conform.session_record import (
    CdiFile,
    CdiSnapshot,
    FailedRegistrationRecord,
    PrepareCall,
    PrepareStage,
    RegistrationFile,
    ReopenedStream,
    SessionRecord,
    StoppedReader,
    StreamEnd,
    StreamRecord,
)
from agent.errors import UsageError

ZERO = device(health=0)
SICK = device(health=2)
LONG_PATH = "/" + "x" * 107
CUT_IN_TWO = ("x" * 1020 + "é" + "x" * 10).encode()


def session_reporting(**changes: object) -> SessionRecord:
    """Return the session of a driver that reports these values of one device in each list."""
    return session_record(
        versions=both_versions(*(health_list(at_s, device(**changes)) for at_s in (0.01, 10, 20, 30)))
    )


def with_messages(*messages: bytes, **changes: object) -> SessionRecord:
    """Return the session of a driver that reports one device with one message after the other."""
    lists = [
        health_list(10.0 * number, device(message=text, **changes)) for number, text in enumerate(messages)
    ]
    return session_record(versions=both_versions(*lists))


def reporting_at(*seconds: float, lease_s: int = 30, health: int = 1) -> SessionRecord:
    """Return the session of a driver that reports one device at these times."""
    return session_record(
        versions=both_versions(
            *(health_list(at_s, device(lease_s=lease_s, health=health)) for at_s in seconds)
        )
    )


def session_at_stage(stage: PrepareStage, *calls: PrepareCall) -> SessionRecord:
    """Return the session of a good driver with other calls of one stage."""
    return session_with_claims({stage: calls})


def first_prepare(call: PrepareCall) -> SessionRecord:
    return session_at_stage(PrepareStage.FIRST, call)


def session_returning(**changes: object) -> SessionRecord:
    """Return the session of a driver that returns the device of the claim ``infer`` with these changes."""
    [device_] = DEVICES[INFER.uid]
    return first_prepare(prepare_call(TRAIN, INFER, infer=(device_._replace(**changes),)))


LOST = LATE._replace(status="", text="connection lost")
REFUSED = LATE._replace(status="INTERNAL", text="no such claim")
WITHOUT_IDS = tuple(device_._replace(cdi_ids=()) for device_ in DEVICES[INFER.uid])


def refusals(stage: PrepareStage) -> list[tuple[SessionRecord, str, str]]:
    """Return cases of a claim that must be refused: a call that fails, and calls without an answer."""
    call = prepare_call(GHOST)
    return [
        (session_at_stage(stage, call._replace(result=REFUSED)), "pass", "INTERNAL: no such claim"),
        (
            session_at_stage(stage, call._replace(result=LATE)),
            "fail",
            "DEADLINE_EXCEEDED: no answer within 5 s",
        ),
        (session_at_stage(stage, call._replace(result=LOST)), "fail", "no status: connection lost"),
        (session_at_stage(stage, call._replace(answers=())), "fail", "no answer for this claim"),
        (session_at_stage(stage, call._replace(answers=(), decode_error="x")), "fail", "is not valid: x"),
    ]


def bad_replies(**replies: object) -> SessionRecord:
    """Return the session of a driver that answers so in both calls with bad claims."""
    return session_at_stage(PrepareStage.BAD, *[prepare_call(BAD_1, BAD_2, TRAIN, INFER, **replies)] * 2)


def bad_calls(**changes: object) -> SessionRecord:
    call = prepare_call(BAD_1, BAD_2, TRAIN, INFER)._replace(**changes)
    return session_at_stage(PrepareStage.BAD, call, call)


AT_LIMIT = StreamEnd(9, "", "more than is recorded", limit="64 MiB")


ENDED_AT_10_S = ended_stream("UNAVAILABLE", "restart", health_list(0.01), at_s=10.0)


def refused_at(at_s: float) -> StreamRecord:
    return ended_stream("UNAVAILABLE", "not yet", at_s=at_s)._replace(opened_s=at_s - 0.01)


def with_lists_at(*times: float) -> SessionRecord:
    return session_record(versions=both_versions(*map(health_list, times)))


def with_leaver(leaver: StreamRecord, *streams: StreamRecord) -> SessionRecord:
    return session_record(second_kubelet=leaver, versions=version_records(streams or None, streams or None))


def with_stopped_reader(
    *lists: float, others: tuple[float, ...], ended: StreamEnd | None = None
) -> SessionRecord:
    """Return a session whose reader stops at 1 s and resumes at 24 s, with its lists and those of the
    others.
    """
    reader = stream(*map(health_list, lists), opened_s=0.5, ended=ended)
    return session_record(
        stopped_reader=StoppedReader(reader, 1.0, 24.0), versions=both_versions(*map(health_list, others))
    )


def with_endpoint(**changes: object) -> SessionRecord:
    reported = registration()
    assert reported.endpoint is not None
    return session_with_registrations(reported._replace(endpoint=reported.endpoint._replace(**changes)))


def with_info(**changes: object) -> SessionRecord:
    """Return the session of a driver whose answer to GetInfo has these changes."""
    return session_with_file(info=INFO._replace(**changes))


def with_file_name(file: str, **changes: object) -> SessionRecord:
    return session_with_file(path=f"{KUBELET_DIR}/plugins_registry/{file}", **changes)


EMPTY = session_record(
    versions=both_versions(*(health_list(at_s)._replace(devices=(), size=0) for at_s in (0.01, 10, 20, 30)))
)
ZERO_OTHER = device("gpu-1", health=0)
OTHER = stream(health_list(1.01, device("gpu-0")), opened_s=1.0, closed_s=6.0)
LATER = stream(health_list(3.2), opened_s=1.0, closed_s=3.3)
SECOND = registration()._replace(
    file=registration(path=f"{KUBELET_DIR}/plugins_registry/gpu.example.com-uid-reg.sock").file
)

CASES: dict[str, list[tuple[SessionRecord, str, str]]] = {
    "socket.path": [
        (session_record(socket=LONG_PATH, socket_size=108), "fail", "108 bytes, a socket's limit is 107"),
        (session_record(socket=""), "not run", "registration.get_info"),
    ],
    "health.v1": [
        (
            session_record(versions=version_records([UNIMPLEMENTED])),
            "warn",
            "not served (UNIMPLEMENTED); v1alpha1 is",
        ),
        (
            session_record(versions=version_records([UNIMPLEMENTED], [UNIMPLEMENTED])),
            "fail",
            "and neither is v1alpha1",
        ),
        (session_record(versions=version_records([silent_stream()])), "not run", "health.first_list"),
        (session_record(versions=()), "not run", "takes no connection"),
    ],
    "health.v1alpha1": [
        (session_record(versions=version_records(None, [UNIMPLEMENTED])), "fail", "; v1 is"),
        (
            session_record(versions=version_records([UNIMPLEMENTED], [UNIMPLEMENTED])),
            "fail",
            "and neither is v1",
        ),
    ],
    "health.unavailable": [
        (
            session_record(
                versions=version_records(
                    [ended_stream("UNAVAILABLE", "not yet", at_s=0.1), stream(opened_s=5.1)]
                )
            ),
            "warn",
            "v1: UNAVAILABLE: not yet; ready 9.9 s later",
        ),
        (
            session_record(versions=version_records([ended_stream("INTERNAL", "bug")] * 2)),
            "fail",
            "INTERNAL: bug; opened again 0 times, never ready",
        ),
        (
            session_record(versions=version_records([ENDED_AT_10_S, refused_at(15), stream(opened_s=20)])),
            "warn",
            "v1: UNAVAILABLE: not yet; ready 5.0 s later",
        ),
        (
            session_record(versions=version_records([ENDED_AT_10_S, *map(refused_at, (15, 20, 25))])),
            "fail",
            "v1: UNAVAILABLE: not yet; opened again 2 times, never ready",
        ),
        (session_record(versions=version_records([UNIMPLEMENTED])), "pass", ""),
        (session_record(versions=version_records(*[[UNIMPLEMENTED]] * 2)), "not run", "neither version is"),
        (
            session_record(
                versions=version_records([ended_stream("", "a message of 5 bytes")._replace(goaway="x")])
            ),
            "pass",
            "",
        ),
    ],
    "health.unknown_method": [
        (session_record(unknown_methods=(LATE,)), "warn", "call: DEADLINE_EXCEEDED: no answer within 5 s"),
        (session_record(unknown_methods=(OK,)), "warn", "call: OK"),
        (session_record(unknown_methods=()), "not run", "no method was called"),
    ],
    "health.first_list": [
        (
            session_record(versions=version_records([stream(health_list(1.5), health_list(11))])),
            "warn",
            "v1: after 1.5 s",
        ),
        (
            session_record(versions=version_records(None, [stream(health_list(5.5))])),
            "fail",
            "v1alpha1: after 5.5 s",
        ),
        (session_record(versions=version_records([silent_stream()])), "fail", "v1: no list in 40 s"),
        (
            session_record(versions=version_records(*[[UNIMPLEMENTED]] * 2)),
            "not run",
            "no stream stayed open",
        ),
    ],
    "health.whole": [
        (
            session_record(versions=both_versions(health_list(0.1, device()), health_list(2.2))),
            "warn",
            "node-a/gpu-1: 2.1 s after",
        ),
        (
            session_record(versions=both_versions(health_list(0.1, device()), health_list(0.3))),
            "pass",
            "2 devices at once",
        ),
    ],
    "health.devices": [
        (EMPTY, "warn", "no device in 4 lists"),
        (
            session_record(
                versions=both_versions(health_list(0.1)._replace(devices=(), decode_error="list: ends"))
            ),
            "not run",
            "see health.decode",
        ),
        (session_record(), "pass", "2 devices"),
    ],
    "health.known": [
        (session_reporting(health=0), "fail", "1 device, all Unknown for 40 s"),
        (
            session_record(versions=both_versions(health_list(0.1, device("gpu-0"), ZERO_OTHER))),
            "warn",
            "node-a/gpu-1: Unknown for 40 s",
        ),
        (
            session_record(versions=both_versions(health_list(0.1, ZERO), health_list(9, SICK))),
            "pass",
            "1 device",
        ),
        (EMPTY, "not run", "no device"),
    ],
    "health.heartbeat": [
        (reporting_at(0.1, 31), "fail", "node-a/gpu-0: 31 s without a report, its lease is 30 s"),
        (reporting_at(0.1), "fail", "40 s without a report"),
        (reporting_at(0.1, 9, 18, 27, 36, lease_s=0), "pass", "again after 9.0 s at most"),
        (reporting_at(0.1, 20, 30), "warn", "20 s without a report"),
        (reporting_at(0.1, 15.4, 30.5), "pass", "again after 15 s at most"),
        (reporting_at(0.1, 17.9, 35.7), "pass", "again after 18 s at most"),
        (reporting_at(0.1, 18.2, 35.7), "warn", "18 s without a report"),
        (reporting_at(0.1, lease_s=60), "not run", "--for 65s is long enough"),
        (reporting_at(0.1, lease_s=86_400), "not run", "longer than the longest --for"),
        (reporting_at(0.1, health=0), "not run", "every device is Unknown"),
        (
            session_record(
                versions=both_versions(
                    health_list(0.1, device(), device("gpu-1", lease_s=60)), *map(health_list, (9, 18, 27))
                )
            ),
            "pass",
            "",
        ),
    ],
    "health.lease": [
        (session_reporting(lease_s=0), "pass", "0 is 30 s"),
        (session_reporting(lease_s=-5), "warn", "node-a/gpu-0: -5 s"),
        (session_reporting(lease_s=2), "warn", "2 s"),
        (session_reporting(lease_s=3), "pass", "3 s"),
        (session_reporting(lease_s=86_400), "pass", "86,400 s"),
        (session_reporting(lease_s=86_401), "warn", "86,401 s"),
        (session_reporting(lease_s=9_223_372_037), "fail", "more than 9,223,372,036 s"),
        (
            session_record(versions=both_versions(health_list(0.1)._replace(devices=()))),
            "not run",
            "no device",
        ),
    ],
    "health.lease.stable": [
        (
            session_record(
                versions=both_versions(
                    health_list(0.1, device(lease_s=30)), health_list(9, device(lease_s=31))
                )
            ),
            "warn",
            "node-a/gpu-0: 30 s, then 31 s",
        ),
        (reporting_at(0.1), "not run", "no device was reported twice"),
        (
            session_record(
                versions=both_versions(health_list(0.1, device(lease_s=3)), health_list(9, device(lease_s=4)))
            ),
            "pass",
            "",
        ),
    ],
    "health.text.stable": [
        (with_messages(b"71 C", b"72 C"), "fail", "only numbers change, '71 C', then '72 C'"),
        (with_messages(b"71 C", b"72 C", b"72 C", b"73 C"), "fail", "only numbers change"),
        (with_messages(b"2 pages", b"1 pages", b"1 pages"), "warn", "a number changed once"),
        (with_messages(b"a", b"b", b"c"), "warn", "another text in every list, 'a', then 'b'"),
        (with_messages(b"a", b"b", b"b"), "pass", ""),
        (reporting_at(0.1), "not run", "no device was reported twice"),
        (
            session_record(
                versions=both_versions(
                    health_list(0.1, device()),
                    *(health_list(at_s, SICK._replace(message=b"x")) for at_s in (9, 18)),
                )
            ),
            "pass",
            "",
        ),
    ],
    "health.message.size": [
        (session_reporting(message=b"x" * 1024), "pass", "1,024 bytes at most"),
        (session_reporting(message=b"x" * 1025), "warn", "node-a/gpu-0: 1,025 bytes"),
        (session_reporting(message=CUT_IN_TWO), "fail", "truncation at 1021 bytes splits a character"),
    ],
    "health.utf8": [
        (session_reporting(message=b"\xff"), "fail", "node-a/gpu-0: its message is not UTF-8"),
        (session_reporting(pool=b"\xff"), "fail", "\\xff/gpu-0: its pool is not UTF-8"),
        (session_reporting(name=b"\xff"), "fail", "node-a/\\xff: its name is not UTF-8"),
    ],
    "health.decode": [
        (
            session_record(
                versions=both_versions(
                    health_list(0.1), health_list(9)._replace(devices=(), decode_error="list: ends")
                )
            ),
            "fail",
            "list 2 of 88 bytes: list: ends",
        ),
        (EMPTY, "not run", "every list is empty"),
    ],
    "health.size": [
        (session_record(versions=both_versions(health_list(0.1, size=1 << 20))), "pass", "1,048,576 bytes"),
        (
            session_record(versions=both_versions(health_list(0.1, size=(1 << 20) + 1))),
            "warn",
            "1,048,577 bytes",
        ),
        (
            session_record(
                versions=version_records(
                    [StreamRecord(0, (), StreamEnd(1, "", "", too_large_bytes=5_000_000), 1)]
                )
            ),
            "fail",
            "v1: 5,000,000 bytes, the kubelet reads 4,194,304",
        ),
        (
            session_record(versions=both_versions(health_list(0.1, is_truncated=True))),
            "warn",
            "more than 2 devices",
        ),
        (EMPTY, "not run", "every list is empty"),
        (session_record(versions=version_records(*[[UNIMPLEMENTED]] * 2)), "not run", "no list"),
    ],
    "health.rate": [
        (session_record(), "pass", "4 lists in 40 s"),
        (with_lists_at(*(10 + number / 21 for number in range(22))), "warn", "21 lists in a second"),
        (with_lists_at(*(10 + number / 20 for number in range(22))), "pass", "22 lists in 40 s"),
        (with_lists_at(*(10 + number / 1000 for number in range(700))), "warn", "699 lists in a second"),
        (
            session_record(
                versions=both_versions(
                    *(health_list(number / 1000, device(f"gpu-{number}")) for number in range(30)),
                    *(health_list(10 + number / 1000, device(f"gpu-{number}")) for number in range(21)),
                )
            ),
            "warn",
            "21 lists in a second",
        ),
        (
            session_record(
                versions=both_versions(
                    *(health_list(number / 1000, device(f"gpu-{number}")) for number in range(30))
                )
            ),
            "pass",
            "30 lists in 40 s",
        ),
        (
            session_record(versions=both_versions(health_list(0.1), ended=AT_LIMIT, closed_s=9)),
            "not run",
            "the session records 64 MiB of a stream, which it reached after 9.0 s: try a shorter --for",
        ),
        (
            session_record(
                versions=both_versions(health_list(0.1), ended=StreamEnd(9, "", "", flooded=True))
            ),
            "fail",
            "1 lists in 40 s, over the limit",
        ),
    ],
    "health.duplicates": [
        (
            session_record(versions=both_versions(health_list(0.1, device(), device()))),
            "warn",
            "node-a/gpu-0: listed twice, with equal values",
        ),
        (
            session_record(versions=both_versions(health_list(0.1, device(), SICK))),
            "fail",
            "node-a/gpu-0: listed twice, with different values",
        ),
    ],
    "health.names": [
        (session_reporting(has_identifier=False, pool=b"", name=b""), "fail", "an entry without a device"),
        (session_reporting(pool=b""), "fail", "(empty)/gpu-0: its pool is empty"),
        (session_reporting(pool=b"a" * 64), "pass", "1 device"),
        (session_reporting(pool=b"a" * 254), "warn", "the pool is not a path of DNS subdomains"),
        (session_reporting(name=b""), "fail", "node-a/(empty): its name is empty"),
        (session_reporting(name=b"GPU_0"), "warn", "node-a/GPU_0: the name is not a DNS label"),
        (session_reporting(name=b"x" * 64), "warn", "the name is not a DNS label"),
        (session_reporting(pool=b"rack 1"), "warn", "rack 1/gpu-0: the pool is not a path"),
        (session_reporting(pool=b"rack-1.example.com/node-a"), "pass", "1 device"),
    ],
    "health.enum": [
        (session_reporting(health=3), "warn", "node-a/gpu-0: 3"),
        (session_reporting(health=-1), "warn", "-1"),
    ],
    "health.time": [
        (session_reporting(updated_s=0), "warn", "node-a/gpu-0: 0, which is not a time"),
        (session_reporting(updated_s=int(WALL_S * 1000)), "warn", "which is not in seconds"),
        (session_reporting(updated_s=int(WALL_S) + 3600), "warn", "ahead"),
        (session_reporting(updated_s=1), "pass", ""),
    ],
    "health.time.fresh": [
        (
            session_reporting(updated_s=int(WALL_S) - 3600),
            "fail",
            "node-a/gpu-0: last_updated_time is 3,600 s old, its lease is 30 s",
        ),
        (session_reporting(updated_s=int(WALL_S), lease_s=20), "fail", "is 30 s old, its lease is 20 s"),
        (session_reporting(updated_s=int(WALL_S)), "warn", "is 20 s old, its lease is 30 s"),
        (session_reporting(updated_s=int(WALL_S), lease_s=60), "pass", "30 s old at most"),
        (session_record(), "pass", "10 ms old at most"),
        (session_reporting(updated_s=0), "not run", "no Healthy or Unhealthy device"),
        (session_reporting(health=0, updated_s=1), "not run", "no Healthy or Unhealthy device"),
        (EMPTY, "not run", "no device"),
    ],
    "health.ends": [
        (
            session_record(versions=version_records([ended_stream("OK", "", health_list(0.1))])),
            "fail",
            "v1: OK, after 3.0 s",
        ),
        (
            session_record(
                versions=version_records(None, [ended_stream("INTERNAL", "x" * 9999, health_list(0.1))])
            ),
            "fail",
            "v1alpha1: INTERNAL: xxx",
        ),
        (
            session_record(
                versions=both_versions(health_list(0.1), ended=StreamEnd(9, "", "", flooded=True))
            ),
            "not run",
            "something else ended the streams",
        ),
    ],
    "health.goaway": [
        (
            session_record(versions=both_versions(goaway="NO_ERROR max_age")),
            "warn",
            "GOAWAY: NO_ERROR max_age, on a connection",
        ),
        (
            session_record(
                versions=both_versions(
                    health_list(0.1), ended=StreamEnd(9, "", ""), goaway="NO_ERROR max_age"
                )
            ),
            "fail",
            "its stream ended",
        ),
    ],
    "health.versions_agree": [
        (
            session_record(versions=version_records(None, [stream(health_list(0.1, device()))])),
            "fail",
            "node-a/gpu-1: v1 only",
        ),
        (
            session_record(versions=version_records(None, [stream(health_list(0.1, SICK, device("gpu-1")))])),
            "fail",
            "node-a/gpu-0: health 1 for v1, 2 for v1alpha1",
        ),
        (
            session_record(
                versions=version_records(
                    None, [stream(health_list(0.1, device(message=b"x"), device("gpu-1")))]
                )
            ),
            "warn",
            "one message for v1, another for v1alpha1",
        ),
        (
            session_record(
                versions=version_records([stream(health_list(0.1, device()), health_list(39.5, SICK))])
            ),
            "fail",
            "gpu-1",
        ),
        (
            session_record(
                versions=version_records([stream(health_list(0.1), health_list(39.5, SICK, device("gpu-1")))])
            ),
            "pass",
            "2 devices alike",
        ),
        (session_record(versions=version_records([UNIMPLEMENTED])), "not run", "no list was received of v1"),
    ],
    "health.reconnect": [
        (
            session_record(reopenings=(ReopenedStream("cancel", OTHER),)),
            "fail",
            "after a cancel: node-a/gpu-1 missing after 5.0 s",
        ),
        (
            session_record(reopenings=(ReopenedStream("close", LATER),)),
            "warn",
            "on a new connection: complete after 2.2 s",
        ),
        (
            session_record(
                reopenings=(
                    ReopenedStream("close", ended_stream("INTERNAL", "again")._replace(opened_s=1.0)),
                )
            ),
            "fail",
            "node-a/gpu-0; node-a/gpu-1 missing after 2.0 s, ended: INTERNAL: again",
        ),
        (session_record(reopenings=()), "not run", "health.first_list"),
        # a device whose lease has ended need not be reported
        (
            session_record(
                versions=both_versions(health_list(0.1, device("gpu-0"), device("gone", lease_s=3))),
                reopenings=(ReopenedStream("close", OTHER),),
            ),
            "pass",
            "1 time",
        ),
    ],
    "health.two_kubelets": [
        (
            with_leaver(stream(health_list(0.2, device()), opened_s=0.1, closed_s=18)),
            "fail",
            "node-a/gpu-1: the first only",
        ),
        (
            with_leaver(stream(health_list(0.2, SICK, device("gpu-1")), opened_s=0.1, closed_s=18)),
            "fail",
            "node-a/gpu-0: health 1 for the first, 2 for the second",
        ),
        (
            with_leaver(silent_stream(18)._replace(opened_s=0.1)),
            "fail",
            "the second stream received nothing in 18 s",
        ),
        (with_leaver(silent_stream(0.5)._replace(opened_s=0.1)), "not run", "too short"),
        (
            with_leaver(
                stream(opened_s=0.1, closed_s=18),
                ended_stream("OK", "", *map(health_list, (0.1, 9)), at_s=18.1),
            ),
            "fail",
            "the first stream ended 100 ms after another closed",
        ),
        (
            with_leaver(
                stream(opened_s=0.1, closed_s=18), ended_stream("OK", "", health_list(0.01), at_s=0.2)
            ),
            "fail",
            "the first stream ended 100 ms after another opened",
        ),
        (
            with_leaver(
                stream(opened_s=0.1, closed_s=18), ended_stream("OK", "", health_list(0.01), at_s=30)
            ),
            "not run",
            "a stream ended: see health.ends, health.goaway and health.rate",
        ),
        (
            with_leaver(stream(opened_s=0.1, closed_s=9, ended=AT_LIMIT)),
            "not run",
            "a stream ended: see health.ends, health.goaway and health.rate",
        ),
        (
            with_leaver(ended_stream("INTERNAL", "one at a time")._replace(opened_s=0.1)),
            "fail",
            "the second stream ended: INTERNAL: one at a time",
        ),
        (
            with_leaver(
                stream(health_list(0.2, device(lease_s=3)), opened_s=0.1, closed_s=9),
                stream(*(health_list(at_s, device(lease_s=3)) for at_s in (0.1, 2, 4, 6, 8))),
            ),
            "fail",
            "the first stream received nothing in the 31 s since the second closed",
        ),
        (session_record(second_kubelet=None), "not run", "no two streams"),
        (
            with_leaver(
                stream(health_list(0.2), opened_s=0.1, closed_s=18),
                stream(*(health_list(at_s, device(lease_s=60), device("gpu-1")) for at_s in (0.1, 9))),
            ),
            "not run",
            "no list in the 22 s since the second closed: try --for 120s",
        ),
    ],
    "health.stopped_reader": [
        (
            with_stopped_reader(0.6, 24.5, others=(0.1, 0.5, 1, 1.5, 24.1, 24.6)),
            "fail",
            "nothing for 23 s, until the stopped stream",
        ),
        (with_stopped_reader(0.6, 24.1, others=(0.1, 24.1)), "not run", "try --for 120s"),
        (
            with_stopped_reader(0.6, others=(0.1, 10, 20, 30)),
            "fail",
            "nothing after it resumed reading; the others received 1 list",
        ),
        (
            session_record(
                stopped_reader=StoppedReader(
                    stream(health_list(0.6), health_list(30, SICK, device("gpu-1")), opened_s=0.5), 1, 24
                )
            ),
            "fail",
            "node-a/gpu-0: health 1 for the others, 2 for this one",
        ),
        (
            with_stopped_reader(0.6, others=(0.1, 10), ended=StreamEnd(9, "ABORTED", "slow")),
            "warn",
            "was ended, ABORTED: slow",
        ),
        (with_stopped_reader(0.6, others=(0.1, 10), ended=AT_LIMIT), "not run", "a stream ended"),
        (
            session_record(versions=version_records([ended_stream("OK", "", health_list(0.01), at_s=5)])),
            "not run",
            "a stream ended",
        ),
        (session_record(stopped_reader=None), "not run", "its stream ended, or received no list"),
        (
            with_stopped_reader(0.6, 24.1, others=(0.1, 24.1))._replace(window_s=300),
            "not run",
            "try --for 600s",
        ),
        (
            with_stopped_reader(0.6, 24.1, others=(0.1, 24.1))._replace(window_s=600),
            "not run",
            "not every other stream received a list in 23 s: longer than the longest --for",
        ),
    ],
    "registration.socket": [
        (session_with_registrations(), "fail", "no socket of this driver"),
        (with_file_name("gpu.example.com-reg.sock", is_socket=False), "fail", "is not a socket"),
        (with_file_name(".gpu.example.com-reg.sock"), "fail", "begins with a dot"),
        (with_file_name(f"{'x' * 90}-reg.sock"), "fail", "a socket's limit is 107"),
        (with_file_name("plugin.sock"), "warn", "plugin.sock: the usual name is gpu.example.com-reg.sock"),
        (with_file_name("gpu.example.com-5c0a1b2c-reg.sock"), "pass", ""),
        (with_file_name("dra-AAAAAAAAAAAAAAAAAAAAAA-reg.sock"), "pass", ""),
        (session_record(directory=None), "skipped", "--plugin-dir"),
    ],
    "registration.get_info": [
        (session_with_file(get_info=OK._replace(took_s=0.6)), "warn", "answered after 600 ms"),
        (session_with_file(get_info=OK._replace(took_s=1.1)), "fail", "answered after 1.1 s"),
        (
            session_with_file(get_info=LATE, info=None),
            "fail",
            "DEADLINE_EXCEEDED: no answer within 5 s, after 5.0 s",
        ),
        (session_with_file(get_info=None, info=None), "not run", "no socket to call"),
    ],
    "registration.type": [
        (with_info(type="DevicePlugin"), "fail", "'DevicePlugin'"),
        (session_with_file(info=None), "not run", "no socket has answered"),
    ],
    "registration.name": [
        (with_info(name="Gpu.example.com"), "warn", "'Gpu.example.com' is not in lower case"),
        (with_info(name="gpu_0.example.com"), "fail", "not a DNS subdomain"),
        (with_info(name=""), "fail", "not a DNS subdomain"),
        (with_info(name=f"{'x' * 60}.com"), "fail", "64 bytes, limit 63"),
        (with_info(name="gpu"), "warn", "'gpu' has no domain"),
    ],
    "registration.endpoint": [
        (with_endpoint(is_absolute=False, path="dra.sock"), "fail", "'dra.sock' is not an absolute path"),
        (with_endpoint(size=108), "fail", "108 bytes, a socket's limit is 107"),
        (with_endpoint(is_in_kubelet_dir=False), "fail", f"is not below {KUBELET_DIR}"),
        (with_endpoint(error="Connection refused"), "fail", f"{SOCKET}: Connection refused"),
        (with_endpoint(path="/var/lib/kubelet/a.sock"), "warn", "not the socket that was tested"),
    ],
    "registration.versions": [
        (with_info(versions=()), "fail", "no DRAPlugin service: nothing"),
        (with_info(versions=("v1.DRAResourceHealth",)), "fail", "no DRAPlugin service: v1.DRAResourceHealth"),
        (with_info(versions=("v1beta1.DRAPlugin", "v1.DRAPlugin")), "warn", "v1beta1.DRAPlugin is the first"),
        (with_info(versions=("v1beta1.DRAPlugin",)), "warn", "v1beta1.DRAPlugin is the first"),
        (with_info(versions=("v1.DRAPlugin", "1.0.0")), "warn", "unknown to kubelets: 1.0.0"),
    ],
    "registration.health": [
        (with_info(versions=("v1.DRAPlugin",)), "fail", "served but not advertised"),
        (with_info(versions=("v1.DRAPlugin", "v1alpha1.DRAResourceHealth")), "warn", "alone is advertised"),
        (
            session_record(versions=version_records([UNIMPLEMENTED])),
            "fail",
            "v1.DRAResourceHealth: advertised but not served (UNIMPLEMENTED)",
        ),
        (
            session_record(versions=version_records(*[[UNIMPLEMENTED]] * 2)),
            "warn",
            "v1.DRAResourceHealth, v1alpha1.DRAResourceHealth: advertised but not served",
        ),
        (
            with_info(versions=("v1.DRAPlugin",))._replace(
                versions=version_records([UNIMPLEMENTED], [UNIMPLEMENTED])
            ),
            "warn",
            "none is advertised",
        ),
        (
            session_record(versions=version_records([silent_stream()], [silent_stream()])),
            "not run",
            "no health service has answered",
        ),
    ],
    "registration.prepare": [
        (
            session_with_registrations(registration(prepared=(("v1.DRAPlugin", LATE),))),
            "fail",
            "v1.DRAPlugin: DEADLINE_EXCEEDED",
        ),
        (session_with_registrations(registration(prepared=())), "not run", "no endpoint"),
    ],
    "registration.notify": [
        (session_with_registrations(registration(notified=LATE)), "fail", "DEADLINE_EXCEEDED"),
        (session_with_registrations(registration(notified=None)), "skipped", "--no-notify"),
    ],
    "registration.again": [
        (
            session_with_registrations(
                registration(second_file=registration(INFO._replace(endpoint="/x")).file)
            ),
            "fail",
            "DRAPlugin gpu.example.com /x",
        ),
        (
            session_with_registrations(registration(second_file=RegistrationFile("", True, 0, LATE, None))),
            "fail",
            "DEADLINE_EXCEEDED",
        ),
    ],
    "registration.several": [
        (session_with_registrations(registration(), SECOND), "fail", f"all advertise {SOCKET}"),
        (
            session_with_registrations(
                registration(), SECOND._replace(endpoint=registration().endpoint._replace(path="/other.sock"))
            ),
            "warn",
            "2 endpoints, as in a rolling update",
        ),
    ],
    "registration.refused": [
        (
            session_with_registrations(registration(refused=FailedRegistrationRecord(LATE, OK, OK))),
            "pass",
            "it can be registered afterwards",
        ),
        (
            session_with_registrations(registration(refused=FailedRegistrationRecord(OK, LATE, OK))),
            "fail",
            "GetInfo after the refusal: DEADLINE_EXCEEDED",
        ),
        (
            session_with_registrations(registration(refused=FailedRegistrationRecord(OK, OK, LATE))),
            "fail",
            "registration after the refusal: DEADLINE",
        ),
        (session_record(), "skipped", "--refuse"),
    ],
    "prepare.first": [
        (session_with_claims(), "pass", "2 claims with v1.DRAPlugin"),
        (
            first_prepare(prepare_call(TRAIN, INFER, train="no such card")),
            "fail",
            "team-a/train: no such card",
        ),
        (first_prepare(prepare_call(TRAIN)._replace(result=LATE)), "fail", "team-a/train: DEADLINE_EXCEEDED"),
        (first_prepare(prepare_call(TRAIN)._replace(claims=(TRAIN, INFER))), "fail", "infer: no answer"),
        (session_record(), "skipped", "--prepare"),
        (
            session_with_claims(omitted={PrepareStage.FIRST: not_run("the service socket is away")}),
            "not run",
            "away",
        ),
    ],
    "prepare.answers": [
        (session_with_claims(), "pass", "one answer for each claim"),
        (
            session_at_stage(PrepareStage.AGAIN, prepare_call(TRAIN)._replace(claims=(TRAIN, INFER))),
            "fail",
            "again: no answer for team-a/infer",
        ),
        (
            session_at_stage(PrepareStage.ALONE, prepare_call(TRAIN, GHOST)._replace(claims=(TRAIN,))),
            "fail",
            "alone: answer for 'uid-ghost', which was not requested",
        ),
        (
            session_at_stage(PrepareStage.ALONE, prepare_call(TRAIN, TRAIN)._replace(claims=(TRAIN,))),
            "fail",
            "several answers for uid-train",
        ),
        (
            session_at_stage(
                PrepareStage.UNPREPARED, unprepare_call(TRAIN)._replace(decode_error="claim 0: not UTF-8")
            ),
            "fail",
            "unprepared: claim 0: not UTF-8",
        ),
    ],
    "prepare.devices": [
        (session_with_claims(), "pass", "3 devices, as allocated"),
        (session_returning(requests=("one", "one/large")), "pass", "3 devices"),
        (
            session_returning(requests=("one/large",)),
            "fail",
            "team-a/infer: node-a/gpu-1 has subrequest 'one/large', but containers name 'one'",
        ),
        (session_returning(requests=()), "pass", "3 devices"),
        (
            session_returning(requests=("two",)),
            "fail",
            "team-a/infer: node-a/gpu-1 is not allocated to request 'two'",
        ),
        (session_returning(pool="node-b"), "fail", "team-a/infer: node-b/gpu-1 is not allocated to it"),
        (
            first_prepare(prepare_call(TRAIN, INFER, infer=())),
            "warn",
            "team-a/infer: node-a/gpu-1 is allocated and was not returned",
        ),
    ],
    "prepare.health": [
        (session_with_claims(), "pass", "3 devices in the health lists"),
        (session_returning(name="gpu-7"), "fail", "node-a/gpu-7 is in no health list"),
        (
            session_with_claims()._replace(
                versions=(), reopenings=(), second_kubelet=None, stopped_reader=None
            ),
            "not run",
            "no device was reported",
        ),
    ],
    "prepare.first_cdi_id": [
        (session_with_claims(), "pass", "3 ids"),
        (
            session_returning(cdi_ids=(f"{KIND}=train-0",)),
            "warn",
            "node-a/gpu-0; node-a/gpu-1 share example.com/gpu=train-0",
        ),
        (session_returning(cdi_ids=(f"{KIND}=train-1",)), "pass", "2 ids"),
        (first_prepare(prepare_call(TRAIN, INFER, train=(), infer=())), "pass", "no CDI ids"),
    ],
    "prepare.cdi_ids": [
        (session_with_claims(), "pass", "3 ids in CDI files"),
        (
            session_with_claims(cdi_prepared=CdiSnapshot((cdi_file("train-0", "train-1"),))),
            "fail",
            "no CDI file defines example.com/gpu=infer-1",
        ),
        (session_returning(cdi_ids=("gpu-1",)), "fail", "'gpu-1' has no ="),
        (
            session_with_claims(cdi_prepared=CdiSnapshot((), "directory /cdi: No such file or directory")),
            "not run",
            "/cdi: No such file or directory; see --cdi-dir",
        ),
        (first_prepare(prepare_call(TRAIN, INFER, train=(), infer=())), "pass", "no CDI ids"),
    ],
    "prepare.cdi_files": [
        (session_with_claims(), "pass", "1 CDI file"),
        (
            session_with_claims(cdi_prepared=CdiSnapshot((cdi_file("train-0", name="x"),))),
            "fail",
            "/var/run/cdi/gpu.json: name: is not a field of CDI",
        ),
        (
            session_with_claims(
                cdi_prepared=CdiSnapshot((CdiFile("/cdi/a.json", None, "is not valid JSON"),))
            ),
            "fail",
            "/cdi/a.json: is not valid JSON",
        ),
        (session_with_claims(cdi_prepared=CdiSnapshot()), "not run", "see prepare.cdi_ids"),
    ],
    "prepare.again": [
        (session_with_claims(), "pass", "the same answer"),
        (
            session_at_stage(PrepareStage.AGAIN, prepare_call(TRAIN, INFER, infer=DEVICES[TRAIN.uid][:1])),
            "fail",
            "team-a/infer: node-a/gpu-0 example.com/gpu=train-0, was node-a/gpu-1 example.com/gpu=infer-1",
        ),
        (
            session_at_stage(PrepareStage.AGAIN, prepare_call(TRAIN, INFER, train=DEVICES[TRAIN.uid][::-1])),
            "pass",
            "the same answer",
        ),
        (
            session_at_stage(PrepareStage.AGAIN, prepare_call(TRAIN, INFER, infer="is prepared")),
            "fail",
            "is prepared",
        ),
    ],
    "prepare.second_pod": [
        (session_with_claims(), "pass", "the same answer in 2 calls"),
        (
            session_at_stage(PrepareStage.ALONE, prepare_call(TRAIN, train=())),
            "fail",
            "team-a/train: no device, was",
        ),
    ],
    "prepare.two_calls": [
        (session_with_claims(), "pass", "both calls"),
        (
            session_at_stage(
                PrepareStage.AT_ONCE, prepare_call(TRAIN, INFER), prepare_call(TRAIN, INFER, infer="busy")
            ),
            "fail",
            "team-a/infer: busy",
        ),
    ],
    "prepare.missing_claim": [
        (session_with_claims(), "pass", "no claim of this UID"),
        (
            session_at_stage(PrepareStage.MISSING, prepare_call(GHOST, ghost=())),
            "fail",
            "prepared without an error",
        ),
        *refusals(PrepareStage.MISSING),
    ],
    "prepare.other_uid": [
        (session_with_claims(), "pass", "no claim of this UID"),
        (
            session_at_stage(PrepareStage.OTHER_UID, prepare_call(GHOST, ghost=())),
            "fail",
            "prepared without an error",
        ),
        *refusals(PrepareStage.OTHER_UID),
    ],
    "prepare.bad_claim": [
        (session_with_claims(), "pass", "errors for 2 claims, none for the others"),
        (bad_calls(result=REFUSED), "warn", "the whole call failed with INTERNAL: no such claim"),
        (bad_calls(result=LATE), "fail", "the whole call failed with DEADLINE_EXCEEDED"),
        (bad_calls(result=LOST), "fail", "the whole call failed with no status: connection lost"),
        (
            session_at_stage(PrepareStage.BAD, *(prepare_call(BAD_1, TRAIN, INFER),) * 2),
            "fail",
            "team-a/bad-2: no answer for this claim",
        ),
        (bad_replies(infer="not now"), "fail", "team-a/infer: not now"),
        (bad_replies(bad_1=()), "fail", "team-a/bad-1: no error"),
    ],
    "prepare.rollback": [
        (session_with_claims(), "pass", "nothing was left"),
        (
            session_with_claims(
                cdi_after_bad=CdiSnapshot((*CLAIM_FILES.files, cdi_file("bad-1", path="/cdi/bad.json")))
            ),
            "fail",
            "left after the failure: /cdi/bad.json; example.com/gpu=bad-1",
        ),
        (session_with_claims(cdi_after_bad=CdiSnapshot((), "directory /cdi: gone")), "not run", "gone"),
        (session_with_claims(cdi_before_bad=CdiSnapshot((), "gone")), "not run", "gone; see --cdi-dir"),
    ],
    "prepare.errors.stable": [
        (session_with_claims(), "pass", "the same text"),
        (
            session_at_stage(
                PrepareStage.BAD,
                prepare_call(BAD_1, bad_1="attempt 1"),
                prepare_call(BAD_1, bad_1="attempt 2"),
            ),
            "fail",
            "team-a/bad-1: 'attempt 2', was 'attempt 1'",
        ),
        (bad_replies(bad_1=(), bad_2=()), "not run", "see prepare.bad_claim"),
        (bad_calls(result=LOST), "not run", "see prepare.bad_claim"),
    ],
    "prepare.errors.text": [
        (session_with_claims(), "pass", "6 errors"),
        (bad_replies(bad_1="x" * 1025), "warn", "1,025 bytes, limit 1,024"),
        (bad_replies(bad_1="two\nlines"), "warn", "line breaks or control characters: 'two\\nlines'"),
    ],
    "prepare.errors.names": [
        (session_with_claims(), "pass", "each error names the others"),
        (bad_replies(bad_1="wrong"), "warn", "the error of team-a/bad-1 does not name team-a/bad-2"),
        (bad_calls(result=LATE), "not run", "see prepare.bad_claim"),
        (session_with_claims(bad_claims=(BAD_1,)), "skipped", "two claims in --bad-claims"),
    ],
    "prepare.deadline": [
        (session_with_claims(), "pass", "answered after 10 ms at most"),
        (
            session_at_stage(
                PrepareStage.AGAIN, prepare_call(TRAIN)._replace(result=OK._replace(took_s=11.0))
            ),
            "warn",
            "again: answered after 11 s",
        ),
        (
            session_at_stage(
                PrepareStage.MISSING, prepare_call(GHOST)._replace(result=OK._replace(took_s=28.0))
            ),
            "pass",
            "answered after 28 s at most",
        ),
        (
            session_at_stage(
                PrepareStage.UNPREPARED, unprepare_call(TRAIN)._replace(result=LATE._replace(took_s=45.0))
            ),
            "fail",
            "unprepared: no answer within 45 s",
        ),
    ],
    "prepare.restart": [
        (session_with_claims(), "pass", "the same answer"),
        (
            session_at_stage(PrepareStage.RESTARTED, prepare_call(TRAIN, train="lost")),
            "fail",
            "team-a/train: lost",
        ),
    ],
    "prepare.reboot": [
        (session_with_claims(), "pass", "3 ids in CDI files"),
        (session_with_claims(cdi_rebooted=CdiSnapshot()), "fail", "no CDI file defines"),
        (
            session_at_stage(PrepareStage.REBOOTED, prepare_call(TRAIN, INFER, infer=())),
            "fail",
            "team-a/infer: no device, was node-a/gpu-1 example.com/gpu=infer-1",
        ),
        (
            session_at_stage(PrepareStage.REBOOTED, prepare_call(TRAIN, INFER, infer=WITHOUT_IDS)),
            "fail",
            "team-a/infer: node-a/gpu-1, was node-a/gpu-1 example.com/gpu=infer-1",
        ),
        (
            session_with_claims(
                {PrepareStage.REBOOTED: (prepare_call(TRAIN, train="lost"),)},
                cdi_rebooted=CdiSnapshot((), "gone"),
            ),
            "fail",
            "team-a/train: lost",
        ),
    ],
    "prepare.after_unprepare": [
        (session_with_claims(), "pass", "3 ids in CDI files"),
        (
            session_at_stage(PrepareStage.RELEASED, prepare_call(TRAIN, INFER, infer=())),
            "fail",
            "team-a/infer: no dev",
        ),
        (
            session_at_stage(PrepareStage.RELEASED, prepare_call(TRAIN, INFER, infer=WITHOUT_IDS)),
            "fail",
            "team-a/infer: node-a/gpu-1, was node-a/gpu-1 example.com/gpu=infer-1",
        ),
        (session_with_claims(cdi_released=CdiSnapshot()), "fail", "no CDI file defines"),
        (session_with_claims(cdi_released=CdiSnapshot((), "gone")), "not run", "gone; see --cdi-dir"),
        (session_with_claims(cdi_prepared=CdiSnapshot()), "not run", "see prepare.cdi_ids"),
        (
            session_at_stage(PrepareStage.RELEASED, prepare_call(TRAIN, train="was released")),
            "fail",
            "was released",
        ),
    ],
    "unprepare.all": [
        (session_with_claims(), "pass", "2 claims"),
        (
            session_at_stage(PrepareStage.UNPREPARED, unprepare_call(TRAIN, error="busy")),
            "fail",
            "team-a/train: busy",
        ),
    ],
    "unprepare.again": [
        (session_with_claims(), "pass", "no error"),
        (
            session_at_stage(PrepareStage.UNPREPARED_AGAIN, unprepare_call(TRAIN, error="not prepared")),
            "fail",
            "not p",
        ),
    ],
    "unprepare.unknown": [
        (session_with_claims(), "pass", "no error"),
        (
            session_at_stage(PrepareStage.UNKNOWN, unprepare_call(GHOST, error="never prepared")),
            "fail",
            "never prepared",
        ),
    ],
    "unprepare.cdi": [
        (session_with_claims(), "pass", "3 ids gone"),
        (
            session_with_claims(cdi_unprepared=CdiSnapshot((cdi_file("train-0"),))),
            "fail",
            "still defined: example.com/gpu=train-0",
        ),
        (
            session_with_claims(cdi_before=CLAIM_FILES, cdi_unprepared=CLAIM_FILES),
            "pass",
            "0 ids gone",
        ),
        (session_with_claims(cdi_unprepared=CdiSnapshot((), "directory /cdi: gone")), "not run", "gone"),
    ],
    "unprepare.lost_device": [
        (session_with_claims(), "pass", "no error"),
        (
            session_at_stage(PrepareStage.LOST_DEVICE, unprepare_call(TRAIN, error="no device")),
            "fail",
            "no device",
        ),
        (
            session_with_claims(omitted={PrepareStage.LOST_DEVICE: skipped("only with --device-command")}),
            "skipped",
            "--device-command",
        ),
    ],
    "unprepare.deleted_claim": [
        (session_with_claims(), "pass", "no error"),
        (
            session_at_stage(PrepareStage.DELETED_CLAIM, unprepare_call(TRAIN, error="not found")),
            "fail",
            "not found",
        ),
    ],
}


@pytest.mark.parametrize(
    ("code", "session", "verdict", "text"),
    [
        pytest.param(code, *case, id=f"{code}-{number}")
        for code, cases in CASES.items()
        for number, case in enumerate(cases)
    ],
)
def test_check_returns_verdict_and_observation(code, session, verdict, text):
    (result,) = [check for check in run_checks(session) if check.check.code == code]
    assert (result.verdict, text in result.observation) == (verdict, True), result.observation


def test_good_driver_passes_all_checks_that_run():
    assert {result.check.code: result.verdict for result in run_checks(session_with_claims())} == {
        check.code: "skipped" if check.code == "registration.refused" else "pass" for check in CHECKS
    }


def test_every_check_has_a_case_that_warns_or_fails():
    assert list(CASES) == [check.code for check in CHECKS]
    for code, cases in CASES.items():
        assert {verdict for _, verdict, _ in cases} & {"warn", "fail"}, code


def test_empty_session_passes_no_check():
    nothing = session_record(
        socket="",
        versions=(),
        second_kubelet=None,
        stopped_reader=None,
        reopenings=(),
        unknown_methods=(),
        directory=None,
    )
    assert {result.verdict for result in run_checks(nothing)} == {"not run", "skipped"}


def test_session_without_device_passes_no_check_of_devices():
    results = {result.check.code: result.verdict for result in run_checks(EMPTY)}
    passed = {code for code, verdict in results.items() if verdict == "pass" and code.startswith("health.")}
    assert passed == {
        "health.v1",
        "health.v1alpha1",
        "health.unavailable",
        "health.unknown_method",
        "health.first_list",
        "health.rate",
        "health.ends",
        "health.goaway",
    }


def test_every_check_has_unique_code_and_all_texts():
    assert len({check.code for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        assert all((check.title, check.method, check.why, check.advice))
        assert [text.endswith(".") for text in (check.title, check.method, check.why, check.advice)] == [
            False,
            True,
            True,
            False,
        ]


def test_other_version_is_evaluated_if_main_version_is_good():
    lists = [health_list(at_s, device(message=b"\xff")) for at_s in (0.1, 10)]
    results = {
        check.check.code: check
        for check in run_checks(session_record(versions=version_records(None, [stream(*lists)])))
    }
    assert results["health.utf8"].observation == "v1alpha1: node-a/gpu-0: its message is not UTF-8"


def test_listed_names_the_first_texts_and_counts_the_rest():
    assert join_first(["a", "a", "b"]) == "a; b"
    assert join_first(map(str, range(ITEMS_SHOWN + 2))) == "0; 1; 2; and 2 more"


def test_observation_names_file_if_there_are_several_registrations():
    slow = registration(notified=LATE)
    (result,) = [
        check
        for check in run_checks(session_with_registrations(slow, SECOND))
        if check.check.code == "registration.notify"
    ]
    assert result.observation.startswith("gpu.example.com-reg.sock: DEADLINE_EXCEEDED")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0012, "1 ms"), (0.9996, "1.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (1234.5, "1,234 s")],
)
def test_seconds_formats_duration_with_significant_digits(value, text):
    assert format_seconds(value) == text


# --- reading ------------------------------------------------------------------------------------------------

ENTRY = st.builds(
    device,
    st.from_regex(r"[a-z]{1,8}", fullmatch=True),
    health=st.integers(-(1 << 31), (1 << 31) - 1),
    updated_s=st.integers(-(1 << 63), (1 << 63) - 1),
    lease_s=st.integers(-(1 << 63), (1 << 63) - 1),
    message=st.text().map(str.encode),
)


@given(st.lists(ENTRY, max_size=5))
def test_read_list_returns_what_google_protobuf_wrote(devices):
    message = message_class("v1", "NodeWatchResourcesResponse")()
    for reported in devices:
        message.devices.add(
            device={"pool_name": reported.pool.decode(), "device_name": reported.name.decode()},
            health=reported.health,
            last_updated_time=reported.updated_s,
            health_check_timeout_seconds=reported.lease_s,
            message=reported.message.decode(),
        )
    read = decode_health_list(message.SerializeToString(), 1.0, {})
    assert read.devices == tuple(devices)
    assert (read.decode_error, read.is_truncated) == ("", False)


@given(st.binary(max_size=64) | st.binary(max_size=32).map(lambda data: b"\x0a" + varint(len(data)) + data))
def test_read_list_accepts_only_what_google_protobuf_accepts(data):
    read = decode_health_list(data, 1.0, {})
    texts = [text for device in read.devices for text in (device.pool, device.name, device.message)]
    if not read.decode_error and all(text.isascii() for text in texts):
        google = message_class("v1", "NodeWatchResourcesResponse").FromString(data)
        assert len(google.devices) == len(read.devices)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x0a", "list: message ends inside a varint"),
        (b"\x0a\x05ab", "list: field 1 ends 3 bytes after the message of 4"),
        (b"\x08\x01", "list: field 1 has wire type 0, must be 2"),
        (b"\x0b", "list: field 1 has wire type 3, must be 2"),
        (b"\x13", "list: field 2 has wire type 3, which is not valid"),
        (b"\x00", "list: field number 0 is not valid"),
        (b"\x0a\x02\x12\x00", "device 0: field 2 has wire type 2, must be 0"),
        (b"\x0a\x04\x0a\x02\x08\x00", "device 0: identifier: field 1 has wire type 0, must be 2"),
        (b"\xff" * 11, "list: varint is longer than 5 bytes"),
    ],
)
def test_read_list_invalid_bytes_is_broken_with_place(data, text):
    assert decode_health_list(data, 1.0, {}).decode_error == text


def test_read_list_keeps_entries_without_device_or_utf8():
    read = decode_health_list(b"\x0a\x00" + b"\x0a\x05\x0a\x03\x0a\x01\xff", 1.0, {})
    assert [(device.has_identifier, device.pool, device.name) for device in read.devices] == [
        (False, b"", b""),
        (True, b"\xff", b""),
    ]


def test_read_list_equal_entries_share_one_object():
    known: dict[bytes, object] = {}
    entry = b"\x0a\x02\x10\x01"
    (reported,), (other,) = (decode_health_list(entry, at_s, known).devices for at_s in (1.0, 2.0))
    assert reported is other


def test_read_list_above_limits_is_cut():
    many = decode_health_list(b"\x0a\x00" * (DEVICES_LIMIT + 1), 1.0, {})
    assert (len(many.devices), many.is_truncated, many.decode_error) == (DEVICES_LIMIT, True, "")
    unknown = decode_health_list(b"\x78\x00" * (FIELDS_LIMIT + 1), 1.0, {})
    assert (unknown.devices, unknown.is_truncated) == ((), True)
    inside = b"\x78\x00" * (FIELDS_LIMIT + 1)
    assert decode_health_list(b"\x0a" + varint(len(inside)) + inside, 1.0, {}).is_truncated


def varint(value: int) -> bytes:
    more = []
    while value > 0x7F:
        more.append(value & 0x7F | 0x80)
        value >>= 7
    return struct.pack("B" * (len(more) + 1), *more, value)


# --- choice of the driver -----------------------------------------------------------------------------------


def plugin(name: str, kind: str = "DRAPlugin", endpoint: str = "", file: str = "") -> RegistrationFile:
    """Return the registration file of a plugin."""
    path = f"/registry/{file or f'{name}-reg.sock'}"
    return RegistrationFile(path, True, 1, OK, INFO._replace(type=kind, name=name, endpoint=endpoint))


def silent_file(file: str) -> RegistrationFile:
    return RegistrationFile(f"/registry/{file}", True, 1, LATE, None)


GPU, NIC, DISK = plugin("gpu.example.com"), plugin("nic.example.com"), plugin("disk.example.com", "CSIPlugin")


def chosen_paths(*found: RegistrationFile, socket: str = "", driver: str = "") -> list[str]:
    return [
        file.path.removeprefix("/registry/")
        for file in choose_driver_files(found, socket, driver, "/registry")
    ]


def test_choose_returns_the_only_dra_driver():
    assert chosen_paths(DISK, GPU, silent_file("disk.example.com-reg.sock")) == ["gpu.example.com-reg.sock"]


def test_choose_includes_silent_socket_named_like_the_driver():
    assert chosen_paths(GPU, silent_file(".gpu.example.com-old-reg.sock")) == [
        "gpu.example.com-reg.sock",
        ".gpu.example.com-old-reg.sock",
    ]


def test_choose_selects_driver_by_name_or_endpoint():
    assert chosen_paths(GPU, NIC, driver="nic.example.com") == ["nic.example.com-reg.sock"]
    other = plugin("other.example.com", endpoint="/other.sock")
    assert chosen_paths(GPU, other, socket="/other.sock") == ["other.example.com-reg.sock"]


def test_choose_without_dra_driver_returns_all_sockets():
    files = [
        silent_file(name)._replace(is_socket=False, get_info=None) for name in ("notes.txt", "file.sock")
    ]
    assert chosen_paths(DISK, silent_file("x-reg.sock"), silent_file("no-suffix"), *files) == [
        "disk.example.com-reg.sock",
        "x-reg.sock",
        "no-suffix",
        "file.sock",
    ]


def test_choose_several_plugins_of_other_types_raises_usage_error():
    tape = plugin("tape.example.com", "CSIPlugin", endpoint="/tape.sock")
    with pytest.raises(UsageError, match=r"no DRA driver, .* 'disk.example.com' \(CSIPlugin\), 'tape\.ex"):
        chosen_paths(DISK, tape, silent_file("x-reg.sock"))
    assert chosen_paths(DISK, tape, driver="tape.example.com") == ["tape.example.com-reg.sock"]
    assert chosen_paths(DISK, tape, socket="/tape.sock") == ["tape.example.com-reg.sock"]


def test_choose_several_or_unknown_drivers_raises_usage_error():
    with pytest.raises(UsageError, match=r"--driver: 'gpu\.example\.com', 'nic\.example\.com'"):
        chosen_paths(GPU, NIC)
    with pytest.raises(
        UsageError, match=r"no driver 'gpu\.exampel\.com'; did you mean 'gpu\.example\.com'\?"
    ):
        chosen_paths(GPU, NIC, driver="gpu.exampel.com")
    with pytest.raises(UsageError, match=r"there are: none"):
        chosen_paths(DISK, driver="gpu.example.com")


def test_names_that_others_choose_cannot_move_the_cursor():
    with pytest.raises(UsageError) as raised:
        chosen_paths(GPU, plugin("\x1b[2J"))
    assert "\x1b" not in str(raised.value)
