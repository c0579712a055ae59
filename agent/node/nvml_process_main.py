"""Main program of the process that calls NVML: the C core's GPU threads, and pynvml for the inventory.

The parent is :mod:`agent.node.nvml_process`. Its messages on the socket pair are, in this order: the options,
as JSON; then any number of the requests COUNT (count the GPUs) and INVENTORY (read their attributes). The end
of the connection ends the process. A call of pynvml that hangs delays only the next message, because the GPU
threads continue.
"""

import contextlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import Final, NoReturn

from agent.errors import DrahealthError
from agent.model.gpu import GpuAttributes, GpuField, GpuWakeCondition, GpuWakeMode
from agent.native.gpu_watch import GpuWatch, GpuWatchOptions, confine
from agent.sources.nvml import read_gpu_inventory

DESCRIPTORS: Final = (3, 4, 5)
"""Numbers of the process's descriptors: the socket pair, the shared memory, the parent's eventfd."""
COUNT: Final = b"count"
"""Message of the parent process: count the GPUs now. It has no answer."""
INVENTORY: Final = b"inventory"
"""Message of the parent process: read the inventory of the GPUs.

The answer is that of :func:`encode_inventory`, or an error text.
"""
MESSAGE_MAX: Final = 128 << 10
"""Longest message on the socket pair [bytes].

The inventory of 32 GPUs with 7 MIG instances each has less than half of it.
"""
STOP_S: Final = 0.3
EXIT_FAILED: Final = 70
OOM_SCORE: Final = b"500"  # the kernel's OOM killer shall choose this process, and not the agent


def encode_options(options: GpuWatchOptions) -> bytes:
    """Encode the options of the GPU watch as JSON, for the NVML process."""
    wakes = [
        (wake.field.value, wake.mode.name, wake.threshold, wake.window_ns, wake.limit and wake.limit.value)
        for wake in options.wakes
    ]
    return json.dumps(
        {
            "library": options.library,
            "sysfs_root": str(options.sysfs_root),
            "period_ns": options.period_ns,
            "slow_ns": options.slow_ns,
            "deadline_ns": options.deadline_ns,
            "open_deadline_ns": options.open_deadline_ns,
            "retry_ns": options.retry_ns,
            "cpu_budget_ns": options.cpu_budget_ns,
            "wakes": wakes,
        }
    ).encode()


def decode_options(message: bytes) -> GpuWatchOptions:
    """Decode the options of the GPU watch from the JSON of :func:`encode_options`."""
    values = json.loads(message)
    wakes = [
        GpuWakeCondition(GpuField(field), GpuWakeMode[mode], threshold, window_ns, limit and GpuField(limit))
        for field, mode, threshold, window_ns, limit in values.pop("wakes")
    ]
    return GpuWatchOptions(**{**values, "sysfs_root": Path(values["sysfs_root"]), "wakes": wakes})


def encode_inventory(gpus: tuple[GpuAttributes, ...]) -> bytes:
    """Encode the attributes of GPUs as JSON, as the answer to the request INVENTORY."""
    return json.dumps([gpu._asdict() for gpu in gpus]).encode()


def decode_inventory(answer: bytes) -> tuple[GpuAttributes, ...]:
    """Decode the attributes of GPUs from the NVML process's answer to the request INVENTORY.

    Raises:
        OSError: The answer is an error text, or does not have the form of :func:`encode_inventory`.
    """
    if not answer:
        raise OSError("it ended")
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        raise OSError(f"the NVML process sent an invalid answer: {len(answer)} bytes are not JSON") from None
    if isinstance(found, str):
        raise OSError(found)
    try:
        return tuple(
            GpuAttributes(**{**gpu, "profiles": tuple((uuid, name) for uuid, name in gpu["profiles"])})
            for gpu in found
        )
    except (TypeError, ValueError, KeyError) as error:
        raise OSError(f"the NVML process sent an invalid answer: {error}") from None


def main() -> NoReturn:
    """Run the GPU threads and answer messages until the parent process closes the connection or ends."""
    try:
        _run(int(sys.argv[1]), int(sys.argv[2]))
    except (DrahealthError, OSError, MemoryError) as error:
        _report(str(error) or "out of memory")
        os._exit(EXIT_FAILED)
    os._exit(0)  # a thread may hang in the driver, and the library's own exit handlers may hang too


def _report(text: str) -> None:
    sys.stderr.write(f"drahealth: NVML process: {text}\n")
    sys.stderr.flush()


def _run(parent: int, memory_max: int) -> None:
    try:
        confine(parent, memory_max)
    except ProcessLookupError:
        return  # the parent has ended already
    except OSError as error:  # a filter of system calls may refuse it: better unconfined than no GPU
        _report(f"not confined: {error}; it keeps the rights of the agent")
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_bytes(b"drahealth-nvml")
        Path("/proc/self/oom_score_adj").write_bytes(OOM_SCORE)
    channel_fd, memory_fd, wake_fd = DESCRIPTORS
    for fd in DESCRIPTORS:
        os.set_inheritable(fd, False)  # the library may start programs
    channel = socket.socket(fileno=channel_fd)
    options = decode_options(channel.recv(MESSAGE_MAX))
    watch = GpuWatch(options, wake_fd, memory_fd)
    watch.start()
    while message := channel.recv(MESSAGE_MAX):
        if message == COUNT:
            watch.request_count()
        elif message == INVENTORY:
            channel.send(_inventory(options))
    watch.stop(STOP_S)


def _inventory(options: GpuWatchOptions) -> bytes:
    try:
        return encode_inventory(read_gpu_inventory(options.library, options.sysfs_root))
    except (DrahealthError, OSError) as error:
        return json.dumps(str(error)).encode()
