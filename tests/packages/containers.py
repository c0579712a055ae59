"""Containers of an image, started by this machine's OCI runtime with the defaults of containerd."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents import run_command

RUNTIMES = ("crun", "runc")
MASKED = [
    "/proc/asound", "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
    "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware", "/sys/devices/virtual/powercap",
]  # fmt: skip
READONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]
PSEUDO_DEVICES = [
    {"allow": True, "type": "c", "major": major, "minor": minor, "access": "rwm"}
    for major, minor in ((1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0))
]
NOSUID = ["nosuid", "noexec", "nodev"]


@dataclass(frozen=True)
class Mount:
    """Mount of a container: a directory of the machine, or an empty one in memory."""

    target: str
    source: Path | None
    is_readonly: bool = False
    is_slave: bool = False
    """Later mounts of the machine are seen in the container."""

    def as_oci(self) -> dict[str, Any]:
        mode = "ro" if self.is_readonly else "rw"
        if self.source is None:
            return {
                "destination": self.target,
                "type": "tmpfs",
                "source": "tmpfs",
                "options": [*NOSUID, mode],
            }
        propagation = "rslave" if self.is_slave else "rprivate"
        options = ["rbind", propagation, mode]
        return {"destination": self.target, "type": "bind", "source": str(self.source), "options": options}


@dataclass(frozen=True)
class Process:
    """Process of a container, with the identity and the permissions that it has."""

    args: Sequence[str]
    uid: int
    gid: int
    capabilities: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def oci_config(root: Path, process: Process, mounts: Sequence[Mount]) -> dict[str, Any]:
    """Return the configuration of a container with a read-only root and a network of its own."""
    sets = ("bounding", "effective", "permitted")
    return {
        "ociVersion": "1.0.2",
        "root": {"path": str(root), "readonly": True},
        "hostname": "container",
        "process": {
            "args": list(process.args),
            "cwd": "/",
            "env": [f"{name}={value}" for name, value in process.env.items()],
            "user": {"uid": process.uid, "gid": process.gid},
            "capabilities": {name: list(process.capabilities) for name in sets},
            "noNewPrivileges": True,
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": NOSUID},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": [*NOSUID, "mode=1777"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": [*NOSUID, "ro"]},
            *(mount.as_oci() for mount in sorted(mounts, key=lambda mount: mount.target.count("/"))),
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")],
            "resources": {"devices": [{"allow": False, "access": "rwm"}, *PSEUDO_DEVICES]},
            "maskedPaths": MASKED,
            "readonlyPaths": READONLY,
        },
    }


@functools.cache
def runtime(root: Path) -> str | None:
    """Return the first OCI runtime that can start the image's command here."""
    process = Process(["/opt/drahealth/bin/drahealth", "--version"], 65532, 65532, env={})
    for name in RUNTIMES:
        if shutil.which(name) is None:
            continue
        with bundle(oci_config(root, process, ())) as directory:
            command = [name, "run", "--bundle", str(directory), f"drahealth-{uuid.uuid4().hex}"]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return name
    return None


@contextmanager
def bundle(config: Mapping[str, Any]) -> Iterator[Path]:
    """Make a bundle, a directory with the configuration of a container."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        yield Path(directory)


@dataclass(frozen=True)
class Container:
    """Running container."""

    runtime: str
    name: str
    process: subprocess.Popen[str]

    def run(self, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program of the image in the container."""
        return run_command(*args, program=(self.runtime, "exec", self.name), **options)


@contextmanager
def run_container(runtime: str, config: Mapping[str, Any]) -> Iterator[Container]:
    """Start a container; kill and delete it at the end. Its output is that of ``Container.process``."""
    name = f"drahealth-{uuid.uuid4().hex}"
    with bundle(config) as directory:
        command = [runtime, "run", "--bundle", str(directory), name]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            yield Container(runtime, name, process)
        finally:
            subprocess.run([runtime, "delete", "--force", name], capture_output=True, check=False)
            process.communicate()
