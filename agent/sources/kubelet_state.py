"""Readers of state files in the kubelet's directory: prepared claims, health of devices, exclusive CPUs.

The formats are internal to the kubelet and grow; unknown keys are ignored.

- Claims: the version is ignored, as by the kubelet. The kubelet writes a claim before it calls the drivers,
so
  the claim may have no devices yet. The file is replaced by rename, so an incomplete one comes from a disk
  error or a copy. Source: kubelet ``cm/dra/state/checkpoint.go`` and ``state.go`` as of 1.36 and 1.37.
- Health: the kubelet writes only when a health or message changes, so an old file may hold current health,
see
  :meth:`~agent.model.claim_sources.Belief.has_lapsed`. Up to 1.36 a device that its driver leaves out stays,
  as Unknown once its lease is over; from 1.37 on its entry is removed. Source: kubelet
  ``cm/dra/healthinfo.go`` and ``state/state.go`` as of 1.36 and 1.37.
- Exclusive CPUs of the CPU manager: without CPUs allocated by DRA drivers, and without those of whole pods
  (gate PodLevelResourceManagers). The checksum covers a Go value's text and is not verified: an incomplete
  file is not JSON. Source: kubelet ``cm/cpumanager/state/checkpoint.go`` as of 1.26 to 1.37; all have
  ``entries``.
"""

import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from agent.config.config import CHECKPOINT
from agent.errors import ProbeError
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import (
    DeviceUse,
    KubeletHealthRecord,
    Origin,
    PreparedClaim,
    Provenance,
    SourceAnswer,
)
from agent.model.cpuset import CpuSet, parse_cpus
from agent.model.health import Health
from agent.model.reading import Absence
from agent.model.time import NS, Instant
from agent.system.files import ReadError, read_bounded

CLAIMS_FILE: Final = CHECKPOINT
"""Name of the file in the kubelet's directory; owned by root, mode 0600."""
KIND: Final = "DRACheckpoint"
CLAIMS_MAX_BYTES: Final = 64 << 20
ATTEMPTS: Final = 3
RETRY_PAUSE_S: Final = 0.05
"""Pause between attempts to read an incomplete file; the kubelet writes one within milliseconds [s]."""
_SKIPS: Final = frozenset({"*", "NodePrepareResources"})


class TornCheckpoint(ValueError):
    """Checkpoint that is incomplete; reading the file again may succeed."""


class _CheckpointDevice(msgspec.Struct):
    PoolName: str
    DeviceName: str
    ShareID: str | None = None
    RequestNames: list[str] | None = None
    CDIDeviceIDs: list[str] | None = None


class _DriverState(msgspec.Struct):
    Devices: list[_CheckpointDevice] | None = None
    skipNodeOperations: list[str] | None = None
    """Calls that the kubelet skips; from 1.37 on."""


class _ClaimInfo(msgspec.Struct):
    ClaimUID: str
    ClaimName: str
    Namespace: str
    PodUIDs: dict[str, Any] | None = None
    DriverState: dict[str, _DriverState] | None = None


class _ClaimList(msgspec.Struct):
    kind: str = ""
    ClaimInfoStateList: list[_ClaimInfo] | None = None


class _Checkpoint(msgspec.Struct):
    Data: str
    Checksum: int


def read_checkpoint(
    path: Path, now: Instant, pause: Callable[[float], None] = time.sleep
) -> SourceAnswer[PreparedClaim]:
    """Read the checkpoint of prepared claims. Blocks on the disk.

    Args:
        path: :data:`CLAIMS_FILE` in the kubelet's directory.
        now: Current time.
        pause: Called with seconds between attempts; blocks.

    Returns:
        The claims, or ABSENT if the kubelet has never run with claims.
    """
    reason = ""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            file = read_bounded(path, CLAIMS_MAX_BYTES)
            claims = parse_checkpoint(file.data)
        except ReadError as error:
            return SourceAnswer(Provenance(Origin.CHECKPOINT, now), (), error.absence, str(error))
        except TornCheckpoint as error:
            reason = f"{path}: {error}, {ATTEMPTS} times"
            if attempt < ATTEMPTS:
                pause(RETRY_PAUSE_S)
        except ValueError as error:
            reason = f"{path}: {error}"
            break
        else:
            return SourceAnswer(Provenance(Origin.CHECKPOINT, now, file.written_s), claims)
    return SourceAnswer(Provenance(Origin.CHECKPOINT, now), (), Absence.UNREADABLE, reason)


def parse_checkpoint(data: bytes) -> tuple[PreparedClaim, ...]:
    """Parse the claims of a checkpoint, each once, in its order.

    Raises:
        TornCheckpoint: The file is incomplete, or its checksum is wrong; the text has both checksums.
        ValueError: The file is another checkpoint, or has an unknown format.
    """
    try:
        envelope = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TornCheckpoint(f"is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    try:
        checkpoint = msgspec.convert(envelope, _Checkpoint)
    except msgspec.ValidationError as error:
        raise ValueError(f"is not a checkpoint as kubelets have written since 1.32: {error}") from None
    found = zlib.crc32(checkpoint.Data.encode("utf-8", "surrogatepass"))
    if found != checkpoint.Checksum:
        raise TornCheckpoint(f"checksum is {found}, expected {checkpoint.Checksum}")
    try:
        content = msgspec.json.decode(checkpoint.Data, type=_ClaimList)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"Data: {error}") from None
    if content.kind != KIND:
        raise ValueError(f"is a {content.kind[:64]!r}, no {KIND}")
    claims: dict[ClaimRef, PreparedClaim] = {}
    for info in content.ClaimInfoStateList or ():
        claim = _claim(info)
        before = claims.get(claim.ref)
        claims[claim.ref] = _merged(before, claim) if before else claim
    return tuple(claims.values())


def _claim(info: _ClaimInfo) -> PreparedClaim:
    states = info.DriverState or {}
    skipped = {driver for driver, state in states.items() if _SKIPS & set(state.skipNodeOperations or ())}
    found = [(driver, device) for driver, state in states.items() for device in state.Devices or ()]
    devices = [_use(driver, device) for driver, device in found]
    cdi = [(id_, _ref(driver, device)) for driver, device in found for id_ in device.CDIDeviceIDs or ()]
    waiting = [driver for driver, state in states.items() if not state.Devices and driver not in skipped]
    return PreparedClaim(
        ref=ClaimRef(info.Namespace, info.ClaimName, info.ClaimUID),
        devices=tuple(dict.fromkeys(devices)),  # up to 1.36 a repeated prepare lists them twice
        pods=tuple(sorted(info.PodUIDs or ())),
        waiting=tuple(sorted(waiting)),
        skipped=tuple(sorted(skipped)),
        cdi=tuple(dict.fromkeys(cdi)),
    )


def _use(driver: str, device: _CheckpointDevice) -> DeviceUse:
    # the part after the slash names an alternative; the kubelet uses the request before it
    requests = dict.fromkeys(name.partition("/")[0] for name in device.RequestNames or ())
    return DeviceUse(_ref(driver, device), tuple(requests), device.ShareID or "")


def _ref(driver: str, device: _CheckpointDevice) -> DeviceRef:
    return DeviceRef(driver, device.PoolName, device.DeviceName)


def _merged(claim: PreparedClaim, other: PreparedClaim) -> PreparedClaim:
    """Merge two entries of one claim. The kubelet never writes two, but none may be lost."""
    waiting = set(claim.waiting) & set(other.waiting)
    return PreparedClaim(
        ref=claim.ref,
        devices=tuple(dict.fromkeys((*claim.devices, *other.devices))),
        pods=tuple(sorted({*claim.pods, *other.pods})),
        waiting=tuple(sorted(waiting)),
        skipped=tuple(sorted({*claim.skipped, *other.skipped})),
        cdi=tuple(dict.fromkeys((*claim.cdi, *other.cdi))),
    )


HEALTH_FILE: Final = "dra_health_state"
"""Name of the file in the kubelet's directory; owned by root, mode 0600."""
HEALTH_MAX_BYTES: Final = 64 << 20
DEFAULT_LEASE_S: Final = 30.0
"""Lease of an entry without one [s]."""
_HEALTH: Final = {"Healthy": Health.HEALTHY, "Unhealthy": Health.UNHEALTHY}


class _HealthEntry(msgspec.Struct):
    PoolName: str = ""
    DeviceName: str = ""
    Health: str = ""
    LastUpdated: str = ""
    HealthCheckTimeout: int = 0
    Message: str = ""


class _DriverHealth(msgspec.Struct):
    Devices: dict[str, _HealthEntry] | None = None


def read_health_state(path: Path, now: Instant) -> SourceAnswer[KubeletHealthRecord]:
    """Read the health of devices that the kubelet has stored. Blocks on the disk.

    Args:
        path: :data:`HEALTH_FILE` in the kubelet's directory.
        now: Current time.

    Returns:
        The health of devices, or ABSENT if the kubelet does not support it or no health has changed yet.
    """
    try:
        file = read_bounded(path, HEALTH_MAX_BYTES)
        beliefs, problems = parse_health_state(file.data)
    except ReadError as error:
        return SourceAnswer(Provenance(Origin.HEALTH_STATE, now), (), error.absence, str(error))
    except ValueError as error:
        return SourceAnswer(Provenance(Origin.HEALTH_STATE, now), (), Absence.UNREADABLE, f"{path}: {error}")
    return SourceAnswer(Provenance(Origin.HEALTH_STATE, now, file.written_s), beliefs, invalid=problems)


def parse_health_state(data: bytes) -> tuple[tuple[KubeletHealthRecord, ...], tuple[str, ...]]:
    """Parse the health of devices, and the problems of invalid entries.

    Raises:
        ValueError: The file is not in the kubelet's format; the text names the place.
    """
    try:
        drivers = msgspec.json.decode(data, type=dict[str, _DriverHealth] | None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"cannot be parsed: {error}") from None
    beliefs: list[KubeletHealthRecord] = []
    problems: list[str] = []
    for driver, key, device in _entries(drivers or {}):
        try:
            updated_s = datetime.fromisoformat(device.LastUpdated).timestamp()
        except ValueError:
            problems.append(f"{driver} {key[:200]!r}: LastUpdated {device.LastUpdated[:64]!r} is not a time")
            continue
        lease_s = device.HealthCheckTimeout / NS if device.HealthCheckTimeout else DEFAULT_LEASE_S
        ref = DeviceRef(driver, device.PoolName, device.DeviceName)
        health = _HEALTH.get(device.Health, Health.UNKNOWN)
        beliefs.append(KubeletHealthRecord(ref, health, device.Message, updated_s, lease_s))
    return tuple(beliefs), tuple(problems)


def _entries(drivers: dict[str, _DriverHealth]) -> Iterator[tuple[str, str, _HealthEntry]]:
    for driver, state in drivers.items():
        for key, device in (state.Devices or {}).items():
            yield driver, key, device


CPU_MANAGER_FILE: Final = "cpu_manager_state"
"""Name of the file in the kubelet's directory; owned by root, mode 0600."""
CPU_MANAGER_MAX_BYTES: Final = 16 << 20


class _CpuManagerCheckpoint(msgspec.Struct):
    policyName: str
    entries: dict[str, dict[str, str]] | None = None


def read_exclusive(path: Path) -> Mapping[str, Mapping[str, CpuSet]]:
    """Read the exclusive CPUs of containers, by the kubelet's pod UID and the container's
    name.

    Args:
        path: :data:`CPU_MANAGER_FILE` in the kubelet's directory.

    Raises:
        ProbeError: The file is absent, unreadable or invalid.
    """
    try:
        data = read_bounded(path, CPU_MANAGER_MAX_BYTES).data
    except ReadError as error:
        raise ProbeError(str(error)) from None
    try:
        return parse_exclusive(data)
    except ValueError as error:
        raise ProbeError(f"{path}: {error}") from None


def parse_exclusive(data: bytes) -> Mapping[str, Mapping[str, CpuSet]]:
    """Parse the exclusive CPUs of containers.

    Raises:
        ValueError: The data is not a checkpoint of the CPU manager.
    """
    try:
        checkpoint = msgspec.json.decode(data, type=_CpuManagerCheckpoint)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"is not a checkpoint of the CPU manager: {error}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return {
        uid: {name: cpus for name, text in containers.items() if (cpus := parse_cpus(text))}
        for uid, containers in (checkpoint.entries or {}).items()
    }
