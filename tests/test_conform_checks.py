"""The judges of ``drahealth conform``, on paper: each verdict of each check, from values."""

import struct

import pytest
from conform_paper import (
    INFO,
    KUBELET_DIR,
    LATE,
    OK,
    SOCKET,
    UNIMPLEMENTED,
    WALL_S,
    both,
    device,
    ended,
    heard,
    introduced,
    observed,
    registered,
    registration,
    silent,
    stream,
    watches,
)
from hypothesis import given
from hypothesis import strategies as st
from wire.google import message_class

from agent.conform.choice import choose
from agent.conform.observed import Introduction, Observed, Refusal, Reopening, Stopped, Stream, StreamEnd
from agent.conform.reading import DEVICES_LIMIT, FIELDS_LIMIT, read_list
from agent.conform.results import judge
from agent.conform.table import CHECKS
from agent.conform.verdicts import SHOWN, listed, seconds
from agent.errors import UsageError

ZERO = device(health=0)
SICK = device(health=2)
LONG_PATH = "/" + "x" * 107
CUT_IN_TWO = ("x" * 1020 + "é" + "x" * 10).encode()


def told(**changes: object) -> Observed:
    """A driver that tells this of one device, in each list."""
    return observed(watches=both(*(heard(at_s, device(**changes)) for at_s in (0.01, 10, 20, 30))))


def telling(*messages: bytes, **changes: object) -> Observed:
    """A driver that tells of one device with these messages, one after the other."""
    lists = [heard(10.0 * number, device(message=text, **changes)) for number, text in enumerate(messages)]
    return observed(watches=both(*lists))


def at(*seconds: float, lease_s: int = 30, health: int = 1) -> Observed:
    """A driver that tells of one device at these times."""
    return observed(watches=both(*(heard(at_s, device(lease_s=lease_s, health=health)) for at_s in seconds)))


def leaving(leaver: Stream, *streams: Stream) -> Observed:
    return observed(leaver=leaver, watches=watches(streams or None, streams or None))


def unread(*lists: float, others: tuple[float, ...], ended: StreamEnd | None = None) -> Observed:
    """A reader that stops at 1 s and reads again at 24 s, what it hears, and what the others do."""
    mine = stream(*map(heard, lists), opened_s=0.5, ended=ended)
    return observed(stopped=Stopped(mine, 1.0, 24.0), watches=both(*map(heard, others)))


def endpoint(**changes: object) -> Observed:
    one = registration()
    assert one.endpoint is not None
    return registered(one._replace(endpoint=one.endpoint._replace(**changes)))


def said(**changes: object) -> Observed:
    """What it says of itself has these changes."""
    return introduced(info=INFO._replace(**changes))


def named(file: str, **changes: object) -> Observed:
    return introduced(path=f"{KUBELET_DIR}/plugins_registry/{file}", **changes)


OTHER = stream(heard(1.01, device("gpu-0")), opened_s=1.0, closed_s=6.0)
LATER = stream(heard(3.2), opened_s=1.0, closed_s=3.3)
SECOND = registration()._replace(
    introduction=registration(
        path=f"{KUBELET_DIR}/plugins_registry/gpu.example.com-uid-reg.sock"
    ).introduction
)

CASES: dict[str, list[tuple[Observed, str, str]]] = {
    "socket.path": [
        (observed(socket=LONG_PATH, socket_size=108), "fail", "108 bytes, a socket's limit is 107"),
        (observed(socket=""), "not run", "registration.get_info"),
    ],
    "health.v1": [
        (observed(watches=watches([UNIMPLEMENTED])), "warn", "v1alpha1 is not"),
        (observed(watches=watches([UNIMPLEMENTED], [UNIMPLEMENTED])), "fail", "and so is v1alpha1"),
        (observed(watches=watches([silent()])), "not run", "health.first_list"),
        (observed(watches=()), "not run", "takes no connection"),
    ],
    "health.v1alpha1": [
        (observed(watches=watches(None, [UNIMPLEMENTED])), "fail", "v1 is not"),
        (observed(watches=watches([UNIMPLEMENTED], [UNIMPLEMENTED])), "fail", "and so is v1"),
    ],
    "health.unavailable": [
        (
            observed(watches=watches([ended("UNAVAILABLE", "not yet", at_s=0.1), stream(opened_s=5.1)])),
            "warn",
            "v1: UNAVAILABLE: not yet; ready 9.9 s later",
        ),
        (observed(watches=watches([ended("INTERNAL", "bug")] * 2)), "fail", "INTERNAL: bug; opened 2 times"),
        (observed(watches=watches([UNIMPLEMENTED])), "pass", ""),
        (observed(watches=watches([ended("", "a message of 5 bytes")._replace(goaway="x")])), "pass", ""),
    ],
    "health.unknown_method": [
        (observed(unknown=(LATE,)), "warn", "call: DEADLINE_EXCEEDED: no answer within 5 s"),
        (observed(unknown=(OK,)), "warn", "call: OK"),
    ],
    "health.first_list": [
        (observed(watches=watches([stream(heard(1.5), heard(11))])), "warn", "v1: after 1.5 s"),
        (observed(watches=watches(None, [stream(heard(5.5))])), "fail", "v1alpha1: after 5.5 s"),
        (observed(watches=watches([silent()])), "fail", "v1: none in 40 s"),
        (observed(watches=watches(*[[UNIMPLEMENTED]] * 2)), "not run", "no stream stayed open"),
    ],
    "health.whole": [
        (observed(watches=both(heard(0.1, device()), heard(2.2))), "warn", "node-a/gpu-1: 2.1 s after"),
        (observed(watches=both(heard(0.1, device()), heard(0.3))), "pass", "2 devices at once"),
    ],
    "health.heartbeat": [
        (at(0.1, 31), "fail", "node-a/gpu-0: 31 s without a word, its lease is 30 s"),
        (at(0.1), "fail", "40 s without a word"),
        (at(0.1, 9, 18, 27, 36, lease_s=0), "pass", "again after 9.0 s at most"),
        (at(0.1, 20, 30), "warn", "20 s without a word"),
        (at(0.1, lease_s=60), "not run", "--for 65s would do"),
        (at(0.1, lease_s=86_400), "not run", "nobody waits so long"),
        (at(0.1, health=0), "not run", "every device is Unknown"),
        (
            observed(
                watches=both(heard(0.1, device(), device("gpu-1", lease_s=60)), *map(heard, (9, 18, 27)))
            ),
            "pass",
            "",
        ),
    ],
    "health.lease": [
        (told(lease_s=0), "pass", "0 is 30 s"),
        (told(lease_s=-5), "warn", "node-a/gpu-0: -5 s"),
        (told(lease_s=2), "warn", "2 s"),
        (told(lease_s=3), "pass", "3 s"),
        (told(lease_s=86_400), "pass", "86,400 s"),
        (told(lease_s=86_401), "warn", "86,401 s"),
        (told(lease_s=9_223_372_037), "fail", "more than 9,223,372,036 s"),
        (observed(watches=both(heard(0.1)._replace(devices=()))), "not run", "no device"),
    ],
    "health.lease.stable": [
        (
            observed(watches=both(heard(0.1, device(lease_s=30)), heard(9, device(lease_s=31)))),
            "warn",
            "node-a/gpu-0: 30 s, then 31 s",
        ),
        (observed(watches=both(heard(0.1, device(lease_s=3)), heard(9, device(lease_s=4)))), "pass", ""),
    ],
    "health.text.stable": [
        (telling(b"71 C", b"72 C"), "fail", "only numbers change, '71 C', then '72 C'"),
        (telling(b"71 C", b"72 C", b"72 C", b"73 C"), "fail", "only numbers change"),
        (telling(b"2 pages", b"1 pages", b"1 pages"), "warn", "a number changed once"),
        (telling(b"a", b"b", b"c"), "warn", "another text in every list, 'a', then 'b'"),
        (telling(b"a", b"b", b"b"), "pass", ""),
        (observed(watches=both(heard(0.1, device()), heard(9, SICK._replace(message=b"x")))), "pass", ""),
    ],
    "health.message.size": [
        (told(message=b"x" * 1024), "pass", "1,024 bytes at most"),
        (told(message=b"x" * 1025), "warn", "node-a/gpu-0: 1,025 bytes"),
        (told(message=CUT_IN_TWO), "fail", "the cut at 1021 splits a character"),
    ],
    "health.utf8": [
        (told(message=b"\xff"), "fail", "node-a/gpu-0: its message is no UTF-8"),
        (told(pool=b"\xff"), "fail", "\\xff/gpu-0: its pool is no UTF-8"),
        (told(name=b"\xff"), "fail", "node-a/\\xff: its name is no UTF-8"),
    ],
    "health.decode": [
        (
            observed(watches=both(heard(0.1), heard(9)._replace(devices=(), broken="list: ends"))),
            "fail",
            "list 2 of 88 bytes: list: ends",
        ),
    ],
    "health.size": [
        (observed(watches=both(heard(0.1, size=1 << 20))), "pass", "1,048,576 bytes"),
        (observed(watches=both(heard(0.1, size=(1 << 20) + 1))), "warn", "1,048,577 bytes"),
        (
            observed(watches=watches([Stream(0, (), StreamEnd(1, "", "", too_large=5_000_000), 1)])),
            "fail",
            "v1: 5,000,000 bytes, the kubelet reads 4,194,304",
        ),
        (observed(watches=both(heard(0.1, cut=True))), "warn", "more than 2 devices"),
    ],
    "health.rate": [
        (observed(watches=both(*map(heard, range(801)))), "warn", "801 lists in 40 s"),
        (
            observed(watches=both(heard(0.1), ended=StreamEnd(9, "", "", flooded=True))),
            "fail",
            "1 list in 40 s",
        ),
    ],
    "health.duplicates": [
        (observed(watches=both(heard(0.1, device(), device()))), "warn", "node-a/gpu-0: twice, alike"),
        (observed(watches=both(heard(0.1, device(), SICK))), "fail", "node-a/gpu-0: twice, and not alike"),
    ],
    "health.names": [
        (told(identified=False, pool=b"", name=b""), "fail", "an entry without a device"),
        (told(pool=b""), "fail", "(empty)/gpu-0: an empty pool"),
        (told(name=b""), "fail", "node-a/(empty): an empty name"),
        (told(name=b"GPU_0"), "warn", "node-a/GPU_0: the name is no DNS label"),
        (told(name=b"x" * 64), "warn", "the name is no DNS label"),
        (told(pool=b"rack 1"), "warn", "rack 1/gpu-0: the pool is no path"),
        (told(pool=b"rack-1.example.com/node-a"), "pass", "1 device"),
    ],
    "health.enum": [(told(health=3), "warn", "node-a/gpu-0: 3"), (told(health=-1), "warn", "-1")],
    "health.time": [
        (told(updated_s=0), "warn", "node-a/gpu-0: 0, which is no time"),
        (told(updated_s=int(WALL_S * 1000)), "warn", "which is not in seconds"),
        (told(updated_s=int(WALL_S) + 3600), "warn", "ahead"),
        (told(updated_s=1), "pass", ""),
    ],
    "health.ends": [
        (observed(watches=watches([ended("OK", "", heard(0.1))])), "fail", "v1: OK, after 3.0 s"),
        (
            observed(watches=watches(None, [ended("INTERNAL", "x" * 9999, heard(0.1))])),
            "fail",
            "v1alpha1: INTERNAL: xxx",
        ),
        (
            observed(watches=both(heard(0.1), ended=StreamEnd(9, "", "", flooded=True))),
            "not run",
            "something else ended them",
        ),
    ],
    "health.goaway": [
        (
            observed(watches=both(goaway="NO_ERROR max_age")),
            "warn",
            "GOAWAY: NO_ERROR max_age, on a connection",
        ),
        (
            observed(watches=both(heard(0.1), ended=StreamEnd(9, "", ""), goaway="NO_ERROR max_age")),
            "fail",
            "its stream ended",
        ),
    ],
    "health.versions_agree": [
        (observed(watches=watches(None, [stream(heard(0.1, device()))])), "fail", "node-a/gpu-1: v1 only"),
        (
            observed(watches=watches(None, [stream(heard(0.1, SICK, device("gpu-1")))])),
            "fail",
            "node-a/gpu-0: health 1 for v1, 2 for v1alpha1",
        ),
        (
            observed(watches=watches(None, [stream(heard(0.1, device(message=b"x"), device("gpu-1")))])),
            "warn",
            "one message for v1, another for v1alpha1",
        ),
        (observed(watches=watches([stream(heard(0.1, device()), heard(39.5, SICK))])), "fail", "gpu-1"),
        (
            observed(watches=watches([stream(heard(0.1), heard(39.5, SICK, device("gpu-1")))])),
            "pass",
            "2 devices alike",
        ),
        (observed(watches=watches([UNIMPLEMENTED])), "not run", "no list was heard of v1"),
    ],
    "health.reconnect": [
        (
            observed(reopenings=(Reopening("cancel", OTHER),)),
            "fail",
            "after a cancel: node-a/gpu-1 missing after 5.0 s",
        ),
        (observed(reopenings=(Reopening("close", LATER),)), "warn", "on a new connection: whole after 2.2 s"),
        (
            observed(reopenings=(Reopening("close", ended("INTERNAL", "again")._replace(opened_s=1.0)),)),
            "fail",
            "node-a/gpu-0; node-a/gpu-1 missing after 2.0 s, ended: INTERNAL: again",
        ),
        (observed(reopenings=()), "not run", "health.first_list"),
        # what nobody believes in any more need not be told
        (
            observed(
                watches=both(heard(0.1, device("gpu-0"), device("gone", lease_s=3))),
                reopenings=(Reopening("close", OTHER),),
            ),
            "pass",
            "1 time",
        ),
    ],
    "health.two_kubelets": [
        (
            leaving(stream(heard(0.2, device()), opened_s=0.1, closed_s=18)),
            "fail",
            "node-a/gpu-1: the first only",
        ),
        (
            leaving(stream(heard(0.2, SICK, device("gpu-1")), opened_s=0.1, closed_s=18)),
            "fail",
            "node-a/gpu-0: health 1 for the first, 2 for the second",
        ),
        (leaving(silent(18)._replace(opened_s=0.1)), "fail", "the second one heard nothing in 18 s"),
        (leaving(silent(0.5)._replace(opened_s=0.1)), "not run", "too short"),
        (
            leaving(stream(opened_s=0.1, closed_s=18), ended("OK", "", *map(heard, (0.1, 9)), at_s=18.1)),
            "fail",
            "the first one's stream ended 100 ms after another left",
        ),
        (
            leaving(stream(opened_s=0.1, closed_s=18), ended("OK", "", heard(0.01), at_s=0.2)),
            "fail",
            "the first one's stream ended 100 ms after another came",
        ),
        (
            leaving(stream(opened_s=0.1, closed_s=18), ended("OK", "", heard(0.01), at_s=30)),
            "not run",
            "streams end by themselves",
        ),
        (
            leaving(ended("INTERNAL", "one at a time")._replace(opened_s=0.1)),
            "fail",
            "the second one's stream ended: INTERNAL: one at a time",
        ),
        (
            leaving(
                stream(heard(0.2, device(lease_s=3)), opened_s=0.1, closed_s=9),
                stream(*(heard(at_s, device(lease_s=3)) for at_s in (0.1, 2, 4, 6, 8))),
            ),
            "fail",
            "the first one heard nothing in the 31 s since the second left",
        ),
        (observed(leaver=None), "not run", "no two streams"),
    ],
    "health.stopped_reader": [
        (
            unread(0.6, 24.5, others=(0.1, 0.5, 1, 1.5, 24.1, 24.6)),
            "fail",
            "nothing for 23 s, and at once when",
        ),
        (unread(0.6, 24.1, others=(0.1, 24.1)), "not run", "--for 120s may do"),
        (unread(0.6, others=(0.1, 10, 20, 30)), "fail", "nothing when it read again, the others 1 list"),
        (
            observed(
                stopped=Stopped(stream(heard(0.6), heard(30, SICK, device("gpu-1")), opened_s=0.5), 1, 24)
            ),
            "fail",
            "node-a/gpu-0: health 1 for the others, 2 for this one",
        ),
        (
            unread(0.6, others=(0.1, 10), ended=StreamEnd(9, "ABORTED", "slow")),
            "warn",
            "was ended, ABORTED: slow",
        ),
        (observed(stopped=None), "not run", "no two streams"),
    ],
    "registration.socket": [
        (registered(), "fail", "none of this driver"),
        (named("gpu.example.com-reg.sock", is_socket=False), "fail", "is no socket"),
        (named(".gpu.example.com-reg.sock"), "fail", "begins with a dot"),
        (named(f"{'x' * 90}-reg.sock"), "fail", "a socket's limit is 107"),
        (named("plugin.sock"), "warn", "plugin.sock: others are named gpu.example.com-reg.sock"),
        (named("gpu.example.com-5c0a1b2c-reg.sock"), "pass", ""),
        (named("dra-AAAAAAAAAAAAAAAAAAAAAA-reg.sock"), "pass", ""),
        (observed(directory=None), "not run", "--plugin-dir"),
    ],
    "registration.get_info": [
        (introduced(answer=OK._replace(took_s=0.6)), "warn", "answered after 600 ms"),
        (introduced(answer=OK._replace(took_s=1.1)), "fail", "answered after 1.1 s"),
        (introduced(answer=LATE, info=None), "fail", "DEADLINE_EXCEEDED: no answer within 5 s, after 5.0 s"),
        (introduced(answer=None, info=None), "not run", "no socket to ask"),
    ],
    "registration.type": [
        (said(type="DevicePlugin"), "fail", "'DevicePlugin'"),
        (introduced(info=None), "not run", "nobody has answered"),
    ],
    "registration.name": [
        (said(name="Gpu.example.com"), "warn", "'Gpu.example.com' is not in lower case"),
        (said(name="gpu_0.example.com"), "fail", "no DNS subdomain"),
        (said(name=""), "fail", "no DNS subdomain"),
        (said(name=f"{'x' * 60}.com"), "fail", "64 bytes, limit 63"),
        (said(name="gpu"), "warn", "'gpu' has no domain"),
    ],
    "registration.endpoint": [
        (endpoint(absolute=False, path="dra.sock"), "fail", "'dra.sock' is no absolute path"),
        (endpoint(size=108), "fail", "108 bytes, a socket's limit is 107"),
        (endpoint(inside=False), "fail", f"is not below {KUBELET_DIR}"),
        (endpoint(error="Connection refused"), "fail", f"{SOCKET}: Connection refused"),
        (endpoint(path="/var/lib/kubelet/a.sock"), "warn", "not the socket that was listened to"),
    ],
    "registration.versions": [
        (said(versions=()), "fail", "no DRAPlugin service: nothing"),
        (said(versions=("v1.DRAResourceHealth",)), "fail", "no DRAPlugin service: v1.DRAResourceHealth"),
        (said(versions=("v1beta1.DRAPlugin", "v1.DRAPlugin")), "warn", "v1beta1.DRAPlugin is the first"),
        (said(versions=("v1beta1.DRAPlugin",)), "warn", "v1beta1.DRAPlugin is the first"),
        (said(versions=("v1.DRAPlugin", "1.0.0")), "warn", "unknown to kubelets: 1.0.0"),
    ],
    "registration.health": [
        (said(versions=("v1.DRAPlugin",)), "fail", "served, and not advertised"),
        (said(versions=("v1.DRAPlugin", "v1alpha1.DRAResourceHealth")), "warn", "alone is advertised"),
        (
            observed(watches=watches([UNIMPLEMENTED])),
            "fail",
            "v1.DRAResourceHealth: advertised, and UNIMPLEMENTED",
        ),
        (
            said(versions=("v1.DRAPlugin",))._replace(watches=watches([UNIMPLEMENTED], [UNIMPLEMENTED])),
            "warn",
            "none is advertised",
        ),
        (observed(watches=watches([silent()], [silent()])), "not run", "no health service has answered"),
    ],
    "registration.prepare": [
        (
            registered(registration(prepared=(("v1.DRAPlugin", LATE),))),
            "fail",
            "v1.DRAPlugin: DEADLINE_EXCEEDED",
        ),
        (registered(registration(prepared=())), "not run", "no endpoint"),
    ],
    "registration.notify": [(registered(registration(notified=LATE)), "fail", "DEADLINE_EXCEEDED")],
    "registration.again": [
        (
            registered(registration(again=registration(INFO._replace(endpoint="/x")).introduction)),
            "fail",
            "DRAPlugin gpu.example.com /x",
        ),
        (registered(registration(again=Introduction("", True, 0, LATE, None))), "fail", "DEADLINE_EXCEEDED"),
    ],
    "registration.several": [
        (registered(registration(), SECOND), "fail", f"all name {SOCKET}"),
        (
            registered(
                registration(), SECOND._replace(endpoint=registration().endpoint._replace(path="/other.sock"))
            ),
            "warn",
            "2 endpoints, as in a rolling update",
        ),
    ],
    "registration.refused": [
        (registered(registration(refused=Refusal(LATE, OK, OK))), "pass", "it can be registered afterwards"),
        (
            registered(registration(refused=Refusal(OK, LATE, OK))),
            "fail",
            "GetInfo after it: DEADLINE_EXCEEDED",
        ),
        (registered(registration(refused=Refusal(OK, OK, LATE))), "fail", "registering after it: DEADLINE"),
        (observed(), "not run", "--refuse"),
    ],
}


@pytest.mark.parametrize(
    ("code", "seen", "verdict", "words"),
    [
        pytest.param(code, *case, id=f"{code}-{number}")
        for code, cases in CASES.items()
        for number, case in enumerate(cases)
    ],
)
def test_a_check_says_what_it_saw(code, seen, verdict, words):
    (result,) = [one for one in judge(seen) if one.check.code == code]
    assert (result.verdict, words in result.saw) == (verdict, True), result.saw


def test_a_good_driver_passes_everything_that_is_run():
    assert {result.check.code: result.verdict for result in judge(observed())} == {
        check.code: "not run" if check.code == "registration.refused" else "pass" for check in CHECKS
    }


def test_every_check_is_tried_with_what_it_must_not_pass():
    assert list(CASES) == [check.code for check in CHECKS]
    for code, cases in CASES.items():
        assert {verdict for _, verdict, _ in cases} & {"warn", "fail"}, code


def test_where_nothing_was_seen_nothing_passes():
    nothing = observed(
        socket="", watches=(), leaver=None, stopped=None, reopenings=(), unknown=(), directory=None
    )
    assert {result.verdict for result in judge(nothing)} == {"not run"}


def test_every_check_says_everything():
    assert len({check.code for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        assert all((check.title, check.looks, check.why, check.advice))
        assert [text.endswith(".") for text in (check.title, check.looks, check.why, check.advice)] == [
            False,
            True,
            True,
            False,
        ]


def test_the_other_version_is_blamed_only_where_the_first_is_well():
    lists = [heard(at_s, device(message=b"\xff")) for at_s in (0.1, 10)]
    results = {one.check.code: one for one in judge(observed(watches=watches(None, [stream(*lists)])))}
    assert results["health.utf8"].saw == "v1alpha1: node-a/gpu-0: its message is no UTF-8"


def test_culprits_are_named_up_to_a_few_and_counted():
    assert listed(["a", "a", "b"]) == "a; b"
    assert listed(map(str, range(SHOWN + 2))) == "0; 1; 2; and 2 more"


def test_several_registration_sockets_are_told_apart():
    slow = registration(notified=LATE)
    (result,) = [one for one in judge(registered(slow, SECOND)) if one.check.code == "registration.notify"]
    assert result.saw.startswith("gpu.example.com-reg.sock: DEADLINE_EXCEEDED")


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0012, "1 ms"), (0.9996, "1.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (1234.5, "1,234 s")],
)
def test_a_duration_has_the_digits_that_matter(value, words):
    assert seconds(value) == words


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
def test_what_google_writes_is_read_as_it_was_meant(devices):
    message = message_class("v1", "NodeWatchResourcesResponse")()
    for one in devices:
        message.devices.add(
            device={"pool_name": one.pool.decode(), "device_name": one.name.decode()},
            health=one.health,
            last_updated_time=one.updated_s,
            health_check_timeout_seconds=one.lease_s,
            message=one.message.decode(),
        )
    read = read_list(message.SerializeToString(), 1.0, {})
    assert read.devices == tuple(devices)
    assert (read.broken, read.cut) == ("", False)


@given(st.binary(max_size=64) | st.binary(max_size=32).map(lambda data: b"\x0a" + varint(len(data)) + data))
def test_whatever_comes_is_broken_or_google_reads_as_many_devices(data):
    read = read_list(data, 1.0, {})
    texts = [text for one in read.devices for text in (one.pool, one.name, one.message)]
    if not read.broken and all(text.isascii() for text in texts):
        theirs = message_class("v1", "NodeWatchResourcesResponse").FromString(data)
        assert len(theirs.devices) == len(read.devices)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x0a", "list: ends in the middle of a number"),
        (b"\x0a\x05ab", "list: field 1 ends 3 bytes after the last of 4"),
        (b"\x08\x01", "list: field 1 has wire type 0, should be 2"),
        (b"\x0b", "list: field 1 has wire type 3, should be 2"),
        (b"\x13", "list: field 2 has wire type 3, which no message has"),
        (b"\x00", "list: field number 0 is none of protobuf's"),
        (b"\x0a\x02\x12\x00", "device 0: field 2 has wire type 2, should be 0"),
        (b"\x0a\x04\x0a\x02\x08\x00", "device 0: identifier: field 1 has wire type 0, should be 2"),
        (b"\xff" * 11, "list: a number of more than 10 bytes"),
    ],
)
def test_what_is_no_list_is_broken_and_it_is_said_where(data, words):
    assert read_list(data, 1.0, {}).broken == words


def test_an_entry_without_a_device_and_one_with_odd_bytes_are_seen():
    read = read_list(b"\x0a\x00" + b"\x0a\x05\x0a\x03\x0a\x01\xff", 1.0, {})
    assert [(one.identified, one.pool, one.name) for one in read.devices] == [
        (False, b"", b""),
        (True, b"\xff", b""),
    ]


def test_what_is_told_again_is_one_object():
    known: dict[bytes, object] = {}
    entry = b"\x0a\x02\x10\x01"
    (one,), (other,) = (read_list(entry, at_s, known).devices for at_s in (1.0, 2.0))
    assert one is other


def test_of_a_list_without_end_a_part_is_read():
    many = read_list(b"\x0a\x00" * (DEVICES_LIMIT + 1), 1.0, {})
    assert (len(many.devices), many.cut, many.broken) == (DEVICES_LIMIT, True, "")
    unknown = read_list(b"\x78\x00" * (FIELDS_LIMIT + 1), 1.0, {})
    assert (unknown.devices, unknown.cut) == ((), True)
    inside = b"\x78\x00" * (FIELDS_LIMIT + 1)
    assert read_list(b"\x0a" + varint(len(inside)) + inside, 1.0, {}).cut


def varint(value: int) -> bytes:
    more = []
    while value > 0x7F:
        more.append(value & 0x7F | 0x80)
        value >>= 7
    return struct.pack("B" * (len(more) + 1), *more, value)


# --- which driver -------------------------------------------------------------------------------------------


def plugin(name: str, kind: str = "DRAPlugin", endpoint: str = "", file: str = "") -> Introduction:
    """What somebody says of himself in the directory of everybody."""
    path = f"/registry/{file or f'{name}-reg.sock'}"
    return Introduction(path, True, 1, OK, INFO._replace(type=kind, name=name, endpoint=endpoint))


def mute(file: str) -> Introduction:
    return Introduction(f"/registry/{file}", True, 1, LATE, None)


GPU, NIC, DISK = plugin("gpu.example.com"), plugin("nic.example.com"), plugin("disk.example.com", "CSIPlugin")


def chosen(*found: Introduction, socket: str = "", driver: str = "") -> list[str]:
    return [one.path.removeprefix("/registry/") for one in choose(found, socket, driver, "/registry")]


def test_the_only_driver_of_devices_is_meant():
    assert chosen(DISK, GPU, mute("disk.example.com-reg.sock")) == ["gpu.example.com-reg.sock"]


def test_a_socket_that_is_named_like_the_driver_and_mute_is_the_drivers():
    assert chosen(GPU, mute(".gpu.example.com-old-reg.sock")) == [
        "gpu.example.com-reg.sock",
        ".gpu.example.com-old-reg.sock",
    ]


def test_of_several_one_is_chosen_by_name_or_by_its_endpoint():
    assert chosen(GPU, NIC, driver="nic.example.com") == ["nic.example.com-reg.sock"]
    there = plugin("there.example.com", endpoint="/there.sock")
    assert chosen(GPU, there, socket="/there.sock") == ["there.example.com-reg.sock"]


def test_where_nobody_is_a_driver_of_devices_all_are_meant():
    files = [mute(name)._replace(is_socket=False, answer=None) for name in ("notes.txt", "file.sock")]
    assert chosen(DISK, mute("x-reg.sock"), mute("no-suffix"), *files) == [
        "disk.example.com-reg.sock",
        "x-reg.sock",
        "no-suffix",
        "file.sock",
    ]


def test_several_are_a_question_and_an_unknown_one_a_mistake():
    with pytest.raises(UsageError, match=r"--driver: 'gpu\.example\.com', 'nic\.example\.com'"):
        chosen(GPU, NIC)
    with pytest.raises(
        UsageError, match=r"no driver 'gpu\.exampel\.com'; did you mean 'gpu\.example\.com'\?"
    ):
        chosen(GPU, NIC, driver="gpu.exampel.com")
    with pytest.raises(UsageError, match=r"there are: none"):
        chosen(DISK, driver="gpu.example.com")


def test_names_that_others_choose_cannot_move_the_cursor():
    with pytest.raises(UsageError) as raised:
        chosen(GPU, plugin("\x1b[2J"))
    assert "\x1b" not in str(raised.value)
