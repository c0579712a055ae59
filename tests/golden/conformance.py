"""Results of ``drahealth conform`` for fixed observations of a driver."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeVar

from agent.cli.conform import document, exit_of
from agent.conform.check_table import run_checks
from agent.conform.session_record import (
    V1,
    V1ALPHA1,
    ApiVersionStreams,
    CdiFile,
    CdiSnapshot,
    ClaimReply,
    ClaimSessionRecord,
    ConformClaim,
    DeviceEntry,
    FailedRegistrationRecord,
    HealthList,
    PluginEndpoint,
    PluginInfo,
    PrepareCall,
    PrepareStage,
    RegistrationDirRecord,
    RegistrationFile,
    RegistrationRecord,
    ReopenedStream,
    ReturnedDevice,
    SessionRecord,
    StoppedReader,
    StreamEnd,
    StreamRecord,
    UnaryCallResult,
)
from agent.model.claim import ClaimRef

V = TypeVar("V", bound=NamedTuple)

WINDOW_S: Final = 40.0
WALL_S: Final = 1_760_000_000
KUBELET_DIR: Final = "/var/lib/kubelet"
REGISTRY: Final = f"{KUBELET_DIR}/plugins_registry"
SOCKET: Final = f"{KUBELET_DIR}/plugins/gpu.example.com/dra.sock"
SERVICES: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
TIMES: Final = (0.01, 10.0, 20.0, 30.0)
OK: Final = UnaryCallResult("call", 0.01, "OK")
LATE: Final = UnaryCallResult("call", 5.0, "DEADLINE_EXCEEDED", "no answer within 5 s")
GPU: Final = DeviceEntry(True, b"node-a", b"gpu-0", 1, WALL_S, 30, b"")
OTHER: Final = DeviceEntry(True, b"node-a", b"gpu-1", 1, WALL_S, 30, b"")
INFO: Final = PluginInfo("DRAPlugin", "gpu.example.com", SOCKET, SERVICES)
ENDPOINT: Final = PluginEndpoint(SOCKET, len(SOCKET), True, True, "")
REGISTRATION: Final = RegistrationFile(f"{REGISTRY}/gpu.example.com-reg.sock", True, 1, OK, INFO)
PREPARED: Final = (("v1.DRAPlugin", OK), ("v1beta1.DRAPlugin", OK))
REGISTERED: Final = RegistrationRecord(REGISTRATION, ENDPOINT, OK, REGISTRATION, PREPARED)


def _with(value: V, *fields: tuple[int, Any]) -> V:
    """Return a value with other fields, by position."""
    changed = dict(fields)
    return type(value)(*(changed.get(at, field) for at, field in enumerate(value)))


def _list(
    at_s: float, *devices: DeviceEntry, size: int = 88, broken: str = "", cut: bool = False
) -> HealthList:
    both = tuple(_with(device, (4, WALL_S + int(at_s))) for device in (GPU, OTHER))
    return HealthList(at_s, size, devices or both, broken, cut)


def _stream(
    *lists: HealthList,
    opened_s: float = 0.0,
    closed_s: float = WINDOW_S,
    end: StreamEnd | None = None,
    goaway: str = "",
) -> StreamRecord:
    whole = lists or tuple(_list(at_s) for at_s in TIMES if opened_s <= at_s <= closed_s)
    return StreamRecord(opened_s, whole, end, closed_s, goaway)


def _ended_stream(status: str, text: str = "", at_s: float = 3.0) -> StreamRecord:
    return StreamRecord(0.0, (), StreamEnd(at_s, status, text), at_s)


SILENT: Final = StreamRecord(0.0, (), None, WINDOW_S)
UNIMPLEMENTED: Final = _ended_stream("UNIMPLEMENTED", at_s=0.01)
GOOD: Final = SessionRecord(
    SOCKET,
    len(SOCKET),
    WINDOW_S,
    float(WALL_S),
    (ApiVersionStreams(V1, (_stream(),)), ApiVersionStreams(V1ALPHA1, (_stream(),))),
    _stream(_list(0.1), _list(10), opened_s=0.1, closed_s=18.0),
    StoppedReader(_stream(*map(_list, (0.1, 24.1, 30.0))), 0.1, 24.0),
    tuple(
        ReopenedStream(after, _stream(_list(at_s + 0.01), opened_s=at_s, closed_s=at_s + 0.02))
        for after, at_s in (("close", 1.0), ("cancel", 2.0))
    ),
    (UnaryCallResult("call", 0.01, "UNIMPLEMENTED"),),
    RegistrationDirRecord(REGISTRY, KUBELET_DIR, (REGISTERED,)),
    WINDOW_S,
)
"""A driver that does everything right."""
STREAMS, LEAVER, STOPPED, REOPENINGS, UNKNOWN, DIRECTORY = range(4, 10)
PREPARE: Final = 11
"""Positions in it."""


def _streams(v1: StreamRecord, v1alpha1: StreamRecord) -> SessionRecord:
    return _with(GOOD, (STREAMS, (ApiVersionStreams(V1, (v1,)), ApiVersionStreams(V1ALPHA1, (v1alpha1,)))))


def _both_versions(*lists: HealthList, end: StreamEnd | None = None, goaway: str = "") -> SessionRecord:
    stream = _stream(*lists, end=end, goaway=goaway)
    return _streams(stream, stream)


def _device(position: int, value: Any) -> SessionRecord:
    """Return the session of a driver with this value in one field of its only device, in each list."""
    return _both_versions(
        *(_list(at_s, _with(GPU, (4, WALL_S + int(at_s)), (position, value))) for at_s in TIMES)
    )


def _registry(*records: RegistrationRecord) -> SessionRecord:
    return _with(GOOD, (DIRECTORY, RegistrationDirRecord(REGISTRY, KUBELET_DIR, records)))


def _session_with_info(*fields: tuple[int, Any]) -> SessionRecord:
    return _registry(_with(REGISTERED, (0, _with(REGISTRATION, *fields))))


CLAIM: Final = ClaimRef("team-a", "train", "uid-1")
BAD: Final = ClaimRef("team-a", "bad", "uid-2")
FILES: Final = CdiSnapshot(
    (
        CdiFile(
            "/var/run/cdi/gpu.json",
            {
                "cdiVersion": "0.6.0",
                "kind": "example.com/gpu",
                "devices": [{"name": "gpu-0", "containerEdits": {"env": ["GPU=0"]}}],
            },
        ),
    )
)
RETURNED: Final = ClaimReply(
    "uid-1", (ReturnedDevice(("gpus",), "node-a", "gpu-0", ("example.com/gpu=gpu-0",)),)
)


def _claims(**of_stages: PrepareCall) -> SessionRecord:
    """Return the session of a driver that prepares a claim; `of_stages` replaces calls, by stage."""
    good = PrepareCall((CLAIM,), OK, (RETURNED,))
    ended = PrepareCall((CLAIM,), OK, (ClaimReply("uid-1"),))
    refused = PrepareCall((BAD,), OK, (ClaimReply("uid-2", (), "no claim of this UID"),))
    both = PrepareCall((BAD, CLAIM), OK, (*refused.answers, *good.answers))
    calls = {
        stage: (good, good) if stage in {PrepareStage.AT_ONCE, PrepareStage.AGAIN} else (good,)
        for stage in PrepareStage
    }
    for stage in list(PrepareStage):
        if stage.name.startswith(("UN", "LOST", "DELETED", "CLEANUP")):
            calls[stage] = (ended,)
    calls[PrepareStage.MISSING] = calls[PrepareStage.OTHER_UID] = (refused,)
    calls[PrepareStage.BAD] = (both, both)
    calls |= {PrepareStage[name]: (call, call) for name, call in of_stages.items()}
    claims = (ConformClaim(CLAIM, (("gpus", "node-a", "gpu-0"),)),)
    record = ClaimSessionRecord("v1.DRAPlugin", claims, (BAD,), calls, {}, CdiSnapshot(), FILES, FILES, FILES)
    return _with(GOOD, (PREPARE, record._replace(cdi_rebooted=FILES, cdi_released=FILES)))


OBSERVATIONS: Final[Mapping[str, SessionRecord]] = {
    "good": GOOD,
    "health alone": _with(GOOD, (DIRECTORY, None)),
    "nothing": SessionRecord("", 0, 0.0, float(WALL_S)),
    "long path": _with(GOOD, (0, "/" + "x" * 108), (1, 109)),
    "not identified": _device(0, False),
    "no pool": _device(1, b""),
    "no name": _device(2, b""),
    "unknown health": _device(3, 3),
    "negative health": _device(3, -1),
    "old": _device(4, 5),
    "of the future": _device(4, 1 << 40),
    "no lease": _device(5, 0),
    "negative lease": _device(5, -1),
    "huge lease": _device(5, 1 << 62),
    "short lease": _device(5, 9),
    "no UTF-8": _device(6, b"\xff"),
    "long message": _device(6, b"x" * 1030),
    "cut in a character": _device(6, ("x" * 1020 + "é" + "x" * 10).encode()),
    "message that moves": _both_versions(
        *(_list(at_s, _with(GPU, (6, b"%d" % at_s))) for at_s in (0.01, *range(2, 40, 2)))
    ),
    "lease that moves": _both_versions(
        *(_list(at_s, _with(GPU, (5, 30 + int(at_s)))) for at_s in (0.01, *range(2, 40, 2)))
    ),
    "twice": _both_versions(*(_list(at_s, GPU, GPU) for at_s in TIMES)),
    "changes pool": _both_versions(_list(0.01, GPU), _list(10, _with(GPU, (1, b"b"))), _list(20, GPU)),
    "late device": _both_versions(_list(0.01, GPU), _list(8, GPU, OTHER), _list(20, GPU, OTHER)),
    "versions differ": _streams(_stream(*(_list(at_s, GPU) for at_s in TIMES)), _stream()),
    "broken": _both_versions(_list(0.01, broken="field 1: ends early")),
    "cut": _both_versions(_list(0.01, cut=True)),
    "large": _both_versions(_list(0.01, size=5 << 20)),
    "one list": _both_versions(_list(0.01)),
    "late list": _both_versions(*map(_list, (7.0, 17.0, 27.0))),
    "rare": _both_versions(*map(_list, (0.01, 38.0))),
    "busy": _both_versions(*(_list(number / 50) for number in range(1, 1900))),
    "silent": _streams(SILENT, SILENT),
    "unimplemented": _streams(UNIMPLEMENTED, UNIMPLEMENTED),
    "old version only": _streams(UNIMPLEMENTED, _stream()),
    "ends": _streams(_ended_stream("UNAVAILABLE", "going"), _ended_stream("OK")),
    "floods": _both_versions(_list(0.01), end=StreamEnd(3.0, "INTERNAL", "x", 5 << 20, True)),
    "says goodbye": _both_versions(*map(_list, TIMES), goaway="too_many_pings"),
    "leaver ends all": _with(
        GOOD, (LEAVER, _stream(_list(0.1), end=StreamEnd(5.0, "UNAVAILABLE", ""), opened_s=0.1, closed_s=5))
    ),
    "reader blocks all": _with(
        _both_versions(_list(0.1)), (STOPPED, StoppedReader(_stream(_list(0.1)), 0.1, 24.0))
    ),
    "not opened again": _with(
        GOOD,
        (
            REOPENINGS,
            (ReopenedStream("close", _ended_stream("UNAVAILABLE")), ReopenedStream("cancel", SILENT)),
        ),
    ),
    "odd methods": _with(GOOD, (UNKNOWN, (OK, LATE))),
    "not registered": _registry(),
    "no socket": _session_with_info((1, False)),
    "no answer": _session_with_info((3, LATE), (4, None)),
    "other type": _session_with_info((4, _with(INFO, (0, "CSIPlugin")))),
    "odd name": _session_with_info((4, _with(INFO, (1, "Not A Driver")))),
    "no version": _session_with_info((4, _with(INFO, (3, ())))),
    "versions without service": _session_with_info((4, _with(INFO, (3, ("1.0.0",))))),
    "no health service": _session_with_info((4, _with(INFO, (3, SERVICES[:2])))),
    **{
        f"endpoint {name}": _registry(_with(REGISTERED, (1, _with(ENDPOINT, field))))
        for name, field in {
            "too long": (1, 108),
            "relative": (2, False),
            "elsewhere": (3, False),
            "unserved": (4, "No such file or directory"),
        }.items()
    },
    "notified late": _registry(_with(REGISTERED, (2, LATE))),
    "gone after": _registry(_with(REGISTERED, (3, None))),
    "prepares late": _registry(_with(REGISTERED, (4, (("v1.DRAPlugin", LATE), ("v1beta1.DRAPlugin", LATE))))),
    "prepares nothing": _registry(_with(REGISTERED, (4, ()))),
    "refused": _registry(_with(REGISTERED, (5, FailedRegistrationRecord(OK, OK, OK)))),
    "refused and gone": _registry(_with(REGISTERED, (5, FailedRegistrationRecord(OK, LATE, LATE)))),
    "claims": _claims(),
    "claim refused": _claims(FIRST=PrepareCall((CLAIM,), OK, (ClaimReply("uid-1", (), "no such card"),))),
    "claim without an answer": _claims(AGAIN=PrepareCall((CLAIM,), OK)),
    "claim late": _claims(AGAIN=PrepareCall((CLAIM,), LATE)),
    "claim of an answer that is not valid": _claims(AGAIN=PrepareCall((CLAIM,), OK, (), "not UTF-8")),
    "two": _registry(REGISTERED, _with(REGISTERED, (0, _with(REGISTRATION, (0, f"{REGISTRY}/2-reg.sock"))))),
}

WHOLE: Final = ("good", "health alone", "nothing", "no UTF-8", "no answer", "claims")
"""Observations of which the whole document is compared; of the others the result of each check."""


def result(session: SessionRecord, *, whole: bool) -> dict[str, Any]:
    """Return exit code and document of an observation, or instead of the document each check's result."""
    results = run_checks(session)
    found = document(session, results)
    by_code = {check["code"]: check["result"] for check in found["results"]}
    return {"exit": exit_of(results), "document": found if whole else by_code}


def documents() -> dict[str, Any]:
    """Return the results of all observations."""
    return {name: result(session, whole=name in WHOLE) for name, session in OBSERVATIONS.items()}
