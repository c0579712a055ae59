"""CDI files: what a container runtime is to put into the containers that use a prepared device.

A file per claim, whole or not there, and in it a device per device of the claim: the kubelet shows a device's
health under its first CDI id, so no two may share one. A name ends in a digest of what it stands for:
runtimes remember what a name meant, so it never means something else later.

Who is given what is the driver's to say; containers' cgroups are the runtime's.
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
from agent.prepare.doing import doing
from agent.store.files import put

VERSION: Final = "0.6.0"
"""The oldest that has annotations: a runtime refuses files of versions that are younger than itself."""
DIGEST_CHARS: Final = 8
PERMISSIONS: Final = "rwm"

_CLASS: Final = re.compile(r"[A-Za-z](?:[-\w.]*[A-Za-z0-9])?/[A-Za-z](?:[-\w]*[A-Za-z0-9])?", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z0-9](?:[-\w.:]*[A-Za-z0-9])?", re.ASCII)
_UID: Final = re.compile(r"[A-Za-z0-9](?:[-\w.]*[A-Za-z0-9])?", re.ASCII)
_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_ANNOTATION: Final = re.compile(r"(?:[a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9](?:[-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)


class CdiMount(NamedTuple):
    """A mount in the container."""

    host_path: str
    """What is mounted; of a file system that has no device, its name."""
    container_path: str
    options: tuple[str, ...] = ()
    type: str = ""
    """File system; empty: a bind mount."""


class CdiNode(NamedTuple):
    """A device node in the container, made like the host's."""

    path: str
    host_path: str = ""
    """Where it is on the host; empty: at the same path."""
    permissions: str = "rw"
    """Of the device cgroup: some of r, w and m."""


@dataclass(frozen=True, slots=True)
class CdiDevice:
    """One device of a claim, as its containers see it. It must change something in them.

    Raises:
        ValueError: with the name or value that CDI does not take.
    """

    name: str
    """The driver's name for it; the file adds what makes it unique."""
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[CdiMount, ...] = ()
    nodes: tuple[CdiNode, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self.name, _NAME, "CDI device name")
        if not (self.env or self.mounts or self.nodes):
            raise ValueError(f"CDI device {self.name} changes nothing in a container; runtimes refuse that")
        for variable, value in self.env.items():
            _check(variable, _VARIABLE, "name of a variable")
            if not value.isprintable():
                raise ValueError(f"{variable}={value!r} has characters that a variable must not have")
        for mount in self.mounts:
            if not mount.host_path:
                raise ValueError(f"the mount at {mount.container_path!r} does not say of what")
            _check_path(mount.container_path)
        for node in self.nodes:
            for path in (node.path, node.host_path or node.path):
                _check_path(path)
            if not node.permissions or not set(node.permissions) <= set(PERMISSIONS):
                raise ValueError(
                    f"{node.path}: permissions {node.permissions!r} are not some of {PERMISSIONS}"
                )
        for key in self.annotations:
            _check(key, _ANNOTATION, "annotation's key")

    @property
    def edits(self) -> dict[str, object]:
        """What is changed in a container, as the file says it."""
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
    """Writes what the containers of a claim get. Done again it changes nothing, unless the file was lost.

    Args:
        directory: ``/var/run/cdi``; made if only it is missing. It is lost with a reboot, so write at each
            prepare.
        vendor_class: ``<vendor>/<class>``, the vendor a domain of yours: ``example.com/gpu``.
        claim_uid: Of the claim.
        devices: At least one, each name once.

    Returns:
        The CDI ids, one per device, in their order.

    Raises:
        OSError: It could not be written; the file is what it was before. Marked as :attr:`Operation.CDI`.
        ValueError: CDI does not take the names.
    """
    path = _path(directory, vendor_class, claim_uid)
    if not devices:
        raise ValueError(f"no device for {path}; runtimes refuse such a file")
    for name, count in Counter(device.name for device in devices).items():
        if count > 1:
            raise ValueError(f"{path}: {count} devices are called {name}")
    names = [_unique(claim_uid, device) for device in devices]
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
    """Removes a claim's file. One that is not there is no error.

    Raises:
        OSError: It could not be removed. Marked as :attr:`Operation.CDI`.
        ValueError: CDI does not take the names.
    """
    path = _path(directory, vendor_class, claim_uid)
    with doing(Operation.CDI, path):
        path.unlink(missing_ok=True)


# --- the format --------------------------------------------------------------------------------------------


def _path(directory: Path, vendor_class: str, claim_uid: str) -> Path:
    _check(vendor_class, _CLASS, "vendor/class of CDI")
    _check(claim_uid, _UID, "claim's UID")
    return directory / f"{vendor_class.replace('/', '-')}_{claim_uid}.json"


def _unique(claim_uid: str, device: CdiDevice) -> str:
    said = json.dumps([device.edits, dict(device.annotations)], sort_keys=True)
    return f"{claim_uid}-{device.name}-{hashlib.sha256(said.encode()).hexdigest()[:DIGEST_CHARS]}"


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


def _check(text: str, pattern: re.Pattern[str], what: str) -> None:
    if not pattern.fullmatch(text):
        raise ValueError(f"{text!r} is no {what}")


def _check_path(path: str) -> None:
    if not path.startswith("/") or ".." in path.split("/") or not path.isprintable():
        raise ValueError(f"{path!r} is no absolute path")


# --- the file ----------------------------------------------------------------------------------------------


def _read(path: Path) -> bytes | None:
    """What is there; None if nothing, or nothing that can be read."""
    try:
        with open(path, "rb", opener=_open_to_read) as file:
            return file.read()
    except OSError:
        return None


def _open_to_read(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _replace(path: Path, data: bytes) -> None:
    """Runtimes look at names that end in .json alone: they see the old file or the new one."""
    path.parent.mkdir(mode=0o755, exist_ok=True)
    put(path, data, new=path.with_name(f".{path.name}.new"), mode=0o644)  # a runtime may not be root
