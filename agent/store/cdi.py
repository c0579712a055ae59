"""CDI files: the changes that a container runtime makes to containers that use a prepared device.

Each claim has one file, written atomically, with one CDI device per device of the claim: the kubelet shows a
device's health under its first CDI id, so no two devices may share an id. A name ends in a digest of the
device's edits, because runtimes cache the meaning of a name.

Format: https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from agent.model.prepare import Operation
from agent.prepare.errors import doing
from agent.store.files import write_and_rename

VERSION: Final = "0.6.0"
"""Oldest version with annotations; a runtime refuses files of versions newer than it supports."""
DIGEST_CHARS: Final = 8
PERMISSIONS: Final = "rwm"

_CLASS: Final = re.compile(r"[A-Za-z](?:[-\w.]*[A-Za-z0-9])?/[A-Za-z](?:[-\w]*[A-Za-z0-9])?", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z0-9](?:[-\w.:]*[A-Za-z0-9])?", re.ASCII)
_UID: Final = re.compile(r"[A-Za-z0-9](?:[-\w.]*[A-Za-z0-9])?", re.ASCII)
_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_ANNOTATION: Final = re.compile(r"(?:[a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9](?:[-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)


class CdiMount(NamedTuple):
    """Mount in a container."""

    host_path: str
    """Source of the mount; of a file system without a device, the name of the file system."""
    container_path: str
    options: tuple[str, ...] = ()
    type: str = ""
    """File system type; empty: a bind mount."""


class CdiNode(NamedTuple):
    """Device file (such as ``/dev/nvidia0``) in a container, created like the host's."""

    path: str
    host_path: str = ""
    """Path on the host; empty: the same path."""
    permissions: str = "rw"
    """Permissions in the device cgroup: some of r, w and m."""


@dataclass(frozen=True, slots=True)
class CdiDevice:
    """Device of a claim as its containers see it; it must have at least one edit.

    Raises:
        ValueError: The text has the name or value that CDI does not allow.
    """

    name: str
    """Name of the device in the driver; the file adds a suffix that makes it unique."""
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[CdiMount, ...] = ()
    nodes: tuple[CdiNode, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self.name, _NAME, "a CDI device name")
        if not (self.env or self.mounts or self.nodes):
            raise ValueError(f"CDI device {self.name} changes nothing in a container; runtimes refuse that")
        for variable, value in self.env.items():
            _check(variable, _VARIABLE, "a variable name")
            if not value.isprintable():
                raise ValueError(f"{variable}={value!r} has characters that are not allowed in a variable")
        for mount in self.mounts:
            if not mount.host_path:
                raise ValueError(f"the mount at {mount.container_path!r} has no host path")
            _check_path(mount.container_path)
        for node in self.nodes:
            for path in (node.path, node.host_path or node.path):
                _check_path(path)
            if not node.permissions or not set(node.permissions) <= set(PERMISSIONS):
                raise ValueError(
                    f"{node.path}: permissions {node.permissions!r} are not some of {PERMISSIONS}"
                )
        for key in self.annotations:
            _check(key, _ANNOTATION, "an annotation key")

    @property
    def edits(self) -> dict[str, object]:
        """Container edits in the format of the file."""
        edits: dict[str, object] = {}
        if self.env:
            edits["env"] = [f"{variable}={value}" for variable, value in self.env.items()]
        if self.nodes:
            edits["deviceNodes"] = [_node(node) for node in self.nodes]
        if self.mounts:
            edits["mounts"] = [_mount(mount) for mount in self.mounts]
        return edits


def write_spec(
    directory: Path, vendor_class: str, claim_uid: str, devices: Sequence[CdiDevice]
) -> tuple[str, ...]:
    """Write the CDI file of a claim. Idempotent.

    Args:
        directory: ``/var/run/cdi``; created if its parent exists. Write at each prepare:
            a reboot clears it.
        vendor_class: ``<vendor>/<class>``; the vendor is a domain of yours: ``example.com/gpu``.
        claim_uid: UID of the claim.
        devices: At least one device, each name once.

    Returns:
        The CDI ids of the devices, in the order of `devices`.

    Raises:
        OSError: The write failed and the file is unchanged. Marked as :attr:`Operation.CDI`.
        ValueError: CDI does not allow the names.
    """
    path = _path(directory, vendor_class, claim_uid)
    if not devices:
        raise ValueError(f"no device for {path}; runtimes refuse such a file")
    for name, count in Counter(device.name for device in devices).items():
        if count > 1:
            raise ValueError(f"{path}: {count} devices are named {name}")
    names = [_unique_name(claim_uid, device) for device in devices]
    document = {
        "cdiVersion": VERSION,
        "kind": vendor_class,
        "devices": [_device(name, device) for name, device in zip(names, devices, strict=True)],
    }
    data = json.dumps(document, indent=1).encode() + b"\n"
    with doing(Operation.CDI, path):
        if _read(path) != data:
            _replace(path, data)
    return tuple(f"{vendor_class}={name}" for name in names)


def remove_spec(directory: Path, vendor_class: str, claim_uid: str) -> None:
    """Remove the CDI file of a claim. A missing file is no error.

    Raises:
        OSError: The removal failed. Marked as :attr:`Operation.CDI`.
        ValueError: CDI does not allow the names.
    """
    path = _path(directory, vendor_class, claim_uid)
    with doing(Operation.CDI, path):
        path.unlink(missing_ok=True)


# --- the format --------------------------------------------------------------------------------------------


def _path(directory: Path, vendor_class: str, claim_uid: str) -> Path:
    _check(vendor_class, _CLASS, "a CDI vendor/class")
    _check(claim_uid, _UID, "a claim UID")
    return directory / f"{vendor_class.replace('/', '-')}_{claim_uid}.json"


def _unique_name(claim_uid: str, device: CdiDevice) -> str:
    edits = json.dumps([device.edits, dict(device.annotations)], sort_keys=True)
    return f"{claim_uid}-{device.name}-{hashlib.sha256(edits.encode()).hexdigest()[:DIGEST_CHARS]}"


def _device(name: str, device: CdiDevice) -> dict[str, object]:
    found: dict[str, object] = {"name": name}
    if device.annotations:
        found["annotations"] = dict(device.annotations)
    return found | {"containerEdits": device.edits}


def _node(node: CdiNode) -> dict[str, object]:
    found: dict[str, object] = {"path": node.path, "permissions": node.permissions}
    return found | ({"hostPath": node.host_path} if node.host_path else {})


def _mount(mount: CdiMount) -> dict[str, object]:
    found: dict[str, object] = {"hostPath": mount.host_path, "containerPath": mount.container_path}
    if mount.options:
        found["options"] = list(mount.options)
    return found | ({"type": mount.type} if mount.type else {})


def _check(text: str, pattern: re.Pattern[str], kind: str) -> None:
    if not pattern.fullmatch(text):
        raise ValueError(f"{text!r} is not {kind}")


def _check_path(path: str) -> None:
    if not path.startswith("/") or ".." in path.split("/") or not path.isprintable():
        raise ValueError(f"{path!r} is not an absolute path")


# --- the file ----------------------------------------------------------------------------------------------


def _read(path: Path) -> bytes | None:
    """Return the content of a CDI file; None: the file cannot be read."""
    try:
        with open(path, "rb", opener=_open_to_read) as file:
            return file.read()
    except OSError:
        return None


def _open_to_read(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _replace(path: Path, data: bytes) -> None:
    """Replace a CDI file atomically: runtimes read only names that end in .json."""
    path.parent.mkdir(mode=0o755, exist_ok=True)
    write_and_rename(
        path, data, new=path.with_name(f".{path.name}.new"), mode=0o644
    )  # a runtime may not be root
