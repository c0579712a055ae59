"""The kubelet's checkpoint of its CPU manager: which container has which CPUs for itself.

CPUs that a DRA driver gave do not stand in it, nor do those of pods that have them as a whole (the gate
PodLevelResourceManagers). Its checksum is over a Go value's print, and is not verified: a part of a file is
no JSON.

Source: kubelet ``cm/cpumanager/state/checkpoint.go`` as of 1.26 to 1.37; ``entries`` is in all of them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from agent.errors import ProbeError
from agent.model.cpuset import CpuSet, parse_cpus
from agent.system.read_file import ReadError, read_bounded

NAME: Final = "cpu_manager_state"
"""In the kubelet's directory; root's, mode 0600."""
FILE_BYTES: Final = 16 << 20


class _Checkpoint(msgspec.Struct):
    policyName: str
    entries: dict[str, dict[str, str]] | None = None


def read_exclusive(path: Path) -> Mapping[str, Mapping[str, CpuSet]]:
    """CPUs by the pod's UID, as the kubelet has it, and the container's name.

    Args:
        path: :data:`NAME` in the kubelet's directory.

    Raises:
        ProbeError: There is none, or it cannot be read; with the reason.
    """
    try:
        data = read_bounded(path, FILE_BYTES).data
    except ReadError as error:
        raise ProbeError(str(error)) from None
    try:
        return parse_exclusive(data)
    except ValueError as error:
        raise ProbeError(f"{path}: {error}") from None


def parse_exclusive(data: bytes) -> Mapping[str, Mapping[str, CpuSet]]:
    """The same of the file's bytes.

    Raises:
        ValueError: It is no such checkpoint.
    """
    try:
        checkpoint = msgspec.json.decode(data, type=_Checkpoint)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"is no checkpoint of the CPU manager: {error}") from None
    except RecursionError:
        raise ValueError("brackets within brackets without end") from None
    return {
        uid: {name: cpus for name, text in containers.items() if (cpus := parse_cpus(text))}
        for uid, containers in (checkpoint.entries or {}).items()
    }
