"""Reads the GPUs through the native core and through pynvml, for ``scan --backend``.

Either may hang in the driver: the core says so itself, pynvml is then not asked, and if it hangs nevertheless
its thread is left behind.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

from agent.cli.scan.crosscheck import CrossCheck, compare
from agent.errors import ProbeError
from agent.model.source import SourceState
from agent.model.time import NS

if TYPE_CHECKING:
    from agent.config.config import Config
    from agent.model.gpu import GpuSample, GpuSet
    from agent.native.gpus import Gpus
    from agent.sources.nvml_reference import TwinGpu

PERIOD_NS: Final = NS // 10
LIMIT_S: Final = 30.0
"""The driver initialises a GPU that nobody uses in seconds, one after the other."""
STOP_S: Final = 0.5

T = TypeVar("T")


def read_pynvml(config: Config) -> list[TwinGpu]:
    """Every field of every GPU through pynvml.

    Raises:
        ProbeError: NVML cannot be used, or does not answer in 30 s.
    """
    from agent.sources.nvml_reference import read_twin

    return within(LIMIT_S, lambda: read_twin(config.nvml_library, config.sysfs_root))


def cross_check(config: Config) -> CrossCheck:
    """The native core, pynvml and the native core again, compared.

    Raises:
        ProbeError: The core or the kernel refuses, or pynvml hangs.
    """
    from agent.native.gpus import Gpus, GpusOptions

    wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        options = GpusOptions(
            library=config.nvml_library,
            sysfs_root=config.sysfs_root,
            period_ns=PERIOD_NS,
            slow_ns=PERIOD_NS,
            deadline_ns=config.gpu_deadline_ns,
            retry_ns=NS,
        )
        gpus = Gpus(options, wake_fd)
        try:
            gpus.start()
            before = _look(gpus, wake_fd, None)
            if hanging := next(filter(_hangs, before.gpus), None):
                name = hanging.uuid or f"GPU {hanging.index}"
                return CrossCheck(note=f"pynvml was not asked: {name} does not answer {hanging.call}")
            try:
                twin: list[TwinGpu] | str = read_pynvml(config)
            except ProbeError as error:
                twin = str(error)
            return compare(before, twin, _look(gpus, wake_fd, before))
        finally:
            gpus.stop(STOP_S)
    finally:
        os.close(wake_fd)


def _look(gpus: Gpus, wake_fd: int, before: GpuSet | None) -> GpuSet:
    """Every GPU read once more, slow fields too, but for those that hang."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        read = gpus.read()
        if read is not None and _is_complete(read, before):
            return read
        if time.monotonic() > deadline:
            if read is None:
                raise ProbeError(f"the GPUs' threads said nothing in {LIMIT_S:g} s")
            return read
        select.select([wake_fd], [], [], PERIOD_NS / NS / 5)
        with suppress(BlockingIOError):
            os.eventfd_read(wake_fd)


def _is_complete(read: GpuSet, before: GpuSet | None) -> bool:
    if read.nvml.state is SourceState.STARTING or len(read.gpus) < read.count:
        return False
    passes = {gpu.index: _passes(gpu) for gpu in before.gpus} if before else {}
    # One pass may have begun before pynvml was asked; the next one has not.
    wanted = 2 if before else 1
    return all(_hangs(gpu) or _passes(gpu) >= passes.get(gpu.index, 0) + wanted for gpu in read.gpus)


def _hangs(gpu: GpuSample) -> bool:
    return bool(gpu.call and gpu.overdue)


def _passes(gpu: GpuSample) -> int:
    """Passes in which all was read. A lost GPU has none, and counts with those in which it was asked."""
    return gpu.passes if gpu.status else gpu.slow_passes


def within(seconds: float, read: Callable[[], T]) -> T:
    """What a reading says, from a thread that is left behind if it hangs.

    Raises:
        ProbeError: It takes longer.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(read())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="pynvml", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise ProbeError(f"pynvml does not answer in {seconds:g} s, NVML hangs")
    return answers[0]
