"""Writer of CDI files, from which a container runtime adds the devices of a prepared claim to containers.

Each claim has one file, written atomically, with one CDI device per device of the claim: the kubelet shows a
device's health under its first CDI id, so no two devices may share an id. A CDI name ends in a digest of the
device's edits, because runtimes cache the meaning of a name.

Format: https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Final

from agent.model.prepare import Operation
from agent.prepare.errors import doing
from agent.store.state_files import write_and_rename
from agent.system.files import OpenDirectory, StrPath

VERSION: Final = "0.6.0"
"""CDI version of the files: the oldest with annotations; runtimes refuse versions newer than their own."""
DIGEST_CHARS: Final = 8
PERMISSIONS: Final = "rwm"

_CLASS: Final = re.compile(r"[A-Za-z](?:[-\w.]*[A-Za-z0-9])?/[A-Za-z](?:[-\w]*[A-Za-z0-9])?", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z0-9](?:[-\w.:]*[A-Za-z0-9])?", re.ASCII)
_UID: Final = re.compile(r"[A-Za-z0-9](?:[-\w.]*[A-Za-z0-9])?", re.ASCII)
_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_ANNOTATION: Final = re.compile(r"(?:[a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9](?:[-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class CdiMount:
    """Mount that a CDI device adds to a container."""

    host_path: str
    """Source of the mount: a path on the host, or the name of a file system without a device (tmpfs)."""
    container_path: str
    _: KW_ONLY
    options: tuple[str, ...] = ()
    type: str = ""
    """File system type; empty: a bind mount."""


@dataclass(frozen=True, slots=True)
class CdiNode:
    """Device file (such as ``/dev/nvidia0``) that a CDI device adds to a container."""

    path: str
    _: KW_ONLY
    host_path: str = ""
    """Path of the device file on the host; empty: the same as in the container."""
    permissions: str = "rw"
    """Permissions of the containers in the device cgroup: some of r, w and m."""


@dataclass(frozen=True, slots=True)
class CdiDevice:
    """Additions of a claimed device to the containers that use it: at least one variable, mount or device
    file.

    Raises:
        ValueError: CDI does not allow a name or value; the text contains the name or value.
    """

    name: str
    """Name of the device in the driver; its name in the CDI file also has the claim's UID and a digest."""
    _: KW_ONLY
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[CdiMount, ...] = ()
    nodes: tuple[CdiNode, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_match(self.name, _NAME, "a CDI device name")
        if not (self.env or self.mounts or self.nodes):
            raise ValueError(
                f"CDI device {self.name} changes nothing in a container; add env, mounts or nodes"
            )
        for variable, value in self.env.items():
            _require_match(variable, _VARIABLE, "a variable name")
            if not value.isprintable():
                raise ValueError(
                    f"CDI device {self.name}: {variable}={value!r} has unprintable characters; remove them"
                )
        for mount in self.mounts:
            if not mount.host_path:
                raise ValueError(
                    f"CDI device {self.name}: mount {mount.container_path!r} has no host_path; set it"
                )
            _require_absolute(mount.container_path)
        for node in self.nodes:
            for path in (node.path, node.host_path or node.path):
                _require_absolute(path)
            if not node.permissions or not set(node.permissions) <= set(PERMISSIONS):
                raise ValueError(
                    f"device file {node.path}: permissions {node.permissions!r}: "
                    f"only the letters {PERMISSIONS} are allowed"
                )
        for key in self.annotations:
            _require_match(key, _ANNOTATION, "an annotation key")

    @property
    def edits(self) -> dict[str, object]:
        """Changes that the device makes to a container, in the form of ``containerEdits`` in the CDI file."""
        edits: dict[str, object] = {}
        if self.env:
            edits["env"] = [f"{variable}={value}" for variable, value in self.env.items()]
        if self.nodes:
            edits["deviceNodes"] = [_encode_node(node) for node in self.nodes]
        if self.mounts:
            edits["mounts"] = [_encode_mount(mount) for mount in self.mounts]
        return edits


def write_cdi_spec(
    directory: StrPath, vendor_class: str, claim_uid: str, devices: Sequence[CdiDevice]
) -> tuple[str, ...]:
    """Write the CDI file of a claim.

    Each prepare must write it, because a reboot clears the directory. Idempotent.

    Args:
        directory: ``/var/run/cdi``; created if its parent exists.
        vendor_class: ``<vendor>/<class>``; the vendor is a domain that you own: ``example.com/gpu``.
        devices: At least one device, each name once.

    Returns:
        The CDI ids of the devices, in the order of `devices`.

    Raises:
        OSError: The write failed and the file is unchanged. Operation: :attr:`Operation.CDI`.
        ValueError: CDI does not allow a name, or `devices` is empty or has a name twice.
    """
    path = _path(directory, vendor_class, claim_uid)
    if not devices:
        raise ValueError(f"CDI file {path}: no devices; runtimes refuse such a file, so pass at least one")
    for name, count in Counter(device.name for device in devices).items():
        if count > 1:
            raise ValueError(f"CDI file {path}: {count} devices are named {name}; names must differ")
    names = [_unique_name(claim_uid, device) for device in devices]
    document = {
        "cdiVersion": VERSION,
        "kind": vendor_class,
        "devices": [_encode_device(name, device) for name, device in zip(names, devices, strict=True)],
    }
    data = json.dumps(document, indent=1).encode() + b"\n"
    with doing(Operation.CDI, path):
        if _read_cdi_file(path) != data:
            _replace_cdi_file(path, data)
    return tuple(f"{vendor_class}={name}" for name in names)


def remove_cdi_spec(directory: StrPath, vendor_class: str, claim_uid: str) -> None:
    """Remove the CDI file of a claim. A missing file is no error.

    Raises:
        OSError: The removal failed. Operation: :attr:`Operation.CDI`.
        ValueError: CDI does not allow the names.
    """
    path = _path(directory, vendor_class, claim_uid)
    with doing(Operation.CDI, path):
        path.unlink(missing_ok=True)


def _path(directory: StrPath, vendor_class: str, claim_uid: str) -> Path:
    _require_match(vendor_class, _CLASS, "a CDI vendor/class")
    _require_match(claim_uid, _UID, "a claim UID")
    return Path(directory) / f"{vendor_class.replace('/', '-')}_{claim_uid}.json"


def _unique_name(claim_uid: str, device: CdiDevice) -> str:
    edits = json.dumps([device.edits, dict(device.annotations)], sort_keys=True)
    return f"{claim_uid}-{device.name}-{hashlib.sha256(edits.encode()).hexdigest()[:DIGEST_CHARS]}"


def _encode_device(name: str, device: CdiDevice) -> dict[str, object]:
    found: dict[str, object] = {"name": name}
    if device.annotations:
        found["annotations"] = dict(device.annotations)
    return found | {"containerEdits": device.edits}


def _encode_node(node: CdiNode) -> dict[str, object]:
    found: dict[str, object] = {"path": node.path, "permissions": node.permissions}
    return found | ({"hostPath": node.host_path} if node.host_path else {})


def _encode_mount(mount: CdiMount) -> dict[str, object]:
    found: dict[str, object] = {"hostPath": mount.host_path, "containerPath": mount.container_path}
    if mount.options:
        found["options"] = list(mount.options)
    return found | ({"type": mount.type} if mount.type else {})


def _require_match(text: str, pattern: re.Pattern[str], kind: str) -> None:
    if not pattern.fullmatch(text):
        raise ValueError(f"CDI file: {text!r} is not {kind}: it must match {pattern.pattern}")


def _require_absolute(path: str) -> None:
    if not path.startswith("/") or ".." in path.split("/") or not path.isprintable():
        raise ValueError(
            f"CDI file: path {path!r} is not an absolute path without .. and unprintable characters"
        )


def _read_cdi_file(path: Path) -> bytes | None:
    """Return the content of a CDI file; None: the file cannot be read."""
    try:
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
            return file.read()
    except OSError:
        return None


def _replace_cdi_file(path: Path, data: bytes) -> None:
    """Replace a CDI file atomically by renaming a temporary file.

    Container runtimes ignore the temporary file, because they read only names that end in .json. The
    directory belongs to them, whatever its mode and owner; a runtime may not be root.
    """
    path.parent.mkdir(mode=0o755, exist_ok=True)
    write_and_rename(
        path,
        data,
        temporary=path.with_name(f".{path.name}.new"),
        mode=0o644,
        directory_type=OpenDirectory,
    )
