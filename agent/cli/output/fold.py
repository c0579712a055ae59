"""What need not be said twice: MIG instances that are as their GPU is, names that count on. Pure.

A node with eight GPUs in seven instances each has 64 devices, and one fault of a GPU is eight verdicts.
People are told of it once; programs (``-o json``, the kubelet) of each device.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from agent.cli.output.text import clean, word_of

if TYPE_CHECKING:
    from agent.model.health import DeviceHealth

INSTANCE: Final = re.compile(r"(?P<gpu>.+)-mig-\d+-\d+")
"""A MIG instance's name holds that of its GPU."""

NUMBERED: Final = re.compile(r"(?P<stem>.*\D)(?P<number>0|[1-9]\d{0,8})")

FEWEST: Final = 3
"""Names in a row that are written as a range; two are as short in full."""


def format_instances(folded: int, instances: int) -> str:
    """``and its 7 instances``, ``and 6 of its 7 instances``; empty if none is folded."""
    if not folded:
        return ""
    many = f"{instances} instances" if instances > 1 else "instance"
    return f"and its {many}" if folded == instances else f"and {folded} of its {many}"


class Fold(NamedTuple):
    """A device that is shown, and those that are shown by it."""

    device: DeviceHealth
    words: str
    """Which of its instances are as it is, see :func:`format_instances`."""


def fold_instances(devices: Sequence[DeviceHealth]) -> list[Fold]:
    """The devices without the MIG instances that only repeat their GPU."""
    by_name = {device.key: device for device in devices}
    shown: list[DeviceHealth] = []
    folded: Counter[tuple[str, str, str]] = Counter()
    instances: Counter[tuple[str, str, str]] = Counter()
    for device in devices:
        key = (device.driver, device.pool, gpu_of(device.device))
        gpu = by_name.get(key)
        instances[key] += gpu is not None
        if gpu and _repeats(device, gpu):
            folded[key] += 1
        else:
            shown.append(device)
    words = [format_instances(folded[device.key], instances[device.key]) for device in shown]
    return [Fold(*pair) for pair in zip(shown, words, strict=True)]


def gpu_of(name: str) -> str:
    """The name of the GPU that the MIG instance of this name is a part of; empty for any other device."""
    found = INSTANCE.fullmatch(name)
    return found["gpu"] if found else ""


def _repeats(instance: DeviceHealth, gpu: DeviceHealth) -> bool:
    return word_of(instance.severity) == word_of(gpu.severity) and _said(instance) <= _said(gpu)


def _said(device: DeviceHealth) -> set[tuple[str, str]]:
    """What is known of a device: its causes or, on a driver's socket, the message."""
    if device.causes:
        return {(cause.code, cause.evidence) for cause in device.causes}
    return {("", device.message)} if device.message else set()


def fold_names(names: Iterable[str]) -> str:
    """``cpus, gpu-0 to gpu-7, kmsg``: names that differ by a number that counts on are a range."""
    parts: list[str] = []
    # In a run of names that count on, the number less the place stays the same.
    for _, group in groupby(enumerate(names), key=lambda item: _run_of(item[1], item[0])):
        run = [name for _, name in group]
        parts += [f"{run[0]} to {run[-1]}"] if len(run) >= FEWEST else run
    return ", ".join(parts)


def _run_of(name: str, place: int) -> tuple[str, int]:
    found = NUMBERED.fullmatch(name)
    return (found["stem"], int(found["number"]) - place) if found else (name, -place)


def identity_of(device: DeviceHealth) -> str:
    """What to look for in the rack, or to type behind ``nvidia-smi -i``; empty if nobody told."""
    known = dict(device.attributes)
    serial = known.get("serial")
    parts = [known.get(name) for name in ("profile", "product", "uuid", "pciBusId")]
    return clean(", ".join(filter(None, [*parts, serial and f"serial {serial}"])))
