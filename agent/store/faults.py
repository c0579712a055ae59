"""State file of GPU faults, and the writer that keeps it up to date without delaying a verdict.

JSON, replaced as a whole (:mod:`agent.store.files`). A change of a fault is written at once, new counts once
a
minute: a flood of events must not cause a thousand writes.
"""

import logging
import threading
from pathlib import Path
from typing import Final

import msgspec
import trio

from agent.model.faults import KnownGpu, PersistentFault, PersistentGpuState
from agent.model.gpu import WHOLE_GPU
from agent.model.health import Severity
from agent.store import files
from agent.store.files import CorruptFile, WriteError, decode_json, encode_json, struct_of

__all__ = [
    "FILE",
    "SIZE_MAX",
    "VERSION",
    "CorruptFile",
    "WriteError",
    "decode",
    "encode",
    "load",
    "save",
]

FILE: Final = "gpu-faults.json"
VERSION: Final = 1
SIZE_MAX: Final = 1 << 20
"""Size limit: hundreds of times the faults of 32 GPUs [bytes]."""
DEBOUNCE_S: Final = 0.2
"""Debounce: changes within this time are written together [s]."""
COUNTS_S: Final = 60.0
"""Interval at which mere counts are written, and at which a failed write is retried [s]."""

log = logging.getLogger(__name__)

_NATURAL: Final = msgspec.Meta(ge=0)
_INSTANCE: Final = msgspec.Meta(ge=0, le=WHOLE_GPU)
_GPU: Final = struct_of(KnownGpu, number=_NATURAL)
_FAULT: Final = struct_of(
    PersistentFault,
    gi=_INSTANCE,
    ci=_INSTANCE,
    times=_NATURAL,
    log_us=_NATURAL,
    severity=msgspec.Meta(ge=int(min(Severity)), le=int(max(Severity))),
)


class _FaultsFile(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    gpus: list[_GPU]  # type: ignore[valid-type]  # made at run time from the model's
    faults: list[_FAULT]  # type: ignore[valid-type]


def load(path: Path) -> tuple[PersistentGpuState, str]:
    """Load the GPU faults. Returns them with the problem of the file, empty if there is none. Raises
    nothing."""
    return files.load(path, SIZE_MAX, decode, PersistentGpuState())


def decode(data: bytes) -> PersistentGpuState:
    """Decode the GPU faults from the content of the state file.

    Raises:
        CorruptFile: The text has the reason and the place in the file.
    """
    file = decode_json(data, _FaultsFile, VERSION)
    memory = PersistentGpuState(
        gpus=tuple(KnownGpu(*msgspec.structs.astuple(gpu)) for gpu in file.gpus),
        faults=tuple(PersistentFault(*msgspec.structs.astuple(fault)) for fault in file.faults),
    )
    numbers = [gpu.number for gpu in memory.gpus]
    for number in numbers:
        if numbers.count(number) > 1:
            raise CorruptFile(f"has {numbers.count(number)} GPUs of number {number}")
    return memory


def encode(memory: PersistentGpuState) -> bytes:
    """Encode GPU faults as the content of the state file."""
    return encode_json(
        {
            "version": VERSION,
            "gpus": [gpu._asdict() for gpu in memory.gpus],
            "faults": [fault._asdict() for fault in memory.faults],
        }
    )


def save(path: Path, memory: PersistentGpuState) -> None:
    """Replace the state file of GPU faults. Blocks on the disk. Raises WriteError if the write fails."""
    files.replace_file(path, encode(memory), SIZE_MAX)


class FaultCheckpointWriter:
    """Background writer of the faults' state file."""

    def __init__(self, path: Path, saved: PersistentGpuState) -> None:
        """Create the writer.

        Args:
            path: The file; its directory is created by the first write.
            saved: Faults that the file contains now.
        """
        self._path = path
        self._saved = saved
        self._newest = saved
        self._changed = trio.Event()
        self._urgent = trio.Event()
        self._writing = threading.Lock()
        self._logged_errno: int | None = None

    def update(self, memory: PersistentGpuState) -> None:
        """Set the GPU faults to be written. Core thread only. Never blocks."""
        self._newest = memory
        self._changed.set()
        if _urgent_part(memory) != _urgent_part(self._saved):
            self._urgent.set()

    async def run(self) -> None:
        """Write changed GPU faults until cancelled. At most one write runs; one that hangs delays the
        next."""
        while True:
            await self._changed.wait()
            with trio.move_on_after(COUNTS_S):
                await self._urgent.wait()
            await trio.sleep(DEBOUNCE_S)
            self._changed, self._urgent = trio.Event(), trio.Event()
            if not await trio.to_thread.run_sync(self._write, abandon_on_cancel=True):
                await trio.sleep(COUNTS_S)
                self._changed.set()
                self._urgent.set()

    def close(self, timeout_s: float) -> bool:
        """Write pending changes. Returns True if written, False if the disk takes longer than `timeout_s`."""
        thread = threading.Thread(target=self._write, name="dh-faults", daemon=True)
        thread.start()
        thread.join(timeout_s)
        return not thread.is_alive()

    def _write(self) -> bool:
        """Write the faults in a thread. An abandoned write of an earlier thread may still hold the lock."""
        with self._writing:
            memory = self._newest
            if memory == self._saved:
                return True
            try:
                save(self._path, memory)
            except WriteError as error:
                if error.errno != self._logged_errno:
                    log.warning(
                        "%s; GPU faults are kept in memory only and are lost on restart (--state-dir)", error
                    )
                self._logged_errno = error.errno
                return False
            self._saved = memory
            self._logged_errno = None
            return True


def _urgent_part(memory: PersistentGpuState) -> object:
    """Return the part of the faults whose change is written at once: everything but counts and times."""
    return memory.gpus, [
        fault._replace(times=0, last_wall_s=0, log_us=0, texts=(), counters=()) for fault in memory.faults
    ]
