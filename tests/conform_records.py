"""Records of a session with a driver, as values: a good driver, and functions to change it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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

WINDOW_S = 40.0
WALL_S = 1_760_000_000.0
KUBELET_DIR = "/var/lib/kubelet"
SOCKET = f"{KUBELET_DIR}/plugins/gpu.example.com/dra.sock"
SERVICES = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
INFO = PluginInfo("DRAPlugin", "gpu.example.com", SOCKET, SERVICES)
ENDPOINT = PluginEndpoint(SOCKET, len(SOCKET), is_absolute=True, is_in_kubelet_dir=True, error="")
OK = UnaryCallResult("call", 0.01, "OK")
LATE = UnaryCallResult("call", 5.0, "DEADLINE_EXCEEDED", "no answer within 5 s")
TIMES = (0.01, 10.0, 20.0, 30.0)


def device(device_name: str = "gpu-0", **changes: object) -> DeviceEntry:
    """Return the entry of a healthy device, with changes."""
    made = DeviceEntry(
        has_identifier=True,
        pool=b"node-a",
        name=device_name.encode(),
        health=1,
        updated_s=int(WALL_S),
        lease_s=30,
        message=b"",
    )
    return made._replace(**changes)  # type: ignore[arg-type]


def health_list(at_s: float, *devices: DeviceEntry, **changes: object) -> HealthList:
    """Return a list of the devices, by default of two healthy ones that were just checked."""
    updated_s = int(WALL_S + at_s)
    both = (device("gpu-0", updated_s=updated_s), device("gpu-1", updated_s=updated_s))
    made = HealthList(at_s, 88, devices or both)
    return made._replace(**changes)  # type: ignore[arg-type]


def stream(
    *lists: HealthList, opened_s: float = 0.0, closed_s: float = WINDOW_S, **changes: object
) -> StreamRecord:
    """Return a stream that stays open; by default it reports both devices every ten seconds."""
    made = lists or tuple(health_list(at_s) for at_s in TIMES if opened_s <= at_s <= closed_s)
    return StreamRecord(opened_s, made, None, closed_s)._replace(**changes)  # type: ignore[arg-type]


def ended_stream(status: str, text: str = "", *lists: HealthList, at_s: float = 3.0) -> StreamRecord:
    """Return a stream that the server ended after these lists."""
    return StreamRecord(0.0, lists, StreamEnd(at_s, status, text), at_s)


def silent_stream(closed_s: float = WINDOW_S) -> StreamRecord:
    """Return a stream that stays open without a list."""
    return StreamRecord(0.0, (), None, closed_s)


UNIMPLEMENTED = ended_stream("UNIMPLEMENTED", at_s=0.01)


def version_records(
    v1: Iterable[StreamRecord] | None = None, v1alpha1: Iterable[StreamRecord] | None = None
) -> tuple[ApiVersionStreams, ...]:
    """Return the streams of both versions; None: a good stream."""
    return tuple(
        ApiVersionStreams(version, tuple(streams) if streams is not None else (stream(),))
        for version, streams in ((V1, v1), (V1ALPHA1, v1alpha1))
    )


def both_versions(*lists: HealthList, **changes: object) -> tuple[ApiVersionStreams, ...]:
    """Return the records of both versions with the same stream."""
    record = stream(*lists, **changes)  # type: ignore[arg-type]
    return version_records([record], [record])


def registration(info: PluginInfo = INFO, path: str = "", **changes: object) -> RegistrationRecord:
    """Return a registration that succeeded, with changes."""
    path = path or f"{KUBELET_DIR}/plugins_registry/{info.name}-reg.sock"
    file = RegistrationFile(path, True, 1, OK, info)
    prepared = (("v1.DRAPlugin", OK), ("v1beta1.DRAPlugin", OK))
    made = RegistrationRecord(file, ENDPOINT, OK, file, prepared)
    return made._replace(**changes)  # type: ignore[arg-type]


def session_with_file(**changes: object) -> SessionRecord:
    """Return the session of a driver whose registration file, or answer to GetInfo, has these changes."""
    record = registration()
    file = record.file._replace(**changes)  # type: ignore[arg-type]
    return session_with_registrations(record._replace(file=file))


def session_with_registrations(*registrations: RegistrationRecord, **changes: object) -> SessionRecord:
    """Return the session of a good driver with these registrations."""
    directory = RegistrationDirRecord(f"{KUBELET_DIR}/plugins_registry", KUBELET_DIR, registrations)
    return session_record(directory=directory, **changes)


TRAIN = ClaimRef("team-a", "train", "uid-train")
INFER = ClaimRef("team-a", "infer", "uid-infer")
BAD_1 = ClaimRef("team-a", "bad-1", "uid-bad-1")
BAD_2 = ClaimRef("team-a", "bad-2", "uid-bad-2")
GHOST = ClaimRef("team-a", "ghost", "uid-ghost")
KIND = "example.com/gpu"
DEVICES = {
    TRAIN.uid: (
        ReturnedDevice(("gpus",), "node-a", "gpu-0", (f"{KIND}=train-0",)),
        ReturnedDevice(("gpus",), "node-a", "gpu-1", (f"{KIND}=train-1",)),
    ),
    INFER.uid: (ReturnedDevice(("one",), "node-a", "gpu-1", (f"{KIND}=infer-1",)),),
}
ERRORS = {
    BAD_1.uid: "[bad] no such card; also failed: team-a/bad-2",
    BAD_2.uid: "[bad] no such card; also failed: team-a/bad-1",
    GHOST.uid: "no claim of this UID",
}
UNPREPARES = (
    PrepareStage.UNKNOWN,
    PrepareStage.UNPREPARED,
    PrepareStage.UNPREPARED_AGAIN,
    PrepareStage.LOST_DEVICE,
    PrepareStage.DELETED_CLAIM,
    PrepareStage.CLEANUP,
)


def prepare_call(*claims: ClaimRef, **replies: object) -> PrepareCall:
    """Return a prepare of these claims; `replies` replaces replies, by name of the claim: devices, or a text
    as the error."""
    made = []
    for claim in claims:
        reply = replies.get(claim.name.replace("-", "_"), ERRORS.get(claim.uid, DEVICES.get(claim.uid, ())))
        text = reply if isinstance(reply, str) else ""
        made.append(ClaimReply(claim.uid, () if text else reply, text))  # type: ignore[arg-type]
    return PrepareCall(claims, OK, tuple(made))


def unprepare_call(*claims: ClaimRef, error: str = "") -> PrepareCall:
    """Return an unprepare of these claims, with the same error for each."""
    return PrepareCall(claims, OK, tuple(ClaimReply(claim.uid, (), error) for claim in claims))


def cdi_file(*names: str, path: str = "/var/run/cdi/gpu.json", **changes: object) -> CdiFile:
    """Return a CDI file that defines devices, with changes of its document."""
    devices = [{"name": name, "containerEdits": {"env": ["A=1"]}} for name in names]
    return CdiFile(path, {"cdiVersion": "0.6.0", "kind": KIND, "devices": devices, **changes})


CLAIM_FILES = CdiSnapshot((cdi_file("train-0", "train-1", "infer-1"),))


def claim_record(
    calls: Mapping[PrepareStage, tuple[PrepareCall, ...]] | None = None, **changes: object
) -> ClaimSessionRecord:
    """Return the record of a good driver that prepared two claims, with other calls of some stages."""
    both = (prepare_call(TRAIN, INFER),)
    good = {stage: (unprepare_call(TRAIN, INFER),) if stage in UNPREPARES else both for stage in PrepareStage}
    good |= {
        PrepareStage.UNKNOWN: (unprepare_call(GHOST),),
        PrepareStage.ALONE: (prepare_call(TRAIN), prepare_call(INFER)),
        PrepareStage.AT_ONCE: both * 2,
        PrepareStage.MISSING: (prepare_call(GHOST),),
        PrepareStage.OTHER_UID: (prepare_call(GHOST),),
        PrepareStage.BAD: (prepare_call(BAD_1, BAD_2, TRAIN, INFER),) * 2,
    }
    allocated = {
        TRAIN: (("gpus", "node-a", "gpu-0"), ("gpus", "node-a", "gpu-1")),
        INFER: (("one/large", "node-a", "gpu-1"),),
    }
    made = ClaimSessionRecord(
        version="v1.DRAPlugin",
        claims=tuple(ConformClaim(ref, devices) for ref, devices in allocated.items()),
        bad_claims=(BAD_1, BAD_2),
        calls=good | dict(calls or {}),
        omitted={},
        cdi_prepared=CLAIM_FILES,
        cdi_before_bad=CLAIM_FILES,
        cdi_after_bad=CLAIM_FILES,
        cdi_rebooted=CLAIM_FILES,
        cdi_released=CLAIM_FILES,
    )
    return made._replace(**changes)  # type: ignore[arg-type]


def session_with_claims(
    calls: Mapping[PrepareStage, tuple[PrepareCall, ...]] | None = None, **changes: object
) -> SessionRecord:
    """Return the session of a good driver that prepared claims, with other calls of some stages."""
    return session_record(prepare=claim_record(calls, **changes))


def session_record(**changes: object) -> SessionRecord:
    """Return the session of a good driver, with changes."""
    good = SessionRecord(
        socket=SOCKET,
        socket_size=len(SOCKET),
        window_s=WINDOW_S,
        began_wall_s=WALL_S,
        recorded_s=WINDOW_S,
        versions=version_records(),
        second_kubelet=stream(health_list(0.1), health_list(10), opened_s=0.1, closed_s=18.0),
        stopped_reader=StoppedReader(stream(health_list(0.1), *map(health_list, (24.1, 30))), 0.1, 24.0),
        reopenings=tuple(
            ReopenedStream(after, stream(health_list(at_s + 0.01), opened_s=at_s, closed_s=at_s + 0.02))
            for after, at_s in (("close", 1.0), ("cancel", 2.0))
        ),
        unknown_methods=(OK._replace(status="UNIMPLEMENTED"),),
        directory=RegistrationDirRecord(f"{KUBELET_DIR}/plugins_registry", KUBELET_DIR, (registration(),)),
    )
    return good._replace(**changes)  # type: ignore[arg-type]
