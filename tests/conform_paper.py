"""What might have been seen of a driver, as values: a good one, and ways to make it another."""

from __future__ import annotations

from collections.abc import Iterable

from agent.conform.observed import (
    V1,
    V1ALPHA1,
    Answer,
    Device,
    Directory,
    Endpoint,
    HealthList,
    Info,
    Introduction,
    Observed,
    Registration,
    Reopening,
    Stopped,
    Stream,
    StreamEnd,
    Watch,
)

WINDOW_S = 40.0
WALL_S = 1_760_000_000.0
KUBELET_DIR = "/var/lib/kubelet"
SOCKET = f"{KUBELET_DIR}/plugins/gpu.example.com/dra.sock"
SERVICES = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
INFO = Info("DRAPlugin", "gpu.example.com", SOCKET, SERVICES)
ENDPOINT = Endpoint(SOCKET, len(SOCKET), absolute=True, inside=True, error="")
OK = Answer("call", 0.01, "OK")
LATE = Answer("call", 5.0, "DEADLINE_EXCEEDED", "no answer within 5 s")
TIMES = (0.01, 10.0, 20.0, 30.0)


def device(called: str = "gpu-0", **changes: object) -> Device:
    """A healthy one, but for the changes."""
    told = Device(
        identified=True,
        pool=b"node-a",
        name=called.encode(),
        health=1,
        updated_s=int(WALL_S),
        lease_s=30,
        message=b"",
    )
    return told._replace(**changes)  # type: ignore[arg-type]


def heard(at_s: float, *devices: Device, **changes: object) -> HealthList:
    """A list of these, or of two healthy ones."""
    told = HealthList(at_s, 88, devices or (device("gpu-0"), device("gpu-1")))
    return told._replace(**changes)  # type: ignore[arg-type]


def stream(
    *lists: HealthList, opened_s: float = 0.0, closed_s: float = WINDOW_S, **changes: object
) -> Stream:
    """One that stays open for the whole time, and tells of both devices every ten seconds."""
    told = lists or tuple(heard(at_s) for at_s in TIMES if opened_s <= at_s <= closed_s)
    return Stream(opened_s, told, None, closed_s)._replace(**changes)  # type: ignore[arg-type]


def ended(status: str, text: str = "", *lists: HealthList, at_s: float = 3.0) -> Stream:
    """One that ended by itself, after these lists."""
    return Stream(0.0, lists, StreamEnd(at_s, status, text), at_s)


def silent(closed_s: float = WINDOW_S) -> Stream:
    """One that stays open and tells nothing."""
    return Stream(0.0, (), None, closed_s)


UNIMPLEMENTED = ended("UNIMPLEMENTED", at_s=0.01)


def watches(
    v1: Iterable[Stream] | None = None, v1alpha1: Iterable[Stream] | None = None
) -> tuple[Watch, ...]:
    """The streams of both versions; None: a good one."""
    return tuple(
        Watch(version, tuple(streams) if streams is not None else (stream(),))
        for version, streams in ((V1, v1), (V1ALPHA1, v1alpha1))
    )


def both(*lists: HealthList, **changes: object) -> tuple[Watch, ...]:
    """The same stream in both versions."""
    one = stream(*lists, **changes)  # type: ignore[arg-type]
    return watches([one], [one])


def registration(info: Info = INFO, path: str = "", **changes: object) -> Registration:
    """One that went well, but for the changes."""
    path = path or f"{KUBELET_DIR}/plugins_registry/{info.name}-reg.sock"
    introduction = Introduction(path, True, 1, OK, info)
    prepared = (("v1.DRAPlugin", OK), ("v1beta1.DRAPlugin", OK))
    told = Registration(introduction, ENDPOINT, OK, introduction, prepared)
    return told._replace(**changes)  # type: ignore[arg-type]


def introduced(**changes: object) -> Observed:
    """A driver whose registration socket, or what it says of itself, has these changes."""
    one = registration()
    introduction = one.introduction._replace(**changes)  # type: ignore[arg-type]
    return registered(one._replace(introduction=introduction))


def registered(*registrations: Registration, **changes: object) -> Observed:
    """A good driver with these registrations."""
    directory = Directory(f"{KUBELET_DIR}/plugins_registry", KUBELET_DIR, registrations)
    return observed(directory=directory, **changes)


def observed(**changes: object) -> Observed:
    """A good driver, but for the changes."""
    good = Observed(
        socket=SOCKET,
        socket_size=len(SOCKET),
        window_s=WINDOW_S,
        began_wall_s=WALL_S,
        watches=watches(),
        leaver=stream(heard(0.1), heard(10), opened_s=0.1, closed_s=18.0),
        stopped=Stopped(stream(heard(0.1), *map(heard, (24.1, 30))), 0.1, 24.0),
        reopenings=tuple(
            Reopening(after, stream(heard(at_s + 0.01), opened_s=at_s, closed_s=at_s + 0.02))
            for after, at_s in (("close", 1.0), ("cancel", 2.0))
        ),
        unknown=(OK._replace(status="UNIMPLEMENTED"),),
        directory=Directory(f"{KUBELET_DIR}/plugins_registry", KUBELET_DIR, (registration(),)),
    )
    return good._replace(**changes)  # type: ignore[arg-type]
