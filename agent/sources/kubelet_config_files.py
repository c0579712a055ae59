"""Reader of the kubelet's configuration: from the files and flags of its process, or from a given file.

A process named kubelet shows its flags, which take precedence over its files, and its own view of the file
system. Kubelets that run inside another program, such as that of k3s, show neither. Blocks on the disk.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from agent.cgroup_audit.kubelet_config import (
    DIRECTORY_FLAG,
    FILE_FLAG,
    KubeletConfig,
    merge_configs,
    parse_flags,
    parse_kubelet_config,
    with_flags,
)
from agent.errors import PermissionDeniedError, UsageError
from agent.model.json_values import JsonObject
from agent.sources.kube_object_file import parse_documents
from agent.system.files import ReadError, read_bounded

COMMAND: Final = "kubectl get --raw /api/v1/nodes/NODE/proxy/configz"
"""Command that prints a kubelet's configuration in effect, which an operator can store in a file."""
_FILE_BYTES: Final = 4 << 20
_ARGUMENTS_BYTES: Final = 1 << 20
_NAME: Final = "kubelet"


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
    """Return a kubelet's configuration: its file, then its drop-in files in order, then its flags.

    Args:
        process: Directory of the kubelet's process in procfs.
    """
    config: JsonObject = {}
    if file := flags.get(FILE_FLAG):
        config = _read_document(_seen_by(process, file))
    if directory := flags.get(DIRECTORY_FLAG):
        at = _seen_by(process, directory)
        try:
            names = sorted(name for name in os.listdir(at) if name.endswith(".conf"))
        except OSError as error:
            raise ValueError(f"directory {at}: cannot be listed: {error.strerror}") from None
        for name in names:
            config = merge_configs(config, _read_document(at / name))
    return with_flags(config, flags)


def _seen_by(process: Path, path: str) -> Path:
    """Return where this process can read a path of another process: below its root or working directory.

    Args:
        process: Directory of the other process in procfs.
    """
    return process / "root" / path.lstrip("/") if path.startswith("/") else process / "cwd" / path


def _read_document(path: Path) -> JsonObject:
    documents = parse_documents(read_bounded(path, _FILE_BYTES).data)
    if len(documents) != 1 or not isinstance(documents[0], Mapping):
        raise ValueError(f"file {path}: must contain exactly one object")
    return documents[0]
