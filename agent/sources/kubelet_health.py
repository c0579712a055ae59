"""What the kubelet believes of devices: the last health that it has written down of each.

It writes when something changes and at no other time. So an old file is no sign of an old belief: what was
heard since, in the same words, does not stand here. What a kubelet that begins now would make of an entry is
:meth:`~agent.model.claim_sources.Belief.has_lapsed`.

Up to 1.36 a device that its driver leaves out stays, as Unknown once its lease is over; from 1.37 on its
entry is taken away then.

Source: kubelet ``cm/dra/healthinfo.go`` and ``state/state.go`` as of 1.36 and 1.37.
"""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from agent.model.claim import DeviceRef
from agent.model.claim_sources import Belief, Origin, Provenance, SourceAnswer
from agent.model.health import Health
from agent.model.reading import Absence
from agent.model.time import NS, Instant
from agent.system.read_file import ReadError, read_bounded

NAME: Final = "dra_health_state"
"""In the kubelet's directory; root's, mode 0600."""
FILE_BYTES: Final = 64 << 20
LEASE_S: Final = 30.0
"""Of an entry that names none."""
_HEALTH: Final = {"Healthy": Health.HEALTHY, "Unhealthy": Health.UNHEALTHY}


class _Device(msgspec.Struct):
    PoolName: str = ""
    DeviceName: str = ""
    Health: str = ""
    LastUpdated: str = ""
    HealthCheckTimeout: int = 0
    Message: str = ""


class _Driver(msgspec.Struct):
    Devices: dict[str, _Device] | None = None


def read_health_state(path: Path, now: Instant) -> SourceAnswer[Belief]:
    """What the kubelet has written down of devices' health.

    Args:
        path: :data:`NAME` in the kubelet's directory.
        now: When that is.

    Returns:
        Or why there is nothing: absent where the kubelet has no such thing, or nothing has happened yet.
    """
    try:
        file = read_bounded(path, FILE_BYTES)
        beliefs, wrong = parse_health_state(file.data)
    except ReadError as error:
        return SourceAnswer(Provenance(Origin.HEALTH_STATE, now), (), error.absence, str(error))
    except ValueError as error:
        return SourceAnswer(Provenance(Origin.HEALTH_STATE, now), (), Absence.UNREADABLE, f"{path}: {error}")
    return SourceAnswer(Provenance(Origin.HEALTH_STATE, now, file.written_s), beliefs, wrong=wrong)


def parse_health_state(data: bytes) -> tuple[tuple[Belief, ...], tuple[str, ...]]:
    """The devices, and what is wrong with entries that cannot be used.

    Raises:
        ValueError: It is nothing that a kubelet writes, with the place.
    """
    try:
        drivers = msgspec.json.decode(data, type=dict[str, _Driver] | None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"is not understood: {error}") from None
    beliefs: list[Belief] = []
    wrong: list[str] = []
    for driver, key, device in _entries(drivers or {}):
        try:
            heard_s = datetime.fromisoformat(device.LastUpdated).timestamp()
        except ValueError:
            wrong.append(f"{driver} {key[:200]!r}: LastUpdated {device.LastUpdated[:64]!r} is no time")
            continue
        lease_s = device.HealthCheckTimeout / NS if device.HealthCheckTimeout else LEASE_S
        ref = DeviceRef(driver, device.PoolName, device.DeviceName)
        health = _HEALTH.get(device.Health, Health.UNKNOWN)
        beliefs.append(Belief(ref, health, device.Message, heard_s, lease_s))
    return tuple(beliefs), tuple(wrong)


def _entries(drivers: dict[str, _Driver]) -> Iterator[tuple[str, str, _Device]]:
    for driver, state in drivers.items():
        for key, device in (state.Devices or {}).items():
            yield driver, key, device
