"""The kubelet's checkpoint of claims: which it has prepared, or is about to, with what devices, for whom.

Its format is the kubelet's own affair and grows. What is younger than this file is passed over, and the
version says nothing: the kubelet does not look at it either. It is written before the drivers are asked, so a
claim may stand in it without devices. It is replaced by renaming, so a torn one is a disk's work, or that of
whoever copied it.

Source: kubelet ``cm/dra/state/checkpoint.go`` and ``state.go`` as of 1.36 and 1.37.
"""

import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from agent.config.config import CHECKPOINT
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import DeviceUse, Origin, PreparedClaim, Provenance, SourceAnswer
from agent.model.reading import Absence
from agent.model.time import Instant
from agent.system.read_file import ReadError, read_bounded

NAME: Final = CHECKPOINT
"""In the kubelet's directory; root's, mode 0600."""
KIND: Final = "DRACheckpoint"
FILE_BYTES: Final = 64 << 20
ATTEMPTS: Final = 3
PAUSE_S: Final = 0.05
"""Between attempts at a torn file. The kubelet writes one within milliseconds."""
_SKIPS: Final = frozenset({"*", "NodePrepareResources"})


class Torn(ValueError):
    """It is not what was written: another attempt may find it whole."""


class _Device(msgspec.Struct):
    PoolName: str
    DeviceName: str
    ShareID: str | None = None
    RequestNames: list[str] | None = None
    CDIDeviceIDs: list[str] | None = None


class _DriverState(msgspec.Struct):
    Devices: list[_Device] | None = None
    skipNodeOperations: list[str] | None = None
    """From 1.37 on."""


class _ClaimInfo(msgspec.Struct):
    ClaimUID: str
    ClaimName: str
    Namespace: str
    PodUIDs: dict[str, Any] | None = None
    DriverState: dict[str, _DriverState] | None = None


class _Data(msgspec.Struct):
    kind: str = ""
    ClaimInfoStateList: list[_ClaimInfo] | None = None


class _Checkpoint(msgspec.Struct):
    Data: str
    Checksum: int


def read_checkpoint(
    path: Path, now: Instant, pause: Callable[[float], None] = time.sleep
) -> SourceAnswer[PreparedClaim]:
    """What the kubelet has written down of claims.

    Args:
        path: :data:`NAME` in the kubelet's directory.
        now: When that is.
        pause: Called with seconds between attempts; blocks.

    Returns:
        Or why there is nothing: absent where the kubelet has never run with claims.
    """
    why = ""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            file = read_bounded(path, FILE_BYTES)
            claims = parse_checkpoint(file.data)
        except ReadError as error:
            return SourceAnswer(Provenance(Origin.CHECKPOINT, now), (), error.absence, str(error))
        except Torn as error:
            why = f"{path}: {error}, {ATTEMPTS} times"
            if attempt < ATTEMPTS:
                pause(PAUSE_S)
        except ValueError as error:
            why = f"{path}: {error}"
            break
        else:
            return SourceAnswer(Provenance(Origin.CHECKPOINT, now, file.written_s), claims)
    return SourceAnswer(Provenance(Origin.CHECKPOINT, now), (), Absence.UNREADABLE, why)


def parse_checkpoint(data: bytes) -> tuple[PreparedClaim, ...]:
    """The claims of a checkpoint, each once, in its order.

    Raises:
        Torn: It is not complete, or its sum is wrong; with both sums.
        ValueError: It is a checkpoint of something else, or of a form that nobody here knows.
    """
    try:
        envelope = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Torn(f"is no JSON: {error}") from None
    except RecursionError:
        raise ValueError("brackets within brackets without end") from None
    try:
        checkpoint = msgspec.convert(envelope, _Checkpoint)
    except msgspec.ValidationError as error:
        raise ValueError(f"is no checkpoint as kubelets have written since 1.32: {error}") from None
    found = zlib.crc32(checkpoint.Data.encode("utf-8", "surrogatepass"))
    if found != checkpoint.Checksum:
        raise Torn(f"its sum is {found}, it says {checkpoint.Checksum}")
    try:
        content = msgspec.json.decode(checkpoint.Data, type=_Data)
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
    given = [(driver, one) for driver, state in states.items() for one in state.Devices or ()]
    devices = [_use(*one) for one in given]
    cdi = [(id_, _ref(*one)) for one in given for id_ in one[1].CDIDeviceIDs or ()]
    waiting = [driver for driver, state in states.items() if not state.Devices and driver not in skipped]
    return PreparedClaim(
        ref=ClaimRef(info.Namespace, info.ClaimName, info.ClaimUID),
        devices=tuple(dict.fromkeys(devices)),  # to 1.36 a prepare that was done again lists them twice
        pods=tuple(sorted(info.PodUIDs or ())),
        waiting=tuple(sorted(waiting)),
        skipped=tuple(sorted(skipped)),
        cdi=tuple(dict.fromkeys(cdi)),
    )


def _use(driver: str, device: _Device) -> DeviceUse:
    # an alternative's name is the driver's affair: the kubelet asks for the request before the slash
    requests = dict.fromkeys(name.partition("/")[0] for name in device.RequestNames or ())
    return DeviceUse(_ref(driver, device), tuple(requests), device.ShareID or "")


def _ref(driver: str, device: _Device) -> DeviceRef:
    return DeviceRef(driver, device.PoolName, device.DeviceName)


def _merged(one: PreparedClaim, other: PreparedClaim) -> PreparedClaim:
    """The same claim twice: the kubelet never writes that, and nothing of it is to be lost."""
    waiting = set(one.waiting) & set(other.waiting)
    return PreparedClaim(
        ref=one.ref,
        devices=tuple(dict.fromkeys((*one.devices, *other.devices))),
        pods=tuple(sorted({*one.pods, *other.pods})),
        waiting=tuple(sorted(waiting)),
        skipped=tuple(sorted({*one.skipped, *other.skipped})),
        cdi=tuple(dict.fromkeys((*one.cdi, *other.cdi))),
    )
