"""Readers of the kubelet's state files: prepared claims, health of devices, exclusive CPUs of containers.

The file formats are internal to the kubelet and grow; unknown keys are ignored.

- Claims: the version is ignored, as by the kubelet. The kubelet writes a claim before it calls the drivers,
  so the claim may have no devices yet. The file is replaced by rename, so an incomplete one comes from a disk
  error or a copy. Source: kubelet ``cm/dra/state/checkpoint.go`` and ``state.go`` as of 1.36 and 1.37.
- Health: the kubelet writes only when a health or message changes, so an old file may hold current health.
  Up to 1.36 a device that its driver leaves out stays, as Unknown after its lease; from 1.37 on it is
  removed. Source: kubelet ``cm/dra/healthinfo.go`` and ``state/state.go`` as of 1.36 and 1.37.
- Exclusive CPUs of the CPU manager: without CPUs allocated by DRA drivers, and without those of whole pods
  (gate PodLevelResourceManagers). The checksum covers a Go value's text and is not verified: an incomplete
  file is not JSON. Source: kubelet ``cm/cpumanager/state/checkpoint.go`` as of 1.26 to 1.37; all have
  ``entries``.

The module also has the reader of the kubelet's configuration: from the files and flags of its process, or
from a given file.

A process named kubelet shows its flags, which take precedence over its files, and its own view of the file
system. Kubelets that run inside another program, such as that of k3s, show neither. Blocks on the disk.
"""

import os
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from agent.cgroup_audit.kubelet_config import (
    DIRECTORY_FLAG,
    FILE_FLAG,
    KubeletConfig,
    merge_configs,
    parse_flags,
    parse_kubelet_config,
    with_flags,
)
from agent.config.config import CHECKPOINT
from agent.errors import PermissionDeniedError, ProbeError, UsageError
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import (
    AllocatedDevice,
    KubeletHealthRecord,
    Origin,
    PreparedClaim,
    Provenance,
    SourceAnswer,
)
from agent.model.cpuset import CpuSet, parse_cpus
from agent.model.health import Health
from agent.model.json_values import JsonObject
from agent.model.reading import Absence
from agent.model.time import NS, Instant
from agent.sources.kubectl_files import parse_documents
from agent.system.files import ReadError, read_bounded

CLAIMS_FILE: Final = CHECKPOINT
"""Name of the claims checkpoint in the kubelet's directory; owned by root, mode 0600."""
CLAIMS_CHECKPOINT_KIND: Final = "DRACheckpoint"
CLAIMS_MAX_BYTES: Final = 32 << 20
CLAIMS_MAX: Final = 8192
"""Largest number of claims of the checkpoint that are kept.

A kubelet has a few per pod, and each takes 4 KiB in the agent.
"""
CLAIM_MAX_BYTES: Final = 1 << 20
"""Largest claim of the checkpoint that is decoded; 256 pods, the API's limit, take 12 KiB [B]."""
CLAIM_PARTS_MAX: Final = 131_072
"""Largest number of parts of all claims that are kept, 0.2 KiB each in the agent: pods, devices and their
requests, CDI devices, drivers."""
ATTEMPTS: Final = 3
RETRY_PAUSE_S: Final = 0.05
"""Pause between attempts to read an incomplete file; the kubelet writes one within milliseconds [s]."""
_SKIPS: Final = frozenset({"*", "NodePrepareResources"})


class IncompleteCheckpoint(ValueError):
    """Claims checkpoint that is incomplete; reading the file again may succeed."""


class _CheckpointDevice(msgspec.Struct):
    PoolName: str
    DeviceName: str
    ShareID: str | None = None
    RequestNames: list[str] | None = None
    CDIDeviceIDs: list[str] | None = None


class _DriverState(msgspec.Struct):
    Devices: list[_CheckpointDevice] | None = None
    skipNodeOperations: list[str] | None = None
    """Calls of the driver that the kubelet skips for the claim; from 1.37 on."""


class _ClaimInfo(msgspec.Struct):
    ClaimUID: str
    ClaimName: str
    Namespace: str
    PodUIDs: dict[str, Any] | None = None
    DriverState: dict[str, _DriverState] | None = None


class _ClaimList(msgspec.Struct):
    kind: str = ""
    ClaimInfoStateList: list[msgspec.Raw] | None = None
    """Claims of the checkpoint as raw JSON of a _ClaimInfo, of which only those that are kept are decoded."""


class _Checkpoint(msgspec.Struct):
    Data: str
    Checksum: int


def read_claims_checkpoint(
    path: Path, now: Instant, pause: Callable[[float], None] = time.sleep
) -> SourceAnswer[PreparedClaim]:
    """Read the claims that the kubelet has checkpointed as prepared. Blocks on the disk.

    Args:
        path: :data:`CLAIMS_FILE` in the kubelet's directory.
        now: Current time.
        pause: Waits the given seconds before an incomplete file is read again.

    Returns:
        The claims within the limits, and a text if others are left out; ABSENT if the kubelet has never run
        with claims, UNREADABLE with the reason.
    """
    reason = ""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            file = read_bounded(path, CLAIMS_MAX_BYTES)
            claims, entries, left_out = parse_claims_checkpoint(file.data)
        except ReadError as error:
            return SourceAnswer(Provenance(Origin.CHECKPOINT, now), (), error.absence, str(error))
        except IncompleteCheckpoint as error:
            reason = f"claims checkpoint {path}: {error}, in {ATTEMPTS} attempts"
            if attempt < ATTEMPTS:
                pause(RETRY_PAUSE_S)
        except ValueError as error:
            reason = f"claims checkpoint {path}: {error}"
            break
        else:
            problem = (
                f"claims checkpoint {path}: has {entries} claims, of which {left_out} exceed a limit: "
                f"{CLAIMS_MAX} claims, {CLAIM_MAX_BYTES} bytes of a claim, {CLAIM_PARTS_MAX} pods and "
                f"devices of all claims; the pods of {left_out} claims are not known"
            )
            written = Provenance(Origin.CHECKPOINT, now, file.written_s)
            return SourceAnswer(written, claims, invalid=(problem,) if left_out else ())
    return SourceAnswer(Provenance(Origin.CHECKPOINT, now), (), Absence.UNREADABLE, reason)


def parse_claims_checkpoint(data: bytes) -> tuple[tuple[PreparedClaim, ...], int, int]:
    """Parse the claims in a claims checkpoint that are within the limits; entries of one claim are merged.

    Returns the claims, the number of entries, and how many of them are left out: beyond CLAIMS_MAX,
    CLAIM_MAX_BYTES or CLAIM_PARTS_MAX.

    Raises:
        IncompleteCheckpoint: The file is incomplete, or its checksum is wrong; the text has both checksums.
        ValueError: The file is another checkpoint, or has an unknown format.
    """
    try:
        checkpoint = msgspec.json.decode(data, type=_Checkpoint)  # makes no objects of other values
    except msgspec.ValidationError as error:
        raise ValueError(f"is not in the format of kubelets since 1.32: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise IncompleteCheckpoint(f"is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("JSON is nested too deeply to be parsed") from None
    found = zlib.crc32(checkpoint.Data.encode("utf-8", "surrogatepass"))
    if found != checkpoint.Checksum:
        raise IncompleteCheckpoint(
            f"checksum of the content is {found}, but the file states {checkpoint.Checksum}"
        )
    try:
        content = msgspec.json.decode(checkpoint.Data, type=_ClaimList)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"key Data cannot be parsed: {error}") from None
    if content.kind != CLAIMS_CHECKPOINT_KIND:
        raise ValueError(f"key kind is {content.kind[:64]!r}, expected {CLAIMS_CHECKPOINT_KIND!r}")
    entries = content.ClaimInfoStateList or []
    claims: dict[ClaimRef, PreparedClaim] = {}
    left_out, parts = max(0, len(entries) - CLAIMS_MAX), 0
    for entry in entries[:CLAIMS_MAX]:
        claim = _prepared_claim(_decode_claim(entry)) if memoryview(entry).nbytes <= CLAIM_MAX_BYTES else None
        size = _count_parts(claim) if claim is not None else 0
        if claim is None or parts + size > CLAIM_PARTS_MAX:
            left_out += 1
            continue
        parts += size
        before = claims.get(claim.ref)
        claims[claim.ref] = _merge_claims(before, claim) if before else claim
    return tuple(claims.values()), len(entries), left_out


def _count_parts(claim: PreparedClaim) -> int:
    """Return the number of a claim's pods, devices, requests, CDI devices and drivers."""
    lists = (claim.pods, claim.devices, claim.cdi_ids, claim.waiting, claim.skipped)
    return sum(map(len, lists)) + sum(len(device.requests) for device in claim.devices)


def _decode_claim(entry: msgspec.Raw) -> _ClaimInfo:
    try:
        return msgspec.json.decode(entry, type=_ClaimInfo)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"key Data cannot be parsed: {error}") from None


def _prepared_claim(info: _ClaimInfo) -> PreparedClaim:
    states = info.DriverState or {}
    skipped = {driver for driver, state in states.items() if _SKIPS & set(state.skipNodeOperations or ())}
    found = [(driver, device) for driver, state in states.items() for device in state.Devices or ()]
    devices = [_device_use(driver, device) for driver, device in found]
    cdi = [
        (id_, _device_ref(driver, device)) for driver, device in found for id_ in device.CDIDeviceIDs or ()
    ]
    waiting = [driver for driver, state in states.items() if not state.Devices and driver not in skipped]
    return PreparedClaim(
        ref=ClaimRef(info.Namespace, info.ClaimName, info.ClaimUID),
        devices=tuple(dict.fromkeys(devices)),  # up to 1.36 a repeated prepare lists them twice
        pods=tuple(sorted(info.PodUIDs or ())),
        waiting=tuple(sorted(waiting)),
        skipped=tuple(sorted(skipped)),
        cdi_ids=tuple(dict.fromkeys(cdi)),
    )


def _device_use(driver: str, device: _CheckpointDevice) -> AllocatedDevice:
    # the part after the slash names an alternative; the kubelet uses the request before it
    requests = dict.fromkeys(name.partition("/")[0] for name in device.RequestNames or ())
    return AllocatedDevice(_device_ref(driver, device), tuple(requests), device.ShareID or "")


def _device_ref(driver: str, device: _CheckpointDevice) -> DeviceRef:
    return DeviceRef(driver, device.PoolName, device.DeviceName)


def _merge_claims(claim: PreparedClaim, other: PreparedClaim) -> PreparedClaim:
    """Merge two entries of one claim in the checkpoint, so that no device is lost.

    The kubelet normally writes one entry.
    """
    waiting = set(claim.waiting) & set(other.waiting)
    return PreparedClaim(
        ref=claim.ref,
        devices=tuple(dict.fromkeys((*claim.devices, *other.devices))),
        pods=tuple(sorted({*claim.pods, *other.pods})),
        waiting=tuple(sorted(waiting)),
        skipped=tuple(sorted({*claim.skipped, *other.skipped})),
        cdi_ids=tuple(dict.fromkeys((*claim.cdi_ids, *other.cdi_ids))),
    )


HEALTH_FILE: Final = "dra_health_state"
"""Name of the file with the devices' health in the kubelet's directory; owned by root, mode 0600."""
HEALTH_MAX_BYTES: Final = 64 << 20
DEFAULT_LEASE_S: Final = 30.0
"""Time for which the health of a device is valid if the entry has no ``HealthCheckTimeout`` [s]."""
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
    """Read the health that the kubelet has stored for each DRA device. Blocks on the disk.

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
        return SourceAnswer(
            Provenance(Origin.HEALTH_STATE, now),
            (),
            Absence.UNREADABLE,
            f"device health file {path}: {error}",
        )
    return SourceAnswer(Provenance(Origin.HEALTH_STATE, now, file.written_s), beliefs, invalid=problems)


def parse_health_state(data: bytes) -> tuple[tuple[KubeletHealthRecord, ...], tuple[str, ...]]:
    """Parse the kubelet's file of devices' health.

    Returns the health of each device, and one problem text for each invalid entry.

    Raises:
        ValueError: The data is not in the kubelet's format.
    """
    try:
        drivers = msgspec.json.decode(data, type=dict[str, _DriverHealth] | None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"is not in the kubelet's format: {error}") from None
    beliefs: list[KubeletHealthRecord] = []
    problems: list[str] = []
    entries = [
        (driver, key, device)
        for driver, state in (drivers or {}).items()
        for key, device in (state.Devices or {}).items()
    ]
    for driver, key, device in entries:
        try:
            updated_s = datetime.fromisoformat(device.LastUpdated).timestamp()
        except ValueError:
            problems.append(
                f"device {key[:200]!r} of {driver}: LastUpdated {device.LastUpdated[:64]!r} is not a time"
            )
            continue
        lease_s = device.HealthCheckTimeout / NS if device.HealthCheckTimeout else DEFAULT_LEASE_S
        ref = DeviceRef(driver, device.PoolName, device.DeviceName)
        health = _HEALTH.get(device.Health, Health.UNKNOWN)
        beliefs.append(KubeletHealthRecord(ref, health, device.Message, updated_s, lease_s))
    return tuple(beliefs), tuple(problems)


CPU_MANAGER_FILE: Final = "cpu_manager_state"
"""Name of the CPU manager's state file in the kubelet's directory; owned by root, mode 0600."""
CPU_MANAGER_MAX_BYTES: Final = 16 << 20


class _CpuManagerCheckpoint(msgspec.Struct):
    policyName: str
    entries: dict[str, dict[str, str]] | None = None


def read_exclusive_cpus(path: Path) -> Mapping[str, Mapping[str, CpuSet]]:
    """Read the CPUs that the kubelet's CPU manager gave to single containers, by pod UID and container name.

    The UID of a static pod is that of its configuration.

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
        return parse_exclusive_cpus(data)
    except ValueError as error:
        raise ProbeError(f"CPU manager state {path}: {error}") from None


def parse_exclusive_cpus(data: bytes) -> Mapping[str, Mapping[str, CpuSet]]:
    """Parse the CPUs of containers that have exclusive CPUs, by pod UID and container name.

    Raises:
        ValueError: The data is not a state file of the CPU manager.
    """
    try:
        checkpoint = msgspec.json.decode(data, type=_CpuManagerCheckpoint)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"is not a state file of the CPU manager: {error}") from None
    except RecursionError:
        raise ValueError("JSON is nested too deeply to be parsed") from None
    return {
        uid: {name: cpus for name, text in containers.items() if (cpus := parse_cpus(text))}
        for uid, containers in (checkpoint.entries or {}).items()
    }


# --- the kubelet's configuration ---------------------------------------------------------------------------

COMMAND: Final = "kubectl get --raw /api/v1/nodes/NODE/proxy/configz"
"""Command that prints a kubelet's configuration in effect, which an operator can store in a file."""
_FILE_BYTES: Final = 4 << 20
_ARGUMENTS_BYTES: Final = 1 << 20
_NAME: Final = "kubelet"
_DROP_IN_ENTRIES: Final = 1000
"""Largest number of files and directories in the kubelet's drop-in directory."""
_LINKS_MAX: Final = 40
"""Largest number of symbolic links in a path, as in Linux."""


class KubeletConfigResult(NamedTuple):
    """Configuration of the kubelet, or the reason why it is unknown."""

    config: KubeletConfig | None
    reason: str = ""


def read_config_file(path: Path) -> KubeletConfig:
    """Read a file with the kubelet's configuration in effect: a KubeletConfiguration, or output of COMMAND.

    Raises:
        UsageError: The file is absent, unreadable or not a configuration of a kubelet.
        PermissionDeniedError: This user may not read the file.
    """
    try:
        return parse_kubelet_config(_read_document(path), str(path))
    except ReadError as error:
        raise (PermissionDeniedError if error.is_forbidden else UsageError)(str(error)) from None
    except ValueError as error:
        raise UsageError(f"file {path}: {error}; create it with: {COMMAND}") from None


def read_running_config(procfs_root: Path) -> KubeletConfigResult:
    """Read the configuration of the kubelet that runs on this machine, as its process shows it."""
    found = list(_kubelet_processes(procfs_root))
    if len(found) != 1:
        return KubeletConfigResult(None, f"{len(found) or 'no'} process{'es' if found else ''} named {_NAME}")
    try:
        data = read_bounded(found[0] / "cmdline", _ARGUMENTS_BYTES).data
        arguments = [part.decode(errors="replace") for part in data.rstrip(b"\0").split(b"\0")]
        flags = parse_flags(arguments[1:])
        config = parse_kubelet_config(_with_files(found[0], flags), flags.get(FILE_FLAG, "flags"))
    except (ReadError, ValueError) as error:
        return KubeletConfigResult(None, str(error))
    return KubeletConfigResult(config)


def _kubelet_processes(procfs_root: Path) -> Iterator[Path]:
    try:
        names = sorted(name for name in os.listdir(procfs_root) if name.isdecimal())
    except OSError:
        return
    for name in names:
        try:
            comm = read_bounded(procfs_root / name / "comm", _ARGUMENTS_BYTES).data
        except ReadError:
            continue  # the process has ended
        if comm.strip() == _NAME.encode():
            yield procfs_root / name


def _with_files(process: Path, flags: Mapping[str, str]) -> JsonObject:
    """Return a kubelet's configuration, merged from its file, its drop-in files in order, and its flags.

    Args:
        process: Directory of the kubelet's process in procfs.
    """
    config: JsonObject = {}
    if file := flags.get(FILE_FLAG):
        config = _read_document(_seen_by(process, file))
    if directory := flags.get(DIRECTORY_FLAG):
        if config.get("enforceNodeAllocatable") == []:  # the kubelet drops empty lists before it merges
            config = merge_configs(config, {"enforceNodeAllocatable": None})
        for path in _list_drop_ins(process, directory):
            config = merge_configs(config, _read_document(path))
    return with_flags(config, flags)


def _list_drop_ins(process: Path, directory: str) -> Iterator[Path]:
    """Yield the drop-in files in a kubelet's directory and its subdirectories, in the kubelet's order.

    The order is by name, each directory in the place of its name. As in the kubelet, a symbolic link is never
    a directory, not even `directory` itself unless it ends with a slash. Source: kubelet
    ``cmd/kubelet/app/server.go`` as of 1.37, and Go's ``filepath.WalkDir``.

    Args:
        process: Directory of the kubelet's process in procfs.
        directory: Value of ``--config-dir``.

    Raises:
        ValueError: A directory cannot be listed, or the entries are too many.
    """
    parent, name = os.path.split(directory)
    pending, count = [_seen_by(process, parent) / name], 0
    while pending:
        path = pending.pop()
        try:
            if stat.S_ISDIR(path.lstat().st_mode):
                names = sorted(os.listdir(path), key=os.fsencode, reverse=True)
                count += len(names)
                pending += [path / name for name in names]
            elif path.name.endswith(".conf"):
                yield _seen_by(process, path.name, path.parent)
        except OSError as error:
            raise ValueError(f"directory {path}: cannot be listed: {error.strerror}") from None
        if count > _DROP_IN_ENTRIES:
            raise ValueError(f"directory {directory}: over {_DROP_IN_ENTRIES} files, the limit; remove some")


def _seen_by(process: Path, path: str, start: Path | None = None) -> Path:
    """Return the path at which this process can read a file of another process.

    The path is below the other process's root directory or working directory. Symbolic links are resolved
    here: the kernel would look for the target of an absolute one in this process's own root directory.

    Args:
        process: Directory of the other process in procfs.
        path: Path in the view of the other process.
        start: Directory to which the path is relative; None: the other process's working directory.

    Raises:
        ValueError: The path has too many symbolic links.
    """
    at, links = start or process / "cwd", 0
    parts = [*reversed(Path(path).parts)]
    while parts:
        part = parts.pop()
        if part.startswith("/"):
            at = process / "root"
            continue
        try:
            target = os.readlink(at / part)
        except OSError:  # no link; if it is absent, the read fails
            at /= part
            continue
        links += 1
        if links > _LINKS_MAX:
            raise ValueError(f"file {path}: over {_LINKS_MAX} symbolic links, the limit")
        parts += reversed(Path(target).parts)
    return at


def _read_document(path: Path) -> JsonObject:
    documents = parse_documents(read_bounded(path, _FILE_BYTES).data)
    if len(documents) != 1 or not isinstance(documents[0], Mapping):
        raise ValueError(f"file {path}: must contain exactly one object")
    return documents[0]
